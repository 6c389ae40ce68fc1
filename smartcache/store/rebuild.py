"""Make the index again from what is on the disk: blobs, journal, and the links they name.

Rows made this way are unproven: each blob is hashed before its first use. Of a sound index the
other hashes of blobs that are still there are kept: they belong to the bytes. What a blob's links
cannot show (owners other than pins) may be missing, so a note makes `prune` refuse until the
folders were scanned again.
"""

from __future__ import annotations

import logging
import os
import secrets
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

from smartcache.config import Settings
from smartcache.errors import IndexDamagedError
from smartcache.progress import Progress, silent
from smartcache.store.faults import reached
from smartcache.store.filesystems import filesystem_id
from smartcache.store.journal import Change
from smartcache.store.layout import Layout, is_digest
from smartcache.store.locks import OnWait, lock
from smartcache.store.owners import pin
from smartcache.store.prune import REBUILT
from smartcache.store.records import LinkKind, Trust
from smartcache.store.volume import Volume, follow

_log = logging.getLogger(__name__)
_PAGE = 1000


def rebuild(volume: Volume, *, progress: Progress = silent) -> int:
    """Fill the index from the disk; return how many blobs it has now."""
    names = _names(volume)
    with volume.guard("rebuild the index", exclusive=True):
        with volume.index.write(durable=True):
            volume.index.clear()
            volume.index.set_note(REBUILT, datetime.now(UTC).isoformat(timespec="seconds"))
        reached("rebuild: cleared")
        with progress("Rebuilding the index", len(names)) as job:
            for start in range(0, len(names), _PAGE):
                with volume.index.write():
                    for name in names[start : start + _PAGE]:
                        _add(volume, name)
                job.advance(len(names[start : start + _PAGE]))
        reached("rebuild: blobs added")
        with volume.index.write():
            volume.index.drop_lost()
            for change in volume.journal.open_changes():
                _replay(volume, change)
            for digest, name in _pins(volume):
                _replay_pin(volume, digest, name)
    return len(names)


def replace_damaged_index(
    root: Path, settings: Settings, *, on_wait: OnWait | None = None
) -> Volume:
    """Open a volume whose index may be unreadable: it goes to `bad/`, and a new one is made."""
    root = follow(root)
    try:
        volume = Volume(root, settings, create=False)
        if volume.index.is_sound():
            return volume
        volume.close()
    except IndexDamagedError:
        pass
    layout = Layout(root)
    timeout = settings.lock_timeout
    with lock(
        layout.lock, exclusive=True, timeout=timeout, what="replace the index", on_wait=on_wait
    ):
        suffix = secrets.token_hex(4)
        for name in ("index.sqlite3", "index.sqlite3-wal", "index.sqlite3-shm"):
            if (root / name).exists():
                os.rename(root / name, layout.bad / f"{name}.{suffix}")
    _log.warning("the index of %s was damaged; it is in %s", root, layout.bad)
    return Volume(root, settings, create=False)


def rebuild_if_lost(volume: Volume) -> None:
    """Rebuild an index that was made new although there are blobs or a journal: it was lost."""
    if volume.index.is_new and volume.had_content:
        _log.warning("the index of %s was missing; making it again from the blobs", volume.root)
        rebuild(volume)


def _names(volume: Volume) -> list[str]:
    names = []
    for directory in sorted(os.listdir(volume.layout.blobs)):
        folder = volume.layout.blobs / directory
        if folder.is_dir():
            names += [n for n in os.listdir(folder) if is_digest(n) and n[:2] == directory]
    return names


def _add(volume: Volume, digest: str) -> None:
    try:
        st = os.lstat(volume.layout.blob(digest))
    except FileNotFoundError:
        return
    volume.index.add_blob(digest, st, trust=Trust.UNPROVEN)


def _pins(volume: Volume) -> list[tuple[str, str]]:
    """Return (digest, name) of the pins that were set and not ended, as the journal tells it."""
    pins: dict[tuple[str, str], None] = {}
    for change in volume.journal.open_changes():
        if change.op == "pin":
            pins[change.digest, str(change.path)] = None
        elif change.op == "unpin":
            pins.pop((change.digest, str(change.path)), None)
    return list(pins)


def _replay_pin(volume: Volume, digest: str, name: str) -> None:
    # What is pinned was not removed by us: bytes that are missing are lost, and may come back.
    volume.index.add_lost(digest, 0)
    blob = volume.index.blob(digest)
    if blob is not None:
        volume.index.hold(volume.index.add_owner(pin(name)), blob.id)


def _replay(volume: Volume, change: Change) -> None:
    if change.op not in ("adopt", "place", "replace"):
        return
    if _points_here(volume, change):
        volume.index.add_lost(change.digest, change.size)
    blob = volume.index.blob(change.digest)
    if blob is not None:
        _replay_link(volume, change, blob.id)


def _points_here(volume: Volume, change: Change) -> bool:
    """Say whether a placed symlink still points at its blob, be it there or not."""
    if change.op != "place" or change.kind != "symlink" or not os.path.islink(change.path):
        return False
    return os.readlink(change.path) == volume.layout.blob(change.digest)


def _replay_link(volume: Volume, change: Change, blob: int) -> None:
    source = volume.layout.blob(change.digest)
    try:
        st = os.lstat(change.path)
        is_symlink = _points_here(volume, change) or (
            os.path.islink(change.path) and os.path.samefile(change.path, source)
        )
        is_link = is_symlink or os.path.samestat(st, os.stat(source))
    except OSError:
        return
    is_copy = change.kind in ("copy", "reflink") and (st.st_size, st.st_mtime_ns) == (
        change.size,
        os.stat(source).st_mtime_ns,
    )
    if is_link or is_copy:
        kind: LinkKind = "symlink" if is_symlink else "hardlink"
        if is_copy:
            kind = cast("LinkKind", change.kind)
        filesystem = filesystem_id(change.path.parent)
        volume.index.add_link(
            str(change.path), blob, kind=kind, filesystem=filesystem, inode=st.st_ino, owner=None
        )
