"""Taking changes back: `undo`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from smartcache.cli._command import FILE, asks, command
from smartcache.cli._failures import FAILED, BadUsageError, BadValueError
from smartcache.cli._json import picked
from smartcache.cli._output import out
from smartcache.cli._progress import bars
from smartcache.cli._session import Session
from smartcache.cli._words import clock, counted
from smartcache.errors import NothingToUndoError, StoreError
from smartcache.sizes import format_size

if TYPE_CHECKING:
    from pathlib import Path

    from smartcache.store.journal import BatchSummary, Change, How
    from smartcache.store.store import Store
    from smartcache.store.undo import Undone, UndoPlan

_MOST_SHOWN = 20
_HISTORY = ("ID", "WHEN", "FILES>", "SIZE>", "WHAT~")
_COLUMNS = ("WHAT", "SIZE>", "FILE~")
_OWN = "give own bytes"
_WORDS: dict[How, str] = {
    "become": "make writable again",
    "exchange": _OWN,
    "give": _OWN,
    "create": "remove the link",
    "copy": "remove the copy",
}


@command(
    "undo",
    examples=(
        ("smartcache undo --list", "what can be undone"),
        ("smartcache undo --last", "the last command"),
        ("smartcache undo 9f3a61c2 --dry-run", "what undoing one command would do"),
        ("smartcache undo ~/models/a.safetensors", "one file, to be edited"),
        ("smartcache undo -r ~/ComfyUI/models", "all files in a folder"),
        ("smartcache undo --all", "every change to every file"),
    ),
)
@click.argument("words", metavar="[ID|PATH]...", nargs=-1, type=FILE)
@click.option("-r", "--recursive", is_flag=True, help="Undo what was done to all files in folders.")
@click.option("--last", is_flag=True, help="Undo the newest entry.")
@click.option("--all", "everything", is_flag=True, help="Undo every entry.")
@click.option("--list", "only_list", is_flag=True, help="List what can be undone.")
@click.option("--forget", is_flag=True, help="Close entries that cannot be finished any more.")
@click.option("-v", "--verbose", is_flag=True, help="Show every file of a long plan.")
@asks
@click.pass_context
def undo_command(
    ctx: click.Context,
    *,
    words: tuple[Path, ...],
    recursive: bool,
    last: bool,
    everything: bool,
    only_list: bool,
    forget: bool,
    verbose: bool,
    dry_run: bool,
    yes: bool,
) -> None:
    """Give files back what they had before smartcache changed them.

    Own bytes, mode, group and time. Of an ID its beginning is enough; without an argument, lists
    what can be undone. PATH is a file that shares its bytes with others, also one that was renamed,
    or that smartcache does not know any more: it becomes a file of its own that can be written. A
    file that somebody else changed since is left alone, with the reason said.
    """
    if sum((bool(words), last, everything, only_list, forget)) > 1:
        message = "IDs or paths, --last, --all, --list and --forget exclude each other"
        raise BadUsageError(message, hint="Give one.")
    if recursive and not words:
        raise BadUsageError("--recursive needs a folder", hint="Name it: 'smartcache undo -r DIR'.")
    session = ctx.ensure_object(Session)
    with session.store(create=True, only_look=dry_run or not session.has_store()) as store:
        history = store.history()
        if forget:
            _forget(store, dry_run=dry_run, yes=yes)
        elif words or last or everything:
            ids = _ids(history, words)
            plan = _plan(store, history, words, ids, last=last, recursive=recursive)
            rows = _rows(plan, is_by_path=bool(words) and not ids)
            if not _undo(plan, rows, verbose=verbose, dry_run=dry_run, yes=yes):
                ctx.exit(FAILED)
        else:
            _list(history)
            if history and not only_list:
                out.talk(
                    "Nothing was undone. Give an ID or its beginning, a file, --last or --all."
                )


def _list(history: list[BatchSummary]) -> None:
    out.show(
        human=lambda: _show_history(history),
        document=lambda: {
            "history": [picked(each, "id label at changes size hows") for each in history]
        },
        ids=lambda: [each.id for each in history],
    )


def _show_history(history: list[BatchSummary]) -> None:
    if not history:
        out.line("There is nothing to undo.")
        return
    rows = (
        [each.id, clock(each.at), f"{each.changes:,}", format_size(each.size), each.label]
        for each in history
    )
    out.table(_HISTORY, rows)


def _forget(store: Store, *, dry_run: bool, yes: bool) -> None:
    """Close entries whose files cannot be looked at: they are not finished or undone any more."""
    unfinished = store.unfinished()
    forgotten = 0
    if unfinished and not dry_run:
        if not yes and out.mode == "human":
            for text in unfinished:
                out.talk(text)
        entries = "1 entry" if len(unfinished) == 1 else f"{len(unfinished):,} entries"
        out.confirm(f"Close {entries}? They can then be neither finished nor undone.", yes=yes)
        forgotten = store.forget_unfinished()
    out.show(
        human=lambda: _say_forgotten(unfinished, forgotten, dry_run=dry_run),
        document=lambda: {"dry_run": dry_run, "unfinished": unfinished, "forgotten": forgotten},
        ids=lambda: unfinished,
    )


def _say_forgotten(unfinished: list[str], forgotten: int, *, dry_run: bool) -> None:
    if not unfinished:
        out.line("Nothing is unfinished.")
    elif dry_run:
        for text in unfinished:
            out.line(text)
        out.line("Would close what is listed.")
    else:
        out.line(f"Closed {forgotten:,} {'entry' if forgotten == 1 else 'entries'}.")


def _ids(history: list[BatchSummary], words: tuple[Path, ...]) -> list[str]:
    """Return the words that are IDs: those with which one in the history begins."""
    return [text for text in map(str, words) if any(each.id.startswith(text) for each in history)]


def _plan(
    store: Store,
    history: list[BatchSummary],
    words: tuple[Path, ...],
    ids: list[str],
    *,
    last: bool,
    recursive: bool,
) -> UndoPlan:
    if len(ids) == len(words):
        batches = list(dict.fromkeys(_meant(history, text) for text in ids))
        return store.plan_undo(batches or None, last=last)
    if ids:
        hint = f"Write a file in this folder as './{ids[0]}'."
        raise BadUsageError("IDs and paths exclude each other", hint=hint)
    for word in words:
        if not os.path.lexists(word) and not str(word).strip("0123456789abcdef"):
            raise NothingToUndoError(f"There is no change {word} to undo", batch=str(word))
        if not recursive and os.path.isdir(word):
            raise StoreError(f"{word} is a directory", hint="Take the files in it with -r.")
        os.lstat(word)
    return store.plan_undo(paths=words, recursive=recursive)


def _meant(history: list[BatchSummary], text: str) -> str:
    """Return the id that is this, or the only one that begins so."""
    found = [each.id for each in history if each.id.startswith(text)]
    if text in found or len(found) == 1:
        return text if text in found else found[0]
    hint = f"Write one of {', '.join(found)}."
    raise BadValueError(f"{text!r} is the beginning of several IDs", hint=hint)


def _rows(plan: UndoPlan, *, is_by_path: bool) -> list[list[str]]:
    """Return what would become of each file; one that is named by its path always stays there."""
    rows = [
        [_OWN if is_by_path and each.how != "become" else _WORDS[each.how],
         format_size(each.size), str(each.path)]
        for each in plan.changes
    ]  # fmt: skip
    return rows + [[_OWN, "-", str(path)] for path in plan.files]


def _undo(
    plan: UndoPlan, rows: list[list[str]], *, verbose: bool, dry_run: bool, yes: bool
) -> bool:
    """Show a plan and carry it out; say whether all of it was done."""
    for path, reason in plan.skipped:
        out.warn(f"{path} stays as it is: {reason}")
    for warning in plan.warnings:
        out.warn(warning)
    room = f" (needs {format_size(plan.needed_size)})" if plan.needed_size else ""
    what = f"{counted(len(rows), 'change')}{room}"
    results: list[Undone] = []
    if rows and not dry_run:
        if not yes and out.mode == "human":
            _show_plan(rows, verbose=verbose, as_talk=True)
        out.confirm(f"Undo {what}?", yes=yes)
        results = plan.execute(progress=bars)
    for each in results:
        if not each.is_undone and (text := f"{each.path}: {each.note}") not in plan.warnings:
            out.warn(text)

    def say() -> None:
        if not rows:
            out.line("Nothing to undo: no file shares its bytes, and all can be written.")
        elif dry_run:
            _show_plan(rows, verbose=verbose, as_talk=False)
            out.line(f"Would undo {what}.")
        else:
            _say_undone(results)

    out.show(
        human=say,
        document=lambda: _document(plan, results, dry_run=dry_run),
        ids=lambda: dict.fromkeys(change.batch for change in plan.changes if change.batch),
    )
    return not plan.skipped and all(each.is_undone for each in results)


def _show_plan(rows: list[list[str]], *, verbose: bool, as_talk: bool) -> None:
    shown = rows if verbose else rows[:_MOST_SHOWN]
    out.table(_COLUMNS, shown, as_talk=as_talk)
    if len(rows) > len(shown):
        out.line(f"... and {len(rows) - len(shown):,} more; -v shows all", as_talk=as_talk)


def _say_undone(results: list[Undone]) -> None:
    undone = sum(each.is_undone for each in results)
    gone = sum(each.outcome == "gone" for each in results)
    aside = f" ({gone:,} of files that were deleted since)" if gone else ""
    out.line(f"Undid {undone:,} of {counted(len(results), 'change')}{aside}.")


def _document(plan: UndoPlan, results: list[Undone], *, dry_run: bool) -> dict[str, object]:
    outcomes = {each.path: each for each in results}
    return {
        "dry_run": dry_run,
        "changes": [_change(change, outcomes.get(change.path)) for change in plan.changes],
        "files": plan.files,
        "skipped": [{"path": path, "reason": reason} for path, reason in plan.skipped],
        **picked(plan, "needed_size warnings"),
        "undone": sum(each.is_undone for each in results),
    }


def _change(change: Change, outcome: Undone | None) -> dict[str, object]:
    return {
        "id": change.batch,
        **picked(change, "how path digest size"),
        "is_undone": outcome is not None and outcome.is_undone,
        "outcome": None if outcome is None else outcome.outcome,
        "note": "" if outcome is None else outcome.note,
    }
