"""Two machines that have nothing in common but a Hub and a tier."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api import SmartCache, Tier
from tests.hub.clients import Client
from tests.hub_server import Hub


@pytest.fixture
def nas(tmp_path: Path) -> Path:
    """The folder of the tier."""
    return tmp_path / "nas"


@pytest.fixture
def a(tmp_path: Path, hub: Hub, nas: Path) -> Iterator[Client]:
    """The machine that pushes; the remote has a name already."""
    with SmartCache(tmp_path / "a" / "store") as smart:
        smart.remotes.add("nas", str(nas))
        yield Client(smart, hub, tmp_path / "a" / "hf")


@pytest.fixture
def b(tmp_path: Path, hub: Hub, a: Client) -> Iterator[Client]:
    """Another machine, with the same remotes."""
    with SmartCache(tmp_path / "b" / "store") as smart:
        yield Client(smart, hub, tmp_path / "b" / "hf")


@pytest.fixture
def tier(a: Client) -> Tier:
    return a.smart.tier("nas")
