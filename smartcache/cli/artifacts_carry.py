"""Sets on their way: `artifacts export` and `artifacts import`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import click

from smartcache.cli._artifacts import all_sets, one, sets_to_fill
from smartcache.cli._command import FILE, command, dry_run, size
from smartcache.cli._failures import FAILED, BadUsageError, BadValueError
from smartcache.cli._json import picked
from smartcache.cli._output import out
from smartcache.cli._progress import bars
from smartcache.cli._session import Session
from smartcache.cli._words import counted, near, short
from smartcache.sizes import format_size

if TYPE_CHECKING:
    from pathlib import Path

    from smartcache.artifacts import Carried, CarryPlan

_MOST_SHOWN = 20
_RULES = {
    "stem": "cat.pt: cat",
    "name": "cat.pt",
    "path": "animals/cat.pt",
    "content": "a hash of the bytes",
}


@command(
    "export",
    examples=(
        ("smartcache artifacts export latents --safetensors out", "for any program"),
        ("smartcache artifacts export latents --folder /media/usb/sets", "as a store has it"),
        ("smartcache artifacts export latents --folder sets --dry-run", "how much that is"),
    ),
)
@click.argument("set_", metavar="SET")
@click.option(
    "--safetensors", type=FILE, metavar="DIR", help="Shards that any safetensors library reads."
)
@click.option("--folder", type=FILE, metavar="DIR", help="A folder that ArtifactSets opens.")
@click.option(
    "--shard-size", metavar="SIZE", help="How large a shard may become.  [default: 256MB]"
)
@dry_run
@click.pass_context
def export_command(
    ctx: click.Context,
    *,
    set_: str,
    safetensors: Path | None,
    folder: Path | None,
    shard_size: str | None,
    dry_run: bool,
) -> None:
    """Write a set to safetensors, or to a folder.

    SET is a name, at least 4 characters of an id, or NAME/ID. 'smartcache artifacts import' brings
    a folder back exactly; safetensors are for other programs. In a shard, a tensor is called
    KEY/FIELD, with / and % in either written as %2F and %25. What is past its time is left out. Run
    the same command again after an interruption, or to add what is new since.
    """
    from smartcache.artifacts import plan_export

    path = folder or safetensors
    if path is None or (folder is not None and safetensors is not None):
        message = "Say one of --safetensors DIR and --folder DIR."
        hint = f"For example: smartcache artifacts export {set_} --safetensors out"
        raise BadUsageError(message, hint=hint)
    options = {} if shard_size is None else {"shard_size": size(shard_size)}
    if options and folder is not None:
        raise BadUsageError("--shard-size is for --safetensors.", hint="Leave it out.")
    session = ctx.ensure_object(Session)
    with all_sets(session) as sets, sets.open_id(one(sets, set_)) as opened:
        form: Literal["safetensors", "folder"] = "safetensors" if folder is None else "folder"
        plan = plan_export(opened, path, form=form, **options)
        result = _carry(session, plan, dry_run=dry_run)
    _show(plan, result, f"export {_labels(plan)} to {near(plan.path)}", [str(plan.path)])
    if result is not None and result.problems:
        ctx.exit(FAILED)


@command(
    "import",
    examples=(
        ("smartcache artifacts import sets", "what 'artifacts export --folder' has written"),
        ("smartcache artifacts import sets --dry-run", "what is new in it"),
        (
            """smartcache artifacts import dir --set latents --fingerprint '{"vae": "sdxl"}'""",
            ".pt, .npz ...",
        ),
    ),
)
@click.argument("path", metavar="PATH", type=FILE)
@click.option("--set", "name", metavar="NAME", help="For files of others: the set they go to.")
@click.option(
    "--fingerprint", metavar="JSON", help="For files of others: what its artifacts depend on."
)
@click.option(
    "--key", metavar="RULE", default="stem", show_default=True,
    help="Their keys: stem, name, path, content, or a text with {stem}, {name}, {path}, {parent}.",
)  # fmt: skip
@dry_run
@click.pass_context
def import_command(
    ctx: click.Context,
    *,
    path: Path,
    name: str | None,
    fingerprint: str | None,
    key: str,
    dry_run: bool,
) -> None:
    """Bring in an exported set, or tensor files of others.

    PATH is a folder that 'smartcache artifacts export --folder' has written; or a file, or a
    folder, of .pt, .pth, .npz and .safetensors files, each of which becomes one artifact. Nothing
    in a file is executed: one that needs pickle is named and left out. What is there already is not
    written again. If it is interrupted, run the same command again to continue.
    """
    from smartcache.artifacts import ArtifactSets, plan_import
    from smartcache.store.layout import Layout

    session = ctx.ensure_object(Session)
    values = None if fingerprint is None else _fingerprint(fingerprint)
    if not session.has_store():  # what cannot be imported makes none
        nothing = ArtifactSets(Layout(session.settings.home).sets)
        plan_import(nothing, path, name=name, fingerprint=values, key=key)
    with sets_to_fill(session, create=not dry_run) as sets:
        plan = plan_import(sets, path, name=name, fingerprint=values, key=key)
        result = _carry(session, plan, dry_run=dry_run)
    _show(plan, result, f"import {_labels(plan)} from {near(plan.path)}", plan.sets)
    if result is not None and result.problems:
        ctx.exit(FAILED)


def _fingerprint(text: str) -> dict[str, object]:
    import json

    try:
        values = json.loads(text)
    except ValueError as error:
        values = str(error)
    if not isinstance(values, dict):
        hint = """Write an object in quotes: --fingerprint '{"vae": "sdxl", "size": 1024}'."""
        raise BadValueError(f"The fingerprint is no JSON object: {text!r:.80}", hint=hint)
    return values


def _carry(session: Session, plan: CarryPlan, *, dry_run: bool) -> Carried | None:
    """Execute a plan, unless it is only to be shown."""
    if dry_run:
        return None
    session.how_far = lambda: "What was copied is kept; run the same command again to continue."
    result = plan.execute(bars)
    session.how_far = None
    for text in result.problems[:_MOST_SHOWN]:
        out.warn(text)
    if result.problems[_MOST_SHOWN:]:
        out.warn(f"... and {len(result.problems) - _MOST_SHOWN:,} more; --json has all")
    return result


def _labels(plan: CarryPlan) -> str:
    parts = (each.partition("/") for each in plan.sets)
    return ", ".join(f"{name}/{short(id_)}" for name, _, id_ in parts)


def _show(
    plan: CarryPlan, result: Carried | None, what: str, ids: list[str] | tuple[str, ...]
) -> None:
    verb, _, rest = what.partition(" ")
    done = plan if result is None else result
    problems = () if result is None else result.problems

    def say() -> None:
        there = f"; {done.kept:,} there already" if done.kept else ""
        lost = f"; {len(problems):,} could not be read" if problems else ""
        carried = f"{counted(done.artifacts, 'artifact')} ({format_size(done.size)})"
        said = f"Would {verb}" if result is None else f"{verb.title()}ed"
        out.line(f"{said} {rest}: {carried}{there}{lost}.")

    out.show(
        human=say,
        document=lambda: {
            "dry_run": result is None,
            "sets": plan.sets,
            "path": plan.path,
            **picked(done, "artifacts size kept"),
            "problems": problems,
        },
        ids=lambda: ids,
    )
