"""The journal: written before anything is touched, and as precious as what it tells of."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smartcache.config import Settings
from smartcache.errors import LockTimeoutError, NoSpaceError
from smartcache.store.journal import Batch, Change, How
from smartcache.store.store import Store
from smartcache.system.filesystems import Mounts
from tests.processes.children import Child
from tests.store.files import (
    WEIGHTS,
    AtPoint,
    adopt,
    dedup,
    killed,
    mode_of,
    row,
    snapshot,
    undo,
    write,
)
from tests.store.small_disks import PAGE, Disk, in_own_namespace

if sys.platform != "linux":
    pytest.skip("hard links and leases", allow_module_level=True)

Used = Callable[[], Path]
NAMES = [b"\xff\xfe", b'quote " and \\', b"new\nline", "模型".encode(), b"\x01\x7f", b" ", b"-",
         b".hidden", b"%41", b"'; --", b"x" * 255]  # fmt: skip
numbers = st.integers(0, (1 << 64) - 1)
names = st.binary(min_size=1, max_size=200).filter(lambda name: not set(name) & set(b"/\0"))


def rows_of(store: Store) -> int:
    return store.journal.number("SELECT COUNT(*) FROM changes")


class TestRows:
    def test_files_of_any_name_are_changed_and_given_back(self, store: Store, folder: Path) -> None:
        paths = [write(folder / os.fsdecode(name)) for name in NAMES]
        before = snapshot(folder)
        assert {each.outcome for each in dedup(store, *paths)} == {"became", "linked"}
        store.close()
        with Store(store.root) as again:
            assert {change.path for change in again.plan_undo().changes} == set(paths)
            assert undo(again) == []
        assert snapshot(folder) == before

    @settings(max_examples=settings().max_examples // 8)
    @given(
        name=names, temporary=names, how=st.sampled_from(get_args(How)), inode=numbers,
        folder=numbers, mtime_ns=st.integers(-(1 << 62), (1 << 63) - 1),
        xattrs=st.sampled_from(["{}", '{"user.note": "006d696e65ff", "user.empty": ""}']),
    )  # fmt: skip
    def test_a_row_comes_back_as_it_was_written(
        self, name: bytes, temporary: bytes, **fields: object
    ) -> None:
        with tempfile.TemporaryDirectory() as place, Store(Path(place) / "store") as store:
            path = Path(os.path.realpath(place)) / os.fsdecode(name)
            change = Change(path=path, digest="ab" * 32, size=3, mode=0o640, gid=100, links=2,
                            temporary=os.fsdecode(temporary), **fields)  # type: ignore[arg-type]  # fmt: skip
            store.journal.begin(Batch("test"), [change], Mounts())
            store.close()
            with Store(store.root) as again:
                (read,) = again.journal.open_changes(Mounts())
            assert asdict(read) == asdict(change)

    def test_on_disk_before_a_name_moves(
        self, store: Store, folder: Path, at_point: AtPoint
    ) -> None:
        """Every commit is synced; whoever reads the file then sees the row."""
        path = write(folder / "a.safetensors", mode=0o664)
        before, seen = snapshot(folder), list[tuple[str, int, int]]()

        def look() -> None:
            with closing(sqlite3.connect(store.layout.journal)) as journal:
                seen.extend(journal.execute("SELECT state, mode, size FROM changes"))
            assert snapshot(folder) == before

        at_point("journal: begun", look)
        adopt(store, path)
        assert seen == [("begun", 0o664, len(WEIGHTS))]
        assert store.journal.select("PRAGMA synchronous") == [(2,)], "that is: FULL"

    def test_if_it_cannot_be_written_the_file_is_not_touched(self, tmp_path: Path) -> None:
        def work() -> None:
            disk = Disk(tmp_path / "disk", 500 * PAGE)
            path = write(disk.point / "models" / "a.bin", mode=0o664)
            with Store(disk.point / "store") as store:
                adopt(store, write(disk.point / "models" / "first.bin", b"first"))
                before, changed = snapshot(path.parent), path.stat().st_ctime_ns
                history = store.history()
                disk.fill()
                with pytest.raises(NoSpaceError):
                    adopt(store, path)
                disk.clear()
                assert (snapshot(path.parent), path.stat().st_ctime_ns) == (before, changed)
                assert store.history() == history

        in_own_namespace(work)


class TestHistory:
    def test_a_batch_is_one_entry_however_it_ends(self, store: Store, folder: Path) -> None:
        """Of calls in it, of threads, and when its process was killed."""
        paths = [write(folder / f"{n}.bin") for n in range(4)]
        before = snapshot(folder)

        def work() -> None:
            with store.batch("killed") as batch:
                for path in paths[:3]:
                    dedup(store, path, batch=batch)

        killed(work, "exchanged", 2)
        with Store(store.root) as again, again.batch("whole") as batch:
            for path in (paths[3], paths[2]):
                dedup(again, path, batch=batch)
        with Store(store.root) as again:
            first, second = again.history()
            assert (first.label, second.label) == ("killed", "whole")
            assert (first.changes, second.changes) in ((2, 2), (3, 1))
            assert (second.hows, second.size) == (("exchange",), len(WEIGHTS) * second.changes)
            assert first.at <= second.at
            assert first.at.tzinfo is not None
            assert undo(again) == []
        assert snapshot(folder) == before

    def test_undone_rows_go_with_the_last_of_their_batch(self, store: Store, folder: Path) -> None:
        for label in ("one", "two"):
            paths = [write(folder / label / f"{n}.bin") for n in range(3)]
            with store.batch(label) as batch:
                dedup(store, *paths, batch=batch)
        store.plan_undo(paths=[folder / "one" / "1.bin"]).execute()
        assert [(each.label, each.changes) for each in store.history()] == [("one", 2), ("two", 3)]
        assert rows_of(store) == 6
        store.plan_undo([store.history()[0].id]).execute()
        assert [(each.label, each.changes) for each in store.history()] == [("two", 3)]
        assert rows_of(store) == 3


@pytest.fixture
def files(folder: Path) -> Path:
    for number in range(90):
        write(folder / f"{number}.bin", (number // 3).to_bytes(2), mode=0o664)
    return folder


@pytest.fixture
def used(tmp_path: Path, files: Path) -> Used:
    """Roots of stores that have changed these files in three batches, closed."""
    with Store(tmp_path / "store") as store:
        for beginning in "1", "2", "":
            dedup(store, *(path for path in files.iterdir() if path.name.startswith(beginning)))
        assert len(store.history()) == 3

    def copy() -> Path:
        root = tmp_path / "store"
        for name in ("journal.sqlite3", "journal.copy"):
            saved = tmp_path / f"saved {name}"
            if saved.exists():
                shutil.copyfile(saved, root / name)
            else:
                shutil.copyfile(root / name, saved)
        return root

    return copy


def in_bad(root: Path) -> list[Path]:
    """Journals that were set aside, without what SQLite keeps beside them."""
    return [path for path in root.glob("bad/*") if not path.name.endswith("-journal")]


def pages(journal: Path) -> Iterator[tuple[str, bytes]]:
    """The journal with each page zeroed, and cut in several ways."""
    whole = journal.read_bytes()
    for start in range(0, len(whole), 4096):
        yield f"zeroed at {start}", whole[:start] + bytes(4096) + whole[start + 4096 :]
    for end in (100, 4096, len(whole) // 2, len(whole) - 4096, len(whole) - 1):
        yield f"cut at {end}", whole[:end]
    yield "garbage", random.Random(3).randbytes(len(whole))
    yield "empty", b""


NONSENSE = [
    "how = 'of the future'", "state = 'never heard of'", "inode = 'x'", "size = x'00'",
    "path = 5", "path = x'2f7800'", "digest = '../../x'", "digest = 3", "mode = 'rw'",
    "temporary = '../../x'", "temporary = CAST('../../x' AS BLOB)", "xattrs = '{'",
    """xattrs = '["a"]'""", """xattrs = '{"user.a": "zz"}'""", """xattrs = '{"user.a": 3}'""",
    "label = CAST(x'fffe' AS TEXT)", "mtime_ns = 1.5", "folder = 'x'",
]  # fmt: skip


class TestDamage:
    def test_the_copy_takes_its_place(self, used: Used, caplog: pytest.LogCaptureFixture) -> None:
        """A damaged one goes to `bad/`."""
        root = used()
        with Store(root) as store:
            history = store.history()
        for name, data in pages(root / "journal.sqlite3"):
            with row(name), Store(used()) as store:
                store.layout.journal.write_bytes(data)
                caplog.clear()
                assert store.history() == history
                assert in_bad(root) or store.layout.journal.read_bytes() == data
                warnings = [text for text in caplog.messages if "journal is damaged" in text]
                assert len(warnings) == len(in_bad(root))
                for each in in_bad(root):
                    assert str(each) in warnings[0]
                    assert each.read_bytes()[28:] == data[28:], "all but who opened it last"
                shutil.rmtree(root / "bad", ignore_errors=True)

    def test_rows_of_nonsense_are_damage_too(self, used: Used, files: Path) -> None:
        before = snapshot(files)
        for nonsense in NONSENSE:
            root = used()
            with closing(sqlite3.connect(root / "journal.sqlite3")) as journal, journal:
                journal.execute(f"UPDATE changes SET {nonsense} WHERE id = 40")  # noqa: S608 - ours
            with row(nonsense), Store(root) as store:
                assert [batch.changes for batch in store.history()] == [11, 11, 68]
                assert len(in_bad(root)) == 1
                assert len(store.plan_undo().changes) == 90
                shutil.rmtree(root / "bad", ignore_errors=True)
        assert snapshot(files) == before
        with Store(root) as store:
            assert undo(store) == []
        assert {mode_of(path) for path in files.iterdir()} == {0o664}

    def test_bits_that_flip_stop_nothing(self, used: Used, rounds: Callable[[int], int]) -> None:
        """What a row says may be wrong then, as after any lie of a disk; undo looks at the disk."""
        chance = random.Random(5)
        for number in range(rounds(30)):
            root = used()
            data = bytearray((root / "journal.sqlite3").read_bytes())
            for _ in range(4):
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            (root / "journal.sqlite3").write_bytes(data)
            with row(number), Store(root) as store:
                store.history()
                store.plan_undo(paths=[root.parent], recursive=True)
                store.recover()

    def test_with_a_damaged_copy_a_new_one_is_begun(self, used: Used, files: Path) -> None:
        root = used()
        for name in ("journal.sqlite3", "journal.copy"):
            (root / name).write_bytes(b"garbage" * 4096)
        with Store(root) as store:
            assert store.history() == []
            assert len(in_bad(root)) == 2
            new = write(files / "new.bin")
            adopt(store, new)
            store.plan_undo(paths=[files], recursive=True).execute()
        assert {mode_of(path) & 0o200 for path in files.iterdir()} == {0o200}

    def test_it_is_mended_under_the_lock(self, used: Used) -> None:
        root = used()
        (root / "journal.sqlite3").write_bytes(b"garbage" * 4096)

        def mend() -> str:
            with Store(settings=Settings(home=root, lock_timeout=0)) as store:
                try:
                    return str(len(store.history()))
                except LockTimeoutError as error:
                    return type(error).__name__

        with Store(root) as store:
            with store.locked("test"), Child(mend) as child:
                assert child.result() == "LockTimeoutError"
            assert in_bad(root) == []
            with Child(mend) as child:
                assert child.result() == "3"

    def test_a_power_cut_may_leave_all_small_files_empty(self, used: Used, files: Path) -> None:
        root = used()
        for name in ("format", "lock", "journal.sqlite3", "journal.copy", "index.sqlite3",
                     "blobs/CACHEDIR.TAG"):  # fmt: skip
            (root / name).write_bytes(b"")
        with Store(root) as store:
            assert store.history() == []
            assert len(list(store.blobs())) == 30
            adopt(store, write(files / "new.bin"))
            assert undo(store) == []
