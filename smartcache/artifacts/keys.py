"""Keys of artifacts: what an artifact was made from, as 256 bits.

    key = compute_key({"size": 1024, "flip": False}, content=Path("cat.png"))

Unequal configs have unequal keys, and the same config has the same key on every machine and in
every release. The content counts by its bytes, so a file, its bytes and a copy elsewhere are one;
the name of a file is no part of its content.

What is hashed are canonical bytes: equal values have equal bytes, and only those. Every value is
written with its type and, where that leaves it open, its length, so no two values run into each
other. Types count: 1, 1.0, True, "1" and b"1" are five values, a tuple is no list. Floats count by
their bits: every nan equals itself, and -0.0 is not 0.0. The order of a dict or set does not count.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar, cast, overload

from blake3 import blake3

from smartcache.artifacts.values.encode import as_array, is_array_like
from smartcache.artifacts.values.refusals import RefusedError, explain, with_article
from smartcache.artifacts.values.tensors import (
    Kind,
    array_bytes,
    is_numpy_number,
    numpy_name,
    plain_tensor,
    torch_array,
    torch_name,
)
from smartcache.errors import BadKeyError
from smartcache.system.hashing import hash_file

if TYPE_CHECKING:
    import numpy as np
    import torch

    Array = np.ndarray[Any, np.dtype[Any]]

T = TypeVar("T")
LONGEST_KEY: Final = 1024
"""Bytes of a key that is a text of the user's own."""
MAX_DEPTH: Final = 100
"""Containers inside each other in a config."""
_DIGEST_LENGTH: Final = 64
_RAW_LENGTH: Final = 32
_DOMAIN: Final = b"smartcache artifact key 1\0"
_HINT: Final = "compute_key(...) makes a key of anything."
_WORTH_THREADS: Final = 8 << 20
_SIZE: Final = struct.Struct("<Q")
_FLOAT: Final = struct.Struct("<d")

Write = Callable[[Any, list[bytes], int], None]
_rules: Final[dict[type, tuple[str, Callable[[Any], object]]]] = {}


def compute_key(config: object, *, content: object = None, prefix: str = "") -> str:
    """Return the key of a config, 64 hexadecimal characters, and of the content it applies to.

    `config`: builtin values, nested; paths (by their text); arrays, tensors and numpy scalars (by
    kind, dtype, shape and bytes); torch dtypes, devices and sizes; a torch module (by its class,
    config and weights); other objects by the rule of their type. `content`: bytes, an array or
    tensor, a path (the bytes of the file), or a list of these, in order. With `prefix` the key
    reads "prefix-<hex>". BadKeyError names the path to what no key can be made of.
    """
    out = [_DOMAIN]
    try:
        _write(config, out, MAX_DEPTH)
        _write_content(content, out)
    except RefusedError as refused:
        error = explain(refused, config)
        hint = refused.hint or "Leave it out, or put what it depends on as plain values."
        raise BadKeyError(error.message, hint=hint, path=error.path) from None
    digest = blake3(b"".join(out)).hexdigest()
    longest = LONGEST_KEY - 1 - _DIGEST_LENGTH
    if len(str.encode(prefix, "utf-8", "surrogatepass")) > longest:
        raise BadKeyError(f"a prefix is a text of at most {longest} bytes")
    return f"{prefix}-{digest}" if prefix else digest


def register_key_rule(
    cls: type[T], rule: Callable[[T], object], *, name: str | None = None
) -> None:
    """Let objects of exactly this type be part of a config: by what `rule` returns for them.

    Their type counts too, by its `name`; that is its module and class name unless given, and must
    be given where those differ between programs (`__main__`).
    """
    if cls in _WRITERS:
        raise BadKeyError(f"{cls.__name__} needs no rule: it has keys of its own")
    _rules[cls] = (name or f"{cls.__module__}.{cls.__qualname__}", rule)


def check_keys(keys: Iterable[object]) -> list[bytes]:
    """Return keys as they are stored; one text would be taken for many keys of one letter."""
    if isinstance(keys, (str, bytes)):
        raise BadKeyError("one key where several are expected", hint="Put it into a list: [key].")
    return [check_key(key) for key in keys]


def check_key(key: object) -> bytes:
    """Return a key as it is stored; BadKeyError unless it is a text of 1 to 1024 bytes."""
    if not isinstance(key, str):
        raise BadKeyError(
            f"a key is a text, not {with_article(type(key).__qualname__)}", hint=_HINT
        )
    if len(key) == _DIGEST_LENGTH:
        try:
            raw = bytes.fromhex(key)
        except ValueError:
            pass
        else:
            if raw.hex() == key:
                return b"\x01" + raw
    data = str.encode(key, "utf-8", "surrogatepass")
    if not 0 < len(data) <= LONGEST_KEY:
        raise BadKeyError(f"a key has 1 to {LONGEST_KEY} bytes, not {len(data)}", hint=_HINT)
    return b"\x02" + data


def is_key(stored: bytes) -> bool:
    """Say whether something can have been stored as a key."""
    try:
        key_text(stored)
    except BadKeyError:
        return False
    return True


def key_text(stored: bytes) -> str:
    """Return a stored key as the user gave it; BadKeyError if nothing like it was ever stored."""
    if stored[:1] == b"\x01" and len(stored) == 1 + _DIGEST_LENGTH // 2:
        return stored[1:].hex()
    if stored[:1] == b"\x02" and 1 < len(stored) <= 1 + LONGEST_KEY:
        try:
            return stored[1:].decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            pass
    raise BadKeyError(f"no stored key: {stored[:40]!r}")


class Digests(Sequence[str]):
    """Many keys of 64 hexadecimal characters in 32 bytes each: a million of them in 32 MB."""

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data) // _RAW_LENGTH

    @overload
    def __getitem__(self, number: int) -> str: ...
    @overload
    def __getitem__(self, number: slice) -> list[str]: ...
    def __getitem__(self, number: int | slice) -> str | list[str]:
        """Return a key, or several."""
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        return self.stored[number][1:].hex()

    def __reduce__(self) -> tuple[object, ...]:
        return Digests, (self.data,)

    @property
    def stored(self) -> Sequence[bytes]:
        """The same keys as they are stored."""
        return _StoredDigests(self.data)


class _StoredDigests(Sequence[bytes]):
    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data) // _RAW_LENGTH

    def __getitem__(self, number: Any) -> Any:  # noqa: ANN401 - no slices are asked for
        start = _RAW_LENGTH * range(len(self))[number]
        return b"\x01" + self._data[start : start + _RAW_LENGTH]

    def __iter__(self) -> Iterator[bytes]:
        data = self._data
        for start in range(0, len(data), _RAW_LENGTH):
            yield b"\x01" + data[start : start + _RAW_LENGTH]


def canonical(value: object, depth: int = MAX_DEPTH) -> bytes:
    """Return the canonical bytes of a value; RefusedError for a type that has none."""
    out: list[bytes] = []
    _write(value, out, depth)
    return b"".join(out)


def _write_content(content: object, out: list[bytes]) -> None:
    if content is None:
        out.append(b"0")
    elif isinstance(content, (list, tuple)):
        out.append(_sized(b"L", str(len(content)).encode()))
        for index, item in enumerate(content):
            try:
                out.append(_content_part(item))
            except RefusedError as refused:
                refused.within(index)
                refused.within("content")
                raise
    else:
        try:
            out.append(_content_part(content))
        except RefusedError as refused:
            refused.within("content")
            raise


def _content_part(content: object) -> bytes:
    """Return the digest of the bytes of one content; of an array with its dtype and shape."""
    if isinstance(content, PurePath):
        return b"B" + bytes.fromhex(hash_file(os.fspath(content))[0].digest)
    if isinstance(content, (bytes, bytearray, memoryview)):
        view = memoryview(content)
        return b"B" + blake3(view if view.c_contiguous else view.tobytes()).digest()
    out: list[bytes] = []
    _write(content, out, MAX_DEPTH)
    if out[0][:1] != b"A":
        name = type(content).__qualname__
        hint = "Content is bytes, an array, a tensor, a pathlib.Path, or a list of these."
        raise RefusedError(f"a {name} cannot be content", hint=hint)
    return out[0]


def _write(value: object, out: list[bytes], depth: int) -> None:
    """Append the canonical bytes of a value; RefusedError for a type that has none."""
    (_WRITERS.get(type(value)) or _find(type(value)))(value, out, depth)


def _sized(tag: bytes, data: bytes) -> bytes:
    """Return a piece that says how long it is."""
    return tag + _SIZE.pack(len(data)) + data


def _none(_value: None, out: list[bytes], _depth: int) -> None:
    out.append(b"-")


def _bool(value: object, out: list[bytes], _depth: int) -> None:
    out.append(b"T" if value else b"F")


def _int(value: int, out: list[bytes], _depth: int) -> None:
    out.append(_sized(b"i", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)))


def _float(value: float, out: list[bytes], _depth: int) -> None:
    out.append(b"d" + _FLOAT.pack(value))


def _complex(value: complex, out: list[bytes], _depth: int) -> None:
    out.append(b"c" + _FLOAT.pack(value.real) + _FLOAT.pack(value.imag))


def _str(value: str, out: list[bytes], _depth: int) -> None:
    out.append(_sized(b"s", value.encode("utf-8", "surrogatepass")))


def _buffer(tag: bytes) -> Write:
    def write_buffer(value: bytes, out: list[bytes], _depth: int) -> None:
        out.append(_sized(tag, bytes(value)))

    return write_buffer


def _sequence(tag: bytes) -> Write:
    def write_sequence(value: list[object], out: list[bytes], depth: int) -> None:
        if not depth:
            _too_deep()
        out.append(tag + _SIZE.pack(len(value)))
        for index, item in enumerate(value):
            try:
                _write(item, out, depth - 1)
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
    try:
        return canonical(value, depth)
    except RefusedError as refused:
        refused.within(step)
        raise


def _key(key: object, depth: int) -> bytes:
    try:
        return canonical(key, depth)
    except RefusedError as refused:
        refused.is_key = True
        refused.within(key)
        raise


def _too_deep() -> NoReturn:
    raise RefusedError(f"nested more than {MAX_DEPTH} deep", too_deep=True)


def _find(cls: type) -> Write:
    """Return the writer of a type that is not builtin."""
    rule = _rules.get(cls)
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
        if hasattr(torch, "nn") and issubclass(cls, torch.nn.Module):
            known[cls] = _module
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
        out.append(_sized(b"o", name.encode("utf-8", "surrogatepass")))
        _write(rule(value), out, depth - 1)

    return write_by_rule


def _path(value: PurePath, out: list[bytes], _depth: int) -> None:
    out.append(_sized(b"p", value.as_posix().encode("utf-8", "surrogatepass")))


def _of_torch(value: object, out: list[bytes], _depth: int) -> None:
    out.append(_sized(b"t", f"{type(value).__name__} {value}".encode()))


def _module(value: torch.nn.Module, out: list[bytes], depth: int) -> None:
    from smartcache.artifacts.modules import module_value

    if not depth:
        _too_deep()
    out.append(_sized(b"m", canonical(module_value(value), depth - 1)))


def _array_part(
    kind: Kind, dtype: str, shape: tuple[int, ...], data: memoryview, threads: int = 1
) -> bytes:
    """Return a tensor or array: by kind, dtype, shape and the digest of its bytes."""
    head = f"{kind} {dtype} {','.join(map(str, shape))}".encode()
    # Each hash with threads of its own: those of blake3.AUTO hang in a process forked afterwards.
    most = threads if data.nbytes >= _WORTH_THREADS else 1
    return _sized(b"A", head) + blake3(data, max_threads=most).digest()


def _tensor(value: torch.Tensor, out: list[bytes], _depth: int) -> None:
    out.append(tensor_part(value))


def tensor_part(value: torch.Tensor, *, threads: int = 1) -> bytes:
    """Return the canonical bytes of a tensor, hashed by several threads if it is large."""
    name = torch_name(value.dtype)
    if name is None:
        raise RefusedError(f"no key can be made of a tensor of {value.dtype}")
    try:
        plain = plain_tensor(value)
    except TypeError as error:
        raise RefusedError(f"no key can be made of {error}") from None
    data = array_bytes(torch_array(plain, name))
    return _array_part("torch", name, tuple(plain.shape), data, threads)


def _numpy(value: Array, out: list[bytes], _depth: int) -> None:
    _write_array(value, "numpy", out)


def _array_like(value: object, out: list[bytes], _depth: int) -> None:
    _write_array(as_array(value), "array", out)


def _write_array(value: Array, kind: Kind, out: list[bytes]) -> None:
    name = numpy_name(value.dtype)
    if name is None:
        raise RefusedError(f"no key can be made of an array of dtype {value.dtype}")
    out.append(_array_part(kind, name, value.shape, array_bytes(value)))


def _numpy_scalar(value: np.generic, out: list[bytes], _depth: int) -> None:
    name = numpy_name(value.dtype)
    if name is None:
        raise RefusedError(f"no key can be made of a numpy scalar of dtype {value.dtype}")
    if is_numpy_number(name):
        out.append(_sized(b"u", name.encode()) + value.tobytes())
    elif isinstance(value, str):
        out.append(_sized(b"U", str.encode(value, "utf-8", "surrogatepass")))
    else:
        out.append(_sized(b"S", bytes(cast("np.bytes_", value))))


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
