"""Plain values as JSON, exactly: what JSON cannot tell apart is an object with one name, its tag.

None, True, 7, "text", 1.5, [..]      as JSON has them
{"dict": [[key, value], ..]}          every dict, whose keys need not be texts
{"tuple": [..]}  {"bytes": "00ff"}
{"float": "000000000000f87f"}         the bits of what JSON has no number for: nan, infinity
{"int": "0x1f.."}                     beyond 64 bits
"""

from __future__ import annotations

import math
import re
import struct
from typing import Final

MAX_DEPTH: Final = 100
_INT64: Final = range(-(1 << 63), 1 << 63)
_HEX_INT: Final = re.compile(r"-?0x[0-9a-f]+", re.ASCII)


def to_tagged(value: object) -> object:
    """Return a plain value (None, bool, int, float, str, bytes, list, tuple, dict) for `json`."""
    if isinstance(value, dict):
        return {"dict": [[to_tagged(key), to_tagged(item)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        items = [to_tagged(item) for item in value]
        return {"tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": struct.pack("<d", value).hex()}
    if isinstance(value, int) and value not in _INT64:
        return {"int": hex(value)}
    return value


def from_tagged(data: object, depth: int = MAX_DEPTH) -> object:
    """Return the value of which `to_tagged` made this; ValueError if it never does."""
    if data is None or isinstance(data, (bool, int, float, str)):
        return data
    if not depth:
        raise ValueError("nested too deeply")
    if isinstance(data, list):
        return [from_tagged(item, depth - 1) for item in data]
    if not isinstance(data, dict) or len(data) != 1:
        raise ValueError("something without a tag")
    ((tag, inside),) = data.items()
    if isinstance(inside, str):
        return _scalar(tag, inside)
    return _container(tag, inside, depth - 1)


def _scalar(tag: object, text: str) -> object:
    if tag == "bytes":
        return bytes.fromhex(text)
    if tag == "float":
        try:
            return struct.unpack("<d", bytes.fromhex(text))[0]
        except struct.error:
            raise ValueError("a float that has not 64 bits") from None
    if tag == "int" and _HEX_INT.fullmatch(text):
        return int(text, 16)
    raise ValueError(f"an unknown tag: {tag!r:.80}")


def _container(tag: object, inside: object, depth: int) -> object:
    if isinstance(inside, list):
        if tag == "tuple":
            return tuple([from_tagged(item, depth) for item in inside])
        if tag == "dict":
            return _from_pairs(inside, depth)
    raise ValueError(f"an unknown tag: {tag!r:.80}")


def _from_pairs(pairs: list[object], depth: int) -> dict[object, object]:
    found: dict[object, object] = {}
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:  # noqa: PLR2004 - a key and a value
            raise ValueError("a dict with something that is no pair")
        try:
            found[from_tagged(pair[0], depth)] = from_tagged(pair[1], depth)
        except TypeError:
            raise ValueError("a dict with a key that no dict can hold") from None
    if len(found) != len(pairs):
        raise ValueError("a dict that has a key twice")
    return found
