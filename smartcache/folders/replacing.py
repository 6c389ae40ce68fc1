"""Carry out a plan of `dedup`: survivors become blobs in place, the others links to them.

Each file is replaced in one step that is journaled before and can be undone; an interruption at any
moment leaves every file whole, and running again goes on. What happened since the scan is noticed
file by file: a plan is a wish, not a promise.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from smartcache.errors import FileSkippedError, SmartcacheError, StoreError
from smartcache.folders.checks import Allow
from smartcache.folders.dedup import DedupPlan, DedupResult, GroupPlan
from smartcache.folders.records import ModelFolder, Skip
from smartcache.progress import Job, Progress
from smartcache.store.replace import Replacement
from smartcache.store.statkey import StatKey
from smartcache.store.store import Store

_CHUNK_GROUPS = 256


class Replacing:
    """One run over a plan, volume by volume."""

    def __init__(self, store: Store, plan: DedupPlan, allow: Allow) -> None:
        self._store = store
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
                self._skip(plans, reason)

    def _run_on(self, store: Store, plans: list[GroupPlan], job: Job) -> None:
        volume = store.volume
        self._changes = 0
        with (
            volume.leases.hold("dedup", what="another dedup", on_wait=volume.on_wait),
            store.batch("dedup") as batch,
        ):
            remaining = iter(plans)
            while chunk := list(islice(remaining, _CHUNK_GROUPS)):
                if store is not self._store:
                    self._lend_memory(store, chunk)
                    self._lend_sightings(store, chunk)
                self._share(store, [plan for plan in chunk if plan.kind == "reflink"], job)
                self._link(store, [plan for plan in chunk if plan.kind == "hardlink"], job)
        self._changed += self._changes
        if self._changes:
            self._batches.append(batch.id)

    def _lend_memory(self, store: Store, plans: list[GroupPlan]) -> None:
        """Tell a volume on another filesystem the hashes that the scan has remembered here."""
        index, filesystem = self._store.volume.index, store.volume.filesystem
        stats: dict[int, os.stat_result] = {}
        for path in (path for plan in plans for path in (plan.survivor, *plan.replaced)):
            try:
                st = os.lstat(path)
            except OSError:
                continue
            stats[st.st_ino] = st
        memos = index.memos(filesystem, stats)
        with store.volume.index.write():
            for inode, memo in memos.items():
                st_now = stats.get(inode)
                if st_now is not None and memo.key == StatKey.of(st_now) and not memo.is_racy:
                    store.volume.index.put_memo(filesystem, inode, memo)

    def _lend_sightings(self, store: Store, plans: list[GroupPlan]) -> None:
        """Tell a volume elsewhere which names are one file: undo makes them one again."""
        index, filesystem = store.volume.index, store.volume.filesystem
        names = [
            (plan.group.size, copy, name)
            for plan in plans
            for copy in plan.group.copies
            for name in copy.names
            if len(copy.names) > 1 and copy.filesystem == filesystem
        ]
        with index.write():
            number = index.filesystem_number(filesystem)
            for size, copy, name in names:
                path = name.folder.path
                folder = index.set_folder(path, program=name.folder.program, walked=False)
                directory = index.set_directory(os.fsencode(name.path.parent), folder)
                seen = (size, number, copy.inode, copy.mtime_ns, 0, copy.links, copy.allocated)
                index.put_seen([(directory, os.fsencode(name.path.name), *seen)])

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
            for adoption in store.adopt_many(list(waiting), follow=False):
                plan = waiting[adoption.path]
                self._changes += adoption.outcome == "adopted"
                if adoption.digest == plan.group.digest:
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
        self._count(store.replace_many(pairs, allow=self._allow, follow=False), plans, job)

    def _share(self, store: Store, plans: list[GroupPlan], job: Job) -> None:
        triples = [
            (plan.survivor, path, plan.group.digest) for plan in plans for path in plan.replaced
        ]
        if triples:
            self._count(store.share_many(triples), plans, job)

    def _count(self, results: Iterable[Replacement], plans: list[GroupPlan], job: Job) -> None:
        sizes = {plan.group.digest: plan.group.size for plan in plans}
        survivors = {plan.survivor for plan in plans}
        for result in results:
            if result.outcome == "skipped":
                self._note(result.path, result.error)
            else:
                self._replaced += result.outcome == "replaced"
                self._changes += result.outcome == "replaced"
                self._freed += result.freed
            if result.path not in survivors:
                job.advance(sizes.get(result.digest, 0))

    def _note(self, path: Path, error: Exception | None) -> None:
        reason = "changed since it was scanned" if error is None else _reason(error)
        self._skipped.append(Skip(path=path, reason=reason))

    def _skip(self, plans: Iterable[GroupPlan], reason: str) -> None:
        self._skipped += [
            Skip(path=path, reason=reason) for plan in plans for path in plan.replaced
        ]


def _reason(error: Exception) -> str:
    """Return why a file was left alone, as a short phrase."""
    if isinstance(error, FileSkippedError):
        return str(getattr(error, "reason", "") or error)
    if isinstance(error, SmartcacheError):
        return error.message
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
