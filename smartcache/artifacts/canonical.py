"""Plain values as canonical bytes: equal values have equal bytes, and only those.

Every value is written with its type and, where that leaves it open, its length, so no two values
run into each other. Types count: 1, 1.0, True, "1" and b"1" are five values, a tuple is no list.
Floats count by their bits: every nan equals itself, and -0.0 is not 0.0. The order of a dict or set
does not count. These bytes are hashed and never read back.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

from blake3 import blake3

from smartcache.artifacts.arrays import as_array, is_array_like
from smartcache.artifacts.dtypes import is_numpy_number, numpy_name, torch_name
from smartcache.artifacts.refusals import RefusedError
from smartcache.artifacts.tensors import Kind, array_bytes, plain_tensor, torch_array

if TYPE_CHECKING:
    import numpy as np
    import torch

    Array = np.ndarray[Any, np.dtype[Any]]

MAX_DEPTH: Final = 100
_SIZE: Final = struct.Struct("<Q")
_FLOAT: Final = struct.Struct("<d")

Write = Callable[[Any, list[bytes], int], None]
Rule = tuple[str, Callable[[Any], object]]
rules: dict[type, Rule] = {}
"""What to write for objects of other types: see `keys.register_key_rule`."""


def write(value: object, out: list[bytes], depth: int = MAX_DEPTH) -> None:
    """Append the bytes of a value; RefusedError for a type that has none."""
    (_WRITERS.get(type(value)) or _find(type(value)))(value, out, depth)


def sized(tag: bytes, data: bytes) -> bytes:
    """Return a piece that says how long it is."""
    return tag + _SIZE.pack(len(data)) + data


def array_part(kind: Kind, dtype: str, shape: tuple[int, ...], data: memoryview) -> bytes:
    """Return a tensor or array: by kind, dtype, shape and the digest of its bytes."""
    head = f"{kind} {dtype} {','.join(map(str, shape))}".encode()
    return sized(b"A", head) + blake3(data).digest()


def _none(_value: None, out: list[bytes], _depth: int) -> None:
    out.append(b"-")


def _bool(value: object, out: list[bytes], _depth: int) -> None:
    out.append(b"T" if value else b"F")


def _int(value: int, out: list[bytes], _depth: int) -> None:
    out.append(sized(b"i", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)))


def _float(value: float, out: list[bytes], _depth: int) -> None:
    out.append(b"d" + _FLOAT.pack(value))


def _complex(value: complex, out: list[bytes], _depth: int) -> None:
    out.append(b"c" + _FLOAT.pack(value.real) + _FLOAT.pack(value.imag))


def _str(value: str, out: list[bytes], _depth: int) -> None:
    out.append(sized(b"s", value.encode("utf-8", "surrogatepass")))


def _buffer(tag: bytes) -> Write:
    def write_buffer(value: bytes, out: list[bytes], _depth: int) -> None:
        out.append(sized(tag, bytes(value)))

    return write_buffer


def _sequence(tag: bytes) -> Write:
    def write_sequence(value: list[object], out: list[bytes], depth: int) -> None:
        if not depth:
            _too_deep()
        out.append(tag + _SIZE.pack(len(value)))
        for index, item in enumerate(value):
            try:
                write(item, out, depth - 1)
            except RefusedError as refused:
                refused.within(index)
                raise

    return write_sequence


def _set(tag: bytes) -> Write:
    def write_set(value: set[object], out: list[bytes], depth: int) -> None:
        if not depth:
            _too_deep()
        out.append(tag + _SIZE.pack(len(value)))
        out.extend(sorted(_item(item, item, depth - 1) for item in value))

    return write_set


def _dict(value: dict[object, object], out: list[bytes], depth: int) -> None:
    if not depth:
        _too_deep()
    out.append(b"{" + _SIZE.pack(len(value)))
    pairs = [(_key(key, depth - 1), _item(item, key, depth - 1)) for key, item in value.items()]
    for key, item in sorted(pairs):
        out += (key, item)


def _item(value: object, step: object, depth: int) -> bytes:
    inner: list[bytes] = []
    try:
        write(value, inner, depth)
    except RefusedError as refused:
        refused.within(step)
        raise
    return b"".join(inner)


def _key(key: object, depth: int) -> bytes:
    inner: list[bytes] = []
    try:
        write(key, inner, depth)
    except RefusedError as refused:
        refused.is_key = True
        refused.within(key)
        raise
    return b"".join(inner)


def _too_deep() -> NoReturn:
    raise RefusedError(f"nested more than {MAX_DEPTH} deep", too_deep=True)


def _find(cls: type) -> Write:
    """Return the writer of a type that is not builtin."""
    rule = rules.get(cls)
    if rule is not None:
        return _by_rule(*rule)
    if issubclass(cls, PurePath):
        return _path
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if torch is not None and hasattr(torch, "Tensor"):
        known: dict[type, Write] = {
            torch.Tensor: _tensor,
            torch.dtype: _of_torch,
            torch.device: _of_torch,
            torch.Size: _sequence(b"Z"),
        }
        if cls in known:
            return known[cls]
    if numpy is not None and cls is numpy.ndarray:
        return _numpy
    if numpy is not None and issubclass(cls, numpy.generic):
        return _numpy_scalar
    if is_array_like(cls):
        return _array_like
    hint = "Register a rule for its type: register_key_rule(type, fn)."
    raise RefusedError(f"no key can be made of a {cls.__module__}.{cls.__qualname__}", hint=hint)


def _by_rule(name: str, rule: Callable[[Any], object]) -> Write:
    def write_by_rule(value: object, out: list[bytes], depth: int) -> None:
        if not depth:
            _too_deep()
        out.append(sized(b"o", name.encode("utf-8", "surrogatepass")))
        write(rule(value), out, depth - 1)

    return write_by_rule


def _path(value: PurePath, out: list[bytes], _depth: int) -> None:
    out.append(sized(b"p", value.as_posix().encode("utf-8", "surrogatepass")))


def _of_torch(value: object, out: list[bytes], _depth: int) -> None:
    out.append(sized(b"t", f"{type(value).__name__} {value}".encode()))


def _tensor(value: torch.Tensor, out: list[bytes], _depth: int) -> None:
    name = torch_name(value.dtype)
    if name is None:
        raise RefusedError(f"no key can be made of a tensor of {value.dtype}")
    try:
        plain = plain_tensor(value)
    except TypeError as error:
        raise RefusedError(f"no key can be made of {error}") from None
    data = array_bytes(torch_array(plain, name))
    out.append(array_part("torch", name, tuple(plain.shape), data))


def _numpy(value: Array, out: list[bytes], _depth: int) -> None:
    _write_array(value, "numpy", out)


def _array_like(value: object, out: list[bytes], _depth: int) -> None:
    _write_array(as_array(value), "array", out)


def _write_array(value: Array, kind: Kind, out: list[bytes]) -> None:
    name = numpy_name(value.dtype)
    if name is None:
        raise RefusedError(f"no key can be made of an array of dtype {value.dtype}")
    out.append(array_part(kind, name, value.shape, array_bytes(value)))


def _numpy_scalar(value: np.generic, out: list[bytes], _depth: int) -> None:
    name = numpy_name(value.dtype)
    if name is None:
        raise RefusedError(f"no key can be made of a numpy scalar of dtype {value.dtype}")
    if is_numpy_number(name):
        out.append(sized(b"u", name.encode()) + value.tobytes())
    elif isinstance(value, str):
        out.append(sized(b"U", str.encode(value, "utf-8", "surrogatepass")))
    else:
        out.append(sized(b"S", bytes(cast("np.bytes_", value))))


_WRITERS: Final[dict[type, Write]] = {
    type(None): _none,
    bool: _bool,
    int: _int,
    float: _float,
    complex: _complex,
    str: _str,
    bytes: _buffer(b"y"),
    bytearray: _buffer(b"Y"),
    list: _sequence(b"["),
    tuple: _sequence(b"("),
    set: _set(b"<"),
    frozenset: _set(b">"),
    dict: _dict,
}
BUILTIN: Final = frozenset(_WRITERS)
"""The types that need no rule, and take none."""
