"""What may be done with each copy of a group: the checks that `scan` counts with and `dedup` obeys.

One code path for both, so that what a scan promises is what a plan frees. Owner, mode, group,
attributes, folder and mount of every copy are looked at now; nothing is changed. Per filesystem
there is one kind of link (`kinds.py`).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from smartcache.errors import FileSkippedError
from smartcache.folders.grouping import gain
from smartcache.folders.kinds import Choice, Decided, Kind
from smartcache.folders.records import Copy, Option, Skip, Verdict
from smartcache.store.attributes import read_attributes
from smartcache.store.hold import (
    Allowance,
    refuse_unshareable,
    refuse_unsuitable,
    refuse_visible_change,
)
from smartcache.store.schema import signed
from smartcache.store.statkey import StatKey

Allow = frozenset[Allowance]
EDITED: Final = "programs edit such files in place"
_OPTIONS: Final[dict[str, Option]] = {
    EDITED: "any-file",
    "different group": "group",
    "different permissions": "mode",
    "has extended attributes": "xattr",
}
_PAIR = 2
_Held = tuple[Copy, os.stat_result]


class Checks:
    """Decides group by group; what holds for a filesystem or a folder is asked once."""

    def __init__(self, choice: Choice, allow: Iterable[Allowance] = ()) -> None:
        self.choice = choice
        self._allow: Allow = frozenset(allow)
        self._is_ordinary: dict[bytes, bool] = {}
        self._list_attributes: Callable[[bytes], list[str]] = getattr(os, "listxattr", lambda _: [])

    def allowing(self, more: Iterable[Option]) -> Checks:
        """Return the same checks with more allowed."""
        added = (each for each in more if each != "any-file")
        return Checks(self.choice, self._allow.union(added))

    def __call__(self, copies: Sequence[Copy]) -> tuple[Verdict, ...]:
        """Decide what becomes of the copies of a group, given in the order of survivors."""
        by_filesystem: dict[str, list[Copy]] = {}
        for copy in copies:
            by_filesystem.setdefault(copy.filesystem, []).append(copy)
        return tuple(
            self._decide(filesystem, same)
            for filesystem, same in by_filesystem.items()
            if len(same) >= _PAIR
        )

    def ordinary(self, filesystem: str, path: bytes) -> bool:
        """Say whether nothing but its owner and mode could speak against linking a file.

        Copies with one name each that are ordinary, ours and of one mode are all replaced but the
        first. A scan asks this of every duplicate, so it is short; the walk knows owner and mode.
        """
        folder = path[: path.rindex(b"/")]
        is_ordinary = self._is_ordinary.get(folder)
        if is_ordinary is None:
            is_ordinary = self._is_ordinary[folder] = self._is_ordinary_folder(filesystem, path)
        try:
            return is_ordinary and not self._list_attributes(path)
        except OSError:
            return False

    def _is_ordinary_folder(self, filesystem: str, path: bytes) -> bool:
        example = Path(os.fsdecode(path))
        mount, decided = self.choice.mount(example), self.choice.of(filesystem, example)
        is_near = mount.point == decided.mount and not mount.is_read_only
        return is_near and decided.kind == "hardlink" and self.choice.can_write(example.parent)

    def _decide(self, filesystem: str, copies: list[Copy]) -> Verdict:
        skips: list[Skip] = []
        writable = [copy for copy in copies if not self.choice.mount(copy.path).is_read_only]
        fixed = [copy for copy in copies if copy not in writable] if writable else copies[1:]
        skips += [_skip(copy, "read-only filesystem") for copy in fixed]
        decided = self.choice.of(filesystem, writable[0].path) if len(writable) >= _PAIR else None
        if decided is None:
            return Verdict(filesystem=filesystem, skipped=tuple(skips))
        if decided.kind is None:
            skips += [_skip(copy, decided.words) for copy in writable[1:]]
            return Verdict(filesystem=filesystem, skipped=tuple(skips))
        near = self._near(writable, decided, skips)
        held = self._suitable(near, decided.kind, skips)
        chosen = self._chosen(held, decided.kind, skips) if held else []
        return _verdict(filesystem, decided.kind, chosen, tuple(skips))

    def _near(self, copies: list[Copy], decided: Decided, skips: list[Skip]) -> list[Copy]:
        """Return the copies on the mount of the volume: hard links do not cross mounts."""
        near = [
            copy
            for copy in copies
            if decided.kind == "reflink" or copy.is_only_in_store
            or self.choice.mount(copy.path).point == decided.mount
        ]  # fmt: skip
        skips += [
            _skip(copy, "on another mount of its disk") for copy in copies if copy not in near
        ]
        return near

    def _suitable(self, copies: list[Copy], kind: Kind, skips: list[Skip]) -> list[_Held]:
        """Return the copies that may take part, with their stats; say why the others may not."""
        held = []
        for copy in copies:
            try:
                st = os.lstat(copy.path)
                if not copy.is_linkable and kind == "hardlink":
                    reason = EDITED
                elif (signed(st.st_ino), StatKey.of(st).mtime_ns) != (copy.inode, copy.mtime_ns):
                    reason = "changed since it was scanned"
                elif kind == "reflink":
                    refuse_unshareable(copy.path, st)
                    reason = ""
                elif not copy.is_blob:
                    refuse_unsuitable(copy.path, st)
                    reason = self._obstacle(copy)
                else:
                    reason = ""
            except FileSkippedError as error:
                reason = str(getattr(error, "reason", error))
            except OSError as error:
                reason = error.strerror or str(error)
            if reason:
                skips.append(_skip(copy, reason))
            else:
                held.append((copy, st))
        return held

    def _obstacle(self, copy: Copy) -> str:
        if not all(self.choice.can_write(name.path.parent) for name in copy.names):
            return "its folder cannot be written"
        if "xattr" not in self._allow and read_attributes(copy.path):
            return "has extended attributes"
        return ""

    def _chosen(self, held: list[_Held], kind: Kind, skips: list[Skip]) -> list[_Held]:
        """Return the survivor and the copies that can share with it."""
        if kind == "reflink":
            return [held[0], *(each for each in held[1:] if each[0].shares_with is None)]
        if held[0][0].is_blob:
            survivor = held[0]
        else:
            alike = _alike(held, self._allow)
            survivor = max(alike, key=lambda each: sum(gain(copy) for copy, _ in each[1:]))[0]
        result = [survivor]
        for copy, st in held:
            if copy is survivor[0] or copy.shares_with is not None:
                continue
            try:
                refuse_visible_change(copy.path, st, survivor[1], self._allow)
            except FileSkippedError as error:
                skips.append(_skip(copy, str(getattr(error, "reason", error))))
                continue
            if copy.outside_names:
                skips.append(_skip(copy, "has other names elsewhere, so nothing would be freed"))
            else:
                result.append((copy, st))
        return result


def _skip(copy: Copy, reason: str) -> Skip:
    return Skip(path=copy.path, reason=reason, option=_OPTIONS.get(reason), size=gain(copy))


def _verdict(filesystem: str, kind: Kind, chosen: list[_Held], skips: tuple[Skip, ...]) -> Verdict:
    """Return what is to be done; nothing if nothing would be freed: holes have no blocks."""
    others = chosen[1:]
    is_shared = kind == "reflink"
    freed = sum(copy.allocated if is_shared else gain(copy) for copy, _ in others)
    if not freed:
        return Verdict(filesystem=filesystem, skipped=skips)
    read_only, permissions = 0, []
    if not is_shared:
        mode = chosen[0][1].st_mode
        read_only = sum(len(copy.names) for copy, st in chosen if st.st_mode & 0o222)
        for copy, st in others:
            permissions += [_meaning(st.st_mode, mode)] * len(copy.names)
    return Verdict(
        filesystem=filesystem, kind=kind, survivor=chosen[0][0], skipped=skips, freed=freed,
        replaced=tuple(copy for copy, _ in others), read_only=read_only,
        permissions=tuple(filter(None, permissions)),
    )  # fmt: skip


def _meaning(before: int, after: int) -> str:
    """Return what it means that a name gets another mode; "" if it stays but for writing."""
    lost, gained = before & ~after & 0o555, after & ~before & 0o555
    if gained & 0o044:
        return "readable by more users"
    if lost & 0o044:
        return f"readable by {'fewer users' if after & 0o044 else 'you only'}"
    return "executable by others than before" if lost or gained else ""


def _alike(held: list[_Held], allow: Allow) -> list[list[_Held]]:
    """Return the copies that a link would not change visibly among each other, survivors first.

    Where modes may differ, the narrowest one survives: nobody may read what he could not before.
    But not if some copy has names elsewhere: it must survive, or nothing would be freed.
    """
    found: dict[tuple[object, ...], list[_Held]] = {}
    for copy, st in held:
        group = 0 if "group" in allow else st.st_gid
        mode = 0 if "mode" in allow else stat.S_IMODE(st.st_mode) & 0o555
        found.setdefault((group, mode), []).append((copy, st))
    for same in found.values() if "mode" in allow else ():
        if not any(copy.outside_names for copy, _ in same):
            same.sort(key=lambda each: (each[1].st_mode & 0o555).bit_count())
    return list(found.values())
