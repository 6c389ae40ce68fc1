"""Bringing a bundle into the HF cache: `hub import`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from smartcache.cli._command import FILE, command, dry_run
from smartcache.cli._json import picked
from smartcache.cli._output import out
from smartcache.cli._progress import bars
from smartcache.cli._session import Session
from smartcache.cli._words import counted
from smartcache.sizes import format_size

if TYPE_CHECKING:
    from pathlib import Path

    from smartcache.hub import ImportPlan

_STREAM = "-"


@command(
    "import",
    examples=(
        ("smartcache hub import bundle", "a folder"),
        ("smartcache hub import /media/usb/bundle.tar", "a tar file"),
        ("smartcache hub import --dry-run bundle", "what is new in it"),
        ("smartcache hub import --update-refs bundle.tar", "move branches to the bundle's commits"),
    ),
)
@click.argument("bundle", metavar="DIR|FILE.tar", type=FILE)
@click.option("--cache-dir", type=FILE, metavar="DIR", help="The HF cache.  [default: the Hub's]")
@click.option(
    "--update-refs", is_flag=True,
    help="Move branches and tags that are at another commit here, instead of keeping them.",
)  # fmt: skip
@click.option(
    "--force", is_flag=True,
    help="Replace damaged or edited files of the HF cache, instead of stopping.",
)  # fmt: skip
@dry_run
@click.pass_obj
def import_command(
    session: Session,
    *,
    bundle: Path,
    cache_dir: Path | None,
    update_refs: bool,
    force: bool,
    dry_run: bool,
) -> None:
    """Bring exported repos into the HF cache, verified.

    What the cache or the store already has is not read again. Every byte is hashed before a file
    gets its name, and branches move last: programs see whole repos or none. If it is interrupted,
    run the same command again to continue. Nothing is written if there is not enough room. - is the
    standard input.
    """
    from smartcache.cli._downloads import say_changes
    from smartcache.hub import FileChanges, default_cache_dir, plan_import

    place = sys.stdin.buffer if str(bundle) == _STREAM else bundle
    cache = default_cache_dir() if cache_dir is None else cache_dir
    session.how_far = lambda: "What has arrived is kept; run the same command again to continue."
    with (
        session.store(create=True, only_look=dry_run) as store,
        plan_import(
            store, place, cache, update_refs=update_refs, force=force, progress=bars
        ) as plan,
    ):
        changes = FileChanges() if dry_run else plan.execute(progress=bars)
        session.how_far = None
        for each in plan.kept_refs:
            if out.mode == "human":
                at = f"at {each.former[:12]}" if each.former else "as it is"
                bundled = f"the bundle has {each.commit[:12]}"
                out.warn(
                    f"{each.ref} of {each.repo} stays {at} ({bundled}; --update-refs moves it)"
                )
        out.show(
            human=lambda: _say(plan, dry_run=dry_run),
            document=lambda: {**_document(plan, dry_run=dry_run), **picked(changes)},
            ids=lambda: [
                f"{each.repo}@{commit}" for each in plan.manifest.repos for commit in each.revisions
            ],
        )
        say_changes(changes, store)


def _say(plan: ImportPlan, *, dry_run: bool) -> None:
    repos = counted(len(plan.manifest.repos), "repo")
    files = counted(plan.files, "file")
    verb = "Would import" if dry_run else "Imported"
    out.line(f"{verb} {repos}, {files}, into {plan.cache_dir}.")
    parts = [
        (plan.new_size, "from the bundle"),
        (plan.known_size, "from the store"),
        (plan.present_size, "there already"),
    ]
    out.line(", ".join(f"{format_size(size)} {text}" for size, text in parts) + ".")
    for path in plan.replaced:
        out.line(f"{'Would replace' if dry_run else 'Replaced'} {path}: it had other bytes.")


def _document(plan: ImportPlan, *, dry_run: bool) -> dict[str, object]:
    return {
        "dry_run": dry_run,
        "cache_dir": plan.cache_dir,
        "created_at": plan.manifest.created_at,
        "repos": [
            {"type": each.repo.type, "id": each.repo.id, "revisions": sorted(each.revisions)}
            for each in plan.manifest.repos
        ],
        **picked(plan, "files new_size known_size present_size refs replaced"),
    }
