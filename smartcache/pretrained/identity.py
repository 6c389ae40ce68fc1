"""What a model is by its content: its class, its config, and the bytes of its weights.

Where it came from does not count. Which weight files are read is the libraries' choice; it is
foreseen only where it is plain, and where it is not, every weight file of the folder counts: that
is stricter and never wrong.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from blake3 import blake3

from smartcache.pretrained.canonical import canonical
from smartcache.store import Store
from smartcache.system import hash_file

ORIGIN_FIELDS = frozenset(
    ("_name_or_path", "_diffusers_version", "transformers_version", "_commit_hash")
)
"""Fields of a config that tell where a model came from, not what it is."""
CONFIG = "config.json"
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

    @cached_property
    def digest(self) -> str:
        """One digest for all of it."""
        weights = [list(pair) for pair in self.weights]
        return _text_digest(canonical([self.class_name, self.config, weights]))


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
        chosen = choose(folder, names, variant=variant, use_safetensors=use_safetensors)
        if _EXPLICIT in configs[CONFIG]:
            chosen = None
        is_plain = chosen is not None
        files = {name: name for name in names if _WEIGHTS.fullmatch(name)}
        weights = _digests(folder, files if chosen is None else chosen, store)
    except (OSError, ValueError, RecursionError):
        return None
    if not weights:
        return None
    config = _text_digest(canonical({name: _without_origin(configs[name]) for name in configs}))
    return Content(class_name, config, weights, is_plain)


def weight_names(folder: Path) -> list[str]:
    """Return the names of all weight files of a folder."""
    files = (each.name for each in os.scandir(folder) if each.is_file())
    return sorted(name for name in files if _WEIGHTS.fullmatch(name))


def choose(
    folder: Path, names: list[str], *, variant: str | None, use_safetensors: bool | None
) -> dict[str, str] | None:
    """Return the files that are loaded, each with its name without the variant.

    None where it is not plain which ones: libraries differ when there are both a whole file and
    shards, and each has names of its own. {} if there are no weights at all.
    """
    there = set(names)
    if len({name.startswith(_OF_DIFFUSERS) for name in names if _WEIGHTS.fullmatch(name)}) > 1:
        return None
    used = variant if variant is not None and _has_variant(names, variant) else None
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


def _has_variant(names: list[str], variant: str) -> bool:
    """Say whether a pipeline takes the variant here; for other components it takes the rest."""
    return any(name.split(".")[1].startswith(variant) for name in names if "." in name)


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


def _digests(
    folder: Path, files: Mapping[str, str], store: Store | None
) -> tuple[tuple[str, str], ...]:
    """Return names and digests of the files, in the order of the names."""
    found = []
    for file, name in files.items():
        path = (folder / file).resolve(strict=True)
        if file.endswith(".json"):
            found.append((name, _text_digest(canonical(_index_text(_read(path), files)))))
        elif store is None:
            found.append((name, hash_file(path)[0].digest))
        else:
            found.append((name, store.digest_of(path).digest))
    return tuple(sorted(found))


def _index_text(index: Mapping[str, object], files: Mapping[str, str]) -> dict[str, object]:
    """Return what an index says, with the names under which the files count here."""
    shards = {key: files.get(file, file) for key, file in _weight_map(index).items()}
    return {**index, "weight_map": shards}


def _read(path: Path) -> dict[str, object]:
    said = json.loads(path.read_text("utf-8"))
    if not isinstance(said, dict):
        raise ValueError(f"{path.name} is not an object")  # noqa: TRY004 - a bad file
    return said


def _without_origin(value: object) -> object:
    if isinstance(value, dict):
        kept = {key: each for key, each in value.items() if key not in ORIGIN_FIELDS}
        return {key: _without_origin(each) for key, each in kept.items()}
    if isinstance(value, list):
        return [_without_origin(each) for each in value]
    return value


def _text_digest(text: str) -> str:
    return blake3(text.encode("utf-8", "surrogatepass")).hexdigest()
