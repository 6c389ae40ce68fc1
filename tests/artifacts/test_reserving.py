"""Room that is reserved behind the end of a pack comes back, also after a kill."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.api import ArtifactSet, ArtifactSets, artifacts_reserving, mount_of
from tests.artifacts.opening import array, open_set
from tests.processes.artifact_writers import in_fork

MEGABYTE = 1 << 20


@pytest.fixture(autouse=True)
def _on_ext4(tmp_path: Path) -> None:
    if mount_of(tmp_path).fstype != "ext4":
        pytest.skip("only ext4 is asked for room")


def put_some(opened: ArtifactSet, megabytes: int) -> Path:
    for number in range(megabytes):
        opened.put(f"k{number}", array(number, MEGABYTE))
    (path,) = opened.path.glob("*.pack")
    return path


def spare(path: Path) -> int:
    """Return the bytes that the file takes and does not have."""
    found = path.stat()
    return found.st_blocks * 512 - found.st_size


def test_a_large_pack_has_room_while_it_is_written(sets: ArtifactSets) -> None:
    with open_set(sets) as opened:
        path = put_some(opened, 10)
        assert MEGABYTE < spare(path) <= path.stat().st_size
    assert spare(path) < MEGABYTE // 4
    with open_set(sets) as opened:
        assert len(opened) == 10
        assert opened.verify().damaged == []


def test_a_small_pack_has_none(latents: ArtifactSet) -> None:
    assert spare(put_some(latents, 2)) < MEGABYTE // 4


@pytest.mark.parametrize("is_counted", [False, True])
def test_what_a_killed_writer_has_left_is_given_back(sets: ArtifactSets, is_counted: bool) -> None:
    def write() -> None:
        opened = open_set(sets)
        put_some(opened, 10)
        if is_counted:
            opened.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    assert os.waitpid(in_fork(write), 0)[1] == signal.SIGKILL
    with open_set(sets) as opened:
        (path,) = opened.path.glob("*.pack")
        assert spare(path) < MEGABYTE // 4
        assert len(opened) == 10


def test_a_disk_that_is_nearly_full_is_left_alone(
    sets: ArtifactSets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts_reserving, "_SPARE", 1 << 40)
    with open_set(sets) as opened:
        assert spare(put_some(opened, 10)) < MEGABYTE // 4
