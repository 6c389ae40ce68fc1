"""What is remembered of files: believed while nothing can have changed them, and no longer."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from smartcache.errors import FileSkippedError
from smartcache.store.records import Memo, judge
from smartcache.store.store import Store
from smartcache.system.filesystems import filesystem_id
from smartcache.system.kernel import StatKey
from smartcache.system.sqlite import signed
from tests.store.files import (
    OTHER,
    WEIGHTS,
    digest_of,
    edit,
    edit_with_time_set_back,
    inode_of,
    row,
    sha256_of,
    write,
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX files")
PassTime = Callable[[float], None]
TOLD = "ee" * 32
"""A digest that no bytes have: who gives it has not read the file."""


@pytest.fixture
def path(folder: Path, pass_time: PassTime) -> Path:
    """A file that nobody has touched for ten seconds."""
    path = write(folder / "a.safetensors")
    pass_time(10)
    return path


def memo_of(store: Store, path: Path) -> Memo:
    memo = store.catalog.memos(filesystem_id(path), [inode_of(path)]).get(inode_of(path))
    assert memo is not None
    return memo


def tell(store: Store, path: Path) -> None:
    """Have a file hashed, and let its memo say something else than its bytes do."""
    assert store.digest_of(path).digest == digest_of(path.read_bytes())
    memo = memo_of(store, path)
    place = (filesystem_id(path), signed(inode_of(path)))
    store.catalog.learn([(*place, *memo.key, int(memo.is_racy), bytes.fromhex(TOLD), None)])


class TestRemembered:
    def test_a_file_that_stays_as_it_is_is_read_once(self, store: Store, path: Path) -> None:
        """By its inode, not its name; by the next process too. What is adopted is read."""
        tell(store, path)
        (path.parent / "pointer").symlink_to(path)
        store.close()
        with Store(store.root) as again:
            for name in (path, path.parent / "pointer"):
                assert again.digest_of(name).digest == TOLD, name
            (adoption,) = again.adopt_many([path])
            assert adoption.digest == digest_of(path.read_bytes())

    def test_files_of_other_filesystems_are_remembered_too(
        self, store: Store, elsewhere: Path, pass_time: PassTime
    ) -> None:
        far = write(elsewhere / "a.bin")
        pass_time(10)
        tell(store, far)
        assert store.digest_of(far).digest == TOLD

    def test_another_algorithm_is_added_to_what_is_known(self, store: Store, path: Path) -> None:
        """Every hash comes with the digest: other hashes are remembered by it."""
        store.digest_of(path)
        assert store.known_hashes([path])[path] == {"blake3": digest_of(WEIGHTS)}
        found = store.digest_of(path, ["sha256"])
        assert (found.digest, found.get("sha256")) == (digest_of(WEIGHTS), sha256_of(WEIGHTS))
        assert store.known_hashes([path])[path] == dict(found.values)
        tell(store, path)
        assert store.known_hashes([path])[path] == {"blake3": TOLD}

    def test_an_adopted_file_is_known_by_its_blob(self, store: Store, path: Path) -> None:
        store.adopt(path, algorithms=["sha256"])
        assert store.digest_of(path, ["blake3", "sha256"]).digest == digest_of(WEIGHTS)
        assert store.digest_of(path).get("sha256") is not None

    def test_many_files_hashed_together_are_remembered_each(
        self, store: Store, folder: Path, pass_time: PassTime
    ) -> None:
        paths = [write(folder / f"{n}.bin", OTHER + bytes([n])) for n in range(4)]
        pass_time(10)
        assert len(list(store.adopt_many(paths))) == 4
        for path in paths:
            assert memo_of(store, path).digest == digest_of(path.read_bytes())


def replace_with_time_set_back(path: Path) -> None:
    st = path.stat()
    os.replace(write(path.with_name("new"), b"x" * len(WEIGHTS)), path)
    os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))


class TestForgotten:
    """Whatever may have changed the bytes makes a file be read again."""

    def test_a_file_or_its_stat_that_was_changed(
        self, store: Store, folder: Path, pass_time: PassTime
    ) -> None:
        changes: dict[str, Callable[[Path], object]] = {
            "edited": edit,
            "grown": lambda path: edit(path, b"more", offset=len(WEIGHTS)),
            "truncated": lambda path: os.truncate(path, 10),
            "time set back": edit_with_time_set_back,
            "replaced": lambda path: os.replace(write(path.with_name("new"), OTHER), path),
            "replaced, time set back": replace_with_time_set_back,
            "mode": lambda path: path.chmod(0o600),
            "link": lambda path: os.link(path, path.with_name("second")),
            "time": os.utime,
        }
        paths = {name: write(folder / name) for name in changes}
        pass_time(10)
        for name, change in changes.items():
            with row(name):
                tell(store, paths[name])
                change(paths[name])
                assert store.digest_of(paths[name]).digest == digest_of(paths[name].read_bytes())

    def test_a_file_written_less_than_two_seconds_before_it_was_hashed(
        self, store: Store, folder: Path, pass_time: PassTime
    ) -> None:
        """A second write within one tick of the clock would leave size and times as they are.

        Whoever sets the modification time back cannot set the change time.
        """
        for age in (0, 1000):
            with row(age):
                young = write(folder / f"{age}.bin", age=age)
                tell(store, young)
                assert memo_of(store, young).is_racy
                assert store.digest_of(young).digest == digest_of(WEIGHTS)
        pass_time(3)
        store.digest_of(young)
        assert not memo_of(store, young).is_racy

    @pytest.mark.usefixtures("with_leases")
    def test_a_file_that_somebody_has_open_for_writing(self, store: Store, path: Path) -> None:
        """A page mapped writable can be written without any trace in stat."""
        with path.open("r+b"):
            assert store.digest_of(path).digest == digest_of(WEIGHTS)
        assert store.catalog.memos(filesystem_id(path), [inode_of(path)]) == {}

    def test_a_file_that_is_gone_or_none(self, store: Store, folder: Path) -> None:
        with pytest.raises(FileNotFoundError):
            store.digest_of(folder / "missing")
        os.mkfifo(folder / "fifo")
        for name in (folder / "fifo", folder):
            with row(name), pytest.raises(FileSkippedError):
                store.digest_of(name)


class TestStatKey:
    def test_only_the_same_size_and_times_are_the_same(self) -> None:
        """Another change time means a look at the bytes, even if another link explains it."""
        rows = [
            (100, 5_000, 6_000, 1, True), (100, 5_000, 6_000, 2, True),
            (100, 5_000, 6_001, 2, False), (100, 5_000, 6_001, 0, False),
            (100, 5_000, 6_001, 1, False), (100, 5_001, 6_001, 2, False),
            (101, 5_000, 6_001, 2, False), (100, 4_999, 6_000, 1, False),
            (99, 5_000, 6_000, 1, False),
        ]  # fmt: skip
        for size, mtime, ctime, links, is_same in rows:
            fields = (0o100444, 1, 1, links, 0, 0, size, 0, 0, 0)
            current = os.stat_result(fields, {"st_mtime_ns": mtime, "st_ctime_ns": ctime})
            found = judge(StatKey(100, 5_000, 6_000), 1, current)
            assert (found == "same") is is_same, (size, mtime, ctime, links, found)

    def test_the_newest_time_decides_whether_a_key_is_racy(self) -> None:
        """Archives set times in the future; a write sets another one, so the key shows it."""
        second = 1_000_000_000
        rows = [(0, 0, False), (8, 0, False), (0, 8, False), (9, 0, True), (0, 9, True),
                (11, 0, True), (99, 0, False), (0, 99, True)]  # fmt: skip
        for mtime, ctime, is_racy in rows:
            key = StatKey(1, mtime * second, ctime * second)
            assert key.is_racy(10 * second) == is_racy, (mtime, ctime)
