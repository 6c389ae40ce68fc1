"""{sha256: path} of everything known: blobs of all volumes, and files whose hash is remembered.

A path is given only while its bytes are vouched for: a blob's by the store, another file's by its
stat key, looked at in the moment of asking. The mapping holds no rows: each question is one look
into the index, and going through it is a stream.
"""

from __future__ import annotations

import heapq
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import groupby
from pathlib import Path

from smartcache.errors import DamagedBlobError, FileSkippedError
from smartcache.store.records import RememberedFile
from smartcache.store.store import Store
from smartcache.system.filesystems import filesystem_id
from smartcache.system.hashing import is_digest
from smartcache.system.kernel import StatKey
from smartcache.system.sqlite import signed


class CacheMapping(Mapping[str, Path]):
    """The file for a sha256. Read-only; what comes and goes in the store is seen at once.

    A blob that stat cannot vouch for is hashed when its key comes up, once; a damaged one, and a
    file that has changed since it was hashed, is not there.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getitem__(self, sha256: str) -> Path:
        """Return the path of a file with this hash, in hex of either case."""
        key = str(sha256).lower()
        for store in self._store.stores() if is_digest(key) else ():
            blob = store.volume.index.blob_by_hash("sha256", key)
            if blob is not None:
                with suppress(DamagedBlobError, FileSkippedError, FileNotFoundError):
                    return store.path_of(blob.digest)
        for file in self._store.catalog.files_with_sha256(key) if is_digest(key) else ():
            if _is_unchanged(file):
                return file.path
        raise KeyError(sha256)

    def __iter__(self) -> Iterator[str]:
        """Go through the hashes in their order."""
        indexes = [each.volume.index for each in self._store.stores()]
        blobs = ((sha256 for sha256, _ in index.digests_by_sha256()) for index in indexes)
        files = (file.sha256 for file in self._store.catalog.files_by_sha256())
        return (key for key, _ in groupby(heapq.merge(*blobs, files)) if key in self)

    def __len__(self) -> int:
        """Count what is vouched for now: it looks at every file."""
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        """Return the class and the store."""
        return f"{type(self).__name__}({self._store!r})"


def _is_unchanged(file: RememberedFile) -> bool:
    """Say whether a file is the very one that was hashed, and as it was."""
    try:
        st = os.lstat(file.path)
        return (
            stat.S_ISREG(st.st_mode)
            and StatKey.of(st) == file.key
            and signed(st.st_ino) == file.inode
            and filesystem_id(file.path, st) == file.filesystem
        )
    except OSError:
        return False
