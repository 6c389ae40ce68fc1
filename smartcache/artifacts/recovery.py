"""Make rows of what lies in the packs: the tail that a killed process left, or all of it.

A rebuild reads every record header and brings back nothing that was deleted or replaced: an
artifact counts only if no newer record speaks of its key, not even one whose payload is damaged.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from smartcache.artifacts.commit import (
    ChunkOp,
    DeleteOp,
    KeyOp,
    LayoutOp,
    Op,
    PinOp,
    PutOp,
    apply,
    commit,
)
from smartcache.artifacts.packnotes import doomed, set_doomed
from smartcache.artifacts.packs import (
    OpenPack,
    PackFiles,
    file_size,
    kept_unwritten,
    pack_numbers,
    pack_path,
)
from smartcache.artifacts.records import PACK_HEADER_BYTES, key_hash, place
from smartcache.artifacts.reserving import has_left, release_left
from smartcache.artifacts.rows import Pack
from smartcache.artifacts.scanning import Found, scan
from smartcache.artifacts.setfolder import SetFolder
from smartcache.artifacts.setindex import SetIndex
from smartcache.errors import SetFormatError, SmartcacheError
from smartcache.progress import Progress, silent
from smartcache.store.faults import reached
from smartcache.store.locks import is_free, lock

_log = logging.getLogger(__name__)
_GROUP = 4096
"""Records whose rows are made in one go."""


def read_tails(index: SetIndex, packs: PackFiles, folder: Path) -> None:
    """Count the records that processes have written and, being killed, not counted.

    Packs whose writer lives are left alone; nobody writes to a pack while its tail is read.
    """
    _tidy_up(index, folder)
    with ExitStack() as held:
        tails = []
        for row in index.packs().values():
            path = pack_path(folder, row.number)
            try:
                found = os.stat(path)
                is_counted = row.is_sealed or found.st_size == row.watermark
                if is_counted and not has_left(found):
                    continue
                alone = kept_unwritten(path)
                if alone is not None:
                    held.callback(alone.close)
                    release_left(path)
                    if not is_counted:
                        tails.append(_Tail(packs[row.number]))
            except FileNotFoundError:
                continue  # compacted in this moment, or lost: reading will tell
            except (SetFormatError, OSError) as error:
                _log.warning("%s: %s", path, error)
        _count(index, tails)


def read_own(index: SetIndex, pack: OpenPack, end: int) -> None:
    """Count all records of a pack that the caller writes; its rows may be lost."""
    with index.write():
        if index.pack(pack.number) is None:
            index.put_pack(Pack(pack.number, False, PACK_HEADER_BYTES, 0, 0, 0, 0))  # noqa: FBT003
        _count(index, [_Tail(pack, end)])


class _Tail:
    """A pack of which not everything is counted."""

    def __init__(self, pack: OpenPack, end: int | None = None) -> None:
        self.pack = pack
        self.is_own = end is not None
        self.size = pack.size if end is None else end
        self.reached = 0
        self.ops: list[Op] = []
        self.lost: dict[int, int] = {}

    def read(self, row: Pack) -> None:
        """Read what the row does not speak of."""
        self.reached = row.watermark
        for found in scan(self.pack, row.watermark, self.size, full=True):
            if found.op is not None:
                self.ops.append(found.op)
                self.reached = found.end
            elif found.lost is not None:
                key_hash, seq = found.lost
                self.lost[key_hash] = max(seq, self.lost.get(key_hash, 0))


def _count(index: SetIndex, tails: list[_Tail]) -> None:
    """Make the rows of tails; what they refer to may lie in the tail of another pack."""
    for tail in list(tails):
        row = index.pack(tail.pack.number)
        if row is None or row.is_sealed:
            tails.remove(tail)
        else:
            tail.read(row)
    if len(tails) > 1:
        with index.write():
            for tail in tails:
                parts = [op for op in tail.ops if isinstance(op, (LayoutOp, ChunkOp))]
                apply(index, tail.pack.number, parts)
    for tail in tails:
        number = tail.pack.number
        reached("tail: read")
        with index.write():
            row = index.pack(number)
            if row is None:
                continue
            commit(index, number, row.watermark, tail.reached, tail.ops)
            _drop_replaced(index, tail.lost)
            if not tail.is_own and tail.reached < tail.size:
                index.seal(number)  # what a torn write left is never written over
                _log.info("Pack %d: a write was cut off; what came before it is counted", number)


def _tidy_up(index: SetIndex, folder: Path) -> None:
    """Remove packs that were compacted away; add rows for those that have none.

    A pack has no row if its writer was killed, or the index lost its last pages with the power.
    """
    if not set(pack_numbers(folder)) - index.packs().keys() and not doomed(index):
        return
    with index.write():  # a pack is made in a transaction: none is half made now
        dead = doomed(index) - index.packs().keys()
        for number in dead:
            pack_path(folder, number).unlink(missing_ok=True)
        set_doomed(index, ())
        for number in set(pack_numbers(folder)) - index.packs().keys():
            path = pack_path(folder, number)
            size = file_size(path)
            if 0 <= size < PACK_HEADER_BYTES:
                if is_free(path):
                    path.unlink()  # killed before anything was in it
            elif size >= 0:
                index.put_pack(Pack(number, False, PACK_HEADER_BYTES, 0, 0, 0, 0))  # noqa: FBT003


@dataclass(slots=True, kw_only=True)
class Rebuilt:
    """What a rebuild has found."""

    artifacts: int = 0
    packs: int = 0
    damaged: int = 0
    """Records that are not whole, or places where one should be."""
    unreadable: list[int] = field(default_factory=list)
    """Numbers of files that are no packs of this set."""


def recover(
    index: SetIndex, packs: PackFiles, folder: SetFolder, *, progress: Progress = silent
) -> Rebuilt:
    """Make the index again from the packs. Whoever writes to the set is waited for."""
    result = Rebuilt()
    name = f"the set {folder.name}"
    with lock(folder.path / "lock", exclusive=True, what="rebuild", name=name), index.write():
        known: dict[int, Pack] = {}
        with suppress(SmartcacheError):  # too damaged to be asked: the packs alone are asked then
            _tidy_up(index, folder.path)
            known = index.packs()
            index.remember_seqs()
        index.clear()
        opened = _all_packs(packs, folder, result)
        sizes = {pack.number: pack.size for pack in opened}
        is_short = any(row.watermark > sizes.get(row.number, 0) for row in known.values())
        for pack in opened:
            row = known.get(pack.number)
            # What is sealed stays so, also while its writer has not let go of it yet: somebody may
            # count on it, who compacts it.
            was_sealed = row is not None and row.is_sealed
            is_sealed = was_sealed or is_free(pack_path(folder.path, pack.number))
            index.put_pack(Pack(pack.number, is_sealed, pack.size, 0, 0, 0, 0))
        lost: dict[int, int] = {}
        newest = _newest(opened)
        with progress("Reading packs", 3 * len(opened)) as job:
            for kinds in ((LayoutOp, ChunkOp), (PutOp, DeleteOp), (PinOp,)):
                for pack in opened:
                    _rebuild(index, pack, kinds, result, lost, newest)
                    job.advance()
                if kinds == (PutOp, DeleteOp):
                    _drop_replaced(index, lost)
                    if is_short or result.damaged:
                        _drop_older(index)
        index.forget_seqs()
        reached("rebuild: rows made")
        result.packs = len(opened)
        result.artifacts = index.totals()[0]
    return result


def _all_packs(packs: PackFiles, folder: SetFolder, result: Rebuilt) -> list[OpenPack]:
    found = []
    for number in folder.pack_numbers():
        try:
            found.append(packs[number])
        except (SetFormatError, OSError) as error:
            _log.warning("%s: %s", pack_path(folder.path, number), error)
            result.unreadable.append(number)
    return found


def _rebuild(
    index: SetIndex,
    pack: OpenPack,
    kinds: tuple[type, ...],
    result: Rebuilt,
    lost: dict[int, int],
    newest: dict[bytes, int],
) -> None:
    """Make the rows of some kinds of records; `lost` gets key hash and seq of damaged ones."""
    seqs: list[int] = []
    for group in _groups(scan(pack, PACK_HEADER_BYTES, full=False)):
        ops = [each.op for each in group if each.op is not None and isinstance(each.op, kinds)]
        apply(index, pack.number, [op for op in ops if not _is_replaced(op, newest)])
        seqs += [op.seq for op in ops if isinstance(op, KeyOp)]
        for each in group:
            if each.op is None and kinds == (PutOp, DeleteOp):
                result.damaged += 1
                if each.lost is not None:
                    key_hash, seq = each.lost
                    lost[key_hash] = max(seq, lost.get(key_hash, 0))
    row = index.pack(pack.number)
    if row is not None and seqs:
        low = min([*seqs, *([row.min_seq] if row.min_seq else [])])
        index.put_pack(row._replace(min_seq=low, max_seq=max(*seqs, row.max_seq)))


def _newest(packs: list[OpenPack]) -> dict[bytes, int]:
    """Return the highest number of what was put or deleted, by key."""
    newest: dict[bytes, int] = {}
    for pack in packs:
        for found in scan(pack, PACK_HEADER_BYTES, full=False):
            op = found.op
            if isinstance(op, (PutOp, DeleteOp)) and op.seq > newest.get(op.key, -1):
                newest[op.key] = op.seq
    return newest


def _is_replaced(op: Op, newest: dict[bytes, int]) -> bool:
    """Say whether a newer record speaks of the same key.

    Such an artifact may lack chunks, which were compacted away: that is no damage, and must not
    count as a deletion, which would end a pin of its key.
    """
    return isinstance(op, PutOp) and op.seq < newest.get(op.key, -1)


def _drop_replaced(index: SetIndex, lost: dict[int, int]) -> None:
    """Delete what damaged records had replaced: the older value would be wrong now."""
    after = b""
    while lost and (page := index.entries_after(after, _GROUP)):
        after = page[-1][0]
        for key, entry in page:
            seq = lost.get(key_hash(key), -1)
            if seq > entry.seq:
                apply(index, place(entry.place)[0], [DeleteOp(0, seq, key)])


def _drop_older(index: SetIndex) -> None:
    """Delete what the old rows knew to be replaced or deleted by a record that is not there.

    Only if records are missing: where the packs are whole it is the rows that are wrong.
    """
    while older := index.older_than_remembered(_GROUP):
        apply(index, place(older[0][1].place)[0], [DeleteOp(0, seq, key) for key, _, seq in older])


def _groups(found: Iterator[Found]) -> Iterator[list[Found]]:
    while group := list(islice(found, _GROUP)):
        yield group
