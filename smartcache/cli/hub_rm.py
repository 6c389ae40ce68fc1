"""Removing from HF caches what is chosen or what nothing asks for: `hub rm`, `hub prune`."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import click

from smartcache.cli._command import age, asks, command
from smartcache.cli._failures import FAILED
from smartcache.cli._hub import cache_dirs_option, chosen, hf_caches
from smartcache.cli._output import out
from smartcache.cli._progress import bars
from smartcache.cli._session import Session
from smartcache.cli._words import counted, short
from smartcache.sizes import format_size

if TYPE_CHECKING:
    from pathlib import Path

    from smartcache.hub import Removal, RemovalPlan, RemovalResult

_MOST_SHOWN = 20
_COLUMNS = ("REPO", "WHAT", "SIZE>", "FOLDER~")


@command(
    "rm",
    examples=(
        ("smartcache hub rm org/name --dry-run", "what goes, what that frees, and what stays"),
        ("smartcache hub rm dataset/org/name", "a dataset"),
        ("smartcache hub rm org/name@3f2a91c0", "one revision; a branch or tag will do"),
        ("smartcache hub rm org/name --keep-blobs", "the store keeps the files for later"),
    ),
)
@click.argument("repos", nargs=-1, required=True, metavar="REPO[@REV]...")
@click.option("--keep-blobs", is_flag=True, help="Let the store keep its blobs until prune.")
@cache_dirs_option
@asks
@click.pass_context
def rm_command(
    ctx: click.Context,
    *,
    repos: tuple[str, ...],
    keep_blobs: bool,
    cache_dirs: tuple[Path, ...],
    dry_run: bool,
    yes: bool,
) -> None:
    """Remove repos or revisions, and say what that really frees.

    Only files whose last name is removed free their disk space: what another repo, a folder or a
    pin also has stays. Their blobs in the store go too, where nothing else has them. A repo
    is removed with its last revision. There is no undo; you would have to download it again.
    """
    from smartcache.hub import Census, plan_removal, scan_caches

    session = ctx.ensure_object(Session)
    with session.store_as_it_is(says_none=False) as store:
        census = Census(scan_caches(hf_caches(cache_dirs, store)), store)
        plan = plan_removal(census, chosen(census.repos, repos), keep_blobs=keep_blobs)
        _carry_out(ctx, plan, dry_run=dry_run, yes=yes)


@command(
    "prune",
    examples=(
        ("smartcache hub prune --dry-run", "what would go, and what that frees"),
        ("smartcache hub prune --unused-for 30d -y", "from a timer, without asking"),
        ("smartcache hub prune --cache-dir /mnt/hf", "one HF cache"),
    ),
)
@click.option("--unused-for", type=age, metavar="AGE", help="Only revisions not read since.")
@click.option("--keep-blobs", is_flag=True, help="Let the store keep its blobs until prune.")
@cache_dirs_option
@asks
@click.pass_context
def prune_command(
    ctx: click.Context,
    *,
    unused_for: timedelta | None,
    keep_blobs: bool,
    cache_dirs: tuple[Path, ...],
    dry_run: bool,
    yes: bool,
) -> None:
    """Remove revisions that no ref points to, and partial downloads.

    When a branch moves on, the revision it pointed to before stays in the HF cache. So do the files
    of downloads that were killed. Files that other revisions need stay. A revision that was
    downloaded by its commit has no ref either: the plan names it. This cannot be undone, only
    downloaded again.
    """
    from smartcache.hub import Census, plan_cache_prune, scan_caches

    with ctx.ensure_object(Session).store_as_it_is(says_none=False) as store:
        census = Census(scan_caches(hf_caches(cache_dirs, store)), store)
        plan = plan_cache_prune(
            census, unused_for=unused_for or timedelta(0), keep_blobs=keep_blobs
        )
        _carry_out(ctx, plan, dry_run=dry_run, yes=yes)


def _carry_out(ctx: click.Context, plan: RemovalPlan, *, dry_run: bool, yes: bool) -> None:
    for warning in plan.warnings:
        out.warn(warning)
    result: RemovalResult | None = None
    if plan.removals and not dry_run:
        if not yes and out.mode == "human":
            _show(plan, as_talk=True)
        freed = format_size(plan.freed_size)
        out.confirm(f"Remove {_what(plan)} for good and free {freed}?", yes=yes)
        result = plan.execute(bars)
    out.show(
        human=lambda: _say(plan, result),
        document=lambda: _document(plan, result, dry_run=dry_run),
        ids=lambda: [name for each in plan.removals for name in _ids(each)],
    )
    if result is not None and result.failures:
        ctx.exit(FAILED)


def _what(plan: RemovalPlan) -> str:
    """Return "1 repo, 3 revisions and 2 partial downloads"."""
    repos = sum(each.is_whole for each in plan.removals)
    revisions = sum(len(each.commits) for each in plan.removals if not each.is_whole)
    partials = sum(len(each.partials) for each in plan.removals if not each.is_whole)
    counts = ((repos, "repo"), (revisions, "revision"), (partials, "partial download"))
    *first, last = [counted(number, noun) for number, noun in counts if number]
    return f"{', '.join(first)} and {last}" if first else last


def _ids(each: Removal) -> list[str]:
    """Return what goes: a repo, revisions as `hub rm` takes them, or files."""
    repo = str(each.repo.repo)
    if each.is_whole:
        return [repo]
    return [*(f"{repo}@{commit}" for commit in each.commits), *each.partials]


def _show(plan: RemovalPlan, *, as_talk: bool) -> None:
    rows = (
        [
            str(each.repo.repo),
            _revisions(each),
            format_size(each.size + sum(each.repo.names[name].size for name in each.partials)),
            str(each.repo.folder),
        ]
        for each in plan.removals
    )
    out.table(_COLUMNS, rows, as_talk=as_talk)
    blobs = len(plan.digests)
    if blobs:
        files, more = format_size(plan.files_size), format_size(plan.blobs_size)
        text = f"Frees {files} with the files, {more} with {counted(blobs, 'blob')} of the store."
        out.line(text, as_talk=as_talk)
    _say_kept(plan, as_talk=as_talk)


def _revisions(each: Removal) -> str:
    words = ["all"] if each.is_whole else [short(commit) for commit in each.commits]
    if each.partials and not each.is_whole:
        words.append(counted(len(each.partials), "partial download"))
    return ", ".join(words)


def _say_kept(plan: RemovalPlan, *, as_talk: bool) -> None:
    kept = sorted(plan.kept, key=lambda each: -each.size)
    for each in kept[:_MOST_SHOWN]:
        out.line(f"{format_size(each.size)} stay: held by {each.by}.", as_talk=as_talk)
    if kept[_MOST_SHOWN:]:
        rest = format_size(sum(each.size for each in kept[_MOST_SHOWN:]))
        more = len(kept) - _MOST_SHOWN
        out.line(f"... and {rest} held by {more} others.", as_talk=as_talk)


def _say(plan: RemovalPlan, result: RemovalResult | None) -> None:
    if not plan.removals:
        out.line("Nothing to prune: every revision has a ref, and no download is unfinished.")
        return
    if result is None:
        _show(plan, as_talk=False)
        out.line(f"Would remove {_what(plan)} and free {format_size(plan.freed_size)}.")
        return
    for path, reason in result.failures:
        out.warn(f"{path} was not removed: {reason}")
    verb = "Removed" if not result.failures else "Partly removed"
    out.line(f"{verb} {_what(plan)}, freed {format_size(result.freed_size)}.")
    _say_kept(plan, as_talk=False)


def _document(
    plan: RemovalPlan, result: RemovalResult | None, *, dry_run: bool
) -> dict[str, object]:
    return {
        "dry_run": dry_run,
        "removals": [
            {
                "id": str(each.repo.repo),
                "revisions": each.commits,
                "is_whole": each.is_whole,
                "partial_downloads": each.partials,
                "size": each.size,
                "path": each.repo.folder,
            }
            for each in plan.removals
        ],
        "planned_size": plan.freed_size,
        "planned_files_size": plan.files_size,
        "planned_blobs_size": plan.blobs_size,
        "planned_blobs": len(plan.digests),
        "kept": plan.kept,
        "removed": 0 if result is None else result.removed,
        "freed_size": 0 if result is None else result.freed_size,
        "blobs_removed": 0 if result is None else result.blobs_removed,
        "failures": []
        if result is None
        else [{"path": path, "reason": reason} for path, reason in result.failures],
        "warnings": plan.warnings,
    }
