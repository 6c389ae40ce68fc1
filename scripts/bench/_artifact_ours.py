"""smartcache among the stores of `artifacts.py`, and the limits that nobody can pass."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from _artifact_data import LATENT_BYTES, SAMPLE_BYTES, Batch, Rows, Sample, Small
from _artifact_libraries import raw
from _artifact_stores import Store, dumped, in_threads

if TYPE_CHECKING:
    from smartcache.artifacts.artifactset import ArtifactSet
    from smartcache.cache import SmartCache

FINGERPRINT = {"vae": "none", "dtype": "float16", "size": 1024}


class Ours(Store):
    """A set of artifacts."""

    name = "smartcache"

    def __init__(self, folder: Path, count: int) -> None:
        super().__init__(folder, count)
        for module in ("smartcache.cache", "smartcache.artifacts.artifactset"):
            importlib.import_module(module)
        self.is_reusing = True
        self.cache: SmartCache | None = None
        self.set: ArtifactSet | None = None
        self._out: dict[int, dict[Any, Any]] = {}

    def open(self) -> None:
        from smartcache.cache import SmartCache

        self.cache = SmartCache(self.folder)
        self.set = self.cache.artifacts("bench", fingerprint=FINGERPRINT)

    def close(self) -> None:
        if self.set is not None and self.cache is not None:
            self.set.close()
            self.cache.close()
        self.cache = self.set = None

    @property
    def artifacts(self) -> ArtifactSet:
        """The set, open."""
        if self.set is None:
            self.open()
        assert self.set is not None  # noqa: S101 - for mypy
        return self.set

    def put(self, number: int, sample: Sample) -> None:
        self.artifacts.put(self.keys[number], sample.as_dict())

    def finish(self) -> None:
        self.close()

    def load(self, number: int) -> Sample:
        found = self.artifacts.get(self.keys[number])
        small = Small(found["crop"], found["caption"], found["weight"])
        return Sample(found["latent"], found["embedding"], small)

    def small(self, number: int) -> Small:
        found: Any = self.artifacts[self.keys[number]]
        return Small(found["crop"], found["caption"], found["weight"])

    def batch(self, numbers: Sequence[int], threads: int) -> Batch:
        keys = [self.keys[number] for number in numbers]
        out = self._out.get(len(keys)) if self.is_reusing else None
        found = self.artifacts.get_batch(keys, out=out, threads=threads)
        if self.is_reusing:
            self._out[len(keys)] = found
        lists = zip(found["crop"], found["caption"], found["weight"], strict=True)
        return Batch(found["latent"], found["embedding"], [Small(*values) for values in lists])

    def delete(self, number: int) -> None:
        self.artifacts.delete(self.keys[number])


class RawFile(Store):
    """All samples in one file, by `pwritev` alone; read out of a mapping, in the order it comes."""

    name = "raw pwritev, plain mmap"
    is_limit = True

    stride: ClassVar[int] = (SAMPLE_BYTES + 512 + 63) // 64 * 64

    def __init__(self, folder: Path, count: int) -> None:
        super().__init__(folder, count)
        self._file = -1
        self._mapped: Any = None
        self._rows = Rows()

    def put(self, number: int, sample: Sample) -> None:
        if self._file < 0:
            self._file = os.open(self.folder / "raw", os.O_CREAT | os.O_RDWR, 0o600)
        parts: list[Any] = [
            raw(sample.latent),
            raw(sample.embedding),
            dumped(sample.small).encode(),
        ]
        os.pwritev(self._file, parts, number * self.stride)

    def finish(self) -> None:
        os.ftruncate(self._file, self.count * self.stride)
        os.close(self._file)
        self._file = -1

    def open(self) -> None:
        self._mapped = np.memmap(self.folder / "raw", np.uint8, "r")

    def close(self) -> None:
        self._mapped = None

    def batch(self, numbers: Sequence[int], threads: int) -> Batch:
        """Copy tensors; the small values are left out."""
        source, stride = self._mapped, self.stride
        latents, embeddings = self._rows.bytes_of(len(numbers))

        def copy(rows: Sequence[int]) -> list[Small]:
            for row in rows:
                at = numbers[row] * stride
                latents[row] = source[at : at + LATENT_BYTES]
                embeddings[row] = source[at + LATENT_BYTES : at + SAMPLE_BYTES]
            return []

        return self._rows.batch(in_threads(copy, range(len(numbers)), threads))


class Memory(RawFile):
    """The same samples in the memory of this process, so that reading is `memcpy` alone."""

    name = "memcpy"
    can_put = False

    def put(self, number: int, sample: Sample) -> None:
        if self._mapped is None:
            # Not by numpy, which asks for huge pages: no file and no tensor has those.
            self._mapped = torch.zeros(self.count * self.stride, dtype=torch.uint8).numpy()
        at = number * self.stride
        self._mapped[at : at + LATENT_BYTES] = raw(sample.latent)
        self._mapped[at + LATENT_BYTES : at + SAMPLE_BYTES] = raw(sample.embedding)

    def finish(self) -> None:
        pass

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass


def small_entries(keys: Sequence[str]) -> Iterator[tuple[str, object]]:
    """Make entries without any tensor."""
    for number, key in enumerate(keys):
        yield key, {"n": number, "name": f"entry {number}"}
