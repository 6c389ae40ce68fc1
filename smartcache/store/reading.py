"""The part of a store that only asks: finding, opening and listing blobs on all volumes."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Self

from smartcache.config import Settings, with_home
from smartcache.errors import BadDigestError, BlobNotFoundError, FileSkippedError, StoreError
from smartcache.store.digest import Algorithm, Hashes, check_hex
from smartcache.store.duplicates import Scope
from smartcache.store.filesystems import filesystem_id, nearest_existing
from smartcache.store.journal import BatchSummary
from smartcache.store.layout import is_digest
from smartcache.store.leases import Leases
from smartcache.store.memos import hashes_of
from smartcache.store.owners import Liveness, live_holders, liveness
from smartcache.store.proof import Advance, checked, open_blob
from smartcache.store.records import Blob, KnownFolder, Link, Owner, Seen, Sighting
from smartcache.store.volume import Volume
from smartcache.store.vouched import known_hashes

_log = logging.getLogger(__name__)
_SHORTEST_PREFIX = 4


class StoreReader:
    """A volume, its neighbours on other filesystems, and the questions one can ask of them."""

    def __init__(self, root: str | Path | None = None, *, settings: Settings | None = None) -> None:
        self.settings = with_home(settings, root)
        self.volume = Volume(self.settings.home, self.settings)
        self._others: dict[Path, Self] = {}
        self._known_volumes: list[tuple[Path, str]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        """Return the class and the root."""
        return f"{type(self).__name__}({str(self.root)!r})"

    def close(self) -> None:
        """Close the index of this store and of its neighbours."""
        for other in self._others.values():
            other.close()
        self.volume.close()

    @property
    def root(self) -> Path:
        """The directory of the store."""
        return self.volume.root

    @property
    def leases(self) -> Leases:
        """One worker per key, across threads and processes."""
        return self.volume.leases

    def open(self, digest: str) -> BinaryIO:
        """Open a blob for reading, after making sure that it is what its name says."""
        digest = check_hex("blake3", digest)
        return open_blob(self._holder(digest).volume, digest)

    def path_of(self, digest: str) -> Path:
        """Return the path of a blob that may be read now. Never write to it."""
        digest = check_hex("blake3", digest)
        volume = self._holder(digest).volume
        checked(volume, digest)
        return Path(volume.layout.blob(digest))

    def get(self, digest: str) -> Blob:
        """Return a blob of this volume by its digest."""
        blob = self.volume.index.blob(check_hex("blake3", digest))
        if blob is None or not blob.is_here:
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
        wanted, index = check_hex(algorithm, value), self.volume.index
        if algorithm == "blake3":
            blob = index.blob(wanted)
        else:
            blob = index.blob_by_alias(algorithm, wanted)
        return blob if blob is not None and blob.is_here else None

    def blobs(self, *, order: str = "digest") -> Iterator[Blob]:
        """Go through the blobs of this volume: by digest, size, added, used or oldest."""
        return self.volume.index.blobs(order=order)

    def aliases_of(self, blob: Blob) -> dict[Algorithm, str]:
        """Return the other hashes known for a blob of this volume."""
        return self.volume.index.aliases_of(blob.id)

    def links_of(self, blob: Blob) -> list[Link]:
        """Return the recorded links of a blob of this volume."""
        return self.volume.index.links_of(blob.id)

    def holders_of(self, blob: Blob) -> list[tuple[Owner, Liveness]]:
        """Return who keeps a blob of this volume alive, checked against the disk."""
        return live_holders(self.volume, blob)

    def digest_of(
        self,
        path: str | Path,
        algorithms: Iterable[Algorithm] = ("blake3",),
        *,
        advance: Advance | None = None,
    ) -> Hashes:
        """Return the hashes of any file, remembered while the file stays as it is.

        `advance` is told of bytes that are read.
        """
        return hashes_of(self.volume, Path(path), algorithms, advance=advance)[0]

    def known_hashes(self, paths: Iterable[str | Path]) -> dict[Path, dict[Algorithm, str]]:
        """Return what is known of files' hashes without reading them, for those that are there."""
        return known_hashes(self.volume, map(Path, paths))

    def blob_at(self, path: str | Path) -> Blob | None:
        """Return the blob of this volume that a file is a hard link of, proven or not."""
        st = os.stat(path)
        blob = self.volume.index.blob_by_inode(st.st_ino) if self.volume.is_here(st) else None
        return blob if blob is not None and blob.is_here else None

    def sightings(self, size: int) -> list[Sighting]:
        """Return the files of known folders that had exactly this size when last seen."""
        return self.volume.index.sightings_of_size(size)

    def folders(self) -> list[KnownFolder]:
        """Return the known folders and how many files were seen in them."""
        return self.volume.index.known_folders()

    def sighted(self, folders: Iterable[str | Path], *, min_size: int = 0) -> Iterator[Seen]:
        """Go through the files seen in known folders, the names of an inode after each other."""
        index, volume = self.volume.index, self.volume
        numbers = tuple(filter(None, (index.folder_number(Path(each)) for each in folders)))
        scope = Scope(home=volume.filesystem, boot=volume.boot, folders=numbers, min_size=min_size)
        return index.seen(scope)

    def owners(self) -> list[tuple[Owner, Liveness]]:
        """Return all owners and whether each is live, dead or away."""
        return [(owner, liveness(owner)) for owner in self.volume.index.owners()]

    def history(self) -> list[BatchSummary]:
        """Return what can be undone, newest last."""
        return self.volume.journal.history()

    def stores(self) -> list[Self]:
        """Return this store and its neighbours on other filesystems that are mounted now."""
        if self._known_volumes is None:
            self._known_volumes = self.volume.index.volumes()
        for path, filesystem in list(self._known_volumes):
            if path in self._others or not path.is_dir() or filesystem_id(path) != filesystem:
                continue
            try:
                self._others[path] = type(self)(path, settings=self.settings)
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

    def _holder(self, digest: str) -> Self:
        """Return the volume that has a blob, this one first."""
        wanted = check_hex("blake3", digest)
        for store in self.stores():
            blob = store.volume.index.blob(wanted)
            if blob is not None and blob.is_here:
                return store
        raise BlobNotFoundError(f"No blob {digest} in {self.root}", digest=digest)

    def _holder_for(self, digest: str, path: Path) -> Self:
        """Return a volume that has a blob, if possible on the filesystem of `path`."""
        stores = self.stores()
        if len(stores) == 1:
            return self._holder(digest)
        device = os.stat(nearest_existing(path)).st_dev
        near = (store for store in stores if store.volume.device == device)
        for store in near:
            blob = store.volume.index.blob(digest)
            if blob is not None and blob.is_here:
                return store
        return self._holder(digest)
