"""`from_pretrained` and `from_single_file`: models and pipelines as their libraries load them.

What is not named here belongs to the library and is handed on as it is; what is None is not. `load`
and `load_single` are the one way in for everybody, also for the libraries' own functions with the
flag.

A checkpoint of one file is named by its path, as `org/name/path/file.safetensors`, or by its
address on the Hub. What is none of these is left to the library.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, ParamSpec
from urllib.parse import unquote, urlsplit

from smartcache.errors import MissingWeightsError
from smartcache.functions import answering, hf_hub_download
from smartcache.hub import Call, pausing
from smartcache.pretrained.call import (
    HUB_ARGUMENTS,
    SOURCE_NAMES,
    Asked,
    Placement,
    checked_mapping,
    dtype_arguments,
    inside,
    is_inside,
    naming_variants,
    open_cache,
    pin,
    placement,
    share_names,
    without_none,
)
from smartcache.pretrained.kinds import class_of, library_class
from smartcache.pretrained.share import load_model, load_pipeline, load_unshared

if TYPE_CHECKING:
    from smartcache.pretrained.call import Device, Dtype

P = ParamSpec("P")
_SUFFIXES = (".bin", ".ckpt", ".gguf", ".pt", ".pth", ".safetensors", ".sft")
_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
_ADDRESS = re.compile(
    r"/?(?P<repo>[^/]+/[^/]+)/(?:blob|resolve|raw)/"
    r"(?P<revision>refs/(?:pr|convert)/[^/]+|[^/]+)/(?P<file>.+)"
)
_REPO_FILE = re.compile(r"/?(?P<repo>[^/]+/[^/]+)/(?P<file>.+)")


def _alone(load: Callable[P, object]) -> Callable[P, object]:
    """Let no download be answered in a call with `smart_cache=False`, whoever called `enable`."""

    @functools.wraps(load)
    def loading(*args: P.args, **kwargs: P.kwargs) -> object:
        with nullcontext() if kwargs.get("smart_cache", True) else pausing():
            return load(*args, **kwargs)

    return loading


@_alone
def from_pretrained(  # noqa: PLR0913 - the libraries' own arguments, by name
    repo_or_path: str | os.PathLike[str],
    *,
    cls: type | str | None = None,
    smart_cache: bool = True,
    device: Device | None = None,
    encoders_device: Device | None = "auto",
    dtype: Dtype | None = None,
    variant: str | None = None,
    revision: str | None = None,
    subfolder: str | None = None,
    share: bool | Iterable[str] = False,
    cache_mapping: MutableMapping[str, str] | None = None,
    **kwargs: object,
) -> object:
    """Load a pipeline, model, tokenizer or processor; its files come out of the store.

    Without `cls` (a class, or its name) the files say what it is. Everything goes to `device`;
    without one, text encoders, image encoders and VAE go to `encoders_device`: "auto" is CUDA or
    MPS where there is one, None leaves them on the CPU. With `share`, components equal to ones in
    memory are those: all, or the named ones. `cache_mapping`, {sha256: path}, names further files
    that may be used. All other arguments are the library's own.
    """
    source = os.fspath(repo_or_path)
    mapping = checked_mapping(cache_mapping)
    named = {"variant": variant, "revision": revision, "subfolder": subfolder}
    arguments = {**without_none(named), **kwargs}
    if smart_cache:
        arguments = pin(source, arguments)
    found = class_of(source, cls, subfolder=subfolder or "", arguments=arguments)
    arguments.update(dtype_arguments(found, dtype, arguments.pop("torch_dtype", None)))
    asked = Asked(
        cls=found,
        original=found.from_pretrained,  # type: ignore[attr-defined]
        args=(repo_or_path,),
        kwargs=arguments,
        share=share_names(share),
        placement=_placement(device, encoders_device, subfolder or "", arguments),
        mapping=mapping,
    )
    if smart_cache:
        return load(asked)
    if asked.share:
        raise ValueError("share=... needs smart_cache=True: equal components are found by digest")
    if mapping is not None:
        raise ValueError("cache_mapping=... needs smart_cache=True: it is the store that uses it")
    return _load_plainly(asked)


@_alone
def from_single_file(
    path_or_repo_file: str | os.PathLike[str],
    *,
    cls: type | str | None = None,
    smart_cache: bool = True,
    device: Device | None = None,
    encoders_device: Device | None = "auto",
    dtype: Dtype | None = None,
    config: str | os.PathLike[str] | None = None,
    **kwargs: object,
) -> object:
    """Load a checkpoint of one file: a path, "org/name/file.safetensors", or an address on the Hub.

    Without `cls` it is what `config`, a repo or folder in the layout of diffusers, describes;
    without both, the pipeline that diffusers knows by the weights' names. All other arguments are
    as in `from_pretrained`.
    """
    named = None if config is None else os.fspath(config)
    arguments = {**kwargs, **without_none({"config": named})}
    source = _local_file(os.fspath(path_or_repo_file), arguments, smart_cache=smart_cache)
    found = _single_class(source, cls, named, arguments)
    arguments.update(dtype_arguments(found, dtype, arguments.pop("torch_dtype", None)))
    asked = Asked(
        cls=found,
        original=found.from_single_file,  # type: ignore[attr-defined]
        args=(source,),
        kwargs=arguments,
        placement=_placement(device, encoders_device, "", arguments),
    )
    return load_single(asked) if smart_cache else _load_plainly(asked)


def load(asked: Asked) -> object:
    """Load what is asked for, its files out of the store; what the library returns is returned.

    With `share` equal components that are in memory already are taken. A call that a library makes
    itself, in the middle of another, is left to it.
    """
    if is_inside():
        return asked.run()
    if asked.is_pipeline or asked.is_model:
        asked = replace(asked, kwargs=pin(asked.source, asked.kwargs))
    with naming_variants(asked):
        if not asked.share:
            return load_unshared(asked)
        if asked.is_pipeline:
            return load_pipeline(asked)
        if asked.is_model:
            return load_model(asked)
        raise TypeError(f"{asked.cls.__name__} has no weights that could be shared")


def load_single(asked: Asked) -> object:
    """Answer a call of a library's `from_single_file`; what it returns is returned."""
    if is_inside():
        return asked.run()

    def local(value: object) -> object:
        """Return the path for a source; a state dict, which models take too, as it is."""
        is_name = isinstance(value, str | os.PathLike)
        return _local_file(os.fsdecode(value), asked.kwargs) if is_name else value  # type: ignore[arg-type]

    first = tuple(map(local, asked.args[:1]))
    named = {name: local(asked.kwargs[name]) for name in SOURCE_NAMES if name in asked.kwargs}
    kwargs = {**asked.kwargs, **named}
    with answering():  # the configs of such a checkpoint may come from another repo
        return _load_plainly(replace(asked, args=(*first, *asked.args[1:]), kwargs=kwargs))


def _load_plainly(asked: Asked) -> object:
    """Let the library load by itself; then put things where they go."""
    with inside():
        loaded = asked.load()
    return asked.place(loaded)


def _placement(
    device: Device | None,
    encoders_device: Device | None,
    subfolder: str,
    arguments: dict[str, object],
) -> Placement | None:
    if arguments.get("device_map") is not None:
        if device is not None:
            raise TypeError("Pass either device or device_map, not both")
        return None  # The library places everything by the caller's map.
    return placement(device, encoders_device, component=subfolder.rpartition("/")[2])


# Checkpoints of one file


def repo_file(text: str) -> tuple[str, str, str | None] | None:
    """Return the repo, the file and the revision that a text names on the Hub.

    The revision is None where the text does not say one. None: it names no file there.
    """
    from huggingface_hub import constants

    path = text
    is_address = "://" in text or text.startswith(tuple(f"{host}/" for host in _HOSTS))
    if is_address:
        parts = urlsplit(text if "://" in text else f"https://{text}")
        is_hub = parts.netloc in (*_HOSTS, urlsplit(constants.ENDPOINT).netloc)
        if not is_hub or parts.scheme not in ("http", "https"):
            return None
        found = _ADDRESS.fullmatch(parts.path)
        if found is not None:
            return found["repo"], unquote(found["file"]), unquote(found["revision"])
        path = unquote(parts.path)
    elif text.startswith((".", "~", "/")) or "\\" in text:
        return None
    found = _REPO_FILE.fullmatch(path)
    if found is None or not found["file"].lower().endswith(_SUFFIXES):
        return None
    return found["repo"], found["file"], None


def _local_file(source: str, arguments: Mapping[str, object], *, smart_cache: bool = True) -> str:
    """Return the path of a file, fetched if it is one of a repo; other texts as they are.

    Raises the Hub's own errors.
    """
    if os.path.isfile(source):
        cache = open_cache() if smart_cache else None
        if cache is not None:
            cache.look_for_damage(source)
        return source
    found = repo_file(source)
    if found is None:
        return source
    repo, file, revision = found
    options = without_none({name: arguments.get(name) for name in HUB_ARGUMENTS})
    if revision is not None:
        options.setdefault("revision", revision)
    if smart_cache:
        return hf_hub_download(repo, file, **options)  # type: ignore[call-overload, no-any-return]
    return str(Call(repo_id=repo, filename=file, arguments=options).delegate())


def _single_class(
    path: str, cls: type | str | None, config: str | None, arguments: Mapping[str, object]
) -> type:
    """Return the class that loads a checkpoint: `cls`, or what `config` or its weights tell."""
    if cls is not None:
        found = class_of(path, cls, arguments=arguments)
    elif config is not None:
        subfolder = arguments.get("subfolder")
        within = subfolder if isinstance(subfolder, str) else ""
        found = class_of(config, None, subfolder=within, arguments=arguments)
    else:
        found = _class_by_weights(path, arguments)
    if not hasattr(found, "from_single_file"):
        raise TypeError(f"{found.__name__} has no from_single_file")
    return found


def _class_by_weights(path: str, arguments: Mapping[str, object]) -> type:
    """Return the class of the pipeline that diffusers knows by the names of such weights."""
    if library_class("diffusers", "DiffusionPipeline") is None or not os.path.isfile(path):
        raise MissingWeightsError(f"{path} is neither a file nor the name of one on the Hub")
    from diffusers.loaders import single_file_utils

    weights = single_file_utils.load_single_file_checkpoint(path)
    known = single_file_utils.fetch_diffusers_config(weights)
    del weights
    # The checkpoint's own revision means nothing in the repo that describes its kind.
    options = {name: value for name, value in arguments.items() if name != "revision"}
    source, subfolder = known["pretrained_model_name_or_path"], known.get("subfolder") or ""
    return class_of(source, None, subfolder=subfolder, arguments=options)
