"""Take the bytes of a wanted file from this machine, or from a tier.

A file in an HF cache or in a folder that was given to smartcache becomes a blob in place. From any
other folder the bytes are copied (by reflink where that works): a download never changes a
stranger's file. Where no volume can link, the copy goes straight to the target.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import BinaryIO, Literal

from smartcache.errors import (
    CannotLinkError,
    DestinationExistsError,
    FileSkippedError,
    NoSpaceError,
    SmartcacheError,
    StoreError,
)
from smartcache.hub import asides
from smartcache.hub.arrivals import Arrivals
from smartcache.hub.outcome import Watch
from smartcache.hub.records import Candidate, PlannedFile
from smartcache.hub.targets import CacheTarget, LocalTarget, Target
from smartcache.store import Link, Offer, Store, Wanted, check_expected, copy_hashed
from smartcache.system import Advance, Algorithm, Hasher, link_fd, open_unnamed, reached

_log = logging.getLogger(__name__)


class Claims:
    """Puts bytes that this machine has at the target of one download.

    `is_loan`: it is not yet known whether anybody wants them there, so nobody owns them. `watch`
    is told of copies that no journal has.
    """

    def __init__(
        self,
        store: Store,
        near: Store | None,
        target: Target,
        *,
        watch: Watch,
        is_loan: bool = False,
    ) -> None:
        self._store = store
        self._near = near
        self._target = target
        self._watch = watch
        self._owner = None if is_loan else target.owner
        self._arrivals = Arrivals(store, near, target)

    @property
    def has_volume(self) -> bool:
        """Whether there is a volume where the files are wanted."""
        return self._near is not None

    def place_known(self, planned: PlannedFile, *, near: bool = False) -> bool:
        """Place the blob with the announced bytes; False if the store has none that is whole.

        `near`: only a blob that lies on the target's filesystem.
        """
        ((algorithm, value),) = planned.file.announced.items()
        if near:
            blob = None if self._near is None else self._near.find_here(algorithm, value)
        else:
            blob = self._store.find(algorithm, value)
        if blob is None:
            return False
        try:
            self._place(planned, blob.digest)
        except FileNotFoundError:  # it was pruned, or is gone
            return False
        except StoreError as error:
            if _is_full(error):
                raise
            _log.debug("blob %s is not used: %s", blob.digest, error)
            return False
        return True

    def claim(self, planned: PlannedFile, candidate: Candidate) -> bool:
        """Take the bytes from a file if it has them; False if not, which is remembered."""
        ((algorithm, wanted),) = planned.file.announced.items()
        path = candidate.path
        try:
            hashes = self._store.digest_of(path, ("blake3", algorithm))
            if hashes.get(algorithm) != wanted:
                return False
            if _is_at(path, self._target.spot(planned.file)):
                self._target.settled(planned.file)  # another process has brought it meanwhile
            elif self._near is None or not planned.is_weight:  # texts are never shared
                with open(path, "rb") as source:
                    self._write(planned, lambda to: _copy(source, to, "blake3", hashes.digest))
            else:
                self._bring_in(self._near, candidate, hashes.digest)
                self._near.add_aliases(hashes.digest, {algorithm: wanted})
                self._place(planned, hashes.digest)
        except (StoreError, OSError) as error:  # it changed, went away, or its disk is broken
            if _is_full(error):
                raise
            _log.debug("%s is not used for %s: %s", path, planned.file.path, error)
            return False
        return True

    def bring(self, planned: PlannedFile) -> bool:
        """Take the bytes from a store that another user has published; False: none has them."""
        ((algorithm, wanted),) = planned.file.announced.items()
        try:
            if self._near is None or not planned.is_weight:  # texts are never shared
                return algorithm == "sha256" and self._copy_shared(planned, wanted)
            blob = self._store.bring(algorithm, wanted, size=planned.file.size, to=self._near)
            if blob is None:
                return False
            self._place(planned, blob.digest)
        except (StoreError, OSError) as error:
            if _is_full(error):
                raise
            _log.warning("%s is not taken from a shared store: %s", planned.file.path, error)
            return False
        return True

    def take(self, planned: PlannedFile, advance: Advance | None = None) -> bool:
        """Take the bytes from a tier that has them; False, and a warning if one fails to give them.

        Which has them is asked now if the plan had another source in mind.
        """
        offer = planned.offer or self._offer(planned)
        if offer is None:
            return False
        expected: dict[Algorithm, str] = {**planned.file.announced, "blake3": offer.digest}
        try:
            if self._near is None or not planned.is_weight:  # texts are never shared
                self._write(planned, lambda to: _write_offer(offer, to, expected, advance))
            else:
                blob = self._store.take(offer, expected, to=self._near, advance=advance)
                reached("tier: taken")
                self._place(planned, blob.digest)
        except (SmartcacheError, OSError) as error:
            if _is_full(error):
                raise
            _log.warning(
                "%s is not taken from the tier %s: %s", planned.file.path, offer.tier.name, error
            )
            return False
        return True

    def _offer(self, planned: PlannedFile) -> Offer | None:
        ((algorithm, value),) = planned.file.announced.items()
        wanted = Wanted(algorithm=algorithm, value=value, size=planned.file.size)
        return self._store.find_in_tiers([wanted]).get(wanted)

    def _bring_in(self, near: Store, candidate: Candidate, digest: str) -> None:
        """Make a file's bytes a blob: in place where the user lets us, else a copy."""
        if candidate.may_link and not candidate.is_far:
            try:
                near.adopt(candidate.path, expected={"blake3": digest})
                return
            except FileSkippedError as error:
                _log.debug("%s is copied: %s", candidate.path, error)
        near.put_file(candidate.path, expected={"blake3": digest})

    def _place(self, planned: PlannedFile, digest: str) -> None:
        spot = self._target.spot(planned.file)
        spot.parent.mkdir(parents=True, exist_ok=True)
        leads_nowhere = os.path.islink(spot) and not os.path.exists(spot)
        may_replace = leads_nowhere or isinstance(self._target, LocalTarget)
        try:
            with self.making_room(planned):
                link = self._link(planned, digest, spot, may_replace=may_replace)
        except DestinationExistsError:
            self._arrivals.prove(planned, spot)  # somebody else was faster
            return
        is_copy = link.kind == "copy" and self._near is not None and planned.is_weight
        if is_copy and isinstance(self._target, CacheTarget):
            self._arrivals.prove(planned, spot)
        self._target.settled(planned.file)

    def _link(self, planned: PlannedFile, digest: str, spot: Path, *, may_replace: bool) -> Link:
        kinds = self._target.kinds(is_weight=planned.is_weight)
        for number, kind in enumerate(kinds, 1):
            try:
                return self._store.place(
                    digest, spot, kind=kind, whole=planned.is_weight, overwrite=may_replace,
                    keep=True, owner=self._owner,
                )  # fmt: skip
            except CannotLinkError:
                if number == len(kinds):
                    raise
        raise AssertionError(kinds)

    def making_room(self, planned: PlannedFile) -> AbstractContextManager[None]:
        """Let another file come to where a stale one is; what is the user's own is kept.

        In an HF cache blobs are replaced as a whole. In a `local_dir` an older version from the Hub
        may be overwritten, but what is the user's own or has other names must not be there.
        """
        if isinstance(self._target, CacheTarget):
            return nullcontext()
        store = self._near or self._store
        spot = self._target.spot(planned.file)
        ((algorithm, _),) = planned.file.announced.items()
        known = store.known_hashes([spot]).get(spot, {}).get(algorithm)
        if self._target.is_own(planned.file, known):
            kept = store.volume.layout.new_bad(planned.file.etag)
            return asides.out_of_the_way(self._store, spot, kept=kept)
        if self._target.is_shared(planned.file):
            return asides.out_of_the_way(self._store, spot, kept=None)
        return nullcontext()

    def _copy_shared(self, planned: PlannedFile, sha256: str) -> bool:
        for found in self._store.find_shared("sha256", sha256, size=planned.file.size):
            with open(found.store.open(found.digest), "rb") as source:
                self._write(planned, lambda to: _copy(source, to, "sha256", sha256))
            return True
        return False

    def _write(self, planned: PlannedFile, write: Callable[[int], None]) -> None:
        """Write a file of its own at the target; no half or wrong one is ever visible.

        `write` gets a descriptor, and raises if the bytes are not the right ones.
        """
        spot = self._target.spot(planned.file)
        spot.parent.mkdir(parents=True, exist_ok=True)
        with asides.copy_beside(self._store, spot) as temporary, ExitStack() as stack:
            descriptor = open_unnamed(spot.parent, 0o666)
            is_unnamed = descriptor is not None
            if descriptor is None:
                descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            stack.callback(os.close, descriptor)
            write(descriptor)
            os.fsync(descriptor)
            if is_unnamed:
                link_fd(descriptor, temporary)
            reached("claim: copied")
            with self.making_room(planned):
                os.replace(temporary, spot)
        self._watch.copied(spot)
        self._target.settled(planned.file)


def _copy(
    source: BinaryIO, target: int, algorithm: Literal["blake3", "sha256"], wanted: str
) -> None:
    """Copy a file, hashed on the way; FileSkippedError if it has other bytes."""
    if copy_hashed(source, target, algorithm=algorithm) != wanted:
        raise FileSkippedError(f"what was copied does not have {algorithm} {wanted}")


def _write_offer(
    offer: Offer, target: int, expected: dict[Algorithm, str], advance: Advance | None
) -> None:
    """Write the bytes that a tier gives; an error if they are not those that are expected."""
    hasher = Hasher(expected, size=offer.size)
    for chunk in offer.chunks():
        hasher.update(chunk)
        view = memoryview(chunk)
        while view:
            view = view[os.write(target, view) :]
        if advance is not None:
            advance(len(chunk))
    with offer.judged():
        check_expected(hasher.finish(), expected, what="It")


def _is_at(path: Path, spot: Path) -> bool:
    try:
        return os.path.samefile(path, spot)
    except FileNotFoundError:
        return False


def _is_full(error: Exception) -> bool:
    """Say whether an error means that there is no space left where the file is wanted."""
    codes = (errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, NoSpaceError) or getattr(error, "errno", None) in codes
