"""Read packs without the package: what their records say, and whether their footers say the same.

Written from the description of the format alone, so that a mistake in the package cannot hide
itself.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_64_intdigest as checksum
from xxhash import xxh3_128_intdigest

ARTIFACT, DELETE, PIN, UNPIN, LAYOUT, FOOTER, END, SKIP, INTAKE = range(1, 10)
KEYED = (ARTIFACT, DELETE, PIN, UNPIN)
_HEADER = struct.Struct("<4sBBHIIIIIIQQQQ")
_MOST = (1 << 64) - 1


class Part(NamedTuple):
    offset: int
    stored: int
    codec: int
    nbytes: int
    checksum: int


class Record(NamedTuple):
    kind: int
    flags: int
    offset: int
    size: int
    seq: int
    hash: int
    layout: int
    expires: int
    meta: int
    key: bytes
    parts: tuple[Part, ...]
    inline: bytes


class PackFile:
    """A pack, all of whose records are right."""

    def __init__(self, path: Path, set_id: bytes) -> None:
        self.path = path
        self.data = path.read_bytes()
        magic, self.nonce, self.base, owner, self.instance, self.boot, value = struct.unpack(
            "<8sQq16s8s8sQ", self.data[:64]
        )
        assert magic == b"SMCPACK2"
        assert value == checksum(self.data[:56])
        assert owner == set_id
        assert path.name == f"{self.nonce:016x}.pack"
        self.seed = int.from_bytes(set_id[:8], "little")
        self.records = list(self._walk())
        self.end = self.records[-1].offset + self.records[-1].size if self.records else 64

    def _walk(self) -> Iterator[Record]:
        offset = 64
        while (found := self.record(offset)) is not None and offset + found.size <= len(self.data):
            yield found
            offset += found.size

    def record(self, offset: int) -> Record | None:
        """Return the record at an offset; None: what was torn there."""
        head = self.data[offset : offset + 64]
        if len(head) < 64 or head[:4] != b"SCr2":
            return None
        _, kind, flags, key, parts, inline, about, layout, expires, _, size, seq, hash_, value = (
            _HEADER.unpack(head)
        )
        if value != checksum(head[:56], self.nonce + offset & _MOST):
            return None
        length = 8 + 40 * parts + key + inline + about
        body = self.data[offset + 64 : offset + 64 + length]
        if kind in (END, SKIP):
            return Record(kind, flags, offset, size, seq, hash_, layout, expires, 64, b"", (), b"")
        if len(body) < length:
            return None
        assert struct.unpack_from("<Q", body)[0] == checksum(body[8:]), f"a body at {offset}"
        after = 8 + 40 * parts
        found = tuple(Part._make(each) for each in struct.iter_unpack("<qQQQQ", body[8:after]))
        return Record(
            kind, flags, offset, size, seq, hash_, layout << 6, expires, 64 + length + 63 & ~63,
            body[after : after + key], found, body[after + key : after + key + inline],
        )  # fmt: skip

    def check(self) -> None:
        """Compare all checksums, and the footers with the records that they list."""
        layouts = {each.offset: each.inline for each in self.records if each.kind == LAYOUT}
        originals: set[int] = set()
        for each in self.records:
            assert each.size % 64 == 0
            if each.kind in KEYED:
                assert each.hash == self.hashes(each.key)[0]
            for part in each.parts:
                where = each.offset + part.offset
                assert part.codec == 0
                assert part.nbytes == part.stored
                assert checksum(self.data[where : where + part.stored]) == part.checksum
                if part.offset >= each.meta:
                    assert part.offset + part.stored <= each.size
                    originals.add(where)
                else:
                    assert where in originals, "a pointer names an original of this pack"
            if each.kind == ARTIFACT:
                assert each.layout in layouts
        for footer, start in self.footers():
            self._check_footer(footer, start, layouts)

    def footers(self) -> list[tuple[Record, int]]:
        """Return the footers that count, each with where it begins to list; the last one first."""
        last = self.records[-1] if self.records else None
        if last is None or last.kind != END or last.offset + 64 != len(self.data):
            return []
        found = []
        where = last.hash
        while where:
            footer = self.record(where)
            assert footer is not None
            assert footer.kind == FOOTER
            start, where = struct.unpack_from("<QQ", footer.inline)
            found.append((footer, start))
        assert found[-1][1] == 64, "they list everything"
        return found

    def _check_footer(self, footer: Record, start: int, layouts: dict[int, bytes]) -> None:
        data = footer.inline
        _, before, most, count, pointers, bodies = struct.unpack_from("<QQQQQQ", data)
        assert before < start
        at = 48

        def take(letter: str, number: int) -> tuple[int, ...]:
            nonlocal at
            found = struct.unpack_from(f"<{number}{letter}", data, at)
            at += struct.calcsize(f"<{number}{letter}")
            return found

        places, lengths = take("Q", bodies), take("Q", bodies)
        columns = [take(letter, count) for letter in "QQQQIIIIB"]
        ends = take("I", count)
        targets = [take(letter, pointers) for letter in "IQQ"]
        for place, length in zip(places, lengths, strict=True):
            assert layouts[place] == data[at : at + length]
            at += length
        keys = data[at:]
        assert list(columns[0]) == sorted(columns[0])
        assert not count or ends[-1] == len(keys)
        said = set()
        for row, each in enumerate(zip(*columns, strict=True)):
            key = keys[ends[row - 1] if row else 0 : ends[row]]
            mine = sorted((t, s) for r, t, s in zip(*targets, strict=True) if r == row)
            meta = (
                each[5] if each[8] == ARTIFACT else each[5] | 1 << 31
            )  # of others it says nothing
            said.add((*each[:5], meta, *each[6:], key, tuple(mine)))
        newest: dict[tuple[bytes, int, bool], Record] = {}
        for record in self.records:
            if record.kind in (*KEYED, INTAKE) and start <= record.offset < footer.offset:
                known = (record.key, record.hash, record.kind in (PIN, UNPIN))
                if known not in newest or newest[known].seq <= record.seq:
                    newest[known] = record
                assert record.seq <= most
        wanted = {self._row(each) for each in newest.values()}
        assert said == wanted, (said - wanted, wanted - said)

    def _row(self, each: Record) -> tuple[object, ...]:
        outside = [
            (each.offset + part.offset, part.stored) for part in each.parts if part.offset < 0
        ]
        at, is_plain = each.meta, True
        for part in each.parts:
            is_plain = is_plain and part.offset == at
            at += part.stored + 63 & ~63
        hashes = self.hashes(each.key) if each.key else (each.hash, 0)
        return (
            *hashes, each.seq, each.offset, each.size >> 6, each.meta >> 6 | is_plain << 31,
            each.layout >> 6, each.expires, each.kind, each.key, tuple(sorted(outside)),
        )  # fmt: skip

    def hashes(self, key: bytes) -> tuple[int, int]:
        both = xxh3_128_intdigest(key, self.seed)
        return both & _MOST, both >> 64


def packs_of(path: Path) -> list[PackFile]:
    """Read all packs of a set, each checked; not those whose maker was killed at once."""
    files = [file for file in sorted(path.glob("*.pack")) if file.stat().st_size >= 64]
    found = [PackFile(file, bytes.fromhex(path.name)) for file in files]
    for pack in found:
        pack.check()
    return found


def newest_of(packs: list[PackFile], instance: bytes) -> dict[bytes, tuple[int, Record, PackFile]]:
    """Return the newest put of every key that was not deleted since; what a set must return."""
    intakes: dict[int, int] = {}
    for pack in packs:
        if pack.instance == instance:
            for each in pack.records:
                if each.kind == INTAKE:
                    intakes[each.hash] = max(each.seq, intakes.get(each.hash, 0))
    found: dict[bytes, tuple[tuple[int, int], Record, PackFile]] = {}
    for pack in packs:
        for each in pack.records:
            if each.kind in (ARTIFACT, DELETE):
                rank = (each.seq, 0)
                if pack.instance != instance:
                    rank = (intakes.get(pack.nonce, 0), each.seq)
                if each.key not in found or found[each.key][0] <= rank:
                    found[each.key] = rank, each, pack
    return {
        key: (rank[0], each, pack)
        for key, (rank, each, pack) in found.items()
        if each.kind == ARTIFACT
    }


def live_size(path: Path, instance: str) -> int:
    """Return the bytes of records that are wanted."""
    found = newest_of(packs_of(path), bytes.fromhex(instance))
    return sum(each.size for _, each, _ in found.values())


def shared_size(found: dict[bytes, tuple[int, Record, PackFile]]) -> int:
    """Return the bytes of tensors that wanted records point to in records that are not wanted."""
    total = 0
    for name in {pack.path for _, _, pack in found.values()}:
        mine = [each for _, each, pack in found.values() if pack.path == name]
        targets = {
            each.offset + part.offset: part.stored
            for each in mine
            for part in each.parts
            if part.offset < 0
        }
        for target, size in targets.items():
            if not any(each.offset <= target < each.offset + each.size for each in mine):
                total += size + 63 & ~63
    return total
