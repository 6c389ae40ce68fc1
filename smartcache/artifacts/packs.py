"""The pack files of a set: opened for reading by everybody, for writing by one process each.

A pack only ever grows, up to its seal, and is never punched or truncated: what lies behind the
end that its writer knows is not looked at, and what lies before it never changes. Space comes back
when compaction has copied what is wanted and unlinks the file; whoever has it open keeps it.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import re
import secrets
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from smartcache.artifacts.packnotes import last_number, set_last_number
from smartcache.artifacts.records import (
    MOST_PACKS,
    PACK_HEADER_BYTES,
    PackHeader,
    position,
)
from smartcache.artifacts.reserving import Reserved
from smartcache.artifacts.rows import Pack
from smartcache.artifacts.setindex import SetIndex
from smartcache.errors import (
    ArtifactError,
    DamagedArtifactError,
    NoSpaceError,
    SetFormatError,
    SmartcacheError,
)
from smartcache.store.faults import reached
from smartcache.store.flock import Descriptor, try_lock
from smartcache.store.kernel import sync_directory
from smartcache.store.locks import Claim, claim

if TYPE_CHECKING:
    import numpy as np

_log = logging.getLogger(__name__)
SUFFIX = ".pack"
_MOST_OPEN = 256
_POPULATE_READ = 22
"""MADV_POPULATE_READ, which the module mmap does not name."""
_MAP_STEP = 16 << 20
"""A pack that grows is mapped anew when it has grown by so much; until then it is read."""
_TO_READ = (
    os.O_RDONLY
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)  # what is no file is not waited for
)
_NUMBER = re.compile("[0-9]{8}")
_FULL = frozenset({errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EFBIG})
_MOST_PIECES = 1000
"""Of one pwritev; Linux takes 1024."""


def pack_path(folder: Path, number: int) -> Path:
    """Return where the pack of a number lies."""
    return folder / f"{number:08d}{SUFFIX}"


def pack_numbers(folder: Path) -> list[int]:
    """Return the numbers of all packs in a folder."""
    names = [name.removesuffix(SUFFIX) for name in os.listdir(folder) if name.endswith(SUFFIX)]
    numbers = [int(name) for name in names if _NUMBER.fullmatch(name)]
    return sorted(number for number in numbers if 0 < number <= MOST_PACKS)


class OpenPack:
    """A pack open for reading; closed when the last who holds the object is gone."""

    __slots__ = ("_mapped", "_mapping", "fd", "nonce", "number")

    def __init__(self, folder: Path, number: int, set_id: bytes) -> None:
        self.fd = -1
        self.number = number
        self._mapped: np.ndarray | None = None
        self._mapping: mmap.mmap | None = None
        path = pack_path(folder, number)
        try:
            self.fd = os.open(path, _TO_READ)
            if not stat.S_ISREG(os.fstat(self.fd).st_mode):
                raise SetFormatError(f"{path} is not a regular file", path=path)
            head = PackHeader.parse(os.pread(self.fd, PACK_HEADER_BYTES, 0))
        except FileNotFoundError:
            raise
        except OSError as error:
            message = f"{path} cannot be read: {error.strerror}"
            raise SetFormatError(message, path=path) from error
        if (head.number, head.set_id) != (number, set_id):
            raise SetFormatError(f"{path} is a pack of another set or number", path=path)
        self.nonce = head.nonce
        # What is read is announced, to the byte. Left to itself, the kernel reads what lies around
        # it as well, megabytes for each artifact.
        self._advise("POSIX_FADV_RANDOM", 0, 0)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)

    @property
    def size(self) -> int:
        """The bytes of the file, as it is now."""
        return os.fstat(self.fd).st_size

    @property
    def is_unlinked(self) -> bool:
        """Whether compaction has taken its name away."""
        return not os.fstat(self.fd).st_nlink

    @property
    def is_shorter(self) -> bool:
        """Whether the file is shorter than what is mapped of it: to touch that would be fatal."""
        return self._mapped is not None and self.size < len(self._mapped)

    def unmap(self) -> None:
        """Map the pack anew when it is needed."""
        self._mapped = None

    def position(self, offset: int) -> int:
        """Return the position of an offset in this pack."""
        return position(self.number, offset)

    def mapped(self, end: int) -> np.ndarray | None:
        """Return the bytes of the pack, mapped at least up to `end`; None: not worth it yet.

        The file must not have become shorter: that is looked at here, and only here.
        """
        import numpy as np

        size = self.size
        found = self._mapped
        if found is not None and len(found) >= end:
            return found if size >= len(found) else None
        if size < end or (found is not None and size < len(found) + _MAP_STEP):
            return None
        try:
            mapping = mmap.mmap(self.fd, size, access=mmap.ACCESS_READ)
        except OSError:
            return None  # no room for it, or too many of them
        self._mapped = np.frombuffer(mapping, np.uint8)
        self._mapping = mapping
        return self._mapped

    def populate(self, start: int, length: int) -> None:
        """Let a mapped range be in the page tables: one call in place of a fault for 16 pages."""
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        if self._mapping is not None:
            with suppress(OSError, ValueError):  # a kernel before 5.14, or the file is shorter
                self._mapping.madvise(_POPULATE_READ, first, start + length - first)

    def announce(self, start: int, length: int) -> None:
        """Have the kernel read a range into memory; nobody waits for it."""
        self._advise("POSIX_FADV_WILLNEED", start, length)

    def _advise(self, advice: str, start: int, length: int) -> None:
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                os.posix_fadvise(self.fd, start, length, getattr(os, advice))

    def view(self, start: int, length: int) -> np.ndarray:
        """Return some bytes of the pack, where they lie; the pack is mapped anew if need be."""
        import numpy as np

        found = self.mapped(start + length)
        if found is None:
            self._mapped = None
            found = self.mapped(start + length)
        if found is not None:
            return found[start : start + length]
        data = os.pread(self.fd, length, start) if start + length <= self.size else b""
        if len(data) != length:
            raise DamagedArtifactError(f"Pack {self.number} ends before the artifact does")
        return np.frombuffer(data, np.uint8)


class PackFiles:
    """The packs of a set, opened when they are first read; some hundreds stay open."""

    def __init__(self, folder: Path, set_id: bytes) -> None:
        self.folder = folder
        self.set_id = set_id
        self._open: dict[int, OpenPack] = {}
        self.gone: set[int] = set()
        """Packs that were compacted away: their chunks are elsewhere now."""

    def __getitem__(self, number: int) -> OpenPack:
        """Return an open pack; FileNotFoundError if it was compacted away."""
        found = self._open.get(number)
        if found is None:
            try:
                found = self._open[number] = OpenPack(self.folder, number, self.set_id)
            except FileNotFoundError:
                self.gone.add(number)
                raise
            if len(self._open) > _MOST_OPEN:
                self._open.pop(list(self._open)[0], None)  # noqa: RUF015 - in one step: for threads
        return found

    def forget(self, number: int) -> None:
        """Let go of a pack that is about to be unlinked."""
        self._open.pop(number, None)
        self.gone.add(number)

    def forget_unlinked(self) -> bool:
        """Let go of packs that another process has compacted away: they still take their room."""
        gone = [number for number, pack in list(self._open.items()) if pack.is_unlinked]
        for number in gone:
            self.forget(number)
        return bool(gone)

    def close(self) -> None:
        """Let go of all packs; those in use are closed by whoever uses them."""
        self._open.clear()


class PackWriter:
    """The one writer of a pack. Not for several threads at once."""

    def __init__(self, folder: Path, claimed: Claim, head: PackHeader, end: int) -> None:
        self.folder = folder
        self.number = head.number
        self.nonce = head.nonce
        self.end = end
        self.committed = end
        """Where the rows end that are in the index."""
        self.synced = 0
        self.is_durable = False
        """Somebody counts on it that what is written survives power loss."""
        self.layouts: set[bytes] = set()
        self.is_closed = False
        self.is_broken = False
        """A write has failed in the middle: what is behind `end` is nothing."""
        self._claim = claimed
        self._fd = claimed.fd  # asking the claim each time would cost more than it tells
        self._is_name_synced = False
        self._reserved = Reserved(folder, claimed.fd)

    @property
    def fd(self) -> int:
        """The descriptor; StoreError in a forked child, which has no writer."""
        return self._claim.fd

    @property
    def is_truncated(self) -> bool:
        """Whether somebody has cut the file off.

        It must not become longer again: those who have mapped it would read zeros.
        """
        return os.fstat(self._fd).st_size < self.end

    def write(self, pieces: Sequence[bytes | memoryview | bytearray], size: int) -> None:
        """Append records; NoSpaceError if they do not fit, and the pack is not written any more."""
        if self.end + size > self._reserved.until:
            self._reserved.extend(self.end, size)
        try:
            written = 0
            if len(pieces) <= _MOST_PIECES:
                written = os.pwritev(self._fd, pieces, self.end)
            if written != size:
                self._write_rest(pieces, written)
        except OSError as error:
            self.is_broken = True
            path = pack_path(self.folder, self.number)
            if error.errno in _FULL:
                raise NoSpaceError(f"No space left to write {path}", path=path) from error
            message = f"Cannot write {path}: {error.strerror or error}"
            raise ArtifactError(message, hint="Check the disk.", path=path) from error
        self.end += size
        reached("pack: written")

    def _write_rest(self, pieces: Sequence[bytes | memoryview | bytearray], written: int) -> None:
        """Write what one call did not take: more than 2 GiB, or very many pieces."""
        offset = self.end
        for piece in pieces:
            view = memoryview(piece).cast("B")
            while len(view):
                skipped = min(written, len(view))
                view, written, offset = view[skipped:], written - skipped, offset + skipped
                if len(view):
                    count = os.pwrite(self.fd, view, offset)
                    view, offset = view[count:], offset + count

    def sync(self) -> None:
        """Bring all that was written to the disk."""
        end = self.end
        if self.synced >= end:
            return
        getattr(os, "fdatasync", os.fsync)(self.fd)
        if not self._is_name_synced:
            sync_directory(self.folder)
            self._is_name_synced = True
        self.synced = end

    def close(self) -> None:
        """Let go of the pack; another process may write to it if there is room."""
        self.is_closed = True
        self._reserved.release()
        self._claim.release(remove=False)


def new_writer(folder: Path, index: SetIndex, set_id: bytes) -> PackWriter:
    """Make a pack and become its writer."""
    with index.write():
        # Never one that there was: others may have it open, or remember what lay in it.
        number = max([last_number(index), *index.packs(), *pack_numbers(folder)]) + 1
        if number > MOST_PACKS:
            raise ArtifactError("The set has too many packs", hint="Run 'artifacts compact'.")
        claimed = claim(pack_path(folder, number))
        if claimed is None:
            raise ArtifactError(f"{pack_path(folder, number)} is locked by another process")
        reached("pack: claimed")
        head = PackHeader(number, secrets.randbits(64), set_id)
        try:
            os.pwrite(claimed.fd, head.to_bytes(), 0)
        except OSError as error:
            claimed.release()
            if error.errno in _FULL:
                message = f"No space left to make a pack in {folder}"
                raise NoSpaceError(message, path=folder) from error
            raise
        reached("pack: made")
        index.put_pack(Pack(number, False, PACK_HEADER_BYTES, 0, 0, 0, 0))  # noqa: FBT003
        set_last_number(index, number)
    return PackWriter(folder, claimed, head, PACK_HEADER_BYTES)


def kept_unwritten(path: Path) -> Descriptor | None:
    """Let nobody write to a pack while the result is open; None: somebody does."""
    descriptor = Descriptor(str(path))
    if try_lock(descriptor.fd, exclusive=False):
        return descriptor
    descriptor.close()
    return None


def reopened_writer(folder: Path, index: SetIndex, number: int, set_id: bytes) -> PackWriter | None:
    """Become the writer of a pack that another process has left with room; None: not possible.

    Only where the file ends where its rows end: behind it nothing that was torn may lie.
    """
    path = pack_path(folder, number)
    known = index.pack(number)
    # Looked at first: whoever reads the tail of a killed writer must not find its pack in use.
    if known is None or file_size(path) != known.watermark:
        return None
    try:
        claimed = claim(path)
    except SmartcacheError as error:
        _log.warning("%s", error)
        return None
    if claimed is None:
        return None
    pack = index.pack(number)  # after the claim: nobody else writes to it now
    try:
        head = PackHeader.parse(os.pread(claimed.fd, PACK_HEADER_BYTES, 0))
        size = os.fstat(claimed.fd).st_size
    except (SetFormatError, OSError):
        size = -1
    is_same = (
        pack is not None
        and not pack.is_sealed
        and size == pack.watermark
        and (head.number, head.set_id) == (number, set_id)
    )
    if not is_same:
        # Compacted away in this moment: then it was made anew just now.
        claimed.release(remove=pack is None)
        return None
    return PackWriter(folder, claimed, head, size)


def file_size(path: Path) -> int:
    """Return the bytes of a regular file; -1: there is none."""
    try:
        found = os.lstat(path)
    except OSError:
        return -1
    return found.st_size if stat.S_ISREG(found.st_mode) else -1
