"""Bounds of a set and of all sets: time, size, least recently used first; and what must stay."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from smartcache.artifacts import ArtifactSet, ArtifactSets
from smartcache.artifacts.engine import compact as artifacts_compact
from smartcache.artifacts.keys import check_key
from smartcache.artifacts.setfolder import SetFolder
from smartcache.errors import ArtifactNotFoundError, ConfigError, NoSpaceError
from tests.artifacts.opening import (
    array,
    blocks_of,
    check_whole,
    engine_of,
    open_set,
    size_of,
)
from tests.store.files import row

Advance = Callable[[float], None]
SIZE = 10_000
"""Of the tensor of one artifact."""


def put(opened: ArtifactSet, *names: str) -> None:
    """Put artifacts of one size."""
    for name in names:
        opened.put(name, {"x": array(int.from_bytes(name.encode()), SIZE)})


class TestTimeToLive:
    def test_what_is_past_its_time_is_not_there(
        self, latents: ArtifactSet, pass_time: Advance
    ) -> None:
        latents.put("key", {"x": 1}, ttl=60)
        latents.put("other", {"x": 2})
        pass_time(55)
        assert "key" in latents
        pass_time(10)
        assert "key" not in latents
        assert latents.get("key", 5) == 5
        assert list(latents) == ["other"]
        assert len(latents) == 1
        with pytest.raises(ArtifactNotFoundError):
            latents["key"]
        with pytest.raises(ArtifactNotFoundError):
            latents.get_batch(["key"])
        latents.flush()
        with ArtifactSet(SetFolder.read(latents.path, read_only=True), read_only=True) as newcomer:
            assert list(newcomer) == ["other"]
        assert latents.evict().artifacts == 1
        assert latents.stats().artifacts == 1
        check_whole(latents)

    def test_it_never_ends_early(self, latents: ArtifactSet, pass_time: Advance) -> None:
        """Times are kept in whole seconds."""
        for n in range(20):
            pass_time(0.13)
            latents.put(f"k{n}", 1, ttl=1)
            pass_time(0.95)
            assert f"k{n}" in latents

    def test_a_put_begins_it_anew_or_ends_it(
        self, latents: ArtifactSet, pass_time: Advance
    ) -> None:
        latents.put("longer", 1, ttl=60)
        latents.put("for ever", 1, ttl=60)
        pass_time(50)
        latents.put("longer", 2, ttl=60)
        latents.put("for ever", 2)
        pass_time(50)
        assert latents.get("longer") == 2
        pass_time(1000)
        assert latents.get("for ever") == 2

    def test_the_set_and_all_sets_have_one_for_all_puts(
        self, tmp_path: Path, pass_time: Advance
    ) -> None:
        """Nothing outlives that of all sets; a put may outlive that of its own."""
        sets = ArtifactSets(tmp_path / "sets", ttl=60)
        with open_set(sets) as opened, open_set(sets, "own", ttl=timedelta(seconds=20)) as own:
            opened.put("plain", 1)
            opened.put("longer", 1, ttl=600)
            opened.put("shorter", 1, ttl=30)
            own.put("key", 1)
            own.put("longer", 1, ttl=50)
            pass_time(45)
            assert (sorted(opened), sorted(own)) == (["longer", "plain"], ["longer"])
            pass_time(30)
            assert sorted(opened) == sorted(own) == []

    def test_puts_remove_it_by_themselves(self, sets: ArtifactSets, pass_time: Advance) -> None:
        with open_set(sets, ttl=60, pack_bytes=50_000) as opened:
            opened.put("key", {"x": array(1)})
            pass_time(61)
            opened.put_many((f"k{n}", {"x": array(n)}) for n in range(40))
            assert opened.stats().artifacts == 40

    def test_a_pinned_artifact_outlives_it(self, latents: ArtifactSet, pass_time: Advance) -> None:
        latents.put("key", {"x": 1}, ttl=60)
        latents.pin("key")
        pass_time(61)
        assert latents.get("key") == {"x": 1}
        assert list(latents) == ["key"]
        assert len(latents) == 1
        latents.evict()
        assert "key" in latents
        latents.put("key", {"x": 2}, ttl=60)  # stays pinned
        pass_time(61)
        assert latents.get("key") == {"x": 2}
        latents.unpin("key")
        assert "key" not in latents

    def test_none_at_all_is_refused_and_one_without_end_never_ends(
        self, latents: ArtifactSet, pass_time: Advance
    ) -> None:
        for ttl in (0, -1, float("nan"), timedelta(0)):
            with row(ttl), pytest.raises(ConfigError):
                latents.put("key", 1, ttl=ttl)
        latents.put("inf", 1, ttl=float("inf"))
        latents.put("long", 1, ttl=1e30)
        pass_time(1e9)
        assert sorted(latents) == ["inf", "long"]


class TestMaxSize:
    def test_the_least_recently_used_go_first(self, sets: ArtifactSets, pass_time: Advance) -> None:
        with open_set(sets) as opened:
            for name in "abcdefgh":
                put(opened, name)
                pass_time(10)
            opened.touch("a")
            opened.touch("c")
        with open_set(sets, max_size=5 * SIZE) as opened:
            assert opened.evict().artifacts == 4
            assert set(opened) == {"a", "c", "g", "h"}
            check_whole(opened)

    def test_of_those_put_in_one_second_the_first_go_first(self, sets: ArtifactSets) -> None:
        names = "hdbfaceg"
        with open_set(sets) as opened:
            put(opened, *names)
        with open_set(sets, max_size=5 * SIZE) as opened:
            opened.evict()
            assert set(opened) == set(names[4:])

    def test_reading_counts_as_use_after_an_hour(
        self, sets: ArtifactSets, pass_time: Advance
    ) -> None:
        with open_set(sets) as opened:
            put(opened, *"abcdefgh")
            pass_time(3700)
            opened.get("a")
            opened.get_batch(["b"])
        with open_set(sets, max_size=3 * SIZE) as opened:
            opened.evict()
            assert set(opened) == {"a", "b"}

    def test_puts_keep_to_it_by_themselves(self, sets: ArtifactSets) -> None:
        with open_set(sets, max_size=20 * SIZE) as opened:
            for n in range(100):
                opened.put(f"k{n}", {"x": array(n, SIZE)})
                assert opened.stats().live <= 22 * SIZE
                assert f"k{n}" in opened
            assert "k0" not in opened
            assert size_of(opened) < 32 * SIZE

    def test_pinned_artifacts_stay(self, sets: ArtifactSets) -> None:
        with open_set(sets) as opened:
            put(opened, *"abcdefgh")
            opened.pin("a")
            opened.pin("b")
            opened.unpin("b")
        with open_set(sets, max_size=3 * SIZE) as opened:
            opened.evict()
            assert set(opened) == {"a", "h"}

    def test_a_set_that_is_not_evictable_keeps_all(self, sets: ArtifactSets) -> None:
        with open_set(sets, max_size=SIZE, evictable=False) as opened:
            put(opened, *"abcd")
            assert opened.evict().artifacts == 0
            assert len(opened) == 4

    def test_what_is_being_computed_stays(self, sets: ArtifactSets) -> None:
        with open_set(sets) as opened:
            put(opened, *"abcdefgh")
            with engine_of(opened).key_locks.hold("a"):
                with open_set(sets, max_size=3 * SIZE) as bounded:
                    bounded.evict()
                assert set(opened) == {"a", "h"}

    def test_what_has_an_open_sample_stays(self, sets: ArtifactSets) -> None:
        with open_set(sets) as opened:
            put(opened, *"abcdefgh")
            first, second = opened["a"], opened["a"]
            del first
            gc.collect()
            with open_set(sets, max_size=3 * SIZE) as bounded:
                bounded.evict()
            assert set(opened) == {"a", "h"}
            assert np.array_equal(second["x"], array(int.from_bytes(b"a"), SIZE))  # type: ignore[arg-type]
            del second
            gc.collect()
            opened.evict()

    def test_what_was_replaced_meanwhile_stays(self, sets: ArtifactSets) -> None:
        with open_set(sets) as opened:
            put(opened, *"abcd")
            engine = engine_of(opened)
            chosen = list(artifacts_compact.victims(engine, free=10 * SIZE))
            assert len(chosen) == 4
            opened.put("b", {"x": array(77, SIZE)})
            put(opened, "c")
            assert artifacts_compact.evict(engine, iter(chosen)).artifacts == 2
            assert set(opened) == {"b", "c"}

    def test_its_room_comes_back(self, sets: ArtifactSets) -> None:
        with open_set(sets) as opened:
            put(opened, *"abcdefghijklmnop")
        with open_set(sets, max_size=4 * SIZE) as opened:
            opened.evict()
            assert blocks_of(opened) < 6 * SIZE


class TestAllSets:
    def test_the_least_recently_used_of_all_go(self, tmp_path: Path, pass_time: Advance) -> None:
        sets = ArtifactSets(tmp_path / "sets", max_size=6 * SIZE)
        with open_set(sets, "one") as one, open_set(sets, "two") as two:
            put(one, "a", "b", "c")
            pass_time(10)
            put(two, "d", "e", "f")
            pass_time(10)
            put(one, "g")
            sets.make_room()
            assert set(one) == {"c", "g"}
            assert set(two) == {"d", "e", "f"}

    def test_puts_make_room_in_other_sets(self, tmp_path: Path, pass_time: Advance) -> None:
        sets = ArtifactSets(tmp_path / "sets", max_size=100 * SIZE)
        with open_set(sets, "one") as one, open_set(sets, "two") as two:
            put(one, *(f"a{n}" for n in range(90)))
            pass_time(10)
            for n in range(128):
                two.put(f"b{n}", {"x": array(n, SIZE)})
                pass_time(0.1)
            assert len(one) == 0
            assert "b127" in two
            assert one.stats().live + two.stats().live < 110 * SIZE

    def test_sets_that_are_not_evictable_are_left_alone(
        self, tmp_path: Path, pass_time: Advance
    ) -> None:
        sets = ArtifactSets(tmp_path / "sets", max_size=3 * SIZE)
        with open_set(sets, "one", evictable=False) as one, open_set(sets, "two") as two:
            put(one, "a", "b", "c")
            pass_time(10)
            put(two, "d", "e")
            sets.make_room()
            assert set(one) == {"a", "b", "c"}
            assert set(two) == set()


class TestPrunePlan:
    def test_what_is_past_its_time_and_dead_goes(
        self, sets: ArtifactSets, pass_time: Advance
    ) -> None:
        with open_set(sets) as opened:
            put(opened, "dead", "stays")
            opened.put("old", {"x": array(5, SIZE)}, ttl=60)
            opened.delete("dead")
            pass_time(61)
            plan = sets.plan_prune()
            assert {victim.reason for victim in plan.victims} == {"expired", "dead"}
            assert plan.artifacts == 1
            assert plan.freed_size >= 2 * SIZE
            assert len(opened) == 1
            before = blocks_of(opened)
            result = plan.execute()
            assert result.artifacts == 1
            assert not result.problems
            assert result.freed_size == before - blocks_of(opened)
            assert list(opened) == ["stays"]

    def test_unused_artifacts_go_if_asked(self, sets: ArtifactSets, pass_time: Advance) -> None:
        with open_set(sets) as opened:
            put(opened, "a", "b")
            pass_time(7200)
            put(opened, "c")
            opened.touch("b")
            plan = sets.plan_prune(unused_for=timedelta(hours=1))
            assert [victim.keys for victim in plan.victims] == [("a",)]
            plan.execute()
            assert set(opened) == {"b", "c"}

    def test_a_bound_that_cannot_be_reached_is_said(self, sets: ArtifactSets) -> None:
        with open_set(sets) as opened:
            put(opened, "a", "b")
            opened.pin("a")
            plan = sets.plan_prune(max_size=100)
            assert plan.warnings
            plan.execute()
            assert list(opened) == ["a"]

    def test_nothing_is_planned_for_a_tidy_set(self, sets: ArtifactSets) -> None:
        with open_set(sets) as opened:
            put(opened, "a", "b")
            assert sets.plan_prune().victims == ()


class TestUses:
    """Reading counts as use, whoever reads: what is not read goes first."""

    @pytest.mark.parametrize("is_quick", [True, False])
    def test_of_forked_workers_are_written_down(
        self, sets: ArtifactSets, pass_time: Advance, is_quick: bool
    ) -> None:
        """As those of a DataLoader: forked with the set open, ended by multiprocessing."""
        with open_set(sets) as opened:
            put(opened, *"abcdef")
            assert opened.get("a") is not None
            chosen = opened.select(["e"])
            pass_time(2 * 86400)

            def read() -> None:
                opened.get_batch(["b", "c"])
                assert opened["d"]["x"] is not None
                chosen.read([0])
                if not is_quick:
                    time.sleep(0.6)
                    os._exit(0)  # what is written by then was written behind

            worker = get_context("fork").Process(target=read)
            worker.start()
            worker.join()
            assert worker.exitcode == 0
            plan = sets.plan_prune(unused_for=timedelta(days=1))
            assert [set(victim.keys) for victim in plan.victims] == [{"a", "f"}]
            assert plan.execute().artifacts == 2
            assert set(opened) == set("bcde")

    def test_are_written_down_when_the_program_just_ends(self, sets: ArtifactSets) -> None:
        with open_set(sets) as opened:
            put(opened, "a", "b")
            path = opened.path
        done = subprocess.run(
            [sys.executable, "-c", READ_LATER, str(path)],
            check=False, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        with open_set(sets) as opened:
            hashes, _ = engine_of(opened).index.uses()
            assert hashes.tolist() == [engine_of(opened).catalog.hashes(check_key("a"))[0]]

    def test_that_cannot_be_written_down_are_told_and_no_put_fails(
        self,
        sets: ArtifactSets,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        with open_set(sets, max_size=3 * SIZE) as opened:

            def full(*_: object) -> NoReturn:
                raise NoSpaceError("No space left")

            monkeypatch.setattr(type(engine_of(opened).index), "add_uses", full)
            for n in range(12):
                opened.put(f"k{n}", {"x": array(n, SIZE)})
                assert np.array_equal(opened.get(f"k{n}")["x"], array(n, SIZE))
            assert len(opened) == 12
        assert "was not brought within its bounds: No space left" in caplog.text
        assert "uses were not written down: No space left" in caplog.text


READ_LATER = """
import sys
from pathlib import Path
from smartcache.artifacts import ArtifactSets

path = Path(sys.argv[1])
sets = ArtifactSets(path.parent.parent)
(info,) = sets.infos()
opened = sets.open_id(info)
opened.get("a")
"""
