"""A disk of a few pages for one test: a tmpfs in a mount namespace of its own.

Nothing is seen outside of the process that runs the test's function, and nothing remains when it
ends. Where mounting is not allowed, the test is skipped with the reason.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from tests.processes.children import Child

T = TypeVar("T")

PAGE = 4096
_ENVIRONMENT = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
_NEW_NAMESPACE, _NEW_USER = 0x20000, 0x10000000
_READ_ONLY, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 1, 32, 4096, 16384, 1 << 18


class CannotMountError(Exception):
    """No mount namespace or no mount here."""


class Disk:
    """A mounted tmpfs that can be filled up to the last page."""

    def __init__(self, point: Path, size: int) -> None:
        self.point = point
        self._size = size
        self._filler = point / "filler"
        point.mkdir()
        mount("tmpfs", point, "tmpfs", 0, f"size={size}")

    def fill(self, *, but: int = 0) -> None:
        """Leave so many pages free."""
        self.clear()
        with open(self._filler, "wb", buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, (self.free_pages - but) * PAGE)
        assert self.free_pages == but

    def clear(self) -> None:
        """Give back what `fill` took."""
        self._filler.unlink(missing_ok=True)

    @property
    def free_pages(self) -> int:
        """How many pages can still be written."""
        found = os.statvfs(self.point)
        return found.f_bavail * found.f_frsize // PAGE

    def make_read_only(self) -> None:
        """Allow no more changes; nothing on it may be open for writing."""
        mount("tmpfs", self.point, "tmpfs", _REMOUNT | _READ_ONLY, f"size={self._size}")


def bind(source: Path, target: Path, *, read_only: bool = False) -> None:
    """Show a directory at a second place, as containers do with volumes."""
    target.mkdir()
    mount(str(source), target, "", _BIND, "")
    if read_only:
        mount(str(source), target, "", _BIND | _REMOUNT | _READ_ONLY, "")


def mount(source: str, point: Path, kind: str, flags: int, options: str) -> None:
    """Mount a filesystem, or mount it anew, as the system call of this name does."""
    _call("mount", source.encode(), os.fsencode(point), kind.encode(), flags, options.encode())


def in_own_namespace(work: Callable[[], T]) -> T:
    """Run a function in a process that may mount what it likes."""

    def run() -> tuple[str, T | None]:
        try:
            enter_namespace()
        except (CannotMountError, OSError) as error:
            return str(error), None
        return "", work()

    with Child(run) as child:
        problem, result = child.result()
    if problem:
        pytest.skip(f"no mount namespace: {problem}")
    return result  # type: ignore[return-value]  # None only if that is what `work` returned


def enter_namespace() -> None:
    """Let what this process mounts from now on be seen by it and its children only."""
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        _call("unshare", _NEW_NAMESPACE)
    else:
        _call("unshare", _NEW_NAMESPACE | _NEW_USER)
        Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="ascii")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="ascii")
    mount("none", Path("/"), "", _RECURSIVE | _PRIVATE, "")


def run(*command: str | Path) -> str:
    """Run a command of the system's administrator; return what it complained of."""
    words = [str(each) for each in command]
    if shutil.which(words[0], path=_ENVIRONMENT["PATH"]) is None:
        return f"no {words[0]}"
    done = subprocess.run(words, env=_ENVIRONMENT, capture_output=True, text=True, check=False)
    return done.stderr.strip() or "failed" if done.returncode else ""


def make_image(path: Path, megabytes: int, *mkfs: str) -> Path:
    """Make a filesystem in a sparse file; skip the test where that, or a mount, cannot be."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root can mount an image")
    with open(path, "wb") as file:
        file.truncate(megabytes * 1_000_000)
    if problem := run(*mkfs, path):
        pytest.skip(f"cannot make it: {problem}")
    return path


def _call(name: str, *arguments: int | bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    values = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments]
    if libc[name](*values) != 0:
        code = ctypes.get_errno()
        raise CannotMountError(f"{name}: {os.strerror(code)}")
