"""What a scan should find, worked out in the plainest way, and what it opened to find it."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from smartcache.folders.checks import Checks, Copy, Option, Skip, Verdict
from smartcache.folders.groups import Group, is_write_once
from smartcache.folders.programs import ModelFolder
from smartcache.folders.scan import Figures, Scan
from smartcache.progress import Job, Unit

Key = tuple[int, int]


@dataclass(slots=True)
class Inode:
    """One file: its names in the folders, in order, and what `stat` says."""

    st: os.stat_result
    names: list[tuple[bytes, ModelFolder]] = field(default_factory=list)
    is_blob: bool = False

    @property
    def allocated(self) -> int:
        return self.st.st_blocks * 512

    @property
    def outside(self) -> int:
        return self.st.st_nlink - len(self.names) - self.is_blob

    @property
    def is_linkable(self) -> bool:
        return all(is_write_once(path) for path, _ in self.names)

    @property
    def rank(self) -> tuple[bool, bool, bool, bool, int, bytes]:
        """Survivors first."""
        keys_on_time = any(folder.program in ("A1111", "Forge") for _, folder in self.names)
        first = min(path for path, _ in self.names) if self.names else b""
        return (
            not self.is_linkable, not self.is_blob, not keys_on_time, not self.outside,
            self.st.st_mtime_ns, first,
        )  # fmt: skip


class Counted:
    """Sums over folders, by walking them and reading every byte of every file."""

    def __init__(
        self, folders: Sequence[ModelFolder], *, min_size: int = 1, blobs: Iterable[Path] = ()
    ) -> None:
        self.inodes: dict[Key, Inode] = {}
        for folder in sorted(folders, key=lambda each: str(each.path)):
            for directory, _, names in os.walk(os.fsencode(folder.path)):
                for name in names:
                    self._add(os.path.join(directory, name), folder)
        for blob in blobs:
            self._inode(os.lstat(blob)).is_blob = True
        self.freeable = self.elsewhere = self.editable = 0
        self.by_folder: dict[Path, int] = defaultdict(int)
        self.contents = [
            copies
            for copies in self._by_bytes(min_size, list(blobs)).values()
            if len(copies) > 1 and any(copy.names for copy in copies)
        ]
        for copies in self.contents:
            self._add_up(sorted(copies, key=lambda copy: copy.rank))

    def figures(self, folder: ModelFolder | None) -> tuple[int, int, int, int, int]:
        """Files, logical, physical, shared, freeable: of one folder, or of all."""
        files = logical = physical = shared = 0
        for inode in self.inodes.values():
            names = [path for path, owner in inode.names if folder in (None, owner)]
            files += len(names)
            logical += len(names) * inode.st.st_size
            if names:
                physical += inode.allocated
                shared += inode.allocated if len(names) < inode.st.st_nlink else 0
        freeable = self.freeable if folder is None else self.by_folder[folder.path]
        return files, logical, physical, shared, freeable

    def _inode(self, st: os.stat_result) -> Inode:
        return self.inodes.setdefault((st.st_dev, st.st_ino), Inode(st))

    def _add(self, path: bytes, folder: ModelFolder) -> None:
        if not os.path.islink(path) and not path.endswith(b".lock"):  # one of the incomplete
            self._inode(os.lstat(path)).names.append((path, folder))

    def _by_bytes(self, min_size: int, blobs: list[Path]) -> dict[bytes, list[Inode]]:
        found: dict[bytes, list[Inode]] = defaultdict(list)
        for inode in self.inodes.values():
            if inode.st.st_size >= max(1, min_size):
                paths = [path for path, _ in inode.names] or [
                    os.fsencode(blob) for blob in blobs if os.path.samestat(blob.stat(), inode.st)
                ]
                found[Path(os.fsdecode(paths[0])).read_bytes()].append(inode)
        return found

    def _add_up(self, copies: list[Inode]) -> None:
        survivors: dict[int, Inode] = {}
        for copy in copies:
            survivor = survivors.setdefault(copy.st.st_dev, copy)
            gain = 0 if copy is survivor or copy.outside else copy.allocated
            if copy.is_linkable and survivor.is_linkable:
                self.freeable += gain
                self.editable -= gain
                if gain:
                    self.by_folder[min(copy.names, key=lambda name: name[0])[1].path] += gain
        # What every kind of file would give back, beyond this.
        firsts: dict[int, Inode] = {}
        for copy in sorted(copies, key=lambda copy: copy.rank[1:]):
            if firsts.setdefault(copy.st.st_dev, copy) is not copy and not copy.outside:
                self.editable += copy.allocated
        self.elsewhere += sum(each.allocated for each in list(survivors.values())[1:])


class Unhindered(Checks):
    """Checks that let every file be linked but those that programs edit in place."""

    def __init__(self) -> None:
        """Take no store: nothing is asked of the disk."""

    def may_share(self, filesystem: str, path: bytes | Path) -> bool:
        del filesystem, path
        return False

    def __call__(self, copies: Sequence[Copy]) -> tuple[Verdict, ...]:
        return self.verdicts(copies)

    def verdicts(self, copies: Sequence[Copy]) -> tuple[Verdict, ...]:
        found = []
        for filesystem in dict.fromkeys(copy.filesystem for copy in copies):
            same = [copy for copy in copies if copy.filesystem == filesystem]
            first, *others = same
            may = [copy for copy in others if first.is_linkable and copy.is_linkable]
            replaced = [copy for copy in may if not copy.outside_names and not copy.shares_with]
            freed = [copy.allocated for copy in replaced]
            skips = [
                Skip(path=copy.path, reason="edited", option="any-file", size=copy.gain)
                for copy in same
                if not copy.is_linkable
            ]
            skips += [
                Skip(path=copy.path, reason="other names") for copy in may if copy.outside_names
            ]
            found.append(
                Verdict(
                    filesystem=filesystem, kind="hardlink", survivor=first, freed=sum(freed),
                    replaced=tuple(replaced), skipped=tuple(skips),
                )
            )  # fmt: skip
        return tuple(found)

    def is_ordinary(self, filesystem: str, path: bytes) -> bool:
        del filesystem, path
        return True

    def allowing(self, more: Iterable[Option]) -> Self:
        del more
        return self


def numbers(figures: Figures) -> tuple[int, int, int, int, int]:
    """The sums of a folder as `Counted.figures` gives them."""
    return figures.files, figures.logical, figures.physical, figures.shared, figures.freeable


def paths_of(group: Group) -> list[list[Path]]:
    """The names of each copy, in order."""
    return [[name.path for name in copy.names] for copy in group.copies]


def groups_of(found: Scan) -> list[list[list[Path]]]:
    """The names of each copy of each group, all in order of their names."""
    return sorted(sorted(paths_of(group)) for group in found.largest())


def plain(*paths: Path, program: str = "", is_given: bool = False) -> list[ModelFolder]:
    """Folders to scan."""
    return [ModelFolder(path=path, program=program, is_given=is_given) for path in paths]


# what was opened

_opened: list[bytes] | None = None
_has_hook = False


def _hear(event: str, arguments: tuple[object, ...]) -> None:
    if _opened is not None and event == "open" and isinstance(arguments[0], (str, bytes)):
        flags = arguments[2]
        # Which mount a path is on is asked without opening what is there to be read.
        if not (isinstance(flags, int) and flags & (os.O_DIRECTORY | os.O_PATH)):
            _opened.append(os.fsencode(arguments[0]))


@contextmanager
def files_opened(*folders: Path) -> Iterator[list[bytes]]:
    """Collect the files in these folders that this process opens in the block."""
    global _opened, _has_hook  # noqa: PLW0603 - a hook of the interpreter stays for good
    if not _has_hook:
        sys.addaudithook(_hear)
        _has_hook = True
    found: list[bytes] = []
    before, _opened = _opened, []
    try:
        yield found
    finally:
        tops = tuple(os.path.join(os.fsencode(folder), b"") for folder in folders)
        found += [path for path in _opened if path.startswith(tops) and not os.path.isdir(path)]
        _opened = before


def bytes_read() -> int:
    """How many bytes this process has read by system calls."""
    for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines():
        if line.startswith("rchar:"):
            return int(line.split()[1])
    raise AssertionError


class Recorded:
    """A `Progress` that remembers, for each label, what was announced and what was done."""

    def __init__(self) -> None:
        self.totals: dict[str, int | None] = {}
        self.units: dict[str, Unit] = {}
        self.done: dict[str, int] = defaultdict(int)

    def __call__(self, label: str, total: int | None = None, unit: Unit = "items") -> Job:
        self.totals[label] = total
        self.units[label] = unit
        return _Job(self, label)


class _Job(Job):
    def __init__(self, record: Recorded, label: str) -> None:
        self._record = record
        self._label = label

    def advance(self, amount: int = 1) -> None:
        self._record.done[self._label] += amount
