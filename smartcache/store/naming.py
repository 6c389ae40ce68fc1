"""Give a file a name that can be taken back until the index knows of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Self

from smartcache.errors import DestinationExistsError
from smartcache.store.faults import reached
from smartcache.store.kernel import exchange
from smartcache.store.swap import swap_in


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
