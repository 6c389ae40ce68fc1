"""Weight files by their names and headers: which there are, of which variant, of which size."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

from smartcache.pretrained.arguments import Asked

_WEIGHTS = re.compile(r".+\.(?:safetensors|bin)(?:\.index(?:\.[^.]+)?\.json)?")
_INDEX_VARIANT = re.compile(r".+\.index\.([^.]+)\.json")
_VARIANT = re.compile(r".+?(?:-\d+-of-\d+)?\.([^.]+?)(?:-\d+-of-\d+)?\.(?:safetensors|bin)")
_MAX_HEADER = 100 << 20


def is_weights(name: str) -> bool:
    """Say whether a file has weights that the libraries load, or lists files that have."""
    return _WEIGHTS.fullmatch(name) is not None and name != "training_args.bin"


def variant_of(name: str) -> str:
    """Return the variant of a weight file: "fp16" of `model.fp16.safetensors`; "" if none."""
    index = _INDEX_VARIANT.fullmatch(name)
    if index is not None:
        return index[1]
    found = _VARIANT.fullmatch(name.removesuffix(".index.json"))
    return found[1] if found is not None else ""


def listed(asked: Asked) -> frozenset[str] | None:
    """Return the names of all files of a folder or repo; None if the Hub cannot be asked."""
    if os.path.isdir(asked.source):
        return frozenset(_below(asked.source))
    from huggingface_hub import constants, list_repo_files

    if constants.HF_HUB_OFFLINE or asked.kwargs.get("local_files_only"):
        return None  # What is not in the cache may well be on the Hub.
    options = {name: asked.kwargs.get(name) for name in ("revision", "token")}
    try:
        return frozenset(list_repo_files(asked.source, **options))  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001 - then the library's own error says what is wrong
        return None


def _below(folder: str) -> Iterator[str]:
    for directory, _, names in os.walk(folder, followlinks=True):
        start = os.path.relpath(directory, folder).replace(os.sep, "/")
        yield from (name if start == "." else f"{start}/{name}" for name in names)


def missing_shards(folder: str) -> list[str]:
    """Return the files that an index in a folder names and that are not there."""
    missing: set[str] = set()
    for name in os.listdir(folder):
        if is_weights(name) and name.endswith(".json"):
            said = json.loads(Path(folder, name).read_text("utf-8")).get("weight_map", {})
            missing |= {each for each in said.values() if not os.path.exists(f"{folder}/{each}")}
    return sorted(missing)


def loaded_bytes(asked: Asked) -> int:
    """Return about how many bytes of memory the weights need in the dtype asked for; 0: unknown."""
    folder = _folder_of(asked)
    if folder is None:
        return 0
    variant = asked.kwargs.get("variant")
    dtype = asked.kwargs.get("dtype", asked.kwargs.get("torch_dtype"))
    total = 0
    for name in _below(os.fspath(folder)):
        base = name.rpartition("/")[2]
        is_loaded = is_weights(base) and variant_of(base) == (variant or "")
        if is_loaded and not base.endswith(".json"):
            total += _memory_of(folder / name, dtype)
    return total


def _folder_of(asked: Asked) -> Path | None:
    """Return where the files lie: a folder, or the snapshot in the HF cache."""
    if os.path.isdir(asked.source):
        return Path(asked.source, asked.subfolder)
    from huggingface_hub import try_to_load_from_cache

    start = f"{asked.subfolder}/" if asked.subfolder else ""
    for name in ("model_index.json", f"{start}config.json"):
        options = {each: asked.kwargs.get(each) for each in ("cache_dir", "revision")}
        found = try_to_load_from_cache(asked.source, name, **options)  # type: ignore[arg-type]
        if isinstance(found, str):
            return Path(found).parent
    return None


def _memory_of(path: Path, dtype: object) -> int:
    import torch

    if path.suffix != ".safetensors":
        return path.stat().st_size
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(min(length, _MAX_HEADER)))
    size = dtype.itemsize if isinstance(dtype, torch.dtype) else None
    tensors = [each for name, each in header.items() if name != "__metadata__"]
    return sum(
        each["data_offsets"][1] - each["data_offsets"][0]
        if size is None
        else math.prod(each["shape"]) * size
        for each in tensors
    )
