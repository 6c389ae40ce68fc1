"""The encoders of what torch and numpy bring: tensors, arrays, scalars, dtypes, devices.

Neither library is imported here: a value of theirs proves that it is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from smartcache.artifacts.dtypes import is_numpy_number, numpy_name, torch_name
from smartcache.artifacts.layouts import INLINE_BYTES, dtype_bytes, spec_bytes
from smartcache.artifacts.parsing import run_struct
from smartcache.artifacts.parts import CACHED, Encode, Parts
from smartcache.artifacts.refusals import RefusedError
from smartcache.artifacts.tensors import Kind, TensorSpec, array_bytes, plain_tensor, torch_array
from smartcache.errors import LayoutError

if TYPE_CHECKING:
    from types import ModuleType

    import numpy as np
    import torch

    Array = np.ndarray[Any, np.dtype[Any]]

# By dtype and shape: the node in the layout, the name of the dtype, whether it is small.
_torch_nodes: dict[tuple[torch.dtype, tuple[int, ...]], tuple[bytes, str, bool]] = {}
_numpy_nodes: dict[tuple[np.dtype[Any], tuple[int, ...], Kind], tuple[bytes, bool]] = {}


def library_encoder(cls: type) -> Encode | None:
    """Return the encoder of a type of torch or numpy, or of one that can become an array."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and cls in _classes(torch):
        return _TORCH[cls.__name__]
    if numpy is not None and issubclass(cls, numpy.generic):
        if cls is numpy.str_:
            return _numpy_text
        return _numpy_bytes if cls is numpy.bytes_ else _numpy_scalar
    if numpy is not None and cls is numpy.ndarray:
        return _numpy
    return _array_like if is_array_like(cls) else None


def is_array_like(cls: type) -> bool:
    """Say whether a type is none of torch or numpy, but becomes a numpy array by itself.

    A memmap does too: it cannot come back as one. Other subclasses of arrays and tensors mean more
    than their elements (masks, records, gradients), and are not array-likes.
    """
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and issubclass(cls, _classes(torch)):
        return False
    if numpy is not None and issubclass(cls, (numpy.ndarray, numpy.generic)):
        return cls is numpy.memmap
    return hasattr(cls, "__array__") or hasattr(cls, "__dlpack__")


def as_array(value: object) -> Array:
    """Return an array-like as a numpy array; RefusedError if it does not become one."""
    import numpy as np

    try:
        convert: Callable[[Any], Array] = np.asarray
        if not hasattr(type(value), "__array__"):
            convert = np.from_dlpack
        array = convert(value)
    except Exception as error:  # whatever a foreign library raises
        reason = f"a {type(value).__qualname__} that does not become an array: {error}"
        raise RefusedError(reason, hint="Convert it to a numpy array first.") from error
    return array.view(np.ndarray)


def _classes(torch: ModuleType) -> tuple[type, ...]:
    """Return the types of torch that are values; none while another thread still imports it."""
    found = (getattr(torch, name, None) for name in _TORCH)
    return tuple(cls for cls in found if cls is not None)


def _tensor(value: torch.Tensor, parts: Parts, _depth: int) -> None:
    try:
        shape = value.shape
        known = _torch_nodes.get((value.dtype, shape))
        node, dtype, is_small = known or _torch_node(value.dtype, shape)
        array = torch_array(value, dtype)
    except (RuntimeError, TypeError):
        value = _plain(value)
        node, dtype, is_small = _torch_node(value.dtype, value.shape)
        array = torch_array(value, dtype)
    parts.layout.append(node)
    if is_small:
        parts.fixed.append(array.tobytes())
    else:
        parts.tensors.append(array_bytes(array))


def _plain(value: torch.Tensor) -> torch.Tensor:
    try:
        return plain_tensor(value)
    except (RuntimeError, TypeError) as error:
        reason = f"{error} cannot be kept" if isinstance(error, TypeError) else str(error)
        raise RefusedError(reason, hint="Put a dense tensor.") from None


def _torch_node(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, str, bool]:
    name = torch_name(dtype)
    if name is None:
        reason = f"a tensor of {dtype} cannot be kept: its scale is not part of its values"
        raise RefusedError(reason, hint="Put tensor.dequantize(), or its int_repr() and scale.")
    spec = _spec("torch", name, tuple(shape))
    if len(_torch_nodes) >= CACHED:
        _torch_nodes.clear()
    found = (b"t" + spec_bytes(spec), name, spec.nbytes <= INLINE_BYTES)
    _torch_nodes[dtype, spec.shape] = found
    return found


def _numpy(value: Array, parts: Parts, _depth: int) -> None:
    _write_array(value, "numpy", parts)


def _array_like(value: object, parts: Parts, _depth: int) -> None:
    _write_array(as_array(value), "array", parts)


def _write_array(array: Array, kind: Kind, parts: Parts) -> None:
    known = _numpy_nodes.get((array.dtype, array.shape, kind))
    node, is_small = known or _numpy_node(array, kind)
    parts.layout.append(node)
    if is_small:
        parts.fixed.append(array.tobytes())
    else:
        parts.tensors.append(array_bytes(array))


def _numpy_node(array: Array, kind: Kind) -> tuple[bytes, bool]:
    name = numpy_name(array.dtype)
    if name is None:
        what = "objects" if array.dtype.hasobject else f"dtype {array.dtype}"
        raise RefusedError(
            f"an array of {what} cannot be kept",
            hint="Put a list, or one array for each field.",
        )
    spec = _spec(kind, name, array.shape)
    if len(_numpy_nodes) >= CACHED:
        _numpy_nodes.clear()
    found = (b"t" + spec_bytes(spec), spec.nbytes <= INLINE_BYTES)
    _numpy_nodes[array.dtype, array.shape, kind] = found
    return found


def _spec(kind: Kind, name: str, shape: tuple[int, ...]) -> TensorSpec:
    try:
        return TensorSpec.of(kind, name, shape)
    except LayoutError as error:
        raise RefusedError(str(error)) from None


def _numpy_scalar(value: np.generic, parts: Parts, _depth: int) -> None:
    name = numpy_name(value.dtype)
    if name is None or not is_numpy_number(name):
        raise RefusedError(f"a numpy scalar of dtype {value.dtype} cannot be kept")
    parts.layout.append(b"u" + dtype_bytes(name))
    parts.fixed.append(value.tobytes())


def _numpy_text(value: np.str_, parts: Parts, _depth: int) -> None:
    parts.layout.append(b"U")
    parts.sections.append(str.encode(value, "utf-8", "surrogatepass"))


def _numpy_bytes(value: np.bytes_, parts: Parts, _depth: int) -> None:
    parts.layout.append(b"S")
    parts.sections.append(bytes(value))


def _torch_dtype(value: torch.dtype, parts: Parts, _depth: int) -> None:
    name = torch_name(value)
    if name is None:
        raise RefusedError(f"the dtype {value} cannot be kept")
    parts.layout.append(b"D")
    parts.sections.append(name.encode())


def _torch_device(value: torch.device, parts: Parts, _depth: int) -> None:
    parts.layout.append(b"V")
    parts.sections.append(str(value).encode())


def _torch_size(value: torch.Size, parts: Parts, _depth: int) -> None:
    parts.layout.append(b"rZi")
    parts.sections.append(run_struct("q", len(value)).pack(*value))


_TORCH: dict[str, Encode] = {
    "Tensor": _tensor,
    "dtype": _torch_dtype,
    "device": _torch_device,
    "Size": _torch_size,
}
