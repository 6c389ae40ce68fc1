"""Which downloads were killed before they could look at everything they brought.

A download writes a note of the files it is going to bring, and takes it back when they are proven.
Whoever finds the note of another proves what that has brought, small files too, and nothing else:
what was there before may be edited, or somebody else's.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from smartcache.hub import tree
from smartcache.hub.records import RemoteFile
from smartcache.hub.targets import Target
from smartcache.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What a download was, or is, going to bring: path -> hash, and which file was there before."""

    key: str
    is_live: bool
    """Its process is at work; else it has ended without taking the note back."""
    files: dict[str, tuple[str, int, int]]
    """Path -> etag, inode and time of what was there (0: nothing)."""

    def brought(self, target: Target) -> dict[str, str]:
        """Return the files that it has brought, or that came otherwise since: path -> etag."""
        return {
            path: etag
            for path, (etag, *before) in self.files.items()
            if tree.safe_parts(path) is not None
            and (now := _stamp(target, path)) != (0, 0)
            and list(now) != before
        }


class Unfinished:
    """The notes about downloads to one place."""

    def __init__(self, store: Store, root: Path) -> None:
        self._index = store.volume.index
        self._key_locks = store.key_locks
        self._beginning = f"download:{blake3(os.fsencode(root)).hexdigest()[:32]}:"

    def notes(self) -> list[Note]:
        """Return the notes of downloads that have not come to their end."""
        return [
            Note(
                key=key, is_live=self._key_locks.busy(key) is not None,
                files=_files(self._index.note(key)),
            )
            for key in self._index.notes(self._beginning)
        ]  # fmt: skip

    @contextmanager
    def working(self, target: Target, files: Iterable[RemoteFile]) -> Iterator[None]:
        """Have a note while the block brings files; it stays behind if that does not end well."""
        key = f"{self._beginning}{secrets.token_hex(8)}"
        wanted = {file.path: (file.etag, *_stamp(target, file.path)) for file in files}
        with self._key_locks.hold(key, what="download"):
            self._index.set_note(key, json.dumps(wanted, separators=(",", ":")))
            yield
            self._index.set_note(key, None)

    def forget(self, notes: Iterable[Note]) -> None:
        """Take back notes of the dead, after everything they are about was proven."""
        for note in notes:
            if not note.is_live:
                self._index.set_note(note.key, None)


def _stamp(target: Target, path: str) -> tuple[int, int]:
    """Return which file is at a path: a download always makes a new one."""
    try:
        st = os.stat(os.path.join(target.root, path))
    except OSError:
        return 0, 0
    return st.st_ino, st.st_mtime_ns


def _files(note: str | None) -> dict[str, tuple[str, int, int]]:
    try:
        found = json.loads(note or "{}")
        return {
            str(path): (str(etag), int(inode), int(mtime_ns))
            for path, (etag, inode, mtime_ns) in found.items()
        }
    except (ValueError, TypeError, AttributeError):
        return {}
