"""What a set keeps in SQLite: what is small, changes in place, and may be lost.

Failures that are remembered, which packs there should be, and when artifacts were last used. No
artifact depends on it: a file that is damaged is set aside, and a new one begins empty.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar

import numpy as np

from smartcache.artifacts.engine.packs import Column
from smartcache.errors import (
    IndexDamagedError,
    LockTimeoutError,
    NoSpaceError,
    StoreError,
    StoreUnwritableError,
)
from smartcache.system.sqlite import Database

_log = logging.getLogger(__name__)
NAME = "index.sqlite3"
_BEGAN = "began_at"
_VERSION_1 = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE failures (
    key       BLOB PRIMARY KEY,
    reason    TEXT NOT NULL,
    count     INTEGER NOT NULL,
    failed_at INTEGER NOT NULL
) WITHOUT ROWID;
-- What every pack had when its writer left it, so that a loss is noticed.
CREATE TABLE packs (name TEXT PRIMARY KEY, size INTEGER NOT NULL, records INTEGER NOT NULL)
    WITHOUT ROWID;
-- By the hash of the key, as a signed number: when it was last read, in Unix seconds.
CREATE TABLE uses (hash INTEGER PRIMARY KEY, used_at INTEGER NOT NULL);
"""


class SetIndex(Database):
    """The index of one set."""

    schema: ClassVar[str] = _VERSION_1
    began_at = 0
    """When it was made: of uses before that, it knows nothing."""

    def failure(self, key: bytes) -> tuple[str, int, int] | None:
        """Return reason, count and time of a failure that is remembered."""
        row = self.select_one("SELECT reason, count, failed_at FROM failures WHERE key = ?", key)
        return None if row is None else (str(row[0]), int(row[1]), int(row[2]))

    def failures(self) -> list[tuple[bytes, str, int, int]]:
        """Return all failures that are remembered."""
        rows = self.select("SELECT key, reason, count, failed_at FROM failures ORDER BY key")
        return [(bytes(row[0]), str(row[1]), int(row[2]), int(row[3])) for row in rows]

    def failed(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return those of some keys whose failures are remembered."""
        if self.select_one("SELECT 1 FROM failures LIMIT 1") is None:
            return set()
        return {key for key in keys if self.failure(key) is not None}

    def add_failure(self, key: bytes, reason: str, now: int) -> None:
        """Remember a failure, once more."""
        sql = (
            "INSERT INTO failures VALUES (?, ?, 1, ?) ON CONFLICT (key) DO UPDATE"
            " SET reason = excluded.reason, count = count + 1, failed_at = excluded.failed_at"
        )
        with self.write():
            self.execute(sql, key, reason, now)

    def drop_failures(self, keys: Iterable[bytes]) -> int:
        """Forget failures; say how many there were."""
        if self.select_one("SELECT 1 FROM failures LIMIT 1") is None:
            return 0
        with self.write():
            return self.execute_many("DELETE FROM failures WHERE key = ?", [(key,) for key in keys])

    def packs(self) -> dict[str, tuple[int, int]]:
        """Return, by name, the size that each pack had at least, and how many records."""
        rows = self.select("SELECT name, size, records FROM packs")
        return {str(row[0]): (int(row[1]), int(row[2])) for row in rows}

    def add_pack(self, name: str, size: int, records: int) -> None:
        """Note what a pack has."""
        with self.write():
            self.execute("INSERT OR REPLACE INTO packs VALUES (?, ?, ?)", name, size, records)

    def drop_packs(self, names: Iterable[str]) -> None:
        """Forget packs."""
        with self.write():
            self.execute_many("DELETE FROM packs WHERE name = ?", [(name,) for name in names])

    def add_uses(self, uses: Mapping[int, int]) -> None:
        """Note when artifacts were used, by the hashes of their keys."""
        sql = (
            "INSERT INTO uses VALUES (?, ?) ON CONFLICT (hash) DO UPDATE"
            " SET used_at = max(used_at, excluded.used_at)"
        )
        with self.write():
            self.execute_many(sql, [(_signed(each), time) for each, time in uses.items()])

    def last_use(self, hash_: int) -> int:
        """Return when an artifact was last used, by the hash of its key; 0: it is not noted."""
        row = self.select_one("SELECT used_at FROM uses WHERE hash = ?", _signed(hash_))
        return 0 if row is None else int(row[0])

    def begin(self, now: int) -> None:
        """Note when it was made, unless it has uses already."""
        if self.meta(_BEGAN) is None and self.select_one("SELECT 1 FROM uses LIMIT 1") is None:
            with self.write():
                self.set_meta(_BEGAN, str(now))
        self.began_at = int(self.meta(_BEGAN) or 0)

    def uses(self) -> tuple[Column, Column]:
        """Return the hashes, sorted, and when each was last used."""
        rows = self.select("SELECT hash, used_at FROM uses")
        both = np.array(rows, np.int64).reshape(-1, 2)
        hashes = np.ascontiguousarray(both[:, 0]).view(np.uint64)
        order = np.argsort(hashes)
        return hashes[order], both[order, 1]

    def keep_uses(self, hashes: Column) -> None:
        """Forget the uses of what is not there any more; `hashes` is sorted."""
        known, _ = self.uses()
        at = np.minimum(np.searchsorted(hashes, known), max(0, len(hashes) - 1))
        gone = known if not len(hashes) else known[hashes[at] != known]
        if len(gone):
            with self.write():
                rows = [(_signed(each),) for each in gone.tolist()]
                self.execute_many("DELETE FROM uses WHERE hash = ?", rows)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def open_index(folder: Path, now: int, *, wal: bool) -> SetIndex:
    """Open the index of a set, made (now) if it is not there; a damaged one is set aside."""
    path = folder / NAME
    try:
        index = SetIndex(path, wal=wal)
        index.failures()
        index.begin(now)
    except (NoSpaceError, StoreUnwritableError, LockTimeoutError):
        raise
    except (IndexDamagedError, StoreError, ValueError, TypeError) as error:
        _log.warning("%s is damaged, and begins anew: no artifact is lost (%s)", path, error)
        stamp = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(2)}"
        for suffix in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                os.rename(f"{path}{suffix}", f"{path}.damaged-{stamp}{suffix}")
        index = SetIndex(path, wal=wal)
        index.begin(now)
    return index
