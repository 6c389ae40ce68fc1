"""Scanning and deduplicating in tests: short calls, and what the disk says before and after."""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import ParamSpec

from smartcache.config import load_settings
from smartcache.errors import NothingToUndoError
from smartcache.folders.checks import Skip
from smartcache.folders.dedup import DedupPlan, DedupResult, plan_dedup
from smartcache.folders.scan import Scan, folders_to_scan
from smartcache.folders.scan import scan_folders as scan
from smartcache.progress import Progress, silent
from smartcache.store.store import Store
from smartcache.store.userfile import Allowance
from tests.store.small_disks import in_own_namespace

P = ParamSpec("P")

ALL: frozenset[Allowance] = frozenset(("group", "mode", "xattr"))


def open_store(root: Path, *, threads: int = 2) -> Store:
    return Store(root, settings=load_settings(home=root, threads=threads))


def scanned(
    store: Store,
    *folders: Path,
    exclude: Sequence[str] = (),
    any_file: bool = False,
    is_quick: bool = False,
    min_size: int = 1,
    progress: Progress = silent,
) -> Scan:
    chosen, _ = folders_to_scan(store, folders)
    return scan(
        store, chosen, min_size=min_size, exclude=exclude, any_file=any_file, is_quick=is_quick,
        progress=progress,
    )  # fmt: skip


def planned(
    store: Store,
    *folders: Path,
    keep_writable: bool = False,
    allow: Iterable[Allowance] = (),
    exclude: Sequence[str] = (),
    any_file: bool = False,
) -> DedupPlan:
    found = scanned(store, *folders, exclude=exclude, any_file=any_file)
    return plan_dedup(store, found, keep_writable=keep_writable, allow=frozenset(allow))


def deduplicated(
    store: Store,
    *folders: Path,
    keep_writable: bool = False,
    allow: Iterable[Allowance] = (),
    any_file: bool = False,
) -> DedupResult:
    plan = planned(store, *folders, keep_writable=keep_writable, allow=allow, any_file=any_file)
    return plan.execute()


def undo_everything(store: Store) -> list[str]:
    """Undo all changes; return what could not be undone, with the reason."""
    try:
        undone = store.plan_undo().execute()
    except NothingToUndoError:
        return []
    return [f"{each.path}: {each.note}" for each in undone if not each.is_undone]


def reasons(skipped: Iterable[Skip]) -> dict[str, str]:
    """Return why each file was left alone, by its own name."""
    return {skip.path.name: skip.reason for skip in skipped}


def allocated_in(place: Path) -> int:
    """Return the disk blocks of all regular files below a place, each inode once, in bytes."""
    found = {(st := path.lstat()).st_ino: st for path in place.rglob("*")}
    return sum(st.st_blocks * 512 for st in found.values() if stat.S_ISREG(st.st_mode))


def inodes_of(paths: Iterable[Path]) -> set[int]:
    return {os.lstat(path).st_ino for path in paths}


def leftovers(*places: Path) -> list[str]:
    """Return names of ours beside the user's files."""
    return [
        os.path.join(directory, name)
        for place in places
        for directory, folders, names in os.walk(place)
        for name in (*folders, *names)
        if name.endswith(".smartcache") and name != ".smartcache"
    ]


def in_namespace(test: Callable[P, None]) -> Callable[P, None]:
    """Run a test in a process that may mount what it likes."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        in_own_namespace(lambda: test(*args, **kwargs))

    return run
