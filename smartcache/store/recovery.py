"""What a killed process left half done, finished or taken back when the store is opened next.

Everything in progress is claimed by a kernel lock that dies with its process. So a tmp file whose
lock is free belongs to nobody, and a batch whose lock is free ended in the middle. Every step of a
change leaves the user's file whole under its name; recovery only removes our temporary names and
gives modes back. It never fails the opening: what cannot be finished now (a folder that cannot be
written, Ctrl-C) keeps its file in `tmp/`, and the next open goes on with it.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import cast

from smartcache.errors import (
    BlobNotFoundError,
    DamagedBlobError,
    FileSkippedError,
    SmartcacheError,
    StoreError,
)
from smartcache.store.digest import hash_file
from smartcache.store.filesystems import filesystem_id
from smartcache.store.journal import Batch, Change, State
from smartcache.store.locks import Claim, claim
from smartcache.store.owners import link_liveness
from smartcache.store.proof import prove
from smartcache.store.records import LinkKind
from smartcache.store.replace import begin_to_settle, end_settling, take_back
from smartcache.store.schema import signed
from smartcache.store.share import has_shared_blocks
from smartcache.store.swap import Spot
from smartcache.store.volume import Volume

_log = logging.getLogger(__name__)


def recover(volume: Volume) -> int:
    """Clear up after dead processes; return how many things were cleared."""
    cleared = 0
    for name in os.listdir(volume.layout.tmp):
        path = volume.layout.tmp / name
        held = _claim(path)
        if held is None:
            continue
        is_finished = not name.startswith("batch-")
        try:
            if not is_finished:
                is_finished = _finish_batch(volume, name.removeprefix("batch-"))
            cleared += is_finished
        finally:
            # Also after Ctrl-C: the next open goes on.
            held.release(remove=is_finished)
    return cleared


def _claim(path: Path) -> Claim | None:
    try:
        return claim(path) if os.path.lexists(path) else None
    except (StoreError, OSError) as error:  # not a file: nothing of ours
        _log.debug("%s stays: %s", path, error)
        return None


def _finish_batch(volume: Volume, batch_id: str) -> bool:
    """Finish or take back what a dead batch has begun; False: something has to wait."""
    changes = volume.journal.changes(batch_id)
    begun = [change for change in changes if change.state == "begun"]
    if begun:
        _log.warning("finishing what an interrupted process left: %d files", len(begun))
    outcomes = Batch(volume.journal, volume.layout.tmp, "recovery")
    is_finished = True
    try:
        for change in begun:
            try:
                state = _finish(volume, change)
            except (SmartcacheError, OSError) as error:
                _log.warning("%s: not finished, the next command tries again: %s",
                             change.path, error)  # fmt: skip
                is_finished = False
            else:
                outcomes.end(change, state)
    finally:
        outcomes.flush()
    for change in changes:
        link = volume.index.link(change.path)
        if link is not None and link_liveness(volume, link) == "dead":
            volume.index.drop_link(change.path)
    return is_finished


def _finish(volume: Volume, change: Change) -> State:
    """Finish one change or take it back; say which."""
    if change.op in ("pin", "unpin"):
        return "done"
    if change.op == "forget":
        return _finish_forget(volume, change)
    verbs: dict[str, Callable[[Volume, Change, Spot], State]] = {
        "adopt": _finish_adopt,
        "move": _finish_adopt,
        "replace": _finish_replace,
        "share": _finish_share,
        "place": _finish_place,
        "own": _finish_own,
    }
    try:
        with Spot(change.place) as spot:
            return verbs[change.op](volume, change, spot)
    except FileNotFoundError:
        if os.path.lexists(change.place.parent):
            raise
        return "back"  # its folder was removed


def _finish_share(_: Volume, change: Change, __: Spot) -> State:
    # Nothing can be half done: shared or not, the file has the same bytes and metadata.
    return "done" if has_shared_blocks(change) else "back"


def _finish_replace(volume: Volume, change: Change, spot: Spot) -> State:
    if change.temporary is None:
        return "back"
    blob_inode = _inode(volume.layout.blob(change.digest))
    for name in (change.temporary.name, f"{change.temporary.name}-old"):
        found = spot.inode(name)
        if found is None:
            continue
        if found == change.inode and blob_inode is not None and spot.inode() == blob_inode:
            _settle(change, spot, name, blob_inode)
        elif found in (blob_inode, change.inode):
            # Our link before the exchange, or a second name of the file that is still in its place.
            spot.unlink(name)
    if blob_inode is None or spot.inode() != blob_inode:
        return "back"
    _remember_link(volume, change, blob_inode)
    return "done"


def _settle(change: Change, spot: Spot, temporary: str, blob_inode: int) -> None:
    """Remove the old file of a replacement if it has the blob's bytes; else give it back."""
    descriptor = spot.open(temporary)
    try:
        hashes, key = hash_file(descriptor)
        proven = key if hashes.digest == change.digest else None
        lease = begin_to_settle(spot, temporary, blob_inode, proven, fd=descriptor)
        end_settling(spot, blob_inode, lease, fd=descriptor)
    except FileSkippedError as error:
        take_back(spot, temporary, blob_inode)
        _log.warning("%s", error)
    finally:
        os.close(descriptor)


def _finish_adopt(volume: Volume, change: Change, spot: Spot) -> State:
    blob_inode = _inode(volume.layout.blob(change.digest))
    found = spot.inode()
    if change.op == "move" and blob_inode is not None and found is None:
        return "done"
    if blob_inode is not None and blob_inode == found:
        _remember_link(volume, change, blob_inode)
        return "done"
    if found is not None and found == change.inode and change.mode is not None:
        spot.give_mode(change.mode, inode=found, links=change.links or 1)
    return "back"


def _finish_place(volume: Volume, change: Change, spot: Spot) -> State:
    _remove_temporary(change, spot)
    blob_inode, found = _inode(volume.layout.blob(change.digest)), spot.stat()
    if found is None:
        return "back"
    if found.st_ino == blob_inode:
        _remember_link(volume, change, blob_inode)
        return "done"
    if change.kind == "symlink" and stat.S_ISLNK(found.st_mode):
        return "done"
    if change.kind in ("copy", "reflink") and _has_bytes(change, spot, found):
        _remember_link(volume, change, found.st_ino)
        return "done"
    return "back"


def _has_bytes(change: Change, spot: Spot, st: os.stat_result) -> bool:
    """Say whether a file that was to be placed is there, whole."""
    if not stat.S_ISREG(st.st_mode) or st.st_size != change.size:
        return False
    descriptor = spot.open()
    try:
        return hash_file(descriptor)[0].digest == change.digest
    finally:
        os.close(descriptor)


def _finish_own(volume: Volume, change: Change, spot: Spot) -> State:
    """Finish a step of undo: no temporary name stays, and a file that was let go gets its mode."""
    _remove_temporary(change, spot)
    st = spot.stat()
    expected = (change.inode, change.size, change.mtime_ns)
    if st is None or (st.st_ino, st.st_size, st.st_mtime_ns) != expected:
        return "back"
    links = change.links or 1
    source = volume.layout.blob(change.digest)
    is_losing = volume.index.blob(change.digest) is None and st.st_ino == _inode(source)
    if is_losing and st.st_nlink <= links + 1:
        # Its row went, and then the process died: the name under blobs/ goes too.
        os.unlink(source)
    if st.st_ino != _inode(source) and change.mode is not None:
        spot.give_mode(change.mode, inode=st.st_ino, links=links)
    return "back"


def _finish_forget(volume: Volume, change: Change) -> State:
    if (volume.layout.trash / change.digest).exists():
        return "done"
    with suppress(BlobNotFoundError, DamagedBlobError):
        prove(volume, change.digest)
    return "back"


def _remove_temporary(change: Change, spot: Spot) -> None:
    if change.temporary is not None:
        spot.unlink(change.temporary.name)


def _remember_link(volume: Volume, change: Change, inode: int | None) -> None:
    blob = volume.index.blob(change.digest)
    link = volume.index.link(change.path)
    if blob is None or inode is None:
        return
    if link is not None and (link.digest, link.inode) == (change.digest, signed(inode)):
        return  # recorded already, with its owner
    is_copy = change.kind in ("copy", "reflink")
    kind: LinkKind = cast("LinkKind", change.kind) if is_copy else "hardlink"
    filesystem = filesystem_id(change.path.parent)
    volume.index.add_link(
        str(change.path), blob.id, kind=kind, filesystem=filesystem, inode=inode, owner=None
    )


def _inode(path: str | Path) -> int | None:
    try:
        return os.lstat(path).st_ino
    except OSError:
        return None
