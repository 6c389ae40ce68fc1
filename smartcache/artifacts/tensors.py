"""Tensors as bytes: what is kept of one (kind, dtype, shape), and its memory without a copy.

What is kept are the elements in C order. Strides, the storage a view belongs to, the device and
`requires_grad` are not. Numbers keep their bits, so that nan payloads and -0.0 come back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from smartcache.artifacts.dtypes import (
    TORCH,
    TORCH_ONLY,
    need_torch,
    numpy_dtype,
    numpy_item_size,
    torch_dtype,
    torch_item_size,
    torch_name,
)
from smartcache.errors import BatchShapeError, LayoutError

if TYPE_CHECKING:
    import numpy as np
    import torch

    Array = np.ndarray[Any, np.dtype[Any]]
    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

Kind = Literal["torch", "numpy", "array"]
"""`array`: came by `__array__` or DLPack, for instance from JAX; it comes back as a numpy array."""

LARGEST: Final = 1 << 47
"""Bytes, and elements, of the largest tensor: what is larger is a damaged or a crafted layout."""
MOST_DIMENSIONS: Final = 64
"""As many as numpy allows."""

_CARRIERS: Final = {1: "uint8", 2: "int16", 4: "int32"}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Which tensor a run of bytes is. `nbytes` follows from dtype and shape: use `of`."""

    kind: Kind
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, kind: Kind, dtype: str, shape: tuple[int, ...]) -> TensorSpec:
        """Return a spec; LayoutError for unknown dtypes and for what no memory can hold."""
        size = torch_item_size(dtype) if kind == "torch" else numpy_item_size(dtype)
        if size is None:
            raise LayoutError(f"no dtype of {kind}: {dtype[:80]!r}")
        # Zeros count as ones: numpy multiplies the others, whatever the product is in the end.
        if len(shape) > MOST_DIMENSIONS or prod(max(n, 1) for n in shape) * max(size, 1) > LARGEST:
            raise LayoutError(f"no tensor is that large: {dtype} of shape {shape}")
        return cls(kind, dtype, shape, prod(shape) * size)

    def new(self) -> tuple[object, memoryview]:
        """Return a tensor or array with whatever is in its memory, and that memory to write to."""
        if self.kind == "torch":
            empty, dtype, carrier = _torch_parts(self.dtype)
            memory = empty(self.shape, dtype=carrier, device="cpu")
            made = memory if dtype is carrier else memory.view(dtype)
            return made, array_bytes(memory.numpy())
        array = self._array(self.shape)
        return array, array_bytes(array)

    def new_batch(self, count: int, *, pinned: bool) -> object:
        """Return room for `count` of them, of shape (count, *shape).

        `pinned` is for torch, and does nothing where there is no device to copy to.
        """
        shape = (count, *self.shape)
        if self.kind != "torch":
            return self._array(shape)
        pin = pinned and need_torch().cuda.is_available()
        empty, dtype, carrier = _torch_parts(self.dtype)
        return empty(shape, dtype=carrier, device="cpu", pin_memory=pin).view(dtype)

    def rows(self, batch: object) -> Bytes:
        """Return the memory of a batch, one row of `nbytes` bytes for each of its items.

        BatchShapeError unless it is a C-contiguous, writable batch of this kind, dtype and shape in
        the memory of the CPU.
        """
        array = self._batch_array(batch)
        if array.shape[1:] != self.shape or not len(array.shape) or not array.shape[0]:
            raise self._misfit(f"its shape is {array.shape}")
        if not array.flags.c_contiguous or not array.flags.writeable:
            raise self._misfit("it is not contiguous" if array.flags.writeable else "it is locked")
        count = array.shape[0]
        if not self.nbytes:
            import numpy as np

            return np.empty((count, 0), np.uint8)
        return array.reshape(-1).view("u1").reshape(count, self.nbytes)

    def view(self, data: Bytes) -> Array:
        """Return the bytes as a read-only numpy array, without a copy.

        Where numpy has no such dtype (bfloat16, float8 and others of torch), it shows their bits as
        unsigned integers of the same size.
        """
        import numpy as np

        if data.nbytes != self.nbytes:
            raise LayoutError(f"{data.nbytes} bytes for a tensor of {self.nbytes}")
        dtype = numpy_dtype(self._numpy_name())
        array = np.ndarray(self.shape, dtype, buffer=data if self.nbytes else b"")
        array.flags.writeable = False
        return array

    def from_bytes(self, data: bytes) -> object:
        """Return a new tensor or array with these bytes; they must be `nbytes` long."""
        made, memory = self.new()
        memory[:] = data
        return made

    def _numpy_name(self) -> str:
        if self.kind != "torch":
            return self.dtype
        return TORCH.get(self.dtype) or TORCH_ONLY[self.dtype]

    def _array(self, shape: tuple[int, ...]) -> Array:
        import numpy as np

        # np.empty would turn elements of size 0 into elements of size 1.
        return np.ndarray(shape, numpy_dtype(self.dtype))

    def _batch_array(self, batch: object) -> Array:
        """Return a batch as a numpy array that shares its memory, whatever its shape."""
        if self.kind != "torch":
            import numpy as np

            if not isinstance(batch, np.ndarray):
                raise self._misfit(f"it is a {type(batch).__name__}")
            if batch.dtype != numpy_dtype(self.dtype):
                raise self._misfit(f"its dtype is {batch.dtype}")
            return batch
        if not isinstance(batch, need_torch().Tensor):
            raise self._misfit(f"it is a {type(batch).__name__}")
        tensor = cast("torch.Tensor", batch)
        if torch_name(tensor.dtype) != self.dtype:
            raise self._misfit(f"its dtype is {tensor.dtype}")
        try:
            return torch_array(tensor.detach(), self.dtype)
        except (RuntimeError, TypeError):
            raise self._misfit("its memory is not that of the CPU") from None

    def _misfit(self, reason: str) -> BatchShapeError:
        wanted = f"{self.dtype} of shape (n, {', '.join(map(str, self.shape))})"
        library = "torch" if self.kind == "torch" else "numpy"
        return BatchShapeError(f"the output buffer does not fit: {reason}, not {library} {wanted}")


@lru_cache(maxsize=256)
def _torch_parts(name: str) -> tuple[Callable[..., torch.Tensor], torch.dtype, torch.dtype]:
    """Return `torch.empty`, the dtype, and one of its size that numpy has too, to be made first.

    Torch warns of making a complex32, but not of a view as one.
    """
    size = torch_item_size(name)
    carrier = name if name in TORCH or size is None else _CARRIERS[size]
    return need_torch().empty, torch_dtype(name), torch_dtype(carrier)


def torch_array(tensor: torch.Tensor, dtype: str) -> Array:
    """Return the memory of a CPU tensor as a numpy array, its bits as integers if need be.

    RuntimeError or TypeError, as torch has it, for anything but plain memory of the CPU.
    """
    if dtype in TORCH:
        return tensor.numpy()
    carrier = _CARRIERS[tensor.element_size()]
    return tensor.view(torch_dtype(carrier)).numpy()


def plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return an equal tensor in the memory of the CPU, with no lazy conjugate and no gradient.

    TypeError, saying why, for what is more than a block of memory: sparse, quantised, nested, meta.
    """
    if tensor.is_nested:
        raise TypeError("a nested tensor")
    if tensor.layout is not need_torch().strided:
        raise TypeError(f"a tensor of layout {tensor.layout}")
    if tensor.is_quantized:
        raise TypeError("a quantised tensor")
    if tensor.is_meta:
        raise TypeError("a tensor of the meta device")
    return tensor.detach().cpu().resolve_conj().resolve_neg()


def array_bytes(array: Array) -> memoryview:
    """Return the elements in C order as plain bytes; a copy only if they are not so in memory."""
    try:
        return array.data.cast("B")
    except (TypeError, ValueError, BufferError):
        pass  # not contiguous, empty, or of a dtype that has no letter in the buffer protocol
    if not array.nbytes:
        return memoryview(bytearray())
    import numpy as np

    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
