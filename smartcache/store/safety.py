"""Open what lies in a store: a regular file under its own name, and nothing else.

Whatever lies at a path of the store may have been put there by somebody else. A symlink would lead
elsewhere, and a FIFO would keep whoever opens it waiting for ever. So every file of a store is
opened without following and without blocking, and what was opened is looked at, by its descriptor,
before anything is done with it.
"""

from __future__ import annotations

import errno
import os
import stat
import time

from smartcache.errors import UnsafeFileError

_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_NOT_REGULAR = {errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENODEV}
"""What opening a symlink, a socket or a FIFO without reader, a directory, a dead device gives."""
_PAUSE = 0.01


def open_own(
    path: str | os.PathLike[str], flags: int = os.O_RDONLY, *, dir_fd: int | None = None
) -> int:
    """Open a file of the store, for the caller to close; UnsafeFileError if it is not regular."""
    while True:
        try:
            descriptor = os.open(path, flags | _FLAGS, dir_fd=dir_fd)
        except BlockingIOError:
            # A file server has a lease on it, which the kernel takes back within 45 seconds.
            time.sleep(_PAUSE)
        except OSError as error:
            if error.errno in _NOT_REGULAR:
                raise not_regular(path) from error
            raise
        else:
            break
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise not_regular(path)
    return descriptor


def read_own(path: str | os.PathLike[str], most: int) -> bytes:
    """Return what a small file of the store holds, at most `most` bytes of it."""
    descriptor = open_own(path)
    try:
        return os.read(descriptor, most)
    finally:
        os.close(descriptor)


def not_regular(path: str | os.PathLike[str]) -> UnsafeFileError:
    """Return the error for something in the store that is not the file it should be."""
    return UnsafeFileError(f"{os.fspath(path)} is not a regular file", path=os.fspath(path))
