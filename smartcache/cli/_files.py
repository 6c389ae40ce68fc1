"""The files a user means by the words of a command line: files as they are, folders with `-r`."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from smartcache.cli._output import out
from smartcache.errors import StoreError
from smartcache.store.layout import Layout


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
                out.warn(f"{each.filename}: {each.strerror}")
            else:
                found.setdefault(each.path, each)
    return list(found.values()), unread


def _below(folder: Path) -> Iterator[Chosen | OSError]:
    """Go through the files below a folder in the order of their names."""
    try:
        with os.scandir(folder) as entries:
            inside = sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        yield error
        return
    if Layout(folder).exists():
        return
    for entry in inside:
        try:
            if entry.is_dir(follow_symlinks=False):
                yield from _below(Path(entry.path))
            elif entry.is_file(follow_symlinks=False):
                size = entry.stat(follow_symlinks=False).st_size
                yield Chosen(path=Path(entry.path), size=size, is_named=False)
        except OSError as error:
            yield error
