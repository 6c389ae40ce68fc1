"""Read everything of a set again, and make footers again where they are missing or wrong."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, NamedTuple

import numpy as np
from blake3 import blake3

from smartcache.artifacts.engine import far, read, write
from smartcache.artifacts.engine.catalog import Pack
from smartcache.artifacts.engine.compact import COMPACTING, copy_packs
from smartcache.artifacts.engine.engine import Engine
from smartcache.artifacts.engine.far import ARRIVING, FAR, FarPack, Skeleton
from smartcache.artifacts.engine.packs import (
    SUFFIX,
    LocalPack,
    PackSource,
    is_pack_name,
    pack_names,
    read_state,
    taken_over,
)
from smartcache.artifacts.engine.records import ARTIFACT, END, PACK_HEADER_BYTES, scan
from smartcache.artifacts.keys import key_text
from smartcache.artifacts.setfolder import make_private
from smartcache.errors import (
    DamagedArtifactError,
    DigestMismatchError,
    LayoutError,
    LockTimeoutError,
    SetFormatError,
    SmartcacheError,
)
from smartcache.progress import Progress, silent
from smartcache.system.faults import reached
from smartcache.system.kernel import sync_directory
from smartcache.system.locks import store_lock

_log = logging.getLogger(__name__)
COMPUTE = "What is damaged counts as missing and is computed again when needed."
FOREIGN = "A file that is not a pack is never touched: remove it if it is of no use to you."
REBUILD = (
    "What is missing is computed again when needed. 'smartcache artifacts verify --rebuild' makes"
    " footers again from the records, and forgets packs that are gone."
)


@dataclass(slots=True, kw_only=True)
class SetVerifyReport:
    """What verifying a set has found."""

    name: str
    id: str
    artifacts: int = 0
    packs: int = 0
    read_size: int = 0
    damaged: list[str] = field(default_factory=list)
    """Keys of artifacts that are not what was put; they are gone, and can be computed again."""
    bad_packs: list[str] = field(default_factory=list)
    """Files that are no packs of this set."""
    footless: list[str] = field(default_factory=list)
    """Packs whose footer is damaged."""
    lost_packs: dict[str, int] = field(default_factory=dict)
    """Packs that are not there any more, and how many records they had: these are missing."""
    short_packs: list[str] = field(default_factory=list)
    """Packs that somebody has cut off."""
    problem: str = ""
    """Why nothing could be read at all."""
    cure: str = ""
    """What helps."""

    @property
    def damage(self) -> list[str]:
        """A phrase for each thing that is not as it was put."""
        found = [self.problem] if self.problem else []
        found += [f"{name}{SUFFIX} is not a pack of this set" for name in self.bad_packs]
        for name, count in self.lost_packs.items():
            records = "1 record" if count == 1 else f"{count:,} records"
            found.append(f"{name}{SUFFIX} is gone; it had {records}")
        found += [f"{name}{SUFFIX} was cut off" for name in self.short_packs]
        found += [f"the footer of {name}{SUFFIX} is damaged" for name in self.footless]
        if self.damaged:
            some = "artifact is" if len(self.damaged) == 1 else "artifacts are"
            found.append(f"{len(self.damaged):,} {some} damaged")
        return found


def verify(engine: Engine, *, full: bool = True, progress: Progress = silent) -> SetVerifyReport:
    """Read every artifact; those that are damaged are deleted, so that they are computed anew.

    Without `full`, only the packs, their footers and their lengths are looked at.
    """
    catalog = engine.catalog
    report = SetVerifyReport(name=engine.name, id=engine.folder.id)
    table = catalog.snapshot()
    report.bad_packs = catalog.bad
    packs = catalog.known_packs()
    report.packs = len(packs)
    for pack in packs:
        with suppress(FileNotFoundError, SetFormatError):
            if _is_footer_damaged(engine, pack, catalog.files[pack.name]):
                report.footless.append(pack.name)
    rows = np.flatnonzero(table.kind == ARTIFACT)
    report.artifacts = len(rows)
    # What lies in a tier is not fetched to be verified: that is done there, and when it arrives.
    rows = rows[~catalog.is_far(table)[rows]]
    rows = rows[np.argsort(table.place[rows])]
    total = int(table.size[rows].astype(np.int64).sum()) << 6
    with progress("Verifying", total, "bytes") as job:
        for row, key in catalog.keys_of(table, rows.tolist()) if full else ():
            size = int(table.size[row]) << 6
            if _is_lost(engine, key, int(table.seq[row])):
                report.damaged.append(key_text(key))
            report.read_size += size
            job.advance(size)
    report.lost_packs, report.short_packs = _losses(engine)
    if report.footless or report.lost_packs or report.short_packs:
        report.cure = REBUILD
    elif report.bad_packs:
        report.cure = FOREIGN
    elif report.damaged:
        report.cure = COMPUTE
    return report


def _losses(engine: Engine) -> tuple[dict[str, int], list[str]]:
    """Return the packs that are gone, and those that have become shorter, since they were left."""
    if not engine.has_index:
        return {}, []
    noted = engine.index.packs()
    gone, short = [], []
    for name, (size, _) in noted.items():
        try:
            if engine.catalog.files[name].size < size:
                short.append(name)
        except FileNotFoundError:
            gone.append(name)
        except SetFormatError:
            continue  # told as such
    still = engine.index.packs() if gone else {}  # else it was compacted in this moment
    return {name: still[name][1] for name in gone if name in still}, short


def _is_lost(engine: Engine, key: bytes, seq: int) -> bool:
    """Read an artifact; say whether it is damaged, and let it then count as missing."""
    found = engine.look(key)
    if found is None or found[0].seq != seq:
        return False  # it was deleted or replaced meanwhile
    place, source = found
    for attempt in (0, 1):
        try:
            layout = engine.catalog.layout(place.pack, place.layout)
            held = read.Held(key, place, source, layout)
            if attempt and not read.is_damaged(held):
                return False
            read.read_through(held)
        except (DamagedArtifactError, LayoutError, SetFormatError) as error:
            if attempt:
                read.settle(engine, key, place, error)
                return True
        else:
            return False
    return False


def _is_footer_damaged(engine: Engine, pack: Pack, source: PackSource) -> bool:
    """Say whether a pack has an `end`, but no footer that can be read."""
    size = source.size
    state = read_state(source, pack.name, engine.catalog.set_id)
    if pack.is_own or state.footers or size <= PACK_HEADER_BYTES:
        return False
    found = scan(source, pack.nonce, engine.catalog.seed, PACK_HEADER_BYTES, size)
    last = next(iter(deque(found, 1)), None)
    # Behind an `end` may be what a killed writer has torn: then nothing is wrong with the footer.
    # One that has grown meanwhile is being written.
    head = None if last is None or last.end < size else last.head
    return head is not None and head.kind == END and source.size == size


@dataclass(slots=True, kw_only=True)
class Rebuilt:
    """What a rebuild has done."""

    artifacts: int = 0
    packs: int = 0
    footers: int = 0
    """Footers that were made."""
    damaged: int = 0
    """Places in packs that are not whole."""
    unreadable: list[str] = field(default_factory=list)
    """Files that are no packs of this set."""


def rebuild(engine: Engine, *, progress: Progress = silent) -> Rebuilt:
    """Scan all packs; those that nobody writes and that have no footer get one."""
    engine.refuse_read_only()
    catalog = engine.catalog
    result = Rebuilt()
    with engine.mutex:
        engine.leave_pack(sealed=False)
        catalog.refresh()
        packs = [pack for pack in catalog.known_packs() if not pack.is_far]
        result.unreadable = catalog.bad
        with progress("Reading packs", len(packs)) as job:
            for pack in packs:
                with suppress(FileNotFoundError, SetFormatError):
                    source = catalog.files[pack.name]
                    for found in scan(
                        source, pack.nonce, catalog.seed, PACK_HEADER_BYTES, source.size, tail=False
                    ):
                        result.damaged += found.head is None or (
                            found.entry is not None and not found.entry.kind
                        )
                    state = read_state(source, pack.name, catalog.set_id)
                    if not state.footers and not pack.is_foreign:
                        writer = taken_over(engine.path, pack.name, catalog.set_id, catalog.seed)
                        if writer is not None:
                            writer.close(sealed=writer.end >= engine.pack_bytes)
                            result.footers += 1
                job.advance()
        catalog.refresh()
        _note_packs(engine)
        table = catalog.snapshot()
        result.artifacts = int((table.kind == ARTIFACT).sum())
        result.packs = len(catalog.known_packs())
    return result


def _note_packs(engine: Engine) -> None:
    """Take the packs as they are for what should be there; under the lock, so that none goes."""
    catalog = engine.catalog
    name = f"the set {engine.name}"
    with store_lock(engine.path / "lock", "rebuilding", name=name):
        there = set(pack_names(engine.path))
        engine.index.drop_packs(engine.index.packs().keys() - there)
        for pack in catalog.known_packs():
            with suppress(FileNotFoundError, SetFormatError):
                state = read_state(catalog.files[pack.name], pack.name, catalog.set_id)
                if state.footers and pack.name in there and not pack.is_far:
                    records = sum(len(footer.rows.hash) for footer in state.footers)
                    engine.index.add_pack(pack.name, state.records_end, records)


# packs that come and go as a whole


def take_in(engine: Engine, path: Path) -> int:
    """Copy a sealed pack of this set from another folder; its records count as put now."""
    engine.refuse_read_only()
    catalog = engine.catalog
    source = LocalPack(path)
    name = path.name.removesuffix(SUFFIX)
    state = read_state(source, name, catalog.set_id)
    if not state.footers:
        message = f"{path} is not finished: it has no footer"
        raise SetFormatError(message, hint="Close the set that writes it first.", path=path)
    target = catalog.folder / f"{state.header.nonce:016x}{SUFFIX}"
    with _alone(engine, target):
        if not target.exists():
            with _arriving(target) as writing, open(path, "rb") as reading:
                shutil.copyfileobj(reading, writing, 8 << 20)
    records = sum(len(footer.rows.hash) for footer in state.footers)
    write.take_in(engine, state.header.nonce, records)
    with suppress(SmartcacheError, OSError):  # so that its loss is noticed
        engine.index.add_pack(target.stem, state.records_end, records)
    with engine.mutex:
        engine.written(source.size)
    engine.sync_all()
    return records


@contextmanager
def _alone(engine: Engine, target: Path) -> Iterator[None]:
    """Be the only one who brings a pack; what others were killed over goes."""
    for left in target.parent.glob(f"*{ARRIVING}"):
        key = f"arriving {left.name.partition('.')[0]}"
        with suppress(LockTimeoutError), engine.key_locks.hold(key, timeout=0):
            left.unlink(missing_ok=True)
    with engine.key_locks.hold(f"arriving {target.stem}", what="bringing a pack"):
        yield


@contextmanager
def _arriving(target: Path) -> Iterator[BinaryIO]:
    """Write a pack under another name, synced; it has its own when the block is left."""
    temporary = target.with_suffix(f".{secrets.token_hex(4)}{ARRIVING}")
    try:
        make_private(temporary)
        with open(temporary, "r+b") as writing:
            yield writing
            writing.flush()
            os.fsync(writing.fileno())
        reached("take in: copied")
        temporary.rename(target)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(target.parent)


def bring(
    engine: Engine, name: str, chunks: Iterable[bytes], *, size: int, digest: str
) -> None:  # fmt: skip
    """Write a pack from elsewhere to this disk, hashed on the way."""
    engine.refuse_read_only()
    target = engine.path / f"{name}{SUFFIX}"
    if not is_pack_name(name):
        raise SetFormatError(f"{name!r} is not the name of a pack", path=engine.path)
    with _alone(engine, target):
        if not target.exists():
            made, written = blake3(), 0
            with _arriving(target) as writing:
                for each in chunks:
                    made.update(each)
                    written += len(each)
                    writing.write(each)
                if (written, made.hexdigest()) != (size, digest):
                    message = f"What arrived as {target.name} does not have the digest {digest}"
                    raise DigestMismatchError(message, path=target)
                writing.flush()
                read_state(LocalPack(Path(writing.name)), name, engine.catalog.set_id)
    far.detach(engine.path, name)
    engine.catalog.refresh()


def attach(engine: Engine, skeleton: Skeleton, *, take_in: bool) -> None:
    """Have a pack that lies in a tier."""
    engine.refuse_read_only()
    skeleton.check(engine.catalog.set_id)
    target = engine.path / f"{skeleton.name}{SUFFIX}"
    with _alone(engine, target):
        if not target.exists():
            far.attach(engine.path, skeleton)
    if take_in:
        source = engine.catalog.files[skeleton.name]
        state = read_state(source, skeleton.name, engine.catalog.set_id)
        records = sum(len(footer.rows.hash) for footer in state.footers)
        write.take_in(engine, state.header.nonce, records)
        engine.sync_all()


class Sealed(NamedTuple):
    """The packs of a set."""

    packs: list[Path]
    """Those that nobody writes any more, and that lie here."""
    left_out: int
    """How many others write, or have left unfinished."""


@contextmanager
def sealed(engine: Engine, sizes: Mapping[str, int] = MappingProxyType({})) -> Iterator[Sealed]:
    """Seal all packs that nobody writes; none goes for the length of the block.

    `sizes` are those of packs elsewhere. One that has another size here, where a folder was copied
    and both went on writing, is copied into a new one: its name is taken.
    """
    engine.refuse_read_only()
    catalog = engine.catalog
    with engine.key_locks.hold(COMPACTING, what="pushing"):
        with engine.mutex:
            engine.leave_pack(sealed=True)
        catalog.refresh()
        # A pack that comes from elsewhere may still grow there: it keeps its name.
        copy_packs(engine, [
            pack for pack in catalog.known_packs()
            if not pack.is_far
            and ((pack.is_foreign and not pack.is_sealed) or is_another(engine, pack.name, sizes))
        ])  # fmt: skip
        for pack in catalog.known_packs():
            if not (pack.is_sealed or pack.is_foreign or pack.is_far):
                writer = taken_over(engine.path, pack.name, catalog.set_id, catalog.seed)
                if writer is not None:
                    writer.close(sealed=True, note=engine.note_pack)
        catalog.refresh()
        here = [pack for pack in catalog.known_packs() if not pack.is_far]
        done = [engine.path / f"{pack.name}{SUFFIX}" for pack in here if pack.is_sealed]
        yield Sealed(done, len(here) - len(done))


def is_another(engine: Engine, name: str, sizes: Mapping[str, int]) -> bool:
    """Say whether a pack of this disk is not as long as that of its name elsewhere."""
    with suppress(FileNotFoundError):
        size = os.stat(engine.path / f"{name}{SUFFIX}").st_size
        return size != sizes.get(name, size)
    return False


def keys_in(engine: Engine, skeleton: Skeleton) -> list[str]:
    """Return the keys of the artifacts that a pack has, of which only the skeleton is at hand."""
    source = FarPack(skeleton, engine.path / f"{skeleton.name}{FAR}")
    state = read_state(source, skeleton.name, engine.catalog.set_id)
    return [
        key_text(entry.key)
        for footer in state.footers
        for entry in footer.rows.entries()
        if entry.kind == ARTIFACT
    ]
