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
    def test_may_be_shortened_or_another_hash(self, filled: Here, home: Path, models: Path) -> None:
        with Store(home) as store:
            store.put_file(models / "a.safetensors", algorithms=["sha256"])
        sha256 = hashlib.sha256(WEIGHTS).hexdigest()
        for text in (DIGEST, DIGEST[:12], DIGEST[:4], DIGEST.upper(), f"sha256:{sha256}"):
            assert filled("pin", "-q", text).ids == [DIGEST], text

    def test_a_bad_one_changes_nothing(self, filled: Here, home: Path) -> None:
        messages = {
            "zzzz": "'zzzz' is not a digest",
            "12": "'12' is not a digest",
            "0" * 64: "No blob",
            "sha256:12": "'12' is not a sha256 hash",
            "md5:" + "0" * 32: "'md5' is not a hash algorithm",
        }
        for name in ("pin", "unpin", "rm"):
            for text, message in messages.items():
                done = filled(name, DIGEST, text, *(["-y"] if name == "rm" else []), code=1)
                assert message in done.error, name
                assert done.hint
            assert blob(home).exists(), name
            assert filled.digests("--filter", "pinned=yes") == [], name
        for name in ("pin", "unpin", "rm", "link"):
            assert "Missing argument 'DIGEST" in filled(name, code=2).error

    def test_an_ambiguous_one_names_what_it_may_mean(self, sc: Here, tmp_path: Path) -> None:
        made: dict[str, bytes] = {}
        for number in range(5000):
            data = f"file {number}".encode()
            first = made.setdefault(digest_of(data)[:4], data)
            if first != data:
                break
        sc("add", write(tmp_path / "one", first), write(tmp_path / "two", data))
        done = sc("rm", "-y", digest_of(data)[:4], code=1)
        assert "several digests" in done.error
        assert all(digest_of(each)[:16] in done.hint for each in (first, data))


class TestLink:
    def test_makes_the_best_kind_of_link_which_can_be_undone(
        self, filled: Here, tmp_path: Path
    ) -> None:
        target = tmp_path / "x.safetensors"
        assert str(target) in filled("link", DIGEST, "x.safetensors").stdout
        assert target.read_bytes() == WEIGHTS
        document = filled("link", DIGEST, target, "--json").json
        assert document["path"] == str(target)
        assert document["kind"] in ("hardlink", "reflink")
        assert filled("link", "-q", DIGEST, target).ids == [str(target)]
        (entry,) = filled("undo", "--list", "--json").json["history"]
        assert entry["label"] == f"link {target}"
        filled("undo", "--last", "-y")
        assert not target.exists()

    def test_makes_the_kind_that_was_asked_for(
        self, filled: Here, home: Path, tmp_path: Path
    ) -> None:
        for kind in ("hardlink", "symlink", "copy"):
            target = tmp_path / kind
            assert filled("link", DIGEST, target, "--kind", kind, "--json").json["kind"] == kind
            assert target.is_symlink() == (kind == "symlink")
            assert (os.stat(target).st_ino == inode_of(blob(home))) == (kind != "copy")
        filled("link", DIGEST, "x.pt", "--kind", "magic", code=2)

    def test_what_is_there_stays_unless_forced_and_a_directory_always(
        self, filled: Here, models: Path, tmp_path: Path
    ) -> None:
        target = write(tmp_path / "x.pt", b"mine")
        assert "--force" in filled("link", DIGEST, target, code=1).hint
        assert target.read_bytes() == b"mine"
        filled("link", DIGEST, target, "--force")
        assert target.read_bytes() == WEIGHTS
        before = snapshot(models)
        assert "is a directory" in filled("link", DIGEST, models, "-f", code=1).error
        assert snapshot(models) == before
        error = filled("link", DIGEST, "no/x.pt", code=1).error
        assert error == f"There is no directory {tmp_path}/no"

    def test_a_kind_that_does_not_work_is_explained(self, filled: Here, elsewhere: Path) -> None:
        done = filled("link", DIGEST, elsewhere / "x.pt", "--kind", "hardlink", code=1)
        assert "Cannot make a hardlink" in done.error
        assert "doctor" in done.hint
        assert os.listdir(elsewhere) == []


class TestPin:
    def test_keeps_a_blob_until_it_is_unpinned(self, filled: Here) -> None:
        assert filled("pin", DIGEST).stdout == "Pinned 1 blob as 'kept'\n"
        assert filled("prune", "-y", "-q").ids == [SMALL]
        assert filled("unpin", DIGEST).stdout == "Unpinned 1 blob\n"
        assert filled("unpin", DIGEST).stderr == f"Warning: {DIGEST[:12]} is not pinned\n"
        assert filled("prune", "-y", "-q").ids == [DIGEST]

    def test_has_a_name(self, filled: Here) -> None:
        filled("pin", DIGEST, SMALL, "--name", "a")
        filled("pin", DIGEST, "--name", "b")
        assert filled("unpin", "--name", "a", DIGEST, SMALL, "--json").json == {
            "dry_run": False, "name": "a", "digests": [DIGEST, SMALL],
        }  # fmt: skip
        assert filled.digests("--filter", "pinned=yes") == [DIGEST]


class TestRemove:
    def test_goes_to_the_trash_and_comes_back(self, filled: Here, home: Path) -> None:
        done = filled("rm", "-y", DIGEST)
        assert done.stdout == "Moved 1 blob (100 KB) to the trash.\n"
        assert "undo --last" in done.stderr
        assert not blob(home).exists()
        filled("undo", "--last", "-y")
        assert blob(home).read_bytes() == WEIGHTS

    def test_now_is_for_good_says_what_was_freed_and_leaves_files_outside(
        self, filled: Here, home: Path, tmp_path: Path
    ) -> None:
        allocated = os.stat(blob(home)).st_blocks * 512
        document = filled("rm", "-y", "--now", DIGEST, "--json").json
        assert (document["freed_size"], document["to_trash"]) == (allocated, False)
        assert filled("undo", "--list", "-q").ids == []
        filled("link", SMALL, "x.pt", "--kind", "hardlink")
        filled("rm", "-y", "--now", SMALL)
        assert (tmp_path / "x.pt").read_bytes() == OTHER

    def test_takes_the_ids_of_ls_each_once(self, filled: Here) -> None:
        ids = filled("ls", "-q", "--filter", "size<1GB").ids
        assert filled("rm", "-y", *ids, DIGEST[:8], "--json").json["removed"] == 2
        assert filled.digests() == []
        (entry,) = filled("undo", "--list", "--json").json["history"]
        assert entry["changes"] == 2

    def test_what_is_held_stops_it_before_anything_is_removed(
        self, filled: Here, home: Path, tmp_path: Path
    ) -> None:
        filled("pin", SMALL)
        done = filled("rm", "-y", DIGEST, SMALL, code=1)
        assert done.error == f"{SMALL[:12]} is held by pin kept; nothing was removed"
        assert f"smartcache unpin {SMALL[:12]}" in done.hint
        filled("link", DIGEST, "x.pt", "--kind", "symlink")
        assert f"symlink {tmp_path}/x.pt" in filled("rm", "-y", DIGEST, code=1).error
        assert blob(home).exists()

    @pytest.mark.usefixtures("filled")
    def test_only_a_yes_at_a_terminal_is_one(self, program: Smartcache, home: Path) -> None:
        for answer in ("\n", "no\n", "\x04", "y\n"):
            done = program.at_terminal("rm", DIGEST, answer=answer)
            is_yes = answer == "y\n"
            assert done.code == (not is_yes)
            assert blob(home).exists() == (not is_yes)
            assert ("Aborted; nothing was changed" in done.stdout) == (not is_yes)

    def test_a_blob_on_two_volumes_goes_from_both(
        self, filled: Here, home: Path, elsewhere: Path
    ) -> None:
        with Store(home) as store:
            store.add_volume(elsewhere / ".smartcache")
        filled("add", "--adopt", write(elsewhere / "m.pt", WEIGHTS))
        document = filled("rm", "-y", DIGEST, "--json").json
        roots = {str(home), str(elsewhere / ".smartcache")}
        assert {each["root"] for each in document["blobs"]} == roots
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

    def test_says_what_everybody_can_read_and_what_not_and_is_taken_back(
        self, sc: Here, home: Path, models: Path
    ) -> None:
        write(models / "private.gguf", OTHER[1:], mode=0o600)
        sc("add", "--adopt", models / "a.safetensors", models / "private.gguf")
        assert sc("publish", "--off").stdout == f"{home} is not published.\n"
        done = sc("publish", "--dry-run")
        assert f"Every user could read 1 blob (100 KB) of {home}.\n" in done.stdout
        assert "Still private: 1 blob (the file is closed to others).\n" in done.stdout
        assert "By digest only: 1 blob (no sha256 is known).\n" in done.stdout
        assert "not a terminal" in sc("publish", code=1).error
        assert not (home / "listing").exists()
        done = sc("publish", "-y")
        assert f"Every user can read 1 blob (100 KB) of {home}.\n" in done.stdout
        assert f'shared_stores = ["{home}"]' in done.stderr
        assert sc("publish", "--json").json["is_published"] is True
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
        assert inode_of(blob(published)) not in (inode_of(blob(home)), inode_of(path))

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
        (finding,) = sc("doctor", "--json").json["shared_stores"]
        assert finding["level"] == "warning"
        assert f"{published} can be written by others" in finding["text"]
        assert finding["hint"] == f"Its owner can close it to them: chmod go-w {published}"
