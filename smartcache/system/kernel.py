"""System calls that Python has no name for, and what `stat` says of a file as a key.

Every function tries the call and says by its result that it is not supported here; nothing is
guessed from versions or names. Errors that mean something else (no space, no permission, damaged
disk) are raised as plain `OSError`. ctypes is loaded on first use.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_FICLONE = 0x40049409
_FIDEDUPERANGE = 0xC0189436
_DEDUPE_RANGE = struct.Struct("=QQHHIqQQiI")
"""Source offset and length, one target: its descriptor, offset, bytes shared, status."""
_DIFFERS = 1
DEDUPE_SIZE = 16 << 20
"""What the kernel compares and shares in one call: btrfs takes no more, and locks that long."""
_FIEMAP = 0xC020660B
_FIEMAP_HEAD = struct.Struct("=QQIIII")
_FIEMAP_EXTENT = struct.Struct("=QQQ16xI12x")
_FIEMAP_COUNT = 512
_FIEMAP_SYNC = 1
_EXTENT_LAST, _EXTENT_SHARED = 0x1, 0x2000
_EXTENT_ENCODED = 0x8
_EXTENT_PLACELESS = 0x2 | 0x4 | 0x200 | 0x400  # unknown, delayed, inline, in a block with others
_EXTENT_UNWRITTEN = 0x800
PATH_ONLY = getattr(os, "O_PATH", os.O_RDONLY)
"""Opens something to name it, not to read it; O_RDONLY, 0, where there is no such flag."""
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_OWN_DESCRIPTORS = "/proc/self/fd"

_FLOCK = struct.Struct("@hhqqi0q")
"""The kernel's `struct flock`: kind, from where, start, length, process."""
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE
# Linux has one number for ENOTSUP and EOPNOTSUPP, macOS has two.
_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL} | {errno.ENOTSUP, errno.EOPNOTSUPP}
_NO_IOCTL = _UNSUPPORTED | {errno.ENOTTY}
# EPERM: the target is immutable, append-only or a swap file; a copy will say so more clearly.
_NOT_CLONED = _NO_IOCTL | {errno.EXDEV, errno.EPERM}
# EACCES: only the owner of a file (or CAP_LEASE) gets a lease on it.
_NO_LEASE = _UNSUPPORTED | {errno.EACCES, errno.EPERM, errno.ENOLCK, errno.ENOTTY}
NO_LOCKS = _UNSUPPORTED | {errno.ENOLCK}
# EISDIR: a kernel or filesystem that takes O_TMPFILE for an attempt to write to the directory.
_NO_UNNAMED = _UNSUPPORTED | {errno.EISDIR}

Lease = Literal["held", "busy", "unsupported"]
T = TypeVar("T")


class Extent(NamedTuple):
    """A run of bytes of a file and where it lies on its filesystem.

    `physical` is None where the bytes have no blocks of their own: not written yet, or kept inside
    the metadata. `is_shared`: other files (or a snapshot) use the same blocks.
    """

    logical: int
    physical: int | None
    length: int
    is_shared: bool


def exchange(a: str | Path, b: str | Path, *, dir_fd: int | None = None) -> bool:
    """Swap what the two names stand for, in one step; False: not supported here, nothing was done.

    Both must exist on one mount: else `FileNotFoundError`, or `OSError` with EXDEV. With `dir_fd`
    they are names in that directory.
    """
    directory = _AT_FDCWD if dir_fd is None else dir_fd
    renameat2 = _c_function("iPiPI", "renameat2")
    code = renameat2(directory, _c_path(a), directory, _c_path(b), _RENAME_EXCHANGE)
    if code and -code not in _UNSUPPORTED:
        raise OSError(-code, os.strerror(-code), str(a), None, str(b))
    return not code


def clone(source_fd: int, target_fd: int) -> bool:
    """Make the target a reflink of the source; False: not supported here, the target is as it was.

    The target is replaced as a whole. ENOSPC, EDQUOT and EIO are raised.
    """
    return _ioctl(target_fd, _FICLONE, source_fd, _NOT_CLONED)


def _ioctl(
    fd: int, request: int, argument: int | bytearray, unsupported: set[int] = _NO_IOCTL
) -> bool:
    """Ask the filesystem of a file; False: it does not know the question."""
    return _asked(unsupported, lambda: fcntl.ioctl(fd, request, argument)) is not None


def _asked(unsupported: set[int], call: Callable[[], T]) -> T | None:
    """Return the answer to a system call that only Linux has; None: it is not supported here."""
    if sys.platform != "linux":
        return None
    try:
        return call()
    except OSError as error:
        if error.errno in unsupported:
            return None
        raise


def dedupe_range(
    source_fd: int, source_offset: int, length: int, target_fd: int, target_offset: int
) -> int | None:
    """Let a range of the target use the blocks of an equal range of the source.

    The kernel locks both files, compares the bytes and shares the blocks only if they are equal:
    no write by anybody is lost, and neither file changes for its readers, not even its times.
    Returns the bytes done, from the start of the range, at most `DEDUPE_SIZE`; 0: they differ;
    None: not supported here. Offsets are multiples of the block size; the range ends at one too, or
    where both files end. A read-only descriptor of the target is enough for the owner of the file
    and for root; EPERM from a kernel before 4.20 means that it wants one for writing.
    """
    length = min(length, DEDUPE_SIZE)
    request = bytearray(
        _DEDUPE_RANGE.pack(source_offset, length, 1, 0, 0, target_fd, target_offset, 0, 0, 0)
    )
    if not _ioctl(source_fd, _FIDEDUPERANGE, request):
        return None
    *_, done, status, _ = _DEDUPE_RANGE.unpack(request)
    if -status in _UNSUPPORTED:
        return None
    if status < 0:
        raise OSError(-status, os.strerror(-status))
    return 0 if status == _DIFFERS else int(done)


def extents(fd: int) -> tuple[Extent, ...] | None:
    """Return where the bytes of a file lie, in order, holes left out; None: not supported here.

    Neighbouring runs are one, however the filesystem keeps them. Preallocated blocks that were
    never written to are left out like holes. What is still to be written is written first: a file
    overwritten in memory only would be reported where it was before. For others that is free.
    """
    if (found := _fiemap(fd)) is None:
        return None
    merged: list[Extent] = []
    for logical, physical, length, flags in found:
        if flags & _EXTENT_UNWRITTEN:
            continue
        place = None if flags & _EXTENT_PLACELESS else physical
        is_shared = bool(flags & _EXTENT_SHARED)
        extent = Extent(logical=logical, physical=place, length=length, is_shared=is_shared)
        if merged and _goes_on(merged[-1], extent, is_encoded=bool(flags & _EXTENT_ENCODED)):
            merged[-1] = merged[-1]._replace(length=merged[-1].length + length)
        else:
            merged.append(extent)
    return tuple(merged)


def _goes_on(last: Extent, extent: Extent, *, is_encoded: bool) -> bool:
    """Say whether an extent is the continuation of the one before it."""
    if last.physical is None or extent.physical is None or last.is_shared != extent.is_shared:
        return False
    # Every part of a compressed extent is reported with the place where the whole begins.
    follows = last.physical if is_encoded else last.physical + last.length
    return last.logical + last.length == extent.logical and follows == extent.physical


def _fiemap(fd: int) -> list[tuple[int, int, int, int]] | None:
    """Return (logical, physical, length, flags) of every extent; None: not supported here."""
    found: list[tuple[int, int, int, int]] = []
    while not found or not found[-1][3] & _EXTENT_LAST:
        start = found[-1][0] + found[-1][2] if found else 0
        request = bytearray(_FIEMAP_HEAD.size + _FIEMAP_COUNT * _FIEMAP_EXTENT.size)
        rest = (1 << 64) - 1 - start
        _FIEMAP_HEAD.pack_into(request, 0, start, rest, _FIEMAP_SYNC, 0, _FIEMAP_COUNT, 0)
        if not _ioctl(fd, _FIEMAP, request):
            return None
        count = _FIEMAP_HEAD.unpack_from(request)[3]
        if not count:
            break
        end = _FIEMAP_HEAD.size + count * _FIEMAP_EXTENT.size
        found += _FIEMAP_EXTENT.iter_unpack(request[_FIEMAP_HEAD.size : end])
    return found


def shares_blocks(fd_a: int, fd_b: int) -> bool:
    """Say whether two files consist of exactly the same blocks of one filesystem.

    False also where nobody can tell: another device number (a subvolume has its own), no FIEMAP,
    bytes without blocks of their own. It tells about space; equal bytes are not concluded from it.
    """
    if os.fstat(fd_a).st_dev != os.fstat(fd_b).st_dev:
        return False
    first, second = extents(fd_a), extents(fd_b)
    if first is None or second is None or any(extent.physical is None for extent in first):
        return False
    return [extent[:3] for extent in first] == [extent[:3] for extent in second]


def open_quietly(path: str | bytes | os.PathLike[str] | os.PathLike[bytes], flags: int) -> int:
    """Open a file for reading without making it look recently used, where the system allows it."""
    try:
        return os.open(path, flags | getattr(os, "O_NOATIME", 0))
    except PermissionError:  # only the owner may leave the access time alone
        return os.open(path, flags)


def take_lease(fd: int) -> Lease:
    """Ask the kernel to hold back writers of the file until the lease is dropped or `fd` is closed.

    "held": nobody has it open for writing, and whoever now opens it so blocks (at most
    /proc/sys/fs/lease-break-time seconds), which `lease_intact` shows. "busy": somebody, perhaps
    this process or `fd` itself, has it open for writing. A network filesystem may say "busy" of
    every file: trust it only where `probe` found leases to work. "unsupported": no lease was taken.
    """
    try:
        # A writer who comes is announced by SIGIO, which kills the process. SIGURG is ignored.
        is_known = _fcntl(fd, "F_SETSIG", signal.SIGURG, _NO_LEASE) is not None
        if is_known and _fcntl(fd, "F_SETLEASE", fcntl.F_RDLCK, _NO_LEASE) is not None:
            return "held"
    except BlockingIOError:
        return "busy"
    return "unsupported"


def lease_intact(fd: int) -> bool:
    """Say whether the lease is held and no writer has come since, not even one that is blocked."""
    return _fcntl(fd, "F_GETLEASE", 0, _NO_LEASE) == fcntl.F_RDLCK


def drop_lease(fd: int) -> None:
    """Let waiting writers go on; does nothing if there is no lease."""
    with suppress(BlockingIOError):  # none was held
        _fcntl(fd, "F_SETLEASE", fcntl.F_UNLCK, _NO_LEASE)


def _fcntl(fd: int, command: str, argument: int | bytes, unsupported: set[int]) -> object:
    """Ask the kernel about a descriptor; None: it does not do that, here or for this user."""
    return _asked(unsupported, lambda: fcntl.fcntl(fd, getattr(fcntl, command), argument))


def lock_byte(fd: int, byte: int) -> bool | None:
    """Lock one byte of a file without waiting; False: another descriptor holds it.

    None where there are no such locks: in some sandboxes, for instance. Only Linux gives them to
    the open file, as `flock` does, and not to the process.
    """
    wanted = _FLOCK.pack(fcntl.F_WRLCK, 0, byte, 1, 0)
    try:
        return None if _fcntl(fd, "F_OFD_SETLK", wanted, NO_LOCKS) is None else True
    except BlockingIOError:
        return False


def is_byte_locked(fd: int, byte: int) -> bool | None:
    """Say whether another descriptor holds a byte; None where bytes cannot be locked."""
    wanted = _FLOCK.pack(fcntl.F_WRLCK, 0, byte, 1, 0)
    found = _fcntl(fd, "F_OFD_GETLK", wanted, NO_LOCKS)
    return _FLOCK.unpack(found)[0] != fcntl.F_UNLCK if isinstance(found, bytes) else None


def unlock_bytes(fd: int) -> None:
    """Give back the locks of all bytes."""
    with suppress(OSError):
        _fcntl(fd, "F_OFD_SETLK", _FLOCK.pack(fcntl.F_UNLCK, 0, 0, 0, 0), NO_LOCKS)


def preallocate(fd: int, size: int) -> None:
    """Reserve `size` bytes, so that a full disk is known before the first byte is written.

    The file becomes at least that long. Where this is not supported nothing happens; ENOSPC, EDQUOT
    and EFBIG are raised and may leave the file partly reserved.
    """
    code = _fallocate(fd, 0, 0, size) if size > 0 else 0
    if code and -code not in _UNSUPPORTED:
        raise OSError(-code, os.strerror(-code))


def reserve(fd: int, start: int, size: int) -> bool:
    """Reserve room behind the end of a file, which keeps its size; False: not possible here."""
    return _fallocate(fd, _KEEP_SIZE, start, size) == 0


def _fallocate(fd: int, mode: int, start: int, size: int) -> int:
    # Not os.posix_fallocate: where the filesystem cannot do it, glibc writes into every block.
    # 64-bit offsets on 32-bit systems have a name of their own in glibc, and only there.
    fallocate = _c_function("iiqq", "fallocate64", "fallocate")
    while (code := fallocate(fd, mode, start, size)) == -errno.EINTR:
        pass
    return code


def open_unnamed(directory: Path, mode: int = 0o600) -> int | None:
    """Return a descriptor of a new file without a name, gone when closed; None: not supported.

    `link_fd` gives it a name; None also where that could not work because /proc is missing.
    """
    if sys.platform != "linux" or not os.path.isdir(_OWN_DESCRIPTORS):
        return None
    flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
    return _asked(_NO_UNNAMED, lambda: os.open(directory, flags, mode))


def link_fd(fd: int, target: Path) -> None:
    """Give an open file (one of `open_unnamed`) a name; `FileExistsError` if the name is taken."""
    # A directory descriptor, though unused with an absolute path, makes os.link call linkat and
    # respect follow_symlinks: without one it links the symlink in /proc and answers EXDEV.
    os.link(f"{_OWN_DESCRIPTORS}/{fd}", target, src_dir_fd=fd, follow_symlinks=True)


def path_of(fd: int) -> Path:
    """Return a path of an open file; OSError where the system does not tell."""
    return Path(os.readlink(f"{_OWN_DESCRIPTORS}/{fd}"))


def sync_data(fd: int) -> None:
    """Bring the bytes of an open file to the disk; macOS has no fdatasync."""
    getattr(os, "fdatasync", os.fsync)(fd)


def sync_directory(path: Path) -> None:
    """Bring the names in a directory to the disk; does nothing where directories have no fsync."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(fd)


def sync_filesystem(fd: int) -> None:
    """Bring all that was written to the filesystem of an open file to the disk."""
    code = _c_function("i", "syncfs")(fd)
    if code == -errno.ENOSYS:
        os.sync()
    elif code:
        raise OSError(-code, os.strerror(-code))


@cache
def boot_id() -> str:
    """Return a text that is another one after the machine was started again.

    Where the system has none it is another one in every process: too cautious, never wrong.
    """
    found = ""
    with suppress(OSError), open(_BOOT_ID, encoding="ascii") as file:
        found = file.read().strip()
    return found or f"process-{os.urandom(16).hex()}"


def is_supported() -> bool:
    """Say whether this is a system that a store works on."""
    return sys.platform in ("linux", "darwin")


def effective_user() -> int:
    """Return the user id that file permissions are checked against."""
    return os.geteuid()


def _c_path(path: str | Path) -> bytes:
    text = os.fsencode(path)
    if b"\0" in text:  # C would cut the name there and work on another file
        raise ValueError("embedded null byte")
    return text


@cache
def _c_function(codes: str, *names: str) -> Callable[..., int]:
    """Return the first of these C functions that exists, else one that says ENOSYS.

    It answers its result, or the negative errno. `codes` are the types of its arguments: int,
    unsigned (I), long (l), int64 (q), bytes (P).
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    name = next((each for each in names if hasattr(libc, each)), None)
    if name is None or sys.platform != "linux":
        return lambda *_: -errno.ENOSYS
    kinds: dict[str, Any] = {
        "i": ctypes.c_int, "I": ctypes.c_uint, "l": ctypes.c_long, "q": ctypes.c_int64,
        "P": ctypes.c_char_p,
    }  # fmt: skip
    function = libc[name]
    function.argtypes = [kinds[code] for code in codes]
    function.restype = ctypes.c_int

    def call(*arguments: int | bytes) -> int:
        answer = int(function(*arguments))
        return answer if answer >= 0 else -ctypes.get_errno()

    return call


_OPENAT2, _NO_SYMLINKS = 437, 4  # the same everywhere
_OPEN_HOW = struct.Struct("=QQQ")
"""The kernel's `struct open_how`: flags, mode, how names are looked up."""
_NO_OPENAT2 = (errno.ENOSYS, errno.EPERM, errno.ENAMETOOLONG)
"""An older kernel; a container that forbids it; a path longer than one call takes."""


def open_without_symlinks(path: str | Path, flags: int) -> int | None:
    """Open a path no component of which may be a symlink (ELOOP); None: the system cannot do that.

    One call in place of one for each folder above it; Linux has had openat2 since 5.6.
    """
    how = _OPEN_HOW.pack(flags, 0, _NO_SYMLINKS)
    syscall = _c_function("liPPl", "syscall")
    answer = syscall(_OPENAT2, _AT_FDCWD, _c_path(path), how, len(how))
    if answer >= 0:
        return answer
    if -answer in _NO_OPENAT2:
        return None
    raise OSError(-answer, os.strerror(-answer), os.fspath(path))


RACY_NS = 2_000_000_000
"""A file younger than this when hashed may change again within one tick (FAT ticks in 2 s)."""

LATEST_NS = (1 << 63) - 1
"""The latest time that fits into an integer of the index."""


class StatKey(NamedTuple):
    """Size, modification time and change time, in integers."""

    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, st: os.stat_result) -> StatKey:
        """Return the key of a stat result. Times after 2262, which no index can hold, are cut."""
        return cls(st.st_size, min(st.st_mtime_ns, LATEST_NS), min(st.st_ctime_ns, LATEST_NS))

    def is_racy(self, now: int) -> bool:
        """Say whether a change right after `now` (in ns) could leave this key as it is.

        A modification time in the future, as archives have it, could not: a write sets it to now.
        """
        return self.ctime_ns > now - RACY_NS or abs(now - self.mtime_ns) < RACY_NS


def attributes_of(file: str | Path | int) -> list[str]:
    """Return the names of the extended attributes of a file, a symlink itself or a descriptor.

    Those in `security.` are left to the system: a new file gets its label from where it lies, and
    only the kernel's policy may set it.
    """
    with suppress(OSError, AttributeError):  # a filesystem, or a system, without any
        names = os.listxattr(file, follow_symlinks=isinstance(file, int))
        return [name for name in names if not name.startswith("security.")]
    return []


def allocated_bytes(st: os.stat_result) -> int:
    """Return the bytes of disk blocks an inode uses."""
    return st.st_blocks * 512
