"""Each operation of a store, disturbed in every way: nothing is lost, and nothing is left behind.

The rows are `tests.processes.operations`; the tests here are what happens to them. An operation is
run once to learn which moments it has, and how it ends. Whatever happened then: after recovery each
file is as it was before or as it is in the end, and after undo as if nothing had ever been done.
Run again, the operation ends as if it had never been disturbed.
"""

from __future__ import annotations

import ast
import errno
import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

import smartcache
from smartcache.errors import NoSpaceError, SmartcacheError, StoreUnwritableError
from smartcache.store import link
from smartcache.store.store import Store
from smartcache.store.undo import REPLACED
from smartcache.system import faults
from tests.processes.children import FORKS, NOBODY, Child, at_once, folder_of
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
)
from tests.processes.operations import OPERATIONS, NotDoneError
from tests.processes.points import ELSEWHERE, POINTS
from tests.processes.worlds import (
    BYSTANDER,
    Operation,
    World,
    content,
    gone_on,
    recovered,
    reference_of,
    undo_everything,
)
from tests.store.files import come_to_write, dedup, edit, hidden, snapshot
from tests.store.files import kill as kill_at
from tests.store.reflink_disks import reflink_disk
from tests.store.small_disks import PAGE, Disk, in_own_namespace

if sys.platform != "linux":
    pytest.skip("leases, RENAME_EXCHANGE and SIGKILL", allow_module_level=True)

NewWorld = Callable[[], World]
Problems = Iterator[str]
all_operations = pytest.mark.parametrize("operation", OPERATIONS, ids=str)
JOURNALED = [
    each for each in OPERATIONS
    if each.name.startswith(("adopt", "replace", "undo", "eject")) or " over " in each.name
    if each.needs != "drive"
]  # fmt: skip
"""Those that move names of the user's files, on one filesystem."""
journaled = pytest.mark.parametrize("operation", JOURNALED, ids=str)


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is late by chance here; `tests.processes.test_races` is about those who are."""
    monkeypatch.setattr(link, "PAUSE", 0.0)
    monkeypatch.setattr(link, "PATIENCE", 0.01)


@pytest.fixture
def new_world(
    operation: Operation, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[NewWorld]:
    """Makes directories for one case each, on the filesystems that the operation needs."""
    names = (f"world{number}" for number in itertools.count())
    if operation.needs == "reflinks":
        with reflink_disk("btrfs", tmp_path) as disk:
            yield lambda: World(disk / next(names))
    elif operation.needs == "drive":
        far: Path = request.getfixturevalue("elsewhere")
        yield lambda: World(tmp_path / (name := next(names)), far / name)
    else:
        yield lambda: World(tmp_path / next(names))


def moments_in(operation: Operation, new_world: NewWorld, *, every: bool = False) -> list[Moment]:
    """Return the first and the last time that an operation reaches each fault point, or `every`."""
    with new_world() as world:
        operation.begin(world)
        with world.open() as store:
            return points_of(partial(operation.run, world, store), every=every)


def once_each(moments: Iterable[Moment]) -> list[Moment]:
    """Return one moment of each place: the first time or the last, in turn."""
    times: dict[str, list[Moment]] = {}
    for moment in moments:
        times.setdefault(moment.place, []).append(moment)
    return [each[-(number % 2)] for number, each in enumerate(times.values())]


def calls_in(operation: Operation, new_world: NewWorld) -> list[Moment]:
    """Return the first and the last call of each kind that changes a file."""
    with new_world() as world:
        operation.begin(world)
        with world.open() as store:
            list(store.blobs())
            calls = changes_of(lambda: partial(operation.run, world, store))
    return first_and_last([call.place for call in calls])


def in_inherited(
    operation: Operation, moment: Moment, world: World, act: Callable[[Moment], None]
) -> tuple[Store, int]:
    """Let something happen to a process that uses the store of its parent; return that store."""
    operation.begin(world)
    store = world.open()
    list(store.blobs())

    def run() -> None:
        act(moment)
        with suppress(OSError, SmartcacheError, NotDoneError):
            operation.run(world, store)

    status = in_child(run)
    if not (world.root / "index.sqlite3").exists():  # ejected, or about to be rebuilt
        store.close()
        store = world.open()
    return store, status


def kill(operation: Operation, world: World, moment: Moment) -> None:
    """Begin a world, and kill the operation in it at a moment."""
    operation.begin(world)

    def run() -> None:
        store = world.open()
        die_at(moment)
        operation.run(world, store)

    status = in_child(run)
    assert was_killed(status), f"it ended with wait status {status}"


def each_killed(
    operation: Operation,
    moments: Iterable[Moment],
    new_world: NewWorld,
    judge: Callable[[World], Iterable[str]],
) -> Problems:
    """Kill an operation at each moment, in a world of its own; yield what is wrong afterwards."""
    for moment in moments:
        with new_world() as world:
            kill(operation, world, moment)
            found = judged(judge, world)
            yield from (f"{operation} killed at {moment}: {problem}" for problem in found)


@all_operations
def test_after_a_kill_at_any_point_undo_gives_everything_back(
    operation: Operation, new_world: NewWorld, soak: bool
) -> None:
    """The first and the last time that it is reached; every time in the long rounds."""
    moments = moments_in(operation, new_world, every=soak)
    assert moments or operation.name in ("unpin", "rebuild")
    judge = partial(recovered, operation, reference_of(operation, new_world))
    fail_with(each_killed(operation, moments, new_world, judge))


@all_operations
def test_after_a_kill_at_any_call_an_open_store_goes_on(
    operation: Operation, new_world: NewWorld
) -> None:
    """The process that was killed had inherited the store; its parent does something else first."""
    reference = reference_of(operation, new_world)
    moments = once_each(moments_in(operation, new_world)) + calls_in(operation, new_world)
    is_way_back = operation.name.startswith(("undo", "eject"))
    turn = itertools.cycle((is_way_back, False))  # it may itself be what comes next

    def killed(moment: Moment) -> Problems:
        with new_world() as world:
            store, status = in_inherited(operation, moment, world, die_at)
            with store:
                assert was_killed(status), f"it ended with wait status {status}"
                yield from gone_on(operation, reference, world, store, at_once=next(turn))

    fail_with(
        f"{operation} killed at {moment}: {problem}"
        for moment in moments
        for problem in judged(killed, moment)
    )


@pytest.fixture
def no_unnamed_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A filesystem without O_TMPFILE."""
    real = os.open

    def refuse(path: str, flags: int, *more: int, **options: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", refuse)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@journaled
def test_after_a_kill_at_any_point_an_ordinary_user_gets_what_root_gets(
    operation: Operation,
) -> None:
    with folder_of(NOBODY) as home:
        names = (home / f"world{number}" for number in itertools.count())

        def new_world() -> World:
            return World(next(names))

        def run() -> list[str]:
            judge = partial(recovered, operation, reference_of(operation, new_world))
            moments = once_each(moments_in(operation, new_world))
            return list(each_killed(operation, moments, new_world, judge))

        with Child(run, user=NOBODY) as child:
            fail_with(child.result())


POOR = [  # or one that uses inode numbers again
    (each, lack) for lack, names in (
        ("no_exchange", ("replace by links", "undo")),
        ("no_leases", ("adopt", "replace by links", "undo")),
        ("no_unnamed_files", ("put a copy", "place copy over a file", "undo")),
        ("disk_path", ("replace by links", "undo")),
    ) for each in OPERATIONS if each.name in names
]  # fmt: skip


@pytest.mark.parametrize(("operation", "lack"), POOR, ids=str)
def test_after_a_kill_on_a_poor_filesystem_undo_gives_everything_back(
    operation: Operation, lack: str, new_world: NewWorld, request: pytest.FixtureRequest
) -> None:
    place = request.getfixturevalue(lack)
    if lack == "disk_path":  # memory uses no inode number twice; ext4 gives a free one at once
        names = (place / f"on disk {number}" for number in itertools.count())
        new_world = lambda: World(next(names))  # noqa: E731
    elif lack == "no_leases":
        request.getfixturevalue("pass_time")(60)  # young files are left alone there
    moments = once_each(moments_in(operation, new_world))
    judge = partial(recovered, operation, reference_of(operation, new_world))
    fail_with(each_killed(operation, moments, new_world, judge))


# a kill, and then something else before the recovery

EDIT = b"written after the kill"
PAIRED = [each for each in JOURNALED if each.name in (
    "adopt", "replace by links", "place hardlink over a file", "undo", "eject",
)]  # fmt: skip
paired = pytest.mark.parametrize("operation", PAIRED, ids=str)


@paired
def test_what_is_written_after_a_kill_is_kept(operation: Operation, new_world: NewWorld) -> None:
    """By its user into a file that may be written; by a late writer into one without its name."""

    def edited(world: World) -> Problems:
        found = world.facts()
        mine = {world.at(n).stat().st_ino for n in world.before.keys() & found.keys()}
        edits = []
        for name, fact in found.items():
            path = world.at(name)
            is_copy = path.stat().st_ino not in world.inodes  # half made, and nobody's yet
            if is_copy or not int(fact.mode, 8) & 0o200:
                continue
            if name in world.before or path.stat().st_ino not in mine:
                edit(path, EDIT)
                edits.append((name, path.read_bytes()))
        with world.open() as store:
            for step in (store.recover, partial(undo_everything, store)):
                step()
                there = [world.at(name).read_bytes() for name in world.facts()]
                yield from (
                    f"what was written into {n} is lost" for n, d in edits if d not in there
                )
        written.extend(edits)

    written: list[tuple[str, bytes]] = []
    moments = once_each(moments_in(operation, new_world))
    fail_with(each_killed(operation, moments, new_world, edited))
    assert written


def move_away(world: World, what: str) -> Callable[[], None]:
    """Move the user's folder, or the files in it; return how they are put back."""
    aside = world.directory / "moved"
    if what == "files renamed":
        pairs = [
            (path, path.with_name(f"{path.name} moved")) for path in world.files.rglob("*.bin")
        ]
        for path, other in pairs:
            path.rename(other)

        def back() -> None:
            for path, other in pairs:
                other.rename(path)

        return back
    world.files.rename(aside)
    if what == "its folder is a symlink":
        world.files.symlink_to(aside)
    elif what == "another folder in its place":
        world.files.mkdir()

    def put_back() -> None:
        if world.files.is_symlink():
            world.files.unlink()
        aside.rename(world.files)  # over the empty one

    return put_back


MOVES = (
    "folder renamed", "its folder is a symlink", "another folder in its place", "files renamed",
)  # fmt: skip


@pytest.mark.parametrize("what", MOVES)
@paired
def test_what_is_moved_after_a_kill_waits_stops_nobody_and_is_finished_when_it_is_back(
    operation: Operation, what: str, new_world: NewWorld
) -> None:
    if what == "files renamed" and operation.name.startswith("place"):
        pytest.skip("what was perhaps never there is not waited for: the link stays one")
    reference, waited = reference_of(operation, new_world), 0

    def moved(world: World) -> Problems:
        nonlocal waited
        names = set(world.facts())
        put_back = move_away(world, what)
        with world.open() as store:
            stuck = store.recover()
            waited += len(stuck)
            if store.unfinished() != stuck or any(str(world.files) not in each for each in stuck):
                yield f"unfinished: {store.unfinished()}, not {stuck}"
            store.adopt(world.at(BYSTANDER))
            undone = store.plan_undo(paths=[world.at(BYSTANDER)]).execute()
            yield from (f"the bystander is {each}" for each in undone if not each.is_undone)
        put_back()
        gone = {name for name in names - set(world.facts()) if not name.endswith(".smartcache")}
        yield from (f"{name} is gone" for name in gone)
        for problem in recovered(operation, reference, world):
            # Of one that was away when that was looked at, the row stays, whatever it is by now.
            if what != "files renamed" or REPLACED not in problem:
                yield problem

    moments = once_each(moments_in(operation, new_world))
    fail_with(each_killed(operation, moments, new_world, moved))
    assert waited or what == "files renamed" or operation.is_unwritten


@paired
def test_a_kill_at_any_point_of_the_recovery_after_a_kill_loses_nothing(
    operation: Operation, new_world: NewWorld
) -> None:
    reference, kills = reference_of(operation, new_world), 0

    def killed_again(world: World) -> Problems:
        nonlocal kills
        for nth in itertools.count(1):
            if not kill_at(lambda: world.open().recover(), nth=nth):
                break
            kills += 1
        yield from recovered(operation, reference, world)

    moments = once_each(moments_in(operation, new_world))
    fail_with(each_killed(operation, moments, new_world, killed_again))
    assert kills or operation.is_unwritten


@paired
def test_a_journal_that_is_damaged_after_a_kill_loses_no_bytes(
    operation: Operation, new_world: NewWorld
) -> None:
    """Its copy takes its place, which knows nothing of what was going on."""

    def damaged(world: World) -> Problems:
        journal = world.root / "journal.sqlite3"
        if not journal.exists():
            return
        size = journal.stat().st_size
        edit(journal, bytes(4096), offset=next(pages) * 4096 % size)
        with world.open() as store:
            undo_everything(store)
            store.adopt(world.at(BYSTANDER))
        found = world.facts()
        for name in world.before.keys() - world.given_up:
            if name not in found or found[name].data != world.before[name].data:
                yield f"{name} is {found.get(name)}"

    pages = itertools.count()
    moments = once_each(moments_in(operation, new_world))
    fail_with(each_killed(operation, moments, new_world, damaged))


def test_a_kill_while_a_late_writer_gets_the_file_back_keeps_what_was_written(
    tmp_path: Path,
) -> None:
    """It had looked the old file up and opens it when the names were exchanged already."""
    with World(tmp_path / "world") as world:
        one, other = (world.write(name, content(1, 5000)) for name in ("one.bin", "other.bin"))

        def run() -> None:
            found = os.open(other, os.O_PATH)
            late = f"/proc/self/fd/{found}"

            def come(point: str) -> None:
                if point == "exchanged":
                    come_to_write(Path(late))
                elif point == "giving back":
                    os.kill(os.getpid(), signal.SIGKILL)

            with world.open() as store:
                faults.hook = come
                dedup(store, one, other)

        assert was_killed(in_child(run))
        (old,) = hidden(world.files)
        edit(world.files / old, EDIT)
        with world.open() as store:
            store.recover()
            assert other.read_bytes() == EDIT + content(1, 5000)[len(EDIT) :]
            assert one.read_bytes() == content(1, 5000)
            assert undo_everything(store) == []
        assert world.facts().keys() == world.before.keys()


# Ctrl-C, a disk that fails, is full, or cannot be written


@all_operations
def test_ctrl_c_or_an_error_at_any_point_is_recovered_from_by_the_same_process(
    operation: Operation, new_world: NewWorld, soak: bool
) -> None:
    """One of them at each point; every one of them in the long rounds."""
    reference, codes = reference_of(operation, new_world), (0, errno.ENOSPC, errno.EIO)

    def interrupted(moment: Moment, code: int) -> Problems:
        def fail() -> None:
            raise OSError(code, os.strerror(code)) if code else KeyboardInterrupt

        with new_world() as world:
            operation.begin(world)
            with world.open() as store:
                at(moment, fail)
                try:
                    operation.run(world, store)
                except (KeyboardInterrupt, OSError, SmartcacheError, NotDoneError):
                    pass
                finally:
                    faults.hook = None
                is_over = operation.ends_store and not world.root.exists()
                yield from recovered(operation, reference, world, None if is_over else store)

    fail_with(
        f"{operation}, error {code} at {moment}: {problem}"
        for number, moment in enumerate(moments_in(operation, new_world))
        for code in (codes if soak else codes[number % 3 : number % 3 + 1])
        for problem in judged(partial(interrupted, moment), code)
    )


@all_operations
def test_a_call_that_fails_loses_nothing(operation: Operation, new_world: NewWorld) -> None:
    """The first and the last of each kind that changes a file."""
    reference = reference_of(operation, new_world)
    codes = itertools.cycle((errno.EIO, errno.ENOSPC))

    def failed(moment: Moment) -> Problems:
        code = next(codes)

        def fail() -> None:
            raise OSError(code, os.strerror(code))

        with new_world() as world:
            store, status = in_inherited(operation, moment, world, lambda m: at(m, fail))
            with store:
                assert status == 0, f"it ended with wait status {status}"
                yield from recovered(operation, reference, world, store)

    fail_with(
        f"{operation}, {moment} failed: {problem}"
        for moment in calls_in(operation, new_world)
        for problem in judged(failed, moment)
    )


SMALL_DISK = 4000 * PAGE
FREE_PAGES = (0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597)
on_small_disks = pytest.mark.parametrize(
    "operation", [each for each in OPERATIONS if not each.needs], ids=str
)
NEEDS_NO_ROOM = ("rm", "prune")


@on_small_disks
def test_a_full_disk_is_said_and_loses_nothing(
    operation: Operation, new_world: NewWorld, tmp_path: Path
) -> None:
    """Whichever write is the one that finds no room: of bytes, journal or index."""
    reference = reference_of(operation, new_world)

    def run() -> tuple[int, list[str]]:
        problems: list[str] = []
        for tries, free in enumerate(FREE_PAGES):
            disk = Disk(tmp_path / f"disk{tries}", SMALL_DISK)
            world, is_done = World(disk.point / "world"), True
            operation.begin(world)
            with world.open() as store:
                disk.fill(but=free)
                try:
                    operation.run(world, store)
                except (NoSpaceError, NotDoneError) as error:
                    is_done = False
                    is_said = isinstance(error, NoSpaceError) or "o space" in str(error)
                    problems += [] if is_said else [repr(error)]
                disk.clear()
            found = judged(partial(recovered, operation, reference), world)
            problems += [f"{operation} with {free} free pages: {each}" for each in found]
            if is_done:
                return tries, problems
        return 0, [*problems, "it never worked"]

    tries, problems = in_own_namespace(run)
    fail_with(problems)
    assert (tries == 0) == (operation.name in NEEDS_NO_ROOM), f"it worked at try {tries}"


def test_a_read_only_disk_is_said_and_nothing_is_changed(tmp_path: Path) -> None:
    def run() -> list[str]:
        problems = []
        for number, operation in enumerate(each for each in OPERATIONS if not each.needs):
            disk = Disk(tmp_path / str(number), SMALL_DISK)
            world = World(disk.point / "world")
            operation.begin(world)
            before = snapshot(disk.point)
            disk.make_read_only()
            try:
                with world.open() as store:
                    operation.run(world, store)
                problems.append(f"{operation}: it worked")
            except StoreUnwritableError as error:
                if "SMARTCACHE_HOME" not in error.hint:
                    problems.append(f"{operation}: {error!r} {error.hint}")
            except NotDoneError as error:
                problems += [] if "Read-only" in str(error) else [f"{operation}: {error}"]
            if snapshot(disk.point) != before:
                problems.append(f"{operation}: files were changed")
        return problems

    fail_with(in_own_namespace(run))


# other processes


@all_operations
def test_two_processes_that_do_the_same_at_once_do_it_once(
    operation: Operation, new_world: NewWorld, rounds: Callable[[int], int]
) -> None:
    reference = reference_of(operation, new_world)
    for _ in range(rounds(2)):
        with new_world() as world:
            operation.begin(world)
            both_are_ready = FORKS.Barrier(2)

            def work(world: World = world, wait: Callable[[], int] = both_are_ready.wait) -> None:
                store = world.open()
                wait()
                with suppress(OSError, SmartcacheError, NotDoneError):  # both may give way
                    operation.run(world, store)

            at_once(work, work)
            with world.open() as store:
                fail_with(gone_on(operation, reference, world, store, at_once=False))


# nothing is forgotten


def test_every_fault_point_of_the_code_has_a_row(tmp_path: Path, elsewhere: Path) -> None:
    """Points of the layers above are named by the tests that kill there."""
    package = Path(smartcache.__file__).parent
    wanted = {point for path in package.rglob("*.py") for point in points_in(path)}
    reached: set[str] = set()
    for number, operation in enumerate(OPERATIONS):
        if operation.needs == "reflinks":
            continue
        far = elsewhere / f"far{number}" if operation.needs else None
        with World(tmp_path / str(number), far) as world:
            operation.begin(world)
            with world.open() as store:
                reached |= {m.place for m in points_of(partial(operation.run, world, store))}
    with World(tmp_path / "recovery") as world:
        (operation,) = (each for each in OPERATIONS if each.name == "replace by links")
        kill(operation, world, Moment("exchanged", 1))
        with world.open() as store:
            reached |= {moment.place for moment in points_of(store.recover)}
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
