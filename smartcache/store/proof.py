"""Whether a blob's bytes are what its name says: by stat where stat can vouch, by hash where not.

`checked` and `open_blob` stand between the store and everybody who wants bytes. A blob whose stat
key is not the recorded one is hashed again before it is used; a wrong one goes to `bad/`, by inode,
so that a good file that took its name meanwhile is never the one that goes.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import BinaryIO

from smartcache.errors import BlobNotFoundError, DamagedBlobError, FileChangedError
from smartcache.store.digest import Hasher, hash_file
from smartcache.store.faults import reached
from smartcache.store.records import Blob, Trust
from smartcache.store.schema import signed
from smartcache.store.statkey import StatKey, judge
from smartcache.store.volume import Volume

_log = logging.getLogger(__name__)
CHUNK = 1 << 20
_TOUCH_SECONDS = 3600

Advance = Callable[[int], None]


def checked(volume: Volume, digest: str) -> Blob:
    """Return a blob whose bytes may be used now: its stat vouches for it, or it was just hashed."""
    blob = volume.index.blob(digest)
    path = volume.layout.blob(digest)
    try:
        st = os.stat(path)
    except FileNotFoundError as error:
        if blob is None:
            raise BlobNotFoundError(f"No blob {digest} in {volume.root}", digest=digest) from error
        message = f"Blob {digest} is gone from {volume.root}, though the index has it"
        hint = "Run 'smartcache verify --repair'."
        raise BlobNotFoundError(message, hint=hint, digest=digest) from error
    if blob is None or needs_hash(volume, blob, st):
        return prove(volume, digest)
    if judge(recorded=blob.key, recorded_links=blob.links, current=st) == "relinked":
        volume.index.refresh(blob.id, st, Trust.RELINKED)
    if time.time() - blob.used_at.timestamp() > _TOUCH_SECONDS:
        volume.index.touch(blob.id)
    return blob


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
            found, seen = _hash_blob(path, volume.settings.threads, advance)
        except FileNotFoundError as error:
            raise BlobNotFoundError(f"No blob {digest} in {volume.root}", digest=digest) from error
        if found == digest:
            blob = _renew_proven(volume, digest, seen, started)
            if blob is not None:
                return blob
        elif condemn(volume, digest, seen):
            message = f"Blob {digest} is damaged; it was moved to {volume.layout.bad}"
            raise DamagedBlobError(message, digest=digest)
        # Another file has taken its place meanwhile: look at that one.


def _hash_blob(path: str, threads: int, advance: Advance | None) -> tuple[str, os.stat_result]:
    """Return the digest of a blob's bytes and its stat; links made meanwhile do not matter."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        before = os.fstat(descriptor)
        try:
            found = hash_file(descriptor, threads=threads, advance=advance)[0].digest
        except FileChangedError:
            hasher = Hasher(("blake3",))
            for chunk in read_chunks(descriptor):
                hasher.update(chunk)
            found = hasher.finish().digest
        after = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if not _has_same_bytes(before, after):
        raise FileChangedError(f"Blob {path} is being written to", path=path)
    return found, after


def _has_same_bytes(one: os.stat_result, other: os.stat_result) -> bool:
    """Say whether two looks at an inode differ in nothing but links."""
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


def _renew_proven(volume: Volume, digest: str, seen: os.stat_result, started: int) -> Blob | None:
    """Write the row of a blob that was just hashed; None if another file is at its name now."""
    path = volume.layout.blob(digest)
    with volume.guard("verify"), volume.index.write():
        try:
            st = os.stat(path)
        except FileNotFoundError as error:
            raise BlobNotFoundError(f"No blob {digest} in {volume.root}", digest=digest) from error
        if not _has_same_bytes(seen, st):
            return None
        if st.st_mode & 0o222:
            os.chmod(path, st.st_mode & 0o7555)
            st = os.stat(path)
        is_young = StatKey(st.st_size, st.st_mtime_ns, 0).is_racy(started)
        trust = Trust.UNPROVEN if is_young else Trust.VERIFIED
        blob = volume.index.blob(digest)
        if blob is None:
            volume.index.add_blob(digest, st, trust=trust)
        else:
            volume.index.refresh(blob.id, st, trust, synced=True)
        return volume.index.blob(digest)


def condemn(volume: Volume, digest: str, seen: os.stat_result) -> bool:
    """Move a damaged blob to `bad/`; its row stays, marked as lost, until the bytes come back.

    False, and nothing done, if the name stands for another file than the one that was `seen`.
    Files outside that share the damaged inode are left alone.
    """
    target = volume.layout.new_bad(digest)
    with volume.guard("move a damaged blob away", exclusive=True):
        try:
            if not _has_same_bytes(seen, os.stat(volume.layout.blob(digest))):
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


def open_blob(volume: Volume, digest: str) -> BinaryIO:
    """Open a blob for reading, after making sure that it is what its name says."""
    while True:
        blob = checked(volume, digest)
        try:
            file = open(volume.layout.blob(digest), "rb")  # noqa: SIM115 - the caller closes it
        except FileNotFoundError:
            continue  # pruned in this moment: `checked` says so
        st = os.fstat(file.fileno())
        if is_as_recorded(blob, st):
            return file
        # It changed between the check and the open: look again.
        file.close()
