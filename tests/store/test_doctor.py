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
from smartcache.doctor import Diagnosis, Finding, Place, examine
from smartcache.store.store import Store
from smartcache.store.volume import Layout, volume_root
from smartcache.system.filesystems import Family, Mount, filesystem_id
from smartcache.system.kernel import boot_id
from tests.processes.children import NOBODY, Child, folder_of
from tests.store.files import raising, row, snapshot, write
from tests.store.small_disks import PAGE, Disk, bind, in_own_namespace, mount

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
    write(tmp_path / "folder" / "a.bin")
    before = snapshot(tmp_path)
    diagnosis = examine(tmp_path / "not" / "yet", [tmp_path / "folder", tmp_path / "missing"])
    assert snapshot(tmp_path) == before
    assert [place.is_present for place in diagnosis.places] == [False, True, False]
    assert about(store_at(diagnosis), "no store here yet").level == "ok"


def test_an_existing_store_is_left_as_it_is_and_said_where_it_is_and_what_works_there(
    store: Store,
) -> None:
    before = snapshot(store.root)
    place = examined(store.root)
    assert snapshot(store.root) == before
    assert (place.path, place.is_present) == (store.root, True)
    assert not says(place, "no store")
    assert place.filesystem in {filesystem_id(store.root), None}
    assert os.path.ismount(place.mount.point)
    assert place.abilities is not None
    assert place.abilities.hard_link
    found = os.statvfs(store.root)
    assert abs(place.free - found.f_bavail * found.f_frsize) < 1e9


def test_findings_come_worst_first_and_the_worst_is_the_level(tmp_path: Path) -> None:
    Layout(tmp_path / "store").create()
    (tmp_path / "store" / "format").write_text("99\n", encoding="ascii")
    diagnosis = examine(tmp_path / "store")
    levels = [doctor.LEVELS.index(each.level) for each in store_at(diagnosis).findings]
    assert levels == sorted(levels, reverse=True)
    assert diagnosis.level == "problem"
    assert "99" in about(store_at(diagnosis), "has format").text


def test_a_folder_on_another_filesystem_gets_copies(
    tmp_path: Path, elsewhere: Path, memory_path: Path
) -> None:
    diagnosis = examine(tmp_path / "store", [elsewhere, tmp_path])
    far, near = diagnosis.places[1:]
    assert (far.role, near.role) == ("folder", "folder")
    found = about(far, "another filesystem")
    assert found.level == "warning"
    assert str(volume_root(far.mount.point)) in found.hint
    assert not says(near, "another filesystem")
    # That it is empty after a reboot is a warning about a store, not about any folder.
    assert not says(far, "In memory")
    assert about(examined(memory_path / "store"), "In memory").level == "warning"


def test_a_file_may_be_asked_about(tmp_path: Path) -> None:
    path = write(tmp_path / "a.bin")
    place = examine(tmp_path / "store", [path]).places[1]
    assert (place.path, place.is_present) == (path, True)
    assert place.abilities is not None


def test_versions_are_told_without_loading_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = f"""import sys
from pathlib import Path
from {examine.__module__} import examine
versions = examine(Path("store")).versions
assert not {{"torch", "huggingface_hub", "numpy"}} & set(sys.modules)
print(versions["smartcache"], versions["python"], versions["blake3"])
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env=environment,
    )
    version = ".".join(map(str, sys.version_info[:3]))
    assert done.stdout.split()[:2] == [__version__, version]
    monkeypatch.setattr(doctor, "_PACKAGES", ("xxhash", "no_such_package"))
    versions = examine(tmp_path).versions
    assert versions["xxhash"]
    assert versions["no_such_package"] is None


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
    def look() -> Diagnosis:
        return examine(public / "store", [public])

    with Child(look, user=NOBODY) as child:
        diagnosis = child.result()
    store, folder = diagnosis.places
    found = about(store, "No store can be kept")
    assert found.level == "problem"
    assert os.strerror(errno.EACCES) in found.text
    assert "SMARTCACHE_HOME" in found.hint
    assert about(folder, "No file can be linked").level == "warning"
    assert not says(store, "You are root")
    assert list(public.iterdir()) == []


@only_root
def test_what_works_is_tried_in_the_nearest_directory_that_can_be_written(public: Path) -> None:
    mine, closed = public / "mine", public / "mine" / "closed"
    closed.mkdir(parents=True, mode=0o755)
    os.chown(mine, NOBODY, NOBODY)
    with Child(lambda: examine(closed / "store"), user=NOBODY) as child:
        place = store_at(child.result())
    assert about(place, "No store can be kept").level == "problem"
    assert place.abilities is not None
    assert place.abilities.hard_link
    assert list(mine.iterdir()) == [closed]


@only_root
def test_what_works_on_another_filesystem_says_nothing_about_this_one() -> None:
    with folder_of(NOBODY) as mine:

        def look() -> Diagnosis:
            disk = Disk(mine / "disk", 2000 * PAGE)
            disk.point.chmod(0o755)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            return examine(disk.point / "store")

        place = store_at(in_own_namespace(look))
        assert about(place, "No store can be kept").level == "problem"
        assert place.abilities is None


@only_root
def test_a_store_in_a_directory_that_cannot_be_entered_is_a_problem(public: Path) -> None:
    closed = public / "closed"
    Store(closed / "store").close()
    closed.chmod(0o700)
    with Child(lambda: examine(closed / "store"), user=NOBODY) as child:
        diagnosis = child.result()
    assert diagnosis.level == "problem"
    assert not store_at(diagnosis).is_present


def test_a_store_or_a_folder_above_that_others_could_write_is_told(tmp_path: Path) -> None:
    root = tmp_path / "store"
    Store(root).close()
    (root / "journal.jsonl").touch()
    (root / "journal.jsonl").chmod(0o666)
    found = about(examined(root), "can be written by other users")
    assert found.level == "problem"
    assert "go-w" in found.hint
    tmp_path.chmod(0o777)
    assert about(examined(root), "Anyone can write").level == "warning"
    tmp_path.chmod(0o1777)
    assert not says(examined(root), "Anyone can write")


# what does not work


@pytest.mark.usefixtures("no_leases", "no_exchange")
def test_without_leases_and_exchange_files_are_replaced_with_less_care(tmp_path: Path) -> None:
    place = examined(tmp_path)
    found = about(place, "No leases here")
    assert found.level == "warning"
    assert "dedup" in found.hint
    assert about(place, "cannot be swapped").level == "note"
    assert not says(place, "exchange of names and locks work")


def test_without_locks_no_store_is_safe_and_without_links_everything_is_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    monkeypatch.setattr(fcntl, "flock", raising(errno.ENOLCK))
    for name in ("link", "symlink"):
        monkeypatch.setattr(os, name, raising(errno.EPERM))
    store, folder = examine(tmp_path, [tmp_path]).places
    assert about(store, "File locks do not work").level == "problem"
    assert about(folder, "File locks do not work").level == "note"
    assert store.abilities is not None
    words = "No hard links here" if store.abilities.reflink else "No hard links or reflinks here"
    about(store, words)
    about(store, "No symlinks here")


def test_a_read_only_filesystem_is_a_problem_for_a_store(tmp_path: Path) -> None:
    def look() -> Diagnosis:
        disk = Disk(tmp_path / "disk", 100 * PAGE)
        disk.make_read_only()
        return examine(disk.point / "store", [disk.point])

    store, folder = in_own_namespace(look).places
    found = about(store, "No store can be kept")
    assert (found.level, store.abilities) == ("problem", None)
    assert f"{tmp_path / 'disk'} is mounted read-only" in found.text
    assert about(folder, "No file can be linked").level == "warning"


def test_a_full_filesystem_is_a_problem_and_little_free_space_a_warning(tmp_path: Path) -> None:
    def look() -> tuple[Place, Place]:
        disk = Disk(tmp_path / "disk", 2000 * PAGE)
        little = examined(disk.point / "store")
        disk.fill()
        return little, examined(disk.point / "store")

    little, full = in_own_namespace(look)
    found = about(little, "is free here")
    assert found.level == "warning"
    assert "prune" in found.hint
    assert "8.19 MB" in found.text
    assert about(full, "is full").level == "problem"
    assert (full.abilities, full.free) == (None, 0)


def test_another_mount_of_the_same_filesystem_cannot_be_linked_to(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()

    def look() -> Diagnosis:
        bind(tmp_path / "models", tmp_path / "again")
        return examine(tmp_path / "store", [tmp_path / "again", tmp_path / "models"])

    again, models = in_own_namespace(look).places[1:]
    assert about(again, "in another mount").level == "warning"
    assert not says(models, "another mount")


def test_an_overlay_is_recognised(tmp_path: Path) -> None:
    def look() -> Diagnosis | str:
        disk = Disk(tmp_path / "disk", 1000 * PAGE)  # an overlay cannot be the upper layer
        parts = [disk.point / name for name in ("lower", "upper", "work", "merged")]
        for part in parts:
            part.mkdir()
        lower, upper, work, merged = parts
        try:
            options = f"lowerdir={lower},upperdir={upper},workdir={work}"
            mount("overlay", merged, "overlay", 0, options)
        except Exception as error:  # noqa: BLE001 - the type does not travel from the child
            return str(error)
        return examine(merged / "store")

    diagnosis = in_own_namespace(look)
    if isinstance(diagnosis, str):
        pytest.skip(f"no overlay here: {diagnosis}")
    assert about(store_at(diagnosis), "An overlay (overlay)").level == "warning"


def test_filesystems_that_cannot_be_mounted_here_are_explained() -> None:
    rows: list[tuple[Family, str, str | None]] = [
        ("network", "nfs4", "warning"), ("fuse", "fuse.bindfs", "warning"),
        ("wsl", "9p", "warning"), ("overlay", "overlay", "warning"),
        ("unknown", "newfs", "note"), ("local", "ext4", None),
    ]  # fmt: skip
    for family, fstype, level in rows:
        options = frozenset({"rw"})
        place = Mount(point=Path("/x"), fstype=fstype, source="", options=options, family=family)
        for role in ("store", "folder"):
            with row(family, role):
                found = list(doctor._about_filesystem(place, role))  # noqa: SLF001
                assert [each.level for each in found] == ([] if level is None else [level])
                for each in found:
                    assert f"({fstype})" in each.text
                    assert "\n" not in each.text
                    assert "  " not in each.text
                    assert bool(each.hint) == (role == "store" and level == "warning")
