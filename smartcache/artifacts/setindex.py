"""The SQL of a set: which artifacts there are, where they lie, and what is dead.

The index is a memory of the packs: `recovery` makes it again from them. One method answers one
question; the rows of a group of records are written by `commit`.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

from smartcache.artifacts.records import position, room
from smartcache.artifacts.rows import (
    Chunk,
    Entry,
    Pack,
    entry_values,
    nonsense,
    signed,
    to_blob,
    to_chunk,
    to_entry,
    to_number,
    to_pack,
)
from smartcache.artifacts.setschema import MIGRATIONS
from smartcache.errors import IndexDamagedError, SetIndexDamagedError, StoreError
from smartcache.store.database import Database
from smartcache.store.schema import migrate

_LATEST = 253_402_300_799
"""The last second that a date can have."""
_STEPS = (100, 25, 5, 1)
"""Rows that are inserted with one statement: few kinds of it, so that SQLite knows them all, and at
most 999 values, which is all that an older one takes."""
_MOST_ASKED = 500
"""Values in one IN (...)."""
_ENTRY = "seq, place, length, layout, chunks, used_at, expires_at, pinned"
_OF_ARTIFACT = _ENTRY.replace("seq", "artifacts.seq")
_UNPINNED = "COALESCE(pinned, 0) <= 0"
_TABLES = "SELECT CAST(name AS BLOB), CAST(tbl_name AS BLOB), CAST(sql AS BLOB) FROM sqlite_master"
_PACK = "number, sealed, watermark, live, artifacts, min_seq, max_seq"


class SetIndex(Database):
    """The index of one set."""

    migrations: ClassVar[tuple[str, ...] | None] = MIGRATIONS

    _connections = 0

    def __init__(self, path: Path, *, wal: bool) -> None:
        """Open the index; SetIndexDamagedError if its tables are not those of a set."""
        with _damage_named(path):
            super().__init__(path, wal=wal)
            if set(self._all(_TABLES)) != _tables():
                self.close()
                raise SetIndexDamagedError(f"{path} is damaged: its tables are wrong", path=path)

    def _connect(self) -> sqlite3.Connection:
        self._connections += 1
        with _damage_named(self.path):
            return super()._connect()

    @contextmanager
    def write(self, *, durable: bool = False) -> Iterator[None]:
        """Run a block as one transaction, as every database does."""
        with _damage_named(self.path), super().write(durable=durable):
            yield

    def data_version(self) -> int:
        """Return a number that is another one when another process may have written the index.

        SQLite counts for each connection anew, so the number of the connection is a part of it.
        """
        with self._gate:
            version = self._value("PRAGMA data_version")
            return self._connections << 32 | version

    def note(self, key: str) -> str | None:
        """Return a note about the set; also a damaged one, that is no text any more."""
        row = self._one("SELECT CAST(value AS BLOB) FROM meta WHERE key = ?", key)
        return None if row is None or row[0] is None else to_blob(row[0]).decode("utf-8", "replace")

    # artifacts

    def entries(self, keys: Collection[bytes]) -> dict[bytes, Entry]:
        """Return the rows of those keys that there are."""
        sql = f"SELECT key, {_ENTRY} FROM artifacts WHERE key IN "
        return {row[0]: to_entry(row[1:]) for row in self._asked(sql, keys)}

    def entry(self, key: bytes) -> Entry | None:
        """Return the row of one key."""
        row = self._one(f"SELECT {_ENTRY} FROM artifacts WHERE key = ?", key)
        return None if row is None else to_entry(row)

    def keys_after(self, key: bytes, count: int) -> list[bytes]:
        """Return the next keys, in order."""
        sql = "SELECT key FROM artifacts WHERE key > ? ORDER BY key LIMIT ?"
        return [to_blob(row[0]) for row in self._all(sql, key, count)]

    def entries_after(self, key: bytes, count: int) -> list[tuple[bytes, Entry]]:
        """Return the next rows, in order of their keys."""
        sql = f"SELECT key, {_ENTRY} FROM artifacts WHERE key > ? ORDER BY key LIMIT ?"
        return [(to_blob(row[0]), to_entry(row[1:])) for row in self._all(sql, key, count)]

    def entries_in(self, pack: int) -> Iterator[tuple[bytes, Entry]]:
        """Go through the artifacts whose records lie in a pack."""
        sql = f"SELECT key, {_ENTRY} FROM artifacts WHERE place BETWEEN ? AND ?"
        for row in self._each(sql, pack << 40, (pack + 1 << 40) - 1):
            yield to_blob(row[0]), to_entry(row[1:])

    def least_used(self, before: int | None = None) -> Iterator[tuple[bytes, Entry]]:
        """Go through the artifacts that are not pinned, those first that were not used longest."""
        until = "" if before is None else f"AND used_at < {before:d}"
        sql = f"SELECT key, {_ENTRY} FROM artifacts WHERE {_UNPINNED} {until} ORDER BY used_at, seq"
        for row in self._each(sql):
            yield to_blob(row[0]), to_entry(row[1:])

    def expired(self, now: int) -> list[tuple[bytes, Entry]]:
        """Return the artifacts that are past their time and not pinned."""
        sql = f"SELECT key, {_ENTRY} FROM artifacts WHERE expires_at <= ? AND {_UNPINNED}"
        return [(to_blob(row[0]), to_entry(row[1:])) for row in self._all(sql, now)]

    def expired_count(self, now: int) -> int:
        """Return how many artifacts are past their time and not pinned."""
        sql = f"SELECT COUNT(*) FROM artifacts WHERE expires_at <= ? AND {_UNPINNED}"
        return self._value(sql, now)

    def put_entries(self, rows: Iterable[tuple[bytes, Entry]]) -> None:
        """Write rows of artifacts, in place of those there are."""
        values = [entry_values(key, entry) for key, entry in rows]
        self._insert("INSERT OR REPLACE INTO artifacts", values)

    def drop_entries(self, keys: Iterable[bytes]) -> None:
        """Remove the rows of artifacts."""
        self._run_many("DELETE FROM artifacts WHERE key = ?", ((key,) for key in keys))

    def touch(self, keys: Iterable[bytes], now: int) -> None:
        """Record that artifacts were used."""
        sql = "UPDATE artifacts SET used_at = ? WHERE key = ? AND used_at < ?"
        self._run_many(sql, ((now, key, now) for key in keys))

    def totals(self) -> tuple[int, int]:
        """Return how many artifacts there are, and the bytes of the records that are wanted."""
        sql = "SELECT SUM(artifacts), SUM(live), SUM(watermark) FROM packs"
        artifacts, live, size = (to_number(value or 0) for value in self._all(sql)[0])
        if artifacts > size // room(1):  # a list of the set would take memory for all of them
            raise nonsense("packs")
        return artifacts, live

    def is_sound(self) -> bool:
        """Say whether SQLite finds the file whole, and its tables are those of a set."""
        with suppress(StoreError):
            return super().is_sound() and set(self._all(_TABLES)) == _tables()
        return False

    def last_use(self) -> int | None:
        """Return when an artifact was last used; looks at all of them."""
        row = self._one("SELECT MAX(used_at) FROM artifacts")
        return None if row is None or type(row[0]) is not int else max(0, min(row[0], _LATEST))

    def pinned_count(self) -> int:
        """Return how many artifacts are pinned; looks at all of them."""
        return self._value("SELECT COUNT(*) FROM artifacts WHERE pinned > 0")

    # deletions

    def deletions(self, keys: Collection[bytes]) -> dict[bytes, int]:
        """Return the sequence numbers at which keys were deleted."""
        if not self._all("SELECT 1 FROM deleted LIMIT 1"):
            return {}
        sql = "SELECT key, seq FROM deleted WHERE key IN "
        return {row[0]: to_number(row[1]) for row in self._asked(sql, keys)}

    def put_deletions(self, rows: Mapping[bytes, int]) -> None:
        """Remember at which sequence number keys were deleted."""
        self._run_many("INSERT OR REPLACE INTO deleted VALUES (?, ?)", rows.items())

    def forget_deletions(self, rows: Iterable[tuple[bytes, int]]) -> None:
        """Forget deletions (key, sequence number) whose records are no longer in a pack."""
        self._run_many("DELETE FROM deleted WHERE key = ? AND seq = ?", rows)

    # chunks

    def chunks_like(self, values: Collection[int]) -> list[Chunk]:
        """Return the chunks with one of these checksums: candidates, no more."""
        sql = "SELECT uid, hash, size, refs, place FROM chunks WHERE hash IN "
        return [to_chunk(row) for row in self._asked(sql, [signed(each) for each in values])]

    def chunk_hashes(self, most: int) -> list[int]:
        """Return the checksums of chunks, as signed integers, at most so many."""
        return [to_number(row[0]) for row in self._all("SELECT hash FROM chunks LIMIT ?", most)]

    def chunk_hashes_from(self, pack: int, offset: int) -> list[int]:
        """Return the checksums of chunks that were written to a pack at an offset or behind it."""
        sql = "SELECT hash FROM chunks WHERE uid BETWEEN ? AND ?"
        low, high = position(pack, offset), (pack + 1 << 40) - 1
        return [to_number(row[0]) for row in self._all(sql, low, high)]

    def chunks(self, uids: Collection[int]) -> dict[int, Chunk]:
        """Return the rows of those chunks that there are."""
        sql = "SELECT uid, hash, size, refs, place FROM chunks WHERE uid IN "
        return {row[0]: to_chunk(row) for row in self._asked(sql, uids)}

    def has_chunks(self, first: int, last: int) -> bool:
        """Say whether there are chunks from one uid to another."""
        return bool(
            self._all("SELECT 1 FROM chunks WHERE uid BETWEEN ? AND ? LIMIT 1", first, last)
        )

    def chunks_in(self, pack: int) -> Iterator[Chunk]:
        """Go through the chunks that lie in a pack."""
        low, high = pack << 40, (pack + 1 << 40) - 1
        sql = (
            "SELECT uid, hash, size, refs, place FROM chunks WHERE (uid BETWEEN ? AND ? AND place"
            " IS NULL) OR (place BETWEEN ? AND ?) ORDER BY uid"
        )
        for row in self._each(sql, low, high, low, high):
            yield to_chunk(row)

    def add_chunks(self, rows: Iterable[Chunk]) -> None:
        """Write rows of chunks that are new."""
        values = [
            (uid, signed(value), size, refs, None if where == uid else where)
            for uid, value, size, refs, where in rows
        ]
        self._insert("INSERT OR IGNORE INTO chunks", values)

    def set_refs(self, rows: Iterable[tuple[int, int]]) -> None:
        """Set how many artifacts refer to chunks: (uid, refs)."""
        sql = "UPDATE chunks SET refs = ? WHERE uid = ?"
        self._run_many(sql, ((refs, uid) for uid, refs in rows))

    def move_chunks(self, rows: Iterable[tuple[int, int]]) -> None:
        """Record where chunks lie now: (uid, position)."""
        sql = "UPDATE chunks SET place = ? WHERE uid = ?"
        self._run_many(sql, ((where, uid) for uid, where in rows))

    def drop_chunks(self, uids: Iterable[int]) -> None:
        """Forget chunks whose bytes are gone."""
        self._run_many("DELETE FROM chunks WHERE uid = ?", ((uid,) for uid in uids))

    def chunk_sums(self) -> tuple[int, int, int]:
        """Return the chunks in use, their bytes, and the bytes that sharing them saves."""
        sql = (
            "SELECT COUNT(*), COALESCE(SUM(size), 0), COALESCE(SUM(size * (refs - 1)), 0)"
            " FROM chunks WHERE refs > 0"
        )
        count, size, saved = self._all(sql)[0]
        return to_number(count), to_number(size), to_number(saved)

    # layouts

    def add_layouts(self, layouts: Mapping[bytes, bytes]) -> None:
        """Keep layouts by their digests."""
        sql = (
            "INSERT INTO layouts VALUES (?, ?, ?) ON CONFLICT (digest) DO UPDATE"
            " SET body = excluded.body WHERE body <> excluded.body"
        )
        rows = ((_layout_id(digest), digest, body) for digest, body in layouts.items())
        self._run_many(sql, rows)

    def layout_ids(self, digests: Collection[bytes]) -> dict[bytes, int]:
        """Return the numbers by which rows name layouts."""
        sql = "SELECT digest, id FROM layouts WHERE digest IN "
        return {row[0]: to_number(row[1]) for row in self._asked(sql, digests)}

    def layout(self, number: int) -> tuple[bytes, bytes] | None:
        """Return the digest and the body of a layout."""
        row = self._one("SELECT digest, body FROM layouts WHERE id = ?", number)
        return None if row is None else (to_blob(row[0]), to_blob(row[1]))

    def layouts(self) -> dict[int, tuple[bytes, bytes]]:
        """Return all layouts: digest and body by number."""
        rows = self._all("SELECT * FROM layouts")
        return {row[0]: (to_blob(row[1]), to_blob(row[2])) for row in rows}

    # packs

    def packs(self) -> dict[int, Pack]:
        """Return all packs by number."""
        rows = self._all(f"SELECT {_PACK} FROM packs ORDER BY number")
        return {row[0]: to_pack(row) for row in rows}

    def pack(self, number: int) -> Pack | None:
        """Return one pack."""
        row = self._one(f"SELECT {_PACK} FROM packs WHERE number = ?", number)
        return None if row is None else to_pack(row)

    def put_pack(self, pack: Pack) -> None:
        """Write the row of a pack."""
        self._run("INSERT OR REPLACE INTO packs VALUES (?, ?, ?, ?, ?, ?, ?)", *pack)

    def drop_pack(self, number: int) -> None:
        """Forget a pack whose file is gone or about to go."""
        self._run("DELETE FROM packs WHERE number = ?", number)

    def seal(self, number: int) -> None:
        """Record that nothing will be written to a pack any more."""
        self._run("UPDATE packs SET sealed = 1 WHERE number = ?", number)

    # failures

    def failure(self, key: bytes) -> tuple[str, int, int] | None:
        """Return why a computation failed, how often, and when it last did."""
        row = self._one("SELECT reason, count, failed_at FROM failures WHERE key = ?", key)
        return None if row is None else (str(row[0]), to_number(row[1]), to_number(row[2]))

    def failures(self) -> list[tuple[bytes, str, int, int]]:
        """Return all failures on record."""
        rows = self._all("SELECT key, reason, count, failed_at FROM failures ORDER BY failed_at")
        return [
            (to_blob(row[0]), str(row[1]), to_number(row[2]), to_number(row[3])) for row in rows
        ]

    def add_failure(self, key: bytes, reason: str, now: int) -> None:
        """Record that a computation failed, once more or for the first time."""
        sql = (
            "INSERT INTO failures VALUES (?, ?, 1, ?) ON CONFLICT (key) DO UPDATE SET"
            " reason = excluded.reason, count = count + 1, failed_at = excluded.failed_at"
        )
        self._run(sql, key, reason, now)

    def drop_failure(self, key: bytes) -> bool:
        """Forget the failures of a key; say whether there were any."""
        return self._run("DELETE FROM failures WHERE key = ?", key) > 0

    def _insert(self, sql: str, rows: Sequence[tuple[object, ...]]) -> None:
        """Insert rows with as few statements as can be.

        After each of them this thread would have to wait for those that hold the interpreter.
        """
        at = 0
        for step in _STEPS:
            while len(rows) - at >= step:
                some = rows[at : at + step]
                values = f"({_marks(len(some[0]))})"
                self._run(f"{sql} VALUES {','.join([values] * step)}", *chain.from_iterable(some))
                at += step

    def _asked(self, sql: str, values: Collection[object]) -> list[tuple[Any, ...]]:
        """Ask for many values, some hundreds at a time."""
        wanted = list(values)
        if len(wanted) <= _MOST_ASKED:
            return self._all(f"{sql}({_marks(len(wanted))})", *wanted) if wanted else []
        pages = (wanted[at : at + _MOST_ASKED] for at in range(0, len(wanted), _MOST_ASKED))
        return [row for some in pages for row in self._all(f"{sql}({_marks(len(some))})", *some)]

    def remember_seqs(self) -> None:
        """Keep aside what is known of keys; `older_than_remembered` compares with it."""
        self.forget_seqs()
        self._run(
            "CREATE TEMP TABLE remembered AS SELECT key, MAX(seq) AS seq FROM (SELECT key, seq"
            " FROM artifacts UNION ALL SELECT key, seq FROM deleted)"
            " WHERE typeof(seq) = 'integer' GROUP BY key"
        )

    def forget_seqs(self) -> None:
        """Forget what was kept aside."""
        self._run("DROP TABLE IF EXISTS temp.remembered")

    def older_than_remembered(self, count: int) -> list[tuple[bytes, Entry, int]]:
        """Return artifacts that are older than what was known of their keys, and that number."""
        if not self._value("SELECT COUNT(*) FROM temp.sqlite_master WHERE name = 'remembered'"):
            return []
        sql = (
            f"SELECT artifacts.key, {_OF_ARTIFACT}, remembered.seq FROM temp.remembered CROSS JOIN"
            " artifacts USING (key) WHERE remembered.seq > artifacts.seq LIMIT ?"
        )
        return [(row[0], to_entry(row[1:-1]), row[-1]) for row in self._all(sql, count)]

    def clear(self) -> None:
        """Forget everything that is made again from the packs."""
        for table in ("artifacts", "chunks", "layouts", "deleted", "packs"):
            self._run(f"DELETE FROM {table}")


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Say of an index that cannot be opened or written that it is damaged, where that is why."""
    try:
        yield
    except UnicodeDecodeError as error:  # SQLite quotes the schema, whose bytes may be anything
        raise SetIndexDamagedError(f"{path} is damaged: its tables are wrong", path=path) from error
    except StoreError as error:
        code = getattr(error.__cause__, "sqlite_errorcode", 0)
        # Its header says that it may only be read, not the filesystem.
        is_locked_up = code == sqlite3.SQLITE_READONLY and os.access(path, os.W_OK)
        is_nonsense = code & 0xFF == sqlite3.SQLITE_ERROR
        if isinstance(error, IndexDamagedError) or is_nonsense or is_locked_up:
            message = f"{path} is damaged: {error.__cause__}"
            raise SetIndexDamagedError(message, path=path) from error
        raise


@cache
def _marks(count: int) -> str:
    return ",".join("?" * count)


def _layout_id(digest: bytes) -> int:
    """Return the number of a layout: always the same, so that a rebuild does not mix them up."""
    return int.from_bytes(digest[:8], "little") >> 1


@cache
def _tables() -> frozenset[tuple[Any, ...]]:
    """Return what the schema of an index is: a bit of it may be wrong, too."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as made:
        migrate(made, Path(), MIGRATIONS)
        return frozenset(made.execute(_TABLES))
