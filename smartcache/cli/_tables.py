"""Tables for people: columns as wide as what is in them, one of which gives way to the terminal."""

from __future__ import annotations

import re
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_GAP = "  "
_SAMPLE = 1000
"""Rows looked at to size the columns; a longer table is streamed."""
_NARROWEST = 12
_WIDE = "WF"
_HASH_AT_END = re.compile(r"[0-9a-f]{32,}$")
_ENOUGH_OF_HASH = 8


COLOURS = {
    "stays": "green",
    "kept": "green",
    "ok": "green",
    "link": "cyan",
    "reflink": "cyan",
    "duplicate": "cyan",
    "left alone": "yellow",
    "note": "cyan",
    "warning": "yellow",
    "problem": "red",
    "damaged": "red",
    "missing": "red",
}
"""The words for what becomes, or has become, of a thing."""


class Column(NamedTuple):
    """A column: numbers to the right, words for a state in colour, and paths, which give way.

    A column that gives way is cut in the middle to fit; an id never does, a cut one is of no use.
    Columns without any title make a table without a heading.
    """

    title: str
    right: bool = False
    gives_way: bool = False
    is_state: bool = False


def render(
    columns: list[Column],
    rows: Iterable[Iterable[str]],
    width: int | None,
    paint: Callable[[str, str], str] = lambda text, _: text,
) -> Iterator[str]:
    """Yield the lines of a table, at most `width` wide (None: any width); none without rows."""
    remaining = (list(row) for row in rows)
    sample = list(islice(remaining, _SAMPLE))
    if not sample:
        return
    titles = [column.title for column in columns]
    widths = [max(map(text_width, cells)) for cells in zip(titles, *sample, strict=True)]
    if width is not None:
        _fit(columns, widths, width)
    headings = [titles] if any(titles) else []
    for row in chain(headings, sample, remaining):
        cells = zip(columns, row, widths, strict=True)
        yield _GAP.join(_cell(*each, paint) for each in cells).rstrip()


def _fit(columns: list[Column], widths: list[int], width: int) -> None:
    """Take what is too much from the columns that give way, from the widest first."""
    excess = sum(widths) + len(_GAP) * (len(widths) - 1) - width
    giving = [number for number, column in enumerate(columns) if column.gives_way]
    while excess > 0:
        wide = [number for number in giving if widths[number] > _NARROWEST]
        if not wide:
            return
        widths[max(wide, key=widths.__getitem__)] -= 1
        excess -= 1


def _cell(column: Column, text: str, width: int, paint: Callable[[str, str], str]) -> str:
    if column.gives_way:
        text = shortened(text, width)
    padding = " " * max(0, width - text_width(text))
    if column.is_state and (colour := COLOURS.get(text.strip())):
        text = paint(text, colour)
    return padding + text if column.right else text + padding


def shortened(text: str, width: int) -> str:
    """Return text cut in the middle: the ends of a path are what people know it by.

    A hash at its end tells less than what is before it, and is cut first.
    """
    if text_width(text) <= width:
        return text
    if (found := _HASH_AT_END.search(text)) is not None:
        text = f"{text[: found.start() + _ENOUGH_OF_HASH]}…"
        if text_width(text) <= width:
            return text
    tail = (width - 1) * 2 // 3
    head = width - 1 - tail
    return f"{_take(text, head)}…{_take(text[::-1], tail)[::-1]}"


def cut(text: str, width: int) -> str:
    """Return text cut at its end."""
    return text if text_width(text) <= width else f"{_take(text, width - 1)}…"


def _take(text: str, width: int) -> str:
    taken = 0
    for number, character in enumerate(text):
        taken += text_width(character)
        if taken > width:
            return text[:number]
    return text


def text_width(text: str) -> int:
    """Return the columns of a terminal that text takes."""
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width

    return sum(0 if combining(c) else 2 if east_asian_width(c) in _WIDE else 1 for c in text)
