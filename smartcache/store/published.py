"""A store that its owner lets everybody read, and how others take bytes from it.

The owner: `publish` opens the root, `blobs/` and `blobs/<aa>` to all (0755) and writes `listing`,
a sorted list of the blobs that others can read. Index, journal, locks and everything else stay
closed. The listing is replaced as a whole, in one step, and renewed when the store is closed after
blobs came or went.

The reader: a `SharedStore` takes no lock, writes nothing and knows nothing but names, the listing
and blobs. It is used only if all of them belong to one user, who is root, the reader or somebody
the reader has named, if nobody else can write them, and if none of them is a symlink; each is
opened below the descriptor of the one before, so that what was checked is what is used. Even then
nothing is believed: the bytes go to an inode of the reader's own and are hashed there, by the hash
that was asked for, before they become a blob.

    listing   64 bytes      magic, version, size of a record, count of records, mark
              72 per blob   sha256, digest, size; sorted by sha256, numbers little-endian
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import struct
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from smartcache.config import Settings
from smartcache.errors import DigestMismatchError, NoSpaceError, StoreError, StoreUnwritableError
from smartcache.store.blobs import explained, take_in, writing
from smartcache.store.records import Blob
from smartcache.store.volume import Layout, Volume
from smartcache.system import (
    Advance,
    Algorithm,
    check_hex,
    effective_user,
    reached,
    sync_directory,
    user_name,
)

VERSION = 1
_MAGIC = b"SMCCTLG\n"
_HEADER = struct.Struct("<8sIIQ32s8x")
_PADDING = bytes(8)
_RECORD = struct.Struct("<32s32sQ")
_OPEN, _CLOSED = 0o755, 0o700
_READABLE = 0o644
_OTHERS_READ, _OTHERS_ENTER, _OTHERS_WRITE = 0o004, 0o001, 0o022
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_PUBLISH_AGAIN = "Its owner can publish it again: smartcache publish."
_log = logging.getLogger(__name__)


# the owner's half


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishPlan:
    """What everybody on this machine could read; `execute` lets them."""

    root: Path
    is_published: bool
    """It is published already: executing renews the listing."""
    blobs: int
    size: int
    unnamed: int
    """Blobs among these that can be asked for by digest only: nobody has computed their sha256."""
    closed: int
    """Blobs that stay private: their files are closed to others."""
    changed: int
    """Blobs that are left out because they are not as recorded."""
    warnings: tuple[str, ...]
    _execute: Callable[[], None] = field(repr=False, compare=False)

    def execute(self) -> None:
        """Open the blobs to all and write the listing."""
        self._execute()


def is_published(volume: Volume) -> bool:
    """Say whether others may read this store."""
    return os.path.lexists(volume.layout.listing)


def plan_publish(volume: Volume) -> PublishPlan:
    """Plan to let everybody on this machine read the blobs, or to renew the listing of them."""
    listing, found = _survey(volume)

    def execute() -> None:
        # The root is opened last and closed first: whatever is interrupted, a store with a listing
        # can be published or closed again.
        _write_listing(volume, listing)
        reached("publish: listed")
        # Under the lock nobody makes a `blobs/<aa>` with the mode from before.
        with explained(volume.root), volume.guard("publish", exclusive=True):
            for directory in (*_blob_directories(volume), volume.root):
                _set_mode(directory, _OPEN)

    return PublishPlan(
        root=volume.root, is_published=is_published(volume), **found,
        warnings=tuple(_closed_ways(volume.root)), _execute=execute,
    )  # fmt: skip


def unpublish(volume: Volume) -> None:
    """Close a store to others; what they have taken is theirs."""
    with explained(volume.root), volume.guard("publish", exclusive=True):
        for directory in (volume.root, *_blob_directories(volume)):
            _set_mode(directory, _CLOSED)
        reached("publish: closed")
        volume.layout.listing.unlink(missing_ok=True)
        sync_directory(volume.root)


def renew_listing(volume: Volume) -> None:
    """Write the listing of a published store anew if blobs came or went; else do nothing."""
    if not is_published(volume) or not volume.index.is_open:
        return
    try:
        with open(os.open(volume.layout.listing, _FLAGS), "rb") as file:
            is_current = file.read(_HEADER.size).endswith(_mark(volume) + _PADDING)
        if not is_current:
            _write_listing(volume, _survey(volume)[0], anew=False)
    except (StoreError, OSError) as error:
        _log.warning("the listing of %s was not updated: %s", volume.root, error)


def _survey(volume: Volume) -> tuple[bytes, dict[str, int]]:
    """Look at every blob: the listing as it has to be, and the figures of a `PublishPlan`."""
    mark = _mark(volume)  # first: what comes meanwhile is noticed at the next close
    sizes: dict[str, int] = {}
    closed = changed = 0
    for blob in volume.index.records():
        if not blob.is_here:
            continue
        try:
            st = os.lstat(volume.layout.blob(blob.digest))
        except FileNotFoundError:
            changed += 1
            continue
        if blob.judged(st) == "suspect":
            changed += 1
        elif not st.st_mode & _OTHERS_READ:
            closed += 1
        else:
            sizes[blob.digest] = st.st_size
    records = [
        (bytes.fromhex(value), bytes.fromhex(digest), sizes[digest])
        for value, digest in volume.index.digests_by_sha256()
        if digest in sizes
    ]
    header = _HEADER.pack(_MAGIC, VERSION, _RECORD.size, len(records), mark)
    unnamed = len(sizes) - len({digest for _, digest, _ in records})
    return header + b"".join(_RECORD.pack(*record) for record in records), {
        "blobs": len(sizes), "size": sum(sizes.values()), "unnamed": unnamed, "closed": closed,
        "changed": changed,
    }  # fmt: skip


def _mark(volume: Volume) -> bytes:
    """Return what changes with the blobs and hashes that a store has, and tells nothing of them."""
    return blake3(repr(volume.index.content_mark()).encode()).digest()


def _write_listing(volume: Volume, listing: bytes, *, anew: bool = True) -> None:
    """Replace the listing in one step; not `anew`: only if nobody has taken it back meanwhile."""
    with writing(volume) as tmp:
        view = memoryview(listing)
        while view:
            view = view[os.write(tmp.fd, view) :]
        os.fchmod(tmp.fd, _READABLE)
        os.fsync(tmp.fd)
        reached("publish: listing written")
        with volume.guard("publish"):
            if anew or is_published(volume):
                os.rename(tmp.path, volume.layout.listing)
        sync_directory(volume.root)


def _blob_directories(volume: Volume) -> list[Path]:
    """Return `blobs/` and the directories in it."""
    blobs = volume.layout.blobs
    with os.scandir(blobs) as entries:
        return [blobs, *(Path(each.path) for each in entries if each.is_dir(follow_symlinks=False))]


def _set_mode(directory: Path, mode: int) -> None:
    with _closing(os.open(directory, _FLAGS | os.O_DIRECTORY)) as descriptor:
        os.fchmod(descriptor, mode)


def _closed_ways(root: Path) -> Iterator[str]:
    for parent in Path(os.path.realpath(root)).parents:
        mode = stat.S_IMODE(os.stat(parent).st_mode)
        if not mode & _OTHERS_ENTER:
            yield (
                f"Others cannot reach {root}: {parent} is closed to them (mode {mode:04o}). "
                f"Open it with 'chmod o+x {parent}', or move the store with 'smartcache mv'"
            )


# the reader's half


class SharedBlob(NamedTuple):
    """A blob of a shared store, as far as that tells: nothing was hashed yet."""

    store: SharedStore
    digest: str
    size: int


class SharedStore:
    """A store of another user, to be read. Making an object touches nothing.

    Nothing stays open between calls: the owner may prune, publish again or unmount at any time.
    """

    def __init__(self, root: Path, owners: Collection[int] = ()) -> None:
        self.root = root
        self._layout = Layout(root)
        self._owners = {0, effective_user(), *owners}
        self._said: set[str] = set()

    def __repr__(self) -> str:
        """Return the class and the root."""
        return f"{type(self).__name__}({str(self.root)!r})"

    def check(self) -> tuple[int, int]:
        """Return its owner and how many blobs it lists by sha256; StoreError: it is not usable."""
        with self._entered() as inside:
            return inside.owner, inside.records

    def find(self, algorithm: Algorithm, value: str) -> SharedBlob | None:
        """Return a blob by its digest, or by its sha256 if that is in the listing.

        A store that is not usable has none, and says why, once.
        """
        wanted = check_hex(algorithm, value)
        if algorithm not in ("blake3", "sha256"):
            return None
        try:
            with self._entered() as inside:
                digest, size = wanted, None
                if algorithm == "sha256":
                    listed = _listed(inside, wanted)
                    if listed is None:
                        return None
                    digest, size = listed
                with _closing(self._open_blob(inside, digest)) as descriptor:
                    found = SharedBlob(self, digest, os.fstat(descriptor).st_size)
        except FileNotFoundError:
            return None  # pruned since the listing was written
        except (StoreError, OSError) as error:
            self.say(error)
            return None
        return found if size in (None, found.size) else None

    def open(self, digest: str) -> int:
        """Return a descriptor of a blob, for reading; StoreError or OSError: it cannot be read."""
        with self._entered() as inside:
            return self._open_blob(inside, check_hex("blake3", digest))

    def say(self, reason: Exception | str) -> None:
        """Warn why nothing is taken from here: once for each reason."""
        text = f"{reason.message}. {reason.hint}" if isinstance(reason, StoreError) else str(reason)
        if text not in self._said:
            self._said.add(text)
            _log.warning("the shared store %s is left out: %s", self.root, text)

    @contextmanager
    def _entered(self) -> Iterator[_Inside]:
        """Give the root and the listing, opened, if they may be trusted."""
        try:
            opened = _open(self.root, is_directory=True)
        except FileNotFoundError as error:
            hint = "Mount it, or take it out of shared_stores."
            raise StoreError("it is not there", hint=hint) from error
        with _closing(opened) as root:
            owner = os.fstat(root).st_uid
            if owner not in self._owners:
                message = f"it belongs to {user_name(owner)}, who is not in shared_store_owners"
                hint = "If you trust them, add them to it."
                raise StoreError(message, hint=hint, owner=owner)
            try:
                opened = _open(self._layout.listing, root, owner)
            except FileNotFoundError as error:
                hint = "Its owner can publish it: smartcache publish."
                raise StoreError("it is not published", hint=hint) from error
            with _closing(opened) as listing:
                yield _Inside(root, owner, listing, _records(listing))

    def _open_blob(self, inside: _Inside, digest: str) -> int:
        path, owner = Path(self._layout.blob(digest)), inside.owner
        with (
            _closing(_open(self._layout.blobs, inside.root, owner, is_directory=True)) as blobs,
            _closing(_open(path.parent, blobs, owner, is_directory=True)) as directory,
        ):
            return _open(path, directory, owner)


class _Inside(NamedTuple):
    """Descriptors of a shared store's root and listing, its owner, and the number of records."""

    root: int
    owner: int
    listing: int
    records: int


def _records(listing: int) -> int:
    """Return how many records a listing has; StoreError: it is none that we can read."""
    data = os.pread(listing, _HEADER.size, 0)
    if len(data) != _HEADER.size or not data.startswith(_MAGIC):
        raise StoreError("its listing is damaged", hint=_PUBLISH_AGAIN)
    _, version, record_size, count, _ = _HEADER.unpack(data)
    if (version, record_size) != (VERSION, _RECORD.size):
        message = f"its listing has version {version}; this smartcache reads version {VERSION}"
        raise StoreError(message, hint="Update smartcache.")
    if os.fstat(listing).st_size != _HEADER.size + count * _RECORD.size:
        raise StoreError("its listing is damaged", hint=_PUBLISH_AGAIN)
    return int(count)


def _listed(inside: _Inside, sha256: str) -> tuple[str, int] | None:
    """Return digest and size for a sha256: some 20 short reads in a listing of a million."""
    wanted = bytes.fromhex(sha256)
    low, high = 0, inside.records
    while low < high:
        middle = (low + high) // 2
        data = os.pread(inside.listing, _RECORD.size, _HEADER.size + middle * _RECORD.size)
        if len(data) != _RECORD.size:
            raise StoreError("its listing is damaged", hint=_PUBLISH_AGAIN)
        value, digest, size = _RECORD.unpack(data)
        if value == wanted:
            return digest.hex(), size
        low, high = (middle + 1, high) if value < wanted else (low, middle)
    return None


def _open(
    path: Path, at: int | None = None, owner: int | None = None, *, is_directory: bool = False
) -> int:
    """Open a file or directory that nobody but its owner can write; no symlink, no waiting.

    `at` is the directory it lies in, `owner` the user it must belong to.
    """
    kind = "directory" if is_directory else "file"
    name = path if at is None else path.name
    try:
        descriptor = os.open(name, _FLAGS | (os.O_DIRECTORY if is_directory else 0), dir_fd=at)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            hint = "Name the directory itself in shared_stores." if at is None else _PUBLISH_AGAIN
            raise StoreError(f"{path} is a symlink, or not a {kind}", hint=hint) from error
        if error.errno in (errno.EACCES, errno.EPERM):
            raise StoreError(f"{path} is closed to you", hint=_PUBLISH_AGAIN) from error
        raise
    try:
        st = os.fstat(descriptor)
        if not (stat.S_ISDIR(st.st_mode) if is_directory else stat.S_ISREG(st.st_mode)):
            raise StoreError(f"{path} is not a {kind}", hint=_PUBLISH_AGAIN)
        if owner not in (None, st.st_uid):
            message = f"{path} belongs to {user_name(st.st_uid)}, not to the owner of the store"
            raise StoreError(message, hint=_PUBLISH_AGAIN)
        if st.st_mode & _OTHERS_WRITE:
            hint = f"Its owner can close it to them: chmod go-w {path}"
            raise StoreError(f"{path} can be written by others", hint=hint)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def _closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def shared_stores(settings: Settings, own: Iterable[Path]) -> list[SharedStore]:
    """Return the stores to take bytes from, without our own: the owner of one may name it too."""
    ours = {os.path.realpath(root) for root in own}
    return [
        SharedStore(root, settings.shared_store_owners)
        for root in settings.shared_stores
        if os.path.realpath(root) not in ours
    ]


def bring(
    volume: Volume,
    found: SharedBlob,
    asked: tuple[Algorithm, str],
    *,
    advance: Advance | None = None,
) -> Blob | None:
    """Make what was found in a shared store a blob of ours; None: it is not what was asked for.

    That is said, and nothing of it is kept.
    """
    algorithm, value = asked
    expected = {algorithm: check_hex(algorithm, value)}
    try:
        opened = found.store.open(found.digest)
    except (StoreError, OSError) as error:  # pruned or closed since it was found
        found.store.say(error)
        return None
    with _closing(opened) as descriptor:
        try:
            return take_in(volume, descriptor, expected=expected, advance=advance)
        except (NoSpaceError, StoreUnwritableError):
            raise  # it is our own store that cannot take it
        except DigestMismatchError:
            found.store.say(f"its blob {found.digest[:12]} does not have {algorithm} {value}")
        except OSError as error:
            found.store.say(error)
    return None
