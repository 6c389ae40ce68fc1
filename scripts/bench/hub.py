"""How long downloads take, with huggingface_hub alone and through smartcache.

Usage: python scripts/bench/hub.py [--scale 1.0] [--many 10000] [--folder DIR] [--json] [--small]

The Hub of the tests serves on the loopback, in a process of its own. Each run has a fresh HF cache,
a fresh store and a fresh client process; the clock runs inside it, around the call alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import _measure
from _measure import Table

if TYPE_CHECKING:
    from tests.hub_server import HubProcess

Who = Literal["smartcache", "huggingface_hub"]
Job = Literal["download", "plan"]

BANDWIDTH = 125_000_000
WEIGHTS = {
    "unet/diffusion_pytorch_model.safetensors": 500_000_000,
    "text_encoder_2/model.safetensors": 250_000_000,
    "text_encoder/model.safetensors": 125_000_000,
    "vae/diffusion_pytorch_model.safetensors": 80_000_000,
    "safety_checker/model.safetensors": 35_000_000,
    "image_encoder/model.safetensors": 10_000_000,
}
SMALL_FILES = 10
MODELS = 1000
REPEATED = 300
MANY = 10_000
CALLS = 5
"""Repeated calls in one process, of which the median is taken."""
YOUNG = 2.1
"""A file younger than two seconds is hashed again; real ones are older."""
FIRST, SECOND, WIDE, MANIFOLD = "bench/first", "bench/second", "bench/wide", "bench/many"
NOTES = (
    (
        "Each run has a client process, an HF cache and a store of its own. The clock runs in that"
        " process around the call alone: imports are not counted, opening the store and connecting"
        " are. Requests and bytes are those in the server's log."
    ),
    (
        "smartcache hashes every weight that is new. It is checked that the store knows each by its"
        " sha256 afterwards."
    ),
)
ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True, slots=True)
class Run:
    """What one call took, and what the server saw of it."""

    seconds: float
    later: float
    """The median of further calls in the same process."""
    requests: int
    weights: int
    """Bytes of weights that were sent."""
    unproven: int
    """Weights whose sha256 the store does not know afterwards."""


@dataclass(slots=True)
class Bench:
    """One run of this script: where it works, the server, and the table."""

    room: Path
    hub: HubProcess
    table: Table
    scale: float
    many: int
    number: int = 0
    runs: dict[tuple[str, Who], list[Run]] = field(default_factory=dict)

    def side(self, who: Who) -> Side:
        """Give one side a place where nothing was downloaded yet."""
        self.number += 1
        return Side(self, who, self.room / f"side{self.number}")

    def note(self, key: str, who: Who, run: Run) -> None:
        """Keep a run for the median."""
        self.runs.setdefault((key, who), []).append(run)

    def median(self, key: str, who: Who) -> Run:
        """Return the run whose time is the median."""
        found = sorted(self.runs[key, who], key=lambda run: run.seconds)
        return found[len(found) // 2]


@dataclass(slots=True)
class Side:
    """An HF cache, a store and a home of one client."""

    bench: Bench
    who: Who
    place: Path

    def __enter__(self) -> Self:
        (self.place / "home").mkdir(parents=True)
        return self

    def __exit__(self, *exc: object) -> None:
        shutil.rmtree(self.place)

    def run(self, repo: str, *, job: Job = "download", rate: float | None, calls: int = 0) -> Run:
        """Call the function in a fresh process; `calls`: so many times more afterwards."""
        hub = self.bench.hub
        hub.set(bandwidth=rate)
        if self.bench.scale >= 0.1:
            os.sync()  # what the run before has written is not to be waited for in this one
        hub.clear()
        command = [sys.executable, __file__, "--child", self.who, "--job", job, "--repo", repo]
        done = subprocess.run(
            [*command, "--calls", str(calls)], env=self.environment(), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{self.who} failed with {repo}")
        said = json.loads(done.stdout)
        log = hub.requests
        return Run(
            seconds=said["seconds"], later=said["later"], unproven=said["unproven"],
            requests=len(log) // (1 + calls), weights=log.fetched_bytes(".safetensors"),
        )  # fmt: skip

    def environment(self) -> dict[str, str]:
        """Return an environment that leads nobody out of the room."""
        return self.bench.hub.environment | {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(self.place / "home"),
            "TMPDIR": str(self.place),
            "LC_ALL": "C.UTF-8",
            "PYTHONPYCACHEPREFIX": str(self.bench.room / "compiled"),
            "HF_HOME": str(self.place / "huggingface"),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "SMARTCACHE_HOME": str(self.place / "store"),
        }

    def give(self, folder: Path) -> None:
        """Tell smartcache that a folder is the user's own, so that it may link files in it."""
        command = [sys.executable, "-m", "smartcache", "folders", "add", str(folder)]
        subprocess.run(command, env=self.environment(), check=True, capture_output=True)


def main() -> None:
    """Publish the repos, run all parts, and print one table."""
    arguments = parsed()
    if arguments.child:
        call(arguments.child, arguments.job, arguments.repo, arguments.calls)
        return
    if arguments.small:
        arguments.scale, arguments.many, arguments.rounds = 0.005, 60, 1
    _measure.rounds = arguments.rounds
    sys.path.insert(0, str(ROOT))
    from tests.hub_server import HubProcess

    table = Table("Downloads")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        room = Path(name)
        publish(room / "served", arguments.scale, arguments.many)
        with HubProcess(room / "served") as hub:
            bench = Bench(room, hub, table, arguments.scale, arguments.many)
            for who in ("smartcache", "huggingface_hub"):  # compiles modules
                with bench.side(who) as side:
                    side.run(FIRST, rate=None)
            all_new(bench)
            all_known(bench)
            claimed(bench)
            repeated(bench)
            many_files(bench, arguments.many_rounds)
            describe(bench)
    table.show(as_json=arguments.json)


def parsed() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of bytes and files")
    parser.add_argument("--many", type=int, default=MANY, help="files of the repo with many files")
    parser.add_argument("--rounds", type=int, default=3, help="rounds to take the median of")
    parser.add_argument(
        "--many-rounds", type=int, default=1, help="the same for the repo with many files"
    )
    parser.add_argument("--folder", type=Path, help="where to work (default: the temporary folder)")
    parser.add_argument("--small", action="store_true", help="only see that everything runs")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--child", choices=Who.__args__, help=argparse.SUPPRESS)  # type: ignore[attr-defined]
    parser.add_argument("--job", choices=Job.__args__, help=argparse.SUPPRESS)  # type: ignore[attr-defined]
    parser.add_argument("--repo", help=argparse.SUPPRESS)
    parser.add_argument("--calls", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


# What is served


def publish(served: Path, scale: float, many: int) -> None:
    """Write the repos: two with the same weights, and two with many small files."""
    models = served / "models"
    for number, (name, size) in enumerate(WEIGHTS.items()):
        first, second = (models / repo / name for repo in (FIRST, SECOND))
        write(first, number, max(100_000, int(size * scale)))
        second.parent.mkdir(parents=True)
        os.link(first, second)
    for repo, count in (
        (FIRST, SMALL_FILES), (SECOND, SMALL_FILES), (WIDE, scaled(REPEATED, scale)),
        (MANIFOLD, many),
    ):  # fmt: skip
        for number in range(count):
            text = json.dumps({"repo": repo, "number": number})
            path = models / repo / f"part{number // 100}" / f"config{number}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    write(models / WIDE / "model.safetensors", len(WEIGHTS), 1_000_000)


def scaled(count: int, scale: float) -> int:
    """Return a smaller number of files, but some."""
    return max(20, int(count * scale))


def write(path: Path, seed: int, size: int) -> None:
    """Write noise in pieces, so that this process stays small."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise, left = random.Random(seed), size
    with path.open("wb") as stream:
        while left:
            left -= stream.write(noise.randbytes(min(left, 1 << 20)))


# The client


def call(who: Who, job: Job, repo: str, calls: int) -> None:
    """Call the function of one side, and print what that took. Imports are not counted."""
    work = client(who, job, repo)
    times = []
    for _ in range(1 + calls):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    unproven = unproven_in(repo) if who == "smartcache" and job == "download" else 0
    later = statistics.median(times[1:]) if calls else 0.0
    print(json.dumps({"seconds": times[0], "later": later, "unproven": unproven}))


def client(who: Who, job: Job, repo: str) -> Callable[[], object]:
    """Import all that a call needs, and return the call."""
    import huggingface_hub
    import huggingface_hub.hf_api

    if who == "huggingface_hub":
        function = huggingface_hub.snapshot_download
        return (lambda: function(repo, dry_run=True)) if job == "plan" else lambda: function(repo)
    import smartcache
    import smartcache.folders.scan
    import smartcache.hub.download

    plan, download = smartcache.plan_download, smartcache.snapshot_download
    huggingface_hub.snapshot_download  # noqa: B018 - ours calls it: loaded on both sides
    return (lambda: plan(repo)) if job == "plan" else lambda: download(repo)


def unproven_in(repo: str) -> int:
    """Count the weights of a repo that did not become blobs under their sha256."""
    import huggingface_hub

    from smartcache.functions import shared

    snapshot = Path(huggingface_hub.snapshot_download(repo, local_files_only=True))
    weights = [path.resolve() for path in snapshot.rglob("*.safetensors")]
    store = shared().store
    return sum(store.find("sha256", path.name) is None for path in weights)


# The parts


def all_new(bench: Bench) -> None:
    """Download weights that the machine does not have: with a limit, and as fast as it goes."""
    for _ in range(_measure.rounds):
        for rate in (BANDWIDTH, None):
            for who in sides(bench):
                with bench.side(who) as side:
                    bench.note(f"new {rate}", who, side.run(FIRST, rate=rate))
    size = f"{weight_bytes(bench) / 1e9:.2g} GB"
    compare(bench, f"all new, {size} at 125 MB/s", f"new {BANDWIDTH}", aim=1.05)
    compare(bench, f"all new, {size}, no limit", f"new {None}")


def all_known(bench: Bench) -> None:
    """Download another repo with the same weights: huggingface_hub fetches, smartcache links."""
    for _ in range(_measure.rounds):
        for who in sides(bench):
            with bench.side(who) as side:
                side.run(FIRST, rate=None)
                bench.note("known", who, side.run(SECOND, rate=BANDWIDTH))
    compare(bench, "another repo with the same weights, at 125 MB/s", "known", is_free=True)


def claimed(bench: Bench) -> None:
    """Download weights that ComfyUI has under other names, among a thousand files."""
    folder = bench.room / "ComfyUI"
    make_comfyui(bench, folder)
    for _ in range(_measure.rounds):
        for key in ("found", "given"):
            with bench.side("smartcache") as side:
                models = side.place / "home" / "ComfyUI"
                subprocess.run(["cp", "-a", str(folder), str(models)], check=True)
                time.sleep(YOUNG)
                if key == "given":
                    side.give(models / "models")
                bench.note(key, "smartcache", side.run(FIRST, rate=BANDWIDTH))
    count = scaled(MODELS, bench.scale)
    for key, words in (
        ("found", "files are copied"), ("given", "folder was given, files are linked"),
    ):  # fmt: skip
        bench.runs[key, "huggingface_hub"] = bench.runs[f"new {BANDWIDTH}", "huggingface_hub"]
        job = f"all in a ComfyUI folder of {count:,} files, at 125 MB/s: {words}"
        compare(bench, job, key, is_free=True)


def make_comfyui(bench: Bench, folder: Path) -> None:
    """Write the folder: the weights, for each another file of its size, and many other files."""
    models, count = folder / "models", scaled(MODELS, bench.scale)
    made = 0
    for number, name in enumerate(WEIGHTS):
        source = bench.room / "served" / "models" / FIRST / name
        target = models / "checkpoints" / f"some model {number}.safetensors"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        write(models / "loras" / f"other {number}.safetensors", -1 - number, source.stat().st_size)
        made += 2
    for number in range(made, count):
        write(models / "loras" / f"style {number}.safetensors", 1000 + number, 70_000 + number)


def repeated(bench: Bench) -> None:
    """Call once more when everything is there: in a new process, and in the same one."""
    repos = {FIRST: SMALL_FILES + len(WEIGHTS), WIDE: 1 + scaled(REPEATED, bench.scale)}
    with ExitStack() as stack:
        places = {
            (repo, who): stack.enter_context(bench.side(who))
            for repo in repos
            for who in sides(bench)
        }
        for (repo, _), side in places.items():
            side.run(repo, rate=None)
        time.sleep(YOUNG)
        for _ in range(_measure.rounds):
            for (repo, who), side in places.items():
                bench.note(f"again {repo}", who, side.run(repo, rate=None, calls=CALLS))
    for repo, count in repos.items():
        words = f"repeated call, {count} files"
        compare(bench, f"{words}, in a new process", f"again {repo}", aim=1.1)
        compare(bench, f"{words}, in the same process", f"again {repo}", aim=1.1, is_later=True)


def many_files(bench: Bench, rounds: int) -> None:
    """Plan, download and repeat a repo with very many small files."""
    for _ in range(rounds):
        for who in sides(bench):
            with bench.side(who) as side:
                bench.note("plan many", who, side.run(MANIFOLD, job="plan", rate=None))
                bench.note("many", who, side.run(MANIFOLD, rate=None))
                bench.note("many again", who, side.run(MANIFOLD, rate=None, calls=1))
    files = f"{bench.many:,} small files"
    compare(bench, f"plan {files} (huggingface_hub: dry run)", "plan many")
    compare(bench, f"download {files}", "many")
    compare(bench, f"repeated call, {files}, in a new process", "many again", aim=1.1)
    bench.table.notes.append(f"The rows with {files} are medians of {rounds}.")


def sides(bench: Bench) -> tuple[Who, Who]:
    """Name both sides, with turns in who is first."""
    order: tuple[Who, Who] = ("smartcache", "huggingface_hub")
    return order if bench.number % 4 < 2 else (order[1], order[0])


def weight_bytes(bench: Bench) -> int:
    """Return the bytes of the weights of one repo."""
    folder = bench.room / "served" / "models" / FIRST
    return sum((folder / name).stat().st_size for name in WEIGHTS)


def compare(
    bench: Bench,
    job: str,
    key: str,
    *,
    aim: float | None = None,
    is_free: bool = False,
    is_later: bool = False,
) -> None:
    """Add a row. `is_free`: the aim is that no weight byte is fetched, and to be faster."""
    ours, peer = (bench.median(key, who) for who in ("smartcache", "huggingface_hub"))
    taken = (ours.later, peer.later) if is_later else (ours.seconds, peer.seconds)
    ratio = taken[0] / taken[1]
    text, holds = "", None
    if is_free:
        text, holds = "no weight byte, < 1", ours.weights == 0 and ratio < 1
    elif aim is not None:
        text, holds = f"<= {aim:.2f}", ratio <= aim
    bench.table.add(
        job, shown(ours, taken[0]), peer=f"huggingface_hub: {shown(peer, taken[1])}", ratio=ratio,
        aim=text, holds=holds,
    )  # fmt: skip
    unproven = max(run.unproven for run in bench.runs[key, "smartcache"])
    if unproven:
        bench.table.notes.append(f"{job}: {unproven} weights are not proven.")


def shown(run: Run, seconds: float) -> str:
    """Return time, requests and bytes as a cell of the table."""
    time_text = f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
    weights = f", {run.weights / 1e6:,.0f} MB of weights" if run.weights else ""
    plural = "" if run.requests == 1 else "s"
    return f"{time_text}, {run.requests:,} request{plural}{weights}"


def describe(bench: Bench) -> None:
    """Say what was served and what was measured."""
    import huggingface_hub

    sizes = ", ".join(
        f"{(bench.room / 'served' / 'models' / FIRST / name).stat().st_size / 1e6:.0f}"
        for name in WEIGHTS
    )
    bench.table.notes[:0] = [
        (
            f"huggingface_hub {huggingface_hub.__version__} over plain HTTP. The repo has"
            f" {len(WEIGHTS)} weights ({sizes} MB) and {SMALL_FILES} small files."
        ),
        *NOTES,
    ]


if __name__ == "__main__":
    main()
