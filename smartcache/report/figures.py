"""What a report says, as numbers: computed from one stat walk and what the index remembers.

Nothing is hashed. A file with several names saves the room of all but one; each name bears an equal
part, so that the savings of the programs add up to the savings of all.
"""

from __future__ import annotations

import heapq
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from smartcache.cache import prunable_sizes, usage_of_sets
from smartcache.folders.groups import Group, Left
from smartcache.folders.programs import ModelFolder
from smartcache.folders.scan import Figures, Scan, survey
from smartcache.folders.walk import Problem
from smartcache.progress import Progress, silent
from smartcache.report.naming import Naming
from smartcache.report.roles import roles
from smartcache.report.titles import kind_of
from smartcache.store.records import KnownFile
from smartcache.store.store import Store
from smartcache.system.filesystems import free_bytes, mount_of

if TYPE_CHECKING:
    from smartcache.artifacts import SetInfo

_T = TypeVar("_T", bound=tuple[Any, ...])
MOST_KEPT = 100
"""How many of the most shared files, and of the groups across filesystems, are kept."""


@dataclass(slots=True, kw_only=True)
class Sums:
    """The files of one program, kind or repo, in bytes."""

    label: str
    files: int = 0
    """Names of files."""
    logical: int = 0
    """What the names add up to."""
    physical: int = 0
    """Disk blocks, each file once."""
    saved: int = 0
    """Room that further names of a file do not take; in equal parts for each of its names."""
    freeable: int = 0
    """Duplicates that links would give back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFile:
    """One file on disk with several names in the folders."""

    label: str
    size: int
    saved: int
    paths: tuple[Path, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Across:
    """A content that lies on several filesystems, where no link reaches."""

    label: str
    size: int
    elsewhere: int
    paths: tuple[Path, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """A mounted filesystem: the room left on it, and what `prune` would add to that."""

    path: Path
    """Where it is mounted."""
    free: int
    prunable: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything a report says; what matters most comes first in every list."""

    at: datetime
    folders: tuple[ModelFolder, ...]
    total: Sums
    programs: tuple[Sums, ...]
    kinds: tuple[Sums, ...]
    repos: tuple[Sums, ...]
    most_shared: tuple[SharedFile, ...]
    across: tuple[Across, ...]
    elsewhere: int
    """Bytes of all duplicates across filesystems."""
    min_size: int
    uncompared: int
    """Files from `min_size` that have another of their size and were never compared with it."""
    problems: tuple[Problem, ...]
    warnings: tuple[str, ...] = ()
    damaged: tuple[Problem, ...] = ()
    """Model files that were damaged when a scan last looked at them."""
    left: tuple[Left, ...] = ()
    """Duplicates that `dedup` leaves alone, with the options that would include them."""
    artifact_sets: tuple[tuple[SetInfo, int], ...] = ()
    """Sets of computed tensors, the largest first, and what `prune` would free of each."""
    prunable: int = 0
    """What only smartcache holds and nobody wants: `prune` would free it."""
    disks: tuple[Disk, ...] = ()
    """Where the files are, and where `prune` would free room."""
    figures: tuple[Figures, ...] = ()
    """The sums of each folder, the largest first."""
    groups: tuple[Group, ...] = ()
    """Every group of copies, by size of file; only of a detailed report, as the next."""
    files: tuple[tuple[KnownFile, ...], ...] = ()
    """Every file, given by all its names."""


def make_report(
    store: Store,
    folders: Sequence[ModelFolder],
    *,
    min_size: int,
    is_detailed: bool = False,
    progress: Progress = silent,
) -> Report:
    """Walk the folders again and say what is there; costs a stat or two per file, no hash.

    A detailed report keeps every file and every group; else they only stream by.
    """
    found = survey(store, folders, min_size=min_size, progress=progress)
    now = datetime.now(UTC)
    walked = [each.folder for each in found.folders if each.folder is not None]
    counting = _Counting(walked, min_size)
    files: list[tuple[KnownFile, ...]] = []
    groups: list[Group] = []
    with progress("Counting", found.total.files) as job:
        rows = store.sighted([folder.path for folder in walked])
        for _, names in groupby(rows, key=lambda seen: (seen.filesystem, seen.inode)):
            same = list(names)
            counting.add(same)
            if is_detailed:
                files.append(tuple(same))
            job.advance(len(same))
    for group in found.largest():
        counting.add_group(group)
        if is_detailed:
            groups.append(group)
    sets = sorted(usage_of_sets(store), key=lambda each: (-each[0].on_disk, each[0].full_name))
    prunable = {name: size for name, size in prunable_sizes(store).items() if size}
    roots = {pool.filesystem: pool.root for pool in store.pools()} if prunable else {}
    places = {name: roots[name] for name in prunable} | counting.places
    return replace(
        counting.report(found, now), artifact_sets=tuple(sets), prunable=sum(prunable.values()),
        disks=_disks(places, prunable), figures=found.folders, groups=tuple(groups),
        files=tuple(files), damaged=found.damaged,
    )  # fmt: skip


def _disks(places: Mapping[str, Path], prunable: Mapping[str, int]) -> tuple[Disk, ...]:
    """Return the disks of filesystems, each given by a path on it."""
    found: dict[Path, Disk] = {}
    for name, path in places.items():
        point = mount_of(path).point
        # Several filesystems at one mount point are subvolumes: they have the same room.
        more = found[point].prunable if point in found else 0
        size = more + prunable.get(name, 0)
        found[point] = Disk(path=point, free=free_bytes(path), prunable=size)
    return tuple(found[point] for point in sorted(found))


class _Table:
    """Sums by label."""

    def __init__(self) -> None:
        self._rows: dict[str, Sums] = {}

    def __getitem__(self, label: str) -> Sums:
        if label not in self._rows:
            self._rows[label] = Sums(label=label)
        return self._rows[label]

    def add(self, same: Sequence[KnownFile], labels: Iterable[str]) -> None:
        """Count the names of one file, each under its label; without a label it is left out."""
        saved, count = _saved(same), len(same)
        counted: set[str] = set()
        for number, (name, label) in enumerate(zip(same, labels, strict=True)):
            if not label:
                continue
            row = self[label]
            row.files += 1
            row.logical += name.size
            row.saved += saved // count + (number < saved % count)
            if label not in counted:
                row.physical += name.allocated
                counted.add(label)

    def rows(self) -> tuple[Sums, ...]:
        """Return the rows: the most saved or freeable first, then the largest."""
        rows = sorted(self._rows.values(), key=lambda row: row.label)
        return tuple(
            sorted(rows, key=lambda row: (row.saved + row.freeable, row.physical), reverse=True)
        )


class _Counting:
    """The sums while files stream by: a row per label, two numbers per size."""

    def __init__(self, folders: Sequence[ModelFolder], min_size: int) -> None:
        self._folders = {folder.path: folder for folder in folders}
        self._min_size = min_size
        self._naming = Naming()
        self._total, self._programs, self._kinds, self._repos = (_Table() for _ in range(4))
        self._small_kinds: dict[str, str] = {}
        self._sizes: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])
        self._shared: list[tuple[int, int, tuple[Path, ...], list[KnownFile]]] = []
        self._across: list[tuple[int, str, Group]] = []
        self.places: dict[str, Path] = {}
        """A file on each filesystem that has some."""

    def add(self, same: list[KnownFile]) -> None:
        """Count one file, given by all its names."""
        first = same[0]
        self.places.setdefault(first.filesystem, first.path)
        folders = [self._folders[name.folder] for name in same]
        self._total.add(same, ["total"] * len(same))
        self._programs.add(same, map(_program, folders))
        self._kinds.add(same, [self._kind(first.path, first.size)] * len(same))
        self._repos.add(
            same, [self._naming.repo_of(n.path, f) for n, f in zip(same, folders, strict=True)]
        )
        if len(same) > 1:
            paths = tuple(name.path for name in same)
            _keep(self._shared, (len(same), _saved(same), paths, same))
        if first.size >= self._min_size:
            counts = self._sizes[first.size]
            counts[0] += 1
            counts[1] += not first.is_compared

    def add_group(self, group: Group) -> None:
        """Count what a group of duplicates would give back, and what links cannot reach of it."""
        for copy, role in roles(group):
            if role != "duplicate":
                continue
            name = copy.names[0]
            labels = (
                (self._total, "total"),
                (self._programs, _program(name.folder)),
                (self._kinds, self._kind(name.path, group.size)),
                (self._repos, self._naming.repo_of(name.path, name.folder)),
            )
            for table, label in labels:
                if label:
                    table[label].freeable += copy.allocated
        if group.elsewhere:
            _keep(self._across, (group.elsewhere, group.digest, group))

    def _kind(self, path: Path, size: int) -> str:
        """Return the kind of a file; small ones are not opened for it, their names must do."""
        if size >= self._min_size:
            return kind_of(path)
        suffix = path.suffix.lower()
        if suffix not in self._small_kinds:
            # A name without a file: nothing but the suffix can speak.
            self._small_kinds[suffix] = kind_of(Path(f"{os.devnull}/file{suffix}"))
        return self._small_kinds[suffix]

    def report(self, found: Scan, now: datetime) -> Report:
        """Return all of it."""
        return Report(
            at=now,
            folders=tuple(self._folders.values()),
            total=self._total["total"],
            programs=self._programs.rows(),
            kinds=self._kinds.rows(),
            repos=self._repos.rows(),
            most_shared=tuple(self._shared_files()),
            across=tuple(
                Across(
                    label=str(self._naming.of(group)),
                    size=group.size,
                    elsewhere=elsewhere,
                    paths=tuple(name.path for copy in group.copies for name in copy.names),
                )
                for elsewhere, _, group in sorted(self._across, reverse=True)
            ),
            elsewhere=found.elsewhere,
            min_size=self._min_size,
            uncompared=sum(new for all_, new in self._sizes.values() if all_ > 1),
            left=found.left,
            problems=found.problems,
        )

    def _shared_files(self) -> Iterable[SharedFile]:
        for _, saved, paths, same in sorted(self._shared, key=lambda each: each[:3], reverse=True):
            names = [
                (path, self._folders[name.folder]) for path, name in zip(paths, same, strict=True)
            ]
            yield SharedFile(
                label=str(self._naming.of_names(names)), size=same[0].size, saved=saved, paths=paths
            )


def _program(folder: ModelFolder) -> str:
    """Return what a folder is counted under: its program, or itself."""
    return folder.program or str(folder.path)


def _saved(same: Sequence[KnownFile]) -> int:
    """Return the room that the names of one file beyond the first do not take."""
    return same[0].allocated * (len(same) - 1)


def _keep(heap: list[_T], item: _T) -> None:
    heapq.heappush(heap, item)
    if len(heap) > MOST_KEPT:
        heapq.heappop(heap)
