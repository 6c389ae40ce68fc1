"""The SQL of blobs, aliases, links and owners, and the `Index` of it all.

What else is asked is in `filememory`, `known`, `sighted` and `duplicates`.

The index is a memory, never the truth: what it says of files is checked against the disk, and can
be made again from it. Owners other than pins cannot: they are lost with the index. One method
answers one question.
"""

from __future__ import annotations

import json
import os
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from smartcache.errors import IndexDamagedError
from smartcache.store.database import number_of, of_row
from smartcache.store.digest import Algorithm
from smartcache.store.duplicates import Duplicates
from smartcache.store.filememory import FileMemory
from smartcache.store.known import KnownFiles
from smartcache.store.records import (
    Blob,
    Link,
    LinkKind,
    Owner,
    OwnerKind,
    Totals,
    Trust,
    when,
)
from smartcache.store.schema import signed
from smartcache.store.sighted import SightedFiles
from smartcache.store.statkey import StatKey, allocated_bytes

_BLOB = (
    "blobs.id, blobs.digest, size, allocated, blobs.inode, mtime_ns, ctime_ns, links, trust,"
    " unsynced, added_at, used_at"
)
_LINK = (
    "links.path, blobs.digest, links.kind, links.filesystem, links.inode, links.owner,"
    " links.made_at"
)
_ORDERS = {
    "digest": "digest",
    "size": "size DESC, digest",
    "added": "added_at DESC, blobs.id DESC",
    "used": "used_at DESC, blobs.id DESC",
    "oldest": "used_at, blobs.id",
}
_PAGE = 256
_LONG_PAGE = 1000
_ADD_BLOB = (
    "INSERT INTO blobs (digest, size, allocated, inode, mtime_ns, ctime_ns, links, trust, unsynced,"
    " added_at, used_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
    " ON CONFLICT (digest) DO UPDATE SET"
    " size = excluded.size, allocated = excluded.allocated, inode = excluded.inode,"
    " mtime_ns = excluded.mtime_ns, ctime_ns = excluded.ctime_ns, links = excluded.links,"
    " trust = excluded.trust, unsynced = excluded.unsynced, used_at = excluded.used_at"
)
_NO_TIME = 1 << 37
"""Seconds from here on are no time that a datetime can hold."""
_Row = tuple[Any, ...]


class Index(FileMemory, KnownFiles, SightedFiles, Duplicates):
    """The index of one volume."""

    # blobs

    def blob(self, digest: str) -> Blob | None:
        """Return the blob of a digest."""
        return self._one_blob(f"SELECT {_BLOB} FROM blobs WHERE digest = ?", bytes.fromhex(digest))

    def blob_by_inode(self, inode: int) -> Blob | None:
        """Return the blob that lies in an inode of this filesystem."""
        return self._one_blob(f"SELECT {_BLOB} FROM blobs WHERE inode = ?", signed(inode))

    def blob_by_alias(self, algorithm: str, value: str) -> Blob | None:
        """Return the blob known under another hash."""
        where = "WHERE algorithm = ? AND value = ?"
        sql = f"SELECT {_BLOB} FROM aliases JOIN blobs ON blobs.id = blob {where}"
        return self._one_blob(sql, algorithm, bytes.fromhex(value))

    def blobs_in(self, inodes: Iterable[int]) -> dict[int, Blob]:
        """Return the blobs that lie in these inodes of this filesystem, by inode."""
        sql = f"SELECT {_BLOB} FROM blobs WHERE inode IN (SELECT value FROM json_each(?))"
        rows = self._all(sql, json.dumps([signed(inode) for inode in inodes]))
        return {blob.inode: blob for blob in map(_blob, rows)}

    def known_digests(self, digests: Iterable[str]) -> set[str]:
        """Return those of the digests that have a row."""
        wanted = [bytes.fromhex(digest) for digest in digests]
        found: set[str] = set()
        for start in range(0, len(wanted), _PAGE):
            page = wanted[start : start + _PAGE]
            marks = ", ".join("?" * len(page))
            rows = self._all(f"SELECT digest FROM blobs WHERE digest IN ({marks})", *page)
            found |= {row[0].hex() for row in rows}
        return found

    def digests_starting_with(self, prefix: str, limit: int = 3) -> list[str]:
        """Return the first digests that begin with a hexadecimal prefix."""
        low = bytes.fromhex(prefix.ljust(64, "0"))
        high = bytes.fromhex(prefix.ljust(64, "f"))
        sql = "SELECT digest FROM blobs WHERE digest BETWEEN ? AND ? ORDER BY digest LIMIT ?"
        return [row[0].hex() for row in self._all(sql, low, high, limit)]

    def blobs(self, *, order: str = "digest") -> Iterator[Blob]:
        """Go through all blobs in pages; the index may be written in between.

        Costs 8 bytes of memory per blob: the order is that of the moment of the call.
        """
        rows = self._all(f"SELECT id FROM blobs ORDER BY {_ORDERS[order]}")
        ids = array("q", map(number_of, rows))
        for start in range(0, len(ids), _PAGE):
            yield from self.blobs_among(ids[start : start + _PAGE])

    def blobs_after(self, digest: bytes, limit: int) -> list[Blob]:
        """Return the next blobs in order of digest: a page for work that writes in between."""
        sql = f"SELECT {_BLOB} FROM blobs WHERE digest > ? ORDER BY digest LIMIT ?"
        return [_blob(row) for row in self._ahead(1, digest, self._all(sql, digest, limit))]

    def digests(self) -> Iterator[list[tuple[int, str]]]:
        """Go through (id, digest) of all blobs, in pages that come from one moment each."""
        sql = "SELECT id, lower(hex(digest)) FROM blobs WHERE id > ? ORDER BY id LIMIT ?"
        last = 0
        while page := self._all(sql, last, _LONG_PAGE):
            yield page
            if page[-1][0] <= last:
                raise IndexDamagedError(f"{self.path} is damaged: its rows are not in order")
            last = page[-1][0]

    def blobs_among(self, blobs: Iterable[int]) -> list[Blob]:
        """Return the blobs of these ids, as far as there are any."""
        sql = f"SELECT {_BLOB} FROM json_each(?) JOIN blobs ON blobs.id = value ORDER BY key"
        return [_blob(row) for row in self._all(sql, json.dumps(list(blobs)))]

    def add_blob(
        self,
        digest: str,
        st: os.stat_result,
        *,
        trust: Trust = Trust.VERIFIED,
        unsynced: str | None = None,
        aliases: Mapping[Algorithm, str] | None = None,
    ) -> int:
        """Insert or renew the row of a blob, with the hashes known for it; return its id."""
        values = _blob_values(digest, st, trust, unsynced)
        blob = self._value(f"{_ADD_BLOB} RETURNING id", *values)
        if aliases:
            self.add_aliases(blob, aliases)
        return blob

    def add_linked_blobs(
        self,
        files: Iterable[tuple[str, os.stat_result, Trust, str]],
        *,
        unsynced: str,
        filesystem: str,
        owner: int | None,
    ) -> None:
        """Insert or renew (digest, stat, trust, path) of files that are blobs and hard links."""
        now = int(time.time())
        rows = list(files)
        self._run_many(
            _ADD_BLOB, [_blob_values(d, st, trust, unsynced) for d, st, trust, _ in rows]
        )
        links = [
            (os.fsencode(path), filesystem, signed(st.st_ino), owner, now, bytes.fromhex(digest))
            for digest, st, _, path in rows
        ]
        sql = (
            "INSERT OR REPLACE INTO links (path, blob, kind, filesystem, inode, owner, made_at)"
            " SELECT ?, id, 'hardlink', ?, ?, ?, ? FROM blobs WHERE digest = ?"
        )
        self._run_many(sql, links)
        if owner is not None:
            held = [(owner, bytes.fromhex(digest)) for digest, _, _, _ in rows]
            sql = "INSERT OR IGNORE INTO holds SELECT ?, id FROM blobs WHERE digest = ?"
            self._run_many(sql, held)

    def refresh(self, blob: int, st: os.stat_result, trust: Trust, *, synced: bool = False) -> None:
        """Record a blob's stat anew, after our own link operation or a fresh hash of it."""
        keep = "" if not synced else ", unsynced = NULL"
        sql = (
            "UPDATE blobs SET allocated = ?, inode = ?, size = ?, mtime_ns = ?, ctime_ns = ?,"
            f" links = ?, trust = ?{keep} WHERE id = ?"
        )
        values = (
            allocated_bytes(st), signed(st.st_ino), *StatKey.of(st),
            st.st_nlink, int(trust), blob,
        )  # fmt: skip
        self._run(sql, *values)

    def touch(self, blob: int, now: float | None = None) -> None:
        """Remember that a blob was used."""
        self._run("UPDATE blobs SET used_at = ? WHERE id = ?", int(now or time.time()), blob)

    def mark_gone(self, blob: int, trust: Trust = Trust.LOST) -> None:
        """Remember that a blob's bytes are gone, but keep its aliases, links and holds."""
        sql = "UPDATE blobs SET allocated = 0, links = 0, inode = -1, trust = ? WHERE id = ?"
        self._run(sql, int(trust), blob)

    def drop_blob(self, blob: int) -> None:
        """Forget a blob with its aliases, links and holds."""
        self._run("DELETE FROM blobs WHERE id = ?", blob)

    def totals(self) -> Totals:
        """Return the sums over all blobs: one pass over the table."""
        sql = (
            "SELECT count(*), total(size), total(allocated), total(links = 1),"
            " total(CASE links WHEN 1 THEN allocated ELSE 0 END), total(size * links), total(links)"
            f" FROM blobs WHERE trust < {int(Trust.LOST)}"
        )
        numbers = [int(value) for value in self._all(sql)[0]]
        names = (
            "blobs",
            "size",
            "allocated",
            "only_blobs",
            "only_allocated",
            "linked_size",
            "links",
        )
        return Totals(**dict(zip(names, numbers, strict=True)))

    def content_mark(self) -> tuple[int, ...]:
        """Return figures that change when blobs or their sha256 come or go: a pass over each."""
        blobs = (
            "SELECT count(*), coalesce(max(id), 0), coalesce(sum(size), 0),"
            f" coalesce(sum(added_at), 0) FROM blobs WHERE trust < {int(Trust.LOST)}"
        )
        aliases = "SELECT count(*) FROM aliases WHERE algorithm = 'sha256'"
        return (*self._all(blobs)[0], self._value(aliases))

    def clear(self) -> None:
        """Forget links and owners, and that any blob is here; `drop_lost` forgets what stays lost.

        What is known of folders, memos and volumes stays.
        """
        for table in ("links", "holds", "owners"):
            self._run(f"DELETE FROM {table}")
        sql = "UPDATE blobs SET allocated = 0, links = 0, inode = -1, trust = ?"
        self._run(sql, int(Trust.LOST))

    def drop_lost(self) -> None:
        """Forget the blobs whose bytes are gone, with all that was known of them."""
        self._run("DELETE FROM blobs WHERE trust = ?", int(Trust.LOST))

    # aliases

    def add_aliases(self, blob: int, values: Mapping[Algorithm, str]) -> None:
        """Remember other hashes of a blob's bytes."""
        sql = "INSERT OR REPLACE INTO aliases (algorithm, value, blob) VALUES (?, ?, ?)"
        for algorithm, value in values.items():
            if algorithm != "blake3":
                self._run(sql, algorithm, bytes.fromhex(value), blob)

    def aliases_of(self, blob: int) -> dict[Algorithm, str]:
        """Return the other hashes known for a blob."""
        rows = self._all(
            "SELECT algorithm, value FROM aliases WHERE blob = ? ORDER BY algorithm", blob
        )
        return {algorithm: value.hex() for algorithm, value in rows}

    def aliases(self, algorithm: str) -> Iterator[tuple[str, str]]:
        """Go through (value, digest) of all aliases of one algorithm, in pages."""
        sql = (
            "SELECT value, digest FROM aliases JOIN blobs ON blobs.id = blob"
            " WHERE algorithm = ? AND value > ? ORDER BY value LIMIT ?"
        )
        after = b""
        while page := self._ahead(0, after, self._all(sql, algorithm, after, _PAGE)):
            after = page[-1][0]
            yield from [(value.hex(), digest.hex()) for value, digest in page]

    # links

    def add_link(
        self,
        path: str,
        blob: int,
        *,
        kind: LinkKind,
        filesystem: str,
        inode: int,
        owner: int | None,
    ) -> None:
        """Remember a path that shares a blob; a path has one row."""
        sql = (
            "INSERT OR REPLACE INTO links (path, blob, kind, filesystem, inode, owner, made_at)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)"
        )
        now = int(time.time())
        self._run(sql, os.fsencode(path), blob, kind, filesystem, signed(inode), owner, now)

    def drop_link(self, path: str | Path) -> None:
        """Forget a link."""
        self._run("DELETE FROM links WHERE path = ?", os.fsencode(path))

    def link(self, path: str | Path) -> Link | None:
        """Return the link at a path."""
        sql = f"SELECT {_LINK} FROM links JOIN blobs ON blobs.id = blob WHERE path = ?"
        row = self._one(sql, os.fsencode(path))
        return _link(row) if row else None

    def links_of(self, blob: int) -> list[Link]:
        """Return the recorded links of a blob."""
        sql = (
            f"SELECT {_LINK} FROM links JOIN blobs ON blobs.id = blob WHERE blob = ? ORDER BY path"
        )
        return [_link(row) for row in self._all(sql, blob)]

    def links_among(self, blobs: Iterable[int]) -> dict[int, list[Link]]:
        """Return the recorded links of these blobs, by blob; those without any are left out."""
        sql = (
            f"SELECT links.blob, {_LINK} FROM json_each(?) CROSS JOIN links ON links.blob = value"
            " JOIN blobs ON blobs.id = links.blob"
        )
        found: dict[int, list[Link]] = {}
        for blob, *row in self._all(sql, json.dumps(list(blobs))):
            found.setdefault(blob, []).append(_link(tuple(row)))
        return found

    def links_after(self, path: str, limit: int, *, kind: LinkKind | None = None) -> list[Link]:
        """Return the next links in order of path: a page for work that writes in between."""
        sql = (
            f"SELECT {_LINK} FROM links JOIN blobs ON blobs.id = blob"
            " WHERE path > ? AND (? IS NULL OR links.kind = ?) ORDER BY path LIMIT ?"
        )
        after = os.fsencode(path)
        return [_link(r) for r in self._ahead(0, after, self._all(sql, after, kind, kind, limit))]

    # owners

    def add_owner(self, owner: Owner) -> int:
        """Insert or renew an owner; return its id."""
        sql = (
            "INSERT INTO owners (kind, name, path, root, filesystem, made_at)"
            " VALUES (?, ?, ?, ?, ?, ?)"
            " ON CONFLICT (kind, name) DO UPDATE SET path = excluded.path, root = excluded.root,"
            " filesystem = excluded.filesystem RETURNING id"
        )
        path, root = (None if p is None else os.fsencode(p) for p in (owner.path, owner.root))
        values = (
            owner.kind,
            os.fsencode(owner.name),
            path,
            root,
            owner.filesystem,
            int(time.time()),
        )
        return int(self._value(sql, *values))

    def drop_owner(self, owner: int) -> None:
        """Forget an owner and what it held."""
        self._run("DELETE FROM owners WHERE id = ?", owner)

    def owners(self) -> list[Owner]:
        """Return all owners."""
        sql = "SELECT id, kind, name, path, root, filesystem FROM owners ORDER BY kind, name"
        return [_owner(row) for row in self._all(sql)]

    def hold(self, owner: int, blob: int) -> None:
        """Let an owner keep a blob alive."""
        self._run("INSERT OR IGNORE INTO holds (owner, blob) VALUES (?, ?)", owner, blob)

    def release(self, owner: int, blob: int) -> bool:
        """End a hold; say whether there was one."""
        sql = "DELETE FROM holds WHERE owner = ? AND blob = ?"
        return self._run(sql, owner, blob) > 0

    def holders_of(self, blob: int) -> list[Owner]:
        """Return the owners that hold a blob."""
        sql = (
            "SELECT id, kind, name, path, root, filesystem FROM holds"
            " JOIN owners ON owners.id = owner WHERE blob = ? ORDER BY kind, name"
        )
        return [_owner(row) for row in self._all(sql, blob)]

    def holds_among(self, blobs: Iterable[int]) -> dict[int, list[int]]:
        """Return the owners that hold these blobs, by blob; those without any are left out."""
        sql = "SELECT blob, owner FROM json_each(?) CROSS JOIN holds ON blob = value"
        found: dict[int, list[int]] = {}
        for blob, owner in self._all(sql, json.dumps(list(blobs))):
            found.setdefault(blob, []).append(owner)
        return found

    def digests_held_by(self, owner: int) -> list[str]:
        """Return the digests of the blobs that an owner holds."""
        sql = "SELECT digest FROM holds JOIN blobs ON blobs.id = blob WHERE owner = ?"
        return [digest.hex() for (digest,) in self._all(sql, owner)]

    def _ahead(self, column: int, after: bytes, page: list[_Row]) -> list[_Row]:
        """Return a page that leads on; damage to the index may give the same one for ever."""
        if page and not (isinstance(page[-1][column], bytes) and page[-1][column] > after):
            raise IndexDamagedError(f"{self.path} is damaged: its rows are not in order")
        return page

    def _one_blob(self, sql: str, *values: object) -> Blob | None:
        row = self._one(sql, *values)
        return None if row is None else _blob(row)


def _blob_values(
    digest: str, st: os.stat_result, trust: Trust, unsynced: str | None
) -> tuple[object, ...]:
    now, key = int(time.time()), StatKey.of(st)
    return (
        bytes.fromhex(digest), key.size, allocated_bytes(st), signed(st.st_ino), key.mtime_ns,
        key.ctime_ns, st.st_nlink, int(trust), unsynced, now, now,
    )  # fmt: skip


@of_row
def _blob(row: _Row) -> Blob:
    (
        id_,
        digest,
        size,
        allocated,
        inode,
        mtime_ns,
        ctime_ns,
        links,
        trust,
        unsynced,
        added,
        used,
    ) = row
    sum((id_, size, allocated, inode, mtime_ns, ctime_ns, links))  # a TypeError unless numbers
    if not (0 <= added < _NO_TIME and 0 <= used < _NO_TIME):
        raise ValueError(used)
    return Blob(
        id=id_, digest=digest.hex(), size=size, allocated=allocated, inode=inode,
        key=StatKey(size, mtime_ns, ctime_ns), links=links, trust=Trust(trust), unsynced=unsynced,
        added=added, used=used,
    )  # fmt: skip


@of_row
def _link(row: _Row) -> Link:
    path, digest, kind, filesystem, inode, owner, made = row
    return Link(
        path=Path(os.fsdecode(path)), digest=digest.hex(), kind=cast("LinkKind", kind),
        filesystem=filesystem, inode=inode, owner=owner, made_at=when(made),
    )  # fmt: skip


@of_row
def _owner(row: _Row) -> Owner:
    id_, kind, name, path, root, filesystem = row
    as_path = [None if p is None else Path(os.fsdecode(p)) for p in (path, root)]
    return Owner(
        id=id_,
        kind=cast("OwnerKind", kind),
        name=os.fsdecode(name),
        path=as_path[0],
        root=as_path[1],
        filesystem=filesystem,
    )
