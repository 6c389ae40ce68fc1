"""Leaving: `eject`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from smartcache.cli._command import asks, command
from smartcache.cli._failures import FAILED
from smartcache.cli._json import picked
from smartcache.cli._output import out
from smartcache.cli._progress import bars
from smartcache.cli._session import Session
from smartcache.cli._words import counted, named, short
from smartcache.errors import BlobInUseError
from smartcache.sizes import format_size

if TYPE_CHECKING:
    from pathlib import Path

    from smartcache.store.undo import EjectPlan, Undone


@command(
    "eject",
    examples=(
        (
            "smartcache eject --dry-run",
            "how many files get their bytes back, and the room it needs",
        ),
        ("smartcache eject", "every file as it was, no store any more"),
    ),
)
@click.option("--drop-pinned", is_flag=True, help="Lose pinned blobs that are only in the store.")
@click.option("--drop-artifacts", is_flag=True, help="Lose all artifact sets.")
@asks
@click.pass_context
def eject_command(
    ctx: click.Context, *, drop_pinned: bool, drop_artifacts: bool, dry_run: bool, yes: bool
) -> None:
    """Give every file its own bytes back and remove the store.

    Modes, times and places too, on every filesystem. Room is checked first. Blobs that nothing
    outside the store has go with it; pinned ones, and artifacts, are not lost unless that is
    allowed.
    """
    session = ctx.ensure_object(Session)
    if not dry_run and not session.has_store():
        from smartcache.store.undo import clear_leftovers

        if cleared := clear_leftovers(session.settings.home):
            out.show(
                human=lambda: out.line("Removed what an interrupted eject had left of the store."),
                document=lambda: {
                    "dry_run": False, "removed": True, "roots": cleared, "left_alone": [],
                },
                ids=lambda: cleared,
            )  # fmt: skip
            return
    with session.store(only_look=dry_run and session.has_store()) as store:
        plan = store.plan_eject(drop_pinned=drop_pinned, drop_sets=drop_artifacts)
        results: list[Undone] = []
        if not dry_run:
            _refuse_losing(plan)
            plan.require_room()
            if not yes and out.mode == "human":
                for text in _plan_lines(plan):
                    out.talk(text)
            out.confirm("Remove the store?", yes=yes)
            results = plan.execute(progress=bars)
    for each in results:
        if not each.is_undone:
            out.warn(f"{each.path}: {each.note}")
    failed = sum(each.outcome in ("failed", "renamed") for each in results)
    out.show(
        human=lambda: _say(plan, results, failed, dry_run=dry_run),
        document=lambda: _document(plan, results, failed, dry_run=dry_run),
        ids=lambda: _roots(plan),
    )
    if not all(each.is_undone for each in results):
        ctx.exit(FAILED)


def _refuse_losing(plan: EjectPlan) -> None:
    """Say before the question what would be refused after it."""
    if plan.pinned_only:
        names = named([short(digest) for digest in plan.pinned_only], "blob")
        message = f"Pinned blobs would be lost: {names}; nothing was changed"
        hint = "Place them with 'smartcache link', unpin them, or lose them with --drop-pinned."
        raise BlobInUseError(message, hint=hint, digests=plan.pinned_only)
    if plan.sets and not plan.drop_sets:
        size = format_size(plan.sets_size)
        names = named(list(dict.fromkeys(path.parent.name for path in plan.sets)), "name")
        message = f"Computed artifacts would be lost, {size}: {names}; nothing was changed"
        hint = "Copy the folder 'sets' of the store elsewhere, or lose them with --drop-artifacts."
        raise BlobInUseError(message, hint=hint, sets=plan.sets)


def _roots(plan: EjectPlan) -> list[Path]:
    return [plan.root, *plan.pools]


def _plan_lines(plan: EjectPlan) -> list[str]:
    lines = [
        f"{', '.join(map(str, _roots(plan)))}:",
        f"  {counted(len(plan.changes) + len(plan.links), 'file')} to be given back",
        f"  needs {format_size(plan.needed_size)}, {format_size(plan.free_size)} are free",
        f"  frees {format_size(plan.freed_size)} that only smartcache has",
    ]
    if plan.pinned_only:
        lines.append(f"  {counted(len(plan.pinned_only), 'pinned blob')} only in the store")
    if plan.sets:
        sets, datasets = _sets_and_datasets(plan)
        kinds = ((sets, "artifact set"), (datasets, "dataset"))
        what = " and ".join(counted(len(each), noun) for each, noun in kinds if each)
        verb = "are lost" if plan.drop_sets else "would be lost: --drop-artifacts allows it"
        lines.append(f"  {what} ({format_size(plan.sets_size)}) {verb}")
    return lines


def _sets_and_datasets(plan: EjectPlan) -> tuple[list[Path], list[Path]]:
    from smartcache.store.layout import DATASET

    datasets = [path for path in plan.sets if path.name == DATASET]
    return [path for path in plan.sets if path.name != DATASET], datasets


def _say(plan: EjectPlan, results: list[Undone], failed: int, *, dry_run: bool) -> None:
    roots = ", ".join(map(str, _roots(plan)))
    if dry_run:
        for text in _plan_lines(plan):
            out.line(text)
    elif failed:
        out.line(f"{counted(failed, 'file')} could not be given back, so {plan.root} stays.")
        out.talk("See to what the warnings say, then run 'smartcache eject' again.")
    else:
        given_back = sum(each.outcome == "undone" for each in results)
        out.line(f"Gave back {counted(given_back, 'file')} and removed {roots}.")


def _document(
    plan: EjectPlan, results: list[Undone], failed: int, *, dry_run: bool
) -> dict[str, object]:
    sets, datasets = _sets_and_datasets(plan)
    return {
        "dry_run": dry_run,
        "removed": not dry_run and not failed,
        "roots": _roots(plan),
        "files": [*(each.path for each in plan.changes), *(each.path for each in plan.links)],
        **picked(plan, "needed_size free_size freed_size pinned_only"),
        "artifact_sets": sets,
        "datasets": datasets,
        "artifact_sets_size": plan.sets_size,
        "given_back": sum(each.outcome == "undone" for each in results),
        "left_alone": [
            {"path": each.path, "note": each.note} for each in results if not each.is_undone
        ],
    }
