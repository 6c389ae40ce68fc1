"""A home, a folder of models beside it, and the program: in this process or as a real one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from smartcache.folders import discover as apps
from tests.cli.running import Here, Smartcache
from tests.folders.trees import VARIABLES, Machine, make_machine
from tests.store.files import OTHER, WEIGHTS, write


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the store is, or will be: on the filesystem of the models."""
    path = tmp_path / "store"
    monkeypatch.setenv("SMARTCACHE_HOME", str(path))
    return path


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Two files with the same bytes, one with others, in a folder of the user's."""
    folder = tmp_path / "models"
    write(folder / "a.safetensors", WEIGHTS)
    write(folder / "b.safetensors", WEIGHTS)
    write(folder / "sub" / "c.gguf", OTHER)
    return folder


@pytest.fixture
def machine(own_places: None) -> Machine:
    """A home with the folders of every program, and many duplicates in them."""
    return make_machine(Path.home())


@pytest.fixture
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is discovered that lies outside the home of the test."""
    monkeypatch.setattr(apps, "ROOT", tmp_path / "root")
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def sc(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Here:
    """The program, run in this process."""
    monkeypatch.chdir(tmp_path)
    return Here()


@pytest.fixture
def program(home: Path, tmp_path: Path) -> Iterator[Smartcache]:
    """The program as a process of its own, forked warm, that does not outlive the test."""
    program = Smartcache(cwd=tmp_path)
    yield program
    program.end()
