"""Plain, frozen values: what the store knows of blobs, links and files.

None of them is the truth. A blob is looked at when it is asked for; what was seen of other files is
checked by whoever acts on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

LinkKind = Literal["hardlink", "reflink", "copy"]

LINKED_SUFFIXES = frozenset((
    ".safetensors", ".sft", ".gguf", ".ggml", ".bin", ".ckpt", ".pt", ".pth",
    ".onnx", ".onnx_data", ".h5", ".keras", ".msgpack", ".npz", ".npy", ".tflite",
    ".engine", ".mlmodel", ".pb", ".pack", ".parquet", ".arrow", ".tar", ".zip",
    ".model", ".nemo", ".llamafile", ".wasm", ".vae", ".t7", ".pkl",
))  # fmt: skip
"""Files that programs replace as a whole; the rest (json, txt ...) is edited in place: copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """A blob as it is on the disk now."""

    digest: str
    size: int
    allocated: int
    """Bytes of disk blocks."""
    links: int
    """Hard links: the blob's own name, its pins, and the names outside."""
    inode: int
    mtime_ns: int
    path: Path
    pool: Path
    """Root of the pool it is in."""
    pins: tuple[str, ...] = ()
    used: int = 0
    added: int = 0

    @property
    def names(self) -> int:
        """How many names outside the store it has."""
        return self.links - 1 - len(self.pins)

    @property
    def is_only_in_store(self) -> bool:
        """Whether no file outside the store is a link of it."""
        return self.names <= 0

    @property
    def added_at(self) -> datetime:
        """When the blob came into the store."""
        return when(self.added)

    @property
    def used_at(self) -> datetime:
        """When the blob was last placed or opened, to within an hour."""
        return when(self.used)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A path outside the store that was given a blob's bytes."""

    path: Path
    digest: str
    kind: LinkKind
    inode: int


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
class KnownFile:
    """A name of a file as it was last seen, and what is remembered of its bytes.

    That is checked by whoever acts on it.
    """

    path: Path
    folder: Path
    """The known folder it was seen in, else its own directory."""
    size: int
    allocated: int
    links: int
    filesystem: str
    inode: int
    digest: str = ""
    sha256: str = ""
    is_compared: bool = False
    """Its digest, or a sample of head and tail, is known."""
    is_blob: bool = False


def when(seconds: int) -> datetime:
    """Return Unix seconds as an aware time."""
    return datetime.fromtimestamp(seconds, UTC)
