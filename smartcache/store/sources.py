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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from smartcache import errors
from smartcache.store.blobs import put_stream
from smartcache.store.home import Home
from smartcache.store.layout import Pool
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
        message = f"The tier {self.tier.name} has sent nothing for {_SILENCE:.0f} seconds"
        late = errors.TierError(message, tier=self.tier.name)
        chunks = self.tier.chunks(self.digest, size=self.size)
        return _in_threads([chunks], patience=_SILENCE, late=late)

    def take(
        self, home: Home, pool: Pool, expected: Mapping[Algorithm, str],
        advance: Advance | None = None,
    ) -> str:  # fmt: skip
        """Make it a blob, if it has these hashes; return its digest.

        Else an error: of the source, or DigestMismatchError; nothing of it is kept then.
        """
        with self.judged():
            return put_stream(
                home, pool, self.chunks(), size=self.size,
                expected={**expected, "blake3": self.digest}, advance=advance, durable=False,
            )  # fmt: skip

    @contextmanager
    def judged(self) -> Iterator[None]:
        """Let wrong bytes that are found in this block be an error that names tier and object."""
        try:
            yield
        except (errors.DigestMismatchError, errors.SizeMismatchError) as error:
            message = f"The object {self.digest} of the tier {self.tier.name} is damaged: {error}"
            raise errors.DamagedObjectError(
                message, tier=self.tier.name, digest=self.digest
            ) from error


class Asking:
    """Asks tiers, and remembers which of them failed a moment ago."""

    def __init__(self) -> None:
        self._asleep: dict[str, float] = {}

    def offers(
        self, tiers: Iterable[BlobSource], wanted: Collection[Wanted]
    ) -> dict[Wanted, Offer]:
        """Return what tiers have of what is wanted, of each the first: a small request each."""
        offers: dict[Wanted, Offer] = {}
        for tier in tiers if wanted else ():
            missing = [each for each in wanted if each not in offers]
            answers = self._answers(tier, lambda w: tier.find(w.algorithm, w.value), missing)  # noqa: B023
            for each, found in answers:
                if found is not None and each.size in (None, found.size):
                    offers[each] = Offer(tier=tier, digest=found.digest, size=found.size)
        return offers

    def documents(
        self, tiers: Iterable[BlobSource], kind: str, name: str
    ) -> Iterator[tuple[BlobSource, Document]]:
        """Go through what tiers say of a repo, a set or a dataset."""
        for tier in tiers:
            answers = self._answers(tier, lambda name: tier.document(kind, name), [name])  # noqa: B023
            for _, found in answers:
                if found is not None:
                    yield tier, found

    def _answers(
        self, tier: BlobSource, ask: Callable[[T], R], questions: Sequence[T]
    ) -> Iterator[tuple[T, R]]:
        """Ask a tier; one that fails or does not answer is left alone for a while, and said."""
        if self._asleep.get(tier.name, 0.0) > time.monotonic():
            return
        todo = iter(questions)  # each thread takes the next one
        answers = [((each, ask(each)) for each in todo) for _ in questions[:_THREADS]]
        late = TimeoutError(f"it has not answered for {_PATIENCE:.0f} seconds")
        try:
            yield from _in_threads(answers, patience=_PATIENCE, late=late)
        except (errors.SmartcacheError, OSError) as error:
            self._asleep[tier.name] = time.monotonic() + _PAUSE
            _log.warning("the tier %s is left out: %s", tier.name, error)


def _in_threads(works: Sequence[Iterator[T]], *, patience: float, late: Exception) -> Iterator[T]:
    """Go through what iterators give, each in a thread, few items ahead of whoever takes them.

    `late` is raised if nothing comes for so many seconds, whatever it waits for. The threads are
    daemons: nobody waits for a drive of the network that hangs.
    """
    arrived: queue.Queue[tuple[T, ...] | Exception] = queue.Queue(_AHEAD)
    is_over = threading.Event()

    def run(work: Iterator[T]) -> None:
        for item in _items(work):
            is_waiting = True
            while is_waiting and not is_over.is_set():
                with suppress(queue.Full):
                    arrived.put(item, timeout=1)
                    is_waiting = False
            if is_over.is_set():
                return

    for work in works:
        threading.Thread(target=run, args=(work,), name="smartcache-tier", daemon=True).start()
    try:
        for _ in works:
            while item := arrived.get(timeout=patience):
                if isinstance(item, Exception):
                    raise item
                yield item[0]
    except queue.Empty:
        raise late from None
    finally:
        is_over.set()


def _items(work: Iterator[T]) -> Iterator[tuple[T, ...] | Exception]:
    """Go through (item,), then () or the error that ended it: for another thread to raise."""
    try:
        for item in work:
            yield (item,)
        yield ()
    except Exception as error:  # noqa: BLE001
        yield error
