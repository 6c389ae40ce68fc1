"""Sets of artifacts and datasets for tests of the commands: tensors small enough to be many."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from smartcache.artifacts import ArtifactSet
from smartcache.cache import SmartCache
from smartcache.training import Dataset, Encoder, Item, Sources

SHAPE = (4, 16, 16)


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


BUCKETS = "64x48 48x64"


def image(path: Path, caption: str, size: tuple[int, int] = (64, 48)) -> None:
    """Write the header of a PNG, with its name behind it, and a caption beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", *size)
    path.write_bytes(header + path.name.encode())
    path.with_suffix(".txt").write_text(caption)


def encode_image(items: list[Item]) -> list[np.ndarray]:
    return [
        np.random.default_rng(item.seed).standard_normal((4, *(item.bucket or (8, 8))), np.float32)
        for item in items
    ]


def encode_text(items: list[Item]) -> list[np.ndarray]:
    return [np.frombuffer(item["caption"].encode(), np.uint8).copy() for item in items]


class Made:
    """Six images in two folders, one that is none, and the dataset "photos" of them."""

    def __init__(self, home: Path, folder: Path) -> None:
        self.home = home
        self.folder = folder
        for number in range(6):
            where = folder / ("cats" if number % 2 else "dogs")
            image(where / f"{number}.png", f"photo {number}", ((64, 48), (48, 64))[number // 3])
        image(folder / "dogs" / "none.png", "no photo")
        (folder / "dogs" / "none.png").write_bytes(b"no image")

    def open(
        self,
        cache: SmartCache,
        name: str = "photos",
        *,
        version: int = 0,
        shared: str | None = None,
    ) -> Dataset:
        return cache.dataset(
            name,
            Sources(self.folder, sidecars={"caption": (".txt", ".json:prompt")}, repeats=2.5),
            latent=Encoder(
                encode_image, reads="file", depends_on="a vae", buckets=BUCKETS, version=version,
                statistic="mode", scale=0.18215, shared=shared,
            ),
            text=Encoder(encode_text, reads="caption", depends_on="an encoder", variations=2),
        )  # fmt: skip

    def build(self, name: str = "photos", *, version: int = 0, shared: str | None = None) -> None:
        with (
            SmartCache(self.home) as cache,
            self.open(cache, name, version=version, shared=shared) as dataset,
        ):
            dataset.build()

    def planned(self) -> str:
        """The plan as a program sees it."""
        with SmartCache(self.home) as cache, self.open(cache) as dataset:
            return str(dataset.plan())
