"""A machine with the folders of every program."""

from __future__ import annotations

from pathlib import Path

import pytest

from smartcache.folders import discover as apps
from tests.folders.trees import VARIABLES, Machine, make_machine


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A home with the folders of every program; nothing is discovered that lies outside of it."""
    monkeypatch.setattr(apps, "ROOT", tmp_path / "root")
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return make_machine(Path.home())
