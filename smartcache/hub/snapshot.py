"""The files of a snapshot in an HF cache as they are now, and which of them are not proven.

A loading looks at thousands of pointers: plain text, and no more system calls than it takes.
"""

from __future__ import annotations

import os

from smartcache.hub.plan import near_store
from smartcache.hub.records import RemoteFile, is_edited
from smartcache.hub.targets import CacheTarget
from smartcache.store import LINKED_SUFFIXES, Store


class Snapshot:
    """A snapshot of a repo."""

    def __init__(self, store: Store, target: CacheTarget) -> None:
        self._near = near_store(store, target.root) or store
        self.root = os.path.join(target.root, "")

    def names(self) -> dict[str, str]:
        """Return all files: path -> the name of the blob; "" where there are no symlinks."""
        return {path[len(self.root) :]: _blob_name(path) for path in self._paths()}

    def weights(self) -> dict[str, str]:
        """Return the weight files that are visible, of any size: path -> the name of the blob."""
        found: dict[str, str] = {}
        for path in self._paths():
            name = path[len(self.root) :]
            if is_edited(name):
                continue
            blob = _blob_name(path)
            is_lfs = RemoteFile(path=name, size=None, etag=blob).is_lfs
            if (is_lfs or _is_weight_name(name)) and os.path.isfile(path):
                found[name] = blob
        return found

    def unproven(self, files: dict[str, str]) -> dict[str, str]:
        """Return those that are not known to have the bytes that go by this name."""
        paths = {name: self.root + name for name in files}
        known = {str(path): each for path, each in self._near.known_hashes(paths.values()).items()}
        return {
            name: etag
            for name, etag in files.items()
            if etag not in known.get(paths[name], {}).values()
        }

    def _paths(self) -> list[str]:
        return [
            os.path.join(directory, name)
            for directory, _, names in os.walk(self.root)
            for name in names
        ]


def _is_weight_name(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in LINKED_SUFFIXES


def used_names(folder: str | os.PathLike[str]) -> set[str]:
    """Return the names of the blobs that any snapshot of a repo folder points at."""
    found: set[str] = set()
    for directory, _, names in os.walk(os.path.join(folder, "snapshots")):
        found.update(_blob_name(os.path.join(directory, name)) for name in names)
    return found - {""}


def _blob_name(pointer: str) -> str:
    try:
        return os.path.basename(os.readlink(pointer))
    except OSError:
        return ""
