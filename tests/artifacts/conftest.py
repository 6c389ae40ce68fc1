"""Sets of artifacts in a directory of the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from smartcache.artifacts import ArtifactSet, ArtifactSets
from tests.artifacts.opening import open_set


@pytest.fixture
def sets(tmp_path: Path) -> ArtifactSets:
    return ArtifactSets(tmp_path / "sets")


@pytest.fixture
def latents(sets: ArtifactSets) -> Iterator[ArtifactSet]:
    with open_set(sets) as opened:
        yield opened
