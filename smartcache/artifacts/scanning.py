"""Read the records of a pack from the pack alone.

Whatever state the file is in, each record that is found is whole: its header is where it says, its
checksum is right, and its payload too (of chunks only on request: that reads everything).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

from smartcache.artifacts.commit import ChunkOp, DeleteOp, LayoutOp, Op, PinOp, PutOp
from smartcache.artifacts.keys import LONGEST_KEY, key_text
from smartcache.artifacts.packs import OpenPack
from smartcache.artifacts.records import (
    ALIGN,
    ARTIFACT,
    CHUNK,
    DELETE,
    HEADER_BYTES,
    LAYOUT,
    MOST_LAYOUT,
    MOST_SEQ,
    PACK_HEADER_BYTES,
    ArtifactPayload,
    Header,
    layout_digest,
    padded,
    parse_header,
    repaired_header,
)
from smartcache.errors import BadKeyError, DamagedArtifactError

_BLOCK = 1 << 20
_AHEAD = 8 << 20
"""What is announced before it is read, twice as far: nothing else reads ahead in a pack."""
_MOST_UID = 1 << 63
"""What the index can hold."""
_MOST_UIDS = 1 << 20
"""Of one artifact: it cannot have more values than that."""


class Found(NamedTuple):
    """A record of a pack, or the place of one that is damaged (`op` None, `header` if known).

    `end` is that of the pack if the record is cut off there: its writer was killed, or the file
    was truncated.
    """

    offset: int
    end: int
    header: Header | None
    op: Op | None
    is_cut_off: bool = False

    @property
    def lost(self) -> tuple[int, int] | None:
        """Key hash and sequence number of a damaged record that replaced or deleted something."""
        head = self.header
        if self.op is not None or self.is_cut_off or head is None or head.seq >= MOST_SEQ:
            return None
        return (head.key_hash, head.seq) if head.kind in (ARTIFACT, DELETE) else None


def scan(
    pack: OpenPack, start: int, end: int | None = None, *, full: bool, all_wanted: bool = False
) -> Iterator[Found]:
    """Go through the records from an offset on; what is damaged is told, and passed over.

    `full` reads the bytes of chunks too and compares them with their checksums; `all_wanted` says
    that the caller will read them.
    """
    size = pack.size if end is None else min(end, pack.size)
    offset = max(start, PACK_HEADER_BYTES)
    announced = offset if full or all_wanted else size
    while offset + HEADER_BYTES <= size:
        if offset + _AHEAD > announced:
            pack.announce(announced, 2 * _AHEAD)
            announced = max(announced, offset) + 2 * _AHEAD
        raw = os.pread(pack.fd, HEADER_BYTES, offset)
        head = parse_header(raw, pack.nonce, pack.position(offset))
        if head is None:
            # With a single bit wrong it is still known which it was; nothing else is made of it.
            head = repaired_header(raw, pack.nonce, pack.position(offset))
            after = _next_header(pack, offset + ALIGN, size)
            yield Found(offset, after, head, None)
            offset = after
            continue
        after = offset + HEADER_BYTES + padded(head.length)
        is_whole = offset + HEADER_BYTES + head.length <= size
        op = _read(pack, offset, head, full=full) if is_whole else None
        yield Found(offset, min(after, size), head, op, not is_whole)
        # A header that is whole says where the next one is; a payload may hold what looks like one.
        offset = after
    if offset < size:
        yield Found(offset, size, None, None)


def _next_header(pack: OpenPack, offset: int, size: int) -> int:
    """Return where the next header is, searching at every multiple of 64; the end if nowhere."""
    while offset + HEADER_BYTES <= size:
        block = os.pread(pack.fd, min(_BLOCK, size - offset), offset)
        for at in range(0, len(block) - HEADER_BYTES + 1, ALIGN):
            where = offset + at
            if block[at : at + 4] == b"SCr1" and parse_header(
                block[at : at + HEADER_BYTES], pack.nonce, pack.position(where)
            ):
                return where
        if len(block) < HEADER_BYTES:
            break
        offset += len(block) // ALIGN * ALIGN
    return size


def _read(pack: OpenPack, offset: int, head: Header, *, full: bool) -> Op | None:
    """Return what a record says; None if its payload is damaged."""
    start = offset + HEADER_BYTES
    if head.kind == CHUNK:
        is_right = not full or _sum_of(pack, start, head.length) == head.payload_hash
        if not is_right or head.uid >= _MOST_UID:
            return None
        return ChunkOp(offset, head.uid, head.payload_hash, head.length)
    if head.seq >= MOST_SEQ:
        return None
    # However long it says it is: memory is taken for what is looked at, not for values.
    if _sum_of(pack, start, head.length) != head.payload_hash:
        return None
    try:
        return _op(pack, offset, head)
    except (DamagedArtifactError, BadKeyError):
        return None


def _op(pack: OpenPack, offset: int, head: Header) -> Op | None:
    start = offset + HEADER_BYTES
    if head.kind == LAYOUT:
        if head.length > MOST_LAYOUT:
            return None
        body = os.pread(pack.fd, head.length, start)
        return LayoutOp(offset, layout_digest(body), body)
    if head.kind == ARTIFACT:
        return _put(pack, offset, head)
    payload = os.pread(pack.fd, min(head.length, LONGEST_KEY + 2), start)
    if len(payload) != head.length:
        return None
    if head.kind == DELETE:
        return DeleteOp(offset, head.seq, _key(payload))
    return PinOp(offset, head.seq, _key(payload[1:]), payload[:1] == b"\1")


def _put(pack: OpenPack, offset: int, head: Header) -> PutOp | None:
    most = ArtifactPayload.size_of_head(LONGEST_KEY + 1, _MOST_UIDS)
    payload = os.pread(pack.fd, min(head.length, most), offset + HEADER_BYTES)
    found = ArtifactPayload.parse_head(memoryview(payload), head.length)
    if any(uid >= _MOST_UID for uid in found.uids):
        return None
    return PutOp(
        offset, head.seq, _key(found.key), head.length, found.layout, found.uids,
        found.created_at, found.expires_at,
    )  # fmt: skip


def _key(stored: bytes) -> bytes:
    """Return a key; BadKeyError if it is none."""
    key_text(stored)
    return stored


def _sum_of(pack: OpenPack, offset: int, length: int) -> int:
    """Return the checksum of bytes of a pack, read in blocks."""
    from xxhash import xxh3_64

    state = xxh3_64()
    buffer = bytearray(min(_BLOCK, length))
    done = 0
    while done < length:
        view = memoryview(buffer)[: min(_BLOCK, length - done)]
        count = os.preadv(pack.fd, [view], offset + done)
        if not count:
            break
        state.update(view[:count])
        done += count
    return state.intdigest()
