"""Names of a user's files: put one file in the place of another, in the very folder that is meant.

The name is never absent and a third file never lost (`swap_in`, `Name`). Recovery and undo act long
after a path was written down, and whoever can write a folder above it may have put a symlink there.
So they open the folder once, no component of its path being a symlink (`Spot`), and every step goes
by that descriptor and a bare name.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from smartcache.errors import DestinationExistsError, FileChangedError, FileSkippedError
from smartcache.system.faults import reached
from smartcache.system.kernel import effective_user, exchange, open_without_symlinks

_THE_USERS = ("user.", "system.posix_acl_")


def read_attributes(file: Path | int) -> dict[str, str]:
    """Return the extended attributes of a file, a symlink itself or a descriptor, in hexadecimal.

    Access control lists are among them (`system.posix_acl_access`). Those in `security.` are left
    to the system: a new file gets its label from where it lies, and only the kernel's policy may
    set it.
    """
    found: dict[str, str] = {}
    if not hasattr(os, "listxattr"):
        return found
    follow = isinstance(file, int)
    try:
        names = os.listxattr(file, follow_symlinks=follow)
    except OSError:  # a filesystem without any
        return found
    for name in names:
        if not name.startswith("security."):
            with suppress(OSError):  # removed in this moment
                found[name] = os.getxattr(file, name, follow_symlinks=follow).hex()
    return found


def write_attributes(descriptor: int, wanted: Mapping[str, str]) -> None:
    """Give a new file exactly these attributes; what it inherited from its folder goes.

    To be called before its mode is set: a list of access rights changes the mode's group bits.
    Those that only the filesystem itself can set (`lustre.`, `system.ntfs_`) are left to it.
    """
    for name in read_attributes(descriptor).keys() - wanted.keys():
        with suppress(OSError):
            os.removexattr(descriptor, name)
    for name, value in wanted.items():
        try:
            os.setxattr(descriptor, name, bytes.fromhex(value))
        except OSError:
            if name.startswith(_THE_USERS):
                raise


_DIRECTORY = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OURS = re.compile(r"\..*\.[0-9a-f]{12}\.smartcache", re.DOTALL)


def beside(path: Path) -> Path:
    """Return an unused hidden name in the same directory, marked as ours."""
    start = os.fsdecode(os.fsencode(path.name)[:100])  # filesystems count bytes
    return path.with_name(f".{start}.{secrets.token_hex(6)}.smartcache")


def is_beside(temporary: Path, path: Path) -> bool:
    """Say whether a name is one that `beside` makes for a path."""
    return temporary.parent == path.parent and _OURS.fullmatch(temporary.name) is not None


class Spot:
    """A name in an open folder; FileNotFoundError if the folder is not there.

    A context manager. `name` arguments are other names in the same folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.fd = _open_directory(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the folder."""
        os.close(self.fd)

    def stat(self, name: str | None = None) -> os.stat_result | None:
        """Return what is at the name, a symlink itself; None: nothing."""
        try:
            return os.stat(name or self.name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def inode(self, name: str | None = None) -> int | None:
        """Return the inode at the name; None: nothing is there."""
        st = self.stat(name)
        return None if st is None else st.st_ino

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

    def unlink(self, name: str | None = None) -> None:
        """Remove a name, if it is there."""
        with suppress(FileNotFoundError):
            os.unlink(name or self.name, dir_fd=self.fd)

    def swap_in(self, temporary: str, expected_inode: int) -> bool:
        """Let another file of the folder take the name, as `swap_in` does."""
        return swap_in(temporary, self.name, expected_inode, dir_fd=self.fd)

    def give_mode(self, mode: int, *, inode: int, links: int) -> str:
        """Set the permissions of a file of this user; say why not if it is another than expected.

        `links` are the names the file may have at most: another one may be somebody else's. Special
        modes are never given.
        """
        descriptor = self.open()
        try:
            st = os.fstat(descriptor)
            if st.st_ino != inode:
                return "another file is there now; left as it is"
            if st.st_uid != effective_user():
                return "it belongs to another user now; left as it is"
            if st.st_nlink > links:
                return "it shares its bytes with other files, so it stays read-only"
            os.fchmod(descriptor, mode & 0o777)
            return ""
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


def _open_directory(path: Path) -> int:
    """Open the folder of an absolute path, no component of which is a symlink."""
    descriptor = -1
    try:
        whole = open_without_symlinks(path.parent, _DIRECTORY)
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
            if not exchange(temporary, path, dir_fd=dir_fd):
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
            exchange(temporary, path, dir_fd=dir_fd)
        except FileNotFoundError:
            # They have removed the name, so what they had put there was to go.
            os.unlink(temporary, dir_fd=dir_fd)
            return
        if not os.path.samestat(os.stat(temporary, dir_fd=dir_fd, follow_symlinks=False), put):
            _give_newest_back(temporary, path, found, dir_fd)


@contextmanager
def _held(path: str | Path, dir_fd: int | None) -> Iterator[os.stat_result]:
    """Give the stat of a file and keep its inode number from being used again meanwhile."""
    flags = getattr(os, "O_PATH", os.O_RDONLY) | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags, dir_fd=dir_fd)
    except OSError:  # a symlink, where O_PATH does not exist
        yield os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
        return
    try:
        yield os.fstat(descriptor)
    finally:
        os.close(descriptor)


def _is_inode(path: str | Path, inode: int, dir_fd: int | None) -> bool:
    try:
        return os.stat(path, dir_fd=dir_fd, follow_symlinks=False).st_ino == inode
    except FileNotFoundError:
        return False


class Name:
    """The name a blob gets: made inside a block, and taken back if the block fails after all.

    A free path gets its name in one step that never overwrites. A path to be overwritten gets its
    new file beside it and exchanged with the old one, which goes when the block has succeeded.
    """

    def __init__(self, path: Path, over: Path | None) -> None:
        """`over` is a free name beside `path`, given if the file at `path` may be overwritten."""
        self._path = path
        self._beside = over
        self._inode: int | None = None
        self._has_old = False

    def make(self, link: Callable[[str], None]) -> None:
        """Make the name by a function that gives the file a name."""
        if self._beside is None:
            try:
                link(str(self._path))
            except FileExistsError as error:
                message = f"{self._path} exists already"
                raise DestinationExistsError(message, path=self._path) from error
            self._inode = os.lstat(self._path).st_ino
            return
        link(str(self._beside))
        self._inode = os.lstat(self._beside).st_ino
        reached("place: temporary made")
        try:
            self._has_old = exchange(self._beside, self._path)
        except FileNotFoundError:
            self._has_old = False
        if not self._has_old:
            os.replace(self._beside, self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is not None and self._inode is not None:
                self._take_back(self._inode)
        finally:
            if self._beside is not None:
                # rename(2) of two links of one inode succeeds and leaves the first name.
                self._beside.unlink(missing_ok=True)

    def _take_back(self, inode: int) -> None:
        if self._has_old and self._beside is not None:
            swap_in(self._beside, self._path, inode)
        elif os.path.lexists(self._path) and os.lstat(self._path).st_ino == inode:
            self._path.unlink()
