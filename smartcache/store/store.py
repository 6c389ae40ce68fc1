"""The store: what can be done with blobs and with the files that share their bytes.

A `Store` is one volume and knows its neighbours, the volumes on other filesystems. `find`, `open`
and `place` look at all of them; changes to a file happen on the volume of its filesystem. What is
known of files outside, on all filesystems, is in one catalog: that of the store that was opened
first. Every method that changes a user's file journals it, so that `undo` can give it back. Opening
finishes or takes back what a dead process left half done.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO, Self

from smartcache.config import Settings, with_home
from smartcache.errors import (
    BadDigestError,
    BlobNotFoundError,
    ConfigError,
    FileSkippedError,
    LockTimeoutError,
    StoreError,
)
from smartcache.progress import Progress, silent
from smartcache.store import DEFAULT_PIN, Kind
from smartcache.store import blobs as _blobs
from smartcache.store import hashes as _hashes
from smartcache.store import owners as _owners
from smartcache.store import tiers as _tiers
from smartcache.store.catalog import Catalog, Scope
from smartcache.store.changes import place as _place
from smartcache.store.changes import undo as _undo
from smartcache.store.changes.adopt import Adoption, adopt_many
from smartcache.store.changes.journal import Batch, BatchSummary
from smartcache.store.changes.replace import Replacement, replace_many
from smartcache.store.changes.share import share_many
from smartcache.store.changes.userfile import Allowance
from smartcache.store.owners import Liveness
from smartcache.store.records import Blob, KnownFolder, Link, Owner, Seen, Sighting
from smartcache.store.tiers import Document
from smartcache.store.upkeep import eject as _eject
from smartcache.store.upkeep import prune as _prune
from smartcache.store.upkeep import usage as _usage
from smartcache.store.upkeep import verify as _verify
from smartcache.store.volume import Volume, volume_root
from smartcache.system.filesystems import filesystem_id, mount_of, nearest_existing
from smartcache.system.hashing import Advance, Algorithm, Hashes, check_hex, is_digest
from smartcache.system.locks import KeyLocks

_log = logging.getLogger(__name__)
_SHORTEST_PREFIX = 4


def _absolute(path: str | Path) -> Path:
    """Return an absolute, plain path; most are already, and making one anew costs 10 us."""
    if isinstance(path, Path) and path.is_absolute() and ".." not in path.parts:
        return path
    return Path(os.path.abspath(path))


class Store:
    """Content-addressed blobs in one directory, with an index, a journal and honest figures."""

    def __init__(
        self,
        root: str | Path | None = None,
        *,
        settings: Settings | None = None,
        _catalog: Catalog | None = None,
    ) -> None:
        """Open the store at a root, made if it is not there; `_catalog` is for neighbours."""
        self.settings = with_home(settings, root)
        self.volume = Volume(self.settings.home, self.settings, catalog=_catalog)
        self._others: dict[Path, Self] = {}
        self._known_volumes: list[tuple[Path, str]] | None = None
        self._thread = threading.local()
        self.open_tiers: Callable[[], list[_tiers.BlobSource]] = list
        """Says which tiers there are now: set by whoever knows them."""
        self._asking = _tiers.Asking()
        _verify.rebuild_if_lost(self.volume)
        try:
            with self.volume.in_haste():
                _undo.recover(self.volume)
                self.volume.fold_journal()
        except LockTimeoutError as error:
            # Whoever only reads must not wait here; whoever opens the store next tries again.
            _log.info("what an interrupted process left stays for now: %s", error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        """Return the class and the root."""
        return f"{type(self).__name__}({str(self.root)!r})"

    def close(self) -> None:
        """Close the store and its neighbours."""
        for other in self._others.values():
            other.close()
        self.volume.close()

    @property
    def root(self) -> Path:
        """The directory of the store."""
        return self.volume.root

    @property
    def catalog(self) -> Catalog:
        """What is known of files outside the store."""
        return self.volume.catalog

    @property
    def key_locks(self) -> KeyLocks:
        """One worker per key, across threads and processes."""
        return self.volume.key_locks

    @contextmanager
    def batch(self, label: str) -> Iterator[Batch]:
        """Let all changes made in this block be one entry of the history, to be undone together."""
        current: Batch | None = getattr(self._thread, "batch", None)
        if current is not None:
            yield current
            return
        with self.volume.batch(label) as batch:
            self._thread.batch = batch
            try:
                yield batch
            finally:
                self._thread.batch = None

    @contextmanager
    def joining(self, batch: Batch) -> Iterator[None]:
        """Let what this thread changes in the block belong to a batch that another thread began."""
        before: Batch | None = getattr(self._thread, "batch", None)
        self._thread.batch = batch
        try:
            yield
        finally:
            self._thread.batch = before

    # asking

    def open(self, digest: str) -> BinaryIO:
        """Open a blob for reading, after making sure that it is what its name says."""
        digest = check_hex("blake3", digest)
        return _blobs.open_blob(self._holder(digest).volume, digest)

    def path_of(self, digest: str) -> Path:
        """Return the path of a blob that may be read now. Never write to it."""
        digest = check_hex("blake3", digest)
        volume = self._holder(digest).volume
        _blobs.checked(volume, digest)
        return Path(volume.layout.blob(digest))

    def get(self, digest: str) -> Blob:
        """Return a blob of this volume by its digest."""
        blob = self.volume.index.blob(check_hex("blake3", digest))
        if blob is None:
            raise BlobNotFoundError(f"No blob {digest} in {self.root}", digest=digest)
        return blob

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
            return self._holder(prefix).get(prefix)
        if len(prefix) < _SHORTEST_PREFIX or prefix.strip("0123456789abcdef"):
            raise BadDigestError(f"{text!r} is not a digest")
        matches = {d for s in self.stores() for d in s.volume.index.digests_starting_with(prefix)}
        if not matches:
            raise BlobNotFoundError(f"No blob begins with {prefix}")
        if len(matches) > 1:
            raise BadDigestError(
                f"{prefix} is the start of several digests", matches=sorted(matches)
            )
        return self._holder(digest := matches.pop()).get(digest)

    def find(self, algorithm: Algorithm, value: str) -> Blob | None:
        """Return the blob known under a hash, on this volume or a neighbour."""
        found = (store.find_here(algorithm, value) for store in self.stores())
        return next(filter(None, found), None)

    def find_here(self, algorithm: Algorithm, value: str) -> Blob | None:
        """Return the blob of this volume known under a hash."""
        return self.volume.index.blob_by_hash(algorithm, check_hex(algorithm, value))

    def blobs(self, *, order: str = "digest") -> Iterator[Blob]:
        """Go through the blobs of this volume: by digest, size, added, used or oldest."""
        return self.volume.index.blobs(order=order)

    def aliases_of(self, blob: Blob) -> dict[Algorithm, str]:
        """Return the other hashes known for a blob of this volume."""
        known = self.volume.index.hashes_of([blob.digest])[blob.digest]
        return {name: value for name, value in known.items() if name != "blake3"}

    def links_of(self, blob: Blob) -> list[Link]:
        """Return the recorded links of a blob of this volume."""
        return self.volume.index.links_of(blob.id)

    def holders_of(self, blob: Blob) -> list[tuple[Owner, Liveness]]:
        """Return who keeps a blob of this volume alive, checked against the disk."""
        return _owners.keepers_of(self.volume, blob)

    def digest_of(
        self,
        path: str | Path,
        algorithms: Iterable[Algorithm] = (),
        *,
        advance: Advance | None = None,
        read: _hashes.Read | None = None,
    ) -> Hashes:
        """Return the hashes of any file, remembered while the file stays as it is.

        `advance` is told of bytes that are read; a file that was is added to `read`.
        """
        path = Path(path)
        return _hashes.hashes_of(self.volume, path, algorithms, advance=advance, read=read)[0]

    def known_hashes(self, paths: Iterable[str | Path]) -> dict[Path, dict[Algorithm, str]]:
        """Return what is known of files' hashes without reading them, for those that are there."""
        return _hashes.known_hashes(self.volume, map(Path, paths))

    def blob_at(self, path: str | Path) -> Blob | None:
        """Return the blob of this volume that a file is a hard link of, proven or not."""
        st = os.stat(path)
        return self.volume.index.blob_by_inode(st.st_ino) if self.volume.is_here(st) else None

    def sightings(self, size: int) -> list[Sighting]:
        """Return the files of known folders that had exactly this size when last seen."""
        return self.catalog.sightings_of_size(size)

    def folders(self) -> list[KnownFolder]:
        """Return the known folders and how many files were seen in them."""
        return self.catalog.known_folders()

    def sighted(self, folders: Iterable[str | Path], *, min_size: int = 0) -> Iterator[Seen]:
        """Go through the files seen in known folders, the names of an inode after each other."""
        catalog, volume = self.catalog, self.volume
        numbers = tuple(filter(None, (catalog.folder_number(Path(each)) for each in folders)))
        scope = Scope(home=volume.filesystem, boot=volume.boot, folders=numbers, min_size=min_size)
        return catalog.seen(scope)

    def owners(self) -> list[tuple[Owner, Liveness]]:
        """Return all owners and whether each is live, dead or away."""
        return [(owner, _owners.liveness(owner)) for owner in self.volume.index.owners()]

    def history(self) -> list[BatchSummary]:
        """Return what can be undone, newest last."""
        return self.volume.journal.history()

    # bringing bytes in

    def put_stream(
        self,
        stream: BinaryIO | Iterable[bytes],
        *,
        size: int | None = None,
        expected: Mapping[Algorithm, str] | None = None,
        algorithms: Iterable[Algorithm] = (),
        progress: Progress = silent,
    ) -> Blob:
        """Store a file object or an iterable of bytes; announced size and hashes are checked."""
        reader = getattr(stream, "read", None)
        chunks = stream if reader is None else iter(lambda: reader(_blobs.CHUNK), b"")
        with progress("Storing", size, "bytes") as job:
            return _blobs.put_stream(
                self.volume, chunks, size=size, expected=expected, algorithms=algorithms,
                advance=job.advance,
            )  # fmt: skip

    def put_file(
        self,
        path: str | Path,
        *,
        expected: Mapping[Algorithm, str] | None = None,
        algorithms: Iterable[Algorithm] = (),
        progress: Progress = silent,
    ) -> Blob:
        """Copy a file into the store; the file itself is not touched."""
        source = Path(os.path.abspath(path))
        with progress(source.name, os.stat(source).st_size, "bytes") as job:
            digest = _blobs.put_copy(
                self.volume, source, expected=expected, algorithms=algorithms, advance=job.advance
            )
        return self.get(digest)

    def adopt(
        self,
        path: str | Path,
        *,
        owner: Owner | None = None,
        expected: Mapping[Algorithm, str] | None = None,
        algorithms: Iterable[Algorithm] = (),
        read: _hashes.Read | None = None,
    ) -> Blob:
        """Make a file a blob in place, unless its bytes are one already; raise if it cannot be."""
        store = self.volume_of(path)
        (adoption,) = store.adopt_many(
            [path], owner=owner, expected=expected, algorithms=algorithms, read=read
        )
        if adoption.error is not None:
            raise adoption.error
        return store.get(adoption.digest)

    def adopt_many(
        self,
        paths: Iterable[str | Path],
        *,
        owner: Owner | None = None,
        expected: Mapping[Algorithm, str] | None = None,
        algorithms: Iterable[Algorithm] = (),
        follow: bool = True,
        digests: Mapping[Path, str] | None = None,
        read: _hashes.Read | None = None,
        progress: Progress = silent,
    ) -> Iterator[Adoption]:
        """Adopt files of this filesystem; what cannot be adopted is yielded with its reason."""
        owner_id = None if owner is None else self.record_owner(owner)
        files = (_absolute(path) for path in paths)
        with self.batch("add --adopt") as batch:
            yield from adopt_many(
                self.volume, files, batch=batch, owner=owner_id, expected=expected,
                algorithms=algorithms, follow=follow, digests=digests, read=read,
                progress=progress,
            )  # fmt: skip

    @property
    def tiers(self) -> list[_tiers.BlobSource]:
        """The places beyond this machine to look for bytes in; none of them was asked yet."""
        try:
            return self.open_tiers()
        except (ConfigError, OSError) as error:
            _log.warning("no tier is asked: %s", error)
            return []

    def find_in_tiers(self, wanted: Collection[_tiers.Wanted]) -> dict[_tiers.Wanted, _tiers.Offer]:
        """Return what tiers say they have of what is wanted; what fails there is a warning."""
        return self._asking.offers(self.tiers, wanted) if wanted else {}

    def tier_documents(self, kind: str, name: str) -> Iterator[tuple[_tiers.BlobSource, Document]]:
        """Go through what tiers say of a repo, a set or a dataset; what fails is a warning."""
        for tier in self.tiers:
            found = self._asking.document(tier, kind, name)
            if found is not None:
                yield tier, found

    def take(
        self,
        offer: _tiers.Offer,
        expected: Mapping[Algorithm, str],
        *,
        to: Store | None = None,
        advance: Advance | None = None,
    ) -> Blob:
        """Take an object of a tier into this store (or a neighbour), if it is what is expected.

        Else an error: of the tier, or DigestMismatchError; nothing of it is kept then.
        """
        return _tiers.take((to or self).volume, offer, expected, advance)

    # handing bytes out

    def place(
        self,
        digest: str,
        path: str | Path,
        *,
        kind: Kind = "auto",
        overwrite: bool = False,
        whole: bool = False,
        keep: bool = False,
        owner: Owner | None = None,
        progress: Progress = silent,
    ) -> Link:
        """Put a blob at a path by the best kind of link that works there, or the kind asked for.

        `keep`: undo gives the path bytes of its own in place of removing it.
        """
        target = Path(os.path.abspath(path))
        digest = check_hex("blake3", digest)
        holder = self._holder(digest, near=target)
        owner_id = None if owner is None else holder.record_owner(owner)
        size = holder.get(digest).size
        with holder.batch("link") as batch, progress(target.name, size, "bytes") as job:
            return _place.place(
                holder.volume, digest, target, batch=batch, kind=kind, overwrite=overwrite,
                whole=whole, keep=keep, owner=owner_id, advance=job.advance,
            )  # fmt: skip

    def replace(self, path: str | Path, digest: str, *, owner: Owner | None = None) -> Replacement:
        """Replace a file that has a blob's bytes by a hard link to it; raise if it must not be."""
        (result,) = self.volume_of(path).replace_many([(path, digest)], owner=owner)
        if result.error is not None:
            raise result.error
        return result

    def replace_many(
        self,
        files: Iterable[tuple[str | Path, str]],
        *,
        owner: Owner | None = None,
        allow: frozenset[Allowance] = frozenset(),
        follow: bool = True,
        read: _hashes.Read | None = None,
    ) -> Iterator[Replacement]:
        """Replace (path, digest) pairs; what cannot be replaced is yielded with its reason."""
        owner_id = None if owner is None else self.record_owner(owner)
        pairs = ((Path(path), check_hex("blake3", digest)) for path, digest in files)
        with self.batch("replace") as batch:
            yield from replace_many(
                self.volume, pairs, batch=batch, owner=owner_id, allow=allow, follow=follow,
                read=read,
            )  # fmt: skip

    def share_many(
        self, pairs: Iterable[tuple[str | Path, str | Path, str]], *, progress: Progress = silent
    ) -> Iterator[Replacement]:
        """Let targets of (source, target, digest) share blocks (reflinks), or say why not."""
        files = ((Path(a), Path(b), check_hex("blake3", digest)) for a, b, digest in pairs)
        return share_many(self.volume, files, progress=progress)

    def add_folder(self, path: str | Path, *, program: str = "") -> None:
        """Remember a folder that the user gives to smartcache: scans look at it from now on."""
        folder = Path(os.path.realpath(path))
        self.catalog.set_folder(folder, program=program, given=True, walked=False)

    def drop_folder(self, path: str | Path) -> bool:
        """Forget a folder and what was seen in it; no file is touched. False: it was not known."""
        catalog, real = self.catalog, Path(os.path.realpath(path))
        return catalog.drop_folder(_absolute(path)) or catalog.drop_folder(real)

    def add_aliases(self, digest: str, values: Mapping[Algorithm, str]) -> None:
        """Remember other hashes of a blob, computed from the very bytes that have this digest."""
        self.volume.index.add_aliases(self.get(digest).digest, values)

    def look_for_damage(self, folder: str | Path) -> list[Path]:
        """Return the weight files in a folder, or one below, that were written to through a link.

        Their blobs are set aside, and nobody is given the bytes.
        """
        return _blobs.look_for_damage((each.volume for each in self.stores()), Path(folder))

    # keeping and letting go

    def own(self, owner: Owner, digests: Iterable[str]) -> None:
        """Let an owner keep blobs alive, for as long as it exists."""
        wanted = [check_hex("blake3", digest) for digest in digests]
        _owners.own(self.volume, owner, wanted)

    def disown(self, owner: Owner) -> None:
        """End an owner; what nobody else holds can be pruned."""
        found = _owners.find_owner(self.volume, owner.kind, owner.name)
        if found is not None:
            self.volume.index.drop_owner(found.id)

    def pin(self, digest: str, name: str = DEFAULT_PIN) -> None:
        """Keep a blob until it is unpinned."""
        digest = self.get(digest).digest
        with self.batch("pin") as batch, _owners.journaled_pin(batch, digest, name, pinned=True):
            self.own(_owners.pin(name), [digest])

    def unpin(self, digest: str, name: str | None = None) -> list[str]:
        """End the pins of a blob (or one of them); return the names of those that were ended."""
        blob = self.get(digest)
        digest = blob.digest
        ended = []
        with self.batch("unpin") as batch:
            for owner in self.volume.index.holders_of(blob.id):
                if owner.kind == "pin" and name in (None, owner.name):
                    with _owners.journaled_pin(batch, digest, owner.name, pinned=False):
                        self.volume.index.release(owner.id, blob.id)
                    ended.append(owner.name)
        return ended

    def remove(self, digest: str) -> int:
        """Remove a blob that nobody holds, for good; return the bytes that this frees."""
        return _prune.remove(self.volume, check_hex("blake3", digest))

    # looking after the whole

    def usage(self, *, progress: Progress = silent) -> _usage.StoreUsage:
        """Say what is on the disk now; every blob is looked at."""
        return _usage.store_usage(self.volume, progress=progress)

    def plan_prune(
        self,
        *,
        max_size: int | None = None,
        unused_for: timedelta | None = None,
        drop_away: bool = False,
        after_rebuild: bool = False,
        with_bad: bool = False,
    ) -> _prune.PrunePlan:
        """Plan to remove what only smartcache holds and nobody wants."""
        return _prune.plan_prune(
            self.volume, max_size=max_size, unused_for=unused_for, drop_away=drop_away,
            after_rebuild=after_rebuild, with_bad=with_bad,
        )  # fmt: skip

    def plan_release(self, digests: Iterable[str]) -> _prune.PrunePlan:
        """Plan to let go of some blobs of this volume: those that nobody else has or wants."""
        return _prune.plan_release(self.volume, (check_hex("blake3", each) for each in digests))

    def verify(
        self, *, full: bool = False, repair: bool = False, progress: Progress = silent
    ) -> _verify.VerifyReport:
        """Compare index and disk; name every difference; heal what can be healed."""
        others = [store.volume for store in self.stores() if store is not self]
        return _verify.verify(
            self.volume, full=full, repair=repair, others=others, progress=progress
        )

    def rebuild(self, *, progress: Progress = silent) -> int:
        """Make the index again from the disk; `prune` is careful until the next scan."""
        return _verify.rebuild(self.volume, progress=progress)

    @property
    def has_lost_links(self) -> bool:
        """Whether the index was made again and no scan has looked for forgotten links since."""
        return self.volume.index.note(_prune.REBUILT) is not None

    def confirm_links(self) -> None:
        """Say that a scan has found the links again after a rebuild: `prune` may run."""
        self.volume.index.set_note(_prune.REBUILT, None)

    def plan_undo(
        self, batches: Iterable[str] | None = None, *, last: bool = False
    ) -> _undo.UndoPlan:
        """Plan to undo some batches, the last one, or (neither given) everything."""
        return _undo.plan_undo(self.volume, batches, last=last)

    def plan_eject(self, *, drop_pinned: bool = False, drop_sets: bool = False) -> _eject.EjectPlan:
        """Plan to give every file its own state back and to remove the store."""
        return _eject.plan_eject(self.volume, drop_pinned=drop_pinned, drop_sets=drop_sets)

    # volumes

    def add_volume(self, root: str | Path) -> Self:
        """Make (or find) a volume on another filesystem and remember it as a neighbour."""
        path = Path(os.path.abspath(root))
        if os.stat(nearest_existing(path)).st_dev == self.volume.device:
            message = f"{path} is on the filesystem of the store already"
            raise StoreError(message, hint="A volume is for another filesystem.")
        store = type(self)(path, settings=self.settings, _catalog=self.catalog)
        self.volume.index.add_volume(store.root, store.volume.filesystem)
        self._others[store.root] = store
        return store

    def make_volume_for(self, path: str | Path) -> Self:
        """Make a volume at the root of the filesystem a path is on."""
        return self.add_volume(volume_root(mount_of(Path(path)).point))

    def record_owner(self, owner: Owner) -> int:
        """Record an owner that holds nothing yet; return its number in the index of this volume."""
        return self.volume.index.add_owner(_owners.complete(owner))

    def stores(self) -> list[Self]:
        """Return this store and its neighbours on other filesystems that are mounted now."""
        if self._known_volumes is None:
            self._known_volumes = self.volume.index.volumes()
        for path, filesystem in list(self._known_volumes):
            if path in self._others or not path.is_dir() or filesystem_id(path) != filesystem:
                continue
            try:
                self._others[path] = type(self)(path, settings=self.settings, _catalog=self.catalog)
            except StoreError as error:
                # One that cannot be opened is left out: everything else goes on working.
                _log.warning("the volume %s is left out: %s", path, error)
                self._known_volumes = [v for v in self._known_volumes if v[0] != path]
        return [self, *self._others.values()]

    def volume_of(self, path: str | Path) -> Self:
        """Return the store on the filesystem of a path; raise if there is none there."""
        device = os.stat(nearest_existing(Path(path))).st_dev
        for store in self.stores():
            if store.volume.device == device:
                return store
        message = f"There is no volume on the filesystem of {path}"
        hint = "Copy the file, or make a volume there: smartcache add --adopt --make-volume."
        raise FileSkippedError(message, hint=hint, reason="other filesystem", path=Path(path))

    def _holder(self, digest: str, near: Path | None = None) -> Self:
        """Return a volume that has a blob: on the filesystem of `near`, this one, or any."""
        stores = self.stores()
        if near is not None and len(stores) > 1:
            device = os.stat(nearest_existing(near)).st_dev
            stores.sort(key=lambda store: store.volume.device != device)
        for store in stores:
            if store.volume.index.blob(digest) is not None:
                return store
        raise BlobNotFoundError(f"No blob {digest} in {self.root}", digest=digest)
