"""What the index of a set notes about its packs besides their rows."""

from __future__ import annotations

from collections.abc import Collection

from smartcache.artifacts.setindex import SetIndex

_LAST = "last pack"
_DOOMED = "doomed packs"


def last_number(index: SetIndex) -> int:
    """Return the number of the newest pack that there ever was; 0: none."""
    return max(_numbers(index.note(_LAST)), default=0)


def set_last_number(index: SetIndex, number: int) -> None:
    """Remember the number of a pack, so that it is never used again."""
    index.set_note(_LAST, str(number))


def doomed(index: SetIndex) -> set[int]:
    """Return the packs that were compacted away and whose files may still be there."""
    return set(_numbers(index.note(_DOOMED)))


def set_doomed(index: SetIndex, numbers: Collection[int]) -> None:
    """Remember which packs were compacted away, until their files are gone."""
    index.set_note(_DOOMED, " ".join(map(str, sorted(numbers))) or None)


def _numbers(text: str | None) -> list[int]:
    words = (text or "").split()
    return [int(word) for word in words if word.isascii() and word.isdigit() and len(word) < 10]  # noqa: PLR2004
