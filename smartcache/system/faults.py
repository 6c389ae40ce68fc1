"""Named points between two steps of a change, where a test may stop or kill the process.

In production `hook` is None and `reached` costs one comparison. Kill tests set it to a function
that sends SIGKILL at a given point, so that every state between two steps is seen on a real disk.
"""

from __future__ import annotations

from collections.abc import Callable

hook: Callable[[str], None] | None = None


def reached(point: str) -> None:
    """Say that the process is at `point`, a name such as "put: linked"."""
    if hook is not None:
        hook(point)
