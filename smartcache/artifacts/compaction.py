"""Give space back: copy what is wanted to new packs, switch the rows, unlink the old packs.

Copying disturbs nobody. For the switch the lock of the set is held alone, so nobody has records
that are not counted, and the tails of killed writers are counted first: whatever refers to a chunk
is known. Whoever still reads an old pack has it open, and keeps it. Killed in the middle, it leaves
copies that nobody refers to; they have the sequence numbers of the originals and change nothing.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from smartcache.artifacts.copying import Copying
from smartcache.artifacts.engine import SetEngine
from smartcache.artifacts.packs import (
    kept_unwritten,
    pack_path,
    reopened_writer,
)
from smartcache.artifacts.records import (
    PACK_HEADER_BYTES,
)
from smartcache.artifacts.rows import Pack
from smartcache.errors import SetFormatError
from smartcache.progress import Progress, silent
from smartcache.store.locks import is_free

COMPACTING = "\0compact"
"""The lease of who compacts."""
_SMALL = 8
"""Packs below an eighth of the full size are joined when there are as many as this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactResult:
    """What a compaction has done."""

    packs: int
    """Packs that are gone."""
    copied: int
    """Bytes that were written anew."""
    freed: int
    """Bytes that the filesystem has given back, less those that the copies take."""


def dead_size(pack: Pack) -> int:
    """Return the bytes of a pack that nobody wants."""
    return max(0, pack.watermark - PACK_HEADER_BYTES - pack.live)


def worth_compacting(engine: SetEngine, *, force: bool = False, share: float = 0.5) -> list[Pack]:
    """Return the packs of which more than a share is dead; with `force` all with anything dead.

    Packs that another process writes to are left alone. A pack is never without anything dead: its
    layouts count as such.
    """
    chosen = []
    small = []
    for pack in engine.index.packs().values():
        dead = dead_size(pack)
        if dead > share * (pack.watermark - PACK_HEADER_BYTES) or (force and dead):
            chosen.append(pack)
        elif pack.is_sealed and _SMALL * pack.watermark < engine.pack_bytes:
            small.append(pack)
    if len(small) >= _SMALL:
        chosen += small
    own = None if engine.writer is None else engine.writer.number
    return [
        pack
        for pack in chosen
        if pack.number == own or is_free(pack_path(engine.path, pack.number))
    ]


def compact(
    engine: SetEngine, *, force: bool = False, share: float = 0.5, progress: Progress = silent
) -> CompactResult:
    """Compact what is worth it; one process at a time does so."""
    with engine.leases.hold(COMPACTING, what="compacting"):
        engine.flush()
        chosen = worth_compacting(engine, force=force, share=share)
        with engine.mutex:
            numbers = [pack.number for pack in chosen if _seal(engine, pack)]
        with ExitStack() as held:
            numbers = [number for number in numbers if _hold(engine, number, held)]
            if not numbers:
                return CompactResult(packs=0, copied=0, freed=0)
            copying = Copying(engine, numbers)
            try:
                live = sum(pack.live for pack in chosen)
                with progress("Compacting", live, "bytes") as job:
                    for number in numbers:
                        copying.copy(number, job.advance)
                freed = copying.switch()
            except BaseException:
                copying.give_up()
                raise
        return CompactResult(packs=len(numbers), copied=copying.written, freed=max(0, freed))


def _seal(engine: SetEngine, pack: Pack) -> bool:
    """See to it that nobody writes to a pack any more; False: somebody does."""
    if pack.is_sealed:
        return True
    own = engine.writer
    if own is not None and own.number == pack.number:
        engine.flush()
        if engine.writer is own:
            engine.seal()
        return True
    writer = reopened_writer(engine.path, engine.index, pack.number, engine.set_id)
    if writer is None:
        return False
    engine.index.seal(pack.number)
    writer.close()
    return True


def _hold(engine: SetEngine, number: int, held: ExitStack) -> bool:
    """Keep all writers away from a pack until it is unlinked; False: it cannot be compacted."""
    try:
        alone = kept_unwritten(pack_path(engine.path, number))
        if alone is None:
            return False
        held.callback(alone.close)
        return bool(engine.packs[number])
    except (OSError, SetFormatError):
        return False
