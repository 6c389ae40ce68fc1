"""One SQLite file used by many threads and processes: how it is opened, read and written.

A process has one connection, used by one thread at a time. No connection is open while the process
forks: SQLite keeps its table of file locks in memory, a child would inherit it, and its own
connections would then take no locks at all. So the connection is closed right before a fork and
opened again when it is needed.

Inode numbers are stored as signed 64-bit integers (`signed`). Nothing here knows what rows are for.
"""

from __future__ import annotations

import functools
import logging
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from urllib.parse import quote_from_bytes

from smartcache.errors import (
    IndexDamagedError,
    LockTimeoutError,
    NoSpaceError,
    StoreError,
    StoreFormatError,
    StoreUnwritableError,
)
from smartcache.system.filesystems import free_bytes, nearest_existing
from smartcache.system.locks import OnWait
from smartcache.system.ownfiles import check_file, create_own, unwritable

BUSY_SECONDS = 60.0
_SPELL = 0.5
"""Seconds SQLite waits for a writer by itself; whoever waits longer says so."""
_SCARCE = 1 << 20
"""With less free than this, an I/O error means that SQLite found no room for its shared memory."""

FAILURES = (sqlite3.Error, UnicodeDecodeError, OverflowError)
"""What a statement may raise; the latter two where damage made nonsense of texts or numbers."""
_DAMAGED = {
    sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB,
    # Our statements fit our tables: where they do not, the tables are not ours any more.
    sqlite3.SQLITE_ERROR, sqlite3.SQLITE_SCHEMA, sqlite3.SQLITE_MISMATCH,
    sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_TOOBIG,
}  # fmt: skip
_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_PAUSE = 0.01
_PAGE = 1000
_NONSENSE = (TypeError, ValueError, AttributeError, OverflowError)

_log = logging.getLogger(__name__)
T = TypeVar("T")


def signed(inode: int) -> int:
    """Return an unsigned 64-bit inode number as SQLite can hold it."""
    return inode - (1 << 64) if inode >= 1 << 63 else inode


def of_row(make: Callable[[tuple[Any, ...]], T]) -> Callable[[tuple[Any, ...]], T]:
    """Let a function that makes something of a row say so when the row makes no sense."""

    @functools.wraps(make)
    def made(row: tuple[Any, ...]) -> T:
        try:
            return make(row)
        except _NONSENSE as error:
            raise IndexDamagedError("The index is damaged: a row of it makes no sense") from error

    return made


@of_row
def number_of(row: tuple[Any, ...]) -> int:
    """Return the number that is all of a row."""
    return int(row[0])


class Database:
    """A connection, transactions, and a consistent copy."""

    schema: ClassVar[str]
    """What makes the tables, in one transaction."""
    schema_version: ClassVar[int] = 1
    """The number of the schema; tables of another are not read."""
    journal_mode: ClassVar[str] = "WAL"
    synchronous: ClassVar[str] = "NORMAL"
    """NORMAL: after a power cut the last rows may be missing. FULL: every commit is on the disk."""

    def __init__(self, path: Path | None, *, wal: bool = True, read_only: bool = False) -> None:
        """Open it, made if it is not there. With `read_only` nobody may write it meanwhile.

        Without a path it is in memory. `wal=False`: a WAL needs shared memory, which network
        filesystems do not have.
        """
        self.path = Path(":memory:") if path is None else path
        self._mode, self._access = self.journal_mode, "rw"
        if path is None:
            self._mode, self._access = "MEMORY", "memory"
        elif self._mode == "WAL" and not (wal and _has_large_blocks(path.parent)):
            self._mode = "DELETE"
        if read_only:  # it may be on a filesystem that cannot be written
            self._access = "ro&immutable=1"
        self._gate = threading.RLock()
        self._writer: int | None = None
        """The thread that is in a transaction."""
        self._is_closed = False
        self._is_stranded = False
        self.patience: Callable[[], float | None] = lambda: BUSY_SECONDS
        """How many seconds to wait for another process that writes; None: without limit."""
        self.on_wait: OnWait | None = None
        self._connection: sqlite3.Connection | None = None
        self._streams: set[sqlite3.Connection] = set()
        # Known before it is opened: a thread that forks waits until it is, and closes it first.
        with self._gate:
            with _registering:
                _databases.add(self)
            if self._access == "rw":
                _make_file(self.path)
            self._connection = self._connect()
        try:
            if not read_only:
                self._make_tables()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection; every further use is an error."""
        with self._gate:
            self._is_closed = True
            self._disconnect()

    def _disconnect(self) -> None:
        """Close the connection for now; the next use opens it again. Streams end with an error."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        while self._streams:
            self._streams.pop().close()

    def _connected(self) -> sqlite3.Connection:
        if self._is_stranded:
            message = f"{self.path} was in a transaction when this process was forked"
            raise StoreError(message, hint="Open the store again in the child process.")
        if self._connection is None:
            if self._is_closed:
                raise StoreError(f"{self.path} was closed", hint="Open the store again.")
            self._connection = self._connect()
            if self._access == "rw":  # who has made the file anew meanwhile may be killed already
                self._make_tables()
        return self._connection

    def _connect(self) -> sqlite3.Connection:
        """Open a database with all that every connection needs."""
        with self._translating(), ExitStack() as stack:
            connection = sqlite3.connect(
                _uri(self.path, self._access), uri=True, timeout=_SPELL, isolation_level=None,
                cached_statements=256,
                check_same_thread=False,  # used by one thread, closed by any
            )  # fmt: skip
            stack.enter_context(closing(connection))
            if self._access in ("rw", "memory"):
                run = functools.partial(self._execute, connection=connection)
                (mode,) = run("PRAGMA journal_mode").fetchone()
                if mode.upper() != self._mode:
                    run(f"PRAGMA journal_mode = {self._mode}")
                run(f"PRAGMA synchronous = {self.synchronous}")
                run("PRAGMA foreign_keys = ON")
                run("PRAGMA cache_size = -16000")
            stack.pop_all()
        return connection

    def _make_tables(self) -> None:
        """Make the tables if there are none: of two processes one does."""
        version = "PRAGMA user_version"
        if not self.number(version):
            with self.write():
                if not self.number(version):
                    # Not `executescript`: it would commit the transaction it runs in.
                    lines = (line.partition("--")[0] for line in self.schema.splitlines())
                    for statement in "\n".join(lines).split(";"):
                        self.execute(statement)
                    self.execute(f"{version} = {self.schema_version}")
        if (found := self.number(version)) != self.schema_version:
            kind = StoreFormatError if found > self.schema_version else IndexDamagedError
            message = f"{self.path} has schema {found}; this smartcache reads {self.schema_version}"
            raise kind(message, path=self.path)

    def select(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """Return all rows: none is left to be fetched when another thread takes its turn."""
        with self._gate, self._translating():
            return self._execute(sql, values).fetchall()

    def select_one(self, sql: str, *values: object) -> tuple[Any, ...] | None:
        """Return the first row, if there is one."""
        rows = self.select(sql, *values)
        return rows[0] if rows else None

    def number(self, sql: str, *values: object) -> int:
        """Return the number that a statement gives."""
        return number_of(self.select(sql, *values)[0])

    def stream(self, sql: str, *values: object) -> Iterator[tuple[Any, ...]]:
        """Go through many rows in flat memory, as they were when it began.

        On a connection of its own, so that the index may be written meanwhile; without WAL a reader
        would block that, so there all rows are fetched at once. So they are within a transaction of
        this thread, which another connection does not see.
        """
        if self._mode != "WAL" or self._writer == threading.get_ident():
            yield from self.select(sql, *values)
            return
        with self._gate:
            stream = self._connect()
            self._streams.add(stream)
        try:
            with self._translating():
                cursor = stream.execute(sql, values)
                while rows := cursor.fetchmany(_PAGE):
                    yield from rows
        finally:
            self._streams.discard(stream)
            stream.close()

    def execute(self, sql: str, *values: object) -> int:
        """Run a statement that returns no rows; say how many rows it changed."""
        with self._gate, self._translating():
            return self._execute(sql, values).rowcount

    def execute_many(self, sql: str, rows: Iterable[tuple[object, ...]]) -> int:
        """Run a statement for each row; say how many rows it changed."""
        with self._gate, self._translating():
            return self._connected().executemany(sql, rows).rowcount

    def _execute(
        self, sql: str, values: tuple[object, ...] = (),
        connection: sqlite3.Connection | None = None,
    ) -> sqlite3.Cursor:  # fmt: skip
        """Run a statement; wait for other processes, but never inside of a transaction."""
        began, has_spoken = time.monotonic(), False
        while True:
            try:
                return (connection or self._connected()).execute(sql, values)
            except sqlite3.OperationalError as error:
                is_busy = error.sqlite_errorcode & 0xFF in _BUSY
                limit = self.patience()
                is_over = limit is not None and time.monotonic() - began >= limit
                if not is_busy or is_over or (self._writer and sql != "COMMIT"):
                    raise
            if not has_spoken and time.monotonic() - began >= _SPELL:
                has_spoken = True
                (self.on_wait or _log.info)(f"another process is writing to {self.path}")
            time.sleep(_PAUSE)  # SQLite itself does not wait for who switches the journal

    @contextmanager
    def write(self) -> Iterator[None]:
        """Run a block as one transaction.

        Never hash, download or wait inside: everybody else who writes waits for this block. A block
        within a block is part of it.
        """
        with self._gate:
            if self._writer:
                yield
                return
            self.execute("BEGIN IMMEDIATE")
            self._writer = threading.get_ident()
            try:
                yield
                self.execute("COMMIT")
            except BaseException:
                if self._connected().in_transaction:
                    self.execute("ROLLBACK")
                raise
            finally:
                self._writer = None

    def meta(self, key: str) -> str | None:
        """Return what the table `meta` has for a key."""
        row = self.select_one("SELECT value FROM meta WHERE key = ?", key)
        return None if row is None else str(row[0])

    def set_meta(self, key: str, value: str | None) -> None:
        """Set or remove a row of the table `meta`."""
        if value is None:
            self.execute("DELETE FROM meta WHERE key = ?", key)
        else:
            self.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", key, value)

    def copy_to(self, path: Path) -> None:
        """Write a consistent copy, without holes, to a path where nothing is; mode 0600."""
        os.close(create_own(path))
        self.execute("VACUUM INTO ?", _uri(path, "rw"))

    @contextmanager
    def _translating(self) -> Iterator[None]:
        try:
            yield
        except FAILURES as error:
            raise self._translated(error) from error

    def _translated(self, error: Exception) -> StoreError:
        """Return the error of ours that says what one of `FAILURES` means for the user."""
        text, path = str(error), self.path
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        is_io = code == sqlite3.SQLITE_IOERR and free_bytes(path.parent) < _SCARCE
        if code == sqlite3.SQLITE_FULL or is_io:
            return NoSpaceError(f"No space left to write {path}", path=path)
        if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
            return StoreUnwritableError(f"Cannot write {path}: {text}", path=path)
        is_nonsense = not isinstance(error, sqlite3.Error) or text.startswith("Could not decode")
        if code in _DAMAGED or is_nonsense:
            return IndexDamagedError(f"{path} is damaged: {text}", path=path)
        if code == sqlite3.SQLITE_BUSY:
            message = f"Gave up waiting: another process is writing to {path}"
            return LockTimeoutError(message, key=str(path), holder="another process")
        return StoreError(f"{path}: {text}", path=path)

    def fork_begins(self) -> None:
        """Let no thread use the database until the fork is over, and have no connection open."""
        self._gate.acquire()
        if not self._writer and self._access != "memory":  # memory is copied, and has no locks
            self._disconnect()

    def fork_is_over(self, *, in_child: bool) -> None:
        """Go on after a fork; a child made within a transaction cannot use the database."""
        if in_child and self._writer:
            # The transaction is the parent's; closing the connection here would end it.
            self._is_stranded = True
        self._gate.release()


_databases: weakref.WeakSet[Database] = weakref.WeakSet()
_registering = threading.Lock()
_forking: list[Database] = []


def _before_fork() -> None:
    _forking.clear()
    while True:  # other threads may open some while this one waits for a gate
        with _registering:
            new = [database for database in _databases if database not in _forking]
        if not new:
            return
        for database in new:
            database.fork_begins()
            _forking.append(database)


def _after_fork(*, in_child: bool) -> None:
    global _registering  # noqa: PLW0603 - another thread of the parent may have held it
    if in_child:
        _registering = threading.Lock()
    for database in _forking:
        database.fork_is_over(in_child=in_child)
    _forking.clear()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=functools.partial(_after_fork, in_child=False),
    after_in_child=functools.partial(_after_fork, in_child=True),
)


def _make_file(path: Path) -> None:
    """Make an empty file if there is none; UnsafeFileError if what is there is no file of ours.

    SQLite would make it 0644 whatever the umask is; its WAL gets the mode of the index. One that is
    there is not opened: closing it again would free every lock that this process has on it.
    """
    try:
        os.close(create_own(path))
    except FileExistsError:
        check_file(path, os.lstat(path))
    except OSError as error:
        raise unwritable(f"Cannot make {path}", path, error) from error


def _has_large_blocks(folder: Path) -> bool:
    """Say whether SQLite's shared memory has no holes; it takes a byte of each 4 KB for all.

    To write into one when the disk is full is a SIGBUS, which nobody can catch.
    """
    return os.statvfs(nearest_existing(folder)).f_frsize >= 4096  # noqa: PLR2004


def _uri(path: Path, access: str) -> str:
    """Return what names a file for SQLite; its path may hold any byte."""
    return f"file:{quote_from_bytes(os.fsencode(path))}?mode={access}"
