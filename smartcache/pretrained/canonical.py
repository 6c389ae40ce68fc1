"""Plain values as one text: equal values, equal texts, and only those.

The order of a mapping or a set does not count. Types count: True is not 1, a tuple is no list. An
object without such a text is a `NotComparableError`: nobody may take it for equal to another.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from enum import Enum
from typing import cast

_DEPTH = 40
"""What is nested deeper is somebody's graph of objects, or a list that holds itself."""
_QUANTISERS = ("diffusers", "transformers")
"""Whose objects say by `to_dict` what they are."""


class NotComparableError(TypeError):
    """A value has no text of its own: two of them cannot be told apart, or be called equal."""


def canonical(value: object, depth: int = _DEPTH) -> str:
    """Return the text of a value; NotComparableError for objects that are not plain."""
    if not depth:
        raise NotComparableError("nested too deeply")
    write = _WRITERS.get(type(value))
    if write is not None:
        return write(value, depth - 1)
    if isinstance(value, Enum):
        return f"enum {_class_text(value)}.{value.name}"
    if isinstance(value, os.PathLike):
        return f"path {json.dumps(os.fsdecode(value))}"
    if _is_of_torch(value):
        return f"{type(value).__name__} {value}"
    return _settings_text(value, depth - 1)


def _settings_text(value: object, depth: int) -> str:
    """Return the text of settings of a library, such as its configs for quantisation."""
    if type(value).__module__.partition(".")[0] not in _QUANTISERS:
        raise NotComparableError(f"{type(value).__name__} has no canonical form")
    to_dict = getattr(value, "to_dict", None)
    said = to_dict() if callable(to_dict) else getattr(value, "__dict__", None)
    if not isinstance(said, Mapping) or hasattr(value, "parameters"):
        raise NotComparableError(f"{type(value).__name__} has no canonical form")
    return f"{_class_text(value)} {_mapping(dict(said), depth)}"


def _class_text(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _is_of_torch(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.dtype | torch.device)


def _mapping(value: object, depth: int) -> str:
    items = cast("dict[object, object]", value).items()
    pairs = sorted(f"{canonical(key, depth)}: {canonical(each, depth)}" for key, each in items)
    return f"{{{', '.join(pairs)}}}"


def _sequence(value: object, depth: int) -> str:
    return ", ".join(canonical(each, depth) for each in cast("list[object]", value))


def _set(value: object, depth: int) -> str:
    return ", ".join(sorted(canonical(each, depth) for each in cast("set[object]", value)))


_WRITERS: dict[type, Callable[[object, int], str]] = {
    type(None): lambda _value, _depth: "none",
    bool: lambda value, _depth: str(value).lower(),
    int: lambda value, _depth: f"{value}",
    # hex is exact, and tells 0.0 from -0.0; every nan is one value here.
    float: lambda value, _depth: f"float {cast('float', value).hex()}",
    complex: lambda value, _depth: f"complex {value!r}",
    str: lambda value, _depth: json.dumps(value),
    bytes: lambda value, _depth: f"bytes {cast('bytes', value).hex()}",
    list: lambda value, depth: f"[{_sequence(value, depth)}]",
    tuple: lambda value, depth: f"({_sequence(value, depth)})",
    dict: _mapping,
    set: lambda value, depth: f"set {{{_set(value, depth)}}}",
    frozenset: lambda value, depth: f"frozenset {{{_set(value, depth)}}}",
}
