"""Samples and digests of many files, learned with threads and remembered.

A sample is the XXH3 of a file's head and tail: files with different samples differ, files with
equal ones are hashed in full before anybody calls them equal. What is learned is valid for the stat
key the file was seen with; a file that shows another key after reading, that somebody writes, or
that cannot be read, is left out and named. Access times stay as they are where the
system allows it: a scan must not make every file look recently used.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
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
from smartcache.store.readers import Readers
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
_SAMPLED: Final = HEAD_SIZE + TAIL_SIZE
SMALL_SIZE: Final = 64 * 1024
"""Up to here a second thread costs more than it brings."""
_TOGETHER: Final = 100
"""Files opened at once; twice as many are open, of 256 that macOS allows."""
_FLUSH_SECONDS: Final = 2.0
"""So often what was learned is written, so that Ctrl-C and SIGKILL lose little."""


@dataclass(slots=True, kw_only=True)
class Learned:
    """What became of some files: values by (filesystem, inode); the rest named with the reason."""

    values: dict[tuple[str, int], bytes] = field(default_factory=dict)
    busy: list[bytes] = field(default_factory=list)
    problems: list[tuple[bytes, str]] = field(default_factory=list)
    size: int = 0
    """Bytes read."""


def learn(
    volume: Volume,
    files: Sequence[Candidate],
    what: What,
    *,
    advance: Advance,
    describe: Callable[[str], None] | None = None,
) -> Learned:
    """Read files and remember what was learned as it comes; `advance` is told the bytes hashed.

    `describe` is told the names of large files when they are begun.

    Ctrl-C ends the threads; what was learned until then is kept.
    """
    run = _Run(volume, what, advance, describe)
    try:
        run.read(files)
    finally:
        run.remember()
    return run.learned


@dataclass(slots=True)
class _Held:
    """A file that is open and that nobody was writing when reading began."""

    file: Candidate
    fd: int
    began: int
    value: bytes | None = None
    error: OSError | None = None


class _Run:
    """One call of `learn`: the thread that called opens and closes, the others read and hash.

    Measured with 13,000 files of 240 KB on two cores: two threads that do everything take 1.5 s,
    because they wait for each other after each of eight system calls; this way it is 1.0 s.
    """

    def __init__(
        self, volume: Volume, what: What, advance: Advance, describe: Callable[[str], None] | None
    ) -> None:
        self.learned = Learned()
        self._volume = volume
        self._what = what
        self._tell = advance
        self._describe = describe
        self._threads = max(1, volume.settings.threads)
        self._readers: Readers[_Held] = Readers(self._threads)
        self._total = 0
        self._buffers = threading.local()
        self._finished: deque[_Held] = deque()
        self._rows: list[tuple[object, ...]] = []
        self._written = time.monotonic()

    def read(self, files: Sequence[Candidate]) -> None:
        """Read all: small ones, which need no threads, and then the largest first."""
        ordered = sorted(files, key=lambda file: file.size, reverse=True)
        large = [file for file in ordered if file.size > SMALL_SIZE]
        self._total = sum(file.size for file in large)
        for file in ordered[len(large) :]:
            self._read_alone(file)
        if large:
            self._read_together(large)

    def remember(self) -> None:
        """Keep what was learned for the next time."""
        rows, self._rows = self._rows, []
        if rows:
            with self._volume.index.write():
                self._volume.index.learn(self._what, rows)
        self._written = time.monotonic()

    def _read_together(self, files: list[Candidate]) -> None:
        """Let the threads read some files while the next ones are opened and the last closed."""
        held: list[_Held] = []
        try:
            for start in range(0, len(files), _TOGETHER):
                opened = list(filter(None, map(self._hold, files[start : start + _TOGETHER])))
                held += opened
                self._readers.wait(self._tidy)
                self._readers.begin(self._attempt, opened)
                self._tidy()
                held = [each for each in held if each.fd >= 0]
            self._readers.wait(self._tidy)
        finally:
            self._readers.end()
            for each in held:
                self._let_go(each)

    def _tidy(self) -> None:
        """Close the files that were read, and write what was learned if it is time."""
        while self._finished:
            self._let_go(self._finished.popleft())
        self._remember_now_and_then()

    def _read_alone(self, file: Candidate) -> None:
        held = self._hold(file)
        if held is not None:
            try:
                self._attempt(held)
            finally:
                self._let_go(held)
        self._tidy()

    def _remember_now_and_then(self) -> None:
        if time.monotonic() - self._written > _FLUSH_SECONDS:
            self.remember()

    def _hold(self, file: Candidate) -> _Held | None:
        """Open a file that nobody writes; else note why it is left out.

        The lease is asked for before the first byte is read: whoever maps the file later cannot
        write without another change time. It is not kept: a writer would wait for us.
        """
        began = time.time_ns()
        try:
            fd = open_quietly(file.path, _FLAGS)
        except OSError as error:
            self._leave_out(file, error)
            return None
        lease = take_lease(fd)
        if lease == "held":
            drop_lease(fd)
        held = _Held(file, fd, began)
        if lease == "busy":
            held.error = FileBusyError("open for writing")
            self._let_go(held)
            return None
        return held

    def _attempt(self, held: _Held) -> None:
        buffer = getattr(self._buffers, "own", None)
        if buffer is None:
            buffer = self._buffers.own = new_buffer(BUFFER_SIZE)
        try:
            read = _sample if self._what == "sample" else self._digest
            held.value = read(held.fd, held.file, buffer)
        except OSError as error:
            held.error = error
        self._finished.append(held)

    def _let_go(self, held: _Held) -> None:
        """Close a file, once; its value counts if it is now as it was seen before it was opened."""
        file, fd = held.file, held.fd
        if fd < 0:
            return
        held.fd = -1
        try:
            if held.value is not None and not _is_as_seen(os.fstat(fd), file):
                held.error = FileChangedError("changed since it was seen")
        finally:
            os.close(fd)
        if held.error is not None:
            self._leave_out(file, held.error)
        elif held.value is not None:
            key = StatKey(file.size, file.mtime_ns, file.ctime_ns)
            racy = int(key.is_racy(held.began))
            self._rows.append((file.filesystem, file.inode, *key, racy, held.value))
            self.learned.values[file.filesystem, file.inode] = held.value
            is_whole = self._what == "blake3"
            self.learned.size += file.size if is_whole else min(file.size, _SAMPLED)

    def _leave_out(self, file: Candidate, error: OSError) -> None:
        if isinstance(error, FileBusyError):
            self.learned.busy.append(file.path)
        else:
            self.learned.problems.append((file.path, error.strerror or str(error)))

    def _digest(self, fd: int, file: Candidate, buffer: memoryview) -> bytes:
        if file.size <= BUFFER_SIZE:
            if read_at(fd, (buffer,), 0) != file.size:
                raise FileChangedError("changed while it was read")
            self._advance(file.size)
            return blake3(buffer[: file.size]).digest()
        if self._describe is not None:
            self._describe(os.path.basename(os.fsdecode(file.path)))
        # Several threads hash one file only if it outlasts all others by far.
        is_alone = file.size * (self._threads - 1) > 2 * (self._total - file.size)
        threads = self._threads if is_alone else 1
        hashes, _ = hash_file(fd, advance=self._advance, threads=threads)
        return bytes.fromhex(hashes.digest)

    def _advance(self, count: int) -> None:
        self._readers.check()
        self._tell(count)


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
