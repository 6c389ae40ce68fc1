"""A record of every change made to a user's file; the source of undo.

A change is written and fsynced before the file is touched, and its outcome ("done", "back",
"undone") is a later line. What is in the journal is therefore a superset of what happened: whoever
reads it looks at the disk before acting. A line torn by a crash is skipped; a newline is put
before the next one. Lines are JSON, one per line, one `write` call per append, so that several
processes can append at once. Lines are only ever appended, until most of the file is about what is
over: then `fold` writes what still matters to a new file, which takes the journal's name. Whoever
appends shares a lock on the file and sees that it still bears the name.

    {"batch": "9f3a61c2", "label": "add --adopt", "at": "2026-11-16T02:30:41Z"}
    {"batch": "9f3a61c2", "n": 0, "op": "adopt", "path": "...", "digest": "...", "mode": 420, ...}
    {"batch": "9f3a61c2", "n": [0, 1, 2], "state": "done"}
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Self, get_args

from smartcache.errors import LockTimeoutError, NoSpaceError, StoreError, StoreUnwritableError
from smartcache.store.changes.spot import is_beside, read_attributes
from smartcache.system.faults import reached
from smartcache.system.hashing import is_digest
from smartcache.system.kernel import sync_directory
from smartcache.system.locks import Claim, OnWait, Patience, claim, try_lock, unlock, wait_for
from smartcache.system.ownfiles import make_or_open_own, open_own

Op = Literal["adopt", "place", "replace", "pin", "unpin", "own"]
"""What was done. "own" is a step of undo: a file gets its own bytes by way of `temporary`."""
UNDOABLE = frozenset(("adopt", "place", "replace"))
State = Literal["begun", "done", "back", "undone", "gone"]
_PATHS = ("path", "temporary", "real")
_NEEDED = ("n", "op", "path", "digest", "size")
_PINS = ("pin", "unpin")
_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
_FOLDING = "another process is folding the journal"
_NUMBERS = 10_000
"""Changes whose outcome one line may tell."""
_LONGEST = 16 << 20
"""Bytes of a line; the longest we write have attributes of 64 KB or some ten thousand numbers."""
_LONG_AGO = datetime.fromtimestamp(0, UTC)
_encode = json.JSONEncoder(separators=(",", ":")).encode
_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Change:
    """One change to one path: what was done, and what the file was before.

    `batch` and `n` are set once, when the change is written to the journal.

    `real` is the path without symlinks, where it is another: undo goes there, wherever the symlinks
    lead by then. `temporary` is the name beside `path` that a replacement uses while it runs.
    `xattrs` are extended attributes, name -> hexadecimal bytes; None: there were none. `keep`: of a
    placed file others know, as of a repo; undo gives it bytes of its own in place of removing it.
    """

    op: Op
    path: Path
    digest: str
    size: int
    batch: str = ""
    n: int = -1
    state: State = "begun"
    temporary: Path | None = None
    real: Path | None = None
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

    @property
    def place(self) -> Path:
        """The path to act on: no symlink was in it when the change was made."""
        return self.real or self.path

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


def _is_text(value: object) -> bool:
    """Say whether a value is text that a path, a name or an attribute can have."""
    try:
        return isinstance(value, str) and b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


def _is_number(value: object) -> bool:
    return isinstance(value, int) and 0 <= value < 1 << 64


def _is_attributes(value: object) -> bool:
    try:
        return isinstance(value, dict) and all(
            _is_text(name) and isinstance(bytes.fromhex(text), bytes)
            for name, text in value.items()
        )
    except (TypeError, ValueError):
        return False


_FIELDS: dict[str, Callable[[object], bool]] = {
    "n": _is_number,
    "op": lambda value: value in get_args(Op),
    "path": _is_text,
    "digest": lambda value: isinstance(value, str) and is_digest(value),
    "size": lambda value: _is_number(value) and value < 1 << 63,  # type: ignore[operator]
    "temporary": _is_text,
    "real": _is_text,
    "kind": _is_text,
    "mode": lambda value: isinstance(value, int) and 0 <= value < 1 << 12,
    "uid": lambda value: isinstance(value, int) and 0 <= value < 1 << 32,
    "gid": lambda value: isinstance(value, int) and 0 <= value < 1 << 32,
    "mtime_ns": lambda value: isinstance(value, int) and abs(value) < 1 << 63,
    "inode": _is_number,
    "links": _is_number,
    "filesystem": _is_text,
    "xattrs": _is_attributes,
    "keep": lambda value: isinstance(value, bool),
}  # fmt: skip
"""What each field of a change may be: what was not written by us must not be acted on."""


def _line(change: Change) -> dict[str, object]:
    line: dict[str, object] = {"batch": change.batch}
    for name in _FIELDS:
        value = getattr(change, name)
        if value is not None:
            line[name] = str(value) if isinstance(value, Path) else value
    return line


Outcomes = dict[tuple[str, State], list[int]]
"""The numbers of changes, by their batch and what became of them."""


def _outcome_lines(outcomes: Outcomes) -> Iterator[dict[str, object]]:
    for (batch, state), numbers in outcomes.items():
        for start in range(0, len(numbers), _NUMBERS):
            some = numbers[start : start + _NUMBERS]
            yield {"batch": batch, "n": some[0] if len(some) == 1 else some, "state": state}


def _decode(raw: bytes) -> dict[str, Any] | None:
    """Return a line that says something; None for one that is torn, damaged or of the future."""
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or not isinstance(line.get("batch"), str):
        return None
    if "state" in line:
        is_sound = line["state"] in get_args(State) and all(map(_is_number, _numbers(line)))
    elif "op" in line:
        is_sound = all(name in line for name in _NEEDED) and all(
            name not in line or is_valid(line[name]) for name, is_valid in _FIELDS.items()
        )
        is_sound = is_sound and (line["op"] in _PINS or _is_ours(line))
    else:
        is_sound = "label" in line
    return line if is_sound else None


def _is_ours(line: dict[str, Any]) -> bool:
    """Say whether we may have written the paths of a change: they decide what is touched."""
    path, temporary = line["path"], line.get("temporary")
    real = line.get("real", path)
    is_plain = os.path.isabs(path) and os.path.isabs(real)
    if "/.." in real:
        is_plain = is_plain and ".." not in Path(real).parts
    return is_plain and (temporary is None or is_beside(Path(temporary), Path(path)))


def _numbers(line: dict[str, Any]) -> list[Any]:
    """Return which changes an outcome is of."""
    n = line.get("n")
    return n if isinstance(n, list) else [n]


def _apply(changes: dict[tuple[str, int], Change], line: dict[str, Any]) -> None:
    batch = line["batch"]
    if "state" in line:
        for number in _numbers(line):
            if (batch, number) in changes:
                changes[batch, number].state = line["state"]
    elif "op" in line:
        known = {name: line[name] for name in _FIELDS if name in line}
        for name in _PATHS:
            if name in known:
                known[name] = Path(known[name])
        changes[batch, line["n"]] = Change(batch=batch, **known)


def _time(value: object) -> datetime:
    try:
        at = datetime.fromisoformat(str(value))
    except ValueError:
        return _LONG_AGO
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)


class Journal:
    """The journal file of one volume."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.on_wait: OnWait | None = None
        self.timeout: float | None = None
        self._has_complained = False

    def append(self, lines: Iterable[dict[str, object]], *, sync: bool) -> None:
        """Write lines at the end, in one piece; `sync` makes them survive power loss."""
        data = "".join(_encode(line) + "\n" for line in lines).encode("ascii")
        try:
            with self._sharing() as descriptor:
                size = os.fstat(descriptor).st_size
                if size and os.pread(descriptor, 1, size - 1) != b"\n":
                    data = b"\n" + data
                if os.write(descriptor, data) != len(data):
                    # A full disk. The half line stays (others may append behind it) and is skipped
                    # by every reader.
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if sync:
                    os.fsync(descriptor)
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
            if batch in (None, line["batch"]):
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
                heads[line["batch"]] = (str(line["label"]), _time(line.get("at")))
            else:
                _apply(changes, line)
        grouped: dict[str, list[Change]] = {}
        for change in changes.values():
            if change.state in ("begun", "done") and change.op in UNDOABLE:
                grouped.setdefault(change.batch, []).append(change)
        summaries = []
        for batch, found in grouped.items():
            label, at = heads.get(batch, ("", _LONG_AGO))
            size, ops = sum(each.size for each in found), tuple(sorted({e.op for e in found}))
            summaries.append(
                BatchSummary(id=batch, label=label, at=at, changes=len(found), size=size, ops=ops)
            )
        return summaries

    def fold(self, made: Claim, is_claimed: Callable[[str], bool]) -> int:
        """Leave out what is over and cannot matter to any undo, if that halves the file.

        What stays is written to `made`, in the same filesystem, which then takes the journal's
        name; nobody appends meanwhile. Changes of batches that `is_claimed` says are in work or to
        be recovered stay. Returns the size of the journal now.
        """
        descriptor = open_own(self.path, os.O_RDWR)
        try:
            size = os.fstat(descriptor).st_size
            if not try_lock(descriptor, exclusive=True) or not _is_named(descriptor, self.path):
                return size
            for piece in self._folded(is_claimed):
                view = memoryview(piece)
                while view:
                    view = view[os.write(made.fd, view) :]
            folded = os.fstat(made.fd).st_size
            if 2 * folded > size:
                return size
            os.fchmod(made.fd, os.fstat(descriptor).st_mode & 0o777)
            os.fsync(made.fd)
            reached("fold: written")
            os.rename(made.path, self.path)
            sync_directory(self.path.parent)
            reached("fold: renamed")
            return folded
        finally:
            unlock(descriptor)
            os.close(descriptor)

    def _folded(self, is_claimed: Callable[[str], bool]) -> Iterator[bytes]:
        """Give the lines that are still needed, each change with its last outcome behind it all."""
        changes: dict[tuple[str, int], Change] = {}
        for _, line in self._read():
            if line is not None:
                _apply(changes, line)
        kept = _needed(list(changes.values()), is_claimed)
        batches = {batch for batch, _ in kept}
        for raw, line in self._read():
            if line is None:
                is_kept = raw.endswith(b"}\n")  # not torn: of a newer version, perhaps
            elif "op" in line:
                is_kept = (line["batch"], line["n"]) in kept
            else:
                is_kept = "label" in line and line["batch"] in batches
            if is_kept:
                yield raw if raw.endswith(b"\n") else raw + b"\n"
        outcomes: Outcomes = {}
        for batch, number in sorted(kept):
            state = changes[batch, number].state
            if state != "begun":
                outcomes.setdefault((batch, state), []).append(number)
        for line in _outcome_lines(outcomes):
            yield _encode(line).encode() + b"\n"

    @contextmanager
    def _sharing(self) -> Iterator[int]:
        """Give the journal to append to, which is not being folded and has not been."""
        while True:
            descriptor, _ = make_or_open_own(self.path, os.O_RDWR | os.O_APPEND)
            try:
                patience = Patience(self.timeout, self.on_wait)
                if not wait_for(
                    descriptor, exclusive=False, patience=patience, tell=lambda: _FOLDING
                ):
                    message = f"Gave up after {self.timeout:g} s: {_FOLDING}"
                    raise LockTimeoutError(message, key=str(self.path))
                if _is_named(descriptor, self.path):
                    yield descriptor
                    return
            finally:
                unlock(descriptor)
                os.close(descriptor)

    def _lines(self) -> Iterator[dict[str, Any]]:
        damaged = 0
        for raw, line in self._read():
            if line is not None:
                yield line
            # A crash tears lines, and what was to be done was not: not worth a word.
            elif raw.endswith(b"}\n") or len(raw) == _LONGEST:
                damaged += 1
        if damaged and not self._has_complained:
            self._has_complained = True
            _log.warning(
                "%s: %d damaged %s skipped; what %s cannot be undone", self.path, damaged,
                *(("line was", "it says") if damaged == 1 else ("lines were", "they say")),
            )  # fmt: skip

    def _read(self) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
        """Go through the lines and what each says: None for one that says nothing."""
        try:
            with os.fdopen(open_own(self.path), "rb") as file:
                while raw := file.readline(_LONGEST):
                    yield raw, _decode(raw)
                    while len(raw) == _LONGEST and not raw.endswith(b"\n"):
                        raw = file.readline(_LONGEST)  # the rest of it
        except FileNotFoundError:
            return


def _is_named(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _needed(changes: list[Change], is_claimed: Callable[[str], bool]) -> set[tuple[str, int]]:
    """Return which changes may still matter: to undo, to recovery, or to a rebuild of the index.

    Undo also asks closed changes: which names were one file with one that is to be given back
    (`replace.told_apart`), and which names an adopted inode had before.
    """
    claimed = {batch for batch in {change.batch for change in changes} if is_claimed(batch)}
    files = {_file_key(c) for c in changes if c.state in ("begun", "done") and c.op in UNDOABLE}
    pins: dict[tuple[str, Path], tuple[str, int]] = {}
    kept: set[tuple[str, int]] = set()
    for change in changes:
        key, is_open = (change.batch, change.n), change.state in ("begun", "done")
        if is_open and change.op == "pin":
            pins[change.digest, change.path] = key
        elif is_open and change.op == "unpin":
            pins.pop((change.digest, change.path), None)
        is_in_work = change.batch in claimed or change.state == "begun"
        if is_in_work or (change.op in UNDOABLE and _file_key(change) in files):
            kept.add(key)
    return kept | set(pins.values())


def _file_key(change: Change) -> tuple[str, int | None]:
    return change.digest, change.inode


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
        self._outcomes: Outcomes = {}
        self._gate = threading.RLock()
        self._is_closed = False
        self.on_done: Callable[[Change, int], None] | None = None
        """Is told of every change that was made, and of the bytes that it freed."""

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
            folders: dict[Path, Path] = {}
            for change in begun:
                change.batch, change.n = self.id, self._count
                self._count += 1
                # A step of undo goes where the change was made.
                if change.op not in (*_PINS, "own"):
                    folder = change.path.parent
                    if change.real is None and folder not in folders:
                        folders[folder] = Path(os.path.realpath(folder))
                    real = change.real or folders[folder] / change.path.name
                    change.real = None if real == change.path else real
            try:
                self._journal.append([*lines, *map(_line, begun)], sync=sync)
            except BaseException:
                # Some of the lines may be there, though nothing was done.
                self._outcomes.setdefault((self.id, "back"), []).extend(c.n for c in begun)
                raise
            self._unsettled.update(change.n for change in begun)
        return begun

    def end(self, change: Change, state: State, *, freed: int = 0) -> None:
        """Note the outcome of a change; written with the next `flush`."""
        with self._gate:
            self._outcomes.setdefault((change.batch, state), []).append(change.n)
            if change.batch == self.id:
                self._unsettled.discard(change.n)
        if state == "done" and self.on_done is not None:
            self.on_done(change, freed)

    def flush(self) -> None:
        """Write the outcomes noted so far."""
        with self._gate:
            if self._outcomes:
                self._journal.append(_outcome_lines(self._outcomes), sync=False)
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
