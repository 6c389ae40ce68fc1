"""Compaction: room comes back, nothing that is wanted is lost, and nothing that is gone returns."""

from __future__ import annotations

import errno
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta

import numpy as np
import pytest

from smartcache.artifacts import ArtifactSet, ArtifactSets
from smartcache.artifacts.engine import compact as artifacts_compact
from smartcache.errors import LockTimeoutError
from smartcache.system import faults as store_faults
from smartcache.system.locks import store_lock
from tests.artifacts.opening import (
    array,
    blocks_of,
    check_whole,
    engine_of,
    open_set,
    packs_of,
    seal,
    size_of,
    unlinked_of,
)
from tests.processes.children import Child

Advance = Callable[[float], None]
SIZE = 10_000


def fill(opened: ArtifactSet, count: int) -> None:
    opened.put_many((f"k{n}", {"x": array(n, SIZE), "n": n}) for n in range(count))


def check(opened: ArtifactSet, numbers: set[int]) -> None:
    assert set(opened) == {f"k{n}" for n in numbers}
    for n in numbers:
        value = opened.get(f"k{n}")
        assert value["n"] == n
        assert np.array_equal(value["x"], array(n, SIZE))
    check_whole(opened)


def states(opened: ArtifactSet) -> dict[str, tuple[int, int]]:
    """What tells whether packs were touched."""
    found = ((path, path.stat()) for path in packs_of(opened))
    return {path.name: (state.st_ino, state.st_mtime_ns) for path, state in found}


class TestCompact:
    def test_room_comes_back(self, latents: ArtifactSet) -> None:
        fill(latents, 20)
        latents.delete_many(f"k{n}" for n in range(15))
        seal(latents)
        before = blocks_of(latents)
        result = latents.compact()
        assert result.packs == 1
        assert result.freed == before - blocks_of(latents) > 14 * SIZE
        assert result.copied > 5 * SIZE
        check(latents, set(range(15, 20)))

    def test_what_is_half_alive_is_left_unless_forced(self, latents: ArtifactSet) -> None:
        fill(latents, 20)
        latents.delete_many(f"k{n}" for n in range(5))
        assert latents.compact().packs == 0
        assert latents.compact(force=True).packs == 1
        check(latents, set(range(5, 20)))

    def test_a_set_of_which_nothing_is_left_has_no_packs(self, latents: ArtifactSet) -> None:
        fill(latents, 5)
        latents.delete_many(f"k{n}" for n in range(5))
        latents.compact()
        assert packs_of(latents) == []
        fill(latents, 3)
        check(latents, {0, 1, 2})

    @pytest.mark.parametrize("force", [False, True])
    def test_what_has_nothing_dead_is_left_as_it_is(self, sets: ArtifactSets, force: bool) -> None:
        """Not an empty set, nor one with pins, deletions that matter, and several layouts."""
        with open_set(sets, pack_bytes=5 * SIZE) as opened:
            assert opened.compact(force=force).packs == 0
            fill(opened, 8)
            opened.put("other", [array(9), array(9)])
            opened.pin("k3")
            before = states(opened)
            assert opened.compact(force=force).packs == 0
            assert states(opened) == before
            opened.delete_many(["k0", "k7"])
            if force:
                assert opened.compact(force=True).packs
                before = states(opened)
                result = opened.compact(force=True)
                assert (result.packs, result.copied) == (0, 0)
                assert states(opened) == before
            assert len(opened) == 7
            check_whole(opened)

    def test_it_never_needs_room_for_more_than_a_pack(
        self, sets: ArtifactSets, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with open_set(sets, pack_bytes=5 * SIZE) as opened:
            fill(opened, 40)
            opened.delete_many(f"k{n}" for n in range(0, 40, 4))
            before = blocks_of(opened)
            taken = []
            monkeypatch.setattr(store_faults, "hook", lambda _: taken.append(blocks_of(opened)))
            assert opened.compact(force=True).packs == 10
            monkeypatch.undo()
            assert max(taken) < before + 6 * SIZE
            check(opened, {n for n in range(40) if n % 4})

    def test_many_packs_become_few(self, sets: ArtifactSets) -> None:
        with open_set(sets, pack_bytes=2 * SIZE) as opened:
            fill(opened, 12)
            assert len(packs_of(opened)) == 12
            engine_of(opened).pack_bytes = 1 << 20
            opened.compact()
            assert len(packs_of(opened)) <= 2
            check(opened, set(range(12)))

    def test_it_fills_several_packs(self, sets: ArtifactSets) -> None:
        with open_set(sets, pack_bytes=3 * SIZE) as opened:
            fill(opened, 12)
            opened.delete_many(f"k{n}" for n in range(0, 12, 2))
            opened.compact(force=True)
            assert max(path.stat().st_size for path in packs_of(opened)) <= 3 * SIZE
            check(opened, set(range(1, 12, 2)))

    def test_metadata_times_and_pins_stay(self, sets: ArtifactSets, pass_time: Advance) -> None:
        with open_set(sets) as opened:
            opened.put("key", {"x": array(1)}, metadata={"a": 1}, ttl=1000)
            opened.put("pinned", {"x": array(2)}, ttl=1000)
            opened.put("old", {"x": array(3)})
            opened.put("other", {"x": array(4)})
            opened.pin("pinned")
            opened.pin("old")
            seal(opened)
            opened.unpin("old")
            opened.delete("other")
            pass_time(500)
            for _ in range(2):
                opened.put("dead", {"x": array(5)})
                opened.delete("dead")
                assert opened.compact(force=True).packs
                assert opened.metadata("key") == {"a": 1}
                assert [opened.is_pinned(key) for key in ("pinned", "old")] == [True, False]
            plan = sets.plan_prune(unused_for=timedelta(seconds=400))
            assert {key for victim in plan.victims for key in victim.keys} == {"old"}
            pass_time(510)
            assert set(opened) == {"pinned", "old"}

    def test_shared_tensors_are_copied_once(self, latents: ArtifactSet) -> None:
        for n in range(8):
            latents.put(f"k{n}", {"x": array(1, SIZE), "n": n})
        latents.put("dead", {"x": array(2, 9 * SIZE)})
        latents.delete("dead")
        assert latents.compact().copied < 2 * SIZE
        assert all(np.array_equal(latents.get(f"k{n}")["x"], array(1, SIZE)) for n in range(8))

    def test_it_is_done_again_and_again(self, sets: ArtifactSets) -> None:
        with open_set(sets, pack_bytes=4 * SIZE) as opened:
            for turn in range(6):
                for n in range(8):
                    opened.put(f"k{n}", {"x": array(n, SIZE), "n": n})
                    opened.put(f"dead{n}", {"x": array(100 * turn + n + 50, SIZE)})
                opened.delete_many(f"dead{n}" for n in range(8))
                opened.compact(force=turn % 2 == 0)
                check(opened, set(range(8)))
        with open_set(sets) as opened:
            check(opened, set(range(8)))

    def test_packs_that_another_process_writes_are_left_alone(self, sets: ArtifactSets) -> None:
        with open_set(sets) as opened:
            fill(opened, 3)
            opened.delete_many(["k0", "k1"])
            with Child(lambda: open_set(sets).compact(force=True).packs) as child:
                assert child.result() == 0
            check(opened, {2})


class TestByItself:
    def test_when_more_than_half_was_deleted(self, sets: ArtifactSets) -> None:
        with open_set(sets, pack_bytes=20 * SIZE) as opened:
            fill(opened, 40)
            opened.delete_many(f"k{n}" for n in range(36))
            opened.put("k40", {"x": array(40, SIZE), "n": 40})
            assert blocks_of(opened) < 15 * SIZE
            check(opened, {36, 37, 38, 39, 40})

    def test_when_one_key_is_replaced_for_ever(self, sets: ArtifactSets) -> None:
        with open_set(sets, pack_bytes=20 * SIZE) as opened:
            for n in range(100):
                opened.put("k0", {"x": array(n, SIZE), "n": n})
            opened.put("k0", {"x": array(0, SIZE), "n": 0})
            assert blocks_of(opened) < 50 * SIZE
            check(opened, {0})

    def test_not_for_little(self, latents: ArtifactSet) -> None:
        fill(latents, 20)
        before = [path.name for path in packs_of(latents)]
        latents.delete_many(f"k{n}" for n in range(18))
        latents.put("k20", {"x": array(20, SIZE), "n": 20})
        assert [path.name for path in packs_of(latents)] == before

    @pytest.mark.parametrize("cause", ["an error of the disk", "a lock that is held"])
    def test_what_keeps_it_from_being_done_is_told_and_no_put_fails(
        self,
        sets: ArtifactSets,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        cause: str,
    ) -> None:
        def refuse(point: str) -> None:
            if point == "compact: copied":
                raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(artifacts_compact, "_PATIENCE", 0.1)
        with open_set(sets, pack_bytes=8 * SIZE) as opened, ExitStack() as stack:
            fill(opened, 40)
            opened.delete("k39")  # a pack is open: nobody needs the lock for one
            if cause == "an error of the disk":
                monkeypatch.setattr(store_faults, "hook", refuse)
            else:
                stack.enter_context(store_lock(opened.path / "lock", "working"))
            pool = stack.enter_context(ThreadPoolExecutor(1))  # locks are those of threads
            for n in range(30):
                assert pool.submit(opened.delete, f"k{n}").result()
            (told,) = [each for each in caplog.records if "was not compacted" in each.message]
            assert told.levelname == "WARNING"
            stack.close()
            monkeypatch.setattr(store_faults, "hook", None)
            check(opened, set(range(30, 39)))
            assert opened.compact().packs
            check(opened, set(range(30, 39)))
            assert size_of(opened) < 20 * SIZE


class TestReaders:
    def test_a_mapped_pack_stays_readable_and_its_room_is_free_when_it_is_let_go(
        self, latents: ArtifactSet
    ) -> None:
        fill(latents, 10)
        views = [latents[f"k{n}"].handle("x").numpy() for n in range(10)]
        latents.delete_many(f"k{n}" for n in range(9))
        latents.compact()
        for n, view in enumerate(views):
            assert np.array_equal(view, array(n, SIZE))
        del view, views
        gc.collect()
        assert unlinked_of(latents) == []

    def test_another_process_finds_what_was_moved(self, sets: ArtifactSets) -> None:
        with open_set(sets) as opened:
            fill(opened, 10)
            seal(opened)
            check(opened, set(range(10)))
            with Child(lambda: _delete_and_compact(sets, 6)) as child:
                assert child.result() >= 1
            check(opened, set(range(6, 10)))
            assert opened.get_batch(["k7", "k9"])["n"] == [7, 9]
            assert unlinked_of(opened) == []


class TestDeletions:
    """What was deleted or replaced never comes back, however packs are compacted and opened."""

    def test_of_what_other_packs_have_stay_as_long_as_these(self, sets: ArtifactSets) -> None:
        with open_set(sets) as opened:
            fill(opened, 10)
            seal(opened)
            opened.delete("k0")  # in the second pack, which has nothing else
            opened.put("k1", {"x": array(50, SIZE), "n": 50})
            opened.put("k1", {"x": array(1, SIZE), "n": 1})
            opened.compact()
            with open_set(sets, read_only=True) as newcomer:
                assert set(newcomer) == {f"k{n}" for n in range(1, 10)}
                assert newcomer.get("k1")["n"] == 1
            check(opened, set(range(1, 10)))

    def test_leave_no_trace_when_nothing_needs_them_any_more(self, sets: ArtifactSets) -> None:
        with open_set(sets, pack_bytes=3 * SIZE) as opened:
            fill(opened, 9)
            opened.delete_many(f"k{n}" for n in range(9))
            for _ in range(2):
                opened.compact(force=True)
            assert packs_of(opened) == []


def _delete_and_compact(sets: ArtifactSets, count: int) -> int:
    opened = open_set(sets)
    opened.delete_many(f"k{n}" for n in range(count))
    return opened.compact().packs


def test_asked_for_it_says_what_keeps_it_from_being_done_and_changes_nothing(
    sets: ArtifactSets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts_compact, "_PATIENCE", 0.1)
    with open_set(sets) as opened:
        fill(opened, 20)
        opened.delete_many(f"k{n}" for n in range(15))
        with store_lock(opened.path / "lock", "working"), ThreadPoolExecutor(1) as pool:
            job = pool.submit(opened.compact)  # locks are those of threads
            with pytest.raises(LockTimeoutError):
                job.result()
        check(opened, set(range(15, 20)))
        assert opened.compact().packs
        check(opened, set(range(15, 20)))


def test_a_pack_that_was_compacted_and_is_claimed_is_not_taken_for_a_damaged_one(
    sets: ArtifactSets,
) -> None:
    """Who claims a pack that is gone makes an empty file of its name for a moment."""
    with open_set(sets) as opened:
        opened.put("dead", array(1))
        opened.put("key", array(2))
        opened.delete("dead")
        seal(opened)
        assert opened.get("key") is not None
        (old,) = packs_of(opened)
        assert Child(lambda: opened.compact(force=True).packs).result() == 1
        old.touch(0o600)
        engine_of(opened).catalog.files.clear()
        for _ in range(2):
            assert np.array_equal(opened.get("key"), array(2))
