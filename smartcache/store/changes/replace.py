"""Replace a file that has a blob's bytes by a hard link to it: atomic, journaled, undoable.

The name exists at every moment and always shows the same bytes. The order of steps closes the
windows in which a write could be lost: a read lease proves that nobody writes; the journal line
comes first; names are exchanged, not removed; the old file is kept under a temporary name until,
at the end of the chunk, a second lease proves that no writer slipped in. A writer who did gets the
file back (`give_back`), with everything that was written.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from dataclasses import replace as changed
from itertools import islice
from pathlib import Path
from typing import Literal

from smartcache.errors import (
    BlobNotFoundError,
    FileBusyError,
    FileChangedError,
    FileSkippedError,
    SmartcacheError,
)
from smartcache.store.blobs import (
    checked,
    copy_hashed,
    explained,
    own_unlink,
    prove,
    renew,
    unchanged,
)
from smartcache.store.changes.adopt import CHUNK_FILES
from smartcache.store.changes.journal import Batch, Change, State
from smartcache.store.changes.spot import Spot, beside, read_attributes, write_attributes
from smartcache.store.changes.userfile import (
    Allowance,
    TwinKey,
    Undoing,
    UserFile,
    give_own_copy,
    is_our_link,
    key_in,
    let_go,
    prove_all,
    refuse_visible_change,
    remember_link,
    why_left,
)
from smartcache.store.hashes import Read, recall
from smartcache.store.records import Blob, judge
from smartcache.store.volume import Volume
from smartcache.system.faults import reached
from smartcache.system.hashing import hash_file
from smartcache.system.kernel import (
    Lease,
    StatKey,
    allocated_bytes,
    drop_lease,
    effective_user,
    exchange,
    lease_intact,
    take_lease,
)

GRACE_SECONDS = 0.01
"""A writer may wait for the scheduler between looking a name up and opening it."""

PATIENCE_SECONDS = 60.0
"""How long a writer that came too late may take until its bytes are copied as they are then."""

_REASONS = {errno.EXDEV: "other filesystem", errno.EMLINK: "too many links"}
_log = logging.getLogger(__name__)

Outcome = Literal["replaced", "present", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """What became of one file. `freed` is what the filesystem gave back."""

    path: Path
    outcome: Outcome
    digest: str = ""
    freed: int = 0
    error: Exception | None = None


# do


def replace_many(
    volume: Volume,
    files: Iterable[tuple[Path, str]],
    *,
    batch: Batch,
    owner: int | None = None,
    allow: frozenset[Allowance] = frozenset(),
    follow: bool = True,
    read: Read | None = None,
) -> Iterator[Replacement]:
    """Replace (path, digest) pairs by hard links; what cannot be is returned with its reason.

    Files and blobs are read in full, but those that this run has `read` before. Not `follow`: a
    file is left alone when a folder above it is a symlink.
    """
    read = set() if read is None else read
    proven: set[str] = set()
    remaining = ((Path(os.path.abspath(path)), digest) for path, digest in files)
    postponed: list[tuple[Path, str]] = []
    while chunk := postponed + list(islice(remaining, CHUNK_FILES - len(postponed))):
        blobs: dict[str, os.stat_result] = {}
        opened: list[tuple[UserFile, str]] = []
        postponed, inodes = [], set()
        try:
            for path, digest in chunk:
                found = _open(volume, path, digest, blobs, allow, follow=follow)
                if isinstance(found, UserFile) and digest not in proven:
                    found = _prove_blob(volume, found, digest, read)
                    proven.add(digest)
                if isinstance(found, Replacement):
                    _let_own(volume, found, owner)
                    yield found
                elif found.st.st_ino in inodes:
                    # Two names of one file: replacing one moves the change time of the other.
                    found.release()
                    postponed.append((path, digest))
                else:
                    inodes.add(found.st.st_ino)
                    opened.append((found, digest))
            told = [(f.path, f.st) for f, _ in opened if key_in(volume, f.st) in read]
            prove_all(volume, [file for file, _ in opened], known=recall(volume, told))
            works: list[_Work] = []
            for file, digest in opened:
                error = file.error or _wrong_bytes(file, digest)
                if error is None:
                    works.append(_Work(volume, file, digest))
                else:
                    file.release()
                    yield Replacement(path=file.path, outcome="skipped", digest=digest, error=error)
            results: list[Replacement] = []
            if works:
                with explained(volume.root):
                    results = _replace_chunk(volume, works, batch, owner)
        finally:
            for file, _ in opened:
                file.release()
        yield from results


def _open(
    volume: Volume,
    path: Path,
    digest: str,
    blobs: dict[str, os.stat_result],
    allow: frozenset[Allowance],
    *,
    follow: bool,
) -> UserFile | Replacement:
    """Open a file that may be replaced by a link to a blob; else say why not.

    `blobs` are those of this chunk that were found to be what they should.
    """
    try:
        if digest not in blobs:
            checked(volume, digest)
            try:
                blobs[digest] = os.stat(volume.layout.blob(digest))
            except FileNotFoundError as error:
                raise BlobNotFoundError(f"Blob {digest} was removed", digest=digest) from error
        file = UserFile(path, follow=follow)
    except (SmartcacheError, OSError) as error:
        return Replacement(path=path, outcome="skipped", digest=digest, error=error)
    try:
        if os.path.samestat(file.st, blobs[digest]):
            file.release()
            return Replacement(path=path, outcome="present", digest=digest)
        if not volume.is_here(file.st):
            message = f"{path} is on another filesystem than the blob"
            raise FileSkippedError(message, reason="other filesystem", path=path)
        refuse_visible_change(path, file.st, blobs[digest], allow)
    except FileSkippedError as error:
        file.release()
        return Replacement(path=path, outcome="skipped", digest=digest, error=error)
    return file


def _prove_blob(volume: Volume, file: UserFile, digest: str, read: Read) -> UserFile | Replacement:
    """Hash a blob that a file is going to be replaced by, unless this run has read it."""
    try:
        st = _stat(volume.layout.blob(digest))
        if st is None or key_in(volume, st) not in read:
            prove(volume, digest)
    except (SmartcacheError, OSError) as error:
        file.release()
        return Replacement(path=file.path, outcome="skipped", digest=digest, error=error)
    return file


def _let_own(volume: Volume, found: Replacement, owner: int | None) -> None:
    """Record a file that was the blob's link already."""
    blob = volume.index.blob(found.digest) if found.outcome == "present" else None
    if blob is not None:
        # By the inode it had when it was looked at: it may be gone by now.
        volume.index.add_hard_links(
            [(blob.id, found.path, blob.inode)], filesystem=volume.filesystem, owner=owner
        )


def _wrong_bytes(file: UserFile, digest: str) -> FileSkippedError | None:
    path = file.path
    if file.digest != digest:
        message = f"{path} does not have the bytes of blob {digest[:12]}"
        return FileSkippedError(message, reason="different", path=path)
    if not file.is_proven:
        return FileChangedError(f"{path} was changed a moment ago", path=path)
    return None


class _Work:
    """A file of a chunk: how far its replacement has come."""

    def __init__(self, volume: Volume, file: UserFile, digest: str) -> None:
        temporary = beside(file.path)
        self.file = file
        self.spot = file.spot
        self.path = file.path
        self.digest = digest
        self.temporary = temporary.name
        self.change = Change.before(
            "replace", file.path, digest, file.st, temporary=temporary, real=file.spot.path,
            kind="hardlink", filesystem=volume.filesystem,
        )  # fmt: skip
        self.blob_inode = -1
        self.swapped: StatKey | None = None
        self.lease: Lease = "unsupported"
        self.error: Exception | None = None
        self.is_given_back = False


class _Linked:
    """A blob that gets links in a chunk: each finds it as the one before has left it."""

    def __init__(self, volume: Volume, digest: str) -> None:
        self.path = volume.layout.blob(digest)
        self.blob, self.first = unchanged(volume, digest)
        self._last = self.first
        self.links: list[tuple[int, Path, int]] = []
        self.is_ours = True
        """Whether nothing happened to it but what we did."""

    def before(self, work: _Work) -> Blob:
        """Return it, if its bytes are as they were; others may have linked or unlinked it."""
        now = _stat(self.path)
        verdict = "suspect"
        if self._last is not None and now is not None and os.path.samestat(now, self._last):
            verdict = judge(StatKey.of(self._last), self._last.st_nlink, now)
        self.is_ours &= verdict == "same"
        if self.blob is None or verdict == "suspect":
            message = f"Blob {work.digest[:12]} changed; nothing was replaced"
            raise FileChangedError(message, path=work.path)
        return self.blob

    def after(self) -> None:
        """Remember how our own operation has left it."""
        self._last = _stat(self.path)

    def record(self, volume: Volume, owner: int | None) -> None:
        """Renew its row, and write those of its new links."""
        if self.blob is not None and self.first is not None:
            renew(volume, self.blob, self.first, relinked=not self.is_ours)
        volume.index.add_hard_links(self.links, filesystem=volume.filesystem, owner=owner)


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None


def _replace_chunk(
    volume: Volume, works: list[_Work], batch: Batch, owner: int | None
) -> list[Replacement]:
    batch.begin(work.change for work in works)
    reached("replace: journaled")
    results: list[Replacement] = []
    try:
        # Inside a transaction: the rows stay true.
        with volume.guard("replace"), volume.index.write():
            blobs: dict[str, _Linked] = {}
            for work in works:
                blob = blobs.get(work.digest) or _Linked(volume, work.digest)
                blobs[work.digest] = blob
                try:
                    _swap(work, blob)
                except (SmartcacheError, OSError) as error:
                    work.error = _as_skipped(work.path, error)
            for blob in blobs.values():
                blob.record(volume, owner)
        time.sleep(GRACE_SECONDS)
        for work in works:
            _begin_to_settle(work)
        time.sleep(GRACE_SECONDS)
        results.extend(_end(volume, work, batch) for work in works)
    finally:
        # Ctrl-C or a full disk in the middle: what is not finished is taken back.
        for work in works[len(results) :]:
            batch.end(work.change, "done" if _is_over(work) else "back")
        batch.flush()
    return results


def _is_over(work: _Work) -> bool:
    """Finish or take back a replacement that was interrupted; say whether the file is a link."""
    is_swapped = work.swapped is not None and work.error is None
    if is_swapped and work.spot.inode(work.temporary) is None:
        # The old file is gone already: all that is left is the last look for its writers.
        with suppress(FileSkippedError):
            end_settling(work.spot, work.blob_inode, work.lease, fd=work.file.fd)
            return True
        return False
    take_back(work.spot, work.temporary, work.blob_inode)
    return False


def _as_skipped(path: Path, error: Exception) -> Exception:
    """Word the errors that hold for one file only."""
    reason = _REASONS.get(getattr(error, "errno", None) or 0)
    if reason is None or isinstance(error, SmartcacheError):
        return error
    return FileSkippedError(f"{path}: {reason}", reason=reason, path=path)


def _swap(work: _Work, linked: _Linked) -> None:
    """Exchange the file and a link to the blob."""
    work.blob_inode = -1 if linked.first is None else linked.first.st_ino
    blob = linked.before(work)
    try:
        os.link(linked.path, work.temporary, dst_dir_fd=work.spot.fd)
        reached("replace: temporary linked")
        _exchange(work)
        reached("replace: exchanged")
        old = work.spot.stat(work.temporary)
        if old is None or not work.file.is_untouched(old):
            give_back(work.spot, work.temporary, work.blob_inode)
            message = f"{work.path} was written to; it was left as it is"
            raise FileChangedError(message, path=work.path)
    finally:
        linked.after()
    work.swapped = StatKey.of(os.fstat(work.file.fd))
    work.file.drop_lease()
    linked.links.append((blob.id, work.path, work.blob_inode))


def _exchange(work: _Work) -> None:
    """Let the name and the temporary one change places; the name exists at every moment."""
    spot = work.spot
    if exchange(work.temporary, spot.name, dir_fd=spot.fd):
        return
    # No RENAME_EXCHANGE here: keep the old file under a third name, rename over, rename that.
    spare, here = f"{work.temporary}-old", {"src_dir_fd": spot.fd, "dst_dir_fd": spot.fd}
    os.link(spot.name, spare, **here, follow_symlinks=False)
    try:
        if spot.inode(spare) != work.file.st.st_ino:
            raise FileChangedError(f"{work.path} was replaced meanwhile", path=work.path)
        os.rename(work.temporary, spot.name, **here)
        os.rename(spare, work.temporary, **here)
    except BaseException:
        spot.unlink(spare)
        spot.unlink(work.temporary)
        raise


def _begin_to_settle(work: _Work) -> None:
    if work.error is not None:
        return
    try:
        work.lease = begin_to_settle(
            work.spot, work.temporary, work.blob_inode, work.swapped, fd=work.file.fd
        )
    except (FileSkippedError, OSError) as error:
        work.error = error
        work.is_given_back = True
        return
    reached("replace: old removed")


def _end(volume: Volume, work: _Work, batch: Batch) -> Replacement:
    """Say that a file is replaced, once it is certain that nobody wrote to the old one."""
    if work.error is None:
        try:
            freed = end_settling(work.spot, work.blob_inode, work.lease, fd=work.file.fd)
            batch.end(work.change, "done", freed=freed)
            return Replacement(path=work.path, outcome="replaced", digest=work.digest, freed=freed)
        except (FileSkippedError, OSError) as error:
            work.error = error
            work.is_given_back = True
    take_back(work.spot, work.temporary, work.blob_inode)
    batch.end(work.change, "back")
    if not work.is_given_back and work.spot.inode() == volume.blob_inode(work.digest):
        # Another process has replaced it in the meantime.
        return Replacement(path=work.path, outcome="present", digest=work.digest)
    volume.index.drop_link(work.path)
    return Replacement(path=work.path, outcome="skipped", digest=work.digest, error=work.error)


def begin_to_settle(
    spot: Spot, temporary: str, blob_inode: int, swapped: StatKey | None, *, fd: int
) -> Lease:
    """Unlink the old file under its temporary name, or give it back and raise.

    `swapped` is the old file's stat key right after the exchange, or None if it is not known. The
    lease that is returned goes on watching for writers who looked the old name up and are late.
    """
    lease = take_lease(fd)
    if lease == "busy" or StatKey.of(os.fstat(fd)) != swapped:
        if lease == "held":
            drop_lease(fd)
        give_back(spot, temporary, blob_inode)
        raise _written(spot)
    os.unlink(temporary, dir_fd=spot.fd)
    return lease


def _written(spot: Spot) -> FileBusyError:
    message = f"{spot.path} was opened for writing; it was left as it is"
    return FileBusyError(message, path=spot.path)


def end_settling(spot: Spot, blob_inode: int, lease: Lease, *, fd: int) -> int:
    """Look a last time for writers of the old file; return the bytes that it freed."""
    is_broken = lease == "held" and not lease_intact(fd)
    if lease == "held":
        drop_lease(fd)
    if is_broken:
        _rescue(fd, spot, blob_inode)
        raise _written(spot)
    st = os.fstat(fd)
    return allocated_bytes(st) if st.st_nlink == 0 else 0


def _rescue(fd: int, spot: Spot, blob_inode: int) -> None:
    """Give a file back whose last name is gone: what its late writer writes is copied.

    A nameless inode cannot be linked again (only O_TMPFILE ones can), so its bytes get a new one.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while take_lease(fd) == "busy" and time.monotonic() < deadline:
        time.sleep(0.001)
    drop_lease(fd)
    rescued = beside(spot.path).name
    target = spot.create(rescued)
    try:
        with open(fd, "rb", closefd=False) as source:
            source.seek(0)
            copy_hashed(source, target)
        st = os.fstat(fd)
        with suppress(PermissionError):  # a group this user has left since
            os.fchown(target, -1, st.st_gid)
        write_attributes(target, read_attributes(fd))
        os.fchmod(target, st.st_mode & 0o777)
        os.utime(target, ns=(st.st_atime_ns, st.st_mtime_ns))
        os.fsync(target)
    finally:
        os.close(target)
    give_back(spot, rescued, blob_inode)


def give_back(spot: Spot, temporary: str, blob_inode: int) -> None:
    """Put the old file back under its name and remove our link; what others put there stays.

    Where the name was deleted or renamed over meanwhile, the old file is superseded and goes.
    """
    if not spot.swap_in(temporary, blob_inode):
        spot.unlink(temporary)


def take_back(spot: Spot, temporary: str, blob_inode: int) -> None:
    """Take a replacement back that got no further than the two names: as it was before."""
    found = spot.inode(temporary)
    if found == blob_inode:
        spot.unlink(temporary)
    elif found is not None:
        give_back(spot, temporary, blob_inode)


# finish after a crash


def finish(volume: Volume, change: Change, spot: Spot) -> State:
    """Let a replacement that was killed be whole, if the old file has the blob's bytes."""
    if change.temporary is None:
        return "back"
    blob_inode = volume.blob_inode(change.digest)
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
    remember_link(volume, change, blob_inode)
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


# undo


def undo(volume: Volume, change: Change, undoing: Undoing) -> str:
    """Give a file its own bytes again, or the inode that it was one with before."""
    key = twin_key(change, undoing.files)
    twin = undoing.twins.get(key)
    if not is_our_link(volume, change, is_last=twin is not None):
        return why_left(change)
    twin = twin or _old_file(volume, change)
    if twin is None or not _link_to_twin(volume, change, twin, undoing.batch):
        give_own_copy(volume, change, undoing.batch, undoing.job)
        undoing.twins[key] = change.place
    reached("undo: own bytes")
    let_go(volume, change.path)
    return ""


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


def _old_file(volume: Volume, change: Change) -> Path | None:
    """Return another name of the very file that was replaced, if it was seen and is still there."""
    if (change.links or 1) == 1 or change.inode is None or change.filesystem is None:
        return None
    wanted = (change.size, change.mtime_ns, change.mode, change.uid, change.gid)
    for path in volume.catalog.paths_of(change.filesystem, change.inode):
        with suppress(OSError):
            st = os.lstat(path)
            found = (st.st_size, st.st_mtime_ns, st.st_mode & 0o7777, st.st_uid, st.st_gid)
            if st.st_ino == change.inode and found == wanted and stat.S_ISREG(st.st_mode):
                return Path(os.path.realpath(path.parent), path.name)
    return None


def _link_to_twin(volume: Volume, change: Change, twin: Path, batch: Batch) -> bool:
    """Make `change.path` one inode with a file it was one with before; say whether it worked."""
    with Spot(change.place) as spot, Spot(twin) as other:
        st, linked = other.stat(), spot.stat()
        if st is None or linked is None or os.fstat(spot.fd).st_dev != st.st_dev:
            return False
        is_same = (st.st_size, st.st_mtime_ns) == (change.size, change.mtime_ns)
        if not is_same or not stat.S_ISREG(st.st_mode) or st.st_uid != effective_user():
            return False
        temporary = beside(change.path)
        (note,) = batch.begin([changed(change, op="own", temporary=temporary)])
        os.link(
            other.name, temporary.name, src_dir_fd=other.fd, dst_dir_fd=spot.fd,
            follow_symlinks=False,
        )  # fmt: skip
        is_done = False
        if spot.inode(temporary.name) == st.st_ino:
            with own_unlink(volume, change.digest):
                is_done = spot.swap_in(temporary.name, linked.st_ino)
        spot.unlink(temporary.name)
        batch.end(note, "done")
    return is_done
