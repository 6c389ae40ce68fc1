"""Programs that write files in every way there is, against a store that links the same files.

A round: some files with the same bytes as a blob; one process writes to them, one looks at their
names all the time, and the process that drives the round lets the store work on them. Each write
adds its number to the file, so that afterwards the bytes tell whether any of them was lost.
"""

from __future__ import annotations

import itertools
import mmap
import os
import random
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from smartcache.store.link import Linked
from smartcache.store.store import Store
from smartcache.system import faults
from tests.processes.children import Child

SIZE, FILES, MOST_WRITES = 8192, 3, 300
LONG_AGO_NS = 1_600_000_000_000_000_000
How = Literal[
    "opens", "keeps the descriptor", "maps", "renames over", "truncates", "appends",
    "recreates",
]  # fmt: skip
HOWS: tuple[How, ...] = How.__args__  # type: ignore[attr-defined]
WITHOUT_NAME: How = "recreates"
"""Who removes a file before writing it anew leaves its name free for a moment."""
POINTS = (
    "", "journal: begun", "read-only", "linked", "temporary", "exchanged", "old removed",
)  # fmt: skip
_TOKEN = struct.Struct("<II")


def content(seed: int, writes: int, *, more: int = 0) -> bytes:
    """Return the bytes of a file that was written to so many times, and appended to."""
    data = bytearray(random.Random(seed).randbytes(SIZE))
    for number in range(1, writes + 1):
        _TOKEN.pack_into(data, number * _TOKEN.size, seed, number)
    return bytes(data) + b"".join(_TOKEN.pack(seed, number) for number in range(1, more + 1))


def make(path: Path, data: bytes) -> None:
    """Put a new file at a path in one step, with a time of long ago."""
    fresh = path.with_name(f"{path.name}-new")
    fresh.write_bytes(data)
    os.utime(fresh, ns=(LONG_AGO_NS, LONG_AGO_NS))
    fresh.replace(path)


class Board:
    """Memory that the processes share: how often each file was written, and what is over."""

    def __init__(self) -> None:
        self._numbers = memoryview(mmap.mmap(-1, 8 * (FILES + 2))).cast("Q")

    def __getitem__(self, file: int) -> int:
        return self._numbers[file]

    def __setitem__(self, file: int, writes: int) -> None:
        self._numbers[file] = writes


ROUND_OVER, RACE_OVER = FILES, FILES + 1


class Writer:
    """A process that writes the files of each round, until the round is over or it is denied."""

    def __init__(self, how: How, folder: Path, board: Board) -> None:
        self._how, self._folder, self._board = how, folder, board
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
        total, chance = 0, random.Random(os.getpid())
        for number in itertools.count():
            if not os.read(self._go, 1):
                return total
            total += self._write_round(number, chance)
            os.write(self._done, b"d")
        raise AssertionError

    def _write_round(self, number: int, chance: random.Random) -> int:
        writes, left, kept = [0] * FILES, set(range(FILES)), dict[int, int]()
        while left and not self._board[ROUND_OVER]:
            index = chance.choice(sorted(left))
            path = paths_of(self._folder)[index]
            try:
                if self._how == "keeps the descriptor" and index not in kept:
                    kept[index] = os.open(path, os.O_RDWR)
                _write(self._how, path, number * FILES + index, writes[index] + 1, kept.get(index))
            except PermissionError:  # it is a link of a blob now
                left.discard(index)
                continue
            writes[index] += 1
            self._board[index] = writes[index]
            if writes[index] == MOST_WRITES:
                left.discard(index)
        for descriptor in kept.values():
            os.close(descriptor)
        return sum(writes)


def paths_of(folder: Path) -> list[Path]:
    return [folder / f"{index}.safetensors" for index in range(FILES)]


def _spin(seconds: float) -> None:
    """Wait without giving up the processor: a sleep is never this short."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def _write(how: How, path: Path, seed: int, number: int, kept: int | None) -> None:
    token, at = _TOKEN.pack(seed, number), number * _TOKEN.size
    if kept is not None:
        os.pwrite(kept, token, at)
    elif how in ("opens", "appends"):
        opened = os.open(path, os.O_WRONLY | (os.O_APPEND if how == "appends" else 0))
        try:
            os.write(opened, token) if how == "appends" else os.pwrite(opened, token, at)
        finally:
            os.close(opened)
    elif how == "maps":
        with path.open("r+b") as file, mmap.mmap(file.fileno(), SIZE) as mapping:
            _spin(0.0002)
            mapping[at : at + _TOKEN.size] = token
    elif how == "truncates":
        opened = os.open(path, os.O_WRONLY | (os.O_TRUNC if number % 2 else 0))
        try:
            os.ftruncate(opened, 0)
            os.write(opened, content(seed, number))
        finally:
            os.close(opened)
    elif how == "renames over":
        fresh = path.with_name(f"{path.name}-{number}")
        fresh.write_bytes(content(seed, number))
        fresh.replace(path)
    else:
        path.unlink()
        with path.open("xb") as made:
            made.write(content(seed, number))


def _look(paths: Sequence[Path], board: Board, parent: int) -> int:
    """See that every name is there at every moment; return how often."""
    looks = 0
    while not board[RACE_OVER] and os.getppid() == parent:
        for path in paths:
            path.stat()
            looks += 1
    return looks


@contextmanager
def looking(how: How, paths: Sequence[Path], board: Board) -> Iterator[None]:
    parent = os.getpid()
    if how == WITHOUT_NAME:
        yield
        return
    with Child(lambda: _look(paths, board, parent)) as reader:
        yield
        board[RACE_OVER] = 1
        assert reader.result() > 0


Act = Callable[[Store, Sequence[Path], list[bytes]], list[Linked]]
"""Lets the store work on the files of a round, which have these bytes; says what became of them."""
Check = Callable[[Store, Sequence[Path], list[bytes]], object]
"""Looks at store and files when nobody writes any more."""


def race(root: Path, folder: Path, how: How, rounds: int, act: Act, check: Check) -> Counter[str]:
    """Run rounds: the writer starts when the store reaches one of the points, each in its turn.

    After the `rounds` it goes on, within reason, until the writer has come in time once.
    """
    counts: Counter[str] = Counter()
    paths, board = paths_of(folder), Board()
    for index, path in enumerate(paths):
        make(path, content(index, 0))
    with Store(root) as store:
        writer = Writer(how, folder, board)
        with looking(how, paths, board):
            for number in itertools.count():
                seeds = [number * FILES + index for index in range(FILES)]
                for index, (path, seed) in enumerate(zip(paths, seeds, strict=True)):
                    make(path, content(seed, 0))
                    board[index] = 0
                board[ROUND_OVER] = 0
                contents = [content(seed, 0) for seed in seeds]
                with _started_at(POINTS[number % len(POINTS)], writer):
                    results = act(store, paths, contents)
                counts.update(each.outcome for each in results)
                board[ROUND_OVER] = 1
                writer.wait()
                for index, (path, seed) in enumerate(zip(paths, seeds, strict=True)):
                    _assert_nothing_lost(how, path, seed, board[index])
                check(store, paths, contents)
                counts["written"] += any(board[index] for index in range(FILES))
                left = [name for name in os.listdir(folder) if name.endswith(".smartcache")]
                assert left == []
                if number + 1 >= rounds and (counts["written"] or number > rounds * 50):
                    break
        counts["rounds"], counts["writes"] = number + 1, writer.stop()
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


def _assert_nothing_lost(how: How, path: Path, seed: int, writes: int) -> None:
    found = path.read_bytes()
    appended = how == "appends"
    wanted = content(seed, 0 if appended else writes, more=writes if appended else 0)
    assert found == wanted, f"{path.name}: of {writes} writes some are lost; {len(found)} bytes"
