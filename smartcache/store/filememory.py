"""The SQL for what lies outside: remembered hashes and other volumes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from smartcache.store.database import Database, of_row
from smartcache.store.digest import Algorithm
from smartcache.store.records import Memo, Trust
from smartcache.store.schema import signed
from smartcache.store.statkey import StatKey

_MEMO_COLUMNS: dict[Algorithm, str] = {
    "blake3": "blake3",
    "sha256": "sha256",
    "xet": "xet",
    "git-sha1": "git_sha1",
}
_COLUMNS = ", ".join(_MEMO_COLUMNS.values())


class FileMemory(Database):
    """What is known of files that are not blobs."""

    def memo(self, filesystem: str, inode: int) -> Memo | None:
        """Return the remembered hashes of a file."""
        return self.memos(filesystem, [inode]).get(signed(inode))

    def memos(self, filesystem: str, inodes: Iterable[int]) -> dict[int, Memo]:
        """Return the remembered hashes of files of one filesystem, by inode."""
        sql = (
            f"SELECT inode, size, mtime_ns, ctime_ns, racy, {_COLUMNS} FROM memos"
            " WHERE filesystem = ? AND inode IN (SELECT value FROM json_each(?))"
        )
        wanted = json.dumps([signed(inode) for inode in inodes])
        return {row[0]: _memo(row[1:]) for row in self._all(sql, filesystem, wanted)}

    def put_memo(self, filesystem: str, inode: int, memo: Memo) -> None:
        """Remember hashes of a file; they replace what was known of it."""
        raw = [memo.values.get(name) for name in _MEMO_COLUMNS]
        hashes = [None if value is None else bytes.fromhex(value) for value in raw]
        key = memo.key
        sql = "INSERT OR REPLACE INTO memos VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, NULL)"
        values = (
            filesystem,
            signed(inode),
            key.size,
            key.mtime_ns,
            key.ctime_ns,
            int(memo.is_racy),
        )
        self._run(sql, *values, *hashes)

    def add_volume(self, path: Path, filesystem: str) -> None:
        """Remember another volume."""
        sql = "INSERT OR REPLACE INTO volumes VALUES (?, ?, ?)"
        self._run(sql, os.fsencode(path), filesystem, int(time.time()))

    def volumes(self) -> list[tuple[Path, str]]:
        """Return (path, filesystem) of the other volumes."""
        rows = self._all("SELECT path, filesystem FROM volumes ORDER BY path")
        return list(map(_volume, rows))

    def add_lost(self, digest: str, size: int) -> None:
        """Remember a blob whose bytes are not here now, for what holds it or points at it."""
        sql = (
            "INSERT OR IGNORE INTO blobs (digest, size, allocated, inode, mtime_ns, ctime_ns,"
            " links, trust, added_at, used_at) VALUES (?, ?, 0, -1, 0, 0, 0, ?, ?, ?)"
        )
        now = int(time.time())
        self._run(sql, bytes.fromhex(digest), size, int(Trust.LOST), now, now)


@of_row
def _volume(row: tuple[Any, ...]) -> tuple[Path, str]:
    return Path(os.fsdecode(row[0])), str(row[1])


@of_row
def _memo(row: tuple[Any, ...]) -> Memo:
    size, mtime_ns, ctime_ns, racy, *hashes = row
    found = zip(_MEMO_COLUMNS, hashes, strict=True)
    values = {name: value.hex() for name, value in found if value is not None}
    return Memo(key=StatKey(size, mtime_ns, ctime_ns), is_racy=bool(racy), values=values)
