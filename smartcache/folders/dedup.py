"""Plan to replace duplicates by links: which file survives, which become links, what that frees.

A plan is made from a scan and from a look at each file's owner, mode and attributes; nothing is
changed before `execute` (`replacing.py`). Per filesystem there is one kind of link: hard links, or
reflinks where they work and files must stay writable or are written by root, whom read-only files
do not stop.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from smartcache.errors import FileSkippedError
from smartcache.folders.apps import KEYS_ON_MTIME
from smartcache.folders.grouping import gain
from smartcache.folders.kinds import Choice, Decided, Kind
from smartcache.folders.records import Copy, Group, ModelFolder, Scan
from smartcache.progress import Progress, silent
from smartcache.store.attributes import read_attributes
from smartcache.store.hold import (
    Allowance,
    refuse_unshareable,
    refuse_unsuitable,
    refuse_visible_change,
)
from smartcache.store.schema import signed
from smartcache.store.statkey import StatKey
from smartcache.store.store import Store

Allow = frozenset[Allowance]
_PAIR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """A file that is left as it is, and why: a short phrase."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """What is to be done with the copies of one group on one filesystem."""

    group: Group
    filesystem: str
    kind: Kind
    survivor: Path
    """The file whose inode all others will share (or whose blocks)."""
    spares: tuple[Path, ...]
    """Files that may survive in its place if it cannot: in this order."""
    is_blob: bool
    """The survivor is in the store already."""
    replaced: tuple[Path, ...]
    skipped: tuple[Skip, ...]
    freed_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DedupResult:
    """What was done."""

    replaced: int
    """Names that are links now."""
    freed: int
    """Disk blocks of inodes whose last name went, as they were when it went."""
    freed_at_most: bool
    """Reflinks are among them, of whose blocks the filesystem may have kept some."""
    skipped: tuple[Skip, ...]
    batches: tuple[str, ...]
    """The entries of the history, for `undo`."""
    is_complete: bool
    """Everything planned was done or was found done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DedupPlan:
    """What would be done; `execute` does it. Groups with the most to free come first."""

    groups: tuple[GroupPlan, ...]
    freed_size: int
    files: int
    """Names that become links."""
    kinds: Mapping[Path, str]
    """For each mount: which kind of link, and why, in words."""
    new_volumes: tuple[Path, ...]
    """Directories that will be made, because links cannot leave their filesystem."""
    read_only: int
    """Files that lose their write permission."""
    skipped: tuple[Skip, ...]
    warnings: tuple[str, ...]
    _execute: Callable[[DedupPlan, Progress], DedupResult] = field(repr=False, compare=False)

    def execute(self, progress: Progress = silent) -> DedupResult:
        """Replace the files, each in one step that is journaled before and can be undone."""
        return self._execute(self, progress)


def plan_dedup(
    store: Store, found: Scan, *, keep_writable: bool = False, allow: Allow = frozenset()
) -> DedupPlan:
    """Plan to replace the duplicates of a scan; a quick one proves nothing and gives no plan."""
    planning = _Planning(store, keep_writable=keep_writable, allow=allow)
    if found.is_quick:
        planning.warnings.append("A quick scan proves nothing: scan in full before 'dedup'.")
    else:
        for group in found.largest():
            planning.add(group)
    planning.warn_of_times()
    planned = sorted(planning.groups, key=lambda plan: plan.freed_size, reverse=True)
    if found.elsewhere:
        planning.warnings.append(_ELSEWHERE)
    folders = [each.folder for each in found.folders if each.folder is not None]
    return DedupPlan(
        groups=tuple(planned),
        freed_size=sum(plan.freed_size for plan in planned),
        files=sum(len(plan.replaced) for plan in planned),
        kinds=planning.kinds,
        new_volumes=tuple(planning.new_volumes.values()),
        read_only=planning.read_only,
        skipped=tuple(planning.skipped),
        warnings=tuple(planning.warnings),
        _execute=lambda plan, progress: _execute(store, plan, folders, allow, progress),
    )


_ELSEWHERE = (
    "Some files have equal ones on other filesystems, which links cannot reach:"
    " 'smartcache report' lists them."
)


def _execute(
    store: Store, plan: DedupPlan, folders: list[ModelFolder], allow: Allow, progress: Progress
) -> DedupResult:
    from smartcache.folders.replacing import Replacing  # which imports this module

    return Replacing(store, plan, allow).run(folders, progress)


_Held = tuple[Copy, os.stat_result]


class _Planning:
    """A plan in the making: what was decided once for each filesystem and directory."""

    def __init__(self, store: Store, *, keep_writable: bool, allow: Allow) -> None:
        self.groups: list[GroupPlan] = []
        self.kinds: dict[Path, str] = {}
        self.new_volumes: dict[str, Path] = {}
        self.skipped: list[Skip] = []
        self.warnings: list[str] = []
        self.read_only = 0
        self._allow = allow
        self._retimed = 0
        self._programs: set[str] = set()
        self._choice = Choice(store, keep_writable=keep_writable)
        self._is_writable: dict[Path, bool] = {}

    def add(self, group: Group) -> None:
        """Plan one group: each filesystem by itself."""
        by_filesystem: dict[str, list[Copy]] = {}
        for copy in group.copies:
            by_filesystem.setdefault(copy.filesystem, []).append(copy)
        for filesystem, copies in by_filesystem.items():
            if len(copies) >= _PAIR:
                self._add(group, filesystem, copies)

    def _add(self, group: Group, filesystem: str, copies: list[Copy]) -> None:
        skips: list[Skip] = []
        writable = [copy for copy in copies if not self._choice.mount(copy.path).is_read_only]
        fixed = [copy for copy in copies if copy not in writable] if writable else copies[1:]
        skips += [_skip(copy, "read-only filesystem") for copy in fixed]
        decided = self._choice.of(filesystem, writable[0].path) if len(writable) >= _PAIR else None
        if decided is not None and decided.kind is None:
            skips += [_skip(copy, decided.words) for copy in writable[1:]]
        elif decided is not None and decided.kind is not None:
            near = self._near(writable, decided, skips)
            held = self._suitable(near, decided.kind, skips)
            chosen = self._chosen(held, decided.kind, skips) if held else []
            self._plan(group, filesystem, decided, chosen, tuple(skips))
        self.skipped += skips

    def _near(self, copies: list[Copy], decided: Decided, skips: list[Skip]) -> list[Copy]:
        """Return the copies on the mount of the volume: hard links do not cross mounts."""
        near = [
            copy
            for copy in copies
            if decided.kind == "reflink" or copy.is_only_in_store
            or self._choice.mount(copy.path).point == decided.mount
        ]  # fmt: skip
        skips += [
            _skip(copy, "on another mount of its disk") for copy in copies if copy not in near
        ]
        return near

    def _plan(
        self,
        group: Group,
        filesystem: str,
        decided: Decided,
        chosen: list[_Held],
        skips: tuple[Skip, ...],
    ) -> None:
        """Add what is to be done, unless nothing would be freed: holes have no blocks."""
        kind = decided.kind or "hardlink"
        others = chosen[1:]
        is_shared = kind == "reflink"
        freed = sum(copy.allocated if is_shared else gain(copy) for copy, _ in others)
        if not freed:
            return
        survivor = chosen[0][0]
        self.kinds[decided.mount] = decided.words
        if decided.new_volume is not None:
            self.new_volumes[filesystem] = decided.new_volume
        if is_shared:
            replaced = tuple(copy.path for copy, _ in others)
        else:
            replaced = tuple(name.path for copy, _ in others for name in copy.names)
            self._count_times(chosen)
            self.read_only += sum(len(c.names) for c, st in chosen if st.st_mode & 0o222)
        self.groups.append(
            GroupPlan(
                group=group, filesystem=filesystem, kind=kind, survivor=survivor.path,
                spares=tuple(copy.path for copy, _ in others), is_blob=survivor.is_blob,
                replaced=replaced, skipped=skips, freed_size=freed,
            )
        )  # fmt: skip

    def warn_of_times(self) -> None:
        """Say how many files get another time though their program keys its cache on it."""
        if self._retimed:
            names = " and ".join(sorted(self._programs))
            files = "1 file" if self._retimed == 1 else f"{self._retimed} files"
            self.warnings.append(
                f"{files} of {names} will show the time of the file that is shared, and be hashed"
                " by the program once more."
            )

    def _count_times(self, chosen: list[_Held]) -> None:
        survivor = chosen[0][0]
        for copy, _ in chosen[1:]:
            programs = {name.folder.program for name in copy.names} & KEYS_ON_MTIME
            if programs and copy.mtime_ns != survivor.mtime_ns:
                self._retimed += 1
                self._programs |= programs

    def _suitable(self, copies: list[Copy], kind: Kind, skips: list[Skip]) -> list[_Held]:
        """Return the copies that may take part, with their stats; say why the others may not."""
        held = []
        for copy in copies:
            try:
                st = os.lstat(copy.path)
                if not copy.is_linkable and kind == "hardlink":
                    reason = "programs edit such files in place"
                elif (signed(st.st_ino), StatKey.of(st).mtime_ns) != (copy.inode, copy.mtime_ns):
                    reason = "changed since it was scanned"
                elif kind == "reflink":
                    refuse_unshareable(copy.path, st)
                    reason = ""
                elif not copy.is_blob:
                    refuse_unsuitable(copy.path, st)
                    reason = self._obstacle(copy)
                else:
                    reason = ""
            except FileSkippedError as error:
                reason = str(getattr(error, "reason", error))
            except OSError as error:
                reason = error.strerror or str(error)
            if reason:
                skips.append(_skip(copy, reason))
            else:
                held.append((copy, st))
        return held

    def _obstacle(self, copy: Copy) -> str:
        for name in copy.names:
            folder = name.path.parent
            if folder not in self._is_writable:
                self._is_writable[folder] = os.access(folder, os.W_OK)
            if not self._is_writable[folder]:
                return "its folder cannot be written"
        if "xattr" not in self._allow and read_attributes(copy.path):
            return "has extended attributes"
        return ""

    def _chosen(self, held: list[_Held], kind: Kind, skips: list[Skip]) -> list[_Held]:
        """Return the survivor and the copies that can share with it."""
        if kind == "reflink":
            return [held[0], *(each for each in held[1:] if each[0].shares_with is None)]
        alike = [held] if held[0][0].is_blob else _alike(held, self._allow)
        chosen = max(alike, key=lambda each: sum(gain(copy) for copy, _ in each[1:]))
        survivor = chosen[0]
        result = [survivor]
        for copy, st in held:
            if copy is survivor[0] or copy.shares_with is not None:
                continue
            try:
                refuse_visible_change(copy.path, st, survivor[1], self._allow)
            except FileSkippedError as error:
                skips.append(_skip(copy, str(getattr(error, "reason", error))))
                continue
            if copy.outside_names:
                skips.append(_skip(copy, "has other names elsewhere, so nothing would be freed"))
            else:
                result.append((copy, st))
        return result


def _skip(copy: Copy, reason: str) -> Skip:
    return Skip(path=copy.path, reason=reason)


def _alike(held: list[_Held], allow: Allow) -> list[list[_Held]]:
    """Return the copies that a link would not change visibly among each other, in order."""
    found: dict[tuple[object, ...], list[_Held]] = {}
    for copy, st in held:
        group = 0 if "group" in allow else st.st_gid
        mode = 0 if "mode" in allow else stat.S_IMODE(st.st_mode) & 0o555
        found.setdefault((group, mode), []).append((copy, st))
    return list(found.values())
