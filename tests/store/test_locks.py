"""Locks shared and alone, claims of files, locks of keys: who has them, who waits, who dies."""

from __future__ import annotations

import errno
import json
import logging
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import pytest

from smartcache.errors import LockTimeoutError, StoreError
from smartcache.system import faults
from smartcache.system.locks import KeyLocks, claim, is_free, lock
from tests.store.files import raising, row

T = TypeVar("T")
GUARD = 60.0
"""Seconds after which a defect becomes a failure instead of a hang."""
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="flock")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lock"


@pytest.fixture
def key_locks(tmp_path: Path) -> KeyLocks:
    return KeyLocks(tmp_path / "store" / "leases")


def elsewhere(ask: Callable[[], T]) -> T:
    """Run in another thread: a thread's own locks are treated differently."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(ask).result()


def can_lock(path: Path, *, exclusive: bool) -> bool:
    def ask() -> bool:
        try:
            with lock(path, exclusive=exclusive, timeout=0):
                return True
        except LockTimeoutError:
            return False

    return elsewhere(ask)


@contextmanager
def in_another_thread(block: AbstractContextManager[object]) -> Iterator[threading.Event]:
    """Have a block entered by another thread, which leaves it when the event is set."""
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with block:
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


def held(path: Path, *, exclusive: bool, what: str = "") -> AbstractContextManager[threading.Event]:
    return in_another_thread(lock(path, exclusive=exclusive, what=what, timeout=GUARD))


def in_vain(block: AbstractContextManager[object]) -> LockTimeoutError:
    with pytest.raises(LockTimeoutError) as caught, block:
        pass
    return caught.value


def refused(path: Path, *, exclusive: bool = True) -> LockTimeoutError:
    return in_vain(lock(path, exclusive=exclusive, timeout=0.02))


def heard_while_waiting(
    taken: AbstractContextManager[object],
    asked: Callable[[Callable[[str], None]], AbstractContextManager[object]],
) -> str:
    """What is said, once, to who waits for what another thread has."""
    heard: list[str] = []
    told = threading.Event()

    def hear(sentence: str) -> None:
        heard.append(sentence)
        told.set()

    def ask() -> None:
        with asked(hear):
            pass

    with ThreadPoolExecutor(1) as pool:
        with taken:
            asking = pool.submit(ask)
            assert told.wait(30)
        asking.result(30)
    assert len(heard) == 1
    return heard[0]


class TestLock:
    def test_sharers_come_together_and_a_writer_is_alone(self, path: Path) -> None:
        rows = [(False, False, True), (False, True, False), (True, False, False),
                (True, True, False)]  # fmt: skip
        for taken, asked, may in rows:
            with row(taken, asked):
                with lock(path, exclusive=taken):
                    assert can_lock(path, exclusive=asked) is may
                assert can_lock(path, exclusive=asked)

    def test_a_lock_is_given_back_when_the_block_raises(self, path: Path) -> None:
        with pytest.raises(ZeroDivisionError), lock(path, exclusive=True):
            raise ZeroDivisionError
        assert can_lock(path, exclusive=True)

    def test_a_thread_may_share_what_it_shares_until_it_leaves_the_last_block(
        self, path: Path
    ) -> None:
        inner = lock(path, exclusive=False)
        with lock(path, exclusive=False):
            inner.__enter__()
        assert not can_lock(path, exclusive=True)
        inner.__exit__(None, None, None)
        assert can_lock(path, exclusive=True)

    def test_sharers_queue_behind_a_waiting_writer_unless_they_share_already(
        self, path: Path
    ) -> None:
        """A thread sent to the queue behind the writer would wait for itself."""
        waiting = threading.Event()

        def write() -> None:
            with lock(path, exclusive=True, what="prune", on_wait=lambda _: waiting.set()):
                pass

        with ThreadPoolExecutor(1) as pool:
            with lock(path, exclusive=False):
                writing = pool.submit(write)
                assert waiting.wait(30)
                with lock(path, exclusive=False, timeout=30):
                    pass
                error = elsewhere(lambda: refused(path, exclusive=False))
                assert "this process (prune) has waited for the store since" in str(error)
            writing.result(30)

    def test_a_thread_that_would_wait_for_itself_is_told(self, path: Path) -> None:
        for taken, asked in ((True, True), (True, False), (False, True)):
            with (
                row(taken, asked),
                lock(path, exclusive=taken),
                pytest.raises(StoreError, match="would wait for itself"),
                lock(path, exclusive=asked),
            ):
                pass
            assert can_lock(path, exclusive=True)

    def test_a_writer_that_gave_up_holds_nobody_back(self, path: Path) -> None:
        with held(path, exclusive=False):
            error = refused(path)
            assert can_lock(path, exclusive=False)
            assert path.read_bytes() == b""
        assert can_lock(path, exclusive=True)
        assert error.__traceback__ is not None, "kept alive, with the frames that had the locks"

    def test_without_its_queue_a_lock_still_locks(self, path: Path) -> None:
        """Somebody tidied up: only fairness is lost."""
        with held(path, exclusive=True):
            path.with_name("lock.turn").unlink()
            for exclusive in (False, True):
                assert not can_lock(path, exclusive=exclusive)
        assert can_lock(path, exclusive=False)

    def test_a_missing_directory_and_a_filesystem_without_locks_are_named(
        self, tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import fcntl

        with pytest.raises(StoreError, match=r"gone.lock: No such file"):
            can_lock(tmp_path / "gone" / "lock", exclusive=True)
        monkeypatch.setattr(fcntl, "flock", raising(errno.ENOLCK))
        for exclusive in (True, False):
            pattern = r"The \w+ filesystem of .*lock.* does not lock"
            with row(exclusive), pytest.raises(StoreError, match=pattern) as caught:
                can_lock(path, exclusive=exclusive)
            assert "SMARTCACHE_HOME" in caught.value.hint

    def test_lock_files_are_for_their_user_only(self, tmp_path: Path) -> None:
        for mask in (0o000, 0o022, 0o777):
            previous = os.umask(mask)
            try:
                with lock(tmp_path / oct(mask), exclusive=True):
                    pass
            finally:
                os.umask(previous)
        assert {entry.stat().st_mode & 0o777 for entry in tmp_path.iterdir()} == {0o600}

    @pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
    def test_nothing_stays_open(self, path: Path) -> None:
        before = len(os.listdir("/proc/self/fd"))
        for exclusive in (True, False):
            with held(path, exclusive=True):
                refused(path, exclusive=exclusive)
        with held(path, exclusive=False):
            refused(path)
        taken = claim(path)
        assert taken is not None
        assert claim(path) is None
        assert not is_free(path)
        taken.release()
        assert len(os.listdir("/proc/self/fd")) == before


def note_of(pid: int, what: str = "prune", since: datetime | None = None) -> bytes:
    at = (since or datetime.now(UTC)).isoformat()
    return json.dumps({"pid": pid, "what": what, "since": at}).encode() + b"\n"


def dead_process() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


class TestNote:
    def test_the_holder_leaves_word_and_takes_it_back(self, path: Path) -> None:
        with lock(path, exclusive=True, what="prune"):
            note = json.loads(path.read_text())
            assert (note["pid"], note["what"]) == (os.getpid(), "prune")
            assert datetime.fromisoformat(note["since"]).tzinfo is not None
        assert path.read_bytes() == b""

    def test_who_waits_hears_once_what_for(self, path: Path, key_locks: KeyLocks) -> None:
        for timeout in (None, 60):
            said = heard_while_waiting(
                lock(path, exclusive=True, what="prune"),
                lambda hear, t=timeout: lock(path, exclusive=False, timeout=t, on_wait=hear),  # type: ignore[misc]
            )
            assert re.fullmatch(r"this process \(prune\) has held the store since \d\d:\d\d", said)
            said = heard_while_waiting(
                key_locks.hold("a", what="download"),
                lambda hear, t=timeout: key_locks.hold("a", timeout=t, on_wait=hear),  # type: ignore[misc]
            )
            pattern = r"the lock of 'a' is held by this process \(download\), since \d\d:\d\d"
            assert re.fullmatch(pattern, said)

    def test_nobody_hears_of_a_lock_that_was_free(self, path: Path) -> None:
        for exclusive in (True, False):
            with lock(path, exclusive=exclusive, on_wait=pytest.fail):
                pass

    def test_without_a_listener_the_wait_is_logged(
        self, path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Release(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                if "(prune)" in record.getMessage():
                    done.set()

        caplog.set_level(logging.INFO)
        logger = logging.getLogger("smartcache")
        with held(path, exclusive=True, what="prune") as done:
            logger.addHandler(release := Release())
            try:
                with lock(path, exclusive=True):
                    pass
            finally:
                logger.removeHandler(release)
        assert [record.levelname for record in caplog.records] == ["INFO"]
        assert "(prune) has held the store" in caplog.text

    def test_the_timeout_error_says_what_and_who_and_survives_pickling(self, path: Path) -> None:
        with held(path, exclusive=True, what="prune"):
            error = refused(path)
        for each in (error, pickle.loads(pickle.dumps(error))):  # noqa: S301
            assert isinstance(each, TimeoutError)
            assert vars(each)["key"] == str(path)
            assert vars(each)["holder"].startswith("this process (prune), since ")
            sentence = "Gave up after 0.02 s: this process (prune) has held the store"
            assert str(each).startswith(sentence)
        with held(path, exclusive=False):
            named = in_vain(lock(path, exclusive=True, timeout=0, name="the set x"))
            assert "another process is using the set x" in str(named)

    def test_a_note_left_behind_or_without_sense_neither_blocks_nor_misleads(
        self, path: Path
    ) -> None:
        """Sharers leave no word: what a writer finds in the file was left by one that is gone."""
        assert can_lock(path, exclusive=True)
        path.write_bytes(note_of(dead_process()))
        with lock(path, exclusive=False, timeout=30):
            assert path.read_bytes() == b""
        with held(path, exclusive=False):
            path.write_bytes(note_of(os.getpid()))
            assert vars(refused(path))["holder"] == "another process"
        garbage = [
            note_of(dead_process()),
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
        for text in garbage:
            with row(text[:60]):
                path.write_bytes(text)
                assert can_lock(path, exclusive=False)
                assert can_lock(path, exclusive=True)
                with held(path, exclusive=True):
                    path.write_bytes(text)
                    assert vars(refused(path))["holder"] == "another process"

    def test_an_old_note_is_dated_and_shows_no_control_characters(self, path: Path) -> None:
        since = datetime(2024, 2, 3, 12, tzinfo=UTC)
        with held(path, exclusive=True):
            path.write_bytes(note_of(os.getpid(), "a\x1b[31m\nb", since))
            holder = vars(refused(path))["holder"]
        local = since.astimezone()
        assert holder == f"this process (a[31mb), since {local:%Y-%m-%d %H:%M}"


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


class TestClaim:
    def test_it_is_had_once_and_removes_its_file(self, path: Path) -> None:
        assert is_free(path), "nobody holds what is not there"
        first = claim(path)
        assert first is not None
        assert claim(path) is None
        assert not is_free(path)
        first.release()
        assert not path.exists()
        first.release()
        with pytest.raises(StoreError, match="not claimed"):
            _ = first.fd

    def test_a_claimed_file_is_private_keeps_its_bytes_and_can_be_written_and_kept(
        self, path: Path
    ) -> None:
        for expected in (b"", b"data"):
            taken = claim(path)
            assert taken is not None
            assert os.read(taken.fd, 10) == expected
            os.pwrite(taken.fd, b"data", 0)
            assert path.stat().st_mode & 0o777 == 0o600
            taken.release(remove=False)
            assert (path.read_bytes(), is_free(path)) == (b"data", True)

    def test_it_does_not_remove_a_file_that_took_its_name(self, path: Path) -> None:
        taken = claim(path)
        assert taken is not None
        path.rename(path.with_name("final"))
        path.write_bytes(b"another")
        taken.release()
        assert path.read_bytes() == b"another"
        assert path.with_name("final").exists()

    def test_it_is_not_refused_because_somebody_looks(self, path: Path) -> None:
        path.touch()
        lock_for_a_moment(path, exclusive=False)
        taken = claim(path)
        assert taken is not None
        taken.release()

    @pytest.mark.parametrize("sweeps", [1, 2])
    def test_who_makes_a_file_gets_it_though_cleaners_find_it_unlocked(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, sweeps: int
    ) -> None:
        """The second cleaner makes it anew itself: it saw the name before the first removed it."""
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

    def test_a_dangling_link_is_no_lock_file(self, path: Path) -> None:
        path.symlink_to("nowhere")
        with pytest.raises(StoreError, match="not a regular file"):
            claim(path)


class TestKeyLocks:
    def test_of_many_threads_one_at_a_time_works(self, key_locks: KeyLocks) -> None:
        """Whether they share one object or have one each."""
        at_work: list[int] = []
        crowds: list[int] = []

        def work(number: int) -> None:
            mine = key_locks if number % 2 else KeyLocks(key_locks.directory)
            for _ in range(20):
                with mine.hold("key"):
                    at_work.append(number)
                    time.sleep(0)
                    crowds.append(len(at_work))
                    at_work.remove(number)

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(work, range(16)))
        assert crowds == [1] * 16 * 20

    def test_busy_says_who_works_and_other_keys_are_free(self, key_locks: KeyLocks) -> None:
        """One text is one key; several may come by any iterable, twice, or none."""
        with (
            in_another_thread(key_locks.hold("abc", what="encode")),
            key_locks.hold("b", timeout=0),
        ):
            assert str(key_locks.busy("abc")).startswith("this process (encode), since ")
            assert key_locks.busy("b")
            assert key_locks.busy("a") is None
        assert key_locks.busy("abc") is None
        with key_locks.hold(key for key in ["a", "b", "a"]):
            assert key_locks.busy("a")
        with key_locks.hold([]):
            pass

    def test_the_directory_is_made_left_empty_and_made_again(self, key_locks: KeyLocks) -> None:
        assert not key_locks.directory.exists()
        with key_locks.hold(["a", "b"]):
            names = os.listdir(key_locks.directory)
            assert len(names) == 2
            assert all(re.fullmatch("[0-9a-f]{32}", name) for name in names)
        assert os.listdir(key_locks.directory) == []
        with key_locks.hold("a"):
            shutil.rmtree(key_locks.directory)
        with key_locks.hold("a", timeout=30):
            assert key_locks.busy("a")

    def test_a_key_is_given_back_when_the_block_raises(self, key_locks: KeyLocks) -> None:
        with pytest.raises(ZeroDivisionError), key_locks.hold(["a", "b"]):
            raise ZeroDivisionError
        with key_locks.hold(["a", "b"], timeout=0):
            pass

    def test_a_thread_that_asks_again_is_told_and_keeps_what_it_has(
        self, key_locks: KeyLocks
    ) -> None:
        with key_locks.hold("b"):
            for same in (key_locks, KeyLocks(key_locks.directory)):
                with pytest.raises(StoreError, match="wait for itself"), same.hold(["a", "b"]):
                    pass
            assert key_locks.busy("b")
            assert key_locks.busy("a") is None, "what it got before it was told is given back"
        assert key_locks.busy("b") is None

    def test_the_timeout_error_says_which_key_and_who_and_keeps_no_key(
        self, key_locks: KeyLocks
    ) -> None:
        with in_another_thread(key_locks.hold("b", what="download", timeout=GUARD)):
            error = in_vain(key_locks.hold(["a", "b", "c"], timeout=0.02))
            assert key_locks.busy("a") is None, "all keys or none"
        with key_locks.hold(["a", "b"], timeout=0):
            assert error.__traceback__ is not None
        for each in (error, pickle.loads(pickle.dumps(error))):  # noqa: S301
            assert isinstance(each, TimeoutError)
            assert vars(each)["key"] == "b"
            assert vars(each)["holder"].startswith("this process (download), since ")
            assert str(each).startswith("Gave up after 0.02 s: the lock of 'b' is held by")
        for key in ("", "a/b\0c", "x" * 10_000, "\udcff", "ß"):
            with row(repr(key)[:9]), in_another_thread(key_locks.hold([key])):
                assert vars(in_vain(key_locks.hold([key], timeout=0)))["key"] == key

    def test_a_file_left_behind_is_no_lock_and_a_torn_note_names_nobody(
        self, key_locks: KeyLocks
    ) -> None:
        with key_locks.hold("a"):
            (name,) = os.listdir(key_locks.directory)
            (key_locks.directory / name).write_bytes(b"\0garbage")
            assert key_locks.busy("a") == "another process"
        (key_locks.directory / name).write_bytes(b"\0garbage")
        assert key_locks.busy("a") is None
        with key_locks.hold("a", timeout=0):
            assert str(key_locks.busy("a")).startswith("this process")
        assert os.listdir(key_locks.directory) == []
