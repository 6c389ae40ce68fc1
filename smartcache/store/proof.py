"""Whether a blob's bytes are what its name says: by stat where stat can vouch, by hash where not.

`checked` and `open_blob` stand between the store and everybody who wants bytes. A blob whose size,
modification time or inode is not the recorded one, or whose change time moved though its links did
not, is hashed again before it is used. One that got or lost links stays usable (other programs link
and unlink all the time) and is hashed again by the next `verify`. A wrong one goes to `bad/`, by
inode, so that a good file that took its name meanwhile is never the one that goes; so does what is
not a regular file.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO

from smartcache.errors import (
    BlobNotFoundError,
    DamagedBlobError,
    FileChangedError,
    LeaseTimeoutError,
    UnsafeFileError,
)
from smartcache.store.digest import Hasher, hash_file
from smartcache.store.faults import reached
from smartcache.store.kernel import effective_user
from smartcache.store.records import Blob, Trust
from smartcache.store.safety import open_own
from smartcache.store.schema import signed
from smartcache.store.statkey import StatKey, judge
from smartcache.store.volume import Volume

_log = logging.getLogger(__name__)
CHUNK = 1 << 20
_TOUCH_SECONDS = 3600

Advance = Callable[[int], None]


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
            is_proven = proven is not None and is_as_recorded(proven, st)
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
    if blob is None or needs_hash(volume, blob, st):
        return None
    is_relinked = judge(recorded=blob.key, recorded_links=blob.links, current=st) == "relinked"
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
    if volume.index.blob(digest) is None:
        return BlobNotFoundError(f"No blob {digest} in {volume.root}", digest=digest)
    message = f"Blob {digest} is gone from {volume.root}, but the index still lists it"
    return BlobNotFoundError(message, hint="Run 'smartcache verify --repair'.", digest=digest)


def needs_hash(volume: Volume, blob: Blob, st: os.stat_result) -> bool:
    """Say whether stat cannot vouch: changed, unproven, or adopted unsynced before a reboot."""
    if blob.trust >= Trust.UNPROVEN or blob.unsynced not in (None, volume.boot):
        return True
    return not is_as_recorded(blob, st)


def is_as_recorded(blob: Blob, st: os.stat_result) -> bool:
    """Say whether a stat result shows the inode and bytes a blob had when it was last looked at."""
    if signed(st.st_ino) != blob.inode:
        return False
    return judge(recorded=blob.key, recorded_links=blob.links, current=st) != "suspect"


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


def read_chunks(descriptor: int) -> Iterator[memoryview]:
    """Read a file from its beginning through one reused buffer; the position does not move."""
    buffer = bytearray(CHUNK)
    view = memoryview(buffer)
    offset = 0
    while count := os.preadv(descriptor, [buffer], offset):
        yield view[:count]
        offset += count


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
        verdict = judge(recorded=StatKey.of(seen), recorded_links=seen.st_nlink, current=st)
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
    target = volume.layout.new_bad(digest)
    with _condemning(volume, digest):
        try:
            if not _has_same_bytes(seen, os.lstat(volume.layout.blob(digest))):
                return False
        except FileNotFoundError:
            return False
        with volume.index.write(durable=True):
            blob = volume.index.blob(digest)
            if blob is not None:
                volume.index.mark_gone(blob.id)
        reached("condemn: row marked")
        os.rename(volume.layout.blob(digest), target)
    _log.warning("blob %s is damaged; moved to %s", digest, target)
    return True


@contextmanager
def _condemning(volume: Volume, digest: str) -> Iterator[None]:
    try:
        with volume.guard("move a damaged blob away", exclusive=True):
            yield
    except LeaseTimeoutError as error:
        message = f"Blob {digest} is damaged and could not be moved away: {error}"
        raise DamagedBlobError(message, digest=digest) from error
