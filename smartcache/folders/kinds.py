"""Which kind of link the files of a filesystem get, and where a volume for them would be.

Hard links, or reflinks where they work and files must stay writable or are written by root, whom
read-only files do not stop.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from smartcache.store.filesystems import Mount, mount_of, probe
from smartcache.store.kernel import effective_user
from smartcache.store.layout import volume_root
from smartcache.store.mounts import mount_points
from smartcache.store.store import Store

Kind = Literal["hardlink", "reflink"]
_REFLINKS = frozenset({"btrfs", "xfs"})
"""Filesystems that compare and share blocks themselves, where they were made so."""
_NO_HARD_LINKS = frozenset({"vfat", "exfat", "msdos"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """How files of one filesystem are linked (None: not at all), and why, in words."""

    kind: Kind | None
    words: str
    mount: Path
    new_volume: Path | None = None


class Choice:
    """Which kind of link each filesystem gets, decided once; and what folders allow."""

    def __init__(self, store: Store, *, keep_writable: bool | None = None) -> None:
        """Take a store; whether files stay writable is a setting of it, unless said here."""
        self._roots = {each.volume.filesystem: each.root for each in store.stores()}
        setting = store.settings.keep_writable
        self._keep_writable = setting if keep_writable is None else keep_writable
        self._decided: dict[str, Decided] = {}
        self._points = mount_points()
        self._mounts: dict[Path, Mount] = {}
        self._is_writable: dict[Path, bool] = {}

    def mount(self, path: Path) -> Mount:
        """Return the mount that a file is on, given by its real path."""
        return self._mount(path.parent)

    def _mount(self, folder: Path) -> Mount:
        found = self._mounts.get(folder)
        if found is None:
            # Asking the kernel takes 150 microseconds: only where another mount begins.
            is_begin = self._points is None or folder in self._points or folder == folder.parent
            found = mount_of(folder) if is_begin else self._mount(folder.parent)
            self._mounts[folder] = found
        return found

    def can_write(self, folder: Path) -> bool:
        """Say whether names in a folder can be replaced, asked once."""
        if folder not in self._is_writable:
            self._is_writable[folder] = os.access(folder, os.W_OK)
        return self._is_writable[folder]

    def of(self, filesystem: str, example: Path) -> Decided:
        """Return what was decided for a filesystem, of which `example` is a file."""
        if filesystem not in self._decided:
            self._decided[filesystem] = self._decide(filesystem, example)
        return self._decided[filesystem]

    def _decide(self, filesystem: str, example: Path) -> Decided:
        root = self._roots.get(filesystem)
        mount = self.mount(example) if root is None else mount_of(root)
        new_volume = place_for_volume(example, mount.point) if root is None else None
        if root is None and new_volume is None:
            words = "no folder on its filesystem can be written"
            return Decided(kind=None, words=words, mount=mount.point)
        has_reflinks = mount.fstype in _REFLINKS and (root is None or probe(root).reflink)
        has_hard_links = mount.fstype not in _NO_HARD_LINKS
        kind: Kind | None = "hardlink" if has_hard_links else None
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
