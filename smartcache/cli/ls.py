"""Looking into the store: `ls`, `dir`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import click

from smartcache.cli._command import command
from smartcache.cli._json import picked
from smartcache.cli._output import out
from smartcache.cli._selection import condition, order, select
from smartcache.cli._session import Session
from smartcache.cli._words import ago, counted, short
from smartcache.sizes import format_size

if TYPE_CHECKING:
    from smartcache.cli._selection import Test
    from smartcache.store.records import Blob
    from smartcache.store.store import Store


@command(
    "ls",
    examples=(
        ("smartcache ls", "all blobs, the largest first"),
        ("smartcache ls --sort used:asc --limit 10", "the ten unused for longest"),
        ('smartcache ls --filter "size>1GB" --filter pinned=no', "large ones that are not pinned"),
        ('smartcache rm $(smartcache ls -q --filter "used>90d")', "ids for another command"),
    ),
)
@click.option(
    "--filter", "tests", type=condition, multiple=True, metavar="EXPR",
    help="Only blobs that match: size, used, added, links, pinned, pin. Repeatable.",
)  # fmt: skip
@click.option(
    "--sort", type=order, default="size", metavar="KEY[:DIR]", show_default=True,
    help="By size, added, used or digest; :asc or :desc.",
)  # fmt: skip
@click.option("--limit", type=click.IntRange(min=0), metavar="N", help="At most N.")
@click.option("-v", "--verbose", is_flag=True, help="All hashes, names and pins of each.")
@click.pass_obj
def ls_command(
    session: Session,
    *,
    tests: tuple[Test, ...],
    sort: tuple[str, bool],
    limit: int | None,
    verbose: bool,
) -> None:
    """List the blobs in the store.

    LINKS counts the files outside the store that are the same file on disk. A blob without any is
    only in the store: 'smartcache prune' removes it, unless it is pinned.
    """
    with session.store_as_it_is() as store:
        found = islice(select(store, tests, sort), limit)
        out.show(
            human=lambda: _show(store, found, verbose=verbose),
            document=lambda: (_document(store, blob, verbose=verbose) for blob in found),
            ids=lambda: (blob.digest for blob in found),
        )


def _show(store: Store, found: Iterator[Blob], *, verbose: bool) -> None:
    if verbose:
        for blob in found:
            _show_one(store, blob)
        return
    several = len(store.pools()) > 1
    columns = ("DIGEST", "SIZE>", "LINKS>", "USED>", "PINS~", *["POOL~"] * several, "FILE~")
    count = size = 0

    def rows() -> Iterator[list[str]]:
        nonlocal count, size
        for blob in found:
            count += 1
            size += blob.size
            row = [short(blob.digest), format_size(blob.size), f"{blob.names:,}"]
            row += [ago(blob.used_at), _and_more(blob.pins), *([str(blob.pool)] if several else [])]
            yield [*row, _and_more(store.names_of(blob.digest))]

    out.table(columns, rows())
    out.talk(f"{counted(count, 'blob')}, {format_size(size)}")


def _and_more(names: Sequence[object]) -> str:
    """Return the first of several names, and how many more there are."""
    more = f" (+{len(names) - 1})" if names[1:] else ""
    return f"{names[0]}{more}" if names else "-"


def _show_one(store: Store, blob: Blob) -> None:
    out.line(blob.digest)
    out.line(
        f"  {format_size(blob.size)} ({blob.size} bytes), {format_size(blob.allocated)} on disk"
    )
    out.line(f"  added {ago(blob.added_at)}, used {ago(blob.used_at)}")
    for name, value in store.hashes_of(blob.digest).items():
        out.line(f"  {name}:{value}")
    known = store.names_of(blob.digest)
    for path in known:
        out.line(f"  {path}")
    if blob.names > len(known):
        out.line(f"  {counted(blob.names - len(known), 'name')} more, not in any known folder")
    for pin in blob.pins:
        out.line(f"  pinned as {pin!r}")
    out.line(f"  in {blob.pool}")


def _document(store: Store, blob: Blob, *, verbose: bool) -> dict[str, object]:
    document = picked(blob, "digest size allocated added_at used_at pins pool")
    document |= {"links": blob.names}
    if verbose:
        document["hashes"] = store.hashes_of(blob.digest)
        document["paths"] = store.names_of(blob.digest)
    return document


@command(
    "dir",
    examples=(
        ("smartcache dir", "where the store is, or would be made"),
        ("smartcache dir -v", "each path in it"),
        ("du -sh $(smartcache dir)", "for other programs"),
    ),
)
@click.option("-v", "--verbose", is_flag=True, help="Show each path in the store.")
@click.pass_obj
def dir_command(session: Session, *, verbose: bool) -> None:
    """Print where the store is.

    Nothing is made or opened: the store may not exist yet.
    """
    from smartcache.config import config_file
    from smartcache.store.layout import Layout

    layout = Layout(session.settings.home)
    paths = {**picked(layout, "root index journal blobs sets bad"), "config": config_file()}
    out.show(
        human=lambda: _show_paths(paths) if verbose else out.names([layout.root]),
        document=lambda: {**paths, "exists": layout.exists()},
        ids=lambda: [layout.root],
    )


def _show_paths(paths: dict[str, object]) -> None:
    for name, path in paths.items():
        out.line(f"{name + ':':9}{path}")
