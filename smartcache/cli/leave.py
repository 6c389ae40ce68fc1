"""Moving the store, and leaving it: `mv`, `eject`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from smartcache.cli._command import FILE, asks, command
from smartcache.cli._failures import FAILED
from smartcache.cli._output import out
from smartcache.cli._progress import bars
from smartcache.cli._session import Session
from smartcache.cli._words import counted, named, short
from smartcache.errors import BlobInUseError
from smartcache.sizes import format_size

if TYPE_CHECKING:
    from pathlib import Path

    from smartcache.store import EjectPlan, MovePlan, Undone


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
    ctx: click.Context,
    *,
    drop_pinned: bool,
    drop_artifacts: bool,
    dry_run: bool,
    yes: bool,
) -> None:
    """Give every file its own bytes back and remove the store.

    Modes, times and places too, on every volume. Room is checked first. Blobs that nothing outside
    the store has go with it; pinned ones, and artifacts, are not lost unless that is allowed.
    """
    session = ctx.ensure_object(Session)
    if not dry_run and not session.has_store():
        from smartcache.store import clear_leftovers

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
        for warning in dict.fromkeys(text for plan in plans for text in plan.warnings):
            out.warn(warning)
        results: list[Undone] = []
        if not dry_run:
            _refuse_pinned(plans)
            _refuse_artifacts(plans)
            _refuse_lack_of_room(plans)
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


def _refuse_lack_of_room(plans: list[EjectPlan]) -> None:
    """Raise before the first volume goes if another has no room."""
    for plan in plans:
        plan.require_room()


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
    from smartcache.store import DATASET

    datasets = [path for path in plan.sets if path.name == DATASET]
    return [path for path in plan.sets if path.name != DATASET], datasets


def _say_plans(plans: list[EjectPlan], *, as_talk: bool) -> None:
    for text in (line for plan in plans for line in _plan_lines(plan)):
        if as_talk:
            out.talk(text)
        else:
            out.line(text)


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
        "needed_size": plan.needed_size,
        "free_size": plan.free_size,
        "freed_size": plan.freed_size,
        "pinned_only": plan.pinned_only,
        "artifact_sets": sets,
        "datasets": datasets,
        "artifact_sets_size": plan.sets_size,
        "warnings": plan.warnings,
    }


@command(
    "mv",
    examples=(
        ("smartcache mv /data/smartcache", "the old place leads to the new one"),
        ("smartcache mv /mnt/big/smartcache --dry-run", "another filesystem: what must be copied"),
    ),
)
@click.argument("new_root", metavar="NEWROOT", type=FILE)
@asks
@click.pass_obj
def mv_command(session: Session, *, new_root: Path, dry_run: bool, yes: bool) -> None:
    """Move the store to another directory.

    On the same filesystem in one step, else by a copy that is verified before the old one goes.
    Links stay right, and the old directory leads to the new one.
    """
    with session.store() as store:
        plan = store.plan_move(new_root)
        for warning in plan.warnings:
            out.warn(warning)
        if not dry_run:
            out.confirm(f"{_move_text(plan)}?", yes=yes)
            plan.execute(progress=bars)
            session.home = str(plan.new_root)
    out.show(
        human=lambda: _say_moved(plan, dry_run=dry_run),
        document=lambda: {
            "dry_run": dry_run,
            "root": plan.root,
            "new_root": plan.new_root,
            "is_rename": plan.is_rename,
            "copied_size": plan.copied_size,
            "free_size": plan.free_size,
            "symlinks": plan.symlinks,
            "warnings": plan.warnings,
        },
        ids=lambda: [plan.new_root],
    )


def _move_text(plan: MovePlan) -> str:
    how = "in one step" if plan.is_rename else f"by copying {format_size(plan.copied_size)}"
    return f"Move {plan.root} to {plan.new_root} {how}"


def _say_moved(plan: MovePlan, *, dry_run: bool) -> None:
    if dry_run:
        out.line(f"Would {_move_text(plan)[0].lower()}{_move_text(plan)[1:]}.")
        return
    out.line(f"The store is at {plan.new_root} now.")
    out.talk(f"{plan.root} leads there; set SMARTCACHE_HOME to the new place when you like.")
