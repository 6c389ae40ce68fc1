"""Leave as if smartcache had never been here: every file its own again, then the store goes.

Files that were replaced get their own bytes, adopted ones their mode, moved ones their place,
links that were placed become ordinary files. Files that share blocks with each other (reflinks)
stay so: they are ordinary files, have no tie to the store, and nobody can tell but by the space
that is saved. Space is checked before the first step. A store that has the last copy of something
pinned, or artifacts that were computed, is not removed unless that is allowed. Every step is one of
`undo`, so a killed eject can simply be run again; and while one file could not be given back, the
store and its journal stay, for the next try.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from smartcache.errors import (
    BlobInUseError,
    FileChangedError,
    LeaseTimeoutError,
    SmartcacheError,
    StoreError,
    UnsafeStoreError,
)
from smartcache.progress import Progress, silent
from smartcache.store.blobs import explained
from smartcache.store.faults import reached
from smartcache.store.filesystems import free_bytes
from smartcache.store.journal import Change
from smartcache.store.memos import hashes_of
from smartcache.store.move import former_roots, remove_former_roots
from smartcache.store.own_copy import give_own_copy
from smartcache.store.owners import link_liveness
from smartcache.store.records import Blob, Link, Trust
from smartcache.store.restored import is_our_link, is_restored, room_for
from smartcache.store.room import Room
from smartcache.store.safety import check_own, open_own
from smartcache.store.schema import signed
from smartcache.store.setfolders import set_folders, sets_size
from smartcache.store.swap import Spot
from smartcache.store.undo import Undoing, Undone, new_undoing, undo_adopt, undo_one
from smartcache.store.volume import Volume, all_blobs

_PAGE = 1000
_ANY_NUMBER = 1 << 30
EJECTING = "ejecting"
"""Note in the index: files that share blobs are getting their modes back, then the store goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EjectPlan:
    """What leaving means: files to restore, space they need, and what exists only in the store."""

    root: Path
    changes: tuple[Change, ...]
    links: tuple[Link, ...]
    needed_size: int
    free_size: int
    freed_size: int
    pinned_only: tuple[str, ...]
    """Digests of pinned blobs whose last copy is the store's."""
    sets: tuple[Path, ...]
    """Folders of artifact sets: they go with the store, and nothing outside has them."""
    sets_size: int
    warnings: tuple[str, ...]
    keep_shared: bool
    drop_pinned: bool
    drop_sets: bool
    _room: Room = field(repr=False, compare=False)
    _execute: Callable[[EjectPlan, Progress], list[Undone]] = field(repr=False, compare=False)

    def require_room(self) -> None:
        """Raise NoSpaceError if files that get bytes of their own do not fit where they are."""
        hint = "Free some space, or let the files keep sharing their bytes with --keep-shared."
        self._room.require("Giving every file its own bytes", hint=hint)

    def execute(self, progress: Progress = silent) -> list[Undone]:
        """Restore every file, then remove the store. Returns what was done to each file.

        If one has "failed", the store and the journal are still there: eject again.
        """
        return self._execute(self, progress)


def plan_eject(
    volume: Volume,
    *,
    keep_shared: bool = False,
    drop_pinned: bool = False,
    drop_sets: bool = False,
) -> EjectPlan:
    """Plan to leave. `keep_shared` lets replaced files go on sharing one inode: no space needed."""
    undoable = ("adopt", "replace", "move")
    changes = [change for change in volume.journal.open_changes() if change.op in undoable]
    changes.reverse()
    known = {c.path for c in changes if c.op == "move" or is_our_link(volume, c)}
    links = tuple(link for link in _placed_links(volume) if link.path not in known)
    copied = [change for change in changes if not keep_shared or change.op == "move"]
    room = room_for(volume, copied)
    for link in links:
        if link.kind == "symlink" or not keep_shared:
            room.add(link.path.parent, _size(volume, link))
    pinned = () if drop_pinned else tuple(_pinned_only(volume, changes, links))
    warnings = []
    if keep_shared:
        warnings.append(
            "Files that were replaced keep sharing bytes: writing into one changes the others"
        )
    computed = sets_size(volume.layout)
    return EjectPlan(
        root=volume.root, changes=tuple(changes), links=links, needed_size=room.size,
        free_size=free_bytes(volume.root),
        freed_size=volume.index.totals().only_allocated + computed, pinned_only=pinned,
        sets=tuple(set_folders(volume.layout)), sets_size=computed,
        warnings=tuple(warnings),
        keep_shared=keep_shared, drop_pinned=drop_pinned, drop_sets=drop_sets, _room=room,
        _execute=lambda plan, progress: _execute(volume, plan, progress),
    )  # fmt: skip


def _placed_links(volume: Volume) -> Iterator[Link]:
    after = ""
    while page := volume.index.links_after(after, _PAGE):
        after = str(page[-1].path)
        for link in page:
            is_shared = link.kind in ("hardlink", "symlink")
            if is_shared and link_liveness(volume, link) == "live":
                yield link


def _size(volume: Volume, link: Link) -> int:
    blob = volume.index.blob(link.digest)
    return 0 if blob is None else blob.size


def _pinned_only(volume: Volume, changes: Iterable[Change], links: Iterable[Link]) -> Iterator[str]:
    """Name pinned blobs without a link outside, but not moved files whose place is still free."""
    returning = {
        change.digest for change in changes if change.op == "move" and _can_return(volume, change)
    }
    returning |= {link.digest for link in links if link.kind == "symlink"}
    for blob in all_blobs(volume):
        is_pinned = any(owner.kind == "pin" for owner in volume.index.holders_of(blob.id))
        if not is_pinned or blob.digest in returning or not _is_last(volume, blob.digest):
            continue
        if not _has_copy(volume, blob):
            yield blob.digest


def _has_copy(volume: Volume, blob: Blob) -> bool:
    """Say whether a copy outside that is on record still has a blob's bytes."""
    for link in volume.index.links_of(blob.id):
        if link.kind in ("copy", "reflink"):
            with suppress(OSError, StoreError):
                if hashes_of(volume, link.path)[0].digest == blob.digest:
                    return True
    return False


def _can_return(volume: Volume, change: Change) -> bool:
    """Say whether a moved file will find its place free, or has been put there already."""
    is_free = not os.path.lexists(change.path)
    return is_free or is_our_link(volume, change) or is_restored(volume, change)


def _is_last(volume: Volume, digest: str) -> bool:
    try:
        return os.stat(volume.layout.blob(digest)).st_nlink == 1
    except FileNotFoundError:
        return False


def _pinned(volume: Volume) -> set[str]:
    """Return the digests that are pinned now."""
    found = set()
    for blob in all_blobs(volume):
        if any(owner.kind == "pin" for owner in volume.index.holders_of(blob.id)):
            found.add(blob.digest)
    return found


def _refuse_losing_pinned(volume: Volume, plan: EjectPlan, known: set[str]) -> None:
    """Raise if the store has the last copy of something pinned, other than what is `known`."""
    found = () if plan.drop_pinned else _pinned_only(volume, plan.changes, plan.links)
    pinned = tuple(digest for digest in found if digest not in known)
    if pinned:
        message = f"{len(pinned)} pinned blobs exist only in the store, such as {pinned[0][:12]}"
        hint = "Place them first ('smartcache link'), unpin them, or allow it with --drop-pinned."
        raise BlobInUseError(message, hint=hint, digests=pinned)


def _refuse_losing_sets(volume: Volume, plan: EjectPlan) -> None:
    """Raise if there are artifacts, which somebody has computed, unless they may be lost."""
    found = () if plan.drop_sets else set_folders(volume.layout)
    if found:
        message = f"{len(found)} artifact sets would be lost, such as {found[0].parent.name}"
        hint = "Copy their folders elsewhere, remove them, or allow it with --drop-artifacts."
        raise BlobInUseError(message, hint=hint, sets=tuple(found))


def _execute(volume: Volume, plan: EjectPlan, progress: Progress) -> list[Undone]:
    keep_shared = plan.keep_shared
    _refuse_losing_pinned(volume, plan, set())
    _refuse_losing_sets(volume, plan)
    pinned_before = _pinned(volume)
    plan.require_room()
    with (
        volume.leases.hold("undo", what="eject", on_wait=volume.on_wait),
        volume.batch("eject") as batch,
        progress("Restoring files", plan.needed_size, "bytes") as job,
    ):
        undoing = new_undoing(volume, batch, job)
        results = []
        # Placed links first: once they have their own bytes, adopted files can keep their inode.
        modes: list[Change] = []
        for link in plan.links:
            results += _make_ordinary(volume, link, undoing, modes, keep_shared=keep_shared)
        for change in plan.changes:
            results.append(_restore(volume, change, undoing, modes, keep_shared=keep_shared))
    _refuse_losing_moved_files(results)
    _refuse_losing_pinned(volume, plan, pinned_before)
    _refuse_losing_sets(volume, plan)
    if not any(each.outcome == "failed" for each in results):
        remove_store(volume, modes)
    return results


def _refuse_losing_moved_files(results: list[Undone]) -> None:
    stuck = [r.change for r in results if r.change.op == "move" and r.outcome == "left"]
    if stuck:
        message = f"{stuck[0].path} was moved into the store and its place is taken"
        hint = "Move the file that is there away and run eject again; the store was kept."
        raise BlobInUseError(message, hint=hint, digests=tuple(c.digest for c in stuck))


def _restore(
    volume: Volume,
    change: Change,
    undoing: Undoing,
    modes: list[Change],
    *,
    keep_shared: bool,
) -> Undone:
    if keep_shared and change.op != "move":
        if is_our_link(volume, change):
            modes.append(replace(change, inode=os.lstat(change.place).st_ino))
        return Undone(change=change, outcome="undone")
    return undo_one(volume, change, undoing)


def _make_ordinary(
    volume: Volume, link: Link, undoing: Undoing, modes: list[Change], *, keep_shared: bool
) -> list[Undone]:
    """Turn a placed link into a writable file of its own; return what could not be done."""
    place = Path(os.path.realpath(link.path.parent), link.path.name)
    try:
        st = os.lstat(place)
    except FileNotFoundError:
        return []
    is_ours = stat.S_ISLNK(st.st_mode) or signed(st.st_ino) == link.inode
    if not is_ours or stat.S_ISLNK(st.st_mode) != (link.kind == "symlink"):
        return []  # another file is there now, or another folder
    blob = volume.index.blob(link.digest)
    if blob is None:
        # Undo has already taken the blob back into the user's own file.
        return []
    change = Change.before("adopt", link.path, link.digest, st)
    change.real = None if place == link.path else place
    change.mode, change.links = st.st_mode & 0o777 | 0o200, 1
    if link.kind == "hardlink" and keep_shared:
        modes.append(change)
        return []
    undoing.job.describe(link.path.name)
    try:
        with explained(link.path.parent):
            if link.kind == "hardlink":
                undo_adopt(volume, change, undoing)
            elif link.path.exists():  # else the blob behind the symlink is lost
                change.mode, change.mtime_ns = None, blob.key.mtime_ns
                give_own_copy(volume, change, undoing.batch, undoing.job)
                volume.index.drop_link(link.path)
    except FileChangedError:
        # Somebody wrote into it: the bytes are the user's, and need the mode only.
        modes.append(change)
    except LeaseTimeoutError:
        raise  # somebody has the store: the next file would wait as long again
    except (SmartcacheError, OSError) as error:
        return [Undone(change=change, outcome="failed", note=str(error))]
    return []


def finish_eject(volume: Volume) -> None:
    """Make blobs read-only again whose eject was killed at the very end: the store lives on."""
    if volume.index.note(EJECTING) is None:
        return
    for blob in all_blobs(volume):
        path = volume.layout.blob(blob.digest)
        with suppress(FileNotFoundError):
            descriptor = open_own(path)
            try:
                mode = os.fstat(descriptor).st_mode
                if mode & 0o222:
                    os.fchmod(descriptor, mode & 0o555)
                    volume.index.refresh(blob.id, os.fstat(descriptor), Trust.UNPROVEN)
            finally:
                os.close(descriptor)
    volume.index.set_note(EJECTING, None)


def remove_store(volume: Volume, modes: Iterable[Change] = ()) -> None:
    """Remove the whole tree: first its name, in one step, then what was in it.

    `modes` are of files that still share a blob: given when nothing can go wrong any more.
    """
    with volume.guard("eject", exclusive=True):
        reached("eject: files restored")
        volume.index.set_note(EJECTING, "1")
        for change in modes:
            with suppress(SmartcacheError, OSError), Spot(change.place) as spot:
                spot.give_mode(change.mode or 0o644, inode=change.inode or 0, links=_ANY_NUMBER)
        reached("eject: modes restored")
        former = former_roots(volume)
        volume.close()
        doomed = volume.root.with_name(f"{volume.root.name}.ejected-{secrets.token_hex(4)}")
        try:
            os.rename(volume.root, doomed)
        except OSError:  # the root is a mount point, or its parent is not ours
            doomed = volume.root
    reached("eject: renamed")
    remove_former_roots(former)
    clear_leftovers(volume.root)
    if doomed == volume.root:
        shutil.rmtree(doomed, ignore_errors=True)


def clear_leftovers(root: Path) -> list[Path]:
    """Remove what an eject that was killed at the very end left beside the root; return it."""
    found = []
    for leftover in sorted(root.parent.glob(f"{root.name}.ejected-*")):
        with suppress(UnsafeStoreError):  # not ours
            if check_own(leftover) is not None:
                shutil.rmtree(leftover)
                found.append(leftover)
    return found
