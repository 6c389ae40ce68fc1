"""Put a blob at a path outside the store: by hard link, reflink or copy.

A path that is free gets its link in one atomic step, which never overwrites. To a path that may be
overwritten the new file comes by a rename over the old one. Copies are made without a name, hashed
on the way; where there are no files without a name, under a temporary one that is in the journal
first, so that a killed process leaves nothing behind.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from smartcache import errors
from smartcache.progress import Progress, silent
from smartcache.store import Kind
from smartcache.store.blobs import (
    checked,
    copy_hashed,
    is_believed,
    open_blob,
    pools_with,
    prove,
    relinking,
)
from smartcache.store.catalog import FileRow
from smartcache.store.hashes import boot_for, hashes_of
from smartcache.store.home import Home
from smartcache.store.journal import Batch, Change, How
from smartcache.store.layout import Pool, absolute, explained
from smartcache.store.link import finish_or_leave
from smartcache.store.records import LINKED_SUFFIXES, Link, LinkKind
from smartcache.store.userfile import Spot, beside, is_same, look
from smartcache.system.faults import reached
from smartcache.system.filesystems import Mounts, can_reflink, need_room
from smartcache.system.hashing import Advance, check_hex
from smartcache.system.kernel import StatKey, clone, effective_user, link_fd, open_unnamed
from smartcache.system.locks import try_lock

_FOR_THE_FILESYSTEM = {
    errno.EXDEV, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY, errno.EINVAL,
}  # fmt: skip
"""These hold for every file there and are remembered; EPERM depends on the file's owner."""
_NEXT_KIND = _FOR_THE_FILESYSTEM | {errno.EPERM, errno.EACCES, errno.EMLINK}
_TRIES = 3
_PENDING = 256
_log = logging.getLogger(__name__)
_Linker = Callable[[str], None]
"""Gives a file a name."""


def place(  # noqa: PLR0913 - where a blob is wanted, and how
    home: Home,
    digest: str,
    path: str | Path,
    *,
    kind: Kind = "auto",
    overwrite: bool = False,
    whole: bool = False,
    keep: bool = False,
    batch: Batch | None = None,
    label: str = "link",
    progress: Progress = silent,
) -> Link:
    """Put a blob at a path by the best kind of link that works there, or the kind asked for.

    `whole`: it is a weight file whatever its name is. `keep`: others know of the file, so undo
    gives the path bytes of its own in place of removing it.
    """
    path, digest = absolute(path), check_hex("blake3", digest)
    pool = pools_with(home, digest, near=path)[0]
    st = pool.stat(digest)
    size = 0 if st is None else st.st_size
    reason: str | None = "no kind of link works between these places"
    with (
        home.batch(label, batch) as current,
        progress(path.name, size, "bytes") as job,
        explained(path.parent),
    ):
        wish = _Wish(home, pool, digest, path, current, overwrite, keep, job.advance)
        st = checked(home, pool, digest)
        existing = wish.existing(kind)
        if existing is not None:
            return existing
        for way in _ladder(wish, st.st_size, whole=whole) if kind == "auto" else [kind]:
            try:
                return wish.hard_link() if way == "hardlink" else wish.own_bytes(way)
            except OSError as error:
                if error.errno not in _NEXT_KIND or isinstance(error, errors.StoreError):
                    raise
                device = os.stat(path.parent).st_dev
                # Through a bind mount the pool's own disk answers EXDEV, but not everywhere.
                is_for_all = error.errno != errno.EXDEV or device != pool.device
                if error.errno in _FOR_THE_FILESYSTEM and is_for_all:
                    home.unable.add((device, way))
                reason = error.strerror
                _log.debug("%s: no %s because %s", path, way, reason)
    message = f"Cannot make a {kind} of {digest[:12]} at {path}: {reason}"
    raise errors.CannotLinkError(message, path=path)


def _ladder(wish: _Wish, size: int, *, whole: bool) -> list[LinkKind]:
    """Return the kinds of links to be tried, the best first."""
    home, path = wish.home, wish.path
    device = os.stat(path.parent).st_dev
    is_near = device == wish.pool.device
    has_reflinks = is_near and can_reflink(wish.pool.tmp)
    kinds: list[LinkKind] = ["reflink", "copy"] if has_reflinks else ["copy"]
    is_large = size >= home.settings.link_min_size
    if not (whole or (is_large and path.suffix.lower() in LINKED_SUFFIXES)):
        return kinds  # programs edit it in place, or there is little to gain
    if is_near and not home.settings.keep_writable:
        # Root writes through 0444: a reflink keeps the blob's bytes apart.
        kinds.insert(kinds.index("copy") if effective_user() == 0 else 0, "hardlink")
    return [kind for kind in kinds if (device, kind) not in home.unable]


@dataclass(slots=True)
class _Wish:
    """A blob that is wanted at a path."""

    home: Home
    pool: Pool
    digest: str
    path: Path
    batch: Batch
    overwrite: bool
    keep: bool
    advance: Advance

    def existing(self, kind: Kind) -> Link | None:
        """Return the link that is at the path already; raise if something else is."""
        st = look(self.path)
        if st is None:
            return None
        is_blob = is_same(st, self.pool.stat(self.digest))
        if kind in ("auto", "hardlink") and is_blob:
            return self._linked("hardlink", st)
        if kind in ("auto", "copy", "reflink") and not is_blob and self._is_copy(st):
            return self._linked("copy" if kind == "auto" else kind, st)
        if not self.overwrite or os.path.isdir(self.path):
            raise errors.DestinationExistsError(f"{self.path} exists already", path=self.path)
        return None

    def _is_copy(self, st: os.stat_result) -> bool:
        """Say whether a file is one that we have put there, byte for byte."""
        filesystem = self.home.filesystem(self.path, st)
        known = self.home.catalog.known(filesystem, [st.st_ino]).get(st.st_ino)
        if known is None or known.digest != self.digest or known.key.size != st.st_size:
            return False
        return hashes_of(self.home, self.path).digest == self.digest

    def _linked(self, kind: LinkKind, st: os.stat_result) -> Link:
        return Link(path=self.path, digest=self.digest, kind=kind, inode=st.st_ino)

    def hard_link(self) -> Link:
        """Give a free path, or one that may be overwritten, a link of the blob."""
        home, pool, digest = self.home, self.pool, self.digest
        with Spot(_real(self.path)) as spot:
            if os.fstat(spot.fd).st_dev != pool.device:  # before anything is written down
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
            for _ in range(_TRIES):
                key = StatKey.of(checked(home, pool, digest))
                with home.changing(self.batch.label):
                    st = pool.stat(digest)
                    # Another thread's link has moved its change time, and it has said so.
                    if st is None or not (
                        StatKey.of(st) == key or is_believed(home, pool, digest, st)
                    ):
                        continue  # something else happened to it: hash it, outside the lock
                    with self._row("give" if self.keep else "create", spot, st) as temporary:
                        with relinking(home, pool, [digest], [spot.path]):
                            self._name(spot, temporary, lambda n: spot.take(pool.blob(digest), n))
                        reached("place: linked")
                    with suppress(errors.StoreError):
                        home.catalog.touch([digest])
                    return self._linked("hardlink", st)
        raise errors.BlobNotFoundError(f"Blob {digest} changes all the time", digest=digest)

    def own_bytes(self, kind: Kind) -> Link:
        """Give the path a file with bytes of its own."""
        home, pool, digest = self.home, self.pool, self.digest
        st = checked(home, pool, digest)
        if kind == "copy":
            need_room(self.path.parent, st.st_size, "The copy")
        with ExitStack() as stack:
            spot = stack.enter_context(Spot(_real(self.path)))
            folder, temporary = spot.path.parent, ""
            fd = open_unnamed(folder, 0o666)
            if fd is None:
                with home.changing(self.batch.label):
                    temporary = stack.enter_context(self._row("copy", spot, st, is_beside=True))
                    fd = spot.create(temporary, 0o666)
                    try_lock(fd, exclusive=True)  # tells recovery that we live
            try:
                with open_blob(home, pool, digest) as source:
                    if kind == "reflink":
                        if not clone(source.fileno(), fd):
                            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
                    elif copy_hashed(source.fileno(), fd, self.advance) != digest:
                        prove(home, pool, digest)  # moves it away and raises, or it was healed
                        message = f"Blob {digest} changed while it was copied"
                        raise errors.FileChangedError(message, digest=digest)
                os.utime(fd, ns=(st.st_mtime_ns, st.st_mtime_ns))
                os.fsync(fd)
                reached("place: filled")
                stack.enter_context(home.changing(self.batch.label))
                if temporary:
                    self._name(spot, temporary, lambda name: spot.link(temporary, name))
                else:
                    new = stack.enter_context(self._row("copy", spot, st))
                    self._name(spot, new, lambda name: link_fd(fd, folder / name))
                reached("place: linked")
                now = os.fstat(fd)
            finally:
                os.close(fd)
        with suppress(errors.StoreError):
            boot = boot_for(now, now.st_ctime_ns, is_durable=True)
            filesystem = home.filesystem(folder)
            home.catalog.remember([FileRow.of(filesystem, now, digest, boot, [spot.path])])
            home.catalog.touch([digest])
        return self._linked("copy" if kind == "copy" else "reflink", now)

    def _name(self, spot: Spot, temporary: str, link: _Linker) -> None:
        """Let a file have the name at once if it is free; else by a rename over what is there."""
        try:
            link(spot.name)
        except FileExistsError as error:
            if not self.overwrite:
                message = f"{self.path} exists already"
                raise errors.DestinationExistsError(message, path=self.path) from error
            with suppress(FileExistsError):  # it may have grown there
                link(temporary)
            reached("place: temporary made")
            spot.rename(temporary)
        spot.unlink(temporary)  # rename(2) of two links of one inode leaves the first name

    @contextmanager
    def _row(
        self, how: How, spot: Spot, st: os.stat_result, *, is_beside: bool = False
    ) -> Iterator[str]:
        """Write down what is put at a path in this block; give the temporary name for it.

        A file that others know of stays when things are undone: of copies there is nothing to be
        written down then, and of a link to a free path it can wait.
        """
        home, batch = self.home, self.batch
        change = Change(
            how=how, path=spot.path, digest=self.digest, size=st.st_size,
            temporary=beside(spot.name), mode=st.st_mode & 0o777 | 0o200, gid=st.st_gid,
            mtime_ns=st.st_mtime_ns, folder=os.fstat(spot.fd).st_ino,
            links=0 if self.keep and how == "copy" else 1,
        )  # fmt: skip
        if self.keep and not (self.overwrite or is_beside):
            yield change.temporary
            if how == "copy":
                return
            batch.pending.append(change)
            if len(batch.pending) >= _PENDING:
                home.journal.flush(batch, Mounts())
        else:
            home.journal.begin(batch, [change], Mounts())
            if is_beside:  # for longer than the lock is held
                home.stuck[change.id] = f"{spot.path}: is being copied"
            try:
                yield change.temporary
            except BaseException:
                with suppress(OSError):
                    spot.unlink(change.temporary)
                if spot.stat() is None:
                    home.journal.note([("back", change.id)])
                elif is_beside:
                    home.finish_open()
                elif (state := finish_or_leave(home, change)) != "hash":  # we have the lock
                    home.journal.note([(state, change.id)])
                raise
            finally:
                home.stuck.pop(change.id, None)
            is_over = self.keep and how == "copy"
            home.journal.note([("undone" if is_over else "done", change.id)])
        batch.changes.append(change)


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path.parent), path.name)
