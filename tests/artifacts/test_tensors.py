"""Specs: memory that is shared, buffers that fit, and sizes that nobody believes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smartcache import errors
from smartcache.artifacts import TensorSpec
from smartcache.artifacts.values.tensors import (
    TORCH,
    TORCH_ONLY,
    Kind,
    array_bytes,
    numpy_dtype,
    numpy_item_size,
    numpy_name,
    torch_dtype,
    torch_item_size,
    torch_name,
)
from tests.artifacts.exact import exactly
from tests.artifacts.strategies import NUMPY_DTYPES, arrays, torch_dtypes


def test_every_torch_dtype_has_a_name_and_its_size() -> None:
    for dtype in torch_dtypes():
        name = torch_name(dtype)
        assert name is not None, dtype
        assert torch_dtype(name) is dtype
        assert torch_item_size(name) == dtype.itemsize, dtype


@pytest.mark.parametrize("dtype", NUMPY_DTYPES, ids=str)
def test_every_numpy_dtype_has_a_name_and_its_size(dtype: np.dtype[np.generic]) -> None:
    name = numpy_name(dtype)
    assert name is not None
    assert numpy_dtype(name) == dtype
    assert numpy_item_size(name) == dtype.itemsize


@pytest.mark.parametrize("dtype", ["O", "V8", "i4,f8", "T", "g", ">g", "G"])
def test_objects_records_and_long_doubles_have_no_name(dtype: str) -> None:
    assert numpy_name(np.dtype(dtype)) is None


@pytest.mark.parametrize(
    "name",
    [
        "", "O", "object", "f4", "=f4", "<f3", "<V8", "<U99999999999", "<U01", "<M8[x]", "<M8[0s]",
        "<M8[s/2]", "i4,f8", "(3,)i4", "torch.float16", "Tensor", "__class__", "os.system",
        "longdouble16", "<f4\n", "<f4\0", "<U\u0663",
    ],
)  # fmt: skip
def test_a_name_that_is_no_dtype_is_refused_and_not_looked_up(name: str) -> None:
    assert numpy_item_size(name) is None
    with pytest.raises(errors.LayoutError):
        numpy_dtype(name)
    assert torch_item_size(name) is None
    with pytest.raises(errors.LayoutError):
        torch_dtype(name)
    kinds: tuple[Kind, ...] = ("torch", "numpy", "array")
    for kind in kinds:
        with pytest.raises(errors.LayoutError):
            TensorSpec.of(kind, name, (1,))


def test_a_dtype_of_ml_dtypes_asks_for_that_package() -> None:
    spec = TensorSpec.of("array", "bfloat16", (3,))
    assert spec.nbytes == 6
    try:
        import ml_dtypes  # type: ignore[import-not-found] # noqa: F401 - not a dependency
    except ImportError:
        with pytest.raises(errors.ArtifactError, match="ml_dtypes"):
            spec.new()


@pytest.mark.parametrize("kind", ["torch", "numpy", "array"])
@pytest.mark.parametrize(
    "shape", [(2**48,), (2**40, 2**40), (0, 2**60), (2**63, 0), (1,) * 65, (2**64,) * 60]
)
def test_a_shape_that_no_memory_can_hold_is_refused(kind: Kind, shape: tuple[int, ...]) -> None:
    with pytest.raises(errors.LayoutError):
        TensorSpec.of(kind, "uint8" if kind == "torch" else "|u1", shape)


@pytest.mark.parametrize(
    ("kind", "dtype", "shape"),
    [
        *(("torch", name, (3, 4)) for name in (*TORCH, *TORCH_ONLY)),
        *(("numpy", dtype.str, (3, 4)) for dtype in NUMPY_DTYPES),
        ("numpy", "<f4", ()),
        ("torch", "float32", ()),
        ("torch", "bfloat16", (0, 3)),
        ("array", ">f4", (0, 3)),
        ("numpy", "<U0", (2, 3)),
    ],
    ids=str,
)
def test_a_new_tensor_and_a_batch_of_it_share_their_memory_with_the_bytes(
    kind: Kind, dtype: str, shape: tuple[int, ...]
) -> None:
    import torch

    if kind == "torch" and not hasattr(torch, dtype):
        pytest.skip(f"this torch has no {dtype}")
    spec = TensorSpec.of(kind, dtype, shape)
    one, memory = spec.new()
    assert (memory.format, memory.readonly, len(memory)) == ("B", False, spec.nbytes)
    batch = spec.new_batch(3, pinned=True)
    assert tuple(batch.shape) == (3, *spec.shape)  # type: ignore[attr-defined]
    rows = spec.rows(batch)
    assert (rows.shape, rows.dtype) == ((3, spec.nbytes), np.dtype("u1"))
    data = bytes(np.arange(spec.nbytes, dtype=np.uint8) % 2)
    memory[:] = data
    rows[1] = np.frombuffer(data, np.uint8)
    assert exactly(one) == exactly(spec.from_bytes(data))
    assert exactly(batch[1]) == exactly(one) or not spec.shape  # type: ignore[index]
    raw = np.frombuffer(bytearray(data), np.uint8)
    view = spec.view(raw)
    assert (view.shape, view.flags.writeable, view.tobytes()) == (spec.shape, False, data)
    assert np.shares_memory(view, raw) or not data


def test_a_view_shows_numbers_that_numpy_lacks_as_their_bits() -> None:
    import torch

    data = np.frombuffer(torch.ones(2, dtype=torch.bfloat16).view(torch.uint8).numpy(), np.uint8)
    assert TensorSpec.of("torch", "bfloat16", (2,)).view(data).tolist() == [0x3F80, 0x3F80]
    with pytest.raises(errors.LayoutError):
        TensorSpec.of("torch", "bfloat16", (3,)).view(data)


_LATENT = TensorSpec.of("torch", "float16", (4, 8))


@pytest.mark.parametrize(
    "make",
    [
        lambda torch: torch.zeros(2, 4, 9).half(),
        lambda torch: torch.zeros(4, 8).half(),
        lambda torch: torch.zeros(2, 1, 4, 8).half(),
        lambda torch: torch.zeros(0, 4, 8).half(),
        lambda torch: torch.zeros(2, 4, 8),
        lambda torch: torch.zeros(2, 4, 8).bfloat16(),
        lambda torch: torch.zeros(2, 8, 4).half().transpose(1, 2),
        lambda torch: torch.zeros(4, 4, 8).half()[::2],
        lambda torch: torch.zeros(2, 4, 8, device="meta").half(),
        lambda torch: torch.zeros(()).half(),
        lambda torch: np.zeros((2, 4, 8), np.float16),
        lambda torch: [1],
        lambda torch: None,
    ],
)
def test_a_buffer_that_does_not_fit_is_refused(make: Callable[[object], object]) -> None:
    import torch

    with pytest.raises(errors.BatchShapeError):
        _LATENT.rows(make(torch))


def test_a_numpy_buffer_that_does_not_fit_is_refused() -> None:
    import torch

    spec = TensorSpec.of("numpy", "<f4", (3,))
    locked = np.zeros((2, 3), "f4")
    locked.flags.writeable = False
    for batch in (np.zeros((2, 4), "f4"), np.zeros((2, 3), ">f4"), locked, torch.zeros(2, 3)):
        with pytest.raises(errors.BatchShapeError):
            spec.rows(batch)
    assert spec.rows(np.zeros((2, 3), "f4")).shape == (2, 12)


def test_a_buffer_with_gradients_is_written_all_the_same() -> None:
    import torch

    batch = torch.zeros(2, 4, 8, dtype=torch.float16, requires_grad=True)
    _LATENT.rows(batch)[:] = 1
    assert batch.detach().view(torch.int16).eq(0x0101).all()


@given(arrays(), st.booleans())
def test_the_bytes_of_an_array_are_its_elements_in_c_order(
    array: np.ndarray[tuple[int, ...], np.dtype[np.generic]], copied: bool
) -> None:
    array = array.copy(order="K") if copied else array
    data = array_bytes(array)
    assert data.tobytes() == array.tobytes()
    if array.flags.c_contiguous and array.nbytes:
        assert np.shares_memory(np.frombuffer(data, np.uint8), array)
