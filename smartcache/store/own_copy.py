"""Give a file that shares a blob its own bytes again; its name is never absent or half written.

Everything happens in the folder the file was in when it was changed (`Spot`), and what is put there
was hashed while it was written.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from smartcache.errors import FileChangedError
from smartcache.progress import SILENT, Job
from smartcache.store.attributes import write_attributes
from smartcache.store.copies import copy_hashed, copy_verified
from smartcache.store.faults import reached
from smartcache.store.journal import Batch, Change
from smartcache.store.kernel import effective_user
from smartcache.store.links import own_unlink
from smartcache.store.proof import open_blob
from smartcache.store.swap import Spot, beside
from smartcache.store.volume import Volume

_DEFAULT_MODE = 0o644


def give_own_copy(volume: Volume, change: Change, batch: Batch, job: Job = SILENT) -> None:
    """Replace the link at `change.path` by a file with the blob's bytes and the old metadata.

    Raises FileChangedError, with nothing changed, if somebody else has replaced the link meanwhile.
    """
    with Spot(change.place) as spot:
        linked = spot.stat()
        if linked is None:
            raise FileChangedError(f"{change.path} was removed", path=change.path)
        temporary = beside(change.path)
        (note,) = batch.begin([replace(change, op="own", temporary=temporary)])
        descriptor = spot.create(temporary.name)
        try:
            with _opened(volume, spot, linked, change.digest) as source:
                copied = copy_hashed(source, descriptor, job.advance)
            if copied != change.digest:
                raise FileChangedError(f"{change.path} was changed since", path=change.path)
            restore_metadata(descriptor, change)
            _sync(descriptor, change, job)
            reached("own copy: written")
            with own_unlink(volume, change.digest):
                is_swapped = spot.swap_in(temporary.name, linked.st_ino)
            if not is_swapped:
                message = f"{change.path} was replaced by somebody else"
                raise FileChangedError(message, path=change.path)
            spot.sync()
        finally:
            os.close(descriptor)
            spot.unlink(temporary.name)
            batch.end(note, "done")
    reached("own copy: in place")


def _opened(volume: Volume, spot: Spot, linked: os.stat_result, digest: str) -> BinaryIO:
    """Open what a link shows: the file itself, or the blob behind a symlink."""
    if stat.S_ISLNK(linked.st_mode):
        return open_blob(volume, digest)
    return open(spot.open(), "rb")


def restore_missing(volume: Volume, change: Change, batch: Batch, job: Job = SILENT) -> None:
    """Put a file with a blob's bytes and the old metadata at a path where nothing is."""
    with Spot(change.place) as spot:
        temporary = beside(change.path)
        (note,) = batch.begin([replace(change, op="own", temporary=temporary)])
        descriptor = spot.create(temporary.name)
        try:
            copy_verified(volume, change.digest, descriptor, advance=job.advance)
            restore_metadata(descriptor, change)
            _sync(descriptor, change, job)
            reached("own copy: written")
            os.link(temporary.name, spot.name, src_dir_fd=spot.fd, dst_dir_fd=spot.fd)
            spot.sync()
        finally:
            os.close(descriptor)
            spot.unlink(temporary.name)
            batch.end(note, "done")
    reached("own copy: in place")


def _sync(descriptor: int, change: Change, job: Job) -> None:
    """Wait for the disk, which may take as long as the copy: say so."""
    job.describe(f"writing {change.path.name} to disk")
    os.fsync(descriptor)


def restore_metadata(descriptor: int, change: Change) -> None:
    """Give a new file the group, attributes, mode and time that the journal remembers.

    Its owner is this user, as it was before: files of others are never changed. No special mode.
    """
    if change.gid is not None:
        with suppress(PermissionError):  # a group this user has left since
            os.fchown(descriptor, -1, change.gid)
    write_attributes(descriptor, change.xattrs or {})
    os.fchmod(descriptor, _DEFAULT_MODE if change.mode is None else change.mode & 0o777)
    if change.mtime_ns is not None:
        os.utime(descriptor, ns=(change.mtime_ns, change.mtime_ns))


def link_to_twin(volume: Volume, change: Change, twin: Path, batch: Batch) -> bool:
    """Make `change.path` one inode with a file it was one with before; say whether it worked."""
    with Spot(change.place) as spot, Spot(twin) as other:
        st, linked = other.stat(), spot.stat()
        if st is None or linked is None or os.fstat(spot.fd).st_dev != st.st_dev:
            return False
        is_same = (st.st_size, st.st_mtime_ns) == (change.size, change.mtime_ns)
        if not is_same or not stat.S_ISREG(st.st_mode) or st.st_uid != effective_user():
            return False
        temporary = beside(change.path)
        (note,) = batch.begin([replace(change, op="own", temporary=temporary)])
        os.link(
            other.name, temporary.name, src_dir_fd=other.fd, dst_dir_fd=spot.fd,
            follow_symlinks=False,
        )  # fmt: skip
        is_twin = spot.inode(temporary.name) == st.st_ino
        is_done = False
        if is_twin:
            with own_unlink(volume, change.digest):
                is_done = spot.swap_in(temporary.name, linked.st_ino)
        spot.unlink(temporary.name)
        batch.end(note, "done")
    return is_done
