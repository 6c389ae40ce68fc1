"""Removing repos and revisions from HF caches: `hub rm`."""

from __future__ import annotations

from pathlib import Path

import click

from smartcache.cli import _completion
from smartcache.cli._command import asks, command
from smartcache.cli._failures import FAILED
from smartcache.cli._hub import cache_dirs_option, chosen, hf_caches, stores_if_any
from smartcache.cli._output import out
from smartcache.cli._progress import bars
from smartcache.cli._session import Session
from smartcache.cli._tables import Column
from smartcache.cli._words import counted, short
from smartcache.hub.removal import RemovalPlan, plan_removal
from smartcache.hub.removing import Removal, RemovalResult
from smartcache.hub.repos import scan_caches
from smartcache.hub.sharing import Census
from smartcache.sizes import format_size

_MOST_SHOWN = 20
_COLUMNS = (
    Column(title="REPO", gives_way=True),
    Column(title="REVISIONS"),
    Column(title="SIZE", right=True),
    Column(title="FOLDER"),
)


@command(
    "rm",
    examples=(
        ("smartcache hub rm org/name --dry-run", "what goes, what that frees, and what stays"),
        ("smartcache hub rm dataset/org/name", "a dataset"),
        ("smartcache hub rm org/name@3f2a91c0", "one revision; a branch or tag will do"),
        ("smartcache hub rm org/name --keep-blobs", "the store keeps the files for later"),
    ),
)
@click.argument(
    "repos", nargs=-1, required=True, metavar="REPO[@REV]...", shell_complete=_completion.repos
)
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
    """Remove repos or revisions, and say what that truly frees.

    Freed are the disk blocks of files whose last name goes: what another repo, a folder or a pin
    has too, stays. Blobs that the store held for these revisions alone go with them. With its last
    revision a repo goes as a whole. This cannot be undone, only downloaded again.
    """
    session = ctx.ensure_object(Session)
    with stores_if_any(session) as stores:
        census = Census(scan_caches(hf_caches(cache_dirs, stores)), stores)
        plan = plan_removal(census, chosen(census.repos, repos), stores, keep_blobs=keep_blobs)
        for warning in plan.warnings:
            out.warn(warning)
        result: RemovalResult | None = None
        if not dry_run:
            if not yes and out.mode == "human":
                _show(plan, as_talk=True)
            freed = format_size(plan.freed_size)
            out.confirm(f"Remove {_what(plan)} for good and free {freed}?", yes=yes)
            result = plan.execute(bars)
    out.show(
        human=lambda: _say(plan, result),
        document=lambda: _document(plan, result),
        ids=lambda: [name for each in plan.removals for name in _ids(each)],
    )
    if result is not None and result.failures:
        ctx.exit(FAILED)


def _what(plan: RemovalPlan) -> str:
    repos = sum(each.is_whole for each in plan.removals)
    revisions = sum(len(each.commits) for each in plan.removals if not each.is_whole)
    words = [counted(number, noun) for number, noun in ((repos, "repo"), (revisions, "revision"))]
    return " and ".join(text for text in words if not text.startswith("0 "))


def _ids(each: Removal) -> list[str]:
    repo = str(each.repo.repo)
    return [repo] if each.is_whole else [f"{repo}@{commit}" for commit in each.commits]


def _show(plan: RemovalPlan, *, as_talk: bool) -> None:
    rows = (
        [
            str(each.repo.repo),
            "all" if each.is_whole else " ".join(map(short, each.commits)),
            format_size(each.size),
            str(each.repo.folder),
        ]
        for each in plan.removals
    )
    out.table(_COLUMNS, rows, as_talk=as_talk)
    blobs = sum(map(len, plan.digests.values()))
    if blobs:
        files, more = format_size(plan.files_size), format_size(plan.blobs_size)
        out.talk(
            f"Frees {files} with the files, {more} with {counted(blobs, 'blob')} of the store."
        )
    _say_kept(plan)


def _say_kept(plan: RemovalPlan) -> None:
    kept = sorted(plan.kept, key=lambda each: -each.size)
    for each in kept[:_MOST_SHOWN]:
        out.talk(f"{format_size(each.size)} stay: held by {each.by}.")
    if kept[_MOST_SHOWN:]:
        rest = format_size(sum(each.size for each in kept[_MOST_SHOWN:]))
        out.talk(f"... and {rest} held by {len(kept) - _MOST_SHOWN} others.")


def _say(plan: RemovalPlan, result: RemovalResult | None) -> None:
    if result is None:
        _show(plan, as_talk=False)
        out.talk(f"Would remove {_what(plan)} and free {format_size(plan.freed_size)}.")
        return
    for path, reason in result.failures:
        out.warn(f"{path} was not removed: {reason}")
    verb = "Removed" if not result.failures else "Partly removed"
    out.line(f"{verb} {_what(plan)}, freed {format_size(result.freed_size)}.")
    _say_kept(plan)


def _document(plan: RemovalPlan, result: RemovalResult | None) -> dict[str, object]:
    return {
        "dry_run": result is None,
        "removals": [
            {
                "id": str(each.repo.repo),
                "revisions": each.commits,
                "is_whole": each.is_whole,
                "size": each.size,
                "path": each.repo.folder,
            }
            for each in plan.removals
        ],
        "planned_size": plan.freed_size,
        "planned_files_size": plan.files_size,
        "planned_blobs_size": plan.blobs_size,
        "planned_blobs": sum(map(len, plan.digests.values())),
        "kept": plan.kept,
        "removed": 0 if result is None else result.removed,
        "freed_size": 0 if result is None else result.freed_size,
        "blobs_removed": 0 if result is None else result.blobs_removed,
        "failures": []
        if result is None
        else [{"path": path, "reason": reason} for path, reason in result.failures],
        "warnings": plan.warnings,
    }
