"""Giving files their own bytes back without the journal: `separate`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import click

from smartcache.cli._command import FILE, asks, command
from smartcache.cli._failures import FAILED
from smartcache.cli._json import picked
from smartcache.cli._output import out
from smartcache.cli._progress import bars
from smartcache.cli._session import Session
from smartcache.cli._words import counted
from smartcache.cli.prune import prunable, say_prunable
from smartcache.errors import StoreError
from smartcache.sizes import format_size

if TYPE_CHECKING:
    from pathlib import Path

    from smartcache.store.changes.separate import Separated, SeparatePlan
    from smartcache.store.store import Store

_MOST_SHOWN = 20
_COLUMNS = ("WHAT", "SIZE>", "FILE~")
_WORDS = {"copy": "give own bytes", "mode": "make writable"}


@command(
    "separate",
    examples=(
        ("smartcache separate ~/models/a.safetensors", "a file of its own, to be edited"),
        ("smartcache separate -r ~/ComfyUI/models --dry-run", "which files share, and the room"),
        ("smartcache separate -r ~/ComfyUI/models -y", "all files in a folder"),
    ),
)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=FILE)
@click.option("-r", "--recursive", is_flag=True, help="Separate all files in folders too.")
@click.option("-v", "--verbose", is_flag=True, help="Show every file of a long plan.")
@asks
@click.pass_context
def separate_command(
    ctx: click.Context,
    *,
    paths: tuple[Path, ...],
    recursive: bool,
    verbose: bool,
    dry_run: bool,
    yes: bool,
) -> None:
    """Give files their own bytes and write permission back.

    A hard link becomes a file of its own: a verified copy takes its place, with the same
    permissions, time and attributes. A read-only file gets its write permission back. Needs neither
    the journal nor the store: it also helps when the store was deleted. If the store is there,
    'smartcache undo' brings back more: the time and group each file had.
    """
    from smartcache.store.changes.separate import plan_separate

    with _stores(ctx.ensure_object(Session)) as stores:
        volumes = [store.volume for store in stores]
        plan = plan_separate(paths, volumes, recursive=recursive)
        for path, reason in plan.skipped:
            out.warn(f"{path} stays as it is: {reason}")
        results: list[Separated] = []
        held = 0
        if plan.files and not dry_run:
            if not yes and out.mode == "human":
                _show(plan, verbose=verbose, as_talk=True)
            out.confirm(f"Separate {_summary(plan)}?", yes=yes)
            results = plan.execute(bars)
            held = prunable(stores)
    failed = [each for each in results if each.problem]
    for each in failed:
        out.warn(f"{each.file.path} stays as it is: {each.problem}")
    out.show(
        human=lambda: _say(plan, results, verbose=verbose, dry_run=dry_run),
        document=lambda: _document(plan, results, dry_run=dry_run),
        ids=lambda: [file.path for file in plan.files],
    )
    if out.mode == "human":
        say_prunable(held)
    if failed or plan.skipped:
        ctx.exit(FAILED)


@contextmanager
def _stores(session: Session) -> Iterator[list[Store]]:
    """Open the stores, to tell them; one that cannot be opened is no obstacle."""
    with ExitStack() as stack:
        stores: list[Store] = []
        try:
            stores = stack.enter_context(session.stores(says_none=False))
        except StoreError as error:
            out.warn(f"{error.message}; the files are separated without telling the store")
        yield stores


def _summary(plan: SeparatePlan) -> str:
    room = f" (needs {format_size(plan.needed_size)})" if plan.needed_size else ""
    return f"{counted(len(plan.files), 'file')}{room}"


def _show(plan: SeparatePlan, *, verbose: bool, as_talk: bool) -> None:
    shown = plan.files if verbose else plan.files[:_MOST_SHOWN]
    rows = ([_WORDS[file.what], format_size(file.size), str(file.path)] for file in shown)
    out.table(_COLUMNS, rows, as_talk=as_talk)
    if len(plan.files) > len(shown):
        out.line(f"... and {len(plan.files) - len(shown):,} more; -v shows all", as_talk=as_talk)


def _say(plan: SeparatePlan, results: list[Separated], *, verbose: bool, dry_run: bool) -> None:
    if not plan.files:
        out.line("Nothing to separate: no file shares its bytes, and all can be written.")
    elif dry_run:
        _show(plan, verbose=verbose, as_talk=False)
        out.line(f"Would separate {_summary(plan)}.")
    else:
        done = [each for each in results if not each.problem]
        of = f" of {len(results):,}" if len(done) < len(results) else ""
        out.line(f"Separated {len(done):,}{of} {'file' if len(results) == 1 else 'files'}.")


def _document(plan: SeparatePlan, results: list[Separated], *, dry_run: bool) -> dict[str, object]:
    problems = {each.file.path: each.problem for each in results}
    return {
        "dry_run": dry_run,
        "files": [
            {
                **picked(file, "path what size"),
                "is_separated": problems.get(file.path) == "",
                "problem": problems.get(file.path, ""),
            }
            for file in plan.files
        ],
        "needed_size": plan.needed_size,
        "separated": sum(not each.problem for each in results),
        "skipped": [{"path": path, "reason": reason} for path, reason in plan.skipped],
    }
