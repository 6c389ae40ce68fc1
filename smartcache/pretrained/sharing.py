"""Pipelines and models whose equal components are one object.

A component that may be shared is looked up by its content and by all that was asked for. What is
not there is loaded by diffusers itself, but apart from the pipeline: constructors of pipelines
write into what they get, and only what they have not touched can be shared. Then the library makes
the pipeline and is given the components as arguments.

Two equal components of one pipeline stay two objects, as without sharing: what a program does to
`text_encoder` must not happen to `text_encoder_2`.

One thread at a time loads; the files of a pipeline are fetched before that.
"""

from __future__ import annotations

import copy
import inspect
import logging
import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard, cast

from smartcache.errors import DeviceMemoryError
from smartcache.pretrained.arguments import SOURCE_NAMES, Asked
from smartcache.pretrained.borrowing import borrowed, inside, open_cache
from smartcache.pretrained.dice import Dice
from smartcache.pretrained.gate import one_at_a_time
from smartcache.pretrained.guards import OF_PIPELINES, guard, lift
from smartcache.pretrained.identity import CONFIG
from smartcache.pretrained.keeping import keep
from smartcache.pretrained.registry import Holder, Key, registry
from smartcache.pretrained.wanted import (
    Wanted,
    components_in,
    ctimes,
    of_components,
    question_of,
    read_index,
    stamp,
    wanted_components,
    wanted_model,
    why_not,
)
from smartcache.store import Store

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline

    Modules = dict[str, torch.nn.Module]
    """Components by their names."""

_log = logging.getLogger(__name__)
_NOT_FOR_DOWNLOADS = (
    "dtype",
    "torch_dtype",
    "device_map",
    "low_cpu_mem_usage",
    "quantization_config",
    "disable_mmap",
)


_meddlers: set[tuple[type, str, Key]] = set()
"""Pipelines whose constructors change such a component: they get one of their own."""
_answers: dict[str, Wanted] = {}
"""What the models of a commit that were loaded alone turned out to be, by the whole call."""


def load_pipeline(asked: Asked) -> object:
    """Load a pipeline whose components are those in memory, as far as they are equal."""
    obstacle = why_not(asked)
    if obstacle:
        _log.debug("nothing of %s is shared because of %s", asked.source, obstacle)
        return load_unshared(asked)
    with borrowed(asked) as commit:
        folder = _folder(asked, commit)
    if folder is None:
        return load_unshared(asked)
    more = {} if asked.placement is None else asked.placement.library_arguments(asked)
    loader = _Loader(asked, folder, {**more, **_settled(asked, folder)})
    wanted = wanted_components(asked, folder, _store(), more)
    with inside(), one_at_a_time():
        return loader.load(wanted)


def load_model(asked: Asked) -> object:
    """Load one model, or return the equal one that is in memory."""
    if why_not(asked):
        return load_unshared(asked)
    more = {} if asked.placement is None else asked.placement.library_arguments(asked)
    with borrowed(asked) as commit, one_at_a_time():
        return _Alone(asked, commit, more).load()


def load_unshared(asked: Asked) -> object:
    """Load what nobody else has or gets."""
    more = {} if asked.placement is None else asked.placement.library_arguments(asked)
    # Threads that a library starts itself come by here with no flag of their own: they must not
    # wait for the call that waits for them.
    gate = nullcontext() if asked.is_implicit else one_at_a_time()
    with borrowed(asked), gate:
        loaded = asked.run(**more)
    if asked.placement is not None:
        asked.placement.apply(loaded)
    return loaded


def unshare(pipeline: object, *names: str) -> None:
    """Give a pipeline components of its own: those of these names, or all that are shared.

    What nobody else uses is not copied, it just is not offered to others any more. ValueError for
    a name that the pipeline has not.
    """
    there = getattr(pipeline, "components", None)
    if not isinstance(there, Mapping):
        raise TypeError("unshare() takes a pipeline; of a model use copy.deepcopy(model)")
    unknown = [name for name in names if name not in there]
    if unknown:
        known = ", ".join(sorted(there))
        raise ValueError(f"There is no component {', '.join(unknown)}; there are: {known}")
    with one_at_a_time():
        for name in names or there:
            _unshare(pipeline, name, there[name])
        if not registry.shared_names(pipeline):
            lift(pipeline)


def _unshare(pipeline: object, name: str, module: object) -> None:
    entry = registry.entry_of(module)
    if entry is None:
        return
    entry.release(pipeline, name)
    if entry.users():
        own = copy.deepcopy(module)
        lift(own)
        cast("DiffusionPipeline", pipeline).register_modules(**{name: own})
    else:
        registry.drop(entry)


@dataclass(frozen=True, slots=True)
class _Loader:
    """Loads one pipeline out of a folder, in one thread at a time."""

    asked: Asked
    folder: Path
    more: Mapping[str, object]
    """What the library is told besides the arguments of the call."""

    def load(self, wanted: list[Wanted]) -> object:
        """Load the pipeline, with those components that can be shared."""
        wanted = [each for each in wanted if self._meddler(each) not in _meddlers]
        held, new = self._components(wanted)
        made, changed = self._made(held, new)
        if changed:
            _log.debug("%s changes %s: not shared", type(made).__name__, sorted(changed))
            _meddlers.update(self._meddler(each) for each in wanted if each.name in changed)
            for name in changed:
                registry.forget(new.get(name))
            if changed & held.keys():
                parts = {**held, **new}
                made = self._make({name: parts[name] for name in parts if name not in changed})
        self._hold(made, {**held, **new})
        return made

    def _components(self, wanted: list[Wanted]) -> tuple[Modules, Modules]:
        """Return components as they were loaded: those that others may hold, and new ones."""
        hits = {each.name: registry.find(each.request) for each in wanted}
        held = {name: module for name, module in hits.items() if module is not None}
        missing = [each for each in wanted if each.name not in held]
        loaded = self._loaded(missing) if missing else {}
        new: Modules = {}
        for each in missing:
            if each.name in loaded:
                found = registry.add(each.request, loaded[each.name], each.folder)
                (new if found is loaded[each.name] else held)[each.name] = found
        return held, new

    def _made(self, held: Modules, new: Modules) -> tuple[object, set[str]]:
        """Make the pipeline; return it, and which components its constructor has changed.

        Those that others may hold are as before again.
        """
        parts = {**held, **new}
        kept = {name: keep(module) for name, module in parts.items()}
        changed: set[str] = set()
        try:
            made = self._make(parts)
        finally:
            changed.update(name for name in parts if not kept[name].is_unchanged())
            for name in changed & held.keys():
                kept[name].restore()
        return made, changed

    def _loaded(self, wanted: list[Wanted]) -> Modules:
        """Load components apart; none if they are not the same at every time."""
        before = [stamp(each.folder) for each in wanted]
        dice = Dice()
        try:
            parts = self._load_apart([each.name for each in wanted])
        except DeviceMemoryError:
            raise
        except Exception:  # noqa: BLE001 - the library says it itself when it loads all of it
            _log.debug("%s cannot be loaded in parts", self.asked.source, exc_info=True)
            dice.put_back()
            return {}
        if dice.were_thrown() or before != [stamp(each.folder) for each in wanted]:
            _log.debug("%s is not shared: weights are random, or changed", self.asked.source)
            dice.put_back()
            return {}
        modules = {each.name: getattr(parts, each.name) for each in wanted}
        return {name: module for name, module in modules.items() if _is_module(module)}

    def _load_apart(self, names: list[str]) -> DiffusionPipeline:
        """Let diffusers load some components as it does for the pipeline, but nothing else."""
        others = components_in(read_index(self.folder))
        arguments = {**of_components(self.asked, self.folder), **self._devices()}
        arguments.update({name: None for name in others if name not in names})
        parts = _parts_class(sorted(others)).from_pretrained(os.fspath(self.folder), **arguments)
        if self.asked.placement is not None:
            self.asked.placement.apply(parts)
        return cast("DiffusionPipeline", parts)

    def _devices(self) -> dict[str, object]:
        return {name: self.more[name] for name in ("device_map",) if name in self.more}

    def _make(self, parts: Modules) -> object:
        made = self.asked.run(**self.more, **parts)
        if self.asked.placement is not None:
            self.asked.placement.apply(made)
        return made

    def _hold(self, made: object, parts: Modules) -> None:
        for name, module in parts.items():
            entry = registry.entry_of(module)
            if entry is not None and getattr(made, name, None) is module:
                entry.hold(made, Holder(self.asked.source, type(made).__name__, name))
        if registry.shared_names(made):
            guard(made, OF_PIPELINES, registry.shared_names)

    def _meddler(self, wanted: Wanted) -> tuple[type, str, Key]:
        made = str(read_index(self.folder).get("_class_name"))
        return self.asked.cls, made, wanted.request.key


@dataclass(frozen=True, slots=True)
class _Alone:
    """Loads one model, in one thread at a time."""

    asked: Asked
    commit: str
    more: Mapping[str, object]

    def load(self) -> object:
        folder = self._folder() if self.asked.is_local else None
        version = self.commit if folder is None else stamp(folder)
        known = version if folder is None else [version, ctimes(folder)]
        question = question_of(self.asked, known, self.more) if version else ""
        wanted = _answers.get(question)
        if wanted is None and folder is not None and _is_model_class(self.asked.cls):
            wanted = wanted_model(self.asked, folder, self.asked.cls, _store(), self.more)
        found = None if wanted is None else registry.find(wanted.request)
        if found is not None:
            return self._held(found)
        dice = Dice()
        loaded = self._run()
        folder = self._folder()
        is_same = not self.asked.is_local or (folder is not None and stamp(folder) == version)
        if dice.were_thrown() or not is_same or folder is None or not _is_module(loaded):
            return loaded
        wanted = wanted_model(self.asked, folder, type(loaded), _store(), self.more)
        if wanted is None:
            return loaded
        if question:
            _answers[question] = wanted
        return self._held(registry.add(wanted.request, loaded, folder))

    def _run(self) -> object:
        loaded = self.asked.run(**self.more)
        if self.asked.placement is not None:
            self.asked.placement.apply(loaded)
        return loaded

    def _held(self, module: torch.nn.Module) -> torch.nn.Module:
        entry = registry.entry_of(module)
        if entry is not None:
            holder = Holder(self.asked.source, type(module).__name__, self.asked.subfolder)
            entry.hold(module, holder)
        return module

    def _folder(self) -> Path | None:
        """Return where the files are that the library loads, as far as they are there now."""
        if self.asked.is_local:
            folder = Path(self.asked.source, self.asked.subfolder)
            return folder if folder.is_dir() else None
        from huggingface_hub import try_to_load_from_cache

        name = "/".join(part for part in (self.asked.subfolder, CONFIG) if part)
        cache_dir = cast("str | None", self.asked.kwargs.get("cache_dir"))
        found = None
        if self.commit:
            found = try_to_load_from_cache(
                self.asked.source, name, cache_dir=cache_dir, revision=self.commit
            )
        return Path(found).parent if isinstance(found, str) else None


def _folder(asked: Asked, commit: str) -> Path | None:
    """Return the folder of a pipeline, with everything in it that the library needs."""
    if asked.is_local:
        folder = Path(asked.source)
        return folder if folder.is_dir() else None
    from diffusers import DiffusionPipeline

    is_auto = asked.cls.__name__.startswith("AutoPipelineFor")
    cls = DiffusionPipeline if is_auto else cast("type[DiffusionPipeline]", asked.cls)
    left_out = (*_NOT_FOR_DOWNLOADS, *SOURCE_NAMES)
    words = {name: value for name, value in asked.kwargs.items() if name not in left_out}
    if commit:
        words["revision"] = commit
    return Path(cls.download(asked.source, **words))


def _settled(asked: Asked, folder: Path) -> dict[str, object]:
    """Return the arguments for a repo of which all files are here, so that the Hub is not asked.

    Everything must come from one commit, though a branch may move meanwhile.
    """
    if asked.is_local or folder.parent.name != "snapshots":
        return {}
    settled: dict[str, object] = {"revision": folder.name, "force_download": False}
    if not asked.cls.__name__.startswith("AutoPipelineFor"):
        settled["local_files_only"] = True  # The others may need files of another pipeline.
    return settled


def _store() -> Store | None:
    cache = open_cache()
    return None if cache is None else cache.store


def _is_module(value: object) -> TypeGuard[torch.nn.Module]:
    import torch

    return isinstance(value, torch.nn.Module)


def _is_model_class(cls: type) -> bool:
    import torch

    return issubclass(cls, torch.nn.Module)


def _parts_class(names: list[str]) -> type[DiffusionPipeline]:
    """Return a pipeline that has components of these names and does nothing with them."""
    from diffusers import DiffusionPipeline

    def init(self: DiffusionPipeline, **components: object) -> None:
        DiffusionPipeline.__init__(self)
        self.register_modules(**components)

    kind = inspect.Parameter.KEYWORD_ONLY
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    others = [inspect.Parameter(name, kind, default=None) for name in names]
    init.__signature__ = inspect.Signature([own, *others])  # type: ignore[attr-defined]
    attributes = {"__init__": init, "__module__": __name__, "_optional_components": names}
    return type("_Parts", (DiffusionPipeline,), attributes)
