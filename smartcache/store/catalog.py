"""What is known of files outside the store, on all filesystems of this machine, and its SQL.

The tables lie in the index of the user's main store: *folders*, the files seen in them by size and
stat key (*sightings*), and which bytes a file has (*memos*). The volumes on other filesystems use
it too, so that nothing that was learned of a file has to be told twice.

Files are kept by directory. A scan compares each directory with what was seen there and writes the
differences only. Sizes that several files have give candidates for duplicates; what is remembered
of their bytes (memos, and the rows of blobs) gives groups. Rows are streamed in the order of their
groups: a million of them need no more memory than a thousand.

A row says what was remembered; whether the file is still so is for whoever asks to check.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

from smartcache.store.index import Index
from smartcache.store.records import KnownFolder, Memo, RememberedFile, Seen, Sighting, Trust, when
from smartcache.system.kernel import StatKey
from smartcache.system.sqlite import number_of, of_row, signed

SeenRow = tuple[int, int, int, int, int, int, int]
"""size, number of the filesystem, inode, mtime_ns, ctime_ns, links, allocated"""

_A_WHILE = 3600
_COLUMNS = "size, filesystem, inode, mtime_ns, ctime_ns, links, allocated"
PATH = (
    "CAST(directories.path || CASE directories.path WHEN x'2f' THEN x'' ELSE x'2f' END"
    " || sightings.name AS BLOB)"
)
"""The path of a sighting joined with its directory, byte by byte: `||` makes text of blobs."""
# CROSS JOIN keeps the order of the tables: few contents and memos by index, then files by size.
_REMEMBERED = (
    f"SELECT sha256, {PATH} AS path, memos.filesystem, memos.inode, memos.size, memos.mtime_ns,"
    " memos.ctime_ns FROM contents CROSS JOIN memos ON memos.digest = contents.digest AND racy = 0"
    " CROSS JOIN filesystems ON filesystems.name = memos.filesystem"
    " CROSS JOIN sightings ON sightings.size = memos.size AND sightings.inode = memos.inode"
    " AND sightings.filesystem = filesystems.id"
    " CROSS JOIN directories ON directories.id = directory"
)

By = Literal["digest", "sample"]
"""What makes files members of one group: a digest proves it, a sample makes it likely."""

_JOINED = (
    " FROM sightings JOIN directories ON directories.id = sightings.directory"
    " JOIN filesystems ON filesystems.id = sightings.filesystem"
    " LEFT JOIN memos ON memos.filesystem = filesystems.name AND memos.inode = sightings.inode"
    " AND memos.size = sightings.size AND memos.mtime_ns = sightings.mtime_ns"
    " AND memos.ctime_ns = sightings.ctime_ns"
    # ?1 is the filesystem of the store, ?2 this boot: a row vouches as in `memos.recall`.
    " LEFT JOIN blobs ON filesystems.name = ?1 AND blobs.inode = sightings.inode"
    " AND blobs.size = sightings.size AND blobs.mtime_ns = sightings.mtime_ns"
    f" AND blobs.ctime_ns = sightings.ctime_ns AND blobs.trust = {int(Trust.VERIFIED)}"
    " AND (blobs.unsynced IS NULL OR blobs.unsynced = ?2)"
)
_FIRST_PATTERN = 3


class Scope(NamedTuple):
    """Which sightings a question is about: those of some folders, of a size, and not excluded.

    A pattern excludes a file if it matches its path or name, or a directory above it.
    """

    home: str
    """The filesystem of the store."""
    boot: str
    folders: tuple[int, ...]
    min_size: int = 1
    exclude: tuple[str, ...] = ()

    def where(self, *, min_size: int | None = None) -> str:
        """Return the condition on a row of sightings joined with directories."""
        folders = ", ".join(map(str, self.folders)) or "NULL"
        least = self.min_size if min_size is None else min_size
        parts = [f"directories.folder IN ({folders})", f"sightings.size >= {least}"]
        parts.append("?1 IS NOT ?2")  # always true: sqlite3 insists that every value is used
        for number in range(_FIRST_PATTERN, _FIRST_PATTERN + len(self.exclude)):
            path, pattern = f"CAST({PATH} AS TEXT)", f"CAST(?{number} AS TEXT)"
            forms = ("{}", "{} || '/*'", "'*/' || {}", "'*/' || {} || '/*'")
            parts += [f"NOT {path} GLOB {form.format(pattern)}" for form in forms]
        return " AND ".join(parts)

    @property
    def values(self) -> tuple[str | bytes, ...]:
        """The values of the statement: ?1, ?2 and the patterns, which may hold any byte."""
        # A shell negates a set with "!", SQLite with "^".
        texts = (text.replace("[!", "[^") for text in self.exclude)
        patterns = (os.fsencode(text.rstrip("/") or text) for text in texts)
        return (self.home, self.boot, *patterns)


def _shared(scope: Scope) -> str:
    """Return the question for sizes that several files have, or a file and a blob."""
    return (
        "SELECT sightings.size AS size, COUNT(*) AS files FROM sightings"
        " JOIN directories ON directories.id = directory"
        f" WHERE {scope.where()} GROUP BY sightings.size HAVING COUNT(*) > 1"
        f" OR sightings.size IN (SELECT size FROM blobs WHERE trust < {int(Trust.LOST)})"
    )


class FolderSums(NamedTuple):
    """Sums over the files of a folder; folder 0: over all, each inode once."""

    folder: int
    files: int
    logical: int
    physical: int
    shared: int


class Candidate(NamedTuple):
    """A file whose size others have too, with what is remembered of its bytes."""

    path: bytes
    size: int
    filesystem: str
    inode: int
    mtime_ns: int
    ctime_ns: int
    digest: bytes | None
    sample: bytes | None


class Member(NamedTuple):
    """A name of a file whose size others have too; the store's own name has no path.

    `digest` is None while it is not known; by "sample" it is the sample.
    """

    size: int
    digest: bytes | None
    filesystem: str
    inode: int
    path: bytes | None
    folder: int
    links: int
    allocated: int
    mtime_ns: int
    sample: bytes | None


MemberRow = tuple[int, bytes | None, str, int, bytes | None, int, int, int, int, bytes | None]
"""A `Member` as the index gives it: naming the fields of a million rows takes a second."""


MemoRow = tuple[str, int, int, int, int, int, bytes | None, bytes | None]
"""filesystem, inode, size, mtime_ns, ctime_ns, racy, digest, sample"""


class Catalog:
    """Known folders, the files seen in them, and what is remembered of files' bytes."""

    def __init__(self, index: Index) -> None:
        self.index = index

    def write(self) -> AbstractContextManager[None]:
        """Run a block as one transaction."""
        return self.index.write()

    # folders

    def set_folder(
        self, path: Path, *, program: str, given: bool = False, walked: bool = True
    ) -> int:
        """Insert or renew a known folder; return its id. What was given stays given."""
        sql = (
            "INSERT INTO folders (path, program, given, walked_at) VALUES (?, ?, ?, ?)"
            " ON CONFLICT (path) DO UPDATE SET given = MAX(given, excluded.given),"
            " walked_at = MAX(walked_at, excluded.walked_at),"
            " program = CASE excluded.program WHEN '' THEN program ELSE excluded.program END"
            " RETURNING id"
        )
        at = int(time.time()) if walked else 0
        return self.index.number(sql, os.fsencode(path), program, int(given), at)

    def drop_folder(self, path: Path) -> bool:
        """Forget a folder, those in it, and what was seen there; False if it was not known."""
        raw = os.fsencode(path)
        with self.index.write():
            below = os.path.join(raw, b"")
            self.index.execute(
                "DELETE FROM folders WHERE path > ? AND path < ?"
                " AND EXISTS (SELECT 1 FROM folders WHERE path = ?)",
                below,
                below[:-1] + b"0",
                raw,
            )
            return self.index.execute("DELETE FROM folders WHERE path = ?", raw) > 0

    def drop_empty_folders(self) -> None:
        """Forget discovered folders whose files are all seen in others since some time."""
        self.index.execute(
            "DELETE FROM folders WHERE given = 0 AND walked_at BETWEEN 1 AND ?"
            " AND id NOT IN (SELECT folder FROM directories)",
            int(time.time()) - _A_WHILE,
        )

    def keep_folder(self, number: int, path: Path, *, program: str) -> None:
        """Put a folder back that somebody has dropped while it was walked."""
        sql = "INSERT OR IGNORE INTO folders VALUES (?, ?, ?, 0, 0)"
        self.index.execute(sql, number, os.fsencode(path), program)

    def given_folders(self) -> list[tuple[Path, str]]:
        """Return path and program of the folders that the user gave to smartcache."""
        rows = self.index.select("SELECT path, program FROM folders WHERE given = 1 ORDER BY path")
        return [(Path(os.fsdecode(path)), program) for path, program in rows]

    def folder_number(self, path: Path) -> int | None:
        """Return the id of a known folder."""
        row = self.index.select_one("SELECT id FROM folders WHERE path = ?", os.fsencode(path))
        return None if row is None else number_of(row)

    def known_folders(self) -> list[KnownFolder]:
        """Return all known folders with the files seen in them, by path."""
        sql = (
            "SELECT folders.path, program, given, walked_at, COUNT(name), IFNULL(SUM(size), 0)"
            " FROM folders LEFT JOIN directories ON folder = folders.id"
            " LEFT JOIN sightings ON directory = directories.id GROUP BY folders.id"
            " ORDER BY folders.path"
        )
        return list(map(_folder, self.index.select(sql)))

    # one directory at a time

    def filesystem_number(self, name: str) -> int:
        """Return the number that stands for a filesystem in sightings."""
        self.index.execute("INSERT OR IGNORE INTO filesystems (name) VALUES (?)", name)
        return self.index.number("SELECT id FROM filesystems WHERE name = ?", name)

    def set_directory(self, path: bytes, folder: int) -> int:
        """Insert a directory, or let it belong to another folder; return its number."""
        sql = (
            "INSERT INTO directories (path, folder) VALUES (?, ?)"
            " ON CONFLICT (path) DO UPDATE SET folder = excluded.folder RETURNING id"
        )
        return self.index.number(sql, path, folder)

    def seen_in(self, paths: list[bytes]) -> dict[bytes, tuple[int, int, dict[bytes, SeenRow]]]:
        """Return number, folder and what was seen by name, of those directories that are known."""
        marks = ", ".join("?" * len(paths))
        sql = (
            f"SELECT path, id, folder, name, {_COLUMNS} FROM directories"
            f" LEFT JOIN sightings ON directory = id WHERE path IN ({marks})"
        )
        found: dict[bytes, tuple[int, int, dict[bytes, SeenRow]]] = {}
        for path, rows in groupby(self.index.select(sql, *paths), key=itemgetter(0)):
            seen = list(rows)
            names = {row[3]: row[4:] for row in seen if row[3] is not None}
            found[path] = (seen[0][1], seen[0][2], names)
        return found

    def paths_of(self, filesystem: str, inode: int) -> list[Path]:
        """Return where an inode was seen."""
        sql = (
            f"SELECT {PATH} FROM sightings JOIN directories ON directories.id = directory"
            " JOIN filesystems ON filesystems.id = filesystem"
            " WHERE inode = ? AND filesystems.name = ?"
        )
        rows = self.index.select(sql, signed(inode), filesystem)
        return [Path(os.fsdecode(path)) for (path,) in rows]

    def put_seen(self, rows: Iterable[tuple[object, ...]]) -> int:
        """Insert or renew (directory, name, *SeenRow) rows; return how many."""
        sql = "INSERT OR REPLACE INTO sightings VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
        return self.index.execute_many(sql, rows)

    def drop_seen(self, names: Iterable[tuple[int, bytes]]) -> None:
        """Forget (directory, name) pairs."""
        self.index.execute_many("DELETE FROM sightings WHERE directory = ? AND name = ?", names)

    def keep_directories(self, folder: int, keep: set[int]) -> None:
        """Forget the directories of a folder that are not among those to keep."""
        for gone in self._gone(folder, keep):
            self.index.execute("DELETE FROM directories WHERE id = ?", gone)

    def seen_besides(self, folder: int, keep: set[int], most: int) -> list[tuple[int, int]]:
        """Return (filesystem, inode) of what `keep_directories` would forget, at most some."""
        sql = "SELECT filesystem, inode FROM sightings WHERE directory = ? LIMIT ?"
        found: list[tuple[int, int]] = []
        for gone in self._gone(folder, keep):
            found += self.index.select(sql, gone, max(0, most - len(found)))
        return found

    def _gone(self, folder: int, keep: set[int]) -> list[int]:
        known = self.index.select("SELECT id FROM directories WHERE folder = ?", folder)
        return [row[0] for row in known if row[0] not in keep]

    def drop_memos(self, files: Iterable[tuple[int, int]]) -> None:
        """Forget the hashes of (filesystem, inode) pairs that are seen nowhere any more."""
        # By size, which has an index: a memo of another size than the file's is not valid anyway.
        sql = (
            "DELETE FROM memos WHERE filesystem = (SELECT name FROM filesystems WHERE id = ?1)"
            " AND inode = ?2 AND NOT EXISTS (SELECT 1 FROM sightings WHERE size = memos.size"
            " AND sightings.inode = ?2 AND sightings.filesystem = ?1)"
        )
        self.index.execute_many(sql, files)

    def sightings_of_size(self, size: int) -> list[Sighting]:
        """Return the files seen with exactly this size."""
        sql = (
            f"SELECT {PATH} AS path, size, filesystems.name, inode, mtime_ns, ctime_ns, links,"
            " allocated FROM sightings JOIN directories ON directories.id = directory"
            " JOIN filesystems ON filesystems.id = filesystem WHERE size = ? ORDER BY path"
        )
        return list(map(_sighting, self.index.select(sql, size)))

    def files_with_sha256(self, value: str) -> list[RememberedFile]:
        """Return the files that had this sha256 when they were hashed, by path."""
        sql = f"{_REMEMBERED} WHERE sha256 = ? ORDER BY path"
        return [_remembered(row) for row in self.index.select(sql, bytes.fromhex(value))]

    def files_by_sha256(self) -> Iterator[RememberedFile]:
        """Go through all files with a remembered sha256, in its order, in flat memory."""
        sql = f"{_REMEMBERED} WHERE sha256 IS NOT NULL ORDER BY sha256, path"
        return map(_remembered, self.index.stream(sql))

    def add_sighting(self, file: Sighting) -> None:
        """Record one more file, in the known folder it lies in, or as a discovered one.

        Such a folder counts as not walked: nothing is known of the other files in it.
        """
        directory, name = os.path.split(os.fsencode(file.path))
        with self.index.write():
            known = self.seen_in([directory]).get(directory)
            if known is None:
                number = self.set_directory(directory, self._folder_around(directory))
            else:
                number = known[0]
            row = (
                file.size, self.filesystem_number(file.filesystem), signed(file.inode),
                file.key.mtime_ns, file.key.ctime_ns, file.links, file.allocated,
            )  # fmt: skip
            self.put_seen([(number, name, *row)])

    def _folder_around(self, directory: bytes) -> int:
        """Return the innermost known folder that a directory lies in, or make it one."""
        around = Path(os.fsdecode(directory))
        for each in (around, *around.parents):
            number = self.folder_number(each)
            if number is not None:
                return number
        return self.set_folder(around, program="", walked=False)

    # which bytes files have

    def memos(self, filesystem: str, inodes: Iterable[int]) -> dict[int, Memo]:
        """Return what is remembered of files of one filesystem, by inode; digests only."""
        sql = (
            "SELECT inode, size, mtime_ns, ctime_ns, racy, digest FROM memos"
            " WHERE filesystem = ? AND inode IN (SELECT value FROM json_each(?))"
            " AND digest IS NOT NULL"
        )
        wanted = json.dumps([signed(inode) for inode in inodes])
        return {row[0]: _memo(row) for row in self.index.select(sql, filesystem, wanted)}

    def learn(self, rows: Iterable[MemoRow]) -> None:
        """Remember digests or samples of files, beside what is known of the same bytes already."""
        same = (
            "size = excluded.size AND mtime_ns = excluded.mtime_ns"
            " AND ctime_ns = excluded.ctime_ns AND racy = 0"
        )
        kept = ", ".join(
            f"{name} = IFNULL(excluded.{name}, CASE WHEN {same} THEN {name} END)"
            for name in ("digest", "sample")
        )
        sql = (
            "INSERT INTO memos VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
            f" ON CONFLICT (filesystem, inode) DO UPDATE SET {kept}, size = excluded.size,"
            " mtime_ns = excluded.mtime_ns, ctime_ns = excluded.ctime_ns, racy = excluded.racy"
        )
        self.index.execute_many(sql, rows)

    # equal sizes and equal bytes

    def folder_sums(self, scope: Scope) -> list[FolderSums]:
        """Return the sums of each folder that has files, and of all together as the last."""
        rows = (
            " FROM sightings JOIN directories ON directories.id = directory"
            f" WHERE {scope.where(min_size=0)}"
        )
        sql = (
            "SELECT folder, COUNT(*), SUM(size), SUM(CASE links WHEN 1 THEN allocated ELSE 0 END),"
            f" 0 {rows} GROUP BY folder"
        )
        found = {row[0]: row for row in self.index.select(sql, *scope.values)}
        if found:
            found[0] = tuple(map(sum, zip(*found.values(), strict=True)))
        # Inodes with several names: once in each folder, and once in all.
        for folder, key in (("folder", "folder, filesystem, inode"), ("0", "filesystem, inode")):
            sql = (
                "SELECT folder, SUM(allocated), SUM(CASE WHEN names < links THEN allocated END)"
                f" FROM (SELECT {folder} AS folder, COUNT(*) AS names, MAX(links) AS links,"
                f" MAX(allocated) AS allocated {rows} AND links > 1 GROUP BY {key}) GROUP BY folder"
            )
            for number, allocated, shared in self.index.select(sql, *scope.values):
                _, files, logical, physical, _ = found[number]
                found[number] = (number, files, logical, physical + allocated, shared or 0)
        return [FolderSums(number, *row[1:]) for number, row in found.items()]

    def shared_sizes(self, scope: Scope) -> Iterator[tuple[int, int]]:
        """Go through the sizes that several files have, or a file and a blob; with their number."""
        return self.index.stream(f"{_shared(scope)} ORDER BY sightings.size DESC", *scope.values)

    def candidates(self, scope: Scope, sizes: Iterable[int]) -> list[Candidate]:
        """Return the files of some sizes; racy memories are left out."""
        wanted = ", ".join(map(str, sizes))
        sql = (
            f"SELECT {PATH}, sightings.size, filesystems.name, sightings.inode,"
            " sightings.mtime_ns, sightings.ctime_ns,"
            " IFNULL(blobs.digest, CASE racy WHEN 0 THEN memos.digest END),"
            f" CASE racy WHEN 0 THEN memos.sample END {_JOINED}"
            f" WHERE sightings.size IN ({wanted}) AND {scope.where()}"
        )
        return [Candidate(*row) for row in self.index.select(sql, *scope.values)]

    def members(
        self, scope: Scope, by: By = "digest", *, with_racy: bool = True
    ) -> Iterator[MemberRow]:
        """Go through all files of shared sizes in the order of groups, largest size first.

        Files whose bytes are not known come first among those of their size. Memories of racy files
        count for who has just renewed them.
        """
        form = "memos.{}" if with_racy else "CASE racy WHEN 0 THEN memos.{} END"
        sample, digest = form.format("sample"), form.format("digest")
        known = f"IFNULL(blobs.digest, {digest})" if by == "digest" else sample
        sizes = f"SELECT size FROM ({_shared(scope)})"
        sql = (
            f"SELECT sightings.size AS size, {known} AS digest, filesystems.name,"
            f" sightings.inode, {PATH}, directories.folder, sightings.links, sightings.allocated,"
            f" sightings.mtime_ns, {sample} {_JOINED}"
            f" WHERE sightings.size IN ({sizes}) AND {scope.where()}"
        )
        if by == "digest":
            sql += (
                " UNION ALL SELECT size, digest, ?1, inode, NULL, 0, links, allocated, mtime_ns,"
                f" NULL FROM blobs WHERE trust < {int(Trust.LOST)} AND size IN ({sizes})"
            )
        return self.index.stream(f"{sql} ORDER BY size DESC, digest", *scope.values)

    def seen(self, scope: Scope) -> Iterator[Seen]:
        """Go through all files, the names of an inode after each other, with what is known."""
        sql = (
            f"SELECT {PATH} AS path, folders.path, sightings.size, sightings.allocated,"
            " sightings.links, filesystems.name AS filesystem, sightings.inode AS inode,"
            " IFNULL(blobs.digest, memos.digest), memos.sample IS NOT NULL, blobs.id IS NOT NULL"
            f" {_JOINED} JOIN folders ON folders.id = directories.folder"
            f" WHERE {scope.where()} ORDER BY filesystem, inode, path"
        )
        return map(_seen, self.index.stream(sql, *scope.values))

    def sizes_of_blobs(self, sizes: Iterable[int]) -> list[tuple[int, int]]:
        """Return (size, inode) of the blobs that have one of some sizes."""
        sql = (
            f"SELECT size, inode FROM blobs WHERE trust < {int(Trust.LOST)}"
            " AND size IN (SELECT value FROM json_each(?))"
        )
        return self.index.select(sql, json.dumps(list(sizes)))


@of_row
def _folder(row: tuple[Any, ...]) -> KnownFolder:
    path, program, given, walked_at, files, size = row
    return KnownFolder(
        path=Path(os.fsdecode(path)), program=program, is_given=bool(given), files=files,
        walked_at=when(walked_at) if walked_at else None, size=size,
    )  # fmt: skip


@of_row
def _sighting(row: tuple[Any, ...]) -> Sighting:
    path, size, filesystem, inode, mtime_ns, ctime_ns, links, allocated = row
    return Sighting(
        path=Path(os.fsdecode(path)), size=size, filesystem=filesystem, inode=inode,
        key=StatKey(size, mtime_ns, ctime_ns), links=links, allocated=allocated,
    )  # fmt: skip


@of_row
def _remembered(row: tuple[Any, ...]) -> RememberedFile:
    value, path, filesystem, inode, size, mtime_ns, ctime_ns = row
    return RememberedFile(
        sha256=value.hex(), path=Path(os.fsdecode(path)), filesystem=filesystem, inode=inode,
        key=StatKey(size, mtime_ns, ctime_ns),
    )  # fmt: skip


@of_row
def _seen(row: tuple[Any, ...]) -> Seen:
    path, folder, size, allocated, links, filesystem, inode, digest, sampled, is_blob = row
    return Seen(
        path=Path(os.fsdecode(path)), folder=Path(os.fsdecode(folder)), size=size,
        allocated=allocated, links=links, filesystem=filesystem, inode=inode,
        digest="" if digest is None else digest.hex(), is_blob=bool(is_blob),
        is_compared=digest is not None or bool(sampled),
    )  # fmt: skip


@of_row
def _memo(row: tuple[Any, ...]) -> Memo:
    _, size, mtime_ns, ctime_ns, racy, digest = row
    key = StatKey(size, mtime_ns, ctime_ns)
    return Memo(key=key, is_racy=bool(racy), digest=digest.hex())
