"""Groups of equal files, from the rows the index gives in their order.

Which copy of a group survives: of those that no program edits in place, the one that is a blob of
the store already; else one that belongs to a program which keys its own cache on the file's time;
else one with names outside the scanned folders, because replacing it would free nothing; else the
oldest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from smartcache.folders.apps import KEYS_ON_MTIME
from smartcache.folders.blocks import SharedBlocks
from smartcache.folders.eligible import is_write_once
from smartcache.folders.records import Copy, Group, Judge, ModelFolder, Name
from smartcache.store.duplicates import Member, MemberRow

_PAIR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What groups are made with: the folders by number, the store, and what is known of it."""

    folders: Mapping[int, ModelFolder]
    store: ModelFolder
    blob_path: Callable[[str], Path]
    is_blob: Callable[[str, int], bool]
    """Says whether an inode of a filesystem is a blob of another volume there."""
    judge: Judge
    modes: Mapping[str, Mapping[int, tuple[int, int] | None]] = field(default_factory=dict)
    """Group and permissions of the inodes that have not the usual ones (`Walked.modes`)."""
    any_file: bool = False
    """Every kind of file may be linked."""
    is_proven: bool = True
    """Members of a group have equal digests, not just equal samples."""
    blocks: SharedBlocks = field(default_factory=SharedBlocks)


def groups(rows: Iterable[MemberRow], world: World) -> Iterator[Group]:
    """Yield the groups of two or more copies; the rows of a group follow each other."""
    for (_, digest), members in groupby(rows, key=itemgetter(0, 1)):
        found = list(members)
        if digest is not None and len(found) >= _PAIR:
            group = group_from(found, world)
            if group is not None:
                yield group


def group_from(rows: list[MemberRow], world: World) -> Group | None:
    """Return the group that rows of one size and digest make; None if they are one copy."""
    members = list(map(Member._make, rows))
    copies = _copies(members, world)
    if len(copies) < _PAIR or all(member.path is None for member in members):
        return None
    digest = (members[0].digest or b"").hex() if world.is_proven else ""
    ordered = world.blocks.marked(sorted(copies, key=_rank))
    firsts = {copy.filesystem: copy for copy in reversed(ordered)}
    first = ordered[0].filesystem
    elsewhere = sum(copy.allocated for name, copy in firsts.items() if name != first)
    return Group(
        digest=digest, size=members[0].size, copies=tuple(ordered), elsewhere=elsewhere,
        verdicts=world.judge(ordered),
    )  # fmt: skip


def gain(copy: Copy) -> int:
    """Return what replacing all names of a copy would give back."""
    return 0 if copy.outside_names or copy.shares_with is not None else copy.allocated


def _rank(copy: Copy) -> tuple[bool, bool, bool, bool, int, bytes]:
    keys_on_time = any(name.folder.program in KEYS_ON_MTIME for name in copy.names)
    return (
        not copy.is_linkable,
        not copy.is_blob,
        not keys_on_time,
        not copy.outside_names,
        copy.mtime_ns,
        os.fsencode(copy.path),
    )


def _copies(members: list[Member], world: World) -> list[Copy]:
    by_inode: dict[tuple[str, int], list[Member]] = {}
    for member in members:
        by_inode.setdefault((member.filesystem, member.inode), []).append(member)
    return [_copy(filesystem, inode, same, world) for (filesystem, inode), same in by_inode.items()]


def _copy(filesystem: str, inode: int, same: list[Member], world: World) -> Copy:
    paths = sorted((each.path, each.folder) for each in same if each.path is not None)
    names = tuple(
        Name(path=Path(os.fsdecode(path)), folder=world.folders[folder]) for path, folder in paths
    )
    is_linkable = world.any_file or all(is_write_once(path) for path, _ in paths)
    is_blob = len(names) < len(same) or world.is_blob(filesystem, inode)
    first = same[0]
    if not names:
        digest = (first.digest or b"").hex()
        names = (Name(path=world.blob_path(digest), folder=world.store),)
    return Copy(
        filesystem=filesystem, inode=inode, names=names, links=first.links,
        allocated=first.allocated, mtime_ns=first.mtime_ns, is_blob=is_blob,
        is_only_in_store=not paths, is_linkable=is_linkable,
    )  # fmt: skip
