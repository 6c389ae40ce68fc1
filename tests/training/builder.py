"""A process that builds a dataset, does what it was told, and says what it has done.

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
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from blake3 import blake3

from smartcache import SmartCache
from smartcache.progress import Job, Unit, silent
from smartcache.training import BuildReport, Dataset, Encoder, Item, Sources
from smartcache.training import look as look_module

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
    """A started process: forked, or with an interpreter of its own."""

    def __init__(
        self,
        world: World,
        *,
        spawned: bool = False,
        env: dict[str, str] | None = None,
        **orders: Any,  # noqa: ANN401 - the arguments of `work`
    ) -> None:
        self._status: int | None = None
        theirs, self._told = os.pipe()
        heard, said = os.pipe()
        self._heard = os.fdopen(heard, encoding="utf-8")
        if spawned:
            given = json.dumps(asdict(world) | {"orders": orders})
            command = [sys.executable, "-m", "tests.training.builder", given]
            environment = {**os.environ, **(env or {})}
            process = subprocess.Popen(
                command, cwd=HERE, stdin=theirs, stdout=said, env=environment
            )  # fmt: skip
            self.pid = process.pid
            process.returncode = 0  # it is this class that waits for it
        else:
            self.pid = os.fork()
            if self.pid == 0:
                os.close(self._told)
                os.environ.update(env or {})
                _run(world, orders, theirs, said)
        os.close(theirs)
        os.close(said)

    def hear(self) -> Any:  # noqa: ANN401 - what it says
        """Return the next thing that it says; AssertionError if it has ended."""
        line = self._heard.readline()
        assert line, f"the process has ended: {self._wait()}"
        return json.loads(line)

    def tell(self) -> None:
        """Let it go on."""
        os.write(self._told, b"\n")

    def report(self) -> Any:  # noqa: ANN401
        """Wait for its end; return what it says last."""
        said = self.hear()
        assert self._wait() == 0
        return said

    def kill(self) -> None:
        """Kill it, and wait until it is dead."""
        os.kill(self.pid, signal.SIGKILL)
        assert self.was_killed()

    def was_killed(self) -> bool:
        """Wait for its end; say whether SIGKILL has ended it."""
        return self._wait() == -signal.SIGKILL

    def interrupt(self) -> None:
        """Send it Ctrl-C, and wait until it has ended by that."""
        os.kill(self.pid, signal.SIGINT)
        assert self._wait() == -signal.SIGINT

    def _wait(self) -> int:
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
            self._wait()
        os.close(self._told)
        self._heard.close()


def _run(world: World, orders: dict[str, Any], told: int, said: int) -> None:
    """Work in a forked process; never returns into the test that forked it."""
    code = 1
    try:
        sys.stdin, sys.stdout = os.fdopen(told), os.fdopen(said, "w")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        work(world, **orders)
        code = 0
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001 - whatever it is, it is told
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


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
    signal.signal(signal.SIGINT, signal.default_int_handler)
    given = json.loads(sys.argv[1])
    orders = given.pop("orders")
    work(World(**given), **orders)


if __name__ == "__main__":
    main()
