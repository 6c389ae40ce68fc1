"""Write artifacts: encode, find equal chunks, append the records, and let the rows follow.

What is slow (encoding, checksums) is done before the set's mutex is taken. Equal tensors are found
by their checksum and then compared byte by byte with what the pack holds: a checksum never decides
alone, and a comparison is both surer and cheaper than a cryptographic hash of every tensor.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from smartcache.artifacts.codec import Layout, encode
from smartcache.artifacts.commit import ChunkOp, DeleteOp, LayoutOp, Op, PinOp, PutOp
from smartcache.artifacts.engine import SetEngine
from smartcache.artifacts.located import Located, known_layout
from smartcache.artifacts.packs import PackWriter
from smartcache.artifacts.records import (
    ALIGN,
    CHUNK,
    DELETE,
    HEADER_BYTES,
    LAYOUT,
    PIN,
    ArtifactPayload,
    Header,
    artifact_record,
    checksum,
    chunk_header,
    header,
    key_hash,
    padding,
    parse_header,
    place,
    position,
    room,
)
from smartcache.errors import LayoutError, SetFormatError, UnsupportedValueError

_METADATA = struct.Struct("<I")


def encode_metadata(metadata: object) -> bytes:
    """Return metadata as bytes; plain values only, since it is read without the tensors."""
    if metadata is None:
        return b""
    encoded = encode(metadata)
    if encoded.tensors:
        message = "Metadata holds a large tensor"
        raise UnsupportedValueError(message, hint="Put tensors into the value.", path="metadata")
    return _METADATA.pack(len(encoded.layout)) + encoded.layout + encoded.inline


def decode_metadata(data: bytes | memoryview) -> object:
    """Return what `encode_metadata` was given."""
    if not len(data):
        return None
    if len(data) < _METADATA.size:
        raise LayoutError("Metadata is too short")
    (length,) = _METADATA.unpack_from(data)
    start = _METADATA.size
    layout = Layout.parse(bytes(data[start : start + length]))
    if layout.tensors:
        raise LayoutError("Metadata refers to tensors")
    return layout.decode(data[start + length :], _no_tensor)


def _no_tensor(slot: int) -> object:
    raise LayoutError(f"Metadata refers to tensor {slot}")


class _Records:
    """Records on their way into a pack, behind those that are there; with the mutex held."""

    __slots__ = ("alike", "engine", "new", "offset", "ops", "pieces", "places", "start", "writer")

    def __init__(self, engine: SetEngine, size: int, sums: Sequence[int] = ()) -> None:
        self.engine = engine
        self.writer = writer = engine.writer_for(size)
        self.start = self.offset = writer.end
        """Where the next record will be."""
        self.pieces: list[bytes | memoryview] = []
        self.ops: list[Op] = []
        self.new: dict[int, list[tuple[int, memoryview]]] = {}
        self.places: list[int] = []
        """Where the chunks are that were asked for."""
        asked = engine.seen.may_have(sums) if sums else None
        self.alike = engine.index.chunks_like(asked) if asked else ()
        """Chunks that may be equal to those with these checksums."""

    def add(self, kind: int, payload: bytes, seq: int = 0, key: bytes = b"") -> int:
        """Add a record; return its offset."""
        offset = self.offset
        where = position(self.writer.number, offset)
        named = key_hash(key) if key else 0
        fields = Header(kind, len(payload), where, 0, seq, named, checksum(payload))
        self._append(header(self.writer.nonce, fields), payload, len(payload))
        return offset

    def _append(self, head: bytes, payload: bytes | memoryview, length: int) -> None:
        gap = -length % ALIGN
        self.pieces += (head, payload, padding(length)) if gap else (head, payload)
        self.offset += HEADER_BYTES + length + gap

    def layout(self, digest: bytes, body: bytes) -> None:
        """Add a layout, unless the pack has it."""
        if digest not in self.writer.layouts:
            self.ops.append(LayoutOp(self.add(LAYOUT, body), digest, body))

    def chunk(self, tensor: memoryview, value: int) -> int:
        """Return the uid of a chunk with these bytes: one that there is, or a new one."""
        if self.alike or value in self.engine.pending_chunks or value in self.new:
            known = self._find_equal(tensor, value)
            if known is not None:
                self.places.append(known[1])
                return known[0]
        writer = self.writer
        offset = self.offset
        uid = writer.number << 40 | offset >> 6
        length = len(tensor)
        self.ops.append(ChunkOp(offset, uid, value, length))
        self._append(chunk_header(writer.nonce, uid, length, value), tensor, length)
        if value in self.new:
            self.new[value].append((uid, tensor))
        else:
            self.new[value] = [(uid, tensor)]
        self.places.append(uid)
        return uid

    def _find_equal(self, tensor: memoryview, value: int) -> tuple[int, int] | None:
        """Return uid and position of a chunk that holds the same bytes."""
        size = len(tensor)
        for uid, other in self.new.get(value, ()):
            if bytes(other) == tensor:
                return uid, uid
        for uid, length in self.engine.pending_chunks.get(value, ()):
            if length == size and _is_equal(self.engine, uid, uid, tensor):
                return uid, uid
        for chunk in self.alike:
            if (chunk.hash, chunk.size) == (value, size) and _is_equal(
                self.engine, chunk.uid, chunk.place, tensor
            ):
                return chunk.uid, chunk.place
        return None

    def artifact(self, payload: ArtifactPayload) -> PutOp:
        """Add an artifact; the last record."""
        offset = self.offset
        writer = self.writer
        seq = self.engine.next_seq()
        record = artifact_record(writer.nonce, writer.number << 40 | offset >> 6, seq, payload)
        length = len(record) - HEADER_BYTES
        self.pieces += (record, padding(length))
        self.offset += room(length)
        op = PutOp(
            offset, seq, payload.key, length, payload.layout, payload.uids, payload.created_at,
            payload.expires_at,
        )  # fmt: skip
        self.ops.append(op)
        return op

    def write(self) -> None:
        """Append everything to the pack, in one call."""
        self.writer.write(self.pieces, self.offset - self.start)
        first = self.ops[0]
        if isinstance(first, LayoutOp):
            self.writer.layouts.add(first.digest)
        pending, seen = self.engine.pending_chunks, self.engine.seen
        for value, chunks in self.new.items():
            sizes = [(uid, len(tensor)) for uid, tensor in chunks]
            pending[value] = pending[value] + sizes if value in pending else sizes
            seen.add(value)


def _is_equal(engine: SetEngine, uid: int, where: int, tensor: memoryview) -> bool:
    """Say whether a pack holds a chunk of these very bytes at a position, sound to its header."""
    number, offset = place(where)
    length = len(tensor)
    try:
        pack = engine.packs[number]
        head, stored = bytearray(HEADER_BYTES), bytearray(length)
        count = os.preadv(pack.fd, [head, stored], offset)
    except (OSError, SetFormatError):
        return False
    if count != HEADER_BYTES + length or stored != tensor:
        return False
    found = parse_header(bytes(head), pack.nonce, where)
    return found is not None and (found.kind, found.length, found.uid) == (CHUNK, length, uid)


def put(
    engine: SetEngine,
    key: bytes,
    value: object,
    *,
    metadata: object = None,
    expires_at: int = 0,
    durable: bool = False,
) -> None:
    """Keep a value under a key, in place of the one that it had."""
    encoded = encode(value)
    body, inline, tensors = encoded.layout, encoded.inline, encoded.tensors
    digest, layout = known_layout(body)
    sums = list(map(checksum, tensors))
    about = b"" if metadata is None else encode_metadata(metadata)
    now = int(time.time())
    bound = len(body) + len(inline) + len(about) + _MORE
    for tensor in tensors:
        bound += len(tensor) + _MORE_EACH
    with engine.mutex:
        try:
            records = _Records(engine, bound, sums)
            records.layout(digest, body)
            uids = tuple(map(records.chunk, tensors, sums))
            op = records.artifact(
                ArtifactPayload(key, digest, now, expires_at, uids, inline, about)
            )
            records.write()
        except BaseException:
            engine.calm()
            raise
        writer = records.writer
        end = writer.end
        where = writer.number << 40 | op.offset >> 6
        found = Located(key, op.seq, where, op.length, digest, layout, uids)
        found.used_at, found.expires_at, found.places = now, expires_at, tuple(records.places)
        engine.pending[key] = found
        engine.written(records.ops)
    if durable:
        engine.sync(writer, end)


_MORE = 8192
"""More than headers, padding and the key of an artifact take."""
_MORE_EACH = 2 * HEADER_BYTES + 8
"""More than a tensor takes besides its bytes: its header, padding, and its uid in the artifact."""


def delete_exactly(engine: SetEngine, key: bytes, seq: int) -> bool:
    """Delete an artifact unless its key has another one by now; say whether it was so.

    Also if another process has put one that is not counted yet: the deletion is older than that.
    """
    with engine.mutex:
        # First: where this has to wait, others may put something meanwhile.
        engine.writer_for(room(len(key) + 1))
        row = None if key in engine.pending else engine.index.entry(key)
        if row is None or row.seq != seq:
            engine.calm()
            return False
        _change(engine, key, DELETE, b"", DeleteOp, seq + 1)
        return True


def delete(engine: SetEngine, keys: Iterable[bytes], *, durable: bool = False) -> int:
    """Delete artifacts; say how many of them there were."""
    count = 0
    for key in keys:
        with engine.mutex:
            if not engine.has(key):
                continue
            writer = _change(engine, key, DELETE, b"", DeleteOp)
            end = writer.end
            count += 1
        if durable:
            engine.sync(writer, end)
    return count


def pin(engine: SetEngine, key: bytes, *, is_pinned: bool) -> None:
    """Keep an artifact from being evicted or expiring, or no longer."""
    with engine.mutex:
        engine.need((key,))
        mark = b"\1" if is_pinned else b"\0"
        _change(engine, key, PIN, mark, partial(PinOp, is_pinned=is_pinned))
        engine.flush()


def _change(
    engine: SetEngine,
    key: bytes,
    kind: int,
    mark: bytes,
    op: Callable[[int, int, bytes], Op],
    seq: int = 0,
) -> PackWriter:
    """Write down that something happens to an artifact; with the mutex held."""
    try:
        records = _Records(engine, room(len(key) + 1))
        seq = seq or engine.next_seq()
        records.ops.append(op(records.add(kind, mark + key, seq, key), seq, key))
        records.write()
    except BaseException:
        engine.calm()
        raise
    if kind == DELETE:
        engine.pending[key] = None
    engine.written(records.ops)
    return records.writer
