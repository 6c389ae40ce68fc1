from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from smartcache.store.store import Store
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
        for kind in ("hardlink", "copy"):
            target = tmp_path / kind
            assert filled("link", DIGEST, target, "--kind", kind, "--json").json["kind"] == kind
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
    def test_is_for_good_says_what_was_freed_and_leaves_files_outside(
        self, filled: Here, home: Path, tmp_path: Path
    ) -> None:
        allocated = os.stat(blob(home)).st_blocks * 512
        assert filled("rm", DIGEST, "-n").stdout.endswith("Would remove 1 blob (100 KB).\n")
        document = filled("rm", "-y", DIGEST, "--json").json
        assert (document["freed_size"], document["removed"]) == (allocated, 1)
        assert not blob(home).exists()
        assert filled("undo", "--list", "-q").ids == []
        filled("link", SMALL, "x.pt", "--kind", "hardlink")
        assert filled("rm", "-y", SMALL).stdout == "Removed 1 blob, freed 0 B.\n"
        assert (tmp_path / "x.pt").read_bytes() == OTHER

    def test_takes_the_ids_of_ls_each_once(self, filled: Here) -> None:
        ids = filled("ls", "-q", "--filter", "size<1GB").ids
        assert filled("rm", "-y", *ids, DIGEST[:8], "--json").json["removed"] == 2
        assert filled.digests() == []

    def test_what_is_pinned_stops_it_before_anything_is_removed(
        self, filled: Here, home: Path
    ) -> None:
        filled("pin", SMALL)
        done = filled("rm", "-y", DIGEST, SMALL, code=1)
        assert done.error == f"{SMALL[:12]} is pinned (kept); nothing was removed"
        assert done.hint == f"Unpin it first: 'smartcache unpin {SMALL[:12]}'."
        assert blob(home).exists()

    @pytest.mark.usefixtures("filled")
    def test_only_a_yes_at_a_terminal_is_one(self, program: Smartcache, home: Path) -> None:
        for answer in ("\n", "no\n", "\x04", "y\n"):
            done = program.at_terminal("rm", DIGEST, answer=answer)
            is_yes = answer == "y\n"
            assert done.code == (not is_yes)
            assert blob(home).exists() == (not is_yes)
            assert ("Aborted; nothing was changed" in done.stdout) == (not is_yes)

    def test_a_blob_in_two_pools_goes_from_both(
        self, filled: Here, home: Path, elsewhere: Path
    ) -> None:
        with Store(home) as store:
            store.add_pool(elsewhere / ".smartcache")
        filled("add", "--adopt", write(elsewhere / "m.pt", WEIGHTS))
        assert filled.digests().count(DIGEST) == 2
        assert filled("rm", "-y", DIGEST, "--json").json["removed"] == 1
        assert DIGEST not in filled.digests()
