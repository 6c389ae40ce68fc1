"""{sha256: path} of everything known: blobs, and files whose hash is remembered.

A path is given only while its bytes are vouched for: a blob's by the store, another file's by its
stat key, looked at in the moment of asking. The mapping holds no rows: each question is one look
into the index, and going through it is a stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from smartcache.errors import BlobNotFoundError, DamagedBlobError, FileSkippedError
from smartcache.store.blobs import checked
from smartcache.store.store import Store
from smartcache.system.hashing import is_digest


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
        for pool in self._store.pools() if is_digest(key) else ():
            blob = self._store.find("sha256", key, pool=pool)
            if blob is not None:
                with suppress(BlobNotFoundError, DamagedBlobError, FileSkippedError):
                    checked(self._store, pool, blob.digest)
                    return blob.path
        for file in self._store.catalog.files(sha256=key) if is_digest(key) else ():
            known = self._store.known_hashes([file.path]).get(file.path, {})
            if known.get("sha256") == key and not file.path.is_symlink():
                return file.path
        raise KeyError(sha256)

    def __iter__(self) -> Iterator[str]:
        """Go through the hashes in their order."""
        known = (sha256 for sha256, _ in self._store.catalog.digests_by_sha256())
        return (key for key in known if key in self)

    def __len__(self) -> int:
        """Count what is vouched for now: it looks at every file."""
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        """Return the class and the store."""
        return f"{type(self).__name__}({self._store!r})"
