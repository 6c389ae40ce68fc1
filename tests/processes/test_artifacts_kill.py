"""SIGKILL of processes that use a set: what was acknowledged is there, what was deleted is not.

After every kill the set is opened and every key compared with what its writer had acknowledged;
`verify` finds nothing, and an index made from the packs alone, of the set as the kill has left it,
tells the same.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("fork and SIGKILL", allow_module_level=True)

from tests.api import ArtifactSet, ArtifactSets
from tests.api import store_faults as faults
from tests.artifacts.opening import array, engine_of, open_set
from tests.processes.artifact_writers import (
    KEYS,
    SMALL_PACK,
    Writer,
    change,
    check_all,
    in_fork,
    key_of,
    number_in,
)
from tests.processes.killing import Moment, die_at, was_killed

POINTS = (
    "pack: claimed", "pack: made", "pack: written", "set: rows written", "set: sealed",
    "compact: copied", "compact: switched", "compact: unlinked", "tail: read", "rebuild: rows made",
)  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "sets"


def times(soak: bool) -> int:
    return 200 if soak else 20


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


def everything(opened: ArtifactSet, sets: ArtifactSets, tell: Callable[[str, int], None]) -> None:
    """Reach every point, several times."""
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


def run_everything(root: Path, account: Account) -> None:
    sets = ArtifactSets(root)
    everything(open_set(sets, pack_bytes=SMALL_PACK), sets, account.tell)


def test_a_kill_at_any_point_loses_nothing(tmp_path: Path, soak: bool) -> None:
    """At the first, a middle and the last time that each point is reached."""
    seen: list[str] = []
    faults.hook = seen.append
    try:
        run_everything(tmp_path / "whole", Account(tmp_path / "account"))
    finally:
        faults.hook = None
    reached = set(seen) - {"claim: opened"}
    assert reached == set(POINTS) - {"tail: read"}
    for place in sorted(reached):
        count = seen.count(place)
        nths = range(1, count + 1, 1 if soak else max(1, count // 2))
        for nth in nths:
            root = tmp_path / f"{place} {nth}"
            account = Account(tmp_path / f"account of {place} {nth}")

            def die(place: str = place, nth: int = nth) -> None:
                die_at(Moment(place, nth))
                run_everything(root, account)  # noqa: B023 - run at once

            status = os.waitpid(in_fork(die), 0)[1]
            # How many groups of rows there are depends on the clock: there may be fewer this time.
            is_over = not status and nth > 1 and place == "set: rows written"
            assert was_killed(status) or is_over, f"{place} {nth}"
            check_all(root, [account.writer(root)])


def test_a_kill_while_the_tail_of_a_killed_writer_is_read(root: Path) -> None:
    writer = Writer(root, 0)
    writer.start(seed=3, prepare=lambda: die_at(Moment("pack: written", 9)))
    assert was_killed(writer.end())

    def die() -> None:
        die_at(Moment("tail: read", 1))
        open_set(ArtifactSets(root))

    assert was_killed(os.waitpid(in_fork(die), 0)[1])
    check_all(root, [writer])


def test_nobody_writes_to_a_pack_while_its_tail_is_read(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who reads a tail seals the pack if it does not end with a record: not a living writer's."""
    writer = Writer(root, 0)
    writer.start(seed=3, prepare=lambda: die_at(Moment("pack: written", 9)))
    assert was_killed(writer.end())

    def put_and_die() -> None:
        faults.hook = None
        again = open_set(ArtifactSets(root))
        die_at(Moment("pack: written", 1))
        change(again, key_of(1, 0), 5)

    def hook(point: str) -> None:
        if point == "tail: read":
            monkeypatch.setattr(faults, "hook", None)
            before = {path: path.stat().st_size for path in root.glob("*/*/*.pack")}
            assert was_killed(os.waitpid(in_fork(put_and_die), 0)[1])
            assert {path: path.stat().st_size for path in before} == before, "into another pack"

    monkeypatch.setattr(faults, "hook", hook)
    open_set(ArtifactSets(root)).close()
    assert faults.hook is None, "the point was reached"
    with open_set(ArtifactSets(root)) as opened:
        assert number_in(key_of(1, 0), opened.get(key_of(1, 0))) == 5
    check_all(root, [writer, Writer(root, 1, {key_of(1, 0): 5})])


@pytest.mark.parametrize("kept", [0, 1, 63, 64, 65, 700, 2064, 2200])
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

    assert was_killed(os.waitpid(in_fork(die), 0)[1])
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

        assert was_killed(os.waitpid(in_fork(die), 0)[1])
        with open_set(sets) as opened:
            keys = set(opened)
            assert keys == {key for key in keys if opened.get(key)["t"].tobytes()}
            assert len(keys) == len(opened)
            assert not opened.verify().has_damage
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

    assert os.waitpid(in_fork(delete_and_more), 0)[1] == 0
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

        pid = in_fork(die)
        os.waitpid(pid, 0)
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
                assert not opened.verify().missing_packs


def test_a_process_killed_while_it_holds_the_lock_of_the_set_stops_nobody(root: Path) -> None:
    with open_set(ArtifactSets(root), pack_bytes=SMALL_PACK) as opened:
        for number in range(1, 30):
            change(opened, key_of(0, number % KEYS), number)

    def die(place: str) -> None:
        again = open_set(ArtifactSets(root), pack_bytes=SMALL_PACK)
        die_at(Moment(place, 1))
        change(again, key_of(0, 1), 77)  # shares the lock until its row is written
        again.compact(force=True)

    for place in ("pack: written", "compact: switched"):
        assert was_killed(os.waitpid(in_fork(lambda place=place: die(place)), 0)[1])  # type: ignore[misc]
        with open_set(ArtifactSets(root), pack_bytes=SMALL_PACK) as opened:
            change(opened, key_of(0, 2), 78)
            opened.compact(force=True)
            assert number_in(key_of(0, 1), opened.get(key_of(0, 1))) == 77
            assert number_in(key_of(0, 2), opened.get(key_of(0, 2))) == 78
            assert not engine_of(opened).pending
