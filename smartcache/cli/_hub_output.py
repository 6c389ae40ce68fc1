"""While huggingface_hub works: what it says goes through `out`, what it fetches is counted.

And it is stopped by Ctrl-C, which it does not hear while it waits for a server.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TextIO

from smartcache.cli._failures import INTERRUPTED
from smartcache.cli._output import out
from smartcache.progress import Job, Progress, Unit

_SAID_BY_US = "Not enough free disk space"
"""How a warning begins that huggingface_hub repeats for every file."""


@contextmanager
def hub_through_out() -> Iterator[None]:
    """Let the log and the warnings of huggingface_hub be lines of ours, and hide its bars.

    Its own handler would write into a line that a progress bar of ours is on.
    """
    import huggingface_hub.utils.logging  # makes the handler that is replaced here
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    logger = logging.getLogger(huggingface_hub.__name__)
    handlers, logger.handlers = logger.handlers, [_Lines()]
    with warnings.catch_warnings():
        warnings.filterwarnings("default", module="huggingface_hub")
        warnings.filterwarnings("ignore", "Cannot disable progress bars")
        warnings.showwarning = _show
        was_shown = not are_progress_bars_disabled()
        disable_progress_bars()
        try:
            yield
        finally:
            logger.handlers = handlers
            if was_shown:
                enable_progress_bars()


@contextmanager
def stopping_soon() -> Iterator[None]:
    """Say that Ctrl-C was heard, and let a second one end the process at once.

    A transfer ends when the server sends something or its time is up, which may take ten seconds.
    Whatever is cut off at once, the next run sets right, as after SIGKILL.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def hear(number: int, frame: FrameType | None) -> None:
        del number, frame
        signal.signal(signal.SIGINT, _end_at_once)
        out.interrupted("Stopping; this may take some seconds. Ctrl-C again ends it at once.")
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, hear)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is hear:
            signal.signal(signal.SIGINT, before)


def _end_at_once(number: int, frame: FrameType | None) -> None:
    del number, frame
    out.interrupted("Interrupted; the next run sets right what was left half done.", at_once=True)
    os._exit(INTERRUPTED)


class _Lines(logging.Handler):
    """Says what huggingface_hub logs, each text once: retries of many files look alike."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = " ".join(record.getMessage().split())
        if text not in self._said:
            self._said.add(text)
            out.warn(text)


def _show(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    del category, filename, lineno, file, line
    text = " ".join(str(message).split())
    if not text.startswith(_SAID_BY_US):
        out.warn(text)


class Counting:
    """A progress that counts the bytes that went through it."""

    def __init__(self, inner: Progress) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self.bytes = 0

    def __call__(self, label: str, total: int | None = None, unit: Unit = "items") -> Job:
        """Return a job of the progress below."""
        job = self._inner(label, total, unit)
        return _Counted(self, job) if unit == "bytes" else job

    def count(self, amount: int) -> None:
        """Take note of bytes, from any thread."""
        with self._lock:
            self.bytes += amount


class _Counted(Job):
    """A job whose bytes are counted."""

    def __init__(self, counting: Counting, job: Job) -> None:
        self._counting = counting
        self._job = job

    def advance(self, amount: int = 1) -> None:
        self._counting.count(amount)
        self._job.advance(amount)

    def describe(self, text: str) -> None:
        self._job.describe(text)

    def close(self) -> None:
        self._job.close()
