"""How long work tells somebody how far it is.

The library takes `progress: Progress = silent` and opens one `Job` per task the user knows
("Hashing", "Linking"). Whoever wants bars passes `bars`, or a `Progress` of their own whose jobs
override what they want to hear of.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

if TYPE_CHECKING:
    from types import TracebackType

Unit = Literal["bytes", "items"]


class Job:
    """One running task: `advance` and `describe` come from any thread, `close` more than once."""

    __slots__ = ()

    def advance(self, amount: int = 1) -> None:
        """Hear that `amount` more bytes or items are done."""

    def describe(self, text: str) -> None:
        """Hear what is being worked on now: the name of a file."""

    def close(self) -> None:
        """Hear that nothing more will come, whether or not the total was reached."""

    def __enter__(self) -> Self:
        """Return the job itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None:
        """Close the job; an exception passes through."""
        self.close()


class Progress(Protocol):
    """Starts jobs: called with a label, the total if it is known, and what is counted."""

    def __call__(self, label: str, total: int | None = None, unit: Unit = "items") -> Job:
        """Return a running job."""
        ...


SILENT = Job()
"""A job that nobody watches."""


def silent(label: str, total: int | None = None, unit: Unit = "items") -> Job:  # noqa: ARG001
    """Return a job that shows nothing: the `Progress` of everybody who gave none."""
    return SILENT


def bars(label: str, total: int | None = None, unit: Unit = "items") -> Job:
    """Return a job that is drawn on the terminal, with rate and time left: for scripts.

    Nothing is drawn, and tqdm (which huggingface_hub brings) is not loaded, where nobody watches.
    """
    return _Bar(label, total, unit) if sys.stderr is not None and sys.stderr.isatty() else SILENT


class _Bar(Job):
    __slots__ = ("_line",)

    def __init__(self, label: str, total: int | None, unit: Unit) -> None:
        from tqdm.auto import tqdm

        is_bytes = unit == "bytes"
        self._line: Any = tqdm(
            desc=label, total=total, unit="B" if is_bytes else "", unit_scale=is_bytes,
            leave=False, dynamic_ncols=True, delay=0.5,
        )  # fmt: skip

    def advance(self, amount: int = 1) -> None:
        """Draw how far it is."""
        self._line.update(amount)

    def describe(self, text: str) -> None:
        """Draw what is being worked on, with the next step."""
        self._line.set_postfix_str(text, refresh=False)

    def close(self) -> None:
        """Take the bar off the screen."""
        self._line.close()
