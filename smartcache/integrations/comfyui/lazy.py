"""Tensors that are read from a dataset when somebody needs their values.

A `LazyTensor` is a `torch.Tensor` that knows its shape and dtype and where its values lie: in one
stored tensor, or in several, one after the other along the first dimension. What it is (`shape`,
`dtype`, `len`), another dtype of it and a clone of it read nothing; rows of it read these rows;
everything else reads all of it, does what was asked with an ordinary tensor, and forgets that
tensor again. So a list of a thousand of them takes no memory, and a loop over batches takes that of
a batch.

It stands before torch twice. `__torch_function__` sees what Python code asks for, as it was
written: ordinary tensors go on from there, so gradients, views and inference mode are torch's own
affair. `__torch_dispatch__` catches what comes from C++ past that.

Values never change behind its back: who writes to it (`mul_`, `x[0] = 1`, `requires_grad_`) makes
it an ordinary tensor for good, with memory of its own. Rows are copies: writing to `x[0]` does not
change x. Pickled, and so by `torch.save`, it is an ordinary tensor with all its values.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, Self

import numpy as np
import torch

from smartcache.artifacts import ArtifactSet
from smartcache.errors import (
    ArtifactNotFoundError,
    DamagedArtifactError,
    DatasetChangedError,
    DatasetError,
)

_ABOUT = frozenset(
    {
        getattr(torch.Tensor, name).__get__
        for name in (
            "device", "dtype", "grad", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta",
            "is_mps", "is_nested", "is_quantized", "is_sparse", "is_xpu", "itemsize", "layout",
            "nbytes", "ndim", "requires_grad", "shape",
        )
        if hasattr(torch.Tensor, name)  # some are not there in every PyTorch
    }
    | {
        getattr(torch.Tensor, name)
        for name in (
            "__hash__", "__len__", "dim", "element_size", "get_device", "is_complex",
            "is_contiguous", "is_floating_point", "is_inference", "is_signed", "ndimension",
            "nelement", "numel", "size", "storage_offset", "stride",
        )
    }
    | {torch.is_complex, torch.is_floating_point, torch.is_inference, torch.numel}
)  # fmt: skip
"""What is answered without the values."""
_COPIES = frozenset(
    {torch.Tensor.clone, torch.Tensor.detach, torch.Tensor.contiguous, torch.clone, torch.detach}
)

_WRITES = ("__set__", "__setitem__", "data_ptr")
"""A pointer must not outlive what it points to."""
_REMEMBERED = 32


class Reader:
    """The samples of a dataset, found by their keys.

    The last few are remembered: the tensors of a sample are wanted one after the other, and finding
    it takes longer than reading one.
    """

    def __init__(self, opened: ArtifactSet) -> None:
        self.opened = opened
        self.find = lru_cache(_REMEMBERED)(opened.__getitem__)


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of one sample of a dataset."""

    reader: Reader
    key: str
    field: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> torch.Tensor:
        """Return all of it, in memory of its own."""
        return self._as_promised(lambda sample: sample[self.field])

    def read_rows(self, rows: Sequence[int]) -> torch.Tensor:
        """Return some of its rows, in memory of their own; the others are not copied."""

        def copied(sample: Any) -> torch.Tensor:  # noqa: ANN401 - mypy knows samples as mappings
            view = sample.handle(self.field).numpy()
            if view.shape != self.shape:
                raise DamagedArtifactError(f"its shape is {view.shape}, not {self.shape}")
            # Without a dtype in numpy, such as bfloat16, it is the bits.
            made = torch.from_numpy(view[np.asarray(rows, np.int64)])
            return made if made.dtype == self.dtype else made.view(self.dtype)

        return self._as_promised(copied, len(rows))

    def _as_promised(self, read: Callable[[Any], object], rows: int | None = None) -> torch.Tensor:
        """Read something; DatasetError if it is not what was saved."""
        shape = self.shape if rows is None else (rows, *self.shape[1:])
        name = self.reader.opened.name
        hint = "Save the dataset again."
        try:
            found = read(self.reader.find(self.key))
        except ArtifactNotFoundError:
            message = f"A sample of the dataset {name} is gone: it was saved again, or damaged"
            raise DatasetChangedError(message, hint="Load the dataset again.") from None
        except (DamagedArtifactError, KeyError) as error:
            raise DatasetError(f"A sample of the dataset {name} is damaged", hint=hint) from error
        is_right = isinstance(found, torch.Tensor) and found.dtype == self.dtype
        if not is_right or tuple(found.shape) != shape:  # type: ignore[attr-defined]
            message = f"{self.field} of a sample of {name} is not the tensor that was saved"
            raise DatasetError(message, hint=hint)
        return found  # type: ignore[return-value]


class LazyTensor(torch.Tensor):
    """A tensor whose values are read when they are needed: see the module."""

    _parts: tuple[Stored, ...]
    _ends: list[int] | None
    """Where each part ends, in rows; None: there is one part."""
    _casts: tuple[torch.dtype, ...]
    """The dtypes it was turned to, one after the other: each of them may round."""
    _own: torch.Tensor | None
    """What it has become once somebody wrote to it."""

    def __new__(cls, parts: tuple[Stored, ...], casts: tuple[torch.dtype, ...] = ()) -> Self:
        """Take stored tensors of one dtype, and of one shape but for the first dimension."""
        first = parts[0]
        shape, ends = first.shape, None
        if len(parts) > 1:
            ends = list(accumulate(each.shape[0] for each in parts))
            shape = (ends[-1], *first.shape[1:])
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=casts[-1] if casts else first.dtype
        )
        made._parts, made._ends, made._casts, made._own = parts, ends, casts, None
        return made

    def __init__(self, *_: object) -> None:
        """Do nothing: a tensor is made by `__new__`."""

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        """Say what it is; nothing is read for it."""
        return f"<LazyTensor {str(self.dtype).removeprefix('torch.')} {list(self.shape)}>"

    @classmethod
    def __torch_function__(
        cls,
        func: Any,  # noqa: ANN401 - torch's own signature
        types: object,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Answer what Python code asks of it, or of a list with it inside."""
        del types
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, LazyTensor) and first._own is None:
            if func in _ABOUT:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            if func is torch.Tensor.__getitem__:
                return first._at(args[1])
            if func is torch.Tensor.to:
                dtype = kwargs.get("dtype") if len(args) == 1 else args[1]
                if isinstance(dtype, torch.dtype) and len(args) + len(kwargs) == 2:  # noqa: PLR2004
                    return first if dtype == first.dtype else first._copy(dtype)
            if func in _COPIES and len(args) == 1 and not kwargs:
                return first if func is torch.Tensor.contiguous else first._copy()
        name = getattr(func, "__name__", "")
        if name in _WRITES or _is_in_place(name) or kwargs.get("inplace"):
            _settle(first)
        _settle(kwargs.get("out"))
        result = func(*_plain(args), **_plain(kwargs))
        return first if isinstance(first, LazyTensor) and result is first._own else result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,  # noqa: ANN401
        types: object,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Do what C++ code asks with ordinary tensors."""
        del types
        if func._schema.is_mutable:
            _settle(args)
            _settle(kwargs)
        return func(*_plain(args), **_plain(kwargs or {}))

    def _copy(self, *casts: torch.dtype) -> Self:
        return type(self)(self._parts, (*self._casts, *casts))

    def _whole(self) -> torch.Tensor:
        """Return an ordinary tensor with all values: its own, or a new one."""
        if self._own is not None:
            return self._own
        if self._ends is None:
            return self._cast(self._parts[0].read())
        return self._some(range(self._ends[-1]))

    def _some(self, rows: Sequence[int]) -> torch.Tensor:
        """Return rows in the order they are named."""
        if self._ends is None:
            part = self._parts[0]
            is_all = list(rows) == list(range(part.shape[0]))
            return self._cast(part.read() if is_all else part.read_rows(rows))
        made = torch.empty((len(rows), *self._parts[0].shape[1:]), dtype=self._parts[0].dtype)
        wanted: dict[int, list[tuple[int, int]]] = {}
        for at, row in enumerate(rows):
            number = bisect_right(self._ends, row)
            part = self._parts[number]
            wanted.setdefault(number, []).append((at, row - self._ends[number] + part.shape[0]))
        if len(wanted) > 1:
            self._parts[0].reader.opened.announce({self._parts[number].key for number in wanted})
        for number, pairs in wanted.items():
            part = self._parts[number]
            is_all = part.shape[0] == 1
            found = part.read() if is_all else part.read_rows([row for _, row in pairs])
            for nth, (at, _) in enumerate(pairs):
                made[at] = found[0 if is_all else nth]
        return self._cast(made)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        for dtype in self._casts:
            tensor = tensor.to(dtype)
        return tensor

    def _at(self, index: object) -> torch.Tensor:
        """Return `self[index]`, of which only the rows that the index names are read."""
        row, *rest = index if isinstance(index, tuple) and index else (index,)
        found = None
        if self._ends is not None or self._parts[0].shape:
            found = _rows_of(row, len(self))
        if found is None:
            return self._whole()[_plain(index)]
        rows, again = found
        if len(rows) >= len(self):
            return self._whole()[_plain(index)]
        each = list(dict.fromkeys(rows))
        values = self._some(each)
        if isinstance(again, torch.Tensor):
            if each == rows and again.dim() == 1 and not rest:
                return values  # in their order, each once: as it was read
            where = {row: at for at, row in enumerate(each)}
            again = torch.tensor([where[row] for row in rows], dtype=torch.int64).view(again.shape)
        return values[(again, *_plain(rest))]


def _rows_of(index: object, count: int) -> tuple[list[int], int | slice | torch.Tensor] | None:
    """Return the rows that an index names, and what to index these rows with instead.

    None: it is no index of rows, or one that torch refuses, in its own words.
    """
    rows: list[int]
    again: int | slice | torch.Tensor
    if type(index) is slice:
        if index.step is not None and index.step <= 0:
            return None
        return list(range(*index.indices(count))), slice(None)
    if type(index) is int:
        rows, again = [index], 0
    elif type(index) is list and all(type(each) is int for each in index):
        rows, again = list(index), torch.empty(len(index))
    elif type(index) is torch.Tensor and index.dtype is torch.bool and index.shape == (count,):
        rows = index.nonzero().flatten().tolist()
        again = torch.empty(len(rows))
    elif type(index) is torch.Tensor and index.dtype in (torch.int64, torch.int32) and index.dim():
        rows, again = index.flatten().tolist(), torch.empty(index.shape)
    else:
        return None
    if not all(-count <= row < count for row in rows):
        return None
    return [row % count for row in rows], again


def _is_in_place(name: str) -> bool:
    """Say whether a function writes to its first argument, by torch's rules for names."""
    if name.startswith("__"):
        return name.startswith("__i") and name not in (
            "__index__",
            "__int__",
            "__invert__",
            "__iter__",
        )
    return name.endswith("_")


def _settle(value: object) -> None:
    """Make lazy tensors ordinary ones for good: somebody writes to them."""
    if isinstance(value, LazyTensor):
        if value._own is None:
            value._own = value._whole()
    elif isinstance(value, dict):
        _settle(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for each in value:
            _settle(each)


def _plain(value: Any) -> Any:  # noqa: ANN401
    """Return arguments with ordinary tensors in place of lazy ones, also in lists and dicts."""
    if isinstance(value, LazyTensor):
        return value._whole()
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    if type(value) is dict:
        return {key: _plain(each) for key, each in value.items()}
    return value
