"""Samples and digests of many files, learned with threads and remembered.

A sample is the XXH3 of a file's head and tail: files with different samples differ, files with
equal ones are hashed in full before anybody calls them equal. What is learned is valid for the stat
key the file was seen with; a file that shows another key before or after reading, that somebody
writes, or that cannot be read, is left out and named. Access times stay as they are where the
system allows it: a scan must not make every file look recently used.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from blake3 import blake3
from xxhash import xxh3_128

from smartcache.errors import FileBusyError, FileChangedError
from smartcache.store.digest import hash_file
from smartcache.store.duplicates import Candidate
from smartcache.store.kernel import drop_lease, open_quietly, take_lease
from smartcache.store.lanes import BUFFER_SIZE, new_buffer, read_at
from smartcache.store.schema import signed
from smartcache.store.statkey import StatKey
from smartcache.store.volume import Volume

What = Literal["blake3", "sample"]
Advance = Callable[[int], None]

HEAD_SIZE: Final = 16 * 1024
TAIL_SIZE: Final = 64 * 1024
"""Models of one kind have equal heads (the list of their tensors); their last weights differ."""

_FLAGS: Final = (
    os.O_RDONLY
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NOFOLLOW", 0)
)
_FLUSH_SECONDS: Final = 0.2
"""So often what was learned is written: while the threads read on, and so that Ctrl-C keeps it."""
_LOOK_SECONDS: Final = 0.05
_SAMPLED: Final = HEAD_SIZE + TAIL_SIZE
_BUSY: Final = "busy"


@dataclass(slots=True, kw_only=True)
class Learned:
    """What became of some files: values by (filesystem, inode); the rest named with the reason."""

    values: dict[tuple[str, int], bytes] = field(default_factory=dict)
    busy: list[bytes] = field(default_factory=list)
    problems: list[tuple[bytes, str]] = field(default_factory=list)
    size: int = 0
    """Bytes read."""


def learn(volume: Volume, files: Sequence[Candidate], what: What, *, advance: Advance) -> Learned:
    """Read files and remember what was learned as it comes; `advance` is told the bytes hashed.

    Ctrl-C ends the threads; what was learned until then is kept.
    """
    learned = Learned()
    if not files:
        return learned
    run = _Run(files, what, volume.settings.threads, advance)
    try:
        run.start()
        while not run.wait(_FLUSH_SECONDS):
            _remember(volume, run.taken(), what, learned)
    finally:
        run.end()
        _remember(volume, run.taken(), what, learned)
    if run.error is not None:
        raise run.error
    return learned


_Result = tuple[Candidate, bytes | None, str, int]
"""A file, its value or None, why there is none, and when its reading began."""


class _EndedError(Exception):
    """The run is over: leave the file in the middle."""


class _Run:
    """The threads that read files; they take the next one from a common list, largest first."""

    def __init__(
        self, files: Sequence[Candidate], what: What, threads: int, advance: Advance
    ) -> None:
        ordered = sorted(files, key=lambda file: file.size, reverse=True)
        self._total = sum(file.size for file in ordered)
        self._next = iter(ordered)  # a list's iterator may be shared by threads
        self._read = _sample if what == "sample" else self._digest
        self._tell = advance
        self._threads = threads
        self._count = max(1, min(threads, len(ordered)))
        self._workers: list[threading.Thread] = []
        self._results: list[_Result] = []
        self._taken = 0
        self._is_ended = False
        self.error: BaseException | None = None

    def start(self) -> None:
        """Begin to read."""
        for _ in range(self._count):
            self._workers.append(threading.Thread(target=self._work, name="smartcache-read"))
            self._workers[-1].start()

    def wait(self, seconds: float) -> bool:
        """Wait for the end, in small steps so that Ctrl-C is heard; say whether it is reached."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for worker in self._workers:
                worker.join(_LOOK_SECONDS)
            if not any(worker.is_alive() for worker in self._workers):
                return True
        return False

    def end(self) -> None:
        """End the threads, also in the middle of a file."""
        self._is_ended = True
        for worker in filter(threading.Thread.is_alive, self._workers):
            worker.join()

    def taken(self) -> list[_Result]:
        """Return the results since the last time."""
        found = self._results[self._taken :]
        self._taken += len(found)
        return found

    def _work(self) -> None:
        buffer = new_buffer(BUFFER_SIZE)
        try:
            for file in self._next:
                if self._is_ended:
                    return
                began = time.time_ns()
                try:
                    value = _read(file, self._read, buffer)
                    self._results.append((file, value, "", began))
                except OSError as error:
                    reason = _BUSY if isinstance(error, FileBusyError) else _reason(error)
                    self._results.append((file, None, reason, began))
        except _EndedError:
            pass
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            self.error = self.error or error
            self._is_ended = True

    def _digest(self, fd: int, file: Candidate, buffer: memoryview) -> bytes:
        if file.size <= BUFFER_SIZE:
            if read_at(fd, (buffer,), 0) != file.size:
                raise FileChangedError("changed while it was read")
            self._advance(file.size)
            return blake3(buffer[: file.size]).digest()
        # Several threads hash one file only if it outlasts all others by far.
        is_alone = file.size * (self._threads - 1) > 2 * (self._total - file.size)
        threads = self._threads if is_alone else 1
        hashes, _ = hash_file(fd, advance=self._advance, threads=threads)
        return bytes.fromhex(hashes.digest)

    def _advance(self, count: int) -> None:
        if self._is_ended:
            raise _EndedError
        self._tell(count)


def _read(
    file: Candidate, read: Callable[[int, Candidate, memoryview], bytes], buffer: memoryview
) -> bytes:
    """Return what `read` makes of a file that is as it was seen, before and after."""
    fd = open_quietly(file.path, _FLAGS)
    try:
        if not _is_as_seen(os.fstat(fd), file):
            raise FileChangedError("changed since it was seen")
        # Not held while reading: a writer would wait for us.
        lease = take_lease(fd)
        if lease == "busy":
            raise FileBusyError("open for writing")
        if lease == "held":
            drop_lease(fd)
        value = read(fd, file, buffer)
        if not _is_as_seen(os.fstat(fd), file):
            raise FileChangedError("changed while it was read")
        return value
    finally:
        os.close(fd)


def _is_as_seen(st: os.stat_result, file: Candidate) -> bool:
    key = (file.size, file.mtime_ns, file.ctime_ns)
    return StatKey.of(st) == key and signed(st.st_ino) == file.inode


def _sample(fd: int, file: Candidate, buffer: memoryview) -> bytes:
    """Return the XXH3 of the head and the tail; of a small file, of all of it."""
    state = xxh3_128()
    for offset, size in ((0, HEAD_SIZE), (max(HEAD_SIZE, file.size - TAIL_SIZE), TAIL_SIZE)):
        count = min(size, file.size - offset)
        if count > 0:
            if read_at(fd, (buffer[:count],), offset) != count:
                raise FileChangedError("changed while it was read")
            state.update(buffer[:count])
    return state.digest()


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _remember(volume: Volume, results: list[_Result], what: What, learned: Learned) -> None:
    """Keep what was learned for the next time, racy files marked as such."""
    rows = []
    for file, value, reason, began in results:
        if value is not None:
            key = StatKey(file.size, file.mtime_ns, file.ctime_ns)
            rows.append((file.filesystem, file.inode, *key, int(key.is_racy(began)), value))
            learned.values[file.filesystem, file.inode] = value
            learned.size += file.size if what == "blake3" else min(file.size, _SAMPLED)
        elif reason == _BUSY:
            learned.busy.append(file.path)
        else:
            learned.problems.append((file.path, reason))
    if rows:
        with volume.index.write():
            volume.index.learn(what, rows)
