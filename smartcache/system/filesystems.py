"""Which filesystem a path is on, what works there, and how much room there is.

`filesystem_id` names a filesystem by something that survives a reboot, because memos are keyed by
it together with the inode number; `st_dev` does not survive. Where inode numbers do not survive a
remount either (FAT, exFAT), or nothing lasting is known, the id begins with "dev:" and holds until
the next boot.

What is mounted where is told by /proc/self/mountinfo. The kernel itself says which mount a path is
on (`mnt_id` of a descriptor), so a mount that hides others is seen as such; comparing paths is the
second best, for kernels that do not say it. `probe` finds out what works by doing it: names and
versions of filesystems promise nothing.
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
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from smartcache.errors import NoSpaceError, StoreUnwritableError
from smartcache.sizes import format_size
from smartcache.system import kernel

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
    r"(?P<number>\d+) \d+ (?P<major>\d+):(?P<minor>\d+) [^ ]+ (?P<point>[^ ]+) (?P<options>[^ ]+)"
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
_SERVER_INODES = frozenset({"nfs", "nfs4", "ceph", "lustre", "beegfs"})
_PASSING_INODES = frozenset({"vfat", "msdos", "exfat"})  # numbered anew when they leave the cache
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
    if line is not None:
        return line.mount
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


def line_of(path: Path, fd: int | None = None) -> MountLine | None:
    """Return the line of the mount an existing path is on; None where there is no mountinfo.

    `fd` is a descriptor of the same mount, if the caller has one.
    """
    text = _mountinfo()
    if text is None:
        return None
    if (number := _mount_number(path if fd is None else fd)) is not None:
        for line in text.split("\n"):
            if line.startswith(f"{number} "):
                return _parse(line)
    real = os.path.realpath(path if fd is None else f"/proc/self/fd/{fd}")
    return find_mount(real, parse_mountinfo(text))


def mount_points() -> frozenset[Path] | None:
    """Return every place where something is mounted now; None where there is no mountinfo."""
    text = _mountinfo()
    if text is None:
        return None
    return frozenset(line.mount.point for line in parse_mountinfo(text))


def _mountinfo() -> str | None:
    try:
        with open("/proc/self/mountinfo", "rb") as file:
            return os.fsdecode(file.read())
    except OSError:
        return None


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
    fd = _open_on(Path(path), device)
    try:
        found = _lasting_id(Path(path), fd, device)
    except OSError as error:  # vanished since it was stated, or not to be asked
        logger.debug("%s: no lasting filesystem id: %s", path, error)
    finally:
        if fd is not None:
            os.close(fd)
    found = found or f"dev:{device:x}:{kernel.boot_id()}"
    _known[device] = (found, now + _TRUST_SECONDS)
    return found


def _open_on(path: Path, device: int) -> int | None:
    """Return a descriptor of something on the device: a directory above, else the file itself.

    Directories first: opening a file, even for reading, breaks the leases of file servers.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    attempts = [(each, flags | os.O_DIRECTORY) for each in (path, *path.parents)]
    if os.path.isfile(path):
        attempts.append((path, flags))
    for candidate, how in attempts:
        with suppress(OSError):
            fd = os.open(candidate, how)
            if os.fstat(fd).st_dev == device:
                return fd
            os.close(fd)
    return None


def _lasting_id(path: Path, fd: int | None, device: int) -> str:
    line = line_of(path, fd)
    if line is None or line.mount.fstype in _PASSING_INODES:
        return ""
    fstype = line.mount.fstype
    uuid = _uuid(fd, fstype, device)
    fsid = os.statvfs(path if fd is None else fd).f_fsid if fstype in _LASTING_FSID else 0
    if fstype == "btrfs" and uuid:  # each subvolume numbers its inodes from 256, and has an f_fsid
        return f"uuid:{uuid}:{fsid:016x}"
    if uuid:
        found = f"uuid:{uuid}"
    elif fsid:
        found = f"fsid:{fstype}:{fsid:016x}"
    elif fstype in _SERVER_INODES:
        found = f"{fstype}:{line.mount.source}"
    else:
        return ""
    return found + _overlay_suffix(line, device, has_uuid=bool(uuid))


def _overlay_suffix(line: MountLine, device: int, *, has_uuid: bool) -> str:
    """Return what tells overlays apart that share an upper filesystem, and the layers of one."""
    if line.mount.fstype != "overlay":
        return ""
    suffix = ""
    if not has_uuid:  # f_fsid is then that of the upper filesystem, for all its overlays
        import zlib

        upper = next((each for each in line.mount.options if each.startswith("upperdir=")), "")
        suffix = f":{zlib.crc32(os.fsencode(upper)):08x}"
    # Files of a layer on another filesystem keep its inode numbers and have a device of their own.
    return suffix if device == line.device else f"{suffix}:{device:x}"


def _uuid(fd: int | None, fstype: str, device: int) -> str:
    """Return the UUID that the filesystem tells, or under which udev lists the block device."""
    own = _OWN_GETFSUUID.get("ext4" if fstype in {"ext2", "ext3"} else fstype)
    for request, argument, start in (_GETFSUUID, own) if own else (_GETFSUUID,):
        answer = bytearray(argument)
        with suppress(OSError):
            if fd is not None:
                fcntl.ioctl(fd, request, answer)
            if any(raw := answer[start : start + 16]):
                text = raw.hex()
                return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
    with suppress(OSError), os.scandir(_BY_UUID) as entries:
        for entry in entries:
            if os.stat(entry.path).st_rdev == device:
                return entry.name
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What was seen to work in a directory."""

    hard_link: bool
    reflink: bool
    symlink: bool
    lease: bool
    exchange: bool
    flock: bool
    unnamed_tmp: bool


def probe(directory: Path) -> Abilities:
    """Return what works in `directory`, having tried each thing in a new subdirectory of it.

    Nothing remains of it. Raises `StoreUnwritableError`, or `NoSpaceError` if that is the reason.
    """
    found: dict[str, bool] = {}
    room = Path(directory) / f".smartcache-probe-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        os.mkdir(room, 0o700)
        try:
            (room / "seed").write_bytes(bytes(range(256)) * 256)
            for name, attempt in _ATTEMPTS.items():
                try:
                    found[name] = attempt(room, room / "seed")
                except OSError as error:
                    logger.debug("%s: no %s: %s", directory, name, error)
                    found[name] = False
        finally:
            for name in os.listdir(room):
                os.unlink(room / name)
            os.rmdir(room)
    except OSError as error:
        kind = NoSpaceError if error.errno in {errno.ENOSPC, errno.EDQUOT} else StoreUnwritableError
        message = f"cannot write in {directory}: {error.strerror or type(error).__name__}"
        raise kind(message, path=directory, errno=error.errno) from error
    return Abilities(**found)


def _try_hard_link(room: Path, seed: Path) -> bool:
    os.link(seed, room / "hard")
    return os.path.samefile(seed, room / "hard")


def _try_reflink(room: Path, seed: Path) -> bool:
    with open(seed, "rb") as source, open(room / "reflink", "xb") as target:
        is_cloned = kernel.clone(source.fileno(), target.fileno())
    return is_cloned and (room / "reflink").read_bytes() == seed.read_bytes()


def _try_symlink(room: Path, seed: Path) -> bool:
    os.symlink(seed.name, room / "symlink")
    return os.path.samefile(seed, room / "symlink")


def _try_lease(_room: Path, seed: Path) -> bool:
    """Say whether leases work; "busy" means that every file is called open for writing."""
    with open(seed, "rb") as file:
        answer = kernel.take_lease(file.fileno())
        intact = kernel.lease_intact(file.fileno())
        kernel.drop_lease(file.fileno())
    return answer == "held" and intact


def _try_exchange(room: Path, _seed: Path) -> bool:
    one, two = room / "one", room / "two"
    one.write_bytes(b"1")
    two.write_bytes(b"2")
    is_done = kernel.exchange(one, two)
    return is_done and (one.read_bytes(), two.read_bytes()) == (b"2", b"1")


def _try_flock(_room: Path, seed: Path) -> bool:
    with open(seed, "r+b") as first, open(seed, "r+b") as second:
        fcntl.flock(first.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            fcntl.flock(second.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return True
    return False  # two got the same lock


def _try_unnamed_tmp(room: Path, _seed: Path) -> bool:
    fd = kernel.open_unnamed(room)
    if fd is None:
        return False
    try:
        kernel.link_fd(fd, room / "named")
    finally:
        os.close(fd)
    return True


_ATTEMPTS: dict[str, Callable[[Path, Path], bool]] = {
    "hard_link": _try_hard_link,
    "reflink": _try_reflink,
    "symlink": _try_symlink,
    "lease": _try_lease,
    "exchange": _try_exchange,
    "flock": _try_flock,
    "unnamed_tmp": _try_unnamed_tmp,
}


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
