"""Locks of files and of keys among real processes: killed, forked, interrupted, and all at once."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from smartcache.errors import LockTimeoutError, StoreError, StoreUnwritableError
from smartcache.system.locks import KeyLocks, claim, claim_folder, is_free, store_lock
from tests.processes.children import NOBODY, Child, folder_of
from tests.processes.killing import Moment, die_at, in_child, was_killed

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="flock, fork and SIGKILL")

FOR_EVER = 3600.0
Block = Callable[..., AbstractContextManager[object]]
Work = Callable[[Connection], object]


class Other(Child[None]):
    """A forked process. We `hear` what it sends; it receives when we let it `go`."""

    def __init__(self, work: Work) -> None:
        self.ours, theirs = Pipe()

        def run() -> None:
            self.ours.close()
            work(theirs)

        super().__init__(run)
        theirs.close()

    def hear(self) -> str:
        assert self.ours.poll(60), "it says nothing"
        return str(self.ours.recv())

    def go(self) -> None:
        self.ours.send("go")


Start = Callable[[Work], Other]


@pytest.fixture
def start() -> Iterator[Start]:
    others: list[Other] = []

    def begin(work: Work) -> Other:
        others.append(Other(work))
        return others[-1]

    yield begin
    for other in others:
        other.end()
        other.ours.close()  # its children end, too


@pytest.fixture
def key_locks(tmp_path: Path) -> KeyLocks:
    return KeyLocks(tmp_path / "leases")


@pytest.fixture
def both(tmp_path: Path, key_locks: KeyLocks) -> list[Block]:
    """The lock of a store, and those of two keys."""
    keys = partial(key_locks.hold, ["a", "key"], what="prune")
    return [partial(store_lock, tmp_path / "lock", "prune"), keys]


@pytest.fixture(params=["store", "keys"])
def block(request: pytest.FixtureRequest, both: list[Block]) -> Block:
    return both[0] if request.param == "store" else both[1]


def is_locked(*blocks: Block) -> bool:
    """Whether all of them are."""
    for block in blocks:
        try:
            with block(timeout=0):
                return False
        except LockTimeoutError:
            pass
    return True


def holding(block: Block) -> Work:
    """Hold something until we may go."""

    def work(me: Connection) -> None:
        with block():
            me.send("held")
            me.recv()

    return work


def test_who_waits_hears_for_which_process_and_a_killed_one_holds_nothing(
    start: Start, block: Block
) -> None:
    other = start(holding(block))
    other.hear()
    with pytest.raises(LockTimeoutError) as caught, block(timeout=0):
        pass
    assert vars(caught.value)["holder"].startswith(f"process {other.pid} (prune), since ")
    heard: list[str] = []

    def hear(sentence: str) -> None:
        heard.append(sentence)
        other.go()

    with block(timeout=None, on_wait=hear):
        pass
    (sentence,) = heard
    pattern = rf"process {other.pid} \(prune\) has held the (store|lock of 'a') since \d\d:\d\d"
    assert re.fullmatch(pattern, sentence)
    other = start(holding(block))
    other.hear()
    assert is_locked(block)
    other.end()
    assert not is_locked(block)


@pytest.mark.parametrize("holder", ["process", "thread"])
def test_ctrl_c_ends_a_wait_and_leaves_nothing_locked(
    start: Start, block: Block, holder: str
) -> None:
    def work(me: Connection) -> None:
        def hold() -> None:
            with block():
                taken.set()
                time.sleep(FOR_EVER)

        taken = threading.Event()
        if holder == "thread":
            threading.Thread(target=hold, daemon=True).start()
            taken.wait()
        try:
            with block(timeout=FOR_EVER, on_wait=me.send):
                me.send("got it")
        except KeyboardInterrupt:
            me.send("interrupted")
            me.recv()  # the traceback is alive, and must hold nothing

    with block() if holder == "process" else nullcontext():
        other = start(work)
        other.hear()
        os.kill(other.pid, signal.SIGINT)
        assert other.hear() == "interrupted"
    assert is_locked(block) == (holder == "thread")


def test_a_forked_child_neither_holds_nor_keeps_the_lock_of_another_thread(
    start: Start, both: list[Block]
) -> None:
    def work(me: Connection) -> None:
        taken, done = threading.Event(), threading.Event()

        def hold() -> None:
            with both[0](), both[1]():
                taken.set()
                done.wait()
            me.send("released")

        threading.Thread(target=hold, daemon=True).start()
        taken.wait()
        signal.signal(signal.SIGINT, lambda *_: done.set())
        if os.fork() == 0:
            me.send("forked")
            me.recv()
            os._exit(0)
        while True:
            time.sleep(FOR_EVER)

    parent = start(work)
    assert parent.hear() == "forked"
    assert is_locked(*both), "the child closed its copies, and the parent's locks stayed"
    os.kill(parent.pid, signal.SIGINT)
    assert parent.hear() == "released"
    for block in both:
        assert not is_locked(block), "the child lives and holds nothing"


def test_a_child_forked_inside_a_block_starts_with_nothing_and_takes_nothing_away(
    start: Start, both: list[Block], tmp_path: Path
) -> None:
    def work(me: Connection) -> None:
        taken = claim(tmp_path / "claimed")
        assert taken is not None
        with both[0](), both[1]():
            if (child := os.fork()) != 0:
                os.waitpid(child, 0)
                me.send("child gone")
                me.recv()
                os._exit(0)
            for block in both:
                try:
                    with block(timeout=0):
                        me.send("child got it")
                except LockTimeoutError as error:
                    me.send(f"refused: {error}")
            try:
                me.send(f"child has {taken.fd}")
            except StoreError as error:
                me.send(str(error))
            (tmp_path / "stranger").write_bytes(b"data")
            strangers = [os.open(tmp_path / "stranger", os.O_RDWR) for _ in range(20)]
        # The blocks it inherited are left now: neither locks nor strangers' descriptors go.
        taken.release()
        del taken
        assert {os.fstat(fd).st_size for fd in strangers} == {4}
        me.send("child left")

    parent = start(work)
    for _ in both:
        refused = f"refused: Gave up after 0 s: process {parent.pid} (prune) has held"
        assert parent.hear().startswith(refused)
    assert parent.hear().endswith("is not claimed by this process any more")
    assert parent.hear() == "child left"
    assert parent.hear() == "child gone"
    assert is_locked(*both)
    assert not is_free(tmp_path / "claimed")
    assert (tmp_path / "lock").read_bytes() != b"", "the parent's note"


def test_no_moment_of_a_fork_lets_a_child_inherit_a_lock(
    start: Start, both: list[Block], tmp_path: Path, rounds: Callable[[int], int]
) -> None:
    number = rounds(40)

    def lock_all_the_time() -> None:
        while True:
            with both[0](), both[1]():
                pass
            if (taken := claim(tmp_path / "claimed")) is not None:
                taken.release()

    def work(me: Connection) -> None:
        threading.Thread(target=lock_all_the_time, daemon=True).start()
        for _ in range(number):
            if os.fork() == 0:
                me.send("forked")
                me.recv()
                os._exit(0)
        time.sleep(FOR_EVER)

    parent = start(work)
    for _ in range(number):
        assert parent.hear() == "forked"
    parent.end()
    for block in both:
        assert not is_locked(block)
    assert is_free(tmp_path / "claimed")


def test_a_program_that_was_started_keeps_no_lock(start: Start, both: list[Block]) -> None:
    def work(me: Connection) -> None:
        with both[0](), both[1]():
            nowhere = subprocess.DEVNULL
            words = {"stdin": me.fileno(), "stdout": nowhere, "stderr": nowhere}
            subprocess.Popen(["cat"], close_fds=False, **words)  # type: ignore[call-overload]
            me.send("started")
            time.sleep(FOR_EVER)

    parent = start(work)
    parent.hear()
    parent.end()
    for block in both:
        assert not is_locked(block)


def run_together(others: list[Other]) -> list[int]:
    """Let all begin at once; return what each has counted."""
    for other in others:
        assert other.hear() == "ready"
    for other in others:
        other.go()
    counts = [int(other.hear()) for other in others]
    for other in others:
        other.result()
    return counts


def test_threads_of_many_processes_count_under_one_key_and_lose_nothing(
    start: Start, tmp_path: Path, key_locks: KeyLocks, rounds: Callable[[int], int]
) -> None:
    counter, number = tmp_path / "counter", rounds(15)
    counter.write_text("0")

    def work() -> None:
        for done in range(number):
            with key_locks.hold("key"):
                value = int(counter.read_text())
                if done % 3 == 0:
                    time.sleep(0)
                counter.write_text(str(value + 1))

    def count(me: Connection) -> None:
        threads = [threading.Thread(target=work) for _ in range(8)]
        me.send("ready")
        me.recv()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        me.send(8 * number)

    counts = run_together([start(count) for _ in range(6)])
    assert int(counter.read_text()) == sum(counts)


def test_two_processes_that_name_their_keys_crosswise_do_not_wait_for_each_other(
    start: Start, key_locks: KeyLocks, rounds: Callable[[int], int]
) -> None:
    def crossed(me: Connection, keys: str) -> None:
        me.send("ready")
        me.recv()
        for _ in range(rounds(300)):
            with key_locks.hold(list(keys)):
                pass
        me.send(1)

    assert run_together([start(partial(crossed, keys=keys)) for keys in ("ab", "ba")]) == [1, 1]


def test_cleaners_take_what_was_left_and_nothing_that_is_in_use(
    start: Start, tmp_path: Path, rounds: Callable[[int], int]
) -> None:
    folder = tmp_path / "tmp"
    folder.mkdir()

    def create(me: Connection) -> None:
        me.send("ready")
        me.recv()
        for number in range(rounds(300)):
            mine = claim(folder / f"{os.getpid()}-{number}")
            assert mine is not None
            os.write(mine.fd, b"data")
            assert os.path.samestat(os.fstat(mine.fd), os.stat(mine.path)), "swept away"
            if number % 3 == 0:
                time.sleep(0)
            assert mine.path.read_bytes() == b"data"
            mine.release(remove=number % 2 == 0)
        (tmp_path / f"{os.getpid()} is over").touch()
        me.send(rounds(300))

    def clean(me: Connection) -> None:
        me.send("ready")
        me.recv()
        swept, is_over = 0, False
        while not is_over:
            is_over = len(list(tmp_path.glob("* is over"))) == 3  # then once more
            for name in os.listdir(folder):
                if is_free(folder / name) and (left := claim(folder / name)) is not None:
                    swept += os.fstat(left.fd).st_size > 0
                    left.release()
        me.send(swept)

    counts = run_together([start(work) for work in (create, create, create, clean, clean)])
    assert all(counts[:3])
    assert sum(counts[3:])


def test_what_killed_processes_claimed_is_free_and_what_the_living_claimed_is_not(
    start: Start, tmp_path: Path
) -> None:
    def hold(me: Connection, name: str) -> None:
        mine = claim_folder(tmp_path / name) if name == "folder" else claim(tmp_path / name)
        assert mine is not None
        (tmp_path / "folder" / "half").touch()
        me.send("claimed")
        me.recv()

    def die() -> None:
        die_at(Moment("claim: opened", 1))
        claim(tmp_path / "opened")

    (tmp_path / "folder").mkdir()
    assert was_killed(in_child(die))
    dying = [start(partial(hold, name=name)) for name in ("dying", "folder")]
    living = start(partial(hold, name="living"))
    for other in (*dying, living):
        other.hear()
    assert not is_free(tmp_path / "dying")
    assert claim(tmp_path / "dying") is claim_folder(tmp_path / "folder") is None
    for other in dying:
        other.end()
    for name in ("dying", "opened"):
        assert is_free(tmp_path / name)
        left = claim(tmp_path / name)
        assert left is not None
        left.release()
    left = claim_folder(tmp_path / "folder")
    assert left is not None
    left.release()
    assert os.listdir(tmp_path) == ["living"]
    assert not is_free(tmp_path / "living")


def test_in_a_store_that_cannot_be_written_nothing_can_be_locked() -> None:
    user = NOBODY if os.geteuid() == 0 else None
    time.localtime()  # notes have times; later the zone cannot be read

    def work() -> list[str]:
        said = []
        for attempt in (
            lambda: store_lock(store / "lock", ""), lambda: store_lock(store / "missing", ""),
            lambda: KeyLocks(store / "leases").hold("key"),
            lambda: KeyLocks(store / "missing").hold("key"),
            lambda: nullcontext(claim(store / "x")),
        ):  # fmt: skip
            with pytest.raises(StoreUnwritableError) as caught, attempt():
                pass
            assert str(caught.value).startswith(f"Cannot lock {vars(caught.value)['path']}: Perm")
            said.append(os.path.relpath(vars(caught.value)["path"], store))
        return said

    with folder_of(user) as store:
        (store / "lock").touch()
        (store / "leases").mkdir()
        for entry in (store / "lock", store / "leases", store):
            if user is not None:
                os.chown(entry, user, user)
            entry.chmod(entry.stat().st_mode & 0o555)
        with Child(work, user=user) as child:
            assert child.result() == ["lock", "missing", "leases/keys", "missing", "x"]
        store.chmod(0o755)
