"""The kernel is asked for real; only refusals that no filesystem at hand gives are injected."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from smartcache.system import filesystems, kernel
from smartcache.system.filesystems import mount_of
from tests.processes.children import NOBODY, Child
from tests.store.files import raising, row

if sys.platform == "win32":
    pytest.skip("POSIX system calls", allow_module_level=True)

import fcntl

SHM = Path("/dev/shm")  # noqa: S108

linux = pytest.mark.skipif(sys.platform != "linux", reason="a Linux system call")


@pytest.fixture
def shm() -> Iterator[Path]:
    """A directory in memory, on another filesystem than the temporary one."""
    if not os.access(SHM, os.W_OK) or mount_of(SHM).fstype != "tmpfs":
        pytest.skip("no tmpfs at /dev/shm")
    with tempfile.TemporaryDirectory(dir=SHM) as name:
        yield Path(name)


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
    code = program.replace("IMPORT\n", modules)
    root = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
        check=True,
    ).stdout


def answer(monkeypatch: pytest.MonkeyPatch, *codes: int) -> list[int]:
    """Make C functions of the module answer these codes, the last one for ever."""
    left = list(codes)
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

    def test_a_missing_name_or_a_null_byte_raises_and_changes_nothing(
        self, path: Path, tmp_path: Path
    ) -> None:
        missing = tmp_path / "missing"
        error = assert_raises(errno.ENOENT, lambda: kernel.exchange(path, missing))
        assert (error.filename, error.filename2) == (str(path), str(missing))
        (tmp_path / "b").touch()
        with pytest.raises(ValueError, match="null byte"):
            kernel.exchange(tmp_path / "file\0x", tmp_path / "b")
        assert path.read_bytes() == b"old bytes"

    def test_names_on_two_filesystems_raise(self, path: Path, shm: Path) -> None:
        if path.stat().st_dev == shm.stat().st_dev:
            pytest.skip("the temporary directory is in memory too")
        (shm / "b").touch()
        assert_raises(errno.EXDEV, lambda: kernel.exchange(path, shm / "b"))

    def test_a_filesystem_or_c_library_without_it_says_no_and_a_damaged_disk_raises(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        a, b, find = tmp_path / "a", tmp_path / "b", kernel._c_function  # noqa: SLF001
        for code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
            answer(monkeypatch, code)
            assert kernel.exchange(a, b) is False, errno.errorcode[code]
        answer(monkeypatch, errno.EIO)
        assert_raises(errno.EIO, lambda: kernel.exchange(a, b))
        monkeypatch.setattr(kernel, "_c_function", lambda *_: find("i", "no_such_function"))
        assert kernel.exchange(a, b) is False


class TestClone:
    def test_a_clone_has_the_same_bytes_or_the_answer_is_no(
        self, path: Path, tmp_path: Path
    ) -> None:
        with opened(path) as a, opened(tmp_path / "target", os.O_RDWR | os.O_CREAT) as b:
            cloned = kernel.clone(a, b)
        assert (tmp_path / "target").read_bytes() == (b"old bytes" if cloned else b"")
        if mount_of(tmp_path).fstype in ("ext4", "tmpfs"):
            assert not cloned

    def test_memory_and_another_filesystem_say_no(self, path: Path, shm: Path) -> None:
        (shm / "source").write_bytes(b"bytes")
        for target in (shm / "target", path):
            target.write_bytes(b"kept")
            with opened(shm / "source") as a, opened(target, os.O_RDWR) as b:
                assert kernel.clone(a, b) is False, target
            assert target.read_bytes() == b"kept"

    @linux
    def test_a_target_that_is_not_writable_and_a_full_or_damaged_disk_raise(
        self, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "b").touch()
        with opened(path) as a, opened(tmp_path / "b") as b:
            assert_raises(errno.EBADF, lambda: kernel.clone(a, b))
        for code in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            monkeypatch.setattr(fcntl, "ioctl", raising(code))
            assert_raises(code, lambda: kernel.clone(0, 1))


@contextmanager
def ordinary_user() -> Iterator[None]:
    """Root becomes nobody for a while; an ordinary user stays who they are."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@contextmanager
def another_process(work: Callable[[], object]) -> Iterator[None]:
    """A process that has done its work and waits until the block ends."""
    reading, writing = os.pipe()
    waiting, done = os.pipe()

    def run() -> None:
        kept = work()
        os.write(writing, b"x")
        os.close(done)
        os.read(waiting, 1)
        del kept

    with Child(run) as child:
        try:
            os.read(reading, 1)
            yield
        finally:
            for descriptor in (reading, writing, waiting, done):
                os.close(descriptor)
        child.result()


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
            assert fcntl.fcntl(fd, fcntl.F_GETSIG) == signal.SIGURG, "SIGIO would end the process"
            assert path.read_bytes() == b"old bytes"
            os.link(path, path.with_name("link"))
            os.rename(path, path.with_name("moved"))
            assert kernel.lease_intact(fd)
            for _ in range(2):
                kernel.drop_lease(fd)
                assert not kernel.lease_intact(fd)

    def test_a_file_that_somebody_may_write_is_busy(self, path: Path) -> None:
        def mapped() -> mmap.mmap:
            with path.open("r+b") as file:
                return mmap.mmap(file.fileno(), 0)

        for name, work in (("opened", lambda: path.open("r+b")), ("mapped", mapped)):
            with row(name):
                with another_process(work), opened(path) as fd:
                    assert kernel.take_lease(fd) == "busy"
                with opened(path) as fd:
                    assert kernel.take_lease(fd) == "held"
        with opened(path, os.O_RDWR) as fd:
            assert kernel.take_lease(fd) == "busy"

    def test_a_writer_waits_is_seen_and_kills_nobody(self, path: Path) -> None:
        """Without F_SETSIG the kernel's SIGIO would end the process that holds the lease."""
        with opened(path) as fd:
            assert kernel.take_lease(fd) == "held"
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
        with opened(Path("/etc/passwd")) as fd, ordinary_user():
            assert kernel.take_lease(fd) == "unsupported"
            assert not kernel.lease_intact(fd)
        with opened(tmp_path) as fd:
            assert kernel.take_lease(fd) == "unsupported"
            assert not kernel.lease_intact(fd)
            kernel.drop_lease(fd)
        for call in (kernel.take_lease, kernel.lease_intact, kernel.drop_lease):
            with row(call), pytest.raises(OSError, match="descriptor"):
                call(fd)


class TestPreallocate:
    def test_the_space_is_taken_at_once_and_bytes_that_are_there_stay(
        self, shm: Path, path: Path
    ) -> None:
        with opened(shm / "file", os.O_RDWR | os.O_CREAT) as fd:
            for size in (0, -1):
                kernel.preallocate(fd, size)
                assert os.fstat(fd).st_size == 0
            kernel.preallocate(fd, 1_000_000)
            assert os.fstat(fd).st_size == 1_000_000
            assert os.fstat(fd).st_blocks * 512 >= 1_000_000
        with opened(path, os.O_RDWR) as fd:
            kernel.preallocate(fd, 100_000)
            assert os.pread(fd, 9, 0) == b"old bytes"

    def test_sizes_beyond_32_bits_arrive_whole(self, shm: Path) -> None:
        """More than the filesystem has in all: refused at once, with nothing reserved."""
        total = os.statvfs(shm).f_blocks * os.statvfs(shm).f_frsize
        if not total:
            pytest.skip("a tmpfs without a limit")
        with opened(shm / "file", os.O_RDWR | os.O_CREAT) as fd:
            assert_raises(errno.ENOSPC, lambda: kernel.preallocate(fd, total + 2**33))

    @linux
    def test_a_file_size_limit_raises(self, path: Path) -> None:
        def work() -> int | None:
            import resource

            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
            with opened(path, os.O_RDWR) as fd, pytest.raises(OSError) as caught:  # noqa: PT011
                kernel.preallocate(fd, 5000)
            return caught.value.errno

        with Child(work) as child:
            assert child.result() == errno.EFBIG

    @linux
    def test_a_filesystem_without_it_is_no_error_and_a_full_or_damaged_disk_is(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for code in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            answer(monkeypatch, code)
            with row(code), opened(path, os.O_RDWR) as fd:
                kernel.preallocate(fd, 100)
                assert os.fstat(fd).st_size == 9
        for code in (errno.EDQUOT, errno.EIO):
            answer(monkeypatch, code)
            assert_raises(code, lambda: kernel.preallocate(0, 100))
        left = answer(monkeypatch, errno.EINTR, errno.EINTR, 0)
        kernel.preallocate(0, 100)
        assert left == [0], "an interrupted call is made again"


@linux
class TestUnnamed:
    @pytest.fixture
    def fd(self, tmp_path: Path) -> Iterator[int]:
        fd = kernel.open_unnamed(tmp_path)
        if fd is None:
            pytest.skip(f"no O_TMPFILE on {mount_of(tmp_path).fstype}")
        yield fd
        os.close(fd)

    def test_it_is_private_and_has_no_name_until_it_is_given_some(
        self, fd: int, tmp_path: Path
    ) -> None:
        assert os.fstat(fd).st_mode & 0o777 == 0o600
        assert not os.get_inheritable(fd)
        os.write(fd, b"bytes")
        assert os.listdir(tmp_path) == []
        os.fchmod(fd, 0o444)
        for count, name in enumerate(("one", "two"), 1):
            kernel.link_fd(fd, tmp_path / name)
            assert (tmp_path / name).read_bytes() == b"bytes"
            assert os.path.samestat(os.fstat(fd), (tmp_path / name).stat())
            assert os.fstat(fd).st_nlink == count

    def test_a_name_that_is_taken_is_never_overwritten(self, fd: int, path: Path) -> None:
        with pytest.raises(FileExistsError):
            kernel.link_fd(fd, path)
        assert path.read_bytes() == b"old bytes"

    @pytest.mark.usefixtures("fd")
    def test_the_mode_can_be_chosen(self, tmp_path: Path) -> None:
        other = kernel.open_unnamed(tmp_path, 0o400)
        assert other is not None
        assert os.fstat(other).st_mode & 0o777 == 0o400
        os.close(other)

    def test_where_it_cannot_be_or_could_not_be_named_the_answer_is_none(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(FileNotFoundError):
            kernel.open_unnamed(tmp_path / "absent")
        if os.geteuid() == 0:  # only root may try to write there
            assert kernel.open_unnamed(Path("/proc")) is None
        for code in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            with monkeypatch.context() as patch:
                patch.setattr(os, "open", raising(code))
                assert kernel.open_unnamed(tmp_path) is None, errno.errorcode[code]
        monkeypatch.setattr(kernel, "_OWN_DESCRIPTORS", str(tmp_path / "no-proc"))
        assert kernel.open_unnamed(tmp_path) is None


def test_a_directory_can_be_synced_and_an_error_leaks_no_descriptor(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel.sync_directory(path.parent)
    with pytest.raises(NotADirectoryError):
        kernel.sync_directory(path)
    with pytest.raises(FileNotFoundError):
        kernel.sync_directory(path.with_name("absent"))
    if sys.platform == "linux":
        with opened(Path("/proc/self")) as fd:
            assert_raises(errno.EINVAL, lambda: os.fsync(fd))
        kernel.sync_directory(Path("/proc/self"))  # a filesystem without it is no error
    before = os.listdir("/dev/fd")
    monkeypatch.setattr(os, "fsync", raising(errno.EIO))
    assert_raises(errno.EIO, lambda: kernel.sync_directory(path.parent))
    assert os.listdir("/dev/fd") == before


class TestBootId:
    @linux
    def test_it_is_the_kernels_and_the_same_in_every_process(self) -> None:
        assert output("IMPORT\nprint(kernel.boot_id())") == f"{kernel.boot_id()}\n"
        assert kernel.boot_id() == Path("/proc/sys/kernel/random/boot_id").read_text().strip()

    def test_without_one_every_process_has_its_own(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(kernel, "_BOOT_ID", str(tmp_path / "absent"))
        monkeypatch.setattr(sys, "platform", "linux")
        kernel.boot_id.cache_clear()
        try:
            first = kernel.boot_id()
            assert kernel.boot_id() == first
            kernel.boot_id.cache_clear()
            assert kernel.boot_id() != first
        finally:
            kernel.boot_id.cache_clear()


def test_the_effective_user_is_the_one_permissions_are_checked_against() -> None:
    assert kernel.effective_user() == os.geteuid()
    with ordinary_user():
        assert kernel.effective_user() == os.geteuid() != 0


def test_importing_the_module_loads_no_ctypes() -> None:
    program = """import sys
IMPORT
print([name for name in ("ctypes", "shutil", "tempfile", "uuid", "zlib") if name in sys.modules])
"""
    assert output(program) == "[]\n"


def test_a_system_without_any_of_it_is_told_so_by_the_results(tmp_path: Path) -> None:
    program = """import os, sys
from pathlib import Path
sys.platform = "darwin"
IMPORT
here = Path(sys.argv[1])
fd = os.open(here / "file", os.O_RDWR | os.O_CREAT)
kernel.preallocate(fd, 100)
kernel.drop_lease(fd)
kernel.sync_directory(here)
print(kernel.exchange(here, here), kernel.clone(fd, fd), kernel.take_lease(fd),
      kernel.lease_intact(fd), kernel.open_unnamed(here))
"""
    assert output(program, tmp_path) == "False False unsupported False None\n"
