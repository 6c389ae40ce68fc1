"""The tree of a store: made whole, refused where it is somebody else's, closed to others."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from smartcache import errors
from smartcache.doctor import examine
from smartcache.folders.programs import ModelFolder
from smartcache.folders.scan import look
from smartcache.store import layout as store_layout
from smartcache.store.layout import FORMAT
from smartcache.store.store import Store
from smartcache.system.hashing import is_digest
from tests.store.files import (
    WEIGHTS,
    adopt,
    blob_path,
    digest_of,
    mode_of,
    read,
    row,
    snapshot,
    undo,
    write,
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX modes")
DIGEST = digest_of(WEIGHTS)
FOLDERS = ("bad", "blobs", "leases", "pins", "sets", "tmp")
INDEX = {"index.sqlite3", "index.sqlite3-wal", "index.sqlite3-shm"}
OF_SQLITE = ("-wal", "-shm", "-journal")
Look = Callable[[Store], object]
LOOKS: dict[str, Look] = {
    "ls": lambda store: list(store.blobs()),
    "has": lambda store: store.has(DIGEST),
    "find": lambda store: store.find("sha256", "0" * 64),
    "names": lambda store: (store.names_of(DIGEST), store.pins(), store.pools()),
    "history": lambda store: store.history(),
    "usage": lambda store: store.usage(),
    "prune -n": lambda store: store.plan_prune(),
    "prune -n by size and age": lambda store: store.plan_prune(max_size=0),
    "rm -n": lambda store: store.plan_release([DIGEST]),
    "undo -n": lambda store: store.plan_undo(),
    "eject -n": lambda store: store.plan_eject(drop_pinned=True, drop_sets=True),
    "folders": lambda store: (store.folders(), store.sightings(5)),
    "unfinished": lambda store: (store.unfinished(), store.recover()),
    "doctor": lambda store: examine(store.root, [store.root.parent]),
}


class TestNew:
    def test_looking_and_planning_make_nothing(self, tmp_path: Path) -> None:
        """Neither does what cannot succeed."""
        root = tmp_path / "some" / "where"
        for name, act in LOOKS.items():
            with row(name), Store(root, only_look=True) as store:
                with suppress(errors.StoreError):
                    act(store)
                assert list(tmp_path.iterdir()) == []
        with Store(root, only_look=True) as store, pytest.raises(errors.StoreFormatError):
            store.put_stream([WEIGHTS])
        Store(root).close()
        assert list(tmp_path.iterdir()) == []

    def test_looking_changes_nothing_and_never_waits(self, store: Store, folder: Path) -> None:
        adopt(store, write(folder / "a.safetensors"))
        store.close()
        before = {name: each for name, each in snapshot(store.root).items() if name not in INDEX}
        with Store(store.root) as busy, busy.locked("somebody works"):
            for name, act in LOOKS.items():
                with row(name), Store(store.root, only_look=True) as again:
                    act(again)
                    after = snapshot(store.root).items()
                    assert {key: each for key, each in after if key not in INDEX | {"lock"}} == {
                        key: each for key, each in before.items() if key != "lock"
                    }

    def test_a_scan_makes_the_index_and_no_more(self, tmp_path: Path, folder: Path) -> None:
        write(folder / "a.safetensors")
        root = tmp_path / "some" / "where"
        with Store(root) as store:
            look(store, [ModelFolder(path=folder)])
            assert set(os.listdir(root)) <= INDEX
            assert mode_of(root) == 0o700
        with Store(root) as store:
            assert [each.files for each in store.folders()] == [1]
            adopt(store, folder / "a.safetensors")
            names = set(os.listdir(root))
        names = {name for name in names if not name.endswith(OF_SQLITE)}
        files = {"format", "lock", "index.sqlite3", "journal.sqlite3", "journal.copy"}
        assert names == {*FOLDERS, *files}
        assert (root / "format").read_text() == f"{FORMAT}\n"
        # Backup programs see a cache in the blobs only.
        tag = (root / "blobs" / "CACHEDIR.TAG").read_text()
        assert tag.startswith("Signature: 8a477f597d28d172789f06886806bc55\n")
        assert all(name in (store_layout.__doc__ or "") for name in names), "it is documented"

    def test_a_path_may_be_text(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with Store("here") as store:
            assert store.root == tmp_path / "here"
            assert repr(store) == f"Store({str(tmp_path / 'here')!r})"


class TestHalfMade:
    """What a kill or a power cut left is made again."""

    def test_a_missing_folder_is_made_again(self, store: Store, folder: Path) -> None:
        before = snapshot(write(folder / "a.safetensors").parent)
        adopt(store, folder / "a.safetensors")
        store.close()
        for name in FOLDERS:
            if name != "blobs":
                shutil.rmtree(store.root / name)
                with row(name), Store(store.root) as again:
                    assert read(again) == WEIGHTS
                    again.put_stream([name.encode()])
                    assert (again.root / name).is_dir()
        with Store(store.root) as again:
            assert undo(again) == []
        assert snapshot(folder) == before

    @pytest.mark.parametrize("is_gone", [False, True])
    def test_no_small_file_closes_a_store(self, store: Store, folder: Path, is_gone: bool) -> None:
        """One that a power cut has left empty, or that is missing."""
        before = snapshot(write(folder / "a.safetensors").parent)
        names = ["format", "lock", "journal.copy", "blobs/CACHEDIR.TAG", *sorted(INDEX)]
        if not is_gone:
            names.append("journal.sqlite3")
        for name in names:
            with row(name):
                with Store(store.root) as made:
                    adopt(made, folder / "a.safetensors")
                path = store.root / name
                path.unlink(missing_ok=True)
                if not is_gone:
                    path.touch(0o600)
                with Store(store.root, only_look=True) as again:
                    assert read(again) == WEIGHTS
                    assert [each.changes for each in again.history()] == [1]
                with Store(store.root) as again:
                    again.put_stream([name.encode()])
                    assert (again.root / "format").read_text() == f"{FORMAT}\n"
                    assert not again.verify(full=True).has_damage
                    assert undo(again) == []
                assert snapshot(folder) == before

    def test_what_a_first_change_left_when_it_was_killed_is_finished(self, tmp_path: Path) -> None:
        rows: dict[str, tuple[str, ...]] = {
            "made beforehand": (),
            "folder": ("blobs/",),
            "half a format": (".format.12345678.tmp",),
            "empty format": ("format",),
            "all but the format": tuple(f"{name}/" for name in FOLDERS),
            "index": ("index.sqlite3",),
        }
        for name, parts in rows.items():
            root = tmp_path / name
            root.mkdir()
            root.chmod(0o700 if parts else 0o775)
            for part in parts:
                (root / part).mkdir() if part.endswith("/") else (root / part).touch(0o600)
            with row(name), Store(root) as store:
                store.put_stream([WEIGHTS])
                assert read(store) == WEIGHTS
                assert {mode_of(path) for path in (root, root / "blobs")} == {0o700}


class TestRefused:
    def refused(self, root: Path) -> errors.StoreFormatError:
        before = snapshot(root)
        with pytest.raises(errors.StoreFormatError) as caught, Store(root) as store:
            store.put_stream([WEIGHTS])
        assert snapshot(root) == before
        assert vars(caught.value)["root"] == root
        return caught.value

    def test_a_directory_of_somebody_else(self, tmp_path: Path) -> None:
        """The cache of one Hub repo has `blobs` too."""
        for name in ("photo.jpg", "models", ".hidden"):
            write(tmp_path / name / name, b"mine")
            assert "not empty" in self.refused(tmp_path / name).message, name
        root = tmp_path / "models--a--b"
        for name in ("blobs/abc", "refs/main", "snapshots/1/config.json"):
            write(root / name, b"x")
        self.refused(root)

    def test_a_newer_or_unknown_format(self, store: Store) -> None:
        store.put_stream([WEIGHTS])
        store.close()
        for text in ("2", "99", "garbage", "-1", "1.5", "\xff", "\xb2", "9" * 5000):
            (store.root / "format").write_text(text, encoding="utf-8")
            with row(text[:9]):
                assert "Update smartcache" in self.refused(store.root).hint

    def test_a_root_that_is_a_file_or_cannot_be_made(self, tmp_path: Path) -> None:
        path, closed = write(tmp_path / "file", b"mine"), tmp_path / "closed"
        closed.mkdir(mode=0o555)
        roots = [path, path / "store"]
        if os.geteuid() != 0:  # root writes everywhere
            roots.append(closed / "store")
        for root in roots:
            with row(root), pytest.raises(errors.StoreError), Store(root) as store:
                store.put_stream([WEIGHTS])
        assert (path.read_bytes(), os.listdir(closed)) == (b"mine", [])


class TestModes:
    def test_a_store_is_open_to_its_owner_only_whatever_the_umask(self, tmp_path: Path) -> None:
        for mask in (0o002, 0o022, 0o077, 0o000, 0o777):
            above = tmp_path / oct(mask)
            root = above / "models" / "store"
            before = os.umask(mask)
            try:
                with Store(root) as store:
                    digest = store.put_stream([WEIGHTS]).digest
                    store.place(digest, above / "a.safetensors", kind="hardlink")
                    store.pin(digest)
                    pins = root / "pins" / "kept" / digest
                    with store.key_locks.hold("key"), store.locked("test"):
                        modes = {each: mode_of(each) for each in (root, *root.rglob("*"))}
            finally:
                os.umask(before)
            with row(oct(mask)):
                assert modes.pop(blob_path(store)) == modes.pop(pins) == 0o444
                for each, mode in modes.items():
                    assert mode == (0o700 if each.is_dir() else 0o600), each
                for each in (above, above / "models"):  # nobody else can write them
                    assert mode_of(each) == (0o755 & ~mask) | 0o700

    def test_what_others_could_read_is_closed_to_them(self, store: Store) -> None:
        store.put_stream([WEIGHTS])
        store.close()
        for path in (store.root, store.root / "tmp", store.root / "index.sqlite3"):
            path.chmod(mode_of(path) | 0o055)
        Store(store.root).close()
        assert mode_of(store.root) == mode_of(store.root / "tmp") == 0o700
        assert mode_of(store.root / "index.sqlite3") == 0o600


def test_a_digest_is_64_lower_case_hexadecimal_characters() -> None:
    assert is_digest("ab" * 32)
    for text in ("AB" * 32, "ab" * 31, "ab" * 33, "zz" * 32, "ab" * 32 + "\n", ""):
        assert not is_digest(text), text
