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
from dataclasses import dataclass, replace
from pathlib import Path

from smartcache.errors import FileBusyError, FileChangedError, FileSkippedError, StoreError
from smartcache.progress import Job, Progress, silent
from smartcache.store.blobs import explained
from smartcache.store.faults import reached
from smartcache.store.hold import OPEN_FLAGS, refuse_unshareable
from smartcache.store.journal import Batch, Change
from smartcache.store.kernel import (
    Extent,
    dedupe_range,
    drop_lease,
    extents,
    shares_blocks,
    take_lease,
)
from smartcache.store.proof import CHUNK, Advance
from smartcache.store.replace import Replacement
from smartcache.store.statkey import StatKey
from smartcache.store.swap import Spot, beside
from smartcache.store.volume import Volume

CHUNK_FILES = 64
CHUNK_SIZE = 1 << 30
"""Files and bytes per journal fsync: what a kill leaves to be looked at by the next open."""

_NOT_SUPPORTED = "not supported here"
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


@dataclass(slots=True, kw_only=True)
class _Work:
    """A target and its source, both open; `own_size` is what its own blocks took before."""

    path: Path
    digest: str
    st: os.stat_result
    source_fd: int
    target_fd: int
    own_size: int
    change: Change
    is_begun: bool = False
    is_settled: bool = False

    def close(self) -> None:
        os.close(self.source_fd)
        os.close(self.target_fd)


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
        is_over = False
        while not is_over:
            works: list[_Work] = []
            try:
                while not (is_over or _is_full(works)):
                    pair = next(remaining, None)
                    is_over = pair is None
                    found = None if pair is None else _examine(volume, pair)
                    if isinstance(found, Replacement):
                        yield found
                    elif found is not None:
                        works.append(found)
                with explained(volume.root):
                    results = _share_chunk(works, batch, job) if works else []
            finally:
                for work in works:
                    work.close()
            yield from results


def _is_full(works: list[_Work]) -> bool:
    return len(works) >= CHUNK_FILES or sum(work.st.st_size for work in works) >= CHUNK_SIZE


def _examine(volume: Volume, pair: Pair) -> _Work | Replacement:
    """Open both files of a pair that can be tried; else say why not."""
    source, target, digest = Path(os.path.abspath(pair[0])), Path(os.path.abspath(pair[1])), pair[2]
    opened: list[int] = []
    try:
        st = os.lstat(target)
        refuse_unshareable(target, st)
        opened.append(os.open(source, OPEN_FLAGS))
        opened.append(os.open(target, OPEN_FLAGS))
        source_fd, target_fd = opened
        _refuse_unequal(volume, source, target, os.fstat(source_fd), os.fstat(target_fd))
        if os.path.sameopenfile(source_fd, target_fd) or shares_blocks(source_fd, target_fd):
            _close(opened)
            return Replacement(path=target, outcome="present", digest=digest)
        if take_lease(target_fd) == "busy":
            raise FileBusyError(f"{target} is open for writing", path=target)
        # The kernel's own locks are enough: nobody has to wait for us.
        drop_lease(target_fd)
        opened[1] = _permitted(source_fd, target_fd, target)
        own_size = _own_size(_placed_extents(target, opened[1]))
    except (FileSkippedError, OSError) as error:
        _close(opened)
        return Replacement(
            path=target, outcome="skipped", digest=digest, error=_as_skipped(target, error)
        )
    except BaseException:
        _close(opened)
        raise
    st = os.fstat(opened[1])
    change = Change.before(
        "share", target, digest, st, kind="reflink", filesystem=volume.filesystem
    )
    return _Work(
        path=target, digest=digest, st=st, source_fd=source_fd, target_fd=opened[1],
        own_size=own_size, change=change,
    )  # fmt: skip


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _refuse_unequal(
    volume: Volume, source: Path, target: Path, source_st: os.stat_result, st: os.stat_result
) -> None:
    """Raise where a look at both files tells that their blocks cannot be shared."""
    refuse_unshareable(target, st)
    if not stat.S_ISREG(source_st.st_mode):
        raise FileSkippedError(
            f"{source}: not a regular file", reason="not a regular file", path=target
        )
    if not volume.is_here(st) or source_st.st_dev != st.st_dev:
        message = f"{target} is on another filesystem"
        raise FileSkippedError(message, reason="other filesystem", path=target)
    if source_st.st_size != st.st_size:
        raise _differs(target)


def _differs(path: Path) -> FileSkippedError:
    message = f"{path} does not have the bytes of the file it should share blocks with"
    return FileSkippedError(message, reason="different", path=path)


def _not_supported(path: Path) -> FileSkippedError:
    message = f"{path}: its filesystem cannot share blocks of files"
    return FileSkippedError(message, reason=_NOT_SUPPORTED, path=path)


def _permitted(source_fd: int, target_fd: int, path: Path) -> int:
    """Return a descriptor of the target that the kernel accepts: this one, or one for writing.

    A range of no bytes asks for permission and changes nothing.
    """
    try:
        answer = dedupe_range(source_fd, 0, 0, target_fd, 0)
    except PermissionError:
        # A kernel before 4.20. Nothing is ever written through it.
        writable = os.open(path, OPEN_FLAGS | os.O_RDWR)
        if not os.path.sameopenfile(writable, target_fd):
            os.close(writable)
            raise FileChangedError(f"{path} was replaced meanwhile", path=path) from None
        os.close(target_fd)
        return writable
    if answer is None:
        raise _not_supported(path)
    return target_fd


def _placed_extents(path: Path, descriptor: int) -> tuple[Extent, ...]:
    """Return where a file lies; raise if nobody can tell, or if it has no blocks of its own."""
    found = extents(descriptor)
    if found is None:
        raise _not_supported(path)
    if any(extent.physical is None for extent in found):
        reason = "has no blocks to share"  # a small file, kept inside the metadata
        raise FileSkippedError(f"{path}: {reason}", reason=reason, path=path)
    return found


def _own_size(found: tuple[Extent, ...]) -> int:
    return sum(extent.length for extent in found if not extent.is_shared)


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
    if shares_blocks(work.source_fd, work.target_fd):
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
    freed = max(0, work.own_size - _own_size(now))
    return Replacement(
        path=work.path, outcome="replaced" if error is None else "skipped", digest=work.digest,
        freed=freed, error=error,
    )  # fmt: skip


def share_all(
    source_fd: int, target_fd: int, size: int, *, path: Path, job: Job | None = None
) -> None:
    """Let a whole file use the blocks of another; raise if they differ: then a part may be shared.

    `path` is what the target is called in errors.
    """
    offset = 0
    before = _keys(source_fd, target_fd)
    if {key.size for key in before} != {size}:
        raise _differs(path)
    while offset < size:
        done = dedupe_range(source_fd, offset, size - offset, target_fd, offset)
        if done is None and before == _keys(source_fd, target_fd):
            raise _not_supported(path)
        if not done:  # None: a file was cut in the meantime, and the range is beyond its end
            raise _differs(path)
        offset += done
        reached("share: part shared")
        if job is not None:
            job.advance(done)


def _keys(*descriptors: int) -> list[StatKey]:
    return [StatKey.of(os.fstat(descriptor)) for descriptor in descriptors]


def _as_skipped(path: Path, error: Exception) -> Exception:
    """Word the errors that hold for one file only."""
    reason = _REASONS.get(getattr(error, "errno", None) or 0)
    if reason is None or isinstance(error, StoreError):
        return error
    return FileSkippedError(f"{path}: {reason}", reason=reason, path=path)


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


def give_own_blocks(change: Change, batch: Batch, advance: Advance | None = None) -> None:
    """Let a file that shares blocks have its own: those of a copy beside it, which then goes.

    The kernel compares copy and file, so that a write in between is noticed, not lost. Everything
    about the file stays, its other names included. Nothing is done to a file that shares none.
    """
    if not has_shared_blocks(change):
        return
    temporary = beside(change.path)
    with Spot(change.place) as spot:
        # No mode in this note: recovery has only the temporary name to remove.
        (note,) = batch.begin([replace(change, op="own", temporary=temporary, mode=None)])
        copy = spot.create(temporary.name)
        try:
            file = spot.open()
            try:
                _copy_data(file, copy, advance)
                os.fsync(copy)
                reached("own blocks: copied")
                share_all(copy, file, os.fstat(copy).st_size, path=change.path)
            finally:
                os.close(file)
        except FileSkippedError as error:
            if error.reason != "different":
                raise
            raise FileChangedError(f"{change.path} was written to", path=change.path) from error
        finally:
            os.ftruncate(copy, 0)  # XFS lets go of a removed file's blocks some time later
            os.close(copy)
            spot.unlink(temporary.name)
            batch.end(note, "done")
    reached("own blocks: in place")


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
