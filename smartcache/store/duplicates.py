"""The SQL that finds duplicates among the files seen in folders.

Sizes that several files have give candidates; what is remembered of their bytes (memos, and the
rows of blobs) gives groups. Rows are streamed in the order of their groups: a million of them need
no more memory than a thousand.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from smartcache.store.database import Database, of_row
from smartcache.store.records import Seen, Trust
from smartcache.store.sighted import PATH

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


class Duplicates(Database):
    """Questions about files of equal size and equal bytes."""

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
        found = {row[0]: row for row in self._all(sql, *scope.values)}
        if found:
            found[0] = tuple(map(sum, zip(*found.values(), strict=True)))
        # Inodes with several names: once in each folder, and once in all.
        for folder, key in (("folder", "folder, filesystem, inode"), ("0", "filesystem, inode")):
            sql = (
                "SELECT folder, SUM(allocated), SUM(CASE WHEN names < links THEN allocated END)"
                f" FROM (SELECT {folder} AS folder, COUNT(*) AS names, MAX(links) AS links,"
                f" MAX(allocated) AS allocated {rows} AND links > 1 GROUP BY {key}) GROUP BY folder"
            )
            for number, allocated, shared in self._all(sql, *scope.values):
                _, files, logical, physical, _ = found[number]
                found[number] = (number, files, logical, physical + allocated, shared or 0)
        return [FolderSums(number, *row[1:]) for number, row in found.items()]

    def shared_sizes(self, scope: Scope) -> Iterator[tuple[int, int]]:
        """Go through the sizes that several files have, or a file and a blob; with their number."""
        return self._each(f"{_shared(scope)} ORDER BY sightings.size DESC", *scope.values)

    def candidates(self, scope: Scope, sizes: Iterable[int]) -> list[Candidate]:
        """Return the files of some sizes; racy memories are left out."""
        wanted = ", ".join(map(str, sizes))
        sql = (
            f"SELECT {PATH}, sightings.size, filesystems.name, sightings.inode,"
            " sightings.mtime_ns, sightings.ctime_ns,"
            " IFNULL(blobs.digest, CASE racy WHEN 0 THEN memos.blake3 END),"
            f" CASE racy WHEN 0 THEN memos.sample END {_JOINED}"
            f" WHERE sightings.size IN ({wanted}) AND {scope.where()}"
        )
        return [Candidate(*row) for row in self._all(sql, *scope.values)]

    def members(
        self, scope: Scope, by: By = "digest", *, with_racy: bool = True
    ) -> Iterator[MemberRow]:
        """Go through all files of shared sizes in the order of groups, largest size first.

        Files whose bytes are not known come first among those of their size. Memories of racy files
        count for who has just renewed them.
        """
        form = "memos.{}" if with_racy else "CASE racy WHEN 0 THEN memos.{} END"
        sample, digest = form.format("sample"), form.format("blake3")
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
        return self._each(f"{sql} ORDER BY size DESC, digest", *scope.values)

    def seen(self, scope: Scope) -> Iterator[Seen]:
        """Go through all files, the names of an inode after each other, with what is known."""
        sql = (
            f"SELECT {PATH} AS path, folders.path, sightings.size, sightings.allocated,"
            " sightings.links, filesystems.name AS filesystem, sightings.inode AS inode,"
            " IFNULL(blobs.digest, memos.blake3), memos.sample IS NOT NULL, blobs.id IS NOT NULL"
            f" {_JOINED} JOIN folders ON folders.id = directories.folder"
            f" WHERE {scope.where()} ORDER BY filesystem, inode, path"
        )
        return map(_seen, self._each(sql, *scope.values))

    def sizes_of_blobs(self, sizes: Iterable[int]) -> list[tuple[int, int]]:
        """Return (size, inode) of the blobs that have one of some sizes."""
        sql = (
            f"SELECT size, inode FROM blobs WHERE trust < {int(Trust.LOST)}"
            " AND size IN (SELECT value FROM json_each(?))"
        )
        return self._all(sql, json.dumps(list(sizes)))

    def learn(
        self, column: Literal["blake3", "sample"], rows: Iterable[tuple[object, ...]]
    ) -> None:
        """Remember a digest or sample of files, beside what is known of the same bytes already.

        Rows are (filesystem, inode, size, mtime_ns, ctime_ns, racy, value).
        """
        same = (
            "size = excluded.size AND mtime_ns = excluded.mtime_ns"
            " AND ctime_ns = excluded.ctime_ns AND racy = 0"
        )
        others = [
            name for name in ("blake3", "sha256", "xet", "git_sha1", "sample") if name != column
        ]
        kept = ", ".join(f"{name} = CASE WHEN {same} THEN {name} END" for name in others)
        sql = (
            f"INSERT INTO memos (filesystem, inode, size, mtime_ns, ctime_ns, racy, {column})"
            " VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (filesystem, inode) DO UPDATE SET"
            f" {kept}, {column} = excluded.{column}, size = excluded.size,"
            " mtime_ns = excluded.mtime_ns, ctime_ns = excluded.ctime_ns, racy = excluded.racy"
        )
        self._run_many(sql, rows)


@of_row
def _seen(row: tuple[Any, ...]) -> Seen:
    path, folder, size, allocated, links, filesystem, inode, digest, sampled, is_blob = row
    return Seen(
        path=Path(os.fsdecode(path)), folder=Path(os.fsdecode(folder)), size=size,
        allocated=allocated, links=links, filesystem=filesystem, inode=inode,
        digest="" if digest is None else digest.hex(), is_blob=bool(is_blob),
        is_compared=digest is not None or bool(sampled),
    )  # fmt: skip
