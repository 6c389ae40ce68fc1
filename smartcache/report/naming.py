"""What people call things: a model by its title, its repo or its file, a folder from their home."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from smartcache.folders.checks import Option, Skip
from smartcache.folders.groups import Group, Left
from smartcache.folders.programs import ModelFolder
from smartcache.report.names import Namer
from smartcache.report.titles import title_of
from smartcache.sizes import format_size

_OURS = "smartcache"
"""What scans call the store, whose blobs have no names of their own."""
_HASH = re.compile(r"(sha256-)?[0-9a-f]{32,}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of a content: the title in its own header, and what programs call it."""

    title: str = ""
    name: str = ""
    file: str = ""

    def __str__(self) -> str:
        """Return the most telling words; never empty if there is a file."""
        parts = [self.title, self.name or self.file]
        if self.title and self.title.casefold() in parts[1].casefold():
            parts = parts[1:]
        return " · ".join(filter(None, parts))


class Naming:
    """Names groups of copies, remembering what one run has learnt of each folder."""

    def __init__(self) -> None:
        self._namer = Namer()

    def of(self, group: Group) -> Known:
        """Return what is known of a group; reads the header of one copy."""
        names = [(name.path, name.folder) for copy in group.copies for name in copy.names]
        outside = [each for each in names if each[1].program != _OURS]
        return self.of_names(outside or names)

    def of_names(self, names: Sequence[tuple[Path, ModelFolder]]) -> Known:
        """Return what is known of one content, given by its paths and the folders they are in."""
        called = (self._namer.name(path, folder) for path, folder in names)
        files = [path.name for path, _ in names]
        return Known(
            title=title_of(names[0][0]),
            name=next(filter(None, called), ""),
            file=next((file for file in files if not is_hash(file)), files[0]),
        )

    def repo_of(self, path: Path, folder: ModelFolder) -> str:
        """Return the repo or model a file belongs to; empty if none is known."""
        return self._namer.repo_of(path, folder)


def is_hash(name: str) -> bool:
    """Say whether the name of a file is a hash, which tells nobody anything."""
    return _HASH.fullmatch(name) is not None


def from_home(path: Path) -> str:
    """Return a path as people write it: `~/models` for what lies in their home."""
    try:
        home = Path.home()
    except RuntimeError:  # nobody's home
        return str(path)
    for each in {home, home.resolve()}:
        if path.is_relative_to(each):
            below = path.relative_to(each)
            return f"~/{below}" if below.parts else "~"
    return str(path)


_DIFFERENCES: dict[Option, tuple[str, str]] = {
    "any-file": ("is of a kind", "are of a kind"),
    "group": ("differs in group", "differ in group"),
    "mode": ("differs in permissions", "differ in permissions"),
    "xattr": ("has extended attributes", "have extended attributes"),
}


def left_words(left: Iterable[Left]) -> Iterator[str]:
    """Say what `dedup` leaves alone: first what options would include, then what none does."""
    for each in sorted(left, key=lambda each: not each.options):
        files = "1 file" if each.files == 1 else f"{each.files:,} files"
        size = format_size(each.size)
        if not each.options:
            yield f"{size} stays as it is ({files}: {each.reason})."
            continue
        words = [_DIFFERENCES[option][each.files != 1] for option in each.options]
        if "any-file" in each.options:
            words[0] += " that programs edit in place"
        yield f"{size} more with {option_words(each.options)} ({files} {' or '.join(words)})."


def left_options(left: Iterable[Left | Skip]) -> list[str]:
    """Return the words with which `dedup` would include what options can include."""
    options: set[Option] = set()
    for each in left:
        options.update(each.options if isinstance(each, Left) else filter(None, [each.option]))
    return option_words(sorted(options)).split()


def option_words(options: Iterable[Option]) -> str:
    """Return options as they are typed."""
    return " ".join("--any-file" if each == "any-file" else f"--allow {each}" for each in options)
