"""One open set in this process: what it knows, its writer, and what is noted of uses.

A put is acknowledged when its record is in the pack that this process writes: then every process
finds it, also if this one is killed. All `ArtifactSet` objects of one folder share one engine. A
pack is made, and taken over, under the lock of the set; nothing else waits for it, and no reader
ever takes a lock.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np
from blake3 import blake3

from smartcache.artifacts.engine.catalog import Catalog, Pack, Place, Table
from smartcache.artifacts.engine.far import FAR, Far, FarPack
from smartcache.artifacts.engine.index import NAME, SetIndex, open_index
from smartcache.artifacts.engine.packs import (
    PACK_BYTES,
    SUFFIX,
    Column,
    Flags,
    LocalPack,
    PackSource,
    PackWriter,
    new_nonce,
    new_writer,
    taken_over,
)
from smartcache.artifacts.engine.records import (
    PACK_HEADER_BYTES,
    PackHeader,
)
from smartcache.artifacts.keys import key_text
from smartcache.artifacts.setfolder import FILE, SetFolder
from smartcache.errors import (
    ArtifactError,
    ArtifactNotFoundError,
    SmartcacheError,
    StoreUnwritableError,
)
from smartcache.system.faults import reached
from smartcache.system.filesystems import is_network
from smartcache.system.kernel import boot_id, sync_directory
from smartcache.system.locks import KeyLocks, store_lock

_log = logging.getLogger(__name__)
_TRIES = 20
"""How often artifacts are looked up anew that compaction moves away."""
_DELAY = 0.25
"""Seconds after which uses are written down."""
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Goes on while the machine sleeps: what is put after a week of that was not used a week ago."""
_HOUR = 3600
_NANO = 1_000_000_000
_MOST_NOTED = 1 << 16


class Engine:
    """Everything that an open set has, for all threads of this process."""

    def __init__(self, folder: SetFolder, *, read_only: bool = False) -> None:
        self.folder = folder
        self.path = folder.path
        self.read_only = read_only
        self.catalog = Catalog(
            folder.path, bytes.fromhex(folder.id), bytes.fromhex(folder.instance),
            read_only=read_only,
        )  # fmt: skip
        self.key_locks = KeyLocks(folder.path / "leases")
        self.far: Far | None = None
        """How packs that lie in tiers are read."""
        self.catalog.files.elsewhere = self._open_far
        self.pack_bytes = PACK_BYTES
        self.writer: PackWriter | None = None
        self.written_size = 0
        """Bytes that this process has written to the set."""
        self.churn = 0
        """The same, and eight times what it has deleted: how much there may be to be compacted."""
        self.hits = self.misses = 0
        self.probes = 0
        """Batches that are still to be asked for whether they are in memory: see `read`."""
        self.damage: set[int] = set()
        """Numbers of artifacts that this process has found damaged."""
        self.readers: dict[int, bytes] = {}
        """The keys of open samples, by their identity: what they stand for is not evicted."""
        self.look_at = 0
        """How much churn there is to be before the bounds are looked at again."""
        self.compact_again_at = 0.0
        """When compaction is tried again, by the monotonic clock."""
        self.unused_for = 0.0
        """Seconds from its last use after which an artifact is gone; 0: never."""
        self.step = _HOUR
        """Seconds to which uses are remembered."""
        self._own: Pack | None = None
        self._stat = os.stat(folder.path)
        self._index: SetIndex | None = None
        self._unsynced: set[str] = set()
        """Packs that this process has left and that nobody has asked to be synced."""
        self._base = 0
        self._last_seq = 0
        self._users = 0
        self._is_open = True
        self._told: os.stat_result | None = None
        """The set.json whose options are followed."""
        self.follow(folder)
        self.catalog.listed = self._follow_file
        self._begin_again()
        _engines.add(self)

    def _begin_again(self) -> None:
        """Have nothing: at first, and in the child of a fork, which has no writer."""
        self.mutex = threading.RLock()
        self._sync_gate = threading.Lock()
        self._index_gate = threading.Lock()
        self._flush_gate = threading.Lock()
        self._uses: dict[int, int] = {}
        """By key hash: uses that are not written down yet."""
        self._flushing: dict[int, int] = {}
        """Those that are being written down."""
        self._noted: dict[bytes, int] = {}
        """The hour in which a use was noted, of artifacts that are in no table."""

    def _open_far(self, name: str) -> FarPack:
        key_locks = None if self.read_only else self.key_locks
        return FarPack.open(self.path / f"{name}{FAR}", self.far, key_locks)

    def follow(self, folder: SetFolder) -> None:
        """Have the options that the set has now."""
        self.folder = folder
        unused_for = folder.options.unused_for
        if unused_for is None or self.read_only:  # who reads only, sees no uses
            self.catalog.is_unused = self.catalog.unused = None
            self.unused_for, self.step = 0.0, _HOUR
        else:
            self.unused_for = unused_for
            self.step = max(1, min(_HOUR, int(unused_for / 10)))
            self.catalog.is_unused, self.catalog.unused = self._is_unused, self._unused

    def _follow_file(self) -> None:
        """Have the options that another process has given the set."""
        with suppress(SmartcacheError, OSError):
            found = os.stat(self.path / FILE)
            told = self._told
            if told is None or (found.st_ino, found.st_mtime_ns) != (told.st_ino, told.st_mtime_ns):
                if not self.is_elsewhere():
                    self.follow(SetFolder.read(self.path, read_only=self.read_only))
                self._told = found

    @property
    def is_open(self) -> bool:
        """Whether nobody has closed it."""
        return self._is_open

    @property
    def name(self) -> str:
        """The name of the set."""
        return self.folder.name

    @property
    def index(self) -> SetIndex:
        """What is kept in SQLite; opened when it is first needed."""
        self.refuse_closed()
        if self._index is None:
            self.refuse_read_only()
            with self._index_gate:
                if self._index is None:
                    now = int(self.catalog.clock())
                    self._index = open_index(self.path, now, wal=not is_network(self.path))
        return self._index

    @property
    def has_index(self) -> bool:
        """Whether there is anything in SQLite; looking at a set makes no file."""
        return not self.read_only and (self.path / NAME).exists()

    def refuse_closed(self) -> None:
        """Refuse to use a set that was closed."""
        if not self._is_open:
            raise ArtifactError(f"The set {self.name} was closed", hint="Open it again.")

    def refuse_read_only(self) -> None:
        """Refuse to change a set that was opened for reading."""
        if self.read_only:
            message = f"The set {self.name} was opened for reading only"
            raise StoreUnwritableError(message, hint="Open it without read_only.", path=self.path)

    # finding

    def hold(self, keys: list[bytes]) -> list[tuple[Place, PackSource] | None]:
        """Say where artifacts lie, with their packs open; None: there is no such artifact.

        What is returned can be read whatever becomes of the set. This is the one place where
        something that compaction has moved away is looked up again.
        """
        catalog = self.catalog
        files = catalog.files
        for _ in range(_TRIES):
            self.refuse_closed()
            places = catalog.find_many(keys)
            try:
                packs = {place.pack for place in places if place is not None}
                sources = {pack: files[pack.name] for pack in packs}
            except FileNotFoundError as error:
                catalog.look_again(Path(error.filename).name)
                continue
            self._note_uses(keys, places)
            return [None if place is None else (place, sources[place.pack]) for place in places]
        raise self.vanishing()

    def hold_one(self, key: bytes) -> tuple[Place, PackSource] | None:
        """Say where an artifact lies, with its pack open."""
        if not self._is_open:
            self.refuse_closed()
        place = self.catalog.find(key)
        if place is None:
            self.misses += 1
            return None
        table = place.table
        try:
            source = self.catalog.files[place.pack.name]
        except FileNotFoundError:
            return self.hold([key])[0]
        if table is None or table.used.item(place.row) != int(self.catalog.clock()) // self.step:
            self._note_uses([key], [place])
        else:
            self.hits += 1
        return place, source

    def look(self, key: bytes) -> tuple[Place, PackSource] | None:
        """Say where an artifact lies, past its time or not; that does not count as a use."""
        for _ in range(_TRIES):
            place = self.catalog.find(key, expired=True)
            if place is None:
                return None
            try:
                return place, self.catalog.files[place.pack.name]
            except FileNotFoundError:
                self.catalog.look_again(place.pack.name)
        raise self.vanishing()

    def need(self, keys: list[bytes]) -> list[tuple[Place, PackSource]]:
        """Say where artifacts lie; ArtifactNotFoundError names those that are not there."""
        found = self.hold(keys)
        if None in found:
            raise self.missing([key for key, each in zip(keys, found, strict=True) if not each])
        return found  # type: ignore[return-value]

    def missing(self, keys: list[bytes]) -> ArtifactNotFoundError:
        """Return the error for artifacts that are not there."""
        names = [key_text(key) for key in keys]
        some = ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")  # noqa: PLR2004
        return ArtifactNotFoundError(f"{self.name} has no artifact {some}", keys=tuple(names))

    def vanishing(self) -> ArtifactError:
        """Return the error for artifacts that are moved again and again."""
        return ArtifactError(f"Packs of {self.name} vanish faster than they can be read")

    def held_keys(self) -> set[bytes]:
        """Return the keys of artifacts that this process has open samples of."""
        return set(list(self.readers.values()))  # noqa: C414 - in one step: others come and go

    # writing; with the mutex held

    def next_seq(self) -> int:
        """Return a number higher than that of every record written before, by whomever."""
        self._last_seq = max(self._last_seq + 1, self._base + time.clock_gettime_ns(_CLOCK))
        return self._last_seq

    def skip_seqs(self, count: int) -> None:
        """Leave out sequence numbers: they are those of a pack that is taken in."""
        self._last_seq = max(self._last_seq, self._base + time.clock_gettime_ns(_CLOCK)) + count

    def writer_for(self, size: int) -> PackWriter:
        """Return the writer of a pack with room for so many bytes more."""
        writer = self.writer
        if writer is not None:
            has_room = writer.end + size <= self.pack_bytes or writer.end == PACK_HEADER_BYTES
            state = writer.state
            if has_room and not writer.is_broken and not writer.is_full and not state:
                return writer
            self.leave_pack(sealed=not state and not writer.is_broken)
            if state == "gone":
                message = f"A pack of {self.name} was removed while it was written"
                hint = "What was put last is lost. Open the set and put it again."
                raise ArtifactError(message, hint=hint, path=self.path)
        self.refuse_closed()
        self.refuse_read_only()
        name = f"the set {self.name}"
        with store_lock(self.path / "lock", "making a pack", name=name):
            self._refuse_removed()
            writer = self.new_writer(size, is_fresh=False)
        self._own = self.catalog.own(writer.name)
        writer.tell = partial(self.catalog.wrote, self._own)
        self.writer = writer
        return writer

    @property
    def boot(self) -> bytes:
        """What tells this run of the machine from others."""
        return blake3(boot_id().encode()).digest(8)

    def is_left(self, pack: Pack) -> bool:
        """Say whether nobody will write to a pack any more: it is full, or of an earlier run."""
        return pack.is_sealed or pack.is_foreign or pack.header.boot != self.boot

    def new_writer(self, size: int, *, is_fresh: bool) -> PackWriter:
        """Become the writer of a pack that is left with room, or of a new one; under the lock."""
        catalog = self.catalog
        catalog.refresh()
        boot = self.boot
        packs = [pack for pack in catalog.known_packs() if not pack.is_foreign]
        bases = [pack.header.base for pack in packs if pack.header.boot == boot]
        highest = max(self._last_seq, catalog.max_seq())
        now = time.clock_gettime_ns(_CLOCK)
        # Sequence numbers are times: what was never read was last used when it was put. Whoever
        # writes meanwhile has the base that is there: so another one is higher by the least only.
        base = max(bases, default=int(catalog.clock() * 1e9) - now)
        self._base = max(base, highest + 1 - now)
        # As long as somebody writes with a base, there is a pack that says so: the writer's own.
        mine = [
            pack for pack in packs if (pack.header.boot, pack.header.base) == (boot, self._base)
        ]
        left = [pack for pack in mine if not (pack.is_sealed or pack.is_own or is_fresh)]
        for pack in sorted(left, key=lambda pack: -pack.seen):
            if pack.seen + size <= self.pack_bytes:
                writer = taken_over(self.path, pack.name, catalog.set_id, catalog.seed)
                if writer is not None:
                    return writer
        header = PackHeader(new_nonce(), self._base, catalog.set_id, catalog.instance, boot)
        return new_writer(self.path, header, catalog.seed)

    def write_layout(self, writer: PackWriter, body: bytes) -> int:
        """Write a layout, and return where it is in the pack."""
        offset = writer.layout(body)
        if self._own is not None:
            self._own.layouts[offset] = body
        return offset

    def written(self, size: int) -> None:
        """Count what is in the pack."""
        self.written_size += size
        self.churn += size

    def leave_pack(self, *, sealed: bool) -> None:
        """End the writing of a pack."""
        writer, own = self.writer, self._own
        self.writer = self._own = None
        if writer is None:
            return
        if own is not None:  # before others may write it: what they put is looked for from now on
            own.is_own = False
        try:
            with self._sync_gate:
                try:
                    writer.close(sealed=sealed, note=self.note_pack)
                except (SmartcacheError, OSError) as error:
                    # The footer is a help, and no more: what was put is in the pack.
                    _log.warning("%s: no footer was written: %s", writer.path, error)
                if writer.synced < writer.end:
                    self._unsynced.add(writer.name)
        finally:
            if own is not None:
                self.catalog.disown(own)
        reached("set: pack left")

    def note_pack(self, writer: PackWriter) -> None:
        """Write down what a pack has, so that a loss is noticed."""
        try:
            records = writer.listed + len(writer.entries)
            self.index.add_pack(writer.name, writer.records_end, records)
        except (SmartcacheError, OSError) as error:
            _log.debug("%s was not noted: %s", writer.path, error)

    def sync(self, writer: PackWriter, end: int) -> None:
        """Return when what a writer wrote up to `end` survives power loss; many share one sync."""
        with self._sync_gate:
            if writer.synced >= end:
                return
            if writer.is_closed:  # another thread has filled the pack meanwhile
                self.sync_left(writer.name)
            else:
                writer.is_durable = True
                writer.sync()

    def sync_left(self, name: str) -> None:
        """Bring a pack to the disk that this process does not write, or not any more."""
        with suppress(FileNotFoundError):  # compacted away: its copies were synced
            LocalPack(self.path / f"{name}{SUFFIX}").sync()
            sync_directory(self.path)
        self._unsynced.discard(name)

    def sync_all(self) -> None:
        """Return when all that was put survives power loss."""
        with self.mutex:
            writer = self.writer
        if writer is not None:
            self.sync(writer, writer.end)
        with self._sync_gate:
            for name in list(self._unsynced):
                self.sync_left(name)

    def is_elsewhere(self) -> bool:
        """Say whether its folder was removed or moved, be it that there is a new one."""
        try:
            return not os.path.samestat(os.stat(self.path), self._stat)
        except FileNotFoundError:
            return True

    def _refuse_removed(self) -> None:
        """Refuse to write to files of a set that was removed."""
        if not self.is_elsewhere():
            return
        raise ArtifactError(f"The set {self.name} was removed", hint="Open it again.")

    # uses

    def _note_uses(self, keys: list[bytes], places: list[Place | None]) -> None:
        """Remember that artifacts are used; it is written down soon."""
        table = places[0].table if places and places[0] is not None else None
        if table is not None and all(
            place is not None and place.table is table for place in places
        ):
            self.hits += len(places)
            self.note_rows(table, [place.row for place in places])  # type: ignore[union-attr]
            return
        now = int(self.catalog.clock())
        hour = now // self.step
        new: dict[int, int] = {}
        for key, place in zip(keys, places, strict=True):
            if place is None:
                self.misses += 1
                continue
            self.hits += 1
            table = place.table
            if table is not None:
                if table.used.item(place.row) != hour:
                    table.used[place.row] = hour
                    new[int(table.hash[place.row])] = now
            elif self._noted.get(key) != hour:
                if len(self._noted) > _MOST_NOTED:
                    self._noted = {}
                self._noted[key] = hour
                new[self.catalog.hashes(key)[0]] = now
        if new and not self.read_only:
            self._uses.update(new)
            background.soon(self)

    def note_rows(self, table: Table, rows: list[int]) -> None:
        """Remember that artifacts of a table are used."""
        now = int(self.catalog.clock())
        if not self.read_only and (table.used[rows] != now // self.step).any():
            table.used[rows] = now // self.step
            self._uses.update(dict.fromkeys(table.hash[rows].tolist(), now))
            background.soon(self)

    def touch(self, key: bytes) -> None:
        """Count an artifact as used now."""
        self.refuse_read_only()
        self.need([key])
        self.note_use(self.catalog.hashes(key)[0])
        self.flush()

    def note_use(self, hash_: int) -> None:
        """Remember that an artifact is used, by its key hash."""
        if not self.read_only:
            self._uses[hash_] = int(self.catalog.clock())
            background.soon(self)

    def used_at(self, table: Table) -> Column:
        """Return when each artifact of a snapshot was last used: read, or else put."""
        self.flush()
        times = (table.seq // np.uint64(_NANO)).astype(np.int64)
        # The numbers of a pack that was merely copied here are no times: it was used when it came.
        for pack in self.catalog.known_packs():
            if pack.is_foreign:
                is_mine = (table.place >> np.uint64(40)) == pack.number
                times[is_mine] = np.maximum(times[is_mine], self._came(pack))
        hashes, uses = self.index.uses() if self.has_index else (times[:0], times[:0])
        if len(hashes):
            at = np.minimum(np.searchsorted(hashes, table.hash), len(hashes) - 1)
            times = np.where(hashes[at] == table.hash, np.maximum(times, uses[at]), times)
        return times

    def _came(self, pack: Pack) -> int:
        try:
            suffix = FAR if pack.is_far else SUFFIX
            return int(os.stat(self.path / f"{pack.name}{suffix}").st_mtime)
        except OSError:
            return 0

    def _is_unused(self, hash_: int, place: Place) -> bool:
        """Say whether an artifact was not used for too long.

        Uses are noted in steps, and written down a little later: nothing goes before its time.
        """
        late = self.catalog.clock() - self.unused_for - self.step
        if place.seq // _NANO > late or (place.pack.is_foreign and self._came(place.pack) > late):
            return False
        # From what is noted last to what was written first: none is missed on its way.
        for noted in (self._uses, self._flushing):
            if noted.get(hash_, 0) > late:
                return False
        # Where the index was lost, and begins anew, nobody knows of earlier uses.
        return max(self.index.last_use(hash_), self.index.began_at) <= late

    def _unused(self, table: Table) -> Flags:
        known = np.maximum(self.used_at(table), self.index.began_at)
        found: Flags = known <= self.catalog.clock() - self.unused_for - self.step
        return found

    def flush(self) -> None:
        """Write down when artifacts were last used."""
        with self._flush_gate:
            while self._uses and self._is_open:
                uses = self._flushing = self._uses
                self._uses = {}
                try:
                    self.index.add_uses(uses)
                    self._flushing = {}
                except FileNotFoundError:
                    if self.path.exists():
                        raise
                    return  # the set was removed
                except BaseException:
                    self._uses = uses | self._uses
                    raise

    # beginning and end

    def release(self) -> None:
        """Count one user less; the last one closes the set."""
        with _registry_gate:
            self._users -= 1
            if self._users <= 0 and self._is_open:
                known = (str(self.path), self.read_only)
                if _open_engines.get(known) is self:
                    del _open_engines[known]
                self.close()

    def release_later(self) -> None:
        """Count one user less, whatever locks this thread may hold."""
        background.later(self.release)

    def close(self) -> None:
        """Write what is to be written, and let go of everything."""
        with self.mutex:
            try:
                self.flush()
            except (SmartcacheError, OSError) as error:
                _log.warning("%s: uses were not written down: %s", self.path, error)
            finally:
                self.leave_pack(sealed=False)
                with self._flush_gate:  # nobody writes uses down when this has returned
                    self._is_open = False
                    self._uses = {}
                    if self._index is not None:
                        self._index.close()
                        self._index = None
                self.catalog.close()

    def begin_in_child(self) -> None:
        """Go on in the child of a fork: the pack of the parent is that of another process."""
        self.catalog.gate = threading.RLock()
        for pack in self.catalog.packs:  # also that of a compaction in another thread
            if pack.is_own:
                pack.is_own = False
                self.catalog.disown(pack)
            if pack.is_far:  # another thread may have been in the middle of something
                self.catalog.files.forget(pack.name)
        self.writer = self._own = None
        self._unsynced = set()
        self._begin_again()


class Background:
    """The thread that writes uses down, and lets go of sets.

    One for all sets of a process, started when it is first needed and ended with the process.
    """

    def __init__(self) -> None:
        self._wakes = threading.Condition()
        self._waiting: weakref.WeakSet[Engine] = weakref.WeakSet()
        self._acts: list[Callable[[], None]] = []
        self._thread: threading.Thread | None = None
        self._is_registered = False

    def soon(self, engine: Engine) -> None:
        """Have the uses of a set written down soon; a first one alone, at the end.

        Many processes read one artifact and end: a thread would take them as long as that. Where
        artifacts go that are not used, others must hear of each use.
        """
        is_first = engine not in self._waiting and not engine.unused_for
        if not is_first and self._thread is not None:
            return
        with self._wakes:
            self._waiting.add(engine)
            if is_first and self._thread is None:
                self._flush_at_exit()
            else:
                self._wake()

    def later(self, act: Callable[[], None]) -> None:
        """Have something done that may wait for locks, by a thread that has none.

        For what the garbage collector calls: it does so in whatever thread it runs.
        """
        with self._wakes:
            self._acts.append(act)
            self._wake()

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="smartcache-background", daemon=True
            )
            try:
                self._thread.start()
            except RuntimeError:  # the interpreter ends: `flush` is called at its exit
                self._thread = None
                return
            self._flush_at_exit()
        self._wakes.notify()

    def _flush_at_exit(self) -> None:
        """Flush also in a worker process of multiprocessing, which ends without `atexit`."""
        util = sys.modules.get("multiprocessing.util")
        if util is not None and not self._is_registered:
            self._is_registered = True
            util.Finalize(None, self.flush, exitpriority=0)

    def flush(self) -> None:
        """Do all of it now."""
        with self._wakes:
            waiting = list(self._waiting)
            self._waiting.clear()
            acts, self._acts = self._acts, []
        for act in (*acts, *(engine.flush for engine in waiting)):
            try:
                act()
            except (SmartcacheError, OSError) as error:
                _log.warning("Uses of artifacts were not written down: %s", error)

    def _run(self) -> None:
        while True:
            with self._wakes:
                while not self._waiting and not self._acts:
                    self._wakes.wait()
            time.sleep(_DELAY)
            self.flush()


background = Background()
_registry_gate = threading.RLock()
_open_engines: dict[tuple[str, bool], Engine] = {}
_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
_forking: list[threading.RLock] = []
"""What is held during a fork, so that nobody is in the middle of something."""


def open_engine(
    folder: SetFolder,
    *,
    read_only: bool = False,
    clock: Callable[[], float] | None = None,
    far: Far | None = None,
) -> Engine:
    """Return the engine of a folder, with one user more; all in this process share it.

    `clock` is from then on the clock of all of them.
    """
    with _registry_gate:
        known = (str(folder.path), read_only)
        found = _open_engines.get(known)
        if found is None or found.is_elsewhere():  # those who have that one open may keep it
            found = _open_engines[known] = Engine(folder, read_only=read_only)
        found.follow(folder)  # its options may be others now
        if clock is not None:
            found.catalog.clock = clock
        if far is not None:
            found.far = far
        found._users += 1  # noqa: SLF001
        if found.unused_for and not found.has_index:
            with suppress(SmartcacheError, OSError):
                found.index  # noqa: B018 - what has no index was used when it began
        return found


@contextmanager
def engine_of(
    path: Path, *, clock: Callable[[], float] | None = None, far: Far | None = None
) -> Iterator[Engine]:
    """Have the set of a folder open for the length of a block."""
    engine = open_engine(SetFolder.read(path), clock=clock, far=far)
    try:
        yield engine
    finally:
        engine.release()


@contextmanager
def closed_here(path: Path) -> Iterator[None]:
    """Let a set be closed in this process, whoever uses it, and not opened for a while."""
    with _registry_gate:
        for read_only in (False, True):
            found = _open_engines.pop((str(path), read_only), None)
            if found is not None:
                found.close()
        yield


def _before_fork() -> None:
    _registry_gate.acquire()
    _forking.clear()
    for engine in list(_engines):
        for gate in (engine.mutex, engine.catalog.gate):
            _forking.append(gate)  # before: Ctrl-C may come in the middle, and the fork goes on
            gate.acquire()


def _after_fork(*, in_child: bool) -> None:
    global _registry_gate  # noqa: PLW0603 - another thread may have held it
    if in_child:
        for engine in list(_engines):
            engine.begin_in_child()
        _registry_gate = threading.RLock()
        background.__init__()  # type: ignore[misc]  # the same object: others have it
    else:
        for gate in _forking:
            with suppress(RuntimeError):
                gate.release()
        _registry_gate.release()
    _forking.clear()


atexit.register(background.flush)
os.register_at_fork(
    before=_before_fork,
    after_in_parent=lambda: _after_fork(in_child=False),
    after_in_child=lambda: _after_fork(in_child=True),
)

__all__ = ["Engine", "background", "closed_here", "engine_of", "open_engine"]
