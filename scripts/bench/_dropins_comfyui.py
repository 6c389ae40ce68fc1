"""A training dataset of ComfyUI: smartcache's nodes, and the shards of ComfyUI's own.

A part of dropins.py: python scripts/bench/dropins.py --only comfyui [--megabytes 500]

A sample is a latent (128 KiB), an embedding (115 KiB) and a pooled one of random bits. Shards are
written with torch.save, a thousand samples each, and loaded as ComfyUI's node does, or with
mmap=True. Each figure is taken in a process of its own, after imports; files are warm. An epoch
takes 4 samples at a time in random order and copies them into a batch. Memory is anonymous memory
(RssAnon) that the process has more than before it opened the dataset, at its highest.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from smartcache.integrations.comfyui import describe, load, save

if TYPE_CHECKING:
    from _measure import Table

LATENT, TEXT, POOLED = (1, 16, 64, 64), (1, 77, 768), (1, 768)
SAMPLE_BYTES = 2 * (16 * 64 * 64 + 77 * 768 + 768)
SHARD = 1000
BATCH = 4
OURS, SHARDS, MAPPED = "smartcache", "torch.load", "torch.load, mmap=True"
Sample = tuple[dict[str, Any], list[Any]]


def measure(table: Table, room: Path, arguments: argparse.Namespace) -> None:
    """Add the rows: time and memory of reading, and bytes on the disk."""
    count = max(BATCH, arguments.megabytes * 1_000_000 // SAMPLE_BYTES)
    start = time.perf_counter()
    save(room, "data", map(_sample, range(count)))
    ours = time.perf_counter() - start
    start = time.perf_counter()
    _save_shards(room / "data", [_sample(number) for number in range(count)])
    theirs = time.perf_counter() - start
    what = f"{count:,} samples, {count * SAMPLE_BYTES / 1e6:.0f} MB"
    table.add(
        f"ComfyUI: save {what}, random bits made meanwhile",
        f"{ours:.2f} s",
        peer=f"torch.save {theirs:.2f} s",
        ratio=theirs / ours,
    )
    found: dict[str, list[dict[str, float]]] = {OURS: [], SHARDS: [], MAPPED: []}
    for _ in range(arguments.rounds):
        for who, runs in found.items():
            command = [sys.executable, __file__, who, str(room)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            runs.append(json.loads(done.stdout))
    figures = {
        who: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for who, runs in found.items()
    }
    for job, key, unit, scale in (
        ("open, and read the first sample", "first", "ms", 1000),
        (f"a shuffled epoch, batches of {BATCH}", "epoch", "s", 1),
        ("memory when the first sample is there", "opened", "MB", 1),
        ("memory in the epoch", "memory", "MB", 1),
    ):
        mine = figures[OURS][key]
        for who in (SHARDS, MAPPED):
            theirs = figures[who][key]
            digits = 2 if unit == "s" else 0
            table.add(
                f"ComfyUI: {job}", f"{mine * scale:.{digits}f} {unit}",
                peer=f"{who} {theirs * scale:.{digits}f} {unit}",
                ratio=theirs / mine if mine > 0 else None,
            )  # fmt: skip
    _measure_disk(table, room, arguments.megabytes)
    table.notes.append(
        "ComfyUI: a ratio above 1 is that many times less time, memory or disk than the peer."
    )


def _measure_disk(table: Table, room: Path, size_mb: int) -> None:
    """Compare the bytes on the disk of equal captions, and of slices of a batch."""
    side = 128 if size_mb >= 100 else 16
    caption = torch.randn(1, 4 * side, 4096).half()
    captions: list[Sample] = [
        ({"samples": torch.randn(1, 16, side, side)}, [[caption.clone(), {}]]) for _ in range(32)
    ]
    batch = torch.randn(64, 16, side, side)
    slices: list[Sample] = [
        ({"samples": batch[n : n + 1]}, [[torch.randn(1, 77, 768), {}]]) for n in range(4)
    ]
    for job, name, samples in (
        ("ComfyUI: disk: 32 samples with one caption", "captions", captions),
        ("ComfyUI: disk: 4 latents sliced from a batch of 64", "slices", slices),
    ):
        save(room, name, samples)
        mine = describe(room, name).on_disk
        theirs = _save_shards(room / name, samples)
        table.add(
            job, f"{mine / 1e6:.1f} MB", peer=f"torch.save {theirs / 1e6:.1f} MB",
            ratio=theirs / mine,
        )  # fmt: skip


def _sample(number: int) -> Sample:
    generator = torch.Generator().manual_seed(number)

    def some(shape: tuple[int, ...]) -> torch.Tensor:
        bits = torch.randint(-30000, 30000, shape, generator=generator, dtype=torch.int16)
        return bits.view(torch.float16)

    return {"samples": some(LATENT)}, [[some(TEXT), {"pooled_output": some(POOLED)}]]


def _save_shards(folder: Path, samples: list[Sample]) -> int:
    """Save as ComfyUI's node does; return the bytes."""
    folder.mkdir()
    for number, start in enumerate(range(0, len(samples), SHARD)):
        part = samples[start : start + SHARD]
        shard = {"latents": [a for a, _ in part], "conditioning": [b for _, b in part]}
        torch.save(shard, folder / f"shard_{number:04d}.pkl")
    return sum(path.stat().st_size for path in folder.iterdir())


def _child(who: str, room: Path) -> dict[str, float]:
    """Open the dataset, read its first sample, go through it once in random order."""
    torch.set_num_threads(1)
    before = _anonymous()
    start = time.perf_counter()
    if who == OURS:
        (latent,), (conditioning,) = load(room, "data", buckets=True)
        latents = latent["samples"]
    else:
        latents, conditioning = [], []
        for path in sorted((room / "data").glob("shard_*.pkl")):
            shard = torch.load(path, weights_only=True, mmap=who == MAPPED)
            latents += [each["samples"] for each in shard["latents"]]
            conditioning += [cond for each in shard["conditioning"] for cond in each]
    _take(latents, conditioning, [0])
    first = time.perf_counter() - start
    opened = memory = _anonymous() - before
    order = list(range(len(conditioning)))
    random.Random(0).shuffle(order)
    start = time.perf_counter()
    looked = 0.0
    for at in range(0, len(order), BATCH):
        batch = _take(latents, conditioning, order[at : at + BATCH])
        if at % (64 * BATCH) == 0:
            look = time.perf_counter()
            memory = max(memory, _anonymous() - before)
            looked += time.perf_counter() - look
        del batch
    epoch = time.perf_counter() - start - looked
    return {"first": first, "opened": opened, "epoch": epoch, "memory": memory}


def _take(latents: Any, conditioning: list[Any], numbers: list[int]) -> list[torch.Tensor]:  # noqa: ANN401
    """Return a batch in memory of its own."""
    if isinstance(latents, torch.Tensor):
        rows = latents[numbers]
    else:
        rows = torch.cat([latents[number] for number in numbers])
    texts = torch.cat([conditioning[number][0] for number in numbers])
    pooled = torch.cat([conditioning[number][1]["pooled_output"] for number in numbers])
    return [rows, texts, pooled]


def _anonymous() -> float:
    """Return the anonymous memory of this process in megabytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024 / 1e6
    return 0.0


if __name__ == "__main__":  # the process that is measured
    print(json.dumps(_child(sys.argv[1], Path(sys.argv[2]))))
