"""Full disks, read-only disks, one disk seen twice, and files that cannot be changed: real ones.

Every error of the filesystem becomes an error of ours that says what to do, and changes nothing.
What each operation does on a full or read-only disk is in `tests.processes.test_operations`; errors
that no filesystem here gives are in the tests of the operations.
"""

from __future__ import annotations

import errno
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from smartcache.errors import NoSpaceError, StoreUnwritableError
from smartcache.store.layout import explained
from smartcache.store.store import Store
from tests.processes.children import Child
from tests.store.files import OTHER, WEIGHTS, adopt, dedup, hidden, mode_of, snapshot, write
from tests.store.reflink_disks import reflink_disk
from tests.store.small_disks import PAGE, Disk, bind, in_own_namespace, run

if sys.platform != "linux":
    pytest.skip("mount namespaces and /dev/shm", allow_module_level=True)


def test_a_store_cannot_be_made_on_a_full_or_a_read_only_disk(tmp_path: Path) -> None:
    """It can be opened: that makes nothing."""

    def use(point: Path, error: type[NoSpaceError | StoreUnwritableError]) -> list[int | None]:
        codes = []
        uses: tuple[Callable[[Store], object], ...] = (
            lambda store: store.put_stream([b"bytes"]), lambda store: store.add_folder("/models")
        )  # fmt: skip
        for use in uses:
            with Store(point / "store") as store:
                assert (store.history(), store.unfinished(), store.pins()) == ([], [], {})
                with pytest.raises(error) as raised:
                    use(store)
            codes.append(raised.value.errno)
        return codes

    def work() -> tuple[list[int | None], list[int | None], int]:
        disk, other = Disk(tmp_path / "disk", 400 * PAGE), Disk(tmp_path / "other", 400 * PAGE)
        disk.fill()
        other.make_read_only()
        codes = use(disk.point, NoSpaceError), use(other.point, StoreUnwritableError)
        disk.clear()
        with Store(disk.point / "store") as store:
            return *codes, store.put_stream([b"bytes"]).size

    full, read_only, size = in_own_namespace(work)
    assert (full, read_only, size) == ([errno.ENOSPC] * 2, [errno.EROFS] * 2, 5)


def fill(point: Path, *, but: int) -> None:
    """Leave so many blocks of 1 KB free."""
    with open(point / "filler", "wb", buffering=0) as file:
        with suppress(OSError):
            while True:
                file.write(bytes(1024))
        os.fsync(file.fileno())
        os.ftruncate(file.fileno(), os.fstat(file.fileno()).st_size - but * 1024)
        os.fsync(file.fileno())


def test_no_process_dies_without_a_word_where_blocks_are_smaller_than_pages(
    tmp_path: Path,
) -> None:
    """SQLite maps its shared memory with holes in it: with these numbers it was a SIGBUS."""

    def use(root: Path) -> str:
        try:
            with Store(root) as store:
                for number in range(40):
                    store.catalog.set_folder(Path(f"/{number}" * 100), program="")
                return "works"
        except NoSpaceError as error:
            return str(error).partition(" ")[0]

    with reflink_disk("ext4", tmp_path) as point:
        with Store(point / "store") as store:
            store.put_stream([WEIGHTS])
        answers = set()
        for blocks in (4, 9, 18, 24, 31, 36, 66, 80, 1000):
            fill(point, but=blocks)
            with Child(lambda: use(point / "store")) as child:
                answers.add(child.result())
            (point / "filler").unlink()
        assert answers == {"No", "works"}


def test_what_is_explained_once_is_not_explained_again(tmp_path: Path) -> None:
    for code in (errno.ENOSPC, errno.EACCES):
        error = StoreUnwritableError("Cannot lock this or that", errno=code)
        with pytest.raises(StoreUnwritableError) as raised, explained(tmp_path):
            raise error
        assert raised.value is error


def test_placing_on_a_read_only_disk_says_so_and_works_elsewhere(tmp_path: Path) -> None:
    def place() -> tuple[int | None, str]:
        disk = Disk(tmp_path / "disk", 80 * PAGE)
        disk.make_read_only()
        with Store(tmp_path / "store") as store:
            digest = store.put_stream([WEIGHTS]).digest
            with pytest.raises(StoreUnwritableError) as raised:
                store.place(digest, disk.point / "a.safetensors")
            assert store.place(digest, tmp_path / "a.safetensors").path.exists()
            return raised.value.errno, raised.value.message

    code, message = in_own_namespace(place)
    assert code == errno.EROFS
    assert "Read-only file system" in message


def test_files_seen_through_another_mount_of_the_same_disk_are_left_alone(tmp_path: Path) -> None:
    """In containers two volumes may be one disk: the same device, and yet no links across."""

    def use() -> tuple[list[str], list[str]]:
        (tmp_path / "models").mkdir()
        bind(tmp_path / "models", tmp_path / "bound")
        paths = [write(tmp_path / "bound" / "a.safetensors", OTHER),
                 write(tmp_path / "bound" / "b.safetensors")]  # fmt: skip
        before = snapshot(tmp_path / "bound")
        with Store(tmp_path / "store") as store:
            digest = store.put_stream([WEIGHTS]).digest
            errors = [each.error for each in dedup(store, *paths)]
            assert store.history() == []
            assert snapshot(tmp_path / "bound") == before
            places = (tmp_path / "bound", tmp_path)
            kinds = [store.place(digest, place / "c.safetensors").kind for place in places]
        return [str(vars(error)["reason"]) for error in errors], kinds  # type: ignore[return-value]

    reasons, (there, here) = in_own_namespace(use)
    assert reasons == ["other filesystem", "other filesystem"]
    assert there in ("copy", "reflink")
    assert here in ("hardlink", "reflink"), "the failure there says nothing about here"


def test_one_file_that_cannot_be_changed_does_not_stop_the_others(
    store: Store, folder: Path
) -> None:
    """An immutable file: not even root can make it read-only or link it."""
    data = [random.Random(number).randbytes(5000) for number in range(3)]
    paths = [write(folder / f"{number}.safetensors", data[number]) for number in range(3)]
    twins = [write(folder / f"twin-{number}.safetensors", data[number]) for number in range(3)]
    with immutable(paths[1]):
        outcomes = [each.outcome for each in adopt(store, *paths)]
        assert sorted(outcomes) == ["became", "became", "skipped"]
    with immutable(twins[1]):
        found = {each.path: each.outcome for each in dedup(store, *paths, *twins)}
    assert [found[path] for path in twins] == ["linked", "skipped", "linked"]
    assert [mode_of(path) for path in twins] == [0o444, 0o644, 0o444]
    assert hidden(folder) == []
    assert store.unfinished() == []


@contextmanager
def immutable(path: Path) -> Iterator[None]:
    if problem := run("chattr", "+i", path):
        pytest.skip(f"cannot make a file immutable: {problem}")
    try:
        yield
    finally:
        assert run("chattr", "-i", path) == ""
