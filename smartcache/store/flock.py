"""What locks and leases are made of: descriptors that do not survive a fork, waiting, and notes.

The `flock` of a descriptor belongs to the open file, which a forked child shares. So every
descriptor is registered, and a child closes them all before it runs anything: it can neither hold a
lock of its parent's nor keep it after the parent's death. The parent unlocks explicitly before it
closes, so that a copy in a child made without Python's knowledge does not matter either.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from smartcache.errors import NoSpaceError, StoreError, StoreUnwritableError
from smartcache.store.filesystems import mount_of
from smartcache.store.safety import make_or_open_own, open_own

OnWait = Callable[[str], None]

logger = logging.getLogger(__name__)

_GRACE = (0.0002, 0.0005, 0.001, 0.002)
"""Pauses before a wait is worth a word. A fresh holder has written its note by then."""
_POLL = 0.02
"""Longest pause between two tries where the kernel cannot wait: with a time limit, on Windows."""
_NOTE_BYTES = 4096
_WHAT_CHARACTERS = 200
_OFFSET_OF_LOCK = 0x4000_0000
"""Windows locks bytes and forbids reading them: this byte is far behind every note."""

_guard = threading.RLock()
_open: dict[int, None] = {}
_generation = 0


class Descriptor:
    """A file opened for locking: closed when dropped, and closed in every forked child."""

    __slots__ = ("_born", "fd", "is_new")

    def __init__(self, path: str, *, writable: bool = False) -> None:
        """Open a file of the store; a writable one is made when missing (`is_new`)."""
        self.fd = -1
        self.is_new = False
        # The guard keeps another thread from forking between opening and registering.
        with _guard:
            self._born = _generation
            if writable:
                self.fd, self.is_new = make_or_open_own(path, os.O_RDWR)
            else:
                self.fd = open_own(path)
            _open[self.fd] = None

    @property
    def is_ours(self) -> bool:
        """Whether the file is open, and was opened by this process, not by its parent."""
        return self.fd >= 0 and self._born == _generation

    def close(self) -> None:
        """Unlock and close. In a forked child, where `fd` may be another file by now: no effect."""
        with _guard:
            if self.fd < 0 or self._born != _generation:
                return
            try:  # noqa: SIM105 - suppress() would double the price of closing
                unlock(self.fd)
            except OSError:
                pass
            # No call from here to os.close: an interrupt in between would leak the number, or
            # have it closed twice.
            fd = self.fd
            self.fd = -1
            del _open[fd]
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def _close_in_child() -> None:
    global _generation  # noqa: PLW0603 - marks every descriptor of the parent as not ours
    for fd in _open:
        with contextlib.suppress(OSError):
            os.close(fd)
    _open.clear()
    _generation += 1
    _guard.release()


if sys.platform == "win32":
    import msvcrt

    CAN_BLOCK = False
    CAN_LOCK_BYTES = False

    def try_lock(fd: int, *, exclusive: bool) -> bool:  # noqa: ARG001 - msvcrt has no shared locks
        """Lock without waiting; False: another descriptor holds it."""
        os.lseek(fd, _OFFSET_OF_LOCK, os.SEEK_SET)
        try:
            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        except OSError as error:
            if error.errno in {errno.EACCES, errno.EDEADLK, errno.EAGAIN}:
                return False
            raise
        return True

    def unlock(fd: int) -> None:
        """Give the lock back."""
        os.lseek(fd, _OFFSET_OF_LOCK, os.SEEK_SET)
        msvcrt.locking(fd, msvcrt.LK_UNLCK, 1)

    def _block(fd: int, *, exclusive: bool) -> None:
        raise NotImplementedError

    def try_lock_byte(fd: int, offset: int) -> bool:
        """Lock one byte of a file without waiting; False: another descriptor holds it."""
        raise NotImplementedError

    def unlock_bytes(fd: int, offset: int = 0, length: int = 0) -> None:
        """Give back the locks of bytes: of all, unless it is said of which."""
        raise NotImplementedError

    def is_byte_locked(fd: int, offset: int) -> bool:
        """Say whether another descriptor holds a byte."""
        raise NotImplementedError

else:
    import fcntl

    CAN_BLOCK = True
    CAN_LOCK_BYTES = sys.platform == "linux"
    """Only Linux gives such locks to the open file, as `flock` does, and not to the process."""
    _SHARED_NOW = fcntl.LOCK_SH | fcntl.LOCK_NB
    _ALONE_NOW = fcntl.LOCK_EX | fcntl.LOCK_NB
    _FLOCK = struct.Struct("@hhqqi0q")
    """The kernel's `struct flock`: kind, from where, start, length, process."""
    _UNSUPPORTED = frozenset(
        {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
    )

    os.register_at_fork(
        before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_close_in_child
    )

    def try_lock(fd: int, *, exclusive: bool) -> bool:
        """Lock without waiting; False: another descriptor holds it."""
        try:
            fcntl.flock(fd, _ALONE_NOW if exclusive else _SHARED_NOW)
        except BlockingIOError:
            return False
        except OSError as error:
            _explain(fd, error)
            raise
        return True

    def unlock(fd: int) -> None:
        """Give the lock back."""
        fcntl.flock(fd, fcntl.LOCK_UN)

    def _block(fd: int, *, exclusive: bool) -> None:
        # Python calls flock again after a signal unless its handler raised: Ctrl-C ends the wait.
        try:
            fcntl.flock(fd, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        except OSError as error:
            _explain(fd, error)
            raise

    def try_lock_byte(fd: int, offset: int) -> bool:
        """Lock one byte of a file without waiting; False: another descriptor holds it.

        NotImplementedError where there are no such locks: in some sandboxes, for instance.
        """
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, 0, offset, 1, 0))
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                raise NotImplementedError from error
            raise
        return True

    def unlock_bytes(fd: int, offset: int = 0, length: int = 0) -> None:
        """Give back the locks of bytes: of all, unless it is said of which."""
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, 0, offset, length, 0))

    def is_byte_locked(fd: int, offset: int) -> bool:
        """Say whether another descriptor holds a byte; nobody does where that is not possible."""
        wanted = _FLOCK.pack(fcntl.F_WRLCK, 0, offset, 1, 0)
        try:
            found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, wanted)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                return False
            raise
        return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)

    def _explain(fd: int, error: OSError) -> None:
        """Raise a StoreError if this filesystem has no locks."""
        if error.errno not in _UNSUPPORTED:
            return
        try:
            path = Path(os.readlink(f"/proc/self/fd/{fd}"))
            where = f"{mount_of(path).fstype} filesystem of {path}"
        except OSError:
            where = "filesystem"
        hint = "Mount it with locking enabled, or set SMARTCACHE_HOME to a local directory."
        message = f"The {where} does not lock files ({error.strerror})"
        raise StoreError(message, hint=hint) from error


class Patience:
    """How long one acquisition may wait, and whether it has said so."""

    def __init__(self, timeout: float | None, on_wait: OnWait | None) -> None:
        self.timeout = timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._on_wait = on_wait
        self._has_spoken = False

    @property
    def remaining(self) -> float | None:
        """Seconds left; None: without limit."""
        return None if self._deadline is None else self._deadline - time.monotonic()

    def pause(self, seconds: float) -> bool:
        """Sleep, at most until the time is up; False: it was up already."""
        remaining = self.remaining
        if remaining is not None and remaining <= 0:
            return False
        time.sleep(seconds if remaining is None else min(seconds, remaining))
        return True

    def say(self, sentence: str) -> None:
        """Tell the caller what it waits for, unless it was told."""
        if not self._has_spoken:
            self._has_spoken = True
            (self._on_wait or logger.info)(sentence)

    def start_next(self) -> None:
        """Go on to another lock: the time runs on, the word may be given again."""
        self._has_spoken = False


def wait_for(fd: int, *, exclusive: bool, patience: Patience, tell: Callable[[], str]) -> bool:
    """Lock, waiting if need be; False: the time was up. `tell` says what a longer wait is for."""
    if try_lock(fd, exclusive=exclusive):
        return True
    for seconds in _GRACE:
        if not patience.pause(seconds):
            return False
        if try_lock(fd, exclusive=exclusive):
            return True
    patience.say(tell())
    if CAN_BLOCK and patience.remaining is None:
        _block(fd, exclusive=exclusive)
        return True
    seconds = _GRACE[-1]
    while patience.pause(seconds):
        if try_lock(fd, exclusive=exclusive):
            return True
        seconds = min(1.5 * seconds, _POLL)
    return False


def open_or_create(path: str | Path, *, make_directory: bool = False) -> Descriptor:
    """Open a file for reading and writing, made when missing."""
    text = os.fspath(path)
    while True:
        try:
            return Descriptor(text, writable=True)
        except FileNotFoundError as error:
            if not make_directory:
                raise refusal(text, error) from error
            _make_directory(os.path.dirname(text))
        except StoreError:
            raise
        except OSError as error:
            raise refusal(text, error) from error


def _make_directory(directory: str) -> None:
    try:
        os.makedirs(directory, 0o700, exist_ok=True)
    except OSError as error:
        raise refusal(directory, error) from error


def refusal(path: str, error: OSError) -> StoreError:
    """Return the error of this package for a lock file that could not be opened."""
    reason = f"{path}: {error.strerror}"
    if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return StoreUnwritableError(f"Cannot lock {reason}", path=path)
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return NoSpaceError(f"Cannot lock {reason}", path=path)
    hint = "Is the store still there?" if error.errno in {errno.ENOENT, errno.ENOTDIR} else ""
    return StoreError(f"Cannot lock {reason}", hint=hint, path=path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who wrote a note into a lock file: the process that holds it, or waits to hold it next."""

    pid: int
    what: str
    since: datetime
    waits: bool = False

    @property
    def who(self) -> str:
        """The process and what it does."""
        process = "this process" if self.pid == os.getpid() else f"process {self.pid}"
        return f"{process} ({self.what})" if self.what else process

    @property
    def when(self) -> str:
        """The local time, with the date unless it is today."""
        is_today = self.since.date() == datetime.now(UTC).astimezone().date()
        return f"{self.since:%H:%M}" if is_today else f"{self.since:%Y-%m-%d %H:%M}"


def holder_text(holder: Holder | None) -> str:
    """Name a holder, or say that it left no name."""
    return "another process" if holder is None else f"{holder.who}, since {holder.when}"


def sentence(holder: Holder | None, name: str) -> str:
    """Say who has `name`, in a sentence for the user who waits."""
    if holder is None:
        return f"another process is using {name}"
    verb = "waited for" if holder.waits else "held"
    return f"{holder.who} has {verb} {name} since {holder.when}"


def write_note(fd: int, what: str, *, waits: bool = False, key: str | None = None) -> None:
    """Leave word in a lock file for those who will wait. A full disk only makes them know less."""
    note: dict[str, object] = {
        "pid": os.getpid(),
        "what": what[:_WHAT_CHARACTERS],
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if waits:
        note["waits"] = True
    if key is not None:
        note["key"] = key[:_WHAT_CHARACTERS]
    line = json.dumps(note).encode("ascii") + b"\n"
    with contextlib.suppress(OSError):
        os.lseek(fd, 0, os.SEEK_SET)
        os.write(fd, line)
        os.ftruncate(fd, len(line))


def has_note(fd: int) -> bool:
    """Say whether somebody left word in a lock file."""
    os.lseek(fd, 0, os.SEEK_SET)
    return bool(os.read(fd, 1))


def clear_note(fd: int) -> None:
    """Take the word back before giving up the lock."""
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)


def read_holder(fd: int) -> Holder | None:
    """Return who left word in a lock file; None: nobody, nothing readable, or a dead process."""
    try:
        os.lseek(fd, 0, os.SEEK_SET)
        line = os.read(fd, _NOTE_BYTES).partition(b"\n")[0]
        note = json.loads(line)
        pid, what, since = note["pid"], note["what"], datetime.fromisoformat(note["since"])
        if not isinstance(pid, int) or not isinstance(what, str) or not _is_alive(pid):
            return None
        # It may be printed on a terminal, and another user may have written it.
        shown = "".join(filter(str.isprintable, what))
        waits = note.get("waits") is True
        return Holder(pid=pid, what=shown, since=since.astimezone(), waits=waits)
    except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError):
        return None


def _is_alive(pid: int) -> bool:
    if sys.platform == "win32":  # os.kill(pid, 0) would be Ctrl-C there
        return True
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
