"""Immutable blobs on disk, named by the digest of their bytes.

A blob is written to `tmp/`, hashed while written, made read-only and then linked to its name. So
what gets a name under `blobs/` is complete and verified: there is no state between absent and
whole. Whether it still is, when its bytes are wanted, is asked in `proof`.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from smartcache.errors import (
    BlobNotFoundError,
    DamagedBlobError,
    DigestMismatchError,
    NoSpaceError,
    SizeMismatchError,
    SmartcacheError,
    StoreError,
    StoreUnwritableError,
)
from smartcache.store.digest import Algorithm, Hasher, Hashes, check_hex, hash_file
from smartcache.store.faults import reached
from smartcache.store.kernel import preallocate, sync_directory
from smartcache.store.locks import Claim
from smartcache.store.proof import Advance, needs_hash, prove
from smartcache.store.records import Blob, Trust
from smartcache.store.statkey import RACY_NS
from smartcache.store.volume import Volume

READ_ONLY = 0o444
_FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}

Expected = Mapping[Algorithm, str]


def put_stream(  # noqa: PLR0913 - what a blob can be made of
    volume: Volume,
    chunks: Iterable[bytes | bytearray | memoryview],
    *,
    size: int | None = None,
    expected: Expected | None = None,
    algorithms: Iterable[Algorithm] = (),
    mtime_ns: int | None = None,
    mode: int = READ_ONLY,
    advance: Advance | None = None,
    durable: bool = True,
) -> Blob:
    """Write a stream into the store; return the blob. Nothing becomes a blob unless it checks.

    One that is not `durable` is hashed again before it is used after the next start of the machine:
    for bytes that can be had again.
    """
    announced = {name: check_hex(name, value) for name, value in (expected or {}).items()}
    wanted = tuple(dict.fromkeys(("blake3", *announced, *algorithms)))
    with writing(volume) as tmp:
        hashes = _write(tmp, chunks, size=size, wanted=wanted, advance=advance)
        check_expected(hashes, announced, what="The stream")
        settle(tmp.fd, mtime_ns, mode, durable=durable)
        return commit(volume, tmp.path, hashes, unsynced=not durable)


@contextmanager
def writing(volume: Volume) -> Iterator[Claim]:
    """Give a claimed file in `tmp/`, removed at the end; full disks and denials are explained."""
    with explained(volume.root):
        tmp = volume.new_tmp()
        reached("put: tmp made")
        try:
            yield tmp
        finally:
            tmp.release(remove=True)


@contextmanager
def explained(where: str | Path) -> Iterator[None]:
    """Turn the OS errors that a user can do something about into errors with a hint."""
    try:
        yield
    except SmartcacheError:
        raise
    except OSError as error:
        if error.errno in _FULL:
            message = f"No space left on the filesystem of {where}; nothing was changed"
            raise NoSpaceError(message, path=where) from error
        if error.errno in _DENIED:
            name = error.filename if error.filename is not None else where
            raise StoreUnwritableError(
                f"Cannot write {name}: {error.strerror}", path=where
            ) from error
        raise


def settle(
    descriptor: int, mtime_ns: int | None, mode: int = READ_ONLY, *, durable: bool = True
) -> None:
    """Make a finished tmp file read-only and durable, with a time that no later write can share.

    Of `mode`, the mode of the file that was copied, only the right to read is kept.

    A write within one clock tick of the recorded mtime would leave the stat key unchanged. So the
    time is set into the past, unless the caller gives one that is old enough.
    """
    os.fchmod(descriptor, mode & READ_ONLY | stat.S_IRUSR)
    latest = time.time_ns() - 2 * RACY_NS
    stamp = latest if mtime_ns is None else min(mtime_ns, latest)
    os.utime(descriptor, ns=(stamp, stamp))
    if durable:
        os.fsync(descriptor)
    reached("put: synced")


def check_expected(hashes: Hashes, expected: Expected, *, what: str) -> None:
    """Raise unless every announced hash is the one that was computed."""
    for name, value in expected.items():
        found = hashes.values[name]
        if found != value:
            message = f"{what} has {name} {found}, but {value} was announced"
            raise DigestMismatchError(message, algorithm=name, expected=value, found=found)


def commit(
    volume: Volume,
    source: Path,
    hashes: Hashes,
    *,
    consume: bool = True,
    unsynced: bool = False,
) -> Blob:
    """Give finished, read-only bytes their name under `blobs/` and a row; the first to come wins.

    `consume` removes the name `source` before the row is written, so that the row counts the links
    that remain.

    Holds the store's lock shared from the link to the row, so that `prune` never sees one without
    the other.
    """
    try:
        return _commit(
            volume, source, hashes, consume=consume, boot=volume.boot if unsynced else None
        )
    except (StoreError, OSError):
        _take_back(volume, hashes.digest)
        raise


def _commit(
    volume: Volume, source: Path, hashes: Hashes, *, consume: bool, boot: str | None
) -> Blob:
    digest = hashes.digest
    target = volume.layout.blob(digest)
    is_proven = False
    while True:
        with volume.guard("put"):
            is_new = _link_into_place(volume, source, target, digest)
            reached("put: linked")
            if is_new and consume:
                os.unlink(source)
            st = os.lstat(target)
            blob = volume.index.blob(digest)
            is_known = blob is not None and not needs_hash(volume, blob, st)
            if is_new or is_known or is_proven:
                sync_directory(Path(os.path.dirname(target)))
                reached("put: directory synced")
                return _record(volume, blob, st, hashes, is_new=is_new, boot=boot)
        # A file without a row, or that stat cannot vouch for: prove it, or ours takes its name.
        try:
            prove(volume, digest)
            is_proven = True
        except BlobNotFoundError:
            continue
        except DamagedBlobError:
            if os.path.lexists(target):
                raise


def _take_back(volume: Volume, digest: str) -> None:
    """Remove a blob whose row could not be written: on a full disk it would be bytes unseen."""
    with suppress(StoreError, OSError), volume.guard("take a blob back", exclusive=True):
        blob = volume.index.blob(digest)
        if blob is None or not blob.is_here:
            os.unlink(volume.layout.blob(digest))


def _link_into_place(volume: Volume, source: Path, target: str, digest: str) -> bool:
    try:
        os.link(source, target)
    except FileExistsError:
        return False
    except FileNotFoundError:
        volume.layout.make_blob_directory(digest)
        return _link_into_place(volume, source, target, digest)
    return True


def _record(
    volume: Volume,
    blob: Blob | None,
    st: os.stat_result,
    hashes: Hashes,
    *,
    is_new: bool,
    boot: str | None,
) -> Blob:
    index = volume.index
    with index.write():
        if is_new or blob is None:
            trust = Trust.VERIFIED
            index.add_blob(hashes.digest, st, trust=trust, unsynced=boot, aliases=hashes.values)
        else:
            index.add_aliases(blob.id, hashes.values)
            index.touch(blob.id)
    reached("put: row written")
    found = index.blob(hashes.digest)
    if found is None:
        raise BlobNotFoundError(f"Blob {hashes.digest} was removed while it was added")
    return found


def _write(
    tmp: Claim,
    chunks: Iterable[bytes | bytearray | memoryview],
    *,
    size: int | None,
    wanted: tuple[Algorithm, ...],
    advance: Advance | None,
) -> Hashes:
    if size:
        preallocate(tmp.fd, size)
    hasher = Hasher(wanted, size=size)
    written = 0
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        hasher.update(view)
        written += len(view)
        if size is not None and written > size:
            break
        while view:
            view = view[os.write(tmp.fd, view) :]
        if advance is not None:
            advance(len(chunk))
    reached("put: written")
    if size is not None and written != size:
        more = "more than " if written > size else ""
        message = f"{size} bytes were announced, but {more}{min(written, size)} arrived"
        raise SizeMismatchError(message, expected=size, found=written)
    hashes = hasher.finish()
    if hasher.needs_file:
        late, _ = hash_file(tmp.path, hasher.needs_file)
        hashes = Hashes(size=hashes.size, values={**hashes.values, **late.values})
    return hashes
