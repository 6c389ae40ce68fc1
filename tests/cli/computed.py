"""Sets of artifacts for tests of the commands: tensors small enough to be many, and known keys."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.api import ArtifactSet, SmartCache

SHAPE = (4, 16, 16)
TENSOR_BYTES = 4 * 16 * 16 * 4


def latent(number: int) -> np.ndarray:
    """A tensor that no other number has: 4 KiB."""
    return np.random.default_rng(number).standard_normal(SHAPE, np.float32)


def fill(home: Path, name: str = "latents", *, count: int = 10, **fingerprint: object) -> str:
    """Put artifacts "key-0" to "key-n" into a set; return the id of the set."""
    with SmartCache(home) as cache, cache.artifacts(name, fingerprint=fingerprint) as latents:
        put(latents, range(count))
        return latents.id


def put(latents: ArtifactSet, numbers: range, *, ttl: float | None = None) -> None:
    """Put artifacts: a tensor each, one that all share, and plain values."""
    for number in numbers:
        value = {
            "latent": latent(number),
            "embedding": np.ones((32, 32), np.float16),
            "crop": [0, 0, 16, 16],
            "caption": f"a cat, take {number}",
        }
        latents.put(f"key-{number}", value, metadata={"file": f"{number}.png"}, ttl=ttl)


@contextmanager
def days_ago(days: float) -> Iterator[None]:
    """Let what is put and used in a block be so many days old."""
    real = time.time
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: real() - days * 86_400)
        yield


def keys(home: Path, id_: str) -> set[str]:
    """The keys that a set has."""
    with SmartCache(home) as cache:
        (info,) = cache.sets.find(id_)
        with cache.sets.open_id(info) as latents:
            return set(latents)


def flip(home: Path, id_: str, position: float = 0.5) -> None:
    """Damage one byte of the first pack of a set, somewhere in the middle of a tensor."""
    (pack, *_) = sorted((home / "sets").glob(f"*/{id_}/*.pack"))
    data = bytearray(pack.read_bytes())
    at = int(len(data) * position)
    data[at] ^= 0xFF
    pack.write_bytes(data)
