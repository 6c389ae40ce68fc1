"""Locks of stores, claims of files and folders, locks of keys: who has them, who waits."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from smartcache.errors import LockTimeoutError, StoreError
from smartcache.system import faults, kernel, locks
from smartcache.system.locks import Claim, KeyLocks, claim, claim_folder, is_free, store_lock
from tests.store.files import raising, row

GUARD = 60.0
"""Seconds after which a defect becomes a failure instead of a hang."""
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="flock")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lock"


@pytest.fixture
def key_locks(tmp_path: Path) -> KeyLocks:
    return KeyLocks(tmp_path / "store" / "leases")


def can_lock(path: Path) -> bool:
    """Whether another thread can: a thread's own locks are treated differently."""

    def ask() -> bool:
        try:
            with store_lock(path, "", timeout=0):
                return True
        except LockTimeoutError:
            return False

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(ask).result()


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


def held(path: Path, label: str = "") -> AbstractContextManager[threading.Event]:
    return in_another_thread(store_lock(path, label, timeout=GUARD))


def in_vain(block: AbstractContextManager[object]) -> LockTimeoutError:
    with pytest.raises(LockTimeoutError) as caught, block:
        pass
    return caught.value


def refused(path: Path) -> LockTimeoutError:
    return in_vain(store_lock(path, "", timeout=0.02))


def taken_by(path: Path) -> Claim:
    claimed = claim_folder(path) if path.is_dir() else claim(path)
    assert claimed is not None
    return claimed


class TestStoreLock:
    def test_one_holds_it_until_the_block_is_left(self, path: Path) -> None:
        """A thread that would wait for itself is told, and keeps it."""
        with store_lock(path, "prune"):
            assert not can_lock(path)
            with pytest.raises(StoreError, match="wait for itself"), store_lock(path, "prune"):
                pass
            assert not can_lock(path)
        assert can_lock(path)
        with pytest.raises(ZeroDivisionError), store_lock(path, "prune"):
            raise ZeroDivisionError
        assert can_lock(path)

    def test_a_missing_directory_and_a_filesystem_without_locks_are_named(
        self, tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(StoreError, match=r"gone.lock: No such file"):
            can_lock(tmp_path / "gone" / "lock")
        monkeypatch.setattr(fcntl, "flock", raising(errno.ENOLCK))
        pattern = r"The \w+ filesystem of .*lock.* does not lock"
        with pytest.raises(StoreError, match=pattern) as caught:
            can_lock(path)
        assert "SMARTCACHE_HOME" in caught.value.hint

    def test_lock_files_are_for_their_user_only(self, tmp_path: Path) -> None:
        for mask in (0o000, 0o022, 0o777):
            previous = os.umask(mask)
            try:
                with store_lock(tmp_path / oct(mask), ""):
                    pass
            finally:
                os.umask(previous)
        assert {entry.stat().st_mode & 0o777 for entry in tmp_path.iterdir()} == {0o600}

    @pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
    def test_nothing_stays_open(self, path: Path, key_locks: KeyLocks) -> None:
        before = len(os.listdir("/proc/self/fd"))
        with held(path):
            refused(path)
        with in_another_thread(key_locks.hold("a")):
            in_vain(key_locks.hold(["a", "b"], timeout=0))
            assert key_locks.busy("a")
        taken = taken_by(path)
        assert claim(path) is None
        assert not is_free(path)
        taken.release()
        assert len(os.listdir("/proc/self/fd")) == before


def note_of(pid: object, what: str = "prune", since: object = 1_700_000_000) -> bytes:
    return f"0 {pid} {since} {what}\n".encode()


class TestNote:
    def test_without_a_listener_the_wait_is_logged_and_nobody_hears_of_a_free_lock(
        self, path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Release(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                if "(prune)" in record.getMessage():
                    done.set()

        monkeypatch.setattr(locks, "_STORE_QUIET", 0.004)
        caplog.set_level(logging.INFO)
        logger = logging.getLogger("smartcache")
        with held(path, "prune") as done:
            logger.addHandler(release := Release())
            try:
                with store_lock(path, ""):
                    pass
            finally:
                logger.removeHandler(release)
        assert [record.levelname for record in caplog.records] == ["INFO"]
        assert "this process (prune) has held the store since " in caplog.text
        with store_lock(path, "prune", on_wait=pytest.fail):
            pass

    def test_the_timeout_error_says_what_and_who_survives_pickling_and_holds_nobody_back(
        self, path: Path
    ) -> None:
        with held(path, "prune"):
            error = refused(path)
            named = in_vain(store_lock(path, "", timeout=0, name="the set x"))
        assert can_lock(path)
        assert error.__traceback__ is not None, "kept alive, with the frames that had the lock"
        for each in (error, pickle.loads(pickle.dumps(error))):  # noqa: S301
            assert isinstance(each, TimeoutError)
            assert vars(each)["key"] == str(path)
            assert vars(each)["holder"].startswith("this process (prune), since ")
            sentence = "Gave up after 0.02 s: this process (prune) has held the store"
            assert str(each).startswith(sentence)
        assert "(prune) has held the set x since" in str(named)

    def test_a_note_left_behind_or_without_sense_neither_blocks_nor_misleads(
        self, path: Path
    ) -> None:
        dead = subprocess.Popen([sys.executable, "-c", ""])
        dead.wait()
        garbage = [
            b"", b"\0\xff\xfe", b"9" * 5000, b"x" * 1_000_000, b"0 1 1\n", b"1 1 1 another key\n",
            note_of(dead.pid), note_of("x"), note_of(-1), note_of("9" * 20), note_of("9" * 5000),
            note_of(1, since="x"), note_of(1, since="9" * 20), note_of(1, since="-" + "9" * 20),
        ]  # fmt: skip
        for text in garbage:
            with row(text[:60]):
                path.write_bytes(text)
                assert can_lock(path)
                with held(path):
                    path.write_bytes(text)
                    assert vars(refused(path))["holder"] == "another process"
        assert can_lock(path)

    def test_an_old_note_is_dated_and_shows_no_control_characters(self, path: Path) -> None:
        since = datetime(2024, 2, 3, 12, tzinfo=UTC).astimezone()
        with held(path):
            path.write_bytes(note_of(os.getpid(), "a\x1b[31m b", int(since.timestamp())))
            holder = vars(refused(path))["holder"]
        assert holder == f"this process (a[31m b), since {since:%Y-%m-%d %H:%M}"
        with held(path, "line\n\udcff" + "x" * 100):
            assert vars(refused(path))["holder"].startswith(f"this process (line ?{'x' * 54}), ")


def lock_for_a_moment(path: Path, *, exclusive: bool, remove: bool = False) -> None:
    """Do as an `is_free` or a cleaner does, only longer; return while the file is locked."""
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
        first = taken_by(path)
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
        """A copy of its descriptor, in a child that Python does not know of, keeps no lock."""
        for expected in (b"", b"data"):
            taken = taken_by(path)
            copy = os.dup(taken.fd)
            assert os.read(taken.fd, 10) == expected
            os.pwrite(taken.fd, b"data", 0)
            assert path.stat().st_mode & 0o777 == 0o600
            taken.release(remove=False)
            assert (path.read_bytes(), is_free(path)) == (b"data", True)
            os.close(copy)

    def test_a_folder_is_had_once_and_goes_with_all_that_is_in_it(self, path: Path) -> None:
        assert claim_folder(path) is None, "it is not there"
        (path / "inner").mkdir(parents=True)
        (path / "inner" / "file").touch()
        first = taken_by(path)
        assert claim_folder(path) is None
        first.release(remove=False)
        second = taken_by(path)
        second.release()
        assert not path.exists()
        second.release()

    def test_what_took_its_name_stays(self, tmp_path: Path) -> None:
        for make in (Path.touch, Path.mkdir):
            path, moved = tmp_path / make.__name__, tmp_path / f"{make.__name__} moved"
            make(path)
            taken = taken_by(path)
            path.rename(moved)
            make(path)
            taken.release()
            assert path.exists()
            assert moved.exists()

    def test_it_is_not_refused_because_somebody_looks(self, path: Path) -> None:
        path.touch()
        lock_for_a_moment(path, exclusive=False)
        taken_by(path).release()

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
        taken = taken_by(path)
        assert moments > 1
        assert os.path.samestat(os.fstat(taken.fd), path.stat())
        taken.release()

    def test_a_dangling_link_is_no_lock_file(self, path: Path) -> None:
        path.symlink_to("nowhere")
        with pytest.raises(StoreError, match="not a regular file"):
            claim(path)


@pytest.fixture(params=["bytes", "files"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How keys are locked; files: as on systems that lock no bytes."""
    if request.param == "files":
        monkeypatch.setattr(kernel, "lock_byte", lambda *_: None)
        monkeypatch.setattr(kernel, "is_byte_locked", lambda *_: None)
    elif sys.platform != "linux":
        pytest.skip("bytes are locked on Linux only")
    return str(request.param)


@pytest.mark.usefixtures("way")
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
        """Keys may come by any iterable, twice, or none."""
        with (
            in_another_thread(key_locks.hold("abc", what="encode")),
            key_locks.hold("b", timeout=0),
        ):
            assert str(key_locks.busy("abc")).startswith("this process (encode), since ")
            assert key_locks.busy("b")
            assert key_locks.busy("a") is None
        assert key_locks.busy("abc") is None
        with key_locks.hold(key for key in ["a", "b", "a"]), key_locks.hold([]):
            assert key_locks.busy("a")
            (key_locks.directory / "keys").write_bytes(b"\0garbage" * 100_000)
            assert key_locks.busy("a") == "another process"
        with pytest.raises(ZeroDivisionError), key_locks.hold(["a", "b"]):
            raise ZeroDivisionError
        assert key_locks.busy("a") is None

    def test_the_directory_is_made_and_made_again(self, key_locks: KeyLocks) -> None:
        with key_locks.hold(["a", "b"]):
            assert key_locks.directory.stat().st_mode & 0o777 == 0o700
        assert len(os.listdir(key_locks.directory)) == 1
        with key_locks.hold("a"):
            shutil.rmtree(key_locks.directory)
        with key_locks.hold("a", timeout=30):
            assert key_locks.busy("a")

    def test_who_does_not_get_all_keys_gets_none(self, key_locks: KeyLocks) -> None:
        """Nor does a thread that asks for one it has; the error says which key and who has it."""
        with key_locks.hold("b"):
            for same in (key_locks, KeyLocks(key_locks.directory)):
                with pytest.raises(StoreError, match="wait for itself"), same.hold(["a", "b"]):
                    pass
            assert key_locks.busy("b")
            assert key_locks.busy("a") is None
        with in_another_thread(key_locks.hold("b", what="download", timeout=GUARD)):
            error = in_vain(key_locks.hold(["a", "b", "c"], timeout=0.02))
            assert key_locks.busy("a") is None
        with key_locks.hold(["a", "b"], timeout=0):
            assert error.__traceback__ is not None
        assert (vars(error)["key"], "(download), since " in vars(error)["holder"]) == ("b", True)
        assert str(error).startswith("Gave up after 0.02 s: this process (download) has held")
        for key in ("", "a/b\0c", "x" * 10_000, "\udcff", "ß"):
            with row(repr(key)[:9]), in_another_thread(key_locks.hold([key])):
                assert vars(in_vain(key_locks.hold([key], timeout=0)))["key"] == key

    def test_of_some_keys_those_are_held_that_are_free(self, key_locks: KeyLocks) -> None:
        with in_another_thread(key_locks.hold("b")), ExitStack() as stack:
            assert key_locks.try_hold(["a", "b", "a", "c"], stack) == ["a", "c"]
            assert key_locks.try_hold(["a", "c"], stack) == []
            with pytest.raises(StoreError, match="wait for itself"), key_locks.hold("a"):
                pass
            assert key_locks.busy("c")
        assert key_locks.busy("a") is key_locks.busy("c") is None

    def test_who_waits_for_a_key_learns_whether_it_is_free(self, key_locks: KeyLocks) -> None:
        assert key_locks.wait("a", 0)
        with in_another_thread(key_locks.hold("a")) as done:
            assert not key_locks.wait("a", 0.01)
            done.set()
            assert key_locks.wait("a", GUARD)
