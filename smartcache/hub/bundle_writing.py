"""Writing a bundle: to a folder, a tar file or a stream.

A folder or file gets its name as the last step, when all of it is on the disk; until then it has a
hidden name beside it, which the next export to the same place removes if this one is killed.
"""

from __future__ import annotations

import os
import shutil
import stat
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Protocol

from smartcache.errors import DestinationExistsError, FileChangedError, HubError
from smartcache.hub.bundle import BLOBS, COMPLETE, MANIFEST
from smartcache.store import explained
from smartcache.system import (
    Advance,
    Algorithm,
    Hasher,
    Hashes,
    claim,
    clone,
    exchange,
    hash_file,
    need_room,
    reached,
    sync_directory,
)

_CHUNK = 1 << 20
_RECORD = 10_240
"""What tar programs pad an archive to."""

WRITING = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


class Sink(Protocol):
    """Where the members of a bundle go, in order."""

    def text(self, name: str, data: bytes) -> None:
        """Write a small member."""

    def blob(
        self, sha256: str, source: int, size: int, wanted: tuple[Algorithm, ...], advance: Advance
    ) -> Hashes:
        """Write a blob from an open file; return the hashes of exactly what was written."""
        ...


class FolderSink:
    """A bundle that is a folder. Blobs share blocks with the cache where the filesystem can."""

    def __init__(self, folder: Path, size: int) -> None:
        self._folder = folder
        self._left = size
        self._can_clone = True
        os.mkdir(folder)
        os.mkdir(folder / BLOBS)

    def text(self, name: str, data: bytes) -> None:
        """Write a small file, on the disk when this returns."""
        with open(self._folder / name, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def blob(
        self, sha256: str, source: int, size: int, wanted: tuple[Algorithm, ...], advance: Advance
    ) -> Hashes:
        """Write a blob by reflink or copy, never by hard link: the user may edit a bundle."""
        target = os.open(self._folder / BLOBS / sha256, WRITING | os.O_EXCL, 0o644)
        try:
            if self._can_clone and size and clone(source, target):
                hashes, _ = hash_file(target, wanted, advance=advance)
            else:
                self._need_room(size)
                hasher = Hasher(wanted, size=size)
                for chunk in exactly(source, size, advance):
                    hasher.update(chunk)
                    write_all(target, chunk)
                hashes = hasher.finish()
            os.fsync(target)
        finally:
            os.close(target)
        self._left -= size
        return hashes

    def _need_room(self, size: int) -> None:
        """Say early that the disk is too small, once it is known that bytes must be copied."""
        if self._can_clone and size:
            self._can_clone = False
            need_room(self._folder, self._left, "The bundle")

    def finish(self) -> None:
        """Bring the names to the disk."""
        sync_directory(self._folder / BLOBS)
        sync_directory(self._folder)


class TarSink:
    """A bundle that is a tar: plain files, sizes above 8 GB as GNU tar writes them."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._written = 0

    def text(self, name: str, data: bytes) -> None:
        """Write a small member."""
        self._header(name, len(data))
        self._write(data)
        self._pad(tarfile.BLOCKSIZE)

    def blob(
        self, sha256: str, source: int, size: int, wanted: tuple[Algorithm, ...], advance: Advance
    ) -> Hashes:
        """Write a blob. If its file is too short, what was written is no bundle any more."""
        hasher = Hasher(wanted, size=size)
        self._header(f"{BLOBS}/{sha256}", size)
        for chunk in exactly(source, size, advance):
            hasher.update(chunk)
            self._write(chunk)
        self._pad(tarfile.BLOCKSIZE)
        return hasher.finish()

    def finish(self) -> None:
        """Write the end of the archive."""
        self._write(bytes(2 * tarfile.BLOCKSIZE))
        self._pad(_RECORD)
        self._stream.flush()

    def _header(self, name: str, size: int) -> None:
        member = tarfile.TarInfo(name)
        member.size = size
        self._write(member.tobuf(tarfile.GNU_FORMAT))

    def _pad(self, unit: int) -> None:
        self._write(bytes(-self._written % unit))

    def _write(self, data: bytes) -> None:
        self._written += len(data)
        self._stream.write(data)


def exactly(source: int, size: int, advance: Advance) -> Iterator[bytes]:
    """Read a file that must have this size; FileChangedError if it has not, or not any more."""
    left = size
    while chunk := os.read(source, min(_CHUNK, left + 1)):
        left -= len(chunk)
        if left < 0:
            break
        yield chunk
        advance(len(chunk))
    if left:
        raise FileChangedError("A file changed its size while it was read")


def write_all(target: int, data: bytes) -> None:
    """Write all of it to a descriptor."""
    view = memoryview(data)
    while view:
        view = view[os.write(target, view) :]


# names


def check_destination(path: Path, *, is_tar: bool, force: bool) -> None:
    """Raise unless a bundle may be written there; `force` replaces another bundle, never more."""
    if not path.parent.is_dir():
        hint = "Make it first, or choose another place."
        raise HubError(f"There is no folder {path.parent}", hint=hint)
    try:
        st = os.lstat(path)
    except FileNotFoundError:
        return
    if not is_tar and stat.S_ISDIR(st.st_mode) and not os.listdir(path):
        return
    if not force:
        hint = "Choose another name, or replace it with --force."
        raise DestinationExistsError(f"{path} exists already", path=path, hint=hint)
    if not (_is_tar_bundle(path, st) if is_tar else _is_bundle(path, st)):
        message = f"{path} exists and is more than a bundle; it was not replaced"
        raise DestinationExistsError(message, path=path, hint="Choose another name.")


def _is_tar_bundle(path: Path, st: os.stat_result) -> bool:
    """Say whether a file begins as a bundle does."""
    if not stat.S_ISREG(st.st_mode):
        return False
    with open(path, "rb") as file:
        start = file.read(tarfile.BLOCKSIZE)
    try:
        return tarfile.TarInfo.frombuf(start, "ascii", "surrogateescape").name == MANIFEST
    except tarfile.HeaderError:
        return False


def _is_bundle(path: Path, st: os.stat_result) -> bool:
    """Say whether a folder has the files of a bundle alone: only such a one may be replaced."""
    if not stat.S_ISDIR(st.st_mode):
        return False
    names = set(os.listdir(path))
    blobs = path / BLOBS
    if MANIFEST not in names or not names <= {MANIFEST, BLOBS, COMPLETE}:
        return False
    if BLOBS not in names:
        return True  # somebody has removed it, or copied no more than this
    is_folder = stat.S_ISDIR(os.lstat(blobs).st_mode)
    return is_folder and all(len(name) == 64 for name in os.listdir(blobs))  # noqa: PLR2004 - a sha256


@contextmanager
def named_at_last(path: Path, *, force: bool) -> Iterator[Path]:
    """Give a hidden name beside `path` to write to; at the end of the block it becomes `path`.

    If the block raises, nothing is left, and what was at `path` is as it was.
    """
    start = os.fsdecode(os.fsencode(path.name)[:100])
    holder = claim(path.with_name(f".{start}.smartcache-export"))
    if holder is None:
        hint = "Wait for it to end, or choose another name."
        raise HubError(f"Another process is writing {path}", hint=hint)
    part = path.with_name(f".{start}.smartcache-part")
    try:
        remove(part)
        reached("export: begun")
        with explained(path.parent):
            yield part
            reached("export: written")
            _rename(part, path, force=force)
            sync_directory(path.parent)
            reached("export: named")
    finally:
        with suppress(OSError):
            remove(part)
        holder.release()


def _rename(part: Path, path: Path, *, force: bool) -> None:
    is_folder = part.is_dir()
    check_destination(path, is_tar=not is_folder, force=force)  # somebody may have been faster
    if not is_folder:
        os.replace(part, path)
        return
    if not os.path.lexists(path) or not os.listdir(path):
        os.rename(part, path)  # onto an empty folder, and no other
    elif not exchange(part, path):
        os.rename(path, _aside(part))
        os.rename(part, path)
    remove(_aside(part))


def _aside(part: Path) -> Path:
    """Return where a bundle waits for its successor on filesystems that cannot exchange names."""
    return part.with_name(f"{part.name}.old")


def remove(path: Path) -> None:
    """Remove a file or folder of ours, whatever a killed process has left of it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
