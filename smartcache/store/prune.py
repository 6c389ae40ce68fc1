"""Remove blobs that only smartcache holds and nobody wants any more.

A blob may go only if the store's name is its last link, no live owner holds it and no recorded
symlink points at it. All of that is looked up again, under the exclusive lock, right before each
removal. The row goes first and durably, then the file: a crash leaves an unindexed blob, never a
row that lies. What is reported as freed are the blocks of inodes whose last link went.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from smartcache.errors import NoSpaceError, PruneRefusedError, UnsafeFileError
from smartcache.progress import Progress, silent
from smartcache.sizes import format_size
from smartcache.store.faults import reached
from smartcache.store.owners import Look, held_alone, live_holders, living_symlinks, wants
from smartcache.store.records import Blob
from smartcache.store.safety import open_own
from smartcache.store.statkey import allocated_bytes
from smartcache.store.undo import close_gone
from smartcache.store.volume import Volume

CHUNK_BLOBS = 64
REBUILT = "rebuilt_at"
"""Note in the index: it was made again from the disk and may lack owners and symlinks."""

Reason = Literal["unowned", "over size", "unused", "trash", "bad"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """One blob (or trashed or damaged file) that would be removed."""

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
    """Bytes that stay because an owner or a symlink holds them."""
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
    free, held_size, warnings = _sort_out(volume, drop_away=drop_away)
    victims = _choose(free, held_size, max_size=max_size, unused_for=unused_for, warnings=warnings)
    victims += in_trash(volume)
    if with_bad:
        victims += _files(volume.layout.bad, "bad")
    return PrunePlan(
        victims=tuple(victims), held_size=held_size, warnings=tuple(warnings),
        after_rebuild=after_rebuild,
        _execute=lambda plan, progress: _execute(volume, plan, progress, drop_away=drop_away),
    )  # fmt: skip


def plan_release(volume: Volume, digests: Iterable[str]) -> PrunePlan:
    """Plan to remove those of some blobs that only smartcache holds and nobody wants."""
    _refuse_after_rebuild(volume, allowed=False)
    victims: list[Victim] = []
    for digest in dict.fromkeys(digests):
        blob = volume.index.blob(digest)
        allocated = None if blob is None or not blob.is_here else held_alone(volume, blob)
        if blob is not None and allocated is not None and not is_wanted(volume, blob):
            victims.append(_victim(replace(blob, allocated=allocated), "unowned"))
    return PrunePlan(
        victims=tuple(victims), held_size=0,
        _execute=lambda plan, progress: _execute(volume, plan, progress, drop_away=False),
    )  # fmt: skip


def _refuse_after_rebuild(volume: Volume, *, allowed: bool) -> None:
    if volume.index.note(REBUILT) is not None and not allowed:
        message = (
            "The index was rebuilt from the disk: pins, owners and symlinks may be missing from it"
        )
        hint = (
            "Run 'smartcache scan', which finds links again; or look at 'smartcache ls', pin what "
            "you need, then allow it with --after-rebuild."
        )
        raise PruneRefusedError(message, hint=hint)


def is_wanted(volume: Volume, blob: Blob, *, drop_away: bool = False) -> bool:
    """Say whether an owner or a symlink keeps a blob alive, checked against the disk now."""
    holders, symlinks = live_holders(volume, blob), living_symlinks(volume, blob)
    return wants(holders, symlinks, drop_away=drop_away)


def _sort_out(volume: Volume, *, drop_away: bool) -> tuple[list[Blob], int, list[str]]:
    """Split what only smartcache holds into free (oldest first) and held; name who is away."""
    free: list[Blob] = []
    held_size = 0
    away: set[str] = set()
    look = Look(volume)
    for each in (each for page in look.pages() for each in look.alone(page)):
        away |= {str(owner) for owner, state in each.holders if state == "away"}
        if each.is_wanted(drop_away=drop_away):
            held_size += each.blob.allocated
        else:
            free.append(each.blob)
    free.sort(key=lambda blob: (blob.used, blob.id))
    verb = "is not mounted or was removed as a whole"
    kept = "; what it owns counts as gone" if drop_away else "; what it owns is kept"
    return free, held_size, [f"{name} {verb}{kept}" for name in sorted(away)]


def _choose(
    free: list[Blob],
    held_size: int,
    *,
    max_size: int | None,
    unused_for: timedelta | None,
    warnings: list[str],
) -> list[Victim]:
    if unused_for is not None:
        limit = datetime.now(UTC) - unused_for
        old = [blob for blob in free if blob.used_at < limit]
    else:
        old = free if max_size is None else []
    victims = [_victim(blob, "unused" if unused_for is not None else "unowned") for blob in old]
    if max_size is None:
        return victims
    taken = {blob.digest for blob in old}
    excess = held_size + sum(blob.allocated for blob in free if blob.digest not in taken) - max_size
    for blob in free:
        if excess <= 0:
            break
        if blob.digest not in taken:
            victims.append(_victim(blob, "over size"))
            excess -= blob.allocated
    if excess > 0:
        size = format_size(excess)
        warnings.append(f"{size} over the limit stay: owners or pins hold them")
    return victims


def _victim(blob: Blob, reason: Reason) -> Victim:
    return Victim(
        digest=blob.digest,
        size=blob.size,
        allocated=blob.allocated,
        reason=reason,
        used_at=blob.used_at,
    )


def in_trash(volume: Volume) -> list[Victim]:
    """Return what every prune removes from the trash."""
    return _files(volume.layout.trash, "trash")


def _files(directory: Path, reason: Reason) -> list[Victim]:
    victims = []
    with os.scandir(directory) as entries:
        for entry in entries:
            st = entry.stat(follow_symlinks=False)
            allocated = allocated_bytes(st) if st.st_nlink == 1 else 0
            digest = entry.name.partition(".")[0]
            victims.append(
                Victim(
                    digest=digest,
                    size=st.st_size,
                    allocated=allocated,
                    reason=reason,
                    path=Path(entry.path),
                )
            )
    return victims


def _execute(
    volume: Volume, plan: PrunePlan, progress: Progress, *, drop_away: bool
) -> PruneResult:
    removed = freed = kept = 0
    _refuse_after_rebuild(volume, allowed=plan.after_rebuild)
    with progress("Pruning", len(plan.victims)) as job:
        for start in range(0, len(plan.victims), CHUNK_BLOBS):
            chunk = plan.victims[start : start + CHUNK_BLOBS]
            with volume.guard("prune", exclusive=True):
                try:
                    gone = _remove_rows(volume, chunk, drop_away=drop_away)
                except NoSpaceError:
                    volume.give_up_reserve()  # even the removal of rows needs room
                    gone = _remove_rows(volume, chunk, drop_away=drop_away)
                reached("prune: rows removed")
                for path in gone:
                    freed += unlink_measured(path)
                    removed += 1
                    reached("prune: blob removed")
            kept += len(chunk) - len(gone)
            job.advance(len(chunk))
    close_gone(volume)
    volume.fold_journal()
    volume.make_reserve()
    return PruneResult(removed=removed, freed_size=freed, kept=kept)


def _remove_rows(volume: Volume, victims: tuple[Victim, ...], *, drop_away: bool) -> list[str]:
    """Forget the victims that are still free, durably; return the files to unlink."""
    paths = []
    with volume.index.write(durable=True):
        for victim in victims:
            blob = volume.index.blob(victim.digest)
            if victim.path is not None:
                if victim.reason == "trash" and blob is not None and not blob.is_here:
                    volume.index.drop_blob(blob.id)
                paths.append(str(victim.path))
                continue
            if blob is None or held_alone(volume, blob) is None:
                continue
            if is_wanted(volume, blob, drop_away=drop_away):
                continue
            volume.index.drop_blob(blob.id)
            paths.append(volume.layout.blob(victim.digest))
    return paths


def unlink_measured(path: str | Path) -> int:
    """Remove a name; return the bytes the filesystem gives back (0 while links remain)."""
    try:
        descriptor = open_own(path)
    except FileNotFoundError:
        return 0
    except UnsafeFileError:
        with suppress(FileNotFoundError, IsADirectoryError):  # a directory stays
            os.unlink(path)
        return 0
    try:
        before = os.fstat(descriptor)
        os.unlink(path)
        return allocated_bytes(before) if os.fstat(descriptor).st_nlink == 0 else 0
    finally:
        os.close(descriptor)
