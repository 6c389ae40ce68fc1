"""The SQL for files of known folders by their sha256, and for one more file in them.

A row says what was remembered; whether the file is still so is for whoever asks to check.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smartcache.store.database import of_row
from smartcache.store.digest import Algorithm
from smartcache.store.filesystems import filesystem_id
from smartcache.store.records import Sighting
from smartcache.store.schema import signed
from smartcache.store.sighted import PATH, SightedFiles
from smartcache.store.statkey import StatKey, allocated_bytes

# CROSS JOIN keeps the order of the tables: the few memos by index, then the files by size.
_REMEMBERED = (
    f"SELECT sha256, {PATH} AS path, memos.filesystem, memos.inode, memos.size, memos.mtime_ns,"
    " memos.ctime_ns FROM memos CROSS JOIN filesystems ON filesystems.name = memos.filesystem"
    " CROSS JOIN sightings ON sightings.size = memos.size AND sightings.inode = memos.inode"
    " AND sightings.filesystem = filesystems.id"
    " CROSS JOIN directories ON directories.id = directory"
)


def sighting_of(path: Path) -> Sighting:
    """Return a file as it is seen now."""
    st = os.stat(path)
    return Sighting(
        path=path, size=st.st_size, filesystem=filesystem_id(path, st), inode=st.st_ino,
        key=StatKey.of(st), links=st.st_nlink, allocated=allocated_bytes(st),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RememberedFile:
    """A file of a known folder whose sha256 was computed once, when its stat key was `key`."""

    sha256: str
    path: Path
    filesystem: str
    inode: int
    key: StatKey


class KnownFiles(SightedFiles):
    """Files of known folders whose hash is remembered."""

    def files_with_sha256(self, value: str) -> list[RememberedFile]:
        """Return the files that had this sha256 when they were hashed, by path."""
        sql = f"{_REMEMBERED} WHERE sha256 = ? AND racy = 0 ORDER BY path"
        return [_remembered(row) for row in self._all(sql, bytes.fromhex(value))]

    def files_by_sha256(self) -> Iterator[RememberedFile]:
        """Go through all files with a remembered sha256, in its order, in flat memory."""
        sql = f"{_REMEMBERED} WHERE sha256 IS NOT NULL AND racy = 0 ORDER BY sha256, path"
        return map(_remembered, self._each(sql))

    def aliases_in(self, blobs: Iterable[int]) -> dict[int, dict[Algorithm, str]]:
        """Return the other hashes known for several blobs, by their numbers."""
        sql = (
            "SELECT blob, algorithm, value FROM aliases"
            " WHERE blob IN (SELECT value FROM json_each(?))"
        )
        found: dict[int, dict[Algorithm, str]] = {}
        for blob, algorithm, value in self._all(sql, json.dumps(list(blobs))):
            found.setdefault(blob, {})[algorithm] = value.hex()
        return found

    def add_sighting(self, file: Sighting) -> None:
        """Record one more file, in the known folder it lies in, or as a discovered one.

        Such a folder counts as not walked: nothing is known of the other files in it.
        """
        directory, name = os.path.split(os.fsencode(file.path))
        with self.write():
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


@of_row
def _remembered(row: tuple[Any, ...]) -> RememberedFile:
    value, path, filesystem, inode, size, mtime_ns, ctime_ns = row
    return RememberedFile(
        sha256=value.hex(), path=Path(os.fsdecode(path)), filesystem=filesystem, inode=inode,
        key=StatKey(size, mtime_ns, ctime_ns),
    )  # fmt: skip
