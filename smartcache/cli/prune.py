"""Freeing room: `prune`, also known as `gc`."""

from __future__ import annotations

from datetime import timedelta

import click

from smartcache.cli._command import age, asks, command, size
from smartcache.cli._output import out
from smartcache.cli._progress import bars
from smartcache.cli._session import Session
from smartcache.cli._tables import Column
from smartcache.cli._words import ago, counted, short
from smartcache.sizes import format_size
from smartcache.store.prune import PrunePlan, PruneResult, Victim
from smartcache.store.store import Store

_MOST_SHOWN = 20
_COLUMNS = (
    Column(title="DIGEST"),
    Column(title="SIZE", right=True),
    Column(title="FREES", right=True),
    Column(title="USED", right=True),
    Column(title="WHY"),
)


@command(
    "prune",
    examples=(
        ("smartcache prune --dry-run", "what nobody holds any more, and what that would free"),
        ("smartcache prune --max-size 200GB", "the least recently used, until 200 GB remain"),
        ("smartcache prune --unused-for 30d -y", "from a timer, without asking"),
    ),
)
@click.option(
    "--max-size", type=size, metavar="SIZE",
    help="Remove no more than needed for what only smartcache holds to fit, per volume.",
)  # fmt: skip
@click.option("--unused-for", type=age, metavar="AGE", help="Remove only what was not used since.")
@click.option("--drop-away", is_flag=True, help="Count owners on unmounted drives as gone.")
@click.option("--after-rebuild", is_flag=True, help="Go ahead though the index was rebuilt.")
@click.option("--bad", is_flag=True, help="Remove damaged files from bad/ too.")
@click.option("-v", "--verbose", is_flag=True, help="Show every blob of a long plan.")
@asks
@click.pass_obj
def prune_command(
    session: Session,
    *,
    max_size: int | None,
    unused_for: timedelta | None,
    drop_away: bool,
    after_rebuild: bool,
    bad: bool,
    verbose: bool,
    dry_run: bool,
    yes: bool,
) -> None:
    """Free what only smartcache holds and nobody wants.

    Blobs without a pin, owner, symlink or hard link go, and the trash is emptied: what it holds
    cannot be undone afterwards. `smartcache gc` is the same command.
    """
    with session.stores() as stores:
        plans = [
            (
                store,
                store.plan_prune(
                    max_size=max_size, unused_for=unused_for, drop_away=drop_away,
                    after_rebuild=after_rebuild, with_bad=bad,
                ),
            )
            for store in stores
        ]  # fmt: skip
        for warning in dict.fromkeys(text for _, plan in plans for text in plan.warnings):
            out.warn(warning)
        results: list[PruneResult] = []
        if not dry_run and _victims(plans):
            _ask(plans, verbose=verbose, yes=yes)
            results = [plan.execute(progress=bars) for _, plan in plans if plan.victims]
        out.show(
            human=lambda: _say(plans, results, verbose=verbose, dry_run=dry_run),
            document=lambda: _document(plans, results, dry_run=dry_run),
            ids=lambda: [victim.digest for victim in _victims(plans)],
        )


def _victims(plans: list[tuple[Store, PrunePlan]]) -> list[Victim]:
    return [victim for _, plan in plans for victim in plan.victims]


def _ask(plans: list[tuple[Store, PrunePlan]], *, verbose: bool, yes: bool) -> None:
    if not yes and out.mode == "human":
        _show(plans, verbose=verbose, as_talk=True)
    victims = _victims(plans)
    freed = format_size(sum(plan.freed_size for _, plan in plans))
    out.confirm(f"Remove {counted(len(victims), 'blob')} for good and free {freed}?", yes=yes)


def _show(plans: list[tuple[Store, PrunePlan]], *, verbose: bool, as_talk: bool) -> None:
    victims = sorted(_victims(plans), key=lambda victim: -victim.allocated)
    shown = victims if verbose else victims[:_MOST_SHOWN]
    rows = (
        [
            short(victim.digest),
            format_size(victim.size),
            format_size(victim.allocated),
            "-" if victim.used_at is None else ago(victim.used_at),
            victim.reason,
        ]
        for victim in shown
    )
    out.table(_COLUMNS, rows, as_talk=as_talk)
    if len(victims) > len(shown):
        out.talk(f"... and {len(victims) - len(shown):,} smaller ones; -v shows all")


def _say(
    plans: list[tuple[Store, PrunePlan]],
    results: list[PruneResult],
    *,
    verbose: bool,
    dry_run: bool,
) -> None:
    victims = _victims(plans)
    held = sum(plan.held_size for _, plan in plans)
    stays = f"; {format_size(held)} are held and stay" if held else ""
    if not victims:
        out.line(f"Nothing to prune{stays}.")
    elif dry_run:
        _show(plans, verbose=verbose, as_talk=False)
        freed = format_size(sum(plan.freed_size for _, plan in plans))
        out.talk(f"Would remove {counted(len(victims), 'blob')} and free {freed}{stays}.")
    else:
        removed = sum(result.removed for result in results)
        freed = format_size(sum(result.freed_size for result in results))
        out.line(f"Removed {counted(removed, 'blob')}, freed {freed}{stays}.")
        kept = sum(result.kept for result in results)
        if kept:
            out.talk(f"{counted(kept, 'blob')} came into use again meanwhile and stayed.")


def _document(
    plans: list[tuple[Store, PrunePlan]], results: list[PruneResult], *, dry_run: bool
) -> dict[str, object]:
    return {
        "dry_run": dry_run,
        "victims": [
            {
                "digest": victim.digest,
                "size": victim.size,
                "allocated": victim.allocated,
                "reason": victim.reason,
                "used_at": victim.used_at,
                "root": store.root,
            }
            for store, plan in plans
            for victim in plan.victims
        ],
        "planned_size": sum(plan.freed_size for _, plan in plans),
        "held_size": sum(plan.held_size for _, plan in plans),
        "removed": sum(result.removed for result in results),
        "freed_size": sum(result.freed_size for result in results),
        "kept": sum(result.kept for result in results),
        "warnings": [text for _, plan in plans for text in plan.warnings],
    }
