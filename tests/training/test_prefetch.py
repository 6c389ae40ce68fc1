"""Reading ahead: order, failures, pauses, ends of epochs, and closing whatever the source does."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import pytest

from smartcache.errors import ConfigError, SmartcacheError
from smartcache.training import Prefetcher, PrefetchStats
from smartcache.training.prefetch import StepSource
from tests.processes.children import Child

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parent.parent.parent
LONG = 30.0
"""Seconds that nothing here takes unless it hangs."""
MOMENT = 0.05
"""Seconds in which what must not happen would have happened."""

Step = tuple[int, int]
Batch = dict[str, object]


def batch_of(epoch: int, index: int) -> Batch:
    return {"epoch": epoch, "index": index}


def epoch_of(epoch: int, count: int = 4) -> list[Batch]:
    return [batch_of(epoch, index) for index in range(count)]


class Numbers:
    """A plan whose batches are numbers; `on_read` is called in the reader for each of them."""

    def __init__(
        self, count: int = 4, on_read: Callable[[Step], object] = lambda step: None
    ) -> None:
        self.count = count
        self.on_read = on_read
        self.began: list[Step] = []
        self.ended: list[Step] = []
        self.at: Step = (0, 0)
        self._given = 0
        self._changed = threading.Condition()

    def steps(self) -> Iterator[Step]:
        self._given, begin = self.at
        return iter([(self._given, index) for index in range(begin, self.count)])

    def next_epoch(self) -> Iterator[Step]:
        self._given += 1
        return iter([(self._given, index) for index in range(self.count)])

    def read(self, step: Step) -> Batch:
        with self._changed:
            self.began.append(step)
            self._changed.notify_all()
        self.on_read(step)
        with self._changed:
            self.ended.append(step)
            self._changed.notify_all()
        return batch_of(*step)

    def advance(self, step: Step) -> None:
        self.at = (step[0], step[1] + 1)

    def state_dict(self) -> dict[str, object]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, object]) -> None:
        at = state["at"]
        assert isinstance(at, tuple)
        self.at = at

    def wait_for(self, *steps: Step, ended: bool = True) -> None:
        """Wait until these were read, or at least begun."""
        with self._changed:
            seen = self.ended if ended else self.began
            assert self._changed.wait_for(lambda: set(steps) <= set(seen), LONG)


class Rolling(Numbers):
    """Another plan, which is in the next epoch as soon as the last batch was handed out."""

    def advance(self, step: Step) -> None:
        epoch, index = step
        self.at = (epoch, index + 1) if index + 1 < self.count else (epoch + 1, 0)


PLANS = pytest.mark.parametrize("plan", [Numbers, Rolling])


class Gate:
    """Holds the reads of some steps back until it is opened."""

    def __init__(self, *steps: Step) -> None:
        self.steps = steps
        self.opened = threading.Event()

    def __call__(self, step: Step) -> None:
        if not self.steps or step in self.steps:
            assert self.opened.wait(LONG)


def readers() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("smartcache-prefetch")]


@pytest.fixture(autouse=True)
def _no_reader_is_left() -> Iterator[None]:
    yield
    for thread in readers():
        thread.join(LONG)
    assert readers() == []


def taken(prefetcher: Prefetcher[Batch], count: int) -> list[Batch]:
    return list(itertools.islice(prefetcher, count))


class TestOrder:
    def test_it_is_that_of_the_plan_whichever_read_ends_first(self) -> None:
        def on_read(step: Step) -> None:
            if step == (0, 0):
                source.wait_for((0, 1), (0, 2))

        source = Numbers(on_read=on_read)
        with Prefetcher(source, depth=3, threads=2) as prefetcher:
            assert list(prefetcher) == epoch_of(0)
        assert source.ended[:2] != [(0, 0), (0, 1)]

    def test_no_more_than_depth_is_read_ahead(self) -> None:
        source = Numbers(10)
        with Prefetcher(source, depth=3, threads=8) as prefetcher:
            assert taken(prefetcher, 1) == [batch_of(0, 0)]
            source.wait_for((0, 1), (0, 2), (0, 3))
            with prefetcher.paused():
                assert len(source.began) == 4

    def test_the_next_epoch_is_read_before_it_is_asked_for(self) -> None:
        source = Numbers(2)
        with Prefetcher(source, depth=2) as prefetcher:
            assert list(prefetcher) == epoch_of(0, 2)
            source.wait_for((1, 0), (1, 1))
            assert source.state_dict() == {"at": (0, 2)}
            assert [list(prefetcher) for _ in range(3)] == [epoch_of(n, 2) for n in (1, 2, 3)]

    def test_even_with_a_depth_of_one(self) -> None:
        source = Numbers(1)
        with Prefetcher(source, depth=1) as prefetcher:
            assert taken(prefetcher, 1) == epoch_of(0, 1)
            source.wait_for((1, 0))
            assert list(prefetcher) == []
            assert list(prefetcher) == epoch_of(1, 1)

    def test_nothing_is_read_before_the_first_batch_is_asked_for(self) -> None:
        with Prefetcher(Numbers()):
            assert readers() == []

    def test_after_a_break_the_epoch_goes_on(self) -> None:
        with Prefetcher(Numbers()) as prefetcher:
            assert taken(prefetcher, 3) == epoch_of(0)[:3]
            assert list(prefetcher) == epoch_of(0)[3:]
            assert list(prefetcher) == epoch_of(1)

    def test_an_empty_plan_has_empty_epochs(self) -> None:
        with Prefetcher(Numbers(0)) as prefetcher:
            assert [list(prefetcher) for _ in range(5)] == [[]] * 5

    def test_empty_epochs_are_not_read_ahead_without_end(self) -> None:
        class Counted(Numbers):
            epochs = 0

            def next_epoch(self) -> Iterator[Step]:
                self.epochs += 1
                return super().next_epoch()

        source = Counted(0)
        with Prefetcher(source, depth=2) as prefetcher:
            assert list(prefetcher) == []
            time.sleep(MOMENT)
            assert source.epochs <= 3

    def test_an_iterator_that_ended_stays_ended(self) -> None:
        with Prefetcher(Numbers()) as prefetcher:
            iterator = iter(prefetcher)
            assert len(list(iterator)) == 4
            assert list(iterator) == []
            assert list(prefetcher) == epoch_of(1)

    def test_two_consumers_share_the_batches(self) -> None:
        with Prefetcher(Numbers(200)) as prefetcher, ThreadPoolExecutor(2) as pool:
            halves = [pool.submit(taken, prefetcher, 100) for _ in range(2)]
            got = [each for half in halves for each in half.result(LONG)]
        assert sorted(got, key=str) == sorted(epoch_of(0, 200), key=str)

    def test_a_batch_is_not_kept_after_it_was_handed_out(self) -> None:
        class Value:
            pass

        def source() -> Iterator[Value]:
            while True:
                yield Value()

        with Prefetcher(source(), depth=1) as made:
            iterator = iter(made)
            kept = [weakref.ref(next(iterator)) for _ in range(3)]
            assert [each() for each in kept] == [None] * 3


class TestFailures:
    def test_they_come_in_their_place_with_the_traceback_of_the_source(self) -> None:
        def break_down(step: Step) -> None:
            if step == (0, 2):
                raise OSError("unreadable")

        source = Numbers(on_read=break_down)
        with Prefetcher(source, depth=4) as prefetcher:
            got: list[Batch] = []
            with pytest.raises(OSError, match="unreadable") as raised:
                got.extend(batch for batch in prefetcher)
        assert got == epoch_of(0)[:2]
        assert source.at == (0, 2)
        assert "break_down" in [frame.name for frame in traceback.extract_tb(raised.tb)]

    def test_all_batches_before_it_are_handed_out(self) -> None:
        def on_read(step: Step) -> None:
            if step == (0, 0):
                source.wait_for((0, 1), ended=False)
            elif step == (0, 1):
                raise ValueError("early")

        source = Numbers(on_read=on_read)
        with Prefetcher(source) as prefetcher:
            iterator = iter(prefetcher)
            assert next(iterator) == batch_of(0, 0)
            with pytest.raises(ValueError, match="early"):
                next(iterator)

    def test_nothing_is_read_after_one_until_it_has_arrived(self) -> None:
        failed = threading.Event()

        def on_read(step: Step) -> None:
            if step == (0, 1):
                failed.set()
                raise OSError("broken")

        source = Numbers(on_read=on_read)
        with Prefetcher(source, depth=4, threads=1) as prefetcher:
            assert taken(prefetcher, 1) == [batch_of(0, 0)]
            assert failed.wait(LONG)
            time.sleep(MOMENT)
            with pytest.raises(OSError, match="broken"):
                list(prefetcher)
            time.sleep(MOMENT)
            assert source.began == [(0, 0), (0, 1)]

    def test_the_batch_that_failed_is_read_again(self) -> None:
        """Nothing is left out because of what may pass: a network that was away."""
        fails = [True, False]

        def on_read(step: Step) -> None:
            if step == (0, 1) and fails.pop(0):
                raise OSError("away")

        with Prefetcher(Numbers(on_read=on_read)) as prefetcher:
            with pytest.raises(OSError, match="away"):
                list(prefetcher)
            assert list(prefetcher) == epoch_of(0)[1:]
            assert list(prefetcher) == epoch_of(1)

    def test_of_the_steps_come_after_those_before(self) -> None:
        class Broken(Numbers):
            def steps(self) -> Iterator[Step]:
                yield from itertools.islice(super().steps(), 2)
                raise LookupError("no more")

        with Prefetcher(Broken(), depth=4) as prefetcher:
            iterator = iter(prefetcher)
            assert [next(iterator), next(iterator)] == epoch_of(0)[:2]
            with pytest.raises(LookupError, match="no more"):
                next(iterator)

    def test_of_the_plan_itself_come_after_the_epoch_before(self) -> None:
        class Short(Numbers):
            def next_epoch(self) -> Iterator[Step]:
                raise LookupError("no more")

        with Prefetcher(Short()) as prefetcher:
            assert list(prefetcher) == epoch_of(0)
            for _ in range(3):
                with pytest.raises(LookupError, match="no more"):
                    list(prefetcher)

    def test_a_stray_stopiteration_does_not_end_the_epoch(self) -> None:
        def on_read(step: Step) -> None:
            next(iter(()))

        with Prefetcher(Numbers(on_read=on_read)) as prefetcher, pytest.raises(RuntimeError):
            list(prefetcher)

    def test_what_is_raised_keeps_no_batch_alive(self) -> None:
        class Value:
            pass

        class Values(Numbers):
            def read(self, step: Step) -> Batch:
                super().read(step)
                values.append(weakref.ref(value := Value()))
                return {"value": value}

        def on_read(step: Step) -> None:
            if step == (0, 0):
                source.wait_for((0, 1))
                raise OSError("first")

        values: list[weakref.ref[Value]] = []
        source = Values(on_read=on_read)
        with Prefetcher(source) as prefetcher:
            with pytest.raises(OSError, match="first") as raised:
                list(prefetcher)
            prefetcher.close()
            assert raised.value is not None
            assert [each() for each in values] == [None] * len(values)
            assert values


class TestPause:
    def test_waits_for_the_reads_under_way_and_lets_none_begin(self) -> None:
        gate = Gate((0, 1), (0, 2))
        source = Numbers(10, on_read=gate)
        entered, leave = threading.Event(), threading.Event()

        def pause() -> None:
            with prefetcher.paused():
                assert len(source.began) == len(source.ended)
                entered.set()
                assert leave.wait(LONG)

        with Prefetcher(source, depth=2) as prefetcher, ThreadPoolExecutor(1) as pool:
            assert taken(prefetcher, 1) == [batch_of(0, 0)]
            source.wait_for((0, 1), (0, 2), ended=False)
            pausing = pool.submit(pause)
            assert not entered.wait(MOMENT)
            gate.opened.set()
            assert entered.wait(LONG)
            began = list(source.began)
            assert taken(prefetcher, 2) == epoch_of(0, 10)[1:3]
            time.sleep(MOMENT)
            assert not pausing.done()
            assert source.began == began
            leave.set()
            pausing.result(LONG)
            assert list(prefetcher) == epoch_of(0, 10)[3:]

    def test_what_was_read_ahead_can_be_used_and_no_more(self) -> None:
        source = Numbers(10)
        with Prefetcher(source, depth=2) as prefetcher:
            assert taken(prefetcher, 1) == [batch_of(0, 0)]
            source.wait_for((0, 1), (0, 2))
            with prefetcher.paused():
                assert taken(prefetcher, 2) == epoch_of(0, 10)[1:3]
                with pytest.raises(SmartcacheError, match="used up"):
                    taken(prefetcher, 1)
                assert len(source.began) == 3
            assert list(prefetcher) == epoch_of(0, 10)[3:]

    def test_the_outer_of_two_blocks_counts(self) -> None:
        source = Numbers(10)
        with Prefetcher(source, depth=2) as prefetcher:
            taken(prefetcher, 1)
            source.wait_for((0, 1), (0, 2))
            with prefetcher.paused():
                with prefetcher.paused():
                    taken(prefetcher, 1)
                taken(prefetcher, 1)
                time.sleep(MOMENT)
                assert len(source.began) == 3
            source.wait_for((0, 4))

    def test_an_exception_in_the_block_ends_the_pause(self) -> None:
        with Prefetcher(Numbers()) as prefetcher:
            with pytest.raises(ZeroDivisionError), prefetcher.paused():
                raise ZeroDivisionError
            assert list(prefetcher) == epoch_of(0)

    def test_it_is_waited_for_by_reads_of_a_line_that_was_drained(self) -> None:
        gate = Gate((0, 1))
        source = Numbers(on_read=gate)
        with Prefetcher(source, depth=1) as prefetcher, ThreadPoolExecutor(1) as pool:
            taken(prefetcher, 1)
            source.wait_for((0, 1), ended=False)
            prefetcher.drain()

            def pause() -> int:
                with prefetcher.paused():
                    return len(source.ended)

            pausing = pool.submit(pause)
            gate.opened.set()
            assert pausing.result(LONG) >= 2

    def test_does_not_begin_if_it_is_closed_in_the_middle_of_a_read(self) -> None:
        gate = Gate((0, 1))
        source = Numbers(on_read=gate)
        with Prefetcher(source, depth=1) as prefetcher:
            taken(prefetcher, 1)
            source.wait_for((0, 1), ended=False)
            prefetcher.close(timeout=0.01)
            with pytest.raises(SmartcacheError, match="closed"), prefetcher.paused():
                pytest.fail("the source still reads")
            gate.opened.set()

    def test_of_a_closed_one_does_nothing(self) -> None:
        prefetcher = Prefetcher(Numbers())
        list(prefetcher)
        prefetcher.close()
        with prefetcher.paused():
            assert readers() == []


class TestDrain:
    def test_what_was_read_ahead_is_read_anew(self) -> None:
        source = Numbers(10)
        with Prefetcher(source, depth=2) as prefetcher:
            taken(prefetcher, 1)
            source.wait_for((0, 1), (0, 2))
            prefetcher.drain()
            assert list(prefetcher) == epoch_of(0, 10)[1:]
            assert source.began.count((0, 1)) == 2

    def test_does_not_wait_for_a_read_whose_batch_then_arrives_nowhere(self) -> None:
        held = threading.Event()
        late = threading.Event()

        class Versions(Numbers):
            def read(self, step: Step) -> Batch:
                is_stale = step == (0, 1) and not held.is_set()
                if is_stale:
                    held.set()
                    assert late.wait(LONG)
                return {**super().read(step), "stale": is_stale}

        source = Versions(10)
        with Prefetcher(source, depth=2, threads=2) as prefetcher:
            taken(prefetcher, 1)
            assert held.wait(LONG)
            prefetcher.drain()
            assert taken(prefetcher, 2) == [{**batch_of(0, n), "stale": False} for n in (1, 2)]
            late.set()
            assert list(prefetcher) == [{**batch_of(0, n), "stale": False} for n in range(3, 10)]

    @PLANS
    @pytest.mark.parametrize("count", [1, 4])
    def test_between_two_epochs_none_gets_lost(self, plan: type[Numbers], count: int) -> None:
        """Nothing is left of the epoch whose end was handed out: it does not end twice."""
        with Prefetcher(plan(count), depth=3) as prefetcher:
            assert list(prefetcher) == epoch_of(0, count)
            prefetcher.drain()
            prefetcher.drain()
            assert list(prefetcher) == epoch_of(1, count)

    def test_a_failure_then_is_still_one(self) -> None:
        """The end that is left out must not hide what comes after it."""
        fails = [False, True, True, False, False]

        class Failing(Numbers):
            def next_epoch(self) -> Iterator[Step]:
                if fails.pop(0):
                    raise OSError("away")
                return super().next_epoch()

        source = Failing(1)
        with Prefetcher(source, depth=1) as prefetcher:
            assert list(prefetcher) == epoch_of(0, 1)
            source.wait_for((1, 0))
            prefetcher.drain()
            for _ in range(2):
                with pytest.raises(OSError, match="away"):
                    list(prefetcher)
            assert list(prefetcher) == epoch_of(1, 1)

    @PLANS
    def test_with_the_last_batch_of_an_epoch_keeps_its_end(self, plan: type[Numbers]) -> None:
        """Else the loop over one epoch would go on with the next one."""
        with Prefetcher(plan(2), depth=2) as prefetcher:
            for epoch in range(3):
                got = []
                for batch in prefetcher:
                    got.append(batch)
                    prefetcher.drain()
                    prefetcher.drain()
                assert got == epoch_of(epoch, 2)

    @PLANS
    def test_with_the_last_batch_then_closed(self, plan: type[Numbers]) -> None:
        with Prefetcher(plan(2)) as prefetcher:
            taken(prefetcher, 2)
            prefetcher.close()
            with pytest.raises(SmartcacheError, match="closed"):
                list(prefetcher)

    def test_an_epoch_that_is_still_looked_for_is_not_counted(self) -> None:
        """Else the plan would give the epoch after it next."""
        looking, found = threading.Event(), threading.Event()

        class Slow(Numbers):
            def next_epoch(self) -> Iterator[Step]:
                looking.set()
                assert found.wait(LONG)
                return super().next_epoch()

        with Prefetcher(Slow(), depth=4) as prefetcher:
            taken(prefetcher, 3)
            assert looking.wait(LONG)
            prefetcher.drain()
            found.set()
            assert list(prefetcher) == epoch_of(0)[3:]
            assert list(prefetcher) == epoch_of(1)


class TestState:
    def test_is_that_of_the_batch_last_handed_out(self) -> None:
        source = Numbers(10)
        with Prefetcher(source, depth=4) as prefetcher:
            assert prefetcher.state_dict() == {"at": (0, 0)}
            for index, _ in enumerate(prefetcher):
                assert prefetcher.state_dict() == {"at": (0, index + 1)}

    def test_another_prefetcher_goes_on_from_it(self) -> None:
        with Prefetcher(Numbers(10)) as first:
            taken(first, 4)
            state = first.state_dict()
        with Prefetcher(Numbers(10)) as second:
            second.load_state_dict(state)
            assert list(second) == epoch_of(0, 10)[4:]

    def test_can_be_loaded_in_the_middle(self) -> None:
        source = Numbers(10)
        with Prefetcher(source) as prefetcher:
            taken(prefetcher, 2)
            state = prefetcher.state_dict()
            list(prefetcher)
            source.wait_for((1, 0))
            prefetcher.load_state_dict(state)
            assert list(prefetcher) == epoch_of(0, 10)[2:]

    def test_of_the_end_of_an_epoch_is_its_end(self) -> None:
        with Prefetcher(Numbers()) as prefetcher:
            list(prefetcher)
            state = prefetcher.state_dict()
            prefetcher.load_state_dict(state)
            assert list(prefetcher) == []
            assert list(prefetcher) == epoch_of(1)

    def test_an_iterable_that_is_no_plan_has_none(self) -> None:
        with Prefetcher([batch_of(0, 0)]) as prefetcher:
            list(prefetcher)
            for act in (
                prefetcher.state_dict,
                lambda: prefetcher.load_state_dict({}),
                prefetcher.drain,
            ):
                with pytest.raises(SmartcacheError, match="list is only read ahead"):
                    act()


class TestOtherIterables:
    def test_are_read_by_one_thread(self) -> None:
        threads: set[int] = set()

        def source() -> Iterator[int]:
            for number in range(50):
                threads.add(threading.get_ident())
                yield number

        with Prefetcher(source(), depth=8, threads=8) as prefetcher:
            assert list(prefetcher) == list(range(50))
            assert len(readers()) == 1
        assert len(threads) == 1

    def test_are_read_ahead_to_the_end_of_an_epoch(self) -> None:
        ended = threading.Event()

        class Epochs:
            count = 0

            def __iter__(self) -> Iterator[Step]:
                self.count += 1
                yield from [(self.count, index) for index in range(3)]
                ended.set()

        source = Epochs()
        assert not isinstance(source, StepSource)
        with Prefetcher(source, depth=3) as prefetcher:
            assert list(itertools.islice(prefetcher, 1)) == [(1, 0)]
            assert ended.wait(LONG)
            assert list(prefetcher) == [(1, 1), (1, 2)]
            with prefetcher.paused():
                assert source.count == 1
            assert list(prefetcher) == [(2, 0), (2, 1), (2, 2)]

    def test_an_iterator_is_not_asked_beyond_its_end_before_the_next_epoch(self) -> None:
        """Some begin anew when they are asked again, and what is read then belongs to then."""
        asked: list[str] = []

        class Again:
            at = 0

            def __iter__(self) -> Iterator[int]:
                return self

            def __next__(self) -> int:
                asked.append(now)
                self.at += 1
                if self.at % 3 == 0:
                    raise StopIteration
                return self.at

        with Prefetcher(Again(), depth=5) as prefetcher:
            now = "first"
            assert list(prefetcher) == [1, 2]
            with prefetcher.paused():
                now = "second"
            assert list(prefetcher) == [4, 5]
        assert asked == ["first"] * 3 + ["second"] * 3

    def test_a_generator_has_one_epoch(self) -> None:
        with Prefetcher(n for n in range(5)) as prefetcher:
            assert [list(prefetcher) for _ in range(3)] == [[0, 1, 2, 3, 4], [], []]

    def test_after_a_break_they_go_on(self) -> None:
        with Prefetcher([1, 2, 3, 4]) as prefetcher:
            assert list(itertools.islice(prefetcher, 2)) == [1, 2]
            assert list(prefetcher) == [3, 4]
            assert list(prefetcher) == [1, 2, 3, 4]

    def test_failures_come_in_their_place_and_the_next_epoch_follows(self) -> None:
        class Failing:
            def __iter__(self) -> Iterator[int]:
                yield 1
                yield 2
                raise OSError("broken")

        with Prefetcher(Failing(), depth=8) as prefetcher:
            for _ in range(2):
                got: list[int] = []
                with pytest.raises(OSError, match="broken"):
                    got.extend(number for number in prefetcher)
                assert got == [1, 2]

    def test_what_cannot_be_iterated_says_so(self) -> None:
        with Prefetcher(5) as prefetcher, pytest.raises(TypeError):  # type: ignore[arg-type,var-annotated]
            list(prefetcher)

    def test_a_generator_is_closed_with_it(self) -> None:
        closed = threading.Event()

        def source() -> Iterator[int]:
            try:
                yield from itertools.count()
            finally:
                closed.set()

        with Prefetcher(source()) as prefetcher:
            assert list(itertools.islice(prefetcher, 3)) == [0, 1, 2]
        del prefetcher
        gc.collect()
        assert closed.wait(LONG)


class TestClose:
    def test_ends_the_readers_and_what_comes_after_is_an_error(self) -> None:
        prefetcher = Prefetcher(Numbers())
        taken(prefetcher, 1)
        prefetcher.close()
        prefetcher.close()
        assert readers() == []
        with pytest.raises(SmartcacheError, match="closed"):
            list(prefetcher)

    def test_before_anything_was_read(self) -> None:
        prefetcher = Prefetcher(Numbers())
        prefetcher.close()
        with pytest.raises(SmartcacheError, match="closed"):
            list(prefetcher)

    def test_in_the_middle_of_a_loop(self) -> None:
        with Prefetcher(Numbers()) as prefetcher:
            for _ in prefetcher:
                break
        assert readers() == []

    def test_does_not_wait_for_a_source_that_hangs_and_warns_once(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        gate = Gate((0, 1), (0, 2))
        source = Numbers(on_read=gate)
        began = time.monotonic()
        with caplog.at_level(logging.WARNING), Prefetcher(source) as prefetcher:
            taken(prefetcher, 1)
            source.wait_for((0, 1), (0, 2), ended=False)
            prefetcher.close(timeout=0.05)
            prefetcher.close(timeout=LONG)
        assert time.monotonic() - began < LONG / 2
        assert [each.getMessage() for each in caplog.records] == [
            "2 of the threads that read ahead were left behind: Numbers did not return in 0.05 s"
        ]
        gate.opened.set()

    def test_waits_for_a_read_that_ends_in_time(self, caplog: pytest.LogCaptureFixture) -> None:
        gate = Gate((0, 1), (0, 2))
        source = Numbers(on_read=gate)
        prefetcher = Prefetcher(source)
        taken(prefetcher, 1)
        source.wait_for((0, 1), (0, 2), ended=False)
        with ThreadPoolExecutor(1) as pool:
            closing = pool.submit(prefetcher.close, LONG)
            gate.opened.set()
            closing.result(LONG)
        assert readers() == []
        assert caplog.records == []

    def test_wakes_a_consumer_that_waits(self) -> None:
        gate = Gate((0, 1), (0, 2))
        source = Numbers(on_read=gate)
        prefetcher = Prefetcher(source)
        with ThreadPoolExecutor(1) as pool:
            consuming = pool.submit(list, prefetcher)
            source.wait_for((0, 1), (0, 2), ended=False)
            prefetcher.close(timeout=0.01)
            with pytest.raises(SmartcacheError, match="closed"):
                consuming.result(LONG)
            gate.opened.set()

    def test_can_be_called_by_the_source(self) -> None:
        """It cannot wait for the reader that it is called in."""

        def on_read(step: Step) -> None:
            if step == (0, 1):
                prefetcher.close()
                closed.set()

        closed = threading.Event()
        prefetcher = Prefetcher(Numbers(on_read=on_read), depth=1)
        with pytest.raises(SmartcacheError, match="closed"):
            list(prefetcher)
        assert closed.wait(LONG)

    def test_one_that_is_lost_ends_by_itself(self) -> None:
        prefetcher = Prefetcher(Numbers())
        taken(prefetcher, 1)
        threads = readers()
        assert threads
        del prefetcher
        gc.collect()
        for thread in threads:
            thread.join(LONG)
        assert readers() == []

    def test_one_that_is_only_iterated_lives_as_long_as_the_loop(self) -> None:
        assert list(Prefetcher(Numbers())) == epoch_of(0)

    def test_ctrl_c_comes_through_while_it_waits_for_a_batch(self) -> None:
        gate = Gate((0, 1), (0, 2))
        source = Numbers(on_read=gate)

        def interrupt() -> None:
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, signal.SIGINT)

        with Prefetcher(source) as prefetcher:
            taken(prefetcher, 1)
            source.wait_for((0, 1), (0, 2), ended=False)
            later = threading.Timer(0.05, interrupt)
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - wherever it strikes
                later.start()
                list(prefetcher)
            later.join()
            gate.opened.set()
            assert list(prefetcher) == epoch_of(0)[1:]


HANGS = """
import sys, threading
from smartcache.training import prefetch
prefetch.EXIT_SECONDS = 0.2
began = threading.Event()
def source():
    yield 1
    began.set()
    threading.Event().wait()
prefetcher = prefetch.Prefetcher(source())
print(next(iter(prefetcher)))
began.wait()
"""
UNCLOSED = """
import itertools, time
from smartcache.training.prefetch import Prefetcher
def source():
    for number in itertools.count():
        time.sleep(0.001)
        yield number
prefetcher = Prefetcher(source(), depth=10)
print(sum(itertools.islice(prefetcher, 3)))
raise SystemExit(3)
"""
LAST_THREAD = """
import threading
from smartcache.training.prefetch import Prefetcher
began, ends = threading.Event(), threading.Event()
def consume():
    prefetcher = Prefetcher(range(1000))
    first = next(iter(prefetcher))
    began.set()
    ends.wait()
    print(first + sum(prefetcher))
threading.Thread(target=consume).start()
began.wait()
threading._register_atexit(ends.set)
"""
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from smartcache.training.prefetch import Prefetcher
with Prefetcher([{"a": 1}, [2]]) as prefetcher:
    print(list(prefetcher), prefetcher.stats().bytes)
"""


class TestProcesses:
    @pytest.mark.parametrize(
        ("code", "status", "output"),
        [
            pytest.param(HANGS, 0, "1", id="source hangs"),
            pytest.param(UNCLOSED, 3, "3", id="not closed"),
            pytest.param(LAST_THREAD, 0, "499500", id="used until the last thread ends"),
            pytest.param(WITHOUT_TORCH, 0, "[{'a': 1}, [2]] 0", id="without torch"),
        ],
    )
    def test_the_process_ends(self, code: str, status: int, output: str) -> None:
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT, capture_output=True, text=True, timeout=LONG, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout.strip()) == (status, output), done.stderr
        assert "Traceback" not in done.stderr

    def test_a_forked_child_is_told_and_does_not_hang(self) -> None:
        gate = Gate((0, 1), (0, 2))
        source = Numbers(on_read=gate)
        with Prefetcher(source) as prefetcher:
            iterator = iter(prefetcher)
            next(iterator)
            source.wait_for((0, 1), (0, 2), ended=False)

            def use() -> list[str]:
                said = []
                for act in (
                    lambda: list(prefetcher),
                    lambda: next(iterator),
                    prefetcher.drain,
                    prefetcher.stats,
                    prefetcher.state_dict,
                    lambda: prefetcher.paused().__enter__(),
                ):
                    try:
                        act()
                    except SmartcacheError as error:
                        said.append(error.message)
                prefetcher.close()
                return said

            with Child(use) as child:
                said = child.result()
            gate.opened.set()
            assert len(said) == 6
            assert {each.partition(",")[0] for each in said} == {
                "The prefetcher was started in another process"
            }
            assert len(list(iterator)) == 3

    def test_one_that_was_not_started_works_in_a_child(self) -> None:
        with Prefetcher(Numbers()) as prefetcher:
            with Child(lambda: (os.getpid(), list(prefetcher))) as child:
                pid, got = child.result()
            assert pid != os.getpid()
            assert got == list(prefetcher) == epoch_of(0)


class TestStats:
    def test_count_what_was_handed_out(self) -> None:
        source = [{"a": np.zeros(10, np.float32), "b": [np.zeros(3, np.uint8), "text"]}] * 5
        with Prefetcher(source) as prefetcher:
            assert str(prefetcher.stats()) == "No batch was handed out yet."
            list(prefetcher)
            stats = prefetcher.stats()
        assert (stats.batches, stats.bytes) == (5, 5 * 43)
        assert 0 < stats.consumer_waited <= stats.seconds
        assert stats.mean_read > 0

    def test_the_consumer_waits_for_a_read(self) -> None:
        source = Numbers(3, on_read=lambda step: time.sleep(0.02))
        with Prefetcher(source, depth=1) as prefetcher:
            list(prefetcher)
            stats = prefetcher.stats()
        assert stats.consumer_waited >= 0.05
        assert stats.mean_read >= 0.02
        assert str(stats).startswith("Loading is the bottleneck: the consumer waited ")

    def test_readers_wait_for_the_consumer(self) -> None:
        source = Numbers(3)
        with Prefetcher(source, depth=1) as prefetcher:
            for index, _ in enumerate(prefetcher):
                source.wait_for((0, min(index + 1, 2)))
                time.sleep(0.02)
            assert prefetcher.stats().readers_waited > 0

    @pytest.mark.parametrize(
        ("waited", "sentence"),
        [
            (0.0, "The GPU waited 0 % of the time: loading keeps up."),
            (3.0, "The GPU waited 3 % of the time: loading keeps up."),
            (47.0, "Loading is the bottleneck: the GPU waited 47 % of the time."),
        ],
    )
    def test_in_a_sentence(self, waited: float, sentence: str) -> None:
        stats = PrefetchStats(
            batches=9,
            bytes=9,
            seconds=100.0,
            consumer_waited=waited,
            readers_waited=0.0,
            mean_read=1.0,
            consumer="GPU",
        )
        assert str(stats) == sentence


class TestArguments:
    @pytest.mark.parametrize("name", ["depth", "threads"])
    def test_at_least_one_of_each(self, name: str) -> None:
        with pytest.raises(ConfigError, match=f"{name} must be at least 1"):
            Prefetcher([1], **{name: 0})  # type: ignore[arg-type]

    def test_wrong_ones_leave_nothing_behind(self) -> None:
        """What `__del__` raises would be an error here."""
        with pytest.raises(TypeError):
            Prefetcher([1], size=3)  # type: ignore[call-arg]
        gc.collect()

    def test_nothing_is_pinned_for_the_cpu(self) -> None:
        with pytest.raises(ConfigError, match="CUDA"):
            Prefetcher([1], pin_memory=True)


class Pair(NamedTuple):
    first: torch.Tensor
    second: object


@pytest.mark.torch
class TestDevices:
    @pytest.mark.parametrize("device", [None, "cpu", "cpu:0"])
    def test_on_the_cpu_a_batch_is_the_very_same(self, device: str | None) -> None:
        import torch

        source = [{"tensor": torch.arange(3)}]
        with Prefetcher(source, device=device) as prefetcher:
            assert [each is source[0] for each in prefetcher] == [True]

    def test_only_tensors_move_however_deep(self) -> None:
        import torch

        array, text = np.arange(3), "text"
        pair = Pair(torch.zeros(3), array)
        batch: Batch = {"a": torch.ones(2), "b": [pair, (text, None)], "c": {}}
        with Prefetcher([batch], device="meta") as prefetcher:
            (got,) = prefetcher
        match got:
            case {"a": torch.Tensor() as one, "b": [Pair(torch.Tensor() as two, rest), last]}:
                assert [each.device.type for each in (one, two)] == ["meta", "meta"]
                assert rest is array
                assert last == (text, None)
            case _:
                pytest.fail(f"not the same shape: {got}")
        assert list(got) == ["a", "b", "c"]
        assert pair.first.device.type == "cpu"

    def test_what_cannot_be_pinned_or_found_is_refused(self) -> None:
        import torch

        with pytest.raises(ConfigError, match="meta is none"):
            Prefetcher([1], device="meta", pin_memory=True)
        if not torch.cuda.is_available():
            with pytest.raises(ConfigError, match="no CUDA"):
                Prefetcher([1], device="cuda")

    def test_sparse_tensors_count_as_if_dense(self) -> None:
        import torch

        with Prefetcher([torch.eye(4).to_sparse()]) as prefetcher:
            list(prefetcher)
            assert prefetcher.stats().bytes == 64


@pytest.mark.torch
@pytest.mark.cuda
class TestCuda:
    @pytest.mark.parametrize("pin_memory", ["auto", False])
    def test_batches_arrive_whole_and_in_order(self, pin_memory: bool | Literal["auto"]) -> None:
        """More of them than the ring has buffers, of sizes that grow and shrink."""
        import torch

        def batches() -> Iterable[dict[str, object]]:
            for number in range(60):
                count = (number * 7919) % 50_000 + 1
                yield {"n": torch.full((count,), number), "half": torch.ones(3).half() * number}

        with Prefetcher(batches(), depth=4, device="cuda", pin_memory=pin_memory) as prefetcher:
            for number, batch in enumerate(prefetcher):
                for value in batch.values():
                    assert isinstance(value, torch.Tensor)
                    assert value.is_cuda
                    assert bool((value == number).all())
            assert number == 59
            assert "GPU" in str(prefetcher.stats())

    def test_the_current_stream_waits_for_the_copy(self) -> None:
        """Also one that is not the default, and while memory is used again and again."""
        import torch

        source = [torch.full((2_000_000,), number) for number in range(30)]
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            with Prefetcher(source, depth=3, device="cuda") as prefetcher:
                sums = [tensor.sum() for tensor in prefetcher]
            assert [int(each) for each in sums] == [2_000_000 * n for n in range(30)]

    def test_memory_formats_dtypes_and_shapes_stay(self) -> None:
        import torch

        given = [
            torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
            torch.rand(4, 6).t(),
            torch.tensor(5),
            torch.zeros(0, 3),
            torch.tensor([True, False]),
            torch.rand(5).bfloat16(),
            torch.rand(3).expand(2, 3),
            torch.rand(3).pin_memory(),
            torch.rand(3).cuda(),
        ]
        with Prefetcher([given], device="cuda") as prefetcher:
            (got,) = prefetcher
        for before, after in zip(given, got, strict=True):
            assert after.is_cuda
            assert after.dtype is before.dtype
            assert torch.equal(after.cpu(), before.cpu())
        assert got[0].is_contiguous(memory_format=torch.channels_last)

    def test_a_pause_waits_for_the_copies(self) -> None:
        import torch

        source = [torch.ones(1_000_000)] * 5
        with Prefetcher(source, device="cuda") as prefetcher:
            iterator = iter(prefetcher)
            next(iterator)
            with prefetcher.paused():
                torch.cuda.synchronize()
            assert len(list(iterator)) == 4
