"""Leave as if smartcache had never been here: every file its own again, then the store goes.

Files that were replaced get their own bytes, adopted ones their mode, links that were placed become
ordinary files. Files that share blocks with each other (reflinks) stay so: they are ordinary files,
have no tie to the store, and nobody can tell but by the space that is saved. Space is checked
before the first step. A store that has the last copy of something pinned, or artifacts that were
computed, is not removed unless that is allowed. Every step is one of `undo`, so a killed eject can
simply be run again; and while one file could not be given back, the store and its journal stay, for
the next try.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from smartcache.errors import (
    BlobInUseError,
    FileChangedError,
    LockTimeoutError,
    SmartcacheError,
    StoreError,
    UnsafeStoreError,
)
from smartcache.progress import Progress, silent
from smartcache.store.blobs import explained
from smartcache.store.changes import adopt
from smartcache.store.changes.journal import Change
from smartcache.store.changes.spot import Spot
from smartcache.store.changes.undo import Undone, new_undoing, room_for, undo_one
from smartcache.store.changes.userfile import Undoing, is_our_link
from smartcache.store.hashes import hashes_of
from smartcache.store.owners import held_alone, link_liveness, link_pages
from smartcache.store.records import Blob, Link
from smartcache.store.volume import Volume
from smartcache.system.faults import reached
from smartcache.system.filesystems import Room, free_bytes
from smartcache.system.kernel import allocated_bytes
from smartcache.system.ownfiles import check_own
from smartcache.system.sqlite import signed

_ANY_NUMBER = 1 << 30


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
    drop_pinned: bool
    drop_sets: bool
    _room: Room = field(repr=False, compare=False)
    _execute: Callable[[EjectPlan, Progress], list[Undone]] = field(repr=False, compare=False)

    def require_room(self) -> None:
        """Raise NoSpaceError if files that get bytes of their own do not fit where they are."""
        hint = "Free some space, or give files back a few at a time: smartcache undo."
        self._room.require("Giving every file its own bytes", hint=hint)

    def execute(self, progress: Progress = silent) -> list[Undone]:
        """Restore every file, then remove the store. Returns what was done to each file.

        If one has "failed", the store and the journal are still there: eject again.
        """
        return self._execute(self, progress)


def plan_eject(volume: Volume, *, drop_pinned: bool = False, drop_sets: bool = False) -> EjectPlan:
    """Plan to leave: every file gets its own bytes and its mode, and the store goes."""
    changes = [c for c in volume.journal.open_changes() if c.op in ("adopt", "replace")]
    changes.reverse()
    known = {change.path for change in changes if is_our_link(volume, change)}
    links = tuple(
        link
        for page in link_pages(volume)
        for link in page
        if link.kind == "hardlink" and link_liveness(link) == "live" and link.path not in known
    )
    room = room_for(volume, changes)
    for link in links:
        blob = volume.index.record(link.digest)
        room.add(link.path.parent, 0 if blob is None else blob.size)
    computed = 0
    for folder, _, names in os.walk(volume.layout.sets):
        for name in names:
            with suppress(FileNotFoundError):  # a program that computes has removed it
                computed += allocated_bytes(os.lstat(os.path.join(folder, name)))
    return EjectPlan(
        root=volume.root, changes=tuple(changes), links=links, needed_size=room.size,
        free_size=free_bytes(volume.root),
        freed_size=volume.index.totals().only_allocated + computed,
        pinned_only=() if drop_pinned else tuple(_pinned_only(volume)),
        sets=tuple(volume.layout.set_folders()), sets_size=computed,
        drop_pinned=drop_pinned, drop_sets=drop_sets, _room=room,
        _execute=lambda plan, progress: _execute(volume, plan, progress),
    )  # fmt: skip


def _pinned(volume: Volume) -> list[Blob]:
    """Return the blobs that are pinned now."""
    pins = [owner.id for owner in volume.index.owners() if owner.kind == "pin"]
    digests = {digest for pin in pins for digest in volume.index.digests_held_by(pin)}
    return list(filter(None, map(volume.index.blob, sorted(digests))))


def _pinned_only(volume: Volume) -> Iterator[str]:
    """Name pinned blobs without a link outside."""
    for blob in _pinned(volume):
        if held_alone(volume, blob) is not None and not _has_copy(volume, blob):
            yield blob.digest


def _has_copy(volume: Volume, blob: Blob) -> bool:
    """Say whether a copy outside that is on record still has a blob's bytes."""
    for link in volume.index.links_of(blob.id):
        if link.kind in ("copy", "reflink"):
            with suppress(OSError, StoreError):
                if hashes_of(volume, link.path)[0].digest == blob.digest:
                    return True
    return False


def _refuse_losing(volume: Volume, plan: EjectPlan, known: Collection[str] = ()) -> None:
    """Raise if something would be lost that must not be, unless that is allowed.

    That is the last copy of something pinned, other than what is `known`, and artifacts, which
    somebody has computed.
    """
    last = () if plan.drop_pinned else _pinned_only(volume)
    pinned = tuple(digest for digest in last if digest not in known)
    if pinned:
        message = f"{len(pinned)} pinned blobs exist only in the store, such as {pinned[0][:12]}"
        hint = "Place them first ('smartcache link'), unpin them, or allow it with --drop-pinned."
        raise BlobInUseError(message, hint=hint, digests=pinned)
    sets = () if plan.drop_sets else tuple(volume.layout.set_folders())
    if sets:
        message = f"{len(sets)} artifact sets would be lost, such as {sets[0].parent.name}"
        hint = "Copy their folders elsewhere, remove them, or allow it with --drop-artifacts."
        raise BlobInUseError(message, hint=hint, sets=sets)


def _execute(volume: Volume, plan: EjectPlan, progress: Progress) -> list[Undone]:
    _refuse_losing(volume, plan)
    pinned_before = {blob.digest for blob in _pinned(volume)}
    plan.require_room()
    with (
        volume.key_locks.hold("undo", what="eject", on_wait=volume.on_wait),
        volume.batch("eject") as batch,
        progress("Restoring files", plan.needed_size, "bytes") as job,
    ):
        undoing = new_undoing(volume, batch, job)
        results = []
        # Placed links first: once they have their own bytes, adopted files can keep their inode.
        for link in plan.links:
            results += _make_ordinary(volume, link, undoing)
        results += [undo_one(volume, change, undoing) for change in plan.changes]
    _refuse_losing(volume, plan, pinned_before)
    if not any(each.outcome == "failed" for each in results):
        remove_store(volume)
    return results


def _make_ordinary(volume: Volume, link: Link, undoing: Undoing) -> list[Undone]:
    """Turn a placed link into a writable file of its own; return what could not be done."""
    place = Path(os.path.realpath(link.path.parent), link.path.name)
    try:
        st = os.lstat(place)
    except FileNotFoundError:
        return []
    if signed(st.st_ino) != link.inode or stat.S_ISLNK(st.st_mode):
        return []  # another file is there now, or another folder
    if volume.index.record(link.digest) is None:
        return []  # undo has already taken the blob back into the user's own file
    change = Change.before("adopt", link.path, link.digest, st)
    change.real = None if place == link.path else place
    change.mode, change.links = st.st_mode & 0o777 | 0o200, 1
    undoing.job.describe(link.path.name)
    try:
        with explained(link.path.parent):
            adopt.undo(volume, change, undoing)
    except FileChangedError:
        # Somebody wrote into it: the bytes are the user's, and need the mode only.
        with suppress(SmartcacheError, OSError), Spot(place) as spot:
            spot.give_mode(change.mode or 0o644, inode=st.st_ino, links=_ANY_NUMBER)
    except LockTimeoutError:
        raise  # somebody has the store: the next file would wait as long again
    except (SmartcacheError, OSError) as error:
        return [Undone(change=change, outcome="failed", note=str(error))]
    return []


def remove_store(volume: Volume) -> None:
    """Remove the whole tree: first its name, in one step, then what was in it."""
    with volume.guard("eject", exclusive=True):
        reached("eject: files restored")
        volume.close()
        doomed = volume.root.with_name(f"{volume.root.name}.ejected-{secrets.token_hex(4)}")
        try:
            os.rename(volume.root, doomed)
        except OSError:  # the root is a mount point, or its parent is not ours
            doomed = volume.root
    reached("eject: renamed")
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
