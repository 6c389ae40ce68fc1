"""How fast an epoch is planned and its batches are there: smartcache, and other loaders.

Usage: python scripts/bench/batches.py [--samples 2000] [--only PART] [--json]

A sample is a latent (128 KiB) and an embedding (115 KiB) of random bits, in a dataset of two
outputs. Batches have 32 of them. All loaders read the same samples in random order, warm, and hand
them to a consumer that does nothing; the figure is that of whole epochs after a first one. LitData
has its own copy of the samples. Loaders that are not installed are left out (pip install torchdata
litdata). Sleeps stand for loading and for training steps where overlap is measured.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import _measure
import numpy as np
import torch
from _measure import Table
from torch.utils.data import DataLoader

from smartcache import SmartCache
from smartcache.training import Batches, Dataset, Encoder, Item, Prefetcher, Sources
from smartcache.training import batches as order

LATENT, TEXT = (64, 32, 32), (77, 768)
SAMPLE_BYTES = 2 * 64 * 32 * 32 + 2 * 77 * 768
SIZE = 32
PARTS = ("plan", "overlap", "loaders")


def main() -> None:
    """Measure all parts, or those that are asked for, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=_measure.rounds)
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    _measure.rounds = arguments.rounds
    table = Table("Batches: the order, overlap, and other loaders")
    parts = arguments.only or PARTS
    if "plan" in parts:
        measure_plan(table, arguments.items)
    if "overlap" in parts:
        measure_overlap(table, arguments.steps)
    if "loaders" in parts:
        with tempfile.TemporaryDirectory() as room:
            measure_loaders(table, Path(room), arguments.samples)
    table.notes += [
        "Plan: 40 buckets of random sizes, micro-batches of 8; memory is that of the plan.",
        "Overlap: share of the ideal time, where loading hides behind steps as far as threads go.",
        "MB: of the tensors alone; medians of nine epochs of each loader, in turn.",
        "The prefetcher reads with one thread: what lies in memory is copied as fast as memory is.",
        "get_batch alone drops each batch before the next, whose memory is still in the caches.",
    ]
    table.show(as_json=arguments.json)


def measure_plan(table: Table, count: int) -> None:
    """Plan epochs of very many items in 40 buckets."""
    rng = np.random.default_rng(0)
    pool = SimpleNamespace(
        count=count, repeats=np.ones(count), variations=1, buckets=40,
        bucket=rng.integers(0, 40, count),
    )  # fmt: skip
    options = SimpleNamespace(
        seed=0, weights=(), take=None, drop={}, shuffle=True, size=8, drop_last=False
    )
    epochs = iter(range(1_000_000))

    def make() -> order.Plan:
        return order._planned(cast("Any", options), cast("Any", [pool]), next(epochs))  # noqa: SLF001

    seconds = _measure.median_seconds(make)
    each = make().nbytes / count
    table.add(
        f"plan an epoch of {count:,} items in 40 buckets", f"{seconds:.2f} s", aim="<= 0.3 s",
        holds=seconds <= 0.3 * count / 1_000_000,
    )  # fmt: skip
    table.add("memory of that plan", f"{each:.1f} bytes/item", aim="<= 16", holds=each <= 16)


class Sleeping:
    """A plan whose batches take a while to read."""

    def __init__(self, count: int, seconds: float) -> None:
        self._count, self._seconds = count, seconds

    def steps(self) -> Iterable[int]:
        """Give numbers."""
        return iter(range(self._count))

    def next_epoch(self) -> Iterable[int]:
        """There is only one."""
        return iter(())

    def read(self, step: int) -> int:
        """Take a while."""
        time.sleep(self._seconds)
        return step

    def advance(self, step: int) -> None:
        """Know nothing."""

    def state_dict(self) -> dict[str, object]:
        """Remember nothing."""
        return {}


def measure_overlap(table: Table, steps: int) -> None:
    """Compare reading ahead with what is possible at best."""
    for load, step, threads in ((0.05, 0.05, 1), (0.2, 0.05, 4)):

        def epoch(load: float = load, step: float = step, threads: int = threads) -> None:
            source = cast("Any", Sleeping(steps, load))
            loader: Prefetcher[int]
            with Prefetcher(source, depth=max(2, threads), threads=threads) as loader:
                for _ in loader:
                    time.sleep(step)

        seconds = _measure.median_seconds(epoch)
        ideal = load + steps * max(step, load / threads)
        name = f"load {1000 * load:.0f} ms, step {1000 * step:.0f} ms, {threads} threads"
        table.add(
            f"overlap: {name}", f"{seconds:.2f} s", peer=f"ideal {ideal:.2f} s",
            ratio=ideal / seconds, aim=">= 0.95", holds=ideal / seconds >= 0.95,
        )  # fmt: skip


def latents(items: list[Item]) -> torch.Tensor:
    """Make random latents."""
    made = torch.Generator().manual_seed(items[0].seed)
    return torch.randint(-999, 999, (len(items), *LATENT), generator=made).to(torch.float16)


def texts(items: list[Item]) -> torch.Tensor:
    """Make random embeddings."""
    made = torch.Generator().manual_seed(items[0].seed)
    return torch.randint(-999, 999, (len(items), *TEXT), generator=made).to(torch.float16)


def measure_loaders(table: Table, room: Path, samples: int) -> None:
    """Read whole epochs through one loader after the other."""
    with SmartCache(room / "store") as cache:
        rows = [{"number": number} for number in range(samples)]
        dataset = cache.dataset(
            "samples",
            Sources.table(rows),
            latent=Encoder(latents, reads="number", depends_on=None, batch=32),
            text=Encoder(texts, reads="number", depends_on=None, version=1, batch=32),
        )
        dataset.build()
        loaders = our_loaders(dataset) | other_loaders(dataset, room)
        epochs = {name: make() for name, make in loaders.items()}
        for epoch in epochs.values():
            seconds_of_epoch(epoch)  # warm: workers, mappings, checksums
        figures: dict[str, list[float]] = {name: [] for name in epochs}
        for _ in range(3 * _measure.rounds):  # in turn: the machine is noisy
            for name, epoch in epochs.items():
                figures[name].append(seconds_of_epoch(epoch))
    speeds = {
        name: samples * SAMPLE_BYTES / 1e6 / statistics.median(each)
        for name, each in figures.items()
    }
    alone, ours = speeds["get_batch"], speeds["Batches + Prefetcher"]
    for name, speed in speeds.items():
        if name in ("get_batch", "Batches + Prefetcher"):
            continue
        table.add(
            "random batches, Batches + Prefetcher", f"{ours:,.0f} MB/s",
            peer=f"{name} {speed:,.0f} MB/s", ratio=ours / speed,
        )  # fmt: skip
    table.add(
        "random batches, Batches + Prefetcher", f"{ours:,.0f} MB/s",
        peer=f"get_batch alone {alone:,.0f} MB/s", ratio=ours / alone, aim=">= 0.9",
        holds=ours / alone >= 0.9,
    )  # fmt: skip


Epoch = Callable[[], Iterable[Any]]


def seconds_of_epoch(epoch: Epoch) -> float:
    """Go through one epoch."""
    start = time.perf_counter()
    count = sum(1 for _ in epoch())
    assert count  # noqa: S101 - nothing read is nothing measured
    return time.perf_counter() - start


def our_loaders(dataset: Dataset) -> dict[str, Callable[[], Epoch]]:
    """Return the ways to read a dataset of smartcache."""

    def alone(kept: int) -> Epoch:
        held: deque[object] = deque(maxlen=kept)
        sets = [output.set for output in dataset.outputs.values()]
        outputs = list(dataset.outputs.values())
        batches = Batches(dataset, size=SIZE)

        def epoch() -> Iterable[Any]:
            steps = [
                {
                    output.name: [output.key(number) for number in some[output.name]]
                    for output in outputs
                }
                for step in batches.next_epoch()
                for some in [batches.numbers_of(step)[0]]
            ]
            for keys in steps:
                held.append([
                    each.get_batch(keys[output.name])
                    for each, output in zip(sets, outputs, strict=True)
                ])  # fmt: skip
                yield None

        return epoch

    def plain() -> Epoch:
        batches = Batches(dataset, size=SIZE)
        return lambda: iter(batches)

    def ahead(threads: int) -> Epoch:
        batches = Batches(dataset, size=SIZE)
        loader: Prefetcher[Any] = Prefetcher(batches, depth=3, threads=threads)
        return lambda: iter(loader)

    return {
        "get_batch": partial(alone, 0),
        "get_batch, four batches held": partial(alone, 4),
        "Batches alone": plain,
        "Batches + Prefetcher": partial(ahead, 1),
        "with 2 threads": partial(ahead, 2),
        "torch DataLoader, 0 workers": lambda: through(DataLoader, dataset, 0),
        "torch DataLoader, 2 workers": lambda: through(DataLoader, dataset, 2),
    }


def through(loader: Any, dataset: Dataset, workers: int) -> Epoch:  # noqa: ANN401
    """Read our batches through a DataLoader."""
    batches = Batches(dataset, size=SIZE)
    made = loader(
        batches.dataset, batch_sampler=batches.sampler, collate_fn=batches.collate,
        num_workers=workers, persistent_workers=workers > 0,
    )  # fmt: skip
    return lambda: iter(made)


def other_loaders(dataset: Dataset, room: Path) -> dict[str, Callable[[], Epoch]]:
    """Return other people's loaders, as far as they are installed."""
    found: dict[str, Callable[[], Epoch]] = {}
    if find_spec("torchdata") is not None:
        from torchdata.stateful_dataloader import StatefulDataLoader

        for workers in (0, 2):
            name = f"torchdata StatefulDataLoader, {workers} workers"
            found[name] = partial(through, StatefulDataLoader, dataset, workers)
    if find_spec("litdata") is not None:
        found |= litdata_loaders(dataset, room)
    return found


def litdata_loaders(dataset: Dataset, room: Path) -> dict[str, Callable[[], Epoch]]:
    """Return LitData's loader, on its own copy of the samples."""
    from litdata import StreamingDataLoader, StreamingDataset, optimize

    folder = str(room / "litdata")
    optimize(
        fn=Sample(dataset), inputs=list(range(len(dataset))), output_dir=folder,
        chunk_bytes="64MB", num_workers=1,
    )  # fmt: skip

    def made(workers: int) -> Epoch:
        loader = StreamingDataLoader(
            StreamingDataset(folder, shuffle=True), batch_size=SIZE, num_workers=workers,
            persistent_workers=workers > 0,
        )  # fmt: skip
        return lambda: iter(loader)

    return {f"LitData, {workers} workers": partial(made, workers) for workers in (0, 2)}


class Sample:
    """One sample by its number, for LitData's own workers."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    def __call__(self, number: int) -> dict[str, Any]:
        """Return the tensors of a sample."""
        found = self._dataset[number]
        return {"latent": found["latent"], "text": found["text"]}


if __name__ == "__main__":
    main()
