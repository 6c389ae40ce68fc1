"""Reporting: `report`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from smartcache.cli._artifacts import usage_documents
from smartcache.cli._command import FILE, command, same_options
from smartcache.cli._failures import BadUsageError
from smartcache.cli._folders import FILES, MIN_SIZE, chooses_folders, existing, in_quotes, warn_of
from smartcache.cli._json import picked
from smartcache.cli._output import out, printable
from smartcache.cli._progress import bars
from smartcache.cli._session import Session
from smartcache.sizes import parse_size

if TYPE_CHECKING:
    from pathlib import Path

    from smartcache.report.figures import Report
    from smartcache.report.text import Section
    from smartcache.store.store import Store

_STDOUT = "-"


@command(
    "report",
    examples=(
        ("smartcache report", "what sharing saves, by program, kind of file and repo"),
        ("smartcache report --html report.html", "as a page: a map of the disk, tables"),
        ("smartcache report --json", "all repos, integer bytes, full paths"),
    ),
)
@chooses_folders
@click.option(
    "--html", type=FILE, metavar="FILE",
    help="Write one self-contained page with a map of the disk; - writes it to stdout.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Let --html replace a file that is not a report.")
@click.pass_obj
def report_command(
    session: Session,
    *,
    folders: tuple[Path, ...],
    min_size: int,
    only: tuple[str, ...],
    html: Path | None,
    force: bool,
) -> None:
    """Report what sharing saves, and what could still be freed.

    Looks at every file again, but reads none: what was never compared is counted, and 'smartcache
    scan' compares it. SAVED is the room that further names of a file do not take, DUPLICATE what
    'smartcache dedup' would free. --html writes a page with a map of the disk, and prints its path.
    With -q, prints the folders it looked at.
    """
    from smartcache.folders.scan import folders_to_scan
    from smartcache.report.figures import make_report

    if html is not None and out.mode != "human":
        raise BadUsageError("--html, --json and -q exclude each other", hint="Give one.")
    if html is None and force:
        raise BadUsageError("--force needs --html", hint="Add --html FILE.")
    given = existing(folders)
    if html is not None and str(html) != _STDOUT:
        from smartcache.report.html import check_target

        check_target(html, force=force)
    with session.store(only_look=True) as store:
        chosen, warnings = folders_to_scan(store, given, only)
        report = make_report(
            store, chosen, min_size=min_size, is_detailed=html is not None, progress=bars
        )
        if html is not None:
            words = [f"--program={name}" for name in only]
            if min_size != parse_size(MIN_SIZE):
                words.append(f"--min-size={min_size}")
            page = _page(session, store, report, options=words, folders=[*map(str, given)])
    warn_of(warnings, report.problems)
    if html is not None:
        _write_page(page, html)
        return
    out.show(
        human=lambda: _show(report),
        document=lambda: _document(report, warnings),
        ids=lambda: (folder.path for folder in report.folders),
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


def _write_page(text: str, path: Path) -> None:
    if str(path) == _STDOUT:
        out.document(text)
        return
    from smartcache.report.html import write

    out.line(str(write(text, path)))


def _show(report: Report) -> None:
    from smartcache.report.naming import left_options
    from smartcache.report.text import sections

    allowed = left_options(report.left)
    dedup, allowing = _dedup(), _dedup(allowed) if allowed else ""
    for number, section in enumerate(sections(report, dedup=dedup, allowing=allowing)):
        if number:
            out.line()
        _show_section(section, commands=(dedup, allowing))


def _dedup(options: Sequence[str] = ()) -> str:
    """Return the command that works on the folders of this report, to be pasted."""
    return in_quotes(same_options("dedup", click.get_current_context(), *FILES, more=options))


def _show_section(section: Section, *, commands: Sequence[str]) -> None:
    out.heading(section.title)
    if section.rows:
        *numbers, label = section.columns
        titles = [*(f"{title}>" for title in numbers), f"{label}~"]
        out.table(titles, section.rows)
    for note in section.notes:
        # Not wrapped: it can be pasted.
        is_command = any(command in note for command in filter(None, commands))
        (out.line if is_command else out.paragraph)(note)


def _document(report: Report, warnings: list[str]) -> dict[str, object]:
    return {
        **picked(report, "at folders total programs kinds repos most_shared across elsewhere"),
        "left": report.left,
        "artifact_sets": usage_documents(report.artifact_sets),
        **picked(report, "prunable disks min_size uncompared damaged problems"),
        "warnings": warnings,
    }
