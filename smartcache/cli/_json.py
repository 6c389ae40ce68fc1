"""Results as JSON: ASCII only, integer bytes, ISO 8601 times with their offset, paths as text."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from datetime import datetime
from typing import Any


def encoded(document: object) -> Iterator[str]:
    """Yield the text of one document; an iterator becomes a list, written as it comes."""
    import json

    if not isinstance(document, Iterator):
        yield json.dumps(plain(document), indent=2) + "\n"
        return
    before = "[\n"
    for item in document:
        yield f"{before}{json.dumps(plain(item))}"
        before = ",\n"
    yield "\n]\n" if before == ",\n" else "[]\n"


def plain(value: object) -> object:
    """Return a value made of what JSON knows; fields whose names begin with `_` are left out."""
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value) if not field.name.startswith("_")]
        return {name: plain(getattr(value, name)) for name in names}
    for kind, form in _FORMS.items():
        if isinstance(value, kind):
            return form(value)
    return value


def picked(value: object, names: str = "") -> dict[str, object]:
    """Return attributes of a value, by their names; without names, the fields of a dataclass."""
    wanted = names.split() or [field.name for field in fields(value)]  # type: ignore[arg-type]
    return {name: getattr(value, name) for name in wanted}


_FORMS: dict[type, Callable[[Any], object]] = {
    datetime: lambda value: value.isoformat(timespec="seconds").replace("+00:00", "Z"),
    os.PathLike: os.fspath,
    BaseException: str,
    Mapping: lambda value: {str(key): plain(item) for key, item in value.items()},
    AbstractSet: lambda value: sorted(str(plain(item)) for item in value),
    list: lambda value: [plain(item) for item in value],
    tuple: lambda value: [plain(item) for item in value],
}
"""How each kind of value is written; what is not listed, JSON knows."""
