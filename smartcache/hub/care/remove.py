"""Remove repos or revisions from HF caches, and the blobs of the store that only they linked.

Those that are chosen, or (`plan_cache_prune`) what nothing asks for any more: revisions that no ref
points to, and downloads that ended before they were finished.

The plan says before what comes back, the result says after what did: disk blocks of inodes whose
last name went. Names are looked up again right before they are removed, so that a revision that
arrived meanwhile keeps its blobs. Only names inside the repo folder are removed; no symlink is
followed. Files of huggingface_hub's shared blob store are its own to remove: it locks them.

A ref goes before what it names, and a blob right before the pointers to it: a pointer to nothing
can be found and removed later, a blob that nothing points to could not. Directories go last and
only if they are empty: what somebody puts there meanwhile stays. Ended at any point, the same call
finishes it; blobs of the store whose last name went before are left to `prune`.

huggingface_hub's own `delete_revisions` is not used for the rest: it skips repos with a broken
part, and removes what a snapshot's symlink points at even outside the repo.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from smartcache.errors import HubError
from smartcache.hub import layout
from smartcache.hub.care.census import Census, names_of_revisions, used
from smartcache.hub.layout import Body, CachedRepo, Key, Revision, scan_repo
from smartcache.hub.places import is_dead, remove_partial
from smartcache.progress import Progress, silent
from smartcache.sizes import format_size
from smartcache.store.store import Store
from smartcache.system.faults import reached
from smartcache.system.kernel import PATH_ONLY, allocated_bytes

_YOUNG = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """A repo, or some of its revisions, that would go."""

    repo: CachedRepo
    commits: tuple[str, ...]
    is_whole: bool
    names: tuple[str, ...]
    """In the order they are removed."""
    size: int
    """Bytes by name, as `hf cache ls` counts them."""
    partials: tuple[str, ...] = ()
    """Those of `names` that are unfinished downloads: they go only if nobody is at work on them."""
    only_detached: bool = False
    """A revision that has got a ref since stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Disk blocks that stay, and who has them."""

    size: int
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovalResult:
    """What was really done: `freed_size` is measured."""

    removed: int
    """Names that were removed from HF caches."""
    freed_size: int
    blobs_removed: int
    """Blobs that the store let go of; what they freed is part of `freed_size`."""
    failures: tuple[tuple[str, str], ...]
    """Paths that could not be removed, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovalPlan:
    """What `hub rm` would remove."""

    removals: tuple[Removal, ...]
    files_size: int
    """Bytes that come back when the files go."""
    blobs_size: int
    """Bytes that come back when the store lets go of its blobs too (0 if it keeps them)."""
    digests: tuple[str, ...]
    """Blobs that nobody would have a name of any more."""
    kept: tuple[Kept, ...]
    warnings: tuple[str, ...]
    _store: Store | None = field(repr=False, compare=False)

    @property
    def freed_size(self) -> int:
        """The bytes this plan expects the filesystem to give back."""
        return self.files_size + self.blobs_size

    def execute(self, progress: Progress = silent) -> RemovalResult:
        """Remove it all, as far as it is still so: each name is looked up again right before."""
        work = _Work()
        with progress("Removing", sum(len(each.names) for each in self.removals)) as job:
            for removal in self.removals:
                before = work.removed
                work.remove(removal)
                job.advance(work.removed - before)
        blobs = 0
        if self._store is not None and self.digests:
            result = self._store.plan_release(self.digests).execute()
            blobs = result.removed
            work.freed += result.freed_size
        return RemovalResult(
            removed=work.removed, freed_size=work.freed, blobs_removed=blobs,
            failures=tuple(work.failures),
        )  # fmt: skip


# what goes


def plan_removal(
    census: Census,
    chosen: Iterable[tuple[CachedRepo, str | None]],
    *,
    keep_blobs: bool = False,
) -> RemovalPlan:
    """Plan to remove repos (commit None) or revisions. `census` must have every repo of the caches.

    Blobs that are left without a name are let go of too, unless `keep_blobs`.
    """
    repos: dict[Path, CachedRepo] = {}
    commits: dict[Path, set[str | None]] = {}
    for repo, commit in chosen:
        repos[repo.folder] = repo
        commits.setdefault(repo.folder, set()).add(commit)
    removals: list[Removal] = []
    warnings: list[str] = []
    for folder, repo in repos.items():
        some = {each for each in commits[folder] if each is not None}
        removal = _removal_of(repo, some, whole=None in commits[folder])
        removals.append(removal)
        if repo.is_symlink:
            target = folder.resolve()
            warnings.append(f"{folder} is a symlink: only the link is removed, {target} stays")
        elif removal.is_whole and removal.commits and repo.incomplete:
            size = format_size(sum(repo.names[name].size for name in repo.incomplete))
            warnings.append(f"{size} of unfinished downloads of {repo.repo} will be removed too")
    return _plan(census, removals, warnings, keep_blobs=keep_blobs)


def plan_cache_prune(
    census: Census,
    *,
    unused_for: timedelta = timedelta(0),
    keep_blobs: bool = False,
) -> RemovalPlan:
    """Plan to remove revisions that no ref points to, and unfinished downloads nobody is at.

    A revision younger than an hour may be one that is being downloaded by its commit, and stays.
    """
    removals: list[Removal] = []
    warnings: list[str] = []
    oldest = datetime.now(UTC) - unused_for
    for repo in census.repos:
        if repo.is_symlink:
            continue
        if repo.unread:
            warnings.append(f"{repo.repo} is left alone: {repo.unread[0][0]} cannot be read")
            continue
        dead = tuple(name for name in repo.incomplete if is_dead(Path(name)))
        if len(dead) < len(repo.incomplete):
            warnings.append(f"{repo.repo} is left alone: a download is running")
            continue
        detached = [each for each in repo.revisions if not each.refs and each.accessed_at <= oldest]
        old = {each.commit for each in detached if not _is_young(repo, each)}
        if len(old) < len(detached):
            text = "revisions that no ref points to stay while they are less than an hour old"
            warnings.append(f"{repo.repo}: {text}")
        if not old and not dead:
            continue
        removal = _removal_of(repo, old)
        names = tuple(dict.fromkeys((*dead, *removal.names)))
        removals.append(replace(removal, names=names, partials=dead, only_detached=True))
        if removal.is_whole:
            text = "has no ref to what is here, as when it was downloaded by its commit"
            warnings.append(f"{repo.repo} {text}: it goes as a whole")
    return _plan(census, removals, warnings, keep_blobs=keep_blobs)


def _is_young(repo: CachedRepo, revision: Revision) -> bool:
    """Say whether a snapshot has changed within the hour."""
    names = (repo.names[each.name].modified for each in revision.pointers)
    return time.time() - max(names, default=revision.made) < _YOUNG


def _removal_of(repo: CachedRepo, commits: set[str], *, whole: bool = False) -> Removal:
    """Return what goes with some revisions: the whole repo, if no other revision is left."""
    if repo.unread:
        path, error = repo.unread[0]
        message = f"{path} cannot be read: {error.strerror or error}; the repo was not removed"
        raise HubError(message, hint="Check its owner and mode.", path=path)
    present = {each.commit for each in repo.revisions}
    is_whole = whole or (bool(present) and present <= commits)
    if is_whole:
        commits = commits | present
    if repo.is_symlink and not is_whole:
        message = f"{repo.folder} is a symlink to {repo.folder.resolve()}"
        hint = "Remove the revision there: --cache-dir says where."
        raise HubError(message, hint=hint, path=repo.folder)
    if repo.is_symlink:
        names = [str(repo.folder)]
    else:
        names = names_of_revisions(repo, commits)
        if is_whole:
            names += sorted(repo.names.keys() - set(names))
    bodies: dict[str, Body] = {}
    for each in repo.revisions:
        if each.commit in commits:
            bodies |= each.bodies
    return Removal(
        repo=repo, commits=tuple(sorted(commits)), is_whole=is_whole, names=tuple(names),
        size=sum(body.size for body in bodies.values()),
    )  # fmt: skip


# what comes back


def _plan(
    census: Census, removals: list[Removal], warnings: list[str], *, keep_blobs: bool
) -> RemovalPlan:
    tally = _Tally(census, removals)
    tally.count(keep_blobs=keep_blobs)
    return RemovalPlan(
        removals=tuple(removals), files_size=tally.files_size, blobs_size=tally.blobs_size,
        digests=tuple(tally.digests),
        kept=tuple(Kept(size=size, by=by) for by, size in sorted(tally.kept.items()) if size),
        warnings=tuple(warnings), _store=census.store,
    )  # fmt: skip


class _Tally:
    """Counts what would come back, and who has what would not."""

    def __init__(self, census: Census, removals: list[Removal]) -> None:
        self._census, self._removals = census, removals
        self.files_size = self.blobs_size = 0
        self.kept: Counter[str] = Counter()
        self.digests: list[str] = []
        self._gone = {name for each in removals for name in each.names}

    def count(self, *, keep_blobs: bool) -> None:
        """Go through every file that something leads to which goes."""
        bodies, going = self._going()
        for key, body in bodies.items():
            blob = self._census.blobs.get(key)
            others = self._census.others(body, going)
            if others > 0:
                self.kept[self._who_has(key, others)] += body.allocated
            elif blob is None:
                self.files_size += body.allocated
            elif blob.pins:
                self.kept[", ".join(f"pin {name}" for name in blob.pins)] += body.allocated
            elif keep_blobs:
                self.kept["the store (--keep-blobs)"] += body.allocated
            else:
                self.blobs_size += body.allocated
                self.digests.append(blob.digest)

    def _going(self) -> tuple[dict[Key, Body], Counter[Key]]:
        """Return the files that lose a name, and how many names each loses."""
        bodies: dict[Key, Body] = {}
        gone = []
        for each in self._removals:
            repo = each.repo
            if repo.is_symlink:
                self.files_size += allocated_bytes(os.lstat(repo.folder))
                behind = sum(body.allocated for body in used(repo).values())
                self.kept[str(repo.folder.resolve())] += behind
                continue
            gone.append((repo, each.names))
            if each.is_whole:
                bodies |= used(repo)
                continue
            bodies |= {repo.names[name].key: repo.names[name] for name in each.names}
            for revision in repo.revisions:
                if revision.commit in each.commits:
                    bodies |= {body.key: body for body in revision.bodies.values()}
        return bodies, self._census.going(gone)

    def _who_has(self, key: Key, count: int) -> str:
        """Say in a few words who has the other names of a file."""
        partly = {str(each.repo.repo) for each in self._removals if not each.is_whole}
        whole = {str(each.repo.repo) for each in self._removals if each.is_whole}
        users = self._census.users_of(key)
        if users - partly - whole:
            return ", ".join(sorted(users - partly - whole))
        if users & partly:
            return f"other revisions of {', '.join(sorted(users & partly))}"
        store, blob = self._census.store, self._census.blobs.get(key)
        if store is not None and blob is not None:
            for path in store.names_of(blob.digest):
                if str(path) not in self._gone:
                    return str(path)
        return "another name" if count == 1 else f"{count} other names"


# removing


class _Work:
    """What was done so far."""

    def __init__(self) -> None:
        self.removed = self.freed = 0
        self.failures: list[tuple[str, str]] = []

    def remove(self, planned: Removal) -> None:
        """Remove a repo or revisions as they are now."""
        folder = planned.repo.folder
        if not os.path.lexists(folder):
            return
        now = scan_repo(planned.repo.repo, folder)
        if now.is_symlink:
            if planned.repo.is_symlink:
                self._take(str(folder), folder, os.unlink)
            return
        commits = set(planned.commits)
        if planned.only_detached:
            commits -= {each.commit for each in now.revisions if each.refs}
        for name in planned.partials:
            self._take(name, folder, lambda partial: remove_partial(Path(partial)))
        is_whole = planned.is_whole and {each.commit for each in now.revisions} <= commits
        if not commits and not is_whole:
            return
        if planned.only_detached and any(map(os.path.lexists, now.incomplete)):
            self.failures.append((str(folder), "a download is running"))
            return
        removal = _removal_of(now, commits, whole=is_whole)
        self._remove_names(now, removal.names)
        self._remove_folders(now, removal)

    def _remove_names(self, repo: CachedRepo, names: Iterable[str]) -> None:
        blobs = os.path.join(repo.folder, "blobs", "")
        has_shared = layout.has_shared_store(repo.cache_dir)
        shared = os.path.join(repo.cache_dir, "blobs", "")
        stuck: set[str] = set()  # blobs; their pointers stay, so that they are found again
        for name in names:
            target = repo.targets.get(name, "")
            if target in stuck:
                continue
            if has_shared and name.startswith(blobs) and target.startswith(shared):
                unlink = _unlinking_shared(repo.cache_dir)
                is_gone = self._take(name, repo.folder, unlink, target)
            else:
                is_gone = self._take(name, repo.folder, os.unlink)
            if not is_gone:
                stuck.add(name)
            reached("hub rm: name removed")

    def _take(self, name: str, folder: Path, unlink: Callable[[str], object], *behind: str) -> bool:
        """Remove a name of a repo, and measure what comes back; False: it is still there."""
        if not _is_inside(name, folder):
            self.failures.append((name, "its folder was replaced in the meantime"))
            return False
        try:
            freed = _freed_by(unlink, name, *behind)
        except FileNotFoundError:
            return True
        except OSError as error:
            self.failures.append((name, error.strerror or str(error)))
            return False
        if os.path.lexists(name):
            return False
        self.removed += 1
        self.freed += freed
        return True

    def _remove_folders(self, repo: CachedRepo, removal: Removal) -> None:
        folders = [*repo.folders, str(repo.folder)]
        if not removal.is_whole:
            below = tuple(
                os.path.join(repo.folder, kind, commit, "")
                for kind in ("snapshots", ".no_exist")
                for commit in removal.commits
            )
            folders = [each for each in folders if os.path.join(each, "").startswith(below)]
        for path in sorted(folders, key=len, reverse=True):
            try:
                if _is_inside(path, repo.folder):
                    os.rmdir(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                if not any(Path(name).is_relative_to(repo.folder) for name, _ in self.failures):
                    self.failures.append((path, error.strerror or str(error)))


def _is_inside(name: str, folder: Path) -> bool:
    """Say whether a name of a repo is where it says: no symlink has taken a directory's place."""
    directory = os.path.dirname(name)
    real = os.path.join(os.path.realpath(folder.parent), folder.name)
    expected = os.path.normpath(os.path.join(real, os.path.relpath(directory, folder)))
    return os.path.realpath(directory) == expected


def _unlinking_shared(cache_dir: Path) -> Callable[[str], object]:
    """Let huggingface_hub remove a symlink into its shared store, and sweep what it led to."""
    from huggingface_hub import DeleteCacheStrategy

    if "cache_dir" not in DeleteCacheStrategy.__dataclass_fields__:
        return os.unlink  # a version without that store: its file stays

    def unlink(name: str) -> None:
        none: frozenset[Path] = frozenset()
        DeleteCacheStrategy(
            expected_freed_size=0, blobs=frozenset({Path(name)}), refs=none, repos=none,
            snapshots=none, cache_dir=cache_dir,
        ).execute()  # fmt: skip
        if os.path.lexists(name):
            raise OSError("huggingface_hub could not remove it")

    return unlink


def _freed_by(unlink: Callable[[str], object], name: str, *behind: str) -> int:
    """Remove a name; return the bytes that came back: of files that have no name any more.

    `behind` are other files that may go with it. A file that may not be read is measured too.
    """
    watched: list[tuple[str, int | None, os.stat_result]] = []
    with ExitStack() as stack:
        for each in (name, *behind):
            try:
                before, descriptor = os.lstat(each), None
                if PATH_ONLY:
                    descriptor = os.open(each, PATH_ONLY | os.O_NOFOLLOW)
                    stack.callback(os.close, descriptor)
                    before = os.fstat(descriptor)
            except FileNotFoundError:
                continue
            watched.append((each, descriptor, before))
        unlink(name)
        freed = 0
        for each, descriptor, before in watched:
            if descriptor is not None:
                links = os.fstat(descriptor).st_nlink
            else:
                links = before.st_nlink - (not os.path.lexists(each))
            freed += allocated_bytes(before) if links == 0 else 0
        return freed
