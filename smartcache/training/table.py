"""The table of sources of a dataset: what was read of which file, under which stat key.

SQLite, in the folder of the dataset. Files have a row each, and of that all but the name is one
BLOB (`MEMO`): a folder of 20,000 files is loaded in 20 ms, into columns. Rows are written when they
change. Paths and names are bytes, as the filesystem has them.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Final

import numpy as np

from smartcache.system.kernel import LATEST_NS
from smartcache.system.sqlite import Database

MEMO: Final = np.dtype([
    ("stat", "u1", 32), ("digest", "u1", 32), ("width", "<u4"), ("height", "<u4"),
    ("flags", "<u4"),
])  # fmt: skip
"""What is remembered of a file: its stat key, the digest of its content, the size of an image."""
STAT: Final = struct.Struct("<qqqQ")
"""The stat key: size, modification time, change time (in nanoseconds), inode."""
_REST: Final = struct.Struct("<32sIII")
ABSENT: Final = bytes(MEMO.itemsize)
"""The memo of what is not there."""
NOTHING: Final = bytes(32)
"""The digest of what has no content, and the stat key of what cannot be looked at."""
UNKNOWN: Final = (1 << 32) - 1
"""The width of what is no image, or does not tell it; 0: it was not asked."""
RACY, PROBLEM, NEW, EDITED = 1, 2, 4, 8
"""Flags: it may have changed since unnoticed; it cannot be read; why it has no output yet."""
BLOCK: Final = 256
"""Rows of a list that are kept together: what is written when one of them changes."""

_VERSION_1 = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
-- `gone`: how many files it had when it was last seen, if it is not there any more.
CREATE TABLE folders (id INTEGER PRIMARY KEY, path BLOB NOT NULL UNIQUE, gone INTEGER NOT NULL);
-- Of a field of a JSON file the name is "cat.json/prompt". `memo` is described by MEMO.
CREATE TABLE files (folder INTEGER NOT NULL, name BLOB NOT NULL, memo BLOB NOT NULL,
    PRIMARY KEY (folder, name)) WITHOUT ROWID;
CREATE TABLE problems (folder INTEGER NOT NULL, name BLOB NOT NULL, reason TEXT NOT NULL,
    PRIMARY KEY (folder, name)) WITHOUT ROWID;
CREATE TABLE texts (digest BLOB PRIMARY KEY, text TEXT NOT NULL) WITHOUT ROWID;
-- Rows of lists, some at a time, a line of JSON each.
CREATE TABLE rows (part INTEGER NOT NULL, block INTEGER NOT NULL, data TEXT NOT NULL,
    PRIMARY KEY (part, block)) WITHOUT ROWID;
"""


def packed(st: os.stat_result) -> bytes:
    """Return a stat key as the table has it."""
    times = min(st.st_mtime_ns, LATEST_NS), min(st.st_ctime_ns, LATEST_NS)
    return STAT.pack(st.st_size, *times, st.st_ino)


def memo(stat: bytes, digest: bytes, size: tuple[int, int] = (0, 0), flags: int = 0) -> bytes:
    """Return what is to be remembered of a file."""
    return stat + _REST.pack(digest, *size, flags)


def flags_of(known: bytes) -> int:
    """Return the flags of a memo."""
    return known[-4]


def digest_of(known: bytes) -> bytes:
    """Return the digest of a memo."""
    return known[32:64]


def is_unsized(known: bytes) -> bool:
    """Say whether nobody has asked for the size of an image."""
    return known[64:68] == b"\0\0\0\0"


class SourceTable(Database):
    """The table of sources of one dataset."""

    schema: ClassVar[str] = _VERSION_1

    def version(self) -> int:
        """Return a number that is another one when another connection has written something."""
        return self.number("PRAGMA data_version")

    def folders(self) -> dict[bytes, int]:
        """Return the numbers of all folders that have files, by path."""
        return dict(self.select("SELECT path, id FROM folders WHERE gone = 0 ORDER BY path"))

    def gone(self) -> dict[bytes, int]:
        """Return the folders that have vanished as a whole, and how many files they had."""
        return dict(self.select("SELECT path, gone FROM folders WHERE gone > 0 ORDER BY path"))

    def add_folder(self, path: bytes) -> int:
        """Return the number of a folder, which is there."""
        sql = "INSERT INTO folders (path, gone) VALUES (?, 0) ON CONFLICT DO UPDATE SET gone = 0"
        self.execute(sql, path)
        return self.number("SELECT id FROM folders WHERE path = ?", path)

    def drop_folder(self, number: int, count: int) -> None:
        """Forget the files of a folder that has vanished; 0: and the folder."""
        self.execute("DELETE FROM files WHERE folder = ?", number)
        self.execute("DELETE FROM problems WHERE folder = ?", number)
        self.execute("UPDATE folders SET gone = ? WHERE id = ?", count, number)
        if not count:
            self.execute("DELETE FROM folders WHERE id = ?", number)

    def forget_gone(self) -> None:
        """Take it that folders which have vanished were removed on purpose."""
        with self.write():
            self.execute("DELETE FROM folders WHERE gone > 0")

    def files(self, folder: int) -> dict[bytes, bytes]:
        """Return what is remembered of the files of a folder, in order of their names."""
        sql = "SELECT name, memo FROM files WHERE folder = ? ORDER BY name"
        return dict(self.select(sql, folder))

    def file(self, folder: int, name: bytes) -> bytes:
        """Return what is remembered of a file."""
        row = self.select_one("SELECT memo FROM files WHERE folder = ? AND name = ?", folder, name)
        return ABSENT if row is None else bytes(row[0])

    def shrink(self) -> None:
        """Give the memory of pages back: all of them were looked at."""
        self.execute("PRAGMA shrink_memory")

    def add_files(self, rows: Iterable[tuple[int, bytes, bytes]]) -> None:
        """Remember files."""
        self.execute_many("INSERT OR REPLACE INTO files VALUES (?, ?, ?)", rows)

    def drop_files(self, rows: Sequence[tuple[int, bytes]]) -> None:
        """Forget files."""
        for name in ("files", "problems"):
            self.execute_many(f"DELETE FROM {name} WHERE folder = ? AND name = ?", rows)  # noqa: S608

    def problems(self) -> dict[tuple[int, bytes], str]:
        """Return why files cannot be read."""
        rows = self.select("SELECT folder, name, reason FROM problems")
        return {(folder, name): reason for folder, name, reason in rows}

    def set_problems(self, rows: Mapping[tuple[int, bytes], str]) -> None:
        """Note why files cannot be read; "": they can."""
        keys = list(rows)
        self.execute_many("DELETE FROM problems WHERE folder = ? AND name = ?", keys)
        bad = [(*key, reason) for key, reason in rows.items() if reason]
        self.execute_many("INSERT INTO problems VALUES (?, ?, ?)", bad)

    def add_texts(self, texts: Mapping[bytes, str]) -> None:
        """Keep texts by their digests."""
        self.execute_many("INSERT OR IGNORE INTO texts VALUES (?, ?)", list(texts.items()))

    def drop_texts(self) -> None:
        """Forget texts that no file has any more."""
        with self.write():
            self.execute(
                "DELETE FROM texts WHERE digest NOT IN (SELECT substr(memo, 33, 32) FROM files)"
            )

    def text(self, digest: bytes) -> str | None:
        """Return a text by its digest."""
        row = self.select_one("SELECT text FROM texts WHERE digest = ?", digest)
        return None if row is None else str(row[0])

    def rows(self, part: int) -> list[str]:
        """Return the rows of a list, block by block: a line of JSON each."""
        found = self.select("SELECT data FROM rows WHERE part = ? ORDER BY block", part)
        return [data for (data,) in found]

    def stamp(self, part: int) -> str | None:
        """Return what says that the file of a list is as it was when its rows were kept."""
        return self.meta(f"rows {part}")

    def set_rows(self, part: int, blocks: Sequence[str], stamp: str | None) -> None:
        """Keep the rows of a list; what is there already is not written again."""
        known = dict(self.select("SELECT block, data FROM rows WHERE part = ?", part))
        changed = [
            (part, number, data) for number, data in enumerate(blocks) if known.get(number) != data
        ]
        if changed or len(known) > len(blocks) or self.stamp(part) != stamp:
            with self.write():
                self.execute_many("INSERT OR REPLACE INTO rows VALUES (?, ?, ?)", changed)
                self.execute("DELETE FROM rows WHERE part = ? AND block >= ?", part, len(blocks))
                self.set_meta(f"rows {part}", stamp)

    def drop_rows(self, lists: Iterable[int]) -> None:
        """Forget the rows of lists that are no sources any more."""
        old = {row[0] for row in self.select("SELECT DISTINCT part FROM rows")} - set(lists)
        if old:
            with self.write():
                self.execute_many("DELETE FROM rows WHERE part = ?", [(part,) for part in old])
                for part in old:
                    self.set_meta(f"rows {part}", None)
