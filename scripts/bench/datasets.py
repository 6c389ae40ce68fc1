"""How long datasets take to start: smartcache, a JSON index, a file per item, and the limit.

Usage: python scripts/bench/datasets.py [--sizes 2000 20000 200000] [--rows 1000000]
                                        [--only PART] [--dir DIR] [--json]

The sources are tiny files in one folder, with the header of a PNG and contents of their own. What
is measured runs in a process started anew, which has imported all it needs when the clock starts.
Every figure is the median of the rounds. Needs Linux.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import random
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _measure import Table

if TYPE_CHECKING:
    from smartcache.training import Dataset, Item

SIZES = (2_000, 20_000, 200_000)
ROWS = 1_000_000
PARTS = ("cold", "unchanged", "changes", "epoch", "memory", "table")
CHANGES = ("touched", "edited", "added")
CAPTIONED = 20_000
MOST_FILES = 20_000
"""Peers have a file per item: they are measured with the largest number up to this."""
MOST_ROUNDS = 50_000
"""With more items than this, encoding all of them is done once."""
YOUNG = 2.1
"""A file that changed less than two seconds before it is looked at is read again the next time;
real ones are older."""
BATCH = 32
MOST_READ = 50_000
"""Items that are read before the next epoch begins."""
IMAGE = 57
"""Bytes of a source."""
VALUES = 4
"""Numbers that the encoder makes of each."""
CHUNK = 100_000
BEGAN = time.monotonic()
OURS, LIMIT, JSON, NPZ = "smartcache", "scandir + stat", "JSON index", "npz per item"
Figures = dict[str, float]
NOTES = (
    (
        "Each figure is of a process started anew; imports are not timed, but where a row says the"
        " whole process. The page cache is warm."
    ),
    (
        "Sources have the header of a PNG and 24 bytes of their own, and are more than two seconds"
        " old. The encoder makes four numbers of each, in batches of 32, and reads nothing: what"
        " is left is bookkeeping. Unchanged: from opening SmartCache until the plan is empty."
    ),
    f"{LIMIT}: os.scandir of the folder and a stat of each file, and nothing else.",
    (
        f"{JSON}, as mgds has it: a scandir and a stat of each source, a look whether its output is"
        " there, xxh64 of what has changed, torch.save per item, and the index, indented, written"
        " as a whole when something has changed."
    ),
    f"{NPZ}, as sd-scripts has it: numpy.load of each file, and its shapes compared.",
    (
        f"Peers, which have a file per item, are measured with up to {MOST_FILES:,} items only."
        f" More than {MOST_ROUNDS:,} items, and those with captions, are encoded once, not in every"
        " round."
    ),
    "With captions: a text file beside each source, of which a second encoder makes four numbers.",
    (
        "Written: wchar of /proc/self/io, all that the process has handed to the kernel until the"
        " dataset was closed. Bounds in seconds are shown with the limit of the same run."
    ),
    (
        "Memory: VmRSS after gc.collect and malloc_trim, less that of a process that has opened an"
        " empty dataset; peak: VmHWM, likewise; of one run. Of the table alone: less that before it"
        " was loaded."
    ),
)


@dataclass(frozen=True, slots=True)
class Tree:
    """A folder of sources, and where the outputs of all sides are."""

    room: Path
    count: int
    captions: bool = False
    peers: tuple[str, ...] = ()
    """Who else is measured with it."""

    @property
    def label(self) -> str:
        """How the table calls it."""
        return f"{self.count:,}" + (" with captions" if self.captions else "")

    @property
    def sources(self) -> Path:
        """The folder of the sources."""
        return self.room / "sources"

    def write(self, number: int, *, version: int = 0) -> None:
        """Write a source and its caption."""
        write(self.sources / f"image-{number:07}.png", image_bytes(number, version))
        if self.captions:
            self.write_caption(number)

    def write_caption(self, number: int, *, version: int = 0) -> None:
        """Write a caption."""
        text = f"a photo of number {number}, version {version}"
        write(self.sources / f"image-{number:07}.txt", text.encode())

    def change(self, kind: str, turn: int) -> None:
        """Touch, edit or add one; of sources with captions, the caption is edited."""
        number = (self.count // 2 + 2 * turn) % self.count
        if kind == "added":
            self.write(self.count + turn)
        elif kind == "touched":
            os.utime(self.sources / f"image-{number:07}.png")
        elif self.captions:
            self.write_caption((number + 1) % self.count, version=turn + 1)
        else:
            self.write((number + 1) % self.count, version=turn + 1)


def main() -> None:
    """Measure all parts, or those that are asked for, and print the table."""
    arguments = parsed()
    if arguments.child:
        print(json.dumps(CHILDREN[arguments.child](arguments)))
        return
    refuse_full_disk(arguments)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=arguments.dir) as name:
        bench = Bench(Path(name), arguments)
        bench.measure()
    table = Table("Datasets")
    tell(bench, table)
    table.notes = [
        (
            f"Medians of {arguments.rounds}; {time.monotonic() - began:.0f} s in all; load average"
            f" {bench.loads[0]:.1f} at the start, {statistics.median(bench.loads):.1f} in the"
            f" middle of all runs, {max(bench.loads):.1f} at most."
        ),
        *NOTES,
    ]
    table.show(as_json=arguments.json)


def parsed() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=SIZES, metavar="COUNT", help="numbers of sources"
    )
    parser.add_argument("--rows", type=int, default=ROWS, help="rows of the table alone")
    parser.add_argument("--rounds", type=int, default=3, help="rounds to take the median of")
    parser.add_argument("--only", action="append", choices=PARTS, help="may be repeated")
    parser.add_argument("--dir", type=Path, help="where to work (default: the temporary folder)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    words = "seconds to wait after files were changed; less than 2.1 measures that files are young"
    parser.add_argument("--wait", type=float, default=YOUNG, help=words)
    parser.add_argument("--child", choices=tuple(CHILDREN), help=argparse.SUPPRESS)
    parser.add_argument("--room", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--captions", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--encodes", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def refuse_full_disk(arguments: argparse.Namespace) -> None:
    """End the script if the disk has no room: a small file takes a block of 4 KiB and an inode."""
    needed = arguments.rows * 500
    for count in (*arguments.sizes, 2 * min(CAPTIONED, max(arguments.sizes))):
        files = 3 if count <= MOST_FILES else 1
        needed += count * (files * (4096 + 512) + 1024)
    place = arguments.dir or Path(tempfile.gettempdir())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise SystemExit(
            f"{place} has {free / 1e9:.1f} GB free, and this takes {needed / 1e9:.1f} GB.\n"
            "Give another folder with --dir, or smaller --sizes and --rows."
        )


class Bench:
    """All that is measured: by part, tree and side, the figures of every round."""

    def __init__(self, room: Path, arguments: argparse.Namespace) -> None:
        self.room = room
        self.wanted = set(arguments.only or PARTS)
        self.rounds: int = arguments.rounds
        self.wait: float = arguments.wait
        self.rows: int = arguments.rows
        sizes = sorted(set(arguments.sizes))
        compared = max((count for count in sizes if count <= MOST_FILES), default=0)
        self.trees = [
            Tree(room / str(count), count, peers=(JSON, NPZ) if count == compared else ())
            for count in sizes
        ]
        captioned = min(CAPTIONED, sizes[-1])
        self.trees.append(Tree(room / "captions", captioned, captions=True))
        self.many = captioned
        """From so many items on, memory is held against the aim: with fewer, what every process
        takes decides."""
        self.empty = Tree(room / "empty", 0)
        self.found: dict[tuple[str, str, str], list[Figures]] = {}
        self.loads = [os.getloadavg()[0]]

    def measure(self) -> None:
        """Measure the parts that are wanted; all but the table alone need sources and outputs."""
        if self.wanted - {"table"}:
            for tree in (*self.trees, self.empty):
                say(f"writing {tree.label} sources")
                tree.sources.mkdir(parents=True)
                for number in range(tree.count):
                    tree.write(number)
            time.sleep(self.wait)
            self._cold()
        for part in PARTS[1:]:
            if part in self.wanted:
                getattr(self, f"_{part}")()

    def _run(self, part: str, tree: Tree, side: str, *, encodes: int = 0) -> None:
        """Measure one thing in a new process, and keep what it took."""
        command = [sys.executable, __file__, "--child", side, "--room", str(tree.room)]
        command += ["--encodes", str(encodes), "--rows", str(self.rows)]
        command += ["--rounds", str(self.rounds)]
        command += ["--captions"] if tree.captions else []
        start = time.perf_counter()
        done = subprocess.run(
            command, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{side} failed: {part}, {tree.label}")
        figures: Figures = json.loads(done.stdout)
        figures["process"] = time.perf_counter() - start
        self.loads.append(os.getloadavg()[0])
        say(f"{part}, {tree.label}, {side}: {figures}")
        self.found.setdefault((part, tree.label, side), []).append(figures)

    def _cold(self) -> None:
        """Encode everything; the outputs of the last round are what the other parts begin with."""
        for turn in range(self.rounds if "cold" in self.wanted else 1):
            for tree in self.trees:
                if turn and (tree.captions or tree.count > MOST_ROUNDS):
                    continue
                for side in (OURS, *tree.peers):
                    if turn and side == NPZ:
                        continue  # made to be opened
                    home = home_of(tree.room, side)
                    shutil.rmtree(home, ignore_errors=True)
                    home.mkdir()
                    encodes = tree.count * (1 + tree.captions)
                    self._run("cold", tree, side, encodes=encodes)

    def _unchanged(self) -> None:
        for _ in range(self.rounds):
            for tree in self.trees:
                for side in (LIMIT, OURS, *tree.peers):
                    self._run("unchanged", tree, side)

    def _changes(self) -> None:
        """Change a file of each tree, wait until none is young, and start all sides."""
        for turn in range(self.rounds):
            for kind in CHANGES:
                for tree in self.trees:
                    tree.change(kind, turn)
                time.sleep(self.wait)
                for tree in self.trees:
                    outputs = {"touched": 0, "edited": 1, "added": 1 + tree.captions}
                    self._run(kind, tree, LIMIT)
                    for side in (OURS, *(each for each in tree.peers if each == JSON)):
                        self._run(kind, tree, side, encodes=outputs[kind])

    def _epoch(self) -> None:
        for tree in self.trees:
            self._run("epoch", tree, "epoch")

    def _memory(self) -> None:
        """Weigh a process with each tree, once: the figures of two differ by a few pages."""
        for tree in (self.empty, *self.trees):
            self._run("memory", tree, "memory")

    def _table(self) -> None:
        tree = Tree(self.room / "rows", self.rows)
        tree.room.mkdir()
        self._run("table", tree, "fill")
        for _ in range(self.rounds):
            self._run("table", tree, "load")

    def median(self, part: str, tree: Tree, side: str, figure: str = "built") -> float | None:
        """Return the median of a figure; None: it was not measured."""
        found = self.found.get((part, tree.label, side))
        return None if found is None else statistics.median(each[figure] for each in found)


def environment() -> dict[str, str]:
    """Return the environment without settings of the user's own."""
    known = os.environ.items()
    return {key: value for key, value in known if not key.startswith("SMARTCACHE_")}


def say(text: str) -> None:
    """Tell who waits what is being done."""
    print(f"{time.monotonic() - BEGAN:.0f} s: {text}", file=sys.stderr)


def write(path: Path, data: bytes) -> None:
    """Write a small file, a hundred thousand times if need be."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.write(fd, data)
    os.close(fd)


def image_bytes(number: int, version: int) -> bytes:
    """Return the header of a PNG of one of five sizes, and bytes that no other one has."""
    header = b"IHDR" + struct.pack(">IIBBBBB", 512 + 128 * (number % 5), 768, 8, 2, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header
    return start + struct.pack(">I", zlib.crc32(header)) + b"%012d%012d" % (number, version)


def home_of(room: Path, side: str) -> Path:
    """Return where one side keeps what it has made."""
    return room / side.partition(" ")[0]


# What runs in processes of its own


def scan(arguments: argparse.Namespace) -> Figures:
    """List the folder and stat each file: no dataset can start in less, if it looks at all."""
    count, start = 0, time.perf_counter()
    with os.scandir(os.fsencode(arguments.room / "sources")) as entries:
        for entry in entries:
            entry.stat()
            count += 1
    return {"built": time.perf_counter() - start, "files": count}


def opened(room: Path, *, captions: bool) -> tuple[Callable[[], Dataset], Callable[[], None]]:
    """Import all that a dataset needs; return what opens it, and what closes it and the store."""
    import imagesize  # noqa: F401 - used by the dataset
    import numpy as np

    from smartcache import artifacts, training
    from smartcache.cache import SmartCache

    for package in (artifacts, training):
        for name in package.__all__:
            getattr(package, name)

    def encode(items: list[Item]) -> object:
        seeds = [item.seed for item in items]
        made = [[seed >> shift & 0xFFFF for shift in (0, 16, 32, 40)] for seed in seeds]
        return np.array(made, np.float32)

    caches: list[SmartCache] = []

    def open_it() -> Dataset:
        caches.append(SmartCache(home_of(room, OURS)))
        latent = training.Encoder(
            encode, reads="file", depends_on="numbers", batch=BATCH, buckets="area:1024 step:64"
        )
        text = training.Encoder(encode, reads="caption", depends_on="numbers", batch=BATCH)
        sidecars = {"caption": ".txt"} if captions else None
        sources = training.Sources(room / "sources", sidecars=sidecars)
        outputs: dict[str, Any] = {"latent": latent} | ({"text": text} if captions else {})
        return caches[-1].dataset("bench", sources, **outputs)

    return open_it, lambda: caches.pop().close()


def ours(arguments: argparse.Namespace) -> Figures:
    """Open a dataset, plan, and encode what is missing."""
    open_it, close = opened(arguments.room, captions=arguments.captions)
    before, start = written(), time.perf_counter()
    dataset = open_it()
    plan = dataset.plan()
    planned = time.perf_counter() - start
    count = sum(sum(reasons.values()) for reasons in plan.encode.values())
    if count != arguments.encodes or plan.failed:
        raise SystemExit(f"{arguments.encodes} to be encoded, but the plan is: {plan}")
    if count:
        report = plan.execute()
        count = sum(report.encoded.values())
    built = time.perf_counter() - start
    dataset.close()
    close()
    if count != arguments.encodes:
        raise SystemExit(f"{count} were encoded, not {arguments.encodes}")
    return {"planned": planned, "built": built, "written": written() - before}


def epoch(arguments: argparse.Namespace) -> Figures:
    """Read all items, or very many, in random batches, and then the first batch of other orders."""
    open_it, close = opened(arguments.room, captions=arguments.captions)
    dataset = open_it()
    if not dataset.plan().is_empty:
        raise SystemExit("not everything is there")
    dice = random.Random(0)
    order = list(range(len(dataset)))
    dice.shuffle(order)
    for at in range(0, min(len(order), MOST_READ), BATCH):
        dataset.batch(order[at : at + BATCH])
    times = []
    for _ in range(arguments.rounds):
        dice.shuffle(order)
        start = time.perf_counter()
        dataset.batch(order[:BATCH])
        times.append(time.perf_counter() - start)
    dataset.close()
    close()
    return {"built": statistics.median(times)}


def memory(arguments: argparse.Namespace) -> Figures:
    """Open a dataset, find everything, and weigh the process."""
    open_it, close = opened(arguments.room, captions=arguments.captions)
    dataset = open_it()
    if not dataset.plan().is_empty:
        raise SystemExit("not everything is there")
    figures = weight()
    dataset.close()
    close()
    return figures


def fill(arguments: argparse.Namespace) -> Figures:
    """Write made-up files into a table of sources."""
    from smartcache.training import table

    path, dice, now = arguments.room / "index.sqlite3", random.Random(0), time.time_ns()
    opened_ = table.SourceTable(path, wal=True)
    with opened_.write():
        folder = opened_.add_folder(os.fsencode(arguments.room / "sources"))
    seconds = 0.0
    for first in range(0, arguments.rows, CHUNK):
        rows = [
            (
                folder,
                b"image-%07d.png" % number,
                table.memo(
                    table.STAT.pack(IMAGE, now - number, now - number, number + 1),
                    dice.randbytes(32), (768, 768),
                ),
            )
            for number in range(first, min(first + CHUNK, arguments.rows))
        ]  # fmt: skip
        start = time.perf_counter()
        with opened_.write():
            opened_.add_files(rows)
        seconds += time.perf_counter() - start
    start = time.perf_counter()
    opened_.close()
    seconds += time.perf_counter() - start
    return {"built": seconds, "size": path.stat().st_size}


def load(arguments: argparse.Namespace) -> Figures:
    """Load such a table, as `validate="trust"` does."""
    from smartcache.training import Sources, look, table

    path = arguments.room / "index.sqlite3"
    look.look(  # numpy and SQLite take their memory when they are first used
        table.SourceTable(path.with_name("empty.sqlite3"), wal=True), Sources("/"), ["file"],
        trust=True,
    )  # fmt: skip
    before = weight()
    start = time.perf_counter()
    opened_ = table.SourceTable(path, wal=True)
    listing = look.look(opened_, Sources(arguments.room / "sources"), ["file"], trust=True)
    seconds = time.perf_counter() - start
    if len(listing) != arguments.rows:
        raise SystemExit(f"{len(listing)} rows were loaded, not {arguments.rows}")
    after = weight()
    opened_.close()
    return {"built": seconds} | {name: after[name] - before[name] for name in after}


def weight() -> Figures:
    """Return the bytes of memory that this process has now, and the most that it had."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    found = dict(
        line.split(":", 1) for line in Path("/proc/self/status").read_text("utf-8").splitlines()
    )
    names = {"now": "VmRSS", "peak": "VmHWM"}
    return {name: int(found[each].split()[0]) * 1024.0 for name, each in names.items()}


def written() -> int:
    """Return how many bytes this process has handed to the kernel."""
    found = dict(line.split(": ") for line in Path("/proc/self/io").read_text("ascii").splitlines())
    return int(found["wchar"])


# The peers, each as it is usually written


def json_index(arguments: argparse.Namespace) -> Figures:
    """Keep a file for each item, and one JSON file that says what it was made of."""
    import xxhash

    if arguments.encodes:
        import torch
    folder, home = os.fspath(arguments.room / "sources"), os.fspath(home_of(arguments.room, JSON))
    before, start = written(), time.perf_counter()
    path = os.path.join(home, "cache.json")
    index: dict[str, Any] = {"version": 1, "entries": {}, "hash_index": {}}
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            index = json.load(file)
    entries, by_hash = index["entries"], index["hash_index"]
    there = set(os.listdir(home))
    changed: list[tuple[str, os.stat_result]] = []
    with os.scandir(folder) as listed:
        for entry in listed:
            found = entry.stat()
            known = entries.get(entry.path)
            if (
                known is None
                or (known["mtime"], known["size"]) != (found.st_mtime, found.st_size)
                or not all(each["file"] in there for each in known["variants"].values())
            ):
                changed.append((entry.path, found))
    count = 0
    for source, found in changed:
        with open(source, "rb") as file:
            data = file.read()
        digest = xxhash.xxh64(data).hexdigest()
        width, height = struct.unpack(">II", data[16:24])
        known = entries.get(source)
        if known is None or known["hash"] != digest:
            output = f"{digest}_{height}x{width}_1.pt"
            made = torch.tensor([float(data[-1 - at]) for at in range(VALUES)])
            torch.save({"latent": made, "path": source}, os.path.join(home, output))
            variant = {"file": output, "names": ["latent", "path"]}
            known = {"hash": digest, "variants": {f"{height}x{width}": variant}}
            count += 1
        entries[source] = known | {"mtime": found.st_mtime, "size": found.st_size}
        by_hash[digest] = source
    if changed:
        with open(path + ".new", "w", encoding="utf-8") as file:
            file.write(json.dumps(index, indent=2))
        os.replace(path + ".new", path)
    built = time.perf_counter() - start
    if count != arguments.encodes:
        raise SystemExit(f"the JSON index encoded {count}, not {arguments.encodes}")
    return {"built": built, "written": written() - before}


def npz_each(arguments: argparse.Namespace) -> Figures:
    """Keep a file for each item, and open it to see whether it fits."""
    import numpy as np

    folder, home = os.fspath(arguments.room / "sources"), os.fspath(home_of(arguments.room, NPZ))
    count, start = 0, time.perf_counter()
    for name in sorted(os.listdir(folder)):
        path = os.path.join(home, name.removesuffix(".png") + ".npz")
        if os.path.exists(path):
            with np.load(path) as known:
                if "original_size" in known and known["latents"].shape == (VALUES,):
                    continue
        with open(os.path.join(folder, name), "rb") as file:
            data = file.read()
        made = np.array([data[-1 - at] for at in range(VALUES)], np.float32)
        np.savez(path, latents=made, original_size=np.array(struct.unpack(">II", data[16:24])))
        count += 1
    built = time.perf_counter() - start
    if count != arguments.encodes:
        raise SystemExit(f"{count} npz were made, not {arguments.encodes}")
    return {"built": built}


CHILDREN: dict[str, Callable[[argparse.Namespace], Figures]] = {
    OURS: ours, LIMIT: scan, JSON: json_index, NPZ: npz_each,
    "epoch": epoch, "memory": memory, "fill": fill, "load": load,
}  # fmt: skip


# The table


def tell(bench: Bench, table: Table) -> None:
    """Add a row for each figure, and what we aim at."""
    tell_cold(bench, table)
    tell_unchanged(bench, table)
    tell_changes(bench, table)
    tell_growth(bench, table)
    tell_epoch(bench, table)
    tell_memory(bench, table)
    tell_table(bench, table)


def tell_cold(bench: Bench, table: Table) -> None:
    """Say how long it takes to encode everything."""
    if "cold" not in bench.wanted:
        return
    for tree in bench.trees:
        job = f"look, hash and encode {tree.label}"
        seconds = bench.median("cold", tree, OURS)
        if seconds is None:
            continue
        text = f"{shown(seconds)} ({seconds / tree.count * 1e6:.0f} us each)"
        compare(bench, table, job, text, ("cold", tree, JSON), seconds, most=1.0)


def tell_unchanged(bench: Bench, table: Table) -> None:
    """Say how long it takes to find that nothing has changed."""
    for tree in bench.trees:
        job = f"unchanged start, {tree.label}"
        seconds, limit = (bench.median("unchanged", tree, side) for side in (OURS, LIMIT))
        if seconds is None or limit is None:
            continue
        beside_limit(table, job, shown(seconds), seconds, limit, 0.1)
        if tree.peers:
            compare(bench, table, job, shown(seconds), ("unchanged", tree, JSON), seconds, most=0.2)
            compare(bench, table, job, shown(seconds), ("unchanged", tree, NPZ), seconds)
    tree = next((each for each in bench.trees if each.peers), bench.trees[0])
    whole = bench.median("unchanged", tree, OURS, "process")
    if whole is not None:
        table.add(f"unchanged start, {tree.label}, the whole process", shown(whole))


def tell_changes(bench: Bench, table: Table) -> None:
    """Say how long it takes until all is there again after one change, and what was written."""
    for kind in CHANGES:
        for tree in bench.trees:
            what = "caption" if tree.captions and kind == "edited" else "file"
            job = f"one {what} {kind}, {tree.label}: planned / built / written"
            planned, seconds, size = (
                bench.median(kind, tree, OURS, figure) for figure in ("planned", "built", "written")
            )
            limit = bench.median(kind, tree, LIMIT)
            if planned is None or seconds is None or size is None or limit is None:
                continue
            text = f"{shown(planned)} / {shown(seconds)} / {size / 1e3:,.0f} kB"
            beside_limit(table, job, text, seconds, limit, 0.2)
            most = 0.1 if kind == "edited" else None
            if tree.peers:
                compare(bench, table, job, text, (kind, tree, JSON), seconds, most=most)


def tell_growth(bench: Bench, table: Table) -> None:
    """Compare the times of the two largest numbers of sources: linear or better."""
    plain = [tree for tree in bench.trees if not tree.captions]
    if len(plain) < 2:
        return
    small, large = plain[-2:]
    most = 1.1 * large.count / small.count
    for part in PARTS[:2] + CHANGES:
        few, many = (bench.median(part, tree, OURS) for tree in (small, large))
        if few is None or many is None or (part == "cold" and part not in bench.wanted):
            continue
        word = part if part in {"cold", "unchanged"} else f"one file {part}"
        table.add(
            f"{word}: {large.count:,} against {small.count:,}", shown(many), peer=shown(few),
            ratio=many / few, aim=f"<= {most:.3g}", holds=many / few <= most,
        )  # fmt: skip


def tell_epoch(bench: Bench, table: Table) -> None:
    """Say how long the next epoch takes to begin."""
    for tree in bench.trees:
        seconds = bench.median("epoch", tree, "epoch")
        if seconds is not None:
            table.add(
                f"next epoch of {tree.label}, first batch of {BATCH}", f"{seconds * 1e3:.2f} ms",
                aim="<= 5 ms", holds=seconds <= 0.005,
            )  # fmt: skip


def tell_memory(bench: Bench, table: Table) -> None:
    """Say how much memory an item takes."""
    for tree in bench.trees:
        now, peak = (bench.median("memory", tree, "memory", each) for each in ("now", "peak"))
        least = [bench.median("memory", bench.empty, "memory", each) for each in ("now", "peak")]
        if now is None or peak is None or least[0] is None or least[1] is None:
            continue
        each, is_many = (now - least[0]) / tree.count, tree.count >= bench.many
        table.add(
            f"memory per item of {tree.label}; peak",
            f"{each:.0f} bytes; {(peak - least[1]) / tree.count:.0f} bytes",
            peer=f"an empty one: {least[0] / 1e6:.0f} MB",
            aim="<= 300 bytes" if is_many else "", holds=each <= 300 if is_many else None,
        )  # fmt: skip


def tell_table(bench: Bench, table: Table) -> None:
    """Say what the table of very many sources takes, without anything else."""
    tree = Tree(bench.room, bench.rows)
    filled, size = (bench.median("table", tree, "fill", each) for each in ("built", "size"))
    figures = [bench.median("table", tree, "load", each) for each in ("built", "now", "peak")]
    if filled is None or size is None or figures[0] is None:
        return
    seconds, now, peak = (each or 0.0 for each in figures)
    job = f"the table alone, {bench.rows:,} rows:"
    table.add(f"{job} write", f"{shown(filled)}, {size / bench.rows:.0f} bytes each on the disk")
    table.add(f"{job} load", shown(seconds))
    each = now / bench.rows
    table.add(
        f"{job} memory per row; peak", f"{each:.0f} bytes; {peak / bench.rows:.0f} bytes",
        aim="<= 300 bytes", holds=each <= 300,
    )  # fmt: skip


def beside_limit(
    table: Table, job: str, text: str, seconds: float, limit: float, allowance: float
) -> None:
    """Add a row that compares with the limit of the machine."""
    most = 1.5 * limit + allowance
    table.add(
        job, text, peer=f"{LIMIT}: {shown(limit)}", ratio=seconds / limit,
        aim=f"<= 1.5x + {allowance} s = {shown(most)}", holds=seconds <= most,
    )  # fmt: skip


def compare(
    bench: Bench,
    table: Table,
    job: str,
    text: str,
    other: tuple[str, Tree, str],
    seconds: float,
    *,
    most: float | None = None,
) -> None:
    """Add a row that compares with a peer, if it was measured."""
    peer = bench.median(*other)
    if peer is None:
        table.add(job, text)
        return
    size = bench.median(*other, "written") if other[2] == JSON and other[0] in CHANGES else None
    wrote = "" if size is None else f" / {size / 1e3:,.0f} kB"
    table.add(
        job, text, peer=f"{other[2]}: {shown(peer)}{wrote}", ratio=seconds / peer,
        aim="" if most is None else f"<= {most:g}",
        holds=None if most is None else seconds <= most * peer,
    )  # fmt: skip


def shown(seconds: float) -> str:
    """Return a time as the table has it."""
    if seconds < 0.1:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"


if __name__ == "__main__":
    main()
