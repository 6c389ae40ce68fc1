"""Files get their own bytes back without a journal: by what the disk says, and nothing else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from smartcache.errors import FileSkippedError, NoSpaceError
from smartcache.store.changes import separate as store_separate
from smartcache.store.changes.separate import plan_separate
from smartcache.store.store import Store
from tests.processes.killing import Moment, die_at, in_child, was_killed
from tests.store.files import (
    OTHER,
    WEIGHTS,
    Watch,
    inode_of,
    link_count,
    mode_of,
    snapshot,
    write,
)


@pytest.fixture
def shared(store: Store, folder: Path) -> tuple[Path, Path]:
    """Two files that were replaced by one, with what they were before in the journal."""
    a = write(folder / "a.safetensors", mode=0o640, age=500)
    b = write(folder / "b.safetensors", mode=0o640, age=100)
    digest = store.adopt(a).digest
    store.replace(b, digest)
    assert inode_of(a) == inode_of(b)
    assert mode_of(a) == 0o440
    return a, b


@pytest.fixture
def linked(folder: Path) -> tuple[Path, Path]:
    """Two names of one file."""
    a = write(folder / "a.bin", mode=0o444)
    os.link(a, folder / "b.bin")
    return a, folder / "b.bin"


def separate(*paths: Path, store: Store | None = None, recursive: bool = False) -> None:
    volumes = [] if store is None else [store.volume]
    for each in plan_separate(paths, volumes, recursive=recursive).execute():
        assert each.problem == ""


def test_without_a_store_a_link_becomes_a_file_of_its_own_with_its_metadata(
    store: Store, shared: tuple[Path, Path]
) -> None:
    a, b = shared
    store.close()
    shutil.rmtree(store.root)
    before = os.lstat(a)
    os.setxattr(a, "user.note", b"mine")
    separate(a, b)
    after = os.lstat(a)
    assert (a.read_bytes(), b.read_bytes()) == (WEIGHTS, WEIGHTS)
    assert inode_of(a) != inode_of(b)
    assert (link_count(a), link_count(b)) == (1, 1)
    assert (after.st_mtime_ns, after.st_gid) == (before.st_mtime_ns, before.st_gid)
    assert (mode_of(a), mode_of(b)) == (0o640, 0o640)
    assert os.getxattr(a, "user.note") == b"mine"
    a.write_bytes(OTHER)
    assert b.read_bytes() == WEIGHTS
    assert sorted(path.name for path in a.parent.iterdir()) == [a.name, b.name]


def test_one_of_two_names_leaves_the_other_as_it_is_and_the_last_needs_no_copy(
    linked: tuple[Path, Path],
) -> None:
    a, b = linked
    inode, watch = inode_of(a), Watch()
    assert plan_separate(linked).needed_size == len(WEIGHTS)
    plan_separate([a]).execute(watch)
    assert (watch.total, watch.done) == (len(WEIGHTS), len(WEIGHTS))
    assert (mode_of(a), mode_of(b), inode_of(b)) == (0o644, 0o444, inode)
    assert plan_separate(linked).needed_size == 0
    separate(*linked)
    assert (mode_of(b), inode_of(b)) == (0o644, inode)


def test_files_that_share_nothing_and_can_be_written_are_left_out(folder: Path) -> None:
    write(folder / "a.bin")
    before = snapshot(folder)
    plan = plan_separate([folder], recursive=True)
    assert (plan.files, plan.needed_size, plan.skipped) == ((), 0, ())
    assert snapshot(folder) == before


def test_a_store_is_told(store: Store, shared: tuple[Path, Path]) -> None:
    a, b = shared
    separate(b, store=store)
    digest = store.digest_of(a).digest
    blob = store.get(digest)
    assert [link.path for link in store.links_of(blob)] == [a]
    assert blob.links == link_count(a) == 2
    assert [change.path for change in store.volume.journal.open_changes()] == [a]
    assert store.verify().damaged == []
    store.plan_undo().execute()
    assert inode_of(a) != inode_of(b)
    assert (mode_of(a), mode_of(b)) == (0o640, 0o640)


def test_after_all_names_are_separate_prune_frees_the_blob(
    store: Store, shared: tuple[Path, Path]
) -> None:
    separate(*shared, store=store)
    assert store.history() == []
    assert len(store.plan_prune().victims) == 1


def test_a_folder_needs_to_be_asked_for_and_skips_the_store_symlinks_and_git(
    store: Store, folder: Path
) -> None:
    write(folder / "sub" / "a.safetensors")
    store.adopt(folder / "sub" / "a.safetensors")
    (folder / "sub" / "link").symlink_to(folder / "sub" / "a.safetensors")
    write(folder / ".git" / "object", mode=0o444)
    with pytest.raises(FileSkippedError, match="is a folder"):
        plan_separate([folder])
    plan = plan_separate([folder, store.root.parent], recursive=True)
    assert [file.path.name for file in plan.files] == ["a.safetensors"]
    blob = Path(store.volume.layout.blob(store.digest_of(plan.files[0].path).digest))
    assert "belongs to a store" in plan_separate([blob]).skipped[0][1]
    assert "is a symlink" in plan_separate([folder / "sub" / "link"]).skipped[0][1]


def test_a_file_that_is_being_written_or_was_replaced_since_the_plan_stays(
    linked: tuple[Path, Path],
) -> None:
    a, b = linked
    plan = plan_separate([a])
    b.chmod(0o644)
    with open(b, "ab"):
        (result,) = plan_separate([a]).execute()
    assert "open for writing" in result.problem
    assert inode_of(a) == inode_of(b)
    write(a.with_name("new"), OTHER).replace(a)
    (result,) = plan.execute()
    assert "another file is there now" in result.problem
    assert a.read_bytes() == OTHER


def test_room_is_checked_before_the_first_copy(
    linked: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(linked[0].parent)
    monkeypatch.setattr(store_separate, "free_bytes", lambda _: len(WEIGHTS) - 1)
    with pytest.raises(NoSpaceError, match="100 KB"):
        plan_separate(linked[:1]).execute()
    assert snapshot(linked[0].parent) == before


@pytest.mark.parametrize(
    "moment", ["separate: written", "separate: named", "swap: exchanged", "separate: in place"]
)
def test_killed_at_any_moment_the_file_is_whole_and_a_second_run_finishes(
    linked: tuple[Path, Path], moment: str
) -> None:
    a, b = linked

    def work() -> None:
        die_at(Moment(moment, 1))
        plan_separate([a]).execute()

    assert was_killed(in_child(work))
    assert (a.read_bytes(), b.read_bytes()) == (WEIGHTS, WEIGHTS)
    separate(a)
    assert inode_of(a) != inode_of(b)
    if moment == "separate: written":
        assert len(list(a.parent.iterdir())) == 2
