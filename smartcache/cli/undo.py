"""Taking changes back: `undo`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from smartcache.cli._command import asks, command
from smartcache.cli._failures import FAILED, BadUsageError, BadValueError
from smartcache.cli._json import picked
from smartcache.cli._output import out
from smartcache.cli._progress import bars
from smartcache.cli._session import Session
from smartcache.cli._words import clock, counted
from smartcache.errors import NothingToUndoError
from smartcache.sizes import format_size

if TYPE_CHECKING:
    from smartcache.store.changes.journal import BatchSummary, Change
    from smartcache.store.changes.undo import Undone, UndoPlan
    from smartcache.store.store import Store

_MOST_SHOWN = 20
_WORDS = {"adopt": "make writable again", "place": "remove the link", "replace": "give own bytes"}


def _word(change: Change) -> str:
    """Return what undoing a change means."""
    return _WORDS["replace" if change.keep else change.op]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One command of the history, on the volume whose journal has it."""

    store: Store
    summary: BatchSummary


@command(
    "undo",
    examples=(
        ("smartcache undo --list", "what can be undone"),
        ("smartcache undo --last", "the last command"),
        ("smartcache undo 9f3a61c2 --dry-run", "what undoing one command would do"),
        ("smartcache undo --all", "every change to every file"),
    ),
)
@click.argument("ids", metavar="[ID]...", nargs=-1)
@click.option("--last", is_flag=True, help="Undo the newest entry.")
@click.option("--all", "everything", is_flag=True, help="Undo every entry.")
@click.option("--list", "only_list", is_flag=True, help="List what can be undone.")
@click.option("-v", "--verbose", is_flag=True, help="Show every file of a long plan.")
@asks
@click.pass_context
def undo_command(
    ctx: click.Context,
    *,
    ids: tuple[str, ...],
    last: bool,
    everything: bool,
    only_list: bool,
    verbose: bool,
    dry_run: bool,
    yes: bool,
) -> None:
    """Give files back what they had before smartcache changed them.

    Own bytes, mode, group and time. A file that somebody else changed since is left alone, with the
    reason said. Without an argument, lists what can be undone. Of an ID its beginning is enough.
    """
    if sum((bool(ids), last, everything, only_list)) > 1:
        raise BadUsageError("IDs, --last, --all and --list exclude each other", hint="Give one.")
    with ctx.ensure_object(Session).stores() as stores:
        history = sorted(
            (Entry(store=store, summary=each) for store in stores for each in store.history()),
            key=lambda entry: entry.summary.at,
        )
        if not (ids or last or everything):
            _list(history, several=len(stores) > 1)
            if history and not only_list:
                out.talk("Nothing was undone. Give an ID or its beginning, --last or --all.")
            return
        plans = _plans(_chosen(history, ids, last=last))
        results: list[Undone] = []
        if not dry_run:
            _ask(plans, verbose=verbose, yes=yes)
            for _, plan in plans:
                results += plan.execute(progress=bars)
        _show(plans, results, verbose=verbose, dry_run=dry_run)
        if not all(result.is_undone for result in results):
            ctx.exit(FAILED)


def _list(history: list[Entry], *, several: bool) -> None:
    out.show(
        human=lambda: _show_history(history, several=several),
        document=lambda: {"history": [_entry(entry) for entry in history]},
        ids=lambda: [entry.summary.id for entry in history],
    )


def _entry(entry: Entry) -> dict[str, object]:
    return {**picked(entry.summary, "id label at changes size ops"), "root": entry.store.root}


def _show_history(history: list[Entry], *, several: bool) -> None:
    if not history:
        out.line("There is nothing to undo.")
        return
    columns = ("ID", "WHEN", "FILES>", "SIZE>", "WHAT~", *["VOLUME~"] * several)
    rows = (
        [
            each.id,
            clock(each.at),
            f"{each.changes:,}",
            format_size(each.size),
            each.label,
            *([str(entry.store.root)] if several else []),
        ]
        for entry in history
        for each in [entry.summary]
    )
    out.table(columns, rows)


def _chosen(history: list[Entry], ids: tuple[str, ...], *, last: bool) -> list[Entry]:
    if not history:
        raise NothingToUndoError("There is nothing to undo", hint="")
    if last:
        return history[-1:]
    meant = {entry.summary.id: entry for entry in (_meant(history, each) for each in ids)}
    return list(meant.values()) if ids else history


def _meant(history: list[Entry], text: str) -> Entry:
    """Return the entry whose id is this, or the only one whose id begins so."""
    found = [entry for entry in history if text and entry.summary.id.startswith(text)]
    exact = [entry for entry in found if entry.summary.id == text]
    if len(exact or found) == 1:
        return (exact or found)[0]
    if not found:
        raise NothingToUndoError(f"There is no change {text} to undo", batch=text)
    ids = ", ".join(entry.summary.id for entry in found)
    raise BadValueError(f"{text!r} is the beginning of several IDs", hint=f"Write one of {ids}.")


def _plans(chosen: Iterable[Entry]) -> list[tuple[Store, UndoPlan]]:
    batches: dict[Store, list[str]] = {}
    for entry in chosen:
        batches.setdefault(entry.store, []).append(entry.summary.id)
    return [(store, store.plan_undo(ids)) for store, ids in batches.items()]


def _changes(plans: list[tuple[Store, UndoPlan]]) -> list[Change]:
    return [change for _, plan in plans for change in plan.changes]


def _ask(plans: list[tuple[Store, UndoPlan]], *, verbose: bool, yes: bool) -> None:
    if not yes and out.mode == "human":
        _show_plan(plans, verbose=verbose, as_talk=True)
    out.confirm(f"Undo {_summary(plans)}?", yes=yes)


def _summary(plans: list[tuple[Store, UndoPlan]]) -> str:
    needed = sum(plan.needed_size for _, plan in plans)
    room = f" (needs {format_size(needed)})" if needed else ""
    return f"{counted(len(_changes(plans)), 'change')}{room}"


def _show_plan(plans: list[tuple[Store, UndoPlan]], *, verbose: bool, as_talk: bool) -> None:
    changes = _changes(plans)
    shown = changes if verbose else changes[:_MOST_SHOWN]
    columns = ("WHAT", "SIZE>", "FILE~")
    rows = ([_word(c), format_size(c.size), str(c.path)] for c in shown)
    out.table(columns, rows, as_talk=as_talk)
    if len(changes) > len(shown):
        out.line(f"... and {len(changes) - len(shown):,} more; -v shows all", as_talk=as_talk)


def _show(
    plans: list[tuple[Store, UndoPlan]], results: list[Undone], *, verbose: bool, dry_run: bool
) -> None:
    for each in results:
        if not each.is_undone:
            out.warn(f"{each.change.path}: {each.note}")
    out.show(
        human=lambda: _say(plans, results, verbose=verbose, dry_run=dry_run),
        document=lambda: _document(plans, results, dry_run=dry_run),
        ids=lambda: dict.fromkeys(change.batch for change in _changes(plans)),
    )


def _say(
    plans: list[tuple[Store, UndoPlan]], results: list[Undone], *, verbose: bool, dry_run: bool
) -> None:
    if dry_run:
        _show_plan(plans, verbose=verbose, as_talk=False)
        out.line(f"Would undo {_summary(plans)}.")
        return
    undone = sum(each.is_undone for each in results)
    gone = sum(each.outcome == "gone" for each in results)
    aside = f" ({gone:,} of files that were deleted since)" if gone else ""
    out.line(f"Undid {undone:,} of {counted(len(results), 'change')}{aside}.")


def _document(
    plans: list[tuple[Store, UndoPlan]], results: list[Undone], *, dry_run: bool
) -> dict[str, object]:
    outcomes = {(each.change.batch, each.change.n): each for each in results}
    changes = []
    for change in _changes(plans):
        outcome = outcomes.get((change.batch, change.n))
        changes.append(
            {
                "id": change.batch,
                **picked(change, "op path digest size"),
                "is_undone": outcome is not None and outcome.is_undone,
                "outcome": None if outcome is None else outcome.outcome,
                "note": "" if outcome is None else outcome.note,
            }
        )
    return {
        "dry_run": dry_run,
        "changes": changes,
        "needed_size": sum(plan.needed_size for _, plan in plans),
        "undone": sum(each.is_undone for each in results),
    }
