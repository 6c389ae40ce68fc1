"""Pipelines and models whose equal components are one object.

A component that may be shared is looked up by its content and by all that was asked for: class,
arguments, dtype, device, torch's defaults in this moment. Equal requests give one object, others
do not; an argument whose effect cannot be compared means that nothing is shared. What is not there
is loaded by diffusers itself, but apart from the pipeline: constructors of pipelines write into
what they get, and only what they have not touched can be shared. Then the library makes the
pipeline and is given the components as arguments.

Two equal components of one pipeline stay two objects, as without sharing: what a program does to
`text_encoder` must not happen to `text_encoder_2`.

The registry keeps nothing alive: when the last pipeline that uses a component is gone, so is the
component, and its entry with it. An entry is handed out only while its object is as it was loaded.
"""

from __future__ import annotations

import copy
import inspect
import json
import logging
import os
import threading
import types
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard, cast

from smartcache.errors import SharedComponentError
from smartcache.pretrained.alive import Dice, Look, keep, look_at, size_of
from smartcache.pretrained.call import (
    HOW_LOADED,
    HUB_ARGUMENTS,
    INDEX,
    SOURCE_NAMES,
    STRATEGIES,
    Asked,
    attended,
    dtype_for,
    inside,
    one_at_a_time,
    open_store,
)
from smartcache.pretrained.content import NotComparableError, canonical, content_of
from smartcache.pretrained.kinds import component_class, components_in, library_class
from smartcache.sizes import format_size

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline

    Modules = dict[str, torch.nn.Module]
    """Components by their names."""

_WHERE = frozenset((
    *HUB_ARGUMENTS, *SOURCE_NAMES, "low_cpu_mem_usage", "mirror", "proxies", "resume_download",
    "subfolder",
))  # fmt: skip
"""Arguments that say where files come from, or what is so anyway."""
_COMPARED_APART = frozenset(("dtype", "torch_dtype", "device_map"))
_IN_CONTENT = frozenset(("variant", "use_safetensors"))
_NEVER = (
    "adapter_kwargs", "config", "custom_pipeline", "gguf_file", "load_connected_pipeline",
    "max_memory", "offload_folder", "offload_state_dict", "output_loading_info", "parallel_config",
    "state_dict", "tp_plan", "trust_remote_code", "use_flashpack", "use_onnx",
)  # fmt: skip
"""With one of these nothing is shared: they bring code, other files, or weights on many devices."""
_UNSET = frozenset(("quantization_config", *_NEVER))
"""Arguments for which None says nothing."""
_OLD_DIFFUSERS = (0, 9)
"""Pipelines change the config of a UNet that an older version wrote."""
_OFFLOADS = ("enable_model_cpu_offload", "enable_sequential_cpu_offload", "enable_group_offload")
"""Methods that would move a shared component for all its holders."""
_MOST = 1000
"""What is remembered to be faster is forgotten when it is that much."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Request:
    """What must be equal for two components to be one object."""

    content: str
    """The digest of class, config and weights."""
    cls: str
    arguments: str
    """How it was loaded, in canonical form."""
    dtype: str
    device: str
    number: int = 0
    """Which of several equal components of one pipeline: they stay as many objects."""


_meddlers: set[tuple[type, str, Request]] = set()
"""Pipelines whose constructors change such a component: they get one of their own."""
_answers: dict[str, Request] = {}
"""What the models that were loaded alone turned out to be, by the whole call."""


def load_pipeline(asked: Asked) -> object:
    """Load a pipeline whose components are those in memory, as far as they are equal."""
    folder, obstacle = None, _obstacle(asked)
    if obstacle:
        _log.debug("nothing of %s is shared because of %s", asked.source, obstacle)
    else:
        with attended(asked) as commit:
            folder = asked.folder() if asked.is_local else _downloaded(asked, commit)
    if folder is None:
        return load_unshared(asked)
    pipeline = _Pipeline(asked, folder)
    wanted = pipeline.wanted()
    with inside(), one_at_a_time():
        return pipeline.load(wanted)


def load_model(asked: Asked) -> object:
    """Load one model, or return the equal one that is in memory."""
    if _obstacle(asked):
        return load_unshared(asked)
    with attended(asked) as commit, one_at_a_time():
        folder = asked.folder() if asked.is_local else None
        # What tells its files from others of the same place. The times of a file may be set back
        # after a change; but what was loaded is judged without, as links change them too.
        version = commit if folder is None else _stamp(folder)
        times = [] if folder is None else [st.st_ctime_ns for _, st in _stats(folder)]
        question = _question(asked, [version, times]) if version else ""
        request = _answers.get(question)
        if request is None and folder is not None and _is_model_class(asked.cls):
            request = _request(asked, asked.cls, folder, asked.subfolder, asked.kwargs)
        loaded: object = None if request is None else registry.find(request)
        if loaded is None:
            dice = Dice()
            loaded = asked.place(asked.run(**asked.placed()))
            folder = asked.folder(commit) if asked.is_local or commit else None
            if dice.were_thrown() or folder is None or not _is_module(loaded):
                return loaded
            request = _request(asked, type(loaded), folder, asked.subfolder, asked.kwargs)
            if request is None or (asked.is_local and _stamp(folder) != version):
                return loaded  # It has no text, or was written to meanwhile.
            if question:
                _forget_if_many(_answers)
                _answers[question] = request
            loaded = registry.add(request, loaded)
        entry = registry.entry_of(loaded)
        if entry is not None:
            entry.hold(loaded, Holder(asked.source, type(loaded).__name__, asked.subfolder))
        return loaded


def load_unshared(asked: Asked) -> object:
    """Load what nobody else has or gets."""
    with attended(asked):
        loaded = asked.load()
    return asked.place(loaded)


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
            module = there[name]
            entry = registry.entry_of(module)
            if entry is None:
                continue
            if any(user is not pipeline for user, _ in entry.users()):
                own = copy.deepcopy(module)
                lift(own)
                cast("DiffusionPipeline", pipeline).register_modules(**{name: own})
            else:
                registry.forget(module)
        if not registry.shared_names(pipeline):
            lift(pipeline)


# What of a call may be shared, and what must be equal for that


def _obstacle(asked: Asked) -> str:
    """Return which argument keeps this call from sharing anything; "" if none does."""
    for name in _NEVER:
        if asked.kwargs.get(name) not in (None, False):
            return name
    if len(asked.args) > 1:
        return "a positional argument"
    if asked.kwargs.get("low_cpu_mem_usage", True) is not True:
        # Weights that are not in the file are then whatever was in memory.
        return "low_cpu_mem_usage"
    device_map = asked.kwargs.get("device_map")
    return "" if device_map is None or _one_device(device_map) is not None else "device_map"


def _one_device(device_map: object) -> str | None:
    """Return the one device that a map names; None if there is none, or it is found out later."""
    import torch

    if isinstance(device_map, dict) and list(device_map) == [""]:
        device_map = device_map[""]
    is_device = isinstance(device_map, str | int | torch.device) and device_map not in STRATEGIES
    return str(device_map) if is_device else None


def _request(
    asked: Asked, cls: type, folder: Path, name: str, arguments: Mapping[str, object]
) -> Request | None:
    """Return what a component in a folder is, loaded with these arguments; None: not shared."""
    variant, use_safetensors = (arguments.get(each) for each in ("variant", "use_safetensors"))
    if not isinstance(variant, str | None) or not isinstance(use_safetensors, bool | None):
        return None
    content = content_of(
        folder, cls.__name__, variant=variant, use_safetensors=use_safetensors, store=open_store()
    )
    if content is None:
        return None
    left_out = _WHERE | _COMPARED_APART | (_IN_CONTENT if content.is_plain else frozenset())
    words = {
        each: value
        for each, value in arguments.items()
        if each not in left_out and not (each in _UNSET and value is None)
    }
    written_by = [int(part) for part in content.written_by.split(".")[:2] if part.isdigit()]
    is_old = bool(written_by) and tuple(written_by) < _OLD_DIFFUSERS
    placed = None
    if asked.placement is not None:
        placed = asked.placement.device_for(name, cls.__name__)
    device = _one_device({**arguments, **asked.placed()}.get("device_map")) or placed
    quantised = name if "quantization_config" in words else ""
    try:
        return Request(
            content=content.digest,
            cls=_qualified(cls),
            arguments=canonical([words, quantised, is_old, _surroundings()]),
            dtype=canonical(dtype_for(name, arguments)),
            device="" if device is None else str(device),
        )
    except NotComparableError as error:
        _log.debug("%s is not shared: %s", folder, error)
        return None


def _question(asked: Asked, version: object) -> str:
    """Return a whole call for one model as a text; "" if it has none."""
    words = {name: value for name, value in asked.kwargs.items() if name not in HUB_ARGUMENTS}
    placed = asked.placement
    devices = [] if placed is None else [placed.device, placed.encoders]
    try:
        return canonical(
            [_qualified(asked.cls), asked.source, version, words, devices, _surroundings()]
        )
    except NotComparableError:
        return ""


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


def _stamp(folder: Path) -> list[object]:
    """Return what changes when a file of a folder is written or replaced.

    A link to a file, which another thread may be making, does not count: it changes the ctime.
    """
    return [[name, st.st_ino, st.st_size, st.st_mtime_ns] for name, st in _stats(folder)]


def _stats(folder: Path) -> list[tuple[str, os.stat_result]]:
    paths = sorted(folder.iterdir())  # A link that leads nowhere is none of our business.
    return [(path.name, path.stat() if path.exists() else path.lstat()) for path in paths]


def _qualified(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _is_module(value: object) -> TypeGuard[torch.nn.Module]:
    import torch

    return isinstance(value, torch.nn.Module)


def _is_model_class(cls: type | None) -> TypeGuard[type]:
    """Say whether a class is a model of one of the libraries: with weights, no stranger's code."""
    import diffusers
    import torch
    import transformers

    models = (diffusers.ModelMixin, transformers.PreTrainedModel)
    return cls is not None and issubclass(cls, torch.nn.Module) and issubclass(cls, models)


def _forget_if_many(memory: set[tuple[type, str, Request]] | dict[str, Request]) -> None:
    if len(memory) >= _MOST:
        memory.clear()


# A pipeline


class _Pipeline:
    """Loads one pipeline out of a folder that has everything, in one thread at a time."""

    def __init__(self, asked: Asked, folder: Path) -> None:
        self.asked = asked
        self.folder = folder
        try:
            index = json.loads((folder / INDEX).read_text("utf-8"))
        except (OSError, ValueError):
            index = {}
        self.index: dict[str, object] = index if isinstance(index, dict) else {}
        self.components = components_in(self.index)
        self.cls: type | None = asked.cls
        """The class of the pipeline that will be made; None: the library finds it later."""
        if asked.is_auto_pipeline:
            self.cls = None
        elif asked.cls.__name__ == "DiffusionPipeline":
            self.cls = library_class("diffusers", self.index.get("_class_name"))
        self.parameters = set(() if self.cls is None else inspect.signature(self.cls).parameters)
        self._stamps: dict[str, list[object]] = {}
        """The files of components, before their digests were asked for."""

    def arguments(self) -> dict[str, object]:
        """Return the arguments that reach the components, as far as the library knows them.

        They are not for the pipeline's constructor, nor about its source.
        """
        import diffusers
        import torch

        own = {*_WHERE, *self.index, *self.parameters}
        found = {
            name: value
            for name, value in self.asked.kwargs.items()
            if name not in own and not isinstance(value, torch.nn.Module | diffusers.SchedulerMixin)
        }
        return {**found, **self.asked.placed()}

    def wanted(self) -> dict[str, Request]:
        """Return the components that may be shared; ValueError for names that are not there."""
        share = self.asked.share
        names = share if isinstance(share, tuple) else tuple(self.components)
        unknown = [name for name in names if name not in self.index]
        if unknown and self.index:
            there = ", ".join(sorted(self.components))
            lacking = ", ".join(unknown)
            raise ValueError(f"There is no component {lacking} to share; there are: {there}")
        if not isinstance(self.index.get("_class_name"), str) or not self._loads_as_usual():
            return {}
        expected = set(self.components) if self.cls is None else self.parameters
        arguments = self.arguments()
        found: dict[str, Request] = {}
        numbers: dict[tuple[str, str], int] = {}
        for name in sorted(set(names) & set(self.components) & expected - set(self.asked.kwargs)):
            cls, folder = component_class(*self.components[name]), self.folder / name
            if not _is_model_class(cls) or not folder.is_dir():
                continue  # a scheduler, a tokenizer, a stranger's code
            self._stamps[name] = _stamp(folder)
            request = _request(self.asked, cls, folder, name, arguments)
            if request is not None:
                same = (request.content, request.cls)
                numbers[same] = numbers.get(same, -1) + 1
                found[name] = replace(request, number=numbers[same])
        return found

    def _loads_as_usual(self) -> bool:
        """Say whether it is loaded by diffusers' own function, not by one of its class."""
        if self.cls is None:
            return True
        owner = next((each for each in self.cls.__mro__ if "from_pretrained" in vars(each)), object)
        is_usual = owner.__name__ == "DiffusionPipeline" and owner.__module__.startswith(
            "diffusers."
        )
        return is_usual and not getattr(self.cls, "_load_connected_pipes", False)

    def load(self, wanted: dict[str, Request]) -> object:
        """Load the pipeline, with those components that can be shared."""
        kind = (self.asked.cls, str(self.index.get("_class_name")))
        wanted = {name: each for name, each in wanted.items() if (*kind, each) not in _meddlers}
        parts, held = self._parts(wanted)
        made, changed = self._made(parts, held)
        if changed:
            _log.debug("%s changes %s: not shared", type(made).__name__, sorted(changed))
            _forget_if_many(_meddlers)
            _meddlers.update((*kind, wanted[name]) for name in changed)
            for name in changed - held:
                registry.forget(parts[name])
            if changed & held:
                made = self._make({name: parts[name] for name in parts if name not in changed})
        for name, module in parts.items():
            entry = registry.entry_of(module)
            if entry is not None and getattr(made, name, None) is module:
                entry.hold(made, Holder(self.asked.source, type(made).__name__, name))
        if registry.shared_names(made):
            guard(made)
        return made

    def _parts(self, wanted: dict[str, Request]) -> tuple[Modules, set[str]]:
        """Return components as they were loaded, and the names of those that others may hold."""
        hits = {name: registry.find(request) for name, request in wanted.items()}
        parts = {name: module for name, module in hits.items() if module is not None}
        held = set(parts)
        for name, module in self._loaded(wanted.keys() - held).items():
            parts[name] = registry.add(wanted[name], module)
        return parts, held

    def _made(self, parts: Modules, held: set[str]) -> tuple[object, set[str]]:
        """Make the pipeline; return it, and which components its constructor has changed.

        Those that others may hold are as before again.
        """
        kept = {name: keep(parts[name]) for name in held}
        changed: set[str] = set()
        try:
            made = self._make(parts)
        finally:
            for name, module in parts.items():
                entry = registry.entry_of(module)
                if entry is not None and entry.difference(at_values=False):
                    changed.add(name)
                    if name in kept:
                        kept[name].restore()
        return made, changed

    def _make(self, parts: Modules) -> object:
        settled: dict[str, object] = {}
        if not self.asked.is_local and self.folder.parent.name == "snapshots":
            # All files are here: the Hub is not asked, and everything comes from one commit, though
            # a branch may move meanwhile.
            settled = {"revision": self.folder.name, "force_download": False}
            if not self.asked.is_auto_pipeline:  # They may need files of another pipeline.
                settled["local_files_only"] = True
        return self.asked.place(self.asked.run(**self.asked.placed(), **settled, **parts))

    def _loaded(self, names: set[str]) -> Modules:
        """Load components apart; none if they are not the same at every time."""
        if not names:
            return {}
        others = {name: None for name in self.components if name not in names}
        dice = Dice()
        try:
            # As diffusers loads them for the pipeline, but nothing else.
            parts = _parts_class(sorted(self.components)).from_pretrained(
                os.fspath(self.folder), **{**self.arguments(), **others}
            )
            self.asked.place(parts)
        except Exception:  # noqa: BLE001 - the library says it itself when it loads all of it
            _log.debug("%s cannot be loaded in parts", self.asked.source, exc_info=True)
            dice.put_back()
            return {}
        is_same = all(_stamp(self.folder / name) == self._stamps[name] for name in names)
        if dice.were_thrown() or not is_same:
            _log.debug("%s is not shared: weights are random, or changed", self.asked.source)
            dice.put_back()
            return {}
        modules = {name: getattr(parts, name) for name in names}
        return {name: module for name, module in modules.items() if _is_module(module)}


def _downloaded(asked: Asked, commit: str) -> Path:
    """Return the folder of a pipeline, with everything in it that the library needs."""
    from diffusers import DiffusionPipeline

    cls = asked.cls
    if asked.is_auto_pipeline:
        cls = DiffusionPipeline
    left_out = (*HOW_LOADED, *SOURCE_NAMES)
    words = {name: value for name, value in asked.kwargs.items() if name not in left_out}
    if commit:
        words["revision"] = commit
    return Path(cast("type[DiffusionPipeline]", cls).download(asked.source, **words))


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


# What is in memory, and who holds it


@dataclass(frozen=True, slots=True)
class Holder:
    """Who uses a component: a pipeline, or whoever asked for the model itself."""

    source: str
    """The repo or folder."""
    cls: str
    component: str
    """Its name in the pipeline; the subfolder of a model that was loaded alone."""

    def __str__(self) -> str:
        """Return it in words."""
        return f"{self.source} ({self.cls}{'.' if self.component else ''}{self.component})"


@dataclass(slots=True, eq=False)
class Entry:
    """One object that is shared."""

    request: Request
    loaded: Look
    """What it was like."""
    _module: weakref.ref[torch.nn.Module]
    is_offered: bool = True
    """Whether it is as it was loaded, as far as anybody knows: others may get it too."""
    _holders: list[tuple[weakref.ref[object], Holder]] = field(default_factory=list)

    @property
    def module(self) -> torch.nn.Module | None:
        """The object; None when nobody holds it any more."""
        return self._module()

    def difference(self, *, at_values: bool = True) -> str:
        """Return what has changed since it was loaded, in words; "" if nothing has."""
        module = self.module
        now = None if module is None else _looked_at(module, at_values=at_values)
        return "it cannot be looked at" if now is None else self.loaded.difference(now)

    def hold(self, by: object, holder: Holder) -> None:
        """Note that a pipeline, or the model itself for whoever asked for it, uses the object."""
        if (id(by), holder) not in {(id(ref()), each) for ref, each in self._holders}:
            self._holders.append((weakref.ref(by), holder))

    def users(self) -> list[tuple[object, Holder]]:
        """Return who uses the object now: pipelines that live and still have it."""
        module = self.module
        found = [(ref(), holder) for ref, holder in self._holders]
        return [
            (user, holder)
            for user, holder in found
            if user is not None
            and (user is module or getattr(user, holder.component, None) is module)
        ]


def _looked_at(module: torch.nn.Module, *, at_values: bool = True) -> Look | None:
    """Return what a module is like; None if its tensors cannot be looked at.

    Those of quantising libraries may raise anything when a part of them is asked for.
    """
    try:
        return look_at(module, at_values=at_values)
    except Exception:  # noqa: BLE001
        _log.debug("%s cannot be looked at", type(module).__name__, exc_info=True)
        return None


class Registry:
    """The entries of this process."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._reopen()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._reopen)

    def _reopen(self) -> None:
        """Begin with an open lock; in a forked child too, where no thread is that could open it."""
        self._lock = threading.RLock()

    def __iter__(self) -> Iterator[Entry]:
        """Go through the entries whose objects live."""
        with self._lock:
            self._entries = [each for each in self._entries if each.module is not None]
            return iter(list(self._entries))

    def find(self, request: Request) -> torch.nn.Module | None:
        """Return the object for a request, if there is one and it is as it was loaded.

        One that was changed is never handed out again.
        """
        for entry in self:
            if entry.request == request and entry.is_offered:
                changed = entry.difference()
                if not changed:
                    return entry.module
                _log.debug("%s is not offered any more: %s", request.cls, changed)
                entry.is_offered = False
        return None

    def add(self, request: Request, module: torch.nn.Module) -> torch.nn.Module:
        """Return the object to use for a request: the one that is here, or else this one.

        A module of which the weights are elsewhere, or that cannot be looked at, is not shared.
        """
        with self._lock:
            other = self.find(request)
            if other is not None:
                return other
            guard(module)
            loaded = _looked_at(module)
            if loaded is None or not loaded.is_whole:
                _log.debug("%s cannot be shared: not all of it is in memory", request.cls)
                lift(module)
            else:
                self._entries.append(Entry(request, loaded, weakref.ref(module)))
        return module

    def entry_of(self, module: object) -> Entry | None:
        """Return the entry of an object."""
        found = (each for each in self if each.module is module)
        return None if module is None else next(found, None)

    def forget(self, module: object) -> None:
        """Forget an object, if it is known; whoever holds it keeps it, for himself."""
        with self._lock:
            if self.entry_of(module) is not None:
                self._entries = [each for each in self._entries if each.module is not module]
                lift(module)

    def shared_names(self, owner: object) -> list[str]:
        """Return what a pipeline, or a model, shares with others now or when they ask for it.

        What was changed and has no other user is its own again.
        """
        names: set[str] = set()
        for entry in self:
            users = entry.users()
            if entry.is_offered or len(users) > 1:
                mine = (each for user, each in users if owner is user or owner is entry.module)
                names.update(each.component or each.cls for each in mine)
        return sorted(names)

    def clear(self) -> None:
        """Forget everything."""
        for entry in self:
            self.forget(entry.module)


registry = Registry()


class Guard:
    """Stands before one method of one object: it raises while something of the object is shared.

    It is an attribute of the object and does not keep it alive. A copy of the object, by
    `copy.deepcopy` or pickle, shares nothing and has the method itself, without this package.
    """

    __slots__ = ("__weakref__", "_name", "_owner")

    def __init__(self, owner: object, name: str) -> None:
        self._owner = weakref.ref(owner)
        self._name = name

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Call the method, if nothing of the object is shared any more."""
        owner = self._owner()
        names = ["a component"] if owner is None else registry.shared_names(owner)
        if names:
            what = f"{self._name}() would move {', '.join(names)}"
            raise SharedComponentError(f"{what} for every pipeline that shares it")
        lift(owner)
        return getattr(owner, self._name)(*args, **kwargs)

    def __reduce__(self) -> tuple[object, ...]:
        # While a copy is made its own attributes are not there yet: this is the class's method.
        return (getattr, (self._owner(), self._name))


def guard(owner: object) -> None:
    """Guard those methods that an object has and that would move what it shares."""
    for name in _OFFLOADS:
        if hasattr(type(owner), name) and name not in vars(owner):
            vars(owner)[name] = Guard(owner, name)


def lift(owner: object) -> None:
    """Take the guards of an object away, and what a copy has in their place."""
    for name in _OFFLOADS:
        if isinstance(vars(owner).get(name), Guard | types.MethodType):
            del vars(owner)[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedComponent:
    """A component in memory that may be, or is, shared."""

    cls: str
    digest: str
    """Of its class, config and weights."""
    dtype: str
    device: str
    size: int
    """Bytes in memory."""
    is_changed: bool = False
    """Whether it is not as it was loaded: its holders keep it, nobody else gets it."""
    holders: tuple[Holder, ...]

    @property
    def saved_size(self) -> int:
        """The bytes that would be in memory besides, if nothing were shared."""
        return self.size * max(0, len(self.holders) - 1)

    def __str__(self) -> str:
        """Return one line for a person."""
        saved = f", saves {format_size(self.saved_size)}" if self.saved_size else ""
        used = ", ".join(map(str, self.holders)) or "nobody"
        changed = ", changed" if self.is_changed else ""
        about = f"{self.cls} {self.digest[:12]} {self.dtype} on {self.device}{changed}"
        return f"{about}, {format_size(self.size)}{saved}: {used}"


def components() -> list[SharedComponent]:
    """Return the components in memory that `share=True` loaded, and who uses each of them.

    The largest come first. `sum(each.saved_size for each in components())` is what sharing saves.
    """
    found = []
    for entry in registry:
        module = entry.module
        if module is None:
            continue
        tensors = [*module.parameters(), *module.buffers()]
        dtypes = {str(each.dtype) for each in tensors if each.is_floating_point()}
        found.append(
            SharedComponent(
                cls=type(module).__name__,
                digest=entry.request.content,
                dtype="+".join(sorted(each.removeprefix("torch.") for each in dtypes)),
                device="+".join(sorted({str(each.device) for each in tensors})),
                size=size_of(module),
                is_changed=not entry.is_offered or bool(entry.difference()),
                holders=tuple(holder for _, holder in entry.users()),
            )
        )
    return sorted(found, key=lambda each: (-each.size, each.cls, each.digest))
