"""Commands that are killed from outside, at any moment: see `tests.processes.random_kills`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import pytest

if sys.platform != "linux":
    pytest.skip("fork and SIGKILL", allow_module_level=True)

from tests.processes.children import NOBODY, Child, folder_of
from tests.processes.random_kills import kill_at_random

ROUNDS = 20


@pytest.mark.parametrize("user", [None, NOBODY] if os.geteuid() == 0 else [None])
def test_nothing_is_lost_by_commands_killed_at_any_time(
    user: int | None, rounds: Callable[[int], int]
) -> None:
    with folder_of(user) as folder:
        work = lambda: kill_at_random(folder / "world", rounds(ROUNDS))  # noqa: E731
        with Child(work, user=user) as child:
            counts = child.result()
    assert sum(counts.values()) >= ROUNDS
