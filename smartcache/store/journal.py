"""An append-only record of every change made to a user's file; the source of undo.

A change is written and fsynced before the file is touched, and its outcome ("done", "back",
"undone") is a later line. What is in the journal is therefore a superset of what happened: whoever
reads it looks at the disk before acting. A line torn by a crash is skipped; a newline is put
before the next one. Lines are JSON, one per line, one `write` call per append, so that several
processes can append at once.

    {"batch": "9f3a61c2", "label": "add --adopt", "at": "2026-11-16T02:30:41Z"}
    {"batch": "9f3a61c2", "n": 0, "op": "adopt", "path": "...", "digest": "...", "mode": 420, ...}
    {"batch": "9f3a61c2", "n": [0, 1, 2], "state": "done"}
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, Self, get_args

from smartcache.errors import NoSpaceError, StoreError, StoreUnwritableError
from smartcache.store.attributes import read_attributes
from smartcache.store.flock import open_to_directory_writers
from smartcache.store.locks import Claim, claim
from smartcache.store.safety import open_own

Op = Literal["adopt", "move", "place", "replace", "share", "forget", "pin", "unpin", "own"]
"""What was done. "own" is a step of undo: a file gets its own bytes by way of `temporary`."""
UNDOABLE = frozenset(("adopt", "move", "place", "replace", "share", "forget"))
State = Literal["begun", "done", "back", "undone", "gone"]
_OPTIONAL = ("kind", "mode", "uid", "gid", "mtime_ns", "inode", "links", "filesystem", "xattrs",
             "keep")  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Change:
    """One change to one path: what was done, and what the file was before.

    `batch` and `n` are set once, when the change is written to the journal.

    `temporary` is the name beside `path` that a replacement uses while it runs. `xattrs` are
    extended attributes, name -> hexadecimal bytes; None: there were none. `keep`: of a placed file
    others know, as of a repo; undo gives it bytes of its own in place of removing it.
    """

    op: Op
    path: Path
    digest: str
    size: int
    batch: str = ""
    n: int = -1
    state: State = "begun"
    temporary: Path | None = None
    kind: str | None = None
    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    mtime_ns: int | None = None
    inode: int | None = None
    links: int | None = None
    filesystem: str | None = None
    xattrs: dict[str, str] | None = None
    keep: bool | None = None

    @classmethod
    def before(
        cls, op: Op, path: Path, digest: str, st: os.stat_result, **more: Path | str | None
    ) -> Self:
        """Describe a change about to be made to an existing file whose stat is `st`."""
        return cls(
            op=op, path=path, digest=digest, size=st.st_size, mode=st.st_mode & 0o7777,
            uid=st.st_uid, gid=st.st_gid, mtime_ns=st.st_mtime_ns, inode=st.st_ino,
            links=st.st_nlink, xattrs=read_attributes(path) or None,
            **more,  # type: ignore[arg-type]
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSummary:
    """What one command did: its changes that can still be undone."""

    id: str
    label: str
    at: datetime
    changes: int
    size: int
    ops: tuple[str, ...]


class Journal:
    """The journal file of one volume."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, lines: Iterable[dict[str, object]], *, sync: bool) -> None:
        """Write lines at the end, in one piece; `sync` makes them survive power loss."""
        data = "".join(_encode(line) + "\n" for line in lines).encode("ascii")
        try:
            descriptor = open_or_make(self.path, os.O_RDWR | os.O_APPEND)
            try:
                self._write(descriptor, data)
                if sync:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except StoreError:
            raise
        except OSError as error:
            kind = NoSpaceError if error.errno in _FULL else StoreUnwritableError
            message = f"Cannot write {self.path}: {error.strerror}; nothing was changed"
            raise kind(message, path=self.path) from error

    def changes(self, batch: str | None = None) -> list[Change]:
        """Return the changes of one batch or of all, in order, each with its last state."""
        found: dict[tuple[str, int], Change] = {}
        for line in self._lines():
            if batch is not None and line.get("batch") != batch:
                continue
            _apply(found, line)
        return list(found.values())

    def open_changes(self, batch: str | None = None) -> list[Change]:
        """Return the changes made and not undone (or maybe made: look at the disk)."""
        return [c for c in self.changes(batch) if c.state in ("begun", "done")]

    def history(self) -> list[BatchSummary]:
        """Return the batches that can be undone, newest last."""
        heads: dict[str, tuple[str, datetime]] = {}
        changes: dict[tuple[str, int], Change] = {}
        for line in self._lines():
            if "label" in line:
                heads[str(line["batch"])] = (str(line["label"]), _time(line.get("at")))
            else:
                _apply(changes, line)
        grouped: dict[str, list[Change]] = {}
        for change in changes.values():
            if change.state in ("begun", "done") and change.op in UNDOABLE:
                grouped.setdefault(change.batch, []).append(change)
        return [_summary(batch, heads.get(batch), found) for batch, found in grouped.items()]

    def _write(self, descriptor: int, data: bytes) -> None:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            data = b"\n" + data
        written = os.write(descriptor, data)
        if written != len(data):
            # A short write means a full disk. The half line stays (others may append behind it)
            # and is skipped by every reader.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def _lines(self) -> Iterator[dict[str, object]]:
        try:
            with os.fdopen(open_own(self.path), "rb") as file:
                for raw in file:
                    try:
                        line = json.loads(raw)
                    except ValueError:
                        continue
                    if isinstance(line, dict) and "batch" in line:
                        yield line
        except FileNotFoundError:
            return


def open_or_make(path: Path, flags: int) -> int:
    """Open a file of a store that may be shared; made when missing, for all who may write there.

    Never O_CREAT on an existing file: `fs.protected_regular` forbids that for files of other users.
    """
    while True:
        try:
            return open_own(path, flags)
        except FileNotFoundError:
            try:
                descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            except FileExistsError:
                continue
            open_to_directory_writers(descriptor, str(path.parent))
            return descriptor


class Batch:
    """The changes of one command. Its claimed file in `tmp/` tells others that its process lives.

    Used as a context manager; leaving it writes the outcomes and gives up the claim. A process
    that dies in between leaves the file unclaimed, and recovery finishes or takes back what was
    begun. Several threads may use one batch.
    """

    def __init__(self, journal: Journal, directory: Path, label: str) -> None:
        self.id = secrets.token_hex(4)
        self.label = label
        self._journal = journal
        self._claim_path = directory / f"batch-{self.id}"
        self._claim: Claim | None = None
        self._count = 0
        self._unsettled: set[int] = set()
        self._outcomes: dict[tuple[str, State], list[int]] = {}
        self._gate = threading.RLock()
        self._is_closed = False

    def begin(self, changes: Iterable[Change], *, sync: bool = True) -> list[Change]:
        """Write changes to the journal before they are made; return them with their numbers."""
        begun = list(changes)
        lines: list[dict[str, object]] = []
        with self._gate:
            if self._is_closed:
                raise StoreError(f"The batch {self.label!r} has ended; nothing was changed")
            if self._claim is None:
                self._claim = claim(self._claim_path)
                at = datetime.now(UTC).isoformat(timespec="seconds")
                lines.append({"batch": self.id, "label": self.label, "at": at})
            for change in begun:
                change.batch, change.n = self.id, self._count
                self._count += 1
            self._journal.append([*lines, *map(_line, begun)], sync=sync)
            self._unsettled.update(change.n for change in begun)
        return begun

    def end(self, change: Change, state: State) -> None:
        """Note the outcome of a change; written with the next `flush`."""
        with self._gate:
            self._outcomes.setdefault((change.batch, state), []).append(change.n)
            if change.batch == self.id:
                self._unsettled.discard(change.n)

    def flush(self) -> None:
        """Write the outcomes noted so far."""
        with self._gate:
            lines: list[dict[str, object]] = [
                {"batch": batch, "n": numbers[0] if len(numbers) == 1 else numbers, "state": state}
                for (batch, state), numbers in self._outcomes.items()
            ]
            if lines:
                self._journal.append(lines, sync=False)
                self._outcomes = {}

    def close(self) -> None:
        """Write the outcomes and give up the claim.

        A change without an outcome (Ctrl-C in the middle of a step) leaves the file behind, so that
        the next open looks at it.
        """
        with self._gate:
            self._is_closed = True
            try:
                self.flush()
            finally:
                if self._claim is not None:
                    self._claim.release(remove=not self._unsettled)
                    self._claim = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
_OPS = frozenset(get_args(Op))
_NUMBERS = ("n", "size", "mode", "uid", "gid", "mtime_ns", "inode", "links")
_encode = json.JSONEncoder(separators=(",", ":")).encode
_NAMES = frozenset(field.name for field in fields(Change))


def _line(change: Change) -> dict[str, object]:
    line: dict[str, object] = {
        "batch": change.batch, "n": change.n, "op": change.op, "path": str(change.path),
        "digest": change.digest, "size": change.size,
    }  # fmt: skip
    if change.temporary is not None:
        line["temporary"] = str(change.temporary)
    for name in _OPTIONAL:
        value = getattr(change, name)
        if value is not None:
            line[name] = value
    return line


def _apply(changes: dict[tuple[str, int], Change], line: dict[str, object]) -> None:
    batch, n = str(line["batch"]), line.get("n")
    if "state" in line:
        for number in n if isinstance(n, list) else [n]:
            if isinstance(number, int) and (batch, number) in changes:
                changes[batch, number].state = line["state"]  # type: ignore[assignment]
    elif "op" in line and isinstance(n, int):
        change = _parse(line)
        if change is not None:
            changes[batch, n] = change


def _parse(line: dict[str, object]) -> Change | None:
    """Return the change a line describes; None for a line that is damaged or of the future."""
    known = {name: value for name, value in line.items() if name in _NAMES}
    numbers = (known.get(name, 0) for name in _NUMBERS)
    texts = (known.get(name, "") for name in ("batch", "path", "digest", "temporary"))
    is_whole = {"path", "digest", "size"} <= known.keys() and known["op"] in _OPS
    if not (is_whole and all(isinstance(n, int) for n in numbers)):
        return None
    if not all(isinstance(text, str) for text in texts):
        return None
    if not _is_attributes(known.get("xattrs", {})):
        return None
    known["path"] = Path(str(known["path"]))
    if "temporary" in known:
        known["temporary"] = Path(str(known["temporary"]))
    return Change(**known)  # type: ignore[arg-type]


def _is_attributes(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    try:
        for text in value.values():
            bytes.fromhex(text)
    except (TypeError, ValueError):
        return False
    return True


def _summary(batch: str, head: tuple[str, datetime] | None, changes: list[Change]) -> BatchSummary:
    label, at = head or ("", datetime.fromtimestamp(0, UTC))
    ops = tuple(sorted({change.op for change in changes}))
    size = sum(change.size for change in changes)
    return BatchSummary(id=batch, label=label, at=at, changes=len(changes), size=size, ops=ops)


def _time(value: object) -> datetime:
    try:
        return datetime.fromisoformat(str(value))
    except ValueError:
        return datetime.fromtimestamp(0, UTC)
