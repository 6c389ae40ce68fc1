"""The encoders of a pipeline alone: what turns pictures and captions into latents and embeddings.

Nothing else of the pipeline is fetched or loaded. They are given back on exit: their memory on the
device is free then, whoever still holds one, and using it is an error.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from smartcache.errors import (
    MissingWeightsError,
    PretrainedError,
    SmartcacheError,
    UnknownClassError,
    WrongVariantError,
)
from smartcache.pretrained.api import load
from smartcache.pretrained.call import (
    HUB_ARGUMENTS,
    PARTS,
    Asked,
    Placement,
    dtype_arguments,
    dtype_for,
    free_cached,
    open_store,
    part_of,
    pin,
    resolve_device,
    without_none,
)
from smartcache.pretrained.content import (
    digest_of_files,
    digest_of_module,
    dtype_of,
    quantisation_of,
)
from smartcache.pretrained.kinds import PipelineIndex, component_class

if TYPE_CHECKING:
    import torch

    from smartcache.pretrained.call import Device, Dtype

_log = logging.getLogger(__name__)
_OF_MODELS = ("low_cpu_mem_usage", "quantization_config", "use_safetensors", "variant")
"""What models take of a pipeline's arguments, and tokenizers do not."""


class Encoders:
    """The encoders of a pipeline, by the names it has for them: `encoders.vae`, `encoders["vae"]`.

    As a context manager, or with `close`, it frees what they hold on the device.
    """

    def __init__(
        self,
        source: str,
        components: Mapping[str, object],
        *,
        pipeline: object | None,
        device: torch.device,
        digests: Mapping[str, str],
        lent: Iterable[str] = (),
    ) -> None:
        self._source = source
        self._components = dict(components)
        self._pipeline = pipeline
        self._lent = frozenset(lent)
        self._is_closed = False
        self.device = device
        self.digests = dict(digests)
        """Of each component: of a model's class, config and weights, of a tokenizer's files."""
        self.dtype = next(map(dtype_of, self._modules().values()), None)
        """The dtype of the first model; None if there are tokenizers only."""
        self._fingerprint = self._describe()
        self._remember()

    @property
    def pipeline(self) -> object | None:
        """The pipeline with everything else None, for `encode_prompt` and its like.

        None if its class cannot be made without what was left out.
        """
        self._refuse_closed()
        return self._pipeline

    @property
    def fingerprint(self) -> dict[str, object]:
        """What results depend on, as plain values: the same on every machine and device."""
        unknown = sorted(set(self._components) - set(self.digests))
        if unknown:
            raise PretrainedError(
                f"{', '.join(unknown)} of {self._source} was passed in: its digest is not known",
                hint="Let load_encoders load it.",
            )
        return {name: dict(values) for name, values in self._fingerprint.items()}

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._components:
            raise AttributeError(
                f"{self._source} has no encoder {name!r}; it has {', '.join(self)}"
            )
        return self[name]

    def __getitem__(self, name: str) -> object:
        if name not in self._components:
            raise KeyError(name)
        self._refuse_closed()
        return self._components[name]

    def __contains__(self, name: str) -> bool:
        return name in self._components

    def __iter__(self) -> Iterator[str]:
        return iter(self._components)

    def __len__(self) -> int:
        return len(self._components)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._components})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the memory on the device, whoever holds one of the encoders."""
        if self._is_closed:
            return
        self._is_closed = True
        for name, module in self._modules().items():
            if name not in self._lent:
                _release(module, f"{name} of {self._source}")
        self._pipeline = None
        self._components = dict.fromkeys(self._components)
        if self.device.type not in ("cpu", "meta"):
            gc.collect()  # What computations have left in cycles holds memory of the device too.
            free_cached(self.device)

    def _modules(self) -> dict[str, torch.nn.Module]:
        import torch

        found = self._components.items()
        return {name: each for name, each in found if isinstance(each, torch.nn.Module)}

    def _describe(self) -> dict[str, dict[str, object]]:
        described: dict[str, dict[str, object]] = {
            name: {"digest": digest} for name, digest in self.digests.items()
        }
        for name, module in self._modules().items():
            if name in described:
                dtype = dtype_of(module)
                described[name]["dtype"] = str(dtype).removeprefix("torch.")
                quantised = quantisation_of(module)
                described[name] |= {"quantisation": quantised} if quantised else {}
        return described

    def _remember(self) -> None:
        """Let the fingerprint stand for the models in keys, so that no weights are read for one."""
        from smartcache.artifacts import remember_module

        for name, module in self._modules().items():
            if name in self._fingerprint:
                remember_module(module, self._fingerprint[name])

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise _released(f"The encoders of {self._source}")


def load_encoders(
    repo_or_path: str | os.PathLike[str],
    *,
    parts: str | Iterable[str] = PARTS,
    device: Device = "auto",
    dtype: Dtype | None = None,
    variant: str | None = None,
    revision: str | None = None,
    **kwargs: object,
) -> Encoders:
    """Load tokenizers and text encoders, image encoders and VAE of a pipeline onto the device.

    `parts` chooses among "text", "image" and "vae"; a pipeline need not have all of them. Nothing
    else is fetched. Device "auto" is CUDA, MPS or else the CPU. Use it as a context manager.
    """
    import torch

    for name in ("share", "device_map"):
        if name in kwargs:
            raise TypeError(f"load_encoders() takes no {name}: it frees what it has loaded")
    wanted = {parts} if isinstance(parts, str) else set(parts)
    unknown = wanted.difference(PARTS)
    if unknown or not wanted:
        given = ", ".join(sorted(map(repr, unknown))) or "none"
        raise ValueError(f"parts are among {', '.join(map(repr, PARTS))}; given: {given}")
    source = os.fspath(repo_or_path)
    named = {"variant": variant, "revision": revision}
    arguments = pin(source, {**kwargs, **without_none(named)})
    index = PipelineIndex.of(source, arguments)
    chosen = [name for name, (_, cls) in index.components.items() if part_of(name, cls) in wanted]
    if not chosen:
        raise MissingWeightsError(
            f"{source} has none of the parts {', '.join(sorted(wanted))}: "
            f"its components are {', '.join(index.components)}",
            hint="Choose other parts.",
        )
    is_pinned = hasattr(arguments.get("revision"), "resolved")
    if not is_pinned and not os.path.isdir(source) and index.folder.parent.name == "snapshots":
        arguments["revision"] = (
            index.folder.name
        )  # All that follows is of the commit that was read.
    arguments.update(dtype_arguments(index.cls, dtype, arguments.pop("torch_dtype", None)))
    where = resolve_device(device) or torch.device("cpu")
    pipeline = _load_pipeline(index, chosen, arguments, where)
    if pipeline is not None:
        components = {name: getattr(pipeline, name) for name in chosen}
    else:
        components = {name: _load_alone(index, name, arguments, where) for name in chosen}
    components = {name: each for name, each in components.items() if each is not None}
    lent = {name for name in components if name in kwargs}
    digests, store = {}, open_store()
    for name, component in components.items():
        if name in lent:
            continue
        if isinstance(component, torch.nn.Module):
            digests[name] = digest_of_module(index.folder / name, component, arguments, store)
        else:
            digests[name] = digest_of_files(index.folder / name, store)
    return Encoders(source, components, pipeline=pipeline, device=where, digests=digests, lent=lent)


def _load_pipeline(
    index: PipelineIndex, chosen: list[str], arguments: Mapping[str, object], device: torch.device
) -> object | None:
    """Return the pipeline without the rest; None if its class cannot live without it."""
    left_out: dict[str, object] = {
        name: None
        for name, (_, cls) in index.components.items()
        if name not in chosen and not cls.endswith("Scheduler")
    }
    if "requires_safety_checker" in index.said:
        left_out["requires_safety_checker"] = False
    asked = Asked(
        cls=index.cls,
        original=index.cls.from_pretrained,  # type: ignore[attr-defined]
        args=(index.source,),
        kwargs={**left_out, **arguments},
        placement=Placement(device=device),
    )
    try:
        return load(asked)
    except (AttributeError, TypeError) as error:
        if isinstance(error, SmartcacheError):
            raise
        _log.debug("%s cannot be made of its encoders alone: %s", index.cls.__name__, error)
        return None


def _load_alone(
    index: PipelineIndex, name: str, arguments: Mapping[str, object], device: torch.device
) -> object:
    """Load one component by its own class."""
    if name in arguments:
        return arguments[name]
    library, class_name = index.components[name]
    cls = component_class(library, class_name)
    if cls is None:
        raise UnknownClassError(f"{name} of {index.source}: {library} has no class {class_name!r}")
    taken = {each: arguments[each] for each in HUB_ARGUMENTS if each in arguments}
    asked = Asked(
        cls=cls,
        original=cls.from_pretrained,  # type: ignore[attr-defined]
        args=(index.source,),
        kwargs={**taken, "subfolder": name},
        placement=Placement(device=device, component=name),
    )
    if not asked.is_model:
        return load(asked)
    more = {each: arguments[each] for each in _OF_MODELS if each in arguments}
    more.update(dtype_arguments(cls, None, dtype_for(name, arguments)))
    asked = replace(asked, kwargs={**asked.kwargs, **more})
    try:
        return load(asked)
    except WrongVariantError:
        # As pipelines do it: of a component that has no such variant the usual weights are taken.
        kwargs = {each: value for each, value in asked.kwargs.items() if each != "variant"}
        return load(replace(asked, kwargs=kwargs))


def _release(module: torch.nn.Module, what: str) -> None:
    """Free what a module holds, and make its use an error that says why."""
    try:
        module.to("meta")
    except (RuntimeError, ValueError, NotImplementedError) as error:
        # Some quantised weights cannot be moved at all; they go when nobody holds them any more.
        _log.debug("%s cannot be released: %s", what, error)
        return

    def refuse(*_: object) -> None:
        raise _released(what)

    for each in module.modules():
        each.register_forward_pre_hook(refuse)


def _released(what: str) -> PretrainedError:
    return PretrainedError(
        f"{what} can no longer be used: load_encoders has ended and freed the memory",
        hint="Use encoders inside the `with` block that loads them.",
    )
