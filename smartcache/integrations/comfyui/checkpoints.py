"""Model files by what they are: found by a hash, the beginning of one, or a name.

A workflow that names a checkpoint by its hash works on every machine whose store knows the file,
whatever it is called there and in which program's folder it lies. A path is given only while its
bytes are vouched for: that of a blob by the store, another file's by its stat key.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from smartcache.cache import SmartCache
from smartcache.errors import (
    BadDigestError,
    BlobNotFoundError,
    DamagedBlobError,
    FileSkippedError,
    StoreError,
)
from smartcache.sizes import format_size
from smartcache.store.store import Store

_log = logging.getLogger(__name__)
_HASH = re.compile(r"(?:(sha256|blake3):)?([0-9a-fA-F]{8,64})")
SUFFIXES = (".safetensors", ".sft", ".ckpt", ".pt", ".pt2", ".pth", ".bin")
"""By which ComfyUI tells how to read a file."""


def find_checkpoint(text: str, room: str | Path) -> Path:
    """Return a file that the store knows, by sha256, BLAKE3, the beginning of one, or its name.

    A blob that no program has under a name that ends as ComfyUI needs it gets a symlink in `room`.
    BlobNotFoundError if there is none; BadDigestError if the text is true of several contents.
    """
    text = text.strip()
    with SmartCache() as cache:
        store = cache.store
        found: dict[str, Path] = {}
        if match := _HASH.fullmatch(text):
            found = dict(_with_hash(cache, match[1], match[2].lower()))
            if not found and match[1] != "blake3" and _hash_the_rest(store):
                found = dict(_with_hash(cache, match[1], match[2].lower()))
        if not found and not (match and match[1]):
            found = dict(_with_name(cache, text))
        if not found:
            hint = "'smartcache add FILE' makes the store know a file; 'smartcache ls' shows them."
            raise BlobNotFoundError(f"The store knows no file {text!r}", hint=hint)
        if len(found) > 1:
            hint = f"Give more of the hash: {', '.join(sorted(found))}."
            message = f"{text!r} is true of {len(found)} different files"
            raise BadDigestError(message, hint=hint, matches=sorted(found))
        ((_, path),) = found.items()
        return path if path.suffix.lower() in SUFFIXES else _named(store, path, Path(room))


def _with_hash(cache: SmartCache, algorithm: str | None, start: str) -> Iterator[tuple[str, Path]]:
    """Go through what has a hash that begins so, by its digest, or its sha256."""
    store = cache.store
    mapping = cache.cache_mapping()
    if algorithm != "sha256":
        for digest in {digest for pool in store.pools() for digest in pool.digests(start)}:
            with suppress(BlobNotFoundError, DamagedBlobError, FileSkippedError):
                yield digest, store.path_of(digest)
    if algorithm != "blake3":
        for sha256, digest in store.catalog.digests_by_sha256():
            if sha256.startswith(start):
                with suppress(KeyError):
                    yield digest, mapping[sha256]


def _hash_the_rest(store: Store) -> int:
    """Compute the sha256 of all blobs that have none yet; return how many. They are remembered."""
    count = 0
    unknown = [blob for blob in store.blobs() if "sha256" not in store.hashes_of(blob.digest)]
    if unknown:
        size = format_size(sum(blob.size for blob in unknown))
        _log.warning("Computing the SHA-256 of %s in the store, once", size)
    for blob in unknown:
        with suppress(BlobNotFoundError, DamagedBlobError, FileSkippedError):
            found = store.digest_of(store.path_of(blob.digest), ("sha256",)).get("sha256")
            if found is not None:
                store.catalog.add_hashes([(blob.digest, {"sha256": found})])
                count += 1
    return count


def _with_name(cache: SmartCache, name: str) -> Iterator[tuple[str, Path]]:
    """Go through what a program has under a file name."""
    mapping = cache.cache_mapping()
    store = cache.store
    for blob in store.blobs():
        if any(path.name == name for path in store.names_of(blob.digest)):
            with suppress(BlobNotFoundError, DamagedBlobError, FileSkippedError):
                yield blob.digest, store.path_of(blob.digest)
    for file in store.catalog.files(sha256=""):
        if file.path.name == name:
            with suppress(KeyError):
                yield file.digest, mapping[file.sha256]


def _named(store: Store, blob: Path, room: Path) -> Path:
    """Return a blob under a name that ComfyUI can read: a link of the user's, else a symlink."""
    with suppress(BadDigestError, BlobNotFoundError):  # it may be a file outside the store
        for path in store.names_of(blob.name):
            with suppress(OSError):
                if path.suffix.lower() in SUFFIXES and path.samefile(blob):
                    return path
    with open(blob, "rb") as file:
        is_safetensors = file.read(9)[8:] == b"{"
    room.mkdir(parents=True, exist_ok=True)
    target = room / f"{blob.name}{'.safetensors' if is_safetensors else '.ckpt'}"
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.symlink_to(blob)
        temporary.replace(target)
    except OSError as error:
        message = f"{room} takes no symlink: {error.strerror}"
        hint = f"Put the file there yourself: smartcache link {blob.name[:12]} PATH."
        raise StoreError(message, hint=hint) from error
    return target
