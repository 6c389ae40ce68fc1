"""What `artifacts.py` compares: smartcache, other ways to keep computed samples, and the limits.

Each store is opened by its constructor, in a folder, and takes samples by their key.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.torch
import torch

from smartcache.cache import SmartCache

# Views of what is mapped, or of bytes, are only read here.
warnings.filterwarnings("ignore", message="The given (NumPy array|buffer) is not writable")

Value = dict[str, Any]

LATENT, EMBEDDING = (16, 64, 64), (77, 768)
LATENT_BYTES, EMBEDDING_BYTES = 2 * 16 * 64 * 64, 2 * 77 * 768
SAMPLE_BYTES = LATENT_BYTES + EMBEDDING_BYTES
"""The small values are not counted in any rate."""
ENTRY_BYTES = 4096
POOL = 32


def key_of(number: int, kind: str = "sample") -> str:
    """Return a key as `compute_key` makes them."""
    return hashlib.sha256(b"%s %d" % (kind.encode(), number)).hexdigest()


class Samples:
    """Any number of samples of random bits, no two with an equal tensor; made when asked for."""

    def __init__(self) -> None:
        noise = np.random.default_rng(1)
        self._pools = {
            name: torch.from_numpy(noise.integers(0, 1 << 15, (POOL, *shape), np.int16))
            for name, shape in (("latent", LATENT), ("embedding", EMBEDDING))
        }

    def __getitem__(self, number: int) -> Value:
        made: Value = {"crop": [0, 0, number, number]}
        for name, pool in self._pools.items():
            tensor = pool[number % POOL].clone()
            tensor.view(-1)[:4].view(torch.int64)[0] = number
            made[name] = tensor.view(torch.float16)
        return made


def small_value(number: int) -> Value:
    """Return an artifact without any tensor."""
    return {"number": number, "name": f"photo {number}", "crop": [0, 0, number, number]}


def entries(count: int) -> Iterator[tuple[str, Value]]:
    """Make artifacts of one tensor of 4 KiB."""
    noise = np.random.default_rng(2).integers(0, 256, (POOL, ENTRY_BYTES), np.uint8)
    for number in range(count):
        tensor = torch.from_numpy(noise[number % POOL].copy())
        tensor[:8].view(torch.int64)[0] = number
        yield key_of(number, "entry"), {"latent": tensor}


def is_equal(first: Value, second: Value) -> bool:
    """Say whether two samples are the same to the bit: some numbers in them are nan."""
    return first["crop"] == second["crop"] and all(
        torch.equal(first[name].view(torch.int16), second[name].view(torch.int16))
        for name in ("latent", "embedding")
    )


class Ours:
    """A set of artifacts."""

    name = "smartcache"

    def __init__(self, folder: Path, cache: SmartCache | None = None) -> None:
        self._cache = cache or SmartCache(folder)
        self.set = self._cache.artifacts("bench", fingerprint={"vae": "none"})
        self._out: Value | None = None

    def put(self, key: str, value: Value) -> None:
        self.set.put(key, value)

    def get(self, key: str) -> Value:
        found: Value = self.set.get(key)
        return found

    get_small = get

    def batch(self, keys: Sequence[str]) -> Value:
        return self.set.get_batch(keys)

    def reused(self, keys: Sequence[str]) -> Value:
        """Read samples into the memory of the batch before."""
        self._out = self.set.get_batch(keys, out=self._out)
        return self._out

    def close(self) -> None:
        self.set.close()
        self._cache.close()


class Lmdb:
    """LMDB as people use it: a commit for each put; views of the file are stacked, or cloned."""

    name = "LMDB"

    def __init__(self, folder: Path) -> None:
        # Without sync a put that has returned survives the process, not the power: as ours does.
        lmdb: Any = importlib.import_module("lmdb")
        self._environment = lmdb.open(str(folder), map_size=1 << 36, sync=False)

    def put(self, key: str, value: Value) -> None:
        if "latent" in value:
            crop = json.dumps(value["crop"]).encode()
            stored = b"".join((_raw(value["latent"]), _raw(value["embedding"]), crop))
        else:
            stored = json.dumps(value).encode()
        with self._environment.begin(write=True) as writing:
            writing.put(key.encode(), stored)

    def get(self, key: str) -> Value:
        """Read one sample and copy it: views end with the transaction."""
        with self._environment.begin(buffers=True) as reading:
            latent, embedding, crop = _views(reading.get(key.encode()))
            return {
                "latent": latent.clone().view(LATENT),
                "embedding": embedding.clone().view(EMBEDDING),
                "crop": crop,
            }

    def get_small(self, key: str) -> Value:
        with self._environment.begin(buffers=True) as reading:
            found: Value = json.loads(bytes(reading.get(key.encode())))
            return found

    def batch(self, keys: Sequence[str]) -> Value:
        with self._environment.begin(buffers=True) as reading:
            latents, embeddings, crops = zip(
                *(_views(reading.get(key.encode())) for key in keys), strict=True
            )
            return {
                "latent": torch.stack(latents).view(-1, *LATENT),
                "embedding": torch.stack(embeddings).view(-1, *EMBEDDING),
                "crop": list(crops),
            }

    def close(self) -> None:
        self._environment.close()


def _raw(tensor: torch.Tensor) -> Any:  # noqa: ANN401 - an array, which mypy takes for no Buffer
    return tensor.view(-1).view(torch.uint8).numpy()


def _views(found: memoryview) -> tuple[torch.Tensor, torch.Tensor, object]:
    half, embedding = torch.float16, EMBEDDING_BYTES // 2
    return (
        torch.frombuffer(found, dtype=half, count=LATENT_BYTES // 2),
        torch.frombuffer(found, dtype=half, count=embedding, offset=LATENT_BYTES),
        json.loads(bytes(found[SAMPLE_BYTES:])),
    )


class TorchFiles:
    """A file for each sample, by `torch.save` and `torch.load`."""

    name = "torch.save, file each"

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._prefix = f"{folder}/"

    def put(self, key: str, value: Value) -> None:
        torch.save(value, self._prefix + key)

    def get(self, key: str) -> Value:
        found: Value = torch.load(self._prefix + key)
        return found

    def batch(self, keys: Sequence[str]) -> Value:
        found = [self.get(key) for key in keys]
        return {
            "latent": torch.stack([each["latent"] for each in found]),
            "embedding": torch.stack([each["embedding"] for each in found]),
            "crop": [each["crop"] for each in found],
        }

    def close(self) -> None:
        """Do nothing: no file is open."""


class SafetensorsFiles(TorchFiles):
    """A file of safetensors for each sample; the list is in its metadata."""

    name = "safetensors, file each"

    def put(self, key: str, value: Value) -> None:
        tensors = {name: value[name] for name in ("latent", "embedding")}
        crop = {"crop": json.dumps(value["crop"])}
        safetensors.torch.save_file(tensors, self._prefix + key, metadata=crop)

    def get(self, key: str) -> Value:
        opened: Any = safetensors.safe_open
        with opened(self._prefix + key, framework="pt") as found:
            return {
                "latent": found.get_tensor("latent"),
                "embedding": found.get_tensor("embedding"),
                "crop": json.loads(found.metadata()["crop"]),
            }


class RawFile:
    """What the machine can do: `pwritev` alone, in the order it comes, and slices of a mapping."""

    name = "raw pwritev"
    stride = (SAMPLE_BYTES + 128 + 63) // 64 * 64

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._path = folder / "raw"
        self._file = os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600)
        self._end = 0

    def put(self, _key: str, value: Value) -> None:
        crop = json.dumps(value["crop"]).encode()
        os.pwritev(self._file, [_raw(value["latent"]), _raw(value["embedding"]), crop], self._end)
        self._end += self.stride

    def mapped(self) -> npt.NDArray[np.uint8]:
        return np.memmap(self._path, np.uint8, "r")

    def close(self) -> None:
        os.close(self._file)
