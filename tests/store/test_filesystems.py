"""Which filesystem a path is on, how it is known again, and what works there."""

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

from smartcache.errors import NoSpaceError, StoreUnwritableError
from smartcache.system import filesystems, kernel
from smartcache.system import filesystems as mounts
from smartcache.system.filesystems import (
    Family,
    Mount,
    family_of,
    filesystem_id,
    find_mount,
    free_bytes,
    is_network,
    mount_of,
    nearest_existing,
    parse_mountinfo,
    probe,
)
from tests.processes.children import NOBODY
from tests.store.files import raising, row

if sys.platform == "win32":
    pytest.skip("POSIX filesystems", allow_module_level=True)

import fcntl

SHM = Path("/dev/shm")  # noqa: S108
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
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def refuse_ioctls(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older kernel: none of the questions for a UUID is understood."""
    monkeypatch.setattr(fcntl, "ioctl", raising(errno.ENOTTY))


def fresh_id(path: Path, st: os.stat_result | None = None) -> str:
    filesystems._known.clear()  # noqa: SLF001
    return filesystem_id(path, st)


class TestFilesystemId:
    def test_one_filesystem_has_one_id_and_another_one_another(
        self, tmp_path: Path, shm: Path
    ) -> None:
        """Also where a given stat result leads elsewhere than the path does; nothing stays open."""
        (tmp_path / "directory").mkdir()
        (tmp_path / "file").touch()
        (tmp_path / "directory" / "file").touch()
        link = tmp_path / "directory" / "link"
        link.symlink_to(shm)
        descriptors = len(os.listdir("/dev/fd"))
        here, there = fresh_id(tmp_path), fresh_id(shm)
        for path in tmp_path.rglob("*"):
            assert fresh_id(path, path.lstat()) == filesystem_id(path, path.lstat()) == here, path
        assert fresh_id(link, link.stat()) == there
        assert (here == there) == (tmp_path.stat().st_dev == shm.stat().st_dev)
        assert len(os.listdir("/dev/fd")) == descriptors

    def test_a_missing_file_raises_and_one_that_vanished_has_the_id_of_its_directory(
        self, tmp_path: Path
    ) -> None:
        with pytest.raises(FileNotFoundError):
            filesystem_id(tmp_path / "absent")
        (tmp_path / "file").touch()
        st = (tmp_path / "file").stat()
        (tmp_path / "file").unlink()
        assert fresh_id(tmp_path / "file", st) == fresh_id(tmp_path)

    @linux
    def test_an_ordinary_user_and_root_see_one_id_even_in_unreadable_directories(
        self, public_dir: Path
    ) -> None:
        closed = public_dir / "closed"
        closed.mkdir()
        (closed / "file").touch()
        st = (closed / "file").stat()
        expected = filesystem_id(closed / "file", st)
        os.chmod(closed, 0o000)
        try:
            with ordinary_user():
                assert fresh_id(closed / "file", st) == expected
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
        monkeypatch.setattr(filesystems, "_lasting_id", lambda *_: "another drive")
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
        monkeypatch.setattr(fcntl, "ioctl", lambda *_: 0)  # a UUID of zeros is none
        assert not fresh_id(shm).startswith("uuid:")

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
        places = [(tmp_path, None), (shm, None), (link, link.lstat())]
        told = [fresh_id(path, st) for path, st in places]
        monkeypatch.setattr(mounts, "_mount_number", lambda _: None)
        assert [fresh_id(path, st) for path, st in places] == told

    @linux
    def test_what_has_nothing_lasting_has_an_id_for_this_boot(self) -> None:
        device = os.stat("/proc").st_dev
        assert filesystem_id(Path("/proc/self")) == f"dev:{device:x}:{kernel.boot_id()}"


def test_free_bytes_are_those_an_ordinary_user_can_write(shm: Path) -> None:
    status = os.statvfs(shm)
    before = free_bytes(shm / "a" / "b")
    assert 0 < before <= status.f_blocks * status.f_frsize
    (shm / "file").write_bytes(bytes(8_000_000))
    assert free_bytes(shm) < status.f_blocks * status.f_frsize - 4_000_000


class TestProbe:
    def test_a_local_directory_can_what_linux_filesystems_can_and_nothing_remains(
        self, tmp_path: Path
    ) -> None:
        (tmp_path / "mine").write_bytes(b"kept")
        able = probe(tmp_path)
        assert (able.hard_link, able.symlink, able.flock) == (True, True, True)
        if mount_of(tmp_path).fstype == "ext4":
            assert (able.lease, able.exchange, able.unnamed_tmp) == (True, True, True)
            assert not able.reflink
        assert os.listdir(tmp_path) == ["mine"]

    @linux
    def test_memory_can_all_but_reflinks_and_forgets(self, shm: Path) -> None:
        abilities = probe(shm)
        assert [name for name in ABILITIES if not getattr(abilities, name)] == ["reflink"]

    def test_an_ordinary_user_can_probe_where_they_can_write(self, public_dir: Path) -> None:
        os.chmod(public_dir, 0o777)
        expected = probe(public_dir)
        with ordinary_user():
            assert probe(public_dir) == expected
        os.chmod(public_dir, 0o555)
        with ordinary_user(), pytest.raises(StoreUnwritableError) as caught:
            probe(public_dir)
        assert caught.value.errno == errno.EACCES
        assert str(public_dir) in caught.value.message
        assert caught.value.hint

    def test_what_is_no_directory_is_unwritable_and_a_full_disk_called_full(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").touch()
        for path in (tmp_path / "file", tmp_path / "absent"):
            with row(path), pytest.raises(StoreUnwritableError, match="cannot write in"):
                probe(path)
        monkeypatch.setattr(Path, "write_bytes", raising(errno.ENOSPC))
        with pytest.raises(NoSpaceError, match="No space"):
            probe(tmp_path)
        assert os.listdir(tmp_path) == ["file"]

    def test_what_the_system_refuses_is_noted_with_its_reason(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "link", raising(errno.EPERM))
        monkeypatch.setattr(fcntl, "flock", lambda *_: None)  # excludes nobody
        abilities = probe(tmp_path)
        assert (abilities.hard_link, abilities.unnamed_tmp, abilities.flock) == (
            False, False, False,
        )  # fmt: skip
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


MOUNTINFO = r"""
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
25 24 0:23 / /run/lock rw,relatime - tmpfs tmpfs rw,size=24682416k
30 25 0:27 / /run/lock rw,nosuid - tmpfs over rw
40 27 8:17 / /media/My\040Drive\011tab rw,relatime shared:1 - ext4 /dev/sdb1 rw
41 27 8:33 / /back\134slash ro,relatime shared:2 master:1 propagate_from:7 - xfs /dev/sdc1 rw
42 27 0:50 / /docker/overlay2/m rw - overlay overlay rw,lowerdir=/l\0541,upperdir=/u,index=off
43 27 254:0 /srv/models /home/me/models rw,relatime - ext4 /dev/vda rw,discard
44 27 0:55 / /nas rw,relatime - nfs4 10.0.0.1:/export\040one rw,vers=4.2
45 27 0:56 / /mnt/c rw,noatime - 9p C:\134 rw,dirsync,aname=drvfs;path=C:\;uid=1000,trans=fd
46 27 0:57 / /empty rw - tmpfs  rw
"""


def mounted(path: str) -> Mount:
    line = find_mount(path, parse_mountinfo(MOUNTINFO))
    assert line is not None
    return line.mount


class TestMountinfo:
    def test_every_line_is_read_in_order(self) -> None:
        lines = parse_mountinfo(MOUNTINFO)
        assert [line.number for line in lines] == [22, 27, 25, 30, 40, 41, 42, 43, 44, 45, 46]
        assert lines[4].device == os.makedev(8, 17)
        assert find_mount("/x", []) is None

    def test_the_longest_mount_point_wins_and_only_whole_names_count(self) -> None:
        """Of two mounts at one point the last; a bind mount at its own; escapes are undone."""
        points = {
            "/proc": "/proc", "/proc/1": "/proc", "/process": "/", "/": "/",
            "/home/me/models/a": "/home/me/models", "/home/me/other": "/",
            "/media/My Drive\ttab/x": "/media/My Drive\ttab",
        }  # fmt: skip
        for path, point in points.items():
            assert mounted(path).point == Path(point), path
        sources = {
            "/run/lock": "over", "/back\\slash": "/dev/sdc1", "/nas/x": "10.0.0.1:/export one",
            "/empty": "",
        }  # fmt: skip
        for path, source in sources.items():
            assert mounted(path).source == source, path
        assert (mounted("/empty").fstype, mounted("/home/me/models").fstype) == ("tmpfs", "ext4")
        assert mounted("/mnt/c/Users").family == "wsl"

    def test_the_options_of_mount_and_filesystem_are_joined(self) -> None:
        """A read-only mount of a writable filesystem is read-only; escaped commas end nothing."""
        assert mounted("/run/lock/x").options == {"rw", "nosuid"}
        assert mounted("/x").options == {"rw", "relatime", "discard"}
        options = {"rw", "lowerdir=/l,1", "upperdir=/u", "index=off"}
        assert mounted("/docker/overlay2/m/etc").options == options
        assert mounted("/back\\slash/x").is_read_only
        assert not mounted("/x").is_read_only

    def test_odd_characters_end_no_line_and_lines_without_sense_are_passed_over(self) -> None:
        text = (
            "what is this\n27 1 254:0 / / rw - ext4 /dev/vda rw\n28 27 254 / /x rw - ext4 s rw\n"
            "50 27 8:1 / /a\x0bb\x85c\u2028d rw - xfs s rw\n"
        )
        points = [line.mount.point for line in parse_mountinfo(text)]
        assert points == [Path("/"), Path("/a\x0bb\x85c\u2028d")]

    def test_filesystems_have_families(self) -> None:
        """A Windows drive in WSL is told from other shares."""
        families: dict[Family, str] = {
            "local": "ext4 btrfs zfs exfat",
            "network": "nfs nfs4 cifs smb3 9p glusterfs ceph lustre beegfs afs virtiofs"
            " fuse.sshfs fuse.rclone fuse.juicefs",
            "fuse": "fuse.mergerfs fuse fuseblk",
            "overlay": "overlay fuse.fuse-overlayfs",
            "memory": "tmpfs ramfs",
            "wsl": "drvfs",
            "unknown": "proc",
        }
        for family, names in families.items():
            for name in names.split():
                assert family_of(name, "source", frozenset()) == family, name
        assert family_of("", "source", frozenset()) == "unknown"
        drives = [("drvfs", {"rw"}), ("C:\\", {"rw"}), ("none", {"rw", "aname=drvfs;path=D:\\"})]
        for source, options in drives:
            assert family_of("9p", source, options) == "wsl", source
        assert family_of("9p", "hostshare", {"rw", "trans=virtio"}) == "network"


def test_the_nearest_existing_path_is_the_path_or_an_ancestor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dangling symlink does not exist; a relative path is answered relatively."""
    file = tmp_path / "file"
    file.touch()
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path)
    rows = [
        (file, file), (tmp_path / "x" / "b" / "c", tmp_path), (file / "below" / "a", file),
        (tmp_path / "link", tmp_path), (Path("a/b/c"), Path("a")), (Path("b"), Path()),
    ]  # fmt: skip
    for path, nearest in rows:
        assert nearest_existing(path) == nearest, path


@linux
class TestThisMachine:
    def test_the_mount_of_a_file_holds_it_and_a_symlink_is_on_the_mount_it_leads_to(
        self, tmp_path: Path
    ) -> None:
        mount = mount_of(tmp_path / "not" / "there")
        assert os.path.ismount(mount.point)
        assert tmp_path.is_relative_to(mount.point)
        (tmp_path / "link").symlink_to("/proc")
        for path in (Path("/proc/self/status"), tmp_path / "link", tmp_path / "link" / "self"):
            mount = mount_of(path)
            assert (mount.point, mount.fstype) == (Path("/proc"), "proc"), path

    def test_the_answer_is_the_same_when_the_kernel_does_not_tell_the_mount(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        places = [tmp_path, Path("/proc/self"), Path("/")]
        told = [mount_of(place) for place in places]
        monkeypatch.setattr(mounts, "_mount_number", lambda _: None)
        assert [mount_of(place) for place in places] == told

    def test_neither_is_on_a_network(self, tmp_path: Path) -> None:
        assert not is_network(Path("/proc"))
        assert is_network(tmp_path) == (mount_of(tmp_path).family in {"network", "wsl"})


def test_without_mountinfo_at_least_the_mount_point_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounts, "line_of", lambda _: None)
    mount = mount_of(tmp_path / "absent")
    assert os.path.ismount(mount.point)
    assert tmp_path.resolve().is_relative_to(mount.point)
    assert (mount.fstype, mount.family) == ("unknown", "unknown")
    assert not mount.is_read_only
