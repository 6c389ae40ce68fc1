"""Values as bytes: the structure apart from what is in it, and large tensors apart from both.

`encode` walks a value once, by the exact type of everything in it: a subclass of a supported type
is not supported, because it would come back as something else. Its bytes are described in `layouts`
and read back by `Layout`. An object that occurs twice in a value comes back as two equal ones.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from smartcache.artifacts.arrays import is_array_like, library_encoder
from smartcache.artifacts.layouts import (
    COUNT,
    INLINE_BYTES,
    MAX_DEPTH,
    VERSION,
    Layout,
    Node,
    text_bytes,
)
from smartcache.artifacts.parsing import run_struct
from smartcache.artifacts.parts import CACHED, Encode, Parts
from smartcache.artifacts.refusals import CodecStep, RefusedError, explain, why_not
from smartcache.artifacts.registered import RegisteredCodec, codec_of_type, register_codec
from smartcache.artifacts.tensors import TensorSpec

__all__ = [
    "INLINE_BYTES",
    "Encoded",
    "Layout",
    "Node",
    "TensorSpec",
    "encode",
    "is_supported",
    "register_codec",
]

MOST_NODES: Final = 1_000_000
"""What has more pieces than this has one list in it over and over, or should be an array."""

_SMALLEST: Final = -(1 << 63)
_LARGEST: Final = (1 << 63) - 1
_names: dict[str, bytes] = {}


@dataclass(slots=True)  # frozen would take five times as long to build
class Encoded:
    """A value in three parts: equal structures have equal layouts, byte for byte.

    `tensors` has the bytes of each tensor slot, in the memory of the value itself where they are in
    order there: write them before the value changes.
    """

    layout: bytes
    inline: bytes
    tensors: tuple[memoryview, ...]


def encode(value: object) -> Encoded:
    """Return the layout, inline bytes and tensors of a value.

    UnsupportedValueError, with the path to it, if anything in it is of a type that cannot be kept.
    """
    parts = Parts()
    try:
        (_ENCODERS.get(type(value)) or _find(value))(value, parts, MAX_DEPTH)
    except RefusedError as refused:
        raise explain(refused, value) from None
    layout = VERSION + b"".join(parts.layout)
    return Encoded(layout, parts.inline(layout), tuple(parts.tensors))


def is_supported(cls: type) -> bool:
    """Say whether values of exactly this type come back as such without a codec."""
    return cls in _ENCODERS or (library_encoder(cls) is not None and not is_array_like(cls))


def _none(_value: None, parts: Parts, _depth: int) -> None:
    parts.layout.append(b"-")


def _bool(value: object, parts: Parts, _depth: int) -> None:
    parts.layout.append(b"?")
    parts.fixed.append(value)


def _int(value: int, parts: Parts, _depth: int) -> None:
    if _SMALLEST <= value <= _LARGEST:
        parts.layout.append(b"i")
        parts.fixed.append(value)
    else:
        parts.layout.append(b"I")
        parts.sections.append(value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _float(value: float, parts: Parts, _depth: int) -> None:
    parts.layout.append(b"d")
    parts.fixed.append(value)


def _complex(value: complex, parts: Parts, _depth: int) -> None:
    parts.layout.append(b"c")
    parts.fixed += (value.real, value.imag)


def _str(value: str, parts: Parts, _depth: int) -> None:
    parts.layout.append(b"s")
    parts.sections.append(value.encode("utf-8", "surrogatepass"))


def _bytes(value: bytes, parts: Parts, _depth: int) -> None:
    parts.layout.append(b"y")
    parts.sections.append(value)


def _bytearray(value: bytearray, parts: Parts, _depth: int) -> None:
    parts.layout.append(b"Y")
    parts.sections.append(bytes(value))


def _dict(value: dict[object, object], parts: Parts, depth: int) -> None:
    layout = parts.layout
    if not depth or len(layout) > MOST_NODES:
        _too_much(depth)
    layout.append(b"{" + COUNT.pack(len(value)))
    key: object = None
    try:
        for key, item in value.items():
            if type(key) is str:
                layout.append(_names.get(key) or _name(key))
            else:
                layout.append(_key(key, depth - 1))
            (_ENCODERS.get(type(item)) or _find(item))(item, parts, depth - 1)
    except RefusedError as refused:
        refused.within(key)
        raise


def _name(key: str) -> bytes:
    if len(_names) >= CACHED:
        _names.clear()
    name = _names[key] = b"s" + text_bytes(key)
    return name


def _key(key: object, depth: int) -> bytes:
    """Return a key that is no text as it stands in a layout: a node with inline bytes."""
    inner = Parts()
    try:
        (_ENCODERS.get(type(key)) or _find(key))(key, inner, depth)
        _check_hashable(inner)
    except RefusedError as refused:
        refused.is_key = True
        raise
    node = b"".join(inner.layout)
    inline = inner.inline(VERSION + node)
    return b"k" + node + COUNT.pack(len(inline)) + inline


def _check_hashable(parts: Parts) -> None:
    """Refuse what is hashable in its own library, but not by its value."""
    for node in parts.layout:
        if node[:1] in {b"t", b"C"}:
            what = "a tensor" if node[:1] == b"t" else "an object with a codec"
            raise RefusedError(f"{what} cannot be kept in a set or in a key")


def _sequence(tag: bytes) -> Encode:
    """Return the encoder of lists or tuples: as one run if that can be, else item by item."""

    def encode_sequence(value: list[object], parts: Parts, depth: int) -> None:
        if not depth or len(parts.layout) > MOST_NODES:
            _too_much(depth)
        if value and _as_run(tag, value, parts):
            return
        parts.layout.append(tag + COUNT.pack(len(value)))
        index = 0
        try:
            for item in value:
                (_ENCODERS.get(type(item)) or _find(item))(item, parts, depth - 1)
                index += 1
        except RefusedError as refused:
            refused.within(index)
            raise

    return encode_sequence


def _set(tag: bytes) -> Encode:
    """Return the encoder of sets: their items sorted by layout, so that equal sets have one."""

    def encode_set(value: set[object], parts: Parts, depth: int) -> None:
        if not depth or len(parts.layout) > MOST_NODES:
            _too_much(depth)
        if value and _as_run(tag, value, parts):
            return
        items: list[tuple[bytes, Parts]] = []
        for item in value:
            inner = Parts()
            try:
                (_ENCODERS.get(type(item)) or _find(item))(item, inner, depth - 1)
                _check_hashable(inner)
            except RefusedError as refused:
                refused.within(item)
                raise
            items.append((b"".join(inner.layout), inner))
        items.sort(key=lambda pair: pair[0])
        parts.layout.append(tag + COUNT.pack(len(items)))
        for layout, inner in items:
            parts.layout.append(layout)
            parts.fixed += inner.fixed
            parts.sections += inner.sections

    return encode_set


def _as_run(tag: bytes, value: Collection[Any], parts: Parts) -> bool:
    """Write the items as one run if all are of one type that has runs; say whether it was so."""
    types = set(map(type, value))
    cls = types.pop()
    letter = _RUNS.get(cls)
    if letter is None or types:
        return False
    try:
        if cls is str:
            lengths = run_struct("I", len(value)).pack(*map(len, value))
            parts.sections += (lengths, "".join(value).encode("utf-8", "surrogatepass"))
        else:
            parts.sections.append(run_struct(letter, len(value)).pack(*value))
    except struct.error:  # an integer of more than 64 bits
        return False
    parts.layout.append(b"r" + tag + _RUN_TAGS[cls])
    return True


def _too_much(depth: int) -> NoReturn:
    if depth:
        raise RefusedError(f"more than {MOST_NODES:,} values in one artifact")
    raise RefusedError(f"nested more than {MAX_DEPTH} deep", too_deep=True)


def _find(value: object) -> Encode:
    """Return the encoder of a type that was not met before, or that has a codec."""
    cls = type(value)
    codec = codec_of_type(cls)
    if codec is not None:
        return _by_codec(codec)
    found = library_encoder(cls)
    if found is None:
        raise why_not(cls)
    if not is_array_like(cls):  # a codec may be registered for it yet
        _ENCODERS[cls] = found
    return found


def _by_codec(codec: RegisteredCodec) -> Encode:
    def encode_by_codec(value: object, parts: Parts, depth: int) -> None:
        if not depth:
            _too_much(depth)
        parts.layout.append(b"C" + text_bytes(codec.name))
        plain = codec.encode(value)
        try:
            (_ENCODERS.get(type(plain)) or _find(plain))(plain, parts, depth - 1)
        except RefusedError as refused:
            refused.within(CodecStep(codec.name, plain))
            raise

    return encode_by_codec


_RUNS: Final[dict[type, str]] = {int: "q", float: "d", bool: "?", str: "I"}
_RUN_TAGS: Final[dict[type, bytes]] = {int: b"i", float: b"d", bool: b"?", str: b"s"}
_ENCODERS: Final[dict[type, Encode]] = {
    type(None): _none,
    bool: _bool,
    int: _int,
    float: _float,
    complex: _complex,
    str: _str,
    bytes: _bytes,
    bytearray: _bytearray,
    dict: _dict,
    list: _sequence(b"["),
    tuple: _sequence(b"("),
    set: _set(b"<"),
    frozenset: _set(b">"),
}
