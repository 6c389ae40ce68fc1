"""Progress bars on a terminal, for jobs that run longer than half a second.

A thread draws the job that was opened last, so that one which says nothing for a while still shows
that time passes, and counting costs an addition. tqdm, which huggingface_hub brings, smooths the
rate and keeps the line; it is imported when the first bar is due. Nothing is drawn where nobody
watches: no terminal, `--json`, `-q`.
"""

from __future__ import annotations

import sys
import threading
import time
from functools import cache
from typing import TYPE_CHECKING

from smartcache.cli._output import out, printable, silence, terminal_width
from smartcache.progress import Job, Progress, Unit, silent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tqdm import tqdm

DELAY = 0.5
_STEP = 0.1
_BAR = 16
_LABEL = 32
_LEAST_NAME = 12
"""Columns below which the beginning and end of a file's name say nothing."""
_SMOOTHING = 0.05
"""How much the last tenth of a second counts for the rate."""


class Bars:
    """The `Progress` of the command line."""

    def __init__(self) -> None:
        self._jobs: list[Bar] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __call__(self, label: str, total: int | None = None, unit: Unit = "items") -> Job:
        """Return a running job, drawn if it takes long enough and somebody watches."""
        if not out.can_show_bars():
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
            out.show_bar(None)

    def _draw(self) -> None:
        while not self._stop.wait(_STEP):
            with self._lock:
                due = [bar for bar in self._jobs if bar.seconds() > DELAY]
            if due:
                try:
                    due[-1].draw()
                except OSError:  # a terminal that is gone
                    silence(sys.stderr)


class Bar(Job):
    """One running job."""

    def __init__(self, bars: Bars, label: str, total: int | None, unit: Unit) -> None:
        self._bars = bars
        self._label = label
        self._total = total
        self._unit = unit
        self._done = 0
        self._name = ""
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self._line: tqdm | None = None

    def advance(self, amount: int = 1) -> None:
        """Count what was done, from any thread."""
        with self._lock:
            self._done += amount

    def describe(self, text: str) -> None:
        """Show the name of a file, from any thread."""
        self._name = text

    def close(self) -> None:
        """Take the bar off the screen."""
        self._bars.end(self)

    def seconds(self) -> float:
        """Return how long the job has been running."""
        return time.monotonic() - self._started

    def draw(self) -> None:
        """Show the line, over another job's; called by one thread."""
        if self._line is None:
            self._line = _line_class()(self)
            # What was done before the bar was due counts for the rate.
            self._line.start_t = self._line.last_print_t = time.time() - self.seconds()
        line = self._line
        with out.lock:
            out.show_bar(line.clear)
            if not line.update(self._done - line.n):
                line.refresh()

    def text(self, rate: float | None) -> str:
        """Return the line to draw: how far, how long still, with what; the name gives way first."""
        from smartcache.cli._tables import shortened, text_width

        width = terminal_width(sys.stderr) - 1
        label = shortened(printable(self._label), _LABEL)
        name = printable(self._name)
        for with_graphic, with_rate in ((True, True), (False, True), (False, False)):
            parts = [label, *self._figures(rate if with_rate else None, with_graphic=with_graphic)]
            left = self._left(rate)
            text = "  ".join([*parts, left] if left else parts)
            room = width - text_width(text) - 2
            if room >= min(text_width(name), _LEAST_NAME):
                return f"{text}  {shortened(name, room)}" if name else text
        return shortened(text, width)

    def _figures(self, rate: float | None, *, with_graphic: bool) -> Iterator[str]:
        from smartcache.sizes import format_size

        done, total = self._done, self._total
        if total:
            share = min(1.0, done / total)
            filled = int(share * _BAR)
            graphic = f"[{'#' * filled}{'-' * (_BAR - filled)}] " if with_graphic else ""
            yield f"{graphic}{share:4.0%}"
        if done and self._unit == "bytes":
            yield f"{format_size(done)}/{format_size(total)}" if total else format_size(done)
            if rate:
                yield f"{format_size(int(rate))}/s"
        elif done:
            yield f"{done:,}/{total:,}" if total else f"{done:,}"

    def _left(self, rate: float | None) -> str:
        """Return the time that is left, or, where that cannot be told, the time that has passed."""
        from datetime import timedelta

        from smartcache.sizes import format_age

        if not self._done or not rate or not self._total:
            return format_age(timedelta(seconds=self.seconds()))
        if self._done >= self._total:
            return ""
        seconds = max(1, (self._total - self._done) / rate)
        return f"{format_age(timedelta(seconds=seconds))} left"


@cache
def _line_class() -> type[tqdm]:
    from tqdm import tqdm

    tqdm.set_lock(out.lock)

    class Line(tqdm):  # type: ignore[misc]  # tqdm has no types
        """A line of tqdm with our words in it."""

        monitor_interval = 0  # its second thread: we have one

        def __init__(self, bar: Bar) -> None:
            # A delay of nothing: the first drawing is not for the constructor. The size is given:
            # on a terminal that does not know its own, tqdm would draw nothing.
            super().__init__(
                file=sys.stderr, leave=False, position=0, delay=1e-9, mininterval=0, miniters=1,
                smoothing=_SMOOTHING, ncols=0, nrows=2,
            )  # fmt: skip
            self._bar = bar

        def __del__(self) -> None:
            """Write nothing, as tqdm would at the exit: `out` has cleared the line."""

        def __str__(self) -> str:
            return self._bar.text(self.format_dict["rate"])

    return Line


class Share(Job):
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

    def describe(self, text: str) -> None:
        """Let the larger job show it."""
        self._job.describe(text)

    def finish(self) -> None:
        """Count what remains of this part: it was known already, or shared in one step."""
        self.advance(self._left)


bars: Progress = Bars()
