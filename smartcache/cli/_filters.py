"""Conditions and orders that a user writes: `--filter "size>1GB"`, `--sort used:desc`.

A table of columns says what there is; each column is a size, a time (compared by its age), a
number, a word, or several words of which one must match. `used` and `accessed`, which is the word
of `hf cache ls`, mean the same everywhere.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Generic, Literal, TypeVar, cast

from smartcache.cli._failures import BadValueError
from smartcache.errors import ConfigError
from smartcache.sizes import parse_age, parse_size

_T = TypeVar("_T")
_FILTER = re.compile(r"\s*([a-z]+)\s*(<=|>=|!=|==|=|<|>)\s*(.+?)\s*")
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "=": operator.eq, "==": operator.eq, "!=": operator.ne,
}  # fmt: skip
_EQUALITY = ("=", "==", "!=")
_ALIASES = {"used": "accessed", "accessed": "used"}
_NEVER = datetime.fromtimestamp(0, UTC)


@dataclass(frozen=True, slots=True)
class Field(Generic[_T]):
    """What can be asked of a row; `value` gives an int, a time (None: never), a text or texts."""

    kind: Literal["size", "time", "number", "word", "words"]
    value: Callable[[_T], object]
    choices: tuple[str, ...] = ()
    """Of a word: all that there are."""


class Fields(Generic[_T]):
    """All that can be asked of rows of one kind, with a hint that shows how."""

    def __init__(self, fields: Mapping[str, Field[_T]], hint: str) -> None:
        self._fields = fields
        self._hint = hint

    def condition(self, text: str) -> Callable[[_T], bool]:
        """Read a condition."""
        found = _FILTER.fullmatch(text)
        try:
            test = None if found is None else self._test(found[1], found[2], found[3])
        except (ConfigError, ValueError) as error:
            raise BadValueError(f"{error} in {text!r}", hint=self._hint) from None
        if test is None:
            raise BadValueError(f"not a filter: {text!r}", hint=self._hint)
        return test

    def _test(self, name: str, sign: str, value: str) -> Callable[[_T], bool] | None:
        field = self._fields.get(self._known(name))
        if field is None or (field.kind in ("word", "words") and sign not in _EQUALITY):
            return None
        if field.choices and value not in field.choices:
            return None
        if field.kind == "word":
            return lambda row: (field.value(row) == value) == (sign != "!=")
        if field.kind == "words":
            return lambda row: (
                (value in cast("Collection[str]", field.value(row))) == (sign != "!=")
            )
        compare, of = _COMPARE[sign], self._number(field)
        if field.kind != "time":
            wanted = parse_size(value) if field.kind == "size" else int(value)
            return lambda row: compare(of(row), wanted)
        now, age = datetime.now(UTC).timestamp(), parse_age(value).total_seconds()
        return lambda row: compare(now - of(row), age)

    def _known(self, name: str) -> str:
        return name if name in self._fields else _ALIASES.get(name, name)

    def order(self, text: str) -> tuple[str, bool]:
        """Read a sort key with an optional direction; return whether the largest comes first."""
        name, _, direction = text.partition(":")
        name = self._known(name)
        if name not in self._fields or direction not in ("", "asc", "desc"):
            hint = f"Write {', '.join(self._fields)}, with :asc or :desc behind it if you like."
            raise BadValueError(f"not a sort key: {text!r}", hint=hint)
        is_text = self._fields[name].kind in ("word", "words")
        return name, direction == "desc" if direction else not is_text

    def sorted(self, rows: Iterable[_T], order: tuple[str, bool]) -> list[_T]:
        """Return rows in an order; those that are equal stay as they are."""
        return sorted(rows, key=self.key(order[0]), reverse=order[1])

    def key(self, name: str) -> Callable[[_T], float | str]:
        """Return what rows are compared by."""
        field = self._fields[name]
        if field.kind in ("word", "words"):
            return lambda row: str(field.value(row))
        return self._number(field)

    def _number(self, field: Field[_T]) -> Callable[[_T], float]:
        def number(row: _T) -> float:
            value = field.value(row)
            if isinstance(value, datetime):
                return value.timestamp()
            return _NEVER.timestamp() if value is None else float(value)  # type: ignore[arg-type]

        return number
