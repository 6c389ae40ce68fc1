"""Make an existing file a blob, in place: the file keeps its path, inode, owner, time and bytes.

Only its mode changes (no write permission), which is journaled first and given back by undo. Files
that somebody writes, incomplete downloads, empty files and files of other users are refused with a
reason. A file that is written to while it is adopted stays the user's: the store
takes its name back.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
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
from smartcache.store.blobs import Expected, check_expected, explained
from smartcache.store.digest import Algorithm, check_hex
from smartcache.store.faults import reached
from smartcache.store.hold import Held, hold
from smartcache.store.journal import Batch, Change, Op
from smartcache.store.memos import Known, hash_all
from smartcache.store.proof import checked
from smartcache.store.records import Trust
from smartcache.store.schema import signed
from smartcache.store.volume import Volume

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


def adopt_many(  # noqa: PLR0913 - one for each option of the store's method
    volume: Volume,
    paths: Iterable[Path],
    *,
    batch: Batch,
    algorithms: Iterable[Algorithm] = (),
    expected: Expected | None = None,
    owner: int | None = None,
    moving_to: str | None = None,
    follow: bool = True,
    progress: Progress = silent,
) -> Iterator[Adoption]:
    """Adopt files, a chunk at a time; what cannot be is returned with its reason, not raised.

    `follow`: of a symlink, as in HF snapshots, the file behind it is adopted.

    `moving_to` is the pin of files that are about to be moved into the store: the journal says so
    from the start.
    """
    announced = {name: check_hex(name, value) for name, value in (expected or {}).items()}
    wanted: tuple[Algorithm, ...] = tuple(dict.fromkeys(("blake3", *announced, *algorithms)))
    remaining = iter(paths)
    while chunk := [_look_behind(path, follow) for path in islice(remaining, CHUNK_FILES)]:
        known = hash_all(volume, [path for path, _ in chunk], wanted, progress=progress)
        digests = volume.index.known_digests({hashes.digest for hashes, _ in known.values()})
        held: list[Held] = []
        try:
            for path, st in chunk:
                if st is not None and not volume.is_here(st):
                    yield _elsewhere(volume, path)
                    continue
                found = _examine(
                    volume, path, wanted, announced, known.get(path), digests, progress, follow
                )
                _let_own(volume, found, owner)
                if isinstance(found, Adoption):
                    yield found
                else:
                    held.append(found)
            results = _adopt_chunk(volume, held, batch, owner, moving_to) if held else []
        finally:
            for file in held:
                file.release()
        yield from results


def _look_behind(path: Path, follow: bool) -> tuple[Path, os.stat_result | None]:  # noqa: FBT001
    """Return the file behind a symlink, if it is to be followed; else the path; and its stat."""
    try:
        st = os.lstat(path)
        if follow and stat.S_ISLNK(st.st_mode):
            path = Path(os.path.realpath(path))
            st = os.lstat(path)
    except OSError:
        return path, None
    return path, st


def _elsewhere(volume: Volume, path: Path) -> Adoption:
    message = f"{path} is on another filesystem than the store {volume.root}"
    hint = "Copy it, or make a volume there: smartcache add --adopt --make-volume."
    error = FileSkippedError(message, hint=hint, reason="other filesystem", path=path)
    return Adoption(path=path, outcome="skipped", error=error)


def _examine(
    volume: Volume,
    path: Path,
    wanted: tuple[Algorithm, ...],
    expected: Expected,
    known: Known | None,
    digests: set[str],
    progress: Progress,
    follow: bool,  # noqa: FBT001
) -> Held | Adoption:
    """Hold a file that can be adopted; else say what it is. `digests` have a row already."""
    file: Held | None = None
    try:
        if known is None:
            with progress("Hashing", os.lstat(path).st_size, "bytes") as job:
                job.describe(path.name)
                file = hold(volume, path, wanted, advance=job.advance, follow=follow)
        else:
            file = hold(volume, path, wanted, known=known, follow=follow)
        check_expected(file.hashes, expected, what=str(path))
        present = None
        if known is None or file.hashes.digest in digests:
            present = _already_there(volume, file)
        if present is None:
            held, file = file, None
            return held
    except OSError as error:
        if not _is_of_the_file(error):
            raise
        return Adoption(path=path, outcome="skipped", error=error)
    finally:
        if file is not None:
            file.release()
    return present


def _is_of_the_file(error: OSError) -> bool:
    """Say whether an error is about one file, so that the others can go on; not about the store."""
    if isinstance(error, StoreError):
        return isinstance(error, (FileSkippedError, DigestMismatchError))
    return error.errno not in _OF_THE_STORE


def _already_there(volume: Volume, file: Held) -> Adoption | None:
    digest = file.hashes.digest
    try:
        blob = checked(volume, digest)
    except (BlobNotFoundError, DamagedBlobError):
        return None
    volume.index.add_aliases(blob.id, file.hashes.values)
    outcome: Outcome = "present" if blob.inode == signed(file.st.st_ino) else "duplicate"
    return Adoption(path=file.path, outcome=outcome, digest=digest, size=blob.size)


@dataclass(slots=True, kw_only=True)
class _Work:
    """A file of a chunk: how far its adoption has come."""

    file: Held
    change: Change
    is_begun: bool = False
    outcome: Outcome | None = None
    error: OSError | None = None

    @property
    def is_linked(self) -> bool:
        return self.outcome in ("adopted", "present")


def _adopt_chunk(
    volume: Volume, held: list[Held], batch: Batch, owner: int | None, moving_to: str | None
) -> list[Adoption]:
    op: Op = "adopt" if moving_to is None else "move"
    changes = [
        Change.before(
            op,
            f.path,
            f.hashes.digest,
            f.st,
            real=f.spot.path,
            kind=moving_to,
            filesystem=volume.filesystem,
        )
        for f in held
    ]
    with explained(volume.root):
        begun = batch.begin(changes)
        reached("adopt: journaled")
        works = [_Work(file=f, change=change) for f, change in zip(held, begun, strict=True)]
        is_recorded = False
        try:
            with volume.guard("adopt"):
                for work in works:
                    _attempt(volume, work)
                _write_rows(volume, works, owner)
                is_recorded = True
        finally:
            _settle(volume, works, batch, owner, is_recorded=is_recorded)
    results = [_result(volume, work) for work in works]
    for result in results:
        _let_own(volume, result, owner)
    batch.flush()
    return results


def _attempt(volume: Volume, work: _Work) -> None:
    work.is_begun = True
    try:
        work.outcome = _link_one(volume, work.file)
    except OSError as error:
        if not _is_of_the_file(error):
            raise
        work.outcome, work.error = "skipped", error


def _settle(
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
            is_kept = is_recorded or not _take_back(volume, work.file)
            batch.end(work.change, "done" if is_kept else "back")
        elif work.outcome is not None or not work.is_begun:
            batch.end(work.change, "back")


def _result(volume: Volume, work: _Work) -> Adoption:
    """Say what became of a file; one whose bytes another had first is looked up again."""
    file = work.file
    if work.is_linked and work.outcome is not None:
        digest, size = file.hashes.digest, file.st.st_size
        return Adoption(path=file.path, outcome=work.outcome, digest=digest, size=size)
    present = _already_there(volume, file) if work.error is None else None
    if present is not None:
        return present
    message = f"{file.path} changed while it was adopted"
    error = work.error or FileChangedError(message, path=file.path)
    return Adoption(path=file.path, outcome="skipped", error=error)


def _take_back(volume: Volume, file: Held) -> bool:
    """Take the store's name off a file whose row could not be written; False if it has a row."""
    target = volume.layout.blob(file.hashes.digest)
    with volume.guard("take an adoption back", exclusive=True):
        blob = volume.index.blob(file.hashes.digest)
        if blob is not None and blob.is_here:
            return False
        if _is_inode_of(file, target):
            os.unlink(target)
        os.fchmod(file.fd, file.st.st_mode & 0o7777)
    return True


def _let_own(volume: Volume, found: Held | Adoption, owner: int | None) -> None:
    """Let the owner hold a blob that was there already."""
    if owner is None or isinstance(found, Held) or not found.digest:
        return
    blob = volume.index.blob(found.digest)
    if blob is None:
        return
    with volume.index.write():
        volume.index.hold(owner, blob.id)
        if found.outcome == "present":
            path, inode = str(found.path), blob.inode
            volume.index.add_link(
                path,
                blob.id,
                kind="hardlink",
                filesystem=volume.filesystem,
                inode=inode,
                owner=owner,
            )


def _link_one(volume: Volume, file: Held) -> Outcome:
    """Make a file read-only and link it; else its mode is as before, and the reason raised."""
    target = volume.layout.blob(file.hashes.digest)
    mode = file.st.st_mode & 0o7777
    try:
        _make_read_only(file, mode & 0o555)
        reached("adopt: read-only")
        _link(volume, file, target)
    except FileExistsError:
        if _is_inode_of(file, target):
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


def _make_read_only(file: Held, mode: int) -> None:
    try:
        os.fchmod(file.fd, mode)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        # A part of the store's own disk that is mounted read-only; the store can be written.
        raise OSError(errno.EPERM, os.strerror(errno.EPERM)) from error


def _is_inode_of(file: Held, target: str) -> bool:
    try:
        return os.path.samestat(os.stat(target), file.st)
    except FileNotFoundError:
        return False


def _link(volume: Volume, file: Held, target: str) -> None:
    spot = file.spot
    try:
        os.link(spot.name, target, src_dir_fd=spot.fd, follow_symlinks=False)
    except FileNotFoundError:
        volume.layout.make_blob_directory(file.hashes.digest, sync=False)
        os.link(spot.name, target, src_dir_fd=spot.fd, follow_symlinks=False)


def _write_rows(volume: Volume, works: list[_Work], owner: int | None) -> None:
    """Write the rows, marked as not synced in this boot.

    Neither the bytes nor the directory are fsynced: after power loss, which is another boot, such a
    blob is hashed before use, and a missing one is noticed. The user's file is there in any case.
    """
    index = volume.index
    linked = [work.file for work in works if work.is_linked]
    with index.write():
        index.add_linked_blobs(
            (_row(file) for file in linked),
            unsynced=volume.boot,
            filesystem=volume.filesystem,
            owner=owner,
        )
        for file in linked:
            if len(file.hashes.values) > 1:
                blob = index.blob(file.hashes.digest)
                if blob is not None:
                    index.add_aliases(blob.id, file.hashes.values)
    reached("adopt: rows written")


def _row(file: Held) -> tuple[str, os.stat_result, Trust, str]:
    st = os.fstat(file.fd)
    is_same = (st.st_size, st.st_mtime_ns) == (file.st.st_size, file.st.st_mtime_ns)
    trust = Trust.VERIFIED if file.is_proven and is_same else Trust.UNPROVEN
    return file.hashes.digest, st, trust, str(file.path)
