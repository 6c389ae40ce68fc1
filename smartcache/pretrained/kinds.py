"""Which class loads a repo or folder: told by the small files that are beside the weights.

Nothing else is fetched for it. The Hub's own errors (no such repo, gated, offline) pass unchanged.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self, cast

from smartcache.errors import MissingWeightsError, UnknownClassError, UnreadableConfigError
from smartcache.hub import Call
from smartcache.pretrained.call import CONFIG, HUB_ARGUMENTS, INDEX, open_cache, without_none
from smartcache.pretrained.flag import LIBRARIES

if TYPE_CHECKING:
    from huggingface_hub.errors import LocalEntryNotFoundError

    Config = Mapping[str, object]

_UPDATE = "Update diffusers and transformers, or name a class: from_pretrained(..., cls=...)."
_LIKELY = {
    "scheduler": "scheduler_config.json",
    "tokenizer": "tokenizer_config.json",
    "feature_extractor": "preprocessor_config.json",
    "image_processor": "preprocessor_config.json",
    "processor": "processor_config.json",
}
"""What a folder of that name has."""


def class_of(
    source: str, cls: type | str | None, *, subfolder: str = "", arguments: Mapping[str, object]
) -> type:
    """Return the class that loads `source`: `cls`, given as a class or by name, or by its files.

    `arguments` are the library's: those that say where the files come from are heeded. Raises
    UnknownClassError if neither library has such a class, MissingWeightsError if there is nothing.
    """
    folder = Folder(source, subfolder.strip("/"), arguments)
    if cls is None:
        return _class_by_files(folder)
    found = cls if isinstance(cls, type) else _class_named(cls, folder)
    if found is None:
        raise UnknownClassError(
            f"Neither diffusers nor transformers has a class {cls!r} to load {folder} with",
            hint="Check the spelling, or leave out `cls`; a newer version may have it.",
        )
    if not hasattr(found, "from_pretrained"):
        raise TypeError(f"{found.__name__} has no from_pretrained")
    return found


def library_class(library: str, name: object) -> type | None:
    """Return a class of a library's module; None if there is none of that name."""
    found = getattr(importlib.import_module(library), name, None) if isinstance(name, str) else None
    return found if isinstance(found, type) else None


def component_class(library: str, name: str) -> type | None:
    """Return the class that model_index.json names for a component; None if there is none."""
    if library in LIBRARIES:
        return library_class(library, name)
    import diffusers

    found = getattr(getattr(diffusers.pipelines, library, None), name, None)
    return found if isinstance(found, type) else None


def _class_named(name: str, folder: Folder) -> type | None:
    library, _, bare = name.rpartition(".")
    if library:
        return library_class(library, bare) if library in LIBRARIES else None
    found = [cls for each in LIBRARIES if (cls := library_class(each, bare)) is not None]
    if len(found) > 1:  # AutoModel: that of the library whose files they are.
        config = folder.read(CONFIG) or {}
        return found[0] if "_class_name" in config else found[-1]
    return found[0] if found else None


@dataclass
class Folder:
    """The small files of a folder, here or on the Hub; each is asked for once."""

    source: str
    subfolder: str
    arguments: Mapping[str, object]
    absence: LocalEntryNotFoundError | None = None
    """What the Hub said of a file that is perhaps there, but cannot be had now."""
    _paths: dict[str, Path | None] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.source}/{self.subfolder}" if self.subfolder else self.source

    def find(self, name: str) -> Path | None:
        """Return where a file of the folder is, once fetched; None if there is no such file."""
        if name not in self._paths:
            if os.path.isdir(self.source):
                path = Path(self.source, self.subfolder, name)
                self._paths[name] = path if path.is_file() else None
            else:
                self._paths[name] = self._fetch(name)
        return self._paths[name]

    def read(self, name: str) -> Config | None:
        """Return what is in a JSON file; None if there is no such file."""
        path = self.find(name)
        if path is None:
            return None
        try:
            value = json.loads(path.read_text("utf-8"))
        except ValueError as error:
            message = f"{path.name} of {self} cannot be read: {error}"
            raise UnreadableConfigError(message) from error
        if not isinstance(value, dict):
            raise UnreadableConfigError(f"{path.name} of {self} is not a JSON object")
        return value

    def _fetch(self, name: str) -> Path | None:
        """Return a file as huggingface_hub does; what is fetched out of a known commit is proven.

        Then the store is wanted, and what came once is not asked for again.
        """
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        known = {each: self.arguments.get(each) for each in HUB_ARGUMENTS}
        options = without_none({**known, "subfolder": self.subfolder or None})
        options.pop("force_download", None)
        if self.absence is not None:
            # The Hub did not answer: what the cache has must do, without another try per file.
            options["local_files_only"] = True
        call = Call(repo_id=self.source, filename=name, arguments=options)
        commit = getattr(options.get("revision"), "resolved", None)
        cache = None if commit is None else open_cache()
        try:
            if cache is None:
                return Path(str(call.delegate()))
            full = f"{self.subfolder}/{name}" if self.subfolder else name
            place = cast("str | None", options.get("cache_dir"))
            found = try_to_load_from_cache(self.source, full, cache_dir=place, revision=commit)
            if found is None:
                words = {**options, "revision": commit}
                return Path(cache.download(replace(call, arguments=words)))
        except LocalEntryNotFoundError as error:
            self.absence = self.absence or error
            return None
        except EntryNotFoundError:
            return None
        return Path(found) if isinstance(found, str) else None  # known not to exist


def _class_by_files(folder: Folder) -> type:
    _refuse_what_is_no_folder(folder.source)
    for name in _order(folder.subfolder):
        config = folder.read(name)
        if config is not None:
            return _RULES[name](config, folder)
    if folder.absence is not None:
        # The Hub's own words do not say of which repo they are.
        raise type(folder.absence)(f"{folder}: {folder.absence}") from folder.absence
    raise MissingWeightsError(
        f"{folder} has none of the files that say what it is: {', '.join(_RULES)}",
        hint="Check the name and the subfolder, or name the class: from_pretrained(..., cls=...).",
        source=folder.source,
    )


def _refuse_what_is_no_folder(source: str) -> None:
    """Raise if a text names a file, or can only be a folder and there is none."""
    if os.path.isfile(source):
        raise MissingWeightsError(
            f"{source} is a file, not a folder or repo",
            hint="Load a single-file checkpoint with smartcache.from_single_file.",
            source=source,
        )
    is_path = source.startswith((".", "~", "/", os.sep)) or source.count("/") > 1 or "\\" in source
    if is_path and not os.path.isdir(source):
        raise MissingWeightsError(f"There is no folder {source}", source=source)


def _order(subfolder: str) -> list[str]:
    """Return which files to look for, the likeliest first: on the Hub each costs a request."""
    name = subfolder.rpartition("/")[2]
    if not name:
        return list(_RULES)
    likely = [file for start, file in _LIKELY.items() if name.startswith(start)]
    rest = [each for each in _RULES if each not in likely]
    return [*likely, *sorted(rest, key=lambda each: each.endswith("index.json"))]


def _pipeline_class(config: Config, folder: Folder) -> type:
    """Return the class that a model_index.json names; UnknownClassError if there is none."""
    name = config.get("_class_name")
    if folder.arguments.get("custom_pipeline") or isinstance(name, list):
        return _needed("diffusers", "DiffusionPipeline")  # It fetches code that says which class.
    found = library_class("diffusers", name)
    if found is None:
        raise _unknown(f"{INDEX} of {folder} names", name, folder)
    return found


def _model_class(config: Config, folder: Folder) -> type:
    if "_class_name" in config:
        return _diffusers_class(config, folder)
    names = config.get("architectures")
    known = names if isinstance(names, list) else []
    for name in known:
        found = library_class("transformers", name)
        if found is not None:
            return found
    remote = config.get("auto_map")
    if isinstance(remote, dict):
        # The Auto class through which transformers loads a class that the repo brings.
        autos = [each for each in remote if each.startswith("AutoModel")] or ["AutoModel"]
        own = [each for each in autos if str(remote.get(each)).rpartition(".")[2] in known]
        return _needed("transformers", (own or autos)[0])
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type")
    if kind in CONFIG_MAPPING:
        return _needed("transformers", "AutoModel")
    found_names = f"the classes {names} of type {kind!r}" if kind or names else "no class"
    raise UnknownClassError(
        f"{CONFIG} of {folder} names {found_names}; transformers {_version('transformers')} has"
        " none",
        hint=_UPDATE,
        class_name=names,
        source=folder.source,
    )


def _diffusers_class(config: Config, folder: Folder) -> type:
    name = config.get("_class_name")
    found = library_class("diffusers", name)
    if found is None and "auto_map" in config:
        return _needed("diffusers", "AutoModel")
    if found is None:
        raise _unknown(f"{folder} is of", name, folder)
    return found


def _preprocessor_class(config: Config, folder: Folder) -> type:
    if "processor_class" in config and folder.read("tokenizer_config.json") is not None:
        return _needed("transformers", "AutoProcessor")
    if "video_processor_type" in config:
        return _needed("transformers", "AutoVideoProcessor")
    # Image processors were called feature extractors once: "CLIPFeatureExtractor".
    old = str(config.get("feature_extractor_type", "")).replace(
        "FeatureExtractor", "ImageProcessor"
    )
    if "image_processor_type" in config or library_class("transformers", old) is not None:
        return _needed("transformers", "AutoImageProcessor")
    is_feature = "feature_extractor_type" in config
    return _needed("transformers", "AutoFeatureExtractor" if is_feature else "AutoProcessor")


def _needed(library: str, name: str) -> type:
    found = library_class(library, name)
    if found is None:
        raise UnknownClassError(f"{library} {_version(library)} has no class {name}", hint=_UPDATE)
    return found


def _unknown(what: str, name: object, folder: Folder) -> UnknownClassError:
    return UnknownClassError(
        f"{what} the class {name!r}, which diffusers {_version('diffusers')} does not have",
        hint=_UPDATE,
        class_name=name,
        source=folder.source,
    )


def _version(library: str) -> str:
    return str(importlib.import_module(library).__version__)


_RULES: dict[str, Callable[[Config, Folder], type]] = {
    INDEX: _pipeline_class,
    CONFIG: _model_class,
    "modular_model_index.json": lambda _config, _folder: _needed("diffusers", "ModularPipeline"),
    "scheduler_config.json": _diffusers_class,
    "processor_config.json": lambda _config, _folder: _needed("transformers", "AutoProcessor"),
    "preprocessor_config.json": _preprocessor_class,
    "tokenizer_config.json": lambda _config, _folder: _needed("transformers", "AutoTokenizer"),
}
"""Which class a file tells of, in the order in which they count."""


# What a pipeline is made of


def components_in(index: Config) -> dict[str, tuple[str, str]]:
    """Return the components that model_index.json names: library and class of each."""
    found = {}
    for name, value in index.items():
        match value:
            case [str(library), str(cls)] if not name.startswith("_"):
                found[name] = (library, cls)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineIndex:
    """A pipeline as its model_index.json describes it, before anything of it is loaded."""

    source: str
    cls: type
    folder: Path
    """Where the file is, and below it the components."""
    said: Config
    """All that it says."""
    components: Mapping[str, tuple[str, str]]
    """The library and the class of each."""

    @classmethod
    def of(cls, source: str, arguments: Mapping[str, object]) -> Self:
        """Read it, here or from the Hub."""
        _refuse_what_is_no_folder(source)
        found = Folder(source, "", arguments)
        config, path = found.read(INDEX), found.find(INDEX)
        if config is None or path is None:
            raise found.absence or UnknownClassError(
                f"{source} is not a diffusers pipeline: it has no {INDEX}",
                hint="Load a single model with smartcache.from_pretrained.",
            )
        return cls(
            source=source,
            cls=_pipeline_class(config, found),
            folder=path.parent,
            said=config,
            components=components_in(config),
        )
