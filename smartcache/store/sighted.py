"""The SQL for known folders and the files seen in them, by size and stat key, not hashed.

Files are kept by directory. A scan compares each directory with what was seen there and writes the
differences only; its questions are answered by SQLite, row by row, so that a million files need no
more memory than a thousand. `SeenRow` is the row of one file: everything of its stat that matters.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from smartcache.store.database import Database, number_of, of_row
from smartcache.store.records import KnownFolder, Sighting, when
from smartcache.store.schema import signed
from smartcache.store.statkey import StatKey

SeenRow = tuple[int, int, int, int, int, int, int]
"""size, number of the filesystem, inode, mtime_ns, ctime_ns, links, allocated"""

_A_WHILE = 3600
_COLUMNS = "size, filesystem, inode, mtime_ns, ctime_ns, links, allocated"
PATH = (
    "CAST(directories.path || CASE directories.path WHEN x'2f' THEN x'' ELSE x'2f' END"
    " || sightings.name AS BLOB)"
)
"""The path of a sighting joined with its directory, byte by byte: `||` makes text of blobs."""


class SightedFiles(Database):
    """Known folders and what was seen in them."""

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
        return self._value(sql, os.fsencode(path), program, int(given), at)

    def drop_folder(self, path: Path) -> bool:
        """Forget a folder, those in it, and what was seen there; False if it was not known."""
        raw = os.fsencode(path)
        with self.write():
            below = os.path.join(raw, b"")
            self._run(
                "DELETE FROM folders WHERE path > ? AND path < ?"
                " AND EXISTS (SELECT 1 FROM folders WHERE path = ?)",
                below,
                below[:-1] + b"0",
                raw,
            )
            return self._run("DELETE FROM folders WHERE path = ?", raw) > 0

    def drop_empty_folders(self) -> None:
        """Forget discovered folders whose files are all seen in others since some time."""
        self._run(
            "DELETE FROM folders WHERE given = 0 AND walked_at BETWEEN 1 AND ?"
            " AND id NOT IN (SELECT folder FROM directories)",
            int(time.time()) - _A_WHILE,
        )

    def keep_folder(self, number: int, path: Path, *, program: str) -> None:
        """Put a folder back that somebody has dropped while it was walked."""
        sql = "INSERT OR IGNORE INTO folders VALUES (?, ?, ?, 0, 0)"
        self._run(sql, number, os.fsencode(path), program)

    def given_folders(self) -> list[tuple[Path, str]]:
        """Return path and program of the folders that the user gave to smartcache."""
        rows = self._all("SELECT path, program FROM folders WHERE given = 1 ORDER BY path")
        return [(Path(os.fsdecode(path)), program) for path, program in rows]

    def folder_number(self, path: Path) -> int | None:
        """Return the id of a known folder."""
        row = self._one("SELECT id FROM folders WHERE path = ?", os.fsencode(path))
        return None if row is None else number_of(row)

    def known_folders(self) -> list[KnownFolder]:
        """Return all known folders with the files seen in them, by path."""
        sql = (
            "SELECT folders.path, program, given, walked_at, COUNT(name), IFNULL(SUM(size), 0)"
            " FROM folders LEFT JOIN directories ON folder = folders.id"
            " LEFT JOIN sightings ON directory = directories.id GROUP BY folders.id"
            " ORDER BY folders.path"
        )
        return list(map(_folder, self._all(sql)))

    # one directory at a time

    def filesystem_number(self, name: str) -> int:
        """Return the number that stands for a filesystem in sightings."""
        self._run("INSERT OR IGNORE INTO filesystems (name) VALUES (?)", name)
        return self._value("SELECT id FROM filesystems WHERE name = ?", name)

    def set_directory(self, path: bytes, folder: int) -> int:
        """Insert a directory, or let it belong to another folder; return its number."""
        sql = (
            "INSERT INTO directories (path, folder) VALUES (?, ?)"
            " ON CONFLICT (path) DO UPDATE SET folder = excluded.folder RETURNING id"
        )
        return self._value(sql, path, folder)

    def seen_in(self, paths: list[bytes]) -> dict[bytes, tuple[int, int, dict[bytes, SeenRow]]]:
        """Return number, folder and what was seen by name, of those directories that are known."""
        marks = ", ".join("?" * len(paths))
        sql = (
            f"SELECT path, id, folder, name, {_COLUMNS} FROM directories"
            f" LEFT JOIN sightings ON directory = id WHERE path IN ({marks})"
        )
        found: dict[bytes, tuple[int, int, dict[bytes, SeenRow]]] = {}
        for path, rows in groupby(self._all(sql, *paths), key=itemgetter(0)):
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
        rows = self._all(sql, signed(inode), filesystem)
        return [Path(os.fsdecode(path)) for (path,) in rows]

    def put_seen(self, rows: Iterable[tuple[object, ...]]) -> int:
        """Insert or renew (directory, name, *SeenRow) rows; return how many."""
        sql = "INSERT OR REPLACE INTO sightings VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
        return self._run_many(sql, rows)

    def drop_seen(self, names: Iterable[tuple[int, bytes]]) -> None:
        """Forget (directory, name) pairs."""
        self._run_many("DELETE FROM sightings WHERE directory = ? AND name = ?", names)

    def keep_directories(self, folder: int, keep: set[int]) -> None:
        """Forget the directories of a folder that are not among those to keep."""
        known = self._all("SELECT id FROM directories WHERE folder = ?", folder)
        gone = [row for row in known if row[0] not in keep]
        self._run_many("DELETE FROM directories WHERE id = ?", gone)

    # whole folders at once

    def replace_sightings(self, folder: int, sightings: Iterable[Sighting]) -> int:
        """Make these the sightings of a folder; return how many."""
        self._run("DELETE FROM directories WHERE folder = ?", folder)
        directories: dict[bytes, int] = {}
        filesystems: dict[str, int] = {}
        rows: list[tuple[object, ...]] = []
        for each in sightings:
            path, name = os.path.split(os.fsencode(each.path))
            if path not in directories:
                directories[path] = self.set_directory(path, folder)
            if each.filesystem not in filesystems:
                filesystems[each.filesystem] = self.filesystem_number(each.filesystem)
            seen = (
                each.size, filesystems[each.filesystem], signed(each.inode), each.key.mtime_ns,
                each.key.ctime_ns, each.links, each.allocated,
            )  # fmt: skip
            rows.append((directories[path], name, *seen))
        return self.put_seen(rows)

    def sightings_of_size(self, size: int) -> list[Sighting]:
        """Return the files seen with exactly this size."""
        sql = (
            f"SELECT {PATH} AS path, size, filesystems.name, inode, mtime_ns, ctime_ns, links,"
            " allocated FROM sightings JOIN directories ON directories.id = directory"
            " JOIN filesystems ON filesystems.id = filesystem WHERE size = ? ORDER BY path"
        )
        return list(map(_sighting, self._all(sql, size)))


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
