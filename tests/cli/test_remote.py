"""`remote`: what is printed, asked for and refused, with which code."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.cli.running import Here, Smartcache
from tests.hub.bundles import UNET, add_repo, everything, two_repos
from tests.hub.clients import sha256, weights
from tests.hub_server import Hub

REPOS = ("org/first", "org/second", "datasets/org/data")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    path = tmp_path / "from"
    two_repos(path)
    return path


@pytest.fixture
def there(tmp_path: Path) -> Path:
    return tmp_path / "to"


@pytest.fixture
def share(sc: Here, tmp_path: Path) -> Path:
    """The folder of a remote called nas."""
    sc("remote", "add", "nas", "share")
    return tmp_path / "share"


class TestRemotes:
    def test_a_folder_is_added_listed_and_forgotten(self, sc: Here, tmp_path: Path) -> None:
        done = sc("remote", "add", "nas", tmp_path / "share")
        assert done.stdout == f"Added nas: file://{tmp_path}/share\n"
        assert "two machines that push at once lose nothing" in done.stderr
        assert sc("remote", "ls", "-q").ids == ["nas"]
        (line,) = sc("remote", "ls").stdout.splitlines()[1:]
        assert line.split() == ["nas", "safe", "yes", f"file://{tmp_path}/share"]
        (document,) = sc("remote", "ls", "--json").json
        assert document["url"] == f"file://{tmp_path}/share"
        assert document["creates"] is document["ranges"] is document["writes"] is True
        assert "stays there" in sc("remote", "rm", "nas").stdout
        assert "There are no remotes" in sc("remote", "ls").stdout
        assert (tmp_path / "share" / "smartcache.json").exists()

    def test_what_is_wrong_is_refused_with_the_way_to_do_it(self, sc: Here, share: Path) -> None:
        """A secret is not kept."""
        add = ("remote", "add", "s3", "s3://bucket", "--option")
        done = sc(*add, "aws_secret_access_key=x", code=2)
        assert "holds a secret: it is not kept" in done.stderr
        assert "AWS_ACCESS_KEY_ID" in done.stderr
        assert "'region' is not KEY=VALUE" in sc(*add, "region", code=2).stderr
        assert sc("remote", "ls", "-q").ids == ["nas"]
        done = sc("remote", "push", "nsa", "org/name", code=2)
        assert done.stderr == "Error: There is no remote 'nsa'\nHint: There is nas.\n"
        for word in ("push", "pull"):
            assert sc("remote", word, "nas", code=2).error.startswith(f"Say what to {word}.")
        share.rename(share.with_name("away"))
        done = sc("remote", "pull", "nas", "org/first", code=1)
        assert f"{share} is not there" in done.stderr
        assert "mounted" in done.stderr

    def test_without_obstore_it_is_said_what_to_install(
        self, sc: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "obstore", None)
        done = sc("remote", "add", "nas", tmp_path / "share", code=2)
        assert "pip install 'smartcache-hub[remote]'" in done.stderr


@pytest.mark.usefixtures("share")
class TestMoving:
    def test_repos_are_pushed_and_pulled(self, sc: Here, cache: Path, there: Path) -> None:
        done = sc("remote", "push", "nas", *REPOS, "--cache-dir", cache)
        first = done.stdout.splitlines()[0]
        assert first.startswith("Pushed repo model/org/first: 6 objects, ")
        again = sc("remote", "push", "nas", *REPOS, "--cache-dir", cache).stdout
        assert again.startswith("Pushed repo model/org/first: 0 objects, 0 B; ")
        assert sc("remote", "ls", "nas", "-q").ids == [
            "dataset/org/data",
            "model/org/first",
            "model/org/second",
        ]
        done = sc("remote", "pull", "nas", *REPOS, "--cache-dir", there)
        assert done.stdout.startswith("Pulled repo model/org/first: ")
        assert everything(there) == everything(cache)

    def test_a_dry_run_says_how_much_would_be_moved(
        self, sc: Here, share: Path, cache: Path, there: Path
    ) -> None:
        done = sc("remote", "push", "nas", "org/first", "--cache-dir", cache, "--dry-run")
        assert "Would push 361 KB to nas." in done.stdout
        assert not (share / "objects").exists()
        sc("remote", "push", "nas", "org/first", "--cache-dir", cache)
        words = ("remote", "pull", "nas", "org/first", "--cache-dir", there, "-n")
        (item,) = sc(*words, "--json").json["items"]
        assert (item["kind"], item["name"], item["moved_size"]) == ("repo", "model/org/first", 0)
        assert item["size"] > 360_000

    def test_what_is_not_there_is_an_error(self, sc: Here, cache: Path) -> None:
        sc("remote", "push", "nas", "org/first", "--cache-dir", cache)
        done = sc("remote", "pull", "nas", "org/frist", code=1)
        assert "has no repo, blob, set or dataset 'org/frist'" in done.stderr
        assert "It has model/org/first." in done.stderr
        done = sc("remote", "push", "nas", "nothing", "--cache-dir", cache, code=1)
        assert "There is no repo, blob, set or dataset 'nothing' here" in done.stderr

    def test_a_branch_that_is_elsewhere_stays_unless_it_may_move(
        self, sc: Here, cache: Path, there: Path
    ) -> None:
        old = add_repo(there, "org/first", {"config.json": b"old"})
        sc("remote", "push", "nas", "org/first", "--cache-dir", cache)
        ref = there / "models--org--first" / "refs" / "main"
        done = sc("remote", "pull", "nas", "org/first", "--cache-dir", there)
        assert "--update-refs moves it" in done.stderr
        assert ref.read_text() == old
        sc("remote", "pull", "nas", "org/first", "--cache-dir", there, "--update-refs")
        assert ref.read_text() != old


class TestUpkeep:
    @pytest.fixture
    def damaged(self, sc: Here, share: Path, cache: Path) -> Path:
        """An object with a wrong byte."""
        sc("remote", "push", "nas", *REPOS, "--cache-dir", cache)
        (path,) = [p for p in (share / "objects").rglob("*") if p.is_file() and is_unet(p)]
        path.write_bytes(UNET[::-1])
        return path

    def test_damage_is_found_removed_and_pushed_again(
        self, sc: Here, damaged: Path, cache: Path
    ) -> None:
        done = sc("remote", "verify", "nas", code=3)
        assert f"damaged {damaged.name[:12]} (repos/dataset/org/data, repos/" in done.stdout
        assert sc("remote", "verify", "nas", "--fast").stdout.endswith("No damage was found.\n")
        document = sc("remote", "verify", "nas", "--json", code=3).json
        assert [each["digest"] for each in document["findings"]] == [damaged.name]
        sc("remote", "verify", "nas", "--repair", "-y", code=3)
        sc("remote", "push", "nas", *REPOS, "--cache-dir", cache)
        assert "No damage was found." in sc("remote", "verify", "nas").stdout
        assert is_unet(damaged)

    def test_what_is_not_needed_goes_after_a_question(
        self, sc: Here, share: Path, cache: Path
    ) -> None:
        sc("remote", "push", "nas", *REPOS, "--cache-dir", cache)
        assert "Nothing to remove" in sc("remote", "gc", "nas", "--older-than", "0s").stdout
        for path in (share / "documents/repos/models--org--second").iterdir():
            path.unlink()
        done = sc("remote", "gc", "nas")
        assert "Nothing to remove" in done.stdout
        assert "is younger than" in done.stderr
        done = sc("remote", "gc", "nas", "--older-than", "0s", "--dry-run")
        assert done.stdout.startswith("Would remove ")
        sc("remote", "gc", "nas", "--older-than", "0s", code=1)  # there is nobody to ask
        document = sc("remote", "gc", "nas", "--older-than", "0s", "-y", "--json").json
        assert document["removed"] > 0
        assert document["freed_size"] == document["planned_size"]
        assert "No damage was found." in sc("remote", "verify", "nas").stdout


def plant_odd_things(share: Path, elsewhere: Path) -> set[Path]:
    """Put what is not of smartcache between its files, all of it old; return what it is."""
    names = [b"Track#1", b"two\nlines", b"\xff\xfe", b"x" * 255, b"#", b"a b#2"]
    planted: set[Path] = set()
    for folder in ("", "objects", "objects/ab", "names/sha256", "documents", "documents/repos",
                   "documents/repos/models--org--first", "music"):  # fmt: skip
        (share / folder).mkdir(parents=True, exist_ok=True)
        planted |= {share / folder / os.fsdecode(name) for name in names}
    elsewhere.mkdir()
    planted |= {elsewhere / f"{pair}{'0' * 62}" for pair in ("cd", "ce")}
    planted |= {
        share / "objects" / "ab" / f"{'cd' * 32}",  # of an HF cache
        share / "objects" / "ab" / f"{'cd' * 32}#1",
        share / "objects" / f"{'ab' * 32}#1",
        share / "music" / f"{'ab' * 32}#1",
        share / "names" / "sha256" / "ab" / "ab",
        share / "names" / "md5" / "ab" / f"{'ab' * 16}",
    }
    for path in planted:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(path.name[:3].encode("utf-8", "surrogateescape"))
    links = [share / "objects" / "cd", share / "names" / "git-sha1", share / "linked"]
    for link in links:
        link.symlink_to(elsewhere)
    (share / "objects" / "ce").mkdir()
    alias = share / "objects" / "ce" / f"{'ce' * 32}"
    alias.symlink_to(elsewhere / f"ce{'0' * 62}")
    fifo = share / "objects" / "ce" / f"{'ce' * 31}00"
    os.mkfifo(fifo)
    for path in {*planted, *links, alias, fifo}:
        os.utime(path, (1e9, 1e9), follow_symlinks=False)
    return {*planted, *links, alias, fifo}


def snapshot(*folders: Path) -> dict[Path, bytes]:
    """What is below some folders, as far as it can be read."""
    found = {}
    for folder in folders:
        for root, names, files in os.walk(folder):
            for path in (Path(root, name) for name in (*names, *files)):
                if path.is_symlink():
                    found[path] = os.fsencode(os.readlink(path))
                else:
                    found[path] = path.read_bytes() if path.is_file() else b""
    return found


class TestWhatIsNotOurs:
    def test_gc_removes_nothing_of_others_and_names_it(
        self, sc: Here, share: Path, cache: Path, tmp_path: Path
    ) -> None:
        sc("remote", "push", "nas", *REPOS, "--cache-dir", cache)
        planted = plant_odd_things(share, tmp_path / "elsewhere")
        half = share / "objects" / "ab" / f"{'ab' * 32}#12"
        half.write_bytes(b"half")
        os.utime(half, (1e9, 1e9))
        before = snapshot(share, tmp_path / "elsewhere")
        document = sc("remote", "gc", "nas", "--older-than", "1d", "-y", "--json").json
        after = snapshot(share, tmp_path / "elsewhere")
        assert before.keys() - after.keys() == {half}
        assert after == {path: data for path, data in before.items() if path != half}
        inside = {
            each
            for each in planted
            if each.is_relative_to(share) and share / "music" not in each.parents
        }
        found = {share / each for each in document["foreign"]}
        assert {*inside, share / "music", share / "names" / "md5"} - {
            each for each in inside if each.parent.parent.name == "md5"
        } == found
        shown = sc("remote", "gc", "nas").stderr
        assert "Not made by smartcache, so not touched: " in shown
        assert "--json has all" in shown

    def test_odd_names_stop_no_command(
        self, sc: Here, share: Path, cache: Path, there: Path, tmp_path: Path
    ) -> None:
        plant_odd_things(share, tmp_path / "elsewhere")
        assert sc("remote", "add", "nas", share).code == 0
        sc("remote", "push", "nas", *REPOS, "--cache-dir", cache)
        assert len(sc("remote", "ls", "nas", "-q").ids) == 3
        sc("remote", "pull", "nas", *REPOS, "--cache-dir", there)
        assert everything(there) == everything(cache)
        assert "No damage was found." in sc("remote", "verify", "nas").stdout
        assert "Nothing to remove" in sc("remote", "gc", "nas").stdout
        sc("remote", "rm", "nas")

    @pytest.mark.parametrize("kind", ["fifo", "symlink"])
    @pytest.mark.parametrize("what", ["smartcache.json", "object", "document", "documents"])
    def test_a_file_that_is_none_is_named_and_never_waited_for(
        self, sc: Here, share: Path, cache: Path, there: Path, tmp_path: Path, what: str, kind: str
    ) -> None:
        sc("remote", "push", "nas", "org/first", "--cache-dir", cache)
        places = {
            "smartcache.json": share / "smartcache.json",
            "object": next(p for p in (share / "objects").rglob("*") if p.is_file() and is_unet(p)),
            "document": next((share / "documents" / "repos" / "models--org--first").iterdir()),
            "documents": share / "documents" / "repos",
        }
        path = places[what]
        path.rename(tmp_path / "original")
        if kind == "fifo":
            os.mkfifo(path)
        else:
            path.symlink_to(tmp_path / "original")
        commands: dict[str, tuple[str | Path, ...]] = {
            "add": (share,), "ls": (), "verify": (), "gc": ("-y", "--older-than", "0s"),
            "push": ("org/first", "--cache-dir", cache),
            "pull": ("org/first", "--cache-dir", there),
        }  # fmt: skip
        unread = {
            "smartcache.json": (), "object": ("add", "ls", "gc"), "document": ("add", "ls"),
        }.get(what, ("add",))  # fmt: skip
        before = snapshot(share)
        for word, rest in commands.items():
            is_found = word == "verify" and what in ("object", "document")
            code = 0 if word in unread else 3 if is_found else 1
            done = sc("remote", word, "nas", *rest, code=code)
            if code:
                assert f"{path} is not a" in (done.stdout if is_found else done.error)
        assert snapshot(share) == before

    def test_one_document_that_cannot_be_read_stops_nothing_else(
        self, sc: Here, share: Path, cache: Path, there: Path
    ) -> None:
        sc("remote", "push", "nas", "org/first", "--cache-dir", cache)
        (share / "documents/datasets").mkdir()
        (share / "documents/datasets/etc").symlink_to("/etc")
        (share / "documents/sets/a.b").mkdir(parents=True)
        (share / "documents/sets/a.b/00000001.json").write_text("[[[[")
        before = snapshot(share)
        done = sc("remote", "ls", "nas")
        assert "org/first" in done.stdout
        assert f"Warning: {share}/documents/datasets/etc is not a folder" in done.stderr
        sc("remote", "pull", "nas", "org/first", "--cache-dir", there)
        for more in ((), ("--repair", "-y")):
            assert "datasets/etc" in sc("remote", "verify", "nas", *more, code=3).stdout
        assert (share / "documents/datasets/etc").is_symlink()
        (share / "documents/sets/a.b/00000001.json").write_text("[[[[")
        done = sc("remote", "gc", "nas", "-y", "--older-than", "0s", code=1)
        assert "nothing is removed" in done.error
        assert snapshot(share) == before

    def test_a_folder_of_others_does_not_become_a_remote(self, sc: Here, tmp_path: Path) -> None:
        folder = tmp_path / "music"
        (folder / "objects").mkdir(parents=True)
        before = snapshot(folder)
        done = sc("remote", "add", "nas", folder, code=1)
        assert f"{folder} is neither empty nor a smartcache remote" in done.error
        assert done.hint == f"Give an empty or new folder, such as {folder}/smartcache."
        assert snapshot(folder) == before
        assert sc("remote", "ls", "-q").ids == []
        sc("remote", "add", "nas", folder / "smartcache")
        (tmp_path / "link").symlink_to(folder / "smartcache")
        sc("remote", "add", "again", tmp_path / "link")
        (folder / "empty").mkdir()
        sc("remote", "add", "empty", folder / "empty")


def is_unet(path: Path) -> bool:
    return sha256(path.read_bytes()) == sha256(UNET)


class TestDownload:
    FILES = {"config.json": b"{}", "model.safetensors": weights(1)}  # noqa: RUF012

    @pytest.fixture
    def env(self, program: Smartcache, hub: Hub, tmp_path: Path) -> dict[str, str]:
        """Another machine than the one that has pushed."""
        hub.add("org/name", self.FILES)
        first = {**hub.environment, "HF_HUB_CACHE": str(tmp_path / "first")}
        program("remote", "add", "nas", tmp_path / "share")
        program("download", "org/name", env=first)
        program("remote", "push", "nas", "org/name", env=first)
        hub.requests.clear()
        return {
            **hub.environment,
            "HF_HUB_CACHE": str(tmp_path / "second"),
            "SMARTCACHE_HOME": str(tmp_path / "second-store"),
        }

    def test_the_plan_says_what_comes_from_the_tier(
        self, program: Smartcache, hub: Hub, env: dict[str, str]
    ) -> None:
        done = program("download", "org/name", env=env)
        assert "tier    100 KB  model.safetensors  the tier nas" in done.stderr
        assert "0 B to fetch; 100 KB to come from tiers." in done.stderr
        assert "Fetched 0 B; 100 KB came from tiers." in done.stderr
        third = {name: env[name] + "-third" for name in ("HF_HUB_CACHE", "SMARTCACHE_HOME")}
        document = program("download", "org/name", "--json", env={**env, **third}).json
        sources = [(each["source"], each["origin"]) for each in document["files"]]
        assert sources == [("tier", "nas")] * 2
        assert document["tier_size"] == document["taken_size"] == 100_002
        assert document["fetched_size"] == 0
        assert hub.requests.gets() == []

    def test_without_the_hub_a_repo_comes_from_the_tier(
        self, program: Smartcache, hub: Hub, env: dict[str, str]
    ) -> None:
        hub.close()
        done = program("download", "org/name", env={**env, "HF_HUB_OFFLINE": "1"})
        assert "comes from the tier nas: the Hub cannot be asked" in done.stderr
        assert sorted(os.listdir(done.ids[0])) == sorted(self.FILES)

    def test_a_repo_that_the_hub_does_not_have_comes_from_the_tier(
        self, program: Smartcache, hub: Hub, env: dict[str, str]
    ) -> None:
        hub.repositories.clear()
        done = program("download", "org/name", env=env)
        assert sorted(os.listdir(done.ids[0])) == sorted(self.FILES)
