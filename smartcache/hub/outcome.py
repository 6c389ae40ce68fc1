"""What was done to files, so that it is said: links, lost permission to write, and the way back.

Everything that a download, an import or a library's loading changes about files goes through the
journal. `Watch` has the batch that it all belongs to, so that what is said is what was done, and
its id is the one that undo knows.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from smartcache.sizes import format_size
from smartcache.store.journal import Batch
from smartcache.store.records import KnownFolder
from smartcache.store.store import Store

HUGGING_FACE = "Hugging Face"
"""The program whose known folders are HF caches."""
_READ = stat.S_IRGRP | stat.S_IROTH
_WRITE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
_MOST_NAMED = 3
_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChanges:
    """What became of files, by path."""

    linked: tuple[Path, ...] = ()
    """They share their bytes with the store: new names, or files that had bytes of their own."""
    copied: tuple[Path, ...] = ()
    """New files with bytes of their own, taken from this machine."""
    read_only: tuple[Path, ...] = ()
    """Files that were there before and cannot be written to any more."""
    new_read_only: tuple[Path, ...] = ()
    """Files that have just come and cannot be written to, because others may share them."""
    narrow: tuple[Path, ...] = ()
    """New links that fewer users can read than their folder: the shared file is as it was."""
    freed_size: int = 0
    undo_ids: tuple[str, ...] = ()

    def sentence(self, folders: Iterable[KnownFolder] = ()) -> str:
        """Say it for people; "" if nothing was done. `folders` tell whose files they are."""
        parts: list[str] = []
        if self.linked:
            gain = f", which freed {format_size(self.freed_size)}" if self.freed_size else ""
            parts.append(f"{_files(self.linked, 'was', 'were')} linked{gain}")
        if self.copied:
            parts.append(f"{_files(self.copied, 'was', 'were')} copied")
        known = sorted(folders, key=lambda each: -len(each.path.parts))
        groups: dict[str, list[Path]] = {}
        for path in self.read_only:
            groups.setdefault(_program_of(path, known), []).append(path)
        for program, paths in groups.items():
            whose = f"of {program} " if program else ""
            found = _files(paths, f"{whose}is", f"{whose}are")
            parts.append(f"{found} now read-only: {_named(paths)}")
        if self.new_read_only:
            new = _files(self.new_read_only, "is", "are").replace(" ", " new ", 1)
            parts.append(f"{new} read-only, so that programs can share the bytes")
        if self.narrow:
            private = "the bytes come from a file that they cannot read either"
            parts.append(f"other users cannot read {_named(self.narrow)}: {private}")
        text = "; ".join(parts)
        return f"{text[0].upper()}{text[1:]}." if parts else ""

    @property
    def way_back(self) -> str:
        """How to undo it, in words; "" if there is nothing to undo."""
        command = f"smartcache undo {' '.join(self.undo_ids)}"
        return f"Take it back with '{command}'." if self.undo_ids else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadResult(FileChanges):
    """What a download has made, and what it did to files on the way."""

    path: str
    """The snapshot, the `local_dir` or the one file."""
    fetched_size: int = 0
    """Bytes that came from the Hub."""
    taken_size: int = 0
    """Bytes that came from tiers."""
    reused_size: int = 0
    """Bytes of wanted files that this machine had elsewhere."""

    def __fspath__(self) -> str:
        """Return `path`: the result can be given to whatever takes one."""
        return self.path


def _files(paths: Sequence[Path], is_word: str, are_word: str) -> str:
    return f"1 file {is_word}" if len(paths) == 1 else f"{len(paths):,} files {are_word}"


def _named(paths: Iterable[Path]) -> str:
    names = [str(path) for path in paths]
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more:,} more" if more > 0 else "")


def _program_of(path: Path, folders: list[KnownFolder]) -> str:
    return next((each.program for each in folders if path.is_relative_to(each.path)), "")


def log_changes(repo: object, changes: FileChanges, store: Store) -> None:
    """Say what was done where no command does: a warning if files of other programs are concerned.

    What lies in HF caches is there to be shared: that is no warning.
    """
    folders = store.folders() if changes.undo_ids else []
    text = changes.sentence(folders)
    if text:
        known = sorted(folders, key=lambda each: -len(each.path.parts))
        is_others = any(_program_of(each, known) != HUGGING_FACE for each in changes.read_only)
        level = logging.WARNING if is_others else logging.INFO
        _log.log(level, "%s: %s %s", repo, text, changes.way_back)


class Watch:
    """Knows what is done to files in its batches. `is_new`: a file was not there before."""

    def __init__(self, is_new: Callable[[Path], bool]) -> None:
        self._is_new = is_new
        self._batches: list[Batch] = []
        self._copies: list[Path] = []
        self.batch: Batch | None = None
        """The one that is open: changes of all threads belong to it."""
        self._gate = threading.Lock()
        self.fetched_size = 0
        self.taken_size = 0

    @contextmanager
    def batch_of(self, store: Store, label: str) -> Iterator[None]:
        """Let what is changed in this block be one entry of the history."""
        with store.batch(label) as batch:
            self._batches.append(batch)
            self.batch = batch
            try:
                yield
            finally:
                self.batch = None

    def count(self, size: int) -> None:
        """Take note of bytes that came from the Hub."""
        with self._gate:
            self.fetched_size += size

    def count_taken(self, size: int) -> None:
        """Take note of bytes that came from a tier."""
        with self._gate:
            self.taken_size += size

    def copied(self, path: Path) -> None:
        """Take note of a copy, which needs no undo."""
        with self._gate:
            self._copies.append(path)

    def changes(self) -> FileChanges:
        """Return what was done to files, and they are still there."""
        linked, read_only, new, narrow, undo_ids = [], [], [], [], []
        changes = ((batch, each) for batch in self._batches for each in batch.changes)
        for batch, each in changes:
            if each.how == "copy" or not os.path.lexists(each.path):
                continue
            undo_ids.append(batch.id)
            is_placed = each.how in ("create", "give")
            if each.how != "become":
                linked.append(each.path)
            if is_placed or self._is_new(each.path):
                new.append(each.path)
            elif each.mode & _WRITE:
                read_only.append(each.path)
            if is_placed and _is_narrow(each.path):
                narrow.append(each.path)
        return FileChanges(
            linked=_unique(linked), copied=_unique(self._copies), read_only=_unique(read_only),
            new_read_only=_unique(new), narrow=_unique(narrow),
            freed_size=sum(each.freed for each in self._batches),
            undo_ids=_unique(undo_ids),
        )  # fmt: skip


def _unique(each: list[T]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(each))


def _is_narrow(path: Path) -> bool:
    """Say whether users who see a folder cannot read a file in it."""
    try:
        folder, file = os.stat(path.parent).st_mode, os.stat(path).st_mode
    except OSError:  # removed meanwhile
        return False
    return bool(folder & _READ & ~file)
