"""Tiny datasets: images with real headers, captions, and encoders that say whom they encoded.

A file that was written in the last two seconds is read again by the next look, and its row is
written again: that is by design. Tests to which it matters call `pass_time(60)` before they look.
"""

from __future__ import annotations

import functools
import os
import sqlite3
import sys
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from blake3 import blake3
from PIL import Image

from smartcache.cache import SmartCache
from smartcache.training import Item, Sources
from smartcache.training.look import Listing, look
from smartcache.training.table import SourceTable

if TYPE_CHECKING:
    import torch


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[SmartCache]:
    with SmartCache(tmp_path / "store") as opened:
        yield opened


class Photos:
    """A folder of images and of captions beside them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    def add(
        self,
        name: str,
        caption: str | None = None,
        *,
        size: tuple[int, int] = (8, 8),
        like: str | None = None,
    ) -> Path:
        """Write an image; those of other names look different, unless it is `like` one of them."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        number = zlib.crc32(os.fsencode(like or name))
        Image.new("RGB", size, tuple(number.to_bytes(4, "little")[:3])).save(
            path, None if path.suffix else "PNG"
        )
        if caption is not None:
            path.with_suffix(".txt").write_text(caption, "utf-8")
        return path

    def fill(self, count: int) -> list[Path]:
        """Write images with captions: 000.png, 000.txt, and so on."""
        return [self.add(f"{number:03}.png", f"caption {number}") for number in range(count)]


@pytest.fixture
def photos(tmp_path: Path) -> Photos:
    return Photos(tmp_path / "photos")


class Looker:
    """Looks at sources again and again, with one table."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.path = folder / "index.sqlite3"
        self.table = SourceTable(self.path, wal=True)

    def __call__(self, sources: Sources | Path, *reads: str, **options: bool) -> Listing:
        given = sources if isinstance(sources, Sources) else Sources(sources)
        return look(self.table, given, reads, **options)  # type: ignore[arg-type]

    def names(self, sources: Sources | Path) -> list[str]:
        return names_of(self(sources))

    def contents(self) -> dict[str, set[tuple[object, ...]]]:
        """All rows of all tables."""
        with closing(sqlite3.connect(self.path)) as database:
            tables = ("folders", "files", "problems", "texts", "rows", "meta")
            return {
                table: set(database.execute(f"SELECT * FROM {table}"))  # noqa: S608
                for table in tables
            }


@pytest.fixture
def looked(tmp_path: Path) -> Iterator[Looker]:
    made = Looker(tmp_path / "table")
    yield made
    made.table.close()


def names_of(listing: Listing) -> list[str]:
    return [listing.name(number) for number in range(len(listing))]


class Counting:
    """An encoder that notes the items it was called with.

    What it returns depends on all that it reads, on bucket and on variation: wrong sharing shows.
    """

    def __init__(self, *reads: str, salt: str = "") -> None:
        self.reads = reads or ("file",)
        self.salt = salt
        self.calls: list[list[str]] = []

    @property
    def names(self) -> list[str]:
        """The names of all items it has encoded, once for each time."""
        return [name for call in self.calls for name in call]

    def __call__(self, items: list[Item]) -> torch.Tensor:
        import torch

        self.calls.append([item.name for item in items])
        return torch.stack([self.value(item) for item in items])

    def value(self, item: Item) -> torch.Tensor:
        contents = []
        for read in self.reads:
            found = item.get(read)
            contents.append(item.bytes(read) if isinstance(found, Path) else found)
        return encoded(*contents, bucket=item.bucket, variation=item.variation, salt=self.salt)


def encoded(
    *contents: object, bucket: tuple[int, int] | None = None, variation: int = 0, salt: str = ""
) -> torch.Tensor:
    """What `Counting` makes of an item that has these contents."""
    import torch

    digest = blake3(repr((contents, bucket, variation, salt)).encode()).digest()
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)


def age(path: Path, seconds: float) -> None:
    """Set the modification time back; the change time becomes now, as always."""
    st = path.stat()
    os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns - int(seconds * 1e9)))


_opened: list[str] | None = None


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and _opened is not None and isinstance(arguments[0], (str, bytes)):
        _opened.append(os.fsdecode(arguments[0]))


@functools.cache
def _install_hook() -> None:
    sys.addaudithook(_hook)  # there is no way to remove it


@contextmanager
def opening(folder: Path) -> Iterator[list[str]]:
    """Note which files below a folder this process opens: their names, in order."""
    global _opened  # noqa: PLW0603 - there is one hook
    _install_hook()
    _opened = []
    names: list[str] = []
    try:
        yield names
    finally:
        below = f"{folder}/"
        names += [path.removeprefix(below) for path in _opened if path.startswith(below)]
        _opened = None
