"""Reading files that others wrote: config files, manifests, heads of models.

Whatever the name stands for, opening it never waits (a FIFO), and no more is read than asked for.
Everything that can be wrong is an `OSError`, so that callers excuse one thing.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, Final

_FLAGS: Final = (
    os.O_RDONLY
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NOCTTY", 0)
    | getattr(os, "O_BINARY", 0)
)
_NO_ACCESS_TIME: Final = getattr(os, "O_NOATIME", 0)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for unbuffered reading, without touching its access time if allowed."""
    try:
        descriptor = _open(path)
    except ValueError as error:  # a NUL byte in a path that somebody's config file gave
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), os.fspath(path)) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return open(descriptor, "rb", buffering=0)


def read_small(path: Path, most: int) -> bytes:
    """Return the bytes of a file; EFBIG if there are more than `most`."""
    with open_regular(path) as file:
        data = read_up_to(file, most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"larger than {most} bytes", os.fspath(path))
    return data


def read_up_to(file: BinaryIO, size: int) -> bytes:
    """Return the next `size` bytes, fewer only at the end of the file."""
    parts = []
    while size > 0 and (part := file.read(min(size, 1 << 20))):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _open(path: Path) -> int:
    if _NO_ACCESS_TIME:
        try:
            return os.open(path, _FLAGS | _NO_ACCESS_TIME)
        except PermissionError:  # EPERM: only for the owner
            pass
    return os.open(path, _FLAGS)
