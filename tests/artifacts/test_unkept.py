"""What was computed and cannot be kept reaches whoever asked for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from smartcache.artifacts import ArtifactSet, ArtifactSets
from smartcache.cache import SmartCache
from smartcache.errors import ConfigError, StoreUnwritableError
from tests.artifacts.opening import array, engine_of, open_set
from tests.processes.children import Child
from tests.store.small_disks import Disk, in_own_namespace

SIZE = 64 << 10


class Unknown:
    """Of a type that has no codec."""

    def __init__(self, number: int = 7) -> None:
        self.number = number


class TestUnstorableObjects:
    def test_are_returned_with_one_warning_that_says_where_and_what_to_do(
        self, latents: ArtifactSet, caplog: pytest.LogCaptureFixture
    ) -> None:
        for number in range(3):
            value = latents.get_or_compute("key", partial(box, number))
            assert value["x"][1].number == number
            assert "key" not in latents
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        for part in ("key of latents is not kept", "x[1]", "Unknown", "register a codec"):
            assert part in record.message
        assert latents.get_or_compute("key", lambda: 1) == 1

    def test_are_returned_by_memoised_functions(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with SmartCache(tmp_path / "store") as cache:

            @cache.memoize()
            def make(number: int) -> object:
                return Unknown(number)

            assert [make(number).number for number in (1, 2, 1)] == [1, 2, 1]  # type: ignore[attr-defined]
        assert len(caplog.records) == 1

    def test_stop_neither_the_other_keys_of_a_call_nor_the_next_batches(
        self, latents: ArtifactSet, caplog: pytest.LogCaptureFixture
    ) -> None:
        def compute(keys: list[str]) -> list[object]:
            return [Unknown() if key in ("k1", "k4") else key for key in keys]

        result = latents.compute_many([f"k{n}" for n in range(6)], compute, batch=2)
        assert result.computed == ["k0", "k2", "k3", "k5"]
        assert sorted(result.unstored) == ["k1", "k4"]
        assert all(isinstance(value, Unknown) for value in result.unstored.values())
        assert not result.failed
        assert sorted(latents) == result.computed
        assert len(caplog.records) == 1

    def test_let_those_who_wait_compute_in_their_turn(self, sets: ArtifactSets) -> None:
        def ask() -> int:
            with open_set(sets) as opened:
                value: Unknown = opened.get_or_compute("key", Unknown)
                return value.number

        children = [Child(ask) for _ in range(3)]
        assert [child.result() for child in children] == [7, 7, 7]
        start = threading.Barrier(4)
        with open_set(sets) as opened, ThreadPoolExecutor(4) as pool:

            def ask_too(_: int) -> int:
                start.wait()
                value: Unknown = opened.get_or_compute("key", Unknown)
                return value.number

            assert list(pool.map(ask_too, range(4))) == [7] * 4
            assert engine_of(opened).key_locks.busy("key") is None


def test_a_time_to_live_that_makes_no_sense_is_refused_before_anything_is_computed(
    latents: ArtifactSet,
) -> None:
    with pytest.raises(ConfigError):
        latents.get_or_compute("key", lambda: pytest.fail("computed"), ttl=-1)
    with pytest.raises(ConfigError):
        latents.compute_many(["key"], lambda _: pytest.fail("computed"), ttl=-1)


class TestDisks:
    def test_results_reach_the_caller_on_a_full_disk_and_are_kept_once_there_is_room(
        self, tmp_path: Path
    ) -> None:
        def check(cache: SmartCache, disk: Disk) -> None:
            @cache.memoize(name="made")
            def make(number: int) -> np.ndarray:
                return array(number, SIZE)

            @cache.memoize(name="first")
            def make_first(number: int) -> np.ndarray:
                return array(number, SIZE)

            make(0)
            with cache.artifacts("latents", fingerprint={}) as latents:
                latents.put("k0", array(0, SIZE))
                disk.fill()
                for number in (1, 2, 3):
                    found = latents.get_or_compute(f"k{number}", partial(array, number, SIZE))
                    assert np.array_equal(found, array(number, SIZE))
                    assert np.array_equal(make(number), array(number, SIZE))
                    assert np.array_equal(make_first(number), array(number, SIZE))
                with pytest.raises(ValueError, match="no pixels"):
                    latents.get_or_compute("bad", fail, remember_failures=True)
                disk.clear()
                assert "k1" not in latents
                make_first(1)
                assert list(make_first.artifacts()) == [make_first.key(1)]
                assert np.array_equal(latents.get_or_compute("k1", lambda: array(9)), array(9))
                assert np.array_equal(latents.get("k1"), array(9))

        self.run(tmp_path, check)

    def test_many_stop_where_nothing_more_can_be_kept_and_lose_nothing(
        self, tmp_path: Path
    ) -> None:
        def check(cache: SmartCache, disk: Disk) -> None:
            with cache.artifacts("latents", fingerprint={}) as latents:
                latents.put("k0", array(0, SIZE))
                disk.fill(but=20)
                asked: list[str] = []

                def compute(keys: list[str]) -> list[object]:
                    asked.extend(keys)
                    return [array(int(key[1:]), SIZE) for key in keys]

                keys = [f"k{n}" for n in range(1, 40)]
                result = latents.compute_many(keys, compute, batch=4)
                assert 4 <= len(asked) <= 8
                assert sorted([*result.computed, *result.unstored]) == sorted(asked)
                for key, value in result.unstored.items():
                    assert np.array_equal(value, array(int(key[1:]), SIZE))
                assert result.failed.keys() == set(keys) - set(asked)
                assert all("No space left" in reason for reason in result.failed.values())
                disk.clear()
                assert not latents.compute_many(keys, compute, batch=4).failed
                assert set(keys) <= set(latents)

        self.run(tmp_path, check)

    def test_results_reach_the_caller_on_a_disk_that_became_read_only(self, tmp_path: Path) -> None:
        def work() -> None:
            disk = Disk(tmp_path / "disk", 4 << 20)
            sets = ArtifactSets(disk.point / "sets")
            with open_set(sets) as opened:
                opened.put("k0", 0)
            with open_set(sets) as opened:
                disk.make_read_only()
                assert opened.get_or_compute("k0", lambda: pytest.fail("computed")) == 0
                assert opened.get_or_compute("k1", lambda: 1) == 1
                with pytest.raises(StoreUnwritableError):
                    opened.compute_many(["k2"], lambda _: pytest.fail("computed"))

        in_own_namespace(work)

    def run(self, tmp_path: Path, check: Callable[[SmartCache, Disk], None]) -> None:
        def work() -> None:
            disk = Disk(tmp_path / "disk", 12 << 20)
            with SmartCache(disk.point / "store") as cache:
                check(cache, disk)

        in_own_namespace(work)


def box(number: int) -> object:
    return {"x": [1, Unknown(number)]}


def fail() -> None:
    raise ValueError("no pixels")
