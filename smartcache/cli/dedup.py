"""Replacing duplicates by links: `dedup`."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import click

from smartcache.cli._command import asks, command, same_options
from smartcache.cli._failures import FAILED, BadUsageError
from smartcache.cli._folders import (
    FILES,
    chooses_files,
    existing,
    group_document,
    heading,
    in_quotes,
    remembered,
    show_blocks,
    warn_of,
)
from smartcache.cli._json import picked
from smartcache.cli._output import out
from smartcache.cli._progress import bars
from smartcache.cli._session import Session
from smartcache.cli._words import counted
from smartcache.sizes import format_size

if TYPE_CHECKING:
    from pathlib import Path

    from smartcache.folders.checks import Skip
    from smartcache.folders.dedup import DedupPlan, DedupResult, GroupPlan
    from smartcache.folders.scan import Scan
    from smartcache.report.naming import Naming
    from smartcache.store.store import Store
    from smartcache.store.userfile import Allowance

_MOST_SHOWN = 5
_ALLOWANCES: tuple[Allowance, ...] = ("group", "mode", "xattr")
_LEAVE = "Leave one out."
_CHOICE = ("NO>", "FREES>", "FILES>", "WHAT~")
_SKIPPED = ("", "~")


@command(
    "dedup",
    examples=(
        ("smartcache dedup --dry-run", "what would be done, and what it would free"),
        ("smartcache dedup", "shows the plan, asks, does it"),
        ("smartcache dedup --interactive", "choose which groups"),
        ("smartcache dedup ~/ComfyUI ~/stable-diffusion-webui", "these folders"),
        ("smartcache dedup --program ollama --program 'lm studio' -y", "without asking"),
        ("smartcache undo --last", "take it back"),
    ),
)
@chooses_files
@click.option(
    "--keep-writable/--read-only", default=None,
    help="Share by reflinks, which leave files writable, and skip where there are none; or by hard "
    "links, which make them read-only.  [default: as set, else --read-only]",
)  # fmt: skip
@click.option(
    "--allow", type=click.Choice(_ALLOWANCES), multiple=True,
    help="Link files though their group, mode or extended attributes differ; of modes the "
    "narrowest is kept. Repeatable.",
)  # fmt: skip
@click.option("-i", "--interactive", is_flag=True, help="Choose which groups to replace.")
@click.option("-v", "--verbose", is_flag=True, help="Show every group and every skipped file.")
@asks
@click.pass_context
def dedup_command(
    ctx: click.Context,
    *,
    folders: tuple[Path, ...],
    min_size: int,
    exclude: tuple[str, ...],
    any_file: bool,
    only: tuple[str, ...],
    keep_writable: bool | None,
    allow: tuple[Allowance, ...],
    interactive: bool,
    verbose: bool,
    dry_run: bool,
    yes: bool,
) -> None:
    """Replace duplicate files by links, in place, undoably.

    Every path stays, with the same bytes: several paths share one file on disk. Nothing is moved or
    deleted, and 'smartcache undo' gives each file its own bytes back. Only files proven equal in
    full are replaced, and never one that somebody has open for writing. With -q, prints the id for
    'smartcache undo'.
    """
    from smartcache.folders.dedup import plan_dedup
    from smartcache.folders.scan import folders_to_scan, scan_folders

    if interactive and (yes or dry_run or out.mode != "human"):
        raise BadUsageError("--interactive asks, so it needs no -y, -n, --json or -q", hint=_LEAVE)
    session = ctx.ensure_object(Session)
    given = existing(folders)
    again = in_quotes(same_options("dedup", ctx, *FILES, "keep_writable", "allow"))
    session.how_far = remembered
    with session.store(create=True, only_look=dry_run) as store:
        chosen, warnings = folders_to_scan(store, given, only)
        found = scan_folders(
            store, chosen, min_size=min_size, exclude=exclude, any_file=any_file, progress=bars
        )
        planned = partial(
            plan_dedup, store, found, keep_writable=keep_writable, allow=frozenset(allow)
        )
        plan = planned()
        warn_of([*warnings, *plan.warnings], found.problems)
        if interactive and plan.files:
            plan = planned(digests=_chosen(plan))
        result: DedupResult | None = None
        if plan.files and not dry_run:
            if not yes and out.mode == "human":
                _show_plan(plan, verbose=verbose, as_talk=True)
            out.confirm(_question(plan), yes=yes)
            result = _execute(session, store, plan, again)
        out.show(
            human=lambda: _say(found, plan, result, again, verbose=verbose),
            document=lambda: _document(found, plan, result, dry_run=dry_run),
            ids=lambda: () if result is None else result.batches,
        )
        if dry_run and not session.has_store():
            out.talk(
                "Without a store, what was read is not remembered: 'smartcache scan' makes one."
            )
    if result is not None and not (result.is_complete or result.replaced):
        ctx.exit(FAILED)


def _chosen(plan: DedupPlan) -> list[str]:
    """Ask which groups are to be replaced; return their digests."""
    from smartcache.report.naming import Naming

    by_digest: dict[str, list[GroupPlan]] = {}
    for each in plan.groups:
        by_digest.setdefault(each.group.digest, []).append(each)
    naming = Naming()
    rows = [
        [
            str(number),
            format_size(sum(each.freed_size for each in same)),
            f"{sum(len(each.replaced) for each in same):,}",
            str(naming.of(same[0].group)),
        ]
        for number, same in enumerate(by_digest.values(), 1)
    ]
    out.table(_CHOICE, rows, as_talk=True)
    while True:
        answer = out.ask("Which groups? (1-3,7 / all / none)")
        numbers = numbers_in(answer, len(by_digest))
        if numbers is not None:
            break
        out.talk(f"{answer!r} is not a choice; numbers are from 1 to {len(by_digest)}.")
    if not numbers:
        raise click.Abort
    return [digest for number, digest in enumerate(by_digest, 1) if number in numbers]


def numbers_in(answer: str, most: int) -> set[int] | None:
    """Return the numbers that an answer such as "1-3,7", "all" or "none" means; None: nothing."""
    word = answer.strip().casefold()
    if word in ("all", "none", ""):
        return set(range(1, most + 1)) if word == "all" else set()
    found: set[int] = set()
    for part in word.replace(",", " ").split():
        first, dash, last = part.partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)):
            return None
        begin, end = int(first), int(last or first)
        if not 1 <= begin <= end <= most:
            return None
        found.update(range(begin, end + 1))
    return found


def _question(plan: DedupPlan) -> str:
    size = format_size(plan.freed_size)
    return f"Replace {counted(plan.files, 'duplicate file')}, freeing {size}?"


def _execute(session: Session, store: Store, plan: DedupPlan, again: str) -> DedupResult:
    with session.batch(store, "dedup", goes_on=f"{again} goes on") as batch:
        return plan.execute(batch=batch, progress=bars)


# the plan


def _show_plan(plan: DedupPlan, *, verbose: bool, as_talk: bool) -> None:
    from smartcache.report.naming import Naming

    groups = plan.groups if verbose else plan.groups[:_MOST_SHOWN]
    naming = Naming()
    blocks = [
        (heading(each.group, 1 + len(each.replaced), each.freed_size, naming), _rows(each))
        for each in groups
    ]
    show_blocks(blocks, every_path=verbose, as_talk=as_talk)
    if len(plan.groups) > len(groups):
        more = counted(len(plan.groups) - len(groups), "smaller group")
        out.line(f"... and {more}; -v shows all", as_talk=as_talk)
    out.line(as_talk=as_talk)
    _show_skipped(plan.skipped, verbose=verbose, as_talk=as_talk)
    for text in _terms(plan):
        out.paragraph(text, indent="  ", as_talk=as_talk)


def _rows(plan: GroupPlan) -> list[list[str]]:
    """Return the paths of a group with what becomes of each, the survivor first."""
    from smartcache.report.naming import from_home

    names = [name for copy in plan.group.copies for name in copy.names]
    programs = {name.path: name.folder.program for name in names}
    become = "link" if plan.kind == "hardlink" else "reflink"
    roles = [("stays", plan.survivor), *((become, path) for path in plan.replaced)]
    roles += [("left alone", each.path) for each in plan.skipped]
    return [[role, programs.get(path, ""), from_home(path)] for role, path in roles]


def _terms(plan: DedupPlan) -> list[str]:
    """Return what the user should know before saying yes: one sentence or two on each matter."""
    terms = [f"{why[:1].upper()}{why[1:]} (on {where})." for where, why in plan.kinds.items()]
    if plan.read_only:
        become = "file becomes" if plan.read_only == 1 else "files become"
        terms.append(
            f"{plan.read_only:,} {become} read-only: programs load, rename and delete them as "
            "before, but cannot write into bytes that others share."
        )
    terms += [
        f"{counted(number, 'file')} {'becomes' if number == 1 else 'become'} {what}."
        for what, number in plan.permissions.items()
    ]
    terms += [f"A pool will be made at {path}." for path in plan.new_pools]
    if any(each.kind == "reflink" for each in plan.groups):
        terms.append(
            "A file that shares blocks keeps its date and mode; a program that writes to it gets "
            "blocks of its own. There is nothing to undo."
        )
    if any(each.kind == "hardlink" for each in plan.groups):
        terms.append(
            "Every path and every byte stays; a link shows the date of the file it shares. "
            "'smartcache undo' gives each file its own bytes, date and mode back."
        )
    return terms


def _show_skipped(skipped: tuple[Skip, ...], *, verbose: bool, as_talk: bool) -> None:
    from smartcache.report.naming import from_home, option_words

    if not skipped:
        return
    out.heading(f"Left alone: {counted(len(skipped), 'file')}", as_talk=as_talk)
    if verbose:
        rows = [[f"  {each.reason}", from_home(each.path)] for each in skipped]
        out.table(_SKIPPED, rows, as_talk=as_talk)
        return
    for (reason, option), number in Counter(
        (each.reason, each.option) for each in skipped
    ).most_common():
        included = (
            ""
            if option is None
            else f"; {option_words([option])} includes {'it' if number == 1 else 'them'}"
        )
        out.line(f"  {reason}: {counted(number, 'file')}{included}", as_talk=as_talk)


# what became of it


def _say(
    found: Scan, plan: DedupPlan, result: DedupResult | None, again: str, *, verbose: bool
) -> None:
    if result is not None:
        _say_result(plan, result, again, verbose=verbose)
        return
    if not plan.files:
        _show_skipped(plan.skipped, verbose=verbose, as_talk=False)
        files = counted(found.total.files, "file")
        out.line(f"There is nothing to replace in {files}. Nothing was changed.")
        return
    _show_plan(plan, verbose=verbose, as_talk=False)
    files, size = counted(plan.files, "duplicate file"), format_size(plan.freed_size)
    out.line(f"Would replace {files} and free {size}. Nothing was changed.")


def _say_result(plan: DedupPlan, result: DedupResult, again: str, *, verbose: bool) -> None:
    from smartcache.folders.dedup import OTHER_BYTES

    _show_skipped(result.skipped, verbose=verbose, as_talk=True)
    for each in result.skipped:
        if each.reason == OTHER_BYTES:
            out.warn(f"{each.path} {OTHER_BYTES}; if nobody wrote it, its disk may be failing.")
    at_most = "at most " if result.freed_at_most else ""
    freed = f"freed {at_most}{format_size(result.freed)}"
    out.line(f"Replaced {counted(result.replaced, 'duplicate file')}, {freed}.")
    if not result.is_complete:
        out.talk(f"Not everything was done; {again} goes on.")
    if result.batches:
        files = counted(result.changed, "file")
        out.talk(f"To take it back ({files} changed): smartcache undo {' '.join(result.batches)}")
    if result.batches and any(each.kind == "hardlink" for each in plan.groups):
        out.talk(
            "Deleting a model in one program now frees its bytes only when its last name is gone "
            "and 'smartcache prune' has run."
        )


def _document(
    found: Scan, plan: DedupPlan, result: DedupResult | None, *, dry_run: bool
) -> dict[str, object]:
    from smartcache.report.naming import Naming

    naming = Naming()
    skipped = plan.skipped if result is None else result.skipped
    return {
        "dry_run": dry_run,
        "groups": [_group_document(each, naming) for each in plan.groups],
        "files": plan.files,
        "planned_size": plan.freed_size,
        **picked(plan, "kinds new_pools read_only permissions"),
        "skipped": skipped,
        "busy": found.busy,
        "problems": found.problems,
        "warnings": plan.warnings,
        "replaced": 0 if result is None else result.replaced,
        "changed": 0 if result is None else result.changed,
        "freed_size": 0 if result is None else result.freed,
        "is_at_most": result is not None and result.freed_at_most,
        "batches": () if result is None else result.batches,
        "is_complete": result is None or result.is_complete,
    }


def _group_document(each: GroupPlan, naming: Naming) -> dict[str, object]:
    document = picked(each, "kind survivor replaced skipped freed_size")
    return {**group_document(each.group, naming), **document}
