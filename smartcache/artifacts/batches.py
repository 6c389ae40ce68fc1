"""Random batches: many artifacts at once, each tensor copied once into the memory of the batch."""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import count, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

from smartcache.artifacts.diskwaits import blocks_read, waits
from smartcache.artifacts.engine import SetEngine
from smartcache.artifacts.keys import key_text
from smartcache.artifacts.layouts import Layout
from smartcache.artifacts.located import Located, Quick
from smartcache.artifacts.reading import (
    ColdError,
    announce,
    check_room,
    fetch,
    inline_of,
    persistently,
    quick_way,
    read_verified,
    remember,
)
from smartcache.artifacts.tensors import TensorSpec
from smartcache.errors import (
    BatchShapeError,
    DamagedArtifactError,
    LayoutError,
    SetFormatError,
)

if TYPE_CHECKING:
    import numpy as np

_WORTH = 2 << 20
"""Bytes of a batch from which a second thread pays."""
_WORTH_EACH = 1 << 20
"""Bytes of an artifact from which reading several at a time pays: below, it is mostly Python."""
_MOST_THREADS = 8
_TRIES = 5
"""How often a batch is begun anew because of what others put meanwhile."""


class _ReplacedError(Exception):
    """An artifact has become one of another kind while its batch was read."""


class _Field(NamedTuple):
    """A field whose tensors become one."""

    spec: TensorSpec
    rows: np.ndarray[Any, Any]


class _Batch:
    """Artifacts on their way into one dict of stacked tensors and lists."""

    def __init__(
        self,
        engine: SetEngine,
        found: Sequence[Located],
        out: Mapping[Any, object] | None,
        *,
        pinned: bool,
    ) -> None:
        self.engine = engine
        self.found = found
        self.result: dict[Hashable, object] = {}
        self.stacked: dict[Hashable, _Field] = {}
        self.listed: dict[Hashable, list[object]] = {}
        self.copies: list[tuple[Any, int, Any]] = []
        """Rows of a field, which of them, and the bytes that belong there."""
        self.unread: list[tuple[int, _Plan]] = []
        self.is_cold = False
        """Whether some of the unread were not in the page cache."""
        kinds = _kinds(found)
        names = _names(kinds)
        for each in found:
            if not each.is_verified:
                persistently(engine, each, partial(check_room, engine.packs))
        self._refuse_shorter()
        for name in names:
            spec = _spec(kinds, name)
            if spec is None:
                self.result[name] = self.listed[name] = [None] * len(found)
                continue
            given = None if out is None else out.get(name)
            batch = spec.new_batch(len(found), pinned=pinned) if given is None else given
            rows = spec.rows(batch)
            if len(rows) < len(found):
                message = f"The buffer for {name!r} has room for {len(rows)} of {len(found)}"
                raise BatchShapeError(message, hint="Pass a larger one, or none.")
            self.stacked[name] = _Field(spec, rows)
            self.result[name] = batch if len(rows) == len(found) else batch[: len(found)]  # type: ignore[index]

    def _refuse_shorter(self) -> None:
        """Look once at every pack that is mapped: one that was truncated is read instead."""
        packs = {pack for each in self.found if each.quick is not None for pack in each.quick.packs}
        if any(pack.is_shorter for pack in packs):
            for pack in packs:
                pack.unmap()
            self.engine.memory.let_go()
            for each in self.found:  # also those that have no row yet
                each.quick = None

    @property
    def size(self) -> int:
        """The bytes that are copied."""
        return sum(field.spec.nbytes for field in self.stacked.values()) * len(self.found)

    def prepare(self) -> None:
        """Get the small values of all artifacts that can be copied from a mapping.

        All of them before the first copy, and the copies in one go: a copy leaves nothing of the
        interpreter in the processor's cache, and all Python after it takes three times as long.
        """
        is_cold = self.engine.is_cold
        if not is_cold and self._prepare_alike():
            return
        plans: dict[int, _Plan] = {}
        for index, found in enumerate(self.found):
            plan = plans.get(id(found.layout))
            if plan is None:
                plan = plans[id(found.layout)] = _Plan(self, found.layout)
            quick = found.quick  # once: other threads let go of it
            if quick is not None and quick.values is not None and plan.is_plain and not is_cold:
                for name, values in plan.lists:
                    value = quick.values[name]
                    values[index] = value.copy() if type(value) is list else value
            else:
                quick = self._prepare_one(index, found, plan)
            if quick is None:
                self.unread.append((index, plan))
            else:
                self.copies += zip(plan.rows, repeat(index), quick.views, strict=False)

    def _prepare_alike(self) -> bool:
        """Do the same for the usual batch, field by field: all of one layout, and known by now."""
        layout = self.found[0].layout
        plan = _Plan(self, layout)
        quicks = [each.quick for each in self.found if each.layout is layout]
        known = [quick for quick in quicks if quick is not None and quick.values is not None]
        if not plan.is_plain or len(known) < len(self.found):
            return False
        columns = zip(*(quick.values.values() for quick in known), strict=True)  # type: ignore[union-attr]
        for values, column in zip(self.listed.values(), columns, strict=True):
            values[:] = [each.copy() if type(each) is list else each for each in column]
        for slot, rows in enumerate(plan.rows):
            self.copies += zip(repeat(rows), count(), [quick.views[slot] for quick in known])
        return True

    def _prepare_one(self, index: int, found: Located, plan: _Plan) -> Quick | None:
        """Read the small values of one artifact; None: all of it has to be read."""
        if not found.is_verified or not plan.is_flat:
            return None
        try:
            quick = found.quick or quick_way(self.engine.packs, found)
            if any(view is None for view in quick.views):  # its pack is not mapped so far yet
                return None
            plan.keep(index, found, inline_of(quick, found))
        except (ColdError, FileNotFoundError, LayoutError, SetFormatError, DamagedArtifactError):
            return None
        return quick

    def copy(self, part: int, parts: int) -> None:
        """Copy a part of what is mapped, and read a part of the rest."""
        all_of = len(self.copies)
        for rows, index, view in self.copies[all_of * part // parts : all_of * (part + 1) // parts]:
            rows[index] = view
        readers = parts if self.size >= len(self.found) * _WORTH_EACH else 1
        for index, plan in self.unread[part::readers] if part < readers else ():
            try:
                plan.read(index, self.found[index])
            except (FileNotFoundError, DamagedArtifactError, LayoutError, SetFormatError):
                self.read_again(index)

    def announce(self) -> None:
        """Have the kernel read all that is not copied from a mapping, before it is waited for.

        What is in the page cache is passed over quickly. Where much is not, artifacts are not
        mapped: most of them will be gone from memory when they are read the next time.
        """
        before = blocks_read()
        announce(self.engine.packs, (self.found[index] for index, _ in self.unread))
        self.is_cold = blocks_read() != before

    def read_again(self, index: int) -> None:
        """Read one artifact, wherever compaction has moved it; damage is told."""

        def read(found: Located) -> None:
            if found.layout is not self.found[index].layout and not self._has_room_for(found):
                raise _ReplacedError
            _Plan(self, found.layout).read(index, found)

        persistently(self.engine, self.found[index], read)

    def _has_room_for(self, found: Located) -> bool:
        """Say whether what an artifact has become still fits into this batch."""
        fields = found.layout.fields
        if fields is None or fields.keys() != self.result.keys():
            return False
        specs = {name: field.spec for name, field in self.stacked.items()}
        return all(node.tensor == specs.get(name) for name, node in fields.items())


class _Plan:
    """How artifacts of one layout go into a batch."""

    def __init__(self, batch: _Batch, layout: Layout) -> None:
        self.batch = batch
        fields = layout.fields or {}
        slots = {node.slot: name for name, node in fields.items() if node.slot is not None}
        self.rows = [
            batch.stacked[name].rows
            if (name := slots.get(slot)) is not None and name in batch.stacked
            else None
            for slot in range(len(layout.tensors))
        ]
        """For each slot the rows of its field; None: it is inside of another value."""
        self.specs = layout.tensors
        self.is_flat = all(rows is not None for rows in self.rows)
        self.small = [
            (name, field) for name, field in batch.stacked.items() if fields[name].slot is None
        ]
        """Fields of tensors that are so small that they lie among the other values."""
        self.lists = list(batch.listed.items())
        self.is_plain = self.is_flat and not self.small

    def read(self, index: int, found: Located) -> None:
        """Read one artifact into its row."""
        if self.is_flat:
            made: Sequence[object] = self.rows  # whatever: these are not looked at
            targets = [rows[index] for rows in self.rows]  # type: ignore[index]
        else:
            made, targets = self._targets(index)
        is_first = not found.is_verified
        packs = self.batch.engine.packs
        read = read_verified if self.batch.is_cold else fetch
        inline = read(packs, found, targets)
        value = self.keep(index, found, inline, made)
        if is_first and self.is_plain and not self.batch.is_cold:
            remember(packs, found, value)

    def keep(
        self, index: int, found: Located, inline: memoryview, made: Sequence[object] = ()
    ) -> object:
        """Keep the small values of an artifact; return all that were read for it."""
        listed = self.batch.listed
        if not listed and not self.small:
            return {}
        value: Any = found.layout.decode(inline, (made or self.rows).__getitem__)
        for name, values in listed.items():
            each = value[name]
            values[index] = each.copy() if type(each) is list else each
        for name, field in self.small:
            field.rows[index] = _bytes_of(field.spec, value[name])
        return value

    def _targets(self, index: int) -> tuple[list[object], list[Any]]:
        import numpy as np

        made: list[object] = []
        targets: list[Any] = []
        for spec, rows in zip(self.specs, self.rows, strict=True):
            if rows is not None:
                made.append(None)
                targets.append(rows[index])
            else:
                tensor, memory = spec.new()
                made.append(tensor)
                targets.append(np.frombuffer(memory, np.uint8))
        return made, targets


def _bytes_of(spec: TensorSpec, tensor: object) -> np.ndarray[Any, Any]:
    """Return the bytes of a small tensor."""
    batch: Any = tensor
    rows: np.ndarray[Any, Any] = spec.rows(batch.reshape((1, *spec.shape)))
    return rows[0]  # type: ignore[no-any-return]


def _kinds(found: Sequence[Located]) -> list[Located]:
    """Return one artifact of each layout, the first one first."""
    first = found[0]
    others = {id(each.layout): each for each in reversed(found) if each.layout is not first.layout}
    return [first, *others.values()]


def _names(kinds: Sequence[Located]) -> list[Hashable]:
    """Return the fields that all artifacts have."""
    first = kinds[0].layout
    for each in kinds:
        if each.layout.fields is None:
            message = f"Artifact {key_text(each.key)} is not a dict"
            raise BatchShapeError(message, hint="Read it with get(key).")
        if each.layout is not first and each.layout.fields.keys() != (first.fields or {}).keys():
            odd = set(each.layout.fields) ^ set(first.fields or {})
            message = (
                f"Artifacts {key_text(kinds[0].key)} and {key_text(each.key)} have different"
                f" fields: {', '.join(sorted(map(repr, odd)))}"
            )
            raise BatchShapeError(message, hint="Read artifacts with the same fields in one batch.")
    return list(first.fields or {})


def _spec(kinds: Sequence[Located], name: Hashable) -> TensorSpec | None:
    """Return the spec that all tensors of a field have; None if it is no tensor anywhere."""
    first = kinds[0]
    spec = first.layout.fields[name].tensor  # type: ignore[index]
    for each in kinds:
        other = each.layout.fields[name].tensor  # type: ignore[index]
        if other != spec:
            message = (
                f"{name!r} is {_words(spec)} in artifact {key_text(first.key)}"
                f" and {_words(other)} in {key_text(each.key)}"
            )
            raise BatchShapeError(message, hint="Batch artifacts of one shape, or use get(key).")
    return spec


def _words(spec: TensorSpec | None) -> str:
    return "no tensor" if spec is None else f"{spec.dtype} {list(spec.shape)} ({spec.kind})"


def read_batch(
    engine: SetEngine,
    keys: Sequence[bytes],
    *,
    out: Mapping[Any, object] | None,
    pinned: bool,
    threads: int,
) -> dict[Any, object]:
    """Return {field: stacked tensor, or list of values} of artifacts."""
    if not keys:
        return {}
    for _ in range(_TRIES):
        with suppress(_ReplacedError):
            found = engine.need(keys)
            return _read(_Batch(engine, found, out, pinned=pinned), threads)
    message = f"Artifacts of {engine.folder.name} are replaced faster than they can be read"
    raise BatchShapeError(message, hint="Try again, or give all of them one shape.")


def _read(batch: _Batch, threads: int) -> dict[Any, object]:
    engine, found = batch.engine, batch.found
    batch.prepare()
    if batch.unread:
        batch.announce()
    before = waits()
    parts = min(threads, _MOST_THREADS, len(found)) if batch.size >= _WORTH else 1
    jobs = [_threads().submit(batch.copy, part, parts) for part in range(1, parts)]
    try:
        batch.copy(0, max(1, parts))
    finally:
        # Also after an error: nobody may write into a batch that its owner has given up.
        errors = [job.exception() for job in jobs]
    engine.note_waits(waited=waits() != before, unread=len(batch.unread))
    for error in errors:
        if error is not None:
            raise error
    return batch.result


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


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)
