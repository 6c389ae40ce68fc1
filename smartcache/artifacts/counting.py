"""What was written and has no row yet, and the thread that gives it one.

Rows are written in groups, a twentieth of a second after the first record, by a thread of its own
(`flusher`) while others go on putting; and after many records, or when somebody must know that all
is counted, by whoever comes to it.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from smartcache.artifacts.commit import KEY_OPS, ChunkOp, Op, commit
from smartcache.artifacts.flusher import flusher
from smartcache.artifacts.located import Located
from smartcache.artifacts.locating import Locating
from smartcache.artifacts.packs import PackFiles, PackWriter
from smartcache.artifacts.recovery import read_own
from smartcache.artifacts.seen import SeenSums
from smartcache.artifacts.setfolder import SetFolder
from smartcache.artifacts.setindex import SetIndex
from smartcache.errors import ArtifactError, SetFormatError
from smartcache.store.faults import reached

_GROUP = 1024
"""Artifacts whose rows are written by who puts the next one, if nobody else has."""
_GROUP_BYTES = 256 << 20
_LONGEST_SHARED = 0.5
"""Seconds after which the lock of the set is let go of although puts do not end: others may want it
for themselves, and get it then."""


@dataclass(slots=True)
class _Group:
    """Records of a pack, up to `end`, whose rows are being written."""

    writer: PackWriter
    end: int
    ops: list[Op]
    puts: int

    def commit(self, index: SetIndex) -> bool:
        """Write the rows; False: rows of what was written before are missing."""
        writer = self.writer
        return commit(index, writer.number, writer.committed, self.end, self.ops)


class Counting(Locating):
    """The records of an open set that have no row yet; for all threads of this process."""

    def __init__(self, folder: SetFolder, index: SetIndex, packs: PackFiles) -> None:
        super().__init__(index, packs)
        self.folder = folder
        self.path = folder.path
        self.seen = SeenSums(index)
        self.writer: PackWriter | None = None
        self.written_size = 0
        """Bytes that this process has written to the set."""
        self._is_open = True
        self.begin_again()

    def begin_again(self) -> None:
        """Have nothing: at first, and in the child of a fork, which has no writer and no lock."""
        self.mutex = threading.RLock()
        self._counted = threading.Condition(self.mutex)
        self._is_counting = False
        """The flusher is writing rows; nobody else may meanwhile. The mutex is free."""
        self.writer = None
        self._sharing: AbstractContextManager[None] | None = None
        self._shared_since = 0.0
        self._forget()

    def _forget(self) -> None:
        self._ops: list[Op] = []
        self._puts = 0
        self.pending = {}
        self.pending_chunks: dict[int, list[tuple[int, int]]] = {}
        """By checksum: (uid, size) of chunks that have no row yet."""

    @abstractmethod
    def seal(self) -> None:
        """End the pack that this process writes; with the rows of all its records written."""

    # with the mutex held

    def written(self, ops: Iterable[Op]) -> None:
        """Take note of records that are in the pack; their rows follow."""
        if not self._ops:
            flusher.soon(self)
        self._ops += ops
        self._puts += 1
        writer = self.writer
        size = 0 if writer is None else writer.end - writer.committed
        if self._puts >= _GROUP or size > self._group_bytes():
            self.flush()

    def _group_bytes(self) -> int:
        """Return what may be uncounted: little of a set with a bound, which is looked at then."""
        bound = self.folder.options.max_size
        return _GROUP_BYTES if bound is None else min(_GROUP_BYTES, bound >> 3)

    def calm(self) -> None:
        """Let go of the lock again after a write that failed, if nothing else needs it."""
        if not self._ops and not self._is_counting:
            self._stop_sharing()

    def flush(self) -> None:
        """Write the rows of all records, and when artifacts were last used.

        With the mutex held, it may be let go of for a moment before, and is not after that: when
        this returns, there are no records without rows.
        """
        with self.mutex:
            while self._is_counting:
                self._counted.wait()
            if self._ops:
                group = self._begin()
                try:
                    self._end(group, is_counted=group.commit(self.index))
                except BaseException:
                    self._put_back(group)
                    raise
            self._finish()

    def flush_behind(self) -> None:
        """Write the rows of all records that there are now, while others may add more."""
        with self.mutex:
            if self._is_counting:
                return
            if not self._ops:
                self._finish()
                return
            group = self._begin()
            self._is_counting = True
        try:
            is_counted = group.commit(self.index)
        except BaseException:
            with self.mutex:
                self._put_back(group)
            raise
        with self.mutex:
            try:
                self._end(group, is_counted=is_counted)
            except BaseException:
                self._put_back(group)
                raise
            if not self._ops:
                self._finish()
            elif time.monotonic() - self._shared_since > _LONGEST_SHARED:
                self.flush()

    def _begin(self) -> _Group:
        writer = self.writer
        if writer is None:
            raise ArtifactError("Records without a writer")
        group = _Group(writer, writer.end, self._ops, self._puts)
        self._ops, self._puts = [], 0
        return group

    def _end(self, group: _Group, *, is_counted: bool) -> None:
        """Take note of it that records have rows; with the mutex held."""
        writer = group.writer
        if not is_counted:
            # Rows were lost, by a rebuild or with the file: the pack has all there was.
            self._count_again(group)
        reached("set: rows written")
        self.commits += 1
        self.written_size += group.end - writer.committed
        writer.committed = group.end
        group.ops = []
        newer = {op.key for op in self._ops if type(op) in KEY_OPS}  # type: ignore[union-attr]
        kept: dict[bytes, Located | None] = {}
        for key, found in self.pending.items():
            if key in newer:
                kept[key] = found
            elif found is not None:
                # To be looked up once more: another process may have put something newer.
                self.memory.add(found)
            else:
                self.memory.forget(key)
        self.pending, self.pending_chunks = kept, {}
        for op in self._ops:
            if type(op) is ChunkOp:
                self.pending_chunks.setdefault(op.hash, []).append((op.uid, op.size))
        self._go_on()
        self.seen.look_again(writer.number)
        if writer.is_broken and not self._ops:
            self.seal()

    def _put_back(self, group: _Group) -> None:
        """Have a group of records that could not be counted counted with the next ones."""
        if group.ops:
            self._ops[:0] = group.ops
            self._puts += group.puts
            group.ops = []
        self._go_on()

    def _go_on(self) -> None:
        self._is_counting = False
        self._counted.notify_all()

    def _finish(self) -> None:
        """Write when artifacts were last used, and let go of the lock; all records have rows."""
        if self._touched and self._is_open:
            touched, self._touched = self._touched, {}
            with self.index.write():
                self.index.touch(list(touched), int(time.time()))
        self._stop_sharing()

    def _count_again(self, group: _Group) -> None:
        writer = group.writer
        try:
            pack = self.packs[writer.number]
        except (FileNotFoundError, SetFormatError) as error:
            # Somebody has removed the file: to keep what belongs to it would stop all writing.
            self.writer, group.ops = None, []
            self._forget()
            writer.close()
            message = f"A pack of {self.folder.name} was removed while it was written"
            hint = "What was put last is lost. Put it again."
            raise ArtifactError(message, hint=hint, path=self.path) from error
        read_own(self.index, pack, group.end)

    def _stop_sharing(self) -> None:
        sharing, self._sharing = self._sharing, None
        if sharing is not None:
            sharing.__exit__(None, None, None)
