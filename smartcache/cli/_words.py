"""Small phrases that several commands use."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from smartcache.sizes import format_age

if TYPE_CHECKING:
    from pathlib import Path

_SHORT = 12
_A_MOMENT = timedelta(seconds=2)


def short(digest: str) -> str:
    """Return the beginning of a digest, for tables: people compare it, `ls -q` has all of it."""
    return digest[:_SHORT]


def counted(number: int, noun: str) -> str:
    """Return "1 blob", "2 blobs"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def ago(then: datetime) -> str:
    """Return how long ago something was: "3 days ago", "now"."""
    age = datetime.now(UTC) - then
    return "now" if age < _A_MOMENT else f"{format_age(age)} ago"


def clock(then: datetime) -> str:
    """Return a time as people here write it: local, to the minute."""
    return then.astimezone().strftime("%Y-%m-%d %H:%M")


def near(path: Path) -> str:
    """Return a path as it is reached from here, if it lies here."""
    here = type(path).cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def named(names: list[str], noun: str) -> str:
    """Return "model.safetensors" or "model.safetensors and 3 more files"."""
    more = len(names) - 1
    return names[0] + (f" and {more} more {noun}{'' if more == 1 else 's'}" if more else "")
