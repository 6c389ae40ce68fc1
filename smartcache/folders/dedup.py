"""Replace duplicates by links: the plan, and carrying it out.

A plan is made from a scan and from a look at each file's owner, mode and attributes (`checks`, the
same that the scan counts with); nothing is changed before `execute`. Then survivors become blobs in
place, the others links to them. Each file is replaced in one step that is journaled before and can
be undone (files that share blocks stay as they were: nothing to undo). An interruption at any
moment leaves every file whole, and running again goes on. What happened since the scan is noticed
file by file: a plan is a wish, not a promise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from os.path import dirname
from pathlib import Path

from smartcache.errors import DigestMismatchError, FileSkippedError, SmartcacheError, StoreError
from smartcache.folders.checks import Allow, Checks, Copy, Kind, Skip, Verdict
from smartcache.folders.groups import Group
from smartcache.folders.programs import KEYS_ON_MTIME
from smartcache.folders.scan import Scan
from smartcache.progress import Progress, silent
from smartcache.store.journal import Batch
from smartcache.store.link import Linked
from smartcache.store.reflink import Shared
from smartcache.store.store import Store

OTHER_BYTES = "does not have the bytes that were read there before"
"""Why a file is left alone that has changed without a trace, as on a disk that fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """What is to be done with the copies of one group on one filesystem."""

    group: Group
    filesystem: str
    kind: Kind
    survivor: Path
    """The file whose inode all others will share (or whose blocks)."""
    is_only_in_store: bool
    """The survivor is a blob that no folder has."""
    replaced: tuple[Path, ...]
    skipped: tuple[Skip, ...]
    freed_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DedupResult:
    """What was done."""

    replaced: int
    """Names that are links now."""
    changed: int
    """Files that `undo` would give back: those that are links now. Shared blocks need no undo."""
    freed: int
    """Disk blocks of inodes whose last name went, as they were when it went."""
    freed_at_most: bool
    """Reflinks are among them, of whose blocks the filesystem may have kept some."""
    skipped: tuple[Skip, ...]
    batches: tuple[str, ...]
    """The entry of the history, for `undo`; none if nothing was changed."""
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
    new_pools: tuple[Path, ...]
    """Directories that will be made, because links cannot leave their filesystem."""
    read_only: int
    """Files that lose their write permission."""
    permissions: Mapping[str, int]
    """How many files get another mode besides, by what that means: "readable by ..."."""
    skipped: tuple[Skip, ...]
    warnings: tuple[str, ...]
    _store: Store = field(repr=False, compare=False)
    _found: Scan = field(repr=False, compare=False)
    _allow: Allow = field(repr=False, compare=False)

    def execute(self, progress: Progress = silent, *, batch: Batch | None = None) -> DedupResult:
        """Replace the files, each in one step that is journaled before and can be undone.

        With a batch all of it belongs to that one; else it is an entry of the history of its own.
        The folders belong to smartcache's from now on.
        """
        store, skipped = self._store, list[Skip]()
        for folder in (each.folder for each in self._found.folders):
            if folder is not None:
                store.add_folder(folder.path, program=folder.program)
        for root in self.new_pools:
            try:
                store.add_pool(root)
            except (StoreError, OSError) as error:
                # Its files will be left alone, each with its reason.
                skipped.append(Skip(path=root, reason=_reason(error)))
        replaced = freed = 0
        sizes = {path: plan.group.size for plan in self.groups for path in plan.replaced}
        own = store.batch("dedup") if batch is None else nullcontext(batch)
        with progress("Linking", sum(sizes.values()), "bytes") as job, own as changes:
            before = len(changes.changes)
            for each in self._outcomes(changes):
                if each.outcome == "skipped":
                    skipped.append(Skip(path=each.path, reason=_reason(each.error)))
                replaced += each.outcome in ("linked", "shared")
                freed += each.freed
                job.advance(sizes.get(each.path, 0))
            changed = len(changes.changes) - before
        return DedupResult(
            replaced=replaced, changed=changed, freed=freed,
            freed_at_most=any(each.kind == "reflink" for each in self.groups),
            skipped=tuple(skipped), batches=(changes.id,) if changed else (),
            is_complete=not skipped,
        )  # fmt: skip

    def _outcomes(self, batch: Batch) -> Iterator[Shared | Linked]:
        """Share blocks; let survivors become blobs, or the next that can, and the others links."""
        yield from self._store.share_many(
            (plan.survivor, path, plan.group.digest)
            for plan in self.groups
            if plan.kind == "reflink"
            for path in plan.replaced
        )
        digests: dict[Path, str] = {}
        for plan in self.groups:
            if plan.kind == "hardlink":
                survivor = () if plan.is_only_in_store else (plan.survivor,)
                digests |= dict.fromkeys((*survivor, *plan.replaced), plan.group.digest)
        before, shared = len(batch.changes), set[str]()
        for linked in self._store.link_many(
            digests, label="dedup", batch=batch, digests=digests, replace=True, allow=self._allow,
            follow=False, read=self._found.read,
        ):  # fmt: skip
            shared |= {linked.digest} if linked.outcome == "linked" else set()
            yield linked
        # The last good copy need not be a blob.
        if alone := [each for each in batch.changes[before:] if each.digest not in shared]:
            self._store.take_back(alone, batch=batch)


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
    checks = Checks(store, keep_writable=keep_writable, allow=allow, looks=True)
    wanted = None if digests is None else set(digests)
    verdicts = [
        (group, verdict)
        for group in (() if found.is_quick else found.largest(checks=checks))
        if wanted is None or group.digest in wanted
        for verdict in group.verdicts
    ]
    groups = [plan for each in verdicts if (plan := _group_plan(*each)) is not None]
    groups.sort(key=lambda plan: plan.freed_size, reverse=True)
    decided = [checks.of(each.filesystem, dirname(each.survivor)) for each in groups]
    linked = [
        (verdict.survivor, verdict.replaced)
        for _, verdict in verdicts
        if verdict.survivor is not None and verdict.kind == "hardlink"
    ]
    return DedupPlan(
        groups=tuple(groups),
        freed_size=sum(plan.freed_size for plan in groups),
        files=sum(len(plan.replaced) for plan in groups),
        kinds={each.mount: each.words for each in decided},
        new_pools=tuple(dict.fromkeys(each.new_pool for each in decided if each.new_pool)),
        # Of the survivor names that nobody looked at, too.
        read_only=sum(
            names
            for survivor, replaced in linked
            for copy, names in ((survivor, survivor.links), *((c, len(c.names)) for c in replaced))
            if copy.mode & 0o222
        ),
        permissions=Counter(
            meaning
            for survivor, replaced in linked
            for copy in replaced
            if (meaning := _meaning(copy.mode, survivor.mode))
            for _ in copy.names
        ),
        skipped=tuple(skip for _, verdict in verdicts for skip in verdict.skipped),
        warnings=tuple(_warnings(found, linked)),
        _store=store, _found=found, _allow=allow,
    )  # fmt: skip


def _group_plan(group: Group, verdict: Verdict) -> GroupPlan | None:
    survivor, kind = verdict.survivor, verdict.kind
    if survivor is None or kind is None:
        return None
    names = (copy.names if kind == "hardlink" else copy.names[:1] for copy in verdict.replaced)
    return GroupPlan(
        group=group, filesystem=verdict.filesystem, kind=kind, survivor=survivor.path,
        is_only_in_store=survivor.is_only_in_store, freed_size=verdict.freed,
        replaced=tuple(name.path for same in names for name in same), skipped=verdict.skipped,
    )  # fmt: skip


def _meaning(before: int, after: int) -> str:
    """Return what it means that a name gets another mode; "" if it stays but for writing."""
    lost, gained = before & ~after & 0o555, after & ~before & 0o555
    if gained & 0o044:
        return "readable by more users"
    if lost & 0o044:
        return f"readable by {'fewer users' if after & 0o044 else 'you only'}"
    return "executable by others than before" if lost or gained else ""


def _warnings(found: Scan, linked: Iterable[tuple[Copy, tuple[Copy, ...]]]) -> Iterator[str]:
    if found.is_quick:
        yield "A quick scan proves nothing: scan in full before 'dedup'."
    keyed = (
        {name.folder.program for name in copy.names} & KEYS_ON_MTIME
        for survivor, replaced in linked
        for copy in replaced
        if copy.mtime_ns != survivor.mtime_ns
    )
    if retimed := list(filter(None, keyed)):
        names = " and ".join(sorted(set().union(*retimed)))
        files = "1 file" if len(retimed) == 1 else f"{len(retimed)} files"
        yield (
            f"{files} of {names} will show the time of the file that is shared, and be hashed"
            " by the program once more."
        )
    if found.elsewhere:
        yield (
            "Some files have equal ones on other filesystems, which links cannot reach:"
            " 'smartcache report' lists them."
        )


def _reason(error: Exception | None) -> str:
    """Return why a file was left alone, as a short phrase."""
    if error is None:
        return "left alone"
    reason = getattr(error, "reason", "")
    if isinstance(error, DigestMismatchError) or reason == "different":
        return OTHER_BYTES
    if isinstance(error, FileSkippedError):
        return str(reason or error)
    if isinstance(error, SmartcacheError):
        return error.message
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
