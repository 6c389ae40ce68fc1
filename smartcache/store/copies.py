"""Copies of a blob's bytes, hashed while they are made: wrong bytes are never handed on."""

from __future__ import annotations

import os
from typing import BinaryIO, Literal

from smartcache.errors import FileChangedError
from smartcache.store.blobs import settle, writing
from smartcache.store.digest import Hasher
from smartcache.store.faults import reached
from smartcache.store.proof import CHUNK, Advance, open_blob, prove
from smartcache.store.records import Trust
from smartcache.store.volume import Volume


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


def rotate(volume: Volume, digest: str) -> None:
    """Give a blob a fresh inode: the old one has all the links it can have (ext4: 65,000)."""
    with volume.leases.hold(f"rotate:{digest}", what="copy a blob that has too many links"):
        target = volume.layout.blob(digest)
        full = os.stat(target)
        with writing(volume) as tmp:
            copy_verified(volume, digest, tmp.fd)
            settle(tmp.fd, full.st_mtime_ns)
            os.fchmod(tmp.fd, full.st_mode & 0o7555)
            reached("rotate: copied")
            with volume.guard("rotate"), volume.index.write():
                blob = volume.index.blob(digest)
                if blob is not None and os.stat(target).st_ino == full.st_ino:
                    os.rename(tmp.path, target)
                    reached("rotate: renamed")
                    volume.index.refresh(blob.id, os.stat(target), Trust.VERIFIED, synced=True)
