"""Programs that write files in every way there is, against a store that links the same files.

A round: some files with the same bytes as a blob; one process writes them, one looks at their
names all the time, and the process that drives the round lets the store work on them. Each write
adds its number to the file, so that afterwards the bytes tell whether any of them was lost.
"""

from __future__ import annotations

import itertools
import mmap
import os
import random
import signal
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from smartcache.store.store import Store
from smartcache.system import faults
from tests.processes.children import Child

SIZE = 8192
MOST_WRITES = 500
MOST_EXTRA_ROUNDS = 1000
LONG_AGO_NS = 1_600_000_000_000_000_000

How = Literal["edit", "edit fast", "map", "rename", "recreate", "truncate"]
HOWS: tuple[How, ...] = ("edit", "edit fast", "map", "rename", "recreate", "truncate")
KEEPS_THE_NAME: frozenset[How] = frozenset(("edit", "edit fast", "map", "rename", "truncate"))
KEEPS_THE_SIZE: frozenset[How] = frozenset(("edit", "edit fast", "map", "rename"))

_TOKEN = struct.Struct("<II")


def content(seed: int, writes: int) -> bytes:
    """Return the bytes of a file that was written to so many times."""
    data = bytearray(random.Random(seed).randbytes(SIZE))
    for number in range(1, writes + 1):
        _TOKEN.pack_into(data, number * _TOKEN.size, seed, number)
    return bytes(data)


def make(path: Path, data: bytes) -> None:
    """Put a new file at a path in one step, with a time of long ago."""
    fresh = path.with_name(f"{path.name}-new")
    fresh.write_bytes(data)
    os.utime(fresh, ns=(LONG_AGO_NS, LONG_AGO_NS))
    os.replace(fresh, path)


@dataclass(frozen=True)
class File:
    """A file of a round, and the seed of its bytes."""

    path: Path
    seed: int


class Board:
    """Memory that the processes share: how often each file was written, and what is over."""

    def __init__(self, files: int) -> None:
        self._memory = mmap.mmap(-1, 8 * (files + 2))
        self._numbers = memoryview(self._memory).cast("Q")

    def writes(self, file: int) -> int:
        """Return how many writes to a file are complete."""
        return self._numbers[file + 2]

    def log(self, file: int, writes: int) -> None:
        """Note that so many writes to a file are complete."""
        self._numbers[file + 2] = writes

    @property
    def is_round_over(self) -> bool:
        """Whether writers are to stop."""
        return bool(self._numbers[0])

    @is_round_over.setter
    def is_round_over(self, value: bool) -> None:
        self._numbers[0] = value

    @property
    def is_race_over(self) -> bool:
        """Whether everybody is to stop."""
        return bool(self._numbers[1])

    @is_race_over.setter
    def is_race_over(self, value: bool) -> None:
        self._numbers[1] = value


Rounds = Callable[[int], Sequence[File]]
"""The files of a round, by its number: the same for all processes."""


class Writer:
    """A process that writes the files of each round, until it is told or denied."""

    def __init__(self, how: How, rounds: Rounds, board: Board) -> None:
        self._how = how
        self._rounds = rounds
        self._board = board
        self._go, self._going = os.pipe()
        self._ready, self._done = os.pipe()
        self._child = Child(self._work)
        os.close(self._go)
        os.close(self._done)

    def start(self) -> None:
        """Let it write the files of the next round."""
        os.write(self._going, b"g")

    def wait(self) -> None:
        """Wait until its last write of this round is complete."""
        if not os.read(self._ready, 1):
            self._child.result()

    def stop(self) -> int:
        """End it; return how many writes it completed."""
        os.close(self._going)
        writes = self._child.result()
        os.close(self._ready)
        return writes

    def _work(self) -> int:
        os.close(self._going)
        os.close(self._ready)
        total = 0
        chance = random.Random(os.getpid())
        for number in itertools.count():
            if not os.read(self._go, 1):
                break
            total += self._write_round(self._rounds(number), chance)
            os.write(self._done, b"d")
        return total

    def _write_round(self, files: Sequence[File], chance: random.Random) -> int:
        writes = [0] * len(files)
        open_to_us = set(range(len(files)))
        is_fast = self._how != "edit"
        while open_to_us and not (is_fast and self._board.is_round_over):
            if not is_fast:
                _spin(chance.random() * 0.003)
            index = chance.choice(sorted(open_to_us))
            try:
                _write(self._how, files[index], writes[index] + 1)
            except PermissionError:  # it is a link to a blob now
                open_to_us.discard(index)
                continue
            writes[index] += 1
            self._board.log(index, writes[index])
            if not is_fast or writes[index] == MOST_WRITES:
                open_to_us.discard(index)
        return sum(writes)


def _spin(seconds: float) -> None:
    """Wait without giving up the processor: a sleep is never this short."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def _write(how: How, file: File, number: int) -> None:
    path = file.path
    if how in ("edit", "edit fast"):
        descriptor = os.open(path, os.O_WRONLY)
        try:
            os.pwrite(descriptor, _TOKEN.pack(file.seed, number), number * _TOKEN.size)
        finally:
            os.close(descriptor)
    elif how == "map":
        descriptor = os.open(path, os.O_RDWR)
        try:
            mapping = mmap.mmap(descriptor, SIZE)
        finally:
            os.close(descriptor)
        with mapping:
            _spin(0.0002)
            _TOKEN.pack_into(mapping, number * _TOKEN.size, file.seed, number)
    elif how == "rename":
        fresh = path.with_name(f"{path.name}-{number}")
        fresh.write_bytes(content(file.seed, number))
        os.replace(fresh, path)
    elif how == "recreate":
        os.unlink(path)
        with open(path, "xb") as created:
            created.write(content(file.seed, number))
    else:
        with open(path, "wb" if number % 2 else "r+b") as opened:
            opened.truncate(0)
            opened.write(content(file.seed, number))


def _look(paths: Sequence[Path], board: Board, parent: int, *, sized: bool) -> int:
    """See that every name is there at every moment, and whole; return how often."""
    names = [str(path) for path in paths]
    looks = 0
    while not board.is_race_over and os.getppid() == parent:
        for name in random.sample(names, min(len(names), 20)):
            st = os.stat(name)
            assert not sized or st.st_size == SIZE, f"{name} has {st.st_size} bytes"
            looks += 1
    return looks


@contextmanager
def _looking(how: How, paths: Sequence[Path], board: Board) -> Iterator[None]:
    if how not in KEEPS_THE_NAME:
        yield
        return
    parent = os.getpid()
    with Child(lambda: _look(paths, board, parent, sized=how in KEEPS_THE_SIZE)) as reader:
        yield
        board.is_race_over = True
        assert reader.result() > 0


class Breaks:
    """How often a writer came while we held a lease: the kernel sends SIGURG each time."""

    def __init__(self) -> None:
        self.seen = 0
        signal.signal(signal.SIGURG, self._note)

    def _note(self, *_: object) -> None:
        self.seen += 1


Act = Callable[[Store, Sequence[File]], Counter[str]]
"""Lets the store work on the files of a round; says what became of them."""


def race(
    store: Store,
    how: How,
    rounds: Rounds,
    *,
    act: Act,
    check: Callable[[Store, Sequence[File]], None],
    points: Sequence[str],
    wanted: Sequence[str] = (),
    least: int,
    most_rounds: int | None = None,
) -> Counter[str]:
    """Run rounds, in a process of its own.

    The writer of a round starts at any of the `points` the store goes through, so that it comes at
    the worst time too. After the `least` rounds the race goes on until everything `wanted` was
    seen, within reason. The files are made anew for each round, unless `most_rounds` says for how
    many they are there.
    """
    counts: Counter[str] = Counter()
    breaks = Breaks()
    chance = random.Random(os.getpid())
    paths = [f.path for number in range(most_rounds or 1) for f in rounds(number)]
    if most_rounds is None:
        for file in rounds(0):
            make(file.path, content(file.seed, 0))
    board = Board(len(rounds(0)))
    writer = Writer(how, rounds, board)
    with _looking(how, paths, board):
        for number in itertools.count():
            files = rounds(number)
            if most_rounds is None:
                for file in files:
                    make(file.path, content(file.seed, 0))
            for index in range(len(files)):
                board.log(index, 0)
            board.is_round_over = False
            with _started_at(chance.choice(["", *points]), writer):
                counts += act(store, files)
            board.is_round_over = True
            writer.wait()
            for index, file in enumerate(files):
                _assert_nothing_lost(file, board.writes(index))
            check(store, files)
            counts["rounds"] += 1
            counts["leases broken"] = breaks.seen
            counts["rounds written in"] += any(map(board.writes, range(len(files))))
            is_seen = all(counts[name] for name in ("rounds written in", *wanted))
            is_seen |= counts["rounds"] > MOST_EXTRA_ROUNDS
            if number + 1 == most_rounds or (number + 1 >= least and is_seen):
                break
    counts["writes"] = writer.stop()
    return counts


@contextmanager
def _started_at(point: str, writer: Writer) -> Iterator[None]:
    """Start the writer when the store reaches a point, or at once; at the end if it never does."""
    waiting = [point]

    def start(reached: str) -> None:
        if reached in waiting:
            waiting.remove(reached)
            writer.start()

    start("")
    faults.hook = start
    try:
        yield
    finally:
        faults.hook = None
        if waiting:
            start(waiting[0])


def _assert_nothing_lost(file: File, writes: int) -> None:
    found = file.path.read_bytes()
    wanted = content(file.seed, writes)
    if found == wanted:
        return
    assert len(found) == SIZE, f"{file.path.name} has {len(found)} bytes"
    tokens = [_TOKEN.unpack_from(found, n * _TOKEN.size) for n in range(1, MOST_WRITES + 1)]
    there = [n for n, token in enumerate(tokens, 1) if token == (file.seed, n)]
    missing = sorted(set(range(1, writes + 1)) - set(there))
    message = f"{file.path.name}: writes {missing} of {writes} are lost; found {len(there)}"
    raise AssertionError(message)
