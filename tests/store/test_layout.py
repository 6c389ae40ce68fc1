from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from smartcache.config import load_settings
from smartcache.errors import StoreFormatError, StoreUnwritableError
from smartcache.store.layout import FORMAT, Layout, is_digest
from smartcache.store.store import Store
from smartcache.store.volume import Volume
from tests.store.files import WEIGHTS, mode_of, snapshot, write

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX modes")
DIRECTORIES = ("bad", "blobs", "leases", "sets", "tmp", "trash")


class TestNew:
    def test_a_new_store_has_the_whole_tree(self, tmp_path: Path) -> None:
        root = tmp_path / "some" / "where"
        with Store(root):
            names = set(os.listdir(root))
        assert {"format", "CACHEDIR.TAG", "index.sqlite3", *DIRECTORIES} <= names
        assert (root / "format").read_text() == f"{FORMAT}\n"

    def test_backup_programs_see_a_cache(self, store: Store) -> None:
        tag = (store.root / "CACHEDIR.TAG").read_text()
        assert tag.startswith("Signature: 8a477f597d28d172789f06886806bc55\n")

    def test_every_path_is_named_in_the_docstring(self, store: Store) -> None:
        import smartcache.store.layout as module

        store.put_stream([WEIGHTS])
        for name in os.listdir(store.root):
            assert name.removesuffix("-wal").removesuffix("-shm") in (module.__doc__ or "")

    def test_an_empty_directory_becomes_a_store(self, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        with Store(tmp_path / "empty") as store:
            assert list(store.blobs()) == []

    def test_a_store_that_was_half_made_is_finished(self, tmp_path: Path) -> None:
        root = tmp_path / "store"
        (root / "blobs").mkdir(parents=True)
        (root / ".format-12345678").write_text("")
        with Store(root) as store:
            store.put_stream([WEIGHTS])

    @pytest.mark.parametrize("name", DIRECTORIES)
    def test_a_directory_that_is_missing_is_made_again(self, store: Store, name: str) -> None:
        store.close()
        (store.root / name).rmdir()
        with Store(store.root) as again:
            assert (again.root / name).is_dir()
            again.put_stream([WEIGHTS])

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

    @pytest.mark.parametrize("name", ["photo.jpg", "models", ".hidden"])
    def test_a_directory_of_somebody_else(self, tmp_path: Path, name: str) -> None:
        root = tmp_path / "mine"
        write(root / name, b"mine")
        assert "not empty" in self.refused(root).message

    def test_a_directory_that_only_looks_like_a_store(self, tmp_path: Path) -> None:
        """The cache of one Hub repo has `blobs` too."""
        root = tmp_path / "models--a--b"
        for name in ("blobs/abc", "refs/main", "snapshots/1/config.json"):
            write(root / name, b"x")
        self.refused(root)

    @pytest.mark.parametrize(
        "text", ["2", "99", "garbage", "", "-1", "1.5", "\xff", "\xb2", "9" * 5000]
    )
    def test_a_newer_or_unknown_format(self, store: Store, text: str) -> None:
        store.put_stream([WEIGHTS])
        store.close()
        (store.root / "format").write_text(text, encoding="utf-8")
        assert "Update smartcache" in self.refused(store.root).hint

    def test_what_is_no_store_if_none_may_be_made(self, tmp_path: Path) -> None:
        with pytest.raises(StoreFormatError):
            Volume(tmp_path / "none", load_settings(), create=False)
        assert not (tmp_path / "none").exists()

    def test_a_circle_of_moved_stores(self, tmp_path: Path) -> None:
        for name, target in (("a", "b"), ("b", "a")):
            (tmp_path / name).mkdir()
            (tmp_path / name / "moved-to").write_text(f"{tmp_path / target}\n")
        with pytest.raises(StoreFormatError, match="circle"):
            Store(tmp_path / "a")

    @pytest.mark.parametrize("text", ["/a\0b", "", "relative/path", "/x" * 4000])
    def test_a_forwarding_that_is_no_path(self, store: Store, text: str) -> None:
        store.close()
        (store.root / "moved-to").write_text(text)
        assert "moved-to" in str(self.refused(store.root))

    def test_a_file_in_the_place_of_the_root(self, tmp_path: Path) -> None:
        path = write(tmp_path / "file", b"mine")
        with pytest.raises(StoreUnwritableError):
            Store(path)
        assert path.read_bytes() == b"mine"

    def test_a_file_in_the_way_to_the_root(self, tmp_path: Path) -> None:
        write(tmp_path / "file", b"mine")
        with pytest.raises(StoreUnwritableError):
            Store(tmp_path / "file" / "store")

    @pytest.mark.skipif(
        hasattr(os, "geteuid") and os.geteuid() == 0, reason="root writes everywhere"
    )
    def test_a_root_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "closed").mkdir(mode=0o555)
        with pytest.raises(StoreUnwritableError):
            Store(tmp_path / "closed" / "store")
        assert list((tmp_path / "closed").iterdir()) == []


class TestModes:
    def test_a_private_store_is_written_by_its_owner_only(self, tmp_path: Path) -> None:
        mask = os.umask(0o002)
        try:
            with Store(tmp_path / "store") as store:
                store.put_stream([WEIGHTS])
        finally:
            os.umask(mask)
        for path in (tmp_path / "store").rglob("*"):
            if path.is_dir() and path.name != "leases":
                assert mode_of(path) == 0o755

    def test_a_shared_store_is_written_by_its_group_and_nobody_removes_anothers_files(
        self, tmp_path: Path
    ) -> None:
        settings = load_settings(home=tmp_path / "store", shared=True)
        mask = os.umask(0o077)
        try:
            with Store(settings=settings) as store:
                digest = store.put_stream([WEIGHTS]).digest
        finally:
            os.umask(mask)
        for name in DIRECTORIES:
            assert mode_of(store.root / name) == 0o3775
        assert mode_of(store.root) & 0o2775 == 0o2775
        assert mode_of(store.root / "blobs" / digest[:2]) == 0o3775
        assert mode_of(store.volume.layout.blob(digest)) == 0o444
        group = stat.S_IRGRP | stat.S_IWGRP
        for name in ("index.sqlite3", "lock"):
            assert mode_of(store.root / name) & group == group


class TestNames:
    def test_a_blob_lies_under_the_first_byte_of_its_digest(self, tmp_path: Path) -> None:
        digest = "ab" * 32
        assert Path(Layout(tmp_path).blob(digest)) == tmp_path / "blobs" / "ab" / digest

    @pytest.mark.parametrize(
        ("text", "is_one"),
        [
            ("ab" * 32, True),
            ("AB" * 32, False),
            ("ab" * 31, False),
            ("ab" * 33, False),
            ("zz" * 32, False),
            ("ab" * 32 + "\n", False),
            ("", False),
        ],
    )
    def test_a_digest_is_64_lower_case_hexadecimal_characters(
        self, text: str, is_one: bool
    ) -> None:
        assert is_digest(text) == is_one

    def test_making_a_layout_touches_nothing(self, tmp_path: Path) -> None:
        layout = Layout(tmp_path / "none")
        assert not layout.exists()
        assert layout.forwarding() is None
        assert list(tmp_path.iterdir()) == []
