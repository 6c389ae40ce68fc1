"""What a killed process left half done, finished or taken back when the store is opened next.

Everything in progress is claimed by a kernel lock that dies with its process. So a tmp file whose
lock is free belongs to nobody, and a batch whose lock is free ended in the middle. Every step of a
change leaves the user's file whole under its name; recovery only removes our temporary names and
gives modes back.
"""

from __future__ import annotations

import logging
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import cast

from smartcache.errors import BlobNotFoundError, DamagedBlobError, FileSkippedError, StoreError
from smartcache.store.digest import hash_file
from smartcache.store.filesystems import filesystem_id
from smartcache.store.journal import Batch, Change
from smartcache.store.locks import Claim, claim
from smartcache.store.owners import link_liveness
from smartcache.store.proof import prove
from smartcache.store.records import LinkKind
from smartcache.store.replace import begin_to_settle, end_settling, take_back
from smartcache.store.schema import signed
from smartcache.store.share import has_shared_blocks
from smartcache.store.volume import Volume

_log = logging.getLogger(__name__)


def recover(volume: Volume) -> int:
    """Clear up after dead processes; return how many things were cleared."""
    cleared = 0
    with os.scandir(volume.layout.tmp) as entries:
        names = [entry.name for entry in entries]
    for name in names:
        path = volume.layout.tmp / name
        held = _claim(path)
        if held is None:
            continue
        try:
            if name.startswith("batch-"):
                _finish_batch(volume, name.removeprefix("batch-"))
            cleared += 1
        finally:
            held.release(remove=True)
    return cleared


def _claim(path: Path) -> Claim | None:
    try:
        return claim(path) if os.path.lexists(path) else None
    except (StoreError, OSError) as error:  # another user's file in a shared store
        _log.debug("%s stays: %s", path, error)
        return None


def _finish_batch(volume: Volume, batch_id: str) -> None:
    changes = volume.journal.changes(batch_id)
    begun = [change for change in changes if change.state == "begun"]
    if begun:
        _finish_begun(volume, begun)
    for change in changes:
        link = volume.index.link(change.path)
        if link is not None and link_liveness(volume, link) == "dead":
            volume.index.drop_link(change.path)


def _finish_begun(volume: Volume, begun: list[Change]) -> None:
    _log.warning("finishing what an interrupted process left: %d files", len(begun))
    outcomes = Batch(volume.journal, volume.layout.tmp, "recovery")
    for change in begun:
        if change.op == "replace":
            _finish_replace(volume, change, outcomes)
        elif change.op == "share":
            # Nothing can be half done: shared or not, the file has the same bytes and metadata.
            outcomes.end(change, "done" if has_shared_blocks(change) else "back")
        elif change.op in ("adopt", "move"):
            _finish_adopt(volume, change, outcomes)
        elif change.op == "own":
            _finish_own(volume, change)
            outcomes.end(change, "back")
        elif change.op == "forget":
            _finish_forget(volume, change, outcomes)
        elif change.op == "place":
            _finish_place(volume, change, outcomes)
    outcomes.flush()


def _finish_replace(volume: Volume, change: Change, outcomes: Batch) -> None:
    path, temporary = change.path, change.temporary
    if temporary is None:
        return
    spare = temporary.with_name(temporary.name + "-old")
    blob_inode = _inode(volume.layout.blob(change.digest))
    for name in (temporary, spare):
        found = _inode(name)
        if found is None:
            continue
        if found == change.inode and blob_inode is not None and _inode(path) == blob_inode:
            _settle(change, name, blob_inode)
        elif found in (blob_inode, change.inode):
            # Our link before the exchange, or a second name of the file that is still in its place.
            os.unlink(name)
    replaced = blob_inode is not None and _inode(path) == blob_inode
    outcomes.end(change, "done" if replaced else "back")
    if replaced:
        _remember_link(volume, change, blob_inode)


def _settle(change: Change, temporary: Path, blob_inode: int) -> None:
    """Remove the old file of a replacement if it has the blob's bytes; else give it back."""
    descriptor = os.open(temporary, os.O_RDONLY)
    try:
        hashes, key = hash_file(descriptor)
        proven = key if hashes.digest == change.digest else None
        lease = begin_to_settle(change.path, temporary, blob_inode, proven, fd=descriptor)
        end_settling(change.path, blob_inode, lease, fd=descriptor)
    except FileSkippedError as error:
        take_back(change.path, temporary, blob_inode)
        _log.warning("%s", error)
    finally:
        os.close(descriptor)


def _finish_adopt(volume: Volume, change: Change, outcomes: Batch) -> None:
    blob_inode = _inode(volume.layout.blob(change.digest))
    if change.op == "move" and blob_inode is not None and _inode(change.path) is None:
        outcomes.end(change, "done")
        return
    adopted = blob_inode is not None and blob_inode == _inode(change.path)
    if adopted:
        _remember_link(volume, change, blob_inode)
    elif _inode(change.path) == change.inode and change.mode is not None:
        os.chmod(change.path, change.mode)
    outcomes.end(change, "done" if adopted else "back")


def _finish_place(volume: Volume, change: Change, outcomes: Batch) -> None:
    _remove_temporary(change)
    blob_inode = _inode(volume.layout.blob(change.digest))
    is_link = blob_inode is not None and _inode(change.path) == blob_inode
    if is_link:
        _remember_link(volume, change, blob_inode)
    is_symlink = change.kind == "symlink" and os.path.islink(change.path)
    is_copy = change.kind in ("copy", "reflink") and _has_bytes(change)
    if is_copy:
        _remember_link(volume, change, _inode(change.path))
    outcomes.end(change, "done" if is_link or is_symlink or is_copy else "back")


def _has_bytes(change: Change) -> bool:
    """Say whether a file that was to be placed is there, whole."""
    try:
        st = os.lstat(change.path)
        is_file = stat.S_ISREG(st.st_mode) and st.st_size == change.size
        return is_file and hash_file(change.path)[0].digest == change.digest
    except OSError:
        return False


def _finish_own(volume: Volume, change: Change) -> None:
    """Finish a step of undo: no temporary name stays, and a file that was let go gets its mode."""
    _remove_temporary(change)
    try:
        st = os.lstat(change.path)
    except FileNotFoundError:
        return
    is_same = (st.st_ino, st.st_size, st.st_mtime_ns) == (
        change.inode,
        change.size,
        change.mtime_ns,
    )
    source = volume.layout.blob(change.digest)
    is_losing = volume.index.blob(change.digest) is None and st.st_ino == _inode(source)
    if is_same and is_losing and st.st_nlink <= (change.links or 1) + 1:
        # Its row went, and then the process died: the name under blobs/ goes too.
        os.unlink(source)
        st = os.lstat(change.path)
    is_let_go = st.st_ino != _inode(source)
    is_free = st.st_nlink <= (change.links or 1)
    if is_same and is_let_go and is_free and change.mode is not None:
        os.chmod(change.path, change.mode)


def _finish_forget(volume: Volume, change: Change, outcomes: Batch) -> None:
    if (volume.layout.trash / change.digest).exists():
        outcomes.end(change, "done")
        return
    with suppress(BlobNotFoundError, DamagedBlobError):
        prove(volume, change.digest)
    outcomes.end(change, "back")


def _remove_temporary(change: Change) -> None:
    if change.temporary is not None:
        change.temporary.unlink(missing_ok=True)


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
