"""Groups of equal files, from the rows the index gives; and sums over them.

A *copy* is one inode with all the names the scan met; a *group* is the copies of one content.
`Tally` adds up all groups without building most of them, which is the larger part of a second scan:
plain groups (every copy has one name, all on one filesystem, none in the store) are added up from
their rows, the others as the checks of `dedup` decide.

Files may become links if programs write them once and replace them as a whole. Models, archives,
images and other media are never edited in place. A database, a log or a text may be, and then every
file linked to it would change with it, or refuse the change because it is read-only. So these are
left alone unless the user asks for every kind of file.
"""

from __future__ import annotations

import heapq
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Final

from smartcache.folders.checks import (
    PAIR,
    SPECIAL,
    Checks,
    Copy,
    Name,
    Option,
    Skip,
    Verdict,
    survival,
)
from smartcache.folders.programs import KEYS_ON_MTIME, ModelFolder
from smartcache.store.catalog import ATTRIBUTES, UNSIGNED, Member, MemberRow, access
from smartcache.store.records import LINKED_SUFFIXES
from smartcache.store.userfile import OPEN_FLAGS
from smartcache.system.kernel import extents, open_quietly

KEPT = 100
"""So many of the best groups are remembered by their rows."""
SIZE: Final = 0
DIGEST: Final = 1
SAMPLE: Final = 2
"""Fields of rows that are read before a row gets names, which takes time."""
_MORE_SUFFIXES: Final = (
    b"7z aac avi avif bmp bz2 caffemodel deb exr flac gif gz heic jar jpeg jpg jxl lora lz4 m4a m4v"
    b" mar mkv mlpackage mov mp3 mp4 mpg ogg opus ot params pdf pdparams pickle plan png q4_0 rar"
    b" rpm rten so tfrecord tfrecords tgz tif tiff trt ttf wav webm webp weights whl wmv xz zst"
)
_WRITE_ONCE: Final = frozenset(
    (*_MORE_SUFFIXES.split(), *(os.fsencode(suffix[1:]) for suffix in LINKED_SUFFIXES))
)
_NAMED_BY_HASH: Final = re.compile(rb"(?:sha256[-:])?[0-9a-f]{64}")
"""Blobs of Hugging Face caches and of Ollama."""


def is_write_once(name: bytes) -> bool:
    """Say whether a file is, by its name, one that no program edits in place."""
    is_known = name.rpartition(b".")[2].lower() in _WRITE_ONCE
    return is_known or _NAMED_BY_HASH.fullmatch(name) is not None


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
    """Makes groups from rows: knows the folders by number, and the checks."""

    folders: Mapping[int, ModelFolder]
    pools: Mapping[int, ModelFolder]
    """The folders of blobs."""
    filesystem: Callable[[int], str]
    """Returns the name of a filesystem, given by its number."""
    checks: Checks
    any_file: bool = False
    """Every kind of file may be linked."""
    is_proven: bool = True
    """Members of a group have equal digests, not just equal samples."""

    def allowing(self, options: frozenset[Option]) -> Grouping:
        """Return one that leaves less alone."""
        any_file = self.any_file or "any-file" in options
        return replace(self, any_file=any_file, checks=self.checks.allowing(options))

    def contents(self, rows: Iterable[MemberRow]) -> Iterator[list[Member]]:
        """Yield the members of each content that several names have, of rows in order of size."""
        column = DIGEST if self.is_proven else SAMPLE
        for _, same_size in groupby(rows, key=itemgetter(SIZE)):
            found: dict[object, list[MemberRow]] = {}
            for row in same_size:
                found.setdefault(row[column], []).append(row)
            found.pop(None, None)
            yield from (list(map(Member._make, same)) for same in found.values() if same[1:])

    def groups(self, rows: Iterable[MemberRow]) -> Iterator[Group]:
        """Yield the groups of two or more copies."""
        return filter(None, map(self.group, self.contents(rows)))

    def group(self, members: list[Member]) -> Group | None:
        """Return the group that members of one content make; None if they are one copy."""
        by_inode: dict[tuple[int, int], list[Member]] = {}
        for member in members:
            by_inode.setdefault((member.filesystem, member.inode), []).append(member)
        if len(by_inode) < PAIR or all(member.folder in self.pools for member in members):
            return None
        copies = sorted(map(self._copy, by_inode.values()), key=lambda copy: copy.survival)
        copies = self._marked(copies)
        firsts = {copy.filesystem: copy for copy in reversed(copies)}
        return Group(
            digest=(members[0].digest or b"").hex() if self.is_proven else "",
            size=members[0].size,
            copies=tuple(copies),
            elsewhere=sum(copy.allocated for copy in firsts.values() if copy is not copies[0]),
            verdicts=self.checks.verdicts(copies),
        )

    def is_linkable(self, name: bytes) -> bool:
        """Say whether a file may become a link, by its name."""
        return self.any_file or is_write_once(name)

    def _copy(self, same: list[Member]) -> Copy:
        outside = [member for member in same if member.folder not in self.pools]
        places = sorted((os.path.join(m.directory, m.name), m.folder) for m in outside or same)
        first, folders = same[0], self.folders if outside else self.pools
        mode, gid = first.mode, first.gid
        if mode is None:  # not seen by a walk yet: a blob
            mode, gid = access(os.lstat(places[0][0]))
        return Copy(
            filesystem=self.filesystem(first.filesystem), inode=first.inode & UNSIGNED,
            names=tuple(
                Name(path=Path(os.fsdecode(path)), folder=folders[folder])
                for path, folder in places
            ),
            links=first.links, allocated=first.allocated, mtime_ns=first.mtime_ns, mode=mode,
            gid=gid, has_attributes=bool(first.traits & ATTRIBUTES),
            is_blob=len(outside) < len(same), is_only_in_store=not outside,
            is_linkable=all(self.is_linkable(member.name) for member in outside),
        )  # fmt: skip

    def _marked(self, copies: list[Copy]) -> list[Copy]:
        """Return the copies with `shares_with` set where an earlier one has the same blocks.

        No stat shows that: only filesystems that have reflinks are asked.
        """
        first: dict[tuple[object, ...], int] = {}
        for number, copy in enumerate(copies):
            if self.checks.may_share(os.path.dirname(copy.path)) and (place := _place(copy.path)):
                owner = first.setdefault((copy.filesystem, *place), copy.inode)
                if owner != copy.inode:
                    copies[number] = replace(copy, shares_with=owner)
        return copies


def _place(path: Path) -> list[tuple[int, int, int]]:
    """Return where a file lies on the disk; nothing if that cannot be known or compared."""
    try:
        descriptor = open_quietly(path, OPEN_FLAGS)
        try:
            found = extents(descriptor) or ()
        finally:
            os.close(descriptor)
    except OSError:
        return []
    known = [(e.logical, e.physical, e.length) for e in found if e.physical is not None]
    return known if len(known) == len(found) else []


class Tally:
    """Sums over all groups, as the checks of `dedup` decide about them.

    The groups with the most to free are kept.
    """

    def __init__(self, grouping: Grouping) -> None:
        self.grouping = grouping
        self.groups = 0
        """Those with something to free."""
        self.freeable = 0
        self.elsewhere = 0
        self.by_folder = Counter[int]()
        """What `dedup` would free, by the number of the folder."""
        self._numbers = {folder.path: number for number, folder in grouping.folders.items()}
        self._keyed = {
            number for number, folder in grouping.folders.items() if folder.program in KEYS_ON_MTIME
        }
        self.count = 0
        """Groups that matter at all; `best` knows every one up to KEPT."""
        self._left: dict[tuple[str, tuple[Option, ...]], list[int]] = {}
        self._allowing: dict[frozenset[Option], Grouping] = {}
        self._best: list[tuple[int, int, int, list[Member]]] = []
        self._plain: set[tuple[int, bytes, int]] = set()

    def add(self, rows: Iterable[MemberRow]) -> None:
        """Add up the contents of some rows."""
        for members in self.grouping.contents(rows):
            freeable, elsewhere, left = self._plainly(members) or self._carefully(members)
            if freeable or elsewhere or left:
                self.groups += freeable > 0
                self.freeable += freeable
                self.elsewhere += elsewhere
                self.count += 1
                keep = heapq.heappush if self.count <= KEPT else heapq.heappushpop
                keep(self._best, (freeable, elsewhere, -self.count, members))

    def best(self, count: int) -> Iterator[Group]:
        """Yield the groups with the most to free, at most KEPT."""
        kept = sorted(self._best, reverse=True)[:count]
        return filter(None, (self.grouping.group(members) for *_, members in kept))

    def left(self) -> tuple[Left, ...]:
        """Return what is left alone, the most bytes first."""
        found = [
            Left(reason=reason, options=options, files=files, size=size)
            for (reason, options), (files, size) in self._left.items()
        ]
        return tuple(sorted(found, key=lambda each: (-each.size, each.reason)))

    def _plainly(self, members: list[Member]) -> tuple[int, int, int] | None:
        """Add up a plain group, of which all but the survivor would go; None if it is not one.

        Its files have one name each, are ours and alike, and lie where links can be made.
        """
        kinds = {(m.filesystem, m.links, m.mode, m.gid, m.traits & ATTRIBUTES) for m in members}
        _, links, mode, _, has_attributes = kinds.pop()
        # -1, another user's, has all bits set
        if kinds or links != 1 or has_attributes or mode is None or mode & SPECIAL:
            return None
        are_linkable = {self.grouping.is_linkable(m.name) for m in members}
        places = {(m.filesystem, m.directory, m.folder) for m in members}
        are_plain = places <= self._plain or all(map(self._is_plain, places))
        if len(are_linkable) > 1 or not are_plain:
            return None
        if len({m.inode for m in members}) < len(members):  # bound to a second name
            return None
        survivor = min(members, key=self._survival)
        others = [m for m in members if m is not survivor]
        size = sum(m.allocated for m in others)
        if not are_linkable.pop():
            self._note_left("", ("any-file",), len(members), size)
            return 0, 0, size
        for m in others:
            self.by_folder[m.folder] += m.allocated
        return size, 0, 0

    def _is_plain(self, place: tuple[int, bytes, int]) -> bool:
        """Say whether nothing speaks against links in a directory, given with its filesystem."""
        filesystem, directory, folder = place
        name, where = self.grouping.filesystem(filesystem), os.fsdecode(directory)
        is_outside = folder in self.grouping.folders
        if is_outside and self.grouping.checks.is_ordinary(name, where):
            self._plain.add(place)
        return place in self._plain

    def _survival(self, member: Member) -> tuple[object, ...]:
        path = member.directory + b"/" + member.name
        return survival(member.mtime_ns, path, is_keyed=member.folder in self._keyed)

    def _carefully(self, members: list[Member]) -> tuple[int, int, int]:
        """Add up a group as it would be built; return what to free, elsewhere and left alone."""
        group = self.grouping.group(members)
        if group is None:
            return 0, 0, 0
        for verdict in group.verdicts:
            for copy in verdict.replaced:
                size = copy.allocated if verdict.kind == "reflink" else copy.gain
                self.by_folder[self._numbers.get(copy.names[0].folder.path, 0)] += size
        return group.freeable, group.elsewhere, self._count_left(group, members)

    def _count_left(self, group: Group, members: list[Member]) -> int:
        """Note what is left alone of a group, and which options would bring how much more."""
        options: frozenset[Option] = frozenset()
        final = group
        # What one option includes may need another.
        while more := frozenset(skip.option for skip in final.skipped if skip.option) - options:
            options |= more
            if options not in self._allowing:
                self._allowing[options] = self.grouping.allowing(options)
            final = self._allowing[options].group(members) or group
        gain = final.freeable - group.freeable
        files = sum(skip.option is not None for skip in group.skipped)
        self._note_left("", tuple(sorted(options)), files, gain)
        for skip in final.skipped:
            self._note_left(skip.reason, (), 1, skip.size)
        return gain + sum(skip.size for skip in final.skipped)

    def _note_left(self, reason: str, options: tuple[Option, ...], files: int, size: int) -> None:
        if size:
            noted = self._left.setdefault((reason, options), [0, 0])
            noted[0] += files
            noted[1] += size
