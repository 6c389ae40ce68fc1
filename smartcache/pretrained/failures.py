"""Errors of the libraries in words that name the repo, the component and the cure.

What is wrong is looked up in the files there are, never read out of the library's message. Only
what is known better is said differently: every other error passes as it is.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from smartcache.errors import (
    MissingWeightsError,
    PretrainedError,
    SmartcacheError,
    UnknownClassError,
    WrongVariantError,
)
from smartcache.pretrained.call import (
    INDEX,
    STRATEGIES,
    Asked,
    free_bytes,
    is_memory_error,
    resolve_device,
    too_large,
)
from smartcache.pretrained.flag import LIBRARIES
from smartcache.pretrained.kinds import Folder, components_in, library_class

_log = logging.getLogger(__name__)
_WITHOUT_WEIGHTS = (
    "Extractor", "Guidance", "Processor", "Scheduler", "Tokenizer", "TokenizerFast",
)  # fmt: skip
"""How the classes of components end that have no weights."""
_WEIGHTS = re.compile(r".+\.(?:safetensors|bin)(?:\.index(?:\.[^.]+)?\.json)?")
_INDEX_VARIANT = re.compile(r".+\.index\.([^.]+)\.json")
_VARIANT = re.compile(r".+?(?:-\d+-of-\d+)?\.([^.]+?)(?:-\d+-of-\d+)?\.(?:safetensors|bin)")
_MAX_HEADER = 100 << 20


@contextmanager
def explained(asked: Asked) -> Iterator[None]:
    """Raise errors of the library in this block as ours where we know better what is wrong."""
    try:
        yield
    except SmartcacheError:
        raise
    except Exception as error:
        try:
            better = _diagnosed(asked, error)
        except (OSError, TypeError, ValueError) as failure:
            _log.debug("%s: it cannot be said what is wrong: %s", asked.source, failure)
            better = None
        if better is None:
            raise
        raise better from error


def _diagnosed(asked: Asked, error: Exception) -> PretrainedError | None:
    if is_memory_error(error):
        return _memory(asked)
    is_known = isinstance(error, OSError | ValueError | AttributeError)
    if not is_known or not asked.source or os.path.isfile(asked.source):
        return None
    files = _listed(asked)
    if files is None:
        return None
    named: Mapping[str, tuple[str, str]] = {}
    if asked.is_pipeline:
        named = components_in(Folder(asked.source, "", asked.kwargs).read(INDEX) or {})
    named = {name: each for name, each in named.items() if name not in asked.kwargs}
    unknown = None if isinstance(error, OSError) else _unknown_class(asked, named)
    if unknown is not None or isinstance(error, AttributeError):
        return unknown
    return _missing(asked, files, named)


def _unknown_class(asked: Asked, named: Mapping[str, tuple[str, str]]) -> UnknownClassError | None:
    """Return what a class is called that neither library has, and whose it is."""
    for name, (library, class_name) in named.items():
        if library in LIBRARIES and library_class(library, class_name) is None:
            return UnknownClassError(
                f"{name} of {asked.source} is of the class {class_name!r}, which "
                f"{library} does not have",
                hint=f"Update {library}, or load {name} yourself and pass it as {name}=...",
                component=name,
                source=asked.source,
            )
    return None


def _missing(
    asked: Asked, files: frozenset[str], named: Mapping[str, tuple[str, str]]
) -> PretrainedError | None:
    """Return which weights are not there: of which folder, variant, component or shard."""
    source, subfolder = asked.source, asked.subfolder
    if subfolder and not _inside(subfolder, files):
        there = sorted({name.partition("/")[0] for name in files if "/" in name})
        has = f"; it has {', '.join(there)}" if there else ""
        return MissingWeightsError(
            f"{source} has no folder {subfolder}{has}",
            hint="Check the subfolder and the revision.",
            component=subfolder,
            source=source,
        )
    if not (asked.is_pipeline or asked.is_model):
        return None
    names = [subfolder]
    if asked.is_pipeline:
        names = [name for name, (_, cls) in named.items() if not cls.endswith(_WITHOUT_WEIGHTS)]
    found = {name: list(filter(is_weights, _inside(name, files))) for name in names}
    variants = {variant_of(file) for each in found.values() for file in each}
    variant = asked.kwargs.get("variant")
    if isinstance(variant, str) and variants and variant not in variants:
        known = sorted(variants - {""})
        has = f"the variants {', '.join(known)}" if known else "only weights without a variant"
        return WrongVariantError(
            f"{_called(subfolder, source)} has no weights of the variant {variant!r}; it has {has}",
            variant=variant,
            variants=known,
            source=source,
        )
    is_safe = asked.kwargs.get("use_safetensors") is True
    for name, weights in found.items():
        what, hint = "", None
        gone = _missing_shards(os.path.join(source, name))
        if not weights:
            what = "has no weights"
        elif is_safe and not any(".safetensors" in each for each in weights):
            what = "has no weights in safetensors"
            hint = "Leave out use_safetensors: its weights are pickles, which can run code."
        elif gone:
            what, hint = f"lacks {', '.join(gone)}", "Download it again."
        if what:
            message = f"{_called(name, source)} {what}"
            return MissingWeightsError(message, hint=hint, component=name, source=source)
    return None


def _called(component: str, source: str) -> str:
    return f"{component} of {source}" if component else source


def _inside(folder: str, files: frozenset[str]) -> list[str]:
    """Return the names of the files right in a folder."""
    start = f"{folder}/" if folder else ""
    below = (name.removeprefix(start) for name in files if name.startswith(start))
    return [name for name in below if "/" not in name]


def is_weights(name: str) -> bool:
    """Say whether a file has weights that the libraries load, or lists files that have."""
    return _WEIGHTS.fullmatch(name) is not None and name != "training_args.bin"


def variant_of(name: str) -> str:
    """Return the variant of a weight file: "fp16" of `model.fp16.safetensors`; "" if none."""
    found = _INDEX_VARIANT.fullmatch(name) or _VARIANT.fullmatch(name.removesuffix(".index.json"))
    return found[1] if found is not None else ""


def _listed(asked: Asked) -> frozenset[str] | None:
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


def _missing_shards(folder: str) -> list[str]:
    """Return the files that an index in a folder names and that are not there."""
    missing: set[str] = set()
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        if is_weights(name) and name.endswith(".json"):
            said = json.loads(Path(folder, name).read_text("utf-8")).get("weight_map", {})
            missing |= {each for each in said.values() if not os.path.exists(f"{folder}/{each}")}
    return sorted(missing)


def _memory(asked: Asked) -> PretrainedError | None:
    """Return how much the library's own loading onto a device would have needed."""
    device = asked.placement.device if asked.placement is not None else None
    mapped = asked.kwargs.get("device_map")
    if isinstance(mapped, Mapping):
        mapped = next(iter(mapped.values()), None)
    if device is None and isinstance(mapped, str | int):
        device = resolve_device("auto" if mapped in STRATEGIES else mapped)
    if device is None:
        return None
    variant = asked.kwargs.get("variant") or ""
    dtype = asked.kwargs.get("dtype", asked.kwargs.get("torch_dtype"))
    folder = asked.folder(asked.kwargs.get("revision"))  # type: ignore[arg-type]
    needed = 0
    for name in () if folder is None else _below(os.fspath(folder)):
        base = name.rpartition("/")[2]
        if is_weights(base) and variant_of(base) == variant and not base.endswith(".json"):
            needed += _memory_of(Path(str(folder), name), dtype)
    free = free_bytes(device)
    return too_large(device, needed=needed, free=free, name=asked.subfolder, source=asked.source)


def _memory_of(path: Path, dtype: object) -> int:
    """Return about how many bytes a file's weights need in a dtype."""
    import torch

    if path.suffix != ".safetensors":
        return path.stat().st_size
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(min(length, _MAX_HEADER)))
    tensors = [each for name, each in header.items() if name != "__metadata__"]
    if isinstance(dtype, torch.dtype):
        return sum(int(math.prod(each["shape"])) for each in tensors) * dtype.itemsize
    return sum(int(each["data_offsets"][1] - each["data_offsets"][0]) for each in tensors)
