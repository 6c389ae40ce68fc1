"""The tables of the index, how they are opened, and how an older index becomes a current one.

Paths are BLOBs (file names need not be UTF-8), digests are 32 raw bytes, times are Unix seconds,
and inode numbers are stored as signed 64-bit integers (`signed`). Nothing here knows what the rows
are for.
"""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote_from_bytes

from smartcache.errors import (
    BlobNotFoundError,
    IndexDamagedError,
    LeaseTimeoutError,
    NoSpaceError,
    StoreError,
    StoreFormatError,
    StoreUnwritableError,
)
from smartcache.store.filesystems import free_bytes
from smartcache.store.kernel import reserve
from smartcache.store.safety import create_own
from smartcache.store.statkey import allocated_bytes

BUSY_SECONDS = 60.0
"""How long the tables are waited for when they are made."""
SPELL_SECONDS = 0.5
"""How long SQLite waits for a writer by itself; whoever waits longer says so (`Database`)."""
_PAUSE = 0.01
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

_VERSION_1 = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

CREATE TABLE blobs (
    id        INTEGER PRIMARY KEY,
    digest    BLOB NOT NULL UNIQUE,
    size      INTEGER NOT NULL,
    allocated INTEGER NOT NULL,   -- bytes of disk blocks
    inode     INTEGER NOT NULL,
    mtime_ns  INTEGER NOT NULL,
    ctime_ns  INTEGER NOT NULL,
    links     INTEGER NOT NULL,   -- hard links, the store's own name included
    trust     INTEGER NOT NULL,   -- records.Trust: verified, relinked, unproven, lost
    unsynced  TEXT,               -- boot in which bytes were adopted that we did not fsync
    added_at  INTEGER NOT NULL,
    used_at   INTEGER NOT NULL
);
CREATE INDEX blobs_inode ON blobs (inode);

CREATE TABLE aliases (
    algorithm TEXT NOT NULL,
    value     BLOB NOT NULL,
    blob      INTEGER NOT NULL REFERENCES blobs (id) ON DELETE CASCADE,
    PRIMARY KEY (algorithm, value)
) WITHOUT ROWID;
CREATE INDEX aliases_blob ON aliases (blob);

CREATE TABLE owners (
    id         INTEGER PRIMARY KEY,
    kind       TEXT NOT NULL,
    name       BLOB NOT NULL,     -- may be a path, which need not be UTF-8
    path       BLOB,              -- what must exist for the owner to be live; NULL: always live
    root       BLOB,              -- the directory whose absence means "unmounted", not "deleted"
    filesystem TEXT,
    made_at    INTEGER NOT NULL,
    UNIQUE (kind, name)
);

CREATE TABLE holds (
    owner INTEGER NOT NULL REFERENCES owners (id) ON DELETE CASCADE,
    blob  INTEGER NOT NULL REFERENCES blobs (id) ON DELETE CASCADE,
    PRIMARY KEY (owner, blob)
) WITHOUT ROWID;
CREATE INDEX holds_blob ON holds (blob);

CREATE TABLE links (
    path       BLOB PRIMARY KEY,
    blob       INTEGER NOT NULL REFERENCES blobs (id) ON DELETE CASCADE,
    kind       TEXT NOT NULL,
    filesystem TEXT NOT NULL,     -- of the directory the link is in
    inode      INTEGER NOT NULL,
    owner      INTEGER REFERENCES owners (id) ON DELETE SET NULL,
    made_at    INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX links_blob ON links (blob);
CREATE INDEX links_owner ON links (owner);

CREATE TABLE folders (
    id        INTEGER PRIMARY KEY,
    path      BLOB NOT NULL UNIQUE,
    program   TEXT NOT NULL,
    given     INTEGER NOT NULL,   -- 1: the user gave it to smartcache, 0: merely discovered
    walked_at INTEGER NOT NULL
);

CREATE TABLE sightings (
    path       BLOB PRIMARY KEY,
    folder     INTEGER NOT NULL REFERENCES folders (id) ON DELETE CASCADE,
    size       INTEGER NOT NULL,
    filesystem TEXT NOT NULL,
    inode      INTEGER NOT NULL,
    mtime_ns   INTEGER NOT NULL,
    ctime_ns   INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX sightings_size ON sightings (size);
CREATE INDEX sightings_folder ON sightings (folder);

CREATE TABLE memos (
    filesystem TEXT NOT NULL,
    inode      INTEGER NOT NULL,
    size       INTEGER NOT NULL,
    mtime_ns   INTEGER NOT NULL,
    ctime_ns   INTEGER NOT NULL,
    racy       INTEGER NOT NULL,
    blake3     BLOB,
    sha256     BLOB,
    xet        BLOB,
    git_sha1   BLOB,
    PRIMARY KEY (filesystem, inode)
) WITHOUT ROWID;
CREATE INDEX memos_blake3 ON memos (blake3) WHERE blake3 IS NOT NULL;

CREATE TABLE volumes (
    path       BLOB PRIMARY KEY,
    filesystem TEXT NOT NULL,
    added_at   INTEGER NOT NULL
) WITHOUT ROWID;
"""

# Sightings by directory: a path is written once for all files in it, and one look-up gives what was
# seen there. What version 1 had seen is forgotten: the next scan sees it again.
_VERSION_2 = """
DROP TABLE sightings;
UPDATE folders SET walked_at = 0;

CREATE TABLE filesystems (
    id   INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE     -- filesystem_id, as in memos and links
);

CREATE TABLE directories (
    id     INTEGER PRIMARY KEY,
    path   BLOB NOT NULL UNIQUE,
    folder INTEGER NOT NULL REFERENCES folders (id) ON DELETE CASCADE
);
CREATE INDEX directories_folder ON directories (folder);

CREATE TABLE sightings (
    directory  INTEGER NOT NULL REFERENCES directories (id) ON DELETE CASCADE,
    name       BLOB NOT NULL,
    size       INTEGER NOT NULL,
    filesystem INTEGER NOT NULL REFERENCES filesystems (id),
    inode      INTEGER NOT NULL,
    mtime_ns   INTEGER NOT NULL,
    ctime_ns   INTEGER NOT NULL,
    links      INTEGER NOT NULL,
    allocated  INTEGER NOT NULL,  -- bytes of disk blocks
    PRIMARY KEY (directory, name)
) WITHOUT ROWID;
CREATE INDEX sightings_size ON sightings (size);

ALTER TABLE memos ADD COLUMN sample BLOB;  -- XXH3 of head and tail, a reason to compare or not to
"""

# The Hub asks for files by sha256; without this every question would read all memos.
_VERSION_3 = """
CREATE INDEX memos_sha256 ON memos (sha256) WHERE sha256 IS NOT NULL;
"""

MIGRATIONS: tuple[str, ...] = (_VERSION_1, _VERSION_2, _VERSION_3)
"""MIGRATIONS[n] turns version n into version n + 1, in one transaction."""

VERSION = len(MIGRATIONS)


def signed(inode: int) -> int:
    """Return an unsigned 64-bit inode number as SQLite can hold it."""
    return inode - (1 << 64) if inode >= 1 << 63 else inode


def connect(
    path: Path, *, wal: bool, create: bool, migrations: tuple[str, ...] | None = None
) -> sqlite3.Connection:
    """Open the index, bring its schema up to date, and set what every connection needs."""
    return make_or_connect(path, wal=wal, create=create, migrations=migrations)[0]


def connect_read_only(path: Path) -> sqlite3.Connection:
    """Open a database that nobody writes, also on a filesystem that cannot be written."""
    uri = f"file:{quote_from_bytes(os.fsencode(path))}?mode=ro&immutable=1"
    try:
        return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
    except FAILURES as error:
        raise translated(error, path) from error


def make_or_connect(
    path: Path, *, wal: bool, create: bool, migrations: tuple[str, ...] | None = None
) -> tuple[sqlite3.Connection, bool]:
    """Open the index as `connect` does; and say whether this call has made its tables.

    `migrations` are those of another database than the store's index.
    """
    # A path may hold any byte; percent-encoding carries it through the URI.
    uri = f"file:{quote_from_bytes(os.fsencode(path))}?mode=rw"
    connection: sqlite3.Connection | None = None
    try:
        if create:
            _make_file(path)
        has_holes = wal and _has_small_blocks(path.parent)
        if has_holes:
            _make_sure_of_room(path)
        connection = sqlite3.connect(
            uri,
            uri=True,
            timeout=BUSY_SECONDS,
            isolation_level=None,
            cached_statements=256,
            check_same_thread=False,  # used by one thread, closed by any
        )
        # WAL needs shared memory, which network filesystems do not have: rollback journal there.
        mode = "WAL" if wal else "DELETE"
        _set_journal_mode(connection, mode)
        # NORMAL: after power loss the last rows may be missing: an unindexed blob, not a lie.
        # Removal asks for FULL (see `write`), because a missing deletion would be one.
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA cache_size = -16000")
        is_made = migrate(connection, path, MIGRATIONS if migrations is None else migrations)
        connection.execute(f"PRAGMA busy_timeout = {int(1000 * SPELL_SECONDS)}")
        if has_holes:
            _fill_holes(path)
    except FAILURES as error:
        if connection is not None:
            connection.close()
        raise translated(error, path) from error
    return connection, is_made


def _has_small_blocks(directory: Path) -> bool:
    try:
        return os.statvfs(directory).f_frsize < _SHM_PAGE
    except OSError:
        return False


def _make_sure_of_room(path: Path) -> None:
    """Raise NoSpaceError where SQLite would die of a full disk while it opens the index.

    The WAL comes with shared memory, a mapped file. SQLite gets its blocks by writing one byte to
    each 4 KB; where blocks are smaller, the others are holes, and writing to one through the
    mapping when the disk is full is a SIGBUS, which nobody can catch.
    """
    free, needed = free_bytes(path.parent), _SHM_REGION + _SHM_SPARE
    with suppress(FileNotFoundError):
        needed += os.stat(f"{path}-wal").st_size // _WAL_PER_REGION * _SHM_REGION
    with suppress(FileNotFoundError):  # somebody uses it, or its blocks will be free
        free += allocated_bytes(os.stat(f"{path}-shm"))
    if free < needed:
        raise NoSpaceError(f"No space left to open {path}", path=path)


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


def _make_file(path: Path) -> None:
    """Make an empty index, for this user only, where there is none.

    SQLite would make it 0644 whatever the umask is; its WAL gets the mode of the index. One that
    is there is not opened: closing it again would free every lock that this process has on it.
    """
    try:
        os.close(create_own(path))
    except FileExistsError:
        return
    except OSError as error:
        raise StoreUnwritableError(f"Cannot make {path}: {error.strerror}", path=path) from error


def migrate(connection: sqlite3.Connection, path: Path, migrations: tuple[str, ...]) -> bool:
    """Apply the migrations this index lacks; two processes at once apply each once.

    Returns whether this call has made the first tables.
    """
    is_made = False
    newest = len(migrations)
    while (version := _version(connection)) < newest:
        connection.execute("BEGIN IMMEDIATE")
        try:
            if _version(connection) == version:
                for statement in _statements(migrations[version]):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {version + 1}")
                is_made |= version == 0
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:  # a full disk has rolled it back already
                connection.execute("ROLLBACK")
            raise
    if version > newest:
        message = f"{path} has schema {version}; this smartcache reads up to {newest}"
        raise StoreFormatError(message, path=path)
    return is_made


def translated(error: Exception, path: Path) -> StoreError:
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
        holder = writer_of(path)
        message = f"Gave up waiting: {holder} is writing to {path}"
        return LeaseTimeoutError(message, key=str(path), holder=holder)
    return StoreError(f"{path}: {text}", path=path)


def writer_of(path: Path) -> str:
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


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _statements(script: str) -> list[str]:
    """Split a migration; `executescript` would commit the transaction it runs in."""
    lines = (line.partition("--")[0] for line in script.splitlines())
    return [text.strip() for text in "\n".join(lines).split(";") if text.strip()]
