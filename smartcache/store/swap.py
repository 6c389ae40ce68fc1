"""Names of a user's files: put one file in the place of another, in the very folder that is meant.

The name is never absent and a third file never lost (`swap_in`). Recovery and undo act long after a
path was written down, and whoever can write a folder above it may have put a symlink there. So they
open the folder once, no component of its path being a symlink (`Spot`), and every step goes by that
descriptor and a bare name.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from smartcache.errors import FileChangedError, FileSkippedError
from smartcache.store.faults import reached
from smartcache.store.kernel import effective_user, exchange

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

    def create(self, name: str) -> int:
        """Make a new file for reading and writing, for this user only; the caller closes it."""
        return self._open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def _open(self, name: str, flags: int) -> int:
        try:
            return os.open(name, flags | _FILE, 0o600, dir_fd=self.fd)
        except OSError as error:
            error.filename = str(self.path.with_name(name))
            raise

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
    descriptor = os.open(path.anchor, _DIRECTORY)
    try:
        for part in path.parent.parts[1:]:
            below = os.open(part, _DIRECTORY, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
    except OSError as error:
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
