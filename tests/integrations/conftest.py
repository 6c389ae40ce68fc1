"""What the tests of the flag share: it is off after each, and real libraries are at hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import smartcache
from tests.hub_server import Hub
from tests.integrations.owners import Owners, import_all, owners, owning_modules
from tests.pretrained.libraries import LibraryHub, library_hub_at


@pytest.fixture(autouse=True)
def _off_again() -> Iterator[None]:
    yield
    smartcache.disable()


@pytest.fixture
def library_hub(tmp_path: Path, hub: Hub) -> Iterator[LibraryHub]:
    """The libraries of this process ask `library_hub.hub`, and use an HF cache of this test."""
    pytest.importorskip("diffusers")
    with library_hub_at(tmp_path / "hf", hub) as library_hub:
        yield library_hub


@pytest.fixture
def before() -> Owners:
    """What all classes have before anything is enabled; all their modules are loaded."""
    pytest.importorskip("diffusers")
    import_all(owning_modules())
    return owners()
