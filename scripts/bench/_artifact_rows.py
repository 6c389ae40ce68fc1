"""What `artifacts.py` measures. Each function without `_` is run in a process of its own.

Within it stores take turns, and who begins changes from round to round.
"""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.synchronize import Barrier
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from _artifact_peers import (
    SAMPLE_BYTES,
    Lmdb,
    Ours,
    RawFile,
    SafetensorsFiles,
    Samples,
    TorchFiles,
    Value,
    entries,
    is_equal,
    key_of,
    small_value,
)

import smartcache

Name = tuple[str, str]
"""Of a figure: what was measured, and whose it is."""
Figures = dict[Name, float]

BATCH = 32
MANY = 256
"""A batch of small entries."""
FEW = 1000
"""Samples that are enough for a file each, and for memcpy."""
GETS = 1500
COLD_BATCHES = 20
PASSES = 3
SLICES = 10
STORES: dict[str, type[Ours | Lmdb | TorchFiles | RawFile]] = {
    kind.name: kind for kind in (Ours, Lmdb, SafetensorsFiles, TorchFiles, RawFile)
}


def import_all() -> None:
    """Import what would only be imported when it is needed: no figure has that."""
    if importlib.util.find_spec("lmdb"):
        importlib.import_module("lmdb")
    np.random.default_rng(0)
    for package in ("artifacts", "store"):
        path = str(Path(smartcache.__file__).parent / package)
        for module in pkgutil.walk_packages([path], f"smartcache.{package}."):
            importlib.import_module(module.name)


def taking_turns(names: Iterable[str], turn: int) -> list[str]:
    """Return names in an order that is another one in the next round."""
    return list(names)[:: -1 if turn % 2 else 1]


_barrier: Barrier | None = None


def meet_at(barrier: Barrier) -> None:
    """Take what processes that put at once wait at."""
    global _barrier  # noqa: PLW0603 - it can only be inherited
    _barrier = barrier


def puts(
    room: Path, names: Sequence[str], turn: int, numbers: range, kind: str, suffix: str = ""
) -> Figures:
    """Put samples (or small values) into every store, after one that is not counted.

    All are made before, so that no thread of a store gets on with its work in a pause. Processes
    that put at once have raw files of their own, by `suffix`, as they have packs in a set.
    """
    samples, stores = Samples(), {}
    made = _made(samples, numbers, kind)
    first = 1 << 40 | numbers[0]
    (other,) = _made(samples, range(first, first + 1), kind)
    for name in taking_turns(names, turn):
        store = STORES[name](room / (name + suffix if name == RawFile.name else name))
        store.put(*other)
        stores[f"puts, {kind}", name] = store

    def rate(name: Name, seed: int) -> float:
        store = stores[name]
        some = made[:FEW] if isinstance(store, TorchFiles) else made
        some = some[seed - 1 :: PASSES]
        os.sync()
        if _barrier is not None:
            _barrier.wait(60)
        start = time.perf_counter()
        for key, value in some:
            store.put(key, value)
        if isinstance(store, Ours):
            store.set.flush()
        return len(some) / (time.perf_counter() - start)

    found = _medians(rate, stores)
    for store in stores.values():
        store.close()
    return found


def _made(samples: Samples, numbers: range, kind: str) -> list[tuple[str, Value]]:
    value = small_value if kind == "small" else samples.__getitem__
    return [(key_of(number, kind), value(number)) for number in numbers]


def batches(room: Path, names: Sequence[str], turn: int, count: int) -> Figures:
    """Read random batches, MB/s: the first epoch of this process, then later ones."""
    warm(room)
    few = min(count, FEW)
    found: Figures = {}
    ways: dict[Name, tuple[Callable[[list[str]], object], int]] = {}
    for name in taking_turns(names, turn):
        store: Any = STORES[name](room / name)
        size = few if isinstance(store, TorchFiles) else count
        if size == count:
            found["first", name] = _epoch(store.batch, count, seed=0)
        if isinstance(store, Ours):
            ways["reused", name] = store.reused, size
        ways["later", name] = store.batch, size
        _check(store, few)
    ways["later", "memcpy"] = _memcpy(few), few
    return found | _medians(lambda name, seed: _epoch(*ways[name], seed), ways)


def _epoch(read: Callable[[list[str]], object], count: int, seed: int) -> float:
    keys = [key_of(number) for number in random.Random(seed).sample(range(count), count)]
    size = min(BATCH, count)
    start = time.perf_counter()
    for at in range(0, count - size + 1, size):
        read(keys[at : at + size])
    return count // size * size * SAMPLE_BYTES / (time.perf_counter() - start) / 1e6


def _memcpy(count: int) -> Callable[[list[str]], object]:
    # Not by numpy, which asks for huge pages: no file and no tensor has those.
    source = torch.zeros((count, SAMPLE_BYTES), dtype=torch.uint8).numpy()
    numbers = {key_of(number): number for number in range(count)}
    out = np.empty((min(BATCH, count), SAMPLE_BYTES), np.uint8)
    return lambda keys: np.stack([source[numbers[key]] for key in keys], out=out)


def _check(store: Ours | Lmdb | TorchFiles, count: int) -> None:
    """See that a store gives what it was given."""
    samples = Samples()
    numbers = random.Random(3).sample(range(count), min(4, count))
    together = store.batch([key_of(number) for number in numbers])
    for row, number in enumerate(numbers):
        stacked = {name: together[name][row] for name in samples[number]}
        for found in (stacked, store.get(key_of(number))):
            if not is_equal(found, samples[number]):
                raise SystemExit(f"{store.name} gives another sample {number} than it was given")


def _medians(work: Callable[[Name, int], float], names: Iterable[Name]) -> Figures:
    """Measure figures in turn, several times."""
    found: dict[Name, list[float]] = {name: [] for name in names}
    for seed in range(1, PASSES + 1):
        for name, values in found.items():
            values.append(work(name, seed))
    return {name: statistics.median(values) for name, values in found.items()}


def gets(room: Path, names: Sequence[str], turn: int, count: int, kind: str) -> Figures:
    """Read samples (or small values) one by one, after a first time that is not counted."""
    warm(room)
    keys = [key_of(number, kind) for number in range(min(count, GETS))]
    reads: dict[Name, Callable[[str], Value]] = {}
    for name in taking_turns(names, turn):
        store: Any = STORES[name](room / name)
        reads[f"gets, {kind}", name] = read = store.get_small if kind == "small" else store.get
        for number, key in enumerate(keys):
            found = read(key)
            if kind == "small" and found != small_value(number):
                raise SystemExit(f"{name} gives other small values {number} than it was given")

    def rate(name: Name, seed: int) -> float:
        read, order = reads[name], random.Random(seed).sample(keys, len(keys))
        start = time.perf_counter()
        for key in order:
            read(key)
        return len(keys) / (time.perf_counter() - start)

    return _medians(rate, reads)


def opening(room: Path, name: str, key: str) -> float:
    """Return the milliseconds until a set is open and a sample is read; imports not counted.

    In a process that was not forked: in those, the first touch of each page takes time as well.
    """
    command = [sys.executable, __file__, str(room), name, key]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def _opening(room: str, name: str, key: str) -> float:
    kind: Any = STORES[name]
    torch.frombuffer(bytearray(8), dtype=torch.float16).clone()
    folder = Path(room, name)
    # A program opens its store once, and a set for each kind of artifact: the set is what counts.
    store = smartcache.SmartCache(folder) if kind is Ours else None
    start = time.perf_counter()
    (kind(folder) if store is None else kind(folder, store)).get(key)
    return 1000 * (time.perf_counter() - start)


def cold(room: Path, name: str, turn: int, count: int) -> float:
    """Read random batches off the disk, MB/s; others in each round: the host may remember those."""
    store, size = STORES[name](room / name), min(BATCH, count)
    mapped = store.mapped() if isinstance(store, RawFile) else None
    order = random.Random(100 + turn).sample(range(count), min(count // size, COLD_BATCHES) * size)
    start = time.perf_counter()
    for at in range(0, len(order), size):
        some = order[at : at + size]
        if mapped is not None:
            places = (number * RawFile.stride for number in some)
            np.stack([mapped[place : place + SAMPLE_BYTES] for place in places])
        elif isinstance(store, Ours):
            store.batch([key_of(number) for number in some])
    return len(order) * SAMPLE_BYTES / (time.perf_counter() - start) / 1e6


def put_entries(room: Path, name: str, count: int) -> float:
    """Make a store of very many entries; return the puts in a second.

    In LMDB they have eight bytes: a leaf of its tree then has as much as with 4 KiB, which it would
    put into pages of their own, and eight bytes to say where.
    """
    start = time.perf_counter()
    store = STORES[name](room / name)
    if isinstance(store, Ours):
        store.set.put_many(entries(count))
    else:
        for number in range(count):
            store.put(key_of(number, "entry"), {"n": 0})
    store.close()
    return count / (time.perf_counter() - start)


def second_epoch(counts: dict[Path, int]) -> list[float]:
    """Read sets twice in random batches; return the microseconds an artifact takes in the second.

    The second epochs run slice by slice, in turn.
    """
    sets = [(Ours(room / Ours.name), count) for room, count in counts.items()]
    for store, count in sets:
        for keys in (keys for part in _slices(count, seed=1) for keys in part):
            store.batch(keys)
    seconds = [0.0 for _ in sets]
    for parts in zip(*(_slices(count, seed=2) for _, count in sets), strict=True):
        for index, part in enumerate(parts):
            start = time.perf_counter()
            for keys in part:
                sets[index][0].batch(keys)
            seconds[index] += time.perf_counter() - start
    return [1e6 * each / count for each, (_, count) in zip(seconds, sets, strict=True)]


def _slices(count: int, seed: int) -> Iterator[list[list[str]]]:
    for some in np.array_split(np.random.default_rng(seed).permutation(count), SLICES):
        keys = [key_of(number, "entry") for number in some.tolist()]
        yield [keys[at : at + MANY] for at in range(0, len(keys), MANY)]


def trace_puts(room: Path) -> list[tuple[str, int, int]]:
    """Count the calls of a put and of a computation, after another put of the same layout."""
    store = Ours(room)
    made = _made(Samples(), range(BATCH + 1), "sample")
    store.put(*made[0])
    found = sorted(_calls(lambda each=each: store.put(*each)) for each in made[1:])  # type: ignore[misc]
    value = Samples()[BATCH + 1]
    computed = _calls(lambda: store.set.get_or_compute("a", lambda: value))
    store.close()
    return [
        ("put", *found[BATCH // 2]),
        (f"put, the longest of {BATCH}", *found[-1]),
        ("get_or_compute, miss", *computed),
    ]


def trace_gets(room: Path) -> list[tuple[str, int, int]]:
    """Count the calls of reading what another process has put, after one get."""
    store = Ours(room)
    keys = [key_of(number) for number in range(BATCH)]
    store.get(key_of(BATCH))
    return [
        (f"get_batch of {BATCH}, first", *_calls(lambda: store.batch(keys))),
        (f"get_batch of {BATCH}, second", *_calls(lambda: store.batch(keys))),
        ("get_or_compute, hit", *_calls(lambda: store.set.get_or_compute("a", dict))),
        ("get", *_calls(lambda: store.get("a"))),
    ]


def _calls(work: Callable[[], object]) -> tuple[int, int]:
    """Return the calls of functions of smartcache, in this thread, and of how many files."""
    package = str(Path(smartcache.__file__).parent)
    entered: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            entered.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return len(entered), len(set(entered))


def warm(folder: Path) -> None:
    """Have every file in the page cache."""
    buffer = bytearray(1 << 20)
    for path in _files_in(folder):
        with path.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def drop(folder: Path) -> None:
    """Have the kernel forget what it has in memory of files that nobody has mapped."""
    for path in _files_in(folder):
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _files_in(folder: Path) -> list[Path]:
    return [Path(place) / name for place, _, names in os.walk(folder) for name in names]


if __name__ == "__main__":
    import_all()
    print(_opening(*sys.argv[1:]))
