"""The encoder of one output at work in this process: items go in, and what it makes is kept.

Items are read ahead of the encoder by threads, and outputs are written behind it by another. A
build on one process has one `Work`, and so has every worker of an engine: whose fault a failure is,
is decided here and nowhere else.

A failure belongs to an item if the item cannot be read, if its output has a NaN, or if the encoder
fails on it alone where it does not fail on others: an encoder that has done nothing yet is tried
with some of these first. Whatever else an encoder raises is its own fault, and ends the build.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, Self

from smartcache.errors import ConfigError, EncoderError
from smartcache.training.encoder import ChangedError, Item, ItemError, as_kept, nan_in, split

if TYPE_CHECKING:
    from smartcache.training.dataset import Output
    from smartcache.training.look import Listing

OnError = Literal["record", "raise"]
OnNan = Literal["record", "raise", "keep"]
TRIED = 3
"""Items that an encoder is tried with which fails on those that are to be encoded."""
_BEHIND = 2
"""Batches that may wait to be written."""
_CHANGED = "it changed while it was encoded"


class Rules(NamedTuple):
    """What becomes of items that cannot be encoded, and of outputs with a NaN."""

    on_error: OnError = "record"
    nan: OnNan = "record"


class Sink(Protocol):
    """Hears what has become of items; in the thread that writes."""

    def kept(self, number: int) -> None:
        """Hear that an output is in the set."""
        ...

    def left_out(self, number: int, item: str, reason: str, *, is_remembered: bool) -> None:
        """Hear that an item has no output, and why; some reasons are not for ever."""
        ...

    def written(self, count: int) -> None:
        """Hear that all items of a batch were heard of."""
        ...


class Batch(NamedTuple):
    """Items of one bucket, on their way into the encoder."""

    numbers: list[int]
    items: list[Item]
    ahead: list[Future[None]]
    close: Callable[[], None]
    """Called when all of it is kept, or when it is given up."""


class Work:
    """The encoder of one output, the threads around it, and what is known of it so far."""

    def __init__(
        self,
        output: Output,
        listing: Listing,
        sink: Sink,
        *,
        rules: Rules,
        threads: int,
        trials: Callable[[int], Iterable[Item]],
    ) -> None:
        assert output.encoder is not None  # noqa: S101 - refused before
        self.encoder = output.encoder
        self.output = output
        self.listing = listing
        self.sink = sink
        self.rules = rules
        self.trials = trials
        """Gives about so many items that the encoder is tried with."""
        self.has_encoded = False
        """The encoder works: so what fails is the fault of an item."""
        self.depth = max(2, 2 * threads // self.encoder.batch)
        self._used: set[tuple[str, str]] = set()
        self._readers = ThreadPoolExecutor(threads, "smartcache-read")
        self._writer = ThreadPoolExecutor(1, "smartcache-write")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """End the threads; what was to be written is."""
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._writer.shutdown()

    def batch(self, numbers: list[int], close: Callable[[], None] = lambda: None) -> Batch:
        """Return a batch whose items are being read, as far as it is known what is needed."""
        items = [self.output.item(self.listing, number, self._used) for number in numbers]
        ahead = [self._readers.submit(item.read_ahead) for item in items] if self._used else []
        return Batch(numbers, items, ahead, close)

    def run(self, batches: Iterator[Batch], must_stop: Callable[[], bool]) -> None:
        """Encode and keep batches, until there are no more or somebody wants to stop."""
        ahead: deque[Batch] = deque()
        behind: deque[Future[None]] = deque()
        try:
            while not must_stop():
                ahead.extend(islice(batches, self.depth - len(ahead)))
                if not ahead:
                    break
                batch = ahead.popleft()
                try:
                    for each in batch.ahead:
                        each.result()
                    values = self._call(batch.items)
                    self.has_encoded = self.has_encoded or any(map(_is_value, values))
                except BaseException:
                    batch.close()
                    raise
                behind.append(self._writer.submit(self._write, batch, values))
                while len(behind) > _BEHIND:
                    behind.popleft().result()
            while behind:
                behind.popleft().result()
        finally:
            for batch in ahead:
                batch.close()
            wait(behind)  # also if the encoder has failed: what it made before is kept

    def _call(self, items: list[Item]) -> list[object]:
        """Call the encoder; return a value, or why there is none, for each item."""
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
        return split(self.encoder.function(items), len(items), self.output.name)

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
        if self.has_encoded:
            return True
        names = {item.name for item in items}
        for other in self.trials(len(items) + TRIED):
            if other.name not in names:
                with suppress(Exception):
                    self.has_encoded = any(map(_is_value, self._encoded([other])))
            if self.has_encoded:
                break
        return self.has_encoded

    def _write(self, batch: Batch, values: list[object]) -> None:
        """Keep the outputs of a batch; in the thread that writes."""
        error: EncoderError | None = None
        try:
            for number, item, value in zip(batch.numbers, batch.items, values, strict=True):
                try:
                    self._keep(number, item, value)
                except EncoderError as each:  # of one: the others are kept all the same
                    error = error or each
        finally:
            batch.close()
        if error is not None:
            raise error
        self.sink.written(len(values))

    def _keep(self, number: int, item: Item, value: object) -> None:
        """Keep one output, or the reason why there is none."""
        name = self.output.name
        if isinstance(value, BaseException):
            # An encoder that opens files by itself has another word for a drive that is gone.
            is_changed = not isinstance(value, ItemError) and item.has_changed()
            self._fail(number, item, ChangedError(_CHANGED) if is_changed else value)
            return
        kept = as_kept(value, self.encoder.trim, name)
        field = None if self.rules.nan == "keep" else nan_in(kept)
        if item.has_changed():
            self._fail(number, item, ChangedError(_CHANGED))
        elif field is not None:
            what = f"NaN in {name}{f'[{field!r}]' if field else ''}"
            self._fail(number, item, EncoderError(what), must_raise=self.rules.nan == "raise")
        else:
            about = self.output.about(self.listing, number, item)
            self.output.set.put(self.output.key(number), kept, metadata=about)
            self.sink.kept(number)

    def _fail(
        self, number: int, item: Item, error: BaseException, *, must_raise: bool | None = None
    ) -> None:
        is_own = isinstance(error, (ItemError, EncoderError))
        reason = str(error) if is_own else f"failed: {type(error).__name__}: {error}"
        if self.rules.on_error == "raise" if must_raise is None else must_raise:
            message = f"{self.output.name} of {item.name} cannot be encoded: {reason}"
            raise EncoderError(message, items=(item.name,)) from error
        is_remembered = not isinstance(error, ChangedError)
        self.sink.left_out(number, item.name, reason, is_remembered=is_remembered)


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
