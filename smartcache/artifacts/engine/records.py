"""Records: the form in which a pack holds artifacts and what happened to them.

A pack is a header of 64 bytes and then records, each at a multiple of 64. A record is a header of
64 bytes, a body, zeros up to the next multiple of 64, and, for an artifact, its tensors, each at a
multiple of 64 too:

    header    what it is, its lengths, sequence number and key hash; a checksum of these, seeded
              with a random number of the pack and with the place: a copy of a record inside of a
              tensor, or at another place, is never taken for a record
    body      a checksum of the rest of it; a `Part` for each tensor; key, inline bytes, metadata.
              Tensors and inline bytes may be compressed (`values.compression`): a part says how,
              and of the inline bytes the flags of the header

    kind      what its body has
    artifact  parts, key, inline bytes, metadata; the header says where in the pack its layout is
    delete    key: whatever an older record says, the artifact is gone
    pin       key: it is neither evicted nor expires; until an unpin, or until it is deleted
    layout    the description of a structure, as inline bytes
    footer    what the records before it say, as columns (`packs`), as inline bytes
    end       nothing: the last record of a pack that nobody writes to; says where its footer is
    skip      nothing: covers what a killed writer has left
    intake    the number of a pack from another machine, whose records count from here on

So the records of a pack can be found again, in any state of the file, by looking at every multiple
of 64. Of two records of one key, the one with the higher sequence number is right.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest, xxh3_128_digest, xxh3_128_intdigest

from smartcache.artifacts.keys import key_text
from smartcache.artifacts.values.compression import LARGEST, expand_inline
from smartcache.errors import BadKeyError, DamagedArtifactError, SetFormatError

ALIGN = 64
HEADER_BYTES = 64
PACK_HEADER_BYTES = 64
BODY_AT = 72
"""Where the body's first field is that its checksum covers."""
PART_BYTES = 40
ARTIFACT, DELETE, PIN, UNPIN, LAYOUT, FOOTER, END, SKIP, INTAKE = range(1, 10)
LOST = 0
"""Stands for an artifact or a delete whose body is damaged: what it replaced must not return."""
SEALED = 1
"""Flag of an `end`: the pack is full; nobody will write to it again."""
MOST_BYTES = 1 << 46
"""What a pack, and so every length in it, can have."""
MOST_SEQ = 1 << 63
MOST_INLINE = (1 << 32) - 1
MOST_PARTS = 1 << 20
MOST_BODY = 64 << 20
"""What is held in memory of a record when packs are scanned; layouts and footers have no more."""

_MAGIC = b"SCr2"
_PACK_MAGIC = b"SMCPACK2"
_HEADER = struct.Struct("<4sBBHIIIIIIQQQ")
_SUM = struct.Struct("<Q")
_PACK_HEADER = struct.Struct("<8sQq16s8s8s")
_U64 = (1 << 64) - 1
_PADS = [bytes(n) for n in range(ALIGN)]
_KEYED = frozenset({ARTIFACT, DELETE, PIN, UNPIN})

checksum = xxh3_64_intdigest
"""The checksum of any contiguous buffer."""


def padded(length: int) -> int:
    """Return the room that so many bytes take."""
    return (length + 63) & ~63


def padding(length: int) -> bytes:
    """Return the zeros behind so many bytes."""
    return _PADS[-length & 63]


def key_hashes(key: bytes, seed: int) -> tuple[int, int]:
    """Return the two numbers by which a set knows a key."""
    both = xxh3_128_intdigest(key, seed)
    return both & _U64, both >> 64


def hashes_of(keys: Sequence[bytes], seed: int) -> tuple[Any, Any]:
    """Return the same for many keys: two columns."""
    both = np.frombuffer(b"".join([xxh3_128_digest(key, seed) for key in keys]), ">u8")
    return both[1::2].astype("<u8"), both[::2].astype("<u8")


class PackHeader(NamedTuple):
    """The first 64 bytes of a pack."""

    nonce: int
    """A random number: the name of the pack, and the seed of the checksums of its headers."""
    base: int
    """What its writers add to the monotonic clock for sequence numbers."""
    set_id: bytes
    instance: bytes
    """Which folder of that set it was written in."""
    boot: bytes
    """During which run of the machine."""

    def to_bytes(self) -> bytes:
        """Return the bytes at the beginning of the pack."""
        text = _PACK_HEADER.pack(_PACK_MAGIC, *self)
        return text + _SUM.pack(checksum(text))

    @classmethod
    def parse(cls, data: bytes) -> PackHeader:
        """Read the beginning of a pack.

        DamagedArtifactError if it is not whole; SetFormatError if it has another format.
        """
        if len(data) != PACK_HEADER_BYTES or _SUM.unpack_from(data, 56)[0] != checksum(data[:56]):
            raise DamagedArtifactError("the header of the pack is damaged")
        if data[:8] != _PACK_MAGIC:
            raise SetFormatError("The pack has another format")
        return cls(*_PACK_HEADER.unpack_from(data)[1:])


class Header(NamedTuple):
    """The header of a record that was found to be whole."""

    kind: int
    flags: int
    """Of an artifact: how its inline bytes are compressed. Of an `end`: whether it is sealed."""
    key: int
    """Length of the key."""
    parts: int
    inline: int
    metadata: int
    layout: int
    """Offset of the layout, in units of 64 bytes."""
    expires: int
    """Unix seconds; 0: never."""
    created: int
    size: int
    """All of the record, tensors and padding included."""
    seq: int
    hash: int
    """Of the key; of an `end`: the offset of the footer; of an intake: the number of the pack."""

    @property
    def body(self) -> int:
        """The bytes of the body, its checksum included; without padding."""
        return 8 + PART_BYTES * self.parts + self.key + self.inline + self.metadata

    @property
    def meta(self) -> int:
        """The bytes before the tensors."""
        return padded(HEADER_BYTES + self.body)

    def at(self, nonce: int, offset: int) -> bytes:
        """Return the 64 bytes of it for a place in a pack."""
        text = _HEADER.pack(_MAGIC, *self)
        return text + _SUM.pack(checksum(text, nonce + offset & _U64))


class Part(NamedTuple):
    """A tensor of an artifact, as its record says."""

    offset: int
    """From the beginning of the record; negative: in an earlier record of the pack."""
    stored: int
    """Bytes in the pack."""
    method: int
    """How they are compressed; 0: not at all."""
    nbytes: int
    checksum: int
    """Of the stored bytes."""


@lru_cache(maxsize=4096)
def parts_struct(count: int) -> struct.Struct:
    """Return the form of a table of parts."""
    return struct.Struct("<" + "qQQQQ" * count)


def parse_header(data: bytes | memoryview | bytearray, nonce: int, offset: int) -> Header | None:
    """Return the header that lies at an offset; None if there is none, or a damaged one."""
    if len(data) < HEADER_BYTES or data[:4] != _MAGIC:
        return None
    if _SUM.unpack_from(data, 56)[0] != checksum(data[:56], nonce + offset & _U64):
        return None
    head = Header._make(_HEADER.unpack_from(data)[1:])
    is_sane = (
        head.size % ALIGN == 0
        and HEADER_BYTES <= head.size <= MOST_BYTES
        and head.seq < MOST_SEQ
        and head.parts <= MOST_PARTS
        and (head.kind in (END, SKIP) or head.meta <= head.size)
    )
    return head if is_sane else None


def plain_record(
    nonce: int, offset: int, kind: int, *, key: bytes = b"", hash_: int = 0, seq: int = 0,
    inline: bytes = b"",
) -> bytes:  # fmt: skip
    """Return a whole record that has no tensors."""
    body = key + inline
    size = padded(BODY_AT + len(body))
    head = Header(kind, 0, len(key), 0, len(inline), 0, 0, 0, 0, size, seq, hash_)
    return b"".join((
        head.at(nonce, offset), _SUM.pack(checksum(body)), body, padding(BODY_AT + len(body))
    ))  # fmt: skip


def bare_record(
    nonce: int, offset: int, kind: int, *, size: int, flags: int = 0, hash_: int = 0
) -> bytes:
    """Return the header of a record that has no body: an `end`, or a `skip` of some bytes."""
    return Header(kind, flags, 0, 0, 0, 0, 0, 0, 0, size, 0, hash_).at(nonce, offset)


def artifact_meta(  # noqa: PLR0913 - a record has so many parts
    nonce: int, offset: int, parts: list[int], key: bytes, inline: bytes, metadata: bytes,
    *, flags: int, layout: int, expires: int, created: int, size: int, seq: int, hash_: int,
) -> bytes:  # fmt: skip
    """Return an artifact's record up to its tensors. `parts`: the numbers of all `Part`s."""
    count = len(parts) // 5
    body = b"".join((parts_struct(count).pack(*parts), key, inline, metadata))
    text = _HEADER.pack(
        _MAGIC, ARTIFACT, flags, len(key), count, len(inline), len(metadata), layout >> 6, expires,
        created, size, seq, hash_,
    )  # fmt: skip
    return b"".join((
        text, _SUM.pack(checksum(text, nonce + offset & _U64)), _SUM.pack(checksum(body)), body,
        _PADS[-(BODY_AT + len(body)) & 63],
    ))  # fmt: skip


class Meta(NamedTuple):
    """What a record says before its tensors, verified."""

    head: Header
    key: bytes
    parts: tuple[int, ...]
    """Five numbers for each part."""
    inline: memoryview
    """As it is stored."""
    metadata: memoryview

    @property
    def values(self) -> bytes | memoryview:
        """The inline bytes, decompressed."""
        flags = self.head.flags
        return expand_inline(flags, self.inline) if flags else self.inline

    def part(self, number: int) -> Part:
        """Return one of the parts."""
        return Part._make(self.parts[5 * number : 5 * number + 5])


def parse_meta(data: bytearray | bytes, nonce: int, offset: int) -> Meta:
    """Read a record up to its tensors; DamagedArtifactError if it is not whole."""
    head = parse_header(data, nonce, offset)
    if head is None or head.kind in (END, SKIP):
        raise DamagedArtifactError("its record is not where it was written")
    end = HEADER_BYTES + head.body
    view = memoryview(data)
    if end > len(data) or _SUM.unpack_from(data, HEADER_BYTES)[0] != checksum(view[BODY_AT:end]):
        raise DamagedArtifactError("the checksum of its record is wrong")
    return _meta(data, head)


def _meta(data: bytearray | bytes, head: Header) -> Meta:
    view = memoryview(data)
    end = HEADER_BYTES + head.body
    after_parts = BODY_AT + PART_BYTES * head.parts
    after_key = after_parts + head.key
    after_inline = after_key + head.inline
    return Meta(
        head, bytes(view[after_parts:after_key]),
        parts_struct(head.parts).unpack_from(data, BODY_AT) if head.parts else (),
        view[after_key:after_inline], view[after_inline:end],
    )  # fmt: skip


class Entry(NamedTuple):
    """A record as footers and catalogs know it."""

    kind: int
    hash: int
    twin: int
    """The second hash of the key."""
    seq: int
    offset: int
    size: int
    meta: int
    layout: int
    expires: int
    is_plain: bool
    """Its tensors follow its meta one after the other, not compressed."""
    key: bytes
    pointers: tuple[tuple[int, int], ...]
    """Place in the pack and length of parts that belong to earlier records."""


def small_entry(
    kind: int, hash_: int, twin: int, seq: int, offset: int, size: int, key: bytes = b""
) -> Entry:
    """Return what a footer says of a record without tensors."""
    return Entry(
        kind, hash_, twin, seq, offset, size, size, 0, 0, is_plain=False, key=key, pointers=()
    )


class Readable(Protocol):
    """What records are read from."""

    @property
    def size(self) -> int:
        """The bytes of the pack, as it is now."""
        ...

    def bytes_at(self, offset: int, length: int) -> bytes:
        """Return some bytes; fewer at the end."""
        ...


class Found(NamedTuple):
    """A record, or (`entry` and `head` None) bytes that are none."""

    offset: int
    end: int
    head: Header | None
    entry: Entry | None
    """Of artifacts, deletes, pins and intakes; of a damaged one, kind LOST, only hash and seq."""
    inline: bytes
    """Of a layout."""


def scan(
    pack: Readable, nonce: int, seed: int, start: int, end: int, *, tail: bool = True
) -> Iterator[Found]:
    """Go through the records between two offsets.

    What is no record is passed over, if another one follows; what is behind the last one, or cut
    off by the end, is not told: it may still be written. With `tail` False it is told as well.
    """
    offset = max(start, PACK_HEADER_BYTES)
    window, at = b"", offset
    last = 0
    while offset + HEADER_BYTES <= end:
        if offset < at or offset + 1024 > at + len(window):
            at = offset
            window = pack.bytes_at(at, min(end - at, 1 << 16 if 0 < last <= 1 << 14 else 4096))
        head = parse_header(window[offset - at : offset - at + HEADER_BYTES], nonce, offset)
        if head is None:
            after = next_header(pack, nonce, offset + ALIGN, end)
            if after is None:
                break
            yield Found(offset, after, None, None, b"")
            offset = after
            continue
        if offset + head.size > end:
            break
        last = head.size
        if head.kind in (END, SKIP):
            yield Found(offset, offset + head.size, head, None, b"")
        else:
            stop = HEADER_BYTES + head.body if head.kind != FOOTER else HEADER_BYTES
            data = window[offset - at : offset - at + stop]
            if len(data) < stop <= MOST_BODY:
                data = pack.bytes_at(offset, stop)
            elif len(data) < stop:
                data = _without_inline(pack, offset, head)
            yield _found(data, nonce, seed, offset, head)
        offset += head.size
    if not tail and offset < end:
        yield Found(offset, end, None, None, b"")


def _without_inline(pack: Readable, offset: int, head: Header) -> bytes:
    """Return a large record as if it had no inline bytes and no metadata; b"": it is not whole.

    The checksum of all of it is compared piece by piece.
    """
    start, end = offset + BODY_AT, offset + HEADER_BYTES + head.body
    wanted = pack.bytes_at(offset, BODY_AT + PART_BYTES * head.parts + head.key)
    state = xxh3_64()
    while start < end:
        piece = pack.bytes_at(start, min(1 << 20, end - start))
        if not piece:
            return b""
        state.update(piece)
        start += len(piece)
    is_whole = head.kind == ARTIFACT and state.digest()[::-1] == wanted[HEADER_BYTES:BODY_AT]
    return wanted if is_whole else b""


def _found(data: bytes, nonce: int, seed: int, offset: int, head: Header) -> Found:
    end = offset + head.size
    if head.kind == FOOTER:
        return Found(offset, end, head, None, b"")
    if head.kind == INTAKE:  # its header says all of it
        intake = small_entry(INTAKE, head.hash, 0, head.seq, offset, head.size)
        return Found(offset, end, head, intake, b"")
    try:
        if 0 < len(data) < HEADER_BYTES + head.body:
            meta = _meta(data, head._replace(inline=0, metadata=0))._replace(head=head)
        else:
            meta = parse_meta(data, nonce, offset)
        entry = entry_of(meta, seed, offset) if head.kind in _KEYED else None
    except (DamagedArtifactError, BadKeyError):
        if head.kind not in (ARTIFACT, DELETE):
            return Found(offset, end, head, None, b"")
        lost = small_entry(LOST, head.hash, 0, head.seq, offset, head.size)
        return Found(offset, end, head, lost, b"")
    return Found(offset, end, head, entry, bytes(meta.inline) if entry is None else b"")


def entry_of(meta: Meta, seed: int, offset: int) -> Entry:
    """Return what a footer says of a record.

    BadKeyError, or DamagedArtifactError if its parts make no sense.
    """
    head = meta.head
    key_text(meta.key)
    hashes = key_hashes(meta.key, seed)
    expected = head.meta
    is_plain = True
    pointers: list[tuple[int, int]] = []
    for number in range(head.parts):
        part = meta.part(number)
        start = offset + part.offset
        if part.offset < 0:
            is_plain = False
            pointers.append((start, part.stored))
        is_plain = is_plain and part.offset == expected and not part.method
        expected += padded(part.stored)
        is_inside = head.meta <= part.offset <= head.size - part.stored
        if not is_inside and not PACK_HEADER_BYTES <= start <= offset - part.stored:
            raise DamagedArtifactError("a tensor of it lies outside of its pack")
        if part.nbytes != part.stored if not part.method else part.nbytes > LARGEST:
            raise DamagedArtifactError("the lengths of a tensor of it do not fit")
    return Entry(
        head.kind, *hashes, head.seq, offset, head.size, head.meta, head.layout << 6,
        head.expires, is_plain, meta.key, tuple(pointers),
    )  # fmt: skip


def next_header(pack: Readable, nonce: int, offset: int, end: int) -> int | None:
    """Return where the next header is, searching at every multiple of 64; None if nowhere."""
    while offset + HEADER_BYTES <= end:
        block = pack.bytes_at(offset, min(1 << 20, end - offset))
        at = block.find(_MAGIC)
        while at >= 0:
            where = offset + at
            if not at % ALIGN and parse_header(block[at : at + HEADER_BYTES], nonce, where):
                return where
            at = block.find(_MAGIC, at + 1)
        if len(block) < HEADER_BYTES:
            return None
        offset += len(block) // ALIGN * ALIGN
    return None
