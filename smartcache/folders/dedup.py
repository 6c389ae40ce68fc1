"""Plan to replace duplicates by links: which file survives, which become links, what that frees.

A plan is made from a scan and from a look at each file's owner, mode and attributes (`checks.py`,
the same that the scan counts with); nothing is changed before `execute` (`replacing.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from smartcache.folders.apps import KEYS_ON_MTIME
from smartcache.folders.checks import Allow, Checks
from smartcache.folders.kinds import Choice, Kind
from smartcache.folders.records import Copy, Group, ModelFolder, Scan, Skip, Verdict
from smartcache.progress import Progress, silent
from smartcache.store.store import Store


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
    changed: int
    """Files that `undo` would give back: those replaced, and those that they share now."""
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
    permissions: Mapping[str, int]
    """How many files get another mode besides, by what that means: "readable by ..."."""
    skipped: tuple[Skip, ...]
    warnings: tuple[str, ...]
    _execute: Callable[[DedupPlan, Progress], DedupResult] = field(repr=False, compare=False)

    def execute(self, progress: Progress = silent) -> DedupResult:
        """Replace the files, each in one step that is journaled before and can be undone."""
        return self._execute(self, progress)


def plan_dedup(
    store: Store,
    found: Scan,
    *,
    keep_writable: bool | None = None,
    allow: Allow = frozenset(),
    digests: Iterable[str] | None = None,
) -> DedupPlan:
    """Plan to replace the duplicates of a scan; a quick one proves nothing and gives no plan.

    Without `keep_writable` the setting of the store holds. `digests` are those of the groups to
    plan for; None: all.
    """
    planning = _Planning(Choice(store, keep_writable=keep_writable))
    wanted = None if digests is None else set(digests)
    if found.is_quick:
        planning.warnings.append("A quick scan proves nothing: scan in full before 'dedup'.")
    else:
        for group in found.largest(judge=Checks(planning.choice, allow)):
            if wanted is None or group.digest in wanted:
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
        permissions=planning.permissions,
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


class _Planning:
    """A plan in the making: what the checks said of each group, added up."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self.groups: list[GroupPlan] = []
        self.kinds: dict[Path, str] = {}
        self.new_volumes: dict[str, Path] = {}
        self.skipped: list[Skip] = []
        self.warnings: list[str] = []
        self.read_only = 0
        self.permissions: Counter[str] = Counter()
        self._retimed = 0
        self._programs: set[str] = set()

    def add(self, group: Group) -> None:
        """Plan one group: each filesystem by itself."""
        for verdict in group.verdicts:
            self.skipped += verdict.skipped
            if verdict.survivor is not None and verdict.kind is not None:
                self._add(group, verdict.survivor, verdict.kind, verdict)

    def _add(self, group: Group, survivor: Copy, kind: Kind, verdict: Verdict) -> None:
        decided = self.choice.of(verdict.filesystem, survivor.path)
        self.kinds[decided.mount] = decided.words
        if decided.new_volume is not None:
            self.new_volumes[verdict.filesystem] = decided.new_volume
        if kind == "reflink":
            replaced = tuple(copy.path for copy in verdict.replaced)
        else:
            replaced = tuple(name.path for copy in verdict.replaced for name in copy.names)
            self._count_times(survivor, verdict.replaced)
        self.read_only += verdict.read_only
        self.permissions.update(verdict.permissions)
        self.groups.append(
            GroupPlan(
                group=group, filesystem=verdict.filesystem, kind=kind, survivor=survivor.path,
                spares=tuple(copy.path for copy in verdict.replaced), is_blob=survivor.is_blob,
                replaced=replaced, skipped=verdict.skipped, freed_size=verdict.freed,
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

    def _count_times(self, survivor: Copy, replaced: Iterable[Copy]) -> None:
        for copy in replaced:
            programs = {name.folder.program for name in copy.names} & KEYS_ON_MTIME
            if programs and copy.mtime_ns != survivor.mtime_ns:
                self._retimed += 1
                self._programs |= programs
