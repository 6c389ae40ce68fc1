"""What every changed file was before: the source of undo, and the one precious database.

A change is a row, on the disk before the first name moves (`begun`) and noted when the last has
(`done`, `back`, `undone`). So the table holds at least what happened; whoever acts on it looks at
the disk first. A row that is `begun` or `undoing` when somebody gets the store's lock was left by a
dead process.

A file is known by the lasting id of its filesystem and its path below that filesystem's root: a
drive that is mounted elsewhere is still the same drive. Where the pools of other filesystems lie is
kept here too.

SQLite with a rollback journal and a sync of every commit; a copy is made after each batch, and
takes its place if a page is found damaged at opening.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from smartcache.errors import FileSkippedError, IndexDamagedError
from smartcache.store.catalog import UNSIGNED
from smartcache.store.layout import move_aside
from smartcache.system.faults import reached
from smartcache.system.filesystems import Mounts
from smartcache.system.ownfiles import atomically
from smartcache.system.sqlite import Database, of_row, signed

How = Literal["become", "exchange", "create", "give", "copy", "own"]
"""What was done: a file's own inode became the blob; it was exchanged with a link of the blob; a
free path got a link, or one that others know of too (undo gives it bytes of its own), or a copy; a
file that shared its bytes with others, but is no blob, got its own."""
State = Literal["begun", "done", "back", "undoing", "undone"]
_AMONG = "IN (SELECT value FROM json_each(?))"
OPEN = "state IN ('begun', 'undoing')"
_SCHEMA = """
CREATE TABLE changes (
    id         INTEGER PRIMARY KEY AUTOINCREMENT,  -- none is given twice
    batch      TEXT NOT NULL,
    label      TEXT NOT NULL,
    at         INTEGER NOT NULL,
    how        TEXT NOT NULL,
    state      TEXT NOT NULL,
    filesystem TEXT NOT NULL,     -- its lasting id; '': it has none, and the path is absolute
    path       BLOB NOT NULL,     -- below the root of the filesystem
    digest     TEXT NOT NULL,
    size       INTEGER NOT NULL,
    temporary  BLOB NOT NULL,     -- our random name beside the file while the change is made
    mode       INTEGER NOT NULL,
    gid        INTEGER NOT NULL,
    mtime_ns   INTEGER NOT NULL,
    xattrs     TEXT NOT NULL,
    inode      INTEGER NOT NULL,
    links      INTEGER NOT NULL,
    folder     INTEGER NOT NULL   -- inode of the folder: another one at the path is not the place
);
CREATE INDEX by_state ON changes (state, batch);
CREATE INDEX by_digest ON changes (digest);
CREATE TABLE pools (filesystem TEXT PRIMARY KEY, path BLOB NOT NULL) WITHOUT ROWID;
"""
_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Change:
    """One row: what was done to a path, and what the file was before."""

    how: How
    path: Path
    """Where it is now; of a drive that is not mounted, below its root."""
    digest: str
    size: int
    temporary: str = ""
    mode: int = 0o644
    gid: int = -1
    mtime_ns: int = 0
    xattrs: str = "{}"
    inode: int = -1
    links: int = 1
    folder: int = -1
    id: int = 0
    batch: str = ""
    state: State = "begun"
    away: str = ""
    """Why the path cannot be looked at now: its drive is not mounted."""

    @property
    def attributes(self) -> dict[str, str]:
        """Its extended attributes: name -> hexadecimal bytes."""
        found = json.loads(self.xattrs)
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSummary:
    """What one command did: its changes that can still be undone."""

    id: str
    label: str
    at: datetime
    changes: int
    size: int
    hows: tuple[str, ...]


@dataclass(slots=True)
class Batch:
    """The changes of one command: one entry of the history. Several threads may add to it."""

    label: str
    id: str = field(default_factory=lambda: secrets.token_hex(4))
    changes: list[Change] = field(default_factory=list)
    """Those that were done."""
    freed: int = 0
    pending: list[Change] = field(default_factory=list)
    """Done, and still to be written down: paths that were free before, so nothing can be lost."""
    is_written: bool = False
    """Whether something of it stands in the journal."""


_COLUMNS = tuple(each.name for each in fields(Change) if each.name not in ("away", "path"))
_SELECT = f"SELECT filesystem, path, {', '.join(_COLUMNS)} FROM changes"
_INSERT = (
    f"INSERT INTO changes (label, at, filesystem, path, {', '.join(_COLUMNS)})"
    f" VALUES ({', '.join('?' * (len(_COLUMNS) + 4))})"
)


class Journal(Database):
    """The journal of a store."""

    schema: ClassVar[str] = _SCHEMA
    journal_mode: ClassVar[str] = "TRUNCATE"
    synchronous: ClassVar[str] = "FULL"

    def begin(self, batch: Batch, changes: Iterable[Change], mounts: Mounts) -> None:
        """Write changes down; they are on the disk when this returns, and know their ids."""
        now, rows = int(time.time()), []
        batch.is_written = True
        with self.write():
            last = self.number("SELECT IFNULL(MAX(seq), 0) FROM sqlite_sequence")
            for number, change in enumerate(changes, last + 1):
                change.id, change.batch = number, batch.id
                row = {column: getattr(change, column) for column in _COLUMNS}
                row["inode"], row["folder"] = signed(change.inode), signed(change.folder)
                row["temporary"] = os.fsencode(change.temporary)
                rows.append((batch.label, now, *_place(change, mounts), *row.values()))
            self.execute_many(_INSERT, rows)
        reached("journal: begun")

    def begin_or_move(self, batch: Batch, changes: Iterable[Change], mounts: Mounts) -> None:
        """Write down changes that have no row yet, and where those are by now that have one."""
        new = []
        for each in changes:
            if each.id:
                sql = "UPDATE changes SET filesystem = ?, path = ?, folder = ? WHERE id = ?"
                self.execute(sql, *_place(each, mounts), signed(each.folder), each.id)
            else:
                new.append(each)
        if new:
            self.begin(batch, new, mounts)

    def flush(self, batch: Batch, mounts: Mounts) -> None:
        """Write down what is done already and still pending in a batch."""
        pending, batch.pending = batch.pending, []
        if pending:
            for each in pending:
                each.state = "done"
            self.begin(batch, pending, mounts)

    def note(self, states: Iterable[tuple[State, int]]) -> None:
        """Write down what became of changes."""
        with self.write():
            self.execute_many("UPDATE changes SET state = ? WHERE id = ?", list(states))
        reached("journal: noted")

    def note_undoing(self, changes: Iterable[Change]) -> None:
        """Write down that changes are being undone, and to which file its mode goes back."""
        rows = [(signed(each.inode), each.mtime_ns, each.id) for each in changes]
        with self.write():
            sql = "UPDATE changes SET state = 'undoing', inode = ?, mtime_ns = ? WHERE id = ?"
            self.execute_many(sql, rows)
        reached("journal: undoing")

    def changes(self, where: str, *values: object, mounts: Mounts | None = None) -> list[Change]:
        """Return rows in order, each with the path it has now."""
        rows = self.select(f"{_SELECT} WHERE {where} ORDER BY id", *values)
        if not rows:
            return []
        mounts = mounts or Mounts()
        return [_change(row, mounts) for row in rows]

    def needed_names(self) -> set[str]:
        """Return the temporary names that open rows are told by."""
        rows = self.select(f"SELECT temporary FROM changes WHERE {OPEN}")
        return {os.fsdecode(row[0]) for row in rows}

    def open_changes(self, mounts: Mounts, change: int | None = None) -> list[Change]:
        """Return what dead processes left, or one row if it is still open."""
        if change is None:
            return self.changes(OPEN, mounts=mounts)
        return self.changes(f"id = ? AND {OPEN}", change, mounts=mounts)

    def done(self, batches: Iterable[str] | None) -> list[Change]:
        """Return what can be undone, of some batches or of all."""
        if batches is None:
            return self.changes("state = 'done'")
        return self.changes(f"state = 'done' AND batch {_AMONG}", json.dumps(list(batches)))

    def with_digests(self, digests: Iterable[str]) -> list[Change]:
        """Return what is done or open of some contents."""
        where = f"(state = 'done' OR {OPEN}) AND digest {_AMONG}"
        return self.changes(where, json.dumps(list(digests)))

    def twins(self, change: Change) -> list[Change]:
        """Return the rows of other names of a file, which have its bytes again."""
        where = "digest = ? AND inode = ? AND state IN ('back', 'undone')"
        return self.changes(where, change.digest, signed(change.inode))

    def joined(self, change: Change, st: os.stat_result) -> bool:
        """Say whether another file was made one with a file that was adopted."""
        where = "state = 'done' AND how IN ('exchange', 'create', 'give') AND digest = ?"
        for other in self.changes(where, change.digest):
            with suppress(OSError):
                if os.path.samestat(os.lstat(other.path), st):
                    return True
        return False

    def still_done(self, numbers: Iterable[int]) -> set[int]:
        """Return those of some rows that nobody has undone."""
        sql = f"SELECT id FROM changes WHERE state = 'done' AND id {_AMONG}"
        return {row[0] for row in self.select(sql, json.dumps(list(numbers)))}

    def has_open(self, but: Iterable[int] = ()) -> bool:
        """Say whether a dead process left something, besides the rows given."""
        return any(row[0] not in but for row in self.select(f"SELECT id FROM changes WHERE {OPEN}"))

    def history(self) -> list[BatchSummary]:
        """Return the batches that can be undone, newest last."""
        sql = (
            "SELECT batch, label, MIN(at), COUNT(*), SUM(size), GROUP_CONCAT(DISTINCT how)"
            f" FROM changes WHERE state = 'done' OR {OPEN} GROUP BY batch ORDER BY MIN(id)"
        )
        return [_summary(row) for row in self.select(sql)]

    def close_all(self, digests: Iterable[str]) -> None:
        """Close what is done of contents that nobody has any more."""
        sql = (
            "UPDATE changes SET state = 'undone' WHERE state = 'done' AND how != 'copy'"
            f" AND digest {_AMONG}"
        )
        self.execute(sql, json.dumps(list(digests)))

    def forget_over(self) -> None:
        """Delete the batches of which nothing is left to undo."""
        self.execute(
            "DELETE FROM changes WHERE batch NOT IN"
            f" (SELECT batch FROM changes WHERE state = 'done' OR {OPEN})"
        )

    def pools(self, mounts: Mounts) -> list[Path]:
        """Return the roots of the pools that are mounted now."""
        found = []
        for filesystem, path in self.select("SELECT filesystem, path FROM pools ORDER BY path"):
            with suppress(FileSkippedError):
                found.append(Path(mounts.path(filesystem, path)))
        return found

    def add_pool(self, root: Path, mounts: Mounts) -> None:
        """Remember the pool of a filesystem."""
        filesystem, path = mounts.place(os.fspath(root))
        key = filesystem or f"path:{os.fspath(root)}"
        with self.write():
            self.execute("INSERT OR REPLACE INTO pools VALUES (?, ?)", key, path)

    def renew_copy(self, path: Path) -> None:
        """Bring the copy of the journal up to date."""
        new = path.with_name(f"{path.name}.new")
        new.unlink(missing_ok=True)
        self.copy_to(new)
        with open(new, "rb") as file:
            os.fsync(file.fileno())
        reached("journal: copied")
        os.replace(new, path)


def open_journal(path: Path, copy: Path, bad: Path, *, repairing: Callable[[], Any]) -> Journal:
    """Open the journal; of a damaged one the copy takes the place, under the store's lock.

    That is the one thing that opening a store changes. `repairing` gives the lock.
    """
    with suppress(IndexDamagedError):
        return _sound(path, copy)
    with repairing():
        for damaged, successor in (("journal", "its copy"), ("copy", "a new journal")):
            with suppress(IndexDamagedError):
                return _sound(path, copy)  # the second time the copy is, or somebody else did it
            aside = move_aside(path, bad)  # the rollback journal belongs to the damaged file
            text = "the %s is damaged: it is %s now, and %s takes its place"
            _log.warning(text, damaged, aside, successor)
            if damaged == "copy":
                copy.unlink(missing_ok=True)
            elif copy.exists():
                with atomically(path) as file:
                    file.write(copy.read_bytes())
        return _sound(path, copy)


_TYPES = (
    ("integer", "at size mode gid mtime_ns inode links folder"),
    ("text", "batch label how state filesystem digest xattrs"),
    ("blob", "path temporary"),
)
_NONSENSE = " OR ".join((
    *(f"typeof({name}) != '{kind}'" for kind, names in _TYPES for name in names.split()),
    f"how NOT IN {get_args(How)} OR state NOT IN {get_args(State)} OR length(digest) != 64",
    "instr(path, x'00') OR instr(temporary, x'00') OR instr(temporary, x'2f')",
))  # fmt: skip


def _sound(path: Path, copy: Path) -> Journal:
    """Open a journal whose rows make sense; of nothing a power cut may have left the copy."""
    if copy.exists() and path.exists() and not path.stat().st_size:
        raise IndexDamagedError(f"{path} is empty", path=path)
    journal = Journal(path, wal=False)
    with ExitStack() as stack:
        stack.callback(journal.close)
        # Not the quick check: a row that an index does not tell of would not be undone.
        is_sound = journal.select("PRAGMA integrity_check(1)") == [("ok",)]
        if not is_sound or journal.select(f"SELECT 1 FROM changes WHERE {_NONSENSE} LIMIT 1"):
            raise IndexDamagedError(f"{path} is damaged", path=path)
        journal.select("SELECT batch, label, filesystem, digest FROM changes")  # is it all text?
        for row in journal.select("SELECT DISTINCT xattrs FROM changes WHERE xattrs != '{}'"):
            _check_attributes(row)
        stack.pop_all()
    return journal


@of_row
def _check_attributes(row: tuple[Any, ...]) -> None:
    bytes.fromhex("".join(json.loads(row[0]).values()))


def _place(change: Change, mounts: Mounts) -> tuple[str, bytes]:
    """Return the filesystem of a change, and its path below the root of that."""
    above, name = os.path.split(change.path)
    filesystem, below = mounts.place(above)
    return filesystem, os.path.join(below, os.fsencode(name))


def _change(row: tuple[Any, ...], mounts: Mounts) -> Change:
    filesystem, below, *values = row
    away = ""
    try:
        path = mounts.path(filesystem, below)
    except FileSkippedError as error:
        path, away = os.fsdecode(below), str(getattr(error, "reason", error))
    try:
        change = Change(path=Path(path), away=away, **dict(zip(_COLUMNS, values, strict=True)))
        change.inode &= UNSIGNED
        change.folder &= UNSIGNED
        change.temporary = os.fsdecode(change.temporary)
    except (TypeError, ValueError) as error:
        raise IndexDamagedError("The journal is damaged: a row of it makes no sense") from error
    return change


@of_row
def _summary(row: tuple[Any, ...]) -> BatchSummary:
    batch, label, at, changes, size, hows = row
    return BatchSummary(
        id=batch, label=label, at=datetime.fromtimestamp(at, UTC), changes=changes, size=size,
        hows=tuple(sorted(hows.split(","))),
    )  # fmt: skip
