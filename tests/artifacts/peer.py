"""What the state machine does to a set: in its own process, and in a second one over a pipe."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import numpy as np

from smartcache.artifacts import ArtifactSet, ArtifactSets
from smartcache.artifacts.engine import engine as artifacts_engine
from smartcache.errors import ArtifactNotFoundError
from tests.artifacts.exact import exactly
from tests.artifacts.opening import array, engine_of, open_set

PACK_BYTES = 12_000
MEMORY = 20_000
"""Bytes: room for some of the values, not for all."""
VALUES = 12
UNBOUND = 1 << 40
_clock_gettime_ns = time.clock_gettime_ns
Puts = list[tuple[str, int]]


class Clock:
    """A time of day that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


def value_of(number: int) -> object:
    """Return one of some values; several have tensors that are equal."""
    import torch

    kind, seed = number % 4, number // 4
    if kind == 0:
        return {"n": number, "text": "text" * number, "small": np.arange(seed)}
    if kind == 1:
        return {"n": number, "x": array(seed, 3000)}
    if kind == 2:
        return {"x": array(seed, 3000), "y": [torch.arange(600) + seed, None], 7: (1, 2.5)}
    return [array(7, 2000), {"deep": array(8 + seed, 1500), "again": array(7, 2000)}]


def contents_of(opened: ArtifactSet) -> dict[str, tuple[object, object, bool]]:
    """Return what a set holds: values and metadata, exactly, and what is pinned."""
    found = {}
    for key in opened:
        sample = opened[key]
        found[key] = exactly(sample.value()), sample.metadata, opened.is_pinned(key)
        for _ in range(2):  # where there is a memory, the second time it comes from there
            both = opened.get_with_metadata(key)
            assert both is not None
            assert (exactly(both[0]), both[1]) == found[key][:2]
    assert len(opened) == len(found)
    return found


class Actor:
    """One process that has the set open, and values of some artifacts in memory."""

    def __init__(self) -> None:
        self.sets: ArtifactSets
        self.opened: ArtifactSet

    def open(self, root: Path) -> None:
        self.sets = ArtifactSets(root)
        self.opened = open_set(self.sets, pack_bytes=PACK_BYTES, memory=MEMORY)

    def close(self) -> None:
        self.opened.close()

    def flush(self) -> None:
        self.opened.flush()

    def put(self, puts: Puts, metadata: object = None, ttl: float | None = None) -> None:
        for key, number in puts:
            self.opened.put(key, value_of(number), metadata=metadata, ttl=ttl)

    def compute(self, key: str, number: int) -> object:
        return exactly(self.opened.get_or_compute(key, lambda: value_of(number)))

    def delete(self, keys: list[str]) -> list[bool]:
        return [self.opened.delete(key) for key in keys]

    def touch(self, key: str) -> bool:
        return self._attempt(self.opened.touch, key)

    def pin(self, key: str, is_pinned: bool) -> bool:
        return self._attempt(self.opened.pin if is_pinned else self.opened.unpin, key)

    def compact(self, is_forced: bool) -> None:
        self.opened.compact(force=is_forced)

    def evict(self, bound: int) -> None:
        with open_set(self.sets, max_size=bound) as bounded:
            bounded.evict()
        open_set(self.sets, max_size=UNBOUND).close()

    def rebuild(self) -> None:
        self.sets.rebuild(self.sets.infos()[0])

    def contents(self) -> dict[str, tuple[object, object, bool]]:
        """Return what the set holds: values and metadata, exactly, and what is pinned."""
        return contents_of(self.opened)

    def contents_read_only(self) -> dict[str, tuple[object, object, bool]]:
        """Return the same, of a set that is opened for reading only."""
        with open_set(self.sets, read_only=True) as opened:
            return contents_of(opened)

    def reboot(self, number: int, origin: int) -> None:
        """Be on a machine that was started again: its clock began anew."""
        artifacts_engine.boot_id = lambda: f"boot {number}"  # type: ignore[assignment, attr-defined]
        time.clock_gettime_ns = lambda clock: _clock_gettime_ns(clock) - origin

    def take_in(self, pack: str) -> int:
        return self.opened.take_in(pack)

    def figures(self) -> tuple[int, int, int, int]:
        found = self.opened.stats()
        return found.artifacts, found.live, found.on_disk, found.dead

    def batch(self, keys: list[str]) -> dict[str, Any]:
        return self.opened.get_batch(keys)

    def die(self, puts: Puts, is_torn: bool) -> None:
        """Put, and come to an end in the middle of a write."""
        self.put(puts)
        writer = engine_of(self.opened).writer
        if is_torn and writer is not None:
            os.pwrite(writer._fd, b"SCr2" + os.urandom(99), writer.end)  # noqa: SLF001
        os._exit(0)

    @staticmethod
    def _attempt(act: Callable[[str], None], key: str) -> bool:
        try:
            act(key)
        except ArtifactNotFoundError:
            return False
        return True


class Peer:
    """An actor in another process; every call of a method is one of its."""

    def __init__(self, clock: Clock) -> None:
        context = get_context("fork")
        self._clock = clock
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._pipe), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pipe.close()
        self._process.join(10)
        self._process.kill()
        self._process.join()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: object) -> Any:  # noqa: ANN401 - what the method gives
            self._pipe.send((self._clock.now, name, arguments))
            is_good, result = self._pipe.recv()
            assert is_good, result
            return result

        return call


def _serve(pipe: Connection, parents: Connection) -> None:
    parents.close()  # or its end would never be heard of here
    clock = Clock()
    time.time = clock
    actor = Actor()
    while True:
        try:
            clock.now, name, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send((True, getattr(actor, name)(*arguments)))
        except Exception:  # noqa: BLE001 - whatever it is, the test is told
            pipe.send((False, traceback.format_exc()))
