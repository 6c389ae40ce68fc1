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

    from smartcache.store.changes.undo import Undone
    from smartcache.store.upkeep.eject import EjectPlan


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

    Modes, times and places too, on every volume. Room is checked first. Blobs that nothing outside
    the store has go with it; pinned ones, and artifacts, are not lost unless that is allowed.
    """
    session = ctx.ensure_object(Session)
    if not dry_run and not session.has_store():
        from smartcache.store.upkeep.eject import clear_leftovers

        if cleared := clear_leftovers(session.settings.home):
            out.show(
                human=lambda: out.line("Removed what an interrupted eject had left of the store."),
                document=lambda: {
                    "dry_run": False, "removed": True, "stores": [], "left_alone": [],
                },
                ids=lambda: cleared,
            )  # fmt: skip
            return
    with session.store() as store:
        # The neighbours first: only the store itself knows of them.
        volumes = list(reversed(store.stores()))
        plans = [
            each.plan_eject(drop_pinned=drop_pinned, drop_sets=drop_artifacts) for each in volumes
        ]
        results: list[Undone] = []
        if not dry_run:
            _refuse_pinned(plans)
            _refuse_artifacts(plans)
            for plan in plans:  # before the first volume goes
                plan.require_room()
            if not yes and out.mode == "human":
                _say_plans(plans, as_talk=True)
            out.confirm("Remove the store?", yes=yes)
            for plan in plans:
                results += plan.execute(progress=bars)
                if _failed(results):
                    break  # the store itself is the last: it knows of the others
    _show_eject(plans, results, dry_run=dry_run)
    if not all(each.is_undone for each in results):
        ctx.exit(FAILED)


def _refuse_pinned(plans: list[EjectPlan]) -> None:
    """Say before the question what would be refused after it."""
    digests = [digest for plan in plans for digest in plan.pinned_only]
    if digests:
        names = named([short(digest) for digest in digests], "blob")
        message = f"Pinned blobs would be lost: {names}; nothing was changed"
        hint = "Place them with 'smartcache link', unpin them, or lose them with --drop-pinned."
        raise BlobInUseError(message, hint=hint, digests=digests)


def _refuse_artifacts(plans: list[EjectPlan]) -> None:
    """Say before the question that what was computed would be lost."""
    sets = [path for plan in plans if not plan.drop_sets for path in plan.sets]
    if sets:
        size = format_size(sum(plan.sets_size for plan in plans))
        names = named(list(dict.fromkeys(path.parent.name for path in sets)), "name")
        message = f"Computed artifacts would be lost, {size}: {names}; nothing was changed"
        hint = "Copy the folder 'sets' of the store elsewhere, or lose them with --drop-artifacts."
        raise BlobInUseError(message, hint=hint, sets=tuple(sets))


def _plan_lines(plan: EjectPlan) -> list[str]:
    lines = [
        f"{plan.root}:",
        f"  {counted(len(plan.changes) + len(plan.links), 'file')} to be given back",
        f"  needs {format_size(plan.needed_size)}, {format_size(plan.free_size)} are free",
        f"  frees {format_size(plan.freed_size)} that only smartcache holds",
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
    from smartcache.store.volume import DATASET

    datasets = [path for path in plan.sets if path.name == DATASET]
    return [path for path in plan.sets if path.name != DATASET], datasets


def _say_plans(plans: list[EjectPlan], *, as_talk: bool) -> None:
    for text in (line for plan in plans for line in _plan_lines(plan)):
        (out.talk if as_talk else out.line)(text)


def _show_eject(plans: list[EjectPlan], results: list[Undone], *, dry_run: bool) -> None:
    for each in results:
        if not each.is_undone:
            out.warn(f"{each.change.path}: {each.note}")
    out.show(
        human=lambda: _say_plans(plans, as_talk=False) if dry_run else _say_ejected(plans, results),
        document=lambda: {
            "dry_run": dry_run,
            "removed": not dry_run and not _failed(results),
            "stores": [_ejection(plan) for plan in plans],
            "left_alone": [
                {"path": each.change.path, "note": each.note}
                for each in results
                if not each.is_undone
            ],
        },
        ids=lambda: [plan.root for plan in plans],
    )


def _failed(results: list[Undone]) -> list[Undone]:
    return [each for each in results if each.outcome == "failed"]


def _say_ejected(plans: list[EjectPlan], results: list[Undone]) -> None:
    roots = ", ".join(str(plan.root) for plan in plans)
    if failed := _failed(results):
        out.line(f"{counted(len(failed), 'file')} could not be given back, so {roots} stays.")
        out.talk("See to what the warnings say, then run 'smartcache eject' again.")
        return
    files = sum(len(plan.changes) + len(plan.links) for plan in plans)
    out.line(f"Gave back {counted(files, 'file')} and removed {roots}.")


def _ejection(plan: EjectPlan) -> dict[str, object]:
    sets, datasets = _sets_and_datasets(plan)
    return {
        "root": plan.root,
        "files": [change.path for change in plan.changes] + [link.path for link in plan.links],
        **picked(plan, "needed_size free_size freed_size pinned_only"),
        "artifact_sets": sets,
        "datasets": datasets,
        "artifact_sets_size": plan.sets_size,
    }
