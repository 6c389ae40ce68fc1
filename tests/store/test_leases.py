from __future__ import annotations

import os
import pickle
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.api import Leases, LeaseTimeoutError, StoreError

GUARD = 60.0
"""Seconds after which a defect becomes a failure instead of a hang."""
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="flock")


@pytest.fixture
def leases(tmp_path: Path) -> Leases:
    return Leases(tmp_path / "store" / "leases")


@contextmanager
def held_by_another_thread(leases: Leases, *keys: str, what: str = "") -> Iterator[None]:
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with leases.hold(keys, what=what, timeout=GUARD):
            taken.set()
            done.wait()

    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(hold)
        try:
            assert taken.wait(30)
            yield
        finally:
            done.set()
            holding.result()


def asked_in_vain(leases: Leases, *keys: str, timeout: float = 0.02) -> LeaseTimeoutError:
    with pytest.raises(LeaseTimeoutError) as caught, leases.hold(keys, timeout=timeout):
        pass
    return caught.value


@pytest.mark.parametrize("tables", ["one object", "one object each"])
def test_of_many_threads_one_at_a_time_works(leases: Leases, tables: str) -> None:
    at_work: list[int] = []
    crowds: list[int] = []

    def work(number: int) -> None:
        mine = leases if tables == "one object" else Leases(leases.directory)
        for _ in range(20):
            with mine.hold("key"):
                at_work.append(number)
                time.sleep(0)
                crowds.append(len(at_work))
                at_work.remove(number)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(16)))
    assert crowds == [1] * 16 * 20


def test_other_keys_are_free(leases: Leases) -> None:
    with held_by_another_thread(leases, "a"), leases.hold("b", timeout=0):
        assert leases.busy("a")
        assert leases.busy("b")
        assert leases.busy("c") is None


def test_the_directory_is_made_and_left_empty(leases: Leases) -> None:
    assert not leases.directory.exists()
    with leases.hold(["a", "b"]):
        names = sorted(os.listdir(leases.directory))
        assert len(names) == 2
        assert all(re.fullmatch("[0-9a-f]{32}", name) for name in names)
    assert os.listdir(leases.directory) == []


def test_a_directory_that_vanished_is_made_again(leases: Leases) -> None:
    with leases.hold("a"):
        shutil.rmtree(leases.directory)
    with leases.hold("a", timeout=30):
        assert leases.busy("a")


def test_a_lease_is_given_back_when_the_block_raises(leases: Leases) -> None:
    with pytest.raises(ZeroDivisionError), leases.hold(["a", "b"]):
        raise ZeroDivisionError
    with leases.hold(["a", "b"], timeout=0):
        pass


def test_a_thread_that_asks_again_is_told_and_keeps_what_it_has(leases: Leases) -> None:
    with leases.hold("b"):
        for same in (leases, Leases(leases.directory)):
            with pytest.raises(StoreError, match="would wait for itself"), same.hold(["a", "b"]):
                pass
        assert leases.busy("b")
        assert leases.busy("a") is None, "what it got before it was told is given back"
    assert leases.busy("b") is None


def test_keys_may_repeat_be_any_iterable_or_none(leases: Leases) -> None:
    with leases.hold(key for key in ["a", "b", "a"]):
        assert leases.busy("a")
    with leases.hold([]):
        pass


@pytest.mark.parametrize("key", ["", "a/b\0c", "x" * 10_000, "\udcff", "ß"])
def test_a_key_may_be_any_text(leases: Leases, key: str) -> None:
    with held_by_another_thread(leases, key):
        assert vars(asked_in_vain(leases, key))["key"] == key


def test_one_text_is_one_key(leases: Leases) -> None:
    with leases.hold("abc"):
        assert leases.busy("a") is None
        assert leases.busy("abc")


def test_the_timeout_error_says_which_key_and_who_and_survives_pickling(leases: Leases) -> None:
    with held_by_another_thread(leases, "b", what="download"):
        error = asked_in_vain(leases, "a", "b", "c")
        assert leases.busy("a") is None, "all keys or none"
    for each in (error, pickle.loads(pickle.dumps(error))):  # noqa: S301
        assert isinstance(each, TimeoutError)
        assert vars(each)["key"] == "b"
        assert vars(each)["holder"].startswith("this process (download), since ")
        assert str(each).startswith("Gave up after 0.02 s: the lease on 'b' is held by")


def test_a_timeout_error_kept_alive_keeps_no_lease(leases: Leases) -> None:
    with held_by_another_thread(leases, "b"):
        error = asked_in_vain(leases, "a", "b")
    with leases.hold(["a", "b"], timeout=0):
        assert error.__traceback__ is not None


@pytest.mark.parametrize("timeout", [None, 60])
def test_who_waits_hears_once_what_for(leases: Leases, timeout: float | None) -> None:
    heard: list[str] = []
    told = threading.Event()

    def hear(sentence: str) -> None:
        heard.append(sentence)
        told.set()

    def ask() -> None:
        with leases.hold("a", timeout=timeout, on_wait=hear):
            pass

    with ThreadPoolExecutor(1) as pool:
        with leases.hold("a", what="download"):
            asking = pool.submit(ask)
            assert told.wait(30)
        asking.result(30)
    assert len(heard) == 1
    assert re.fullmatch(
        r"the lease on 'a' is held by this process \(download\), since \d\d:\d\d", heard[0]
    )


def test_busy_says_who_works(leases: Leases) -> None:
    assert leases.busy("a") is None
    with leases.hold("a", what="encode"):
        assert str(leases.busy("a")).startswith("this process (encode), since ")
    assert leases.busy("a") is None


def test_a_file_left_behind_is_no_lease(leases: Leases) -> None:
    with leases.hold("a"):
        (name,) = os.listdir(leases.directory)
    (leases.directory / name).write_bytes(b"\0garbage")
    assert leases.busy("a") is None
    with leases.hold("a", timeout=0):
        assert str(leases.busy("a")).startswith("this process")
    assert os.listdir(leases.directory) == []


def test_a_note_that_cannot_be_read_names_nobody(leases: Leases) -> None:
    with leases.hold("a"):
        (name,) = os.listdir(leases.directory)
        (leases.directory / name).write_bytes(b"\0garbage")
        assert leases.busy("a") == "another process"
