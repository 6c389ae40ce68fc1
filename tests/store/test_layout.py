"""The tree of a store: made whole, refused where it is somebody else's, closed to others."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from smartcache.config import load_settings
from smartcache.errors import StoreFormatError, StoreUnwritableError
from smartcache.store.store import Store
from smartcache.store.volume import FORMAT, Layout, Volume
from smartcache.system.hashing import is_digest
from tests.store.files import WEIGHTS, blob_path, mode_of, row, snapshot, write

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX modes")
DIRECTORIES = ("bad", "blobs", "leases", "sets", "tmp")


class TestNew:
    def test_a_new_store_has_the_whole_tree(self, tmp_path: Path) -> None:
        root = tmp_path / "some" / "where"
        with Store(root):
            names = set(os.listdir(root))
        assert {"format", "index.sqlite3", *DIRECTORIES} <= names
        assert (root / "format").read_text() == f"{FORMAT}\n"

    def test_backup_programs_see_a_cache_in_the_blobs_only(self, store: Store) -> None:
        """The journal and computed tensors are worth a backup."""
        assert not (store.root / "CACHEDIR.TAG").exists()
        tag = (store.root / "blobs" / "CACHEDIR.TAG").read_text()
        assert tag.startswith("Signature: 8a477f597d28d172789f06886806bc55\n")

    def test_every_path_is_named_in_the_docstring(self, store: Store) -> None:
        from smartcache.store import volume as module

        store.put_stream([WEIGHTS])
        for name in os.listdir(store.root):
            assert name.removesuffix("-wal").removesuffix("-shm") in (module.__doc__ or "")

    def test_an_empty_or_half_made_one_is_finished_and_what_is_missing_made_again(
        self, tmp_path: Path
    ) -> None:
        root = tmp_path / "store"
        root.mkdir()
        Store(root).close()
        for name in DIRECTORIES:
            shutil.rmtree(root / name)
            with Store(root) as again:
                assert (again.root / name).is_dir()
                again.put_stream([WEIGHTS])
        shutil.rmtree(root)
        (root / "blobs").mkdir(parents=True)
        (root / ".format.12345678.tmp").touch()
        with Store(root) as store:
            store.put_stream([WEIGHTS])

    def test_opening_changes_nothing_in_a_store_that_is_whole(self, store: Store) -> None:
        store.put_stream([WEIGHTS])
        store.close()
        before = snapshot(store.root)
        Store(store.root).close()
        assert snapshot(store.root) == before

    def test_a_path_may_be_relative_or_text(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        with Store("here") as store:
            assert store.root == tmp_path / "here"
            assert repr(store) == f"Store({str(tmp_path / 'here')!r})"


class TestRefused:
    def refused(self, root: Path) -> StoreFormatError:
        before = snapshot(root)
        with pytest.raises(StoreFormatError) as caught:
            Store(root)
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
        store.close()
        for text in ("2", "99", "garbage", "-1", "1.5", "\xff", "\xb2", "9" * 5000):
            (store.root / "format").write_text(text, encoding="utf-8")
            with row(text[:9]):
                assert "Update smartcache" in self.refused(store.root).hint

    def test_what_is_no_store_if_none_may_be_made(self, tmp_path: Path) -> None:
        with pytest.raises(StoreFormatError):
            Volume(tmp_path / "none", load_settings(), create=False)
        assert not (tmp_path / "none").exists()

    def test_a_file_in_the_place_of_the_root_or_in_the_way_to_it(self, tmp_path: Path) -> None:
        path = write(tmp_path / "file", b"mine")
        for root in (path, path / "store"):
            with row(root), pytest.raises(StoreUnwritableError):
                Store(root)
        assert path.read_bytes() == b"mine"

    @pytest.mark.skipif(
        hasattr(os, "geteuid") and os.geteuid() == 0, reason="root writes everywhere"
    )
    def test_a_root_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "closed").mkdir(mode=0o555)
        with pytest.raises(StoreUnwritableError):
            Store(tmp_path / "closed" / "store")
        assert list((tmp_path / "closed").iterdir()) == []


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
                    with store.key_locks.hold("key"), store.volume.guard("test", exclusive=True):
                        modes = {each: mode_of(each) for each in (root, *root.rglob("*"))}
            finally:
                os.umask(before)
            assert modes.pop(blob_path(store)) == 0o444
            for each, mode in modes.items():
                assert mode == (0o700 if each.is_dir() else 0o600), each
            for folder in (above, above / "models"):  # nobody else can write them
                assert mode_of(folder) == (0o755 & ~mask) | 0o700

    def test_an_empty_directory_made_for_it_is_closed_first(self, tmp_path: Path) -> None:
        (tmp_path / "store").mkdir()
        (tmp_path / "store").chmod(0o775)
        with Store(tmp_path / "store") as store:
            assert mode_of(store.root) == 0o700

    def test_what_others_could_read_is_closed_to_them(self, store: Store) -> None:
        store.close()
        for path in (store.root, store.root / "tmp", store.root / "index.sqlite3"):
            path.chmod(mode_of(path) | 0o055)
        Store(store.root).close()
        assert mode_of(store.root) == mode_of(store.root / "tmp") == 0o700
        assert mode_of(store.root / "index.sqlite3") == 0o600


class TestNames:
    def test_a_blob_lies_under_the_first_byte_of_its_digest(self, tmp_path: Path) -> None:
        digest = "ab" * 32
        assert Path(Layout(tmp_path).blob(digest)) == tmp_path / "blobs" / "ab" / digest

    def test_a_digest_is_64_lower_case_hexadecimal_characters(self) -> None:
        assert is_digest("ab" * 32)
        for text in ("AB" * 32, "ab" * 31, "ab" * 33, "zz" * 32, "ab" * 32 + "\n", ""):
            assert not is_digest(text), text

    def test_making_a_layout_touches_nothing(self, tmp_path: Path) -> None:
        layout = Layout(tmp_path / "none")
        assert not layout.exists()
        assert list(tmp_path.iterdir()) == []
