"""Which copies share their blocks on the disk already: reflinks, which no stat shows.

Only filesystems that have reflinks are asked, and only about files that are known to be equal.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from smartcache.folders.records import Copy
from smartcache.store.filesystems import mount_of
from smartcache.store.hold import OPEN_FLAGS
from smartcache.store.kernel import extents, open_quietly

_REFLINKING = frozenset({"btrfs", "xfs", "bcachefs", "ocfs2", "zfs", "apfs"})
_Place = tuple[tuple[int, int, int], ...]


class SharedBlocks:
    """What was found out about filesystems; asked once for each."""

    def __init__(self) -> None:
        self._known: dict[str, bool] = {}

    def may_share(self, filesystem: str, path: bytes | Path) -> bool:
        """Say whether files of a filesystem, of which `path` is one, may share blocks."""
        if filesystem not in self._known:
            fstype = mount_of(Path(os.fsdecode(path))).fstype
            self._known[filesystem] = fstype in _REFLINKING
        return self._known[filesystem]

    def marked(self, copies: Sequence[Copy]) -> list[Copy]:
        """Return the copies with `shares_with` set where an earlier one has the same blocks."""
        first: dict[tuple[str, _Place], int] = {}
        result = []
        for copy in copies:
            place = self._place(copy)
            owner = (
                None if place is None else first.setdefault((copy.filesystem, place), copy.inode)
            )
            is_later = owner is not None and owner != copy.inode
            result.append(replace(copy, shares_with=owner) if is_later else copy)
        return result

    def _place(self, copy: Copy) -> _Place | None:
        """Return where a copy lies on the disk; None if that cannot be known or compared."""
        if not self.may_share(copy.filesystem, copy.path):
            return None
        try:
            descriptor = open_quietly(copy.path, OPEN_FLAGS)
        except OSError:
            return None
        try:
            found = extents(descriptor)
        except OSError:
            return None
        finally:
            os.close(descriptor)
        places = [(e.logical, e.physical, e.length) for e in found or ()]
        if not places or any(physical is None for _, physical, _ in places):
            return None
        return tuple((a, b or 0, c) for a, b, c in places)
