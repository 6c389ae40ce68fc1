"""Groups of equal files, from the rows the index gives in their order; and sums over them.

A *copy* is one inode with all the names the scan met; a *group* is the copies of one content.
`Tally` adds up all groups without building most of them, which is the larger part of a second scan:
plain groups (every copy has one name, on one filesystem, in no store) are added up from their rows.

Files may become links if programs write them once and replace them as a whole. Models, archives,
images and other media are never edited in place. A database, a log or a text may be, and then every
file linked to it would change with it, or refuse the change because it is read-only. So these are
left alone unless the user asks for every kind of file.
"""

from __future__ import annotations

import heapq
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Final

from smartcache.folders.checks import PAIR, Checks, Copy, Name, Option, Skip, Verdict, survival
from smartcache.folders.programs import KEYS_ON_MTIME, ModelFolder
from smartcache.store.catalog import Member, MemberRow
from smartcache.store.changes.userfile import OPEN_FLAGS
from smartcache.store.records import LINKED_SUFFIXES
from smartcache.system.kernel import extents, open_quietly

KEPT = 100
"""So many of the best groups are remembered by their rows."""
# The fields of a row.
_SIZE: Final = 0
_DIGEST: Final = 1
_FILESYSTEM: Final = 2
_INODE: Final = 3
_PATH: Final = 4
_FOLDER: Final = 5
_LINKS: Final = 6
_ALLOCATED: Final = 7
_MTIME: Final = 8
_SAMPLE: Final = 9
_MORE_SUFFIXES = (
    ".7z", ".aac", ".avi", ".avif", ".bmp", ".bz2", ".caffemodel", ".deb", ".exr", ".flac",
    ".gif", ".gz", ".heic", ".jar", ".jpeg", ".jpg", ".jxl", ".lora", ".lz4", ".m4a", ".m4v",
    ".mar", ".mkv", ".mlpackage", ".mov", ".mp3", ".mp4", ".mpg", ".ogg", ".opus", ".ot",
    ".params", ".pdf", ".pdparams", ".pickle", ".plan", ".png", ".q4_0", ".rar", ".rpm",
    ".rten", ".so", ".tfrecord", ".tfrecords", ".tgz", ".tif", ".tiff", ".trt", ".ttf", ".wav",
    ".webm", ".webp", ".weights", ".whl", ".wmv", ".xz", ".zst",
)  # fmt: skip
_WRITE_ONCE: Final = frozenset(
    os.fsencode(suffix.removeprefix(".")) for suffix in (*LINKED_SUFFIXES, *_MORE_SUFFIXES)
)
_NAMED_BY_HASH: Final = re.compile(rb"(?:sha256[-:])?[0-9a-f]{64}")
"""Blobs of Hugging Face caches and of Ollama."""


def is_write_once(path: bytes) -> bool:
    """Say whether a file is, by its name, one that no program edits in place."""
    if path.rpartition(b".")[2].lower() in _WRITE_ONCE:
        return True
    return _NAMED_BY_HASH.fullmatch(os.path.basename(path)) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Copies of one content. `digest` is empty when it is likely, not proven (a quick scan)."""

    digest: str
    size: int
    copies: tuple[Copy, ...]
    """In the order in which they would survive; all filesystems."""
    elsewhere: int
    """Bytes of copies that cannot be linked because they lie on another filesystem than the
    first."""
    verdicts: tuple[Verdict, ...]
    """One for each filesystem with several copies."""

    @property
    def freeable(self) -> int:
        """Bytes that `dedup` would free."""
        return sum(each.freed for each in self.verdicts)

    @property
    def skipped(self) -> tuple[Skip, ...]:
        """What `dedup` would leave alone."""
        return tuple(skip for each in self.verdicts for skip in each.skipped)


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """Duplicates that `dedup` leaves alone for one reason: how many, and what they take."""

    reason: str
    options: tuple[Option, ...]
    """With these it would free `size` more; none: it never does."""
    files: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """Makes groups from rows: knows the folders by number, the store, and the checks."""

    folders: Mapping[int, ModelFolder]
    store: ModelFolder
    blob_path: Callable[[str], Path]
    is_blob: Callable[[str, int], bool]
    """Says whether an inode of a filesystem is a blob of another volume there."""
    checks: Checks
    modes: Mapping[str, Mapping[int, tuple[int, int] | None]] = field(default_factory=dict)
    """Group and permissions of the inodes that have not the usual ones (`Walked.modes`)."""
    any_file: bool = False
    """Every kind of file may be linked."""
    is_proven: bool = True
    """Members of a group have equal digests, not just equal samples."""

    def allowing(self, options: Iterable[Option]) -> Grouping:
        """Return one that leaves less alone."""
        added = frozenset(options)
        any_file = self.any_file or "any-file" in added
        return replace(self, any_file=any_file, checks=self.checks.allowing(added))

    def groups(self, rows: Iterable[MemberRow]) -> Iterator[Group]:
        """Yield the groups of two or more copies; the rows of a group follow each other."""
        for (_, digest), members in groupby(rows, key=itemgetter(_SIZE, _DIGEST)):
            found = list(members)
            if digest is not None and len(found) >= PAIR:
                group = self.group(found)
                if group is not None:
                    yield group

    def group(self, rows: list[MemberRow]) -> Group | None:
        """Return the group that rows of one size and digest make; None if they are one copy."""
        members = list(map(Member._make, rows))
        by_inode: dict[tuple[str, int], list[Member]] = {}
        for member in members:
            by_inode.setdefault((member.filesystem, member.inode), []).append(member)
        if len(by_inode) < PAIR or all(member.path is None for member in members):
            return None
        copies = sorted(map(self._copy, by_inode.values()), key=lambda copy: copy.survival)
        copies = self._marked(copies)
        firsts = {copy.filesystem: copy for copy in reversed(copies)}
        first = copies[0].filesystem
        return Group(
            digest=(members[0].digest or b"").hex() if self.is_proven else "",
            size=members[0].size,
            copies=tuple(copies),
            elsewhere=sum(copy.allocated for name, copy in firsts.items() if name != first),
            verdicts=self.checks.verdicts(copies),
        )

    def _copy(self, same: list[Member]) -> Copy:
        first = same[0]
        paths = sorted((each.path, each.folder) for each in same if each.path is not None)
        names = tuple(
            Name(path=Path(os.fsdecode(path)), folder=self.folders[folder])
            for path, folder in paths
        )
        is_blob = len(names) < len(same) or self.is_blob(first.filesystem, first.inode)
        if not names:
            digest = (first.digest or b"").hex()
            names = (Name(path=self.blob_path(digest), folder=self.store),)
        return Copy(
            filesystem=first.filesystem, inode=first.inode, names=names, links=first.links,
            allocated=first.allocated, mtime_ns=first.mtime_ns, is_blob=is_blob,
            is_only_in_store=not paths,
            is_linkable=self.any_file or all(is_write_once(path) for path, _ in paths),
        )  # fmt: skip

    def _marked(self, copies: list[Copy]) -> list[Copy]:
        """Return the copies with `shares_with` set where an earlier one has the same blocks.

        No stat shows that: only filesystems that have reflinks are asked.
        """
        first: dict[tuple[object, ...], int] = {}
        result = []
        for copy in copies:
            if self.checks.may_share(copy.filesystem, copy.path):
                place = _place(copy.path)
                owner = first.setdefault((copy.filesystem, *place), copy.inode) if place else None
                if owner not in (None, copy.inode):
                    result.append(replace(copy, shares_with=owner))
                    continue
            result.append(copy)
        return result


def _place(path: Path) -> list[tuple[int, int | None, int]]:
    """Return where a file lies on the disk; nothing if that cannot be known or compared."""
    try:
        descriptor = open_quietly(path, OPEN_FLAGS)
        try:
            found = extents(descriptor) or ()
        finally:
            os.close(descriptor)
    except OSError:
        return []
    is_known = all(each.physical is not None for each in found)
    return [(e.logical, e.physical, e.length) for e in found] if is_known else []


class Tally:
    """Sums over all groups, as the checks of `dedup` decide about them.

    The groups with the most to free are kept. What the rows do not decide, because bytes are not
    known yet, is named by its size.
    """

    def __init__(self, grouping: Grouping, rows: Iterable[MemberRow]) -> None:
        """Add up rows in the order of groups."""
        self.groups = 0
        """Those with something to free."""
        self.freeable = self.elsewhere = 0
        self.by_folder: dict[int, int] = {}
        self.unresolved: set[int] = set()
        """Sizes of files that may be equal but were not compared."""
        self._left: dict[tuple[str, tuple[Option, ...]], tuple[int, int]] = {}
        self._grouping = grouping
        self._allowing: dict[frozenset[Option], Grouping] = {}
        self._numbers = {folder.path: number for number, folder in grouping.folders.items()}
        self._keyed = {
            number for number, folder in grouping.folders.items() if folder.program in KEYS_ON_MTIME
        }
        self._best: list[tuple[int, int, int, list[MemberRow]]] = []
        self._count = 0
        for size, same_size in groupby(rows, key=itemgetter(_SIZE)):
            unknown = _Unknown()
            for digest, same in groupby(same_size, key=itemgetter(_DIGEST)):
                if digest is None:
                    unknown.add(same)
                    continue
                members = list(same)
                unknown.compare(members)
                if len(members) >= PAIR:
                    self._add(members)
            if unknown.is_open:
                self.unresolved.add(size)

    def best(self, count: int) -> Iterator[Group]:
        """Yield the groups with the most to free, at most KEPT."""
        for _, _, _, rows in sorted(self._best, reverse=True)[:count]:
            group = self._grouping.group(rows)
            if group is not None:
                yield group

    @property
    def has_all(self) -> bool:
        """Whether `best` knows every group."""
        return self._count <= KEPT

    def left(self) -> tuple[Left, ...]:
        """Return what is left alone, the most bytes first."""
        found = [
            Left(reason=reason, options=options, files=files, size=size)
            for (reason, options), (files, size) in self._left.items()
        ]
        return tuple(sorted(found, key=lambda each: (-each.size, each.reason)))

    def _add(self, rows: list[MemberRow]) -> None:
        sums = self._plainly(rows)
        freeable, elsewhere, left = self._carefully(rows) if sums is None else (sums, 0, 0)
        if not (freeable or elsewhere or left):
            return
        self.groups += freeable > 0
        self.freeable += freeable
        self.elsewhere += elsewhere
        self._count += 1
        entry = (freeable, elsewhere, -self._count, rows)
        if len(self._best) < KEPT:
            heapq.heappush(self._best, entry)
        elif entry > self._best[0]:
            heapq.heapreplace(self._best, entry)

    def _plainly(self, rows: list[MemberRow]) -> int | None:
        """Add up a plain group; None if it is not one."""
        filesystem, first = rows[0][_FILESYSTEM], rows[0][_PATH]
        grouping, checks = self._grouping, self._grouping.checks
        if first is None or checks.may_share(filesystem, first):
            return None
        inodes = {row[_INODE] for row in rows}
        if len(inodes) < len(rows):
            # Names of one file are no duplicates; of several files, somebody must tell them apart.
            is_one = len(inodes) == 1 and all(row[_FILESYSTEM] == filesystem for row in rows)
            return 0 if is_one else None
        total = 0
        any_file, modes = grouping.any_file, grouping.modes.get(filesystem, {})
        alike = modes.get(rows[0][_INODE], ())
        for row in rows:
            path = row[_PATH]
            if row[_LINKS] != 1 or row[_FILESYSTEM] != filesystem or path is None:
                return None
            is_alike = alike is not None and modes.get(row[_INODE], ()) == alike
            may_link = is_alike and (any_file or is_write_once(path))
            if not (may_link and checks.is_ordinary(filesystem, path)):
                return None
            total += row[_ALLOCATED]
        keyed, by_folder = self._keyed, self.by_folder
        survivor = min(
            rows,
            key=lambda row: survival(
                row[_MTIME], row[_PATH] or b"", is_keyed=row[_FOLDER] in keyed
            ),
        )
        for row in rows:
            if row is not survivor:
                by_folder[row[_FOLDER]] = by_folder.get(row[_FOLDER], 0) + row[_ALLOCATED]
        return total - survivor[_ALLOCATED]

    def _carefully(self, rows: list[MemberRow]) -> tuple[int, int, int]:
        """Add up a group as it would be built; return what to free, elsewhere and left alone."""
        group = self._grouping.group(rows)
        if group is None:
            return 0, 0, 0
        for verdict in group.verdicts:
            for copy in verdict.replaced:
                number = self._numbers.get(copy.names[0].folder.path, 0)
                size = copy.allocated if verdict.kind == "reflink" else copy.gain
                self.by_folder[number] = self.by_folder.get(number, 0) + size
        return group.freeable, group.elsewhere, self._count_left(group, rows)

    def _count_left(self, group: Group, rows: list[MemberRow]) -> int:
        """Note what is left alone of a group, and which options would bring how much more."""
        options: frozenset[Option] = frozenset()
        final: Group | None = group
        while final is not None:
            added = frozenset(skip.option for skip in final.skipped if skip.option) - options
            if not added:
                break
            options |= added
            if options not in self._allowing:
                self._allowing[options] = self._grouping.allowing(options)
            final = self._allowing[options].group(rows)
        if final is None:
            return 0
        more = final.freeable - group.freeable
        if more:
            files = sum(skip.option is not None for skip in group.skipped)
            self._note_left("", tuple(sorted(options)), files, more)
        for skip in final.skipped:
            if skip.size:
                self._note_left(skip.reason, (), 1, skip.size)
        return more + sum(skip.size for skip in final.skipped)

    def _note_left(self, reason: str, options: tuple[Option, ...], files: int, size: int) -> None:
        before = self._left.get((reason, options), (0, 0))
        self._left[reason, options] = (before[0] + files, before[1] + size)


class _Unknown:
    """The files of one size whose digests are not known."""

    __slots__ = ("_has_unsampled", "_inodes", "_samples", "is_open")

    def __init__(self) -> None:
        self.is_open = False
        """Some may be equal to others: they are to be compared."""
        self._inodes: set[tuple[str, int]] = set()
        self._samples: dict[bytes, tuple[str, int]] = {}
        self._has_unsampled = False

    def add(self, rows: Iterable[MemberRow]) -> None:
        """Take the rows without a digest, which come first."""
        for row in rows:
            inode, sample = (row[_FILESYSTEM], row[_INODE]), row[_SAMPLE]
            if inode in self._inodes or self.is_open:
                continue
            self._inodes.add(inode)
            self._has_unsampled |= sample is None
            alike = sample is not None and self._samples.setdefault(sample, inode) != inode
            self.is_open = alike or (self._has_unsampled and len(self._inodes) >= PAIR)

    def compare(self, known: list[MemberRow]) -> None:
        """Say whether one of them may be equal to a file whose digest is known."""
        if self._inodes and not self.is_open:
            samples = self._samples
            self.is_open = self._has_unsampled or any(
                row[_SAMPLE] is None or row[_SAMPLE] in samples for row in known
            )
