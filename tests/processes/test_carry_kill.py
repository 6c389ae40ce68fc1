"""Export and import of sets killed with SIGKILL: nothing half-made is taken, the next run goes on.

At each fault point that a run reaches, and at calls that change files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

if sys.platform != "linux":
    pytest.skip("fork and SIGKILL", allow_module_level=True)

from smartcache.artifacts import ArtifactSets, plan_export, plan_import
from tests.artifacts.opening import array, open_set
from tests.processes.killing import (
    Moment,
    fail_with,
    is_fault_point,
    moments_of,
    problems_of_kills,
)  # fmt: skip
from tests.processes.points import all_of

COUNT = 5


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with open_set(ArtifactSets(tmp_path / "sets")) as latents:
        for number in range(COUNT):
            latents.put(f"key-{number}", {"x": array(number), "n": number})
    return tmp_path


def export(root: Path, form: str, name: str) -> int:
    with open_set(ArtifactSets(root / "sets"), read_only=True) as latents:
        plan = plan_export(latents, root / name, form=form, shard_size=5000)  # type: ignore[arg-type]
        done = plan.execute()
    return done.artifacts + done.kept


def bring(source: Path, name: str, fingerprint: dict[str, str] | None = None) -> int:
    """Bring what a folder or file has into sets of that name beside it."""
    sets = ArtifactSets(source.with_name(name))
    more = {} if fingerprint is None else {"name": "latents", "fingerprint": fingerprint}
    done = plan_import(sets, source, **more).execute()  # type: ignore[arg-type]
    return done.artifacts + done.kept


def contents(sets: Path) -> dict[str, tuple[bytes, int]]:
    with open_set(ArtifactSets(sets), read_only=True) as opened:
        return {key: (opened.get(key)["x"].tobytes(), opened.get(key).get("n")) for key in opened}


def left_in(path: Path) -> list[str]:
    """What only a run that was killed has: hidden files."""
    names = [each.name for each in path.rglob(".*")]
    # A killed process may leave a copy of a description, and an empty file that it had locked.
    return [
        f"left: {name}"
        for name in names
        if not name.startswith(".set.json.") and name[-5:] != ".lock"
    ]


def read_shards(path: Path) -> dict[str, tuple[bytes, int]]:
    """What another program finds in an export as safetensors."""
    found: dict[str, tuple[bytes, int]] = {}
    for name in set(json.loads((path / "index.json").read_text())["artifacts"].values()):
        with safe_open(path / name, framework="np") as file:
            for at in range(len(file.metadata()) - 1):
                about = json.loads(file.metadata()[f"artifact:{at}"])
                tensor = file.get_tensor(f"{about['key']}/x")
                found[about["key"]] = (tensor.tobytes(), about["values"]["n"])
    return found


def of_carrying(moments: list[Moment]) -> list[Moment]:
    """Leave out the points of packs, where artifacts are killed."""
    ours = ("carry", "claim", "pack: made", "set:", "compact")
    return [each for each in moments if not is_fault_point(each) or each.place.startswith(ours)]


@pytest.mark.parametrize("form", ["safetensors", "folder"])
def test_a_killed_export_is_gone_on_with(root: Path, form: str) -> None:
    wanted = contents(root / "sets")

    def run(name: str) -> int:
        return export(root, form, name)

    def judge(name: str) -> Iterator[str]:
        path = root / name
        if (path / "index.json").exists() and read_shards(path) != wanted:
            yield "what has its name is not whole"
        if run(name) != COUNT:
            yield "the next export has not all of it"
        if form == "folder":
            if bring(path, f"{name}-here") != COUNT or contents(root / f"{name}-here") != wanted:
                yield "the export is not whole"
        elif read_shards(path) != wanted:
            yield "the export is not whole"
        yield from left_in(path)

    moments = of_carrying(moments_of(str, run))
    all_of("carry in" if form == "folder" else "carry out", moments)
    fail_with(problems_of_kills(moments, str, run, judge))


@pytest.mark.parametrize("form", ["folder", "files"])
def test_a_killed_import_is_gone_on_with(root: Path, form: str) -> None:
    made: dict[str, str] | None = None
    wanted = contents(root / "sets")
    if form == "files":
        made = {"vae": "0123", "dtype": "float16"}
        (root / form).mkdir()
        for number in range(COUNT):
            np.savez(root / form / f"{number}.npz", x=array(number))
        wanted = {f"{number}": (array(number).tobytes(), None) for number in range(COUNT)}  # type: ignore[misc]
    else:
        export(root, form, form)

    def run(name: str) -> int:
        return bring(root / form, name, made)

    def judge(name: str) -> Iterator[str]:
        if run(name) != COUNT or contents(root / name) != wanted:
            yield "the next import has not all of it"
        yield from left_in(root / name)

    moments = of_carrying(moments_of(str, run))
    all_of("carry in", moments)
    fail_with(problems_of_kills(moments, str, run, judge))
