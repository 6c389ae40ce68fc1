"""One thread at a time loads.

The libraries change torch for the whole process while they load: its default dtype, the functions
that initialise weights, how modules register them. Eight threads that load pipelines at once get
weights of wrong dtypes and weights without memory, and every model made afterwards has them too.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.RLock()


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Wait until no other thread is in such a block."""
    with _lock:
        yield


def _reopen() -> None:
    """Begin with an open gate in a forked child: the thread that held it is not there."""
    global _lock  # noqa: PLW0603 - a lock cannot be opened by anybody but its owner
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reopen)
