"""What the disk says of a change in the journal: still as it was made, or as it was before."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from smartcache.store.attributes import read_attributes
from smartcache.store.journal import Change
from smartcache.store.kernel import effective_user
from smartcache.store.memos import hashes_of
from smartcache.store.proof import checked
from smartcache.store.schema import signed
from smartcache.store.share import has_shared_blocks
from smartcache.store.volume import Volume

TwinKey = tuple[str | None, int | None, str, int]


def is_our_link(volume: Volume, change: Change) -> bool:
    """Say whether the file at the path still is what the store made of it.

    Either it is the blob's inode; or, where the blob is gone or has another inode since, a
    read-only file that is the inode put there or shared with others, and still has its bytes.
    """
    try:
        st = os.lstat(change.place)
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
    return hashes_of(volume, change.place)[0].digest == change.digest


def is_restored(volume: Volume, change: Change) -> bool:
    """Say whether a change was undone already by a process that was killed before it noted it."""
    if change.op == "forget":
        return _is_out_of_trash(volume, change.digest)
    if change.op in ("place", "share"):
        return False
    try:
        st = os.lstat(change.place)
    except FileNotFoundError:
        return False
    if not _has_group_and_attributes(change, st):
        return False
    found = (st.st_mode & 0o7777, st.st_size, st.st_mtime_ns)
    is_as_then = found == (change.mode, change.size, change.mtime_ns)
    if not is_as_then or not stat.S_ISREG(st.st_mode) or _is_blob(volume, change.digest, st):
        return False
    return hashes_of(volume, change.place)[0].digest == change.digest


def _has_group_and_attributes(change: Change, st: os.stat_result) -> bool:
    """Say whether a file has them again; only root can give every group back."""
    if effective_user() == 0 and st.st_gid != change.gid:
        return False
    return not change.xattrs or change.xattrs.items() <= read_attributes(change.place).items()


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


def told_apart(changes: Iterable[Change]) -> dict[tuple[str, int], int]:
    """Number the files that had one inode number: it is used again when a file is gone.

    The names of an inode are replaced one after the other, each with one link less than the last;
    whatever does not go on like that is another file.
    """
    last: dict[tuple[str | None, int | None, str], tuple[int, int]] = {}
    files: dict[tuple[str, int], int] = {}
    for change in changes:
        if change.op == "replace" and change.state != "back":
            key = (change.filesystem, change.inode, change.digest)
            number, links = last.get(key, (0, 0))
            if change.links != links - 1:
                number += 1
            last[key] = (number, change.links or 1)
            files[change.batch, change.n] = number
    return files


def twin_key(change: Change, files: Mapping[tuple[str, int], int]) -> TwinKey:
    """Name the file a path stood for before it was replaced; `files` are `told_apart`."""
    number = files.get((change.batch, change.n), 0)
    return change.filesystem, change.inode, change.digest, number


def let_go(volume: Volume, path: Path) -> None:
    """Forget a link whose file has its own bytes now; its owner needs the blob no more."""
    link = volume.index.link(path)
    with volume.index.write():
        volume.index.drop_link(path)
        blob = None if link is None else volume.index.blob(link.digest)
        if link is None or link.owner is None or blob is None:
            return
        if all(other.owner != link.owner for other in volume.index.links_of(blob.id)):
            volume.index.release(link.owner, blob.id)


def needed_bytes(volume: Volume, changes: list[Change]) -> int:
    """Return what undoing copies: own bytes for files that share, and for those moved away."""
    shared = [c for c in changes if c.op == "share" and has_shared_blocks(c)]
    ours = [
        c
        for c in changes
        if (c.op != "share" and is_our_link(volume, c))
        or (c.op == "move" and not os.path.lexists(c.place))
    ]
    leaving = Counter(change.digest for change in ours if change.op in ("replace", "place"))
    needed = sum(change.size for change in shared)
    files = told_apart(volume.journal.changes())
    replaced: set[TwinKey] = set()
    for change in ours:
        if change.op == "replace":
            # All names of a file get one copy.
            key = twin_key(change, files)
            needed += 0 if key in replaced else change.size
            replaced.add(key)
        elif (change.op == "place" and change.keep) or change.op == "move":
            needed += change.size
        elif change.op == "adopt":
            links = os.lstat(change.place).st_nlink - leaving[change.digest]
            needed += change.size if links > links_with_store(change) else 0
    return needed


def links_with_store(change: Change) -> int:
    """Return the links an adopted file has when nobody but the store has joined it."""
    return (change.links or 1) + 1
