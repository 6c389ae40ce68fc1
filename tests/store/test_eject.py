"""Leaving: the store goes, and files are as if smartcache had never been there."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from smartcache.errors import BlobInUseError, NoSpaceError
from smartcache.store.store import Store
from smartcache.system import filesystems as store_room
from tests.store.files import (
    OTHER,
    WEIGHTS,
    Watch,
    digest_of,
    edit,
    inode_of,
    link_count,
    mode_of,
    read,
    row,
    snapshot,
    write,
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX files")
DIGEST = digest_of(WEIGHTS)


@pytest.fixture
def files(folder: Path) -> Path:
    write(folder / "a.safetensors", mode=0o664, age=1000)
    write(folder / "b.safetensors", mode=0o644, age=2000)
    write(folder / "two names, one", OTHER, mode=0o646, age=3000)
    os.link(folder / "two names, one", folder / "two names, two")
    return folder


def use(store: Store, files: Path) -> None:
    """Do to the user's files all that can be done to them."""
    store.adopt(files / "a.safetensors")
    store.replace(files / "b.safetensors", DIGEST)
    store.put_stream([OTHER])
    for name in ("two names, one", "two names, two"):
        store.replace(files / name, digest_of(OTHER))


def place(store: Store, files: Path) -> None:
    for kind in ("hardlink", "copy"):
        store.place(DIGEST, files / f"new-{kind}.bin", kind=kind)


def is_gone(store: Store) -> bool:
    """Nothing of the store is left, nor anything beside it."""
    names = os.listdir(store.root.parent)
    return not [name for name in names if name.startswith(store.root.name)]


class TestRestored:
    def test_files_are_as_before_and_placed_links_become_ordinary_files(
        self, store: Store, files: Path
    ) -> None:
        before = snapshot(files)
        use(store, files)
        place(store, files)
        assert snapshot(files) != before
        results = store.plan_eject().execute()
        assert [done.note for done in results if not done.is_undone] == []
        after = snapshot(files)
        for kind in ("hardlink", "copy"):
            path = files / f"new-{kind}.bin"
            assert after.pop(path.name)[0] == "file"
            assert path.read_bytes() == WEIGHTS
            assert (mode_of(path) & 0o600, link_count(path)) == (0o600, 1)
        assert after == before
        assert is_gone(store)
        with Store(store.root) as again:
            assert list(again.blobs()) == []

    def test_of_placed_links_one_keeps_the_inode_and_each_is_a_file(
        self, store: Store, files: Path
    ) -> None:
        store.put_stream([WEIGHTS])
        paths = [files / name for name in ("one.bin", "two.bin")]
        for path in paths:
            store.place(DIGEST, path, kind="hardlink")
        inode = inode_of(paths[0])
        store.plan_eject().execute()
        assert {mode_of(path) for path in paths} == {0o644}
        assert [inode_of(path) for path in paths].count(inode) == 1
        edit(paths[0])
        assert paths[1].read_bytes() == WEIGHTS

    def test_files_are_restored_after_the_index_or_their_blob_was_lost(
        self, store: Store, files: Path
    ) -> None:
        before = snapshot(files)
        use(store, files)
        store.place(DIGEST, files / "new.bin", kind="hardlink")
        store.remove(digest_of(OTHER))
        store.rebuild()
        store.plan_eject().execute()
        assert (files / "new.bin").read_bytes() == WEIGHTS
        (files / "new.bin").unlink()
        assert snapshot(files) == before

    def test_what_was_undone_before_is_not_touched_again(self, store: Store, files: Path) -> None:
        use(store, files)
        store.plan_undo().execute()
        os.chmod(files / "a.safetensors", 0o600)
        before = snapshot(files)
        store.plan_eject().execute()
        assert snapshot(files) == before

    def test_a_link_where_another_file_had_been_adopted_becomes_a_file(
        self, store: Store, files: Path
    ) -> None:
        other = store.put_stream([OTHER]).digest
        path = write(files / "new")
        store.adopt(path)
        path.unlink()
        store.place(other, path, kind="hardlink")
        store.plan_eject().execute()
        assert path.read_bytes() == OTHER
        assert mode_of(path) & 0o200

    def test_files_that_somebody_edited_keep_their_bytes_and_do_not_stop_it(
        self, store: Store, files: Path
    ) -> None:
        store.adopt(files / "a.safetensors")
        edit(files / "a.safetensors")
        other = store.put_stream([OTHER]).digest
        for name in ("one.bin", "two.bin"):
            store.place(other, files / name, kind="hardlink")
        edit(files / "one.bin")
        store.plan_eject().execute()
        assert is_gone(store)
        for name, data in (("a.safetensors", WEIGHTS), ("one.bin", OTHER), ("two.bin", OTHER)):
            assert (files / name).read_bytes() == b"EDITED" + data[6:]
            assert mode_of(files / name) & 0o200
        assert mode_of(files / "a.safetensors") == 0o664

    def test_links_that_are_gone_or_others_now_are_left_alone(
        self, store: Store, files: Path
    ) -> None:
        use(store, files)
        place(store, files)
        (files / "new-hardlink.bin").unlink()
        for name in ("new-copy.bin", "b.safetensors"):
            os.replace(write(files / "x", b"theirs", mode=0o400), files / name)
        store.plan_eject().execute()
        assert is_gone(store)
        assert not (files / "new-hardlink.bin").exists()
        for name in ("new-copy.bin", "b.safetensors"):
            assert (files / name).read_bytes() == b"theirs"
            assert mode_of(files / name) == 0o400

    def test_an_empty_store_just_goes_with_what_a_killed_eject_left(self, store: Store) -> None:
        write(store.root.with_name(f"{store.root.name}.ejected-12345678") / "blobs" / "x")
        plan = store.plan_eject()
        assert (plan.changes, plan.links, plan.needed_size) == ((), (), 0)
        assert plan.execute() == []
        assert is_gone(store)

    def test_a_folder_that_was_swapped_since_the_plan_leads_to_no_other_file(
        self, store: Store, folder: Path
    ) -> None:
        store.put_stream([WEIGHTS])
        shared, private = folder / "shared", folder / "private"
        shared.mkdir()
        for kind in ("hardlink", "copy"):
            store.place(DIGEST, shared / kind, kind=kind)
            write(private / kind, OTHER, mode=0o400)
        before = snapshot(private)
        plan = store.plan_eject()
        shared.rename(folder / "away")
        shared.symlink_to(private)
        plan.execute()
        assert snapshot(private) == before


class TestPlan:
    def test_planning_changes_nothing_and_says_what_is_freed(
        self, store: Store, files: Path
    ) -> None:
        alone = store.put_stream([b"alone"])
        use(store, files)
        place(store, files)
        before = (snapshot(files), store.history())
        plan = store.plan_eject()
        assert (snapshot(files), store.history()) == before
        assert (plan.root, len(plan.changes), len(plan.links)) == (store.root, 4, 1)
        assert plan.freed_size == alone.allocated

    def test_without_space_nothing_is_begun(
        self, store: Store, files: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        use(store, files)
        before = snapshot(files)
        monkeypatch.setattr(store_room, "free_bytes", lambda _: len(WEIGHTS) - 1)
        plan = store.plan_eject()
        assert plan.needed_size > len(WEIGHTS)
        with pytest.raises(NoSpaceError):
            plan.execute()
        assert snapshot(files) == before
        assert read(store) == WEIGHTS

    def test_progress_is_told_every_byte_that_is_copied(self, store: Store, files: Path) -> None:
        use(store, files)
        watch = Watch()
        plan = store.plan_eject()
        plan.execute(watch)
        assert watch.done == watch.total == plan.needed_size > 0
        assert "b.safetensors" in watch.names


class TestPinned:
    def test_the_last_copy_of_what_somebody_wants_to_keep_does_not_go(
        self, store: Store, files: Path
    ) -> None:
        """Whether it never had a link or lost it, before the plan or after; unless allowed."""
        path = files / "x.safetensors"
        ways: dict[str, Callable[[], object]] = {
            "put": lambda: store.put_stream([WEIGHTS]),
            "adopted": lambda: store.adopt(write(path)),
            "placed": lambda: store.place(DIGEST, path, kind="hardlink"),
        }
        before = snapshot(files)
        for name, keep in ways.items():
            with row(name):
                keep()
                path.unlink(missing_ok=True)
                plan = store.plan_eject()
                store.pin(DIGEST)
                with pytest.raises(BlobInUseError):
                    plan.execute()
                plan = store.plan_eject()
                assert plan.pinned_only == (DIGEST,)
                with pytest.raises(BlobInUseError) as caught:
                    plan.execute()
                assert vars(caught.value)["digests"] == (DIGEST,)
                assert snapshot(files) == before
                assert read(store) == WEIGHTS
                if name == "put":
                    store.unpin(DIGEST)
                    store.plan_prune().execute()
        plan = store.plan_eject(drop_pinned=True)
        assert plan.pinned_only == ()
        plan.execute()
        assert is_gone(store)

    def test_a_pinned_blob_with_a_link_outside_is_no_reason(
        self, store: Store, files: Path
    ) -> None:
        store.adopt(files / "a.safetensors")
        store.put_stream([OTHER])
        store.place(digest_of(OTHER), files / "new.bin", kind="hardlink")
        for digest in (DIGEST, digest_of(OTHER)):
            store.pin(digest)
        store.plan_eject().execute()
        assert is_gone(store)
        assert (files / "a.safetensors").read_bytes() == WEIGHTS
        assert mode_of(files / "a.safetensors") == 0o664
        assert (files / "new.bin").read_bytes() == OTHER
