"""Let equal files use the same blocks (reflinks), in place: each stays a file of its own.

The kernel does it (`kernel.dedupe_range`): it locks both files, compares their bytes and shares the
blocks of equal ranges. The hash is only the reason to try. The target keeps its inode, names, mode,
owner, times and attributes, and whoever writes to either file later writes to blocks of its own. So
no write can be lost, no row of the index is concerned, and nothing is ever half done: a file of
which some ranges are shared has the same bytes as one of which all or none are.

Undo is the same step the other way round: the file shares the blocks of a fresh copy beside it, and
then the copy goes.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from smartcache.errors import FileBusyError, FileChangedError, FileSkippedError, StoreError
from smartcache.progress import Job, Progress, silent
from smartcache.store.blobs import CHUNK, explained
from smartcache.store.changes.journal import Batch, Change, State
from smartcache.store.changes.replace import Replacement
from smartcache.store.changes.spot import Spot
from smartcache.store.changes.userfile import OPEN_FLAGS, Undoing, filling, refuse_unshareable
from smartcache.store.volume import Volume
from smartcache.system import (
    Advance,
    Extent,
    StatKey,
    dedupe_range,
    drop_lease,
    extents,
    reached,
    shares_blocks,
    take_lease,
)

CHUNK_FILES = 64
CHUNK_SIZE = 1 << 30
"""Files and bytes per journal fsync: what a kill leaves to be looked at by the next open."""

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
    """A target and its source, both open: whether they can be tried, and how far it has come.

    Making one raises FileSkippedError or OSError where they cannot. `own_size` is what the target's
    own blocks took before; `is_present`: they share all blocks already.
    """

    def __init__(self, volume: Volume, source: Path, target: Path, digest: str) -> None:
        self.path, self.digest = target, digest
        self.is_begun = self.is_settled = self.is_present = False
        refuse_unshareable(target, os.lstat(target))
        self.source_fd, self.target_fd = os.open(source, OPEN_FLAGS), -1
        try:
            self.target_fd = os.open(target, OPEN_FLAGS)
            self._refuse_unequal(volume, source)
            if os.path.sameopenfile(self.source_fd, self.target_fd) or self.shares_all():
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
        self.st = os.fstat(self.target_fd)
        self.change = Change.before(
            "share", target, digest, self.st, kind="reflink", filesystem=volume.filesystem
        )

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

    def shares_all(self) -> bool:
        return shares_blocks(self.source_fd, self.target_fd)

    def close(self) -> None:
        os.close(self.source_fd)
        if self.target_fd >= 0:
            os.close(self.target_fd)


# do


def share_many(
    volume: Volume, pairs: Iterable[Pair], *, batch: Batch, progress: Progress = silent
) -> Iterator[Replacement]:
    """Let each target of (source, target, digest) share the blocks of its source.

    Both lie on the volume's filesystem. "present": they share all blocks already. What cannot be
    shared is returned with its reason. `freed` are the bytes of blocks that only the target used
    and that it shares now; the filesystem may keep some of them (btrfs lets go of whole extents
    only) or need fewer than that (compression), so it is an upper bound.
    """
    remaining = iter(pairs)
    with progress("Sharing", None, "bytes") as job:
        while True:
            works: list[_Work] = []
            try:
                for pair in remaining:
                    found = _examine(volume, pair)
                    if isinstance(found, Replacement):
                        yield found
                        continue
                    works.append(found)
                    size = sum(work.st.st_size for work in works)
                    if len(works) >= CHUNK_FILES or size >= CHUNK_SIZE:
                        break
                if not works:
                    return
                with explained(volume.root):
                    results = _share_chunk(works, batch, job)
            finally:
                for work in works:
                    work.close()
            yield from results


def _examine(volume: Volume, pair: Pair) -> _Work | Replacement:
    """Open both files of a pair that can be tried; else say why not."""
    source, target = (Path(os.path.abspath(path)) for path in pair[:2])
    try:
        work = _Work(volume, source, target, pair[2])
    except (FileSkippedError, OSError) as error:
        reason = _as_skipped(target, error)
        return Replacement(path=target, outcome="skipped", digest=pair[2], error=reason)
    if not work.is_present:
        return work
    work.close()
    return Replacement(path=target, outcome="present", digest=pair[2])


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


def _share_chunk(works: list[_Work], batch: Batch, job: Job) -> list[Replacement]:
    batch.begin(work.change for work in works)
    try:
        reached("share: journaled")
        return [_share_one(work, batch, job) for work in works]
    finally:
        # Ctrl-C or a full disk in the middle.
        for work in works:
            if not work.is_settled:
                is_done = work.is_begun and has_shared_blocks(work.change)
                batch.end(work.change, "done" if is_done else "back")
        batch.flush()


def _share_one(work: _Work, batch: Batch, job: Job) -> Replacement:
    if work.shares_all():
        # Another name of the file was in this chunk, or another process was faster.
        batch.end(work.change, "back")
        work.is_settled = True
        return Replacement(path=work.path, outcome="present", digest=work.digest)
    work.is_begun = True
    error: Exception | None = None
    try:
        share_all(work.source_fd, work.target_fd, work.st.st_size, path=work.path, job=job)
    except (FileSkippedError, OSError) as failure:
        error = _as_skipped(work.path, failure)
        if not isinstance(error, FileSkippedError):
            raise
    reached("share: shared")
    now = extents(work.target_fd) or ()
    is_done = error is None or any(extent.is_shared for extent in now)
    batch.end(work.change, "done" if is_done else "back")
    work.is_settled = True
    return Replacement(
        path=work.path, outcome="replaced" if error is None else "skipped", digest=work.digest,
        freed=max(0, work.own_size - _own_size(now)), error=error,
    )  # fmt: skip


def share_all(
    source_fd: int, target_fd: int, size: int, *, path: Path, job: Job | None = None
) -> None:
    """Let a whole file use the blocks of another; raise if they differ: then a part may be shared.

    `path` is what the target is called in errors.
    """

    def keys() -> list[StatKey]:
        return [StatKey.of(os.fstat(descriptor)) for descriptor in (source_fd, target_fd)]

    offset, before = 0, keys()
    if {key.size for key in before} != {size}:
        raise _differs(path)
    while offset < size:
        done = dedupe_range(source_fd, offset, size - offset, target_fd, offset)
        if done is None and before == keys():
            raise _not_supported(path)
        if not done:  # None: a file was cut in the meantime, and the range is beyond its end
            raise _differs(path)
        offset += done
        reached("share: part shared")
        if job is not None:
            job.advance(done)


def has_shared_blocks(change: Change) -> bool:
    """Say whether a file whose blocks were shared is as it was then, and still shares some.

    One that was written to or renamed over since has its own bytes by copy-on-write.
    """
    try:
        with Spot(change.place) as spot:
            descriptor = spot.open()
    except (FileSkippedError, OSError):
        return False
    try:
        st = os.fstat(descriptor)
        found = (st.st_ino, st.st_size, st.st_mtime_ns)
        if found != (change.inode, change.size, change.mtime_ns):
            return False
        return any(extent.is_shared for extent in extents(descriptor) or ())
    finally:
        os.close(descriptor)


# finish after a crash


def finish(_: Volume, change: Change, __: Spot) -> State:
    """Say whether blocks are shared: nothing can be half done."""
    return "done" if has_shared_blocks(change) else "back"


# undo


def undo(volume: Volume, change: Change, undoing: Undoing) -> str:  # noqa: ARG001 - as all
    """Let a file that shares blocks have its own: those of a copy beside it, which then goes.

    The kernel compares copy and file, so that a write in between is noticed, not lost. Everything
    about the file stays, its other names included. Nothing is done to a file that shares none.
    """
    if not has_shared_blocks(change):
        return ""  # changed since: it has its own by copy-on-write
    # No mode in the note: recovery has only the temporary name to remove.
    with Spot(change.place) as spot, filling(spot, change, undoing.batch, mode=None) as (copy, _):
        file = spot.open()
        try:
            _copy_data(file, copy, undoing.job.advance)
            os.fsync(copy)
            reached("own blocks: copied")
            share_all(copy, file, os.fstat(copy).st_size, path=change.path)
        except FileSkippedError as error:
            if error.reason != "different":
                raise
            raise FileChangedError(f"{change.path} was written to", path=change.path) from error
        finally:
            os.close(file)
            os.ftruncate(copy, 0)  # XFS lets go of a removed file's blocks some time later
    reached("own blocks: in place")
    reached("undo: own bytes")
    return ""


def _copy_data(source: int, target: int, advance: Advance | None) -> None:
    """Copy a file by reading and writing, holes left out; a clone would share its blocks again."""
    size = os.fstat(source).st_size
    end = 0
    while end < size:
        try:
            offset = os.lseek(source, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            break  # nothing but a hole up to the end
        end = os.lseek(source, offset, os.SEEK_HOLE)
        while offset < end and (data := os.pread(source, min(CHUNK, end - offset), offset)):
            written = os.pwrite(target, data, offset)
            offset += written
            if advance is not None:
                advance(written)
    os.ftruncate(target, size)
