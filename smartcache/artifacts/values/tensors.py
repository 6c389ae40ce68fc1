"""Tensors as bytes: their dtypes by name, what is kept of one, and its memory without a copy.

What is kept are the elements in C order. Strides, the storage a view belongs to, the device and
`requires_grad` are not. Numbers keep their bits, so that nan payloads and -0.0 come back.

A dtype stands in files by its name. It is looked up here and nowhere else: in a table, or against a
pattern that leaves nothing open. It is never imported, evaluated or taken as an attribute unseen.
How large an element is can be told from the name alone, so a layout is understood without torch.

    torch     "float16", "bfloat16", "float8_e4m3fn", ...: every dtype that owns its bytes
    numpy     "<f4", ">i2", "|b1", "<U12", "<M8[ns]": the text numpy itself gives (`dtype.str`);
              "bfloat16" and others of the package ml_dtypes, which JAX uses
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from smartcache.errors import ArtifactError, BatchShapeError, LayoutError, install_hint

if TYPE_CHECKING:
    from types import ModuleType

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

TORCH: Final[dict[str, str]] = {
    "bool": "|b1",
    "uint8": "|u1",
    "int8": "|i1",
    "uint16": "<u2",
    "int16": "<i2",
    "uint32": "<u4",
    "int32": "<i4",
    "uint64": "<u8",
    "int64": "<i8",
    "float16": "<f2",
    "float32": "<f4",
    "float64": "<f8",
    "complex64": "<c8",
    "complex128": "<c16",
}
"""Dtypes of torch that numpy has too, and what numpy calls them."""

TORCH_ONLY: Final[dict[str, str]] = {
    "bfloat16": "<u2",
    "complex32": "<u4",
    "float8_e4m3fn": "|u1",
    "float8_e4m3fnuz": "|u1",
    "float8_e5m2": "|u1",
    "float8_e5m2fnuz": "|u1",
    "float8_e8m0fnu": "|u1",
    "float4_e2m1fn_x2": "|u1",
    "bits8": "|u1",
    "bits16": "<u2",
    "bits1x8": "|u1",
    "bits2x4": "|u1",
    "bits4x2": "|u1",
    **{f"{sign}int{bits}": "|u1" for sign in ("", "u") for bits in range(1, 8)},
}
"""Dtypes that numpy has not: it sees their bits as unsigned integers."""
_CARRIERS: Final = {"|u1": "uint8", "<u2": "int16", "<u4": "int32"}

_NUMBERS: Final[dict[str, int]] = {
    "|b1": 1,
    "|i1": 1,
    "|u1": 1,
    **{
        f"{order}{kind}{size}": size
        for order in "<>"
        for kind, sizes in (("i", (2, 4, 8)), ("u", (2, 4, 8)), ("f", (2, 4, 8)), ("c", (8, 16)))
        for size in sizes
    },
}
_ML_DTYPES: Final[dict[str, int]] = {
    "bfloat16": 2,
    "complex32": 4,
    "bcomplex32": 4,
    **dict.fromkeys(
        (
            "float8_e3m4",
            "float8_e4m3",
            "float8_e4m3b11fnuz",
            "float8_e4m3fn",
            "float8_e4m3fnuz",
            "float8_e5m2",
            "float8_e5m2fnuz",
            "float8_e8m0fnu",
            "float6_e2m3fn",
            "float6_e3m2fn",
            "float4_e2m1fn",
            "int1",
            "int2",
            "int4",
            "uint1",
            "uint2",
            "uint4",
        ),
        1,
    ),
}
# Bounded digits: numpy keeps the size of an element in 32 bits.
_COUNT = "(0|[1-9][0-9]{0,7})"
_TEXT: Final = re.compile(rf"([<>])U{_COUNT}", re.ASCII)
_BYTES: Final = re.compile(rf"\|S{_COUNT}", re.ASCII)
_TIME: Final = re.compile(
    r"[<>][mM]8(\[([1-9][0-9]{0,8})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?", re.ASCII
)


def torch_item_size(name: str) -> int | None:
    """Return the bytes of one element of a torch dtype; None for a name that is none."""
    text = TORCH.get(name) or TORCH_ONLY.get(name)
    return None if text is None else int(text[2:])


def numpy_item_size(name: str) -> int | None:
    """Return the bytes of one element of a numpy dtype; None for a name that is none."""
    size = _NUMBERS.get(name) or _ML_DTYPES.get(name)
    if size is not None:
        return size
    if found := _TEXT.fullmatch(name):
        return 4 * int(found[2])
    if found := _BYTES.fullmatch(name):
        return int(found[1])
    return 8 if _TIME.fullmatch(name) else None


def is_numpy_number(name: str) -> bool:
    """Say whether the elements are numbers or times, of one size: no texts."""
    return not (_TEXT.fullmatch(name) or _BYTES.fullmatch(name))


@lru_cache(maxsize=1024)
def numpy_name(dtype: np.dtype[np.generic]) -> str | None:
    """Return the name of a numpy dtype; None for objects, records and what else has none."""
    text = dtype.str
    if text in _NUMBERS or _TEXT.fullmatch(text) or _BYTES.fullmatch(text) or _TIME.fullmatch(text):
        return text
    module = sys.modules.get("ml_dtypes")
    if module is not None and dtype.name in _ML_DTYPES and dtype.type.__module__ == "ml_dtypes":
        return str(dtype.name)
    return None


@lru_cache(maxsize=1024)
def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """Return the numpy dtype of a name; LayoutError if there is none of that name."""
    import numpy as np

    if numpy_item_size(name) is None:
        raise LayoutError(f"no dtype of numpy: {name[:80]!r}")
    if name not in _ML_DTYPES:
        return np.dtype(name)
    try:
        module = importlib.import_module("ml_dtypes")  # has no types, and is not always there
        dtype: np.dtype[np.generic] = np.dtype(getattr(module, name))
    except (ImportError, AttributeError):
        raise ArtifactError(
            f"the package ml_dtypes, with its {name}, is needed to read this artifact",
            hint="Install it, or a newer release: pip install -U ml_dtypes.",
        ) from None
    return dtype


@lru_cache(maxsize=256)
def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a name; LayoutError if there is none of that name."""
    if name not in TORCH and name not in TORCH_ONLY:
        raise LayoutError(f"no dtype of torch: {name[:80]!r}")
    found = getattr(need_torch(), name, None)
    if found is None:
        raise ArtifactError(
            f"the installed torch has no dtype {name}", hint="Install a newer release of torch."
        )
    dtype: torch.dtype = found
    return dtype


def torch_name(dtype: torch.dtype) -> str | None:
    """Return the name of a torch dtype; None for quantised ones, whose scale is kept elsewhere."""
    name = str(dtype).removeprefix("torch.")
    return name if name in TORCH or name in TORCH_ONLY else None


def torch_carrier(name: str) -> torch.dtype | None:
    """Return as which dtype numpy can see the bits of one that it has not; None if it has it."""
    return None if name in TORCH else torch_dtype(_CARRIERS[TORCH_ONLY[name]])


def need_torch() -> ModuleType:
    """Return the module torch, imported now if need be; ArtifactError where it is missing."""
    module = sys.modules.get("torch")
    if module is not None:
        return module
    try:
        import torch
    except ImportError:
        raise ArtifactError(
            "torch is needed to read this artifact, and is not installed",
            hint=install_hint("torch"),
        ) from None
    return torch


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

    @property
    def item_size(self) -> int:
        """The bytes of one element; at least 1."""
        size = torch_item_size(self.dtype) if self.kind == "torch" else numpy_item_size(self.dtype)
        return size or 1

    def new(self) -> tuple[object, memoryview]:
        """Return a tensor or array with whatever is in its memory, and that memory to write to."""
        if self.kind == "torch":
            empty, dtype, carrier = _torch_parts(self.dtype)
            memory = empty(self.shape, dtype=carrier, device="cpu")
            made = memory if dtype is carrier else memory.view(dtype)
            return made, array_bytes(memory.numpy())
        array = self._array(self.shape)
        return array, array_bytes(array)

    def copied(self, data: Bytes) -> object:
        """Return a new tensor or array with these bytes: quicker than to fill one of `new`."""
        if self.kind != "torch":
            made, memory = self.new()
            memory[:] = data.data
            return made
        from_numpy, dtype, carrier = _numpy_parts(self.dtype)
        tensor = from_numpy(data.copy().view(carrier).reshape(self.shape))
        return tensor if dtype is None else tensor.view(dtype)

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
        name = self.dtype
        if self.kind == "torch":
            name = TORCH.get(name) or TORCH_ONLY[name]
        array = np.ndarray(self.shape, numpy_dtype(name), buffer=data if self.nbytes else b"")
        array.flags.writeable = False
        return array

    def from_bytes(self, data: bytes) -> object:
        """Return a new tensor or array with these bytes; they must be `nbytes` long."""
        made, memory = self.new()
        memory[:] = data
        return made

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
def _numpy_parts(
    name: str,
) -> tuple[Callable[[Array], torch.Tensor], torch.dtype | None, np.dtype[Any]]:
    """Return `torch.from_numpy`, the dtype if numpy has no such, and as what numpy sees it."""
    carrier = numpy_dtype(TORCH.get(name) or TORCH_ONLY[name])
    return need_torch().from_numpy, None if name in TORCH else torch_dtype(name), carrier


@lru_cache(maxsize=256)
def _torch_parts(name: str) -> tuple[Callable[..., torch.Tensor], torch.dtype, torch.dtype]:
    """Return `torch.empty`, the dtype, and one of its size that numpy has too, to be made first.

    Torch warns of making a complex32, but not of a view as one.
    """
    dtype = torch_dtype(name)
    return need_torch().empty, dtype, torch_carrier(name) or dtype


def torch_array(tensor: torch.Tensor, name: str) -> Array:
    """Return the memory of a CPU tensor as a numpy array, its bits as integers if need be.

    RuntimeError or TypeError, as torch has it, for anything but plain memory of the CPU.
    """
    carrier = torch_carrier(name)
    return tensor.numpy() if carrier is None else tensor.view(carrier).numpy()


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
