"""What the opening of a store has to put right, and can be killed in as well."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.api import Store
from tests.processes.kill_operations import OPERATIONS, before_rebuild, rebuild
from tests.processes.kill_worlds import Operation, World
from tests.processes.killing import Moment, die_at, in_child, was_killed


def _kill_at(operation: Operation, moment: Moment) -> Callable[[World], None]:
    def spoil(world: World) -> None:
        def run() -> None:
            store = world.open()
            die_at(moment)
            operation.run(world, store)

        if not was_killed(in_child(run)):
            raise AssertionError(f"{operation} did not reach {moment}")

    return spoil


def _recoveries(operations: list[Operation]) -> Iterator[Operation]:
    """Yield the opening of a store after an operation was killed: recovery can be killed, too."""
    moments = {
        "put by moving": Moment("adopt: linked", 1),
        "adopt": Moment("adopt: linked", 2),
        "replace": Moment("replace: exchanged", 3),
        "place hardlink over a file": Moment("place: temporary made", 1),
        "place copy": Moment("place: linked", 1),
        "rm": Moment("forget: row removed", 1),
        "undo": Moment("own copy: written", 3),
        "eject and keep sharing": Moment("eject: files restored", 1),
        "mv": Moment("move: exchanged", 1),
        "mv to another filesystem": Moment("move: switched", 1),
    }
    for operation in operations:
        if operation.name in moments:
            spoil = _kill_at(operation, moments[operation.name])
            yield replace(operation, name=f"recover from {operation}", spoil=spoil)


def _lose_index(world: World) -> None:
    for path in world.root.glob("index.sqlite3*"):
        path.unlink()


def _nothing(world: World, store: Store) -> None:
    pass


OPENINGS = [
    *_recoveries(OPERATIONS),
    Operation(
        name="open for the first time",
        prepare=_nothing,
        run=_nothing,
        spoil=lambda world: shutil.rmtree(world.root),
    ),
    Operation(name="open without an index", prepare=before_rebuild, run=rebuild, spoil=_lose_index),
]
