"""An HF cache with huggingface_hub's shared blob store, and the real client that uses it."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

MARKER = ".huggingface-shared-blobs"
PATIENCE = 120.0
has_shared_store = pytest.mark.skipif(
    tuple(map(int, version("huggingface_hub").split(".")[:2])) < (2, 4),
    reason="huggingface_hub has a shared blob store from 2.4 on",
)


def make_shared_store(cache: Path, marker: bytes = b"1\n") -> Path:
    """Make what the client makes at its first Xet download; return the directory."""
    directory = cache / "blobs"
    directory.mkdir(parents=True)
    (directory / MARKER).write_bytes(marker)
    return directory


def add_entry(cache: Path, xet: str, data: bytes) -> Path:
    """Put an entry into a shared store, as the client does."""
    path = cache / "blobs" / xet[:2] / xet
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    path.chmod(0o444)
    return path
