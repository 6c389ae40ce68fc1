"""What is known of files without reading them: their hashes, while stat vouches for the bytes.

A file whose inode is a blob has the blob's hashes as long as the blob may be used unread; that
somebody else made or removed a link does not matter. Of other files a memo is believed, if valid.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from smartcache.store.digest import Algorithm
from smartcache.store.memos import recall_all
from smartcache.store.proof import needs_hash
from smartcache.store.schema import signed
from smartcache.store.volume import Volume


def known_hashes(volume: Volume, paths: Iterable[Path]) -> dict[Path, dict[Algorithm, str]]:
    """Return the known hashes of files, symlinks followed; files that are not there are left out.

    Nothing known: an empty dictionary.
    """
    files: list[tuple[Path, os.stat_result]] = []
    for path in paths:
        try:
            files.append((path, os.stat(path)))
        except OSError:
            continue
    here = [st.st_ino for _, st in files if volume.is_here(st)]
    blobs = volume.index.blobs_in(here) if here else {}
    aliases = volume.index.aliases_in(blob.id for blob in blobs.values()) if blobs else {}
    known: dict[Path, dict[Algorithm, str]] = {}
    others: list[tuple[Path, os.stat_result]] = []
    for path, st in files:
        blob = blobs.get(signed(st.st_ino)) if volume.is_here(st) else None
        if blob is not None and blob.is_here and not needs_hash(volume, blob, st):
            known[path] = {**aliases.get(blob.id, {}), "blake3": blob.digest}
        else:
            others.append((path, st))
    known.update(recall_all(volume, others))
    return known
