"""What the store takes on the disk, what it shares, and what could be freed.

Bytes are counted in two ways that are never mixed: *logical* is what the names promise, as if each
had a copy of its own; *physical* is the disk blocks in use, each inode once. Every blob is looked
at when it is asked.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

from smartcache.progress import Progress, silent
from smartcache.store.home import Home
from smartcache.store.layout import Pool
from smartcache.store.userfile import look
from smartcache.system.kernel import allocated_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUsage:
    """The figures of the blobs on one filesystem. All but `blobs` are bytes."""

    root: Path
    blobs: int
    logical: int
    """The size of each blob times its names outside the store, or once where it has none.

    Names are hard links, as the inode counts them: reflinks and copies are not.
    """
    physical: int
    """Disk blocks of the blobs."""
    only_smartcache: int
    """Of blobs that have no name outside."""
    pinned: int
    """Of those, the ones that are pinned."""
    saved: int
    """Disk blocks that separate copies for the names outside would take more (holes take none)."""
    bad: int
    tmp: int

    @property
    def shared(self) -> int:
        """Of blobs that have names outside too: removing the blob frees nothing."""
        return self.physical - self.only_smartcache

    @property
    def reclaimable(self) -> int:
        """What `prune` would free: nobody has a name of it."""
        return self.only_smartcache - self.pinned


_SUMMED = [each.name for each in fields(PoolUsage) if each.name != "root"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUsage(PoolUsage):
    """The figures of a store as it is now: the sums over its pools, and what is at home alone."""

    pools: tuple[PoolUsage, ...]
    sets: int
    index: int
    """The index with its write-ahead log, and the journal with its copy."""

    @property
    def total(self) -> int:
        """Disk blocks of everything that is the store's."""
        return self.physical + self.bad + self.tmp + self.sets + self.index


def store_usage(home: Home, *, progress: Progress = silent) -> StoreUsage:
    """Return what a store takes: one stat for each blob, and nothing is written."""
    pools = []
    with progress("Looking at blobs", None) as job:
        for pool in home.pools():
            pools.append(_pool_usage(pool))
            job.advance(pools[-1].blobs)
    layout = home.layout
    index = sum(
        allocated_bytes(st)
        for name in (layout.index, f"{layout.index}-wal", f"{layout.index}-shm", layout.journal,
                     layout.journal_copy)
        if (st := look(name)) is not None
    )  # fmt: skip
    return StoreUsage(
        root=layout.root, pools=tuple(pools), sets=blocks_below(layout.sets), index=index,
        **{name: sum(getattr(pool, name) for pool in pools) for name in _SUMMED},
    )  # fmt: skip


def _pool_usage(pool: Pool) -> PoolUsage:
    blobs = logical = physical = only = pinned = saved = 0
    pins, inodes = pool.pinned(), pool.pin_inodes()
    for digest, st in pool.stats():
        names = st.st_nlink - 1 - inodes[st.st_ino]
        allocated = allocated_bytes(st)
        blobs += 1
        physical += allocated
        logical += st.st_size * max(names, 1)
        if names > 0:
            saved += allocated * (names - 1)
        else:
            only += allocated
            pinned += allocated if digest in pins else 0
    return PoolUsage(
        root=pool.root, blobs=blobs, logical=logical, physical=physical, only_smartcache=only,
        pinned=pinned, saved=saved, bad=blocks_below(pool.bad), tmp=blocks_below(pool.tmp),
    )  # fmt: skip


def blocks_below(folder: Path) -> int:
    """Return the disk blocks of all files below a folder, each once; no symlink is followed."""
    taken: dict[tuple[int, int], int] = {}
    for path, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # it vanished, or must not be looked at
                st = os.lstat(os.path.join(path, name))
                if stat.S_ISREG(st.st_mode):
                    taken[st.st_dev, st.st_ino] = allocated_bytes(st)
    return sum(taken.values())
