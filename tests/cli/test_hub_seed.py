from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest

from tests.cli.running import Here, Smartcache
from tests.hub.shared_stores import MARKER, add_entry, make_shared_store, xet_of
from tests.store.files import OTHER, WEIGHTS, allocated, inode_of, snapshot, write

pytestmark = pytest.mark.usefixtures("own_places")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """An HF cache with an empty shared store."""
    make_shared_store(tmp_path / "hf" / "hub")
    return tmp_path / "hf" / "hub"


@pytest.fixture
def xet(tmp_path: Path) -> str:
    """The xet hash of WEIGHTS."""
    return xet_of(tmp_path / "bytes", WEIGHTS)


@pytest.fixture
def digest(sc: Here, models: Path) -> str:
    """A blob of WEIGHTS."""
    sc("add", models / "a.safetensors")
    (digest,) = sc.digests()
    return digest


class TestSeed:
    def test_says_what_it_linked(
        self, sc: Here, cache: Path, digest: str, xet: str, home: Path
    ) -> None:
        done = sc("hub", "seed", "--cache-dir", cache, "-y")
        assert done.stdout == "Linked 1 blob: programs find 100 KB more.\n"
        path = cache / "blobs" / xet[:2] / xet
        assert inode_of(path) == inode_of(home / "blobs" / digest[:2] / digest)

    def test_again_there_is_nothing_to_do(self, sc: Here, cache: Path, digest: str) -> None:
        assert digest
        sc("hub", "seed", "--cache-dir", cache, "-y")
        done = sc("hub", "seed", "--cache-dir", cache)
        assert done.stdout == "Nothing to link.\n"
        assert done.stderr == "Already there: 1.\n"

    def test_a_dry_run_says_what_would_be_done(self, sc: Here, cache: Path, digest: str) -> None:
        before = snapshot(cache)
        done = sc("hub", "seed", "--cache-dir", cache, "-n")
        assert done.stdout.splitlines()[0].split() == ["DIGEST", "SIZE", "XET"]
        assert done.stdout.splitlines()[1].split()[0] == digest[:12]
        assert "to be computed" in done.stdout
        assert "Would link 1 blob (100 KB, 100 KB of them to be hashed)." in done.stdout
        assert snapshot(cache) == before
        assert sc("hub", "seed", "--cache-dir", cache, "-n", "-q").ids == [digest]

    def test_the_document(self, sc: Here, cache: Path, digest: str, xet: str) -> None:
        planned = sc("hub", "seed", "--cache-dir", cache, "-n", "--json").json
        assert planned["blobs"] == [
            {"digest": digest, "size": len(WEIGHTS), "xet": None, "missing_in": [str(cache)]}
        ]
        assert (planned["dry_run"], planned["hash_size"], planned["linked"]) == (
            True, len(WEIGHTS), [],
        )  # fmt: skip
        done = sc("hub", "seed", "--cache-dir", cache, "-y", "--json").json
        path = cache / "blobs" / xet[:2] / xet
        assert done["linked"] == [
            {"digest": digest, "size": len(WEIGHTS), "xet": xet, "path": str(path)}
        ]
        assert (done["linked_size"], done["hashed_size"]) == (len(WEIGHTS), len(WEIGHTS))
        assert (done["skipped"], done["warnings"], done["caches"]) == ([], [], [str(cache)])

    def test_quiet_prints_the_digests(self, sc: Here, cache: Path, digest: str) -> None:
        assert sc("hub", "seed", "--cache-dir", cache, "-y", "-q").ids == [digest]
        assert sc("hub", "seed", "--cache-dir", cache, "-y", "-q").ids == []

    def test_without_a_terminal_it_does_not_ask(self, sc: Here, cache: Path, digest: str) -> None:
        assert digest
        before = snapshot(cache)
        assert "not a terminal" in sc("hub", "seed", "--cache-dir", cache, code=1).error
        assert snapshot(cache) == before

    def test_at_a_terminal_it_shows_the_plan_and_asks(
        self, program: Smartcache, cache: Path, digest: str
    ) -> None:
        before = snapshot(cache)
        done = program.at_terminal("hub", "seed", "--cache-dir", cache, answer="n\n")
        assert digest[:12] in done.stdout
        assert "Link 1 blob" in done.stdout
        assert done.code == 1
        assert snapshot(cache) == before
        done = program.at_terminal("hub", "seed", "--cache-dir", cache, answer="y\n")
        assert "Linked 1 blob" in done.stdout
        assert done.code == 0

    def test_an_entry_that_does_not_fit_is_a_warning_and_a_failure(
        self, sc: Here, cache: Path, digest: str, xet: str
    ) -> None:
        path = add_entry(cache, xet, OTHER)
        done = sc("hub", "seed", "--cache-dir", cache, "-y", code=1)
        assert f"Warning: {digest[:12]}: {cache}: {path} is left alone" in done.stderr
        assert path.read_bytes() == OTHER

    def test_undo_takes_it_back(self, sc: Here, cache: Path, digest: str, xet: str) -> None:
        assert digest
        sc("hub", "seed", "--cache-dir", cache, "-y")
        assert "hub seed" in sc("undo", "--list").stdout
        sc("undo", "--last", "-y")
        assert not (cache / "blobs" / xet[:2] / xet).exists()

    def test_an_entry_of_a_client_is_left_to_it(
        self, sc: Here, cache: Path, digest: str, xet: str
    ) -> None:
        assert digest
        path = add_entry(cache, xet, WEIGHTS)
        inode = inode_of(path)
        done = sc("hub", "seed", "--cache-dir", cache, "-y")
        assert done.stdout == "Linked 0 blobs.\n"
        assert "Already there: 1." in done.stderr
        assert inode_of(path) == inode


class TestCountedOnce:
    """An entry that repos point at and the store has too is one file, whoever counts."""

    @pytest.fixture
    def used(self, sc: Here, cache: Path, digest: str, xet: str) -> int:
        """Two repos use the entry; its bytes on the disk."""
        assert digest
        sc("hub", "seed", "--cache-dir", cache, "-y")
        entry = cache / "blobs" / xet[:2] / xet
        for name in ("one", "two"):
            blob = cache / f"models--org--{name}" / "blobs" / hashlib.sha256(WEIGHTS).hexdigest()
            blob.parent.mkdir(parents=True)
            blob.symlink_to(Path("../../blobs", xet[:2], xet))
            assert blob.read_bytes() == WEIGHTS
        for small in (entry.with_name(f"{xet}.lock"), cache / "blobs" / MARKER):
            small.write_bytes(b"")  # they take no room
        return allocated(entry)

    def test_by_df(self, sc: Here, cache: Path, used: int) -> None:
        document = sc("df", cache, "--json").json
        (folder,) = document["folders"]
        assert (folder["physical"], folder["shared_with_store"]) == (used, used)
        assert (folder["logical"], folder["freed_if_deleted"]) == (len(WEIGHTS), 0)

    def test_by_scan_and_report(
        self, sc: Here, cache: Path, used: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_HUB_CACHE", str(cache))
        scanned = sc("scan", cache, "--json").json
        assert (scanned["total"]["physical"], scanned["total"]["logical"]) == (used, len(WEIGHTS))
        assert (scanned["groups"], scanned["freeable"]) == ([], 0)
        report = sc("report", "--json").json
        assert report["total"]["physical"] == used


class TestWithout:
    def test_a_shared_store_it_says_why_and_what_to_do(
        self, sc: Here, digest: str, tmp_path: Path
    ) -> None:
        assert digest
        (tmp_path / "old").mkdir()
        done = sc("hub", "seed", "--cache-dir", "old", "-y", code=1)
        assert done.error.startswith("No HF cache has a shared blob store that can be filled")
        assert f"{tmp_path / 'old'}: it has no shared blob store yet" in done.error
        assert "huggingface_hub >= 2.4 makes it at its first Xet download" in done.hint

    def test_an_hf_cache_at_all(self, sc: Here, digest: str) -> None:
        assert digest
        assert "no HF cache at" in sc("hub", "seed", "--cache-dir", "no", code=1).error

    def test_a_store(self, sc: Here, cache: Path, home: Path) -> None:
        assert "There is no store" in sc("hub", "seed", "--cache-dir", cache, code=1).error
        assert not home.exists()

    def test_hf_xet_it_says_so(
        self, sc: Here, cache: Path, digest: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert digest
        monkeypatch.setitem(sys.modules, "hf_xet", None)
        done = sc("hub", "seed", "--cache-dir", cache, "-y")
        assert done.stdout == "Nothing to link.\n"
        assert "hf_xet" in done.stderr


def test_all_known_caches_are_filled(program: Smartcache, tmp_path: Path, models: Path) -> None:
    """The default one, and those that a scan has met."""
    default = tmp_path / "default"
    make_shared_store(default)
    make_shared_store(tmp_path / "other" / "hub")
    write(tmp_path / "other" / "hub" / "models--org--name" / "blobs" / ("0" * 64), OTHER)
    env = {"HF_HUB_CACHE": str(default), "HOME": str(tmp_path)}
    program("add", models / "a.safetensors", env=env)
    program("scan", tmp_path / "other" / "hub", env=env)
    done = program("hub", "seed", "-y", "--json", env=env).json
    assert set(done["caches"]) == {str(default), str(tmp_path / "other" / "hub")}
    assert len(done["linked"]) == 2
