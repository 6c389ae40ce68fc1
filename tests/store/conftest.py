"""Moments in a change, and system calls that fail."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from smartcache.store.store import Store
from smartcache.system import faults, kernel
from smartcache.system.filesystems import probe
from tests.store.files import WEIGHTS


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
def digest(store: Store) -> str:
    """That of a blob of the store, which has the bytes `WEIGHTS`."""
    return store.put_stream([WEIGHTS], algorithms=["sha256"]).digest


@pytest.fixture
def with_leases(folder: Path) -> None:
    """Nothing but a filesystem with leases will do."""
    if not probe(folder).lease:
        pytest.skip("no leases on this filesystem")


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
    real = kernel._c_function  # noqa: SLF001 - the one place where system calls are looked up

    def without(signature: str, *names: str) -> object:
        return (lambda *_: -errno.EINVAL) if "renameat2" in names else real(signature, *names)

    monkeypatch.setattr(kernel, "_c_function", without)
