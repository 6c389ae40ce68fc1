"""Move a store to another root; links stay right.

On the same filesystem the two directories change places in one step: the store is at the new root,
and the old root holds a `moved-to` file and a `blobs` symlink, so that programs and symlinks that
know the old place still work. On another filesystem every blob is copied and hashed on the way,
then the old root is switched over, then emptied. What remains to be done after the switch
(symlinks to point anew, old files to remove) is noted in the index first and finished by the next
open if this process dies.

Artifact sets come along: renamed with the store they can stay open, and a `sets` symlink leads to
them; to be copied they must not be open for writing. A set is a folder `sets/<name>/<id>/` with
packs and a lock, and an index that may be absent. Who writes to a pack keeps it locked, and begins
one, or goes on with one that was left, under the lock of the set: a set whose lock is held, with no
pack locked, gets nothing more. All that was ever acknowledged is in its packs, whether they have a
footer or not. A dataset is a folder `sets/<name>/dataset/` among them, with an index and the lock
of who reads its sources, and no packs. It moves with the sets that have its outputs.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote_from_bytes, unquote_to_bytes

from smartcache.errors import BlobNotFoundError, DestinationExistsError, NoSpaceError, StoreError
from smartcache.progress import SILENT, Job, Progress, silent
from smartcache.sizes import format_size
from smartcache.store.blobs import READ_ONLY, copy_hashed, copy_verified, explained
from smartcache.store.changes.journal import Batch, Change
from smartcache.store.changes.spot import Spot, beside
from smartcache.store.index import Index
from smartcache.store.owners import link_pages
from smartcache.store.records import Link, Trust
from smartcache.store.volume import Layout, Volume, make_folders
from smartcache.system import (
    allocated_bytes,
    check_own,
    create_own,
    exchange,
    free_bytes,
    hash_file,
    is_free,
    lock,
    make_own,
    nearest_existing,
    open_own,
    reached,
    sync_directory,
)

DATASET = "dataset"
"""What the folder of a dataset is called, which is no id of a set."""
MOVED_FROM = "moved_from"
"""Note in the index: the old root of a move whose last steps are not done yet."""
FORMER_ROOTS = "former_roots"
"""Note in the index: where this store was before; each of these places leads here."""
_NEW_FORWARDING = ".moved-to-new"
_MOVING = ".moving"
_FORWARDING = frozenset({"moved-to", "blobs", "sets", _NEW_FORWARDING})
"""All that a former root may have in it."""
_INDEX = "index.sqlite3"
_LEFT_BEHIND = frozenset({"lock", "lock.turn", f"{_INDEX}-wal", f"{_INDEX}-shm"})


@dataclass(frozen=True, slots=True, kw_only=True)
class MovePlan:
    """Where the store goes, how, and what that costs."""

    root: Path
    new_root: Path
    is_rename: bool
    copied_size: int
    free_size: int
    symlinks: int
    warnings: tuple[str, ...]
    _execute: Callable[[MovePlan, Progress], Path] = field(repr=False, compare=False)

    @property
    def freed_size(self) -> int:
        """A move frees nothing in the end."""
        return 0

    def execute(self, progress: Progress = silent) -> Path:
        """Move the store; returns the new root. The `Volume` it was planned with is closed."""
        return self._execute(self, progress)


def plan_move(volume: Volume, new_root: Path) -> MovePlan:
    """Plan to move a store to a directory that does not exist yet (or is empty)."""
    new_root = Path(os.path.abspath(new_root))
    _refuse_bad_target(volume, new_root)
    place = nearest_existing(new_root)
    is_rename = os.stat(place).st_dev == volume.device
    copied = 0
    if not is_rename:
        copied = volume.index.totals().allocated + sets_size(volume.layout)
    warning = "Another filesystem: files keep their bytes, but no longer share them with the store"
    return MovePlan(
        root=volume.root, new_root=new_root, is_rename=is_rename, copied_size=copied,
        free_size=free_bytes(place), symlinks=sum(map(len, link_pages(volume, "symlink"))),
        warnings=() if is_rename else (warning,),
        _execute=lambda plan, progress: _execute(volume, plan, progress),
    )  # fmt: skip


def _refuse_bad_target(volume: Volume, new_root: Path) -> None:
    real, old = Path(os.path.realpath(new_root)), Path(os.path.realpath(volume.root))
    if real == old or real.is_relative_to(old) or old.is_relative_to(real):
        message = f"{new_root} and {volume.root} lie inside each other"
        raise StoreError(message, hint="Choose a directory outside of the store.")
    if os.path.lexists(new_root) and not _is_free(new_root, volume):
        message = f"{new_root} exists and is not empty"
        raise DestinationExistsError(
            message, hint="Choose a new or empty directory.", path=new_root
        )


def _is_free(new_root: Path, volume: Volume) -> bool:
    """Say whether a directory is empty, a former root of this store, or half moved into."""
    if not new_root.is_dir() or new_root.is_symlink():
        return False
    names = set(os.listdir(new_root))
    if _MOVING in names or not names <= _FORWARDING:
        return _MOVING in names
    here = (None, volume.root, new_root)
    return new_root in former_roots(volume) or Layout(new_root).forwarding() in here


def _execute(volume: Volume, plan: MovePlan, progress: Progress) -> Path:
    if plan.copied_size > plan.free_size:
        message = (
            f"The store needs {format_size(plan.copied_size)}, but"
            f" only {format_size(plan.free_size)} is free at {plan.new_root}; nothing was changed"
        )
        raise NoSpaceError(message, needed=plan.copied_size, free=plan.free_size)
    with explained(plan.new_root.parent):
        make_folders(plan.new_root.parent)
        with volume.key_locks.hold("move", what="move the store", on_wait=volume.on_wait):
            # Another process may have moved it, or come to the same place, since it was planned.
            volume.refuse_if_moved()
            _refuse_bad_target(volume, plan.new_root)
            if plan.is_rename:
                _rename(volume, plan.new_root)
            else:
                _copy_over(volume, plan.new_root, progress)
    with closing(Volume(plan.new_root, volume.settings, create=False)) as moved:
        finish_move(moved)
    return plan.new_root


def _rename(volume: Volume, new_root: Path) -> None:
    _write_forwarding(new_root, new_root, with_sets=has_sets(volume.layout))
    reached("move: prepared")
    with volume.guard("move the store", exclusive=True):
        volume.index.set_note(MOVED_FROM, _quoted(volume.root))
        volume.close()
        reached("move: noted")
        if not exchange(volume.root, new_root):
            # Without an exchange there is a moment in which neither root leads to the store.
            spare = beside(new_root)
            os.rename(new_root, spare)
            os.rename(volume.root, new_root)
            os.rename(spare, volume.root)
        reached("move: exchanged")
    sync_directory(new_root.parent)


def _write_forwarding(where: Path, target: Path, *, with_sets: bool) -> None:
    """Make a directory into a former root that leads to `target`."""
    make_own(where)
    for name in ("blobs", "sets") if with_sets else ("blobs",):
        link = where / name
        if link.is_symlink() and Path(os.readlink(link)) != target / name:
            link.unlink()  # it led to a root before that
        if not os.path.lexists(link):
            os.symlink(target / name, link)
    _forward(where, target)


def _forward(where: Path, target: Path) -> None:
    """Write `moved-to`, in one step."""
    temporary = where / _NEW_FORWARDING
    temporary.unlink(missing_ok=True)
    with open(create_own(temporary), "wb") as file:
        file.write(os.fsencode(target) + b"\n")
    os.replace(temporary, where / "moved-to")


def _copy_over(volume: Volume, new_root: Path, progress: Progress) -> None:
    new = Layout(new_root)
    make_own(new_root)
    (new_root / "moved-to").unlink(missing_ok=True)
    _remove_symlinks(new_root)
    (new_root / _MOVING).write_bytes(os.fsencode(volume.root))
    for directory in new.directories:
        directory.mkdir(mode=0o700, exist_ok=True)
        directory.chmod(os.stat(volume.root / directory.name).st_mode & 0o777)
    reached("move: prepared")
    copied: set[bytes] = set()
    with progress("Copying blobs", volume.index.totals().size, "bytes") as job:
        _copy_blobs(volume, new, copied, job)
    reached("move: blobs copied")
    with _sets_held_still(volume):
        with progress("Copying artifact sets", sets_size(volume.layout), "bytes") as job:
            _copy_sets(volume.layout, new, job.advance)
        _switch(volume, new, copied)


def _switch(volume: Volume, new: Layout, copied: set[bytes]) -> None:
    """Copy the rest, and let the old root lead to the new one; nobody has the store meanwhile."""
    with volume.guard("move the store", exclusive=True):
        # Only what came in meanwhile: the store's lock is not held while terabytes are copied.
        _copy_blobs(volume, new, copied, SILENT)
        for digest in (name.hex() for name in copied):
            if volume.index.blob(digest) is None:
                os.unlink(new.blob(digest))
        _copy_rest(volume, new)
        reached("move: copied")
        sync_directory(new.root)
        volume.close()
        # From here on the old root leads to the new one.
        _forward(volume.root, new.root)
        sync_directory(volume.root)
        reached("move: switched")


def _copy_blobs(volume: Volume, new: Layout, copied: set[bytes], job: Job) -> None:
    for blob in volume.index.records():
        name = bytes.fromhex(blob.digest)
        if name in copied or not blob.is_here:
            continue
        job.describe(volume.index.name_of(blob))
        try:
            _copy_blob(volume, blob.digest, new, job)
        except BlobNotFoundError:
            if volume.index.blob(blob.digest) is not None:
                raise
            continue  # pruned in the meantime
        copied.add(name)


def _copy_blob(volume: Volume, digest: str, new: Layout, job: Job) -> None:
    target = new.blob(digest)
    with suppress(FileNotFoundError):
        # What a killed move left is proven by its hash.
        if hash_file(Path(target), advance=job.advance)[0].digest == digest:
            return
        os.unlink(target)
    new.make_blob_directory(digest, sync=False)
    temporary = new.new_tmp()
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        try:
            st = os.stat(volume.layout.blob(digest))  # while it is copied somebody may prune it
        except FileNotFoundError as error:
            raise BlobNotFoundError(f"No blob {digest} in {volume.root}", digest=digest) from error
        copy_verified(volume, digest, descriptor, advance=job.advance)
        os.fchmod(descriptor, st.st_mode & 0o555 or READ_ONLY)
        os.utime(descriptor, ns=(st.st_mtime_ns, st.st_mtime_ns))
        os.fsync(descriptor)
        os.rename(temporary, target)
    finally:
        os.close(descriptor)
        temporary.unlink(missing_ok=True)


def _copy_rest(volume: Volume, new: Layout) -> None:
    """Copy the index, the journal and the side folders, under the exclusive lock."""
    old = volume.layout
    for name in ("trash", "bad"):
        shutil.copytree(old.root / name, new.root / name, dirs_exist_ok=True)
    if old.journal.exists():
        shutil.copy2(old.journal, new.journal)
    new.index.unlink(missing_ok=True)
    volume.index.backup(new.index)
    with closing(Index(new.index, wal=True)) as index, index.write(durable=True):
        index.set_note(MOVED_FROM, _quoted(volume.root))
        for blob in volume.index.records():
            if blob.is_here:
                st = os.stat(new.blob(blob.digest))
                index.refresh(blob.id, st, Trust.VERIFIED, synced=True)
    shutil.copy2(old.tag, new.tag)
    shutil.copy2(old.format, new.format)
    if old.listing.exists():
        shutil.copy2(old.listing, new.listing)
    new.root.chmod(os.stat(old.root).st_mode & 0o777)


def finish_move(volume: Volume) -> None:
    """Point symlinks at the new root and clear the old one, if a move was just made."""
    note = volume.index.note(MOVED_FROM)
    if note is None:
        return
    (former,) = _unquoted(note)
    old = Layout(former)
    links = [link for page in link_pages(volume, "symlink") for link in page]
    with volume.batch("mv") as batch:
        for link in links:
            _point_anew(volume, link, old.blob(link.digest), batch)
    reached("move: symlinks pointed")
    if old.forwarding() == volume.root:
        for path in old.root.iterdir():
            if path.name == "moved-to" or path.is_symlink():
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        _write_forwarding(old.root, volume.root, with_sets=has_sets(volume.layout))
    roots = dict.fromkeys([*former_roots(volume), old.root])
    volume.index.set_note(FORMER_ROOTS, " ".join(map(_quoted, roots)))
    (volume.root / _MOVING).unlink(missing_ok=True)
    volume.index.set_note(MOVED_FROM, None)
    reached("move: finished")


def _point_anew(volume: Volume, link: Link, old_target: str, batch: Batch) -> None:
    path = link.path
    try:
        st = os.lstat(path)
        if not path.is_symlink() or os.readlink(path) != old_target:
            return
    except FileNotFoundError:
        return
    temporary = beside(path)
    real = Path(os.path.realpath(path.parent), path.name)
    note = Change(op="own", path=path, real=real, digest=link.digest, size=0, temporary=temporary)
    with Spot(real) as spot:
        batch.begin([note])
        os.symlink(volume.layout.blob(link.digest), temporary.name, dir_fd=spot.fd)
        reached("move: temporary made")
        spot.swap_in(temporary.name, st.st_ino)
        spot.unlink(temporary.name)
    batch.end(note, "done")


def former_roots(volume: Volume) -> list[Path]:
    """Return the places this store was at before."""
    return _unquoted(volume.index.note(FORMER_ROOTS) or "")


def _quoted(path: Path) -> str:
    """Return a path as plain text that any database can hold."""
    return quote_from_bytes(os.fsencode(path))


def _unquoted(note: str) -> list[Path]:
    return [Path(os.fsdecode(unquote_to_bytes(text))) for text in note.split()]


def remove_former_roots(roots: list[Path]) -> None:
    """Remove the directories that lead from former roots to a store that is no more."""
    for root in roots:
        with suppress(OSError):  # somebody put something there, or has it now
            if check_own(root) is not None:
                (root / "moved-to").unlink(missing_ok=True)
                _remove_symlinks(root)
                root.rmdir()


def _remove_symlinks(root: Path) -> None:
    """Remove what leads from a former root to where things are."""
    for link in (root / "blobs", root / "sets"):
        if link.is_symlink():
            link.unlink()


def set_folders(layout: Layout) -> Iterator[Path]:
    """Go through the folders of all sets, and of datasets."""
    for outer in _directories(layout.sets):
        yield from (Path(inner.path) for inner in _directories(outer.path))


def has_sets(layout: Layout) -> bool:
    """Say whether there is any set, or a dataset; quick."""
    return any(True for _ in set_folders(layout))


def sets_size(layout: Layout) -> int:
    """Return the disk blocks of all sets."""
    return sum(allocated_bytes(os.lstat(path)) for path in _files(layout.sets))


@contextmanager
def _sets_held_still(volume: Volume) -> Iterator[None]:
    """Let nobody put anything into any set for the length of a block.

    StoreError if a process has a set open for writing: it would go on in files that are gone.
    """
    with ExitStack() as stack:
        for folder in set_folders(volume.layout):
            _refuse_what_is_no_file(folder)
            kind = "dataset" if folder.name == DATASET else "set"
            held = lock(
                folder / "lock", exclusive=True, timeout=volume.settings.lock_timeout,
                what="moving", on_wait=volume.on_wait, name=f"the {kind} {folder.parent.name}",
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


def _copy_sets(old: Layout, new: Layout, advance: Callable[[int], None]) -> None:
    """Copy all sets to another root, synced; what a killed copy left there is replaced."""

    def of_this_place(_: str, names: list[str]) -> list[str]:
        return [name for name in names if name == "leases" or name.startswith(".removed-")]

    shutil.rmtree(new.sets)
    # The directories alone.
    shutil.copytree(old.sets, new.sets, copy_function=lambda *_: None, ignore=of_this_place)
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


def _copy(source: Path, target: Path, advance: Callable[[int], None]) -> None:
    with open(open_own(source), "rb") as reading, open(target, "wb") as writing:
        copy_hashed(reading, writing.fileno(), advance)
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
