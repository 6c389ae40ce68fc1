"""Which filesystem a path is on, and what works there.

`filesystem_id` names a filesystem by something that survives a reboot, because memos are keyed by
it together with the inode number; `st_dev` does not survive. Where inode numbers do not survive a
remount either (FAT, exFAT), or nothing lasting is known, the id begins with "dev:" and holds until
the next boot.

`probe` finds out what works by doing it: names and versions of filesystems promise nothing.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from smartcache.errors import NoSpaceError, StoreUnwritableError
from smartcache.store import kernel
from smartcache.store.mounts import (
    Family,
    Mount,
    MountLine,
    is_network,
    line_of,
    mount_of,
    nearest_existing,
)

with suppress(ImportError):  # Windows
    import fcntl

__all__ = [
    "Abilities",
    "Family",
    "Mount",
    "filesystem_id",
    "free_bytes",
    "is_network",
    "mount_of",
    "nearest_existing",
    "probe",
    "same_filesystem",
]

logger = logging.getLogger(__name__)

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
class Abilities:
    """What was seen to work in a directory; `notes` says, in sentences, why something does not."""

    hard_link: bool
    reflink: bool
    symlink: bool
    lease: bool
    exchange: bool
    flock: bool
    unnamed_tmp: bool
    notes: tuple[str, ...] = ()


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
    found = _find_id(Path(path), device)
    _known[device] = (found, now + _TRUST_SECONDS)
    return found


def same_filesystem(a: Path, b: Path) -> bool:
    """Say whether the two paths, existing or not, are on one filesystem.

    A hard link between them may fail all the same: the kernel links only within one mount, and one
    filesystem can be mounted (or bound) in several places.
    """
    return os.stat(nearest_existing(a)).st_dev == os.stat(nearest_existing(b)).st_dev


def free_bytes(path: Path) -> int:
    """Return how many bytes this user can still write there; `path` need not exist."""
    existing = nearest_existing(Path(path))
    if sys.platform == "win32":
        import shutil

        return shutil.disk_usage(existing).free
    status = os.statvfs(existing)
    return status.f_bavail * status.f_frsize


def probe(directory: Path) -> Abilities:
    """Return what works in `directory`, having tried each thing in a new subdirectory of it.

    Nothing remains of it. Raises `StoreUnwritableError`, or `NoSpaceError` if that is the reason.
    """
    problems: dict[str, str] = {}
    with _scratch(Path(directory)) as room:
        seed = room / "seed"
        for name, attempt in _ATTEMPTS.items():
            try:
                problem = attempt(room, seed)
            except OSError as error:
                problem = error.strerror or type(error).__name__
            if problem:
                problems[name] = problem
                logger.debug("%s: no %s: %s", directory, name, problem)
    mount = mount_of(directory)
    notes = [_FAMILY_NOTES[mount.family]] if mount.family in _FAMILY_NOTES else []
    notes += [f"no {name.replace('_', ' ')}: {problem}" for name, problem in problems.items()]
    return Abilities(
        notes=tuple(note.format(mount.fstype) for note in notes),
        **{name: name not in problems for name in _ATTEMPTS},
    )


def _find_id(path: Path, device: int) -> str:
    if sys.platform == "win32":
        return f"volume:{device:x}"  # st_dev is the serial number of the volume
    fd = _open_on(path, device)
    try:
        found = _lasting_id(path, fd, device)
    except OSError as error:  # vanished since it was stated, or not to be asked
        logger.debug("%s: no lasting filesystem id: %s", path, error)
        found = ""
    finally:
        if fd is not None:
            os.close(fd)
    return found or f"dev:{device:x}:{kernel.boot_id()}"


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
    uuid = _asked_uuid(fd, fstype) or _listed_uuid(device)
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


def _asked_uuid(fd: int | None, fstype: str) -> str:
    if fd is None:
        return ""
    own = _OWN_GETFSUUID.get("ext4" if fstype in {"ext2", "ext3"} else fstype)
    for request, argument, start in (_GETFSUUID, own) if own else (_GETFSUUID,):
        answer = bytearray(argument)
        with suppress(OSError):
            fcntl.ioctl(fd, request, answer)
            if any(raw := answer[start : start + 16]):
                text = raw.hex()
                return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
    return ""


def _listed_uuid(device: int) -> str:
    """Return the name under which udev lists the block device."""
    with suppress(OSError), os.scandir(_BY_UUID) as entries:
        for entry in entries:
            if os.stat(entry.path).st_rdev == device:
                return entry.name
    return ""


@contextmanager
def _scratch(directory: Path) -> Iterator[Path]:
    """Make a subdirectory with a file `seed` of 64 KiB in it; remove it with all it got."""
    room = directory / f".smartcache-probe-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        os.mkdir(room, 0o700)
        try:
            (room / "seed").write_bytes(bytes(range(256)) * 256)
            yield room
        finally:
            for name in os.listdir(room):
                os.unlink(room / name)
            os.rmdir(room)
    except OSError as error:
        full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        kind = NoSpaceError if full else StoreUnwritableError
        reason = error.strerror or type(error).__name__
        raise kind(
            f"cannot write in {directory}: {reason}", path=directory, errno=error.errno
        ) from error


def _try_hard_link(room: Path, seed: Path) -> str:
    os.link(seed, room / "hard")
    return "" if os.path.samefile(seed, room / "hard") else "the link is another file"


def _try_reflink(room: Path, seed: Path) -> str:
    with open(seed, "rb") as source, open(room / "reflink", "xb") as target:
        if not kernel.clone(source.fileno(), target.fileno()):
            return "not supported by {}"
    same = (room / "reflink").read_bytes() == seed.read_bytes()
    return "" if same else "the clone has other bytes"


def _try_symlink(room: Path, seed: Path) -> str:
    os.symlink(seed.name, room / "symlink")
    return "" if os.path.samefile(seed, room / "symlink") else "the link leads elsewhere"


def _try_lease(_room: Path, seed: Path) -> str:
    with open(seed, "rb") as file:
        answer = kernel.take_lease(file.fileno())
        intact = kernel.lease_intact(file.fileno())
        kernel.drop_lease(file.fileno())
    if answer == "busy":
        return "{} treats every file as open for writing"
    return "" if answer == "held" and intact else "not supported by {}"


def _try_exchange(room: Path, _seed: Path) -> str:
    one, two = room / "one", room / "two"
    one.write_bytes(b"1")
    two.write_bytes(b"2")
    if not kernel.exchange(one, two):
        return "not supported by {}"
    return "" if (one.read_bytes(), two.read_bytes()) == (b"2", b"1") else "names were not swapped"


def _try_flock(_room: Path, seed: Path) -> str:
    with open(seed, "r+b") as first, open(seed, "r+b") as second:
        _lock(first.fileno())
        try:
            _lock(second.fileno())
        except (BlockingIOError, PermissionError):
            return ""
    return "two got the same lock"


def _lock(fd: int) -> None:
    if sys.platform == "win32":
        import msvcrt

        msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
    else:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _try_unnamed_tmp(room: Path, _seed: Path) -> str:
    fd = kernel.open_unnamed(room)
    if fd is None:
        return "not supported by {}"
    try:
        kernel.link_fd(fd, room / "named")
    finally:
        os.close(fd)
    return ""


_ATTEMPTS: dict[str, Callable[[Path, Path], str]] = {
    "hard_link": _try_hard_link,
    "reflink": _try_reflink,
    "symlink": _try_symlink,
    "lease": _try_lease,
    "exchange": _try_exchange,
    "flock": _try_flock,
    "unnamed_tmp": _try_unnamed_tmp,
}
_FAMILY_NOTES: dict[Family, str] = {
    "network": "{} is shared with other machines: locks and leases may not bind them",
    "overlay": "{}: linking or changing a file of a lower layer copies it first",
    "memory": "{} is empty after a reboot",
    "wsl": "{}: a Windows drive, whose permissions are emulated",
}
