"""Something that happens in the middle of a long job: as its progress bar."""

from __future__ import annotations

from collections.abc import Callable

from smartcache.progress import Job, Unit


class Meanwhile(Job):
    """A `Progress`; what it was given is done, once, when the job first tells of an advance."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._acts = [act]

    def __call__(self, label: str, total: int | None = None, unit: Unit = "items") -> Job:  # noqa: ARG002
        return self

    def advance(self, amount: int = 1) -> None:
        if amount >= 0 and self._acts:
            self._acts.pop()()
