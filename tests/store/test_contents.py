"""Samples and digests of many files: what is read, what is left out, and what is remembered."""

from __future__ import annotations

import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from xxhash import xxh3_128

from smartcache.config import Settings
from smartcache.store import hashes as contents
from smartcache.store.catalog import Candidate
from smartcache.store.hashes import HEAD_SIZE, TAIL_SIZE, Learned, What, learn
from smartcache.store.store import Store
from smartcache.system.hashing import BUFFER_SIZE
from smartcache.system.kernel import RACY_NS
from smartcache.system.sqlite import signed
from tests.processes.children import Child, folder_of
from tests.store.files import (
    OTHER,
    WEIGHTS,
    digest_of,
    edit,
    edit_with_time_set_back,
    row,
    write,
)

ANN, TEAM = 64001, 64000
BIG = 3 << 20
WHATS: tuple[What, ...] = ("blake3", "sample")


def candidate(store: Store, path: Path) -> Candidate:
    """A file as a walk sees it now."""
    st = os.lstat(path)
    return Candidate(
        os.fsencode(path), st.st_size, store.volume.filesystem, signed(st.st_ino), st.st_mtime_ns,
        st.st_ctime_ns, None, None,
    )  # fmt: skip


def learned(store: Store, *paths: Path, what: What = "blake3") -> Learned:
    files = [candidate(store, path) for path in paths]
    return learn(store.volume, files, what, advance=lambda _: None)


def values(store: Store, found: Learned, paths: Sequence[Path]) -> list[str]:
    keys = [(store.volume.filesystem, signed(path.stat().st_ino)) for path in paths]
    return [found.values[key].hex() for key in keys]


def remembered(store: Store, path: Path) -> str | None:
    memo = store.catalog.memos(store.volume.filesystem, [path.stat().st_ino]).get(
        path.stat().st_ino
    )
    return None if memo is None else memo.digest


def some_bytes(size: int) -> bytes:
    return (WEIGHTS * (size // len(WEIGHTS) + 1))[:size]


class TestValues:
    def test_digests_are_those_of_the_bytes_and_are_remembered(
        self, store: Store, folder: Path
    ) -> None:
        for size in (1, 1000, BUFFER_SIZE - 1, BUFFER_SIZE, BUFFER_SIZE + 1, BIG, 33 << 20):
            data = some_bytes(size)
            paths = [write(folder / "a", data), write(folder / "b", data[:-1] + b"\0")]
            with row(size):
                told: list[int] = []
                files = [candidate(store, path) for path in paths]
                found = learn(store.volume, files, "blake3", advance=told.append)
                expected = [digest_of(path.read_bytes()) for path in paths]
                assert values(store, found, paths) == expected
                assert [remembered(store, path) for path in paths] == expected
                assert found.size == sum(told) == 2 * size
                assert (found.busy, found.problems) == ([], [])

    def test_samples_are_of_head_and_tail(self, store: Store, folder: Path) -> None:
        both = HEAD_SIZE + TAIL_SIZE
        for size in (1, HEAD_SIZE - 1, HEAD_SIZE, HEAD_SIZE + 1, TAIL_SIZE, both - 1, both,
                     both + 1, BIG):  # fmt: skip
            data = some_bytes(size)
            path = write(folder / str(size), data)
            with row(size):
                found = learned(store, path, what="sample")
                tail = data[max(HEAD_SIZE, size - TAIL_SIZE) :]
                expected = xxh3_128(data[:HEAD_SIZE] + tail).hexdigest()
                assert values(store, found, [path]) == [expected]
                assert found.size == min(size, both)
                assert remembered(store, path) is None

    def test_many_files_in_threads(self, tmp_path: Path, folder: Path) -> None:
        paths = [write(folder / f"{n}", bytes([n]) * (1000 * n + 1)) for n in range(60)]
        paths.append(write(folder / "big", WEIGHTS * 20))
        expected = [digest_of(path.read_bytes()) for path in paths]
        for threads in (1, 2, 8):
            settings = Settings(home=tmp_path / str(threads), threads=threads)
            with row(threads), Store(settings=settings) as store:
                assert values(store, learned(store, *paths), paths) == expected
                assert learned(store) == Learned()

    def test_names_may_be_any_bytes(self, store: Store, folder: Path) -> None:
        for name in (b"line\nbreak", b"\xff\xfe"):
            path = write(folder / os.fsdecode(name))
            file = candidate(store, path)
            assert values(store, learned(store, path), [path]) == [digest_of(WEIGHTS)]
            path.unlink()
            found = learn(store.volume, [file], "blake3", advance=lambda _: None)
            assert found.problems == [(os.fsencode(path), "No such file or directory")]


def replace_with_its_times(path: Path) -> None:
    st = path.stat()
    write(path.with_name("new"), OTHER + WEIGHTS[len(OTHER) :]).replace(path)
    os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))


def become(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def act(path: Path) -> None:
        path.rename(path.with_name("aside"))
        make(path)

    return act


CHANGES: dict[str, Callable[[Path], object]] = {
    "bytes": edit,
    "time set back": edit_with_time_set_back,
    "size": lambda path: path.write_bytes(WEIGHTS + b"x"),
    "mode": lambda path: path.chmod(0o600),
    "replaced": replace_with_its_times,
    "symlink": become(lambda path: path.symlink_to("aside")),
    "pipe": become(os.mkfifo),
    "folder": become(Path.mkdir),
}


class TestLeftOut:
    @pytest.mark.skipif(sys.platform != "linux", reason="only Linux has leases")
    def test_files_that_somebody_writes(self, store: Store, folder: Path) -> None:
        path, other = write(folder / "a"), write(folder / "b", OTHER)
        for what in WHATS:
            for is_mapped in (False, True):
                with row(what, is_mapped), open(path, "r+b") as file:
                    mapped = mmap.mmap(file.fileno(), 0) if is_mapped else None
                    if mapped is not None:
                        file.close()
                    found = learned(store, path, other, what=what)
                    if mapped is not None:
                        mapped.close()
                    assert (found.busy, found.problems) == ([os.fsencode(path)], [])
                    assert len(found.values) == 1
                    assert remembered(store, path) is None

    @pytest.mark.usefixtures("no_leases")
    def test_without_leases_nobody_can_tell(self, store: Store, folder: Path) -> None:
        path = write(folder / "a")
        with open(path, "r+b"):
            assert values(store, learned(store, path), [path]) == [digest_of(WEIGHTS)]

    def test_a_writer_who_comes_is_not_made_to_wait(self, store: Store, folder: Path) -> None:
        """No lease is held while a file is read."""
        path = write(folder / "a", WEIGHTS * 20)
        waited: list[float] = []

        def advance(_: int) -> None:
            if not waited:
                began = time.monotonic()
                with open(path, "r+b"):
                    waited.append(time.monotonic() - began)

        learn(store.volume, [candidate(store, path)], "blake3", advance=advance)
        assert waited[0] < 5

    def test_files_that_are_not_as_they_were_seen(self, store: Store, folder: Path) -> None:
        good = write(folder / "good")
        for what in WHATS:
            for name, change in CHANGES.items():
                with row(what, name):
                    path = write(folder / f"{what} {name}")
                    file = candidate(store, path)
                    change(path)
                    files = [file, candidate(store, good)]
                    found = learn(store.volume, files, what, advance=lambda _: None)
                    assert [name for name, _ in found.problems] == [os.fsencode(path)]
                    assert len(found.values) == 1
                    assert (
                        store.catalog.memos(file.filesystem, [file.inode]).get(file.inode) is None
                    )

    def test_files_that_change_while_they_are_read(self, store: Store, folder: Path) -> None:
        path = folder / "a"
        changes: dict[str, Callable[[], object]] = {
            "edited": lambda: edit(path),
            "longer": lambda: os.truncate(path, len(WEIGHTS) * 21),
            "shorter": lambda: os.truncate(path, len(WEIGHTS) * 19),
        }
        for name, change in changes.items():
            write(path, WEIGHTS * 20)
            with row(name):
                file = candidate(store, path)
                found = learn(store.volume, [file], "blake3", advance=lambda _, act=change: act())  # type: ignore[misc]
                assert found.values == {}
                assert [name for name, _ in found.problems] == [os.fsencode(path)]
                assert remembered(store, path) is None

    @pytest.mark.skipif(
        sys.platform == "win32" or os.geteuid() != 0, reason="only root can become other users"
    )
    def test_files_that_may_not_be_read(self) -> None:
        """Those of others that may be read are, though their access times cannot be kept."""
        with folder_of(ANN) as folder:
            paths = [write(folder / "closed", mode=0o600), write(folder / "open", mode=0o644)]

            def work() -> list[tuple[int, list[tuple[bytes, str]]]]:
                with Store(folder / "store") as store:
                    found = [learned(store, *paths, what=what) for what in WHATS]
                    return [(len(each.values), each.problems) for each in found]

            with Child(work, user=ANN, group=TEAM) as child:
                found = child.result()
        assert found == [(1, [(os.fsencode(paths[0]), "Permission denied")])] * 2


def test_access_times_stay(store: Store, folder: Path) -> None:
    """A scan must not make every file look recently used."""
    long_ago = 1_000_000_000
    for size in (5000, BIG):
        for what in WHATS:
            path = write(folder / f"{size} {what}", some_bytes(size))
            os.utime(path, (long_ago, long_ago))
            learned(store, path, what=what)
            assert path.stat().st_atime == long_ago, path


class TestRacy:
    """A file that was younger than two seconds when it was read may change and show no trace."""

    def test_young_files_are_marked(
        self, store: Store, folder: Path, pass_time: Callable[[float], None]
    ) -> None:
        path = write(folder / "a")
        for age, is_racy in ((0, True), (RACY_NS / 1e9 + 1, False)):
            pass_time(age)
            assert len(learned(store, path).values) == 1
            memo = store.catalog.memos(store.volume.filesystem, [path.stat().st_ino]).get(
                path.stat().st_ino
            )
            assert memo is not None
            assert memo.is_racy == is_racy

    def test_the_age_is_that_when_reading_began(
        self, store: Store, folder: Path, pass_time: Callable[[float], None]
    ) -> None:
        path = write(folder / "a", WEIGHTS * 20)
        file = candidate(store, path)
        learn(store.volume, [file], "blake3", advance=lambda _: pass_time(60))
        memo = store.catalog.memos(file.filesystem, [file.inode]).get(file.inode)
        assert memo is not None
        assert memo.is_racy

    def test_a_digest_of_a_racy_file_does_not_vouch_for_what_was_known(
        self, store: Store, folder: Path, pass_time: Callable[[float], None]
    ) -> None:
        path = write(folder / "a")
        learned(store, path, what="sample")
        pass_time(60)
        learned(store, path)
        index = store.volume.index
        assert index.number("SELECT COUNT(*) FROM memos WHERE sample IS NULL AND racy = 0") == 1


def no_thread_is_left() -> bool:
    """One that was interrupted while it started may need a moment to end."""
    deadline = time.monotonic() + 10
    while [each for each in threading.enumerate() if each.name == "smartcache-hash"]:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


class TestInterruption:
    @pytest.fixture
    def files(self, folder: Path, pass_time: Callable[[float], None]) -> list[Path]:
        paths = [write(folder / f"{number}", WEIGHTS * 3) for number in range(30)]
        pass_time(60)
        return paths

    def test_ctrl_c_keeps_what_was_learned(self, store: Store, files: list[Path]) -> None:
        done = threading.Event()
        told = 0

        def advance(count: int) -> None:
            nonlocal told
            told += count
            if told > 10 * len(WEIGHTS) * 3 and not done.is_set():
                done.set()
                os.kill(os.getpid(), signal.SIGINT)
            elif done.is_set():
                time.sleep(0.05)

        candidates = [candidate(store, path) for path in files]
        with pytest.raises(KeyboardInterrupt):
            learn(store.volume, candidates, "blake3", advance=advance)
        kept = sum(remembered(store, path) is not None for path in files)
        assert 8 <= kept < 30
        assert no_thread_is_left()
        assert len(learned(store, *files).values) == 30

    def test_an_error_in_a_thread_is_raised_and_what_was_learned_is_kept(
        self, store: Store, files: list[Path]
    ) -> None:
        """The error itself, not what ended the other threads."""
        told = 0

        def advance(count: int) -> None:
            nonlocal told
            told += count
            if told > 10 * len(WEIGHTS) * 3:
                raise ZeroDivisionError

        candidates = [candidate(store, path) for path in files]
        with pytest.raises(ZeroDivisionError):
            learn(store.volume, candidates, "blake3", advance=advance)
        assert any(remembered(store, path) for path in files)
        assert no_thread_is_left()

    def test_the_first_error_is_the_one_that_is_raised(
        self, tmp_path: Path, files: list[Path]
    ) -> None:
        """A thread that is ended in the middle of a file does not hide why."""
        both = threading.Barrier(2)

        def advance(_: int) -> None:
            if both.wait(20) == 0:
                raise ZeroDivisionError
            time.sleep(0.2)

        settings = Settings(home=tmp_path / "store", threads=2)
        with Store(tmp_path / "store", settings=settings) as store:
            candidates = [candidate(store, path) for path in files[:2]]
            with pytest.raises(ZeroDivisionError):
                learn(store.volume, candidates, "blake3", advance=advance)

    def test_what_was_learned_is_written_while_the_rest_is_read(
        self, store: Store, files: list[Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(contents, "_FLUSH_SECONDS", 0.05)
        seen = 0

        def advance(_: int) -> None:
            nonlocal seen
            time.sleep(0.02)
            with Store(store.root) as other:
                seen = max(seen, sum(remembered(other, path) is not None for path in files))

        candidates = [candidate(store, path) for path in files]
        learn(store.volume, candidates, "blake3", advance=advance)
        assert seen > 0
