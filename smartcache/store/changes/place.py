"""Put a blob at a path outside the store: by hard link, reflink or copy.

A path that is free gets its link in one atomic step (`link` and `linkat` never overwrite). A path
to be overwritten gets a temporary name beside it and a rename; the temporary name is in the
journal first, so that a killed process leaves nothing behind. The row of a blob is renewed in the
same transaction as our own link operation, and only if its bytes were as recorded right before: an
edit from outside is never taken for our doing.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from smartcache.errors import BlobNotFoundError, CannotLinkError, DestinationExistsError, StoreError
from smartcache.store import Kind
from smartcache.store.blobs import (
    checked,
    copy_verified,
    explained,
    open_blob,
    own_unlink,
    renew,
    unchanged,
)
from smartcache.store.changes.journal import Batch, Change, State
from smartcache.store.changes.spot import Name, Spot, beside
from smartcache.store.changes.userfile import (
    AWAY,
    LEFT_ALONE,
    Undoing,
    filling,
    give_own_copy,
    is_blob,
    let_go,
    remember_link,
)
from smartcache.store.hashes import hashes_of
from smartcache.store.records import LINKED_SUFFIXES, Blob, Link, LinkKind
from smartcache.store.volume import Volume
from smartcache.system.faults import reached
from smartcache.system.filesystems import filesystem_id, need_room
from smartcache.system.hashing import Advance, hash_file
from smartcache.system.kernel import clone, effective_user, link_fd, open_unnamed
from smartcache.system.sqlite import signed

_NEXT_KIND = {
    getattr(errno, name)
    for name in "EXDEV EPERM EACCES EMLINK ENOTSUP EOPNOTSUPP ENOSYS ENOTTY EINVAL".split()  # noqa: SIM905
    if hasattr(errno, name)
}
_FOR_THE_FILESYSTEM = _NEXT_KIND - {errno.EPERM, errno.EACCES, errno.EMLINK}
"""These hold for every file there and are remembered; EPERM depends on the file's owner."""

_log = logging.getLogger(__name__)


def is_linkable(path: Path, size: int, min_size: int) -> bool:
    """Say whether a file is one that programs do not edit in place, and large enough to share."""
    return size >= min_size and path.suffix.lower() in LINKED_SUFFIXES


# do


def place(  # noqa: PLR0913 - where a blob is wanted, and how
    volume: Volume,
    digest: str,
    path: Path,
    *,
    batch: Batch,
    kind: Kind = "auto",
    overwrite: bool = False,
    whole: bool = False,
    keep: bool = False,
    owner: int | None = None,
    advance: Advance | None = None,
) -> Link:
    """Put a blob at a path by the first kind of link that works there, or by the kind asked for.

    `whole`: it is a weight file whatever its name is. `keep`: others know of the file, so that undo
    must not remove it.
    """
    reason: str | None = "no kind of link works between these places"
    with explained(path.parent):
        blob = checked(volume, digest)
        existing = _existing(volume, blob, path, kind, overwrite=overwrite)
        if existing is not None:
            return _record(volume, blob, path, existing, owner)
        for each in _ladder(volume, blob, path, whole=whole) if kind == "auto" else [kind]:
            change = Change(
                op="place", path=path, digest=digest, size=blob.size, kind=each,
                temporary=beside(path), keep=keep or None,
            )  # fmt: skip
            batch.begin([change], sync=overwrite)
            reached("place: journaled")
            over = change.temporary if overwrite else None
            try:
                if each == "hardlink":
                    link = _hard_link(volume, change, over, owner)
                else:
                    link = _own_bytes(volume, blob, change, over, owner, batch, advance)
            except OSError as error:
                batch.end(change, "back")
                if error.errno not in _NEXT_KIND or isinstance(error, FileExistsError | StoreError):
                    raise
                device = os.stat(path.parent).st_dev
                # Through a bind mount the volume's own disk answers EXDEV, but not everywhere.
                is_for_all = error.errno != errno.EXDEV or device != volume.device
                if error.errno in _FOR_THE_FILESYSTEM and is_for_all:
                    volume.unable.add((device, each))
                reason = error.strerror
                _log.debug("%s: no %s because %s", path, each, reason)
            else:
                batch.end(change, "done")
                return link
    message = f"Cannot make a {kind} of {digest[:12]} at {path}: {reason}"
    raise CannotLinkError(message, path=path)


def _existing(
    volume: Volume, blob: Blob, path: Path, kind: Kind, *, overwrite: bool
) -> LinkKind | None:
    """Say what link of the blob is at the path already; raise if something else is."""
    try:
        st = os.lstat(path)
    except FileNotFoundError:
        return None
    if kind in ("auto", "hardlink") and is_blob(volume, blob.digest, st):
        return "hardlink"
    link = volume.index.link(path)
    is_copy = link is not None and link.kind in ("copy", "reflink") and kind in ("auto", link.kind)
    if link is not None and is_copy and _is_on_record(volume, link, blob.digest, path, st):
        return link.kind
    if not overwrite or os.path.isdir(path):
        raise DestinationExistsError(f"{path} exists already", path=path)
    return None


def _is_on_record(volume: Volume, link: Link, digest: str, place: Path, st: os.stat_result) -> bool:
    """Say whether a file is the one that was recorded as a blob's link, byte for byte."""
    if (link.digest, link.inode) != (digest, signed(st.st_ino)):
        return False
    return hashes_of(volume, place)[0].digest == digest


def _ladder(volume: Volume, blob: Blob, path: Path, *, whole: bool) -> list[LinkKind]:
    """Return the kinds of links to be tried, the best first."""
    settings = volume.settings
    device = os.stat(path.parent).st_dev
    is_near = device == volume.device
    kinds: list[LinkKind] = ["reflink", "copy"] if is_near and volume.can_reflink else ["copy"]
    if not (whole or is_linkable(path, blob.size, settings.link_min_size)):
        return kinds
    if is_near and not settings.keep_writable:
        # Root writes through 0444: a reflink keeps the blob's bytes apart.
        kinds.insert(kinds.index("copy") if effective_user() == 0 else 0, "hardlink")
    return [k for k in kinds if (device, k) not in volume.unable]


def _hard_link(volume: Volume, change: Change, over: Path | None, owner: int | None) -> Link:
    source = volume.layout.blob(change.digest)
    while True:
        with volume.guard("place"), Name(change.path, over) as name, volume.index.write():
            blob, st = unchanged(volume, change.digest)
            if blob is not None and st is not None:
                name.make(lambda target: os.link(source, target))
                reached("place: linked")
                renew(volume, blob, st)
                return _record(volume, blob, change.path, "hardlink", owner)
        # Something happened to the blob since it was checked: hash it outside of the transaction.
        checked(volume, change.digest)


def _own_bytes(
    volume: Volume,
    blob: Blob,
    change: Change,
    over: Path | None,
    owner: int | None,
    batch: Batch,
    advance: Advance | None,
) -> Link:
    path, digest = change.path, change.digest
    if change.kind == "copy":
        need_room(path.parent, change.size, "The copy")
    with ExitStack() as stack:
        filled = ""
        fd = open_unnamed(path.parent, 0o666)
        if fd is None:
            spot = stack.enter_context(Spot(change.place))
            fd, filled = stack.enter_context(filling(spot, change, batch, permissions=0o666))
        else:
            stack.callback(os.close, fd)
        if change.kind == "copy":
            copy_verified(volume, digest, fd, advance=advance)
        else:
            with open_blob(volume, digest) as source:
                if not clone(source.fileno(), fd):
                    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        os.utime(fd, ns=(blob.key.mtime_ns, blob.key.mtime_ns))
        os.fsync(fd)
        reached("place: filled")
        with volume.guard("place"), Name(path, over) as name, volume.index.write():
            current = volume.index.blob(digest)
            if current is None:
                message = f"Blob {digest} was removed while it was placed"
                raise BlobNotFoundError(message, digest=digest)
            if filled:
                name.make(lambda target: os.link(path.with_name(filled), target))
            else:
                name.make(lambda target: link_fd(fd, Path(target)))
            reached("place: linked")
            kind: LinkKind = "copy" if change.kind == "copy" else "reflink"
            return _record(volume, current, path, kind, owner)


def _record(volume: Volume, blob: Blob, path: Path, kind: LinkKind, owner: int | None) -> Link:
    try:
        inode = os.lstat(path).st_ino
    except FileNotFoundError:  # somebody has removed it in this moment
        inode = 0
    filesystem = filesystem_id(path.parent)
    with volume.index.write():
        volume.index.add_link(
            str(path), blob.id, kind=kind, filesystem=filesystem, inode=inode, owner=owner
        )
        volume.index.touch(blob.id)
        if owner is not None:
            volume.index.hold(owner, blob.id)
    return Link(
        path=path, digest=blob.digest, kind=kind, filesystem=filesystem, inode=inode, owner=owner,
    )  # fmt: skip


# finish after a crash


def finish(volume: Volume, change: Change, spot: Spot) -> State:
    """Say whether a blob that was being placed is there, whole; no temporary name stays."""
    if change.temporary is not None:
        spot.unlink(change.temporary.name)
    found = spot.stat()
    if found is None:
        return "back"
    is_whole = found.st_ino == volume.blob_inode(change.digest)
    is_copy = change.kind in ("copy", "reflink") and stat.S_ISREG(found.st_mode)
    if not is_whole and is_copy and found.st_size == change.size:
        with open(spot.open(), "rb") as file:
            is_whole = hash_file(file.fileno())[0].digest == change.digest
    if is_whole:
        remember_link(volume, change, found.st_ino)
    return "done" if is_whole else "back"


# undo


def undo(volume: Volume, change: Change, undoing: Undoing) -> str:
    """Remove a link that was placed, if it still is that link and the store has its bytes.

    A file of a repo gets bytes of its own instead.
    """
    if not os.path.lexists(change.place):
        return AWAY
    if volume.index.blob(change.digest) is None:
        volume.index.drop_link(change.path)
        return ""  # the store has let go of the bytes: the file is the user's own
    checked(volume, change.digest)  # the bytes must be safe in the store before a name goes
    st = os.lstat(change.place)
    if not _is_as_placed(volume, change, st):
        return LEFT_ALONE
    if not change.keep:
        with Spot(change.place) as spot:
            own = replace(change, op="own", temporary=None)
            (note,) = undoing.batch.begin([own], sync=False)
            with own_unlink(volume, change.digest):
                is_same = spot.inode() == st.st_ino
                if is_same:
                    spot.unlink()
                    reached("undo: link removed")
                    volume.index.drop_link(change.path)
            undoing.batch.end(note, "done")
        return "" if is_same else LEFT_ALONE
    # Snapshots point at it, or the user has it in a folder.
    if change.kind == "hardlink":
        give_own_copy(volume, change, undoing.batch, undoing.job)
    let_go(volume, change.path)
    return ""


def _is_as_placed(volume: Volume, change: Change, st: os.stat_result) -> bool:
    """Say whether the file at a path still is the link or copy that was placed, byte for byte."""
    if is_blob(volume, change.digest, st):
        return True
    link = volume.index.link(change.path)
    return link is not None and _is_on_record(volume, link, change.digest, change.place, st)
