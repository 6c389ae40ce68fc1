"""Give space back: evict what goes first, copy what is wanted of a pack, unlink the pack.

Nothing that is wanted is ever in one place only: copies have the sequence numbers of the originals,
and are on the disk before the original is unlinked. So a compaction that is killed has done no
harm, and left at most a copy more. Packs are done one after the other, so that the room of one is
free before the next is copied. Whoever reads an old pack has it open, and keeps it.

A deletion is dropped only when no other pack has a record of its key.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import numpy as np

from smartcache.artifacts.engine import write
from smartcache.artifacts.engine.catalog import Pack, Table, is_of
from smartcache.artifacts.engine.engine import Engine
from smartcache.artifacts.engine.far import detach, kept_size
from smartcache.artifacts.engine.packs import (
    SUFFIX,
    Column,
    Flags,
    PackSource,
    PackWriter,
    Rows,
    read_state,
)
from smartcache.artifacts.engine.records import (
    ARTIFACT,
    BODY_AT,
    DELETE,
    HEADER_BYTES,
    INTAKE,
    LOST,
    PACK_HEADER_BYTES,
    PIN,
    UNPIN,
    Entry,
    artifact_meta,
    entry_of,
    key_hashes,
    padded,
    padding,
    parse_meta,
    plain_record,
    small_entry,
)
from smartcache.artifacts.keys import key_text
from smartcache.artifacts.values.layout import known_layout
from smartcache.errors import DamagedArtifactError, LayoutError, SetFormatError, SmartcacheError
from smartcache.progress import Progress, silent
from smartcache.system.faults import reached
from smartcache.system.kernel import allocated_bytes, sync_directory
from smartcache.system.locks import Claim, claim, is_free, store_lock

_log = logging.getLogger(__name__)
COMPACTING = "\0compact"
"""The key that whoever compacts holds."""
_SMALL = 8
"""Packs below an eighth of the full size are joined when there are as many as this."""
_PATIENCE = 20.0
_LEAVES = 0.9
"""Of the bound: evicting a little more than needed is done less often."""
_SWOLLEN = 0.25
"""Of the bound: so much dead records may take before they are compacted away."""
_MUCH = 0.1
"""Of a pack that is dead, where the set is swollen."""
_LEAST = 1 << 20
"""Dead bytes below which a set is not compacted unasked."""
_PAUSE = 300.0
"""Seconds after which a compaction is tried again that could not be done."""
_NO_BOUND = 1 << 60
_PIECE = 8 << 20
_PACK_SHIFT = np.uint64(40)

Reason = Literal["expired", "unused", "over size"]


# what is dead


class Use(NamedTuple):
    """How much of a pack is wanted."""

    pack: Pack
    size: int
    live: int
    """Bytes of artifacts that are wanted, with tensors that they share."""
    dead: int
    artifacts: int
    saved: int
    """What the artifacts would take more if equal tensors were not kept once."""


def uses_of(engine: Engine) -> list[Use]:
    """Say of each pack how much of it is wanted."""
    catalog = engine.catalog
    table = catalog.snapshot()
    rows: dict[int, list[Rows]] = {}
    sizes: dict[int, tuple[int, int]] = {}
    packs = catalog.known_packs()
    for pack in packs:
        with suppress(FileNotFoundError, SetFormatError):
            source = catalog.files[pack.name]
            size = source.size
            rows[pack.number], overhead = _rows_and_overhead(engine, pack, source)
            sizes[pack.number] = size, overhead
    numbers = (table.place >> _PACK_SHIFT).astype(np.int64)
    is_artifact = table.kind == ARTIFACT
    is_wanted = is_artifact | _matters(engine, table, numbers, rows)
    lengths = table.size.astype(np.int64) << 6
    most = len(catalog.packs)
    counts = np.bincount(numbers[is_artifact], minlength=most)
    live = np.bincount(numbers[is_artifact], lengths[is_artifact], most)
    notes = np.bincount(numbers[is_wanted & ~is_artifact], lengths[is_wanted & ~is_artifact], most)
    found = []
    for pack in packs:
        if pack.number in sizes:
            number = pack.number
            size, overhead = sizes[number]
            shared, saved = _shared(pack, rows[number], table, is_artifact & (numbers == number))
            kept = int(live[number]) + shared
            dead = max(0, size - overhead - kept - int(notes[number]))
            if pack.is_far:  # of which this disk has some chunks, and none of them is dead
                size, dead = kept_size(catalog.files[pack.name]), 0
            found.append(Use(pack, size, kept, dead, int(counts[number]), saved))
    return found


def _matters(engine: Engine, table: Table, numbers: Column, rows: dict[int, list[Rows]]) -> Flags:
    """Say of each row whether it is a deletion of which another pack has an artifact."""
    result: Flags = table.kind == DELETE
    if not result.any():
        return result
    here: list[Column] = [np.zeros(0, np.uint64)]
    owners: list[Column] = [np.zeros(0, np.int64)]
    for pack in engine.catalog.known_packs():
        some = [each.hash[each.kind == ARTIFACT] for each in rows.get(pack.number, ())]
        tail = [entry.hash for entry in list(pack.newest.values()) if entry.kind == ARTIFACT]
        some.append(np.array(tail, np.uint64))
        mine = np.unique(np.concatenate(some))
        here.append(mine)
        owners.append(np.full(len(mine), pack.number))
    hashes, holders = np.concatenate(here), np.concatenate(owners)
    order = np.argsort(hashes)
    hashes, holders = hashes[order], holders[order]
    first, last = hashes.searchsorted(table.hash), hashes.searchsorted(table.hash, "right")
    for row in np.flatnonzero(result).tolist():
        others = holders[first[row] : last[row]]
        result[row] = bool((others != numbers[row]).any())
    return result


def _rows_and_overhead(engine: Engine, pack: Pack, source: PackSource) -> tuple[list[Rows], int]:
    """Return the footers of a pack, and what it takes besides artifacts and deletions."""
    state = read_state(source, pack.name, engine.catalog.set_id)
    rows = engine.catalog.rows_on_disk(pack)
    overhead = PACK_HEADER_BYTES + state.footer_bytes
    overhead += sum(padded(BODY_AT + len(body)) for body in list(pack.layouts.values()))
    notes = {entry.offset: entry.size for entry in (*pack.pins.values(), *pack.intakes.values())}
    for each in rows:
        is_note = (each.kind == PIN) | (each.kind == UNPIN) | (each.kind == INTAKE)
        sizes = each.size[is_note].astype(np.int64) << 6
        notes.update(zip(each.offset[is_note].tolist(), sizes.tolist(), strict=True))
    return rows, overhead + sum(notes.values())


def _shared(pack: Pack, rows: list[Rows], table: Table, is_wanted: Flags) -> tuple[int, int]:
    """Return the bytes of tensors that wanted artifacts point to in records that are not.

    The second number is what they would take more without pointers.
    """
    pointers = _pointers(pack, rows)
    if not pointers:
        return 0, 0
    offsets = (table.place[is_wanted] & np.uint64((1 << 40) - 1)) << np.uint64(6)
    order = np.argsort(offsets)
    starts = offsets[order]
    ends = starts + (table.size[is_wanted].astype(np.uint64) << np.uint64(6))[order]
    wanted = set(starts.tolist())
    pointers = {pointer for pointer in pointers if pointer[0] in wanted}
    shared = 0
    for target, size in {pointer[1:] for pointer in pointers}:
        at = int(starts.searchsorted(np.uint64(target), "right")) - 1
        if at < 0 or target >= ends[at]:
            shared += padded(size)
    return shared, sum(padded(size) for _, _, size in pointers) - shared


def _pointers(pack: Pack, rows: list[Rows]) -> set[tuple[int, int, int]]:
    """Return where records are, where a tensor is that each points to, and how long that is."""
    found = {
        (entry.offset, target, size)
        for entry in list(pack.newest.values())
        for target, size in entry.pointers
    }
    for each in rows:
        if len(each.pointer_row):
            offsets = each.offset[each.pointer_row].tolist()
            targets, sizes = each.pointer_target.tolist(), each.pointer_size.tolist()
            found.update(zip(offsets, targets, sizes, strict=True))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactResult:
    """What a compaction has done."""

    packs: int = 0
    """Packs that are gone."""
    copied: int = 0
    """Bytes that were written anew."""
    freed: int = 0
    """Bytes that the filesystem has given back, less those that the copies take."""


def worth_compacting(engine: Engine, *, force: bool = False, share: float = 0.5) -> list[Use]:
    """Return the packs of which more than a share is dead; with `force` all with anything dead.

    Packs that another process writes to are left alone.
    """
    chosen, small = [], []
    for use in uses_of(engine):
        if use.pack.is_far:
            continue
        room = use.size - PACK_HEADER_BYTES
        if use.dead and (force or use.dead > share * room):
            chosen.append(use)
        elif engine.is_left(use.pack) and _SMALL * use.size < engine.pack_bytes:
            small.append(use)
    if len(small) >= _SMALL:
        chosen += small
    return [
        use
        for use in chosen
        if use.pack.is_own or is_free(engine.path / f"{use.pack.name}{SUFFIX}")
    ]


# copying


def compact(
    engine: Engine, *, force: bool = False, share: float = 0.5, progress: Progress = silent
) -> CompactResult:
    """Compact what is worth it; one process at a time does so."""
    engine.refuse_read_only()
    with engine.key_locks.hold(COMPACTING, what="compacting"):
        copying = _Copying(engine)
        gone = freed = 0
        try:
            # The second time for deletions of what is gone now.
            for _ in range(1 + force):
                chosen = worth_compacting(engine, force=force, share=share)
                if not chosen:
                    break
                with engine.mutex:
                    if any(use.pack.is_own for use in chosen):
                        engine.leave_pack(sealed=False)
                with progress("Compacting", sum(use.live for use in chosen), "bytes") as job:
                    for use in sorted(chosen, key=lambda use: use.pack.max_seq):
                        size = copying.move(use.pack, job.advance)
                        if size is not None:
                            gone, freed = gone + 1, freed + size
        finally:
            copying.close()
        if gone:
            with suppress(SmartcacheError, OSError):
                table = engine.catalog.snapshot()
                engine.index.keep_uses(table.hash[table.kind == ARTIFACT])
        return CompactResult(
            packs=gone, copied=copying.written, freed=max(0, freed - copying.taken)
        )


def copy_packs(engine: Engine, packs: list[Pack]) -> None:
    """Copy packs into sealed ones of this folder; for one who holds the key COMPACTING."""
    copying = _Copying(engine)
    try:
        for pack in packs:
            copying.move(pack, lambda _: None)
    finally:
        copying.close()


class _Copying:
    """Records on their way from old packs to new ones."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.catalog = engine.catalog
        self.writer: PackWriter | None = None
        self.own: Pack | None = None
        self.written = 0
        self.taken = 0
        """Bytes on the disk of the packs that were made."""
        self._pieces: list[bytes | memoryview] = []
        self._size = 0
        self._entries: list[Entry] = []
        self._synced: dict[Pack, int] = {}
        """Packs of others that were synced, and how long they were."""
        self._moved: dict[int, int] = {}
        """Where tensors of the pack at hand are in the new one."""

    def move(self, pack: Pack, advance: Callable[[int], None]) -> int | None:
        """Copy what is wanted of a pack and unlink it; return what is free now, None: not done."""
        path = self.engine.path / f"{pack.name}{SUFFIX}"
        claimed = claim(path)
        if claimed is None:
            return None
        try:
            if os.fstat(claimed.fd).st_size < PACK_HEADER_BYTES:  # it was gone, and is made anew
                claimed.release()
                return None
            return self._move(pack, claimed, advance)
        finally:
            claimed.release(remove=False)

    def _move(self, pack: Pack, claimed: Claim, advance: Callable[[int], None]) -> int | None:
        engine, catalog = self.engine, self.catalog
        table = catalog.snapshot()
        if pack.is_gone:
            return None
        try:
            source = catalog.files[pack.name]
        except (FileNotFoundError, SetFormatError):
            return None
        self._moved = {}
        for key, entry, seq in self._wanted(pack, table):
            before = self.written
            self._copy(pack, source, key, entry, seq)
            advance(self.written - before)
        self._flush()
        reached("compact: copied")
        if self.writer is not None:
            self.writer.sync()
        # What is left behind was replaced: by something that must survive power loss, as it did.
        for other in catalog.known_packs():
            if not other.is_sealed and other is not pack and self._synced.get(other) != other.seen:
                engine.sync_left(other.name)
                self._synced[other] = other.seen
        name = f"the set {engine.name}"
        path = engine.path / "lock"
        with store_lock(path, "compacting", timeout=_PATIENCE, name=name):
            # What was put meanwhile is in other packs; nobody can have written to this one.
            catalog.refresh()
            size = allocated_bytes(os.fstat(claimed.fd))
            with suppress(SmartcacheError, OSError):  # first: what is gone must not be missed
                engine.index.drop_packs([pack.name])
            reached("compact: before unlink")
            detach(engine.path, pack.name)  # who pulled it was killed before he could
            os.unlink(engine.path / f"{pack.name}{SUFFIX}")
            sync_directory(engine.path)
            reached("compact: unlinked")
        catalog.refresh()
        return size

    def _wanted(self, pack: Pack, table: Table) -> Iterator[tuple[bytes, Entry, int]]:
        """Go through the records of a pack that are wanted, in order, with their numbers."""
        number = np.uint64(pack.number)
        rows = np.flatnonzero((table.place >> _PACK_SHIFT) == number)
        places = {int(table.place[row]) & ((1 << 40) - 1): row for row in rows.tolist()}
        entries = [*pack.newest.values(), *pack.pins.values(), *pack.intakes.values()]
        lost = dict(pack.lost)
        for entry in self.catalog.entries_on_disk(pack):
            entries.append(entry)
            if entry.kind == LOST:
                lost[entry.hash] = max(entry.seq, lost.get(entry.hash, 0))
        seen: set[int] = set()
        others = _Others(self.engine, pack)
        for entry in sorted(entries, key=lambda entry: entry.offset):
            if entry.offset in seen:
                continue
            seen.add(entry.offset)
            row = places.get(entry.offset >> 6)
            if (entry.kind == ARTIFACT and row is not None and table.kind[row] == ARTIFACT) or (
                entry.kind == DELETE and row is not None and others.has(entry)
            ):
                yield entry.key, entry, int(table.seq[row])
            elif self._is_note_wanted(entry, others):
                yield entry.key, entry, entry.seq
        # A damaged record has replaced something: that must not return.
        for hash_, seq in lost.items():
            yield from (
                (key, old._replace(kind=DELETE), seq) for key, old in others.older(hash_, seq)
            )

    def _is_note_wanted(self, entry: Entry, others: _Others) -> bool:
        """Say whether a pin, its end or an intake still means something."""
        if entry.kind in (PIN, UNPIN):
            is_needed = entry.kind == PIN or others.has_pins
            return is_needed and entry.seq >= self.catalog.last_pin(entry.key)[0]
        return entry.kind == INTAKE and entry.hash in others.nonces

    def _copy(self, pack: Pack, source: PackSource, key: bytes, entry: Entry, seq: int) -> None:
        if entry.kind == ARTIFACT:
            try:
                self._copy_artifact(pack, source, entry, seq)
            except (DamagedArtifactError, LayoutError) as error:
                _log.warning(
                    "Artifact %s of %s is damaged: %s", key_text(key), self.engine.name, error
                )
                # Whatever it has replaced must not return.
                self._copy_state(entry._replace(kind=DELETE), seq + 1)
        else:
            self._copy_state(entry, seq)

    def _copy_state(self, entry: Entry, seq: int) -> None:
        inline = entry.hash.to_bytes(8, "little") if entry.kind == INTAKE else b""
        writer = self._room(padded(HEADER_BYTES + 8 + len(entry.key) + len(inline)))
        offset = writer.end + self._size
        record = plain_record(
            writer.nonce, offset, entry.kind, key=entry.key, hash_=entry.hash, seq=seq,
            inline=inline,
        )  # fmt: skip
        self._add([record], len(record), entry._replace(
            seq=seq, offset=offset, size=len(record), meta=len(record), layout=0, expires=0,
            is_plain=False, pointers=(),
        ))  # fmt: skip

    def _copy_artifact(self, pack: Pack, source: PackSource, entry: Entry, seq: int) -> None:
        data = source.bytes_at(entry.offset, entry.meta)
        meta = parse_meta(data, pack.nonce, entry.offset)
        head = meta.head
        said = (ARTIFACT, entry.size, entry.meta, entry.key)
        if (head.kind, head.size, head.meta, meta.key) != said or not is_of(pack, head, entry.seq):
            raise DamagedArtifactError("its record is not the one that was written")
        entry_of(meta, 0, entry.offset)
        body = self.catalog.layout_body(pack, meta.head.layout << 6)
        known_layout(body)
        writer = self._room(entry.size + sum(size for _, size in entry.pointers) + len(body) + 4096)
        layout = writer.layouts.get(body)
        if layout is None:
            self._flush()
            layout = writer.layout(body)
            self.own.layouts[layout] = body  # type: ignore[union-attr]
        start = writer.end + self._size
        offset = entry.meta
        parts: list[int] = []
        pieces: list[bytes | memoryview] = [b""]
        pointers: list[tuple[int, int]] = []
        new: dict[int, int] = {}
        is_plain = True
        for number in range(meta.head.parts):
            part = meta.part(number)
            where = entry.offset + part.offset
            known = self._moved.get(where, new.get(where))
            if known is not None:
                parts += (known - start, *part[1:])
                is_plain = False
                if known < start:
                    pointers.append((known, part.stored))
                continue
            buffer = bytearray(part.stored)
            source.read(where, [buffer], part.stored)
            parts += (offset, *part[1:])
            new[where] = start + offset
            pieces += (memoryview(buffer), padding(part.stored))
            offset += padded(part.stored)
            is_plain = is_plain and not part.method
        hash_, twin = key_hashes(meta.key, self.catalog.seed)
        pieces[0] = artifact_meta(
            writer.nonce, start, parts, meta.key, bytes(meta.inline), bytes(meta.metadata),
            flags=head.flags, layout=layout, expires=head.expires, created=head.created,
            size=offset, seq=seq, hash_=hash_,
        )  # fmt: skip
        self._moved.update(new)
        self._add(pieces, offset, Entry(
            ARTIFACT, hash_, twin, seq, start, offset, entry.meta, layout, head.expires, is_plain,
            meta.key, tuple(pointers),
        ))  # fmt: skip

    def _room(self, size: int) -> PackWriter:
        """Return the writer of a new pack that has room."""
        writer = self.writer
        if writer is not None:
            end = writer.end + self._size
            has_room = end + size <= self.engine.pack_bytes or end == PACK_HEADER_BYTES
            if has_room and len(writer.entries) + len(self._entries) < 1 << 16:
                return writer
            self.close()
        engine = self.engine
        name = f"the set {engine.name}"
        path = engine.path / "lock"
        with (
            engine.mutex,  # before the lock: so does everybody who puts
            store_lock(path, "compacting", timeout=_PATIENCE, name=name),
        ):
            writer = engine.new_writer(size, is_fresh=True)
        self.writer = writer
        self.own = self.catalog.own(writer.name)
        writer.tell = partial(self.catalog.wrote, self.own)
        self._moved = {}
        return writer

    def _add(self, pieces: list[bytes | memoryview], size: int, entry: Entry) -> None:
        self._pieces += pieces
        self._size += size
        self.written += size
        self._entries.append(entry)
        if self._size >= _PIECE:
            self._flush()

    def _flush(self) -> None:
        writer = self.writer
        if writer is None or not self._size:
            return
        pieces, self._pieces = self._pieces, []
        entries, self._entries = self._entries, []
        size, self._size = self._size, 0
        writer.write(pieces, size, entries)

    def close(self) -> None:
        """Seal the new pack."""
        writer, own = self.writer, self.own
        if writer is None or own is None:
            return
        try:
            self._flush()
        finally:
            self.writer = self.own = None
            own.is_own = False  # as in `leave_pack`
            try:
                writer.close(sealed=True, note=self.engine.note_pack)
            finally:
                self.catalog.disown(own)
            with suppress(FileNotFoundError):
                self.taken += allocated_bytes(os.stat(writer.path))


class _Others:
    """What packs besides one have: of a key that was deleted there, for instance."""

    def __init__(self, engine: Engine, pack: Pack) -> None:
        self._rows: list[tuple[Rows, Column]] = []
        self._tails: list[dict[bytes, Entry]] = []
        """As they are now: one that is sealed meanwhile gets a new, empty tail."""
        self.nonces: set[int] = set()
        self.has_pins = False
        for other in engine.catalog.known_packs():
            if other is pack:
                continue
            self.nonces.add(other.nonce)
            self._tails.append(other.newest)
            self.has_pins = self.has_pins or bool(other.pins)
            with suppress(FileNotFoundError, SetFormatError):
                for rows in engine.catalog.rows_on_disk(other):
                    self._rows.append((rows, engine.catalog.ranks(other, rows)))
                    kinds = rows.kind
                    self.has_pins = self.has_pins or bool(((kinds == PIN) | (kinds == UNPIN)).any())

    def has(self, entry: Entry) -> bool:
        """Say whether there is any other record of a key."""
        for rows, _ in self._rows:
            at = int(np.searchsorted(rows.hash, np.uint64(entry.hash)))
            while at < len(rows.hash) and int(rows.hash[at]) == entry.hash:
                if int(rows.kind[at]) == ARTIFACT:
                    return True
                at += 1
        return any(
            (known := tail.get(entry.key)) is not None and known.kind == ARTIFACT
            for tail in self._tails
        )

    def older(self, hash_: int, seq: int) -> Iterator[tuple[bytes, Entry]]:
        """Go through records of a key hash with a lower number."""
        for rows, ranks in self._rows:
            at = int(np.searchsorted(rows.hash, np.uint64(hash_)))
            while at < len(rows.hash) and int(rows.hash[at]) == hash_:
                if int(rows.kind[at]) == ARTIFACT and int(ranks[at]) < seq:
                    key = rows.key(at)
                    yield key, small_entry(DELETE, hash_, int(rows.twin[at]), seq, 0, 0, key)
                at += 1
        for tail in self._tails:
            for key, entry in list(tail.items()):
                if entry.hash == hash_ and entry.seq < seq and entry.kind == ARTIFACT:
                    yield key, entry


# bounds


class Victim(NamedTuple):
    """An artifact that would go."""

    key: bytes
    seq: int
    size: int
    used_at: int
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """What was evicted."""

    artifacts: int = 0
    size: int = 0


def victims(engine: Engine, *, free: int = 0, unused_since: int | None = None) -> Iterator[Victim]:
    """Choose what goes: what is past its time, what was not used since, then until `free` bytes.

    Never pinned artifacts, those that somebody is computing (a locked key), nor those that this
    process has an open sample of.
    """
    catalog = engine.catalog
    table = catalog.snapshot()
    # What lies in a tier takes no room here that would come back.
    is_artifact = (table.kind == ARTIFACT) & ~catalog.is_far(table)
    times = engine.used_at(table)
    late = np.flatnonzero(is_artifact & ~catalog.is_live(table))
    chosen = late
    if engine.folder.options.evictable and (free or unused_since is not None):
        rest = np.flatnonzero(is_artifact & catalog.is_live(table))
        chosen = np.concatenate((late, rest[np.lexsort((table.seq[rest], times[rest]))]))
    keep = engine.held_keys()
    freed = 0
    expired = set(late.tolist())
    for start in range(0, len(chosen), 4096):
        rows = chosen[start : start + 4096].tolist()
        keys = dict(catalog.keys_of(table, rows))
        for row in rows:
            used = int(times[row])
            is_unused = unused_since is not None and used < unused_since
            if row not in expired and not is_unused and freed >= free:
                return
            key = keys.get(row)
            if (
                key is None
                or key in keep
                or engine.key_locks.busy(key_text(key)) is not None
                or (row not in expired and catalog.is_pinned(key))
            ):
                continue
            size = int(table.size[row]) << 6
            freed += size
            reason: Reason = "expired" if row in expired else "unused" if is_unused else "over size"
            yield Victim(key, int(table.seq[row]), size, used, reason)


def evict(engine: Engine, chosen: Iterable[Victim]) -> Eviction:
    """Delete artifacts, each unless it was used, pinned or replaced meanwhile."""
    count = size = 0
    chosen = list(chosen)
    if not chosen:
        return Eviction()
    engine.flush()
    hashes, times = engine.index.uses()
    for victim in chosen:
        hash_ = np.uint64(engine.catalog.hashes(victim.key)[0])
        at = int(np.searchsorted(hashes, hash_))
        if at < len(hashes) and hashes[at] == hash_ and times[at] > victim.used_at:
            continue
        spared = victim.reason != "expired"
        if write.delete_exactly(engine, victim.key, victim.seq, unless_pinned=spared):
            count += 1
            size += victim.size
    return Eviction(artifacts=count, size=size)


def live_size(engine: Engine) -> int:
    """Return the bytes of all artifacts that are wanted."""
    table = engine.catalog.snapshot()
    is_here = (table.kind == ARTIFACT) & ~engine.catalog.is_far(table)
    return int(table.size[is_here].astype(np.int64).sum()) << 6


def enforce(engine: Engine) -> Eviction:
    """Bring a set within its bounds, if it is not."""
    options = engine.folder.options
    bound = options.max_size
    free = 0
    if bound is not None and options.evictable:
        live = live_size(engine)
        if live > bound:
            free = live - int(bound * _LEAVES)
    done = evict(engine, victims(engine, free=free))
    dead = sum(use.dead for use in uses_of(engine))
    if bound is not None and dead > bound * _SWOLLEN:
        _compact_unasked(engine, share=_MUCH)
    elif dead > min(_LEAST, engine.pack_bytes // 8) and worth_compacting(engine):
        _compact_unasked(engine)
    return done


def keep(engine: Engine) -> None:
    """Look whether a set has grown so much that something should go; after a put or a delete.

    A look takes as long as reading all footers, so it is not for every put.
    """
    bound = engine.folder.options.max_size
    if engine.churn < engine.look_at:
        return
    is_first = not engine.look_at
    engine.look_at = engine.churn + max(1, min(engine.pack_bytes, (bound or _NO_BOUND) // 16))
    if (bound is not None or not is_first) and engine.key_locks.busy(COMPACTING) is None:
        try:
            enforce(engine)
        except (SmartcacheError, OSError) as error:  # what was put is there all the same
            _log.warning("%s was not brought within its bounds: %s", engine.name, error)


def _compact_unasked(engine: Engine, share: float = 0.5) -> None:
    """Compact unasked: what keeps it from being done is said, and tried again after a while."""
    if time.monotonic() < engine.compact_again_at:
        return
    try:
        compact(engine, share=share)
    except (SmartcacheError, OSError) as error:
        engine.compact_again_at = time.monotonic() + _PAUSE
        _log.warning("%s was not compacted: %s", engine.name, error)


def on_disk(engine: Engine) -> int:
    """Return the bytes of all packs, dead records included."""
    total = 0
    for pack in engine.catalog.known_packs():
        with suppress(FileNotFoundError, SetFormatError):
            total += kept_size(engine.catalog.files[pack.name])
    return total
