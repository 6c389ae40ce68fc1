"""Writing repos to a bundle: `hub export`."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from smartcache.cli._command import FILE, command, dry_run
from smartcache.cli._failures import DAMAGED, BadUsageError
from smartcache.cli._hub import cache_dirs_option, hf_caches
from smartcache.cli._json import picked
from smartcache.cli._output import out
from smartcache.cli._progress import bars
from smartcache.cli._session import Session
from smartcache.cli._words import counted, near
from smartcache.errors import DigestMismatchError
from smartcache.sizes import format_size

if TYPE_CHECKING:
    from pathlib import Path

    from smartcache.hub import ExportPlan

_STREAM = "-"


@command(
    "export",
    examples=(
        ("smartcache hub export org/name bundle", "all revisions, to the folder bundle"),
        ("smartcache hub export org/name@main datasets/org/data bundle.tar", "to a tar file"),
        ("smartcache hub export org/name --dry-run bundle.tar", "how large it would be"),
        ("smartcache hub export org/name - | ssh host smartcache hub import -", "through a pipe"),
    ),
)
@click.argument("words", metavar="REPO[@REV]...", nargs=-1, required=True)
@click.argument("destination", metavar="DIR|FILE.tar", type=FILE)
@click.option("--repo-type", help="What REPO is if it does not say: model, dataset, space.")
@click.option("--force", is_flag=True, help="Replace an existing bundle.")
@cache_dirs_option
@dry_run
@click.pass_context
def export_command(
    ctx: click.Context,
    *,
    words: tuple[str, ...],
    destination: Path,
    repo_type: str | None,
    force: bool,
    cache_dirs: tuple[Path, ...],
    dry_run: bool,
) -> None:
    """Write repos to a folder or tar file, each blob once.

    For a machine without network: 'smartcache hub import' brings them into its HF cache. REV is a
    branch, a tag, a commit or the beginning of one; without it, all revisions are exported. Every
    byte is hashed on the way; a damaged file ends the export, and nothing is left behind. A name
    that ends in .tar becomes a tar file, any other a folder; - is the standard output.
    """
    from pathlib import Path

    from smartcache.hub import Wanted, plan_export

    is_stream = str(destination) == _STREAM
    if is_stream and not dry_run:
        _refuse_stream()
    session = ctx.ensure_object(Session)
    wanted = [Wanted.parse(word, repo_type) for word in words]
    with session.store_as_it_is(says_none=False) as store:
        caches = hf_caches(cache_dirs, store)
    path = Path(os.path.abspath(destination))
    try:
        plan = plan_export(caches, wanted, progress=bars)
        for text in plan.warnings:
            out.warn(text)
        if not dry_run:
            _write(plan, None if is_stream else path, force=force)
    except DigestMismatchError as error:
        out.fail(error.message, error.hint)
        ctx.exit(DAMAGED)
    if is_stream and not dry_run:
        out.talk(_summary(plan, "Exported", "the standard output"))
        return
    where = str(destination) if is_stream else near(path)
    out.show(
        human=lambda: _say(plan, where, dry_run=dry_run),
        document=lambda: _document(plan, destination if is_stream else path, dry_run=dry_run),
        ids=lambda: [destination if is_stream else path],
    )


def _refuse_stream() -> None:
    if out.mode != "human":
        hint = "Write to a file, or leave out --json and -q."
        raise BadUsageError("The bundle and the report cannot both go to stdout.", hint=hint)
    if sys.stdout.isatty():
        hint = "Pipe it into another program, or name a file."
        raise BadUsageError("A bundle cannot be written to a terminal.", hint=hint)


def _write(plan: ExportPlan, path: Path | None, *, force: bool) -> None:
    if path is None:
        plan.write_stream(sys.stdout.buffer, progress=bars)
        sys.stdout.buffer.flush()
    elif path.suffix.lower() == ".tar":
        plan.write_tar(path, force=force, progress=bars)
    else:
        plan.write_folder(path, force=force, progress=bars)


def _summary(plan: ExportPlan, verb: str, where: str) -> str:
    repos = counted(len(plan.manifest.repos), "repo")
    files = counted(plan.files, "file")
    once = plan.files_size - plan.size
    saved = f" ({format_size(once)} less, because each blob is there once)" if once > 0 else ""
    return f"{verb} {repos}, {files}, to {where}: {format_size(plan.size)}{saved}."


def _say(plan: ExportPlan, where: str, *, dry_run: bool) -> None:
    for each in plan.manifest.repos:
        for commit, revision in sorted(each.revisions.items()):
            names = [ref for ref, target in sorted(each.refs.items()) if target == commit]
            refs = f" ({', '.join(names)})" if names else ""
            out.line(f"{each.repo}@{commit[:12]}{refs}: {counted(len(revision.files), 'file')}")
    out.line(_summary(plan, "Would export" if dry_run else "Exported", where))
    if dry_run:
        out.talk("Nothing was written.")


def _document(plan: ExportPlan, path: Path, *, dry_run: bool) -> dict[str, object]:
    return {
        "dry_run": dry_run,
        "path": path,
        "created_at": plan.manifest.created_at,
        "repos": [
            {
                "type": each.repo.type,
                "id": each.repo.id,
                "refs": each.refs,
                "revisions": {
                    commit: len(revision.files) for commit, revision in each.revisions.items()
                },
            }
            for each in plan.manifest.repos
        ],
        "blobs": len(plan.manifest.contents()),
        **picked(plan, "size files files_size partial"),
    }
