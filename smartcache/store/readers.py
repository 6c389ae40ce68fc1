"""Threads that work through a list together while the caller waits.

What a thread does for an item should be long and outside of Python (reading, hashing): every short
system call is a moment in which threads wait for each other. So the caller does the small things
before and after.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")
_LOOK_SECONDS = 0.05


class EndedError(Exception):
    """The work is over: leave what you do in the middle."""


class Readers(Generic[T]):
    """Some threads, started when they are first needed; whoever needs them must `end` them."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._workers: list[threading.Thread] = []
        self._tasks: SimpleQueue[tuple[Callable[[T], None], Iterator[T]] | None] = SimpleQueue()
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        self._running = 0
        self._is_ended = False

    def end(self) -> None:
        """End the threads, also in the middle of an item, and wait for that."""
        self._is_ended = True
        for _ in self._workers:
            self._tasks.put(None)
        for worker in filter(threading.Thread.is_alive, self._workers):
            worker.join()

    def check(self) -> None:
        """Raise if the caller waits no more; to be called now and then by long work."""
        if self._is_ended:
            raise EndedError

    def begin(self, work: Callable[[T], None], items: Iterable[T]) -> None:
        """Let the threads work on all items; `wait` before the next time."""
        self._start()
        shared = iter(list(items))  # a list's iterator may be shared by threads
        for _ in self._workers:
            self._tasks.put((work, shared))
            self._running += 1

    def wait(self, meanwhile: Callable[[], None]) -> None:
        """Wait until all is done; the first error is raised when all threads have stopped.

        `meanwhile` is called now and then by the waiting thread, where Ctrl-C is heard too.
        """
        errors: list[BaseException] = []
        while self._running:
            try:
                error = self._done.get(timeout=_LOOK_SECONDS)
            except Empty:
                meanwhile()
                continue
            self._running -= 1
            if error is not None:
                self._is_ended = True
                errors.append(error)
        for error in errors:
            if not isinstance(error, EndedError):
                raise error

    def _start(self) -> None:
        while len(self._workers) < self._threads:
            worker = threading.Thread(target=self._work, name="smartcache-read")
            worker.start()
            self._workers.append(worker)

    def _work(self) -> None:
        for work, items in iter(self._tasks.get, None):
            try:
                for item in items:
                    self.check()
                    work(item)
            except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
                self._done.put(error)
            else:
                self._done.put(None)
