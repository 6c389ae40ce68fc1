"""Loadings killed with SIGKILL while blobs are lent: nothing wrong is visible, nothing stays lent.

The next loading of the repo takes back what the dead one borrowed, and proves what it has brought.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("fork and SIGKILL", allow_module_level=True)

from tests.api import Loans
from tests.hub_server import Hub
from tests.processes.downloading import Starter, World, content
from tests.processes.killing import Moment, in_turn

SIZE = 100_000
KNOWN, UNWANTED, FETCHED = "a/model.safetensors", "b/model.safetensors", "c/model.safetensors"
FILES = {
    "config.json": b"{}",
    **{path: content(n, SIZE) for n, path in enumerate((KNOWN, UNWANTED, FETCHED), 20)},
}
WANTED = ["config.json", "a/*", "c/*"]


@pytest.fixture(scope="module")
def starter() -> Iterator[Starter]:
    with Starter() as starter:
        yield starter


def make_world(directory: Path, hub: Hub, starter: Starter) -> World:
    world = World(directory, hub, starter)
    with world.store() as store:
        for path in (KNOWN, UNWANTED):
            store.put_stream([FILES[path]], algorithms=("sha256",))
    return world


def load(world: World, die_at: Moment | None = None) -> list[str]:
    """Load what is wanted; return the fault points, or none if it was killed."""
    running = world.start("org/one", way="lent", die_at=die_at, allow_patterns=WANTED)
    ended = running.wait()
    assert ended.is_killed == (die_at is not None)
    return ended.points


def unsettled(world: World) -> Iterator[str]:
    """Yield what the last loading has left behind."""
    yield from world.problems()
    names = set(os.listdir(world.folder("org/one") / "blobs"))
    wanted = {world.commit("org/one").etag(path) for path in FILES if path != UNWANTED}
    if names != wanted:
        yield f"in blobs/: {names ^ wanted}"
    with world.store() as store:
        if Loans(store, world.folder("org/one")).unsettled():
            yield "a loan is still noted"


def test_a_kill_at_any_fault_point_leaves_nothing_lent(
    tmp_path: Path, hub: Hub, starter: Starter, soak: bool
) -> None:
    hub.add("org/one", FILES)
    whole = make_world(tmp_path / "whole", hub, starter)
    points = load(whole)
    assert {"lend: lent", "lend: loaded", "loan: taken back", "undo: link removed"} <= set(points)
    assert list(unsettled(whole)) == []
    problems: list[str] = []
    moments = [Moment(place, 1) for place in dict.fromkeys(points)]
    for number, moment in enumerate(in_turn(moments, 0, 1, soak=soak)):
        place = moment.place
        world = make_world(tmp_path / str(number), hub, starter)
        load(world, moment)
        problems += [f"killed at {place}: {problem}" for problem in world.problems()]
        hub.clear()
        load(world)
        if hub.gets(KNOWN):
            problems.append(f"killed at {place}: {KNOWN} was fetched")
        problems += [f"after the next, killed at {place}: {each}" for each in unsettled(world)]
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)


@pytest.mark.parametrize("path", [FETCHED, "config.json"])
def test_wrong_bytes_that_a_killed_loading_brought_are_found_by_the_next(
    path: str, tmp_path: Path, hub: Hub, starter: Starter
) -> None:
    hub.add("org/one", FILES)
    world = make_world(tmp_path / "world", hub, starter)
    hub.faults.wrong_bytes(path)
    load(world, Moment("lend: loaded", 1))
    assert world.problems() != []
    ended = world.start("org/one", way="lent", allow_patterns=WANTED).wait()
    if ended.errors:
        assert "DigestMismatchError" in ended.error
        load(world)
    assert list(unsettled(world)) == []
