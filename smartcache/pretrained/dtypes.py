"""The dtype of weights: by its usual names, under the argument that each library has for it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    Dtype = str | torch.dtype | Mapping[str, str | torch.dtype]

_SHORT = {
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "float": "float32",
    "full": "float32",
    "fp64": "float64",
}
_RENAMED = (0, 42)
"""The first release of diffusers that is known to take `dtype` everywhere."""


def dtype_arguments(cls: type, dtype: Dtype | None, old: object = None) -> dict[str, object]:
    """Return the argument for the dtype, under the name that the class knows; {} for None.

    `old` is what was given as `torch_dtype`, the old name; giving both is a TypeError.
    """
    if old is not None and dtype is not None:
        raise TypeError("Pass dtype alone: torch_dtype is its old name, and both were given")
    value = old if dtype is None else dtype
    return {} if value is None else {_name_for(cls): resolve_dtype(value)}


def resolve_dtype(dtype: object) -> object:
    """Return torch's dtype for a name; other values, "auto" among them, as they are."""
    if isinstance(dtype, Mapping):
        return {name: resolve_dtype(each) for name, each in dtype.items()}
    if not isinstance(dtype, str) or dtype == "auto":
        return dtype
    import torch

    name = dtype.removeprefix("torch.")
    found = getattr(torch, _SHORT.get(name, name), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(  # noqa: TRY004 - a text that names none
            f"There is no dtype {dtype!r}; for example: float32, float16, bfloat16"
        )
    return found


def _name_for(cls: type) -> str:
    libraries = {each.__module__.partition(".")[0] for each in cls.__mro__}
    if "diffusers" not in libraries or _diffusers_version() >= _RENAMED:
        return "dtype"
    return "torch_dtype"


def _diffusers_version() -> tuple[int, ...]:
    text = str(importlib.import_module("diffusers").__version__)
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
