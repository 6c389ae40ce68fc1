"""mgds: SmartDiskCache, against a file per item with a JSON index.

Both cache the same items of one small pipeline. Each figure is of a process started anew, which
has imported all it needs when the clock starts; as a program this module is that process.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _measure import Table

STANDINS = Path(__file__).resolve().parents[2] / "tests" / "integrations" / "standins"
OURS, PEER = "smartcache", "file per item"
READ = 5_000
SHAPE = (4, 64, 64)
Figures = dict[str, float]
NOTES = (
    (
        f"mgds: the sources are small files; an item is a latent of {SHAPE} in float16 and its"
        " crop resolution. Starts are of processes anew, with a warm page cache; imports are not"
        " timed. The pipeline is the stand-in of the tests, which asks upstream as mgds does."
    ),
    (
        f"{PEER}: torch.save per item and variation, a JSON index that is read at the start and"
        " written as a whole when a file has changed, the modification time of each source"
        " compared, xxh64 of what differs, torch.load per item. Its aggregates are in the index."
    ),
    (
        "Random items are read for the first time by the process, so checksums are compared."
        " Memory: VmRSS (after gc.collect and malloc_trim) when an epoch has started less that"
        " before, less the same with one item."
    ),
)


def measure(  # noqa: C901 - a row after the other
    table: Table, room: Path, arguments: argparse.Namespace
) -> None:
    """Add the rows of this part."""
    count: int = arguments.count
    _write(room / "sources", count)
    _write(room / "one", 1)
    time.sleep(arguments.wait)
    found: dict[tuple[str, str], list[Figures]] = {}

    def run(part: str, side: str, *, encodes: int, folder: str = "sources") -> None:
        command = [sys.executable, __file__, side, str(room), folder]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SMARTCACHE_")}
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
            check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{side} failed: {part}")
        figures: Figures = json.loads(done.stdout)
        if figures["encodes"] != encodes:
            raise SystemExit(f"{side} encoded {figures['encodes']}, not {encodes}: {part}")
        found.setdefault((part, side), []).append(figures)

    def median(part: str, side: str, figure: str) -> float:
        return statistics.median(each[figure] for each in found[part, side])

    for side in (OURS, PEER):
        run("cold", side, encodes=count)
        run("one", side, encodes=1, folder="one")
        run("one", side, encodes=0, folder="one")
    for turn in range(arguments.rounds):
        for side in (OURS, PEER):
            run("unchanged", side, encodes=0)
        changed = room / "sources" / f"{turn * 7 % count:07}.png"
        changed.write_bytes(b"edited %d" % turn)
        time.sleep(arguments.wait)
        for side in (OURS, PEER):
            run("edited", side, encodes=1)

    name = f"mgds, {count:,} items:"
    rows = (
        (f"{name} first start", "cold", "start", None),
        (f"{name} unchanged start", "unchanged", "start", 0.4),
        (f"{name} start after one edit", "edited", "start", 0.6),
        (f"{name} next epoch", "unchanged", "next", 0.02),
    )
    for job, part, figure, most in rows:
        ours, peer = (median(part, side, figure) for side in (OURS, PEER))
        table.add(
            job, _seconds(ours), peer=f"{PEER}: {_seconds(peer)}", ratio=ours / peer,
            aim="" if most is None else f"<= {_seconds(most)}",
            holds=None if most is None else ours <= most,
        )  # fmt: skip
    for job, figure in (("random items a second", "items"), ("the same items again", "later")):
        ours, peer = (median("unchanged", side, figure) for side in (OURS, PEER))
        table.add(
            f"{name} {job}", f"{ours:,.0f}", peer=f"{PEER}: {peer:,.0f}", ratio=ours / peer,
            aim=">= 3", holds=ours >= 3 * peer,
        )  # fmt: skip
    each = [
        (median("unchanged", side, "memory") - found["one", side][-1]["memory"]) / count
        for side in (OURS, PEER)
    ]
    table.add(
        f"{name} memory per item", f"{each[0]:,.0f} bytes", peer=f"{PEER}: {each[1]:,.0f} bytes",
        ratio=each[0] / each[1], aim="<= 400 bytes" if count >= 10_000 else "",
        holds=each[0] <= 400 if count >= 10_000 else None,
    )  # fmt: skip
    table.notes += NOTES


def _seconds(value: float) -> str:
    return f"{value * 1e3:.1f} ms" if value < 0.1 else f"{value:.2f} s"


def _write(folder: Path, count: int) -> None:
    folder.mkdir()
    for number in range(count):
        (folder / f"{number:07}.png").write_bytes(b"image %d" % number)


# What runs in processes of its own


def child() -> None:
    """Run two epochs of one side, and print what they took."""
    side, room, name = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    sys.path.append(str(STANDINS))
    import torch
    from mgds.PipelineModule import Pipeline, PipelineModule
    from mgds.pipelineModuleTypes.RandomAccessPipelineModule import RandomAccessPipelineModule

    concept = {
        "path": str(room / name), "seed": 1, "enabled": True, "image_variations": 1,
        "balancing": 1.0, "balancing_strategy": "REPEATS", "image": {"flip": False},
    }  # fmt: skip
    paths = sorted(str(path) for path in (room / name).iterdir())
    encodes = 0

    class Sources(PipelineModule, RandomAccessPipelineModule):  # type: ignore[misc]
        def length(self) -> int:
            return len(paths)

        def get_inputs(self) -> list[str]:
            return []

        def get_outputs(self) -> list[str]:
            return ["image_path", "concept"]

        def get_item(self, _: int, index: int, __: str | None = None) -> dict[str, Any]:
            return {"image_path": paths[index], "concept": concept}

    class Encoder(Sources):
        def get_outputs(self) -> list[str]:
            return ["latent_image", "crop_resolution"]

        def get_item(self, _: int, index: int, name: str | None = None) -> dict[str, Any]:
            nonlocal encodes
            if name == "crop_resolution":
                return {"crop_resolution": (512, 512 + 64 * (index % 5))}
            encodes += 1
            bits = torch.full(SHAPE, index, dtype=torch.int16)  # each another one, as latents are
            return {"latent_image": bits.view(torch.float16)}

    cache = _ours(room / f"{name}-ours") if side == OURS else _peer(room / f"{name}-peer")
    pipeline = Pipeline([Sources(), Encoder(), cache])
    before = _memory()
    start = time.perf_counter()
    pipeline.start_next_epoch()
    took = time.perf_counter() - start
    start = time.perf_counter()
    pipeline.start_next_epoch()
    again = time.perf_counter() - start
    memory = _memory() - before
    chosen = random.Random(1).choices(range(len(paths)), k=min(READ, len(paths)))
    start = time.perf_counter()
    for index in chosen:
        cache.get_item(index, "latent_image")
    items = len(chosen) / (time.perf_counter() - start)
    start = time.perf_counter()
    for index in chosen:
        cache.get_item(index, "latent_image")
    later = len(chosen) / (time.perf_counter() - start)
    figures = {"start": took, "next": again, "items": items, "later": later, "memory": memory}
    print(json.dumps({**figures, "encodes": encodes}))


GROUPING: dict[str, Any] = {
    "split_names": ["latent_image"],
    "aggregate_names": ["crop_resolution", "image_path"],
    "variations_in_name": "concept.image_variations",
    "balancing_in_name": "concept.balancing",
    "balancing_strategy_in_name": "concept.balancing_strategy",
    "variations_group_in_name": ["concept.path", "concept.seed", "concept.image"],
    "group_enabled_in_name": "concept.enabled",
}


def _ours(folder: Path) -> Any:  # noqa: ANN401
    import xxhash  # noqa: F401 - used by the artifacts

    from smartcache.integrations.mgds import SmartDiskCache

    return SmartDiskCache(
        cache_dir=str(folder), source_path_in_name="image_path", modeltype="bench",
        encoder_fingerprint=1, bucket_method_provider=lambda: "five buckets", **GROUPING,
    )  # fmt: skip


def _peer(folder: Path) -> Any:  # noqa: ANN401, C901
    """Return what people have today: a file per item, and a JSON index."""
    import torch
    import xxhash
    from mgds.PipelineModule import PipelineModule
    from mgds.pipelineModuleTypes.SingleVariationRandomAccessPipelineModule import (
        SingleVariationRandomAccessPipelineModule as OneVariation,
    )

    folder.mkdir(exist_ok=True)
    names = ("image_variations", "balancing", "balancing_strategy", "enabled", "path", "seed")

    class FilePerItem(PipelineModule, OneVariation):  # type: ignore[misc]
        def length(self) -> int:
            return len(self.paths)

        def get_inputs(self) -> list[str]:
            return []

        def get_outputs(self) -> list[str]:
            return ["latent_image", "crop_resolution"]

        def start(self, _: int) -> None:
            ask: Callable[..., Any] = self._get_previous_item
            count = self._get_previous_length("image_path")
            for index in range(count):
                for name in names:
                    ask(0, f"concept.{name}", index)
            self.paths = [ask(0, "image_path", index) for index in range(count)]
            index_file = folder / "cache.json"
            index = json.loads(index_file.read_text()) if index_file.exists() else {}
            there = {entry.name for entry in os.scandir(folder)}
            has_changed = False
            for number, path in enumerate(self.paths):
                entry, mtime = index.get(path), os.stat(path).st_mtime
                if entry and entry["mtime"] == mtime and f"{entry['file']}_1.pt" in there:
                    continue
                has_changed = True
                digest = xxhash.xxh64(Path(path).read_bytes()).hexdigest()
                wanted = ("latent_image", "crop_resolution")
                value = {name: ask(0, name, number) for name in wanted}
                torch.save(value, folder / f"{digest[:12]}_1.pt")
                index[path] = {
                    "filename": os.path.basename(path), "hash": digest, "mtime": mtime,
                    "modeltype": "bench", "file": digest[:12],
                    "crop_resolution": value["crop_resolution"], "cache_version": 3,
                }  # fmt: skip
            if has_changed:
                temporary = folder / "cache.json.tmp"
                temporary.write_text(json.dumps(index, indent=2))
                temporary.replace(index_file)
            self.index = index
            self.small = {
                (path, 0): {"crop_resolution": index[path]["crop_resolution"], "image_path": path}
                for path in self.paths
            }

        def get_item(self, index: int, requested_name: str | None = None) -> dict[str, Any]:
            path = self.paths[index]
            if requested_name != "latent_image":
                return dict(self.small[path, 0])
            file = folder / f"{self.index[path]['file']}_1.pt"
            found: dict[str, Any] = torch.load(file, weights_only=False, map_location="cpu")
            return found

    return FilePerItem()


def _memory() -> float:
    """Return the bytes that this process has in memory."""
    import ctypes

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return float(line.split()[1]) * 1024
    return 0.0


if __name__ == "__main__":
    child()
