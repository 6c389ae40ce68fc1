"""Take a single blob out of the store, on request: to `trash/` (undoable) or for good."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from smartcache.errors import BlobInUseError, BlobNotFoundError
from smartcache.store.blobs import explained
from smartcache.store.faults import reached
from smartcache.store.journal import Batch, Change
from smartcache.store.owners import live_holders, living_symlinks
from smartcache.store.proof import prove
from smartcache.store.prune import unlink_measured
from smartcache.store.records import Trust
from smartcache.store.volume import Volume


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgotten:
    """What `forget` did: `freed_size` is what the filesystem gave back (trash: nothing yet)."""

    digest: str
    size: int
    freed_size: int
    is_in_trash: bool


def forget(volume: Volume, digest: str, *, batch: Batch, to_trash: bool = True) -> Forgotten:
    """Remove a blob that nobody holds; files that share its bytes stay where they are."""
    _bring_back_half_removed(volume, digest)
    with explained(volume.root), volume.guard("remove a blob", exclusive=True):
        blob = volume.index.blob(digest)
        if blob is None or blob.trust == Trust.TRASHED:
            raise BlobNotFoundError(f"No blob {digest} in {volume.root}", digest=digest)
        holders = [str(owner) for owner, _ in live_holders(volume, blob)]
        holders += [f"symlink {link.path}" for link in living_symlinks(volume, blob)]
        if holders:
            message = f"Blob {digest[:12]} is held by {', '.join(holders)}"
            raise BlobInUseError(message, digest=digest, holders=holders)
        source = volume.layout.blob(digest)
        if not to_trash or not os.path.exists(source):
            with volume.index.write(durable=True):
                volume.index.drop_blob(blob.id)
            reached("forget: row removed")
            freed = unlink_measured(source)
            return Forgotten(digest=digest, size=blob.size, freed_size=freed, is_in_trash=False)
        trash = volume.layout.trash / digest
        change = Change.before("forget", Path(trash), digest, os.stat(source))
        (change,) = batch.begin([change])
        with volume.index.write(durable=True):
            volume.index.mark_gone(blob.id, Trust.TRASHED)
        reached("forget: row removed")
        os.replace(source, trash)
        reached("forget: moved")
        batch.end(change, "done")
    return Forgotten(digest=digest, size=blob.size, freed_size=0, is_in_trash=True)


def _bring_back_half_removed(volume: Volume, digest: str) -> None:
    """Give a blob its row again whose removal was killed between the row and the file."""
    blob = volume.index.blob(digest)
    is_known = blob is not None and blob.is_here
    if not is_known and os.path.exists(volume.layout.blob(digest)):
        prove(volume, digest)
