"""Copy what is wanted of packs to new ones, and let the rows speak of the copies.

What cannot be read in its pack stays behind, and is deleted; whatever else is wanted is copied with
the checksum and the sequence number it had.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice

from smartcache.artifacts.commit import ChunkOp, DeleteOp, Op, PinOp, PutOp, apply
from smartcache.artifacts.engine import SetEngine
from smartcache.artifacts.packnotes import doomed, set_doomed
from smartcache.artifacts.packs import (
    OpenPack,
    PackWriter,
    new_writer,
    pack_path,
)
from smartcache.artifacts.records import (
    ARTIFACT,
    CHUNK,
    DELETE,
    HEADER_BYTES,
    LAYOUT,
    PACK_HEADER_BYTES,
    PIN,
    Header,
    checksum,
    header,
    key_hash,
    layout_digest,
    padding,
    parse_header,
    place,
    position,
    room,
)
from smartcache.artifacts.recovery import read_tails
from smartcache.artifacts.rows import Pack
from smartcache.artifacts.scanning import Found, scan
from smartcache.errors import DamagedArtifactError, SmartcacheError
from smartcache.store.faults import reached
from smartcache.store.locks import lock
from smartcache.store.statkey import allocated_bytes

_GROUP = 512
_PIECE = 8 << 20
_PATIENCE = 20.0
"""Seconds to wait for processes with uncounted records: one that is stopped, or whose disk is full,
keeps its own for as long as that lasts, and here nobody can put anything meanwhile."""


class Copying:
    """Records on their way from old packs to new ones."""

    def __init__(self, engine: SetEngine, numbers: list[int]) -> None:
        self.engine = engine
        self.index = engine.index
        self.numbers = numbers
        self.packs = self.index.packs()
        # In the order in which they will be unlinked.
        self.numbers.sort(key=lambda number: self.packs[number].max_seq)
        self.writers: list[PackWriter] = []
        self.chunks: dict[int, int] = {}
        """Where chunks are now."""
        self.artifacts: dict[bytes, tuple[int, int]] = {}
        """By key: the old position, and the new one."""
        self.kept: dict[int, list[Op]] = {}
        self.dropped: list[tuple[int, DeleteOp]] = []
        """Deletions that nothing depends on any more, and the packs they were in."""
        self.lost: dict[int, list[DeleteOp]] = {}
        """By pack: what could not be read in it."""
        self.is_switched = False
        self.written = 0
        self._layouts: dict[bytes, bytes | None] = {}
        self._pieces: list[bytes] = []
        self._size = 0

    def copy(self, number: int, advance: object = None) -> None:
        """Copy what is wanted of a pack."""
        pack = self.engine.packs[number]
        found = scan(pack, PACK_HEADER_BYTES, full=False, all_wanted=True)
        while group := list(islice(found, _GROUP)):
            before = self.written
            self._copy_group(pack, group)
            if callable(advance):
                advance(self.written - before)
        self._flush()

    def _copy_group(self, pack: OpenPack, group: list[Found]) -> None:
        ops = [each.op for each in group if each.op is not None]
        chunks = self.index.chunks([op.uid for op in ops if isinstance(op, ChunkOp)])
        keys = {op.key for op in ops if isinstance(op, PutOp | DeleteOp | PinOp)}
        entries = self.index.entries(keys)
        for op in ops:
            where = pack.position(op.offset)
            if isinstance(op, ChunkOp):
                row = chunks.get(op.uid)
                if row is not None and row.refs and row.place == where:
                    self.copy_chunk(pack, op)
            elif isinstance(op, PutOp):
                entry = entries.get(op.key)
                if entry is not None and (entry.seq, entry.place) == (op.seq, where):
                    self._copy_artifact(pack, op)
            elif isinstance(op, PinOp):
                entry = entries.get(op.key)
                if entry is not None and abs(entry.pin) == op.seq:
                    self._copy_state(op)
            elif isinstance(op, DeleteOp):
                if self._matters(op, pack.number):
                    self._copy_state(op)
                else:
                    self.dropped.append((pack.number, op))

    def _matters(self, op: DeleteOp, number: int) -> bool:
        """Say whether a pack that stays, be it for a moment longer, may have what was deleted."""
        sooner = self.numbers[: self.numbers.index(number) + 1]
        return any(
            0 < other.min_seq < op.seq
            for other in self.packs.values()
            if other.number not in sooner
        )

    def copy_chunk(self, pack: OpenPack, op: ChunkOp) -> None:
        """Copy a chunk with the checksum it had: damage stays damage."""
        payload = _payload(pack, op.offset, op.size)
        writer = self._room(room(op.size))
        offset = self._add(CHUNK, payload, writer, uid=op.uid, value=op.hash)
        self.chunks[op.uid] = position(writer.number, offset)
        self.kept[writer.number].append(ChunkOp(offset, op.uid, op.hash, op.size))

    def _copy_artifact(self, pack: OpenPack, op: PutOp) -> None:
        head = parse_header(
            os.pread(pack.fd, HEADER_BYTES, op.offset), pack.nonce, pack.position(op.offset)
        )
        body = self._layout(op.layout)
        if head is None or body is None:
            return
        payload = _payload(pack, op.offset, op.length)
        digest = op.layout
        writer = self._room(room(op.length) + room(len(body)))
        if digest not in writer.layouts:
            writer.layouts.add(digest)
            self._add(LAYOUT, body, writer)
        offset = self._add(
            ARTIFACT, payload, writer, seq=op.seq, key=op.key, value=head.payload_hash
        )
        self.artifacts[op.key] = pack.position(op.offset), position(writer.number, offset)
        self.kept[writer.number].append(op._replace(offset=offset))

    def _layout(self, digest: bytes) -> bytes | None:
        """Return a layout by its digest; None if it is missing or damaged."""
        if digest not in self._layouts:
            number = self.index.layout_ids([digest]).get(digest)
            found = None if number is None else self.index.layout(number)
            is_right = found is not None and layout_digest(found[1]) == digest
            self._layouts[digest] = found[1] if found is not None and is_right else None
        return self._layouts[digest]

    def _copy_state(self, op: DeleteOp | PinOp) -> None:
        is_pin = isinstance(op, PinOp)
        payload = ((b"\1" if op.is_pinned else b"\0") if isinstance(op, PinOp) else b"") + op.key
        writer = self._room(room(len(payload)))
        offset = self._add(PIN if is_pin else DELETE, payload, writer, seq=op.seq, key=op.key)
        self.kept[writer.number].append(op._replace(offset=offset))

    def _room(self, size: int) -> PackWriter:
        """Return the writer of a new pack that has room."""
        if self.writers:
            writer = self.writers[-1]
            end = writer.end + self._size
            if end == PACK_HEADER_BYTES or end + size <= self.engine.pack_bytes:
                return writer
            self._flush()
        writer = new_writer(self.engine.path, self.index, self.engine.set_id)
        self.writers.append(writer)
        self.kept[writer.number] = []
        return writer

    def _add(
        self,
        kind: int,
        payload: bytes,
        writer: PackWriter,
        *,
        uid: int = 0,
        seq: int = 0,
        key: bytes = b"",
        value: int | None = None,
    ) -> int:
        offset = writer.end + self._size
        fields = Header(
            kind, len(payload), position(writer.number, offset), uid, seq,
            key_hash(key) if key else 0, checksum(payload) if value is None else value,
        )  # fmt: skip
        self._pieces += (header(writer.nonce, fields), payload, padding(len(payload)))
        self._size += room(len(payload))
        self.written += room(len(payload))
        if self._size >= _PIECE:
            self._flush()
        return offset

    def _flush(self) -> None:
        if self._size:
            self.writers[-1].write(self._pieces, self._size)
            self._pieces, self._size = [], 0

    def switch(self) -> int:
        """Let the rows speak of the copies, and unlink the old packs; return what is free now."""
        engine = self.engine
        reached("compact: copied")
        with engine.mutex:
            engine.flush()
            name, path = f"the set {engine.folder.name}", engine.path / "lock"
            with lock(path, exclusive=True, timeout=_PATIENCE, what="compacting", name=name):
                read_tails(self.index, engine.packs, engine.path)
                self._copy_revived()
                self._copy_deletions()
                for writer in self.writers:
                    writer.sync()  # before the originals may go
                with self.index.write(durable=True):
                    self._write_rows()
                self.is_switched = True
                reached("compact: switched")
                freed = self._unlink()
                set_doomed(self.index, doomed(self.index) - set(self.numbers))
            engine.commits += 1
            engine.memory.clear()
        for writer in self.writers:
            writer.close()
            with suppress(FileNotFoundError):  # compacted by another process in this moment
                freed -= allocated_bytes(os.stat(pack_path(engine.path, writer.number)))
        return freed

    def _copy_revived(self) -> None:
        """Copy chunks that were dead when their pack was copied and are referred to again."""
        for number in self.numbers:
            pack = self.engine.packs[number]
            for row in list(self.index.chunks_in(number)):
                if row.refs and row.uid not in self.chunks:
                    offset = place(row.place)[1]
                    with suppress(DamagedArtifactError):
                        self.copy_chunk(pack, ChunkOp(offset, row.uid, row.hash, row.size))
        self._flush()

    def _copy_deletions(self) -> None:
        """Keep deletions that matter after all; and those of what cannot be read in its pack.

        A writer that was killed meanwhile may have left an older record; and without its newest
        record an artifact would be what it was before, when the index is made again.
        """
        self.packs = self.index.packs()
        again = [each for each in self.dropped if self._matters(each[1], each[0])]
        self.dropped = [each for each in self.dropped if each not in again]
        for _, op in again:
            self._copy_state(op)
        for number in self.numbers:
            entries = list(self.index.entries_in(number))
            self.lost[number] = [
                DeleteOp(0, entry.seq + 1, key)
                for key, entry in entries
                if self.artifacts.get(key, (None,))[0] != entry.place
            ]
            for op in self.lost[number]:
                self._copy_state(op)
        self._flush()

    def _write_rows(self) -> None:
        index = self.index
        gone: list[int] = []
        sums = {writer.number: [0, 0] for writer in self.writers}
        moved: list[tuple[int, int]] = []
        for number in self.numbers:
            for row in list(index.chunks_in(number)):
                where = self.chunks.get(row.uid)
                if where is None:
                    gone.append(row.uid)
                    continue
                moved.append((row.uid, where))
                sums[place(where)[0]][0] += room(row.size) if row.refs else 0
        index.move_chunks(moved)
        index.drop_chunks(gone)
        self._move_artifacts(sums)
        for number in self.numbers:
            apply(index, number, self.lost[number])
            index.drop_pack(number)
        for writer in self.writers:
            index.put_pack(_row(writer, self.kept[writer.number], *sums[writer.number]))
        index.forget_deletions((op.key, op.seq) for _, op in self.dropped)
        # Whoever finds them, after a kill, must not take them for packs that have lost their rows.
        set_doomed(index, {*doomed(index), *self.numbers})

    def _move_artifacts(self, sums: dict[int, list[int]]) -> None:
        keys = iter(list(self.artifacts))
        while group := list(islice(keys, _GROUP)):
            rows = []
            for key, entry in self.index.entries(group).items():
                old, new = self.artifacts[key]
                if entry.place == old:
                    rows.append((key, entry._replace(place=new)))
                    found = sums[place(new)[0]]
                    found[0] += room(entry.length)
                    found[1] += 1
            self.index.put_entries(rows)

    def _unlink(self) -> int:
        freed = 0
        for number in self.numbers:
            path = pack_path(self.engine.path, number)
            self.engine.packs.forget(number)
            with suppress(FileNotFoundError):
                freed += allocated_bytes(os.stat(path))
                path.unlink()
            reached("compact: unlinked")
        return freed

    def give_up(self) -> None:
        """Remove the copies, if nobody refers to them."""
        for writer in self.writers:
            if not self.is_switched:
                with suppress(SmartcacheError, OSError):
                    self._remove(writer)
            writer.close()

    def _remove(self, writer: PackWriter) -> None:
        row = self.index.pack(writer.number)
        if row is None or row.watermark > PACK_HEADER_BYTES:
            return  # interrupted right after the switch
        # Its room first: the disk may be so full that not even the row can be removed.
        os.ftruncate(writer.fd, PACK_HEADER_BYTES)
        self.index.drop_pack(writer.number)
        self.engine.packs.forget(writer.number)
        pack_path(self.engine.path, writer.number).unlink(missing_ok=True)


def _payload(pack: OpenPack, offset: int, length: int) -> bytes:
    payload = os.pread(pack.fd, length, offset + HEADER_BYTES)
    while len(payload) < length:
        more = os.pread(pack.fd, length - len(payload), offset + HEADER_BYTES + len(payload))
        if not more:
            raise DamagedArtifactError(f"Pack {pack.number} ends before its records do")
        payload += more
    return payload


def _row(writer: PackWriter, kept: Iterable[Op], live: int, artifacts: int) -> Pack:
    seqs = [op.seq for op in kept if isinstance(op, PutOp | DeleteOp | PinOp)]
    return Pack(
        writer.number, True, writer.end, live, artifacts,  # noqa: FBT003
        min(seqs, default=0), max(seqs, default=0),
    )  # fmt: skip
