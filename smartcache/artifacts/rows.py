"""The rows of a set's index, and what no row can be.

SQLite has no checksums: a flipped bit may turn a number into anything. What cannot have been
written is an error, what could have been is compared with the records in the packs.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from smartcache.artifacts.records import MOST_BYTES, MOST_SEQ
from smartcache.errors import SetIndexDamagedError

_INT = {int}


class Entry(NamedTuple):
    """The row of an artifact."""

    seq: int
    place: int
    length: int
    layout: int
    uids: tuple[int, ...]
    used_at: int
    expires_at: int
    """Unix seconds; 0: never."""
    pin: int
    """Sequence number of its last pin, negative if that was taken back; 0: never pinned."""

    @property
    def is_pinned(self) -> bool:
        """Whether it is kept from being evicted and from expiring."""
        return self.pin > 0


class Pack(NamedTuple):
    """The row of a pack."""

    number: int
    is_sealed: bool
    watermark: int
    live: int
    artifacts: int
    min_seq: int
    max_seq: int


class Chunk(NamedTuple):
    """The row of a chunk; `place` is where it is now."""

    uid: int
    hash: int
    size: int
    refs: int
    place: int


def to_entry(row: tuple[Any, ...]) -> Entry:
    """Return the row of an artifact; SetIndexDamagedError if it makes no sense."""
    seq, where, length, layout, chunks, used_at, expires_at, pinned = row
    expires_at, pinned = expires_at or 0, pinned or 0
    try:
        uids = struct.unpack(f"<{len(chunks) >> 3}q", chunks) if chunks else ()
    except (struct.error, TypeError):
        raise nonsense("artifacts") from None
    # SQLite has no checksums: a flipped bit may turn a number into anything.
    kinds = {type(seq), type(where), type(length), type(layout), type(used_at)}
    if kinds | {type(expires_at), type(pinned)} != _INT or not (
        0 <= seq < MOST_SEQ and where >= 0 and 0 <= length <= MOST_BYTES
    ):
        raise nonsense("artifacts")
    return Entry(seq, where, length, layout, uids, used_at, expires_at, pinned)


def entry_values(key: bytes, entry: Entry) -> tuple[object, ...]:
    """Return the columns of an artifact."""
    seq, where, length, layout, uids, used_at, expires_at, pin = entry
    return (
        key, seq, where, length, layout,
        struct.pack(f"<{len(uids)}q", *uids) if uids else None,
        used_at, expires_at or None, pin or None,
    )  # fmt: skip


def to_chunk(row: tuple[Any, ...]) -> Chunk:
    """Return the row of a chunk; SetIndexDamagedError if it makes no sense."""
    uid, value, size, refs, where = row
    if {type(value), type(size), type(refs), type(where or 0)} != _INT or not (
        0 <= size <= MOST_BYTES and 0 <= refs < MOST_SEQ
    ):
        raise nonsense("chunks")
    return Chunk(uid, value & 0xFFFF_FFFF_FFFF_FFFF, size, refs, uid if where is None else where)


def to_pack(row: tuple[Any, ...]) -> Pack:
    """Return the row of a pack; SetIndexDamagedError if it makes no sense."""
    if set(map(type, row)) != _INT or min(row) < 0 or max(row) >= MOST_SEQ:
        raise nonsense("packs")
    return Pack(row[0], bool(row[1]), *row[2:])


def to_number(value: object) -> int:
    """Return an integer; SetIndexDamagedError if it is none."""
    if type(value) is not int:
        raise nonsense("numbers")
    return value


def to_blob(value: object) -> bytes:
    """Return bytes; SetIndexDamagedError if they are none."""
    if type(value) is not bytes:
        raise nonsense("bytes")
    return value


def nonsense(table: str) -> SetIndexDamagedError:
    """Return the error for a row that no writer has written."""
    return SetIndexDamagedError(f"The index of a set is damaged: a row ({table}) makes no sense")


def signed(value: int) -> int:
    """Return a checksum as SQLite can hold it."""
    return value - (1 << 64) if value >= 1 << 63 else value
