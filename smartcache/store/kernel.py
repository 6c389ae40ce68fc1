"""System calls that Python has no name for, and those that not every system or filesystem has.

Every function tries the call and says by its result that it is not supported here; nothing is
guessed from versions or names. Errors that mean something else (no space, no permission, damaged
disk) are raised as plain `OSError`. The module imports everywhere; ctypes is loaded on first use.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Literal

with suppress(ImportError):  # Windows
    import fcntl

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_FICLONE = 0x40049409
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_OWN_DESCRIPTORS = "/proc/self/fd"

_UNSUPPORTED = frozenset(
    getattr(errno, name)
    # Linux has one number for ENOTSUP and EOPNOTSUPP, macOS has two, Windows lacks one.
    for name in ("ENOSYS", "EINVAL", "ENOTSUP", "EOPNOTSUPP")
    if hasattr(errno, name)
)
# EPERM: the target is immutable, append-only or a swap file; a copy will say so more clearly.
_NOT_CLONED = _UNSUPPORTED | {errno.ENOTTY, errno.EXDEV, errno.EPERM}
# EACCES: only the owner of a file (or CAP_LEASE) gets a lease on it.
_NO_LEASE = _UNSUPPORTED | {errno.EACCES, errno.EPERM, errno.ENOLCK, errno.ENOTTY}
# EISDIR: a kernel or filesystem that takes O_TMPFILE for an attempt to write to the directory.
_NO_UNNAMED = _UNSUPPORTED | {errno.EISDIR}

Lease = Literal["held", "busy", "unsupported"]


def exchange(a: Path, b: Path) -> bool:
    """Swap what the two names stand for, in one step; False: not supported here, nothing was done.

    Both must exist on one mount: else `FileNotFoundError`, or `OSError` with EXDEV.
    """
    renameat2 = _c_function("iPiPI", "renameat2") if sys.platform == "linux" else None
    if renameat2 is None:
        return False
    first, second = _c_path(a), _c_path(b)
    code = renameat2(_AT_FDCWD, first, _AT_FDCWD, second, _RENAME_EXCHANGE)
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
    if size <= 0:
        return
    # Not os.posix_fallocate: where the filesystem cannot do it, glibc writes into every block.
    # 64-bit offsets on 32-bit systems have a name of their own in glibc, and only there.
    names = ("fallocate64", "fallocate")
    fallocate = _c_function("iiqq", *names) if sys.platform == "linux" else None
    if fallocate is None:
        return
    while (code := fallocate(fd, 0, 0, size)) == errno.EINTR:
        pass
    if code and code not in _UNSUPPORTED:
        raise OSError(code, os.strerror(code))


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
    if sys.platform == "win32":
        return
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
        found = _sysctl("kern.bootsessionuuid")
    return found or f"process-{os.urandom(16).hex()}"


def effective_user() -> int:
    """Return the user id that file permissions are checked against; -1 on Windows."""
    if sys.platform == "win32":
        return -1
    return os.geteuid()


def _c_path(path: Path) -> bytes:
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


def _sysctl(name: str) -> str:
    """Return a text of the macOS kernel, empty if it has no such one."""
    import ctypes

    value = ctypes.create_string_buffer(64)
    size = ctypes.c_size_t(len(value))
    sysctlbyname = ctypes.CDLL(None).sysctlbyname
    failed = sysctlbyname(name.encode(), value, ctypes.byref(size), None, ctypes.c_size_t(0))
    return "" if failed else value.value.decode("ascii", "replace")
