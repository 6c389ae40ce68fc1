"""Checkpoints of one file: the file comes out of the store, the library loads it from there.

A file is named by its path, as `org/name/path/file.safetensors`, or by its address on the Hub. What
is none of these is left to the library.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from smartcache.errors import MissingWeightsError
from smartcache.functions import hf_hub_download
from smartcache.hub.dropin import Call
from smartcache.pretrained.arguments import HUB_ARGUMENTS, Asked
from smartcache.pretrained.borrowing import inside, is_inside, open_cache
from smartcache.pretrained.failures import explained
from smartcache.pretrained.gate import one_at_a_time
from smartcache.pretrained.kinds import class_of, library_class

SUFFIXES = (".bin", ".ckpt", ".gguf", ".pt", ".pth", ".safetensors", ".sft")
_NAMES = ("pretrained_model_link_or_path", "pretrained_model_link_or_path_or_dict")
"""What diffusers calls the first argument."""
_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
_ADDRESS = re.compile(
    r"/?(?P<repo>[^/]+/[^/]+)/(?:blob|resolve|raw)/"
    r"(?P<revision>refs/(?:pr|convert)/[^/]+|[^/]+)/(?P<file>.+)"
)
_REPO_FILE = re.compile(r"/?(?P<repo>[^/]+/[^/]+)/(?P<file>.+)")


@dataclass(frozen=True, slots=True)
class RepoFile:
    """A file of a repo; `revision` is None where its name does not say one."""

    repo: str
    file: str
    revision: str | None = None


def repo_file(text: str) -> RepoFile | None:
    """Return the file that a text names on the Hub; None if it names none there."""
    is_address, path = _path_on_hub(text)
    if path is None:
        return None
    found = _ADDRESS.fullmatch(path) if is_address else None
    if found is not None:
        return RepoFile(found["repo"], unquote(found["file"]), unquote(found["revision"]))
    found = _REPO_FILE.fullmatch(unquote(path) if is_address else path)
    if found is None or not found["file"].lower().endswith(SUFFIXES):
        return None
    return RepoFile(found["repo"], found["file"])


def _path_on_hub(text: str) -> tuple[bool, str | None]:
    """Return whether a text is an address, and its path if it is one on the Hub or no address."""
    if "://" not in text and not text.startswith(tuple(f"{host}/" for host in _HOSTS)):
        return False, None if text.startswith((".", "~", "/")) or "\\" in text else text
    parts = urlsplit(text if "://" in text else f"https://{text}")
    is_hub = parts.netloc in (*_HOSTS, _endpoint()) and parts.scheme in ("http", "https")
    return True, parts.path if is_hub else None


def _endpoint() -> str:
    from huggingface_hub import constants

    return urlsplit(constants.ENDPOINT).netloc


def local_file(source: str, arguments: Mapping[str, object], *, smart_cache: bool = True) -> str:
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
    given = {name: arguments.get(name) for name in HUB_ARGUMENTS}
    options = {name: value for name, value in given.items() if value is not None}
    if found.revision is not None:
        options.setdefault("revision", found.revision)
    if smart_cache:
        return hf_hub_download(found.repo, found.file, **options)  # type: ignore[call-overload, no-any-return]
    return str(Call(repo_id=found.repo, filename=found.file, arguments=options).delegate())


def load_single(asked: Asked) -> object:
    """Answer a call of a library's `from_single_file`; what it returns is returned."""
    if is_inside():
        return asked.run()
    with explained(asked):
        loaded = _load(asked)
        if asked.placement is not None:
            asked.placement.apply(loaded)
        return loaded


def _load(asked: Asked) -> object:
    more = {} if asked.placement is None else asked.placement.library_arguments(asked)
    if asked.args:
        first = _local(asked.args[0], asked)
        with inside(), one_at_a_time():
            return asked.original(first, *asked.args[1:], **asked.kwargs, **more)
    named = {name: _local(asked.kwargs[name], asked) for name in _NAMES if name in asked.kwargs}
    with inside(), one_at_a_time():
        return asked.run(**named, **more)


def _local(value: object, asked: Asked) -> object:
    """Return the path for a source; a state dict, which models take too, as it is."""
    if not isinstance(value, str | os.PathLike):
        return value
    return local_file(os.fsdecode(value), asked.kwargs)


def single_class(
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
    subfolder = known.get("subfolder") or ""
    return class_of(
        known["pretrained_model_name_or_path"], None, subfolder=subfolder, arguments=options
    )
