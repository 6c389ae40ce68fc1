"""The benchmark of artifacts runs, so that it cannot rot; what it measures is no test."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench" / "artifacts.py"
QUICK = ("batches", "puts", "gets", "cold", "small", "writers", "entries")
ROWS = [
    ("first epoch of random batches, every checksum compared", "LMDB", ">= 0.6"),
    ("first epoch of random batches, every checksum compared", "LMDB, later epochs", ">= 0.6"),
    ("later epochs, new memory", "LMDB", ">= 1"),
    ("later epochs, new memory", "safetensors, file each", ">= 3"),
    ("later epochs, new memory", "torch.save, file each", ">= 8"),
    ("later epochs, reused memory", "LMDB, later epochs", ">= 1.2"),
    ("later epochs, reused memory", "memcpy", ""),
    ("puts one by one", "LMDB", ">= 0.9"),
    ("puts one by one", "safetensors, file each", ">= 2.5"),
    ("puts one by one", "torch.save, file each", ">= 3"),
    ("puts one by one", "raw pwritev", ""),
    ("puts onto 600 entries", "LMDB", ">= 0.9"),
    ("puts of two processes at once", "raw pwritev", ">= 0.8"),
    ("single gets", "LMDB", ">= 0.7"),
    ("puts of small values only", "LMDB", ">= 0.7"),
    ("gets of small values only", "LMDB", ">= 0.7"),
    ("cold random batches", "plain mmap", ">= 4"),
    ("second epoch of 600 entries of 4 KiB, per artifact", "300 entries", "<= 1.1"),
    ("put_many of 600 entries of 4 KiB", "", ""),
]

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")


def run(tmp_path: Path, *options: str) -> str:
    command = [sys.executable, str(SCRIPT), "--rounds", "1", "--dir", str(tmp_path)]
    command += ["--samples", "40", "--entries", "600", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    return done.stdout


def test_the_benchmark_of_artifacts_prints_every_row(tmp_path: Path) -> None:
    """But for opening, which starts processes that import torch."""
    printed = json.loads(run(tmp_path, "--json", *(f"--only={part}" for part in QUICK)))
    rows: list[dict[str, Any]] = printed["rows"]
    with_lmdb = find_spec("lmdb") is not None
    assert with_lmdb or "Left out: LMDB; pip install lmdb" in printed["notes"]
    wanted = [row if with_lmdb or "LMDB" not in row[1] else (row[0], "", "") for row in ROWS]
    assert [(row["job"], row["peer"].partition(":")[0], row["aim"]) for row in rows] == wanted
    assert all((row["holds"] is not None) == bool(row["aim"]) for row in rows)


@pytest.mark.soak
def test_the_benchmark_of_artifacts_measures_opening(tmp_path: Path) -> None:
    rows = json.loads(run(tmp_path, "--json", "--only", "open", "--only", "entries"))["rows"]
    jobs = [row["job"] for row in rows]
    assert "open and first sample" in jobs
    assert "open and first of 600 entries" in jobs


@pytest.mark.soak
def test_the_benchmark_of_artifacts_traces_calls(tmp_path: Path) -> None:
    lines = run(tmp_path, "--trace").splitlines()[2:]
    calls = {line.split(" | ")[0].strip("| "): line for line in lines}
    assert {"put", "get_batch of 32, first", "get_batch of 32, second"} <= calls.keys()
    assert {"get_or_compute, miss", "get_or_compute, hit"} <= calls.keys()


@pytest.mark.soak
def test_the_benchmark_of_artifacts_refuses_a_disk_without_room(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--samples", "1000000000", "--dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Give another folder with --dir, or fewer --samples and --entries." in done.stderr
