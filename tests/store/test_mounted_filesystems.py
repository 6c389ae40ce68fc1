"""Filesystems made and mounted for the test, in a mount namespace of its own.

Nothing is seen outside of it, and nothing remains when it ends. What cannot be made here (no
permission, no mkfs, no such filesystem in the kernel) is skipped with the reason.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.api import store_filesystems as filesystems

if sys.platform != "linux":
    pytest.skip("mount namespaces", allow_module_level=True)

ROOT = Path(filesystems.__file__).parents[2]
SEARCH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
CANNOT_MOUNT = 77

PREAMBLE = f"""
import dataclasses, json, os, subprocess, sys, time
from pathlib import Path
from smartcache.errors import NoSpaceError
from smartcache.store import filesystems, kernel
from smartcache.store.filesystems import filesystem_id, mount_of, probe

here = Path.cwd()
facts = {{}}

def run(*command):
    subprocess.run([str(each) for each in command], check=True, stdout=subprocess.DEVNULL)

def mount(*arguments):
    done = subprocess.run(
        ["mount", *map(str, arguments)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        print(done.stderr.strip(), file=sys.stderr)
        sys.exit({CANNOT_MOUNT})

def fresh_id(path):
    filesystems._known.clear()
    return filesystem_id(path)

def make(name, content=b""):
    path = here / name
    if content:
        path.write_bytes(content)
    else:
        path.mkdir(parents=True, exist_ok=True)
    return path
"""

Namespace = Callable[[str], dict[str, object]]


@pytest.fixture
def namespace(tmp_path: Path) -> Namespace:
    """Runs a program that may mount, in `tmp_path`, and returns the `facts` it collected."""
    unshare = ["unshare", "--mount"]
    if os.geteuid() != 0:
        unshare += ["--user", "--map-root-user"]
    tried = subprocess.run([*unshare, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no mount namespace: {tried.stderr.strip()}")

    def run(program: str) -> dict[str, object]:
        text = PREAMBLE + textwrap.dedent(program) + "\nprint(json.dumps(facts))\n"
        done = subprocess.run(
            [*unshare, sys.executable, "-c", text],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PATH": SEARCH},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == CANNOT_MOUNT:
            pytest.skip(f"cannot mount: {done.stderr.strip()}")
        assert done.returncode == 0, done.stderr
        facts: dict[str, object] = json.loads(done.stdout)
        return facts

    return run


@pytest.fixture
def volume_id() -> str:
    """A new one for each: two mounted btrfs of one UUID are taken for one."""
    return str(uuid.uuid4())


def make_image(path: Path, megabytes: int, *mkfs: str) -> None:
    """An image made by a mkfs command, in a sparse file."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount an image")
    if shutil.which(mkfs[0], path=SEARCH) is None:
        pytest.skip(f"no {mkfs[0]}")
    with open(path, "wb") as file:
        file.truncate(megabytes * 1_000_000)
    env = {**os.environ, "PATH": SEARCH}
    subprocess.run([*mkfs, str(path)], env=env, capture_output=True, check=True)


REFLINK = """
point = make("point")
mount("-o", "loop", "image", point)
facts["id"] = filesystem_id(point)
facts["fstype"] = mount_of(point).fstype
facts["abilities"] = dataclasses.asdict(probe(point))
facts["left"] = sorted(set(os.listdir(point)) - {"lost+found"})

content = os.urandom(8_000_000)
source, target = make("point/source", content), make("point/target", b"something else")
os.sync()
free = filesystems.free_bytes(point)
with source.open("rb") as a, target.open("r+b") as b:
    facts["cloned"] = kernel.clone(a.fileno(), b.fileno())
os.sync()
facts["equal"] = target.read_bytes() == content
facts["taken"] = free - filesystems.free_bytes(point)
with target.open("r+b") as b:
    b.write(b"changed")
facts["source kept"] = source.read_bytes() == content
facts["device"] = point.stat().st_dev

run("umount", point)
# Another device number, if the loop device is not free again yet.
mount("-o", "loop,ro", "image", point)
facts["id after remount"] = fresh_id(point / "source")
"""


@pytest.mark.parametrize(
    ("mkfs", "megabytes"),
    [
        (("mkfs.xfs", "-q", "-m", "reflink=1,uuid={}"), 320),
        (("mkfs.btrfs", "-q", "-U", "{}"), 128),
    ],
    ids=["xfs", "btrfs"],
)
def test_reflinks_share_space_and_the_id_is_the_uuid(
    mkfs: tuple[str, ...], megabytes: int, namespace: Namespace, tmp_path: Path, volume_id: str
) -> None:
    make_image(tmp_path / "image", megabytes, *(word.format(volume_id) for word in mkfs))
    facts = namespace(REFLINK)
    assert facts["fstype"] == mkfs[0].removeprefix("mkfs.")
    assert str(facts["id"]).startswith(f"uuid:{volume_id}")
    assert facts["id after remount"] == facts["id"]
    abilities = facts["abilities"]
    assert isinstance(abilities, dict)
    assert abilities.pop("notes") == []
    assert all(abilities.values()), abilities
    assert facts["left"] == []
    assert facts["cloned"] is True
    assert facts["equal"] is True
    assert facts["source kept"] is True
    assert isinstance(facts["taken"], int)
    assert facts["taken"] < 1_000_000


def test_a_filesystem_made_without_reflinks_says_no(namespace: Namespace, tmp_path: Path) -> None:
    make_image(tmp_path / "image", 320, "mkfs.xfs", "-q", "-m", "reflink=0")
    facts = namespace(
        """
        mount("-o", "loop", "image", make("point"))
        facts["reflink"] = probe(here / "point").reflink
        """
    )
    assert facts == {"reflink": False}


def test_btrfs_subvolumes_have_ids_of_their_own_and_share_by_reflink(
    namespace: Namespace, tmp_path: Path, volume_id: str
) -> None:
    """Each numbers its inodes from 256: one id would mix up their files."""
    make_image(tmp_path / "image", 128, "mkfs.btrfs", "-q", "-U", volume_id)
    facts = namespace(
        """
        point = make("point")
        mount("-o", "loop", "image", point)
        run("btrfs", "subvolume", "create", point / "one")
        run("btrfs", "subvolume", "create", point / "two")
        facts["ids"] = [fresh_id(point), fresh_id(point / "one"), fresh_id(point / "two")]
        one = make("point/one/file", b"bytes" * 10_000)
        facts["inodes"] = [one.stat().st_ino, make("point/two/file", b"other").stat().st_ino]
        with one.open("rb") as a, (point / "two" / "clone").open("wb") as b:
            facts["cloned"] = kernel.clone(a.fileno(), b.fileno())
        facts["same"] = filesystems.same_filesystem(one, point / "two")
        # The same subvolume mounted by itself is the same place.
        mount("-o", "subvol=two", mount_of(point).source, make("alone"))
        facts["alone"] = fresh_id(here / "alone")
        """
    )
    ids = facts["ids"]
    assert isinstance(ids, list)
    assert len(set(ids)) == 3
    assert all(each.startswith(f"uuid:{volume_id}:") for each in ids)
    assert facts["alone"] == ids[2]
    inodes = facts["inodes"]
    assert isinstance(inodes, list)
    assert inodes[0] == inodes[1]
    assert facts["cloned"] is True
    assert facts["same"] is False


def test_a_uuid_of_zeros_lasts_until_the_next_boot_only(
    namespace: Namespace, tmp_path: Path
) -> None:
    make_image(tmp_path / "image", 40, "mkfs.ext4", "-q", "-F", "-U", "clear")
    facts = namespace(
        """
        mount("-o", "loop", "image", make("point"))
        facts["id"] = filesystem_id(here / "point")
        facts["expected"] = f"dev:{(here / 'point').stat().st_dev:x}:{kernel.boot_id()}"
        """
    )
    assert facts["id"] == facts["expected"]


def test_a_uuid_set_while_mounted_is_found(
    namespace: Namespace, tmp_path: Path, volume_id: str
) -> None:
    """The generic question is answered with the UUID of the time of the mount: zeros."""
    make_image(
        tmp_path / "image", 40, "mkfs.ext4", "-q", "-F", "-U", "clear", "-O", "^metadata_csum"
    )
    facts = namespace(
        f"""
        point = make("point")
        mount("-o", "loop", "image", point)
        run("tune2fs", "-U", "{volume_id}", mount_of(point).source)
        facts["id"] = filesystem_id(point)
        """
    )
    assert facts["id"] == f"uuid:{volume_id}"


def test_fat_has_no_lasting_id_because_it_has_no_lasting_inode_numbers(
    namespace: Namespace, tmp_path: Path
) -> None:
    make_image(tmp_path / "image", 40, "mkfs.vfat")
    facts = namespace(
        """
        mount("-o", "loop", "image", make("point"))
        facts["id"] = filesystem_id(here / "point")
        facts["hard link"] = probe(here / "point").hard_link
        """
    )
    assert str(facts["id"]).startswith("dev:")
    assert facts["hard link"] is False


def test_another_filesystem_under_a_known_device_number_is_noticed(namespace: Namespace) -> None:
    facts = namespace(
        """
        point = make("point")
        ids, devices = [], []
        for _ in range(2):
            mount("-t", "tmpfs", "tmpfs", point)
            ids.append(filesystem_id(point))
            devices.append(point.stat().st_dev)
            run("umount", point)
            time.sleep(1.1)
        facts["ids"], facts["devices"] = ids, devices
        """
    )
    ids, devices = facts["ids"], facts["devices"]
    assert isinstance(ids, list)
    assert isinstance(devices, list)
    if devices[0] != devices[1]:
        pytest.skip("the device number was not used again")
    assert ids[0] != ids[1]


def test_a_mount_that_hides_another_is_seen(namespace: Namespace) -> None:
    """Comparing paths would find the hidden one: its mount point is longer."""
    facts = namespace(
        """
        make("a/b")
        mount("-t", "tmpfs", "hidden", here / "a" / "b")
        mount("-t", "tmpfs", "above", here / "a")
        make("a/b/c d")
        facts["source"] = mount_of(here / "a" / "b" / "c d").source
        """
    )
    assert facts == {"source": "above"}


def test_a_bind_mount_is_the_same_filesystem_but_another_mount(namespace: Namespace) -> None:
    facts = namespace(
        r"""
        source, bound = make("source"), make("bound to\tit")
        make("source/file", b"bytes")
        mount("--bind", source, bound)
        facts["same"] = filesystems.same_filesystem(source, bound)
        facts["one id"] = filesystem_id(source) == fresh_id(bound / "file")
        facts["point"] = str(mount_of(bound / "file").point.relative_to(here))
        try:
            os.link(source / "file", bound / "link")
        except OSError as error:
            facts["link"] = error.strerror
        mount("-o", "remount,ro,bind", bound)
        facts["read-only"] = [mount_of(source).is_read_only, mount_of(bound).is_read_only]
        """
    )
    assert facts == {
        "same": True,
        "one id": True,
        "point": "bound to\tit",
        "link": "Invalid cross-device link",
        "read-only": [False, True],
    }


@pytest.mark.parametrize("option", ["", ",uuid=null"], ids=["own uuid", "no uuid"])
def test_overlays_on_one_filesystem_have_different_ids(option: str, namespace: Namespace) -> None:
    """Without a UUID of their own they all have the f_fsid of the filesystem below."""
    facts = namespace(
        f"""
        mount("-t", "tmpfs", "tmpfs", make("disk"))
        ids = [fresh_id(here / "disk")]
        make("disk/lower")
        for name in ("one", "two"):
            upper, work, point = (make(f"disk/{{name}}/{{each}}") for each in ("u", "w", "m"))
            layers = f"lowerdir=disk/lower,upperdir={{upper}},workdir={{work}}"
            mount("-t", "overlay", "overlay", "-o", layers + "{option}", point)
            ids.append(fresh_id(point))
        facts["ids"] = ids
        facts["family"] = mount_of(point).family
        facts["note"] = probe(point).notes[0]
        run("umount", point)
        mount("-t", "overlay", "overlay", "-o", layers + "{option}", point)
        facts["again"] = fresh_id(point)
        """
    )
    ids = facts["ids"]
    assert isinstance(ids, list)
    assert len(set(ids)) == 3
    assert facts["again"] == ids[2]
    assert facts["family"] == "overlay"
    assert str(facts["note"]).startswith("overlay: ")


def test_layers_of_an_overlay_on_several_filesystems_have_different_ids(
    namespace: Namespace,
) -> None:
    """Their files keep the inode numbers of their own filesystems, which may be equal."""
    facts = namespace(
        """
        for name in ("lower", "disk"):
            mount("-t", "tmpfs", "tmpfs", make(name))
        make("lower/old", b"old")
        upper, work, point = (make(f"disk/{each}") for each in ("u", "w", "m"))
        layers = f"lowerdir=lower,upperdir={upper},workdir={work},xino=off"
        mount("-t", "overlay", "overlay", "-o", layers, point)
        make("disk/m/new", b"new")
        paths = [point / "old", point / "new"]
        facts["devices"] = [path.stat().st_dev for path in paths]
        facts["ids"] = [fresh_id(path) for path in paths]
        """
    )
    devices, ids = facts["devices"], facts["ids"]
    assert isinstance(devices, list)
    assert isinstance(ids, list)
    assert devices[0] != devices[1]
    assert ids[0] != ids[1]
    assert not any(each.startswith("dev:") for each in ids)


def test_a_full_disk_is_called_full(namespace: Namespace) -> None:
    facts = namespace(
        """
        point = make("point")
        mount("-t", "tmpfs", "-o", "size=16k", "tmpfs", point)
        try:
            probe(point)
        except NoSpaceError as error:
            facts["message"] = error.message.removesuffix(f"{point}: No space left on device")
        facts["left"] = os.listdir(point)
        """
    )
    assert facts["left"] == []
    assert str(facts["message"]).startswith("cannot write in ")


def test_a_read_only_filesystem_is_unwritable(namespace: Namespace) -> None:
    facts = namespace(
        """
        from smartcache.errors import StoreUnwritableError

        point = make("point")
        mount("-t", "tmpfs", "-o", "ro", "tmpfs", point)
        facts["read-only"] = mount_of(point).is_read_only
        try:
            probe(point)
        except StoreUnwritableError as error:
            facts["message"] = error.message
        """
    )
    assert facts["read-only"] is True
    assert str(facts["message"]).endswith("Read-only file system")
