"""Sets in forked and spawned processes: what was put before is seen, and all write on."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smartcache.artifacts import ArtifactSet, ArtifactSets, Handle, Sample
from smartcache.errors import ArtifactGoneError, ArtifactNotFoundError
from tests.artifacts.opening import array, engine_of, open_set
from tests.processes.artifact_writers import SMALL_PACK, change, number_in, value_of, wait_for
from tests.processes.children import Child


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "sets"


# forks


def test_a_fork_while_another_thread_writes(root: Path) -> None:
    """The child sees all that was put before the fork, and both write on."""
    stop = threading.Event()
    last = [0]
    with open_set(ArtifactSets(root), pack_bytes=SMALL_PACK) as opened:

        def write() -> None:
            while not stop.is_set():
                number = last[0] + 1
                change(opened, f"parent {number}", number)
                last[0] = number

        writing = threading.Thread(target=write)
        writing.start()
        try:
            for turn in range(8):
                with Child(partial(_in_child, opened, turn, last[0])) as child:
                    child.result()
                key = f"child {turn}"
                assert number_in(key, opened.get(key)) == turn + 1
        finally:
            stop.set()
            writing.join()
        for number in range(1, last[0] + 1):
            key = f"parent {number}"
            assert number_in(key, opened.get(key)) == number
        assert not opened.verify().damage


def _in_child(opened: ArtifactSet, turn: int, before: int) -> None:
    for number in range(max(1, before - 200), before + 1):
        key = f"parent {number}"
        assert number_in(key, opened.get(key)) == number
    key = f"child {turn}"
    opened.put(key, value_of(key, turn + 1))
    assert number_in(key, opened.get(key)) == turn + 1
    assert not engine_of(opened).readers
    opened.flush()


def test_a_fork_that_ctrl_c_interrupts_leaves_both_processes_able_to_write(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python goes on with the fork: the child must not write to the pack of its parent."""
    told: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    with open_set(ArtifactSets(root)) as opened:
        change(opened, "before", 1)
        gate = engine_of(opened).catalog.gate
        is_held, is_over = threading.Event(), threading.Event()

        def hold() -> None:
            with gate:
                is_held.set()
                is_over.wait(30)

        holding = threading.Thread(target=hold)
        holding.start()
        is_held.wait(30)
        me = threading.get_ident()
        interrupt = threading.Timer(0.2, signal.pthread_kill, [me, signal.SIGINT])
        interrupt.start()
        pid = os.fork()
        if not pid:
            with suppress(BaseException):
                change(opened, "child", 2)
                os._exit(0)
            os._exit(1)
        is_over.set()
        for thread in (holding, interrupt):
            thread.join()
        assert os.waitpid(pid, 0)[1] == 0
        assert len(told) == 1  # else the fork was not interrupted
        writing = threading.Thread(target=change, args=(opened, "parent", 3), daemon=True)
        writing.start()
        writing.join(10)
        assert not writing.is_alive()
        found = [number_in(key, opened.get(key)) for key in ("before", "child", "parent")]
        assert found == [1, 2, 3]
        assert not opened.verify().damage


def test_a_child_knows_what_another_process_changed_around_the_fork(root: Path) -> None:
    """A connection made after the fork must not trust what the one before it had seen."""
    with open_set(ArtifactSets(root)) as opened:
        change(opened, "k", 1)
        assert number_in("k", opened.get("k")) == 1
        for number in range(2, 6):

            def replace(number: int = number) -> None:
                with open_set(ArtifactSets(root)) as inherited:
                    change(inherited, "k", number)

            with Child(replace) as child:
                child.result()
            assert number_in("k", opened.get("k")) == number

            def read() -> int:
                return number_in("k", opened.get("k"))

            with Child(read) as reader:
                assert reader.result() == number


def test_forks_writes_and_collected_sets_do_not_wait_for_each_other(root: Path) -> None:
    """Sets that the collector finds are let go of in whatever thread it runs."""
    sets = ArtifactSets(root)
    stop = threading.Event()
    failures: list[BaseException] = []

    def write(opened: ArtifactSet) -> None:
        number = 0
        try:
            while not stop.is_set():
                number += 1
                opened.put(f"k{number % 5}", {"n": number})
                cycle: list[object] = [open_set(sets, f"other-{number % 3}")]
                cycle.append(cycle)
                del cycle
                gc.collect(0)
        except BaseException as error:
            failures.append(error)
            raise

    with open_set(sets) as opened:
        threads = [threading.Thread(target=write, args=(opened,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(15):
                with Child(lambda: opened.get("k1") is not None) as child:
                    child.result()
        finally:
            stop.set()
            for thread in threads:
                thread.join(20)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)


# what is read by pickled samples


class Samples:
    """A dataset as people write it: samples or handles that were pickled into the workers."""

    def __init__(self, items: Sequence[Sample | Handle | tuple[ArtifactSets, str]]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401
        item = self.items[index]
        if isinstance(item, Handle):
            return item.tensor()
        if isinstance(item, Sample):
            return item["t"]
        sets, key = item
        with open_set(sets) as opened:
            return opened.get_batch([key, key])["t"][1]


@pytest.mark.torch
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_data_loader_workers_read_pickled_samples(root: Path, method: str) -> None:
    import torch

    sets = ArtifactSets(root)
    with open_set(sets) as opened:
        for number in range(12):
            opened.put(f"k{number}", {"t": torch.full((600,), number), "n": number})
        items: list[Any] = [opened[f"k{number}"] for number in range(4)]
        items += [opened[f"k{number}"].handle("t") for number in range(4, 8)]
        items += [(sets, f"k{number}") for number in range(8, 12)]
        loader = torch.utils.data.DataLoader[Any](
            Samples(items),  # type: ignore[arg-type]
            batch_size=3,
            num_workers=2 if method == "fork" else 1,  # an interpreter is slow to start
            multiprocessing_context=method,
        )
        for _ in range(2 if method == "fork" else 1):
            rows = [int(row[0]) for batch in loader for row in batch]
            assert rows == list(range(12))
        opened.put("k0", {"t": torch.zeros(600)})
    with pytest.raises(ArtifactGoneError):
        pickle.loads(pickle.dumps(items[0]))["t"]  # noqa: S301 - our own


def test_an_open_sample_outlives_compaction_and_eviction_by_others(root: Path) -> None:
    go = root.parent / "go"

    def change_everything() -> None:
        wait_for(go)
        with open_set(ArtifactSets(root), pack_bytes=SMALL_PACK, max_size=40_000) as other:
            for number in range(0, 30, 2):
                other.delete(f"k{number}")
            other.compact(force=True)
            other.evict()
            other.put("new", {"t": array(99, 3000)})
            other.compact(force=True)
            assert other.stats().live <= 40_000

    with (
        Child(change_everything) as child,
        open_set(ArtifactSets(root), pack_bytes=SMALL_PACK) as opened,
    ):
        for number in range(30):
            opened.put(f"k{number}", {"t": array(number, 3000), "n": number})
        opened.flush()
        samples = [opened[f"k{number}"] for number in range(30)]
        views = {number: samples[number].handle("t").numpy() for number in range(0, 30, 3)}
        go.touch()
        child.result()
        for number, sample in enumerate(samples):
            assert sample["n"] == number
            assert np.array_equal(np.asarray(sample["t"]), array(number, 3000))
        for number, view in views.items():
            assert np.array_equal(view, array(number, 3000))
        left = sorted(opened)
        assert "k0" not in left
        assert "new" in left
        assert {key: opened.get(key)["n"] for key in left if key != "new"} == {
            key: int(key[1:]) for key in left if key != "new"
        }
        with pytest.raises(ArtifactNotFoundError):
            opened.get_batch(["k0"])


def test_a_worker_process_that_ends_has_its_rows_written(root: Path) -> None:
    """Workers of multiprocessing end without `atexit`, sooner than rows are written."""
    with open_set(ArtifactSets(root)) as opened:
        worker = multiprocessing.get_context("fork").Process(target=_put_and_end, args=(opened,))
        worker.start()
        worker.join()
        assert number_in("k", opened.get("k")) == 1


def _put_and_end(opened: ArtifactSet) -> None:
    change(opened, "k", 1)
