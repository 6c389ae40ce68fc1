from __future__ import annotations

import errno
import json
import logging
import os
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import pytest

from tests.api import LeaseTimeoutError, StoreError, claim, is_free, lock
from tests.api import store_faults as faults

T = TypeVar("T")
GUARD = 60.0
"""Seconds after which a defect becomes a failure instead of a hang."""
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="flock")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lock"


def elsewhere(ask: Callable[[], T]) -> T:
    """Run in another thread: a thread's own locks are treated differently."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(ask).result()


def can_lock(path: Path, *, exclusive: bool) -> bool:
    def ask() -> bool:
        try:
            with lock(path, exclusive=exclusive, timeout=0):
                return True
        except LeaseTimeoutError:
            return False

    return elsewhere(ask)


@contextmanager
def held_by_another_thread(
    path: Path, *, exclusive: bool, what: str = ""
) -> Iterator[threading.Event]:
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock(path, exclusive=exclusive, what=what, timeout=GUARD):
            taken.set()
            done.wait()

    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(hold)
        try:
            assert taken.wait(30)
            yield done
        finally:
            done.set()
            holding.result()


def asked_in_vain(
    path: Path, *, exclusive: bool = True, timeout: float = 0.02
) -> LeaseTimeoutError:
    with (
        pytest.raises(LeaseTimeoutError) as caught,
        lock(path, exclusive=exclusive, timeout=timeout),
    ):
        pass
    return caught.value


@pytest.mark.parametrize(
    ("held", "asked", "may"),
    [
        ("shared", "shared", True),
        ("shared", "alone", False),
        ("alone", "shared", False),
        ("alone", "alone", False),
    ],
)
def test_sharers_come_together_and_a_writer_is_alone(
    path: Path, held: str, asked: str, may: bool
) -> None:
    with lock(path, exclusive=held == "alone"):
        assert can_lock(path, exclusive=asked == "alone") is may
    assert can_lock(path, exclusive=asked == "alone")


def test_a_lock_is_given_back_when_the_block_raises(path: Path) -> None:
    with pytest.raises(ZeroDivisionError), lock(path, exclusive=True):
        raise ZeroDivisionError
    assert can_lock(path, exclusive=True)


def test_a_thread_may_share_what_it_shares_until_it_leaves_the_last_block(path: Path) -> None:
    inner = lock(path, exclusive=False)
    with lock(path, exclusive=False):
        inner.__enter__()
    assert not can_lock(path, exclusive=True)
    inner.__exit__(None, None, None)
    assert can_lock(path, exclusive=True)


def test_a_thread_may_share_again_while_a_writer_waits(path: Path) -> None:
    """Sent to the queue behind the writer it would wait for itself."""
    waiting = threading.Event()

    def write() -> None:
        with lock(path, exclusive=True, on_wait=lambda _: waiting.set()):
            pass

    with ThreadPoolExecutor(1) as pool:
        with lock(path, exclusive=False):
            writing = pool.submit(write)
            assert waiting.wait(30)
            with lock(path, exclusive=False, timeout=30):
                pass
        writing.result(30)


@pytest.mark.parametrize(("held", "asked"), [(True, True), (True, False), (False, True)])
def test_a_thread_that_would_wait_for_itself_is_told(path: Path, held: bool, asked: bool) -> None:
    with (
        lock(path, exclusive=held),
        pytest.raises(StoreError, match="would wait for itself"),
        lock(path, exclusive=asked),
    ):
        pass
    assert can_lock(path, exclusive=True)


def test_sharers_queue_behind_a_waiting_writer(path: Path) -> None:
    waiting = threading.Event()

    def write() -> None:
        with lock(path, exclusive=True, what="prune", on_wait=lambda _: waiting.set()):
            pass

    with ThreadPoolExecutor(1) as pool:
        with lock(path, exclusive=False):
            writing = pool.submit(write)
            assert waiting.wait(30)
            error = elsewhere(lambda: asked_in_vain(path, exclusive=False))
            assert "this process (prune) has waited for the store since" in str(error)
        writing.result(30)


def test_a_writer_that_gave_up_holds_nobody_back(path: Path) -> None:
    with held_by_another_thread(path, exclusive=False):
        error = asked_in_vain(path)
        assert can_lock(path, exclusive=False)
        assert path.read_bytes() == b""
    assert can_lock(path, exclusive=True)
    assert error.__traceback__ is not None, "kept alive, and with it the frames that had the locks"


def test_the_holder_leaves_word_and_takes_it_back(path: Path) -> None:
    with lock(path, exclusive=True, what="prune"):
        note = json.loads(path.read_text())
        assert (note["pid"], note["what"]) == (os.getpid(), "prune")
        assert datetime.fromisoformat(note["since"]).tzinfo is not None
    assert path.read_bytes() == b""


@pytest.mark.parametrize("timeout", [None, 60])
def test_who_waits_hears_once_what_for(path: Path, timeout: float | None) -> None:
    heard: list[str] = []
    told = threading.Event()

    def hear(sentence: str) -> None:
        heard.append(sentence)
        told.set()

    def ask() -> None:
        with lock(path, exclusive=False, timeout=timeout, on_wait=hear):
            pass

    with ThreadPoolExecutor(1) as pool:
        with lock(path, exclusive=True, what="prune"):
            asking = pool.submit(ask)
            assert told.wait(30)
        asking.result(30)
    assert len(heard) == 1
    assert re.fullmatch(r"this process \(prune\) has held the store since \d\d:\d\d", heard[0])


def test_nobody_hears_of_a_lock_that_was_free(path: Path) -> None:
    heard: list[str] = []
    for exclusive in (True, False):
        with lock(path, exclusive=exclusive, on_wait=heard.append):
            pass
    assert heard == []


def test_without_a_listener_the_wait_is_logged(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Release(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "(prune)" in record.getMessage():
                done.set()

    caplog.set_level(logging.INFO)
    logger = logging.getLogger("smartcache")
    with held_by_another_thread(path, exclusive=True, what="prune") as done:
        logger.addHandler(release := Release())
        try:
            with lock(path, exclusive=True):
                pass
        finally:
            logger.removeHandler(release)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "(prune) has held the store" in caplog.text


def test_the_sentence_names_what_is_locked(path: Path) -> None:
    with (
        held_by_another_thread(path, exclusive=False),
        pytest.raises(LeaseTimeoutError, match="another process is using the set x"),
        lock(path, exclusive=True, timeout=0, name="the set x"),
    ):
        pass


def test_the_timeout_error_says_who_and_survives_pickling(path: Path) -> None:
    with held_by_another_thread(path, exclusive=True, what="prune"):
        error = asked_in_vain(path)
    again = pickle.loads(pickle.dumps(error))  # noqa: S301
    for each in (error, again):
        assert isinstance(each, TimeoutError)
        assert vars(each)["key"] == str(path)
        assert vars(each)["holder"].startswith("this process (prune), since ")
        assert str(each).startswith("Gave up after 0.02 s: this process (prune) has held the store")


def note_of(pid: int, what: str = "prune", since: datetime | None = None) -> bytes:
    at = (since or datetime.now(UTC)).isoformat()
    return json.dumps({"pid": pid, "what": what, "since": at}).encode() + b"\n"


def dead_process() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_a_note_left_behind_names_nobody(path: Path) -> None:
    """Sharers leave no word, so what a writer finds in the file was left by one that is gone."""
    with held_by_another_thread(path, exclusive=False):
        path.write_bytes(note_of(os.getpid()))
        assert vars(asked_in_vain(path))["holder"] == "another process"


def test_the_note_of_a_dead_process_is_not_believed(path: Path) -> None:
    with held_by_another_thread(path, exclusive=True):
        path.write_bytes(note_of(dead_process()))
        assert vars(asked_in_vain(path))["holder"] == "another process"


def test_a_sharer_wipes_the_note_that_a_killed_writer_left(path: Path) -> None:
    with lock(path, exclusive=True):
        pass
    path.write_bytes(note_of(dead_process()))
    with lock(path, exclusive=False, timeout=30):
        assert path.read_bytes() == b""


GARBAGE = [
    b"\0\xff\xfe",
    b"[" * 5000,
    b"9" * 5000,
    b'{"pid": "x"}',
    b'{"pid": 1e999, "what": 1, "since": 2}',
    b'{"pid": 1, "what": "", "since": "0001-01-01T00:00:00+14:00"}',
    b'{"pid": 99999999999999999999, "what": "", "since": "2026-01-01T00:00:00+00:00"}',
    b'{"pid": -1, "what": "", "since": "2026-01-01T00:00:00+00:00"}',
    b"null",
    b"x" * 1_000_000,
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=lambda text: repr(text[:12]))
def test_nonsense_in_the_file_neither_blocks_nor_misleads(path: Path, garbage: bytes) -> None:
    path.write_bytes(garbage)
    assert can_lock(path, exclusive=False)
    assert can_lock(path, exclusive=True)
    with held_by_another_thread(path, exclusive=True):
        path.write_bytes(garbage)
        assert vars(asked_in_vain(path))["holder"] == "another process"


def test_an_old_note_is_dated_and_shows_no_control_characters(path: Path) -> None:
    since = datetime(2024, 2, 3, 12, tzinfo=UTC)
    with held_by_another_thread(path, exclusive=True):
        path.write_bytes(note_of(os.getpid(), "a\x1b[31m\nb", since))
        holder = vars(asked_in_vain(path))["holder"]
    local = since.astimezone()
    assert holder == f"this process (a[31mb), since {local:%Y-%m-%d %H:%M}"


def test_without_its_queue_a_lock_still_locks(path: Path) -> None:
    """Somebody tidied up: only fairness is lost."""
    with held_by_another_thread(path, exclusive=True):
        path.with_name("lock.turn").unlink()
        assert not can_lock(path, exclusive=False)
        assert not can_lock(path, exclusive=True)
    assert can_lock(path, exclusive=False)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    for exclusive in (True, False):
        with (
            pytest.raises(StoreError, match=r"gone.lock: No such file"),
            lock(tmp_path / "gone" / "lock", exclusive=exclusive),
        ):
            pass


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o777])
def test_lock_files_are_for_their_user_only(tmp_path: Path, mask: int) -> None:
    previous = os.umask(mask)
    try:
        with lock(tmp_path / "lock", exclusive=True):
            pass
    finally:
        os.umask(previous)
    assert {entry.stat().st_mode & 0o777 for entry in tmp_path.iterdir()} == {0o600}


@pytest.mark.parametrize("exclusive", [True, False])
def test_a_filesystem_without_locks_is_named(
    path: Path, monkeypatch: pytest.MonkeyPatch, exclusive: bool
) -> None:
    import fcntl

    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (
        pytest.raises(StoreError, match=r"The \w+ filesystem of .*lock.* does not lock") as caught,
        lock(path, exclusive=exclusive),
    ):
        pass
    assert "SMARTCACHE_HOME" in caught.value.hint


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_nothing_stays_open(path: Path) -> None:
    before = open_files()
    for exclusive in (True, False):
        with held_by_another_thread(path, exclusive=True):
            asked_in_vain(path, exclusive=exclusive)
        with held_by_another_thread(path, exclusive=False):
            asked_in_vain(path)
    taken = claim(path)
    assert taken is not None
    assert claim(path) is None
    assert not is_free(path)
    taken.release()
    assert open_files() == before


def test_a_claim_is_had_once_and_removes_its_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    assert is_free(path), "nobody holds what is not there"
    first = claim(path)
    assert first is not None
    assert claim(path) is None
    assert not is_free(path)
    first.release()
    assert not path.exists()
    first.release()


def test_a_claimed_file_is_private_and_can_be_written_and_kept(tmp_path: Path) -> None:
    taken = claim(tmp_path / "x")
    assert taken is not None
    os.write(taken.fd, b"data")
    assert taken.path.stat().st_mode & 0o777 == 0o600
    taken.release(remove=False)
    assert (tmp_path / "x").read_bytes() == b"data"
    assert is_free(tmp_path / "x")


def test_a_claim_of_a_leftover_keeps_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"left")
    taken = claim(tmp_path / "x")
    assert taken is not None
    assert os.read(taken.fd, 10) == b"left"
    taken.release()


def test_a_released_claim_has_no_descriptor(tmp_path: Path) -> None:
    taken = claim(tmp_path / "x")
    assert taken is not None
    taken.release()
    with pytest.raises(StoreError, match="not claimed"):
        _ = taken.fd


def test_a_claim_does_not_remove_a_file_that_took_its_name(tmp_path: Path) -> None:
    path = tmp_path / "x"
    taken = claim(path)
    assert taken is not None
    path.rename(tmp_path / "final")
    path.write_bytes(b"another")
    taken.release()
    assert path.read_bytes() == b"another"
    assert (tmp_path / "final").exists()


def lock_for_a_moment(path: Path, *, exclusive: bool, remove: bool = False) -> None:
    """Do as an `is_free` or a cleaner does, only longer; return while the file is locked."""
    import fcntl

    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)

    def end() -> None:
        if remove:
            path.unlink()
        os.close(fd)

    threading.Timer(0.02, end).start()


def test_a_claim_is_not_refused_because_somebody_looks(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.touch()
    lock_for_a_moment(path, exclusive=False)
    taken = claim(path)
    assert taken is not None
    taken.release()


@pytest.mark.parametrize("sweeps", [1, 2])
def test_who_makes_a_file_gets_it_though_cleaners_find_it_unlocked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sweeps: int
) -> None:
    """The second cleaner makes it anew itself: it saw the name before the first removed it."""
    path = tmp_path / "x"
    moments = 0

    def sweep(point: str) -> None:
        nonlocal moments
        moments += 1
        if moments == 1:
            if sweeps == 2:
                path.unlink()
            lock_for_a_moment(path, exclusive=True, remove=True)

    monkeypatch.setattr(faults, "hook", sweep)
    taken = claim(path)
    assert taken is not None
    assert moments > 1
    assert os.path.samestat(os.fstat(taken.fd), path.stat())
    taken.release()


def test_a_dangling_link_is_no_lock_file(tmp_path: Path) -> None:
    (tmp_path / "x").symlink_to(tmp_path / "nowhere")
    with pytest.raises(StoreError, match="not a regular file"):
        claim(tmp_path / "x")
