"""Walk model folders and bring what was seen in them up to date: stats only, no byte is read.

Each directory is entered once, whatever leads to it: a folder within another, a symlink, a junction
or a bind mount. Directories are compared with what was seen there the last time, and only the
differences are written. Symlinks to files are left alone (what they point at is seen where it is);
symlinks to directories are followed in the folders of programs, which use them to share models, but
never upwards and never in a plain folder somebody named.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from smartcache.folders.programs import ModelFolder, identify_names, ignored
from smartcache.progress import Job
from smartcache.store.catalog import SeenRow
from smartcache.store.changes.userfile import is_incomplete
from smartcache.store.store import Store
from smartcache.store.volume import Layout
from smartcache.system.filesystems import filesystem_id
from smartcache.system.kernel import LATEST_NS, effective_user
from smartcache.system.sqlite import signed

MOST_NAMED = 1000
"""So many unreadable places are named; more are only counted."""
_FLUSH_ROWS = 5000
_MOST_LOST = 100_000
"""Files whose hashes are forgotten at once because they are gone: what is left over stays."""
_LISTINGS = 100
"""Directories looked up in the index at once."""
_STORE_MARK = b"index.sqlite3"
_Key = tuple[int, int]
_Difference = tuple[int, bytes, list[tuple[bytes, SeenRow]], Collection[bytes]]
"""Folder, directory, files that are new or changed, names that are gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A place that could not be looked at, and why."""

    path: Path
    reason: str


@dataclass(slots=True, kw_only=True)
class Walked:
    """What a walk met: the folders by their number in the index, and what was unreadable.

    The first problems are named, all are counted.
    """

    folders: dict[int, ModelFolder] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    problem_count: int = 0
    files: int = 0
    changes: int = 0
    """Files that are new, changed or gone."""
    unfinished: int = 0
    """Downloads in progress, which are left out."""
    modes: dict[str, dict[int, tuple[int, int] | None]] = field(default_factory=dict)
    """By filesystem: group and permissions of inodes that have not those of the first file, as most
    have; None: of another user, or with a special mode."""


def walk(store: Store, folders: Iterable[ModelFolder], *, job: Job) -> Walked:
    """See the files of folders again; nested folders keep their own files.

    A program found inside a plain folder becomes a folder of its own.
    """
    run = _Run(store, job)
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
        self._usual: tuple[int, int, int] | None = None
        self._usually: tuple[int, int] | None = None
        self._ignored = ignored()
        self._entered: set[_Key] = set()
        self._filesystems: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._symlinks: list[tuple[int, bytes]] = []
        self._kept: dict[int, set[int]] = {}
        self._listed: list[tuple[int, bytes, _Listing]] = []
        self._differences: list[_Difference] = []
        self._unwritten = 0
        self._lost: set[tuple[int, int]] = set()

    def walk(self, folder: ModelFolder) -> list[ModelFolder]:
        """Walk one folder; return the folders of programs found in it, not walked yet."""
        path = os.fsencode(folder.path)
        try:
            st = os.stat(path)
        except OSError as error:
            # Perhaps a drive that is not mounted now: what was seen there is not forgotten.
            self._excuse(path, error)
            return []
        number = self._catalog.set_folder(
            folder.path, program=folder.program, given=folder.is_given, walked=False
        )
        self.walked.folders[number] = folder
        self._kept.setdefault(number, set())
        return self._descend(number, path, st)

    def follow(self) -> None:
        """Walk what symlinks led to and nothing else did, then forget what is not there now."""
        while self._symlinks:
            number, target = self._symlinks.pop()
            try:
                self._descend(number, target, os.stat(target))
            except OSError as error:
                self._excuse(target, error)
        self._see()
        if self._differences:
            self._flush()
        with self._catalog.write():
            for number, kept in self._kept.items():
                room = max(0, _MOST_LOST - len(self._lost))
                self._lost.update(self._catalog.seen_besides(number, kept, room))
                self._catalog.keep_directories(number, kept)
                folder = self.walked.folders[number]
                self._catalog.set_folder(folder.path, program=folder.program)
            self._catalog.drop_empty_folders()
            self._catalog.drop_memos(self._lost)

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
        outer = self.walked.folders[number]
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
        folder = self.walked.folders[number]
        if not folder.program:
            return []
        own = os.fsencode(folder.path)
        targets = [os.path.realpath(path) for path in listing.symlinks]
        return [
            (number, target)
            for target in targets
            if not own.startswith(os.path.join(target, b"")) and target != own
            if not _is_in_store(target)
        ]

    def _list(self, path: bytes) -> _Listing:
        """Return what is in a directory; what cannot be looked at is left out and noted."""
        listing = _Listing()
        seen, below, filesystems = listing.seen, listing.below, self._filesystems
        try:
            with os.scandir(path) as entries:
                for entry in self._wanted(entries):
                    try:
                        st = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue  # removed in this moment
                    except OSError as error:
                        self._excuse(entry.path, error)
                        continue
                    if stat.S_ISDIR(st.st_mode):
                        below.append((entry.path, (st.st_dev, st.st_ino)))
                    elif stat.S_ISREG(st.st_mode):
                        filesystem = filesystems.get(st.st_dev) or self._number(entry.path, st)
                        if (st.st_mode, st.st_uid, st.st_gid) != self._usual:
                            self._note_mode(st)
                        seen[entry.name] = (
                            st.st_size, filesystem, signed(st.st_ino),
                            min(st.st_mtime_ns, LATEST_NS), min(st.st_ctime_ns, LATEST_NS),
                            st.st_nlink, st.st_blocks * 512,
                        )  # fmt: skip
                    elif stat.S_ISLNK(st.st_mode) and os.path.isdir(entry.path):
                        listing.symlinks.append(entry.path)
        except OSError as error:
            self._excuse(path, error)
        self._job.advance(len(seen))
        self.walked.files += len(seen)
        listing.is_store = _STORE_MARK in seen and Layout(Path(os.fsdecode(path))).exists()
        return listing

    def _wanted(self, entries: Iterable[os.DirEntry[bytes]]) -> Iterable[os.DirEntry[bytes]]:
        """Pass over what the user ignores; but a store is known by its mark in any case."""
        if not self._ignored.patterns:
            return entries
        matches = self._ignored.matches
        return (each for each in entries if each.name == _STORE_MARK or not matches(each.path))

    def _note_mode(self, st: os.stat_result) -> None:
        """Remember an owner or mode that is not that of the first file."""
        is_ours = st.st_uid == self._user and not st.st_mode & 0o7000
        seen = (st.st_gid, st.st_mode & 0o555) if is_ours else None
        if self._usual is None and seen is not None:
            self._usual, self._usually = (st.st_mode, st.st_uid, st.st_gid), seen
        elif seen is None or seen != self._usually:
            modes = self.walked.modes.setdefault(self._names[st.st_dev], {})
            modes[signed(st.st_ino)] = seen

    def _number(self, path: bytes, st: os.stat_result) -> int:
        name = filesystem_id(Path(os.fsdecode(path)), st)
        self._names[st.st_dev] = name
        number = self._filesystems[st.st_dev] = self._catalog.filesystem_number(name)
        return number

    def _see(self) -> None:
        """Note how the directories listed since the last time differ from what was seen there."""
        listed, self._listed = self._listed, []
        known = self._catalog.seen_in([path for _, path, _ in listed])
        for number, path, listing in listed:
            directory, folder, before = known.get(path, (0, 0, {}))
            if folder == number:
                self._kept[number].add(directory)
            if before == listing.seen and (folder == number or not before):
                continue
            unfinished = {n for n in listing.seen.keys() - before.keys() if is_incomplete(n)}
            self.walked.unfinished += sum(listing.seen[name][0] > 0 for name in unfinished)
            changed = [
                (name, row)
                for name, row in listing.seen.items()
                if before.get(name) != row and name not in unfinished
            ]
            gone = before.keys() - listing.seen.keys()
            if not changed and not gone and folder == number:
                continue
            if len(self._lost) < _MOST_LOST:
                self._lost.update(before[name][1:3] for name in gone)
            self._differences.append((number, path, changed, gone))
            self._unwritten += len(changed) + len(gone)
        if self._unwritten >= _FLUSH_ROWS:
            self._flush()

    def _flush(self) -> None:
        """Write the differences, in one short transaction."""
        rows: list[tuple[object, ...]] = []
        dropped: list[tuple[int, bytes]] = []
        with self._catalog.write():
            for number in {each[0] for each in self._differences}:
                folder = self.walked.folders[number]
                self._catalog.keep_folder(number, folder.path, program=folder.program)
            for number, path, changed, gone in self._differences:
                directory = self._catalog.set_directory(path, number)
                self._kept[number].add(directory)
                rows += [(directory, name, *row) for name, row in changed]
                dropped += [(directory, name) for name in gone]
            self._catalog.put_seen(rows)
            self._catalog.drop_seen(dropped)
        self.walked.changes += self._unwritten
        self._differences, self._unwritten = [], 0

    def _excuse(self, path: bytes, error: OSError) -> None:
        self.walked.problem_count += 1
        if len(self.walked.problems) < MOST_NAMED:
            reason = error.strerror or type(error).__name__
            self.walked.problems.append(Problem(path=Path(os.fsdecode(path)), reason=reason))


@dataclass(slots=True)
class _Listing:
    """One directory: its files, its subdirectories with their keys, symlinks to directories."""

    seen: dict[bytes, SeenRow] = field(default_factory=dict)
    below: list[tuple[bytes, _Key]] = field(default_factory=list)
    symlinks: list[bytes] = field(default_factory=list)
    is_store: bool = False


def _is_in_store(directory: bytes) -> bool:
    """Say whether a directory is a store or lies in one."""
    path = Path(os.fsdecode(directory))
    return any(Layout(each).exists() for each in (path, *path.parents))
