"""Notice, and take back, what a pipeline's constructor does to a component that it was given.

Some write into what they get: another `scaling_factor`, `vae.to(torch.float32)`. To its other
holders a shared component must stay as it was.
"""

from __future__ import annotations

import types
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    Attributes = dict[str, object]

_PLAIN = frozenset((bool, int, float, str, tuple, type(None)))
_MAPPINGS = (dict, OrderedDict)
_CODE = (type, types.FunctionType, types.MethodType, types.ModuleType, partial)


@dataclass(frozen=True, slots=True)
class Kept:
    """A module as it was: its attributes, and the memory its weights were in. Copies no weights."""

    mappings: list[tuple[Attributes, Attributes]]
    """The attributes of modules, and of objects like configs; hooks, parameters, submodules."""
    empty: list[Attributes]
    """Those with nothing in them: nearly all."""
    tensors: list[tuple[torch.Tensor, torch.Tensor, bool, int]]

    def is_unchanged(self) -> bool:
        """Say whether all of it is as it was, in a fraction of the time that `describe` takes.

        Not seen is what is written into an object inside of another, and through `.data`.
        """
        if any(self.empty) or not all(_is_same(now, before) for now, before in self.mappings):
            return False
        return all(
            tensor.data_ptr() == data.data_ptr()
            and tensor.dtype == data.dtype
            and tensor.requires_grad == is_trained
            and _version(tensor) == version
            for tensor, data, is_trained, version in self.tensors
        )

    def restore(self) -> None:
        """Put all of it back, but values that were written in place."""
        import torch

        for mapping in self.empty:
            mapping.clear()
        for mapping, items in self.mappings:
            mapping.clear()
            mapping.update(items)
        with torch.no_grad():
            for tensor, data, is_trained, _ in self.tensors:
                if tensor.data_ptr() != data.data_ptr() or tensor.dtype != data.dtype:
                    tensor.data = data
                tensor.requires_grad_(is_trained)


def keep(module: torch.nn.Module) -> Kept:
    """Remember a module as it is now."""
    import torch

    mappings: dict[int, tuple[Attributes, Attributes]] = {}
    empty: list[Attributes] = []
    tensors: dict[int, torch.Tensor] = {}
    others = (*_CODE, torch.nn.Module, torch.Tensor)
    for each in module.modules():
        inside = each.__dict__
        mappings[id(each)] = inside, inside.copy()
        for value in inside.values():
            kind = type(value)
            if kind in _PLAIN:
                continue
            found = value if kind in _MAPPINGS else getattr(value, "__dict__", None)
            if not found and kind in _MAPPINGS:
                empty.append(value)
            elif found is not None and id(value) not in mappings and not isinstance(value, others):
                mappings[id(value)] = found, found.copy()
        for tensor in (*inside["_parameters"].values(), *inside["_buffers"].values()):
            if tensor is not None:
                tensors[id(tensor)] = tensor
    rows = [(each, each.detach(), each.requires_grad, _version(each)) for each in tensors.values()]
    return Kept(list(mappings.values()), empty, rows)


def _is_same(now: Attributes, before: Attributes) -> bool:
    """Say whether the same names have the same values."""
    try:
        return now == before
    except RuntimeError:  # Another tensor than before cannot say whether it is equal.
        return False


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001 - who wrote into it
