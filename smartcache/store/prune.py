"""Remove blobs that nobody has a name of any more.

A blob whose link count is 1 has no name but the store's: it may go. A pin, a file outside and
whoever is about to use it are one more link each. The count is looked at again, under the lock,
right before each removal. What is reported as freed are the blocks of inodes whose last name went.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from smartcache.errors import BlobInUseError, StoreError
from smartcache.progress import Progress, silent
from smartcache.sizes import format_size
from smartcache.store import DEFAULT_PIN
from smartcache.store.blobs import absent, blob_of, get, is_there, pins_of, pools_with, relinking
from smartcache.store.home import Home
from smartcache.store.layout import Pool, explained, listed, sweep
from smartcache.store.records import Blob
from smartcache.store.userfile import look
from smartcache.system.faults import reached
from smartcache.system.filesystems import can_reflink
from smartcache.system.hashing import check_hex
from smartcache.system.kernel import allocated_bytes
from smartcache.system.locks import claim_folder
from smartcache.system.ownfiles import make_own

CHUNK_BLOBS = 256
Reason = Literal["alone", "over size", "unused", "bad"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """One blob (or damaged file) that would be removed."""

    digest: str
    size: int
    allocated: int
    reason: Reason
    used_at: datetime | None = None
    path: Path
    pool: Path


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
    warnings: tuple[str, ...] = ()
    at_most: bool = False
    """Files outside may share blocks with what goes (reflinks), which nobody can tell."""
    _execute: Callable[[PrunePlan, Progress], PruneResult] = field(repr=False, compare=False)

    @property
    def freed_size(self) -> int:
        """The bytes this plan expects the filesystem to give back."""
        return sum(victim.allocated for victim in self.victims)

    def execute(self, progress: Progress = silent) -> PruneResult:
        """Remove the victims, each looked at again right before."""
        return self._execute(self, progress)


def plan_prune(
    home: Home,
    *,
    max_size: int | None = None,
    unused_for: timedelta | None = None,
    with_bad: bool = False,
) -> PrunePlan:
    """Choose what may go: what only the store has; of that what was not used, or the oldest."""
    free: list[Blob] = []
    pinned = 0
    uses: dict[str, tuple[int, int]] = {}
    if max_size is not None or unused_for is not None:
        with suppress(StoreError):  # a full disk: by the times of the files
            uses = home.catalog.uses()
    for pool in home.pools():
        dead, pins, inodes = _held_by_the_dead(pool), pool.pinned(), pool.pin_inodes()
        for digest, st in pool.stats():
            if st.st_nlink - 1 - inodes[st.st_ino] > dead[digest]:
                continue
            if digest in pins:
                pinned += allocated_bytes(st)
            else:
                free.append(blob_of(pool, digest, st, uses=uses.get(digest)))
    if max_size is not None or unused_for is not None:
        free.sort(key=lambda blob: (blob.used, blob.added, blob.digest))
    victims, excess = _choose(free, pinned, max_size=max_size, unused_for=unused_for)
    warnings = []
    if excess > 0:
        warnings.append(f"{format_size(excess)} over the limit stay: they are pinned")
    if with_bad:
        victims += [victim for pool in home.pools() for victim in _damaged(pool)]
    return _plan(home, victims, warnings)


def plan_release(home: Home, digests: Iterable[str]) -> PrunePlan:
    """Plan to remove those of some blobs that nobody has a name of any more."""
    victims = [
        _victim(blob_of(pool, digest, st), "alone")
        for digest in dict.fromkeys(check_hex("blake3", each) for each in digests)
        for pool in home.pools()
        if (st := pool.stat(digest)) is not None and st.st_nlink == 1
    ]
    return _plan(home, victims)


def _plan(home: Home, victims: list[Victim], warnings: Iterable[str] = ()) -> PrunePlan:
    roots = {victim.pool for victim in victims}
    return PrunePlan(
        victims=tuple(victims), warnings=tuple(warnings),
        at_most=any(can_reflink(root / "tmp") for root in roots),
        _execute=lambda plan, progress: _execute(home, plan, progress),
    )  # fmt: skip


def _held_by_the_dead(pool: Pool) -> Counter[str]:
    """Return what processes held that died: their links are swept before the first blob goes."""
    found = Counter[str]()
    for folder in (pool.tmp / name for name in listed(pool.tmp)):
        if folder.is_dir() and (claimed := claim_folder(folder)) is not None:
            found.update(listed(folder))
            claimed.release(remove=False)
    return found


def _choose(
    free: list[Blob], pinned: int, *, max_size: int | None, unused_for: timedelta | None
) -> tuple[list[Victim], int]:
    """Choose among free blobs, oldest first; return by how much the rest exceeds `max_size`."""
    if max_size is None and unused_for is None:
        return [_victim(blob, "alone") for blob in free], 0
    limit = None if unused_for is None else datetime.now(UTC) - unused_for
    excess = 0 if max_size is None else pinned + sum(blob.allocated for blob in free) - max_size
    victims = []
    for blob in free:
        is_unused = limit is not None and blob.used_at < limit
        if is_unused or excess > 0:
            victims.append(_victim(blob, "unused" if is_unused else "over size"))
            excess -= blob.allocated
    return victims, excess


def _victim(blob: Blob, reason: Reason) -> Victim:
    return Victim(
        digest=blob.digest, size=blob.size, allocated=blob.allocated, reason=reason,
        used_at=blob.used_at, path=blob.path, pool=blob.pool,
    )  # fmt: skip


def _damaged(pool: Pool) -> Iterator[Victim]:
    """Go through all that is in `bad/`, to be removed."""
    for name in sorted(listed(pool.bad)):
        with suppress(FileNotFoundError):
            st = os.lstat(pool.bad / name)
            yield Victim(
                digest=name.partition(".")[0], size=st.st_size, path=pool.bad / name,
                allocated=allocated_bytes(st) if st.st_nlink == 1 else 0, reason="bad",
                pool=pool.root,
            )  # fmt: skip


def _execute(home: Home, plan: PrunePlan, progress: Progress) -> PruneResult:
    removed = freed = 0
    if plan.victims:
        with home.changing("prune"):  # links of dead processes keep nothing
            needed = home.journal.needed_names() if home.has_journal else set()
            for pool in home.pools():
                sweep(pool, needed)
    with progress("Pruning", len(plan.victims)) as job:
        for start in range(0, len(plan.victims), CHUNK_BLOBS):
            chunk = plan.victims[start : start + CHUNK_BLOBS]
            gone: list[Victim] = []
            with explained(home.layout.root), home.changing("prune"):
                for victim in chunk:
                    st = look(victim.path)
                    if st is not None and (victim.reason == "bad" or st.st_nlink == 1):
                        freed += _unlink(victim.path, st)
                        gone.append(victim)
                        reached("prune: blob removed")
                # Nobody has a name of them: of what was done with them nothing is left to undo.
                with suppress(StoreError):
                    lost = {victim.digest for victim in gone if victim.reason != "bad"}
                    if home.has_journal:  # another pool may have names of the same bytes
                        home.journal.close_all(each for each in lost if not is_there(home, each))
            with suppress(StoreError):  # on a full disk the memory may lag
                home.catalog.forget_names([victim.path for victim in gone])
            removed += len(gone)
            job.advance(len(chunk))
    with suppress(StoreError):
        home.catalog.drop_unused_hashes(lambda digest: is_there(home, digest))
    return PruneResult(removed=removed, freed_size=freed, kept=len(plan.victims) - removed)


def _unlink(path: str | Path, st: os.stat_result) -> int:
    """Remove a name; return the bytes the filesystem gives back (0 while links remain)."""
    if stat.S_ISDIR(st.st_mode):
        return 0
    os.unlink(path)
    return allocated_bytes(st) if st.st_nlink == 1 else 0


def remove(home: Home, digest: str) -> int:
    """Remove a blob that is not pinned, for good; return the bytes that this frees.

    Files outside that share its inode keep it.
    """
    digest, freed = check_hex("blake3", digest), 0
    pools = pools_with(home, digest)
    with explained(home.layout.root), home.changing("rm"):
        if pins := pins_of(home, digest):
            holders = [f"pin {name}" for name in pins]
            message = f"Blob {digest[:12]} is held by {', '.join(holders)}"
            raise BlobInUseError(message, digest=digest, holders=holders)
        for pool in pools:
            if (st := pool.stat(digest)) is not None:
                freed += _unlink(pool.blob(digest), st)
                reached("rm: removed")
    with suppress(StoreError):
        home.catalog.forget_names([pool.blob(digest) for pool in pools])
    return freed


def pin(home: Home, digest: str, name: str = DEFAULT_PIN) -> None:
    """Keep a blob until it is unpinned, by one more link of ours."""
    digest = check_hex("blake3", digest)
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise StoreError(f"{name!r} cannot be the name of a pin", hint="Use a plain word.")
    pool = pools_with(home, digest)[0]
    folder = pool.pins / name
    with explained(pool.root), home.changing("pin"), relinking(home, pool, [digest]):
        make_own(folder)
        try:
            os.link(pool.blob(digest), folder / digest)
        except FileExistsError:
            return
        except FileNotFoundError as error:
            raise absent(pool, digest) from error
        reached("pin: linked")


def unpin(home: Home, digest: str, name: str | None = None) -> list[str]:
    """End the pins of a blob, or one of them; return the names of those that were ended."""
    digest = get(home, digest).digest
    ended: set[str] = set()
    for pool in home.pools():
        for pin_name in listed(pool.pins):
            folder = pool.pins / pin_name
            if name in (None, pin_name) and os.path.lexists(folder / digest):
                with explained(pool.root), home.changing("unpin"):
                    with relinking(home, pool, [digest]):
                        os.unlink(folder / digest)
                    with suppress(OSError):  # others are in it
                        os.rmdir(folder)
                ended.add(pin_name)
    return sorted(ended)
