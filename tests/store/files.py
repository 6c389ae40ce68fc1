"""Model-like files for the tests of the store, and what the filesystem says about them."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from blake3 import blake3

from smartcache.progress import Job, Unit
from smartcache.store.link import Linked
from smartcache.store.store import Store
from smartcache.system import faults
from tests.processes.killing import in_child, was_killed

AtPoint = Callable[[str, Callable[[], object]], None]
"""The fixture `at_point`: somebody acts at that point of a change, once."""

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


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def git_sha1_of(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def blob_path(store: Store, digest: str = digest_of(WEIGHTS)) -> Path:
    """Where the bytes of a blob lie, whole or not."""
    return Path(store.layout.blob(digest))


def read(store: Store, digest: str = digest_of(WEIGHTS)) -> bytes:
    with store.open(digest) as file:
        return file.read()


def adopt(store: Store, *paths: Path, **more: Any) -> list[Linked]:  # noqa: ANN401 - of `link_many`
    """Make files blobs in place, those whose bytes are no blob yet."""
    return list(store.link_many(paths, label="add --adopt", **more))


def dedup(store: Store, *paths: Path, **more: Any) -> list[Linked]:  # noqa: ANN401 - of `link_many`
    """Make equal files links of one blob."""
    return list(store.link_many(paths, label="dedup", replace=True, **more))


def undo(store: Store) -> list[str]:
    """Undo everything, and return what had to be said about it."""
    return [done.note for done in store.plan_undo().execute() if done.note]


@contextmanager
def row(*name: object) -> Iterator[None]:
    """Name the row of a table in whatever fails in it."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the row {' '.join(map(str, name))}")
        raise


def raising(code: int) -> Callable[..., NoReturn]:
    """A system call that fails in this way."""

    def fail(*_: object, **__: object) -> NoReturn:
        raise OSError(code, os.strerror(code))

    return fail


def edit_with_time_set_back(path: Path, data: bytes = b"EDITED") -> None:
    st = path.stat()
    edit(path, data)
    os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))


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


def hidden(folder: Path) -> list[str]:
    """The temporary names of ours in a folder."""
    return [name for name in os.listdir(folder) if name.endswith(".smartcache")]


def killed(work: Callable[[], object], point: str, nth: int = 1) -> None:
    """Do some work in a child that is killed the n-th time it reaches a point."""
    if not kill(work, point, nth):
        raise AssertionError(f"{point} was not reached {nth} times")


def kill(work: Callable[[], object], point: str = "", nth: int = 1) -> bool:
    """The same; False: it got through. Without a point all are counted."""

    def run() -> None:
        count = 0

        def hook(reached: str) -> None:
            nonlocal count
            count += point in ("", reached)
            if count == nth:
                os.kill(os.getpid(), signal.SIGKILL)

        faults.hook = hook
        work()

    status = in_child(run)
    assert status == 0 or was_killed(status), f"ended with wait status {status}"
    return status != 0


def rot(path: Path, store: Store) -> bytes:
    """Let a disk lose the end of a file without a trace in its times; return the bytes it has.

    Nobody can set a change time: so that of the remembered hash is set.
    """
    st = path.stat()
    data = path.read_bytes()[:-600] + bytes(600)
    edit(path, data)
    os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))
    with closing(sqlite3.connect(store.root / "index.sqlite3")) as index, index:
        words = "UPDATE files SET ctime_ns = ? WHERE inode = ? AND digest IS NOT NULL"
        index.execute(words, (path.stat().st_ctime_ns, st.st_ino))
        assert index.total_changes == 1
    return data


def in_turn(*acts: Callable[[], object]) -> Callable[[], None]:
    """One act that is several."""

    def act() -> None:
        for each in acts:
            each()

    return act


def come_to_write(path: Path) -> None:
    """Open a file for writing as far as a lease lets one: the waiting is left out."""
    with suppress(BlockingIOError):
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))


@contextmanager
def written_by_another_process(path: Path) -> Iterator[None]:
    program = "import sys; file = open(sys.argv[1], 'r+b'); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline()
        try:
            yield
        finally:
            child.communicate()


def hold_by(holder: str, store: Store, folder: Path, digest: str = digest_of(WEIGHTS)) -> None:
    """Let somebody want a blob: a pin, one of our links or somebody else's."""
    if holder == "pin":
        store.pin(digest, "mine")
    elif holder == "stranger":
        os.link(blob_path(store, digest), folder / "mine")
    else:
        store.place(digest, folder / "mine", kind=holder)  # type: ignore[arg-type]


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
