"""Add up groups of equal files without building them: most of what a second scan does.

Rows come in the order of groups. Plain groups (every copy has one name, on one filesystem, in no
store) are added up from their rows; the others are built first. The groups with the most to free
are kept. What the rows do not decide, because bytes are not known yet, is named by its size.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import Final

from smartcache.folders.apps import KEYS_ON_MTIME
from smartcache.folders.eligible import is_write_once
from smartcache.folders.grouping import World, gain, group_from
from smartcache.folders.records import Group, Left, Option
from smartcache.store.duplicates import MemberRow

KEPT = 100
"""So many of the best groups are remembered by their rows."""
_PAIR = 2
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


class Tally:
    """Sums over all groups, as the checks of `dedup` decide about them."""

    def __init__(self, world: World) -> None:
        self.groups = 0
        """Those with something to free."""
        self.freeable = self.elsewhere = 0
        self._left: dict[tuple[str, tuple[Option, ...]], tuple[int, int]] = {}
        self.by_folder: dict[int, int] = {}
        self.unresolved: set[int] = set()
        """Sizes of files that may be equal but were not compared."""
        self._world = world
        self._worlds: dict[frozenset[Option], World] = {}
        self._numbers = {folder.path: number for number, folder in world.folders.items()}
        self._special = {
            number for number, folder in world.folders.items() if folder.program in KEYS_ON_MTIME
        }
        self._best: list[tuple[int, int, int, list[MemberRow]]] = []
        self._count = 0

    def add_all(self, rows: Iterable[MemberRow]) -> None:
        """Add up rows in the order of groups."""
        for size, same_size in groupby(rows, key=itemgetter(_SIZE)):
            unknown = _Unknown()
            for digest, same in groupby(same_size, key=itemgetter(_DIGEST)):
                if digest is None:
                    unknown.add(same)
                    continue
                members = list(same)
                unknown.compare(members)
                if len(members) >= _PAIR:
                    self._add(members)
            if unknown.is_open:
                self.unresolved.add(size)

    def best(self, count: int) -> Iterator[Group]:
        """Yield the groups with the most to free, at most KEPT."""
        for _, _, _, rows in sorted(self._best, reverse=True)[:count]:
            group = group_from(rows, self._world)
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
        filesystem, special, any_file = rows[0][_FILESYSTEM], self._special, self._world.any_file
        if self._world.blocks.may_share(filesystem, rows[0][_PATH] or b"/"):
            return None
        inodes = {row[_INODE] for row in rows}
        if len(inodes) < len(rows):
            # Names of one file are no duplicates; of several files, somebody must tell them apart.
            is_one = len(inodes) == 1 and all(row[_FILESYSTEM] == filesystem for row in rows)
            return 0 if is_one else None
        total = 0
        ordinary, modes = self._world.judge.ordinary, self._world.modes.get(filesystem, {})
        alike = modes.get(rows[0][_INODE], ())
        for row in rows:
            path = row[_PATH]
            if row[_LINKS] != 1 or row[_FILESYSTEM] != filesystem or path is None:
                return None
            if not (any_file or is_write_once(path)):
                return None
            is_alike = alike is not None and modes.get(row[_INODE], ()) == alike
            if not (is_alike and ordinary(filesystem, path)):
                return None
            total += row[_ALLOCATED]
        by_age = itemgetter(_MTIME, _PATH)
        keyed = [row for row in rows if row[_FOLDER] in special] if special else []
        survivor = min(keyed or rows, key=by_age)
        by_folder = self.by_folder
        for row in rows:
            if row is not survivor:
                by_folder[row[_FOLDER]] = by_folder.get(row[_FOLDER], 0) + row[_ALLOCATED]
        return total - survivor[_ALLOCATED]

    def _carefully(self, rows: list[MemberRow]) -> tuple[int, int, int]:
        group = group_from(rows, self._world)
        if group is None:
            return 0, 0, 0
        for verdict in group.verdicts:
            for copy in verdict.replaced:
                number = self._numbers.get(copy.names[0].folder.path, 0)
                size = copy.allocated if verdict.kind == "reflink" else gain(copy)
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
            final = group_from(rows, self._allowing(options))
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

    def _allowing(self, options: frozenset[Option]) -> World:
        if options not in self._worlds:
            self._worlds[options] = replace(
                self._world,
                any_file=self._world.any_file or "any-file" in options,
                judge=self._world.judge.allowing(options),
            )
        return self._worlds[options]


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
            self.is_open = alike or (self._has_unsampled and len(self._inodes) >= _PAIR)

    def compare(self, known: list[MemberRow]) -> None:
        """Say whether one of them may be equal to a file whose digest is known."""
        if self._inodes and not self.is_open:
            samples = self._samples
            self.is_open = self._has_unsampled or any(
                row[_SAMPLE] is None or row[_SAMPLE] in samples for row in known
            )
