"""Bring a file of the Hub to its place: from this machine, from a tier, or fetched; and prove it.

There is no other way for bytes to come: downloads, and the answers that libraries get, end here.
Sources are tried in this order: a blob on this filesystem, files that may have the bytes, blobs on
other filesystems, tiers; what none of them has is fetched, under a name that no program looks for.
A file has its name only when its bytes are those that the Hub announced. A weight then becomes a
blob in place, where a pool can link it.

A file in an HF cache or in a folder that was given to smartcache becomes a blob in place. From any
other folder the bytes are copied (by reflink where that works): a download never changes a
stranger's file. Wrong bytes go to `bad/`, after every pointer to them: never are they deleted.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Literal

from smartcache.errors import (
    CannotLinkError,
    DestinationExistsError,
    DigestMismatchError,
    FileSkippedError,
    NoSpaceError,
    SmartcacheError,
    StoreError,
)
from smartcache.hub.outcome import Watch
from smartcache.hub.places import CachePlace, LocalPlace, Place, half_made
from smartcache.hub.records import Candidate, PlannedFile, RemoteFile, Source
from smartcache.store.blobs import check_expected, checked, copy_hashed, write_all
from smartcache.store.hashes import Read
from smartcache.store.layout import Pool
from smartcache.store.records import Link
from smartcache.store.sources import Offer, Wanted
from smartcache.store.store import Store
from smartcache.system.faults import reached
from smartcache.system.hashing import Advance, Algorithm, Hasher, Hashes, hash_file
from smartcache.system.kernel import effective_user

_log = logging.getLogger(__name__)

_SMALL = 1 << 20
Fetch = Callable[[Path], Hashes | None]
"""Fetches a file to a path that is free; returns hashes from the time of the download, if any."""


def near_pool(store: Store, place: Path) -> Pool | None:
    """Return the pool on the filesystem of a place, which hard links reach; None: none."""
    try:
        return store.pool_of(place)
    except FileSkippedError:
        return None


def move_to_bad(pool: Pool, path: Path, name: str) -> Path:
    """Move a file that is not what its name says to `bad/` of a pool; return where it is."""
    pool.create()
    kept = pool.new_bad(name)
    shutil.move(path, kept)
    return kept


def fetch_proven(
    place: Place,
    file: RemoteFile,
    fetch: Fetch,
    *,
    pool: Pool | None = None,
    may_trust: bool = False,
) -> Hashes:
    """Fetch a file and prove it before it has its name; wrong bytes are set aside, and raised.

    `pool` keeps them, if there is one. `may_trust`: hashes from the time of the download will do.
    """
    part = _half_made(place, file)
    is_small = file.size is not None and file.size < _SMALL
    try:
        hashes = fetch(part)
        # Open for writing: so nobody takes it for the leftover of a dead process.
        descriptor = os.open(part, os.O_RDWR)
        try:
            reached("download: fetched")
            if is_small and not may_trust:  # a repo may have ten thousand of them
                hasher = Hasher(file.announced, size=file.size)
                while chunk := os.read(descriptor, _SMALL):
                    hasher.update(chunk)
                hashes = hasher.finish()
            elif hashes is None or not may_trust or not _agrees(hashes, file.announced):
                hashes = hash_file(part, ("blake3", *file.announced))[0]
            if not _agrees(hashes, file.announced):
                kept: Path | None = None
                with suppress(OSError, SmartcacheError):
                    kept = None if pool is None else move_to_bad(pool, part, file.etag)
                fate = "not kept: no store can take it" if kept is None else f"kept as {kept}"
                _log.warning("%s has wrong bytes; it is %s", file.path, fate)
                raise _arrived_wrong(file, hashes, kept)
            _name(place, file, part)
        finally:
            os.close(descriptor)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    reached("download: named")
    return hashes


def _half_made(place: Place, file: RemoteFile) -> Path:
    directory = place.unfinished(file)
    directory.mkdir(parents=True, exist_ok=True)
    return half_made(directory, file.etag)


def _name(place: Place, file: RemoteFile, part: Path) -> None:
    """Give a proven file its name."""
    spot = place.spot(file)
    try:
        os.replace(part, spot)
    except FileNotFoundError:
        spot.parent.mkdir(parents=True, exist_ok=True)
        os.replace(part, spot)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        shutil.move(part, spot)


def key_of(file: RemoteFile) -> str:
    """Return the key that one process at a time holds while it brings a content."""
    return f"hub:{file.etag}"


class Bringing:
    """Brings files to one place, of which `watch` hears.

    `is_helping`: where the store fails (a full or broken disk, no permission), a library must load
    as it would alone; then the file is fetched and proven all the same.
    """

    def __init__(
        self, store: Store, place: Place, *, watch: Watch, is_helping: bool = False
    ) -> None:
        self.store = store
        self.place = place
        self.near = near_pool(store, place.root)
        self.watch = watch
        self._is_helping = is_helping

    def bring(
        self,
        planned: PlannedFile,
        *,
        fetch: Fetch | None = None,
        look_again: Callable[[], Iterable[Candidate]] = tuple,
        advance: Advance | None = None,
        is_forced: bool = False,
        is_second: bool = False,
        is_shared_later: bool = False,
    ) -> Source | None:
        """Let a file that is not there be at its spot, proven; say where it came from.

        None: nobody has the bytes, and there is no `fetch`. Wrong bytes that were fetched are set
        aside and raised. `look_again` tells who may have them by now, if somebody was waited for;
        `advance` is told of bytes that come from a tier. `is_forced`: it is fetched, whoever has
        it. `is_second`: all was tried before, but the store may have it by now. `is_shared_later`:
        the caller lets what was fetched become a blob, with `accept`.
        """
        file = planned.file
        source: Source | None = None
        with ExitStack() as stack:
            with self._helped(file):
                if planned.is_large:
                    # Whoever waits for this lock finds the bytes when it ends: a proven blob.
                    what = f"download of {file.path}"
                    on_wait = self.store.on_wait
                    stack.enter_context(
                        self.store.key_locks.hold(key_of(file), what=what, on_wait=on_wait)
                    )
                    reached("download: leased")
                if not is_forced:
                    source = self._from_store(planned, look_again)
                if source is None and not is_forced and not is_second:
                    source = self._from_elsewhere(planned, advance)
            if source is not None or fetch is None:
                return source
            # Nobody looks at a text again; a weight is proven once more when it is shared.
            followed = fetch_proven(
                self.place, file, fetch, pool=self._pool, may_trust=planned.is_weight
            )
            if planned.is_weight and not is_shared_later:
                with self._helped(file):
                    self.accept(planned, followed)
            return "fetch"

    @property
    def _pool(self) -> Pool:
        """The pool that keeps wrong bytes: the near one, or the first."""
        return self.near or self.store.pools()[0]

    @contextmanager
    def _helped(self, file: RemoteFile) -> Iterator[None]:
        """Let a library's download go on where the store fails. Wrong bytes are never forgiven."""
        try:
            yield
        except DigestMismatchError:
            raise
        except (SmartcacheError, OSError) as error:
            if not self._is_helping:
                raise
            _log.warning("smartcache does not help with %s: %s", file.path, error)

    # from this machine, and from others

    def _from_store(
        self, planned: PlannedFile, look_again: Callable[[], Iterable[Candidate]]
    ) -> Source | None:
        """Take what the store has, or a file that may have the bytes."""
        if not planned.is_large:
            return None
        if self.near is not None and self._place_known(planned, self.near):
            return "link" if self.place.kinds(is_weight=planned.is_weight)[0] == "auto" else "copy"
        for each in planned.candidates:
            if self._claim(planned, each):
                return "copy" if each.is_far else "reuse"
        if self._place_known(planned, None):
            return "copy"
        # What another process has fetched is in its HF cache only: a text, or there is no pool.
        is_nowhere_else = self.near is None or not planned.is_weight
        if is_nowhere_else and any(self._claim(planned, each) for each in look_again()):
            return "reuse"
        return None

    def _from_elsewhere(self, planned: PlannedFile, advance: Advance | None) -> Source | None:
        """Take what a tier has."""
        file, offer = planned.file, planned.offer
        if planned.is_large and offer is None and self.store.sources:
            wanted = Wanted(algorithm=file.algorithm, value=file.etag, size=file.size)
            offer = self.store.asking.offers(self.store.sources, [wanted]).get(wanted)
        return "tier" if offer is not None and self._take(planned, offer, advance) else None

    def _place_known(self, planned: PlannedFile, pool: Pool | None) -> bool:
        """Place the blob that a pool (None: any) has under the announced hash; False: none."""
        blob = self.store.find(planned.file.algorithm, planned.file.etag, pool=pool)
        if blob is None:
            return False
        with _left_if_it_fails(f"blob {blob.digest} is not used"):  # it may be pruned by now
            self._place(planned, blob.digest)
            return True
        return False

    def _claim(self, planned: PlannedFile, candidate: Candidate) -> bool:
        """Take the bytes from a file if it has them; False if not, which is remembered."""
        file, path, near = planned.file, candidate.path, self.near
        # It may change, go away, or have a broken disk.
        with _left_if_it_fails(f"{path} is not used for {file.path}"):
            read = Read()
            hashes = self.store.digest_of(path, ("blake3", file.algorithm), read=read)
            if hashes.get(file.algorithm) != file.etag:
                return False
            if _is_at(path, self.place.spot(file)):
                self.place.settled(file)  # another process has brought it meanwhile
            elif near is None or not planned.is_weight:  # texts are never shared
                with open(path, "rb") as source:
                    self._write(planned, lambda to: _copy(source, to, "blake3", hashes.digest))
            else:
                self._bring_in(near, candidate, hashes.digest, read)
                self.store.catalog.add_hashes([(hashes.digest, {file.algorithm: file.etag})])
                self._place(planned, hashes.digest)
            return True
        return False

    def _bring_in(self, near: Pool, candidate: Candidate, digest: str, read: Read) -> None:
        """Make a file's bytes a blob: in place where the user lets us, else a copy.

        They are hashed, if not just now: what was remembered says where to look, no more.
        """
        expected: dict[Algorithm, str] = {"blake3": digest}
        if candidate.may_link and not candidate.is_far:
            try:
                self.store.adopt(
                    candidate.path, expected=expected, read=read, batch=self.watch.batch
                )
                return
            except FileSkippedError as error:
                _log.debug("%s is copied: %s", candidate.path, error)
        self.store.put_file(candidate.path, expected=expected, pool=near)

    def _take(self, planned: PlannedFile, offer: Offer, advance: Advance | None) -> bool:
        """Take the bytes from a tier; False, and a warning, if it fails to give them."""
        file = planned.file
        expected: dict[Algorithm, str] = {**file.announced, "blake3": offer.digest}

        def arrived(size: int) -> None:
            self.watch.count_taken(size)
            if advance is not None:
                advance(size)

        failure = f"{file.path} is not taken from the tier {offer.tier.name}"
        with _left_if_it_fails(failure, logging.WARNING):
            if self.near is None or not planned.is_weight:  # texts are never shared
                self._write(planned, lambda to: _write_offer(offer, to, expected, arrived))
            else:
                digest = offer.take(self.store, self.near, expected, arrived)
                reached("tier: taken")
                self._place(planned, digest)
            return True
        return False

    # to the spot

    def _place(self, planned: PlannedFile, digest: str) -> None:
        file, spot = planned.file, self.place.spot(planned.file)
        spot.parent.mkdir(parents=True, exist_ok=True)
        leads_nowhere = os.path.islink(spot) and not os.path.exists(spot)
        may_replace = leads_nowhere or isinstance(self.place, LocalPlace)
        try:
            link = self._link(planned, digest, spot, may_replace=may_replace)
        except DestinationExistsError:
            self.prove(planned, spot)  # somebody else was faster
            return
        if link.kind != "hardlink":
            self.watch.copied(spot)
        is_copy = link.kind == "copy" and self.near is not None and planned.is_weight
        if is_copy and isinstance(self.place, CachePlace):
            self.prove(planned, spot)
        self.place.settled(file)

    def _link(self, planned: PlannedFile, digest: str, spot: Path, *, may_replace: bool) -> Link:
        kinds = self.place.kinds(is_weight=planned.is_weight)
        for number, kind in enumerate(kinds, 1):
            try:
                return self.store.place(
                    digest, spot, kind=kind, whole=planned.is_weight, overwrite=may_replace,
                    keep=True, batch=self.watch.batch, label="download",
                )  # fmt: skip
            except CannotLinkError:
                if number == len(kinds):
                    raise
        raise AssertionError(kinds)

    def _write(self, planned: PlannedFile, write: Callable[[int], None]) -> None:
        """Write a file of its own at the spot; no half or wrong one is ever visible.

        `write` gets a descriptor, and raises if the bytes are not the right ones.
        """
        file = planned.file
        part = _half_made(self.place, file)
        try:
            # Open until it has its name: so nobody takes it for the leftover of a dead process.
            descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                write(descriptor)
                os.fsync(descriptor)
                reached("claim: copied")
                _name(self.place, file, part)
            finally:
                os.close(descriptor)
        finally:
            part.unlink(missing_ok=True)
        self.watch.copied(self.place.spot(file))
        self.place.settled(file)

    def accept(self, planned: PlannedFile, followed: Hashes | None = None) -> None:
        """Share a file that was fetched; `followed` are hashes from the time of the download.

        If it has other bytes by now, or had, it is set aside, and raised.
        """
        path = self.place.found(planned.file)
        if path is None:
            return
        try:
            self.prove(planned, path, followed)
        except DigestMismatchError as error:
            kept = self._take_away(planned.file, path)
            raise _arrived_wrong(planned.file, error, kept) from error
        self.place.settled(planned.file)

    # proving

    def prove(self, planned: PlannedFile, path: Path, followed: Hashes | None = None) -> str:
        """Return the digest of a file with the announced bytes; it is shared where that is safe.

        Raises DigestMismatchError, with nothing changed, if it has others. `followed` are hashes
        from the time of the download, if there are any: a head start, never a proof.
        """
        announced = planned.file.announced
        is_ours = planned.is_weight and self.place.holds(planned.file, path)
        # A link to a blob in a folder where others write in place is not safe for root.
        is_safe = isinstance(self.place, CachePlace) or effective_user() != 0
        hint = followed.digest if followed is not None and _agrees(followed, announced) else None
        if self.near is not None and is_ours and is_safe:
            known = _digest_of_blob(self.store, self.near, path, announced)
            if known is not None:
                return known
            try:
                return self._share(path, announced, followed if hint else None)
            except (FileSkippedError, FileNotFoundError) as error:  # or undone in this moment
                _log.debug("%s is not shared: %s", path, error)
        if hint is not None and self.store.digest_of(path).digest == hint:
            return hint
        hashes = self.store.digest_of(path, ("blake3", *announced))
        if not _agrees(hashes, announced):
            file, found = planned.file, hashes.get(planned.file.algorithm)
            message = f"{file.path} has {file.algorithm} {found}, but {file.etag} was announced"
            raise DigestMismatchError(message, expected=file.etag, found=found)
        return hashes.digest

    def _share(
        self, path: Path, announced: Mapping[Algorithm, str], followed: Hashes | None
    ) -> str:
        """Let a file be a blob, or a link of the one that has its bytes; return the digest."""
        if followed is not None:
            # What was followed may not be what is there now: then look at the file itself.
            with suppress(DigestMismatchError):
                digest = self._link_in(path, {"blake3": followed.digest})
                self.store.catalog.add_hashes([(digest, followed.values)])
                return digest
        return self._link_in(path, announced)

    def _link_in(self, path: Path, expected: Mapping[Algorithm, str]) -> str:
        batch, read = self.watch.batch, Read()
        blob = self.store.adopt(path, expected=expected, read=read, batch=batch)
        if os.stat(path).st_ino != blob.inode:  # its bytes are a blob in another inode
            (linked,) = self.store.link_many(
                [path], label="download", batch=batch, replace=True, read=read
            )
            if linked.error is not None:
                _log.debug("%s keeps its own bytes: %s", path, linked.error)
        return blob.digest

    def prove_present(self, planned: PlannedFile) -> bool:
        """Prove a file that was there before; False: it is wrong, or gone.

        A wrong one is set aside in an HF cache. In a `local_dir` wrong bytes are another version,
        which is going to be replaced.
        """
        path = planned.found
        if path is None:
            return False
        try:
            self.prove(planned, path)
        except FileNotFoundError:
            return False
        except DigestMismatchError as error:
            if isinstance(self.place, CachePlace):
                if self.set_aside(planned, path) is None:
                    return os.path.exists(path)
                _log.warning("%s; it is fetched again", error)
            return False
        self.place.settled(planned.file)
        return True

    # wrong bytes

    def set_aside(self, planned: PlannedFile, path: Path) -> Path | None:
        """Move a file with wrong bytes to `bad/`; no pointer to it remains. Return where it is.

        None: another process was faster; it may have brought the right bytes since. The lock of
        the content keeps its right file from being taken for the wrong one.
        """
        reached("download: wrong")
        file = planned.file
        with self.store.key_locks.hold(
            key_of(file), what="set wrong bytes aside", on_wait=self.store.on_wait
        ):
            try:
                self.prove(planned, path)
            except FileNotFoundError:
                return None
            except DigestMismatchError:
                return self._take_away(file, path)
            return None

    def _take_away(self, file: RemoteFile, path: Path) -> Path:
        try:
            is_ours = self.place.holds(file, path)
            self.place.hide(file)
            reached("download: hidden")
            kept = path
            if is_ours:
                kept = move_to_bad(self._pool, path, file.etag)
            spot = self.place.spot(file)
            if os.path.islink(spot):  # to huggingface_hub's shared store, or to somebody's file
                os.unlink(spot)
        except OSError as error:
            message = f"{file.path} has wrong bytes and cannot be removed: {error}"
            hint = "Ask the owner of the folder, or download to another one."
            raise DigestMismatchError(message, hint=hint, path=file.path) from error
        _log.warning("%s has wrong bytes; it is kept as %s", file.path, kept)
        return kept

    @contextmanager
    def making_room(self, file: RemoteFile) -> Iterator[None]:
        """Let a file come in this block to where a stale one is; what is the user's own is kept.

        In an HF cache blobs are replaced as a whole.
        """
        spot, store = self.place.spot(file), self.store
        is_there = isinstance(self.place, LocalPlace) and os.path.isfile(spot)
        if not isinstance(self.place, LocalPlace) or not file.announced:
            yield
            return
        known = store.known_hashes([spot]).get(spot, {}).get(file.algorithm) if is_there else None
        if is_there and not file.is_large(store.settings.link_min_size):
            known = store.digest_of(spot, (file.algorithm,)).get(file.algorithm)
            if known == file.etag:
                self.place.settled(file)
                yield
                return
        with self.place.making_room(file, known, self._pool):
            yield


def _digest_of_blob(
    store: Store, near: Pool, path: Path, announced: Mapping[Algorithm, str]
) -> str | None:
    """Return the digest of a file that is a blob with these hashes: faster than by SHA-256."""
    blob = store.blob_at(path)
    if blob is None or not store.hashes_of(blob.digest).items() >= announced.items():
        return None
    try:
        checked(store, near, blob.digest)
    except StoreError:
        return None
    return blob.digest


def _agrees(hashes: Hashes, announced: Mapping[Algorithm, str]) -> bool:
    return all(hashes.get(name) == value for name, value in announced.items())


def _arrived_wrong(
    file: RemoteFile, found: Hashes | DigestMismatchError, kept: Path | None
) -> DigestMismatchError:
    if isinstance(found, Hashes):
        value = found.get(file.algorithm)
    else:
        value = getattr(found, "found", "unknown")
    message = f"{file.path} has {file.algorithm} {value}, but {file.etag} was announced"
    message += "" if kept is None else f"; what arrived is kept as {kept}"
    hint = "Run the download again; if this happens again, the file on the Hub is damaged."
    return DigestMismatchError(message, hint=hint, path=file.path, kept=kept)


def _copy(
    source: BinaryIO, target: int, algorithm: Literal["blake3", "sha256"], wanted: str
) -> None:
    """Copy a file, hashed on the way; FileSkippedError if it has other bytes."""
    if copy_hashed(source.fileno(), target, algorithm=algorithm) != wanted:
        raise FileSkippedError(f"what was copied does not have {algorithm} {wanted}")


def _write_offer(
    offer: Offer, target: int, expected: dict[Algorithm, str], advance: Advance
) -> None:
    """Write the bytes that a tier gives; an error if they are not those that are expected."""
    hasher = Hasher(expected, size=offer.size)
    for chunk in offer.chunks():
        hasher.update(chunk)
        write_all(target, chunk)
        advance(len(chunk))
    with offer.judged():
        check_expected(hasher.finish(), expected, what="It")


@contextmanager
def _left_if_it_fails(failure: str, level: int = logging.DEBUG) -> Iterator[None]:
    """Let a source that fails in this block be left, and say so; a full disk is raised."""
    try:
        yield
    except (SmartcacheError, OSError) as error:
        code = getattr(error, "errno", None)
        if isinstance(error, NoSpaceError) or code in (errno.ENOSPC, errno.EDQUOT):
            raise
        _log.log(level, "%s: %s", failure, error)


def _is_at(path: Path, spot: Path) -> bool:
    try:
        return os.path.samefile(path, spot)
    except FileNotFoundError:
        return False
