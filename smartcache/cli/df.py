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
    from smartcache.store.upkeep.usage import StoreUsage

    SetUsage = list[tuple[SetInfo, int]]
    """Sets, and what can be freed of each."""

_FIGURES = ("", ">", "~")
_OWNERS = ("OWNER~", "BLOBS>", "SIZE>", "ON DISK>", "ALONE>", "STATE")


@command(
    "df",
    examples=(
        ("smartcache df", "the store: on disk, shared, and what prune could free"),
        ("smartcache df -v", "the smaller parts too, and what each owner holds"),
    ),
)
@click.option("-v", "--verbose", is_flag=True, help="Show the smaller parts and every owner too.")
@click.pass_obj
def df_command(session: Session, *, verbose: bool) -> None:
    """Show what is on the disk, links counted once.

    "Logical" is what the names add up to, "on disk" the blocks in use, each file once. What is
    "shared" has names outside the store too. Artifact sets are shown if there are any. Every blob
    is looked at: the figures are current.
    """
    from smartcache.cache import usage_of_sets

    with session.stores() as stores:
        figures = [store.usage(progress=bars) for store in stores]
        # All sets lie in the first of the volumes.
        sets = [usage_of_sets(store) if store is stores[0] else [] for store in stores]
    warn_of_problems(info for usage in sets for info, _ in usage)
    out.show(
        human=lambda: _show_stores(figures, sets, verbose=verbose),
        document=lambda: {"stores": list(map(_store_document, figures, sets))},
        ids=lambda: [each.root for each in figures],
    )


def _show_stores(figures: list[StoreUsage], sets: list[SetUsage], *, verbose: bool) -> None:
    for number, (each, own) in enumerate(zip(figures, sets, strict=True)):
        if number:
            out.line()
        out.line(str(each.root))
        out.table(_FIGURES, _rows(each, own, verbose=verbose))
        if verbose and each.owners:
            out.line()
            out.table(_OWNERS, _owner_rows(each))
        if verbose and own:
            out.line()
            show_usage(own)
        if each.is_rebuilt:
            out.talk("The index was rebuilt: prune refuses until 'smartcache scan' has run.")


def _rows(usage: StoreUsage, sets: SetUsage, *, verbose: bool) -> list[list[str]]:
    rows = [
        ["  blobs", f"{usage.blobs:,}", ""],
        ["  logical", format_size(usage.logical), "what their names add up to"],
        ["  on disk", format_size(usage.physical), "each file once"],
        ["    shared", format_size(usage.shared), "with files outside the store"],
        ["    only here", format_size(usage.only_smartcache), "held by smartcache alone"],
        *usage_rows(sets),
        ["  can be freed", format_size(_reclaimable(usage, sets)), "by 'smartcache prune'"],
        ["  saved", format_size(usage.saved), "by sharing instead of copying"],
    ]
    if verbose:
        rows += [
            ["  bad", format_size(usage.bad), "damaged, kept for a look"],
            ["  tmp", format_size(usage.tmp), "being written"],
            ["  sets", format_size(usage.sets), "computed tensors"],
            ["  index", format_size(usage.index), "with the journal"],
            ["  all of it", format_size(usage.total), "everything in the store's directory"],
        ]
    return rows


def _reclaimable(usage: StoreUsage, sets: SetUsage) -> int:
    return usage.reclaimable + sum(size for _, size in sets)


def _owner_rows(usage: StoreUsage) -> list[list[str]]:
    return [
        [
            f"{owner.kind} {owner.name}",
            f"{owner.blobs:,}",
            format_size(owner.size),
            format_size(owner.allocated),
            format_size(owner.alone),
            owner.liveness,
        ]
        for owner in sorted(usage.owners, key=lambda owner: -owner.allocated)
    ]


def _store_document(usage: StoreUsage, sets: SetUsage) -> dict[str, object]:
    return {
        **picked(usage, "root blobs logical physical shared only_smartcache reclaimable saved"),
        **picked(usage, "bad tmp sets index total is_rebuilt owners"),
        "reclaimable": _reclaimable(usage, sets),
        "artifact_sets": usage_documents(sets),
    }
