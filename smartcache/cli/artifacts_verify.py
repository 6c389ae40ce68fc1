"""Verifying sets, and making their indexes again: `artifacts verify`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from smartcache.cli import _completion
from smartcache.cli._artifacts import all_sets, chosen, label
from smartcache.cli._command import asks, command
from smartcache.cli._failures import DAMAGED, BadUsageError
from smartcache.cli._holders import say_parts
from smartcache.cli._output import out
from smartcache.cli._progress import bars
from smartcache.cli._session import Session
from smartcache.cli._words import counted
from smartcache.errors import SmartcacheError
from smartcache.sizes import format_size

if TYPE_CHECKING:
    from smartcache.artifacts.figures import SetInfo
    from smartcache.artifacts.recovery import Rebuilt
    from smartcache.artifacts.sets import ArtifactSets
    from smartcache.store.holder import HolderReport


@command(
    "verify",
    examples=(
        ("smartcache artifacts verify", "reads every artifact of every set"),
        ("smartcache artifacts verify sdxl-latents", "of these sets only"),
        ("smartcache artifacts verify --rebuild", "an index is damaged: rebuild it from the packs"),
    ),
)
@click.argument("words", nargs=-1, metavar="[SET]...", shell_complete=_completion.sets)
@click.option("--rebuild", is_flag=True, help="Rebuild the index from the packs first.")
@asks
@click.pass_context
def verify_command(
    ctx: click.Context, *, words: tuple[str, ...], rebuild: bool, dry_run: bool, yes: bool
) -> None:
    """Read everything again and compare it with its checksums.

    A damaged artifact is named and counts as missing from then on: it is computed again when it is
    needed. Exits with 3 if damage was found. --rebuild forgets when artifacts were last used;
    it brings back nothing that was deleted or replaced, and asks first.
    """
    from smartcache.artifacts.holder import told
    from smartcache.store.holder import HolderReport

    if dry_run and not rebuild:
        raise BadUsageError("--dry-run is for --rebuild", hint="Leave it out, or add --rebuild.")
    with all_sets(ctx.ensure_object(Session)) as sets:
        infos = chosen(sets, words)
        rebuilt: dict[str, Rebuilt] = {}
        failed: dict[str, str] = {}
        if rebuild and infos and not dry_run:
            many = counted(len(infos), "set")
            out.confirm(f"Make the index of {many} again from the packs?", yes=yes)
            rebuilt, failed = _rebuild(sets, infos)
        report = HolderReport(parts=())
        if not dry_run:
            report = HolderReport(parts=tuple(map(told, infos, sets.verify(infos, progress=bars))))
    out.show(
        human=lambda: _say(infos, report, rebuilt, dry_run=dry_run),
        document=lambda: {
            "dry_run": dry_run,
            "has_damage": report.has_damage,
            "rebuilt": rebuilt,
            "not_rebuilt": failed,
            "sets": report.parts,
        },
        ids=lambda: [part.name for part in report.parts if part.damage],
    )
    if report.has_damage:
        ctx.exit(DAMAGED)


def _rebuild(
    sets: ArtifactSets, infos: Sequence[SetInfo]
) -> tuple[dict[str, Rebuilt], dict[str, str]]:
    from smartcache.artifacts.holder import name_of

    rebuilt: dict[str, Rebuilt] = {}
    failed: dict[str, str] = {}
    for info in infos:
        try:
            found = rebuilt[name_of(info)] = sets.rebuild(info, progress=bars)
        except (SmartcacheError, OSError) as error:
            failed[name_of(info)] = str(error)
            out.warn(f"{label(info)}: its index was not made again: {error}")
            continue
        for number in found.unreadable:
            out.warn(f"{label(info)}: {number:08}.pack is not a pack of this set and is left alone")
    return rebuilt, failed


def _say(
    infos: Sequence[SetInfo],
    report: HolderReport,
    rebuilt: dict[str, Rebuilt],
    *,
    dry_run: bool,
) -> None:
    from smartcache.artifacts.holder import name_of

    if not infos:
        out.line("There are no artifacts.")
        return
    if dry_run:
        size = format_size(sum(info.on_disk for info in infos))
        out.line(f"Would make the index of {counted(len(infos), 'set')} again from {size}.")
        return
    for info in infos:
        found = rebuilt.get(name_of(info))
        if found is not None:
            artifacts, packs = counted(found.artifacts, "artifact"), counted(found.packs, "pack")
            out.line(f"{label(info)}: made its index again, {artifacts} in {packs}.")
    size = format_size(sum(part.read_size for part in report.parts))
    artifacts = counted(sum(part.items for part in report.parts), "artifact")
    out.line(f"Checked {artifacts} of {counted(len(infos), 'set')}, {size} read.")
    say_parts(report)
