"""One open set in this process: its index, its packs, its writer, and what is not yet counted.

A put is acknowledged when its records are in the pack. Their rows follow soon (`counting`), before
a fork, and at the end. Until then this process finds them in `pending`; if it is killed, whoever
opens the set next reads the tail of the pack. All `ArtifactSet` objects of one folder share one
engine.

While there are uncounted records the process shares the lock of the set: only who has it alone, at
the end of a compaction, may take chunks away, and then nobody is about to refer to one.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from smartcache.artifacts.counting import Counting
from smartcache.artifacts.flusher import flusher
from smartcache.artifacts.packs import PackFiles, PackWriter, new_writer, reopened_writer
from smartcache.artifacts.records import PACK_HEADER_BYTES
from smartcache.artifacts.recovery import read_tails, recover
from smartcache.artifacts.sequence import sequence_base
from smartcache.artifacts.setfolder import SetFolder
from smartcache.errors import ArtifactError, SmartcacheError
from smartcache.store.faults import reached
from smartcache.store.kernel import sync_directory
from smartcache.store.leases import Leases
from smartcache.store.locks import lock

_log = logging.getLogger(__name__)
PACK_BYTES = 1 << 30
"""A pack that has reached this size is sealed."""


class SetEngine(Counting):
    """Everything that an open set has, for all threads of this process."""

    def __init__(self, folder: SetFolder) -> None:
        self.set_id = bytes.fromhex(folder.id)
        self._stat = os.stat(folder.path)
        self.pack_bytes = PACK_BYTES
        super().__init__(folder, folder.open_index(), PackFiles(folder.path, self.set_id))
        self.leases = Leases(folder.path / "leases")
        self.readers: dict[int, bytes] = {}
        """The keys of open samples, by their identity: what they stand for is not evicted."""
        self.compact_again_at = 0.0
        """When compaction is tried again, by the monotonic clock."""
        self._sync_gate = threading.Lock()
        self._unsynced: set[int] = set()
        """Packs that this process has filled and that nobody has asked to be synced."""
        self._last_seq = 0
        self._users = 0
        if self.index.is_new and any(folder.pack_numbers()):
            recover(self.index, self.packs, folder)
        read_tails(self.index, self.packs, self.path)
        self._base = sequence_base(self.index)
        _engines.add(self)

    # writing; with the mutex held

    def next_seq(self) -> int:
        """Return a number higher than that of every record written before, by whomever."""
        self._last_seq = max(self._last_seq + 1, self._base + time.monotonic_ns())
        return self._last_seq

    def writer_for(self, size: int) -> PackWriter:
        """Return the writer of a pack with room for that many bytes more."""
        self._refuse_closed()
        if self._sharing is None:
            sharing = lock(self.path / "lock", exclusive=False, name=f"the set {self.folder.name}")
            sharing.__enter__()
            self._sharing, self._shared_since = sharing, time.monotonic()
            self._refuse_removed()
        writer = self.writer
        is_full = writer is not None and PACK_HEADER_BYTES < writer.end > self.pack_bytes - size
        if writer is not None and (is_full or writer.is_broken or writer.is_truncated):
            self.flush()
            if self.writer is writer:  # while it waited, another thread may have come first
                self.seal()
            return self.writer_for(size)
        if writer is None:
            writer = self.writer = self._new_writer(size)
        return writer

    def _new_writer(self, size: int) -> PackWriter:
        for pack in self.index.packs().values():
            if not pack.is_sealed and pack.watermark + size <= self.pack_bytes:
                writer = reopened_writer(self.path, self.index, pack.number, self.set_id)
                if writer is not None:
                    return writer
        return new_writer(self.path, self.index, self.set_id)

    def seal(self) -> None:
        """End the pack that this process writes; with the rows of all its records written."""
        writer = self.writer
        if writer is not None:
            self.index.seal(writer.number)
            self.writer = None
            reached("set: sealed")
            self._close(writer)

    def _close(self, writer: PackWriter) -> None:
        with self._sync_gate:
            if writer.is_durable:
                writer.sync()
            elif writer.synced < writer.end:
                self._unsynced.add(writer.number)
            writer.close()

    def sync(self, writer: PackWriter, end: int) -> None:
        """Return when what a writer wrote up to `end` survives power loss; many share one sync."""
        with self._sync_gate:
            if writer.synced >= end:
                return
            if writer.is_closed:  # another thread has filled the pack meanwhile
                self._sync_closed(writer.number)
            else:
                writer.is_durable = True
                writer.sync()

    def _sync_closed(self, number: int) -> None:
        """Bring a pack to the disk that this process has written and does not write any more."""
        with suppress(FileNotFoundError):  # compacted away: its copies were synced
            getattr(os, "fdatasync", os.fsync)(self.packs[number].fd)
            sync_directory(self.path)
        self._unsynced.discard(number)

    def sync_all(self) -> None:
        """Return when all that was put survives power loss."""
        with self.mutex:
            writer = self.writer
        if writer is not None:
            self.sync(writer, writer.end)
        with self._sync_gate:
            for number in list(self._unsynced):
                self._sync_closed(number)

    def touch(self, key: bytes) -> None:
        """Count an artifact as used now."""
        with self.mutex:
            self._touched[key] = None
            self.flush()

    def on_disk(self) -> int:
        """Return the bytes of all packs, dead records included."""
        return sum(pack.watermark for pack in self.index.packs().values())

    def is_over_bounds(self) -> bool:
        """Say whether the set holds more than it may, or what is past its time."""
        options = self.folder.options
        if options.max_size is not None and self.index.totals()[1] > options.max_size:
            return True
        return self.index.expired_count(int(time.time())) > 0

    # beginning and end

    def hold(self) -> None:
        """Count one more user."""
        self._users += 1

    def release(self) -> None:
        """Count one user less, with all written that it has put; the last one closes the set."""
        with _registry_gate:
            self._users -= 1
            if self._users <= 0 and self._is_open:
                _open_engines.pop(str(self.path), None)
                self.close()
        if self._is_open:
            self.flush()

    def release_later(self) -> None:
        """Count one user less, whatever locks this thread may hold."""
        flusher.later(self.release)

    def close(self) -> None:
        """Write what is to be written, and let go of everything."""
        with self.mutex:
            try:
                self.flush()
            finally:
                while self._is_counting:  # after Ctrl-C, too: its lock is needed so long
                    self._counted.wait()
                self._is_open = False
                # What could not be counted is in the pack: who opens the set next counts it.
                self._forget()
                self._stop_sharing()
                if self.writer is not None:
                    self._close(self.writer)
                    self.writer = None
                self.index.close()
                self.packs.close()

    def _refuse_closed(self) -> None:
        if not self._is_open:
            raise ArtifactError(f"The set {self.folder.name} was closed", hint="Open it again.")

    def _refuse_removed(self) -> None:
        """Refuse to write to files of a set that was removed, be it that there is a new one."""
        if not os.path.samestat(os.stat(self.path), self._stat):
            self._stop_sharing()
            message = f"The set {self.folder.name} was removed"
            raise ArtifactError(message, hint="Open it again.")

    def held_keys(self) -> Collection[bytes]:
        """Return the keys of artifacts that this process has open samples of."""
        return set(list(self.readers.values()))  # noqa: C414 - in one step: others come and go

    # forking

    def fork_begins(self) -> None:
        """Let nobody write until the fork is over, with nothing uncounted: the child sees all."""
        self.mutex.acquire()
        try:
            if self._is_open:
                self.flush()
        except (SmartcacheError, OSError) as error:
            _log.warning("%s: %s", self.path, error)

    def fork_is_over(self, *, in_child: bool) -> None:
        """Go on; a child has no writer, no lock and nothing to count."""
        self._layouts = {}  # the index is opened again, and may be another one
        if not in_child:
            self.mutex.release()
            return
        self._sync_gate = threading.Lock()
        self.begin_again()


_registry_gate = threading.RLock()
_open_engines: dict[str, SetEngine] = {}
_engines: weakref.WeakSet[SetEngine] = weakref.WeakSet()
_forking: list[SetEngine] = []


def open_engine(folder: SetFolder) -> SetEngine:
    """Return the engine of a folder, with one user more; all in this process share it."""
    with _registry_gate:
        found = _open_engines.get(str(folder.path))
        if found is None:
            found = _open_engines[str(folder.path)] = SetEngine(folder)
        found.folder = folder  # its options may be others now
        found.hold()
        return found


@contextmanager
def closed_here(path: Path) -> Iterator[None]:
    """Let a set be closed in this process, whoever uses it, and not opened for a while."""
    with _registry_gate:
        found = _open_engines.pop(str(path), None)
        if found is not None:
            found.close()
        yield


def flush_open(path: Path) -> None:
    """Let a set have no uncounted records in this process, if it is open here."""
    with _registry_gate:
        found = _open_engines.get(str(path))
    if found is not None:
        found.flush()


def _before_fork() -> None:
    _registry_gate.acquire()
    _forking.clear()
    for engine in list(_engines):
        _forking.append(engine)  # before: Ctrl-C may come in the middle, and the fork goes on
        engine.fork_begins()


def _after_fork(*, in_child: bool) -> None:
    global _registry_gate  # noqa: PLW0603 - another thread may have held it
    for engine in list(_engines) if in_child else _forking:
        engine.fork_is_over(in_child=in_child)
    _forking.clear()
    if in_child:
        _registry_gate = threading.RLock()
    else:
        _registry_gate.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=lambda: _after_fork(in_child=False),
        after_in_child=lambda: _after_fork(in_child=True),
    )
