"""What the kernel counts of waiting for the disk; 0 where it does not tell."""

from __future__ import annotations

from contextlib import suppress

with suppress(ImportError):  # Windows
    import resource
_TELLS = "resource" in globals() and hasattr(resource, "RUSAGE_THREAD")


def waits() -> int:
    """Return how often this process has waited for the disk where it touched a mapping."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt if _TELLS else 0


def blocks_read() -> int:
    """Return how much this thread has asked the disk for."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_inblock if _TELLS else 0
