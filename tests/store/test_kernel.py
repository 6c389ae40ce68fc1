"""The kernel is asked for real; only refusals that no filesystem at hand gives are injected."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.api import mount_of, same_filesystem
from tests.api import store_kernel as kernel

if sys.platform == "win32":
    pytest.skip("POSIX system calls", allow_module_level=True)

import fcntl

ROOT = Path(kernel.__file__).parents[2]
SHM = Path("/dev/shm")  # noqa: S108
NOBODY = 65534

linux = pytest.mark.skipif(sys.platform != "linux", reason="a Linux system call")


@pytest.fixture
def shm() -> Iterator[Path]:
    """A directory in memory, on another filesystem than the temporary one."""
    if not os.access(SHM, os.W_OK) or mount_of(SHM).fstype != "tmpfs":
        pytest.skip("no tmpfs at /dev/shm")
    with tempfile.TemporaryDirectory(dir=SHM) as name:
        yield Path(name)


@pytest.fixture
def leasable(tmp_path: Path) -> Path:
    """A file of ours on a filesystem with leases."""
    path = tmp_path / "file"
    path.write_bytes(b"old bytes")
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        pytest.skip(f"no leases on {mount_of(path).fstype}: {error}")
    finally:
        os.close(fd)
    return path


@contextmanager
def opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def child(program: str, *arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    """A Python process that said "ready"; it goes on, silently, when the block ends."""
    with subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.communicate()


def output(program: str, *arguments: str | Path) -> str:
    """What a Python process prints, which must end well."""
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    ).stdout


def refuse(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Make C functions of the module answer `code`."""
    monkeypatch.setattr(kernel, "_c_function", lambda *_: lambda *_: code)


class TestExchange:
    pytestmark = linux

    def test_two_names_swap_their_files(self, tmp_path: Path) -> None:
        a, b = tmp_path / "a", tmp_path / "b"
        a.write_bytes(b"A")
        b.write_bytes(b"B")
        inodes = a.stat().st_ino, b.stat().st_ino
        assert kernel.exchange(a, b) is True
        assert (a.read_bytes(), b.read_bytes()) == (b"B", b"A")
        assert (b.stat().st_ino, a.stat().st_ino) == inodes

    def test_names_that_are_no_text_are_taken_byte_for_byte(self, tmp_path: Path) -> None:
        a, b = tmp_path / os.fsdecode(b"\xff a\n"), tmp_path / "é"
        a.write_bytes(b"A")
        b.write_bytes(b"B")
        assert kernel.exchange(a, b)
        assert (a.read_bytes(), b.read_bytes()) == (b"B", b"A")

    def test_a_missing_name_raises_and_names_both(self, tmp_path: Path) -> None:
        a, b = tmp_path / "a", tmp_path / "b"
        a.write_bytes(b"A")
        with pytest.raises(FileNotFoundError) as caught:
            kernel.exchange(a, b)
        assert (caught.value.filename, caught.value.filename2) == (str(a), str(b))
        assert a.read_bytes() == b"A"

    def test_names_on_two_filesystems_raise(self, tmp_path: Path, shm: Path) -> None:
        if same_filesystem(tmp_path, shm):
            pytest.skip("the temporary directory is in memory too")
        (tmp_path / "a").touch()
        (shm / "b").touch()
        with pytest.raises(OSError, match="cross-device") as caught:
            kernel.exchange(tmp_path / "a", shm / "b")
        assert caught.value.errno == errno.EXDEV

    def test_a_null_byte_never_shortens_a_name(self, tmp_path: Path) -> None:
        (tmp_path / "a").touch()
        (tmp_path / "b").touch()
        with pytest.raises(ValueError, match="null byte"):
            kernel.exchange(tmp_path / "a\0x", tmp_path / "b")

    @pytest.mark.parametrize("code", [errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP])
    def test_a_filesystem_without_it_says_no(
        self, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        refuse(monkeypatch, code)
        assert kernel.exchange(tmp_path / "a", tmp_path / "b") is False

    def test_a_damaged_disk_raises(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        refuse(monkeypatch, errno.EIO)
        with pytest.raises(OSError) as caught:  # noqa: PT011
            kernel.exchange(tmp_path / "a", tmp_path / "b")
        assert caught.value.errno == errno.EIO

    def test_a_c_library_without_it_says_no(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        find = kernel._c_function  # noqa: SLF001
        monkeypatch.setattr(kernel, "_c_function", lambda *_: find("i", "no_such_function"))
        assert kernel.exchange(tmp_path / "a", tmp_path / "b") is False


class TestClone:
    def test_a_clone_has_the_same_bytes_or_the_answer_is_no(self, tmp_path: Path) -> None:
        source, target = tmp_path / "source", tmp_path / "target"
        source.write_bytes(os.urandom(100_000))
        with opened(source) as a, opened(target, os.O_RDWR | os.O_CREAT) as b:
            cloned = kernel.clone(a, b)
        assert target.read_bytes() == (source.read_bytes() if cloned else b"")

    def test_ext4_says_no(self, tmp_path: Path) -> None:
        if mount_of(tmp_path).fstype != "ext4":
            pytest.skip("the temporary directory is not on ext4")
        self.check_refused(tmp_path, tmp_path)

    def test_memory_says_no(self, shm: Path) -> None:
        self.check_refused(shm, shm)

    def test_another_filesystem_says_no(self, tmp_path: Path, shm: Path) -> None:
        self.check_refused(shm, tmp_path)

    def check_refused(self, source: Path, target: Path) -> None:
        (source / "source").write_bytes(b"bytes")
        (target / "target").write_bytes(b"kept")
        with opened(source / "source") as a, opened(target / "target", os.O_RDWR) as b:
            assert kernel.clone(a, b) is False
        assert (target / "target").read_bytes() == b"kept"

    @linux
    def test_a_target_that_is_not_writable_raises(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_bytes(b"bytes")
        (tmp_path / "b").touch()
        with opened(tmp_path / "a") as a, opened(tmp_path / "b") as b:
            with pytest.raises(OSError, match="descriptor") as caught:
                kernel.clone(a, b)
            assert caught.value.errno == errno.EBADF

    @linux
    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
    def test_a_full_or_damaged_disk_raises(
        self, code: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(fcntl, "ioctl", fail)
        with pytest.raises(OSError) as caught:  # noqa: PT011
            kernel.clone(0, 1)
        assert caught.value.errno == code


OPEN_FOR_WRITING = """
import sys
file = open(sys.argv[1], "r+b")
print("ready", flush=True)
sys.stdin.read()
"""
MAPPED_WRITABLE = """
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    view = mmap.mmap(file.fileno(), 0)
print("ready", flush=True)
sys.stdin.read()
"""
LEASE_BROKEN_BY_A_WRITER = """
import os, subprocess, sys, time
from smartcache.store import kernel

path = sys.argv[1]
fd = os.open(path, os.O_RDONLY)
assert kernel.take_lease(fd) == "held"
write = "import sys; file = open(sys.argv[1], 'r+b'); file.write(b'NEW')"
writer = subprocess.Popen([sys.executable, "-c", write, path])
deadline = time.monotonic() + 60
while kernel.lease_intact(fd) and time.monotonic() < deadline:
    time.sleep(0.005)
assert not kernel.lease_intact(fd), "nobody came"
assert writer.poll() is None, "the writer did not wait"
assert os.pread(fd, 3, 0) == b"old", "the writer got in"
print("ready", flush=True)
sys.stdin.read()
kernel.drop_lease(fd)
assert writer.wait(60) == 0
assert os.pread(fd, 3, 0) == b"NEW"
"""


@linux
class TestLease:
    def test_a_quiet_file_gives_a_lease_until_it_is_dropped(self, leasable: Path) -> None:
        with opened(leasable) as fd:
            assert not kernel.lease_intact(fd)
            assert kernel.take_lease(fd) == "held"
            assert kernel.lease_intact(fd)
            kernel.drop_lease(fd)
            assert not kernel.lease_intact(fd)

    def test_readers_neither_wait_nor_break_the_lease(self, leasable: Path) -> None:
        with opened(leasable) as fd:
            assert kernel.take_lease(fd) == "held"
            assert leasable.read_bytes() == b"old bytes"
            assert kernel.lease_intact(fd)

    def test_links_and_renames_do_not_break_the_lease(self, leasable: Path) -> None:
        with opened(leasable) as fd:
            assert kernel.take_lease(fd) == "held"
            os.link(leasable, leasable.with_name("link"))
            os.rename(leasable, leasable.with_name("moved"))
            assert kernel.lease_intact(fd)

    @pytest.mark.parametrize("program", [OPEN_FOR_WRITING, MAPPED_WRITABLE])
    def test_a_file_another_process_may_write_is_busy(self, program: str, leasable: Path) -> None:
        with child(program, leasable), opened(leasable) as fd:
            assert kernel.take_lease(fd) == "busy"
        with opened(leasable) as fd:
            assert kernel.take_lease(fd) == "held"

    def test_a_file_this_process_writes_is_busy(self, leasable: Path) -> None:
        with opened(leasable, os.O_RDWR) as fd:
            assert kernel.take_lease(fd) == "busy"

    def test_a_writer_waits_is_seen_and_kills_nobody(self, leasable: Path) -> None:
        """Without F_SETSIG the kernel's SIGIO would end the process that holds the lease."""
        with child(LEASE_BROKEN_BY_A_WRITER, leasable) as holder:
            pass
        assert holder.returncode == 0
        assert leasable.read_bytes() == b"NEW bytes"

    def test_the_signal_of_a_lease_is_one_that_is_ignored_by_default(self, leasable: Path) -> None:
        with opened(leasable) as fd:
            kernel.take_lease(fd)
            assert fcntl.fcntl(fd, fcntl.F_GETSIG) == signal.SIGURG

    def test_dropping_twice_or_without_a_lease_is_no_error(self, leasable: Path) -> None:
        with opened(leasable) as fd:
            kernel.drop_lease(fd)
            assert kernel.take_lease(fd) == "held"
            kernel.drop_lease(fd)
            kernel.drop_lease(fd)

    def test_a_file_of_another_user_gives_none(self) -> None:
        fd = os.open("/etc/passwd", os.O_RDONLY)
        try:
            with ordinary_user():
                assert kernel.take_lease(fd) == "unsupported"
                assert not kernel.lease_intact(fd)
        finally:
            os.close(fd)

    def test_a_directory_gives_none(self, tmp_path: Path) -> None:
        with opened(tmp_path) as fd:
            assert kernel.take_lease(fd) == "unsupported"
            assert not kernel.lease_intact(fd)
            kernel.drop_lease(fd)

    @pytest.mark.parametrize("call", [kernel.take_lease, kernel.lease_intact, kernel.drop_lease])
    def test_a_closed_descriptor_raises(
        self, call: Callable[[int], object], tmp_path: Path
    ) -> None:
        with opened(tmp_path) as fd:
            pass
        with pytest.raises(OSError, match="descriptor"):
            call(fd)


@contextmanager
def ordinary_user() -> Iterator[None]:
    """Root becomes nobody for a while; an ordinary user stays who they are."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


class TestPreallocate:
    def test_the_space_is_taken_at_once(self, shm: Path) -> None:
        with opened(shm / "file", os.O_RDWR | os.O_CREAT) as fd:
            kernel.preallocate(fd, 1_000_000)
            assert os.fstat(fd).st_size == 1_000_000
            assert os.fstat(fd).st_blocks * 512 >= 1_000_000

    def test_bytes_that_are_there_stay(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"bytes")
        with opened(tmp_path / "file", os.O_RDWR) as fd:
            kernel.preallocate(fd, 100_000)
            assert os.pread(fd, 5, 0) == b"bytes"

    @pytest.mark.parametrize("size", [0, -1])
    def test_nothing_to_reserve_is_no_error(self, size: int, tmp_path: Path) -> None:
        with opened(tmp_path / "file", os.O_RDWR | os.O_CREAT) as fd:
            kernel.preallocate(fd, size)
            assert os.fstat(fd).st_size == 0

    def test_sizes_beyond_32_bits_arrive_whole(self, shm: Path) -> None:
        """More than the filesystem has in all: refused at once, with nothing reserved."""
        total = os.statvfs(shm).f_blocks * os.statvfs(shm).f_frsize
        if not total:
            pytest.skip("a tmpfs without a limit")
        size = total + 2**33
        with opened(shm / "file", os.O_RDWR | os.O_CREAT) as fd:
            with pytest.raises(OSError, match="space") as caught:
                kernel.preallocate(fd, size)
            assert caught.value.errno == errno.ENOSPC

    @linux
    def test_a_file_size_limit_raises(self, tmp_path: Path) -> None:
        program = """
import os, resource, sys
from smartcache.store import kernel

resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
try:
    kernel.preallocate(fd, 5000)
except OSError as error:
    print(error.errno)
"""
        assert output(program, tmp_path / "file") == f"{errno.EFBIG}\n"

    @linux
    @pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS])
    def test_a_filesystem_without_it_is_no_error(
        self, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        refuse(monkeypatch, code)
        with opened(tmp_path / "file", os.O_RDWR | os.O_CREAT) as fd:
            kernel.preallocate(fd, 100)
            assert os.fstat(fd).st_size == 0

    @linux
    @pytest.mark.parametrize("code", [errno.EDQUOT, errno.EIO])
    def test_a_full_quota_or_damaged_disk_raises(
        self, code: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        refuse(monkeypatch, code)
        with pytest.raises(OSError) as caught:  # noqa: PT011
            kernel.preallocate(0, 100)
        assert caught.value.errno == code

    @linux
    def test_an_interrupted_call_is_made_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        answers = [errno.EINTR, errno.EINTR, 0]
        monkeypatch.setattr(kernel, "_c_function", lambda *_: lambda *_: answers.pop(0))
        kernel.preallocate(0, 100)
        assert answers == []


@linux
class TestUnnamed:
    @pytest.fixture
    def fd(self, tmp_path: Path) -> Iterator[int]:
        fd = kernel.open_unnamed(tmp_path)
        if fd is None:
            pytest.skip(f"no O_TMPFILE on {mount_of(tmp_path).fstype}")
        yield fd
        os.close(fd)

    def test_it_has_no_name_until_it_is_given_one(self, fd: int, tmp_path: Path) -> None:
        os.write(fd, b"bytes")
        assert os.listdir(tmp_path) == []
        kernel.link_fd(fd, tmp_path / "name")
        assert (tmp_path / "name").read_bytes() == b"bytes"
        assert os.fstat(fd).st_ino == (tmp_path / "name").stat().st_ino

    def test_a_name_that_is_taken_is_never_overwritten(self, fd: int, tmp_path: Path) -> None:
        (tmp_path / "name").write_bytes(b"first")
        with pytest.raises(FileExistsError):
            kernel.link_fd(fd, tmp_path / "name")
        assert (tmp_path / "name").read_bytes() == b"first"

    def test_a_second_name_is_a_hard_link(self, fd: int, tmp_path: Path) -> None:
        kernel.link_fd(fd, tmp_path / "one")
        kernel.link_fd(fd, tmp_path / "two")
        assert os.fstat(fd).st_nlink == 2

    def test_a_read_only_file_can_be_named(self, fd: int, tmp_path: Path) -> None:
        os.fchmod(fd, 0o444)
        kernel.link_fd(fd, tmp_path / "name")
        assert (tmp_path / "name").stat().st_mode & 0o777 == 0o444

    def test_it_is_private_and_not_inherited(self, fd: int) -> None:
        assert os.fstat(fd).st_mode & 0o777 == 0o600
        assert not os.get_inheritable(fd)

    @pytest.mark.usefixtures("fd")
    def test_the_mode_can_be_chosen(self, tmp_path: Path) -> None:
        other = kernel.open_unnamed(tmp_path, 0o400)
        assert other is not None
        assert os.fstat(other).st_mode & 0o777 == 0o400
        os.close(other)

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root may try to write in /proc")
    def test_a_filesystem_without_it_says_none(self) -> None:
        assert kernel.open_unnamed(Path("/proc")) is None

    @pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL])
    def test_every_way_of_refusing_it_says_none(
        self, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object) -> int:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "open", fail)
        assert kernel.open_unnamed(tmp_path) is None

    def test_a_missing_directory_raises(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            kernel.open_unnamed(tmp_path / "absent")

    def test_it_says_none_where_no_name_could_be_given(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(kernel, "_OWN_DESCRIPTORS", str(tmp_path / "no-proc"))
        assert kernel.open_unnamed(tmp_path) is None


class TestSyncDirectory:
    def test_a_directory_can_be_synced(self, tmp_path: Path) -> None:
        (tmp_path / "name").touch()
        kernel.sync_directory(tmp_path)

    @linux
    def test_a_filesystem_without_it_is_no_error(self) -> None:
        with opened(Path("/proc/self")) as fd, pytest.raises(OSError, match="Invalid"):
            os.fsync(fd)
        kernel.sync_directory(Path("/proc/self"))

    def test_what_is_no_directory_raises(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(NotADirectoryError):
            kernel.sync_directory(tmp_path / "file")
        with pytest.raises(FileNotFoundError):
            kernel.sync_directory(tmp_path / "absent")

    def test_a_damaged_disk_raises_and_no_descriptor_leaks(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[int] = []

        def fail(fd: int) -> None:
            seen.append(fd)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            kernel.sync_directory(tmp_path)
        with pytest.raises(OSError, match="descriptor"):
            os.fstat(seen[0])


class TestBootId:
    @linux
    def test_it_is_the_kernels_and_the_same_in_every_process(self) -> None:
        program = "from smartcache.store import kernel; print(kernel.boot_id())"
        assert output(program) == f"{kernel.boot_id()}\n"
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
    program = """
import sys
from smartcache.store import filesystems, kernel

print([name for name in ("ctypes", "shutil", "tempfile", "uuid", "zlib") if name in sys.modules])
"""
    assert output(program) == "[]\n"


def test_a_system_without_any_of_it_is_told_so_by_the_results(tmp_path: Path) -> None:
    program = """
import os, signal, sys
from pathlib import Path

sys.modules["fcntl"] = None
sys.platform = "win32"
from smartcache.store import filesystems, kernel

here = Path(sys.argv[1])
fd = os.open(here / "file", os.O_RDWR | os.O_CREAT)
kernel.preallocate(fd, 100)
kernel.drop_lease(fd)
kernel.sync_directory(here)
print(kernel.exchange(here, here), kernel.clone(fd, fd), kernel.take_lease(fd),
      kernel.lease_intact(fd), kernel.open_unnamed(here), kernel.effective_user(),
      kernel.boot_id()[:8], filesystems.filesystem_id(here)[:7])
"""
    expected = "False False unsupported False None -1 process- volume:\n"
    assert output(program, tmp_path) == expected
