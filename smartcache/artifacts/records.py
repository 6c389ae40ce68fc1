"""Records: the form in which a pack holds chunks, artifacts and what happened to them.

A pack is a header of 64 bytes and then records, each at a multiple of 64: a header of 64 bytes, the
payload, zeros up to the next multiple. A header says what it is, where it is and when it was
written, and its checksum is seeded with a random number of the pack: a copy of a record that lies
inside of a tensor, or at another place, is never taken for a record. So the records of a pack can
be found again, in any state of the file, by looking at every multiple of 64.

    kind      payload
    chunk     the bytes of one tensor; `uid` is the position at which it was first written
    artifact  layout digest, times, key, uids of its chunks, inline bytes, metadata
    delete    key: whatever an older record says, the artifact is gone
    layout    the description of a structure; artifacts name it by its digest
    pin       key, and whether it is pinned from now on

`seq` grows over all processes that write a set; of two records of one key the higher one is right.
A position is `pack << 40 | offset >> 6`: numbers of packs are never used again, so it is unique.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from blake3 import blake3
from xxhash import xxh3_64_intdigest

from smartcache.errors import DamagedArtifactError, SetFormatError

ALIGN = 64
HEADER_BYTES = 64
PACK_HEADER_BYTES = 64
CHUNK, ARTIFACT, DELETE, LAYOUT, PIN = range(1, 6)
MOST_PACKS = (1 << 23) - 1
"""A position has to fit into the signed integers of SQLite."""
MOST_BYTES = 1 << 46
"""What a pack, and so every length in it, can have: its offsets are 40 bits of 64 bytes."""
MOST_SEQ = 1 << 62
"""Sequence numbers are below it: nanoseconds for more than a century."""
MOST_LAYOUT = 1 << 28
"""Bytes of one layout."""
FORMAT = 1

_MAGIC = b"SCr1"
_PACK_MAGIC = b"SMCPACK\n"
_HEADER = struct.Struct("<4sBBHQQQQQQ")
_CHECKSUM = struct.Struct("<Q")
_PACK_HEADER = struct.Struct("<8sIIQQ16s8x")
_ARTIFACT = struct.Struct("<16sqqIIII")
_PAD = bytes(ALIGN)
_KINDS = frozenset({CHUNK, ARTIFACT, DELETE, LAYOUT, PIN})


def padded(length: int) -> int:
    """Return the room that a payload takes."""
    return -(-length // ALIGN) * ALIGN


def room(length: int) -> int:
    """Return the room that a record with such a payload takes, header included."""
    return HEADER_BYTES + -(-length // ALIGN) * ALIGN


def padding(length: int) -> bytes:
    """Return the zeros behind a payload."""
    return _PAD[: -length % ALIGN]


def position(pack: int, offset: int) -> int:
    """Return the number that stands for a place in a pack."""
    return pack << 40 | offset >> 6


def place(number: int) -> tuple[int, int]:
    """Return the pack and the offset of a position."""
    return number >> 40, (number & 0xFF_FFFF_FFFF) << 6


checksum: Callable[[Any], int] = xxh3_64_intdigest
"""The checksum of a payload: of any contiguous buffer."""
key_hash: Callable[[bytes], int] = xxh3_64_intdigest
"""What the header of a record says of its key: enough to know of a damaged one."""


def layout_digest(layout: bytes) -> bytes:
    """Return the 16 bytes by which artifacts name a layout."""
    return blake3(layout).digest(16)


class Header(NamedTuple):
    """The header of a record that was found to be whole."""

    kind: int
    length: int
    position: int
    uid: int
    seq: int
    key_hash: int
    payload_hash: int


@dataclass(frozen=True, slots=True)
class PackHeader:
    """The header of a pack: which it is, and the seed of the checksums of its headers."""

    number: int
    nonce: int
    set_id: bytes

    def to_bytes(self) -> bytes:
        """Return the 64 bytes at the beginning of the pack."""
        text = _PACK_HEADER.pack(_PACK_MAGIC, FORMAT, 0, self.number, self.nonce, self.set_id)
        return text + _CHECKSUM.pack(checksum(text))

    @classmethod
    def parse(cls, data: bytes) -> PackHeader:
        """Read the beginning of a pack; SetFormatError if it is none of this format.

        A single bit that is wrong is put right: without the header, the rest is of no use.
        """
        if len(data) != PACK_HEADER_BYTES:
            raise SetFormatError("The file does not begin like a pack")
        if not _is_pack_header(data):
            data = next(filter(_is_pack_header, _one_bit_off(data)), data)
        if data[:8] != _PACK_MAGIC:
            raise SetFormatError("The file does not begin like a pack")
        if not _is_pack_header(data):
            raise SetFormatError("The header of the pack is damaged")
        _, version, _, number, nonce, set_id = _PACK_HEADER.unpack_from(data)
        if version > FORMAT:
            raise SetFormatError(f"The pack has format {version}; this smartcache reads {FORMAT}")
        return cls(number, nonce, set_id)


def header(nonce: int, fields: Header) -> bytes:
    """Return the 64 bytes of a record's header."""
    kind, length, where, uid, seq, key_hash, payload_hash = fields
    text = _HEADER.pack(_MAGIC, kind, 0, 0, length, where, uid, seq, key_hash, payload_hash)
    return text + _CHECKSUM.pack(xxh3_64_intdigest(text, nonce))


def chunk_header(nonce: int, where: int, length: int, value: int) -> bytes:
    """Return the header of a chunk that is born at a position."""
    text = _HEADER.pack(_MAGIC, CHUNK, 0, 0, length, where, where, 0, 0, value)
    return text + _CHECKSUM.pack(xxh3_64_intdigest(text, nonce))


def artifact_record(nonce: int, where: int, seq: int, payload: ArtifactPayload) -> bytes:
    """Return the whole record of an artifact; its payload is the part behind the header."""
    key, layout, created_at, expires_at, uids, inline, metadata = payload
    count = len(uids)
    body = b"".join((
        _ARTIFACT.pack(
            layout, created_at, expires_at, len(key), count, len(inline), len(metadata)
        ),
        key,
        struct.pack(f"<{count}Q", *uids) if count else b"",
        inline,
        metadata,
    ))  # fmt: skip
    text = _HEADER.pack(
        _MAGIC, ARTIFACT, 0, 0, len(body), where, 0, seq, xxh3_64_intdigest(key),
        xxh3_64_intdigest(body),
    )  # fmt: skip
    return b"".join((text, _CHECKSUM.pack(xxh3_64_intdigest(text, nonce)), body))


def parse_header(data: bytes | memoryview, nonce: int, where: int) -> Header | None:
    """Return the header that lies at a position; None if there is none, or a damaged one."""
    if len(data) < HEADER_BYTES or data[:4] != _MAGIC:
        return None
    magic, kind, _, _, length, found, uid, seq, key_hash, payload_hash = _HEADER.unpack_from(data)
    del magic
    if found != where or kind not in _KINDS or length > MOST_BYTES:
        return None
    if _CHECKSUM.unpack_from(data, 56)[0] != xxh3_64_intdigest(data[:56], nonce):
        return None
    return Header(kind, length, found, uid, seq, key_hash, payload_hash)


def repaired_header(data: bytes, nonce: int, where: int) -> Header | None:
    """Return the header that lies at a position but for a single bit; None if there is none.

    Good for knowing of which record it is the remains, and for nothing else.
    """
    if len(data) < HEADER_BYTES:
        return None
    tried = (parse_header(each, nonce, where) for each in _one_bit_off(data))
    return next((found for found in tried if found is not None), None)


def _is_pack_header(data: bytes) -> bool:
    return data[:8] == _PACK_MAGIC and _CHECKSUM.unpack_from(data, 56)[0] == checksum(data[:56])


def _one_bit_off(data: bytes) -> Iterator[bytes]:
    """Go through all that differs from some bytes in a single bit."""
    for bit in range(8 * len(data)):
        at = bit >> 3
        yield data[:at] + bytes((data[at] ^ 1 << (bit & 7),)) + data[at + 1 :]


class ArtifactPayload(NamedTuple):
    """What the record of an artifact says."""

    key: bytes
    layout: bytes
    """The digest of its layout."""
    created_at: int
    expires_at: int
    """Unix seconds; 0: never."""
    uids: tuple[int, ...]
    inline: bytes | memoryview
    metadata: bytes | memoryview

    @staticmethod
    def size_of_head(key: int, uids: int) -> int:
        """Return the bytes before the values, with a key and uids of these lengths."""
        return _ARTIFACT.size + key + 8 * uids

    @classmethod
    def parse(cls, data: memoryview) -> ArtifactPayload:
        """Read the payload of an artifact; DamagedArtifactError if its lengths do not add up."""
        return cls.parse_head(data, len(data))

    @classmethod
    def parse_head(cls, data: memoryview, length: int) -> ArtifactPayload:
        """Read the beginning of a payload of a length; the values may be missing in `data`."""
        if len(data) < _ARTIFACT.size:
            raise DamagedArtifactError("The record of an artifact is too short")
        digest, created_at, expires_at, key, uids, inline, metadata = _ARTIFACT.unpack_from(data)
        start = _ARTIFACT.size
        after_key = start + key
        after_uids = after_key + 8 * uids
        after_inline = after_uids + inline
        if after_inline + metadata != length or after_uids > len(data):
            raise DamagedArtifactError("The lengths in the record of an artifact do not add up")
        return cls(
            bytes(data[start:after_key]), digest, created_at, expires_at,
            struct.unpack_from(f"<{uids}Q", data, after_key),
            data[after_uids:after_inline], data[after_inline:],
        )  # fmt: skip
