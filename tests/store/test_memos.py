from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.api import FileSkippedError, Memo, StatKey, Store, filesystem_id, judge, probe
from tests.store.files import OTHER, WEIGHTS, digest_of, edit, inode_of, write

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


def memo_of(store: Store, path: Path) -> Memo | None:
    return store.volume.index.memo(filesystem_id(path), inode_of(path))


def tell(store: Store, path: Path) -> None:
    """Let the memo of a file say something else than its bytes do."""
    memo = memo_of(store, path)
    assert memo is not None
    lie = Memo(key=memo.key, is_racy=memo.is_racy, values={**memo.values, "blake3": TOLD})
    store.volume.index.put_memo(filesystem_id(path), inode_of(path), lie)


def time_set_back(path: Path, act: Callable[[Path], None]) -> None:
    st = path.stat()
    act(path)
    os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))


class TestRemembered:
    def test_a_file_that_stays_as_it_is_is_read_once(self, store: Store, path: Path) -> None:
        assert store.digest_of(path).digest == digest_of(WEIGHTS)
        tell(store, path)
        assert store.digest_of(path).digest == TOLD

    def test_it_is_remembered_by_the_next_process(self, store: Store, path: Path) -> None:
        store.digest_of(path)
        tell(store, path)
        store.close()
        with Store(store.root) as again:
            assert again.digest_of(path).digest == TOLD

    def test_it_is_known_by_its_inode_not_by_its_name(self, store: Store, path: Path) -> None:
        store.digest_of(path)
        tell(store, path)
        (path.parent / "pointer").symlink_to(path)
        assert store.digest_of(path.parent / "pointer").digest == TOLD

    def test_files_of_other_filesystems_are_remembered_too(
        self, store: Store, elsewhere: Path, pass_time: PassTime
    ) -> None:
        far = write(elsewhere / "a.bin")
        pass_time(10)
        assert store.digest_of(far).digest == digest_of(WEIGHTS)
        tell(store, far)
        assert store.digest_of(far).digest == TOLD

    def test_another_algorithm_is_added_to_what_is_known(self, store: Store, path: Path) -> None:
        store.digest_of(path)
        tell(store, path)
        hashes = store.digest_of(path, ["sha256"])
        assert hashes.get("sha256") == hashlib.sha256(WEIGHTS).hexdigest()
        memo = memo_of(store, path)
        assert memo is not None
        assert memo.values == {"blake3": TOLD, "sha256": hashes.get("sha256")}
        assert store.digest_of(path, ["blake3", "sha256"]).digest == TOLD

    def test_adopting_uses_it(self, store: Store, path: Path) -> None:
        store.digest_of(path)
        tell(store, path)
        (adoption,) = store.adopt_many([path])
        assert adoption.digest == TOLD

    def test_an_adopted_file_is_known_by_its_blob(self, store: Store, path: Path) -> None:
        store.adopt(path, algorithms=["sha256"])
        assert store.digest_of(path, ["blake3", "sha256"]).digest == digest_of(WEIGHTS)
        assert store.digest_of(path).get("sha256") is not None

    def test_many_files_hashed_together_are_remembered_each(
        self, store: Store, folder: Path, pass_time: PassTime
    ) -> None:
        contents = [OTHER + bytes([n]) for n in range(4)]
        paths = [write(folder / f"{n}.bin", data) for n, data in enumerate(contents)]
        pass_time(10)
        assert len(list(store.adopt_many(paths))) == 4
        for path, data in zip(paths, contents, strict=True):
            memo = memo_of(store, path)
            assert memo is not None
            assert memo.values == {"blake3": digest_of(data)}


class TestForgotten:
    """Whatever may have changed the bytes makes a file be read again."""

    @pytest.mark.parametrize(
        "change",
        [
            edit,
            lambda path: edit(path, b"more", offset=len(WEIGHTS)),
            lambda path: os.truncate(path, 10),
            lambda path: time_set_back(path, edit),
            lambda path: os.replace(write(path.with_name("new"), OTHER), path),
            lambda path: time_set_back(
                path, lambda p: os.replace(write(p.with_name("new"), b"x" * len(WEIGHTS)), p)
            ),
        ],
        ids=["edited", "grown", "truncated", "time set back", "replaced", "replaced, time set"],
    )
    def test_a_file_that_was_changed(
        self, store: Store, path: Path, change: Callable[[Path], None]
    ) -> None:
        store.digest_of(path)
        change(path)
        assert store.digest_of(path).digest == digest_of(path.read_bytes())

    @pytest.mark.parametrize(
        "touch",
        [
            lambda path: path.chmod(0o600),
            lambda path: os.link(path, path.with_name("second")),
            os.utime,
        ],
        ids=["mode", "link", "time"],
    )
    def test_a_file_whose_stat_was_changed(
        self, store: Store, path: Path, touch: Callable[[Path], None]
    ) -> None:
        store.digest_of(path)
        tell(store, path)
        touch(path)
        assert store.digest_of(path).digest == digest_of(WEIGHTS)

    def test_a_file_written_less_than_two_seconds_before_it_was_hashed(
        self, store: Store, folder: Path
    ) -> None:
        """A second write within one tick of the clock would leave size and times as they are."""
        young = write(folder / "young.bin", age=0)
        store.digest_of(young)
        memo = memo_of(store, young)
        assert memo is not None
        assert memo.is_racy
        tell(store, young)
        assert store.digest_of(young).digest == digest_of(WEIGHTS)

    def test_a_file_whose_time_is_old_but_whose_change_is_young(
        self, store: Store, folder: Path
    ) -> None:
        """Whoever sets the modification time back cannot set the change time."""
        young = write(folder / "young.bin", age=1000)
        store.digest_of(young)
        memo = memo_of(store, young)
        assert memo is not None
        assert memo.is_racy

    def test_a_racy_memo_becomes_a_good_one_when_the_file_has_aged(
        self, store: Store, folder: Path, pass_time: PassTime
    ) -> None:
        young = write(folder / "young.bin", age=0)
        store.digest_of(young)
        pass_time(3)
        store.digest_of(young)
        memo = memo_of(store, young)
        assert memo is not None
        assert not memo.is_racy

    def test_a_file_that_somebody_has_open_for_writing(self, store: Store, path: Path) -> None:
        """A page mapped writable can be written without any trace in stat."""
        if not probe(path.parent).lease:
            pytest.skip("no leases on this filesystem")
        with path.open("r+b"):
            assert store.digest_of(path).digest == digest_of(WEIGHTS)
        assert memo_of(store, path) is None

    def test_a_time_in_the_future_does_not_mean_hashing_for_ever(
        self, store: Store, path: Path
    ) -> None:
        """Archives set such times; a write sets another one, so the key shows it."""
        os.utime(path, (4e9, 4e9))
        store.digest_of(path)
        memo = memo_of(store, path)
        assert memo is not None
        assert not memo.key.is_racy(memo.key.ctime_ns + 3_000_000_000)

    def test_a_file_that_is_gone_or_none(self, store: Store, folder: Path) -> None:
        with pytest.raises(FileNotFoundError):
            store.digest_of(folder / "missing")
        os.mkfifo(folder / "fifo")
        for name in (folder / "fifo", folder):
            with pytest.raises(FileSkippedError):
                store.digest_of(name)


class TestStatKey:
    BASE = (100, 5_000, 6_000)

    def stat(self, size: int, mtime: int, ctime: int, links: int = 1) -> os.stat_result:
        fields = (0o100444, 1, 1, links, 0, 0, size, 0, 0, 0)
        return os.stat_result(fields, {"st_mtime_ns": mtime, "st_ctime_ns": ctime})

    @pytest.mark.parametrize(
        ("size", "mtime", "ctime", "links", "verdict"),
        [
            (100, 5_000, 6_000, 1, "same"),
            (100, 5_000, 6_000, 2, "same"),
            (100, 5_000, 6_001, 2, "relinked"),
            (100, 5_000, 6_001, 0, "relinked"),
            (100, 5_000, 6_001, 1, "suspect"),
            (100, 5_001, 6_001, 2, "suspect"),
            (101, 5_000, 6_001, 2, "suspect"),
            (100, 4_999, 6_000, 1, "suspect"),
            (99, 5_000, 6_000, 1, "suspect"),
        ],
    )
    def test_only_another_link_count_explains_another_change_time(
        self, size: int, mtime: int, ctime: int, links: int, verdict: str
    ) -> None:
        current = self.stat(size, mtime, ctime, links)
        found = judge(recorded=StatKey(*self.BASE), recorded_links=1, current=current)
        assert found == verdict

    @pytest.mark.parametrize(
        ("mtime", "ctime", "racy"),
        [
            (0, 0, False),
            (8, 0, False),
            (0, 8, False),
            (9, 0, True),
            (0, 9, True),
            (11, 0, True),
            (99, 0, False),
            (0, 99, True),
        ],
    )
    def test_the_newest_time_decides_whether_a_key_is_racy(
        self, mtime: int, ctime: int, racy: bool
    ) -> None:
        second = 1_000_000_000
        key = StatKey(1, mtime * second, ctime * second)
        assert key.is_racy(10 * second) == racy
