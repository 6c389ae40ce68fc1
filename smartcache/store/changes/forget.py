"""Take a single blob out of the store, on request: to `trash/` (undoable) or for good."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass

from smartcache.errors import BlobInUseError, BlobNotFoundError, DamagedBlobError
from smartcache.store.blobs import checked, commit, explained, prove, unlink_measured
from smartcache.store.changes.journal import Batch, Change, State
from smartcache.store.changes.userfile import Undoing
from smartcache.store.owners import keepers_of
from smartcache.store.records import Trust
from smartcache.store.volume import Volume
from smartcache.system import hash_file, open_own, reached


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgotten:
    """What `forget` did: `freed_size` is what the filesystem gave back (trash: nothing yet)."""

    digest: str
    size: int
    freed_size: int
    is_in_trash: bool


# do


def forget(volume: Volume, digest: str, *, batch: Batch, to_trash: bool = True) -> Forgotten:
    """Remove a blob that nobody holds; files that share its bytes stay where they are."""
    source, trash = volume.layout.blob(digest), volume.layout.trash / digest
    if volume.index.blob(digest) is None and os.path.exists(source):
        prove(volume, digest)  # an earlier removal was killed between the row and the file
    with explained(volume.root), volume.guard("remove a blob", exclusive=True):
        blob = volume.index.record(digest)
        if blob is None or blob.trust == Trust.TRASHED:
            raise BlobNotFoundError(f"No blob {digest} in {volume.root}", digest=digest)
        keepers = keepers_of(volume, blob)
        holders = [str(owner) for owner, _ in keepers.holders]
        holders += [f"symlink {link.path}" for link in keepers.symlinks]
        if holders:
            message = f"Blob {digest[:12]} is held by {', '.join(holders)}"
            raise BlobInUseError(message, digest=digest, holders=holders)
        if not to_trash or not os.path.exists(source):
            with volume.index.write(durable=True):
                volume.index.drop_blob(blob.id)
            reached("forget: row removed")
            freed = unlink_measured(source)
            return Forgotten(digest=digest, size=blob.size, freed_size=freed, is_in_trash=False)
        (change,) = batch.begin([Change.before("forget", trash, digest, os.stat(source))])
        with volume.index.write(durable=True):
            volume.index.mark_gone(blob.id, Trust.TRASHED)
        reached("forget: row removed")
        os.replace(source, trash)
        reached("forget: moved")
        batch.end(change, "done")
    return Forgotten(digest=digest, size=blob.size, freed_size=0, is_in_trash=True)


# finish after a crash


def finish(volume: Volume, change: Change) -> State:
    """Say whether a removal that was killed has reached the trash; else its blob comes back."""
    if (volume.layout.trash / change.digest).exists():
        return "done"
    with suppress(BlobNotFoundError, DamagedBlobError):
        prove(volume, change.digest)
    return "back"


# undo


def undo(volume: Volume, change: Change, undoing: Undoing) -> str:
    """Bring a blob back from the trash; it is hashed on the way."""
    trashed = volume.layout.trash / change.digest
    descriptor = open_own(trashed)
    try:
        hashes, _ = hash_file(
            descriptor, advance=undoing.job.advance, threads=volume.settings.threads
        )
    finally:
        os.close(descriptor)
    if hashes.digest != change.digest:
        return "the file in the trash is damaged; left there"
    commit(volume, trashed, hashes)
    trashed.unlink(missing_ok=True)
    return ""


def is_gone(volume: Volume, change: Change) -> bool:
    """Say whether the bytes are neither in the trash nor in the store."""
    is_trashed = os.path.lexists(volume.layout.trash / change.digest)
    return not is_trashed and not os.path.lexists(volume.layout.blob(change.digest))


def is_restored(volume: Volume, change: Change) -> bool:
    """Say whether the bytes are in the store again."""
    is_trashed = (volume.layout.trash / change.digest).exists()
    if is_trashed or not os.path.exists(volume.layout.blob(change.digest)):
        return False
    checked(volume, change.digest)
    return True
