"""Encode what is missing, and nothing else, in as many processes as like to help.

Files are read and decoded ahead of the encoder by threads, and outputs are written behind it by
another. Before a batch is encoded its keys are claimed: whoever else builds the same dataset takes
the next ones, and at the end waits for what others have claimed. A process that dies has claimed
nothing any more, and what it had written is there. Nobody waits in a barrier.

A failure belongs to an item if the item cannot be read, if its output has a NaN, or if the encoder
fails on it alone where it does not fail on others: an encoder that has done nothing yet is tried
with some of these first. It is remembered by what the item contains, and tried again when that
changes. Whatever else an encoder raises ends the build: it is not the item's fault, and nothing is
remembered.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from smartcache.artifacts import Claim, Digests
from smartcache.config import variable
from smartcache.errors import ConfigError, DatasetChangedError, EncoderError
from smartcache.progress import Job, Progress, silent
from smartcache.training.encoder import ChangedError, Item, ItemError, as_kept, nan_in, split
from smartcache.training.table import EDITED, NEW

if TYPE_CHECKING:
    from smartcache.training.dataset import Dataset, Output

_log = logging.getLogger(__name__)
OnError = Literal["record", "raise"]
OnNan = Literal["record", "raise", "keep"]
_BEHIND = 2
"""Batches that may wait to be written."""
_PATIENCE = 1.0
"""Seconds between two looks at what others have claimed."""
_ALIVE = 60.0
"""Seconds after which a process that waits says so."""
_SHOWN = 3
_CHANGED = "it changed while it was encoded"
_TRIED = 3
"""Items that an encoder is tried with which fails on those that are to be encoded."""


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

    def __init__(
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
    ) -> None:
        if on_error not in ("record", "raise"):
            raise ConfigError(f'on_error is "record" or "raise", not {on_error!r}')
        if nan not in ("record", "raise", "keep"):
            raise ConfigError(f'nan is "record", "raise" or "keep", not {nan!r}')
        self.dataset = dataset
        self.on_error = on_error
        self.nan = nan
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
                    _Encoding(self, output).run(some)
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


class _Batch(NamedTuple):
    """Items whose keys this process has claimed."""

    claim: Claim
    numbers: list[int]
    items: list[Item]
    ahead: list[Future[None]]


class _Encoding:
    """The building of one output."""

    def __init__(self, build: Build, output: Output) -> None:
        self.build = build
        self.output = output
        self.name = output.name
        encoder = output.encoder
        assert encoder is not None  # noqa: S101 - refused before
        self.encoder = encoder
        self.listing = build.dataset.listing
        self.used: set[tuple[str, str]] = set()
        self.has_encoded = False
        """The encoder works: so what fails is the fault of an item."""
        self.job: Job = silent("")

    def run(self, numbers: list[int]) -> None:
        """Encode what is missing, or wait until another process has done so."""
        left = numbers
        spoke = time.monotonic()
        self.readers = ThreadPoolExecutor(self.build.threads, "smartcache-read")
        self.writer = ThreadPoolExecutor(1, "smartcache-write")
        try:
            with self.build.progress(f"Encoding {self.name}", len(numbers)) as self.job:
                while left and not self.build.must_stop():
                    busy = self._encode(left)
                    if len(busy) == len(left):
                        self.output.set.wait_for(self.output.key(busy[0]), _PATIENCE)
                        self.job.describe(f"waiting for other processes: {len(busy):,} left")
                        if time.monotonic() - spoke > _ALIVE:
                            spoke = time.monotonic()
                            _log.warning("Waiting: others encode %d of %s", len(busy), self.name)
                    left = self._still_missing(busy)
        finally:
            self.readers.shutdown(wait=False, cancel_futures=True)
            self.writer.shutdown()

    def _still_missing(self, numbers: list[int]) -> list[int]:
        """Leave out what others have encoded, or have failed to encode, meanwhile."""
        if not numbers:
            return []
        data = self.output.keys.data
        keys = Digests(b"".join(data[32 * each : 32 * each + 32] for each in numbers))
        with self.output.set.select(keys) as chosen:
            left = [numbers[at] for at in chosen.missing.tolist()]
        self._count_others(len(numbers) - len(left))
        failed = self.output.set.failed([self.output.key(number) for number in left])
        self.job.advance(len(failed))
        return [number for number in left if self.output.key(number) not in failed]

    def _count_others(self, count: int) -> None:
        self.build.report.elsewhere[self.name] += count
        self.job.advance(count)

    def _batches(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        """Cut into batches of one bucket; each rank begins elsewhere."""
        by_bucket: dict[bytes, list[int]] = {}
        for number in numbers:
            bucket = self.output.keys.bucket[number // self.output.variations].tobytes()
            by_bucket.setdefault(bucket, []).append(number)
        size = self.encoder.batch
        batches = [
            some[start : start + size]
            for some in by_bucket.values()
            for start in range(0, len(some), size)
        ]
        first = len(batches) * rank_of("RANK", 0) // max(1, rank_of("WORLD_SIZE", 1))
        yield from batches[first:]
        yield from batches[:first]

    def _encode(self, numbers: Sequence[int]) -> list[int]:
        """Encode what nobody else has claimed; return the rest."""
        busy: list[int] = []
        ahead: deque[_Batch] = deque()
        behind: deque[Future[None]] = deque()
        batches = filter(None, (self._claim(some, busy) for some in self._batches(numbers)))
        depth = max(2, 2 * self.build.threads // self.encoder.batch)
        try:
            while not self.build.must_stop():
                ahead.extend(islice(batches, depth - len(ahead)))
                if not ahead:
                    break
                batch = ahead.popleft()
                try:
                    for each in batch.ahead:
                        each.result()
                    values = self._call(batch.items)
                    self.has_encoded = self.has_encoded or any(map(_is_value, values))
                except BaseException:
                    batch.claim.close()
                    raise
                behind.append(self.writer.submit(self._write, batch, values))
                while len(behind) > _BEHIND:
                    behind.popleft().result()
            while behind:
                behind.popleft().result()
        finally:
            for batch in ahead:
                batch.claim.close()
        return busy

    def _claim(self, numbers: list[int], busy: list[int]) -> _Batch | None:
        by_key = {self.output.key(number): number for number in numbers}
        claim = self.output.set.claim(list(by_key))
        try:
            busy += [by_key[key] for key in claim.busy]
            self._count_others(len(claim.present))
            # Who had it before may have failed: that is remembered before the claim is given up.
            failed = self.output.set.failed(claim.keys) if claim.keys else set()
            self.job.advance(len(failed))
            chosen = [by_key[key] for key in claim.keys if key not in failed]
            items = [self.output.item(self.listing, number, self.used) for number in chosen]
            ahead = [self.readers.submit(item.read_ahead) for item in items] if self.used else []
        except BaseException:
            claim.close()
            raise
        if not chosen:
            claim.close()
            return None
        return _Batch(claim, chosen, items, ahead)

    def _call(self, items: list[Item]) -> list[object]:
        """Call the encoder; return a value, or why there is none, for each item."""
        self.build.begin()
        faults: dict[int, BaseException] = {
            at: item.fault for at, item in enumerate(items) if item.fault is not None
        }
        while len(faults) < len(items):
            good = [item for at, item in enumerate(items) if at not in faults]
            try:
                values = iter(self._encoded(good))
                return [faults[at] if at in faults else next(values) for at in range(len(items))]
            except (ConfigError, EncoderError, MemoryError):
                raise
            except Exception as error:
                fault = _fault_in(error)
                guilty = [at for at, item in enumerate(items) if item.is_guilty(fault)]
                if set(guilty) - faults.keys():
                    faults |= dict.fromkeys(guilty, fault or error)
                    continue
                if _is_out_of_memory(error) or (len(good) == 1 and not self._works(items)):
                    raise
                if len(good) == 1:
                    return [faults.get(at, error) for at in range(len(items))]
                return self._call_each(items, faults)
        return [faults[at] for at in range(len(items))]

    def _encoded(self, items: list[Item]) -> list[object]:
        for item in items:
            item.rewind()
        return split(self.encoder.function(items), len(items), self.name)

    def _call_each(self, items: list[Item], faults: dict[int, BaseException]) -> list[object]:
        """Find out who is to blame: the items that fail alone, or, if all do, the encoder."""
        values: list[object] = []
        for at, item in enumerate(items):
            try:
                known = faults.get(at)
                values += [known] if known else self._encoded([item])
            except (ConfigError, EncoderError, MemoryError):
                raise
            except Exception as error:
                if _is_out_of_memory(error):
                    raise
                values.append(_fault_in(error) or error)
        if not any(map(_is_value, values)) and not self._works(items):
            for each in values:
                if isinstance(each, BaseException) and not isinstance(each, ItemError):
                    raise each
        return values

    def _works(self, items: list[Item]) -> bool:
        """Say whether the encoder works at all: that is tried with others, if it never did yet."""
        good = np.repeat(self.build.dataset.is_good, self.output.variations)
        numbers = np.flatnonzero(good)
        is_missing = np.isin(numbers, self.output.missing)
        # What was encoded before, in another build, tells most.
        numbers = np.concatenate((numbers[~is_missing], numbers[is_missing]))
        names = {item.name for item in items}
        for number in numbers[: len(items) + _TRIED].tolist():
            if self.has_encoded:
                break
            other = self.output.item(self.listing, number, set())
            if other.name not in names:
                with suppress(Exception):
                    self.has_encoded = any(map(_is_value, self._encoded([other])))
        return self.has_encoded

    def _write(self, batch: _Batch, values: list[object]) -> None:
        """Keep the outputs of a batch; in the thread that writes."""
        report = self.build.report
        error: EncoderError | None = None
        try:
            for number, item, value in zip(batch.numbers, batch.items, values, strict=True):
                try:
                    self._keep(number, item, value)
                except EncoderError as each:  # of one: the others are kept all the same
                    error = error or each
        finally:
            batch.claim.close()
        if error is not None:
            raise error
        self.job.advance(len(values))
        counts = {
            name: getattr(report, name).get(self.name, 0)
            for name in ("encoded", "reused", "shared")
        } | {"failed": len(report.failed)}
        self.job.describe(", ".join(f"{n:,} {name}" for name, n in counts.items() if n))

    def _keep(self, number: int, item: Item, value: object) -> None:
        """Keep one output, or the reason why there is none."""
        key = self.output.key(number)
        if isinstance(value, BaseException):
            # An encoder that opens files by itself has another word for a drive that is gone.
            is_changed = not isinstance(value, ItemError) and item.has_changed()
            self._fail(item, key, ChangedError(_CHANGED) if is_changed else value)
            return
        kept = as_kept(value, self.encoder.trim, self.name)
        field_ = None if self.build.nan == "keep" else nan_in(kept)
        if item.has_changed():
            self._fail(item, key, ChangedError(_CHANGED))
        elif field_ is not None:
            what = f"NaN in {self.name}{f'[{field_!r}]' if field_ else ''}"
            self._fail(item, key, EncoderError(what), must_raise=self.build.nan == "raise")
        else:
            about = self.output.about(self.listing, number, item)
            self.output.set.put(key, kept, metadata=about)
            self.build.report.encoded[self.name] += 1

    def _fail(
        self, item: Item, key: str, error: BaseException, *, must_raise: bool | None = None
    ) -> None:
        is_own = isinstance(error, (ItemError, EncoderError))
        reason = str(error) if is_own else f"failed: {type(error).__name__}: {error}"
        if self.build.on_error == "raise" if must_raise is None else must_raise:
            message = f"{self.name} of {item.name} cannot be encoded: {reason}"
            raise EncoderError(message, items=(item.name,)) from error
        if not isinstance(error, ChangedError):
            self.output.set.remember_failure(key, reason)
        self.build.report.failed.append(Failed(item.name, self.name, reason))


def rank_of(name: str, default: int) -> int:
    """Return a number that torchrun gives every process."""
    text = variable(name) or ""
    return int(text) if text.isdigit() else default


def _fault_in(error: BaseException | None) -> ItemError | None:
    """Return the fault of an item behind an error: the encoder may have raised one of its own."""
    while error is not None and not isinstance(error, ItemError):
        error = error.__cause__ or error.__context__
    return error


def _is_value(value: object) -> bool:
    return not isinstance(value, BaseException)


def _is_out_of_memory(error: BaseException) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


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
