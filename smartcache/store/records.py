"""The values the index keeps, plain and frozen; and when a blob's row may be believed.

Whether bytes are what they were is asked here and nowhere else: `judge` compares two looks at an
inode, `Blob.vouches` says whether a blob may be used unread, `Blob.proves` whether its hashes are
those of the file in its inode (`catalog._JOINED` is the same question in SQL).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum
from pathlib import Path
from typing import Literal, NamedTuple

from smartcache.system.filesystems import filesystem_id
from smartcache.system.kernel import StatKey, allocated_bytes
from smartcache.system.sqlite import signed

LinkKind = Literal["hardlink", "reflink", "copy"]
OwnerKind = Literal["pin", "repo", "folder", "set"]
Verdict = Literal["same", "relinked", "suspect"]

LINKED_SUFFIXES = frozenset((
    ".safetensors", ".sft", ".gguf", ".ggml", ".bin", ".ckpt", ".pt", ".pth",
    ".onnx", ".onnx_data", ".h5", ".keras", ".msgpack", ".npz", ".npy", ".tflite",
    ".engine", ".mlmodel", ".pb", ".pack", ".parquet", ".arrow", ".tar", ".zip",
    ".model", ".nemo", ".llamafile", ".wasm", ".vae", ".t7", ".pkl",
))  # fmt: skip
"""Files that programs replace as a whole; the rest (json, txt ...) is edited in place: copied."""


class Trust(IntEnum):
    """How much a blob's row may be believed."""

    VERIFIED = 0
    RELINKED = 1
    """Usable; somebody else made or removed a link, so `verify` hashes it again."""
    UNPROVEN = 2
    """Hash before use: adopted while young, found without a row, or changed from outside."""
    LOST = 3
    """The file is damaged or gone; the row keeps what was known until the bytes come back."""


def judge(before: StatKey, links: int, now: os.stat_result) -> Verdict:
    """Compare an inode's stat key and link count with what is on disk now.

    "same": nothing happened. "relinked": somebody made or removed a link, and the bytes are as they
    were unless somebody also wrote them and set the time back: usable (other programs link and
    unlink all the time), and hashed again by the next `verify`. "suspect": hash before use.
    """
    key = StatKey.of(now)
    if key == before:
        return "same"
    return "relinked" if key[:2] == before[:2] and now.st_nlink != links else "suspect"


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
        """Say whether the store should have the bytes: they are not lost."""
        return self.trust < Trust.LOST

    def judged(self, st: os.stat_result) -> Verdict:
        """Compare the recorded inode with the file that is there now."""
        return judge(self.key, self.links, st) if signed(st.st_ino) == self.inode else "suspect"

    def vouches(self, st: os.stat_result, boot: str) -> bool:
        """Say whether the file may be used unread.

        Not if it is unproven, was changed, or was never synced and the machine started since.
        """
        is_usable = self.trust <= Trust.RELINKED and self.unsynced in (None, boot)
        return is_usable and self.judged(st) != "suspect"

    def proves(self, st: os.stat_result, boot: str) -> bool:
        """Say whether the file surely has the recorded bytes: nobody has touched even its links."""
        return self.is_believed(boot) and self.judged(st) == "same"

    def is_believed(self, boot: str) -> bool:
        """Say whether the bytes were proven, with nothing done to them since, and are synced."""
        return self.trust == Trust.VERIFIED and self.unsynced in (None, boot)

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
    """Which bytes a file has, true while its stat key is `key`."""

    key: StatKey
    is_racy: bool
    digest: str


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
class RememberedFile:
    """A file of a known folder whose sha256 was computed once, when its stat key was `key`."""

    sha256: str
    path: Path
    filesystem: str
    inode: int
    key: StatKey


class Totals(NamedTuple):
    """Sums over all blobs, as the index remembers them."""

    blobs: int
    size: int
    allocated: int
    only_allocated: int
    """Of blobs whose only name is the store's."""


def when(seconds: int) -> datetime:
    """Return Unix seconds as an aware time."""
    return datetime.fromtimestamp(seconds, UTC)


def sighting_of(path: Path) -> Sighting:
    """Return a file as it is seen now."""
    st = os.stat(path)
    return Sighting(
        path=path, size=st.st_size, filesystem=filesystem_id(path, st), inode=st.st_ino,
        key=StatKey.of(st), links=st.st_nlink, allocated=allocated_bytes(st),
    )  # fmt: skip
