"""Removing sets and artifacts: `artifacts rm`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from smartcache.cli._artifacts import (
    MORE,
    all_sets,
    chosen,
    label,
    one,
    plan_document,
    show_plan,
    what_goes,
)
from smartcache.cli._command import asks, command
from smartcache.cli._failures import FAILED, BadUsageError
from smartcache.cli._output import out
from smartcache.cli._progress import bars
from smartcache.cli._session import Session
from smartcache.sizes import format_size

if TYPE_CHECKING:
    from smartcache.artifacts import ArtifactSets, SetInfo, SetPlan, SetResult


@command(
    "rm",
    examples=(
        ("smartcache artifacts rm sdxl-latents --dry-run", "all sets of that name"),
        ("smartcache artifacts rm sdxl-latents/9d21aabb", "one of them"),
        ("smartcache artifacts rm sdxl-latents 3f2a91c0 77aa11b2", "two artifacts of a set"),
    ),
)
@click.argument("words", nargs=-1, required=True, metavar="SET [KEY... | SET...]")
@asks
@click.pass_context
def rm_command(ctx: click.Context, *, words: tuple[str, ...], dry_run: bool, yes: bool) -> None:
    """Remove whole sets, or artifacts of one.

    A NAME stands for all sets of that name; an ID or NAME/ID (at least 4 characters of it) for one.
    Words after it are keys of its artifacts; further sets are written in full, NAME/ID as
    'artifacts ls -q' prints them. What is removed can only be computed again.
    """
    with all_sets(ctx.ensure_object(Session)) as sets:
        plan, keys_of = _plan(sets, words)
        result: SetResult | None = None
        if not dry_run:
            if not yes and out.mode == "human":
                show_plan(plan, as_talk=True)
                _say_how_to_name_one(plan)
            freed = format_size(plan.freed_size)
            out.confirm(f"Remove {what_goes(plan)} for good: {freed}?", yes=yes)
            result = plan.execute(bars)
        for text in () if result is None else result.problems:
            out.warn(text)
        out.show(
            human=lambda: _say(plan, result, keys_of),
            document=lambda: plan_document(plan, result),
            ids=lambda: [
                each for v in plan.victims for each in (v.keys if keys_of else (v.info.full_name,))
            ],
        )
    if result is not None and result.problems:
        ctx.exit(FAILED)


def _plan(sets: ArtifactSets, words: tuple[str, ...]) -> tuple[SetPlan, SetInfo | None]:
    """Return what would be removed; and the set, if it is artifacts of it.

    A key may look like the name of a set or the beginning of an id, so behind the first word only a
    whole NAME/ID is a set.
    """
    first, *rest = words
    whole = {f"{path.parent.name}/{path.name}" for path in sets.folders()}
    are_sets = [word in whole for word in rest]
    if all(are_sets):
        return sets.plan_remove(chosen(sets, words)), None
    if any(are_sets):
        word = rest[are_sets.index(True)]
        message = f"{word!r} is a set, but not all words after {first!r} are"
        raise BadUsageError(message, hint="Name one set and keys, or sets whole: NAME/ID.")
    info = one(sets, first)
    return sets.plan_delete(info, rest), info


def _say_how_to_name_one(plan: SetPlan) -> None:
    names = [victim.info.name for victim in plan.victims if not victim.keys]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        info = next(victim.info for victim in plan.victims if victim.info.name == twice)
        out.talk(f"{twice} are {names.count(twice)} sets; {label(info)} names one of them.")


def _say(plan: SetPlan, result: SetResult | None, keys_of: SetInfo | None) -> None:
    if result is None:
        show_plan(plan, as_talk=False)
        out.line(f"Would remove {what_goes(plan)}: {format_size(plan.freed_size)}.")
        return
    verb = "Removed" if not result.problems else "Partly removed"
    out.line(f"{verb} {what_goes(plan)}, freed {format_size(result.freed_size)}.")
    if keys_of is not None and result.freed_size < plan.freed_size:
        out.talk(MORE)
