"""A process of its own that builds a dataset, does what it was told, and says what it has done.

    python -m tests.training.builder '{"folder": "...", "batch": 8}'

Every item that an encoder is called for is a line in a log that all processes append to: so that a
test knows what was encoded how often, whoever was killed when. Outputs say what they were made of.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from blake3 import blake3

from smartcache import SmartCache
from smartcache.training import BuildReport, Dataset, Encoder, Item, Sources
from smartcache.training import look as look_module
from tests.api import Job, Unit, silent

HERE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class World:
    """Where everything is, and how a dataset in it is opened."""

    folder: str
    name: str = "photos"
    batch: int = 1
    variations: int = 1
    version: int = 0
    buckets: str | None = None
    texts: bool = False
    """There is an output of the captions, too."""
    shared: str | None = None
    threads: int = 2

    @property
    def store(self) -> Path:
        return Path(self.folder) / "store"

    @property
    def photos(self) -> Path:
        return Path(self.folder) / self.name

    @property
    def log(self) -> Path:
        return Path(self.folder) / "encoded"

    def but(self, **changes: Any) -> Self:  # noqa: ANN401 - those of the fields
        return replace(self, **changes)

    def fill(self, count: int, first: int = 0) -> None:
        """Write images, all different, with captions if they are asked for."""
        self.photos.mkdir(exist_ok=True)
        for number in range(first, first + count):
            self.write(f"{number:05}.png", f"image {number}")
            if self.texts:
                (self.photos / f"{number:05}.txt").write_text(f"caption {number}", "utf-8")

    def write(self, name: str, content: str, size: tuple[int, int] = (64, 64)) -> Path:
        """Write what has the header of an image."""
        path = self.photos / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image(content, size))
        return path

    def open(self, cache: SmartCache, **how: Any) -> Dataset:  # noqa: ANN401
        """Open the dataset; encoders do what `how` says."""
        sidecars = {"caption": ".txt"} if self.texts else None
        outputs: dict[str, Any] = {
            "latent": Encoder(
                Logged("latent", self, **how), reads="file", depends_on="vae",
                version=self.version, batch=self.batch, variations=self.variations,
                buckets=self.buckets, shared=self.shared,
            )
        }  # fmt: skip
        if self.texts:
            outputs["text"] = Encoder(
                Logged("text", self, **how),
                reads="caption",
                depends_on="clip",
                version=self.version,
                batch=self.batch,
            )
        return cache.dataset(self.name, Sources(self.photos, sidecars=sidecars), **outputs)

    def encodes(self) -> Counter[str]:
        """Return how often every item was encoded, by all processes: "latent 00001.png 0"."""
        return Counter(" ".join(line.split()[1:]) for line in self._lines())

    def encodes_by_process(self) -> Counter[int]:
        """Return how many items every process has encoded."""
        return Counter(int(line.split()[0]) for line in self._lines())

    def _lines(self) -> list[str]:
        if not self.log.exists():
            return []
        lines = self.log.read_text("utf-8").splitlines()
        assert all(len(line.split()) == 4 for line in lines), "torn"
        return lines


def image(content: str, size: tuple[int, int] = (64, 64)) -> bytes:
    """Return the header of a PNG of some size, and what tells it from others."""
    edges = b"".join(edge.to_bytes(4, "big") for edge in size)
    return b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + edges + content.encode()


def value_of(
    content: bytes | str | None, *, bucket: tuple[int, int] | None = None, variation: int = 0,
    version: int = 0,
) -> np.ndarray[Any, Any]:  # fmt: skip
    """Return what is made of some content: wrong sharing shows."""
    given = repr((content, bucket, variation, version)).encode()
    return np.frombuffer(blake3(given).digest(), np.uint8).copy()


@dataclass
class Clock:
    """The time, as looks at sources see it: who is ahead takes no file for written just now.

    Such a file is read again by the next look. Nobody else is ahead: packs are younger than that.
    """

    ahead: float = 0

    def time_ns(self) -> int:
        return time.time_ns() + int(self.ahead * 1e9)

    def monotonic(self) -> float:
        return time.monotonic()


class Logged:
    """An encoder that writes down what it is called for, before it does it."""

    def __init__(
        self,
        output: str,
        world: World,
        *,
        pause: float = 0,
        die_at: int = 0,
        hang_at: int = 0,
        bad: Sequence[str] = (),
    ) -> None:
        self.output = output
        self.world = world
        self.pause = pause
        """Seconds that every call takes."""
        self.die_at = die_at
        """The process kills itself when so many items were to be encoded."""
        self.hang_at = hang_at
        """The same, but it says so and waits for ever."""
        self.bad = frozenset(bad)
        self.count = 0

    def __call__(self, items: list[Item]) -> list[object]:
        lines = "".join(
            f"{os.getpid()} {self.output} {item.name} {item.variation}\n" for item in items
        )
        log = os.open(self.world.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(log, lines.encode())
        os.close(log)
        self.count += len(items)
        if self.die_at and self.count >= self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.hang_at and self.count >= self.hang_at:
            say("hangs")
            time.sleep(3600)
        time.sleep(self.pause)
        return [self._value(item) for item in items]

    def _value(self, item: Item) -> object:
        if item.name in self.bad:
            return ValueError("no good")
        content = item.bytes() if self.output == "latent" else item.get("caption")
        return value_of(
            content, bucket=item.bucket, variation=item.variation, version=self.world.version
        )


def report_of(report: BuildReport) -> dict[str, Any]:
    """Return a report as plain values."""
    return {
        "encoded": report.encoded, "reused": report.reused, "shared": report.shared,
        "elsewhere": report.elsewhere, "failed": [list(each) for each in report.failed],
    }  # fmt: skip


# the process


class Builder:
    """A started process."""

    def __init__(
        self, world: World, *, env: dict[str, str] | None = None, **orders: object
    ) -> None:
        """Start it; `orders` are the arguments of `work`."""
        given = json.dumps(asdict(world) | {"orders": orders})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.training.builder", given], cwd=HERE,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **(env or {})},
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    def hear(self) -> Any:  # noqa: ANN401 - what it says
        """Return the next thing that it says; AssertionError if it has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the process has ended: {self._process.wait()}"
        return json.loads(line)

    def kill(self) -> None:
        """Kill it, and wait until it is dead."""
        self._process.send_signal(signal.SIGKILL)
        assert self._process.wait() == -signal.SIGKILL

    def was_killed(self) -> bool:
        """Wait for its end; say whether SIGKILL has ended it."""
        return self._process.wait() == -signal.SIGKILL

    def tell(self) -> None:
        """Let it go on."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def report(self) -> Any:  # noqa: ANN401
        """Wait for its end; return what it says last."""
        said = self.hear()
        assert self._process.wait() == 0
        return said

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def say(what: object) -> None:
    """Tell the test something."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


class _Watched(Job):
    """A job that does something at its first step."""

    __slots__ = ("_act",)

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def advance(self, amount: int = 1) -> None:
        if amount:
            self._act()


class _Reading:
    """Tells, dies or waits when the first file is read; counts the jobs in which files are."""

    def __init__(self, on_reading: str) -> None:
        self.on_reading = on_reading
        self.has_read = False

    def __call__(self, label: str, total: int | None = None, unit: Unit = "items") -> Job:
        is_reading = label in ("Hashing", "Reading texts")
        return _Watched(self._act) if is_reading else silent(label, total, unit)

    def _act(self) -> None:
        is_first, self.has_read = not self.has_read, True
        if is_first and self.on_reading:
            say("reading")
            if self.on_reading == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.on_reading == "wait":
                sys.stdin.readline()


def work(
    world: World,
    *,
    what: str = "build",
    on_reading: str = "",
    says_waiting: bool = False,
    is_held: bool = False,
    is_later: bool = False,
    descriptors: int = 0,
    **how: Any,  # noqa: ANN401 - what the encoders do
) -> None:
    """Build, or plan; say what came of it."""
    if is_later:
        look_module.time = Clock(ahead=60)  # type: ignore[assignment,attr-defined]
    if descriptors:
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    if says_waiting:
        hearing = logging.Handler()
        hearing.emit = lambda record: say("waits")  # type: ignore[method-assign]
        logger = logging.getLogger("smartcache.training.look")
        logger.setLevel(logging.INFO)
        logger.addHandler(hearing)
    with SmartCache(world.store) as cache, world.open(cache, **how) as dataset:
        reading = _Reading(on_reading)
        if what == "plan":
            plan = dataset.plan(reading)
            say({"items": plan.items, "encode": plan.encode, "has_read": reading.has_read})
            return
        plan = dataset.plan(reading)
        if is_held:
            say("planned")
            sys.stdin.readline()
        say(report_of(plan.execute()) | {"items": len(dataset)})


def main() -> None:
    given = json.loads(sys.argv[1])
    orders = given.pop("orders")
    work(World(**given), **orders)


if __name__ == "__main__":
    main()
