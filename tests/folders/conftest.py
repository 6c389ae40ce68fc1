"""A store, a folder of models on its filesystem, a second filesystem, and a clock."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from smartcache.folders import apps
from smartcache.store.store import Store
from tests.folders.trees import VARIABLES, Machine, make_machine


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "store") as store:
        yield store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the user keeps models: beside the store, on its filesystem."""
    path = tmp_path / "models"
    path.mkdir()
    return path


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A directory on another filesystem."""
    memory = Path("/dev/shm")  # noqa: S108 - the one other filesystem that every Linux has
    if not os.access(memory, os.W_OK) or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second filesystem here")
    path = Path(tempfile.mkdtemp(prefix="smartcache-test-", dir=memory))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """`pass_time(60)`: for this process it is a minute later, and every file a minute older."""
    seconds, nanoseconds = time.time, time.time_ns
    ahead = 0.0

    def advance(more: float) -> None:
        nonlocal ahead
        ahead += more

    monkeypatch.setattr(time, "time", lambda: seconds() + ahead)
    monkeypatch.setattr(time, "time_ns", lambda: nanoseconds() + int(ahead * 1e9))
    return advance


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A home with the folders of every program; nothing is discovered that lies outside of it."""
    monkeypatch.setattr(apps, "ROOT", tmp_path / "root")
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return make_machine(Path.home())
