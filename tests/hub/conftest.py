"""What the tests of downloads share."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from smartcache.cache import SmartCache
from smartcache.store.store import Store
from tests.hub.bundles import Way, two_repos
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


@pytest.fixture
def way(tmp_path: Path, store: Store) -> Way:
    """Three repos on their way to another machine, in a bundle."""
    way = Way(tmp_path, store)
    two_repos(way.cache)
    return way


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub waits seconds between attempts; how long is not what is tested."""
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, 0.01)))
