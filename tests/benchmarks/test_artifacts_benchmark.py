"""The benchmark of artifacts runs, with the peers that the tests have and without the others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench" / "artifacts.py"
FIGURES = {
    "puts", "open", "first", "batches1", "batches2", "gets", "small", "append", "delete", "memory",
    "disk",
}  # fmt: skip
LIBRARIES = {
    "LMDB": "lmdb",
    "LMDB, our kind of reader": "lmdb",
    "diskcache": "diskcache",
    "LitData": "litdata",
    "MosaicML streaming": "mosaicml-streaming",
}

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")


@pytest.mark.soak  # a dozen processes that import torch
@pytest.mark.timeout(400)
def test_the_benchmark_of_artifacts_prints_every_figure(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--json", "--rounds", "1", "--dir", str(tmp_path)]
    command += ["--samples", "70", "--entries", "2000"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    stores = printed["stores"]
    assert set(stores["smartcache"]) == FIGURES | {"new"}
    for name in ("torch.save, file each", "npz, file each", "safetensors, file each"):
        assert set(stores[name]) == FIGURES
    assert set(stores["safetensors, shards of 256"]) == FIGURES
    assert {"batches1", "batches2"} <= set(stores["memcpy"])
    left_out = [note for note in printed["notes"] if note.startswith("Left out: ")]
    for name, package in LIBRARIES.items():
        assert name in stores or any(note.endswith(f"pip install {package}") for note in left_out)
    rows = [(row["job"], row["peer"].partition(":")[0], row["aim"]) for row in printed["rows"]]
    wanted = [
        ("random batches, 1 thread", "memcpy", ">= 0.8"),
        ("random batches, 1 thread", "torch.save, file each", ">= 8"),
        ("random batches, 1 thread", "safetensors, file each", ">= 3"),
        ("random batches, 1 thread", "safetensors, shards of 256", ">= 1.5"),
        ("puts one by one", "torch.save, file each", ">= 3"),
        ("puts one by one", "safetensors, file each", ">= 2.5"),
        ("puts one by one", "raw pwritev, plain mmap", ">= 0.6"),
        ("puts of two processes into one set", "one process", "> 1"),
        ("cold random batches, 1 thread", "plain mmap, cold", ">= 4"),
        ("open, 2,000 small entries", "", "< 50 ms"),
    ]
    assert [row for row in wanted if row not in rows] == []
    assert all(row["holds"] is not None for row in printed["rows"] if row["aim"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.soak
def test_the_benchmark_of_artifacts_runs_only_what_is_asked_for(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--rounds", "1", "--dir", str(tmp_path)]
    command += ["--samples", "40", "--only", "smartcache", "--only", "memcpy"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split("|")[1].strip() for line in lines if line.startswith("| ")] == [
        "job", "random batches, 1 thread", "store", "smartcache", "memcpy",
    ]  # fmt: skip
    assert list(tmp_path.iterdir()) == []
