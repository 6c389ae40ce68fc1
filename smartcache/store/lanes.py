"""Buffers to read files into, and threads that hash what was read while more is read."""

from __future__ import annotations

import itertools
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from typing_extensions import Buffer

BUFFER_SIZE: Final = 256 * 1024
"""Stays in the core's cache between read and hash. Up to here files are small: two threads would
hardly be faster than one, because they wait for each other in Python."""

AHEAD_SIZE: Final = 2 * 1024 * 1024
AHEAD_MIN_SIZE: Final = 32 * 1024 * 1024
"""Handing buffers to another thread pays for buffers of this size, from this file size on."""


class Hash(Protocol):
    """What hashlib and blake3 give: fed piece by piece, asked at the end."""

    def update(self, data: Buffer, /) -> object:
        """Add bytes."""

    def hexdigest(self) -> str:
        """Return the hash of all bytes so far."""


def buffers(lanes: Sequence[Lane]) -> Iterator[memoryview]:
    """Yield buffers to read into, each again only when every lane is done with it."""
    if not lanes:
        buffer, spare.buffer = spare.buffer or new_buffer(BUFFER_SIZE), None
        try:
            while True:
                yield buffer
        finally:
            spare.buffer = buffer
    ring = [new_buffer(AHEAD_SIZE) for _ in range(3)]
    yield from ring
    for buffer in itertools.cycle(ring):
        for lane in lanes:
            lane.wait()
        yield buffer


class Lane(threading.Thread):
    """A thread that updates one hash with the buffers it is given, in order.

    A daemon: it owns nothing that must be finished, and Ctrl-C at any moment must end the program.
    """

    def __init__(self, state: Hash) -> None:
        super().__init__(name="smartcache-hash", daemon=True)
        self._state = state
        self._todo: SimpleQueue[memoryview | None] = SimpleQueue()
        self._done: SimpleQueue[None] = SimpleQueue()
        self._error: BaseException | None = None
        self.give = self._todo.put
        self.wait = self._done.get
        self.start()

    def run(self) -> None:
        """Hash what is given until None is."""
        for view in iter(self._todo.get, None):
            try:
                self._state.update(view)
            except BaseException as error:  # noqa: BLE001 - `close` raises it
                self._error = error
            self._done.put(None)

    def close(self) -> None:
        """End the thread; raise what went wrong in it."""
        self.give(None)
        self.join()
        if self._error is not None:
            raise self._error


class _Spare(threading.local):
    """This thread's buffer; taken while in use, because a signal handler may hash a file too."""

    buffer: memoryview | None = None


spare = _Spare()


def new_buffer(size: int) -> memoryview:
    """Return memory at the start of a page: reading and hashing is 13 % faster with it."""
    if sys.platform == "win32":
        return memoryview(bytearray(size))
    # Private: the default is shared with forked children, who would read into each other's bytes.
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def _read_seeking(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Do what preadv does where there is none (Windows)."""
    position = os.lseek(fd, 0, os.SEEK_CUR)
    try:
        os.lseek(fd, offset, os.SEEK_SET)
        data = os.read(fd, len(buffers[0]))
    finally:
        os.lseek(fd, position, os.SEEK_SET)
    buffers[0][: len(data)] = data
    return len(data)


read_at: Callable[[int, Sequence[memoryview], int], int] = getattr(os, "preadv", _read_seeking)
