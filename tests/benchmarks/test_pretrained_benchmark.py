"""The benchmark of pipelines runs, and what it says about requests and bytes is so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hub_server.pipelines import Models

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench" / "pretrained.py"


@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")
def test_the_benchmark_of_pipelines_prints_every_figure_and_fetches_no_known_weight(
    tmp_path: Path, models: Models
) -> None:
    command = [sys.executable, str(SCRIPT), "--json", "--small", "--folder", str(tmp_path)]
    command += ["--tiny", str(models.first.parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    rows = {row["job"].removeprefix("tiny: "): row for row in printed["rows"]}
    assert "MB of weights" in rows["first load from the Hub, all new, no limit"]["ours"]
    assert rows["second pipeline from the Hub, no limit"]["holds"] is True
    cached = [row for job, row in rows.items() if "cached" in job]
    beside = [job for job in rows if "share=True, against its new weights alone" in job]
    memory = [job for job in rows if job.startswith("memory")]
    assert (len(cached), len(beside), len(memory)) == (6, 3, 2)
    assert not [row for row in cached if "MB of weights" in row["ours"]]
    assert not [note for note in printed["notes"] if "not proven" in note]
    assert list(tmp_path.iterdir()) == []
