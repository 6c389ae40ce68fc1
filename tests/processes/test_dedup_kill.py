"""`dedup` killed with SIGKILL: every file is whole, and it can be undone or go on.

On one filesystem it is a row of `tests.processes.operations`. Here it runs on two, of which one
gets a volume.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("fork and SIGKILL", allow_module_level=True)

from tests.folders.deduping import (
    deduplicated,
    inodes_of,
    leftovers,
    open_store,
    undo_everything,
)  # fmt: skip
from tests.folders.trees import content, write
from tests.processes.killing import fail_with, moments_of, problems_of_kills
from tests.store.files import snapshot
from tests.store.small_disks import Disk, in_own_namespace

Facts = dict[str, tuple[object, ...]]


class TwoDisks:
    """A user's files on two disks, the second of which is in memory."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.home = directory / "store"
        self.here, self.there = directory / "files", directory / "disk" / "z"
        Disk(directory / "disk", 16 << 20)
        for place in (self.here / "x", self.here / "y", self.there):
            for number in range(4):
                age = number * 1000 + len(str(place)) % 100
                write(place / f"{number}.pt", content(number % 2, 5000), mtime=1_600_000_000 + age)
        os.link(self.here / "x" / "3.pt", self.here / "y" / "again.pt")
        os.link(self.there / "2.pt", self.there / "again.pt")
        self.before = self.facts()

    def facts(self) -> Facts:
        """Everything about the user's files on both disks."""
        near = {f"here/{name}": facts for name, facts in snapshot(self.here).items()}
        return near | {f"there/{name}": facts for name, facts in snapshot(self.there).items()}

    def dedup(self) -> None:
        with open_store(self.home) as store:
            assert deduplicated(store, self.here / "x", self.here / "y", self.there).is_complete


def faults_after_a_kill(disks: TwoDisks, *, goes_on: bool) -> Iterator[str]:
    """Yield the faults now, after the next run if it goes on, and after undo."""
    before = disks.before
    if goes_on:
        disks.dedup()
        inodes = [inodes_of(folder.iterdir()) for folder in (disks.here / "x", disks.there)]
        if [len(each) for each in inodes] != [2, 2]:
            yield "the second run did not do all of it"
    with open_store(disks.home) as store:
        stores = store.stores()  # each clears up when it is opened
        now = disks.facts()
        if before.keys() != now.keys():
            yield f"other names: {sorted(before.keys() ^ now.keys())}"
        shared = before.keys() & now.keys()
        yield from (f"other bytes: {n}" for n in shared if before[n][-1] != now[n][-1])
        yield from (f"left: {name}" for name in leftovers(disks.here, disks.there))
        yield from (f"{s.root} is damaged" for s in stores if s.verify(full=True).has_damage)
        yield from (f"not undone: {stuck}" for stuck in undo_everything(store))
        for each in stores:
            yield from (f"{each.root}: left {n}" for n in os.listdir(each.volume.layout.tmp))
    after = disks.facts()
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name):
            was, is_now = before.get(name, ())[:-1], after.get(name, ())[:-1]
            yield f"after undo {name} is {is_now}, was {was}"


@pytest.mark.parametrize("goes_on", [False, True], ids=["undo", "go on, then undo"])
def test_a_kill_anywhere_on_two_filesystems_can_be_undone(goes_on: bool, tmp_path: Path) -> None:
    def run() -> list[str]:
        def make(name: str) -> TwoDisks:
            return TwoDisks(tmp_path / name)

        moments = moments_of(make, TwoDisks.dedup)
        judge = partial(faults_after_a_kill, goes_on=goes_on)
        return list(problems_of_kills(moments, make, TwoDisks.dedup, judge))

    fail_with(in_own_namespace(run))
