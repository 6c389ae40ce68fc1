"""SIGKILL of processes that use a set: what was acknowledged is there, what was deleted is not.

After every kill the set is opened and every key compared with what its writer had acknowledged;
`verify` finds nothing, and the packs tell the same to a reader that is not of the package.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from smartcache.artifacts import ArtifactSets
from smartcache.system import faults
from tests.artifacts.opening import array, open_set
from tests.processes.artifact_writers import (
    KEYS,
    SMALL_PACK,
    Writer,
    change,
    check_all,
    in_fork,
    key_of,
)
from tests.processes.killing import Moment, die_at, in_child, was_killed
from tests.processes.points import all_of


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "sets"


FOREIGN = 1 << 31


def times(soak: bool) -> int:
    return 200 if soak else 12


def end(pid: int) -> int:
    """Kill a process; return its wait status."""
    os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def compact_and_rebuild(root: Path) -> None:
    """Disturb the writers: everything that moves records, again and again."""
    sets = ArtifactSets(root)
    opened = open_set(sets, pack_bytes=SMALL_PACK)
    while True:
        opened.compact(force=True)
        opened.verify()
        sets.rebuild(opened.describe())


def test_writers_killed_at_random_moments_lose_nothing(root: Path, soak: bool) -> None:
    writers = [Writer(root, 0), Writer(root, 1)]
    chance = random.Random(1)
    for turn in range(times(soak)):
        for writer in writers:
            writer.start(seed=1000 * turn + writer.number)
        other = in_fork(lambda: compact_and_rebuild(root)) if turn % 2 else None
        deadline = time.monotonic() + chance.uniform(0.01, 0.25)
        for writer in writers:
            writer.listen((deadline - time.monotonic()) * chance.random())
        if other is not None:
            assert was_killed(end(other)), "it has failed by itself"
        for writer in writers:
            assert was_killed(writer.kill()), "it has failed by itself"
        check_all(root, writers)
        if turn % 4 == 3:
            with open_set(ArtifactSets(root), pack_bytes=SMALL_PACK) as opened:
                opened.compact(force=True)
    assert min(writer.told for writer in writers) > times(soak)


def everything(sets: ArtifactSets, foreign: Path, tell: Callable[[str, int], None]) -> None:
    """Reach every point, several times."""
    opened = open_set(sets, pack_bytes=SMALL_PACK)
    for number in range(1, 60):
        key = key_of(0, number % KEYS)
        tell(key, number)
        change(opened, key, number)
        tell("", 0)
        if number % 4 == 3:
            gone = key_of(0, (number - 2) % KEYS)
            tell(gone, 0)
            change(opened, gone, 0)
            tell("", 0)
        if number % 20 == 19:
            opened.compact(force=True)
            sets.rebuild(opened.describe())
        if number % 20 == 9:
            opened.close()
            opened = open_set(sets, pack_bytes=SMALL_PACK)
        if number == 30:
            tell(key_of(0, 5), FOREIGN)
            opened.take_in(foreign)
            tell("", 0)
    opened.close()


def foreign_pack(root: Path) -> Path:
    """Return a pack of another folder of the set."""
    with open_set(ArtifactSets(root)) as opened:
        change(opened, key_of(0, 5), FOREIGN)
    (pack,) = opened.path.glob("*.pack")
    return pack


class Account:
    """What a writer has begun and ended, kept in a file that survives it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def tell(self, key: str, number: int) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(f"{key}\t{number}\n")

    def writer(self, root: Path) -> Writer:
        """Return a writer that knows what was acknowledged."""
        writer = Writer(root, 0)
        begun: tuple[str, int] | None = None
        for line in self.path.read_text("utf-8").splitlines() if self.path.exists() else ():
            key, _, number = line.partition("\t")
            if key:
                begun = key, int(number)
            elif begun is not None:
                writer.state[begun[0]] = begun[1]
                begun = None
        if begun is not None:
            writer.doubtful[begun[0]] = {writer.state.get(begun[0], 0), begun[1]}
        return writer


def run_everything(root: Path, foreign: Path, account: Account) -> None:
    everything(ArtifactSets(root), foreign, account.tell)


def test_a_kill_at_any_point_loses_nothing(tmp_path: Path, soak: bool) -> None:
    """At the first, a middle and the last time that each point is reached."""
    foreign = foreign_pack(tmp_path / "foreign")
    seen: list[str] = []
    faults.hook = seen.append
    try:
        run_everything(tmp_path / "whole", foreign, Account(tmp_path / "account"))
    finally:
        faults.hook = None
    moments = []
    for place, count in Counter(seen).items():
        step = 1 if soak else max(1, count // 2)
        moments += [Moment(place, nth) for nth in range(1, count + 1, step)]
    all_of("sets", moments)
    for moment in moments:
        root, account = tmp_path / f"{moment}", Account(tmp_path / f"account of {moment}")

        def die(moment: Moment = moment, root: Path = root, account: Account = account) -> None:
            die_at(moment)
            run_everything(root, foreign, account)

        status = in_child(die)
        # Packs have random names, and are compacted in their order: there may be fewer.
        assert was_killed(status) or (status == 0 and moment.nth > 1), moment
        writer = account.writer(root)
        check_all(root, [writer])
        with open_set(ArtifactSets(root), pack_bytes=SMALL_PACK) as opened:
            opened.compact(force=True)  # no lock is left
            writer.check(opened)


def test_a_kill_while_the_pack_of_a_killed_writer_is_taken_over(root: Path) -> None:
    writer = Writer(root, 0)
    writer.start(seed=3, prepare=lambda: die_at(Moment("pack: written", 9)))
    assert was_killed(writer.end())
    (pack,) = root.glob("*/*/*.pack")
    with open(pack, "ab") as file:
        file.write(b"SCr2" + os.urandom(100))  # and torn

    def die() -> None:
        die_at(Moment("pack: taken over", 1))
        change(open_set(ArtifactSets(root)), key_of(1, 0), 5)

    for _ in range(2):
        assert was_killed(in_child(die))
    check_all(root, [writer])
    with open_set(ArtifactSets(root)) as opened:
        change(opened, key_of(1, 0), 6)
    assert [pack] == list(root.glob("*/*/*.pack"))
    check_all(root, [writer, Writer(root, 1, {key_of(1, 0): 6})])


@pytest.mark.parametrize("kept", [0, 63, 64, 65, 2064, 2200])
def test_a_record_that_is_cut_off_leaves_what_was_before(root: Path, kept: int) -> None:
    """A kill in the middle of the system call; nothing behind it was acknowledged."""
    with open_set(ArtifactSets(root)) as opened:
        change(opened, key_of(0, 0), 7)
        change(opened, key_of(0, 1), 8)
        (pack,) = opened.path.glob("*.pack")
    size = pack.stat().st_size

    def die() -> None:
        again = open_set(ArtifactSets(root))
        die_at(Moment("pack: written", 1))
        change(again, key_of(0, 0), 9)

    assert was_killed(in_child(die))
    assert pack.stat().st_size > size + kept
    os.truncate(pack, size + kept)
    check_all(root, [Writer(root, 0, {key_of(0, 0): 7, key_of(0, 1): 8})])
    with open_set(ArtifactSets(root)) as opened:
        change(opened, key_of(0, 0), 10)
    check_all(root, [Writer(root, 0, {key_of(0, 0): 10, key_of(0, 1): 8})])


def test_what_a_killed_process_evicted_stays_away(root: Path) -> None:
    """Evictions are deletions: after a kill some are done, and none of them is half done."""
    sets = ArtifactSets(root)
    with open_set(sets, pack_bytes=SMALL_PACK) as opened:
        for number in range(1, 41):
            opened.put(f"k{number}", {"t": array(number), "n": number})
    for nth in (1, 5, 12):

        def die(nth: int = nth) -> None:
            again = open_set(sets, pack_bytes=SMALL_PACK, max_size=60_000)
            die_at(Moment("pack: written", nth))
            again.evict()

        assert was_killed(in_child(die))
        with open_set(sets) as opened:
            keys = set(opened)
            assert keys == {key for key in keys if opened.get(key)["t"].tobytes()}
            assert len(keys) == len(opened)
            assert not opened.verify().damage
            info = opened.describe()
        sets.rebuild(info)
        with open_set(sets) as opened:
            assert set(opened) == keys
    with open_set(sets, pack_bytes=SMALL_PACK, max_size=60_000) as opened:
        opened.evict()
        assert opened.stats().live <= 60_000


def test_an_older_pack_that_outlives_a_compaction_brings_nothing_back(root: Path) -> None:
    """Killed between two unlinks: the pack with the deletion is gone, that with the value not."""
    sets = ArtifactSets(root)
    first = open_set(sets, pack_bytes=SMALL_PACK)
    first.put("deleted", {"t": array(1)})
    first.put("stays", {"t": array(2)})
    first.flush()

    def delete_and_more() -> None:
        with open_set(sets, pack_bytes=SMALL_PACK) as other:
            assert other.delete("deleted")
            for number in range(9):
                other.put(f"more {number}", {"t": array(3 + number)})

    assert in_child(delete_and_more) == 0
    first.put("later", {"t": array(50)})
    first.close()
    for nth in (1, 2):

        def die(nth: int = nth) -> None:
            opened = open_set(sets, pack_bytes=SMALL_PACK)
            for number in range(9):
                opened.delete(f"more {number}")
            opened.put(f"new {nth}", {"t": array(60 + nth)})
            die_at(Moment("compact: unlinked", nth))
            opened.compact(force=True)

        in_child(die)
        copied = [Path(path) for path in root.glob("*/*/index.sqlite3*")]
        kept = {path: path.read_bytes() for path in copied}
        for with_index in (False, True):
            for path, data in kept.items():
                path.unlink(missing_ok=True)
                if with_index:
                    path.write_bytes(data)
            with open_set(sets) as opened:
                assert "deleted" not in opened
                assert {"stays", "later", f"new {nth}"} <= set(opened)
                assert not opened.verify().damage


@pytest.mark.parametrize("act", ["compact", "delete"])
def test_what_footers_say_counts_when_a_pack_has_grown_behind_them(root: Path, act: str) -> None:
    """This process has read the footer; another one went on behind it, and was killed."""
    sets = ArtifactSets(root)
    with open_set(sets) as opened:
        for number in range(1, 9):
            change(opened, key_of(0, number), number)
    opened = open_set(sets)
    assert len(opened) == 8

    def die() -> None:
        again = open_set(ArtifactSets(root))
        change(again, key_of(0, 1), 11)
        die_at(Moment("pack: written", 1))
        change(again, key_of(0, 2), 12)

    assert was_killed(in_child(die))
    state = {key_of(0, number): number for number in range(3, 9)}
    state |= {key_of(0, 1): 11, key_of(0, 2): 12}
    if act == "delete":

        def delete() -> None:
            """Into a pack of its own, which is compacted alone."""
            with open_set(ArtifactSets(root), pack_bytes=1) as other:
                change(other, key_of(0, 3), 0)

        assert in_child(delete) == 0
        state[key_of(0, 3)] = 0
        writing = open_set(sets)
        change(writing, key_of(0, 4), 14)  # this process writes to the first pack now
        state[key_of(0, 4)] = 14
        assert len(list(opened.path.glob("*.pack"))) == 2
    opened.compact(force=True)
    opened.close()
    check_all(root, [Writer(root, 0, state)])
