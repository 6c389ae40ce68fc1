"""One worker per key, among all threads and processes of a host.

A lease is an exclusively locked file in one directory, named by a hash of its key: the kernel frees
it when the holder dies. The holder removes the file before it unlocks, and whoever then gets the
lock of the nameless file sees that its name is gone or names another file, and starts again: so a
holder always has the file that bears the name, and there is only one. Within a process a table lets
one thread per key go to the kernel, and knows when a thread asks for what it holds itself.

Whoever wants many keys at once *claims* them: a key is then a byte, locked, of one file that stays
(3 us; making, locking and removing a file takes 200 us, and a descriptor). Who holds the file of a
key waits until its byte is free, and who has locked a byte gives it back if somebody holds the
file: both look after they have got what the other one looks at, so one of them sees the other.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from blake3 import blake3

from smartcache.errors import LeaseTimeoutError, StoreError
from smartcache.store.flock import (
    CAN_LOCK_BYTES,
    Descriptor,
    Patience,
    holder_text,
    is_byte_locked,
    open_or_create,
    read_holder,
    refusal,
    try_lock,
    try_lock_byte,
    unlock_bytes,
    write_note,
)
from smartcache.store.locks import Claim, OnWait, wait_for_claim

_NAME_CHARACTERS = 32
_CLAIMS = "claims"
"""The file whose bytes are claimed; nobody reads or writes it."""
_UNSPOKEN = 0.004
"""Seconds a wait for another thread lasts before it is worth a word."""
_ANOTHER_THREAD = "another thread of this process"
_ANOTHER = "another thread or process"
_POLL = 0.02
"""Longest pause between two looks at a claimed byte."""
_SLICE = 1.0
"""Longest single wait for another thread: on Windows an endless one would not hear Ctrl-C."""


class Leases:
    """The leases of one directory, which is made when the first is taken.

    `timeout` is for those who do not say how long they would wait; None: without limit.
    """

    def __init__(self, directory: Path, *, timeout: float | None = None) -> None:
        self.directory = Path(os.path.abspath(directory))
        self.timeout = timeout

    def hold(
        self,
        keys: str | Iterable[str],
        *,
        what: str = "",
        timeout: float | None = None,
        on_wait: OnWait | None = None,
    ) -> AbstractContextManager[None]:
        """Be the only holder of every key, for the length of a `with` block.

        Ask for all keys at once: they are taken in sorted order, so callers cannot wait for each
        other in a circle. A thread that asks for a key it holds gets a StoreError, for it would
        wait for itself. `on_wait` hears once per key who holds it; LeaseTimeoutError (with `key`
        and `holder`) when not all are taken within `timeout` seconds, and then none is.
        """
        wanted = {keys} if isinstance(keys, str) else set(keys)
        longest = self.timeout if timeout is None else timeout
        return self._hold_all(sorted(wanted), what, Patience(longest, on_wait))

    def try_hold(
        self, keys: Iterable[str], stack: contextlib.ExitStack, *, what: str = ""
    ) -> list[str]:
        """Hold those of some keys that nobody holds, until the stack is left; return them.

        Any thread may leave the stack.
        """
        wanted = dict.fromkeys(keys)
        if CAN_LOCK_BYTES:
            claims = _Claims(self.directory)
            stack.callback(claims.close)
            with contextlib.suppress(NotImplementedError):
                got = [key for key in wanted if claims.take(_offset(key))]
                held = set(os.listdir(self.directory)) - {_CLAIMS}
                for key in [key for key in got if held]:
                    path = self._path(key)
                    if path.name in held and _who_holds(path) is not None:
                        claims.give_back(_offset(key))
                        got.remove(key)
                return got
        got = []
        for key in wanted:
            with contextlib.suppress(LeaseTimeoutError):
                stack.enter_context(self.hold(key, what=what, timeout=0))
                got.append(key)
        return got

    def busy(self, key: str) -> str | None:
        """Return who holds a key, in words; None: nobody. It may have changed when you read it."""
        return _who_holds(self._path(key)) or self._who_claims(key)

    def wait(self, key: str, timeout: float) -> bool:
        """Wait until nobody holds a key, at most so many seconds; say whether it is so."""
        patience = Patience(timeout, None)
        seconds = _UNSPOKEN
        while self.busy(key) is not None:
            if not patience.pause(seconds):
                return False
            seconds = min(1.5 * seconds, _POLL)
        return True

    def _who_claims(self, key: str) -> str | None:
        """Return who has locked the byte of a key."""
        if not CAN_LOCK_BYTES:
            return None
        path = os.path.join(self.directory, _CLAIMS)
        try:
            descriptor = Descriptor(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise refusal(path, error) from error
        try:
            return _ANOTHER if is_byte_locked(descriptor.fd, _offset(key)) else None
        finally:
            descriptor.close()

    def _outwait_claims(self, key: str, patience: Patience) -> None:
        """Wait for whoever has the byte of a key; with its file held: nobody gets it after that."""
        seconds = _UNSPOKEN
        while (holder := self._who_claims(key)) is not None:
            if _table.claims.get((self.directory, _offset(key))) == threading.get_ident():
                raise _waits_for_itself(key)
            if not patience.pause(seconds):
                raise _timeout(key, holder, patience)
            patience.say(f"{_name(key)} is held by {holder}")
            seconds = min(1.5 * seconds, _POLL)

    @contextlib.contextmanager
    def _hold_all(self, keys: list[str], what: str, patience: Patience) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for key in keys:
                patience.start_next()
                stack.enter_context(self._hold_one(key, what, patience))
            yield

    @contextlib.contextmanager
    def _hold_one(self, key: str, what: str, patience: Patience) -> Iterator[None]:
        path = self._path(key)
        with _one_thread(path, key, patience):
            claim = wait_for_claim(path, patience, name=_name(key))
            if not isinstance(claim, Claim):
                raise _timeout(key, claim, patience)
            try:
                write_note(claim.fd, what, key=key)
                self._outwait_claims(key, patience)
                yield
            finally:
                claim.release()

    def _path(self, key: str) -> Path:
        # Keys may be file names, and those may be no valid text.
        digest = blake3(key.encode("utf-8", "surrogatepass")).hexdigest()
        return self.directory / digest[:_NAME_CHARACTERS]


class _Claims:
    """An open file of which bytes are locked: one for each key that is claimed with it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._descriptor = open_or_create(directory / _CLAIMS, make_directory=True)
        self._table = _table
        self._offsets: set[int] = set()

    def take(self, offset: int) -> bool:
        """Lock a byte; False: another open file has it."""
        is_free = try_lock_byte(self._descriptor.fd, offset)
        if is_free:
            self._offsets.add(offset)
            self._table.claims[self._directory, offset] = threading.get_ident()
        return is_free

    def give_back(self, offset: int) -> None:
        """Unlock a byte."""
        self._offsets.discard(offset)
        self._table.claims.pop((self._directory, offset), None)
        unlock_bytes(self._descriptor.fd, offset, 1)

    def close(self) -> None:
        """Unlock all. In a forked child: no effect."""
        if self._descriptor.is_ours:
            for offset in self._offsets:
                self._table.claims.pop((self._directory, offset), None)
            with contextlib.suppress(OSError):
                unlock_bytes(self._descriptor.fd)
            self._descriptor.close()


class _Turn:
    """A thread's right to go to the kernel for a key; the others wait for it to be `over`."""

    __slots__ = ("over", "thread")

    def __init__(self, guard: threading.Lock) -> None:
        self.thread = threading.get_ident()
        self.over = threading.Condition(guard)


class _Table:
    """Which thread of this process has its turn at which lease file."""

    def __init__(self) -> None:
        self.guard = threading.Lock()
        self.turns: dict[Path, _Turn] = {}
        self.claims: dict[tuple[Path, int], int] = {}
        """By directory and byte: the thread that has claimed it."""


_table = _Table()


def _empty_table() -> None:
    # Another thread may have held the guard of the old one at the moment of the fork.
    global _table  # noqa: PLW0603
    _table = _Table()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_empty_table)


@contextlib.contextmanager
def _one_thread(path: Path, key: str, patience: Patience) -> Iterator[None]:
    """Keep the other threads of this process away from a lease file."""
    table = _table
    turn = _Turn(table.guard)
    try:
        _wait_for_turn(table, turn, path, key, patience)
        yield
    finally:
        # In a forked child the turn is its parent's.
        if table is _table:
            with table.guard:
                if table.turns.get(path) is turn:
                    del table.turns[path]
                    turn.over.notify_all()


def _wait_for_turn(table: _Table, turn: _Turn, path: Path, key: str, patience: Patience) -> None:
    seconds = _UNSPOKEN
    while True:
        with table.guard:
            before = table.turns.setdefault(path, turn)
            if before is turn:
                return
            if before.thread == turn.thread:
                raise _waits_for_itself(key)
            remaining = patience.remaining
            if remaining is None or remaining > 0:
                before.over.wait(seconds if remaining is None else min(seconds, remaining))
            if table.turns.get(path) is not before:
                continue
        # The thread that has its turn may itself be waiting for another process.
        holder = _who_holds(path) or _ANOTHER_THREAD
        if remaining is not None and remaining <= 0:
            raise _timeout(key, holder, patience)
        patience.say(f"{_name(key)} is held by {holder}")
        seconds = _SLICE


def _who_holds(path: Path) -> str | None:
    text = os.fspath(path)
    try:
        descriptor = Descriptor(text)
    except FileNotFoundError:
        return None
    except StoreError:
        raise
    except OSError as error:
        raise refusal(text, error) from error
    try:
        if try_lock(descriptor.fd, exclusive=False):
            return None
        return holder_text(read_holder(descriptor.fd))
    finally:
        descriptor.close()


def _offset(key: str) -> int:
    """Return the byte that stands for a key; that of another one only by a chance of 1 in 2^62."""
    return int.from_bytes(blake3(key.encode("utf-8", "surrogatepass")).digest(8), "big") >> 2


def _waits_for_itself(key: str) -> StoreError:
    message = f"This thread already holds {_name(key)} and would wait for itself"
    return StoreError(message, key=key)


def _name(key: str) -> str:
    return f"the lease on {key!r}"


def _timeout(key: str, holder: str, patience: Patience) -> LeaseTimeoutError:
    message = f"Gave up after {patience.timeout:g} s: {_name(key)} is held by {holder}"
    return LeaseTimeoutError(message, key=key, holder=holder)
