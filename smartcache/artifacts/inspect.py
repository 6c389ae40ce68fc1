"""What is in a set and in an artifact, told without reading a tensor, and without using it.

Looking does not count as a use: what is due to be evicted stays due.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

import numpy as np

from smartcache.artifacts.engine import read
from smartcache.artifacts.engine.engine import Engine
from smartcache.artifacts.engine.records import ARTIFACT
from smartcache.artifacts.keys import check_key, key_text
from smartcache.artifacts.values.encode import decode_metadata
from smartcache.artifacts.values.layout import Layout
from smartcache.artifacts.values.refusals import path_text
from smartcache.artifacts.values.tensors import TensorSpec
from smartcache.errors import (
    ArtifactError,
    ArtifactNotFoundError,
    BadKeyError,
    DamagedArtifactError,
    LayoutError,
)

_SHORTEST = 4
_MOST_LIKE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A part of an artifact: a tensor by what it is, anything else by its value."""

    name: str
    """Its key in the dict, as a path has it; empty if the artifact is no dict."""
    tensor: TensorSpec | None = None
    value: object = None
    problem: str = ""
    """Why it cannot be shown: a codec that this program does not have, for instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactInfo:
    """One artifact, without its tensors."""

    key: str
    created_at: datetime
    used_at: datetime
    expires_at: datetime | None
    is_pinned: bool
    size: int
    """Bytes of its record; a tensor that an earlier record of the pack has is not among them."""
    parts: tuple[Shown, ...]
    metadata: Shown


def structures(engine: Engine) -> list[tuple[Shown, ...]]:
    """Return the parts of each kind of artifact that the set has seen; values are left out."""
    engine.catalog.refresh()
    bodies = {body: None for pack in engine.catalog.known_packs() for body in pack.layouts.values()}
    found: dict[tuple[Shown, ...], None] = {}
    for body in bodies:
        try:
            layout = Layout.parse(body)
        except LayoutError as error:
            found[(Shown(name="", problem=str(error)),)] = None
            continue
        if layout.fields is None:
            specs = (layout.tensor,) if layout.tensor else layout.tensors or (None,)
            found[tuple(Shown(name="", tensor=spec) for spec in specs)] = None
        else:
            fields = layout.fields.items()
            found[
                tuple(Shown(name=path_text([key]), tensor=node.tensor) for key, node in fields)
            ] = None
    return list(found)


def find_key(engine: Engine, text: str) -> bytes:
    """Return the stored form of a key, given whole or by its beginning.

    ArtifactNotFoundError if there is none, BadKeyError if several begin so.
    """
    stored = check_key(text)
    if engine.catalog.find(stored, expired=True) is not None:
        return stored
    like = []
    if len(text) >= _SHORTEST:
        table = engine.catalog.snapshot()
        rows = np.flatnonzero(table.kind == ARTIFACT).tolist()
        keys = (key for _, key in engine.catalog.keys_of(table, rows))
        like = [key for key in keys if key_text(key).startswith(text)]
    if len(like) == 1:
        return like[0]
    name = engine.name
    if like:
        shown = ", ".join(key_text(key)[:16] for key in sorted(like)[:_MOST_LIKE])
        message = f"Several artifacts of {name} have keys that begin with {text}"
        raise BadKeyError(message, hint=f"Write more of it: {shown} ...")
    hint = f"'smartcache artifacts show {name} -q' lists the keys."
    if len(text) < _SHORTEST:
        hint = f"Write at least {_SHORTEST} characters of a key; {hint}"
    raise ArtifactNotFoundError(f"{name} has no artifact {text}", hint=hint, keys=(text,))


def inspect(engine: Engine, key: bytes) -> ArtifactInfo:
    """Return what an artifact is: its structure, small values, metadata and times."""
    catalog = engine.catalog
    table = catalog.snapshot()
    found = engine.look(key)
    if found is None:
        raise engine.missing([key])
    place, source = found
    try:
        layout = catalog.layout(place.pack, place.layout)
        meta = read.read_meta(read.Held(key, place, source, layout))
    except DamagedArtifactError as error:
        message = f"Artifact {key_text(key)} of {engine.name} is damaged: {error}"
        raise DamagedArtifactError(message, hint="Run 'smartcache artifacts verify'.") from error
    hash_ = np.uint64(catalog.hashes(key)[0])
    times = engine.used_at(table)[table.hash == hash_]
    expires = place.expires
    return ArtifactInfo(
        key=key_text(key),
        created_at=datetime.fromtimestamp(meta.head.created, UTC),
        used_at=datetime.fromtimestamp(int(times.max(initial=meta.head.created)), UTC),
        expires_at=datetime.fromtimestamp(expires, UTC) if expires else None,
        is_pinned=catalog.is_pinned(key),
        size=place.size,
        parts=_parts(layout, meta.values),
        metadata=_shown("metadata", *_attempt(lambda: decode_metadata(meta.metadata))),
    )


def _parts(layout: Layout, inline: bytes | memoryview) -> tuple[Shown, ...]:
    tensor = layout.tensors.__getitem__
    if layout.tensor is not None:
        return (Shown(name="", tensor=layout.tensor),)
    if layout.fields is None:
        value, problem = _attempt(lambda: layout.decode(inline, tensor))
        return (_shown("", value, problem),)
    found = []
    for key, node in layout.fields.items():
        if node.tensor is not None:
            found.append(Shown(name=path_text([key]), tensor=node.tensor))
        else:
            value, problem = _attempt(partial(layout.decode_field, inline, key, tensor))
            found.append(_shown(path_text([key]), value, problem))
    return tuple(found)


def _shown(name: str, value: object, problem: str) -> Shown:
    if isinstance(value, TensorSpec):
        return Shown(name=name, tensor=value)
    return Shown(name=name, value=value, problem=problem)


def _attempt(read_: Callable[[], object]) -> tuple[object, str]:
    """Return a value, or why there is none here: no such codec, no torch."""
    try:
        return read_(), ""
    except (ArtifactError, ImportError) as error:
        return None, str(error)
