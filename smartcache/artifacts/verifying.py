"""Read everything of a set again and compare it with its checksums and its rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from smartcache.artifacts import reading, writing
from smartcache.artifacts.commit import ChunkOp, PutOp
from smartcache.artifacts.engine import SetEngine
from smartcache.artifacts.keys import key_text
from smartcache.artifacts.located import known_layout
from smartcache.artifacts.packs import OpenPack
from smartcache.artifacts.records import PACK_HEADER_BYTES, layout_digest, place
from smartcache.artifacts.rows import Entry, Pack
from smartcache.artifacts.scanning import scan
from smartcache.errors import BadKeyError, DamagedArtifactError, LayoutError, SetFormatError
from smartcache.progress import Job, Progress, silent

_PAGE = 1000
_TRIES = 5
"""How often an artifact is looked up anew that compaction moves away."""


@dataclass(slots=True, kw_only=True)
class SetVerifyReport:
    """What verifying a set has found."""

    name: str
    id: str
    artifacts: int = 0
    packs: int = 0
    read_size: int = 0
    damaged: list[str] = field(default_factory=list)
    """Keys of artifacts that were not what was put; they are gone, and can be computed again."""
    damaged_records: int = 0
    """Records that are not whole, also those that nobody wants any more."""
    missing_packs: list[int] = field(default_factory=list)
    is_index_sound: bool = True

    @property
    def has_damage(self) -> bool:
        """Whether anything is not as it was put."""
        return bool(self.damaged or self.missing_packs) or not self.is_index_sound


def verify(engine: SetEngine, *, progress: Progress = silent) -> SetVerifyReport:
    """Read every record; artifacts that are damaged are deleted, so that they are computed anew.

    Nothing is deleted that an index in disorder might only have lost sight of, nor what lies in a
    pack that is not there: it may come back.
    """
    engine.flush()
    report = SetVerifyReport(name=engine.folder.name, id=engine.folder.id)
    report.is_index_sound = engine.index.is_sound()
    packs = engine.index.packs()
    whole = _Whole()
    with progress("Verifying", sum(pack.watermark for pack in packs.values()), "bytes") as job:
        for pack in packs.values():
            _read_pack(engine, pack, whole, report, job)
    report.packs = len(packs)
    doubtful = [(key, entry) for key, entry in _entries(engine) if not whole.has(engine, entry)]
    bad = [(key, entry) for key, entry in doubtful if _is_damaged(engine, key, entry)]
    report.artifacts = engine.index.totals()[0]
    seqs = set(whole.artifacts.values())
    if any(entry.seq in seqs and entry.place not in whole.artifacts for _, entry in bad):
        report.is_index_sound = False
    for key, entry in bad:
        report.damaged.append(_text(key))
        if report.is_index_sound and not _lies_in(entry, report.missing_packs):
            writing.delete_exactly(engine, key, entry.seq)
            engine.memory.forget(key)
            engine.damage.add(entry.seq)
    engine.flush()
    return report


@dataclass(slots=True)
class _Whole:
    """The records that are whole: positions of artifacts with their numbers, and of chunks."""

    artifacts: dict[int, int] = field(default_factory=dict)
    chunks: dict[int, int] = field(default_factory=dict)
    layouts: dict[int, bool] = field(default_factory=dict)

    def has(self, engine: SetEngine, entry: Entry) -> bool:
        """Say whether all of an artifact is whole."""
        if self.artifacts.get(entry.place) != entry.seq:
            return False
        if entry.layout not in self.layouts:
            self.layouts[entry.layout] = _is_layout_sound(engine, entry.layout)
        if not self.layouts[entry.layout]:
            return False
        if all(self.chunks.get(uid) == uid for uid in entry.uids):
            return True
        rows = engine.index.chunks(set(entry.uids))
        return all(uid in rows and self.chunks.get(rows[uid].place) == uid for uid in entry.uids)


def _is_layout_sound(engine: SetEngine, number: int) -> bool:
    found = engine.index.layout(number)
    try:
        return (
            found is not None
            and layout_digest(found[1]) == found[0]
            and bool(known_layout(found[1]))
        )
    except LayoutError:
        return False


def _read_pack(
    engine: SetEngine, pack: Pack, whole: _Whole, report: SetVerifyReport, job: Job
) -> None:
    try:
        opened: OpenPack = engine.packs[pack.number]
    except (OSError, SetFormatError):
        if engine.index.pack(pack.number) is not None:  # else it was compacted in this moment
            report.missing_packs.append(pack.number)
        return
    before = PACK_HEADER_BYTES
    for found in scan(opened, PACK_HEADER_BYTES, pack.watermark, full=True):
        where = opened.position(found.offset)
        if found.op is None:
            report.damaged_records += 1
        elif isinstance(found.op, PutOp):
            whole.artifacts[where] = found.op.seq
        elif isinstance(found.op, ChunkOp):
            whole.chunks[where] = found.op.uid
        job.advance(found.end - before)
        report.read_size += found.end - before
        before = found.end


def _lies_in(entry: Entry, packs: list[int]) -> bool:
    return any(place(each)[0] in packs for each in (entry.place, *entry.uids))


def _entries(engine: SetEngine) -> Iterable[tuple[bytes, Entry]]:
    after = b""
    while page := engine.index.entries_after(after, _PAGE):
        after = page[-1][0]
        yield from page


def _is_damaged(engine: SetEngine, key: bytes, entry: Entry) -> bool:
    """Read an artifact by itself that was not found whole among the records of the packs.

    It may just as well have been put, or moved by compaction, while they were read.
    """
    before = None
    for _ in range(_TRIES):
        engine.memory.forget(key)
        row = engine.index.entry(key)
        if row is None or row.seq != entry.seq:
            return False
        found = engine.find(key)
        if found is None:
            row = engine.index.entry(key)  # it may have been deleted between the two looks
            is_same = row is not None and row.seq == entry.seq
            return is_same and not entry.expires_at  # a row of which nothing can be made
        try:
            reading.read_through(engine.packs, found)
        except (DamagedArtifactError, LayoutError):
            return True
        except (FileNotFoundError, SetFormatError):
            if found.ranges() == before:
                return True
            before = found.ranges()
        else:
            return False
    return False


def _text(key: bytes) -> str:
    try:
        return key_text(key)
    except BadKeyError:
        return key.hex()
