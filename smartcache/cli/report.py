"""Reporting: `report`."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

import click

from smartcache.cli._artifacts import usage_documents
from smartcache.cli._command import FILE, age, command, same_options
from smartcache.cli._failures import BadUsageError
from smartcache.cli._folders import (
    FILES,
    MIN_SIZE,
    chooses_folders,
    existing,
    folder_document,
    in_quotes,
    warn_of,
)
from smartcache.cli._output import out, printable
from smartcache.cli._progress import bars
from smartcache.cli._session import Session
from smartcache.cli._tables import Column
from smartcache.cli._words import clock
from smartcache.sizes import parse_size

if TYPE_CHECKING:
    from pathlib import Path

    from smartcache.report.figures import Report
    from smartcache.report.text import Section
    from smartcache.report.unread import Unread
    from smartcache.store import Store

_STDOUT = "-"


@command(
    "report",
    examples=(
        ("smartcache report", "what sharing saves, by program, kind of file and repo"),
        ("smartcache report --html report.html --open", "as a page: a map of the disk, tables"),
        ("smartcache report --markdown > report.md", "for a wiki or an issue"),
        ("smartcache report --older-than 1y -q", "the files nobody has read for a year"),
        ("smartcache report --json", "all repos, integer bytes, full paths"),
    ),
)
@chooses_folders
@click.option(
    "--older-than", type=age, default="90d", metavar="AGE", show_default=True,
    help="Name the files that nobody has read for so long.",
)  # fmt: skip
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown.")
@click.option(
    "--html", type=FILE, metavar="FILE",
    help="Write one self-contained page with a map of the disk; - writes it to stdout.",
)  # fmt: skip
@click.option("--open", "to_open", is_flag=True, help="Open that page in the browser.")
@click.option("--force", is_flag=True, help="Let --html replace a file that is not a report.")
@click.pass_obj
def report_command(
    session: Session,
    *,
    folders: tuple[Path, ...],
    min_size: int,
    only: tuple[str, ...],
    older_than: timedelta,
    as_markdown: bool,
    html: Path | None,
    to_open: bool,
    force: bool,
) -> None:
    """Report what sharing saves, and what could still be freed.

    Looks at every file again, but reads none: what was never compared is counted, and 'smartcache
    scan' compares it. SAVED is the room that further names of a file do not take, DUPLICATE what
    'smartcache dedup' would free. --html writes a page with a map of the disk, and prints its path.
    With -q, prints the paths of files that nobody has read for long.
    """
    from smartcache.folders import folders_to_scan
    from smartcache.report.figures import make_report

    if as_markdown + (html is not None) + (out.mode != "human") > 1:
        forms = "--html, --markdown, --json and -q"
        raise BadUsageError(f"{forms} exclude each other", hint="Give one.")
    if html is None and (to_open or force):
        raise BadUsageError("--open and --force need --html", hint="Add --html FILE.")
    if str(html) == _STDOUT and to_open:
        raise BadUsageError("--open needs a file", hint="Write --html FILE in place of --html -.")
    given = existing(folders)
    if html is not None and str(html) != _STDOUT:
        from smartcache.report.html import check_target

        check_target(html, force=force)
    with session.store() as store:
        chosen, warnings = folders_to_scan(store, given, only)
        report = make_report(
            store, chosen, min_size=min_size, older_than=older_than, is_detailed=html is not None,
            progress=bars,
        )  # fmt: skip
        if html is not None:
            words = [f"--only={name}" for name in only]
            if min_size != parse_size(MIN_SIZE):
                words.append(f"--min-size={min_size}")
            page = _page(session, store, report, options=words, folders=[*map(str, given)])
    warn_of([*warnings, *report.warnings], report.problems)
    if html is not None:
        _write_page(page, html, to_open=to_open)
        return
    out.show(
        human=lambda: _show_markdown(report) if as_markdown else _show(report),
        document=lambda: _document(report, warnings),
        ids=lambda: (each.path for each in report.unread.files),
    )


def _page(
    session: Session, store: Store, report: Report, *, options: list[str], folders: list[str]
) -> str:
    from smartcache.report.html import document, look_beside, render

    # From wherever the command is pasted.
    home = ["--home", os.path.abspath(session.home)] if session.home else []
    data = document(
        report, look_beside(store, report), program=["smartcache", *home], options=options,
        folders=folders, clean=printable,
    )  # fmt: skip
    return render(data)


def _write_page(text: str, path: Path, *, to_open: bool) -> None:
    if str(path) == _STDOUT:
        out.document(text)
        return
    from smartcache.report.html import write

    written = write(text, path)
    out.line(str(written))
    if to_open:
        import webbrowser

        if not webbrowser.open(written.as_uri()):
            out.warn("No browser was found; open the file yourself")


def _show(report: Report) -> None:
    from smartcache.report.text import sections

    for number, section in enumerate(sections(report, dedup=_dedup())):
        if number:
            out.line()
        _show_section(section)


def _dedup() -> str:
    """Return the command that works on the folders of this report, to be pasted."""
    return in_quotes(same_options("dedup", click.get_current_context(), *FILES))


def _show_section(section: Section) -> None:
    out.heading(section.title)
    if section.rows:
        *numbers, label = section.columns
        columns = [Column(title=title, right=True) for title in numbers]
        out.table([*columns, Column(title=label, gives_way=True)], section.rows)
    for note in section.notes:
        out.paragraph(note)


def _show_markdown(report: Report) -> None:
    from smartcache.report.markdown import markdown
    from smartcache.report.text import sections

    title = f"Model files on this machine, {clock(report.at)}"
    for line in markdown(title, sections(report, dedup=_dedup()), clean=printable):
        out.line(line)


def _document(report: Report, warnings: list[str]) -> dict[str, object]:
    return {
        "at": report.at,
        "folders": [folder_document(folder) for folder in report.folders],
        "total": report.total,
        "programs": report.programs,
        "kinds": report.kinds,
        "repos": report.repos,
        "most_shared": report.most_shared,
        "across": report.across,
        "elsewhere": report.elsewhere,
        "left": report.left,
        "unread": _unread(report.unread),
        "artifact_sets": usage_documents(report.artifact_sets),
        "prunable": report.prunable,
        "min_size": report.min_size,
        "uncompared": report.uncompared,
        "problems": report.problems,
        "warnings": [*warnings, *report.warnings],
    }


def _unread(unread: Unread) -> dict[str, object]:
    return {
        "older_than": int(unread.older_than.total_seconds()),
        "files": unread.files,
        "allocated": unread.allocated,
        "unknown": [{"path": path, "reason": why} for path, why in unread.unknown.items()],
        "unknown_files": unread.unknown_files,
    }
