"""Bringing files into the store: `add`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

import click

from smartcache.cli._command import FILE, command, dry_run
from smartcache.cli._failures import FAILED, BadUsageError
from smartcache.cli._files import Chosen, chosen_files
from smartcache.cli._output import out
from smartcache.cli._progress import Share, bars
from smartcache.cli._session import Session
from smartcache.cli._words import counted, named, near, short
from smartcache.errors import (
    FileSkippedError,
    NoSpaceError,
    SmartcacheError,
    StoreError,
    StoreUnwritableError,
)
from smartcache.sizes import format_size
from smartcache.store import DEFAULT_PIN

if TYPE_CHECKING:
    from pathlib import Path

    from smartcache.store.store import Store

How = Literal["copy", "adopt"]
Outcome = Literal["copied", "adopted", "present", "duplicate", "skipped", "planned"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """What became of one file. "present": the store had these bytes already."""

    path: Path
    outcome: Outcome
    size: int
    digest: str | None = None
    reason: str | None = None


@command(
    "add",
    examples=(
        ("smartcache add model.safetensors", "a copy of it, pinned"),
        ("smartcache add --adopt -r ~/ComfyUI/models", "the files become the blobs, in place"),
        ("smartcache link $(smartcache add -q a.gguf) b.gguf", "the digest for another command"),
    ),
)
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=FILE)
@click.option(
    "--copy", "how", flag_value="copy", default=True, help="Leave the file alone (default)."
)
@click.option(
    "--adopt", "how", flag_value="adopt",
    help="Let the file itself be the blob: it needs no space and stays where it is, read-only.",
)  # fmt: skip
@click.option(
    "--make-pool", is_flag=True,
    help="With --adopt: make a pool on other filesystems that have none (MOUNT/.smartcache-UID).",
)  # fmt: skip
@click.option("-r", "--recursive", is_flag=True, help="Also add the files in folders.")
@click.option(
    "--pin", "pin", metavar="NAME", help=f'Keep it under this name; for copies "{DEFAULT_PIN}".'
)
@click.option("--no-pin", is_flag=True, help="Do not pin copies: prune may remove them later.")
@dry_run
@click.pass_context
def add_command(
    ctx: click.Context,
    *,
    files: tuple[Path, ...],
    how: How,
    make_pool: bool,
    recursive: bool,
    pin: str | None,
    no_pin: bool,
    dry_run: bool,
) -> None:
    """Bring files into the store.

    What the store already has takes no more space. Copies are pinned, so that prune leaves them
    alone; an adopted file needs no pin: it is a name of the bytes itself.
    """
    session = ctx.ensure_object(Session)
    if pin is not None and no_pin:
        raise BadUsageError("--pin and --no-pin cannot be used together", hint="Leave one out.")
    if make_pool and how != "adopt":
        message = "--make-pool is for --adopt"
        raise BadUsageError(message, hint="Copies go into the store you have.")
    chosen, unread = chosen_files(files, recursive=recursive)
    obstacle: StoreError | None = None
    if dry_run:
        results = [_plan(file, how) for file in chosen]
    else:
        name = pin or (DEFAULT_PIN if how == "copy" and not no_pin else None)
        with session.store(create=True) as store:
            store.ready()
            if make_pool:
                _make_pools(store, chosen)
            results, obstacle = _add(session, store, chosen, how, name)
    _show(results, dry_run=dry_run)
    if obstacle is not None:
        raise obstacle
    named_files = {file.path for file in chosen if file.is_named}
    failed = [each for each in results if each.outcome == "skipped" and each.path in named_files]
    if failed or unread:
        ctx.exit(FAILED)


def _make_pools(store: Store, chosen: list[Chosen]) -> None:
    """Make a pool on every filesystem of the files that has none."""
    for file in chosen:
        try:
            store.pool_of(file.path)
        except FileSkippedError:
            out.talk(f"Made a pool at {store.make_pool_for(file.path).root}.")


def _plan(file: Chosen, how: How) -> Added:
    """Say what would be done to a file as far as that can be told without reading it."""
    from smartcache.store.userfile import refuse_unsuitable

    try:
        refuse_unsuitable(file.path, file.path.stat() if how == "copy" else file.path.lstat())
    except FileSkippedError as error:
        is_fine = how == "copy" and error.reason not in ("empty", "not a regular file")
        if not is_fine:
            return Added(path=file.path, outcome="skipped", size=file.size, reason=error.reason)
    return Added(path=file.path, outcome="planned", size=file.size)


def _add(
    session: Session, store: Store, chosen: list[Chosen], how: How, pin: str | None
) -> tuple[list[Added], StoreError | None]:
    """Add files; return what became of each, and what stopped it before the last."""
    results: list[Added] = []
    obstacle = None
    adding = _adopt(session, store, chosen) if how == "adopt" else _put(store, chosen)
    with closing(adding):
        try:
            for added in adding:
                if pin is not None and added.digest is not None:
                    store.pin(added.digest, pin)
                results.append(added)
        except (NoSpaceError, StoreUnwritableError) as error:
            obstacle = error
    place = {file.path: number for number, file in enumerate(chosen)}
    results.sort(key=lambda added: place.get(added.path, len(place)))
    return results, obstacle


def _put(store: Store, chosen: list[Chosen]) -> Generator[Added]:
    """Copy files one by one; one that cannot be taken is told and passed over."""
    began = datetime.now(UTC).replace(microsecond=0)
    seen: set[str] = set()
    total = sum(file.size for file in chosen)
    with bars("Copying", total, "bytes") as job:
        for file in chosen:
            share = Share(job, file.size)
            job.describe(file.path.name)
            try:
                blob = store.put_file(file.path, progress=share)
            except (NoSpaceError, StoreUnwritableError):
                raise  # the next file would fare no better
            except (SmartcacheError, OSError) as error:
                yield _skipped(file, error)
                continue
            is_new = blob.added_at >= began and blob.digest not in seen
            seen.add(blob.digest)
            outcome: Outcome = "copied" if is_new else "present"
            share.finish()
            yield Added(path=file.path, outcome=outcome, size=blob.size, digest=blob.digest)


def _adopt(session: Session, store: Store, chosen: list[Chosen]) -> Generator[Added]:
    """Let files be blobs, where they are: one entry of the history."""
    sizes = {file.path: file.size for file in chosen}
    label = f"add --adopt {named([str(path) for path in sizes] or ['nothing'], 'file')}"
    total = sum(sizes.values())
    with session.batch(store, label) as batch, bars("Adopting", total, "bytes") as job:
        share = Share(job, total)  # the hashing, which is what takes time
        for each in store.link_many(sizes, label=label, batch=batch, progress=share):
            done = "adopted" if each.outcome == "became" else each.outcome
            yield Added(
                path=each.path, outcome=done,  # type: ignore[arg-type]  # nothing is replaced
                size=each.size or sizes.get(each.path, 0),
                digest=each.digest or None,
                reason=None if each.error is None else _reason(each.error),
            )  # fmt: skip


def _skipped(file: Chosen, error: Exception) -> Added:
    return Added(path=file.path, outcome="skipped", size=file.size, reason=_reason(error))


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def _show(results: list[Added], *, dry_run: bool) -> None:
    for each in results:
        if each.outcome == "skipped":
            where = "" if str(each.path) in str(each.reason) else f"{each.path}: "
            out.warn(f"{where}{each.reason}; left as it is")
    taken = [each for each in results if each.outcome != "skipped"]
    new = [each for each in taken if each.outcome in ("copied", "adopted")]
    out.show(
        human=lambda: _show_table(taken, dry_run=dry_run),
        document=lambda: {
            "dry_run": dry_run,
            "files": results,
            "added": len(new),
            "added_size": sum(each.size for each in new),
        },
        ids=lambda: [each.digest for each in taken if each.digest is not None],
    )


def _show_table(taken: list[Added], *, dry_run: bool) -> None:
    columns = ("DIGEST", "SIZE>", "OUTCOME", "FILE~")
    if taken:
        rows = (
            [short(each.digest or "-"), format_size(each.size), each.outcome, near(each.path)]
            for each in taken
        )
        out.table(columns[dry_run:], (row[dry_run:] for row in rows))
    size = format_size(sum(each.size for each in taken))
    if dry_run:
        out.line(f"Would add {counted(len(taken), 'file')}, {size}, unless the store has them.")
        return
    counts = Counter(each.outcome for each in taken)
    words = [f"{number} {outcome}" for outcome, number in counts.items()]
    out.talk(f"{counted(len(taken), 'file')}, {size}: {', '.join(words) or 'nothing added'}.")
    if counts["duplicate"]:
        out.talk("A duplicate has the bytes of a blob in a file of its own; it was not touched.")
    if counts["adopted"]:
        out.talk("Adopted files are read-only now; 'smartcache undo --last' takes that back.")
