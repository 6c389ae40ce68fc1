"""Carry out the removal of repos and revisions: name by name, measured, nothing followed.

A ref goes before what it names, and a blob right before the pointers to it: a pointer to nothing
can be found and removed later, a blob that nothing points to could not. Directories go last and
only if they are empty: what somebody puts there meanwhile stays. Ended at any point, the same call
finishes it; blobs of the store whose owner is gone already are left to `prune`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from smartcache.errors import HubError, PruneRefusedError
from smartcache.hub import sharedstore
from smartcache.hub.leftovers import remove_partial
from smartcache.hub.repos import CachedRepo, scan_repo
from smartcache.hub.sharing import names_of_revisions
from smartcache.progress import Progress
from smartcache.store import Store
from smartcache.system import allocated_bytes, reached


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
class RemovalResult:
    """What was really done: `freed_size` is measured."""

    removed: int
    """Names that were removed from HF caches."""
    freed_size: int
    blobs_removed: int
    """Blobs that the store let go of; what they freed is part of `freed_size`."""
    failures: tuple[tuple[str, str], ...]
    """Paths that could not be removed, and why."""


def removal_of(repo: CachedRepo, commits: set[str]) -> Removal:
    """Return what goes with some revisions; "" among them, or no other left: the whole repo."""
    if repo.unread:
        path, error = repo.unread[0]
        message = f"{path} cannot be read: {error.strerror or error}; the repo was not removed"
        raise HubError(message, hint="Check its owner and mode.", path=path)
    present = {each.commit for each in repo.revisions}
    is_whole = "" in commits or (bool(present) and present <= commits)
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
    bodies = {
        blob: body
        for each in repo.revisions
        if each.commit in commits or is_whole
        for blob, body in each.bodies.items()
    }
    return Removal(
        repo=repo, commits=tuple(sorted(commits - {""})), is_whole=is_whole, names=tuple(names),
        size=sum(body.size for body in bodies.values()),
    )  # fmt: skip


def execute(
    removals: Iterable[Removal],
    digests: Mapping[Path, tuple[str, ...]],
    stores: list[Store],
    progress: Progress,
) -> RemovalResult:
    """Remove what was planned, as far as it is still so; return what was really done.

    `digests` are blobs to let go of afterwards, by the root of their store.
    """
    planned = list(removals)
    work = _Work()
    with progress("Removing", sum(len(each.names) for each in planned)) as job:
        for removal in planned:
            before = work.removed
            work.remove(removal)
            job.advance(work.removed - before)
    blobs = 0
    for store in stores:
        if not (wanted := digests.get(store.root, ())):
            continue
        try:
            result = store.plan_release(wanted).execute(progress)
        except PruneRefusedError as error:  # rebuilt meanwhile
            work.failures.append((str(store.root), error.message))
            continue
        blobs += result.removed
        work.freed += result.freed_size
    return RemovalResult(
        removed=work.removed, freed_size=work.freed, blobs_removed=blobs,
        failures=tuple(work.failures),
    )  # fmt: skip


class _Work:
    """What was done so far."""

    def __init__(self) -> None:
        self.removed = self.freed = 0
        self.failures: list[tuple[str, str]] = []
        self._inside: dict[str, bool] = {}

    def remove(self, planned: Removal) -> None:
        """Remove a repo or revisions as they are now."""
        folder = planned.repo.folder
        if not os.path.lexists(folder):
            return
        now = scan_repo(planned.repo.repo, folder)
        commits = set(planned.commits)
        if planned.only_detached:
            commits -= {each.commit for each in now.revisions if each.refs}
        arrived = {each.commit for each in now.revisions} - commits
        if now.is_symlink:
            if planned.repo.is_symlink:
                self._unlink(str(folder))
            return
        for name in planned.partials:
            self._unlink_partial(name, folder)
        whole = {""} if planned.is_whole and not arrived else set()
        if not commits | whole:
            return
        if planned.only_detached and any(map(os.path.lexists, now.incomplete)):
            self.failures.append((str(folder), "a download is running"))
            return
        removal = removal_of(now, commits | whole)
        self._remove_names(now, removal)
        self._remove_folders(now, removal)

    def _remove_names(self, now: CachedRepo, removal: Removal) -> None:
        folder = now.folder
        has_shared = sharedstore.is_usable(now.cache_dir)
        stuck: set[str] = set()  # blobs; their pointers stay, so that they are found again
        for name in removal.names:
            before = len(self.failures)
            if now.targets.get(name) in stuck:
                continue
            if not self._is_inside(os.path.dirname(name), folder):
                self.failures.append((name, "its folder was replaced in the meantime"))
            elif has_shared and name in now.targets and _is_in_shared_store(now, name):
                self._unlink_shared(name, now.cache_dir)
            else:
                self._unlink(name)
            if len(self.failures) > before:
                stuck.add(name)
            reached("hub rm: name removed")

    def _is_inside(self, directory: str, folder: Path) -> bool:
        """Say whether a directory is where its name says: no symlink has taken its place."""
        if directory not in self._inside:
            real = os.path.join(os.path.realpath(folder.parent), folder.name)
            below = os.path.relpath(directory, folder)
            expected = os.path.normpath(os.path.join(real, below))
            self._inside = {directory: os.path.realpath(directory) == expected}
        return self._inside[directory]

    def _unlink(self, name: str) -> None:
        try:
            with _watched(name) as freed:
                os.unlink(name)
        except FileNotFoundError:
            return
        except OSError as error:
            self.failures.append((name, error.strerror or str(error)))
            return
        self.removed += 1
        self.freed += freed()

    def _unlink_partial(self, name: str, folder: Path) -> None:
        if not self._is_inside(os.path.dirname(name), folder):
            self.failures.append((name, "its folder was replaced meanwhile"))
            return
        try:
            with _watched(name) as freed:
                is_removed = remove_partial(Path(name))
        except OSError as error:
            self.failures.append((name, error.strerror or str(error)))
            return
        self.removed += is_removed
        self.freed += freed() if is_removed else 0

    def _unlink_shared(self, name: str, cache_dir: Path) -> None:
        """Let huggingface_hub remove a symlink into its shared store, and sweep what it led to."""
        from huggingface_hub import DeleteCacheStrategy

        if "cache_dir" not in DeleteCacheStrategy.__dataclass_fields__:
            self._unlink(name)  # a version without that store: its file stays
            return
        target = os.path.normpath(os.path.join(os.path.dirname(name), os.readlink(name)))
        none: frozenset[Path] = frozenset()
        strategy = DeleteCacheStrategy(
            expected_freed_size=0, blobs=frozenset({Path(name)}), refs=none, repos=none,
            snapshots=none, cache_dir=cache_dir,
        )  # fmt: skip
        try:
            with _watched(name) as freed, _watched(target) as freed_behind:
                strategy.execute()
        except OSError as error:
            self.failures.append((name, error.strerror or str(error)))
            return
        if os.path.lexists(name):
            self.failures.append((name, "huggingface_hub could not remove it"))
            return
        self.removed += 1
        self.freed += freed() + freed_behind()

    def _remove_folders(self, repo: CachedRepo, removal: Removal) -> None:
        below = tuple(
            os.path.join(repo.folder, kind, commit)
            for kind in ("snapshots", ".no_exist")
            for commit in removal.commits
        )
        if removal.is_whole:
            folders = [*repo.folders, str(repo.folder)]
        else:
            folders = [
                each
                for each in repo.folders
                if each in below or each.startswith(tuple(f"{path}{os.sep}" for path in below))
            ]
        for path in sorted(folders, key=len, reverse=True):
            try:
                if self._is_inside(os.path.dirname(path), repo.folder) or path == str(repo.folder):
                    os.rmdir(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                if not any(Path(name).is_relative_to(repo.folder) for name, _ in self.failures):
                    self.failures.append((path, error.strerror or str(error)))


def _is_in_shared_store(repo: CachedRepo, name: str) -> bool:
    inside = os.path.join(repo.cache_dir, "blobs", "")
    return name.startswith(os.path.join(repo.folder, "blobs", "")) and repo.targets[
        name
    ].startswith(inside)


class _Freed:
    """The bytes that came back when a file lost a name, asked after it did."""

    def __init__(self, descriptor: int | None, before: os.stat_result | None) -> None:
        self._descriptor, self._before = descriptor, before
        self._size = 0

    def __call__(self) -> int:
        return self._size

    def look(self) -> None:
        """See how many names are left."""
        if self._before is None:
            return
        links = self._before.st_nlink - 1
        if self._descriptor is not None:
            links = os.fstat(self._descriptor).st_nlink
        self._size = allocated_bytes(self._before) if links == 0 else 0


@contextmanager
def _watched(name: str) -> Iterator[_Freed]:
    """Watch an inode while a name of it is removed. A file that may not be read is watched too."""
    try:
        before = os.lstat(name)
    except FileNotFoundError:
        yield _Freed(None, None)
        return
    descriptor = None
    flags = getattr(os, "O_PATH", 0)
    if flags and not stat.S_ISDIR(before.st_mode):
        descriptor = os.open(name, flags | os.O_NOFOLLOW)
        before = os.fstat(descriptor)
    try:
        freed = _Freed(descriptor, before)
        yield freed
        freed.look()
    finally:
        if descriptor is not None:
            os.close(descriptor)
