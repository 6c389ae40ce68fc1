"""What the tests of downloads share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api import SmartCache
from tests.hub.clients import Client
from tests.hub_server import Hub


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """An HF cache that does not exist yet, on the filesystem of the store."""
    return tmp_path / "hf"


@pytest.fixture
def client(tmp_path: Path, hub: Hub, cache: Path) -> Iterator[Client]:
    """A smartcache with an empty store that downloads to `cache`."""
    with SmartCache(tmp_path / "store") as smart:
        yield Client(smart, hub, cache)
