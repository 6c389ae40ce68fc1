"""Make an existing file a blob, in place: the file keeps its path, inode, owner, time and bytes.

Only its mode changes (no write permission), which is journaled first and given back by undo. Files
that somebody writes, incomplete downloads, empty files and files of other users are refused with a
reason. A file that is written to while it is adopted stays the user's: the store takes its name
back.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Literal

from smartcache.errors import (
    BlobNotFoundError,
    DamagedBlobError,
    DigestMismatchError,
    FileChangedError,
    FileSkippedError,
    StoreError,
)
from smartcache.progress import Progress, silent
from smartcache.store.blobs import Expected, check_expected, checked, explained
from smartcache.store.changes.journal import Batch, Change, State
from smartcache.store.changes.spot import Spot
from smartcache.store.changes.userfile import (
    LEFT_ALONE,
    Undoing,
    UserFile,
    give_own_copy,
    is_blob,
    is_our_link,
    key_in,
    let_go,
    prove_all,
    remember_link,
    why_left,
)
from smartcache.store.hashes import Read, recall
from smartcache.store.owners import keepers_of, link_liveness
from smartcache.store.records import Trust
from smartcache.store.volume import Volume
from smartcache.system.faults import reached
from smartcache.system.hashing import Algorithm, check_hex
from smartcache.system.sqlite import signed

CHUNK_FILES = 256
"""Files per journal fsync and per transaction: a few milliseconds under the store's lock."""

_REASONS = {
    errno.EXDEV: "other filesystem",  # a bind mount of the same disk
    errno.EMLINK: "too many links",
    errno.EPERM: "cannot be changed",  # immutable
    errno.EACCES: "cannot be changed",
    errno.ENOENT: "was removed",
}
_OF_THE_STORE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}

Outcome = Literal["adopted", "present", "duplicate", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """What became of one file.

    "present": it is a blob already. "duplicate": its bytes are a blob already, in another inode; it
    was not touched.
    """

    path: Path
    outcome: Outcome
    digest: str = ""
    size: int = 0
    error: Exception | None = None


# do


def adopt_many(  # noqa: PLR0913 - what is known of the files, and what must be
    volume: Volume,
    paths: Iterable[Path],
    *,
    batch: Batch,
    algorithms: Iterable[Algorithm] = (),
    expected: Expected | None = None,
    owner: int | None = None,
    follow: bool = True,
    digests: Mapping[Path, str] | None = None,
    read: Read | None = None,
    progress: Progress = silent,
) -> Iterator[Adoption]:
    """Adopt files, a chunk at a time; what cannot be is returned with its reason, not raised.

    They are read in full, but those that this run has `read` before, and those that stay as they
    are because their bytes are a blob already; what is adopted is added to `read`. `digests` are
    those that some must have. `follow`: of a symlink, as in HF snapshots, the file behind it is
    adopted.
    """
    read = set() if read is None else read
    announced = {name: check_hex(name, value) for name, value in (expected or {}).items()}
    wanted: tuple[Algorithm, ...] = tuple(dict.fromkeys((*announced, *algorithms)))
    remaining = iter(paths)
    while chunk := list(islice(remaining, CHUNK_FILES)):
        files: list[UserFile] = []
        try:
            found = [_open(volume, path, follow=follow) for path in chunk]
            files += [each for each in found if isinstance(each, UserFile)]
            told = _told(volume, files, read)
            prove_all(volume, files, wanted, known=told, progress=progress)
            known = volume.index.known_digests(f.digest for f in files if f.error is None)
            works: list[_Work] = []
            for each in found:
                result = each
                if isinstance(each, UserFile):
                    digest = (digests or {}).get(each.path)
                    must = announced if digest is None else {**announced, "blake3": digest}
                    result = _present(volume, each, must, known) or each
                    if result is each and each.path in told and key_in(volume, each.st) not in read:
                        message = f"{each.path} changed while it was adopted"
                        error = FileChangedError(message, path=each.path)
                        result = Adoption(path=each.path, outcome="skipped", error=error)
                if isinstance(result, Adoption):
                    _let_own(volume, result, owner)
                    yield result
                else:
                    works.append(_Work(volume, result))
            results = _adopt_chunk(volume, works, batch, owner) if works else []
            linked = [(work, os.fstat(work.file.fd)) for work in works if work.is_linked]
            read.update(key_in(volume, st) for work, st in linked if work.proves(st))
        finally:
            for file in files:
                file.release()
        yield from results


def _told(
    volume: Volume, files: Sequence[UserFile], read: Read
) -> dict[Path, dict[Algorithm, str]]:
    """Return what is known of files that this run has read, or whose bytes are a blob already."""
    known = recall(volume, [(file.path, file.st) for file in files])
    digests = volume.index.known_digests(each["blake3"] for each in known.values() if each)
    whole = {digest for digest in digests if _is_whole(volume, digest)}
    return {
        file.path: known[file.path]
        for file in files
        if key_in(volume, file.st) in read or known[file.path].get("blake3") in whole
    }


def _is_whole(volume: Volume, digest: str) -> bool:
    try:
        checked(volume, digest)
    except (BlobNotFoundError, DamagedBlobError):
        return False
    return True


def _open(volume: Volume, path: Path, *, follow: bool) -> UserFile | Adoption:
    """Open a file that can be adopted, of a symlink the one behind it; else say why not."""
    try:
        st = os.lstat(path)
        if follow and stat.S_ISLNK(st.st_mode):
            path = Path(os.path.realpath(path))
            st = os.lstat(path)
        if not volume.is_here(st):
            message = f"{path} is on another filesystem than the store {volume.root}"
            hint = "Copy it, or make a volume there: smartcache add --adopt --make-volume."
            raise FileSkippedError(message, hint=hint, reason="other filesystem", path=path)
        return UserFile(path, follow=follow)
    except OSError as error:
        if not _is_of_the_file(error):
            raise
        return Adoption(path=path, outcome="skipped", error=error)


def _is_of_the_file(error: Exception) -> bool:
    """Say whether an error is about one file, so that the others can go on; not about the store."""
    if isinstance(error, StoreError):
        return isinstance(error, (FileSkippedError, DigestMismatchError))
    return isinstance(error, OSError) and error.errno not in _OF_THE_STORE


def _present(
    volume: Volume, file: UserFile, expected: Expected, known: set[str]
) -> Adoption | None:
    """Say what a file is if it cannot or need not be adopted; `known` digests have a row."""
    error = file.error
    if error is None:
        try:
            check_expected(file.hashes, expected, what=str(file.path))
        except DigestMismatchError as mismatch:
            error = mismatch
    if error is not None:
        if not _is_of_the_file(error):
            raise error
        return Adoption(path=file.path, outcome="skipped", error=error)
    return _already_there(volume, file) if file.digest in known else None


def _already_there(volume: Volume, file: UserFile) -> Adoption | None:
    digest = file.digest
    try:
        blob = checked(volume, digest)
    except (BlobNotFoundError, DamagedBlobError):
        return None
    volume.index.add_aliases(digest, file.hashes.values)
    outcome: Outcome = "present" if blob.inode == signed(file.st.st_ino) else "duplicate"
    return Adoption(path=file.path, outcome=outcome, digest=digest, size=blob.size)


class _Work:
    """A file of a chunk: how far its adoption has come."""

    def __init__(self, volume: Volume, file: UserFile) -> None:
        self.file = file
        self.change = Change.before(
            "adopt", file.path, file.digest, file.st, real=file.spot.path,
            filesystem=volume.filesystem,
        )  # fmt: skip
        self.target = volume.layout.blob(file.digest)
        self.is_begun = False
        self.outcome: Outcome | None = None
        self.error: Exception | None = None

    @property
    def is_linked(self) -> bool:
        return self.outcome in ("adopted", "present")

    def proves(self, st: os.stat_result) -> bool:
        """Say whether the file surely has, when it looks like `st`, the bytes that were read."""
        is_same = (st.st_size, st.st_mtime_ns) == (self.file.st.st_size, self.file.st.st_mtime_ns)
        return self.file.is_proven and is_same


def _adopt_chunk(
    volume: Volume, works: list[_Work], batch: Batch, owner: int | None
) -> list[Adoption]:
    with explained(volume.root):
        batch.begin(work.change for work in works)
        reached("adopt: journaled")
        is_recorded = False
        try:
            with volume.guard("adopt"):
                for work in works:
                    work.is_begun = True
                    try:
                        work.outcome = _link_one(volume, work)
                    except OSError as error:
                        if not _is_of_the_file(error):
                            raise
                        work.outcome, work.error = "skipped", error
                _write_rows(volume, works, owner)
                is_recorded = True
        finally:
            _note_outcomes(volume, works, batch, owner, is_recorded=is_recorded)
    results = [_result(volume, work) for work in works]
    for result in results:
        if result.outcome == "duplicate":
            _let_own(volume, result, owner)
    batch.flush()
    return results


def _link_one(volume: Volume, work: _Work) -> Outcome:
    """Make a file read-only and link it; else its mode is as before, and the reason raised."""
    file, target = work.file, work.target
    mode = file.st.st_mode & 0o7777
    try:
        try:
            os.fchmod(file.fd, mode & 0o555)
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            # A part of the store's own disk that is mounted read-only; the store can be written.
            raise OSError(errno.EPERM, os.strerror(errno.EPERM)) from error
        reached("adopt: read-only")
        try:
            file.spot.link_to(target)
        except FileNotFoundError:
            volume.layout.make_blob_directory(file.digest, sync=False)
            file.spot.link_to(target)
    except FileExistsError:
        if is_blob(volume, file.digest, file.st):
            return "present"  # another name of this very file was just adopted
        os.fchmod(file.fd, mode)
        return "duplicate"
    except BaseException as error:
        with suppress(OSError):
            os.fchmod(file.fd, mode)
        reason = _REASONS.get(getattr(error, "errno", None) or 0)
        if reason is None or isinstance(error, StoreError):  # ours tells of the store
            raise
        raise FileSkippedError(f"{file.path}: {reason}", reason=reason, path=file.path) from error
    reached("adopt: linked")
    if not file.is_untouched(os.stat(target)):
        # A writer waits in open(), or the file was replaced: the name was not ours to take.
        os.unlink(target)
        os.fchmod(file.fd, mode)
        raise FileChangedError(f"{file.path} was opened for writing", path=file.path)
    return "adopted"


def _write_rows(volume: Volume, works: list[_Work], owner: int | None) -> None:
    """Write the rows, marked as not synced in this boot.

    Neither the bytes nor the directory are fsynced: after power loss, which is another boot, such a
    blob is hashed before use, and a missing one is noticed. The user's file is there in any case.
    """
    linked = [work.file for work in works if work.is_linked]
    rows = []
    for work in works:
        if work.is_linked:
            st = os.fstat(work.file.fd)
            trust = Trust.VERIFIED if work.proves(st) else Trust.UNPROVEN
            rows.append((work.file.digest, st, trust, str(work.file.path)))
    with volume.index.write():
        volume.index.add_linked_blobs(
            rows, unsynced=volume.boot, filesystem=volume.filesystem, owner=owner
        )
        for file in linked:
            volume.index.add_aliases(file.digest, file.hashes.values)
    reached("adopt: rows written")


def _note_outcomes(
    volume: Volume, works: list[_Work], batch: Batch, owner: int | None, *, is_recorded: bool
) -> None:
    """Write the outcomes of a chunk to the journal.

    After a full disk or Ctrl-C in the middle, what was linked gets its row or is taken back, what
    was not begun stays as it was, and the file in work is looked at by the next open.
    """
    if not is_recorded:
        with suppress(StoreError, OSError), volume.guard("adopt"):
            _write_rows(volume, works, owner)
            is_recorded = True
    for work in works:
        if work.is_linked:
            is_kept = is_recorded or not _take_back(volume, work)
            batch.end(work.change, "done" if is_kept else "back")
        elif work.outcome is not None or not work.is_begun:
            batch.end(work.change, "back")


def _take_back(volume: Volume, work: _Work) -> bool:
    """Take the store's name off a file whose row could not be written; False if it has a row."""
    file = work.file
    with volume.guard("take an adoption back", exclusive=True):
        if volume.index.blob(file.digest) is not None:
            return False
        if is_blob(volume, file.digest, file.st):
            os.unlink(work.target)
        os.fchmod(file.fd, file.st.st_mode & 0o7777)
    return True


def _result(volume: Volume, work: _Work) -> Adoption:
    """Say what became of a file; one whose bytes another had first is looked up again."""
    file = work.file
    if work.is_linked and work.outcome is not None:
        digest, size = file.digest, file.st.st_size
        return Adoption(path=file.path, outcome=work.outcome, digest=digest, size=size)
    present = _already_there(volume, file) if work.error is None else None
    if present is not None:
        return present
    message = f"{file.path} changed while it was adopted"
    error = work.error or FileChangedError(message, path=file.path)
    return Adoption(path=file.path, outcome="skipped", error=error)


def _let_own(volume: Volume, found: Adoption, owner: int | None) -> None:
    """Let the owner hold a blob that was there already."""
    blob = volume.index.blob(found.digest) if owner is not None and found.digest else None
    if owner is None or blob is None:
        return
    with volume.index.write():
        volume.index.hold(owner, blob.id)
        if found.outcome == "present":
            volume.index.add_link(
                str(found.path), blob.id, kind="hardlink", filesystem=volume.filesystem,
                inode=blob.inode, owner=owner,
            )  # fmt: skip


# finish after a crash


def finish(volume: Volume, change: Change, spot: Spot) -> State:
    """Let an adoption that was killed be whole, or give the file its mode back."""
    blob_inode, found = volume.blob_inode(change.digest), spot.inode()
    if blob_inode is not None and blob_inode == found:
        remember_link(volume, change, blob_inode)
        return "done"
    if found is not None and found == change.inode and change.mode is not None:
        spot.give_mode(change.mode, inode=found, links=change.links or 1)
    return "back"


# undo


def undo(volume: Volume, change: Change, undoing: Undoing) -> str:
    """Take the store's name off a file and give its mode back; a shared file gets own bytes."""
    if not is_our_link(volume, change):
        return _restore_mode(change)
    if not is_blob(volume, change.digest, os.lstat(change.place)) and not _restore_mode(change):
        # The store has other bytes of its own, as after its folder was copied to another disk.
        let_go(volume, change.path)
        return ""
    # If this process dies between taking the blob's name away and restoring the mode, the next open
    # finds this note and restores it.
    (note,) = undoing.batch.begin([replace(change, op="own", temporary=None)], sync=False)
    with volume.guard("undo", exclusive=True):
        blob = volume.index.record(change.digest)
        if _is_alone(volume, change, undoing):
            if blob is not None:
                with volume.index.write(durable=True):
                    volume.index.drop_blob(blob.id)
            reached("undo: row removed")
            os.unlink(volume.layout.blob(change.digest))
            reached("undo: blob removed")
            reason = _restore_mode(change)
            undoing.batch.end(note, "done")
            return reason
    undoing.batch.end(note, "back")
    give_own_copy(volume, change, undoing.batch, undoing.job)
    let_go(volume, change.path)
    return ""


def needed_bytes(change: Change, leaving: int) -> int:
    """Return what undoing copies, once so many links of the blob have left."""
    links = os.lstat(change.place).st_nlink - leaving
    return change.size if links > _links_with_store(change) else 0


def _links_with_store(change: Change) -> int:
    """Return the links an adopted file has when nobody but the store has joined it."""
    return (change.links or 1) + 1


def _is_alone(volume: Volume, change: Change, undoing: Undoing) -> bool:
    """Say whether nobody needs a blob but the adopted file, under its own old names.

    No other file was made one with it, and no owner holds it besides the file's own.
    """
    try:
        st = os.lstat(change.place)
    except FileNotFoundError:
        return False
    if st.st_nlink > _links_with_store(change) or not is_blob(volume, change.digest, st):
        return False
    blob = volume.index.record(change.digest)
    if blob is None:
        return True
    old_names = undoing.old_names.get((change.digest, change.inode), set()) | {change.path}
    is_shared = any(
        link.kind == "hardlink"
        and link.path in undoing.joined
        and link.path not in old_names
        and link.inode == signed(st.st_ino)
        and link_liveness(link) == "live"
        for link in volume.index.links_of(blob.id)
    )
    if is_shared:
        return False
    link = volume.index.link(change.path)
    through = None if link is None else link.owner
    return all(owner.id == through for owner, _ in keepers_of(volume, blob))


def _restore_mode(change: Change) -> str:
    """Give an adopted file its mode back, whatever was written into it since."""
    if not os.path.lexists(change.place):
        return why_left(change)
    with Spot(change.place) as spot:
        st = spot.stat()
        if st is None or change.mode is None or st.st_ino != change.inode:
            return LEFT_ALONE
        if stat.S_IMODE(st.st_mode) not in (change.mode, change.mode & 0o555):
            return LEFT_ALONE  # somebody chose another mode since
        return spot.give_mode(change.mode, inode=st.st_ino, links=change.links or 1)
