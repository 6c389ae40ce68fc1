"""What is on the disk: `df`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from smartcache.cli._artifacts import show_usage, usage_documents, usage_rows, warn_of_problems
from smartcache.cli._command import FILE, command
from smartcache.cli._output import out
from smartcache.cli._progress import bars
from smartcache.cli._session import Session
from smartcache.cli._tables import Column
from smartcache.errors import StoreError
from smartcache.sizes import format_size

if TYPE_CHECKING:
    from pathlib import Path

    from smartcache.artifacts import SetInfo
    from smartcache.store import FolderUsage, StoreUsage

    SetUsage = list[tuple[SetInfo, int]]
    """Sets, and what can be freed of each."""

_MOST_NAMED = 5
_FIGURES = (
    Column(title=""),
    Column(title="", right=True),
    Column(title="", gives_way=True),
)
_OWNERS = (
    Column(title="OWNER", gives_way=True),
    Column(title="BLOBS", right=True),
    Column(title="SIZE", right=True),
    Column(title="ON DISK", right=True),
    Column(title="ALONE", right=True),
    Column(title="STATE"),
)
_FOLDERS = (
    Column(title="FOLDER", gives_way=True),
    Column(title="FILES", right=True),
    Column(title="LOGICAL", right=True),
    Column(title="ON DISK", right=True),
    Column(title="SHARED", right=True),
    Column(title="IN STORE", right=True),
    Column(title="FREED IF DELETED", right=True),
)


@command(
    "df",
    examples=(
        ("smartcache df", "the store: on disk, shared, and what prune could free"),
        ("smartcache df -v", "the smaller parts too, and what each owner holds"),
        ("smartcache df ~/ComfyUI/models ~/.cache/huggingface", "any folders, and all together"),
    ),
)
@click.argument("paths", metavar="[PATH]...", nargs=-1, type=FILE)
@click.option("-v", "--verbose", is_flag=True, help="Show the smaller parts and every owner too.")
@click.pass_obj
def df_command(session: Session, *, paths: tuple[Path, ...], verbose: bool) -> None:
    """Show what is on the disk, links counted once.

    Of the store, or of any folders: LOGICAL is what the names add up to, ON DISK the blocks in use,
    each file once. What is SHARED has names outside too; deleting the folder does not free it.
    Artifact sets are shown if there are any. Every blob is looked at: the figures are those of now.
    """
    if paths:
        _show_folders(_measure(session, paths))
        return
    from smartcache.cache import usage_of_sets

    with session.stores() as stores:
        figures = [store.usage(progress=bars) for store in stores]
        # All sets lie in the first of the volumes.
        sets = [usage_of_sets(store) if store is stores[0] else [] for store in stores]
    warn_of_problems(info for usage in sets for info, _ in usage)
    out.show(
        human=lambda: _show_stores(figures, sets, verbose=verbose),
        document=lambda: {
            "stores": list(map(_store_document, figures, sets)),
            "folders": [],
        },
        ids=lambda: [each.root for each in figures],
    )


def _measure(session: Session, paths: tuple[Path, ...]) -> list[FolderUsage]:
    """Measure folders; a store that cannot be opened is no reason not to."""
    from smartcache.store import folder_usage

    if session.has_store():
        try:
            with session.store() as store:
                return store.folder_usage(paths, progress=bars)
        except StoreError as error:
            if hasattr(error, "path") and error.path in paths:
                raise
            out.warn(f"{error.message}; what is shared with the store is not known")
    return folder_usage(paths, progress=bars)


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
        "root": usage.root,
        "blobs": usage.blobs,
        "logical": usage.logical,
        "physical": usage.physical,
        "shared": usage.shared,
        "only_smartcache": usage.only_smartcache,
        "reclaimable": _reclaimable(usage, sets),
        "saved": usage.saved,
        "bad": usage.bad,
        "tmp": usage.tmp,
        "sets": usage.sets,
        "index": usage.index,
        "total": usage.total,
        "is_rebuilt": usage.is_rebuilt,
        "owners": usage.owners,
        "artifact_sets": usage_documents(sets),
    }


def _show_folders(figures: list[FolderUsage]) -> None:
    total = figures[-1]
    folders = [each for each in figures if each.path is not None]
    unread = [f"{path}: {reason}" for path, reason in total.unreadable]
    for text in unread[:_MOST_NAMED]:
        out.warn(text)
    if total.unreadable_count:
        out.warn(f"{total.unreadable_count:,} places could not be read: all figures are at least")
    out.show(
        human=lambda: out.table(_FOLDERS, map(_folder_row, figures)),
        document=lambda: {
            "stores": [],
            "folders": [_folder_document(each) for each in folders],
            "total": {**_folder_document(total), "path": None},
        },
        ids=lambda: [each.path for each in folders if each.path is not None],
    )


def _folder_row(usage: FolderUsage) -> list[str]:
    return [
        "all together" if usage.path is None else str(usage.path),
        f"{usage.files:,}",
        format_size(usage.logical),
        format_size(usage.physical),
        format_size(usage.shared_outside),
        format_size(usage.shared_with_store),
        format_size(usage.freed_if_deleted),
    ]


def _folder_document(usage: FolderUsage) -> dict[str, object]:
    return {
        "path": usage.path,
        "files": usage.files,
        "logical": usage.logical,
        "physical": usage.physical,
        "linked_inside": usage.linked_inside,
        "sparse": usage.sparse,
        "shared_outside": usage.shared_outside,
        "shared_with_store": usage.shared_with_store,
        "freed_if_deleted": usage.freed_if_deleted,
        "overhead": usage.overhead,
        "directories": usage.directories,
        "symlinks": usage.symlinks,
        "other": usage.other,
        "unreadable": [{"path": path, "reason": reason} for path, reason in usage.unreadable],
        "unreadable_count": usage.unreadable_count,
        "is_partial": usage.is_partial,
    }
