"""The element types of tensors, by the names that stand in files.

A name from a file is looked up here and nowhere else: in a table, or against a pattern that leaves
nothing open. It is never imported, evaluated or taken as an attribute unseen. How large an element
is can be told from the name alone, so a layout is understood without torch.

    torch     "float16", "bfloat16", "float8_e4m3fn", ...: every dtype that owns its bytes
    numpy     "<f4", ">i2", "|b1", "<U12", "<M8[ns]": the text numpy itself gives (`dtype.str`);
              "bfloat16" and others of the package ml_dtypes, which JAX uses;
              "longdouble16m63": C's long double, with what tells it from that of other machines
"""

from __future__ import annotations

import importlib
import re
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from smartcache.errors import ArtifactError, LayoutError

if TYPE_CHECKING:
    from types import ModuleType

    import numpy as np
    import torch

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
_LONG: Final = re.compile(r"(c?)longdouble(12|16|24|32)m([0-9]{2,3})", re.ASCII)


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
    if _TIME.fullmatch(name):
        return 8
    found = _LONG.fullmatch(name)
    return int(found[2]) if found else None


def is_numpy_number(name: str) -> bool:
    """Say whether the elements are numbers or times, of one size: no texts."""
    return not (_TEXT.fullmatch(name) or _BYTES.fullmatch(name))


@lru_cache(maxsize=1024)
def numpy_name(dtype: np.dtype[np.generic]) -> str | None:
    """Return the name of a numpy dtype; None for objects, records and what else has none."""
    text = dtype.str
    if text in _NUMBERS or _TEXT.fullmatch(text) or _BYTES.fullmatch(text) or _TIME.fullmatch(text):
        return text
    if dtype.isnative and dtype.type.__module__ == "numpy" and dtype.char in "gG":
        return _long_name(dtype)
    module = sys.modules.get("ml_dtypes")
    if module is not None and dtype.name in _ML_DTYPES and dtype.type.__module__ == "ml_dtypes":
        return str(dtype.name)
    return None


@lru_cache(maxsize=1024)
def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """Return the numpy dtype of a name; LayoutError if there is none of that name."""
    import numpy as np

    if name in _ML_DTYPES:
        return np.dtype(_ml_dtype(name))
    if numpy_item_size(name) is None:
        raise LayoutError(f"no dtype of numpy: {name[:80]!r}")
    if not _LONG.fullmatch(name):
        return np.dtype(name)
    for own in (np.dtype(np.longdouble), np.dtype(np.clongdouble)):
        if _long_name(own) == name:
            return own
    raise ArtifactError(
        f"{name}: the long double of another kind of machine cannot be read on this one",
        hint="Store float64 instead.",
    )


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
            hint="Install it: pip install 'smartcache[torch]'.",
        ) from None
    return torch


def _ml_dtype(name: str) -> type[np.generic]:
    try:
        module = importlib.import_module("ml_dtypes")  # has no types, and is not always there
        found: type[np.generic] = getattr(module, name)
    except (ImportError, AttributeError):
        raise ArtifactError(
            f"the package ml_dtypes, with its {name}, is needed to read this artifact",
            hint="Install it, or a newer release: pip install -U ml_dtypes.",
        ) from None
    return found


def _long_name(dtype: np.dtype[np.generic]) -> str:
    import numpy as np

    sign = "c" if dtype.kind == "c" else ""
    return f"{sign}longdouble{dtype.itemsize}m{np.finfo(np.longdouble).nmant}"
