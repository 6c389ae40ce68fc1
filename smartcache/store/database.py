"""One SQLite file used by many threads and processes.

A process has one connection, used by one thread at a time. No connection is open while the process
forks: SQLite keeps its table of file locks in memory, a child would inherit it, and its own
connections would then take no locks at all. So the connection is closed right before a fork and
opened again when it is needed.
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
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from smartcache.errors import IndexDamagedError, LeaseTimeoutError, StoreError
from smartcache.store.flock import OnWait
from smartcache.store.schema import (
    BUSY_SECONDS,
    FAILURES,
    SPELL_SECONDS,
    connect,
    connect_read_only,
    make_or_connect,
    translated,
    writer_of,
)

_log = logging.getLogger(__name__)
_TRIES = 8
_PAUSE = 0.01
_PAGE = 1000
_NONSENSE = (TypeError, ValueError, AttributeError, OverflowError)
T = TypeVar("T")


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
    """A connection, transactions, notes about the whole, and a consistent copy."""

    migrations: ClassVar[tuple[str, ...] | None] = None
    """What makes the tables, version by version; None: those of the store's index."""

    def __init__(self, path: Path, *, wal: bool, read_only: bool = False) -> None:
        """Open it, made if it is not there. With `read_only` nobody may write it meanwhile."""
        self.path = path
        self._wal = wal
        self._is_read_only = read_only
        self._gate = threading.RLock()
        self._depth = 0
        self._is_open = True
        self._is_stranded = False
        self.patience: Callable[[], float | None] = lambda: BUSY_SECONDS
        """How many seconds to wait for another process that writes; None: without limit."""
        self._waits = True
        self.on_wait: OnWait | None = None
        self._connection: sqlite3.Connection | None = None
        self._streams: set[sqlite3.Connection] = set()
        # Known before it is opened: a thread that forks waits until it is, and closes it first.
        with self._gate:
            with _registering:
                _databases.add(self)
            if read_only:
                self._connection, self.is_new = connect_read_only(path), False
            else:
                self._connection, self.is_new = make_or_connect(
                    path, wal=wal, create=True, migrations=self.migrations
                )

    def close(self) -> None:
        """Close the connection; every further use is an error."""
        with self._gate:
            self._is_open = False
            self.disconnect()

    @property
    def is_open(self) -> bool:
        """Whether it was not closed for good."""
        return self._is_open

    def disconnect(self) -> None:
        """Close the connection for now; the next use opens it again. Streams end with an error."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        while self._streams:
            self._streams.pop().close()

    @contextmanager
    def write(self, *, durable: bool = False) -> Iterator[None]:
        """Run a block as one transaction; `durable` makes its commit survive power loss.

        Never hash, download or wait inside: everybody else who writes waits for this block. A block
        within a block is part of it.
        """
        with self._gate:
            if self._depth:
                yield
                return
            if durable:
                self._run("PRAGMA synchronous = FULL")
            try:
                self._run("BEGIN IMMEDIATE")
                self._depth += 1
                try:
                    yield
                    self._run("COMMIT")
                except BaseException:
                    if self._connected().in_transaction:
                        self._run("ROLLBACK")
                    raise
                finally:
                    self._depth -= 1
            finally:
                if durable:
                    self._run("PRAGMA synchronous = NORMAL")

    @contextmanager
    def if_free(self) -> Iterator[None]:
        """Run a block of writes that is left out while another process writes."""
        with self._gate:
            if self._depth:
                yield
                return
            self._run("PRAGMA busy_timeout = 0")
            self._waits = False
            try:
                yield
            except LeaseTimeoutError as error:
                _log.debug("not recorded: %s", error)
            finally:
                self._waits = True
                self._run(f"PRAGMA busy_timeout = {int(1000 * SPELL_SECONDS)}")

    def _is_writing(self) -> bool:
        """Say whether this thread is in a transaction."""
        if not self._gate.acquire(blocking=False):
            return False  # another thread is at work
        try:
            return self._depth > 0
        finally:
            self._gate.release()

    def note(self, key: str) -> str | None:
        """Return a note about the database as a whole."""
        row = self._one("SELECT value FROM meta WHERE key = ?", key)
        return None if row is None else str(row[0])

    def set_note(self, key: str, value: str | None) -> None:
        """Set or remove a note about the database as a whole."""
        if value is None:
            self._run("DELETE FROM meta WHERE key = ?", key)
        else:
            self._run("INSERT OR REPLACE INTO meta VALUES (?, ?)", key, value)

    def notes(self, beginning: str) -> list[str]:
        """Return the keys of notes that begin with a text."""
        sql = "SELECT key FROM meta WHERE substr(key, 1, ?) = ? ORDER BY key"
        return [str(row[0]) for row in self._all(sql, len(beginning), beginning)]

    def is_sound(self) -> bool:
        """Say whether SQLite finds the file whole."""
        with self._gate:
            try:
                row = self._connected().execute("PRAGMA quick_check(1)").fetchone()
                return bool(row[0] == "ok")
            except (StoreError, *FAILURES):
                return False

    def backup(self, path: Path) -> None:
        """Write a consistent copy to `path`."""
        target = sqlite3.connect(path)
        try:
            with self._gate:
                self._connected().backup(target)
        except FAILURES as error:
            raise translated(error, self.path) from error
        finally:
            target.close()

    def fork_begins(self) -> None:
        """Let no thread use the database until the fork is over, and have no connection open."""
        self._gate.acquire()
        if not self._depth:
            self.disconnect()

    def fork_is_over(self, *, in_child: bool) -> None:
        """Go on after a fork; a child made within a transaction cannot use the database."""
        if in_child and self._depth:
            # The transaction is the parent's; closing the connection here would end it.
            self._is_stranded = True
        self._gate.release()

    def _connect(self) -> sqlite3.Connection:
        if self._is_read_only:
            return connect_read_only(self.path)
        return connect(self.path, wal=self._wal, create=False, migrations=self.migrations)

    def _connected(self) -> sqlite3.Connection:
        if self._connection is None or self._is_stranded:
            if self._is_stranded:
                message = f"{self.path} was in a transaction when this process was forked"
                raise StoreError(message, hint="Open the store again in the child process.")
            if not self._is_open:
                raise StoreError(f"{self.path} was closed", hint="Open the store again.")
            self._connection = self._connect()
        return self._connection

    def _all(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """Return all rows: none is left to be fetched when another thread takes its turn."""
        with self._gate:
            try:
                return self._execute(sql, values).fetchall()
            except FAILURES as error:
                raise translated(error, self.path) from error

    def _each(self, sql: str, *values: object) -> Iterator[tuple[Any, ...]]:
        """Go through many rows in flat memory, as they were when it began.

        On a connection of its own, so that the index may be written meanwhile; without WAL a reader
        would block that, so there all rows are fetched at once. So they are within a transaction of
        this thread, which another connection does not see.
        """
        if not self._wal or self._is_writing():
            yield from self._all(sql, *values)
            return
        with self._gate:
            stream = self._connect()
            self._streams.add(stream)
        try:
            cursor = stream.execute(sql, values)
            while rows := cursor.fetchmany(_PAGE):
                yield from rows
        except FAILURES as error:
            raise translated(error, self.path) from error
        finally:
            self._streams.discard(stream)
            stream.close()

    def _execute(self, sql: str, values: tuple[object, ...]) -> sqlite3.Cursor:
        began, attempt, has_spoken = time.monotonic(), 0, False
        while True:
            try:
                return self._connected().execute(sql, values)
            except sqlite3.OperationalError as error:
                code = error.sqlite_errorcode & 0xFF
                if code == sqlite3.SQLITE_BUSY and (not self._depth or sql == "COMMIT"):
                    limit = self.patience() if self._waits else 0
                    if limit is not None and time.monotonic() - began >= limit:
                        raise
                    if not has_spoken:
                        text = f"{writer_of(self.path)} is writing to {self.path}"
                        (self.on_wait or _log.info)(text)
                    has_spoken = True
                    continue
                # Another user's process makes the WAL, and opens it to us a moment later.
                attempt += 1
                is_readonly = code == sqlite3.SQLITE_READONLY and attempt < _TRIES
                if not is_readonly or self._depth or not os.access(self.path, os.W_OK):
                    raise
                self.disconnect()
                time.sleep(_PAUSE)

    def _one(self, sql: str, *values: object) -> tuple[Any, ...] | None:
        rows = self._all(sql, *values)
        return rows[0] if rows else None

    def _value(self, sql: str, *values: object) -> int:
        """Return the number that a statement gives."""
        return number_of(self._all(sql, *values)[0])

    def _run_many(self, sql: str, rows: Iterable[tuple[object, ...]]) -> int:
        """Run a statement for each row; say how many rows it changed."""
        with self._gate:
            try:
                return self._connected().executemany(sql, rows).rowcount
            except FAILURES as error:
                raise translated(error, self.path) from error

    def _run(self, sql: str, *values: object) -> int:
        """Run a statement that returns no rows; say how many rows it changed."""
        with self._gate:
            try:
                return self._execute(sql, values).rowcount
            except FAILURES as error:
                raise translated(error, self.path) from error


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


def _after_fork_in_parent() -> None:
    for database in _forking:
        database.fork_is_over(in_child=False)
    _forking.clear()


def _after_fork_in_child() -> None:
    global _registering  # noqa: PLW0603 - another thread may have held it
    _registering = threading.Lock()
    for database in _forking:
        database.fork_is_over(in_child=True)
    _forking.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork_in_parent,
        after_in_child=_after_fork_in_child,
    )
