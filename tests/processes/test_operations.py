"""Each operation of a store, disturbed in every way: nothing is lost, and nothing is left behind.

The rows are `tests.processes.operations`; the tests here are what happens to them. An operation is
run once to learn which moments it has, and how it ends. Whatever happened then: all of the user's
files are there with their bytes and modes, `verify` finds nothing worse than an unindexed blob, and
the operation, run again, ends as if it had never been disturbed, down to what undo gives back.
"""

from __future__ import annotations

import ast
import errno
import itertools
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import smartcache
from smartcache.errors import FileSkippedError, NoSpaceError, SmartcacheError, StoreUnwritableError
from tests.processes.checks import (
    WAYS,
    Reference,
    Way,
    aftermath,
    as_done,
    bytes_lost,
    undo_everything,
    uninterrupted,
)  # fmt: skip
from tests.processes.children import NOBODY, Child, folder_of
from tests.processes.killing import (
    Moment,
    at,
    changes_of,
    die_at,
    fail_with,
    first_and_last,
    in_child,
    judged,
    points_of,
    was_killed,
)  # fmt: skip
from tests.processes.operations import OPENINGS, OPERATIONS
from tests.processes.points import ELSEWHERE, POINTS
from tests.processes.worlds import NotDoneError, Operation, World, state_of
from tests.store.files import snapshot
from tests.store.reflink_disks import reflink_disk
from tests.store.small_disks import PAGE, Disk, in_own_namespace

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="fork and SIGKILL")

NewWorld = Callable[[], World]
ENDED = 7
"""The exit code of a child that came to its end."""
all_operations = pytest.mark.parametrize("operation", OPERATIONS, ids=str)


@pytest.fixture
def new_world(
    operation: Operation, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[NewWorld]:
    """Makes directories for one case each, on the filesystems that the operation needs."""
    names = (f"world{number}" for number in itertools.count())
    if operation.needs_reflinks:
        with reflink_disk("btrfs", tmp_path) as disk:
            yield lambda: World(disk / next(names), has_reflinks=True)
    elif operation.needs_elsewhere:
        far: Path = request.getfixturevalue("elsewhere")
        yield lambda: World(tmp_path / (name := next(names)), far / name)
    else:
        yield lambda: World(tmp_path / next(names))


def learnt(operation: Operation, new_world: NewWorld) -> tuple[list[Moment], Reference]:
    """Run an operation undisturbed; return its fault points, and how it ends."""
    points: list[Moment] = []
    with new_world() as world:
        reference = uninterrupted(
            operation,
            world,
            lambda store: points.extend(points_of(lambda: operation.run(world, store))),
        )
    return points, reference


def changes_in(operation: Operation, new_world: NewWorld) -> list[Moment]:
    """Return the calls of an operation (or an opening) that change a file."""
    with new_world() as world:
        operation.begin(world)
        return changes_of(lambda: operation.start(world))


def disturbed(
    operation: Operation,
    moment: Moment,
    disturb: Callable[[Moment], None],
    judge: Callable[[World], Iterable[str]],
    new_world: NewWorld,
    way: Way = "fresh",
) -> Iterator[str]:
    """Disturb a process in an operation; yield the faults then, after the next run, and undo."""
    with new_world() as world:
        operation.begin(world)
        inherited = world.open() if way == "inherited" else None
        if inherited is not None:
            list(inherited.blobs())

        def run() -> None:
            if inherited is None:
                act = operation.start(world)
            else:
                act = partial(operation.run, world, inherited)
            disturb(moment)
            with suppress(OSError, SmartcacheError, NotDoneError):
                act()
            os._exit(ENDED)

        status = in_child(run)
        if inherited is not None:
            inherited.close()
        if not was_killed(status) and os.waitstatus_to_exitcode(status) != ENDED:
            yield f"{operation} at {moment}: it ended with wait status {status}"
            return
        found = judged(judge, world)
        yield from (f"{operation} at {moment}: {problem}" for problem in found)


@pytest.mark.parametrize("way", WAYS)
@all_operations
def test_a_kill_at_any_moment_loses_nothing(
    operation: Operation, way: Way, new_world: NewWorld
) -> None:
    """And (fresh) before the first and the last call of each kind that changes a file."""
    moments, reference = learnt(operation, new_world)
    if way == "fresh" or not moments:
        changes = changes_in(operation, new_world)
        moments += first_and_last([change.place for change in changes])
    assert moments
    judge = partial(aftermath, operation, reference, way=way)
    fail_with(
        problem
        for moment in moments
        for problem in disturbed(operation, moment, die_at, judge, new_world, way)
    )


EDIT = b"written after the kill"


@pytest.mark.parametrize(
    "operation", [each for each in OPERATIONS if each.takes or "undo" in each.name], ids=str
)
def test_what_is_written_after_a_kill_is_kept_by_the_next_run(
    operation: Operation, new_world: NewWorld
) -> None:
    """By its user into a file that may be written; by a late writer into one without its name."""
    moments, _ = learnt(operation, new_world)
    fail_with(
        f"{operation} at {moment}: {problem}"
        for moment in moments
        for problem in edited_after_a_kill(operation, moment, new_world)
    )


def edited_after_a_kill(operation: Operation, moment: Moment, new_world: NewWorld) -> Iterator[str]:
    """Kill an operation, write into the user's files, recover, undo; yield the edits lost."""
    with new_world() as world:
        operation.begin(world)
        names: dict[int, set[str]] = {}
        for name in world.originals:
            names.setdefault(world.at(name).stat().st_ino, set()).add(name)

        def run() -> None:
            act = operation.start(world)
            die_at(moment)
            act()

        status = in_child(run)
        assert was_killed(status), f"it ended with wait status {status}"
        edited: list[tuple[set[str], bytes]] = []
        for found in world.names():
            path, st = world.at(found), world.at(found).lstat()
            # What is neither, and no user's: a copy that is half made.
            shown = {found} if found in world.originals else names.get(st.st_ino, set())
            if not stat.S_ISREG(st.st_mode) or not st.st_mode & 0o200 or not shown:
                continue
            with path.open("r+b") as file:
                file.write(EDIT)
            edited.append((shown, path.read_bytes()))
        for step in ("the next run", "undo"):
            with world.open() as store:
                if step == "undo":
                    undo_everything(store)
            for shown, data in edited:
                if all(world.at(name).read_bytes() != data for name in shown):
                    yield f"what was written into {shown} is lost after {step}"
                    return


@pytest.mark.parametrize("operation", OPENINGS, ids=str)
def test_a_kill_while_a_store_is_opened_loses_nothing(
    operation: Operation, new_world: NewWorld
) -> None:
    """Recovery after a kill may itself be killed, as may the making of a store or of its index."""
    _, reference = learnt(operation, new_world)
    with new_world() as world:
        operation.begin(world)
        moments = points_of(operation.start(world))
    changes = changes_in(operation, new_world)
    if operation.needs_elsewhere:  # each costs many waits for a disk
        changes = first_and_last([change.place for change in changes])
    moments += changes
    assert moments
    judge = partial(aftermath, operation, reference)
    fail_with(
        problem
        for moment in moments
        for problem in disturbed(operation, moment, die_at, judge, new_world)
    )


# a disk that fails, is full, or cannot be written


def fail_at(moment: Moment) -> None:
    """Let the disk fail at a moment, once."""

    def fail() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    at(moment, fail)


@all_operations
def test_a_disk_that_fails_in_any_call_loses_no_bytes(
    operation: Operation, new_world: NewWorld
) -> None:
    """The first and the last call of each kind. The operation may be left half done."""
    changes = changes_in(operation, new_world)
    moments = first_and_last([moment.place for moment in changes])
    judge = partial(bytes_lost, operation)
    fail_with(
        problem
        for moment in moments
        for problem in disturbed(operation, moment, fail_at, judge, new_world)
    )


class Disks:
    """Small disks in memory for one world after the other, in a mount namespace of their own."""

    def __init__(self, operation: Operation, where: Path) -> None:
        self._operation = operation
        self._where = where
        self._number = 0
        self.disks: list[Disk] = []

    def new_world(self) -> World:
        self._number += 1
        count = 2 if self._operation.needs_elsewhere else 1
        name = f"{self._operation} {self._number}"
        self.disks = [Disk(self._where / f"{name} {n}", 2000 * PAGE) for n in range(count)]
        return World(*(disk.point / "world" for disk in self.disks))


with_mounts = pytest.mark.skipif(sys.platform != "linux", reason="mount namespaces")
on_disks_in_memory = pytest.mark.parametrize(
    "operation", [each for each in OPERATIONS if not each.needs_reflinks], ids=str
)


@with_mounts
@on_disks_in_memory
def test_a_full_disk_is_said_and_loses_nothing(operation: Operation, tmp_path: Path) -> None:
    """Whichever write is the one that finds no room: of bytes, journal or index."""

    def run() -> tuple[bool, list[str]]:
        disks = Disks(operation, tmp_path)
        _, reference = learnt(operation, disks.new_world)
        problems: list[str] = []
        for tries, free in enumerate(FREE_PAGES):
            with disks.new_world() as world:
                is_done, found = on_full_disks(operation, world, disks.disks, free, reference)
                problems += [f"{operation} with {free} free pages: {each}" for each in found]
            if is_done:
                return tries > 0, problems
        return True, [*problems, "it never worked"]

    was_full, problems = in_own_namespace(run)
    fail_with(problems)
    assert was_full, "the disk was not full"


FREE_PAGES = (0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377)


def on_full_disks(
    operation: Operation, world: World, disks: list[Disk], free: int, reference: Reference
) -> tuple[bool, list[str]]:
    """Run an operation with so many free pages, and again with room; say what is wrong."""
    operation.begin(world)
    problems: list[str] = []
    is_done = False
    with world.open() as store:
        before = state_of(world, store)
        if free % 2 == 0:  # let the next line of the journal need another page
            journal = world.root / "journal.jsonl"
            with open(journal, "ab") as file:
                file.write(b"\n" * (-journal.stat().st_size % PAGE))
        for disk in disks:
            disk.fill(but=free)
        try:
            operation.run(world, store)
            is_done = True
        except NoSpaceError as error:
            if error.errno != errno.ENOSPC:
                problems.append(f"{error}: errno is {error.errno}")
        except NotDoneError:
            pass
        for disk in disks:
            disk.clear()
        if not is_done and operation.is_one_step:
            after = state_of(world, store)
            problems += before.differences(replace(after, rows=before.rows, links=before.links))
        if not is_done:
            operation.run(world, store)
    return is_done, [*problems, *judged(partial(aftermath, operation, reference), world)]


@with_mounts
def test_a_read_only_disk_is_said_and_nothing_is_changed(tmp_path: Path) -> None:
    def run() -> list[str]:
        problems = []
        for operation in OPERATIONS:
            if operation.needs_reflinks:
                continue
            disks = Disks(operation, tmp_path)
            world = disks.new_world()
            operation.begin(world)
            before = snapshot(world.files)
            disks.disks[0].make_read_only()
            try:
                with world.open() as store:
                    operation.run(world, store)
                problems.append(f"{operation}: it worked")
            except StoreUnwritableError as error:
                if "SMARTCACHE_HOME" not in error.hint:
                    problems.append(f"{operation}: {error!r} {error.hint}")
            if snapshot(world.files) != before:
                problems.append(f"{operation}: files were changed")
        return problems

    fail_with(in_own_namespace(run))


# other users, other programs, other processes

taking = [each for each in OPERATIONS if each.takes]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@all_operations
def test_an_ordinary_user_gets_what_root_gets(operation: Operation, new_world: NewWorld) -> None:
    if operation.needs_elsewhere:
        pytest.skip("one folder is enough")
    _, reference = learnt(operation, new_world)
    # Where files can share blocks, if they have to.
    disk = new_world().directory.parent if operation.needs_reflinks else None
    with folder_of(NOBODY, on=disk) as home:

        def run() -> Reference:
            has_reflinks = operation.needs_reflinks
            return learnt(operation, lambda: World(home / "world", has_reflinks=has_reflinks))[1]

        with Child(run, user=NOBODY) as child:
            theirs = child.result()
    fail_with(reference.done.differences(theirs.done))
    if reference.undone is not None and theirs.undone is not None:
        fail_with(reference.undone.differences(theirs.undone))


@pytest.mark.parametrize("why", ["busy", "belongs to another user"])
@pytest.mark.parametrize("operation", taking, ids=str)
def test_files_that_are_not_ours_to_take_are_left_alone(
    operation: Operation, why: str, new_world: NewWorld
) -> None:
    """A program has them open for writing, or somebody else owns them (root gets no exception).

    Sharing blocks changes nothing that an owner could see or lose: root may, with any file.
    """
    if why != "busy" and os.geteuid() != 0:
        pytest.skip("only root can give files away")
    if why != "busy" and operation.needs_reflinks:
        pytest.skip("tests/store/test_share.py shares files of another user")
    with new_world() as world, ExitStack() as stack:
        operation.begin(world)
        for name in operation.takes:
            if why == "busy":
                stack.enter_context(open(world.at(name), "r+b"))
            else:
                os.chown(world.at(name), NOBODY, NOBODY)
        before = snapshot(world.files)
        with world.open() as store:
            with pytest.raises(FileSkippedError) as raised:
                operation.run(world, store)
            assert raised.value.reason == why
            assert snapshot(world.files) == before
            assert not store.verify(full=True).has_damage


YIELDING = ("replace two names of a file",)
"""Each process may see what the other does to one name as a change to the other name, and stop."""


@all_operations
def test_two_processes_that_do_the_same_at_once_do_it_once(
    operation: Operation, new_world: NewWorld, rounds: Callable[[int], int]
) -> None:
    _, reference = learnt(operation, new_world)
    for _ in range(rounds(2)):
        with new_world() as world:
            operation.begin(world)
            ready, go = os.pipe(), os.pipe()

            def work(world: World = world, ready: int = ready[1], go: int = go[0]) -> bool:
                act = operation.start(world)
                os.write(ready, b"r")
                os.read(go, 1)
                with suppress(SmartcacheError, FileNotFoundError, NotDoneError):
                    act()
                    return True
                return False

            with Child(work) as one, Child(work) as other:
                for _ in range(2):
                    os.read(ready[0], 1)
                os.write(go[1], b"gg")
                is_done = [one.result(), other.result()]
            if operation.name in YIELDING and not any(is_done):
                with world.open() as store:
                    operation.run(world, store)
            else:
                assert any(is_done)
            for pipe in (*ready, *go):
                os.close(pipe)
            fail_with(as_done(operation, reference, world))


# nothing is forgotten


def test_every_fault_point_of_the_code_has_a_row(tmp_path: Path, elsewhere: Path) -> None:
    """Points of the layers above are named by the tests that kill there."""
    package = Path(smartcache.__file__).parent
    wanted = {point for path in package.rglob("*.py") for point in points_in(path)}
    reached: set[str] = set()
    for number, operation in enumerate([*OPERATIONS, *OPENINGS]):
        if operation.needs_reflinks:
            continue
        far = elsewhere / f"far{number}" if operation.needs_elsewhere else None
        with World(tmp_path / str(number), far) as world:
            operation.begin(world)
            reached |= {moment.place for moment in points_of(operation.start(world))}
    for name, points in ELSEWHERE.items():
        text = (Path(__file__).parents[1] / name).read_text("utf-8")
        reached |= {point for point in points if point in text}
    named = set().union(*POINTS.values(), *ELSEWHERE.values())
    assert sorted(named - wanted) == []  # a row of what is gone
    missing = sorted(wanted - reached.union(*POINTS.values()))
    assert not missing, ", ".join(missing)


def points_in(path: Path) -> Iterator[str]:
    """Yield the fault points that a module names."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "reached":
            (name,) = node.args
            assert isinstance(name, ast.Constant), f"{path}:{node.lineno}"
            yield str(name.value)
