"""Give files back what they had before smartcache changed them: own bytes, mode, group, time.

Undo reads the journal backwards and looks at the disk before every step: a file that was changed or
replaced by somebody else since is left alone, with the reason said; of one that was deleted nothing
is left to undo, and its entry is closed. A file gets its own bytes by a copy beside it, hashed
while it is copied, and a rename; files that were one inode before are one inode again. Space is
checked before the first step.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from smartcache.errors import (
    FileChangedError,
    LeaseTimeoutError,
    NothingToUndoError,
    SmartcacheError,
)
from smartcache.progress import SILENT, Job, Progress, silent
from smartcache.store.blobs import commit, explained
from smartcache.store.digest import hash_file
from smartcache.store.faults import reached
from smartcache.store.filesystems import filesystem_id, free_bytes, nearest_existing
from smartcache.store.journal import UNDOABLE, Batch, Change
from smartcache.store.links import own_unlink
from smartcache.store.memos import hashes_of
from smartcache.store.own_copy import give_own_copy, link_to_twin, restore_missing
from smartcache.store.owners import (
    find_owner,
    journaled_pin,
    link_liveness,
    live_holders,
    living_symlinks,
)
from smartcache.store.proof import checked
from smartcache.store.restored import (
    TwinKey,
    is_our_link,
    is_restored,
    let_go,
    links_with_store,
    room_for,
    told_apart,
    twin_key,
)
from smartcache.store.room import Room
from smartcache.store.safety import open_own
from smartcache.store.schema import signed
from smartcache.store.share import give_own_blocks
from smartcache.store.swap import Spot
from smartcache.store.volume import Volume, has_row

_LEFT_ALONE = "changed or replaced by somebody else since; left as it is"
_AWAY = "its drive is not mounted; left as it is"

Outcome = Literal["undone", "gone", "left", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Undone:
    """What became of one change.

    "gone": the file was deleted since, nothing is left to undo. "left": somebody has changed it,
    and it stays so. "failed": it can be tried again; `note` says what is in the way.
    """

    change: Change
    outcome: Outcome
    note: str = ""

    @property
    def is_undone(self) -> bool:
        """Whether nothing of the change is left."""
        return self.outcome in ("undone", "gone")


@dataclass(frozen=True, slots=True, kw_only=True)
class Undoing:
    """One run of undo: its batch, and the restored files by the inode they had, to link twins."""

    batch: Batch
    twins: dict[TwinKey, Path]
    old_names: dict[tuple[str, int | None], set[Path]]
    """The names that adopted inodes had before, by digest and inode."""
    files: dict[tuple[str, int], int]
    """Which file of those that had its inode number, one after the other, a change was made to."""
    joined: set[Path]
    """Names that the store made links of blobs; every other name of an inode it had before."""
    job: Job = SILENT
    """Hears of every byte that is copied or hashed."""

    def twin_key(self, change: Change) -> TwinKey:
        """Name the file a path stood for before it was replaced."""
        return twin_key(change, self.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class UndoPlan:
    """The changes that would be undone, last first, and the space their own bytes need."""

    changes: tuple[Change, ...]
    needed_size: int
    free_size: int
    warnings: tuple[str, ...] = ()
    _room: Room = field(repr=False, compare=False)
    _execute: Callable[[UndoPlan, Progress], list[Undone]] = field(repr=False, compare=False)

    @property
    def freed_size(self) -> int:
        """Undo frees nothing: it needs `needed_size`."""
        return 0

    def execute(self, progress: Progress = silent) -> list[Undone]:
        """Undo the changes; raises NoSpaceError before the first one if they do not fit."""
        return self._execute(self, progress)


def plan_undo(volume: Volume, batches: Iterable[str] | None = None) -> UndoPlan:
    """Plan to undo the given batches, or all of them (None)."""
    wanted = None if batches is None else list(batches)
    changes = _open_changes(volume, wanted)
    if not changes:
        raise NothingToUndoError("There is nothing to undo")
    changes.reverse()
    room = room_for(volume, changes)
    return UndoPlan(
        changes=tuple(changes), needed_size=room.size, free_size=free_bytes(volume.root),
        _room=room, _execute=lambda plan, progress: _execute(volume, plan, progress),
    )  # fmt: skip


def last_batch(volume: Volume) -> str:
    """Return the id of the newest batch that can be undone."""
    history = volume.journal.history()
    if not history:
        raise NothingToUndoError("There is nothing to undo")
    return history[-1].id


def _open_changes(volume: Volume, wanted: list[str] | None) -> list[Change]:
    if wanted is None:
        found = volume.journal.open_changes()
    else:
        found = []
        known = {batch.id for batch in volume.journal.history()}
        for batch in wanted:
            if batch not in known:
                raise NothingToUndoError(f"There is no change {batch} to undo", batch=batch)
            found += volume.journal.open_changes(batch)
    return [change for change in found if change.op in UNDOABLE]


def _execute(volume: Volume, plan: UndoPlan, progress: Progress) -> list[Undone]:
    hint = "Free some space, or undo single changes by their id ('smartcache undo --list')."
    plan._room.require("Undo", hint=hint)  # noqa: SLF001 - ours
    # What comes back from the trash is hashed, not copied.
    total = plan.needed_size + sum(c.size for c in plan.changes if c.op == "forget")
    with (
        volume.leases.hold("undo", what="undo", on_wait=volume.on_wait),
        volume.batch("undo") as batch,
        progress("Undoing", total, "bytes") as job,
    ):
        undoing = new_undoing(volume, batch, job)
        return [undo_one(volume, change, undoing) for change in plan.changes]


def new_undoing(volume: Volume, batch: Batch, job: Job) -> Undoing:
    """Begin a run of undo with what the journal knows of files that belong together."""
    changes = volume.journal.changes()
    files = told_apart(changes)
    undoing = Undoing(batch=batch, twins={}, old_names={}, files=files, joined=set(), job=job)
    for change in changes:
        if change.op == "replace" and change.state == "undone" and change.place.is_file():
            undoing.twins[undoing.twin_key(change)] = change.place
        elif change.op in ("place", "replace") and change.state in ("begun", "done"):
            undoing.joined.add(change.path)
        elif change.op == "adopt":
            names = undoing.old_names.setdefault((change.digest, change.inode), set())
            names.add(change.path)
    return undoing


def undo_one(volume: Volume, change: Change, undoing: Undoing) -> Undone:
    """Undo one change and note it in the journal, or leave it and say why."""
    verbs: dict[str, Callable[[], str]] = {
        "adopt": lambda: undo_adopt(volume, change, undoing),
        "move": lambda: _undo_move(volume, change, undoing),
        "place": lambda: _undo_place(volume, change, undoing),
        "replace": lambda: _undo_replace(volume, change, undoing),
        "share": lambda: _undo_share(change, undoing),
        "forget": lambda: _undo_forget(volume, change, undoing.job),
    }
    outcome: Outcome = "undone"
    undoing.job.describe(change.path.name)
    try:
        with explained(change.path.parent):
            if is_gone(volume, change):
                outcome, note = "gone", ""
                volume.index.drop_link(change.path)
            elif is_restored(volume, change):
                note = _tidy(volume, change, undoing)
            else:
                note = verbs[change.op]()
        if note:
            outcome = "failed" if note == _AWAY else "left"
    except LeaseTimeoutError:
        raise  # somebody has the store: the next file would wait as long again
    except (SmartcacheError, OSError) as error:
        note = str(error)
        outcome = "left" if isinstance(error, FileChangedError) else "failed"
    if not note:
        undoing.batch.end(change, "undone" if outcome == "undone" else "gone")
        undoing.batch.flush()
        reached("undo: noted")
    return Undone(change=change, outcome=outcome, note=note)


def is_gone(volume: Volume, change: Change) -> bool:
    """Say whether nothing is left that could be undone: the file or the bytes were deleted.

    A file on a drive that is not mounted is not gone.
    """
    if change.op == "forget":
        is_trashed = os.path.lexists(volume.layout.trash / change.digest)
        return not is_trashed and not os.path.lexists(volume.layout.blob(change.digest))
    if os.path.lexists(change.place):
        return False
    if change.op == "move":
        blob = volume.index.blob(change.digest)
        return blob is None and not os.path.lexists(volume.layout.blob(change.digest))
    return not _is_away(volume, change)


def _is_away(volume: Volume, change: Change) -> bool:
    """Say whether the filesystem that a file was on is not there now."""
    link = volume.index.link(change.path)
    filesystem = change.filesystem or (None if link is None else link.filesystem)
    nearest = nearest_existing(change.place.parent)
    if filesystem is None:
        return nearest != change.place.parent
    return filesystem_id(nearest) != filesystem


def close_gone(volume: Volume) -> int:
    """Close the entries of the journal of which nothing is left to undo; return how many."""
    changes = [c for c in volume.journal.open_changes() if c.op in UNDOABLE and is_gone(volume, c)]
    if changes:
        with volume.batch("close") as batch:
            for change in changes:
                batch.end(change, "gone")
    return len(changes)


def _tidy(volume: Volume, change: Change, undoing: Undoing) -> str:
    if change.op == "move":
        _release_pin(volume, change, undoing.batch)
    if change.op != "forget":
        volume.index.drop_link(change.path)
        undoing.twins[undoing.twin_key(change)] = change.place
    return ""


def _undo_replace(volume: Volume, change: Change, undoing: Undoing) -> str:
    if not is_our_link(volume, change):
        return _missing_or_changed(change)
    key = undoing.twin_key(change)
    twin = undoing.twins.get(key) or _old_file(volume, change)
    if twin is None or not link_to_twin(volume, change, twin, undoing.batch):
        give_own_copy(volume, change, undoing.batch, undoing.job)
        undoing.twins[key] = change.place
    reached("undo: own bytes")
    let_go(volume, change.path)
    return ""


def _missing_or_changed(change: Change) -> str:
    # What is missing and not gone is on a drive that is not mounted.
    return _LEFT_ALONE if os.path.lexists(change.place) else _AWAY


def _old_file(volume: Volume, change: Change) -> Path | None:
    """Return another name of the very file that was replaced, if it was seen and is still there."""
    if (change.links or 1) == 1 or change.inode is None or change.filesystem is None:
        return None
    wanted = (change.size, change.mtime_ns, change.mode, change.uid, change.gid)
    for path in volume.index.paths_of(change.filesystem, change.inode):
        with suppress(OSError):
            st = os.lstat(path)
            found = (st.st_size, st.st_mtime_ns, st.st_mode & 0o7777, st.st_uid, st.st_gid)
            if st.st_ino == change.inode and found == wanted and stat.S_ISREG(st.st_mode):
                return Path(os.path.realpath(path.parent), path.name)
    return None


def _undo_share(change: Change, undoing: Undoing) -> str:
    """Give a file its own blocks again; one that was changed since has them by copy-on-write."""
    give_own_blocks(change, undoing.batch, undoing.job.advance)
    reached("undo: own bytes")
    return ""


def undo_adopt(volume: Volume, change: Change, undoing: Undoing) -> str:
    """Take the store's name off a file and give its mode back; a shared file gets own bytes."""
    source = volume.layout.blob(change.digest)
    if not is_our_link(volume, change):
        return _restore_mode(change)
    if not _is_inode_of(source, change) and not _restore_mode(change):
        # The store has other bytes of its own, as after a move to another filesystem.
        let_go(volume, change.path)
        return ""
    # If this process dies between taking the blob's name away and restoring the mode, the next open
    # finds this note and restores it.
    (note,) = undoing.batch.begin([replace(change, op="own", temporary=None)], sync=False)
    with volume.guard("undo", exclusive=True):
        blob = volume.index.blob(change.digest)
        is_alone = _is_alone(volume, change, source, undoing)
        if is_alone and not _is_held_besides(volume, change):
            if blob is not None:
                with volume.index.write(durable=True):
                    volume.index.drop_blob(blob.id)
            reached("undo: row removed")
            os.unlink(source)
            reached("undo: blob removed")
            reason = _restore_mode(change)
            undoing.batch.end(note, "done")
            return reason
    undoing.batch.end(note, "back")
    give_own_copy(volume, change, undoing.batch, undoing.job)
    let_go(volume, change.path)
    return ""


def _is_alone(volume: Volume, change: Change, source: str, undoing: Undoing) -> bool:
    """Say whether an adopted file shares its inode with the store and its own old names only."""
    try:
        st = os.lstat(source)
    except FileNotFoundError:
        return False
    if st.st_nlink > links_with_store(change) or not _is_inode_of(source, change):
        return False
    blob = volume.index.blob(change.digest)
    old_names = undoing.old_names.get((change.digest, change.inode), set()) | {change.path}
    links = [] if blob is None else volume.index.links_of(blob.id)
    return not any(
        link.kind == "hardlink"
        and link.path in undoing.joined
        and link.path not in old_names
        and link.inode == signed(st.st_ino)
        and link_liveness(volume, link) == "live"
        for link in links
    )


def _is_inode_of(source: str, change: Change) -> bool:
    """Say whether an adopted file still is the blob."""
    try:
        return os.path.samestat(os.lstat(source), os.lstat(change.place))
    except FileNotFoundError:
        return False


def _restore_mode(change: Change) -> str:
    """Give an adopted file its mode back, whatever was written into it since."""
    if not os.path.lexists(change.place):
        return _AWAY
    with Spot(change.place) as spot:
        st = spot.stat()
        if st is None or change.mode is None or st.st_ino != change.inode:
            return _LEFT_ALONE
        if stat.S_IMODE(st.st_mode) not in (change.mode, change.mode & 0o555):
            return _LEFT_ALONE  # somebody chose another mode since
        return spot.give_mode(change.mode, inode=st.st_ino, links=change.links or 1)


def _is_held_besides(volume: Volume, change: Change) -> bool:
    """Say whether an owner or a symlink holds a blob besides the link to be undone."""
    blob = volume.index.blob(change.digest)
    if blob is None:
        return False
    if living_symlinks(volume, blob):
        return True
    link = volume.index.link(change.path)
    through = None if link is None else link.owner
    return any(owner.id != through for owner, _ in live_holders(volume, blob))


def _undo_move(volume: Volume, change: Change, undoing: Undoing) -> str:
    """Put a file that was moved into the store back where it was, with its mode and time."""
    if os.path.lexists(change.place):
        is_same = is_our_link(volume, change)
        if not is_same or hashes_of(volume, change.place)[0].digest != change.digest:
            return "another file is in its place now; left in the store"
        # The process died before it removed the name, or somebody has linked the blob there. The
        # file gets its bytes; that its mode stays, if somebody has chosen it, is no reason to fail.
        _release_pin(volume, change, undoing.batch)
        undo_adopt(volume, change, undoing)
        return ""
    restore_missing(volume, change, undoing.batch, undoing.job)
    _release_pin(volume, change, undoing.batch)
    return ""


def _release_pin(volume: Volume, change: Change, batch: Batch) -> None:
    owner = find_owner(volume, "pin", change.kind or "")
    blob = volume.index.blob(change.digest)
    if owner is not None and blob is not None:
        with journaled_pin(batch, change.digest, owner.name, pinned=False):
            volume.index.release(owner.id, blob.id)


def _undo_place(volume: Volume, change: Change, undoing: Undoing) -> str:
    """Remove a link that was placed, if it still is that link and the store has its bytes.

    A file of a repo gets bytes of its own instead.
    """
    source = volume.layout.blob(change.digest)
    if not os.path.lexists(change.place):
        return _AWAY
    if not has_row(volume, change.digest):
        if os.path.islink(change.place) and os.readlink(change.place) == source:
            return "the store has lost the bytes it points to; left as it is"
        volume.index.drop_link(change.path)
        return ""  # the store has let go of the bytes: the file is the user's own
    checked(volume, change.digest)  # the bytes must be safe in the store before a name goes
    st = os.lstat(change.place)
    if not _is_as_placed(volume, change, source, st):
        return _LEFT_ALONE
    if not change.keep:
        with Spot(change.place) as spot:
            own = replace(change, op="own", temporary=None)
            (note,) = undoing.batch.begin([own], sync=False)
            with own_unlink(volume, change.digest):
                is_same = spot.inode() == st.st_ino
                if is_same:
                    spot.unlink()
                    reached("undo: link removed")
                    volume.index.drop_link(change.path)
            undoing.batch.end(note, "done")
        return "" if is_same else _LEFT_ALONE
    # Snapshots point at it, or the user has it in a folder.
    if change.kind in ("hardlink", "symlink"):
        give_own_copy(volume, change, undoing.batch, undoing.job)
    let_go(volume, change.path)
    return ""


def _is_as_placed(volume: Volume, change: Change, source: str, st: os.stat_result) -> bool:
    """Say whether the file at a path still is the link or copy that was placed, byte for byte."""
    if change.kind == "symlink":
        return stat.S_ISLNK(st.st_mode) and os.readlink(change.place) == source
    if os.path.samestat(st, os.stat(source)):
        return True
    link = volume.index.link(change.path)
    if link is None or link.digest != change.digest or link.inode != signed(st.st_ino):
        return False
    return hashes_of(volume, change.place)[0].digest == change.digest


def _undo_forget(volume: Volume, change: Change, job: Job) -> str:
    """Bring a blob back from the trash; it is hashed on the way."""
    trashed = volume.layout.trash / change.digest
    descriptor = open_own(trashed)
    try:
        hashes, _ = hash_file(descriptor, advance=job.advance, threads=volume.settings.threads)
    finally:
        os.close(descriptor)
    if hashes.digest != change.digest:
        return "the file in the trash is damaged; left there"
    commit(volume, trashed, hashes)
    trashed.unlink(missing_ok=True)
    return ""
