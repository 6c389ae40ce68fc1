"""Processes that write a set and say what they have done, so that it is known after a kill.

A writer has keys of its own. It tells over a pipe what it is about to do, and again when that has
returned: whatever was acknowledged must be there afterwards, and what was not may be or not.
"""

from __future__ import annotations

import os
import random
import select
import shutil
import signal
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from smartcache.artifacts import ArtifactSet, ArtifactSets
from tests.artifacts.opening import engine_of, open_set
from tests.artifacts.packreader import newest_of, packs_of

SMALL_PACK = 64 << 10
KEYS = 24
_WORD = struct.Struct("<cHI")
"""What is told: b"?" or b"!", the key, and its new number; 0: deleted."""


def value_of(key: str, number: int) -> dict[str, Any]:
    """Return the value of a key: different for every number, with tensors that others share."""
    return {
        "own": np.frombuffer(random.Random(f"{key} {number}").randbytes(2000), np.uint8).copy(),
        "shared": np.full(3000, number % 3, np.uint8),
        "number": number,
        "key": key,
    }


def number_in(key: str, value: Mapping[str, Any]) -> int:
    """Return which value it is; fails if it is none that was ever put under this key."""
    assert value["key"] == key
    wanted = value_of(key, value["number"])
    for name in ("own", "shared"):
        assert np.array_equal(value[name], wanted[name]), f"{name} of {key} is wrong"
    return int(value["number"])


def wait_for(path: Path) -> None:
    """Wait until another process has made a file."""
    while not path.exists():
        time.sleep(0.005)


def key_of(writer: int, index: int) -> str:
    return f"writer {writer}, key {index}"


def in_fork(act: Callable[[], None]) -> int:
    """Run something in a forked child that never comes back; return its process id."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            act()
            code = 0
        except BaseException:  # noqa: BLE001 - the child must not return into the test
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def change(opened: ArtifactSet, key: str, number: int, *, durable: bool = False) -> None:
    """Put the value of a number; 0: delete it."""
    if number:
        metadata = {"number": number}
        opened.put(key, value_of(key, number), metadata=metadata, durable=durable)
    else:
        opened.delete(key)


@dataclass
class Writer:
    """A process that puts, replaces and deletes until it is killed, and what it has told."""

    root: Path
    number: int
    state: dict[str, int] = field(default_factory=dict)
    """By key: the number of its value, as acknowledged."""
    doubtful: dict[str, set[int]] = field(default_factory=dict)
    """What was not acknowledged when the writer was killed: either may be there."""
    told: int = 0
    _pid: int = 0
    _pipe: int = -1
    _rest: bytes = b""

    def start(self, seed: int, prepare: Callable[[], None] = lambda: None) -> None:
        self._pipe, writing = os.pipe()
        self._pid = in_fork(lambda: self._work(seed, writing, prepare))
        os.close(writing)

    def _work(self, seed: int, pipe: int, prepare: Callable[[], None]) -> None:
        os.close(self._pipe)
        chance = random.Random(seed)
        opened = open_set(ArtifactSets(self.root), pack_bytes=SMALL_PACK)
        prepare()
        while True:
            index = chance.randrange(KEYS)
            number = 0 if chance.random() < 0.25 else chance.randrange(1, 1 << 30)
            os.write(pipe, _WORD.pack(b"?", index, number))
            durable = chance.random() < 0.05
            change(opened, key_of(self.number, index), number, durable=durable)
            os.write(pipe, _WORD.pack(b"!", index, number))
            if chance.random() < 0.05:
                opened.flush()
            if chance.random() < 0.02:
                time.sleep(0.06)

    def listen(self, seconds: float) -> None:
        """Hear what it tells for a while, or until it has ended."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if not select.select([self._pipe], [], [], left)[0]:
                return
            data = os.read(self._pipe, 1 << 16)
            if not data:
                return
            self._hear(data)

    def _hear(self, data: bytes) -> None:
        data = self._rest + data
        whole = len(data) // _WORD.size * _WORD.size
        self._rest = data[whole:]
        for kind, index, number in _WORD.iter_unpack(data[:whole]):
            key = key_of(self.number, index)
            if kind == b"?":
                self.doubtful[key] = {self.state.get(key, 0), number}
            else:
                self.state[key] = number
                del self.doubtful[key]
                self.told += 1

    def kill(self) -> int:
        """Kill it, hear the rest of what it told, and return its wait status."""
        os.kill(self._pid, signal.SIGKILL)
        return self.end()

    def end(self) -> int:
        """Wait for its end; return its wait status."""
        self.listen(30)
        os.close(self._pipe)
        status = os.waitpid(self._pid, 0)[1]
        assert len(self.doubtful) <= 1
        self._rest = b""
        return status

    def check(self, opened: ArtifactSet) -> None:
        """Compare a set with what was acknowledged; what was doubtful is known then."""
        for index in range(KEYS):
            key = key_of(self.number, index)
            value = opened.get(key)
            number = 0 if value is None else number_in(key, value)
            allowed = self.doubtful.get(key, {self.state.get(key, 0)})
            assert number in allowed, f"{key} is number {number}, but only {allowed} can be"
            self.state[key] = number
            if number:
                assert opened.metadata(key) == {"number": number}
        self.doubtful.clear()


def check_all(root: Path, writers: list[Writer]) -> None:
    """Check a set that nobody writes to: its values, its records, and what its packs tell."""
    sets = ArtifactSets(root)
    copy = root.with_name(f"{root.name} copied")
    # As a kill has left it, before anybody opens it, and without the index.
    shutil.copytree(root, copy)
    for index in copy.glob("*/*/index.sqlite3*"):
        index.unlink()
    with open_set(sets) as opened:
        for writer in writers:
            writer.check(opened)
        expected = {key for writer in writers for key, number in writer.state.items() if number}
        assert set(opened) == expected
        assert len(opened) == len(expected)
        path, instance = opened.path, engine_of(opened).folder.instance
        report = opened.verify()
        assert not report.damage, report
        info = opened.describe()
    with open_set(ArtifactSets(copy)) as alone:
        for writer in writers:
            writer.check(alone)
        assert set(alone) == expected
    shutil.rmtree(copy)
    # Read without the package, too: every record and footer, and which of them is the newest.
    found = newest_of(packs_of(path), bytes.fromhex(instance))
    assert {key[1:].decode() for key in found} == expected
    sets.rebuild(info)
    with open_set(sets) as opened:
        for writer in writers:
            writer.check(opened)
        assert set(opened) == expected
