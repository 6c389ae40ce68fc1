"""What a library brings from other repos while it loads from one.

An adapter names its base model, a pipeline a connected one, a checkpoint the repo of its configs.
Nothing is lent for those, but what comes from them is proven like everything else.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from smartcache.hub import tree
from smartcache.hub.proving import prove_pointer
from smartcache.hub.records import Repo
from smartcache.hub.snapshot import Snapshot
from smartcache.hub.targets import CacheTarget
from smartcache.store import Store

_COARSE = 100_000_000
"""Nanoseconds by which the clock of a filesystem may be behind."""


class Neighbours:
    """Watches the other repos of an HF cache from the moment it is made."""

    def __init__(self, store: Store, cache_dir: Path, besides: Repo) -> None:
        self._store = store
        self._cache_dir = cache_dir
        self._besides = besides
        self._since = time.time_ns() - _COARSE
        self._before = self._look()

    def prove(self) -> None:
        """Prove what has come to them since; wrong bytes are set aside, and raised."""
        for repo, changed_at in self._look().items():
            folder = self._cache_dir / repo.folder_name
            is_attended = self._store.key_locks.busy(key_of_repo(folder)) is not None
            if changed_at == self._before.get(repo) or is_attended:
                continue
            names = self._new_names(folder)
            for commit in tree.commits_of(folder) if names else ():
                target = CacheTarget(cache_dir=self._cache_dir, repo=repo, commit=commit)
                for name, blob in Snapshot(self._store, target).names().items():
                    if blob in names:
                        prove_pointer(self._store, target, name, blob)

    def _look(self) -> dict[Repo, int]:
        """Return when names last came to the blobs of each repo, or went."""
        found: dict[Repo, int] = {}
        for repo, folder in tree.repos_in(self._cache_dir):
            if repo != self._besides:
                try:
                    found[repo] = os.stat(folder / "blobs").st_mtime_ns
                except OSError:
                    continue
        return found

    def _new_names(self, folder: Path) -> set[str]:
        with os.scandir(folder / "blobs") as entries:
            return {
                entry.name
                for entry in entries
                if entry.is_file() and entry.stat().st_ctime_ns >= self._since
            }


def key_of_repo(folder: Path) -> str:
    """Return the key that one process at a time holds to lend to a repo."""
    return f"lend:{folder}"
