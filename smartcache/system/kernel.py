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
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

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
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_OWN_DESCRIPTORS = "/proc/self/fd"

_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE
# Linux has one number for ENOTSUP and EOPNOTSUPP, macOS has two.
_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL} | {errno.ENOTSUP, errno.EOPNOTSUPP}
# EPERM: the target is immutable, append-only or a swap file; a copy will say so more clearly.
_NOT_CLONED = _UNSUPPORTED | {errno.ENOTTY, errno.EXDEV, errno.EPERM}
# EACCES: only the owner of a file (or CAP_LEASE) gets a lease on it.
_NO_LEASE = _UNSUPPORTED | {errno.EACCES, errno.EPERM, errno.ENOLCK, errno.ENOTTY}
# EISDIR: a kernel or filesystem that takes O_TMPFILE for an attempt to write to the directory.
_NO_UNNAMED = _UNSUPPORTED | {errno.EISDIR}

Lease = Literal["held", "busy", "unsupported"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
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
    renameat2 = _c_function("iPiPI", "renameat2") if sys.platform == "linux" else None
    if renameat2 is None:
        return False
    directory = _AT_FDCWD if dir_fd is None else dir_fd
    code = renameat2(directory, _c_path(a), directory, _c_path(b), _RENAME_EXCHANGE)
    if code in _UNSUPPORTED:
        return False
    if code:
        raise OSError(code, os.strerror(code), str(a), None, str(b))
    return True


def clone(source_fd: int, target_fd: int) -> bool:
    """Make the target a reflink of the source; False: not supported here, the target is as it was.

    The target is replaced as a whole. ENOSPC, EDQUOT and EIO are raised.
    """
    if sys.platform != "linux":
        return False
    try:
        fcntl.ioctl(target_fd, _FICLONE, source_fd)
    except OSError as error:
        if error.errno in _NOT_CLONED:
            return False
        raise
    return True


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
    if sys.platform != "linux":
        return None
    length = min(length, DEDUPE_SIZE)
    request = bytearray(
        _DEDUPE_RANGE.pack(source_offset, length, 1, 0, 0, target_fd, target_offset, 0, 0, 0)
    )
    try:
        fcntl.ioctl(source_fd, _FIDEDUPERANGE, request)
    except OSError as error:
        if error.errno in _UNSUPPORTED or error.errno == errno.ENOTTY:
            return None
        raise
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
    if sys.platform != "linux":
        return None
    try:
        found = list(_fiemap(fd))
    except OSError as error:
        if error.errno in _UNSUPPORTED or error.errno == errno.ENOTTY:
            return None
        raise
    merged: list[Extent] = []
    for logical, physical, length, flags in found:
        if flags & _EXTENT_UNWRITTEN:
            continue
        place = None if flags & _EXTENT_PLACELESS else physical
        is_shared = bool(flags & _EXTENT_SHARED)
        extent = Extent(logical=logical, physical=place, length=length, is_shared=is_shared)
        if merged and _goes_on(merged[-1], extent, is_encoded=bool(flags & _EXTENT_ENCODED)):
            merged[-1] = replace(merged[-1], length=merged[-1].length + length)
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


def _fiemap(fd: int) -> Iterator[tuple[int, int, int, int]]:
    """Give (logical, physical, length, flags) of every extent, some hundred per call."""
    start = 0
    while True:
        request = bytearray(_FIEMAP_HEAD.size + _FIEMAP_COUNT * _FIEMAP_EXTENT.size)
        rest = (1 << 64) - 1 - start
        _FIEMAP_HEAD.pack_into(request, 0, start, rest, _FIEMAP_SYNC, 0, _FIEMAP_COUNT, 0)
        fcntl.ioctl(fd, _FIEMAP, request)
        count = _FIEMAP_HEAD.unpack_from(request)[3]
        if not count:
            return
        end = _FIEMAP_HEAD.size + count * _FIEMAP_EXTENT.size
        for found in _FIEMAP_EXTENT.iter_unpack(request[_FIEMAP_HEAD.size : end]):
            yield found
            start = found[0] + found[2]
        if found[3] & _EXTENT_LAST:
            return


def shares_blocks(fd_a: int, fd_b: int) -> bool:
    """Say whether two files consist of exactly the same blocks of one filesystem.

    False also where nobody can tell: another device number (a subvolume has its own), no FIEMAP,
    bytes without blocks of their own. It tells about space; equal bytes are not concluded from it.
    """
    if os.fstat(fd_a).st_dev != os.fstat(fd_b).st_dev:
        return False
    first, second = extents(fd_a), extents(fd_b)
    if first is None or second is None or any(e.physical is None for e in first):
        return False
    places = [[(e.logical, e.physical, e.length) for e in each] for each in (first, second)]
    return places[0] == places[1]


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
    if sys.platform != "linux":
        return "unsupported"
    try:
        # A writer who comes is announced by SIGIO, which kills the process. SIGURG is ignored.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        if error.errno == errno.EAGAIN:
            return "busy"
        if error.errno in _NO_LEASE:
            return "unsupported"
        raise
    return "held"


def lease_intact(fd: int) -> bool:
    """Say whether the lease is held and no writer has come since, not even one that is blocked."""
    if sys.platform != "linux":
        return False
    try:
        return fcntl.fcntl(fd, fcntl.F_GETLEASE) == fcntl.F_RDLCK
    except OSError as error:
        if error.errno in _NO_LEASE:
            return False
        raise


def drop_lease(fd: int) -> None:
    """Let waiting writers go on; does nothing if there is no lease."""
    if sys.platform != "linux":
        return
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:
        if error.errno != errno.EAGAIN and error.errno not in _NO_LEASE:  # EAGAIN: none was held
            raise


def preallocate(fd: int, size: int) -> None:
    """Reserve `size` bytes, so that a full disk is known before the first byte is written.

    The file becomes at least that long. Where this is not supported nothing happens; ENOSPC, EDQUOT
    and EFBIG are raised and may leave the file partly reserved.
    """
    code = _fallocate(fd, 0, 0, size) if size > 0 else 0
    if code and code not in _UNSUPPORTED:
        raise OSError(code, os.strerror(code))


def reserve(fd: int, start: int, size: int) -> bool:
    """Reserve room behind the end of a file, which keeps its size; False: not possible here."""
    return _fallocate(fd, _KEEP_SIZE, start, size) == 0


def _fallocate(fd: int, mode: int, start: int, size: int) -> int:
    # Not os.posix_fallocate: where the filesystem cannot do it, glibc writes into every block.
    # 64-bit offsets on 32-bit systems have a name of their own in glibc, and only there.
    names = ("fallocate64", "fallocate") if sys.platform == "linux" else ()
    fallocate = _c_function("iiqq", *names) if names else None
    if fallocate is None:
        return errno.ENOSYS
    while (code := fallocate(fd, mode, start, size)) == errno.EINTR:
        pass
    return code


def open_unnamed(directory: Path, mode: int = 0o600) -> int | None:
    """Return a descriptor of a new file without a name, gone when closed; None: not supported.

    `link_fd` gives it a name; None also where that could not work because /proc is missing.
    """
    if sys.platform != "linux" or not os.path.isdir(_OWN_DESCRIPTORS):
        return None
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno in _NO_UNNAMED:
            return None
        raise


def link_fd(fd: int, target: Path) -> None:
    """Give an open file (one of `open_unnamed`) a name; `FileExistsError` if the name is taken."""
    if sys.platform != "linux":
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), str(target))
    # A directory descriptor, though unused with an absolute path, makes os.link call linkat and
    # respect follow_symlinks: without one it links the symlink in /proc and answers EXDEV.
    os.link(f"{_OWN_DESCRIPTORS}/{fd}", target, src_dir_fd=fd, follow_symlinks=True)


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


@cache
def boot_id() -> str:
    """Return a text that is another one after the machine was started again.

    Where the system has none it is another one in every process: too cautious, never wrong.
    """
    found = ""
    if sys.platform == "linux":
        try:
            with open(_BOOT_ID, encoding="ascii") as file:
                found = file.read().strip()
        except OSError:
            pass
    elif sys.platform == "darwin":
        import ctypes

        value = ctypes.create_string_buffer(64)
        size = ctypes.c_size_t(len(value))
        sysctl = ctypes.CDLL(None).sysctlbyname
        if not sysctl(b"kern.bootsessionuuid", value, ctypes.byref(size), None, ctypes.c_size_t(0)):
            found = value.value.decode("ascii", "replace")
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
def _c_function(codes: str, *names: str) -> Callable[..., int] | None:
    """Return the first of these C functions that exists, made to answer 0 or its errno; else None.

    `codes` are the types of its arguments: int, unsigned (I), int64 (q), path (P).
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    name = next((each for each in names if hasattr(libc, each)), None)
    if name is None:
        return None
    kinds: dict[str, type[ctypes.c_int | ctypes.c_uint | ctypes.c_int64 | ctypes.c_char_p]]
    kinds = {"i": ctypes.c_int, "I": ctypes.c_uint, "q": ctypes.c_int64, "P": ctypes.c_char_p}
    function = libc[name]
    function.argtypes = [kinds[code] for code in codes]
    function.restype = ctypes.c_int

    def call(*arguments: int | bytes) -> int:
        return 0 if function(*arguments) == 0 else ctypes.get_errno()

    return call


_NO_OPENAT2 = (errno.ENOSYS, errno.EPERM, errno.ENAMETOOLONG)
"""An older kernel; a container that forbids it; a path longer than one call takes."""


def open_without_symlinks(path: str | Path, flags: int) -> int | None:
    """Open a path no component of which may be a symlink (ELOOP); None: the system cannot do that.

    One call in place of one for each folder above it; Linux has had openat2 since 5.6.
    """
    call = _openat2()
    if call is None:
        return None
    answer = call(_c_path(path), flags)
    if answer >= 0:
        return answer
    if -answer in _NO_OPENAT2:
        return None
    raise OSError(-answer, os.strerror(-answer), os.fspath(path))


@cache
def _openat2() -> Callable[[bytes, int], int] | None:
    """Return a function that opens a path and answers a descriptor, or its errno as a negative."""
    if sys.platform != "linux":
        return None
    import ctypes

    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    number, here, no_symlinks = ctypes.c_long(437), ctypes.c_int(-100), 4  # the same everywhere

    def call(path: bytes, flags: int) -> int:
        how = (ctypes.c_uint64 * 3)(flags, 0, no_symlinks)
        answer = syscall(number, here, path, how, ctypes.c_size_t(24))
        return answer if answer >= 0 else -ctypes.get_errno()

    return call


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

    def is_racy(self, now_ns: int | None = None) -> bool:
        """Say whether a change right after `now` could leave this key as it is.

        A modification time in the future, as archives have it, could not: a write sets it to now.
        """
        now = time.time_ns() if now_ns is None else now_ns
        return self.ctime_ns > now - RACY_NS or abs(now - self.mtime_ns) < RACY_NS


def allocated_bytes(st: os.stat_result) -> int:
    """Return the bytes of disk blocks an inode uses."""
    return st.st_blocks * 512
