"""The values the index keeps: plain and frozen."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum
from pathlib import Path
from typing import Literal

from smartcache.store.digest import Algorithm
from smartcache.store.statkey import StatKey

LinkKind = Literal["hardlink", "reflink", "symlink", "copy"]
OwnerKind = Literal["pin", "repo", "folder", "set"]


class Trust(IntEnum):
    """How much a blob's row may be believed."""

    VERIFIED = 0
    RELINKED = 1
    """Usable; somebody else made or removed a link, so it is queued to be hashed again."""
    UNPROVEN = 2
    """Hash before use: adopted while young, found without a row, or changed from outside."""
    LOST = 3
    """The file is damaged or gone; the row keeps what was known until the bytes come back."""
    TRASHED = 4
    """The file is in the trash; the row keeps what was known until undo brings it back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """A blob as the index remembers it."""

    id: int
    digest: str
    size: int
    allocated: int
    inode: int
    key: StatKey
    links: int
    trust: Trust
    unsynced: str | None
    added: int
    used: int

    @property
    def added_at(self) -> datetime:
        """When the blob came into the store."""
        return when(self.added)

    @property
    def used_at(self) -> datetime:
        """When the blob was last placed or opened, to within an hour."""
        return when(self.used)

    @property
    def is_here(self) -> bool:
        """Say whether the store should have the bytes: neither lost nor in the trash."""
        return self.trust < Trust.LOST

    @property
    def is_held_only_by_smartcache(self) -> bool:
        """Say whether the store's name is the only one (as of the last look)."""
        return self.links == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A path outside the store that shares a blob."""

    path: Path
    digest: str
    kind: LinkKind
    filesystem: str
    inode: int
    owner: int | None
    made_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """What keeps blobs alive. `path` None means always live (a pin)."""

    kind: OwnerKind
    name: str
    path: Path | None = None
    root: Path | None = None
    filesystem: str | None = None
    id: int = 0

    def __str__(self) -> str:
        """Return "pin favourites", "folder /models"."""
        return f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Memo:
    """Remembered hashes of a file, valid while its stat key is `key`."""

    key: StatKey
    is_racy: bool
    values: dict[Algorithm, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """A file of a known folder, seen by size, not hashed."""

    path: Path
    size: int
    filesystem: str
    inode: int
    key: StatKey
    links: int = 1
    allocated: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A file of a known folder with what is remembered of it while it stays as it is."""

    path: Path
    folder: Path
    size: int
    allocated: int
    links: int
    filesystem: str
    inode: int
    digest: str = ""
    """Its digest if that is known."""
    is_compared: bool = False
    """Its digest, or a sample of head and tail, is known."""
    is_blob: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFolder:
    """A folder in which files were seen, or will be; `walked_at` is None until the first time."""

    path: Path
    program: str
    is_given: bool
    """The user gave it to smartcache; else it was merely discovered."""
    walked_at: datetime | None
    files: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over all blobs, as the index remembers them."""

    blobs: int
    size: int
    allocated: int
    only_blobs: int
    only_allocated: int
    linked_size: int
    links: int


def when(seconds: int) -> datetime:
    """Return Unix seconds as an aware time."""
    return datetime.fromtimestamp(seconds, UTC)
