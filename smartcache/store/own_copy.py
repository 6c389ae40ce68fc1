"""Give a file that shares a blob its own bytes again; its name is never absent or half written."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from smartcache.errors import FileChangedError
from smartcache.store.attributes import write_attributes
from smartcache.store.copies import copy_hashed, copy_verified
from smartcache.store.faults import reached
from smartcache.store.filesystems import filesystem_id
from smartcache.store.journal import Batch, Change
from smartcache.store.kernel import sync_directory
from smartcache.store.links import own_unlink
from smartcache.store.swap import beside, swap_in
from smartcache.store.volume import Volume

_DEFAULT_MODE = 0o644


def give_own_copy(volume: Volume, change: Change, batch: Batch) -> None:
    """Replace the link at `change.path` by a file with the blob's bytes and the old metadata.

    Raises FileChangedError, with nothing changed, if somebody else has replaced the link meanwhile.
    """
    linked = os.lstat(change.path)
    temporary = beside(change.path)
    (note,) = batch.begin([replace(change, op="own", temporary=temporary)])
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with change.path.open("rb") as source:
            copied = copy_hashed(source, descriptor)
        if copied != change.digest:
            raise FileChangedError(f"{change.path} was changed since", path=change.path)
        restore_metadata(descriptor, change)
        os.fsync(descriptor)
        reached("own copy: written")
        with own_unlink(volume, change.digest):
            is_swapped = swap_in(temporary, change.path, linked.st_ino)
        if not is_swapped:
            raise FileChangedError(f"{change.path} was replaced by somebody else", path=change.path)
        sync_directory(change.path.parent)
    finally:
        os.close(descriptor)
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        batch.end(note, "done")
    reached("own copy: in place")


def restore_missing(volume: Volume, change: Change, batch: Batch) -> None:
    """Put a file with a blob's bytes and the old metadata at a path where nothing is."""
    temporary = beside(change.path)
    (note,) = batch.begin([replace(change, op="own", temporary=temporary)])
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        copy_verified(volume, change.digest, descriptor)
        restore_metadata(descriptor, change)
        os.fsync(descriptor)
        reached("own copy: written")
        os.link(temporary, change.path)
        sync_directory(change.path.parent)
    finally:
        os.close(descriptor)
        temporary.unlink(missing_ok=True)
        batch.end(note, "done")
    reached("own copy: in place")


def restore_metadata(descriptor: int, change: Change) -> None:
    """Give a new file the owner, attributes, mode and time that the journal remembers."""
    if change.uid is not None and change.gid is not None and hasattr(os, "fchown"):
        # Only root may give files away; for others the owner is the same anyway.
        with suppress(PermissionError):
            os.fchown(descriptor, change.uid, change.gid)
    write_attributes(descriptor, change.xattrs or {})
    os.fchmod(descriptor, _DEFAULT_MODE if change.mode is None else change.mode)
    if change.mtime_ns is not None:
        os.utime(descriptor, ns=(change.mtime_ns, change.mtime_ns))


def link_to_twin(volume: Volume, change: Change, twin: Path, batch: Batch) -> bool:
    """Make `change.path` one inode with a file it was one with before; say whether it worked."""
    st = os.lstat(twin)
    if (st.st_size, st.st_mtime_ns) != (change.size, change.mtime_ns):
        return False
    if filesystem_id(change.path.parent) != filesystem_id(twin):
        return False
    linked = os.lstat(change.path)
    temporary = beside(change.path)
    (note,) = batch.begin([replace(change, op="own", temporary=temporary)])
    os.link(twin, temporary)
    with own_unlink(volume, change.digest):
        is_done = swap_in(temporary, change.path, linked.st_ino)
    temporary.unlink(missing_ok=True)
    batch.end(note, "done")
    return is_done
