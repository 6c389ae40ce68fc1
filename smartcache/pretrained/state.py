"""What a model in memory is like now, to notice that it is not as it was loaded any more.

Looked at: every tensor (name, shape, dtype, device, place in memory, version, whether it is
trained), every submodule (class, and all its attributes: training flag, hooks, a `forward` of its
own, processors, switches such as `use_slicing`, adapters, compiled calls), the contents of configs,
and a sample of the values of every tensor, because peft merges weights through `.data`, which
raises no version.

The sample is `_BLOCKS` blocks of `_BLOCK` neighbours, evenly spread over each tensor, so that few
pages of a file that is only mapped are read, and few kernels run on a GPU. Whatever changes a
tensor as a whole (merging, rounding to another dtype and back, training, scaling) is seen. What it
cannot see: a few single elements that somebody writes through `.data`, outside of the sample. An
object of foreign C code is known by its identity alone.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, cast

from blake3 import blake3

from smartcache.pretrained.guards import Guard
from smartcache.pretrained.identity import ORIGIN_FIELDS

if TYPE_CHECKING:
    import torch

_BLOCKS = 4
_BLOCK = 32
_DEPTH = 6
_REGISTERED = frozenset(("_parameters", "_buffers", "_modules"))
_ORIGINS = ORIGIN_FIELDS | {"name_or_path", "_original_object_hash"}
"""Attributes that may differ between two loads of equal content from two places."""
_SPECIAL = _REGISTERED | _ORIGINS
_PLAIN = frozenset((bool, int, str, bytes, type(None)))
_CALLABLE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, partial)

Row = tuple[str, object, object]
"""Where it is; what it is, equal for every load of the same; and which one it is."""


@dataclass(frozen=True, slots=True)
class State:
    """A model at one moment. Keeps nothing of it alive."""

    rows: tuple[Row, ...]
    sample: bytes
    is_whole: bool = True
    """Whether all weights are in memory to stay: no placeholders, no hooks that move them."""

    def difference(self, now: State) -> str:
        """Return what has changed since then, in words; "" if nothing has."""
        if self.rows != now.rows:
            before, after = set(self.rows), set(now.rows)
            changed = sorted({row[0] for row in before ^ after})
            return f"{changed[0]} ({len(changed)} places)" if changed else "the order"
        return "" if self.sample == now.sample else "values of weights"

    def is_like(self, other: State) -> bool:
        """Say whether two models are alike in all but where they are in memory."""
        mine, others = (_forms(each.rows) for each in (self, other))
        return self.sample == other.sample and mine == others


def _forms(rows: tuple[Row, ...]) -> Counter[tuple[str, object]]:
    """Return what things are, without their identity, their origin, and the order of attributes."""
    kept = ((path, form) for path, form, _ in rows)
    return Counter(each for each in kept if each[0].rpartition(".")[2] not in _ORIGINS)


def describe(module: torch.nn.Module) -> State:
    """Return what a model is like now.

    Raises whatever tensors of other libraries raise that cannot be looked at this way.
    """
    import torch

    with torch.no_grad():
        look = _Look()
        for name, each in _submodules(module):
            look.at_module(name, each)
        return State(tuple(look.rows), _sample(look.tensors), look.is_whole)


def _submodules(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Go through a module and all in it; one that has two names comes twice, a cycle ends."""
    ahead: list[tuple[str, torch.nn.Module, frozenset[int]]] = [("", module, frozenset())]
    while ahead:
        name, each, above = ahead.pop()
        yield name, each
        parts = each.__dict__["_modules"]
        if parts:
            above |= {id(each)}
            for key, inner in parts.items():
                if inner is not None and id(inner) not in above:
                    ahead.append((f"{name}.{key}", inner, above))


class _Look:
    """Collects the rows of one model."""

    def __init__(self) -> None:
        import torch

        self.rows: list[Row] = []
        self.tensors: list[torch.Tensor] = []
        self.is_whole = True
        self._seen: set[int] = set()
        self._tensor = torch.Tensor
        self._module = torch.nn.Module
        self._names = (torch.dtype, torch.device, Enum)
        # What every module has before it has anything: left out, as there are thousands of them.
        defaults = torch.nn.Module().__dict__.items()
        self._empty = {key: type(value) for key, value in defaults if not value}

    def at_module(self, name: str, module: torch.nn.Module) -> None:
        """Note a submodule: its class, its tensors, and every attribute of its own."""
        inside = module.__dict__
        for kind in ("_parameters", "_buffers"):
            for key, tensor in inside[kind].items():
                if tensor is not None:
                    self._at_tensor(f"{name}.{key}", tensor)
        if "_hf_hook" in inside:
            self.is_whole = False
        parts = (_class_name(type(module)), *inside["_modules"])
        self.rows.append((name, (parts, *self._attributes(name, inside)), id(module)))

    def _attributes(self, name: str, inside: dict[str, object]) -> list[object]:
        """Return the plain attributes of a module; note the others one by one."""
        plain: list[object] = []
        empty = self._empty
        for key, value in inside.items():
            kind = type(value)
            if key in _SPECIAL:
                if key in _ORIGINS:
                    self.rows.append((f"{name}.{key}", str(value), None))
            elif kind in _PLAIN:
                if value or empty.get(key) is not kind:
                    plain += (key, kind, value)
            elif kind is float:
                plain += (key, repr(value))
            elif kind is not Guard and (empty.get(key) is not kind or value):
                self._at(f"{name}.{key}", value, _DEPTH)
        return plain

    def _at(self, path: str, value: object, depth: int) -> None:
        """Note an attribute, and what is in it."""
        kind = type(value)
        if kind in _PLAIN:
            self.rows.append((path, (kind, value), None))
        elif kind is float:
            self.rows.append((path, repr(value), None))
        elif kind is tuple and all(type(each) is int for each in cast("tuple[int]", value)):
            self.rows.append((path, value, None))
        elif isinstance(value, self._tensor):
            self._at_tensor(path, value)
        elif isinstance(value, self._names):
            self.rows.append((path, str(value), None))
        elif isinstance(value, _CALLABLE):
            name = getattr(value, "__qualname__", kind.__name__)
            self.rows.append((path, name, id(value)))
        else:
            self._at_object(path, value, depth)

    def _at_object(self, path: str, value: object, depth: int) -> None:
        self.rows.append((path, _class_name(type(value)), id(value)))
        if id(value) in self._seen or not depth or isinstance(value, self._module):
            return
        self._seen.add(id(value))
        if isinstance(value, dict):
            for key, each in value.items():
                self._at(f"{path}.{_key(key)}", each, depth - 1)
        elif isinstance(value, list | tuple):
            for number, each in enumerate(value):
                self._at(f"{path}.{number}", each, depth - 1)
        elif isinstance(value, set | frozenset):
            self.rows.append((path, frozenset(map(_key, value)), None))
        for key, each in getattr(value, "__dict__", {}).items():
            self._at(f"{path}.{key}", each, depth - 1)

    def _at_tensor(self, path: str, tensor: torch.Tensor) -> None:
        is_meta, is_inference = tensor.is_meta, tensor.is_inference()
        has_grad = tensor.is_leaf and tensor.grad is not None
        has_hooks = bool(tensor._backward_hooks)  # noqa: SLF001 - nothing else tells
        form = (
            type(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device,
            tensor.requires_grad, has_grad, has_hooks, is_meta, is_inference,
        )  # fmt: skip
        if is_meta or is_inference:
            self.is_whole = False
            self.rows.append((path, form, id(tensor)))
            return
        version = tensor._version  # noqa: SLF001 - the one way to ask whether it was written to
        self.rows.append((path, form, (id(tensor), tensor.data_ptr(), version)))
        if tensor.numel():
            self.tensors.append(tensor)


def _sample(tensors: list[torch.Tensor]) -> bytes:
    """Return the digest of some values of every tensor: two gathers and copies per dtype."""
    import torch

    groups: dict[tuple[torch.dtype, torch.device, int], list[torch.Tensor]] = {}
    for tensor in tensors:
        few = _few(tensor.detach())
        groups.setdefault((few.dtype, few.device, few.ndim), []).append(few)
    digest = blake3()
    for group in groups.values():
        values = torch.cat(group).view(-1).view(torch.uint8)
        digest.update(values.cpu().numpy().tobytes())
    return digest.digest()


def _few(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a small tensor in a row, or blocks of neighbours out of a large one."""
    size = tensor.numel()
    if size <= _BLOCKS * _BLOCK or not tensor.is_contiguous():
        tensor = tensor.reshape(-1)
    if size <= _BLOCKS * _BLOCK:
        return tensor
    step = (size - _BLOCK) // (_BLOCKS - 1)
    return tensor.as_strided((_BLOCKS, _BLOCK), (step, 1), tensor.storage_offset())


def have_equal_values(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Say whether all tensors of two models of the same form are equal, bit by bit."""
    import torch

    mine, others = dict(_tensors(one)), dict(_tensors(other))
    with torch.no_grad():
        return list(mine) == list(others) and all(
            torch.equal(_bits(mine[name]), _bits(others[name])) for name in mine
        )


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    whole = tensor.detach().contiguous().reshape(-1)
    return whole if not whole.numel() else whole.view(torch.uint8)


def size_of(module: torch.nn.Module) -> int:
    """Return the bytes of a model's weights and buffers, each counted once."""
    tensors = {each.data_ptr(): each for _, each in _tensors(module)}
    return sum(each.nbytes for each in tensors.values())


def _class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _key(key: object) -> object:
    return key if isinstance(key, str | int) else f"{type(key).__name__} {id(key)}"
