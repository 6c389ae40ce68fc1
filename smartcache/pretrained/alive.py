"""A model in memory: whether it is as it was loaded, and how it gets so again.

One look sees every tensor (identity, place, shape, dtype, device, version, whether it is trained),
every submodule and its class, every attribute (training flag, hooks, a `forward` of its own,
processors, switches such as `use_slicing`, adapters, compiled calls), what is in them (configs),
and a sample of the values of every tensor, because peft merges weights through `.data`, which
raises no version.

The sample is `_BLOCKS` blocks of `_BLOCK` neighbours, evenly spread over each tensor, so that few
pages of a file that is only mapped are read, and few kernels run on a GPU. Whatever changes a
tensor as a whole (merging, rounding to another dtype and back, training, scaling) is seen. What it
cannot see: a few single elements that somebody writes through `.data`, outside of the sample. What
lies deeper than `_DEPTH` below an attribute, and objects of foreign C code, are known by identity.
"""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from blake3 import blake3

if TYPE_CHECKING:
    import torch

    Attributes = dict[str, object]

_BLOCKS = 4
_BLOCK = 32
_DEPTH = 3
_MAPPINGS = (dict, OrderedDict)
_PLAIN = frozenset((bool, int, float, str, bytes, tuple, set, type(None)))
_CODE = (
    type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType,
    partial,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Look:
    """A model at one moment. Keeps nothing of it alive."""

    rows: dict[str, tuple[object, ...]]
    """Each submodule by its name: its class, its tensors, and what else is in it."""
    sample: bytes
    """The digest of some values; b"" if they were not looked at."""
    is_whole: bool
    """Whether all weights are in memory to stay: no placeholders, no hooks that move them."""

    def difference(self, now: Look) -> str:
        """Return what has changed since then, in words; "" if nothing has.

        Values are compared if both have looked at them.
        """
        if self.rows != now.rows:
            places = [*self.rows, *(name for name in now.rows if name not in self.rows)]
            changed = [name for name in places if self.rows.get(name) != now.rows.get(name)]
            return f"{changed[0] or 'the model'} ({len(changed)} places)"
        is_known = bool(self.sample and now.sample)
        return "values of weights" if is_known and self.sample != now.sample else ""


def look_at(module: torch.nn.Module, *, at_values: bool = True) -> Look:
    """Return what a model is like now.

    Raises whatever tensors of other libraries raise that cannot be looked at this way.
    """
    import torch

    marks = _Marks()
    plain, of = marks.plain, marks.of
    # What every module has before it has anything: left out, as there are thousands of them.
    empty = frozenset(key for key, value in vars(torch.nn.Module()).items() if not value)
    rows: dict[str, tuple[object, ...]] = {}
    is_whole = True
    for name, each in _submodules(module):
        inside = vars(each)
        row: list[object] = [id(each), id(type(each))]
        for key, value in inside.items():
            if key in empty and not value:
                continue
            if key == "_modules":
                row += (*value, *map(id, value.values()))
            else:
                row += (key, value if type(value) in plain else of(value, _DEPTH))
        rows[name] = tuple(row)
        is_whole = is_whole and "_hf_hook" not in inside
    tensors = marks.tensors
    is_whole = is_whole and not any(each.is_meta or each.is_inference() for each in tensors)
    with torch.no_grad():
        return Look(rows, _sample(tensors) if at_values and is_whole else b"", is_whole)


def _submodules(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Go through a module and all in it, each once."""
    ahead, seen = [("", module)], {id(module)}
    while ahead:
        name, each = ahead.pop()
        yield name, each
        for key, inner in vars(each)["_modules"].items():
            if inner is not None and id(inner) not in seen:
                seen.add(id(inner))
                ahead.append((f"{name}.{key}" if name else key, inner))


class _Marks:
    """Says of values what each is, and which one; notes the tensors that it meets."""

    def __init__(self) -> None:
        import torch

        self.plain = frozenset(
            (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
        )
        self.tensors: list[torch.Tensor] = []
        self._whole = (*_CODE, torch.nn.Module)
        self._tensor = torch.Tensor
        self._seen: set[int] = set()

    def of(self, value: object, depth: int) -> object:
        kind = type(value)
        if kind in self.plain:
            return value
        if isinstance(value, self._tensor):
            self.tensors.append(value)
            return _tensor_mark(value)
        if isinstance(value, tuple) and self.plain.issuperset(map(type, value)):
            return value
        if not depth or isinstance(value, self._whole) or id(value) in self._seen:
            return id(value)
        self._seen.add(id(value))  # Every layer has the config of the whole model.
        parts: list[object] = [id(value), kind.__name__]
        if isinstance(value, dict):
            for key, each in value.items():
                parts += (_key(key), self.of(each, depth - 1))
        elif isinstance(value, list | tuple):
            parts += [self.of(each, depth - 1) for each in value]
        elif isinstance(value, set | frozenset):
            parts.append(frozenset(map(_key, value)))
        for key, each in getattr(value, "__dict__", {}).items():
            parts += (key, self.of(each, depth - 1))
        return tuple(parts)


def _tensor_mark(tensor: torch.Tensor) -> tuple[object, ...]:
    is_here = not (tensor.is_meta or tensor.is_inference())
    return (
        id(tensor), type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device,
        tensor.requires_grad, tensor.is_leaf and tensor.grad is not None,
        bool(tensor._backward_hooks),  # noqa: SLF001 - nothing else tells
        tensor.data_ptr() if is_here else 0,
        tensor._version if is_here else 0,  # noqa: SLF001 - whether it was written to
    )  # fmt: skip


def _key(key: object) -> object:
    return key if isinstance(key, str | int) else id(key)


def _sample(tensors: list[torch.Tensor]) -> bytes:
    """Return the digest of some values of every tensor: two gathers and copies per dtype."""
    import torch

    groups: dict[tuple[torch.dtype, torch.device, int], list[torch.Tensor]] = {}
    for tensor in tensors:
        size = tensor.numel()
        is_small = size <= _BLOCKS * _BLOCK
        few = tensor.reshape(-1) if is_small or not tensor.is_contiguous() else tensor
        if not is_small:
            step = (size - _BLOCK) // (_BLOCKS - 1)
            few = few.as_strided((_BLOCKS, _BLOCK), (step, 1), few.storage_offset())
        if size:
            groups.setdefault((few.dtype, few.device, few.ndim), []).append(few)
    digest = blake3()
    for group in groups.values():
        values = torch.cat(group).view(-1).view(torch.uint8)
        digest.update(values.cpu().numpy().tobytes())
    return digest.digest()


@dataclass(frozen=True, slots=True)
class Kept:
    """A module as it was: its attributes, and the memory its weights were in. Copies no weights.

    Constructors of pipelines write into what they get: another `scaling_factor`,
    `vae.to(torch.float32)`. To its other holders a shared component must stay as it was.
    """

    mappings: list[tuple[Attributes, Attributes]]
    """The attributes of modules, and of objects like configs; hooks, parameters, submodules."""
    tensors: list[tuple[torch.Tensor, torch.Tensor, bool]]

    def restore(self) -> None:
        """Put all of it back, but values that were written in place."""
        import torch

        for mapping, items in self.mappings:
            mapping.clear()
            mapping.update(items)
        with torch.no_grad():
            for tensor, data, is_trained in self.tensors:
                if tensor.data_ptr() != data.data_ptr() or tensor.dtype != data.dtype:
                    tensor.data = data
                tensor.requires_grad_(is_trained)


def keep(module: torch.nn.Module) -> Kept:
    """Remember a module as it is now."""
    import torch

    mappings: dict[int, tuple[Attributes, Attributes]] = {}
    tensors: dict[int, tuple[torch.Tensor, torch.Tensor, bool]] = {}
    others = (*_CODE, torch.nn.Module, torch.Tensor)
    for _, each in _submodules(module):
        inside = vars(each)
        mappings[id(inside)] = inside, inside.copy()
        for value in inside.values():
            kind = type(value)
            if kind in _MAPPINGS:
                mappings[id(value)] = value, value.copy() if value else {}
            elif (
                kind not in _PLAIN and not isinstance(value, others) and hasattr(value, "__dict__")
            ):
                mappings[id(vars(value))] = vars(value), vars(value).copy()
        for tensor in (*inside["_parameters"].values(), *inside["_buffers"].values()):
            if tensor is not None:
                tensors[id(tensor)] = tensor, tensor.detach(), tensor.requires_grad
    return Kept(list(mappings.values()), list(tensors.values()))


def size_of(module: torch.nn.Module) -> int:
    """Return the bytes of a model's weights and buffers, each counted once."""
    tensors = {each.data_ptr(): each for each in (*module.parameters(), *module.buffers())}
    return sum(each.nbytes for each in tensors.values())


class Dice:
    """Torch's random numbers and default dtype at one moment.

    A load that drew random numbers has weights that came out of no file.
    """

    def __init__(self) -> None:
        import torch

        self._states = _random_states()
        self._dtype = torch.get_default_dtype()

    def were_thrown(self) -> bool:
        """Say whether random numbers were drawn since."""
        return _random_states() != self._states

    def put_back(self) -> None:
        """Go back to that moment, so that whoever loads next gets what he would have got then."""
        import torch

        for number, state in enumerate(self._states):
            values = torch.frombuffer(bytearray(state), dtype=torch.uint8)
            if number:
                torch.cuda.set_rng_state(values, number - 1)
            else:
                torch.set_rng_state(values)
        # diffusers leaves it as it needed it when a load fails.
        torch.set_default_dtype(self._dtype)


def _random_states() -> list[bytes]:
    import torch

    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states += torch.cuda.get_rng_state_all()
    return [each.numpy().tobytes() for each in states]
