"""The store: what can be done with blobs and with the files that share their bytes.

A `Store` is one home and the pools on other filesystems. Opening it makes nothing, waits for nobody
and recovers nothing. Every method that changes a user's file writes down what it was before, so
that `undo` can give it back.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Self

from smartcache.config import Settings, with_home
from smartcache.errors import BadDigestError, BlobNotFoundError, ConfigError
from smartcache.progress import Progress, silent
from smartcache.store import blobs as _blobs
from smartcache.store import hashes as _hashes
from smartcache.store import link as _link
from smartcache.store import place as _place
from smartcache.store import prune as _prune
from smartcache.store import reflink as _reflink
from smartcache.store import sources as _sources
from smartcache.store import undo as _undo
from smartcache.store import usage as _usage
from smartcache.store import verify as _verify
from smartcache.store.catalog import Scope
from smartcache.store.home import Home
from smartcache.store.journal import Batch, BatchSummary, Change
from smartcache.store.layout import Pool, absolute
from smartcache.store.link import Linked, Linking, check_digests
from smartcache.store.records import Blob, KnownFile, KnownFolder
from smartcache.store.userfile import Allowance, is_same, look
from smartcache.system.filesystems import Mounts
from smartcache.system.hashing import Algorithm, check_hex, is_digest

_log = logging.getLogger(__name__)
_SHORTEST_PREFIX = 4
_ORDERS: dict[str, Callable[[Blob], object]] = {
    "digest": lambda blob: blob.digest,
    "size": lambda blob: (-blob.size, blob.digest),
    "added": lambda blob: (-blob.added, blob.digest),
    "used": lambda blob: (-blob.used, blob.digest),
    "oldest": lambda blob: (blob.used, blob.digest),
}


class Store(Home):
    """Content-addressed blobs in one place of each filesystem, with honest figures.

    What another module tells whole is a method by its name.
    """

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        settings: Settings | None = None,
        only_look: bool = False,
    ) -> None:
        """Open the store at a root. `only_look`: where there is none, none is made."""
        super().__init__(with_home(settings, root), only_look=only_look)
        self.open_sources: Callable[[], list[_sources.BlobSource]] = list
        """Says which places beyond this machine there are now: set by whoever knows them."""
        self.asking = _sources.Asking()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        """Return the class and the root."""
        return f"{type(self).__name__}({str(self.root)!r})"

    # asking

    def has(self, digest: str) -> bool:
        """Say whether there is a blob."""
        return _blobs.is_there(self, check_hex("blake3", digest))

    get = _blobs.get

    def resolve(self, text: str) -> Blob:
        """Return the blob a user means: a digest, its beginning, or `sha256:<hex>` and the like."""
        algorithm, colon, value = text.partition(":")
        if colon:
            found = self.find(algorithm, value)  # type: ignore[arg-type]
            if found is None:
                raise BlobNotFoundError(f"No blob with {algorithm} {value}")
            return found
        prefix = text.lower()
        if is_digest(prefix):
            return self.get(prefix)
        if len(prefix) < _SHORTEST_PREFIX or prefix.strip("0123456789abcdef"):
            raise BadDigestError(f"{text!r} is not a digest")
        matches = {digest for pool in self.pools() for digest in pool.digests(prefix)}
        if not matches:
            raise BlobNotFoundError(f"No blob begins with {prefix}")
        if len(matches) > 1:
            raise BadDigestError(
                f"{prefix} is the start of several digests", matches=sorted(matches)
            )
        return self.get(matches.pop())

    def find(self, algorithm: Algorithm, value: str, *, pool: Pool | None = None) -> Blob | None:
        """Return the blob known under a hash; whoever opens or places it has it proven."""
        value = check_hex(algorithm, value)
        digest = self.catalog.digest_with(algorithm, value)
        with suppress(BlobNotFoundError):
            return self.get(digest, pool=pool) if digest else None
        return None

    def blobs(self, *, order: str = "digest") -> Iterator[Blob]:
        """Go through all blobs: by digest, size, added, used or oldest."""
        uses = self.catalog.uses()
        found: list[Blob] = []
        for pool in self.pools():
            pins = pool.pinned()
            found += [
                _blobs.blob_of(pool, digest, st, pins.get(digest, ()), uses.get(digest))
                for digest, st in pool.stats()
            ]
        found.sort(key=_ORDERS[order])  # type: ignore[arg-type]
        return iter(found)

    def open(self, digest: str) -> BinaryIO:
        """Open a blob for reading, after making sure that it is what its name says."""
        digest = check_hex("blake3", digest)
        return _blobs.open_blob(self, _blobs.pools_with(self, digest)[0], digest)

    def path_of(self, digest: str, *, near: str | Path | None = None) -> Path:
        """Return the path of a blob that may be read now. Never write to it."""
        digest = check_hex("blake3", digest)
        near = None if near is None else Path(near)
        pool = _blobs.pools_with(self, digest, near=near)[0]
        _blobs.checked(self, pool, digest)
        return Path(pool.blob(digest))

    def hashes_of(self, digest: str) -> dict[Algorithm, str]:
        """Return the other hashes known for some bytes."""
        known = self.catalog.hashes_of([digest])[digest]
        return {name: value for name, value in known.items() if name != "blake3"}

    def names_of(self, digest: str) -> list[Path]:
        """Return the names outside the store that are known, and that are the blob now."""
        found: dict[Path, None] = {}
        changes = self.journal.with_digests([digest]) if self.has_journal else []
        for pool in self.pools():
            st = pool.stat(digest)
            if st is None:
                continue
            paths = [file.path for file in self.catalog.files(inode=(pool.filesystem, st.st_ino))]
            for path in (*paths, *(change.path for change in changes)):
                if not path.is_relative_to(pool.root) and is_same(look(path), st):
                    found[path] = None
        return sorted(found)

    def pins(self) -> dict[str, list[str]]:
        """Return all pins: name -> digests."""
        found: dict[str, list[str]] = {}
        for pool in self.pools():
            for digest, names in pool.pinned().items():
                for name in names:
                    found.setdefault(name, []).append(digest)
        return found

    def blob_at(self, path: str | Path) -> Blob | None:
        """Return the blob that a file is a hard link of, proven or not."""
        try:
            found = _blobs.linked_blob(self, os.stat(path))
        except OSError:
            return None
        return None if found is None else self.get(found[1], pool=found[0])

    digest_of = _hashes.hashes_of

    def known_hashes(self, paths: Iterable[str | Path]) -> dict[Path, dict[Algorithm, str]]:
        """Return what is known of files' hashes without reading them, for those that are there."""
        files = []
        for path in map(Path, paths):
            with suppress(OSError):
                files.append((path, os.stat(path)))
        return _hashes.recall(self, files)

    def sightings(self, size: int) -> list[KnownFile]:
        """Return the files of known folders that had exactly this size when last seen."""
        return list(self.catalog.files(size=size))

    def folders(self) -> list[KnownFolder]:
        """Return the known folders and how many files were seen in them."""
        return self.catalog.known_folders()

    def sighted(self, folders: Iterable[str | Path], *, min_size: int = 0) -> Iterator[KnownFile]:
        """Go through the files seen in known folders, the names of an inode after each other."""
        catalog = self.catalog
        numbers = tuple(filter(None, (catalog.folder_number(Path(path)) for path in folders)))
        return catalog.files(scope=Scope(folders=numbers, min_size=min_size))

    def add_folder(self, path: str | Path, *, program: str = "") -> None:
        """Remember a folder that the user gives to smartcache: scans look at it from now on."""
        folder = Path(os.path.realpath(path))
        self.catalog.set_folder(folder, program=program, given=True, walked=False)

    def drop_folder(self, path: str | Path) -> bool:
        """Forget a folder and what was seen in it; no file is touched. False: it was not known."""
        catalog, real = self.catalog, Path(os.path.realpath(path))
        return catalog.drop_folder(absolute(path)) or catalog.drop_folder(real)

    def history(self) -> list[BatchSummary]:
        """Return what can be undone, newest last."""
        return self.journal.history() if self.has_journal else []

    # bringing bytes in

    def put_stream(
        self,
        stream: BinaryIO | Iterable[bytes],
        *,
        size: int | None = None,
        expected: Mapping[Algorithm, str] | None = None,
        algorithms: Iterable[Algorithm] = (),
        durable: bool = True,
        pool: Pool | None = None,
        progress: Progress = silent,
    ) -> Blob:
        """Store a file object or an iterable of bytes; announced size and hashes are checked."""
        reader = getattr(stream, "read", None)
        chunks = stream if reader is None else iter(lambda: reader(_blobs.CHUNK), b"")
        pool = pool or self.layout
        with progress("Storing", size, "bytes") as job:
            digest = _blobs.put_stream(
                self, pool, chunks, size=size, expected=expected, algorithms=algorithms,
                advance=job.advance, durable=durable,
            )  # fmt: skip
        return self.get(digest, pool=pool)

    put_file = _blobs.put_file

    def holding(self) -> _blobs.Holding:
        """Give something that holds blobs: prune leaves them alone while its `with` block lasts."""
        return _blobs.Holding(self)

    def adopt(
        self,
        path: str | Path,
        *,
        expected: Mapping[Algorithm, str] | None = None,
        algorithms: Iterable[Algorithm] = (),
        read: _hashes.Read | None = None,
        batch: Batch | None = None,
    ) -> Blob:
        """Make a file a blob in place, unless its bytes are one already; raise if it cannot be."""
        result = _linked(self.link_many(
            [path], label="add --adopt", batch=batch, expected=expected, algorithms=algorithms,
            read=read,
        ))  # fmt: skip
        return self.get(result.digest, pool=self.pool_of(result.path))

    def link(self, path: str | Path, digest: str, *, batch: Batch | None = None) -> Linked:
        """Let a file that has a blob's bytes be a link of it; raise if it must not be."""
        path = absolute(path)
        return _linked(self.link_many(
            [path], label="replace", batch=batch, digests={path: digest}, replace=True, follow=False
        ))  # fmt: skip

    def link_many(  # noqa: PLR0913 - what is known of the files, and what must be
        self,
        paths: Iterable[str | Path],
        *,
        label: str,
        batch: Batch | None = None,
        digests: Mapping[Path, str] | None = None,
        expected: Mapping[Algorithm, str] | None = None,
        algorithms: Iterable[Algorithm] = (),
        replace: bool = False,
        allow: frozenset[Allowance] = frozenset(),
        follow: bool = True,
        read: _hashes.Read | None = None,
        progress: Progress = silent,
    ) -> Iterator[Linked]:
        """Make files blobs in place or, with `replace`, links of the blobs that have their bytes.

        The first file of each content becomes the blob, unless there is one. What cannot be is
        returned with its reason. `digests` are those that some must have. `follow`: of a symlink,
        as in HF snapshots, the file behind it is meant. What this run has `read` is not read again.
        """
        with self.batch(label, batch) as current:
            yield from Linking(
                home=self, batch=current, digests=check_digests(digests),
                expected=_blobs.checked_hex(expected),
                algorithms=tuple(algorithms), replace=replace, allow=allow, follow=follow,
                read=_hashes.Read() if read is None else read, progress=progress,
            ).run(absolute(path) for path in paths)  # fmt: skip

    @property
    def sources(self) -> list[_sources.BlobSource]:
        """The places beyond this machine to look for bytes in; none of them was asked yet."""
        try:
            return self.open_sources()
        except (ConfigError, OSError) as error:
            _log.warning("no tier is asked: %s", error)
            return []

    # handing bytes out

    place = _place.place
    share_many = staticmethod(_reflink.share_many)

    # keeping, letting go, looking after the whole

    pin = _prune.pin
    unpin = _prune.unpin
    remove = _prune.remove
    plan_prune = _prune.plan_prune
    plan_release = _prune.plan_release
    usage = _usage.store_usage
    verify = _verify.verify
    rebuild = _verify.rebuild
    plan_eject = _undo.plan_eject

    def plan_undo(
        self,
        batches: Iterable[str] | None = None,
        *,
        last: bool = False,
        paths: Iterable[str | Path] | None = None,
        recursive: bool = False,
    ) -> _undo.UndoPlan:
        """Plan to undo some batches, the last one, single paths, or (none given) everything."""
        if paths is not None:
            return _undo.plan_undo_paths(self, paths, recursive=recursive)
        return _undo.plan_undo(self, batches, last=last)

    def take_back(self, changes: Sequence[Change], *, batch: Batch) -> None:
        """Undo changes of a batch that turned out to be of no use."""
        with silent("Undoing") as job:
            _undo.Restoring(self, job).run(changes)
        batch.changes[:] = [each for each in batch.changes if each not in changes]

    def unfinished(self) -> list[str]:
        """Name what dead processes have left that is not finished yet; nothing is waited for."""
        if not self.has_journal:
            return []
        seen = {each.id for each in self.journal.open_changes(Mounts())}
        # What a living process does at this moment is over in milliseconds.
        left = self.journal.open_changes(Mounts()) if seen else []
        return [
            self.stuck.get(each.id, f"{each.path}: interrupted") for each in left if each.id in seen
        ]

    def finish_open(self) -> None:  # noqa: D102
        _link.recover(self)

    def recover(self) -> list[str]:
        """Finish what dead processes have left; return what cannot be finished now, and why."""
        if self.has_journal and self.journal.has_open():
            self.finish_open()
        return list(self.stuck.values())

    def forget_unfinished(self) -> int:
        """Close what cannot be finished because it cannot be looked at; return how many."""
        self.recover()
        numbers = list(self.stuck)
        if numbers:
            with self.locked("undo --forget"):
                self.journal.note(("undone", number) for number in numbers)
            self.stuck.clear()
        return len(numbers)


def _linked(results: Iterable[Linked]) -> Linked:
    """Return the only result, or raise why there is no link."""
    (result,) = results
    if result.error is not None:
        raise result.error
    return result
