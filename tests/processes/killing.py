"""Kill a child process at a chosen moment.

A *moment* is the n-th time that a place in the code is reached: a fault point ("put: linked"), or a
line of a module of the store ("adopt.py:171"). The child is forked from a warm parent, so a case
costs milliseconds.
"""

from __future__ import annotations

import json
import os
import random
import signal
import stat
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tests.api import store as store_package
from tests.api import store_faults as faults

Visit = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Moment:
    """The `nth` time that `place` is reached."""

    place: str
    nth: int

    def __str__(self) -> str:
        return self.place if self.nth == 1 else f"{self.place} (time {self.nth})"


def in_child(action: Callable[[], None]) -> int:
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


def die_at(moment: Moment) -> None:
    """Let this process kill itself at a moment; called in a child, before the operation."""
    reached = 0

    def visit(place: str) -> None:
        nonlocal reached
        if place == moment.place:
            reached += 1
            if reached == moment.nth:
                os.kill(os.getpid(), signal.SIGKILL)

    if ".py:" in moment.place:
        visit_lines(visit)
    else:
        faults.hook = visit


def points_of(action: Callable[[], None]) -> list[Moment]:
    """Run `action`; return the first and the last time it reached each fault point, in order."""
    seen: list[str] = []
    faults.hook = seen.append
    try:
        action()
    finally:
        faults.hook = None
    times = Counter(seen)
    return [
        Moment(place, nth)
        for place in dict.fromkeys(seen)
        for nth in dict.fromkeys((1, times[place]))
    ]


def in_turn(moments: list[Moment], turn: int, turns: int, *, soak: bool) -> list[Moment]:
    """Return all moments under `--soak`, else some of one of several cases that take turns.

    Of those whose turn it is every other one, by chance the first or the second; all of a few, so
    that there is always one.
    """
    first = turn % turns + turns * random.randrange(2)
    return (moments[first :: 2 * turns] or moments) if not soak else moments


def states_of(start: Callable[[], Callable[[], None]], places: list[Path]) -> list[Moment]:
    """Run in a child what `start` returns; return the lines before which the disk had changed."""
    report = places[0].with_name(f"{places[0].name}.moments")

    def record() -> None:
        moments: list[Moment] = []
        times: Counter[str] = Counter()
        action = start()
        last = fingerprint(places)

        def visit(place: str) -> None:
            nonlocal last
            times[place] += 1
            now = fingerprint(places)
            if now != last:
                last = now
                moments.append(Moment(place, times[place]))

        visit_lines(visit)
        action()
        sys.settrace(None)
        report.write_text(json.dumps([(moment.place, moment.nth) for moment in moments]))

    status = in_child(record)
    if status != 0:
        raise AssertionError(f"the uninterrupted run failed with wait status {status}")
    return [Moment(place, nth) for place, nth in json.loads(report.read_text())]


_PACKAGE = Path(store_package.__file__ or "").parent
_QUIET = (
    "digest.py", "filememory.py", "filesystems.py", "flock.py", "index.py", "leases.py", "locks.py",
    "mounts.py", "records.py", "schema.py", "statkey.py", "sums.py", "usage.py",
)  # fmt: skip
"""Modules that only look, lock or run single statements: their callers see what they changed."""


def visit_lines(visit: Visit) -> None:
    """Call `visit` with "module.py:line" before each line of the modules that change files."""
    watched = {str(path): path.name for path in _PACKAGE.glob("*.py") if path.name not in _QUIET}

    def local(frame: FrameType, event: str, _: object) -> object:
        if event == "line":
            visit(f"{watched[frame.f_code.co_filename]}:{frame.f_lineno}")
        return local

    def start(frame: FrameType, _event: str, _: object) -> object:
        return local if frame.f_code.co_filename in watched else None

    sys.settrace(start)  # type: ignore[arg-type]


_NOT_STATE = ("lock", "lock.turn", "leases", "index.sqlite3-shm")
"""Locks die with their holder; the shared memory of SQLite is made again by the next opener."""


def fingerprint(places: list[Path]) -> list[tuple[object, ...]]:
    """Return what a kill would leave: names, inodes, modes, sizes and times of all files."""
    found: list[tuple[object, ...]] = []
    pending = [str(place) for place in places]
    while pending:
        directory = pending.pop()
        try:
            entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
        except FileNotFoundError:
            continue
        for entry in entries:
            if entry.name in _NOT_STATE:
                continue
            try:
                st = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISDIR(st.st_mode):
                found.append((entry.path, st.st_mode))
                pending.append(entry.path)
            else:
                is_index = entry.name.startswith("index.sqlite3")
                time = 0 if is_index else st.st_mtime_ns
                found.append((entry.path, st.st_ino, st.st_mode, st.st_size, st.st_nlink, time))
    return found
