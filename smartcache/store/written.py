"""Notice that somebody wrote into blobs through links to them, before others are given the bytes.

The mode of a blob keeps ordinary users from that, root ignores it. A write changes the stat of the
inode: what stat does not vouch for is hashed again, and a wrong blob goes to `bad/`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from smartcache.errors import BlobNotFoundError, DamagedBlobError, FileChangedError
from smartcache.store.links import LINKED_SUFFIXES
from smartcache.store.proof import needs_hash, prove
from smartcache.store.schema import signed
from smartcache.store.store import Store
from smartcache.store.volume import Volume

_log = logging.getLogger(__name__)


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
        if not blob.is_here or not needs_hash(volume, blob, files[0][1]):
            continue
        try:
            prove(volume, blob.digest)
        except (DamagedBlobError, BlobNotFoundError, FileChangedError):
            written += [path for path, _ in files]
    return written


def look_for_damage(store: Store, folder: Path) -> list[Path]:
    """Return the weight files in a folder, or one below, that were written to through a link.

    A file is looked at itself.
    """
    paths = (
        [folder]
        if folder.is_file()
        else [
            Path(directory, name)
            for directory, _, names in _two_levels(folder)
            for name in names
            if os.path.splitext(name)[1].lower() in LINKED_SUFFIXES
        ]
    )
    written = [path for each in store.stores() for path in written_through(each.volume, paths)]
    for path in written:
        _log.warning("%s was written to through a link; its blob was set aside", path)
    return written


def _two_levels(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    for directory, below, names in os.walk(folder):
        if directory != os.fspath(folder):
            below.clear()
        yield directory, below, names
