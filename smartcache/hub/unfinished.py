"""Which downloads were killed before they could look at everything they brought.

A download writes a note before it begins and takes it back when every file is proven. The note of
a process that is no more is found by the next download to the same place, which then proves all
files, small ones too.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
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

    def left_behind(self) -> list[str]:
        """Return the notes of downloads that ended without taking them back."""
        notes = self._index.notes(self._beginning)
        return [note for note in notes if self._leases.busy(note) is None]

    @contextmanager
    def working(self) -> Iterator[None]:
        """Have a note while the block runs; it stays behind if the block does not end well."""
        note = f"{self._beginning}{secrets.token_hex(8)}"
        with self._leases.hold(note, what="download"):
            self._index.set_note(note, "")
            yield
            self._index.set_note(note, None)

    def forget(self, notes: list[str]) -> None:
        """Take back notes, after everything they are about was proven."""
        for note in notes:
            self._index.set_note(note, None)
