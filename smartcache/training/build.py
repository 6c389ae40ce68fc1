"""Encode what is missing, and nothing else, in as many processes as like to help.

Before a batch is encoded its keys are claimed: whoever else builds the same dataset takes the next
ones, and at the end waits for what others have claimed. A process that dies has claimed nothing any
more, and what it had written is there. Nobody waits in a barrier. The encoder works here (work.py),
or in the workers of an engine (spread.py).

A failure that is an item's own is remembered by what the item contains, and tried again when that
changes. Whatever else an encoder raises ends the build, and nothing is remembered.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from smartcache.artifacts import Claim, Digests
from smartcache.config import variable
from smartcache.errors import ConfigError, DatasetChangedError, EncoderError
from smartcache.progress import Job, Progress, silent
from smartcache.training.encoder import Encoder, Item
from smartcache.training.engines import Engine
from smartcache.training.spread import Spread
from smartcache.training.table import EDITED, NEW
from smartcache.training.work import Batch, OnError, OnNan, Rules, Work

if TYPE_CHECKING:
    from smartcache.training.dataset import Dataset, Output

_log = logging.getLogger(__name__)
_PATIENCE = 1.0
"""Seconds between two looks at what others have claimed."""
_ALIVE = 60.0
"""Seconds after which a process that waits says so."""
_SHOWN = 3


class Failed(NamedTuple):
    """An item that is left out, and why."""

    item: str
    output: str
    """"" if the item itself cannot be read."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildPlan:
    """What `build` would encode, and why; `execute` does it."""

    items: int
    ready: int
    """Items that have all their outputs."""
    encode: Mapping[str, Mapping[str, int]]
    """By output and reason, how many are to be encoded; equal ones once."""
    failed: tuple[Failed, ...]
    changes: Mapping[str, int]
    """Since the last look: files added, edited, moved, renamed, removed."""
    warnings: tuple[str, ...]
    _execute: Callable[..., BuildReport] = field(repr=False, compare=False)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be encoded."""
        return not any(self.encode.values())

    def execute(self, **options: Any) -> BuildReport:  # noqa: ANN401 - those of `build`
        """Encode it; takes the arguments of `Dataset.build`."""
        return self._execute(**options)

    def __str__(self) -> str:
        parts = [f"{self.items:,} item{_s(self.items)}: {self.ready:,} ready"]
        todo = ", ".join(
            f"{count:,} {output}{_s(count)}{' to encode' if number == 0 else ''} ({reason})"
            for number, (output, reason, count) in enumerate(
                (output, reason, count)
                for output, reasons in self.encode.items()
                for reason, count in reasons.items()
            )
        )
        parts += [todo] if todo else []
        reasons = Counter(each.reason for each in self.failed)
        shown = reasons.most_common(_SHOWN)
        parts += [f"{count:,} {reason}" for reason, count in shown]
        others = sum(reasons.values()) - sum(count for _, count in shown)
        parts += [f"{others:,} left out for other reasons"] if others else []
        return "; ".join(parts)


@dataclass(slots=True, kw_only=True)
class BuildReport:
    """What `build` has done, by output."""

    encoded: dict[str, int] = field(default_factory=dict)
    """By this call."""
    reused: dict[str, int] = field(default_factory=dict)
    """Were there already."""
    shared: dict[str, int] = field(default_factory=dict)
    """Have the same content as another one that was encoded."""
    elsewhere: dict[str, int] = field(default_factory=dict)
    """Were encoded by other processes meanwhile."""
    failed: list[Failed] = field(default_factory=list)
    """All items that are left out, also those that failed before."""
    is_stopped: bool = False
    """`stop` said so: what was encoded until then is kept."""
    seconds: float = 0.0

    def __str__(self) -> str:
        words = []
        for name in ("encoded", "reused", "shared", "elsewhere"):
            counts = ", ".join(f"{n:,} {output}" for output, n in getattr(self, name).items() if n)
            words += [f"{name} {counts}"] if counts else []
        words += [f"left out {len(self.failed):,}"] if self.failed else []
        words += ["stopped"] if self.is_stopped else []
        return "; ".join(words) or "nothing to do"


def _s(count: int) -> str:
    return "" if count == 1 else "s"


def missing(output: Output, good: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return what is to be encoded, as numbers of items and variations: each key once."""
    numbers = output.missing
    numbers = numbers[good[numbers // output.variations]]
    return np.array(_first_of_each(output, numbers.tolist()), np.int64)


def _first_of_each(output: Output, numbers: Iterable[int]) -> list[int]:
    """Return numbers without those whose key another one before has."""
    data = output.keys.data
    first: dict[bytes, int] = {}
    for number in numbers:
        first.setdefault(data[32 * number : 32 * number + 32], number)
    return list(first.values())


def reasons_of(
    dataset: Dataset, output: Output, numbers: np.ndarray[Any, Any], before: Mapping[str, Any]
) -> dict[str, int]:
    """Say why outputs are to be encoded."""
    if not len(numbers):
        return {}
    known = before.get(output.name)
    general = ""
    if known is not None and known["id"] != output.spec["id"]:
        general = "new encoder"
    elif known is not None and known["buckets"] != output.spec["buckets"]:
        general = "other buckets"
    elif known is not None and known["variations"] != output.spec["variations"]:
        general = "more variations"
    elif known is None and before:
        general = "new output"
    items = numbers // output.variations
    flags = np.zeros(len(items), np.uint8)
    for read in output.spec["reads"]:
        flags |= dataset.listing.states[read][items]
    is_row = np.frombuffer(dataset.listing.folder, "i4")[items] < 0
    words = np.full(len(items), general or "missing", object)
    if not general:
        words[is_row] = "new row"
        words[(flags & NEW) > 0] = "new file"
        words[(flags & EDITED) > 0] = "edited"
    return dict(Counter(words.tolist()).most_common())


class Build:
    """One call of `build`."""

    def __init__(  # noqa: PLR0913 - one argument per wish
        self,
        dataset: Dataset,
        *,
        on_error: OnError = "record",
        nan: OnNan = "record",
        before: Callable[[], object] | None = None,
        after: Callable[[], object] | None = None,
        stop: Callable[[], object] | None = None,
        progress: Progress = silent,
        threads: int | None = None,
        engine: Engine | None = None,
    ) -> None:
        if on_error not in ("record", "raise"):
            raise ConfigError(f'on_error is "record" or "raise", not {on_error!r}')
        if nan not in ("record", "raise", "keep"):
            raise ConfigError(f'nan is "record", "raise" or "keep", not {nan!r}')
        if engine is not None and not hasattr(engine, "map"):
            hint = "Give ProcessEngine(workers=2), or RayEngine(...) of smartcache.remote."
            raise ConfigError(f"{engine!r} is not an engine", hint=hint)
        self.dataset = dataset
        self.rules = Rules(on_error, nan)
        self.engine = engine
        self.before = before
        self.after = after
        self.stop = stop
        self.progress = progress
        self.threads = dataset.threads if threads is None else max(1, threads)
        self.report = BuildReport()
        self.has_begun = False
        """`before` was called."""

    def run(self, only: Mapping[str, Iterable[int]] | None = None) -> BuildReport:
        """Encode what is missing; or `only` some outputs, by their numbers."""
        began = time.monotonic()
        dataset, report = self.dataset, self.report
        good = dataset.is_good
        todo: list[tuple[Output, list[int]]] = []
        for output in dataset.outputs.values():
            report.reused[output.name] = report.shared[output.name] = 0
            report.encoded[output.name] = report.elsewhere[output.name] = 0
            if only is None:
                every = output.missing
                every = every[good[every // output.variations]]
                numbers = _first_of_each(output, every.tolist())
                total = int(good.sum()) * output.variations
                report.reused[output.name] = total - len(every)
                report.shared[output.name] = len(every) - len(numbers)
            else:
                numbers = _first_of_each(output, sorted(only.get(output.name, ())))
            if numbers:
                todo.append((output, numbers))
        try:
            for output, some in todo:
                self._refuse_changed(output)
                if not report.is_stopped:
                    Encoding(self, output).run(some)
        finally:
            try:
                if self.engine is not None:
                    self.engine.close()
            finally:
                if self.has_begun and self.after is not None:
                    self.after()
        report.seconds = time.monotonic() - began
        return report

    def begin(self) -> None:
        """Call `before`, once, when something is really encoded."""
        if not self.has_begun:
            self.has_begun = True
            if self.before is not None:
                self.before()

    def must_stop(self) -> bool:
        """Ask whether to stop."""
        if self.stop is not None and not self.report.is_stopped:
            self.report.is_stopped = bool(self.stop())
        return self.report.is_stopped

    def _refuse_changed(self, output: Output) -> None:
        if output.encoder is None:
            hint = "Open it with cache.dataset(...) and its encoders to encode something."
            message = f"{self.dataset.name} was opened without the encoder of {output.name}"
            raise EncoderError(message, hint=hint)
        now = output.encoder.fingerprint(self.dataset.digest_of)
        if now != output.spec["fingerprint"]:
            message = f"What {output.name} depends on has changed since the dataset was opened"
            raise DatasetChangedError(message)


class Encoding:
    """The building of one output: who encodes what, and what has become of it."""

    def __init__(self, build: Build, output: Output) -> None:
        self.build = build
        self.output = output
        self.name = output.name
        self.listing = build.dataset.listing
        self.job: Job = silent("")

    def run(self, numbers: list[int]) -> None:
        """Encode what is missing, or wait until another process has done so."""
        left = numbers
        spoke = time.monotonic()
        with (
            self.build.progress(f"Encoding {self.name}", len(numbers)) as self.job,
            self._encode_with() as encode,
        ):
            while left and not self.build.must_stop():
                busy = encode(left)
                if len(busy) == len(left):
                    self.output.set.wait_for(self.output.key(busy[0]), _PATIENCE)
                    self.job.describe(f"waiting for other processes: {len(busy):,} left")
                    if time.monotonic() - spoke > _ALIVE:
                        spoke = time.monotonic()
                        _log.warning("Waiting: others encode %d of %s", len(busy), self.name)
                left = self._still_missing(busy)

    @contextmanager
    def _encode_with(self) -> Iterator[Callable[[list[int]], list[int]]]:
        """Give what encodes outputs that nobody else has claimed, and returns the others."""
        build = self.build
        if build.engine is None:
            with Work(
                self.output, self.listing, self, rules=build.rules, threads=build.threads,
                trials=self.trials,
            ) as work:  # fmt: skip
                yield partial(self._encode_here, work)
        else:
            with Spread(self, build.engine) as spread:
                yield spread.encode

    def _still_missing(self, numbers: list[int]) -> list[int]:
        """Leave out what others have encoded, or have failed to encode, meanwhile."""
        if not numbers:
            return []
        left = self.absent(numbers)
        self._count_others(len(numbers) - len(left))
        failed = self.output.set.failed([self.output.key(number) for number in left])
        self.job.advance(len(failed))
        return [number for number in left if self.output.key(number) not in failed]

    def absent(self, numbers: list[int]) -> list[int]:
        """Return those of some numbers that have no output by now."""
        data = self.output.keys.data
        keys = Digests(b"".join(data[32 * each : 32 * each + 32] for each in numbers))
        with self.output.set.select(keys) as chosen:
            return [numbers[at] for at in chosen.missing.tolist()]

    def _count_others(self, count: int) -> None:
        self.build.report.elsewhere[self.name] += count
        self.job.advance(count)

    def batches(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        """Cut into batches of one bucket; each rank begins elsewhere."""
        by_bucket: dict[bytes, list[int]] = {}
        for number in numbers:
            bucket = self.output.keys.bucket[number // self.output.variations].tobytes()
            by_bucket.setdefault(bucket, []).append(number)
        size = cast("Encoder", self.output.encoder).batch
        batches = [
            some[start : start + size]
            for some in by_bucket.values()
            for start in range(0, len(some), size)
        ]
        first = len(batches) * rank_of("RANK", 0) // max(1, rank_of("WORLD_SIZE", 1))
        yield from batches[first:]
        yield from batches[:first]

    def _encode_here(self, work: Work, numbers: list[int]) -> list[int]:
        """Encode in this process what nobody else has claimed; return the rest."""
        busy: list[int] = []

        def claimed() -> Iterator[Batch]:
            for some in self.batches(numbers):
                claim, chosen = self.claim(some, busy)
                if not chosen:
                    continue
                try:
                    batch = work.batch(chosen, claim.close)
                except BaseException:
                    claim.close()
                    raise
                yield batch

        work.run(claimed(), self.build.must_stop)
        return busy

    def claim(self, numbers: list[int], busy: list[int]) -> tuple[Claim, list[int]]:
        """Claim what nobody else has; `busy` gets the rest. Nothing to encode: it is closed."""
        by_key = {self.output.key(number): number for number in numbers}
        claim = self.output.set.claim(list(by_key))
        try:
            busy += [by_key[key] for key in claim.busy]
            self._count_others(len(claim.present))
            # Who had it before may have failed: that is remembered before the claim is given up.
            failed = self.output.set.failed(claim.keys) if claim.keys else set()
            self.job.advance(len(failed))
            chosen = [by_key[key] for key in claim.keys if key not in failed]
            if chosen:
                self.build.begin()
            else:
                claim.close()
        except BaseException:
            claim.close()
            raise
        return claim, chosen

    def trials(self, count: int) -> Iterator[Item]:
        """Give items to try an encoder with."""
        for number in self.trial_numbers(count):
            yield self.output.item(self.listing, number, set())

    def trial_numbers(self, count: int) -> list[int]:
        """Return some numbers to try an encoder with."""
        good = np.repeat(self.build.dataset.is_good, self.output.variations)
        numbers = np.flatnonzero(good)
        is_missing = np.isin(numbers, self.output.missing)
        # What was encoded before, in another build, tells most.
        numbers = np.concatenate((numbers[~is_missing], numbers[is_missing]))
        found: list[int] = numbers[:count].tolist()
        return found

    # what has become of items

    def kept(self, number: int) -> None:  # noqa: ARG002 - any of them
        """Count an output that is in the set now."""
        self.build.report.encoded[self.name] += 1

    def left_out(self, number: int, item: str, reason: str, *, is_remembered: bool) -> None:
        """Remember an item that has no output."""
        if is_remembered:
            self.output.set.remember_failure(self.output.key(number), reason)
        self.build.report.failed.append(Failed(item, self.name, reason))

    def written(self, count: int) -> None:
        """Say how far it is."""
        report = self.build.report
        self.job.advance(count)
        counts = {
            name: getattr(report, name).get(self.name, 0)
            for name in ("encoded", "reused", "shared")
        } | {"failed": len(report.failed)}
        self.job.describe(", ".join(f"{n:,} {name}" for name, n in counts.items() if n))


def rank_of(name: str, default: int) -> int:
    """Return a number that torchrun gives every process."""
    text = variable(name) or ""
    return int(text) if text.isdigit() else default


__all__ = [
    "Build",
    "BuildPlan",
    "BuildReport",
    "Failed",
    "OnError",
    "OnNan",
    "missing",
    "reasons_of",
]
