"""Walk model folders and bring what was seen in them up to date: stats only, no byte is read.

Each directory is entered once, whatever leads to it: a folder within another, a symlink or a bind
mount. Directories are compared with what was seen there the last time, and only the differences are
written. Symlinks to files are left alone (what they point at is seen where it is); symlinks to
directories are followed in the folders of programs, which use them to share models, but never
upwards and never in a plain folder somebody named. Stores are passed over; of the pools of this one
those are walked whose blobs are not remembered.
"""

from __future__ import annotations

import os
import stat
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from smartcache.folders.headers import tells_its_length
from smartcache.folders.programs import ModelFolder, identify_names, ignored
from smartcache.progress import Job
from smartcache.store.catalog import STORE, UNREAD, SeenRow
from smartcache.store.store import Store
from smartcache.store.userfile import is_incomplete
from smartcache.system.filesystems import filesystem_id
from smartcache.system.hashing import is_digest
from smartcache.system.kernel import LATEST_NS, effective_user
from smartcache.system.sqlite import signed

MOST_NAMED = 1000
"""So many unreadable places are named."""
_MOST_LOST = 100_000
"""Files whose hashes are forgotten at once because they are gone: what is left over stays."""
_LISTINGS = 100
"""Directories looked up in the index at once."""
_STORE_FOLDERS = frozenset((b"blobs", b"pins", b"tmp", b"bad"))
"""Every store and every pool has these."""
_Key = tuple[int, int]
_Change = tuple[int, bytes, dict[bytes, SeenRow], list[bytes]]
"""Folder, directory, files that are new or changed, names that are gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A place that could not be looked at, and why."""

    path: Path
    reason: str


@dataclass(slots=True, kw_only=True)
class Walked:
    """What a walk met: the folders by their number in the index, and what was unreadable."""

    folders: dict[int, ModelFolder] = field(default_factory=dict)
    pools: dict[int, ModelFolder] = field(default_factory=dict)
    """The folders of blobs that are there now."""
    problems: list[Problem] = field(default_factory=list)
    unfinished: int = 0
    """Downloads in progress, which are left out."""


def walk(store: Store, folders: Iterable[ModelFolder], *, job: Job) -> Walked:
    """See the files of folders again; nested folders keep their own files.

    A program found inside a plain folder becomes a folder of its own.
    """
    run = _Run(store, job)
    run.walk_pools([pool.blobs for pool in store.pools()])
    # Deepest first, so that what lies in a folder inside another is the inner one's.
    waiting = sorted(folders, key=lambda folder: len(folder.path.parts))
    while waiting:
        waiting += run.walk(waiting.pop())
    run.follow()
    return run.walked


class _Run:
    """One walk over all folders: what was entered, and what is to be written."""

    def __init__(self, store: Store, job: Job) -> None:
        self.walked = Walked()
        self._catalog = store.catalog
        self._job = job
        self._user = effective_user()
        self._ignored = ignored()
        self._entered: set[_Key] = set()
        self._filesystems: dict[int, int] = {}
        self._symlinks: list[tuple[int, bytes]] = []
        self._folders: dict[int, ModelFolder] = {}
        self._kept: defaultdict[int, set[int]] = defaultdict(set)
        self._listed: list[tuple[int, bytes, _Listing]] = []
        self._lost: set[tuple[int, int]] = set()

    def walk_pools(self, blobs: Iterable[Path]) -> None:
        """Learn what is in the pools, if it is not remembered: the store writes down the rest."""
        known = {path: number for number, path in self._catalog.pools().items()}
        for path in filter(os.path.isdir, blobs):
            folder = ModelFolder(path=path, program=STORE)
            number = known.get(path)
            if number is None:
                number = self._begin(folder)
                self._descend(number, os.fsencode(path), os.stat(path))
            self.walked.pools[number] = folder

    def walk(self, folder: ModelFolder) -> list[ModelFolder]:
        """Walk one folder; return the folders of programs found in it, not walked yet."""
        path = os.fsencode(folder.path)
        try:
            st = os.stat(path)
        except OSError as error:
            # Perhaps a drive that is not mounted now: what was seen there is not forgotten.
            self._excuse(path, error)
            return []
        number = self._begin(folder)
        self.walked.folders[number] = folder
        return [] if _is_in_store(path) else self._descend(number, path, st)

    def _begin(self, folder: ModelFolder) -> int:
        number = self._catalog.set_folder(
            folder.path, program=folder.program, given=folder.is_given, walked=False
        )
        self._folders[number] = folder
        return number

    def follow(self) -> None:
        """Walk what symlinks led to and nothing else did, then forget what is not there now."""
        while self._symlinks:
            number, target = self._symlinks.pop()
            try:
                self._descend(number, target, os.stat(target))
            except OSError as error:
                self._excuse(target, error)
        self._see()
        with self._catalog.write():
            for number, folder in self._folders.items():
                room = max(0, _MOST_LOST - len(self._lost))
                kept = self._kept[number]
                self._lost.update(self._catalog.drop_directories(number, kept, room))
                self._catalog.set_folder(folder.path, program=folder.program)
            self._catalog.drop_empty_folders()
            self._catalog.drop_nameless(self._lost)

    def _descend(self, number: int, top: bytes, st: os.stat_result) -> list[ModelFolder]:
        found: list[ModelFolder] = []
        is_ignored = self._ignored.covers(Path(os.fsdecode(top)))
        waiting = [] if is_ignored else [(top, (st.st_dev, st.st_ino))]
        while waiting:
            path, key = waiting.pop()
            if key in self._entered:
                continue
            listing = self._list(path)
            inner = None if path == top else self._program(number, path, listing)
            if inner is not None:
                found.append(inner)
                continue
            self._entered.add(key)
            if not listing.is_store:
                self._listed.append((number, path, listing))
                if len(self._listed) >= _LISTINGS:
                    self._see()
                waiting += listing.below
                self._symlinks += self._targets(number, listing)
        return found

    def _program(self, number: int, path: bytes, listing: _Listing) -> ModelFolder | None:
        """Return the folder of a program that begins here, inside a plain folder."""
        outer = self._folders[number]
        if outer.program or not listing.below:  # every program has folders in its folder
            return None
        below = (os.path.basename(each) for each, _ in listing.below)
        names = frozenset(map(os.fsdecode, (*below, *listing.seen)))
        program = identify_names(names, os.fsdecode(os.path.basename(path)))
        if not program:
            return None
        where = Path(os.fsdecode(path))
        found_by = f"in {outer.path}"
        return replace(outer, path=where, program=program, is_given=False, found_by=found_by)

    def _targets(self, number: int, listing: _Listing) -> list[tuple[int, bytes]]:
        """Return the directories that symlinks lead to, if they are to be followed."""
        folder = self._folders[number]
        if not folder.program or not listing.symlinks:
            return []
        own = os.fsencode(folder.path)
        targets = map(os.path.realpath, listing.symlinks)
        return [
            (number, target)
            for target in targets
            if not own.startswith(os.path.join(target, b"")) and target != own
            if not _is_in_store(target)
        ]

    def _list(self, path: bytes) -> _Listing:
        """Return what is in a directory; what cannot be looked at is left out and noted."""
        listing = _Listing()
        seen, below, filesystems, user = listing.seen, listing.below, self._filesystems, self._user
        has_ignored, directories = bool(self._ignored.patterns), 0
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    directories += entry.name in _STORE_FOLDERS
                    if has_ignored and self._ignored.matches(entry.path):
                        continue
                    try:
                        st = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue  # removed in this moment
                    except OSError as error:
                        self._excuse(entry.path, error)
                        continue
                    mode, device = st.st_mode, st.st_dev
                    if stat.S_ISREG(mode):
                        mtime, ctime, inode = st.st_mtime_ns, st.st_ctime_ns, st.st_ino
                        seen[entry.name] = (
                            filesystems.get(device) or self._number(entry.path, st),
                            inode if inode < _HIGH else signed(inode),
                            st.st_size,
                            mtime if mtime <= LATEST_NS else LATEST_NS,  # noqa: FURB136 - half
                            ctime if ctime <= LATEST_NS else LATEST_NS,  # noqa: FURB136 - the time
                            st.st_nlink,
                            st.st_blocks * 512,
                            mode & 0o7777 if st.st_uid == user else -1,
                            st.st_gid,
                        )
                    elif stat.S_ISDIR(mode):
                        below.append((entry.path, (device, st.st_ino)))
                    elif stat.S_ISLNK(mode) and os.path.isdir(entry.path):
                        listing.symlinks.append(entry.path)
        except OSError as error:
            self._excuse(path, error)
        self._job.advance(len(seen))
        listing.is_store = directories == len(_STORE_FOLDERS)
        return listing

    def _number(self, path: bytes, st: os.stat_result) -> int:
        name = filesystem_id(Path(os.fsdecode(path)), st)
        number = self._filesystems[st.st_dev] = self._catalog.filesystem_number(name)
        return number

    def _see(self) -> None:
        """Write down how the directories just listed differ from what was seen there."""
        listed, self._listed = self._listed, []
        changes: list[_Change] = []
        known = self._catalog.seen_in([path for _, path, _ in listed])
        for number, path, listing in listed:
            directory, folder, before = known.get(path, (0, 0, {}))
            if folder == number:
                self._kept[number].add(directory)
            seen = listing.seen
            if before == seen and (folder == number or not before):
                continue
            if self._folders[number].program == STORE:
                seen = {name: row for name, row in seen.items() if is_digest(os.fsdecode(name))}
            for name in [name for name in seen.keys() - before.keys() if is_incomplete(name)]:
                self.walked.unfinished += seen.pop(name)[_SIZE] > 0
            # A directory without a folder is one of which the store alone has named files.
            is_new = not folder
            changed = {n: row for n, row in seen.items() if is_new or before.get(n) != row}
            gone = list(before.keys() - seen.keys())
            if not changed and not gone and folder == number:
                continue
            lost = [*gone, *(n for n, row in changed.items() if before.get(n, row)[:2] != row[:2])]
            if len(self._lost) < _MOST_LOST:
                self._lost.update(before[name][:2] for name in lost)
            changes.append((number, path, changed, gone))
        if changes:
            self._write(changes)

    def _write(self, changes: list[_Change]) -> None:
        """Write differences, in one short transaction."""
        rows: list[tuple[int, bytes, SeenRow, int]] = []
        dropped: list[tuple[int, bytes]] = []
        with self._catalog.write():
            for number in {change[0] for change in changes}:
                folder = self._folders[number]
                self._catalog.keep_folder(number, folder.path, program=folder.program)
            for number, path, changed, gone in changes:
                directory = self._catalog.set_directory(path, number)
                self._kept[number].add(directory)
                rows += [
                    (directory, name, row, UNREAD * tells_its_length(name))
                    for name, row in changed.items()
                ]
                dropped += [(directory, name) for name in gone]
            self._catalog.put_seen(rows)
            self._catalog.drop_seen(dropped)

    def _excuse(self, path: bytes, error: OSError) -> None:
        if len(self.walked.problems) < MOST_NAMED:
            reason = error.strerror or type(error).__name__
            self.walked.problems.append(Problem(path=Path(os.fsdecode(path)), reason=reason))


_HIGH = 1 << 63
_SIZE = 2


@dataclass(slots=True)
class _Listing:
    """One directory: its files, its subdirectories with their keys, symlinks to directories."""

    seen: dict[bytes, SeenRow] = field(default_factory=dict)
    below: list[tuple[bytes, _Key]] = field(default_factory=list)
    symlinks: list[bytes] = field(default_factory=list)
    is_store: bool = False


def _is_in_store(directory: bytes) -> bool:
    """Say whether a directory is a store or lies in one."""
    while True:
        if all(os.path.isdir(os.path.join(directory, name)) for name in _STORE_FOLDERS):
            return True
        if directory == (above := os.path.dirname(directory)):
            return False
        directory = above
