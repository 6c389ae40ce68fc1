"""Hold a user's file still: proven bytes, nobody writing, and a way to see whether somebody came.

The bytes of a file and its stat key are proven to belong together. A file that was not touched for
two seconds is hashed first (or remembered) and leased afterwards; an unchanged key then proves
that no write came between. A younger file could be written twice within one clock tick without its
key showing it, so it is leased first and hashed under the lease.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from smartcache.errors import FileBusyError, FileChangedError, FileSkippedError
from smartcache.store.attributes import read_attributes
from smartcache.store.digest import Algorithm, Hashes, hash_file
from smartcache.store.kernel import (
    Lease,
    drop_lease,
    effective_user,
    lease_intact,
    take_lease,
)
from smartcache.store.memos import Known, hashes_of, is_being_written
from smartcache.store.proof import Advance
from smartcache.store.statkey import StatKey
from smartcache.store.swap import Spot
from smartcache.store.volume import Volume

TICK_NS = 50_000_000
"""More than a tick (at most 10 ms) of the clock that filesystems with hard links use."""

Allowance = Literal["group", "mode", "xattr"]
"""What a link may change about a file besides its permission to write, if the user allows it.

Its group, its permissions, its extended attributes: the journal has them, and undo gives them back.
Files of other users are never linked, not even by root: whoever owns an inode can change the bytes
that all its links show.
"""

INCOMPLETE_SUFFIXES = (
    ".incomplete", ".tmp", ".part", ".crdownload", ".aria2", ".download", ".lock", ".smartcache",
)  # fmt: skip
OPEN_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
)


@dataclass(slots=True, kw_only=True)
class Held:
    """An open file whose bytes are known and that nobody was writing when it was taken.

    `is_proven` is False when no lease could be had and the file is so young that its key proves
    little.
    """

    path: Path
    spot: Spot
    """The folder it was found in: whatever becomes of the path, the file is taken there."""
    fd: int
    st: os.stat_result
    hashes: Hashes
    lease: Lease
    is_proven: bool

    def is_untouched(self, now: os.stat_result) -> bool:
        """Say whether `now` shows the same inode and bytes, and no writer waits for our lease.

        A writer blocked in open() by the lease has already resolved this inode and will write into
        it.
        """
        if not os.path.samestat(now, self.st):
            return False
        if (now.st_size, now.st_mtime_ns) != (self.st.st_size, self.st.st_mtime_ns):
            return False
        return self.lease != "held" or lease_intact(self.fd)

    def drop_lease(self) -> None:
        """Let waiting writers go on; the file stays open."""
        if self.lease == "held":
            drop_lease(self.fd)
            self.lease = "unsupported"

    def release(self) -> None:
        """Drop the lease and close the file; harmless to repeat."""
        if self.fd >= 0:
            self.drop_lease()
            os.close(self.fd)
            self.spot.close()
            self.fd = -1


def hold(
    volume: Volume,
    path: Path,
    algorithms: Iterable[Algorithm] = ("blake3",),
    *,
    known: Known | None = None,
    advance: Advance | None = None,
    follow: bool = True,
) -> Held:
    """Hold a file, or raise FileSkippedError (busy, changed, unsuitable); the caller releases.

    `known` are hashes the caller has just looked up with `hash_all`; else `advance` is told the
    bytes that are hashed now. Not `follow`: no folder above it may be a symlink.
    """
    spot = Spot(Path(os.path.realpath(path.parent), path.name) if follow else path)
    try:
        return _hold(volume, path, spot, tuple(algorithms), known, advance)
    except BaseException:
        spot.close()
        raise


def _hold(
    volume: Volume,
    path: Path,
    spot: Spot,
    wanted: tuple[Algorithm, ...],
    known: Known | None,
    advance: Advance | None,
) -> Held:
    st = spot.stat()
    if st is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    refuse_unsuitable(path, st)
    is_young = StatKey.of(st).is_racy()
    if is_young:
        hashes, key = None, None
    elif known is None and is_being_written(path):
        raise FileBusyError(f"{path} is open for writing", path=path)
    else:
        hashes, key = known or hashes_of(volume, path, wanted, advance=advance)
    descriptor = spot.open()
    try:
        # Another file may have come to the name: what counts is the one that was opened.
        refuse_unsuitable(path, os.fstat(descriptor))
        lease = take_lease(descriptor)
        if lease == "busy":
            raise FileBusyError(f"{path} is open for writing", path=path)
        if hashes is None or key is None:
            threads = volume.settings.threads
            hashes, key = hash_file(descriptor, wanted, threads=threads, advance=advance)
        if is_young and lease == "held":
            # Wait out the clock tick of the last write, so that a later one must show another time.
            _sleep_ns(min(key.mtime_ns + TICK_NS - time.time_ns(), TICK_NS))
        st = os.fstat(descriptor)
        # Whoever comes after this is noticed by `is_untouched`.
        is_broken = is_young and lease == "held" and not lease_intact(descriptor)
        if is_broken or StatKey.of(st) != key:
            raise FileChangedError(f"{path} changed while it was read", path=path)
    except BaseException:
        os.close(descriptor)
        raise
    is_proven = not is_young or (lease == "held" and st.st_mtime_ns <= time.time_ns() - TICK_NS)
    return Held(
        path=path, spot=spot, fd=descriptor, st=st, hashes=hashes, lease=lease, is_proven=is_proven
    )  # fmt: skip


def _sleep_ns(nanoseconds: int) -> None:
    if nanoseconds > 0:
        time.sleep(nanoseconds / 1e9)


def is_incomplete(path: Path) -> bool:
    """Say whether a file's name says that it is still being downloaded."""
    name = path.name.lower()
    return name.endswith(INCOMPLETE_SUFFIXES) or "-partial" in name


def refuse_unsuitable(path: Path, st: os.stat_result) -> None:
    """Raise unless a file is one that may become a link or a blob."""
    refuse_unshareable(path, st)
    reason = ""
    if st.st_uid != effective_user():
        reason = "belongs to another user"
    elif st.st_mode & (stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX):
        reason = "has a special mode"
    if reason:
        raise FileSkippedError(f"{path}: {reason}", reason=reason, path=path)


def refuse_unshareable(path: Path, st: os.stat_result) -> None:
    """Raise unless a file is one whose bytes may be shared at all."""
    reason = ""
    if not stat.S_ISREG(st.st_mode):
        reason = "not a regular file"
    elif st.st_size == 0:
        reason = "empty"
    elif is_incomplete(path):
        reason = "incomplete download"
    if reason:
        raise FileSkippedError(f"{path}: {reason}", reason=reason, path=path)


def refuse_visible_change(
    path: Path,
    st: os.stat_result,
    blob_st: os.stat_result,
    allow: frozenset[Allowance] = frozenset(),
) -> None:
    """Raise if a link would show another group, other permissions or attributes."""
    reason = ""
    is_same_mode = st.st_mode & 0o555 == blob_st.st_mode & 0o555
    if st.st_gid != blob_st.st_gid and "group" not in allow:
        reason = "different group"
    elif not is_same_mode and "mode" not in allow:
        reason = "different permissions"
    elif "xattr" not in allow and read_attributes(path):
        reason = "has extended attributes"
    if reason:
        raise FileSkippedError(f"{path}: {reason}", reason=reason, path=path)
