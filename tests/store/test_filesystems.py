from __future__ import annotations

import errno
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.api import (
    NoSpaceError,
    StoreUnwritableError,
    filesystem_id,
    mount_of,
    parse_mountinfo,
    probe,
    same_filesystem,
)
from tests.api import filesystems_free_bytes as free_bytes
from tests.api import store_filesystems as filesystems
from tests.api import store_kernel as kernel
from tests.api import store_mounts as mounts

if sys.platform == "win32":
    pytest.skip("POSIX filesystems", allow_module_level=True)

import fcntl

SHM = Path("/dev/shm")  # noqa: S108
NOBODY = 65534
ABILITIES = ["hard_link", "reflink", "symlink", "lease", "exchange", "flock", "unnamed_tmp"]

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")


@pytest.fixture(autouse=True)
def _nothing_known() -> Iterator[None]:
    filesystems._known.clear()  # noqa: SLF001
    yield
    filesystems._known.clear()  # noqa: SLF001


@pytest.fixture
def shm() -> Iterator[Path]:
    """A directory in memory."""
    if not os.access(SHM, os.W_OK) or mount_of(SHM).fstype != "tmpfs":
        pytest.skip("no tmpfs at /dev/shm")
    with tempfile.TemporaryDirectory(dir=SHM) as name:
        yield Path(name)


@pytest.fixture
def public_dir() -> Iterator[Path]:
    """A directory that every user can enter and nobody but its owner can write."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


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


def refuse_ioctls(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older kernel: none of the questions for a UUID is understood."""

    def fail(*_: object) -> None:
        raise OSError(errno.ENOTTY, os.strerror(errno.ENOTTY))

    monkeypatch.setattr(fcntl, "ioctl", fail)


class TestFilesystemId:
    def test_files_and_directories_of_one_filesystem_have_one_id(self, tmp_path: Path) -> None:
        (tmp_path / "directory").mkdir()
        (tmp_path / "file").touch()
        (tmp_path / "directory" / "file").touch()
        every = [tmp_path, *tmp_path.rglob("*")]
        ids = set()
        for path in every:
            filesystems._known.clear()  # noqa: SLF001
            ids.add(filesystem_id(path))
        assert len(every) == 4
        assert len(ids) == 1

    def test_memory_and_disk_have_different_ids(self, tmp_path: Path, shm: Path) -> None:
        if same_filesystem(tmp_path, shm):
            pytest.skip("the temporary directory is in memory too")
        assert filesystem_id(tmp_path) != filesystem_id(shm)

    def test_a_given_stat_result_is_used(self, tmp_path: Path, shm: Path) -> None:
        file = shm / "file"
        file.touch()
        assert filesystem_id(file, file.stat()) == filesystem_id(shm)
        assert filesystem_id(tmp_path, tmp_path.stat()) == filesystem_id(tmp_path)

    def test_a_symlink_has_the_id_of_what_was_stated(self, tmp_path: Path, shm: Path) -> None:
        link = tmp_path / "link"
        link.symlink_to(shm)
        here, there = filesystem_id(tmp_path), filesystem_id(shm)
        for st, expected in ((link.lstat(), here), (link.stat(), there)):
            filesystems._known.clear()  # noqa: SLF001
            assert filesystem_id(link, st) == expected

    def test_a_missing_file_raises(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            filesystem_id(tmp_path / "absent")

    def test_a_file_that_vanished_after_its_stat_has_the_id_of_its_directory(
        self, tmp_path: Path
    ) -> None:
        (tmp_path / "file").touch()
        st = (tmp_path / "file").stat()
        (tmp_path / "file").unlink()
        found = filesystem_id(tmp_path / "file", st)
        filesystems._known.clear()  # noqa: SLF001
        assert found == filesystem_id(tmp_path)

    @linux
    def test_an_ordinary_user_and_root_see_one_id_even_in_unreadable_directories(
        self, public_dir: Path
    ) -> None:
        closed = public_dir / "closed"
        closed.mkdir()
        (closed / "file").touch()
        st = (closed / "file").stat()
        expected = filesystem_id(closed / "file", st)
        filesystems._known.clear()  # noqa: SLF001
        os.chmod(closed, 0o000)
        try:
            with ordinary_user():
                assert filesystem_id(closed / "file", st) == expected
        finally:
            os.chmod(closed, 0o700)

    def test_it_is_remembered_for_a_second_and_then_asked_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An unplugged drive leaves its device number to the next one."""
        now = 100.0
        monkeypatch.setattr(filesystems, "time", SimpleNamespace(monotonic=lambda: now))
        st = tmp_path.stat()
        first = filesystem_id(tmp_path, st)
        monkeypatch.setattr(filesystems, "_find_id", lambda *_: "another drive")
        now = 100.9
        assert filesystem_id(tmp_path, st) == first
        now = 101.1
        assert filesystem_id(tmp_path, st) == "another drive"

    @linux
    def test_an_older_kernel_is_asked_for_the_fsid(
        self, shm: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        refuse_ioctls(monkeypatch)
        fsid = os.statvfs(shm).f_fsid
        if not fsid:
            pytest.skip("this kernel has no f_fsid for tmpfs")
        assert filesystem_id(shm) == f"fsid:tmpfs:{fsid:016x}"

    @linux
    def test_a_uuid_of_zeros_is_none(self, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fcntl, "ioctl", lambda *_: 0)
        assert not filesystem_id(shm).startswith("uuid:")

    @linux
    def test_the_name_in_by_uuid_is_used_where_the_kernel_has_none(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = mount_of(tmp_path).source
        try:
            is_device = os.stat(source).st_rdev == tmp_path.stat().st_dev
        except OSError:
            is_device = False
        if not is_device:
            pytest.skip("the temporary directory is on no block device of its own")
        listing = tmp_path / "by-uuid"
        listing.mkdir()
        (listing / "0000-AAAA").symlink_to("/dev/null")
        (listing / "1234-ABCD").symlink_to(source)
        refuse_ioctls(monkeypatch)
        monkeypatch.setattr(filesystems, "_BY_UUID", str(listing))
        assert filesystem_id(tmp_path) == "uuid:1234-ABCD"

    @linux
    def test_where_inode_numbers_do_not_last_the_id_does_not_either(
        self, shm: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """FAT numbers its files anew, so another file may come under the number of this one."""
        assert {"vfat", "msdos", "exfat"} == filesystems._PASSING_INODES  # noqa: SLF001
        monkeypatch.setattr(filesystems, "_PASSING_INODES", {"tmpfs"})
        assert filesystem_id(shm) == f"dev:{shm.stat().st_dev:x}:{kernel.boot_id()}"

    @linux
    def test_a_network_filesystem_is_known_by_its_server(
        self, shm: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        line = parse_mountinfo("44 27 0:55 / /nas rw - nfs4 nas:/models rw,vers=4.2")[0]
        monkeypatch.setattr(filesystems, "line_of", lambda *_: line)
        refuse_ioctls(monkeypatch)
        assert filesystem_id(shm) == "nfs4:nas:/models"

    @linux
    def test_the_id_is_the_same_when_the_kernel_does_not_tell_the_mount(
        self, tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        link = tmp_path / "link"
        link.symlink_to(shm)
        told = [filesystem_id(tmp_path), filesystem_id(shm), filesystem_id(link, link.lstat())]
        filesystems._known.clear()  # noqa: SLF001
        monkeypatch.setattr(mounts, "_mount_number", lambda _: None)
        assert filesystem_id(link, link.lstat()) == told[2]
        assert [filesystem_id(tmp_path), filesystem_id(shm)] == told[:2]

    @linux
    def test_what_has_nothing_lasting_has_an_id_for_this_boot(self) -> None:
        device = os.stat("/proc").st_dev
        assert filesystem_id(Path("/proc/self")) == f"dev:{device:x}:{kernel.boot_id()}"

    def test_no_descriptor_is_left_open(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()

        def next_descriptor() -> int:
            fd = os.open(tmp_path, os.O_RDONLY)
            os.close(fd)
            return fd

        before = next_descriptor()
        for path in (tmp_path / "file", tmp_path, Path("/")):
            filesystems._known.clear()  # noqa: SLF001
            filesystem_id(path)
        assert next_descriptor() == before


class TestSameFilesystem:
    def test_paths_need_not_exist(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        assert same_filesystem(tmp_path / "file", tmp_path / "a" / "b")

    def test_memory_and_proc_are_not_the_same(self, shm: Path) -> None:
        assert not same_filesystem(shm / "absent", Path("/proc/self"))


def test_free_bytes_are_those_an_ordinary_user_can_write(shm: Path) -> None:
    status = os.statvfs(shm)
    before = free_bytes(shm / "a" / "b")
    assert 0 < before <= status.f_blocks * status.f_frsize
    (shm / "file").write_bytes(bytes(8_000_000))
    assert free_bytes(shm) < status.f_blocks * status.f_frsize - 4_000_000


class TestProbe:
    def test_a_local_directory_can_what_linux_filesystems_can(self, tmp_path: Path) -> None:
        abilities = probe(tmp_path)
        assert abilities.hard_link
        assert abilities.symlink
        assert abilities.flock
        if mount_of(tmp_path).fstype == "ext4":
            assert abilities.lease
            assert abilities.exchange
            assert abilities.unnamed_tmp
            assert not abilities.reflink
            assert abilities.notes == ("no reflink: not supported by ext4",)

    @linux
    def test_memory_can_all_but_reflinks_and_forgets(self, shm: Path) -> None:
        abilities = probe(shm)
        assert [name for name in ABILITIES if not getattr(abilities, name)] == ["reflink"]
        assert abilities.notes == (
            "tmpfs is empty after a reboot",
            "no reflink: not supported by tmpfs",
        )

    def test_nothing_remains(self, tmp_path: Path) -> None:
        (tmp_path / "mine").write_bytes(b"kept")
        probe(tmp_path)
        assert os.listdir(tmp_path) == ["mine"]

    def test_an_ordinary_user_can_probe(self, public_dir: Path) -> None:
        os.chmod(public_dir, 0o777)
        expected = probe(public_dir)
        with ordinary_user():
            assert probe(public_dir) == expected

    def test_a_directory_without_permission_is_unwritable(self, public_dir: Path) -> None:
        os.chmod(public_dir, 0o555)
        with ordinary_user(), pytest.raises(StoreUnwritableError) as caught:
            probe(public_dir)
        assert caught.value.errno == errno.EACCES
        assert str(public_dir) in caught.value.message
        assert caught.value.hint

    def test_what_is_no_directory_is_unwritable(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        for path in (tmp_path / "file", tmp_path / "absent"):
            with pytest.raises(StoreUnwritableError, match="cannot write in"):
                probe(path)
        assert os.listdir(tmp_path) == ["file"]

    def test_a_full_disk_is_called_full_and_nothing_remains(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(Path, "write_bytes", fail)
        with pytest.raises(NoSpaceError, match="No space"):
            probe(tmp_path)
        assert os.listdir(tmp_path) == []

    def test_what_the_system_refuses_is_noted_with_its_reason(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object, **__: object) -> None:
            raise PermissionError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "link", fail)
        abilities = probe(tmp_path)
        assert not abilities.hard_link
        assert not abilities.unnamed_tmp
        assert "no hard link: Operation not permitted" in abilities.notes
        assert os.listdir(tmp_path) == []

    @linux
    def test_a_filesystem_that_calls_every_file_busy_has_no_leases(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """NFS and CIFS answer so for files they have no delegation or oplock of."""
        real = fcntl.fcntl

        def busy(fd: int, command: int, argument: int = 0) -> int:
            if command == fcntl.F_SETLEASE:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            return real(fd, command, argument)

        monkeypatch.setattr(fcntl, "fcntl", busy)
        abilities = probe(tmp_path)
        assert not abilities.lease
        fstype = mount_of(tmp_path).fstype
        assert f"no lease: {fstype} treats every file as open for writing" in abilities.notes

    def test_locks_that_exclude_nobody_are_no_locks(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(fcntl, "flock", lambda *_: None)
        assert not probe(tmp_path).flock
