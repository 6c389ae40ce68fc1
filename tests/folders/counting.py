"""What a scan should find, worked out in the plainest way, and what it opened to find it."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from smartcache.folders.checks import Checks, Decided
from smartcache.folders.groups import is_write_once
from smartcache.folders.programs import ModelFolder
from smartcache.folders.scan import Figures, Scan
from smartcache.progress import Job, Unit
from smartcache.system.filesystems import Mount
from tests.store.files import Watch

Key = tuple[int, int]
MOUNT = Mount(
    point=Path("/"), fstype="ext4", source="", options=frozenset(), family="local"
)  # fmt: skip


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
        return all(is_write_once(os.path.basename(path)) for path, _ in self.names)

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
        tops = {os.fsencode(folder.path) for folder in folders}
        for folder in sorted(folders, key=lambda each: str(each.path)):
            for directory, below, names in os.walk(os.fsencode(folder.path)):
                # An inner folder keeps its own files.
                below[:] = [n for n in below if os.path.join(directory, n) not in tops]
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
    """The checks of files that are not there: links can be made everywhere."""

    def __init__(self) -> None:
        """Take no store: nothing is asked of the disk."""
        self.allow = frozenset()
        self._looks = False

    def of(self, filesystem: str, folder: str) -> Decided:
        del filesystem, folder
        return Decided("hardlink", "", MOUNT.point)

    def _mount(self, folder: str) -> Mount:
        del folder
        return MOUNT

    def _can_write(self, folder: str) -> bool:
        return bool(folder)


def numbers(figures: Figures) -> tuple[int, int, int, int, int]:
    """The sums of a folder as `Counted.figures` gives them."""
    return figures.files, figures.logical, figures.physical, figures.shared, figures.freeable


def groups_of(found: Scan) -> list[list[list[Path]]]:
    """The names of each copy of each group, all in order of their names."""
    return sorted(
        sorted([name.path for name in copy.names] for copy in group.copies)
        for group in found.largest()
    )


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


class Interrupting(Watch):
    """A `Progress`, a job, and a hook of the fault points: Ctrl-C at the n-th call."""

    def __init__(self, countdown: int) -> None:
        super().__init__()
        self._left = countdown

    def tick(self, _: object = None) -> None:
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt

    def advance(self, amount: int = 1) -> None:
        super().advance(amount)
        self.tick()


class Recorded(dict[str, Watch]):
    """A `Progress` that remembers, for each label, what was announced and what was done."""

    def __call__(self, label: str, total: int | None = None, unit: Unit = "items") -> Job:
        self[label] = Watch()
        return self[label](label, total, unit)
