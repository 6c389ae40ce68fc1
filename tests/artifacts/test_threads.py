"""Threads of one process, and forks: what was put is read at once, also while it is moved."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smartcache.artifacts import ArtifactSet, ArtifactSets
from smartcache.artifacts.engine import packs as artifacts_packs
from smartcache.artifacts.engine.index import open_index
from tests.artifacts.meanwhile import Meanwhile
from tests.artifacts.opening import array, check_whole, engine_of, open_set
from tests.processes.children import Child


def run_together(least: int, *works: Callable[[], None]) -> None:
    """Do each thing again and again, in a thread of its own, until each was done so often."""
    left = dict.fromkeys(range(len(works)), least)

    def repeat(number: int) -> None:
        try:
            while max(left.values()) > 0:
                works[number]()
                left[number] -= 1
        except BaseException:
            left.update(dict.fromkeys(left, 0))
            raise

    with ThreadPoolExecutor(len(works)) as pool:
        for job in [pool.submit(repeat, number) for number in range(len(works))]:
            job.result()


class TestReadYourWrites:
    def test_while_others_read_seal_and_compact(
        self, sets: ArtifactSets, rounds: Callable[[int], int]
    ) -> None:
        """Who has put a value must never again see an older one."""
        acknowledged = [0]
        with open_set(sets, pack_bytes=30_000) as opened:

            def put() -> None:
                opened.put("key", acknowledged[0] + 1)
                acknowledged[0] += 1

            def get() -> None:
                before = acknowledged[0]
                assert opened.get("key", 0) >= before

            def get_many() -> None:
                before = acknowledged[0]
                chosen = opened.select(["key", "none"])
                assert before == 0 or chosen.missing.tolist() == [1]
                len(opened)

            run_together(rounds(10), put, get, get_many, lambda: _compacted(opened))
            assert opened.get("key") == acknowledged[0]

    def test_a_child_sees_what_its_parent_puts_after_the_fork(self, sets: ArtifactSets) -> None:
        """For the child, the pack that its parent writes is that of another process."""
        with open_set(sets) as opened:
            opened.put("key", 1)
            assert opened.get("key") == 1
            has_looked, looked = os.pipe()
            has_put, put = os.pipe()

            def look() -> object:
                assert opened.get("key") == 1
                os.write(looked, b"!")
                os.read(has_put, 1)
                return opened.get("key")

            with Child(look) as child:
                os.read(has_looked, 1)
                opened.put("key", 2)
                os.write(put, b"!")
                assert child.result() == 2


class TestManyThreads:
    def test_all_that_they_put_is_there(self, sets: ArtifactSets) -> None:
        with open_set(sets, pack_bytes=100_000) as opened:

            def put(thread: int) -> None:
                for n in range(60):
                    opened.put(f"{thread} {n}", {"x": array(n % 9), "n": thread * 1000 + n})
                    if n % 3 == 0:
                        opened.delete(f"{thread} {n}")

            with ThreadPoolExecutor(6) as pool:
                list(pool.map(put, range(6)))
            assert len(opened) == 6 * 40
            for thread in range(6):
                for n in range(60):
                    value = opened.get(f"{thread} {n}")
                    assert (value is None) == (n % 3 == 0)
                    assert value is None or value["n"] == thread * 1000 + n
            check_whole(opened)

    def test_readers_find_everything_while_packs_are_compacted(
        self, sets: ArtifactSets, rounds: Callable[[int], int]
    ) -> None:
        with open_set(sets, pack_bytes=60_000) as opened:
            opened.put_many((f"k{n}", {"x": array(n), "n": n}) for n in range(20))
            keys = [f"k{n}" for n in range(20)]
            expected = [array(n) for n in range(20)]
            turn = [0]

            def churn() -> None:
                turn[0] += 1
                for n in range(8):
                    opened.put(f"dead{n}", {"x": array(100 + 8 * turn[0] + n)})
                opened.delete_many(f"dead{n}" for n in range(8))
                opened.compact(force=True)

            def read_batch() -> None:
                assert np.array_equal(opened.get_batch(keys)["x"], expected)

            chosen = opened.select(keys)

            def select() -> None:
                assert np.array_equal(
                    chosen.read([19, 0, 7])["x"], [expected[n] for n in (19, 0, 7)]
                )

            def read_one() -> None:
                sample = opened["k7"]
                assert np.array_equal(opened.get("k3")["x"], expected[3])
                assert np.array_equal(sample["x"], expected[7])  # type: ignore[arg-type]

            run_together(rounds(6), churn, read_batch, read_one, select, select)
            assert turn[0] > 1
            assert opened.stats().damaged == 0
            assert set(opened) == set(keys)

    def test_durable_puts_of_many_threads_return_when_their_pack_was_filled_by_others(
        self, sets: ArtifactSets
    ) -> None:
        with open_set(sets, pack_bytes=10_000) as opened:

            def put(thread: int) -> None:
                for n in range(12):
                    opened.put(f"{thread} {n}", {"x": array(100 * thread + n)}, durable=True)

            with ThreadPoolExecutor(6) as pool:
                list(pool.map(put, range(6)))
            assert len(opened) == 72


def test_an_index_that_is_opened_again_keeps_its_locks(tmp_path: Path) -> None:
    """POSIX frees the locks of a process when it closes any descriptor of the file."""
    other = (
        "import sqlite3, sys\n"
        "connection = sqlite3.connect(sys.argv[1], timeout=0, isolation_level=None)\n"
        "connection.execute('BEGIN IMMEDIATE')\n"
    )
    with closing(open_index(tmp_path, 1, wal=False)) as index, index.write():
        index.set_meta("x", "1")
        with ThreadPoolExecutor(1) as pool:
            again = pool.submit(open_index, tmp_path, 1, wal=False)
            wait([again], 0.1)
            done = subprocess.run(
                [sys.executable, "-c", other, index.path],
                capture_output=True,
                text=True,
                check=False,
            )
            index.execute("COMMIT")
            again.result().close()
            index.execute("BEGIN IMMEDIATE")
    assert "database is locked" in done.stderr


class TestDuringCompaction:
    def test_a_dead_tensor_that_is_put_again_is_not_lost(self, latents: ArtifactSet) -> None:
        latents.put("stays", {"x": array(1)})
        latents.put("dead", {"x": array(2)})
        latents.delete("dead")
        again = Meanwhile(lambda: latents.put("alive", {"x": array(2)}))
        assert latents.compact(force=True, progress=again).packs
        assert np.array_equal(latents.get("alive")["x"], array(2))
        check_whole(latents)

    def test_what_is_replaced_or_deleted_stays_so(self, sets: ArtifactSets) -> None:
        with open_set(sets) as opened:
            opened.put_many((f"k{n}", {"x": array(n)}) for n in range(6))
            opened.delete("k0")

            def change() -> None:
                opened.put("k1", {"x": array(50)})
                opened.delete("k2")
                opened.pin("k3")

            opened.compact(force=True, progress=Meanwhile(change))
            for is_rebuilt in (False, True):
                if is_rebuilt:
                    sets.rebuild(sets.infos()[0])
                assert set(opened) == {"k1", "k3", "k4", "k5"}
                assert np.array_equal(opened.get("k1")["x"], array(50))
                assert opened.stats().pinned == 1
                check_whole(opened)


def _compacted(opened: ArtifactSet) -> None:
    opened.compact(force=True)
    time.sleep(0.01)


class TestInTheMiddle:
    def test_what_others_put_is_found_while_a_pack_is_left(
        self, sets: ArtifactSets, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As soon as its writer lets go of a pack, another process may go on with it."""
        found: list[object] = []
        close = artifacts_packs.PackWriter.close

        def close_and_look(self: artifacts_packs.PackWriter, **options: Any) -> None:  # noqa: ANN401
            close(self, **options)
            monkeypatch.undo()
            Child(lambda: opened.put("key", 2)).result()
            found.append(opened.get("key"))

        with open_set(sets, memory="1MB") as opened:
            opened.put("key", 1)
            assert opened.get("key") == 1
            monkeypatch.setattr(artifacts_packs.PackWriter, "close", close_and_look)
            with engine_of(opened).mutex:
                engine_of(opened).leave_pack(sealed=False)
        assert found == [2]

    def test_no_old_value_is_served_while_another_thread_reads_what_is_new(
        self, sets: ArtifactSets, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        goes, go = os.pipe()
        done, tell = os.pipe()

        def put_twice() -> None:
            os.close(go)
            with open_set(sets) as theirs:
                for number in (1, 2):
                    theirs.put("key", number)
                    os.write(tell, b"x")
                    os.read(goes, 1)

        child = Child(put_twice)
        os.read(done, 1)
        with open_set(sets, memory="1MB") as opened, ThreadPoolExecutor(1) as pool:
            time.sleep(0.06)
            assert [opened.get("key") for _ in range(2)] == [1, 1]
            os.write(go, b"x")
            os.read(done, 1)
            catalog = engine_of(opened).catalog
            sort_out = catalog._sort_out  # noqa: SLF001
            jobs: list[Future[object]] = []

            def sort_out_late() -> None:
                monkeypatch.undo()
                jobs.append(pool.submit(opened.get, "key"))
                wait(jobs, 0.2)
                sort_out()

            monkeypatch.setattr(catalog, "_sort_out", sort_out_late)
            catalog.refresh()
            assert jobs[0].result() == 2
        os.write(go, b"x")
        child.result()
