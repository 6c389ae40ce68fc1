"""What folders take on the disk: each name counted, each inode once.

A folder is walked once, without recursion and without following symlinks. Of a file with one link
nothing is remembered; of one with several, only how many of its links have not been met yet. So a
tree of any size is measured in little memory, and it is known which bytes would come back if the
folder were deleted: those of inodes all of whose links were met. What blocks reflinks share cannot
be seen in a stat: each of them counts in full.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from smartcache.errors import StoreError
from smartcache.progress import Job, Progress, silent
from smartcache.store.index import Index
from smartcache.store.schema import signed
from smartcache.store.statkey import allocated_bytes
from smartcache.store.volume import Volume

MOST_NAMED = 1000
"""So many unreadable places are named; more are only counted."""
_LOOKUP = 5000
"""Inodes looked up in the index at once: one by one, a million would take a minute."""
_STAT_HAS_NO_LINKS = os.name == "nt"
"""On Windows the stat of a directory entry has neither inode nor link count."""

_Key = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderUsage:
    """The figures of one folder or file; `path` None: of all that were given, nothing twice.

    `files` to `freed_if_deleted` are about regular files. Every figure is "at least" when something
    was unreadable.
    """

    path: Path | None
    files: int
    """Names of regular files."""
    logical: int
    """The size of each name."""
    physical: int
    """Disk blocks, each inode once."""
    linked_inside: int
    """Names beyond the first of an inode."""
    sparse: int
    """What files with holes (or compressed ones) take less than their size."""
    shared_outside: int
    """Physical bytes that names outside the folder share."""
    shared_with_store: int
    """Physical bytes of files with several links that are blobs of the store."""
    freed_if_deleted: int
    """Physical bytes of files all of whose links are inside."""
    overhead: int
    """Disk blocks of the directories, symlinks and special files themselves."""
    directories: int
    symlinks: int
    """Counted, never followed."""
    other: int
    """Pipes, sockets and devices."""
    unreadable: tuple[tuple[Path, str], ...]
    """Places that could not be looked at, and why: the first of them."""
    unreadable_count: int
    is_partial: bool
    """Something vanished during the walk."""


def folder_usage(
    paths: Iterable[Path], *, volume: Volume | None = None, progress: Progress = silent
) -> list[FolderUsage]:
    """Return the figures of each folder or file and, for several, of all together as the last.

    Each is measured by itself; where one contains another, or they share inodes, the total counts
    that once. A symlink that is given itself stands for what it points to.
    """
    given = [(path, *_resolved(path)) for path in paths]
    with progress("Measuring", None) as job:
        survey = _Survey(volume, job, has_total=len(given) > 1)
        found = [survey.measure(*each) for each in given]
        return found if survey.total is None else [*found, survey.total.result(None)]


def _resolved(path: Path) -> tuple[str, os.stat_result]:
    try:
        return os.path.realpath(path), os.stat(path)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        hint = "Check the spelling, and that you may enter the folders above it."
        raise StoreError(f"Cannot look at {path}: {reason}", hint=hint, path=path) from error


class _Tally:
    """Sums over the entries it is given. A plain class with plain fields: this is the hot loop."""

    def __init__(self, volume: Volume | None) -> None:
        self.files = self.logical = self.physical = self.linked_inside = self.sparse = 0
        self.shared_outside = self.shared_with_store = self.freed_if_deleted = 0
        self.overhead = self.directories = self.symlinks = self.other = 0
        self.unreadable: list[tuple[Path, str]] = []
        self.unreadable_count = 0
        self.is_partial = False
        self._links_left: dict[int, dict[int, int]] = {}
        """For each device and inode with several links: how many were not met yet."""
        self._index: Index | None = None if volume is None else volume.index
        self._device = -1 if volume is None else volume.device
        self._unasked: dict[int, int] = {}
        """Inodes on the store's device, with their blocks, that may be blobs."""

    def add(self, st: os.stat_result) -> None:
        """Count a name."""
        kind = stat.S_IFMT(st.st_mode)
        if kind == stat.S_IFREG:
            self._add_file(st)
            return
        self.overhead += allocated_bytes(st)
        if kind == stat.S_IFDIR:
            self.directories += 1
        elif kind == stat.S_IFLNK:
            self.symlinks += 1
        else:
            self.other += 1

    def add_unreadable(self, path: str, error: OSError) -> None:
        """Count and name a place that cannot be looked at."""
        self.unreadable_count += 1
        if len(self.unreadable) < MOST_NAMED:
            self.unreadable.append((Path(path), error.strerror or type(error).__name__))

    def result(self, path: Path | None) -> FolderUsage:
        """Return the sums."""
        self._ask()
        return FolderUsage(
            path=path, files=self.files, logical=self.logical, physical=self.physical,
            linked_inside=self.linked_inside, sparse=self.sparse,
            # Blocks that changed between two names of an inode must not make it negative.
            shared_outside=max(0, self.shared_outside), shared_with_store=self.shared_with_store,
            freed_if_deleted=self.freed_if_deleted, overhead=self.overhead,
            directories=self.directories, symlinks=self.symlinks, other=self.other,
            unreadable=tuple(self.unreadable), unreadable_count=self.unreadable_count,
            is_partial=self.is_partial,
        )  # fmt: skip

    def _add_file(self, st: os.stat_result) -> None:
        size, allocated = st.st_size, allocated_bytes(st)
        self.files += 1
        self.logical += size
        if st.st_nlink > 1:
            left = self._links_left.setdefault(st.st_dev, {})
            if (links := left.get(st.st_ino)) is not None:
                self.linked_inside += 1
                left[st.st_ino] = links - 1
                if links == 1:
                    self.shared_outside -= allocated
                    self.freed_if_deleted += allocated
                return
            left[st.st_ino] = st.st_nlink - 1
            self.shared_outside += allocated
            if st.st_dev == self._device:
                self._unasked[signed(st.st_ino)] = allocated
                if len(self._unasked) >= _LOOKUP:
                    self._ask()
        else:
            self.freed_if_deleted += allocated
        self.physical += allocated
        if allocated < size:
            self.sparse += size - allocated

    def _ask(self) -> None:
        """Look up which of the inodes met since the last time are blobs."""
        if self._index is not None and self._unasked:
            for inode in self._index.blobs_in(self._unasked):
                self.shared_with_store += self._unasked[inode]
        self._unasked = {}


class _Survey:
    """The walk over all paths given: one tally for each, and one that counts nothing twice."""

    def __init__(self, volume: Volume | None, job: Job, *, has_total: bool) -> None:
        self.total = _Tally(volume) if has_total else None
        self._volume = volume
        self._job = job
        self._directories: set[_Key] = set()
        """Those that are in the total already."""
        self._names: dict[_Key, set[str]] = {}
        """Files that were given themselves and are in the total already, by their directory."""

    def measure(self, path: Path, top: str, st: os.stat_result) -> FolderUsage:
        """Measure what `path` stands for: `top`, whose stat is `st`."""
        tally = _Tally(self._volume)
        if stat.S_ISDIR(st.st_mode):
            self._walk(tally, top, st)
        else:
            tally.add(st)
            if self.total is not None and self._is_new_name(top):
                self.total.add(st)
        return tally.result(path)

    def _is_new_name(self, path: str) -> bool:
        parent, name = os.path.split(path)
        st = os.stat(parent)
        key = (st.st_dev, st.st_ino)
        names = self._names.setdefault(key, set())
        if key in self._directories or name in names:
            return False
        names.add(name)
        return True

    def _walk(self, tally: _Tally, top: str, st: os.stat_result) -> None:
        # A directory may show in several places (bind mounts): it is entered once.
        entered = {(st.st_dev, st.st_ino)}
        waiting = [(top, st)]
        while waiting:
            path, st = waiting.pop()
            key = (st.st_dev, st.st_ino)
            tallies = [tally]
            if self.total is not None and key not in self._directories:
                tallies.append(self.total)
                self._directories.add(key)
            for each in tallies:
                each.add(st)
            for below, found in self._list(path, key, tallies):
                if (found.st_dev, found.st_ino) not in entered:
                    entered.add((found.st_dev, found.st_ino))
                    waiting.append((below, found))

    def _list(
        self, path: str, key: _Key, tallies: list[_Tally]
    ) -> list[tuple[str, os.stat_result]]:
        """Count the entries of a directory; return its subdirectories, which are not counted."""
        below = []
        counted = self._names.get(key, ())
        met = 0
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    met += 1
                    st = self._stat(entry, tallies)
                    if st is None:
                        continue
                    if stat.S_ISDIR(st.st_mode):
                        below.append((entry.path, st))
                        continue
                    tallies[0].add(st)
                    if len(tallies) > 1 and entry.name not in counted:
                        tallies[1].add(st)
        except OSError as error:
            _excuse(path, error, tallies)
        self._job.advance(met)
        return below

    def _stat(self, entry: os.DirEntry[str], tallies: list[_Tally]) -> os.stat_result | None:
        try:
            if _STAT_HAS_NO_LINKS:
                return os.lstat(entry.path)
            return entry.stat(follow_symlinks=False)
        except OSError as error:
            _excuse(entry.path, error, tallies)
        return None


def _excuse(path: str, error: OSError, tallies: list[_Tally]) -> None:
    """Note why something was not counted: it vanished during the walk, or it is unreadable."""
    has_vanished = isinstance(error, FileNotFoundError | NotADirectoryError)
    for tally in tallies:
        if has_vanished:
            tally.is_partial = True
        else:
            tally.add_unreadable(path, error)
