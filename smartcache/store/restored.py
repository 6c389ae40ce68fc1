"""What the disk says of a change in the journal: still as it was made, or as it was before."""

from __future__ import annotations

import os
import stat
from collections import Counter

from smartcache.store.journal import Change
from smartcache.store.memos import hashes_of
from smartcache.store.proof import checked
from smartcache.store.schema import signed
from smartcache.store.volume import Volume


def is_our_link(volume: Volume, change: Change) -> bool:
    """Say whether the file at the path still is what the store made of it.

    Either it is the blob's inode; or, where the blob is gone or has another inode since, a
    read-only file that is the inode put there or shared with others, and still has its bytes.
    """
    try:
        st = os.lstat(change.path)
    except FileNotFoundError:
        return False
    if _is_blob(volume, change.digest, st):
        return True
    if not stat.S_ISREG(st.st_mode) or st.st_mode & 0o222:
        return False
    link = volume.index.link(change.path)
    is_known = link is not None and link.kind == "hardlink" and link.inode == signed(st.st_ino)
    has_blob = os.path.exists(volume.layout.blob(change.digest))
    if not is_known and (has_blob or st.st_nlink == 1):
        return False
    return hashes_of(volume, change.path)[0].digest == change.digest


def is_restored(volume: Volume, change: Change) -> bool:
    """Say whether a change was undone already by a process that was killed before it noted it."""
    if change.op == "forget":
        return _is_out_of_trash(volume, change.digest)
    if change.op == "place":
        return False
    try:
        st = os.lstat(change.path)
    except FileNotFoundError:
        return False
    found = (st.st_mode & 0o7777, st.st_size, st.st_mtime_ns)
    is_as_then = found == (change.mode, change.size, change.mtime_ns)
    if not is_as_then or not stat.S_ISREG(st.st_mode) or _is_blob(volume, change.digest, st):
        return False
    return hashes_of(volume, change.path)[0].digest == change.digest


def _is_out_of_trash(volume: Volume, digest: str) -> bool:
    is_trashed = (volume.layout.trash / digest).exists()
    if is_trashed or not os.path.exists(volume.layout.blob(digest)):
        return False
    checked(volume, digest)
    return True


def _is_blob(volume: Volume, digest: str, st: os.stat_result) -> bool:
    try:
        return os.path.samestat(st, os.lstat(volume.layout.blob(digest)))
    except FileNotFoundError:
        return False


def needed_bytes(volume: Volume, changes: list[Change]) -> int:
    """Return what undoing needs: own bytes for replaced files and adopted ones still shared."""
    ours = [change for change in changes if is_our_link(volume, change)]
    leaving = Counter(change.digest for change in ours if change.op in ("replace", "place"))
    needed = 0
    for change in ours:
        if change.op == "replace":
            needed += change.size
        elif change.op == "adopt":
            links = os.lstat(change.path).st_nlink - leaving[change.digest]
            needed += change.size if links > links_with_store(change) else 0
    return needed


def links_with_store(change: Change) -> int:
    """Return the links an adopted file has when nobody but the store has joined it."""
    return (change.links or 1) + 1
