"""Batches read ahead of the training loop, in their order, by threads that can be held still.

Readers claim the next step, put a slot for it at the end of a line and fill the slot; the consumer
takes the slot in front once it is filled. So the order is that of the source, whichever reader is
quicker, and a failure has its place in it like a batch. To drain is to begin another line: what is
still being read for the old one arrives nowhere.

The lock is held only for moments: of the source, `advance` and `state_dict` are called with it, and
nothing else. So one that hangs can keep neither `close` nor the end of the process waiting.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    Literal,
    Protocol,
    Self,
    TypeVar,
    cast,
    runtime_checkable,
)

from smartcache.errors import ConfigError, SmartcacheError

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)
StepT = TypeVar("StepT")
BatchT = TypeVar("BatchT")
BatchT_co = TypeVar("BatchT_co", covariant=True)

EXIT_SECONDS: Final = 2.0
"""How long the end of the process waits for reads that nobody wants any more."""
_BOTTLENECK: Final = 0.1
"""From this share of its time that the consumer waits, loading is called the bottleneck."""
_GLANCE: Final = 1.0
"""Seconds after which a reader that waits looks by itself."""
_ALIGNMENT: Final = 64
_END: Final = object()


@runtime_checkable
class StepSource(Protocol[StepT, BatchT_co]):
    """A source that knows its order: batches can be read by several threads, and read again.

    `read` is called by several threads at once. `steps`, `next_epoch` and the iterators they return
    are used by one thread at a time, but `advance` and `state_dict` may be called meanwhile. These
    two must be quick. Behind the last step of an epoch the position may be its end or the beginning
    of the next. With a `load_state_dict` the prefetcher has one, too.
    """

    def steps(self) -> Iterator[StepT]:
        """The batches from the position now to the end of the epoch, as cheap descriptions."""
        ...

    def next_epoch(self) -> Iterator[StepT]:
        """Those of the epoch after the one last given, here or by `steps`; the position stays."""
        ...

    def read(self, step: StepT) -> BatchT_co:
        """One batch."""
        ...

    def advance(self, step: StepT) -> None:
        """This step was handed out: the position is now behind it."""
        ...

    def state_dict(self) -> dict[str, object]:
        """The position now, for a checkpoint."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchStats:
    """Who waited for whom, in seconds; `str()` says it in a sentence."""

    batches: int
    """How many were handed out."""
    bytes: int
    """Of the tensors and arrays in them."""
    seconds: float
    """From when the first batch was asked for until the last one was handed out."""
    consumer_waited: float
    readers_waited: float
    """Because enough was read ahead; the sum over all readers."""
    mean_read: float
    """What one batch took a reader, the copy to the device included."""
    consumer: str = "consumer"

    def __str__(self) -> str:
        if not self.batches:
            return "No batch was handed out yet."
        share = self.consumer_waited / self.seconds if self.seconds else 0.0
        waited = f"{self.consumer} waited {100 * share:.0f} % of the time"
        if share < _BOTTLENECK:
            return f"The {waited}: loading keeps up."
        return f"Loading is the bottleneck: the {waited}."


class Prefetcher(Generic[BatchT]):
    """Iterate it for the batches of one epoch, and again for the next: they are there already.

        with Prefetcher(batches, depth=2, device="cuda") as loader:
            for epoch in range(epochs):
                for batch in loader:
                    ...

    Up to `depth` batches are read ahead, also across the end of the epoch, as soon as the first one
    is asked for. An exception is raised in the place of the batch that failed.

    Of a `StepSource` up to `threads` batches are read at once. After a `break` the epoch goes on
    with the next batch; after an exception with the one that failed, which is read again.

    Any other iterable is read by one thread, whatever `threads` says, and to the end of an epoch.
    After a `break` its epoch goes on, too; for a new epoch, and after an exception, `iter(source)`
    is called again. It cannot go back, and has no state here.

    For a device, tensors in dicts, lists and tuples are copied to it; for CUDA on a stream of its
    own, out of pinned memory that is used again. The batch can be used on the current stream at
    once. Arrays and other values stay as they are, and on the CPU nothing is copied.

    It is for one process: in a forked child, one that has begun to read raises SmartcacheError.
    """

    _is_closed = True  # for `__del__`, should `__init__` refuse its arguments

    def __init__(
        self,
        source: StepSource[Any, BatchT] | Iterable[BatchT],
        *,
        depth: int = 2,
        threads: int = 2,
        device: str | int | torch.device | None = None,
        pin_memory: bool | Literal["auto"] = "auto",
    ) -> None:
        # A lock that a thread may take twice: the garbage collector may call `_stop` in it.
        self._changed = threading.Condition()
        self._line = _Line()
        # One reader at a time asks for the next step, also across lines: a plan is never asked for
        # `steps` while it still looks for the `next_epoch` of a line that was drained.
        self._is_claiming = False
        self._under_way = 0
        self._pausers: list[int] = []
        self._is_between_epochs = self._owes_end = False
        self._is_closed = self._is_given_up = False
        self._threads: list[threading.Thread] = []
        self._pid: int | None = None
        self._batches = self._bytes = self._reads = 0
        self._read_seconds = self._readers_waited = self._consumer_waited = 0.0
        self._first_asked = self._last_handed_out = 0.0
        for name, value in (("depth", depth), ("threads", threads)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        self._is_plan = isinstance(source, StepSource)
        plan = source if self._is_plan else _Iterated(cast("Iterable[BatchT]", source))
        self._source, self._plan = source, cast("StepSource[object, BatchT]", plan)
        self._depth, self._count = depth, min(threads, depth) if self._is_plan else 1
        self._mover: _Mover | None = None
        if device is not None and str(device).partition(":")[0] != "cpu":
            self._mover = _Mover(device, pin_memory, buffers=2 * self._count)
        elif pin_memory is True:
            raise ConfigError("Memory is pinned for a CUDA device, and none was given")

    def __iter__(self) -> Iterator[BatchT]:
        """The rest of this epoch, or all of the next one."""
        while (slot := self._take()) is not None:
            # Nothing here may hold on to the batch while the consumer has it.
            yield self._batch_of(slot)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is read in this block: it begins when the reads under way have ended.

        What was read ahead can be handed out in the block; asking for more is an error. Blocks may
        be nested, also by several threads.
        """
        self._check_process()
        pauser = threading.get_ident()
        with self._changed:
            self._pausers.append(pauser)
        try:
            with self._changed:
                self._changed.wait_for(lambda: not self._under_way or self._is_closed)
                if self._under_way:
                    raise SmartcacheError("The prefetcher was closed, but the source still reads")
            if self._mover is not None:
                self._mover.settle()
            yield
        finally:
            with self._changed:
                self._pausers.remove(pauser)
                self._changed.notify_all()

    def drain(self) -> None:
        """Throw away what was read ahead; the next batch is read anew. Waits for nothing."""
        self._check_process()
        self._check_goes_back()
        self._begin_again()

    def state_dict(self) -> dict[str, object]:
        """The state of the source just after the batch that was last handed out."""
        self._check_process()
        self._check_goes_back()
        with self._changed:
            return self._plan.state_dict()

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on after the batch that was last handed out when the state was taken.

        Waits for the reads under way.
        """
        self._check_goes_back()
        if not hasattr(self._source, "load_state_dict"):
            raise SmartcacheError(f"{_name(self._source)} has no load_state_dict")
        with self.paused():
            self._is_between_epochs = self._owes_end = False
            self._begin_again()  # first: nothing of the old line may be handed out any more
            self._source.load_state_dict(state)

    def stats(self) -> PrefetchStats:
        """Who waited for whom until now."""
        self._check_process()
        is_cuda = self._mover is not None and self._mover.device.type == "cuda"
        with self._changed:
            return PrefetchStats(
                batches=self._batches,
                bytes=self._bytes,
                seconds=self._last_handed_out - self._first_asked,
                consumer_waited=self._consumer_waited,
                readers_waited=self._readers_waited,
                mean_read=self._read_seconds / self._reads if self._reads else 0.0,
                consumer="GPU" if is_cuda else "consumer",
            )

    def close(self, timeout: float = 5.0) -> None:
        """End the readers; after `timeout` seconds leave behind those that the source still holds.

        Does nothing the second time, nor in a forked child.
        """
        self._stop()
        if self._is_given_up or self._is_of_other_process():
            return
        deadline = time.monotonic() + timeout
        others = [each for each in self._threads if each is not threading.current_thread()]
        for thread in others:
            thread.join(max(0.0, deadline - time.monotonic()))
        left = sum(thread.is_alive() for thread in others)
        with self._changed:
            is_news = left > 0 and not self._is_given_up
            self._is_given_up |= is_news
        if is_news:
            _log.warning(
                "%d of the threads that read ahead were left behind: %s did not return in %g s",
                left, _name(self._source), round(timeout, 2),
            )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self._stop()

    def _take(self) -> _Slot | None:
        """The next batch in its slot, or None at the end of an epoch; failures are raised."""
        self._check_process()
        asked = time.perf_counter()
        dropped: _Line | None = None
        with self._changed:
            while not (self._line.slots and self._line.slots[0].is_filled):
                self._prepare_to_wait()
                self._changed.wait()
            slot = self._line.slots.popleft()
            self._changed.notify_all()
            self._last_handed_out = time.perf_counter()
            self._consumer_waited += self._last_handed_out - asked
            self._first_asked = self._first_asked or asked
            if slot.is_end:
                self._is_between_epochs, self._owes_end = True, False
            elif slot.error is None:
                # With the lock: no line may begin between the two.
                self._plan.advance(slot.step)
                self._is_between_epochs = self._owes_end = slot.is_last
                self._batches += 1
                self._bytes += slot.size
                slot.step = None
            else:
                dropped = self._begin_again()
                self._line.is_held = True
        del dropped
        if slot.error is not None:
            error, slot.error = slot.error, None
            try:
                raise error
            finally:
                del error  # or it and its traceback keep each other alive
        return None if slot.is_end else slot

    def _batch_of(self, slot: _Slot) -> BatchT:
        batch, slot.batch = slot.batch, None
        if self._mover is not None and slot.copied is not None:
            self._mover.receive(batch, slot.copied)
        return cast("BatchT", batch)

    def _prepare_to_wait(self) -> None:
        """See to it that somebody will fill the slot for which the consumer is about to wait."""
        if self._is_closed:
            raise SmartcacheError("The prefetcher is closed", hint="Make a new one.")
        if threading.get_ident() in self._pausers:
            raise SmartcacheError(
                "All that was read ahead is used up, and reading is paused",
                hint="Ask for the next batch after the block of paused().",
            )
        if not self._line.slots and self._line.is_held:
            self._line.is_held = False
            self._changed.notify_all()
        if not self._threads:
            if self._mover is not None:
                self._mover.open()
            self._pid = os.getpid()
            _started.add(self)
            for number in range(self._count):
                thread = threading.Thread(
                    target=self._work,
                    args=(weakref.ref(self), self._changed),
                    name=f"smartcache-prefetch-{number}",
                    daemon=True,
                )
                thread.start()
                self._threads.append(thread)

    def _begin_again(self) -> _Line:
        """Begin another line where the source says, and return the old one.

        To be dropped without the lock: a generator or DataLoader that ends with it may take long.
        """
        with self._changed:
            old, self._line = self._line, _Line(skips_end=self._is_between_epochs)
            if self._owes_end and not self._is_closed:
                self._line.slots.append(_Slot(is_end=True, is_filled=True))
            self._changed.notify_all()
        return old

    def _stop(self) -> None:
        """Let no read begin any more. Waits for nothing: also for the garbage collector."""
        if self._is_closed or self._is_of_other_process():
            return
        with self._changed:
            self._is_closed = True
        self._begin_again()

    def _is_of_other_process(self) -> bool:
        """Here the threads do not exist, and one of them may have held the lock at the fork."""
        return self._pid is not None and self._pid != os.getpid()

    def _check_process(self) -> None:
        if self._is_of_other_process():
            raise SmartcacheError(
                "The prefetcher was started in another process, of which this one is a fork",
                hint="Make a Prefetcher in each process, after the fork.",
            )

    def _check_goes_back(self) -> None:
        if not self._is_plan:
            raise SmartcacheError(
                f"{_name(self._source)} is only read ahead: it cannot go back, and has no state",
                hint="Use Batches.",
            )

    @staticmethod
    def _work(known: weakref.ref[Prefetcher[BatchT]], changed: threading.Condition) -> None:
        """What a reader does. It holds the prefetcher only while it reads: a lost one can end."""
        waited = 0.0
        while True:
            with changed:
                self = known()
                if self is None or self._is_closed:
                    return
                self._readers_waited += waited
                waited = 0.0
                line = self._line
                is_full = line.is_full(self._depth)
                if is_full or line.is_held or self._is_claiming or self._pausers:
                    del self, line
                    began = time.perf_counter()
                    # Now and then it looks by itself: the collector may have called `_stop` here,
                    # in this thread, just before it waits.
                    changed.wait(_GLANCE)
                    waited = time.perf_counter() - began if is_full else 0.0
                    continue
                self._is_claiming = True
                self._under_way += 1
            self._read_one(line)
            del self, line

    def _read_one(self, line: _Line) -> None:
        began = time.perf_counter()
        slot = _Slot()
        self._find_step(line, slot)
        with self._changed:
            self._is_claiming = False
            line.slots.append(slot)
            line.is_held |= slot.is_end and not self._is_plan
            self._changed.notify_all()
        if slot.error is None and not slot.is_end:
            self._fill(slot)
        with self._changed:
            self._under_way -= 1
            slot.is_filled = True
            line.is_held |= slot.error is not None
            if not slot.is_end:
                self._reads += 1
                self._read_seconds += time.perf_counter() - began
            self._changed.notify_all()
        # The traceback of a failure keeps this frame alive, and must not keep the other batches.
        del line, slot

    def _find_step(self, line: _Line, slot: _Slot) -> None:
        try:
            while True:
                if line.epoch is None:
                    begin = self._plan.next_epoch if line.is_begun else self._plan.steps
                    mark = _marked if self._is_plan else _unmarked
                    line.epoch = mark(iter(begin()))
                    line.is_begun = True
                step, is_last = next(line.epoch, (_END, False))
                if step is _END:
                    line.epoch = None
                is_skipped, line.skips_end = step is _END and line.skips_end, False
                if not is_skipped:
                    slot.step, slot.is_last, slot.is_end = step, is_last, step is _END
                    return
        except BaseException as error:  # noqa: BLE001 - raised in the consumer, in its place
            slot.error = error

    def _fill(self, slot: _Slot) -> None:
        try:
            slot.batch = self._plan.read(slot.step)
            slot.size = sum(map(_size, _leaves(slot.batch)))
            if self._mover is not None:
                slot.batch, slot.copied = self._mover.send(slot.batch)
        except BaseException as error:  # noqa: BLE001 - raised in the consumer, in its place
            slot.batch, slot.error = None, error


@dataclass(slots=True, eq=False)
class _Slot:
    """One place in the order: for a batch, a failure, or the end of an epoch."""

    step: object = None
    batch: object = None
    copied: torch.cuda.Event | None = None
    size: int = 0
    error: BaseException | None = None
    is_last: bool = False
    is_end: bool = False
    is_filled: bool = False


@dataclass(slots=True, eq=False)
class _Line:
    """The slots between the readers and the consumer, and where the next steps come from."""

    skips_end: bool = False
    """All of an epoch was handed out: if the source says that nothing is left of it, go on."""
    slots: deque[_Slot] = field(default_factory=deque)
    epoch: Iterator[tuple[object, bool]] | None = None
    is_begun: bool = False
    is_held: bool = False
    """Nothing more is read until the consumer has taken all slots and waits for another."""

    def is_full(self, depth: int) -> bool:
        """Ends of epochs take no room; but of an empty source, too, not all can be read ahead."""
        ends = sum(slot.is_end for slot in self.slots)
        return len(self.slots) - ends >= depth or ends > depth


def _marked(steps: Iterator[object]) -> Iterator[tuple[object, bool]]:
    """Each step, and whether it is the last; a failure still comes after the step before it."""
    step = next(steps, _END)
    while step is not _END:
        try:
            following = next(steps, _END)
        except BaseException:
            yield step, False
            raise
        yield step, following is _END
        step = following


def _unmarked(steps: Iterator[object]) -> Iterator[tuple[object, bool]]:
    # Of an iterable nobody knows. Unlike a generator, `map` does not keep the last item alive.
    return map(lambda step: (step, False), steps)  # noqa: C417


class _Iterated(Generic[BatchT]):
    """Any iterable as a plan that is only gone through: a step is the item itself."""

    def __init__(self, source: Iterable[BatchT]) -> None:
        self._source = source

    def steps(self) -> Iterator[BatchT]:
        return iter(self._source)

    next_epoch = steps

    def read(self, step: BatchT) -> BatchT:
        return step

    def advance(self, step: BatchT) -> None:
        pass


class _Mover:
    """Copies batches to a device; to CUDA on a stream of its own, through a ring of pinned memory.

    The copies of one stream end in their order, so the buffer at the front of the ring is the first
    that is free again. It is filled anew only after the event behind its last copy.
    """

    def __init__(
        self,
        device: str | int | torch.device,
        pin_memory: bool | Literal["auto"],  # noqa: FBT001 - as the user gave it
        *,
        buffers: int,
    ) -> None:
        import torch

        self.device = torch.device(device)
        is_cuda = self.device.type == "cuda"
        if is_cuda and not torch.cuda.is_available():
            raise ConfigError(f"There is no device {device} here: torch finds no CUDA")
        if pin_memory is True and not is_cuda:
            raise ConfigError(f"Memory is pinned for CUDA devices, and {device} is none")
        self._pins = is_cuda and pin_memory is not False
        self._stream: torch.cuda.Stream | None = None
        self._ring: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()
        self._lock = threading.Lock()
        self._missing = buffers
        self._largest = 0

    def open(self) -> None:
        """Make the stream, in the thread of the consumer: "cuda" is the current device there.

        Not earlier, because a process that has used CUDA cannot be forked.
        """
        import torch

        if self.device.type == "cuda":
            if self.device.index is None:
                self.device = torch.device("cuda", torch.cuda.current_device())
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def send(self, batch: object) -> tuple[object, torch.cuda.Event | None]:
        """The batch on the device, and the event after which it is complete there."""
        import torch

        if self._stream is None:
            return _mapped(batch, lambda tensor: tensor.to(self.device)), None
        tensors = [leaf for leaf in _leaves(batch) if isinstance(leaf, torch.Tensor)]
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        if any(tensor.is_cuda for tensor in tensors):
            # Made there by the source: the event has to be behind that, too.
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        sizes = [_aligned(_size(tensor)) for tensor in tensors if self._is_staged(tensor)]
        with torch.no_grad(), torch.cuda.stream(self._stream):
            buffer = self._free_buffer(sum(sizes)) if sizes else None
            used = 0

            def send_one(tensor: torch.Tensor) -> torch.Tensor:
                nonlocal used
                if buffer is not None and self._is_staged(tensor):
                    room = buffer[used : used + _size(tensor)].view(tensor.dtype)
                    used += _aligned(_size(tensor))
                    # The strides that a copy gets, so that channels_last stays so.
                    strides = torch.empty_like(tensor, device="meta").stride()
                    tensor = room.as_strided(tensor.shape, strides).copy_(tensor)
                return tensor.to(self.device, non_blocking=True)

            try:
                return _mapped(batch, send_one), copied
            finally:
                copied.record(self._stream)
                if buffer is not None:
                    with self._lock:
                        self._ring.append((buffer, copied))

    def _is_staged(self, tensor: torch.Tensor) -> bool:
        """Whether it goes through the ring: not what is pinned already, or is no plain memory."""
        import torch

        is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        return self._pins and is_plain and tensor.device.type == "cpu" and not tensor.is_pinned()

    def _free_buffer(self, size: int) -> torch.Tensor:
        import torch

        with self._lock:
            buffer, copied = None, None
            self._largest = max(size, self._largest)
            is_free = self._ring and self._ring[0][1].query()  # type: ignore[no-untyped-call]
            if is_free or (self._ring and self._missing <= 0):
                buffer, copied = self._ring.popleft()
            else:
                self._missing -= 1
        if copied is not None:
            copied.synchronize()
        if buffer is None or len(buffer) < size:
            buffer = torch.empty(self._largest, dtype=torch.uint8, pin_memory=True)
        return buffer

    def receive(self, batch: object, copied: torch.cuda.Event) -> None:
        """Make the consumer's stream wait for the copy, and the memory stay until it is done."""
        import torch

        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(copied)
        for leaf in _leaves(batch):
            if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
                leaf.record_stream(stream)

    def settle(self) -> None:
        """Wait for the copies under way."""
        if self._stream is not None:
            self._stream.synchronize()


def _name(source: object) -> str:
    return type(source).__name__


def _leaves(value: object) -> Iterator[object]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _mapped(value: object, change: Callable[[torch.Tensor], torch.Tensor]) -> object:
    """The same dicts, lists and tuples with other tensors."""
    import torch

    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _mapped(each, change) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        made = [_mapped(each, change) for each in value]
        is_named = hasattr(value, "_fields")
        return type(value)(*made) if is_named else type(value)(made)  # type: ignore[arg-type]
    return value


def _size(leaf: object) -> int:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(leaf, torch.Tensor):
        return int(leaf.numel() * leaf.element_size())  # `nbytes` of a sparse one raises
    size = getattr(leaf, "nbytes", 0)
    return size if isinstance(size, int) else 0


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


_started: weakref.WeakSet[Prefetcher[Any]] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Have no reader in the midst of torch or CUDA when these are taken apart.

    They are daemon threads, so they cannot keep the process. `atexit` comes after the end of the
    other threads, which may iterate until then; the hook of `threading` would come before it.
    """
    deadline = time.monotonic() + EXIT_SECONDS
    started = list(_started)
    for each in started:
        each._stop()  # noqa: SLF001
    for each in started:
        each.close(max(0.0, deadline - time.monotonic()))


__all__ = ["PrefetchStats", "Prefetcher", "StepSource"]
