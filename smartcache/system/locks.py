"""Kernel file locks: of a store (`store_lock`), a file or folder (`claim`), of keys (`KeyLocks`).

The kernel takes a lock back the moment its holder dies. A lock belongs to the open file, which a
forked child shares. So every descriptor is registered, and a child closes them all before it runs
anything: it can neither hold a lock of its parent's nor keep it after the parent's death. The
parent unlocks explicitly before it closes, so that a copy in a child made without Python's
knowledge does not matter either. Every acquisition opens its own descriptor, so threads exclude
each other as processes do. Leaving a `with` block it inherited does nothing in a child.

Whoever waits tries again and again, so that it can be interrupted, give up, and say for whom it
waits: a holder leaves a note in the file. Notes never decide who holds; only the lock does.

**`claim`.** Whoever claims a file has it locked *and* under its name; the lock tells others that
the owner lives. Only the owner removes the name, before it unlocks: so whoever gets the lock of a
file that has lost its name starts again.

**`KeyLocks`.** A key is a locked byte of one file, which takes 3 us; making, locking and removing a
file takes 200 us. Where the system has no such locks, a key is a claimed file after all.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import math
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from blake3 import blake3

from smartcache.errors import LockTimeoutError, StoreError, StoreUnwritableError
from smartcache.system import kernel
from smartcache.system.faults import reached
from smartcache.system.filesystems import mount_of
from smartcache.system.ownfiles import make_or_open_own, open_own, unwritable

OnWait = Callable[[str], None]

logger = logging.getLogger(__name__)

_STEP = 0.0005
_STORE_POLL = 0.002
_STORE_QUIET = 2.0
"""Seconds a wait lasts before it is worth a word: a store is locked for milliseconds."""
_KEY_POLL = 0.02
_KEY_QUIET = 0.004
"""A key is locked for as long as its work takes. A fresh holder has written its note by then."""
_PASSING = 1.0
"""Seconds a claim outwaits a cleaner or an `is_free`, which hold a file for microseconds."""
_WHOLE = 0
"""In place of a key, for a file that is locked as a whole."""
_NOTE_BYTES = 512
_NOTES = 256
_WHAT_CHARACTERS = 60

_guard = threading.RLock()
_open: set[int] = set()
_generation = 0
_owners: dict[tuple[str, int], int] = {}
"""By file and byte: the thread of this process that holds it."""


class Descriptor:
    """A file opened for locking: closed when dropped, and closed in every forked child."""

    __slots__ = ("_born", "fd", "is_new")

    def __init__(self, opening: Callable[[], tuple[int, bool]]) -> None:
        """Call what opens it and says whether it has made it (`is_new`)."""
        self.fd = -1
        # The guard keeps another thread from forking between opening and registering.
        with _guard:
            self._born = _generation
            self.fd, self.is_new = opening()
            _open.add(self.fd)

    @property
    def is_ours(self) -> bool:
        """Whether the file is open, and was opened by this process, not by its parent."""
        return self.fd >= 0 and self._born == _generation

    def close(self) -> None:
        """Unlock and close. In a forked child, where `fd` may be another file by now: no effect."""
        with _guard:
            if not self.is_ours:
                return
            try:  # noqa: SIM105 - suppress() would double the price of closing
                fcntl.flock(self.fd, fcntl.LOCK_UN)
            except OSError:
                pass
            # No call from here to os.close: an interrupt in between would leak the number, or
            # have it closed twice.
            fd = self.fd
            self.fd = -1
            _open.discard(fd)
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def _open_to_read(path: str | Path) -> Descriptor:
    return Descriptor(lambda: (open_own(path), False))


def _open_or_make(path: str | Path, folder: Path | None = None) -> Descriptor:
    """Open a lock file for reading and writing, made when missing, as is its `folder`."""
    try:
        if folder is not None and not os.path.isdir(folder):
            os.makedirs(folder, 0o700, exist_ok=True)
        return Descriptor(lambda: make_or_open_own(path, os.O_RDWR))
    except StoreError:
        raise
    except OSError as error:
        place = str(error.filename or path)
        if error.errno in {errno.ENOENT, errno.ENOTDIR}:
            message, hint = f"Cannot lock {place}: {error.strerror}", "Is the store still there?"
            raise StoreError(message, hint=hint, path=place) from error
        raise unwritable(f"Cannot lock {place}", place, error) from error


def try_lock(fd: int, *, exclusive: bool) -> bool:
    """Lock without waiting; False: another descriptor holds it."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in kernel.NO_LOCKS:
            raise
        where = "filesystem"
        with contextlib.suppress(OSError):
            path = kernel.path_of(fd)
            where = f"{mount_of(path).fstype} filesystem of {path}"
        hint = "Mount it with locking enabled, or set SMARTCACHE_HOME to a local directory."
        message = f"The {where} does not lock files ({error.strerror})"
        raise StoreError(message, hint=hint) from error
    return True


def _wait(
    attempt: Callable[[], bool], deadline: float, poll: float, quiet: float = math.inf,
    speak: Callable[[], object] = str,
) -> bool:  # fmt: skip
    """Try again and again; False: the time is up. A wait of `quiet` seconds is worth a word."""
    began, pause = time.monotonic(), _STEP
    while not attempt():
        now = time.monotonic()
        if now >= deadline:
            return False
        if now - began >= quiet:
            quiet = math.inf
            speak()
        time.sleep(min(pause, deadline - now))
        pause = min(1.5 * pause, poll)
    return True


def _write_note(fd: int, byte: int, note: str) -> None:
    """Leave word for those who will wait, or take it back. A full disk makes them know less."""
    with contextlib.suppress(OSError):
        os.pwrite(fd, f"{note}\n".encode(errors="replace"), byte % _NOTES * _NOTE_BYTES)


def _read_holder(fd: int, byte: int) -> tuple[str, str]:
    """Return who left word in a lock file, and since when, if it makes sense and they live."""
    with contextlib.suppress(OSError, ValueError, OverflowError):
        text = os.pread(fd, _NOTE_BYTES, byte % _NOTES * _NOTE_BYTES).partition(b"\n")[0]
        key, pid, seconds, what = text.decode().split(" ", 3)
        process = "this process" if int(pid) == os.getpid() else f"process {int(pid)}"
        since, now = (datetime.fromtimestamp(at).astimezone() for at in (int(seconds), time.time()))
        if int(key) == byte and int(pid) > 0:
            with contextlib.suppress(PermissionError):  # it lives, as another user's
                os.kill(int(pid), 0)
            what = "".join(filter(str.isprintable, what))  # it may be printed on a terminal
            day = "" if since.date() == now.date() else f"{since:%Y-%m-%d} "
            return f"{process} ({what})" if what else process, f"{day}{since:%H:%M}"
    return "another process", ""


def _holder(fd: int, byte: int) -> str:
    who, since = _read_holder(fd, byte)
    return f"{who}, since {since}" if since else who


def _sentence(fd: int, byte: int, name: str) -> str:
    """Say who has `name`, in a sentence for the user who waits."""
    who, since = _read_holder(fd, byte)
    return f"{who} has held {name} since {since}" if since else f"{who} is using {name}"


class _Grip:
    """What one caller holds of a lock file: all of it, or keys, each of them a byte of it."""

    def __init__(
        self, file: str, keys: Path | None = None, *, timeout: float | None = None,
        on_wait: OnWait | None = None,
    ) -> None:  # fmt: skip
        """Open the file; that of keys is in the folder `keys`, which is made when missing."""
        self._file = file
        self._keys = keys
        self._timeout = timeout
        self._deadline = math.inf if timeout is None else time.monotonic() + timeout
        self._speak = on_wait or logger.info
        self._claims: list[Claim] = []
        self._taken: list[int] = []
        self._noted: list[int] = []
        self._descriptor = _open_or_make(file, keys)

    def take(self, byte: int) -> bool:
        """Lock without waiting; False: another caller holds it."""
        is_locked: bool | None
        if self._keys is None:
            is_locked = try_lock(self._descriptor.fd, exclusive=True)
        elif (is_locked := kernel.lock_byte(self._descriptor.fd, byte)) is None:
            claimed = claim(_path_of(self._keys, byte))
            is_locked = claimed is not None
            if claimed is not None:
                self._claims.append(claimed)
        if is_locked:
            self._taken.append(byte)
            _owners[self._file, byte] = threading.get_ident()
        return is_locked

    def wait_for(self, byte: int, key: str, name: str, what: str) -> None:
        """Lock, and leave word why; StoreError or LockTimeoutError (of `key`) if that cannot be."""
        if _owners.get((self._file, byte)) == threading.get_ident():
            raise StoreError(f"This thread already holds {name} and would wait for itself", key=key)
        fd = self._descriptor.fd
        poll, quiet = (_KEY_POLL, _KEY_QUIET) if self._keys else (_STORE_POLL, _STORE_QUIET)
        speak = lambda: self._speak(_sentence(fd, byte, name))  # noqa: E731
        if not _wait(lambda: self.take(byte), self._deadline, poll, quiet, speak):
            message = f"Gave up after {self._timeout:g} s: {_sentence(fd, byte, name)}"
            raise LockTimeoutError(message, key=key, holder=_holder(fd, byte))
        self._noted.append(byte)
        note = f"{byte} {os.getpid()} {int(time.time())} {what[:_WHAT_CHARACTERS]}"
        _write_note(fd, byte, note.replace("\n", " "))

    def release(self) -> None:
        """Give all back, at once: a traceback would keep the descriptor, and so the lock, alive.

        In a forked child: no effect.
        """
        if not self._descriptor.is_ours:
            return
        for byte in self._noted:
            _write_note(self._descriptor.fd, byte, "")
        for byte in self._taken:
            _owners.pop((self._file, byte), None)
        for claimed in self._claims:
            claimed.release()
        if self._keys is not None:
            kernel.unlock_bytes(self._descriptor.fd)
        self._descriptor.close()


@contextlib.contextmanager
def store_lock(
    path: str | Path, label: str, *, timeout: float | None = None, on_wait: OnWait | None = None,
    name: str = "the store",
) -> Iterator[None]:  # fmt: skip
    """Be the only holder of a lock file, which is made when missing, for a `with` block.

    `label` is what others are told the holder is doing to `name`. `on_wait` hears once, after two
    seconds, what this call waits for; without it that is logged. LockTimeoutError (with `key`, the
    path, and `holder`) after `timeout` seconds. A thread that holds it already would wait for
    itself, which is a StoreError.
    """
    file = os.fspath(path)
    grip = _Grip(file, timeout=timeout, on_wait=on_wait)
    try:
        grip.wait_for(_WHOLE, file, name, label)
        yield
    finally:
        grip.release()


@dataclass(slots=True, eq=False)
class Claim:
    """An exclusively locked file or folder; others see by the lock that its owner lives.

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
        """Give it up, removed first if its name still names it: a folder with all that is in it.

        Twice: no effect.
        """
        if not self._descriptor.is_ours:
            return
        try:
            if remove and _is_named(self._descriptor.fd, self.path):
                if stat.S_ISDIR(os.fstat(self._descriptor.fd).st_mode):
                    shutil.rmtree(self.path, ignore_errors=True)
                else:
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
            descriptor = _open_to_read(path)
        is_maker |= descriptor.is_new
        reached("claim: opened")
        if not _try_alone(descriptor.fd, is_maker=is_maker):
            descriptor.close()
            return None
        if _is_named(descriptor.fd, path):
            return Claim(path, descriptor)
        descriptor.close()


def claim_folder(path: Path) -> Claim | None:
    """Lock a folder without waiting; None: somebody living holds it, or it is gone."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = Descriptor(lambda: (os.open(path, flags), False))
    except FileNotFoundError:
        return None
    if try_lock(descriptor.fd, exclusive=True) and _is_named(descriptor.fd, path):
        return Claim(path, descriptor)
    descriptor.close()
    return None


def is_free(path: Path) -> bool:
    """Say whether no living process holds the file. A missing one is free, an unreadable not."""
    try:
        descriptor = _open_to_read(path)
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
    deadline = time.monotonic() + _PASSING
    while not try_lock(fd, exclusive=True):
        # Who made the file expects to get it: it is a cleaner that is in the way, or that swept it
        # away and had it made anew. An `is_free` only shares.
        if not is_maker and not try_lock(fd, exclusive=False):
            return False
        fcntl.flock(fd, fcntl.LOCK_UN)
        if time.monotonic() > deadline:
            return False
        time.sleep(_STEP)
    return True


def _is_named(fd: int, path: Path) -> bool:
    """Say whether `path` still names the open file. Only its holder removes it: so it stays."""
    try:
        named = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), named)


class KeyLocks:
    """The locks of keys in one directory, which is made when the first is taken.

    `timeout` is for those who do not say how long they would wait; None: without limit.
    """

    def __init__(self, directory: Path, *, timeout: float | None = None) -> None:
        self.directory = Path(os.path.abspath(directory))
        # What is written in it are notes: its bytes are the keys.
        self._file = os.fspath(self.directory / "keys")
        self.timeout = timeout

    @contextlib.contextmanager
    def hold(
        self, keys: str | Iterable[str], *, what: str = "", timeout: float | None = None,
        on_wait: OnWait | None = None,
    ) -> Iterator[None]:  # fmt: skip
        """Be the only holder of every key, for the length of a `with` block.

        Ask for all keys at once: they are taken in one order, so callers cannot wait for each other
        in a circle. A thread that asks for a key it holds gets a StoreError, for it would wait for
        itself. `on_wait` hears once per key who holds it; LockTimeoutError (with `key` and
        `holder`) when not all are taken within `timeout` seconds, and then none is.
        """
        limit = self.timeout if timeout is None else timeout
        grip = _Grip(self._file, self.directory, timeout=limit, on_wait=on_wait)
        try:
            for key in sorted({keys} if isinstance(keys, str) else set(keys)):
                grip.wait_for(_byte_of(key), key, f"the lock of {key!r}", what)
            yield
        finally:
            grip.release()

    def try_hold(self, keys: Iterable[str], stack: contextlib.ExitStack) -> list[str]:
        """Hold those of some keys that nobody holds, until the stack is left; return them.

        Any thread may leave the stack.
        """
        grip = _Grip(self._file, self.directory)
        stack.callback(grip.release)
        return [key for key in dict.fromkeys(keys) if grip.take(_byte_of(key))]

    def busy(self, key: str) -> str | None:
        """Return who holds a key, in words; None: nobody. It may have changed when you read it."""
        try:
            descriptor = _open_to_read(self._file)
        except FileNotFoundError:
            return None
        try:
            byte = _byte_of(key)
            is_locked = kernel.is_byte_locked(descriptor.fd, byte)
            if is_locked is None:
                is_locked = not is_free(_path_of(self.directory, byte))
            return _holder(descriptor.fd, byte) if is_locked else None
        finally:
            descriptor.close()

    def wait(self, key: str, timeout: float) -> bool:
        """Wait until nobody holds a key, at most so many seconds; say whether it is so."""
        return _wait(lambda: self.busy(key) is None, time.monotonic() + timeout, _KEY_POLL)


def _byte_of(key: str) -> int:
    """Return the byte that stands for a key; that of another one only by a chance of 1 in 2^62."""
    # Keys may be file names, and those may be no valid text.
    return int.from_bytes(blake3(key.encode("utf-8", "surrogatepass")).digest(8), "big") >> 2


def _path_of(directory: Path, byte: int) -> Path:
    """Return the file that stands for a key where bytes cannot be locked."""
    return directory / f"{byte:016x}"


def _start_anew_in_child() -> None:
    """Close every descriptor of the parent and mark it as not ours; hold nothing."""
    global _generation  # noqa: PLW0603
    for fd in _open:
        with contextlib.suppress(OSError):
            os.close(fd)
    _open.clear()
    _owners.clear()
    _generation += 1
    _guard.release()


os.register_at_fork(
    before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_start_anew_in_child
)
