"""Export and import of sets killed with SIGKILL: nothing half-made is taken, the next run goes on.

At each fault point that a run reaches, and at calls that change files.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

if sys.platform != "linux":
    pytest.skip("fork and SIGKILL", allow_module_level=True)

from tests.api import ArtifactSets
from tests.api import carry_plan_export as plan_export
from tests.api import carry_plan_import as plan_import
from tests.artifacts.opening import array, open_set
from tests.processes.killing import (
    Moment,
    fail_with,
    is_fault_point,
    moments_of,
    problems_of_kills,
)  # fmt: skip
from tests.processes.points import all_of

FORMS = ("safetensors", "folder", "tar")
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
    """What only a run that goes on has: hidden files, and what is beside a tar."""
    names = [each.name for each in path.rglob(".*")] if path.is_dir() else []
    beside = (path.with_name(f".{path.name}.lock"), path.with_name(f"{path.name}.partial"))
    names += [each.name for each in beside if each.exists()]
    # A set that is killed while it writes its description leaves a copy of that.
    return [f"left: {name}" for name in names if not name.startswith(".set.json.")]


def of_carrying(moments: list[Moment]) -> list[Moment]:
    """Leave out the points of packs, where artifacts are killed."""
    ours = ("carry", "claim", "pack: made", "set: pack left", "compact")
    return [each for each in moments if not is_fault_point(each) or each.place.startswith(ours)]


@pytest.mark.parametrize("form", FORMS)
def test_a_killed_export_is_gone_on_with(root: Path, form: str) -> None:
    wanted = contents(root / "sets")

    def run(name: str) -> int:
        return export(root, form, name)

    def judge(name: str) -> Iterator[str]:
        path = root / name
        sign = {"tar": path, "safetensors": path / "index.json"}.get(form)
        is_done = sign is not None and sign.exists()
        if is_done and bring(path, f"{name}-early") != COUNT:
            yield "what has its name is not whole"
        if not (is_done and form == "tar") and run(name) != COUNT:
            yield "the next export has not all of it"
        if bring(path, f"{name}-here") != COUNT or contents(root / f"{name}-here") != wanted:
            yield "the export is not whole"
        if not is_done:
            yield from left_in(path)

    moments = of_carrying(moments_of(str, run))
    all_of("carry in" if form == "folder" else "carry out", moments)
    fail_with(problems_of_kills(moments, str, run, judge))


@pytest.mark.parametrize("form", [*FORMS, "files"])
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
    all_of("carry in a tar" if form == "tar" else "carry in", moments)
    fail_with(problems_of_kills(moments, str, run, judge))
