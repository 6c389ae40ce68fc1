"""How fast the store is: hashing, putting, adopting, placing, replacing, and a million rows.

Usage: python scripts/bench/store.py [--scale 1.0] [--folder DIR] [--json]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import _measure
from _measure import Table, child_seconds, median_seconds

from smartcache.store.catalog import Learned
from smartcache.store.hashes import Read
from smartcache.store.layout import Layout
from smartcache.store.store import Store
from smartcache.system.hashing import hash_many
from smartcache.system.kernel import StatKey

SMALL_FILES = 10_000
LARGE_FILES = 20
LARGE_SIZE = 64 << 20
ROWS = 1_000_000
BUFFER = 256 << 10
THREADS = 2
OLD = 1_600_000_000

T = TypeVar("T")


def main() -> None:
    """Run all parts and print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of the files and rows")
    parser.add_argument("--folder", type=Path, help="where to work (default: the temporary folder)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds to take the median of")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--rows-child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rows_child:
        _rows_child(arguments.rows_child)
        return
    _measure.rounds = arguments.rounds
    table = Table("The store")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        room = Path(name)
        hashing(room, table, arguments.scale)
        operations(room, table, arguments.scale)
        million_rows(room, table, arguments.scale)
    starting(table)
    table.show(as_json=arguments.json)


def hashing(room: Path, table: Table, scale: float) -> None:
    """Hash large warm files with two threads, against plain reading and one-thread SHA-256."""
    files = list(make_large(room / "hash", max(2, int(LARGE_FILES * scale))))
    size = sum(path.stat().st_size for path in files)
    read(files)
    plain = size / median_seconds(lambda: read(files)) / 1e9
    alone = size / median_seconds(lambda: read(files, threads=1)) / 1e9
    ours = size / median_seconds(lambda: list(hash_many(files, threads=THREADS))) / 1e9
    sha256 = size / median_seconds(lambda: [sha256_of(path) for path in files]) / 1e9
    table.add(
        f"hash {len(files)} large files, {THREADS} threads", f"{ours:.1f} GB/s",
        peer=f"plain read, {THREADS} threads: {plain:.1f} GB/s", ratio=ours / plain,
        aim=">= 0.70", holds=ours / plain >= 0.7,
    )  # fmt: skip
    table.add(
        "the same", f"{ours:.1f} GB/s", peer=f"plain read, 1 thread: {alone:.1f} GB/s",
        ratio=ours / alone, aim=">= 0.70", holds=ours / alone >= 0.7,
    )  # fmt: skip
    table.add(
        "the same", f"{ours:.1f} GB/s", peer=f"SHA-256, 1 thread: {sha256:.1f} GB/s",
        ratio=ours / sha256,
    )  # fmt: skip
    shutil.rmtree(room / "hash")


def operations(room: Path, table: Table, scale: float) -> None:
    """Count operations per second on many small and a few large files; hashing is not timed."""
    small = max(100, int(SMALL_FILES * scale))
    large = max(2, int(LARGE_FILES * scale))
    for label, make, count in (("small", make_small, small), ("large", make_large, large)):
        rates: dict[str, list[float]] = {"adopt": [], "replace": [], "place": [], "put": []}
        for _ in range(_measure.rounds):
            with one_store(room) as (store, work):
                for name, rate in one_round(store, work, make, count):
                    rates[name].append(rate)
        for name, found in rates.items():
            rate = sorted(found)[len(found) // 2]
            is_goal = (name, label) == ("adopt", "small")
            table.add(
                f"{name}, {count} {label} files", f"{rate:,.0f} files/s",
                aim=">= 10,000 files/s" if is_goal else "",
                holds=rate >= 10_000 if is_goal else None,
            )  # fmt: skip


def one_round(
    store: Store, work: Path, make: Callable[[Path, int], Iterator[Path]], count: int
) -> Iterator[tuple[str, float]]:
    """Adopt files, replace their copies, place links to them, and put them anew."""
    originals = list(make(work / "originals", count))
    copies = list(make(work / "copies", count))
    time.sleep(2.1)  # a file younger than two seconds is hashed under a lease, which is hashing
    read = Read()
    for path in (*originals, *copies):
        store.digest_of(path, read=read)
    adopted, seconds = timed(lambda: list(store.link_many(originals, label="bench", read=read)))
    yield "adopt", count / seconds
    linked, seconds = timed(
        lambda: list(store.link_many(copies, label="bench", replace=True, read=read))
    )
    if any(result.outcome != "linked" for result in linked):
        raise SystemExit(f"not linked: {linked[0]}")
    yield "replace", count / seconds
    (work / "placed").mkdir()

    def place_all() -> None:
        with store.batch("bench"):
            for number, item in enumerate(adopted):
                store.place(item.digest, work / "placed" / f"{number}.bin", kind="hardlink")

    yield "place", count / timed(place_all)[1]
    few = min(count, 1000)
    payloads = [b"%d" % number * 512 for number in range(few)]
    yield "put", few / timed(lambda: [store.put_stream([payload]) for payload in payloads])[1]


def million_rows(room: Path, table: Table, scale: float) -> None:
    """Open a store with a million rows, and look at a tenth as many blobs, in other processes."""
    rows = max(1000, int(ROWS * scale))
    blobs = rows // 10
    opening, *_ = _in_child(room / "rows", rows, files=0)
    table.add(
        f"open with {rows:,} rows", f"{opening * 1000:.1f} ms", aim="< 50 ms", holds=opening < 0.05
    )
    _, usage, base, opened, used = _in_child(room / "blobs", blobs, files=blobs)
    table.add(
        f"df with {blobs:,} blobs, each looked at", f"{usage:.2f} s", aim="< 1 s", holds=usage < 1
    )
    table.add(
        "memory: imported / opened / after df", f"{base:.0f} / {opened:.0f} / {used:.0f} MB",
        aim="flat", holds=used - base < 50,
    )  # fmt: skip


def _in_child(root: Path, rows: int, *, files: int) -> list[float]:
    """Return seconds to open a store and to use `df`, and the megabytes before, between, after."""
    with Store(root) as store:
        store.ready()
    fill(root, rows, files)
    command = [sys.executable, __file__, "--rows-child", str(root)]
    found = []
    for _ in range(_measure.rounds):
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found.append([float(text) for text in output.split()])
    return [sorted(column)[len(found) // 2] for column in zip(*found, strict=True)]


def fill(root: Path, rows: int, files: int) -> None:
    """Write rows as a scan would have them; of the blobs a tenth has no other name."""
    for n in range(1, files + 1):
        path = Path(Layout(root).blob(digest_of(n).hex()))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(0o444)
        if n % 10:
            path.with_name(f"{path.name}.outside").hardlink_to(path)
    with Store(root) as store:
        catalog = store.catalog
        with catalog.write():
            filesystem = catalog.filesystem_number(store.layout.filesystem)
            folder = catalog.set_folder(Path("/nowhere"), program="ComfyUI")
            for start in range(1, rows + 1, 1000):
                directory = catalog.set_directory(b"/nowhere/%d" % start, folder)
                some = range(start, min(rows + 1, start + 1000))
                catalog.put_seen(
                    (
                        directory,
                        b"%d.bin" % n,
                        (filesystem, n, 4096, OLD, OLD, 1, 4096, 0o644, 0),
                        0,
                    )
                    for n in some
                )
                key = StatKey(4096, OLD, OLD)
                catalog.learn(Learned(filesystem, n, key, 0, digest_of(n), None, "") for n in some)


def digest_of(n: int) -> bytes:
    """Return the digest of a made-up file."""
    return hashlib.blake2b(b"%d" % n, digest_size=32).digest()


def _rows_child(root: Path) -> None:
    base = peak_megabytes()
    start = time.perf_counter()
    store = Store(root)
    opening = time.perf_counter() - start
    opened = peak_megabytes()
    start = time.perf_counter()
    store.usage()  # as `smartcache df` does
    usage = time.perf_counter() - start
    print(opening, usage, base, opened, peak_megabytes())


def starting(table: Table) -> None:
    """Compare starting the program with importing click."""
    click = median_child("-c", "import click")
    imported = median_child("-c", "import smartcache")
    helped = median_child("-m", "smartcache", "--help")
    for job, seconds in (("import smartcache", imported), ("smartcache --help", helped)):
        table.add(
            job, f"{seconds * 1000:.0f} ms", peer=f"import click: {click * 1000:.0f} ms",
            ratio=seconds / click, aim="<= 1.5", holds=seconds / click <= 1.5,
        )  # fmt: skip


def median_child(*command: str) -> float:
    """Return the median time of a child process: starting Python is noisy, so three times more."""
    times = sorted(child_seconds(*command) for _ in range(3 * _measure.rounds))
    return times[len(times) // 2]


@contextmanager
def one_store(room: Path) -> Iterator[tuple[Store, Path]]:
    """Give a new store and a folder beside it; both are removed afterwards."""
    work = Path(tempfile.mkdtemp(dir=room))
    with Store(work / "home") as store:
        yield store, work
    shutil.rmtree(work)


def make_small(folder: Path, count: int) -> Iterator[Path]:
    """Write files of 4 KiB, equal for equal numbers."""
    folder.mkdir(parents=True)
    for number in range(count):
        yield write(folder / f"{number}.bin", number.to_bytes(8, "little") * 512)


def make_large(folder: Path, count: int) -> Iterator[Path]:
    """Write files of 64 MiB, equal for equal numbers."""
    folder.mkdir(parents=True)
    block = hashlib.shake_128(b"smartcache").digest(1 << 20)
    for number in range(count):
        yield write(
            folder / f"{number}.bin", number.to_bytes(8, "little") + block * (LARGE_SIZE >> 20)
        )


def write(path: Path, data: bytes) -> Path:
    """Write an old file."""
    path.write_bytes(data)
    os.utime(path, (OLD, OLD))
    return path


def read(files: list[Path], threads: int = THREADS) -> None:
    """Read files with some threads into reused buffers."""
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read_one, files))


def read_one(path: Path) -> None:
    """Read a file into one reused buffer."""
    buffer = bytearray(BUFFER)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        while os.readv(descriptor, [buffer]):
            pass
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """Hash a file with the standard library."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """Return a result and the seconds it took."""
    start = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start


def peak_megabytes() -> float:
    """Return the most memory this process has used since it was started.

    getrusage would count what the parent used before this program took its place.
    """
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return 0.0


if __name__ == "__main__":
    main()
