"""Remove blobs that only smartcache holds and nobody wants any more.

A blob may go only if the store's name is its last link and no live owner holds it.
All of that is looked up again, under the exclusive lock, right before each
removal. The row goes first and durably, then the file: a crash leaves an unindexed blob, never a
row that lies. What is reported as freed are the blocks of inodes whose last link went.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from smartcache.errors import BlobInUseError, BlobNotFoundError, PruneRefusedError
from smartcache.progress import Progress, silent
from smartcache.sizes import format_size
from smartcache.store.blobs import explained, prove, unlink_measured
from smartcache.store.changes.undo import close_gone
from smartcache.store.owners import held_alone, is_wanted, keepers_of, look
from smartcache.store.records import Blob
from smartcache.store.volume import Volume
from smartcache.system.faults import reached
from smartcache.system.kernel import allocated_bytes

CHUNK_BLOBS = 64
REBUILT = "rebuilt_at"
"""Note in the index: it was made again from the disk and may lack owners."""

Reason = Literal["unowned", "over size", "unused", "bad"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """One blob (or damaged file) that would be removed."""

    digest: str
    size: int
    allocated: int
    reason: Reason
    used_at: datetime | None = None
    path: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneResult:
    """What was really done."""

    removed: int
    freed_size: int
    kept: int
    """Victims that turned out to be wanted again when their turn came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunePlan:
    """What `prune` would remove; `execute` reports what really came back."""

    victims: tuple[Victim, ...]
    held_size: int
    """Bytes that stay because an owner holds them."""
    warnings: tuple[str, ...] = ()
    after_rebuild: bool = False
    _execute: Callable[[PrunePlan, Progress], PruneResult] = field(repr=False, compare=False)

    @property
    def freed_size(self) -> int:
        """The bytes this plan expects the filesystem to give back."""
        return sum(victim.allocated for victim in self.victims)

    def execute(self, progress: Progress = silent) -> PruneResult:
        """Remove the victims, each checked again right before."""
        return self._execute(self, progress)


def plan_prune(
    volume: Volume,
    *,
    max_size: int | None = None,
    unused_for: timedelta | None = None,
    drop_away: bool = False,
    after_rebuild: bool = False,
    with_bad: bool = False,
) -> PrunePlan:
    """Choose what may go: all unowned blobs, those unused for an age, or the oldest.

    `drop_away` counts owners on drives that are not mounted as gone; `after_rebuild` allows
    pruning with an index that was rebuilt and not yet completed by a scan.
    """
    _refuse_after_rebuild(volume, allowed=after_rebuild)
    free: list[Blob] = []
    held_size = 0
    away: set[str] = set()
    for blob, holders in (each for page in look(volume) for each in page.alone):
        away |= {str(owner) for owner, state in holders if state == "away"}
        if is_wanted(holders, drop_away=drop_away):
            held_size += blob.allocated
        else:
            free.append(blob)
    free.sort(key=lambda blob: (blob.used, blob.id))
    victims, excess = _choose(free, held_size, max_size=max_size, unused_for=unused_for)
    kept = "counts as gone" if drop_away else "is kept"
    warnings = [
        f"{name} is not mounted or was removed as a whole; what it owns {kept}"
        for name in sorted(away)
    ]
    if excess > 0:
        warnings.append(f"{format_size(excess)} over the limit stay: owners or pins hold them")
    if with_bad:
        victims += _damaged(volume.layout.bad)
    return PrunePlan(
        victims=tuple(victims), held_size=held_size, warnings=tuple(warnings),
        after_rebuild=after_rebuild,
        _execute=lambda plan, progress: _execute(volume, plan, progress, drop_away=drop_away),
    )  # fmt: skip


def _choose(
    free: list[Blob], held_size: int, *, max_size: int | None, unused_for: timedelta | None
) -> tuple[list[Victim], int]:
    """Choose among free blobs, oldest first; return by how much the rest exceeds `max_size`."""
    if unused_for is not None:
        limit = datetime.now(UTC) - unused_for
        victims = [_victim(blob, "unused") for blob in free if blob.used_at < limit]
    else:
        victims = [_victim(blob, "unowned") for blob in free] if max_size is None else []
    if max_size is None:
        return victims, 0
    left = free[len(victims) :]  # what was chosen are the oldest
    excess = held_size + sum(blob.allocated for blob in left) - max_size
    for blob in left:
        if excess <= 0:
            break
        victims.append(_victim(blob, "over size"))
        excess -= blob.allocated
    return victims, excess


def _victim(blob: Blob, reason: Reason) -> Victim:
    return Victim(
        digest=blob.digest, size=blob.size, allocated=blob.allocated, reason=reason,
        used_at=blob.used_at,
    )  # fmt: skip


def _damaged(directory: Path) -> list[Victim]:
    """Return all that is in `bad/`, to be removed."""
    victims = []
    with os.scandir(directory) as entries:
        for entry in entries:
            st = entry.stat(follow_symlinks=False)
            victim = Victim(
                digest=entry.name.partition(".")[0], size=st.st_size, path=Path(entry.path),
                allocated=allocated_bytes(st) if st.st_nlink == 1 else 0, reason="bad",
            )  # fmt: skip
            victims.append(victim)
    return victims


def plan_release(volume: Volume, digests: Iterable[str]) -> PrunePlan:
    """Plan to remove those of some blobs that only smartcache holds and nobody wants."""
    _refuse_after_rebuild(volume, allowed=False)
    victims: list[Victim] = []
    for digest in dict.fromkeys(digests):
        blob = volume.index.blob(digest)
        if blob is not None and (allocated := _unwanted(volume, blob)) is not None:
            victims.append(_victim(replace(blob, allocated=allocated), "unowned"))
    return PrunePlan(
        victims=tuple(victims), held_size=0,
        _execute=lambda plan, progress: _execute(volume, plan, progress, drop_away=False),
    )  # fmt: skip


def _refuse_after_rebuild(volume: Volume, *, allowed: bool) -> None:
    if volume.index.note(REBUILT) is not None and not allowed:
        message = "The index was rebuilt from the disk: owners may be missing from it"
        hint = (
            "Run 'smartcache scan', which finds links again; or look at 'smartcache ls', pin what "
            "you need, then allow it with --after-rebuild."
        )
        raise PruneRefusedError(message, hint=hint)


def _unwanted(volume: Volume, blob: Blob, *, drop_away: bool = False) -> int | None:
    """Return the bytes of a blob that only smartcache has and nobody wants now; else None."""
    allocated = held_alone(volume, blob)
    if allocated is None or is_wanted(keepers_of(volume, blob), drop_away=drop_away):
        return None
    return allocated


def _execute(
    volume: Volume, plan: PrunePlan, progress: Progress, *, drop_away: bool
) -> PruneResult:
    removed = freed = kept = 0
    _refuse_after_rebuild(volume, allowed=plan.after_rebuild)
    with progress("Pruning", len(plan.victims)) as job:
        for start in range(0, len(plan.victims), CHUNK_BLOBS):
            chunk = plan.victims[start : start + CHUNK_BLOBS]
            with volume.guard("prune", exclusive=True):
                gone = _remove_rows(volume, chunk, drop_away=drop_away)
                reached("prune: rows removed")
                for path in gone:
                    freed += unlink_measured(path)
                    removed += 1
                    reached("prune: blob removed")
            kept += len(chunk) - len(gone)
            job.advance(len(chunk))
    close_gone(volume)
    volume.index.drop_unused_hashes()
    volume.fold_journal()
    return PruneResult(removed=removed, freed_size=freed, kept=kept)


def _remove_rows(volume: Volume, victims: tuple[Victim, ...], *, drop_away: bool) -> list[str]:
    """Forget the victims that are still free, durably; return the files to unlink."""
    paths = []
    with volume.index.write(durable=True):
        for victim in victims:
            blob = volume.index.record(victim.digest)
            if victim.path is not None:
                paths.append(str(victim.path))
            elif blob is not None and _unwanted(volume, blob, drop_away=drop_away) is not None:
                volume.index.drop_blob(blob.id)
                paths.append(volume.layout.blob(victim.digest))
    return paths


def remove(volume: Volume, digest: str) -> int:
    """Remove a blob that nobody holds, for good; return the bytes that this frees.

    Files outside that share its inode keep it.
    """
    path = volume.layout.blob(digest)
    if volume.index.blob(digest) is None and os.path.exists(path):
        prove(volume, digest)  # an earlier removal was killed between the row and the file
    with explained(volume.root), volume.guard("remove a blob", exclusive=True):
        blob = volume.index.record(digest)
        if blob is None:
            raise BlobNotFoundError(f"No blob {digest} in {volume.root}", digest=digest)
        holders = [str(owner) for owner, _ in keepers_of(volume, blob)]
        if holders:
            message = f"Blob {digest[:12]} is held by {', '.join(holders)}"
            raise BlobInUseError(message, digest=digest, holders=holders)
        with volume.index.write(durable=True):
            volume.index.drop_blob(blob.id)
        reached("rm: row removed")
        return unlink_measured(path)
