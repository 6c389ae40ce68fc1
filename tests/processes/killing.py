"""Let something happen to a process at a chosen moment: it is killed, or its disk fails.

A *moment* is the n-th time that a place is reached: a fault point of the code ("put: linked"), or a
call that changes a file ("os.link"). The child is forked from a warm parent, so a case costs
milliseconds.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import pytest

from smartcache.system import faults
from tests.processes.children import Child

W = TypeVar("W")


@dataclass(frozen=True, slots=True)
class Moment:
    """The `nth` time that `place` is reached."""

    place: str
    nth: int

    def __str__(self) -> str:
        return self.place if self.nth == 1 else f"{self.place} (time {self.nth})"


def in_child(action: Callable[[], object]) -> int:
    """Run `action` in a forked child; return its wait status."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            action()
            code = 0
        except BaseException:  # noqa: BLE001 - the child must not return into the test
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    try:
        return os.waitpid(pid, 0)[1]
    except BaseException:  # a timeout or Ctrl-C
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def was_killed(status: int) -> bool:
    """Say whether a child ended by SIGKILL."""
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def at(moment: Moment, act: Callable[[], None]) -> None:
    """Act at a moment of this process; called in a child, before the operation."""
    reached = 0

    def visit(place: str) -> None:
        nonlocal reached
        if place == moment.place:
            reached += 1
            if reached == moment.nth:
                act()

    if is_fault_point(moment):
        faults.hook = visit
    else:
        visit_changes(visit)


def die_at(moment: Moment) -> None:
    """Let this process kill itself at a moment."""
    at(moment, lambda: os.kill(os.getpid(), signal.SIGKILL))


def is_fault_point(moment: Moment) -> bool:
    return not moment.place.startswith("os.") and moment.place != "open"


def points_of(action: Callable[[], object], *, every: bool = False) -> list[Moment]:
    """Run `action`; return the fault points it reached: their first and last time, or `every`."""
    seen: list[str] = []
    faults.hook = seen.append
    try:
        action()
    finally:
        faults.hook = None
    if not every:
        return first_and_last(seen)
    times: Counter[str] = Counter()
    return [Moment(place, times[place]) for place in seen if times.update((place,)) is None]


def first_and_last(seen: list[str]) -> list[Moment]:
    """Return the first and the last time that each place was seen."""
    times = Counter(seen)
    return [
        Moment(place, nth)
        for place in dict.fromkeys(seen)
        for nth in dict.fromkeys((1, times[place]))
    ]


_CHANGES = frozenset(
    f"os.{call}" for call in (
        "chmod", "chown", "link", "mkdir", "remove", "removexattr", "rename", "rmdir", "setxattr",
        "symlink", "truncate", "utime",
    )
)  # fmt: skip


def visit_changes(visit: Callable[[str], None]) -> None:
    """Call `visit` before each call that makes, renames, removes or changes a file.

    From now on, until this process ends. Python tells of no writes and of nothing that SQLite does:
    there the fault points are.
    """

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            creates = isinstance(flags, int) and flags & (os.O_CREAT | os.O_TRUNC)
            if creates and not isinstance(path, int) and "__pycache__" not in str(path):
                visit("open")
        elif event in _CHANGES:
            visit(event)

    sys.addaudithook(hook)


def changes_of(start: Callable[[], Callable[[], object]]) -> list[Moment]:
    """Run in a child what `start` returns; return every call of it that changes a file."""

    def record() -> list[Moment]:
        action = start()
        seen: list[Moment] = []
        times: Counter[str] = Counter()

        def visit(place: str) -> None:
            times[place] += 1
            seen.append(Moment(place, times[place]))

        visit_changes(visit)
        action()
        return list(seen)

    with Child(record) as child:
        return child.result()


def moments_of(make: Callable[[str], W], run: Callable[[W], object]) -> list[Moment]:
    """Return the fault points of `run`, and the first and last of each call that changes files.

    Fault points are where danger was thought of; the calls are everything else.
    """
    points = points_of(partial(run, make("points")))
    # Afterwards: what this process has learned of a filesystem, its children do not try again.
    changes = changes_of(lambda: partial(run, make("changes")))
    return [*points, *first_and_last([change.place for change in changes])]


def problems_of_kills(
    moments: Iterable[Moment],
    make: Callable[[str], W],
    run: Callable[[W], object],
    judge: Callable[[W], Iterable[str]],
) -> Iterator[str]:
    """Kill `run` at each moment, in a world of its own; yield what `judge` finds afterwards."""
    for number, moment in enumerate(moments):
        world = make(str(number))

        def act(moment: Moment = moment, world: W = world) -> None:
            die_at(moment)
            run(world)

        status = in_child(act)
        if was_killed(status):
            yield from (f"killed at {moment}: {problem}" for problem in judged(judge, world))
        else:
            yield f"not killed at {moment}, but ended with wait status {status}"


def judged(judge: Callable[[W], Iterable[str]], world: W) -> Iterator[str]:
    """Yield what `judge` finds; that it fails is a finding, too."""
    try:
        yield from judge(world)
    except Exception:  # noqa: BLE001 - one of many cases; the others go on
        yield traceback.format_exc()


def fail_with(problems: Iterable[str]) -> None:
    """Fail the test if there are any problems, with all of them."""
    if found := list(problems):
        pytest.fail("\n".join(found), pytrace=False)
