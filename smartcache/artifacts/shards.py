"""A set as safetensors, for other programs: shards of whole artifacts, and an index of them.

    <name>-00001.safetensors    whole artifacts, up to a bound of bytes. Each tensor, small ones
                                too, is called KEY/field/...; its metadata has what is small
                                besides tensors in each artifact, as JSON
    index.json                  which set it is, and which shard has which key; written last, so
                                an export that has it is whole

A shard gets its name when all of it is on the disk. An export that is run again is written anew.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from smartcache.artifacts.artifactset import ArtifactSet
from smartcache.artifacts.carry import (
    INDEX,
    SHARDS_FORMAT,
    Carried,
    CarryPlan,
    alone,
    index_of,
    listed,
    named_at_last,
    read_artifact,
)
from smartcache.artifacts.engine.read import Encoded
from smartcache.artifacts.keys import key_text
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
)
from smartcache.progress import Progress
from smartcache.system.filesystems import need_room

_FULL_HEADER: Final = 16_000_000
"""Bytes of a header after which a shard is full; one artifact alone may have more."""
_MOST_HEADER: Final = 80_000_000
"""Bytes that one artifact may add: safetensors refuses a header of 100,000,000."""
_MOST_SHOWN: Final = 4096
"""Characters of a value that is written as JSON."""
_ESCAPED: Final = re.compile(r"[%/\x00-\x1f\x7f\ud800-\udfff]|^_(?=_metadata__$)")
_TORCH_CODES: Final = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32",
    "int32": "I32", "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16",
    "float32": "F32", "float64": "F64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
_CODES: Final = _TORCH_CODES | {
    TORCH[name]: code for name, code in _TORCH_CODES.items() if name in TORCH
}
"""By dtype, as layouts call it: what every release of safetensors knows. Others go as bytes."""


def plan_shards(opened: ArtifactSet, path: Path, shard_size: int) -> CarryPlan:
    """Plan to write a set to shards in a folder, in place of an earlier export of it."""
    if shard_size < 1:
        raise ConfigError(f"A shard has at least 1 byte, not {shard_size}")
    folder = opened._engine.folder  # noqa: SLF001
    about: dict[str, object] = {
        "format": SHARDS_FORMAT, "name": folder.name, "id": folder.id,
        "fingerprint": folder.fingerprint.to_json(),
    }  # fmt: skip
    index = index_of(path)
    if index is None and os.path.lexists(path / INDEX):
        message = f"{path / INDEX} is there already, and is no index of an export"
        raise DestinationExistsError(message, hint="Choose another folder.", path=path)
    old = dict(_shards_in(path))
    for each in (*old.values(), *([] if index is None else [index])):
        if each.get("id") != folder.id:
            message = f"{path} holds an export of another set: {each.get('name')}/{each.get('id')}"
            raise DestinationExistsError(message, hint="Choose another folder.", path=path)
    live = listed(opened)
    total = sum(size for _, _, size in live)

    def execute(progress: Progress) -> Carried:
        need_room(path, total, "The export")
        path.mkdir(parents=True, exist_ok=True)
        with alone(path / ".smartcache-export"):
            for each in (path / INDEX, *old):
                each.unlink(missing_ok=True)
            shards = _Shards(opened, path, shard_size, about)
            with progress("Exporting", total, "bytes") as job:
                for key, _, size in live:
                    shards.add(key, size)
                    job.advance(size)
                shards.finish()
            with named_at_last(path / INDEX) as file:
                file.write(json.dumps({**about, "artifacts": shards.written}).encode())
        return Carried(
            artifacts=len(shards.written), size=shards.size, problems=tuple(shards.problems)
        )

    return CarryPlan(
        sets=(f"{folder.name}/{folder.id}",), path=path, artifacts=len(live), size=total,
        _execute=execute,
    )  # fmt: skip


def _shards_in(path: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Go through the shards of ours in a folder, with what they say of their set."""
    from safetensors import SafetensorError, safe_open

    for each in sorted(path.glob("*.safetensors")):
        if each.is_symlink() or not each.is_file():
            continue
        with suppress(OSError, SafetensorError, ValueError, LookupError, RecursionError):
            with safe_open(each, framework="np") as file:
                about = json.loads((file.metadata() or {})["smartcache"])
            if isinstance(about, dict) and about.get("format") == SHARDS_FORMAT:
                yield each, about


class _Shards:
    """Shards of an export on their way to the disk, each in one step."""

    def __init__(
        self, opened: ArtifactSet, path: Path, shard_size: int, about: dict[str, object]
    ) -> None:
        self.path = path
        self.name = opened.name
        self.engine = opened._engine  # noqa: SLF001
        self.shard_size = shard_size
        self.about = json.dumps(about)
        self.written: dict[str, str] = {}
        """By key, the shard."""
        self.size = 0
        self.problems: list[str] = []
        self._number = 0
        self._begin()

    def _begin(self) -> None:
        self._keys: list[str] = []
        self._metadata = {"smartcache": self.about}
        self._tensors: dict[str, _Tensor] = {}
        self._data = self._header = 0

    def add(self, key: bytes, size: int) -> None:
        """Add an artifact; what was added before is written if the shard would be too large."""
        try:
            encoded = read_artifact(self.engine, key)
        except (DamagedArtifactError, LayoutError) as error:
            self.problems.append(f"{key_text(key)}: {error}")
            return
        if encoded is None:
            return  # deleted meanwhile
        tensors = _named(key, encoded)
        text = json.dumps(_document(key, encoded, tensors))
        header = len(text) * 5 // 4 + sum(200 + 6 * len(name) for name in tensors)
        if header > _MOST_HEADER:
            more = "more than a header of safetensors can hold; a folder can"
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
        """Write a shard; the largest elements come first, so that all of them are aligned."""
        if not self._keys:
            return
        path = None
        while path is None or path.exists():  # a file of somebody else's
            self._number += 1
            path = self.path / f"{self.name}-{self._number:05}.safetensors"
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
        self.written |= dict.fromkeys(self._keys, path.name)
        self._begin()


class _Tensor(NamedTuple):
    """A tensor as a shard has it."""

    spec: TensorSpec
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
            found[name] = _Tensor(layout.tensors[node.slot], encoded.tensors[node.slot])
        elif node.tensor is not None and node.place is not None:
            found[name] = _Tensor(node.tensor, fixed[node.place])
    return found


def _escape(part: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in part[0].encode("utf-8", "surrogatepass"))


def _document(key: bytes, encoded: Encoded, tensors: dict[str, _Tensor]) -> dict[str, object]:
    """Return what a shard says of an artifact besides its tensors."""
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
