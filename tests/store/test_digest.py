"""Hashes are right whatever way the bytes come, and never those of a file that changed."""

from __future__ import annotations

import array
import errno
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
from functools import lru_cache, partial
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smartcache.errors import (
    BadDigestError,
    FileChangedError,
    FileSkippedError,
    SizeMismatchError,
)
from smartcache.system.hashing import (
    AHEAD_MIN_SIZE,
    BUFFER_SIZE,
    Algorithm,
    Hasher,
    Hashes,
    check_hex,
    hash_file,
    hash_many,
)
from smartcache.system.kernel import StatKey
from tests.processes.children import Child
from tests.store.files import (
    Watch,
    digest_of,
    edit,
    edit_with_time_set_back,
    git_sha1_of,
    row,
    sha256_of,
)

ALL: tuple[Algorithm, ...] = get_args(Algorithm)
ENDLESS = 1 << 40
"""Size of a sparse file that takes minutes to hash: who waits for it meets the timeout."""

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


@lru_cache(maxsize=16)
def some_bytes(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def write(path: Path, size: int, seed: int = 0) -> Path:
    """Write a file with times that no change of now can have by chance."""
    path.write_bytes(some_bytes(size, seed))
    os.utime(path, (1_000_000_000, 1_000_000_000))
    return path


def sparse(path: Path, size: int = ENDLESS) -> Path:
    with path.open("wb") as stream:
        stream.truncate(size)
    return path


def expected(data: bytes, algorithms: Iterable[Algorithm] = ALL) -> dict[Algorithm, str]:
    every = {"blake3": digest_of, "sha256": sha256_of, "git-sha1": git_sha1_of}
    return {name: every[name](data) for name in algorithms}


def hashing_threads() -> list[threading.Thread]:
    names = ("smartcache-hash", "smartcache-read")
    return [thread for thread in threading.enumerate() if thread.name.startswith(names)]


class Watched(Watch):
    is_closed = False

    def close(self) -> None:
        self.is_closed = True


def test_hashes_are_those_that_other_programs_know(tmp_path: Path) -> None:
    known = {
        "blake3": "ea8f163db38682925e4491c5e58d4bb3506ef8c14eb78a86e908c5624a67200f",
        "sha256": "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824",
        "git-sha1": "b6fc4c620b67d95f953a5c1c1230aaab5db5a1b0",
    }
    (tmp_path / "file").write_bytes(b"hello")
    hashes, key = hash_file(tmp_path / "file", ALL)
    assert hashes.values == known
    assert hashes.size == key.size == 5
    path = write(tmp_path / "large", 5_000_000)
    command = ["git", "hash-object", "--no-filters", str(path)]
    git = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    assert hash_file(path, ["git-sha1"])[0].values == {"git-sha1": git}


class TestHashFile:
    def test_every_size_and_thread_count_gives_the_same(self, tmp_path: Path) -> None:
        """Every two of size, algorithms and threads meet."""
        sizes = (0, BUFFER_SIZE - 1, BUFFER_SIZE, BUFFER_SIZE + 1, AHEAD_MIN_SIZE - 1,
                 AHEAD_MIN_SIZE + 12345)  # fmt: skip
        wanted: tuple[tuple[Algorithm, ...], ...] = (
            ("blake3",), ("sha256",), ("git-sha1", "blake3"), ALL
        )  # fmt: skip
        for number, size in enumerate(sizes):
            path = write(tmp_path / "file", size)
            right = expected(some_bytes(size))
            for column, algorithms in enumerate(wanted):
                threads = (1, 2, 3, 8)[(number + column) % 4]
                with row(size, algorithms, threads):
                    told: list[int] = []
                    hashes, key = hash_file(path, algorithms, threads=threads, advance=told.append)
                    assert hashes == Hashes(
                        size=size, values={name: right[name] for name in algorithms}
                    )
                    assert key == StatKey.of(path.stat())
                    assert sum(told) == size
        assert not hashing_threads()

    def test_blake3_is_the_default_and_an_algorithm_may_be_named_twice(
        self, tmp_path: Path
    ) -> None:
        path, right = write(tmp_path / "file", 1000), expected(some_bytes(1000))
        hashes, _ = hash_file(path)
        assert hashes.values == {"blake3": hashes.digest} == {"blake3": right["blake3"]}
        twice: Iterator[Algorithm] = iter(["sha256", "sha256"])
        assert hash_file(path, twice)[0].values == {"sha256": right["sha256"]}

    def test_any_name_does_and_a_symlink_is_followed(self, tmp_path: Path) -> None:
        right = hash_file(write(tmp_path / "file", 1000), ALL)
        path = os.fsencode(tmp_path) + b"/caf\xe9 \xff\n"
        os.symlink(b"file", path)
        for form in (path, os.fsdecode(path), Path(os.fsdecode(path))):
            assert hash_file(form, ALL) == right, form

    def test_a_descriptor_is_neither_moved_nor_closed_and_needs_no_name(
        self, tmp_path: Path
    ) -> None:
        for size, threads in ((100, 1), (AHEAD_MIN_SIZE, 1), (AHEAD_MIN_SIZE, 2)):
            path = write(tmp_path / "file", size)
            right = hash_file(path, ALL)[0]
            with row(size, threads), path.open("rb", buffering=0) as stream:
                stream.seek(7)
                path.unlink()
                hashes, key = hash_file(stream.fileno(), ALL, threads=threads)
                assert stream.tell() == 7
                assert (hashes, key) == (right, StatKey.of(os.fstat(stream.fileno())))


class TestOtherThanFiles:
    def test_is_skipped_without_waiting(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Errors of the system keep number and name."""
        monkeypatch.chdir(tmp_path)  # the path of a socket must be short
        os.mkfifo("fifo")
        descriptor = os.open("fifo", os.O_RDONLY | os.O_NONBLOCK)
        for thing in (tmp_path, "fifo", Path("/dev/zero"), descriptor):
            with row(thing), pytest.raises(FileSkippedError, match="not a regular") as caught:
                hash_file(thing)
            assert caught.value.reason == "not a regular file"
            assert vars(caught.value)["path"] == thing
        os.close(descriptor)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("socket")
            for name, code in (("socket", errno.ENXIO), ("none", errno.ENOENT)):
                with pytest.raises(OSError) as failed:  # noqa: PT011 - the errno is checked
                    hash_file(name)
                assert (failed.value.errno, failed.value.filename) == (code, name)

    @linux
    def test_a_file_with_more_than_its_size_says_is_never_hashed(self, tmp_path: Path) -> None:
        """Files of /proc have size 0 and content; no error leaves a descriptor open."""
        before = os.listdir("/proc/self/fd")
        with pytest.raises(FileChangedError):
            hash_file("/proc/self/status")
        for path in (tmp_path, tmp_path / "none"):
            with pytest.raises(OSError):  # noqa: PT011 - which one is tested above
                hash_file(path)
        assert os.listdir("/proc/self/fd") == before

    def test_an_unknown_algorithm_is_refused_by_all(self, tmp_path: Path) -> None:
        path = write(tmp_path / "file", 1)
        attempts: tuple[Callable[[], object], ...] = (
            lambda: hash_file(path, ["md5"]),  # type: ignore[list-item]
            lambda: list(hash_many([], ["md5"], threads=1)),  # type: ignore[list-item]
            lambda: Hasher(["md5"]),  # type: ignore[list-item]
            lambda: check_hex("md5", "a" * 32),  # type: ignore[arg-type]
        )
        for number, attempt in enumerate(attempts):
            with row(number), pytest.raises(BadDigestError, match="md5") as caught:
                attempt()
            assert "sha256" in caught.value.hint


def append(path: Path) -> None:
    with path.open("ab") as stream:
        stream.write(b"x")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


class TestChange:
    def test_while_reading_is_an_error(self, tmp_path: Path) -> None:
        changes: list[Callable[[Path], None]]
        changes = [append, cut, edit, edit_with_time_set_back, os.unlink]
        sizes = (100, 4 * BUFFER_SIZE, AHEAD_MIN_SIZE + BUFFER_SIZE)
        for number, (size, change) in enumerate(itertools.product(sizes, changes)):
            path, threads = write(tmp_path / "file", size), 1 + number % 2
            once = iter([partial(change, path)])

            def advance(_: int, once: Iterator[Callable[[], None]] = once) -> None:
                for act in once:
                    act()

            with row(change, size, threads), pytest.raises(FileChangedError) as caught:
                hash_file(path, advance=advance, threads=threads)
            assert vars(caught.value)["path"] == path
            assert caught.value.reason == "changed"
        assert not hashing_threads()
        again = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 - our own
        assert str(again) == f"{path} changed while it was read"
        assert vars(again)["path"] == path


class TestInterruption:
    def test_a_hash_that_fails_in_its_thread_is_an_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Failing:
            def update(self, _: memoryview) -> None:
                raise MemoryError

        monkeypatch.setattr(hashlib, "sha256", Failing)
        with pytest.raises(MemoryError):
            hash_file(sparse(tmp_path / "file", AHEAD_MIN_SIZE), ["sha256"], threads=2)
        assert not hashing_threads()

    def test_a_signal_handler_may_hash_another_file(self, tmp_path: Path) -> None:
        """It runs between a read and the hash of what was read, and must not share the buffer."""
        inner = write(tmp_path / "inner", BUFFER_SIZE, seed=1)
        for size in (BUFFER_SIZE, 8 * BUFFER_SIZE):
            outer = write(tmp_path / "outer", size)
            found: list[str] = []
            note = found.append
            handler = signal.signal(
                signal.SIGALRM, lambda *_, note=note: note(hash_file(inner)[0].digest)
            )
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
                digests = set()
                while len(found) < 300:
                    digests.add(hash_file(outer)[0].digest)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, handler)
            assert digests == {digest_of(some_bytes(size))}, size
            assert set(found) == {digest_of(inner.read_bytes())}, size

    def test_a_forked_child_has_a_buffer_of_its_own(self, tmp_path: Path) -> None:
        ours = write(tmp_path / "ours", 8 * BUFFER_SIZE)
        theirs = write(tmp_path / "theirs", 8 * BUFFER_SIZE, seed=1)

        def hashes(path: Path) -> set[str]:
            return {hash_file(path)[0].digest for _ in range(100)}

        hash_file(ours)  # makes this thread's buffer
        with Child(lambda: hashes(theirs)) as child:
            assert hashes(ours) == {digest_of(ours.read_bytes())}
            assert child.result() == {digest_of(theirs.read_bytes())}


class TestHasher:
    @given(chunks=st.lists(st.binary(max_size=3000), max_size=20))
    def test_any_chunking_gives_the_hashes_of_the_whole(self, chunks: list[bytes]) -> None:
        whole = b"".join(chunks)
        hasher = Hasher(ALL, size=len(whole))
        for chunk in chunks:
            hasher.update(chunk)
        assert hasher.finish() == Hashes(size=len(whole), values=expected(whole))

    def test_every_kind_of_buffer_counts_in_bytes_and_is_let_go(self) -> None:
        numbers = array.array("I", range(1000))
        grid = memoryview(bytes(range(24))).cast("B", (4, 6))
        gaps = memoryview(bytes(range(100)))[::3]
        own = bytearray(b"abc")
        hasher = Hasher(["blake3"])
        for buffer in (numbers, grid, gaps, own, memoryview(b""), array.array("d")):
            hasher.update(buffer)
        whole = numbers.tobytes() + bytes(range(24)) + bytes(range(0, 100, 3)) + b"abc"
        assert hasher.finish() == Hashes(size=len(whole), values=expected(whole, ["blake3"]))
        own.extend(b"d")  # BufferError while anybody holds a view

    def test_what_a_stream_cannot_give_needs_a_file(self) -> None:
        for size, needed in ((0, ()), (None, ("git-sha1",))):
            hasher = Hasher(("blake3", "git-sha1"), size=size)
            assert hasher.needs_file == needed
            assert {*hasher.finish().values, *needed} == {"blake3", "git-sha1"}

    def test_another_size_than_announced_is_an_error(self) -> None:
        for arrived in (b"ab", b"abcd"):
            hasher = Hasher(["git-sha1"], size=3)
            hasher.update(arrived)
            with row(arrived), pytest.raises(SizeMismatchError) as caught:
                hasher.finish()
            error = vars(caught.value)
            assert (error["expected"], error["found"]) == (3, len(arrived))


class TestHashMany:
    def test_every_file_comes_once_with_its_hashes(self, tmp_path: Path) -> None:
        """A huge one gets several threads while the others are still being hashed."""
        sizes = [0, 1, 4096, BUFFER_SIZE, BUFFER_SIZE + 1, 10**6, AHEAD_MIN_SIZE + 1]
        paths = [write(tmp_path / str(seed), size, seed) for seed, size in enumerate(sizes)]
        right = {path: (expected(path.read_bytes()), StatKey.of(path.stat())) for path in paths}
        for threads in (0, 1, 2, 5):
            with row(threads):
                found = list(hash_many(iter(paths), ALL, threads=threads))
                assert sorted(each.path for each in found) == paths
                for each in found:
                    assert each.hashes is not None
                    assert (each.hashes.values, each.key) == right[each.path]
                assert not hashing_threads()

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
        assert {(each.hashes, each.key) for each in found.values() if each.error} == {(None, None)}

    def test_progress_is_in_bytes_and_complete_and_the_largest_file_is_first_of_the_large(
        self, tmp_path: Path
    ) -> None:
        sizes = [10, 4096, 10**6, 3 * 10**6, AHEAD_MIN_SIZE]
        paths = [write(tmp_path / str(size), size) for size in sizes]
        watched = Watched()
        found = [
            each.key.size for each in hash_many(paths, threads=1, progress=watched) if each.key
        ]
        assert found == [10, 4096, AHEAD_MIN_SIZE, 3 * 10**6, 10**6]
        assert (watched.labels, watched.unit) == (["Hashing"], "bytes")
        assert watched.done == watched.total == sum(sizes)
        assert watched.is_closed

    def test_an_error_of_the_progress_and_ctrl_c_are_raised(self, tmp_path: Path) -> None:
        paths = [write(tmp_path / "small", 10), sparse(tmp_path / "a"), sparse(tmp_path / "b")]
        ways: tuple[tuple[Callable[[], object], type[BaseException]], ...] = (
            (lambda: 1 / 0, ZeroDivisionError),
            (lambda: signal.raise_signal(signal.SIGINT), KeyboardInterrupt),
        )
        for (act, error), some in itertools.product(ways, (paths[:1], paths[1:2], paths[1:])):
            watched = Watched(act)
            with row(error, len(some)), pytest.raises(error):
                list(hash_many(some, ("blake3", "sha256"), threads=2, progress=watched))
            assert watched.is_closed
            assert not hashing_threads()

    def test_closing_or_dropping_it_early_ends_the_threads(self, tmp_path: Path) -> None:
        paths = [sparse(tmp_path / name) for name in ("a", "b", "c")]
        paths += [write(tmp_path / "small", 1), write(tmp_path / "large", 10**6)]
        watched = Watched()
        found = hash_many(paths, threads=4, progress=watched)
        assert isinstance(found, Iterator)
        assert [next(found).path.name, next(found).path.name] == ["small", "large"]
        assert hashing_threads()
        found.close()  # type: ignore[attr-defined]
        assert not hashing_threads()
        assert watched.is_closed
        for each in hash_many(paths[2:], threads=2):
            assert each.path.name == "small"
            break
        assert not hashing_threads()

    def test_python_can_exit_while_an_iterator_is_half_way(self, tmp_path: Path) -> None:
        """At exit Python joins all threads before it drops the iterator that would end them."""
        paths = [write(tmp_path / "small", 1), sparse(tmp_path / "endless")]
        paths.append(write(tmp_path / "large", 10**6))
        code = (
            f"import sys; from {hash_many.__module__} import hash_many\n"
            "found = hash_many(sys.argv[1:], threads=2)\n"
            "next(found), next(found); print('exit')\n"
        )
        command = [sys.executable, "-c", code, *map(str, paths)]
        done = subprocess.run(command, check=True, capture_output=True, timeout=100)
        assert done.stdout == b"exit\n"


def test_a_hash_is_taken_in_either_case_and_anything_else_is_refused() -> None:
    for algorithm in ALL:
        length = 40 if algorithm == "git-sha1" else 64
        assert check_hex(algorithm, "aB09" * (length // 4)) == "ab09" * (length // 4)
    wrong = ("", "ab", "a" * 63, "a" * 65, "g" * 64, "a" * 63 + "\n", " " + "a" * 63, "٣" * 64)
    for text in wrong:
        with row(repr(text)), pytest.raises(BadDigestError):
            check_hex("blake3", text)
    with pytest.raises(BadDigestError, match="git-sha1") as caught:
        check_hex("git-sha1", "a" * 64)
    assert "40" in caught.value.hint
