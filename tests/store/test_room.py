"""Room is asked for where it is needed, on real disks that are too small."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from smartcache.errors import NoSpaceError
from smartcache.store.store import Store
from tests.store.files import WEIGHTS, write
from tests.store.small_disks import PAGE, Disk, in_own_namespace


def disk_with_room_for_half(tmp_path: Path) -> Disk:
    disk = Disk(tmp_path / "disk", 64 * PAGE + 2 * len(WEIGHTS))
    disk.fill(but=len(WEIGHTS) // PAGE // 2)
    return disk


def facts(error: NoSpaceError) -> tuple[int, int]:
    return vars(error)["needed"], vars(error)["free"]


def adopt_and_replace(store: Store, folder: Path) -> None:
    files = [write(folder / name) for name in ("a.safetensors", "b.safetensors")]
    store.replace(files[1], store.adopt(files[0]).digest)


def test_undo_needs_room_where_the_file_is_and_nowhere_else(tmp_path: Path) -> None:
    def work() -> tuple[int, int]:
        disk = Disk(tmp_path / "disk", 500 * PAGE)
        with Store(tmp_path / "store") as store:
            adopt_and_replace(store, tmp_path)
            disk.fill()
            assert all(each.is_undone for each in store.plan_undo().execute())
        disk.clear()
        with Store(disk.point / "store") as store:
            adopt_and_replace(store, disk.point)
            disk.fill(but=5)
            with pytest.raises(NoSpaceError, match=f"at {disk.point}") as caught:
                store.plan_undo().execute()
            assert len(store.history()) == 2
            disk.clear()
            assert all(each.is_undone for each in store.plan_undo().execute())
            return facts(caught.value)

    needed, free = in_own_namespace(work)
    assert needed == len(WEIGHTS) > free


def test_a_copy_is_refused_before_it_begins(tmp_path: Path) -> None:
    def work() -> tuple[list[str], int, int]:
        disk = disk_with_room_for_half(tmp_path)
        with Store(tmp_path / "store") as store:
            digest = store.put_stream([WEIGHTS]).digest
            with pytest.raises(NoSpaceError, match="The copy needs") as caught:
                store.place(digest, disk.point / "a.pt", kind="copy")
            return os.listdir(disk.point), *facts(caught.value)

    names, needed, free = in_own_namespace(work)
    assert (names, needed) == (["filler"], len(WEIGHTS))
    assert free < needed
