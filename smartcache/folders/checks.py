"""What may be done with each copy of a group: the checks that `scan` counts with and `dedup` obeys.

One code path for both, so that what a scan promises is what a plan frees. Owner, mode, group,
attributes, folder and mount of every copy are looked at now; nothing is changed. Per filesystem
there is one kind of link: hard links, or reflinks where they work and files must stay writable or
are written by root, whom read-only files do not stop.

Which copy survives is decided here too: by `survival`, of those that a link would not change
visibly.
"""

from __future__ import annotations

import copy as copying
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Self

from smartcache.errors import FileSkippedError
from smartcache.folders.programs import KEYS_ON_MTIME, ModelFolder
from smartcache.store.changes.spot import read_attributes
from smartcache.store.changes.userfile import (
    Allowance,
    refuse_unshareable,
    refuse_unsuitable,
    refuse_visible_change,
)
from smartcache.store.store import Store
from smartcache.store.volume import volume_root
from smartcache.system.filesystems import Mount, mount_of, mount_points, probe
from smartcache.system.kernel import StatKey, effective_user
from smartcache.system.sqlite import signed

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
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
            self.mtime_ns,
            os.fsencode(self.path),
            is_keyed=any(name.folder.program in KEYS_ON_MTIME for name in self.names),
            is_linkable=self.is_linkable,
            is_blob=self.is_blob,
            is_outside=self.outside_names > 0,
        )


def survival(
    mtime_ns: int,
    path: bytes,
    *,
    is_keyed: bool,
    is_linkable: bool = True,
    is_blob: bool = False,
    is_outside: bool = False,
) -> tuple[object, ...]:
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
    read_only: int = 0
    """Names that lose their write permission."""
    permissions: tuple[str, ...] = ()
    """What the change of mode means for each name that gets another one: "readable by ..."."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """How files of one filesystem are linked (None: not at all), and why, in words."""

    kind: Kind | None
    words: str
    mount: Path
    new_volume: Path | None = None


_Held = tuple[Copy, os.stat_result]


class Checks:
    """Decides group by group; what holds for a filesystem or a folder is asked once."""

    def __init__(
        self, store: Store, *, keep_writable: bool | None = None, allow: Iterable[Allowance] = ()
    ) -> None:
        """Take a store; whether files stay writable is a setting of it, unless said here."""
        setting = store.settings.keep_writable
        self._keep_writable = setting if keep_writable is None else keep_writable
        self.allow: Allow = frozenset(allow)
        self._roots = {each.volume.filesystem: each.root for each in store.stores()}
        points = mount_points()
        self._points = None if points is None else set(map(str, points))
        self._decided: dict[str, Decided] = {}
        self._may_share: dict[str, bool] = {}
        # By the text of a folder's path: to compare paths takes ten times as long.
        self._mounts: dict[str, Mount] = {}
        self._is_writable: dict[str, bool] = {}
        self._is_ordinary: dict[bytes, bool] = {}
        self._list_attributes: Callable[[bytes], list[str]] = getattr(os, "listxattr", lambda _: [])

    def allowing(self, more: Iterable[Option]) -> Self:
        """Return the same checks with more allowed."""
        other = copying.copy(self)
        other.allow = self.allow.union(each for each in more if each != "any-file")
        return other

    # filesystems and folders

    def may_share(self, filesystem: str, path: bytes | Path) -> bool:
        """Say whether files of a filesystem, of which `path` is one, may share blocks."""
        if filesystem not in self._may_share:
            mount = self._mount(os.path.dirname(os.fsdecode(path)))
            self._may_share[filesystem] = mount.fstype in _REFLINKS
        return self._may_share[filesystem]

    def of(self, filesystem: str, example: Path) -> Decided:
        """Return how the files of a filesystem are linked, of which `example` is one."""
        if filesystem not in self._decided:
            self._decided[filesystem] = self._decide(filesystem, example)
        return self._decided[filesystem]

    def _decide(self, filesystem: str, example: Path) -> Decided:
        root = self._roots.get(filesystem)
        mount = self._mount(os.path.dirname(example)) if root is None else mount_of(root)
        new_volume = place_for_volume(example, mount.point) if root is None else None
        if root is None and new_volume is None:
            words = "no folder on its filesystem can be written"
            return Decided(kind=None, words=words, mount=mount.point)
        has_reflinks = _REFLINKS.get(mount.fstype, False) and (root is None or probe(root).reflink)
        kind: Kind | None = None if mount.fstype in _NO_HARD_LINKS else "hardlink"
        if self._keep_writable:
            kind = "reflink" if has_reflinks else None
            words = "reflinks: files stay writable, as asked"
            if kind is None:
                words = f"{mount.fstype} has no reflinks, and files are to stay writable"
        elif has_reflinks and effective_user() == 0:
            kind = "reflink"
            words = "reflinks: root can write to read-only files, so hard links would be unsafe"
        elif kind == "hardlink":
            words = f"hard links: {mount.fstype} has no reflinks"
            if has_reflinks:
                words = "hard links: they share memory too, and are counted exactly"
        else:
            words = f"{mount.fstype} has no hard links"
        return Decided(kind=kind, words=words, mount=mount.point, new_volume=new_volume)

    def _mount(self, folder: str) -> Mount:
        """Return the mount that a folder is on, given by its real path."""
        found = self._mounts.get(folder)
        if found is None:
            # Asking the kernel takes 150 microseconds: only where another mount begins.
            above = os.path.dirname(folder)
            is_begin = self._points is None or folder in self._points or folder == above
            found = mount_of(Path(folder)) if is_begin else self._mount(above)
            self._mounts[folder] = found
        return found

    def _can_write(self, folder: str) -> bool:
        found = self._is_writable.get(folder)
        if found is None:
            found = self._is_writable[folder] = os.access(folder, os.W_OK)
        return found

    def is_ordinary(self, filesystem: str, path: bytes) -> bool:
        """Say whether nothing but its owner and mode could speak against linking a file.

        Copies with one name each that are ordinary, ours and of one mode are all replaced but the
        first. A scan asks this of every duplicate, so it is short; the walk knows owner and mode.
        """
        folder = path[: path.rindex(b"/")] or b"/"
        is_ordinary = self._is_ordinary.get(folder)
        if is_ordinary is None:
            where = os.fsdecode(folder)
            mount, decided = self._mount(where), self.of(filesystem, Path(os.fsdecode(path)))
            is_near = mount.point == decided.mount and not mount.is_read_only
            is_ordinary = is_near and decided.kind == "hardlink" and self._can_write(where)
            self._is_ordinary[folder] = is_ordinary
        try:
            return is_ordinary and not self._list_attributes(path)
        except OSError:
            return False

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
        fixed: list[Copy] = []
        writable: list[Copy] = []
        for copy in copies:
            is_read_only = self._mount(os.path.dirname(copy.path)).is_read_only
            (fixed if is_read_only else writable).append(copy)
        skips = [_skip(copy, "read-only filesystem") for copy in fixed[not writable :]]
        decided = self.of(filesystem, writable[0].path) if len(writable) >= PAIR else None
        if decided is None or decided.kind is None:
            skips += [_skip(copy, decided.words) for copy in writable[1:]] if decided else []
            return Verdict(filesystem=filesystem, skipped=tuple(skips))
        held: list[_Held] = []
        for copy in writable:
            try:
                st = os.lstat(copy.path)
                reason = self._obstacle(copy, st, decided)
            except FileSkippedError as error:
                reason = str(getattr(error, "reason", error))
            except OSError as error:
                reason = error.strerror or str(error)
            if reason:
                skips.append(_skip(copy, reason))
            else:
                held.append((copy, st))
        chosen = self._chosen(held, decided.kind, skips) if held else []
        return _verdict(filesystem, decided.kind, chosen, tuple(skips))

    def _obstacle(self, copy: Copy, st: os.stat_result, decided: Decided) -> str:
        """Return why a copy may not take part, "" if it may; or raise it."""
        is_hard = decided.kind == "hardlink"
        is_far = self._mount(os.path.dirname(copy.path)).point != decided.mount
        if is_hard and is_far and not copy.is_only_in_store:
            return "on another mount of its disk"  # which hard links do not leave
        if is_hard and not copy.is_linkable:
            return _EDITED
        if (signed(st.st_ino), StatKey.of(st).mtime_ns) != (copy.inode, copy.mtime_ns):
            return "changed since it was scanned"
        if not is_hard:
            refuse_unshareable(copy.path, st)
        elif not copy.is_blob:
            refuse_unsuitable(copy.path, st)
            if not all(self._can_write(os.path.dirname(name.path)) for name in copy.names):
                return "its folder cannot be written"
            if "xattr" not in self.allow and read_attributes(copy.path):
                return "has extended attributes"
        return ""

    def _chosen(self, held: list[_Held], kind: Kind, skips: list[Skip]) -> list[_Held]:
        """Return the survivor and the copies that can share with it."""
        if kind == "reflink":
            return [held[0], *(each for each in held[1:] if each[0].shares_with is None)]
        survivor = held[0]
        if not survivor[0].is_blob:
            alike = _alike(held, self.allow)
            survivor = max(alike, key=lambda each: sum(copy.gain for copy, _ in each[1:]))[0]
        result = [survivor]
        for copy, st in held:
            if copy is survivor[0] or copy.shares_with is not None:
                continue
            try:
                refuse_visible_change(copy.path, st, survivor[1], self.allow)
            except FileSkippedError as error:
                skips.append(_skip(copy, str(getattr(error, "reason", error))))
                continue
            if copy.outside_names:
                skips.append(_skip(copy, "has other names elsewhere, so nothing would be freed"))
            else:
                result.append((copy, st))
        return result


def _skip(copy: Copy, reason: str) -> Skip:
    return Skip(path=copy.path, reason=reason, option=_OPTIONS.get(reason), size=copy.gain)


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


def _verdict(filesystem: str, kind: Kind, chosen: list[_Held], skips: tuple[Skip, ...]) -> Verdict:
    """Return what is to be done; nothing if nothing would be freed: holes have no blocks."""
    others = chosen[1:]
    is_shared = kind == "reflink"
    freed = sum(copy.allocated if is_shared else copy.gain for copy, _ in others)
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


def place_for_volume(path: Path, mount: Path) -> Path | None:
    """Return where a volume can be made for a file: as near to the mount point as one may write.

    Not above the file's own device: a subvolume of btrfs is one, without being a mount.
    """
    device = os.stat(path.parent).st_dev
    best = None
    for folder in path.parents:
        if not folder.is_relative_to(mount) or os.stat(folder).st_dev != device:
            break
        if os.access(folder, os.W_OK | os.X_OK):
            best = volume_root(folder)
    return best
