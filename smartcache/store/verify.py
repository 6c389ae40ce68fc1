"""Compare the index with the disk, name every difference, and heal what can be healed.

Quick looks at stat keys and hashes only blobs that stat cannot vouch for; full hashes every blob
again. A damaged blob goes to `bad/` and its row is marked as lost, never deleted: whoever brings
the right bytes back (a link outside, another volume, a new download) finds its aliases, links and
owners as they were.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from smartcache.errors import (
    BlobNotFoundError,
    DamagedBlobError,
    FileChangedError,
    LeaseTimeoutError,
    SmartcacheError,
)
from smartcache.progress import Job, Progress, silent
from smartcache.store.blobs import commit, put_stream
from smartcache.store.digest import Hashes, hash_file
from smartcache.store.layout import is_digest
from smartcache.store.owners import link_liveness
from smartcache.store.proof import CHUNK, needs_hash, prove
from smartcache.store.records import Blob, Link, Trust
from smartcache.store.safety import open_own
from smartcache.store.statkey import judge
from smartcache.store.volume import Volume, all_blobs, known_as

_PAGE = 1000


@dataclass(slots=True, kw_only=True)
class VerifyReport:
    """Every difference that was found, by digest or path, and what was healed."""

    is_full: bool
    blobs: int = 0
    hashed_size: int = 0
    damaged: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unindexed: list[str] = field(default_factory=list)
    stray: list[Path] = field(default_factory=list)
    """Files under `blobs/` whose name is not a digest; left alone."""
    writable: list[str] = field(default_factory=list)
    """Blobs somebody had made writable; their bytes were hashed and the mode set back."""
    dead_links: list[Path] = field(default_factory=list)
    healed: list[str] = field(default_factory=list)

    @property
    def has_damage(self) -> bool:
        """Say whether bytes are damaged or missing that were not healed."""
        return bool(set(self.damaged + self.missing) - set(self.healed))


def verify(
    volume: Volume,
    *,
    full: bool = False,
    repair: bool = False,
    others: Iterable[Volume] = (),
    progress: Progress = silent,
) -> VerifyReport:
    """Check every blob and link of a volume; `repair` heals from links outside and `others`.

    Without `repair` nobody is waited for: what could not be recorded is found again next time.
    """
    with nullcontext() if repair else volume.in_haste():
        return _verify(volume, full=full, repair=repair, others=others, progress=progress)


def _verify(
    volume: Volume, *, full: bool, repair: bool, others: Iterable[Volume], progress: Progress
) -> VerifyReport:
    report = VerifyReport(is_full=full)
    total = volume.index.totals()
    label = "Hashing blobs" if full else "Checking blobs"
    size, unit = (total.size, "bytes") if full else (total.blobs, "items")
    with progress(label, size, unit) as job:  # type: ignore[arg-type]
        for blob in all_blobs(volume):
            _check_blob(volume, blob, report, job)
    for digest in list(_unindexed(volume, report)):
        report.unindexed.append(digest)
        if full or repair or not os.path.isfile(volume.layout.blob(digest)):
            _index_orphan(volume, digest, report)
    _check_links(volume, report, repair=repair)
    if repair:
        sources = list(others)
        for digest in [*report.damaged, *report.missing]:
            if heal(volume, digest, sources):
                report.healed.append(digest)
    return report


def _check_blob(volume: Volume, blob: Blob, report: VerifyReport, job: Job) -> None:
    digest = blob.digest
    if blob.trust == Trust.TRASHED:
        return
    report.blobs += 1
    if not report.is_full:
        job.advance()
    try:
        st = os.lstat(volume.layout.blob(digest))
    except FileNotFoundError:
        _check_missing(volume, digest, report)
        return
    is_writable = bool(st.st_mode & 0o222) and stat.S_ISREG(st.st_mode)
    if is_writable:
        report.writable.append(digest)
    is_relinked = judge(recorded=blob.key, recorded_links=blob.links, current=st) == "relinked"
    is_queued = is_relinked or blob.trust == Trust.RELINKED
    if report.is_full or is_writable or is_queued or needs_hash(volume, blob, st):
        job.describe(known_as(volume, blob))
        advance = job.advance if report.is_full else None
        try:
            prove(volume, digest, advance=advance)
            report.hashed_size += st.st_size
        except (DamagedBlobError, FileChangedError):
            report.damaged.append(digest)
        except BlobNotFoundError:
            _check_missing(volume, digest, report)
        except LeaseTimeoutError:
            report.hashed_size += st.st_size  # its bytes are right, but the row stays as it is


def _check_missing(volume: Volume, digest: str, report: VerifyReport) -> None:
    """Report a blob as missing, unless somebody has removed it properly meanwhile."""
    with suppress(LeaseTimeoutError), volume.guard("verify", exclusive=True):
        blob = volume.index.blob(digest)
        if blob is not None and os.path.lexists(volume.layout.blob(digest)):
            return
        if blob is not None and blob.trust != Trust.TRASHED:
            volume.index.mark_gone(blob.id)
    blob = volume.index.blob(digest)
    if blob is not None and blob.trust != Trust.TRASHED:
        report.missing.append(digest)


def _unindexed(volume: Volume, report: VerifyReport) -> Iterator[str]:
    for directory in sorted(os.listdir(volume.layout.blobs)):
        folder = volume.layout.blobs / directory
        if not folder.is_dir():
            if folder != volume.layout.tag:
                report.stray.append(folder)
            continue
        for name in sorted(os.listdir(folder)):
            if not is_digest(name) or name[:2] != directory:
                report.stray.append(folder / name)
                continue
            if not _has_row(volume, name) and _is_orphan(volume, name):
                yield name


def _has_row(volume: Volume, digest: str) -> bool:
    blob = volume.index.blob(digest)
    return blob is not None and blob.is_here


def _is_orphan(volume: Volume, digest: str) -> bool:
    """Say whether a file has no row, when nobody is between linking one and writing its row."""
    with suppress(LeaseTimeoutError), volume.guard("verify", exclusive=True):
        return not _has_row(volume, digest) and os.path.lexists(volume.layout.blob(digest))
    return False


def _index_orphan(volume: Volume, digest: str, report: VerifyReport) -> None:
    try:
        prove(volume, digest)
    except BlobNotFoundError:
        return
    except (DamagedBlobError, FileChangedError):
        report.damaged.append(digest)
    except LeaseTimeoutError:
        pass  # its bytes are right; it gets its row next time


def _check_links(volume: Volume, report: VerifyReport, *, repair: bool) -> None:
    after = ""
    while page := volume.index.links_after(after, _PAGE):
        after = os.fsdecode(os.fsencode(page[-1].path))
        dead = [link for link in page if link_liveness(volume, link) == "dead"]
        shared = ("hardlink", "symlink")
        report.dead_links.extend(link.path for link in dead if link.kind in shared)
        if repair:
            with volume.index.write():
                for link in dead:
                    volume.index.drop_link(link.path)


def heal(volume: Volume, digest: str, others: Iterable[Volume] = ()) -> bool:
    """Bring a lost blob back from a link outside or another volume; say whether it worked."""
    for path, is_shared in _candidates(volume, digest):
        try:
            hashes, _ = hash_file(path, threads=volume.settings.threads)
            if hashes.digest != digest:
                continue
            if is_shared and not os.stat(path).st_mode & 0o222:
                # The file outside is the blob's former inode, still read-only: share it again.
                commit(volume, path, hashes, consume=False, unsynced=True)
            else:
                _copy_in(volume, path, hashes)
        except (SmartcacheError, OSError):
            continue
        return True
    for other in others:
        try:
            with os.fdopen(open_own(other.layout.blob(digest)), "rb") as file:
                put_stream(volume, iter(lambda: file.read(CHUNK), b""), expected={"blake3": digest})
        except (SmartcacheError, OSError):
            continue
        return True
    return False


def _copy_in(volume: Volume, path: Path, hashes: Hashes) -> None:
    with path.open("rb") as file:
        chunks = iter(lambda: file.read(CHUNK), b"")
        put_stream(volume, chunks, size=hashes.size, expected={"blake3": hashes.digest})


def _candidates(volume: Volume, digest: str) -> Iterator[tuple[Path, bool]]:
    """Name files that may have a blob's bytes, and whether they were the blob's own inode."""
    blob = volume.index.blob(digest)
    links: list[Link] = [] if blob is None else volume.index.links_of(blob.id)
    seen = set()
    for link in links:
        if link.kind != "symlink":
            seen.add(link.path)
            yield link.path, link.kind == "hardlink"
    for change in volume.journal.changes():
        if change.digest == digest and change.path not in seen and change.op != "unpin":
            seen.add(change.path)
            yield change.path, False
