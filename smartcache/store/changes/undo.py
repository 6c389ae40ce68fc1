"""The journal read again: what a dead process left is finished, what was changed is given back.

What an operation means after a crash and how it is undone stands in its own module (`finish`,
`undo`); here is what goes through the changes and asks.

**Recovery.** Everything in progress is claimed by a kernel lock that dies with its process. So a
tmp file whose lock is free belongs to nobody, and a batch whose lock is free ended in the middle.
Every step of a change leaves the user's file whole under its name; recovery only removes our
temporary names and gives modes back. It never fails the opening: what cannot be finished now (a
folder that cannot be written, Ctrl-C) keeps its file in `tmp/`, and the next open goes on with it.

**Undo** reads the journal backwards and looks at the disk before every step: a file that was
changed or replaced by somebody else since is left alone, with the reason said; of one that was
deleted nothing is left to undo, and its entry is closed. Files that were one inode before are one
inode again. Space is checked before the first step.
"""

from __future__ import annotations

import logging
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Literal

from smartcache.errors import (
    FileChangedError,
    LockTimeoutError,
    NothingToUndoError,
    SmartcacheError,
    StoreError,
)
from smartcache.progress import Job, Progress, silent
from smartcache.store.blobs import explained
from smartcache.store.changes import adopt as _adopt
from smartcache.store.changes import place as _place
from smartcache.store.changes import replace as _replace
from smartcache.store.changes.journal import UNDOABLE, Batch, Change, State
from smartcache.store.changes.spot import Spot, read_attributes
from smartcache.store.changes.userfile import (
    AWAY,
    TwinKey,
    Undoing,
    finish_own,
    is_blob,
    is_our_link,
)
from smartcache.store.hashes import hashes_of
from smartcache.store.owners import link_liveness
from smartcache.store.volume import Volume
from smartcache.system.faults import reached
from smartcache.system.filesystems import Room, filesystem_id, free_bytes, nearest_existing
from smartcache.system.kernel import effective_user
from smartcache.system.locks import Claim, claim

_log = logging.getLogger(__name__)
_VERBS: dict[str, ModuleType] = {"adopt": _adopt, "place": _place, "replace": _replace}

# recovery


def recover(volume: Volume) -> int:
    """Clear up after dead processes; return how many things were cleared."""
    cleared = 0
    for name in os.listdir(volume.layout.tmp):
        held = _claim(volume.layout.tmp / name)
        if held is None:
            continue
        is_finished = not name.startswith("batch-")
        try:
            if not is_finished:
                is_finished = _finish_batch(volume, name.removeprefix("batch-"))
            cleared += is_finished
        finally:
            # Also after Ctrl-C: the next open goes on.
            held.release(remove=is_finished)
    return cleared


def _claim(path: Path) -> Claim | None:
    try:
        return claim(path) if os.path.lexists(path) else None
    except (StoreError, OSError) as error:  # not a file: nothing of ours
        _log.debug("%s stays: %s", path, error)
        return None


def _finish_batch(volume: Volume, batch_id: str) -> bool:
    """Finish or take back what a dead batch has begun; False: something has to wait."""
    changes = volume.journal.changes(batch_id)
    begun = [change for change in changes if change.state == "begun"]
    if begun:
        _log.warning("finishing what an interrupted process left: %d files", len(begun))
    outcomes = Batch(volume.journal, volume.layout.tmp, "recovery")
    is_finished = True
    try:
        for change in begun:
            try:
                state = _finish(volume, change)
            except (SmartcacheError, OSError) as error:
                _log.warning("%s: not finished, the next command tries again: %s",
                             change.path, error)  # fmt: skip
                is_finished = False
            else:
                outcomes.end(change, state)
    finally:
        outcomes.flush()
    for change in changes:
        link = volume.index.link(change.path)
        if link is not None and link_liveness(link) == "dead":
            volume.index.drop_link(change.path)
    return is_finished


def _finish(volume: Volume, change: Change) -> State:
    """Finish one change or take it back; say which."""
    if change.op in ("pin", "unpin"):
        return "done"
    finish = finish_own if change.op == "own" else _VERBS[change.op].finish
    try:
        with Spot(change.place) as spot:
            state: State = finish(volume, change, spot)
            return state
    except FileNotFoundError:
        if os.path.lexists(change.place.parent):
            raise
        return "back"  # its folder was removed


# undo

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


def plan_undo(
    volume: Volume, batches: Iterable[str] | None = None, *, last: bool = False
) -> UndoPlan:
    """Plan to undo the given batches, the last one, or all of them (None)."""
    known = [batch.id for batch in volume.journal.history()]
    wanted = known[-1:] if last else None if batches is None else list(batches)
    for batch in wanted or ():
        if batch not in known:
            raise NothingToUndoError(f"There is no change {batch} to undo", batch=batch)
    found = [
        change
        for batch in ([None] if wanted is None else wanted)
        for change in volume.journal.open_changes(batch)
        if change.op in UNDOABLE
    ]
    if not found:
        raise NothingToUndoError("There is nothing to undo")
    found.reverse()
    room = room_for(volume, found)
    return UndoPlan(
        changes=tuple(found), needed_size=room.size, free_size=free_bytes(volume.root),
        _room=room, _execute=lambda plan, progress: _execute(volume, plan, progress),
    )  # fmt: skip


def room_for(volume: Volume, changes: list[Change]) -> Room:
    """Return what undoing writes on each filesystem: files may lie on others than the store's."""
    room = Room()
    devices = {
        folder: os.stat(nearest_existing(folder)).st_dev
        for folder in {change.place.parent for change in changes}
    }
    places: dict[int, list[Change]] = {}
    for change in changes:
        places.setdefault(devices[change.place.parent], []).append(change)
    files = _replace.told_apart(volume.journal.changes())
    for some in places.values():
        room.add(some[0].place.parent, _needed_bytes(volume, some, files))
    return room


def _needed_bytes(volume: Volume, changes: list[Change], files: dict[tuple[str, int], int]) -> int:
    """Return what undoing copies: own bytes for files that share theirs."""
    needed = 0
    ours = [change for change in changes if is_our_link(volume, change)]
    leaving = Counter(change.digest for change in ours if change.op in ("replace", "place"))
    replaced: set[TwinKey] = set()
    for change in ours:
        if change.op == "replace":
            # All names of a file get one copy.
            key = _replace.twin_key(change, files)
            needed += 0 if key in replaced else change.size
            replaced.add(key)
        elif change.op == "place" and change.keep:
            needed += change.size
        elif change.op == "adopt":
            needed += _adopt.needed_bytes(change, leaving[change.digest])
    return needed


def _execute(volume: Volume, plan: UndoPlan, progress: Progress) -> list[Undone]:
    hint = "Free some space, or undo single changes by their id ('smartcache undo --list')."
    plan._room.require("Undo", hint=hint)  # noqa: SLF001 - ours
    with (
        volume.key_locks.hold("undo", what="undo", on_wait=volume.on_wait),
        volume.batch("undo") as batch,
        progress("Undoing", plan.needed_size, "bytes") as job,
    ):
        undoing = new_undoing(volume, batch, job)
        return [undo_one(volume, change, undoing) for change in plan.changes]


def new_undoing(volume: Volume, batch: Batch, job: Job) -> Undoing:
    """Begin a run of undo with what the journal knows of files that belong together."""
    changes = volume.journal.changes()
    undoing = Undoing(batch=batch, files=_replace.told_apart(changes), job=job)
    for change in changes:
        if change.op == "replace" and change.state == "undone" and change.place.is_file():
            undoing.twins[_replace.twin_key(change, undoing.files)] = change.place
        elif change.op in ("place", "replace") and change.state in ("begun", "done"):
            undoing.joined.add(change.path)
        elif change.op == "adopt":
            names = undoing.old_names.setdefault((change.digest, change.inode), set())
            names.add(change.path)
    return undoing


def undo_one(volume: Volume, change: Change, undoing: Undoing) -> Undone:
    """Undo one change and note it in the journal, or leave it and say why."""
    outcome: Outcome = "undone"
    undoing.job.describe(change.path.name)
    try:
        with explained(change.path.parent):
            if is_gone(volume, change):
                outcome, note = "gone", ""
                volume.index.drop_link(change.path)
            elif is_restored(volume, change):
                note = ""
                volume.index.drop_link(change.path)
                undoing.twins[_replace.twin_key(change, undoing.files)] = change.place
            else:
                note = _VERBS[change.op].undo(volume, change, undoing)
        if note:
            outcome = "failed" if note == AWAY else "left"
    except LockTimeoutError:
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
    """Say whether nothing is left that could be undone: the file was deleted.

    A file on a drive that is not mounted is not gone.
    """
    if os.path.lexists(change.place):
        return False
    link = volume.index.link(change.path)
    filesystem = change.filesystem or (None if link is None else link.filesystem)
    nearest = nearest_existing(change.place.parent)
    if filesystem is None:
        return nearest == change.place.parent
    return filesystem_id(nearest) == filesystem


def is_restored(volume: Volume, change: Change) -> bool:
    """Say whether a change was undone already by a process that was killed before it noted it."""
    if change.op == "place":
        return False
    try:
        st = os.lstat(change.place)
    except FileNotFoundError:
        return False
    # Only root can give every group back.
    has_group = effective_user() != 0 or st.st_gid == change.gid
    has_xattrs = (change.xattrs or {}).items() <= read_attributes(change.place).items()
    found = (st.st_mode & 0o7777, st.st_size, st.st_mtime_ns)
    is_as_then = found == (change.mode, change.size, change.mtime_ns)
    is_apart = stat.S_ISREG(st.st_mode) and not is_blob(volume, change.digest, st)
    if not (has_group and has_xattrs and is_as_then and is_apart):
        return False
    return hashes_of(volume, change.place)[0].digest == change.digest


def close_gone(volume: Volume) -> int:
    """Close the entries of the journal of which nothing is left to undo; return how many."""
    changes = [c for c in volume.journal.open_changes() if c.op in UNDOABLE and is_gone(volume, c)]
    if changes:
        with volume.batch("close") as batch:
            for change in changes:
                batch.end(change, "gone")
    return len(changes)
