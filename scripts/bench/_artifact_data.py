"""The samples that every store of `artifacts.py` is given, and what a process and a folder hold."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]

LATENT = (4, 128, 128)
EMBEDDING = (77, 768)
LATENT_BYTES = 2 * 4 * 128 * 128
EMBEDDING_BYTES = 2 * 77 * 768
SAMPLE_BYTES = LATENT_BYTES + EMBEDDING_BYTES
"""The small values are not counted in any rate."""
BATCH = 32
POOL = 512
"""So many samples are made; later ones differ from an earlier one in their first eight bytes. They
are more than a processor's cache holds."""
GROUP = 256
"""Samples that are made, then put: making them is not timed. A shard is as large."""


class Small(NamedTuple):
    """The values of a sample that are no tensors."""

    crop: list[int]
    caption: str
    weight: float


@dataclass(frozen=True, slots=True)
class Sample:
    """What a training run keeps of one image."""

    latent: torch.Tensor
    embedding: torch.Tensor
    small: Small

    def as_dict(self) -> dict[str, object]:
        """Return one flat dict, as most stores take it."""
        return {"latent": self.latent, "embedding": self.embedding, **self.small._asdict()}


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples as a model takes them: tensors stacked, the rest in lists."""

    latent: torch.Tensor
    embedding: torch.Tensor
    small: list[Small]


class Rows:
    """The memory of a batch, used again for each one of its size."""

    def __init__(self) -> None:
        self._latent = torch.empty((0, *LATENT), dtype=torch.float16)
        self._embedding = torch.empty((0, *EMBEDDING), dtype=torch.float16)

    def bytes_of(self, count: int) -> tuple[Bytes, Bytes]:
        """Return the rows to be written to, of latents and of embeddings."""
        if len(self._latent) != count:
            self._latent = torch.empty((count, *LATENT), dtype=torch.float16)
            self._embedding = torch.empty((count, *EMBEDDING), dtype=torch.float16)
        return (
            self._latent.view(count, -1).view(torch.uint8).numpy(),
            self._embedding.view(count, -1).view(torch.uint8).numpy(),
        )

    def batch(self, small: list[Small]) -> Batch:
        """Return what was written."""
        return Batch(self._latent, self._embedding, small)


class Samples:
    """Any number of samples of random bits, no two with an equal tensor."""

    def __init__(self, pool: int = POOL) -> None:
        noise = np.random.default_rng(1)
        self._latents = [_noise(noise, LATENT) for _ in range(pool)]
        self._embeddings = [_noise(noise, EMBEDDING) for _ in range(pool)]

    def __getitem__(self, number: int) -> Sample:
        """Make a sample; it is overwritten when POOL others were made."""
        index = number % len(self._latents)
        for tensor in (self._latents[index], self._embeddings[index]):
            tensor.reshape(-1)[:4].view(torch.int64)[0] = number
        return Sample(self._latents[index], self._embeddings[index], small_values(number))

    def groups(self, numbers: Sequence[int]) -> Iterator[list[tuple[int, Sample]]]:
        """Make samples, some at a time."""
        for start in range(0, len(numbers), GROUP):
            yield [(number, self[number]) for number in numbers[start : start + GROUP]]


def _noise(noise: np.random.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    bits = noise.integers(-(1 << 15), 1 << 15, size=shape, dtype=np.int16)
    return torch.from_numpy(bits).view(torch.float16)


def small_values(number: int) -> Small:
    """Return the small values of a sample."""
    caption = f"photo {number}: a cat on a red sofa beside a window, soft light from the left"
    return Small([number % 64, number % 32, 1024, 1024 + number % 128], caption, 1.0 / (1 + number))


def keys_of(count: int, kind: str = "sample") -> list[str]:
    """Return names as a hash of the inputs gives them."""
    return [hashlib.sha256(b"%s %d" % (kind.encode(), n)).hexdigest() for n in range(count)]


def shuffled(count: int, seed: int = 1) -> list[int]:
    """Return all numbers in random order, the same for every store."""
    numbers = list(range(count))
    random.Random(seed).shuffle(numbers)
    return numbers


def batches_of(numbers: Sequence[int]) -> list[Sequence[int]]:
    """Return whole batches."""
    size = min(BATCH, len(numbers))
    return [numbers[at : at + size] for at in range(0, len(numbers) - size + 1, size)]


def is_equal(first: Sample, second: Sample) -> bool:
    """Say whether two samples are the same to the bit: some of these are nan."""
    tensors = ((first.latent, second.latent), (first.embedding, second.embedding))
    return first.small == second.small and all(
        one.shape == other.shape and torch.equal(one.view(torch.int16), other.view(torch.int16))
        for one, other in tensors
    )


def anonymous_bytes() -> int:
    """Return the memory of this process that is no file's."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10
    raise SystemExit("the kernel tells no RssAnon")


def files_in(folder: Path) -> list[Path]:
    """Return all files below a folder."""
    return [Path(place) / name for place, _, names in os.walk(folder) for name in names]


def disk_bytes(folder: Path) -> int:
    """Return the space that a folder takes."""
    return sum(path.stat().st_blocks * 512 for path in files_in(folder))


def drop_cached(folder: Path) -> None:
    """Have the kernel forget what it has in memory of files that nobody has mapped."""
    for path in files_in(folder):
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_share(folder: Path) -> float:
    """Return how much of the large files of a folder is in memory: 0.0 after dropping all.

    By `mincore`: to try and read, without waiting, has the kernel read megabytes around it.
    """
    cached = pages = 0
    for path in files_in(folder):
        size = path.stat().st_size
        if size < SAMPLE_BYTES:
            continue
        with path.open("rb") as stream:
            found = np.empty(-(-size // mmap.PAGESIZE), np.uint8)
            with mmap.mmap(stream.fileno(), size, prot=mmap.PROT_READ) as mapping:
                start = np.frombuffer(mapping, np.uint8)
                mincore(start.ctypes.data, size, found.ctypes.data)
                del start
        cached += int((found & 1).sum())
        pages += len(found)
    return cached / pages if pages else 0.0


def mincore(start: int, size: int, found: int) -> None:
    """Ask the kernel which pages of a mapping are in memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), ctypes.c_void_p(found)):
        raise OSError(ctypes.get_errno(), "mincore")
