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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from urllib.parse import quote_from_bytes

from smartcache.errors import (
    BlobNotFoundError,
    IndexDamagedError,
    LockTimeoutError,
    NoSpaceError,
    StoreError,
    StoreFormatError,
    StoreUnwritableError,
)
from smartcache.system.filesystems import free_bytes
from smartcache.system.kernel import allocated_bytes, reserve
from smartcache.system.locks import OnWait
from smartcache.system.ownfiles import create_own

BUSY_SECONDS = 60.0
"""How long the tables are waited for when they are made."""
SPELL_SECONDS = 0.5
"""How long SQLite waits for a writer by itself; whoever waits longer says so (`Database`)."""
_SCARCE = 1 << 20
"""With less free than this, an I/O error means that SQLite found no room for its shared memory."""

FAILURES = (sqlite3.Error, UnicodeDecodeError, OverflowError)
"""What a statement may raise; the latter two where damage made nonsense of texts or numbers."""
_DAMAGED = {
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    # Our statements fit our tables: where they do not, the tables are not ours any more.
    sqlite3.SQLITE_ERROR,
    sqlite3.SQLITE_SCHEMA,
    sqlite3.SQLITE_MISMATCH,
    sqlite3.SQLITE_CONSTRAINT,
    sqlite3.SQLITE_TOOBIG,
}

_SHM_PAGE = 4096
_SHM_REGION = 8 * _SHM_PAGE
"""SQLite maps the shared memory of the WAL in such pieces, one for 4,062 pages of the WAL."""
_SHM_REGIONS = 8
_SHM_SPARE = 32 << 10
_WAL_PER_REGION = 4062 * 4096

_TRIES = 8
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
    """A connection, transactions, notes about the whole, and a consistent copy."""

    schema: ClassVar[str]
    """What makes the tables, in one transaction."""
    schema_version: ClassVar[int] = 1
    """The number of the schema; tables of another are not read."""

    def __init__(self, path: Path, *, wal: bool, read_only: bool = False) -> None:
        """Open it, made if it is not there. With `read_only` nobody may write it meanwhile."""
        self.path = path
        self._wal = wal
        self._is_read_only = read_only
        self._gate = threading.RLock()
        self._depth = 0
        self.is_open = True
        """Whether it was not closed for good."""
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
            self._connection, self.is_new = self._connect(create=True)

    def close(self) -> None:
        """Close the connection; every further use is an error."""
        with self._gate:
            self.is_open = False
            self.disconnect()

    def disconnect(self) -> None:
        """Close the connection for now; the next use opens it again. Streams end with an error."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        while self._streams:
            self._streams.pop().close()

    def _connected(self) -> sqlite3.Connection:
        if self._connection is None or self._is_stranded:
            if self._is_stranded:
                message = f"{self.path} was in a transaction when this process was forked"
                raise StoreError(message, hint="Open the store again in the child process.")
            if not self.is_open:
                raise StoreError(f"{self.path} was closed", hint="Open the store again.")
            self._connection, _ = self._connect()
        return self._connection

    def _connect(self, *, create: bool = False) -> tuple[sqlite3.Connection, bool]:
        """Return a new connection, and whether its tables were made for it."""
        if not self._is_read_only:
            return connect(
                self.path, self.schema, self.schema_version, wal=self._wal, create=create
            )
        # Nobody writes it: it may be on a filesystem that cannot be written.
        uri = _uri(self.path, "mode=ro&immutable=1")
        try:
            opened = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
        except FAILURES as error:
            raise _translated(error, self.path) from error
        return opened, False

    def select(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """Return all rows: none is left to be fetched when another thread takes its turn."""
        with self._gate:
            try:
                return self._execute(sql, values).fetchall()
            except FAILURES as error:
                raise _translated(error, self.path) from error

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
        if not self._wal or self._is_writing():
            yield from self.select(sql, *values)
            return
        with self._gate:
            stream, _ = self._connect()
            self._streams.add(stream)
        try:
            cursor = stream.execute(sql, values)
            while rows := cursor.fetchmany(_PAGE):
                yield from rows
        except FAILURES as error:
            raise _translated(error, self.path) from error
        finally:
            self._streams.discard(stream)
            stream.close()

    def _is_writing(self) -> bool:
        """Say whether this thread is in a transaction."""
        if not self._gate.acquire(blocking=False):
            return False  # another thread is at work
        try:
            return self._depth > 0
        finally:
            self._gate.release()

    def execute(self, sql: str, *values: object) -> int:
        """Run a statement that returns no rows; say how many rows it changed."""
        with self._gate:
            try:
                return self._execute(sql, values).rowcount
            except FAILURES as error:
                raise _translated(error, self.path) from error

    def execute_many(self, sql: str, rows: Iterable[tuple[object, ...]]) -> int:
        """Run a statement for each row; say how many rows it changed."""
        with self._gate:
            try:
                return self._connected().executemany(sql, rows).rowcount
            except FAILURES as error:
                raise _translated(error, self.path) from error

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
                        text = f"{_writer_of(self.path)} is writing to {self.path}"
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
                self.execute("PRAGMA synchronous = FULL")
            try:
                self.execute("BEGIN IMMEDIATE")
                self._depth += 1
                try:
                    yield
                    self.execute("COMMIT")
                except BaseException:
                    if self._connected().in_transaction:
                        self.execute("ROLLBACK")
                    raise
                finally:
                    self._depth -= 1
            finally:
                if durable:
                    self.execute("PRAGMA synchronous = NORMAL")

    @contextmanager
    def if_free(self) -> Iterator[None]:
        """Run a block of writes that is left out while another process writes."""
        with self._gate:
            if self._depth:
                yield
                return
            self.execute("PRAGMA busy_timeout = 0")
            self._waits = False
            try:
                yield
            except LockTimeoutError as error:
                _log.debug("not recorded: %s", error)
            finally:
                self._waits = True
                self.execute(f"PRAGMA busy_timeout = {int(1000 * SPELL_SECONDS)}")

    def note(self, key: str) -> str | None:
        """Return a note about the database as a whole."""
        row = self.select_one("SELECT value FROM meta WHERE key = ?", key)
        return None if row is None else str(row[0])

    def set_note(self, key: str, value: str | None) -> None:
        """Set or remove a note about the database as a whole."""
        if value is None:
            self.execute("DELETE FROM meta WHERE key = ?", key)
        else:
            self.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", key, value)

    def notes(self, beginning: str) -> list[str]:
        """Return the keys of notes that begin with a text."""
        sql = "SELECT key FROM meta WHERE substr(key, 1, ?) = ? ORDER BY key"
        return [str(row[0]) for row in self.select(sql, len(beginning), beginning)]

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
            raise _translated(error, self.path) from error
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


def connect(
    path: Path, schema: str, version: int, *, wal: bool, create: bool
) -> tuple[sqlite3.Connection, bool]:
    """Open a database with all that every connection needs.

    Says, too, whether this call has made its tables.
    """
    connection: sqlite3.Connection | None = None
    try:
        if create:
            # SQLite would make it 0644 whatever the umask is; its WAL gets the mode of the index.
            # One that is there is not opened: closing it again would free every lock that this
            # process has on it.
            os.close(create_own(path))
    except FileExistsError:
        pass
    except OSError as error:
        raise StoreUnwritableError(f"Cannot make {path}: {error.strerror}", path=path) from error
    try:
        has_holes = wal and _make_sure_of_room(path)
        connection = sqlite3.connect(
            _uri(path, "mode=rw"),
            uri=True,
            timeout=BUSY_SECONDS,
            isolation_level=None,
            cached_statements=256,
            check_same_thread=False,  # used by one thread, closed by any
        )
        # WAL needs shared memory, which network filesystems do not have: rollback journal there.
        _set_journal_mode(connection, "WAL" if wal else "DELETE")
        # NORMAL: after power loss the last rows may be missing: an unindexed blob, not a lie.
        # Removal asks for FULL (see `write`), because a missing deletion would be one.
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA cache_size = -16000")
        is_made = _make_tables(connection, path, schema, version)
        connection.execute(f"PRAGMA busy_timeout = {int(1000 * SPELL_SECONDS)}")
        if has_holes:
            _fill_holes(path)
    except FAILURES as error:
        if connection is not None:
            connection.close()
        raise _translated(error, path) from error
    return connection, is_made


def _uri(path: Path, options: str) -> str:
    """Return what names a file for SQLite; its path may hold any byte."""
    return f"file:{quote_from_bytes(os.fsencode(path))}?{options}"


def _make_sure_of_room(path: Path) -> bool:
    """Raise NoSpaceError where SQLite would die of a full disk while it opens the index.

    The WAL comes with shared memory, a mapped file. SQLite gets its blocks by writing one byte to
    each 4 KB; where blocks are smaller, the others are holes, and writing to one through the
    mapping when the disk is full is a SIGBUS, which nobody can catch. Says whether it is so here.
    """
    try:
        if os.statvfs(path.parent).f_frsize >= _SHM_PAGE:
            return False
    except OSError:
        return False
    free, needed = free_bytes(path.parent), _SHM_REGION + _SHM_SPARE
    with suppress(FileNotFoundError):
        needed += os.stat(f"{path}-wal").st_size // _WAL_PER_REGION * _SHM_REGION
    with suppress(FileNotFoundError):  # somebody uses it, or its blocks will be free
        free += allocated_bytes(os.stat(f"{path}-shm"))
    if free < needed:
        raise NoSpaceError(f"No space left to open {path}", path=path)
    return True


def _fill_holes(path: Path) -> None:
    """Reserve every block of the shared memory, and of some more that a long WAL would need.

    Through the descriptor that SQLite has: closing one of our own would free every lock that this
    process has on the file.
    """
    name = os.path.realpath(f"{path}-shm")
    for entry in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{entry}") == name:
                reserve(int(entry), 0, _SHM_REGIONS * _SHM_REGION)
                return


def _set_journal_mode(connection: sqlite3.Connection, mode: str) -> None:
    """Switch the journal, once for all connections.

    SQLite does not wait here while another connection switches it in the same moment: it says
    "locked" at once.
    """
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            if str(connection.execute("PRAGMA journal_mode").fetchone()[0]).upper() != mode:
                connection.execute(f"PRAGMA journal_mode = {mode}")
            return
        except sqlite3.OperationalError as error:
            is_busy = error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
            if not is_busy or time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE)


def _make_tables(connection: sqlite3.Connection, path: Path, schema: str, version: int) -> bool:
    """Make the tables if there are none; say whether this call has. Of two processes one does."""
    is_made = False
    if not _version(connection):
        connection.execute("BEGIN IMMEDIATE")
        try:
            if not _version(connection):
                # Not `executescript`: it would commit the transaction it runs in.
                lines = (line.partition("--")[0] for line in schema.splitlines())
                for statement in "\n".join(lines).split(";"):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {version}")
                is_made = True
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:  # a full disk has rolled it back already
                connection.execute("ROLLBACK")
            raise
    found = _version(connection)
    if found > version:
        message = f"{path} has schema {found}; this smartcache reads {version}"
        raise StoreFormatError(message, path=path)
    if found < version:
        message = f"{path} has schema {found}, of an older smartcache"
        raise IndexDamagedError(message, path=path)
    return is_made


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _translated(error: Exception, path: Path) -> StoreError:
    """Return the error of ours that says what one of `FAILURES` means for the user."""
    text = str(error)
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    is_io = code == sqlite3.SQLITE_IOERR and free_bytes(path.parent) < _SCARCE
    if code == sqlite3.SQLITE_FULL or is_io:
        return NoSpaceError(f"No space left to write {path}", path=path)
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return StoreUnwritableError(f"Cannot write {path}: {text}", path=path)
    if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_CONSTRAINT_FOREIGNKEY:
        return BlobNotFoundError("The blob was removed in this moment", path=path)
    is_nonsense = not isinstance(error, sqlite3.Error) or text.startswith("Could not decode")
    if code in _DAMAGED or is_nonsense:
        return IndexDamagedError(f"{path} is damaged: {text}", path=path)
    if code == sqlite3.SQLITE_BUSY:
        holder = _writer_of(path)
        message = f"Gave up waiting: {holder} is writing to {path}"
        return LockTimeoutError(message, key=str(path), holder=holder)
    return StoreError(f"{path}: {text}", path=path)


def _writer_of(path: Path) -> str:
    """Name the process that writes to a database, as far as the kernel tells."""
    with suppress(OSError, ValueError, IndexError):
        inodes = {os.stat(f"{path}{suffix}").st_ino for suffix in ("", "-shm")}
        # Never by opening the file: closing it again would free every lock this process has on it.
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            # 7: POSIX  ADVISORY  WRITE 4711 fe:00:1318921 120 120
            _, kind, _, access, process, place, *_ = line.split()
            is_ours = int(place.rpartition(":")[2]) in inodes
            if (kind, access) == ("POSIX", "WRITE") and is_ours and int(process) > 0:
                return f"process {process}"
    return "another process"
