"""Packs that lie in a tier: known here by their footers, read through chunk by chunk.

    <16 hex>.far         the pack without its records: where it lies, its header, its footer, and a
                         hash of each of its chunks; all that is needed to say what it has
    far/<16 hex>/<n>     its chunks that were fetched; as many of all packs as there is room for

A chunk is hashed when it arrives, and has its name only then, so it is whole or not there. One
process fetches a chunk that several want. Which chunks are here matters to nobody: what is not here
is fetched, and what was not used for the longest time goes when the folder grows beyond its bound.

A set of which nothing else is here can be opened, listed and planned with no network at all.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import secrets
import struct
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, Self

from blake3 import blake3

from smartcache.artifacts.engine.packs import (
    SUFFIX,
    Buffer,
    Bytes,
    LocalPack,
    PackSource,
    is_pack_name,
    read_state,
)
from smartcache.artifacts.engine.records import PACK_HEADER_BYTES, PackHeader
from smartcache.artifacts.setfolder import make_private
from smartcache.errors import (
    ArtifactError,
    ConfigError,
    DamagedArtifactError,
    DamagedObjectError,
    MissingObjectError,
    SetFormatError,
)
from smartcache.system.kernel import sync_directory
from smartcache.system.locks import KeyLocks

_log = logging.getLogger(__name__)
FAR: Final = ".far"
FOLDER: Final = "far"
ARRIVING: Final = ".arriving"
"""Of a pack or skeleton that is not all there."""
CHUNK: Final = 4 << 20
"""Bytes of a chunk: of some 16 latents. Less would be more requests, more would be more waste."""
MAX_SIZE: Final = 64 << 30
"""Bytes of chunks that a set keeps, if nobody says otherwise."""
_LEAST_CHUNKS: Final = 16
_MOST_CHUNK: Final = 1 << 24
_HASH: Final = 16
"""Bytes of BLAKE3 that stand for a chunk."""
_OPEN: Final = 64
"""Chunks of all packs that are kept open; or in memory, where none can be written."""
_THREADS: Final = 8
_MAGIC: Final = b"smartcache far 1"
_LENGTHS: Final = struct.Struct("<II")
_MOST: Final = 256 << 20
_HEX: Final = re.compile(r"[0-9a-f]{64}")


class Origin(Protocol):
    """A place that has packs by the digest of their bytes."""

    @property
    def name(self) -> str:
        """What the user calls it."""
        ...

    @property
    def has_ranges(self) -> bool:
        """Whether it sends a part of an object."""
        ...

    def read(self, digest: str, start: int, length: int) -> bytes:
        """Return a part of an object."""
        ...

    def chunks(self, digest: str, *, size: int | None = None) -> Iterator[bytes]:
        """Go through the bytes of an object."""
        ...


class Far(NamedTuple):
    """How packs that lie elsewhere are read; goes to other processes."""

    connect: Callable[[Mapping[str, Any]], Origin]
    """Returns the place that a description stands for."""
    max_size: int = MAX_SIZE


class Skeleton(NamedTuple):
    """A pack without its records."""

    origin: Mapping[str, Any]
    """Where it lies, for `Far.connect`."""
    digest: str
    size: int
    chunk: int
    hashes: bytes
    """Of each chunk."""
    header: bytes
    tail: bytes
    """What follows the last record: the footer."""

    @classmethod
    def of(cls, pack: Path, set_id: bytes, origin: Mapping[str, Any]) -> Self:
        """Return that of a sealed pack; SetFormatError if it is none of this set.

        Reads all of it, to hash it.
        """
        source = LocalPack(pack)
        state = read_state(source, pack.name.removesuffix(SUFFIX), set_id)
        if not state.is_sealed:
            raise SetFormatError(f"{pack} is not sealed", path=pack)
        whole, hashes = blake3(max_threads=blake3.AUTO), []
        size = source.size
        for start in range(0, size, CHUNK):
            data = bytearray(min(CHUNK, size - start))
            source.read(start, [data], len(data))
            whole.update(data)
            hashes.append(blake3(data).digest(_HASH))
        end = state.records_end
        return cls(
            origin, whole.hexdigest(), size, CHUNK, b"".join(hashes),
            source.bytes_at(0, PACK_HEADER_BYTES), source.bytes_at(end, size - end),
        )  # fmt: skip

    @property
    def name(self) -> str:
        """The name of the pack."""
        return f"{PackHeader.parse(self.header).nonce:016x}"

    def to_bytes(self) -> bytes:
        """Return it as a file."""
        about = json.dumps({
            "origin": dict(self.origin), "digest": self.digest, "size": self.size,
            "chunk": self.chunk, "hashes": self.hashes.hex(),
        }).encode()  # fmt: skip
        lengths = _LENGTHS.pack(len(about), len(self.tail))
        body = _MAGIC + lengths + about + self.header + self.tail
        return body + blake3(body).digest()

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Return what a file says; SetFormatError if it makes no sense."""
        try:
            body, told = data[:-32], data[-32:]
            if not body.startswith(_MAGIC) or blake3(body).digest() != told:
                raise ValueError("not whole")
            about_size, tail_size = _LENGTHS.unpack_from(body, len(_MAGIC))
            at = len(_MAGIC) + _LENGTHS.size
            about = json.loads(body[at : at + about_size])
            at += about_size
            header = body[at : at + PACK_HEADER_BYTES]
            tail = body[at + PACK_HEADER_BYTES :]
            found = cls(
                dict(about["origin"]), str(about["digest"]), int(about["size"]),
                int(about["chunk"]), bytes.fromhex(about["hashes"]), header, tail,
            )  # fmt: skip
            # A chunk is in memory for a moment: nobody says how much that is but we.
            is_chunk = 1 << 16 <= found.chunk <= _MOST_CHUNK
            count = -(-found.size // found.chunk) if is_chunk else -1
            if (
                len(tail) != tail_size
                or not _HEX.fullmatch(found.digest)
                or not PACK_HEADER_BYTES <= len(tail) + PACK_HEADER_BYTES <= found.size < 1 << 46
                or len(found.hashes) != count * _HASH
            ):
                raise ValueError("not what it should be")
            PackHeader.parse(header)
        except (
            ValueError, TypeError, LookupError, OverflowError, RecursionError, struct.error,
            DamagedArtifactError,
        ) as error:  # fmt: skip
            raise SetFormatError(f"the description of a pack is damaged: {error}") from error
        return found

    def check(self, set_id: bytes) -> None:
        """Raise SetFormatError if this is not what is known of a sealed pack of a set.

        What has no footer would have to be fetched and scanned, to say what it has.
        """
        path = Path(f"{self.name}{FAR}")
        try:
            is_sealed = read_state(FarPack(self, path), self.name, set_id).is_sealed
        except SetFormatError:
            raise
        except ArtifactError:  # it says that its footer is where no footer is
            is_sealed = False
        if not is_sealed:
            raise SetFormatError(f"the description of {self.name} has no footer")


class _Open:
    """A chunk that is open; closed when the last who reads it is gone."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class _Chunks:
    """The chunks that this process has at hand, of all packs; those used last."""

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._found: OrderedDict[Path, _Open | bytes] = OrderedDict()
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = _OPEN if soft == resource.RLIM_INFINITY else max(4, min(_OPEN, soft // 8))

    def get(self, path: Path) -> _Open | bytes | None:
        with self._gate:
            found = self._found.get(path)
            if found is not None:
                self._found.move_to_end(path)
            return found

    def keep(self, path: Path, found: _Open | bytes) -> None:
        with self._gate:
            self._found[path] = found
            while len(self._found) > self._most:
                self._found.popitem(last=False)  # closed when nobody reads it any more

    def forget(self, path: Path) -> None:
        with self._gate:
            self._found.pop(path, None)


class FarPack:
    """A pack that lies in a tier, open for reading."""

    def __init__(
        self, about: Skeleton, path: Path, far: Far | None = None, key_locks: KeyLocks | None = None
    ) -> None:
        """Take the skeleton and its path; without `key_locks` nothing is written here."""
        self.about = about
        self.path = path
        self.size = about.size
        self._tail_at = self.size - len(self.about.tail)
        self._far = far
        self._key_locks = key_locks
        self._folder = path.parent / FOLDER / path.name.removesuffix(FAR)
        self._fetching: set[int] = set()
        self._is_told = False
        """It was said that nothing can be written here."""
        self._origin: Origin | None = None

    @classmethod
    def open(cls, path: Path, far: Far | None = None, key_locks: KeyLocks | None = None) -> Self:
        """Open the pack whose skeleton is at a path."""
        with open(path, "rb") as file:
            data = file.read(_MOST)
        try:
            return cls(Skeleton.parse(data), path, far, key_locks)
        except SetFormatError as error:
            hint = "Remove it, and open the set with its tier again."
            raise SetFormatError(f"{path}: {error}", hint=hint, path=path) from error

    # as a pack of this disk

    is_whole = True

    def view(self, start: int, end: int) -> Bytes | None:  # noqa: ARG002
        """Return None: what may go at any moment is not mapped."""
        return None

    def memory(self) -> Bytes | None:
        """Return None."""
        return None

    def sync(self) -> None:
        """Do nothing: it is fetched again."""

    def bytes_at(self, offset: int, length: int) -> bytes:
        """Return some bytes; fewer at the end."""
        data = bytearray(max(0, min(length, self.size - offset)))
        if data:
            self.read(offset, [data], len(data))
        return bytes(data)

    def read(self, offset: int, buffers: Sequence[Buffer], size: int, *, wait: bool = True) -> bool:
        """Fill buffers; without `wait`, False if something has to be fetched for it."""
        if offset + size > self.size:
            raise DamagedArtifactError(f"{self.path.name} ends before the artifact does")
        chunk = self.about.chunk
        first, last = offset // chunk, (offset + size - 1) // chunk
        is_known = offset >= self._tail_at or offset + size <= PACK_HEADER_BYTES
        if not wait and not is_known:
            for number in range(first, last + 1):
                if self._here(number) is None:
                    return False
        if first == last and not is_known:
            found = self._need(first)
            if not isinstance(found, bytes):
                at = offset - first * chunk
                if os.preadv(found.fd, buffers, at) == size:  # type: ignore[arg-type]
                    return True
        for buffer in buffers:
            view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
            while len(view):
                count = self._fill(offset, view)
                view, offset = view[count:], offset + count
        return True

    def _fill(self, offset: int, view: memoryview) -> int:
        """Read as much as lies in one piece; return how much that is."""
        if offset >= self._tail_at:
            start = offset - self._tail_at
            data = self.about.tail[start : start + len(view)]
        elif offset < PACK_HEADER_BYTES:
            data = self.about.header[offset : offset + len(view)]
        else:
            number, at = divmod(offset, self.about.chunk)
            room = min(len(view), self.about.chunk - at)
            found = self._need(number)
            if isinstance(found, bytes):
                data = found[at : at + room]
            else:
                count = os.preadv(found.fd, [view[:room]], at)
                if count <= 0:
                    raise DamagedArtifactError(f"a chunk of {self.path.name} is cut off")
                return count
        view[: len(data)] = data
        return len(data)

    def announce(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Have ranges fetched; nobody waits for it."""
        chunk = self.about.chunk
        wanted = {
            number
            for start, length in ranges
            for number in range(start // chunk, (start + length - 1) // chunk + 1)
        }
        for number in sorted(wanted - self._fetching):
            if self._here(number) is None:
                self._fetching.add(number)
                _ahead.add(self, number)

    def fetch_ahead(self, number: int) -> None:
        """Have a chunk here, if that is possible."""
        try:
            self._need(number)
        except Exception as error:  # noqa: BLE001 - whoever reads it hears of it
            _log.debug("%s: chunk %d was not fetched: %s", self.path, number, error)
        finally:
            self._fetching.discard(number)

    def distrust(self, offset: int, size: int) -> bool:
        """Let go of the chunks of a range: what this disk has of them may be damaged."""
        chunk = self.about.chunk
        for number in range(offset // chunk, (offset + size - 1) // chunk + 1):
            path = self._folder / f"{number:08}"
            _chunks.forget(path)
            with suppress(OSError):
                os.unlink(path)
        return True

    @property
    def kept_size(self) -> int:
        """Bytes of it that are on this disk."""
        total = 0
        with suppress(FileNotFoundError):  # it was detached, or pulled
            total = os.stat(self.path).st_size
        for each in _scanned(self._folder):
            with suppress(OSError):
                total += each.stat().st_size
        return total

    # chunks

    def _here(self, number: int) -> _Open | bytes | None:
        """Return a chunk that is on this disk; None: it has to be fetched."""
        path = self._folder / f"{number:08}"
        found = _chunks.get(path)
        if found is not None:
            return found
        try:
            file = _Open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW))
        except OSError:
            return None
        if os.fstat(file.fd).st_size != self._length(number):
            return None
        with suppress(OSError):
            os.utime(file.fd)  # it is used: others go before it
        _chunks.keep(path, file)
        return file

    def _length(self, number: int) -> int:
        return min(self.about.chunk, self.size - number * self.about.chunk)

    def _need(self, number: int) -> _Open | bytes:
        """Return a chunk, fetched if it is not here."""
        found = self._here(number)
        if found is not None:
            return found
        holding: AbstractContextManager[object] = nullcontext()
        origin = self._connected()
        if self._key_locks is not None:
            key = f"far {self.path.name}" + (f" {number}" if origin.has_ranges else "")
            holding = self._key_locks.hold(key, what="fetching a chunk")
        with holding:
            found = self._here(number)  # another thread or process may have fetched it
            if found is not None:
                return found
            try:
                return self._fetch(number, origin)
            except MissingObjectError as error:
                hint = "Open the set with its tier again: who pushed it may have compacted it."
                raise MissingObjectError(str(error), hint=hint, tier=origin.name) from error

    def _fetch(self, number: int, origin: Origin) -> _Open | bytes:
        if origin.has_ranges:
            start = number * self.about.chunk
            data = origin.read(self.about.digest, start, self._length(number))
            return self._take(number, data, origin)
        wanted: _Open | bytes | None = None
        for each, data in enumerate(self._all(origin)):
            taken = self._take(each, data, origin)
            wanted = taken if each == number else wanted
        if wanted is None:
            raise DamagedObjectError(self._wrong(number, origin), tier=origin.name)
        return wanted

    def _all(self, origin: Origin) -> Iterator[bytes]:
        """Go through all chunks, of a server that does not send parts."""
        chunk = self.about.chunk
        left = bytearray()
        for piece in origin.chunks(self.about.digest, size=self.size):
            left += piece
            while len(left) >= chunk:
                yield bytes(left[:chunk])
                del left[:chunk]
        if left:
            yield bytes(left)

    def _take(self, number: int, data: bytes, origin: Origin) -> _Open | bytes:
        """Keep a chunk that has arrived; DamagedObjectError if it is not what was pushed."""
        told = self.about.hashes[number * _HASH : number * _HASH + _HASH]
        if len(data) != self._length(number) or blake3(data).digest(_HASH) != told:
            raise DamagedObjectError(self._wrong(number, origin), tier=origin.name)
        if self._key_locks is not None:
            try:
                return self._write(number, data)
            except OSError as error:  # what has arrived is right, whatever is wrong with this disk
                if not self._is_told:
                    _log.warning("%s: chunks are not kept: %s", self._folder, error.strerror)
                self._is_told = True
        _chunks.keep(self._folder / f"{number:08}", data)
        return data

    def _write(self, number: int, data: bytes) -> _Open:
        for folder in (self._folder.parent, self._folder):
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
                folder.chmod(0o700)
        path = self._folder / f"{number:08}"
        temporary = path.with_suffix(f".{secrets.token_hex(4)}")
        make_private(temporary)
        try:
            with open(temporary, "wb") as writing:  # buffered: all of it is written, or it fails
                writing.write(data)
            # Before it has its name: then it may go at any moment.
            file = _Open(os.open(temporary, os.O_RDONLY | os.O_CLOEXEC))
            temporary.rename(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        _chunks.keep(path, file)
        most = MAX_SIZE if self._far is None else self._far.max_size
        # Where a pack comes whole or not at all, none of it may go while it comes.
        least = _LEAST_CHUNKS * self.about.chunk if self._connected().has_ranges else 2 * self.size
        _rooms.grown(self._folder.parent, len(data), max(most, least))
        return file

    def _connected(self) -> Origin:
        if self._origin is None:
            name = self.about.origin.get("name")
            if self._far is None:
                hint = "Open the set with cache.artifacts(...), which knows the tiers."
                message = f"{self.path.name} lies in the tier {name}"
                raise ArtifactError(message, hint=hint, path=self.path)
            try:
                self._origin = self._far.connect(self.about.origin)
            except (LookupError, TypeError, ValueError) as error:
                if isinstance(error, ConfigError):
                    raise
                message = f"{self.path.name} says nothing of the tier it lies in"
                raise SetFormatError(message, path=self.path) from error
        return self._origin

    def _wrong(self, number: int, origin: Origin) -> str:
        return (
            f"The tier {origin.name} gave other bytes of object {self.about.digest}"
            f" than were pushed (chunk {number})"
        )


def kept_size(source: PackSource) -> int:
    """Return how many bytes of a pack are on this disk."""
    return source.kept_size if isinstance(source, FarPack) else source.size


def far_names(folder: str | Path | int) -> list[str]:
    """Return the names of all packs of a folder that lie in a tier."""
    names = (name[: -len(FAR)] for name in os.listdir(folder) if name.endswith(FAR))
    return sorted(filter(is_pack_name, names))


def skeletons(folder: Path) -> dict[str, Skeleton]:
    """Return the packs of a set that lie in tiers, by name; those that are here are left out."""
    found = {}
    for name in far_names(folder):
        with suppress(FileNotFoundError, SetFormatError):
            if not (folder / f"{name}{SUFFIX}").exists():
                found[name] = FarPack.open(folder / f"{name}{FAR}").about
    return found


def attach(folder: Path, skeleton: Skeleton) -> str:
    """Let a set have a pack that lies in a tier; return its name."""
    name = skeleton.name
    target = folder / f"{name}{FAR}"
    temporary = target.with_suffix(f".{secrets.token_hex(4)}{ARRIVING}")
    make_private(temporary)
    try:
        with open(temporary, "wb") as file:
            file.write(skeleton.to_bytes())
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(target)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(folder)
    return name


def detach(folder: Path, name: str) -> None:
    """Let a set not have a pack of a tier any more, and nothing of it stay here."""
    (folder / f"{name}{FAR}").unlink(missing_ok=True)
    inner = folder / FOLDER / name
    with suppress(FileNotFoundError):
        for each in os.listdir(inner):
            (inner / each).unlink(missing_ok=True)
        inner.rmdir()


class _Rooms:
    """Keeps the chunks of each set within its bound."""

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._unmeasured: dict[Path, int] = {}
        """Bytes that this process has written since it last looked at a folder."""

    def grown(self, folder: Path, size: int, most: int) -> None:
        """Hear that a chunk was written."""
        with self._gate:
            new = self._unmeasured.get(folder, most) + size
            is_due = new > most // 16
            self._unmeasured[folder] = 0 if is_due else new
        if is_due:
            _make_room(folder, most)


def _make_room(folder: Path, most: int) -> None:
    """Remove chunks that were not used for the longest time, until a tenth is free."""
    found: list[tuple[float, int, str]] = []
    for inner in _scanned(folder):
        for each in _scanned(inner.path):
            with suppress(OSError):
                st = each.stat()
                found.append((st.st_mtime, st.st_size, each.path))
    total = sum(size for _, size, _ in found)
    if total <= most:
        return
    for _, size, path in sorted(found):
        if total <= most * 9 // 10:
            return
        with suppress(OSError):
            os.unlink(path)
            total -= size


def _scanned(path: str | Path) -> list[os.DirEntry[str]]:
    with suppress(OSError), os.scandir(path) as found:
        return list(found)
    return []


_rooms = _Rooms()
_chunks = _Chunks()


class _Ahead:
    """Fetches what was announced. A program that ends waits for what is on its way, not for all."""

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._waiting: deque[tuple[FarPack, int]] = deque()
        self._busy = 0
        self._threads: ThreadPoolExecutor | None = None

    def add(self, pack: FarPack, number: int) -> None:
        """Have a chunk fetched some time."""
        with self._gate:
            self._waiting.append((pack, number))
            if self._busy == _THREADS:
                return
            self._busy += 1
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_THREADS, "smartcache-fetch")
        self._go_on(self._threads)

    def _go_on(self, threads: ThreadPoolExecutor) -> None:
        try:
            threads.submit(self._next, threads)
        except RuntimeError:  # the interpreter ends
            with self._gate:
                self._busy -= 1

    def _next(self, threads: ThreadPoolExecutor) -> None:
        with self._gate:
            if not self._waiting:
                self._busy -= 1
                return
            pack, number = self._waiting.popleft()
        pack.fetch_ahead(number)
        self._go_on(threads)


_ahead = _Ahead()


def _forget_threads() -> None:
    _ahead.__init__()  # type: ignore[misc]
    _rooms.__init__()  # type: ignore[misc]
    _chunks.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_forget_threads)
