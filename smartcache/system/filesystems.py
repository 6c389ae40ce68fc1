"""Which filesystem a path is on, what works there, and how much room there is.

`filesystem_id` names a filesystem by something that survives a reboot, because memos are keyed by
it together with the inode number; `st_dev` does not survive. Where inode numbers do not survive a
remount either (FAT, exFAT), or nothing lasting is known, the id begins with "dev:" and holds until
the next boot.

What is mounted where is told by /proc/self/mountinfo. The kernel itself says which mount a path is
on (`mnt_id` of a descriptor), so a mount that hides others is seen as such; comparing paths is the
second best, for kernels that do not say it. What works is found out by doing it: names and versions
of filesystems promise nothing.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import struct
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from smartcache.errors import FileSkippedError, NoSpaceError
from smartcache.sizes import format_size
from smartcache.system import kernel
from smartcache.system.ownfiles import unwritable

logger = logging.getLogger(__name__)

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
    r"(?P<number>\d+) \d+ (?P<major>\d+):(?P<minor>\d+) (?P<root>[^ ]+)"
    r" (?P<point>[^ ]+) (?P<options>[^ ]+)"
    r"(?: [^ ]+)*? - (?P<fstype>[^ ]+) (?P<source>[^ ]*) (?P<own_options>[^ ]+)"
)
_ESCAPE = re.compile(r"\\([0-7]{3})")

# Each is an ioctl request, its argument, and where in the answer the UUID is.
_GETFSUUID = (0x80111500, bytes(17), 1)  # FS_IOC_GETFSUUID, Linux 6.9
# The same question to one filesystem: for older kernels, and for those that have no generic answer
# (btrfs) or one from before the UUID was set (ext4 after tune2fs -U: zeros until the next mount).
_OWN_GETFSUUID = {
    "ext4": (0x8008662C, struct.pack("=II", 16, 0) + bytes(16), 8),  # EXT4_IOC_GETFSUUID, 6.0
    "xfs": (0x80705864, bytes(112), 64),  # XFS_IOC_FSGEOMETRY_V1
    "btrfs": (0x8400941F, bytes(1024), 16),  # BTRFS_IOC_FS_INFO
}
# Derived from a UUID here; in xfs, f2fs and others f_fsid is only the device number again.
_LASTING_FSID = frozenset({"ext2", "ext3", "ext4", "btrfs", "tmpfs", "overlay", "zfs"})
_NEAR = frozenset({"local", "overlay", "memory"})
_SERVER_INODES = frozenset({"nfs", "nfs4", "ceph", "lustre", "beegfs"})
# Numbered anew when they leave the cache; and these filesystems have no hard links.
_PASSING_INODES = frozenset({"vfat", "msdos", "exfat"})
_BY_UUID = "/dev/disk/by-uuid"

_TRUST_SECONDS = 1.0
_known: dict[int, tuple[str, float]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A mounted filesystem; `options` are those of the mount and those of the filesystem."""

    point: Path
    fstype: str
    source: str
    options: frozenset[str]
    family: Family
    root: str = "/"
    """The folder of the filesystem that is seen at the point."""
    number: int = -1
    device: int = -1
    """The device number of its files."""

    @property
    def is_read_only(self) -> bool:
        """Whether nothing can be written through this mount."""
        return "ro" in self.options

    @property
    def has_hard_links(self) -> bool:
        """Whether one file may have several names here."""
        return self.fstype not in _PASSING_INODES

    @property
    def is_lasting(self) -> bool:
        """Whether files may be known by a lasting id of the filesystem.

        Others are not touched unasked: a server that does not answer, or an automounter, would hold
        us up.
        """
        if self.fstype in _PASSING_INODES:
            return False
        return self.family in _NEAR or self.fstype == "fuseblk" or self.fstype in _SERVER_INODES


def mount_of(path: Path) -> Mount:
    """Return the mount that `path`, or its nearest existing ancestor, is on."""
    existing = nearest_existing(Path(path))
    mount = _told_mount(existing)
    if mount is not None:
        return mount
    point = Path(os.path.realpath(existing))
    while not os.path.ismount(point) and point != point.parent:
        point = point.parent
    return Mount(point=point, fstype="unknown", source="", options=frozenset(), family="unknown")


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


def _told_mount(place: Path | int) -> Mount | None:
    """Return the mount of a path that exists or of a descriptor; None: there is no mountinfo."""
    text = _mountinfo()
    if (number := _mount_number(place)) is not None:
        for line in text.split("\n"):
            if line.startswith(f"{number} "):
                return _parse(line)
    real = os.path.realpath(f"/proc/self/fd/{place}" if isinstance(place, int) else place)
    return find_mount(real, parse_mountinfo(text))


def mount_points() -> frozenset[Path] | None:
    """Return every place where something is mounted now; None where there is no mountinfo."""
    return frozenset(mount.point for mount in parse_mountinfo(_mountinfo())) or None


def _mountinfo() -> str:
    try:
        with open("/proc/self/mountinfo", "rb") as file:
            return os.fsdecode(file.read())
    except OSError:
        return ""


def parse_mountinfo(text: str) -> list[Mount]:
    """Return the mounts of a /proc/<pid>/mountinfo, in its order."""
    # Not splitlines: a mount point may have any character but the five that the kernel escapes.
    return [mount for line in text.split("\n") if (mount := _parse(line))]


def find_mount(path: str, mounts: Iterable[Mount]) -> Mount | None:
    """Return the mount with the longest point above a real path; of several at one point the last.

    Only where the kernel does not tell the mount of a descriptor: a mount hidden by a later one
    further up is not recognised as hidden.
    """
    above = [mount for mount in mounts if _below(path, os.fspath(mount.point)) is not None]
    return max(reversed(above), key=lambda mount: len(mount.point.parts), default=None)


def family_of(fstype: str, source: str, options: Iterable[str]) -> Family:
    """Return the family of a filesystem type; a Windows drive in WSL is told by its source."""
    if fstype in {"9p", "virtiofs"} and (
        _WINDOWS_DRIVE.match(source) or any(each.startswith("aname=drvfs") for each in options)
    ):
        return "wsl"
    return _FAMILY_OF.get(fstype, "fuse" if fstype.startswith("fuse.") else "unknown")


def _parse(line: str) -> Mount | None:
    found = _LINE.match(line)
    if found is None:
        return None
    root, point, fstype, source = map(_unescape, found.group("root", "point", "fstype", "source"))
    texts = f"{found['options']},{found['own_options']}".split(",")
    options = frozenset(map(_unescape, texts))
    return Mount(
        point=Path(point), fstype=fstype, source=source, options=options,
        family=family_of(fstype, source, options), root=root, number=int(found["number"]),
        device=os.makedev(int(found["major"]), int(found["minor"])),
    )  # fmt: skip


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


def filesystem_id(path: Path, st: os.stat_result | None = None) -> str:
    """Return a name of the filesystem of `path` that is the same after a reboot where possible.

    `st`, if the caller has it, saves the stat call; it may be that of `path` itself or, if that is
    a symlink, of what it points to. Places that number their inodes apart (btrfs subvolumes) have
    different ids. Remembered per device number, for a second only: an unplugged drive leaves its
    number to the next one. Costs well below a microsecond when remembered.
    """
    device = (os.stat(path) if st is None else st).st_dev
    known = _known.get(device)
    now = time.monotonic()
    if known is not None and known[1] > now:
        return known[0]
    found = ""
    try:
        fd = _open_on(Path(path), device)
        try:
            found = _lasting_id(fd, device)
        finally:
            os.close(fd)
    except OSError as error:  # vanished since it was stated, or not to be asked
        logger.debug("%s: no lasting filesystem id: %s", path, error)
    found = found or f"dev:{device:x}:{kernel.boot_id()}"
    _known[device] = (found, now + _TRUST_SECONDS)
    return found


def _open_on(path: Path, device: int) -> int:
    """Return a descriptor of something on the device: a directory above, else the file itself.

    Directories first: opening a file, even for reading, breaks the leases of file servers. What may
    not be read can at least be named.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    attempts = [(each, flags | os.O_DIRECTORY) for each in (path, *path.parents)]
    if os.path.isfile(path):
        attempts.append((path, flags))
    attempts.append((path, flags | kernel.PATH_ONLY))
    for candidate, how in attempts:
        with suppress(OSError):
            fd = os.open(candidate, how)
            if os.fstat(fd).st_dev == device:
                return fd
            os.close(fd)
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def _lasting_id(fd: int, device: int) -> str:
    mount = _told_mount(fd)
    if mount is None or mount.fstype in _PASSING_INODES:
        return ""
    fstype = mount.fstype
    uuid = _uuid(fd, fstype, device)
    fsid = os.statvfs(fd).f_fsid if fstype in _LASTING_FSID else 0
    if fstype == "btrfs" and uuid:  # each subvolume numbers its inodes from 256, and has an f_fsid
        return f"uuid:{uuid}:{fsid:016x}"
    if uuid:
        found = f"uuid:{uuid}"
    elif fsid:
        found = f"fsid:{fstype}:{fsid:016x}"
    elif fstype in _SERVER_INODES:
        found = f"{fstype}:{mount.source}"
    else:
        return ""
    return found + _overlay_suffix(mount, device, has_uuid=bool(uuid))


def _overlay_suffix(mount: Mount, device: int, *, has_uuid: bool) -> str:
    """Return what tells overlays apart that share an upper filesystem, and the layers of one."""
    if mount.fstype != "overlay":
        return ""
    suffix = ""
    if not has_uuid:  # f_fsid is then that of the upper filesystem, for all its overlays
        import zlib

        upper = next((each for each in mount.options if each.startswith("upperdir=")), "")
        suffix = f":{zlib.crc32(os.fsencode(upper)):08x}"
    # Files of a layer on another filesystem keep its inode numbers and have a device of their own.
    return suffix if device == mount.device else f"{suffix}:{device:x}"


def _uuid(fd: int, fstype: str, device: int) -> str:
    """Return the UUID that the filesystem tells, or under which udev lists the block device."""
    own = _OWN_GETFSUUID.get("ext4" if fstype in {"ext2", "ext3"} else fstype)
    for request, argument, start in (_GETFSUUID, own) if own else (_GETFSUUID,):
        answer = bytearray(argument)
        with suppress(OSError):
            fcntl.ioctl(fd, request, answer)
            if any(raw := answer[start : start + 16]):
                text = raw.hex()
                return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
    with suppress(OSError), os.scandir(_BY_UUID) as entries:
        for entry in entries:
            if os.stat(entry.path).st_rdev == device:
                return entry.name
    return ""


class Mounts:
    """Where filesystems are mounted: read once, so an object is for one piece of work.

    A folder is known by the lasting id of its filesystem and its path below that filesystem's own
    root, whatever part of it is mounted where: a drive that is mounted elsewhere, and a container
    that sees a part of it, give the same two.
    """

    def __init__(self) -> None:
        self._mounts = [mount for mount in parse_mountinfo(_mountinfo()) if mount.is_lasting]
        self._by_number = {str(mount.number): mount for mount in self._mounts}
        self._places: dict[str, tuple[str, bytes]] = {}
        self._folders: dict[tuple[str, bytes], str] = {}

    def place(self, folder: str | Path) -> tuple[str, bytes]:
        """Return the id of a folder's filesystem and the folder's path below its root.

        Without a lasting id that is "" and the absolute path. Symlinks are followed.
        """
        name = os.fspath(folder)
        if (known := self._places.get(name)) is None:
            known = self._places[name] = self._place(os.path.abspath(name))
        return known

    def _place(self, name: str) -> tuple[str, bytes]:
        existing = nearest_existing(Path(name))
        real = os.path.normpath(
            os.path.join(os.path.realpath(existing), os.path.relpath(name, existing))
        )
        mount = self._by_number.get(_mount_number(existing) or "")
        if mount is not None:
            filesystem, below = filesystem_id(existing), _below(real, os.fspath(mount.point))
            if below is not None and not filesystem.startswith("dev:"):
                return filesystem, os.fsencode(os.path.join(mount.root, below).strip(os.sep))
        return "", os.fsencode(real)

    def path(self, filesystem: str, below: bytes) -> str:
        """Return where a path below the root of a filesystem is now; an absolute one is as it is.

        FileSkippedError if the filesystem is not mounted, or if two devices have its id.
        """
        if below.startswith(b"/"):
            return os.fsdecode(below)
        above, _, name = below.rpartition(b"/")
        folder = self._folders.get((filesystem, above))
        if folder is None:
            try:
                folder = self._find(filesystem, os.fsdecode(above))
            except FileSkippedError:  # above the root of a subvolume is another filesystem
                return self._find(filesystem, os.fsdecode(below))
            self._folders[filesystem, above] = folder
        return os.path.join(folder, os.fsdecode(name)) if name else folder

    def _find(self, filesystem: str, folder: str) -> str:
        """Return where a folder is; of several places the first that exists and can be written."""
        found: list[tuple[bool, str]] = []
        devices = set()
        for mount in self._mounts:
            below = _below(f"/{folder}", mount.root)
            # A server, which may not answer, has its name in its id.
            is_else = mount.fstype in _SERVER_INODES and mount.source not in filesystem
            if below is None or is_else:
                continue
            path = os.path.normpath(os.path.join(mount.point, below))
            with suppress(OSError):
                existing = nearest_existing(Path(path))
                st = os.stat(existing)
                if filesystem_id(existing, st) == filesystem:
                    is_poor = mount.is_read_only or os.fspath(existing) != path
                    found.append((is_poor, path))
                    devices.add(st.st_dev)
        if len(devices) == 1:
            return min(found, key=lambda each: each[0])[1]
        reason = "two devices have this id" if devices else "its drive is not mounted"
        raise FileSkippedError(f"/{folder} on {filesystem}: {reason}", reason=reason)


def _below(path: str, top: str) -> str | None:
    """Return the part of a path below a folder; None: it is elsewhere."""
    top = top.rstrip(os.sep)
    return path[len(top) + 1 :] if f"{path}{os.sep}".startswith(f"{top}{os.sep}") else None


_reflinks: dict[int, bool] = {}


def can_reflink(folder: Path) -> bool:
    """Say whether two files in a folder can share blocks: tried once per device and process."""
    device = os.stat(folder).st_dev
    if device not in _reflinks:
        try:
            _reflinks[device] = _clones(folder)
        except OSError as error:  # no room, for instance: perhaps later
            logger.debug("%s: no reflink: %s", folder, error)
            return False
    return _reflinks[device]


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What was seen to work in a directory."""

    reflink: bool
    lease: bool


def probe(directory: Path) -> Abilities:
    """Return what works in `directory`, tried with files that have no name there.

    So nothing remains, whatever happens. Raises `StoreUnwritableError`, or `NoSpaceError` if that
    is the reason.
    """
    try:
        return Abilities(reflink=_clones(directory), lease=_leases(directory))
    except OSError as error:
        raise unwritable(f"cannot write in {directory}", directory, error) from error


def _clones(folder: Path) -> bool:
    """Say whether a file could be made a reflink of another."""
    with _open_nameless(folder) as source, _open_nameless(folder) as target:
        content = bytes(range(256)) * 256
        source.write(content)
        source.flush()
        is_cloned = kernel.clone(source.fileno(), target.fileno())
        return is_cloned and os.pread(target.fileno(), len(content), 0) == content


def _leases(folder: Path) -> bool:
    """Say whether leases work; "busy" means that every file is called open for writing."""
    with _open_nameless(folder) as file:
        try:
            fd = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
    try:  # now that nobody has it open for writing
        return kernel.take_lease(fd) == "held" and kernel.lease_intact(fd)
    finally:
        os.close(fd)


def _open_nameless(folder: Path) -> IO[bytes]:
    """Open a new file that is gone when it is closed; where it needs a name, for a moment only."""
    from tempfile import TemporaryFile

    return TemporaryFile(dir=folder, prefix=".probe.", suffix=".smartcache")


def free_bytes(path: Path) -> int:
    """Return how many bytes this user can still write there; `path` need not exist."""
    existing = nearest_existing(Path(path))
    status = os.statvfs(existing)
    return status.f_bavail * status.f_frsize


class Room:
    """Bytes that a job will write, by filesystem: asked for as a whole, before the first byte.

    A job may write to several: a file that is undone on another disk than the store's needs room
    there.
    """

    def __init__(self) -> None:
        self._needed: dict[int, tuple[Path, int]] = {}

    def add(self, place: Path, size: int) -> None:
        """Count bytes that are going to be written to a place, which need not exist yet."""
        device = os.stat(nearest_existing(place)).st_dev
        first, before = self._needed.get(device, (place, 0))
        self._needed[device] = first, before + size

    @property
    def size(self) -> int:
        """Bytes on all filesystems together."""
        return sum(size for _, size in self._needed.values())

    def require(self, what: str, *, hint: str | None = None) -> None:
        """Raise NoSpaceError if they do not fit somewhere; `what` needs them."""
        for place, size in self._needed.values():
            need_room(place, size, what, hint=hint)


def need_room(place: Path, size: int, what: str, *, hint: str | None = None) -> None:
    """Raise NoSpaceError if so many bytes will not fit on the filesystem of a place."""
    free = free_bytes(place)
    if size > free:
        message = (
            f"{what} needs {format_size(size)} at {place}, but only {format_size(free)} is free"
            " there; nothing was changed"
        )
        raise NoSpaceError(message, hint=hint, path=place, needed=size, free=free)
