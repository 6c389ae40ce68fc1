"""When an artifact is past its time."""

from __future__ import annotations

import math
import time
from datetime import timedelta

from smartcache.errors import ConfigError

_FOR_EVER = 1e11
"""Seconds, thousands of years: whatever is longer need not be a number that a date can have."""


def expiry(ttl: float | timedelta | None, longest: float | None) -> int:
    """Return when something is past its time; 0: never."""
    if ttl is None:
        if longest is None:
            return 0
        seconds = longest
    else:
        seconds = ttl.total_seconds() if isinstance(ttl, timedelta) else float(ttl)
        if not seconds > 0:
            raise ConfigError(f"A time to live must be more than 0, not {ttl!r}")
        if longest is not None:
            seconds = min(seconds, longest)
    # Times are kept in whole seconds: nothing ends before its time.
    return math.ceil(time.time() + min(seconds, _FOR_EVER))
