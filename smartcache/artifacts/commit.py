"""Write the rows of a group of records, with the watermark of their pack, in one transaction.

It does not matter who does it, or how often: a record behind the watermark counts, one before it
was counted already. Of two records of one key the one with the higher sequence number is right, in
whatever order they come, so rows and packs always tell the same.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from smartcache.artifacts.records import place, room
from smartcache.artifacts.rows import Chunk, Entry, Pack
from smartcache.artifacts.setindex import SetIndex

_log = logging.getLogger(__name__)


class LayoutOp(NamedTuple):
    """A layout was written."""

    offset: int
    digest: bytes
    body: bytes


class ChunkOp(NamedTuple):
    """A chunk was written (or copied there by compaction: then `uid` is another position)."""

    offset: int
    uid: int
    hash: int
    size: int


class PutOp(NamedTuple):
    """An artifact was written."""

    offset: int
    seq: int
    key: bytes
    length: int
    layout: bytes
    """The digest of its layout."""
    uids: tuple[int, ...]
    used_at: int
    expires_at: int


class DeleteOp(NamedTuple):
    """An artifact was deleted."""

    offset: int
    seq: int
    key: bytes


class PinOp(NamedTuple):
    """An artifact was pinned, or is not any more."""

    offset: int
    seq: int
    key: bytes
    is_pinned: bool


Op = LayoutOp | ChunkOp | PutOp | DeleteOp | PinOp
KeyOp = PutOp | DeleteOp | PinOp
KEY_OPS = frozenset({PutOp, DeleteOp, PinOp})
"""Asked by `type`: these lines run for every put, and `isinstance` with a union is ten times it."""


def commit(index: SetIndex, pack: int, start: int, end: int, ops: Sequence[Op]) -> bool:
    """Count the records of a pack from `start` to `end`; False: rows before `start` are missing.

    Somebody else may have read a part of them in the pack, or all, and counted them already.
    """
    with index.write():
        row = index.pack(pack)
        if row is None or row.watermark < start:
            return False
        if row.watermark < end:
            apply(index, pack, [op for op in ops if op.offset >= row.watermark])
            _advance(index, pack, end, ops)
    return True


def _advance(index: SetIndex, pack: int, end: int, ops: Iterable[Op]) -> None:
    row = index.pack(pack)
    if row is None:
        return
    seqs = [op.seq for op in ops if type(op) in KEY_OPS]  # type: ignore[union-attr]
    low = min([*seqs, *([row.min_seq] if row.min_seq else [])], default=0)
    high = max([*seqs, row.max_seq])
    index.put_pack(row._replace(watermark=end, min_seq=low, max_seq=high))


def apply(index: SetIndex, pack: int, ops: Sequence[Op]) -> None:
    """Write the rows that records of one pack amount to; within a transaction."""
    layouts: dict[bytes, bytes] = {}
    chunks: list[ChunkOp] = []
    rest: list[KeyOp] = []
    for op in ops:
        kind = type(op)
        if kind is ChunkOp:
            chunks.append(op)  # type: ignore[arg-type]
        elif kind is LayoutOp:
            layouts[op.digest] = op.body  # type: ignore[union-attr]
        else:
            rest.append(op)  # type: ignore[arg-type]
    index.add_layouts(layouts)
    if _add_new(index, pack, chunks, rest):
        return
    changes = _Changes(index, pack, chunks, rest)
    for each in rest:
        if type(each) is PutOp:
            changes.put(each)
        elif type(each) is DeleteOp:
            changes.delete(each)
        elif type(each) is PinOp:
            changes.pin(each)
    changes.write(index)


def _add_new(index: SetIndex, pack: int, chunks: Sequence[ChunkOp], ops: Sequence[KeyOp]) -> bool:
    """Write the rows of artifacts that are new, as are all their chunks; False: not all are.

    The usual case, and a fifth of the work: nothing has to be looked up, compared or changed.
    """
    puts = [op for op in ops if type(op) is PutOp]
    keys = {op.key for op in puts}
    if not puts or len(puts) < len(ops) or len(keys) < len(puts):
        return False
    refs = Counter(chain.from_iterable([op.uids for op in puts]))
    uids = [op.uid for op in chunks]
    layouts = index.layout_ids({op.layout for op in puts})
    is_known = (
        refs.keys() != set(uids)
        or len(refs) < len(uids)
        or any(op.layout not in layouts for op in puts)
        or (uids and index.has_chunks(min(uids), max(uids)))
        or index.deletions(keys)
        or index.entries(keys)
    )
    row = index.pack(pack)
    if is_known or row is None:
        return False
    base = pack << 40
    index.add_chunks(
        [Chunk(op.uid, op.hash, op.size, refs[op.uid], base | op.offset >> 6) for op in chunks]
    )
    index.put_entries(
        (
            op.key,
            Entry(
                op.seq, base | op.offset >> 6, op.length, layouts[op.layout], op.uids, op.used_at,
                op.expires_at, 0,
            ),
        )
        for op in puts
    )  # fmt: skip
    live = sum(map(room, chain((op.size for op in chunks), (op.length for op in puts))))
    index.put_pack(_changed(row, _Sum(live, len(puts))))
    return True


@dataclass(slots=True)
class _Sum:
    """What changes for a pack."""

    live: int = 0
    artifacts: int = 0


class _Changes:
    """The rows that a group of records is about, as they were and as they become."""

    def __init__(
        self, index: SetIndex, pack: int, chunks: Sequence[ChunkOp], ops: Sequence[KeyOp]
    ) -> None:
        self.pack = pack
        self.refs: dict[int, int] = {}
        """By uid: how many references more, or less, there are."""
        self.changed: dict[bytes, Entry | None] = {}
        self.deleted: dict[bytes, int] = {}
        self.packs: dict[int, _Sum] = {}
        keys = {op.key for op in ops}
        puts = [op for op in ops if type(op) is PutOp]
        self.entries = index.entries(keys)
        self.deletions = index.deletions(keys)
        self.layouts = index.layout_ids({op.layout for op in puts})
        self.new = {op.uid: op for op in chunks}
        asked = {uid for op in puts for uid in op.uids} - self.new.keys()
        asked.update(uid for entry in self.entries.values() for uid in entry.uids)
        self.chunks = index.chunks(asked | self.new.keys() if asked else asked)
        for uid in self.chunks.keys() & self.new.keys():
            del self.new[uid]  # counted before: a copy that compaction has not switched to

    def is_newer(self, op: KeyOp) -> bool:
        """Say whether a record is newer than all that is known of its key."""
        held = self.entries.get(op.key)
        gone = self.deleted.get(op.key, self.deletions.get(op.key, -1))
        return op.seq > gone and (held is None or op.seq > held.seq)

    def put(self, op: PutOp) -> None:
        """Count an artifact, in place of the one that its key had."""
        if not self.is_newer(op):
            return
        layout = self.layouts.get(op.layout)
        new, chunks = self.new, self.chunks
        if layout is None or any(uid not in new and uid not in chunks for uid in op.uids):
            # What its key had before is wrong all the same.
            _log.warning("Pack %d: the artifact at %d lacks a part", self.pack, op.offset)
            self.delete(DeleteOp(op.offset, op.seq, op.key))
            return
        before = self._release(op.key)
        where = self.pack << 40 | op.offset >> 6
        pin = 0 if before is None else before.pin
        entry = Entry(op.seq, where, op.length, layout, op.uids, op.used_at, op.expires_at, pin)
        self._refer(op.uids, 1)
        self._count(self.pack, room(op.length), 1)
        self.entries[op.key] = entry
        self.changed[op.key] = entry

    def delete(self, op: DeleteOp) -> None:
        """Count a deletion, also of what somebody else has put and not yet counted."""
        if op.seq <= self.deleted.get(op.key, self.deletions.get(op.key, -1)):
            return
        self.deleted[op.key] = op.seq
        held = self.entries.get(op.key)
        if held is not None and held.seq >= op.seq:
            # Put again since, by somebody whose rows came first; its pin went with what it had.
            if held.pin and abs(held.pin) < op.seq:
                self.entries[op.key] = self.changed[op.key] = held._replace(pin=0)
            return
        self._release(op.key)
        self.entries.pop(op.key, None)
        self.changed[op.key] = None

    def pin(self, op: PinOp) -> None:
        """Count a pin, or its end."""
        held = self.entries.get(op.key)
        gone = self.deleted.get(op.key, self.deletions.get(op.key, -1))
        if held is not None and op.seq > max(gone, abs(held.pin)):
            changed = held._replace(pin=op.seq if op.is_pinned else -op.seq)
            self.entries[op.key] = self.changed[op.key] = changed

    def _release(self, key: bytes) -> Entry | None:
        entry = self.entries.get(key)
        if entry is not None:
            self._refer(entry.uids, -1)
            self._count(place(entry.place)[0], -room(entry.length), -1)
        return entry

    def _refer(self, uids: Sequence[int], change: int) -> None:
        refs = self.refs
        for uid in uids:
            refs[uid] = refs.get(uid, 0) + change

    def _count(self, pack: int, live: int, artifacts: int = 0) -> None:
        found = self.packs.get(pack)
        if found is None:
            found = self.packs[pack] = _Sum()
        found.live += live
        found.artifacts += artifacts

    def write(self, index: SetIndex) -> None:
        """Write what has changed."""
        self._write_new(index)
        changed = []
        for uid, chunk in self.chunks.items():
            change = self.refs.get(uid, 0)
            refs = max(0, chunk.refs + change)
            if change:
                changed.append((uid, refs))
            if bool(refs) != bool(chunk.refs):
                self._count(place(chunk.place)[0], room(chunk.size) if refs else -room(chunk.size))
        index.set_refs(changed)
        index.put_entries((key, entry) for key, entry in self.changed.items() if entry is not None)
        index.drop_entries(key for key, entry in self.changed.items() if entry is None)
        index.put_deletions(self.deleted)
        for number, sums in self.packs.items():
            row = index.pack(number)
            if row is not None:
                index.put_pack(_changed(row, sums))

    def _write_new(self, index: SetIndex) -> None:
        live = 0
        rows = []
        for uid, op in self.new.items():
            refs = max(0, self.refs.get(uid, 0))
            rows.append(Chunk(uid, op.hash, op.size, refs, self.pack << 40 | op.offset >> 6))
            if refs:
                live += room(op.size)
        if rows:
            index.add_chunks(rows)
            self._count(self.pack, live)


def _changed(row: Pack, change: _Sum) -> Pack:
    return row._replace(
        live=max(0, row.live + change.live), artifacts=max(0, row.artifacts + change.artifacts)
    )
