"""Hash files and streams: one read, every wanted algorithm, several threads where they pay.

A file's hashes come with its stat key, and only if that key was the same before and after reading:
bytes that changed meanwhile are a `FileChangedError`, never a hash. Files are read into reused
buffers and not mapped: a mapping kills the process (SIGBUS) when another program truncates the
file, and when the disk cannot read a page. Hashing is no use: access times stay as they are where
the system allows it.

Many files are the work of a `Crew`. What a thread does at a time should be long and outside of
Python (reading, hashing): every short system call is a moment in which threads wait for each
other. So small files are hashed by the calling thread.

Measured warm on two cores, in GB/s for one and two threads: reading alone 8.9 and 17, BLAKE3 alone
6.9 and 13, both together 3.9 and 7.5, which is what the two add up to. One large file is read by
one thread and hashed by another, 6.2; the threads inside the blake3 package reach 3.9.
"""

from __future__ import annotations

import hashlib
import itertools
import mmap
import os
import re
import stat
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final, Generic, Literal, Protocol, TypeVar

from blake3 import blake3

from smartcache import errors
from smartcache.progress import Progress, silent
from smartcache.system.kernel import StatKey, open_quietly

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    from typing_extensions import Buffer

Algorithm = Literal["blake3", "sha256", "git-sha1"]
Advance = Callable[[int], None]
"""Is told how many bytes were read."""
FilePath = str | bytes | os.PathLike[str] | os.PathLike[bytes]
P = TypeVar("P", bound=FilePath | int)
T = TypeVar("T")
R = TypeVar("R")


BUFFER_SIZE: Final = 256 * 1024
"""Stays in the core's cache between read and hash. Up to here files are small: two threads would
hardly be faster than one, because they wait for each other in Python."""

AHEAD_SIZE: Final = 2 * 1024 * 1024
AHEAD_MIN_SIZE: Final = 32 * 1024 * 1024
"""Handing buffers to another thread pays for buffers of this size, from this file size on."""

_DIGEST: Final = re.compile("[0-9a-f]{64}")
_LENGTHS: Final[Mapping[str, int]] = {"blake3": 64, "sha256": 64, "git-sha1": 40}
# Without O_NONBLOCK, opening a FIFO waits for somebody to write into it.
_OPEN_FLAGS: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_LOOK_SECONDS: Final = 0.05


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


def is_digest(text: str) -> bool:
    """Say whether `text` has the form of a digest."""
    return _DIGEST.fullmatch(text) is not None


class Hasher:
    """Hashes a stream with several algorithms at once.

    `needs_file` lists those that a stream cannot give and a file must be read for afterwards:
    git-sha1 if `size` is not known, because it hashes the size first.
    """

    def __init__(self, algorithms: Iterable[Algorithm], *, size: int | None = None) -> None:
        wanted = _checked(algorithms)
        is_late = size is None and "git-sha1" in wanted
        self.needs_file: tuple[Algorithm, ...] = ("git-sha1",) if is_late else ()
        self._states = _start([name for name in wanted if name not in self.needs_file], size or 0)
        self._announced = size
        self._size = 0

    def update(self, buffer: Buffer) -> None:
        """Hash the bytes of any buffer: of arrays the elements, one after the other."""
        with memoryview(buffer) as given:
            if not given.nbytes:
                return
            view = given if given.c_contiguous else memoryview(given.tobytes())
            with view.cast("B") as plain:
                for state in self._states.values():
                    state.update(plain)
            self._size += given.nbytes

    def finish(self) -> Hashes:
        """Return the hashes. SizeMismatchError if the announced size was not reached."""
        if self._announced not in (None, self._size):
            message = f"{self._announced} bytes were announced, but {self._size} arrived"
            raise errors.SizeMismatchError(message, expected=self._announced, found=self._size)
        values = {name: state.hexdigest() for name, state in self._states.items()}
        return Hashes(size=self._size, values=values)


def hash_file(
    path: FilePath | int, algorithms: Iterable[Algorithm] = ("blake3",), *,
    advance: Advance | None = None, threads: int = 1,
) -> tuple[Hashes, StatKey]:  # fmt: skip
    """Return the hashes of a file and the stat key they belong to.

    An open descriptor is accepted too; its position does not move. FileChangedError if the file
    changed meanwhile, FileSkippedError if it is no regular file. `advance` is told the bytes read,
    in the calling thread; an exception it raises ends the hashing.
    """
    wanted = _checked(algorithms)
    values: dict[Algorithm, str] = {}
    is_whole = True
    fd = path if isinstance(path, int) else open_quietly(path, _OPEN_FLAGS)
    try:
        before = os.fstat(fd)
        size = before.st_size
        if not stat.S_ISREG(before.st_mode):
            reason = "not a regular file"
            raise errors.FileSkippedError(f"{_named(path)} is {reason}", reason=reason, path=path)
        if size <= BUFFER_SIZE and wanted == ("blake3",) and (digest := digest_at_once(fd, size)):
            values["blake3"] = digest.hex()
            if advance is not None:
                advance(size)
        elif states := _start(wanted, size):
            is_whole = _feed(fd, size, list(states.values()), advance, threads)
            values |= {name: state.hexdigest() for name, state in states.items()}
        after = os.fstat(fd)
    finally:
        if not isinstance(path, int):
            os.close(fd)
    key = StatKey.of(before)
    if not is_whole or StatKey.of(after) != key:
        raise errors.FileChangedError(f"{_named(path)} changed while it was read", path=path)
    return Hashes(size=size, values=values), key


def hash_many(
    paths: Iterable[P], algorithms: Iterable[Algorithm] = ("blake3",), *, threads: int,
    progress: Progress = silent, names: Mapping[int, str] | None = None,
) -> Iterator[Hashed[P]]:  # fmt: skip
    """Yield what became of each file, given by path or descriptor, as soon as it is known.

    Small files come first, hashed by the thread that iterates, then large ones by threads, largest
    first. Closing the iterator, or an exception in it, ends them.
    `names` are what the user calls the files behind descriptors.
    """
    wanted, threads = _checked(algorithms), max(threads, 1)
    small: list[tuple[int, P]] = []
    large: list[tuple[int, P]] = []
    for path in paths:
        try:
            size = os.stat(path).st_size
        except OSError:
            size = 0  # opening it will say why
        (small if size <= BUFFER_SIZE else large).append((size, path))
    large.sort(key=lambda file: file[0], reverse=True)
    total = sum(size for size, _ in large)

    def attempt(file: tuple[int, P], check: Callable[[], None]) -> Hashed[P]:
        size, path = file

        def advance(count: int) -> None:
            check()
            job.advance(count)

        if not isinstance(path, int):
            job.describe(os.path.basename(os.fsdecode(path)))
        elif names is not None:
            job.describe(names[path])
        helpers = threads_for(size, total, threads)
        try:
            return Hashed(path, *hash_file(path, wanted, advance=advance, threads=helpers))
        except OSError as error:
            # The frames of a traceback would keep buffers alive.
            return Hashed(path, error=error.with_traceback(None))

    with progress("Hashing", total + sum(size for size, _ in small), "bytes") as job:
        for file in small:
            yield attempt(file, lambda: None)
        yield from Crew(attempt, threads).results(large)


def threads_for(size: int, total: int, threads: int) -> int:
    """Return how many of the threads that hash files of `total` bytes may hash one of them.

    Several only if it outlasts all others by far: more threads than cores are slow.
    """
    return threads if size * (threads - 1) > 2 * (total - size) else 1


class Crew(Generic[T, R]):
    """Threads that work through tasks: one iterator of tasks in, one of results out.

    `work` takes a task and a function to call now and then, which raises when nobody wants the
    result any more.
    """

    def __init__(self, work: Callable[[T, Callable[[], None]], R], threads: int) -> None:
        self._work = work
        self._threads = threads
        self._owner = threading.current_thread()
        self._is_closed = False
        self._todo: SimpleQueue[T | None] = SimpleQueue()
        self._done: SimpleQueue[R | BaseException] = SimpleQueue()

    def results(
        self, tasks: Iterable[T], meanwhile: Callable[[], None] = lambda: None
    ) -> Generator[R, None, None]:
        """Yield what becomes of each task as soon as it is done; a crew does this once.

        The thread that iterates takes the tasks from their iterator, at most two for each thread
        ahead; while it waits it calls `meanwhile` now and then. Closing the iterator ends the
        threads, and so does the first error in one of them, which is raised here.
        """
        workers: list[threading.Thread] = []
        waiting = 0
        try:
            for task in tasks:
                if len(workers) < self._threads:
                    workers.append(threading.Thread(target=self._run, name="smartcache-hash"))
                    workers[-1].start()
                self._todo.put(task)
                waiting += 1
                if waiting == 2 * self._threads:
                    yield self._take(meanwhile)
                    waiting -= 1
            for _ in range(waiting):
                yield self._take(meanwhile)
        finally:
            self._is_closed = True
            for _ in workers:
                self._todo.put(None)
            for worker in filter(threading.Thread.is_alive, workers):
                worker.join()

    def _run(self) -> None:
        try:
            while True:
                task = None
                with suppress(Empty):
                    task = self._todo.get(timeout=_LOOK_SECONDS)
                self._check()
                if task is not None:
                    self._done.put(self._work(task, self._check))
        except BaseException as error:  # noqa: BLE001 - raised in the thread that iterates
            self._done.put(error)

    def _check(self) -> None:
        # At exit Python waits for these threads before it closes an iterator left half-way.
        is_exiting = self._owner is threading.main_thread() and not self._owner.is_alive()
        if self._is_closed or is_exiting:
            raise SystemExit

    def _take(self, meanwhile: Callable[[], None]) -> R:
        while True:
            try:
                found = self._done.get(timeout=_LOOK_SECONDS)
            except Empty:
                meanwhile()
                continue
            if isinstance(found, BaseException):
                raise found
            return found


def digest_at_once(fd: int, size: int) -> bytes | None:
    """Return the digest of a small file; None: one read did not give its size."""
    buffer, spare.buffer = spare.buffer or _new_buffer(BUFFER_SIZE), None
    is_whole = os.preadv(fd, (buffer,), 0) == size
    digest = blake3(buffer[:size]).digest() if is_whole else None
    spare.buffer = buffer
    return digest


def _feed(fd: int, size: int, states: list[Hash], advance: Advance | None, threads: int) -> bool:
    """Give the bytes of a file, read once, to every state; False: they are not `size`."""
    ahead = threads - 1 if size >= AHEAD_MIN_SIZE else 0
    lent, spare.buffer = spare.buffer or _new_buffer(BUFFER_SIZE), None
    ring = [_new_buffer(AHEAD_SIZE) for _ in range(3)] if ahead else [lent]
    at_work: deque[list[Future[object]]] = deque()
    offset = 0
    try:
        with ExitStack() as stack:
            lanes = [(stack.enter_context(_new_lane()), state) for state in states[:ahead]]
            for buffer in itertools.cycle(ring):
                if len(at_work) == len(ring):  # whoever still hashes what this buffer has
                    _finish(at_work.popleft())
                count = os.preadv(fd, (buffer,), offset)
                offset += count
                # Read even if the size is 0: files of /proc have that size and yet content.
                if offset > size or (count == 0 and offset < size):
                    return False
                view = buffer[:count]
                at_work.append([lane.submit(state.update, view) for lane, state in lanes])
                for state in states[ahead:]:
                    state.update(view)
                if advance is not None:
                    advance(count)
                if offset == size:
                    break
            for left in at_work:
                _finish(left)
            return True
    finally:
        spare.buffer = lent


def _new_lane() -> ThreadPoolExecutor:
    """Return a thread that hashes one buffer after the other."""
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(1, "smartcache-hash")


def _finish(futures: list[Future[object]]) -> None:
    for future in futures:
        future.result()


class Hash(Protocol):
    """What hashlib and blake3 give: fed piece by piece, asked at the end."""

    def update(self, data: Buffer, /) -> object:
        """Add bytes."""

    def hexdigest(self) -> str:
        """Return the hash of all bytes so far."""


_NEW: Final[Mapping[Algorithm, Callable[[int], Hash]]] = {
    "sha256": lambda _: hashlib.sha256(),
    "git-sha1": lambda size: hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False),
    "blake3": lambda _: blake3(),
}
"""What makes the state of an algorithm for so many bytes; the costliest first."""


def _start(wanted: Sequence[Algorithm], size: int) -> dict[Algorithm, Hash]:
    return {name: new(size) for name, new in _NEW.items() if name in wanted}


class _Spare(threading.local):
    """This thread's buffer; taken while in use, because a signal handler may hash a file too."""

    buffer: memoryview | None = None


spare = _Spare()


def _new_buffer(size: int) -> memoryview:
    """Return memory at the start of a page: reading and hashing is 13 % faster with it."""
    # Private: the default is shared with forked children, who would read into each other's bytes.
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def _checked(algorithms: Iterable[Algorithm]) -> tuple[Algorithm, ...]:
    wanted = tuple(dict.fromkeys(algorithms))
    for name in wanted:
        if name not in _LENGTHS:
            hint = f"There are {', '.join(_LENGTHS)}."
            raise errors.BadDigestError(f"{name!r} is not a hash algorithm", hint=hint)
    return wanted


def _named(path: FilePath | int) -> str:
    return f"descriptor {path}" if isinstance(path, int) else os.fsdecode(path)
