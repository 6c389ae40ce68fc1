"""Give files bytes of their own and the permission to write, with or without a store.

Undo needs the journal. This needs nothing but the files: a name that shares its inode with others
gets a copy in its place, made without a name beside it, read back and compared, with the metadata
that the file has now; a read-only file that shares nothing gets its write permission. The name is
never absent or half written. A store that is given learns of it: links are dropped, and changes in
its journal are closed.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from smartcache.errors import (
    FileBusyError,
    FileChangedError,
    FileSkippedError,
    NoSpaceError,
    SmartcacheError,
)
from smartcache.progress import Progress, silent
from smartcache.sizes import format_size
from smartcache.store.blobs import copy_hashed
from smartcache.store.changes.journal import Change
from smartcache.store.changes.spot import Spot, beside, read_attributes
from smartcache.store.changes.userfile import let_go, restore_metadata, take_name
from smartcache.store.volume import Layout, Volume
from smartcache.system.faults import reached
from smartcache.system.filesystems import free_bytes
from smartcache.system.hashing import Advance, hash_file
from smartcache.system.kernel import effective_user, lease_intact, link_fd, open_unnamed, take_lease

What = Literal["copy", "mode"]
_CLOSED_BY_THIS = frozenset(("adopt", "replace", "place"))
_SKIPPED_FOLDERS = frozenset((".git",))
"""Read-only by themselves, and nobody writes there by hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A file that would get its own bytes ("copy"), or only write permission ("mode")."""

    path: Path
    """Where it really is: no symlink leads there."""
    what: What
    size: int
    inode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Separated:
    """What became of one file; `problem` says why it is as it was."""

    file: Shared
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeparatePlan:
    """The files that would be separated, and the room that their own bytes need."""

    files: tuple[Shared, ...]
    needed: dict[Path, int]
    """Bytes, by a folder of each filesystem."""
    skipped: tuple[tuple[Path, str], ...]
    """Files that must stay as they are, and why."""
    _execute: Callable[[SeparatePlan, Progress], list[Separated]] = field(repr=False, compare=False)

    @property
    def needed_size(self) -> int:
        """The bytes that all the copies take."""
        return sum(self.needed.values())

    def execute(self, progress: Progress = silent) -> list[Separated]:
        """Separate them; NoSpaceError before the first one if they do not fit."""
        return self._execute(self, progress)


def plan_separate(
    paths: Iterable[Path], volumes: Sequence[Volume] = (), *, recursive: bool = False
) -> SeparatePlan:
    """Plan to separate files and, if `recursive`, all files in folders.

    Files that share nothing and can be written are left out.
    """
    found: dict[Path, tuple[Shared, os.stat_result]] = {}
    skipped: list[tuple[Path, str]] = []
    for path in paths:
        for each in _files_at(path, recursive=recursive):
            real = Path(os.path.realpath(each.parent), each.name)
            st = os.lstat(real)
            problem = _why_not(real, st)
            if problem:
                skipped.append((each, problem))
            elif st.st_nlink > 1 or not st.st_mode & stat.S_IWUSR:
                what: What = "copy" if st.st_nlink > 1 else "mode"
                found[real] = Shared(path=real, what=what, size=st.st_size, inode=st.st_ino), st
    return SeparatePlan(
        files=tuple(file for file, _ in found.values()), needed=_needed(found),
        skipped=tuple(skipped),
        _execute=lambda plan, progress: _execute(volumes, plan, progress),
    )  # fmt: skip


def _files_at(path: Path, *, recursive: bool) -> Iterator[Path]:
    absolute = Path(os.path.abspath(path))
    if not stat.S_ISDIR(os.lstat(absolute).st_mode):
        yield absolute
        return
    if not recursive:
        raise FileSkippedError(
            f"{path} is a folder", hint="Use -r to separate all files in it.", reason="folder",
            path=path,
        )  # fmt: skip
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
    if st.st_uid != effective_user():
        return "it belongs to another user"
    if any(Layout(folder).exists() for folder in path.parents):
        return "it belongs to a store of smartcache"
    return ""


def _needed(found: dict[Path, tuple[Shared, os.stat_result]]) -> dict[Path, int]:
    """Return the room that is needed: if all names of a file are chosen, the last keeps it."""
    chosen = Counter((st.st_dev, st.st_ino) for _, st in found.values())
    counted: set[tuple[int, int]] = set()
    folders: dict[int, Path] = {}
    needed: Counter[Path] = Counter()
    for path, (file, st) in found.items():
        key = (st.st_dev, st.st_ino)
        if file.what == "copy" and key not in counted:
            counted.add(key)
            copies = chosen[key] if st.st_nlink > chosen[key] else chosen[key] - 1
            needed[folders.setdefault(st.st_dev, path.parent)] += copies * st.st_size
    return dict(needed)


def _execute(volumes: Sequence[Volume], plan: SeparatePlan, progress: Progress) -> list[Separated]:
    for folder, size in plan.needed.items():
        free = free_bytes(folder)
        if size > free:
            message = f"The copies need {format_size(size)}, but {format_size(free)} are free"
            hint = "Free some space, or separate fewer files at a time."
            raise NoSpaceError(f"{message} at {folder}", hint=hint, needed=size, free=free)
    changes: dict[Path, list[tuple[Volume, Change]]] = {}
    for volume in volumes:
        for change in volume.journal.open_changes():
            if change.op in _CLOSED_BY_THIS:
                changes.setdefault(change.place, []).append((volume, change))
    results = []
    total = sum(file.size for file in plan.files if file.what == "copy")
    with progress("Copying", total, "bytes") as job:
        for file in plan.files:
            mine = changes.get(file.path, [])
            try:
                problem = _separate(volumes, file, [change for _, change in mine], job.advance)
                if not problem:
                    _tell(file.path, mine, volumes)
            except (SmartcacheError, OSError) as error:
                problem = str(error)
            results.append(Separated(file=file, problem=problem))
    return results


def _separate(
    volumes: Sequence[Volume], file: Shared, changes: list[Change], advance: Advance
) -> str:
    """Separate one file as it is now; return why not, if it must stay."""
    with Spot(file.path) as spot:
        st = spot.stat()
        if st is None:
            return "it was removed meanwhile"
        if st.st_ino != file.inode:
            return "another file is there now"
        modes = (change.mode for change in changes if change.mode is not None)
        mode = next(modes, st.st_mode) & 0o777 | stat.S_IWUSR
        if st.st_nlink == 1:  # its other names went, maybe by this very run
            return spot.give_mode(mode, inode=st.st_ino, links=1)
        _put_copy(volumes, spot, st, mode, advance)
    return ""


def _put_copy(
    volumes: Sequence[Volume], spot: Spot, st: os.stat_result, mode: int, advance: Advance
) -> None:
    """Let a verified copy take the place of a file; or raise, with nothing changed."""
    path = spot.path
    temporary = beside(path)
    with ExitStack() as stack:
        source = stack.enter_context(open(spot.open(), "rb"))
        lease = take_lease(source.fileno())
        if lease == "busy":
            raise FileBusyError(f"{path} is open for writing", path=path)
        folder = Path(f"/proc/self/fd/{spot.fd}")
        unnamed = open_unnamed(folder)  # a killed process leaves nothing behind
        stack.callback(spot.unlink, temporary.name)
        target = spot.create(temporary.name) if unnamed is None else unnamed
        stack.callback(os.close, target)
        copied = copy_hashed(source, target, advance)
        before = Change.before("own", path, copied, st)
        before.mode, before.xattrs = mode, read_attributes(source.fileno())
        restore_metadata(target, before)
        os.fsync(target)
        if hash_file(target)[0].digest != copied:
            raise FileChangedError(f"The copy of {path} is not what was written", path=path)
        reached("separate: written")
        now = os.fstat(source.fileno())
        is_same = (now.st_size, now.st_mtime_ns) == (st.st_size, st.st_mtime_ns)
        if not is_same or (lease == "held" and not lease_intact(source.fileno())):
            raise FileChangedError(f"{path} was changed while it was copied", path=path)
        if unnamed is not None:
            link_fd(target, folder / temporary.name)
        reached("separate: named")
        blobs = [
            (volume, blob.digest)
            for volume in volumes
            if volume.is_here(st) and (blob := volume.index.blob_by_inode(st.st_ino)) is not None
        ]
        take_name(spot, temporary.name, st.st_ino, blobs, path=path)
    reached("separate: in place")


def _tell(path: Path, changes: list[tuple[Volume, Change]], volumes: Sequence[Volume]) -> None:
    """Let stores know that a file is the user's own: its links go, and its changes are closed."""
    for volume in volumes:
        mine = [change for of, change in changes if of is volume]
        for name in {path, *(change.path for change in mine)}:
            let_go(volume, name)
        if mine:
            with volume.batch("separate") as batch:
                for change in mine:
                    # Not "undone": undo would link its old twins to it again.
                    batch.end(change, "gone")
