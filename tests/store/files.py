"""Model-like files for the tests of the store, and what the filesystem says about them."""

from __future__ import annotations

import os
import random
import stat
import time
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

from tests.api import Job, Unit

WEIGHTS = random.Random(1).randbytes(100_000)
"""Large enough to be linked when the name says that these are weights."""
OTHER = random.Random(2).randbytes(70_000)
"""Other weights."""


def write(path: Path, data: bytes = WEIGHTS, *, mode: int = 0o644, age: float = 100) -> Path:
    """Write a file that was last modified `age` seconds ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(mode)
    then = time.time_ns() - int(age * 1e9)
    os.utime(path, ns=(then, then))
    return path


def edit(path: str | Path, data: bytes = b"EDITED", *, offset: int = 0) -> None:
    """Write into a file in place, as root does in spite of 0444 and others after a chmod."""
    mode = mode_of(path)
    if not os.access(path, os.W_OK):
        os.chmod(path, mode | 0o200)
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.pwrite(descriptor, data, offset)
    finally:
        os.close(descriptor)
    if mode_of(path) != mode:
        os.chmod(path, mode)


def digest_of(data: bytes) -> str:
    return blake3(data).hexdigest()


def mode_of(path: str | Path) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


def inode_of(path: str | Path) -> int:
    return os.lstat(path).st_ino


def link_count(path: str | Path) -> int:
    return os.lstat(path).st_nlink


def allocated(path: str | Path) -> int:
    return os.lstat(path).st_blocks * 512


def snapshot(directory: Path) -> dict[str, tuple[object, ...]]:
    """Everything below a directory: names, modes, owners, times, link structure, bytes."""
    found: dict[str, tuple[object, ...]] = {}
    first_names: dict[int, str] = {}
    for path in sorted(directory.rglob("*")):
        st = os.lstat(path)
        name = str(path.relative_to(directory))
        if stat.S_ISREG(st.st_mode):
            first = first_names.setdefault(st.st_ino, name)
            times = st.st_mtime_ns
            owner = (st.st_uid, st.st_gid)
            found[name] = ("file", first, stat.S_IMODE(st.st_mode), owner, times, path.read_bytes())
        elif path.is_symlink():
            found[name] = ("symlink", os.readlink(path))
        else:
            found[name] = ("other", stat.S_IFMT(st.st_mode), stat.S_IMODE(st.st_mode))
    return found


class Watch(Job):
    """A `Progress` that counts, and lets somebody act while the first job runs."""

    def __init__(self, act: Callable[[], object] | None = None) -> None:
        self.labels: list[str] = []
        self.total = 0
        self.unit = ""
        self.done = 0
        self.names: list[str] = []
        self._act = act

    def __call__(self, label: str, total: int | None = None, unit: Unit = "items") -> Job:
        self.labels.append(label)
        self.total, self.unit = self.total + (total or 0), unit
        return self

    def describe(self, text: str) -> None:
        self.names.append(text)

    def advance(self, amount: int = 1) -> None:
        self.done += amount
        if self._act is not None:
            act, self._act = self._act, None
            act()
