"""Filesystems made and mounted for the test, in a mount namespace of its own.

Nothing is seen outside of it, and nothing remains when it ends. What cannot be made here (no
permission, no mkfs, no such filesystem in the kernel) is skipped with the reason.
"""

from __future__ import annotations

import os
import shutil
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from smartcache.errors import FileSkippedError
from smartcache.system import filesystems, kernel
from smartcache.system.filesystems import (
    Abilities,
    Mounts,
    can_reflink,
    filesystem_id,
    free_bytes,
    mount_of,
    probe,
)
from tests.store.files import write
from tests.store.small_disks import CannotMountError, in_own_namespace, make_image, run

if sys.platform != "linux":
    pytest.skip("mount namespaces", allow_module_level=True)


def mount(*arguments: str | Path) -> None:
    if problem := run("mount", *arguments):
        raise CannotMountError(problem)


def umount(point: Path) -> None:
    assert run("umount", point) == ""


def mounting(work: Callable[[], None]) -> None:
    """Run a test that may mount what it likes."""

    def attempt() -> str:
        try:
            work()
        except CannotMountError as error:
            return str(error)
        return ""

    if problem := in_own_namespace(attempt):
        pytest.skip(f"cannot mount: {problem}")


def fresh_id(path: Path) -> str:
    filesystems._known.clear()  # noqa: SLF001
    return filesystem_id(path)


def directory(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


@pytest.fixture
def volume_id() -> str:
    """A new one for each: two mounted btrfs of one UUID are taken for one."""
    return str(uuid.uuid4())


def clone(source: Path, target: Path) -> bool:
    with source.open("rb") as a, target.open("r+b") as b:
        return kernel.clone(a.fileno(), b.fileno())


@pytest.mark.parametrize(
    ("mkfs", "megabytes"),
    [
        (("mkfs.xfs", "-q", "-m", "reflink=1,uuid={}"), 320),
        (("mkfs.btrfs", "-q", "-U", "{}"), 128),
    ],
    ids=["xfs", "btrfs"],
)
def test_reflinks_share_space_and_the_id_is_the_uuid(
    mkfs: tuple[str, ...], megabytes: int, tmp_path: Path, volume_id: str
) -> None:
    words = [word.format(volume_id) for word in mkfs]
    image = make_image(tmp_path / "image", megabytes, *words)

    def work() -> None:
        point = directory(tmp_path / "point")
        mount("-o", "loop", image, point)
        found = filesystem_id(point)
        assert found.startswith(f"uuid:{volume_id}")
        assert mount_of(point).fstype == mkfs[0].removeprefix("mkfs.")
        assert probe(point) == Abilities(reflink=True, lease=True)
        assert can_reflink(point)
        assert set(os.listdir(point)) <= {"lost+found"}
        content = os.urandom(8_000_000)
        source, target = write(point / "source", content), write(point / "target", b"else")
        os.sync()
        free = free_bytes(point)
        assert clone(source, target)
        os.sync()
        assert target.read_bytes() == content
        assert free - free_bytes(point) < 1_000_000
        umount(point)
        # Another device number, if the loop device is not free again yet.
        mount("-o", "loop,ro", image, point)
        assert fresh_id(point / "source") == found

    mounting(work)


def test_btrfs_subvolumes_have_ids_of_their_own_and_share_by_reflink(
    tmp_path: Path, volume_id: str
) -> None:
    """Each numbers its inodes from 256: one id would mix up their files."""
    image = make_image(tmp_path / "image", 128, "mkfs.btrfs", "-q", "-U", volume_id)

    def work() -> None:
        point = directory(tmp_path / "point")
        mount("-o", "loop", image, point)
        for name in ("one", "two"):
            assert run("btrfs", "subvolume", "create", point / name) == ""
        ids = [fresh_id(point), fresh_id(point / "one"), fresh_id(point / "two")]
        assert len(set(ids)) == 3
        assert all(each.startswith(f"uuid:{volume_id}:") for each in ids)
        one, two = write(point / "one" / "file"), write(point / "two" / "file", b"other")
        assert one.stat().st_ino == two.stat().st_ino
        assert clone(one, two)
        # The same subvolume mounted by itself is the same place.
        mount("-o", "subvol=two", mount_of(point).source, directory(tmp_path / "alone"))
        assert fresh_id(tmp_path / "alone") == ids[2]
        filesystem, below = Mounts().place(two.parent)
        assert filesystem == ids[2]
        umount(tmp_path / "alone")
        assert Mounts().path(filesystem, below) == str(two.parent)
        filesystem, below = Mounts().place(one.parent)
        assert (filesystem, Mounts().path(filesystem, below)) == (ids[1], str(one.parent))

    mounting(work)


def test_a_uuid_of_zeros_lasts_until_the_next_boot_and_one_set_while_mounted_is_found(
    tmp_path: Path, volume_id: str
) -> None:
    """The generic question is answered with the UUID of the time of the mount: zeros."""
    words = ("mkfs.ext4", "-q", "-F", "-U", "clear", "-O", "^metadata_csum")
    image = make_image(tmp_path / "image", 40, *words)

    def work() -> None:
        point = directory(tmp_path / "point")
        mount("-o", "loop", image, point)
        assert filesystem_id(point) == f"dev:{point.stat().st_dev:x}:{kernel.boot_id()}"
        assert run("tune2fs", "-U", volume_id, mount_of(point).source) == ""
        assert fresh_id(point) == f"uuid:{volume_id}"

    mounting(work)


def test_fat_has_no_lasting_id_because_it_has_no_lasting_inode_numbers(tmp_path: Path) -> None:
    image = make_image(tmp_path / "image", 40, "mkfs.vfat")

    def work() -> None:
        point = directory(tmp_path / "point")
        mount("-o", "loop", image, point)
        assert filesystem_id(point).startswith("dev:")
        assert Mounts().place(point) == ("", os.fsencode(point))

    mounting(work)


def test_a_mount_that_hides_another_is_seen(tmp_path: Path) -> None:
    """Comparing paths would find the hidden one: its mount point is longer."""

    def work() -> None:
        mount("-t", "tmpfs", "hidden", directory(tmp_path / "a" / "b"))
        mount("-t", "tmpfs", "above", tmp_path / "a")
        assert mount_of(directory(tmp_path / "a" / "b" / "c d")).source == "above"

    mounting(work)


def test_a_bind_mount_is_the_same_filesystem_but_another_mount(tmp_path: Path) -> None:
    source, bound = directory(tmp_path / "source"), directory(tmp_path / "bound to\tit")
    write(source / "file")

    def work() -> None:
        mount("--bind", source, bound)
        assert source.stat().st_dev == bound.stat().st_dev
        assert filesystem_id(source) == fresh_id(bound / "file")
        assert mount_of(bound / "file").point == bound
        with pytest.raises(OSError, match="Invalid cross-device link"):
            os.link(source / "file", bound / "link")
        assert Mounts().place(source) == Mounts().place(bound)
        inner = Mounts().place(directory(source / "inner"))
        assert Mounts().place(bound / "inner") == inner
        assert Mounts().path(*inner) == str(source / "inner")
        mount("-o", "remount,ro,bind", bound)
        assert (mount_of(source).is_read_only, mount_of(bound).is_read_only) == (False, True)

    mounting(work)


def test_a_drive_mounted_elsewhere_is_the_same_drive_unless_there_are_two(
    tmp_path: Path, volume_id: str
) -> None:
    image = make_image(tmp_path / "image", 40, "mkfs.ext4", "-q", "-F", "-U", volume_id)
    shutil.copyfile(image, tmp_path / "twin")

    def work() -> None:
        here, there = directory(tmp_path / "here"), directory(tmp_path / "there")
        mount("-o", "loop", image, here)
        filesystem, below = Mounts().place(directory(here / "models" / "a"))
        assert (filesystem, below) == (f"uuid:{volume_id}", b"models/a")
        assert Mounts().path(filesystem, below) == str(here / "models" / "a")
        umount(here)
        filesystems._known.clear()  # noqa: SLF001
        with pytest.raises(FileSkippedError, match="not mounted"):
            Mounts().path(filesystem, below)
        mount("-o", "loop", image, there)
        assert Mounts().path(filesystem, below + b"/x") == str(there / "models" / "a" / "x")
        mount("--bind", there / "models", here)
        assert Mounts().path(filesystem, below) == str(there / "models" / "a")
        assert Mounts().place(here / "a") == (filesystem, below)
        mount("-o", "loop", tmp_path / "twin", directory(tmp_path / "second"))
        with pytest.raises(FileSkippedError, match="two devices"):
            Mounts().path(filesystem, below)

    mounting(work)


@pytest.mark.parametrize("option", ["", ",uuid=null"], ids=["own uuid", "no uuid"])
def test_overlays_on_one_filesystem_have_different_ids(option: str, tmp_path: Path) -> None:
    """Without a UUID of their own they all have the f_fsid of the filesystem below."""

    def work() -> None:
        disk = directory(tmp_path / "disk")
        mount("-t", "tmpfs", "tmpfs", disk)
        ids = [fresh_id(disk)]
        lower = directory(disk / "lower")
        for name in ("one", "two"):
            upper, work, point = (directory(disk / name / each) for each in ("u", "w", "m"))
            layers = f"lowerdir={lower},upperdir={upper},workdir={work}{option}"
            mount("-t", "overlay", "overlay", "-o", layers, point)
            ids.append(fresh_id(point))
        assert len(set(ids)) == 3
        assert mount_of(point).family == "overlay"
        umount(point)
        mount("-t", "overlay", "overlay", "-o", layers, point)
        assert fresh_id(point) == ids[2]

    mounting(work)


def test_layers_of_an_overlay_on_several_filesystems_have_different_ids(tmp_path: Path) -> None:
    """Their files keep the inode numbers of their own filesystems, which may be equal."""

    def work() -> None:
        lower, disk = directory(tmp_path / "lower"), directory(tmp_path / "disk")
        for point in (lower, disk):
            mount("-t", "tmpfs", "tmpfs", point)
        write(lower / "old")
        upper, work, point = (directory(disk / each) for each in ("u", "w", "m"))
        layers = f"lowerdir={lower},upperdir={upper},workdir={work},xino=off"
        mount("-t", "overlay", "overlay", "-o", layers, point)
        paths = [point / "old", write(point / "new")]
        assert len({path.stat().st_dev for path in paths}) == 2
        ids = {fresh_id(path) for path in paths}
        assert len(ids) == 2
        assert not any(each.startswith("dev:") for each in ids)

    mounting(work)
