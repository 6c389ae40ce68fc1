"""Export and import of datasets killed with SIGKILL: the same command again does the rest."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

if sys.platform != "linux":
    pytest.skip("fork and SIGKILL", allow_module_level=True)

from smartcache.cache import SmartCache
from tests.cli.computed import Made
from tests.cli.running import Here
from tests.processes.killing import Moment, fail_with, moments_of, problems_of_kills
from tests.processes.points import all_of

OURS = ("dataset", "set: begun", "set: written", "set: named", "os.")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SMARTCACHE_HOME", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)
    Made(tmp_path / "store", tmp_path / "photos").build()
    return tmp_path


def contents(path: Path, where: str | Path) -> list[tuple[str, bytes, bytes]]:
    with ExitStack() as stack:
        cache = stack.enter_context(SmartCache(path))
        dataset = stack.enter_context(cache.open_dataset(where))
        return [
            (found["name"], np.asarray(found["latent"]).tobytes(), found["text"].tobytes())
            for found in (dataset[number] for number in range(len(dataset)))
        ]


def ours(moments: list[Moment]) -> list[Moment]:
    """Leave out the points of packs, where artifacts are killed."""
    return [each for each in moments if each.place.startswith(OURS) or ": " not in each.place]


def test_a_killed_export_can_be_repeated(root: Path) -> None:
    wanted = contents(root / "store", "photos")
    sc = Here()

    def run(name: str) -> object:
        return sc("datasets", "export", "photos", name)

    def judge(name: str) -> Iterator[str]:
        if not (root / name / "photos/dataset/dataset.json").exists():
            run(name)
        if contents(root / f"{name}-reader", root / name) != wanted:
            yield "the export is not whole"
        imported = root / f"{name}-home"
        sc("--home", imported, "datasets", "import", name)
        if contents(imported, "photos") != wanted:
            yield "the import of it is not whole"

    moments = ours(moments_of(str, run))
    all_of("carry a dataset", moments)
    fail_with(problems_of_kills(moments, str, run, judge))


def test_a_killed_import_can_be_repeated(root: Path) -> None:
    wanted = contents(root / "store", "photos")
    sc = Here()
    sc("datasets", "export", "photos", "out")

    def run(name: str) -> object:
        return sc("--home", root / name, "datasets", "import", "out")

    def judge(name: str) -> Iterator[str]:
        if not (root / name / "sets/photos/dataset/dataset.json").exists():
            run(name)
        if contents(root / name, "photos") != wanted:
            yield "the import is not whole"
        left = [
            each for each in os.listdir(root / name / "sets/photos.text") if each[-4:] == ".new"
        ]
        if left:
            yield f"left: {left}"

    moments = ours(moments_of(str, run))
    all_of("carry a dataset", moments)
    fail_with(problems_of_kills(moments, str, run, judge))
