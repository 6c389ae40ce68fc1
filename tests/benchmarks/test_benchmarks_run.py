"""The benchmark scripts run, so that they cannot rot; what they measure is no test."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "bench"


@pytest.mark.soak
def test_the_store_benchmark_prints_every_figure(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "store.py"), "--json", "--rounds", "1"]
    done = subprocess.run(
        [*command, "--scale", "0.001", "--folder", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    jobs = [row["job"] for row in json.loads(done.stdout)["rows"]]
    wanted = ("hash", "adopt", "replace", "place", "put", "open", "df", "memory", "import")
    assert all(any(job.startswith(word) for job in jobs) for word in wanted), jobs
    assert list(tmp_path.iterdir()) == []


@pytest.mark.soak
def test_the_dedup_benchmark_prints_every_figure_and_finds_what_there_is(tmp_path: Path) -> None:
    """Peers that are not installed are left out; we are measured anyway."""
    command = [sys.executable, str(SCRIPTS / "dedup.py"), "--json", "--rounds", "1"]
    done = subprocess.run(
        [*command, "--scale", "0.002", "--folder", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    jobs = [row["job"] for row in printed["rows"]]
    wanted = (
        "find duplicates, first time",
        "find again, nothing changed",
        "find again, one file changed",
        "link duplicates, nothing known before",
        "link duplicates, after a scan",
        "scan 20 files beside 2,000 sightings",
        "find the duplicates among 2,000 sightings",
    )
    assert all(job in jobs for job in wanted), jobs
    assert not [note for note in printed["notes"] if note.startswith("smartcache finds")]
    assert list(tmp_path.iterdir()) == []


def test_the_dedup_benchmark_uses_a_kept_tree_again_and_refuses_another(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "dedup.py"), "--child", "make", "--files", "20"]
    command += ["--folder", str(tmp_path / "tree")]
    made = subprocess.run([*command, "--size", "90000"], capture_output=True, text=True, check=True)
    again = subprocess.run(
        [*command, "--size", "90000"], capture_output=True, text=True, check=True
    )
    assert json.loads(again.stdout) == json.loads(made.stdout)
    other = subprocess.run(
        [*command, "--size", "80000"], capture_output=True, text=True, check=False
    )
    assert "was made with other arguments" in other.stderr


@pytest.mark.soak
def test_the_hub_benchmark_prints_every_figure_and_fetches_no_known_weight(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "hub.py"), "--json", "--small"]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    rows = {row["job"]: row for row in printed["rows"]}
    new = [job for job in rows if job.startswith("all new")]
    free = [job for job in rows if job.startswith(("another repo", "all in a ComfyUI folder"))]
    assert (len(new), len(free)) == (2, 3)
    assert all("MB of weights" in rows[job]["ours"] for job in new)
    assert all("MB of weights" not in rows[job]["ours"] for job in free)
    assert all("MB of weights" in rows[job]["peer"] for job in free)
    again = [row for job, row in rows.items() if job.startswith("repeated call")]
    assert len(again) == 5
    assert all("s, 1 request" in row["ours"] for row in again)
    assert {"plan 60 small files (huggingface_hub: dry run)", "download 60 small files"} < set(rows)
    assert not [note for note in printed["notes"] if "not proven" in note]
    assert list(tmp_path.iterdir()) == []


def test_the_startup_benchmark_prints_every_command_it_was_asked_for() -> None:
    command = [sys.executable, str(SCRIPTS / "startup.py"), "--runs", "1", "df", "hub ls"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert [line.split(" -h")[0] for line in lines[1:]] == ["smartcache df", "smartcache hub ls"]
    assert "import click" in lines[0]


def run_datasets(tmp_path: Path, *options: str) -> list[dict[str, str | bool | None]]:
    """Run the benchmark of datasets with very few sources; it leaves nothing behind."""
    command = [sys.executable, str(SCRIPTS / "datasets.py"), "--json", "--dir", str(tmp_path)]
    command += ["--rows", "300", "--rounds", "1", "--wait", "0", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    rows: list[dict[str, str | bool | None]] = json.loads(done.stdout)["rows"]
    assert all((row["holds"] is None) == (row["aim"] == "") for row in rows)
    return rows


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux")
def test_the_datasets_benchmark_measures_all_sides(tmp_path: Path) -> None:
    """Every child process ends the script if it did not encode exactly what it should."""
    parts = ("--only=cold", "--only=unchanged", "--only=table")
    rows = run_datasets(tmp_path, "--sizes", "20", *parts)
    assert [(row["job"], str(row["peer"]).partition(":")[0]) for row in rows] == [
        ("look, hash and encode 20", "JSON index"),
        ("look, hash and encode 20 with captions", ""),
        ("unchanged start, 20", "scandir + stat"),
        ("unchanged start, 20", "JSON index"),
        ("unchanged start, 20", "npz per item"),
        ("unchanged start, 20 with captions", "scandir + stat"),
        ("unchanged start, 20, the whole process", ""),
        ("the table alone, 300 rows: write", ""),
        ("the table alone, 300 rows: load", ""),
        ("the table alone, 300 rows: memory per row; peak", ""),
    ]


@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux")
def test_the_datasets_benchmark_prints_every_figure(tmp_path: Path) -> None:
    rows = run_datasets(tmp_path, "--sizes", "20", "40")
    jobs = [str(row["job"]) for row in rows]
    changes = ("one file touched", "one file edited", "one caption edited", "one file added")
    wanted = (*changes, "next epoch", "memory per item", "the table alone")
    assert all(any(job.startswith(word) for job in jobs) for word in wanted), jobs
    assert [job for job in jobs if job.endswith(": 40 against 20")] == [
        f"{word}: 40 against 20"
        for word in ("cold", "unchanged", "one file touched", "one file edited", "one file added")
    ]


@pytest.mark.soak
def test_the_datasets_benchmark_refuses_a_disk_without_room(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "datasets.py"), "--dir", str(tmp_path)]
    done = subprocess.run(
        [*command, "--sizes", "1000000000000"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "Give another folder with --dir, or smaller --sizes and --rows." in done.stderr


def test_the_batches_benchmark_measures_all_sides() -> None:
    command = [sys.executable, str(SCRIPTS / "batches.py"), "--json", "--rounds", "1"]
    command += ["--samples", "64", "--items", "2000", "--steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout[done.stdout.index("{\n") :])["rows"]
    assert [row["job"].partition(":")[0] for row in rows[:4]] == [
        "plan an epoch of 2,000 items in 40 buckets", "memory of that plan", "overlap", "overlap",
    ]  # fmt: skip
    peers = [row["peer"] for row in rows[4:]]
    assert any(peer.startswith("torch DataLoader, 2 workers") for peer in peers)
    assert peers[-1].startswith("get_batch alone")


@pytest.mark.torch
def test_the_layers_benchmark_measures_all_sides() -> None:
    command = [sys.executable, str(SCRIPTS / "layers.py"), "--json", "--rounds", "1"]
    command += ["--lists", "8", "--arrays", "8"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    jobs = [row["job"] for row in printed["rows"]]
    acts = ("put", "hit on disk", "hit in memory", "get_or_compute, missing")
    for what in ("4 KB token lists", "256 KiB arrays"):
        assert all(f"{what}: {act}" in jobs for act in acts)
    assert sum(job.startswith("256 KiB of token ids, ") for job in jobs) == 6
    assert all((row["holds"] is None) == (row["aim"] == "") for row in printed["rows"])
    assert any("pickle files" in row["peer"] for row in printed["rows"])
    for name in ("diskcache", "cachetools"):
        is_here = any(name in row["peer"] for row in printed["rows"])
        assert is_here or f"Left out: {name}; pip install {name}" in printed["notes"]


@pytest.mark.soak
@pytest.mark.torch
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_the_benchmark_of_drop_ins_measures_all_parts(tmp_path: Path) -> None:
    """Both sides end the script if they did not encode exactly what they should."""
    command = [sys.executable, str(SCRIPTS / "dropins.py"), "--json", "--dir", str(tmp_path)]
    command += ["--count", "20", "--megabytes", "2", "--rounds", "1", "--wait", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["rows"]
    assert sum(row["job"].startswith("ComfyUI: ") for row in found) >= 9
    rows = [row for row in found if row["job"].startswith("mgds")]
    wanted = [
        "first start", "unchanged start", "start after one edit", "next epoch",
        "random items a second", "the same items again", "memory per item",
    ]  # fmt: skip
    assert [row["job"] for row in rows] == [f"mgds, 20 items: {job}" for job in wanted]
    assert all(str(row["peer"]).startswith("file per item: ") for row in rows)
    assert list(tmp_path.iterdir()) == []


def test_the_benchmark_of_tiers_prints_every_figure(tmp_path: Path) -> None:
    """But for Ray and the server, which take long."""
    pytest.importorskip("obstore")
    if not (Path(sys.executable).parent / "rclone").exists() and shutil.which("rclone") is None:
        pytest.skip("rclone is not installed")
    command = [sys.executable, str(SCRIPTS / "remote.py"), "--json", "--rounds", "1"]
    command += ["--megabytes", "66", "--small", "2", "--items", "8", "--dir", str(tmp_path)]
    command += ["--only", "folder", "--only", "processes"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [(row["job"].partition(":")[0], row["peer"].partition(":")[0]) for row in rows] == [
        (job, peer)
        for job in ("push to a folder", "pull from a folder")
        for peer in ("obstore", "rclone copy")
    ] + [("encode 8 items of 5 ms, ProcessEngine(workers=2)", "one process")]
    assert list(tmp_path.iterdir()) == []
