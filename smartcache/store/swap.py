"""Put one file in the place of another: the name is never absent, and a third file never lost."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from smartcache.store.faults import reached
from smartcache.store.kernel import exchange


def beside(path: Path) -> Path:
    """Return an unused hidden name in the same directory, marked as ours."""
    start = os.fsdecode(os.fsencode(path.name)[:100])  # filesystems count bytes
    return path.with_name(f".{start}.{secrets.token_hex(6)}.smartcache")


def swap_in(temporary: Path, path: Path, expected_inode: int) -> bool:
    """Let the file at `temporary` take the name `path`, if that is the inode expected there.

    False: somebody has put another file at `path`, or removed it. Theirs stays, and `temporary` is
    as before.
    """
    if not _is_inode(path, expected_inode):
        return False
    with _held(temporary) as ours:
        try:
            if not exchange(temporary, path):
                os.replace(temporary, path)
                return True
        except FileNotFoundError:
            return False
        reached("swap: exchanged")
        if _is_inode(temporary, expected_inode):
            temporary.unlink()
            return True
        _give_newest_back(temporary, path, ours)
    return False


def _give_newest_back(temporary: Path, path: Path, put: os.stat_result) -> None:
    """Undo an exchange that took somebody else's file from its name.

    A file appeared at `path` between look and exchange. It goes back; if yet another one appeared
    meanwhile, that is the newest, and so on, until the exchange brings back what the last one put.
    """
    with _held(temporary) as found:
        try:
            exchange(temporary, path)
        except FileNotFoundError:
            # They have removed the name, so what they had put there was to go.
            temporary.unlink()
            return
        if not os.path.samestat(os.lstat(temporary), put):
            _give_newest_back(temporary, path, found)


@contextmanager
def _held(path: Path) -> Iterator[os.stat_result]:
    """Give the stat of a file and keep its inode number from being used again meanwhile."""
    flags = getattr(os, "O_PATH", os.O_RDONLY) | getattr(os, "O_NOFOLLOW", 0)
    try:
        descriptor = os.open(path, flags)
    except OSError:  # a symlink, where O_PATH does not exist
        yield os.lstat(path)
        return
    try:
        yield os.fstat(descriptor)
    finally:
        os.close(descriptor)


def _is_inode(path: Path, inode: int) -> bool:
    try:
        return os.lstat(path).st_ino == inode
    except FileNotFoundError:
        return False
