"""The folders of artifact sets, as far as the store has to know them: to move or remove them.

A set is a folder `sets/<name>/<id>/` with packs and a lock, and an index that may be absent. Who
writes to a pack keeps it locked, and begins one, or goes on with one that was left, under the lock
of the set: a set whose lock is held, with no pack locked, gets nothing more. All that was ever
acknowledged is in its packs, whether they have a footer or not.

A dataset is a folder `sets/<name>/dataset/` among them, with an index and the lock of who reads its
sources, and no packs. It moves with the sets that have its outputs.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import quote_from_bytes

from smartcache.errors import StoreError
from smartcache.store.kernel import sync_directory
from smartcache.store.layout import Layout
from smartcache.store.locks import OnWait, is_free, lock
from smartcache.store.safety import check_own, open_own
from smartcache.store.statkey import allocated_bytes

DATASET = "dataset"
"""What the folder of a dataset is called, which is no id of a set."""
_INDEX = "index.sqlite3"
_LEFT_BEHIND = frozenset({"lock", "lock.turn", f"{_INDEX}-wal", f"{_INDEX}-shm"})
_PIECE = 8 << 20


def set_folders(layout: Layout) -> list[Path]:
    """Return the folders of all sets, and of datasets."""
    return [
        Path(inner.path)
        for outer in _directories(layout.sets)
        for inner in _directories(outer.path)
    ]


def has_sets(layout: Layout) -> bool:
    """Say whether there is any set, or a dataset; quick."""
    return any(True for outer in _directories(layout.sets) for _ in _directories(outer.path))


def sets_size(layout: Layout) -> int:
    """Return the disk blocks of all sets."""
    return sum(allocated_bytes(os.lstat(path)) for path in _files(layout.sets))


@contextmanager
def held_still(
    layout: Layout, *, timeout: float | None = None, on_wait: OnWait | None = None
) -> Iterator[None]:
    """Let nobody put anything into any set for the length of a block.

    StoreError if a process has a set open for writing: it would go on in files that are gone.
    """
    with ExitStack() as stack:
        for folder in set_folders(layout):
            _refuse_what_is_no_file(folder)
            kind = "dataset" if folder.name == DATASET else "set"
            name = f"the {kind} {folder.parent.name}"
            held = lock(
                folder / "lock", exclusive=True, timeout=timeout, what="moving", on_wait=on_wait,
                name=name,
            )  # fmt: skip
            stack.enter_context(held)
            if not all(map(is_free, folder.glob("*.pack"))):
                message = f"A program has the set {folder.parent.name} open for writing"
                hint = "End it, or let it close the set; nothing was changed."
                raise StoreError(message, hint=hint, path=folder)
        yield


def _refuse_what_is_no_file(folder: Path) -> None:
    """Refuse a set that is not ours alone, or with something to wait for or follow in it."""
    for part in (folder.parent, folder):
        check_own(part)
    with os.scandir(folder) as entries:
        for entry in entries:
            is_folder = entry.is_dir(follow_symlinks=False)
            if not is_folder and not entry.is_file(follow_symlinks=False):
                hint = "Remove it: smartcache did not make it; nothing was changed."
                raise StoreError(f"{entry.path} is not a regular file", hint=hint, path=entry.path)


def copy_sets(old: Layout, new: Layout, advance: Callable[[int], None]) -> None:
    """Copy all sets to another root, synced; what a killed copy left there is replaced."""
    shutil.rmtree(new.sets)
    shutil.copytree(old.sets, new.sets, copy_function=_no_copy, ignore=_ignored)
    for path in _files(old.sets):
        target = new.sets / path.relative_to(old.sets)
        if path.name in _LEFT_BEHIND or not target.parent.is_dir():
            continue
        if path.name != _INDEX or not _copy_index(path, target):
            _copy(path, target, advance)
        else:
            advance(path.lstat().st_size)
    for folder, _, _ in os.walk(new.sets):
        sync_directory(Path(folder))


def _no_copy(source: str, target: str) -> str:
    """Stand in for what copies files: `copytree` makes the directories alone."""
    del source
    return target


def _ignored(_: str, names: list[str]) -> set[str]:
    """Name what is of this place only: locks, and what was being removed."""
    return {name for name in names if name == "leases" or name.startswith(".removed-")}


def _copy(source: Path, target: Path, advance: Callable[[int], None]) -> None:
    with open(open_own(source), "rb") as reading, open(target, "wb") as writing:
        while piece := reading.read(_PIECE):
            writing.write(piece)
            advance(len(piece))
        writing.flush()
        os.fsync(writing.fileno())
    shutil.copystat(source, target)


def _copy_index(source: Path, target: Path) -> bool:
    """Copy a database as it is in one moment: readers write to it too; False: it is none."""
    uri = f"file:{quote_from_bytes(os.fsencode(source))}?mode=ro"
    try:
        with (
            closing(sqlite3.connect(uri, uri=True)) as reading,
            closing(sqlite3.connect(target)) as writing,
        ):
            reading.backup(writing)
    except sqlite3.DatabaseError:
        target.unlink(missing_ok=True)
        return False
    shutil.copymode(source, target)
    with open(target, "rb+") as file:
        os.fsync(file.fileno())
    return True


def _directories(path: str | Path) -> Iterator[os.DirEntry[str]]:
    with suppress(FileNotFoundError), os.scandir(path) as entries:
        for entry in sorted(entries, key=lambda each: each.name):
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                yield entry


def _files(root: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(root):
        for name in sorted(names):
            path = Path(folder, name)
            if os.path.lexists(path):
                yield path
