"""One SQLite file and many threads, processes and forks: opened, written, copied, damaged."""

from __future__ import annotations

import os
import sqlite3
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest

from smartcache.errors import (
    IndexDamagedError,
    LockTimeoutError,
    StoreError,
    StoreFormatError,
    StoreUnwritableError,
)
from smartcache.system.sqlite import Database
from tests.processes.children import Child
from tests.store.files import row

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE rows (id INTEGER PRIMARY KEY, parent INTEGER REFERENCES rows (id) ON DELETE CASCADE);
"""


class Table(Database):
    schema: ClassVar[str] = SCHEMA
    schema_version: ClassVar[int] = 3


class Precious(Table):
    journal_mode: ClassVar[str] = "TRUNCATE"
    synchronous: ClassVar[str] = "FULL"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "table.sqlite3"


@pytest.fixture
def table(path: Path) -> Iterator[Table]:
    with closing(Table(path)) as table:
        yield table


def pragma(table: Database, name: str) -> object:
    return table.select(f"PRAGMA {name}")[0][0]


def set_version(path: Path, version: int) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {version}")


class TestOpening:
    def test_it_is_made_for_its_user_alone(self, table: Table) -> None:
        table.set_meta("x", "1")
        for name in os.listdir(table.path.parent):
            assert (table.path.parent / name).stat().st_mode & 0o777 == 0o600

    def test_the_journal_is_as_the_class_wants_it(self, path: Path) -> None:
        for kind, wal, mode, level in (
            (Table, True, "wal", 1), (Table, False, "delete", 1), (Precious, True, "truncate", 2),
            (Precious, False, "truncate", 2), (Table, True, "wal", 1),
        ):  # fmt: skip
            with row(kind, wal), closing(kind(path, wal=wal)) as table:
                assert (pragma(table, "journal_mode"), pragma(table, "synchronous")) == (
                    mode,
                    level,
                )

    def test_tables_of_another_version_are_refused_and_left_alone(self, path: Path) -> None:
        Table(path).close()
        kinds: tuple[tuple[int, type[StoreError]], ...]
        kinds = ((4, StoreFormatError), (999, StoreFormatError), (2, IndexDamagedError))
        for version, kind in kinds:
            set_version(path, version)
            with row(version), pytest.raises(kind, match=f"schema {version}"):
                Table(path)
            with closing(sqlite3.connect(path)) as connection:
                assert connection.execute("PRAGMA user_version").fetchone() == (version,)

    def test_a_schema_that_fails_leaves_no_table(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Table, "schema", f"{SCHEMA}; CREATE TABLE meta (x)")
        with pytest.raises(StoreError):
            Table(path)
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("SELECT COUNT(*) FROM sqlite_schema").fetchone() == (0,)

    def test_processes_that_open_a_new_one_at_once_all_get_it(self, path: Path) -> None:
        def open_it(number: int) -> None:
            with closing(Table(path)) as table:
                table.set_meta(str(number), "x")

        with ExitStack() as stack:
            children = [stack.enter_context(Child(partial(open_it, n))) for n in range(6)]
            for child in children:
                child.result()
        with closing(Table(path)) as table:
            assert [table.meta(str(number)) for number in range(6)] == ["x"] * 6

    def test_its_directory_may_have_any_name(self, tmp_path: Path) -> None:
        for name in (b"a?b#c%20d", b"\xff\xfe", b"it's; DROP", "模型".encode()):
            directory = tmp_path / os.fsdecode(name)
            directory.mkdir()
            with row(name), closing(Table(directory / "table")) as table:
                table.copy_to(directory / "copy")
                assert {"table", "copy"} <= set(os.listdir(directory))

    def test_what_is_no_database_is_damaged_and_in_a_folder_that_is_gone_none_can_be_made(
        self, path: Path
    ) -> None:
        path.write_bytes(b"nonsense" * 1000)
        with pytest.raises(IndexDamagedError):
            Table(path)
        with pytest.raises(StoreUnwritableError):
            Table(path.parent / "gone" / "table")

    def test_pages_overwritten_are_noticed(self, path: Path) -> None:
        with closing(Precious(path)) as table, table.write():
            table.execute_many(
                "INSERT INTO meta VALUES (?, ?)", ((str(n), "x" * 99) for n in range(999))
            )
        with open(path, "r+b") as file:
            file.seek(3 * 4096)
            file.write(b"\xff" * 8192)
        with closing(Precious(path)) as table, pytest.raises(IndexDamagedError):
            table.select("SELECT * FROM meta")

    def test_one_that_nobody_writes_can_be_read_without_leaving_a_trace(self, path: Path) -> None:
        with closing(Table(path, wal=False)) as table:
            table.set_meta("x", "1")
        path.chmod(0o400)
        with closing(Table(path, wal=False, read_only=True)) as table:
            assert table.meta("x") == "1"
            with pytest.raises(StoreUnwritableError):
                table.set_meta("x", "2")
        assert os.listdir(path.parent) == [path.name]

    def test_a_closed_one_is_an_error_to_use(self, table: Table) -> None:
        table.close()
        with pytest.raises(StoreError, match="closed"):
            table.meta("x")
        table.close()


class TestTransactions:
    def test_a_block_that_fails_leaves_nothing_also_of_blocks_within_it(self, table: Table) -> None:
        def fail() -> None:
            with table.write():
                table.set_meta("a", "1")
                with table.write():
                    table.set_meta("b", "1")
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        assert table.meta("a") is table.meta("b") is None

    def test_rows_that_hang_on_a_row_go_with_it(self, table: Table) -> None:
        table.execute("INSERT INTO rows VALUES (1, NULL), (2, 1)")
        table.execute("DELETE FROM rows WHERE id = 1")
        assert table.number("SELECT COUNT(*) FROM rows") == 0

    def test_who_waits_too_long_for_a_writer_is_told(self, table: Table) -> None:
        for kind, wal in ((Table, True), (Precious, False)):
            path = table.path.with_name(kind.__name__)
            with (
                row(kind),
                closing(kind(path, wal=wal)) as first,
                closing(kind(path, wal=wal)) as second,
            ):
                heard: list[str] = []
                second.patience = lambda: 0.7
                second.on_wait = heard.append
                with first.write():
                    first.set_meta("x", "1")
                    with pytest.raises(LockTimeoutError) as caught, second.write():
                        pass
                assert vars(caught.value)["key"] == str(path)
                assert heard == [f"another process is writing to {path}"]
                second.set_meta("x", "2")
                assert first.meta("x") == "2"

    def test_a_copy_holds_what_was_committed_and_is_private(
        self, table: Table, tmp_path: Path
    ) -> None:
        copy = tmp_path / "copy"
        table.set_meta("x", "1")
        table.copy_to(copy)
        assert copy.stat().st_mode & 0o777 == 0o600
        with closing(Table(copy)) as found:
            assert found.meta("x") == "1"
        with pytest.raises(FileExistsError):
            table.copy_to(copy)

    def test_rows_without_sense_are_damage(self, table: Table) -> None:
        table.execute("INSERT INTO meta VALUES ('x', CAST(x'ff' AS TEXT))")
        for ask in (lambda: table.meta("x"), lambda: list(table.stream("SELECT value FROM meta"))):
            with pytest.raises(IndexDamagedError):
                ask()
        with pytest.raises(IndexDamagedError):
            table.number("SELECT 'x'")


class TestStreams:
    def test_a_stream_shows_what_was_there_when_it_began(self, table: Table) -> None:
        table.execute_many("INSERT INTO rows VALUES (?, NULL)", ((n,) for n in range(3000)))
        stream = table.stream("SELECT id FROM rows ORDER BY id")
        assert next(stream) == (0,)
        table.execute("DELETE FROM rows")
        assert [number for (number,) in stream] == list(range(1, 3000))

    def test_within_a_transaction_it_shows_what_that_has_written(self, table: Table) -> None:
        with table.write():
            table.set_meta("x", "1")
            assert list(table.stream("SELECT * FROM meta")) == [("x", "1")]

    def test_one_left_half_way_leaves_nothing_open(self, table: Table) -> None:
        if sys.platform != "linux":
            pytest.skip("needs /proc")
        table.execute_many("INSERT INTO rows VALUES (?, NULL)", ((n,) for n in range(3000)))

        def look() -> int:
            stream = table.stream("SELECT id FROM rows")
            next(stream)
            stream.close()  # type: ignore[attr-defined]
            return len(os.listdir("/proc/self/fd"))

        assert look() == look()


class TestThreads:
    def test_many_write_and_none_is_lost(self, table: Table) -> None:
        def work(number: int) -> None:
            for each in range(20):
                with table.write():
                    table.set_meta(f"{number} {each}", "x")
                    table.execute("INSERT INTO rows (parent) VALUES (NULL)")

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        assert table.number("SELECT COUNT(*) FROM meta") == 160
        assert table.number("SELECT COUNT(*) FROM rows") == 160


class TestFork:
    def test_a_child_uses_what_it_inherited_and_may_close_it(self, table: Table) -> None:
        def work() -> str | None:
            if sys.platform == "linux":
                links = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
                assert str(table.path) not in map(os.path.realpath, links), "inherited open"
            table.set_meta("y", "child")
            found = table.meta("x")
            table.close()
            return found

        table.set_meta("x", "parent")
        with Child(work) as child:
            assert child.result() == "parent"
        assert table.meta("y") == "child"

    def test_parent_and_children_lock_each_other_out(self, table: Table) -> None:
        def count() -> None:
            for _ in range(50):
                with table.write():
                    table.set_meta("n", str(int(table.meta("n") or 0) + 1))

        with ExitStack() as stack:
            children = [stack.enter_context(Child(count)) for _ in range(3)]
            count()
            for child in children:
                child.result()
        assert table.meta("n") == "200"

    def test_a_child_made_within_a_transaction_cannot_use_it_and_harms_nothing(
        self, table: Table
    ) -> None:
        def work() -> str:
            with pytest.raises(StoreError, match="forked"):
                table.set_meta("x", "child")
            return "told"

        with table.write():
            table.set_meta("x", "parent")
            with Child(work) as child:
                assert child.result() == "told"
        assert table.meta("x") == "parent"

    def test_a_fork_waits_for_the_transaction_of_another_thread(self, table: Table) -> None:
        began, over = threading.Event(), threading.Event()

        def write() -> None:
            with table.write():
                table.set_meta("x", "1")
                began.set()
                over.wait(0.1)

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write)
            began.wait()
            with Child(partial(table.meta, "x")) as child:
                assert child.result() == "1"
            writing.result()

    def test_one_in_memory_is_copied_to_the_child(self) -> None:
        with closing(Table(None)) as table:
            table.set_meta("x", "1")
            with Child(partial(table.set_meta, "x", "2")) as child:
                child.result()
            assert table.meta("x") == "1"
            assert list(table.stream("SELECT value FROM meta")) == [("1",)]
