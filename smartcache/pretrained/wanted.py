"""What of a call may be shared, and what must be equal for that.

Everything that can make the library load something else is part of a key: the content, the class,
the library's arguments, torch's defaults in this moment. An argument whose effect cannot be
compared means that nothing is shared.
"""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from smartcache.pretrained.arguments import HUB_ARGUMENTS, SOURCE_NAMES, Asked
from smartcache.pretrained.canonical import NotComparableError, canonical
from smartcache.pretrained.identity import CONFIG, content_of
from smartcache.pretrained.registry import Key, Request
from smartcache.store import Store

_log = logging.getLogger(__name__)

INDEX = "model_index.json"
_WHERE = frozenset(
    (
        *HUB_ARGUMENTS,
        *SOURCE_NAMES,
        "low_cpu_mem_usage",
        "mirror",
        "proxies",
        "resume_download",
        "subfolder",
    )
)
"""Arguments that say where files come from, or what is so anyway."""
_IN_REQUEST = frozenset(("dtype", "torch_dtype", "device_map"))
_IN_CONTENT = frozenset(("variant", "use_safetensors"))
_NEVER = (
    "adapter_kwargs",
    "config",
    "custom_pipeline",
    "gguf_file",
    "load_connected_pipeline",
    "max_memory",
    "offload_folder",
    "offload_state_dict",
    "output_loading_info",
    "parallel_config",
    "state_dict",
    "tp_plan",
    "trust_remote_code",
    "use_flashpack",
    "use_onnx",
)
"""With one of these nothing is shared: they bring code, other files, or weights on many devices."""
_UNSET = frozenset(("quantization_config", *_NEVER))
"""Arguments for which None says nothing."""
_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
_OLD_DIFFUSERS = (0, 9)
"""Pipelines change the config of a UNet that an older version wrote."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A component that may be shared."""

    name: str
    request: Request
    folder: Path


def stamp(folder: Path) -> list[object]:
    """Return what changes when a file of a folder is written or replaced.

    A link to a file, which another thread may be making, does not count: it changes the ctime.
    """
    found: list[object] = []
    for name in sorted(os.listdir(folder)):
        st = os.stat(folder / name)
        found.append([name, st.st_ino, st.st_size, st.st_mtime_ns])
    return found


def ctimes(folder: Path) -> list[int]:
    """Return what changes even if the times of the files are set back after a change."""
    return [os.stat(folder / name).st_ctime_ns for name in sorted(os.listdir(folder))]


def why_not(asked: Asked) -> str:
    """Return which argument keeps this call from sharing anything; "" if none does."""
    for name in _NEVER:
        if asked.kwargs.get(name) not in (None, False):
            return name
    if len(asked.args) > 1:
        return "a positional argument"
    if asked.kwargs.get("low_cpu_mem_usage", True) is not True:
        # Weights that are not in the file are then whatever was in memory.
        return "low_cpu_mem_usage"
    return "" if _is_one_device(asked.kwargs.get("device_map")) else "device_map"


def components_in(index: Mapping[str, object]) -> dict[str, tuple[str, str]]:
    """Return the components that model_index.json names: library and class of each."""
    found = {}
    for name, value in index.items():
        match value:
            case [str(library), str(cls)] if not name.startswith("_"):
                found[name] = (library, cls)
    return found


def read_index(folder: Path) -> dict[str, object]:
    """Return model_index.json; {} if there is none that can be read."""
    try:
        said = json.loads((folder / INDEX).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def pipeline_class(asked: Asked, index: Mapping[str, object]) -> type | None:
    """Return the class of the pipeline that will be made; None: the library finds it later."""
    import diffusers

    if asked.cls.__name__ != "DiffusionPipeline":
        return None if asked.cls.__name__.startswith("AutoPipelineFor") else asked.cls
    found = getattr(diffusers, str(index.get("_class_name")), None)
    return found if isinstance(found, type) else None


def wanted_components(
    asked: Asked, folder: Path, store: Store | None, more: Mapping[str, object]
) -> list[Wanted]:
    """Return the components of a pipeline that may be shared.

    `more` is what the library is told besides. ValueError for names to share that are not there.
    """
    index = read_index(folder)
    named = components_in(index)
    _check_names(asked.share, named, index)
    cls = pipeline_class(asked, index)
    if not isinstance(index.get("_class_name"), str) or not _loads_as_usual(cls):
        return []
    expected = set(named) if cls is None else set(inspect.signature(cls).parameters)
    arguments = {**of_components(asked, folder), **more}
    found: list[Wanted] = []
    numbers: dict[tuple[str, str], int] = {}
    for name in sorted(set(named) & expected - set(asked.kwargs)):
        is_meant = not isinstance(asked.share, tuple) or name in asked.share
        part = _component(folder / name, name, named[name]) if is_meant else None
        key = None if part is None else _key(part, store, arguments)
        if key is not None:
            number = numbers[key.content, key.cls] = numbers.get((key.content, key.cls), -1) + 1
            numbered = Key(key.content, key.cls, key.arguments, number)
            found.append(Wanted(name, _request(asked, numbered, name, arguments), folder / name))
    return found


def wanted_model(
    asked: Asked, folder: Path, cls: type, store: Store | None, more: Mapping[str, object]
) -> Wanted | None:
    """Return what a model that is loaded alone is; None: it is not shared."""
    name, arguments = asked.subfolder, {**asked.kwargs, **more}
    key = _key(_Part(name, folder, cls), store, arguments)
    return None if key is None else Wanted(name, _request(asked, key, name, arguments), folder)


def question_of(asked: Asked, version: object, more: Mapping[str, object]) -> str:
    """Return a whole call for one model as a text; "" if it has none.

    `version` is what tells its files from others of the same place: the commit, or their stamp.
    """
    try:
        words = {name: value for name, value in asked.kwargs.items() if name not in HUB_ARGUMENTS}
        placed = asked.placement
        devices = [] if placed is None else [placed.device, placed.encoders]
        return canonical([_qualified(asked.cls), asked.source, version, words, dict(more),
                          list(asked.args[1:]), devices, _surroundings()])  # fmt: skip
    except NotComparableError:
        return ""


@dataclass(frozen=True, slots=True)
class _Part:
    name: str
    folder: Path
    cls: type


def _check_names(
    share: bool | tuple[str, ...],  # noqa: FBT001 - as Asked has it
    named: Mapping[str, tuple[str, str]],
    index: Mapping[str, object],
) -> None:
    unknown = [name for name in (share if isinstance(share, tuple) else ()) if name not in index]
    if unknown and index:
        there = ", ".join(sorted(named))
        raise ValueError(f"There is no component {', '.join(unknown)} to share; there are: {there}")


def _loads_as_usual(cls: type | None) -> bool:
    """Say whether a pipeline is loaded by diffusers' own function, not by one of its class."""
    if cls is None:
        return True
    owner = next((each for each in cls.__mro__ if "from_pretrained" in vars(each)), object)
    is_usual = owner.__name__ == "DiffusionPipeline" and owner.__module__.startswith("diffusers.")
    return is_usual and not getattr(cls, "_load_connected_pipes", False)


def _component(folder: Path, name: str, named: tuple[str, str]) -> _Part | None:
    """Return a component with weights; None for schedulers, tokenizers, and strangers' code."""
    import diffusers
    import torch
    import transformers

    library, class_name = named
    home: object = getattr(diffusers.pipelines, library, None)
    if library in ("diffusers", "transformers"):
        home = importlib.import_module(library)
    cls = getattr(home, class_name, None)
    models = (diffusers.ModelMixin, transformers.PreTrainedModel)
    if not isinstance(cls, type) or not issubclass(cls, torch.nn.Module):
        return None
    return _Part(name, folder, cls) if issubclass(cls, models) and folder.is_dir() else None


def _key(part: _Part, store: Store | None, arguments: Mapping[str, object]) -> Key | None:
    variant, use_safetensors = (arguments.get(name) for name in ("variant", "use_safetensors"))
    if not isinstance(variant, str | None) or not isinstance(use_safetensors, bool | None):
        return None
    content = content_of(
        part.folder,
        part.cls.__name__,
        variant=variant,
        use_safetensors=use_safetensors,
        store=store,
    )
    if content is None:
        return None
    left_out = _WHERE | _IN_REQUEST | (_IN_CONTENT if content.is_plain else frozenset())
    words = {
        name: value
        for name, value in arguments.items()
        if name not in left_out and not (name in _UNSET and value is None)
    }
    name = part.name if "quantization_config" in words else ""
    try:
        told = canonical([words, name, _is_old(part.folder), _surroundings()])
    except NotComparableError as error:
        _log.debug("%s is not shared: %s", part.folder, error)
        return None
    return Key(content.digest, _qualified(part.cls), told)


def _request(asked: Asked, key: Key, name: str, arguments: Mapping[str, object]) -> Request:
    dtype = arguments.get("dtype")
    dtype = arguments.get("torch_dtype") if dtype is None else dtype
    if isinstance(dtype, dict):
        dtype = dtype.get(name, dtype.get("default", "default"))
    placed = asked.placement
    device = None if placed is None else placed.device_for(name)
    encoders = None if placed is None or placed.encoders is None else (placed.encoders, name)
    where = [_plain_map(arguments.get("device_map")), device, encoders]
    # None is not the same to both: a pipeline hands it on, a model may take it for "auto".
    return Request(key, canonical([asked.is_pipeline, dtype]), canonical(where))


def _is_one_device(device_map: object) -> bool:
    return device_map is None or _plain_map(device_map) is not None


def _plain_map(device_map: object) -> str | None:
    """Return the one device that a map names; None if there is none, or it is found out later."""
    import torch

    if isinstance(device_map, dict) and list(device_map) == [""]:
        device_map = device_map[""]
    is_device = isinstance(device_map, str | int | torch.device) and device_map not in _MAPS
    return str(device_map) if is_device else None


def _surroundings() -> list[object]:
    """Return what of torch's present state a load depends on."""
    import torch

    return [
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled(),
        torch.is_inference_mode_enabled(),
    ]


def _is_old(folder: Path) -> bool:
    said = json.loads((folder / CONFIG).read_text("utf-8")).get("_diffusers_version")
    numbers = [part for part in str(said).split(".")[:2] if part.isdigit()] if said else []
    return bool(numbers) and tuple(map(int, numbers)) < _OLD_DIFFUSERS


def _qualified(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def of_components(asked: Asked, folder: Path) -> dict[str, object]:
    """Return the arguments of a pipeline that are not for its constructor or about its source.

    They reach the components, as far as the library knows them.
    """
    import diffusers
    import torch

    index = read_index(folder)
    cls = pipeline_class(asked, index)
    own = {*_WHERE, *index, *(() if cls is None else inspect.signature(cls).parameters)}
    return {
        name: value
        for name, value in asked.kwargs.items()
        if name not in own and not isinstance(value, torch.nn.Module | diffusers.SchedulerMixin)
    }
