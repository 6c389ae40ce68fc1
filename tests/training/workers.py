"""Encoders for processes that import little: an engine sends them by name.

Every item that an encoder is called for is a line in a log that all processes append to: so a test
knows what was encoded how often, and by whom.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from smartcache.training import Dataset, Item


class Encode:
    """Makes of an item what tells all of it: contents, bucket, variation, random numbers."""

    def __init__(
        self,
        folder: Path,
        *reads: str,
        pause: float = 0,
        bad: str = "",
        nan: str = "",
        hangs_at: str = "",
        dies_at: str = "",
        error: type[Exception] | None = None,
    ) -> None:
        self.folder = folder
        self.reads = reads or ("file",)
        self.pause = pause
        """Seconds for every item."""
        self.bad = bad
        """The name of an item that cannot be encoded."""
        self.nan = nan
        self.hangs_at = hangs_at
        """Whoever comes to this item first says so, in a file, and waits for ever."""
        self.dies_at = dies_at
        """Whoever comes to this item dies."""
        self.error = error
        """It fails on everything."""

    def __call__(self, items: list[Item]) -> dict[str, object]:
        lines = "".join(f"{os.getpid()} {item.name} {item.variation}\n" for item in items)
        log = os.open(self.folder / "encoded", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(log, lines.encode())
        os.close(log)
        time.sleep(self.pause * len(items))
        for item in items:
            self._misbehave(item)
        texts = [self._contents(item) for item in items]
        longest = 8
        masks = [np.arange(longest) < 1 + len(text) % longest for text in texts]
        values = [np.frombuffer(blake3(text).digest(), "<u2") for text in texts]
        floats = [value.astype(np.float32) for value in values]
        for item, value in zip(items, floats, strict=True):
            if item.name == self.nan:
                value[3] = np.nan
            item.crop = [0, 0, len(item.name), 1 + item.variation]
        return {
            "value": floats,
            "ids": [value[:longest].astype(np.int64) for value in values],
            "mask": masks,
        }

    def _misbehave(self, item: Item) -> None:
        if self.error is not None:
            raise self.error(f"no good: {item.name}")
        if item.name == self.bad:
            raise ValueError("no good")
        if item.name == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if item.name == self.hangs_at:
            try:
                with open(self.folder / "hangs", "x", encoding="utf-8") as file:
                    file.write(f"{os.getpid()}")
            except FileExistsError:
                return
            time.sleep(3600)

    def _contents(self, item: Item) -> bytes:
        found: list[Any] = []
        for read in self.reads:
            value = item.get(read)
            found.append(item.bytes(read) if isinstance(value, Path) else value)
        metadata = sorted(item.metadata.items())
        told = (found, item.bucket, item.variation, item.size, item.rng.random(), metadata)
        return repr(told).encode()


def encode_surroundings(items: list[Item]) -> list[dict[str, object]]:
    """Tell what a process was given to work with."""
    time.sleep(0.05)
    names = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
    return [{name: os.environ.get(name, "") for name in names} for _ in items]


class StubbornError(Exception):
    """Cannot be made again from what pickle keeps of it."""

    def __init__(self, first: str) -> None:
        super().__init__(first, "and a second argument")


def encodes(folder: Path) -> Counter[str]:
    """Return how often every item was encoded, by all processes."""
    return Counter(" ".join(line.split()[1:]) for line in _lines(folder))


def processes(folder: Path) -> set[int]:
    """Return who has encoded anything."""
    return {int(line.split()[0]) for line in _lines(folder)}


def _lines(folder: Path) -> list[str]:
    log = folder / "encoded"
    return log.read_text("utf-8").splitlines() if log.exists() else []


def names_in(dataset: Dataset) -> set[str]:
    """The items that have a latent by now, for whoever looks."""
    found = dataset.outputs["latent"].set
    return {found.metadata(key)["name"] for key in found}


def scratch_of(dataset: Dataset) -> list[str]:
    """What workers and their builds have left behind, or have not removed yet."""
    folder = dataset.outputs["latent"].set.path.parent
    return [name for name in os.listdir(folder) if name.startswith(".")]
