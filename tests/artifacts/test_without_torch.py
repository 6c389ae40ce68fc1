"""Everything works where torch is not installed; tensors of torch are told, not guessed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from smartcache.artifacts import ArtifactSets
from tests.artifacts.opening import open_set

BLOCK = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
"""
USE = """
from pathlib import Path
import numpy as np
from smartcache.artifacts import ArtifactSets

sets = ArtifactSets(Path(sys.argv[1]))
with sets.open("numpy", {"n": 1}) as opened:
    x = np.arange(3000.0).reshape(3, 1000)
    opened.put("a", {"x": x, "s": [1, None, "text"], "small": np.ones(3)}, metadata={"m": (1, 2)})
    opened.put("b", {"x": x + 1, "s": [], "small": np.zeros(3)})
    assert np.array_equal(opened.get("a")["x"], x)
    batch = opened.get_batch(["b", "a"])
    assert np.array_equal(batch["x"], [x + 1, x])
    assert np.array_equal(opened["a"].handle("x").numpy(), x)
    assert opened.get_or_compute("c", lambda: {"y": x})["y"].shape == (3, 1000)
    opened.delete("b")
    opened.compact(force=True)
    assert opened.metadata("a") == {"m": (1, 2)}
    assert not opened.verify().damage
assert "torch" not in sys.modules
"""
READ = """
from pathlib import Path
from smartcache.artifacts import ArtifactSets

with ArtifactSets(Path(sys.argv[1])).open("latents", {"vae": "0123", "dtype": "float16"}) as opened:
    sample = opened["key"]
    print(sample.handle("x").shape, sample["n"], opened.metadata("key"))
    print(sample.handle("x").numpy()[:3])
    try:
        sample["x"]
    except Exception as error:
        print(type(error).__name__, error)
    print("key" in opened, bool(opened.verify().damage))
"""


def run(program: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", BLOCK + program, *arguments],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_everything_works_with_numpy_alone(tmp_path: Path) -> None:
    run(USE, str(tmp_path / "sets"))


def test_tensors_of_torch_are_told_and_not_taken_for_damaged(sets: ArtifactSets) -> None:
    import torch

    with open_set(sets) as opened:
        opened.put("key", {"x": torch.arange(1000), "n": 5}, metadata="about")
    lines = run(READ, str(sets.root)).splitlines()
    assert lines[0] == "(1000,) 5 about"
    assert lines[1] == "[0 1 2]"
    assert "torch" in lines[2]
    assert lines[3] == "True False"


def test_importing_artifacts_imports_neither_torch_nor_numpy() -> None:
    run("import smartcache.artifacts; assert not {'torch', 'numpy'} & sys.modules.keys()")


@pytest.mark.parametrize("name", ["torch", "numpy"])
def test_values_come_back_of_the_library_they_were_of(sets: ArtifactSets, name: str) -> None:
    import torch

    with open_set(sets) as opened:
        tensor = torch.arange(1000)
        opened.put("key", tensor if name == "torch" else tensor.numpy())
        assert type(opened.get("key")).__module__.partition(".")[0] == name
