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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from smartcache.errors import DigestMismatchError, FileSkippedError, SmartcacheError, StoreError
from smartcache.folders.checks import Allow, Checks, Kind, Skip, Verdict
from smartcache.folders.groups import Group
from smartcache.folders.programs import KEYS_ON_MTIME, ModelFolder
from smartcache.folders.scan import Scan
from smartcache.progress import Job, Progress, silent
from smartcache.store.changes.replace import Replacement
from smartcache.store.hashes import Read
from smartcache.store.store import Store

OTHER_BYTES = "does not have the bytes that were read there before"
"""Why a file is left alone that has changed without a trace, as on a disk that fails."""
_CHUNK_GROUPS = 256


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
    """Files that `undo` would give back: those that are links now. Shared blocks need no undo."""
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
    checks = Checks(store, keep_writable=keep_writable, allow=allow)
    wanted = None if digests is None else set(digests)
    verdicts = [
        (group, verdict)
        for group in (() if found.is_quick else found.largest(checks=checks))
        if wanted is None or group.digest in wanted
        for verdict in group.verdicts
    ]
    groups = [plan for each in verdicts if (plan := _group_plan(*each)) is not None]
    groups.sort(key=lambda plan: plan.freed_size, reverse=True)
    decided = [checks.of(each.filesystem, each.survivor) for each in groups]
    new_volumes = dict.fromkeys(each.new_volume for each in decided if each.new_volume)
    folders = [each.folder for each in found.folders if each.folder is not None]
    return DedupPlan(
        groups=tuple(groups),
        freed_size=sum(plan.freed_size for plan in groups),
        files=sum(len(plan.replaced) for plan in groups),
        kinds={each.mount: each.words for each in decided},
        new_volumes=tuple(new_volumes),
        read_only=sum(verdict.read_only for _, verdict in verdicts),
        permissions=Counter(word for _, verdict in verdicts for word in verdict.permissions),
        skipped=tuple(skip for _, verdict in verdicts for skip in verdict.skipped),
        warnings=tuple(_warnings(found, [verdict for _, verdict in verdicts])),
        _execute=lambda plan, progress: _Run(store, plan, allow, found.read).run(folders, progress),
    )


def _group_plan(group: Group, verdict: Verdict) -> GroupPlan | None:
    survivor, kind = verdict.survivor, verdict.kind
    if survivor is None or kind is None:
        return None
    spares = tuple(copy.path for copy in verdict.replaced)
    names = tuple(name.path for copy in verdict.replaced for name in copy.names)
    return GroupPlan(
        group=group, filesystem=verdict.filesystem, kind=kind, survivor=survivor.path,
        spares=spares, is_blob=survivor.is_blob, replaced=spares if kind == "reflink" else names,
        skipped=verdict.skipped, freed_size=verdict.freed,
    )  # fmt: skip


def _warnings(found: Scan, verdicts: Iterable[Verdict]) -> Iterator[str]:
    if found.is_quick:
        yield "A quick scan proves nothing: scan in full before 'dedup'."
    retimed: list[set[str]] = []
    for verdict in verdicts:
        for copy in verdict.replaced if verdict.kind == "hardlink" else ():
            programs = {name.folder.program for name in copy.names} & KEYS_ON_MTIME
            if programs and verdict.survivor and copy.mtime_ns != verdict.survivor.mtime_ns:
                retimed.append(programs)
    if retimed:
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


class _Run:
    """One run over a plan, volume by volume."""

    def __init__(self, store: Store, plan: DedupPlan, allow: Allow, read: Read) -> None:
        self._store = store
        self._read = read
        self._plan = plan
        self._allow = allow
        self._skipped: list[Skip] = []
        self._batches: list[str] = []
        self._replaced = 0
        self._freed = 0
        self._changed = 0
        self._changes = 0
        """Of the volume in work: what `undo` could take back."""

    def run(self, folders: Sequence[ModelFolder], progress: Progress) -> DedupResult:
        """Do it; the folders belong to smartcache's from now on."""
        for folder in folders:
            self._store.add_folder(folder.path, program=folder.program)
        total = sum(len(plan.replaced) * plan.group.size for plan in self._plan.groups)
        with progress("Linking", total, "bytes") as job:
            for store, plans in self._by_volume():
                self._run_on(store, plans, job)
        return DedupResult(
            replaced=self._replaced,
            changed=self._changed,
            freed=self._freed,
            freed_at_most=any(plan.kind == "reflink" for plan in self._plan.groups),
            skipped=tuple(self._skipped),
            batches=tuple(self._batches),
            is_complete=not self._skipped,
        )

    def _by_volume(self) -> Iterator[tuple[Store, list[GroupPlan]]]:
        """Yield each volume, made where it is missing, with what is to be done there."""
        by_filesystem: dict[str, list[GroupPlan]] = {}
        for plan in self._plan.groups:
            by_filesystem.setdefault(plan.filesystem, []).append(plan)
        reason = "its drive is not there any more"
        for root in self._plan.new_volumes:
            try:
                self._store.add_volume(root)
            except (StoreError, OSError) as error:
                reason = _reason(error)
        stores = {each.volume.filesystem: each for each in self._store.stores()}
        for filesystem, plans in by_filesystem.items():
            if filesystem in stores:
                yield stores[filesystem], plans
            else:
                paths = (path for plan in plans for path in plan.replaced)
                self._skipped += [Skip(path=path, reason=reason) for path in paths]

    def _run_on(self, store: Store, plans: list[GroupPlan], job: Job) -> None:
        volume = store.volume
        self._changes = 0
        with (
            volume.key_locks.hold("dedup", what="another dedup", on_wait=volume.on_wait),
            store.batch("dedup") as batch,
        ):
            remaining = iter(plans)
            while chunk := list(islice(remaining, _CHUNK_GROUPS)):
                shared = [plan for plan in chunk if plan.kind == "reflink"]
                triples = [
                    (p.survivor, path, p.group.digest) for p in shared for path in p.replaced
                ]
                self._count(store.share_many(triples), shared, job, is_undoable=False)
                self._link(store, [plan for plan in chunk if plan.kind == "hardlink"], job)
        self._changed += self._changes
        if self._changes:
            self._batches.append(batch.id)

    def _link(self, store: Store, plans: list[GroupPlan], job: Job) -> None:
        """Adopt the survivors, or the next that can be, and replace the others."""
        waiting = {plan.survivor: plan for plan in plans if not plan.is_blob}
        pairs: list[tuple[Path, str]] = []
        for plan in plans:
            if plan.is_blob:
                # The survivor too: an interrupted run may have left its link out of the index.
                own = () if plan.survivor.is_relative_to(store.root) else (plan.survivor,)
                pairs += [(path, plan.group.digest) for path in (*own, *plan.replaced)]
        tried: dict[str, int] = {}
        while waiting:
            again: dict[Path, GroupPlan] = {}
            digests = {path: plan.group.digest for path, plan in waiting.items()}
            for adoption in store.adopt_many(
                waiting, follow=False, digests=digests, read=self._read
            ):
                plan = waiting[adoption.path]
                self._changes += adoption.outcome == "adopted"
                if adoption.error is None:
                    # Somebody else has stored these bytes meanwhile, or an interrupted run has.
                    late = [adoption.path] if adoption.outcome != "adopted" else []
                    pairs += [(path, adoption.digest) for path in (*late, *plan.replaced)]
                    continue
                self._note(adoption.path, adoption.error)
                number = tried[plan.group.digest] = tried.get(plan.group.digest, -1) + 1
                if number < len(plan.spares) - 1:
                    again[plan.spares[number]] = plan
                else:
                    job.advance(plan.group.size * len(plan.replaced))
            waiting = again
        results = store.replace_many(pairs, allow=self._allow, follow=False, read=self._read)
        self._count(results, plans, job, is_undoable=True)

    def _count(
        self, results: Iterable[Replacement], plans: list[GroupPlan], job: Job, *, is_undoable: bool
    ) -> None:
        sizes = {plan.group.digest: plan.group.size for plan in plans}
        survivors = {plan.survivor for plan in plans}
        for result in results:
            if result.outcome == "skipped":
                self._note(result.path, result.error)
            else:
                self._replaced += result.outcome == "replaced"
                self._changes += is_undoable and result.outcome == "replaced"
                self._freed += result.freed
            if result.path not in survivors:
                job.advance(sizes.get(result.digest, 0))

    def _note(self, path: Path, error: Exception | None) -> None:
        self._skipped.append(Skip(path=path, reason=_reason(error) if error else "left alone"))


def _reason(error: Exception) -> str:
    """Return why a file was left alone, as a short phrase."""
    if isinstance(error, DigestMismatchError) or getattr(error, "reason", "") == "different":
        return OTHER_BYTES
    if isinstance(error, FileSkippedError):
        return str(getattr(error, "reason", "") or error)
    if isinstance(error, SmartcacheError):
        return error.message
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
