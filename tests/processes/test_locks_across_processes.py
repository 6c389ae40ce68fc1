"""Locks of files and of keys among real processes: killed, forked, interrupted, and all at once."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from smartcache.errors import LockTimeoutError, StoreError, StoreUnwritableError
from smartcache.system.locks import KeyLocks, claim, is_free, lock
from tests.processes.children import NOBODY, folder_of

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="flock, fork and SIGKILL")

FOR_EVER = 3600.0


class Other:
    """A forked process. We `hear` what it says; it waits until we let it `go`."""

    def __init__(self, work: Callable[[Other], object]) -> None:
        heard, self._saying = os.pipe()
        self.waiting, self._going = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(heard)
            os.close(self._going)
            self._work(work)
        os.close(self._saying)
        os.close(self.waiting)
        self._heard = os.fdopen(heard)
        self._status: int | None = None

    def _work(self, work: Callable[[Other], object]) -> None:
        code = 1
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            work(self)
            code = 0
        except BaseException:  # noqa: BLE001 - it must not return into the test
            traceback.print_exc()
        finally:
            os._exit(code)

    # in the other process

    def say(self, *words: object) -> None:
        os.write(self._saying, (" ".join(map(str, words)) + "\n").encode())

    def wait(self) -> None:
        os.read(self.waiting, 1)

    def ready(self) -> None:
        self.say("ready")
        self.wait()

    # here

    def hear(self) -> str:
        line = self._heard.readline().strip()
        if not line:
            pytest.fail("the other process ended")
        return line

    def go(self) -> None:
        os.write(self._going, b"g")

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        self.join()

    def join(self) -> None:
        if self._status is None:
            self._status = os.waitpid(self.pid, 0)[1]

    def end(self) -> str:
        """Return what it said last."""
        said = self._heard.read().strip()
        self.join()
        assert self._status == 0
        return said

    def close(self) -> None:
        if self._status is None:
            self.kill()
        os.close(self._going)  # its children end, too
        self._heard.close()


Start = Callable[[Callable[[Other], object]], Other]


@pytest.fixture
def start() -> Iterator[Start]:
    others: list[Other] = []

    def begin(work: Callable[[Other], object]) -> Other:
        others.append(Other(work))
        return others[-1]

    yield begin
    for other in others:
        other.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lock"


@pytest.fixture
def key_locks(tmp_path: Path) -> KeyLocks:
    return KeyLocks(tmp_path / "leases")


def is_locked(path: Path) -> bool:
    try:
        with lock(path, exclusive=True, timeout=0):
            return False
    except LockTimeoutError:
        return True


def holding(wanted: Callable[[], AbstractContextManager[object]]) -> Callable[[Other], None]:
    """Hold something until we may go."""

    def work(me: Other) -> None:
        with wanted():
            me.say("held")
            me.wait()

    return work


@pytest.mark.parametrize("exclusive", [True, False])
def test_the_lock_of_a_killed_process_is_free_at_once(
    start: Start, path: Path, exclusive: bool
) -> None:
    other = start(holding(lambda: lock(path, exclusive=exclusive, what="prune")))
    other.hear()
    assert is_locked(path)
    other.kill()
    with lock(path, exclusive=False, timeout=0):
        assert path.read_bytes() == b"", "its note is gone too"
    assert not is_locked(path)


def test_the_key_lock_of_a_killed_process_is_free_at_once(
    start: Start, key_locks: KeyLocks
) -> None:
    other = start(holding(lambda: key_locks.hold("key", what="download")))
    other.hear()
    other.kill()
    assert os.listdir(key_locks.directory), "the file is still there, with the note of the dead"
    assert key_locks.busy("key") is None
    with key_locks.hold("key", timeout=0):
        assert str(key_locks.busy("key")).startswith("this process, since ")
    assert os.listdir(key_locks.directory) == []


@pytest.mark.parametrize("timeout", [None, FOR_EVER])
@pytest.mark.parametrize("exclusive", [True, False])
def test_who_waits_for_another_process_hears_which(
    start: Start, path: Path, exclusive: bool, timeout: float | None
) -> None:
    other = start(holding(lambda: lock(path, exclusive=True, what="prune")))
    other.hear()
    with pytest.raises(LockTimeoutError) as caught, lock(path, exclusive=exclusive, timeout=0):
        pass
    assert vars(caught.value)["holder"].startswith(f"process {other.pid} (prune), since ")
    heard: list[str] = []

    def hear(sentence: str) -> None:
        heard.append(sentence)
        other.go()

    with lock(path, exclusive=exclusive, timeout=timeout, on_wait=hear):
        pass
    (sentence,) = heard
    expected = rf"process {other.pid} \(prune\) has held the store since \d\d:\d\d"
    assert re.fullmatch(expected, sentence)


@pytest.mark.parametrize("timeout", [None, FOR_EVER])
def test_who_waits_for_a_key_of_another_process_hears_which(
    start: Start, key_locks: KeyLocks, timeout: float | None
) -> None:
    other = start(holding(lambda: key_locks.hold("key", what="download")))
    other.hear()
    with pytest.raises(LockTimeoutError) as caught, key_locks.hold("key", timeout=0):
        pass
    who = f"process {other.pid} (download)"
    assert vars(caught.value)["key"] == "key"
    assert vars(caught.value)["holder"] == key_locks.busy("key")
    assert str(key_locks.busy("key")).startswith(f"{who}, since ")
    heard: list[str] = []

    def hear(sentence: str) -> None:
        heard.append(sentence)
        other.go()

    with key_locks.hold("key", timeout=timeout, on_wait=hear):
        pass
    (sentence,) = heard
    assert sentence.startswith(f"{who} has held the lock of 'key' since ")


@pytest.mark.parametrize("timeout", [None, FOR_EVER])
@pytest.mark.parametrize("kind", ["alone", "shared", "key", "key of a thread"])
def test_ctrl_c_ends_a_wait_and_leaves_nothing_locked(
    start: Start, path: Path, key_locks: KeyLocks, kind: str, timeout: float | None
) -> None:
    def key_of_a_thread() -> None:
        with key_locks.hold("other"):
            taken.set()
            time.sleep(FOR_EVER)

    taken = threading.Event()

    def work(me: Other) -> None:
        wanted: AbstractContextManager[None]
        if kind == "key of a thread":
            threading.Thread(target=key_of_a_thread, daemon=True).start()
            taken.wait()
            wanted = key_locks.hold("other", timeout=timeout, on_wait=me.say)
        elif kind == "key":
            wanted = key_locks.hold(["a", "key"], timeout=timeout, on_wait=me.say)
        else:
            wanted = lock(path, exclusive=kind == "alone", timeout=timeout, on_wait=me.say)
        try:
            with wanted:
                me.say("got it")
        except KeyboardInterrupt:
            me.say("interrupted")
            me.wait()  # the traceback is alive, and must hold nothing

    with lock(path, exclusive=True), key_locks.hold("key"):
        other = start(work)
        other.hear()
        other.send_signal(signal.SIGINT)
        assert other.hear() == "interrupted"
    assert not is_locked(path)
    with key_locks.hold(["a", "key"], timeout=0):
        pass


@pytest.mark.parametrize("how", ["released", "killed"])
def test_a_forked_child_neither_holds_nor_keeps_the_lock_of_another_thread(
    start: Start, path: Path, key_locks: KeyLocks, how: str
) -> None:
    def work(me: Other) -> None:
        taken, done = threading.Event(), threading.Event()

        def hold() -> None:
            with lock(path, exclusive=True, what="prune"), key_locks.hold("key"):
                taken.set()
                done.wait()
            me.say("released")

        threading.Thread(target=hold, daemon=True).start()
        taken.wait()
        signal.signal(signal.SIGINT, lambda *_: done.set())
        if os.fork() == 0:
            me.say("forked")
            me.wait()
            os._exit(0)
        while True:
            time.sleep(FOR_EVER)

    parent = start(work)
    assert parent.hear() == "forked"
    assert is_locked(path), "the child closed its copy, and the parent's lock stayed"
    assert key_locks.busy("key")
    if how == "released":
        parent.send_signal(signal.SIGINT)
        assert parent.hear() == "released"
    else:
        parent.kill()
    assert not is_locked(path), "the child lives and holds nothing"
    assert key_locks.busy("key") is None


def test_a_child_forked_inside_a_block_starts_with_nothing_and_takes_nothing_away(
    start: Start, path: Path, key_locks: KeyLocks, tmp_path: Path
) -> None:
    def work(me: Other) -> None:
        taken = claim(tmp_path / "claimed")
        assert taken is not None
        with lock(path, exclusive=True), key_locks.hold("key"):
            if (child := os.fork()) != 0:
                os.waitpid(child, 0)
                me.say("child gone")
                me.wait()
                os._exit(0)
            for ask in (lock(path, exclusive=True, timeout=0), key_locks.hold("key", timeout=0)):
                try:
                    with ask:
                        me.say("child got it")
                except LockTimeoutError as error:
                    me.say("refused:", error)
            try:
                me.say("child has", taken.fd)
            except StoreError as error:
                me.say(error)
            (tmp_path / "stranger").write_bytes(b"data")
            strangers = [os.open(tmp_path / "stranger", os.O_RDWR) for _ in range(20)]
        # The blocks it inherited are left now: neither locks nor strangers' descriptors go.
        taken.release()
        del taken
        assert {os.fstat(fd).st_size for fd in strangers} == {4}
        me.say("child left")

    parent = start(work)
    assert parent.hear().startswith(f"refused: Gave up after 0 s: process {parent.pid} has held")
    assert parent.hear().startswith("refused: Gave up after 0 s: the lock of 'key' is held by")
    assert parent.hear().endswith("is not claimed by this process any more")
    assert parent.hear() == "child left"
    assert parent.hear() == "child gone"
    assert is_locked(path)
    assert key_locks.busy("key")
    assert not is_free(tmp_path / "claimed")
    assert path.read_bytes() != b"", "the parent's note"


def test_no_moment_of_a_fork_lets_a_child_inherit_a_lock(
    start: Start, path: Path, key_locks: KeyLocks, tmp_path: Path, rounds: Callable[[int], int]
) -> None:
    number = rounds(40)

    def lock_all_the_time() -> None:
        while True:
            with lock(path, exclusive=False), key_locks.hold("key"):
                pass
            if (taken := claim(tmp_path / "claimed")) is not None:
                taken.release()

    def work(me: Other) -> None:
        threading.Thread(target=lock_all_the_time, daemon=True).start()
        for _ in range(number):
            if os.fork() == 0:
                me.say("forked")
                me.wait()
                os._exit(0)
        time.sleep(FOR_EVER)

    parent = start(work)
    for _ in range(number):
        assert parent.hear() == "forked"
    parent.kill()
    assert not is_locked(path)
    assert key_locks.busy("key") is None
    assert is_free(tmp_path / "claimed")


def test_a_program_that_was_started_keeps_no_lock(start: Start, path: Path) -> None:
    def work(me: Other) -> None:
        with lock(path, exclusive=True):
            nowhere = subprocess.DEVNULL
            words = {"stdin": me.waiting, "stdout": nowhere, "stderr": nowhere}
            subprocess.Popen(["cat"], close_fds=False, **words)  # type: ignore[call-overload]
            me.say("started")
            time.sleep(FOR_EVER)

    parent = start(work)
    parent.hear()
    parent.kill()
    assert not is_locked(path)


def run_together(others: list[Other]) -> list[str]:
    for other in others:
        assert other.hear() == "ready"
    for other in others:
        other.go()
    return [other.end() for other in others]


def test_eight_processes_count_under_one_key_and_lose_nothing(
    start: Start, tmp_path: Path, key_locks: KeyLocks, rounds: Callable[[int], int]
) -> None:
    """The lease file is removed at every release: two holders at once would lose an increment."""
    counter = tmp_path / "counter"
    counter.write_text("0")

    def count(me: Other) -> None:
        me.ready()
        for done in range(rounds(60)):
            with key_locks.hold("key"):
                value = int(counter.read_text())
                if done % 3 == 0:
                    time.sleep(0)
                counter.write_text(str(value + 1))
        me.say(rounds(60))

    counts = run_together([start(count) for _ in range(8)])
    assert int(counter.read_text()) == sum(map(int, counts))
    assert os.listdir(key_locks.directory) == []


def test_sixteen_threads_of_four_processes_are_never_two_at_once(
    start: Start, tmp_path: Path, key_locks: KeyLocks, rounds: Callable[[int], int]
) -> None:
    def crowd(me: Other) -> None:
        done = []

        def work() -> None:
            for _ in range(rounds(10)):
                with key_locks.hold("key"):
                    os.close(os.open(tmp_path / "busy", os.O_CREAT | os.O_EXCL))
                    os.unlink(tmp_path / "busy")
            done.append(1)

        threads = [threading.Thread(target=work) for _ in range(16)]
        me.ready()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        me.say(len(done))

    assert run_together([start(crowd) for _ in range(4)]) == ["16"] * 4


def test_two_processes_that_name_their_keys_crosswise_do_not_wait_for_each_other(
    start: Start, key_locks: KeyLocks, rounds: Callable[[int], int]
) -> None:
    def crossed(keys: list[str]) -> Callable[[Other], None]:
        def work(me: Other) -> None:
            me.ready()
            for _ in range(rounds(300)):
                with key_locks.hold(keys):
                    pass
            me.say("done")

        return work

    assert run_together([start(crossed(list(keys))) for keys in ("ab", "ba")]) == ["done"] * 2


def test_a_stream_of_sharers_does_not_keep_a_writer_out(start: Start, path: Path) -> None:
    """Without the queue this waits until the sharers end, which they do not."""

    def share_all_the_time(me: Other) -> None:
        me.say("ready")
        while True:
            with lock(path, exclusive=False):
                time.sleep(0.002)

    for other in [start(share_all_the_time) for _ in range(8)]:
        other.hear()
    for timeout in (None, 60) * 10:
        with lock(path, exclusive=True, timeout=timeout):
            pass


def test_cleaners_take_what_was_left_and_nothing_that_is_in_use(
    start: Start, tmp_path: Path, rounds: Callable[[int], int]
) -> None:
    folder = tmp_path / "tmp"
    folder.mkdir()

    def create(me: Other) -> None:
        me.ready()
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
        me.say(rounds(300))

    def clean(me: Other) -> None:
        me.ready()
        swept, is_over = 0, False
        while not is_over:
            is_over = len(list(tmp_path.glob("* is over"))) == 3  # then once more
            for name in os.listdir(folder):
                if is_free(folder / name) and (left := claim(folder / name)) is not None:
                    swept += os.fstat(left.fd).st_size > 0
                    left.release()
        me.say(swept)

    counts = run_together([start(work) for work in (create, create, create, clean, clean)])
    assert all(map(int, counts[:3]))
    assert sum(map(int, counts[3:]))


def test_what_killed_processes_claimed_is_free_and_what_the_living_claimed_is_not(
    start: Start, tmp_path: Path
) -> None:
    def hold(name: str) -> Callable[[Other], None]:
        def work(me: Other) -> None:
            mine = claim(tmp_path / name)
            assert mine is not None
            os.write(mine.fd, b"half")
            me.say("claimed")
            me.wait()

        return work

    dying, living = start(hold("dying")), start(hold("living"))
    for other in (dying, living):
        other.hear()
    assert not is_free(tmp_path / "dying")
    assert claim(tmp_path / "dying") is None
    dying.kill()
    assert is_free(tmp_path / "dying")
    assert (tmp_path / "dying").read_bytes() == b"half"
    left = claim(tmp_path / "dying")
    assert left is not None
    left.release()
    assert os.listdir(tmp_path) == ["living"]
    assert not is_free(tmp_path / "living")


def test_in_a_store_that_cannot_be_written_only_sharing_works(start: Start) -> None:
    user = NOBODY if os.geteuid() == 0 else None

    def work(me: Other) -> None:
        if user is not None:
            time.localtime()  # notes have times; later the zone cannot be read
            os.setgroups([])
            os.setuid(user)

        def attempt(act: Callable[[], AbstractContextManager[object]]) -> None:
            try:
                with act():
                    me.say("locked")
            except StoreUnwritableError as error:
                me.say("unwritable", vars(error)["path"], error)

        attempt(lambda: lock(store / "lock", exclusive=True))
        attempt(lambda: lock(store / "lock", exclusive=False))
        attempt(lambda: lock(store / "missing", exclusive=False))
        attempt(lambda: KeyLocks(store / "leases").hold("key"))
        attempt(lambda: KeyLocks(store / "missing").hold("key"))
        attempt(lambda: nullcontext(claim(store / "x")))

    with folder_of(user) as store:
        (store / "lock").touch()
        (store / "leases").mkdir()
        for entry in (store / "lock", store / "leases", store):
            if user is not None:
                os.chown(entry, user, user)
            entry.chmod(entry.stat().st_mode & 0o555)
        other = start(work)
        denied = f"unwritable {store}"
        assert other.hear().startswith(f"{denied}/lock Cannot lock {store}/lock: Permission")
        assert other.hear() == "locked"
        assert other.hear().startswith(f"{denied}/missing ")
        assert other.hear().startswith(f"{denied}/leases/")
        assert other.hear().startswith(f"{denied}/missing ")
        assert other.hear().startswith(f"{denied}/x ")
        store.chmod(0o755)
