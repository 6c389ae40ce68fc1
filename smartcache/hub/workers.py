"""Threads that do jobs of two kinds side by side: reading this disk, and fetching from the Hub.

They are daemon threads: a process that ends does not wait for a download that nobody wants any
more. After Ctrl-C `is_stopping` is set, which running jobs look at.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Literal, Self

Kind = Literal["local", "fetch"]
_PATIENCE = 5.0
"""Seconds that running jobs get to notice that they are no longer wanted."""


class Workers:
    """A queue and some threads for each kind of job. Jobs may add jobs."""

    def __init__(self, most: Mapping[Kind, int]) -> None:
        self.is_stopping = threading.Event()
        self._most = most
        self._changed = threading.Condition()
        self._waiting: dict[Kind, deque[Callable[[], None]]] = {kind: deque() for kind in most}
        self._running: dict[Kind, int] = dict.fromkeys(most, 0)
        self._error: BaseException | None = None

    def add(self, kind: Kind, job: Callable[[], None]) -> None:
        """Let a job be done as soon as a thread is free."""
        with self._changed:
            self._waiting[kind].append(job)
            if self._running[kind] < self._most[kind]:
                threading.Thread(target=self._run, args=(kind,), daemon=True).start()
                self._running[kind] += 1  # it waits for this lock before it looks

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """After an interruption tell the running jobs, and give them a moment to end."""
        if error is not None:
            self.is_stopping.set()
            with self._changed:
                self._drop_waiting()
                self._changed.wait_for(self._is_idle, timeout=_PATIENCE)

    def wait(self) -> None:
        """Return when all jobs are done; or raise the first error, after those then running."""
        with self._changed:
            self._changed.wait_for(self._is_idle)
        if self._error is not None:
            raise self._error

    def _run(self, kind: Kind) -> None:
        while True:
            with self._changed:
                if not self._waiting[kind]:
                    self._running[kind] -= 1
                    self._changed.notify_all()
                    return
                job = self._waiting[kind].popleft()
            try:
                job()
            except BaseException as error:  # noqa: BLE001 - raised again by `wait`
                with self._changed:
                    self._error = self._error or error
                    self._drop_waiting()

    def _is_idle(self) -> bool:
        return not any(self._running.values())

    def _drop_waiting(self) -> None:
        for queue in self._waiting.values():
            queue.clear()
