"""What bytes a file has: remembered while nothing can have changed them, hashed where it could."""

from __future__ import annotations

import mmap
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from xxhash import xxh3_128

from smartcache.config import Settings
from smartcache.errors import FileSkippedError
from smartcache.store import hashes
from smartcache.store.catalog import RACY, FileRow, Known
from smartcache.store.hashes import (
    HEAD_SIZE,
    TAIL_SIZE,
    Candidate,
    Learned,
    Read,
    What,
    believed,
    boot_for,
    hash_all,
    learn,
)
from smartcache.store.store import Store
from smartcache.system.filesystems import filesystem_id
from smartcache.system.hashing import BUFFER_SIZE, Algorithm
from smartcache.system.kernel import StatKey, boot_id
from smartcache.system.sqlite import signed
from tests.processes.children import Child, folder_of
from tests.store.files import (
    OTHER,
    WEIGHTS,
    digest_of,
    edit,
    edit_with_time_set_back,
    row,
    sha256_of,
    write,
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX files")
PassTime = Callable[[float], None]
ANN, TEAM = 64001, 64000
BIG = 3 << 20
SECOND = 10**9
WHATS: tuple[What, ...] = ("digest", "sample")


@pytest.fixture
def path(folder: Path, pass_time: PassTime) -> Path:
    """A file that nobody has touched for ten seconds."""
    path = write(folder / "a.safetensors")
    pass_time(10)
    return path


def known(store: Store, path: Path) -> Known | None:
    inode = path.stat().st_ino
    return store.catalog.known(filesystem_id(path), [inode]).get(inode)


def is_read(store: Store, path: Path, *algorithms: Algorithm) -> bool:
    """Ask for the hashes of a file; say whether it was read for that."""
    told: list[int] = []
    found = store.digest_of(path, algorithms, advance=told.append)
    assert found.digest == digest_of(path.read_bytes())
    return sum(told) > 0


class TestBelieved:
    KEY = StatKey(100, 5_000, 6_000)

    def test_only_what_was_learned_of_the_same_size_and_times_in_this_boot(self) -> None:
        for boot, digest in (("", "d"), ("boot", "d"), ("another boot", ""), (RACY, "")):
            assert believed(Known(self.KEY, "d", boot), self.KEY, "boot") == digest, boot
        assert believed(None, self.KEY, "boot") == ""
        for other in ((99, 5_000, 6_000), (100, 4_999, 6_000), (100, 5_000, 6_001)):
            assert believed(Known(self.KEY, "d", ""), StatKey(*other), "boot") == "", other

    @pytest.mark.parametrize(
        ("mtime", "ctime", "more", "boot"),
        [
            (-7200, -7200, {}, ""), (-7200, -60, {}, "now"), (-60, -7200, {}, "now"),
            (-60, -60, {"is_durable": True}, ""), (-1, -60, {}, RACY), (-60, -1, {}, RACY),
            (-60, 1, {}, RACY), (-1, -1, {"is_durable": True}, RACY),
            # Archives set times in the future; a write sets another one, so the key shows it.
            (7200, -7200, {}, ""), (90, -60, {}, "now"),
            # Nobody knows who has the file open for writing.
            (-59, -59, {"lease": "unsupported"}, RACY), (-61, -61, {"lease": "unsupported"}, "now"),
        ],
    )  # fmt: skip
    def test_the_age_when_hashing_began_says_for_how_long(
        self, mtime: int, ctime: int, more: dict[str, object], boot: str
    ) -> None:
        now = 10**18
        key = StatKey(1, now + mtime * SECOND, now + ctime * SECOND)
        assert boot_for(key, now, **more) == boot.replace("now", boot_id())  # type: ignore[arg-type]

    def test_a_run_knows_what_it_has_read_and_is_as_it_was(self, store: Store, path: Path) -> None:
        read, st = Read(), path.stat()
        store.digest_of(path, read=read)
        place, key = (filesystem_id(path), st.st_ino), StatKey.of(st)
        assert read.digest_of(*place, key) == digest_of(WEIGHTS)
        assert read.digest_of(*place, key._replace(ctime_ns=0)) == ""
        assert read.digest_of("another", st.st_ino, key) == ""
        again = Read()
        store.digest_of(path, read=again)
        assert again.digest_of(*place, key) == "", "remembered is not read"


class TestRemembered:
    def test_a_file_that_stays_as_it_is_is_read_once(
        self, store: Store, path: Path, elsewhere: Path, pass_time: PassTime
    ) -> None:
        """By its inode, not its name; by the next process, and on any filesystem."""
        far = write(elsewhere / "a.bin")
        pass_time(10)
        assert is_read(store, path)
        assert is_read(store, far)
        (path.parent / "pointer").symlink_to(path)
        store.close()
        with Store(store.root) as again:
            for name in (path, path.parent / "pointer", far):
                assert not is_read(again, name), name

    def test_other_hashes_are_remembered_by_the_digest(self, store: Store, path: Path) -> None:
        assert store.known_hashes([path, path.parent / "missing"]) == {path: {}}
        store.digest_of(path)
        assert store.known_hashes([path])[path] == {"blake3": digest_of(WEIGHTS)}
        assert is_read(store, path, "sha256")
        both = {"blake3": digest_of(WEIGHTS), "sha256": sha256_of(WEIGHTS)}
        assert store.known_hashes([path])[path] == both
        twin = write(path.with_name("twin"), age=9000)
        assert is_read(store, twin)
        assert store.digest_of(twin, ["sha256"]).get("sha256") == sha256_of(WEIGHTS)

    def test_doubted_after_a_power_cut(self, store: Store, path: Path, pass_time: PassTime) -> None:
        boot = store.boot
        for is_old in (False, True):
            assert is_read(store, path) or is_old
            store.boot = "the next"
            assert is_read(store, path) != is_old
            store.boot = boot
            pass_time(4000)
            is_read(store, write(path, age=8000))

    def test_many_hashed_together(self, store: Store, folder: Path, pass_time: PassTime) -> None:
        """But those that cannot be believed: whoever uses them finds out why."""
        paths = [write(folder / f"{n}.bin", OTHER + bytes([n])) for n in range(4)]
        pass_time(10)
        assert is_read(store, paths[0])
        young = write(folder / "young", age=0)
        with paths[3].open("r+b"):
            found = hash_all(store, [*paths, young, folder / "missing"], ["sha256"])
        names = {path: path.read_bytes() for path in paths[:3]}
        assert {path: each.digest for path, each in found.items()} == {
            path: digest_of(data) for path, data in names.items()
        }
        assert not any(is_read(store, path, "sha256") for path in names)


def replace_with_time_set_back(path: Path) -> None:
    st = path.stat()
    os.replace(write(path.with_name("new"), b"x" * len(WEIGHTS)), path)
    os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))


CHANGES: dict[str, Callable[[Path], object]] = {
    "edited": edit,
    "grown": lambda path: edit(path, b"more", offset=len(WEIGHTS)),
    "truncated": lambda path: os.truncate(path, 10),
    "time set back": edit_with_time_set_back,
    "replaced": lambda path: os.replace(write(path.with_name("new"), OTHER), path),
    "replaced, time set back": replace_with_time_set_back,
    "mode": lambda path: path.chmod(0o600),
    "link": lambda path: os.link(path, path.with_name(f"{path.name} 2")),
    "time": os.utime,
}


class TestForgotten:
    """Whatever may have changed the bytes makes a file be read again."""

    def test_after_any_other_change(self, store: Store, folder: Path, pass_time: PassTime) -> None:
        paths = {name: write(folder / name) for name in CHANGES}
        pass_time(10)
        for name, path in paths.items():
            with row(name):
                assert (is_read(store, path), is_read(store, path)) == (True, False)
                CHANGES[name](path)
                assert is_read(store, path)

    def test_hashed_when_too_young(self, store: Store, folder: Path, pass_time: PassTime) -> None:
        """A second write within one tick of the clock would leave size and times as they are."""
        set_back = write(folder / "1000.bin", age=1000)  # nobody can set the change time back
        assert is_read(store, set_back)
        assert is_read(store, set_back)
        pass_time(3)
        assert (is_read(store, set_back), is_read(store, set_back)) == (True, False)
        young = write(folder / "0.bin", age=0)
        assert (is_read(store, young), is_read(store, young)) == (True, True)

    @pytest.mark.usefixtures("with_leases")
    def test_a_file_that_somebody_has_open_for_writing(self, store: Store, path: Path) -> None:
        """A page mapped writable can be written without any trace in stat."""
        with path.open("r+b"):
            assert is_read(store, path)
        assert known(store, path) is None

    @pytest.mark.usefixtures("no_leases")
    def test_young_without_a_lease(self, store: Store, folder: Path, pass_time: PassTime) -> None:
        path = write(folder / "a", age=30)
        pass_time(10)
        assert is_read(store, path)
        pass_time(30)
        assert (is_read(store, path), is_read(store, path)) == (True, False)

    def test_a_file_that_is_gone_or_none(self, store: Store, folder: Path) -> None:
        with pytest.raises(FileNotFoundError):
            store.digest_of(folder / "missing")
        os.mkfifo(folder / "fifo")
        for name in (folder / "fifo", folder):
            with row(name), pytest.raises(FileSkippedError):
                store.digest_of(name)


# many files, for a scan


def candidate(store: Store, path: Path) -> Candidate:
    """A file as a walk sees it now, and writes it down."""
    st, name = os.lstat(path), filesystem_id(path.parent)
    store.catalog.remember([FileRow.of(name, st)])
    number = store.catalog.filesystem_number(name)
    return Candidate(os.fsencode(path), number, signed(st.st_ino), StatKey.of(st))


def learned(
    store: Store, *files: Path | Candidate, what: What = "digest",
    advance: Callable[[int], object] = lambda _: None,
) -> Learned:  # fmt: skip
    found = [file if isinstance(file, Candidate) else candidate(store, file) for file in files]
    return learn(store, found, what, advance=advance)  # type: ignore[arg-type]


def values(store: Store, found: Learned, paths: Sequence[Path]) -> list[str]:
    number = store.catalog.filesystem_number(filesystem_id(paths[0]))
    return [found.values[number, signed(path.stat().st_ino)].hex() for path in paths]


def remembered(store: Store, path: Path) -> str:
    found = known(store, path)
    return "" if found is None else found.digest


def some_bytes(size: int) -> bytes:
    return (WEIGHTS * (size // len(WEIGHTS) + 1))[:size]


class TestLearned:
    @pytest.mark.parametrize("what", WHATS)
    def test_values_are_those_of_the_bytes(self, store: Store, folder: Path, what: What) -> None:
        both = HEAD_SIZE + TAIL_SIZE
        edges = (HEAD_SIZE, TAIL_SIZE, both, BUFFER_SIZE)
        for size in (1, *(edge + n for edge in edges for n in (-1, 0, 1)), BIG, 33 << 20):
            data, told = some_bytes(size), list[int]()
            paths = [write(folder / "a", data), write(folder / "b", data[:-1] + b"\0")]
            contents, tail = [path.read_bytes() for path in paths], max(HEAD_SIZE, size - TAIL_SIZE)
            with row(size):
                found = learned(store, *paths, what=what, advance=told.append)
                if what == "digest":
                    expected = [digest_of(each) for each in contents]
                    assert [remembered(store, path) for path in paths] == expected
                    assert found.size == sum(told) == 2 * size
                else:
                    ends = [each[:HEAD_SIZE] + each[tail:] for each in contents]
                    expected = [xxh3_128(each).hexdigest() for each in ends]
                    assert [remembered(store, path) for path in paths] == ["", ""]
                    assert found.size == 2 * min(size, both)
                assert values(store, found, paths) == expected
                assert (found.busy, found.problems) == ([], [])

    def test_many_files_in_threads(self, tmp_path: Path, folder: Path) -> None:
        paths = [write(folder / f"{n}", bytes([n]) * (1000 * n + 1)) for n in range(60)]
        paths += [write(folder / name, WEIGHTS * 20) for name in ("big", os.fsdecode(b"\xff\n"))]
        expected = [digest_of(path.read_bytes()) for path in paths]
        for threads in (1, 2, 8):
            settings = Settings(home=tmp_path / str(threads), threads=threads)
            with row(threads), Store(settings=settings) as store:
                assert values(store, learned(store, *paths), paths) == expected
                assert learned(store) == Learned()

    def test_access_times_stay(self, store: Store, folder: Path) -> None:
        """A scan must not make every file look recently used."""
        for size in (5000, BIG):
            for what in WHATS:
                path = write(folder / f"{size} {what}", some_bytes(size))
                os.utime(path, (10**9, 10**9))
                learned(store, path, what=what)
                assert path.stat().st_atime == 10**9, path

    def test_extended_attributes_are_noted(self, store: Store, folder: Path) -> None:
        """A link would lose them; plans need not look at each file for that."""
        path, other = write(folder / "a"), write(folder / "b", OTHER)
        try:
            os.setxattr(path, "user.note", b"mine")
        except OSError:
            pytest.skip("no extended attributes on this filesystem")
        file = candidate(store, path)
        found = learned(store, file, other)
        assert found.with_attributes == {(file.filesystem, file.inode)}

    def test_age_when_reading_began(self, store: Store, folder: Path, pass_time: PassTime) -> None:
        path = write(folder / "a", WEIGHTS * 20)
        for is_racy in (True, False):
            learned(store, path, advance=lambda _: pass_time(60))
            found = known(store, path)
            assert found is not None
            assert (found.boot == RACY) == is_racy


def become(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def act(path: Path) -> None:
        path.rename(path.with_name(f"{path.name} aside"))
        make(path)

    return act


OTHERS: dict[str, Callable[[Path], object]] = {
    "gone": Path.unlink,
    "symlink": become(lambda path: path.symlink_to("aside")),
    "pipe": become(os.mkfifo),
    "folder": become(Path.mkdir),
}


class TestLeftOut:
    @pytest.mark.usefixtures("with_leases")
    @pytest.mark.parametrize("is_mapped", [False, True])
    @pytest.mark.parametrize("what", WHATS)
    def test_files_that_somebody_writes(
        self, store: Store, folder: Path, what: What, is_mapped: bool
    ) -> None:
        path, other = write(folder / "a"), write(folder / "b", OTHER)
        with open(path, "r+b") as file, ExitStack() as stack:
            if is_mapped:
                stack.enter_context(mmap.mmap(file.fileno(), 0))
                file.close()
            found = learned(store, path, other, what=what)
        assert (found.busy, found.problems) == ([os.fsencode(path)], [])
        assert len(found.values) == 1
        assert remembered(store, path) == ""

    @pytest.mark.usefixtures("no_leases")
    def test_without_leases_nobody_can_tell(self, store: Store, folder: Path) -> None:
        path = write(folder / "a")
        with open(path, "r+b"):
            assert values(store, learned(store, path), [path]) == [digest_of(WEIGHTS)]

    def test_a_writer_who_comes_is_not_made_to_wait(self, store: Store, folder: Path) -> None:
        """No lease is held while a large file is read."""
        path = write(folder / "a", WEIGHTS * 20)
        learned(store, path, advance=lambda _: os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK)))

    @pytest.mark.parametrize("what", WHATS)
    def test_files_not_as_they_were_seen(self, store: Store, folder: Path, what: What) -> None:
        good = write(folder / "good")
        for name, change in (CHANGES | OTHERS).items():
            with row(name):
                path = write(folder / os.fsdecode(os.fsencode(name) + b"\xff\n"))
                file, st = candidate(store, path), path.stat()
                change(path)
                found = learned(store, file, good, what=what)
                assert [name for name, _ in found.problems] == [os.fsencode(path)]
                assert len(found.values) == 1
                assert store.catalog.known(filesystem_id(folder), [st.st_ino]) == {}

    def test_files_that_change_while_they_are_read(self, store: Store, folder: Path) -> None:
        path = folder / "a"
        longer, shorter = (partial(os.truncate, length=len(WEIGHTS) * n) for n in (21, 19))
        for change in (edit, longer, shorter):
            write(path, WEIGHTS * 20)
            with row(change):
                found = learned(store, path, advance=lambda _, act=change: act(path))  # type: ignore[misc]
                assert found.values == {}
                assert [name for name, _ in found.problems] == [os.fsencode(path)]
                assert remembered(store, path) == ""

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


class TestInterrupted:
    @pytest.fixture
    def files(self, folder: Path, pass_time: PassTime) -> list[Path]:
        paths = [write(folder / f"{number}", WEIGHTS * 3) for number in range(30)]
        pass_time(60)
        return paths

    @pytest.mark.parametrize("how", [KeyboardInterrupt, ZeroDivisionError])
    def test_what_was_learned_is_kept_and_the_threads_end(
        self, store: Store, files: list[Path], how: type[BaseException]
    ) -> None:
        """By Ctrl-C or an error in a thread, which is raised itself, not what ended the others."""
        told = 0

        def advance(count: int) -> None:
            nonlocal told
            told += count
            if told > 10 * len(WEIGHTS) * 3:
                if how is ZeroDivisionError:
                    raise ZeroDivisionError
                signal.raise_signal(signal.SIGINT)

        with pytest.raises(how):
            learned(store, *files, advance=advance)
        assert 0 < sum(remembered(store, path) != "" for path in files) <= 30
        for thread in threading.enumerate():  # one interrupted while it started may still be there
            if thread.name == "smartcache-hash":
                thread.join(10)
                assert not thread.is_alive()
        assert len(learned(store, *files).values) == 30

    def test_a_thread_that_ends_does_not_hide_why(self, tmp_path: Path, files: list[Path]) -> None:
        both, raised = threading.Barrier(2), threading.Event()

        def advance(_: int) -> None:
            if not raised.is_set() and both.wait(20) == 0:
                raised.set()
                raise ZeroDivisionError
            assert raised.wait(20)

        settings = Settings(home=tmp_path / "store", threads=2)
        large = [write(path, WEIGHTS * 90) for path in files[:2]]
        with Store(settings=settings) as store, pytest.raises(ZeroDivisionError):
            learned(store, *large, advance=advance)

    def test_what_was_learned_is_written_while_the_rest_is_read(
        self, store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(hashes, "_FLUSH_SECONDS", 0)
        small = [write(folder / f"{number}", bytes(number + 1)) for number in range(5)]
        seen: list[int] = []

        def advance(_: int) -> None:
            with Store(store.root) as other:
                seen.append(sum(remembered(other, path) != "" for path in small))

        learned(store, *small, advance=advance)
        assert seen == [0, 1, 2, 3, 4]
