"""A report as Markdown, for a wiki or an issue: the same sections with pipes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from smartcache.report.text import Section

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~])")


def markdown(
    title: str, sections: Iterable[Section], *, clean: Callable[[str], str]
) -> Iterator[str]:
    """Yield the lines; `clean` makes names harmless that have line breaks or strange bytes."""
    yield f"# {_text(clean(title))}"
    for section in sections:
        yield ""
        yield f"## {_text(section.title)}"
        if section.rows:
            yield ""
            yield _row(section.columns)
            yield _row([*["--:"] * (len(section.columns) - 1), ":--"])
            for row in section.rows:
                yield _row(_text(clean(cell)) for cell in row)
        for note in section.notes:
            yield ""
            yield _text(clean(note))


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _text(text: str) -> str:
    """Return text in which no character means anything but itself."""
    return _SPECIAL.sub(r"\\\1", text)
