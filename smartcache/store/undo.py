"""The way back: undo, undo of single paths, and leaving for good (eject).

`Restoring` is one way for all of them. It looks at the disk before every step: a file that was
replaced since is left alone, and said; of one that was deleted nothing is left to undo. A file that
is the blob's inode, alone with the store, gets its mode back; another gets bytes of its own,
hashed, with the mode, time and attributes it had. Files that were one inode before are one inode
again. Undo takes away what was put at free paths; eject makes independent files of it.

A file that is no link of a blob, because the blob is gone, was damaged or never was one, goes the
same way with a new row (`own`): its copy has no name until the last moment, and it is leased.

Was a file deleted or renamed? The names we know are those that are this inode now; if the blob has
more, the file was renamed: its entry stays, and undo works when it is back, or where it is by now
(`undo PATH`). Space is checked before the first step. Exchanged files come first, blobs' own inodes
last: when the others have left, they are alone with the store.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import stat
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, cast

from smartcache import errors
from smartcache.progress import Job, Progress, silent
from smartcache.store.blobs import copy_hashed, is_there, linked_blob, pools_with, prove
from smartcache.store.catalog import RACY, FileRow
from smartcache.store.hashes import Read, believed, hashes_of
from smartcache.store.home import Home
from smartcache.store.journal import Batch, Change, State
from smartcache.store.layout import Layout, Pool, Work, explained, listed
from smartcache.store.link import CHUNK_BYTES, CHUNK_FILES, dress, finish_or_leave, is_of_store
from smartcache.store.userfile import Folders, Spot, beside, is_same, look, read_attributes
from smartcache.system import kernel
from smartcache.system.faults import reached
from smartcache.system.filesystems import Mounts, Room, free_bytes
from smartcache.system.hashing import hash_file
from smartcache.system.ownfiles import check_own

RENAMED = "renamed or moved since; to undo it, give its new path"
REPLACED = "replaced by somebody else since; left as it is"
DAMAGED = "its bytes are damaged; left as it is"
ONLY = "the store no longer has a copy of it; left as it is"
_TRIES = 3
_SKIPPED_FOLDERS = frozenset((".git",))
"""Read-only by themselves, and nobody writes there by hand."""

Outcome = Literal["undone", "gone", "renamed", "left", "failed"]
Way = Literal["own", "copy", "unlink"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Undone:
    """What became of one file.

    "gone": it was deleted since, nothing is left to undo. "renamed": its entry stays. "left":
    somebody has changed it, and it stays so. "failed": it can be tried again; `note` says why.
    """

    path: Path
    outcome: Outcome
    note: str = ""
    change: Change | None = None

    @property
    def is_undone(self) -> bool:
        """Whether nothing of the change is left."""
        return self.outcome in ("undone", "gone")


@dataclass(frozen=True, slots=True, kw_only=True)
class UndoPlan:
    """The changes that would be undone, last first, and the space their own bytes need."""

    changes: tuple[Change, ...]
    files: tuple[Path, ...] = ()
    """Files that get bytes of their own without an entry: they share them, or cannot be written."""
    skipped: tuple[tuple[Path, str], ...] = ()
    """Files that must stay as they are, and why."""
    freed_size: int = 0
    warnings: tuple[str, ...] = ()
    _home: Home = field(repr=False, compare=False)
    _room: Room = field(repr=False, compare=False)
    _hint: str = field(default="", repr=False, compare=False)
    _rows: Callable[[], list[Change]] = field(default=list, repr=False, compare=False)
    """Gives those that there are when it is carried out: what was interrupted is finished then."""
    _is_eject: bool = field(default=False, repr=False, compare=False)

    @property
    def needed_size(self) -> int:
        """Bytes that are copied."""
        return self._room.size

    @property
    def free_size(self) -> int:
        """Bytes that are free where the store is."""
        return free_bytes(self._home.layout.root)

    def execute(self, progress: Progress = silent) -> list[Undone]:
        """Undo the changes; raises NoSpaceError before the first one if they do not fit."""
        self._room.require("Undo", hint=self._hint)
        with progress("Undoing", self.needed_size, "bytes") as job:
            return Restoring(self._home, job, is_eject=self._is_eject).run(self._rows())


def plan_undo(home: Home, batches: Iterable[str] | None = None, *, last: bool = False) -> UndoPlan:
    """Plan to undo the given batches, the last one, or all of them (None)."""
    if not home.has_journal:
        raise errors.NothingToUndoError("There is nothing to undo")
    wanted = None if batches is None else list(batches)
    if wanted is not None or last:
        known = [batch.id for batch in home.journal.history()]
        wanted = known[-1:] if last else wanted
        for batch in wanted or ():
            if batch not in known:
                raise errors.NothingToUndoError(f"There is no change {batch} to undo", batch=batch)
    rows = home.journal.done(wanted)
    if not rows and not home.journal.has_open():
        raise errors.NothingToUndoError("There is nothing to undo")

    def rows_then() -> list[Change]:
        with home.changing("undo"):
            return home.journal.done(wanted)

    given = {row.digest for row in rows if row.how != "copy"}
    only = [
        row.path for row in rows
        if row.how == "copy" and row.digest not in given
        if look(row.path) is not None and not is_there(home, row.digest)
    ]  # fmt: skip
    hint = "Free some space, or undo single changes by their id ('smartcache undo --list')."
    return UndoPlan(
        changes=tuple(reversed(rows)), warnings=tuple(f"{path}: {ONLY}" for path in only),
        _home=home, _room=room_for(home, rows), _hint=hint, _rows=rows_then,
    )  # fmt: skip


def room_for(
    home: Home, rows: Sequence[Change], *, is_eject: bool = False, pins: Counter[str] | None = None
) -> Room:
    """Return what undoing writes on each filesystem: files may lie on others than the store's.

    `pins` go with the store: how many there are of each blob.
    """
    blobs: dict[tuple[int, str], os.stat_result | None] = {}
    ours: list[tuple[Change, os.stat_result]] = []
    leaving = Counter(pins or {})
    for row in rows:
        st = None if row.away or row.how == "copy" else look(row.path)
        if st is None:
            continue
        key = st.st_dev, row.digest
        if key not in blobs and row.how != "own":
            pool = home.pool_on(st.st_dev)
            blobs[key] = None if pool is None else pool.stat(row.digest)
        if row.how == "own" or is_same(st, blobs[key]):
            ours.append((row, st))
            leaving[row.digest] += row.how not in ("become", "own")
    needed: dict[int, tuple[Path, int]] = {}
    twins: set[tuple[str, int]] = set()
    heirs = _heirs([row for row, _ in ours], is_eject=is_eject)
    for row, st in ours:
        others = st.st_nlink - leaving[row.digest] - 1  # names that stay, besides the store's
        if row.how == "own":
            has_copy = st.st_nlink > 1
        elif id(row) in heirs:
            has_copy = others > (row.links if row.how == "become" else 0)
        else:
            has_copy = row.how != "create" or is_eject
        if row.how == "exchange" and row.links > 1:  # all names of a file get one copy
            has_copy = has_copy and (row.batch, row.inode) not in twins
            twins.add((row.batch, row.inode))
        place, before = needed.get(st.st_dev, (row.path.parent, 0))
        needed[st.st_dev] = place, before + row.size * has_copy
    room = Room()
    for place, size in needed.values():
        room.add(place, size)
    return room


def _heirs(rows: Sequence[Change], *, is_eject: bool) -> set[int]:
    """Return which rows (by `id`) come last: their files keep a blob's inode if all others left."""
    able = [
        row for row in rows
        if is_eject and row.how in ("exchange", "create", "give") and row.links == 1
    ]  # fmt: skip
    heirs = {row.digest: row for row in (*able, *(row for row in rows if row.how == "become"))}
    return {id(row) for row in rows if row.how == "become" or heirs.get(row.digest) is row}


# restore


class _SaidError(Exception):
    """Nothing is to be done with a path: its outcome, and what is said about it."""


@dataclass(slots=True, eq=False)
class _Back:
    """A file about to be itself again: what is open for it, and what has become of it."""

    row: Change
    change: Change
    """What it shall be: the row, or for a file that is no link of a blob one that is new."""
    spot: Spot
    pool: Pool | None
    """None: it is no link of a blob, but shares its bytes with somebody."""
    st: os.stat_result
    """Of the file that is there; of the copy as soon as there is one in our folder."""
    links: int = 1
    """Names besides the store's that it may have to keep its inode; 0: its twins get a copy too."""
    way: Way = "copy"
    fd: int = -1
    lease: kernel.Lease = "unsupported"
    copy: str = ""
    copy_fd: int = -1
    """A copy in our folder, or one without a name for a file that is no link of a blob."""
    key: kernel.StatKey | None = None
    """Of a copy that was put at the path, as it was hashed."""
    state: State | Literal["look"] = "done"
    outcome: Outcome | Literal["again"] = "failed"
    note: str = ""

    def close(self) -> None:
        if self.copy_fd >= 0:
            if is_same(self.spot.stat(self.change.temporary), os.fstat(self.copy_fd)):
                self.spot.unlink(self.change.temporary)
            os.close(self.copy_fd)
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = self.copy_fd = -1


class Restoring:
    """One run of undo or eject: gives files their own bytes and metadata back."""

    def __init__(
        self, home: Home, job: Job, *, is_eject: bool = False, is_leaving: bool = False
    ) -> None:
        """`is_eject`: what was put at free paths stays, as files of their own.

        `is_leaving`: the store goes, and its pins with it.
        """
        self._is_leaving = is_leaving
        self._home = home
        self._job = job
        self._is_eject = is_eject
        self._read = Read()
        self._renamed: set[str] = set()
        self._shared: set[int] = set()
        self._given: dict[str, set[Path]] = {}
        """Which files have got the bytes of a digest back."""
        self._results: dict[int, Undone] = {}
        self._fatal: OSError | None = None

    def run(self, rows: Sequence[Change]) -> list[Undone]:
        """Restore what rows tell of, last first; say what became of each."""
        home = self._home
        newest = {(row.path, row.digest): row for row in rows}
        self._renamed = _renamed(home, rows)
        for row in rows:  # of a file that is elsewhere, or no more: another has its place
            if row.how != "copy" and newest[row.path, row.digest] is not row:
                error = self._is_elsewhere(row, "gone")
                self._say(row, *error.args)
        order = [row for row in reversed(rows) if id(row) not in self._results]
        order.sort(key=lambda row: row.how == "become")
        self._shared = {row.inode for row in order if row.links > 1}
        there = [row for row in order if not self._is_eject or look(row.path) is not None]
        last = _heirs(there, is_eject=self._is_eject)
        try:
            for number in range(3):  # a copy may have become a blob since
                part = [
                    row for row in order if number == (2 if row.how == "copy" else id(row) in last)
                ]
                for _ in range(_TRIES):
                    part = self._part(part)
        finally:
            if home.layout.exists():  # else files have outlived it
                with home.locked("undo"):
                    home.journal.note(
                        ("undone", row.id) for row in rows
                        if (each := self._results.get(id(row))) is not None
                        and each.outcome in ("gone", "left") and each.note in ("", REPLACED, ONLY)
                    )  # fmt: skip
                home.end_batch()
        return [self._results[id(row)] for row in order if id(row) in self._results]

    def _part(self, rows: list[Change]) -> list[Change]:
        """Restore rows, a chunk at a time; return those to be tried once more."""
        again: list[Change] = []
        waiting = deque(rows)
        while waiting:
            again += self._chunk(waiting)
        if self._fatal is not None:
            with explained(self._home.layout.root):
                raise self._fatal
        return again

    def _chunk(self, waiting: deque[Change]) -> list[Change]:
        """Restore as many of the rows that wait as may be open at once."""
        folders, works, jobs, size = Folders(), dict[Path, Work](), list[_Back](), 0
        try:
            while waiting and len(jobs) < CHUNK_FILES and size < CHUNK_BYTES:
                row = waiting.popleft()
                try:
                    jobs.append(self._prepare(row, folders, works))
                    # Who wants to write a file that is leased waits no longer than for this one.
                    size += CHUNK_BYTES if jobs[-1].lease == "held" else row.size
                except _SaidError as said:
                    self._say(row, *said.args)
            if jobs:
                self._change(jobs)
            for job in jobs:
                self._say(job.row, job.outcome, job.note)
            return [job.row for job in jobs if job.outcome == "again"]
        finally:
            for job in jobs:
                job.close()
            folders.close()
            for work in works.values():
                work.close()

    def _say(self, row: Change, outcome: Outcome | Literal["again"], note: str = "") -> None:
        if outcome == "again":
            outcome, note = "failed", "it changes all the time"
        elif note == REPLACED and row.id and not self._home.journal.still_done([row.id]):
            outcome, note = "undone", ""  # by another process
        elif outcome == "undone" and row.how in ("become", "exchange", "give"):
            self._given.setdefault(row.digest, set()).add(row.path)
        self._results[id(row)] = Undone(path=row.path, outcome=outcome, note=note, change=row)

    # outside the lock: which way back there is

    def _prepare(
        self, row: Change, folders: Folders, works: dict[Path, Work], *, is_again: bool = False
    ) -> _Back:
        """Look which way back there is; make and hash the copy where one is needed."""
        job = None
        try:
            job = self._look(row, folders)
            if job.way == "copy":
                self._choose_way(job, works)
        except OSError as error:
            if job is not None:
                job.close()
            if isinstance(error, errors.DamagedBlobError):  # it is in bad/ by now
                if is_again:
                    raise _SaidError("left", DAMAGED) from error
                return self._prepare(row, folders, works, is_again=True)
            if is_of_store(error):
                with explained(row.path.parent):
                    raise
            is_changed = isinstance(error, errors.FileChangedError)
            raise _SaidError("left" if is_changed else "failed", str(error)) from error
        return job

    def _look(self, row: Change, folders: Folders) -> _Back:
        """Return what is to be done with what is at a path now, or raise."""
        if row.away:
            raise _SaidError("failed", f"{row.away}; left as it is")
        st: os.stat_result | None = None
        with suppress(FileNotFoundError):
            spot = folders.spot(row.path)
            st = spot.stat()
        if st is None:
            raise self._is_elsewhere(row, "gone")
        self._job.describe(row.path.name)
        pool = self._home.pool_on(st.st_dev)
        if row.how == "own":
            if st.st_ino != row.inode:
                raise errors.FileChangedError("another file is there now", path=row.path)
            return _apart(row, row, spot, st)
        if row.how == "copy":
            return self._look_at_copy(row, spot, pool, st)
        if pool is None:
            raise _SaidError("failed", "there is no pool on its filesystem now")
        if not is_same(st, pool.stat(row.digest)):
            return self._look_at_another(row, spot, pool, st)
        others = 0 if row.links > 1 else 1
        links = self._names(row, st) if row.how == "become" else others
        return _Back(row, row, spot, pool, st, links)

    def _look_at_copy(
        self, row: Change, spot: Spot, pool: Pool | None, st: os.stat_result
    ) -> _Back:
        """It goes, if it still is one, and its bytes are in the store or in another file."""
        if self._is_eject:
            raise _SaidError("undone")
        if not self._has_its_bytes(row, st):
            raise _SaidError("left", REPLACED)
        if not self._is_kept(row):
            raise _SaidError("left", ONLY)
        key = kernel.StatKey.of(st)
        return _Back(row, row, spot, pool or self._home.layout, st, way="unlink", key=key)

    def _is_kept(self, row: Change) -> bool:
        with suppress(errors.BlobNotFoundError, errors.DamagedBlobError):
            pool = pools_with(self._home, row.digest, near=row.path)[0]
            prove(self._home, pool, row.digest, read=self._read)
            return True
        return any(
            path != row.path and look(path) is not None for path in self._given.get(row.digest, ())
        )

    def _look_at_another(self, row: Change, spot: Spot, pool: Pool, st: os.stat_result) -> _Back:
        """Return what is to be done where another file is than the blob, or raise."""
        is_left = row.digest not in self._renamed or pool.stat(row.digest) is None
        if is_left and not st.st_mode & 0o222 and self._has_its_bytes(row, st):
            is_own = row.how == "become" and st.st_ino == row.inode
            return _apart(row, row, spot, st, self._names(row, st) if is_own else 1)
        if not any(is_same(st, look(pool.bad / name)) for name in listed(pool.bad)):
            raise self._is_elsewhere(row, "left", REPLACED)
        if not self._is_eject:  # somebody wrote through a link: that stays
            raise _SaidError("left", DAMAGED)
        return _apart(row, _as_it_is("", st, spot.path), spot, st)

    def _is_elsewhere(self, row: Change, outcome: Outcome, note: str = "") -> _SaidError:
        is_renamed = row.digest in self._renamed
        return _SaidError("renamed", RENAMED) if is_renamed else _SaidError(outcome, note)

    def _has_its_bytes(self, row: Change, st: os.stat_result) -> bool:
        is_it = stat.S_ISREG(st.st_mode) and st.st_size == row.size
        return is_it and hashes_of(self._home, row.path).digest == row.digest

    def _names(self, row: Change, st: os.stat_result) -> int:
        """Return how many names an adopted file had; one of somebody else's since is no twin."""
        return 1 if row.links > 1 and self._home.journal.joined(row, st) else row.links

    def _choose_way(self, job: _Back, works: dict[Path, Work]) -> None:
        """A file that is alone with the store keeps its inode; else it gets a copy."""
        row, pool = job.row, job.pool
        job.fd = job.spot.open()
        st = os.fstat(job.fd)
        if not is_same(st, job.st):
            raise errors.FileChangedError("another file is there now", path=row.path)
        if pool is not None and row.how == "create" and not self._is_eject:
            job.way = "unlink"  # the bytes must be safe in the store before a name goes
        elif self._is_alone(job, st):
            job.way = "own"
        else:
            self._own_copy(job, works)
            return
        if pool is not None and row.how != "become":
            prove(self._home, pool, row.digest, read=self._read)

    def _is_alone(self, job: _Back, st: os.stat_result) -> bool:
        """Say whether nobody else has a file's inode; a pin may be the name that a twin had."""
        if job.pool is None:
            return st.st_nlink <= job.links
        pins = _pins(job.pool, job.row.digest)
        names = st.st_nlink - len(pins) * self._is_leaving
        return names <= job.links + 1 and (self._is_leaving or not pins)

    def _own_copy(self, job: _Back, works: dict[Path, Work]) -> None:
        """Make a file with the bytes and the old metadata where nobody sees it."""
        change, pool = job.change, job.pool
        if pool is None:
            job.st, job.lease = os.fstat(job.fd), kernel.take_lease(job.fd)
            if job.lease == "busy":
                message = f"{change.path} is open for writing"
                raise errors.FileBusyError(message, path=change.path)
            fd = kernel.open_unnamed(change.path.parent)
            job.copy_fd = job.spot.create(change.temporary) if fd is None else fd
            self._fill(job, job.copy_fd)
            return
        if pool.root not in works:
            works[pool.root] = Work(pool)
        facts = change.inode, change.mtime_ns, change.mode, change.gid, change.digest
        job.copy = works[pool.root] / change.temporary
        twin = works[pool.root] / "-".join(("twin", *map(str, facts)))
        has_twins = change.inode in self._shared  # names of one file stay one
        with suppress(FileNotFoundError):
            os.unlink(job.copy)
        if has_twins and look(twin) is None:
            self._find_twin(change, twin)
        if has_twins and look(twin) is not None:
            os.link(twin, job.copy)
        else:
            target = os.open(job.copy, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                self._fill(job, target)
            finally:
                os.close(target)
            if has_twins:
                os.link(job.copy, twin)
        job.st = os.lstat(job.copy)

    def _fill(self, job: _Back, target: int) -> None:
        """Copy a file's bytes, which must be those that are meant, and what belongs to it."""
        change = job.change
        copied = copy_hashed(job.fd, target, self._job.advance)
        if change.digest not in ("", copied):
            if job.pool is not None:
                prove(self._home, job.pool, change.digest)  # raises, and sets it aside
            message = f"{change.path} was written to while it was copied"
            raise errors.FileChangedError(message, path=change.path)
        change.digest = copied
        dress(target, change)
        os.fsync(target)
        reached("copied")

    def _find_twin(self, change: Change, twin: str) -> None:
        """Another name of the same old file has its bytes again, or never was replaced."""
        home = self._home
        paths = [other.path for other in home.journal.twins(change)]
        filesystem = home.filesystem(change.path.parent)
        paths += [each.path for each in home.catalog.files(inode=(filesystem, change.inode))]
        wanted = change.size, change.mtime_ns, change.mode, change.gid, kernel.effective_user()
        for path in paths:
            with suppress(OSError), Spot(Path(os.path.realpath(path.parent), path.name)) as spot:
                fd = spot.open()
                try:
                    st = os.fstat(fd)
                    pool = home.pool_on(st.st_dev)
                    if (
                        (st.st_size, st.st_mtime_ns, st.st_mode & 0o777, st.st_gid, st.st_uid)
                        == wanted
                        # The blob may look like the old file, or be it.
                        and ((st.st_ino == change.inode and change.how != "become")
                             or pool is None or not is_same(st, pool.stat(change.digest)))
                        and kernel.take_lease(fd) != "busy"
                        and hash_file(fd)[0].digest == change.digest
                    ):  # fmt: skip
                        spot.link_to(twin)
                        return
                finally:
                    os.close(fd)

    # inside the lock

    def _change(self, jobs: list[_Back]) -> None:
        home = self._home
        try:
            with explained(home.layout.root), home.changing("undo"):
                mine = self._mark(jobs)
                boots = _boots(home, mine)
                for job in mine:
                    self._step(job)
                for spot in {job.row.path.parent: job.spot for job in mine}.values():
                    spot.sync()
                for job in mine:
                    if job.state == "look":
                        job.change.state = "undoing"
                        state = finish_or_leave(home, job.change)
                        job.state = "undoing" if state == "hash" else state
                    if job.state != "undoing" and job.copy:
                        with suppress(FileNotFoundError):
                            os.unlink(job.copy)
                reached("copies removed")
                if home.layout.exists():
                    self._note(mine)
                    self._remember([job for job in mine if job.pool is not None], boots)
        except BaseException:
            with suppress(errors.StoreError, OSError):
                home.finish_open()
            raise

    def _mark(self, jobs: list[_Back]) -> list[_Back]:
        """Write down what is being undone; return what another process has not undone before."""
        home, mine = self._home, list[_Back]()
        if not home.layout.exists():  # files have outlived it
            return jobs
        still = home.journal.still_done([job.row.id for job in jobs])
        for job in jobs:
            change = job.change
            if job.row.id and job.row.id not in still:
                job.outcome = "undone"
                continue
            mine.append(job)
            if job.way == "own":  # finish gives the mode to this file, should we be killed
                st = os.fstat(job.fd)
                wanted = 0 if change.how == "become" else change.mtime_ns
                change.inode, change.mtime_ns = st.st_ino, wanted or st.st_mtime_ns
        if new := [job.change for job in mine if job.copy_fd >= 0]:
            home.journal.begin(Batch("undo"), new, Mounts())
        home.journal.note_undoing(job.change for job in mine if job.pool is not None)
        return mine

    def _note(self, jobs: list[_Back]) -> None:
        """Write down what became of changes; of a new row nothing is left to be undone."""
        states = [(job.state, job.change.id) for job in jobs if job.change.id]
        states += [("undone", job.row.id) for job in jobs
                   if job.row is not job.change and job.outcome == "undone"]  # fmt: skip
        self._home.journal.note(states)  # type: ignore[arg-type]

    def _step(self, job: _Back) -> None:
        job.state = "undone" if job.pool is None else "done"
        if self._fatal is not None:
            job.note = str(self._fatal)
            return
        try:
            self._back(job)
        except OSError as error:
            job.state, job.outcome, job.note = "look", "failed", str(error)
            if is_of_store(error):
                self._fatal = error

    def _back(self, job: _Back) -> None:
        change, spot, st = job.change, job.spot, job.spot.stat()
        meant = job.st if job.pool is None else job.pool.stat(change.digest)
        is_it = kernel.StatKey.of(st) == job.key if job.key and st else is_same(st, meant)
        if st is None or not is_it:
            job.outcome, job.note = "left", REPLACED
            return
        if job.way == "unlink":
            spot.unlink()
        elif job.way == "copy":
            if job.copy:
                spot.take(job.copy, change.temporary)
            else:
                _name_copy(job)
            reached("own copy")
            if not spot.swap_in(change.temporary, st.st_ino):
                spot.unlink(change.temporary)
                job.outcome, job.note = "left", REPLACED
                return
        elif self._is_alone(job, st):
            self._give_inode(job, st)
        else:
            job.outcome = "again"
            return
        reached("in place")
        job.state, job.outcome = "undone", "undone"

    def _give_inode(self, job: _Back, st: os.stat_result) -> None:
        """Let a file be itself again that nobody else has any more."""
        change, how = job.change, job.row.how
        if how == "exchange":
            dress(job.fd, change)
        if job.pool is not None:
            for pin in _pins(job.pool, change.digest) if self._is_leaving else ():
                os.unlink(pin)
            os.unlink(job.pool.blob(change.digest))
            reached("blob removed")
        if how != "become" or not st.st_mode & stat.S_IWUSR:  # else somebody chose it
            os.fchmod(job.fd, change.mode & 0o777)

    def _remember(self, jobs: list[_Back], boots: dict[tuple[Path, str], str]) -> None:
        """Write down what inodes are now: our own links and unlinks moved their times."""
        home, gone, rows = self._home, list[Path](), dict[int, FileRow]()
        for job in jobs:
            pool, path, digest = cast("Pool", job.pool), job.row.path, job.row.digest
            place = Path(pool.blob(digest))
            here, blob = look(path), look(place)
            for each, st in ((path, here), (place, blob)):
                is_blob = is_same(st, blob)
                if st is None:
                    gone.append(each)
                elif is_blob or (job.state == "undone" and is_same(st, job.st)):
                    # A copy of ours was synced.
                    is_copy = job.way == "copy" and not is_blob
                    boot = "" if is_copy else boots.get((pool.root, digest), RACY)
                    if abs(st.st_ctime_ns - st.st_mtime_ns) < kernel.RACY_NS:
                        boot = RACY
                    names = (*(rows[st.st_ino].names if st.st_ino in rows else ()), each)
                    rows[st.st_ino] = FileRow.of(pool.filesystem, st, digest, boot, names)
        with suppress(errors.StoreError), home.catalog.write():
            home.catalog.remember(rows.values())
            home.catalog.forget_names(gone)


def _apart(row: Change, shall_be: Change, spot: Spot, st: os.stat_result, links: int = 1) -> _Back:
    """Return the job for a file that is no link of a blob, but shares its bytes."""
    change = replace(
        shall_be, how="own", state="undoing", id=0, path=spot.path, temporary=beside(spot.name),
        folder=os.fstat(spot.fd).st_ino,
    )  # fmt: skip
    return _Back(row, change, spot, None, st, links)


def _pins(pool: Pool, digest: str) -> list[Path]:
    """Return the names that a blob has as pins."""
    return [pin for name in listed(pool.pins) if look(pin := pool.pins / name / digest) is not None]


def _name_copy(job: _Back) -> None:
    """Put the copy beside its file, unless that was written since it was read."""
    change, now = job.change, os.fstat(job.fd)
    is_as_before = (now.st_size, now.st_mtime_ns) == (job.st.st_size, job.st.st_mtime_ns)
    if not is_as_before or (job.lease == "held" and not kernel.lease_intact(job.fd)):
        message = f"{change.path} was changed while it was copied"
        raise errors.FileChangedError(message, path=change.path)
    if job.spot.stat(change.temporary) is None:
        kernel.link_fd(job.copy_fd, change.path.parent / change.temporary)


def _boots(home: Home, jobs: list[_Back]) -> dict[tuple[Path, str], str]:
    """Return for which boot the blobs are believed that are, before their times are moved."""
    found = {}
    for pool in {job.pool for job in jobs if job.pool is not None}:
        digests = {job.row.digest for job in jobs if job.pool is pool}
        blobs = [(digest, st) for digest in digests if (st := pool.stat(digest)) is not None]
        known = home.catalog.known(pool.filesystem, [st.st_ino for _, st in blobs])
        for digest, st in blobs:
            if believed(row := known.get(st.st_ino), st, home.boot) == digest and row is not None:
                found[pool.root, digest] = row.boot
    return found


def _renamed(home: Home, rows: Iterable[Change]) -> set[str]:
    """Return digests whose blob has names that we do not know: what is missing was renamed."""
    pools = home.pools()
    blobs: dict[str, list[os.stat_result]] = {}
    missing: set[str] = set()
    last: dict[tuple[Path, str], Change] = {}
    for row in (row for row in rows if row.how not in ("copy", "own") and not row.away):
        if last.setdefault((row.path, row.digest), row) is not row:
            missing.add(row.digest)  # one of the two was moved, or is no more
        if row.digest not in blobs:
            blobs[row.digest] = [st for pool in pools if (st := pool.stat(row.digest)) is not None]
        here = look(row.path) if blobs[row.digest] else None
        if blobs[row.digest] and not any(is_same(here, st) for st in blobs[row.digest]):
            missing.add(row.digest)
    if not missing:
        return set()
    known: set[Path | str] = set()
    for change in home.journal.with_digests(missing):
        known |= {change.path, change.path.with_name(change.temporary or change.path.name)}
    for top in (top for pool in pools for top in (pool.pins, pool.tmp)):
        known |= {top / name / each for name in listed(top) for each in listed(top / name)}
    count = {(st.st_dev, st.st_ino): 1 for digest in missing for st in blobs[digest]}
    for path in known:
        st = look(path)
        if st is not None and (st.st_dev, st.st_ino) in count:
            count[st.st_dev, st.st_ino] += 1
    return {
        digest for digest in missing
        if any(st.st_nlink > count[st.st_dev, st.st_ino] for st in blobs[digest])
    }  # fmt: skip


# undo PATH


def plan_undo_paths(
    home: Home, paths: Iterable[str | Path], *, recursive: bool = False
) -> UndoPlan:
    """Plan to make independent, writable files of some that are links, and of those in folders.

    One without an entry gets its bytes and the permission to write; it may be no link of ours, but
    share its bytes with others or be read-only.
    """
    known = home.journal.done(None) if home.has_journal else []
    rows = {row.path: row for row in known if row.how != "copy"}
    lost: dict[tuple[str, str], list[Change]] = {}
    for row in rows.values():
        lost.setdefault((row.digest, row.path.name), []).append(row)
    changes: list[Change] = []
    files: list[Change] = []
    skipped: list[tuple[Path, str]] = []
    in_store: dict[Path, bool] = {}
    for path in dict.fromkeys(each for one in paths for each in _files_at(one, recursive)):
        real = Path(os.path.realpath(path.parent), path.name)
        st = os.lstat(real)
        if (above := real.parent) not in in_store:
            in_store[above] = any(Layout(folder).exists() for folder in real.parents)
        problem = "it belongs to a store of smartcache" if in_store[above] else _why_not(real, st)
        if problem:
            skipped.append((path, problem))
            continue
        change = rows.get(real)
        digest = _digest_of_link(home, real, st, change)
        if not digest:
            if st.st_nlink > 1 or not st.st_mode & stat.S_IWUSR:
                files.append(replace(_as_it_is("", st, real), how="own", inode=st.st_ino))
            continue
        if change is None or change.digest != digest:
            others = (r for r in lost.get((digest, real.name), ()) if not is_same(look(r.path), st))
            change = next(others, None) or _as_it_is(digest, st, real)
            change.path, change.folder = real, os.stat(real.parent).st_ino
        changes.append(change)

    def rows_then() -> list[Change]:
        if not changes:  # there need not be a store
            return files
        with home.changing("undo"):
            done = {(row.path, row.digest): row for row in home.journal.done(None)}
            now = [each if each.id else done.get((each.path, each.digest), each)
                   for each in changes]  # fmt: skip
            home.journal.begin_or_move(Batch("undo"), now, Mounts())
        return [*now, *files]

    return UndoPlan(
        changes=tuple(changes), files=tuple(each.path for each in files), skipped=tuple(skipped),
        _home=home, _room=room_for(home, [*changes, *files], is_eject=True),
        _hint="Free some space, or undo fewer files.", _rows=rows_then, _is_eject=True,
    )  # fmt: skip


def _as_it_is(digest: str, st: os.stat_result, path: Path) -> Change:
    """Return the change of a file of which nothing is written down: what it shows it shall be."""
    return Change(
        how="give", path=path, digest=digest, size=st.st_size, temporary=beside("link"),
        mode=st.st_mode & 0o777 | stat.S_IWUSR, gid=st.st_gid, mtime_ns=st.st_mtime_ns,
        xattrs=json.dumps(read_attributes(path)), folder=os.stat(path.parent).st_ino, state="done",
    )  # fmt: skip


def _digest_of_link(home: Home, path: Path, st: os.stat_result, row: Change | None) -> str:
    """Return the digest of the blob that a file is a link of; "": of none."""
    pool = home.pool_on(st.st_dev)
    if pool is None:
        return ""
    if row is not None and is_same(pool.stat(row.digest), st):
        return row.digest
    if st.st_nlink == 1 or not home.layout.exists():
        return ""
    if (known := linked_blob(home, st)) is not None:
        return known[1]
    digest = hashes_of(home, path).digest
    return digest if is_same(pool.stat(digest), st) else ""


def _files_at(path: str | Path, recursive: bool) -> Iterator[Path]:  # noqa: FBT001 - of our own
    absolute = Path(os.path.abspath(path))
    if not stat.S_ISDIR(os.lstat(absolute).st_mode):
        yield absolute
        return
    if not recursive:
        raise errors.FileSkippedError(
            f"{path} is a folder", hint="Use -r for all files in it.", reason="folder", path=path
        )
    for directory, folders, names in os.walk(absolute):
        folders[:] = sorted(
            name
            for name in folders
            if name not in _SKIPPED_FOLDERS and not Layout(Path(directory, name)).exists()
        )
        for name in sorted(names):
            each = Path(directory, name)
            if stat.S_ISREG(os.lstat(each).st_mode):  # whatever symlinks lead to is not meant
                yield each


def _why_not(path: Path, st: os.stat_result) -> str:
    if stat.S_ISLNK(st.st_mode):
        return f"it is a symlink; name the file it leads to: {os.path.realpath(path)}"
    if not stat.S_ISREG(st.st_mode):
        return "it is not a regular file"
    if st.st_uid != kernel.effective_user():
        return "it belongs to another user"
    return ""


# eject


@dataclass(frozen=True, slots=True, kw_only=True)
class EjectPlan(UndoPlan):
    """What leaving means: files to restore, space they need, and what exists only in the store."""

    root: Path
    pools: tuple[Path, ...]
    links: tuple[Change, ...]
    """Links of which nothing is written down: the index tells of them."""
    pinned_only: tuple[str, ...]
    """Digests of pinned blobs whose last copy is the store's."""
    sets: tuple[Path, ...]
    """Folders of artifact sets: they go with the store, and nothing outside has them."""
    sets_size: int
    drop_pinned: bool
    drop_sets: bool

    def require_room(self) -> None:
        """Raise NoSpaceError if files that get bytes of their own do not fit where they are."""
        hint = "Free some space, or give files back a few at a time: smartcache undo."
        self._room.require("Giving every file its own bytes", hint=hint)

    def execute(self, progress: Progress = silent) -> list[Undone]:
        """Restore every file, then remove the store. Returns what was done to each file.

        If one has "failed" or was "renamed", the store is still there: eject again.
        """
        return _eject(self._home, self, progress)


def plan_eject(home: Home, *, drop_pinned: bool = False, drop_sets: bool = False) -> EjectPlan:
    """Plan to leave: every file gets its own bytes and its mode, and the store goes."""
    rows = home.journal.done(None) if home.has_journal else []
    rows.reverse()
    links, pinned_only, freed, pinned = list[Change](), list[str](), 0, Counter[str]()
    at = {row.path for row in rows}
    twins = {row.digest: row.links - 1 for row in rows if row.how == "become"}
    for pool in home.pools():
        pins, inodes = pool.pinned(), pool.pin_inodes()
        pinned.update({digest: len(names) for digest, names in pins.items()})
        for digest, st in pool.stats():
            if st.st_nlink - 1 - inodes[st.st_ino] <= 0:
                freed += kernel.allocated_bytes(st)
                if digest in pins:
                    pinned_only.append(digest)
                continue
            paths = (f.path for f in home.catalog.files(inode=(pool.filesystem, st.st_ino)))
            found = [
                _as_it_is(digest, st, Path(os.path.realpath(path.parent), path.name))
                for path in paths
                if not path.is_relative_to(pool.root) and path not in at and is_same(look(path), st)
            ]  # fmt: skip
            if len(found) > twins.get(digest, 0):  # else the other names of the file itself
                links += found
    room = room_for(home, [*rows, *links], is_eject=True, pins=pinned)
    computed = 0
    for folder, _, names_ in os.walk(home.layout.sets):
        for name in names_:
            with suppress(FileNotFoundError):  # a program that computes has removed it
                computed += kernel.allocated_bytes(os.lstat(os.path.join(folder, name)))
    lonely = tuple(digest for digest in pinned_only if not _has_copy(home, digest))
    return EjectPlan(
        root=home.layout.root, pools=tuple(pool.root for pool in home.pools()[1:]),
        changes=tuple(rows), links=tuple(links), freed_size=freed + computed,
        pinned_only=() if drop_pinned else lonely, sets=tuple(home.layout.set_folders()),
        sets_size=computed, drop_pinned=drop_pinned, drop_sets=drop_sets, _home=home, _room=room,
    )  # fmt: skip


def _has_copy(home: Home, digest: str) -> bool:
    """Say whether a file outside that is remembered still has a blob's bytes."""
    roots = [pool.root for pool in home.pools()]
    for each in home.catalog.files(digest=digest):
        if not any(each.path.is_relative_to(root) for root in roots):
            with suppress(OSError, errors.StoreError):
                if hashes_of(home, each.path).digest == digest:
                    return True
    return False


def _refuse_losing(plan: EjectPlan) -> None:
    """Raise if something would be lost that must not be, unless that is allowed."""
    if plan.pinned_only:
        pinned = plan.pinned_only
        message = f"{len(pinned)} pinned blobs exist only in the store, such as {pinned[0][:12]}"
        hint = "Place them first ('smartcache link'), unpin them, or allow it with --drop-pinned."
        raise errors.BlobInUseError(message, hint=hint, digests=pinned)
    if plan.sets and not plan.drop_sets:
        sets = plan.sets
        message = f"{len(sets)} artifact sets would be lost, such as {sets[0].parent.name}"
        hint = "Copy their folders elsewhere, remove them, or allow it with --drop-artifacts."
        raise errors.BlobInUseError(message, hint=hint, sets=sets)


def _eject(home: Home, plan: EjectPlan, progress: Progress) -> list[Undone]:
    with progress("Restoring files", plan.needed_size, "bytes") as job:
        with home.changing("eject"):
            pass  # by now what was open has a row that is done
        # Anew: somebody may have pinned something since.
        now = plan_eject(home, drop_pinned=plan.drop_pinned, drop_sets=plan.drop_sets)
        _refuse_losing(now)
        plan.require_room()
        with home.changing("eject"):
            links = [each for each in now.links if _is_link(home, each)]
            home.journal.begin_or_move(Batch("eject"), links, Mounts())
            rows = home.journal.done(None)
        results = Restoring(home, job, is_eject=True, is_leaving=True).run(rows)
    _refuse_losing(plan_eject(home, drop_pinned=True, drop_sets=plan.drop_sets))
    if not any(each.outcome in ("failed", "renamed") for each in results):
        for root in (*plan.pools, home.layout.root):
            remove_tree(home, root)
    return results


def _is_link(home: Home, change: Change) -> bool:
    st = look(change.path)
    pool = None if st is None else home.pool_on(st.st_dev)
    return pool is not None and is_same(pool.stat(change.digest), st)


def remove_tree(home: Home, root: Path) -> None:
    """Remove a whole tree: first its name, in one step, then what was in it."""
    with home.locked("eject"):
        reached("eject: files restored")
        if root == home.layout.root:
            home.close()
        doomed = root.with_name(f"{root.name}.ejected-{secrets.token_hex(4)}")
        try:
            os.rename(root, doomed)
        except OSError:  # the root is a mount point, or its parent is not ours
            doomed = root
    reached("eject: renamed")
    clear_leftovers(root)
    if doomed == root:
        shutil.rmtree(doomed, ignore_errors=True)


def clear_leftovers(root: Path) -> list[Path]:
    """Remove what an eject that was killed at the very end left beside the root; return it."""
    found = []
    for leftover in sorted(root.parent.glob(f"{root.name}.ejected-*")):
        with suppress(errors.UnsafeStoreError):  # not ours
            if check_own(leftover) is not None:
                shutil.rmtree(leftover)
                found.append(leftover)
    return found
