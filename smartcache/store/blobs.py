"""Immutable blobs on disk, named by the digest of their bytes: written, believed, proven, copied.

A blob is written to `tmp/`, hashed while written, made read-only and then linked to its name. So
what gets a name under `blobs/` is complete and verified: there is no state between absent and
whole.

Whether it still is, is asked by `checked` and `open_blob`, which stand between the store and
everybody who wants bytes: what its row does not vouch for (`Blob.vouches`) is hashed before it is
used. A wrong one goes to `bad/`, by inode, so that a good file that took its name meanwhile is
never the one that goes; so does what is not a regular file. Copies are hashed while they are made:
wrong bytes are never handed on.

The row of a blob is renewed in the same transaction as our own link operation (`own_unlink`,
`renew`), and only if its bytes were as recorded right before: an edit from outside is never taken
for our doing.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Literal

from smartcache.errors import (
    BlobNotFoundError,
    DamagedBlobError,
    DigestMismatchError,
    FileChangedError,
    FileSkippedError,
    LockTimeoutError,
    NoSpaceError,
    SizeMismatchError,
    SmartcacheError,
    StoreError,
    StoreUnwritableError,
    UnsafeFileError,
)
from smartcache.store.hashes import recall
from smartcache.store.records import LINKED_SUFFIXES, Blob, Trust, judge
from smartcache.store.volume import Volume
from smartcache.system.faults import reached
from smartcache.system.filesystems import filesystem_id
from smartcache.system.hashing import Advance, Algorithm, Hasher, Hashes, check_hex, hash_file
from smartcache.system.kernel import (
    RACY_NS,
    StatKey,
    allocated_bytes,
    clone,
    effective_user,
    preallocate,
    sync_directory,
)
from smartcache.system.locks import Claim
from smartcache.system.ownfiles import open_own
from smartcache.system.sqlite import signed

CHUNK = 1 << 20
READ_ONLY = 0o444
_TOUCH_SECONDS = 3600
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_log = logging.getLogger(__name__)

Expected = Mapping[Algorithm, str]


# written


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
        seal(tmp.fd, mtime_ns, mode, durable=durable)
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


def seal(
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
    volume: Volume, source: Path, hashes: Hashes, *, consume: bool = True, unsynced: bool = False
) -> Blob:
    """Give finished, read-only bytes their name under `blobs/` and a row; the first to come wins.

    `consume` removes the name `source` before the row is written, so that the row counts the links
    that remain.

    Holds the store's lock shared from the link to the row, so that `prune` never sees one without
    the other.
    """
    digest, target = hashes.digest, volume.layout.blob(hashes.digest)
    is_proven = False
    try:
        while True:
            with volume.guard("put"):
                is_new = _link_into_place(volume, source, target, digest)
                reached("put: linked")
                if is_new and consume:
                    os.unlink(source)
                st = os.lstat(target)
                blob = volume.index.blob(digest)
                is_known = blob is not None and blob.vouches(st, volume.boot)
                if is_new or is_known or is_proven:
                    sync_directory(Path(os.path.dirname(target)))
                    reached("put: directory synced")
                    boot = volume.boot if unsynced else None
                    return _record(volume, None if is_new else blob, st, hashes, boot)
            # A file without a row, or that stat cannot vouch for: prove it, or ours takes its name.
            try:
                prove(volume, digest)
                is_proven = True
            except BlobNotFoundError:
                continue
            except DamagedBlobError:
                if os.path.lexists(target):
                    raise
    except (StoreError, OSError):
        # Without a row it would be bytes unseen, on a disk that is full.
        with suppress(StoreError, OSError), volume.guard("take a blob back", exclusive=True):
            if volume.index.blob(digest) is None:
                os.unlink(target)
        raise


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
    volume: Volume, blob: Blob | None, st: os.stat_result, hashes: Hashes, boot: str | None
) -> Blob:
    """Write the row of a new blob, or what is learned of one that was there."""
    index = volume.index
    with index.write():
        if blob is None:
            index.add_blob(hashes.digest, st, unsynced=boot, hashes=hashes.values)
        else:
            index.add_aliases(blob.digest, hashes.values)
            index.touch(blob.id)
    reached("put: row written")
    found = index.blob(hashes.digest)
    if found is None:
        raise BlobNotFoundError(f"Blob {hashes.digest} was removed while it was added")
    return found


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
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        st = os.fstat(descriptor)
        if not stat.S_ISREG(st.st_mode) or not st.st_size:
            reason = "empty" if stat.S_ISREG(st.st_mode) else "not a regular file"
            raise FileSkippedError(f"{path}: {reason}", reason=reason, path=path)
        values = recall(volume, [(path, st)])[path]
        if all(name in values for name in wanted):
            known = Hashes(size=st.st_size, values=values)
            check_expected(known, announced, what=str(path))
            with suppress(BlobNotFoundError, DamagedBlobError):
                blob = checked(volume, known.digest)
                volume.index.add_aliases(blob.digest, known.values)
                _remember_source(volume, path, st, blob.digest)
                return blob.digest
        digest = take_in(
            volume, descriptor, expected=announced, algorithms=wanted, advance=advance
        ).digest
        now = os.fstat(descriptor)
        # A blob's own inode may have got its mode back from us.
        is_blob = volume.is_here(now) and volume.index.blob_by_inode(now.st_ino) is not None
        same = 2 if is_blob else 3
        if StatKey.of(now)[:same] != StatKey.of(st)[:same]:
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

    What is hashed is the new inode, before it gets its name.
    """
    st = os.fstat(descriptor)
    wanted: tuple[Algorithm, ...] = tuple(dict.fromkeys(("blake3", *expected, *algorithms)))
    if volume.is_here(st) and volume.can_reflink:
        with writing(volume) as tmp:
            if clone(descriptor, tmp.fd):
                hashes, _ = hash_file(tmp.path, wanted, threads=volume.settings.threads)
                check_expected(hashes, expected, what="The file")
                seal(tmp.fd, st.st_mtime_ns, st.st_mode)
                return commit(volume, tmp.path, hashes)
    return put_stream(
        volume, read_chunks(descriptor), size=st.st_size, expected=expected, algorithms=wanted,
        mtime_ns=st.st_mtime_ns, mode=st.st_mode, advance=advance,
    )  # fmt: skip


def read_chunks(descriptor: int) -> Iterator[memoryview]:
    """Read a file from its beginning through one reused buffer; the position does not move."""
    buffer = bytearray(CHUNK)
    view = memoryview(buffer)
    offset = 0
    while count := os.preadv(descriptor, [buffer], offset):
        yield view[:count]
        offset += count


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


# believed, or proven


def checked(volume: Volume, digest: str) -> Blob:
    """Return a blob whose bytes may be used now: its stat vouches for it, or it was just hashed."""
    try:
        st = os.lstat(volume.layout.blob(digest))
    except FileNotFoundError as error:
        raise _absent(volume, digest) from error
    return _vouched(volume, digest, st) or prove(volume, digest)


def open_blob(volume: Volume, digest: str) -> BinaryIO:
    """Open a blob for reading; the very file that is handed out was found to be what it should."""
    proven: Blob | None = None
    while True:
        try:
            descriptor = open_own(volume.layout.blob(digest))
        except FileNotFoundError as error:
            raise _absent(volume, digest) from error
        except UnsafeFileError:
            prove(volume, digest)  # moves it away and raises, unless a blob has its place by now
            continue
        try:
            st = os.fstat(descriptor)
            is_proven = proven is not None and proven.judged(st) != "suspect"
            if is_proven or _vouched(volume, digest, st) is not None:
                file = os.fdopen(descriptor, "rb")
                descriptor = -1
                return file
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        proven = prove(volume, digest)


def _vouched(volume: Volume, digest: str, st: os.stat_result) -> Blob | None:
    """Return the blob in an inode if its stat vouches for its bytes; None: hash it."""
    blob = volume.index.blob(digest)
    if blob is None or not blob.vouches(st, volume.boot):
        return None
    is_relinked = blob.judged(st) == "relinked"
    is_touched = time.time() - blob.used > _TOUCH_SECONDS
    if is_relinked or is_touched:
        # Whoever reads does not wait for writers; the next one sees the same and records it.
        with volume.index.if_free(), volume.index.write():
            if is_relinked:
                volume.index.refresh(blob.id, st, Trust.RELINKED)
            if is_touched:
                volume.index.touch(blob.id)
    return blob


def _absent(volume: Volume, digest: str) -> BlobNotFoundError:
    if volume.index.record(digest) is None:
        return BlobNotFoundError(f"No blob {digest} in {volume.root}", digest=digest)
    message = f"Blob {digest} is gone from {volume.root}, but the index still lists it"
    return BlobNotFoundError(message, hint="Run 'smartcache verify --repair'.", digest=digest)


def prove(volume: Volume, digest: str, *, advance: Advance | None = None) -> Blob:
    """Hash a blob again: its row is renewed, or it goes to `bad/` and DamagedBlobError comes."""
    path = volume.layout.blob(digest)
    while True:
        started = time.time_ns()
        try:
            descriptor = open_own(path)
        except FileNotFoundError as error:
            raise BlobNotFoundError(f"No blob {digest} in {volume.root}", digest=digest) from error
        except UnsafeFileError:
            try:
                seen = os.lstat(path)
            except FileNotFoundError:
                continue
            if stat.S_ISREG(seen.st_mode) and seen.st_uid == effective_user():
                continue  # another file has taken its place
        else:
            try:
                seen = os.fstat(descriptor)
                if _hash_blob(descriptor, path, volume.settings.threads, advance) == digest:
                    blob = _renew_proven(volume, digest, descriptor, seen, started)
                    if blob is not None:
                        return blob
                    continue
            finally:
                os.close(descriptor)
        if condemn(volume, digest, seen):
            message = f"Blob {digest} is damaged; it was moved to {volume.layout.bad}"
            raise DamagedBlobError(message, digest=digest)


def _hash_blob(descriptor: int, path: str, threads: int, advance: Advance | None) -> str:
    """Return the digest of a blob's bytes; links made or removed meanwhile do not matter."""
    before = os.fstat(descriptor)
    try:
        found = hash_file(descriptor, threads=threads, advance=advance)[0].digest
    except FileChangedError:
        hasher = Hasher(("blake3",))
        for chunk in read_chunks(descriptor):
            hasher.update(chunk)
        found = hasher.finish().digest
    if not _has_same_bytes(before, os.fstat(descriptor)):
        raise FileChangedError(f"Blob {path} is being written to", path=path)
    return found


def _has_same_bytes(one: os.stat_result, other: os.stat_result) -> bool:
    """Say whether two looks at an inode differ in nothing but change time and links."""
    first, second = ((st.st_ino, st.st_size, st.st_mtime_ns) for st in (one, other))
    return first == second


def _renew_proven(
    volume: Volume, digest: str, descriptor: int, seen: os.stat_result, started: int
) -> Blob | None:
    """Write the row of a blob that was just hashed; None if it must be hashed once more.

    `seen` is its stat before the first byte was read. Another file may be at its name now, or what
    moved the change time since was a write behind the hash, with the time set back.
    """
    path = volume.layout.blob(digest)
    known = volume.index.blob(digest)
    if known is not None and _is_all_known(known, os.fstat(descriptor), seen, path):
        return known
    with volume.guard("verify"), volume.index.write():
        try:
            is_named = os.path.samestat(os.lstat(path), seen)
        except FileNotFoundError as error:
            raise BlobNotFoundError(f"No blob {digest} in {volume.root}", digest=digest) from error
        st = os.fstat(descriptor)
        verdict = judge(StatKey.of(seen), seen.st_nlink, st)
        if not is_named or verdict == "suspect":
            return None
        is_young = StatKey(st.st_size, st.st_mtime_ns, 0).is_racy(started)
        trust = Trust.VERIFIED if verdict == "same" else Trust.RELINKED
        trust = Trust.UNPROVEN if is_young else trust
        if st.st_mode & 0o222:
            os.fchmod(descriptor, st.st_mode & 0o7555)
            st = os.fstat(descriptor)
        blob = volume.index.blob(digest)
        if blob is None:
            volume.index.add_blob(digest, st, trust=trust)
        else:
            volume.index.refresh(blob.id, st, trust, synced=True)
        return volume.index.blob(digest)


def _is_all_known(blob: Blob, st: os.stat_result, seen: os.stat_result, path: str) -> bool:
    """Say whether a row has nothing to learn from a hash: whoever only reads waits for no lock."""
    try:
        is_named = os.path.samestat(os.lstat(path), st) and signed(st.st_ino) == blob.inode
    except FileNotFoundError:
        return False
    is_proven = blob.trust == Trust.VERIFIED and blob.unsynced is None
    is_same = StatKey.of(seen) == StatKey.of(st) == blob.key and blob.links == st.st_nlink
    return is_named and is_proven and is_same and not st.st_mode & 0o222


def condemn(volume: Volume, digest: str, seen: os.stat_result) -> bool:
    """Move a damaged blob to `bad/`; its row stays, marked as lost, until the bytes come back.

    False, and nothing done, if the name stands for another file than the one that was `seen`.
    Files outside that share the damaged inode are left alone.
    """
    source, target = volume.layout.blob(digest), volume.layout.new_bad(digest)
    try:
        with volume.guard("move a damaged blob away", exclusive=True):
            try:
                if not _has_same_bytes(seen, os.lstat(source)):
                    return False
            except FileNotFoundError:
                return False
            with volume.index.write(durable=True):
                blob = volume.index.record(digest)
                if blob is not None:
                    volume.index.mark_gone(blob.id)
            reached("condemn: row marked")
            os.rename(source, target)
    except LockTimeoutError as error:
        message = f"Blob {digest} is damaged and could not be moved away: {error}"
        raise DamagedBlobError(message, digest=digest) from error
    _log.warning("blob %s is damaged; moved to %s", digest, target)
    return True


def written_through(volume: Volume, paths: Iterable[Path]) -> list[Path]:
    """Return the files that are links to a blob and have other bytes now; they stay as they are."""
    seen: dict[int, list[tuple[Path, os.stat_result]]] = {}
    for path in paths:
        try:
            st = os.stat(path)
        except OSError:
            continue
        if volume.is_here(st):
            seen.setdefault(signed(st.st_ino), []).append((path, st))
    written: list[Path] = []
    for inode, blob in volume.index.blobs_in(list(seen)).items():
        files = seen[inode]
        if blob.vouches(files[0][1], volume.boot):
            continue
        try:
            prove(volume, blob.digest)
        except (DamagedBlobError, BlobNotFoundError, FileChangedError):
            written += [path for path, _ in files]
    return written


def look_for_damage(volumes: Iterable[Volume], folder: Path) -> list[Path]:
    """Return the weight files in a folder, or one below, that were written to through a link.

    The mode of a blob keeps ordinary users from that, root ignores it. A file is looked at itself.
    """
    paths = [folder] if folder.is_file() else []
    for directory, below, names in os.walk(folder):
        if directory != os.fspath(folder):
            below.clear()
        weights = (name for name in names if Path(name).suffix.lower() in LINKED_SUFFIXES)
        paths += [Path(directory, name) for name in weights]
    written = [path for volume in volumes for path in written_through(volume, paths)]
    for path in written:
        _log.warning("%s was written to through a link; its blob was set aside", path)
    return written


# linked and unlinked by us


def unchanged(volume: Volume, digest: str) -> tuple[Blob | None, os.stat_result | None]:
    """Return a blob and its stat if stat vouches for it now; ask inside a transaction."""
    blob = volume.index.blob(digest)
    try:
        st = os.lstat(volume.layout.blob(digest))
    except FileNotFoundError:
        return None, None
    return (None, None) if blob is None or blob.judged(st) == "suspect" else (blob, st)


@contextmanager
def own_unlink(volume: Volume, digest: str) -> Iterator[None]:
    """Remove a link of a blob inside this block: its row is renewed, if it was true before."""
    with volume.guard("unlink"), volume.index.write():
        blob, before = unchanged(volume, digest)
        yield
        if blob is not None and before is not None:
            renew(volume, blob, before)


def renew(volume: Volume, blob: Blob, before: os.stat_result, *, relinked: bool = False) -> None:
    """Renew a row after our own link operation; `before` is the stat that was found unchanged.

    `relinked`: others have linked or unlinked it meanwhile.
    """
    try:
        st = os.stat(volume.layout.blob(blob.digest))
    except FileNotFoundError:
        return
    is_relinked = relinked or blob.judged(before) == "relinked"
    trust = max(blob.trust, Trust.RELINKED) if is_relinked else blob.trust
    if StatKey.of(st)[:2] != blob.key[:2]:
        trust = Trust.UNPROVEN
    volume.index.refresh(blob.id, st, trust)


def unlink_measured(path: str | Path) -> int:
    """Remove a name; return the bytes the filesystem gives back (0 while links remain)."""
    try:
        descriptor = open_own(path)
    except FileNotFoundError:
        return 0
    except UnsafeFileError:
        with suppress(FileNotFoundError, IsADirectoryError):  # a directory stays
            os.unlink(path)
        return 0
    try:
        before = os.fstat(descriptor)
        os.unlink(path)
        return allocated_bytes(before) if os.fstat(descriptor).st_nlink == 0 else 0
    finally:
        os.close(descriptor)


# copied


def copy_hashed(
    source: BinaryIO,
    target: int,
    advance: Advance | None = None,
    *,
    algorithm: Literal["blake3", "sha256"] = "blake3",
) -> str:
    """Copy a file to a descriptor; return the digest, or sha256, of what was copied."""
    hasher = Hasher((algorithm,))
    while chunk := source.read(CHUNK):
        hasher.update(chunk)
        view = memoryview(chunk)
        while view:
            view = view[os.write(target, view) :]
        if advance is not None:
            advance(len(chunk))
    return hasher.finish().values[algorithm]


def copy_verified(
    volume: Volume, digest: str, target: int, *, advance: Advance | None = None
) -> None:
    """Copy a blob's bytes to a descriptor and hash them on the way; wrong bytes are never kept."""
    with open_blob(volume, digest) as source:
        copied = copy_hashed(source, target, advance)
    if copied != digest:
        prove(volume, digest)  # moves it away and raises, unless it was healed in this moment
        raise FileChangedError(f"Blob {digest} changed while it was copied", digest=digest)
