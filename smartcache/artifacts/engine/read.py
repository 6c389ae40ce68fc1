"""Read artifacts: one, or a batch at the speed of memory.

An artifact is read and verified the first time: header, place, key, layout and the checksum of
every byte. From then on its tensors are copied out of a mapping of the pack, once, into the memory
they are wanted in. What is not in the page cache is noticed without waiting for it (RWF_NOWAIT),
and read like the first time; all of that in a batch is announced to the kernel first.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import struct
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from smartcache.artifacts.engine import write
from smartcache.artifacts.engine.catalog import Place, Table, is_of, row_of
from smartcache.artifacts.engine.engine import Engine
from smartcache.artifacts.engine.packs import Buffer, Bytes, Column, PackSource
from smartcache.artifacts.engine.records import (
    ARTIFACT,
    BODY_AT,
    PART_BYTES,
    Meta,
    Part,
    checksum,
    entry_of,
    hashes_of,
    padded,
    parse_meta,
)
from smartcache.artifacts.keys import key_text
from smartcache.artifacts.values.compression import expand, expand_inline
from smartcache.artifacts.values.layout import Layout
from smartcache.artifacts.values.tensors import TensorSpec
from smartcache.errors import (
    ArtifactError,
    BatchShapeError,
    DamagedArtifactError,
    LayoutError,
    SmartcacheError,
)

_log = logging.getLogger(__name__)
_WORTH = 2 << 20
"""Bytes of a batch from which a second thread pays."""
_MOST_THREADS = 8
_MOST_PIECES = 300
"""Tensors of an artifact that is read with one call."""
_TRIES = 5
_PROBES = 64
"""Batches that are asked for whether they are in memory after one that had to wait."""
_LENGTHS = struct.Struct("<BHIII")
_SCRAP = bytearray(64)
"""Where the zeros between tensors are read to."""

Ragged = Literal["raise", "list"]


class Held(NamedTuple):
    """An artifact with its pack open: it can be read, whatever becomes of the set."""

    key: bytes
    place: Place
    source: PackSource
    layout: Layout


def hold(engine: Engine, keys: list[bytes]) -> list[Held]:
    """Find artifacts, with their packs open; ArtifactNotFoundError names those that are missing."""
    return [
        held(engine, key, *each) for key, each in zip(keys, engine.need(keys), strict=True)
    ]  # fmt: skip


def held(engine: Engine, key: bytes, place: Place, source: PackSource) -> Held:
    """Return an artifact that was found; DamagedArtifactError if its layout is not whole."""
    layout = place.pack.parsed.get(place.layout)
    if layout is None:
        try:
            layout = engine.catalog.layout(place.pack, place.layout)
        except DamagedArtifactError as error:
            raise settle(engine, key, place, error) from error
    return Held(key, place, source, layout)


def settle(
    engine: Engine, key: bytes, place: Place, error: Exception, *, delete: bool = True
) -> DamagedArtifactError:
    """Say that an artifact is damaged, and let it count as missing from now on."""
    message = f"Artifact {key_text(key)} of {engine.name} is damaged: {error}"
    if place.seq not in engine.damage:
        engine.damage.add(place.seq)
        _log.warning("%s", message)
    if delete and not engine.read_only:
        try:
            write.delete_exactly(engine, key, place.seq)
        except (SmartcacheError, OSError) as problem:
            _log.warning("%s cannot be marked as missing: %s", key_text(key), problem)
    return DamagedArtifactError(message)


# one artifact


def read_meta(held: Held) -> Meta:
    """Read the record of an artifact without its tensors, verified."""
    place, source = held.place, held.source
    if source.size < place.offset + place.size:
        raise DamagedArtifactError("its pack ends before it does")
    data = bytearray(place.meta)
    source.read(place.offset, [data], place.meta)
    return _checked(held, data)


def _checked(held: Held, data: bytearray) -> Meta:
    meta = parse_meta(data, held.place.pack.nonce, held.place.offset)
    head = meta.head
    place = held.place
    said = (ARTIFACT, place.size, place.layout, held.key)
    if (head.kind, head.size, head.layout << 6, meta.key) != said or not is_of(
        place.pack, head, place.seq
    ):
        raise DamagedArtifactError("its record is not the one that was written")
    if head.parts != len(held.layout.tensors):
        raise DamagedArtifactError("its record and its layout do not fit")
    return meta


def fill(held: Held, targets: Sequence[Buffer]) -> Meta:
    """Read all tensors of an artifact into memory of the right sizes, everything verified."""
    place, source, layout = held.place, held.source, held.layout
    specs = layout.tensors
    data = bytearray(place.meta)
    if place.is_plain and len(specs) <= _MOST_PIECES:
        buffers: list[Buffer] = [data]
        size = place.meta
        for spec, target in zip(specs, targets, strict=True):
            buffers.append(target)
            gap = -spec.nbytes & 63
            if gap:
                buffers.append(memoryview(_SCRAP)[:gap])
            size += spec.nbytes + gap
        if size != place.size:
            raise DamagedArtifactError("its record and its layout do not fit")
        source.read(place.offset, buffers, size)
        meta = _checked(held, data)
    else:
        source.read(place.offset, [data], place.meta)
        meta = _checked(held, data)
        entry_of(meta, 0, place.offset)  # nothing lies outside of the pack
        for number, (spec, target) in enumerate(zip(specs, targets, strict=True)):
            part = meta.part(number)
            if part.nbytes != spec.nbytes:
                raise DamagedArtifactError("its record and its layout do not fit")
            read_part(held, part, target)
        place.note_verified()
        return meta
    at = 4
    for target in targets:
        if checksum(target) != meta.parts[at]:  # type: ignore[arg-type]
            raise DamagedArtifactError("the checksum of a tensor of it is wrong")
        at += 5
    place.note_verified()
    return meta


def read_part(held: Held, part: Part, target: Buffer) -> None:
    """Read a tensor into memory of the right size, verified and decompressed."""
    stored = bytearray(part.stored) if part.method else target
    held.source.read(held.place.offset + part.offset, [stored], part.stored)
    if checksum(stored) != part.checksum:  # type: ignore[arg-type]
        raise DamagedArtifactError("the checksum of a tensor of it is wrong")
    if part.method:
        expand(part.method, stored, target)  # type: ignore[arg-type]


def check_room(held: Held) -> None:
    """Refuse, before any memory is taken, what is larger than the pack that it should lie in."""
    size = held.source.size
    if size < held.place.offset + held.place.size:
        raise DamagedArtifactError("its pack ends before it does")
    large = [slot for slot, spec in enumerate(held.layout.tensors) if spec.nbytes > size]
    if large:  # compressed, or else not what was put
        meta = read_meta(held)
        entry_of(meta, 0, held.place.offset)
        if any(
            not meta.part(slot).method or meta.part(slot).nbytes != held.layout.tensors[slot].nbytes
            for slot in large
        ):
            raise DamagedArtifactError("its pack ends before it does")


def small_of(data: bytes, key: bytes) -> tuple[bytes, bytes]:
    """Return the inline bytes and the metadata of a record that was verified before."""
    method, key_size, parts, inline, metadata = _LENGTHS.unpack_from(data, 5)
    start = BODY_AT + PART_BYTES * parts
    middle = start + key_size
    if data[start:middle] != key:
        raise DamagedArtifactError("its record is not the one that was written")
    end = middle + inline
    found = data[middle:end]
    return expand_inline(method, found) if method else found, data[end : end + metadata]


def read_value(held: Held) -> tuple[object, bytes]:
    """Return the whole value of an artifact, in memory of its own, and its metadata, encoded."""
    place, layout = held.place, held.layout
    specs = layout.tensors
    is_verified = place.is_verified
    if not is_verified:
        check_room(held)
    if is_verified and place.is_plain and held.source.is_whole:
        memory = held.source.view(place.offset, place.offset + place.size)
        if memory is not None:
            at = place.meta
            inline, about = small_of(memory[:at].tobytes(), held.key)
            tensors = []
            for spec in specs:
                size = spec.nbytes
                tensors.append(spec.copied(memory[at : at + size]))
                at += size + 63 & ~63
            return layout.decode(inline, tensors.__getitem__), about
    made = [spec.new() for spec in specs]
    meta = fill(held, [target for _, target in made])
    value = layout.decode(meta.values, [each for each, _ in made].__getitem__)
    return value, bytes(meta.metadata)


class Encoded(NamedTuple):
    """An artifact as it was encoded; `write.put_encoded` keeps it again, decoded by nobody."""

    layout: bytes
    inline: bytes
    tensors: list[memoryview]
    metadata: bytes
    expires: int


def read_encoded(engine: Engine, held: Held) -> Encoded:
    """Read and verify all of an artifact; no library and no codec is needed for that."""
    check_room(held)
    tensors = [memoryview(bytearray(spec.nbytes)) for spec in held.layout.tensors]
    meta = fill(held, tensors)
    layout = engine.catalog.layout_body(held.place.pack, held.place.layout)
    return Encoded(layout, bytes(meta.values), tensors, bytes(meta.metadata), meta.head.expires)


def read_tensor(held: Held, slot: int) -> object:
    """Return one tensor of an artifact; the first time all of it is read, and verified."""
    if not held.place.is_verified_by_now:
        check_room(held)
        made = [spec.new() for spec in held.layout.tensors]
        fill(held, [target for _, target in made])
        return made[slot][0]
    tensor, target = held.layout.tensors[slot].new()
    if held.place.is_plain:
        start, size = _plain_part(held, slot)
        held.source.read(start, [target], size)
    else:
        read_part(held, read_meta(held).part(slot), target)
    return tensor


def view_tensor(held: Held, slot: int) -> Bytes:
    """Return the bytes of a tensor where they lie, read-only; verified the first time."""
    if not held.place.is_verified_by_now:
        read_through(held)
    source = held.source
    part = None
    if held.place.is_plain:
        start, size = _plain_part(held, slot)
    else:
        part = read_meta(held).part(slot)
        start, size = held.place.offset + part.offset, part.stored
    if part is not None and part.method:
        found = np.empty(part.nbytes, np.uint8)
        read_part(held, part, found)
        return found
    mapped = source.view(start, start + size) if source.is_whole else None
    if mapped is None:
        mapped = np.empty(size, np.uint8)
        source.read(start, [mapped], size)
    return mapped


def _plain_part(held: Held, slot: int) -> tuple[int, int]:
    """Return where a tensor lies in the pack, and its length: they follow one after the other."""
    specs = held.layout.tensors
    before = sum(padded(spec.nbytes) for spec in specs[:slot])
    return held.place.offset + held.place.meta + before, specs[slot].nbytes


def read_through(held: Held) -> None:
    """Read and verify all of an artifact; no library is needed for that, whatever it holds."""
    check_room(held)
    fill(held, [np.empty(spec.nbytes, np.uint8) for spec in held.layout.tensors])


def is_damaged(held: Held) -> bool:
    """Read an artifact once more that was not what was put.

    What lies in a tier is fetched anew for that: it was right when it was pushed.
    """
    for start, size in _ranges(held):
        held.source.distrust(start, size)
    try:
        read_through(held)
    except (DamagedArtifactError, LayoutError):
        return True
    return False


# batches


class _Plan:
    """How artifacts of one layout go into a batch."""

    __slots__ = (
        "indices", "is_flat", "layout", "lists", "rows", "size", "slots", "small", "specs", "views",
    )  # fmt: skip

    def __init__(self, batch: _Batch, layout: Layout) -> None:
        fields = layout.fields or {}
        slots = {node.slot: name for name, node in fields.items() if node.slot is not None}
        self.layout = layout
        self.specs = layout.tensors
        self.size = sum(padded(spec.nbytes) for spec in layout.tensors)
        self.rows = [batch.stacked.get(slots.get(slot)) for slot in range(len(layout.tensors))]
        """For each slot the rows of its field; None: it goes into a list."""
        self.is_flat = all(rows is not None for rows in self.rows)
        self.views: list[list[Bytes]] = [[] for _ in self.specs]
        """For each slot the bytes that can be copied from a mapping."""
        self.indices: list[int] = []
        """The rows that they belong to."""
        self.slots = [
            (spec.nbytes, spec.nbytes + 63 & ~63, views.append)
            for spec, views in zip(self.specs, self.views, strict=True)
        ]
        self.small = [
            (name, fields[name], rows)
            for name, rows in batch.stacked.items()
            if fields[name].slot is None
        ]
        """Fields of tensors that are so small that they lie among the other values."""
        self.lists = [(fields[name], values) for name, values in batch.listed.items()]

    def copy(self, count: int) -> None:
        """Copy what is mapped; all rows of a batch in one call, if they are all here."""
        for views, rows in zip(self.views, self.rows, strict=True):
            if rows is None or not views:
                continue
            if len(views) == count == len(rows):
                np.concatenate(views, out=rows.reshape(-1))
            else:
                for index, view in zip(self.indices, views, strict=True):
                    rows[index] = view

    def keep(self, index: int, inline: bytes | memoryview, made: Sequence[object] = ()) -> None:
        """Keep the small values of an artifact."""
        if not self.lists and not self.small:
            return
        opened = self.layout.opened(inline)
        get = made.__getitem__
        for node, values in self.lists:
            values[index] = node.read(*opened, get)
        for _, node, rows in self.small:
            spec: TensorSpec = node.tensor  # type: ignore[assignment]
            tensor: Any = node.read(*opened, get)
            rows[index] = spec.rows(tensor.reshape((1, *spec.shape)))[0]


class _Batch:
    """Artifacts on their way into one dict of stacked tensors and lists."""

    def __init__(
        self,
        held: Sequence[Held],
        out: Mapping[Any, object] | None,
        *,
        pinned: bool,
        ragged: Ragged,
    ) -> None:
        self.held = held
        self.result: dict[Hashable, object] = {}
        self.stacked: dict[Hashable | None, Bytes] = {}
        self.listed: dict[Hashable, list[object]] = {}
        self.unread: list[int] = []
        self.size = 0
        """The bytes that are copied."""
        first = held[0].layout
        kinds = [held[0]]
        if any(each.layout is not first for each in held):
            kinds = list({id(each.layout): each for each in reversed(held)}.values())[::-1]
        names = _names(kinds)
        self._check_room()
        for name in names:
            spec = _spec(kinds, name, ragged)
            if spec is None:
                self.result[name] = self.listed[name] = [None] * len(held)
                continue
            given = None if out is None else out.get(name)
            batch: Any = spec.new_batch(len(held), pinned=pinned) if given is None else given
            rows = spec.rows(batch)
            if len(rows) < len(held):
                message = f"The buffer for {name!r} has room for {len(rows)} of {len(held)}"
                raise BatchShapeError(message, hint="Pass a larger one, or none.")
            self.stacked[name] = rows
            self.size += spec.nbytes * len(held)
            self.result[name] = batch if len(rows) == len(held) else batch[: len(held)]
        self.plans = {id(each.layout): _Plan(self, each.layout) for each in kinds}

    def _check_room(self) -> None:
        """Look once at every pack: nothing may lie behind its end."""
        sizes = {source: source.size for source in {each.source for each in self.held}}
        for each in self.held:
            if each.place.offset + each.place.size > sizes[each.source]:
                raise _DamagedInBatchError(each, "its pack ends before it does")

    def prepare(self, *, probe: bool) -> None:
        """Get the small values of all artifacts that can be copied from a mapping.

        `probe` asks of each whether it is in the page cache, by its first bytes: the kernel reads
        megabytes around a page that is missing in a mapping, and one after the other.

        All of them before the first copy, and the copies in one go: a copy leaves nothing of the
        interpreter in the processor's cache, and all Python after it takes three times as long.
        """
        plans = self.plans
        memories = {source: source.memory() for source in {each.source for each in self.held}}
        for index, (key, place, source, layout) in enumerate(self.held):
            plan = plans[id(layout)]
            start = place.offset
            at = start + place.meta
            memory = memories[source]
            if (
                not place.is_verified
                or memory is None
                or len(memory) < start + place.size
                or not place.is_plain
                or not plan.is_flat
                or (
                    probe
                    and not source.read(start, (bytearray(place.meta),), place.meta, wait=False)
                )
            ):
                self.unread.append(index)
                continue
            try:
                plan.keep(index, small_of(memory[start:at].tobytes(), key)[0])
            except DamagedArtifactError as error:
                raise _DamagedInBatchError(self.held[index], str(error)) from error
            plan.indices.append(index)
            for size, room, add in plan.slots:
                add(memory[at : at + size])
                at += room

    def copy(self, part: int, parts: int) -> None:
        """Copy what is mapped, and read a part of the rest."""
        if part == 0:
            for plan in self.plans.values():
                plan.copy(len(self.held))
        mine = self.unread[part::parts]
        is_cold = False
        for number, index in enumerate(mine):
            each = self.held[index]
            plan = self.plans[id(each.layout)]
            try:
                if not plan.is_flat or not each.place.is_plain or len(plan.specs) > _MOST_PIECES:
                    self._read_odd(index, each, plan)
                elif not self._read(index, each, plan, wait=is_cold):
                    is_cold = True
                    announce(self.held[other] for other in mine[number:])
                    self._read(index, each, plan, wait=True)
            except DamagedArtifactError as error:
                raise _DamagedInBatchError(each, str(error)) from error

    def _read(self, index: int, each: Held, plan: _Plan, *, wait: bool) -> bool:
        """Read and verify one artifact into its row; without `wait`, False if it has to wait."""
        place = each.place
        size = place.meta
        if size + plan.size != place.size:
            raise DamagedArtifactError("its record and its layout do not fit")
        data = bytearray(size)
        buffers: list[Buffer] = [data]
        targets = []
        for spec, rows in zip(plan.specs, plan.rows, strict=True):
            target = rows[index]  # type: ignore[index]
            targets.append(target)
            buffers.append(target)
            if spec.nbytes & 63:
                buffers.append(memoryview(_SCRAP)[: -spec.nbytes & 63])
        if not each.source.read(place.offset, buffers, place.size, wait=wait):
            return False
        meta = _checked(each, data)
        sums = meta.parts[4::5]
        for target, value in zip(targets, sums, strict=True):
            if checksum(target) != value:
                raise DamagedArtifactError("the checksum of a tensor of it is wrong")
        place.note_verified()
        plan.keep(index, meta.values)
        return True

    def _read_odd(self, index: int, each: Held, plan: _Plan) -> None:
        """Read an artifact with tensors inside of lists, or in several places of its pack."""
        made: list[object] = []
        targets: list[Buffer] = []
        for spec, rows in zip(plan.specs, plan.rows, strict=True):
            if rows is not None:
                made.append(None)
                targets.append(rows[index])
            else:
                tensor, memory = spec.new()
                made.append(tensor)
                targets.append(memory)
        plan.keep(index, fill(each, targets).values, made)


class _DamagedInBatchError(Exception):
    """One of the artifacts of a batch is not what was put."""

    def __init__(self, held: Held, reason: str) -> None:
        super().__init__(reason)
        self.held = held


def _names(kinds: Sequence[Held]) -> list[Hashable]:
    """Return the fields that all artifacts have."""
    first = kinds[0].layout.fields
    for each in kinds:
        fields = each.layout.fields
        if fields is None:
            message = f"Artifact {key_text(each.key)} is not a dict"
            raise BatchShapeError(message, hint="Read it with get(key).")
        if fields.keys() != (first or {}).keys():
            odd = set(fields) ^ set(first or {})
            message = (
                f"Artifacts {key_text(kinds[0].key)} and {key_text(each.key)} have different"
                f" fields: {', '.join(sorted(map(repr, odd)))}"
            )
            raise BatchShapeError(message, hint="Read artifacts with the same fields in one batch.")
    return list(first or {})


def _spec(kinds: Sequence[Held], name: Hashable, ragged: Ragged) -> TensorSpec | None:
    """Return the spec that all tensors of a field have; None if it becomes a list."""
    first = kinds[0]
    spec = first.layout.fields[name].tensor  # type: ignore[index]
    for each in kinds:
        other = each.layout.fields[name].tensor  # type: ignore[index]
        if other != spec:
            if ragged == "list":
                return None
            message = (
                f"{name!r} is {_words(spec)} in artifact {key_text(first.key)}"
                f" and {_words(other)} in {key_text(each.key)}"
            )
            hint = "Batch artifacts of one shape, or use ragged='list' or get(key)."
            raise BatchShapeError(message, hint=hint)
    return spec


def _words(spec: TensorSpec | None) -> str:
    return "no tensor" if spec is None else f"{spec.dtype} {list(spec.shape)} ({spec.kind})"


def read_batch(
    engine: Engine,
    held: Sequence[Held],
    *,
    out: Mapping[Any, object] | None = None,
    pinned: bool = False,
    threads: int = 1,
    ragged: Ragged = "raise",
    is_second: bool = False,
) -> dict[Any, Any]:
    """Return {field: stacked tensor, or list of values} of artifacts.

    What is damaged is read once more, with all others, before it is called so, and deleted.
    """
    if ragged not in ("raise", "list"):
        raise BatchShapeError(f'ragged is "raise" or "list", not {ragged!r}')
    if not held:
        return {}
    try:
        batch = _Batch(held, out, pinned=pinned, ragged=ragged)
        before = _major_faults()
        batch.prepare(probe=engine.probes > 0)
        # What is mapped is copied as fast as memory goes, by one thread.
        is_worth = batch.unread and batch.size >= _WORTH
        parts = min(threads, _MOST_THREADS, len(held)) if is_worth else 1
        jobs = [_threads().submit(batch.copy, part, parts) for part in range(1, parts)]
        try:
            batch.copy(0, max(1, parts))
        finally:
            # Also after an error: nobody may write into a batch that its owner has given up.
            errors = [job.exception() for job in jobs]
        for error in errors:
            if error is not None:
                raise error
        if _major_faults() != before:
            engine.probes = _PROBES
        elif engine.probes and not batch.unread:
            engine.probes -= 1
    except _DamagedInBatchError as error:
        for each in held:  # what this disk has of a tier may be damaged in more places than one
            each.source.distrust(each.place.offset, each.place.size)
        is_lost = is_damaged(error.held)
        if is_lost or is_second:
            raise settle(engine, error.held.key, error.held.place, error, delete=is_lost) from error
        return read_batch(
            engine, held, out=out, pinned=pinned, threads=1, ragged=ragged, is_second=True
        )
    return batch.result


def read_some(
    engine: Engine,
    some: Any,  # noqa: ANN401 - a sequence, or an array of numpy
    hold_some: Callable[[Any], Sequence[Held]],
    out: Mapping[Any, Any] | None,
    **options: Any,  # noqa: ANN401 - those of `read_batch`
) -> dict[Any, Any]:
    """Return a batch; in two halves, if it lies in more packs than there are descriptors for."""
    try:
        return read_batch(engine, hold_some(some), out=out, **options)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE) or len(some) == 1:
            raise
    engine.catalog.files.clear()
    middle, count = len(some) // 2, len(some)
    outs: list[Mapping[Any, Any] | None] = [None, None]
    if out is not None:
        outs = [
            {name: each[:middle] for name, each in out.items()},
            {name: each[middle:] for name, each in out.items()},
        ]
    first = read_some(engine, some[:middle], hold_some, outs[0], **options)
    second = read_some(engine, some[middle:], hold_some, outs[1], **options)
    joined: dict[Any, Any] = {}
    for name, each in first.items():
        if isinstance(each, list):
            joined[name] = each + second[name]
        elif out is not None and name in out:
            joined[name] = out[name][:count]
        elif isinstance(each, np.ndarray):
            joined[name] = np.concatenate((each, second[name]))
        else:
            joined[name] = sys.modules["torch"].cat((each, second[name]))
    return joined


def _major_faults() -> int:
    """Return how often this process has waited for the disk where it touched a mapping."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def announce(held: Iterable[Held]) -> None:
    """Tell the kernel, or the tier, what will be read; nobody waits for it.

    Tensors that an artifact shares with others are left out if its record is not at hand.
    """
    for each in held:
        meta = bytearray(each.place.meta)
        is_known = each.place.is_plain or each.source.read(
            each.place.offset, [meta], each.place.meta, wait=False
        )
        ranges = _ranges(each) if is_known else [(each.place.offset, each.place.size)]
        each.source.announce(ranges)


def _ranges(held: Held) -> list[tuple[int, int]]:
    """Return where the bytes of an artifact lie in its pack."""
    found = [(held.place.offset, held.place.size)]
    if not held.place.is_plain:
        with suppress(DamagedArtifactError):
            meta = read_meta(held)
            parts = (meta.part(number) for number in range(meta.head.parts))
            found += [
                (held.place.offset + part.offset, part.stored) for part in parts if part.offset < 0
            ]
    return found


class _Pool:
    threads: ThreadPoolExecutor | None = None
    gate = threading.Lock()


def _threads() -> ThreadPoolExecutor:
    """Return the threads that help with batches, for all sets of this process."""
    with _Pool.gate:
        if _Pool.threads is None:
            _Pool.threads = ThreadPoolExecutor(_MOST_THREADS, "smartcache-batch")
        return _Pool.threads


def _forget_threads() -> None:
    _Pool.threads = None
    _Pool.gate = threading.Lock()


os.register_at_fork(after_in_child=_forget_threads)


# selections


class Selection:
    """Artifacts of a set by their position in a list of keys, as they were when it was made.

    What is deleted or replaced later is still read, as long as its pack is there; what compaction
    has moved is looked up again. A selection holds a few columns in memory and no pack. It can be
    pickled: it travels as the set and the keys.
    """

    def __init__(
        self, engine: Engine, keys: Sequence[str], stored: Sequence[bytes], threads: int
    ) -> None:
        self._engine = engine
        self._keys = keys
        self._stored = stored
        self._threads = threads
        self._hashes, self._twins = hashes_of(stored, engine.catalog.seed)
        self._located: tuple[Table, Column] | None = self._locate()

    def _locate(self) -> tuple[Table, Column]:
        """Return a snapshot, and for each key its row there; -1: it has no artifact."""
        catalog = self._engine.catalog
        table = catalog.snapshot()
        rows = np.searchsorted(table.hash, self._hashes)
        if not len(table.hash):
            is_here = np.zeros(len(rows), bool)
        else:
            rows[rows == len(table.hash)] = 0
            is_here = (table.hash[rows] == self._hashes) & (table.twin[rows] == self._twins)
            for number in np.flatnonzero((table.hash[rows] == self._hashes) & ~is_here).tolist():
                hash_, twin = int(self._hashes[number]), int(self._twins[number])
                at = row_of(table.hash, table.twin, hash_, twin)
                rows[number], is_here[number] = max(at, 0), at >= 0
            is_here &= catalog.is_live(table)[rows]
        rows[~is_here] = -1
        return table, rows

    def _snapshot(self) -> tuple[Table, Column]:
        # In one piece: another thread may look them up again in this moment.
        located = self._located
        if located is None:
            raise ArtifactError("The selection was closed", hint="Make another one.")
        return located

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def keys(self) -> Sequence[str]:
        """The keys, as they were given."""
        return self._keys

    @property
    def missing(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The ordinals of keys that have no artifact."""
        return np.flatnonzero(self._snapshot()[1] < 0).astype(np.int64)

    def _held(self, ordinals: Sequence[int] | np.ndarray[Any, Any]) -> list[Held]:
        """Return artifacts with their packs open; those that were moved are looked up again."""
        engine = self._engine
        engine.refuse_closed()
        catalog = engine.catalog
        chosen = _positions(ordinals)
        catalog.refresh()  # who reads on has packs that are gone open no longer than that
        for _ in range(_TRIES):
            table, rows = self._snapshot()
            rows = rows[chosen]
            if (rows < 0).any():
                bad = chosen[rows < 0].tolist()
                raise engine.missing([self._stored[number] for number in bad])
            try:
                found = [
                    held(engine, self._stored[number], place, catalog.files[place.pack.name])
                    for number, place in zip(
                        chosen.tolist(), catalog.places(table, rows), strict=True
                    )
                ]  # fmt: skip
            except FileNotFoundError:
                self._located = self._locate()
                continue
            engine.hits += len(found)
            engine.note_rows(table, rows.tolist())
            return found
        raise engine.vanishing()

    def read(
        self,
        ordinals: Sequence[int] | np.ndarray[Any, Any],
        out: Mapping[Any, object] | None = None,
        *,
        pinned: bool = False,
        ragged: Ragged = "raise",
    ) -> dict[Any, Any]:
        """Return {field: one stacked tensor, or a list of values} of some of the artifacts.

        `out` gives tensors to be reused, by field. Tensors of a field that differ in shape or dtype
        are a BatchShapeError, or with ragged="list" a list.
        """
        return read_some(
            self._engine, ordinals, self._held, out, pinned=pinned, threads=self._threads,
            ragged=ragged,
        )  # fmt: skip

    def column(
        self, name: Hashable, ordinals: Sequence[int] | np.ndarray[Any, Any] | None = None
    ) -> list[Any]:
        """Return one field that is no tensor, of all artifacts or of some; no tensor is read."""
        chosen = np.arange(len(self)) if ordinals is None else _positions(ordinals)
        found: list[Any] = [None] * len(chosen)
        step = self._engine.catalog.files.most
        for start in range(0, len(chosen), step):
            for number, each in enumerate(self._held(chosen[start : start + step])):
                fields = each.layout.fields
                if fields is None or name not in fields:
                    message = f"Artifact {key_text(each.key)} has no field {name!r}"
                    raise BatchShapeError(message)
                node = fields[name]
                if node.tensor is not None and node.slot is not None:
                    hint = "Read it: selection.read(ordinals)."
                    raise BatchShapeError(f"{name!r} is a tensor", hint=hint)
                try:
                    meta = read_meta(each)
                except DamagedArtifactError as error:
                    raise settle(self._engine, each.key, each.place, error) from error
                found[start + number] = node.read(*each.layout.opened(meta.values), _no_tensor)
        return found

    def announce(self, ordinals: Sequence[int] | np.ndarray[Any, Any]) -> None:
        """Tell the kernel that artifacts will be read soon; those that are missing are left out."""
        chosen = _positions(ordinals)
        chosen = chosen[self._snapshot()[1][chosen] >= 0]
        step = self._engine.catalog.files.most
        for start in range(0, len(chosen), step):
            announce(self._held(chosen[start : start + step]))

    def close(self) -> None:
        """Let go of the columns."""
        self._located = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)


def _positions(ordinals: Sequence[int] | np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return ordinals as a column; BatchShapeError for anything but a list of whole numbers."""
    found = np.asarray(ordinals)
    if found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
        hint = "Give positions in the list of keys: selection.read([3, 5])."
        raise BatchShapeError("Ordinals are a list of whole numbers", hint=hint)
    return found.astype(np.int64)


def _no_tensor(slot: int) -> object:
    raise BatchShapeError(f"the field holds tensor {slot}", hint="Read it: selection.read(...).")
