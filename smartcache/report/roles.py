"""What would become of each copy of a group if duplicates were replaced by links."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from smartcache.folders.records import Copy, Group

Role = Literal["stays", "duplicate", "editable", "other names", "same blocks", "other disk"]
"""stays: the survivor. other disk: the first one of another filesystem, which no link reaches.
duplicate: could be replaced. editable: of a kind that programs edit in place, so it is not replaced
unless asked for. other names: replacing it frees nothing, because it has names that the scan did
not meet. same blocks: a reflink of another copy, which takes no room of its own."""


def roles(group: Group) -> Iterator[tuple[Copy, Role]]:
    """Go through the copies of a group, the survivor first."""
    survivors: dict[str, Copy] = {}
    for copy in group.copies:
        survivor = survivors.setdefault(copy.filesystem, copy)
        if survivor is copy:
            yield copy, "stays" if len(survivors) == 1 else "other disk"
        else:
            yield copy, _role(copy, survivor)


def _role(copy: Copy, survivor: Copy) -> Role:
    if copy.shares_with is not None:
        return "same blocks"
    if copy.outside_names:
        return "other names"
    return "duplicate" if copy.is_linkable and survivor.is_linkable else "editable"
