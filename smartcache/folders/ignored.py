"""What the user wants left alone for good: folders and patterns, one per line of a small file.

It lies beside the config file, not in the index, which can be lost: a folder that was to be left
alone must not be touched because of that. `walk` passes over what matches, so nobody above it sees
such a file: no scan, no `dedup`, no report and no download.

A pattern matches a path, or the last part of one, or a directory above it; `*` matches any bytes.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterable
from pathlib import Path

from smartcache.config import ignore_file
from smartcache.errors import ConfigError, StoreError

_SPECIAL = re.compile(r"([*?\[])")


class Ignored:
    """The patterns in force, and whether a path matches one."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self.patterns = tuple(patterns)
        forms = [form for each in self.patterns for form in (each, f"*/{each}")]
        joined = "|".join(fnmatch.translate(form.rstrip("/") or form) for form in forms)
        self._expression = re.compile(os.fsencode(joined)) if joined else None

    def matches(self, path: bytes) -> bool:
        """Say whether a path itself is to be passed over."""
        return self._expression is not None and self._expression.match(path) is not None

    def covers(self, path: Path) -> bool:
        """Say whether a path is to be passed over, or lies in a folder that is."""
        return any(self.matches(os.fsencode(each)) for each in (path, *path.parents))


def ignored() -> Ignored:
    """Return what is to be left alone now."""
    try:
        text = os.fsdecode(ignore_file().read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return Ignored(())
    except OSError as error:
        # Never as if it were empty: what is to be left alone would not be.
        raise ConfigError(f"{ignore_file()}: cannot be read: {error.strerror}") from error
    return Ignored(line for line in text.split("\n") if line and not line.startswith("#"))


def ignore(words: Iterable[str], *, remove: bool = False) -> list[str]:
    """Leave folders and patterns alone from now on, or not any more; return the patterns."""
    patterns = [_pattern(word, is_known=remove) for word in words]
    before = ignored().patterns
    if remove and (unknown := [each for each in patterns if each not in before]):
        raise StoreError(
            f"{unknown[0]} is not ignored", hint="'smartcache folders ls' shows what is."
        )
    kept = [each for each in before if not (remove and each in patterns)]
    after = dict.fromkeys([*kept, *(() if remove else patterns)])
    file = ignore_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.tmp")
    temporary.write_bytes(os.fsencode("".join(f"{each}\n" for each in after)))
    temporary.replace(file)
    return patterns


def _pattern(word: str, *, is_known: bool) -> str:
    """Return the pattern for a word: of a path that exists the whole one, literally."""
    if "\n" in word:
        raise StoreError("A path with a line break cannot be ignored", hint="Ignore its folder.")
    if os.path.lexists(word):
        return _SPECIAL.sub(r"[\1]", os.path.realpath(word))
    if "/" in word and not _SPECIAL.search(word) and not is_known:
        raise StoreError(
            f"{word} does not exist", hint="Name a folder, or a pattern such as '*.ckpt'."
        )
    return word
