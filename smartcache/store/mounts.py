"""What is mounted where, as /proc/self/mountinfo tells it.

The kernel itself says which mount a path is on (`mnt_id` of a descriptor), so a mount that hides
others is seen as such; comparing paths is the second best, for kernels that do not say it.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Family = Literal["local", "network", "fuse", "overlay", "memory", "wsl", "unknown"]

_FAMILIES: dict[Family, str] = {
    "local": """
        ext2 ext3 ext4 xfs btrfs f2fs zfs bcachefs jfs nilfs2 reiserfs vfat msdos exfat ntfs ntfs3
        hfs hfsplus apfs ufs udf iso9660 squashfs erofs lxfs wslfs
    """,
    # Not networks alone: also what the host of a virtual machine changes behind our back.
    "network": """
        nfs nfs4 cifs smb2 smb3 smbfs 9p afs ceph lustre beegfs glusterfs gpfs gfs2 ocfs2 orangefs
        pvfs2 coda davfs virtiofs vboxsf vmhgfs prl_fs fuse.alluxio-fuse fuse.blobfuse
        fuse.blobfuse2 fuse.ceph fuse.ceph-fuse fuse.curlftpfs fuse.davfs fuse.gcsfuse fuse.geesefs
        fuse.glusterfs fuse.goofys fuse.grpcfuse fuse.gvfsd-fuse fuse.JuiceFS fuse.juicefs fuse.mfs
        fuse.mountpoint-s3 fuse.osxfs fuse.rclone fuse.s3fs fuse.seaweedfs fuse.smbnetfs fuse.sshfs
        fuse.vmhgfs-fuse
    """,
    "overlay": "overlay overlayfs aufs fuse.fuse-overlayfs",
    "memory": "tmpfs ramfs devtmpfs hugetlbfs",
    "fuse": "fuse fuseblk",
    "wsl": "drvfs",
}
_FAMILY_OF = {name: family for family, names in _FAMILIES.items() for name in names.split()}
_WINDOWS_DRIVE = re.compile(r"drvfs|[A-Za-z]:")
# 36 35 98:0 /root /point rw,noatime shared:1 master:2 - ext3 /dev/sda1 rw,errors=continue
_LINE = re.compile(
    r"(?P<number>\d+) \d+ (?P<major>\d+):(?P<minor>\d+) [^ ]+ (?P<point>[^ ]+) (?P<options>[^ ]+)"
    r"(?: [^ ]+)*? - (?P<fstype>[^ ]+) (?P<source>[^ ]*) (?P<own_options>[^ ]+)"
)
_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A mounted filesystem; `options` are those of the mount and those of the filesystem."""

    point: Path
    fstype: str
    source: str
    options: frozenset[str]
    family: Family

    @property
    def is_read_only(self) -> bool:
        """Whether nothing can be written through this mount."""
        return "ro" in self.options


@dataclass(frozen=True, slots=True, kw_only=True)
class MountLine:
    """One line of /proc/self/mountinfo: the mount, its id, and the device number of its files."""

    number: int
    device: int
    mount: Mount


def mount_of(path: Path) -> Mount:
    """Return the mount that `path`, or its nearest existing ancestor, is on."""
    existing = nearest_existing(Path(path))
    line = line_of(existing)
    return line.mount if line else _mount_by_stat(existing)


def is_network(path: Path) -> bool:
    """Say whether other machines (or the host of this virtual one) may use the same filesystem."""
    return mount_of(path).family in {"network", "wsl"}


def nearest_existing(path: Path) -> Path:
    """Return `path`, or its closest ancestor that exists (and can be reached)."""
    for candidate in (path, *path.parents):
        with suppress(OSError):
            os.stat(candidate)
            return candidate
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def line_of(path: Path, fd: int | None = None) -> MountLine | None:
    """Return the line of the mount an existing path is on; None where there is no mountinfo.

    `fd` is a descriptor of the same mount, if the caller has one.
    """
    try:
        with open("/proc/self/mountinfo", "rb") as file:
            text = os.fsdecode(file.read())
    except OSError:
        return None
    if (number := _mount_number(path) if fd is None else _mount_number(fd)) is not None:
        for line in text.split("\n"):
            if line.startswith(f"{number} "):
                return _parse(line)
    real = os.path.realpath(path if fd is None else f"/proc/self/fd/{fd}")
    return find_mount(real, parse_mountinfo(text))


def mount_points() -> frozenset[Path] | None:
    """Return every place where something is mounted now; None where there is no mountinfo."""
    try:
        with open("/proc/self/mountinfo", "rb") as file:
            text = os.fsdecode(file.read())
    except OSError:
        return None
    return frozenset(line.mount.point for line in parse_mountinfo(text))


def parse_mountinfo(text: str) -> list[MountLine]:
    """Return the lines of a /proc/<pid>/mountinfo, in its order."""
    # Not splitlines: a mount point may have any character but the five that the kernel escapes.
    return [line for each in text.split("\n") if (line := _parse(each))]


def find_mount(path: str, lines: Iterable[MountLine]) -> MountLine | None:
    """Return the mount with the longest point above a real path; of several at one point the last.

    Only where the kernel does not tell the mount of a descriptor: a mount hidden by a later one
    further up is not recognised as hidden.
    """
    best, length = None, -1
    for line in lines:
        point = os.fspath(line.mount.point).rstrip("/")
        if len(point) >= length and (path == point or path.startswith(f"{point}/")):
            best, length = line, len(point)
    return best


def family_of(fstype: str, source: str, options: Iterable[str]) -> Family:
    """Return the family of a filesystem type; a Windows drive in WSL is told by its source."""
    if fstype in {"9p", "virtiofs"} and (
        _WINDOWS_DRIVE.match(source) or any(each.startswith("aname=drvfs") for each in options)
    ):
        return "wsl"
    return _FAMILY_OF.get(fstype, "fuse" if fstype.startswith("fuse.") else "unknown")


def _parse(line: str) -> MountLine | None:
    found = _LINE.match(line)
    if found is None:
        return None
    point, fstype, source = (_unescape(found[each]) for each in ("point", "fstype", "source"))
    options = frozenset(
        _unescape(each) for each in f"{found['options']},{found['own_options']}".split(",")
    )
    return MountLine(
        number=int(found["number"]),
        device=os.makedev(int(found["major"]), int(found["minor"])),
        mount=Mount(
            point=Path(point),
            fstype=fstype,
            source=source,
            options=options,
            family=family_of(fstype, source, options),
        ),
    )


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda found: chr(int(found[1], 8)), text) if "\\" in text else text


def _mount_number(place: Path | int) -> str | None:
    """Return the kernel's number of the mount of a path or descriptor."""
    if sys.platform != "linux":
        return None
    try:
        fd = place if isinstance(place, int) else os.open(place, os.O_PATH | os.O_CLOEXEC)
        try:
            with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as file:
                return next((line.split()[1] for line in file if line[:7] == "mnt_id:"), None)
        finally:
            if not isinstance(place, int):
                os.close(fd)
    except OSError:
        return None


def _mount_by_stat(path: Path) -> Mount:
    """Return what can be known without mountinfo: the mount point."""
    point = Path(os.path.realpath(path))
    while not os.path.ismount(point) and point != point.parent:
        point = point.parent
    family: Family = "network" if os.fspath(point).startswith("\\\\") else "unknown"
    return Mount(point=point, fstype="unknown", source="", options=frozenset(), family=family)
