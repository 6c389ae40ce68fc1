"""Remove repos or revisions from HF caches, and what only they held in the store.

Those that are chosen, or (`plan_cache_prune`) what nothing asks for any more: revisions that no ref
points to, and downloads that ended before they were finished.

The plan says before what comes back, the result says after what did: disk blocks of inodes whose
last name went. Names are looked up again right before they are removed, so that a revision that
arrived meanwhile keeps its blobs. Only names inside the repo folder are removed; no symlink is
followed. Files of huggingface_hub's shared blob store are its own to remove: it locks them.

huggingface_hub's own `delete_revisions` is not used for the rest: it skips repos with a broken
part, and removes what a snapshot's symlink points at even outside the repo.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from smartcache.hub.leftovers import is_dead
from smartcache.hub.removing import Removal, RemovalResult, execute, removal_of
from smartcache.hub.repos import Body, CachedRepo, Key, Revision
from smartcache.hub.sharing import Census, used
from smartcache.progress import Progress, silent
from smartcache.sizes import format_size
from smartcache.store import Blob, Store, link_liveness, liveness
from smartcache.system import allocated_bytes

_YOUNG = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Disk blocks that stay, and who has them."""

    size: int
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovalPlan:
    """What `hub rm` would remove."""

    removals: tuple[Removal, ...]
    files_size: int
    """Bytes that come back when the files go."""
    blobs_size: int
    """Bytes that come back when the store lets go of its blobs too (0 if it keeps them)."""
    digests: dict[Path, tuple[str, ...]]
    """Blobs that nobody would hold any more, by the root of their store."""
    kept: tuple[Kept, ...]
    warnings: tuple[str, ...]
    _execute: Callable[[RemovalPlan, Progress], RemovalResult] = field(repr=False, compare=False)

    @property
    def freed_size(self) -> int:
        """The bytes this plan expects the filesystem to give back."""
        return self.files_size + self.blobs_size

    def execute(self, progress: Progress = silent) -> RemovalResult:
        """Remove it all, each name looked up again right before."""
        return self._execute(self, progress)


def plan_removal(
    census: Census,
    chosen: Iterable[tuple[CachedRepo, str | None]],
    stores: Iterable[Store] = (),
    *,
    keep_blobs: bool = False,
) -> RemovalPlan:
    """Plan to remove repos (commit None) or revisions. `census` must have every repo of the caches.

    Blobs that were held for them alone are let go of too, unless `keep_blobs`.
    """
    removals, volumes = _removals(chosen), list(stores)
    warnings = _warnings(removals, volumes, keep_blobs=keep_blobs)
    return _plan(census, removals, volumes, warnings, keep_blobs=keep_blobs)


def _plan(
    census: Census,
    removals: list[Removal],
    volumes: list[Store],
    warnings: Iterable[str],
    *,
    keep_blobs: bool,
) -> RemovalPlan:
    tally = _Tally(census, removals, volumes, keep_blobs=keep_blobs)
    tally.count()
    return RemovalPlan(
        removals=tuple(removals), files_size=tally.files_size, blobs_size=tally.blobs_size,
        digests={root: tuple(found) for root, found in tally.digests.items()},
        kept=tuple(Kept(size=size, by=by) for by, size in sorted(tally.kept.items())),
        warnings=tuple(warnings),
        _execute=lambda plan, progress: execute(plan.removals, plan.digests, volumes, progress),
    )  # fmt: skip


def plan_cache_prune(
    census: Census,
    stores: Iterable[Store] = (),
    *,
    unused_for: timedelta = timedelta(0),
    keep_blobs: bool = False,
) -> RemovalPlan:
    """Plan to remove revisions that no ref points to, and unfinished downloads nobody is at.

    A revision younger than an hour may be one that is being downloaded by its commit, and stays.
    """
    removals: list[Removal] = []
    warnings: list[str] = []
    volumes = list(stores)
    oldest = datetime.now(UTC) - unused_for
    for repo in census.repos:
        if repo.is_symlink:
            continue
        if repo.unread:
            warnings.append(f"{repo.repo} is left alone: {repo.unread[0][0]} cannot be read")
            continue
        dead = [name for name in repo.incomplete if is_dead(Path(name))]
        if len(dead) < len(repo.incomplete):
            warnings.append(f"{repo.repo} is left alone: a download is running")
            continue
        detached = [each for each in repo.revisions if not each.refs and each.accessed_at <= oldest]
        old = {each.commit for each in detached if not _is_young(repo, each)}
        if len(old) < len(detached):
            text = "revisions that no ref points to stay while they are less than an hour old"
            warnings.append(f"{repo.repo}: {text}")
        if old or dead:
            removal = removal_of(repo, old)
            removals.append(
                replace(
                    removal, partials=tuple(dead), only_detached=True,
                    names=tuple(dict.fromkeys((*dead, *removal.names))),
                )
            )  # fmt: skip
            if removal.is_whole:
                text = "has no ref to what is here, as when it was downloaded by its commit"
                warnings.append(f"{repo.repo} {text}: it goes as a whole")
    if removals:
        warnings += _rebuilt(volumes, keep_blobs=keep_blobs)
    return _plan(census, removals, volumes, warnings, keep_blobs=keep_blobs)


def _is_young(repo: CachedRepo, revision: Revision) -> bool:
    """Say whether a snapshot has changed within the hour."""
    names = (repo.names[each.name].modified for each in revision.pointers)
    return time.time() - max(names, default=revision.made) < _YOUNG


def _removals(chosen: Iterable[tuple[CachedRepo, str | None]]) -> list[Removal]:
    commits: dict[Path, set[str]] = {}
    repos: dict[Path, CachedRepo] = {}
    for repo, commit in chosen:
        repos[repo.folder] = repo
        wanted = commits.setdefault(repo.folder, set())
        wanted |= {each.commit for each in repo.revisions} if commit is None else {commit}
        if commit is None:
            wanted.add("")
    return [removal_of(repo, commits[folder]) for folder, repo in repos.items()]


class _Tally:
    """Counts what would come back, and who has what would not."""

    def __init__(
        self, census: Census, removals: list[Removal], stores: list[Store], *, keep_blobs: bool
    ) -> None:
        self.census, self.removals, self.stores = census, removals, stores
        self.keep_blobs = keep_blobs
        self.files_size = self.blobs_size = 0
        self.kept: dict[str, int] = {}
        self.digests: dict[Path, list[str]] = {}
        self._gone = {name for each in removals for name in each.names}
        self._whole = {each.repo.folder for each in removals if each.is_whole}
        self._folders = {
            str(revision.folder)
            for each in removals
            for revision in each.repo.revisions
            if each.is_whole or revision.commit in each.commits
        }

    def count(self) -> None:
        """Go through every file that something leads to which goes."""
        for each in self.removals:
            if each.repo.is_symlink:
                self.files_size += allocated_bytes(os.lstat(each.repo.folder))
                behind = sum(body.allocated for body in used(each.repo).values())
                self._keep(behind, str(each.repo.folder.resolve()))
        gone = [(each.repo, each.names) for each in self.removals if not each.repo.is_symlink]
        going = self.census.going(gone)
        for key, body in self._bodies().items():
            others = body.links - going[key]
            store, blob = self.census.blobs.get(key, (None, None))
            if store is None or blob is None:
                self._count_file(key, body, others)
            elif others > 1:
                self._keep(body.allocated, self._names_of(key, others - 1, store, blob))
            else:
                self._count_blob(store, blob, body.allocated)
        self._count_held_elsewhere()

    def _bodies(self) -> dict[Key, Body]:
        found: dict[Key, Body] = {}
        for each in self.removals:
            if each.repo.is_symlink:
                continue
            if each.is_whole:
                found |= used(each.repo)
                continue
            found |= {each.repo.names[name].key: each.repo.names[name] for name in each.names}
            for revision in each.repo.revisions:
                if revision.commit in each.commits:
                    found |= {body.key: body for body in revision.bodies.values()}
        return found

    def _count_file(self, key: Key, body: Body, others: int) -> None:
        if others > 0:
            self._keep(body.allocated, self._names_of(key, others))
        else:
            self.files_size += body.allocated

    def _count_blob(self, store: Store, blob: Blob, allocated: int) -> None:
        """Count a blob whose last name will be the store's."""
        holders = self._holders_after(store, blob)
        if holders:
            self._keep(allocated, holders[0])
        elif store.has_lost_links:
            self._keep(allocated, "the store (its index was rebuilt: run 'smartcache scan')")
        elif self.keep_blobs:
            self._keep(allocated, "the store (--keep-blobs)")
        else:
            self.blobs_size += allocated
            self.digests.setdefault(store.root, []).append(blob.digest)

    def _count_held_elsewhere(self) -> None:
        """Count blobs that were held for these revisions, whose copies the HF cache has."""
        here = {(store.root, blob.digest) for store, blob in self.census.blobs.values()}
        for store in self.stores:
            index = store.volume.index
            for owner in index.owners():
                if owner.kind != "repo" or str(owner.path) not in self._folders:
                    continue
                for digest in index.digests_held_by(owner.id):
                    blob = index.blob(digest)
                    if (store.root, digest) in here or blob is None:
                        continue
                    here.add((store.root, digest))
                    try:
                        body = Body.of(os.stat(store.volume.layout.blob(digest)))
                    except OSError:
                        continue
                    if body.links == 1:
                        self._count_blob(store, blob, body.allocated)

    def _holders_after(self, store: Store, blob: Blob) -> list[str]:
        """Return who will still hold a blob when the names and snapshots are gone."""
        volume = store.volume
        links = volume.index.links_of(blob.id)
        staying = [
            link
            for link in links
            if str(link.path) not in self._gone and link_liveness(volume, link) != "dead"
        ]
        holders = []
        for owner in volume.index.holders_of(blob.id):
            if str(owner.path) in self._folders or liveness(owner) == "dead":
                continue
            has_links = any(link.owner == owner.id for link in links)
            if not has_links or any(link.owner == owner.id for link in staying):
                holders.append(str(owner))
        return holders + [f"symlink {link.path}" for link in staying if link.kind == "symlink"]

    def _names_of(
        self, key: Key, count: int, store: Store | None = None, blob: Blob | None = None
    ) -> str:
        """Say in a few words who has the other names of a file."""
        partly = {str(each.repo.repo) for each in self.removals if not each.is_whole}
        whole = {str(each.repo.repo) for each in self.removals if each.is_whole}
        users = self.census.users_of(key)
        if users - partly - whole:
            return ", ".join(sorted(users - partly - whole))
        if users & partly:
            return f"other revisions of {', '.join(sorted(users & partly))}"
        if store is not None and blob is not None:
            for link in store.links_of(blob):
                if link.kind == "hardlink" and str(link.path) not in self._gone:
                    return str(link.path)
        return "another name" if count == 1 else f"{count} other names"

    def _keep(self, size: int, by: str) -> None:
        if size:
            self.kept[by] = self.kept.get(by, 0) + size


def _warnings(removals: list[Removal], stores: list[Store], *, keep_blobs: bool) -> list[str]:
    warnings = []
    for each in removals:
        repo = each.repo
        if repo.is_symlink:
            target = repo.folder.resolve()
            warnings.append(f"{repo.folder} is a symlink: only the link is removed, {target} stays")
            continue
        missing = {commit.commit for commit in repo.revisions} - set(each.commits)
        if each.is_whole and each.commits and not missing and repo.incomplete:
            sizes = sum(repo.names[name].size for name in repo.incomplete)
            size = format_size(sizes)
            warnings.append(f"{size} of unfinished downloads of {repo.repo} will be removed too")
    return warnings + _rebuilt(stores, keep_blobs=keep_blobs)


def _rebuilt(stores: list[Store], *, keep_blobs: bool) -> list[str]:
    if keep_blobs or not any(store.has_lost_links for store in stores):
        return []
    text = "The index was rebuilt from the disk and may lack owners"
    return [f"{text}: the store keeps the blobs until 'smartcache scan' has run"]
