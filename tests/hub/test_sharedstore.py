"""huggingface_hub's shared blob store is read where its marker allows it, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from smartcache.hub import layout
from tests.hub.shared_stores import MARKER, add_entry, make_shared_store

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

    def test_not_with_another_marker_or_none(self, tmp_path: Path) -> None:
        marker = make_shared_store(tmp_path) / MARKER
        for text in (b"", b"1", b"1\r\n", b"2\n", b"1\n\n", b"\xff\n"):
            marker.write_bytes(text)
            assert not layout.has_shared_store(tmp_path), text
        marker.unlink()
        assert not layout.has_shared_store(tmp_path)

    def test_not_if_the_marker_or_the_directory_is_a_symlink(self, cache: Path) -> None:
        for name in (f"blobs/{MARKER}", "blobs"):
            (cache / name).rename(cache / "elsewhere")
            (cache / name).symlink_to(cache / "elsewhere")
            assert not layout.has_shared_store(cache), name
            (cache / name).unlink()
            (cache / "elsewhere").rename(cache / name)

    def test_not_before_the_client_has_made_it(self, tmp_path: Path) -> None:
        assert not layout.has_shared_store(tmp_path)
        assert not layout.has_shared_store(tmp_path / "nowhere")


class TestFind:
    def test_a_file_of_the_size_in_the_first_cache_that_has_it(
        self, cache: Path, tmp_path: Path
    ) -> None:
        path = cache / "blobs" / "ab" / A
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

    def test_nothing_where_the_marker_is_missing(self, cache: Path) -> None:
        (cache / "blobs" / MARKER).unlink()
        assert layout.find_shared_entry([cache], A, 5) is None
