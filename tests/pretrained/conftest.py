"""What the tests of loaded models share: the real libraries, turned to the tests' own Hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub_server import Hub
from tests.pretrained.libraries import LibraryHub, library_hub_at


@pytest.fixture
def library_hub(tmp_path: Path, hub: Hub) -> Iterator[LibraryHub]:
    """The libraries of this process ask `library_hub.hub`, and use an HF cache of this test."""
    pytest.importorskip("diffusers")
    with library_hub_at(tmp_path / "hf", hub) as library_hub:
        yield library_hub
