"""Reading a bundle: from a folder, a tar file or a stream, with nothing in it believed.

Only the members that the manifest names are read, each once, as plain files of the size it says; a
tar with anything else in it (links, devices, a second member of a name) is refused where that is
met. No name of a bundle is ever a path to write to.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, Protocol

from smartcache.errors import BundleError
from smartcache.hub.bundle import (
    BLOBS,
    COMPLETE,
    MANIFEST,
    MOST_MANIFEST,
    Manifest,
    checksum,
    decode,
)

_CHUNK = 1 << 20
_MOST_AFTER = 1 << 20
"""Bytes after the end of a tar that are read away, so that the program that pipes it can end."""
_FLAGS = os.O_RDONLY | sum(
    getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY")
)

Chunks = Callable[[], Iterator[bytes]]
"""Starts to read a content; it may be called once, before the next content is asked for."""


class Source(Protocol):
    """An open bundle. `contents` goes through all of it and then says that it is whole."""

    manifest: Manifest

    def contents(self) -> Iterator[tuple[str, Chunks]]:
        """Go through the contents, each by its sha256; BundleError at the end if one is missing."""
        ...


@contextmanager
def opened(place: Path | BinaryIO) -> Iterator[Source]:
    """Open a folder, a tar file or a stream of one, and read its manifest."""
    with ExitStack() as stack:
        if not isinstance(place, Path):
            yield TarSource(place, name="The stream")
            return
        if place.is_dir():
            yield FolderSource(place)
            return
        descriptor = os.open(place, _FLAGS & ~getattr(os, "O_NOFOLLOW", 0))
        stream = stack.enter_context(open(descriptor, "rb", buffering=0))
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise BundleError(f"{place} is neither a folder nor a file", hint="Name a bundle.")
        yield TarSource(stream, name=str(place))


class FolderSource:
    """A bundle that is a folder; it is known to be whole from the start."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        text = self._small(MANIFEST, MOST_MANIFEST)
        if self._small(COMPLETE, 1024) != checksum(text):
            raise BundleError(f"{folder} is incomplete: its manifest was changed")
        self.manifest = decode(text)
        self._check_sizes()

    def _check_sizes(self) -> None:
        """Find what is missing or cut before anything is done."""
        for sha256, size in self.manifest.contents().items():
            path = self._folder / BLOBS / sha256
            try:
                st = os.lstat(path)
            except OSError as error:
                raise BundleError(f"{path} cannot be read: {error.strerror}") from error
            if not stat.S_ISREG(st.st_mode):
                raise BundleError(f"{path} is not a plain file")
            if st.st_size != size:
                raise BundleError(f"{path} has {st.st_size} bytes instead of {size}")

    def contents(self) -> Iterator[tuple[str, Chunks]]:
        """Go through the contents; a file that is not asked for is not opened."""
        for sha256, size in self.manifest.contents().items():
            yield sha256, partial(self._chunks, sha256, size)

    def _chunks(self, sha256: str, size: int) -> Iterator[bytes]:
        with self._open(f"{BLOBS}/{sha256}") as file:
            left = size
            while left and (chunk := file.read(min(_CHUNK, left))):
                left -= len(chunk)
                yield chunk
            if left or file.read(1):
                raise BundleError(f"{self._folder / BLOBS / sha256} changed while it was read")

    def _small(self, name: str, most: int) -> bytes:
        with self._open(name) as file:
            # No more than there is: `read` makes room for all it is asked for.
            size = min(os.fstat(file.fileno()).st_size, most) + 1
            text = b"".join(iter(lambda: file.read(size), b""))
        if len(text) > most:
            raise BundleError(f"{self._folder / name} is too large for a bundle")
        return text

    def _open(self, name: str) -> BinaryIO:
        path = self._folder / name
        try:
            file = open(os.open(path, _FLAGS), "rb", buffering=0)  # noqa: SIM115 - returned
        except FileNotFoundError as error:
            what = "is incomplete" if name == COMPLETE else "is not a bundle"
            message = f"{self._folder} {what}: {name} is missing"
            raise BundleError(message) from error
        except OSError as error:
            raise BundleError(f"{path} cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise BundleError(f"{path} is not a plain file")
        return file


class TarSource:
    """A bundle that is a tar. That it is whole is known when all of it was gone through."""

    def __init__(self, stream: BinaryIO, *, name: str) -> None:
        self._stream = stream
        self._name = name
        self._left = 0
        """Bytes of the current member, with its padding, that were not read."""
        member = self._next()
        if member is None or member.name != MANIFEST:
            raise BundleError(f"{name} is not a bundle: it does not begin with {MANIFEST}")
        if member.size > MOST_MANIFEST:
            raise BundleError(f"The manifest of {name} is too large to be one")
        text = b"".join(self._chunks(member.size))
        self._complete = checksum(text)
        self.manifest = decode(text)

    def contents(self) -> Iterator[tuple[str, Chunks]]:
        """Go through the contents in the order of the tar; what is not asked for is passed over."""
        missing = self.manifest.contents()
        while (member := self._next()) is not None and member.name != COMPLETE:
            folder, _, sha256 = member.name.partition("/")
            size = missing.pop(sha256, None) if folder == BLOBS else None
            if size is None:
                message = f"{self._name} has a member that does not belong there: {member.name!r}"
                raise BundleError(message)
            if size != member.size:
                raise BundleError(f"{member.name} has {member.size} bytes instead of {size}")
            yield sha256, partial(self._chunks, size)
        self._check_end(member, missing)

    def _check_end(self, member: tarfile.TarInfo | None, missing: dict[str, int]) -> None:
        if member is None or missing:
            raise self._cut()
        if member.size != len(self._complete):
            raise BundleError(f"{self._name} is incomplete: its manifest was changed")
        if b"".join(self._chunks(member.size)) != self._complete:
            raise BundleError(f"{self._name} is incomplete: its manifest was changed")
        if self._next() is not None:
            raise BundleError(f"{self._name} continues after its end")
        left = _MOST_AFTER
        while left > 0 and (chunk := self._stream.read(min(left, _CHUNK))):
            left -= len(chunk)

    def _next(self) -> tarfile.TarInfo | None:
        """Return the next member, a plain file; None at the end of the archive."""
        self._pass_over()
        header = self._read(tarfile.BLOCKSIZE)
        if not any(header):  # the end, or nothing at all
            return None
        try:
            member = tarfile.TarInfo.frombuf(header, "ascii", "surrogateescape")
        except tarfile.HeaderError as error:
            if len(header) < tarfile.BLOCKSIZE:
                raise self._cut() from error
            raise BundleError(f"{self._name} is damaged, or not a plain tar file") from error
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.size < 0:
            message = f"{self._name} has a member that is not a plain file: {member.name!r}"
            hint = "smartcache writes none; unpack the tar, look, and import the folder."
            raise BundleError(message, hint=hint)
        self._left = member.size + -member.size % tarfile.BLOCKSIZE
        return member

    def _chunks(self, size: int) -> Iterator[bytes]:
        while size:
            chunk = self._stream.read(min(_CHUNK, size))
            if not chunk:
                raise self._cut()
            size -= len(chunk)
            self._left -= len(chunk)
            yield chunk

    def _pass_over(self) -> None:
        if self._left > _CHUNK:
            with suppress(OSError, ValueError):  # a pipe cannot be sought in
                self._stream.seek(self._left, os.SEEK_CUR)
                self._left = 0
        while self._left:
            skipped = len(self._stream.read(min(_CHUNK, self._left)))
            if not skipped:
                raise self._cut()
            self._left -= skipped

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size and (more := self._stream.read(size - len(data))):
            data += more
        return data

    def _cut(self) -> BundleError:
        return BundleError(
            f"{self._name} is incomplete: it ends early",
            hint="Copy or export it again; what has arrived will not be read a second time.",
        )
