from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from tests.api import Store
from tests.cli.running import Here, Smartcache
from tests.store.files import OTHER, WEIGHTS, digest_of, inode_of, snapshot, write

DIGEST, SMALL = digest_of(WEIGHTS), digest_of(OTHER)


@pytest.fixture
def filled(sc: Here, models: Path) -> Here:
    sc("add", models / "a.safetensors", models / "sub/c.gguf", "--no-pin")
    return sc


def blob(home: Path, digest: str = DIGEST) -> Path:
    return home / "blobs" / digest[:2] / digest


class TestDigests:
    @pytest.mark.parametrize("text", [DIGEST, DIGEST[:12], DIGEST[:4], DIGEST.upper()])
    def test_may_be_shortened(self, text: str, filled: Here) -> None:
        assert filled("pin", "-q", text).ids == [DIGEST]

    def test_may_be_given_as_another_hash(self, sc: Here, models: Path, home: Path) -> None:
        with Store(home) as store:
            store.put_file(models / "a.safetensors", algorithms=["sha256"])
        sha256 = hashlib.sha256(WEIGHTS).hexdigest()
        assert sc("pin", "-q", f"sha256:{sha256}").ids == [DIGEST]

    @pytest.mark.parametrize("name", ["pin", "unpin", "rm"])
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("zzzz", "'zzzz' is not a digest"),
            ("12", "'12' is not a digest"),
            ("0" * 64, "No blob"),
            ("sha256:12", "'12' is not a sha256 hash"),
            ("md5:" + "0" * 32, "'md5' is not a hash algorithm"),
        ],
    )
    def test_a_bad_one_changes_nothing(
        self, name: str, text: str, message: str, filled: Here, home: Path
    ) -> None:
        options = ["-y"] if name == "rm" else []
        done = filled(name, DIGEST, text, *options, code=1)
        assert message in done.error
        assert done.hint
        assert blob(home).exists()
        assert filled.digests("--filter", "pinned=yes") == []

    def test_an_ambiguous_one_names_what_it_may_mean(self, sc: Here, tmp_path: Path) -> None:
        made: dict[str, str] = {}
        for number in range(5000):
            data = f"file {number}".encode()
            digest = digest_of(data)
            if digest[:4] in made:
                break
            made[digest[:4]] = digest
            write(tmp_path / f"{digest}.txt", data)
        twins = [made[digest[:4]], digest]
        write(tmp_path / f"{digest}.txt", data)
        sc("add", *(f"{each}.txt" for each in twins))
        done = sc("rm", "-y", digest[:4], code=1)
        assert "several digests" in done.error
        assert all(each[:16] in done.hint for each in twins)

    @pytest.mark.parametrize("name", ["pin", "unpin", "rm", "link"])
    def test_there_must_be_one(self, name: str, sc: Here) -> None:
        assert "Missing argument 'DIGEST" in sc(name, code=2).error

    @pytest.mark.parametrize("words", [["pin", "ab12"], ["rm", "ab12"], ["link", "ab12", "x"]])
    def test_without_a_store_nothing_is_made(self, words: list[str], sc: Here, home: Path) -> None:
        assert f"There is no store at {home} yet" in sc(*words, code=1).error
        assert not home.exists()


class TestLink:
    def test_makes_the_best_kind_of_link(self, filled: Here, tmp_path: Path) -> None:
        target = tmp_path / "x.safetensors"
        done = filled("link", DIGEST, target)
        assert target.read_bytes() == WEIGHTS
        assert str(target) in done.stdout
        document = filled("link", DIGEST, target, "--json").json
        assert document["path"] == str(target)
        assert document["kind"] in ("hardlink", "reflink")

    @pytest.mark.parametrize("kind", ["hardlink", "symlink", "copy"])
    def test_makes_the_kind_that_was_asked_for(
        self, kind: str, filled: Here, home: Path, tmp_path: Path
    ) -> None:
        target = tmp_path / "x.pt"
        assert filled("link", DIGEST, target, "--kind", kind, "--json").json["kind"] == kind
        assert target.is_symlink() == (kind == "symlink")
        assert (os.stat(target).st_ino == inode_of(blob(home))) == (kind != "copy")

    def test_quiet_prints_the_path(self, filled: Here, tmp_path: Path) -> None:
        assert filled("link", "-q", DIGEST, "x.pt").ids == [str(tmp_path / "x.pt")]

    def test_can_be_undone(self, filled: Here, tmp_path: Path) -> None:
        filled("link", DIGEST, "x.pt")
        (entry,) = filled("undo", "--list", "--json").json["history"]
        assert entry["label"] == f"link {tmp_path}/x.pt"
        filled("undo", "--last", "-y")
        assert not (tmp_path / "x.pt").exists()

    def test_an_existing_file_stays_unless_forced(self, filled: Here, tmp_path: Path) -> None:
        target = write(tmp_path / "x.pt", b"mine")
        assert "--force" in filled("link", DIGEST, target, code=1).hint
        assert target.read_bytes() == b"mine"
        filled("link", DIGEST, target, "--force")
        assert target.read_bytes() == WEIGHTS

    def test_a_directory_is_refused_even_if_forced(self, filled: Here, models: Path) -> None:
        before = snapshot(models)
        assert "is a directory" in filled("link", DIGEST, models, "-f", code=1).error
        assert snapshot(models) == before

    def test_a_missing_directory_is_named(self, filled: Here, tmp_path: Path) -> None:
        assert filled("link", DIGEST, "no/x.pt", code=1).error == (
            f"There is no directory {tmp_path}/no"
        )

    def test_a_kind_that_does_not_work_is_explained(self, filled: Here, elsewhere: Path) -> None:
        done = filled("link", DIGEST, elsewhere / "x.pt", "--kind", "hardlink", code=1)
        assert "Cannot make a hardlink" in done.error
        assert "doctor" in done.hint
        assert os.listdir(elsewhere) == []

    def test_an_unknown_kind_is_bad_usage(self, filled: Here) -> None:
        filled("link", DIGEST, "x.pt", "--kind", "magic", code=2)

    def test_a_dry_run_makes_nothing(self, filled: Here, tmp_path: Path) -> None:
        assert "Would put" in filled("link", DIGEST, "x.pt", "-n").stdout
        assert not (tmp_path / "x.pt").exists()


class TestPin:
    def test_keeps_a_blob_until_it_is_unpinned(self, filled: Here) -> None:
        assert filled("pin", DIGEST).stdout == "Pinned 1 blob as 'kept'\n"
        assert filled("prune", "-y", "-q").ids == [SMALL]
        assert filled("unpin", DIGEST).stdout == "Unpinned 1 blob\n"
        assert filled("prune", "-y", "-q").ids == [DIGEST]

    def test_has_a_name(self, filled: Here) -> None:
        filled("pin", DIGEST, SMALL, "--name", "a")
        filled("pin", DIGEST, "--name", "b")
        assert filled("unpin", "--name", "a", DIGEST, SMALL, "--json").json == {
            "dry_run": False, "name": "a", "digests": [DIGEST, SMALL],
        }  # fmt: skip
        assert filled.digests("--filter", "pinned=yes") == [DIGEST]

    def test_unpinning_what_is_not_pinned_says_so(self, filled: Here) -> None:
        done = filled("unpin", DIGEST)
        assert done.stderr == f"Warning: {DIGEST[:12]} is not pinned\n"

    def test_a_dry_run_pins_nothing(self, filled: Here) -> None:
        assert filled("pin", DIGEST, "--dry-run").stdout == "Would pin 1 blob as 'kept'\n"
        assert filled.digests("--filter", "pinned=yes") == []
        filled("pin", DIGEST)
        filled("unpin", DIGEST, "-n")
        assert filled.digests("--filter", "pinned=yes") == [DIGEST]


class TestRemove:
    def test_goes_to_the_trash_and_comes_back(self, filled: Here, home: Path) -> None:
        done = filled("rm", "-y", DIGEST)
        assert done.stdout == "Moved 1 blob (100 KB) to the trash.\n"
        assert "undo --last" in done.stderr
        assert not blob(home).exists()
        filled("undo", "--last", "-y")
        assert blob(home).read_bytes() == WEIGHTS

    def test_now_is_for_good_and_says_what_was_freed(self, filled: Here, home: Path) -> None:
        allocated = os.stat(blob(home)).st_blocks * 512
        document = filled("rm", "-y", "--now", DIGEST, "--json").json
        assert document["freed_size"] == allocated
        assert not document["to_trash"]
        assert filled("undo", "--list", "-q").ids == []

    def test_takes_the_ids_of_ls(self, filled: Here) -> None:
        filled("rm", "-y", *filled("ls", "-q", "--filter", "size<1GB").ids)
        assert filled.digests() == []
        (entry,) = filled("undo", "--list", "--json").json["history"]
        assert entry["changes"] == 2

    def test_the_same_blob_twice_is_removed_once(self, filled: Here) -> None:
        assert filled("rm", "-y", DIGEST, DIGEST[:8], "--json").json["removed"] == 1

    def test_a_pinned_one_stops_it_before_anything_is_removed(
        self, filled: Here, home: Path
    ) -> None:
        filled("pin", SMALL)
        done = filled("rm", "-y", DIGEST, SMALL, code=1)
        assert done.error == f"{SMALL[:12]} is held by pin kept; nothing was removed"
        assert f"smartcache unpin {SMALL[:12]}" in done.hint
        assert blob(home).exists()

    def test_a_symlink_holds_it_too(self, filled: Here, tmp_path: Path, home: Path) -> None:
        filled("link", DIGEST, "x.pt", "--kind", "symlink")
        assert f"symlink {tmp_path}/x.pt" in filled("rm", "-y", DIGEST, code=1).error
        assert blob(home).exists()

    def test_files_outside_stay(self, filled: Here, tmp_path: Path) -> None:
        filled("link", DIGEST, "x.pt", "--kind", "hardlink")
        filled("rm", "-y", "--now", DIGEST)
        assert (tmp_path / "x.pt").read_bytes() == WEIGHTS

    def test_a_dry_run_shows_what_would_go(self, filled: Here, home: Path) -> None:
        done = filled("rm", "--dry-run", DIGEST)
        assert DIGEST[:12] in done.stdout
        assert "Would remove 1 blob (100 KB) to the trash." in done.stdout
        assert blob(home).exists()

    def test_refuses_where_it_cannot_ask(self, filled: Here, home: Path) -> None:
        done = filled("rm", DIGEST, code=1)
        assert "not a terminal" in done.error
        assert "-y" in done.hint
        assert blob(home).exists()

    @pytest.mark.usefixtures("filled")
    @pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 1), ("\n", 1), ("\x04", 1)])
    def test_asks_at_a_terminal(
        self, answer: str, code: int, program: Smartcache, home: Path
    ) -> None:
        done = program.at_terminal("rm", DIGEST, answer=answer)
        assert "Remove 1 blob (100 KB) to the trash? [y/N]" in done.stdout
        assert done.code == code
        assert blob(home).exists() == bool(code)
        assert ("Aborted; nothing was changed" in done.stdout) == bool(code)

    def test_a_blob_on_two_volumes_goes_from_both(
        self, filled: Here, home: Path, elsewhere: Path
    ) -> None:
        with Store(home) as store:
            store.add_volume(elsewhere / ".smartcache")
        filled("add", "--adopt", write(elsewhere / "m.pt", WEIGHTS))
        document = filled("rm", "-y", DIGEST, "--json").json
        assert {each["root"] for each in document["blobs"]} == {
            str(home),
            str(elsewhere / ".smartcache"),
        }
        assert DIGEST not in filled.digests()


class TestPublish:
    @pytest.fixture
    def published(self, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A store of somebody else who has published a blob, named in the settings."""
        root = tmp_path / "srv"
        with Store(root) as store:
            store.put_stream([WEIGHTS], algorithms=["sha256"])
            store.plan_publish().execute()
        monkeypatch.setenv("SMARTCACHE_SHARED_STORES", str(root))
        Store(home).close()
        return root

    def test_says_what_everybody_can_read_and_what_not(
        self, sc: Here, home: Path, models: Path
    ) -> None:
        write(models / "private.gguf", OTHER[1:], mode=0o600)
        sc("add", "--adopt", models / "a.safetensors", models / "private.gguf")
        done = sc("publish", "--dry-run")
        assert f"Every user could read 1 blob (100 KB) of {home}.\n" in done.stdout
        assert "Still private: 1 blob (the file is closed to others).\n" in done.stdout
        assert "By digest only: 1 blob (no sha256 is known).\n" in done.stdout
        assert not (home / "catalog").exists()
        assert "not a terminal" in sc("publish", code=1).error
        done = sc("publish", "-y")
        assert f"Every user can read 1 blob (100 KB) of {home}.\n" in done.stdout
        assert f'shared_stores = ["{home}"]' in done.stderr
        assert sc("publish", "--json").json["is_published"] is True

    def test_is_taken_back(self, sc: Here, home: Path, models: Path) -> None:
        sc("add", models / "a.safetensors")
        assert sc("publish", "--off").stdout == f"{home} is not published.\n"
        sc("publish", "-y")
        assert sc("publish", "--off", "--dry-run", "--json").json["is_published"] is True
        assert sc("publish", "--off").stdout == f"Closed {home} to others.\n"
        assert os.stat(home).st_mode & 0o077 == 0

    @pytest.mark.parametrize("text", [DIGEST, f"sha256:{hashlib.sha256(WEIGHTS).hexdigest()}"])
    def test_link_takes_from_a_shared_store_what_the_own_one_lacks(
        self, text: str, sc: Here, published: Path, home: Path, tmp_path: Path
    ) -> None:
        path = tmp_path / "m.gguf"
        done = sc("link", text, path, "--dry-run")
        assert done.stdout.endswith(f" at {path}, from the shared store {published}\n")
        assert not blob(home).exists()
        assert "brought from a shared store" in sc("link", text, path).stdout
        assert path.read_bytes() == WEIGHTS
        assert inode_of(blob(home)) != inode_of(blob(published))
        assert inode_of(path) != inode_of(blob(published))

    def test_link_says_that_nobody_has_it(self, sc: Here, published: Path, tmp_path: Path) -> None:
        (published / "blobs").chmod(0o775)
        done = sc("link", DIGEST, tmp_path / "m.gguf", code=1)
        assert "can be written by others" in done.stderr
        assert f"No blob {DIGEST}" in done.stderr
        assert not (tmp_path / "m.gguf").exists()

    def test_doctor_says_whether_shared_stores_can_be_used(self, sc: Here, published: Path) -> None:
        text = " ".join(sc("doctor").stdout.split())
        assert f"The shared store {published} belongs to" in text
        assert "and lists 1 blob." in text
        published.chmod(0o777)
        document = sc("doctor", "--json").json
        (finding,) = document["shared_stores"]
        assert finding["level"] == "warning"
        assert f"{published} can be written by others" in finding["text"]
        assert finding["hint"] == f"Its owner can close it to them: chmod go-w {published}"
