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

from tests.api import (
    BUFFER_SIZE,
    HEAD_SIZE,
    RACY_NS,
    TAIL_SIZE,
    Candidate,
    Learned,
    Settings,
    Store,
    What,
    learn,
    signed,
)
from tests.api import store_contents as contents
from tests.processes.children import Child, folder_of
from tests.store.files import OTHER, WEIGHTS, digest_of, edit, write

ANN, TEAM = 64001, 64000
BIG = 3 << 20


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
    memo = store.volume.index.memo(store.volume.filesystem, path.stat().st_ino)
    return None if memo is None else memo.values.get("blake3")


class TestValues:
    @pytest.mark.parametrize(
        "size",
        [1, 1000, BUFFER_SIZE - 1, BUFFER_SIZE, BUFFER_SIZE + 1, BIG, 33 << 20],
    )
    def test_digests_are_those_of_the_bytes(self, store: Store, folder: Path, size: int) -> None:
        data = (WEIGHTS * (size // len(WEIGHTS) + 1))[:size]
        paths = [write(folder / "a", data), write(folder / "b", data[:-1] + b"\0")]
        found = learned(store, *paths)
        expected = [digest_of(path.read_bytes()) for path in paths]
        assert values(store, found, paths) == expected
        assert [remembered(store, path) for path in paths] == expected
        assert found.size == 2 * size
        assert (found.busy, found.problems) == ([], [])

    @pytest.mark.parametrize(
        "size",
        [
            1, HEAD_SIZE - 1, HEAD_SIZE, HEAD_SIZE + 1, TAIL_SIZE, HEAD_SIZE + TAIL_SIZE - 1,
            HEAD_SIZE + TAIL_SIZE, HEAD_SIZE + TAIL_SIZE + 1, BIG,
        ],
    )  # fmt: skip
    def test_samples_are_of_head_and_tail(self, store: Store, folder: Path, size: int) -> None:
        data = (WEIGHTS * (size // len(WEIGHTS) + 1))[:size]
        path = write(folder / "a", data)
        found = learned(store, path, what="sample")
        tail = data[max(HEAD_SIZE, size - TAIL_SIZE) :]
        expected = xxh3_128(data[:HEAD_SIZE] + tail).hexdigest()
        assert values(store, found, [path]) == [expected]
        assert found.size == min(size, HEAD_SIZE + TAIL_SIZE)
        assert remembered(store, path) is None

    @pytest.mark.parametrize("threads", [1, 2, 8])
    def test_many_files_in_threads(self, tmp_path: Path, folder: Path, threads: int) -> None:
        paths = [
            write(folder / f"{number}", bytes([number]) * (1000 * number + 1))
            for number in range(60)
        ]
        paths.append(write(folder / "big", WEIGHTS * 20))
        settings = Settings(home=tmp_path / "store", threads=threads)
        with Store(tmp_path / "store", settings=settings) as store:
            found = learned(store, *paths)
            assert values(store, found, paths) == [digest_of(p.read_bytes()) for p in paths]

    def test_nothing_to_learn(self, store: Store) -> None:
        assert learned(store) == Learned()

    def test_the_bytes_hashed_are_told(self, store: Store, folder: Path) -> None:
        paths = [write(folder / "a", WEIGHTS), write(folder / "b", WEIGHTS * 30)]
        told: list[int] = []
        files = [candidate(store, path) for path in paths]
        learn(store.volume, files, "blake3", advance=told.append)
        assert sum(told) == 31 * len(WEIGHTS)

    @pytest.mark.parametrize("name", [b"line\nbreak", b"\xff\xfe"])
    def test_names_may_be_any_bytes(self, store: Store, folder: Path, name: bytes) -> None:
        path = write(folder / os.fsdecode(name))
        assert values(store, learned(store, path), [path]) == [digest_of(WEIGHTS)]
        path.unlink()
        file = Candidate(os.fsencode(path), 1, "f", 1, 0, 0, None, None)
        found = learn(store.volume, [file], "blake3", advance=lambda _: None)
        assert found.problems == [(os.fsencode(path), "No such file or directory")]


class TestLeftOut:
    @pytest.mark.parametrize("what", ["blake3", "sample"])
    @pytest.mark.parametrize("how", ["written", "mapped"])
    @pytest.mark.skipif(sys.platform != "linux", reason="only Linux has leases")
    def test_files_that_somebody_writes(
        self, store: Store, folder: Path, what: What, how: str
    ) -> None:
        path, other = write(folder / "a"), write(folder / "b", OTHER)
        with open(path, "r+b") as file:
            mapped = mmap.mmap(file.fileno(), 0) if how == "mapped" else None
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

    @pytest.mark.parametrize("what", ["blake3", "sample"])
    @pytest.mark.parametrize(
        "change",
        ["bytes", "size", "time set back", "mode", "replaced", "symlink", "pipe", "folder"],
    )
    def test_files_that_are_not_as_they_were_seen(
        self, store: Store, folder: Path, what: What, change: str
    ) -> None:
        path, good = write(folder / "a"), write(folder / "b")
        file = candidate(store, path)
        if change in ("bytes", "time set back"):
            edit(path)
        elif change == "size":
            path.write_bytes(WEIGHTS + b"x")
        elif change == "mode":
            path.chmod(0o600)
        else:
            path.rename(folder / "aside")
        if change == "time set back":
            os.utime(path, ns=(file.mtime_ns, file.mtime_ns))
        elif change == "replaced":
            write(path)
            os.utime(path, ns=(file.mtime_ns, file.mtime_ns))
        elif change == "symlink":
            path.symlink_to("aside")
        elif change == "pipe":
            os.mkfifo(path)
        elif change == "folder":
            path.mkdir()
        files = [file, candidate(store, good)]
        found = learn(store.volume, files, what, advance=lambda _: None)
        assert [name for name, _ in found.problems] == [os.fsencode(path)]
        assert len(found.values) == 1
        memo = store.volume.index.memo(file.filesystem, file.inode)
        assert memo is None

    @pytest.mark.parametrize("how", ["edited", "longer", "shorter"])
    def test_files_that_change_while_they_are_read(
        self, store: Store, folder: Path, how: str
    ) -> None:
        path = write(folder / "a", WEIGHTS * 20)

        def advance(_: int) -> None:
            if how == "edited":
                edit(path)
            else:
                os.truncate(path, len(WEIGHTS) * (21 if how == "longer" else 19))

        found = learn(store.volume, [candidate(store, path)], "blake3", advance=advance)
        assert (found.values, [name for name, _ in found.problems]) == ({}, [os.fsencode(path)])
        assert remembered(store, path) is None

    @pytest.mark.skipif(
        sys.platform == "win32" or os.geteuid() != 0, reason="only root can become other users"
    )
    @pytest.mark.parametrize("what", ["blake3", "sample"])
    def test_files_that_may_not_be_read(self, what: What) -> None:
        """Those of others that may be read are, though their access times cannot be kept."""
        with folder_of(ANN) as folder:
            paths = [write(folder / "closed", mode=0o600), write(folder / "open", mode=0o644)]

            def work() -> tuple[int, list[tuple[bytes, str]]]:
                with Store(folder / "store") as store:
                    found = learned(store, *paths, what=what)
                    return len(found.values), found.problems

            with Child(work, user=ANN, group=TEAM) as child:
                count, problems = child.result()
        assert (count, problems) == (1, [(os.fsencode(paths[0]), "Permission denied")])


@pytest.mark.parametrize("what", ["blake3", "sample"])
@pytest.mark.parametrize("size", [5000, BIG])
def test_access_times_stay(store: Store, folder: Path, what: What, size: int) -> None:
    """A scan must not make every file look recently used."""
    path = write(folder / "a", (WEIGHTS * 40)[:size])
    long_ago = 1_000_000_000
    os.utime(path, (long_ago, long_ago))
    learned(store, path, what=what)
    assert path.stat().st_atime == long_ago


class TestRacy:
    """A file that was younger than two seconds when it was read may change and show no trace."""

    @pytest.mark.parametrize(("age", "is_racy"), [(0, True), (RACY_NS / 1e9 + 1, False)])
    def test_young_files_are_marked(
        self,
        store: Store,
        folder: Path,
        pass_time: Callable[[float], None],
        age: float,
        is_racy: bool,
    ) -> None:
        path = write(folder / "a")
        pass_time(age)
        assert len(learned(store, path).values) == 1
        memo = store.volume.index.memo(store.volume.filesystem, path.stat().st_ino)
        assert memo is not None
        assert memo.is_racy == is_racy

    def test_the_age_is_that_when_reading_began(
        self, store: Store, folder: Path, pass_time: Callable[[float], None]
    ) -> None:
        path = write(folder / "a", WEIGHTS * 20)
        file = candidate(store, path)
        learn(store.volume, [file], "blake3", advance=lambda _: pass_time(60))
        memo = store.volume.index.memo(file.filesystem, file.inode)
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
        assert index._value("SELECT COUNT(*) FROM memos WHERE sample IS NULL AND racy = 0") == 1  # noqa: SLF001


def no_thread_is_left() -> bool:
    """One that was interrupted while it started may need a moment to end."""
    deadline = time.monotonic() + 10
    while [each for each in threading.enumerate() if each.name == "smartcache-read"]:
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
        for _ in range(5):
            told = 0
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
