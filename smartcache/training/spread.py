"""Spread the encoding of one output over the workers of an engine.

The process that builds is the only one that writes to the set. It claims what is missing, cuts it
into tasks, and hears what has become of them. A worker gets the encoder once, and with every task
the rows of the listing that it needs: names, texts, metadata and what the content has to be. It
reads the files by itself, puts what it makes into a *scratch set* of its own, and at the end of a
task seals that pack and delivers it. What travels back are names and counts.

So a worker that dies loses the task that it had not sealed, and nothing else: it is given to
another one, without what has arrived. If the process that builds dies, workers deliver what they
have; packs in the folder of a set count there, taken in or not, and the next build finds them.
"""

from __future__ import annotations

import copy
import logging
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

from smartcache.artifacts import ArtifactSet, ArtifactSets, Claim
from smartcache.errors import EncoderError
from smartcache.system.kernel import sync_directory
from smartcache.system.locks import claim as claim_file
from smartcache.training.encoder import Encoder, Item, Keys
from smartcache.training.engines import Delivery, Engine, Fault, Lost
from smartcache.training.look import Listing
from smartcache.training.work import TRIED, Rules, Work

if TYPE_CHECKING:
    from smartcache.training.build import Encoding

_log = logging.getLogger(__name__)
_SECONDS, _SHARE, _MOST = 10.0, 0.02, 300.0
"""What a task should take, as so much is lost when a worker dies: some seconds, or a share of what
the building of the output has taken so far, up to a bound. With seconds alone, a day would leave
ten thousand packs for each worker; so it leaves a few hundred."""
_BYTES = 256 << 20
"""What a task should make, at most."""
_CLAIMED = 4096
"""Items that are claimed at a time, of all tasks: the kernel goes through all locks of a file for
each that is taken. So many take 60 us each, sixteen times as many take 7 ms each."""
_FIRST = 8
"""Items of the first tasks, from which it is learnt how long one takes."""
_GROWTH = 4
"""So many times the task before, at most: the first calls of an encoder tell little."""
_LEAST = 0.5
"""Seconds that tasks take at least, also at the end, where they become shorter."""
_DEATHS = 3
"""How many workers a task may cost."""
_NAMED = 3
_SCRATCH = ".scratch-"
_LOCK = ".lock"


@dataclass(frozen=True, slots=True)
class ToFolder:
    """Packs are written beside the set, and become its own by a rename: nothing is copied."""

    folder: Path

    def deliver(self, pack: Path) -> object:
        """Move a pack into the folder of the set."""
        pack.rename(self.folder / pack.name)
        sync_directory(self.folder)
        return pack.name

    def accept(self, opened: ArtifactSet, delivered: object) -> None:
        """Let its artifacts count as put now."""
        with suppress(FileNotFoundError):  # compacted away: they are in another pack by now
            opened.take_in(opened.path / str(delivered))


class Task(NamedTuple):
    """What a worker does at a time. Numbers are those of its own, small listing."""

    listing: Listing
    keys: Keys
    batches: list[list[int]]
    has_encoded: bool
    """Another worker knows that the encoder works."""


@dataclass(slots=True)
class Done:
    """What has become of a task. What is neither kept nor left out was not done."""

    delivered: list[object] = field(default_factory=list)
    made: list[int] = field(default_factory=list)
    """Numbers that have an output."""
    failures: list[tuple[int, str, str, bool]] = field(default_factory=list)
    """Number, name of the item, reason, whether it is remembered."""
    fault: Fault | None = None
    has_encoded: bool = False
    seconds: float = 0.0
    size: int = 0
    """Bytes of the packs."""

    def kept(self, number: int) -> None:
        """Take note of an output."""
        self.made.append(number)

    def left_out(self, number: int, item: str, reason: str, *, is_remembered: bool) -> None:
        """Take note of an item without one."""
        self.failures.append((number, item, reason, is_remembered))

    def written(self, count: int) -> None:
        """Nobody watches."""


@dataclass(kw_only=True)
class Worker:
    """What a worker has of one output: the encoder, and a scratch set. Called with its tasks."""

    name: str
    spec: dict[str, Any]
    encoder: Encoder
    options: dict[str, Any]
    """Of the set."""
    rules: Rules
    threads: int
    delivery: Delivery
    near: Path | None
    """Where it had best write what it delivers; None: where there is room."""
    trial: Task
    """Items to try the encoder with."""

    def __post_init__(self) -> None:
        self._work: Work | None = None
        self._sets: Path | None = None
        self._is_enough = threading.Event()

    def __getstate__(self) -> dict[str, Any]:
        """Travel without what is open."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def _opened(self) -> Work:
        """Open the scratch set, when there is something to be done."""
        if self._work is None:
            from smartcache.training.dataset import Output

            name, spec, trial = self.name, self.spec, self.trial
            self._sets = Path(tempfile.mkdtemp(prefix="smartcache-", dir=self.near))
            scratch = ArtifactSets(self._sets).open(
                spec["set"], spec["fingerprint"], evictable=False, **self.options
            )
            output, tried = Output(name, spec, scratch), Output(name, spec, scratch)
            output.encoder, tried.keys = self.encoder, trial.keys

            def trials(count: int) -> list[Item]:
                numbers = [number for some in trial.batches for number in some]
                return [tried.item(trial.listing, number, set()) for number in numbers[:count]]

            self._work = Work(
                output, trial.listing, Done(), rules=self.rules, threads=self.threads, trials=trials
            )
        return self._work

    def __call__(self, task: Task) -> Done:
        """Do a task; what was done of it is delivered also if the encoder fails."""
        began = time.monotonic()
        done = Done()
        try:
            work = self._opened()
            work.listing, work.output.keys, work.sink = task.listing, task.keys, done
            work.has_encoded = work.has_encoded or task.has_encoded
            try:
                work.run(map(work.batch, task.batches), self._is_enough.is_set)
            except Exception as error:  # noqa: BLE001 - it is raised in the other process
                done.fault = Fault.of(error)
            self._deliver(done)
            done.has_encoded = work.has_encoded
        except Exception as error:  # noqa: BLE001
            done = Done(fault=done.fault or Fault.of(error), delivered=done.delivered)
        done.seconds = time.monotonic() - began
        return done

    def _deliver(self, done: Done) -> None:
        opened = cast("Work", self._work).output.set
        opened.seal()
        for pack in sorted(opened.path.glob("*.pack")):
            size = pack.stat().st_size
            done.delivered.append(self.delivery.deliver(pack))
            pack.unlink(missing_ok=True)
            done.size += size

    def enough(self) -> None:
        """End the task that was begun after the batch that is being encoded; from any thread."""
        self._is_enough.set()

    def close(self) -> None:
        """Let go of everything, and leave nothing behind."""
        if self._work is not None:
            self._work.__exit__()
            self._work.output.set.close()
            self._work = None
        if self._sets is not None:
            shutil.rmtree(self._sets, ignore_errors=True)


class _Flight(NamedTuple):
    """A task that a worker has."""

    batches: list[list[int]]
    """As the dataset numbers them."""
    numbers: dict[int, int]
    """By the number in the task."""
    claim: Claim
    deaths: int = 0


class Spread:
    """The coordinator of the workers, for one output."""

    def __init__(self, encoding: Encoding, engine: Engine) -> None:
        self._encoding = encoding
        self._engine = engine
        self._output = encoding.output
        self._encoder = cast("Encoder", self._output.encoder)
        self._release = ExitStack()
        self._flights: dict[int, _Flight] = {}
        self._again: deque[_Flight] = deque()
        self._todo: deque[list[int]] = deque()
        self._left = 0
        """Items that nobody has yet."""
        self._busy: list[int] = []
        self._fault: Fault | None = None
        self._has_encoded = False
        self._seconds = self._bytes = 0.0
        """What one item takes; 0: that is not known yet."""
        self._began = time.monotonic()
        self._most = max(_FIRST, self._encoder.batch)
        """Items of the next task, at most."""

    def __enter__(self) -> Self:
        opened = self._output.set
        near = None
        delivery = self._engine.delivery(opened)
        if delivery is None:
            delivery, near = ToFolder(opened.path), self._make_room(opened.path.parent)
        self._delivery = delivery
        build = self._encoding.build
        # What it depends on is known here; whatever the function needs travels with the function.
        encoder = copy.copy(self._encoder)
        encoder.depends_on = None
        options = {name: getattr(opened.options, name) for name in ("ttl", "compression")}
        trial = self._encoding.trial_numbers(encoder.batch + TRIED)
        self._worker = Worker(
            name=self._output.name, spec=self._output.spec, encoder=encoder, options=options,
            rules=build.rules, threads=build.threads, delivery=delivery, near=near,
            trial=self._task([trial])[0],
        )  # fmt: skip
        return self

    def _make_room(self, folder: Path) -> Path:
        """Make a folder for the scratch sets of all workers, and remove those of killed builds."""
        prefix = f"{_SCRATCH}{self._output.set.id[:8]}-"
        _clear(folder, prefix)
        near = folder / f"{prefix}{secrets.token_hex(4)}"
        lock = claim_file(near.with_suffix(_LOCK))  # before there is a folder: see `_clear`
        if lock is not None:
            self._release.callback(lock.release)
        near.mkdir(mode=0o700)
        self._release.callback(shutil.rmtree, near, ignore_errors=True)
        return near

    def __exit__(self, *exc: object) -> None:
        if exc[0] is not None:  # workers may still have something to deliver
            self._engine.close()
        self._release.close()

    def encode(self, numbers: list[int]) -> list[int]:
        """Have workers encode what nobody else has claimed; return the rest."""
        build = self._encoding.build
        self._todo.extend(self._encoding.batches(numbers))
        self._left, self._busy = len(numbers), []
        is_ending = False
        try:
            for came in self._engine.map(self._worker, self._take):
                if came is not None:
                    task, result = came
                    flight = self._flights.pop(id(task))
                    if isinstance(result, Lost):
                        self._give_again(flight, result)
                    else:
                        self._accept(flight, result)
                if not is_ending and (self._fault is not None or build.must_stop()):
                    is_ending = True
                    self._todo.clear()
                    self._engine.enough()
        finally:
            for flight in (*self._flights.values(), *self._again):
                flight.claim.close()
            self._flights, self._again = {}, deque()
            self._todo.clear()
        if self._fault is not None:
            raise self._fault.error()
        return self._busy

    def _take(self) -> Task | None:
        """Give the next task; None: there is none."""
        build = self._encoding.build
        if self._fault is not None or build.report.is_stopped:
            return None
        if self._again:
            return self._fly(self._again.popleft())
        while self._todo:
            some: list[list[int]] = []
            count, most = 0, self._size()
            while self._todo and (not some or count + len(self._todo[0]) <= most):
                some.append(self._todo.popleft())
                count += len(some[-1])
            self._left -= count
            numbers = [number for batch in some for number in batch]
            claim, chosen = self._encoding.claim(numbers, self._busy)
            if chosen:
                return self._fly(_Flight(_only(some, chosen), {}, claim))
        return None

    def _size(self) -> int:
        """Return how many items the next task has."""
        all_tasks = 2 * max(1, self._engine.workers)
        most = min(self._most, _CLAIMED // all_tasks)
        if self._seconds:
            elapsed = time.monotonic() - self._began
            target = min(max(_SECONDS, _SHARE * elapsed), _MOST)
            most = min(most, int(target / self._seconds))
            most = min(most, int(_BYTES / self._bytes)) if self._bytes else most
            # The less there is left, the less each gets: so that all are done at the same time.
            fair = self._left // all_tasks
            most = min(most, max(fair, int(_LEAST / self._seconds)))
        return max(most, 1)

    def _fly(self, flight: _Flight) -> Task:
        task, numbers = self._task(flight.batches)
        self._flights[id(task)] = flight._replace(numbers=numbers)
        return task

    def _task(self, batches: list[list[int]]) -> tuple[Task, dict[int, int]]:
        """Cut out of the listing what a task needs."""
        output, each = self._output, self._output.variations
        numbers = [number for batch in batches for number in batch]
        items = list(dict.fromkeys(number // each for number in numbers))
        place = {item: at for at, item in enumerate(items)}
        mine = {number: place[number // each] * each + number % each for number in numbers}
        data, bucket = output.keys.data, output.keys.bucket
        keys = b"".join(data[32 * each * item : 32 * each * (item + 1)] for item in items)
        task = Task(
            self._encoding.listing.excerpt(items, output.spec["reads"]),
            Keys(keys + data[-32:], bucket[items]),
            [[mine[number] for number in batch] for batch in batches],
            self._has_encoded,
        )
        return task, {at: number for number, at in mine.items()}

    def _accept(self, flight: _Flight, done: Done) -> None:
        """Take in what a worker has delivered, and count it."""
        encoding = self._encoding
        try:
            try:
                for each in done.delivered:
                    self._delivery.accept(self._output.set, each)
            except Exception:
                if done.fault is None:
                    raise
                _log.debug("What a worker delivered that failed is not whole", exc_info=True)
            else:
                for number in done.made:
                    encoding.kept(flight.numbers[number])
            for number, item, reason, is_remembered in done.failures:
                encoding.left_out(flight.numbers[number], item, reason, is_remembered=is_remembered)
        finally:
            flight.claim.close()
        count = len(done.made) + len(done.failures)
        encoding.written(count)
        self._fault = self._fault or done.fault
        self._has_encoded = self._has_encoded or done.has_encoded
        if count:
            self._seconds, self._bytes = done.seconds / count, done.size / count
            self._most = max(self._most, _GROWTH * count)

    def _give_again(self, flight: _Flight, lost: Lost) -> None:
        """Let another worker do what one that died has not delivered."""
        encoding = self._encoding
        numbers = [number for batch in flight.batches for number in batch]
        left = encoding.absent(numbers)
        there = set(numbers) - set(left)
        for number in there:
            encoding.kept(number)
        encoding.written(len(there))
        deaths = flight.deaths + lost.had_begun
        if not left:
            flight.claim.close()
        elif deaths < _DEATHS:
            if lost.had_begun:  # once for each that has died
                _log.warning("A worker has died (%s); another one encodes what it had", lost.how)
            self._again.append(_Flight(_only(flight.batches, left), {}, flight.claim, deaths))
        else:
            flight.claim.close()
            names = [encoding.listing.name(n // self._output.variations) for n in left]
            some = ", ".join(names[:_NAMED]) + (" ..." if names[_NAMED:] else "")
            message = f"{deaths} workers have died encoding {self._output.name} of {some}"
            hint = "See whether there was enough memory, or whether the encoder crashes on one."
            raise EncoderError(f"{message}: {lost.how}", hint=hint, items=tuple(names))


def _only(batches: Sequence[list[int]], wanted: Sequence[int]) -> list[list[int]]:
    """Return batches without what is not wanted."""
    chosen = set(wanted)
    found = ([number for number in batch if number in chosen] for batch in batches)
    return [batch for batch in found if batch]


def _clear(folder: Path, prefix: str) -> None:
    """Remove the scratch folders of builds that were killed: nobody holds their lock."""
    for name in os.listdir(folder):
        if name.startswith(prefix) and not name.endswith(_LOCK):
            with suppress(OSError):
                lock = claim_file(folder / f"{name}{_LOCK}")
                if lock is not None:
                    shutil.rmtree(folder / name, ignore_errors=True)
                    lock.release()
