"""Equal tensors of a set are kept once."""

from __future__ import annotations

import numpy as np
import pytest

from tests.api import ArtifactSet, ArtifactSets
from tests.api import artifacts_writing as writing
from tests.artifacts.opening import array, open_set
from tests.artifacts.rows import check_rows
from tests.processes.children import Child

LARGE = 200_000


def on_disk(opened: ArtifactSet) -> int:
    return sum(path.stat().st_size for path in opened.path.glob("*.pack"))


class TestEqualTensors:
    def test_32_samples_with_one_embedding_cost_one(self, latents: ArtifactSet) -> None:
        for n in range(32):
            latents.put(f"k{n}", {"latent": array(n), "embedding": array(99, LARGE)})
        assert on_disk(latents) < LARGE + 32 * (4096 + 1000)
        assert latents.stats().saved == 31 * LARGE
        for n in range(32):
            assert np.array_equal(latents.get(f"k{n}")["embedding"], array(99, LARGE))

    def test_within_one_value(self, latents: ArtifactSet) -> None:
        latents.put("key", {"a": array(1, LARGE), "b": [array(1, LARGE), array(1, LARGE)]})
        assert on_disk(latents) < LARGE + 2000
        value = latents.get("key")
        assert np.array_equal(value["a"], array(1, LARGE))
        value["a"][:] = 0
        assert np.array_equal(value["b"][0], array(1, LARGE))
        latents.flush()
        check_rows(latents.path)

    def test_that_another_process_puts_while_this_one_writes(self, sets: ArtifactSets) -> None:
        """What was seen of the set is brought up to date with each group of rows."""
        with open_set(sets) as opened:
            opened.put("a", array(1, LARGE))
            opened.flush()

            def put() -> None:
                with open_set(sets) as other:
                    for n in range(3):
                        other.put(f"theirs{n}", array(100 + n, LARGE))

            for turn in range(2):
                with Child(put) as child:
                    child.result()
                opened.put(f"b{turn}", turn)
                opened.flush()
            before = on_disk(opened)
            for n in range(3):
                opened.put(f"ours{n}", array(100 + n, LARGE))
            assert on_disk(opened) - before < 3 * 1000
            opened.flush()
            assert opened.stats().chunks == 4
            check_rows(opened.path)

    def test_of_another_dtype_or_shape_or_library(self, latents: ArtifactSet) -> None:
        import torch

        latents.put("bytes", {"x": array(1, LARGE)})
        latents.put("torch", {"x": torch.from_numpy(array(1, LARGE)).reshape(2, -1)})
        latents.put("floats", {"x": array(1, LARGE).view(np.float32)})
        assert on_disk(latents) < LARGE + 3000
        value = latents.get("torch")["x"]
        assert torch.equal(value, torch.from_numpy(array(1, LARGE)).reshape(2, -1))
        assert latents.get("floats")["x"].dtype == np.float32

    def test_after_the_set_was_opened_again(self, sets: ArtifactSets) -> None:
        with open_set(sets) as opened:
            opened.put("one", {"x": array(1, LARGE)})
        with open_set(sets) as opened:
            opened.put("two", {"x": array(1, LARGE)})
            assert on_disk(opened) < LARGE + 2000

    def test_that_another_process_has_put(self, sets: ArtifactSets) -> None:
        with open_set(sets) as opened:
            opened.put("mine", 1)  # this process writes to a pack of its own
            with Child(lambda: _put(sets, "theirs")) as child:
                child.result()
            opened.put("mine", {"x": array(1, LARGE)})
            assert on_disk(opened) < LARGE + 3000
            assert np.array_equal(opened.get("mine")["x"], array(1, LARGE))

    def test_after_the_first_owner_was_deleted(self, latents: ArtifactSet) -> None:
        latents.put("one", {"x": array(1, LARGE)})
        latents.put("two", {"x": array(1, LARGE)})
        latents.delete("one")
        latents.flush()
        assert np.array_equal(latents.get("two")["x"], array(1, LARGE))
        latents.compact(force=True)
        assert np.array_equal(latents.get("two")["x"], array(1, LARGE))

    def test_come_back_to_life_when_they_are_put_again(self, latents: ArtifactSet) -> None:
        latents.put("one", {"x": array(1, LARGE)})
        latents.delete("one")
        latents.flush()
        latents.put("two", {"x": array(1, LARGE)})
        assert on_disk(latents) < LARGE + 2000
        latents.flush()
        check_rows(latents.path)
        assert np.array_equal(latents.get("two")["x"], array(1, LARGE))

    def test_views_of_a_large_storage_cost_their_own_bytes(self, latents: ArtifactSet) -> None:
        import torch

        storage = torch.arange(1_000_000)
        latents.put("key", {"x": storage[10:1010], "y": storage[::1000]})
        assert on_disk(latents) < 20_000
        assert torch.equal(latents.get("key")["y"], storage[::1000])

    def test_equal_checksums_are_not_enough(
        self, latents: ArtifactSet, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Every tensor gets the checksum 7 here; records say what they should all the same."""
        monkeypatch.setattr(writing, "checksum", lambda data: 7 if len(data) == 4096 else len(data))
        for n in range(4):
            latents.put(f"k{n}", {"x": array(n)})
        latents.flush()
        assert latents.stats().chunks == 4


def _put(sets: ArtifactSets, key: str) -> None:
    opened = open_set(sets)
    opened.put(key, {"x": array(1, LARGE)})
    opened.flush()
