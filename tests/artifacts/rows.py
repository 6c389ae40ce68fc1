"""Recompute what the rows of a set must say, from the rows and the files, without the package."""

from __future__ import annotations

import sqlite3
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

HEADER = 64
DELETE = 3


def check_rows(path: Path) -> None:
    """Compare references, live bytes, counts and files of a set whose rows are all written."""
    with closing(sqlite3.connect(path / "index.sqlite3")) as index:
        artifacts = index.execute(
            "SELECT key, seq, place, length, layout, chunks FROM artifacts"
        ).fetchall()
        chunks = index.execute(
            "SELECT uid, size, refs, COALESCE(place, uid) FROM chunks"
        ).fetchall()
        packs = {row[0]: row[1:] for row in index.execute("SELECT * FROM packs")}
        layouts = {row[0] for row in index.execute("SELECT id FROM layouts")}
    refs = Counter(uid for row in artifacts for uid in _uids(row[5]))
    assert {uid: count for uid, _, count, _ in chunks if count} == dict(refs)
    live: Counter[int] = Counter()
    count: Counter[int] = Counter()
    for _, seq, place, length, layout, _ in artifacts:
        number = place >> 40
        live[number] += _room(length)
        count[number] += 1
        assert layout in layouts
        assert packs[number][4] <= seq <= packs[number][5]
    for _, size, used, place in chunks:
        assert place >> 40 in packs
        live[place >> 40] += _room(size) if used else 0
    for number, row in packs.items():
        # Deletions that compaction has kept are wanted too.
        assert row[2] - live[number] in {0, _deletions(path / f"{number:08d}.pack")}
    assert {number: row[3] for number, row in packs.items()} == {n: count[n] for n in packs}
    files = {int(file.stem): file.stat().st_size for file in path.glob("*.pack")}
    assert files.keys() == packs.keys()
    for number, (sealed, watermark, *_) in packs.items():
        assert watermark == files[number] if not sealed else watermark <= files[number]


def _deletions(path: Path) -> int:
    """Return the room of the deletions in a pack."""
    data = path.read_bytes()
    offset, total = HEADER, 0
    while data[offset : offset + 4] == b"SCr1":
        kind, (length,) = data[offset + 4], struct.unpack_from("<Q", data, offset + 8)
        total += _room(length) if kind == DELETE else 0
        offset += _room(length)
    return total


def live_size(path: Path) -> int:
    """Return the bytes of records that are wanted."""
    with closing(sqlite3.connect(path / "index.sqlite3")) as index:
        lengths = [row[0] for row in index.execute("SELECT length FROM artifacts")]
        sizes = [row[0] for row in index.execute("SELECT size FROM chunks WHERE refs > 0")]
    return sum(map(_room, [*lengths, *sizes]))


def _uids(packed: bytes | None) -> Iterator[int]:
    for (uid,) in struct.iter_unpack("<q", packed or b""):
        yield uid


def _room(length: int) -> int:
    return HEADER + -(-length // HEADER) * HEADER
