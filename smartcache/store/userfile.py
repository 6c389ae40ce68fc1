"""A user's file: a name in the very folder that is meant, and the file behind it, held still.

Recovery and undo act long after a path was written down, and whoever can write a folder above it
may have put a symlink there. So the folder is opened once, no component of its path being a symlink
(`Spot`), and every step goes by that descriptor and a bare name. The name is never absent and a
third file never lost (`swap_in`).

The bytes of a file and its stat key are proven to belong together (`prove_all`). A file that was
not touched for two seconds is hashed first and leased afterwards; an unchanged key then proves that
no write came between. A younger file could be written twice within one clock tick without its key
showing it, so it is leased first and hashed under the lease.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from smartcache.errors import FileBusyError, FileChangedError, FileSkippedError, StoreError
from smartcache.progress import Progress, silent
from smartcache.store import hashes as _hashes
from smartcache.system import kernel
from smartcache.system.faults import reached
from smartcache.system.hashing import Algorithm, Hashes, hash_many

if TYPE_CHECKING:
    from smartcache.store.home import Home

TICK_NS = 50_000_000
"""More than a tick (at most 10 ms) of the clock that filesystems with hard links use."""
HOUR_NS = 3600 * 10**9
"""What nobody has touched for so long is on the disk: the kernel writes within a minute."""
OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

Allowance = Literal["group", "mode", "xattr"]
"""What a link may change about a file besides its permission to write, if the user allows it.

Its group, its permissions, its extended attributes: the journal has them, and undo gives them back.
Files of other users are never linked, not even by root: whoever owns an inode can change the bytes
that all its links show.
"""

_INCOMPLETE_SUFFIXES = (
    b".incomplete", b".tmp", b".part", b".crdownload", b".aria2", b".download", b".lock",
    b".smartcache",
)  # fmt: skip
_REASONS = {
    errno.EXDEV: "other filesystem",  # or a bind mount of the same disk
    errno.EMLINK: "too many links",
    errno.EPERM: "cannot be changed",  # immutable, or another user's
    errno.EACCES: "cannot be changed",
    errno.EROFS: "read-only filesystem",
    errno.ETXTBSY: "busy",
    errno.ENOENT: "was removed",
    errno.ELOOP: "not a regular file",
    errno.ENXIO: "not a regular file",
}
_OLLAMAS = re.compile(rb"sha256[-:][0-9a-f]{64}-partial(-[0-9]+)?")
_THE_USERS = ("user.", "system.posix_acl_")
_DIRECTORY = kernel.PATH_ONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_UNKNOWN = Hashes(size=0, values={})


def beside(name: str) -> str:
    """Return an unused hidden name for the same folder, marked as ours."""
    start = os.fsdecode(os.fsencode(name)[:100])  # filesystems count bytes
    return f".{start}.{secrets.token_hex(6)}.smartcache"


def is_same(a: os.stat_result | None, b: os.stat_result | None) -> bool:
    """Say whether two names are one file now. A number that was noted before proves nothing."""
    return a is not None and b is not None and a.st_ino == b.st_ino and a.st_dev == b.st_dev


def look(path: str | Path) -> os.stat_result | None:
    """Return what has a name, a symlink itself; None: nothing, or nothing that can be seen."""
    try:
        return os.lstat(path)
    except OSError:
        return None


# attributes


def read_attributes(file: Path | str | int) -> dict[str, str]:
    """Return the extended attributes of a file, a symlink itself or a descriptor, in hexadecimal.

    Access control lists are among them (`system.posix_acl_access`).
    """
    found: dict[str, str] = {}
    for name in kernel.attributes_of(file):
        with suppress(OSError):  # removed in this moment
            found[name] = os.getxattr(file, name, follow_symlinks=isinstance(file, int)).hex()
    return found


def write_attributes(descriptor: int, wanted: Mapping[str, str]) -> None:
    """Give a new file exactly these attributes; what it inherited from its folder goes.

    To be called before its mode is set: a list of access rights changes the mode's group bits.
    Those that only the filesystem itself can set (`lustre.`, `system.ntfs_`) are left to it.
    """
    for name in set(kernel.attributes_of(descriptor)) - wanted.keys():
        with suppress(OSError):
            os.removexattr(descriptor, name)
    for name, value in wanted.items():
        try:
            os.setxattr(descriptor, name, bytes.fromhex(value))
        except OSError:
            if name.startswith(_THE_USERS):
                raise


# a name in an open folder


class Spot:
    """A name in an open folder; FileNotFoundError if the folder is not there.

    A context manager. `name` arguments are other names in the same folder.
    """

    __slots__ = ("_is_own", "fd", "name", "path")

    def __init__(self, path: Path, fd: int | None = None) -> None:
        """Open the folder; one that is given stays the caller's."""
        self.path = path
        self.name = path.name
        self._is_own = fd is None
        self.fd = open_folder(path) if fd is None else fd

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the folder, unless it is somebody else's."""
        if self._is_own:
            os.close(self.fd)

    def stat(self, name: str | None = None) -> os.stat_result | None:
        """Return what is at the name, a symlink itself; None: nothing."""
        try:
            return os.stat(name or self.name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def open(self, name: str | None = None) -> int:
        """Open the regular file at the name for reading; the caller closes it."""
        descriptor = self._open(name or self.name, os.O_RDONLY)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise FileChangedError(f"{self.path} is not a regular file any more", path=self.path)
        return descriptor

    def create(self, name: str, permissions: int = 0o600) -> int:
        """Make a new file for reading and writing; the caller closes it."""
        return self._open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, permissions)

    def _open(self, name: str, flags: int, permissions: int = 0) -> int:
        try:
            return os.open(name, flags | _FILE, permissions, dir_fd=self.fd)
        except OSError as error:
            error.filename = str(self.path.with_name(name))
            raise

    def link_to(self, target: str) -> None:
        """Give the file at the name another one, elsewhere on its filesystem."""
        os.link(self.name, target, src_dir_fd=self.fd, follow_symlinks=False)

    def take(self, source: str, name: str | None = None) -> None:
        """Let a file of ours have the name too, which must be free."""
        os.link(source, name or self.name, dst_dir_fd=self.fd)

    def rename(self, old: str, new: str | None = None) -> None:
        """Let another file of the folder have the name, whatever has it now."""
        os.rename(old, new or self.name, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def link(self, old: str, new: str) -> None:
        """Give a file of the folder one more name there, which must be free."""
        os.link(old, new, src_dir_fd=self.fd, dst_dir_fd=self.fd, follow_symlinks=False)

    def unlink(self, name: str | None = None) -> None:
        """Remove a name, if it is there."""
        with suppress(FileNotFoundError):
            os.unlink(name or self.name, dir_fd=self.fd)

    def swap_in(self, temporary: str, expected_inode: int) -> bool:
        """Let another file of the folder take the name, as `swap_in` does."""
        return swap_in(temporary, self.name, expected_inode, dir_fd=self.fd)

    def give_mode(self, mode: int, *, inode: int, links: int) -> None:
        """Set the permissions of a file of this user, unless it is another than expected.

        `links` are the names the file may have at most: another one may be somebody else's. Special
        modes are never given.
        """
        descriptor = self.open()
        try:
            st = os.fstat(descriptor)
            is_it = (st.st_ino, st.st_uid) == (inode, kernel.effective_user())
            # An immutable file never had another mode.
            if is_it and st.st_nlink <= links and st.st_mode & 0o777 != mode & 0o777:
                os.fchmod(descriptor, mode & 0o777)
        finally:
            os.close(descriptor)

    def sync(self) -> None:
        """Bring the names of the folder to the disk, where that can be done."""
        with suppress(PermissionError):  # a folder that may be entered but not read
            descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.fd)
            try:
                os.fsync(descriptor)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP):
                    raise
            finally:
                os.close(descriptor)


def open_folder(path: Path) -> int:
    """Open the folder of an absolute path, no component of which is a symlink."""
    descriptor = -1
    try:
        whole = kernel.open_without_symlinks(path.parent, _DIRECTORY)
        if whole is not None:
            return whole
        descriptor = os.open(path.anchor, _DIRECTORY)
        for part in path.parent.parts[1:]:
            below = os.open(part, _DIRECTORY, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
    except OSError as error:
        if descriptor >= 0:
            os.close(descriptor)
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            message = f"{path}: a folder above it is a symlink now, or a file; left as it is"
            raise FileSkippedError(message, reason="its folder was moved", path=path) from error
        error.filename = str(path.parent)
        raise
    return descriptor


class Folders:
    """The folders of one chunk of work, each opened once."""

    def __init__(self) -> None:
        self._fds: dict[Path, int] = {}
        self._real: dict[Path, Path] = {}

    def spot(self, path: Path, *, follow: bool = False) -> Spot:
        """Return the spot of a path; `follow`: symlinks above it are followed now."""
        above = path.parent
        if follow:
            real = self._real.get(above)
            if real is None:
                real = self._real[above] = Path(os.path.realpath(above))
            if real != above:
                above, path = real, real / path.name
        fd = self._fds.get(above)
        if fd is None:
            fd = self._fds[above] = open_folder(path)
        return Spot(path, fd)

    def close(self) -> None:
        """Close them."""
        while self._fds:
            os.close(self._fds.popitem()[1])


def swap_in(
    temporary: str | Path, path: str | Path, expected_inode: int, *, dir_fd: int | None = None
) -> bool:
    """Let the file at `temporary` take the name `path`, if that is the inode expected there.

    False: somebody has put another file at `path`, or removed it. Theirs stays, and `temporary` is
    as before. With `dir_fd` both are names in that directory.
    """
    if not _is_inode(path, expected_inode, dir_fd):
        return False
    with _held(temporary, dir_fd) as ours:
        try:
            if not kernel.exchange(temporary, path, dir_fd=dir_fd):
                os.replace(temporary, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
                return True
        except FileNotFoundError:
            return False
        reached("swap: exchanged")
        if _is_inode(temporary, expected_inode, dir_fd):
            os.unlink(temporary, dir_fd=dir_fd)
            return True
        _give_newest_back(temporary, path, ours, dir_fd)
    return False


def _give_newest_back(
    temporary: str | Path, path: str | Path, put: os.stat_result, dir_fd: int | None
) -> None:
    """Undo an exchange that took somebody else's file from its name.

    A file appeared at `path` between look and exchange. It goes back; if yet another one appeared
    meanwhile, that is the newest, and so on, until the exchange brings back what the last one put.
    """
    with _held(temporary, dir_fd) as found:
        try:
            kernel.exchange(temporary, path, dir_fd=dir_fd)
        except FileNotFoundError:
            # They have removed the name, so what they had put there was to go.
            os.unlink(temporary, dir_fd=dir_fd)
            return
        if not os.path.samestat(os.stat(temporary, dir_fd=dir_fd, follow_symlinks=False), put):
            _give_newest_back(temporary, path, found, dir_fd)


@contextmanager
def _held(path: str | Path, dir_fd: int | None) -> Iterator[os.stat_result]:
    """Give the stat of a file and keep its inode number from being used again meanwhile."""
    descriptor = os.open(path, kernel.PATH_ONLY | os.O_NOFOLLOW, dir_fd=dir_fd)
    try:
        yield os.fstat(descriptor)
    finally:
        os.close(descriptor)


def _is_inode(path: str | Path, inode: int, dir_fd: int | None) -> bool:
    try:
        return os.stat(path, dir_fd=dir_fd, follow_symlinks=False).st_ino == inode
    except FileNotFoundError:
        return False


# what may become a link


def is_incomplete(name: bytes) -> bool:
    """Say whether a file's name says that it is still being downloaded."""
    lower = name.lower()
    return lower.endswith(_INCOMPLETE_SUFFIXES) or _OLLAMAS.fullmatch(lower) is not None


def as_skipped(path: Path, error: Exception) -> Exception:
    """Return an error that holds for one file only in words; others as they are."""
    reason = _REASONS.get(getattr(error, "errno", None) or 0)
    if reason is None or isinstance(error, StoreError):
        return error
    return FileSkippedError(f"{path}: {reason}", reason=reason, path=path)


def refuse_unsuitable(path: Path, st: os.stat_result) -> None:
    """Raise unless a file is one that may become a link or a blob."""
    refuse_unshareable(path, st)
    reason = ""
    if st.st_uid != kernel.effective_user():
        reason = "belongs to another user"
    elif st.st_mode & (stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX):
        reason = "has a special mode"
    if reason:
        raise FileSkippedError(f"{path}: {reason}", reason=reason, path=path)


def refuse_unshareable(path: Path, st: os.stat_result) -> None:
    """Raise unless a file is one whose bytes may be shared at all."""
    reason = ""
    if not stat.S_ISREG(st.st_mode):
        reason = "not a regular file"
    elif st.st_size == 0:
        reason = "empty"
    elif is_incomplete(os.fsencode(path.name)):
        reason = "incomplete download"
    if reason:
        raise FileSkippedError(f"{path}: {reason}", reason=reason, path=path)


def refuse_visible_change(
    path: Path,
    st: os.stat_result,
    other: os.stat_result,
    attributes: Path | int,
    allow: frozenset[Allowance] = frozenset(),
) -> None:
    """Raise if a link to another file would show another group, other permissions or attributes.

    `attributes` is what is asked for them: the path of the file, or its descriptor.
    """
    reason = ""
    if st.st_gid != other.st_gid and "group" not in allow:
        reason = "different group"
    elif st.st_mode & 0o555 != other.st_mode & 0o555 and "mode" not in allow:
        reason = "different permissions"
    elif "xattr" not in allow and read_attributes(attributes):
        reason = "has extended attributes"
    if reason:
        raise FileSkippedError(f"{path}: {reason}", reason=reason, path=path)


# the file behind the name


class UserFile:
    """An open file of a user, in the folder it was found in, whatever becomes of the path.

    `prove_all` makes its bytes known (`digest`, `hashes`) and holds it still (`lease`), or says why
    not (`error`). `is_proven` is False when no lease could be had and the file is so young that its
    key proves little. The caller closes it.
    """

    __slots__ = (
        "digest", "error", "fd", "hashes", "is_durable", "is_proven", "lease", "path", "spot", "st",
    )  # fmt: skip

    def __init__(self, path: Path, spot: Spot) -> None:
        """Open it, or raise; `path` is what the user calls it."""
        self.path = path
        self.spot = spot
        self.lease: kernel.Lease = "unsupported"
        self.is_proven = False
        self.error: Exception | None = None
        self.hashes = _UNKNOWN
        self.digest = ""
        st = spot.stat()
        if st is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        refuse_unsuitable(path, st)
        self.fd = spot.open()
        # Another file may have come to the name: what counts is the one that was opened.
        self.st = os.fstat(self.fd)
        if not is_same(st, self.st):
            os.close(self.fd)
            raise FileChangedError(f"{path} was replaced meanwhile", path=path)
        times = self.st.st_mtime_ns, self.st.st_ctime_ns
        self.is_durable = time.time_ns() - max(times) > HOUR_NS

    def take_lease(self) -> bool:
        """Hold writers back, where that works; False: somebody writes it."""
        self.lease = kernel.take_lease(self.fd)
        if self.lease == "busy":
            self.error = FileBusyError(f"{self.path} is open for writing", path=self.path)
        return self.error is None

    def drop_lease(self) -> None:
        """Let waiting writers go on; the file stays open."""
        if self.lease == "held":
            kernel.drop_lease(self.fd)
            self.lease = "unsupported"

    def close(self) -> None:
        """Close the file, which ends the lease; harmless to repeat."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def prove_all(
    home: Home,
    files: Sequence[UserFile],
    algorithms: Iterable[Algorithm] = (),
    *,
    read: _hashes.Read,
    progress: Progress = silent,
) -> list[UserFile]:
    """Learn the bytes of files, `read` in this run or hashed now, and hold each still.

    Return those that were hashed now, and may be remembered.
    """
    wanted: tuple[Algorithm, ...] = tuple(dict.fromkeys(("blake3", *algorithms)))
    now = time.time_ns()
    keys: dict[int, kernel.StatKey] = {}
    unread: dict[int, UserFile] = {}
    young: dict[int, UserFile] = {}
    for file in files:
        key = kernel.StatKey.of(file.st)
        if key.is_racy(now):
            young[file.fd] = file
        elif values := _read_before(home, file, key, wanted, read):
            file.hashes, file.digest = Hashes(size=key.size, values=values), values["blake3"]
            keys[file.fd] = key
        # Asked before the first byte is read: whoever maps the file later cannot write without
        # another change time. It is not kept: a writer would wait for us.
        elif file.take_lease():
            file.drop_lease()
            unread[file.fd] = file
    _hash(home, unread, wanted, progress, keys)
    _hash(home, {fd: f for fd, f in young.items() if f.take_lease()}, wanted, progress, keys)
    for file in files:
        is_young = file.fd in young
        is_held = file.error is None and (is_young or file.take_lease())
        if is_held and _hold_still(file, keys[file.fd], is_young=is_young) and not is_young:
            where = home.filesystem(file.path, file.st)
            read.add(where, file.st.st_ino, keys[file.fd], file.digest)
    return [file for file in unread.values() if file.error is None]


def _read_before(
    home: Home,
    file: UserFile,
    key: kernel.StatKey,
    wanted: tuple[Algorithm, ...],
    read: _hashes.Read,
) -> Mapping[Algorithm, str]:
    """Return the hashes of a file that this run has read, if all that are wanted are known."""
    values: Mapping[Algorithm, str]
    known = read.digest_of(home.filesystem(file.path, file.st), file.st.st_ino, key)
    if not known:
        return {}
    values = {"blake3": known} if len(wanted) == 1 else home.catalog.hashes_of([known])[known]
    return values if all(name in values for name in wanted) else {}


def _hash(
    home: Home,
    files: dict[int, UserFile],
    wanted: tuple[Algorithm, ...],
    progress: Progress,
    keys: dict[int, kernel.StatKey],
) -> None:
    if not files:
        return
    names, threads = {fd: file.path.name for fd, file in files.items()}, home.settings.threads
    for each in hash_many(files, wanted, threads=threads, progress=progress, names=names):
        file = files[each.path]
        file.error = each.error
        if each.hashes is not None and each.key is not None:
            file.hashes, file.digest = each.hashes, each.hashes.digest
            keys[each.path] = each.key


def _hold_still(file: UserFile, key: kernel.StatKey, *, is_young: bool) -> bool:
    """Say whether a leased file still is what was hashed; who comes later is seen by the lease."""
    is_held = file.lease == "held"
    if is_young and is_held:
        # Wait out the clock tick of the last write, so that a later one must show another time.
        wait = min(key.mtime_ns + TICK_NS - time.time_ns(), TICK_NS)
        time.sleep(max(0, wait) / 1e9)
    file.st = os.fstat(file.fd)
    is_broken = is_young and is_held and not kernel.lease_intact(file.fd)
    if is_broken or kernel.StatKey.of(file.st) != key:
        file.error = FileChangedError(f"{file.path} changed while it was read", path=file.path)
    is_old_enough = file.st.st_mtime_ns <= time.time_ns() - TICK_NS
    file.is_proven = not is_young or (is_held and is_old_enough)
    return file.error is None
