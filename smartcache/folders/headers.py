"""Whether a model file is whole, by what its header says of its length.

Only safetensors and GGUF say it. Headers come from strangers: no more than `_MOST` bytes are read,
lengths in them are never trusted, and what cannot be understood is not called damaged.
"""

from __future__ import annotations

import math
import os
import re
import struct
from contextlib import suppress
from typing import Final

from smartcache.system.kernel import open_quietly

_SUFFIXES: Final = (b".safetensors", b".sft", b".gguf")
_FLAGS: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
_MOST: Final = 16 << 20
_OFFSETS: Final = re.compile(rb'"data_offsets"\s*:\s*\[\s*\d{1,18}\s*,\s*(\d{1,18})\s*\]')
_LONGEST_HEADER: Final = 100_000_000
_WIDTHS: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of the types of numbers and truth values in GGUF."""
_STRING: Final = 8
_ARRAY: Final = 9
_VERSIONS: Final = (2, 3)
_MOST_DIMENSIONS: Final = 4
_TYPES: Final = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34),
    9: (32, 36), 10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210),
    15: (256, 292), 16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18),
    21: (256, 110), 22: (256, 82), 23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8),
    28: (1, 8), 29: (256, 56), 30: (1, 2),
}  # fmt: skip
"""Weights in a block of each type of GGUF tensors, and the bytes it takes."""


def tells_its_length(name: bytes) -> bool:
    """Say whether a file is, by its name, one whose header says how long it is."""
    return name.lower().endswith(_SUFFIXES)


def is_cut(path: bytes, size: int) -> bool:
    """Say whether a model file is empty, or shorter than its header says."""
    if not size:
        return True
    with suppress(OSError, struct.error, ValueError, OverflowError, RecursionError):
        fd = open_quietly(path, _FLAGS)
        try:
            head = os.pread(fd, 24, 0)
            if head[:4] == b"GGUF":
                length = _gguf_length(os.pread(fd, min(size, _MOST), 0))
            else:
                length = _safetensors_length(fd, head)
        finally:
            os.close(fd)
        return length > size
    return False


def _safetensors_length(fd: int, head: bytes) -> int:
    length = int.from_bytes(head[:8], "little")
    if head[8:9] != b"{" or length > _LONGEST_HEADER:
        return 0
    ends = _OFFSETS.findall(os.pread(fd, min(length, _MOST), 8))
    return 8 + length + max(map(int, ends), default=0)


def _gguf_length(data: bytes) -> int:
    version, tensors, pairs = struct.unpack_from("<IQQ", data, 4)
    if version not in _VERSIONS:
        return 0
    at, alignment = 24, 32
    ends: list[int] = [0]
    for _ in range(pairs):
        key, at = _text(data, at)
        kind = int.from_bytes(data[at : at + 4], "little")
        if key == b"general.alignment":
            alignment = max(1, int.from_bytes(data[at + 4 : at + 8], "little"))
        at = _after(data, at + 4, kind)
    for _ in range(tensors):
        _, at = _text(data, at)
        (count,) = struct.unpack_from("<I", data, at)
        if count > _MOST_DIMENSIONS:
            raise ValueError(count)
        *sides, kind, offset = struct.unpack_from(f"<{count}QIQ", data, at + 4)
        at += 4 + 8 * count + 12
        weights: int = math.prod(sides)
        block, width = _TYPES.get(kind, (1, 0))
        ends.append(offset + weights // block * width)
    return -(-at // alignment) * alignment + max(ends) if tensors else 0


def _text(data: bytes, at: int) -> tuple[bytes, int]:
    (length,) = struct.unpack_from("<Q", data, at)
    return data[at + 8 : at + 8 + length], at + 8 + length


def _after(data: bytes, at: int, kind: int) -> int:
    """Return where the value ends that begins here."""
    if kind in _WIDTHS:
        return at + _WIDTHS[kind]
    if kind == _STRING:
        return _text(data, at)[1]
    if kind != _ARRAY:
        raise ValueError(kind)
    inner: int
    count: int
    inner, count = struct.unpack_from("<IQ", data, at)
    if inner in _WIDTHS:
        return at + 12 + count * _WIDTHS[inner]
    at += 12
    for _ in range(count):
        at = _after(data, at, inner)
    return at
