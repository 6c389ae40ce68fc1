"""Comparing blobs and artifacts with their checksums: `verify`."""

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
    from smartcache.artifacts import SetVerifyReport
    from smartcache.store.store import Store
    from smartcache.store.verify import VerifyReport

_MOST_SHOWN = 10


@command(
    "verify",
    examples=(
        ("smartcache verify", "seconds: sizes, times and modes; hashes only what looks odd"),
        ("smartcache verify --full", "hashes every blob again"),
        ("smartcache verify --full --repair", "brings damaged blobs back from other copies"),
        ("smartcache verify --rebuild", "makes the index again from the blobs on the disk"),
    ),
)
@click.option("--full", is_flag=True, help="Hash every blob again.")
@click.option("--repair", is_flag=True, help="Repair from files outside and other pools.")
@click.option("--rebuild", is_flag=True, help="Make the index again from what is on the disk.")
@asks
@click.pass_context
def verify_command(
    ctx: click.Context, *, full: bool, repair: bool, rebuild: bool, dry_run: bool, yes: bool
) -> None:
    """Compare blobs and artifacts with their checksums.

    Damaged blobs go to bad/ and are named; their files outside the store stay as they are. Exits
    with 3 if something is damaged that was not healed. Of artifact sets, the footers and sizes of
    packs are checked; with --full, every artifact. Only --rebuild asks first.
    """
    from smartcache.cache import sets_in

    if dry_run and not rebuild:
        raise BadUsageError(
            "--dry-run is for --rebuild",
            hint="Verify moves damaged blobs to bad/, and leaves your files alone.",
        )
    with ctx.ensure_object(Session).store_as_it_is() as store:
        if dry_run:
            _say_what_rebuild_finds(store)
            return
        rebuilt: int | None = None
        if rebuild and store.layout.exists():
            out.confirm(
                "Make the index again? Files outside will be read again by a scan.", yes=yes
            )
            rebuilt = store.rebuild(progress=bars)
        report = store.verify(full=full, repair=repair, progress=bars)
        sets = sets_in(store)
        of_sets = [] if sets is None else sets.verify(full=full, progress=bars)
    has_damage = report.has_damage or bool(damaged_sets(of_sets))
    out.show(
        human=lambda: _say(report, of_sets, rebuilt, repair=repair),
        document=lambda: {
            "dry_run": False,
            "rebuilt": rebuilt,
            **picked(report, "is_full blobs hashed_size damaged healed stray writable"),
            "has_damage": has_damage,
            "artifact_sets": report_documents(of_sets),
        },
        ids=lambda: [*report.damaged, *damaged_sets(of_sets)],
    )
    if has_damage:
        ctx.exit(DAMAGED)


def _say_what_rebuild_finds(store: Store) -> None:
    number = sum(1 for pool in store.pools() for _ in pool.digests())
    out.show(
        human=lambda: out.line(f"Would make the index again from {counted(number, 'blob')}."),
        document=lambda: {"dry_run": True, "rebuilt": number},
        ids=list,
    )


def _say(
    report: VerifyReport, of_sets: list[SetVerifyReport], rebuilt: int | None, *, repair: bool
) -> None:
    if rebuilt is not None:
        out.line(f"Made the index again from {counted(rebuilt, 'blob')}.")
    hashed = f", {format_size(report.hashed_size)} hashed" if report.hashed_size else ""
    out.line(f"Checked {counted(report.blobs, 'blob')}{hashed}.")
    _name("damaged, moved to bad/", [short(digest) for digest in report.damaged])
    _name("healed", [short(digest) for digest in report.healed])
    _name("writable, made read-only again", [short(digest) for digest in report.writable])
    _name("of unknown kind among the blobs, left alone", [str(path) for path in report.stray])
    if report.has_damage:
        advice = "Get the files again" if repair else "Try 'smartcache verify --repair'"
        out.talk(f"Damage was found. {advice}: what was known about the blobs is kept.")
    elif not (report.healed or report.stray):
        out.line("No damage was found.")
    if of_sets:
        artifacts = counted(sum(each.artifacts for each in of_sets), "artifact")
        size = sum(each.read_size for each in of_sets)
        read = f", {format_size(size)} read" if size else ""
        out.line(f"Checked {artifacts} of {counted(len(of_sets), 'set')}{read}.")
        say_damage(of_sets)


def _name(what: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - _MOST_SHOWN} more" if names[_MOST_SHOWN:] else ""
        out.line(f"  {len(names)} {what}: {', '.join(names[:_MOST_SHOWN])}{more}")
