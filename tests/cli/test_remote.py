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
