"""The files of a remote that is a folder: found, read and removed by name.

Other programs and other people write there, too. So nothing below the folder is reached through a
symlink, nothing but regular files is read, and opening one waits for nobody: obstore's LocalStore
follows symlinks and hangs on a FIFO. It needs no threads either, and works after a fork.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

from smartcache.errors import DamagedObjectError, TierError

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_OTHER_THINGS: Final = {errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EISDIR, errno.ENODEV}
"""What opening a symlink, a socket, a directory or a dead device gives."""
_FOLDERS: Final = re.compile(
    r"objects(/[0-9a-f]{2})?|names(/(sha256|git-sha1)(/[0-9a-f]{2})?)?"
    r"|documents(/(repos|blobs|sets|datasets)(/[A-Za-z0-9][A-Za-z0-9._-]*)?)?"
)


class Listed(NamedTuple):
    """A file of a remote, as it is listed."""

    path: str
    size: int
    changed_at: datetime
    is_file: bool = True
    """False: in a folder something else is there, such as a symlink; it is left alone."""


class Files:
    """The files below a folder; paths are relative to it. The folder itself may be a symlink."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @contextmanager
    def _parent(self, path: str) -> Iterator[tuple[int, str]]:
        """Open the folder that a path is in, and give its descriptor and the last name."""
        *folders, name = path.split("/")
        try:
            here = os.open(self.root, _DIRECTORY)
        except (FileNotFoundError, NotADirectoryError) as error:
            hint = "Check the path, and that its drive is mounted."
            raise TierError(f"{self.root} is not there", hint=hint, path=self.root) from error
        try:
            for number, each in enumerate(folders):
                try:
                    deeper = os.open(each, _DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
                except OSError as error:
                    if error.errno in _OTHER_THINGS:
                        raise odd(self.root, "/".join(folders[: number + 1]), "folder") from error
                    raise
                os.close(here)
                here = deeper
            yield here, name
        finally:
            os.close(here)

    @contextmanager
    def _opened(self, path: str) -> Iterator[int]:
        with self._parent(path) as (parent, name):
            try:
                file = os.open(name, _FILE, dir_fd=parent)
            except OSError as error:
                if error.errno in _OTHER_THINGS:
                    raise odd(self.root, path, "regular file") from error
                raise
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise odd(self.root, path, "regular file")
            yield file
        finally:
            os.close(file)

    def size(self, path: str) -> int:
        """Return the size of a file."""
        with self._opened(path) as file:
            return os.fstat(file).st_size

    def read(self, path: str, start: int, length: int) -> bytes:
        """Return a part of a file, less where it ends."""
        with self._opened(path) as file:
            parts = []
            while length > 0 and (part := os.pread(file, length, start)):
                parts.append(part)
                start, length = start + len(part), length - len(part)
            return b"".join(parts)

    def check_way(self, path: str) -> None:
        """Raise DamagedObjectError if what is written there would come to another place."""
        with suppress(FileNotFoundError), self._parent(path):
            pass

    def remove(self, path: str) -> None:
        """Remove a file, or what has its name."""
        with suppress(FileNotFoundError), self._parent(path) as (parent, name):
            os.unlink(name, dir_fd=parent)

    def listed(self, prefix: str = "") -> Iterator[Listed]:
        """Go through what is below a prefix: all files in folders of a remote's own shape.

        Of anything else only the name is given, and no folder of others is entered.
        """
        found: list[Listed] = []
        folders: list[str] = []
        try:
            with self._parent(f"{prefix}/.".lstrip("/")) as (parent, _), os.scandir(parent) as some:
                for entry in some:
                    path = f"{prefix}/{entry.name}" if prefix else entry.name
                    if entry.is_dir(follow_symlinks=False) and is_place_of_folder(path):
                        folders.append(path)
                        continue
                    with suppress(FileNotFoundError):
                        st = entry.stat(follow_symlinks=False)
                        changed_at = datetime.fromtimestamp(max(0.0, st.st_mtime), UTC)
                        found.append(Listed(path, st.st_size, changed_at, stat.S_ISREG(st.st_mode)))
        except FileNotFoundError:
            return
        yield from sorted(found)
        for each in sorted(folders):
            yield from self.listed(each)


def is_place_of_folder(path: str) -> bool:
    """Whether a path is one at which a remote has a folder."""
    return _FOLDERS.fullmatch(path) is not None


def odd(root: Path, path: str, kind: str) -> DamagedObjectError:
    """Return the error for something that is not what its name says."""
    hint = "smartcache follows no symlinks there. Look at it, and move it away."
    return DamagedObjectError(f"{root / path} is not a {kind}", hint=hint, path=root / path)
