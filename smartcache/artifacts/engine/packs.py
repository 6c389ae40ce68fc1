"""Pack files: read by everybody, written by one process each, and readable from a footer alone.

A pack only grows, and is never punched or truncated. Its writer holds the kernel's lock of the
file. When the writer is done it leaves a *footer*, which lists the records since the footer before
it in columns sorted by key hash, and an `end` that says where the footer is. The next writer goes
on behind them, until the pack is full and its `end` says so: then it is *sealed*. Footers are a
help and no more: where the last one is missing, torn or wrong, the records are scanned.

Nothing outside of this module knows a file descriptor.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import resource
import secrets
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from smartcache.artifacts.engine.records import (
    ALIGN,
    END,
    FOOTER,
    HEADER_BYTES,
    LAYOUT,
    LOST,
    MOST_SEQ,
    PACK_HEADER_BYTES,
    PIN,
    SEALED,
    SKIP,
    UNPIN,
    Entry,
    PackHeader,
    bare_record,
    next_header,
    padded,
    parse_header,
    parse_meta,
    plain_record,
    scan,
)
from smartcache.errors import ArtifactError, DamagedArtifactError, NoSpaceError, SetFormatError
from smartcache.system.faults import reached
from smartcache.system.filesystems import mount_of
from smartcache.system.kernel import reserve, sync_data, sync_directory
from smartcache.system.locks import Claim, claim

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Column = np.ndarray[Any, np.dtype[Any]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]
Buffer = bytearray | memoryview | Bytes

SUFFIX = ".pack"
PACK_BYTES = 1 << 30
"""A pack that has reached this size is sealed."""
MOST_FOOTER = 128 << 20
"""A thousand bytes for the key of every record, and the layouts: no footer is larger."""
PACK_RECORDS = 1 << 16
"""So is one with so many records: whoever meets it without a footer scans them."""
_NAME = re.compile("[0-9a-f]{16}")
_TO_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_NO_WAIT = getattr(os, "RWF_NOWAIT", 0)
_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})
_LOST_BY_DISK = frozenset({errno.EIO, errno.EBADMSG, getattr(errno, "EUCLEAN", errno.EIO)})
_FULL = frozenset({errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EFBIG})
_MOST_PIECES = 1000
"""Of one pwritev; Linux takes 1024."""
_MAP_STEP = 16 << 20
"""A pack that grows is mapped anew when it has grown by so much; until then it is read."""
_MOST_OPEN = 256
_A_WHILE = 5.0
_RESERVE_FROM = 4 << 20
"""Bytes of a pack below which no room is reserved."""
_RESERVE_MOST = 64 << 20
_SPARE = 32
"""So many times the reserved room must be free on the disk."""


class PackSource(Protocol):
    """Where the bytes of a pack come from: a local file, or another place that has sealed packs."""

    path: Path

    @property
    def size(self) -> int:
        """The bytes of the pack, as it is now."""
        ...

    def bytes_at(self, offset: int, length: int) -> bytes:
        """Return some bytes; fewer at the end."""
        ...

    def read(self, offset: int, buffers: Sequence[Buffer], size: int, *, wait: bool = True) -> bool:
        """Fill buffers of `size` bytes in all; without `wait`, False if that would take a while."""
        ...

    def view(self, start: int, end: int) -> Bytes | None:
        """Return a range of the pack where it lies in memory; None: it has to be read."""
        ...

    def memory(self) -> Bytes | None:
        """Return all of the pack that is mapped, with a look at its length; None: not mapped."""
        ...

    @property
    def is_whole(self) -> bool:
        """Whether the pack is as long as what is mapped of it."""
        ...

    def announce(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Say which ranges (offset and length) will be read soon."""
        ...

    def distrust(self, offset: int, size: int) -> bool:
        """Hear that a range is damaged; True: it is read anew from where it came from."""
        ...


class LocalPack:
    """A pack of this disk, open for reading; closed when the last who holds the object is gone."""

    __slots__ = ("_fd", "_is_ours", "_memory", "path")

    def __init__(self, path: Path) -> None:
        self._fd = -1
        self.path = path
        self._memory: Bytes | None = None
        try:
            self._fd = os.open(path, _TO_READ)
            found = os.fstat(self._fd)
            if not stat.S_ISREG(found.st_mode):
                raise SetFormatError(f"{path} is not a regular file", path=path)
            # Another user could truncate it, and to touch a mapping of it would be fatal then.
            self._is_ours = found.st_uid == os.geteuid()
            # What is read is announced, to the byte. Left to itself, the kernel reads what lies
            # around it as well, megabytes for each artifact.
            with suppress(OSError, AttributeError):
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            message = f"{path} cannot be read: {error.strerror}"
            raise SetFormatError(message, path=path) from error

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    @property
    def size(self) -> int:
        """The bytes of the file, as it is now."""
        return os.fstat(self._fd).st_size

    @property
    def is_old(self) -> bool:
        """Whether nothing was written to it for a while."""
        return time.time() - os.fstat(self._fd).st_mtime > _A_WHILE

    def bytes_at(self, offset: int, length: int) -> bytes:
        """Return some bytes; fewer at the end. What the disk has lost is zeros: no record."""
        try:
            return os.pread(self._fd, length, offset)
        except OSError as error:
            if error.errno not in _LOST_BY_DISK:
                raise self._unread(error) from error
        end = min(offset + length, self.size)
        if length <= mmap.PAGESIZE:
            return bytes(max(0, end - offset))
        pages = range(offset, end, mmap.PAGESIZE)
        return b"".join(self.bytes_at(at, min(mmap.PAGESIZE, end - at)) for at in pages)

    def read(self, offset: int, buffers: Sequence[Buffer], size: int, *, wait: bool = True) -> bool:
        """Fill buffers; DamagedArtifactError if the file ends before they are full."""
        global _NO_WAIT  # noqa: PLW0603 - a filesystem without it: waiting is all there is
        try:
            if wait or not _NO_WAIT:
                count = os.preadv(self._fd, buffers, offset)  # type: ignore[arg-type]
            else:
                count = os.preadv(self._fd, buffers, offset, _NO_WAIT)  # type: ignore[arg-type]
        except BlockingIOError:
            return False
        except OSError as error:
            if not wait and error.errno in _UNSUPPORTED:
                _NO_WAIT = 0
                return self.read(offset, buffers, size)
            raise self._unread(error) from error
        if count == size:
            return True
        if not wait:
            return False
        self._read_rest(offset, buffers, count)
        return True

    def _read_rest(self, offset: int, buffers: Sequence[Buffer], count: int) -> None:
        """Read what one call did not give: more than 2 GiB or a thousand pieces, or the end."""
        for buffer in buffers:
            view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
            skipped = min(count, len(view))
            view, count, offset = view[skipped:], count - skipped, offset + skipped
            while len(view):
                try:
                    more = os.preadv(self._fd, [view], offset)
                except OSError as error:
                    raise self._unread(error) from error
                if more <= 0:
                    raise DamagedArtifactError(f"{self.path.name} ends before the artifact does")
                view, offset = view[more:], offset + more

    def _unread(self, error: OSError) -> ArtifactError:
        """Return what a failed read means: only what the disk has lost is damaged, and deleted."""
        message = f"{self.path.name} cannot be read: {error.strerror}"
        if error.errno in _LOST_BY_DISK:
            return DamagedArtifactError(message, path=self.path)
        return ArtifactError(message, hint="Check the disk, and try again.", path=self.path)

    def view(self, start: int, end: int) -> Bytes | None:
        """Return a range where it is mapped; None: not mapped so far, or no room for a mapping.

        The file must not have become shorter than its mapping: to touch that would be fatal. So
        whoever uses views of a pack asks `is_whole` before, once for many.
        """
        memory = self._memory
        if memory is None or len(memory) < end:
            size = self.size
            if (
                not self._is_ours
                or size < end
                or (memory is not None and size < len(memory) + _MAP_STEP)
            ):
                return None
            try:
                mapping = mmap.mmap(self._fd, size, access=mmap.ACCESS_READ)
            except (OSError, ValueError):
                return None  # no room for it, or too many of them
            memory = self._memory = np.frombuffer(mapping, np.uint8)
        return memory[start:end]

    def memory(self) -> Bytes | None:
        """Return all of the pack that is mapped, with a look at its length; None: not mapped."""
        size = self.size
        if self._memory is not None and size < len(self._memory):
            self._memory = None
        self.view(0, size)
        return self._memory

    @property
    def is_whole(self) -> bool:
        """Whether the file is as long as what is mapped of it; else the mapping is dropped."""
        memory = self._memory
        if memory is not None and self.size < len(memory):
            self._memory = None
            return False
        return True

    def sync(self) -> None:
        """Bring all of it to the disk."""
        sync_data(self._fd)

    def distrust(self, offset: int, size: int) -> bool:  # noqa: ARG002
        """Return False: there are no other bytes than those of the file."""
        return False

    def announce(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Have the kernel read ranges into memory; nobody waits for it."""
        if hasattr(os, "posix_fadvise"):
            for start, length in ranges:
                with suppress(OSError):
                    os.posix_fadvise(self._fd, start, length, os.POSIX_FADV_WILLNEED)


class PackFiles:
    """The packs of a folder that are open; the number of descriptors is bounded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.elsewhere: Callable[[str], PackSource] | None = None
        """Opens a pack that is no file here; FileNotFoundError if there is none."""
        self._open: dict[str, PackSource] = {}
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        soft = _MOST_OPEN * 8 if soft == resource.RLIM_INFINITY else soft
        self.most = max(4, min(_MOST_OPEN, soft // 8))  # a mapping keeps a descriptor of its own
        """So many packs may be held at once by one who goes through many."""

    def __getitem__(self, name: str) -> PackSource:
        """Return an open pack; FileNotFoundError if it was compacted away.

        Who claims it at that moment makes it anew, empty: that is not the pack either.
        """
        found = self._open.get(name)
        if found is None:
            found = self._opened(name)
            if found.size < PACK_HEADER_BYTES:
                raise FileNotFoundError(errno.ENOENT, "The pack is empty", os.fspath(found.path))
            self._open[name] = found
            if len(self._open) > self.most:
                for other in list(self._open)[: -self.most]:
                    self._open.pop(other, None)
        return found

    def _opened(self, name: str) -> PackSource:
        try:
            return LocalPack(self.folder / f"{name}{SUFFIX}")
        except FileNotFoundError:
            if self.elsewhere is not None:
                with suppress(FileNotFoundError):
                    return self.elsewhere(name)
            raise

    def forget(self, name: str) -> None:
        """Let go of a pack that is gone: it would still take its room."""
        self._open.pop(name, None)

    def clear(self) -> None:
        """Let go of all packs; those in use are closed by whoever uses them."""
        self._open.clear()


def pack_names(folder: str | Path | int) -> list[str]:
    """Return the names of all packs in a folder, without the suffix."""
    names = (name[: -len(SUFFIX)] for name in os.listdir(folder) if name.endswith(SUFFIX))
    return sorted(filter(is_pack_name, names))


def is_pack_name(name: str) -> bool:
    """Say whether a text can be the name of a pack."""
    return _NAME.fullmatch(name) is not None


# what a footer is

_FOOTER = struct.Struct("<QQQQQQ")
_PLAIN = 1 << 31


class Rows(NamedTuple):
    """Records as columns, sorted by key hash, then by sequence number."""

    hash: Column
    twin: Column
    seq: Column
    offset: Column
    size: Column
    """In units of 64 bytes."""
    meta: Column
    """In units of 64 bytes; the highest bit says that the record is plain."""
    layout: Column
    """Offset, in units of 64 bytes."""
    expires: Column
    kind: Column
    key_ends: Column
    """Where in `keys` the key of each row ends."""
    keys: bytes | memoryview
    pointer_row: Column
    pointer_target: Column
    pointer_size: Column

    def key(self, row: int) -> bytes:
        """Return the key of a row."""
        start = int(self.key_ends[row - 1]) if row else 0
        return bytes(self.keys[start : int(self.key_ends[row])])

    def entries(self) -> Iterator[Entry]:
        """Go through the rows one by one."""
        pointers: dict[int, list[tuple[int, int]]] = {}
        for row, target, size in zip(
            self.pointer_row.tolist(), self.pointer_target.tolist(), self.pointer_size.tolist(),
            strict=True,
        ):  # fmt: skip
            pointers.setdefault(row, []).append((target, size))
        columns = (column.tolist() for column in self[:9])
        for row, (hash_, twin, seq, offset, size, meta, layout, expires, kind) in enumerate(
            zip(*columns, strict=True)
        ):
            yield Entry(
                kind, hash_, twin, seq, offset, size << 6, (meta & ~_PLAIN) << 6, layout << 6,
                expires, bool(meta & _PLAIN), self.key(row), tuple(pointers.get(row, ())),
            )  # fmt: skip


_WIDTHS = ("<u8", "<u8", "<u8", "<u8", "<u4", "<u4", "<u4", "<u4", "<u1", "<u4")
_POINTERS = ("<u4", "<u8", "<u8")


def newest(entries: Iterable[Entry]) -> list[Entry]:
    """Return, of the records of each key, the last put or delete and the last pin or unpin."""
    found: dict[tuple[int, int, bool, bool], Entry] = {}
    for entry in entries:
        group = (
            entry.hash, entry.twin, entry.kind in (PIN, UNPIN), entry.kind == LOST,
        )  # fmt: skip
        known = found.get(group)
        if known is None or known.seq <= entry.seq:
            found[group] = entry
    return list(found.values())


def rows_of(entries: Iterable[Entry]) -> Rows:
    """Return records as columns."""
    kept = sorted(entries, key=lambda entry: (entry.hash, entry.twin, entry.seq))
    pointers = [
        (row, target, size)
        for row, entry in enumerate(kept)
        for target, size in entry.pointers
    ]  # fmt: skip
    columns = (
        [entry.hash for entry in kept],
        [entry.twin for entry in kept],
        [entry.seq for entry in kept],
        [entry.offset for entry in kept],
        [entry.size >> 6 for entry in kept],
        [entry.meta >> 6 | (_PLAIN if entry.is_plain else 0) for entry in kept],
        [entry.layout >> 6 for entry in kept],
        [entry.expires for entry in kept],
        [entry.kind for entry in kept],
        np.cumsum([len(entry.key) for entry in kept], dtype="<u4"),
    )
    pointed = ([pointer[number] for pointer in pointers] for number in range(3))
    return Rows._make(
        (
            *map(np.array, columns, _WIDTHS),
            b"".join(entry.key for entry in kept),
            *map(np.array, pointed, _POINTERS),
        )
    )


class Footer(NamedTuple):
    """What a footer says: the records between two offsets, and their layouts."""

    start: int
    """Where the first record is that it lists."""
    before: int
    """Offset of the footer before it; 0: there is none."""
    max_seq: int
    rows: Rows
    layouts: dict[int, bytes]
    size: int = 0
    """Of its record."""

    def to_bytes(self) -> bytes:
        """Return the inline bytes of its record."""
        rows = self.rows
        columns = [np.ascontiguousarray(*each) for each in zip(rows[:10], _WIDTHS, strict=True)]
        pointers = [np.ascontiguousarray(*each) for each in zip(rows[11:], _POINTERS, strict=True)]
        bodies = list(self.layouts.values())
        parts = [
            _FOOTER.pack(
                self.start, self.before, self.max_seq, len(rows.hash), len(pointers[0]), len(bodies)
            ),
            np.array(list(self.layouts), "<u8").tobytes(),
            np.array([len(body) for body in bodies], "<u8").tobytes(),
            *(column.tobytes() for column in columns),
            *(column.tobytes() for column in pointers),
            *bodies,
            bytes(rows.keys),
        ]
        return b"".join(parts)

    @classmethod
    def parse(cls, data: memoryview, end: int) -> Footer:
        """Read the inline bytes of a footer of what lies before `end`.

        DamagedArtifactError if they make no sense.
        """
        at = _FOOTER.size
        try:
            start, before, max_seq, count, pointers, layouts = _FOOTER.unpack_from(data)

            def take(width: str, number: int) -> Column:
                nonlocal at
                size = np.dtype(width).itemsize * number
                if size > len(data) - at:
                    raise DamagedArtifactError("a footer that breaks off")
                found = np.frombuffer(data, width, number, at)
                at += size
                return found

            offsets, lengths = take("<u8", layouts), take("<u8", layouts)
            columns = [take(width, count) for width in _WIDTHS]
            pointed = [take(width, pointers) for width in _POINTERS]
            bodies: dict[int, bytes] = {}
            for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True):
                if length > len(data) - at:
                    raise DamagedArtifactError("a footer that breaks off")
                bodies[offset] = bytes(data[at : at + length])
                at += length
        except (struct.error, ValueError, OverflowError) as error:
            raise DamagedArtifactError("a footer that makes no sense") from error
        rows = Rows._make((*columns, data[at:], *pointed))
        ends = columns[-1]
        is_sane = (
            (not count or int(ends[-1]) == len(data) - at)
            and bool(np.all(ends[1:] >= ends[:-1]))
            and bool(np.all(columns[0][1:] >= columns[0][:-1]))
            and (not pointers or int(pointed[0].max()) < count)
            and max_seq < MOST_SEQ
            and (not count or _is_inside(rows, end))
        )
        if not is_sane:
            raise DamagedArtifactError("a footer that makes no sense")
        return cls(start, before, max_seq, rows, bodies)


def _is_inside(rows: Rows, end: int) -> bool:
    """Say whether all records that rows speak of can lie before an offset."""
    places, sizes = rows.offset, rows.size.astype("<u8") << np.uint64(6)
    return (
        int(places.max()) < end
        and int((places + sizes).max()) <= end
        and not (places % np.uint64(ALIGN)).any()
        and bool((rows.meta & np.uint32(_PLAIN - 1) <= rows.size).all())
        and int(rows.seq.max()) < MOST_SEQ
    )


class PackState(NamedTuple):
    """What the footers of a pack say, and up to where."""

    header: PackHeader
    end: int
    """What is behind it has to be scanned."""
    is_sealed: bool
    footers: list[Footer]
    footer_bytes: int = 0
    """What these and the `end` take."""
    records_end: int = PACK_HEADER_BYTES
    """Where the last of them begins: behind the last record."""


def read_state(source: PackSource, name: str, set_id: bytes, until: int | None = None) -> PackState:
    """Read the header of a pack and its footers (those before an offset), the last one first.

    SetFormatError if it is no pack of this set. A pack whose header is damaged is known by its
    name.
    """
    size = source.size if until is None else until
    try:
        header = PackHeader.parse(source.bytes_at(0, PACK_HEADER_BYTES))
    except DamagedArtifactError as error:
        nonce = int(name, 16) if _NAME.fullmatch(name) else 0
        if next_header(source, nonce, PACK_HEADER_BYTES, size) is None:
            raise SetFormatError(f"{source.path} is not a pack", path=source.path) from error
        header = PackHeader(nonce, 0, set_id, b"", b"")
    if header.set_id != set_id:
        raise SetFormatError(f"{source.path} is a pack of another set", path=source.path)
    nothing = PackState(header, PACK_HEADER_BYTES, False, [])  # noqa: FBT003
    at = size - HEADER_BYTES
    if at < PACK_HEADER_BYTES or size % ALIGN:
        return nothing
    end = parse_header(source.bytes_at(at, HEADER_BYTES), header.nonce, at)
    if end is None or end.kind != END:
        return nothing
    footers: list[Footer] = []
    where, limit, taken = end.hash, at, HEADER_BYTES
    try:
        while where:
            footer = read_footer(source, header.nonce, where, limit)
            footers.append(footer)
            taken += footer.size
            if footer.start <= PACK_HEADER_BYTES:
                is_sealed = bool(end.flags & SEALED)
                return PackState(header, size, is_sealed, footers, taken, end.hash)
            where, limit = footer.before, min(where, footer.start)
    except DamagedArtifactError:
        pass
    return nothing


def read_footer(source: PackSource, nonce: int, offset: int, limit: int) -> Footer:
    """Read a footer; DamagedArtifactError if it is not whole."""
    raw = source.bytes_at(offset, HEADER_BYTES) if offset < limit else b""
    head = parse_header(raw, nonce, offset)
    if (
        head is None
        or head.kind != FOOTER
        or not head.meta <= min(head.size, MOST_FOOTER, limit - offset)
    ):
        raise DamagedArtifactError("a footer that is not where it should be")
    data = bytearray(head.meta)
    source.read(offset, [data], head.meta)
    return Footer.parse(parse_meta(data, nonce, offset).inline, offset)._replace(size=head.size)


# writing


class PackWriter:
    """The one writer of a pack. Not for several threads at once."""

    def __init__(self, claimed: Claim, header: PackHeader, end: int, seed: int) -> None:
        self.path = claimed.path
        self.name = claimed.path.name.removesuffix(SUFFIX)
        self.header = header
        self.nonce = header.nonce
        self.end = end
        self.seed = seed
        self.entries: list[Entry] = []
        """All that was written since `start`."""
        self.layouts: dict[bytes, int] = {}
        """By their bytes: where layouts are in this pack."""
        self.sums: dict[int, tuple[int, int]] = {}
        """By checksum: place and length of tensors that this writer has put."""
        self.start = end
        self.before = 0
        """The footer that lists what is before `start`."""
        self.listed = 0
        """How many records the footers before list."""
        self.records_end = end
        """Where the last footer begins, when it was closed."""
        self.synced = 0
        self.is_durable = False
        """Somebody counts on it that what is written survives power loss."""
        self.tell: Callable[[Sequence[Entry], int], None] = lambda *_: None
        """Hears of records that were written, and where they end."""
        self.is_broken = False
        """A write has failed in the middle: nothing may follow it here."""
        self.is_closed = False
        self._claim = claimed
        self._fd = claimed.fd  # asking the claim each time would cost more than it tells
        self._is_name_synced = False
        self._reserved = _RESERVE_FROM
        """Up to here there is room, or none is to be asked for."""
        self._has_reserved = False

    @property
    def is_full(self) -> bool:
        """Whether it is to be sealed."""
        return self.listed + len(self.entries) >= PACK_RECORDS

    @property
    def state(self) -> str:
        """Why it cannot be written any more: "gone" or "cut off"; empty: it can."""
        found = os.fstat(self._fd)
        if not found.st_nlink:
            return "gone"
        # It must not become longer again: those who have mapped it would read zeros.
        return "cut off" if found.st_size < self.end else ""

    def write(
        self, pieces: Sequence[bytes | memoryview], size: int, entries: Sequence[Entry] = ()
    ) -> None:
        """Append records; NoSpaceError if they do not fit, and then the pack is not written more.

        Nor is it if this is interrupted: others may know of a record that this process has not
        listed.
        """
        if self.end + size > self._reserved:
            self._reserve(size)
        self.is_broken = True
        try:
            written = 0
            if len(pieces) <= _MOST_PIECES:
                written = os.pwritev(self._fd, pieces, self.end)
            if written != size:
                offset = self.end
                for piece in pieces:
                    view = memoryview(piece).cast("B")
                    skipped = min(written, len(view))
                    view, written, offset = view[skipped:], written - skipped, offset + skipped
                    while len(view):
                        count = os.pwrite(self._fd, view, offset)
                        view, offset = view[count:], offset + count
        except OSError as error:
            if error.errno in _FULL:
                message = f"No space left to write {self.path}"
                raise NoSpaceError(message, path=self.path) from error
            message = f"Cannot write {self.path}: {error.strerror or error}"
            raise ArtifactError(message, hint="Check the disk.", path=self.path) from error
        self.end += size
        self.entries += entries
        reached("pack: written")
        if entries:
            self.tell(entries, self.end)
        self.is_broken = False

    def layout(self, body: bytes) -> int:
        """Return where a layout is in this pack; it is written if it is not there."""
        found = self.layouts.get(body)
        if found is None:
            found = self.end
            record = plain_record(self.nonce, found, LAYOUT, inline=body)
            self.write([record], len(record))
            self.layouts[body] = found
        return found

    def holds(self, offset: int, tensor: bytes | memoryview) -> bool:
        """Say whether the pack has these very bytes at an offset."""
        stored = bytearray(len(tensor))
        found = os.preadv(self._fd, [stored], offset)
        return found == len(tensor) and stored == tensor  # type: ignore[comparison-overlap]

    def _reserve(self, size: int) -> None:
        """Ask the filesystem for room behind the end: on ext4, appends take a quarter less time.

        Never more than the pack has already, and none where the disk is nearly full.
        """
        if self.end < _RESERVE_FROM:
            self._reserved = max(_RESERVE_FROM, self.end + size)
            return
        step = max(size, min(_RESERVE_MOST, self.end))
        self._reserved = sys.maxsize
        with suppress(OSError):
            if not self._has_reserved and mount_of(self.path.parent).fstype != "ext4":
                return
            disk = os.fstatvfs(self._fd)
            if disk.f_bavail * disk.f_frsize > _SPARE * step:
                self._has_reserved = True  # also if it fails: a part of it may be there
                if reserve(self._fd, self.end, step):
                    self._reserved = self.end + step

    def sync(self) -> None:
        """Bring all that was written to the disk."""
        end = self.end
        if self.synced >= end:
            return
        try:
            sync_data(self._fd)
        except OSError as error:
            message = f"Cannot bring {self.path} to the disk: {error.strerror or error}"
            raise ArtifactError(message, hint="Check the disk.", path=self.path) from error
        if not self._is_name_synced:
            sync_directory(self.path.parent)
            self._is_name_synced = True
        self.synced = end

    def close(
        self, *, sealed: bool = False, note: Callable[[PackWriter], None] | None = None
    ) -> None:
        """Leave a footer, if there is anything to list, and let go of the pack.

        A sealed pack is synced before the footer and after it. A pack that cannot be written any
        more is left as it is: whoever reads it scans it.
        """
        if self.is_closed:
            return
        try:
            if not self.is_broken and not self.state and (self.entries or sealed):
                if sealed or self.is_durable:
                    self.sync()
                reached("pack: before footer")
                self._write_footer(sealed=sealed)
                reached("pack: footer written")
                if sealed or self.is_durable:
                    self.sync()
        finally:
            self.is_closed = True
            if self._has_reserved:
                with suppress(OSError):  # gives back what was reserved and not used
                    os.ftruncate(self._fd, os.fstat(self._fd).st_size)
            try:
                if note is not None and self.entries:
                    note(self)  # while nobody else can take it, or compact it away
            finally:
                self._claim.release(remove=False)

    def _write_footer(self, *, sealed: bool) -> None:
        """List all records since `start`; footers before it that are not larger are taken in."""
        entries, start, before = list(self.entries), self.start, self.before
        source = LocalPack(self.path)
        while before:
            try:
                footer = read_footer(source, self.nonce, before, start)
            except DamagedArtifactError:
                return  # without it the new one would be of no use
            if not sealed and len(footer.rows.hash) > max(len(entries), 64):
                break
            entries += footer.rows.entries()
            start, before = footer.start, footer.before
        kept = newest(entries)
        highest = max((entry.seq for entry in entries), default=0)
        footer = Footer(
            start, before, highest, rows_of(kept), {at: body for body, at in self.layouts.items()}
        )
        at = self.records_end = self.end
        record = plain_record(self.nonce, at, FOOTER, inline=footer.to_bytes())
        after = at + len(record)
        flags = SEALED if sealed else 0
        end = bare_record(self.nonce, after, END, size=HEADER_BYTES, flags=flags, hash_=at)
        self.write([record, end], len(record) + len(end))


def new_writer(folder: Path, header: PackHeader, seed: int) -> PackWriter:
    """Make a pack and become its writer."""
    path = folder / f"{header.nonce:016x}{SUFFIX}"
    claimed = claim(path)
    if claimed is None:
        raise ArtifactError(f"{path} is locked by another process")
    reached("pack: claimed")
    try:
        os.pwrite(claimed.fd, header.to_bytes(), 0)
    except OSError as error:
        claimed.release()
        if error.errno in _FULL:
            raise NoSpaceError(f"No space left to make a pack in {folder}", path=folder) from error
        raise
    reached("pack: made")
    return PackWriter(claimed, header, PACK_HEADER_BYTES, seed)


def new_nonce() -> int:
    """Return the number of a new pack."""
    return secrets.randbits(64)


def taken_over(folder: Path, name: str, set_id: bytes, seed: int) -> PackWriter | None:
    """Become the writer of a pack that another process has left unsealed; None: not possible.

    What it has torn is covered by a `skip`, so that nobody takes it for a record that grows whole.
    """
    path = folder / f"{name}{SUFFIX}"
    claimed = claim(path)
    if claimed is None:
        return None
    try:
        # Compacted away in this moment: then the claim has made it anew, empty.
        if os.fstat(claimed.fd).st_size < PACK_HEADER_BYTES:
            claimed.release()
            return None
        source = LocalPack(path)
        state = read_state(source, name, set_id)
        if state.is_sealed or not state.header.instance:
            claimed.release(remove=False)
            return None
        writer = PackWriter(claimed, state.header, state.end, seed)
        _continue(writer, source, state)
        size = source.size
        if writer.end < size:
            end, writer.end = writer.end, padded(size)
            skip = bare_record(writer.nonce, end, SKIP, size=max(HEADER_BYTES, writer.end - end))
            os.pwrite(claimed.fd, skip, end)
        os.ftruncate(claimed.fd, writer.end)  # gives back what a killed writer has reserved
        os.utime(folder)  # readers look at packs that were left when their folder changes
        reached("pack: taken over")
    except (SetFormatError, OSError):
        claimed.release(remove=False)
        return None
    except BaseException:
        claimed.release(remove=False)
        raise
    return writer


def _continue(writer: PackWriter, source: PackSource, state: PackState) -> None:
    """Let a writer know what is in its pack, and where that ends."""
    for footer in state.footers:
        writer.layouts.update({body: at for at, body in footer.layouts.items()})
        writer.listed += len(footer.rows.hash)
    if state.footers:
        writer.before = state.records_end
        return
    for found in scan(source, writer.nonce, writer.seed, PACK_HEADER_BYTES, source.size):
        writer.end = found.end
        if found.entry is not None:
            writer.entries.append(found.entry)
        elif found.head is not None and found.head.kind == LAYOUT and found.inline:
            writer.layouts[found.inline] = found.offset
