"""Reporting: `report`."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import click

from smartcache.cli._command import age, command
from smartcache.cli._failures import BadUsageError
from smartcache.cli._folders import chooses_folders, existing, folder_document, warn_of
from smartcache.cli._holders import part_document
from smartcache.cli._output import out, printable
from smartcache.cli._progress import bars
from smartcache.cli._session import Session
from smartcache.cli._tables import Column
from smartcache.cli._words import clock
from smartcache.folders.scan import folders_to_scan
from smartcache.report.figures import Report, make_report
from smartcache.report.markdown import markdown
from smartcache.report.text import Section, sections
from smartcache.report.unread import Unread


@command(
    "report",
    examples=(
        ("smartcache report", "what sharing saves, by program, kind of file and repo"),
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
@click.pass_obj
def report_command(
    session: Session,
    *,
    folders: tuple[Path, ...],
    min_size: int,
    only: tuple[str, ...],
    older_than: timedelta,
    as_markdown: bool,
) -> None:
    """Report what sharing saves, and what could still be freed.

    Looks at every file again, but reads none: what was never compared is counted, and 'smartcache
    scan' compares it. SAVED is the room that further names of a file do not take, DUPLICATE what
    'smartcache dedup' would free. With -q, prints the paths of files that nobody has read for long.
    """
    if as_markdown and out.mode != "human":
        raise BadUsageError("--markdown, --json and -q exclude each other", hint="Give one.")
    given = existing(folders)
    with session.store() as store:
        chosen, warnings = folders_to_scan(store, given, only)
        report = make_report(store, chosen, min_size=min_size, older_than=older_than, progress=bars)
    warn_of([*warnings, *report.warnings], report.problems)
    out.show(
        human=lambda: _show_markdown(report) if as_markdown else _show(report),
        document=lambda: _document(report, warnings),
        ids=lambda: (each.path for each in report.unread.files),
    )


def _show(report: Report) -> None:
    for number, section in enumerate(sections(report)):
        if number:
            out.line()
        _show_section(section)


def _show_section(section: Section) -> None:
    out.heading(section.title)
    if section.rows:
        *numbers, label = section.columns
        columns = [Column(title=title, right=True) for title in numbers]
        out.table([*columns, Column(title=label, gives_way=True)], section.rows)
    for note in section.notes:
        out.paragraph(note)


def _show_markdown(report: Report) -> None:
    title = f"Model files on this machine, {clock(report.at)}"
    for line in markdown(title, sections(report), clean=printable):
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
        "artifact_sets": [part_document(part) for part in report.artifact_sets],
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
