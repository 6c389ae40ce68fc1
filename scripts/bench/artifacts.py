"""How fast computed tensors are kept and read: smartcache, other stores, and the machine's limits.

Usage: python scripts/bench/artifacts.py [--samples 8000] [--entries 1000000] [--only WORD] [--json]

A sample is a latent (128 KiB) and an embedding (115 KiB) of random bits, and a few small values.
Each round fills every store, reads it in several ways, changes it and removes it; all figures are
medians of the rounds. What cannot be imported is named and left out. Needs Linux.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import tempfile
from pathlib import Path

import _artifact_libraries as libraries
import _artifact_parts as parts
import _artifact_stores as files
import _measure
import torch
from _artifact_data import Samples
from _artifact_figures import EQUAL, FIGURES, Figures, measure, memory_of
from _artifact_ours import Memory, Ours, RawFile
from _artifact_stores import Store

SAMPLES = 8000
ENTRIES = 1_000_000
STORES: tuple[type[Store], ...] = (
    Ours,
    files.TorchFiles,
    files.NpzFiles,
    files.SafetensorsFiles,
    files.SafetensorsShards,
    libraries.Lmdb,
    libraries.LmdbReader,
    libraries.DiskCache,
    libraries.LitData,
    libraries.Mosaic,
    RawFile,
    Memory,
)
PARTS = {"writers": parts.writers, "cold": parts.cold, "entries": parts.entries}
AIMS: tuple[tuple[str, type[Store], float | None], ...] = (
    ("batches1", Memory, 0.8),
    ("batches1", RawFile, None),
    ("batches1", files.TorchFiles, 8),
    ("batches1", files.SafetensorsFiles, 3),
    ("batches1", files.SafetensorsShards, 1.5),
    ("batches1", libraries.Lmdb, 1.3),
    ("batches1", libraries.LmdbReader, 1),
    ("batches2", libraries.LmdbReader, 1),
    ("puts", files.TorchFiles, 3),
    ("puts", files.SafetensorsFiles, 2.5),
    ("puts", libraries.Lmdb, 1),
    ("puts", RawFile, 0.6),
)
NOTES = (
    (
        "A batch is 32 random samples, its tensors stacked; the same order for every store."
        " Megabytes are those of the tensors. The page cache is warm but where a row says cold."
        " torch uses one thread; with 2 threads each reads one half of a batch."
    ),
    (
        "smartcache and 'our kind of reader' copy into the memory of the batch before, all others"
        " stack into new memory. 'First epoch': smartcache verifies the checksum of all it reads"
        " for the first time; the rows of batches are after that."
    ),
    (
        "No put waits for the disk. A put that has returned survives the death of the process; not"
        " with shards, LitData and MosaicML streaming, which write when enough has come together."
        " LMDB commits each put, with sync=False."
    ),
    (
        "Puts of one process and of two are timed with the making of the samples in between, puts"
        " one by one without."
    ),
    (
        "Anonymous memory (RssAnon) is what opening and reading 50 batches adds to a process. The"
        " small values of safetensors are in its metadata, those of the shards are kept in memory."
    ),
)


def main() -> None:
    """Run all parts, or those that are asked for, and print the tables."""
    arguments = parsed()
    torch.set_num_threads(1)
    if arguments.child:
        found = child(arguments)
        if found is not None:
            print(json.dumps(found))
        return
    if arguments.quick:
        arguments.samples, arguments.entries, arguments.rounds = 1000, 50_000, 1
    _measure.rounds = arguments.rounds
    table = Figures("Artifacts")
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=arguments.dir) as name:
        all_stores(Path(name), table, arguments.samples, arguments.only)
        for word, part in PARTS.items():
            if is_wanted(word, arguments.only):
                part(
                    Path(name), table, arguments.entries if word == "entries" else arguments.samples
                )
    table.notes.append(
        f"Load average of the machine: {load:.1f} at the start, {os.getloadavg()[0]:.1f} at the end"
        " (1 is this script)."
    )
    table.show(as_json=arguments.json)


def parsed() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=SAMPLES, help="samples in each store")
    parser.add_argument("--entries", type=int, default=ENTRIES, help="small entries of one set")
    parser.add_argument("--rounds", type=int, default=3, help="rounds to take the median of")
    parser.add_argument("--quick", action="store_true", help="few samples and entries, one round")
    words = f"stores whose name has this word, or one of {', '.join(PARTS)}; may be repeated"
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help=words)
    parser.add_argument("--dir", type=Path, help="where to work (default: the temporary folder)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--extra", help=argparse.SUPPRESS)
    return parser.parse_args()


def is_wanted(name: str, only: list[str]) -> bool:
    """Say whether a store or a part is asked for."""
    return not only or any(word.lower() in name.lower() for word in only)


def child(arguments: argparse.Namespace) -> dict[str, float] | None:
    """Do the job of a process that `main` has started."""
    folder, count = arguments.dir, arguments.samples
    if arguments.child == "write":
        parts.write_child(folder, arguments.first, count)
        return None
    if arguments.child == "entries":
        return parts.entries_child(folder, count)
    kind = {kind.__name__: kind for kind in STORES}[arguments.store]
    store = kind(folder, count)
    if arguments.child == "cold" and isinstance(store, Ours | RawFile):
        return parts.cold_child(store, arguments.first, arguments.extra)
    return {"memory": memory_of(store)}


def all_stores(room: Path, table: Figures, count: int, only: list[str]) -> None:
    """Measure every store in every round, then compare."""
    kinds = [kind for kind in STORES if is_wanted(kind.name, only) and has_module(kind, table)]
    samples = Samples()
    for turn in range(_measure.rounds):
        for kind in kinds if turn % 2 == 0 else reversed(kinds):
            table.note(kind.name, measure(kind, room, count, samples))
    for figure, peer, aim in AIMS:
        compare(table, figure, peer.name, aim)
    compare(table, "new", libraries.Lmdb.name, their="batches1")
    tell_who_is_ahead(table)
    for kind in kinds:
        if kind.most and kind.most < count:
            table.notes.append(f"{kind.name}: {kind.most:,} samples, all others have {count:,}.")
    table.notes[:0] = NOTES if kinds else ()


def has_module(kind: type[Store], table: Figures) -> bool:
    """Say whether a store can be measured; if not, the table says what to install."""
    if not kind.module:
        return True
    try:
        importlib.import_module(kind.module)
    except (ImportError, OSError, RuntimeError) as error:
        reason = "" if isinstance(error, ModuleNotFoundError) else f" ({error})"
        note = f"Left out: {kind.name}{reason}; pip install {kind.package}"
        table.notes.append(note)
        return False
    return True


def compare(
    table: Figures, name: str, peer: str, aim: float | None = None, *, their: str = ""
) -> None:
    """Add a row, if both were measured; `their`: the peer's figure, where it has another name."""
    figure = FIGURES[name]
    ours, theirs = table.median(Ours.name, name), table.median(peer, their or name)
    if ours is None or theirs is None:
        return
    ratio = ours / theirs
    table.add(
        figure.title, figure.shown(ours), peer=f"{peer}: {figure.shown(theirs)}", ratio=ratio,
        aim="" if aim is None else f">= {aim:g}", holds=None if aim is None else ratio >= aim,
    )  # fmt: skip


def tell_who_is_ahead(table: Figures) -> None:
    """Note for each figure which peers are as good as smartcache, or better."""
    limits = {kind.name for kind in STORES if kind.is_limit}
    for name, figure in FIGURES.items():
        ours = table.median(Ours.name, name)
        if ours is None:
            continue
        better: list[str] = []
        equal: list[str] = []
        for peer in table.stores:
            theirs = table.median(peer, name)
            if theirs is None or peer in limits or peer == Ours.name:
                continue
            lead = ours / theirs if figure.is_less_better else theirs / ours
            if lead >= 1 - EQUAL:
                words = f"{peer} ({figure.shown(theirs)})"
                (equal if lead <= 1 + EQUAL else better).append(words)
        said = [f"ahead are {', '.join(better)}"] if better else []
        said += [f"equal are {', '.join(equal)}"] if equal else []
        if said:
            table.notes.append(f"{figure.title}, {figure.shown(ours)}: {'; '.join(said)}.")


if __name__ == "__main__":
    main()
