"""What the tests of tiers share: places for them, and machines that use them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from smartcache import SmartCache
from smartcache.remote import Tier
from tests.hub.clients import Client
from tests.hub_server import Hub
from tests.remote import places


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials where obstore finds them, and none of this machine's."""
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in places.KEYS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    """A server with conditional puts and ranges."""
    with places.moto() as url:
        yield url


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with neither."""
    with places.rclone(tmp_path_factory.mktemp("rclone")) as url:
        yield url


@pytest.fixture
def nas(tmp_path: Path) -> Tier:
    """A folder that is a tier."""
    return Tier("nas", (tmp_path / "nas").as_uri()).begin()


@pytest.fixture(params=["folder", "moto", "rclone"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Tier:
    """A tier of each kind of server."""
    if request.param == "folder":
        found: Tier = request.getfixturevalue("nas")
        return found
    return places.s3_tier(request.getfixturevalue(request.param), tmp_path.name)


@pytest.fixture
def a(tmp_path: Path) -> Iterator[SmartCache]:
    """The machine that computes."""
    with SmartCache(tmp_path / "a") as cache:
        yield cache


@pytest.fixture
def b(tmp_path: Path) -> Iterator[SmartCache]:
    """The machine that reads."""
    with SmartCache(tmp_path / "b") as cache:
        yield cache


@pytest.fixture
def share(tmp_path: Path) -> Path:
    """The folder of a tier that has a name: nas."""
    return tmp_path / "share"


@pytest.fixture
def here(tmp_path: Path, hub: Hub, share: Path) -> Iterator[Client]:
    """The machine that downloads and pushes."""
    with SmartCache(tmp_path / "here" / "store") as cache:
        cache.remotes.add("nas", str(share))
        yield Client(cache, hub, tmp_path / "here" / "hf")


@pytest.fixture
def there(tmp_path: Path, hub: Hub, here: Client) -> Iterator[Client]:
    """Another machine, of the same user: the same remotes, and nothing else in common."""
    with SmartCache(tmp_path / "there" / "store") as cache:
        yield Client(cache, hub, tmp_path / "there" / "hf")


@pytest.fixture
def shared(here: Client) -> Tier:
    """The tier nas."""
    return here.smart.tier("nas")
