"""Every value that can be kept, for Hypothesis."""

from __future__ import annotations

import functools
import random
import struct
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import strategies as st

from smartcache.artifacts.values.tensors import TORCH, TORCH_ONLY

if TYPE_CHECKING:
    import torch


_PLAIN = "|b1 |i1 |u1 <i2 >i2 <u2 <i4 >i4 <u4 <i8 >i8 <u8 >u8 <f2 >f2 <f4 >f4 <f8 >f8 <c8 <c16 >c16"
_SIZED = "<U1 <U7 >U3 |S1 |S9 <M8[ns] <M8[D] >M8[25us] <m8[s] <m8 <M8"
NUMPY_DTYPES = [np.dtype(text) for text in f"{_PLAIN} {_SIZED}".split()]

floats = st.floats() | st.integers(0, 2**64 - 1).map(
    lambda bits: float(struct.unpack("<d", bits.to_bytes(8, "little"))[0])
)
"""All bits there are, signalling nans with payloads too."""
texts = st.text(st.characters(exclude_categories=()), max_size=12)
"""With lone surrogates."""
integers = st.integers(-(2**70), 2**70) | st.integers(-5, 5) | st.just(-(2**63)) | st.just(2**63)
plain_scalars = st.one_of(
    st.none(), st.booleans(), integers, floats, st.builds(complex, floats, floats),
    texts, st.binary(max_size=12),
)  # fmt: skip


@functools.cache
def torch_dtypes() -> list[torch.dtype]:
    import torch

    return [getattr(torch, name) for name in (*TORCH, *TORCH_ONLY) if hasattr(torch, name)]


def _random_bytes(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    """Arrays of every dtype, small and large, in every order of memory."""
    dtype = draw(st.sampled_from(NUMPY_DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 12), max_size=4)))
    count = int(np.prod(shape, dtype=np.int64))
    data = _random_bytes(count * dtype.itemsize, draw(st.integers(0, 99)))
    if dtype.kind == "b":
        data = bytes(byte & 1 for byte in data)
    if dtype.kind == "U":  # only code points are text
        data = np.frombuffer(data, "u4").__mod__(0xD800).astype(f"{dtype.str[0]}u4").tobytes()
    array = np.frombuffer(data, dtype).reshape(shape)
    changed = draw(st.sampled_from(["as it is", "Fortran", "slice", "reversed", "expanded"]))
    if changed == "Fortran":
        array = np.asfortranarray(array)
    elif changed == "slice" and shape:
        array = array[..., ::2]
    elif changed == "reversed" and shape:
        array = array[::-1]
    elif changed == "expanded":
        array = np.broadcast_to(array, (3, *array.shape))
    return array


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Tensors of every dtype, small and large, views of all sorts."""
    import torch

    dtype = draw(st.sampled_from(torch_dtypes()))
    shape = draw(st.lists(st.integers(0, 12), max_size=4))
    count = int(np.prod(shape, dtype=np.int64))
    data = bytearray(_random_bytes(count * dtype.itemsize, draw(st.integers(0, 99))))
    if dtype is torch.bool:
        data = bytearray(byte & 1 for byte in data)
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    tensor = flat.view(dtype).reshape(shape)
    changed = draw(st.sampled_from(["as it is", "transposed", "slice", "expanded", "conjugated"]))
    if changed == "transposed" and len(shape) > 1:
        tensor = tensor.transpose(0, -1)
    elif changed == "slice" and shape:
        tensor = tensor[..., 1::2]
    elif changed == "expanded":
        tensor = tensor.expand(2, *tensor.shape)
    elif changed == "conjugated" and dtype in (torch.complex64, torch.complex128):
        # Of complex32 too, but torch itself warns of that: it has a test of its own.
        tensor = tensor.conj()
    return tensor


# numpy does not hash a timedelta64 without a unit.
_HASHABLE = [each for each in NUMPY_DTYPES if each.kind not in "US" and each.str != "<m8"]


@st.composite
def numpy_scalars(draw: st.DrawFn) -> object:
    dtype = draw(st.sampled_from(_HASHABLE))
    data = _random_bytes(dtype.itemsize, draw(st.integers(0, 99)))
    if dtype.kind == "b":
        data = bytes(byte & 1 for byte in data)
    return np.frombuffer(data, dtype)[0]


def _torch_scalars() -> st.SearchStrategy[object]:
    import torch

    return st.one_of(
        st.sampled_from(torch_dtypes()),
        st.sampled_from(["cpu", "cuda", "cuda:1", "meta"]).map(torch.device),
        st.lists(st.integers(0, 2**40), max_size=3).map(torch.Size),
    )


_SCALARS = st.one_of(
    plain_scalars,
    numpy_scalars(),
    texts.map(np.str_),
    st.binary(max_size=5).map(np.bytes_),
    st.deferred(_torch_scalars),
)


@st.composite
def scalars(draw: st.DrawFn) -> object:
    """A function, because Hypothesis shows what it draws from, and warns if that is long."""
    return draw(_SCALARS)


_HASHABLES = st.recursive(
    scalars(),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)


@st.composite
def hashables(draw: st.DrawFn) -> object:
    """Anything that can be a key, or in a set."""
    return draw(_HASHABLES)


_LEAVES = st.one_of(
    scalars(),
    st.binary(max_size=5).map(bytearray),
    st.lists(st.integers(-9, 9), max_size=5),
    st.lists(texts, max_size=4),
    st.sets(hashables(), max_size=4),
    arrays(),
    tensors(),
)


@st.composite
def leaves(draw: st.DrawFn) -> object:
    return draw(_LEAVES)


values = st.recursive(
    leaves(),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(texts, inner, max_size=4),
        st.dictionaries(hashables(), inner, max_size=3),
    ),
    max_leaves=12,
)
configs = st.recursive(
    plain_scalars | st.sampled_from([0, 1, 0.0, -0.0, 1.0, True, False, "1", b"1", "", b"", None]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from(["a", "b", 1, b"a", None, (1, "a")]), inner, max_size=3),
    ),
    max_leaves=6,
)
"""Plain values, close to each other."""
