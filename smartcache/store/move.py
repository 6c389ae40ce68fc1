"""Move a store to another root; links stay right.

On the same filesystem the two directories change places in one step: the store is at the new root,
and the old root holds a `moved-to` file and a `blobs` symlink, so that programs and symlinks that
know the old place still work. On another filesystem every blob is copied and hashed on the way,
then the old root is switched over, then emptied. What remains to be done after the switch
(symlinks to point anew, old files to remove) is noted in the index first and finished by the next
open if this process dies. Artifact sets come along: renamed with the store they can stay open, and
a `sets` symlink leads to them; to be copied they must not be open for writing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote_from_bytes, unquote_to_bytes

from smartcache.errors import BlobNotFoundError, DestinationExistsError, NoSpaceError, StoreError
from smartcache.progress import SILENT, Job, Progress, silent
from smartcache.sizes import format_size
from smartcache.store.blobs import READ_ONLY, explained
from smartcache.store.copies import copy_verified
from smartcache.store.digest import hash_file
from smartcache.store.faults import reached
from smartcache.store.filesystems import free_bytes, nearest_existing
from smartcache.store.index import Index
from smartcache.store.journal import Batch, Change
from smartcache.store.kernel import exchange, sync_directory
from smartcache.store.layout import Layout, make_folders
from smartcache.store.records import Blob, Trust
from smartcache.store.safety import check_own, create_own, make_own
from smartcache.store.setfolders import copy_sets, has_sets, held_still, sets_size
from smartcache.store.swap import Spot, beside
from smartcache.store.volume import Volume, all_blobs, has_row, known_as

MOVED_FROM = "moved_from"
"""Note in the index: the old root of a move whose last steps are not done yet."""
FORMER_ROOTS = "former_roots"
"""Note in the index: where this store was before; each of these places leads here."""
_NEW_FORWARDING = ".moved-to-new"
_MOVING = ".moving"
_FORWARDING = frozenset({"moved-to", "blobs", "sets", _NEW_FORWARDING})
"""All that a former root may have in it."""
_PAGE = 500


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
    totals = volume.index.totals()
    copied = 0 if is_rename else totals.allocated + sets_size(volume.layout)
    warnings = []
    if not is_rename:
        warnings.append(
            "Another filesystem: files keep their bytes, but no longer share them with the store"
        )
    return MovePlan(
        root=volume.root, new_root=new_root, is_rename=is_rename, copied_size=copied,
        free_size=free_bytes(place), symlinks=sum(1 for _ in _symlinks(volume)),
        warnings=tuple(warnings),
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
    if _MOVING in names:
        return True
    is_forwarding = names <= _FORWARDING
    if new_root in former_roots(volume):
        return is_forwarding
    return is_forwarding and Layout(new_root).forwarding() in (None, volume.root, new_root)


def _execute(volume: Volume, plan: MovePlan, progress: Progress) -> Path:
    if plan.copied_size > plan.free_size:
        message = (
            f"The store needs {format_size(plan.copied_size)}, but"
            f" only {format_size(plan.free_size)} is free at {plan.new_root}; nothing was changed"
        )
        raise NoSpaceError(message, needed=plan.copied_size, free=plan.free_size)
    with explained(plan.new_root.parent):
        make_folders(plan.new_root.parent)
        with volume.leases.hold("move", what="move the store", on_wait=volume.on_wait):
            if plan.is_rename:
                _rename(volume, plan.new_root)
            else:
                _copy_over(volume, plan.new_root, progress)
    moved = Volume(plan.new_root, volume.settings, create=False)
    try:
        finish_move(moved)
    finally:
        moved.close()
    return plan.new_root


def _rename(volume: Volume, new_root: Path) -> None:
    _write_forwarding(new_root, new_root, with_sets=has_sets(volume.layout))
    reached("move: prepared")
    with volume.guard("move the store", exclusive=True):
        volume.index.set_note(MOVED_FROM, quote_path(volume.root))
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
    for directory in (new.blobs, new.sets, new.tmp, new.trash, new.bad, new.leases):
        directory.mkdir(mode=0o700, exist_ok=True)
        directory.chmod(os.stat(volume.root / directory.name).st_mode & 0o777)
    reached("move: prepared")
    copied: set[bytes] = set()
    with progress("Copying blobs", volume.index.totals().size, "bytes") as job:
        _copy_blobs(volume, new, copied, job)
    reached("move: blobs copied")
    timeout = volume.settings.lock_timeout
    with held_still(volume.layout, timeout=timeout, on_wait=volume.on_wait):
        with progress("Copying artifact sets", sets_size(volume.layout), "bytes") as job:
            copy_sets(volume.layout, new, job.advance)
        _switch(volume, new, copied)


def _switch(volume: Volume, new: Layout, copied: set[bytes]) -> None:
    """Copy the rest, and let the old root lead to the new one; nobody has the store meanwhile."""
    with volume.guard("move the store", exclusive=True):
        # Only what came in meanwhile: the store's lock is not held while terabytes are copied.
        _copy_blobs(volume, new, copied, SILENT)
        for digest in (name.hex() for name in copied):
            if not has_row(volume, digest):
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
    for blob in all_blobs(volume):
        name = bytes.fromhex(blob.digest)
        if name in copied or not blob.is_here:
            continue
        target = new.blob(blob.digest)
        job.describe(known_as(volume, blob))
        try:
            if not _is_there(target, blob.digest, job):
                _copy_blob(volume, blob, new, target, job)
        except BlobNotFoundError:
            if has_row(volume, blob.digest):
                raise
            continue  # pruned in the meantime
        copied.add(name)


def _is_there(target: str, digest: str, job: Job) -> bool:
    """Say whether a blob was copied already; what a killed move left is proven by its hash."""
    try:
        hashes, _ = hash_file(Path(target), advance=job.advance)
    except FileNotFoundError:
        return False
    if hashes.digest == digest:
        return True
    os.unlink(target)
    return False


def _copy_blob(volume: Volume, blob: Blob, new: Layout, target: str, job: Job) -> None:
    new.make_blob_directory(blob.digest, sync=False)
    temporary = new.new_tmp()
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        st = _stat(volume, blob)  # before: while it is copied somebody may prune it
        copy_verified(volume, blob.digest, descriptor, advance=job.advance)
        os.fchmod(descriptor, st.st_mode & 0o555 or READ_ONLY)
        os.utime(descriptor, ns=(st.st_mtime_ns, st.st_mtime_ns))
        os.fsync(descriptor)
        os.rename(temporary, target)
    finally:
        os.close(descriptor)
        temporary.unlink(missing_ok=True)


def _stat(volume: Volume, blob: Blob) -> os.stat_result:
    try:
        return os.stat(volume.layout.blob(blob.digest))
    except FileNotFoundError as error:
        message = f"No blob {blob.digest} in {volume.root}"
        raise BlobNotFoundError(message, digest=blob.digest) from error


def _copy_rest(volume: Volume, new: Layout) -> None:
    """Copy the index, the journal and the side folders, under the exclusive lock."""
    for name in ("trash", "bad"):
        shutil.copytree(volume.root / name, new.root / name, dirs_exist_ok=True)
    if volume.layout.journal.exists():
        shutil.copy2(volume.layout.journal, new.journal)
    new.index.unlink(missing_ok=True)
    volume.index.backup(new.index)
    index = Index(new.index, wal=True)
    try:
        with index.write(durable=True):
            index.set_note(MOVED_FROM, quote_path(volume.root))
            for blob in all_blobs(volume):
                if blob.is_here:
                    index.refresh(
                        blob.id, os.stat(new.blob(blob.digest)), Trust.VERIFIED, synced=True
                    )
    finally:
        index.close()
    shutil.copy2(volume.layout.tag, new.tag)
    shutil.copy2(volume.layout.format, new.format)
    if volume.layout.catalog.exists():
        shutil.copy2(volume.layout.catalog, new.catalog)
    new.root.chmod(os.stat(volume.root).st_mode & 0o777)


def finish_move(volume: Volume) -> None:
    """Point symlinks at the new root and clear the old one, if a move was just made."""
    note = volume.index.note(MOVED_FROM)
    if note is None:
        return
    old = Layout(Path(os.fsdecode(unquote_to_bytes(note))))
    with volume.batch("mv") as batch:
        for path, digest in list(_symlinks(volume)):
            _point_anew(path, old.blob(digest), volume.layout.blob(digest), digest, batch)
    reached("move: symlinks pointed")
    if old.forwarding() == volume.root:
        _clear_old_root(old, volume.root)
    former = [*former_roots(volume), old.root]
    volume.index.set_note(
        FORMER_ROOTS, " ".join(quote_path(root) for root in dict.fromkeys(former))
    )
    (volume.root / _MOVING).unlink(missing_ok=True)
    volume.index.set_note(MOVED_FROM, None)
    reached("move: finished")


def former_roots(volume: Volume) -> list[Path]:
    """Return the places this store was at before."""
    note = volume.index.note(FORMER_ROOTS) or ""
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


def quote_path(path: Path) -> str:
    """Return a path as plain text that any database can hold."""
    return quote_from_bytes(os.fsencode(path))


def _clear_old_root(old: Layout, new_root: Path) -> None:
    for name in os.listdir(old.root):
        path = old.root / name
        if name == "moved-to" or path.is_symlink():
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    _write_forwarding(old.root, new_root, with_sets=has_sets(Layout(new_root)))


def _point_anew(path: Path, old_target: str, new_target: str, digest: str, batch: Batch) -> None:
    try:
        st = os.lstat(path)
        if not path.is_symlink() or os.readlink(path) != old_target:
            return
    except FileNotFoundError:
        return
    temporary = beside(path)
    real = Path(os.path.realpath(path.parent), path.name)
    note = Change(op="own", path=path, real=real, digest=digest, size=0, temporary=temporary)
    with Spot(real) as spot:
        batch.begin([note])
        os.symlink(new_target, temporary.name, dir_fd=spot.fd)
        reached("move: temporary made")
        spot.swap_in(temporary.name, st.st_ino)
        spot.unlink(temporary.name)
    batch.end(note, "done")


def _symlinks(volume: Volume) -> Iterator[tuple[Path, str]]:
    after = ""
    while page := volume.index.links_after(after, _PAGE, kind="symlink"):
        after = str(page[-1].path)
        yield from ((link.path, link.digest) for link in page)
