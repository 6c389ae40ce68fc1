"""How long pipelines take to load and what memory they take: diffusers alone, and smartcache.

Usage: python scripts/bench/pretrained.py [--rounds 3] [--folder DIR] [--cached] [--json] [--small]

Two Stable Diffusion pipelines with the same text encoder and VAE lie on the Hub of the tests, which
serves on the loopback in a process of its own: tiny ones, and ones of 416 MB. The libraries are
imported once; each measurement is a fork of that process, with an HF cache and a store of its own.
The clock runs in it around the call alone, and the Hub's log is that of the call. Needs Linux.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, ParamSpec, TypeVar, cast

import _measure
from _measure import Table

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from diffusers import DiffusionPipeline

    from tests.hub_server import HubProcess

P = ParamSpec("P")
T = TypeVar("T")
Who = Literal["smartcache", "diffusers"]
Way = Literal["plain", "flag", "function", "shared", "passed"]
"""How a pipeline is loaded: by diffusers alone; with `smart_cache=True`; by
`smartcache.from_pretrained`; with `smart_cache_share=True`; by diffusers, given encoder and VAE."""

BANDWIDTH = 125_000_000
SHARED = ("text_encoder", "vae")
CALLS = 5
"""Further loads in one process, of which the median is taken."""
YOUNG = 2.1
"""A file younger than two seconds is hashed again; real ones are older."""
MODULES = (
    "diffusers.models.autoencoders.autoencoder_kl",
    "diffusers.models.unets.unet_2d_condition",
    "diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion",
    "diffusers.schedulers.scheduling_ddim",
    "transformers.models.clip.modeling_clip",
    "transformers.models.clip.tokenization_clip",
    "smartcache.folders.scan",
    "smartcache.hub.answering",
    "smartcache.pretrained.api",
    "smartcache.pretrained.flag",
)
"""What a load imports when it is the first one."""
ROOT = Path(__file__).resolve().parent.parent.parent
NOTES = (
    (
        "Each measurement is a process of its own. Libraries are imported before, and a tiny"
        " pipeline was loaded from a folder; opening the store and connecting are counted."
        " Requests and bytes are those in the Hub's log, of the call that is timed."
    ),
    (
        "What was fetched is hashed by smartcache; it is checked that the store knows every weight"
        " by its sha256 afterwards. Of shared components it is checked that they are one object."
    ),
    (
        "'Its new weights alone': diffusers gets `text_encoder=` and `vae=` of the first pipeline,"
        " so that it need not load them."
    ),
    (
        "Memory is what both pipelines add to the process when every weight was read once:"
        " anonymous memory, and the pages of weight files that are mapped (Pss of /proc/self/smaps,"
        " in which a page counts once however often it is mapped). Weights that are loaded as they"
        " are stored lie in such a mapping; what is converted is anonymous. The peak is VmHWM, less"
        " what it was before; there a page counts as often as it is mapped."
    ),
)


@dataclass(frozen=True, slots=True)
class Run:
    """What one load took, and what the server saw of it."""

    seconds: float
    later: float = 0.0
    """The median of further loads in the same process."""
    requests: int = 0
    weights: int = 0
    """Bytes of weights that were sent."""
    encoders: int = 0
    """Those of the text encoder and the VAE among them."""
    unproven: int = 0
    """Weights whose sha256 the store does not know afterwards."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Megabytes that both pipelines add to a process."""

    mapped: float
    """Pages of files, each once."""
    anonymous: float
    peak: float

    @property
    def held(self) -> float:
        """Both together."""
        return self.mapped + self.anonymous

    def __str__(self) -> str:
        return f"{self.held:.0f} MB ({self.anonymous:.0f} anonymous), peak {self.peak:.0f} MB"


@dataclass(slots=True)
class Bench:
    """One run of this script: where it works, the server, the table, and the size at hand."""

    room: Path
    hub: HubProcess
    table: Table
    is_small: bool
    """Only to see that everything runs."""
    size: str = "tiny"
    rate: float | None = None
    number: int = 0
    turn: bool = False
    runs: dict[tuple[str, Who], list[Run]] = field(default_factory=dict)

    @property
    def first(self) -> str:
        """The repo of the first pipeline."""
        return f"{self.size}/first"

    @property
    def second(self) -> str:
        """The repo of the second one."""
        return f"{self.size}/second"

    @contextmanager
    def side(self, who: Who) -> Iterator[Side]:
        """Give one side a place where nothing was downloaded yet."""
        self.number += 1
        place = self.room / f"side{self.number}"
        (place / "home").mkdir(parents=True)
        try:
            yield Side(self, who, place)
        finally:
            shutil.rmtree(place)

    def note(self, key: str, who: Who, run: Run) -> None:
        """Keep a run for the median."""
        self.runs.setdefault((f"{self.size} {key}", who), []).append(run)

    def median(self, key: str, who: Who) -> Run:
        """Return the run whose time is the median; further loads have their own."""
        found = sorted(self.runs[f"{self.size} {key}", who], key=lambda run: run.seconds)
        return replace(found[len(found) // 2], later=statistics.median(run.later for run in found))


@dataclass(slots=True)
class Side:
    """An HF cache, a store and a home of one client."""

    bench: Bench
    who: Who
    place: Path

    def measure(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `work` in a fork of this process that has only this place; return its answer."""
        if self.bench.size != "tiny":
            os.sync()  # what was written before is not to be waited for in the measurement
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        task = functools.partial(work, *args, **kwargs)
        child = context.Process(target=self._answer, args=(sender, task))
        child.start()
        sender.close()
        try:
            answer: T = receiver.recv()
        except EOFError:
            raise SystemExit(f"{self.who} failed with the {self.bench.size} pipelines") from None
        child.join()
        return answer

    def _answer(self, sender: Connection[object, object], task: Callable[[], object]) -> None:
        import smartcache

        os.environ.update(HOME=str(self.place / "home"), TMPDIR=str(self.place))
        os.environ["SMARTCACHE_HOME"] = str(self.place / "store")
        if not self.bench.is_small:
            load_something(self.bench.room / "tiny" / "first")
        if self.who == "smartcache":
            smartcache.enable()
        sender.send(task())

    def load(self, repo: str, way: Way, **more: object) -> DiffusionPipeline:
        """Load a pipeline in one of the ways."""
        from diffusers import DiffusionPipeline

        import smartcache

        function: Callable[..., DiffusionPipeline] = DiffusionPipeline.from_pretrained
        if way == "function":
            function = cast("Callable[..., DiffusionPipeline]", smartcache.from_pretrained)
        elif way == "shared":
            more |= {"smart_cache": True, "smart_cache_share": True}
        elif way == "flag":
            more["smart_cache"] = True
        return function(repo, cache_dir=self.place / "hub", **more)

    def timed(self, repo: str, way: Way, *, calls: int = 0, **more: object) -> Run:
        """Load a pipeline with the clock running, and `calls` times more."""
        hub, times = self.bench.hub, []
        hub.set(bandwidth=self.bench.rate)
        hub.clear()
        for _ in range(1 + calls):
            gc.collect()
            start = time.perf_counter()
            pipeline = self.load(repo, way, **more)
            times.append(time.perf_counter() - start)
            del pipeline
        log = hub.requests
        return Run(
            seconds=times[0],
            later=statistics.median(times[1:]) if calls else 0.0,
            requests=len(log) // (1 + calls),
            weights=log.fetched_bytes(".safetensors"),
            encoders=sum(
                each.sent
                for each in log.gets(".safetensors")
                if str(each.file).split("/")[2] in SHARED
            ),
            unproven=0 if way in ("plain", "passed") else self.unproven(repo),
        )

    def unproven(self, repo: str) -> int:
        """Count the weights of a repo that did not become blobs under their sha256."""
        from smartcache.functions import shared

        folder = self.place / "hub" / f"models--{repo.replace('/', '--')}" / "snapshots"
        names = {path.resolve().name for path in folder.rglob("*.safetensors")}
        store = shared().store
        return sum(store.find("sha256", name) is None for name in names)


def main() -> None:
    """Make and publish the pipelines, run all parts, and print one table."""
    arguments = parsed()
    sizes = ("tiny",) if arguments.small else ("tiny", "large")
    _measure.rounds = 1 if arguments.small else arguments.rounds
    sys.path.insert(0, str(ROOT))
    from tests.hub_server import HubProcess

    table = Table("Loading pipelines")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        room = Path(name)
        publish(room, sizes, arguments.tiny)
        with HubProcess(room / "served") as hub:
            import_libraries(hub.environment, room)
            bench = Bench(room, hub, table, is_small=arguments.small)
            for bench.size in sizes:
                if not arguments.cached:
                    fetched(bench)
                    fetched_beside_the_first(bench)
                in_the_cache(bench, with_memory=bench.size == sizes[-1])
            describe(bench)
    table.show(as_json=arguments.json)


def parsed() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds to take the median of")
    parser.add_argument("--folder", type=Path, help="where to work (default: the temporary folder)")
    parser.add_argument("--tiny", type=Path, help="where the tiny pipelines are (default: made)")
    parser.add_argument("--small", action="store_true", help="only see that everything runs")
    parser.add_argument("--cached", action="store_true", help="only load what is in the cache")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args()


# What is served, and the client


def publish(room: Path, sizes: tuple[str, ...], tiny: Path | None) -> None:
    """Make the pipelines of each size and lay them out as repos."""
    if tiny is None:
        _run("-m", "tests.hub_server.pipelines", room / "tiny")
    else:
        (room / "tiny").symlink_to(tiny.resolve())
    if "large" in sizes:
        _run(ROOT / "scripts/bench/_models.py", room / "large")
    for size in sizes:
        for name in ("first", "second"):
            link = room / "served" / "models" / size / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(room / size / name)


def _run(*words: str | Path) -> None:
    """Run Python apart: the libraries must not be in this process yet, nor any thread."""
    subprocess.run([sys.executable, *map(str, words)], cwd=ROOT, check=True, capture_output=True)


def import_libraries(environment: dict[str, str], room: Path) -> None:
    """Import all that a load needs, and start no thread: this process is forked."""
    os.environ.update(environment)
    os.environ |= {
        "HF_HOME": str(room / "nothing"),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "DIFFUSERS_VERBOSITY": "error",
    }
    for name in MODULES:
        importlib.import_module(name)
    import diffusers
    import transformers

    for library in (diffusers.utils.logging, transformers.utils.logging):
        library.disable_progress_bar()
    gc.collect()
    gc.freeze()


def load_something(folder: Path) -> None:
    """Load another pipeline first, as a program at work has: not everything is new then."""
    from diffusers import DiffusionPipeline

    DiffusionPipeline.from_pretrained(folder)
    gc.collect()


# The parts


def fetched(bench: Bench) -> None:
    """Load the first pipeline, then the second in another process; both come from the Hub."""
    rates = (None,) if bench.size == "tiny" else (BANDWIDTH, None)
    for bench.rate in rates:
        for _ in range(_measure.rounds):
            for who in turns(bench):
                way: Way = "plain" if who == "diffusers" else "flag"
                with bench.side(who) as side:
                    for key, repo in (("new", bench.first), ("second", bench.second)):
                        bench.note(f"{key} {bench.rate}", who, side.measure(side.timed, repo, way))
        speed = f"at {bench.rate / 1e6:.0f} MB/s" if bench.rate else "no limit"
        compare(bench, f"first load from the Hub, all new, {speed}", f"new {bench.rate}")
        job = f"second pipeline from the Hub, {speed}"
        compare(bench, job, f"second {bench.rate}", is_free=True)


def fetched_beside_the_first(bench: Bench) -> None:
    """Load the second pipeline from the Hub while the first one is held."""
    bench.rate = None if bench.size == "tiny" else BANDWIDTH
    for _ in range(_measure.rounds):
        for who in turns(bench):
            with bench.side(who) as side:
                bench.note("beside", who, side.measure(beside_the_first, side))
    speed = f" at {bench.rate / 1e6:.0f} MB/s" if bench.rate else ""
    job = f"second pipeline from the Hub{speed}, share=True, against its new weights alone"
    compare(bench, job, "beside", aim=1.1)


def in_the_cache(bench: Bench, *, with_memory: bool) -> None:
    """Load pipelines that are in the cache, measuring time, and for one size memory."""
    bench.rate = None
    with bench.side("smartcache") as ours, bench.side("diffusers") as theirs:
        for side in (ours, theirs):
            side.measure(fill, side)
        if not bench.is_small:
            time.sleep(YOUNG)
        cached(bench, ours, theirs)
        if with_memory:
            for dtype in ("float32",) if bench.is_small else ("float32", "float16"):
                memory(bench, ours, theirs, dtype)


def cached(bench: Bench, ours: Side, theirs: Side) -> None:
    """Load the first pipeline again and again, and the second one beside it."""
    keys = ("again", "function", "beside cached")
    for _ in range(_measure.rounds):
        for who in turns(bench):
            side = ours if who == "smartcache" else theirs
            for key, run in zip(keys, side.measure(repeated, side), strict=True):
                bench.note(key, who, run)
    words = "pipeline that is cached"
    for key, call in (("again", "the flag"), ("function", "smartcache.from_pretrained")):
        compare(bench, f"{words}, {call}, first load", key, aim=1.1)
        compare(bench, f"{words}, {call}, further loads", key, aim=1.1, is_later=True)
    job = "second pipeline that is cached, share=True, against its new weights alone"
    compare(bench, f"{job}, first load", "beside cached", aim=1.1)
    compare(bench, f"{job}, further loads", "beside cached", aim=1.1, is_later=True)
    shared_alone(bench, ours, theirs)


def shared_alone(bench: Bench, ours: Side, theirs: Side) -> None:
    """Load the first pipeline with sharing while nothing is shared yet."""
    import torch

    aim = 1.3 if bench.size == "tiny" else 1.2
    for words, more in ((", ", {}), (", float16, ", {"dtype": torch.float16})):
        key = f"shared{words}"
        calls = 1 if bench.is_small else CALLS
        for _ in range(_measure.rounds):
            for who in turns(bench):
                side, way = (ours, "shared") if who == "smartcache" else (theirs, "plain")
                run = side.measure(side.timed, bench.first, cast("Way", way), calls=calls, **more)
                bench.note(key, who, run)
        job = f"pipeline that is cached, share=True, nothing shared yet{words}"
        compare(bench, f"{job}first load", key, aim=aim)
        compare(bench, f"{job}further loads", key, aim=aim, is_later=True)


def fill(side: Side) -> None:
    """Have both pipelines in the cache, and loaded once with every way of this side."""
    for repo in (side.bench.first, side.bench.second):
        side.load(repo, "plain" if side.who == "diffusers" else "flag")


def repeated(side: Side) -> list[Run]:
    """Load the first pipeline several times, then the second one beside it."""
    ways: tuple[Way, ...] = ("plain", "plain")
    if side.who == "smartcache":
        ways = ("flag", "function")
    calls = 1 if side.bench.is_small else CALLS
    runs = [side.timed(side.bench.first, way, calls=calls) for way in ways]
    return [*runs, beside_the_first(side, calls=calls)]


def beside_the_first(side: Side, *, calls: int = 0) -> Run:
    """Load the second pipeline while the first one lives: sharing, or given what it has."""
    bench = side.bench
    if side.who == "diffusers":
        first = side.load(bench.first, "plain")
        parts = {name: getattr(first, name) for name in SHARED}
        return side.timed(bench.second, "passed", calls=calls, **parts)
    first = side.load(bench.first, "shared")
    run = side.timed(bench.second, "shared", calls=calls)
    second = side.load(bench.second, "shared")
    if any(getattr(first, name) is not getattr(second, name) for name in SHARED):
        raise SystemExit("the components are not shared")
    return run


def memory(bench: Bench, ours: Side, theirs: Side, dtype: str) -> None:
    """Hold both pipelines: loaded by diffusers, with the flag, and sharing."""
    ways: tuple[Way, ...] = ("plain", "flag", "shared")
    found: dict[Way, list[Memory]] = {way: [] for way in ways}
    for _ in range(_measure.rounds):
        for way in ways:
            side = theirs if way == "plain" else ours
            found[way].append(side.measure(held, side, way, dtype))
    middle = {
        way: sorted(runs, key=lambda run: run.held)[len(runs) // 2] for way, runs in found.items()
    }
    for way, words in zip(ways[1:], ("not shared", "share=True"), strict=True):
        bench.table.add(
            f"{bench.size}: memory of both pipelines, {dtype}, {words}",
            str(middle[way]), peer=f"diffusers: {middle['plain']}",
            ratio=middle[way].held / middle["plain"].held,
        )  # fmt: skip


def held(side: Side, way: Way, dtype: str) -> Memory:
    """Load both pipelines, read every weight once, and say what that takes."""
    import torch

    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM begins anew
    before, peak = anonymous(), high_water()
    repos = (side.bench.first, side.bench.second)
    loaded = [side.load(repo, way, dtype=getattr(torch, dtype)) for repo in repos]
    for pipeline in loaded:
        for part in pipeline.components.values():
            for weights in part.parameters() if isinstance(part, torch.nn.Module) else ():
                weights.sum()
    gc.collect()
    return Memory(
        mapped=mapped_below(side.place), anonymous=anonymous() - before, peak=high_water() - peak
    )


def anonymous() -> float:
    """Return the memory of this process that is no file's, in megabytes."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) * 1024 / 1e6


def mapped_below(folder: Path) -> float:
    """Return how much of the files in a folder this process has mapped and read, in megabytes."""
    found, is_below = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if not line.partition(" ")[0].endswith(":"):
            is_below = str(folder) in line
        elif is_below and line.startswith("Pss:"):
            found += int(line.split()[1])
    return found * 1024 / 1e6


def high_water() -> float:
    """Return the largest resident size so far, in megabytes."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024 / 1e6
    return 0.0


def turns(bench: Bench) -> tuple[Who, Who]:
    """Name both sides, with turns in who is first."""
    order: tuple[Who, Who] = ("smartcache", "diffusers")
    bench.turn = not bench.turn
    return order if bench.turn else (order[1], order[0])


def compare(
    bench: Bench,
    job: str,
    key: str,
    *,
    aim: float | None = None,
    is_free: bool = False,
    is_later: bool = False,
) -> None:
    """Add a row. `is_free`: the aim is that no byte of encoders is fetched, and to be faster."""
    ours, peer = (bench.median(key, who) for who in ("smartcache", "diffusers"))
    taken = (ours.later, peer.later) if is_later else (ours.seconds, peer.seconds)
    ratio = taken[0] / taken[1]
    text, holds = "", None
    if is_free:
        text, holds = "no byte of the encoders", ours.encoders == 0
    elif aim is not None:
        text, holds = f"<= {aim:.2f}", ratio <= aim
    job = f"{bench.size}: {job}"
    bench.table.add(
        job, shown(ours, taken[0]), peer=f"diffusers: {shown(peer, taken[1])}", ratio=ratio,
        aim=text, holds=holds,
    )  # fmt: skip
    unproven = max(run.unproven for run in bench.runs[f"{bench.size} {key}", "smartcache"])
    if unproven:
        bench.table.notes.append(f"{job}: {unproven} weights are not proven.")


def shown(run: Run, seconds: float) -> str:
    """Return time, requests and bytes as a cell of the table."""
    time_text = f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
    weights = f", {run.weights / 1e6:,.1f} MB of weights" if run.weights else ""
    plural = "" if run.requests == 1 else "s"
    return f"{time_text}, {run.requests:,} request{plural}{weights}"


def describe(bench: Bench) -> None:
    """Say what was served and what was measured."""
    import diffusers
    import huggingface_hub
    import torch
    import transformers

    libraries = (diffusers, transformers, huggingface_hub, torch)
    versions = ", ".join(f"{each.__name__} {each.__version__}" for each in libraries)
    names = ("tiny",) if bench.is_small else ("tiny", "large")
    sizes = "; ".join(f"{size}: {weights_of(bench, size)}" for size in names)
    bench.table.notes[:0] = [f"{versions}. Weights in MB: {sizes}.", *NOTES]


def weights_of(bench: Bench, size: str) -> str:
    """Return the sizes of a pipeline's weights."""
    paths = sorted((bench.room / size / "first").rglob("*.safetensors"))
    return ", ".join(f"{path.parent.name} {path.stat().st_size / 1e6:.1f}" for path in paths)


if __name__ == "__main__":
    main()
