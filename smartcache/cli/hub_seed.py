"""Filling huggingface_hub's shared blob store: `hub seed`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from smartcache.cli._command import asks, command
from smartcache.cli._failures import FAILED
from smartcache.cli._hub import cache_dirs_option, hf_caches
from smartcache.cli._output import out
from smartcache.cli._progress import bars
from smartcache.cli._session import Session
from smartcache.cli._tables import Column
from smartcache.cli._words import counted, short
from smartcache.sizes import format_size

if TYPE_CHECKING:
    from pathlib import Path

    from smartcache.hub import SeedPlan, SeedResult

_MOST_SHOWN = 20
_COLUMNS = (
    Column(title="DIGEST"),
    Column(title="SIZE", right=True),
    Column(title="XET", gives_way=True),
)


@command(
    "seed",
    examples=(
        ("smartcache hub seed --dry-run", "how many blobs, and how much has to be hashed"),
        ("smartcache hub seed -y", "link them, without asking"),
        ("smartcache hub seed --cache-dir /mnt/hf/hub", "one HF cache only"),
    ),
)
@cache_dirs_option
@asks
@click.pass_context
def seed_command(
    ctx: click.Context, *, cache_dirs: tuple[Path, ...], dry_run: bool, yes: bool
) -> None:
    """Fill huggingface_hub's shared blob store with links to blobs.

    Programs that know nothing of smartcache then find these files and do not download them. Links
    take no space; 'smartcache undo' removes them again. Blobs whose xet hash is not known are
    hashed first, at 1-2 GB/s, once.
    """
    from smartcache.hub import plan_seed

    with ctx.ensure_object(Session).store() as store:
        plan = plan_seed(store, hf_caches(cache_dirs, list(store.stores())))
        for warning in plan.warnings:
            out.warn(warning)
        result: SeedResult | None = None
        if plan.blobs and not dry_run:
            if not yes and out.mode == "human":
                _show(plan, as_talk=True)
            out.confirm(f"Link {_summary(plan)}?", yes=yes)
            out.talk(f"Linking {_summary(plan)}.")
            result = plan.execute(progress=bars)
            for each in result.skipped:
                out.warn(f"{short(each.digest)}: {each.reason}")
        out.show(
            human=lambda: _say(plan, result),
            document=lambda: _document(plan, result, dry_run=dry_run),
            ids=lambda: _digests(plan, result),
        )
        if result is not None and result.skipped:
            ctx.exit(FAILED)


def _summary(plan: SeedPlan) -> str:
    to_hash = f", {format_size(plan.hash_size)} of them to be hashed" if plan.hash_size else ""
    return f"{counted(len(plan.blobs), 'blob')} ({format_size(plan.size)}{to_hash})"


def _show(plan: SeedPlan, *, as_talk: bool) -> None:
    shown = plan.blobs[:_MOST_SHOWN]
    rows = (
        [short(each.digest), format_size(each.size), each.xet or "to be computed"] for each in shown
    )
    out.table(_COLUMNS, rows, as_talk=as_talk)
    if len(plan.blobs) > len(shown):
        out.talk(f"... and {len(plan.blobs) - len(shown):,} smaller ones")


def _say(plan: SeedPlan, result: SeedResult | None) -> None:
    there = plan.done + plan.present
    if not plan.blobs:
        out.line("Nothing to link.")
    elif result is None:
        _show(plan, as_talk=False)
        out.line(f"Would link {_summary(plan)}.")
    else:
        linked = counted(len(_digests(plan, result)), "blob")
        more = f": programs find {format_size(result.size)} more" if result.seeded else ""
        out.line(f"Linked {linked}{more}.")
        there += result.done + result.present
    if there:
        out.talk(f"Already there: {there:,}.")


def _digests(plan: SeedPlan, result: SeedResult | None) -> list[str]:
    found = plan.blobs if result is None else result.seeded
    return list(dict.fromkeys(each.digest for each in found))


def _document(plan: SeedPlan, result: SeedResult | None, *, dry_run: bool) -> dict[str, object]:
    from smartcache.hub import SeedResult

    done = SeedResult() if result is None else result
    return {
        "dry_run": dry_run,
        "caches": plan.caches,
        "blobs": [
            {
                "digest": each.digest, "size": each.size, "xet": each.xet or None,
                "missing_in": each.missing_in,
            }
            for each in plan.blobs
        ],
        "planned_size": plan.size,
        "hash_size": plan.hash_size,
        "unhashed": plan.unhashed,
        "linked": done.seeded,
        "linked_size": done.size,
        "hashed_size": done.hashed_size,
        "done": plan.done + done.done,
        "present": plan.present + done.present,
        "skipped": done.skipped,
        "warnings": plan.warnings,
    }  # fmt: skip
