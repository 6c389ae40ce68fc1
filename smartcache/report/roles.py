"""What would become of each copy of a group if duplicates were replaced by links."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from smartcache.folders.checks import Copy
from smartcache.folders.groups import Group

Role = Literal[
    "stays", "duplicate", "editable", "other names", "same blocks", "left alone", "other disk"
]
"""stays: the survivor. other disk: the first one of another filesystem, which no link reaches.
duplicate: would be replaced. editable: of a kind that programs edit in place, so it is not replaced
unless asked for. other names: replacing it frees nothing, because it has names that the scan did
not meet. same blocks: a reflink of another copy, which takes no room of its own. left alone: the
checks of `dedup` object to it, and the group says why."""


def roles(group: Group) -> Iterator[tuple[Copy, Role]]:
    """Go through the copies of a group, the survivor first."""
    firsts = {copy.filesystem: copy.inode for copy in reversed(group.copies)}
    firsts |= {each.filesystem: each.survivor.inode for each in group.verdicts if each.survivor}
    replaced = {(each.filesystem, copy.inode) for each in group.verdicts for copy in each.replaced}
    options = {skip.path: skip.option for skip in group.skipped}
    first = group.copies[0].filesystem
    for copy in sorted(
        group.copies,
        key=lambda copy: (copy.filesystem != first, copy.inode != firsts[copy.filesystem]),
    ):
        if copy.inode == firsts[copy.filesystem]:
            yield copy, "stays" if copy.filesystem == first else "other disk"
        elif (copy.filesystem, copy.inode) in replaced:
            yield copy, "duplicate"
        elif copy.shares_with is not None:
            yield copy, "same blocks"
        elif copy.path in options and options[copy.path] == "any-file":
            yield copy, "editable"
        else:
            yield copy, "other names" if copy.outside_names else "left alone"
