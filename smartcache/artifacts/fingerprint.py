"""Fingerprints: what all artifacts of a set depend on besides their own input.

A set belongs to a name and a fingerprint: any other value or type anywhere in it is another set.
The order of dicts does not count. They are kept as JSON that tells all types apart (`tagged`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from blake3 import blake3

from smartcache.artifacts.canonical import write
from smartcache.artifacts.refusals import RefusedError, explain, path_text, shown
from smartcache.artifacts.tagged import MAX_DEPTH, from_tagged, to_tagged
from smartcache.errors import SetFormatError

_DOMAIN: Final = b"smartcache artifact set 1\0"
_ID_LENGTH: Final = 32


class _Absent:
    def __repr__(self) -> str:
        return "(absent)"


ABSENT: Final = _Absent()
"""Stands in a `Difference` for what one of the two does not have."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One place at which two fingerprints differ; `ABSENT` where one of them has nothing."""

    path: str
    mine: object
    theirs: object

    def __str__(self) -> str:
        return f"{self.path}: {shown(self.mine)} / {shown(self.theirs)}"


class Fingerprint:
    """A mapping of plain values that does not change, and is equal to another exactly."""

    __slots__ = ("_canonical", "_values")

    def __init__(self, values: dict[object, object]) -> None:
        """Take values that are plain already: use `of`."""
        self._values = values
        self._canonical = _canonical(values)

    @classmethod
    def of(cls, mapping: Mapping[Any, object]) -> Self:
        """Return the fingerprint of a mapping; it is copied.

        None, bool, int, float, str, bytes, and lists, tuples and dicts of them; a torch dtype
        counts as its name, "torch.float16". UnsupportedValueError, with the path, for others.
        """
        values = dict(mapping)
        try:
            return cls(_copied_dict(values, MAX_DEPTH))
        except RefusedError as refused:
            raise explain(refused, values) from None

    @property
    def values(self) -> dict[object, object]:
        """A copy of the mapping."""
        return _copied_dict(self._values, MAX_DEPTH)

    def id(self, name: str) -> str:
        """Return the id of the set of this name and fingerprint: 32 hexadecimal characters."""
        data = _DOMAIN + _canonical(name) + self._canonical
        return blake3(data).hexdigest()[:_ID_LENGTH]

    def to_json(self) -> object:
        """Return the fingerprint as what `json` can write."""
        return to_tagged(self._values)

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Return the fingerprint from what `to_json` gave, or from its text.

        SetFormatError if it is anything else.
        """
        try:
            values = from_tagged(json.loads(data) if isinstance(data, str) else data)
        except (ValueError, RecursionError) as error:
            raise SetFormatError(f"the fingerprint is malformed: {error}") from None
        if not isinstance(values, dict):
            raise SetFormatError("the fingerprint is not a dict")
        return cls(values)

    def differences(self, other: Fingerprint) -> list[Difference]:
        """Return where the two differ, as deep inside as can be told; none if they are equal."""
        found: list[Difference] = []
        _compare([], self._values, other._values, found)
        return found

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Fingerprint):
            return NotImplemented
        return self._canonical == other._canonical

    def __hash__(self) -> int:
        return hash(self._canonical)

    def __repr__(self) -> str:
        return f"Fingerprint({self._values!r})"

    def __str__(self) -> str:
        """Return it in one line: `dtype='float16', size=1024`."""
        return ", ".join(f"{path_text([key])}={shown(v)}" for key, v in self._values.items())


def _canonical(value: object) -> bytes:
    out: list[bytes] = []
    write(value, out)
    return b"".join(out)


def _copied(value: object, depth: int) -> object:
    """Return a copy made of plain values alone."""
    cls = type(value)
    if value is None or cls in (bool, int, float, str, bytes):
        return value
    if not depth:
        raise RefusedError(f"nested more than {MAX_DEPTH} deep", too_deep=True)
    copy = _COPIES.get(cls)
    if copy is not None:
        return copy(value, depth)
    torch = sys.modules.get("torch")
    if torch is not None and cls is torch.dtype:
        return str(value)
    raise RefusedError(
        f"a {cls.__qualname__} cannot be part of a fingerprint",
        hint="Put plain values: those that the artifacts depend on.",
    )


def _copied_list(value: Iterable[object], depth: int) -> list[object]:
    found: list[object] = []
    for index, item in enumerate(value):
        try:
            found.append(_copied(item, depth - 1))
        except RefusedError as refused:
            refused.within(index)
            raise
    return found


def _copied_dict(value: dict[object, object], depth: int) -> dict[object, object]:
    found: dict[object, object] = {}
    for key, item in value.items():
        try:
            copied = _copied(item, depth - 1)
        except RefusedError as refused:
            refused.within(key)
            raise
        try:
            found[_copied(key, depth - 1)] = copied
        except RefusedError as refused:
            refused.is_key = True
            refused.within(key)
            raise
    return found


_COPIES: Final[dict[type, Callable[[Any, int], object]]] = {
    list: _copied_list,
    tuple: lambda value, depth: tuple(_copied_list(value, depth)),
    dict: _copied_dict,
}


def _compare(path: list[object], mine: object, theirs: object, found: list[Difference]) -> None:
    """Add the differences of two plain values: of dicts by key, of sequences of one length."""
    if type(mine) is type(theirs):
        if isinstance(mine, dict) and isinstance(theirs, dict):
            _compare_dicts(path, mine, theirs, found)
            return
        if isinstance(mine, (list, tuple)) and isinstance(theirs, (list, tuple)):  # noqa: SIM102
            if len(mine) == len(theirs):
                for index, (one, other) in enumerate(zip(mine, theirs, strict=True)):
                    _compare([*path, index], one, other, found)
                return
    if mine is ABSENT or theirs is ABSENT or _canonical(mine) != _canonical(theirs):
        found.append(Difference(path_text(path), mine, theirs))


def _compare_dicts(
    path: list[object],
    mine: dict[object, object],
    theirs: dict[object, object],
    found: list[Difference],
) -> None:
    """Keys count with their types: 1 and True are one key to a dict, but not to a fingerprint."""
    by_key = {_canonical(key): (key, item) for key, item in theirs.items()}
    for key, item in mine.items():
        _, other = by_key.pop(_canonical(key), (key, ABSENT))
        _compare([*path, key], item, other, found)
    for key, other in by_key.values():
        _compare([*path, key], ABSENT, other, found)
