"""The cache of diffusion-pipe: what its callers do with it, and none of its losses."""

from __future__ import annotations

import os
import pickle
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from smartcache.artifacts import ArtifactSets
from smartcache.errors import ConfigError, DatasetChangedError, UnsupportedValueError
from smartcache.integrations.diffusion_pipe import Cache
from tests.processes.killing import in_child, was_killed

if TYPE_CHECKING:
    import torch  # noqa: TC004 - loaded by the fixture below

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True, scope="module")
def _torch() -> None:
    """Load torch when the first test runs, and not when they are collected."""
    global torch  # noqa: PLW0603
    import torch


def item(number: int) -> dict[str, object]:
    """Return something like what diffusion-pipe adds: tensors, None, and plain values."""
    return {
        "latents": torch.full((4, 2, 2), number, dtype=torch.bfloat16),
        "mask": None,
        "image_spec": [None, f"{number}.png"],
        "size": (number, 1.5),
    }


def test_items_come_back_exactly_and_belong_to_the_caller(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "latents", "abc", shard_size_gb=10)
    batch = torch.arange(64, dtype=torch.float32).reshape(8, 8)
    added = [item(0), {"rows": batch[3:5], "columns": batch.T[1]}, [1, "two", None]]
    for each in added:
        cache.add(each)
    cache.finalize_current_shard()
    assert len(cache) == 3
    assert cache[0].keys() == item(0).keys()
    assert cache[0]["latents"].dtype is torch.bfloat16
    assert torch.equal(cache[0]["latents"], torch.zeros((4, 2, 2), dtype=torch.bfloat16))
    assert cache[0]["mask"] is None
    assert cache[0]["size"] == (0, 1.5)
    assert torch.equal(cache[1]["rows"], batch[3:5])
    assert torch.equal(cache[1]["columns"], batch.T[1])
    assert cache[-1] == added[2]
    cache[1]["rows"].zero_()
    assert torch.equal(cache[1]["rows"], batch[3:5])


def test_an_index_behind_the_end_is_an_index_error(tmp_path: Path) -> None:
    cache = Cache(tmp_path, "abc")
    cache.add(item(0))
    with pytest.raises(IndexError):
        cache[1]
    assert [each["size"][0] for each in cache] == [0]  # type: ignore[attr-defined]


def test_a_kill_loses_nothing_that_was_added(tmp_path: Path) -> None:
    def add_and_die() -> None:
        cache = Cache(tmp_path, "abc", shard_size_gb=10)
        for number in range(7):
            cache.add(item(number))
        os.kill(os.getpid(), signal.SIGKILL)

    assert was_killed(in_child(add_and_die))
    cache = Cache(tmp_path, "abc", shard_size_gb=10)
    assert len(cache) == 7
    cache.add(item(7))
    assert [cache[number]["size"][0] for number in range(8)] == list(range(8))


def test_another_fingerprint_is_another_list_and_deletes_nothing(tmp_path: Path) -> None:
    theirs = tmp_path / "shard_0.bin"
    theirs.write_bytes(b"of diffusion-pipe itself")
    with_old = Cache(tmp_path, "old")
    with_old.add(item(1))
    with_old.finalize_current_shard()
    with_new = Cache(tmp_path, "new")
    assert len(with_new) == 0
    with_new.add(item(2))
    with_new.finalize_current_shard()
    with_new.clear()
    assert len(with_new) == len(Cache(tmp_path, "new")) == 0
    again = Cache(tmp_path, "old")
    assert len(again) == 1
    assert again[0]["size"] == (1, 1.5)
    assert theirs.read_bytes() == b"of diffusion-pipe itself"


def test_after_clear_items_are_new_ones(tmp_path: Path) -> None:
    cache = Cache(tmp_path, "abc")
    for number in range(3):
        cache.add(item(number))
    cache.clear()
    assert len(cache) == 0
    with pytest.raises(IndexError):
        cache[0]
    cache.add(item(9))
    assert Cache(tmp_path, "abc")[0]["size"] == (9, 1.5)
    assert len(Cache(tmp_path, "abc")) == 1


def test_a_gap_that_damage_has_left_ends_the_list(tmp_path: Path) -> None:
    """The trainer goes on from there, as it does after a kill: no other item moves up."""
    cache = Cache(tmp_path, "abc")
    for number in range(4):
        cache.add(item(number))
    with ArtifactSets(tmp_path).open("items", {"fingerprint": "abc"}) as opened:
        opened.delete("000000000001")
    with pytest.raises(OSError, match="Item 1 "):
        cache[1]
    cache.finalize_current_shard()
    again = Cache(tmp_path, "abc")
    assert len(again) == 1
    again.add(item(1))
    assert [again[number]["size"][0] for number in range(2)] == [0, 1]
    assert len(Cache(tmp_path, "abc")) == 4


def test_only_one_process_adds(tmp_path: Path) -> None:
    other = Cache(tmp_path, "abc")
    late = Cache(tmp_path, "abc")

    def add() -> None:
        mine = Cache(tmp_path, "abc")
        with pytest.raises(DatasetChangedError, match="adds to it"):
            mine.add(item(5))

    other.add(item(0))
    assert in_child(add) == 0
    other.finalize_current_shard()
    with pytest.raises(DatasetChangedError, match="has added"):
        late.add(item(5))
    assert len(Cache(tmp_path, "abc")) == 1


def test_it_travels_to_another_process(tmp_path: Path) -> None:
    cache = Cache(tmp_path, "abc")
    cache.add(item(3))
    again = pickle.loads(pickle.dumps(cache))  # noqa: S301 - as DataLoader does
    assert len(again) == 1
    assert again.fingerprint == "abc"
    assert torch.equal(again[0]["latents"], cache[0]["latents"])


def test_what_only_pickle_could_keep_is_refused(tmp_path: Path) -> None:
    cache = Cache(tmp_path, "abc")
    with pytest.raises(UnsupportedValueError, match="hook"):
        cache.add({"hook": object()})
    assert len(cache) == 0
    with pytest.raises(ConfigError):
        Cache(tmp_path, 7)  # type: ignore[arg-type]
