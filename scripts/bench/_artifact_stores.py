"""Ways to keep computed tensors: what each offers to be measured, and those with plain files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import safetensors
import safetensors.torch
import torch
from _artifact_data import GROUP, Batch, Sample, Small, keys_of

T = TypeVar("T")

APPENDED = 10
"""So many samples are put into the finished store."""
_threads = ThreadPoolExecutor(1, "second")
"""The second of two threads."""


class Store:
    """A folder of samples, named by numbers: written once by `put` and `finish`, then opened."""

    name: ClassVar[str]
    module: ClassVar[str] = ""
    """What must be imported, and is left out with a note if it cannot be."""
    package: ClassVar[str] = ""
    """What to install for it."""
    most: ClassVar[int | None] = None
    """So many samples are enough: writing more would take minutes."""
    threads: ClassVar[tuple[int, ...]] = (1, 2)
    is_limit: ClassVar[bool] = False
    """Whether it is no store, but shows what the machine can do."""
    can_put: ClassVar[bool] = True
    can_append: ClassVar[bool] = True
    can_delete: ClassVar[bool] = True

    is_reusing: bool = False
    """Whether a batch is read into the memory of the one before; may be set to False."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.count = count
        self.keys = keys_of(count + APPENDED)
        folder.mkdir(parents=True, exist_ok=True)

    def put(self, number: int, sample: Sample) -> None:
        """Write a sample; also into a store that is open for reading, if `can_append`."""
        raise NotImplementedError

    def finish(self) -> None:
        """End the writing."""

    def open(self) -> None:
        """Open a finished store for reading."""

    def close(self) -> None:
        """Give back all that is open."""

    def load(self, number: int) -> Sample:
        """Read a sample, for a batch; its tensors need not be the caller's own."""
        raise NotImplementedError

    def get(self, number: int) -> Sample:
        """Read a sample."""
        return self.load(number)

    def small(self, number: int) -> Small:
        """Read the small values of a sample."""
        raise NotImplementedError

    def batch(self, numbers: Sequence[int], threads: int) -> Batch:
        """Read samples and stack their tensors."""
        samples = in_threads(lambda some: [self.load(number) for number in some], numbers, threads)
        return Batch(
            torch.stack([sample.latent for sample in samples]),
            torch.stack([sample.embedding for sample in samples]),
            [sample.small for sample in samples],
        )

    def delete(self, number: int) -> None:
        """Remove a sample, so that the next reader does not find it."""
        raise NotImplementedError


def in_threads(
    work: Callable[[Sequence[int]], list[T]], numbers: Sequence[int], threads: int
) -> list[T]:
    """Do a job with all numbers, or with each half in a thread."""
    if threads == 1:
        return work(numbers)
    half = len(numbers) // 2
    second = _threads.submit(work, numbers[half:])
    return work(numbers[:half]) + second.result()


class _Files(Store):
    """A file for each sample, named by its key."""

    suffix: ClassVar[str]

    def __init__(self, folder: Path, count: int) -> None:
        super().__init__(folder, count)
        self._paths = [str(folder / f"{key}{self.suffix}") for key in self.keys]

    def delete(self, number: int) -> None:
        os.unlink(self._paths[number])


class TorchFiles(_Files):
    """`torch.save` and `torch.load`."""

    name = "torch.save, file each"
    suffix = ".pt"

    def put(self, number: int, sample: Sample) -> None:
        torch.save(sample.as_dict(), self._paths[number])

    def load(self, number: int) -> Sample:
        found = torch.load(self._paths[number])
        return Sample(found["latent"], found["embedding"], _small_of(found))

    def small(self, number: int) -> Small:
        """Read them without the tensors, which are only mapped."""
        return _small_of(torch.load(self._paths[number], mmap=True))


class NpzFiles(_Files):
    """`numpy.savez` and `numpy.load`."""

    name = "npz, file each"
    suffix = ".npz"
    most = 4000

    def put(self, number: int, sample: Sample) -> None:
        np.savez(
            self._paths[number], latent=sample.latent.numpy(), embedding=sample.embedding.numpy(),
            crop=sample.small.crop, caption=sample.small.caption, weight=sample.small.weight,
        )  # fmt: skip

    def load(self, number: int) -> Sample:
        with np.load(self._paths[number]) as found:
            latent, embedding = (torch.from_numpy(found[name]) for name in ("latent", "embedding"))
            return Sample(latent, embedding, _small_of_arrays(found))

    def small(self, number: int) -> Small:
        with np.load(self._paths[number]) as found:
            return _small_of_arrays(found)


class SafetensorsFiles(_Files):
    """`safetensors.torch.save_file` and `safe_open`; small values are in the metadata."""

    name = "safetensors, file each"
    suffix = ".safetensors"

    def put(self, number: int, sample: Sample) -> None:
        tensors = {"latent": sample.latent, "embedding": sample.embedding}
        safetensors.torch.save_file(tensors, self._paths[number], {"small": dumped(sample.small)})

    def load(self, number: int) -> Sample:
        with _open(self._paths[number]) as found:
            return Sample(
                found.get_tensor("latent"), found.get_tensor("embedding"),
                parsed(found.metadata()["small"]),
            )  # fmt: skip

    def small(self, number: int) -> Small:
        with _open(self._paths[number]) as found:
            return parsed(found.metadata()["small"])


class SafetensorsShards(Store):
    """Files of 256 samples, all of them open; one more sample is a file of its own."""

    name = "safetensors, shards of 256"

    def __init__(self, folder: Path, count: int) -> None:
        super().__init__(folder, count)
        self._waiting: dict[int, Sample] = {}
        self._where: dict[int, tuple[Path, Any, Small]] = {}

    def put(self, number: int, sample: Sample) -> None:
        self._waiting[number] = sample
        if self._where or len(self._waiting) == GROUP:
            self.finish()

    def finish(self) -> None:
        if self._waiting:
            self._write(self.folder / f"{min(self._waiting):08}.safetensors", self._waiting)
            self._waiting = {}

    def open(self) -> None:
        for path in self.folder.iterdir():
            self._add(path)

    def close(self) -> None:
        self._where.clear()

    def load(self, number: int) -> Sample:
        _, shard, small = self._where[number]
        return Sample(
            shard.get_tensor(f"{number}.latent"), shard.get_tensor(f"{number}.embedding"), small
        )

    def small(self, number: int) -> Small:
        return self._where[number][2]

    def delete(self, number: int) -> None:
        """Write its shard anew."""
        path = self._where[number][0]
        kept = [key for key, found in self._where.items() if found[0] == path and key != number]
        beside = path.with_suffix(".new")
        self._write(beside, {key: self.load(key) for key in kept})
        beside.replace(path)
        del self._where[number]
        self._add(path)

    def _add(self, path: Path) -> None:
        shard = _open(path)
        for number, small in json.loads(shard.metadata()["small"]).items():
            self._where[int(number)] = path, shard, Small(*small)

    @staticmethod
    def _write(path: Path, samples: dict[int, Sample]) -> None:
        tensors = {}
        for number, sample in samples.items():
            tensors[f"{number}.latent"] = sample.latent
            tensors[f"{number}.embedding"] = sample.embedding
        small = {number: sample.small for number, sample in samples.items()}
        safetensors.torch.save_file(tensors, path, {"small": json.dumps(small)})


def dumped(small: Small) -> str:
    """Return small values as text."""
    return json.dumps(small)


def parsed(text: str | bytes) -> Small:
    """Return the small values that a text says."""
    return Small(*json.loads(text))


def _open(path: str | Path) -> Any:  # noqa: ANN401 - it has no types
    return safetensors.safe_open(path, "pt")


def _small_of(found: dict[str, object]) -> Small:
    return Small(found["crop"], found["caption"], found["weight"])  # type: ignore[arg-type]


def _small_of_arrays(found: np.lib.npyio.NpzFile) -> Small:
    return Small(found["crop"].tolist(), found["caption"].item(), found["weight"].item())
