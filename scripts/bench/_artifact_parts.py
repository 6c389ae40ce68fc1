"""What is measured of smartcache alone: two writers, cold reads, and very many small entries."""

from __future__ import annotations

import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import _measure
from _artifact_data import (
    GROUP,
    SAMPLE_BYTES,
    Samples,
    anonymous_bytes,
    batches_of,
    cached_share,
    disk_bytes,
    drop_cached,
    keys_of,
    shuffled,
)
from _artifact_figures import Figures, call_rate, child_command, fill, run_child, settle
from _artifact_ours import FINGERPRINT, Ours, RawFile, small_entries

COLD_BATCHES = 40
FEW = 10
"""A set with so many times fewer entries is what the large one is compared with."""
FLAT = 10.0
"""Megabytes more, and memory grows with the entries."""
GETS = 20_000


# Two processes that write


def writers(room: Path, table: Figures, count: int) -> None:
    """Let one process put all samples, and two of them a half each."""
    rates: dict[int, list[float]] = {1: [], 2: []}
    for turn in range(_measure.rounds):
        for processes in (1, 2) if turn % 2 else (2, 1):
            rates[processes].append(_write(room / "writers", count, processes))
    one, two = (statistics.median(rates[processes]) for processes in (1, 2))
    table.add(
        "puts of two processes into one set", f"{two:,.0f}/s", peer=f"one process: {one:,.0f}/s",
        ratio=two / one, aim="> 1", holds=two > one,
    )  # fmt: skip


def _write(folder: Path, count: int, processes: int) -> float:
    settle(count)
    each = count // processes
    children = []
    for number in range(processes):
        command = child_command("write", folder, count=each, first=number * each)
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        children.append(child)
    for child in children:
        if child.stdout is None or child.stdout.readline() != "ready\n":
            raise SystemExit("a process that was to write did not begin")
    for child in children:  # all begin before any of them is waited for
        if child.stdin is not None:
            child.stdin.write("go\n")
            child.stdin.flush()
    spans: list[dict[str, float]] = [json.loads(child.communicate()[0]) for child in children]
    shutil.rmtree(folder)
    seconds = max(span["end"] for span in spans) - min(span["start"] for span in spans)
    return each * processes / seconds


def write_child(folder: Path, first: int, count: int) -> None:
    """Open the set, wait for the word, put, and print when that was."""
    samples = Samples(GROUP)
    store = Ours(folder, first + count)
    store.open()
    store.artifacts.flush()
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.monotonic()
    fill(store, samples, range(first, first + count))
    print(json.dumps({"start": start, "end": time.monotonic()}))


# Cold reads


def cold(room: Path, table: Figures, count: int) -> None:
    """Read random batches off the disk, against a plain mapping of one file."""
    samples = Samples()
    for kind in (Ours, RawFile):
        fill(kind(room / kind.__name__, count), samples)
    rates: dict[str, list[float]] = {}
    kept = 0.0
    contestants = (("Ours", "1"), ("RawFile", "1"), ("Ours", "2"), ("Ours", "announced"))
    for turn, (name, way) in enumerate(contestants * _measure.rounds):
        drop_cached(room / name)
        kept = max(kept, cached_share(room / name))
        found = run_child("cold", room / name, count=count, kind=name, first=turn, extra=way)
        rates.setdefault(f"{name} {way}", []).append(found["rate"])
    for name in ("Ours", "RawFile"):
        shutil.rmtree(room / name)
    rate = {name: statistics.median(values) for name, values in rates.items()}
    plain = rate["RawFile 1"]
    for way, words in (
        ("1", "1 thread"), ("2", "2 threads"), ("announced", "2 threads, next batch announced"),
    ):  # fmt: skip
        ours = rate[f"Ours {way}"]
        table.add(
            f"cold random batches, {words}", f"{ours:,.0f} MB/s",
            peer=f"plain mmap, cold: {plain:,.0f} MB/s", ratio=ours / plain,
            aim=">= 4" if way == "1" else "", holds=ours / plain >= 4 if way == "1" else None,
        )  # fmt: skip
    if kept > 0.05:
        table.notes.append(f"Cold: {kept:.0%} of a file could not be dropped from memory.")


def cold_child(store: Ours | RawFile, turn: int, way: str) -> dict[str, float]:
    """Open a store and read batches; others than in other turns: the host may remember those."""
    batches = batches_of(shuffled(store.count, seed=100 + turn))[:COLD_BATCHES]
    store.open()
    start = time.perf_counter()
    for index, batch in enumerate(batches):
        if way == "announced" and isinstance(store, Ours):
            for later in batches[index : index + 2] if index == 0 else batches[index + 1 :][:1]:
                store.artifacts.announce([store.keys[number] for number in later])
        store.batch(batch, 1 if way == "1" else 2)
    seconds = time.perf_counter() - start
    store.close()
    return {"rate": sum(map(len, batches)) * SAMPLE_BYTES / seconds / 1e6}


# Very many entries


def entries(room: Path, table: Figures, count: int) -> None:
    """Open a set with very many small entries in a process of its own, and read some."""
    few = max(1, count // FEW)
    _put_entries(room / "few", few)
    seconds = _put_entries(room / "many", count)
    found: dict[str, dict[str, float]] = {}
    for name, size in (("few", few), ("many", count)):
        runs = [run_child("entries", room / name, count=size) for _ in range(_measure.rounds)]
        found[name] = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    many = found["many"]
    words = f"{count:,} small entries"
    table.add(f"put_many, {words}", f"{count / seconds:,.0f}/s")
    table.add(
        f"open, {words}", f"{many['open'] * 1000:.1f} ms", aim="< 50 ms", holds=many["open"] < 0.05
    )
    table.add(f"gets, {words}", f"{many['gets']:,.0f}/s")
    grown = max(many[key] - found["few"][key] for key in ("opened", "read"))
    table.add(
        f"anonymous memory: opened / after {GETS:,} gets, {words}",
        f"{many['opened']:.1f} / {many['read']:.1f} MB",
        peer=f"{few:,} entries: {found['few']['opened']:.1f} / {found['few']['read']:.1f} MB",
        aim="flat", holds=grown < FLAT,
    )  # fmt: skip
    table.add(f"bytes on disk per entry, {words}", f"{disk_bytes(room / 'many') / count:,.0f}")
    for name in ("few", "many"):
        shutil.rmtree(room / name)


def _put_entries(folder: Path, count: int) -> float:
    from smartcache.cache import SmartCache

    pairs = small_entries(keys_of(count, "entry"))
    with SmartCache(folder) as cache, cache.artifacts("bench", fingerprint=FINGERPRINT) as made:
        start = time.perf_counter()
        made.put_many(pairs)
        made.flush()
        return time.perf_counter() - start


def entries_child(folder: Path, count: int) -> dict[str, float]:
    """Say what opening and reading takes, in seconds and in megabytes more than before."""
    from smartcache.cache import SmartCache

    _warm()
    keys = keys_of(count, "entry")
    numbers = random.Random(6).choices(range(count), k=GETS)
    before = anonymous_bytes()
    start = time.perf_counter()
    with SmartCache(folder) as cache, cache.artifacts("bench", fingerprint=FINGERPRINT) as made:
        found: Any = made.get(keys[0])
        opening = time.perf_counter() - start
        opened = anonymous_bytes()
        if found != {"n": 0, "name": "entry 0"} or len(made) != count:
            raise SystemExit("smartcache gives another entry than it was given")
        gets = call_rate(lambda number: made.get(keys[number]), numbers, least=float("inf"))
        read = anonymous_bytes()
    return {
        "open": opening,
        "gets": gets,
        "opened": (opened - before) / 1e6,
        "read": (read - before) / 1e6,
    }


def _warm() -> None:
    """Import what a set needs when it is first opened."""
    from smartcache.cache import SmartCache

    with (
        tempfile.TemporaryDirectory() as name,
        SmartCache(name) as cache,
        cache.artifacts("bench", fingerprint=FINGERPRINT) as made,
    ):
        made.put("a", {"n": 0, "name": ""})
        made.get("a")
