"""What a volume remembers of its blobs: rows, other hashes, links and owners; and all its SQL.

The index is a memory, never the truth: what it says of files is checked against the disk, and can
be made again from it. Owners other than pins cannot: they are lost with the index. One method
answers one question. The tables of `catalog` are made here too: a question about duplicates asks
both.

Paths are BLOBs (file names need not be UTF-8), digests are 32 raw bytes, times are Unix seconds.
"""

from __future__ import annotations

import json
import os
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

from smartcache.errors import IndexDamagedError
from smartcache.store.records import Blob, Link, LinkKind, Owner, OwnerKind, Totals, Trust
from smartcache.system.hashing import Algorithm
from smartcache.system.kernel import StatKey, allocated_bytes
from smartcache.system.sqlite import Database, number_of, of_row, signed

SCHEMA = """
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
    trust     INTEGER NOT NULL,   -- records.Trust
    unsynced  TEXT,               -- boot in which bytes were adopted that we did not fsync
    added_at  INTEGER NOT NULL,
    used_at   INTEGER NOT NULL
);
CREATE INDEX blobs_inode ON blobs (inode);

CREATE TABLE contents (
    digest   BLOB PRIMARY KEY,    -- of a blob or of a file outside
    sha256   BLOB,
    git_sha1 BLOB
) WITHOUT ROWID;
CREATE INDEX contents_sha256 ON contents (sha256) WHERE sha256 IS NOT NULL;
CREATE INDEX contents_git_sha1 ON contents (git_sha1) WHERE git_sha1 IS NOT NULL;

CREATE TABLE owners (
    id         INTEGER PRIMARY KEY,
    kind       TEXT NOT NULL,
    name       BLOB NOT NULL,     -- may be a path, which need not be UTF-8
    path       BLOB,              -- what must exist for the owner to be live; NULL: always live
    root       BLOB,              -- the directory whose absence means "unmounted", not "deleted"
    filesystem TEXT,
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
    owner      INTEGER REFERENCES owners (id) ON DELETE SET NULL
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

CREATE TABLE filesystems (
    id   INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE     -- filesystem_id, as in memos and links
);

CREATE TABLE directories (        -- a path is written once for all files in it
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

CREATE TABLE memos (
    filesystem TEXT NOT NULL,
    inode      INTEGER NOT NULL,
    size       INTEGER NOT NULL,
    mtime_ns   INTEGER NOT NULL,
    ctime_ns   INTEGER NOT NULL,
    racy       INTEGER NOT NULL,
    digest     BLOB,
    sample     BLOB,              -- XXH3 of head and tail, a reason to compare or not to
    PRIMARY KEY (filesystem, inode)
) WITHOUT ROWID;
CREATE INDEX memos_digest ON memos (digest) WHERE digest IS NOT NULL;

CREATE TABLE volumes (
    path       BLOB PRIMARY KEY,
    filesystem TEXT NOT NULL
) WITHOUT ROWID;
"""

VERSION = 6

HASHES: dict[Algorithm, str] = {"sha256": "sha256", "git-sha1": "git_sha1"}
"""The columns of other hashes than the digest."""
_BLOB = (
    "blobs.id, blobs.digest, size, allocated, blobs.inode, mtime_ns, ctime_ns, links, trust,"
    " unsynced, added_at, used_at"
)
_LINK = "links.path, blobs.digest, links.kind, links.filesystem, links.inode, links.owner"
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


class Index(Database):
    """The index of one volume."""

    schema: ClassVar[str] = SCHEMA
    schema_version: ClassVar[int] = VERSION

    # blobs

    def blob(self, digest: str) -> Blob | None:
        """Return the blob of a digest, if the store should have its bytes."""
        blob = self.record(digest)
        return blob if blob is not None and blob.is_here else None

    def record(self, digest: str) -> Blob | None:
        """Return what is known of a digest, even if its bytes are lost."""
        return self._blob(f"SELECT {_BLOB} FROM blobs WHERE digest = ?", bytes.fromhex(digest))

    def blob_by_inode(self, inode: int) -> Blob | None:
        """Return the blob that lies in an inode of this filesystem."""
        return self._blob(f"SELECT {_BLOB} FROM blobs WHERE inode = ?", signed(inode))

    def blob_by_hash(self, algorithm: Algorithm, value: str) -> Blob | None:
        """Return the blob known under a hash, if the store should have its bytes."""
        if algorithm == "blake3":
            return self.blob(value)
        sql = (
            f"SELECT {_BLOB} FROM contents JOIN blobs ON blobs.digest = contents.digest"
            f" WHERE contents.{HASHES[algorithm]} = ? AND trust < {int(Trust.LOST)}"
        )
        return self._blob(sql, bytes.fromhex(value))

    def blobs_in(self, inodes: Iterable[int]) -> dict[int, Blob]:
        """Return the blobs that lie in these inodes of this filesystem, by inode."""
        sql = f"SELECT {_BLOB} FROM blobs WHERE inode IN (SELECT value FROM json_each(?))"
        rows = self.select(sql, json.dumps([signed(inode) for inode in inodes]))
        return {blob.inode: blob for blob in map(_blob, rows)}

    def known_digests(self, digests: Iterable[str]) -> set[str]:
        """Return those of the digests that have a row."""
        return {row[0].hex() for row in self._of_digests("SELECT digest FROM blobs", digests)}

    def digests_starting_with(self, prefix: str) -> list[str]:
        """Return the first digests that begin with a hexadecimal prefix."""
        low = bytes.fromhex(prefix.ljust(64, "0"))
        high = bytes.fromhex(prefix.ljust(64, "f"))
        sql = "SELECT digest FROM blobs WHERE digest BETWEEN ? AND ? ORDER BY digest LIMIT 3"
        return [row[0].hex() for row in self.select(sql, low, high)]

    def blobs(self, *, order: str = "digest") -> Iterator[Blob]:
        """Go through all blobs in pages; the index may be written in between.

        Costs 8 bytes of memory per blob: the order is that of the moment of the call.
        """
        rows = self.select(f"SELECT id FROM blobs ORDER BY {_ORDERS[order]}")
        ids = array("q", map(number_of, rows))
        for start in range(0, len(ids), _PAGE):
            yield from self.blobs_among(ids[start : start + _PAGE])

    def records(self) -> Iterator[Blob]:
        """Go through all that is known, by digest, in pages: the index may be written meanwhile."""
        sql = f"SELECT {_BLOB} FROM blobs WHERE digest > ? ORDER BY digest LIMIT ?"
        after = b""
        while page := self._ahead(1, after, self.select(sql, after, _PAGE)):
            after = page[-1][1]
            yield from map(_blob, page)

    def digests(self) -> Iterator[list[tuple[int, str]]]:
        """Go through (id, digest) of all blobs, in pages that come from one moment each."""
        sql = "SELECT id, lower(hex(digest)) FROM blobs WHERE id > ? ORDER BY id LIMIT ?"
        last = 0
        while page := self.select(sql, last, _LONG_PAGE):
            yield page
            if page[-1][0] <= last:
                raise IndexDamagedError(f"{self.path} is damaged: its rows are not in order")
            last = page[-1][0]

    def blobs_among(self, blobs: Iterable[int]) -> list[Blob]:
        """Return the blobs of these ids, as far as there are any."""
        sql = f"SELECT {_BLOB} FROM json_each(?) JOIN blobs ON blobs.id = value ORDER BY key"
        return [_blob(row) for row in self.select(sql, json.dumps(list(blobs)))]

    def add_blob(
        self,
        digest: str,
        st: os.stat_result,
        *,
        trust: Trust = Trust.VERIFIED,
        unsynced: str | None = None,
        hashes: Mapping[Algorithm, str] | None = None,
    ) -> int:
        """Insert or renew the row of a blob, with the hashes known for it; return its id."""
        values = _blob_values(digest, st, trust, unsynced)
        blob = self.number(f"{_ADD_BLOB} RETURNING id", *values)
        self.add_aliases(digest, hashes)
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
        rows = list(files)
        self.execute_many(
            _ADD_BLOB, [_blob_values(d, st, trust, unsynced) for d, st, trust, _ in rows]
        )
        links = [
            (os.fsencode(path), filesystem, signed(st.st_ino), owner, bytes.fromhex(digest))
            for digest, st, _, path in rows
        ]
        sql = (
            "INSERT OR REPLACE INTO links (path, blob, kind, filesystem, inode, owner)"
            " SELECT ?, id, 'hardlink', ?, ?, ? FROM blobs WHERE digest = ?"
        )
        self.execute_many(sql, links)
        if owner is not None:
            held = [(owner, bytes.fromhex(digest)) for digest, _, _, _ in rows]
            sql = "INSERT OR IGNORE INTO holds SELECT ?, id FROM blobs WHERE digest = ?"
            self.execute_many(sql, held)

    def refresh(self, blob: int, st: os.stat_result, trust: Trust, *, synced: bool = False) -> None:
        """Record a blob's stat anew, after our own link operation or a fresh hash of it."""
        keep = "" if not synced else ", unsynced = NULL"
        sql = (
            "UPDATE blobs SET allocated = ?, inode = ?, size = ?, mtime_ns = ?, ctime_ns = ?,"
            f" links = ?, trust = ?{keep} WHERE id = ?"
        )
        where = allocated_bytes(st), signed(st.st_ino)
        self.execute(sql, *where, *StatKey.of(st), st.st_nlink, int(trust), blob)

    def touch(self, blob: int, now: float | None = None) -> None:
        """Remember that a blob was used."""
        self.execute("UPDATE blobs SET used_at = ? WHERE id = ?", int(now or time.time()), blob)

    def mark_gone(self, blob: int) -> None:
        """Remember that a blob's bytes are gone, but keep its links and holds."""
        sql = "UPDATE blobs SET allocated = 0, links = 0, inode = -1, trust = ? WHERE id = ?"
        self.execute(sql, int(Trust.LOST), blob)

    def add_lost(self, digest: str) -> None:
        """Remember a blob whose bytes are not here now, for what holds it."""
        sql = (
            "INSERT OR IGNORE INTO blobs (digest, size, allocated, inode, mtime_ns, ctime_ns,"
            " links, trust, added_at, used_at) VALUES (?, 0, 0, -1, 0, 0, 0, ?, ?, ?)"
        )
        now = int(time.time())
        self.execute(sql, bytes.fromhex(digest), int(Trust.LOST), now, now)

    def drop_blob(self, blob: int) -> None:
        """Forget a blob with its links and holds."""
        self.execute("DELETE FROM blobs WHERE id = ?", blob)

    def totals(self) -> Totals:
        """Return the sums over all blobs: one pass over the table."""
        sql = (
            "SELECT count(*), total(size), total(allocated),"
            " total(CASE links WHEN 1 THEN allocated ELSE 0 END)"
            f" FROM blobs WHERE trust < {int(Trust.LOST)}"
        )
        return Totals(*(int(value) for value in self.select(sql)[0]))

    def clear(self) -> None:
        """Forget links and owners, and that any blob is here; `drop_lost` forgets what stays lost.

        What is known of folders, memos and volumes stays.
        """
        for table in ("links", "holds", "owners"):
            self.execute(f"DELETE FROM {table}")
        sql = "UPDATE blobs SET allocated = 0, links = 0, inode = -1, trust = ?"
        self.execute(sql, int(Trust.LOST))

    def drop_lost(self) -> None:
        """Forget the blobs whose bytes are gone, with all that was known of them."""
        self.execute("DELETE FROM blobs WHERE trust = ?", int(Trust.LOST))

    # other hashes of bytes

    def add_aliases(self, digest: str, values: Mapping[Algorithm, str] | None) -> None:
        """Remember other hashes of the bytes that have this digest."""
        known = {HASHES[name]: value for name, value in (values or {}).items() if name in HASHES}
        if known:
            columns, marks = ", ".join(known), ", ?" * len(known)
            kept = ", ".join(f"{name} = excluded.{name}" for name in known)
            self.execute(
                f"INSERT INTO contents (digest, {columns}) VALUES (?{marks})"
                f" ON CONFLICT (digest) DO UPDATE SET {kept}",
                *map(bytes.fromhex, (digest, *known.values())),
            )

    def hashes_of(self, digests: Iterable[str]) -> dict[str, dict[Algorithm, str]]:
        """Return all that is known of the hashes of some bytes, by digest, which is one of them."""
        found: dict[str, dict[Algorithm, str]] = {each: {"blake3": each} for each in digests}
        sql = f"SELECT digest, {', '.join(HASHES.values())} FROM contents"
        for digest, *values in self._of_digests(sql, found):
            for name, value in zip(HASHES, values, strict=True):
                if value is not None:
                    found[digest.hex()][name] = value.hex()
        return found

    def digests_by_sha256(self) -> Iterator[tuple[str, str]]:
        """Go through (sha256, digest) of the blobs whose sha256 is known, in its order."""
        sql = (
            "SELECT sha256, contents.digest FROM contents"
            " JOIN blobs ON blobs.digest = contents.digest"
            " WHERE sha256 > ? ORDER BY sha256 LIMIT ?"
        )
        after = b""
        while page := self._ahead(0, after, self.select(sql, after, _PAGE)):
            after = page[-1][0]
            yield from [(value.hex(), digest.hex()) for value, digest in page]

    def drop_unused_hashes(self) -> None:
        """Forget the hashes of bytes that neither a blob nor a known file has."""
        self.execute(
            "DELETE FROM contents WHERE digest NOT IN (SELECT digest FROM blobs)"
            " AND digest NOT IN (SELECT digest FROM memos WHERE digest IS NOT NULL)"
        )

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
            "INSERT OR REPLACE INTO links (path, blob, kind, filesystem, inode, owner)"
            " VALUES (?, ?, ?, ?, ?, ?)"
        )
        self.execute(sql, os.fsencode(path), blob, kind, filesystem, signed(inode), owner)

    def add_hard_links(
        self, links: Iterable[tuple[int, str | Path, int]], *, filesystem: str, owner: int | None
    ) -> None:
        """Remember (blob, path, inode) of files that are hard links of blobs, for their owner."""
        found = list(links)
        sql = (
            "INSERT OR REPLACE INTO links (path, blob, kind, filesystem, inode, owner)"
            " VALUES (?, ?, 'hardlink', ?, ?, ?)"
        )
        rows = [(os.fsencode(p), blob, filesystem, signed(i), owner) for blob, p, i in found]
        with self.write():
            self.execute_many(sql, rows)
            if owner is not None:
                held = {(owner, blob) for blob, _, _ in found}
                self.execute_many("INSERT OR IGNORE INTO holds (owner, blob) VALUES (?, ?)", held)

    def drop_link(self, path: str | Path) -> None:
        """Forget a link."""
        self.execute("DELETE FROM links WHERE path = ?", os.fsencode(path))

    def link(self, path: str | Path) -> Link | None:
        """Return the link at a path."""
        sql = f"SELECT {_LINK} FROM links JOIN blobs ON blobs.id = blob WHERE path = ?"
        row = self.select_one(sql, os.fsencode(path))
        return _link(row) if row else None

    def links_of(self, blob: int) -> list[Link]:
        """Return the recorded links of a blob."""
        sql = (
            f"SELECT {_LINK} FROM links JOIN blobs ON blobs.id = blob WHERE blob = ? ORDER BY path"
        )
        return [_link(row) for row in self.select(sql, blob)]

    def name_of(self, blob: Blob) -> str:
        """Return what people know a blob by: the name of a file that has its bytes, or its id."""
        links = self.links_of(blob.id)
        return links[0].path.name if links else blob.digest[:12]

    def links_among(self, blobs: Iterable[int]) -> dict[int, list[Link]]:
        """Return the recorded links of these blobs, by blob; those without any are left out."""
        sql = (
            f"SELECT links.blob, {_LINK} FROM json_each(?) CROSS JOIN links ON links.blob = value"
            " JOIN blobs ON blobs.id = links.blob"
        )
        found: dict[int, list[Link]] = {}
        for blob, *row in self.select(sql, json.dumps(list(blobs))):
            found.setdefault(blob, []).append(_link(tuple(row)))
        return found

    def links_after(self, path: str, limit: int) -> list[Link]:
        """Return the next links in order of path: a page for work that writes in between."""
        sql = (
            f"SELECT {_LINK} FROM links JOIN blobs ON blobs.id = blob"
            " WHERE path > ? ORDER BY path LIMIT ?"
        )
        after = os.fsencode(path)
        return [_link(r) for r in self._ahead(0, after, self.select(sql, after, limit))]

    # owners

    def add_owner(self, owner: Owner) -> int:
        """Insert or renew an owner; return its id."""
        sql = (
            "INSERT INTO owners (kind, name, path, root, filesystem) VALUES (?, ?, ?, ?, ?)"
            " ON CONFLICT (kind, name) DO UPDATE SET path = excluded.path, root = excluded.root,"
            " filesystem = excluded.filesystem RETURNING id"
        )
        path, root = (None if p is None else os.fsencode(p) for p in (owner.path, owner.root))
        name = os.fsencode(owner.name)
        return int(self.number(sql, owner.kind, name, path, root, owner.filesystem))

    def drop_owner(self, owner: int) -> None:
        """Forget an owner and what it held."""
        self.execute("DELETE FROM owners WHERE id = ?", owner)

    def owners(self) -> list[Owner]:
        """Return all owners."""
        sql = "SELECT id, kind, name, path, root, filesystem FROM owners ORDER BY kind, name"
        return [_owner(row) for row in self.select(sql)]

    def hold(self, owner: int, blob: int) -> None:
        """Let an owner keep a blob alive."""
        self.execute("INSERT OR IGNORE INTO holds (owner, blob) VALUES (?, ?)", owner, blob)

    def release(self, owner: int, blob: int) -> bool:
        """End a hold; say whether there was one."""
        sql = "DELETE FROM holds WHERE owner = ? AND blob = ?"
        return self.execute(sql, owner, blob) > 0

    def holders_of(self, blob: int) -> list[Owner]:
        """Return the owners that hold a blob."""
        sql = (
            "SELECT id, kind, name, path, root, filesystem FROM holds"
            " JOIN owners ON owners.id = owner WHERE blob = ? ORDER BY kind, name"
        )
        return [_owner(row) for row in self.select(sql, blob)]

    def holds_among(self, blobs: Iterable[int]) -> dict[int, list[int]]:
        """Return the owners that hold these blobs, by blob; those without any are left out."""
        sql = "SELECT blob, owner FROM json_each(?) CROSS JOIN holds ON blob = value"
        found: dict[int, list[int]] = {}
        for blob, owner in self.select(sql, json.dumps(list(blobs))):
            found.setdefault(blob, []).append(owner)
        return found

    def digests_held_by(self, owner: int) -> list[str]:
        """Return the digests of the blobs that an owner holds."""
        sql = "SELECT digest FROM holds JOIN blobs ON blobs.id = blob WHERE owner = ?"
        return [digest.hex() for (digest,) in self.select(sql, owner)]

    # the other volumes

    def add_volume(self, path: Path, filesystem: str) -> None:
        """Remember another volume."""
        sql = "INSERT OR REPLACE INTO volumes VALUES (?, ?)"
        self.execute(sql, os.fsencode(path), filesystem)

    def volumes(self) -> list[tuple[Path, str]]:
        """Return (path, filesystem) of the other volumes."""
        rows = self.select("SELECT path, filesystem FROM volumes ORDER BY path")
        return list(map(_volume, rows))

    def _ahead(self, column: int, after: bytes, page: list[_Row]) -> list[_Row]:
        """Return a page that leads on; damage to the index may give the same one for ever."""
        if page and not (isinstance(page[-1][column], bytes) and page[-1][column] > after):
            raise IndexDamagedError(f"{self.path} is damaged: its rows are not in order")
        return page

    def _of_digests(self, sql: str, digests: Iterable[str]) -> Iterator[_Row]:
        """Go through the rows of some digests."""
        wanted = list(map(bytes.fromhex, digests))
        for start in range(0, len(wanted), _LONG_PAGE):
            page = wanted[start : start + _LONG_PAGE]
            yield from self.select(f"{sql} WHERE digest IN ({', '.join('?' * len(page))})", *page)

    def _blob(self, sql: str, *values: object) -> Blob | None:
        row = self.select_one(sql, *values)
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
    id_, digest, size, allocated, inode, mtime_ns, ctime_ns, links, trust = row[:9]
    unsynced, added, used = row[9:]
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
    path, digest, kind, filesystem, inode, owner = row
    return Link(
        path=Path(os.fsdecode(path)), digest=digest.hex(), kind=cast("LinkKind", kind),
        filesystem=filesystem, inode=inode, owner=owner,
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


@of_row
def _volume(row: tuple[Any, ...]) -> tuple[Path, str]:
    return Path(os.fsdecode(row[0])), str(row[1])
