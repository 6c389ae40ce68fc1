"""Equal tensors that one process puts into a pack are kept once."""

from __future__ import annotations

import numpy as np
import pytest

from smartcache.artifacts import ArtifactSet, ArtifactSets
from smartcache.artifacts.engine import write as artifacts_write
from tests.artifacts.opening import array, check_whole, open_set, seal, size_of

LARGE = 200_000


class TestEqualTensors:
    def test_32_samples_with_one_embedding_cost_one(self, latents: ArtifactSet) -> None:
        for n in range(32):
            latents.put(f"k{n}", {"latent": array(n), "embedding": array(99, LARGE)})
        assert size_of(latents) < LARGE + 32 * (4096 + 1000)
        assert latents.stats().saved == 31 * LARGE
        for n in range(32):
            assert np.array_equal(latents.get(f"k{n}")["embedding"], array(99, LARGE))

    def test_within_one_value(self, latents: ArtifactSet) -> None:
        latents.put("key", {"a": array(1, LARGE), "b": [array(1, LARGE), array(1, LARGE)]})
        assert size_of(latents) < LARGE + 2000
        value = latents.get("key")
        assert np.array_equal(value["a"], array(1, LARGE))
        value["a"][:] = 0
        assert np.array_equal(value["b"][0], array(1, LARGE))

    def test_of_another_dtype_or_shape_or_library(self, latents: ArtifactSet) -> None:
        import torch

        latents.put("bytes", {"x": array(1, LARGE)})
        latents.put("torch", {"x": torch.from_numpy(array(1, LARGE)).reshape(2, -1)})
        latents.put("floats", {"x": array(1, LARGE).view(np.float32)})
        assert size_of(latents) < LARGE + 3000
        value = latents.get("torch")["x"]
        assert torch.equal(value, torch.from_numpy(array(1, LARGE)).reshape(2, -1))
        assert latents.get("floats")["x"].dtype == np.float32

    def test_outlive_their_first_owner_in_every_compaction(self, sets: ArtifactSets) -> None:
        with open_set(sets) as opened:
            opened.put("first", {"x": array(1, LARGE)})
            opened.put("second", {"x": array(1, LARGE), "y": array(2, LARGE)})
            opened.put("third", {"a": array(2, LARGE), "b": [array(1, LARGE)]})
            opened.delete("first")
            size = size_of(opened)
            for gone in ("none", "dead", "second"):
                opened.put("dead", {"x": array(3, LARGE)})
                opened.delete_many(["dead", gone])
                assert opened.compact(force=True).packs
                assert size_of(opened) < size + 2000
                assert np.array_equal(opened.get("third")["a"], array(2, LARGE))
                assert np.array_equal(opened.get("third")["b"][0], array(1, LARGE))
                check_whole(opened)
        with open_set(sets) as opened:
            assert np.array_equal(opened.get("third")["b"][0], array(1, LARGE))

    def test_are_counted_as_saved_until_their_owners_go(self, latents: ArtifactSet) -> None:
        for n in range(4):
            latents.put(f"k{n}", {"n": n, "x": array(1, LARGE)})
        assert latents.stats().saved == 3 * LARGE
        latents.delete_many(["k0", "k1"])  # the pack has the tensor in the record of k0
        for _ in range(2):
            found = latents.stats()
            assert found.saved == LARGE
            assert LARGE < found.live < LARGE + 1000
            assert found.logical == found.live + LARGE
            assert found.dead < 1000
            seal(latents)
        latents.compact(force=True)
        assert latents.stats().saved == LARGE
        latents.delete("k2")
        assert latents.stats().saved == 0

    def test_views_of_a_large_storage_cost_their_own_bytes(self, latents: ArtifactSet) -> None:
        import torch

        storage = torch.arange(1_000_000)
        latents.put("key", {"x": storage[10:1010], "y": storage[::1000]})
        assert size_of(latents) < 20_000
        assert torch.equal(latents.get("key")["y"], storage[::1000])

    def test_equal_checksums_are_not_enough(
        self, latents: ArtifactSet, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Every tensor gets the checksum 7 here, and none is taken for another."""
        monkeypatch.setattr(
            artifacts_write, "checksum", lambda data: 7 if len(data) == 4096 else len(data)
        )
        for n in range(4):
            latents.put(f"k{n}", {"x": array(n), "y": array(n + 50)})
        assert latents.stats().saved == 0
        assert size_of(latents) > 8 * 4096
