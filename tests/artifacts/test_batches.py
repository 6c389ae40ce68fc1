"""Batches: stacked tensors, lists of anything else, in the order of the keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.api import ArtifactNotFoundError, ArtifactSet, ArtifactSets, BatchShapeError, check_key
from tests.artifacts.exact import exactly
from tests.artifacts.opening import array, engine_of, open_set

if TYPE_CHECKING:
    import torch


COUNT = 12


def value(n: int, *, dtype: torch.dtype | None = None) -> dict[str, Any]:
    import torch

    made = torch.Generator().manual_seed(n)
    return {
        "latent": torch.randn(4, 20, 20, generator=made).to(dtype or torch.float16),
        "ids": np.arange(n, n + 400),
        "time": torch.tensor([n, 1.0]),
        "flag": np.float32(n),
        "crop": [n, 0, 8, 8],
        "caption": f"number {n}",
        "cond": [torch.full((300,), float(n)), {"pooled": None}],
    }


@pytest.fixture
def filled(latents: ArtifactSet) -> ArtifactSet:
    latents.put_many((f"k{n}", value(n)) for n in range(COUNT))
    return latents


KEYS = [f"k{n}" for n in (5, 0, 11, 5, 3, 3, 7)]
NUMBERS = [int(key[1:]) for key in KEYS]


def check(batch: dict[str, Any], numbers: list[int]) -> None:
    """Compare a batch with what torch and numpy stack."""
    import torch

    values = [value(n) for n in numbers]
    assert list(batch) == list(values[0])
    assert exactly(batch["latent"]) == exactly(torch.stack([each["latent"] for each in values]))
    assert exactly(batch["ids"]) == exactly(np.stack([each["ids"] for each in values]))
    assert exactly(batch["time"]) == exactly(torch.stack([each["time"] for each in values]))
    for name in ("flag", "crop", "caption", "cond"):
        assert exactly(batch[name]) == exactly([each[name] for each in values])


class TestBatch:
    @pytest.mark.parametrize("is_flushed", [False, True])
    @pytest.mark.parametrize("threads", [1, 2, 8])
    def test_keeps_the_order_and_allows_one_key_twice(
        self, filled: ArtifactSet, threads: int, is_flushed: bool
    ) -> None:
        if is_flushed:
            filled.flush()
        for _ in range(3):  # verified, mapped, and once more
            check(filled.get_batch(KEYS, threads=threads), NUMBERS)

    @pytest.mark.parametrize("threads", [1, 2])
    def test_a_large_batch_is_read_by_several_threads(
        self, latents: ArtifactSet, threads: int
    ) -> None:
        latents.put_many((f"k{n}", {"x": array(n, 300_000), "n": n}) for n in range(16))
        keys = [f"k{n}" for n in reversed(range(16))]
        for _ in range(2):
            batch = latents.get_batch(keys, threads=threads)
            assert np.array_equal(batch["x"], [array(n, 300_000) for n in reversed(range(16))])
            assert batch["n"] == list(reversed(range(16)))

    def test_an_error_in_one_thread_reaches_the_caller(self, latents: ArtifactSet) -> None:
        latents.put_many((f"k{n}", {"x": array(n, 300_000)}) for n in range(16))
        latents.flush()
        engine_of(latents).packs.close()
        next(latents.path.glob("*.pack")).unlink()
        with pytest.raises(OSError, match="damaged"):
            latents.get_batch([f"k{n}" for n in range(16)], threads=2)

    def test_reads_from_many_packs(self, sets: ArtifactSets) -> None:
        with open_set(sets, pack_bytes=12_000) as opened:
            opened.put_many((f"k{n}", value(n)) for n in range(COUNT))
            opened.flush()
            assert len(list(opened.path.glob("*.pack"))) > 3
            check(opened.get_batch(KEYS), NUMBERS)

    def test_reads_tensors_that_lie_in_other_packs(self, sets: ArtifactSets) -> None:
        with open_set(sets) as opened:
            opened.put_many((f"old{n}", {"x": array(n)}) for n in range(6))
            opened.flush()
            engine_of(opened).seal()
            opened.put_many((f"k{n}", {"x": array(n), "y": array(n + 50)}) for n in range(6))
            for _ in range(3):
                batch = opened.get_batch([f"k{n}" for n in range(6)])
                assert np.array_equal(batch["x"], [array(n) for n in range(6)])
                assert np.array_equal(batch["y"], [array(n + 50) for n in range(6)])

    def test_reads_on_after_a_compaction(self, filled: ArtifactSet) -> None:
        check(filled.get_batch(KEYS), NUMBERS)
        filled.delete_many(["k1", "k2", "k4"])
        assert filled.compact(force=True).packs == 1
        check(filled.get_batch(KEYS), NUMBERS)

    def test_of_no_keys_is_empty(self, filled: ArtifactSet) -> None:
        assert filled.get_batch([]) == {}

    def test_missing_keys_are_named(self, filled: ArtifactSet) -> None:
        with pytest.raises(ArtifactNotFoundError) as caught:
            filled.get_batch(["k1", "gone", "k2", "away"])
        assert caught.value.keys == ("gone", "away")

    def test_pinned_is_ignored_without_a_device(self, filled: ArtifactSet) -> None:
        import torch

        if torch.cuda.is_available():
            pytest.skip("there is a device")
        check(filled.get_batch(KEYS, pinned=True), NUMBERS)

    def test_announced_artifacts_can_be_missing(self, filled: ArtifactSet) -> None:
        filled.announce(["k1", "gone", *KEYS])
        filled.flush()
        filled.announce(iter(KEYS))
        check(filled.get_batch(KEYS), NUMBERS)


class TestOut:
    def test_buffers_are_reused(self, filled: ArtifactSet) -> None:
        first = filled.get_batch(KEYS)
        second = filled.get_batch(["k1"] * len(KEYS), out=first)
        for name in ("latent", "time"):
            assert second[name].data_ptr() == first[name].data_ptr()
        assert second["ids"] is first["ids"]
        check(second, [1] * len(KEYS))

    def test_some_buffers_are_enough(self, filled: ArtifactSet) -> None:
        import torch

        mine = torch.zeros(len(KEYS), 4, 20, 20, dtype=torch.float16)
        batch = filled.get_batch(KEYS, out={"latent": mine})
        assert batch["latent"] is mine
        check(batch, NUMBERS)

    def test_a_longer_buffer_is_filled_in_part(self, filled: ArtifactSet) -> None:
        import torch

        mine = torch.full((20, 4, 20, 20), 7.0, dtype=torch.float16)
        batch = filled.get_batch(KEYS, out={"latent": mine})
        assert batch["latent"].shape == (len(KEYS), 4, 20, 20)
        assert batch["latent"].data_ptr() == mine.data_ptr()
        assert torch.equal(mine[len(KEYS) :], torch.full_like(mine[len(KEYS) :], 7.0))
        check(batch, NUMBERS)

    @pytest.mark.parametrize(
        "make",
        [
            lambda torch: torch.zeros(3, 4, 20, 20, dtype=torch.float16),
            lambda torch: torch.zeros(7, 4, 20, 20, dtype=torch.bfloat16),
            lambda torch: torch.zeros(7, 4, 20, 21, dtype=torch.float16),
            lambda torch: torch.zeros(7, 20, 20, 4, dtype=torch.float16).permute(0, 3, 1, 2),
            lambda torch: np.zeros((7, 4, 20, 20), np.float16),
            lambda torch: [0] * 7,
        ],
        ids=["short", "dtype", "shape", "strided", "library", "list"],
    )
    def test_a_buffer_that_does_not_fit_is_refused(
        self, filled: ArtifactSet, make: Callable[[object], object]
    ) -> None:
        import torch

        with pytest.raises(BatchShapeError):
            filled.get_batch(KEYS, out={"latent": make(torch)})


class TestDifferentShapes:
    @pytest.mark.parametrize(
        ("make", "words"),
        [
            (lambda torch: np.zeros((2, 5000)), "<f8 [2, 5000] (numpy)"),
            (lambda torch: np.zeros(5000, np.float32), "<f4 [5000] (numpy)"),
            (lambda torch: torch.zeros(5000, dtype=torch.float64), "float64 [5000] (torch)"),
            (lambda torch: None, "no tensor"),
        ],
    )
    def test_the_field_and_the_keys_are_named(
        self, latents: ArtifactSet, make: Callable[[object], object], words: str
    ) -> None:
        import torch

        latents.put("even", {"x": np.zeros(5000)})
        latents.put("odd", {"x": make(torch)})
        with pytest.raises(BatchShapeError) as caught:
            latents.get_batch(["even", "even", "odd"])
        text = str(caught.value)
        assert "'x'" in text
        assert "even" in text
        assert "odd" in text
        assert words in text

    def test_different_fields_are_named(self, latents: ArtifactSet) -> None:
        latents.put_many({"a": {"x": 1}, "b": {"x": 1, "y": 2}})
        with pytest.raises(BatchShapeError, match="'y'"):
            latents.get_batch(["a", "b"])

    def test_what_is_no_dict_is_named(self, latents: ArtifactSet) -> None:
        latents.put_many({"a": {"x": 1}, "b": [1]})
        with pytest.raises(BatchShapeError, match="b is not a dict"):
            latents.get_batch(["a", "b"])

    def test_lists_may_differ_in_structure(self, latents: ArtifactSet) -> None:
        import torch

        latents.put_many({"a": {"x": [1, "two"]}, "b": {"x": {"three": torch.ones(600)}}})
        batch = latents.get_batch(["b", "a"])
        assert exactly(batch["x"]) == exactly([{"three": torch.ones(600)}, [1, "two"]])

    def test_fields_in_another_order_are_the_same_fields(self, latents: ArtifactSet) -> None:
        import torch

        one, two = torch.zeros(500), torch.ones(500)
        latents.put_many({"a": {"x": one, "y": two, "n": 1}, "b": {"n": 2, "y": one, "x": two}})
        batch = latents.get_batch(["a", "b"])
        assert torch.equal(batch["x"], torch.stack([one, two]))
        assert torch.equal(batch["y"], torch.stack([two, one]))
        assert batch["n"] == [1, 2]


class TestReplacedMeanwhile:
    """The artifacts were looked up; before they are read, one is replaced and its pack is gone."""

    def test_by_another_shape_it_is_read_anew_and_not_taken_for_damaged(
        self, latents: ArtifactSet
    ) -> None:
        engine = engine_of(latents)
        for n in range(3):
            latents.put(f"k{n}", {"x": array(n, 5000)})
        latents.flush()
        real = engine.need

        def need(keys: Any) -> Any:  # noqa: ANN401
            found = real(keys)
            engine.need = real  # type: ignore[method-assign]
            for n in range(3):
                latents.put(f"k{n}", {"x": array(10 + n, 3000)})
            latents.compact(force=True)
            return found

        engine.need = need  # type: ignore[method-assign]
        found = latents.get_batch(["k0", "k1", "k2"])
        assert exactly(found["x"]) == exactly(np.stack([array(10 + n, 3000) for n in range(3)]))
        assert len(latents) == 3
        assert latents.stats().damaged == 0

    def test_by_the_same_shape_the_new_value_is_given(self, latents: ArtifactSet) -> None:
        engine = engine_of(latents)
        latents.put("a", {"x": array(1, 5000), "n": 1})
        latents.flush()
        (old,) = engine.need([check_key("a")])
        latents.put("a", {"x": array(2, 5000), "n": 2})
        latents.compact(force=True)
        real = engine.need

        def need(_keys: Any) -> Any:  # noqa: ANN401
            engine.need = real  # type: ignore[method-assign]
            return [old]

        engine.need = need  # type: ignore[method-assign, assignment]
        found = latents.get_batch(["a"])
        assert exactly(found["x"][0]) == exactly(array(2, 5000))
        assert found["n"] == [2]
