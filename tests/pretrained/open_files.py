"""Which files this process has open."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_DESCRIPTORS = Path("/proc/self/fd")
needs_proc = pytest.mark.skipif(not _DESCRIPTORS.exists(), reason="no /proc here")


def open_files() -> set[str]:
    """Return the paths of the regular files that are open now."""
    found = set()
    for each in os.listdir(_DESCRIPTORS):
        try:
            path = os.readlink(_DESCRIPTORS / each)
        except FileNotFoundError:  # that of the listing itself
            continue
        found.add(path)
    return {path for path in found if path.startswith("/") and Path(path).is_file()}
