"""huggingface_hub's own shared blob store (from 2.4 on): where its entries are, and its locks.

    <cache>/blobs/.huggingface-shared-blobs   the marker: "1" and a newline, nothing else
    <cache>/blobs/<xx>/<xet hash>             an entry: a regular file
    <cache>/blobs/<xx>/<xet hash>.refs        the repo blobs that are symlinks to it
    <cache>/blobs/<xx>/<xet hash>.lock        taken to publish, link or collect an entry

A folder without that marker is somebody else's: nothing in it is read or changed. Clients believe
an entry by its size alone, so whoever puts one there must be sure of its bytes.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from smartcache.errors import HubError, LockTimeoutError
from smartcache.system import check_hex

_DIRECTORY = "blobs"
_MARKER = ".huggingface-shared-blobs"
_VERSION = b"1\n"
_PREFIX = re.compile(r"[0-9a-f]{2}")
_XET = re.compile(r"[0-9a-f]{64}")
_PATIENCE = 60.0
"""Seconds: clients hold the lock of an entry while they rename, never while they download."""


def is_usable(cache_dir: Path) -> bool:
    """Say whether an HF cache has a shared store of the one version that is known."""
    return not why_not(cache_dir)


def why_not(cache_dir: Path) -> str:
    """Return why an HF cache has no shared store that may be used; "" if it has one."""
    root = cache_dir / _DIRECTORY
    if not cache_dir.is_dir():
        return "there is no such folder"
    if not os.path.lexists(root):
        return "it has no shared blob store yet"
    if not _is_directory(root):
        return f"its {_DIRECTORY} is not a plain directory"
    marker = root / _MARKER
    if not os.path.lexists(marker):
        return f"its {_DIRECTORY} folder has no marker of huggingface_hub"
    if _read_marker(marker) != _VERSION:
        return "its shared blob store is of another version"
    return ""


def entry(cache_dir: Path, xet: str) -> Path:
    """Return where an HF cache has the file of a xet hash, or would have it."""
    name = check_hex("xet", xet)
    return cache_dir / _DIRECTORY / name[:2] / name


def find(cache_dirs: Iterable[Path], xet: str, size: int) -> Path | None:
    """Return the first entry of a xet hash that is a readable file of that size.

    Its bytes are as likely right as any cached file's: hash it before anything relies on it. None
    too for a xet hash that is none, as a server may say.
    """
    if not _XET.fullmatch(xet):
        return None
    for cache_dir in cache_dirs:
        path = entry(cache_dir, xet)
        if _size_of(path) == size and is_usable(cache_dir) and os.access(path, os.R_OK):
            return path
    return None


def entries(cache_dir: Path) -> Iterator[Path]:
    """Go through the entries of an HF cache's shared store, by name; none if it has no such."""
    if not is_usable(cache_dir):
        return
    root = cache_dir / _DIRECTORY
    for prefix in _names(root, _PREFIX):
        if not _is_directory(root / prefix):
            continue
        for name in _names(root / prefix, _XET):
            path = root / prefix / name
            if name.startswith(prefix) and _size_of(path) is not None:
                yield path


def make_prefix(cache_dir: Path, xet: str) -> None:
    """Make the directory of an entry if it is missing, open to those the cache is open to."""
    directory = entry(cache_dir, xet).parent
    with suppress(FileExistsError):
        directory.mkdir()
        inherited = 0o777 | stat.S_ISGID | stat.S_ISVTX
        directory.chmod(stat.S_IMODE(cache_dir.stat().st_mode) & inherited)
    if not _is_directory(directory):
        raise HubError(f"{directory} is not a plain directory", hint="Move it out of the way.")


@contextmanager
def locked(path: Path, *, timeout: float | None = _PATIENCE) -> Iterator[None]:
    """Hold the lock of an entry, the very one that huggingface_hub takes; None waits for ever."""
    name = path.with_name(f"{path.name}.lock")
    _make_lock_file(name)
    held = _acquire(name, path, -1 if timeout is None else timeout)
    try:
        yield
    finally:
        with suppress(OSError):
            held.release()


def _acquire(name: Path, path: Path, timeout: float) -> BaseFileLock:
    try:
        try:
            lock: BaseFileLock = FileLock(name, mode=0o666)
            lock.acquire(timeout=timeout)
        except NotImplementedError:
            # No flock on this filesystem: there the client takes this one.
            lock = SoftFileLock(f"{name}.soft", mode=0o666)
            lock.acquire(timeout=timeout)
    except Timeout as error:
        message = f"Another process keeps {path} locked"
        raise LockTimeoutError(message, key=str(path)) from error
    return lock


def _make_lock_file(name: Path) -> None:
    """Make a lock file as the client does: through no symlink, and for all users of the cache."""
    flags = os.O_WRONLY | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    descriptor = os.open(name, flags | getattr(os, "O_NONBLOCK", 0), 0o666)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise HubError(f"{name} is not a regular file", hint="Move it out of the way.")
        if hasattr(os, "fchmod"):
            with suppress(OSError):  # another user's: its maker has opened it to all
                os.fchmod(descriptor, 0o666)
    finally:
        os.close(descriptor)


def _read_marker(marker: Path) -> bytes:
    if _size_of(marker) != len(_VERSION):
        return b""
    try:
        return marker.read_bytes()
    except OSError:
        return b""


def _size_of(path: Path) -> int | None:
    """Return the size of a regular file; None of anything else, symlinks included."""
    try:
        st = os.lstat(path)
    except OSError:
        return None
    return st.st_size if stat.S_ISREG(st.st_mode) else None


def _is_directory(path: Path) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def _names(directory: Path, pattern: re.Pattern[str]) -> list[str]:
    try:
        return sorted(name for name in os.listdir(directory) if pattern.fullmatch(name))
    except OSError:
        return []
