"""Kernel file locks: many may share a file, or one has it alone.

Every acquisition opens its own descriptor, so threads exclude each other as processes do, and the
kernel takes a lock back the moment its holder dies. A forked child holds nothing: it closes its
copies of the descriptors, which leaves the parent's locks alone, and leaving a `with` block it
inherited does nothing.

`flock` lets new sharers in while a writer waits, so a stream of short sharers keeps a writer out
for good. A writer therefore first locks a second file (`<path>.turn`) and keeps it until it is
done; while it waits or holds, the lock file contains a note saying so. A sharer that finds the file
empty, one `pread`, goes ahead; one that finds a note queues at the turn file, and whoever gets past
it knows the note to be a dead process's. Notes and turn file decide who goes first, never who
holds: only the lock itself does that.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from contextlib import AbstractContextManager
from pathlib import Path

from smartcache.errors import LeaseTimeoutError, StoreError
from smartcache.store.faults import reached
from smartcache.store.flock import (
    Descriptor,
    OnWait,
    Patience,
    clear_note,
    has_note,
    holder_text,
    open_or_create,
    read_holder,
    refusal,
    sentence,
    try_lock,
    unlock,
    wait_for,
    write_note,
)

__all__ = ["Claim", "OnWait", "claim", "is_free", "lock", "wait_for_claim"]

_TURN = ".turn"
_PASSING = 1.0
"""Seconds a claim outwaits a cleaner or an `is_free`, which hold a file for microseconds."""
_STEP = 0.0005


def lock(
    path: Path,
    *,
    exclusive: bool,
    timeout: float | None = None,
    what: str = "",
    on_wait: OnWait | None = None,
    name: str = "the store",
) -> AbstractContextManager[None]:
    """Hold the file lock at `path`, with others (7 us) or alone, for the length of a `with` block.

    The file is made when missing, its directory is not. A thread may share a lock it already
    shares; to ask for more than it holds would wait for itself and is a StoreError. `what` is what
    others are told the holder is doing to `name`; `on_wait` hears once, after a few milliseconds,
    what this call waits for. LeaseTimeoutError (with `key`, the path, and `holder`) after `timeout`
    seconds.
    """
    return _Lock(os.fspath(path), exclusive, timeout, what, on_wait, name)


class _Hold:
    """One kernel lock of a thread, and how many of its `with` blocks rest on it."""

    __slots__ = ("blocks", "descriptor", "exclusive", "of_thread", "turn")

    def __init__(self, descriptor: Descriptor, turn: Descriptor | None, *, exclusive: bool) -> None:
        self.descriptor = descriptor
        self.turn = turn
        self.exclusive = exclusive
        self.blocks = 0
        self.of_thread: dict[str, _Hold] = {}


class _HeldByThread(threading.local):
    def __init__(self) -> None:
        self.holds: dict[str, _Hold] = {}


_held = _HeldByThread()


def _forget_holds() -> None:
    global _held  # noqa: PLW0603 - the child of a fork starts with nothing
    _held = _HeldByThread()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_forget_holds)


class _Lock:
    """What `lock` returns. No generator: that would cost as much as the lock does."""

    __slots__ = ("_exclusive", "_hold", "_name", "_on_wait", "_path", "_timeout", "_what")

    def __init__(
        self,
        path: str,
        exclusive: bool,  # noqa: FBT001
        timeout: float | None,
        what: str,
        on_wait: OnWait | None,
        name: str,
    ) -> None:
        self._path = path
        self._exclusive = exclusive
        self._timeout = timeout
        self._what = what
        self._on_wait = on_wait
        self._name = name
        self._hold: _Hold | None = None

    def __enter__(self) -> None:
        holds = _held.holds
        hold = holds.get(self._path)
        if hold is None:
            hold = self._acquire()
            hold.of_thread = holds
            # No call from here to the caller's block: an interrupt then would strand the hold.
            holds[self._path] = hold
        elif self._exclusive or hold.exclusive:
            message = f"This thread already holds {self._name} and would wait for itself"
            raise StoreError(message, path=self._path)
        hold.blocks += 1
        self._hold = hold

    def __exit__(self, *exc: object) -> None:
        hold = self._hold
        if hold is None:
            return
        self._hold = None
        hold.blocks -= 1
        if hold.blocks == 0:
            hold.of_thread.pop(self._path, None)
            if hold.turn is not None:
                if hold.descriptor.is_ours:
                    clear_note(hold.descriptor.fd)
                hold.descriptor.close()
                hold.turn.close()
            else:
                hold.descriptor.close()

    def _acquire(self) -> _Hold:
        # msvcrt has no shared locks.
        if self._exclusive or sys.platform == "win32":
            return self._acquire_alone()
        descriptor = self._open_to_share()
        try:
            if os.pread(descriptor.fd, 1, 0) or not try_lock(descriptor.fd, exclusive=False):
                self._queue_to_share(descriptor)
        except BaseException:
            # At once: the traceback would keep the descriptor, and with it the lock, alive.
            descriptor.close()
            raise
        return _Hold(descriptor, None, exclusive=False)

    def _open_to_share(self) -> Descriptor:
        """Open for reading: whoever may only read a store can still do so under its lock."""
        try:
            return Descriptor(self._path)
        except FileNotFoundError:
            return open_or_create(self._path)
        except StoreError:
            raise
        except OSError as error:
            raise refusal(self._path, error) from error

    def _queue_to_share(self, descriptor: Descriptor) -> None:
        patience = Patience(self._timeout, self._on_wait)
        try:
            turn = Descriptor(self._path + _TURN)
        except OSError:
            # Removed, or not ours to read: without the queue it is only less fair.
            self._wait(descriptor, descriptor, patience, exclusive=False)
            return
        try:
            self._wait(turn, descriptor, patience, exclusive=False)
            self._wait(descriptor, descriptor, patience, exclusive=False)
            if has_note(descriptor.fd):
                with contextlib.suppress(OSError):
                    os.truncate(self._path, 0)
        finally:
            turn.close()

    def _acquire_alone(self) -> _Hold:
        patience = Patience(self._timeout, self._on_wait)
        descriptor = open_or_create(self._path)
        turn = open_or_create(self._path + _TURN)
        has_turn = False
        try:
            self._wait(turn, descriptor, patience, exclusive=True)
            has_turn = True
            if not try_lock(descriptor.fd, exclusive=True):
                write_note(descriptor.fd, self._what, waits=True)
                self._wait(descriptor, None, patience, exclusive=True)
            write_note(descriptor.fd, self._what)
        except BaseException:
            if has_turn:
                clear_note(descriptor.fd)
            descriptor.close()
            turn.close()
            raise
        return _Hold(descriptor, turn, exclusive=self._exclusive)

    def _wait(
        self, target: Descriptor, note: Descriptor | None, patience: Patience, *, exclusive: bool
    ) -> None:
        """Lock `target`; `note` is where its holder, if it is a writer, has left word."""

        def tell() -> str:
            return sentence(None if note is None else read_holder(note.fd), self._name)

        if not wait_for(target.fd, exclusive=exclusive, patience=patience, tell=tell):
            holder = None if note is None else read_holder(note.fd)
            message = f"Gave up after {self._timeout:g} s: {sentence(holder, self._name)}"
            raise LeaseTimeoutError(message, key=self._path, holder=holder_text(holder))


class Claim:
    """An exclusively locked file; others see by the lock that its owner lives.

    The descriptor belongs to the claim: closing it anywhere else would give the lock up unnoticed.
    """

    __slots__ = ("_descriptor", "path")

    def __init__(self, path: Path, descriptor: Descriptor) -> None:
        self.path = path
        self._descriptor = descriptor

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
            if sys.platform == "win32":
                # An open file cannot be removed there, so nobody who has it open can lose it.
                self._descriptor.close()
            if remove and (sys.platform == "win32" or _is_named(self._descriptor.fd, self.path)):
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
        descriptor = open_or_create(path)
        is_maker |= descriptor.is_new
        reached("claim: opened")
        if not _try_alone(descriptor.fd, is_maker=is_maker):
            descriptor.close()
            return None
        if _is_named(descriptor.fd, path):
            return Claim(path, descriptor)
        descriptor.close()


def wait_for_claim(path: Path, patience: Patience, *, name: str) -> Claim | str:
    """Wait to claim a file, its directory made when missing; or say who has it when time is up."""
    while True:
        descriptor = open_or_create(path, make_directory=True)
        fd = descriptor.fd

        def tell(fd: int = fd) -> str:
            return sentence(read_holder(fd), name)

        holder = ""
        try:
            if not wait_for(fd, exclusive=True, patience=patience, tell=tell):
                holder = holder_text(read_holder(fd))
            elif _is_named(fd, path):
                return Claim(path, descriptor)
        except BaseException:
            descriptor.close()
            raise
        descriptor.close()
        if holder:
            return holder


def is_free(path: Path) -> bool:
    """Say whether no living process holds the file. A missing one is free, an unreadable not."""
    try:
        descriptor = Descriptor(os.fspath(path))
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
