"""What is remembered of files, on all filesystems of this machine, and all its SQL.

*files* has one row per inode, as it was last seen: its stat key, and what was learned of the bytes
it had under exactly that key. *names* says which paths lead to it, *directories* writes each path
once, *folders* are those that are scanned; a pool's `blobs/` is one of them, so a blob is a file
like others with a name there. *hashes* has what else is known of the bytes of a digest.

Files are kept by directory: a scan compares each directory with what was seen there and writes the
differences only. All of it is a memory: a row says what was, whether it still is so is for whoever
asks to check. A damaged one, or one of another version, is set aside and made anew.

Paths are bytes (file names need not be UTF-8), digests 32 raw bytes, times Unix seconds. Inodes are
unsigned outside of this module, and signed in rows that go through it (`members`, `seen_in`).
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

from smartcache.errors import IndexDamagedError, StoreFormatError
from smartcache.store.layout import move_aside
from smartcache.store.records import KnownFile, KnownFolder, when
from smartcache.system.hashing import Algorithm, Hashes
from smartcache.system.kernel import StatKey, allocated_bytes, boot_id, effective_user
from smartcache.system.sqlite import Database, number_of, of_row, signed

STORE = "smartcache"
"""The program of the folders that are pools."""
SCHEMA = """
CREATE TABLE filesystems (
    id   INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE     -- filesystem_id
);

CREATE TABLE files (
    filesystem INTEGER NOT NULL,
    inode      INTEGER NOT NULL,
    size       INTEGER NOT NULL,
    mtime_ns   INTEGER NOT NULL,
    ctime_ns   INTEGER NOT NULL,
    links      INTEGER NOT NULL,
    allocated  INTEGER NOT NULL,  -- bytes of disk blocks
    mode       INTEGER,           -- permissions; -1: another user's file; NULL: not known
    gid        INTEGER,
    traits     INTEGER NOT NULL,  -- ATTRIBUTES, UNREAD, DAMAGED
    digest     BLOB,
    sample     BLOB,              -- XXH3 of head and tail, a reason to compare or not to
    boot       TEXT NOT NULL,     -- when digest and sample are believed: see `hashes`
    PRIMARY KEY (filesystem, inode)
) WITHOUT ROWID;
CREATE INDEX files_size ON files (size);
CREATE INDEX files_digest ON files (digest) WHERE digest IS NOT NULL;
CREATE INDEX files_damaged ON files (traits) WHERE traits > 1;

CREATE TABLE folders (
    id        INTEGER PRIMARY KEY,
    path      BLOB NOT NULL UNIQUE,
    program   TEXT NOT NULL,      -- STORE: the blobs of a pool
    given     INTEGER NOT NULL,   -- 1: the user gave it to smartcache, 0: merely discovered
    walked_at INTEGER NOT NULL
);

CREATE TABLE directories (        -- a path is written once for all files in it
    id     INTEGER PRIMARY KEY,
    path   BLOB NOT NULL UNIQUE,
    folder INTEGER REFERENCES folders (id) ON DELETE CASCADE
);
CREATE INDEX directories_folder ON directories (folder);

CREATE TABLE names (
    directory  INTEGER NOT NULL REFERENCES directories (id) ON DELETE CASCADE,
    name       BLOB NOT NULL,
    filesystem INTEGER NOT NULL,
    inode      INTEGER NOT NULL,
    PRIMARY KEY (directory, name)
) WITHOUT ROWID;
CREATE INDEX names_inode ON names (inode, filesystem);

CREATE TABLE hashes (
    digest   BLOB PRIMARY KEY,    -- of a blob or of a file outside
    sha256   BLOB,
    git_sha1 BLOB,
    added_at INTEGER,             -- of a blob
    used_at  INTEGER
) WITHOUT ROWID;
CREATE INDEX hashes_sha256 ON hashes (sha256) WHERE sha256 IS NOT NULL;
CREATE INDEX hashes_git_sha1 ON hashes (git_sha1) WHERE git_sha1 IS NOT NULL;
"""
RACY = "racy"
"""The boot of what was hashed so young that it is never believed again."""
ATTRIBUTES = 1
"""The file has extended attributes."""
UNREAD = 2
"""A model file whose header was not looked at yet."""
DAMAGED = 4
"""A model file that is empty, or shorter than its own header says."""
_HASHES: dict[Algorithm, str] = {"sha256": "sha256", "git-sha1": "git_sha1"}
_A_WHILE = 3600
_PAGE = 1000
_FEW = 10_000
"""For the files of so few names it is cheaper to ask for their sizes than to go through all."""
_AMONG = "IN (SELECT value FROM json_each(?))"
UNSIGNED = (1 << 64) - 1
_SLASH = "CASE directories.path WHEN x'2f' THEN x'' ELSE x'2f' END"
_PATH = f"CAST(directories.path || {_SLASH} || names.name AS BLOB)"
"""`||` makes text of blobs, byte by byte."""
_NAMED = (
    " JOIN names ON names.inode = files.inode AND names.filesystem = files.filesystem"
    " JOIN directories ON directories.id = names.directory"
)
_IS_BLOB = (
    "links > 1 AND EXISTS (SELECT 1 FROM names AS other JOIN directories AS its"
    " ON its.id = other.directory WHERE other.inode = files.inode"
    " AND other.filesystem = files.filesystem AND its.folder IN ({}))"
)
_log = logging.getLogger(__name__)

SeenRow = tuple[int, int, int, int, int, int, int, int, int]
"""filesystem, inode, size, mtime_ns, ctime_ns, links, allocated, mode, gid"""
MemberRow = tuple[
    int, bytes | None, bytes | None, int, int, bytes, bytes, int, int, int, int, int, int | None,
    int, int,
]  # fmt: skip
"""A `Member` as the index gives it: naming the fields of a million rows takes a second."""


class Member(NamedTuple):
    """A name of a file whose size other files have too, with what is remembered of its bytes."""

    size: int
    digest: bytes | None
    sample: bytes | None
    filesystem: int
    inode: int
    directory: bytes
    name: bytes
    folder: int
    links: int
    allocated: int
    mtime_ns: int
    ctime_ns: int
    mode: int | None
    gid: int
    traits: int


class Known(NamedTuple):
    """What is remembered of the bytes of an inode; true while its stat key is `key`."""

    key: StatKey
    digest: str
    boot: str


class FileRow(NamedTuple):
    """An inode as it is now, with the digest that was learned of it, and names that lead to it."""

    filesystem: str
    inode: int
    key: StatKey
    links: int
    allocated: int
    digest: str = ""
    boot: str = ""
    mode: int | None = None
    gid: int | None = None
    names: tuple[str | bytes | Path, ...] = ()

    @classmethod
    def of(
        cls, filesystem: str, st: os.stat_result, digest: str = "", boot: str = "",
        names: Iterable[str | bytes | Path] = (),
    ) -> Self:  # fmt: skip
        """Return the row of a file by its stat."""
        return cls(
            filesystem, st.st_ino, StatKey.of(st), st.st_nlink, allocated_bytes(st), digest, boot,
            *access(st), tuple(names),
        )  # fmt: skip


class Learned(NamedTuple):
    """What reading a file has told; `filesystem` by its number, `inode` signed."""

    filesystem: int
    inode: int
    key: StatKey
    traits: int
    digest: bytes | None
    sample: bytes | None
    boot: str


class FolderSums(NamedTuple):
    """Sums over the files of a folder, or over all, each inode once."""

    files: int
    logical: int
    physical: int
    shared: int


class Scope(NamedTuple):
    """Which names a question is about: those of some folders, of a size, and not excluded.

    A pattern excludes a file if it matches its path or name, or a directory above it.
    """

    folders: tuple[int, ...]
    min_size: int = 1
    exclude: tuple[str, ...] = ()
    pools: tuple[int, ...] = ()
    """Folders of blobs that files may be equal to."""

    def where(self, more: tuple[int, ...] = (), *, min_size: int | None = None) -> str:
        """Return the condition on names joined with files and directories; `more` folders count."""
        least = self.min_size if min_size is None else min_size
        parts = [self.in_folders(more), f"files.size >= {least}"]
        for number in range(1, len(self.exclude) + 1):
            path, pattern = f"CAST({_PATH} AS TEXT)", f"CAST(?{number} AS TEXT)"
            forms = ("{}", "{} || '/*'", "'*/' || {}", "'*/' || {} || '/*'")
            parts += [f"NOT {path} GLOB {form.format(pattern)}" for form in forms]
        return " AND ".join(parts)

    def in_folders(self, more: tuple[int, ...] = ()) -> str:
        """Return the condition on directories alone."""
        folders = ", ".join(map(str, (*self.folders, *more))) or "NULL"
        return f"directories.folder IN ({folders})"

    @property
    def values(self) -> tuple[bytes, ...]:
        """The values of the statement: the patterns, which may hold any byte."""
        # A shell negates a set with "!", SQLite with "^".
        texts = (text.replace("[!", "[^") for text in self.exclude)
        return tuple(os.fsencode(text.rstrip("/") or text) for text in texts)


def access(st: os.stat_result) -> tuple[int, int]:
    """Return what a link would change of a file: permissions (-1: not this user's), and group."""
    return (st.st_mode & 0o7777 if st.st_uid == effective_user() else -1), st.st_gid


def open_catalog(path: Path | None, bad: Path, *, wal: bool = True) -> Catalog:
    """Open what is remembered, made where it is not there; None: in memory.

    One that is damaged, or of another version, is moved to `bad`, or removed if there is none.
    """
    if path is None:
        return Catalog(None)
    with ExitStack() as stack:
        found: os.stat_result | None = None
        with suppress(OSError):
            # Held, or another file could get its inode number. Not opened: closing it would free
            # the locks that other connections of this process have on it.
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            found = os.fstat(fd)
        try:
            return Catalog(path, wal=wal)
        except (IndexDamagedError, StoreFormatError) as error:
            _log.warning("%s: what was known of files is learned anew", error)
        with suppress(FileNotFoundError):
            if found is not None and os.path.samestat(found, os.stat(path)):
                move_aside(path, bad)  # else another process has done it
    return Catalog(path, wal=wal)


class Catalog(Database):
    """Known folders, the files seen in them and in the pools, and what is known of their bytes."""

    schema: ClassVar[str] = SCHEMA
    schema_version: ClassVar[int] = 7

    def __init__(self, path: Path | None, *, wal: bool = True) -> None:
        self.boot = boot_id()
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        super().__init__(path, wal=wal)
        try:  # tables that are missing are damage
            for table in ("filesystems", "files", "folders", "directories", "names", "hashes"):
                self.select(f"SELECT * FROM {table} LIMIT 1")
        except BaseException:
            self.close()
            raise

    # filesystems

    def filesystem_number(self, name: str) -> int:
        """Return the number that stands for a filesystem in rows."""
        number = self._numbers.get(name)
        if number is None:
            self.execute("INSERT OR IGNORE INTO filesystems (name) VALUES (?)", name)
            number = self.number("SELECT id FROM filesystems WHERE name = ?", name)
            if not self._writer:  # else it may be taken back, and given to another
                self._numbers[name] = number
        return number

    def filesystem_name(self, number: int) -> str:
        """Return the filesystem that a number stands for."""
        if number not in self._names:
            self._names |= dict(self.select("SELECT id, name FROM filesystems"))
        return self._names.get(number, "")

    # folders

    def set_folder(
        self, path: Path, *, program: str, given: bool = False, walked: bool = True
    ) -> int:
        """Insert or renew a known folder; return its number. What was given stays given."""
        sql = (
            "INSERT INTO folders (path, program, given, walked_at) VALUES (?, ?, ?, ?)"
            " ON CONFLICT (path) DO UPDATE SET given = MAX(given, excluded.given),"
            " walked_at = MAX(walked_at, excluded.walked_at),"
            " program = CASE excluded.program WHEN '' THEN program ELSE excluded.program END"
            " RETURNING id"
        )
        at = int(time.time()) if walked else 0
        return self.number(sql, os.fsencode(path), program, int(given), at)

    def drop_folder(self, path: Path) -> bool:
        """Forget a folder, those in it, and what was seen there; False if it was not known."""
        raw = os.fsencode(path)
        with self.write():
            below = os.path.join(raw, b"")
            self.execute(
                f"DELETE FROM folders WHERE path > ? AND path < ? AND program <> '{STORE}'"
                " AND EXISTS (SELECT 1 FROM folders WHERE path = ?)",
                below, below[:-1] + b"0", raw,
            )  # fmt: skip
            return self.execute("DELETE FROM folders WHERE path = ?", raw) > 0

    def drop_empty_folders(self) -> None:
        """Forget discovered folders whose files are all seen in others since some time."""
        self.execute(
            "DELETE FROM folders WHERE given = 0 AND walked_at BETWEEN 1 AND ?"
            f" AND program <> '{STORE}' AND id NOT IN"
            " (SELECT folder FROM directories WHERE folder IS NOT NULL)",
            int(time.time()) - _A_WHILE,
        )

    def keep_folder(self, number: int, path: Path, *, program: str) -> None:
        """Put a folder back that somebody has dropped while it was walked."""
        sql = "INSERT OR IGNORE INTO folders VALUES (?, ?, ?, 0, 0)"
        self.execute(sql, number, os.fsencode(path), program)

    def given_folders(self) -> list[tuple[Path, str]]:
        """Return path and program of the folders that the user gave to smartcache."""
        rows = self.select("SELECT path, program FROM folders WHERE given = 1 ORDER BY path")
        return [(Path(os.fsdecode(path)), program) for path, program in rows]

    def folder_number(self, path: Path) -> int | None:
        """Return the number of a known folder."""
        row = self.select_one("SELECT id FROM folders WHERE path = ?", os.fsencode(path))
        return None if row is None else number_of(row)

    def known_folders(self) -> list[KnownFolder]:
        """Return all known folders with the files seen in them, by path; no pools."""
        sql = (
            "SELECT folders.path, program, given, walked_at, COUNT(name), IFNULL(SUM(size), 0)"
            " FROM folders LEFT JOIN directories ON folder = folders.id"
            " LEFT JOIN names ON directory = directories.id LEFT JOIN files"
            " ON files.filesystem = names.filesystem AND files.inode = names.inode"
            f" WHERE program <> '{STORE}' GROUP BY folders.id ORDER BY folders.path"
        )
        return list(map(_folder, self.select(sql)))

    def pools(self) -> dict[int, Path]:
        """Return the folders of blobs that were walked once, by number."""
        sql = "SELECT id, path FROM folders WHERE program = ? AND walked_at > 0"
        return {number: Path(os.fsdecode(path)) for number, path in self.select(sql, STORE)}

    # one directory at a time

    def set_directory(self, path: bytes, folder: int | None) -> int:
        """Insert a directory, or let it belong to another folder; return its number."""
        sql = (
            "INSERT INTO directories (path, folder) VALUES (?, ?)"
            " ON CONFLICT (path) DO UPDATE SET folder = excluded.folder RETURNING id"
        )
        return self.number(sql, path, folder)

    def seen_in(self, paths: list[bytes]) -> dict[bytes, tuple[int, int, dict[bytes, SeenRow]]]:
        """Return number, folder and what was seen by name, of those directories that are known."""
        marks = ", ".join("?" * len(paths))
        sql = (
            "SELECT path, id, folder, name, files.filesystem, files.inode, size, mtime_ns,"
            " ctime_ns, links, allocated, mode, gid FROM directories"
            " LEFT JOIN names ON directory = id LEFT JOIN files"
            " ON files.filesystem = names.filesystem AND files.inode = names.inode"
            f" WHERE path IN ({marks})"
        )
        found: dict[bytes, tuple[int, int, dict[bytes, SeenRow]]] = {}
        for path, rows in groupby(self.select(sql, *paths), key=itemgetter(0)):
            seen = list(rows)
            names = {row[3]: row[4:] for row in seen if row[3] is not None}
            found[path] = (seen[0][1], seen[0][2] or 0, names)
        return found

    def put_seen(self, rows: Iterable[tuple[int, bytes, SeenRow, int]]) -> None:
        """Insert or renew what is seen: directory, name, the file there, its traits."""
        found = list(rows)
        self._put((*row, traits, None, None, "") for _, _, row, traits in found)
        self._put_names((directory, name, *row[:2]) for directory, name, row, _ in found)

    def drop_seen(self, names: Iterable[tuple[int, bytes]]) -> None:
        """Forget (directory, name) pairs."""
        self.execute_many("DELETE FROM names WHERE directory = ? AND name = ?", names)

    def drop_directories(self, folder: int, keep: set[int], most: int) -> list[tuple[int, int]]:
        """Forget the directories of a folder besides those to keep.

        Returns (filesystem, inode) of what was in them, at most some.
        """
        known = self.select("SELECT id FROM directories WHERE folder = ?", folder)
        gone = json.dumps([row[0] for row in known if row[0] not in keep])
        sql = f"SELECT filesystem, inode FROM names WHERE directory {_AMONG} LIMIT ?"
        lost = self.select(sql, gone, most)
        self.execute(f"DELETE FROM directories WHERE id {_AMONG}", gone)
        return lost

    def drop_nameless(self, files: Iterable[tuple[int, int]]) -> None:
        """Forget those of some files, by filesystem and inode, that have no name any more."""
        self.execute_many(
            "DELETE FROM files WHERE filesystem = ?1 AND inode = ?2 AND NOT EXISTS"
            " (SELECT 1 FROM names WHERE inode = ?2 AND filesystem = ?1)",
            files,
        )

    # single files

    def remember(self, rows: Iterable[FileRow], hashes: Iterable[Hashes] = ()) -> None:
        """Remember inodes as they are now, their names, and other hashes of their bytes.

        What is known of the same bytes already stays.
        """
        found = [(self.filesystem_number(row.filesystem), signed(row.inode), row) for row in rows]
        with self.write():
            self._put(
                (filesystem, inode, *row.key, row.links, row.allocated, row.mode, row.gid, 0,
                 bytes.fromhex(row.digest) or None, None, row.boot)
                for filesystem, inode, row in found
            )  # fmt: skip
            self._name(
                (*os.path.split(os.fsencode(path)), filesystem, inode)
                for filesystem, inode, row in found for path in row.names
            )  # fmt: skip
            self.add_hashes((each.digest, each.values) for each in hashes)

    def learn(self, rows: Iterable[Learned]) -> None:
        """Remember what was read of files whose rows are there and still are what was read."""
        same = f"boot IN ('', '{self.boot}')"
        sql = (
            f"UPDATE files SET traits = (traits & ~{ATTRIBUTES}) | ?6,"
            f" digest = IFNULL(?7, CASE WHEN {same} THEN digest END),"
            f" sample = IFNULL(?8, CASE WHEN {same} THEN sample END), boot = ?9"
            " WHERE filesystem = ?1 AND inode = ?2"
            " AND size = ?3 AND mtime_ns = ?4 AND ctime_ns = ?5"
        )
        with self.write():
            self.execute_many(sql, ((row[0], row[1], *row[2], *row[3:]) for row in rows))

    def _put(self, rows: Iterable[tuple[object, ...]]) -> None:
        """Insert or renew whole rows of files. What is not said and still holds, stays."""
        is_same = (
            "size = excluded.size AND mtime_ns = excluded.mtime_ns"
            f" AND ctime_ns = excluded.ctime_ns AND boot IN ('', '{self.boot}')"
        )
        has_same_bytes = f"({is_same} OR digest = excluded.digest)"  # a link changes the key
        kept = (
            f"{name} = IFNULL(excluded.{name}, CASE WHEN {condition} THEN {name} END)"
            for name, condition in (
                ("mode", is_same),
                ("gid", is_same),
                ("digest", is_same),
                ("sample", has_same_bytes),
            )
        )
        sql = (
            f"INSERT INTO files VALUES ({', '.join('?' * 13)})"
            f" ON CONFLICT (filesystem, inode) DO UPDATE SET {', '.join(kept)},"
            f" traits = excluded.traits | CASE WHEN {has_same_bytes} THEN traits ELSE 0 END,"
            f" boot = CASE WHEN excluded.digest IS NULL AND {is_same} THEN boot"
            " ELSE excluded.boot END,"
            " size = excluded.size, mtime_ns = excluded.mtime_ns, ctime_ns = excluded.ctime_ns,"
            " links = excluded.links, allocated = excluded.allocated"
        )
        self.execute_many(sql, rows)

    def known(self, filesystem: str, inodes: Iterable[int]) -> dict[int, Known]:
        """Return what is remembered of files of one filesystem whose digest was learned."""
        sql = (
            "SELECT inode, size, mtime_ns, ctime_ns, digest, boot FROM files"
            " WHERE filesystem = (SELECT id FROM filesystems WHERE name = ?)"
            f" AND inode {_AMONG} AND digest IS NOT NULL"
        )
        rows = self.select(sql, filesystem, json.dumps([signed(inode) for inode in inodes]))
        return dict(map(_known, rows))

    def _name(self, names: Iterable[tuple[bytes, bytes, int, int]]) -> None:
        """Let (directory, name) lead to (filesystem, inode).

        A directory that is not known yet belongs to the innermost known folder above it, if any.
        """
        found = list(names)
        numbers: dict[bytes, int] = {}
        wanted = list({directory for directory, *_ in found})
        for page, marks in _pages(wanted):
            sql = f"SELECT path, id FROM directories WHERE path IN ({marks})"
            numbers |= dict(self.select(sql, *page))
        for directory in wanted:
            if directory not in numbers:
                path = Path(os.fsdecode(directory))
                around = filter(None, map(self.folder_number, (path, *path.parents)))
                numbers[directory] = self.set_directory(directory, next(around, None))
        self._put_names((numbers[directory], *row) for directory, *row in found)

    def _put_names(self, rows: Iterable[tuple[object, ...]]) -> None:
        self.execute_many("INSERT OR REPLACE INTO names VALUES (?, ?, ?, ?)", rows)

    def forget_names(self, paths: Iterable[str | bytes | Path]) -> None:
        """Forget names, and the files that have no other."""
        of = "directory = (SELECT id FROM directories WHERE path = ?) AND name = ?"
        with self.write():
            for path in paths:
                where = os.path.split(os.fsencode(path))
                gone = self.select(f"SELECT filesystem, inode FROM names WHERE {of}", *where)
                self.execute(f"DELETE FROM names WHERE {of}", *where)
                self.drop_nameless(gone)

    def files(
        self, *, size: int | None = None, inode: tuple[str, int] | None = None, digest: str = "",
        sha256: str | None = None, scope: Scope | None = None,
    ) -> Iterator[KnownFile]:  # fmt: skip
        """Go through the names of files that meet one of these conditions, in flat memory.

        `inode` (with its filesystem) and `digest`: all names. The others: those in known folders
        that are no blobs, by `size`, by `sha256` ("": any; in its order), or all of a `scope`, the
        names of an inode after each other.
        """
        start, order, values = "files", "path", list[object]()
        known, hashed, is_blob = "files.digest", "NULL", "0"
        conditions = ["1"] if inode or digest else [f"program <> '{STORE}'"]
        if size is not None:
            conditions.append("size = ?")
            values.append(size)
        elif inode is not None:
            conditions.append("filesystems.name = ? AND files.inode = ?")
            values += [inode[0], signed(inode[1])]
        elif digest:
            conditions.append("files.digest = ?")
            values.append(bytes.fromhex(digest))
        elif sha256 is not None:
            # CROSS JOIN keeps the order of the tables: few hashes, then files by their digest.
            start = f"hashes CROSS JOIN files ON files.digest = hashes.digest AND boot <> '{RACY}'"
            hashed, order = "sha256", "sha256, path"
            conditions.append("sha256 = ?" if sha256 else "sha256 IS NOT NULL")
            values += [bytes.fromhex(sha256)] if sha256 else []
        elif scope is not None:
            known = f"CASE WHEN boot IN ('', '{self.boot}', '{RACY}') THEN files.digest END"
            is_blob = _IS_BLOB.format(", ".join(map(str, self.pools())) or "NULL")
            order = "files.filesystem, files.inode, path"
            conditions.append(scope.where())
            values += scope.values
        sql = (
            f"SELECT {_PATH} AS path, folders.path, size, allocated, links, filesystems.name,"
            f" files.inode, {known}, {hashed}, sample IS NOT NULL, {is_blob} FROM {start}{_NAMED}"
            " JOIN filesystems ON filesystems.id = files.filesystem"
            " LEFT JOIN folders ON folders.id = directories.folder"
            f" WHERE {' AND '.join(conditions)} ORDER BY {order}"
        )
        is_large = scope is not None or sha256 == ""
        return map(_known_file, (self.stream if is_large else self.select)(sql, *values))

    # other hashes of bytes, and when blobs were used

    def add_hashes(self, rows: Iterable[tuple[str, Mapping[Algorithm, str]]]) -> None:
        """Remember other hashes of the bytes that have a digest."""
        sql = (
            "INSERT INTO hashes (digest, sha256, git_sha1) VALUES (?, ?, ?)"
            " ON CONFLICT (digest) DO UPDATE SET sha256 = IFNULL(excluded.sha256, sha256),"
            " git_sha1 = IFNULL(excluded.git_sha1, git_sha1)"
        )
        found = (
            (bytes.fromhex(digest), *(bytes.fromhex(values.get(a, "")) or None for a in _HASHES))
            for digest, values in rows
        )
        with self.write():
            self.execute_many(sql, (row for row in found if any(row[1:])))

    def hashes_of(self, digests: Iterable[str]) -> dict[str, dict[Algorithm, str]]:
        """Return all that is known of the hashes of some bytes, by digest, which is one of them."""
        found: dict[str, dict[Algorithm, str]] = {each: {"blake3": each} for each in digests}
        for digest, *values in self._of_digests("digest, sha256, git_sha1", found):
            for name, value in zip(_HASHES, values, strict=True):
                if value is not None:
                    found[digest.hex()][name] = value.hex()
        return found

    def _of_digests(self, columns: str, digests: Iterable[str]) -> Iterator[tuple[Any, ...]]:
        for page, marks in _pages([bytes.fromhex(digest) for digest in digests]):
            yield from self.select(f"SELECT {columns} FROM hashes WHERE digest IN ({marks})", *page)

    def digest_with(self, algorithm: Algorithm, value: str) -> str:
        """Return the digest of the bytes that have a hash; "": it is not known."""
        if algorithm == "blake3":
            return value
        sql = f"SELECT digest FROM hashes WHERE {_HASHES[algorithm]} = ?"
        row = self.select_one(sql, bytes.fromhex(value))
        return "" if row is None else str(row[0].hex())

    def digests_by_sha256(self) -> Iterator[tuple[str, str]]:
        """Go through (sha256, digest) of all bytes whose sha256 is known, in its order."""
        sql = "SELECT sha256, digest FROM hashes WHERE sha256 IS NOT NULL ORDER BY sha256"
        return ((value.hex(), digest.hex()) for value, digest in self.stream(sql))

    def touch(self, digests: Iterable[str]) -> None:
        """Remember that blobs were used now, or came now."""
        sql = (
            "INSERT INTO hashes (digest, added_at, used_at) VALUES (?1, ?2, ?2)"
            " ON CONFLICT (digest) DO UPDATE SET used_at = ?2, added_at = IFNULL(added_at, ?2)"
        )
        now = int(time.time())
        with self.write():
            self.execute_many(sql, ((bytes.fromhex(digest), now) for digest in digests))

    def uses(self, digests: Iterable[str] | None = None) -> dict[str, tuple[int, int]]:
        """Return when blobs came and when they were last used; None: all of which it is known."""
        columns = "digest, added_at, used_at"
        if digests is None:
            rows = self.stream(f"SELECT {columns} FROM hashes")
        else:
            rows = self._of_digests(columns, digests)
        return {digest.hex(): (added, used) for digest, added, used in rows if added is not None}

    def drop_unused_hashes(self, keep: Callable[[str], bool]) -> None:
        """Forget the hashes of bytes that no known file has, and that are not to be kept."""
        sql = (
            "SELECT digest FROM hashes WHERE digest NOT IN"
            " (SELECT digest FROM files WHERE digest IS NOT NULL)"
        )
        gone = [(digest,) for (digest,) in self.select(sql) if not keep(digest.hex())]
        self.execute_many("DELETE FROM hashes WHERE digest = ?", gone)

    # equal sizes and equal bytes

    def folder_sums(self, scope: Scope) -> dict[int, FolderSums]:
        """Return the sums of each folder that has files, and of all together as folder 0."""
        of_names = f" FROM files{_NAMED} WHERE {scope.where(min_size=0)}"
        sql = (
            "SELECT folder, COUNT(*), SUM(size), SUM(CASE links WHEN 1 THEN allocated ELSE 0 END),"
            f" MAX(links){of_names} GROUP BY folder"
        )
        rows = self.select(sql, *scope.values)
        if not rows:
            return {}
        found = {row[0]: FolderSums._make((*row[1:4], 0)) for row in rows}
        found[0] = FolderSums._make(map(sum, zip(*found.values(), strict=True)))
        if any(row[-1] > 1 for row in rows):
            # Inodes with several names: once in each folder, and once in all.
            sums = "SUM(allocated), SUM(CASE WHEN names < links THEN allocated END)"
            sql = (
                "WITH linked AS MATERIALIZED (SELECT folder, files.filesystem AS filesystem,"
                " files.inode AS inode, COUNT(*) AS names, MAX(links) AS links, MAX(allocated)"
                f" AS allocated{of_names} AND links > 1 GROUP BY 1, 2, 3)"
                f" SELECT folder, {sums} FROM linked GROUP BY folder UNION ALL SELECT 0, {sums}"
                " FROM (SELECT SUM(names) AS names, MAX(links) AS links, MAX(allocated)"
                " AS allocated FROM linked GROUP BY filesystem, inode)"
            )
            for number, allocated, shared in self.select(sql, *scope.values):
                physical = found[number].physical + allocated
                found[number] = found[number]._replace(physical=physical, shared=shared or 0)
        return found

    def members(
        self, scope: Scope, sizes: Iterable[int] | None = None, *, with_racy: bool = False
    ) -> Iterator[MemberRow]:
        """Go through the names of files whose size others have too, largest first.

        The blobs of pools are among them. What is not believed of their bytes is left out; racy
        hashes count for who has just renewed them, or only counts.
        """
        wanted, values = f"SELECT value FROM json_each(?{len(scope.values) + 1})", scope.values
        if sizes is None:
            wanted = f"SELECT size FROM {self._sized(scope)} GROUP BY size HAVING COUNT(*) > 1"
        else:
            values = (*values, json.dumps(list(sizes)).encode())
        racy = f", '{RACY}'" if with_racy else ""
        believed = f"CASE WHEN boot IN ('', '{self.boot}'{racy}) THEN"
        sql = (
            f"SELECT size, {believed} digest END, {believed} sample END, files.filesystem,"
            " files.inode, directories.path, name, folder, links, allocated, mtime_ns, ctime_ns,"
            f" mode, gid, traits FROM files{_NAMED.replace(' JOIN', ' CROSS JOIN')}"
            f" WHERE size IN ({wanted}) AND {scope.where(scope.pools)} ORDER BY size DESC"
        )
        return self.stream(sql, *values)

    def _sized(self, scope: Scope) -> str:
        """Return which rows of files can matter: all, or those of the sizes in a small scope."""
        least = f"files WHERE size >= {scope.min_size}"
        of_scope = (
            f"directories JOIN names ON directory = directories.id WHERE {scope.in_folders()}"
        )
        if self.number(f"SELECT COUNT(*) FROM (SELECT 1 FROM {of_scope} LIMIT {_FEW + 1})") > _FEW:
            return least
        sizes = (
            "SELECT size FROM directories JOIN names ON directory = directories.id JOIN files"
            " ON files.filesystem = names.filesystem AND files.inode = names.inode"
            f" WHERE {scope.in_folders()}"
        )
        return f"{least} AND size IN ({sizes})"

    def marked(self, scope: Scope, trait: int) -> Iterator[tuple[int, int, bytes, int]]:
        """Go through (filesystem, inode, path, size) of files with UNREAD or DAMAGED."""
        sql = (
            f"SELECT files.filesystem, files.inode, {_PATH}, size FROM files{_NAMED}"
            f" WHERE traits > 1 AND traits & {trait} AND {scope.where(min_size=0)} ORDER BY 3"
        )
        return self.stream(sql, *scope.values)

    def set_read(self, files: Iterable[tuple[int, int, bool]]) -> None:
        """Note of (filesystem, inode) that headers were read, and whether it is damaged."""
        with self.write():
            self.execute_many(
                f"UPDATE files SET traits = traits & ~{UNREAD | DAMAGED} | ?3 * {DAMAGED}"
                " WHERE filesystem = ?1 AND inode = ?2",
                files,
            )


def _pages(values: list[bytes]) -> Iterator[tuple[list[bytes], str]]:
    """Go through values, some at a time, with the marks that stand for them in a statement."""
    for start in range(0, len(values), _PAGE):
        page = values[start : start + _PAGE]
        yield page, ", ".join("?" * len(page))


@of_row
def _folder(row: tuple[Any, ...]) -> KnownFolder:
    path, program, given, walked_at, files, size = row
    return KnownFolder(
        path=Path(os.fsdecode(path)), program=program, is_given=bool(given), files=files,
        walked_at=when(walked_at) if walked_at else None, size=size,
    )  # fmt: skip


@of_row
def _known(row: tuple[Any, ...]) -> tuple[int, Known]:
    inode, size, mtime_ns, ctime_ns, digest, boot = row
    return inode & UNSIGNED, Known(StatKey(size, mtime_ns, ctime_ns), digest.hex(), boot)


@of_row
def _known_file(row: tuple[Any, ...]) -> KnownFile:
    path, folder, size, allocated, links, filesystem, inode, digest, sha256, sampled, is_blob = row
    return KnownFile(
        path=Path(os.fsdecode(path)), folder=Path(os.fsdecode(folder or os.path.dirname(path))),
        size=size, allocated=allocated, links=links, filesystem=filesystem, inode=inode & UNSIGNED,
        digest=(digest or b"").hex(), sha256=(sha256 or b"").hex(), is_blob=bool(is_blob),
        is_compared=digest is not None or bool(sampled),
    )  # fmt: skip
