"""Which downloads were killed before they could look at everything they brought.

A download writes a note of the files it is going to bring, and takes it back when they are proven.
The note of a process that is no more is found by the next download to the same place, which proves
those files, small ones too, and no others: what was there before may be edited, or somebody else's.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from blake3 import blake3

from smartcache.store.store import Store


class Unfinished:
    """The notes about downloads to one place."""

    def __init__(self, store: Store, root: Path) -> None:
        self._index = store.volume.index
        self._leases = store.leases
        self._beginning = f"download:{blake3(os.fsencode(root)).hexdigest()[:32]}:"

    def left_behind(self) -> dict[str, dict[str, str]]:
        """Return the notes of downloads that ended without taking them back.

        Of each the files it was to bring, and the hashes announced for them.
        """
        keys = self._index.notes(self._beginning)
        dead = [key for key in keys if self._leases.busy(key) is None]
        return {key: _files(self._index.note(key)) for key in dead}

    @contextmanager
    def working(self, files: Mapping[str, str]) -> Iterator[None]:
        """Have a note while the block brings files; it stays behind if that does not end well."""
        key = f"{self._beginning}{secrets.token_hex(8)}"
        with self._leases.hold(key, what="download"):
            self._index.set_note(key, json.dumps(dict(files), separators=(",", ":")))
            yield
            self._index.set_note(key, None)

    def forget(self, keys: Iterable[str]) -> None:
        """Take back notes, after everything they are about was proven."""
        for key in keys:
            self._index.set_note(key, None)


def _files(note: str | None) -> dict[str, str]:
    try:
        found = json.loads(note or "{}")
    except ValueError:
        return {}
    return {str(path): str(etag) for path, etag in found.items()} if isinstance(found, dict) else {}
