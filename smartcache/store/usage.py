"""What the store takes on the disk, what it shares, and what could be freed.

Bytes are counted in two ways that are never mixed: *logical* is what the names promise, as if each
had a copy of its own; *physical* is the disk blocks in use, each inode once. Every blob is looked
at when it is asked: the index only says which there are and who holds them. What blocks reflinks
share cannot be seen in a stat, so each of them counts in full.
"""

from __future__ import annotations

import os
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from smartcache.progress import Progress, silent
from smartcache.store.measure import FolderUsage, folder_usage
from smartcache.store.owners import Liveness, Look, liveness
from smartcache.store.prune import REBUILT, in_trash
from smartcache.store.records import OwnerKind
from smartcache.store.statkey import allocated_bytes
from smartcache.store.volume import Volume

__all__ = ["FolderUsage", "OwnerUsage", "StoreUsage", "folder_usage", "store_usage"]


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

    Names are hard links, as the inode counts them: symlinks, reflinks and copies are not.
    """
    physical: int
    """Disk blocks of the blobs: `shared` and `only_smartcache` together."""
    shared: int
    """Of blobs that have names outside too: removing the blob frees nothing."""
    only_smartcache: int
    """Of blobs whose only name is the store's."""
    reclaimable: int
    """What `prune` would free: held by smartcache alone and wanted by nobody, and the trash."""
    saved: int
    """Disk blocks that separate copies for the names outside would take more (holes take none)."""
    trash: int
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
        return self.physical + self.trash + self.bad + self.tmp + self.sets + self.index


def store_usage(volume: Volume, *, progress: Progress = silent) -> StoreUsage:
    """Return what a store takes: one stat for each blob, and nothing is written."""
    tally = _Tally(Look(volume))
    with progress("Looking at blobs", volume.index.totals().blobs) as job:
        for page in tally.look.pages():
            tally.add(page)
            job.advance(len(page))
    layout = volume.layout
    trash, bad, tmp, sets = folder_usage((layout.trash, layout.bad, layout.tmp, layout.sets))[:4]
    from_trash = sum(victim.allocated for victim in in_trash(volume))
    return StoreUsage(
        root=volume.root,
        blobs=tally.blobs,
        logical=tally.logical,
        physical=tally.physical,
        shared=tally.physical - tally.only,
        only_smartcache=tally.only,
        reclaimable=tally.free + from_trash,
        saved=tally.saved,
        trash=trash.physical,
        bad=bad.physical,
        tmp=tmp.physical,
        sets=sets.physical,
        index=_bookkeeping(volume),
        owners=tuple(
            OwnerUsage(
                kind=owner.kind, name=owner.name, liveness=liveness(owner),
                blobs=held.blobs, size=held.size, allocated=held.allocated, alone=held.alone,
            )
            for owner in volume.index.owners()
            for held in (tally.of_owner[owner.id],)
        ),
        is_rebuilt=volume.index.note(REBUILT) is not None,
    )  # fmt: skip


class _Held:
    """The sums of one owner."""

    def __init__(self) -> None:
        self.blobs = self.size = self.allocated = self.alone = 0


class _Tally:
    """The sums over all blobs."""

    def __init__(self, look: Look) -> None:
        self.look = look
        self.blobs = self.logical = self.physical = self.only = self.free = self.saved = 0
        self.of_owner: defaultdict[int, _Held] = defaultdict(_Held)

    def add(self, page: dict[int, os.stat_result]) -> None:
        """Count some blobs."""
        self.blobs += len(page)
        for st in page.values():
            names, allocated = st.st_nlink - 1, allocated_bytes(st)
            self.physical += allocated
            self.logical += st.st_size * max(names, 1)
            self.saved += allocated * max(names - 1, 0)
        for each in self.look.alone(page):
            self.only += each.blob.allocated
            self.free += 0 if each.is_wanted() else each.blob.allocated
        for blob, owners in self.look.owners(page).items():
            st, is_alone = page[blob], len(owners) == 1
            for owner, _ in owners:
                held = self.of_owner[owner.id]
                held.blobs += 1
                held.size += st.st_size
                held.allocated += allocated_bytes(st)
                held.alone += allocated_bytes(st) if is_alone else 0


def _bookkeeping(volume: Volume) -> int:
    layout = volume.layout
    names = [f"{layout.index}{suffix}" for suffix in ("", "-wal", "-shm")]
    total = 0
    for name in (*names, str(layout.journal)):
        with suppress(FileNotFoundError):
            total += allocated_bytes(os.stat(name))
    return total
