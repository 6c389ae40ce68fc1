"""Put one file in the place of another: the name is never absent, and a third file never lost."""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path

from smartcache.store.faults import reached
from smartcache.store.kernel import exchange

_log = logging.getLogger(__name__)


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
    ours = os.lstat(temporary).st_ino
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
    # A file appeared at `path` between look and exchange: it is the newest, so it goes back.
    exchange(temporary, path)
    if not _is_inode(temporary, ours):
        rescued = path.with_name(f"{path.name}.smartcache-rescued")
        os.rename(temporary, rescued)
        _log.warning("%s was replaced twice by somebody else; one version is in %s", path, rescued)
    return False


def _is_inode(path: Path, inode: int) -> bool:
    try:
        return os.lstat(path).st_ino == inode
    except FileNotFoundError:
        return False
