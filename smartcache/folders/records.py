"""The values of this layer: folders, copies, groups of duplicates, and what a scan found.

A *copy* is one inode with all the names the scan met; a *group* is the copies of one content. Two
names of an inode are one copy, so links are never duplicates of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Literal, Protocol

Option = Literal["group", "mode", "xattr", "any-file"]
"""What a user can add so that files are not left alone: `--allow` the first three."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A folder with model files, the program it belongs to ("" if none), and how it was found."""

    path: Path
    program: str = ""
    found_by: str = ""
    is_given: bool = False
    """The user gave it to smartcache; else it was merely discovered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """One path of a copy, and the folder of the scan it lies in."""

    path: Path
    folder: ModelFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One inode that holds the bytes of a group, with the names met in the scanned folders."""

    filesystem: str
    inode: int
    names: tuple[Name, ...]
    links: int
    """Hard links of the inode; more than `names` when some lie outside the scanned folders."""
    allocated: int
    """Disk blocks in bytes."""
    mtime_ns: int
    is_blob: bool = False
    """The store has this very inode as a blob already."""
    is_only_in_store: bool = False
    """No scanned folder has it: its one name here is the store's."""
    is_linkable: bool = True
    """No program edits this kind of file in place, so that a link does no harm."""
    shares_with: int | None = None
    """Inode of an earlier copy of the group whose disk blocks this one shares (reflink)."""

    @property
    def path(self) -> Path:
        """The first of its names."""
        return self.names[0].path

    @property
    def outside_names(self) -> int:
        """Names of the inode that the scan did not meet (the store's own is not counted)."""
        has_own_name = self.is_blob and not self.is_only_in_store
        return max(0, self.links - len(self.names) - has_own_name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """A file that is left as it is, and why: a short phrase."""

    path: Path
    reason: str
    option: Option | None = None
    """What would include it."""
    size: int = 0
    """What a link in its place would free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What would become of the copies of a group on one filesystem."""

    filesystem: str
    kind: Literal["hardlink", "reflink"] | None = None
    """None: nothing is replaced."""
    survivor: Copy | None = None
    replaced: tuple[Copy, ...] = ()
    skipped: tuple[Skip, ...] = ()
    freed: int = 0
    read_only: int = 0
    """Names that lose their write permission."""
    permissions: tuple[str, ...] = ()
    """What the change of mode means for each name that gets another one: "readable by ..."."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Copies of one content. `digest` is empty when it is likely, not proven (a quick scan)."""

    digest: str
    size: int
    copies: tuple[Copy, ...]
    """In the order in which they would survive; all filesystems."""
    elsewhere: int
    """Bytes of copies that cannot be linked because they lie on another filesystem than the
    first."""
    verdicts: tuple[Verdict, ...]
    """One for each filesystem with several copies."""

    @property
    def freeable(self) -> int:
        """Bytes that `dedup` would free."""
        return sum(each.freed for each in self.verdicts)

    @property
    def skipped(self) -> tuple[Skip, ...]:
        """What `dedup` would leave alone."""
        return tuple(skip for each in self.verdicts for skip in each.skipped)


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """Duplicates that `dedup` leaves alone for one reason: how many, and what they take."""

    reason: str
    options: tuple[Option, ...]
    """With these it would free `size` more; none: it never does."""
    files: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Sums over the files of a folder, or over everything (`folder` None: nothing twice)."""

    folder: ModelFolder | None
    files: int = 0
    """Names of files."""
    logical: int = 0
    """The size of each name: what the files seem to take."""
    physical: int = 0
    """Disk blocks, each inode once: what they take."""
    shared: int = 0
    """Of `physical`: inodes that have names outside this folder too."""
    freeable: int = 0
    """Of `physical`: duplicates that links would give back; a group counts for the folders of the
    copies that would be replaced."""
    seen_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A place that could not be looked at, and why."""

    path: Path
    reason: str


class Judge(Protocol):
    """Decides what would become of the copies of a group (`checks.Checks`)."""

    def __call__(self, copies: Sequence[Copy]) -> tuple[Verdict, ...]:
        """Decide for each filesystem; the copies are in the order of survivors."""

    def ordinary(self, filesystem: str, path: bytes) -> bool:
        """Say whether nothing but its owner and mode could speak against linking a file."""

    def allowing(self, more: Iterable[Option]) -> Judge:
        """Return one that allows more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """What a scan found. Groups are read from the index when asked for, largest gain first."""

    folders: tuple[Figures, ...]
    total: Figures
    groups: int
    """How many groups have something to free."""
    freeable: int
    """Bytes that `dedup` would free: its own checks say so."""
    elsewhere: int
    """Bytes of duplicates on other filesystems, which links cannot free."""
    left: tuple[Left, ...]
    """Duplicates that are left alone, the most bytes first."""
    min_size: int
    is_quick: bool
    hashed: int
    """Bytes read and hashed by this scan; 0 when all was remembered."""
    busy: tuple[Path, ...]
    """Files left out because somebody writes them."""
    problems: tuple[Problem, ...]
    warnings: tuple[str, ...]
    _largest: Callable[[int | None, Judge | None], Iterator[Group]] = field(
        repr=False, compare=False
    )

    def largest(self, count: int | None = None, *, judge: Judge | None = None) -> Iterator[Group]:
        """Return the `count` groups with the most to free; or go through all, by size of file.

        `judge` decides in place of the scan's own one what would become of them.
        """
        return self._largest(count, judge)

    @property
    def editable(self) -> int:
        """Bytes of duplicates that are left alone because programs edit such files in place."""
        return sum(each.size for each in self.left if "any-file" in each.options)
