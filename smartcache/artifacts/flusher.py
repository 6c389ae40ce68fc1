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
from collections.abc import Callable
from typing import Protocol

from smartcache.errors import SmartcacheError

_log = logging.getLogger(__name__)
DELAY = 0.05


class Flushed(Protocol):
    """Whatever has something to write."""

    def flush(self) -> None:
        """Write it."""


class Flusher:
    """Calls `flush` of everything that has asked for it, a little later."""

    def __init__(self) -> None:
        self._wakes = threading.Condition()
        self._waiting: weakref.WeakSet[Flushed] = weakref.WeakSet()
        self._acts: list[Callable[[], None]] = []
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
        """Write everything now; what fails is said and tried again later."""
        with self._wakes:
            waiting, self._waiting = list(self._waiting), weakref.WeakSet()
            acts, self._acts = self._acts, []
        for act in acts:
            try:
                act()
            except (SmartcacheError, OSError) as error:
                _log.warning("A set of artifacts could not be closed: %s", error)
        for each in waiting:
            try:
                each.flush()
            except (SmartcacheError, OSError) as error:
                _log.warning("Rows of artifacts could not be written yet: %s", error)
                with self._wakes:
                    self._waiting.add(each)

    def _run(self) -> None:
        while True:
            with self._wakes:
                while not self._waiting and not self._acts:
                    self._wakes.wait()
            time.sleep(DELAY)
            self.flush()


flusher = Flusher()


def _begin_again() -> None:
    # The child of a fork has no thread, and its parent flushes what was waiting.
    flusher.__init__()  # type: ignore[misc]  # the same object: others have it


atexit.register(flusher.flush)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_again)
