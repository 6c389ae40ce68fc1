"""What becomes of a file that is at its target: proven and shared, or set aside.

A file is proven by the hash that the Hub announced for it. A weight that is proven becomes a blob
in place, where a volume can link it. Wrong bytes go to `bad/`, after every pointer to them.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from blake3 import blake3

from smartcache.errors import DigestMismatchError, FileSkippedError, StoreError
from smartcache.hub.records import PlannedFile, RemoteFile
from smartcache.hub.targets import CacheTarget, LocalTarget, Target
from smartcache.store import Store, checked
from smartcache.system import Algorithm, Hashes, effective_user, reached

_log = logging.getLogger(__name__)


class Arrivals:
    """Proves files of one download. `near` is the store on the target's filesystem, if any."""

    def __init__(self, store: Store, near: Store | None, target: Target) -> None:
        self._store = store
        self._near = near
        self._target = target

    def prove(self, planned: PlannedFile, path: Path, followed: Hashes | None = None) -> str:
        """Return the digest of a file with the announced bytes; it is shared where that is safe.

        Raises DigestMismatchError, with nothing changed, if it has others. `followed` are hashes
        from the time of the download, if there are any.
        """
        is_ours = planned.is_weight and self._target.holds(planned.file, path)
        if self._near is not None and is_ours and self._may_adopt():
            known = self._prove_blob(self._near, planned, path)
            if known is not None:
                return known
            try:
                return self._adopt(self._near, planned, path, followed)
            except (FileSkippedError, FileNotFoundError) as error:  # or undone in this moment
                _log.debug("%s is not shared: %s", path, error)
        return self._only_compare(planned, path, followed)

    def accept(
        self,
        planned: PlannedFile,
        path: Path,
        followed: Hashes | None = None,
        *,
        is_locked: bool = False,
    ) -> None:
        """Prove a file that was downloaded; wrong bytes are set aside, and raised.

        `is_locked`: the caller has the lock of this content.
        """
        try:
            self.prove(planned, path, followed)
        except DigestMismatchError as error:
            if is_locked:
                kept = self._set_aside(planned, path)
            else:
                found = self.set_aside(planned, path)
                if found is None and os.path.exists(path):
                    return
                kept = found or Path(self._store.volume.layout.bad)
            ((name, wanted),) = planned.file.announced.items()
            message = (
                f"{planned.file.path} has {name} {getattr(error, 'found', 'unknown')}, "
                f"but {wanted} was announced; what arrived is kept as {kept}"
            )
            hint = "Run the download again; if this happens again, the file on the Hub is damaged."
            raise DigestMismatchError(
                message, hint=hint, path=planned.file.path, kept=kept
            ) from error

    def prove_present(self, planned: PlannedFile) -> bool:
        """Prove a file that was there before; False: it is wrong, or gone.

        A wrong one is set aside in an HF cache.
        In a `local_dir` wrong bytes are another version, which is going to be replaced.
        """
        path = planned.found
        if path is None:
            return False
        try:
            self.prove(planned, path)
        except FileNotFoundError:
            return False
        except DigestMismatchError as error:
            if isinstance(self._target, CacheTarget):
                if self.set_aside(planned, path) is None:
                    return os.path.exists(path)
                _log.warning("%s; it is fetched again", error)
            return False
        if isinstance(self._target, LocalTarget):
            self._target.settled(planned.file)
        return True

    def judge_pointer(self, planned: PlannedFile, target: CacheTarget) -> bool:
        """Remove a pointer to a blob of another name, unless that has the announced bytes."""
        path = target.elsewhere(planned.file)
        if path is None:
            return False
        try:
            self.prove(planned, path)
        except (DigestMismatchError, FileNotFoundError):
            count_wrong(self._store, target)
            target.drop_wrong_pointer(planned.file)
            return False
        return True

    def set_aside(self, planned: PlannedFile, path: Path) -> Path | None:
        """Move a file with wrong bytes to `bad/`; no pointer to it remains. Return where it is.

        None: another process was faster; it may have brought the right bytes since. The lock of
        the content keeps its right file from being taken for the wrong one.
        """
        reached("download: wrong")
        with self._store.key_locks.hold(
            key_of(planned.file), what="set wrong bytes aside", on_wait=self._store.volume.on_wait
        ):
            try:
                self.prove(planned, path)
            except FileNotFoundError:
                return None
            except DigestMismatchError:
                return self._set_aside(planned, path)
            return None

    def _set_aside(self, planned: PlannedFile, path: Path) -> Path:
        try:
            kept = self._take_away(planned, path)
        except OSError as error:
            message = f"{planned.file.path} has wrong bytes and cannot be removed: {error}"
            hint = "Ask the owner of the folder, or download to another one."
            raise DigestMismatchError(message, hint=hint, path=planned.file.path) from error
        _log.warning("%s has wrong bytes; it is kept as %s", planned.file.path, kept)
        return kept

    def _take_away(self, planned: PlannedFile, path: Path) -> Path:
        is_ours = self._target.holds(planned.file, path)
        count_wrong(self._store, self._target)
        self._target.hide(planned.file)
        reached("download: hidden")
        kept = path
        if is_ours:
            store = self._near or self._store
            kept = store.volume.layout.new_bad(planned.file.etag)
            try:
                os.rename(path, kept)
            except OSError:  # another filesystem
                shutil.move(path, kept)
        spot = self._target.spot(planned.file)
        if os.path.islink(spot):  # to huggingface_hub's shared store, or to somebody's own file
            os.unlink(spot)
        return kept

    def _may_adopt(self) -> bool:
        # A link to a blob in a folder where others write in place is not safe for root.
        return isinstance(self._target, CacheTarget) or effective_user() != 0

    def _prove_blob(self, near: Store, planned: PlannedFile, path: Path) -> str | None:
        """Prove a file that is a blob already by its digest, which is faster than by SHA-256."""
        blob = near.blob_at(path)
        if blob is None:
            return None
        aliases = near.aliases_of(blob)
        if any(aliases.get(name) != value for name, value in planned.file.announced.items()):
            return None
        try:
            checked(near.volume, blob.digest)
        except StoreError:
            return None
        return blob.digest

    def _adopt(self, near: Store, planned: PlannedFile, path: Path, followed: Hashes | None) -> str:
        announced, owner = planned.file.announced, self._target.owner
        if followed is not None and _agrees(followed, announced):
            try:
                expected: dict[Algorithm, str] = {"blake3": followed.digest}
                digest = near.adopt(path, owner=owner, expected=expected).digest
                near.add_aliases(digest, followed.values)
                self._share(near, path, digest)
                return digest
            except DigestMismatchError:
                pass  # what was followed is not what is there now: look at the file itself
        digest = near.adopt(path, owner=owner, expected=announced).digest
        self._share(near, path, digest)
        return digest

    def _share(self, near: Store, path: Path, digest: str) -> None:
        """Let a file whose bytes are a blob in another inode be a link to that one."""
        if os.path.samefile(path, near.volume.layout.blob(digest)):
            return
        try:
            near.replace(path, digest, owner=self._target.owner)
        except StoreError as error:
            _log.debug("%s keeps its own bytes: %s", path, error)

    def _only_compare(self, planned: PlannedFile, path: Path, followed: Hashes | None) -> str:
        announced = planned.file.announced
        store = self._near or self._store
        if followed is not None and _agrees(followed, announced):
            hashes = store.digest_of(path)
            if hashes.digest == followed.digest:
                return hashes.digest
        hashes = store.digest_of(path, ("blake3", *announced))
        if not _agrees(hashes, announced):
            raise mismatch(planned, hashes)
        return hashes.digest


def wrong_count(store: Store, target: Target) -> int:
    """Return how often wrong bytes were found in this repo: whoever loads from it compares."""
    return int(store.volume.index.note(_wrong_key(target)) or 0)


def count_wrong(store: Store, target: Target) -> None:
    """Tell whoever is loading from this repo that wrong bytes were found in it."""
    if not isinstance(target, CacheTarget):
        return
    try:
        with store.volume.index.write():
            count = wrong_count(store, target) + 1
            store.volume.index.set_note(_wrong_key(target), str(count))
    except StoreError as error:  # a full disk: that the bytes go away matters more
        _log.warning("could not record that %s has wrong bytes: %s", target.repo, error)


def _wrong_key(target: Target) -> str:
    place = target.folder if isinstance(target, CacheTarget) else target.root
    return f"wrong:{blake3(os.fsencode(place)).hexdigest()[:32]}"


def key_of(file: RemoteFile) -> str:
    """Return the key that one process at a time holds while it brings a content."""
    return f"hub:{file.etag}"


def _agrees(hashes: Hashes, announced: dict[Algorithm, str]) -> bool:
    return all(hashes.get(name) == value for name, value in announced.items())


def mismatch(planned: PlannedFile, hashes: Hashes) -> DigestMismatchError:
    """Return the error for a file whose bytes are not those announced."""
    ((name, wanted),) = planned.file.announced.items()
    message = f"{planned.file.path} has {name} {hashes.get(name)}, but {wanted} was announced"
    return DigestMismatchError(message, expected=wanted, found=hashes.get(name))
