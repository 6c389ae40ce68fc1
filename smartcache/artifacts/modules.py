"""A model in memory as part of a key: by its class, config and weights.

    key = compute_key({"vae": vae, "size": 1024})

The weights are what `state_dict()` holds, each entry by name, dtype, shape and bytes: the same on
every device, in every memory format, and after saving and loading. What does not count: the
training flag, `requires_grad`, hooks, buffers that are not persistent, and attributes besides the
config, such as the scale of an adapter that is not merged.

All weights are read once. After that a look is enough: at the names, dtypes, shapes and versions of
the tensors, and at a sample of their values, because merging a LoRA (`.data`), a fused optimizer
and numpy write without raising a version. The sample is `_BLOCKS` blocks of `_BLOCK` neighbours,
evenly spread over each tensor; a tensor that is no larger is looked at as a whole. Whatever changes
a tensor as a whole, or a seventh of it in a row, is seen. What it cannot see: a few single elements
outside of the sample, written in one of these ways, or in a tensor put in the place of another.

Where a tensor lies does not count: a model that was only moved keeps its value. A move keeps the
version of a parameter; a buffer is a new tensor afterwards, of version 0, and so is a parameter
under some settings of torch. A version may therefore stay, or be 0 again.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from blake3 import blake3

from smartcache.artifacts.keys import canonical, tensor_part
from smartcache.artifacts.values.refusals import RefusedError, with_article

if TYPE_CHECKING:
    import torch

    Entries = dict[str, torch.Tensor | bytes]

_BLOCKS: Final = 8
_BLOCK: Final = 32
_DEPTH: Final = 20
_ORIGINS: Final = frozenset((
    "_class_name", "_commit_hash", "_diffusers_version", "_name_or_path", "_use_default_values",
    "name_or_path", "transformers_version",
))  # fmt: skip
"""Fields of a config that tell where a model came from, not what it is."""
_OF_LOADING: Final = frozenset(("architectures", "dtype", "torch_dtype"))
"""What transformers notes in a config when it loads or saves; the model itself says it better."""
_ADDRESS: Final = re.compile(r"\b0x[0-9a-fA-F]+")
_THREADS: Final = min(os.cpu_count() or 1, 8)


@dataclass(frozen=True, slots=True)
class _Look:
    """A module at one moment, without having read all of it."""

    form: tuple[object, ...]
    versions: tuple[int, ...]
    sample: bytes

    def holds_for(self, now: _Look) -> bool:
        """Say whether nothing is known to have changed since, but where things lie in memory."""
        return (self.form, self.sample) == (now.form, now.sample) and all(
            after in (before, 0) for before, after in zip(self.versions, now.versions, strict=True)
        )


_known: Final[WeakKeyDictionary[torch.nn.Module, tuple[_Look, object]]] = WeakKeyDictionary()


def module_value(module: torch.nn.Module) -> object:
    """Return plain values that stand for a module; RefusedError if it has no weights in memory.

    Reads all weights the first time, and again when they have changed.
    """
    about, entries = _about(module), _entries(module)
    look = _look(about, entries)
    known = _known.get(module)
    if look is not None and known is not None and known[0].holds_for(look):
        value = known[1]
    else:
        value = {**about, "weights": _digest(entries)}
    if look is not None:
        _known[module] = (look, value)
    return value


def remember_module(module: torch.nn.Module, value: object) -> None:
    """Let a value stand for a module in keys, instead of its weights, until it changes.

    For whoever knows by other means what it has loaded: no weights are read for a key then. A
    module that cannot be looked at (of tensors that are no plain memory) is not remembered.
    """
    with contextlib.suppress(RefusedError):
        look = _look(_about(module), _entries(module))
        if look is not None:
            _known[module] = (look, value)


def _about(module: torch.nn.Module) -> dict[str, object]:
    cls, config = type(module), getattr(module, "config", None)
    if not isinstance(config, Mapping):
        to_dict = getattr(config, "to_dict", None)
        config = to_dict() if callable(to_dict) and not isinstance(config, type) else None
    return {"class": f"{cls.__module__}.{cls.__qualname__}", "config": _plain(config, _DEPTH)}


def _plain(value: object, depth: int) -> object:
    """Return a part of a config as it is after saving and loading: a list for a tuple.

    What no key can be made of counts by its repr, or as None if that has an address in it.
    """
    import torch

    if not depth or isinstance(value, torch.nn.Module):
        return None
    if isinstance(value, Mapping):
        left_out = _ORIGINS | _OF_LOADING if "model_type" in value else _ORIGINS
        kept = ((name, each) for name, each in value.items() if name not in left_out)
        return {str(name): _plain(each, depth - 1) for name, each in kept}
    if isinstance(value, list | tuple):
        return [_plain(each, depth - 1) for each in value]
    try:
        canonical(value)
    except RefusedError:
        text = repr(value)
        return None if _ADDRESS.search(text) else text
    return value


def _entries(module: torch.nn.Module) -> Entries:
    """Return the state of a module in the order of names; what is no tensor as canonical bytes."""
    import torch

    entries: Entries = {}
    for name, value in sorted(module.state_dict(keep_vars=True).items()):
        if not isinstance(value, torch.Tensor):
            with _at(name):
                entries[name] = canonical(value)
        elif torch.nn.parameter.is_lazy(value) or value.is_meta:
            raise RefusedError(
                f"no key can be made of {_named(module)}: its weights are not in memory",
                hint="Make the key while it is loaded: inside the `with` block of load_encoders.",
            )
        else:
            entries[name] = value
    return entries


def _digest(entries: Entries) -> str:
    """Return the digest of all weights; one at a time is copied to the CPU if need be.

    The tensors are hashed one by one, those that are large by several threads.
    """
    import torch

    digest = blake3()
    for name, value in entries.items():
        digest.update(canonical(name))
        if isinstance(value, bytes):
            digest.update(value)
            continue
        with _at(name):
            if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
                hint = "Put plain values in its place, such as the fingerprint of load_encoders."
                raise RefusedError(f"no key can be made of {_named(value)}", hint=hint)
            plain = value.detach()
            if type(plain) is not torch.Tensor:
                plain = plain.as_subclass(torch.Tensor)
            digest.update(tensor_part(plain, threads=_THREADS))
    return digest.hexdigest()


def _named(value: object) -> str:
    return with_article(type(value).__qualname__)


@contextlib.contextmanager
def _at(name: str) -> Iterator[None]:
    """Let a refusal name the entry that it is about."""
    try:
        yield
    except RefusedError as refused:
        refused.within(name)
        raise


def _look(about: Mapping[str, object], entries: Entries) -> _Look | None:
    """Return what a module is like now; None if its tensors are no plain memory."""
    import torch

    tensors = {name: each for name, each in entries.items() if isinstance(each, torch.Tensor)}
    others = tuple((name, each) for name, each in entries.items() if isinstance(each, bytes))
    form = tuple((name, each.dtype, tuple(each.shape)) for name, each in tensors.items())
    versions = tuple(0 if each.is_inference() else each._version for each in tensors.values())  # noqa: SLF001 - the one way to ask whether it was written to
    try:
        with torch.no_grad():
            sample = _sample([each.detach() for each in tensors.values()])
    except (RuntimeError, TypeError):
        return None
    return _Look((canonical(about), form, others), versions, sample)


def _sample(tensors: list[torch.Tensor]) -> bytes:
    """Return the digest of some values of every tensor: one gather and copy for all that are alike.

    It does not depend on the device that each of them is on.
    """
    import torch

    groups: dict[object, dict[int, torch.Tensor]] = {}
    for number, tensor in enumerate(tensors):
        few = _few(tensor)
        groups.setdefault((few.dtype, few.device, few.shape[1:]), {})[number] = few
    parts: dict[int, bytes] = {}
    for group in groups.values():
        values = torch.cat([*group.values()]).view(-1).view(torch.uint8)
        data, end = values.cpu().numpy().tobytes(), 0
        for number, few in group.items():
            start, end = end, end + few.nbytes
            parts[number] = data[start:end]
    return blake3(b"".join(parts[number] for number in range(len(tensors)))).digest()


def _few(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a small tensor in a row, or blocks of neighbours out of a large one."""
    size = tensor.numel()
    if size <= _BLOCKS * _BLOCK:
        return tensor.reshape(-1)
    step = (size - _BLOCK) // (_BLOCKS - 1)
    if tensor.is_contiguous():
        return tensor.as_strided((_BLOCKS, _BLOCK), (step, 1), tensor.storage_offset())
    import numpy as np
    import torch

    # The same elements, wherever they are: `reshape` would copy the whole tensor.
    chosen = (np.arange(_BLOCKS)[:, None] * step + np.arange(_BLOCK)).reshape(-1)
    steps = np.array(tensor.stride())[:, None]
    places = (np.stack(np.unravel_index(chosen, tensor.shape)) * steps).sum(0)
    memory = tensor.as_strided((int(places.max()) + 1,), (1,), tensor.storage_offset())
    rows = memory.view(torch.uint8).view(-1, tensor.element_size())
    return rows[torch.from_numpy(places).to(tensor.device)]
