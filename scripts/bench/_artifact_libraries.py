"""Libraries that keep many samples: LMDB, diskcache, LitData, MosaicML streaming.

Each is used as its documentation shows. They are imported when they are measured, and without their
types: not everyone has them installed.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from _artifact_data import (
    EMBEDDING,
    EMBEDDING_BYTES,
    LATENT,
    LATENT_BYTES,
    SAMPLE_BYTES,
    Batch,
    Rows,
    Sample,
    Small,
)
from _artifact_stores import Store, dumped, in_threads, parsed

# Views of what is mapped, or of bytes, are only read here.
warnings.filterwarnings("ignore", message="The given (NumPy array|buffer) is not writable")

SLOW = 2000
"""Samples for libraries that are slow to write."""


class Lmdb(Store):
    """One transaction for each put; views of the file are stacked."""

    name = "LMDB"
    module = package = "lmdb"

    def __init__(self, folder: Path, count: int) -> None:
        super().__init__(folder, count)
        self._names = [bytes.fromhex(key) for key in self.keys]
        self._lmdb: Any = importlib.import_module(self.module)
        self._environment: Any = None
        self._reading: Any = None

    def _open(self) -> None:
        # Without sync a put that has returned survives the process, not the power: as ours does.
        # With it there are 400 puts/s.
        self._environment = self._lmdb.open(
            str(self.folder), map_size=2 * SAMPLE_BYTES * self.count + (1 << 30), sync=False
        )

    def put(self, number: int, sample: Sample) -> None:
        if self._environment is None:
            self._open()
        parts = (raw(sample.latent), raw(sample.embedding), dumped(sample.small).encode())
        with self._environment.begin(write=True) as writing:
            writing.put(self._names[number], b"".join(parts))

    def finish(self) -> None:
        self.close()

    def open(self) -> None:
        self._open()
        self._reading = self._environment.begin(buffers=True)

    def close(self) -> None:
        self._reading = None
        if self._environment is not None:
            self._environment.close()
        self._environment = None

    def load(self, number: int) -> Sample:
        return self._sample(self._reading.get(self._names[number]))

    def _sample(self, found: memoryview) -> Sample:
        return Sample(
            torch.frombuffer(found, dtype=torch.float16, count=LATENT_BYTES // 2).view(LATENT),
            torch.frombuffer(
                found, dtype=torch.float16, count=EMBEDDING_BYTES // 2, offset=LATENT_BYTES
            ).view(EMBEDDING),
            parsed(bytes(found[SAMPLE_BYTES:])),
        )

    def get(self, number: int) -> Sample:
        """Read a sample and copy it: views end with the transaction."""
        found = self.load(number)
        return Sample(found.latent.clone(), found.embedding.clone(), found.small)

    def small(self, number: int) -> Small:
        return parsed(bytes(self._reading.get(self._names[number])[SAMPLE_BYTES:]))

    def delete(self, number: int) -> None:
        with self._environment.begin(write=True) as writing:
            writing.delete(self._names[number])


class LmdbReader(Lmdb):
    """The same file, read as we read: copied once into the memory of the batch before."""

    name = "LMDB, our kind of reader"

    def __init__(self, folder: Path, count: int) -> None:
        super().__init__(folder, count)
        self._rows = Rows()

    def batch(self, numbers: Sequence[int], threads: int) -> Batch:
        latents, embeddings = self._rows.bytes_of(len(numbers))

        def read(rows: Sequence[int]) -> list[Small]:
            small = []
            with self._environment.begin(buffers=True) as reading:
                for row in rows:
                    found = np.frombuffer(reading.get(self._names[numbers[row]]), np.uint8)
                    latents[row] = found[:LATENT_BYTES]
                    embeddings[row] = found[LATENT_BYTES:SAMPLE_BYTES]
                    small.append(parsed(found[SAMPLE_BYTES:].tobytes()))
            return small

        return self._rows.batch(in_threads(read, range(len(numbers)), threads))


class DiskCache(Store):
    """`diskcache.Cache` as a dict; arrays, which it pickles faster than tensors."""

    name = "diskcache"
    module = package = "diskcache"
    most = SLOW

    def __init__(self, folder: Path, count: int) -> None:
        super().__init__(folder, count)
        self._module: Any = importlib.import_module(self.module)
        self._cache: Any = None

    def _open(self) -> None:
        self._cache = self._module.Cache(str(self.folder), size_limit=1 << 40)

    def put(self, number: int, sample: Sample) -> None:
        if self._cache is None:
            self._open()
        self._cache[self.keys[number]] = arrays(sample)

    def finish(self) -> None:
        self.close()

    def open(self) -> None:
        self._open()

    def close(self) -> None:
        if self._cache is not None:
            self._cache.close()
        self._cache = None

    def load(self, number: int) -> Sample:
        return sample_of(self._cache[self.keys[number]])

    def small(self, number: int) -> Small:
        return self.load(number).small

    def delete(self, number: int) -> None:
        del self._cache[self.keys[number]]


class LitData(Store):
    """Written by its `Cache`, without the worker processes of `optimize`; read by index."""

    name = "LitData"
    module = package = "litdata"
    most = SLOW
    threads: ClassVar[tuple[int, ...]] = (1,)
    can_delete = False

    def __init__(self, folder: Path, count: int) -> None:
        super().__init__(folder, count)
        self._module: Any = importlib.import_module(self.module)
        self._writer: Any = None
        self._dataset: Any = None

    def put(self, number: int, sample: Sample) -> None:
        if self._dataset is not None:
            self._append(sample)
            return
        if self._writer is None:
            module: Any = importlib.import_module("litdata.streaming.cache")
            self._writer = module.Cache(str(self.folder), chunk_bytes="64MB")
        self._writer[number] = sample.as_dict()

    def _append(self, sample: Sample) -> None:
        # It empties these two folders: by default /tmp/chunks and /tmp/data, whosever they are.
        os.environ["DATA_OPTIMIZER_CACHE_FOLDER"] = f"{self.folder}.chunks"
        os.environ["DATA_OPTIMIZER_DATA_CACHE_FOLDER"] = f"{self.folder}.data"
        with silence():
            self._module.optimize(
                Sample.as_dict, [sample], str(self.folder), chunk_bytes="64MB", num_workers=1,
                mode="append", start_method="fork",
            )  # fmt: skip

    def finish(self) -> None:
        with silence():
            self._writer.done()
            self._writer.merge()
        self._writer = None

    def open(self) -> None:
        self._dataset = self._module.StreamingDataset(str(self.folder))

    def close(self) -> None:
        self._dataset = None

    def load(self, number: int) -> Sample:
        found = self._dataset[number]
        small = Small(found["crop"], found["caption"], found["weight"])
        return Sample(found["latent"], found["embedding"], small)

    def small(self, number: int) -> Small:
        return self.load(number).small


class Mosaic(Store):
    """Written by `MDSWriter`, read by index."""

    name = "MosaicML streaming"
    module, package = "streaming", "mosaicml-streaming"
    most = SLOW
    threads: ClassVar[tuple[int, ...]] = (1,)
    can_append = can_delete = False

    columns: ClassVar[dict[str, str]] = {
        "latent": f"ndarray:float16:{','.join(map(str, LATENT))}",
        "embedding": f"ndarray:float16:{','.join(map(str, EMBEDDING))}",
        "crop": "ndarray:int64:4",
        "caption": "str",
        "weight": "float64",
    }

    def __init__(self, folder: Path, count: int) -> None:
        super().__init__(folder, count)
        self._module: Any = importlib.import_module(self.module)
        self._writer: Any = None
        self._dataset: Any = None

    def put(self, number: int, sample: Sample) -> None:  # noqa: ARG002 - the next one
        if self._writer is None:
            self._writer = self._module.MDSWriter(columns=self.columns, out=str(self.folder))
        self._writer.write(arrays(sample))

    def finish(self) -> None:
        self._writer.finish()
        self._writer = None

    def open(self) -> None:
        self._dataset = self._module.StreamingDataset(local=str(self.folder), batch_size=1)

    def close(self) -> None:
        self._dataset = None
        self._module.base.util.clean_stale_shared_memory()

    def load(self, number: int) -> Sample:
        return sample_of(self._dataset[number])

    def small(self, number: int) -> Small:
        return self.load(number).small


def raw(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor, which share its memory."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def arrays(sample: Sample) -> dict[str, object]:
    """Return a sample without torch."""
    return {
        "latent": sample.latent.numpy(),
        "embedding": sample.embedding.numpy(),
        "crop": np.array(sample.small.crop),
        "caption": sample.small.caption,
        "weight": sample.small.weight,
    }


def sample_of(found: dict[str, Any]) -> Sample:
    """Return the sample that was `arrays`."""
    latent, embedding = (torch.from_numpy(found[name]) for name in ("latent", "embedding"))
    small = Small(found["crop"].tolist(), found["caption"], float(found["weight"]))
    return Sample(latent, embedding, small)


@contextmanager
def silence() -> Iterator[None]:
    """Let a library and its forks say nothing: stdout is the table's."""
    with (
        open(os.devnull, "w", encoding="utf-8") as nothing,
        redirect_stdout(nothing),
        redirect_stderr(nothing),
    ):
        yield
