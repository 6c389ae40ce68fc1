"""Take links back that were placed for somebody who did not need them.

It is an undo of single changes: a link goes only if it still is that link and the store has its
bytes. What was placed to be kept (files of repos) goes too, since nobody has come to rely on it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from smartcache.store.undo import Undoing, undo_one
from smartcache.store.volume import Volume


def withdraw(
    volume: Volume, batch: str, paths: Collection[Path], is_wanted: Callable[[Path], bool]
) -> list[Path]:
    """Remove the links that a batch has placed at these paths; return those that are gone.

    `is_wanted` is asked right before each: somebody may have come to need it.
    """
    placed = [
        replace(change, keep=None)
        for change in volume.journal.open_changes(batch)
        if change.op == "place" and change.path in paths
    ]
    if not placed:
        return []
    with volume.batch("take back") as outcome:
        undoing = Undoing(batch=outcome, twins={}, old_names={}, files={}, joined=set())
        results = [
            undo_one(volume, change, undoing) for change in placed if not is_wanted(change.path)
        ]
    return [result.change.path for result in results if result.is_undone]
