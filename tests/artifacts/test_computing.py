"""`get_or_compute` and `compute_many`: once for all who ask; failures, validation, damage."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from smartcache.artifacts import ArtifactSet, ArtifactSets, Computed, Sample
from smartcache.artifacts.keys import check_key
from smartcache.errors import ArtifactError, ConfigError, RememberedFailureError, SmartcacheError
from tests.artifacts.opening import array, engine_of, open_set, packs_of
from tests.processes.children import Child
from tests.store.files import row

Advance = Callable[[float], None]


class Work:
    """A computation that counts how often it is done."""

    def __init__(self, *values: object, seconds: float = 0) -> None:
        self.values = values
        self.seconds = seconds
        self.count = 0

    def __call__(self) -> object:
        self.count += 1
        time.sleep(self.seconds)
        value = self.values[min(self.count, len(self.values)) - 1]
        if isinstance(value, BaseException):
            raise value
        return value


def never(_: object = None) -> NoReturn:
    pytest.fail("computed again")


class TestOnce:
    def test_what_was_computed_is_kept_with_its_metadata_and_not_computed_again(
        self, latents: ArtifactSet
    ) -> None:
        """What is returned is what was kept: the caller's own."""
        made = np.zeros(5000)
        value = latents.get_or_compute("key", lambda: {"x": made}, metadata={"by": "me"})
        value["x"][:] = 1
        assert made.max() == latents.get_or_compute("key", never)["x"].max() == 0
        assert latents.metadata("key") == {"by": "me"}

    def test_16_threads_compute_once(self, latents: ArtifactSet) -> None:
        work = Work({"x": array(1)}, seconds=0.1)
        start = threading.Barrier(16)

        def ask(_: int) -> bool:
            start.wait()
            value = latents.get_or_compute("key", work)
            return bool(np.array_equal(value["x"], array(1)))

        with ThreadPoolExecutor(16) as pool:
            assert all(pool.map(ask, range(16)))
        assert work.count == 1

    def test_threads_compute_different_keys_at_once(self, latents: ArtifactSet) -> None:
        both = threading.Barrier(2)

        def compute() -> int:
            both.wait(timeout=10)  # breaks unless the other computes at the same time
            return 1

        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(lambda k: latents.get_or_compute(k, compute), "ab")) == [1, 1]

    def test_a_computation_may_ask_for_another_and_is_told_if_that_is_itself(
        self, latents: ArtifactSet
    ) -> None:
        def outer() -> int:
            return 1 + int(latents.get_or_compute("inner", lambda: 2))

        assert latents.get_or_compute("outer", outer) == 3
        with pytest.raises(SmartcacheError, match="wait for itself"):
            latents.get_or_compute("key", lambda: latents.get_or_compute("key", never))

    def test_an_expired_artifact_is_computed_again(
        self, latents: ArtifactSet, pass_time: Advance
    ) -> None:
        work = Work(1, 2)
        assert latents.get_or_compute("key", work, ttl=60) == 1
        pass_time(61)
        assert latents.get_or_compute("key", work, ttl=60) == 2

    def test_what_ends_before_it_is_read_is_returned_to_who_has_computed_it(
        self, tmp_path: Path
    ) -> None:
        """The machine may be busy in between."""
        times = itertools.count(1000.0, 5)
        sets = ArtifactSets(tmp_path / "sets", clock=lambda: next(times))
        for name, memory in (("one", None), ("two", "1MB")):
            with row(memory), open_set(sets, name, memory=memory) as opened:
                assert opened.get_or_compute("key", lambda: [1], ttl=0.01) == [1]
                assert opened.get("key") is None

    def test_what_is_larger_than_the_bound_is_returned_all_the_same(
        self, sets: ArtifactSets
    ) -> None:
        with open_set(sets, max_size=1000) as opened:
            value = opened.get_or_compute("key", lambda: {"x": array(1)})
            assert np.array_equal(value["x"], array(1))


class TestFailure:
    def test_reaches_the_caller_and_frees_the_key(self, latents: ArtifactSet) -> None:
        work = Work(ZeroDivisionError("by nought"), 5)
        with pytest.raises(ZeroDivisionError, match="by nought"):
            latents.get_or_compute("key", work)
        assert engine_of(latents).key_locks.busy("key") is None
        assert latents.failures() == []
        assert latents.get_or_compute("key", work) == 5

    def test_of_one_thread_lets_the_next_one_try(self, latents: ArtifactSet) -> None:
        work = Work(ValueError(), ValueError(), 5, seconds=0.02)
        start = threading.Barrier(5)

        def ask(_: int) -> object:
            start.wait()
            try:
                return latents.get_or_compute("key", work)
            except ValueError:
                return "failed"

        with ThreadPoolExecutor(5) as pool:
            found = list(pool.map(ask, range(5)))
        assert work.count == 3
        assert sorted(map(str, found)) == ["5", "5", "5", "failed", "failed"]


class TestRemembered:
    def test_it_is_not_tried_again(self, latents: ArtifactSet) -> None:
        work = Work(ValueError("a bad file"))
        with pytest.raises(ValueError, match="a bad file"):
            latents.get_or_compute("key", work, remember_failures=True)
        with pytest.raises(RememberedFailureError) as caught:
            latents.get_or_compute("key", never, remember_failures=True)
        assert caught.value.reason == "ValueError: a bad file"
        assert caught.value.count == 1
        assert "forget_failure" in caught.value.hint
        assert work.count == 1

    def test_it_is_known_after_the_set_was_opened_again(self, sets: ArtifactSets) -> None:
        with open_set(sets) as opened, pytest.raises(ValueError):  # noqa: PT011
            opened.get_or_compute("key", Work(ValueError("x")), remember_failures=True)
        with open_set(sets) as opened:
            with pytest.raises(RememberedFailureError):
                opened.get_or_compute("key", never, remember_failures=True)
            (failure,) = opened.failures()
            assert (failure.key, failure.reason, failure.count) == ("key", "ValueError: x", 1)
            assert abs(failure.failed_at - time.time()) < 60
            assert opened.get_or_compute("good", lambda: 1, remember_failures=True) == 1

    def test_it_can_be_forgotten_and_who_does_not_ask_for_it_tries_again(
        self, latents: ArtifactSet
    ) -> None:
        for key in ("forgotten", "not asked"):
            work = Work(ValueError(), 5)
            with pytest.raises(ValueError):  # noqa: PT011
                latents.get_or_compute(key, work, remember_failures=True)
            if key == "forgotten":
                assert latents.forget_failure(key)
                assert not latents.forget_failure(key)
            assert latents.get_or_compute(key, work, remember_failures=key == "forgotten") == 5
            assert latents.failures() == []  # success ends it

    def test_it_is_tried_again_after_a_time(self, latents: ArtifactSet, pass_time: Advance) -> None:
        work = Work(ValueError("first"), ValueError("second"), 5)
        pauses = [60, 60.0]

        def ask(number: int) -> object:
            return latents.get_or_compute("key", work, remember_failures=pauses[number % 2])

        with pytest.raises(ValueError, match="first"):
            ask(0)
        for number in range(3):
            pass_time(16)
            with row(number), pytest.raises(RememberedFailureError):
                ask(number)
        pass_time(13)
        with pytest.raises(ValueError, match="second"):
            ask(1)
        with pytest.raises(RememberedFailureError, match="2 times: ValueError: second"):
            ask(2)
        pass_time(61)
        assert ask(2) == 5


class TestValidate:
    def test_it_runs_every_time(self, latents: ArtifactSet) -> None:
        asked: list[str] = []

        def validate(sample: Sample) -> bool:
            asked.append(sample.key)
            return True

        latents.get_or_compute("key", lambda: {"x": 1}, validate=validate)
        before = len(asked)
        assert before
        latents.get_or_compute("key", never, validate=validate)
        latents.get_or_compute("key", never, validate=validate)
        assert len(asked) == before + 2

    def test_what_it_refuses_is_computed_again(self, latents: ArtifactSet) -> None:
        latents.put("key", {"version": 1})
        value = latents.get_or_compute(
            "key", lambda: {"version": 2}, validate=lambda sample: sample["version"] == 2
        )
        assert value == {"version": 2}

    def test_what_was_computed_has_to_pass_it_too(self, latents: ArtifactSet) -> None:
        with pytest.raises(ArtifactError, match="refused by"):
            latents.get_or_compute("key", lambda: 1, validate=lambda _: False)
        assert "key" not in latents

    def test_an_error_in_it_reaches_the_caller(self, latents: ArtifactSet) -> None:
        latents.put("key", {"x": 1})
        with pytest.raises(KeyError, match="other"):
            latents.get_or_compute("key", never, validate=lambda sample: sample["other"])
        assert "key" in latents


class TestDamage:
    def test_what_is_damaged_is_computed_again(
        self, sets: ArtifactSets, caplog: pytest.LogCaptureFixture
    ) -> None:
        for at in ("the tensor", "the header", "the record"):
            caplog.clear()
            with row(at), open_set(sets, at.replace(" ", "-")) as opened:
                opened.put("key", {"x": array(1)})
                place = engine_of(opened).catalog.find(check_key("key"))
                assert place is not None
                more = {"the tensor": place.meta + 200, "the header": 20, "the record": 70}
                (pack,) = packs_of(opened)
                data = bytearray(pack.read_bytes())
                data[place.offset + more[at]] ^= 1
                pack.write_bytes(data)
                work = Work({"x": array(1)})
                for _ in range(3):
                    assert np.array_equal(opened.get_or_compute("key", work)["x"], array(1))
                assert work.count == 1
                assert opened.stats().damaged == 1
            assert "is damaged" in caplog.text


class Many:
    """A computation of many keys at once that keeps what it was asked for."""

    def __init__(self, *bad: str) -> None:
        self.bad = bad
        self.batches: list[list[str]] = []

    def __call__(self, keys: list[str]) -> list[object]:
        self.batches.append(keys)
        return [ValueError(f"no {key}") if key in self.bad else {"of": key} for key in keys]


KEYS = [f"k{n}" for n in range(10)]


class TestMany:
    def test_what_is_there_is_found_and_the_rest_is_computed_in_batches(
        self, latents: ArtifactSet
    ) -> None:
        latents.put_many({"k2": {"of": "k2"}, "k5": {"of": "k5"}})
        work = Many("k7")
        done = latents.compute_many([*KEYS, "k1"], work, batch=3)
        rest = [key for key in KEYS if key not in ("k2", "k5")]
        assert work.batches == [rest[:3], rest[3:6], rest[6:]]
        assert done == Computed(
            found=["k2", "k5"],
            computed=[key for key in rest if key != "k7"],
            failed={"k7": "ValueError: no k7"},
        )
        assert sorted(latents) == sorted(set(KEYS) - {"k7"})
        assert latents.get_batch(["k9", "k2"]) == {"of": ["k9", "k2"]}
        assert latents.compute_many(["k1"], never).found == ["k1"]
        assert latents.compute_many([], never) == Computed()

    def test_what_fn_raises_ends_the_call_and_what_was_put_stays(
        self, latents: ArtifactSet
    ) -> None:
        def compute(keys: list[str]) -> list[object]:
            if "k4" in keys:
                raise ZeroDivisionError
            return [1] * len(keys)

        with pytest.raises(ZeroDivisionError):
            latents.compute_many(KEYS, compute, batch=2)
        assert sorted(latents) == KEYS[:4]
        assert all(engine_of(latents).key_locks.busy(key) is None for key in KEYS)

    def test_values_may_come_one_by_one(self, latents: ArtifactSet) -> None:
        latents.compute_many(["a", "b"], lambda keys: (key.upper() for key in keys))
        assert [latents.get("a"), latents.get("b")] == ["A", "B"]

    def test_what_has_no_values_in_the_order_of_the_keys_is_an_error(
        self, latents: ArtifactSet
    ) -> None:
        wrong: list[Any] = [{"a": 1, "b": 2}, {1, 2}, "ab", b"ab", None]
        for returned in wrong:
            with row(returned), pytest.raises(ArtifactError, match="not a list"):
                latents.compute_many(["a", "b"], lambda _, it=returned: it)  # type: ignore[misc]
        with pytest.raises(ArtifactError, match="9 values for 10 keys"):
            latents.compute_many(KEYS, lambda keys: [1] * (len(keys) - 1))
        with pytest.raises(ConfigError, match="batch must be at least 1, not 0"):
            latents.compute_many(["a"], never, batch=0)
        assert not len(latents)

    def test_failures_are_remembered_if_asked(
        self, latents: ArtifactSet, pass_time: Advance
    ) -> None:
        work = Many("k1", "k2")
        first = latents.compute_many(KEYS, work, remember_failures=60)
        assert {failure.key for failure in latents.failures()} == first.failed.keys()
        again = latents.compute_many(KEYS, never, remember_failures=60)
        assert again.failed == first.failed
        assert again.failed == {"k1": "ValueError: no k1", "k2": "ValueError: no k2"}
        with pytest.raises(RememberedFailureError):
            latents.get_or_compute("k1", never, remember_failures=60)
        pass_time(61)
        assert latents.compute_many(KEYS, Many("k2"), remember_failures=60).computed == ["k1"]
        assert [failure.key for failure in latents.failures()] == ["k2"]

    def test_threads_compute_each_once(self, latents: ArtifactSet) -> None:
        work = Many()
        with ThreadPoolExecutor(4) as pool:
            jobs = [
                pool.submit(latents.compute_many, KEYS[::step], work, batch=2)
                for step in (1, -1, 1, -1)
            ]
            found = [job.result() for job in jobs]
        assert sorted(key for keys in work.batches for key in keys) == KEYS
        for each in found:
            assert sorted(each.found + each.computed + each.waited) == KEYS


@pytest.mark.timeout(60)
class TestManyProcesses:
    def test_what_another_computes_is_waited_for_last(self, sets: ArtifactSets) -> None:
        """The other one ends when it sees our last key: who waits first waits for ever."""
        with open_set(sets) as opened, Child(lambda: _hold_until_there(sets, "k1", "k9")) as child:
            while engine_of(opened).key_locks.busy("k1") is None:
                time.sleep(0.005)
            left = opened.compute_many(KEYS[:2], Many(), wait=False)
            assert (left.computed, left.busy) == (["k0"], ["k1"])
            work = Many()
            done = opened.compute_many(KEYS, work, batch=4)
            assert (done.found, done.waited) == (["k0"], ["k1"])
            assert done.computed == KEYS[2:]
            assert not any("k1" in keys for keys in work.batches)
            assert opened.get("k1") == "theirs"
            child.result()

    def test_what_a_killed_one_has_begun_is_computed(self, sets: ArtifactSets) -> None:
        with open_set(sets) as opened, Child(lambda: _hold_until_there(sets, "k1", "k9")) as child:
            while engine_of(opened).key_locks.busy("k1") is None:
                time.sleep(0.005)
            with ThreadPoolExecutor(1) as pool:
                job = pool.submit(opened.compute_many, KEYS[:3], Many())
                while "k2" not in opened:
                    time.sleep(0.005)
                child.end()
                assert job.result().computed == ["k0", "k2", "k1"]

    def test_the_same_keys_in_opposite_order_are_computed_once_each(
        self, sets: ArtifactSets, tmp_path: Path
    ) -> None:
        keys = [f"k{n}" for n in range(60)]
        log = tmp_path / "computed"
        orders = (keys, keys[::-1], keys[20:] + keys[:20])
        with ExitStack() as stack:
            children = [
                stack.enter_context(Child(partial(_compute_all, sets, order, log)))
                for order in orders
            ]
            for child in children:
                assert child.result() == (sorted(keys), {})
        assert sorted(log.read_text("utf-8").split()) == sorted(keys)


def _hold_until_there(sets: ArtifactSets, key: str, other: str) -> None:
    with open_set(sets) as opened:

        def compute() -> str:
            while other not in opened:
                time.sleep(0.005)
            return "theirs"

        opened.get_or_compute(key, compute)


def _compute_all(
    sets: ArtifactSets, keys: list[str], log: Path
) -> tuple[list[str], dict[str, str]]:
    def compute(some: list[str]) -> list[object]:
        with open(log, "a", encoding="utf-8") as file:
            file.write("".join(f"{key}\n" for key in some))
        time.sleep(0.01)
        return list(some)

    with open_set(sets) as opened:
        done = opened.compute_many(keys, compute, batch=4)
    return sorted(done.found + done.computed + done.waited), done.failed


def test_what_is_deleted_as_soon_as_it_is_computed_was_not_refused(sets: ArtifactSets) -> None:
    """Another thread deletes it between the put and the look that follows."""
    is_over = threading.Event()
    with open_set(sets) as opened, ThreadPoolExecutor(1) as pool:

        def delete() -> None:
            while not is_over.is_set():
                opened.delete("key")

        job = pool.submit(delete)
        try:
            for _ in range(300):
                assert opened.get_or_compute("key", lambda: 7) == 7
        finally:
            is_over.set()
        job.result()
