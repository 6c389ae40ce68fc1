"""A user's file: opened once, its bytes proven, held still; and given its own bytes again.

The bytes of a file and its stat key are proven to belong together. A file that was not touched for
two seconds is hashed first (or remembered) and leased afterwards; an unchanged key then proves
that no write came between. A younger file could be written twice within one clock tick without its
key showing it, so it is leased first and hashed under the lease.

What was shared is given back by a copy beside the name, hashed while it is written, and a swap of
names: the name is never absent or half written.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, cast

from smartcache.errors import FileBusyError, FileChangedError, FileSkippedError
from smartcache.progress import SILENT, Job, Progress, silent
from smartcache.store.blobs import copy_hashed, own_unlink
from smartcache.store.changes.journal import Batch, Change, State
from smartcache.store.changes.spot import Spot, beside, read_attributes, write_attributes
from smartcache.store.hashes import hashes_of, remember
from smartcache.store.records import LinkKind
from smartcache.store.volume import Volume
from smartcache.system.faults import reached
from smartcache.system.filesystems import filesystem_id
from smartcache.system.hashing import Algorithm, Hashes, hash_many
from smartcache.system.kernel import (
    Lease,
    StatKey,
    drop_lease,
    effective_user,
    lease_intact,
    take_lease,
)
from smartcache.system.sqlite import signed

TICK_NS = 50_000_000
"""More than a tick (at most 10 ms) of the clock that filesystems with hard links use."""
_DEFAULT_MODE = 0o644
_UNKNOWN = Hashes(size=0, values={})

Allowance = Literal["group", "mode", "xattr"]
"""What a link may change about a file besides its permission to write, if the user allows it.

Its group, its permissions, its extended attributes: the journal has them, and undo gives them back.
Files of other users are never linked, not even by root: whoever owns an inode can change the bytes
that all its links show.
"""

_INCOMPLETE_SUFFIXES = (
    b".incomplete", b".tmp", b".part", b".crdownload", b".aria2", b".download", b".lock",
    b".smartcache",
)  # fmt: skip
_OLLAMAS = re.compile(rb"sha256[-:][0-9a-f]{64}-partial(-[0-9]+)?")
OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class UserFile:
    """An open file of a user, in the folder it was found in, whatever becomes of the path.

    `prove_all` makes its bytes known (`digest`, `hashes`) and holds it still (`lease`), or says why
    not (`error`). `is_proven` is False when no lease could be had and the file is so young that its
    key proves little. The caller releases it.
    """

    __slots__ = ("digest", "error", "fd", "hashes", "is_proven", "lease", "path", "spot", "st")

    def __init__(self, path: Path, *, follow: bool = True) -> None:
        """Open it, or raise; not `follow`: no folder above it may be a symlink."""
        self.path = path
        self.lease: Lease = "unsupported"
        self.is_proven = False
        self.error: Exception | None = None
        self.hashes = _UNKNOWN
        self.digest = ""
        self.spot = Spot(Path(os.path.realpath(path.parent), path.name) if follow else path)
        try:
            st = self.spot.stat()
            if st is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            refuse_unsuitable(path, st)
            self.fd = self.spot.open()
            # Another file may have come to the name: what counts is the one that was opened.
            self.st = os.fstat(self.fd)
            if not os.path.samestat(st, self.st):
                os.close(self.fd)
                raise FileChangedError(f"{path} was replaced meanwhile", path=path)
        except BaseException:
            self.spot.close()
            raise

    def is_untouched(self, now: os.stat_result) -> bool:
        """Say whether `now` shows the same inode and bytes, and no writer waits for our lease.

        A writer blocked in open() by the lease has already resolved this inode and will write into
        it.
        """
        if not os.path.samestat(now, self.st):
            return False
        if (now.st_size, now.st_mtime_ns) != (self.st.st_size, self.st.st_mtime_ns):
            return False
        return self.lease != "held" or lease_intact(self.fd)

    def drop_lease(self) -> None:
        """Let waiting writers go on; the file stays open."""
        if self.lease == "held":
            drop_lease(self.fd)
            self.lease = "unsupported"

    def release(self) -> None:
        """Drop the lease and close the file; harmless to repeat."""
        if self.fd >= 0:
            self.drop_lease()
            os.close(self.fd)
            self.spot.close()
            self.fd = -1


def key_in(volume: Volume, st: os.stat_result) -> tuple[str, int, StatKey]:
    """Return by what a file of the volume's filesystem is known to those who have read it."""
    return volume.filesystem, signed(st.st_ino), StatKey.of(st)


def prove_all(
    volume: Volume,
    files: Sequence[UserFile],
    algorithms: Iterable[Algorithm] = (),
    *,
    known: Mapping[Path, Mapping[Algorithm, str]],
    progress: Progress = silent,
) -> None:
    """Learn the bytes of files, `known` or hashed now, and hold each still, or say why not."""
    wanted: tuple[Algorithm, ...] = tuple(dict.fromkeys(("blake3", *algorithms)))
    old = {file.fd: file for file in files if not StatKey.of(file.st).is_racy()}
    started, keys = time.time_ns(), {}
    unread: dict[int, UserFile] = {}
    for fd, file in old.items():
        values = known.get(file.path, {})
        if all(name in values for name in wanted):
            file.hashes, file.digest = Hashes(size=file.st.st_size, values=values), values["blake3"]
            keys[fd] = StatKey.of(file.st)
        # Asked before the first byte is read: whoever maps the file later cannot write without
        # another change time. It is not kept: a writer would wait for us.
        elif _take_lease(file):
            file.drop_lease()
            unread[fd] = file
    _hash(volume, unread, wanted, progress, keys, started)
    young = [file for file in files if file.fd not in old and _take_lease(file)]
    _hash(volume, {file.fd: file for file in young}, wanted, progress, keys)
    for file in files:
        if file.error is None and (file.fd not in old or _take_lease(file)):
            _hold_still(file, keys[file.fd], is_young=file.fd not in old)


def _take_lease(file: UserFile) -> bool:
    """Hold writers of a file back, where that works; False: somebody writes it."""
    file.lease = take_lease(file.fd)
    if file.lease == "busy":
        file.error = FileBusyError(f"{file.path} is open for writing", path=file.path)
    return file.error is None


def _hash(
    volume: Volume,
    files: dict[int, UserFile],
    wanted: tuple[Algorithm, ...],
    progress: Progress,
    keys: dict[int, StatKey],
    started: int | None = None,
) -> None:
    """Hash open files; with the time it began, what is learned is remembered."""
    if not files:
        return
    names, threads = {fd: file.path.name for fd, file in files.items()}, volume.settings.threads
    for each in hash_many(files, wanted, threads=threads, progress=progress, names=names):
        file = files[each.path]
        file.error = each.error
        if each.hashes is not None and each.key is not None:
            file.hashes, file.digest = each.hashes, each.hashes.digest
            keys[each.path] = each.key
    if started is not None:
        read = ((f.path, f.hashes, keys[fd]) for fd, f in files.items() if f.error is None)
        remember(volume, read, started)


def _hold_still(file: UserFile, key: StatKey, *, is_young: bool) -> None:
    """See that a leased file still is what was hashed; who comes later is seen by the lease."""
    is_held = file.lease == "held"
    if is_young and is_held:
        # Wait out the clock tick of the last write, so that a later one must show another time.
        _sleep_ns(min(key.mtime_ns + TICK_NS - time.time_ns(), TICK_NS))
    file.st = os.fstat(file.fd)
    is_broken = is_young and is_held and not lease_intact(file.fd)
    if is_broken or StatKey.of(file.st) != key:
        file.error = FileChangedError(f"{file.path} changed while it was read", path=file.path)
    is_old_enough = file.st.st_mtime_ns <= time.time_ns() - TICK_NS
    file.is_proven = not is_young or (is_held and is_old_enough)


def _sleep_ns(nanoseconds: int) -> None:
    if nanoseconds > 0:
        time.sleep(nanoseconds / 1e9)


def is_incomplete(name: bytes) -> bool:
    """Say whether a file's name says that it is still being downloaded."""
    lower = name.lower()
    return lower.endswith(_INCOMPLETE_SUFFIXES) or _OLLAMAS.fullmatch(lower) is not None


def refuse_unsuitable(path: Path, st: os.stat_result) -> None:
    """Raise unless a file is one that may become a link or a blob."""
    refuse_unshareable(path, st)
    reason = ""
    if st.st_uid != effective_user():
        reason = "belongs to another user"
    elif st.st_mode & (stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX):
        reason = "has a special mode"
    if reason:
        raise FileSkippedError(f"{path}: {reason}", reason=reason, path=path)


def refuse_unshareable(path: Path, st: os.stat_result) -> None:
    """Raise unless a file is one whose bytes may be shared at all."""
    reason = ""
    if not stat.S_ISREG(st.st_mode):
        reason = "not a regular file"
    elif st.st_size == 0:
        reason = "empty"
    elif is_incomplete(os.fsencode(path.name)):
        reason = "incomplete download"
    if reason:
        raise FileSkippedError(f"{path}: {reason}", reason=reason, path=path)


def refuse_visible_change(
    path: Path,
    st: os.stat_result,
    blob_st: os.stat_result,
    allow: frozenset[Allowance] = frozenset(),
) -> None:
    """Raise if a link would show another group, other permissions or attributes."""
    reason = ""
    is_same_mode = st.st_mode & 0o555 == blob_st.st_mode & 0o555
    if st.st_gid != blob_st.st_gid and "group" not in allow:
        reason = "different group"
    elif not is_same_mode and "mode" not in allow:
        reason = "different permissions"
    elif "xattr" not in allow and read_attributes(path):
        reason = "has extended attributes"
    if reason:
        raise FileSkippedError(f"{path}: {reason}", reason=reason, path=path)


@contextmanager
def filling(
    spot: Spot, change: Change, batch: Batch, *, permissions: int = 0o600
) -> Iterator[tuple[int, str]]:
    """Give a new file beside a name, as descriptor and name; it is gone when the block ends.

    It is in the journal first, as a step of undo, so that a killed process leaves nothing behind.
    """
    temporary = beside(change.path)
    note = replace(change, op="own", temporary=temporary)
    batch.begin([note])
    descriptor = spot.create(temporary.name, permissions)
    try:
        yield descriptor, temporary.name
    finally:
        os.close(descriptor)
        spot.unlink(temporary.name)
        batch.end(note, "done")


def give_own_copy(volume: Volume, change: Change, batch: Batch, job: Job = SILENT) -> None:
    """Replace the link at `change.path` by a file with the blob's bytes and the old metadata.

    Raises FileChangedError, with nothing changed, if somebody else has replaced the link meanwhile.
    """
    with Spot(change.place) as spot:
        linked = spot.stat()
        if linked is None:
            raise FileChangedError(f"{change.path} was removed", path=change.path)
        with filling(spot, change, batch) as (descriptor, temporary):
            with open(spot.open(), "rb") as source:
                copied = copy_hashed(source, descriptor, job.advance)
            if copied != change.digest:
                raise FileChangedError(f"{change.path} was changed since", path=change.path)
            restore_metadata(descriptor, change)
            # Waiting for the disk may take as long as the copy.
            job.describe(f"writing {change.path.name} to disk")
            os.fsync(descriptor)
            reached("own copy: written")
            take_name(spot, temporary, linked.st_ino, [(volume, change.digest)], path=change.path)
    reached("own copy: in place")


def take_name(
    spot: Spot, temporary: str, inode: int, blobs: Iterable[tuple[Volume, str]], *, path: Path
) -> None:
    """Let a filled file take the name from an inode; the rows of blobs in that inode are renewed.

    Raises FileChangedError, with nothing changed, if somebody else has the name meanwhile.
    """
    with ExitStack() as stack:
        for volume, digest in blobs:
            stack.enter_context(own_unlink(volume, digest))
        is_swapped = spot.swap_in(temporary, inode)
    if not is_swapped:
        raise FileChangedError(f"{path} was replaced by somebody else", path=path)
    spot.sync()


def restore_metadata(descriptor: int, change: Change) -> None:
    """Give a new file the group, attributes, mode and time that the journal remembers.

    Its owner is this user, as it was before: files of others are never changed. No special mode.
    """
    if change.gid is not None:
        with suppress(PermissionError):  # a group this user has left since
            os.fchown(descriptor, -1, change.gid)
    write_attributes(descriptor, change.xattrs or {})
    os.fchmod(descriptor, _DEFAULT_MODE if change.mode is None else change.mode & 0o777)
    if change.mtime_ns is not None:
        os.utime(descriptor, ns=(change.mtime_ns, change.mtime_ns))


def is_our_link(volume: Volume, change: Change, *, is_last: bool = False) -> bool:
    """Say whether the file at the path still is what the store made of it.

    Either it is the blob's inode; or, where the blob is gone or has another inode since, a
    read-only file that is the inode put there or shared with others, and still has its bytes.
    `is_last`: the others may have been given back already.
    """
    try:
        st = os.lstat(change.place)
    except FileNotFoundError:
        return False
    if is_blob(volume, change.digest, st):
        return True
    if not stat.S_ISREG(st.st_mode) or st.st_mode & 0o222:
        return False
    link = volume.index.link(change.path)
    is_known = link is not None and link.kind == "hardlink" and link.inode == signed(st.st_ino)
    has_blob = os.path.exists(volume.layout.blob(change.digest))
    if not is_known and (has_blob or (st.st_nlink == 1 and not is_last)):
        return False
    return hashes_of(volume, change.place)[0].digest == change.digest


def is_blob(volume: Volume, digest: str, st: os.stat_result) -> bool:
    """Say whether a file is the very inode of a blob."""
    try:
        return os.path.samestat(st, os.lstat(volume.layout.blob(digest)))
    except FileNotFoundError:
        return False


def let_go(volume: Volume, path: Path) -> None:
    """Forget a link whose file has its own bytes now; its owner needs the blob no more."""
    link = volume.index.link(path)
    with volume.index.write():
        volume.index.drop_link(path)
        blob = None if link is None else volume.index.record(link.digest)
        if link is None or link.owner is None or blob is None:
            return
        if all(other.owner != link.owner for other in volume.index.links_of(blob.id)):
            volume.index.release(link.owner, blob.id)


def remember_link(volume: Volume, change: Change, inode: int) -> None:
    """Record the link that a change has made, unless it is on record already, with its owner."""
    blob, link = volume.index.record(change.digest), volume.index.link(change.path)
    if blob is None:
        return
    if link is not None and (link.digest, link.inode) == (change.digest, signed(inode)):
        return
    is_copy = change.kind in ("copy", "reflink")
    volume.index.add_link(
        str(change.path), blob.id, kind=cast("LinkKind", change.kind) if is_copy else "hardlink",
        filesystem=filesystem_id(change.path.parent), inode=inode, owner=None,
    )  # fmt: skip


LEFT_ALONE = "changed or replaced by somebody else since; left as it is"
AWAY = "its drive is not mounted; left as it is"
TwinKey = tuple[str | None, int | None, str, int]
"""Filesystem, inode and digest of a file, and which of those that had this inode number."""


def why_left(change: Change) -> str:
    """Say why a file is not what was made of it: what is missing and not gone is away."""
    return LEFT_ALONE if os.path.lexists(change.place) else AWAY


@dataclass(frozen=True, slots=True, kw_only=True)
class Undoing:
    """One run of undo: its batch, and what is known of files that belong together."""

    batch: Batch
    twins: dict[TwinKey, Path] = field(default_factory=dict)
    """The restored files by the inode they had, to link those with them that were one."""
    old_names: dict[tuple[str, int | None], set[Path]] = field(default_factory=dict)
    """The names that adopted inodes had before, by digest and inode."""
    files: dict[tuple[str, int], int] = field(default_factory=dict)
    """Which file of those that had its inode number, one after the other, a change was made to."""
    joined: set[Path] = field(default_factory=set)
    """Names that the store made links of blobs; every other name of an inode it had before."""
    job: Job = SILENT
    """Hears of every byte that is copied or hashed."""


def finish_own(volume: Volume, change: Change, spot: Spot) -> State:
    """Finish a step of undo: no temporary name stays, and a file that was let go gets its mode."""
    if change.temporary is not None:
        spot.unlink(change.temporary.name)
    st = spot.stat()
    expected = (change.inode, change.size, change.mtime_ns)
    if st is None or (st.st_ino, st.st_size, st.st_mtime_ns) != expected:
        return "back"
    links, is_same = change.links or 1, st.st_ino == volume.blob_inode(change.digest)
    if is_same and volume.index.record(change.digest) is None and st.st_nlink <= links + 1:
        # Its row went, and then the process died: the name under blobs/ goes too.
        os.unlink(volume.layout.blob(change.digest))
        is_same = False
    if not is_same and change.mode is not None:
        spot.give_mode(change.mode, inode=st.st_ino, links=links)
    return "back"
