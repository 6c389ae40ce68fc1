"""A process killed with SIGKILL between any two steps loses nothing and leaves nothing behind.

Every operation is run once to learn which fault points it reaches, then killed at each of them (the
first and the last time; in ordinary runs at some of them). After the store is
opened again, all of the user's files must be there with their bytes and modes, `verify` must find
nothing worse than an unindexed blob, and the operation, run again, must end as if it had never been
interrupted, down to what undo gives back.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.processes.kill_checks import WAYS, Reference, Way, killed, uninterrupted
from tests.processes.kill_openings import OPENINGS
from tests.processes.kill_operations import OPERATIONS
from tests.processes.kill_worlds import Operation, World
from tests.processes.killing import Moment, in_turn, points_of, states_of
from tests.store.reflink_disks import reflink_disk

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="fork and SIGKILL")

OTHER_FILESYSTEM = Path("/dev/shm")  # noqa: S108 - a tmpfs that needs no privilege

NewWorld = Callable[[], World]


@pytest.fixture
def new_world(operation: Operation, tmp_path: Path) -> Iterator[NewWorld]:
    """Makes directories for one case each, on the filesystems that the operation needs."""
    numbers = itertools.count()
    if operation.needs_reflinks:
        with reflink_disk("btrfs", tmp_path) as disk:
            yield lambda: World(disk / f"world{next(numbers)}", has_reflinks=True)
        return
    if not operation.needs_elsewhere:
        yield lambda: World(tmp_path / f"world{next(numbers)}")
        return
    if (
        not OTHER_FILESYSTEM.is_dir()
        or os.stat(OTHER_FILESYSTEM).st_dev == os.stat(tmp_path).st_dev
    ):
        pytest.skip(f"{OTHER_FILESYSTEM} is no other filesystem")
    with tempfile.TemporaryDirectory(prefix="smartcache-test-", dir=OTHER_FILESYSTEM) as far:

        def make() -> World:
            name = f"world{next(numbers)}"
            return World(tmp_path / name, Path(far) / name)

        yield make


def problems_of(
    operation: Operation,
    moments: list[Moment],
    way: Way,
    reference: Reference,
    new_world: NewWorld,
) -> list[str]:
    problems: list[str] = []
    for moment in moments:
        with new_world() as world:
            found = killed(operation, world, moment, way, reference)
            problems += [f"{operation} killed at {moment}: {problem}" for problem in found]
    return problems


def states_during(operation: Operation, world: World) -> list[Moment]:
    """Return the moments after which an operation (or an opening) had changed the disk."""
    operation.begin(world)

    def start() -> Callable[[], None]:
        if operation.spoil is not None:
            return lambda: world.open().close()
        store = world.open()
        return lambda: operation.run(world, store)

    return states_of(start, world.places)


def fail_with(problems: list[str]) -> None:
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_a_kill_at_any_fault_point_loses_nothing(
    operation: Operation, way: Way, new_world: NewWorld, soak: bool
) -> None:
    moments: list[Moment] = []
    with new_world() as world:
        reference = uninterrupted(
            operation,
            world,
            lambda store: moments.extend(points_of(lambda: operation.run(world, store))),
        )
    if not moments:
        with new_world() as world:
            moments = states_during(operation, world)
    moments = in_turn(moments, WAYS.index(way), len(WAYS), soak=soak)
    fail_with(problems_of(operation, moments, way, reference, new_world))


@pytest.mark.parametrize("operation", OPENINGS, ids=str)
def test_a_kill_while_a_store_is_opened_loses_nothing(
    operation: Operation, new_world: NewWorld, soak: bool
) -> None:
    """Recovery after a kill may itself be killed, as may the making of a store or of its index."""
    with new_world() as world:
        moments = states_during(operation, world)
    with new_world() as world:
        reference = uninterrupted(operation, world, lambda store: operation.run(world, store))
    assert moments
    moments = in_turn(moments, OPENINGS.index(operation), 2, soak=soak)
    fail_with(problems_of(operation, moments, "fresh", reference, new_world))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
@pytest.mark.soak
def test_a_kill_in_any_state_of_the_disk_loses_nothing(
    operation: Operation, way: Way, new_world: NewWorld
) -> None:
    """Fault points are where danger was thought of; these are all lines that changed a file."""
    with new_world() as world:
        moments = states_during(operation, world)
    with new_world() as world:
        reference = uninterrupted(operation, world, lambda store: operation.run(world, store))
    assert moments
    fail_with(problems_of(operation, moments, way, reference, new_world))
