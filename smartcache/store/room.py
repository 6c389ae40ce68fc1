"""Room on disks: what is going to be written is asked for as a whole, before the first byte.

Counted by filesystem, since a job may write to several: a file that is undone on another disk than
the store's needs room there.
"""

from __future__ import annotations

import os
from pathlib import Path

from smartcache.errors import NoSpaceError
from smartcache.sizes import format_size
from smartcache.store.filesystems import free_bytes, nearest_existing


class Room:
    """Bytes that a job will write, by filesystem."""

    def __init__(self) -> None:
        self._needed: dict[int, tuple[Path, int]] = {}

    def add(self, place: Path, size: int) -> None:
        """Count bytes that are going to be written to a place, which need not exist yet."""
        device = os.stat(nearest_existing(place)).st_dev
        first, before = self._needed.get(device, (place, 0))
        self._needed[device] = first, before + size

    @property
    def size(self) -> int:
        """Bytes on all filesystems together."""
        return sum(size for _, size in self._needed.values())

    def require(self, what: str, *, hint: str | None = None) -> None:
        """Raise NoSpaceError if they do not fit somewhere; `what` needs them."""
        for place, size in self._needed.values():
            need_room(place, size, what, hint=hint)


def need_room(place: Path, size: int, what: str, *, hint: str | None = None) -> None:
    """Raise NoSpaceError if so many bytes will not fit on the filesystem of a place."""
    free = free_bytes(place)
    if size > free:
        message = (
            f"{what} needs {format_size(size)} at {place}, but only {format_size(free)} is free"
            " there; nothing was changed"
        )
        raise NoSpaceError(message, hint=hint, path=place, needed=size, free=free)
