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
from pathlib import Path

from smartcache.errors import FileBusyError, FileChangedError, FileSkippedError, StoreError
from smartcache.progress import Job, Progress, silent
from smartcache.store.blobs import explained
from smartcache.store.changes.replace import Replacement
from smartcache.store.changes.userfile import OPEN_FLAGS, refuse_unshareable
from smartcache.store.volume import Volume
from smartcache.system.faults import reached
from smartcache.system.kernel import (
    Extent,
    StatKey,
    dedupe_range,
    drop_lease,
    extents,
    shares_blocks,
    take_lease,
)

_REASONS = {
    errno.EXDEV: "other filesystem",
    errno.EPERM: "cannot be changed",  # immutable, or another user's
    errno.EACCES: "cannot be read",
    errno.EROFS: "read-only filesystem",
    errno.ETXTBSY: "busy",
    errno.ENOENT: "was removed",
    errno.ELOOP: "not a regular file",
    errno.ENXIO: "not a regular file",
}

Pair = tuple[Path, Path, str]


class _Work:
    """A target and its source, both open.

    Making one raises FileSkippedError or OSError where they cannot be tried. `own_size` is what the
    target's own blocks took before; `is_present`: they share all blocks already.
    """

    def __init__(self, volume: Volume, source: Path, target: Path) -> None:
        self.path = target
        self.is_present = False
        refuse_unshareable(target, os.lstat(target))
        self.source_fd, self.target_fd = os.open(source, OPEN_FLAGS), -1
        try:
            self.target_fd = os.open(target, OPEN_FLAGS)
            self._refuse_unequal(volume, source)
            if os.path.sameopenfile(self.source_fd, self.target_fd) or shares_blocks(
                self.source_fd, self.target_fd
            ):
                self.is_present = True
                return
            if take_lease(self.target_fd) == "busy":
                raise FileBusyError(f"{target} is open for writing", path=target)
            # The kernel's own locks are enough: nobody has to wait for us.
            drop_lease(self.target_fd)
            self._ask_permission()
            found = extents(self.target_fd)
            if found is None:
                raise _not_supported(target)
            if any(extent.physical is None for extent in found):
                reason = "has no blocks to share"  # a small file, kept inside the metadata
                raise FileSkippedError(f"{target}: {reason}", reason=reason, path=target)
        except BaseException:
            self.close()
            raise
        self.own_size = _own_size(found)

    def _refuse_unequal(self, volume: Volume, source: Path) -> None:
        """Raise where a look at both files tells that their blocks cannot be shared."""
        path, source_st, st = self.path, os.fstat(self.source_fd), os.fstat(self.target_fd)
        refuse_unshareable(path, st)
        if not stat.S_ISREG(source_st.st_mode):
            reason = "not a regular file"
            raise FileSkippedError(f"{source}: {reason}", reason=reason, path=path)
        if not volume.is_here(st) or source_st.st_dev != st.st_dev:
            message = f"{path} is on another filesystem"
            raise FileSkippedError(message, reason="other filesystem", path=path)
        if source_st.st_size != st.st_size:
            raise _differs(path)

    def _ask_permission(self) -> None:
        """Have a descriptor of the target that the kernel accepts: this one, or one for writing.

        A range of no bytes asks for permission and changes nothing.
        """
        try:
            if dedupe_range(self.source_fd, 0, 0, self.target_fd, 0) is None:
                raise _not_supported(self.path)
        except PermissionError:
            # A kernel before 4.20. Nothing is ever written through it.
            writable = os.open(self.path, OPEN_FLAGS | os.O_RDWR)
            read_only, self.target_fd = self.target_fd, writable
            is_same = os.path.sameopenfile(writable, read_only)
            os.close(read_only)
            if not is_same:
                message = f"{self.path} was replaced meanwhile"
                raise FileChangedError(message, path=self.path) from None

    def close(self) -> None:
        os.close(self.source_fd)
        if self.target_fd >= 0:
            os.close(self.target_fd)


def share_many(
    volume: Volume, pairs: Iterable[Pair], *, progress: Progress = silent
) -> Iterator[Replacement]:
    """Let each target of (source, target, digest) share the blocks of its source.

    Both are on the volume's filesystem. "present": they share all blocks already. What cannot be
    shared is returned with its reason. `freed` are the bytes of blocks that only the target used
    and that it shares now; the filesystem may keep some of them (btrfs lets go of whole extents
    only) or need fewer than that (compression), so it is an upper bound.
    """
    with progress("Sharing", None, "bytes") as job:
        for source, target, digest in pairs:
            yield _share(volume, Path(os.path.abspath(source)), Path(os.path.abspath(target)),
                         digest, job)  # fmt: skip


def _share(volume: Volume, source: Path, target: Path, digest: str, job: Job) -> Replacement:
    try:
        work = _Work(volume, source, target)
    except (FileSkippedError, OSError) as error:
        reason = _as_skipped(target, error)
        return Replacement(path=target, outcome="skipped", digest=digest, error=reason)
    try:
        if work.is_present:
            return Replacement(path=target, outcome="present", digest=digest)
        reached("share: begun")
        failure: Exception | None = None
        try:
            with explained(volume.root):
                _share_all(work, job)
        except (FileSkippedError, OSError) as error:
            failure = _as_skipped(target, error)
            if not isinstance(failure, FileSkippedError):
                raise
        reached("share: shared")
        return Replacement(
            path=target, outcome="replaced" if failure is None else "skipped", digest=digest,
            freed=max(0, work.own_size - _own_size(extents(work.target_fd) or ())), error=failure,
        )  # fmt: skip
    finally:
        work.close()


def _differs(path: Path) -> FileSkippedError:
    message = f"{path} does not have the bytes of the file it should share blocks with"
    return FileSkippedError(message, reason="different", path=path)


def _not_supported(path: Path) -> FileSkippedError:
    message = f"{path}: its filesystem cannot share blocks of files"
    return FileSkippedError(message, reason="not supported here", path=path)


def _own_size(found: tuple[Extent, ...]) -> int:
    return sum(extent.length for extent in found if not extent.is_shared)


def _as_skipped(path: Path, error: Exception) -> Exception:
    """Word the errors that hold for one file only."""
    reason = _REASONS.get(getattr(error, "errno", None) or 0)
    if reason is None or isinstance(error, StoreError):
        return error
    return FileSkippedError(f"{path}: {reason}", reason=reason, path=path)


def _share_all(work: _Work, job: Job) -> None:
    """Let a whole file use the blocks of another; if they differ, raise: a part may be shared."""
    descriptors = work.source_fd, work.target_fd

    def keys() -> list[StatKey]:
        return [StatKey.of(os.fstat(descriptor)) for descriptor in descriptors]

    offset, before = 0, keys()
    size = before[0].size
    if before[1].size != size:
        raise _differs(work.path)
    while offset < size:
        done = dedupe_range(work.source_fd, offset, size - offset, work.target_fd, offset)
        if done is None and before == keys():
            raise _not_supported(work.path)
        if not done:  # None: a file was cut in the meantime, and the range is beyond its end
            raise _differs(work.path)
        offset += done
        reached("share: part shared")
        job.advance(done)
