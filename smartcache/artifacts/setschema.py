"""The tables of a set's index, and how an older one becomes a current one.

Everything in it but `used_at` and the failures can be made again from the packs. Keys are the bytes
that `keys.check_key` makes of them, positions those of `records.py`, times are Unix seconds.
"""

from __future__ import annotations

_VERSION_1 = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;

CREATE TABLE packs (
    number    INTEGER PRIMARY KEY,
    sealed    INTEGER NOT NULL,   -- 1: nothing will be written to it any more
    watermark INTEGER NOT NULL,   -- bytes of it that the rows speak of
    live      INTEGER NOT NULL,   -- bytes of records that are wanted
    artifacts INTEGER NOT NULL,   -- how many of them are artifacts
    min_seq   INTEGER NOT NULL,
    max_seq   INTEGER NOT NULL
);

CREATE TABLE layouts (
    id     INTEGER PRIMARY KEY,   -- 63 bits of its digest: others remember them
    digest BLOB NOT NULL UNIQUE,
    body   BLOB NOT NULL
);

CREATE TABLE artifacts (
    key        BLOB PRIMARY KEY,
    seq        INTEGER NOT NULL,
    place      INTEGER NOT NULL,  -- position of its record
    length     INTEGER NOT NULL,  -- bytes of the record's payload
    layout     INTEGER NOT NULL,
    chunks     BLOB,              -- uids, 8 bytes each
    used_at    INTEGER NOT NULL,
    expires_at INTEGER,
    pinned     INTEGER            -- sequence number of its pin; negative: of the end of one
) WITHOUT ROWID;
CREATE INDEX artifacts_expiry ON artifacts (expires_at) WHERE expires_at IS NOT NULL;

CREATE TABLE chunks (
    uid   INTEGER PRIMARY KEY,
    hash  INTEGER NOT NULL,       -- XXH3-64 of its bytes, signed
    size  INTEGER NOT NULL,
    refs  INTEGER NOT NULL,       -- by artifacts; 0: dead, and back to life when it is put again
    place INTEGER                 -- position where it is now; NULL: where it was born
);
CREATE INDEX chunks_hash ON chunks (hash);

-- What was deleted, as long as the record that says so is in a pack.
CREATE TABLE deleted (key BLOB PRIMARY KEY, seq INTEGER NOT NULL) WITHOUT ROWID;

CREATE TABLE failures (
    key       BLOB PRIMARY KEY,
    reason    TEXT NOT NULL,
    count     INTEGER NOT NULL,
    failed_at INTEGER NOT NULL
) WITHOUT ROWID;
"""

MIGRATIONS: tuple[str, ...] = (_VERSION_1,)
"""MIGRATIONS[n] turns version n into version n + 1, in one transaction."""
