"""Selections: artifacts by their position in a list of keys, as they were when it was made."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import resource
from typing import Any

import numpy as np
import pytest

from smartcache.artifacts import ArtifactSet, ArtifactSets, Selection
from smartcache.errors import ArtifactError, ArtifactNotFoundError, BatchShapeError
from tests.artifacts.exact import exactly
from tests.artifacts.opening import array, bytes_read, open_set, packs_of, seal, unlinked_of
from tests.processes.children import Child

COUNT = 12
KEYS = ["k3", "gone", "k0", "k3", "k11", "away"]


def value(n: int) -> dict[str, Any]:
    return {"x": array(n), "n": n, "crop": [n, 0]}


@pytest.fixture
def filled(latents: ArtifactSet) -> ArtifactSet:
    latents.put_many((f"k{n}", value(n)) for n in range(COUNT))
    return latents


def test_it_says_what_it_is(filled: ArtifactSet) -> None:
    assert repr(filled.select(KEYS)) == "<Selection of latents: 6 keys, 2 missing>"


def check(batch: dict[str, Any], *numbers: int) -> None:
    assert exactly(batch["x"]) == exactly(np.stack([array(n) for n in numbers]))
    assert batch["n"] == list(numbers)
    assert batch["crop"] == [[n, 0] for n in numbers]


class TestOrdinals:
    @pytest.mark.parametrize("ordinals", [1, [0.5], [[0]], ["k0"]])
    def test_anything_but_whole_numbers_is_refused(
        self, filled: ArtifactSet, ordinals: list[int]
    ) -> None:
        with pytest.raises(BatchShapeError, match="whole numbers"):
            filled.select(KEYS).read(ordinals)

    def test_are_positions_among_the_keys(self, filled: ArtifactSet) -> None:
        chosen = filled.select(KEYS)
        assert len(chosen) == len(KEYS)
        assert list(chosen) == list(chosen.keys) == KEYS
        check(chosen.read([4, 0, 2, 3, 0]), 11, 3, 0, 3, 3)
        check(chosen.read(np.array([2])), 0)
        assert chosen.read([]) == {}

    def test_of_missing_keys_are_told_and_refused(self, filled: ArtifactSet) -> None:
        chosen = filled.select(KEYS)
        assert chosen.missing.dtype == np.int64
        assert chosen.missing.tolist() == [1, 5]
        with pytest.raises(ArtifactNotFoundError) as caught:
            chosen.read([0, 5, 1])
        assert caught.value.keys == ("away", "gone")
        assert filled.select([]).missing.tolist() == []

    def test_of_an_empty_set_are_all_missing(self, latents: ArtifactSet) -> None:
        assert latents.select(["a", "b"]).missing.tolist() == [0, 1]

    @pytest.mark.parametrize("ordinal", [6, -7])
    def test_that_there_are_none_of_are_an_index_error(
        self, filled: ArtifactSet, ordinal: int
    ) -> None:
        with pytest.raises(IndexError):
            filled.select(KEYS).read([ordinal])

    def test_can_be_announced_with_those_that_are_missing(self, filled: ArtifactSet) -> None:
        chosen = filled.select(KEYS)
        chosen.announce(range(len(KEYS)))
        check(chosen.read([0, 2]), 3, 0)


class TestColumn:
    def test_is_a_field_of_all_or_of_some(self, filled: ArtifactSet) -> None:
        chosen = filled.select(["k3", "k0", "k3"])
        assert chosen.column("n") == [3, 0, 3]
        assert chosen.column("crop", [1, 1]) == [[0, 0], [0, 0]]

    def test_reads_no_tensor(self, filled: ArtifactSet) -> None:
        filled.put("large", {"x": array(1, 500_000), "n": 7, "crop": []})
        chosen = filled.select(["large"])
        before = bytes_read()
        assert chosen.column("n") == [7]
        assert bytes_read() - before < 50_000

    def test_of_a_tensor_or_of_none_is_refused(self, filled: ArtifactSet) -> None:
        chosen = filled.select(["k1"])
        with pytest.raises(BatchShapeError, match="'x' is a tensor"):
            chosen.column("x")
        with pytest.raises(BatchShapeError, match="k1 has no field 'y'"):
            chosen.column("y")


class TestRead:
    def test_into_memory_that_is_given(self, filled: ArtifactSet) -> None:
        chosen = filled.select(KEYS)
        first = chosen.read([0, 2])
        again = chosen.read([4, 3], out=first)
        assert again["x"] is first["x"]
        check(again, 11, 3)

    def test_of_different_shapes_is_an_error_or_a_list(self, filled: ArtifactSet) -> None:
        filled.put("odd", {"x": array(50, 100), "n": 50, "crop": []})
        chosen = filled.select(["k1", "odd"])
        with pytest.raises(BatchShapeError, match="odd"):
            chosen.read([0, 1])
        batch = chosen.read([1, 0], ragged="list")
        assert exactly(batch["x"]) == exactly([array(50, 100), array(1)])
        assert exactly(filled.get_batch(["odd", "k1"], ragged="list")) == exactly(batch)


class TestLater:
    """A selection shows what there was when it was made, as long as the packs are there."""

    def test_what_is_replaced_deleted_or_added_does_not_matter(self, filled: ArtifactSet) -> None:
        chosen = filled.select([*KEYS, "new"])
        filled.put("k3", value(50))
        filled.delete("k0")
        filled.put("new", value(51))
        check(chosen.read([0, 2]), 3, 0)
        assert chosen.missing.tolist() == [1, 5, 6]
        with filled.select([*KEYS, "new"]) as second:
            check(second.read([0, 6]), 50, 51)
            assert second.missing.tolist() == [1, 2, 5]

    @pytest.mark.parametrize("is_here", [True, False])
    def test_what_compaction_has_moved_is_looked_up_again(
        self, sets: ArtifactSets, is_here: bool
    ) -> None:
        with open_set(sets) as opened:
            opened.put_many((f"k{n}", value(n)) for n in range(COUNT))
            seal(opened)
            chosen = opened.select(["k1", "k2", "k3"])
            check(chosen.read([0]), 1)

            def change() -> int:
                with open_set(sets) as other:
                    other.put("k2", value(52))
                    other.delete("k3")
                    return other.compact(force=True).packs

            if is_here:
                assert change()
            else:
                with Child(change) as child:
                    assert child.result()
            check(chosen.read([0]), 1)
            check(chosen.read([1, 0]), 52, 1)
            with pytest.raises(ArtifactNotFoundError) as caught:
                chosen.read([2])
            assert caught.value.keys == ("k3",)
            assert unlinked_of(opened) == []  # its room is free

    def test_closed_it_says_so(self, filled: ArtifactSet) -> None:
        with filled.select(KEYS) as chosen:
            pass
        with pytest.raises(ArtifactError, match="selection was closed"):
            chosen.read([0])

    def test_of_a_closed_set_it_says_so(self, sets: ArtifactSets) -> None:
        with open_set(sets) as opened:
            opened.put("k0", value(0))
            chosen = opened.select(["k0"])
        with pytest.raises(ArtifactError, match="closed"):
            chosen.read([0])


def test_it_is_read_in_a_spawned_process(filled: ArtifactSet) -> None:
    chosen = filled.select(KEYS)
    chosen.read([0])
    assert len(pickle.dumps(chosen)) < 2000
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        batch, missing = pool.apply(_read_there, (chosen, [4, 0]))
    check(batch, 11, 3)
    assert missing == [1, 5]


def _read_there(chosen: Selection, ordinals: list[int]) -> tuple[dict[str, Any], list[int]]:
    return chosen.read(ordinals), chosen.missing.tolist()


def test_packs_need_few_descriptors_however_many_they_are(sets: ArtifactSets) -> None:
    def read() -> int:
        most = len(os.listdir("/proc/self/fd")) + 25
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        with open_set(sets) as opened:
            keys = sorted(opened)
            numbers = [int(key[1:]) for key in keys]
            with opened.select(keys) as chosen:
                assert chosen.column("n") == numbers
                chosen.announce(range(len(keys)))
                for _ in range(2):
                    for start in range(0, len(keys), 12):
                        part = range(start, min(start + 12, len(keys)))
                        assert chosen.read(part)["n"] == numbers[start : start + 12]
            opened.announce(keys)
            assert opened.stats().artifacts == len(keys)
            return len(packs_of(opened))

    with open_set(sets, pack_bytes=600) as opened:
        opened.put_many((f"k{n}", {"x": array(n, 1500), "n": n}) for n in range(60))
    with Child(read) as child:
        assert child.result() == 60
