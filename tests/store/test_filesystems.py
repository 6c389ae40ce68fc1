"""Which filesystem a path is on, how it is known again, and what works there."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from smartcache.errors import FileSkippedError, NoSpaceError, StoreUnwritableError
from smartcache.system import filesystems, kernel
from smartcache.system.filesystems import (
    Family,
    Mount,
    Mounts,
    can_reflink,
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
from tests.processes.children import NOBODY, Child, folder_of
from tests.processes.killing import in_child, was_killed
from tests.store.files import raising, row

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
ORDINARY = NOBODY if os.geteuid() == 0 else None


@pytest.fixture(autouse=True)
def _nothing_known() -> Iterator[None]:
    filesystems._known.clear()  # noqa: SLF001
    yield
    filesystems._known.clear()  # noqa: SLF001


@pytest.fixture
def old_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the questions for a UUID is understood."""
    monkeypatch.setattr(fcntl, "ioctl", raising(errno.ENOTTY))


def fresh_id(path: Path, st: os.stat_result | None = None) -> str:
    filesystems._known.clear()  # noqa: SLF001
    return filesystem_id(path, st)


def id_of_this_boot(path: Path) -> str:
    return f"dev:{path.stat().st_dev:x}:{kernel.boot_id()}"


class TestFilesystemId:
    def test_one_filesystem_has_one_id_and_another_one_another(
        self, tmp_path: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also where a given stat result leads elsewhere than the path does; nothing stays open.

        A file that has vanished has the id of its directory. All is the same where the kernel does
        not tell the mount.
        """
        (tmp_path / "directory").mkdir()
        (tmp_path / "file").touch()
        (tmp_path / "directory" / "file").touch()
        link = tmp_path / "directory" / "link"
        link.symlink_to(elsewhere)
        vanished = (tmp_path / "file").stat()
        descriptors = len(os.listdir("/dev/fd"))
        for _ in range(2):
            here, there = fresh_id(tmp_path), fresh_id(elsewhere)
            assert here != there
            for path in tmp_path.rglob("*"):
                st = path.lstat()
                assert fresh_id(path, st) == filesystem_id(path, st) == here, path
            assert fresh_id(link, link.stat()) == there
            assert fresh_id(tmp_path / "gone", vanished) == here
            assert len(os.listdir("/dev/fd")) == descriptors
            monkeypatch.setattr(filesystems, "_mount_number", lambda _: None)
        with pytest.raises(FileNotFoundError):
            filesystem_id(tmp_path / "absent")

    @linux
    def test_an_ordinary_user_and_root_see_one_id_even_in_unreadable_directories(self) -> None:
        with folder_of(None) as public:
            closed = public / "closed"
            closed.mkdir()
            (closed / "file").touch()
            st = (closed / "file").stat()
            expected = filesystem_id(closed / "file", st)
            closed.chmod(0o000)
            with Child(lambda: fresh_id(closed / "file", st), user=ORDINARY) as child:
                assert child.result() == expected
            closed.chmod(0o700)

    def test_it_is_remembered_for_a_second_and_then_asked_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An unplugged drive leaves its device number to the next one."""
        now = 100.0
        monkeypatch.setattr(filesystems, "time", SimpleNamespace(monotonic=lambda: now))
        first = filesystem_id(tmp_path)
        monkeypatch.setattr(filesystems, "_lasting_id", lambda *_: "another drive")
        now = 100.9
        assert filesystem_id(tmp_path) == first
        now = 101.1
        assert filesystem_id(tmp_path) == "another drive"

    @linux
    @pytest.mark.usefixtures("old_kernel")
    def test_an_older_kernel_is_asked_for_the_fsid_and_a_uuid_of_zeros_is_none(
        self, memory_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fsid = os.statvfs(memory_path).f_fsid
        if not fsid:
            pytest.skip("this kernel has no f_fsid for tmpfs")
        assert filesystem_id(memory_path) == f"fsid:tmpfs:{fsid:016x}"
        monkeypatch.setattr(fcntl, "ioctl", lambda *_: 0)
        assert not fresh_id(memory_path).startswith("uuid:")

    @linux
    @pytest.mark.usefixtures("old_kernel")
    def test_the_name_in_by_uuid_is_used_where_the_kernel_has_none(
        self, disk_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = mount_of(disk_path).source
        if not os.path.exists(source) or os.stat(source).st_rdev != disk_path.stat().st_dev:
            pytest.skip("the temporary directory is on no block device of its own")
        listing = tmp_path / "by-uuid"
        listing.mkdir()
        (listing / "0000-AAAA").symlink_to("/dev/null")
        (listing / "1234-ABCD").symlink_to(source)
        monkeypatch.setattr(filesystems, "_BY_UUID", str(listing))
        assert filesystem_id(disk_path) == "uuid:1234-ABCD"

    @linux
    @pytest.mark.usefixtures("old_kernel")
    def test_a_server_is_known_by_its_name_and_what_has_nothing_lasting_for_this_boot(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """FAT numbers its files anew, so another file may come under the number of this one."""
        assert filesystem_id(Path("/proc/self")) == id_of_this_boot(Path("/proc"))
        for source, found in (
            ("nfs4 nas:/models", "nfs4:nas:/models"), ("vfat /dev/sdb1", id_of_this_boot(tmp_path))
        ):  # fmt: skip
            (line,) = parse_mountinfo(f"44 27 0:55 / /nas rw - {source} rw,vers=4.2")
            monkeypatch.setattr(filesystems, "_told_mount", lambda *_, line=line: line)
            assert fresh_id(tmp_path) == found


def test_free_bytes_are_those_an_ordinary_user_can_write(memory_path: Path) -> None:
    status = os.statvfs(memory_path)
    size = status.f_blocks * status.f_frsize
    assert 0 < free_bytes(memory_path / "a" / "b") <= size
    (memory_path / "file").write_bytes(bytes(8_000_000))
    assert free_bytes(memory_path) < size - 4_000_000


class TestProbe:
    @linux
    def test_what_works_is_found_and_nothing_remains(
        self, disk_path: Path, memory_path: Path
    ) -> None:
        for folder in (disk_path, memory_path):
            able = probe(folder)
            assert can_reflink(folder) == able.reflink
            if mount_of(folder).fstype in ("ext4", "tmpfs"):
                assert (able.reflink, able.lease) == (False, True)
            assert os.listdir(folder) == []

    @linux
    @pytest.mark.parametrize("is_named", [False, True])
    @pytest.mark.parametrize("call", ["clone", "take_lease", ""])
    def test_nothing_remains_of_one_that_was_killed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, is_named: bool
    ) -> None:
        """Where there are no files without a name, names are taken back at once."""
        able, real = probe(tmp_path), os.open

        def refuse(path: str, flags: int, *more: int, **kwargs: int) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            return real(path, flags, *more, **kwargs)

        def work() -> None:
            if call:
                setattr(kernel, call, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            assert probe(tmp_path) == able

        if is_named:
            monkeypatch.setattr(os, "open", refuse)
        status = in_child(work)
        assert was_killed(status) if call else status == 0
        assert os.listdir(tmp_path) == []

    def test_where_nothing_can_be_written_it_says_why(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What failed for lack of room is tried again."""
        (tmp_path / "file").touch()
        for path in (tmp_path / "file", tmp_path / "absent"):
            with row(path), pytest.raises(StoreUnwritableError, match="cannot write in"):
                probe(path)

        def denied(public: Path) -> tuple[int | None, str]:
            with pytest.raises(StoreUnwritableError) as caught:
                probe(public)
            return caught.value.errno, caught.value.message

        with folder_of(None) as public:
            public.chmod(0o555)
            with Child(partial(denied, public), user=ORDINARY) as child:
                code, message = child.result()
        assert code == errno.EACCES
        assert str(public) in message
        monkeypatch.setattr(filesystems, "_reflinks", {})
        with monkeypatch.context() as patch:
            patch.setattr(kernel, "clone", raising(errno.ENOSPC))
            with pytest.raises(NoSpaceError, match="No space"):
                probe(tmp_path)
            assert not can_reflink(tmp_path)
        assert os.listdir(tmp_path) == ["file"]
        assert can_reflink(tmp_path) == probe(tmp_path).reflink

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
        assert not probe(tmp_path).lease


@linux
class TestMounts:
    def test_a_path_comes_back_from_where_it_was_written_down(
        self, tmp_path: Path, elsewhere: Path
    ) -> None:
        """What does not exist and what a symlink leads to have places, too."""
        (tmp_path / "link").symlink_to(tmp_path)
        for folder in (tmp_path, elsewhere, Path("/"), tmp_path / "link", tmp_path / "a" / "b"):
            mounts = Mounts()
            filesystem, below = mounts.place(folder)
            assert not filesystem.startswith("dev:")
            name = os.fsdecode(b"\xff x")
            path = mounts.path(filesystem, os.path.join(below, os.fsencode(name)))
            assert path == os.path.join(os.path.realpath(folder), name)
            assert Mounts().path(filesystem, below) == os.path.realpath(folder)
        with pytest.raises(FileSkippedError, match="not mounted") as caught:
            Mounts().path("uuid:none", b"a/b")
        assert caught.value.reason == "its drive is not mounted"

    def test_without_a_lasting_id_the_path_is_absolute(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(filesystems, "_mountinfo", str)
        mounts = Mounts()
        path = os.fsencode(os.path.realpath(tmp_path))
        assert mounts.place(tmp_path) == ("", path)
        assert os.fsencode(mounts.path("", path)) == path


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
    mount = find_mount(path, parse_mountinfo(MOUNTINFO))
    assert mount is not None
    return mount


class TestMountinfo:
    def test_the_longest_mount_point_wins_and_only_whole_names_count(self) -> None:
        """Of two mounts at one point the last; a bind mount at its own; escapes are undone."""
        for path, point, source, family in (
            ("/proc", "/proc", "proc", "unknown"), ("/proc/1", "/proc", "proc", "unknown"),
            ("/process", "/", "/dev/vda", "local"), ("/", "/", "/dev/vda", "local"),
            ("/home/me/models/a", "/home/me/models", "/dev/vda", "local"),
            ("/home/me/other", "/", "/dev/vda", "local"),
            ("/media/My Drive\ttab/x", "/media/My Drive\ttab", "/dev/sdb1", "local"),
            ("/run/lock", "/run/lock", "over", "memory"),
            ("/back\\slash", "/back\\slash", "/dev/sdc1", "local"),
            ("/nas/x", "/nas", "10.0.0.1:/export one", "network"),
            ("/empty", "/empty", "", "memory"), ("/mnt/c/Users", "/mnt/c", "C:\\", "wsl"),
        ):  # fmt: skip
            mount = mounted(path)
            assert (os.fspath(mount.point), mount.source, mount.family) == (point, source, family)
        assert mounted("/home/me/models").root == "/srv/models"
        assert find_mount("/x", []) is None

    def test_the_options_of_mount_and_filesystem_are_joined(self) -> None:
        """A read-only mount of a writable filesystem is read-only; escaped commas end nothing."""
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
        points = [line.point for line in parse_mountinfo(text)]
        assert points == [Path("/"), Path("/a\x0bb\x85c\u2028d")]

    def test_filesystems_have_families(self) -> None:
        """A Windows drive in WSL is told from other shares; FAT has nothing lasting."""
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
        drives = [("drvfs", {"rw"}), ("C:\\", {"rw"}), ("none", {"rw", "aname=drvfs;path=D:\\"})]
        for source, options in drives:
            assert family_of("9p", source, options) == "wsl", source
        assert family_of("9p", "hostshare", {"rw", "trans=virtio"}) == "network"
        lasting = {"vfat": False, "exfat": False, "nfs4": True, "cifs": False, "fuseblk": True}
        for fstype, is_lasting in lasting.items():
            (mount,) = parse_mountinfo(f"1 0 8:1 / /x rw - {fstype} s rw")
            assert mount.is_lasting == is_lasting, fstype
            assert mount.has_hard_links == ("fat" not in fstype), fstype


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
def test_the_mount_of_a_file_holds_it_and_a_symlink_is_on_the_mount_it_leads_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the kernel does not tell the mount; without mountinfo the point is known."""
    (tmp_path / "link").symlink_to("/proc")
    in_proc = (Path("/proc/self/status"), tmp_path / "link", tmp_path / "link" / "self")
    for _ in range(2):
        mount = mount_of(tmp_path / "not" / "there")
        assert os.path.ismount(mount.point)
        assert tmp_path.is_relative_to(mount.point)
        assert is_network(tmp_path) == (mount.family in {"network", "wsl"})
        for path in in_proc:
            assert (mount_of(path).point, mount_of(path).fstype) == (Path("/proc"), "proc")
        monkeypatch.setattr(filesystems, "_mount_number", lambda _: None)
    monkeypatch.setattr(filesystems, "_told_mount", lambda _: None)
    blind = mount_of(tmp_path / "absent")
    assert blind.point == mount.point
    assert (blind.fstype, blind.family, blind.is_read_only) == ("unknown", "unknown", False)
