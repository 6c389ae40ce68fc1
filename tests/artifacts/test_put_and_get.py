"""Put, get, replace, delete; keys; metadata; what is returned is the caller's own."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from smartcache.artifacts import ArtifactSet, ArtifactSets, compute_key
from smartcache.errors import (
    ArtifactError,
    ArtifactNotFoundError,
    BadKeyError,
    UnsupportedValueError,
)
from tests.artifacts.exact import exactly
from tests.artifacts.opening import (
    array,
    bytes_read,
    check_whole,
    holders_of,
    open_set,
    packs_of,
    size_of,
)
from tests.processes.children import Child, talking
from tests.store.files import row

if TYPE_CHECKING:
    import torch


@cache
def values() -> dict[str, object]:
    import torch

    return {
        "latent": {
            "latent": torch.randn(4, 32, 32).half(),
            "crop": [0, 0, 64, 64],
            "caption": "a cat",
        },
        "nested": {
            "cond": [[torch.randn(2, 600), {"pooled": np.arange(900.0)}], (None, True)],
            3: b"",
        },
        "list": [torch.randn(700), torch.ones(2), "text"],
        "tensor": torch.arange(2000, dtype=torch.bfloat16),
        "array": np.arange(5000, dtype=">i4").reshape(50, 100),
        "small tensor": torch.tensor(1.5),
        "none": None,
        "number": 1 << 70,
        "empty dict": {},
        "empty tensor": torch.empty(0, 4),
    }


class TestPutAndGet:
    def test_a_value_comes_back_as_it_was(self, sets: ArtifactSets) -> None:
        """Verified, then out of a mapping, and from a set that was closed."""
        with open_set(sets) as opened:
            opened.put_many(values())
        for _ in range(2):
            with open_set(sets) as opened:
                for name, value in values().items():
                    for _ in range(3):
                        assert exactly(opened.get(name)) == exactly(value), name
                    opened.put(name, value)
                    assert exactly(opened.get(name)) == exactly(value), name

    def test_a_put_replaces(self, latents: ArtifactSet) -> None:
        latents.put("key", {"x": array(1)})
        latents.put("key", {"x": array(2)})
        assert np.array_equal(latents.get("key")["x"], array(2))
        assert len(latents) == 1

    def test_a_missing_key_gives_the_default_or_an_error_that_names_it(
        self, latents: ArtifactSet
    ) -> None:
        assert latents.get("one") is None
        assert latents.get("one", 7) == 7
        with pytest.raises(ArtifactNotFoundError, match="has no artifact one") as caught:
            latents["one"]
        assert isinstance(caught.value, KeyError)
        assert caught.value.keys == ("one",)
        with pytest.raises(ArtifactNotFoundError):
            latents.metadata("one")

    def test_put_many_counts(self, latents: ArtifactSet) -> None:
        assert latents.put_many((f"k{n}", {"x": array(n)}) for n in range(200)) == 200
        assert latents.put_many({"k0": {"x": 1}, "new": {"x": 2}}) == 2
        assert len(latents) == 201
        assert latents.get("k0") == {"x": 1}

    def test_a_value_that_cannot_be_kept_leaves_the_old_one(self, latents: ArtifactSet) -> None:
        latents.put("key", 1)
        with pytest.raises(UnsupportedValueError) as caught:
            latents.put("key", {"hooks": [object()]})
        assert "hooks" in caught.value.path
        assert latents.get("key") == 1

    def test_a_closed_set_says_so(self, sets: ArtifactSets) -> None:
        opened = open_set(sets)
        opened.put("key", 1)
        opened.close()
        opened.close()
        assert holders_of(opened.path) == []
        acts: list[Callable[[], object]] = [
            lambda: opened.put("key", 1),
            lambda: opened.get("key"),
            lambda: opened.delete("key"),
            lambda: opened.is_pinned("key"),
            lambda: opened.select(["key"]),
            lambda: len(opened),
            opened.stats,
            opened.compact,
            opened.verify,
            opened.failures,
        ]
        for act in acts:
            with pytest.raises(ArtifactError, match="closed"):
                act()

    def test_two_objects_of_one_set_see_the_same_at_once(self, sets: ArtifactSets) -> None:
        with open_set(sets) as one, open_set(sets) as other:
            one.put("key", 1)
            assert other.get("key") == 1
            one.close()
            other.put("key", 2)
            assert other.get("key") == 2

    def test_figures_add_up_after_many_changes(self, sets: ArtifactSets) -> None:
        with open_set(sets, pack_bytes=30_000) as opened:
            for n in range(80):
                opened.put(f"k{n % 40}", {"x": array(n % 7), "n": n})
                if n % 5 == 0:
                    opened.delete(f"k{n % 11}")
            check_whole(opened)
        with open_set(sets) as opened:
            check_whole(opened)


class TestOtherProcesses:
    def test_see_every_change_at_once_in_both_directions(self, sets: ArtifactSets) -> None:
        """No flush and no pause between a change and the look of the other process."""
        with open_set(sets) as opened, talking(_change_as_told, sets) as talk:
            for n in range(4):
                time.sleep(0.06 * (n % 2))  # at first nobody relies on the time of the folder
                opened.put("ours", {"x": array(n), "n": n})
                assert talk("get", "ours") == n
                assert talk("put", "theirs", n) is None
                assert opened.get("theirs")["n"] == n
                assert np.array_equal(opened.get("theirs")["x"], array(n))
            assert sorted(opened) == talk("keys") == ["ours", "theirs"]
            opened.delete("ours")
            assert talk("get", "ours") is None
            assert talk("delete", "theirs") is None
            assert "theirs" not in opened
            assert talk("keys") == list(opened) == []

    def test_are_seen_at_once_when_they_go_on_with_a_pack_that_was_left(
        self, sets: ArtifactSets
    ) -> None:
        def write(number: int) -> None:
            with open_set(sets) as there:
                there.put("key", number)

        write(0)
        with open_set(sets) as opened:
            for n in range(1, 4):
                assert opened.get("key") == n - 1
                time.sleep(0.06)
                assert opened.get("key") == n - 1
                with Child(partial(write, n)) as child:
                    child.result()
                assert opened.get("key") == n
            assert len(packs_of(opened)) == 1

    def test_replace_what_this_one_has_read_many_times(self, sets: ArtifactSets) -> None:
        """What is verified, mapped and counted as used is still not answered from memory."""
        with open_set(sets) as opened:
            opened.put("key", {"n": 1, "x": array(1)})
            for _ in range(40):
                assert opened.get("key")["n"] == 1
                assert opened.get_batch(["key"])["n"] == [1]
            with Child(lambda: open_set(sets).put("key", {"n": 2, "x": array(2)})) as child:
                child.result()
            assert opened.get("key")["n"] == 2
            assert np.array_equal(opened.get_batch(["key"])["x"][0], array(2))
            assert opened["key"]["n"] == 2


class TestDelete:
    def test_a_deleted_artifact_is_gone_and_can_be_put_again(self, latents: ArtifactSet) -> None:
        latents.put("key", 1)
        assert latents.delete("key")
        assert not latents.delete("key")
        assert "key" not in latents
        assert latents.get("key") is None
        assert len(latents) == 0
        with pytest.raises(ArtifactNotFoundError):
            del latents["key"]
        latents.put("key", 2)
        assert latents.get("key") == 2

    def test_delete_many_counts_those_that_were_there(self, latents: ArtifactSet) -> None:
        latents.put_many({"a": 1, "b": 2})
        assert latents.delete_many(["a", "missing", "b", "a"]) == 2


class TestMapping:
    def test_keys_come_back_as_they_were_given(self, latents: ArtifactSet) -> None:
        keys = {
            compute_key({"n": 1}),
            "a path/like.name",
            "K" * 64,
            "\udc80 lone",
            "日本",
            "a" * 1024,
        }
        latents.put_many((key, 1) for key in keys)
        assert set(latents) == set(latents.keys()) == keys
        assert all(key in latents for key in keys)

    def test_iteration_goes_on_while_artifacts_come_and_go(self, latents: ArtifactSet) -> None:
        latents.put_many((f"{n:05d}", n) for n in range(500))
        seen = []
        for key in latents:
            seen.append(key)
            latents.delete(key)
            latents.put(f"!{key}", 0)
        assert sorted(seen) == [f"{n:05d}" for n in range(500)]

    def test_iteration_misses_nothing_that_is_moved_meanwhile(self, sets: ArtifactSets) -> None:
        with open_set(sets, pack_bytes=20_000) as opened:
            opened.put_many((f"k{n}", {"x": array(n)}) for n in range(20))
            opened.delete_many(["k3", "k8", "k13", "k18"])
            keys = iter(opened)
            seen = [next(keys)]
            assert opened.compact(force=True).packs > 2
            assert sorted([*seen, *keys]) == sorted(opened)

    def test_a_bad_key_is_refused_with_a_hint(self, latents: ArtifactSet) -> None:
        bad: list[Any] = ["", "x" * 1025, None, 7, b"bytes", ("a",)]
        for key in bad:
            with row(key), pytest.raises(BadKeyError) as caught:
                latents.put(key, 1)
            assert "compute_key" in caught.value.hint
            with row(key), pytest.raises(BadKeyError):
                latents.get(key)
        assert 7 not in latents


class TestPrivateCopies:
    def test_changing_what_was_returned_changes_nothing(self, latents: ArtifactSet) -> None:
        import torch

        tensor = torch.randn(50, 50)
        latents.put("key", {"large": tensor, "small": torch.ones(3), "list": [1]})
        for _ in range(3):
            value = latents.get("key")
            sample = latents["key"]
            one: torch.Tensor = sample["large"]  # type: ignore[assignment]
            batch = latents.get_batch(["key"])
            assert torch.equal(value["large"], tensor)
            assert torch.equal(one, tensor)
            assert torch.equal(batch["large"][0], tensor)
            assert torch.equal(value["small"], torch.ones(3))
            for each in (value["large"], value["small"], one, batch["large"], batch["small"]):
                each.zero_()
            value["list"].append(2)

    def test_changing_what_was_put_changes_nothing(self, latents: ArtifactSet) -> None:
        import torch

        tensor = torch.ones(1000)
        small = torch.ones(3)
        latents.put("key", {"large": tensor, "small": small})
        tensor.zero_()
        small.zero_()
        value = latents.get("key")
        assert value["large"].min() == 1
        assert value["small"].min() == 1


class TestMetadata:
    def test_metadata_comes_back_and_is_replaced_by_a_put(self, latents: ArtifactSet) -> None:
        for about in ({"file": "cat.png", "size": (3, 4)}, {"b": 2}, None):
            latents.put("key", {"x": array(1)}, metadata=about)
            assert latents.metadata("key") == latents["key"].metadata == about

    def test_metadata_is_read_without_the_tensors(self, latents: ArtifactSet) -> None:
        latents.put("key", {"x": array(1, 100_000)}, metadata="about it")
        before = bytes_read()
        assert latents.metadata("key") == "about it"
        assert bytes_read() - before < 50_000

    def test_a_large_tensor_is_no_metadata(self, latents: ArtifactSet) -> None:
        with pytest.raises(UnsupportedValueError) as caught:
            latents.put("key", 1, metadata={"x": array(1)})
        assert caught.value.path == "metadata"
        assert "key" not in latents


class TestStats:
    def test_figures_of_a_set(self, latents: ArtifactSet) -> None:
        latents.put("a", {"x": array(1)})
        latents.put("b", {"x": array(1)})
        latents.put("c", {"x": array(2)})
        latents.delete("c")
        latents.pin("a")
        found = latents.stats()
        assert (found.artifacts, found.pinned, found.packs) == (2, 1, 1)
        assert found.saved == 4096
        assert found.logical == found.live + 4096
        assert 4096 < found.dead < 4096 + 512
        assert found.on_disk == size_of(latents)

    def test_hits_and_misses_are_counted_and_the_set_is_named(self, latents: ArtifactSet) -> None:
        latents.put("a", 1)
        latents.get("a")
        latents.get("b")
        stats, found = latents.stats(), latents.describe()
        assert (stats.hits, stats.misses) == (1, 1)
        assert (found.name, found.id, found.artifacts) == ("latents", latents.id, 1)
        assert found.path == latents.path
        assert found.fingerprint == latents.fingerprint
        assert found.problem == ""
        assert found.used_at is not None


def _change_as_told(sets: ArtifactSets, talk: Connection) -> None:
    with open_set(sets) as opened:
        while (told := talk.recv())[0] != "end":
            what, *words = told
            answer: object = None
            if what == "get":
                found = opened.get(words[0])
                answer = None if found is None else found["n"]
            elif what == "put":
                opened.put(words[0], {"x": array(words[1]), "n": words[1]})
            elif what == "delete":
                opened.delete(words[0])
            else:
                answer = sorted(opened)
            talk.send(answer)
        talk.send(None)
