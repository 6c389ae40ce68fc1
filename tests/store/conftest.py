"""A store and a folder of the user's on one filesystem, a second filesystem, and a clock."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from smartcache.store import faults, kernel
from smartcache.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "store") as store:
        yield store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the user keeps models: beside the store, on its filesystem."""
    path = tmp_path / "models"
    path.mkdir()
    return path


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A directory on another filesystem."""
    memory = Path("/dev/shm")  # noqa: S108 - the one other filesystem that every Linux has
    if not os.access(memory, os.W_OK) or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second filesystem here")
    path = Path(tempfile.mkdtemp(prefix="smartcache-test-", dir=memory))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """`pass_time(60)`: for this process it is a minute later, and every file a minute older."""
    seconds, nanoseconds = time.time, time.time_ns
    ahead = 0.0

    def advance(more: float) -> None:
        nonlocal ahead
        ahead += more

    monkeypatch.setattr(time, "time", lambda: seconds() + ahead)
    monkeypatch.setattr(time, "time_ns", lambda: nanoseconds() + int(ahead * 1e9))
    return advance


@pytest.fixture
def at_point(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[], object]], None]:
    """`at_point("put: linked", act)`: somebody acts at that point of a change, once."""

    def arrange(point: str, act: Callable[[], object]) -> None:
        def hook(reached: str) -> None:
            if reached == point:
                monkeypatch.setattr(faults, "hook", None)
                act()

        monkeypatch.setattr(faults, "hook", hook)

    return arrange


@pytest.fixture
def no_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """A filesystem without leases (NFS, FUSE)."""
    if sys.platform != "linux":
        return
    import fcntl

    real = fcntl.fcntl

    def refuse(fd: int, command: int, argument: int = 0) -> object:
        if command == fcntl.F_SETLEASE:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refuse)


@pytest.fixture
def no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """A filesystem that knows no RENAME_EXCHANGE."""
    _refuse_exchange(monkeypatch, errno.EINVAL)


@pytest.fixture
def failing_renames(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A disk that fails in every rename, until the patch is undone."""

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        _refuse_exchange(patch, errno.EIO)
        patch.setattr(os, "replace", fail)
        patch.setattr(os, "rename", fail)
        yield patch


def _refuse_exchange(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    real = kernel._c_function  # noqa: SLF001 - the one place where system calls are looked up

    def without(signature: str, *names: str) -> object:
        return (lambda *_: code) if "renameat2" in names else real(signature, *names)

    monkeypatch.setattr(kernel, "_c_function", without)
