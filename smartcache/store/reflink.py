"""Let equal files use the same blocks (reflinks), in place: each stays a file of its own.

The kernel does it (`kernel.dedupe_range`): it locks both files, compares their bytes and shares the
blocks of equal ranges. The hash is only the reason to try. The target keeps its inode, names, mode,
owner, times and attributes, and whoever writes to either file later writes to blocks of its own. So
no write can be lost, no row of the index is concerned, and nothing is ever half done: a file of
which some ranges are shared has the same bytes as one of which all or none are. There is nothing to
give back, so nothing is journaled.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from smartcache.errors import FileBusyError, FileSkippedError
from smartcache.progress import Job, Progress, silent
from smartcache.store.layout import explained
from smartcache.store.userfile import OPEN_FLAGS, as_skipped, refuse_unshareable
from smartcache.system import kernel
from smartcache.system.faults import reached
from smartcache.system.hashing import check_hex

Pair = tuple[str | Path, str | Path, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What became of one file. "present": it shared all blocks already.

    `freed` are the bytes of blocks that only this file used and that it shares now: at most.
    """

    path: Path
    outcome: Literal["shared", "present", "skipped"]
    digest: str = ""
    freed: int = 0
    error: Exception | None = None


def share_many(pairs: Iterable[Pair], *, progress: Progress = silent) -> Iterator[Shared]:
    """Let each target of (source, target, digest) share the blocks of its source.

    What cannot be shared is returned with its reason. The filesystem may keep some of the blocks
    that are freed (btrfs lets go of whole extents only) or have needed fewer (compression).
    """
    with progress("Sharing", None, "bytes") as job:
        for source, target, digest in pairs:
            paths = Path(os.path.abspath(source)), Path(os.path.abspath(target))
            yield _share(*paths, check_hex("blake3", digest), job)


def _share(source: Path, target: Path, digest: str, job: Job) -> Shared:
    """Say what becomes of one file. "skipped": a part of it may be shared."""
    with ExitStack() as stack:

        def opened(path: Path, flags: int = OPEN_FLAGS) -> int:
            descriptor = os.open(path, flags)
            stack.callback(os.close, descriptor)
            return descriptor

        try:
            refuse_unshareable(target, os.lstat(target))
            one, other = opened(source), opened(target)
            _refuse_unequal(source, target, os.fstat(one), os.fstat(other))
            if os.path.sameopenfile(one, other) or kernel.shares_blocks(one, other):
                return Shared(path=target, outcome="present", digest=digest)
            if kernel.take_lease(other) == "busy":
                raise FileBusyError(f"{target} is open for writing", path=target)
            # The kernel's own locks are enough: nobody has to wait for us.
            kernel.drop_lease(other)
            if not _is_permitted(one, other, target):
                other = opened(target, OPEN_FLAGS | os.O_RDWR)
            found = _extents(other, target)
        except (FileSkippedError, OSError) as error:
            failure = as_skipped(target, error)
            return Shared(path=target, outcome="skipped", digest=digest, error=failure)
        reached("share: begun")
        skipped: Exception | None = None
        with explained(target.parent):
            try:
                _share_all(one, other, target, job)
            except (FileSkippedError, OSError) as error:  # an immutable file: the others go on
                skipped = as_skipped(target, error)
                if not isinstance(skipped, FileSkippedError) or error.errno == errno.EROFS:
                    raise
        reached("share: shared")
        freed = _own_size(found) - _own_size(kernel.extents(other) or ())
        return Shared(
            path=target, outcome="skipped" if skipped else "shared", digest=digest,
            freed=max(0, freed), error=skipped,
        )  # fmt: skip


def _is_permitted(source: int, target: int, path: Path) -> bool:
    """Say whether the kernel takes a target that is open for reading; before 4.20 it does not.

    A range of no bytes asks for permission and changes nothing.
    """
    try:
        if kernel.dedupe_range(source, 0, 0, target, 0) is None:
            raise _refused(path, "not supported here")
    except PermissionError:
        return False
    return True


def _extents(target: int, path: Path) -> tuple[kernel.Extent, ...]:
    """Return the extents of a file that has blocks to share."""
    found = kernel.extents(target)
    if found is None:
        raise _refused(path, "not supported here")
    if any(extent.physical is None for extent in found):  # a small file, inside the metadata
        raise _refused(path, "has no blocks to share")
    return found


def _refuse_unequal(source: Path, target: Path, one: os.stat_result, other: os.stat_result) -> None:
    """Raise where a look at both files tells that their blocks cannot be shared."""
    refuse_unshareable(target, other)
    if not stat.S_ISREG(one.st_mode):
        reason = "not a regular file"
        raise FileSkippedError(f"{source}: {reason}", reason=reason, path=target)
    if one.st_dev != other.st_dev:
        raise _refused(target, "other filesystem")
    if one.st_size != other.st_size:
        raise _refused(target, "different")


_MESSAGES = {
    "different": "{} does not have the bytes of the file it should share blocks with",
    "not supported here": "{}: its filesystem cannot share blocks of files",
    "other filesystem": "{} is on another filesystem",
}


def _refused(path: Path, reason: str) -> FileSkippedError:
    message = _MESSAGES.get(reason, f"{{}}: {reason}").format(path)
    return FileSkippedError(message, reason=reason, path=path)


def _own_size(found: tuple[kernel.Extent, ...]) -> int:
    return sum(extent.length for extent in found if not extent.is_shared)


def _share_all(source: int, target: int, path: Path, job: Job) -> None:
    """Let a whole file use the blocks of another; if they differ, raise: a part may be shared."""

    def keys() -> list[kernel.StatKey]:
        return [kernel.StatKey.of(os.fstat(descriptor)) for descriptor in (source, target)]

    offset, before = 0, keys()
    size = before[0].size
    if before[1].size != size:
        raise _refused(path, "different")
    while offset < size:
        done = kernel.dedupe_range(source, offset, size - offset, target, offset)
        if done is None and before == keys():
            raise _refused(path, "not supported here")
        if not done:  # None: a file was cut in the meantime, and the range is beyond its end
            raise _refused(path, "different")
        offset += done
        reached("share: part shared")
        job.advance(done)
