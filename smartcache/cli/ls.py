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
    from smartcache.cli._selection import Found, Test
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
@click.option("-v", "--verbose", is_flag=True, help="All hashes, links and holders of each.")
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
    held only by smartcache.
    """
    with session.stores() as stores:
        found = islice(select(stores, tests, sort), limit)
        out.show(
            human=lambda: _show(found, several=len(stores) > 1, verbose=verbose),
            document=lambda: (_document(each, verbose=verbose) for each in found),
            ids=lambda: (blob.digest for _, blob in found),
        )


def _show(found: Iterator[Found], *, several: bool, verbose: bool) -> None:
    if verbose:
        for store, blob in found:
            _show_one(store, blob)
        return
    columns = ("DIGEST", "SIZE>", "LINKS>", "USED>", "HELD BY~", *["VOLUME~"] * several, "FILE~")
    count = size = 0

    def rows() -> Iterator[list[str]]:
        nonlocal count, size
        for store, blob in found:
            count += 1
            size += blob.size
            row = [short(blob.digest), format_size(blob.size), f"{blob.links - 1:,}"]
            row += [ago(blob.used_at), _held_by(store, blob)]
            yield [*row, *([str(store.root)] if several else []), _known_as(store, blob)]

    out.table(columns, rows())
    out.talk(f"{counted(count, 'blob')}, {format_size(size)}")


def _held_by(store: Store, blob: Blob) -> str:
    """Say in a word or two what keeps a blob alive."""
    owners = [str(owner) for owner, _ in store.holders_of(blob)]
    if owners:
        return owners[0] + _and_more(owners)
    return "nobody" if blob.is_held_only_by_smartcache else "its links"


def _known_as(store: Store, blob: Blob) -> str:
    """Return a file that people may know a blob by: one that shares it, else where it came from."""
    links = sorted(store.links_of(blob), key=lambda link: link.kind == "copy")
    return str(links[0].path) + _and_more(links) if links else "-"


def _and_more(names: Sequence[object]) -> str:
    return f" (+{len(names) - 1})" if names[1:] else ""


def _show_one(store: Store, blob: Blob) -> None:
    out.line(blob.digest)
    out.line(
        f"  {format_size(blob.size)} ({blob.size} bytes), {format_size(blob.allocated)} on disk"
    )
    out.line(f"  added {ago(blob.added_at)}, used {ago(blob.used_at)}, {blob.trust.name.lower()}")
    for name, value in store.aliases_of(blob).items():
        out.line(f"  {name}:{value}")
    for link in store.links_of(blob):
        out.line(f"  {link.kind} {link.path}")
    for owner, state in store.holders_of(blob):
        out.line(f"  held by {owner}{'' if state == 'live' else f' ({state})'}")
    out.line(f"  in {store.root}")


def _document(found: Found, *, verbose: bool) -> dict[str, object]:
    store, blob = found
    document = picked(blob, "digest size allocated links trust added_at used_at")
    document |= {"links": blob.links - 1, "root": store.root}
    if verbose:
        document["aliases"] = store.aliases_of(blob)
        document["paths"] = [{"path": li.path, "kind": li.kind} for li in store.links_of(blob)]
        document["owners"] = [
            {"kind": owner.kind, "name": owner.name, "state": state}
            for owner, state in store.holders_of(blob)
        ]
    return document


@command(
    "dir",
    examples=(
        ("smartcache dir", "where the store is, or would be made"),
        ("smartcache dir -v", "each path in it, and the volumes on other filesystems"),
        ("du -sh $(smartcache dir)", "for other programs"),
    ),
)
@click.option("-v", "--verbose", is_flag=True, help="Each path in the store, and its volumes.")
@click.pass_obj
def dir_command(session: Session, *, verbose: bool) -> None:
    """Print where the store is.

    Nothing is made or opened: the store may not exist yet.
    """
    from smartcache.config import config_file
    from smartcache.store.volume import Layout

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
