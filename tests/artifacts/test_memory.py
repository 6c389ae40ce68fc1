"""Values in memory: what a set would give, and never anything else; nobody can change them."""

from __future__ import annotations

import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smartcache.artifacts import ArtifactSet, ArtifactSets, Kept, Memory, register_codec
from smartcache.artifacts.engine import read as artifacts_read
from smartcache.errors import ArtifactError, ConfigError
from tests.artifacts.exact import exactly, forget_codecs
from tests.artifacts.opening import array, open_set, seal
from tests.artifacts.peer import Clock
from tests.artifacts.strategies import values
from tests.processes.children import Child


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sets(tmp_path: Path, clock: Clock) -> ArtifactSets:
    return ArtifactSets(tmp_path / "sets", clock=clock)


@pytest.fixture
def opened(sets: ArtifactSets) -> Iterator[ArtifactSet]:
    """A set whose folder has not changed for a while, so that a quick look is enough."""
    with open_set(sets, memory="1MB") as found:
        found.put("first", 0)
        found.delete("first")
        time.sleep(0.06)
        len(found)  # looks at it
        yield found


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The keys of artifacts that are read from the disk."""
    found: list[bytes] = []
    read_value = artifacts_read.read_value

    def noted(held: Any) -> object:  # noqa: ANN401
        found.append(held.key)
        return read_value(held)

    monkeypatch.setattr(artifacts_read, "read_value", noted)
    return found


def figures(memory: Memory | None) -> tuple[int, int, int]:
    assert memory is not None
    return memory.hits, memory.misses, len(memory)


class TestHits:
    def test_what_was_read_is_not_read_again(self, opened: ArtifactSet, reads: list[bytes]) -> None:
        opened.put("key", {"x": array(1), "n": [1, 2]}, metadata={"a": 1})
        first = opened.get("key")
        assert len(reads) == 1
        for _ in range(3):
            assert exactly(opened.get("key")) == exactly(first)
        found = opened.get_with_metadata("key")
        assert found is not None
        assert (exactly(found[0]), found[1]) == (exactly(first), {"a": 1})
        assert opened.get_or_compute("key", lambda: pytest.fail("computed"))["n"] == [1, 2]
        assert len(reads) == 1
        assert figures(opened.memory) == (5, 1, 1)
        assert opened.stats().hits == 6

    def test_what_was_put_is_read_once_from_the_disk(
        self, opened: ArtifactSet, reads: list[bytes]
    ) -> None:
        """So what is kept in memory is what the disk gives, types and all."""
        opened.put("key", {"x": memoryview(b"abc").tobytes(), "y": np.ones((3, 4)).T})
        assert figures(opened.memory)[2] == 0
        assert opened.get("key")["y"].flags.c_contiguous
        assert opened.get("key")["y"].flags.c_contiguous
        assert len(reads) == 1

    def test_none_is_a_value(self, opened: ArtifactSet, reads: list[bytes]) -> None:
        opened.put("key", None)
        for _ in range(3):
            assert opened.get("key", 5) is None
            assert opened.get_with_metadata("key") == (None, None)
        assert len(reads) == 1

    def test_computed_once_and_then_in_memory(
        self, opened: ArtifactSet, reads: list[bytes]
    ) -> None:
        calls: list[int] = []

        def compute() -> list[int]:
            calls.append(1)
            return [1]

        for _ in range(4):
            assert opened.get_or_compute("key", compute) == [1]
        assert calls == [1]
        assert len(reads) == 1  # what is returned is always what was kept

    def test_validate_is_asked_every_time(self, opened: ArtifactSet) -> None:
        opened.put("key", 1, metadata=1)
        asked = []

        def is_valid(sample: Any) -> bool:  # noqa: ANN401
            asked.append(sample.metadata)
            return bool(sample.metadata == 2)

        assert opened.get("key") == 1
        for _ in range(2):
            found = opened.get_or_compute("key", lambda: 2, metadata=2, validate=is_valid)
            assert found == 2
        assert asked == [1, 1, 2, 2]
        assert opened.get("key") == 2

    def test_two_sets_of_one_memory_do_not_mix(self, sets: ArtifactSets) -> None:
        memory = Memory("1MB")
        with (
            open_set(sets, "one", memory=memory) as one,
            open_set(sets, "two", memory=memory) as two,
        ):
            one.put("key", 1)
            two.put("key", 2)
            for _ in range(2):
                assert (one.get("key"), two.get("key")) == (1, 2)
        assert figures(memory) == (2, 2, 2)

    def test_without_memory_nothing_is_kept(self, sets: ArtifactSets, reads: list[bytes]) -> None:
        with open_set(sets) as opened:
            opened.put("key", 1)
            assert [opened.get("key"), opened.get("key")] == [1, 1]
            assert len(reads) == 2
            assert opened.memory is None


class TestCoherence:
    def test_a_put_replaces_it_at_once(self, opened: ArtifactSet) -> None:
        for n in range(20):
            opened.put("key", n, metadata=-n)
            assert opened.get("key") == n
            assert opened.get_with_metadata("key") == (n, -n)

    def test_so_do_deletes(self, opened: ArtifactSet) -> None:
        opened.put("key", 1)
        opened.get("key")
        opened.delete("key")
        assert opened.get("key") is None
        assert opened.get_with_metadata("key") is None
        opened.put("key", 2)
        opened.get("key")
        del opened["key"]
        assert opened.get("key") is None

    def test_changes_by_another_object_of_the_same_set_count(
        self, opened: ArtifactSet, sets: ArtifactSets
    ) -> None:
        opened.put("key", 1)
        opened.put("other", 1)
        with open_set(sets) as second:
            for n in range(20):
                opened.get("key")
                second.put("key", n)
                assert opened.get("key") == n
            second.delete("key")
            assert opened.get("key") is None
            assert opened.get("other") == 1

    @pytest.mark.parametrize("settled", [False, True])
    def test_changes_by_another_process_count(
        self, opened: ArtifactSet, sets: ArtifactSets, settled: bool
    ) -> None:
        """Also when the folder has not changed for a while, and when it has changed just now."""
        opened.put("key", 1)
        opened.put("gone", 1)
        seal(opened)
        if settled:
            time.sleep(0.1)
        assert (opened.get("key"), opened.get("gone")) == (1, 1)
        assert (opened.get("key"), opened.get("gone")) == (1, 1)

        def change() -> None:
            with open_set(sets) as theirs:
                theirs.put("key", 2)
                theirs.delete("gone")

        Child(change).result()
        assert (opened.get("key"), opened.get("gone", 5)) == (2, 5)

    def test_a_writer_in_another_process_is_followed_put_by_put(
        self, opened: ArtifactSet, sets: ArtifactSets, tmp_path: Path
    ) -> None:
        """What it has said to be put is there, at every moment, while its pack grows."""
        opened.put("key", 0)
        said = tmp_path / "said"
        said.write_text("0")

        def write() -> None:
            with open_set(sets) as theirs:
                for n in range(1, 200):
                    theirs.put("key", n)
                    said.write_text(str(n))

        child = Child(write)
        last = 0
        while last < 199:
            before = int(said.read_text() or 0)
            found = opened.get("key")
            assert found >= max(before, last)
            last = found
        child.result()

    def test_past_its_time_it_is_gone_from_memory_too(
        self, opened: ArtifactSet, clock: Clock
    ) -> None:
        opened.put("key", 1, ttl=60)
        opened.put("other", 1)
        assert (opened.get("key"), opened.get("other")) == (1, 1)
        clock.now += 59
        assert opened.get("key") == 1
        clock.now += 1
        assert opened.get("key") is None
        assert opened.get_with_metadata("key") is None
        assert opened.get("other") == 1

    def test_a_pinned_one_outlives_its_time_until_it_is_not_pinned(
        self, opened: ArtifactSet, clock: Clock
    ) -> None:
        opened.put("key", 1, ttl=60)
        opened.pin("key")
        clock.now += 100
        assert [opened.get("key"), opened.get("key")] == [1, 1]
        opened.unpin("key")
        assert opened.get("key") is None

    def test_compaction_takes_nothing_away(self, opened: ArtifactSet) -> None:
        for n in range(10):
            opened.put(f"k{n}", {"x": array(n), "n": n})
        wanted = {key: opened.get(key)["n"] for key in opened}
        opened.delete("k3")
        opened.compact(force=True)
        del wanted["k3"]
        assert {key: opened.get(key)["n"] for key in opened} == wanted

    def test_a_removed_set_gives_nothing(self, opened: ArtifactSet, sets: ArtifactSets) -> None:
        opened.put("key", 1)
        opened.get("key")
        Child(lambda: sets.plan_remove(sets.infos()).execute()).result()
        with pytest.raises(ArtifactError, match="was removed"):
            opened.get("key")

    def test_nor_does_a_closed_one(self, opened: ArtifactSet) -> None:
        opened.put("key", 1)
        opened.get("key")
        opened.close()
        with pytest.raises(ArtifactError, match="was closed"):
            opened.get("key")

    def test_reading_from_memory_is_a_use(self, sets: ArtifactSets, clock: Clock) -> None:
        """What is in use is not what was used least recently on the disk."""
        with open_set(sets, memory="1MB") as opened:
            for key in ("old", "used"):
                opened.put(key, {"x": array(len(key), 5000)})
                opened.get(key)
            for _ in range(5):
                clock.now += 3600
                opened.get("used")
            opened.flush()
            with open_set(sets, max_size=7000) as bounded:
                bounded.evict()
            assert list(opened) == ["used"]

    def test_a_child_begins_with_nothing(self, opened: ArtifactSet) -> None:
        opened.put("key", 1)
        opened.get("key")

        def work() -> tuple[int, object]:
            assert opened.memory is not None
            return len(opened.memory), opened.get("key")

        assert Child(work).result() == (0, 1)
        assert figures(opened.memory)[2] == 1

    def test_a_fork_in_the_middle_of_something_harms_nobody(self, opened: ArtifactSet) -> None:
        memory = opened.memory
        assert memory is not None
        opened.put("key", 1)
        with memory._gate:  # noqa: SLF001 - another thread has it at the fork
            child = Child(lambda: opened.get("key"))
            assert child.result() == 1


def mutated(value: Any) -> None:  # noqa: ANN401
    """Change everything in a value that can be changed."""
    if isinstance(value, dict):
        for item in value.values():
            mutated(item)
        value["new"] = 1
    elif isinstance(value, (list, tuple)):
        for item in value:
            mutated(item)
        if isinstance(value, list):
            value.append("new")
    elif hasattr(value, "shape"):  # an array or a tensor
        if value.shape and value.shape[0]:
            value[0] = 77
    elif isinstance(value, bytearray):
        value += b"new"
    elif isinstance(value, set):
        value.add("new")


class TestPrivate:
    def value(self) -> dict[str, Any]:
        import torch

        return {
            "ids": [1, 2, 3],
            "x": np.arange(4000),
            "t": torch.arange(4000),
            "small": np.arange(3),
            "deep": [{"list": [[1], [2, np.arange(3)]]}, (torch.arange(3), [1]), bytearray(b"abc")],
            "set": {1, 2},
        }

    def test_changing_what_was_got_changes_nothing(self, opened: ArtifactSet) -> None:
        opened.put("key", self.value(), metadata={"list": [1]})
        wanted = exactly(self.value())
        for _ in range(3):
            both = opened.get_with_metadata("key")
            assert both is not None
            assert exactly(both[0]) == wanted
            assert both[1] == {"list": [1]}
            mutated(both[0])
            mutated(both[1])
            mutated(opened.get("key"))
            mutated(opened.get_or_compute("key", lambda: pytest.fail("computed")))

    def test_nor_does_changing_what_was_put(self, opened: ArtifactSet) -> None:
        value = self.value()
        opened.put("key", value)
        mutated(value)
        assert exactly(opened.get("key")) == exactly(self.value())
        computed = self.value()
        opened.get_or_compute("other", lambda: computed)
        mutated(computed)
        assert exactly(opened.get("other")) == exactly(self.value())

    def test_views_are_shared_and_locked(self, opened: ArtifactSet) -> None:
        import torch

        opened.put(
            "key", {"x": np.arange(4000), "deep": [(np.arange(3),)], "t": torch.arange(4000)}
        )
        for _ in range(2):  # from the disk, then from memory
            views = opened.get("key", views=True)
            for view in (views["x"], views["deep"][0][0]):
                with pytest.raises(ValueError, match="read-only"):
                    view[0] = 5
                with pytest.raises(ValueError, match="WRITEABLE"):
                    view.flags.writeable = True
        again = opened.get("key", views=True)
        assert np.shares_memory(views["x"], again["x"])
        assert not np.shares_memory(opened.get("key")["x"], again["x"])
        views["t"][0] = 9  # torch has no locked tensors: it is a copy
        assert opened.get("key", views=True)["t"][0] == 0
        views["deep"].append(1)
        assert len(opened.get("key")["deep"]) == 1

    def test_views_without_memory_are_locked_too(self, sets: ArtifactSets) -> None:
        with open_set(sets) as opened:
            opened.put("key", {"x": np.arange(4000)})
            assert not opened.get("key", views=True)["x"].flags.writeable

    @given(values)
    def test_copies_are_exactly_equal(self, value: object) -> None:
        kept = Kept(value, value)
        assert exactly(kept.get()) == exactly(value)
        assert exactly(kept.get_metadata()) == exactly(value)
        assert exactly(kept.get()) == exactly(value)
        assert exactly(kept.views()) == exactly(value)
        assert kept.size >= 0

    def test_objects_of_codecs_are_copied(self, opened: ArtifactSet) -> None:
        class Crop:
            def __init__(self, box: list[int]) -> None:
                self.box = box

        register_codec("crop", Crop, lambda crop: crop.box, Crop)
        try:
            opened.put("key", {"crop": Crop([1, 2])})
            for _ in range(3):
                found = opened.get("key")["crop"]
                assert found.box == [1, 2]
                found.box.append(3)
        finally:
            forget_codecs()

    def test_what_cannot_be_copied_is_read_each_time(
        self, opened: ArtifactSet, reads: list[bytes]
    ) -> None:
        class Locked:
            def __init__(self, number: int) -> None:
                self.number = number
                self.lock = threading.Lock()

        register_codec("locked", Locked, lambda each: each.number, Locked)
        try:
            opened.put("key", Locked(3))
            assert [opened.get("key").number, opened.get("key").number] == [3, 3]
            assert len(reads) == 2
        finally:
            forget_codecs()


class TestBounds:
    def test_the_least_recently_used_goes_first(self) -> None:
        memory = Memory(10**6, max_count=3)
        for name in "abc":
            memory.keep(name, Kept(name))
        memory.find("a")
        memory.keep("d", Kept("d"))
        assert [name for name in "abcd" if name in memory] == ["a", "c", "d"]

    def test_bytes_are_bounded(self) -> None:
        memory = Memory(100_000)
        for n in range(50):
            memory.keep(n, Kept(np.zeros(1250)))
            assert memory.size <= 100_000
        assert 8 <= len(memory) <= 10
        assert 49 in memory

    def test_what_is_larger_than_all_of_it_is_not_kept(self) -> None:
        memory = Memory("10KB")
        memory.keep("small", Kept(1))
        memory.keep("large", Kept(np.zeros(100_000)))
        memory.keep("small", Kept(np.zeros(100_000)))
        assert len(memory) == memory.size == 0

    @given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3000), st.booleans()), max_size=60))
    def test_it_is_a_dict_with_an_order(self, acts: list[tuple[int, int, bool]]) -> None:
        memory = Memory(5000, max_count=4)
        model: dict[int, int] = {}
        for key, size, is_put in acts:
            if is_put:
                kept = Kept(bytes(size))
                model.pop(key, None)
                if kept.size <= 5000:
                    model[key] = kept.size
                memory.keep(key, kept)
                while sum(model.values()) > 5000 or len(model) > 4:
                    del model[next(iter(model))]
            elif size % 2:
                memory.drop(key)
                model.pop(key, None)
            elif (memory.find(key) is not None) == (key in model) and key in model:
                model[key] = model.pop(key)
            assert [key for key in range(6) if key in memory] == sorted(model)
            assert memory.size == sum(model.values())

    def test_sizes_are_about_those_of_the_interpreter(self) -> None:
        numbers = list(range(1000, 2000))
        for value, parts in (
            (numbers, numbers),
            ({"a": "x" * 5000}, ["x" * 5000]),
            (b"y" * 900, []),
        ):
            wanted = sys.getsizeof(value) + sum(map(sys.getsizeof, parts))
            assert wanted * 0.8 <= Kept(value).size <= wanted * 1.3 + 500
        assert 8000 <= Kept(np.zeros(1000)).size <= 9000

    @pytest.mark.parametrize("bad", [0, -1, "no size", True])
    def test_bad_bounds_are_refused(self, sets: ArtifactSets, bad: Any) -> None:  # noqa: ANN401
        with pytest.raises(ConfigError):
            open_set(sets, memory=bad)
        with pytest.raises(ConfigError):
            Memory("1MB", max_count=bad)

    def test_it_is_pickled_without_its_values(self, opened: ArtifactSet) -> None:
        opened.put("key", 1)
        opened.get("key")
        again = pickle.loads(pickle.dumps(opened))  # noqa: S301 - our own bytes
        with again:
            assert figures(again.memory) == (0, 0, 0)
            assert again.memory.max_size == 10**6
            assert again.get("key") == 1


class TestThreads:
    def test_many_read_and_write_at_once(
        self, sets: ArtifactSets, rounds: Callable[[int], int]
    ) -> None:
        """Nobody gets anything older than what was put before, nor a value of two puts."""
        with open_set(sets, memory=40_000, pack_bytes=100_000) as opened:
            said = dict.fromkeys("abcdef", 0)
            for key in said:
                opened.put(key, {"n": [0] * 50, "x": np.zeros(300)})

            def write(key: str) -> None:
                for n in range(1, rounds(150)):
                    opened.put(key, {"n": [n] * 50, "x": np.full(300, n)})
                    said[key] = n

            def read(seed: int) -> None:
                rng = np.random.default_rng(seed)
                while not all(job.done() for job in writing):
                    key = "abcdef"[rng.integers(6)]
                    before = said[key]
                    found = opened.get(key)
                    assert set(found["n"]) == set(found["x"].tolist())
                    assert found["n"][0] >= before
                    found["x"][:] = -1
                    found["n"].clear()

            with ThreadPoolExecutor(8) as pool:
                writing = [pool.submit(write, key) for key in "abc"]
                reading = [pool.submit(read, seed) for seed in range(4)]
                for job in (*writing, *reading):
                    job.result()
            memory = opened.memory
            assert memory is not None
            assert memory.size <= 40_000
            assert memory.hits

    def test_counts_are_exact(self, opened: ArtifactSet) -> None:
        opened.put("key", 1)
        opened.get("key")
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: opened.get("key"), range(4000)))
        assert figures(opened.memory) == (4000, 1, 1)


class Boxed:
    """An object that has a codec, and of which Python does not say what it takes."""

    def __init__(self, array: object) -> None:
        self.array = array

    def __deepcopy__(self, memo: object) -> Boxed:
        if self.array is None:
            raise RuntimeError("it cannot be copied")
        return Boxed(self.array)


def test_objects_of_codecs_count_by_their_tensors_and_may_refuse_to_be_copied(
    sets: ArtifactSets,
) -> None:
    register_codec("boxed", Boxed, lambda each: [each.array], lambda kept: Boxed(kept[0]))
    try:
        with open_set(sets, memory="100KB") as opened:
            for n in range(5):
                opened.put(f"k{n}", {"boxed": Boxed(array(n, 40_000))})
                opened.get(f"k{n}")
            memory = opened.memory
            assert memory is not None
            assert len(memory) == 2
            assert memory.size > 80_000
            opened.put("none", Boxed(None))
            assert opened.get("none").array is None
            assert "none" not in memory
    finally:
        forget_codecs()
