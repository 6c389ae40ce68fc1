"""Exact equality: types, order, the bits of every number, dtypes and shapes.

`exactly(value)` is a plain description of a value; two values are the same if theirs are equal.
It is written without the package, so that a mistake there cannot hide itself.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from smartcache.artifacts.values import encode as values_encode
from smartcache.artifacts.values.encode import encode
from smartcache.artifacts.values.layout import Layout, decoders

if TYPE_CHECKING:
    import torch


def exactly(value: object, *, ordered: bool = True) -> object:
    """Describe a value. With `ordered=False` the order of dicts does not count."""
    return f"{type(value).__module__}.{type(value).__qualname__}", _inside(value, ordered=ordered)


def _inside(value: object, *, ordered: bool) -> object:
    import torch

    found: object = value
    if isinstance(value, dict):
        items = [exactly(list(item), ordered=ordered) for item in value.items()]
        found = items if ordered else sorted(items, key=repr)
    elif isinstance(value, (list, tuple)):
        found = [exactly(item, ordered=ordered) for item in value]
    elif isinstance(value, (set, frozenset)):
        found = sorted((exactly(item, ordered=ordered) for item in value), key=repr)
    elif type(value) is float:
        found = struct.pack("<d", value)
    elif type(value) is complex:
        found = struct.pack("<dd", value.real, value.imag)
    elif isinstance(value, torch.Tensor):
        found = str(value.dtype), tuple(value.shape), _tensor_bytes(value)
    elif isinstance(value, (np.str_, np.bytes_)):
        found = list(value)
    elif isinstance(value, (np.ndarray, np.generic)):
        found = value.dtype.str, value.dtype.name, value.shape, value.tobytes()
    return found


def _tensor_bytes(tensor: torch.Tensor) -> bytes:
    import torch

    carriers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: tensor.dtype}
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.view(carriers[tensor.element_size()]).contiguous().numpy().tobytes()


def filler(layout: Layout, tensors: list[memoryview]) -> Callable[[int], object]:
    """Return what fills the slots with the tensors that were encoded, as a reader would."""

    def fill(slot: int) -> object:
        made, memory = layout.tensors[slot].new()
        memory[:] = tensors[slot]
        return made

    return fill


def round_trip(value: object) -> object:
    body, inline, tensors = encode(value)
    layout = Layout.parse(body)
    assert [spec.nbytes for spec in layout.tensors] == [len(data) for data in tensors]
    return layout.decode(inline, filler(layout, tensors))


def forget_codecs() -> None:
    """End what a test has registered."""
    values_encode._codecs.clear()  # noqa: SLF001
    decoders.clear()
