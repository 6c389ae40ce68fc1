"""Kernel file locks: of a whole store (`lock`), of one file (`claim`), of keys (`KeyLocks`).

The `flock` of a descriptor belongs to the open file, which a forked child shares. So every
descriptor is registered, and a child closes them all before it runs anything: it can neither hold a
lock of its parent's nor keep it after the parent's death. The parent unlocks explicitly before it
closes, so that a copy in a child made without Python's knowledge does not matter either. Every
acquisition opens its own descriptor, so threads exclude each other as processes do, and the kernel
takes a lock back the moment its holder dies. Leaving a `with` block it inherited does nothing in a
child.

**`lock`.** `flock` lets new sharers in while a writer waits, so a stream of short sharers keeps a
writer out for good. A writer therefore first locks a second file (`<path>.turn`) and keeps it until
it is done; while it waits or holds, the lock file contains a note saying so. A sharer that finds
the file empty, one `pread`, goes ahead; one that finds a note queues at the turn file, and whoever
gets past it knows the note to be a dead process's. Notes and turn file decide who goes first, never
who holds: only the lock itself does that.

**`claim`.** Whoever claims a file has it locked *and* under its name; the lock tells others that
the owner lives. Only the owner removes the name, before it unlocks: so whoever gets the lock of a
file that has lost its name starts again.

**`KeyLocks`.** The lock of a key is a claimed file in one directory, named by a hash of the key and
removed when it is given back. Within a process a table lets one thread per key go to the kernel,
and knows when a thread asks for what it holds itself.

Whoever wants many keys at once *claims* them: a key is then a byte, locked, of one file that stays
(3 us; making, locking and removing a file takes 200 us, and a descriptor). Who holds the file of a
key waits until its byte is free, and who has locked a byte gives it back if somebody holds the
file: both look after they have got what the other one looks at, so one of them sees the other.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from smartcache.errors import LockTimeoutError, NoSpaceError, StoreError, StoreUnwritableError
from smartcache.system.faults import reached
from smartcache.system.filesystems import mount_of
from smartcache.system.ownfiles import make_or_open_own, open_own

OnWait = Callable[[str], None]

logger = logging.getLogger(__name__)

_GRACE = (0.0002, 0.0005, 0.001, 0.002)
"""Pauses before a wait is worth a word. A fresh holder has written its note by then."""
_UNSPOKEN = 0.004
"""Seconds a wait for another thread, or for a byte, lasts before it is worth a word."""
_POLL = 0.02
"""Longest pause between two tries where the kernel cannot wait: with a time limit, for a byte."""
_SLICE = 1.0
"""Longest single wait for another thread."""
_PASSING = 1.0
"""Seconds a claim outwaits a cleaner or an `is_free`, which hold a file for microseconds."""
_STEP = 0.0005
_NOTE_BYTES = 4096
_WHAT_CHARACTERS = 200
_TURN = ".turn"
_CLAIMS = "claims"
"""The file whose bytes are claimed; nobody reads or writes it."""
_NAME_CHARACTERS = 32
_FLOCK = struct.Struct("@hhqqi0q")
"""The kernel's `struct flock`: kind, from where, start, length, process."""
_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.EINVAL} | {errno.ENOTSUP, errno.EOPNOTSUPP}

_guard = threading.RLock()
_open: dict[int, None] = {}
_generation = 0


class Descriptor:
    """A file opened for locking: closed when dropped, and closed in every forked child."""

    __slots__ = ("_born", "fd", "is_new")

    def __init__(self, path: str | Path, *, writable: bool = False) -> None:
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


def _open_to_read(path: str | Path) -> Descriptor | None:
    """Open a lock file for reading; None: there is none."""
    try:
        return Descriptor(path)
    except FileNotFoundError:
        return None
    except StoreError:
        raise
    except OSError as error:
        raise _refusal(path, error) from error


def _open_or_make(path: str | Path, *, make_directory: bool = False) -> Descriptor:
    """Open a lock file for reading and writing, made when missing."""
    place = path
    try:
        while True:
            try:
                return Descriptor(path, writable=True)
            except FileNotFoundError:
                if not make_directory:
                    raise
            place = os.path.dirname(path)
            os.makedirs(place, 0o700, exist_ok=True)
            place = path
    except StoreError:
        raise
    except OSError as error:
        raise _refusal(place, error) from error


def _refusal(path: str | Path, error: OSError) -> StoreError:
    """Return the error of this package for a lock file that could not be opened."""
    path = os.fspath(path)
    message = f"Cannot lock {path}: {error.strerror}"
    if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return StoreUnwritableError(message, path=path)
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return NoSpaceError(message, path=path)
    hint = "Is the store still there?" if error.errno in {errno.ENOENT, errno.ENOTDIR} else ""
    return StoreError(message, hint=hint, path=path)


def try_lock(fd: int, *, exclusive: bool) -> bool:
    """Lock without waiting; False: another descriptor holds it."""
    try:
        _flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(fd: int) -> None:
    """Give the lock back."""
    fcntl.flock(fd, fcntl.LOCK_UN)


def _flock(fd: int, how: int) -> None:
    """Lock, or raise a StoreError if this filesystem has no locks."""
    try:
        # Python calls it again after a signal unless its handler raised: Ctrl-C ends the wait.
        fcntl.flock(fd, how)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        where = "filesystem"
        with contextlib.suppress(OSError):
            path = Path(os.readlink(f"/proc/self/fd/{fd}"))
            where = f"{mount_of(path).fstype} filesystem of {path}"
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

    def pauses(self, seconds: float) -> Iterator[float]:
        """Sleep again and again, a little longer each time, until the time is up."""
        while self.pause(seconds):
            yield seconds
            seconds = min(1.5 * seconds, _POLL)

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
    if patience.remaining is None:
        _flock(fd, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        return True
    return any(try_lock(fd, exclusive=exclusive) for _ in patience.pauses(_GRACE[-1]))


class _Holder(NamedTuple):
    """Who wrote a note into a lock file: the process that holds it, or waits to hold it next."""

    who: str
    """The process and what it does."""
    when: str
    """The local time, with the date unless it is today."""
    waits: bool


def _holder_text(holder: _Holder | None) -> str:
    """Name a holder, or say that it left no name."""
    return "another process" if holder is None else f"{holder.who}, since {holder.when}"


def _sentence(holder: _Holder | None, name: str) -> str:
    """Say who has `name`, in a sentence for the user who waits."""
    if holder is None:
        return f"another process is using {name}"
    verb = "waited for" if holder.waits else "held"
    return f"{holder.who} has {verb} {name} since {holder.when}"


def _write_note(fd: int, what: str, *, waits: bool = False, key: str | None = None) -> None:
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
        os.pwrite(fd, line, 0)
        os.ftruncate(fd, len(line))


def _clear_note(fd: int) -> None:
    """Take the word back before giving up the lock."""
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)


def _read_holder(fd: int) -> _Holder | None:
    """Return who left word in a lock file; None: nobody, nothing readable, or a dead process."""
    try:
        note = json.loads(os.pread(fd, _NOTE_BYTES, 0).partition(b"\n")[0])
        pid, what, since = note["pid"], note["what"], datetime.fromisoformat(note["since"])
        if not isinstance(pid, int) or pid <= 0 or not isinstance(what, str):
            return None
        with contextlib.suppress(PermissionError):  # it lives, as another user's
            os.kill(pid, 0)
        # It may be printed on a terminal, and another user may have written it.
        what = "".join(filter(str.isprintable, what))
        process = "this process" if pid == os.getpid() else f"process {pid}"
        since = since.astimezone()
        is_today = since.date() == datetime.now(UTC).astimezone().date()
        return _Holder(
            who=f"{process} ({what})" if what else process,
            when=f"{since:%H:%M}" if is_today else f"{since:%Y-%m-%d %H:%M}",
            waits=note.get("waits") is True,
        )
    except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError):
        return None


@dataclass(slots=True, eq=False)
class _Hold:
    """One kernel lock of a thread, and how many of its `with` blocks rest on it."""

    descriptor: Descriptor
    turn: Descriptor | None
    """The locked turn file of a writer; None: the lock is shared."""
    of_thread: dict[str, _Hold]
    blocks: int = 0


class _HeldByThread(threading.local):
    def __init__(self) -> None:
        self.holds: dict[str, _Hold] = {}


_held = _HeldByThread()


@dataclass(slots=True, eq=False)
class lock:  # noqa: N801 - like `contextlib.suppress`
    """Hold the file lock at `path`, with others (7 us) or alone, for the length of a `with` block.

    The file is made when missing, its directory is not. A thread may share a lock it already
    shares; to ask for more than it holds would wait for itself and is a StoreError. `what` is what
    others are told the holder is doing to `name`; `on_wait` hears once, after a few milliseconds,
    what this call waits for. LockTimeoutError (with `key`, the path, and `holder`) after `timeout`
    seconds.

    No generator: that would cost as much as the lock does.
    """

    path: str | Path
    _: KW_ONLY
    exclusive: bool
    timeout: float | None = None
    what: str = ""
    on_wait: OnWait | None = None
    name: str = "the store"
    _file: str = field(init=False)
    _hold: _Hold | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._file = os.fspath(self.path)

    def __enter__(self) -> None:
        holds = _held.holds
        hold = holds.get(self._file)
        if hold is None:
            descriptor, turn = self._alone() if self.exclusive else (self._shared(), None)
            hold = _Hold(descriptor, turn, holds)
            # No call from here to the caller's block: an interrupt then would strand the hold.
            holds[self._file] = hold
        elif self.exclusive or hold.turn is not None:
            message = f"This thread already holds {self.name} and would wait for itself"
            raise StoreError(message, path=self._file)
        hold.blocks += 1
        self._hold = hold

    def __exit__(self, *exc: object) -> None:
        hold = self._hold
        if hold is None:
            return
        self._hold = None
        hold.blocks -= 1
        if hold.blocks == 0:
            hold.of_thread.pop(self._file, None)
            if hold.turn is not None and hold.descriptor.is_ours:
                _clear_note(hold.descriptor.fd)
            hold.descriptor.close()
            if hold.turn is not None:
                hold.turn.close()

    def _shared(self) -> Descriptor:
        # For reading: whoever may only read a store can still do so under its lock.
        descriptor = _open_to_read(self._file) or _open_or_make(self._file)
        try:
            if os.pread(descriptor.fd, 1, 0) or not try_lock(descriptor.fd, exclusive=False):
                self._queue_to_share(descriptor)
        except BaseException:
            # At once: the traceback would keep the descriptor, and with it the lock, alive.
            descriptor.close()
            raise
        return descriptor

    def _queue_to_share(self, descriptor: Descriptor) -> None:
        patience = Patience(self.timeout, self.on_wait)
        try:
            turn = Descriptor(self._file + _TURN)
        except OSError:
            # Removed, or not ours to read: without the queue it is only less fair.
            self._wait(descriptor, descriptor, patience)
            return
        try:
            self._wait(turn, descriptor, patience)
            self._wait(descriptor, descriptor, patience)
            if os.pread(descriptor.fd, 1, 0):
                with contextlib.suppress(OSError):
                    os.truncate(self._file, 0)
        finally:
            turn.close()

    def _alone(self) -> tuple[Descriptor, Descriptor]:
        patience = Patience(self.timeout, self.on_wait)
        descriptor = _open_or_make(self._file)
        turn = _open_or_make(self._file + _TURN)
        has_turn = False
        try:
            self._wait(turn, descriptor, patience)
            has_turn = True
            if not try_lock(descriptor.fd, exclusive=True):
                _write_note(descriptor.fd, self.what, waits=True)
                self._wait(descriptor, None, patience)
            _write_note(descriptor.fd, self.what)
        except BaseException:
            if has_turn:
                _clear_note(descriptor.fd)
            descriptor.close()
            turn.close()
            raise
        return descriptor, turn

    def _wait(self, target: Descriptor, note: Descriptor | None, patience: Patience) -> None:
        """Lock `target`; `note` is where its holder, if it is a writer, has left word."""

        def tell() -> str:
            return _sentence(None if note is None else _read_holder(note.fd), self.name)

        if not wait_for(target.fd, exclusive=self.exclusive, patience=patience, tell=tell):
            holder = None if note is None else _read_holder(note.fd)
            message = f"Gave up after {self.timeout:g} s: {_sentence(holder, self.name)}"
            raise LockTimeoutError(message, key=self._file, holder=_holder_text(holder))


@dataclass(slots=True, eq=False)
class Claim:
    """An exclusively locked file; others see by the lock that its owner lives.

    The descriptor belongs to the claim: closing it anywhere else would give the lock up unnoticed.
    """

    path: Path
    _descriptor: Descriptor

    @property
    def fd(self) -> int:
        """The open file, for reading and writing; StoreError once released or in a forked child."""
        if not self._descriptor.is_ours:
            message = f"{self.path} is not claimed by this process any more"
            raise StoreError(message, path=self.path)
        return self._descriptor.fd

    def release(self, *, remove: bool = True) -> None:
        """Give the file up, its name removed if it still names this file. Twice: no effect."""
        if not self._descriptor.is_ours:
            return
        try:
            if remove and _is_named(self._descriptor.fd, self.path):
                with contextlib.suppress(OSError):
                    os.unlink(self.path)
        finally:
            self._descriptor.close()


def claim(path: Path) -> Claim | None:
    """Lock a file (made when missing) without waiting; None: somebody living holds it.

    What a claim returns is locked *and* named `path`: nobody else has removed it or can claim it.
    To remove leftovers, claim them and release with `remove=True`; testing with `is_free` and then
    unlinking would take the file from under whoever claims it in between.
    """
    is_maker = False
    while True:
        try:
            descriptor = _open_or_make(path)
        except StoreUnwritableError:
            if not os.path.lexists(path):
                raise
            # What a killed process had finished and made read-only: to be removed, it is enough.
            descriptor = Descriptor(path)
        is_maker |= descriptor.is_new
        reached("claim: opened")
        if not _try_alone(descriptor.fd, is_maker=is_maker):
            descriptor.close()
            return None
        if _is_named(descriptor.fd, path):
            return Claim(path, descriptor)
        descriptor.close()


def is_free(path: Path) -> bool:
    """Say whether no living process holds the file. A missing one is free, an unreadable not."""
    try:
        descriptor = Descriptor(path)
    except FileNotFoundError:
        return True
    except PermissionError:
        return False
    try:
        return try_lock(descriptor.fd, exclusive=False)
    finally:
        descriptor.close()


def _try_alone(fd: int, *, is_maker: bool) -> bool:
    """Lock exclusively unless somebody holds it who will keep it."""
    patience = Patience(_PASSING, None)
    while not try_lock(fd, exclusive=True):
        # Who made the file expects to get it: it is a cleaner that is in the way, or that swept it
        # away and had it made anew. An `is_free` only shares.
        if not is_maker and not try_lock(fd, exclusive=False):
            return False
        unlock(fd)
        if not patience.pause(_STEP):
            return False
    return True


def _is_named(fd: int, path: Path) -> bool:
    """Say whether `path` still names the open file. Only its holder removes it: so it stays."""
    try:
        named = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), named)


def _try_lock_byte(fd: int, offset: int) -> bool:
    """Lock one byte of a file without waiting; False: another descriptor holds it.

    NotImplementedError where there are no such locks: in some sandboxes, for instance. Only Linux
    gives them to the open file, as `flock` does, and not to the process.
    """
    if sys.platform != "linux":
        raise NotImplementedError
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, 0, offset, 1, 0))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            raise NotImplementedError from error
        raise
    return True


def _unlock_bytes(fd: int, offset: int = 0, length: int = 0) -> None:
    """Give back the locks of bytes: of all, unless it is said of which."""
    if sys.platform == "linux":
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, 0, offset, length, 0))


def _is_byte_locked(fd: int, offset: int) -> bool:
    """Say whether another descriptor holds a byte; nobody does where that is not possible."""
    if sys.platform != "linux":
        return False
    wanted = _FLOCK.pack(fcntl.F_WRLCK, 0, offset, 1, 0)
    try:
        found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, wanted)
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return False
        raise
    return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)


class KeyLocks:
    """The locks of keys in one directory, which is made when the first is taken.

    `timeout` is for those who do not say how long they would wait; None: without limit.
    """

    def __init__(self, directory: Path, *, timeout: float | None = None) -> None:
        self.directory = Path(os.path.abspath(directory))
        self.timeout = timeout

    @contextlib.contextmanager
    def hold(
        self,
        keys: str | Iterable[str],
        *,
        what: str = "",
        timeout: float | None = None,
        on_wait: OnWait | None = None,
    ) -> Iterator[None]:
        """Be the only holder of every key, for the length of a `with` block.

        Ask for all keys at once: they are taken in sorted order, so callers cannot wait for each
        other in a circle. A thread that asks for a key it holds gets a StoreError, for it would
        wait for itself. `on_wait` hears once per key who holds it; LockTimeoutError (with `key`
        and `holder`) when not all are taken within `timeout` seconds, and then none is.
        """
        patience = Patience(self.timeout if timeout is None else timeout, on_wait)
        with contextlib.ExitStack() as stack:
            for key in sorted({keys} if isinstance(keys, str) else set(keys)):
                patience.start_next()
                stack.enter_context(self._hold_one(key, what, patience))
            yield

    @contextlib.contextmanager
    def _hold_one(self, key: str, what: str, patience: Patience) -> Iterator[None]:
        path = self._path(key)
        with _one_thread(path, key, patience):
            claim = _wait_for_claim(path, key, patience)
            try:
                _write_note(claim.fd, what, key=key)
                self._outwait_claims(key, patience)
                yield
            finally:
                claim.release()

    def _outwait_claims(self, key: str, patience: Patience) -> None:
        """Wait for whoever has the byte of a key; with its file held: nobody gets it after that."""
        pauses = patience.pauses(_UNSPOKEN)
        while (holder := self._who_claims(key)) is not None:
            if _table.claims.get((self.directory, _offset(key))) == threading.get_ident():
                raise _waits_for_itself(key)
            if next(pauses, None) is None:
                raise _timeout(key, holder, patience)
            patience.say(f"{_name(key)} is held by {holder}")

    def try_hold(
        self, keys: Iterable[str], stack: contextlib.ExitStack, *, what: str = ""
    ) -> list[str]:
        """Hold those of some keys that nobody holds, until the stack is left; return them.

        Any thread may leave the stack.
        """
        wanted = {key: _offset(key) for key in keys}
        descriptor = _open_or_make(self.directory / _CLAIMS, make_directory=True)
        claimed: set[int] = set()
        stack.callback(self._give_back, descriptor, claimed)
        with contextlib.suppress(NotImplementedError):
            for offset in wanted.values():
                if _try_lock_byte(descriptor.fd, offset):
                    claimed.add(offset)
                    _table.claims[self.directory, offset] = threading.get_ident()
            held = set(os.listdir(self.directory)) - {_CLAIMS}
            for key, offset in wanted.items() if held else ():
                path = self._path(key)
                if offset in claimed and path.name in held and _who_holds(path) is not None:
                    claimed.remove(offset)
                    del _table.claims[self.directory, offset]
                    _unlock_bytes(descriptor.fd, offset, 1)
            return [key for key, offset in wanted.items() if offset in claimed]
        got: list[str] = []
        for key in wanted:
            with contextlib.suppress(LockTimeoutError):
                stack.enter_context(self.hold(key, what=what, timeout=0))
                got.append(key)
        return got

    def _give_back(self, descriptor: Descriptor, claimed: set[int]) -> None:
        """Unlock bytes and the file they are of. In a forked child: no effect."""
        if descriptor.is_ours:
            for offset in claimed:
                _table.claims.pop((self.directory, offset), None)
            with contextlib.suppress(OSError):
                _unlock_bytes(descriptor.fd)
            descriptor.close()

    def busy(self, key: str) -> str | None:
        """Return who holds a key, in words; None: nobody. It may have changed when you read it."""
        return _who_holds(self._path(key)) or self._who_claims(key)

    def wait(self, key: str, timeout: float) -> bool:
        """Wait until nobody holds a key, at most so many seconds; say whether it is so."""
        pauses = Patience(timeout, None).pauses(_UNSPOKEN)
        return self.busy(key) is None or any(self.busy(key) is None for _ in pauses)

    def _who_claims(self, key: str) -> str | None:
        """Return who has locked the byte of a key."""
        descriptor = _open_to_read(self.directory / _CLAIMS)
        if descriptor is None:
            return None
        try:
            is_locked = _is_byte_locked(descriptor.fd, _offset(key))
            return "another thread or process" if is_locked else None
        finally:
            descriptor.close()

    def _path(self, key: str) -> Path:
        # Keys may be file names, and those may be no valid text.
        digest = blake3(key.encode("utf-8", "surrogatepass")).hexdigest()
        return self.directory / digest[:_NAME_CHARACTERS]


class _Table:
    """Which thread of this process has its turn at the file of which key."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.turns: dict[Path, int] = {}
        self.claims: dict[tuple[Path, int], int] = {}
        """By directory and byte: the thread that has claimed it."""


_table = _Table()


@contextlib.contextmanager
def _one_thread(path: Path, key: str, patience: Patience) -> Iterator[None]:
    """Keep the other threads of this process away from the file of a key."""
    table, me = _table, threading.get_ident()
    if table.turns.get(path) == me:
        raise _waits_for_itself(key)
    try:
        _wait_for_turn(path, key, patience)
        yield
    finally:
        # In a forked child the turn is its parent's.
        if table is _table:
            with table.changed:
                if table.turns.get(path) == me:
                    del table.turns[path]
                    table.changed.notify_all()


def _wait_for_turn(path: Path, key: str, patience: Patience) -> None:
    table, me, seconds = _table, threading.get_ident(), _UNSPOKEN
    while True:
        remaining = patience.remaining
        with table.changed:
            before = table.turns.setdefault(path, me)
            if before == me:
                return
            longest = seconds if remaining is None else max(0, min(seconds, remaining))
            if table.changed.wait_for(lambda: table.turns.get(path) != before, longest):  # noqa: B023
                continue
        # The thread that has its turn may itself be waiting for another process.
        holder = _who_holds(path) or "another thread of this process"
        if remaining is not None and remaining <= 0:
            raise _timeout(key, holder, patience)
        patience.say(f"{_name(key)} is held by {holder}")
        seconds = _SLICE


def _wait_for_claim(path: Path, key: str, patience: Patience) -> Claim:
    """Wait to claim the file of a key, its directory made when missing."""
    while True:
        descriptor = _open_or_make(path, make_directory=True)
        fd = descriptor.fd

        def tell(fd: int = fd) -> str:
            return _sentence(_read_holder(fd), _name(key))

        try:
            if not wait_for(fd, exclusive=True, patience=patience, tell=tell):
                raise _timeout(key, _holder_text(_read_holder(fd)), patience)
            if _is_named(fd, path):
                return Claim(path, descriptor)
        except BaseException:
            descriptor.close()
            raise
        descriptor.close()


def _who_holds(path: Path) -> str | None:
    descriptor = _open_to_read(path)
    if descriptor is None:
        return None
    try:
        if try_lock(descriptor.fd, exclusive=False):
            return None
        return _holder_text(_read_holder(descriptor.fd))
    finally:
        descriptor.close()


def _offset(key: str) -> int:
    """Return the byte that stands for a key; that of another one only by a chance of 1 in 2^62."""
    return int.from_bytes(blake3(key.encode("utf-8", "surrogatepass")).digest(8), "big") >> 2


def _waits_for_itself(key: str) -> StoreError:
    message = f"This thread already holds {_name(key)} and would wait for itself"
    return StoreError(message, key=key)


def _name(key: str) -> str:
    return f"the lock of {key!r}"


def _timeout(key: str, holder: str, patience: Patience) -> LockTimeoutError:
    message = f"Gave up after {patience.timeout:g} s: {_name(key)} is held by {holder}"
    return LockTimeoutError(message, key=key, holder=holder)


def _start_anew_in_child() -> None:
    """Close every descriptor of the parent and mark it as not ours; hold nothing."""
    global _generation, _held, _table  # noqa: PLW0603
    for fd in _open:
        with contextlib.suppress(OSError):
            os.close(fd)
    _open.clear()
    _generation += 1
    _held = _HeldByThread()
    # Another thread may have held the guard of the old one at the moment of the fork.
    _table = _Table()
    _guard.release()


os.register_at_fork(
    before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_start_anew_in_child
)
