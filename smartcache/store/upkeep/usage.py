"""What the store takes on the disk, what it shares, and what could be freed.

Bytes are counted in two ways that are never mixed: *logical* is what the names promise, as if each
had a copy of its own; *physical* is the disk blocks in use, each inode once. Every blob is looked
at when it is asked: the index only says which there are and who holds them.
"""

from __future__ import annotations

import os
import stat
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from smartcache.progress import Progress, silent
from smartcache.store.owners import Liveness, is_wanted, liveness, look
from smartcache.store.records import OwnerKind
from smartcache.store.upkeep.prune import REBUILT
from smartcache.store.volume import Volume
from smartcache.system.kernel import allocated_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerUsage:
    """What an owner holds. Blobs with several owners count for each; `alone` counts the others."""

    kind: OwnerKind
    name: str
    liveness: Liveness
    blobs: int
    size: int
    allocated: int
    alone: int
    """Allocated bytes that no other owner holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUsage:
    """The figures of one store as it is now. All but `blobs` are bytes."""

    root: Path
    blobs: int
    logical: int
    """The size of each blob times its names outside the store, or once where it has none.

    Names are hard links, as the inode counts them: reflinks and copies are not.
    """
    physical: int
    """Disk blocks of the blobs: `shared` and `only_smartcache` together."""
    shared: int
    """Of blobs that have names outside too: removing the blob frees nothing."""
    only_smartcache: int
    """Of blobs whose only name is the store's."""
    reclaimable: int
    """What `prune` would free: held by smartcache alone and wanted by nobody."""
    saved: int
    """Disk blocks that separate copies for the names outside would take more (holes take none)."""
    bad: int
    tmp: int
    sets: int
    index: int
    """The index with its write-ahead log, and the journal."""
    owners: tuple[OwnerUsage, ...]
    is_rebuilt: bool
    """The index was made again from the disk: `prune` refuses until a scan has completed it."""

    @property
    def total(self) -> int:
        """Disk blocks of everything under the root."""
        return self.physical + self.bad + self.tmp + self.sets + self.index


def store_usage(volume: Volume, *, progress: Progress = silent) -> StoreUsage:
    """Return what a store takes: one stat for each blob, and nothing is written."""
    blobs = logical = physical = only = free = saved = 0
    held: defaultdict[int, Counter[str]] = defaultdict(Counter)
    with progress("Looking at blobs", volume.index.totals().blobs) as job:
        for page in look(volume):
            blobs += len(page.stats)
            for st in page.stats.values():
                names, allocated = st.st_nlink - 1, allocated_bytes(st)
                physical += allocated
                logical += st.st_size * max(names, 1)
                saved += allocated * max(names - 1, 0)
            for blob, holders in page.alone:
                only += blob.allocated
                free += 0 if is_wanted(holders) else blob.allocated
            for number, owners in page.owners.items():
                size, allocated = page.stats[number].st_size, allocated_bytes(page.stats[number])
                alone = allocated if len(owners) == 1 else 0
                for owner, _ in owners:
                    held[owner.id].update(blobs=1, size=size, allocated=allocated, alone=alone)
            job.advance(len(page.stats))
    layout = volume.layout
    bad, tmp, sets = map(_blocks_below, (layout.bad, layout.tmp, layout.sets))
    bookkeeping = 0
    for name in ("index.sqlite3", "index.sqlite3-wal", "index.sqlite3-shm", "journal.jsonl"):
        with suppress(FileNotFoundError):
            bookkeeping += allocated_bytes(os.stat(volume.root / name))
    return StoreUsage(
        root=volume.root, blobs=blobs, logical=logical, physical=physical, shared=physical - only,
        only_smartcache=only, reclaimable=free, saved=saved, bad=bad, tmp=tmp, sets=sets,
        index=bookkeeping,
        owners=tuple(
            OwnerUsage(
                kind=owner.kind, name=owner.name, liveness=liveness(owner),
                blobs=sums["blobs"], size=sums["size"], allocated=sums["allocated"],
                alone=sums["alone"],
            )
            for owner in volume.index.owners()
            for sums in (held[owner.id],)
        ),
        is_rebuilt=volume.index.note(REBUILT) is not None,
    )  # fmt: skip


def _blocks_below(folder: Path) -> int:
    """Return the disk blocks of all files below a folder, each once; no symlink is followed."""
    taken: dict[tuple[int, int], int] = {}
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # it vanished, or must not be looked at
                st = os.lstat(os.path.join(path, name))
                if stat.S_ISREG(st.st_mode):
                    taken[st.st_dev, st.st_ino] = allocated_bytes(st)
    return sum(taken.values())
