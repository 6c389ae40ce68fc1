"""Put a blob at a path outside the store: by hard link, reflink, symlink or copy.

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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from smartcache.errors import (
    BlobNotFoundError,
    CannotLinkError,
    DestinationExistsError,
    StoreError,
)
from smartcache.store import Kind
from smartcache.store.blobs import explained
from smartcache.store.copies import copy_verified, rotate
from smartcache.store.faults import reached
from smartcache.store.filesystems import filesystem_id
from smartcache.store.journal import Batch, Change
from smartcache.store.kernel import clone, effective_user, link_fd, open_unnamed
from smartcache.store.layout import is_digest
from smartcache.store.memos import hashes_of
from smartcache.store.naming import Name
from smartcache.store.proof import Advance, checked, is_as_recorded, open_blob
from smartcache.store.records import Blob, Link, LinkKind, Trust
from smartcache.store.room import need_room
from smartcache.store.schema import signed
from smartcache.store.statkey import StatKey, judge
from smartcache.store.swap import beside
from smartcache.store.volume import Volume

LINKED_SUFFIXES = frozenset((
    ".safetensors", ".sft", ".gguf", ".ggml", ".bin", ".ckpt", ".pt", ".pth",
    ".onnx", ".onnx_data", ".h5", ".keras", ".msgpack", ".npz", ".npy", ".tflite",
    ".engine", ".mlmodel", ".pb", ".pack", ".parquet", ".arrow", ".tar", ".zip",
    ".model", ".nemo", ".llamafile", ".wasm", ".vae", ".t7", ".pkl",
))  # fmt: skip
"""Files that programs replace as a whole; the rest (json, txt ...) is edited in place: copied."""

_NEXT_KIND = {
    getattr(errno, name)
    for name in "EXDEV EPERM EACCES EMLINK ENOTSUP EOPNOTSUPP ENOSYS ENOTTY EINVAL".split()  # noqa: SIM905
    if hasattr(errno, name)
}
_FOR_THE_FILESYSTEM = _NEXT_KIND - {errno.EPERM, errno.EACCES, errno.EMLINK}
"""These hold for every file there and are remembered; EPERM depends on the file's owner."""

_log = logging.getLogger(__name__)


class _NextKind(Exception):  # noqa: N818 - control flow inside this module
    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


def is_linkable(path: Path, size: int, min_size: int) -> bool:
    """Say whether a file is one that programs do not edit in place, and large enough to share."""
    return size >= min_size and path.suffix.lower() in LINKED_SUFFIXES


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Where a blob is wanted, and how. `whole`: it is a weight file whatever its name is.

    `keep`: others know of the file, so that undo must not remove it.
    """

    path: Path
    kind: Kind = "auto"
    overwrite: bool = False
    whole: bool = False
    keep: bool = False
    owner: int | None = None


def place(
    volume: Volume, digest: str, request: Request, *, batch: Batch, advance: Advance | None = None
) -> Link:
    """Put a blob at a path by the first kind of link that works there, or by the kind asked for."""
    path = request.path
    with explained(path.parent):
        blob = checked(volume, digest)
        existing = _existing(volume, blob, request)
        if existing is not None:
            return _record(volume, blob, path, existing, request.owner)
        failed: OSError | None = None
        for kind in _ladder(volume, blob, request):
            try:
                return _place_as(volume, blob, request, kind, batch, advance)
            except _NextKind as next_kind:
                failed = next_kind.error
                _log.debug("%s: no %s because %s", path, kind, failed.strerror)
    reason = failed.strerror if failed is not None else "no kind of link works between these places"
    message = f"Cannot make a {request.kind} of {digest[:12]} at {path}: {reason}"
    raise CannotLinkError(message, path=path)


def _ladder(volume: Volume, blob: Blob, request: Request) -> list[LinkKind]:
    if request.kind != "auto":
        return [request.kind]
    settings, path = volume.settings, request.path
    device = os.stat(path.parent).st_dev
    is_near = device == volume.device
    kinds: list[LinkKind] = ["reflink", "copy"] if is_near else ["copy"]
    if not (request.whole or is_linkable(path, blob.size, settings.link_min_size)):
        return kinds
    if is_near and not settings.keep_writable:
        # Root writes through 0444: a reflink keeps the blob's bytes apart.
        kinds.insert(1 if effective_user() == 0 else 0, "hardlink")
    return [k for k in kinds if (device, k) not in volume.unable]


def _place_as(
    volume: Volume,
    blob: Blob,
    request: Request,
    kind: LinkKind,
    batch: Batch,
    advance: Advance | None,
) -> Link:
    path, digest = request.path, blob.digest
    change = Change(
        op="place", path=path, digest=digest, size=blob.size, kind=kind, temporary=beside(path),
        keep=request.keep or None,
    )  # fmt: skip
    (change,) = batch.begin([change], sync=request.overwrite or kind == "symlink")
    reached("place: journaled")
    try:
        if kind == "hardlink":
            link = _hard_link(volume, digest, change, request)
        elif kind == "symlink":
            link = _symlink(volume, blob, change, request)
        else:
            link = _own_bytes(volume, change, request, batch, advance)
    except OSError as error:
        batch.end(change, "back")
        if error.errno not in _NEXT_KIND or isinstance(error, FileExistsError | StoreError):
            raise
        device = os.stat(path.parent).st_dev
        # Through a bind mount the volume's own disk answers EXDEV, but not everywhere.
        is_for_all = error.errno != errno.EXDEV or device != volume.device
        if error.errno in _FOR_THE_FILESYSTEM and is_for_all:
            volume.unable.add((device, kind))
        raise _NextKind(error) from error
    batch.end(change, "done")
    return link


def _hard_link(volume: Volume, digest: str, change: Change, request: Request) -> Link:
    source = volume.layout.blob(digest)
    while True:
        try:
            with (
                volume.guard("place"),
                Name(change.path, change.temporary if request.overwrite else None) as name,
                volume.index.write(),
            ):
                blob, st = unchanged(volume, digest)
                if blob is not None and st is not None:
                    name.make(lambda target: os.link(source, target))
                    reached("place: linked")
                    renew(volume, blob, st)
                    return _record(volume, blob, change.path, "hardlink", request.owner)
        except OSError as error:
            if error.errno != errno.EMLINK:
                raise
            rotate(volume, digest)
        # Something happened to the blob since it was checked: hash it outside of the transaction.
        checked(volume, digest)


def unchanged(volume: Volume, digest: str) -> tuple[Blob | None, os.stat_result | None]:
    """Return a blob and its stat if stat vouches for it now; ask inside a transaction."""
    blob = volume.index.blob(digest)
    try:
        st = os.lstat(volume.layout.blob(digest))
    except FileNotFoundError:
        return None, None
    if blob is None or not blob.is_here or not is_as_recorded(blob, st):
        return None, None
    return blob, st


@contextmanager
def own_unlink(volume: Volume, digest: str) -> Iterator[None]:
    """Remove a link of a blob inside this block: its row is renewed, if it was true before."""
    with volume.guard("unlink"), volume.index.write():
        blob, before = unchanged(volume, digest)
        yield
        if blob is not None and before is not None:
            renew(volume, blob, before)


def renew(volume: Volume, blob: Blob, before: os.stat_result) -> None:
    """Renew a row after our own link operation; `before` is the stat that was found unchanged."""
    try:
        st = os.stat(volume.layout.blob(blob.digest))
    except FileNotFoundError:
        return
    verdict = judge(recorded=blob.key, recorded_links=blob.links, current=before)
    trust = max(blob.trust, Trust.RELINKED) if verdict == "relinked" else blob.trust
    if StatKey.of(st)[:2] != blob.key[:2]:
        trust = Trust.UNPROVEN
    volume.index.refresh(blob.id, st, trust)


def _symlink(volume: Volume, blob: Blob, change: Change, request: Request) -> Link:
    source = volume.layout.blob(blob.digest)
    with (
        volume.guard("place"),
        Name(change.path, change.temporary if request.overwrite else None) as name,
    ):
        _present(volume, blob.digest)
        former = volume.index.link(change.path)
        # The row comes first: a symlink that prune does not know of would dangle one day.
        _record(volume, blob, change.path, "symlink", request.owner)
        reached("place: row written")
        try:
            name.make(lambda target: os.symlink(source, target))
        except OSError:
            _put_back(volume, change.path, former)
            raise
        return _record(volume, blob, change.path, "symlink", request.owner)


def _put_back(volume: Volume, path: Path, former: Link | None) -> None:
    """Let the index say of a path what it said before."""
    with volume.index.write():
        volume.index.drop_link(path)
        blob = None if former is None else volume.index.blob(former.digest)
        if former is not None and blob is not None:
            volume.index.add_link(
                str(path), blob.id, kind=former.kind, filesystem=former.filesystem,
                inode=former.inode, owner=former.owner,
            )  # fmt: skip


def _own_bytes(
    volume: Volume, change: Change, request: Request, batch: Batch, advance: Advance | None
) -> Link:
    path, digest = change.path, change.digest
    if change.kind == "copy":
        need_room(path.parent, change.size, "The copy")
    filled = beside(path)
    descriptor = open_unnamed(path.parent, 0o666)
    is_unnamed = descriptor is not None
    if descriptor is None:
        (note,) = batch.begin([replace(change, op="own", temporary=filled)])
        descriptor = os.open(filled, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        _fill(volume, digest, descriptor, change.kind, advance)
        reached("place: filled")
        fd = descriptor
        with (
            volume.guard("place"),
            Name(change.path, change.temporary if request.overwrite else None) as name,
            volume.index.write(),
        ):
            blob = _present(volume, digest)
            if is_unnamed:
                name.make(lambda target: link_fd(fd, Path(target)))
            else:
                name.make(lambda target: os.link(filled, target))
            reached("place: linked")
            kind: LinkKind = "reflink" if change.kind == "reflink" else "copy"
            return _record(volume, blob, path, kind, request.owner)
    finally:
        os.close(descriptor)
        if not is_unnamed:
            filled.unlink(missing_ok=True)
            batch.end(note, "done")


def _present(volume: Volume, digest: str) -> Blob:
    """Return a blob that is in the store right now; to be asked under the store's lock."""
    blob = volume.index.blob(digest)
    if blob is None or not blob.is_here:
        raise BlobNotFoundError(f"Blob {digest} was removed while it was placed", digest=digest)
    return blob


def _fill(
    volume: Volume, digest: str, descriptor: int, kind: str | None, advance: Advance | None
) -> None:
    if kind == "reflink":
        with open_blob(volume, digest) as source:
            mtime_ns = os.fstat(source.fileno()).st_mtime_ns
            if not clone(source.fileno(), descriptor):
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    else:
        mtime_ns = checked(volume, digest).key.mtime_ns
        copy_verified(volume, digest, descriptor, advance=advance)
    os.utime(descriptor, ns=(mtime_ns, mtime_ns))
    os.fsync(descriptor)


def _existing(volume: Volume, blob: Blob, request: Request) -> LinkKind | None:
    """Say what link of the blob is at the path already; raise if something else is."""
    path, kind = request.path, request.kind
    try:
        st = os.lstat(path)
    except FileNotFoundError:
        return None
    source = volume.layout.blob(blob.digest)
    if kind in ("auto", "hardlink") and os.path.samestat(st, os.stat(source)):
        return "hardlink"
    if kind in ("auto", "symlink") and os.path.islink(path) and os.readlink(path) == source:
        return "symlink"
    link = volume.index.link(path)
    is_copy = link is not None and link.kind in ("copy", "reflink") and kind in ("auto", link.kind)
    if link is not None and is_copy and _is_same_copy(volume, link, blob, st):
        return link.kind
    if not request.overwrite or os.path.isdir(path):
        raise DestinationExistsError(f"{path} exists already", path=path)
    return None


def _is_same_copy(volume: Volume, link: Link, blob: Blob, st: os.stat_result) -> bool:
    """Say whether a copy that was placed earlier is still there, byte for byte."""
    if (link.digest, link.inode) != (blob.digest, signed(st.st_ino)):
        return False
    return hashes_of(volume, link.path)[0].digest == blob.digest


def _record(volume: Volume, blob: Blob, path: Path, kind: LinkKind, owner: int | None) -> Link:
    try:
        inode = os.lstat(path).st_ino
    except FileNotFoundError:
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
        path=path,
        digest=blob.digest,
        kind=kind,
        filesystem=filesystem,
        inode=inode,
        owner=owner,
        made_at=datetime.now(UTC),
    )


def record_symlinks(volume: Volume, paths: Iterable[Path]) -> None:
    """Record symlinks that point at blobs of this volume; others are passed over."""
    for path in paths:
        try:
            target = os.path.join(path.parent, os.readlink(path))
        except OSError:
            continue
        digest = os.path.basename(target)
        if not is_digest(digest) or os.path.normpath(target) != volume.layout.blob(digest):
            continue
        blob = volume.index.blob(digest)
        if blob is not None:
            volume.index.add_link(
                str(path),
                blob.id,
                kind="symlink",
                filesystem=filesystem_id(path.parent),
                inode=os.lstat(path).st_ino,
                owner=None,
            )
