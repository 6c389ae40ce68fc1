"""Open sets in a test: with small packs, and arrays to put into them."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.api import ArtifactSet, ArtifactSets, SetEngine

FINGERPRINT = {"vae": "0123", "dtype": "float16"}


def open_set(
    sets: ArtifactSets,
    name: str = "latents",
    *,
    pack_bytes: int | None = None,
    **options: Any,  # noqa: ANN401 - those of `ArtifactSets.open`
) -> ArtifactSet:
    """Open the set that the tests write to; `pack_bytes` bounds its packs."""
    opened = sets.open(name, FINGERPRINT, **options)
    if pack_bytes is not None:
        engine_of(opened).pack_bytes = pack_bytes
    return opened


def engine_of(opened: ArtifactSet) -> SetEngine:
    """Return what all objects of this set share."""
    return opened._engine  # noqa: SLF001 - no user needs it


def array(seed: int, size: int = 4096) -> np.ndarray[Any, Any]:
    """Return bytes that differ from those of every other seed."""
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
