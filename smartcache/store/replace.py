"""Replace a file that has a blob's bytes by a hard link to it: atomic, journaled, undoable.

The name exists at every moment and always shows the same bytes. The order of steps closes the
windows in which a write could be lost: a read lease proves that nobody writes; the journal line
comes first; names are exchanged, not removed; the old file is kept under a temporary name until,
at the end of the batch, a second lease proves that no writer slipped in. A writer who did gets the
file back (`give_back`), with everything that was written.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from smartcache.errors import (
    BlobNotFoundError,
    FileBusyError,
    FileChangedError,
    FileSkippedError,
    SmartcacheError,
)
from smartcache.store.adopt import CHUNK_FILES
from smartcache.store.attributes import read_attributes, write_attributes
from smartcache.store.blobs import explained
from smartcache.store.copies import copy_hashed, rotate
from smartcache.store.faults import reached
from smartcache.store.hold import (
    Allowance,
    Held,
    hold,
    refuse_unsuitable,
    refuse_visible_change,
)
from smartcache.store.journal import Batch, Change
from smartcache.store.kernel import Lease, drop_lease, exchange, lease_intact, take_lease
from smartcache.store.links import renew, unchanged
from smartcache.store.memos import Known, hash_all
from smartcache.store.proof import checked
from smartcache.store.statkey import StatKey, allocated_bytes
from smartcache.store.swap import Spot, beside
from smartcache.store.volume import Volume

MOST_LINKS = 60_000
"""Rotate before ext4's 65,000, so that no link fails inside a transaction."""

GRACE_SECONDS = 0.01
"""A writer may wait for the scheduler between looking a name up and opening it."""

PATIENCE_SECONDS = 60.0
"""How long a writer that came too late may take until its bytes are copied as they are then."""

Outcome = Literal["replaced", "present", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """What became of one file. `freed` is what the filesystem gave back."""

    path: Path
    outcome: Outcome
    digest: str = ""
    freed: int = 0
    error: Exception | None = None


@dataclass(slots=True, kw_only=True)
class _Work:
    file: Held
    digest: str
    change: Change
    temporary: str
    blob_inode: int = -1
    swapped: StatKey | None = None
    lease: Lease = "unsupported"
    error: Exception | None = None
    is_given_back: bool = False

    @property
    def path(self) -> Path:
        return self.file.path

    @property
    def spot(self) -> Spot:
        return self.file.spot


def replace_many(
    volume: Volume,
    files: Iterable[tuple[Path, str]],
    *,
    batch: Batch,
    owner: int | None = None,
    allow: frozenset[Allowance] = frozenset(),
    follow: bool = True,
) -> Iterator[Replacement]:
    """Replace (path, digest) pairs by hard links; what cannot be is returned with its reason.

    Not `follow`: a file is left alone when a folder above it is a symlink.
    """
    remaining = ((Path(os.path.abspath(path)), digest) for path, digest in files)
    postponed: list[tuple[Path, str]] = []
    while chunk := postponed + list(islice(remaining, CHUNK_FILES - len(postponed))):
        held: list[tuple[Held, str]] = []
        postponed, inodes = [], set()
        known = hash_all(volume, [path for path, _ in chunk])
        try:
            for path, digest in chunk:
                found = _examine(volume, path, digest, known.get(path), allow, follow)
                if isinstance(found, Replacement):
                    _let_own(volume, found, owner)
                    yield found
                elif found.st.st_ino in inodes:
                    # Two names of one file: replacing one moves the change time of the other.
                    found.release()
                    postponed.append((path, digest))
                else:
                    inodes.add(found.st.st_ino)
                    held.append((found, digest))
            results: list[Replacement] = []
            if held:
                with explained(volume.root):
                    results = _replace_chunk(volume, held, batch, owner)
        finally:
            for file, _ in held:
                file.release()
        yield from results


def _examine(
    volume: Volume,
    path: Path,
    digest: str,
    known: Known | None,
    allow: frozenset[Allowance],
    follow: bool,  # noqa: FBT001
) -> Held | Replacement:
    """Prove that a file has a blob's bytes and that nobody writes it; else say why not."""
    try:
        checked(volume, digest)
        st = os.lstat(path)
        refuse_unsuitable(path, st)
        if not volume.is_here(st):
            message = f"{path} is on another filesystem than the blob"
            raise FileSkippedError(message, reason="other filesystem", path=path)
        blob_st = _stat_blob(volume, digest)
        if os.path.samestat(st, blob_st):
            return Replacement(path=path, outcome="present", digest=digest)
        refuse_visible_change(path, st, blob_st, allow)
        if blob_st.st_nlink >= MOST_LINKS:
            rotate(volume, digest)
        file = hold(volume, path, known=known, follow=follow)
    except (SmartcacheError, OSError) as error:
        return Replacement(path=path, outcome="skipped", digest=digest, error=error)
    try:
        _refuse_wrong_bytes(file, digest)
    except FileSkippedError as error:
        file.release()
        return Replacement(path=path, outcome="skipped", digest=digest, error=error)
    return file


def _stat_blob(volume: Volume, digest: str) -> os.stat_result:
    try:
        return os.stat(volume.layout.blob(digest))
    except FileNotFoundError as error:
        raise BlobNotFoundError(f"Blob {digest} was removed", digest=digest) from error


def _let_own(volume: Volume, found: Replacement, owner: int | None) -> None:
    """Record a file that was the blob's link already."""
    blob = volume.index.blob(found.digest) if found.outcome == "present" else None
    if blob is not None:
        # By the inode it had when it was looked at: it may be gone by now.
        _record(volume, blob.id, str(found.path), blob.inode, owner)


def _record(volume: Volume, blob: int, path: str, inode: int, owner: int | None) -> None:
    with volume.index.write():
        volume.index.add_link(
            path, blob, kind="hardlink", filesystem=volume.filesystem, inode=inode, owner=owner
        )
        if owner is not None:
            volume.index.hold(owner, blob)


def _refuse_wrong_bytes(file: Held, digest: str) -> None:
    path = file.path
    if file.hashes.digest != digest:
        message = f"{path} does not have the bytes of blob {digest[:12]}"
        raise FileSkippedError(message, reason="different", path=path)
    if not file.is_proven:
        raise FileChangedError(f"{path} was changed a moment ago", path=path)


def _replace_chunk(
    volume: Volume, held: list[tuple[Held, str]], batch: Batch, owner: int | None
) -> list[Replacement]:
    changes = [
        Change.before("replace", file.path, digest, file.st, temporary=beside(file.path),
                      real=file.spot.path, kind="hardlink", filesystem=volume.filesystem)
        for file, digest in held
    ]  # fmt: skip
    works = [
        _Work(
            file=file, digest=digest, change=change, temporary=(change.temporary or file.path).name
        )
        for (file, digest), change in zip(held, batch.begin(changes), strict=True)
    ]
    reached("replace: journaled")
    results: list[Replacement] = []
    try:
        with volume.guard("replace"), volume.index.write():
            for work in works:
                try:
                    _swap(volume, work, owner)
                except (SmartcacheError, OSError) as error:
                    work.error = _as_skipped(work.path, error)
        time.sleep(GRACE_SECONDS)
        for work in works:
            _begin_to_settle(work)
        time.sleep(GRACE_SECONDS)
        results.extend(_finish(volume, work, batch) for work in works)
    finally:
        # Ctrl-C or a full disk in the middle: what is not finished is taken back.
        for work in works[len(results) :]:
            batch.end(work.change, "done" if _is_over(work) else "back")
        batch.flush()
    return results


def _is_over(work: _Work) -> bool:
    """Finish or take back a replacement that was interrupted; say whether the file is a link."""
    is_swapped = work.swapped is not None and work.error is None
    if is_swapped and work.spot.inode(work.temporary) is None:
        # The old file is gone already: all that is left is the last look for its writers.
        with suppress(FileSkippedError):
            end_settling(work.spot, work.blob_inode, work.lease, fd=work.file.fd)
            return True
        return False
    take_back(work.spot, work.temporary, work.blob_inode)
    return False


def _as_skipped(path: Path, error: Exception) -> Exception:
    """Word the errors that hold for one file only."""
    if isinstance(error, OSError) and error.errno == errno.EXDEV:
        message = f"{path} is on another mount than the blob"
        return FileSkippedError(message, reason="other filesystem", path=path)
    return error


def _swap(volume: Volume, work: _Work, owner: int | None) -> None:
    """Exchange the file and a link to the blob, inside a transaction: the row stays true."""
    blob, before = unchanged(volume, work.digest)
    if blob is None or before is None:
        raise FileChangedError(
            f"Blob {work.digest[:12]} changed; nothing was replaced", path=work.path
        )
    work.blob_inode = before.st_ino
    os.link(volume.layout.blob(work.digest), work.temporary, dst_dir_fd=work.spot.fd)
    reached("replace: temporary linked")
    _exchange(work)
    reached("replace: exchanged")
    renew(volume, blob, before)
    old = work.spot.stat(work.temporary)
    if old is None or not work.file.is_untouched(old):
        give_back(work.spot, work.temporary, work.blob_inode)
        raise FileChangedError(f"{work.path} was written to; it was left as it is", path=work.path)
    work.swapped = StatKey.of(os.fstat(work.file.fd))
    work.file.drop_lease()
    _record(volume, blob.id, str(work.path), before.st_ino, owner)


def _exchange(work: _Work) -> None:
    """Let the name and the temporary one change places; the name exists at every moment."""
    spot = work.spot
    if exchange(work.temporary, spot.name, dir_fd=spot.fd):
        return
    # No RENAME_EXCHANGE here: keep the old file under a third name, rename over, rename that.
    spare, here = f"{work.temporary}-old", {"src_dir_fd": spot.fd, "dst_dir_fd": spot.fd}
    os.link(spot.name, spare, **here, follow_symlinks=False)
    try:
        if spot.inode(spare) != work.file.st.st_ino:
            raise FileChangedError(f"{work.path} was replaced meanwhile", path=work.path)
        os.rename(work.temporary, spot.name, **here)
        os.rename(spare, work.temporary, **here)
    except BaseException:
        spot.unlink(spare)
        spot.unlink(work.temporary)
        raise


def _begin_to_settle(work: _Work) -> None:
    if work.error is not None:
        return
    try:
        work.lease = begin_to_settle(
            work.spot, work.temporary, work.blob_inode, work.swapped, fd=work.file.fd
        )
    except (FileSkippedError, OSError) as error:
        work.error = error
        work.is_given_back = True
        return
    reached("replace: old removed")


def _finish(volume: Volume, work: _Work, batch: Batch) -> Replacement:
    """Say that a file is replaced, once it is certain that nobody wrote to the old one."""
    if work.error is None:
        try:
            freed = end_settling(work.spot, work.blob_inode, work.lease, fd=work.file.fd)
            batch.end(work.change, "done", freed=freed)
            return Replacement(path=work.path, outcome="replaced", digest=work.digest, freed=freed)
        except (FileSkippedError, OSError) as error:
            work.error = error
            work.is_given_back = True
    take_back(work.spot, work.temporary, work.blob_inode)
    batch.end(work.change, "back")
    if not work.is_given_back and work.spot.inode() == work.blob_inode:
        # Another process has replaced it in the meantime.
        return Replacement(path=work.path, outcome="present", digest=work.digest)
    volume.index.drop_link(work.path)
    return Replacement(path=work.path, outcome="skipped", digest=work.digest, error=work.error)


def begin_to_settle(
    spot: Spot, temporary: str, blob_inode: int, swapped: StatKey | None, *, fd: int
) -> Lease:
    """Unlink the old file under its temporary name, or give it back and raise.

    `swapped` is the old file's stat key right after the exchange, or None if it is not known. The
    lease that is returned goes on watching for writers who looked the old name up and are late.
    """
    lease = take_lease(fd)
    if lease == "busy" or StatKey.of(os.fstat(fd)) != swapped:
        if lease == "held":
            drop_lease(fd)
        give_back(spot, temporary, blob_inode)
        raise _written(spot)
    os.unlink(temporary, dir_fd=spot.fd)
    return lease


def _written(spot: Spot) -> FileBusyError:
    message = f"{spot.path} was opened for writing; it was left as it is"
    return FileBusyError(message, path=spot.path)


def end_settling(spot: Spot, blob_inode: int, lease: Lease, *, fd: int) -> int:
    """Look a last time for writers of the old file; return the bytes that it freed."""
    is_broken = lease == "held" and not lease_intact(fd)
    if lease == "held":
        drop_lease(fd)
    if is_broken:
        _rescue(fd, spot, blob_inode)
        raise _written(spot)
    st = os.fstat(fd)
    return allocated_bytes(st) if st.st_nlink == 0 else 0


def _rescue(fd: int, spot: Spot, blob_inode: int) -> None:
    """Give a file back whose last name is gone: what its late writer writes is copied.

    A nameless inode cannot be linked again (only O_TMPFILE ones can), so its bytes get a new one.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while take_lease(fd) == "busy" and time.monotonic() < deadline:
        time.sleep(0.001)
    drop_lease(fd)
    rescued = beside(spot.path).name
    target = spot.create(rescued)
    try:
        with open(fd, "rb", closefd=False) as source:
            source.seek(0)
            copy_hashed(source, target)
        st = os.fstat(fd)
        with suppress(PermissionError):  # a group this user has left since
            os.fchown(target, -1, st.st_gid)
        write_attributes(target, read_attributes(fd))
        os.fchmod(target, st.st_mode & 0o777)
        os.utime(target, ns=(st.st_atime_ns, st.st_mtime_ns))
        os.fsync(target)
    finally:
        os.close(target)
    give_back(spot, rescued, blob_inode)


def give_back(spot: Spot, temporary: str, blob_inode: int) -> None:
    """Put the old file back under its name and remove our link; what others put there stays.

    Where the name was deleted or renamed over meanwhile, the old file is superseded and goes.
    """
    if not spot.swap_in(temporary, blob_inode):
        spot.unlink(temporary)


def take_back(spot: Spot, temporary: str, blob_inode: int) -> None:
    """Take a replacement back that got no further than the two names: as it was before."""
    found = spot.inode(temporary)
    if found == blob_inode:
        spot.unlink(temporary)
    elif found is not None:
        give_back(spot, temporary, blob_inode)
