"""The hashes of a file, computed at most once while the file stays as it is.

A memo is keyed by filesystem and inode and valid while size, mtime and ctime are those it was made
with. A file that was younger than two seconds when its hashing began is stored as racy and hashed
again next time, because a second change within one clock tick would leave the same key.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from smartcache.progress import Progress, silent
from smartcache.store.digest import Algorithm, Hashes, hash_file, hash_many
from smartcache.store.filesystems import filesystem_id
from smartcache.store.kernel import drop_lease, take_lease
from smartcache.store.records import Blob, Memo, Trust
from smartcache.store.schema import signed
from smartcache.store.statkey import StatKey
from smartcache.store.volume import Volume

Known = tuple[Hashes, StatKey]
"""Hashes and the stat key they belong to."""
_Values = dict[Algorithm, str]


def recall(
    volume: Volume, path: Path, st: os.stat_result, algorithms: Iterable[Algorithm]
) -> Hashes | None:
    """Return remembered hashes of a file if they cover `algorithms` and are still valid."""
    values = recall_all(volume, [(path, st)])[path]
    if all(name in values for name in algorithms):
        return Hashes(size=st.st_size, values=values)
    return None


def hashes_of(
    volume: Volume,
    path: Path,
    algorithms: Iterable[Algorithm] = ("blake3",),
    *,
    advance: Callable[[int], None] | None = None,
) -> Known:
    """Return the hashes of a file, remembered or computed now, and the stat key they belong to."""
    wanted = tuple(dict.fromkeys(algorithms))
    st = os.stat(path)
    key = StatKey.of(st)
    values = recall_all(volume, [(path, st)])[path]
    missing = [name for name in wanted if name not in values]
    if not missing:
        return Hashes(size=st.st_size, values=values), key
    started = time.time_ns()
    threads = volume.settings.threads
    is_quiet = not is_being_written(path)
    hashes, now = hash_file(path, missing, advance=advance, threads=threads)
    if now != key:
        # What was remembered is of other bytes than what was hashed now.
        values = {}
        if len(missing) != len(wanted):
            hashes, now = hash_file(path, wanted, threads=threads)
    merged = Hashes(size=now.size, values={**values, **hashes.values})
    if is_quiet:
        _remember(volume, path, merged, now, started)
    return merged, now


def hash_all(
    volume: Volume,
    paths: Iterable[Path],
    algorithms: Iterable[Algorithm] = ("blake3",),
    *,
    progress: Progress = silent,
) -> dict[Path, Known]:
    """Return the hashes of many files, remembered or computed now, in threads.

    Files that cannot be read, that somebody writes, or that are so young that their memo would be
    racy, are left out: whoever uses them finds out why.
    """
    wanted = tuple(dict.fromkeys(algorithms))
    files: list[tuple[Path, os.stat_result]] = []
    now = time.time_ns()
    for path in paths:
        try:
            st = os.stat(path)
        except OSError:
            continue
        if not StatKey.of(st).is_racy(now):
            files.append((path, st))
    found: dict[Path, Known] = {}
    unknown: list[Path] = []
    remembered = recall_all(volume, files)
    for path, st in files:
        values = remembered[path]
        if values and all(name in values for name in wanted):
            found[path] = Hashes(size=st.st_size, values=values), StatKey.of(st)
        elif not is_being_written(path):
            unknown.append(path)
    if unknown:
        found.update(_hash_unknown(volume, unknown, wanted, progress))
    return found


def is_being_written(path: Path) -> bool:
    """Say whether somebody has a file open for writing or mapped writable.

    A page that is mapped writable and dirty already can be written without any trace in stat, so
    hashes of such a file are not remembered. Where there are no leases, nobody can tell.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return False
    try:
        lease = take_lease(descriptor)
        if lease == "held":
            drop_lease(descriptor)
        return lease == "busy"
    finally:
        os.close(descriptor)


def _hash_unknown(
    volume: Volume, paths: list[Path], wanted: tuple[Algorithm, ...], progress: Progress
) -> dict[Path, Known]:
    started = time.time_ns()
    hashed = hash_many(paths, wanted, threads=volume.settings.threads, progress=progress)
    # Hash everything first: never inside a transaction.
    found = {
        h.path: (h.hashes, h.key) for h in hashed if h.hashes is not None and h.key is not None
    }
    with volume.index.write():
        for path, (hashes, key) in found.items():
            _remember(volume, path, hashes, key, started)
    return found


def _remember(volume: Volume, path: Path, hashes: Hashes, key: StatKey, started_ns: int) -> None:
    """Keep hashes for the next time, unless the file changed since."""
    try:
        st = os.stat(path)
    except FileNotFoundError:
        return
    if StatKey.of(st) == key:
        memo = Memo(key=key, is_racy=key.is_racy(started_ns), values=dict(hashes.values))
        volume.index.put_memo(filesystem_id(path, st), st.st_ino, memo)


def recall_all(volume: Volume, files: list[tuple[Path, os.stat_result]]) -> dict[Path, _Values]:
    """Return what is known of files' hashes: from blobs in the same inodes, else from memos."""
    here = [st.st_ino for _, st in files if volume.is_here(st)]
    blobs = volume.index.blobs_in(here) if here else {}
    filesystems: dict[int, str] = {}
    by_filesystem: dict[str, list[int]] = {}
    for path, st in files:
        if st.st_dev not in filesystems:
            filesystems[st.st_dev] = filesystem_id(path, st)
        by_filesystem.setdefault(filesystems[st.st_dev], []).append(st.st_ino)
    memos = {fs: volume.index.memos(fs, inodes) for fs, inodes in by_filesystem.items()}
    known: dict[Path, _Values] = {}
    for path, st in files:
        inode, key = signed(st.st_ino), StatKey.of(st)
        blob = blobs.get(inode) if volume.is_here(st) else None
        if blob is not None and vouches(volume, blob, key):
            known[path] = {**volume.index.aliases_of(blob.id), "blake3": blob.digest}
            continue
        memo = memos[filesystems[st.st_dev]].get(inode)
        is_valid = memo is not None and not memo.is_racy and memo.key == key
        known[path] = memo.values if memo is not None and is_valid else {}
    return known


def vouches(volume: Volume, blob: Blob, key: StatKey) -> bool:
    """Say whether a blob's row proves the hashes of the file in its inode."""
    is_synced = blob.unsynced in (None, volume.boot)
    return blob.key == key and blob.trust == Trust.VERIFIED and is_synced
