"""Verifying sets, and making footers of packs again: `artifacts verify`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from smartcache.cli._artifacts import (
    all_sets,
    chosen,
    damaged_sets,
    label,
    report_documents,
    say_damage,
)
from smartcache.cli._command import asks, command
from smartcache.cli._failures import DAMAGED, BadUsageError
from smartcache.cli._output import out
from smartcache.cli._progress import bars
from smartcache.cli._session import Session
from smartcache.cli._words import counted
from smartcache.errors import SmartcacheError
from smartcache.sizes import format_size

if TYPE_CHECKING:
    from smartcache.artifacts import ArtifactSets, Rebuilt, SetInfo, SetVerifyReport


@command(
    "verify",
    examples=(
        ("smartcache artifacts verify", "reads every artifact of every set"),
        ("smartcache artifacts verify sdxl-latents", "of these sets only"),
        ("smartcache artifacts verify --rebuild", "makes missing or damaged footers again"),
    ),
)
@click.argument("words", nargs=-1, metavar="[SET]...")
@click.option(
    "--rebuild", is_flag=True, help="First make missing or damaged footers of packs again."
)
@asks
@click.pass_context
def verify_command(
    ctx: click.Context, *, words: tuple[str, ...], rebuild: bool, dry_run: bool, yes: bool
) -> None:
    """Read everything again and compare it with its checksums.

    A damaged artifact is named and counts as missing from then on: it is computed again when it is
    needed. Exits with 3 if damage was found. A pack ends with a footer that lists its artifacts;
    without it, opening the set takes longer. --rebuild writes it again from the artifacts
    themselves, loses nothing, and asks first.
    """
    if dry_run and not rebuild:
        raise BadUsageError("--dry-run is for --rebuild", hint="Leave it out, or add --rebuild.")
    with all_sets(ctx.ensure_object(Session)) as sets:
        infos = chosen(sets, words)
        rebuilt: dict[str, Rebuilt] = {}
        failed: dict[str, str] = {}
        if rebuild and infos and not dry_run:
            many = counted(len(infos), "set")
            out.confirm(f"Read all packs of {many}, and make footers again?", yes=yes)
            rebuilt, failed = _rebuild(sets, infos)
        reports = [] if dry_run else sets.verify(infos, progress=bars)
    out.show(
        human=lambda: _say(infos, reports, rebuilt, dry_run=dry_run),
        document=lambda: {
            "dry_run": dry_run,
            "has_damage": bool(damaged_sets(reports)),
            "rebuilt": rebuilt,
            "not_rebuilt": failed,
            "sets": report_documents(reports),
        },
        ids=lambda: damaged_sets(reports),
    )
    if damaged_sets(reports):
        ctx.exit(DAMAGED)


def _rebuild(
    sets: ArtifactSets, infos: Sequence[SetInfo]
) -> tuple[dict[str, Rebuilt], dict[str, str]]:
    rebuilt: dict[str, Rebuilt] = {}
    failed: dict[str, str] = {}
    for info in infos:
        try:
            rebuilt[info.full_name] = sets.rebuild(info, progress=bars)
        except (SmartcacheError, OSError) as error:
            failed[info.full_name] = str(error)
            out.warn(f"{label(info)}: its footers were not made again: {error}")
    return rebuilt, failed


def _say(
    infos: Sequence[SetInfo],
    reports: Sequence[SetVerifyReport],
    rebuilt: dict[str, Rebuilt],
    *,
    dry_run: bool,
) -> None:
    if not infos:
        out.line("There are no artifacts.")
        return
    if dry_run:
        size = format_size(sum(info.on_disk for info in infos))
        out.line(f"Would read {size} of {counted(len(infos), 'set')}, and make footers again.")
        return
    for info in infos:
        found = rebuilt.get(info.full_name)
        if found is not None:
            made = f"made {counted(found.footers, 'footer')} again"
            made = made if found.footers else "every pack has its footer"
            out.line(f"{label(info)}: {made}, {counted(found.packs, 'pack')} read.")
    size = format_size(sum(report.read_size for report in reports))
    artifacts = counted(sum(report.artifacts for report in reports), "artifact")
    out.line(f"Checked {artifacts} of {counted(len(infos), 'set')}, {size} read.")
    say_damage(reports)
