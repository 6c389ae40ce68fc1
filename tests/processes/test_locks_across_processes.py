"""Locks and leases among real processes: killed, forked, interrupted, and all at once."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import smartcache
from tests.api import Leases, LeaseTimeoutError, claim, is_free, lock

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="flock, fork and SIGKILL")

PRELUDE = """
import os, signal, subprocess, sys, threading, time, warnings
from pathlib import Path
from smartcache.errors import LeaseTimeoutError, StoreError, StoreUnwritableError
from smartcache.store.leases import Leases
from smartcache.store.locks import claim, is_free, lock
warnings.simplefilter("ignore")  # Python 3.12 on fork in a process with threads
root = Path(sys.argv[1])
path = root / "lock"
leases = Leases(root / "leases")
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
def wait():
    os.read(0, 1)
"""


class Child(subprocess.Popen[str]):
    """A process that runs a script. We `hear` what it says; it waits until we let it `go`."""

    def __init__(self, script: str, *arguments: object) -> None:
        source = PRELUDE + textwrap.dedent(script)
        package = Path(smartcache.__file__).parents[1]
        super().__init__(
            [sys.executable, "-c", source, *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": str(package)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def hear(self) -> str:
        assert self.stdout is not None
        line = self.stdout.readline().strip()
        if not line:
            pytest.fail(f"The child ended: {self.communicate()[1]}")
        return line

    def go(self) -> None:
        assert self.stdin is not None
        self.stdin.close()
        self.stdin = None

    def end(self) -> list[str]:
        """Let it go on, and return what it said last."""
        output, errors = self.communicate()
        assert self.returncode == 0, errors
        return output.split()

    def kill_now(self) -> None:
        self.kill()
        self.wait(30)


Start = Callable[..., Child]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    children: list[Child] = []

    def begin(script: str, *arguments: object) -> Child:
        children.append(Child(script, tmp_path, *arguments))
        return children[-1]

    yield begin
    for child in children:
        child.kill()
        child.communicate()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lock"


@pytest.fixture
def leases(tmp_path: Path) -> Leases:
    return Leases(tmp_path / "leases")


def is_locked(path: Path) -> bool:
    try:
        with lock(path, exclusive=True, timeout=0):
            return False
    except LeaseTimeoutError:
        return True


HOLD_LOCK = """
with lock(path, exclusive=sys.argv[2] == "True", what="prune"):
    say("held")
    wait()
"""
HOLD_LEASE = """
with leases.hold("key", what="download"):
    say("held")
    wait()
"""


@pytest.mark.parametrize("exclusive", [True, False])
def test_the_lock_of_a_killed_process_is_free_at_once(
    start: Start, path: Path, exclusive: bool
) -> None:
    child = start(HOLD_LOCK, exclusive)
    child.hear()
    assert is_locked(path)
    child.kill_now()
    with lock(path, exclusive=False, timeout=0):
        assert path.read_bytes() == b"", "its note is gone too"
    assert not is_locked(path)


def test_the_lease_of_a_killed_process_is_free_at_once(start: Start, leases: Leases) -> None:
    child = start(HOLD_LEASE)
    child.hear()
    child.kill_now()
    assert os.listdir(leases.directory), "the file is still there, with the note of the dead"
    assert leases.busy("key") is None
    with leases.hold("key", timeout=0):
        assert str(leases.busy("key")).startswith("this process, since ")
    assert os.listdir(leases.directory) == []


@pytest.mark.parametrize("exclusive", [True, False])
@pytest.mark.parametrize("timeout", [None, 3600])
def test_who_waits_for_another_process_hears_which(
    start: Start, path: Path, exclusive: bool, timeout: float | None
) -> None:
    heard: list[str] = []
    child = start(HOLD_LOCK, True)
    child.hear()
    with pytest.raises(LeaseTimeoutError) as caught, lock(path, exclusive=exclusive, timeout=0):
        pass
    assert vars(caught.value)["holder"].startswith(f"process {child.pid} (prune), since ")

    def hear(sentence: str) -> None:
        heard.append(sentence)
        child.go()

    with lock(path, exclusive=exclusive, timeout=timeout, on_wait=hear):
        pass
    (sentence,) = heard
    expected = rf"process {child.pid} \(prune\) has held the store since \d\d:\d\d"
    assert re.fullmatch(expected, sentence)


@pytest.mark.parametrize("timeout", [None, 3600])
def test_who_waits_for_a_lease_of_another_process_hears_which(
    start: Start, leases: Leases, timeout: float | None
) -> None:
    heard: list[str] = []
    child = start(HOLD_LEASE)
    child.hear()
    with pytest.raises(LeaseTimeoutError) as caught, leases.hold("key", timeout=0):
        pass
    who = f"process {child.pid} (download)"
    assert vars(caught.value)["key"] == "key"
    assert vars(caught.value)["holder"] == leases.busy("key")
    assert str(leases.busy("key")).startswith(f"{who}, since ")

    def hear(sentence: str) -> None:
        heard.append(sentence)
        child.go()

    with leases.hold("key", timeout=timeout, on_wait=hear):
        pass
    (sentence,) = heard
    assert sentence.startswith(f"{who} has held the lease on 'key' since ")


INTERRUPTED = """
signal.signal(signal.SIGINT, signal.default_int_handler)
kind, timeout = sys.argv[2], None if sys.argv[3] == "None" else float(sys.argv[3])
def threads_lease():
    taken = threading.Event()
    def hold():
        with leases.hold("other"):
            taken.set()
            time.sleep(3600)
    threading.Thread(target=hold, daemon=True).start()
    taken.wait()
    return leases.hold("other", timeout=timeout, on_wait=say)
wanted = {
    "alone": lambda: lock(path, exclusive=True, timeout=timeout, on_wait=say),
    "shared": lambda: lock(path, exclusive=False, timeout=timeout, on_wait=say),
    "lease": lambda: leases.hold(["a", "key"], timeout=timeout, on_wait=say),
    "lease of a thread": threads_lease,
}[kind]()
try:
    with wanted:
        say("got it")
except KeyboardInterrupt as error:
    say("interrupted")
    wait()  # the traceback is alive, and must hold nothing
"""


@pytest.mark.parametrize("timeout", [None, 3600])
@pytest.mark.parametrize("kind", ["alone", "shared", "lease", "lease of a thread"])
def test_ctrl_c_ends_a_wait_and_leaves_nothing_locked(
    start: Start, path: Path, leases: Leases, kind: str, timeout: float | None
) -> None:
    with lock(path, exclusive=True), leases.hold("key"):
        child = start(INTERRUPTED, kind, timeout)
        child.hear()
        child.send_signal(signal.SIGINT)
        assert child.hear() == "interrupted"
    assert not is_locked(path)
    with leases.hold(["a", "key"], timeout=0):
        pass


FORK_BESIDE_A_HOLDER = """
taken, done = threading.Event(), threading.Event()
def hold():
    with lock(path, exclusive=True, what="prune"), leases.hold("key"):
        taken.set()
        done.wait()
    say("released")
holder = threading.Thread(target=hold, daemon=True)
holder.start()
taken.wait()
signal.signal(signal.SIGINT, lambda *_: done.set())
if os.fork() == 0:
    say("forked")
    wait()
    os._exit(0)
while True:
    time.sleep(3600)
"""


@pytest.mark.parametrize("how", ["released", "killed"])
def test_a_forked_child_neither_holds_nor_keeps_the_lock_of_another_thread(
    start: Start, path: Path, leases: Leases, how: str
) -> None:
    parent = start(FORK_BESIDE_A_HOLDER)
    assert parent.hear() == "forked"
    assert is_locked(path), "the child closed its copy, and the parent's lock stayed"
    assert leases.busy("key")
    if how == "released":
        parent.send_signal(signal.SIGINT)
        assert parent.hear() == "released"
    else:
        parent.kill_now()
    assert not is_locked(path), "the child lives and holds nothing"
    assert leases.busy("key") is None


FORK_INSIDE = """
taken = claim(root / "claimed")
with lock(path, exclusive=True), leases.hold("key"):
    if (child := os.fork()) != 0:
        os.waitpid(child, 0)
        say("child gone")
        wait()
        os._exit(0)
    for ask in (lock(path, exclusive=True, timeout=0), leases.hold("key", timeout=0)):
        try:
            with ask:
                say("child got it")
        except LeaseTimeoutError as error:
            say("refused:", error)
    try:
        taken.fd
    except StoreError as error:
        say(error)
    (root / "stranger").write_bytes(b"data")
    strangers = [os.open(root / "stranger", os.O_RDWR) for _ in range(20)]
# The blocks it inherited are left now: neither locks nor strangers' descriptors are touched.
taken.release()
del taken
for fd in strangers:
    assert os.fstat(fd).st_size == 4
say("child left")
"""


def test_a_child_forked_inside_a_block_starts_with_nothing_and_takes_nothing_away(
    start: Start, path: Path, leases: Leases, tmp_path: Path
) -> None:
    parent = start(FORK_INSIDE)
    assert parent.hear().startswith(f"refused: Gave up after 0 s: process {parent.pid} has held")
    assert parent.hear().startswith("refused: Gave up after 0 s: the lease on 'key' is held by")
    assert parent.hear().endswith("is not claimed by this process any more")
    assert parent.hear() == "child left"
    assert parent.hear() == "child gone"
    assert is_locked(path)
    assert leases.busy("key")
    assert not is_free(tmp_path / "claimed")
    assert path.read_bytes() != b"", "the parent's note"


FORK_STORM = """
def work():
    while True:
        with lock(path, exclusive=False), leases.hold("key"):
            pass
        claim(root / "claimed").release()
threading.Thread(target=work, daemon=True).start()
for number in range(int(sys.argv[2])):
    if os.fork() == 0:
        say("forked")
        wait()
        os._exit(0)
time.sleep(3600)
"""


def test_no_moment_of_a_fork_lets_a_child_inherit_a_lock(
    start: Start, path: Path, leases: Leases, tmp_path: Path, rounds: Callable[[int], int]
) -> None:
    number = rounds(40)
    parent = start(FORK_STORM, number)
    for _ in range(number):
        assert parent.hear() == "forked"
    parent.kill_now()
    assert not is_locked(path)
    assert leases.busy("key") is None
    assert is_free(tmp_path / "claimed")


def test_a_program_that_was_started_keeps_no_lock(start: Start, path: Path) -> None:
    parent = start("""
        with lock(path, exclusive=True):
            nowhere = subprocess.DEVNULL
            subprocess.Popen(["cat"], close_fds=False, stdout=nowhere, stderr=nowhere)
            say("started")
            wait()
    """)
    parent.hear()
    parent.kill_now()
    assert not is_locked(path)


COUNT = """
counter = root / "counter"
say("ready")
wait()
done = 0
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    with leases.hold("key"):
        value = int(counter.read_text())
        if done % 3 == 0:
            time.sleep(0)
        counter.write_text(str(value + 1))
    done += 1
say(done)
"""


def run_together(children: list[Child]) -> list[list[str]]:
    for child in children:
        assert child.hear() == "ready"
    for child in children:
        child.go()
    return [child.end() for child in children]


def test_eight_processes_count_under_one_lease_and_lose_nothing(
    start: Start, tmp_path: Path, leases: Leases, seconds: Callable[[float], float]
) -> None:
    """The lease file is removed at every release: two holders at once would lose an increment."""
    (tmp_path / "counter").write_text("0")
    counts = run_together([start(COUNT, seconds(1.5)) for _ in range(8)])
    assert int((tmp_path / "counter").read_text()) == sum(int(count) for (count,) in counts)
    assert os.listdir(leases.directory) == []


CROWD = """
busy = root / "busy"
def work():
    for _ in range(int(sys.argv[2])):
        with leases.hold("key"):
            os.close(os.open(busy, os.O_CREAT | os.O_EXCL))
            os.unlink(busy)
    done.append(1)
done = []
threads = [threading.Thread(target=work) for _ in range(16)]
say("ready")
wait()
for thread in threads: thread.start()
for thread in threads: thread.join()
say(len(done))
"""


def test_sixteen_threads_of_four_processes_are_never_two_at_once(
    start: Start, rounds: Callable[[int], int]
) -> None:
    children = [start(CROWD, rounds(10)) for _ in range(4)]
    assert run_together(children) == [["16"]] * 4


CROSSED = """
say("ready")
wait()
for _ in range(int(sys.argv[2])):
    with leases.hold(list(sys.argv[3])):
        pass
say("done")
"""


def test_two_processes_that_name_their_keys_crosswise_do_not_wait_for_each_other(
    start: Start, rounds: Callable[[int], int]
) -> None:
    number = rounds(300)
    children = [start(CROSSED, number, keys) for keys in ("ab", "ba")]
    assert run_together(children) == [["done"]] * 2


SHARE_ALL_THE_TIME = """
say("ready")
while True:
    with lock(path, exclusive=False):
        time.sleep(0.002)
"""


def test_a_stream_of_sharers_does_not_keep_a_writer_out(start: Start, path: Path) -> None:
    """Without the queue this waits until the sharers end, which they do not."""
    for child in [start(SHARE_ALL_THE_TIME) for _ in range(8)]:
        child.hear()
    for timeout in (None, 60) * 10:
        with lock(path, exclusive=True, timeout=timeout):
            pass


CREATE = """
tmp = root / "tmp"
say("ready")
wait()
end = time.monotonic() + float(sys.argv[2])
number = 0
while time.monotonic() < end:
    mine = claim(tmp / f"{os.getpid()}-{number}")
    os.write(mine.fd, b"data")
    assert os.path.samestat(os.fstat(mine.fd), os.stat(mine.path)), "swept away"
    if number % 3 == 0:
        time.sleep(0)
    assert mine.path.read_bytes() == b"data"
    mine.release(remove=number % 2 == 0)
    number += 1
say(number)
"""
CLEAN = """
tmp = root / "tmp"
say("ready")
wait()
end = time.monotonic() + float(sys.argv[2])
swept = 0
while time.monotonic() < end:
    for name in os.listdir(tmp):
        if is_free(tmp / name) and (left := claim(tmp / name)) is not None:
            swept += os.fstat(left.fd).st_size > 0
            left.release()
say(swept)
"""


def test_cleaners_take_what_was_left_and_nothing_that_is_in_use(
    start: Start, tmp_path: Path, seconds: Callable[[float], float]
) -> None:
    (tmp_path / "tmp").mkdir()
    scripts = [CREATE, CREATE, CREATE, CLEAN, CLEAN]
    counts = run_together([start(script, seconds(1)) for script in scripts])
    created, swept = counts[:3], counts[3:]
    assert all(int(count) for (count,) in created)
    assert sum(int(count) for (count,) in swept)


def test_what_killed_processes_claimed_is_free_and_what_the_living_claimed_is_not(
    start: Start, tmp_path: Path
) -> None:
    hold = """
        mine = claim(root / sys.argv[2])
        os.write(mine.fd, b"half")
        say("claimed")
        wait()
    """
    dying, living = start(hold, "dying"), start(hold, "living")
    for child in (dying, living):
        child.hear()
    assert not is_free(tmp_path / "dying")
    assert claim(tmp_path / "dying") is None
    dying.kill_now()
    assert is_free(tmp_path / "dying")
    assert (tmp_path / "dying").read_bytes() == b"half"
    left = claim(tmp_path / "dying")
    assert left is not None
    left.release()
    assert os.listdir(tmp_path) == ["living"]
    assert not is_free(tmp_path / "living")


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory another user can reach: pytest's own are private."""
    directory = Path(tempfile.mkdtemp(prefix="smartcache-test-"))
    directory.chmod(0o755)
    yield directory
    directory.chmod(0o755)
    shutil.rmtree(directory)


UNWRITABLE = """
if os.geteuid() == 0:
    os.setgroups([])
    os.setuid(65534)
    time.tzset()
store = Path(sys.argv[2])
def attempt(wanted):
    try:
        with wanted:
            say("locked")
    except StoreUnwritableError as error:
        say("unwritable", error.path, error)
attempt(lock(store / "lock", exclusive=True))
attempt(lock(store / "lock", exclusive=False))
attempt(lock(store / "missing", exclusive=False))
attempt(Leases(store / "leases").hold("key"))
attempt(Leases(store / "missing").hold("key"))
try:
    claim(store / "x")
except StoreUnwritableError as error:
    say("unwritable", error.path, error)
"""


def test_in_a_store_that_cannot_be_written_only_sharing_works(
    start: Start, open_directory: Path
) -> None:
    (open_directory / "lock").touch()
    (open_directory / "leases").mkdir()
    if os.geteuid() == 0:
        for entry in (open_directory / "lock", open_directory / "leases", open_directory):
            os.chown(entry, 65534, 65534)
    for entry in (open_directory / "lock", open_directory / "leases", open_directory):
        entry.chmod(entry.stat().st_mode & 0o555)
    child = start(UNWRITABLE, open_directory)
    denied = f"unwritable {open_directory}"
    assert child.hear().startswith(f"{denied}/lock Cannot lock {open_directory}/lock: Permission")
    assert child.hear() == "locked"
    assert child.hear().startswith(f"{denied}/missing ")
    assert child.hear().startswith(f"{denied}/leases/")
    assert child.hear().startswith(f"{denied}/missing ")
    assert child.hear().startswith(f"{denied}/x ")
