"""What is in a set and in an artifact, told without reading a tensor, and without using it.

Looking does not count as a use: what is due to be evicted stays due.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from datetime import UTC, datetime

from smartcache.artifacts.codec import Layout
from smartcache.artifacts.engine import SetEngine
from smartcache.artifacts.keys import check_key, key_text
from smartcache.artifacts.located import Located
from smartcache.artifacts.reading import read_record
from smartcache.artifacts.refusals import path_text
from smartcache.artifacts.tensors import TensorSpec
from smartcache.artifacts.writing import decode_metadata
from smartcache.errors import (
    ArtifactError,
    ArtifactNotFoundError,
    BadKeyError,
    DamagedArtifactError,
    LayoutError,
    SetFormatError,
)

_SHORTEST = 4
_MOST_LIKE = 4
_DIGITS = 64


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
    """Bytes of its tensors; equal ones of other artifacts are kept once."""
    parts: tuple[Shown, ...]
    metadata: Shown


def structures(engine: SetEngine) -> list[tuple[Shown, ...]]:
    """Return the parts of each kind of artifact that the set has seen; values are left out."""
    found: list[tuple[Shown, ...]] = []
    for _, body in engine.index.layouts().values():
        try:
            layout = Layout.parse(body)
        except LayoutError as error:
            found.append((Shown(name="", problem=str(error)),))
            continue
        fields = layout.fields
        if fields is None:
            specs = layout.tensors or (None,)
            found.append(tuple(Shown(name="", tensor=spec) for spec in specs))
        else:
            found.append(
                tuple(
                    Shown(name=path_text([key]), tensor=node.tensor) for key, node in fields.items()
                )
            )
    return found


def find_key(engine: SetEngine, text: str) -> bytes:
    """Return the stored form of a key, given whole or by its beginning.

    ArtifactNotFoundError if there is none, BadKeyError if several begin so.
    """
    stored = check_key(text)
    if engine.has(stored):
        return stored
    like = list(_beginning(engine, text)) if len(text) >= _SHORTEST else []
    if len(like) == 1:
        return like[0]
    name = engine.folder.name
    if like:
        shown = ", ".join(key_text(key)[:16] for key in like[: _MOST_LIKE - 1])
        message = f"Several artifacts of {name} have keys that begin with {text}"
        raise BadKeyError(message, hint=f"Write more of it: {shown} ...")
    hint = f"'smartcache artifacts show {name} -q' lists the keys."
    raise ArtifactNotFoundError(f"{name} has no artifact {text}", hint=hint, keys=(text,))


def _beginning(engine: SetEngine, text: str) -> list[bytes]:
    """Return some stored keys that begin so: of the user's own, and of those that are digests."""
    own = b"\x02" + text.encode("utf-8", "surrogatepass")
    found = [key for key in _from(engine, own) if key.startswith(own)]
    if len(text) <= _DIGITS and not text.strip("0123456789abcdef"):
        first = b"\x01" + bytes.fromhex(text.ljust(_DIGITS, "0"))
        found += [
            key
            for key in _from(engine, first)
            if key[:1] == b"\x01" and key[1:].hex().startswith(text)
        ]
    return found


def _from(engine: SetEngine, first: bytes) -> list[bytes]:
    before = first[:-1] + bytes((first[-1] - 1,)) if first[-1] else first[:-1]
    rows = engine.index.keys_after(before, _MOST_LIKE)
    return [key for key in rows if key >= first]


def inspect(engine: SetEngine, key: bytes) -> ArtifactInfo:
    """Return what an artifact is: its structure, small values, metadata and times."""
    entry = engine.index.entry(key)
    if entry is None:
        message = f"{engine.folder.name} has no artifact {key_text(key)}"
        raise ArtifactNotFoundError(message, keys=(key_text(key),))
    digest, layout = engine.layout(entry.layout)
    found = Located(key, entry.seq, entry.place, entry.length, digest, layout, entry.uids)
    try:
        record = read_record(engine.packs, found)
    except (OSError, SetFormatError) as error:
        message = f"Artifact {key_text(key)} of {engine.folder.name} is damaged: {error}"
        raise DamagedArtifactError(message, hint="Run 'smartcache artifacts verify'.") from error
    expires = entry.expires_at
    return ArtifactInfo(
        key=key_text(key),
        created_at=datetime.fromtimestamp(record.created_at, UTC),
        used_at=datetime.fromtimestamp(entry.used_at, UTC),
        expires_at=datetime.fromtimestamp(expires, UTC) if expires else None,
        is_pinned=entry.is_pinned,
        size=sum(spec.nbytes for spec in layout.tensors),
        parts=_parts(layout, record.inline),
        metadata=_shown("metadata", *_attempt(lambda: decode_metadata(record.metadata))),
    )


def _parts(layout: Layout, inline: bytes | memoryview) -> tuple[Shown, ...]:
    tensor = layout.tensors.__getitem__
    if layout.fields is None:
        value, problem = _attempt(lambda: layout.decode(inline, tensor))
        return (_shown("", value, problem),)
    found = []
    for key, node in layout.fields.items():
        if node.tensor is not None:
            found.append(Shown(name=path_text([key]), tensor=node.tensor))
        else:
            value, problem = _attempt(_field(layout, inline, key))
            found.append(_shown(path_text([key]), value, problem))
    return tuple(found)


def _field(layout: Layout, inline: bytes | memoryview, name: Hashable) -> Callable[[], object]:
    return lambda: layout.decode_field(inline, name, layout.tensors.__getitem__)


def _shown(name: str, value: object, problem: str) -> Shown:
    if isinstance(value, TensorSpec):
        return Shown(name=name, tensor=value)
    return Shown(name=name, value=value, problem=problem)


def _attempt(read: Callable[[], object]) -> tuple[object, str]:
    """Return a value, or why there is none here: no such codec, no torch."""
    try:
        return read(), ""
    except (ArtifactError, ImportError) as error:
        return None, str(error)
