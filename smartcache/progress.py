"""How long work tells somebody how far it is.

The library takes `progress: Progress = silent` and opens one `Job` per task the user knows
("Hashing", "Linking"); it never imports a progress bar. Whoever wants bars passes a `Progress`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol, Self

if TYPE_CHECKING:
    from types import TracebackType

Unit = Literal["bytes", "items"]


class Job(Protocol):
    """One running task. `advance` may be called from any thread; `close` more than once."""

    def advance(self, amount: int = 1) -> None:
        """Say that `amount` more bytes or items are done."""

    def close(self) -> None:
        """Say that nothing more will come, whether or not the total was reached."""

    def __enter__(self) -> Self:
        """Return the job itself."""
        ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None:
        """Close the job; an exception passes through."""


class Progress(Protocol):
    """Starts jobs: called with a label, the total if it is known, and what is counted."""

    def __call__(self, label: str, total: int | None = None, unit: Unit = "items") -> Job:
        """Return a running job."""
        ...


class _SilentJob:
    """A job that nobody watches."""

    __slots__ = ()

    def advance(self, amount: int = 1) -> None:
        pass

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None:
        pass


_SILENT_JOB = _SilentJob()


def silent(label: str, total: int | None = None, unit: Unit = "items") -> Job:  # noqa: ARG001
    """Return a job that shows nothing: the `Progress` of everybody who gave none."""
    return _SILENT_JOB
