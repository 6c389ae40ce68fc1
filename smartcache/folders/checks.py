"""What may be done with each copy of a group: the checks that `scan` counts with and `dedup` obeys.

One code path for both, so that what a scan promises is what a plan frees. A scan decides by what
its walk has just seen of owner, mode, group and attributes; a plan looks at each file that it would
touch once more. Nothing is changed. Per filesystem there is one kind of link: hard links, or
reflinks where they work and files must stay writable or are written by root, whom read-only files
do not stop.

Which copy survives is decided here too: by `survival`, of those that a link would not change
visibly.
"""

from __future__ import annotations

import copy as copying
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, NamedTuple, Self

from smartcache.folders.programs import KEYS_ON_MTIME, ModelFolder
from smartcache.store.catalog import access
from smartcache.store.layout import pool_root
from smartcache.store.store import Store
from smartcache.store.userfile import Allowance, read_attributes
from smartcache.system.filesystems import (
    Mount,
    can_reflink,
    filesystem_id,
    mount_of,
    mount_points,
    nearest_existing,
)
from smartcache.system.kernel import StatKey, effective_user

Kind = Literal["hardlink", "reflink"]
Allow = frozenset[Allowance]
Option = Literal["group", "mode", "xattr", "any-file"]
"""What a user can add so that files are not left alone: `--allow` the first three."""

PAIR: Final = 2
_EDITED: Final = "programs edit such files in place"
_OPTIONS: Final[dict[str, Option]] = {
    _EDITED: "any-file",
    "different group": "group",
    "different permissions": "mode",
    "has extended attributes": "xattr",
}
_REFLINKS: Final = {
    "btrfs": True, "xfs": True, "bcachefs": False, "ocfs2": False, "zfs": False, "apfs": False,
}  # fmt: skip
"""Filesystems whose files may share blocks; True: they compare and share blocks when asked to."""
_NO_HARD_LINKS: Final = frozenset({"vfat", "exfat", "msdos"})
SPECIAL: Final = 0o7000


class Name(NamedTuple):
    """One path of a copy, and the folder of the scan it lies in."""

    path: Path
    folder: ModelFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One inode that holds the bytes of a group, with the names met in the scanned folders.

    Two names of an inode are one copy, so links are never duplicates of each other.
    """

    filesystem: str
    inode: int
    names: tuple[Name, ...]
    links: int
    """Hard links of the inode; more than `names` when some lie outside the scanned folders."""
    allocated: int
    """Disk blocks in bytes."""
    mtime_ns: int
    mode: int = 0o644
    """Permissions; -1: it belongs to another user."""
    gid: int = 0
    has_attributes: bool = False
    is_blob: bool = False
    """The store has this very inode as a blob already."""
    is_only_in_store: bool = False
    """No scanned folder has it: its one name here is the store's."""
    is_linkable: bool = True
    """No program edits this kind of file in place, so that a link does no harm."""
    shares_with: int | None = None
    """Inode of an earlier copy of the group whose disk blocks this one shares (reflink)."""

    @property
    def path(self) -> Path:
        """The first of its names."""
        return self.names[0].path

    @property
    def outside_names(self) -> int:
        """Names of the inode that the scan did not meet (the store's own is not counted)."""
        has_own_name = self.is_blob and not self.is_only_in_store
        return max(0, self.links - len(self.names) - has_own_name)

    @property
    def gain(self) -> int:
        """What replacing all its names by hard links would give back."""
        return 0 if self.outside_names or self.shares_with is not None else self.allocated

    @property
    def survival(self) -> tuple[object, ...]:
        """Its place among those who could survive."""
        return survival(
            self.mtime_ns, os.fsencode(self.path), is_linkable=self.is_linkable,
            is_blob=self.is_blob, is_outside=self.outside_names > 0,
            is_keyed=any(name.folder.program in KEYS_ON_MTIME for name in self.names),
        )  # fmt: skip


def survival(
    mtime_ns: int, path: bytes, *, is_linkable: bool = True, is_blob: bool = False,
    is_keyed: bool = False, is_outside: bool = False,
) -> tuple[object, ...]:  # fmt: skip
    """Return what copies are sorted by, survivors first.

    Of those that no program edits in place, the one that is a blob of the store already; else one
    of a program which keys its own cache on the file's time; else one with names outside the
    scanned folders, because replacing it would free nothing; else the oldest.
    """
    return (not is_linkable, not is_blob, not is_keyed, not is_outside, mtime_ns, path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """A file that is left as it is, and why: a short phrase."""

    path: Path
    reason: str
    option: Option | None = None
    """What would include it."""
    size: int = 0
    """What a link in its place would free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What would become of the copies of a group on one filesystem."""

    filesystem: str
    kind: Kind | None = None
    """None: nothing is replaced."""
    survivor: Copy | None = None
    replaced: tuple[Copy, ...] = ()
    skipped: tuple[Skip, ...] = ()
    freed: int = 0


class Decided(NamedTuple):
    """How files of one filesystem are linked (None: not at all), and why, in words."""

    kind: Kind | None
    words: str
    mount: Path
    new_pool: Path | None = None


class Checks:
    """Decides group by group; what holds for a filesystem or a folder is asked once."""

    def __init__(
        self,
        store: Store,
        *,
        keep_writable: bool | None = None,
        allow: Allow = frozenset(),
        looks: bool = False,
    ) -> None:
        """Take a store; whether files stay writable is a setting of it, unless said here.

        `looks`: each file is looked at now.
        """
        setting = store.settings.keep_writable
        self._keep_writable = setting if keep_writable is None else keep_writable
        self.allow = allow
        self._looks = looks
        self._roots: dict[str, Path] = {}
        for pool in store.pools():
            root = nearest_existing(pool.root)
            self._roots.setdefault(filesystem_id(root), root)
        points = mount_points()
        self._points = None if points is None else set(map(str, points))
        self._decided: dict[str, Decided] = {}
        # By the text of a folder's path: to compare paths takes ten times as long.
        self._mounts: dict[str, Mount] = {}
        self._is_writable: dict[str, bool] = {}

    def allowing(self, more: Iterable[Option]) -> Self:
        """Return the same checks with more allowed."""
        other = copying.copy(self)
        other.allow = self.allow.union(each for each in more if each != "any-file")
        return other

    # filesystems and folders

    def may_share(self, folder: str) -> bool:
        """Say whether files of a folder may share blocks with others."""
        return self._mount(folder).fstype in _REFLINKS

    def of(self, filesystem: str, folder: str) -> Decided:
        """Return how the files of a filesystem are linked, of which `folder` has one."""
        if filesystem not in self._decided:
            self._decided[filesystem] = self._decide(filesystem, folder)
        return self._decided[filesystem]

    def _decide(self, filesystem: str, folder: str) -> Decided:
        root = self._roots.get(filesystem)
        mount = self._mount(folder) if root is None else mount_of(root)
        new_pool = _place_for_pool(folder, mount.point) if root is None else None
        has_reflinks = _REFLINKS.get(mount.fstype, False) and (root is None or can_reflink(root))
        kind: Kind | None = None
        if self._keep_writable and not has_reflinks:
            words = f"{mount.fstype} has no reflinks, and files are to stay writable"
        elif self._keep_writable:
            kind, words = "reflink", "reflinks: files stay writable, as asked"
        elif has_reflinks and effective_user() == 0:
            kind = "reflink"
            words = "reflinks: root can write to read-only files, so hard links would be unsafe"
        elif mount.fstype in _NO_HARD_LINKS:
            words = f"{mount.fstype} has no hard links"
        elif root is None and new_pool is None:
            words = "no folder on its filesystem can be written"
        else:
            why = "they share memory too, and are counted exactly"
            words = f"hard links: {why if has_reflinks else f'{mount.fstype} has no reflinks'}"
            return Decided("hardlink", words, mount.point, new_pool)
        return Decided(kind, words, mount.point)

    def _mount(self, folder: str) -> Mount:
        """Return the mount that a folder is on, given by its real path."""
        if folder not in self._mounts:
            # Asking the kernel takes 150 microseconds: only where another mount begins.
            above = os.path.dirname(folder)
            is_begin = self._points is None or folder in self._points or folder == above
            self._mounts[folder] = mount_of(Path(folder)) if is_begin else self._mount(above)
        return self._mounts[folder]

    def _can_write(self, folder: str) -> bool:
        if folder not in self._is_writable:
            self._is_writable[folder] = os.access(folder, os.W_OK)
        return self._is_writable[folder]

    def is_ordinary(self, filesystem: str, folder: str) -> bool:
        """Say whether nothing of a folder and its filesystem speaks against linking a file there.

        Copies with one name each, ours, of one mode and without attributes are then all replaced
        but the first.
        """
        mount, decided = self._mount(folder), self.of(filesystem, folder)
        is_near = mount.point == decided.mount and not mount.is_read_only
        is_plain = mount.fstype not in _REFLINKS and decided.kind == "hardlink"
        return is_near and is_plain and self._can_write(folder)

    # the copies of a group

    def verdicts(self, copies: Sequence[Copy]) -> tuple[Verdict, ...]:
        """Decide what becomes of the copies of a group, given in the order of survivors."""
        by_filesystem: dict[str, list[Copy]] = {}
        for copy in copies:
            by_filesystem.setdefault(copy.filesystem, []).append(copy)
        return tuple(
            self._verdict(filesystem, same)
            for filesystem, same in by_filesystem.items()
            if len(same) >= PAIR
        )

    def _verdict(self, filesystem: str, copies: list[Copy]) -> Verdict:
        fixed = [each for each in copies if self._mount(os.path.dirname(each.path)).is_read_only]
        writable = [each for each in copies if each not in fixed]
        skips = [_skip(copy, "read-only filesystem") for copy in fixed[not writable :]]
        chosen, kind = [], None
        if len(writable) >= PAIR:
            decided = self.of(filesystem, os.path.dirname(writable[0].path))
            chosen, kind = self._chosen(writable, decided, skips), decided.kind
        freed = sum(copy.allocated if kind == "reflink" else copy.gain for copy in chosen[1:])
        if not freed:  # holes have no blocks
            return Verdict(filesystem=filesystem, skipped=tuple(skips))
        return Verdict(
            filesystem=filesystem, kind=kind, survivor=chosen[0], replaced=tuple(chosen[1:]),
            skipped=tuple(skips), freed=freed,
        )  # fmt: skip

    def _chosen(self, copies: list[Copy], decided: Decided, skips: list[Skip]) -> list[Copy]:
        """Return the survivor and the copies that can share with it; note why others cannot."""
        if decided.kind is None:
            skips += [_skip(copy, decided.words) for copy in copies[1:]]
            return []
        held: list[Copy] = []
        for copy in copies:
            try:
                now = self._looked_at(copy) if self._looks else copy
                reason = self._obstacle(now, decided)
            except OSError as error:
                reason = error.strerror or str(error)
            if reason:
                skips.append(_skip(copy, reason))
            else:
                held.append(now)
        if decided.kind == "reflink" or not held:
            return [*held[:1], *(copy for copy in held[1:] if copy.shares_with is None)]
        survivor = self._survivor(held)
        chosen = [survivor]
        for copy in held:
            if copy is survivor or copy.shares_with is not None:
                continue
            if reason := self._difference(copy, survivor):
                skips.append(_skip(copy, reason))
            else:
                chosen.append(copy)
        return chosen

    def _looked_at(self, copy: Copy) -> Copy:
        """Return a copy with what a link would change of it, as it is now."""
        st = os.lstat(copy.path)
        if (st.st_ino, StatKey.of(st).mtime_ns) != (copy.inode, copy.mtime_ns):
            raise OSError(0, "changed since it was scanned")
        mode, gid = access(st)
        has_attributes = not copy.is_blob and bool(read_attributes(copy.path))
        if (mode, gid, has_attributes) == (copy.mode, copy.gid, copy.has_attributes):
            return copy
        return replace(copy, mode=mode, gid=gid, has_attributes=has_attributes)

    def _obstacle(self, copy: Copy, decided: Decided) -> str:
        """Return why a copy may not take part, "" if it may."""
        if decided.kind != "hardlink" or copy.is_only_in_store:
            return ""
        folders = [os.path.dirname(name.path) for name in copy.names]
        obstacles = (
            # which hard links do not leave
            (self._mount(folders[0]).point != decided.mount, "on another mount of its disk"),
            (not copy.is_linkable, _EDITED),
            (copy.is_blob, ""),
            (copy.mode < 0, "belongs to another user"),
            (copy.mode & SPECIAL, "has a special mode"),
            (not all(map(self._can_write, folders)), "its folder cannot be written"),
            (copy.has_attributes and "xattr" not in self.allow, "has extended attributes"),
        )
        return next((reason for is_so, reason in obstacles if is_so), "")

    def _survivor(self, held: list[Copy]) -> Copy:
        """Return the copy whose inode the others get: of those alike that free most, the first.

        Where modes may differ, the narrowest one survives: nobody may read what he could not
        before. But not if some copy has names elsewhere: it must survive, or nothing would be
        freed.
        """
        if held[0].is_blob:
            return held[0]
        alike: dict[tuple[int, int], list[Copy]] = {}
        for copy in held:
            gid = 0 if "group" in self.allow else copy.gid
            mode = 0 if "mode" in self.allow else copy.mode & 0o555
            alike.setdefault((gid, mode), []).append(copy)
        for same in alike.values() if "mode" in self.allow else ():
            if not any(copy.outside_names for copy in same):
                same.sort(key=lambda copy: (copy.mode & 0o555).bit_count())
        return max(alike.values(), key=lambda same: sum(copy.gain for copy in same[1:]))[0]

    def _difference(self, copy: Copy, survivor: Copy) -> str:
        """Return why a copy may not become a link of the survivor, "" if it may."""
        if copy.gid != survivor.gid and "group" not in self.allow:
            return "different group"
        if (copy.mode ^ survivor.mode) & 0o555 and "mode" not in self.allow:
            return "different permissions"
        return "has other names elsewhere, so nothing would be freed" if copy.outside_names else ""


def _skip(copy: Copy, reason: str) -> Skip:
    return Skip(path=copy.path, reason=reason, option=_OPTIONS.get(reason), size=copy.gain)


def _place_for_pool(folder: str, mount: Path) -> Path | None:
    """Return where a pool can be made for a file: as near to the mount point as one may write.

    Not above the file's own device: a subvolume of btrfs is one, without being a mount.
    """
    device = os.stat(folder).st_dev
    best = None
    for each in (Path(folder), *Path(folder).parents):
        if not each.is_relative_to(mount) or os.stat(each).st_dev != device:
            break
        if os.access(each, os.W_OK | os.X_OK):
            best = pool_root(each)
    return best
