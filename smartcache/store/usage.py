"""What the store takes on the disk, what it shares, and what could be freed.

Bytes are counted in two ways that are never mixed: *logical* is what the names promise, as if each
had a copy of its own; *physical* is the disk blocks in use, each inode once. The figures come from
the index and are as old as its last look at the disk (`as_of`); `check` looks again. What blocks
reflinks share cannot be seen in a stat, so each of them counts in full.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path

from smartcache.progress import Progress, silent
from smartcache.store.measure import FolderUsage, folder_usage
from smartcache.store.owners import Liveness, link_liveness, liveness
from smartcache.store.proof import is_as_recorded
from smartcache.store.prune import REBUILT
from smartcache.store.records import Blob, Owner, OwnerKind, Trust
from smartcache.store.statkey import allocated_bytes, judge
from smartcache.store.sums import LonelyLink, OwnerSums
from smartcache.store.volume import Volume

__all__ = [
    "CHECKED",
    "FolderUsage",
    "OwnerUsage",
    "StoreUsage",
    "folder_usage",
    "store_usage",
]

CHECKED = "checked_at"
"""Note in the index: when every blob was last compared with the disk."""
_PAGE = 1000


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
    """The figures of one store. All but `blobs` are bytes; those of blobs are index figures."""

    root: Path
    as_of: datetime
    """When every blob was last compared with the disk; else when the store was made."""
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


def store_usage(
    volume: Volume, *, check: bool = False, by_owner: bool = True, progress: Progress = silent
) -> StoreUsage:
    """Return what a store takes; with `check` every blob's row is first compared with the disk.

    Without `check` no blob is looked at: a million take half a second, in flat memory, and what
    each owner holds (`by_owner`) about as much again. Owners, links on record that decide about
    `reclaimable`, and the smaller directories are always seen as they are now; which blobs exist
    and how many links they have is known as of `as_of`.
    """
    as_of = _check(volume, progress) if check else _last_check(volume)
    owners = {owner: liveness(owner) for owner in volume.index.owners()}
    states = {owner.id: state for owner, state in owners.items()}
    sums = volume.index.blob_sums()
    dead = [owner for owner, state in states.items() if state == "dead"]
    held_blobs, held = volume.index.held_sums(without=dead)
    kept = held + _correction(volume, states)
    layout = volume.layout
    trash, bad, tmp, sets = folder_usage((layout.trash, layout.bad, layout.tmp, layout.sets))[:4]
    return StoreUsage(
        root=volume.root,
        as_of=as_of,
        blobs=sums.blobs,
        logical=sums.logical,
        physical=sums.allocated,
        shared=sums.allocated - sums.only_allocated,
        only_smartcache=sums.only_allocated,
        reclaimable=max(0, sums.only_allocated - kept) + trash.freed_if_deleted,
        saved=sums.saved,
        trash=trash.physical,
        bad=bad.physical,
        tmp=tmp.physical,
        sets=sets.physical,
        index=_bookkeeping(volume),
        owners=_owner_usage(volume, owners, held_blobs) if by_owner else (),
        is_rebuilt=volume.index.note(REBUILT) is not None,
    )


def _owner_usage(
    volume: Volume, states: dict[Owner, Liveness], held_blobs: int
) -> tuple[OwnerUsage, ...]:
    sums = volume.index.owner_sums(held_blobs=held_blobs)
    return tuple(
        OwnerUsage(
            kind=owner.kind, name=owner.name, liveness=state, blobs=held.blobs, size=held.size,
            allocated=held.allocated, alone=held.alone,
        )
        for owner, state in states.items()
        for held in (sums.get(owner.id, OwnerSums()),)
    )  # fmt: skip


def _correction(volume: Volume, states: dict[int, Liveness]) -> int:
    """Return what links on record add to, or take from, the bytes that owners keep.

    The sum over the holds of owners that exist takes each hold for good. But an owner that held a
    blob through links holds it only while one of them is there, and a living symlink keeps a blob
    that nobody holds. Only blobs with such links are looked at one by one.
    """
    correction = 0
    rows = volume.index.lonely_links()
    for _, group in groupby(rows, key=lambda row: row.blob):
        links = list(group)
        holders = [owner for owner in links[0].holders if states.get(owner, "dead") != "dead"]
        is_wanted = _is_wanted(volume, links, holders, states)
        correction += links[0].allocated * (is_wanted - bool(holders))
    return correction


def _is_wanted(
    volume: Volume, rows: list[LonelyLink], holders: list[int], states: dict[int, Liveness]
) -> bool:
    """Say whether `prune.is_wanted` would want a blob, given all its links and its live owners."""
    own: dict[int, bool] = {}
    for row in rows:
        link = row.link
        is_there = link_liveness(volume, link) != "dead"
        if is_there and link.kind == "symlink":
            return True
        if link.owner is not None:
            own[link.owner] = own.get(link.owner, False) or is_there
    return any(states[owner] == "away" or own.get(owner, True) for owner in holders)


def _check(volume: Volume, progress: Progress) -> datetime:
    """Compare the row of every blob with the disk, in short transactions; return since when."""
    started = datetime.now(UTC)
    after = b""
    with progress("Checking blobs", volume.index.totals().blobs) as job:
        while page := volume.index.blobs_after(after, _PAGE):
            changed = [blob.digest for blob in page if _is_outdated(volume, blob)]
            if changed and (gone := _renew(volume, changed)):
                _mark_gone(volume, gone)
            after = bytes.fromhex(page[-1].digest)
            job.advance(len(page))
    volume.index.set_note(CHECKED, started.isoformat())
    return started


def _last_check(volume: Volume) -> datetime:
    noted = volume.index.note(CHECKED)
    with suppress(ValueError):
        if noted is not None:
            return datetime.fromisoformat(noted)
    return datetime.fromtimestamp(int(volume.layout.format.stat().st_mtime), UTC)


def _is_outdated(volume: Volume, blob: Blob) -> bool:
    try:
        st = os.stat(volume.layout.blob(blob.digest))
    except FileNotFoundError:
        return blob.is_here
    # Blocks come late: delayed allocation changes them long after the last change of the key.
    return _judged(blob, st) != blob.trust or (blob.allocated, blob.links) != (
        allocated_bytes(st),
        st.st_nlink,
    )


def _renew(volume: Volume, digests: list[str]) -> list[str]:
    """Record the stat of these blobs anew; return the digests of those that are gone.

    Row and stat are read again inside the transaction: an edit that was noticed by somebody else
    in between must not be forgotten.
    """
    gone = []
    with volume.guard("check"), volume.index.write():
        for digest in digests:
            blob = volume.index.blob(digest)
            if blob is None or blob.trust == Trust.TRASHED:
                continue
            try:
                st = os.stat(volume.layout.blob(digest))
            except FileNotFoundError:
                gone.append(digest)
            else:
                volume.index.refresh(blob.id, st, _judged(blob, st))
    return gone


def _judged(blob: Blob, st: os.stat_result) -> Trust:
    """Return the trust a blob deserves after a look at its stat: never more than it had."""
    if not is_as_recorded(blob, st):  # nor is a lost blob that is back: it has no inode on record
        return Trust.UNPROVEN
    verdict = judge(recorded=blob.key, recorded_links=blob.links, current=st)
    return max(blob.trust, Trust.RELINKED) if verdict == "relinked" else blob.trust


def _mark_gone(volume: Volume, digests: list[str]) -> None:
    """Mark blobs as lost whose files are gone; exclusively, so that nobody is bringing them now."""
    with volume.guard("check", exclusive=True), volume.index.write():
        for digest in digests:
            blob = volume.index.blob(digest)
            is_gone = not os.path.lexists(volume.layout.blob(digest))
            if is_gone and blob is not None and blob.trust != Trust.TRASHED:
                volume.index.mark_gone(blob.id)


def _bookkeeping(volume: Volume) -> int:
    layout = volume.layout
    names = [f"{layout.index}{suffix}" for suffix in ("", "-wal", "-shm")]
    total = 0
    for name in (*names, str(layout.journal)):
        with suppress(FileNotFoundError):
            total += allocated_bytes(os.stat(name))
    return total
