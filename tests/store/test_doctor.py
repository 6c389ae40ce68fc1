"""What `doctor` finds at real places, and at places made bad for the test."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from smartcache import __version__, doctor
from smartcache.doctor import Diagnosis, Finding, Place, about_damage, examine
from smartcache.folders.programs import ModelFolder
from smartcache.folders.scan import scan_folders
from smartcache.store.layout import Layout, pool_root
from smartcache.store.store import Store
from smartcache.system.filesystems import Family, Mount, filesystem_id, probe
from smartcache.system.kernel import boot_id
from tests.processes.children import NOBODY, Child, folder_of
from tests.store.files import row, snapshot, write
from tests.store.small_disks import PAGE, Disk, bind, in_own_namespace

if sys.platform == "win32":
    pytest.skip("POSIX filesystems", allow_module_level=True)

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def store_at(diagnosis: Diagnosis) -> Place:
    assert diagnosis.places[0].role == "store"
    return diagnosis.places[0]


def examined(root: Path) -> Place:
    return store_at(examine(root))


def about(place: Place, words: str) -> Finding:
    """The one finding that says so."""
    found = [each for each in place.findings if words in each.text]
    assert len(found) == 1, f"{words!r} not said once in {[each.text for each in place.findings]}"
    return found[0]


def says(place: Place, words: str) -> bool:
    return any(words in each.text for each in place.findings)


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that everybody can enter and only its owner can write."""
    with folder_of(None) as folder:
        yield folder


def test_no_store_is_made_and_nothing_is_left_behind(tmp_path: Path) -> None:
    """A file may be asked about, too."""
    path = write(tmp_path / "folder" / "a.bin")
    before = snapshot(tmp_path)
    diagnosis = examine(tmp_path / "not" / "yet", [path.parent, tmp_path / "missing", path])
    assert snapshot(tmp_path) == before
    assert [place.is_present for place in diagnosis.places] == [False, True, False, True]
    assert diagnosis.places[3].path == path
    assert diagnosis.places[3].abilities == probe(tmp_path)
    assert about(store_at(diagnosis), "no store here yet").level == "ok"


def test_a_store_is_left_as_it_is_and_said_what_works_there(tmp_path: Path) -> None:
    store = Layout(tmp_path / "store")
    store.create()
    before = snapshot(store.root)
    place = examined(store.root)
    assert snapshot(store.root) == before
    assert (place.path, place.is_present) == (store.root, True)
    assert not says(place, "no store")
    assert place.filesystem in {filesystem_id(store.root), None}
    assert os.path.ismount(place.mount.point)
    assert place.abilities == probe(store.root)
    found = os.statvfs(store.root)
    assert abs(place.free - found.f_bavail * found.f_frsize) < 1e9


def test_findings_come_worst_first_and_the_worst_is_the_level(tmp_path: Path) -> None:
    Layout(tmp_path / "store").create()
    (tmp_path / "store" / "format").write_text("99\n", encoding="ascii")
    diagnosis = examine(tmp_path / "store")
    levels = [doctor.LEVELS.index(each.level) for each in store_at(diagnosis).findings]
    assert levels == sorted(levels, reverse=True)
    assert store_at(diagnosis).findings[0].level == "problem"
    assert "99" in about(store_at(diagnosis), "has format").text


def test_folders_elsewhere_get_copies(tmp_path: Path, elsewhere: Path, memory_path: Path) -> None:
    diagnosis = examine(tmp_path / "store", [elsewhere, tmp_path])
    far, near = diagnosis.places[1:]
    assert (far.role, near.role) == ("folder", "folder")
    found = about(far, "another filesystem")
    assert found.level == "warning"
    assert str(pool_root(far.mount.point)) in found.hint
    assert not says(near, "another filesystem")
    # That it is empty after a reboot is a warning about a store, not about any folder.
    assert not says(far, "In memory")
    assert about(examined(memory_path / "store"), "In memory").level == "warning"


def test_versions_are_told_without_loading_anything(tmp_path: Path) -> None:
    program = f"""import sys
from pathlib import Path
from {examine.__module__} import examine
versions = examine(Path("store")).versions
assert not {{"torch", "huggingface_hub", "numpy"}} & set(sys.modules)
print(versions["smartcache"], versions["python"], versions["blake3"])
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", program]
    words = subprocess.check_output(command, text=True, cwd=tmp_path, env=environment).split()
    assert words[:2] == [__version__, ".".join(map(str, sys.version_info[:3]))]
    assert words[2] == examine(tmp_path).versions["blake3"]


def test_the_boot_id_is_not_shown(tmp_path: Path) -> None:
    place = examine(tmp_path, [Path("/proc")]).places[1]
    assert place.filesystem is None
    assert about(place, "no permanent id").level == "note"
    assert boot_id() not in repr(place)


# who asks


def test_root_is_warned_that_read_only_does_not_bind_it(tmp_path: Path) -> None:
    place = store_at(examine(tmp_path, [tmp_path]))
    assert says(place, "You are root") == (os.geteuid() == 0)
    assert not says(examine(tmp_path, [tmp_path]).places[1], "You are root")


@only_root
def test_a_store_where_this_user_cannot_write_is_a_problem(public: Path) -> None:
    with Child(lambda: examine(public / "store", [public]), user=NOBODY) as child:
        diagnosis = child.result()
    store, folder = diagnosis.places
    found = about(store, "cannot be used")
    assert found.level == "problem"
    assert os.strerror(errno.EACCES) in found.text
    assert "SMARTCACHE_HOME" in found.hint
    assert about(folder, "cannot be used").level == "warning"
    assert store.abilities is folder.abilities is None
    assert not says(store, "You are root")
    assert list(public.iterdir()) == []
    Layout(public / "closed" / "store").create()
    (public / "closed").chmod(0o700)  # cannot even be entered
    with Child(lambda: examine(public / "closed" / "store"), user=NOBODY) as child:
        diagnosis = child.result()
    assert (store_at(diagnosis).findings[0].level, store_at(diagnosis).is_present) == (
        "problem",
        False,
    )


def test_a_store_or_a_folder_above_that_others_could_write_is_told(tmp_path: Path) -> None:
    root = tmp_path / "store"
    Layout(root).create()
    (root / "journal.copy").touch()
    (root / "journal.copy").chmod(0o666)
    found = about(examined(root), "can be written by other users")
    assert found.level == "problem"
    assert "go-w" in found.hint
    tmp_path.chmod(0o777)
    assert about(examined(root), "Anyone can write").level == "warning"
    tmp_path.chmod(0o1777)
    assert not says(examined(root), "Anyone can write")


# what does not work


@pytest.mark.usefixtures("no_leases")
def test_without_leases_files_are_replaced_with_less_care(tmp_path: Path) -> None:
    found = about(examined(tmp_path), "No leases here")
    assert found.level == "warning"
    assert "dedup" in found.hint


def test_damaged_models_are_named_while_they_are_there(store: Store, folder: Path) -> None:
    for number in range(5):
        write(folder / f"{number}.safetensors", b"")
    write(folder / "whole.bin")
    assert not list(about_damage(store))
    scan_folders(store, [ModelFolder(path=folder)])
    (found,) = about_damage(store)
    assert f"{folder / '0.safetensors'}, " in found.text
    assert "and 2 more" in found.text
    for path in folder.glob("*.safetensors"):
        path.unlink()
    assert not list(about_damage(store))


def test_full_and_read_only_filesystems_are_problems_and_little_free_space_a_warning(
    tmp_path: Path,
) -> None:
    def look() -> tuple[Place, Place, Diagnosis]:
        disk = Disk(tmp_path / "disk", 2000 * PAGE)
        little = examined(disk.point / "store")
        disk.fill()
        full = examined(disk.point / "store")
        disk.make_read_only()
        return little, full, examine(disk.point / "store", [disk.point])

    little, full, diagnosis = in_own_namespace(look)
    found = about(little, "is free here")
    assert found.level == "warning"
    assert "prune" in found.hint
    assert "8.19 MB" in found.text
    assert about(full, "is full").level == "problem"
    assert (full.abilities, full.free) == (None, 0)
    store, folder = diagnosis.places
    found = about(store, "cannot be used")
    assert (found.level, store.abilities) == ("problem", None)
    assert f"{tmp_path / 'disk'} is mounted read-only" in found.text
    assert about(folder, "cannot be used").level == "warning"


def test_another_mount_of_the_same_filesystem_cannot_be_linked_to(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()

    def look() -> Diagnosis:
        bind(tmp_path / "models", tmp_path / "again")
        return examine(tmp_path / "store", [tmp_path / "again", tmp_path / "models"])

    again, models = in_own_namespace(look).places[1:]
    assert about(again, "in another mount").level == "warning"
    assert not says(models, "another mount")


def test_other_filesystems_are_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[tuple[Family, str, str | None]] = [
        ("network", "nfs4", "warning"), ("fuse", "fuse.bindfs", "warning"),
        ("wsl", "9p", "warning"), ("overlay", "overlay", "warning"),
        ("unknown", "newfs", "note"), ("local", "ext4", None),
    ]  # fmt: skip
    for family, fstype, level in rows:
        options = frozenset({"rw"})
        mount = Mount(point=Path("/x"), fstype=fstype, source="", options=options, family=family)
        monkeypatch.setattr(doctor, "mount_of", lambda _, mount=mount: mount)
        for place in examine(tmp_path, [tmp_path]).places:
            with row(family, place.role):
                found = [each for each in place.findings if f"({fstype})" in each.text]
                assert [each.level for each in found] == ([] if level is None else [level])
                for each in found:
                    assert bool(each.hint) == (place.role == "store" and level == "warning")
