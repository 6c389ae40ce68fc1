"""What huggingface_hub says while it works goes through `out`; what it fetches is counted."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TextIO

from smartcache.cli._output import out
from smartcache.progress import Job, Progress, Unit


@contextmanager
def hub_through_out() -> Iterator[None]:
    """Let the log and the warnings of huggingface_hub be lines of ours, and hide its bars.

    Its own handler would write into a line that a progress bar of ours is on.
    """
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        disable_progress_bars,
        enable_progress_bars,
    )

    logger = logging.getLogger("huggingface_hub")
    handlers, logger.handlers = logger.handlers, [_Lines()]
    if not out.can_show_status():
        disable_progress_bars()
    with warnings.catch_warnings():
        warnings.filterwarnings("default", module="huggingface_hub")
        warnings.showwarning = _show
        try:
            yield
        finally:
            logger.handlers = handlers
            enable_progress_bars()


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
    out.warn(" ".join(str(message).split()))


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


class _Counted:
    """A job whose bytes are counted."""

    def __init__(self, counting: Counting, job: Job) -> None:
        self._counting = counting
        self._job = job

    def advance(self, amount: int = 1) -> None:
        self._counting.count(amount)
        self._job.advance(amount)

    def close(self) -> None:
        self._job.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
