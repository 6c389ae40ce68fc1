"""Samples and handles: nothing is read before it is asked for, and it stays what it was."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from smartcache.artifacts import ArtifactSet, ArtifactSets, Handle, Sample
from smartcache.errors import ArtifactError, ArtifactGoneError, ArtifactNotFoundError
from tests.artifacts.exact import exactly
from tests.artifacts.opening import array, bytes_read, holders_of, open_set, packs_of, seal
from tests.processes.children import Child

if TYPE_CHECKING:
    import torch


@functools.cache
def whole() -> dict[object, object]:
    import torch

    return {
        "latent": torch.randn(4, 40, 40),
        "brain": torch.randn(60, 20).bfloat16(),
        "small": torch.tensor([1.0, 2.0]),
        "ids": np.arange(3000).reshape(30, 100),
        "crop": [0, 0, 512, 512],
        "nested": [{"deep": torch.ones(900)}, "text"],
        7: None,
    }


@pytest.fixture
def sample(latents: ArtifactSet) -> Sample:
    latents.put("key", whole(), metadata={"n": 1})
    return latents["key"]


class TestLazy:
    def test_structure_is_known_and_no_tensor_is_read_for_it(self, sets: ArtifactSets) -> None:
        with open_set(sets) as opened:
            opened.put("key", {**whole(), "latent": np.zeros((4, 400, 400), "f4")})
        with open_set(sets) as opened:
            before = bytes_read()
            sample = opened["key"]
            assert list(sample) == list(sample.keys()) == list(whole())
            assert len(sample) == len(whole())
            assert "latent" in sample
            assert "other" not in sample
            assert sample.handle("latent").shape == (4, 400, 400)
            assert sample.handle("brain").dtype == "bfloat16"
            assert sample.handle("small").nbytes == 8
            assert "<f4 [4, 400, 400]" in repr(sample.handle("latent"))
            assert sample["crop"] == whole()["crop"]
            assert bytes_read() - before < 100_000

    def test_all_of_it_is_read_for_the_first_tensor_and_only_what_is_wanted_after_it(
        self, sets: ArtifactSets
    ) -> None:
        with open_set(sets) as opened:
            opened.put("key", {number: array(number, 1 << 16) for number in range(8)})
        with open_set(sets) as opened:
            sample = opened["key"]
            before = bytes_read()
            for number in range(8):
                assert np.array_equal(sample[number], array(number, 1 << 16))  # type: ignore[arg-type]
            assert bytes_read() - before < 17 << 16

    @pytest.mark.parametrize("name", ["latent", "brain", "small", "ids", "crop", "nested", 7])
    def test_an_item_is_what_was_put(self, sample: Sample, name: object) -> None:
        assert exactly(sample[name]) == exactly(whole()[name])

    def test_the_whole_value_is_what_was_put(self, sample: Sample) -> None:
        assert exactly(sample.value()) == exactly(whole())
        assert exactly(dict(sample)) == exactly(whole())

    def test_an_item_that_is_not_there_is_a_key_error(self, sample: Sample) -> None:
        with pytest.raises(KeyError):
            sample["other"]
        assert sample.get("other", 5) == 5

    def test_only_tensors_have_handles(self, sample: Sample) -> None:
        with pytest.raises(ArtifactError, match="not a tensor"):
            sample.handle("crop")

    def test_a_value_that_is_no_dict_has_no_items(self, latents: ArtifactSet) -> None:
        import torch

        latents.put("list", [1, torch.ones(500)])
        sample = latents["list"]
        with pytest.raises(ArtifactError, match="not a dict"):
            len(sample)
        assert exactly(sample.value()) == exactly([1, torch.ones(500)])

    def test_samples_of_one_artifact_are_equal_until_it_is_replaced(
        self, latents: ArtifactSet, sample: Sample
    ) -> None:
        assert sample == latents["key"]
        assert hash(sample) == hash(latents["key"])
        latents.put("key", whole())
        assert sample != latents["key"]


class TestViews:
    @pytest.mark.parametrize("name", ["latent", "small", "ids"])
    def test_a_view_is_right_and_read_only(self, sample: Sample, name: str) -> None:
        view = sample.handle(name).numpy()
        assert np.array_equal(view, np.asarray(whole()[name]))
        with pytest.raises(ValueError, match="read-only"):
            view[...] = 0

    def test_a_view_of_a_dtype_that_numpy_has_not_shows_its_bits(self, sample: Sample) -> None:
        import torch

        brain: torch.Tensor = whole()["brain"]  # type: ignore[assignment]
        view = sample.handle("brain").numpy()
        assert view.dtype == np.uint16
        assert np.array_equal(view, brain.view(torch.int16).numpy().view(np.uint16))

    def test_a_view_outlives_its_artifact(self, latents: ArtifactSet) -> None:
        latents.put("key", {"x": array(1)})
        view = latents["key"].handle("x").numpy()
        latents.delete("key")
        latents.put_many((f"k{n}", {"x": array(n + 2)}) for n in range(5))
        latents.compact(force=True)
        latents.close()
        gc.collect()
        assert np.array_equal(view, array(1))


class TestStaysReadable:
    @pytest.mark.parametrize("is_read_before", [False, True])
    def test_after_delete_and_compaction(
        self, latents: ArtifactSet, sample: Sample, is_read_before: bool
    ) -> None:
        if is_read_before:
            sample.value()
        latents.delete("key")
        assert latents.compact(force=True).packs == 1
        assert packs_of(latents) == []
        assert exactly(sample.value()) == exactly(whole())
        assert exactly(sample["latent"]) == exactly(whole()["latent"])
        assert sample.metadata == {"n": 1}

    def test_after_a_replacement(self, latents: ArtifactSet, sample: Sample) -> None:
        latents.put("key", {"latent": 0}, metadata={"n": 2})
        latents.compact(force=True)
        assert exactly(sample.value()) == exactly(whole())
        assert sample.metadata == {"n": 1}

    def test_after_the_set_was_closed(self, sets: ArtifactSets) -> None:
        with open_set(sets) as opened:
            opened.put("key", whole())
            sample = opened["key"]
        assert exactly(sample.value()) == exactly(whole())

    def test_when_another_process_deletes_and_compacts(self, sets: ArtifactSets) -> None:
        with open_set(sets) as opened:
            opened.put_many({"key": {"x": array(1), "n": 5}, "other": {"x": array(2), "n": 6}})
            seal(opened)
            sample = opened["key"]

            def remove() -> int:
                with open_set(sets) as there:
                    there.delete("key")
                    return there.compact(force=True).packs

            with Child(remove) as child:
                assert child.result()
            assert "key" not in opened
            assert np.array_equal(sample["x"], array(1))  # type: ignore[arg-type]
            assert opened.get("other")["n"] == 6


class TestPickled:
    def test_a_sample_and_a_handle_come_back(self, sample: Sample) -> None:
        again = pickle.loads(pickle.dumps(sample))  # noqa: S301 - our own bytes
        handle = pickle.loads(pickle.dumps(sample.handle("latent")))  # noqa: S301 - our own bytes
        assert again == sample
        assert exactly(again.value()) == exactly(whole())
        assert again.metadata == {"n": 1}
        assert handle.shape == (4, 40, 40)
        assert exactly(handle.tensor()) == exactly(whole()["latent"])
        assert len(pickle.dumps(sample)) < 500

    def test_a_handle_of_a_small_tensor_comes_back(self, sample: Sample) -> None:
        handle = copy.deepcopy(sample.handle("small"))
        assert exactly(handle.tensor()) == exactly(whole()["small"])
        assert np.array_equal(handle.numpy(), [1.0, 2.0])

    @pytest.mark.parametrize("what", ["delete", "replace"])
    def test_is_gone_after_delete_or_replacement(
        self, latents: ArtifactSet, sample: Sample, what: str
    ) -> None:
        pickled = pickle.dumps((sample, sample.handle("latent")))
        if what == "delete":
            latents.delete("key")
        else:
            latents.put("key", whole())
        again: Sample
        handle: Handle
        again, handle = pickle.loads(pickled)  # noqa: S301 - our own bytes
        with pytest.raises(ArtifactGoneError, match="gone" if what == "delete" else "replaced"):
            again.value()
        with pytest.raises(ArtifactGoneError):
            handle.numpy()
        with pytest.raises(ArtifactNotFoundError):
            assert handle.shape

    def test_a_set_comes_back_and_writes(self, tmp_path: Path) -> None:
        sets = ArtifactSets(tmp_path, max_size=10**9, ttl=3600)
        with open_set(sets) as opened:
            opened.put("key", whole())
            with pickle.loads(pickle.dumps(opened)) as again:  # noqa: S301 - our own bytes
                assert exactly(again.get("key")) == exactly(whole())
                again.put("other", 1)
            assert opened.get("other") == 1
            pickled = pickle.dumps(opened)

            def put() -> str:
                with pickle.loads(pickled) as there:  # noqa: S301 - our own bytes
                    there.put("theirs", 2)
                    return repr(there.path)

            with Child(put) as child:
                assert child.result() == repr(opened.path)
            assert opened.get("theirs") == 2

    def test_a_sample_that_is_gone_lets_go_of_its_set(self, sets: ArtifactSets) -> None:
        with open_set(sets) as opened:
            opened.put("key", whole())
            pickled = pickle.dumps(opened["key"])
            path = opened.path
        again = pickle.loads(pickled)  # noqa: S301 - our own bytes
        assert exactly(again.value()) == exactly(whole())
        assert holders_of(path)
        del again
        gc.collect()
        until = time.monotonic() + 20
        while holders_of(path):
            assert time.monotonic() < until
            time.sleep(0.01)

    def test_is_read_in_another_process(self, sample: Sample) -> None:
        pickled = pickle.dumps(sample)
        with Child(lambda: exactly(pickle.loads(pickled).value())) as child:  # noqa: S301 - our own bytes
            assert child.result() == exactly(whole())
