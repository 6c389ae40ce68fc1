"""Keep a set within its bounds: what is past its time goes, then what was not used longest.

Never evicted are pinned artifacts, those somebody is computing (a lease), those this process has an
open sample of, and sets that are not evictable. Samples in other processes hold their packs open
and read on.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from smartcache.artifacts import writing
from smartcache.artifacts.compaction import COMPACTING, compact, dead_size, worth_compacting
from smartcache.artifacts.engine import SetEngine
from smartcache.artifacts.keys import key_text
from smartcache.artifacts.records import room
from smartcache.artifacts.rows import Entry
from smartcache.errors import LeaseTimeoutError, NoSpaceError

_log = logging.getLogger(__name__)
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

Reason = Literal["expired", "unused", "over size"]


class Victim(NamedTuple):
    """An artifact that would go."""

    key: bytes
    seq: int
    size: int
    """Bytes of records that nobody needs when it is gone, as those before it are."""
    used_at: int
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """What was evicted."""

    artifacts: int = 0
    size: int = 0


def victims(
    engine: SetEngine, *, free: int = 0, unused_since: int | None = None
) -> Iterator[Victim]:
    """Choose what goes: what is past its time, what was not used since, then until `free` bytes."""
    seen: set[bytes] = set()
    freed = 0
    keep = engine.held_keys()
    released = _Released(engine)
    for key, entry in engine.index.expired(int(time.time())):
        if not _is_held(engine, key, keep):
            seen.add(key)
            size = released.size(entry)
            freed += size
            yield Victim(key, entry.seq, size, entry.used_at, "expired")
    if not engine.folder.options.evictable:
        return
    for key, entry in engine.index.least_used():
        is_unused = unused_since is not None and entry.used_at < unused_since
        if not is_unused and freed >= free:
            return
        if key not in seen and not _is_held(engine, key, keep):
            size = released.size(entry)
            freed += size
            reason: Reason = "unused" if is_unused else "over size"
            yield Victim(key, entry.seq, size, entry.used_at, reason)


def _is_held(engine: SetEngine, key: bytes, keep: Collection[bytes]) -> bool:
    return key in keep or engine.leases.busy(key_text(key)) is not None


class _Released:
    """What comes back as artifacts go one after the other: a chunk with the last that has it."""

    def __init__(self, engine: SetEngine) -> None:
        self._index = engine.index
        self._refs: Counter[int] = Counter()

    def size(self, entry: Entry) -> int:
        """Return the bytes that come back with one artifact more."""
        chunks = self._index.chunks(set(entry.uids)) if entry.uids else {}
        self._refs.update(entry.uids)
        alone = [chunk for chunk in chunks.values() if chunk.refs <= self._refs[chunk.uid]]
        return room(entry.length) + sum(room(chunk.size) for chunk in alone)


def own_size(engine: SetEngine, entry: Entry) -> int:
    """Return the bytes that an artifact does not share with others."""
    return _Released(engine).size(entry)


def evict(engine: SetEngine, chosen: Iterator[Victim]) -> Eviction:
    """Delete artifacts, each unless it was used, pinned or replaced meanwhile."""
    count = size = 0
    for victim in chosen:
        row = engine.index.entry(victim.key)
        is_due = row is not None and row.used_at <= victim.used_at and not row.is_pinned
        if is_due and writing.delete_exactly(engine, victim.key, victim.seq):
            count += 1
            size += victim.size
    engine.flush()
    return Eviction(artifacts=count, size=size)


def enforce(engine: SetEngine) -> Eviction:
    """Bring a set within its bounds, if it is not."""
    options = engine.folder.options
    engine.flush()
    live = engine.index.totals()[1]
    bound = options.max_size
    done = Eviction()
    if bound is not None and live > bound and options.evictable:
        free = live - int(bound * _LEAVES)
        done = evict(engine, iter(list(victims(engine, free=free))))
    elif engine.index.expired(int(time.time())):
        done = evict(engine, iter(list(victims(engine))))
    dead = engine.on_disk() - engine.index.totals()[1]
    if bound is not None and dead > bound * _SWOLLEN:
        _compact(engine, share=_MUCH)
    elif worth_compacting(engine):
        _compact(engine)
    return done


def keep(engine: SetEngine) -> None:
    """See after rows were written whether the set is over its bounds, or to be compacted."""
    if engine.is_over_bounds():
        enforce(engine)
    elif _is_due(engine) and engine.leases.busy(COMPACTING) is None:
        _compact(engine)


def _compact(engine: SetEngine, share: float = 0.5) -> None:
    """Compact unasked: what keeps it from being done is said, and tried again after a while."""
    if time.monotonic() < engine.compact_again_at:
        return
    try:
        compact(engine, share=share)
    except (LeaseTimeoutError, NoSpaceError) as error:
        engine.compact_again_at = time.monotonic() + _PAUSE
        _log.warning("%s was not compacted: %s", engine.folder.name, error)


def _is_due(engine: SetEngine) -> bool:
    """Say whether compacting is worth its time although nobody has asked for it."""
    dead = sum(map(dead_size, worth_compacting(engine)))
    return dead > min(_LEAST, engine.pack_bytes // 8)
