"""Memory over disk, and compression: smartcache, and what people use today.

Usage: python scripts/bench/layers.py [--lists 2000] [--arrays 400] [--only PART] [--json]

Token lists have 1,024 ids (4 KB as 32-bit numbers), arrays 256 KiB. Everything is warm, by one
thread. "Pickle files" is a cache of a file per value, found by a hash of its key: exists, stat,
read, unpickle. diskcache and cachetools are left out if they are not installed (pip install
diskcache cachetools). cachetools gives everybody the same object; the copy is what keeps a value
from being changed by who got it, and is measured beside it.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import itertools
import os
import pickle
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import _measure
import numpy as np
import torch
from _measure import Table

from smartcache.artifacts import ArtifactSet, ArtifactSets

PARTS = ("lists", "arrays", "compression", "compressions")
OURS, PICKLE, DISKCACHE = "smartcache", "pickle files", "diskcache"
SIZE = 256 << 10
Job = Callable[[], object]
Jobs = dict[str, tuple[Job | None, Job]]
"""By name: what is done before, untimed, and what is measured."""


class PickleFiles:
    """A file for each value; one beside it is looked for, which is there if metadata was given."""

    def __init__(self, folder: Path, expiry: float = 86_400) -> None:
        self._folder = folder
        self._expiry = expiry
        folder.mkdir()

    def put(self, key: str, value: object) -> None:
        """Write a value in place."""
        name = hashlib.sha256(key.encode()).hexdigest()[:32]
        (self._folder / f"{name}.data").write_bytes(pickle.dumps(value))

    def get(self, key: str) -> object:
        """Read a value that is not too old; None: there is none."""
        name = hashlib.sha256(key.encode()).hexdigest()[:32]
        path = self._folder / f"{name}.data"
        if not path.exists() or time.time() - path.stat().st_mtime > self._expiry:
            return None
        if (self._folder / f"{name}.meta").exists():
            raise SystemExit("nobody has given metadata")
        return pickle.loads(path.read_bytes())  # noqa: S301 - that is what is measured

    def get_or_compute(self, key: str, compute: Callable[[], object]) -> object:
        """Read a value, or compute and write it; for one thread of one process."""
        found = self.get(key)
        if found is None:
            found = compute()
            self.put(key, found)
        return found


def main() -> None:
    """Measure all parts, or those that are asked for, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lists", type=int, default=2000)
    parser.add_argument("--arrays", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=_measure.rounds)
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    _measure.rounds = arguments.rounds
    table = Table("Layered caches: memory, disk, compression")
    parts = arguments.only or PARTS
    rng = np.random.default_rng(0)
    if "lists" in parts:
        ids = np.minimum(rng.zipf(1.3, (arguments.lists, 1024)), 32_000).tolist()
        measure_values(table, "4 KB token lists", {f"text-{n}": each for n, each in enumerate(ids)})
    if "arrays" in parts:
        arrays = {
            f"array-{n}": rng.standard_normal(SIZE // 4, np.float32)
            for n in range(arguments.arrays)
        }
        measure_values(table, "256 KiB arrays", arrays)
    if "compressions" in parts:
        measure_methods(table, arguments.arrays)
    if "compression" in parts:
        measure_ratios(table, arguments.arrays)
    table.notes += [
        "Each figure is the median of three rounds, in which all sides take turns.",
        "Pickle files: sha256 of the key, exists, stat, a look for metadata; written in place.",
        "diskcache: its defaults. A plain `get` then `set` is its get_or_compute.",
        "cachetools: LRUCache under a lock, which gives the object itself, and a copy of that.",
        "Ratios of compression: raw bytes to bytes in the packs, headers included.",
    ]
    for name in ("diskcache", "cachetools"):
        if find_spec(name) is None:
            table.notes.append(f"Left out: {name}; pip install {name}")
    table.show(as_json=arguments.json)


def in_turn(jobs: Jobs) -> dict[str, float]:
    """Return the median seconds of jobs that take turns; before each, something untimed is done."""
    found: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(_measure.rounds):
        for name, (before, job) in jobs.items():
            found[name].append(_measure.seconds_of(job, before))
    return {name: statistics.median(each) for name, each in found.items()}


class Sides:
    """One cache of each kind, made anew for every round of puts."""

    def __init__(self, room: Path) -> None:
        self._room = room
        self._numbers = itertools.count()
        self.opened: dict[str, Any] = {}
        self.names = [OURS, PICKLE, *([DISKCACHE] if find_spec("diskcache") else [])]

    def fresh(self, which: str) -> None:
        """Begin with an empty cache."""
        self.close(which)
        for each in self._room.glob(f"{which}-*"):
            shutil.rmtree(each)
        folder = self._room / f"{which}-{next(self._numbers)}"
        if which == PICKLE:
            self.opened[which] = PickleFiles(folder)
        elif which == DISKCACHE:
            self.opened[which] = import_module("diskcache").Cache(str(folder))
        else:
            self.opened[which] = ArtifactSets(folder).open("bench", {}, memory="2GB")

    def close(self, which: str) -> None:
        """Let go of a cache."""
        old = self.opened.pop(which, None)
        if hasattr(old, "close"):
            old.close()

    def put_all(self, which: str, values: dict[str, Any]) -> None:
        """Put all values."""
        side = self.opened[which]
        put = side.set if which == DISKCACHE else side.put
        for key, value in values.items():
            put(key, value)

    def get_or_compute(self, which: str, key: str, compute: Callable[[], object]) -> object:
        """Ask for a value as it is usual there."""
        side = self.opened[which]
        if which != DISKCACHE:
            return side.get_or_compute(key, compute)
        found = side.get(key)
        if found is None:
            found = compute()
            side.set(key, found)
        return found


def measure_values(table: Table, what: str, values: dict[str, Any]) -> None:
    """Measure puts, hits on disk and in memory, and get_or_compute, for values of one kind."""
    count, keys = len(values), list(values)
    order = [keys[n] for n in np.random.default_rng(1).permutation(count)]
    is_list = isinstance(values[keys[0]], list)
    with tempfile.TemporaryDirectory() as name:
        room = Path(name)
        sides = Sides(room)
        jobs: Jobs = {
            each: (partial(sides.fresh, each), partial(sides.put_all, each, values))
            for each in sides.names
        }
        if not is_list:
            jobs["raw pwrite"] = None, partial(raw_pwrite, room, values)
        aims = {PICKLE: 3.0} if is_list else {"raw pwrite": 0.8}
        rows(table, f"{what}: put", in_turn(jobs), count, aims)
        path = sides.opened[OURS].path.parent.parent
        with ArtifactSets(path).open("bench", {}) as disk:
            gets = {OURS: disk.get, **{each: sides.opened[each].get for each in sides.names[1:]}}
            for get in gets.values():
                read_all(get, order)
            hits = in_turn({
                each: (None, partial(read_all, get, order)) for each, get in gets.items()
            })  # fmt: skip
            rows(table, f"{what}: hit on disk", hits, count, {PICKLE: 2.0 if is_list else 1.0})
            measure_memory(table, what, sides.opened[OURS], values, order)
            measure_computing(table, what, sides, disk, values)
        for each in sides.names:
            sides.close(each)


def read_all(get: Callable[[str], object], order: list[str]) -> None:
    """Get every value once."""
    for key in order:
        if get(key) is None:
            raise SystemExit(f"{key} was not found")


def raw_pwrite(room: Path, values: dict[str, Any]) -> None:
    """Write the bytes of all values one after the other, and nothing else."""
    descriptor = os.open(room / "raw", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    at = 0
    for value in values.values():
        at += os.pwrite(descriptor, value, at)
    os.close(descriptor)
    os.unlink(room / "raw")


def measure_memory(
    table: Table, what: str, ours: ArtifactSet, values: dict[str, Any], order: list[str]
) -> None:
    """Measure what is in memory, beside one copy of the values and beside cachetools."""
    read_all(ours.get, order)
    is_list = isinstance(values[order[0]], list)
    some = order[: min(len(order), 64)]  # what is hit often is in the processor's caches, too
    many = some * (len(order) * 4 // len(some))
    copied: Callable[[Any], object] = list.copy if is_list else np.ndarray.copy
    jobs: Jobs = {
        OURS: (None, partial(read_all, ours.get, many)),
        "one copy of the value": (None, lambda: read_all(lambda key: copied(values[key]), many)),
    }
    if find_spec("cachetools"):
        from threading import Lock

        tools = import_module("cachetools")
        lru, gate = tools.LRUCache(maxsize=len(values)), Lock()
        lru.update(values)

        def shared(key: str) -> object:
            with gate:
                return lru[key]

        jobs["cachetools, no copy"] = (None, lambda: read_all(shared, many))
        jobs["cachetools and copy.deepcopy"] = (
            None, lambda: read_all(lambda key: copy.deepcopy(shared(key)), many)
        )  # fmt: skip
    rows(
        table, f"{what}: hit in memory", in_turn(jobs), len(many),
        {} if is_list else {"one copy of the value": 0.5}, least=200_000 if is_list else None,
    )  # fmt: skip


def measure_computing(
    table: Table, what: str, sides: Sides, disk: ArtifactSet, values: dict[str, Any]
) -> None:
    """Measure get_or_compute: missing, on disk, in memory. The computation takes no time."""

    def ask(get_or_compute: Callable[[str, Callable[[], object]], object]) -> None:
        for key, value in values.items():
            get_or_compute(key, partial(same, value))

    asks = {each: partial(sides.get_or_compute, each) for each in sides.names}
    count = len(values)
    hits = in_turn({
        each: (None, partial(ask, disk.get_or_compute if each == OURS else asks[each]))
        for each in sides.names
    })  # fmt: skip
    rows(table, f"{what}: get_or_compute, on disk", hits, count)
    memory = in_turn({OURS: (None, partial(ask, asks[OURS]))})
    rows(table, f"{what}: get_or_compute, in memory", memory, count)
    misses = in_turn({
        each: (partial(sides.fresh, each), partial(ask, asks[each])) for each in sides.names
    })  # fmt: skip
    rows(table, f"{what}: get_or_compute, missing", misses, count)


def same(value: object) -> object:
    """Take no time."""
    return value


def rows(
    table: Table,
    job: str,
    seconds: dict[str, float],
    count: int,
    aims: dict[str, float] | None = None,
    *,
    least: float | None = None,
) -> None:
    """Add a row for each peer: how many of `count` things a second, ours and theirs."""
    rates = {name: count / each for name, each in seconds.items()}
    ours = f"{rates[OURS]:,.0f}/s"
    if least is not None or len(rates) == 1:
        aim = "" if least is None else f">= {least:,.0f}/s"
        table.add(job, ours, aim=aim, holds=None if least is None else rates[OURS] >= least)
    for name, rate in rates.items():
        if name != OURS:
            wanted = (aims or {}).get(name)
            ratio = rates[OURS] / rate
            table.add(
                job, ours, peer=f"{name} {rate:,.0f}/s", ratio=ratio,
                aim="" if wanted is None else f">= {wanted:g}",
                holds=None if wanted is None else ratio >= wanted,
            )  # fmt: skip


def measure_methods(table: Table, count: int) -> None:
    """Put and get arrays of small whole numbers with every method, beside no compression."""
    rng = np.random.default_rng(0)
    values = {
        f"k{n}": {"ids": np.minimum(rng.zipf(1.3, SIZE // 4), 32_000).astype(np.int32)}
        for n in range(max(8, count // 4))
    }
    keys = list(values)
    with tempfile.TemporaryDirectory() as name:
        sets = ArtifactSets(name)
        for method in ("none", "lz4", "zstd", "gzip", "blosc2", "auto"):
            opened = sets.open(method, {}, compression=method)
            puts = in_turn({OURS: (None, partial(opened.put_many, values))})[OURS]
            read_all(opened.get, keys)
            gets = in_turn({OURS: (None, partial(read_all, opened.get, keys))})[OURS]
            batch = in_turn({OURS: (None, partial(opened.get_batch, keys[:32]))})[OURS]
            ratio = SIZE * len(keys) / (opened.stats().live or 1)
            opened.close()
            table.add(
                f"256 KiB of token ids, {method}",
                f"put {SIZE * len(keys) / puts / 1e6:,.0f} MB/s,"
                f" get {SIZE * len(keys) / gets / 1e6:,.0f},"
                f" batches {SIZE * min(32, len(keys)) / batch / 1e6:,.0f}; {ratio:.2f} x smaller",
            )  # fmt: skip


def measure_ratios(table: Table, count: int) -> None:
    """Compress what trainers keep, made here: how much smaller, and how fast it is read."""
    made = torch.Generator().manual_seed(0)
    rng = np.random.default_rng(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made)

    padded = torch.zeros(512, 2048, dtype=torch.bfloat16)
    padded[:90] = noise(90, 2048)
    ids = torch.from_numpy(np.minimum(rng.zipf(1.3, 65_536), 32_000).astype(np.int32))
    record = {"input_ids": np.minimum(rng.zipf(1.3, 512), 32_000).tolist(), "mask": [1] * 512}
    kinds: list[tuple[str, str, Any, float | None, float | None]] = [
        ("fp16 latents", "auto", noise(16, 64, 64).half(), None, None),
        ("fp16 latents", "blosc2", noise(16, 64, 64).half(), 1.19, None),
        ("bf16 latents, 256 KiB", "auto", noise(32, 64, 64).bfloat16(), 1.47, 1.0),
        ("T5 embedding of 512, 90 used, bf16", "auto", padded, 7.1, None),
        ("the same, trimmed", "auto", padded[:90].clone(), None, None),
        ("int32 token ids, 256 KiB", "auto", ids, 3.5, None),
        ("small records", "auto", record, 5.0, None),
    ]
    with tempfile.TemporaryDirectory() as name:
        for number, (what, method, value, least, speed) in enumerate(kinds):
            with ArtifactSets(name).open(f"set{number}", {}, compression=method) as opened:
                copies = max(8, min(64, count // 4))
                for n in range(copies):
                    # Equal tensors are kept once: each copy is another one.
                    each = value.roll(n * 7) if isinstance(value, torch.Tensor) else value
                    opened.put(f"k{n}", {"x": each} if isinstance(value, torch.Tensor) else each)
                keys = [f"k{n}" for n in range(copies)]
                raw = value.nbytes if isinstance(value, torch.Tensor) else 8 * 1024
                read_all(opened.get, keys)
                seconds = in_turn({OURS: (None, partial(read_all, opened.get, keys))})
                ratio = raw * copies / opened.stats().live
                rate = raw * copies / seconds[OURS] / 1e9
                wanted = [] if least is None else [f"{least:g} x within 3 %"]
                wanted += [] if speed is None else [f">= {speed:g} GB/s"]
                table.add(
                    f"{what}, {method}", f"{ratio:.2f} x smaller, read {rate:.2f} GB/s",
                    aim=", ".join(wanted),
                    holds=(
                        ratio >= 0.97 * (least or 0) and rate >= (speed or 0) if wanted else None
                    ),
                )  # fmt: skip


if __name__ == "__main__":
    main()
