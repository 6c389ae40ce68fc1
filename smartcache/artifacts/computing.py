"""Compute an artifact once, whoever asks for it, and remember what cannot be computed.

One thread of one process computes; the others wait for it and read what it has put. The kernel
frees the lease of a process that dies, and the next one computes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from smartcache.artifacts.engine import SetEngine
from smartcache.artifacts.keys import key_text
from smartcache.errors import RememberedFailureError

_LONGEST_REASON = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """When a computation that failed is tried again."""

    after: float = math.inf
    """Seconds; for ever: not before `forget_failure`."""
    most: int | None = None
    """How often it is tried at all; None: without end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A computation that failed."""

    key: str
    reason: str
    count: int
    failed_at: int
    """Unix seconds."""


def rule_of(remember: bool | float | Retry | None) -> Retry | None:  # noqa: FBT001
    """Return the rule that an argument stands for: True: never again, a number: seconds."""
    if remember is None or remember is False:
        return None
    if isinstance(remember, Retry):
        return remember
    return Retry() if remember is True else Retry(after=float(remember))


def refuse_failed(engine: SetEngine, key: bytes, rule: Retry) -> None:
    """Raise if a computation failed before and it is not time to try it again."""
    known = engine.index.failure(key)
    if known is None:
        return
    reason, count, failed_at = known
    is_spent = rule.most is not None and count >= rule.most
    if is_spent or time.time() < failed_at + rule.after:
        times = "once" if count == 1 else f"{count} times"
        message = f"Artifact {key_text(key)} of {engine.folder.name} failed {times}: {reason}"
        raise RememberedFailureError(message, key=key_text(key), reason=reason, count=count)


def attempt(
    engine: SetEngine, key: bytes, compute: Callable[[], object], rule: Retry | None
) -> object:
    """Compute; a failure is remembered if there is a rule, and reaches the caller."""
    try:
        return compute()
    except Exception as error:
        if rule is not None:
            reason = f"{type(error).__name__}: {error}"[:_LONGEST_REASON]
            engine.index.add_failure(key, reason, int(time.time()))
        raise
