"""What `scan`, `dedup`, `report` and `folders` share: their options, and how groups are shown."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

import click

from smartcache.cli._command import FILE, size
from smartcache.cli._failures import BadValueError
from smartcache.cli._json import picked
from smartcache.cli._output import out
from smartcache.cli._tables import text_width
from smartcache.cli._words import counted
from smartcache.errors import StoreError
from smartcache.sizes import format_size

if TYPE_CHECKING:
    from pathlib import Path

    from smartcache.folders.checks import Copy
    from smartcache.folders.groups import Group
    from smartcache.folders.walk import Problem
    from smartcache.report.naming import Naming
    from smartcache.report.roles import Role

_F = TypeVar("_F", bound=Callable[..., object])
MIN_SIZE = "1MiB"
_TIMES = "\N{MULTIPLICATION SIGN}"
_MOST_NAMED = 5
_MOST_PATHS = 10
_COPIES = ("!", "", "~")
"""Role, program (left out if none has one), path."""


def program(text: str) -> str:
    """Read the value of an option that names a program, however it is written."""
    from smartcache.folders.programs import PROGRAMS

    known = {_letters(each): each for each in PROGRAMS}
    if _letters(text) not in known:
        raise BadValueError(
            f"no program is called {text!r}", hint=f"The programs are {', '.join(PROGRAMS)}."
        )
    return known[_letters(text)]


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text.casefold()))


def chooses_files(function: _F) -> _F:
    """Add the folders to look at, and the options that leave files out."""
    for add in (
        click.option(
            "--any-file", is_flag=True,
            help="Count files of every kind, also those that programs edit in place (databases, "
            "logs, texts).",
        ),
        click.option(
            "--exclude", multiple=True, metavar="GLOB",
            help="Leave out files and folders whose name or path matches. Repeatable.",
        ),
        chooses_folders,
    ):  # fmt: skip
        function = add(function)
    return function


def chooses_folders(function: _F) -> _F:
    """Add the folders to look at, and the least size that matters."""
    for add in (
        click.option(
            "--program", "only", type=program, multiple=True, metavar="PROGRAM",
            help="Only the folders of this program. Repeatable.",
        ),
        click.option(
            "--min-size", type=size, default=MIN_SIZE, metavar="SIZE", show_default=True,
            help="Leave smaller files out of comparisons.",
        ),
        click.argument("folders", metavar="[FOLDER]...", nargs=-1, type=FILE),
    ):  # fmt: skip
        function = add(function)
    return function


def existing(words: tuple[Path, ...]) -> list[Path]:
    """Return the folders a user means; one that does not exist is an error before anything."""
    from pathlib import Path

    for word in words:
        os.stat(word)
        if not word.is_dir():
            raise StoreError(f"{word} is not a folder", hint="Name the folder it is in.")
    return [Path(os.path.abspath(word)) for word in words]


FILES = ("folders", "only", "min_size", "exclude", "any_file")
"""The parameters that say which files are meant; `same_options` hands them on."""


def in_quotes(line: str) -> str:
    """Return a command line for a sentence: in quotes that it does not have itself."""
    return f"`{line}`" if "'" in line else f"'{line}'"


def remembered() -> str:
    """Say, when a scan is interrupted, that it was not in vain."""
    return "What was read is remembered: the next scan goes on from there."


def warn_of(warnings: Iterable[str], problems: tuple[Problem, ...]) -> None:
    """Say what was strange and what could not be looked at; the first of many, and their number."""
    from smartcache.report.naming import from_home

    for text in dict.fromkeys(warnings):
        out.warn(text)
    for problem in problems[:_MOST_NAMED]:
        out.warn(f"{from_home(problem.path)}: {problem.reason}")
    if problems:
        places = counted(len(problems), "place")
        out.warn(f"{places} could not be looked at; figures are without what is there")


Block = tuple[str, list[list[str]]]
"""A group as it is shown: a heading, and of each path its role, its program and itself."""


def heading(
    group: Group, copies: int, freeable: int, naming: Naming, *, is_likely: bool = False
) -> str:
    """Return the line above the paths of a group, or of those of its copies that matter."""
    likely = "likely " if is_likely else ""
    gain = f", {likely}{format_size(freeable)} to free" if freeable else ""
    return f"{format_size(group.size)} {_TIMES} {copies}{gain}: {naming.of(group)}"


def show_blocks(blocks: list[Block], *, every_path: bool, as_talk: bool) -> None:
    """Show groups of copies, a blank line before each, the columns of all in line."""
    widths = [
        max((text_width(row[column]) for _, rows in blocks for row in rows), default=0)
        for column in (0, 1)
    ]
    for head, rows in blocks:
        out.line(as_talk=as_talk)
        out.heading(head, as_talk=as_talk)
        shown = rows if every_path or len(rows) <= _MOST_PATHS else rows[: _MOST_PATHS - 1]
        padded = [[f"  {row[0]:{widths[0]}}", f"{row[1]:{widths[1]}}", row[2]] for row in shown]
        if not widths[1]:
            out.table(_COPIES[::2], (row[::2] for row in padded), as_talk=as_talk)
        else:
            out.table(_COPIES, padded, as_talk=as_talk)
        if len(rows) > len(shown):
            out.line(f"  ... and {len(rows) - len(shown):,} more", as_talk=as_talk)


def copy_rows(group: Group) -> Iterator[list[str]]:
    """Go through the paths of a group with their roles, the one that stays first."""
    from smartcache.report.naming import from_home
    from smartcache.report.roles import roles

    for copy, role in roles(group):
        for number, name in enumerate(copy.names):
            word = "same file" if number and role != "duplicate" else role
            yield [word, name.folder.program, from_home(name.path)]


def group_document(group: Group, naming: Naming, *, is_likely: bool = False) -> dict[str, object]:
    """Return everything known of a group, for programs."""
    from smartcache.report.roles import roles

    known = naming.of(group)
    return {
        "digest": None if is_likely else group.digest,
        "name": known.name,
        "title": known.title,
        **picked(group, "size freeable elsewhere"),
        "copies": [_copy_document(group, copy, role) for copy, role in roles(group)],
    }


def _copy_document(group: Group, copy: Copy, role: Role) -> dict[str, object]:
    skips = (each for each in group.skipped if each.path == copy.path)
    return {
        "role": role,
        "reason": next((each.reason for each in skips), None),
        **picked(
            copy, "filesystem inode links outside_names allocated mtime_ns is_blob shares_with"
        ),
        "names": [
            {"path": name.path, "folder": name.folder.path, "program": name.folder.program}
            for name in copy.names
        ],
    }
