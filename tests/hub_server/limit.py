"""A bandwidth limit for all connections together.

    limit = Limit(125_000_000)
    while piece := rest[: limit.slice_size]:
        limit.wait_for(len(piece))
        connection.sendall(piece)

Each connection waits for one slice at a time, in order of asking: that makes it fair. What a sleep
took too long is made up for, up to `_MAKE_UP` seconds.
"""

from __future__ import annotations

import threading
import time

_MAKE_UP = 0.02
_LEAST, _MOST = 64 * 1024, 256 * 1024


class Limit:
    """Bytes per second for everybody; None is no limit. May be changed at any time."""

    def __init__(self, rate: float | None = None) -> None:
        self.rate = rate
        self._lock = threading.Lock()
        self._free_at = 0.0

    @property
    def slice_size(self) -> int:
        """How much to send at once: some milliseconds' worth."""
        return (
            4 * 1024 * 1024 if self.rate is None else min(max(int(self.rate / 500), _LEAST), _MOST)
        )

    def wait_for(self, size: int) -> None:
        """Return when that many bytes may be sent."""
        rate = self.rate
        if rate is None:
            return
        with self._lock:
            now = time.monotonic()
            start = max(now - _MAKE_UP, self._free_at)
            self._free_at = start + size / rate
        if (pause := start - now) > 0:
            time.sleep(pause)
