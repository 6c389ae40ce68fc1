"""Keys of artifacts: what an artifact was made from, as 256 bits.

    key = compute_key({"size": 1024, "flip": False}, content=Path("cat.png"))

Unequal configs have unequal keys (see `canonical` for what is equal), and the same config has the
same key on every machine and in every release. The content counts by its bytes, so a file, its
bytes and a copy elsewhere are one; the name of a file is no part of its content.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import PurePath
from typing import TypeVar

from blake3 import blake3

from smartcache.artifacts.canonical import BUILTIN, rules, sized, write
from smartcache.artifacts.refusals import RefusedError, explain
from smartcache.errors import BadKeyError
from smartcache.store.digest import hash_file

T = TypeVar("T")
LONGEST_KEY = 1024
"""Bytes of a key that is a text of the user's own."""
_DOMAIN = b"smartcache artifact key 1\0"
_DIGEST_LENGTH = 64


def compute_key(config: object, *, content: object = None, prefix: str = "") -> str:
    """Return the key of a config, 64 hexadecimal characters, and of the content it applies to.

    `config`: builtin values, nested; paths (by their text); arrays, tensors and numpy scalars (by
    kind, dtype, shape and bytes); torch dtypes, devices and sizes; other objects by the rule of
    their type. `content`: bytes, an array or tensor, a path (the bytes of the file), or a list of
    these, in order. With `prefix` the key reads "prefix-<hex>". BadKeyError names the path to what
    no key can be made of.
    """
    out = [_DOMAIN]
    try:
        write(config, out)
        _write_content(content, out)
    except RefusedError as refused:
        raise _bad_key(refused, config) from None
    digest = blake3(b"".join(out)).hexdigest()
    return f"{_checked_prefix(prefix)}-{digest}" if prefix else digest


def register_key_rule(
    cls: type[T], rule: Callable[[T], object], *, name: str | None = None
) -> None:
    """Let objects of exactly this type be part of a config: by what `rule` returns for them.

    Their type counts too, by its `name`; that is its module and class name unless given, and must
    be given where those differ between programs (`__main__`).
    """
    if cls in BUILTIN:
        raise BadKeyError(f"{cls.__name__} needs no rule: it has keys of its own")
    rules[cls] = (name or f"{cls.__module__}.{cls.__qualname__}", rule)


def check_key(key: object) -> bytes:
    """Return a key as it is stored; BadKeyError unless it is a text of 1 to 1024 bytes."""
    if not isinstance(key, str):
        raise BadKeyError(f"a key is a text, not a {type(key).__qualname__}", hint=_HINT)
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


_HINT = "compute_key(...) makes a key of anything."


def _write_content(content: object, out: list[bytes]) -> None:
    if content is None:
        out.append(b"0")
    elif isinstance(content, (list, tuple)):
        out.append(sized(b"L", str(len(content)).encode()))
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
    write(content, out)
    if out[0][:1] != b"A":
        name = type(content).__qualname__
        hint = "Content is bytes, an array, a tensor, a pathlib.Path, or a list of these."
        raise RefusedError(f"a {name} cannot be content", hint=hint)
    return out[0]


def _bad_key(refused: RefusedError, config: object) -> BadKeyError:
    error = explain(refused, config)
    hint = refused.hint or "Leave it out, or put what it depends on as plain values."
    return BadKeyError(error.message, hint=hint, path=error.path)


def _checked_prefix(prefix: str) -> str:
    longest = LONGEST_KEY - 1 - _DIGEST_LENGTH
    if len(str.encode(prefix, "utf-8", "surrogatepass")) > longest:
        raise BadKeyError(f"a prefix is a text of at most {longest} bytes")
    return prefix
