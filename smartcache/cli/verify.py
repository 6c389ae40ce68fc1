"""Comparing the index with the disk: `verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from smartcache.cli._artifacts import damaged_sets, report_documents, say_damage
from smartcache.cli._command import asks, command
from smartcache.cli._failures import DAMAGED, BadUsageError
from smartcache.cli._json import picked
from smartcache.cli._output import out
from smartcache.cli._progress import bars
from smartcache.cli._session import Session
from smartcache.cli._words import counted, short
from smartcache.sizes import format_size

if TYPE_CHECKING:
    from pathlib import Path

    from smartcache.artifacts import SetVerifyReport
    from smartcache.store.store import Store
    from smartcache.store.upkeep.verify import VerifyReport

_MOST_SHOWN = 10


@command(
    "verify",
    examples=(
        ("smartcache verify", "seconds: sizes, times and modes; hashes only what looks odd"),
        ("smartcache verify --full", "hashes every blob again"),
        ("smartcache verify --full --repair", "brings damaged blobs back from other copies"),
        ("smartcache verify --rebuild", "the index is lost or damaged: rebuild it from the blobs"),
    ),
)
@click.option("--full", is_flag=True, help="Hash every blob again.")
@click.option("--repair", is_flag=True, help="Repair from links outside and other volumes.")
@click.option("--rebuild", is_flag=True, help="Rebuild the index from what is on the disk.")
@asks
@click.pass_context
def verify_command(
    ctx: click.Context, *, full: bool, repair: bool, rebuild: bool, dry_run: bool, yes: bool
) -> None:
    """Compare the index with the disk.

    Damaged blobs go to bad/ and are named; their files outside the store stay as they are. Exits
    with 3 if something is damaged or missing that was not healed. Only --rebuild asks first.
    For artifact sets, the footers and sizes of packs are checked; with --full, every artifact.
    """
    from smartcache.cache import sets_in

    session = ctx.ensure_object(Session)
    if dry_run and not rebuild:
        raise BadUsageError(
            "--dry-run is for --rebuild",
            hint="Verify moves damaged blobs to bad/, and leaves your files alone.",
        )
    rebuilt: int | None = None
    if rebuild and session.has_store():
        rebuilt = _rebuild(session, dry_run=dry_run, yes=yes)
    reports: list[tuple[Store, VerifyReport]] = []
    of_sets: list[SetVerifyReport] = []
    if not dry_run:
        with session.stores() as stores:
            for store in stores:
                report = store.verify(full=full, repair=repair, progress=bars)
                reports.append((store, report))
            sets = sets_in(stores[0]) if stores else None
            if sets is not None:
                of_sets = sets.verify(full=full, progress=bars)
    _show(reports, of_sets, rebuilt, repair=repair, dry_run=dry_run)
    if _has_damage(reports, of_sets):
        ctx.exit(DAMAGED)


def _has_damage(reports: list[tuple[Store, VerifyReport]], of_sets: list[SetVerifyReport]) -> bool:
    return any(report.has_damage for _, report in reports) or bool(damaged_sets(of_sets))


def _rebuild(session: Session, *, dry_run: bool, yes: bool) -> int:
    """Make the index anew, even if it is no SQLite file any more; return how many blobs it has."""
    from smartcache.store.upkeep.verify import rebuild, replace_damaged_index

    root = session.settings.home
    if dry_run:
        return _count_blobs(root)
    question = "Rebuild the index? Owners may be missing from it: prune will refuse until a scan."
    out.confirm(question, yes=yes)
    session.opened_root = root
    volume = replace_damaged_index(root, session.settings, on_wait=out.wait)
    volume.on_wait = out.wait
    try:
        return rebuild(volume, progress=bars)
    finally:
        volume.close()


def _count_blobs(root: Path) -> int:
    from smartcache.store.volume import Layout

    return sum(1 for _ in Layout(root).blobs.glob("??/*"))


def _show(
    reports: list[tuple[Store, VerifyReport]],
    of_sets: list[SetVerifyReport],
    rebuilt: int | None,
    *,
    repair: bool,
    dry_run: bool,
) -> None:
    out.show(
        human=lambda: _say(reports, of_sets, rebuilt, repair=repair, dry_run=dry_run),
        document=lambda: {
            "dry_run": dry_run,
            "rebuilt": rebuilt,
            "has_damage": _has_damage(reports, of_sets),
            "stores": [_document(store, report) for store, report in reports],
            "artifact_sets": report_documents(of_sets),
        },
        ids=lambda: [
            *(digest for _, report in reports for digest in (*report.damaged, *report.missing)),
            *damaged_sets(of_sets),
        ],
    )


def _document(store: Store, report: VerifyReport) -> dict[str, object]:
    return {
        "root": store.root,
        **picked(report, "is_full has_damage blobs hashed_size damaged missing unindexed stray"),
        **picked(report, "writable dead_links healed"),
    }


def _say(
    reports: list[tuple[Store, VerifyReport]],
    of_sets: list[SetVerifyReport],
    rebuilt: int | None,
    *,
    repair: bool,
    dry_run: bool,
) -> None:
    if rebuilt is not None:
        verb = "Would make" if dry_run else "Made"
        out.line(f"{verb} the index again from {counted(rebuilt, 'blob')}.")
    for store, report in reports:
        where = f" in {store.root}" if len(reports) > 1 else ""
        hashed = f", {format_size(report.hashed_size)} hashed" if report.hashed_size else ""
        out.line(f"Checked {counted(report.blobs, 'blob')}{where}{hashed}.")
        _say_differences(report)
        if report.has_damage:
            advice = "Get the files again" if repair else "Try 'smartcache verify --repair'"
            out.talk(f"Damage was found. {advice}: what was known about the blobs is kept.")
        elif not (report.healed or report.dead_links or report.unindexed or report.stray):
            out.line("No damage was found.")
    if of_sets:
        artifacts = counted(sum(each.artifacts for each in of_sets), "artifact")
        size = sum(each.read_size for each in of_sets)
        read = f", {format_size(size)} read" if size else ""
        out.line(f"Checked {artifacts} of {counted(len(of_sets), 'set')}{read}.")
        say_damage(of_sets)


def _say_differences(report: VerifyReport) -> None:
    _name("damaged, moved to bad/", [short(digest) for digest in report.damaged])
    _name("missing", [short(digest) for digest in report.missing])
    _name("healed", [short(digest) for digest in report.healed])
    _name("writable, made read-only again", [short(digest) for digest in report.writable])
    _name("not in the index", [short(digest) for digest in report.unindexed])
    _name("of unknown kind among the blobs, left alone", [str(path) for path in report.stray])
    _name("links that are gone", [str(path) for path in report.dead_links])


def _name(what: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - _MOST_SHOWN} more" if names[_MOST_SHOWN:] else ""
        out.line(f"  {len(names)} {what}: {', '.join(names[:_MOST_SHOWN])}{more}")
