"""Export and import of sets killed with SIGKILL: nothing half-made is taken, the next run goes on.

At each fault point that a run reaches, the first and the last time; and a real process at a random
moment.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("fork and SIGKILL", allow_module_level=True)

from tests.api import ArtifactSets, SmartCache
from tests.api import carry_plan_export as plan_export
from tests.api import carry_plan_import as plan_import
from tests.artifacts.opening import array, open_set
from tests.cli.running import PATIENCE, Smartcache
from tests.processes.killing import die_at, in_child, points_of, was_killed

FORMS = ("safetensors", "folder", "tar")
COUNT = 5


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with open_set(ArtifactSets(tmp_path / "sets")) as latents:
        for number in range(COUNT):
            latents.put(f"key-{number}", {"x": array(number), "n": number})
    return tmp_path


def export(root: Path, form: str, name: str) -> tuple[int, int]:
    with open_set(ArtifactSets(root / "sets"), read_only=True) as latents:
        plan = plan_export(latents, root / name, form=form, shard_size=5000)  # type: ignore[arg-type]
        done = plan.execute()
    return done.artifacts, done.kept


def bring(root: Path, form: str, name: str) -> tuple[int, int]:
    done = plan_import(ArtifactSets(root / name), root / form).execute()
    return done.artifacts, done.kept


def contents(sets: Path) -> object:
    with open_set(ArtifactSets(sets), read_only=True) as opened:
        return {key: (opened.get(key)["x"].tobytes(), opened.get(key)["n"]) for key in opened}


def left_in(path: Path) -> list[str]:
    """What only a run that goes on has."""
    hidden = [each.name for each in path.rglob(".*") if each.is_file()]
    return hidden + [each.name for each in path.glob("*.partial")]


def each_moment(
    act: Callable[[Path, str, str], tuple[int, int]],
    root: Path,
    form: str,
    check: Callable[[str], None],
) -> None:
    """Kill a run at each moment; then run it to its end, and look."""

    def whole() -> None:
        act(root, form, "whole")

    moments = [
        each
        for each in points_of(whole)
        if each.place.startswith(("carry", "claim", "pack: made", "set: pack left", "compact"))
    ]
    assert moments
    for number, moment in enumerate(moments):
        name = f"try-{number}"

        def run(moment: object = moment, name: str = name) -> None:
            die_at(moment)  # type: ignore[arg-type]
            act(root, form, name)

        assert was_killed(in_child(run)), moment
        check(name)


@pytest.mark.parametrize("form", FORMS)
def test_a_killed_export_is_gone_on_with(root: Path, form: str) -> None:
    wanted = contents(root / "sets")

    def check(name: str) -> None:
        path = root / name
        if form == "tar":
            is_done = path.exists()
        elif form == "safetensors":
            is_done = (path / "index.json").exists()
        else:
            is_done = False
        if is_done:  # what has its name is whole
            assert bring(root, name, f"{name}-early") == (COUNT, 0)
        if form != "tar" or not is_done:
            written, kept = export(root, form, name)
            assert written + kept == COUNT
        assert bring(root, name, f"{name}-here") == (COUNT, 0)
        assert contents(root / f"{name}-here") == wanted
        if not is_done:
            assert not left_in(path if path.is_dir() else root)

    each_moment(export, root, form, check)


@pytest.mark.parametrize("form", FORMS)
def test_a_killed_import_is_gone_on_with(root: Path, form: str) -> None:
    export(root, form, form)
    wanted = contents(root / "sets")

    def check(name: str) -> None:
        written, kept = bring(root, form, name)
        assert written + kept == COUNT
        assert contents(root / name) == wanted
        assert not left_in(root / name)

    each_moment(bring, root, form, check)


def test_a_killed_import_of_files_is_gone_on_with(root: Path) -> None:
    import numpy as np

    (root / "files").mkdir()
    for number in range(COUNT):
        np.savez(root / f"files/{number}.npz", x=array(number))

    def act(root: Path, _: str, name: str) -> tuple[int, int]:
        sets = ArtifactSets(root / name)
        made = {"vae": "0123", "dtype": "float16"}
        done = plan_import(sets, root / "files", name="latents", fingerprint=made).execute()
        return done.artifacts, done.kept

    def check(name: str) -> None:
        written, kept = act(root, "", name)
        assert written + kept == COUNT
        with open_set(ArtifactSets(root / name)) as there:
            for number in range(COUNT):
                assert there.get(f"{number}")["x"].tobytes() == array(number).tobytes()

    each_moment(act, root, "", check)


@pytest.mark.parametrize("option", ["--safetensors", "--folder", "--tar"])
def test_a_process_killed_in_the_middle_is_gone_on_with(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without fault points: a real program, killed as soon as something is there."""
    monkeypatch.setenv("SMARTCACHE_HOME", str(tmp_path / "store"))
    with SmartCache() as cache, cache.artifacts("latents", fingerprint={}) as latents:
        for number in range(40):
            latents.put(f"key-{number}", array(number, 500_000))
    program = Smartcache(cwd=tmp_path)
    words = ["artifacts", "export", "latents", option, "out"]
    words += ["--shard-size", "2MB"] if option == "--safetensors" else []
    process = program.start(*words)
    begun = "out.partial/latents" if option == "--tar" else "out/*"
    while not list(tmp_path.glob(begun)):
        assert process.poll() is None
        time.sleep(0.002)
    process.kill()
    process.wait(PATIENCE)
    process.communicate()
    done = program(*words, "--json").json
    assert done["artifacts"] + done["kept"] == 40
    program("--home", tmp_path / "other", "artifacts", "import", "out")
    with (
        SmartCache(tmp_path / "other") as cache,
        cache.artifacts("latents", fingerprint={}) as there,
    ):
        for number in range(40):
            assert there.get(f"key-{number}").tobytes() == array(number, 500_000).tobytes()
    program.end()
