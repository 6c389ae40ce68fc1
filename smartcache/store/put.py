"""Bring a file into the store by copying it or by moving it there."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from smartcache.errors import (
    BlobNotFoundError,
    DamagedBlobError,
    FileChangedError,
    FileSkippedError,
    StoreError,
)
from smartcache.store.adopt import adopt_many
from smartcache.store.blobs import Expected, check_expected, commit, put_stream, settle, writing
from smartcache.store.digest import Algorithm, check_hex, hash_file
from smartcache.store.faults import reached
from smartcache.store.filesystems import filesystem_id
from smartcache.store.hold import refuse_unsuitable
from smartcache.store.journal import Batch, Change
from smartcache.store.kernel import clone
from smartcache.store.links import own_unlink
from smartcache.store.memos import recall
from smartcache.store.owners import journaled_pin, own, pin
from smartcache.store.proof import Advance, checked, read_chunks
from smartcache.store.records import Blob
from smartcache.store.statkey import StatKey
from smartcache.store.volume import Volume


def put_copy(
    volume: Volume,
    path: Path,
    *,
    expected: Expected | None = None,
    algorithms: Iterable[Algorithm] = (),
    advance: Advance | None = None,
) -> str:
    """Copy a file into the store (by reflink where that works); the file itself is not touched."""
    announced = {name: check_hex(name, value) for name, value in (expected or {}).items()}
    wanted: tuple[Algorithm, ...] = tuple(dict.fromkeys(("blake3", *announced, *algorithms)))
    descriptor = os.open(
        path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
    )
    try:
        st = os.fstat(descriptor)
        _refuse_special(path, st)
        known = recall(volume, path, st, wanted)
        if known is not None:
            check_expected(known, announced, what=str(path))
            with suppress(BlobNotFoundError, DamagedBlobError):
                blob = checked(volume, known.digest)
                volume.index.add_aliases(blob.id, known.values)
                _remember_source(volume, path, st, blob.digest)
                return blob.digest
        digest = take_in(
            volume, descriptor, expected=announced, algorithms=wanted, advance=advance
        ).digest
        if not _is_unchanged(volume, st, os.fstat(descriptor)):
            message = f"{path} changed while it was copied; the store has what was read"
            raise FileChangedError(message, path=path)
        _remember_source(volume, path, st, digest)
        return digest
    finally:
        os.close(descriptor)


def take_in(
    volume: Volume,
    descriptor: int,
    *,
    expected: Expected,
    algorithms: Iterable[Algorithm] = (),
    advance: Advance | None = None,
) -> Blob:
    """Make a blob of an open file's bytes, in an inode of its own: a reflink where that works.

    What is hashed is the new inode, before it gets its name. Who could not read the file cannot
    read the blob, should the store be published.
    """
    st = os.fstat(descriptor)
    wanted: tuple[Algorithm, ...] = tuple(dict.fromkeys(("blake3", *expected, *algorithms)))
    blob = _clone_in(volume, descriptor, st, wanted, expected)
    if blob is not None:
        return blob
    return put_stream(
        volume, read_chunks(descriptor), size=st.st_size, expected=expected, algorithms=wanted,
        mtime_ns=st.st_mtime_ns, mode=st.st_mode, advance=advance,
    )  # fmt: skip


def _is_unchanged(volume: Volume, before: os.stat_result, now: os.stat_result) -> bool:
    """Say whether a file is as it was; a blob's own inode may have got its mode back from us."""
    if volume.is_here(now) and volume.index.blob_by_inode(now.st_ino) is not None:
        return (now.st_size, now.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    return StatKey.of(now) == StatKey.of(before)


def _remember_source(volume: Volume, path: Path, st: os.stat_result, digest: str) -> None:
    """Record where a copy came from: people know their files by name."""
    blob = volume.index.blob(digest)
    link = volume.index.link(path)
    if blob is None or link is not None:
        return
    with suppress(StoreError):  # the blob is in the store; its name is a nicety
        filesystem = filesystem_id(path, st)
        volume.index.add_link(
            str(path), blob.id, kind="copy", filesystem=filesystem, inode=st.st_ino, owner=None
        )


def _refuse_special(path: Path, st: os.stat_result) -> None:
    refusals = ("not a regular file", "empty")
    try:
        refuse_unsuitable(path, st)
    except FileSkippedError as error:
        if error.reason in refusals:
            raise


def _clone_in(
    volume: Volume,
    descriptor: int,
    st: os.stat_result,
    wanted: tuple[Algorithm, ...],
    announced: Expected,
) -> Blob | None:
    """Share the blocks of a file on a filesystem that can; None where it cannot."""
    if not volume.is_here(st) or (volume.device, "reflink") in volume.unable:
        return None
    with writing(volume) as tmp:
        if not clone(descriptor, tmp.fd):
            volume.unable.add((volume.device, "reflink"))
            return None
        hashes, _ = hash_file(tmp.path, wanted, threads=volume.settings.threads)
        check_expected(hashes, announced, what="The file")
        settle(tmp.fd, st.st_mtime_ns, st.st_mode)
        return commit(volume, tmp.path, hashes)


def put_moved(
    volume: Volume,
    path: Path,
    *,
    batch: Batch,
    pin_name: str,
    expected: Expected | None = None,
    algorithms: Iterable[Algorithm] = (),
    advance: Advance | None = None,
) -> str:
    """Move a file into the store: its name goes, its bytes are pinned; undo brings it back."""
    st = os.lstat(path)
    refuse_unsuitable(path, st)
    is_journaled = False
    # A file with a second name is copied: its other name must not become read-only.
    is_blob = volume.is_here(st) and volume.index.blob_by_inode(st.st_ino) is not None
    if is_blob or (volume.is_here(st) and st.st_nlink == 1):
        adopting = adopt_many(
            volume,
            [path],
            batch=batch,
            algorithms=algorithms,
            expected=expected,
            moving_to=pin_name,
        )
        (adoption,) = list(adopting)
        if adoption.error is not None:
            raise adoption.error
        digest = adoption.digest
        is_journaled = adoption.outcome == "adopted"
    else:
        digest = put_copy(volume, path, expected=expected, algorithms=algorithms, advance=advance)
    with journaled_pin(batch, digest, pin_name, pinned=True):
        own(volume, pin(pin_name), [digest])
    reached("move in: pinned")
    if not is_journaled:
        _journal_move(volume, Change.before("move", path, digest, st, kind=pin_name), batch)
    now = os.lstat(path)
    if not os.path.samestat(now, st) or (now.st_size, now.st_mtime_ns) != (
        st.st_size,
        st.st_mtime_ns,
    ):
        raise FileChangedError(
            f"{path} changed; it stays, and the store has its former bytes", path=path
        )
    with own_unlink(volume, digest):
        os.unlink(path)
        reached("move in: name removed")
        volume.index.drop_link(path)
    return digest


def _journal_move(volume: Volume, change: Change, batch: Batch) -> None:
    """Journal a move, with the mode the file had before it was adopted, if it was.

    A move that was killed before the name went is in the journal already and just goes on.
    """
    for earlier in reversed(volume.journal.open_changes()):
        if (earlier.path, earlier.digest, earlier.inode) == (
            change.path,
            change.digest,
            change.inode,
        ):
            if earlier.op == "move":
                return
            if earlier.op == "adopt":
                change.mode = earlier.mode
                break
    batch.begin([change])
    batch.end(change, "done")
