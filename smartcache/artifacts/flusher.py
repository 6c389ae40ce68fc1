"""The thread that writes rows soon after the records they are about.

One thread for all sets of a process, started when it is first needed and ended with the process.
Whoever has written something says so; within a twentieth of a second it is counted.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Protocol

from smartcache.errors import SmartcacheError

_log = logging.getLogger(__name__)
DELAY = 0.05
_LONGEST = 5.0
"""Seconds until what could not be written, for want of room perhaps, is tried again."""


class Flushed(Protocol):
    """Whatever has something to write."""

    def flush(self) -> None:
        """Write it."""

    def flush_behind(self) -> None:
        """Write it while others go on."""


class Flusher:
    """Calls `flush` of everything that has asked for it, a little later."""

    def __init__(self) -> None:
        self._wakes = threading.Condition()
        self._waiting: weakref.WeakSet[Flushed] = weakref.WeakSet()
        self._acts: list[Callable[[], None]] = []
        self._failed: weakref.WeakKeyDictionary[Flushed, tuple[float, float]] = (
            weakref.WeakKeyDictionary()
        )
        """What could not be written: how long to wait, and until when."""
        self._thread: threading.Thread | None = None

    def soon(self, each: Flushed) -> None:
        """Have something written within `DELAY` seconds."""
        with self._wakes:
            self._waiting.add(each)
            self._wake()

    def later(self, act: Callable[[], None]) -> None:
        """Have something done that may wait for locks, by a thread that has none.

        For what the garbage collector calls: it does so in whatever thread it runs.
        """
        with self._wakes:
            self._acts.append(act)
            self._wake()

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="smartcache-flusher", daemon=True
            )
            try:
                self._thread.start()
            except RuntimeError:  # the interpreter ends: `flush` is called at its exit
                self._thread = None
                return
            # A worker process of multiprocessing ends without `atexit`.
            util = sys.modules.get("multiprocessing.util")
            if util is not None:
                util.Finalize(None, self.flush, exitpriority=0)
        self._wakes.notify()

    def flush(self) -> None:
        """Write everything now; what fails is said, once, and tried again later."""
        with self._wakes:
            waiting = {*self._waiting, *self._failed}
        self._flush(waiting, behind=False)

    def _flush(self, waiting: Iterable[Flushed], *, behind: bool) -> None:
        with self._wakes:
            self._waiting.difference_update(waiting)
            acts, self._acts = self._acts, []
        for act in acts:
            try:
                act()
            except (SmartcacheError, OSError) as error:
                _log.warning("A set of artifacts could not be closed: %s", error)
        for each in waiting:
            try:
                if behind:
                    each.flush_behind()
                else:
                    each.flush()
            except Exception as error:  # noqa: BLE001 - the thread serves other sets as well
                self._note_failure(each, error)
            else:
                with self._wakes:
                    self._failed.pop(each, None)

    def _note_failure(self, each: Flushed, error: Exception) -> None:
        with self._wakes:
            delay = self._failed.get(each, (0.0, 0.0))[0]
            if not delay:
                is_known = isinstance(error, (SmartcacheError, OSError))
                text = "Rows of artifacts could not be written yet: %s"
                _log.warning(text, error, exc_info=None if is_known else error)
            delay = min(max(DELAY, 2 * delay), _LONGEST)
            self._failed[each] = delay, time.monotonic() + delay

    def _run(self) -> None:
        while True:
            with self._wakes:
                while not self._waiting and not self._acts:
                    if self._failed and not self._wakes.wait(DELAY):
                        break
                    if not self._failed:
                        self._wakes.wait()
            time.sleep(DELAY)
            now = time.monotonic()
            with self._wakes:
                due = [each for each, (_, until) in self._failed.items() if until <= now]
                due += [each for each in self._waiting if each not in self._failed]
            self._flush(due, behind=True)
            due.clear()  # a set that was closed meanwhile need not stay in memory


flusher = Flusher()


def _begin_again() -> None:
    # The child of a fork has no thread, and its parent flushes what was waiting.
    flusher.__init__()  # type: ignore[misc]  # the same object: others have it


atexit.register(flusher.flush)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_again)
