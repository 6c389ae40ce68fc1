"""Freeing room in sets: `artifacts prune`, `artifacts compact`."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import click

from smartcache.cli._artifacts import (
    MORE,
    all_sets,
    chosen,
    plan_document,
    show_plan,
    warn_of_problems,
    what_goes,
)
from smartcache.cli._command import age, asks, command, dry_run, size
from smartcache.cli._failures import FAILED
from smartcache.cli._output import out
from smartcache.cli._progress import bars
from smartcache.cli._session import Session
from smartcache.sizes import format_size

if TYPE_CHECKING:
    from smartcache.artifacts import SetPlan, SetResult


@command(
    "prune",
    examples=(
        ("smartcache artifacts prune --dry-run", "what is expired or dead, and what that frees"),
        ("smartcache artifacts prune --max-size 200GB", "the least recently used, until it fits"),
        ("smartcache artifacts prune sdxl-latents --unused-for 90d -y", "from a timer"),
    ),
)
@click.argument("words", nargs=-1, metavar="[SET]...")
@click.option(
    "--max-size", type=size, metavar="SIZE",
    help="Evict the least recently used until all that is live fits.",
)  # fmt: skip
@click.option("--unused-for", type=age, metavar="AGE", help="Evict what was not used for so long.")
@asks
@click.pass_context
def prune_command(
    ctx: click.Context,
    *,
    words: tuple[str, ...],
    max_size: int | None,
    unused_for: timedelta | None,
    dry_run: bool,
    yes: bool,
) -> None:
    """Evict old artifacts, and free what is expired or dead.

    In these sets, or in all. Without options, only what nobody can ask for any more is removed.
    Pinned artifacts, those being computed, and sets that are not evictable always stay.
    """
    with all_sets(ctx.ensure_object(Session)) as sets:
        infos = chosen(sets, words)
        warn_of_problems(infos)
        readable = [info for info in infos if not info.problem]
        plan = sets.plan_prune(readable, max_size=max_size, unused_for=unused_for)
        for warning in plan.warnings:
            out.warn(warning)
        result: SetResult | None = None
        if not dry_run and plan.victims:
            if not yes and out.mode == "human":
                show_plan(plan, as_talk=True)
            what, freed = what_goes(plan), format_size(plan.freed_size)
            question = f"Remove {what} and free {freed}?" if what else f"Free {freed}?"
            out.confirm(question, yes=yes)
            result = plan.execute(bars)
        _show(plan, result, dry_run=dry_run, nothing="Nothing to prune.")
    if result is not None and result.problems:
        ctx.exit(FAILED)


@command(
    "compact",
    examples=(
        ("smartcache artifacts compact", "packs that are more than half dead; puts do so too"),
        ("smartcache artifacts compact sdxl-latents --force", "every pack with anything dead"),
    ),
)
@click.argument("words", nargs=-1, metavar="[SET]...")
@click.option("--force", is_flag=True, help="Also packs with little to free.")
@dry_run
@click.pass_context
def compact_command(
    ctx: click.Context, *, words: tuple[str, ...], force: bool, dry_run: bool
) -> None:
    """Free the space of artifacts that are gone.

    What is still needed is copied to a new pack, then the old one is removed. That needs space for
    the copy and does not disturb programs that read or write meanwhile. No artifact is lost.
    """
    with all_sets(ctx.ensure_object(Session)) as sets:
        plan = sets.plan_compact(chosen(sets, words), force=force)
        for warning in plan.warnings:
            out.warn(warning)
        result = plan.execute(bars) if plan.victims and not dry_run else None
        more = "" if force else " (--force: also packs with little to free)"
        _show(plan, result, dry_run=dry_run, nothing=f"Nothing is worth compacting{more}.")
    if plan.warnings or (result is not None and result.problems):
        ctx.exit(FAILED)


def _show(plan: SetPlan, result: SetResult | None, *, dry_run: bool, nothing: str) -> None:
    for text in () if result is None else result.problems:
        out.warn(text)
    out.show(
        human=lambda: _say(plan, result, nothing),
        document=lambda: {**plan_document(plan, result), "dry_run": dry_run},
        ids=lambda: dict.fromkeys(victim.info.full_name for victim in plan.victims),
    )


def _say(plan: SetPlan, result: SetResult | None, nothing: str) -> None:
    what = what_goes(plan)
    if not plan.victims:
        out.line(nothing)
    elif result is None:
        show_plan(plan, as_talk=False)
        freed = format_size(plan.freed_size)
        out.line(f"Would remove {what} and free {freed}." if what else f"Would free {freed}.")
    else:
        freed = format_size(result.freed_size)
        removed = f"{result.artifacts:,} artifact{'' if result.artifacts == 1 else 's'}"
        out.line(f"Removed {removed}, freed {freed}." if what else f"Freed {freed}.")
        if what and result.freed_size < plan.freed_size // 2:
            out.talk(MORE)
