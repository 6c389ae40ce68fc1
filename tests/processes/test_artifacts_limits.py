"""Sets where something runs out or stands still: descriptors, room, time, the machine itself."""

from __future__ import annotations

import errno
import itertools
import os
import random
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smartcache.artifacts import ArtifactSet, ArtifactSets
from smartcache.artifacts.engine import compact as artifacts_compact
from smartcache.artifacts.engine import engine as artifacts_engine
from smartcache.artifacts.engine import packs as artifacts_packs
from smartcache.errors import ArtifactNotFoundError, NoSpaceError, SmartcacheError
from tests.artifacts.crafting import Crafted
from tests.artifacts.opening import array, engine_of, open_set
from tests.artifacts.packreader import packs_of
from tests.artifacts.peer import Clock, Peer
from tests.processes.artifact_writers import (
    SMALL_PACK,
    Writer,
    change,
    check_all,
    in_fork,
    key_of,
    number_in,
    value_of,
    wait_for,
)
from tests.processes.children import Child
from tests.processes.killing import in_child
from tests.store.small_disks import CannotMountError, bind, enter_namespace

Rounds = Callable[[int], int]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "sets"


# many packs


def many_packs(sets: ArtifactSets, count: int) -> None:
    """Let a set have packs of one artifact each, made at once."""
    with open_set(sets) as opened:
        folder, path = engine_of(opened).folder, opened.path
    for number in range(count):
        pack = Crafted(bytes.fromhex(folder.id), number + 1, bytes.fromhex(folder.instance))
        value = {"t": array(number, 1100), "n": number}
        pack.artifact(b"\x02k%d" % number, value, seq=number + 1)
        pack.seal(pack.footer())
        (path / f"{number + 1:016x}.pack").write_bytes(pack.data)


def test_more_packs_than_descriptors_can_be_read(root: Path, soak: bool) -> None:
    count, descriptors = (10_000, 1024) if soak else (400, 256)

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
        sets = ArtifactSets(root)
        many_packs(sets, count)
        keys = [f"k{number}" for number in range(count)]
        chance = random.Random(1)
        for read_only in (False, True):
            with open_set(sets, read_only=read_only) as opened:
                assert len(opened) == count
                for number in chance.sample(range(count), 100):
                    assert opened.get(keys[number])["n"] == number
                samples = [opened[key] for key in keys[:40]]
                chosen = opened.select(keys)
                for _ in range(8):
                    some = chance.sample(range(count), 32)
                    batch = chosen.read(some)
                    assert batch["n"] == some
                    for row, number in enumerate(some):
                        assert np.array_equal(batch["t"][row], array(number, 1100))
                assert [sample["n"] for sample in samples] == list(range(40))
                assert opened.stats().packs == count
        open_descriptors = len(os.listdir("/proc/self/fd"))
        assert open_descriptors < descriptors // 2

    with Child(work) as child:
        child.result()


def test_a_batch_of_more_packs_than_descriptors_is_read(tmp_path: Path) -> None:
    def work() -> None:
        sets = ArtifactSets(tmp_path / "sets")
        keys = [f"k{number}" for number in range(300)]
        many_packs(sets, len(keys))
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
        with open_set(sets) as opened:
            for _ in range(2):
                for batch in (opened.get_batch(keys), opened.select(keys).read(range(300))):
                    assert batch["n"] == list(range(300))
                    for number in range(300):
                        assert np.array_equal(batch["t"][number], array(number, 1100))
            out = {"t": np.zeros((400, 1100), np.uint8)}
            assert opened.get_batch(keys, out=out)["t"].base is out["t"]
            assert np.array_equal(out["t"][299], array(299, 1100))

    with Child(work) as child:
        child.result()


def test_many_small_packs_become_few(tmp_path: Path) -> None:
    """Also those of earlier runs of the machine, to which nobody writes any more."""

    def work() -> None:
        sets = ArtifactSets(tmp_path / "sets")
        for boot in range(30):
            artifacts_engine.boot_id = lambda boot=boot: f"boot {boot}"  # type: ignore[assignment, attr-defined]
            with open_set(sets) as opened:
                opened.put(f"k{boot}", {"t": array(boot, 1100), "n": boot})
        assert len(list(opened.path.glob("*.pack"))) == 30
        with open_set(sets) as opened:
            opened.compact()
            assert len(list(opened.path.glob("*.pack"))) <= 2
            assert {opened.get(f"k{boot}")["n"] for boot in range(30)} == set(range(30))

    with Child(work) as child:
        child.result()


# room


def test_a_full_disk_loses_nothing_that_was_acknowledged(root: Path, soak: bool) -> None:
    """Every length at which a write can fail, in the middle of records, footers and copies."""

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        chance = random.Random(3)
        state: dict[str, int] = {}
        sets = ArtifactSets(root)
        for turn in range(400 if soak else 60):
            limit = chance.randrange(1, 40_000)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            with (
                suppress(NoSpaceError, SmartcacheError),
                open_set(sets, pack_bytes=chance.choice((20_000, SMALL_PACK))) as opened,
            ):
                for number in range(1, 12):
                    key = key_of(0, chance.randrange(12))
                    wanted = 0 if chance.random() < 0.2 else 1000 * turn + number
                    before = state.get(key, 0)
                    try:
                        change(opened, key, wanted)
                    except NoSpaceError:
                        found = opened.get(key)
                        assert (0 if found is None else number_in(key, found)) == before
                    else:
                        state[key] = wanted
                if turn % 3 == 0:
                    opened.compact(force=True)
            resource.setrlimit(
                resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            )
            with open_set(sets) as opened:
                for key, number in state.items():
                    found = opened.get(key)
                    assert (0 if found is None else number_in(key, found)) == number, (turn, key)
        check_all(root, [Writer(root, 0, state)])

    with Child(work) as child:
        child.result()


# a disk that cannot be written


def test_a_read_only_mount_is_read_while_others_write_and_compact(root: Path) -> None:
    """Nothing is written, nothing is missed, and what was put last is found at once."""
    ready, stop, enough = (root.parent / name for name in ("ready", "stop", "enough"))
    keys = [f"k{number}" for number in range(12)]

    def read() -> int:
        rounds = 0
        with suppress(CannotMountError):
            enter_namespace()
            bind(root, root.with_name("mounted"), read_only=True)
            with open_set(ArtifactSets(root.with_name("mounted")), read_only=True) as opened:
                chosen = opened.select(keys)
                while not stop.exists():
                    ready.touch()
                    assert all(number_in(key, opened.get(key)) for key in keys)
                    assert len(chosen.read(range(12))["number"]) == 12
                    assert set(opened) >= set(keys)
                    opened.stats()
                    rounds += 1
                    if rounds > 3:
                        enough.touch()
                assert number_in("last", opened.get("last")) == 77
        ready.touch()
        enough.touch()
        return rounds

    with open_set(ArtifactSets(root), pack_bytes=SMALL_PACK) as opened:
        for key in keys:
            change(opened, key, 1)
        with Child(read) as reader:
            wait_for(ready)
            for number in itertools.count(2):
                change(opened, keys[number % 12], number)
                if number % 20 == 0:
                    opened.compact(force=True)
                if number > 100 and enough.exists():
                    break
            change(opened, "last", 77)
            stop.touch()
            rounds = reader.result()
    if not rounds:
        pytest.skip("nothing can be mounted here")
    assert rounds > 3


# processes that stand still


def test_a_writer_that_is_stopped_blocks_nobody(root: Path) -> None:
    """It holds the lock of its pack: others read that, and write to their own."""
    ready = root.parent / "ready"

    def stand_still() -> None:
        opened = open_set(ArtifactSets(root))
        change(opened, "stopped", 5)
        ready.touch()
        while True:
            change(opened, "busy", random.randrange(1, 1000))

    pid = in_fork(stand_still)
    try:
        wait_for(ready)
        os.kill(pid, signal.SIGSTOP)

        def work() -> None:
            with open_set(ArtifactSets(root)) as opened:
                for number in range(1, 30):
                    change(opened, "mine", number)
                    assert number_in("mine", opened.get("mine")) == number
                    assert number_in("stopped", opened.get("stopped")) == 5
                opened.delete("stopped")
                assert "stopped" not in opened
                opened.compact(force=True)
                assert not opened.verify().damage

        begun = time.monotonic()
        for _ in range(3):
            with Child(work) as child:
                child.result()
            with open_set(ArtifactSets(root)) as opened:
                change(opened, "stopped", 5)
        assert time.monotonic() - begun < 20
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    with open_set(ArtifactSets(root)) as opened:
        assert number_in("mine", opened.get("mine")) == 29


# the machine starts again


@pytest.mark.parametrize("set_back", [0, 3600, 10**8])
def test_the_later_one_counts_after_the_machine_was_started_again(
    root: Path, set_back: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its monotonic clock begins anew, and its time of day may have been set back."""
    sets = ArtifactSets(root)
    clock, day = time.clock_gettime_ns, time.time
    for boot in range(5):
        origin = clock(time.CLOCK_BOOTTIME)
        monkeypatch.setattr(artifacts_engine, "boot_id", lambda boot=boot: f"boot {boot}")
        monkeypatch.setattr(
            time, "clock_gettime_ns", lambda which, origin=origin: clock(which) - origin
        )
        monkeypatch.setattr(time, "time", lambda boot=boot: day() - set_back * boot)
        for number in (1, 2):
            with open_set(sets) as opened:
                if boot:
                    assert opened.get("k")["n"] == (boot - 1, 2) if number == 1 else (boot, 1)
                    assert ("gone" in opened) == bool(boot % 2)
                opened.put("k", {"n": (boot, number)})
                if number == 2:
                    opened.put("gone", 1) if boot % 2 == 0 else opened.delete("gone")
        assert len(list(opened.path.glob("*.pack"))) == boot + 1
    with open_set(sets) as opened:
        assert opened.get("k")["n"] == (4, 2)
        opened.compact(force=True)
        assert opened.get("k")["n"] == (4, 2)


def test_nobody_writes_to_a_pack_of_an_earlier_run_of_the_machine(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pack says with which base its writer makes numbers: the next one may need to know."""
    sets = ArtifactSets(root)
    monkeypatch.setattr(artifacts_engine, "boot_id", lambda: "boot 1")
    with open_set(sets) as opened:
        change(opened, "first", 1)
    (old,) = opened.path.glob("*.pack")
    before = old.read_bytes()
    monkeypatch.setattr(artifacts_engine, "boot_id", lambda: "boot 2")
    with open_set(sets) as opened:
        change(opened, "second", 2)

        def write_too() -> None:
            change(opened, "third", 3)

        with Child(write_too) as child:
            child.result()
        assert number_in("third", opened.get("third")) == 3
        assert len(list(opened.path.glob("*.pack"))) == 3
        assert old.read_bytes() == before


# interruptions


def test_a_put_that_is_interrupted_is_there_or_not_for_everybody(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in a notebook: most likely during the write, of which others may know already."""
    real = os.pwritev

    def write_and_raise(*arguments: Any) -> int:  # noqa: ANN401
        real(*arguments)
        raise KeyboardInterrupt

    with open_set(ArtifactSets(root)) as opened, Peer(Clock()) as peer:
        peer.open(root)
        for number in range(1, 12):
            for key in ("a", "b"):
                opened.put(key, {"n": number, "x": array(number, 3000 + 500 * (number % 4))})
            monkeypatch.setattr(os, "pwritev", write_and_raise)
            with pytest.raises(KeyboardInterrupt):
                opened.put("a", {"n": -number, "x": array(number, 9000)})
            monkeypatch.setattr(os, "pwritev", real)
            assert peer.batch(["b"])["n"] == [number]
            assert opened.get("a")["n"] in (number, -number)
            opened.put("c", {"n": number, "x": array(number, 2000)})
            for each in (opened.get_batch, peer.batch):
                assert each(["b"])["n"] == each(["c"])["n"] == [number]
            seen = peer.batch(["a"])["n"]
            with open_set(ArtifactSets(root), read_only=True) as again:
                assert [again.get("a")["n"]] == seen == [opened.get("a")["n"]]
        peer.close()
    packs_of(opened.path)
    with open_set(ArtifactSets(root)) as opened:
        assert [opened.get("a")["n"]] == seen
        assert not opened.verify().damage


def test_a_put_that_is_interrupted_after_its_write_is_there_for_its_own_process_too(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(where: str) -> None:
        if where == "pack: written":
            raise KeyboardInterrupt

    with open_set(ArtifactSets(root)) as opened:
        opened.put("a", 1)
        with monkeypatch.context() as patch:
            patch.setattr(artifacts_packs, "reached", interrupt)
            with pytest.raises(KeyboardInterrupt):
                opened.put("a", 2)
        opened.put("b", 3)
        with open_set(ArtifactSets(root), read_only=True) as other:
            assert (opened.get("a"), opened.get("b")) == (other.get("a"), other.get("b")) == (2, 3)


@pytest.mark.parametrize("nth", [1, 30, 201, 399])
def test_a_set_that_was_interrupted_while_it_was_read_is_complete(
    tmp_path: Path, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was known of half of the packs must not pass for all of them."""
    sets = ArtifactSets(tmp_path / "sets")
    many_packs(sets, 100)
    real = os.pread
    count = iter(range(nth))

    def read(*arguments: Any) -> bytes:  # noqa: ANN401
        if next(count, None) is None:
            raise KeyboardInterrupt
        return real(*arguments)

    with open_set(sets) as opened:
        monkeypatch.setattr(os, "pread", read)
        with pytest.raises(KeyboardInterrupt):
            list(opened)
        monkeypatch.setattr(os, "pread", real)
        time.sleep(0.06)  # the folder was changed long ago, as far as anybody can tell
        assert len(opened) == 100
        assert opened.get("k99")["n"] == 99


# threads


def test_threads_share_a_set_in_every_way_at_once(  # noqa: C901, PLR0915 - one for each way
    tmp_path: Path, rounds: Rounds
) -> None:
    root = tmp_path / "sets"
    problems: list[str] = []
    with open_set(ArtifactSets(root), pack_bytes=SMALL_PACK) as opened:
        keys = [f"steady {number}" for number in range(20)]
        for number, key in enumerate(keys):
            opened.put(key, value_of(key, number + 1))
        stop = threading.Event()
        done: Counter[object] = Counter()

        def repeat(act: Callable[[random.Random], object]) -> Callable[[], None]:
            def run() -> None:
                chance = random.Random(id(act))
                try:
                    while not stop.is_set():
                        act(chance)
                        done[act] += 1
                except BaseException as error:  # noqa: BLE001 - told to the test
                    problems.append(repr(error))
                    stop.set()

            return run

        def put(chance: random.Random) -> None:
            key = f"own {threading.get_ident()} {chance.randrange(9)}"
            number = chance.randrange(1, 1 << 30)
            opened.put(key, value_of(key, number))
            assert number_in(key, opened.get(key)) == number
            if chance.random() < 0.3:
                assert opened.delete(key)
                assert key not in opened

        def read(chance: random.Random) -> None:
            some = chance.sample(keys, 5)
            for key, number in zip(some, opened.get_batch(some)["number"], strict=True):
                assert keys.index(key) + 1 == number
            assert opened.get(some[0]) is not None
            if chance.random() < 0.05:
                assert set(opened) >= set(keys)
                opened.select(some).read([0, 1])

        def look_after(chance: random.Random) -> None:
            act = chance.choice(("compact", "stats", "pin", "fork", "verify", "evict"))
            if act == "compact":
                opened.compact(force=True)
            elif act == "pin":
                opened.pin(keys[0])
                assert opened.is_pinned(keys[0])
                opened.unpin(keys[0])
            elif act == "fork":
                with Child(lambda: _read_in_child(opened, keys)) as child:
                    child.result()
            elif act == "verify":
                assert not opened.verify().damage
            else:
                getattr(opened, act)()

        acts = [put, put, read, look_after]
        threads = [threading.Thread(target=repeat(act)) for act in acts]
        for thread in threads:
            thread.start()
        while not stop.is_set() and min(done[act] for act in acts) < rounds(25):
            time.sleep(0.01)
        stop.set()
        for thread in threads:
            thread.join(60)
        assert not problems, problems
        assert not any(thread.is_alive() for thread in threads), "they wait for each other"
        assert not opened.verify().damage


def _read_in_child(opened: ArtifactSet, keys: list[str]) -> None:
    """While a thread of the parent compacts: the child sees what becomes of it."""
    until = time.monotonic() + 0.05
    while time.monotonic() < until:
        for number, key in enumerate(keys):
            assert number_in(key, opened.get(key)) == number + 1


# pins and bounds


def test_what_is_pinned_meanwhile_is_not_evicted(root: Path) -> None:
    """By another process, after it was chosen."""
    with open_set(ArtifactSets(root), max_size=30_000) as opened:
        for number in range(5):
            opened.put(f"k{number}", {"t": array(number, 5000)})
        engine = engine_of(opened)
        chosen = list(artifacts_compact.victims(engine, free=10_000))

        def pin() -> None:
            with open_set(ArtifactSets(root)) as other:
                for victim in chosen:
                    other.pin(victim.key[1:].decode())

        assert chosen
        assert in_child(pin) == 0
        assert artifacts_compact.evict(engine, chosen).artifacts == 0
        assert len(opened) == 5


def test_a_put_does_not_fail_because_of_the_bounds(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever keeps a set from being brought within them."""
    with open_set(ArtifactSets(root), max_size=20_000) as opened:

        def refuse(*_: object) -> None:
            raise OSError(errno.EIO, "the index cannot be read")

        monkeypatch.setattr(type(engine_of(opened).index), "uses", refuse)
        for number in range(9):
            opened.put(f"k{number}", {"t": array(number, 5000)})
        assert len(opened) == 9
        with pytest.raises(ArtifactNotFoundError):
            opened["none"]
