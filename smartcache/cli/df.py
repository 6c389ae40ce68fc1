"""What is on the disk: `df`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from smartcache.cli._artifacts import show_usage, usage_documents, usage_rows, warn_of_problems
from smartcache.cli._command import command
from smartcache.cli._json import picked
from smartcache.cli._output import out
from smartcache.cli._progress import bars
from smartcache.cli._session import Session
from smartcache.sizes import format_size

if TYPE_CHECKING:
    from smartcache.artifacts import SetInfo
    from smartcache.store.usage import PoolUsage, StoreUsage

    SetUsage = list[tuple[SetInfo, int]]
    """Sets, and what can be freed of each."""

_FIGURES = ("", ">", "~")
_POOLS = ("POOL~", "BLOBS>", "LOGICAL>", "ON DISK>", "SHARED>", "ONLY HERE>", "SAVED>")


@command(
    "df",
    examples=(
        ("smartcache df", "the store: on disk, shared, and what prune could free"),
        ("smartcache df -v", "the smaller parts too"),
    ),
)
@click.option("-v", "--verbose", is_flag=True, help="Show the smaller parts too.")
@click.pass_obj
def df_command(session: Session, *, verbose: bool) -> None:
    """Show what is on the disk, links counted once.

    "Logical" is what the names add up to, "on disk" the blocks in use, each file once. What is
    "shared" has names outside the store too. Artifact sets are shown if there are any, and each
    pool if there are several. Every blob is looked at: the figures are current.
    """
    from smartcache.cache import usage_of_sets

    with session.store_as_it_is() as store:
        usage, sets = store.usage(progress=bars), usage_of_sets(store)
    warn_of_problems(info for info, _ in sets)
    out.show(
        human=lambda: _show(usage, sets, verbose=verbose),
        document=lambda: _document(usage, sets),
        ids=lambda: [each.root for each in usage.pools],
    )


def _show(usage: StoreUsage, sets: SetUsage, *, verbose: bool) -> None:
    out.line(str(usage.root))
    out.table(_FIGURES, _rows(usage, sets, verbose=verbose))
    if usage.pools[1:]:
        out.line()
        out.table(_POOLS, map(_pool_row, usage.pools))
    if verbose and sets:
        out.line()
        show_usage(sets)


def _rows(usage: StoreUsage, sets: SetUsage, *, verbose: bool) -> list[list[str]]:
    rows = [
        ["  blobs", f"{usage.blobs:,}", ""],
        ["  logical", format_size(usage.logical), "what their names add up to"],
        ["  on disk", format_size(usage.physical), "each file once"],
        ["    shared", format_size(usage.shared), "with files outside the store"],
        ["    only here", format_size(usage.only_smartcache), "in the store alone"],
        *usage_rows(sets),
        ["  can be freed", format_size(_reclaimable(usage, sets)), "by 'smartcache prune'"],
        ["  saved", format_size(usage.saved), "by sharing instead of copying"],
    ]
    if verbose:
        rows += [
            ["  pinned", format_size(usage.pinned), "kept until they are unpinned"],
            ["  bad", format_size(usage.bad), "damaged, kept for a look"],
            ["  tmp", format_size(usage.tmp), "being written"],
            ["  sets", format_size(usage.sets), "computed tensors"],
            ["  index", format_size(usage.index), "with the journal"],
            ["  all of it", format_size(usage.total), "everything in the store's directory"],
        ]
    return rows


def _pool_row(pool: PoolUsage) -> list[str]:
    sizes = (pool.logical, pool.physical, pool.shared, pool.only_smartcache, pool.saved)
    return [str(pool.root), f"{pool.blobs:,}", *map(format_size, sizes)]


def _reclaimable(usage: StoreUsage, sets: SetUsage) -> int:
    return usage.reclaimable + sum(size for _, size in sets)


def _document(usage: StoreUsage, sets: SetUsage) -> dict[str, object]:
    return {
        **picked(usage, "root blobs logical physical shared only_smartcache reclaimable saved"),
        **picked(usage, "pinned bad tmp sets index total pools"),
        "reclaimable": _reclaimable(usage, sets),
        "artifact_sets": usage_documents(sets),
    }
