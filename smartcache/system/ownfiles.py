"""What may be believed of a store: what this user alone can write, under its own name.

A store has one writer. Whoever else could write its journal could have any file changed by the next
undo, and whoever owns a blob can change its bytes; so what belongs to another user, can be written
by others or is a symlink is refused, and root gets no exception: it would be the one to lose most.

A FIFO would keep whoever opens it waiting for ever. So every file of a store is opened without
following and without blocking, and what was opened is looked at, by its descriptor, before anything
is done with it.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from smartcache.errors import (
    NoSpaceError,
    StoreUnwritableError,
    UnsafeFileError,
    UnsafeStoreError,
)
from smartcache.system.kernel import effective_user, sync_directory

_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_NOT_REGULAR = {errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENODEV}
"""What opening a symlink, a socket or a FIFO without reader, a directory, a dead device gives."""
_PAUSE = 0.01
_OTHERS_WRITE = 0o022


def check_own(path: str | os.PathLike[str]) -> os.stat_result | None:
    """Raise UnsafeStoreError if a part of a store is a symlink, or is not this user's alone.

    None: nothing is there.
    """
    name = os.fspath(path)
    try:
        st = os.lstat(name)
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(st.st_mode):
        target = os.path.realpath(name)
        hint = f"Use the place it leads to: set SMARTCACHE_HOME, or name {target} itself."
        raise UnsafeStoreError(f"{name} is a symlink", hint=hint, path=name)
    if st.st_uid != effective_user():
        message = f"{name} belongs to {user_name(st.st_uid)}, and a store has one user"
        raise UnsafeStoreError(message, path=name)
    if st.st_mode & _OTHERS_WRITE:
        message = f"{name} can be written by other users (mode {stat.S_IMODE(st.st_mode):04o})"
        hint = f"If you trust what is in it: chmod -R go-w {name}"
        raise UnsafeStoreError(message, hint=hint, path=name)
    return st


def user_name(user: int) -> str:
    """Return the name of a user, or its number where it has none."""
    import pwd

    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"


def open_own(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Open a file of the store, for the caller to close.

    UnsafeFileError if it is not a regular file, or not this user's.
    """
    while True:
        try:
            descriptor = os.open(path, flags | _FLAGS)
            break
        except BlockingIOError:
            # A file server has a lease on it, which the kernel takes back within 45 seconds.
            time.sleep(_PAUSE)
        except OSError as error:
            if error.errno in _NOT_REGULAR:
                raise _not_regular(path) from error
            raise
    try:
        check_file(path, os.fstat(descriptor))
    except UnsafeFileError:
        os.close(descriptor)
        raise
    return descriptor


def check_file(path: str | os.PathLike[str], st: os.stat_result) -> None:
    """Raise UnsafeFileError if what is at a path is not a regular file of this user."""
    if not stat.S_ISREG(st.st_mode):
        raise _not_regular(path)
    if st.st_uid != effective_user():
        message = f"{os.fspath(path)} belongs to {user_name(st.st_uid)}"
        raise UnsafeFileError(message, path=os.fspath(path))


def make_or_open_own(path: str | os.PathLike[str], flags: int) -> tuple[int, bool]:
    """Open a file of the store, made when missing, mode 0600; say whether this call made it."""
    while True:
        try:
            return open_own(path, flags), False
        except FileNotFoundError:
            with suppress(FileExistsError):
                return create_own(path, flags), True


def make_own(path: Path) -> None:
    """Make a directory of the store, mode 0700, or raise if one is there that is not ours alone."""
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
        path.chmod(0o700)  # an umask may take even that away
    check_own(path)


def create_own(path: str | os.PathLike[str], flags: int = os.O_WRONLY) -> int:
    """Make a new file of the store, mode 0600; FileExistsError if anything is there."""
    descriptor = os.open(path, flags | _FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
    os.fchmod(descriptor, 0o600)  # an umask may take even that away
    return descriptor


@contextmanager
def atomically(
    path: Path, *, is_private: bool = True, room: Path | None = None
) -> Iterator[BinaryIO]:
    """Give a file to write to, which takes the name when the block ends: whole, or not at all.

    Its bytes are on the disk before it has the name, and the name when this returns: a power cut
    leaves the old file or the new one, never an empty one. Not `is_private`: who can read it is
    left to the umask. `room`: the folder of the same filesystem to write it in, if not its own.
    """
    start = os.fsdecode(os.fsencode(path.name)[:100])  # filesystems count bytes
    temporary = (room or path.parent) / f".{start}.{secrets.token_hex(4)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = create_own(temporary) if is_private else os.open(temporary, flags, 0o666)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    with suppress(PermissionError):  # a folder that may be written but not read
        sync_directory(path.parent)


def unwritable(
    what: str, path: str | os.PathLike[str], error: OSError
) -> NoSpaceError | StoreUnwritableError:
    """Return the error for something that cannot be made or written: a full disk has its own."""
    kind = NoSpaceError if error.errno in {errno.ENOSPC, errno.EDQUOT} else StoreUnwritableError
    return kind(f"{what}: {error.strerror or error}", path=path, errno=error.errno)


def read_own(path: str | os.PathLike[str], most: int) -> bytes:
    """Return what a small file of the store holds, at most `most` bytes of it."""
    descriptor = open_own(path)
    try:
        return os.read(descriptor, most)
    finally:
        os.close(descriptor)


def _not_regular(path: str | os.PathLike[str]) -> UnsafeFileError:
    return UnsafeFileError(f"{os.fspath(path)} is not a regular file", path=os.fspath(path))
