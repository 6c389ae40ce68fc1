"""The files a user means by the words of a command line: files as they are, folders with `-r`."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smartcache.cli._output import out
from smartcache.cli._tables import shortened
from smartcache.errors import StoreError

if TYPE_CHECKING:
    from pathlib import Path

_ENOUGH = 160
"""Characters of a path that is too long for the system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A file to work on. `is_named`: the user wrote its name, so leaving it out is a failure."""

    path: Path
    size: int
    is_named: bool


def chosen_files(words: tuple[Path, ...], *, recursive: bool) -> tuple[list[Chosen], int]:
    """Return the files meant, each once, and how many folders could not be read.

    A word that names nothing raises before anything is done. Below a folder, symlinks are left out
    (what they point at is found where it is, or lies elsewhere), and so are stores.
    """
    from pathlib import Path

    found: dict[Path, Chosen] = {}
    unread = 0
    for word in words:
        path = Path(os.path.abspath(word))
        st = os.stat(word)
        if not stat.S_ISDIR(st.st_mode):
            found[path] = Chosen(path=path, size=st.st_size, is_named=True)
            continue
        if not recursive:
            raise StoreError(f"{word} is a directory", hint="Take the files in it with -r.")
        for each in _below(path):
            if isinstance(each, OSError):
                unread += 1
                if each.errno == errno.ENAMETOOLONG:  # its path would fill the screen
                    text = f"{shortened(str(each.filename), _ENOUGH)} lies too deep to be reached"
                    out.warn(f"{text}; left out")
                else:
                    out.warn(f"{each.filename}: {each.strerror}")
            else:
                found.setdefault(each.path, each)
    return list(found.values()), unread


def _below(folder: Path) -> Iterator[Chosen | OSError]:
    """Go through the files below a folder in the order of their names, however deep they lie."""
    from pathlib import Path

    waiting: list[Path | os.DirEntry[str]] = [folder]
    while waiting:
        each = waiting.pop()
        try:
            if isinstance(each, Path) or each.is_dir(follow_symlinks=False):
                waiting += _inside(each)
            elif each.is_file(follow_symlinks=False):
                size = each.stat(follow_symlinks=False).st_size
                yield Chosen(path=Path(each.path), size=size, is_named=False)
        except OSError as error:
            yield error


def _inside(folder: Path | os.DirEntry[str]) -> list[os.DirEntry[str]]:
    """Return what is in a folder, the last name first; nothing of a store."""
    from pathlib import Path

    from smartcache.store.layout import Layout

    with os.scandir(folder) as entries:
        inside = sorted(entries, key=lambda entry: entry.name, reverse=True)
    layout = Layout(Path(folder))
    is_store = any(entry.name == layout.format.name for entry in inside) and layout.exists()
    return [] if is_store else inside
