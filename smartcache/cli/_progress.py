"""Progress bars on a terminal, for jobs that run longer than half a second.

A thread draws the job that was opened last, so that one which says nothing for a while still shows
that time passes. Nothing is drawn where nobody watches: no terminal, `--json`, `-q`.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from types import TracebackType
from typing import Self

from smartcache.cli._output import out, printable, terminal_width
from smartcache.cli._tables import shortened, text_width
from smartcache.progress import Job, Progress, Unit, silent
from smartcache.sizes import format_age, format_size

DELAY = 0.5
_STEP = 0.1
_BAR = 16
_LABEL = 32


class Bars:
    """The `Progress` of the command line."""

    def __init__(self) -> None:
        self._jobs: list[Bar] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __call__(self, label: str, total: int | None = None, unit: Unit = "items") -> Job:
        """Return a running job, drawn if it takes long enough and somebody watches."""
        if not out.can_show_status():
            return silent(label, total, unit)
        bar = Bar(self, label, total, unit)
        with self._lock:
            self._jobs.append(bar)
            if self._thread is None:
                self._stop.clear()
                self._thread = threading.Thread(target=self._draw, name="progress", daemon=True)
                self._thread.start()
        return bar

    def end(self, bar: Bar) -> None:
        """Take a job off the screen; with the last one, the thread ends."""
        with self._lock:
            if bar not in self._jobs:
                return
            self._jobs.remove(bar)
            thread = None if self._jobs else self._thread
            if thread is not None:
                self._thread = None
                self._stop.set()
        if thread is not None:
            thread.join()
            out.status("")

    def _draw(self) -> None:
        while not self._stop.wait(_STEP):
            with self._lock:
                due = [bar for bar in self._jobs if bar.seconds() > DELAY]
            if due:
                out.status(due[-1].text())


class Bar:
    """One running job."""

    def __init__(self, bars: Bars, label: str, total: int | None, unit: Unit) -> None:
        self._bars = bars
        self._label = shortened(printable(label), _LABEL)
        self._total = total
        self._unit = unit
        self._done = 0
        self._lock = threading.Lock()
        self._started = time.monotonic()

    def advance(self, amount: int = 1) -> None:
        """Count what was done, from any thread."""
        with self._lock:
            self._done += amount

    def close(self) -> None:
        """Take the bar off the screen."""
        self._bars.end(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def seconds(self) -> float:
        """Return how long the job has been running."""
        return time.monotonic() - self._started

    def text(self) -> str:
        """Return the line to draw: how far, how fast, how long still."""
        import sys

        done, seconds = self._done, self.seconds()
        parts = [self._label]
        if self._total:
            share = min(1.0, done / self._total)
            filled = int(share * _BAR)
            parts += [f"[{'#' * filled}{'-' * (_BAR - filled)}] {share:4.0%}"]
        if done:
            rate = done / seconds
            parts += [self._amount(done, rate)]
            if self._total and done < self._total:
                left = timedelta(seconds=(self._total - done) / rate)
                parts += [f"{format_age(left)} left"]
        else:
            parts += [format_age(timedelta(seconds=seconds))]
        width = terminal_width(sys.stderr) - 1
        while len(parts) > 1 and text_width("  ".join(parts)) > width:
            parts.pop()  # what is last matters least
        return shortened("  ".join(parts), width)

    def _amount(self, done: int, rate: float) -> str:
        if self._unit == "bytes":
            whole = f"/{format_size(self._total)}" if self._total else ""
            return f"{format_size(done)}{whole}  {format_size(int(rate))}/s"
        return f"{done}/{self._total}" if self._total else f"{done}"


class Share:
    """A part of a larger job: what it does not say itself is counted when it ends."""

    def __init__(self, job: Job, size: int) -> None:
        self._job = job
        self._left = size

    def __call__(self, label: str, total: int | None = None, unit: Unit = "items") -> Job:
        """Return a job that counts for the larger one."""
        del label, total
        return self if unit == "bytes" else silent("")

    def advance(self, amount: int = 1) -> None:
        """Count for the larger job, never more than this part of it."""
        amount = min(amount, self._left)
        self._left -= amount
        self._job.advance(amount)

    def close(self) -> None:
        """Say nothing: `finish` does, once."""

    def finish(self) -> None:
        """Count what remains of this part: it was known already, or shared in one step."""
        self.advance(self._left)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


bars: Progress = Bars()
