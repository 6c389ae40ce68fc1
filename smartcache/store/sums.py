"""The SQL for the figures of `usage`: sums over all rows, in flat memory.

SQLite groups by sorting. The tables are therefore read in the order of an index wherever that
saves the sort (`INDEXED BY`, and `CROSS JOIN`, which keeps the order of the tables): a million
blobs with a million holds take a fraction of a second.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smartcache.errors import IndexDamagedError
from smartcache.store.database import Database, of_row
from smartcache.store.records import Link, Trust, when

_PAGE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobSums:
    """Sums over the blobs that are in the store; `logical` counts each name outside, at least 1."""

    blobs: int
    logical: int
    allocated: int
    only_allocated: int
    """Of blobs whose only name is the store's."""
    saved: int
    """Disk blocks that the names outside would take besides, each with its own copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerSums:
    """What one owner holds; `alone` is what no other owner does."""

    blobs: int = 0
    size: int = 0
    allocated: int = 0
    alone: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LonelyLink:
    """A link on record of a blob whose only name is the store's, and who holds that blob."""

    blob: int
    allocated: int
    holders: tuple[int, ...]
    link: Link


class Sums(Database):
    """Questions about all rows at once."""

    def digests_held_by(self, owner: int) -> list[str]:
        """Return the digests of the blobs that an owner holds."""
        sql = "SELECT digest FROM holds JOIN blobs ON blobs.id = blob WHERE owner = ?"
        return [digest.hex() for (digest,) in self._all(sql, owner)]

    def blob_sums(self) -> BlobSums:
        """Return the sums over all blobs: one pass over the table."""
        sql = (
            "SELECT count(*), sum(CASE links WHEN 1 THEN size ELSE size * (links - 1) END),"
            " sum(allocated), sum(CASE links WHEN 1 THEN allocated END),"
            " sum(CASE WHEN links > 2 THEN allocated * (links - 2) END) FROM blobs WHERE trust < ?"
        )
        (row,) = self._all(sql, int(Trust.LOST))
        blobs, logical, allocated, only, saved = (value or 0 for value in row)
        return BlobSums(
            blobs=blobs, logical=logical, allocated=allocated, only_allocated=only, saved=saved
        )

    def held_sums(self, *, without: Iterable[int]) -> tuple[int, int]:
        """Return what owners other than these hold: blobs, and bytes that only smartcache has."""
        sql = (
            "SELECT count(*), sum(CASE links WHEN 1 THEN allocated END)"
            " FROM (SELECT DISTINCT blob FROM holds INDEXED BY holds_blob"
            " WHERE owner NOT IN (SELECT value FROM json_each(?)))"
            " CROSS JOIN blobs ON blobs.id = blob WHERE trust < ?"
        )
        ((blobs, allocated),) = self._all(sql, json.dumps(list(without)), int(Trust.LOST))
        return blobs, allocated or 0

    def owner_sums(self, *, held_blobs: int) -> dict[int, OwnerSums]:
        """Return what each owner holds, by its id; owners that hold nothing are left out.

        `held_blobs`, how many blobs the owners hold between them, decides only how to ask.
        """
        sql = (
            "SELECT owner, count(*), sum(size), sum(allocated) FROM holds"
            " CROSS JOIN blobs ON blobs.id = blob WHERE trust < ? GROUP BY owner"
        )
        rows = self._all(sql, int(Trust.LOST))
        allocated = {owner: total for owner, _, _, total in rows}
        alone = self._alone(allocated, held_blobs, holds=sum(row[1] for row in rows))
        return {
            owner: OwnerSums(blobs=blobs, size=size, allocated=total, alone=alone.get(owner, 0))
            for owner, blobs, size, total in rows
        }

    def _alone(self, allocated: dict[int, int], blobs: int, *, holds: int) -> dict[int, int]:
        """Return the part of the allocated bytes of each owner that no other owner holds.

        The blobs with one owner are added up, or those with several are taken off: whichever are
        fewer, because they have to be sorted by owner.
        """
        if holds == blobs:
            return allocated
        if holds - blobs > holds // 8:
            sql = (
                "SELECT owner, sum(allocated) FROM (SELECT blob, owner FROM holds"
                " INDEXED BY holds_blob GROUP BY blob HAVING count(*) = 1)"
                " CROSS JOIN blobs ON blobs.id = blob GROUP BY owner"
            )
            return dict(self._all(sql))
        sql = (
            "SELECT holds.owner, sum(allocated) FROM (SELECT blob FROM holds INDEXED BY holds_blob"
            " GROUP BY blob HAVING count(*) > 1) AS shared"
            " CROSS JOIN blobs ON blobs.id = shared.blob"
            " CROSS JOIN holds ON holds.blob = shared.blob GROUP BY holds.owner"
        )
        shared = dict(self._all(sql))
        return {owner: total - shared.get(owner, 0) for owner, total in allocated.items()}

    def lonely_links(self) -> Iterator[LonelyLink]:
        """Go through the links that may keep alive a blob with one name, blob by blob, in pages.

        These are symlinks, and links of an owner: it holds the blob only while it has them.
        """
        sql = (
            "SELECT blobs.id, blobs.allocated, (SELECT group_concat(owner) FROM holds"
            " WHERE blob = blobs.id), blobs.digest, whole.path, whole.kind, whole.filesystem,"
            " whole.inode, whole.owner, whole.made_at FROM links AS each INDEXED BY links_blob"
            " CROSS JOIN blobs ON blobs.id = each.blob"
            " CROSS JOIN links AS whole ON whole.path = each.path"
            " WHERE (each.blob, each.path) > (?, ?) AND blobs.links = 1 AND trust < ?"
            " AND (whole.kind = 'symlink' OR whole.owner IS NOT NULL)"
            " ORDER BY each.blob, each.path LIMIT ?"
        )
        blob, path = 0, b""
        while page := self._all(sql, blob, path, int(Trust.LOST), _PAGE):
            for row in page:
                yield _lonely_link(row)
            if (page[-1][0], page[-1][4]) <= (blob, path):
                raise IndexDamagedError(f"{self.path} is damaged: its rows are not in order")
            blob, path = page[-1][0], page[-1][4]


@of_row
def _lonely_link(row: tuple[Any, ...]) -> LonelyLink:
    blob, allocated, holders, digest, path, kind, filesystem, inode, owner, made = row
    link = Link(
        path=Path(os.fsdecode(path)), digest=digest.hex(), kind=kind,
        filesystem=filesystem, inode=inode, owner=owner, made_at=when(made),
    )  # fmt: skip
    ids = tuple(map(int, holders.split(","))) if holders else ()
    return LonelyLink(blob=blob, allocated=allocated, holders=ids, link=link)
