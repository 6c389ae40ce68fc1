"""Gone after a time without use; a clock for tests; sweeping."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smartcache.artifacts import ArtifactSet, ArtifactSets
from smartcache.errors import ConfigError
from tests.artifacts.opening import array, check_whole, engine_of, open_set, size_of
from tests.artifacts.peer import Clock
from tests.processes.children import Child


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sets(tmp_path: Path, clock: Clock) -> ArtifactSets:
    return ArtifactSets(tmp_path / "sets", clock=clock)


@pytest.mark.parametrize("memory", [None, "1MB"])
class TestUnused:
    def test_it_is_gone_when_it_was_not_used_for_so_long(
        self, sets: ArtifactSets, clock: Clock, memory: str | None
    ) -> None:
        with open_set(sets, unused_for=100, memory=memory) as opened:
            opened.put("unused", 1)
            opened.put("used", 2)
            opened.put("pinned", 3)
            opened.pin("pinned")
            for _ in range(6):
                clock.now += 50
                assert opened.get("used") == 2
            assert opened.get("unused") is None
            assert "unused" not in opened
            assert opened.select(["unused", "used"]).missing.tolist() == [0]
            assert opened.get("pinned") == 3
            assert sorted(opened) == ["pinned", "used"]
            assert len(opened) == 2
            clock.now += 112
            assert opened.get("used") is None
            assert opened.get_with_metadata("used") is None
            assert list(opened) == ["pinned"]

    def test_every_way_of_reading_is_a_use(
        self, sets: ArtifactSets, clock: Clock, memory: str | None
    ) -> None:
        with open_set(sets, unused_for=100, memory=memory) as opened:
            keys = [f"k{n}" for n in range(6)]
            for n, key in enumerate(keys):
                opened.put(key, {"x": array(n), "n": n})
            opened.put("idle", 1)
            ways: list[Callable[[], object]] = [
                lambda: opened.get(keys[0]),
                lambda: opened[keys[1]]["x"],
                lambda: opened.get_batch([keys[2]]),
                lambda: opened.select([keys[3]]).read([0]),
                lambda: opened.get_or_compute(keys[4], lambda: pytest.fail("computed")),
                lambda: opened.touch(keys[5]),
            ]
            for _ in range(4):
                clock.now += 60
                for way in ways:
                    way()
            assert sorted(opened) == keys

    def test_a_put_begins_anew(self, sets: ArtifactSets, clock: Clock, memory: str | None) -> None:
        with open_set(sets, unused_for=100, memory=memory) as opened:
            for n in range(4):
                opened.put("key", n)
                clock.now += 90
            assert opened.get("key") == 3
            clock.now += 111
            assert opened.get_or_compute("key", lambda: 7) == 7
            assert opened.get("key") == 7

    def test_uses_by_another_process_count(
        self, sets: ArtifactSets, clock: Clock, memory: str | None
    ) -> None:
        with open_set(sets, unused_for=100, memory=memory) as opened:
            opened.put("key", 1)
            opened.put("idle", 1)
            opened.get("key")
            opened.flush()
            clock.now += 90

            def use() -> object:
                with open_set(sets) as theirs:
                    found = theirs.get("key")
                    theirs.flush()  # as every process does at its end
                    return found

            assert Child(use).result() == 1
            clock.now += 60
            assert opened.get("idle") is None
            assert opened.get("key") == 1

    def test_it_is_a_miss_for_every_process_and_after_opening_again(
        self, sets: ArtifactSets, clock: Clock, memory: str | None
    ) -> None:
        with open_set(sets, unused_for=timedelta(seconds=100), memory=memory) as opened:
            opened.put("key", 1)
            opened.get("key")
            clock.now += 112
            assert Child(lambda: (opened.get("key"), list(opened))).result() == (None, [])
        with open_set(sets, memory=memory) as opened:
            assert opened.describe().options.unused_for == 100
            assert opened.get("key") is None


@given(st.lists(st.tuples(st.integers(0, 60), st.booleans()), max_size=12))
def test_nothing_goes_early_and_nothing_stays_long(
    tmp_path_factory: pytest.TempPathFactory, acts: list[tuple[int, bool]]
) -> None:
    """It lives as long as it was promised since its last use, and at most a tenth longer."""
    clock = Clock()
    root = tmp_path_factory.mktemp("unused")
    with ArtifactSets(root, clock=clock).open("set", {}, unused_for=100, memory="1MB") as opened:
        opened.put("key", 1)
        used = clock.now
        for seconds, is_read in acts:
            clock.now += seconds
            idle = clock.now - used
            if is_read:
                found = opened.get("key")
                assert found == 1 or idle >= 100
                assert found is None or idle <= 111
                if found is None:
                    return
                used = clock.now
            else:
                assert ("key" in opened) or idle >= 100
                assert ("key" not in opened) or idle <= 111


class TestOption:
    def test_it_can_be_taken_back(self, sets: ArtifactSets, clock: Clock) -> None:
        with open_set(sets, unused_for=100) as opened:
            opened.put("key", 1)
            clock.now += 500
            assert opened.get("key") is None
            with open_set(sets, unused_for=math.inf) as same:
                assert same.get("key") == opened.get("key") == 1

    @pytest.mark.parametrize("bad", [0, -1, "soon", timedelta(0)])
    def test_bad_ones_are_refused(self, sets: ArtifactSets, bad: object) -> None:
        with pytest.raises(ConfigError, match="unused_for"):
            open_set(sets, unused_for=bad)

    def test_who_reads_only_sees_no_uses_and_so_no_end(
        self, sets: ArtifactSets, clock: Clock
    ) -> None:
        with open_set(sets, unused_for=100) as opened:
            opened.put("key", 1)
            clock.now += 500
            with open_set(sets, read_only=True) as reading:
                assert reading.get("key") == 1
            assert opened.get("key") is None

    def test_both_bounds_hold(self, sets: ArtifactSets, clock: Clock) -> None:
        with open_set(sets, unused_for=100, ttl=250) as opened:
            opened.put("key", 1)
            for _ in range(3):
                clock.now += 80
                assert opened.get("key") == 1
            clock.now += 20
            assert opened.get("key") is None


class TestSweep:
    def test_it_deletes_what_is_past_its_time_and_nothing_else(
        self, sets: ArtifactSets, clock: Clock
    ) -> None:
        with open_set(sets, unused_for=1000, pack_bytes=60_000, memory="1MB") as opened:
            for n in range(10):
                opened.put(f"late{n}", {"x": array(n)}, ttl=60)
                opened.put(f"kept{n}", {"x": array(100 + n)})
            assert opened.sweep().artifacts == 0
            clock.now += 61
            before = size_of(opened)
            done = opened.sweep()
            assert (done.artifacts, done.size > 20_000) == (10, True)
            assert opened.stats().artifacts == 10
            opened.compact(force=True)
            assert size_of(opened) < 0.7 * before
            for n in range(9):
                assert opened.get(f"kept{n}") is not None
            clock.now += 1101
            assert opened.get("kept0") is None
            assert opened.sweep().artifacts == 10
            assert opened.stats().artifacts == 0
            check_whole(opened)

    def test_prune_frees_it_too(self, sets: ArtifactSets, clock: Clock) -> None:
        with open_set(sets, unused_for=100) as opened:
            opened.put("key", {"x": array(1, 9000)})
            opened.put("used", {"x": array(2, 9000)})
            clock.now += 80
            opened.get("used")
            clock.now += 40
            plan = sets.plan_prune()
            assert [(each.reason, each.keys) for each in plan.victims] == [("expired", ("key",))]
            assert plan.execute().artifacts == 1
            assert list(opened) == ["used"]


class TestClock:
    def test_it_is_that_of_all_times(self, sets: ArtifactSets, clock: Clock) -> None:
        clock.now = 5000.0
        with open_set(sets) as opened:
            opened.put("key", 1, ttl=10)
            info = sets.inspect(sets.infos()[0], "key")
            assert info.created_at.timestamp() == 5000
            assert info.expires_at is not None
            assert info.expires_at.timestamp() == 5010
            opened.remember_failure("bad", "why")
            assert opened.failures()[0].failed_at == 5000
            clock.now = 5010
            assert opened.get("key") is None

    def test_without_one_it_is_the_time_of_day(
        self, tmp_path: Path, pass_time: Callable[[float], None]
    ) -> None:
        with open_set(ArtifactSets(tmp_path / "sets"), unused_for=50) as opened:
            opened.put("key", 1)
            pass_time(49)
            assert opened.get("key") == 1
            pass_time(57)
            assert opened.get("key") is None

    def test_the_steps_of_uses_follow_the_time(self, sets: ArtifactSets) -> None:
        for unused_for, step in ((0.5, 1), (5, 1), (100, 10), (86400, 3600), (math.inf, 3600)):
            with open_set(sets, unused_for=unused_for) as opened:
                assert engine_of(opened).step == step


class TestSeveralProcesses:
    def test_a_single_use_is_told_to_others_while_its_process_goes_on(
        self, sets: ArtifactSets, clock: Clock
    ) -> None:
        with open_set(sets, unused_for=100) as opened:
            opened.put("key", 1)
        clock.now += 95
        reading, writing = os.pipe()

        def use_once() -> object:
            os.close(writing)
            with open_set(sets) as theirs:
                found = theirs.get("key")
                os.read(reading, 1)  # until the other one has looked
                return found

        child = Child(use_once)
        time.sleep(0.8)
        clock.now += 55
        with open_set(sets) as opened:
            assert opened.get("key") == 1
        os.close(writing)
        assert child.result() == 1

    def test_who_has_it_open_follows_what_another_one_sets(
        self, sets: ArtifactSets, clock: Clock
    ) -> None:
        def bound() -> None:
            open_set(sets, unused_for=100, compression="gzip").close()

        with open_set(sets, memory="1MB") as opened:
            opened.put("key", 1)
            opened.put("used", 1)
            opened.get("key")
            Child(bound).result()
            for _ in range(3):
                clock.now += 50
                assert opened.get("used") == 1
            assert opened.get("key") is None
            assert opened.describe().options.compression == "gzip"

    @pytest.mark.parametrize("look", [lambda each: each.get("key"), lambda each: len(each) or None])
    def test_nothing_goes_early_where_the_index_was_lost(
        self, sets: ArtifactSets, clock: Clock, look: Callable[[ArtifactSet], object]
    ) -> None:
        with open_set(sets, unused_for=100) as opened:
            opened.put("key", 1)
            clock.now += 95
            opened.get("key")
        for path in opened.path.glob("index.sqlite3*"):
            path.unlink()
        clock.now += 95
        with open_set(sets) as opened:
            assert look(opened) == 1
            clock.now += 211
            assert look(opened) is None
