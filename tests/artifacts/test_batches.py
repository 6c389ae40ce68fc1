"""Batches: stacked tensors, lists of anything else, in the order of the keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from smartcache.artifacts import ArtifactSet, ArtifactSets, register_codec
from smartcache.artifacts.engine import read as artifacts_read
from smartcache.artifacts.keys import check_key
from smartcache.errors import (
    ArtifactNotFoundError,
    BadKeyError,
    BatchShapeError,
    DamagedArtifactError,
    LayoutError,
)
from tests.artifacts.exact import exactly, forget_codecs
from tests.artifacts.opening import array, engine_of, open_set, packs_of
from tests.store.files import row

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
    def test_keeps_the_order_and_allows_one_key_twice(self, filled: ArtifactSet) -> None:
        """Verified, mapped, and once more; also if artifacts are announced that are not there."""
        for threads in (1, 2, 8, 8):
            check(filled.get_batch(KEYS, threads=threads), NUMBERS)
        filled.announce(["k1", "gone", *KEYS])
        filled.announce(iter(KEYS))
        check(filled.get_batch(KEYS), NUMBERS)
        assert filled.get_batch([]) == {}

    def test_a_large_batch_is_read_by_several_threads(self, latents: ArtifactSet) -> None:
        """An error in one of them reaches the caller."""
        latents.put_many((f"k{n}", {"x": array(n, 300_000), "n": n}) for n in range(16))
        keys = [f"k{n}" for n in reversed(range(16))]
        for threads in (1, 2, 2):
            batch = latents.get_batch(keys, threads=threads)
            assert np.array_equal(batch["x"], [array(n, 300_000) for n in reversed(range(16))])
            assert batch["n"] == list(reversed(range(16)))
        latents.put_many((f"new{n}", {"x": array(20 + n, 300_000)}) for n in range(16))
        (pack,) = packs_of(latents)
        data = bytearray(pack.read_bytes())
        data[data.index(array(31, 300_000).tobytes()) + 77] ^= 1
        pack.write_bytes(data)
        with pytest.raises(DamagedArtifactError, match="new11 of latents is damaged"):
            latents.get_batch([f"new{n}" for n in range(16)], threads=2)

    def test_reads_from_many_packs(self, sets: ArtifactSets) -> None:
        with open_set(sets, pack_bytes=12_000) as opened:
            opened.put_many((f"k{n}", value(n)) for n in range(COUNT))
            assert len(packs_of(opened)) > 3
            check(opened.get_batch(KEYS), NUMBERS)

    def test_reads_on_after_a_compaction(self, filled: ArtifactSet) -> None:
        check(filled.get_batch(KEYS), NUMBERS)
        filled.delete_many(["k1", "k2", "k4"])
        assert filled.compact(force=True).packs == 1
        check(filled.get_batch(KEYS), NUMBERS)

    def test_missing_keys_are_named(self, filled: ArtifactSet) -> None:
        with pytest.raises(ArtifactNotFoundError) as caught:
            filled.get_batch(["k1", "gone", "k2", "away"])
        assert caught.value.keys == ("gone", "away")

    def test_one_key_is_not_taken_for_many_of_one_letter(self, latents: ArtifactSet) -> None:
        latents.put("a", {"x": 1})
        for call in (
            latents.get_batch, latents.select, latents.announce, latents.delete_many,
            lambda key: latents.compute_many(key, list),
        ):  # fmt: skip
            with pytest.raises(BadKeyError, match="one key where several are expected"):
                call("a")
        assert list(latents) == ["a"]

    def test_pinned_is_ignored_without_a_device(self, filled: ArtifactSet) -> None:
        import torch

        if torch.cuda.is_available():
            pytest.skip("there is a device")
        check(filled.get_batch(KEYS, pinned=True), NUMBERS)


class TestOut:
    def test_buffers_are_reused(self, filled: ArtifactSet) -> None:
        first = filled.get_batch(KEYS)
        second = filled.get_batch(["k1"] * len(KEYS), out=first)
        for name in ("latent", "time"):
            assert second[name].data_ptr() == first[name].data_ptr()
        assert second["ids"] is first["ids"]
        check(second, [1] * len(KEYS))

    def test_some_buffers_are_enough_and_a_longer_one_is_filled_in_part(
        self, filled: ArtifactSet
    ) -> None:
        import torch

        for length in (len(KEYS), 20):
            mine = torch.full((length, 4, 20, 20), 7.0, dtype=torch.float16)
            batch = filled.get_batch(KEYS, out={"latent": mine})
            assert batch["latent"].shape == (len(KEYS), 4, 20, 20)
            assert batch["latent"].data_ptr() == mine.data_ptr()
            assert bool((mine[len(KEYS) :] == 7).all())
            check(batch, NUMBERS)

    def test_a_buffer_that_does_not_fit_is_refused(self, filled: ArtifactSet) -> None:
        import torch

        half = torch.float16
        buffers = {
            "short": torch.zeros(3, 4, 20, 20, dtype=half),
            "dtype": torch.zeros(7, 4, 20, 20, dtype=torch.bfloat16),
            "shape": torch.zeros(7, 4, 20, 21, dtype=half),
            "strided": torch.zeros(7, 20, 20, 4, dtype=half).permute(0, 3, 1, 2),
            "library": np.zeros((7, 4, 20, 20), np.float16),
            "list": [0] * 7,
        }
        for name, buffer in buffers.items():
            with row(name), pytest.raises(BatchShapeError):
                filled.get_batch(KEYS, out={"latent": buffer})


class TestDifferentShapes:
    def test_the_field_and_the_keys_are_named(self, latents: ArtifactSet) -> None:
        import torch

        latents.put("even", {"x": np.zeros(5000)})
        odd = {
            "<f8 [2, 5000] (numpy)": np.zeros((2, 5000)),
            "<f4 [5000] (numpy)": np.zeros(5000, np.float32),
            "float64 [5000] (torch)": torch.zeros(5000, dtype=torch.float64),
            "no tensor": None,
        }
        for words, other in odd.items():
            latents.put("odd", {"x": other})
            with row(words), pytest.raises(BatchShapeError) as caught:
                latents.get_batch(["even", "even", "odd"])
            for word in ("'x'", "even", "odd", words):
                assert word in str(caught.value)

    def test_different_fields_and_what_is_no_dict_are_named(self, latents: ArtifactSet) -> None:
        latents.put_many({"a": {"x": 1}, "b": {"x": 1, "y": 2}, "c": [1]})
        with pytest.raises(BatchShapeError, match="'y'"):
            latents.get_batch(["a", "b"])
        with pytest.raises(BatchShapeError, match="c is not a dict"):
            latents.get_batch(["a", "c"])

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


def test_what_is_replaced_between_the_look_up_and_the_read_is_read_as_it_was(
    latents: ArtifactSet,
) -> None:
    """The pack is held: it is neither taken for damaged nor mixed with what came later."""
    latents.put_many((f"k{n}", {"x": array(n, 5000)}) for n in range(3))
    held = artifacts_read.hold(engine_of(latents), [check_key(f"k{n}") for n in range(3)])
    latents.put_many((f"k{n}", {"x": array(10 + n, 3000)}) for n in range(3))
    assert latents.compact(force=True).packs
    found = artifacts_read.read_batch(engine_of(latents), held)
    assert exactly(found["x"]) == exactly(np.stack([array(n, 5000) for n in range(3)]))
    again = latents.get_batch(["k0", "k1", "k2"])
    assert exactly(again["x"]) == exactly(np.stack([array(10 + n, 3000) for n in range(3)]))
    assert latents.stats().damaged == 0


class TestCodecThatFails:
    @pytest.fixture(autouse=True)
    def _codecs(self) -> Iterator[None]:
        yield
        forget_codecs()

    @pytest.mark.parametrize("is_verified", [False, True])
    def test_deletes_nothing(self, latents: ArtifactSet, is_verified: bool) -> None:
        """The fault is in the program that reads, not in what is kept."""

        class Box:
            is_broken = False

            def __init__(self, number: int) -> None:
                if self.is_broken:
                    raise ValueError("a fault of the decoder")
                self.number = number

        register_codec("box", Box, lambda box: box.number, Box)
        latents.put_many({f"k{n}": {"x": array(n), "box": Box(n)} for n in range(3)})
        if is_verified:
            latents.get_batch(["k0", "k1"])
        Box.is_broken = True
        reads: list[Callable[[], object]] = [
            lambda: latents.get_batch(["k0", "k1"]),
            lambda: latents.get("k0"),
            lambda: latents["k0"]["box"],
            lambda: latents.select(["k0", "k1"]).read([0, 1]),
            lambda: latents.select(["k0"]).column("box"),
        ]
        for read in reads:
            with pytest.raises(LayoutError, match="a fault of the decoder"):
                read()
        Box.is_broken = False
        assert [box.number for box in latents.get_batch(["k0", "k1", "k2"])["box"]] == [0, 1, 2]
