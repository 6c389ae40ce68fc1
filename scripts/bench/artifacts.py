"""How fast computed tensors are kept and read: smartcache, LMDB, files, and the machine's limits.

Usage: python scripts/bench/artifacts.py [--samples 4000] [--entries 1000000] [--only PART] [--json]
       python scripts/bench/artifacts.py --trace

A sample is a latent (128 KiB) and an embedding (115 KiB) of random bits, and a short list. In each
round the stores are filled anew and read in turn; every figure is the median of the rounds. What is
measured runs in a process forked from this one, which has imported everything and opened nothing;
opening in one that was started anew.
LMDB is left out if it is not installed (pip install lmdb). Needs Linux.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

import _artifact_rows as rows
import torch
from _artifact_peers import ENTRY_BYTES, SAMPLE_BYTES, key_of
from _measure import Table

P = ParamSpec("P")
T = TypeVar("T")

FORK = multiprocessing.get_context("fork")
OURS, LMDB, SAFETENSORS, TORCH, RAW = rows.STORES
FEW_ENTRIES = 50_000
MOST = 1500
"""Samples that each of two writers puts at most, and that are put onto very many entries."""
NEEDED = {
    "batches": {OURS, LMDB, SAFETENSORS, TORCH},
    "puts": {OURS, LMDB, SAFETENSORS, TORCH, RAW},
    "gets": {OURS, LMDB},
    "open": {OURS, LMDB},
    "cold": {OURS, RAW},
}
"""Stores that are filled with samples for a part."""
PARTS = (*NEEDED, "small", "writers", "entries")


class Compared(NamedTuple):
    """A row of the table: a figure of ours, one of a peer's, and what we aim at."""

    part: str
    job: str
    figure: str
    unit: str
    aim: str
    peer: str
    peer_figure: str = ""
    """If it is another one."""


FIRST = "first epoch of random batches, every checksum compared"
NEW, REUSED = "later epochs, new memory", "later epochs, reused memory"
PUTS = "puts one by one"
TABLE = (
    Compared("batches", FIRST, "first", " MB/s", ">= 0.6", LMDB),
    Compared("batches", FIRST, "first", " MB/s", ">= 0.6", LMDB, "later"),
    Compared("batches", NEW, "later", " MB/s", ">= 1", LMDB),
    Compared("batches", NEW, "later", " MB/s", ">= 3", SAFETENSORS),
    Compared("batches", NEW, "later", " MB/s", ">= 8", TORCH),
    Compared("batches", REUSED, "reused", " MB/s", ">= 1.2", LMDB, "later"),
    Compared("batches", REUSED, "reused", " MB/s", "", "memcpy", "later"),
    Compared("puts", PUTS, "puts, sample", "/s", ">= 0.9", LMDB),
    Compared("puts", PUTS, "puts, sample", "/s", ">= 2.5", SAFETENSORS),
    Compared("puts", PUTS, "puts, sample", "/s", ">= 3", TORCH),
    Compared("puts", PUTS, "puts, sample", "/s", "", RAW),
    Compared("entries", "puts onto {many} entries", "puts, onto", "/s", ">= 0.9", LMDB),
    Compared("writers", "puts of two processes at once", "puts, two", "/s", ">= 0.8", RAW),
    Compared("gets", "single gets", "gets, sample", "/s", ">= 0.7", LMDB),
    Compared("small", "puts of small values only", "puts, small", "/s", ">= 0.7", LMDB),
    Compared("small", "gets of small values only", "gets, small", "/s", "", LMDB),
    Compared("open", "open a set and read one sample", "open", "ms", "<= 2", LMDB),
    Compared("cold", "cold random batches", "cold", " MB/s", ">= 4", "plain mmap"),
    Compared(
        "entries", "second epoch of {many} entries of 4 KiB, per artifact", "second", "us",
        "<= 1.1", "{few} entries",
    ),
    Compared("entries", "put_many of {many} entries of 4 KiB", "put_many", "/s", "", ""),
    Compared("entries", "open a set of {many} entries and read one", "open many", "ms", "", ""),
)  # fmt: skip
NOTES = (
    "A batch: 32 random samples, stacked; 256 of the entries of 4 KiB. MB: of the tensors alone.",
    "The page cache is warm but where a row says cold.",
    "smartcache copies large batches with two threads, as it does by default; see --threads.",
    "LMDB as people use it: views stacked into new memory, json, a commit per put, sync=False.",
    "No put waits for the disk; one that has returned survives the death of the process.",
    "Making samples is not timed; nor are imports and the store, where a process opens a set.",
    "First epoch: of a new process. Later epochs and gets: of one that has read all before.",
    "A file each: of 1,000 samples. Very many entries: of eight bytes in LMDB, with the same tree.",
)


def main() -> None:
    """Measure all parts, or those that are asked for, and print the table."""
    arguments = parsed()
    torch.set_num_threads(1)
    os.environ["SMARTCACHE_THREADS"] = str(arguments.threads)
    refuse_full_disk(arguments)
    rows.import_all()
    with tempfile.TemporaryDirectory(dir=arguments.dir) as name:
        if arguments.trace:
            print("| call | calls of functions | files |\n|---|---|---|")
            for work in (rows.trace_puts, rows.trace_gets):
                for job, calls, files in alone(work, Path(name)):
                    print(f"| {job} | {calls:,} | {files} |")
            return
        load = os.getloadavg()[0]
        run = Run(Path(name), arguments)
        run.measure()
    loads = f"load average {load:.1f} at the start, {os.getloadavg()[0]:.1f} at the end"
    about = f"{arguments.samples:,} samples, medians of {arguments.rounds}; {loads}."
    table = Table("Computed tensors", notes=[about, *NOTES])
    if LMDB not in run.known:
        table.notes.append("Left out: LMDB; pip install lmdb")
    run.tell(table)
    table.show(as_json=arguments.json)


def parsed() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=4000, help="samples in each store")
    parser.add_argument("--entries", type=int, default=1_000_000, help="entries of the large set")
    parser.add_argument("--rounds", type=int, default=3, help="rounds to take the median of")
    parser.add_argument("--threads", type=int, default=2, help="threads that smartcache may use")
    parser.add_argument("--only", action="append", choices=PARTS, help="may be repeated")
    parser.add_argument("--dir", type=Path, help="where to work (default: the temporary folder)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    words = "count the calls of put, get_batch and get_or_compute instead"
    parser.add_argument("--trace", action="store_true", help=words)
    return parser.parse_args()


def refuse_full_disk(arguments: argparse.Namespace) -> None:
    """End the script if the disk has no room for the largest part."""
    needed = 5 * arguments.samples * (SAMPLE_BYTES + 8192)
    if not arguments.only or "entries" in arguments.only:
        large = (arguments.entries + FEW_ENTRIES) * (ENTRY_BYTES + 512)
        needed = max(needed, large + 2 * arguments.rounds * MOST * SAMPLE_BYTES)
    place = arguments.dir or Path(tempfile.gettempdir())
    free = shutil.disk_usage(place).free
    if free < needed and not arguments.trace:
        raise SystemExit(
            f"{place} has {free / 1e9:.1f} GB free, and this takes {needed / 1e9:.1f} GB.\n"
            "Give another folder with --dir, or fewer --samples and --entries."
        )


def alone(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Do a job in a new process."""
    with ProcessPoolExecutor(1, mp_context=FORK) as pool:
        return pool.submit(work, *args, **kwargs).result()


class Run:
    """All that is measured, round by round."""

    def __init__(self, room: Path, arguments: argparse.Namespace) -> None:
        self.room = room
        self.wanted = set(arguments.only or PARTS)
        self.rounds: int = arguments.rounds
        self.samples: int = arguments.samples
        self.many: int = arguments.entries
        self.few = max(1, min(FEW_ENTRIES, self.many // 2))
        self.known = [name for name in rows.STORES if name != LMDB or find_spec("lmdb")]
        self.found: dict[rows.Name, list[float]] = {}

    def measure(self) -> None:
        """Go through the rounds; the large sets are made once."""
        parts = {"small": self._small, "writers": self._writers}
        works = [work for name, work in parts.items() if name in self.wanted]
        works += [self._stores] if self.wanted & NEEDED.keys() else []
        for turn in range(self.rounds):
            for work in works:
                print(f"round {turn + 1}: {work.__name__[1:]}", file=sys.stderr)
                with tempfile.TemporaryDirectory(dir=self.room) as name:
                    work(Path(name), turn)
        if "entries" in self.wanted:
            print("entries", file=sys.stderr)
            self._entries()

    def _note(self, found: rows.Figures) -> None:
        for name, value in found.items():
            self.found.setdefault(name, []).append(value)

    def _of(self, *parts: str) -> list[str]:
        return [name for name in self.known if any(name in NEEDED[part] for part in parts)]

    def _stores(self, room: Path, turn: int) -> None:
        """Fill the stores that the wanted parts need, and read them."""
        samples, names = self.samples, self._of(*(self.wanted & NEEDED.keys()))
        self._note(alone(rows.puts, room, names, turn, range(samples), "sample"))
        if "batches" in self.wanted:
            self._note(alone(rows.batches, room, self._of("batches"), turn, samples))
        if "gets" in self.wanted:
            self._note(alone(rows.gets, room, self._of("gets"), turn, samples, "sample"))
        if "open" in self.wanted:
            for name in rows.taking_turns(self._of("open"), turn):
                self._note({("open", name): rows.opening(room, name, key_of(turn))})
        if "cold" in self.wanted:
            for name in rows.taking_turns((OURS, RAW), turn):
                rows.drop(room / name)
                whose = "plain mmap" if name == RAW else name
                self._note({("cold", whose): alone(rows.cold, room, name, turn, samples)})

    def _small(self, room: Path, turn: int) -> None:
        names = self._of("gets")
        self._note(alone(rows.puts, room, names, turn, range(self.samples), "small"))
        self._note(alone(rows.gets, room, names, turn, self.samples, "small"))

    def _writers(self, room: Path, turn: int) -> None:
        count = min(max(1, self.samples // 2), MOST)
        with ProcessPoolExecutor(2, FORK, rows.meet_at, (FORK.Barrier(2),)) as pool:
            jobs = [
                pool.submit(rows.puts, room, (OURS, RAW), turn, numbers, "two", str(numbers[0]))
                for numbers in (range(count), range(count, 2 * count))
            ]
            one, other = (job.result() for job in jobs)
        self._note({figure: one[figure] + other[figure] for figure in one})

    def _entries(self) -> None:
        counts = {self.room / "many": self.many, self.room / "few": self.few}
        many, few = counts
        for room in counts:
            room.mkdir()
        alone(rows.put_entries, few, OURS, self.few)
        self._note({("put_many", OURS): alone(rows.put_entries, many, OURS, self.many)})
        for turn in range(self.rounds):
            rows.warm(self.room)
            large, small = alone(rows.second_epoch, counts)
            self._note({("second", OURS): large, ("second", f"{self.few:,} entries"): small})
            if "open" in self.wanted:
                opened = rows.opening(many, OURS, key_of(turn, "entry"))
                self._note({("open many", OURS): opened})
        if LMDB in self.known:
            alone(rows.put_entries, many, LMDB, self.many)
        count = min(self.samples, MOST)
        for turn in range(self.rounds):
            numbers = range(turn * count, (turn + 1) * count)
            self._note(alone(rows.puts, many, self._of("gets"), turn, numbers, "onto"))

    def tell(self, table: Table) -> None:
        """Add the rows of what was measured."""
        words = {"many": f"{self.many:,}", "few": f"{self.few:,}"}
        for row in TABLE:
            if row.part not in self.wanted or (row.figure, OURS) not in self.found:
                continue
            job, peer = row.job.format(**words), row.peer.format(**words)
            ours = statistics.median(self.found[row.figure, OURS])
            values = self.found.get((row.peer_figure or row.figure, peer))
            if values is None:
                table.add(job, shown(ours, row.unit))
                continue
            theirs = statistics.median(values)
            ratio = ours / theirs
            sign, _, limit = row.aim.partition(" ")
            holds = (ratio <= float(limit)) == (sign == "<=") if limit else None
            later = ", later epochs" if row.peer_figure and row.peer == LMDB else ""
            table.add(
                job, shown(ours, row.unit), peer=f"{peer}{later}: {shown(theirs, row.unit)}",
                ratio=ratio, aim=row.aim, holds=holds,
            )  # fmt: skip


def shown(value: float, unit: str) -> str:
    """Return a figure as the table has it."""
    return f"{value:.1f} {unit}" if unit in {"ms", "us"} else f"{value:,.0f}{unit}"


if __name__ == "__main__":
    main()
