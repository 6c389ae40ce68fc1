"""A set as safetensors: shards that any program reads, and that bring every artifact back exactly.

    <name>-00001.safetensors    whole artifacts, up to a bound of bytes. Each tensor, small ones
                                too, is called KEY/field/...; its metadata describes each artifact:
                                layout, inline bytes and metadata as they were encoded (base64),
                                which tensors they refer to, and its digest
    index.json                  which set it is, and which shard has which key; written last, so
                                an export that has it is whole

A shard gets its name when all of it is on the disk, and is never changed. An export that is run
again reads the headers of the shards and writes what they lack. A shard with something that was
deleted, replaced or unpinned since, or is past its time, is removed, and the rest written again.
"""

from __future__ import annotations

import base64
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from blake3 import blake3

from smartcache.artifacts.artifactset import ArtifactSet
from smartcache.artifacts.carry import (
    INDEX,
    Arrival,
    Carried,
    CarryPlan,
    Origin,
    alone,
    check_encoded,
    listed,
    named_at_last,
    read_artifact,
)
from smartcache.artifacts.engine.engine import Engine
from smartcache.artifacts.engine.read import Encoded
from smartcache.artifacts.keys import check_key, key_text
from smartcache.artifacts.setfolder import Fingerprint, Options, check_name
from smartcache.artifacts.values.encode import decode_metadata
from smartcache.artifacts.values.layout import known_layout, no_tensor
from smartcache.artifacts.values.refusals import shown
from smartcache.artifacts.values.tensors import TORCH, TensorSpec
from smartcache.errors import (
    ArtifactError,
    ConfigError,
    DamagedArtifactError,
    DestinationExistsError,
    LayoutError,
    SetFormatError,
    SmartcacheError,
)
from smartcache.progress import Progress
from smartcache.system import need_room

_FORMAT: Final = "smartcache safetensors 1"
_MOST_INDEX: Final = 1 << 30
_MOST_HEADER: Final = 100_000_000
"""Bytes: safetensors refuses a file whose header is longer."""
_FULL_HEADER: Final = 16_000_000
"""Bytes of a header after which a shard is full; one artifact alone may have more."""
_MOST_SHOWN: Final = 4096
"""Characters of a value that is also written so that people can read it."""
_FOR_EVER: Final = (1 << 32) - 1
_SHARD: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}-([0-9]{5,9})\.safetensors")
_ESCAPED: Final = re.compile(r"[%/\x00-\x1f\x7f\ud800-\udfff]|^_(?=_metadata__$)")
_TO_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_AGAIN: Final = "Export it again; nothing was imported."
_TORCH_CODES: Final = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32",
    "int32": "I32", "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16",
    "float32": "F32", "float64": "F64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
_CODES: Final = _TORCH_CODES | {
    TORCH[name]: code for name, code in _TORCH_CODES.items() if name in TORCH
}
"""By dtype, as layouts call it: what every release of safetensors knows. Others go as bytes."""


# writing


def plan_shards(opened: ArtifactSet, path: Path, shard_size: int) -> CarryPlan:
    """Plan to write what whole shards do not have, and to remove those that have something old."""
    if shard_size < 1:
        raise ConfigError(f"A shard has at least 1 byte, not {shard_size}")
    engine = opened._engine  # noqa: SLF001
    folder = engine.folder
    about = {
        "format": _FORMAT, "name": folder.name, "id": folder.id,
        "fingerprint": folder.fingerprint.to_json(), "options": asdict(folder.options),
    }  # fmt: skip
    index = read_index(path)
    if index is None and os.path.lexists(path / INDEX):
        message = f"{path / INDEX} is there already, and is no index of an export"
        raise DestinationExistsError(message, hint="Choose another folder.", path=path)
    _refuse_other(path, folder.id, about if index is None else index)
    live = listed(opened)
    pinned = engine.catalog.pinned()
    current = {key_text(key): (place.seq, key in pinned) for key, place, _ in live}
    have: dict[str, str] = {}
    stale: list[Path] = []
    for shard in shards_in(path):
        _refuse_other(path, folder.id, shard.about)
        keys = {each["key"]: (each.get("seq"), each.get("pinned")) for each in shard.artifacts}
        if (
            shard.about.get("instance") == folder.instance and shard.is_whole
            and all(current.get(key) == state for key, state in keys.items())
            and have.keys().isdisjoint(keys)
        ):  # fmt: skip
            have |= dict.fromkeys(keys, shard.path.name)
        else:
            stale.append(shard.path)
    missing = [each for each in live if key_text(each[0]) not in have]
    total = sum(size for _, _, size in missing)

    def execute(progress: Progress) -> Carried:
        need_room(path, total, "The export")
        path.mkdir(parents=True, exist_ok=True)
        with alone(path / ".smartcache-export"):
            if stale or missing:
                (path / INDEX).unlink(missing_ok=True)
            for each in stale:
                each.unlink(missing_ok=True)
            shards = _Shards(path, engine, shard_size, {**about, "instance": folder.instance})
            with progress("Exporting", total, "bytes") as job:
                for key, place, size in missing:
                    shards.add(key, place.seq, size, is_pinned=key in pinned)
                    job.advance(size)
                shards.finish()
            with named_at_last(path / INDEX) as file:
                file.write(json.dumps({**about, "artifacts": have | shards.written}).encode())
        return Carried(
            artifacts=len(shards.written), size=shards.size, kept=len(have),
            problems=tuple(shards.problems),
        )  # fmt: skip

    return CarryPlan(
        sets=(f"{folder.name}/{folder.id}",), path=path, artifacts=len(missing), size=total,
        kept=len(have), _execute=execute,
    )  # fmt: skip


def _refuse_other(path: Path, id_: str, about: Mapping[str, object]) -> None:
    if about.get("id") != id_:
        message = f"{path} holds an export of another set: {about.get('name')}/{about.get('id')}"
        raise DestinationExistsError(message, hint="Choose another folder.", path=path)


class _Shards:
    """Shards of an export on their way to the disk, each in one step."""

    def __init__(
        self, path: Path, engine: Engine, shard_size: int, about: dict[str, object]
    ) -> None:
        self.path = path
        self.engine = engine
        self.shard_size = shard_size
        self.about = about
        self.written: dict[str, str] = {}
        """By key, the shard."""
        self.size = 0
        self.problems: list[str] = []
        numbers = (_SHARD.fullmatch(name) for name in os.listdir(path))
        self._number = max((int(found[1]) for found in numbers if found), default=0)
        self._begin()

    def _begin(self) -> None:
        self._keys: list[str] = []
        self._metadata = {"smartcache": json.dumps(self.about)}
        self._tensors: dict[str, _Tensor] = {}
        self._data = self._header = 0

    def add(self, key: bytes, seq: int, size: int, *, is_pinned: bool) -> None:
        """Add an artifact; what was added before is written if the shard would be too large."""
        try:
            encoded = read_artifact(self.engine, key)
        except (DamagedArtifactError, LayoutError) as error:
            self.problems.append(f"{key_text(key)}: {error}")
            return
        if encoded is None:
            return  # deleted meanwhile
        tensors = _named(key, encoded)
        text = json.dumps(_document(key, seq, encoded, tensors, is_pinned=is_pinned))
        header = len(text) * 5 // 4 + sum(200 + 6 * len(name) for name in tensors)
        if header > _MOST_HEADER - _FULL_HEADER:
            more = "more than a header of safetensors can hold; a folder or a tar can"
            self.problems.append(f"{key_text(key)}: {len(text):,} bytes besides tensors, {more}")
            return
        data = sum(len(each.data) for each in tensors.values())
        is_full = self._data + data > self.shard_size or self._header + header > _FULL_HEADER
        if self._keys and is_full:
            self.finish()
        self._metadata[f"artifact:{len(self._keys)}"] = text
        self._keys.append(key_text(key))
        self._tensors |= tensors
        self._data += data
        self._header += header
        self.size += size

    def finish(self) -> None:
        """Write a shard; it has its name when all of it is on the disk, and safetensors reads it.

        The largest elements come first, as safetensors has it: so all of them are aligned.
        """
        if not self._keys:
            return
        from safetensors import safe_open

        self._number += 1
        path = self.path / f"{self.about['name']}-{self._number:05}.safetensors"
        header: dict[str, object] = {"__metadata__": self._metadata}
        at = 0
        ordered = sorted(self._tensors.items(), key=lambda each: -each[1].width)
        for name, each in ordered:
            end = at + len(each.data)
            header[name] = {"dtype": each.code, "shape": each.shape, "data_offsets": [at, end]}
            at = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with named_at_last(path) as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for _, each in ordered:
                file.write(each.data)
            file.flush()
            with safe_open(file.name, framework="np"):
                pass
        self.written |= dict.fromkeys(self._keys, path.name)
        self._begin()


class _Tensor(NamedTuple):
    """A tensor as a shard has it."""

    spec: TensorSpec
    slot: int | None
    """Its number among those of the layout; None: it is also among the inline bytes."""
    data: bytes | memoryview

    @property
    def code(self) -> str:
        """What safetensors calls its dtype; bytes, if it does not know it."""
        return _CODES.get(self.spec.dtype, "U8")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape if self.spec.dtype in _CODES else (self.spec.nbytes,)

    @property
    def width(self) -> int:
        """The bits of an element."""
        return next((bits for bits in (64, 32, 16) if self.code.endswith(str(bits))), 8)


def _named(key: bytes, encoded: Encoded) -> dict[str, _Tensor]:
    """Return the tensors of an artifact, small ones too, by the names that they get in a shard.

    A name is the key and the steps to the tensor. What would be no part of a name is written as in
    a URL, so no two keys share one, and "%n2" is no such thing.
    """
    layout = known_layout(encoded.layout)
    fixed = layout.opened(encoded.inline)[0]
    found: dict[str, _Tensor] = {}
    for steps, node in layout.root.tensors():
        words = [key_text(key), *(each if isinstance(each, str) else shown(each) for each in steps)]
        name = first = "/".join(_ESCAPED.sub(_escape, word) for word in words)
        number = 1
        while name in found:  # 1 and "1" are two keys of a dict
            number += 1
            name = f"{first}%n{number}"
        if node.slot is not None:
            found[name] = _Tensor(layout.tensors[node.slot], node.slot, encoded.tensors[node.slot])
        elif node.tensor is not None and node.place is not None:
            found[name] = _Tensor(node.tensor, None, fixed[node.place])
    return found


def _escape(part: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in part[0].encode("utf-8", "surrogatepass"))


def _document(
    key: bytes, seq: int, encoded: Encoded, tensors: Mapping[str, _Tensor], *, is_pinned: bool
) -> dict[str, object]:
    """Return what a shard says of an artifact; `values`, `about` and `bytes` are for people."""
    slots = {each.slot: name for name, each in tensors.items() if each.slot is not None}
    layout = known_layout(encoded.layout)
    if layout.fields is None:
        values = _shown(lambda: layout.decode(encoded.inline, no_tensor))
    else:
        values = {
            name: _shown(partial(layout.decode_field, encoded.inline, name, no_tensor))
            for name, node in layout.fields.items()
            if isinstance(name, str) and node.tensor is None
        }
    return {
        "key": key_text(key),
        "layout": base64.b64encode(encoded.layout).decode(),
        "inline": base64.b64encode(encoded.inline).decode(),
        "metadata": base64.b64encode(encoded.metadata).decode(),
        "expires": encoded.expires,
        "pinned": is_pinned,
        "slots": [slots[number] for number in range(len(slots))],
        "digest": _digest(encoded),
        "seq": seq,
        "values": values,
        "about": _shown(lambda: decode_metadata(encoded.metadata)),
        "bytes": {
            name: {"dtype": each.spec.dtype, "shape": each.spec.shape}
            for name, each in tensors.items()
            if each.spec.dtype not in _CODES
        },
    }


def _shown(decode: Callable[[], object]) -> object:
    """Return a small value that JSON can say; else None."""
    try:
        value = decode()
        if len(json.dumps(value, allow_nan=False)) <= _MOST_SHOWN:
            return value
    except (ArtifactError, ImportError, TypeError, ValueError, RecursionError):
        pass  # needs a codec or a library, holds tensors, or is nothing that JSON has
    return None


def _digest(encoded: Encoded) -> str:
    digest = blake3(encoded.layout + encoded.inline + encoded.metadata)
    for tensor in encoded.tensors:
        digest.update(tensor)
    return digest.hexdigest()


# reading


class _Shard(NamedTuple):
    """The header of a shard."""

    path: Path
    about: dict[str, Any]
    """Which set it is of."""
    artifacts: list[dict[str, Any]]
    """What is said of each, as it stands there."""
    spans: dict[str, Any]
    """By tensor: where it begins and ends behind the header; not looked at yet."""
    start: int
    size: int
    """Bytes of the file."""

    @property
    def is_whole(self) -> bool:
        """Whether the file ends where its last tensor does."""
        ends = (span[1] for span in map(self.span, self.spans) if span is not None)
        return self.start + max(ends, default=0) == self.size

    def span(self, name: object) -> tuple[int, int] | None:
        """Return where a tensor is within its file; None: there is no such tensor."""
        found = self.spans.get(name) if isinstance(name, str) else None
        offsets = found.get("data_offsets") if isinstance(found, dict) else None
        if not isinstance(offsets, list) or [type(each) for each in offsets] != [int, int]:
            return None
        begin, end = offsets
        return (begin, end) if 0 <= begin <= end <= self.size - self.start else None


def read_shard(path: Path) -> _Shard | None:
    """Read the header of a shard; None if the file is none of ours."""
    try:
        with open(os.open(path, _TO_READ), "rb") as file:
            status = os.fstat(file.fileno())
            length = int.from_bytes(file.read(8), "little")
            if not stat.S_ISREG(status.st_mode) or length > min(_MOST_HEADER, status.st_size):
                return None
            header = json.loads(file.read(length))
        metadata = header.pop("__metadata__")
        about = json.loads(metadata["smartcache"])
        if about["format"] != _FORMAT:
            return None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    except OSError as error:
        if os.path.islink(path) or path.is_dir():
            return None
        raise SetFormatError(f"{path} cannot be read: {error.strerror}", path=path) from error
    try:
        documents = [json.loads(text) for name, text in metadata.items() if name != "smartcache"]
    except (ValueError, TypeError, RecursionError) as error:
        raise SetFormatError(f"{path} is damaged: {error}", hint=_AGAIN, path=path) from error
    if not all(isinstance(each, dict) and isinstance(each.get("key"), str) for each in documents):
        message = f"{path} is damaged: it has an artifact without a key"
        raise SetFormatError(message, hint=_AGAIN, path=path)
    return _Shard(path, about, documents, header, 8 + length, status.st_size)


def shards_in(path: Path) -> Iterator[_Shard]:
    """Go through the shards of a folder."""
    with suppress(FileNotFoundError):
        for name in sorted(filter(_SHARD.fullmatch, os.listdir(path))):
            if (shard := read_shard(path / name)) is not None:
                yield shard


def read_index(path: Path) -> dict[str, Any] | None:
    """Read the index.json of an export as safetensors; None if there is none, or another one."""
    try:
        with open(os.open(path / INDEX, _TO_READ), "rb") as file:
            index = json.loads(file.read(_MOST_INDEX))
        return index if index["format"] == _FORMAT else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def indexed_origin(path: Path, index: dict[str, Any]) -> Origin:
    """Return the set of an export that is whole: all that its index names must be there."""
    artifacts = index.get("artifacts")
    shards: dict[Path, set[str]] = {}
    for key, name in artifacts.items() if isinstance(artifacts, dict) else ():
        if not isinstance(name, str) or _SHARD.fullmatch(name) is None:
            message = f"{path / INDEX} names a shard that cannot be one: {name!r:.80}"
            raise SetFormatError(message, hint=_AGAIN, path=path)
        shards.setdefault(path / name, set()).add(key)
    return shards_origin(shards, index)


def shards_origin(shards: Mapping[Path, set[str]], about: Mapping[str, Any]) -> Origin:
    """Return the set of some shards, each with the keys that it must have at least."""
    try:
        name, fingerprint = check_name(about["name"]), Fingerprint.from_json(about["fingerprint"])
        if fingerprint.id(name) != about["id"]:
            raise SetFormatError("its id is another one")
        options = Options.from_json(about["options"])
    except (SmartcacheError, AttributeError, KeyError, TypeError, RecursionError) as error:
        message = f"The export does not say which set it is of: {error}"
        raise SetFormatError(message, hint=_AGAIN) from error

    def arrivals() -> Iterator[Arrival]:
        for path, keys in shards.items():
            shard = _whole(path, about["id"], keys)
            with open(os.open(path, _TO_READ), "rb") as file:
                for document in shard.artifacts:
                    try:
                        arrival = _arrival(shard, document, file)
                    except ArtifactError as error:
                        message = f"{path} is damaged: {document['key']!r:.80}: {error}"
                        raise SetFormatError(message, hint=_AGAIN, path=path) from error
                    if arrival is not None:
                        yield arrival

    return Origin(name, fingerprint, options, arrivals)


def _whole(path: Path, id_: str, keys: set[str]) -> _Shard:
    """Read the header of a shard that must be whole, of a set, and have some keys."""
    shard = read_shard(path)
    if shard is None or not shard.is_whole:
        raise SetFormatError(f"{path} is cut off or damaged", hint=_AGAIN, path=path)
    if shard.about.get("id") != id_:
        raise SetFormatError(f"{path} is of another set", hint=_AGAIN, path=path)
    if lost := keys.difference(document["key"] for document in shard.artifacts):
        message = f"{path} lacks an artifact of the export: {min(lost)!r:.80}"
        raise SetFormatError(message, hint=_AGAIN, path=path)
    return shard


def _arrival(shard: _Shard, document: Mapping[str, Any], file: IO[bytes]) -> Arrival | None:
    """Return an artifact of a shard, its description looked at; None if it is past its time."""
    key = check_key(document["key"])
    try:
        layout, inline, about = (
            base64.b64decode(document[name], validate=True)
            for name in ("layout", "inline", "metadata")
        )
        slots, expires = document["slots"], document["expires"]
    except (KeyError, TypeError, ValueError) as error:
        raise LayoutError(f"it is not described: {error}") from error
    if type(expires) is not int or not 0 <= expires <= _FOR_EVER:
        raise LayoutError("it ends at no time that there is")
    spans = [shard.span(name) for name in slots] if isinstance(slots, list) else [None]
    there = [span for span in spans if span is not None]
    sizes = [end - begin for begin, end in there]
    if len(there) < len(spans) or sum(sizes) > shard.size:
        raise LayoutError("a tensor of it is missing")
    check_encoded(Encoded(layout, inline, [], about, expires), sizes)
    is_pinned = document.get("pinned") is True
    if 0 < expires <= time.time() and not is_pinned:
        return None

    def read() -> Encoded:
        found = Encoded(layout, inline, [], about, expires)
        for (begin, _), size in zip(there, sizes, strict=True):
            found.tensors.append(memoryview(bytearray(size)))
            file.seek(shard.start + begin)
            file.readinto(found.tensors[-1])  # type: ignore[attr-defined]
        if _digest(found) != document.get("digest"):
            raise DamagedArtifactError("its bytes are not those that were exported")
        return found

    return Arrival(key, len(layout) + len(inline) + len(about) + sum(sizes), is_pinned, read)
