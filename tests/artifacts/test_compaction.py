"""Compaction: room comes back, nothing that is wanted is lost, and nothing that is gone returns."""

from __future__ import annotations

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.api import ArtifactSet, ArtifactSets, LeaseTimeoutError, artifacts_copying, lock
from tests.artifacts.opening import array, engine_of, open_set
from tests.artifacts.rows import check_rows
from tests.processes.children import Child

SIZE = 10_000


def fill(opened: ArtifactSet, count: int) -> None:
    opened.put_many((f"k{n}", {"x": array(n, SIZE), "n": n}) for n in range(count))
    opened.flush()


def check(opened: ArtifactSet, numbers: set[int]) -> None:
    assert set(opened) == {f"k{n}" for n in numbers}
    for n in numbers:
        value = opened.get(f"k{n}")
        assert value["n"] == n
        assert np.array_equal(value["x"], array(n, SIZE))
    opened.flush()
    check_rows(opened.path)


def blocks(opened: ArtifactSet) -> int:
    return sum(path.stat().st_blocks * 512 for path in opened.path.glob("*.pack"))


def rebuild(sets: ArtifactSets) -> None:
    sets.rebuild(sets.infos("latents")[0])


class TestCompact:
    def test_room_comes_back(self, latents: ArtifactSet) -> None:
        fill(latents, 20)
        before = blocks(latents)
        latents.delete_many(f"k{n}" for n in range(15))
        result = latents.compact()
        assert result.packs == 1
        assert result.freed == before - blocks(latents) > 14 * SIZE
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
        assert list(latents.path.glob("*.pack")) == []
        fill(latents, 3)
        check(latents, {0, 1, 2})

    def test_an_empty_set_is_left_as_it_is(self, latents: ArtifactSet) -> None:
        assert latents.compact(force=True).packs == 0

    def test_many_packs_become_few(self, sets: ArtifactSets) -> None:
        with open_set(sets, pack_bytes=2 * SIZE) as opened:
            fill(opened, 12)
            assert len(list(opened.path.glob("*.pack"))) == 12
            engine_of(opened).pack_bytes = 1 << 20
            opened.compact()
            assert len(list(opened.path.glob("*.pack"))) <= 2
            check(opened, set(range(12)))

    def test_it_fills_several_packs(self, sets: ArtifactSets) -> None:
        with open_set(sets, pack_bytes=3 * SIZE) as opened:
            fill(opened, 12)
            opened.delete_many(f"k{n}" for n in range(0, 12, 2))
            opened.compact(force=True)
            assert max(p.stat().st_size for p in opened.path.glob("*.pack")) <= 3 * SIZE
            check(opened, set(range(1, 12, 2)))

    def test_metadata_times_and_pins_stay(self, latents: ArtifactSet) -> None:
        latents.put("key", {"x": array(1)}, metadata={"a": 1}, ttl=1000)
        latents.put("other", {"x": array(2)})
        latents.pin("key")
        latents.flush()
        before = engine_of(latents).index.entry(b"\x02key")
        latents.delete("other")
        assert latents.compact(force=True).packs == 1
        after = engine_of(latents).index.entry(b"\x02key")
        assert before is not None
        assert after == before._replace(place=after.place if after else 0)
        assert latents.metadata("key") == {"a": 1}

    def test_shared_tensors_are_copied_once(self, latents: ArtifactSet) -> None:
        for n in range(8):
            latents.put(f"k{n}", {"x": array(1, SIZE), "n": n})
        latents.put("dead", {"x": array(2, 9 * SIZE)})
        latents.delete("dead")
        assert latents.compact().copied < 2 * SIZE
        assert all(np.array_equal(latents.get(f"k{n}")["x"], array(1, SIZE)) for n in range(8))
        check_rows(latents.path)

    def test_it_is_done_again_and_again(self, sets: ArtifactSets) -> None:
        """Chunks move from pack to pack while the records that need them lie elsewhere."""
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
            opened.flush()
            with Child(lambda: open_set(sets).compact(force=True).packs) as child:
                assert child.result() == 0
            check(opened, {2})


class TestByItself:
    def test_when_more_than_half_was_deleted(self, sets: ArtifactSets) -> None:
        with open_set(sets, pack_bytes=20 * SIZE) as opened:
            fill(opened, 40)
            opened.delete_many(f"k{n}" for n in range(36))
            opened.flush()
            opened.put("k40", {"x": array(40, SIZE), "n": 40})
            assert blocks(opened) < 15 * SIZE
            check(opened, {36, 37, 38, 39, 40})

    def test_when_one_key_is_replaced_for_ever(self, sets: ArtifactSets) -> None:
        with open_set(sets, pack_bytes=20 * SIZE) as opened:
            for n in range(300):
                opened.put("k0", {"x": array(n, SIZE), "n": n})
            opened.flush()
            opened.put("k0", {"x": array(0, SIZE), "n": 0})
            assert blocks(opened) < 90 * SIZE
            check(opened, {0})

    def test_not_for_little(self, latents: ArtifactSet) -> None:
        fill(latents, 20)
        latents.delete_many(f"k{n}" for n in range(18))
        latents.flush()
        latents.put("k20", {"x": array(20, SIZE), "n": 20})
        assert [path.name for path in latents.path.glob("*.pack")] == ["00000001.pack"]


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
        assert _unlinked(latents.path) == []

    def test_another_process_finds_what_was_moved(self, sets: ArtifactSets) -> None:
        with open_set(sets) as opened:
            fill(opened, 10)
            engine_of(opened).seal()
            check(opened, set(range(10)))
            with Child(lambda: _delete_and_compact(sets, 6)) as child:
                assert child.result() >= 1
            check(opened, set(range(6, 10)))
            assert opened.get_batch(["k7", "k9"])["n"] == [7, 9]
            assert _unlinked(opened.path) == []


class TestRebuild:
    """What the packs alone tell, after all that happened, is what the rows told."""

    @pytest.mark.parametrize("is_compacted", [False, True])
    def test_brings_back_nothing_that_was_deleted_or_replaced(
        self, sets: ArtifactSets, is_compacted: bool
    ) -> None:
        with open_set(sets, pack_bytes=3 * SIZE) as opened:
            fill(opened, 9)
            opened.put("k1", {"x": array(50, SIZE), "n": 50})
            opened.put("k1", {"x": array(1, SIZE), "n": 1})
            opened.delete_many(["k0", "k4", "k8"])
            opened.put("k4", {"x": array(4, SIZE), "n": 4})
            opened.delete("k4")
            if is_compacted:
                opened.compact()
            check(opened, {1, 2, 3, 5, 6, 7})
            rebuild(sets)
            check(opened, {1, 2, 3, 5, 6, 7})

    def test_after_a_compaction_of_the_packs_that_held_the_deletions_only(
        self, sets: ArtifactSets
    ) -> None:
        with open_set(sets) as opened:
            fill(opened, 10)
            engine_of(opened).seal()
            opened.delete("k0")  # in the second pack, which has nothing else
            assert opened.compact().packs == 1
            rebuild(sets)
            check(opened, set(range(1, 10)))

    def test_keeps_pins_and_their_ends(self, sets: ArtifactSets) -> None:
        with open_set(sets) as opened:
            fill(opened, 5)
            for n in range(5):
                opened.pin(f"k{n}")
            engine_of(opened).seal()
            opened.unpin("k1")
            opened.unpin("k2")
            opened.pin("k2")
            opened.delete("k3")
            opened.put("k3", {"x": array(3, SIZE), "n": 3})
            opened.flush()
            for is_forced in (False, True):
                opened.compact(force=is_forced)
                rebuild(sets)
                pinned = {key for key, _ in _pinned(opened)}
                assert pinned == {b"\x02k0", b"\x02k2", b"\x02k4"}

    def test_keeps_a_pin_although_a_record_that_was_replaced_since_lacks_its_tensor(
        self, sets: ArtifactSets
    ) -> None:
        """The tensor lay in another pack than the record, and only that pack was compacted."""
        with open_set(sets) as opened:
            opened.put("other", {"x": array(7, SIZE)})
            opened.put("dead", {"x": array(8, 3 * SIZE)})
            opened.flush()
            engine_of(opened).seal()
            fill(opened, 5)
            opened.pin("k0")
            opened.put("k0", {"x": array(7, SIZE), "n": 7})
            opened.put("k0", {"x": array(0, SIZE), "n": 0})
            opened.delete_many(["other", "dead"])
            assert opened.compact().packs == 1
            rebuild(sets)
            check(opened, set(range(5)))
            assert [key for key, _ in _pinned(opened)] == [b"\x02k0"]

    def test_of_a_lost_index_when_it_is_opened(self, sets: ArtifactSets) -> None:
        with open_set(sets, pack_bytes=3 * SIZE) as opened:
            fill(opened, 9)
            opened.put("k2", {"x": array(2, SIZE), "n": 2}, metadata="new")
            opened.delete("k5")
            path = opened.path
        for file in path.glob("index.sqlite3*"):
            file.unlink()
        with open_set(sets) as opened:
            check(opened, set(range(9)) - {5})
            assert opened.metadata("k2") == "new"

    def test_while_the_set_is_open_with_uncounted_records(self, sets: ArtifactSets) -> None:
        with open_set(sets) as opened:
            fill(opened, 3)
            opened.put("k3", {"x": array(3, SIZE), "n": 3})
            rebuild(sets)
            check(opened, {0, 1, 2, 3})

    def test_in_another_process_leaves_this_one_with_the_right_layouts(
        self, sets: ArtifactSets
    ) -> None:
        """The number of a layout may stand for another one afterwards."""
        with open_set(sets) as opened:
            opened.put("gone", [array(0)])
            opened.put("list", [array(1), array(2)])
            opened.put("dict", {"x": array(3)})
            opened.delete("gone")
            opened.flush()
            assert len(opened.get("list")) == 2
            opened.compact(force=True)  # without the layout of what is gone
            with Child(lambda: rebuild(sets)) as child:
                child.result()
            assert np.array_equal(opened.get("list")[1], array(2))
            assert np.array_equal(opened.get("dict")["x"], array(3))
            assert opened.stats().damaged == 0


def _delete_and_compact(sets: ArtifactSets, count: int) -> int:
    opened = open_set(sets)
    opened.delete_many(f"k{n}" for n in range(count))
    opened.flush()
    packs = opened.compact().packs
    opened.flush()
    return packs


def _pinned(opened: ArtifactSet) -> list[tuple[bytes, object]]:
    index = engine_of(opened).index
    return [(key, row) for key, row in index.entries_after(b"", 100) if row.is_pinned]


def _unlinked(folder: Path) -> list[str]:
    """Packs that have no name any more and that this process still keeps on the disk."""
    found = {os.readlink(f"/proc/self/fd/{name}") for name in _descriptors()}
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    found.update(line.split(maxsplit=5)[-1] for line in maps.splitlines())
    return [link for link in found if link.startswith(str(folder)) and ".pack (deleted)" in link]


def _descriptors() -> list[str]:
    return [n for n in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{n}")]


def test_a_replaced_artifact_whose_chunk_was_compacted_away_ends_no_pin(
    sets: ArtifactSets,
) -> None:
    """Its record is still there when the index is made again, in a pack with others."""
    with open_set(sets) as opened:
        opened.put("first", {"x": array(1)})
        opened.put("dead", {"x": array(9, 50_000)})
        opened.flush()
        engine_of(opened).seal()
        opened.put("key", {"x": array(2)})
        opened.pin("key")
        opened.put("key", {"x": array(1)})  # its chunk is that of "first"
        opened.put("large", {"x": array(3, 50_000)})
        opened.flush()
        engine_of(opened).seal()
        opened.put("key", {"x": array(4)})
        opened.delete_many(["first", "dead"])
        assert opened.compact().packs
        info = opened.describe()
    sets.rebuild(info)
    with open_set(sets) as opened:
        assert np.array_equal(opened.get("key")["x"], array(4))
        row = engine_of(opened).index.entry(b"\x02key")
        assert row is not None
        assert row.is_pinned


class TestOthersWithUncountedRecords:
    """A process that is stopped, with records that have no rows, is not waited for without end."""

    def test_by_command_it_is_an_error_and_nothing_is_changed(
        self, sets: ArtifactSets, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(artifacts_copying, "_PATIENCE", 0.2)
        with open_set(sets) as opened:
            fill(opened, 20)
            opened.delete_many(f"k{n}" for n in range(15))
            opened.flush()
            before = sorted(path.name for path in opened.path.glob("*.pack"))
            with lock(opened.path / "lock", exclusive=False), ThreadPoolExecutor(1) as pool:
                job = pool.submit(opened.compact)  # locks are those of threads
                with pytest.raises(LeaseTimeoutError):
                    job.result()
            assert sorted(path.name for path in opened.path.glob("*.pack")) == before
            assert opened.compact().packs == 1
            check(opened, set(range(15, 20)))

    def test_unasked_it_is_told_and_not_tried_again_at_once(
        self,
        sets: ArtifactSets,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr(artifacts_copying, "_PATIENCE", 0.2)
        with open_set(sets, pack_bytes=1 << 20) as opened:
            fill(opened, 40)
            with lock(opened.path / "lock", exclusive=False), ThreadPoolExecutor(1) as pool:
                pool.submit(remove_one_by_one, opened, 30).result()
            (told,) = [each for each in caplog.records if "was not compacted" in each.message]
            assert told.name == "smartcache.artifacts.bounds"
            check(opened, set(range(30, 40)))


def remove_one_by_one(opened: ArtifactSet, count: int) -> None:
    for n in range(count):
        opened.delete(f"k{n}")
        opened.flush()
