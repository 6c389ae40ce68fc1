"""What is measured of each store, and the table of all of them."""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from _artifact_data import (
    SAMPLE_BYTES,
    Sample,
    Samples,
    anonymous_bytes,
    batches_of,
    disk_bytes,
    is_equal,
    shuffled,
)
from _artifact_stores import APPENDED, Store
from _measure import Table, machine, seconds_of

SCRIPT = Path(__file__).with_name("artifacts.py")
ENOUGH = 1.0
"""Seconds of reading that are enough for a figure."""
MEMORY_BATCHES = 50
EQUAL = 0.03
"""A peer within three parts of a hundred counts as equal."""


class Figure(NamedTuple):
    """A column of the table."""

    title: str
    form: str
    is_less_better: bool = False
    is_column: bool = True

    def shown(self, value: float) -> str:
        """Return a value with its unit."""
        return self.form.format(value)


FIGURES = {
    "puts": Figure("puts one by one", "{:,.0f}/s"),
    "open": Figure("open and first sample", "{:.1f} ms", is_less_better=True),
    "first": Figure("first epoch of random batches, 1 thread", "{:,.0f} MB/s"),
    "batches1": Figure("random batches, 1 thread", "{:,.0f} MB/s"),
    "batches2": Figure("random batches, 2 threads", "{:,.0f} MB/s"),
    "new": Figure("random batches into new memory, 1 thread", "{:,.0f} MB/s", is_column=False),
    "gets": Figure("single gets", "{:,.0f}/s"),
    "small": Figure("small values only", "{:,.0f}/s"),
    "append": Figure("append one", "{:.2f} ms", is_less_better=True),
    "delete": Figure("delete one", "{:.2f} ms", is_less_better=True),
    "memory": Figure("anonymous memory", "{:.0f} MB", is_less_better=True),
    "disk": Figure("bytes on disk per sample", "{:,.0f}", is_less_better=True),
}


@dataclass(slots=True)
class Figures(Table):
    """The aims, and below them all figures of all stores."""

    stores: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """By store and figure, the value of each round."""

    def note(self, store: str, found: dict[str, float]) -> None:
        """Take the figures of one round."""
        for name, value in found.items():
            self.stores.setdefault(store, {}).setdefault(name, []).append(value)
        text = ", ".join(f"{name} {FIGURES[name].shown(value)}" for name, value in found.items())
        print(f"{store}: {text}", file=sys.stderr)

    def median(self, store: str, figure: str) -> float | None:
        """Return a figure, if it was measured."""
        values = self.stores.get(store, {}).get(figure)
        return statistics.median(values) if values else None

    def medians(self, store: str) -> dict[str, float]:
        """Return all figures of a store."""
        return {name: statistics.median(values) for name, values in self.stores[store].items()}

    def show(self, *, as_json: bool) -> None:
        """Print both tables as Markdown, or as JSON."""
        if as_json:
            rows = [asdict(row) for row in self.rows]
            stores = {name: self.medians(name) for name in self.stores}
            said = {"title": self.title, "rows": rows, "notes": self.notes, "stores": stores}
            print(json.dumps({"machine": machine(), **said}, indent=2))
            return
        Table.show(self, as_json=False)
        columns = {name: figure for name, figure in FIGURES.items() if figure.is_column}
        print(f"\n| store | {' | '.join(figure.title for figure in columns.values())} |")
        print("|---" * (1 + len(columns)) + "|")
        for store in self.stores:
            found = self.medians(store)
            cells = [
                figure.shown(found[name]) if name in found else "-"
                for name, figure in columns.items()
            ]
            print(f"| {store} | {' | '.join(cells)} |")


def measure(kind: type[Store], room: Path, count: int, samples: Samples) -> dict[str, float]:
    """Fill a store, read it in every way, change it, and remove it."""
    count = min(count, kind.most or count)
    folder = room / kind.__name__
    settle(count)
    store = kind(folder, count)
    try:
        found = dict(_written(store, samples))
        settle(count)
        found |= _opened(store, samples)
        found |= _read(store)
        if not kind.is_limit:
            found |= _read_singly(store)
            found["memory"] = _memory(store)
            found["disk"] = disk_bytes(folder) / count
            found |= _changed(store, samples)
        store.close()
    finally:
        shutil.rmtree(folder)
    return found


def settle(count: int) -> None:
    """Have all written that was: it is not to be waited for in what comes."""
    if count >= 1000:  # with fewer, somebody only wants to see it run
        os.sync()


def fill(store: Store, samples: Samples, numbers: Sequence[int] | None = None) -> float:
    """Put samples, by default all; return the seconds in puts."""
    seconds = 0.0
    for group in samples.groups(range(store.count) if numbers is None else numbers):
        seconds += seconds_of(lambda group=group: _put(store, group))  # type: ignore[misc]
    return seconds + seconds_of(store.finish)


def _put(store: Store, group: Iterable[tuple[int, Sample]]) -> None:
    for number, sample in group:
        store.put(number, sample)


def _written(store: Store, samples: Samples) -> Iterable[tuple[str, float]]:
    seconds = fill(store, samples)
    if store.can_put:
        yield "puts", store.count / seconds


def _opened(store: Store, samples: Samples) -> dict[str, float]:
    """Open it and see that it gives what it was given."""
    first, *others = random.Random(3).sample(range(store.count), min(4, store.count))
    if store.is_limit:
        store.open()
        return {}

    def opening() -> None:
        store.open()
        store.get(first)

    seconds = seconds_of(opening)
    for number in others:
        wanted = samples[number]
        batch = store.batch([number, first], store.threads[-1])
        stacked = Sample(batch.latent[0], batch.embedding[0], batch.small[0])
        if not is_equal(store.get(number), wanted) or not is_equal(stacked, wanted):
            raise SystemExit(f"{store.name} gives another sample {number} than it was given")
        if store.small(number) != wanted.small:
            raise SystemExit(f"{store.name} gives other small values for {number}")
    store.close()
    store.open()
    return {"open": seconds * 1000}


def _read(store: Store) -> dict[str, float]:
    batches = batches_of(shuffled(store.count))
    found = {}
    for name, threads, least in (("first", 1, float("inf")), ("batches1", 1, ENOUGH)):
        found[name] = read_rate(store, batches, threads, least)
    if 2 in store.threads:
        found["batches2"] = read_rate(store, batches, 2, ENOUGH)
    if store.is_limit:
        del found["first"]
    if store.is_reusing:
        store.is_reusing = False
        found["new"] = read_rate(store, batches, 1, ENOUGH)
        store.is_reusing = True
    return found


def read_rate(store: Store, batches: Sequence[Sequence[int]], threads: int, least: float) -> float:
    """Return the megabytes that are read in a second: an epoch, or less if that takes long."""
    size = 0
    start = time.perf_counter()
    for batch in batches:
        store.batch(batch, threads)
        size += len(batch) * SAMPLE_BYTES
        if time.perf_counter() - start > least:
            break
    return size / (time.perf_counter() - start) / 1e6


def _read_singly(store: Store) -> dict[str, float]:
    numbers = shuffled(store.count, seed=4)
    return {"gets": call_rate(store.get, numbers), "small": call_rate(store.small, numbers)}


def call_rate(
    work: Callable[[int], object], numbers: Sequence[int], least: float = ENOUGH
) -> float:
    """Return the calls in a second: one for each number, or fewer if that takes long."""
    start = time.perf_counter()
    end = start + least
    done = 0
    for number in numbers:
        work(number)
        done += 1
        if time.perf_counter() > end:
            break
    return done / (time.perf_counter() - start)


def _changed(store: Store, samples: Samples) -> dict[str, float]:
    found = {}
    if store.can_append:
        new = range(store.count, store.count + APPENDED)
        made = {number: samples[number] for number in new}
        found["append"] = _median_ms(lambda number: store.put(number, made[number]), new)
    if store.can_delete:
        old = random.Random(5).sample(range(store.count), min(APPENDED, store.count))
        found["delete"] = _median_ms(store.delete, old)
    return found


def _median_ms(work: Callable[[int], object], numbers: Iterable[int]) -> float:
    return 1000 * statistics.median(
        seconds_of(lambda number=number: work(number))  # type: ignore[misc]
        for number in numbers
    )


def _memory(store: Store) -> float:
    """Return the megabytes that another process needs to open the store and to read batches."""
    store.close()  # MosaicML streaming lets only one process at a time have a folder open
    found = run_child("memory", store.folder, kind=type(store).__name__, count=store.count)
    store.open()
    return found["memory"]


def run_child(
    job: str, folder: Path, *, count: int, kind: str = "", first: int = 0, extra: str = ""
) -> dict[str, float]:
    """Do a job in another process; return what it found."""
    command = child_command(job, folder, count=count, kind=kind, first=first, extra=extra)
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, float] = json.loads(said)
    return found


def child_command(
    job: str, folder: Path, *, count: int, kind: str = "", first: int = 0, extra: str = ""
) -> list[str]:
    """Return how this script is told to do a job in a process of its own."""
    numbers = ["--samples", str(count), "--first", str(first)]
    named = ["--child", job, "--store", kind, "--extra", extra]
    return [sys.executable, str(SCRIPT), "--dir", str(folder), *named, *numbers]


def memory_of(store: Store) -> float:
    """Return the megabytes that opening a store and reading batches adds to this process."""
    before = anonymous_bytes()
    most = 0
    store.open()
    for batch in batches_of(shuffled(store.count))[:MEMORY_BATCHES]:
        kept = store.batch(batch, 1)
        most = max(most, anonymous_bytes())
        del kept
    store.close()
    return (most - before) / 1e6
