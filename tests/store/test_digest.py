"""Hashes are right whatever way the bytes come, and never those of a file that changed."""

from __future__ import annotations

import array
import contextlib
import errno
import functools
import hashlib
import itertools
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import get_args

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from tests.api import (
    AHEAD_MIN_SIZE,
    BUFFER_SIZE,
    Algorithm,
    BadDigestError,
    FileChangedError,
    FilePath,
    FileSkippedError,
    Hashed,
    Hasher,
    Hashes,
    Job,
    SizeMismatchError,
    StatKey,
    StoreError,
    Unit,
    check_hex,
    hash_file,
    hash_many,
)

ALL: tuple[Algorithm, ...] = get_args(Algorithm)
STREAMED: tuple[Algorithm, ...] = ("blake3", "sha256", "git-sha1")
ENDLESS = 1 << 40
"""Size of a sparse file that takes minutes to hash: who waits for it meets the timeout."""

posix = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX files and signals")
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


@functools.lru_cache(maxsize=16)
def some_bytes(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def write(path: Path, size: int, seed: int = 0) -> Path:
    path.write_bytes(some_bytes(size, seed))
    return path


def sparse(path: Path, size: int) -> Path:
    with path.open("wb") as stream:
        stream.truncate(size)
    return path


def expected(data: bytes, algorithms: Iterable[Algorithm] = STREAMED) -> dict[Algorithm, str]:
    every: dict[Algorithm, str] = {
        "blake3": blake3(data).hexdigest(),
        "sha256": hashlib.sha256(data).hexdigest(),
        "git-sha1": hashlib.sha1(
            b"blob %d\0" % len(data) + data, usedforsecurity=False
        ).hexdigest(),
    }
    return {name: every[name] for name in algorithms}


def pickled(value: object) -> object:
    return pickle.loads(pickle.dumps(value))  # noqa: S301 - our own


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def hashing_threads() -> list[threading.Thread]:
    names = ("smartcache-hash", "smartcache-read")
    return [thread for thread in threading.enumerate() if thread.name.startswith(names)]


class Watched(Job):
    """A progress that remembers what it was told, and may raise."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.started: list[tuple[str, int | None, Unit]] = []
        self.amount = 0
        self.is_closed = False
        self._error = error
        self._lock = threading.Lock()

    def __call__(self, label: str, total: int | None = None, unit: Unit = "items") -> Watched:
        self.started.append((label, total, unit))
        return self

    def advance(self, amount: int = 1) -> None:
        if self._error is not None:
            raise self._error
        with self._lock:
            self.amount += amount

    def close(self) -> None:
        self.is_closed = True


class TestKnownHashes:
    def test_of_nothing(self, tmp_path: Path) -> None:
        hashes, key = hash_file(write(tmp_path / "empty", 0), ALL)
        assert hashes.values == {
            "blake3": "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
            "sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
            "git-sha1": "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391",
            "xet": "0" * 64,
        }
        assert (hashes.size, key.size) == (0, 0)

    def test_of_hello(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"hello")
        hashes, _ = hash_file(tmp_path / "file", ALL)
        assert hashes.values == {
            "blake3": "ea8f163db38682925e4491c5e58d4bb3506ef8c14eb78a86e908c5624a67200f",
            "sha256": "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824",
            "git-sha1": "b6fc4c620b67d95f953a5c1c1230aaab5db5a1b0",
            "xet": "48a3213a086cad271381aafe47232eb5df291a963cebbfec071972eff45eb422",
        }

    @pytest.mark.parametrize("size", [0, 1, 5000, 3 * BUFFER_SIZE + 1])
    def test_git_sha1_is_what_git_says(self, tmp_path: Path, size: int) -> None:
        path = write(tmp_path / "file", size)
        command = ["git", "hash-object", "--no-filters", str(path)]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        assert hash_file(path, ["git-sha1"])[0].get("git-sha1") == said

    def test_xet_is_what_hf_xet_says(self, tmp_path: Path) -> None:
        import hf_xet

        path = write(tmp_path / "file", 5_000_000)
        (said,) = hf_xet.hash_files([str(path)])
        assert hash_file(path, ["xet"])[0].values == {"xet": said.hash}


class TestHashFile:
    # Every two of the three meet.
    @pytest.mark.parametrize(
        ("size", "algorithms", "threads"),
        [
            (size, algorithms, (1, 2, 3, 8)[(row + column) % 4])
            for row, size in enumerate(
                (
                    *(0, 1, BUFFER_SIZE - 1, BUFFER_SIZE, BUFFER_SIZE + 1, 4 * BUFFER_SIZE),
                    *(AHEAD_MIN_SIZE - 1, AHEAD_MIN_SIZE, AHEAD_MIN_SIZE + 12345),
                )
            )
            for column, algorithms in enumerate(
                (("blake3",), ("sha256",), ("git-sha1", "blake3"), STREAMED)
            )
        ],
    )
    def test_every_size_and_thread_count_gives_the_same(
        self, tmp_path: Path, size: int, algorithms: tuple[Algorithm, ...], threads: int
    ) -> None:
        path = write(tmp_path / "file", size)
        told: list[int] = []
        hashes, key = hash_file(path, algorithms, threads=threads, advance=told.append)
        assert hashes == Hashes(size=size, values=expected(path.read_bytes(), algorithms))
        assert key == StatKey.of(path.stat())
        assert sum(told) == size
        assert not hashing_threads()

    def test_blake3_is_the_default_and_the_digest(self, tmp_path: Path) -> None:
        path = write(tmp_path / "file", 1000)
        hashes, _ = hash_file(path)
        assert hashes.values == {"blake3": hashes.digest}
        assert hashes.digest == blake3(path.read_bytes()).hexdigest()
        assert hashes.get("sha256") is None

    def test_an_algorithm_may_be_named_twice_and_by_any_iterable(self, tmp_path: Path) -> None:
        path = write(tmp_path / "file", 1000)
        twice: Iterator[Algorithm] = iter(["sha256", "sha256"])
        assert hash_file(path, twice)[0].values == expected(path.read_bytes(), ["sha256"])

    def test_an_unknown_algorithm_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(BadDigestError, match="'md5'") as caught:
            hash_file(write(tmp_path / "file", 1), ["md5"])  # type: ignore[list-item]
        assert "sha256" in caught.value.hint

    @pytest.mark.parametrize("threads", [1, 2])
    def test_holes_are_zeros(self, tmp_path: Path, threads: int) -> None:
        size = AHEAD_MIN_SIZE + 4097
        path = sparse(tmp_path / "file", size)
        assert hash_file(path, STREAMED, threads=threads)[0].values == expected(bytes(size))

    @posix
    @pytest.mark.parametrize("name", [b"caf\xe9 \xff", b"two\nlines", "ü ☃".encode(), b" -x "])
    def test_any_name_does(self, tmp_path: Path, name: bytes) -> None:
        path = os.fsencode(tmp_path) + b"/" + name
        with open(path, "wb") as stream:
            stream.write(b"hello")
        forms: list[FilePath] = [path, os.fsdecode(path), Path(os.fsdecode(path))]
        for form in forms:
            hashes, _ = hash_file(form, ALL)
            assert hashes.digest == blake3(b"hello").hexdigest()
            assert (hashes.get("xet") or "").startswith("48a3213a")

    def test_a_symlink_is_followed(self, tmp_path: Path) -> None:
        target = write(tmp_path / "file", 1000)
        (tmp_path / "link").symlink_to(target)
        assert hash_file(tmp_path / "link") == hash_file(target)

    @pytest.mark.parametrize("threads", [1, 2])
    @pytest.mark.parametrize("size", [100, AHEAD_MIN_SIZE])
    def test_a_descriptor_is_neither_moved_nor_closed(
        self, tmp_path: Path, size: int, threads: int
    ) -> None:
        path = write(tmp_path / "file", size)
        with path.open("rb", buffering=0) as stream:
            stream.seek(7)
            hashes, key = hash_file(stream.fileno(), ALL, threads=threads)
            assert stream.tell() == 7
            assert key == StatKey.of(os.fstat(stream.fileno()))
        assert hashes == hash_file(path, ALL)[0]

    def test_a_removed_file_is_hashed_through_its_descriptor(self, tmp_path: Path) -> None:
        path = write(tmp_path / "file", 1000)
        with path.open("rb") as stream:
            path.unlink()
            assert hash_file(stream.fileno(), STREAMED)[0].values == expected(some_bytes(1000))

    def test_without_preadv_the_hashes_are_the_same(self, tmp_path: Path) -> None:
        """Windows has none; the descriptor's position must stay there too."""
        path = write(tmp_path / "file", 3 * BUFFER_SIZE + 5)
        code = (
            "import os, sys; vars(os).pop('preadv', None)\n"
            "from smartcache.store.digest import hash_file\n"
            "fd = os.open(sys.argv[1], os.O_RDONLY); os.lseek(fd, 7, os.SEEK_SET)\n"
            "print(hash_file(fd)[0].digest, hash_file(sys.argv[1])[0].digest, os.read(fd, 4).hex())"
        )
        data = path.read_bytes()
        digest = blake3(data).hexdigest()
        assert run(code, path).split() == [digest, digest, data[7:11].hex()]


class TestOtherThanFiles:
    @posix
    @pytest.mark.parametrize("kind", ["directory", "fifo", "device", "fifo descriptor"])
    def test_is_skipped_without_waiting(self, tmp_path: Path, kind: str) -> None:
        path = tmp_path / "thing"
        target: Path | int = path
        with contextlib.ExitStack() as stack:
            if kind == "directory":
                path.mkdir()
            elif kind == "device":
                target = Path("/dev/zero")
            else:
                os.mkfifo(path)
            if kind == "fifo descriptor":
                target = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                stack.callback(os.close, target)
            with pytest.raises(FileSkippedError, match="not a regular file") as caught:
                hash_file(target)
        assert caught.value.reason == "not a regular file"
        assert vars(caught.value)["path"] == target

    @posix
    def test_a_socket_is_an_os_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)  # the path of a socket must be short
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("socket")
            with pytest.raises(OSError) as caught:  # noqa: PT011 - the errno is checked
                hash_file("socket")
        assert (caught.value.errno, caught.value.filename) == (errno.ENXIO, "socket")

    def test_a_missing_file_keeps_errno_and_name(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError) as caught:
            hash_file(tmp_path / "none")
        assert caught.value.errno == errno.ENOENT
        assert caught.value.filename == str(tmp_path / "none")

    @linux
    def test_a_file_with_more_than_its_size_says_is_never_hashed(self) -> None:
        """Files of /proc have size 0 and content; the hash of nothing would be a lie."""
        with pytest.raises(FileChangedError):
            hash_file("/proc/self/status")

    @linux
    def test_errors_leave_no_descriptor_open(self, tmp_path: Path) -> None:
        before = open_descriptors()
        for path in (tmp_path, tmp_path / "none", "/proc/self/status"):
            with pytest.raises(OSError):  # noqa: PT011 - which one is tested above
                hash_file(path)
        assert open_descriptors() == before


def append(path: Path) -> None:
    with path.open("ab") as stream:
        stream.write(b"x")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def overwrite(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.write(b"x")


def overwrite_and_set_time_back(path: Path) -> None:
    before = path.stat()
    overwrite(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


class TestChange:
    @pytest.mark.parametrize("threads", [1, 2])
    @pytest.mark.parametrize("size", [100, 4 * BUFFER_SIZE, 2 * AHEAD_MIN_SIZE])
    @pytest.mark.parametrize(
        "change", [append, cut, empty, overwrite, overwrite_and_set_time_back, os.unlink]
    )
    def test_while_reading_is_an_error(
        self, tmp_path: Path, change: Callable[[Path], None], size: int, threads: int
    ) -> None:
        path = aged(write(tmp_path / "file", size))
        changes = iter([change])

        def advance(_: int) -> None:
            for make in changes:
                make(path)

        with pytest.raises(FileChangedError) as caught:
            hash_file(path, advance=advance, threads=threads)
        assert vars(caught.value)["path"] == path
        assert caught.value.reason == "changed"
        assert not hashing_threads()

    def test_an_endlessly_growing_file_ends_the_reading(self, tmp_path: Path) -> None:
        path = write(tmp_path / "log", BUFFER_SIZE + 1)

        def advance(count: int) -> None:
            with path.open("ab") as stream:
                stream.write(bytes(2 * count))

        with pytest.raises(FileChangedError):
            hash_file(path, advance=advance)

    @linux
    def test_during_the_xet_hash_is_an_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import hf_xet

        path = aged(write(tmp_path / "file", 1000))
        hash_files = hf_xet.hash_files

        def hash_then_change(names: list[str]) -> object:
            found = hash_files(names)
            overwrite(path)
            return found

        monkeypatch.setattr(hf_xet, "hash_files", hash_then_change)
        with pytest.raises(FileChangedError):
            hash_file(path, ["xet"])

    def test_errors_survive_pickling(self, tmp_path: Path) -> None:
        path = write(tmp_path / "file", 100)
        with pytest.raises(FileChangedError) as caught:
            hash_file(path, advance=lambda _: append(path))
        again = pickled(caught.value)
        assert str(again) == f"{path} changed while it was read"
        assert vars(again)["path"] == path


def aged(path: Path) -> Path:
    """Give a file times that no change of now can have by chance."""
    os.utime(path, (1_000_000_000, 1_000_000_000))
    return path


class TestInterruption:
    @pytest.mark.parametrize("threads", [1, 2])
    def test_an_exception_of_advance_ends_the_hashing(self, tmp_path: Path, threads: int) -> None:
        path = sparse(tmp_path / "file", ENDLESS)

        def advance(_: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            hash_file(path, STREAMED, advance=advance, threads=threads)
        assert not hashing_threads()

    def test_advance_may_hash_another_file(self, tmp_path: Path) -> None:
        outer = write(tmp_path / "outer", 5 * BUFFER_SIZE)
        inner = write(tmp_path / "inner", 3 * BUFFER_SIZE, seed=1)
        found: list[Hashes] = []
        hashes, _ = hash_file(outer, STREAMED, advance=lambda _: found.append(hash_file(inner)[0]))
        assert hashes.values == expected(outer.read_bytes())
        assert {each.digest for each in found} == {blake3(inner.read_bytes()).hexdigest()}

    def test_a_hash_that_fails_in_its_thread_is_an_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Failing:
            def update(self, _: memoryview) -> None:
                raise MemoryError

            def hexdigest(self) -> str:
                return "0" * 64

        monkeypatch.setattr(hashlib, "sha256", Failing)
        with pytest.raises(MemoryError):
            hash_file(sparse(tmp_path / "file", 2 * AHEAD_MIN_SIZE), ["sha256"], threads=2)
        assert not hashing_threads()

    @posix
    @pytest.mark.parametrize("size", [BUFFER_SIZE, 8 * BUFFER_SIZE])
    def test_a_signal_handler_may_hash_another_file(self, tmp_path: Path, size: int) -> None:
        """It runs between a read and the hash of what was read, and must not share the buffer."""
        outer = write(tmp_path / "outer", size)
        inner = write(tmp_path / "inner", BUFFER_SIZE, seed=1)
        found: list[str] = []
        handler = signal.signal(signal.SIGALRM, lambda *_: found.append(hash_file(inner)[0].digest))
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
            digests = set()
            while len(found) < 500:
                digests.add(hash_file(outer)[0].digest)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
        assert digests == {blake3(outer.read_bytes()).hexdigest()}
        assert set(found) == {blake3(inner.read_bytes()).hexdigest()}

    @posix
    def test_a_forked_child_has_a_buffer_of_its_own(self, tmp_path: Path) -> None:
        ours = write(tmp_path / "ours", 8 * BUFFER_SIZE)
        theirs = write(tmp_path / "theirs", 8 * BUFFER_SIZE, seed=1)
        digest, other = (blake3(path.read_bytes()).hexdigest() for path in (ours, theirs))
        hash_file(ours)  # makes this thread's buffer
        child = os.fork()
        if child == 0:
            is_right = all(hash_file(theirs)[0].digest == other for _ in range(100))
            os._exit(0 if is_right else 1)
        found = {hash_file(ours)[0].digest for _ in range(100)}
        assert os.waitpid(child, 0)[1] == 0
        assert found == {digest}


class TestXet:
    def test_without_the_package_the_hint_says_what_to_install(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "hf_xet", None)
        with pytest.raises(StoreError, match="hf_xet") as caught:
            hash_file(write(tmp_path / "file", 1), ["xet"])
        assert "pip install" in caught.value.hint

    def test_the_package_is_loaded_only_for_it(self, tmp_path: Path) -> None:
        code = (
            "import sys; from smartcache.store.digest import hash_file\n"
            "hash_file(sys.argv[1], ('blake3', 'sha256', 'git-sha1'))\n"
            "print('hf_xet' in sys.modules)"
        )
        assert run(code, write(tmp_path / "file", 1)).strip() == "False"

    @pytest.fixture
    def _no_proc(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As on macOS and Windows: hf_xet has to open the path."""
        exists = os.path.exists
        monkeypatch.setattr(
            os.path, "exists", lambda path: not str(path).startswith("/proc") and exists(path)
        )

    @pytest.mark.usefixtures("_no_proc")
    def test_without_proc_the_path_is_read(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        path.write_bytes(b"hello")
        assert (hash_file(path, ["xet"])[0].get("xet") or "").startswith("48a3213a")

    @pytest.mark.usefixtures("_no_proc")
    def test_without_proc_a_descriptor_is_refused(self, tmp_path: Path) -> None:
        with write(tmp_path / "file", 10).open("rb") as stream, pytest.raises(StoreError):
            hash_file(stream.fileno(), ["xet"])

    @posix
    @pytest.mark.usefixtures("_no_proc")
    def test_without_proc_another_file_under_the_path_is_noticed(self, tmp_path: Path) -> None:
        first, second = write(tmp_path / "first", 10), write(tmp_path / "second", 10, seed=1)
        path = tmp_path / "link"
        path.symlink_to(first)

        def point_elsewhere(_: int) -> None:
            path.unlink()
            path.symlink_to(second)

        with pytest.raises(FileChangedError):
            hash_file(path, ALL, advance=point_elsewhere)

    @linux
    def test_ctrl_c_ends_it(self, tmp_path: Path) -> None:
        code = (
            "import sys, hf_xet; from smartcache.store.digest import hash_file\n"
            "print('ready', flush=True)\n"
            "try:\n"
            "    hash_file(sys.argv[1], ['xet'])\n"
            "except KeyboardInterrupt:\n"
            "    print('interrupted')\n"
        )
        path = sparse(tmp_path / "file", ENDLESS)
        assert interrupted(code, path, delay=0.5) == "interrupted"


def run(code: str, *arguments: Path) -> str:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=100, cwd=Path.cwd()
    ).stdout


def interrupted(code: str, *arguments: Path, delay: float = 0.0) -> str:
    """Run code, send it SIGINT after it has said "ready", and return what it says then."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(delay)
            child.send_signal(signal.SIGINT)
            said, _ = child.communicate(timeout=100)
        finally:
            child.kill()
    return said.strip()


class TestHasher:
    @given(chunks=st.lists(st.binary(max_size=3000), max_size=20))
    def test_any_chunking_gives_the_hashes_of_the_whole(self, chunks: list[bytes]) -> None:
        whole = b"".join(chunks)
        hasher = Hasher(STREAMED, size=len(whole))
        for chunk in chunks:
            hasher.update(chunk)
        assert hasher.finish() == Hashes(size=len(whole), values=expected(whole))

    @given(
        size=st.integers(0, 3 * BUFFER_SIZE),
        cuts=st.lists(st.integers(0, 3 * BUFFER_SIZE), max_size=5),
    )
    def test_a_file_has_the_hashes_of_its_stream(
        self, tmp_path_factory: pytest.TempPathFactory, size: int, cuts: list[int]
    ) -> None:
        path = write(tmp_path_factory.getbasetemp() / "streamed", size)
        data = memoryview(path.read_bytes())
        hasher = Hasher(STREAMED, size=size)
        bounds = [0, *sorted(min(each, size) for each in cuts), size]
        for start, end in itertools.pairwise(bounds):
            hasher.update(data[start:end])
        assert hasher.finish() == hash_file(path, STREAMED)[0]

    def test_every_kind_of_buffer_counts_in_bytes(self) -> None:
        numbers = array.array("I", range(1000))
        grid = memoryview(bytes(range(24))).cast("B", (4, 6))
        gaps = memoryview(bytes(range(100)))[::3]
        hasher = Hasher(["blake3"])
        for buffer in (numbers, grid, gaps, bytearray(b"abc"), memoryview(b""), array.array("d")):
            hasher.update(buffer)
        whole = numbers.tobytes() + bytes(range(24)) + bytes(range(0, 100, 3)) + b"abc"
        assert hasher.finish() == Hashes(size=len(whole), values=expected(whole, ["blake3"]))

    def test_a_buffer_is_let_go(self) -> None:
        buffer = bytearray(b"abc")
        Hasher(STREAMED).update(buffer)
        buffer.extend(b"d")  # BufferError while anybody holds a view

    def test_what_a_stream_cannot_give_needs_a_file(self) -> None:
        hasher = Hasher(ALL, size=0)
        assert hasher.needs_file == ("xet",)
        assert set(hasher.finish().values) == {"blake3", "sha256", "git-sha1"}

    def test_git_sha1_of_unknown_size_needs_a_file(self) -> None:
        hasher = Hasher(["git-sha1", "blake3"])
        assert hasher.needs_file == ("git-sha1",)
        assert set(hasher.finish().values) == {"blake3"}

    @pytest.mark.parametrize("arrived", [b"ab", b"abcd"])
    def test_another_size_than_announced_is_an_error(self, arrived: bytes) -> None:
        hasher = Hasher(["git-sha1"], size=3)
        hasher.update(arrived)
        with pytest.raises(SizeMismatchError) as caught:
            hasher.finish()
        assert (vars(caught.value)["expected"], vars(caught.value)["found"]) == (3, len(arrived))

    def test_finishes_once(self) -> None:
        hasher = Hasher(["blake3"])
        hasher.finish()
        with pytest.raises(StoreError, match="finished"):
            hasher.finish()
        with pytest.raises(StoreError, match="finished"):
            hasher.update(b"more")

    def test_an_unknown_algorithm_is_refused(self) -> None:
        with pytest.raises(BadDigestError, match="crc32"):
            Hasher(["crc32"])  # type: ignore[list-item]


class TestHashMany:
    @pytest.mark.parametrize("threads", [0, 1, 2, 5])
    def test_every_file_comes_once_with_its_hashes(self, tmp_path: Path, threads: int) -> None:
        sizes = [0, 1, 4096, BUFFER_SIZE, BUFFER_SIZE + 1, 10**6, 2 * 10**6, AHEAD_MIN_SIZE]
        paths = [write(tmp_path / str(seed), size, seed) for seed, size in enumerate(sizes)]
        found = list(hash_many(iter(paths), STREAMED, threads=threads))
        assert sorted(each.path for each in found) == paths
        for each in found:
            assert each.hashes is not None
            assert each.hashes.values == expected(each.path.read_bytes())
            assert (each.key, each.error) == (StatKey.of(each.path.stat()), None)
        assert not hashing_threads()

    def test_paths_come_back_as_they_were_given(self, tmp_path: Path) -> None:
        path = str(write(tmp_path / "file", 10))
        (found,) = hash_many([path], threads=2)
        assert found.path is path

    def test_no_files_no_results(self) -> None:
        assert list(hash_many([], threads=2)) == []

    def test_the_largest_file_is_first_of_the_large(self, tmp_path: Path) -> None:
        sizes = [3 * BUFFER_SIZE, 5 * BUFFER_SIZE, 2 * BUFFER_SIZE, 4 * BUFFER_SIZE]
        paths = [write(tmp_path / str(size), size) for size in sizes]
        found = [each.hashes.size for each in hash_many(paths, threads=1) if each.hashes]
        assert found == sorted(sizes, reverse=True)

    def test_one_huge_file_among_others_is_hashed_right(self, tmp_path: Path) -> None:
        """It gets several threads while the others are still being hashed."""
        huge = write(tmp_path / "huge", 3 * AHEAD_MIN_SIZE)
        paths = [huge, *(write(tmp_path / str(n), BUFFER_SIZE + 1, n) for n in range(20))]
        for each in hash_many(paths, STREAMED, threads=2):
            assert each.hashes is not None
            assert each.hashes.values == expected(each.path.read_bytes())

    @posix
    def test_a_file_that_cannot_be_hashed_is_a_result(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "fifo")
        (tmp_path / "loop").symlink_to("loop")
        good = write(tmp_path / "good", 100)
        paths = [tmp_path / "none", tmp_path, tmp_path / "fifo", tmp_path / "loop", good]
        found = {each.path: each for each in hash_many(paths, threads=2)}
        assert set(found) == set(paths)
        errors = {path.name: each.error for path, each in found.items() if each.error}
        assert isinstance(errors["none"], FileNotFoundError)
        assert isinstance(errors[tmp_path.name], FileSkippedError)
        assert isinstance(errors["fifo"], FileSkippedError)
        assert errors["loop"].errno == errno.ELOOP
        assert found[good].hashes == hash_file(good)[0]
        assert all(
            each.hashes is None and each.key is None for each in found.values() if each.error
        )

    @posix
    def test_a_large_file_that_changes_is_a_result(self, tmp_path: Path) -> None:
        path = aged(write(tmp_path / "file", 4 * BUFFER_SIZE))

        class Meddling(Watched):
            def advance(self, amount: int = 1) -> None:
                super().advance(amount)
                append(path)

        (found,) = hash_many([path], threads=2, progress=Meddling())
        assert isinstance(found.error, FileChangedError)
        assert found.error.__traceback__ is None

    def test_xet_too(self, tmp_path: Path) -> None:
        paths = [write(tmp_path / str(size), size) for size in (10, 10**6)]
        for each in hash_many(paths, ALL, threads=2):
            assert each.hashes == hash_file(each.path, ALL)[0]

    def test_an_unknown_algorithm_is_refused(self) -> None:
        with pytest.raises(BadDigestError):
            list(hash_many([], ["md5"], threads=1))  # type: ignore[list-item]

    def test_progress_is_in_bytes_and_complete(self, tmp_path: Path) -> None:
        sizes = [10, 4096, 10**6, 3 * 10**6, AHEAD_MIN_SIZE]
        paths = [write(tmp_path / str(size), size) for size in sizes]
        watched = Watched()
        list(hash_many(paths, threads=2, progress=watched, label="Looking"))
        assert watched.started == [("Looking", sum(sizes), "bytes")]
        assert watched.amount == sum(sizes)
        assert watched.is_closed

    @pytest.mark.parametrize("size", [10, 10**6])
    def test_an_error_of_the_progress_is_raised(self, tmp_path: Path, size: int) -> None:
        watched = Watched(ZeroDivisionError())
        with pytest.raises(ZeroDivisionError):
            list(hash_many([write(tmp_path / "file", size)], threads=2, progress=watched))
        assert watched.is_closed
        assert not hashing_threads()

    def test_closing_early_ends_the_threads(self, tmp_path: Path) -> None:
        paths = [sparse(tmp_path / name, ENDLESS) for name in ("a", "b", "c")]
        watched = Watched()
        found = hash_many(
            [write(tmp_path / "small", 1), *paths, write(tmp_path / "large", 10**6)],
            threads=4,
            progress=watched,
        )
        assert isinstance(found, Iterator)
        assert [next(found).path.name, next(found).path.name] == ["small", "large"]
        assert hashing_threads()
        found.close()  # type: ignore[attr-defined]
        assert not hashing_threads()
        assert watched.is_closed

    def test_an_iterator_that_is_dropped_ends_its_threads(self, tmp_path: Path) -> None:
        paths = [sparse(tmp_path / "endless", ENDLESS), write(tmp_path / "large", 10**6)]
        for each in hash_many(paths, threads=2):
            assert each.path.name == "large"
            break
        assert not hashing_threads()

    @posix
    @pytest.mark.parametrize("count", [1, 3])
    def test_ctrl_c_ends_the_threads(self, tmp_path: Path, count: int) -> None:
        code = (
            "import sys, threading; from smartcache.store.digest import hash_many\n"
            "print('ready', flush=True)\n"
            "try:\n"
            "    list(hash_many(sys.argv[1:], ('blake3', 'sha256'), threads=2))\n"
            "except KeyboardInterrupt:\n"
            "    print(threading.active_count(), 'thread')\n"
        )
        paths = [sparse(tmp_path / str(n), ENDLESS) for n in range(count)]
        assert interrupted(code, *paths, delay=0.5) == "1 thread"

    def test_python_can_exit_while_an_iterator_is_half_way(self, tmp_path: Path) -> None:
        """At exit Python joins all threads before it drops the iterator that would end them."""
        paths = [write(tmp_path / "small", 1), sparse(tmp_path / "endless", ENDLESS)]
        paths.append(write(tmp_path / "large", 10**6))
        code = (
            "import sys; from smartcache.store.digest import hash_many\n"
            "found = hash_many(sys.argv[1:], threads=2)\n"
            "next(found), next(found); print('exit')\n"
        )
        assert run(code, *paths).strip() == "exit"


class TestCheckHex:
    @pytest.mark.parametrize("algorithm", ALL)
    def test_lower_case_comes_back(self, algorithm: Algorithm) -> None:
        length = 40 if algorithm == "git-sha1" else 64
        assert check_hex(algorithm, "aB09" * (length // 4)) == "ab09" * (length // 4)

    @pytest.mark.parametrize(
        "text", ["", "ab", "a" * 63, "a" * 65, "g" * 64, "a" * 63 + "\n", " " + "a" * 63, "٣" * 64]
    )
    def test_anything_else_is_refused(self, text: str) -> None:
        with pytest.raises(BadDigestError):
            check_hex("blake3", text)

    def test_the_length_belongs_to_the_algorithm(self) -> None:
        with pytest.raises(BadDigestError, match="git-sha1") as caught:
            check_hex("git-sha1", "a" * 64)
        assert "40" in caught.value.hint

    def test_an_unknown_algorithm_is_refused(self) -> None:
        with pytest.raises(BadDigestError, match="md5"):
            check_hex("md5", "a" * 32)  # type: ignore[arg-type]


class TestValues:
    def test_survive_pickling(self, tmp_path: Path) -> None:
        (found,) = hash_many([write(tmp_path / "file", 10)], threads=1)
        again = pickled(found)
        assert again == found
        assert isinstance(again, Hashed)

    def test_a_digest_that_was_not_asked_for_is_a_key_error(self) -> None:
        with pytest.raises(KeyError):
            _ = Hashes(size=0, values={}).digest
