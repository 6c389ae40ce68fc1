"""`get_or_compute`: once for all who ask; failures, validation, damage."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import numpy as np
import pytest

from tests.api import (
    ArtifactError,
    ArtifactSet,
    ArtifactSets,
    RememberedFailureError,
    Retry,
    Sample,
    SmartcacheError,
    UnsupportedValueError,
)
from tests.artifacts.opening import array, engine_of, open_set

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


def never() -> NoReturn:
    pytest.fail("computed again")


class TestOnce:
    def test_what_is_there_is_not_computed(self, latents: ArtifactSet) -> None:
        latents.put("key", {"x": 1})
        assert latents.get_or_compute("key", never) == {"x": 1}

    def test_what_was_computed_is_kept_with_its_metadata(self, latents: ArtifactSet) -> None:
        value = latents.get_or_compute("key", lambda: {"x": array(1)}, metadata={"by": "me"})
        assert np.array_equal(value["x"], array(1))
        assert latents.metadata("key") == {"by": "me"}
        assert np.array_equal(latents.get_or_compute("key", never)["x"], array(1))

    def test_what_is_returned_is_what_was_kept(self, latents: ArtifactSet) -> None:
        made = np.zeros(5000)
        value = latents.get_or_compute("key", lambda: {"x": made})
        value["x"][:] = 1
        assert made.max() == 0
        assert latents.get("key")["x"].max() == 0

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

    def test_a_computation_may_ask_for_another(self, latents: ArtifactSet) -> None:
        def outer() -> int:
            return 1 + int(latents.get_or_compute("inner", lambda: 2))

        assert latents.get_or_compute("outer", outer) == 3

    def test_a_computation_that_asks_for_itself_is_told(self, latents: ArtifactSet) -> None:
        with pytest.raises(SmartcacheError, match="wait for itself"):
            latents.get_or_compute("key", lambda: latents.get_or_compute("key", never))

    def test_an_expired_artifact_is_computed_again(
        self, latents: ArtifactSet, pass_time: Advance
    ) -> None:
        work = Work(1, 2)
        assert latents.get_or_compute("key", work, ttl=60) == 1
        pass_time(61)
        assert latents.get_or_compute("key", work, ttl=60) == 2

    def test_a_ttl_below_a_second_is_long_enough_to_read_it(self, latents: ArtifactSet) -> None:
        for n in range(5):
            assert latents.get_or_compute(f"k{n}", lambda: 1, ttl=0.01) == 1

    def test_what_is_larger_than_the_bound_is_returned_all_the_same(
        self, sets: ArtifactSets
    ) -> None:
        with open_set(sets, max_size=1000) as opened:
            value = opened.get_or_compute("key", lambda: {"x": array(1)})
            assert np.array_equal(value["x"], array(1))


class TestFailure:
    def test_reaches_the_caller_and_ends_the_lease(self, latents: ArtifactSet) -> None:
        work = Work(ZeroDivisionError("by nought"), 5)
        with pytest.raises(ZeroDivisionError, match="by nought"):
            latents.get_or_compute("key", work)
        assert engine_of(latents).leases.busy("key") is None
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

    def test_a_value_that_cannot_be_kept_names_its_place(self, latents: ArtifactSet) -> None:
        with pytest.raises(UnsupportedValueError):
            latents.get_or_compute("key", lambda: {"x": object()})
        assert latents.get_or_compute("key", lambda: 1) == 1


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
        with open_set(sets) as opened, pytest.raises(RememberedFailureError):
            opened.get_or_compute("key", never, remember_failures=True)

    def test_it_is_listed(self, latents: ArtifactSet) -> None:
        with pytest.raises(ValueError):  # noqa: PT011
            latents.get_or_compute("key", Work(ValueError("x")), remember_failures=True)
        (failure,) = latents.failures()
        assert (failure.key, failure.reason, failure.count) == ("key", "ValueError: x", 1)
        assert abs(failure.failed_at - time.time()) < 60

    def test_it_can_be_forgotten(self, latents: ArtifactSet) -> None:
        work = Work(ValueError(), 5)
        with pytest.raises(ValueError):  # noqa: PT011
            latents.get_or_compute("key", work, remember_failures=True)
        assert latents.forget_failure("key")
        assert not latents.forget_failure("key")
        assert latents.get_or_compute("key", work, remember_failures=True) == 5

    def test_who_does_not_ask_for_it_tries_again(self, latents: ArtifactSet) -> None:
        work = Work(ValueError(), 5)
        with pytest.raises(ValueError):  # noqa: PT011
            latents.get_or_compute("key", work, remember_failures=True)
        assert latents.get_or_compute("key", work) == 5
        assert latents.failures() == []  # success ends it

    @pytest.mark.parametrize("rule", [60, 60.0, Retry(after=60)])
    def test_it_is_tried_again_after_a_time(
        self, latents: ArtifactSet, pass_time: Advance, rule: float | Retry
    ) -> None:
        work = Work(ValueError("first"), ValueError("second"), 5)
        with pytest.raises(ValueError, match="first"):
            latents.get_or_compute("key", work, remember_failures=rule)
        pass_time(50)
        with pytest.raises(RememberedFailureError):
            latents.get_or_compute("key", work, remember_failures=rule)
        pass_time(11)
        with pytest.raises(ValueError, match="second"):
            latents.get_or_compute("key", work, remember_failures=rule)
        with pytest.raises(RememberedFailureError, match="2 times: ValueError: second"):
            latents.get_or_compute("key", work, remember_failures=rule)
        pass_time(61)
        assert latents.get_or_compute("key", work, remember_failures=rule) == 5

    def test_it_is_tried_so_often_and_no_more(
        self, latents: ArtifactSet, pass_time: Advance
    ) -> None:
        work = Work(ValueError())
        rule = Retry(after=10, most=2)
        for _ in range(4):
            with pytest.raises((ValueError, RememberedFailureError)):
                latents.get_or_compute("key", work, remember_failures=rule)
            pass_time(11)
        assert work.count == 2

    def test_it_is_one_keys_own(self, latents: ArtifactSet) -> None:
        with pytest.raises(ValueError):  # noqa: PT011
            latents.get_or_compute("bad", Work(ValueError()), remember_failures=True)
        assert latents.get_or_compute("good", lambda: 1, remember_failures=True) == 1


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
    @pytest.mark.parametrize("at", ["the tensor", "the header of the tensor", "the record"])
    def test_what_is_damaged_is_computed_again(
        self, latents: ArtifactSet, caplog: pytest.LogCaptureFixture, at: str
    ) -> None:
        latents.put("key", {"x": array(1)})
        latents.flush()
        found = engine_of(latents).find(b"\x02key")
        assert found is not None
        chunk = (found.places[0] & 0xFF_FFFF_FFFF) << 6
        record = (found.place & 0xFF_FFFF_FFFF) << 6
        offset = {"the tensor": chunk + 200, "the header of the tensor": chunk + 20}
        with open(next(latents.path.glob("*.pack")), "r+b") as file:
            file.seek(offset.get(at, record + 70))
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))
        engine_of(latents).memory.clear()
        work = Work({"x": array(1)})
        for _ in range(3):
            assert np.array_equal(latents.get_or_compute("key", work)["x"], array(1))
        assert work.count == 1
        assert latents.stats().damaged == 1
        assert "is damaged" in caplog.text
