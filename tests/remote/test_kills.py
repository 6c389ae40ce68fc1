"""A push or pull that is killed loses nothing, and the next one goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("fork and SIGKILL", allow_module_level=True)


@pytest.mark.parametrize("what", ["push", "pull"])
def test_what_is_killed_at_any_moment_loses_nothing_and_goes_on(
    what: str, tmp_path: Path, soak: bool
) -> None:
    words = [sys.executable, "-m", "tests.remote.kills", what, str(tmp_path)]
    done = subprocess.run(
        words + ["--soak"] * soak,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
