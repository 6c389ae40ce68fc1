"""What the store and folders take on the disk, what they share, and what could be freed.

Bytes are counted in two ways that are never mixed: *logical* is what the names promise, as if each
had a copy of its own; *physical* is the disk blocks in use, each inode once. Every blob is looked
at when it is asked: the index only says which there are and who holds them.

A folder is walked once. Of a file with one link nothing is remembered; of one with several, only
how many of its links have not been met yet. So a tree of any size is measured in little memory, and
it is known which bytes would come back if the folder were deleted: those of inodes all of whose
links were met. What blocks reflinks share cannot be seen in a stat: each of them counts in full.
"""

from __future__ import annotations

import os
import stat
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from smartcache.errors import StoreError
from smartcache.progress import Job, Progress, silent
from smartcache.store.index import Index
from smartcache.store.owners import Liveness, is_wanted, liveness, look
from smartcache.store.records import OwnerKind
from smartcache.store.upkeep.prune import REBUILT
from smartcache.store.volume import Volume
from smartcache.system import allocated_bytes, signed

MOST_NAMED = 1000
"""So many unreadable places are named; more are only counted."""
_LOOKUP = 5000
"""Inodes looked up in the index at once: one by one, a million would take a minute."""


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
    tops = {top for _, top, _ in given}
    counted: set[str] = set()
    total = _FolderTally(volume)
    found = []
    with progress("Measuring", None) as job:
        for path, top, st in given:
            tally = _FolderTally(volume)
            # In the total, what lies in another path that is given, or is given twice, is once.
            is_new = top not in counted and not any(str(up) in tops for up in Path(top).parents)
            counted.add(top)
            _walk(top, st, [tally, total] if is_new else [tally], job)
            found.append(tally.result(path))
    return found if len(given) <= 1 else [*found, total.result(None)]


def _resolved(path: Path) -> tuple[str, os.stat_result]:
    try:
        return os.path.realpath(path), os.stat(path)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        hint = "Check the spelling, and that you may enter the folders above it."
        raise StoreError(f"Cannot look at {path}: {reason}", hint=hint, path=path) from error


class _FolderTally:
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
        self.directories += kind == stat.S_IFDIR
        self.symlinks += kind == stat.S_IFLNK
        self.other += kind not in (stat.S_IFDIR, stat.S_IFLNK)

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


def _walk(top: str, st: os.stat_result, tallies: list[_FolderTally], job: Job) -> None:
    """Count everything below a path, without recursion; symlinks are not followed."""
    # A directory may show in several places (bind mounts): it is entered once.
    entered = {(st.st_dev, st.st_ino)}
    waiting = [(top, st)]
    while waiting:
        path, st = waiting.pop()
        for tally in tallies:
            tally.add(st)
        if not stat.S_ISDIR(st.st_mode):
            continue
        met = 0
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    met += 1
                    try:
                        found = entry.stat(follow_symlinks=False)
                    except OSError as error:
                        _excuse(entry.path, error, tallies)
                        continue
                    if not stat.S_ISDIR(found.st_mode):
                        for tally in tallies:
                            tally.add(found)
                    elif (found.st_dev, found.st_ino) not in entered:
                        entered.add((found.st_dev, found.st_ino))
                        waiting.append((entry.path, found))
        except OSError as error:
            _excuse(path, error, tallies)
        job.advance(met)


def _excuse(path: str, error: OSError, tallies: list[_FolderTally]) -> None:
    """Note why something was not counted: it vanished during the walk, or it is unreadable."""
    has_vanished = isinstance(error, FileNotFoundError | NotADirectoryError)
    for tally in tallies:
        if has_vanished:
            tally.is_partial = True
        else:
            tally.add_unreadable(path, error)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerUsage:
    """What an owner holds. Blobs with several owners count for each; `alone` counts the others."""

    kind: OwnerKind
    name: str
    liveness: Liveness
    blobs: int
    size: int
    allocated: int
    alone: int
    """Allocated bytes that no other owner holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUsage:
    """The figures of one store as it is now. All but `blobs` are bytes."""

    root: Path
    blobs: int
    logical: int
    """The size of each blob times its names outside the store, or once where it has none.

    Names are hard links, as the inode counts them: reflinks and copies are not.
    """
    physical: int
    """Disk blocks of the blobs: `shared` and `only_smartcache` together."""
    shared: int
    """Of blobs that have names outside too: removing the blob frees nothing."""
    only_smartcache: int
    """Of blobs whose only name is the store's."""
    reclaimable: int
    """What `prune` would free: held by smartcache alone and wanted by nobody."""
    saved: int
    """Disk blocks that separate copies for the names outside would take more (holes take none)."""
    bad: int
    tmp: int
    sets: int
    index: int
    """The index with its write-ahead log, and the journal."""
    owners: tuple[OwnerUsage, ...]
    is_rebuilt: bool
    """The index was made again from the disk: `prune` refuses until a scan has completed it."""

    @property
    def total(self) -> int:
        """Disk blocks of everything under the root."""
        return self.physical + self.bad + self.tmp + self.sets + self.index


def store_usage(volume: Volume, *, progress: Progress = silent) -> StoreUsage:
    """Return what a store takes: one stat for each blob, and nothing is written."""
    blobs = logical = physical = only = free = saved = 0
    held: defaultdict[int, Counter[str]] = defaultdict(Counter)
    with progress("Looking at blobs", volume.index.totals().blobs) as job:
        for page in look(volume):
            blobs += len(page.stats)
            for st in page.stats.values():
                names, allocated = st.st_nlink - 1, allocated_bytes(st)
                physical += allocated
                logical += st.st_size * max(names, 1)
                saved += allocated * max(names - 1, 0)
            for blob, holders in page.alone:
                only += blob.allocated
                free += 0 if is_wanted(holders) else blob.allocated
            for number, owners in page.owners.items():
                size, allocated = page.stats[number].st_size, allocated_bytes(page.stats[number])
                alone = allocated if len(owners) == 1 else 0
                for owner, _ in owners:
                    held[owner.id].update(blobs=1, size=size, allocated=allocated, alone=alone)
            job.advance(len(page.stats))
    layout = volume.layout
    bad, tmp, sets = folder_usage((layout.bad, layout.tmp, layout.sets))[:3]
    bookkeeping = 0
    for name in ("index.sqlite3", "index.sqlite3-wal", "index.sqlite3-shm", "journal.jsonl"):
        with suppress(FileNotFoundError):
            bookkeeping += allocated_bytes(os.stat(volume.root / name))
    return StoreUsage(
        root=volume.root, blobs=blobs, logical=logical, physical=physical, shared=physical - only,
        only_smartcache=only, reclaimable=free, saved=saved, bad=bad.physical, tmp=tmp.physical,
        sets=sets.physical, index=bookkeeping,
        owners=tuple(
            OwnerUsage(
                kind=owner.kind, name=owner.name, liveness=liveness(owner),
                blobs=sums["blobs"], size=sums["size"], allocated=sums["allocated"],
                alone=sums["alone"],
            )
            for owner in volume.index.owners()
            for sums in (held[owner.id],)
        ),
        is_rebuilt=volume.index.note(REBUILT) is not None,
    )  # fmt: skip
