"""See whether every blob is what its name says, and heal what can be healed.

Quick hashes only blobs that are not believed; full hashes every blob again. A damaged one goes to
`bad/`; whoever brings the right bytes back (a file outside, another pool, a new download) makes it
whole. The index is a memory: `rebuild` sets it aside and notes the names of the blobs; each is
hashed before its first use.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from smartcache import errors
from smartcache.progress import Job, Progress, silent
from smartcache.store.blobs import is_there, prove, put_file
from smartcache.store.catalog import FileRow
from smartcache.store.hashes import believed
from smartcache.store.home import Home
from smartcache.store.layout import Pool, explained, is_blob_name, listed
from smartcache.system.hashing import is_digest

_PAGE = 1000


@dataclass(slots=True, kw_only=True)
class VerifyReport:
    """Every difference that was found, by digest or path, and what was healed."""

    is_full: bool
    blobs: int = 0
    hashed_size: int = 0
    damaged: list[str] = field(default_factory=list)
    stray: list[Path] = field(default_factory=list)
    """Files under `blobs/` whose name is not a digest; left alone."""
    writable: list[str] = field(default_factory=list)
    """Blobs somebody had made writable; their bytes were hashed and the mode set back."""
    healed: list[str] = field(default_factory=list)

    @property
    def has_damage(self) -> bool:
        """Say whether bytes are damaged that were not healed."""
        return bool(set(self.damaged) - set(self.healed))


def verify(
    home: Home, *, full: bool = False, repair: bool = False, progress: Progress = silent
) -> VerifyReport:
    """Check every blob; `repair` heals from files outside and other pools."""
    report = VerifyReport(is_full=full)
    lost: list[tuple[Pool, str]] = []
    label = "Hashing blobs" if full else "Checking blobs"
    with progress(label, None, "bytes" if full else "items") as job:
        for pool in home.pools():
            digests = list(_names(pool, report.stray))
            for start in range(0, len(digests), _PAGE):
                found = _check_page(home, pool, digests[start : start + _PAGE], report, job)
                lost += [(pool, digest) for digest in found]
    if repair:
        for pool in home.pools():  # what was damaged before, and is still missing
            digests = [name.partition(".")[0] for name in sorted(listed(pool.bad))]
            lost += [(pool, d) for d in digests if is_digest(d) and not is_there(home, d)]
        for pool, digest in dict.fromkeys(lost):
            if digest not in report.damaged:
                report.damaged.append(digest)
            if _heal(home, pool, digest):
                report.healed.append(digest)
    return report


def _check_page(
    home: Home, pool: Pool, digests: list[str], report: VerifyReport, job: Job
) -> Iterator[str]:
    """Check some blobs; go through those that are damaged."""
    stats = {d: st for d in digests if (st := pool.stat(d)) is not None}
    known = home.catalog.known(pool.filesystem, [st.st_ino for st in stats.values()])
    for digest, st in stats.items():
        report.blobs += 1
        if not report.is_full:
            job.advance()
        is_writable = bool(st.st_mode & 0o222) and stat.S_ISREG(st.st_mode)
        if is_writable:
            report.writable.append(digest)
        is_right = believed(known.get(st.st_ino), st, home.boot) == digest
        if is_right and not (report.is_full or is_writable):
            continue
        job.describe(digest[:12])
        try:
            prove(home, pool, digest, advance=job.advance if report.is_full else None)
            report.hashed_size += st.st_size
        except errors.BlobNotFoundError:
            continue
        except (errors.DamagedBlobError, errors.FileChangedError):
            report.damaged.append(digest)
            yield digest


def _names(pool: Pool, stray: list[Path]) -> Iterator[str]:
    """Go through the digests that have a name under `blobs/`; what else is there is `stray`."""
    for folder in sorted(listed(pool.blobs)):
        if not os.path.isdir(pool.blobs / folder):
            stray += [] if folder == "CACHEDIR.TAG" else [pool.blobs / folder]
            continue
        for name in sorted(listed(pool.blobs / folder)):
            if is_blob_name(folder, name):
                yield name
            else:
                stray.append(pool.blobs / folder / name)


def _heal(home: Home, pool: Pool, digest: str) -> bool:
    """Bring a lost blob back from a file outside or another pool; say whether it worked."""
    paths = [Path(other.blob(digest)) for other in home.pools() if other is not pool]
    paths += [file.path for file in home.catalog.files(digest=digest)]
    if home.has_journal:
        paths += [change.path for change in home.journal.with_digests([digest])]
    for path in dict.fromkeys(paths):
        with suppress(errors.SmartcacheError, OSError):
            put_file(home, path, pool=pool, expected={"blake3": digest})
            return True
    return False


def rebuild(home: Home, *, progress: Progress = silent) -> int:
    """Make the index anew; return how many blobs it knows now."""
    with explained(home.layout.root):
        home.forget_catalog()
    count = 0
    with progress("Looking at blobs", None) as job:
        for pool in home.pools():
            rows = [FileRow.of(pool.filesystem, st, names=[pool.blob(d)]) for d, st in pool.stats()]
            home.catalog.remember(rows)
            job.advance(len(rows))
            count += len(rows)
    return count
