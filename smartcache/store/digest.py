"""Hash files and streams: one read, every wanted algorithm, several threads where they pay.

A file's hashes come with its stat key, and only if that key was the same before and after reading:
bytes that changed meanwhile are a `FileChangedError`, never a hash. Files are read into reused
buffers and not mapped: a mapping kills the process (SIGBUS) when another program truncates the
file, and when the disk cannot read a page. Hashing is no use: access times stay as they are where
the system allows it.

Measured warm on two cores, in GB/s for one and two threads: reading alone 8.9 and 17, BLAKE3 alone
6.9 and 13, both together 3.9 and 7.5, which is what the two add up to. One large file is read by
one thread and hashed by another, 6.2; the threads inside the blake3 package reach 3.9.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, Generic, Literal, TypeVar

from blake3 import blake3

from smartcache import errors
from smartcache.progress import Job, Progress, silent
from smartcache.store.kernel import open_quietly
from smartcache.store.lanes import (
    AHEAD_MIN_SIZE,
    BUFFER_SIZE,
    Hash,
    Lane,
    buffers,
    new_buffer,
    read_at,
    spare,
)
from smartcache.store.statkey import StatKey

if TYPE_CHECKING:
    from typing_extensions import Buffer

Algorithm = Literal["blake3", "sha256", "xet", "git-sha1"]
Advance = Callable[[int], None] | None
FilePath = str | bytes | os.PathLike[str] | os.PathLike[bytes]
P = TypeVar("P", bound=FilePath)


_LENGTHS: Final[Mapping[str, int]] = {"blake3": 64, "sha256": 64, "xet": 64, "git-sha1": 40}
# Without O_NONBLOCK, opening a FIFO waits for somebody to write into it.
_FLAGS: Final = ("O_NONBLOCK", "O_CLOEXEC", "O_NOCTTY", "O_BINARY", "O_NOINHERIT")
_OPEN_FLAGS: Final[int] = os.O_RDONLY | sum(getattr(os, name, 0) for name in _FLAGS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hashes:
    """How many bytes there were, and their hashes in lower-case hex."""

    size: int
    values: Mapping[Algorithm, str]

    @property
    def digest(self) -> str:
        """The BLAKE3 hash, which names a blob. KeyError if it was not asked for."""
        return self.values["blake3"]

    def get(self, algorithm: Algorithm) -> str | None:
        """Return one hash, or None if it was not asked for."""
        return self.values.get(algorithm)


@dataclass(slots=True)  # frozen would take five times as long to build, 0.7 us of each small file
class Hashed(Generic[P]):
    """What became of one file of `hash_many`: hashes and stat key, or the error."""

    path: P
    hashes: Hashes | None = None
    key: StatKey | None = None
    error: OSError | None = None


def check_hex(algorithm: Algorithm, text: str) -> str:
    """Return a hash in lower case, or raise BadDigestError if it cannot be one of `algorithm`."""
    _checked((algorithm,))
    length = _LENGTHS[algorithm]
    if len(text) != length or not re.fullmatch("[0-9a-fA-F]+", text):
        hint = f"It has {length} hexadecimal characters."
        raise errors.BadDigestError(f"{text!r} is not a {algorithm} hash", hint=hint)
    return text.lower()


class Hasher:
    """Hashes a stream with several algorithms at once.

    `needs_file` lists those that a stream cannot give and a file must be read for afterwards: xet,
    and git-sha1 if `size` is not known, because it hashes the size first.
    """

    def __init__(self, algorithms: Iterable[Algorithm], *, size: int | None = None) -> None:
        wanted = _checked(algorithms)
        late = {"xet"} if size is not None else {"xet", "git-sha1"}
        self.needs_file: tuple[Algorithm, ...] = tuple(name for name in wanted if name in late)
        self._states = _start([name for name in wanted if name not in late], size or 0)
        self._announced = size
        self._size = 0
        self._is_finished = False

    def update(self, buffer: Buffer) -> None:
        """Hash the bytes of any buffer: of arrays the elements, one after the other."""
        if self._is_finished:
            raise errors.StoreError("bytes came after the hashes were finished")
        with memoryview(buffer) as given:
            if not given.nbytes:
                return
            view = given if given.c_contiguous else memoryview(given.tobytes())
            with view.cast("B") as plain:
                for state in self._states.values():
                    state.update(plain)
            self._size += given.nbytes

    def finish(self) -> Hashes:
        """Return the hashes, once. SizeMismatchError if the announced size was not reached."""
        if self._is_finished:
            raise errors.StoreError("the hashes were finished already")
        self._is_finished = True
        if self._announced not in (None, self._size):
            message = f"{self._announced} bytes were announced, but {self._size} arrived"
            raise errors.SizeMismatchError(message, expected=self._announced, found=self._size)
        values = {name: state.hexdigest() for name, state in self._states.items()}
        return Hashes(size=self._size, values=values)


def hash_file(
    path: FilePath | int,
    algorithms: Iterable[Algorithm] = ("blake3",),
    *,
    advance: Advance = None,
    threads: int = 1,
) -> tuple[Hashes, StatKey]:
    """Return the hashes of a file and the stat key they belong to.

    An open descriptor is accepted too; its position does not move. FileChangedError if the file
    changed meanwhile, FileSkippedError if it is no regular file. `advance` is told the bytes read,
    in the calling thread; an exception it raises ends the hashing.
    """
    wanted = _checked(algorithms)
    if isinstance(path, int):
        return _hash_open(path, path, wanted, advance, threads)
    fd = open_quietly(path, _OPEN_FLAGS)
    try:
        return _hash_open(fd, path, wanted, advance, threads)
    finally:
        os.close(fd)


def hash_many(
    paths: Iterable[P],
    algorithms: Iterable[Algorithm] = ("blake3",),
    *,
    threads: int,
    progress: Progress = silent,
    label: str = "Hashing",
) -> Iterator[Hashed[P]]:
    """Yield what became of each file, as soon as it is known.

    Small files come first, hashed by the thread that iterates (as are all if xet is wanted), then
    large ones by threads, largest first. Closing the iterator, or an exception in it, ends them.
    """
    wanted = _checked(algorithms)
    files = [(_size_of(path), path) for path in paths]
    large = [(size, path) for size, path in files if size > BUFFER_SIZE and "xet" not in wanted]
    with progress(label, sum(size for size, _ in files), "bytes") as job:
        for size, path in files:
            if size <= BUFFER_SIZE or "xet" in wanted:
                job.describe(os.path.basename(os.fsdecode(path)))
                yield _attempt(path, wanted, job.advance, threads)
        yield from _in_threads(large, wanted, job, max(threads, 1))


def _checked(algorithms: Iterable[Algorithm]) -> tuple[Algorithm, ...]:
    wanted = tuple(dict.fromkeys(algorithms))
    for name in wanted:
        if name not in _LENGTHS:
            hint = f"There are {', '.join(_LENGTHS)}."
            raise errors.BadDigestError(f"{name!r} is not a hash algorithm", hint=hint)
    return wanted


def _start(wanted: Sequence[Algorithm], size: int) -> dict[Algorithm, Hash]:
    """Return the state of each algorithm that can be fed, the costliest first."""
    states: dict[Algorithm, Hash] = {}
    if "sha256" in wanted:
        states["sha256"] = hashlib.sha256()
    if "git-sha1" in wanted:
        states["git-sha1"] = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    if "blake3" in wanted:
        states["blake3"] = blake3()
    return states


def _hash_open(
    fd: int, path: FilePath | int, wanted: tuple[Algorithm, ...], advance: Advance, threads: int
) -> tuple[Hashes, StatKey]:
    before = os.fstat(fd)
    size = before.st_size
    if not stat.S_ISREG(before.st_mode):
        reason = "not a regular file"
        raise errors.FileSkippedError(f"{_named(path)} is {reason}", reason=reason, path=path)
    values: dict[Algorithm, str] = {}
    if size <= BUFFER_SIZE and wanted == ("blake3",) and (digest := _hash_at_once(fd, size)):
        values["blake3"] = digest
        if advance is not None:
            advance(size)
    elif states := _start(wanted, size):
        _feed(fd, path, size, list(states.values()), advance, threads)
        values |= {name: state.hexdigest() for name, state in states.items()}
    if "xet" in wanted:
        values["xet"] = _xet(fd, path, size)
    after = os.fstat(fd)
    is_same = after.st_ctime_ns == before.st_ctime_ns and after.st_mtime_ns == before.st_mtime_ns
    if not is_same or after.st_size != size:
        raise _changed(path)
    return Hashes(size=size, values=values), StatKey.of(before)


def _hash_at_once(fd: int, size: int) -> str | None:
    """Return the BLAKE3 hash of a small file, or None if one read did not give its size."""
    buffer, spare.buffer = spare.buffer or new_buffer(BUFFER_SIZE), None
    is_whole = read_at(fd, (buffer,), 0) == size
    digest = blake3(buffer[:size]).hexdigest() if is_whole else None
    spare.buffer = buffer
    return digest


def _feed(
    fd: int, path: FilePath | int, size: int, states: list[Hash], advance: Advance, threads: int
) -> None:
    """Read exactly `size` bytes once and give all of them to every state."""
    lanes: list[Lane] = []
    offset = 0
    try:
        for state in states[: threads - 1] if size >= AHEAD_MIN_SIZE else ():
            lanes.append(Lane(state))  # noqa: PERF401 - those that started must end
        for buffer in buffers(lanes):
            count = read_at(fd, (buffer,), offset)
            offset += count
            # Read even if the size is 0: files of /proc have that size and yet content.
            if offset > size or (count == 0 and offset < size):
                raise _changed(path)
            view = buffer[:count]
            for lane in lanes:
                lane.give(view)
            for state in states[len(lanes) :]:
                state.update(view)
            if advance is not None:
                advance(count)
            if offset == size:
                return
    finally:
        for lane in lanes:
            lane.close()


def _xet(fd: int, path: FilePath | int, size: int) -> str:
    """Return the xet hash, which only hf_xet can compute, from the file itself.

    Ctrl-C ends it in the main thread; in another one it then never returns (hf_xet 1.8).
    """
    try:
        import hf_xet
    except ImportError as error:
        hint = "Install it: pip install hf_xet"
        raise errors.StoreError("xet hashes need the package hf_xet", hint=hint) from error
    # Through /proc it reads the very file that is open, whatever its path means by now.
    name = f"/proc/self/fd/{fd}"
    if not os.path.exists(name):
        if isinstance(path, int):
            raise errors.StoreError("xet hashes need a path on this system, not a descriptor")
        name = os.fsdecode(path)
    (found,) = hf_xet.hash_files([name])
    if found.file_size != size or not os.path.samestat(os.stat(name), os.fstat(fd)):
        raise _changed(path)
    return str(found.hash)


def _in_threads(
    files: list[tuple[int, P]], wanted: tuple[Algorithm, ...], job: Job, threads: int
) -> Iterator[Hashed[P]]:
    """Yield files as they are done, started largest first; the threads end with the iterator."""
    owner, is_closed = threading.current_thread(), threading.Event()
    done: SimpleQueue[Hashed[P] | BaseException] = SimpleQueue()
    tasks = _tasks(files, threads)

    def advance(count: int) -> None:
        # At exit Python waits for these threads before it closes an iterator left half-way.
        is_exiting = owner is threading.main_thread() and not owner.is_alive()
        if is_closed.is_set() or is_exiting:
            raise SystemExit
        job.advance(count)

    def work() -> None:
        try:
            for path, helpers in iter(tasks.get, None):
                job.describe(os.path.basename(os.fsdecode(path)))
                done.put(_attempt(path, wanted, advance, helpers))
        except BaseException as error:  # noqa: BLE001 - raised in the thread that iterates
            done.put(error)

    workers: list[threading.Thread] = []
    try:
        for _ in files[:threads]:
            workers.append(threading.Thread(target=work, name="smartcache-hash"))
            workers[-1].start()
        for _ in files:
            result = done.get()
            if isinstance(result, BaseException):
                raise result
            yield result
    finally:
        is_closed.set()
        for worker in filter(threading.Thread.is_alive, workers):
            worker.join()


def _tasks(files: list[tuple[int, P]], threads: int) -> SimpleQueue[tuple[P, int] | None]:
    """Return the files, largest first, and how many threads may hash each; then None for all.

    Several hash one file only if it outlasts all others by far: more threads than cores are slow.
    """
    tasks: SimpleQueue[tuple[P, int] | None] = SimpleQueue()
    total = sum(size for size, _ in files)
    for size, path in sorted(files, key=lambda file: file[0], reverse=True):
        tasks.put((path, threads if size * (threads - 1) > 2 * (total - size) else 1))
    for _ in range(threads):
        tasks.put(None)
    return tasks


def _size_of(path: FilePath) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0  # opening it will say why


def _attempt(path: P, wanted: tuple[Algorithm, ...], advance: Advance, threads: int) -> Hashed[P]:
    try:
        return Hashed(path, *hash_file(path, wanted, advance=advance, threads=threads))
    except OSError as error:
        # The frames of a traceback would keep buffers alive.
        return Hashed(path, error=error.with_traceback(None))


def _changed(path: FilePath | int) -> errors.FileChangedError:
    return errors.FileChangedError(f"{_named(path)} changed while it was read", path=path)


def _named(path: FilePath | int) -> str:
    return f"descriptor {path}" if isinstance(path, int) else os.fsdecode(path)
