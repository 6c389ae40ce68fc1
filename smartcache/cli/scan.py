"""Finding duplicates: `scan`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

import click

from smartcache.cli._command import command, same_options
from smartcache.cli._failures import BadUsageError
from smartcache.cli._folders import (
    FILES,
    chooses_files,
    copy_rows,
    existing,
    group_document,
    heading,
    in_quotes,
    remembered,
    show_blocks,
    warn_of,
)
from smartcache.cli._json import picked
from smartcache.cli._output import out
from smartcache.cli._progress import bars
from smartcache.cli._session import Session
from smartcache.cli._words import counted
from smartcache.cli.prune import prunable, say_prunable
from smartcache.sizes import format_age, format_size

if TYPE_CHECKING:
    from pathlib import Path

    from smartcache.folders.groups import Group
    from smartcache.folders.scan import Figures, Scan

_GROUPS = 10
_DAMAGED = 3
"""So many damaged files are named."""
_FOLDERS = ("PROGRAM", "FILES>", "SIZE>", "ON DISK>", "SHARED>", "DUPLICATE>", "FOLDER~")


@command(
    "scan",
    examples=(
        ("smartcache scan", "the model folders of every program on this machine"),
        ("smartcache scan ~/ComfyUI /mnt/models", "these folders"),
        ("smartcache scan --program comfyui --program ollama", "two programs"),
        ("smartcache scan --quick", "a first look: sizes, beginnings and ends of files"),
        ("smartcache scan --json > duplicates.json", "every group with every path"),
    ),
)
@chooses_files
@click.option(
    "--quick", is_flag=True, help="Compare sizes, heads and tails only: likely, unproven."
)
@click.option(
    "--groups", type=click.IntRange(min=0), metavar="N",
    help=f"Show so many groups of duplicates.  [default: {_GROUPS}]",
)  # fmt: skip
@click.option("--all", "everything", is_flag=True, help="Show every group with every path.")
@click.pass_context
def scan_command(
    ctx: click.Context,
    *,
    folders: tuple[Path, ...],
    min_size: int,
    exclude: tuple[str, ...],
    any_file: bool,
    only: tuple[str, ...],
    quick: bool,
    groups: int | None,
    everything: bool,
) -> None:
    """Find model folders and the duplicates in them.

    Looks where programs keep their models, or in the folders named, and compares what it finds by
    content, each file once: links are never duplicates. Changes nothing; a second scan reads only
    what is new. SIZE is what the names add up to, ON DISK the blocks in use, SHARED what other
    folders have too, DUPLICATE what 'smartcache dedup' would free. With -q, prints the paths that
    it would replace.
    """
    from smartcache.folders.scan import folders_to_scan, scan_folders

    if everything and groups is not None:
        raise BadUsageError("--groups and --all exclude each other", hint="Leave one out.")
    session = ctx.ensure_object(Session)
    given = existing(folders)
    session.how_far = remembered
    with session.store(create=True) as store:
        chosen, warnings = folders_to_scan(store, given, only)
        warn_of(warnings, ())
        began = time.monotonic()
        found = scan_folders(
            store, chosen, min_size=min_size, exclude=exclude, any_file=any_file, is_quick=quick,
            progress=bars,
        )  # fmt: skip
        seconds = time.monotonic() - began
        warn_of((), found.problems)
        held = prunable(store)
        count = None if everything else _GROUPS if groups is None else groups
        out.show(
            human=lambda: _show(ctx, found, count, seconds) if chosen else _show_places(only),
            document=lambda: {**_document(found, warnings), "prunable": held},
            ids=lambda: _duplicates(found),
        )
        if out.mode == "human":
            say_prunable(held)


def _show_places(only: tuple[str, ...]) -> None:
    from smartcache.folders.discover import places
    from smartcache.report.naming import from_home

    whose = f"of {', '.join(only)} " if only else ""
    out.line(f"No model folder {whose}was found. Looked at:")
    rows = [[f"  {name}", from_home(path)] for name, path in places() if not only or name in only]
    out.table(("", "~"), rows)
    out.line("Name a folder to scan it: smartcache scan FOLDER")


def _show(ctx: click.Context, found: Scan, count: int | None, seconds: float) -> None:
    from smartcache.report.naming import Naming, left_words

    _say_what_was_read(found, seconds)
    out.table(_FOLDERS, _folder_rows(found))
    naming = Naming()
    groups = [each for each in _largest(found, count) if _matters(each)]
    if groups:
        is_likely = found.is_quick
        blocks = [
            (
                heading(each, len(each.copies), each.freeable, naming, is_likely=is_likely),
                list(copy_rows(each)),
            )
            for each in groups
        ]
        show_blocks(blocks, every_path=count is None, as_talk=False)
    out.line()
    more = found.groups - sum(group.freeable > 0 for group in groups)
    if more:
        out.line(f"... and {counted(more, 'smaller group')}; --all shows them")
    if found.elsewhere:
        size = format_size(found.elsewhere)
        out.line(f"{size} more are copies on other filesystems, which links cannot free.")
    if found.busy:
        out.line(f"{counted(len(found.busy), 'file')} left out: somebody is writing there.")
    if found.unfinished:
        out.line(f"{counted(found.unfinished, 'unfinished download')} left out.")
    # Not wrapped: it can be pasted.
    out.line(_conclusion(found, in_quotes(same_options("dedup", ctx, *FILES))))
    for text in left_words(found.left):
        out.paragraph(text)
    if found.damaged:
        shown = ", ".join(f"{each.path.name} {each.reason}" for each in found.damaged[:_DAMAGED])
        others = f" and {len(found.damaged) - _DAMAGED:,} more" if found.damaged[_DAMAGED:] else ""
        out.paragraph(f"Damaged: {shown}{others}. Download again to repair.")


def _matters(group: Group) -> bool:
    return bool(group.freeable or group.elsewhere or any(each.size for each in group.skipped))


def _largest(found: Scan, count: int | None) -> Iterable[Group]:
    """Return groups, the most to free first."""
    if count is not None:
        return found.largest(count)
    return sorted(found.largest(), key=lambda each: (-each.freeable, -each.elsewhere))


def _say_what_was_read(found: Scan, seconds: float) -> None:
    files = counted(found.total.files, "file")
    folders = counted(len(found.folders), "folder")
    empty = sum(not each.logical for each in found.folders)
    folders += f" ({empty} empty)" if empty and empty < len(found.folders) else ""
    read = format_size(found.hashed) if found.hashed else "nothing"
    took = format_age(timedelta(seconds=seconds)) if seconds >= 1 else "less than a second"
    out.talk(f"{files} in {folders}; read {read}, in {took}.")


def _folder_rows(found: Scan) -> Iterator[list[str]]:
    from smartcache.report.naming import from_home

    rows = [each for each in found.folders if each.logical] or list(found.folders)
    for each in [*rows, *([found.total] if len(rows) > 1 else [])]:
        yield [
            "TOTAL" if each.folder is None else each.folder.program or "-",
            f"{each.files:,}",
            format_size(each.logical),
            format_size(each.physical),
            format_size(each.shared),
            format_size(each.freeable),
            "" if each.folder is None else from_home(each.folder.path),
        ]


def _conclusion(found: Scan, dedup: str) -> str:
    """Return the last line: what it would bring to go on."""
    if not found.freeable:
        is_alone = not (found.elsewhere or found.left)
        why = "No file is here twice." if is_alone else "Links could free nothing here."
        return f"{why} This scan has changed nothing."
    size, groups = format_size(found.freeable), counted(found.groups, "group")
    if found.is_quick:
        these = "this group is" if found.groups == 1 else f"these {groups} are"
        return f"{dedup} would free about {size}, if {these} proven equal."
    return f"{dedup} would free {size} ({groups}). This scan has changed nothing."


def _duplicates(found: Scan) -> Iterator[Path]:
    from smartcache.report.roles import roles

    for group in _largest(found, None):
        for copy, role in roles(group):
            if role == "duplicate":
                yield from (name.path for name in copy.names)


def _document(found: Scan, warnings: list[str]) -> dict[str, object]:
    from smartcache.report.naming import Naming

    naming = Naming()
    return {
        "folders": [_figures(each) for each in found.folders],
        "total": _figures(found.total),
        "groups": [
            group_document(each, naming, is_likely=found.is_quick) for each in _largest(found, None)
        ],
        **picked(found, "freeable elsewhere editable left min_size is_quick hashed busy"),
        **picked(found, "unfinished damaged problems"),
        "warnings": warnings,
    }


def _figures(each: Figures) -> dict[str, object]:
    figures = picked(each, "files logical physical shared freeable")
    return figures if each.folder is None else {**picked(each.folder), **figures}
