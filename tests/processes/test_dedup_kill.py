"""`dedup` killed with SIGKILL at any moment: every file is whole, and it can be undone or go on.

At each fault point that a run reaches (the first and the last time), on one filesystem and on two,
and at random times of a real process.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("fork and SIGKILL", allow_module_level=True)

from tests.api import Store
from tests.cli.running import PATIENCE, Smartcache
from tests.folders.deduping import (
    deduplicated,
    inodes_of,
    leftovers,
    open_store,
    planned,
    undo_everything,
)
from tests.folders.trees import content, write
from tests.processes.kill_checks import WAYS, Way, killed, uninterrupted
from tests.processes.kill_operations import LARGE, MEDIUM, OTHER, SMALL, adopted
from tests.processes.kill_worlds import Operation, World
from tests.processes.killing import Moment, die_at, in_child, in_turn, points_of, was_killed
from tests.store.files import snapshot
from tests.store.small_disks import Disk, in_own_namespace

FOLDERS = ("one", "two", "three")


class Folders(World):
    """A world whose files lie in several folders."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        for name in FOLDERS:
            (self.files / name).mkdir()

    def names(self) -> list[str]:
        return sorted(
            str(path.relative_to(self.files)) for path in self.files.rglob("*") if path.is_file()
        )


def _before_dedup(world: World, store: Store) -> None:
    """Three groups: one has two names, one a blob, one is plain; and bystanders."""
    world.write("one/a.bin", LARGE)
    world.write("two/b.bin", LARGE)
    world.write("three/c.bin", LARGE, mode=0o664)
    world.link("one/d.bin", to="two/b.bin")
    adopted(world, store, "one/e.bin", MEDIUM)
    world.write("two/f.bin", MEDIUM)
    world.write("one/g.bin", OTHER)
    world.write("three/h.bin", OTHER)
    world.write("two/alone.bin", SMALL)
    world.write("two/notes.txt", SMALL)


def _dedup(world: World, store: Store) -> None:
    result = deduplicated(store, *(world.files / name for name in FOLDERS))
    assert result.is_complete, result.skipped


def _before_undo(world: World, store: Store) -> None:
    _before_dedup(world, store)
    _dedup(world, store)


def _undo(world: World, store: Store) -> None:
    assert undo_everything(store) == []


OPERATIONS = (
    Operation(name="dedup", prepare=_before_dedup, run=_dedup),
    Operation(name="undo of dedup", prepare=_before_undo, run=_undo),
)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_a_kill_at_any_fault_point_loses_nothing(
    operation: Operation, way: Way, tmp_path: Path, soak: bool
) -> None:
    numbers = itertools.count()
    moments: list[Moment] = []
    with Folders(tmp_path / "whole") as world:
        reference = uninterrupted(
            operation,
            world,
            lambda store: moments.extend(points_of(lambda: operation.run(world, store))),
        )
    assert len(moments) > 5
    problems: list[str] = []
    for moment in in_turn(moments, WAYS.index(way), len(WAYS), soak=soak):
        with Folders(tmp_path / str(next(numbers))) as world:
            found = killed(operation, world, moment, way, reference)
            problems += [f"{operation} killed at {moment}: {problem}" for problem in found]
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)


# two filesystems, one of which gets a volume


def fill(here: Path, there: Path) -> None:
    for place in (here / "x", here / "y", there / "z"):
        for number in range(4):
            age = number * 1000 + len(str(place)) % 100
            write(place / f"{number}.pt", content(number % 2, 5000), mtime=1_600_000_000 + age)
    os.link(here / "x" / "3.pt", here / "y" / "again.pt")
    os.link(there / "z" / "2.pt", there / "z" / "again.pt")


def run_on_both(here: Path, there: Path) -> None:
    with open_store(here.parent / "store") as store:
        assert deduplicated(store, here / "x", here / "y", there / "z").is_complete


Facts = dict[str, tuple[object, ...]]


def facts_of(here: Path, there: Path) -> Facts:
    """Everything about the user's files on both disks."""
    near = {f"here/{name}": facts for name, facts in snapshot(here).items()}
    return near | {f"there/{name}": facts for name, facts in snapshot(there / "z").items()}


def killed_on_two_disks(directory: Path, moment: Moment, *, goes_on: bool) -> Iterator[str]:
    """Kill a run; yield the faults then, after the next run if it goes on, and after undo."""
    here, there = directory / "files", directory / "disk"
    Disk(there, 16 << 20)
    fill(here, there)
    before = facts_of(here, there)

    def run() -> None:
        die_at(moment)
        run_on_both(here, there)

    if not was_killed(in_child(run)):
        yield "it was not killed"
        return
    if goes_on:
        run_on_both(here, there)
        if {len(inodes_of((here / "x").iterdir())), len(inodes_of((there / "z").iterdir()))} != {2}:
            yield "the second run did not do all of it"
    with open_store(directory / "store") as store:
        stores = store.stores()  # each clears up when it is opened
        yield from changed_bytes(before, facts_of(here, there))
        yield from (f"left: {name}" for name in leftovers(here, there / "z"))
        yield from (f"{s.root} is damaged" for s in stores if s.verify(full=True).has_damage)
        yield from (f"not undone: {stuck}" for stuck in undo_everything(store))
        for each in stores:
            yield from (f"{each.root}: left {n}" for n in os.listdir(each.volume.layout.tmp))
    after = facts_of(here, there)
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name):
            was, is_now = before.get(name, ())[:-1], after.get(name, ())[:-1]
            yield f"after undo {name} is {is_now}, was {was}"


def changed_bytes(before: Facts, now: Facts) -> Iterator[str]:
    if before.keys() != now.keys():
        yield f"other names: {sorted(before.keys() ^ now.keys())}"
    for name in before.keys() & now.keys():
        if before[name][-1] != now[name][-1]:
            yield f"other bytes: {name}"


@pytest.mark.parametrize("goes_on", [False, True], ids=["undo", "go on, then undo"])
def test_a_kill_anywhere_on_two_filesystems_can_be_undone(
    goes_on: bool, tmp_path: Path, soak: bool
) -> None:
    def learn() -> list[Moment]:
        here, there = tmp_path / "learn" / "files", tmp_path / "learn" / "disk"
        here.parent.mkdir()
        Disk(there, 16 << 20)
        fill(here, there)
        return points_of(functools.partial(run_on_both, here, there))

    def run() -> list[str]:
        problems: list[str] = []
        for number, moment in enumerate(in_turn(moments, goes_on, 2, soak=soak)):
            directory = tmp_path / str(number)
            directory.mkdir()
            found = killed_on_two_disks(directory, moment, goes_on=goes_on)
            problems += [f"killed at {moment}: {problem}" for problem in found]
        return problems

    moments = in_own_namespace(learn)
    assert len(moments) > 10
    problems = in_own_namespace(run)
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)


# at any time


def many(folder: Path) -> None:
    for number in range(240):
        path = folder / str(number % 5) / f"{number}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content(number % 13, 5000))
        then = 1_600_000_000 + number
        os.utime(path, (then, then))
        if number % 20 == 0:
            os.link(path, path.with_name(f"{number} again.safetensors"))


def kill_soon(program: Smartcache, words: list[str | Path], home: Path, delay: float) -> None:
    """Start the program and kill it a moment after it has begun to change files."""
    process = program.start(*words)
    deadline = time.monotonic() + PATIENCE
    while not (home / "journal.jsonl").exists() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.0005)
    time.sleep(delay)
    process.kill()
    process.communicate()


def test_a_kill_at_any_time_of_a_real_process_loses_nothing(
    tmp_path: Path, rounds: Callable[[int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models"
    many(folder)
    before = snapshot(folder)
    chance = random.Random()
    for number in range(rounds(3)):
        home = tmp_path / f"store {number}"
        monkeypatch.setenv("SMARTCACHE_HOME", str(home))
        program = Smartcache(cwd=tmp_path)
        words: list[str | Path] = ["dedup", folder, "--min-size", "1", "-y"]
        delay = chance.random() * 0.06
        try:
            kill_soon(program, words, home, delay)
            with open_store(home) as store:
                now = snapshot(folder)
                assert now.keys() == before.keys(), delay
                assert [n for n in now if now[n][-1] != before[n][-1]] == [], delay
                assert leftovers(folder) == [], delay
                assert not store.verify(full=True).has_damage
            if number % 2:
                assert program(*words, "--json").json["is_complete"] is True
                with open_store(home) as store:
                    assert planned(store, folder).groups == ()
                    assert len(inodes_of(p for p in folder.rglob("*") if p.is_file())) == 13
        finally:
            program.end()
        with open_store(home) as store:
            assert undo_everything(store) == [], delay
        assert snapshot(folder) == before, delay
        shutil.rmtree(home)
