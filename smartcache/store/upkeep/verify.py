"""Compare the index with the disk, heal what can be healed, or make the index again.

Quick looks at stat keys and hashes only blobs whose rows do not prove them; full hashes every blob
again. A damaged blob goes to `bad/` and its row is marked as lost, never deleted: whoever brings
the right bytes back (a link outside, another volume, a new download) finds its links and owners as
they were.

Rows that are made again from the disk are unproven: each blob is hashed before its first use. The
other hashes of bytes are kept, if the index is sound: they are true for ever. What a blob's links
cannot show (owners other than pins) may be missing, so a note makes `prune` refuse until the
folders were scanned again.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, cast

from smartcache.config import Settings
from smartcache.errors import (
    BlobNotFoundError,
    DamagedBlobError,
    FileChangedError,
    IndexDamagedError,
    LockTimeoutError,
    SmartcacheError,
)
from smartcache.progress import Job, Progress, silent
from smartcache.store.blobs import CHUNK, commit, prove, put_stream
from smartcache.store.changes.journal import Change
from smartcache.store.owners import link_liveness, link_pages, pin
from smartcache.store.records import Blob, Link, LinkKind, Trust
from smartcache.store.upkeep.prune import REBUILT
from smartcache.store.volume import Layout, Volume
from smartcache.system.faults import reached
from smartcache.system.filesystems import filesystem_id
from smartcache.system.hashing import Advance, hash_file, is_digest
from smartcache.system.locks import OnWait, lock
from smartcache.system.ownfiles import open_own

_PAGE = 1000
_log = logging.getLogger(__name__)


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
    report = VerifyReport(is_full=full)
    total = volume.index.totals()
    label = "Hashing blobs" if full else "Checking blobs"
    size, unit = (total.size, "bytes") if full else (total.blobs, "items")
    with nullcontext() if repair else volume.in_haste():
        with progress(label, size, unit) as job:  # type: ignore[arg-type]
            for blob in volume.index.records():
                _check_blob(volume, blob, report, job)
        for digest in list(_names(volume, report.stray)):
            if volume.index.blob(digest) is not None or not _is_orphan(volume, digest):
                continue
            report.unindexed.append(digest)
            if full or repair or not os.path.isfile(volume.layout.blob(digest)):
                with suppress(BlobNotFoundError):
                    _is_right(volume, digest, report)  # gives it a row
        for page in link_pages(volume):
            dead = [link for link in page if link_liveness(link) == "dead"]
            report.dead_links.extend(link.path for link in dead if link.kind == "hardlink")
            if repair:
                with volume.index.write():
                    for link in dead:
                        volume.index.drop_link(link.path)
        if repair:
            sources = list(others)
            lost = [*report.damaged, *report.missing]
            report.healed += [digest for digest in lost if heal(volume, digest, sources)]
    return report


def _check_blob(volume: Volume, blob: Blob, report: VerifyReport, job: Job) -> None:
    digest = blob.digest
    report.blobs += 1
    if not report.is_full:
        job.advance()
    try:
        st = os.lstat(volume.layout.blob(digest))
        is_writable = bool(st.st_mode & 0o222) and stat.S_ISREG(st.st_mode)
        if is_writable:
            report.writable.append(digest)
        if report.is_full or is_writable or not blob.proves(st, volume.boot):
            job.describe(volume.index.name_of(blob))
            if _is_right(volume, digest, report, job.advance if report.is_full else None):
                report.hashed_size += st.st_size
    except FileNotFoundError:
        _check_missing(volume, digest, report)


def _is_right(
    volume: Volume, digest: str, report: VerifyReport, advance: Advance | None = None
) -> bool:
    """Hash a blob and report it if it is damaged; BlobNotFoundError: it is missing."""
    try:
        prove(volume, digest, advance=advance)
    except (DamagedBlobError, FileChangedError):
        report.damaged.append(digest)
        return False
    except LockTimeoutError:
        pass  # its bytes are right, but the row stays as it is
    return True


def _check_missing(volume: Volume, digest: str, report: VerifyReport) -> None:
    """Report a blob as missing, unless somebody has removed it properly meanwhile."""
    with suppress(LockTimeoutError), volume.guard("verify", exclusive=True):
        blob = volume.index.record(digest)
        if blob is not None and os.path.lexists(volume.layout.blob(digest)):
            return
        if blob is not None:
            volume.index.mark_gone(blob.id)
    if volume.index.record(digest) is not None:
        report.missing.append(digest)


def _names(volume: Volume, stray: list[Path]) -> Iterator[str]:
    """Go through the digests that have a name under `blobs/`; what else is there is `stray`."""
    for directory in sorted(os.listdir(volume.layout.blobs)):
        folder = volume.layout.blobs / directory
        if not folder.is_dir():
            if folder != volume.layout.tag:
                stray.append(folder)
            continue
        for name in sorted(os.listdir(folder)):
            if is_digest(name) and name[:2] == directory:
                yield name
            else:
                stray.append(folder / name)


def _is_orphan(volume: Volume, digest: str) -> bool:
    """Say whether a file has no row, when nobody is between linking one and writing its row."""
    with suppress(LockTimeoutError), volume.guard("verify", exclusive=True):
        is_there = os.path.lexists(volume.layout.blob(digest))
        return is_there and volume.index.blob(digest) is None
    return False


def heal(volume: Volume, digest: str, others: Iterable[Volume] = ()) -> bool:
    """Bring a lost blob back from a link outside or another volume; say whether it worked."""

    def copy_in(file: BinaryIO) -> None:
        size = os.fstat(file.fileno()).st_size
        chunks = iter(lambda: file.read(CHUNK), b"")
        put_stream(volume, chunks, size=size, expected={"blake3": digest})

    for path, is_shared in _candidates(volume, digest):
        with suppress(SmartcacheError, OSError):
            hashes, _ = hash_file(path, threads=volume.settings.threads)
            if hashes.digest != digest:
                continue
            if is_shared and not os.stat(path).st_mode & 0o222:
                # The file outside is the blob's former inode, still read-only: share it again.
                commit(volume, path, hashes, consume=False, unsynced=True)
            else:
                with path.open("rb") as file:
                    copy_in(file)
            return True
    for other in others:
        with suppress(SmartcacheError, OSError):
            with os.fdopen(open_own(other.layout.blob(digest)), "rb") as file:
                copy_in(file)
            return True
    return False


def _candidates(volume: Volume, digest: str) -> Iterator[tuple[Path, bool]]:
    """Name files that may have a blob's bytes, and whether they were the blob's own inode."""
    blob = volume.index.record(digest)
    links: list[Link] = [] if blob is None else volume.index.links_of(blob.id)
    seen = set()
    for link in links:
        seen.add(link.path)
        yield link.path, link.kind == "hardlink"
    for change in volume.journal.changes():
        if change.digest == digest and change.path not in seen and change.op != "unpin":
            seen.add(change.path)
            yield change.path, False


def rebuild(volume: Volume, *, progress: Progress = silent) -> int:
    """Fill the index from the disk; return how many blobs it has now."""
    names = list(_names(volume, []))
    with volume.guard("rebuild the index", exclusive=True):
        with volume.index.write(durable=True):
            volume.index.clear()
            volume.index.set_note(REBUILT, datetime.now(UTC).isoformat(timespec="seconds"))
        reached("rebuild: cleared")
        with progress("Rebuilding the index", len(names)) as job:
            for start in range(0, len(names), _PAGE):
                page = names[start : start + _PAGE]
                with volume.index.write():
                    for name in page:
                        with suppress(FileNotFoundError):
                            st = os.lstat(volume.layout.blob(name))
                            volume.index.add_blob(name, st, trust=Trust.UNPROVEN)
                job.advance(len(page))
        reached("rebuild: blobs added")
        with volume.index.write():
            volume.index.drop_lost()
            _replay(volume)
    return len(names)


def _replay(volume: Volume) -> None:
    """Record the links and pins of which the journal tells, as far as they are still there."""
    pins: dict[tuple[str, str], None] = {}
    for change in volume.journal.open_changes():
        if change.op == "pin":
            pins[change.digest, str(change.path)] = None
        elif change.op == "unpin":
            pins.pop((change.digest, str(change.path)), None)
        elif change.op in ("adopt", "place", "replace"):
            _replay_link(volume, change)
    for digest, name in pins:
        # What is pinned was not removed by us: bytes that are missing are lost, and may come back.
        volume.index.add_lost(digest)
        blob = volume.index.record(digest)
        if blob is not None:
            volume.index.hold(volume.index.add_owner(pin(name)), blob.id)


def _replay_link(volume: Volume, change: Change) -> None:
    path, source = change.path, volume.layout.blob(change.digest)
    blob = volume.index.record(change.digest)
    try:
        st, blob_st = os.lstat(path), os.stat(source)
    except OSError:
        return
    if blob is None:
        return
    kind: LinkKind = "hardlink"
    if change.kind in ("copy", "reflink"):
        kind = cast("LinkKind", change.kind)
    is_same_look = (st.st_size, st.st_mtime_ns) == (change.size, blob_st.st_mtime_ns)
    if os.path.samestat(st, blob_st) or (kind != "hardlink" and is_same_look):
        volume.index.add_link(
            str(path), blob.id, kind=kind, filesystem=filesystem_id(path.parent), inode=st.st_ino,
            owner=None,
        )  # fmt: skip


def replace_damaged_index(
    root: Path, settings: Settings, *, on_wait: OnWait | None = None
) -> Volume:
    """Open a volume whose index may be unreadable: it goes to `bad/`, and a new one is made."""
    try:
        volume = Volume(root, settings, create=False)
        if volume.index.is_sound():
            return volume
        volume.close()
    except IndexDamagedError:
        pass
    layout = Layout(root)
    with lock(
        layout.lock, exclusive=True, timeout=settings.lock_timeout, what="replace the index",
        on_wait=on_wait,
    ):  # fmt: skip
        suffix = secrets.token_hex(4)
        for name in ("index.sqlite3", "index.sqlite3-wal", "index.sqlite3-shm"):
            if (root / name).exists():
                os.rename(root / name, layout.bad / f"{name}.{suffix}")
    _log.warning("the index of %s was damaged; it is in %s", root, layout.bad)
    return Volume(root, settings, create=False)


def rebuild_if_lost(volume: Volume) -> None:
    """Rebuild an index that was made new although there are blobs or a journal: it was lost."""
    if volume.index.is_new and volume.had_content:
        _log.warning("the index of %s was missing; making it again from the blobs", volume.root)
        rebuild(volume)
