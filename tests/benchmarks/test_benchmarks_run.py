"""The benchmark scripts run, so that they cannot rot; what they measure is no test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "bench"


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
