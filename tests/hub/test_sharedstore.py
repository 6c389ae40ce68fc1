"""huggingface_hub's shared blob store is read where its marker allows it, and nowhere else."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest
from filelock import FileLock, Timeout

from tests.api import BadDigestError, HubError, LockTimeoutError
from tests.api import hub_layout as layout
from tests.hub.shared_stores import MARKER, add_entry, make_shared_store
from tests.store.files import mode_of

A = "ab" + "1" * 62
B = "cd" + "2" * 62


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """An HF cache with a shared store that has one entry, A, of five bytes."""
    make_shared_store(tmp_path / "hub")
    add_entry(tmp_path / "hub", A, b"bytes")
    return tmp_path / "hub"


class TestUsable:
    def test_with_the_marker_of_version_1(self, cache: Path) -> None:
        assert layout.has_shared_store(cache)
        assert layout.why_no_shared_store(cache) == ""

    def test_not_with_another_marker_or_none(self, tmp_path: Path) -> None:
        marker = make_shared_store(tmp_path) / MARKER
        for text in (b"", b"1", b"1\r\n", b"2\n", b"1\n\n", b"\xff\n"):
            marker.write_bytes(text)
            assert not layout.has_shared_store(tmp_path), text
            assert "another version" in layout.why_no_shared_store(tmp_path), text
        marker.unlink()
        assert not layout.has_shared_store(tmp_path)
        assert "no marker" in layout.why_no_shared_store(tmp_path)

    def test_not_if_the_marker_or_the_directory_is_a_symlink(self, cache: Path) -> None:
        for name, words in ((f"blobs/{MARKER}", ""), ("blobs", "not a plain directory")):
            (cache / name).rename(cache / "elsewhere")
            (cache / name).symlink_to(cache / "elsewhere")
            assert not layout.has_shared_store(cache), name
            assert words in layout.why_no_shared_store(cache)
            (cache / name).unlink()
            (cache / "elsewhere").rename(cache / name)

    def test_not_before_the_client_has_made_it(self, tmp_path: Path) -> None:
        assert "no shared blob store yet" in layout.why_no_shared_store(tmp_path)
        assert "no such folder" in layout.why_no_shared_store(tmp_path / "nowhere")


class TestFind:
    def test_a_file_of_the_size_in_the_first_cache_that_has_it(
        self, cache: Path, tmp_path: Path
    ) -> None:
        path = cache / "blobs" / "ab" / A
        assert layout.shared_entry(cache, A.upper()) == path
        make_shared_store(tmp_path / "other")
        caches = [tmp_path / "nowhere", tmp_path / "other", cache]
        assert layout.find_shared_entry(caches, A, 5) == path

    def test_not_of_another_size_or_hash_nor_through_a_symlink(self, cache: Path) -> None:
        assert layout.find_shared_entry([cache], A, 6) is None
        assert layout.find_shared_entry([cache], B, 5) is None
        (cache / "blobs" / "cd").mkdir()
        (cache / "blobs" / "cd" / B).symlink_to(cache / "blobs" / "ab" / A)
        assert layout.find_shared_entry([cache], B, 5) is None
        for xet in ("", "../../etc/passwd", A[:-1], A + "0", "g" * 64):
            assert layout.find_shared_entry([cache], xet, 5) is None
            with pytest.raises(BadDigestError):
                layout.shared_entry(cache, xet)

    def test_nothing_where_the_marker_is_missing(self, cache: Path) -> None:
        (cache / "blobs" / MARKER).unlink()
        assert layout.find_shared_entry([cache], A, 5) is None


class TestPrefix:
    def test_is_as_open_as_the_cache_unless_it_is_there(self, cache: Path) -> None:
        for mode in (0o755, 0o700, 0o2775, 0o3777):
            cache.chmod(mode)
            layout.make_shared_prefix(cache, B)
            assert mode_of(cache / "blobs" / "cd") == mode
            (cache / "blobs" / "cd").rmdir()
        (cache / "blobs" / "ab").chmod(0o711)
        layout.make_shared_prefix(cache, A)
        assert mode_of(cache / "blobs" / "ab") == 0o711

    def test_never_through_a_symlink(self, cache: Path, tmp_path: Path) -> None:
        (tmp_path / "outside").mkdir()
        (cache / "blobs" / "cd").symlink_to(tmp_path / "outside")
        with pytest.raises(HubError, match="not a plain directory"):
            layout.make_shared_prefix(cache, B)


class TestLock:
    def test_is_the_one_that_the_client_takes(self, cache: Path) -> None:
        path = layout.shared_entry(cache, A)
        with layout.shared_lock(path):
            assert mode_of(f"{path}.lock") == 0o666
            with pytest.raises(Timeout):
                FileLock(f"{path}.lock", mode=0o666).acquire(timeout=0)
        with FileLock(f"{path}.lock", mode=0o666).acquire(timeout=0):
            pass

    def test_waits_for_the_client(self, cache: Path) -> None:
        path = layout.shared_entry(cache, A)
        client = FileLock(f"{path}.lock", mode=0o666, thread_local=False)
        client.acquire()
        threading.Timer(0.1, client.release).start()
        with layout.shared_lock(path):
            assert not client.is_locked

    def test_but_not_for_ever(self, cache: Path) -> None:
        path = layout.shared_entry(cache, A)
        with (
            FileLock(f"{path}.lock", mode=0o666).acquire(),
            pytest.raises(LockTimeoutError, match="keeps") as caught,
            layout.shared_lock(path, timeout=0.01),
        ):
            pytest.fail("it is taken")
        assert caught.value.hint

    def test_is_made_through_no_symlink(self, cache: Path, tmp_path: Path) -> None:
        path = layout.shared_entry(cache, A)
        os.symlink(tmp_path / "victim", f"{path}.lock")
        with pytest.raises(OSError), layout.shared_lock(path):  # noqa: PT011 - ELOOP
            pytest.fail("it is a symlink")
        assert not (tmp_path / "victim").exists()

    def test_is_no_fifo(self, cache: Path) -> None:
        path = layout.shared_entry(cache, A)
        os.mkfifo(f"{path}.lock")
        with pytest.raises((HubError, OSError)), layout.shared_lock(path):
            pytest.fail("it is no file")
        assert stat.S_ISFIFO(os.lstat(f"{path}.lock").st_mode)
