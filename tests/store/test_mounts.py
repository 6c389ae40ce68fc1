from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.api import (
    Family,
    Mount,
    family_of,
    find_mount,
    is_network,
    mount_of,
    nearest_existing,
    parse_mountinfo,
)
from tests.api import store_mounts as mounts

if not hasattr(os, "makedev"):
    pytest.skip("no device numbers", allow_module_level=True)

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


def test_every_line_is_read_in_order() -> None:
    lines = parse_mountinfo(MOUNTINFO)
    assert [line.number for line in lines] == [22, 27, 25, 30, 40, 41, 42, 43, 44, 45, 46]
    assert lines[4].device == os.makedev(8, 17)


def test_octal_escapes_become_the_characters_they_stand_for() -> None:
    assert mounted("/media/My Drive\ttab/x").point == Path("/media/My Drive\ttab")
    assert mounted("/back\\slash").source == "/dev/sdc1"
    assert mounted("/nas/x").source == "10.0.0.1:/export one"


def test_an_escaped_comma_does_not_end_an_option() -> None:
    options = mounted("/docker/overlay2/m/etc").options
    assert options == {"rw", "lowerdir=/l,1", "upperdir=/u", "index=off"}


def test_the_options_of_mount_and_filesystem_are_joined() -> None:
    assert mounted("/run/lock/x").options == {"rw", "nosuid"}
    assert mounted("/x").options == {"rw", "relatime", "discard"}


def test_a_read_only_mount_of_a_writable_filesystem_is_read_only() -> None:
    assert mounted("/back\\slash/x").is_read_only
    assert not mounted("/x").is_read_only


def test_the_longest_mount_point_wins_and_only_whole_names_count() -> None:
    assert mounted("/proc").fstype == "proc"
    assert mounted("/proc/1").fstype == "proc"
    assert mounted("/process").point == Path("/")
    assert mounted("/").point == Path("/")


def test_of_two_mounts_at_one_point_the_last_wins() -> None:
    assert mounted("/run/lock").source == "over"


def test_a_bind_mount_is_found_at_its_own_point() -> None:
    assert mounted("/home/me/models/a").point == Path("/home/me/models")
    assert mounted("/home/me/other").point == Path("/")
    assert mounted("/home/me/models/a").fstype == "ext4"


def test_a_source_may_be_empty() -> None:
    assert mounted("/empty").source == ""
    assert mounted("/empty").fstype == "tmpfs"


def test_a_mount_point_may_contain_what_other_programs_take_for_a_line_end() -> None:
    text = "27 1 254:0 / / rw - ext4 /dev/vda rw\n50 27 8:1 / /a\x0bb\x85c\u2028d rw - xfs s rw\n"
    lines = parse_mountinfo(text)
    assert [line.mount.point for line in lines] == [Path("/"), Path("/a\x0bb\x85c\u2028d")]


def test_lines_that_make_no_sense_are_passed_over() -> None:
    text = "what is this\n27 1 254:0 / / rw - ext4 /dev/vda rw\n28 27 254 / /x rw - ext4 s rw\n"
    assert [line.number for line in parse_mountinfo(text)] == [27]


def test_nothing_is_found_in_nothing() -> None:
    assert find_mount("/x", []) is None


@pytest.mark.parametrize(
    ("fstype", "family"),
    [
        ("ext4", "local"),
        ("btrfs", "local"),
        ("zfs", "local"),
        ("exfat", "local"),
        ("nfs", "network"),
        ("nfs4", "network"),
        ("cifs", "network"),
        ("smb3", "network"),
        ("9p", "network"),
        ("glusterfs", "network"),
        ("ceph", "network"),
        ("lustre", "network"),
        ("beegfs", "network"),
        ("afs", "network"),
        ("virtiofs", "network"),
        ("fuse.sshfs", "network"),
        ("fuse.rclone", "network"),
        ("fuse.juicefs", "network"),
        ("fuse.mergerfs", "fuse"),
        ("fuse", "fuse"),
        ("fuseblk", "fuse"),
        ("overlay", "overlay"),
        ("fuse.fuse-overlayfs", "overlay"),
        ("tmpfs", "memory"),
        ("ramfs", "memory"),
        ("drvfs", "wsl"),
        ("proc", "unknown"),
        ("", "unknown"),
    ],
)
def test_filesystems_have_families(fstype: str, family: Family) -> None:
    assert family_of(fstype, "source", frozenset()) == family


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("drvfs", {"rw"}),
        ("C:\\", {"rw"}),
        ("none", {"rw", "aname=drvfs;path=D:\\;uid=1000"}),
    ],
)
def test_a_windows_drive_in_wsl_is_told_from_other_shares(source: str, options: set[str]) -> None:
    assert family_of("9p", source, options) == "wsl"
    assert family_of("9p", "hostshare", {"rw", "trans=virtio"}) == "network"


def test_a_windows_drive_in_wsl_is_found_in_mountinfo() -> None:
    assert mounted("/mnt/c/Users").family == "wsl"


def test_the_nearest_existing_path_is_the_path_or_an_ancestor(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert nearest_existing(file) == file
    assert nearest_existing(tmp_path / "a" / "b" / "c") == tmp_path
    assert nearest_existing(file / "below" / "a" / "file") == file


def test_a_dangling_symlink_does_not_exist(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    assert nearest_existing(tmp_path / "link") == tmp_path


def test_a_relative_path_is_answered_relatively(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    assert nearest_existing(Path("a/b/c")) == Path("a")
    assert nearest_existing(Path("b")) == Path()


@pytest.mark.skipif(sys.platform != "linux", reason="no mountinfo")
class TestThisMachine:
    def test_the_mount_of_a_file_has_its_device(self, tmp_path: Path) -> None:
        mount = mount_of(tmp_path / "not" / "there")
        assert os.path.ismount(mount.point)
        assert tmp_path.is_relative_to(mount.point)

    def test_proc_is_mounted_at_proc(self) -> None:
        mount = mount_of(Path("/proc/self/status"))
        assert (mount.point, mount.fstype) == (Path("/proc"), "proc")

    def test_a_symlink_is_on_the_mount_it_leads_to(self, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to("/proc")
        assert mount_of(tmp_path / "link").fstype == "proc"
        assert mount_of(tmp_path / "link" / "self").fstype == "proc"

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
