"""What a model is by its content: its class, its config, and the bytes of its weights.

Where it came from does not count. Which weight files are read is the libraries' choice; it is
foreseen only where it is plain, and where it is not, every weight file of the folder counts: that
is stricter and never wrong. Digests are the same on every machine, and users keep them: the texts
that they are made of never change.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from smartcache.pretrained.call import CONFIG
from smartcache.pretrained.flag import LIBRARIES
from smartcache.store.store import Store
from smartcache.system.hashing import hash_file

if TYPE_CHECKING:
    import torch

_DEPTH = 40
"""What is nested deeper is somebody's graph of objects, or a list that holds itself."""
_ORIGIN_FIELDS = frozenset(
    ("_name_or_path", "_diffusers_version", "transformers_version", "_commit_hash")
)
"""Fields of a config that tell where a model came from, not what it is."""
_TOKENIZER_ORIGIN = _ORIGIN_FIELDS | {"name_or_path", "special_tokens_map_file", "tokenizer_file"}
"""What tells where a tokenizer came from, and nothing of what it does."""
_TEXTS = (".jinja", ".json", ".model", ".tiktoken", ".txt", ".vocab")
"""What tokenizers and processors are made of; a README beside them changes nothing."""
_CONFIGS = re.compile(r"config(\.[\d.]+)?\.json|generation_config\.json")
# An adapter is loaded on top without being asked for; a module is code, whatever its weights are.
_UNKNOWN = re.compile(r"adapter_config\.json|adapter_model\..*|.*\.py")
_WEIGHTS = re.compile(
    r".*\.(safetensors|bin|pt|pth|ckpt|msgpack|h5|onnx|onnx_data|pb|gguf|flashpack|index\..*json)"
)
_OF_DIFFUSERS = "diffusion_pytorch_model"
_SAFE_STEMS = ("model", _OF_DIFFUSERS)
_PICKLE_STEMS = ("pytorch_model", _OF_DIFFUSERS)
_PLAIN_NAME = re.compile(r"[\w.-]+")
_EXPLICIT = "transformers_weights"
"""A field of a config that names the weight file."""


class NotComparableError(TypeError):
    """A value has no text of its own: two of them cannot be told apart, or be called equal."""


def canonical(value: object, depth: int = _DEPTH) -> str:
    """Return a plain value as one text: equal values, equal texts, and only those.

    The order of a mapping or a set does not count. Types count: True is not 1, a tuple is no list.
    NotComparableError for objects that are not plain: nobody may take one for equal to another.
    """
    if not depth:
        raise NotComparableError("nested too deeply")
    kind, torch = type(value), sys.modules.get("torch")
    if kind in _WRITERS:
        return _WRITERS[kind](value, depth - 1)
    if isinstance(value, Enum):
        return f"enum {_class_text(value)}.{value.name}"
    if isinstance(value, os.PathLike):
        return f"path {json.dumps(os.fsdecode(value))}"
    if torch is not None and isinstance(value, torch.dtype | torch.device):
        return f"{kind.__name__} {value}"
    # Settings of a library, such as its configs for quantisation, say by `to_dict` what they are.
    is_library = kind.__module__.partition(".")[0] in LIBRARIES
    to_dict = getattr(value, "to_dict", None) if is_library else None
    said = to_dict() if callable(to_dict) else getattr(value, "__dict__", None)
    if not is_library or not isinstance(said, Mapping) or hasattr(value, "parameters"):
        raise NotComparableError(f"{kind.__name__} has no canonical form")
    return f"{_class_text(value)} {_mapping(dict(said), depth - 1)}"


def _mapping(value: dict[object, object], depth: int) -> str:
    items = value.items()
    pairs = sorted(f"{canonical(key, depth)}: {canonical(each, depth)}" for key, each in items)
    return f"{{{', '.join(pairs)}}}"


def _items(value: Iterable[object], depth: int) -> list[str]:
    return [canonical(each, depth) for each in value]


_WRITERS: dict[type, Callable[[Any, int], str]] = {
    type(None): lambda _value, _depth: "none",
    bool: lambda value, _depth: str(value).lower(),
    int: lambda value, _depth: f"{value}",
    # hex is exact, and tells 0.0 from -0.0; every nan is one value here.
    float: lambda value, _depth: f"float {value.hex()}",
    complex: lambda value, _depth: f"complex {value!r}",
    str: lambda value, _depth: json.dumps(value),
    bytes: lambda value, _depth: f"bytes {value.hex()}",
    list: lambda value, depth: f"[{', '.join(_items(value, depth))}]",
    tuple: lambda value, depth: f"({', '.join(_items(value, depth))})",
    dict: _mapping,
    set: lambda value, depth: f"set {{{', '.join(sorted(_items(value, depth)))}}}",
    frozenset: lambda value, depth: f"frozenset {{{', '.join(sorted(_items(value, depth)))}}}",
}


def _class_text(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _digest_of(value: object) -> str:
    return blake3(canonical(value).encode("utf-8", "surrogatepass")).hexdigest()


def _file_digest(path: Path, store: Store | None) -> str:
    """Return the digest of a file's bytes, out of the store's memory if it is known there."""
    return (hash_file(path)[0] if store is None else store.digest_of(path)).digest


@dataclass(frozen=True)
class Content:
    """A model by its content, the same on every machine.

    Names in `weights` are without the variant: `model.fp16.safetensors` here may be
    `model.safetensors` in another repo. If it is not plain which files are loaded, `is_plain` is
    False and all of them are there under their own names.
    """

    class_name: str
    config: str
    """The digest of its configs, without the fields that name its origin."""
    weights: tuple[tuple[str, str], ...]
    is_plain: bool = True
    written_by: str = field(default="", compare=False)
    """The version of diffusers that wrote the config."""

    @cached_property
    def digest(self) -> str:
        """One digest for all of it."""
        return _digest_of([self.class_name, self.config, [list(pair) for pair in self.weights]])


def content_of(
    folder: Path,
    class_name: str,
    *,
    variant: str | None,
    use_safetensors: bool | None,
    store: Store | None,
) -> Content | None:
    """Return what a model in a folder is; None: there are no weights, or it cannot be said.

    Digests come from the store's memory, so that no byte of a known file is read. Without a store
    every file is hashed: that takes less time than to load it, and equal components are found.
    """
    try:
        names = sorted(each.name for each in os.scandir(folder) if each.is_file())
    except OSError:
        return None
    if CONFIG not in names or any(_UNKNOWN.fullmatch(name) for name in names):
        return None
    try:
        configs = {name: _read(folder / name) for name in names if _CONFIGS.fullmatch(name)}
        chosen = _choose(folder, names, variant=variant, use_safetensors=use_safetensors)
        if _EXPLICIT in configs[CONFIG]:
            chosen = None
        is_plain = chosen is not None
        if chosen is None:
            chosen = {name: name for name in names if _WEIGHTS.fullmatch(name)}
        weights = []
        for file, name in chosen.items():
            path = (folder / file).resolve(strict=True)
            is_index = file.endswith(".json")
            told = _index_digest(path, chosen) if is_index else _file_digest(path, store)
            weights.append((name, told))
    except (OSError, ValueError, RecursionError):
        return None
    if not weights:
        return None
    return Content(
        class_name,
        _digest_of({name: _without_origin(configs[name]) for name in configs}),
        tuple(sorted(weights)),
        is_plain,
        str(configs[CONFIG].get("_diffusers_version") or ""),
    )


def _choose(
    folder: Path, names: list[str], *, variant: str | None, use_safetensors: bool | None
) -> dict[str, str] | None:
    """Return the files that are loaded, each with its name without the variant.

    None where it is not plain which ones: libraries differ when there are both a whole file and
    shards, and each has names of its own. {} if there are no weights at all.
    """
    there = set(names)
    if len({name.startswith(_OF_DIFFUSERS) for name in names if _WEIGHTS.fullmatch(name)}) > 1:
        return None
    # Of a component that has no such variant pipelines take the usual weights.
    has_variant = variant is not None and any(
        name.split(".")[1].startswith(variant) for name in names if "." in name
    )
    used = variant if has_variant else None
    if used is not None and (not _PLAIN_NAME.fullmatch(used) or _is_old_sharding(names, used)):
        return None
    kinds = [(_SAFE_STEMS, "safetensors")] if use_safetensors is not False else []
    kinds += [(_PICKLE_STEMS, "bin")] if use_safetensors is not True else []
    for stems, suffix in kinds:
        whole = {f"{stem}.{suffix}": _with_variant(f"{stem}.{suffix}", used) for stem in stems}
        index = {f"{name}.index.json": _with_variant(f"{name}.index.json", used) for name in whole}
        found = {name: file for name, file in {**whole, **index}.items() if file in there}
        if len(found) > 1:
            return None
        for name, file in found.items():
            return {file: name} if name in whole else _shards(folder, file, name, used)
    return None if used is not None or any(map(_WEIGHTS.fullmatch, names)) else {}


def _with_variant(name: str, variant: str | None) -> str:
    stem, _, suffix = name.rpartition(".")
    return name if variant is None else f"{stem}.{variant}.{suffix}"


def _is_old_sharding(names: list[str], variant: str) -> bool:
    old = re.compile(rf".*-\d+-of-\d+\.{re.escape(variant)}\..*|.*\.{re.escape(variant)}\.index.*")
    other = re.compile(rf".*\.index\.{re.escape(variant)}\.json")
    return any(old.fullmatch(name) and not other.fullmatch(name) for name in names)


def _shards(folder: Path, file: str, name: str, variant: str | None) -> dict[str, str] | None:
    """Return the index and the files it names; None if it names others than those beside it."""
    shards = set(_weight_map(_read(folder / file)).values())
    if not all(_PLAIN_NAME.fullmatch(shard) for shard in shards):
        return None
    part = "" if variant is None else f".{variant}"
    return {file: name, **{shard: shard.replace(part, "", 1) for shard in sorted(shards)}}


def _weight_map(index: Mapping[str, object]) -> dict[str, str]:
    found = index.get("weight_map")
    if not isinstance(found, dict):
        raise ValueError("an index without a weight map")  # noqa: TRY004 - a bad file
    return {str(key): str(value) for key, value in found.items()}


def _index_digest(path: Path, files: Mapping[str, str]) -> str:
    """Return the digest of an index, with the names under which its files count here."""
    index = _read(path)
    shards = {key: files.get(file, file) for key, file in _weight_map(index).items()}
    return _digest_of({**index, "weight_map": shards})


def _read(path: Path) -> dict[str, object]:
    said = json.loads(path.read_text("utf-8"))
    if not isinstance(said, dict):
        raise ValueError(f"{path.name} is not an object")  # noqa: TRY004 - a bad file
    return said


def _without_origin(value: object) -> object:
    if isinstance(value, dict):
        kept = {key: each for key, each in value.items() if key not in _ORIGIN_FIELDS}
        return {key: _without_origin(each) for key, each in kept.items()}
    if isinstance(value, list):
        return [_without_origin(each) for each in value]
    return value


# What the result of an encoder depends on


def digest_of_module(
    folder: Path, module: torch.nn.Module, arguments: Mapping[str, object], store: Store | None
) -> str:
    """Return the digest of a model's class, config and weights, which were loaded from `folder`."""
    name = type(module).__name__
    variant, safe = arguments.get("variant"), arguments.get("use_safetensors")
    content = content_of(
        folder,
        name,
        variant=variant if isinstance(variant, str) else None,
        use_safetensors=safe if isinstance(safe, bool) else None,
        store=store,
    )
    if content is not None:
        return content.digest
    # Which files were loaded is not plain: then all of them count.
    return _digest_of([name, *_files(folder, store, every=True)])


def digest_of_files(folder: Path, store: Store | None) -> str:
    """Return the digest of what a tokenizer or processor is made of."""
    return _digest_of(_files(folder, store, every=False))


def _files(folder: Path, store: Store | None, *, every: bool) -> list[str]:
    found = []
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.name.startswith("."):
            continue
        if path.suffix == ".json":
            value = json.loads(path.read_text("utf-8"))
            if isinstance(value, dict):
                value = {key: value[key] for key in value if key not in _TOKENIZER_ORIGIN}
            found += [path.relative_to(folder).as_posix(), _digest_of(value)]
        elif every or path.suffix in _TEXTS:
            found += [path.relative_to(folder).as_posix(), _file_digest(path.resolve(), store)]
    return found


def dtype_of(module: torch.nn.Module) -> torch.dtype | None:
    """Return the dtype that a module computes in: that of its first weights of real numbers."""
    weights = itertools.chain(module.parameters(), module.buffers())
    return next((each.dtype for each in weights if each.is_floating_point()), None)


def quantisation_of(module: torch.nn.Module) -> str:
    """Return how a model's weights are quantised, as text; "" if they are not."""
    settings = getattr(getattr(module, "config", None), "quantization_config", None)
    if settings is None:
        return ""
    try:
        return canonical(settings)
    except NotComparableError:
        return str(settings)
