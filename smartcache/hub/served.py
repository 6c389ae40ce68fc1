"""Which snapshots are known to have everything a library wants for one purpose.

A library that was served once by a snapshot finds everything there again: nothing need be lent,
and many processes may load at once. That holds while every weight file is there, unchanged.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from blake3 import blake3

from smartcache.hub.records import is_edited
from smartcache.hub.snapshot import Snapshot
from smartcache.hub.targets import CacheTarget
from smartcache.store import Store


class Listed:
    """What the Hub listed of the weights of a snapshot, for the time when it cannot be asked.

    huggingface_hub remembers listings only where whole snapshots are downloaded.
    """

    def __init__(self, store: Store, target: CacheTarget) -> None:
        self._index = store.volume.index
        self._key = f"listed:{blake3(os.fsencode(target.root)).hexdigest()[:32]}"

    def etags(self) -> dict[str, str]:
        """Return path -> hash, as far as it is remembered."""
        try:
            said = json.loads(self._index.note(self._key) or "{}")
            return {str(name): str(etag) for name, etag in said.items()}
        except (ValueError, AttributeError):
            return {}

    def remember(self, etags: Mapping[str, str]) -> None:
        """Remember a listing, if it is not yet."""
        if self._index.note(self._key) is None:
            kept = {name: etag for name, etag in etags.items() if not is_edited(name)}
            self._index.set_note(self._key, json.dumps(kept, separators=(",", ":")))


class Served:
    """The memory of one snapshot and purpose."""

    def __init__(self, store: Store, target: CacheTarget, snapshot: Snapshot, purpose: str) -> None:
        self._index = store.volume.index
        self._snapshot = snapshot
        told = os.fsencode(target.root) + b"\0" + purpose.encode("utf-8", "surrogatepass")
        self._key = f"served:{blake3(told).hexdigest()[:32]}"

    def is_whole(self) -> bool:
        """Say whether all that served once is still there, proven."""
        note = self._index.note(self._key)
        if note is None:
            return False
        try:
            wanted = {str(name): str(etag) for name, etag in json.loads(note).items()}
        except (ValueError, AttributeError):
            return False
        files = self._snapshot.weights()
        return wanted.items() <= files.items() and not self._snapshot.unproven(files)

    def remember(self) -> None:
        """Remember that the snapshot has served as it is now; not if something is unproven."""
        files = self._snapshot.weights()
        if self._snapshot.unproven(files):
            return
        note = json.dumps(files, separators=(",", ":"))
        if self._index.note(self._key) != note:
            self._index.set_note(self._key, note)
