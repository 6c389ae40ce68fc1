"""A second filesystem, for what links cannot reach."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A directory on another filesystem."""
    memory = Path("/dev/shm")  # noqa: S108 - the one other filesystem that every Linux has
    if not os.access(memory, os.W_OK) or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second filesystem here")
    path = Path(tempfile.mkdtemp(prefix="smartcache-test-", dir=memory))
    yield path
    shutil.rmtree(path)
