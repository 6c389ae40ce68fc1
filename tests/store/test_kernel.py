"""The kernel is asked for real; only refusals that no filesystem at hand gives are injected."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from smartcache.system import filesystems, kernel
from smartcache.system.filesystems import mount_of
from tests.processes.children import NOBODY, Child
from tests.store.files import raising, row

linux = pytest.mark.skipif(sys.platform != "linux", reason="a Linux system call")
UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"old bytes")
    return path


@contextmanager
def opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def output(program: str, *arguments: str | Path) -> str:
    """What a Python process prints that has the modules as `kernel` and `filesystems`."""
    modules = f"import {kernel.__name__} as kernel, {filesystems.__name__} as filesystems\n"
    command = [sys.executable, "-c", program.replace("IMPORT\n", modules), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.check_output(command, text=True, env=environment)


def answer(monkeypatch: pytest.MonkeyPatch, *codes: int) -> list[int]:
    """Make C functions of the module fail in these ways, in the last one for ever."""
    left = [-code for code in codes]
    take = lambda *_: left.pop(0) if len(left) > 1 else left[0]  # noqa: E731
    monkeypatch.setattr(kernel, "_c_function", lambda *_: take)
    return left


def assert_raises(code: int, act: Callable[[], object]) -> OSError:
    with row(errno.errorcode[code]), pytest.raises(OSError) as caught:  # noqa: PT011
        act()
    assert caught.value.errno == code
    return caught.value


@linux
class TestExchange:
    def test_two_names_swap_their_files(self, tmp_path: Path) -> None:
        """Names that are no text are taken byte for byte."""
        for name in ("a", os.fsdecode(b"\xff a\n")):
            a, b = tmp_path / name, tmp_path / "é"
            a.write_bytes(b"A")
            b.write_bytes(b"B")
            inodes = a.stat().st_ino, b.stat().st_ino
            assert kernel.exchange(a, b) is True
            assert (a.read_bytes(), b.read_bytes()) == (b"B", b"A")
            assert (b.stat().st_ino, a.stat().st_ino) == inodes

    def test_what_cannot_be_swapped_raises_and_what_is_not_supported_says_no(
        self, path: Path, tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        missing, other = tmp_path / "missing", elsewhere / "b"
        other.touch()
        error = assert_raises(errno.ENOENT, lambda: kernel.exchange(path, missing))
        assert (error.filename, error.filename2) == (str(path), str(missing))
        assert_raises(errno.EXDEV, lambda: kernel.exchange(path, other))
        with pytest.raises(ValueError, match="null byte"):
            kernel.exchange(tmp_path / "file\0x", path)
        assert path.read_bytes() == b"old bytes"
        for code in UNSUPPORTED:
            answer(monkeypatch, code)
            assert kernel.exchange(path, other) is False, errno.errorcode[code]
        answer(monkeypatch, errno.EIO)
        assert_raises(errno.EIO, lambda: kernel.exchange(path, other))


def test_a_clone_has_the_same_bytes_or_the_answer_is_no(
    path: Path, memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (path.parent, memory_path):
        (target := folder / "target").write_bytes(b"kept")
        with opened(path) as a, opened(target, os.O_RDWR) as b:
            cloned = kernel.clone(a, b)
        assert target.read_bytes() == (b"old bytes" if cloned else b"kept")
        assert not (cloned and mount_of(folder).fstype in ("ext4", "tmpfs"))
    if sys.platform == "linux":
        with opened(path) as a, opened(path.with_name("target")) as b:
            assert_raises(errno.EBADF, lambda: kernel.clone(a, b))
        for code in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            monkeypatch.setattr(fcntl, "ioctl", raising(code))
            assert_raises(code, lambda: kernel.clone(0, 1))


@linux
class TestLease:
    @pytest.fixture(autouse=True)
    def _leasable(self, path: Path) -> None:
        with opened(path) as fd:
            try:
                fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            except OSError as error:
                pytest.skip(f"no leases on {mount_of(path).fstype}: {error}")

    def test_a_quiet_file_gives_a_lease_that_readers_and_links_do_not_break(
        self, path: Path
    ) -> None:
        """Until it is dropped, which may be done twice or without one."""
        with opened(path) as fd:
            kernel.drop_lease(fd)
            assert not kernel.lease_intact(fd)
            assert kernel.take_lease(fd) == "held"
            assert path.read_bytes() == b"old bytes"
            os.link(path, path.with_name("link"))
            os.rename(path, path.with_name("moved"))
            assert kernel.lease_intact(fd)
            for _ in range(2):
                kernel.drop_lease(fd)
                assert not kernel.lease_intact(fd)

    def test_a_file_that_somebody_may_write_is_busy(self, path: Path) -> None:
        program = "import mmap, sys; file = open(sys.argv[1], 'r+b'); "
        mapping = "kept = mmap.mmap(file.fileno(), 0); file.close(); "
        for begin in (program, program + mapping):
            command = [sys.executable, "-c", f"{begin}print(flush=True); input()", str(path)]
            pipe = subprocess.PIPE
            with row(begin), subprocess.Popen(command, stdin=pipe, stdout=pipe) as other:
                assert other.stdout is not None
                assert other.stdout.readline() == b"\n"
                with opened(path) as fd:
                    assert kernel.take_lease(fd) == "busy"
                other.communicate(b"\n")
            with opened(path) as fd:
                assert kernel.take_lease(fd) == "held"
        with opened(path, os.O_RDWR) as fd:
            assert kernel.take_lease(fd) == "busy"

    def test_a_writer_waits_is_seen_and_kills_nobody(self, path: Path) -> None:
        """Without F_SETSIG the kernel's SIGIO would end the process that holds the lease."""
        with opened(path) as fd:
            assert kernel.take_lease(fd) == "held"
            assert fcntl.fcntl(fd, fcntl.F_GETSIG) == signal.SIGURG
            program = "import sys; file = open(sys.argv[1], 'r+b'); file.write(b'NEW')"
            with subprocess.Popen([sys.executable, "-c", program, str(path)]) as writer:
                deadline = time.monotonic() + 60
                while kernel.lease_intact(fd) and time.monotonic() < deadline:
                    time.sleep(0.005)
                assert not kernel.lease_intact(fd), "nobody came"
                assert writer.poll() is None, "the writer did not wait"
                assert os.pread(fd, 3, 0) == b"old", "the writer got in"
                kernel.drop_lease(fd)
                assert writer.wait(60) == 0
            assert os.pread(fd, 9, 0) == b"NEW bytes"

    def test_files_of_others_and_directories_give_none_and_closed_descriptors_raise(
        self, tmp_path: Path
    ) -> None:
        def ask(path: Path) -> tuple[str, bool]:
            with opened(path) as fd:
                kernel.drop_lease(fd)
                return kernel.take_lease(fd), kernel.lease_intact(fd)

        user = NOBODY if os.geteuid() == 0 else None
        with Child(lambda: ask(Path("/etc/passwd")), user=user) as child:
            assert child.result() == ask(tmp_path) == ("unsupported", False)
        with opened(tmp_path) as fd:
            pass
        for call in (kernel.take_lease, kernel.lease_intact, kernel.drop_lease):
            with row(call), pytest.raises(OSError, match="descriptor"):
                call(fd)


class TestPreallocate:
    def test_the_space_is_taken_at_once_and_bytes_that_are_there_stay(
        self, memory_path: Path
    ) -> None:
        """More than the filesystem has in all, beyond 32 bits, is refused at once."""
        path = memory_path / "file"
        path.write_bytes(b"old bytes")
        total = os.statvfs(path).f_blocks * os.statvfs(path).f_frsize
        with opened(path, os.O_RDWR) as fd:
            for size in (0, -1):
                kernel.preallocate(fd, size)
                assert os.fstat(fd).st_size == 9
            if total:  # else a tmpfs without a limit
                assert_raises(errno.ENOSPC, lambda: kernel.preallocate(fd, total + 2**33))
            kernel.preallocate(fd, 1_000_000)
            assert os.fstat(fd).st_size == 1_000_000
            assert os.fstat(fd).st_blocks * 512 >= 1_000_000
            assert os.pread(fd, 9, 0) == b"old bytes"

    @linux
    def test_a_filesystem_without_it_is_no_error_and_a_full_or_damaged_disk_is(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for code in UNSUPPORTED:
            answer(monkeypatch, code)
            with row(code), opened(path, os.O_RDWR) as fd:
                kernel.preallocate(fd, 100)
                assert os.fstat(fd).st_size == 9
        for code in (errno.EDQUOT, errno.EIO, errno.EFBIG):
            answer(monkeypatch, code)
            assert_raises(code, lambda: kernel.preallocate(0, 100))
        left = answer(monkeypatch, errno.EINTR, errno.EINTR, 0)
        kernel.preallocate(0, 100)
        assert left == [0], "an interrupted call is made again"


@linux
def test_an_unnamed_file_is_private_until_it_is_given_names_and_overwrites_none(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = path.parent
    with pytest.raises(FileNotFoundError):
        kernel.open_unnamed(folder / "absent")
    fd = kernel.open_unnamed(folder)
    if fd is None:
        pytest.skip(f"no O_TMPFILE on {mount_of(folder).fstype}")
    assert os.fstat(fd).st_mode & 0o777 == 0o600
    assert not os.get_inheritable(fd)
    os.write(fd, b"bytes")
    assert os.listdir(folder) == ["file"]
    os.fchmod(fd, 0o444)
    for count, name in enumerate(("one", "two"), 1):
        kernel.link_fd(fd, folder / name)
        assert (folder / name).read_bytes() == b"bytes"
        assert os.fstat(fd).st_nlink == count
    with pytest.raises(FileExistsError):
        kernel.link_fd(fd, path)
    assert path.read_bytes() == b"old bytes"
    os.close(fd)
    for code in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", raising(code))
            assert kernel.open_unnamed(folder) is None, errno.errorcode[code]
    monkeypatch.setattr(kernel, "_OWN_DESCRIPTORS", str(folder / "no-proc"))
    assert kernel.open_unnamed(folder) is None, "it could not be named"


def test_a_directory_can_be_synced_and_an_error_leaks_no_descriptor(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel.sync_directory(path.parent)
    with pytest.raises(NotADirectoryError):
        kernel.sync_directory(path)
    if sys.platform == "linux":
        with opened(Path("/proc/self")) as fd:
            assert_raises(errno.EINVAL, lambda: os.fsync(fd))
        kernel.sync_directory(Path("/proc/self"))  # a filesystem without it is no error
    before = os.listdir("/dev/fd")
    monkeypatch.setattr(os, "fsync", raising(errno.EIO))
    assert_raises(errno.EIO, lambda: kernel.sync_directory(path.parent))
    assert os.listdir("/dev/fd") == before


def test_the_boot_id_is_the_kernels_and_where_there_is_none_every_process_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sys.platform == "linux":
        assert kernel.boot_id() == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    monkeypatch.setattr(kernel, "_BOOT_ID", str(tmp_path / "absent"))
    kernel.boot_id.cache_clear()
    try:
        first = kernel.boot_id()
        assert kernel.boot_id() == first
        kernel.boot_id.cache_clear()
        assert kernel.boot_id() != first
    finally:
        kernel.boot_id.cache_clear()


def test_a_system_without_any_of_it_is_told_so_by_the_results(tmp_path: Path) -> None:
    """Importing the modules loads nothing that takes long."""
    program = """import os, sys
from pathlib import Path
sys.platform = "darwin"
IMPORT
print([name for name in ("ctypes", "shutil", "tempfile", "uuid", "zlib") if name in sys.modules])
here = Path(sys.argv[1])
fd = os.open(here / "file", os.O_RDWR | os.O_CREAT)
kernel.preallocate(fd, 100)
kernel.drop_lease(fd)
kernel.sync_directory(here)
kernel.sync_filesystem(fd)
print(kernel.exchange(here, here), kernel.clone(fd, fd), kernel.take_lease(fd),
      kernel.lease_intact(fd), kernel.open_unnamed(here), kernel.lock_byte(fd, 1),
      kernel.open_without_symlinks(here, os.O_RDONLY))
"""
    expected = "[]\nFalse False unsupported False None None None\n"
    assert output(program, tmp_path) == expected
