"""Scan model folders: what they take, what they share, and which files are there more than once.

Stats first (`walk`), then sizes that several files have, then as few bytes as possible
(`_Comparing`), then groups from what is known (`groups`). Nothing is changed but the index, and
only files that were hashed in full count as duplicates.

Files are compared size by size, largest first. Of large ones a sample is read (head and tail), and
only files whose samples agree are hashed in full; small ones are hashed at once. All of it is
remembered, so that the next time nothing is read. XXH3 never decides that files are equal.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Final

from smartcache.errors import StoreError
from smartcache.folders.checks import PAIR, Checks
from smartcache.folders.discover import discover_folders, home_directory
from smartcache.folders.groups import DIGEST, KEPT, SAMPLE, SIZE, Group, Grouping, Left, Tally
from smartcache.folders.headers import is_cut
from smartcache.folders.programs import ModelFolder, identify, ignored
from smartcache.folders.walk import Problem, Walked, walk
from smartcache.progress import Job, Progress, silent
from smartcache.store.catalog import (
    ATTRIBUTES,
    DAMAGED,
    UNREAD,
    FolderSums,
    Member,
    MemberRow,
    Scope,
)
from smartcache.store.hashes import Candidate, Read, What, learn
from smartcache.store.store import Store
from smartcache.system.kernel import StatKey

MIN_SIZE: Final = 1 << 20
"""Smaller files are seen, but not compared: programs edit them in place, and they gain little."""
SAMPLE_MIN_SIZE = 1 << 20
"""Opening a file and reading its ends costs as much as hashing 60 KiB."""
_CHUNK_FILES = 32_768
"""Compared together, so that no thread waits for others; some MB of memory."""


def folders_to_scan(
    store: Store, given: Sequence[str | Path] = (), only: Sequence[str] = ()
) -> tuple[list[ModelFolder], list[str]]:
    """Return the folders named, or else those of programs and those remembered; and warnings.

    `only` keeps the folders of some programs. A named folder that does not exist is an error;
    one that the user has ignored is left out.
    """
    warnings: list[str] = []
    if given:
        found = [_named(Path(path)) for path in given]
    else:
        discovery = discover_folders()
        remembered = [
            ModelFolder(path=path, program=program, found_by="remembered", is_given=True)
            for path, program in store.catalog.given_folders()
        ]
        missing = [each for each in remembered if not os.path.isdir(each.path)]
        warnings += [*discovery.warnings, *(f"{each.path} is not there now" for each in missing)]
        found = [*(each for each in remembered if each not in missing), *discovery.folders]
    left_alone = ignored()
    covered = [folder for folder in found if left_alone.covers(folder.path)]
    warnings += [
        f"{folder.path} is ignored; 'smartcache folders ignore --remove' takes that back"
        for folder in (covered if given else ())
    ]
    unique = {each.path: each for each in reversed(found) if each not in covered}
    chosen, wanted = reversed(unique.values()), {name.casefold() for name in only}
    return [each for each in chosen if not only or each.program.casefold() in wanted], warnings


def known_folders(store: Store, *, beside: Sequence[ModelFolder] = ()) -> list[ModelFolder]:
    """Return the folders in which files were seen and that are there now, besides those given."""
    others = {folder.path for folder in beside}
    left_alone = ignored()
    return [
        ModelFolder(path=each.path, program=each.program, found_by="seen", is_given=each.is_given)
        for each in store.folders()
        if each.path not in others and os.path.isdir(each.path)
        if not left_alone.covers(each.path)
    ]


def downloads_folder() -> list[ModelFolder]:
    """Return where browsers save files: looked at for what downloads can reuse, never changed."""
    home = home_directory()
    if home is None or not os.path.isdir(path := home / "Downloads") or ignored().covers(path):
        return []
    return [ModelFolder(path=Path(os.path.realpath(path)), found_by="downloads")]


def _named(path: Path) -> ModelFolder:
    real = Path(os.path.realpath(path))
    if not os.path.isdir(real):
        reason = "is not a folder" if os.path.lexists(path) else "does not exist"
        hint = (
            "Give folders; 'smartcache add' takes single files."
            if os.path.exists(real)
            else "Check the spelling, and that its drive is mounted."
        )
        raise StoreError(f"{path} {reason}", hint=hint, path=path)
    return ModelFolder(path=real, program=identify(real), found_by="named")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Sums over the files of a folder, or over everything (`folder` None: nothing twice)."""

    folder: ModelFolder | None
    files: int = 0
    """Names of files."""
    logical: int = 0
    """The size of each name: what the files seem to take."""
    physical: int = 0
    """Disk blocks, each inode once: what they take."""
    shared: int = 0
    """Of `physical`: inodes that have names outside this folder too."""
    freeable: int = 0
    """Of `physical`: duplicates that links would give back; a group counts for the folders of the
    copies that would be replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """What a scan found. Groups are read from the index when asked for, largest gain first."""

    folders: tuple[Figures, ...]
    total: Figures
    groups: int
    """How many groups have something to free."""
    freeable: int
    """Bytes that `dedup` would free: its own checks say so."""
    elsewhere: int
    """Bytes of duplicates on other filesystems, which links cannot free."""
    left: tuple[Left, ...]
    """Duplicates that are left alone, the most bytes first."""
    min_size: int
    is_quick: bool
    hashed: int
    """Bytes read and hashed by this scan; 0 when all was remembered."""
    read: Read = field(repr=False, compare=False)
    """The files of which they are: `dedup` needs not read these again."""
    busy: tuple[Path, ...]
    """Files left out because somebody writes them."""
    unfinished: int
    """Downloads in progress, which are left out."""
    damaged: tuple[Problem, ...]
    """Model files that are empty, or shorter than their own header says."""
    problems: tuple[Problem, ...]
    _tally: Tally = field(repr=False, compare=False)
    _members: Callable[[], Iterator[MemberRow]] = field(repr=False, compare=False)

    def largest(self, count: int | None = None, *, checks: Checks | None = None) -> Iterator[Group]:
        """Return the `count` groups with the most to free; or go through all, by size of file.

        `checks` decide in place of the scan's own ones what would become of them.
        """
        tally = self._tally
        if count is not None and checks is None and min(count, tally.count) <= KEPT:
            return tally.best(count)
        grouping = tally.grouping if checks is None else replace(tally.grouping, checks=checks)
        groups = grouping.groups(self._members())
        if count is None:
            return groups
        return iter(
            heapq.nlargest(count, groups, key=lambda group: (group.freeable, group.elsewhere))
        )

    @property
    def editable(self) -> int:
        """Bytes of duplicates that are left alone because programs edit such files in place."""
        return sum(each.size for each in self.left if "any-file" in each.options)


def look(
    store: Store,
    folders: Sequence[ModelFolder],
    *,
    min_size: int = MIN_SIZE,
    exclude: Sequence[str] = (),
    progress: Progress = silent,
) -> tuple[Walked, Scope]:
    """Walk folders; return what was met, and the scope of questions about it."""
    with progress("Looking at files") as job:
        walked = walk(store, folders, job=job)
    scope = Scope(
        tuple(walked.folders), max(1, min_size), tuple(filter(None, exclude)), tuple(walked.pools)
    )
    return walked, scope


def scan_folders(
    store: Store,
    folders: Sequence[ModelFolder],
    *,
    min_size: int = MIN_SIZE,
    exclude: Sequence[str] = (),
    any_file: bool = False,
    is_quick: bool = False,
    is_survey: bool = False,
    progress: Progress = silent,
) -> Scan:
    """Scan folders; `exclude` are patterns of paths, names or directories to leave out.

    `any_file` counts duplicates as freeable whatever kind of file they are. Quick: nothing is
    hashed in full, and groups are likely, not proven. A survey goes by what is known already.
    """
    walked, scope = look(store, folders, min_size=min_size, exclude=exclude, progress=progress)
    catalog = store.catalog
    unread = [] if is_survey else list(catalog.marked(scope, UNREAD))
    if unread:
        # Read everything first: never inside a transaction.
        catalog.set_read(
            [(where, inode, is_cut(path, size)) for where, inode, path, size in unread]
        )
    grouping = Grouping(
        folders=walked.folders, pools=walked.pools, filesystem=catalog.filesystem_name,
        checks=Checks(store), any_file=any_file, is_proven=not is_quick,
    )  # fmt: skip
    tally, comparing = Tally(grouping), _Comparing(store, scope, is_quick=is_quick)
    rows = catalog.members(scope, with_racy=is_survey)
    tally.add(rows if is_survey else comparing.known(rows))
    if comparing.size:
        with progress("Comparing", comparing.size, "bytes") as job:
            for compared in comparing.compared(job):
                tally.add(compared)
    sums = catalog.folder_sums(scope)
    figures = [
        _figures(folder, sums.get(number), tally.by_folder[number])
        for number, folder in walked.folders.items()
    ]
    problems = (_problem(path, reason) for path, reason in comparing.problems)
    return Scan(
        folders=tuple(sorted(figures, key=lambda each: -each.physical)),
        total=_figures(None, sums.get(0), tally.freeable),
        groups=tally.groups, freeable=tally.freeable, elsewhere=tally.elsewhere, left=tally.left(),
        min_size=scope.min_size, is_quick=is_quick, hashed=comparing.hashed, read=comparing.read,
        busy=tuple(Path(os.fsdecode(path)) for path in comparing.busy),
        unfinished=walked.unfinished,
        damaged=tuple(
            _problem(path, "is shorter than its header says" if size else "is empty")
            for _, _, path, size in catalog.marked(scope, DAMAGED)
        ),
        problems=(*walked.problems, *problems),
        _tally=tally, _members=partial(catalog.members, scope, with_racy=True),
    )  # fmt: skip


survey = partial(scan_folders, is_survey=True)
"""Walk folders and say what is known of them already: no byte of a file is read."""


def _figures(folder: ModelFolder | None, sums: FolderSums | None, freeable: int) -> Figures:
    files, logical, physical, shared = sums or (0, 0, 0, 0)
    return Figures(
        folder=folder, files=files, logical=logical, physical=physical, shared=shared,
        freeable=freeable,
    )  # fmt: skip


def _problem(path: bytes, reason: str) -> Problem:
    return Problem(path=Path(os.fsdecode(path)), reason=reason)


# which files of equal size have equal bytes


class _Comparing:
    """Learns what is not remembered of files that may be equal; quick: samples only."""

    def __init__(self, store: Store, scope: Scope, *, is_quick: bool) -> None:
        self.size = 0
        """Bytes that may have to be read."""
        self.hashed = 0
        """Bytes read in full, and of which files."""
        self.read = Read()
        self.busy: list[bytes] = []
        self.problems: list[tuple[bytes, str]] = []
        self._store = store
        self._scope = scope
        self._is_quick = is_quick
        self._sizes: list[tuple[int, int, int]] = []
        """Size of file, number of files, bytes that may have to be read."""
        self._members: list[Member] = []
        """Theirs, but no more than one chunk: a million would take half a gigabyte."""

    def known(self, rows: Iterable[MemberRow]) -> Iterator[MemberRow]:
        """Go through rows; those of sizes of which too little is known are left for `compared`."""
        for _, same_size in groupby(rows, key=itemgetter(SIZE)):
            same = list(same_size)
            if not self._takes(same):
                yield from same

    def _takes(self, same: list[MemberRow]) -> bool:
        """Take files of one size, unless all is known that is needed to tell them apart."""
        column = SAMPLE if self._is_quick else DIGEST
        if all([row[column] is not None for row in same]):  # noqa: C419 - twice as fast
            return False
        members = list(map(Member._make, same))
        files, size = _files(members), members[0].size
        if len(files) < PAIR or all(member.folder in self._scope.pools for member in members):
            return False
        unknown = [member for member in files if member[column] is None]
        if size >= SAMPLE_MIN_SIZE and all(member.sample is not None for member in files):
            unknown = _alike(files)
        if unknown:
            self.size += size * len(unknown)
            self._sizes.append((size, len(members), size * len(unknown)))
            if len(self._members) <= _CHUNK_FILES:
                self._members += members
        return bool(unknown)

    def compared(self, job: Job) -> Iterator[list[Member]]:
        """Yield the members of some sizes at a time, with what was learned of them now."""
        for members, size in self._chunks():
            before, found = self.hashed, members
            is_large = SAMPLE_MIN_SIZE if not self._is_quick else 0
            files = _files(found)
            unknown = [m for m in files if m.size >= is_large and m.sample is None]
            found = self._learn(found, unknown, "sample", job)
            if not self._is_quick:
                small = [m for m in files if m.size < is_large and m.digest is None]
                alike = _alike(m for m in _files(found) if m.size >= is_large)
                found = self._learn(found, small + alike, "digest", job)
            # What differs in its sample needed no reading.
            job.advance(max(0, size - (self.hashed - before)))
            yield found

    def _chunks(self) -> Iterator[tuple[list[Member], int]]:
        """Yield members that are compared together, and how many bytes are perhaps to be read."""
        if len(self._members) <= _CHUNK_FILES:
            yield self._members, self.size
            return
        self._members.clear()
        sizes: list[int] = []
        files = unknown = 0
        for size, count, to_read in self._sizes:
            sizes.append(size)
            files += count
            unknown += to_read
            if files >= _CHUNK_FILES or size == self._sizes[-1][0]:
                rows = self._store.catalog.members(self._scope, sizes)
                yield list(map(Member._make, rows)), unknown
                sizes, files, unknown = [], 0, 0

    def _learn(
        self, members: list[Member], files: Iterable[Member], what: What, job: Job
    ) -> list[Member]:
        """Return members with what was learned of some of their files."""
        candidates = [
            Candidate(
                os.path.join(m.directory, m.name), m.filesystem, m.inode,
                StatKey(m.size, m.mtime_ns, m.ctime_ns),
            )
            for m in files
        ]  # fmt: skip
        learned = learn(
            self._store, candidates, what, advance=job.advance, describe=job.describe,
            read=self.read,
        )  # fmt: skip
        self.busy += learned.busy
        self.problems += learned.problems
        self.hashed += learned.size if what == "digest" else 0
        result = []
        for member in members:
            where = (member.filesystem, member.inode)
            if (value := learned.values.get(where)) is None:
                result.append(member)
                continue
            traits = member.traits | ATTRIBUTES * (where in learned.with_attributes)
            digest, sample = (value, member.sample) if what == "digest" else (member.digest, value)
            # A fifth of the time that `_replace` takes.
            result.append(Member(member.size, digest, sample, *member[3:-1], traits))
        return result


def _files(members: Iterable[Member]) -> list[Member]:
    """Return one member of each file."""
    return list({(member.filesystem, member.inode): member for member in members}.values())


def _alike(files: Iterable[Member]) -> list[Member]:
    """Return the files that are to be hashed, because others have their size and sample."""
    found: dict[tuple[int, bytes], list[Member]] = {}
    for member in files:
        if member.sample is not None:  # else it could not be read
            found.setdefault((member.size, member.sample), []).append(member)
    return [
        member
        for same in found.values()
        if len(same) >= PAIR
        for member in same
        if member.digest is None
    ]
