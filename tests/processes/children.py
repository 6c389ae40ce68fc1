"""Forked processes for tests: a function runs in a child, and its result comes back.

A child that fails or is killed by a signal fails the test that asks for its result.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Generic, Self, TypeVar, cast

import pytest

from smartcache.store import KINDS
from smartcache.store.store import Store

T = TypeVar("T")

NOBODY = 65534
FORKS = multiprocessing.get_context("fork")
"""Has the `Barrier` and `Event` of processes that are forked afterwards."""


class Child(Generic[T]):
    """A forked process; as another user and group if given, which only root can."""

    def __init__(
        self, work: Callable[[], T], *, user: int | None = None, group: int | None = None
    ) -> None:
        if user is not None:
            _load_everything()
        self._reading, writing = os.pipe()
        self._is_over = False
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._reading)
            _run(work, user, group, writing)
        os.close(writing)

    def result(self) -> T:
        """Wait for its end and return what the function returned."""
        with open(self._reading, "rb") as pipe:
            self._reading = -1
            answer = pipe.read()
        _, status = os.waitpid(self.pid, 0)
        self._is_over = True
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            pytest.fail(f"a process was killed by {signal.Signals(-code).name}")
        is_good, value = pickle.loads(answer)  # noqa: S301 - our own child wrote it
        if not is_good:
            pytest.fail(f"in a child process:\n{value}")
        return cast("T", value)

    def end(self) -> bool:
        """Kill it if nobody waited for it; say whether it was alive until then."""
        status = 0
        if not self._is_over:
            os.kill(self.pid, signal.SIGKILL)
            _, status = os.waitpid(self.pid, 0)
            self._is_over = True
        if self._reading >= 0:
            os.close(self._reading)
            self._reading = -1
        return os.WIFSIGNALED(status)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()


def at_once(*works: Callable[[], T]) -> list[T]:
    """Run each function in a child of its own, all at the same time; return their results."""
    with ExitStack() as stack:
        children = [stack.enter_context(Child(work)) for work in works]
        return [child.result() for child in children]


def _run(work: Callable[[], object], user: int | None, group: int | None, pipe: int) -> None:
    """Never returns: the child must not come back into the test that forked it."""
    try:
        if user is not None:
            _become(user, user if group is None else group)
        answer: tuple[bool, object] = (True, work())
        data = pickle.dumps(answer)
    except BaseException:  # noqa: BLE001 - whatever it is, the parent is told
        data = pickle.dumps((False, traceback.format_exc()))
    try:
        with open(pipe, "wb") as file:
            file.write(data)
        sys.stderr.flush()
    finally:
        os._exit(0)


@functools.cache
def _load_everything() -> None:
    """Import what the store imports on first use: others may be unable to read the modules."""
    with tempfile.TemporaryDirectory() as name, Store(Path(name) / "store") as store:
        blob = store.put_stream([b"bytes"])
        for kind in KINDS:
            store.place(blob.digest, Path(name) / kind, kind="copy" if kind == "reflink" else kind)
        store.link(Path(name) / "copy", blob.digest)
        store.verify(full=True)
        store.plan_prune().execute()
        store.plan_undo().execute()


def _become(user: int, group: int) -> None:
    """Give up root's rights for good."""
    os.setgroups([group])
    os.setresgid(group, group, group)
    os.setresuid(user, user, user)
    os.environ["HOME"] = "/nonexistent"  # the old one is closed to us


@contextmanager
def folder_of(user: int | None, *, on: Path | None = None) -> Iterator[Path]:
    """Give an empty directory that belongs to a user and that other users can reach."""
    folder = Path(tempfile.mkdtemp(prefix="smartcache-test-", dir=on))
    try:
        folder.chmod(0o755)
        if user is not None:
            os.chown(folder, user, user)
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def talking(work: Callable[[T, Connection], None], given: T) -> Iterator[Callable[..., object]]:
    """Have a child that answers what it is told, one message at a time, until it is told "end"."""
    mine, theirs = FORKS.Pipe()

    def tell(*words: object) -> object:
        mine.send(words)
        return mine.recv()

    with Child(lambda: work(given, theirs)) as child:
        theirs.close()
        yield tell
        tell("end")
        child.result()
    mine.close()
