"""Places beyond this machine that may have a blob, as the store sees them.

A tier is asked for objects by their hashes, and gives their bytes. It is a help, never a condition:
one that cannot be reached, or does not answer, is a warning, and is left alone for a while. Nor is
it believed: what it gives goes to a file that is hashed by all hashes that were asked for before it
becomes a blob, so that wrong bytes, half of an object or another one leave nothing behind.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from smartcache.errors import (
    DamagedObjectError,
    DigestMismatchError,
    SizeMismatchError,
    SmartcacheError,
    TierError,
)
from smartcache.store.blobs import put_stream
from smartcache.store.records import Blob
from smartcache.store.volume import Volume
from smartcache.system.hashing import Advance, Algorithm

_THREADS = 16
_PATIENCE = 10.0
"""Seconds without an answer, after which a tier is not asked any more."""
_SILENCE = 40.0
"""Seconds in which no byte of an object comes, after which it is given up."""
_PAUSE = 60.0
"""Seconds for which a tier that failed is left alone."""
_AHEAD = 1
_log = logging.getLogger(__name__)

Document = dict[str, Any]
T = TypeVar("T")
R = TypeVar("R")


class Found(NamedTuple):
    """An object of a tier."""

    digest: str
    size: int


class BlobSource(Protocol):
    """What the store asks of a tier. All of it may raise TierError."""

    @property
    def name(self) -> str:
        """What the user calls it."""
        ...

    def find(self, algorithm: str, value: str) -> Found | None:
        """Return the object that has a hash, by the account of the tier; None: there is none."""
        ...

    def chunks(self, digest: str, *, size: int | None = None) -> Iterator[bytes]:
        """Go through the bytes of an object."""
        ...

    def document(self, kind: str, name: str) -> Document | None:
        """Return what is said of a repo, a set or a dataset; None: nothing is."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A content that is looked for: one of its hashes, and its size if that is known."""

    algorithm: Algorithm
    value: str
    size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """An object of a tier that has the bytes that are wanted, by the account of the tier."""

    tier: BlobSource
    digest: str
    size: int

    def chunks(self) -> Iterator[bytes]:
        """Go through its bytes; TierError if none come for a while."""
        if not self.size:  # nothing need be asked for
            return iter(())
        return _read_ahead(self.tier.chunks(self.digest, size=self.size), self.tier.name)

    @contextmanager
    def judged(self) -> Iterator[None]:
        """Let wrong bytes that are found in this block be an error that names tier and object."""
        try:
            yield
        except (DigestMismatchError, SizeMismatchError) as error:
            message = f"The object {self.digest} of the tier {self.tier.name} is damaged: {error}"
            raise DamagedObjectError(message, tier=self.tier.name, digest=self.digest) from error


def take(
    volume: Volume, offer: Offer, expected: Mapping[Algorithm, str], advance: Advance | None = None
) -> Blob:
    """Make an object of a tier a blob: it has this digest, this size and these hashes.

    Else an error, and nothing is kept of it.
    """
    with offer.judged():
        return put_stream(
            volume, offer.chunks(), size=offer.size, expected={**expected, "blake3": offer.digest},
            advance=advance, durable=False,
        )  # fmt: skip


class Asking:
    """Asks tiers, and remembers which of them failed a moment ago."""

    def __init__(self) -> None:
        self._asleep: dict[str, float] = {}

    def offers(
        self, tiers: Iterable[BlobSource], wanted: Collection[Wanted]
    ) -> dict[Wanted, Offer]:
        """Return what tiers have of what is wanted, of each the first: a small request each."""
        offers: dict[Wanted, Offer] = {}
        for tier in tiers:
            missing = [each for each in wanted if each not in offers]
            answers = self._answers(tier, lambda w: tier.find(w.algorithm, w.value), missing)  # noqa: B023
            for each, found in answers:
                if found is not None and each.size in (None, found.size):
                    offers[each] = Offer(tier=tier, digest=found.digest, size=found.size)
        return offers

    def document(self, tier: BlobSource, kind: str, name: str) -> Document | None:
        """Return a document of a tier; None: there is none, or it cannot be had now."""
        answers = self._answers(tier, lambda each: tier.document(kind, each), [name])
        return next((found for _, found in answers), None)

    def _answers(
        self, tier: BlobSource, ask: Callable[[T], R], questions: Sequence[T]
    ) -> Iterator[tuple[T, R]]:
        """Ask a tier; one that fails or does not answer is left alone for a while, and said."""
        if self._asleep.get(tier.name, 0.0) > time.monotonic():
            return
        try:
            yield from _in_threads(ask, questions)
        except (SmartcacheError, OSError) as error:
            self._asleep[tier.name] = time.monotonic() + _PAUSE
            _log.warning("the tier %s is left out: %s", tier.name, error)


def _in_threads(ask: Callable[[T], R], questions: Sequence[T]) -> Iterator[tuple[T, R]]:
    """Ask some questions at once; TimeoutError if there is no answer for a while.

    The threads are daemons: nobody waits for a drive of the network that hangs.
    """
    answers = queue.SimpleQueue[tuple[T, R] | Exception]()
    todo = deque(questions)

    def work() -> None:
        with suppress(IndexError):  # nothing is left to do
            while True:
                each = todo.popleft()
                try:
                    answers.put((each, ask(each)))
                except Exception as error:  # noqa: BLE001 - raised by who asked
                    answers.put(error)

    for _ in range(min(_THREADS, len(questions))):
        threading.Thread(target=work, name="smartcache-tier", daemon=True).start()
    try:
        for _ in questions:
            answer = answers.get(timeout=_PATIENCE)
            if isinstance(answer, Exception):
                raise answer
            yield answer
    except queue.Empty:
        raise TimeoutError(f"it has not answered for {_PATIENCE:.0f} seconds") from None
    finally:
        todo.clear()


def _read_ahead(chunks: Iterator[bytes], name: str) -> Iterator[bytes]:
    """Go through chunks that a thread reads, a few ahead of whoever takes them.

    TierError if nothing comes for a while, whatever it waits for.
    """
    arrived: queue.Queue[bytes | BaseException | None] = queue.Queue(_AHEAD)
    is_over = threading.Event()

    def put(item: bytes | BaseException | None) -> None:
        while not is_over.is_set():
            with suppress(queue.Full):
                arrived.put(item, timeout=1)
                return

    def read() -> None:
        try:
            for chunk in chunks:
                put(chunk)
                if is_over.is_set():
                    return
            put(None)
        except BaseException as error:  # noqa: BLE001 - raised by who takes them
            put(error)

    threading.Thread(target=read, name="smartcache-tier", daemon=True).start()
    try:
        while (item := arrived.get(timeout=_SILENCE)) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    except queue.Empty:
        message = f"The tier {name} has sent nothing for {_SILENCE:.0f} seconds"
        raise TierError(message, tier=name) from None
    finally:
        is_over.set()
