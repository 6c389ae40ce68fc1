"""Many processes and threads use one set at once, and every answer is right.

Nobody damages anything here: so nothing is missing that was acknowledged, nothing is older than
what its reader knows to be there, and nobody waits for ever.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal

import pytest

from smartcache.artifacts import ArtifactSet, ArtifactSets
from smartcache.artifacts.engine.write import delete_exactly
from smartcache.artifacts.keys import check_key
from smartcache.errors import ArtifactError, ArtifactNotFoundError
from smartcache.progress import Job, silent
from smartcache.system import faults
from tests.artifacts.opening import array, engine_of, open_set
from tests.processes.artifact_writers import (
    KEYS,
    SMALL_PACK,
    change,
    in_fork,
    key_of,
    number_in,
    value_of,
    wait_for,
)
from tests.processes.children import Child, at_once
from tests.processes.killing import Moment, die_at, in_child, was_killed

Rounds = Callable[[int], int]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "sets"


# all at once


def read_and_write(root: Path, number: int, count: int) -> Counter[str]:
    """Write keys of one's own, knowing what they are; read those of others, which only grow."""
    chance = random.Random(number)
    counts: Counter[str] = Counter()
    own: dict[str, int] = {}
    newest: dict[str, int] = {}
    with open_set(ArtifactSets(root), pack_bytes=SMALL_PACK) as opened:
        for _ in range(count):
            key = key_of(number, chance.randrange(KEYS))
            act = chance.random()
            if act < 0.35:
                own[key] = time.monotonic_ns()
                opened.put(key, value_of(key, own[key]), metadata={"number": own[key]})
                counts["put"] += 1
            elif act < 0.42:
                assert opened.delete(key) == (key in own), "it is known whether there is one"
                own.pop(key, None)
            elif act < 0.7:
                value = opened.get(key)
                assert (None if value is None else number_in(key, value)) == own.get(key)
            else:
                _read_others(opened, chance, newest, counts)
            if chance.random() < 0.02:
                _look_after(opened, chance, counts)
        for key in (key_of(number, index) for index in range(KEYS)):
            value = opened.get(key)
            assert (None if value is None else number_in(key, value)) == own.get(key)
    return counts


def _read_others(
    opened: ArtifactSet, chance: random.Random, newest: dict[str, int], counts: Counter[str]
) -> None:
    keys = [key_of(chance.randrange(4), chance.randrange(KEYS)) for _ in range(4)]
    there = [key for key in keys if key in opened]
    try:
        if chance.random() < 0.5:
            batch = opened.get_batch(there)
            found = [{name: batch[name][index] for name in batch} for index in range(len(there))]
        else:
            samples = [opened[key] for key in there]
            found = [{name: sample[name] for name in sample} for sample in samples]
    except ArtifactNotFoundError:
        counts["gone"] += 1
        return
    for key, value in zip(there, found, strict=True):
        number = number_in(key, value)
        assert number >= newest.get(key, 0), f"{key} was newer before"
        newest[key] = number
        counts["read"] += 1


def _look_after(opened: ArtifactSet, chance: random.Random, counts: Counter[str]) -> None:
    act = chance.randrange(3)
    if act == 0:
        counts["packs compacted"] += opened.compact(force=True).packs
    elif act == 1:
        report = opened.verify()
        assert not report.damage, report
        counts["verified"] += 1
    else:
        ArtifactSets(opened.path.parent.parent).rebuild(opened.describe())
        counts["rebuilt"] += 1


def test_four_processes_write_and_read_one_set(root: Path, rounds: Rounds) -> None:
    work = (partial(read_and_write, root, number, rounds(150)) for number in range(4))
    counts = sum(at_once(*work), Counter[str]())
    wanted = ("put", "read", "packs compacted", "verified", "rebuilt")
    assert all(counts[each] for each in wanted), counts
    with open_set(ArtifactSets(root)) as opened:
        assert not opened.verify().damage


def test_nobody_writes_to_a_pack_that_is_being_compacted(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even after a rebuild that has seen the pack while its writer was about to let go."""
    sets = ArtifactSets(root)

    def other(act: Callable[[ArtifactSet], object]) -> None:
        def work() -> None:
            faults.hook = None
            with open_set(sets) as opened:
                act(opened)

        with Child(work) as child:
            child.result()

    seen = []

    def hook(point: str) -> None:
        if point == "set: pack left":
            seen.append(point)
            other(lambda opened: sets.rebuild(opened.describe()))
        elif point == "compact: copied":
            seen.append(point)
            other(lambda opened: change(opened, "new", 5))

    with open_set(sets) as opened:
        change(opened, "k", 1)
        change(opened, "k", 2)
        monkeypatch.setattr(faults, "hook", hook)
        assert opened.compact(force=True).packs == 1
        monkeypatch.setattr(faults, "hook", None)
        assert seen[:2] == ["set: pack left", "compact: copied"]
        assert number_in("new", opened.get("new")) == 5
        assert number_in("k", opened.get("k")) == 2
        assert not opened.verify().damage


def test_a_writer_whose_pack_is_removed_says_so_and_writes_on(root: Path) -> None:
    """By a stranger: `rm` in the folder of the set."""
    with open_set(ArtifactSets(root)) as opened:
        change(opened, "k", 1)
        for path in opened.path.glob("*.pack"):
            path.unlink()
        with pytest.raises(ArtifactError, match="removed"):
            change(opened, "k", 2)
        change(opened, "k", 3)
        assert number_in("k", opened.get("k")) == 3


def test_verify_calls_nothing_damaged_that_is_deleted_meanwhile(root: Path) -> None:
    with open_set(ArtifactSets(root)) as opened:
        change(opened, "k", 1)

        def progress(
            label: str, total: int | None = None, unit: Literal["bytes", "items"] = "items"
        ) -> Job:
            opened.delete("k")  # after it was noted what there is to be read
            return silent(label, total, unit)

        report = opened.verify(progress=progress)
        assert report.damaged == []
        assert not report.damage


# one computation


def test_many_threads_and_processes_compute_once(root: Path) -> None:
    log = root.parent / "computed"

    def compute() -> dict[str, object]:
        with open(log, "a", encoding="ascii") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.2)
        return value_of("k", 1)

    def ask(opened: ArtifactSet) -> int:
        return number_in("k", opened.get_or_compute("k", compute))

    def process() -> list[int]:
        with open_set(ArtifactSets(root)) as opened, ThreadPoolExecutor(16) as threads:
            return list(threads.map(ask, [opened] * 16))

    assert at_once(*[process] * 4) == [[1] * 16] * 4
    assert len(log.read_text().splitlines()) == 1


def test_when_the_one_who_computes_is_killed_the_next_one_computes(root: Path) -> None:
    started = root.parent / "started"

    def hang() -> object:
        started.touch()
        time.sleep(60)
        return None

    def process() -> None:
        with open_set(ArtifactSets(root)) as opened:
            opened.get_or_compute("k", hang)

    pid = in_fork(process)
    wait_for(started)

    def ask() -> int:
        with open_set(ArtifactSets(root)) as opened:
            return number_in("k", opened.get_or_compute("k", lambda: value_of("k", 2)))

    with Child(ask) as waiting:
        time.sleep(0.1)
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        assert waiting.result() == 2


def test_what_a_killed_process_computed_is_not_computed_again(root: Path) -> None:
    with open_set(ArtifactSets(root)) as opened:
        assert opened.get("k") is None

        def die() -> None:
            with open_set(ArtifactSets(root)) as other:
                die_at(Moment("pack: written", 2))  # the layout comes first
                other.get_or_compute("k", lambda: value_of("k", 3))

        assert was_killed(in_child(die))
        found = opened.get_or_compute("k", lambda: pytest.fail("computed again"))
        assert number_in("k", found) == 3


# the order of what happens


def test_a_value_that_was_just_replaced_is_never_read_again(root: Path, rounds: Rounds) -> None:
    """Whatever moment a row is written in, between what is pending and what is remembered."""
    acknowledged, is_over = [0], threading.Event()
    failures: list[str] = []
    with open_set(ArtifactSets(root)) as opened:
        opened.put("k", {"n": 0})

        def read() -> None:
            while not is_over.is_set() and not failures:
                before = acknowledged[0]
                found = opened.get("k")["n"]
                if found < before:
                    failures.append(f"read {found} after {before} was put")

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        for number in range(1, rounds(1000)):
            opened.put("k", {"n": number})
            acknowledged[0] = number
            if number % 3 == 0:
                opened.flush()
        is_over.set()
        for thread in threads:
            thread.join()
    assert not failures


@pytest.mark.parametrize("count", [1, 9])
def test_a_value_of_another_process_is_seen_although_this_one_deleted_the_key(
    root: Path, count: int
) -> None:
    with open_set(ArtifactSets(root)) as opened:
        for number in range(count):
            opened.put(f"k{number}", {"n": number})
        opened.flush()
        for number in range(count):
            opened.delete(f"k{number}")
        opened.flush()

        def put_again() -> None:
            with open_set(ArtifactSets(root)) as other:
                for number in range(count):
                    other.put(f"k{number}", {"n": -number})

        with Child(put_again) as child:
            child.result()
        assert [opened.get(f"k{number}") for number in range(count)] == [
            {"n": -number} for number in range(count)
        ]


def test_what_is_found_to_be_damaged_takes_nothing_newer_along(root: Path) -> None:
    """Another process puts a whole value in the moment in which damage is noticed."""
    with open_set(ArtifactSets(root)) as opened:
        change(opened, "k", 1)
        (pack,) = opened.path.glob("*.pack")
        data = bytearray(pack.read_bytes())
        data[data.index(value_of("k", 1)["own"].tobytes()) + 5] ^= 1
        pack.write_bytes(data)
        place = engine_of(opened).catalog.find(check_key("k"))

        def put() -> None:
            with open_set(ArtifactSets(root)) as other:
                change(other, "k", 2)

        assert place is not None
        assert in_child(put) == 0
        assert not delete_exactly(engine_of(opened), check_key("k"), place.seq)
        assert number_in("k", opened.get("k")) == 2


def test_a_deletion_is_kept_when_the_copies_are_full_before_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was made while the artifact was copied, and stands in a pack that is copied later."""
    for turn in range(20):  # until the packs, which have random names, come in this order
        sets = ArtifactSets(root / str(turn))
        with open_set(sets, pack_bytes=18_000) as opened:
            engine_of(opened).look_at = 1 << 60
            for number, key in enumerate(("k", "dead", "more")):
                opened.put(key, {"t": array(100 + number, 4000)})
            (first,) = opened.path.glob("*.pack")
            for number in (1, 2):
                opened.put(f"late {number}", {"t": array(number, 4000)})
            opened.put("dead", 1)
            opened.put("late 3", 1)
            opened.put("late 3", 2)
        second = next(path for path in opened.path.glob("*.pack") if path != first)
        if first < second:
            break

    def delete() -> None:
        faults.hook = None
        with open_set(sets, pack_bytes=18_000) as other:
            assert other.delete("k")

    def hook(point: str) -> None:
        if point == "compact: copied":
            monkeypatch.setattr(faults, "hook", None)
            with Child(delete) as child:
                child.result()

    with open_set(sets, pack_bytes=18_000) as opened:
        monkeypatch.setattr(faults, "hook", hook)
        opened.compact(force=True)
        assert "k" not in opened
        assert sorted(opened) == ["dead", "late 1", "late 2", "late 3", "more"]
        assert not first.exists()
        assert not second.exists()
