from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.api import BlobInUseError, NoSpaceError, Store, store_room
from tests.store.files import (
    OTHER,
    WEIGHTS,
    Watch,
    digest_of,
    edit,
    inode_of,
    link_count,
    mode_of,
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
    write(folder / "sub" / "c.json", b'{"a": 1}', mode=0o600)
    return folder


def use(store: Store, files: Path) -> None:
    """Do to the user's files all that can be done to them."""
    store.adopt(files / "a.safetensors")
    store.replace(files / "b.safetensors", DIGEST)
    store.put_stream([OTHER])
    for name in ("two names, one", "two names, two"):
        store.replace(files / name, digest_of(OTHER))
    store.put_file(files / "sub" / "c.json", how="move")


def place(store: Store, files: Path) -> None:
    for kind in ("hardlink", "symlink", "copy"):
        store.place(DIGEST, files / f"new-{kind}.bin", kind=kind)


def is_gone(store: Store) -> bool:
    """Nothing of the store is left, nor anything beside it."""
    names = os.listdir(store.root.parent)
    return not [name for name in names if name.startswith(store.root.name)]


class TestRestored:
    def test_files_are_as_if_smartcache_had_never_been_there(
        self, store: Store, files: Path
    ) -> None:
        before = snapshot(files)
        use(store, files)
        assert snapshot(files) != before
        results = store.plan_eject().execute()
        assert [done.note for done in results if not done.is_undone] == []
        assert snapshot(files) == before
        assert is_gone(store)

    def test_placed_links_become_ordinary_files(self, store: Store, files: Path) -> None:
        before = snapshot(files)
        use(store, files)
        place(store, files)
        store.plan_eject().execute()
        assert is_gone(store)
        after = snapshot(files)
        for kind in ("hardlink", "symlink", "copy"):
            path = files / f"new-{kind}.bin"
            assert after.pop(path.name)[0] == "file"
            assert path.read_bytes() == WEIGHTS
            assert mode_of(path) & 0o600 == 0o600
            assert link_count(path) == 1
        assert after == before

    def test_a_placed_link_that_shares_with_nobody_keeps_its_inode(
        self, store: Store, files: Path
    ) -> None:
        store.put_stream([WEIGHTS])
        store.place(DIGEST, files / "new.bin", kind="hardlink")
        inode = inode_of(files / "new.bin")
        store.plan_eject().execute()
        assert inode_of(files / "new.bin") == inode
        assert mode_of(files / "new.bin") == 0o644

    def test_two_placed_links_are_two_files(self, store: Store, files: Path) -> None:
        store.put_stream([WEIGHTS])
        for name in ("one.bin", "two.bin"):
            store.place(DIGEST, files / name, kind="hardlink")
        store.plan_eject().execute()
        edit(files / "one.bin")
        assert (files / "two.bin").read_bytes() == WEIGHTS

    def test_files_are_restored_after_the_index_was_lost(self, store: Store, files: Path) -> None:
        before = snapshot(files)
        use(store, files)
        store.place(DIGEST, files / "new.bin", kind="symlink")
        store.rebuild()
        store.plan_eject().execute()
        assert (files / "new.bin").read_bytes() == WEIGHTS
        (files / "new.bin").unlink()
        assert snapshot(files) == before

    def test_files_are_restored_after_their_blob_was_forgotten(
        self, store: Store, files: Path
    ) -> None:
        before = snapshot(files)
        store.adopt(files / "a.safetensors")
        store.replace(files / "b.safetensors", DIGEST)
        store.forget(DIGEST)
        store.plan_eject().execute()
        assert snapshot(files) == before

    def test_what_was_undone_before_is_not_touched_again(self, store: Store, files: Path) -> None:
        use(store, files)
        store.plan_undo().execute()
        os.chmod(files / "a.safetensors", 0o600)
        before = snapshot(files)
        store.plan_eject().execute()
        assert snapshot(files) == before

    def test_a_symlink_where_another_file_had_been_adopted_becomes_a_file(
        self, store: Store, files: Path
    ) -> None:
        path = files / "a.safetensors"
        store.adopt(path)
        path.unlink()
        other = store.put_stream([OTHER]).digest
        store.place(other, path, kind="symlink")
        store.plan_eject().execute()
        assert not path.is_symlink()
        assert path.read_bytes() == OTHER

    def test_a_hard_link_where_another_file_had_been_adopted_becomes_writable(
        self, store: Store, files: Path
    ) -> None:
        path = files / "a.safetensors"
        store.adopt(path)
        path.unlink()
        other = store.put_stream([OTHER]).digest
        store.place(other, path, kind="hardlink")
        store.plan_eject().execute()
        assert path.read_bytes() == OTHER
        assert mode_of(path) & 0o200

    def test_links_that_somebody_edited_keep_their_bytes_and_do_not_stop_it(
        self, store: Store, files: Path
    ) -> None:
        store.put_stream([WEIGHTS])
        for name in ("one.bin", "two.bin"):
            store.place(DIGEST, files / name, kind="hardlink")
        edit(files / "one.bin")
        store.plan_eject().execute()
        assert is_gone(store)
        for name in ("one.bin", "two.bin"):
            assert (files / name).read_bytes() == b"EDITED" + WEIGHTS[6:]
            assert mode_of(files / name) & 0o200

    def test_an_adopted_file_that_somebody_edited_keeps_its_bytes_and_gets_its_mode(
        self, store: Store, files: Path
    ) -> None:
        store.adopt(files / "a.safetensors")
        edit(files / "a.safetensors")
        store.plan_eject().execute()
        assert is_gone(store)
        assert (files / "a.safetensors").read_bytes() == b"EDITED" + WEIGHTS[6:]
        assert mode_of(files / "a.safetensors") == 0o664

    def test_links_that_are_gone_or_others_now_are_left_alone(
        self, store: Store, files: Path
    ) -> None:
        use(store, files)
        place(store, files)
        (files / "new-hardlink.bin").unlink()
        os.replace(write(files / "x", b"theirs", mode=0o400), files / "new-symlink.bin")
        os.replace(write(files / "x", b"theirs", mode=0o400), files / "b.safetensors")
        store.plan_eject().execute()
        assert is_gone(store)
        assert not (files / "new-hardlink.bin").exists()
        for name in ("new-symlink.bin", "b.safetensors"):
            assert (files / name).read_bytes() == b"theirs"
            assert mode_of(files / name) == 0o400

    def test_a_moved_store_leaves_nothing_at_its_former_root(
        self, store: Store, files: Path, tmp_path: Path
    ) -> None:
        use(store, files)
        store.place(DIGEST, files / "new.bin", kind="symlink")
        store.plan_move(tmp_path / "moved").execute()
        with Store(tmp_path / "moved") as moved:
            moved.plan_eject().execute()
        assert (files / "new.bin").read_bytes() == WEIGHTS
        assert sorted(os.listdir(tmp_path)) == ["models"]

    def test_a_new_store_can_be_made_at_the_same_place(self, store: Store) -> None:
        store.put_stream([WEIGHTS])
        store.plan_eject().execute()
        with Store(store.root) as again:
            assert list(again.blobs()) == []

    def test_an_empty_store_just_goes(self, store: Store) -> None:
        plan = store.plan_eject()
        assert (plan.changes, plan.links, plan.needed_size) == ((), (), 0)
        assert plan.execute() == []
        assert is_gone(store)

    def test_what_a_killed_eject_left_beside_the_root_goes_too(self, store: Store) -> None:
        write(store.root.with_name(f"{store.root.name}.ejected-12345678") / "blobs" / "x")
        store.plan_eject().execute()
        assert is_gone(store)


class TestPlan:
    def test_planning_changes_nothing(self, store: Store, files: Path) -> None:
        use(store, files)
        place(store, files)
        before = (snapshot(files), store.history())
        plan = store.plan_eject()
        assert (snapshot(files), store.history()) == before
        assert plan.root == store.root
        assert len(plan.changes) == 5
        assert len(plan.links) == 2

    def test_what_is_freed_is_what_only_the_store_holds(self, store: Store, files: Path) -> None:
        blob = store.put_stream([OTHER])
        store.adopt(files / "a.safetensors")
        assert store.plan_eject().freed_size == blob.allocated

    def test_without_space_nothing_is_begun(
        self, store: Store, files: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        use(store, files)
        before = snapshot(files)
        monkeypatch.setattr(store_room, "free_bytes", lambda _: len(WEIGHTS) - 1)
        plan = store.plan_eject()
        assert plan.needed_size > len(WEIGHTS)
        with pytest.raises(NoSpaceError) as caught:
            plan.execute()
        assert "--keep-shared" in caught.value.hint
        assert snapshot(files) == before
        with store.open(DIGEST) as file:
            assert file.read() == WEIGHTS

    def test_progress_is_told_every_byte_that_is_copied(self, store: Store, files: Path) -> None:
        use(store, files)
        watch = Watch()
        plan = store.plan_eject()
        plan.execute(watch)
        assert watch.done == watch.total == plan.needed_size > 0
        assert "b.safetensors" in watch.names


class TestKeepShared:
    def test_files_keep_sharing_and_get_their_modes_back(self, store: Store, files: Path) -> None:
        use(store, files)
        plan = store.plan_eject(keep_shared=True)
        assert len(plan.warnings) == 1
        plan.execute()
        assert is_gone(store)
        assert inode_of(files / "a.safetensors") == inode_of(files / "b.safetensors")
        assert inode_of(files / "two names, one") == inode_of(files / "two names, two")
        for name in ("a.safetensors", "two names, one"):
            assert mode_of(files / name) & 0o200
        assert (files / "sub" / "c.json").read_bytes() == b'{"a": 1}'

    def test_only_what_exists_nowhere_else_needs_space(self, store: Store, files: Path) -> None:
        use(store, files)
        assert store.plan_eject(keep_shared=True).needed_size == len(b'{"a": 1}')
        store.place(DIGEST, files / "new.bin", kind="hardlink")
        assert store.plan_eject(keep_shared=True).needed_size == len(b'{"a": 1}')
        store.place(DIGEST, files / "new2.bin", kind="symlink")
        assert store.plan_eject(keep_shared=True).needed_size == len(b'{"a": 1}') + len(WEIGHTS)

    def test_symlinks_become_files_all_the_same(self, store: Store, files: Path) -> None:
        store.put_stream([WEIGHTS])
        place(store, files)
        store.plan_eject(keep_shared=True).execute()
        for kind in ("hardlink", "symlink", "copy"):
            assert (files / f"new-{kind}.bin").read_bytes() == WEIGHTS
            assert not (files / f"new-{kind}.bin").is_symlink()
            assert mode_of(files / f"new-{kind}.bin") & 0o200


class TestRefused:
    """The last copy of what somebody wants to keep does not go."""

    def refused(self, store: Store, files: Path) -> None:
        before = snapshot(files)
        plan = store.plan_eject()
        assert plan.pinned_only == (DIGEST,)
        with pytest.raises(BlobInUseError) as caught:
            plan.execute()
        assert vars(caught.value)["digests"] == (DIGEST,)
        assert snapshot(files) == before
        with Store(store.root) as again, again.open(DIGEST) as file:
            assert file.read() == WEIGHTS

    def test_a_pinned_blob_that_only_the_store_has(self, store: Store, files: Path) -> None:
        store.put_stream([WEIGHTS])
        store.pin(DIGEST)
        self.refused(store, files)

    @pytest.mark.parametrize("how", ["adopted", "placed"])
    def test_a_pinned_blob_whose_other_links_are_gone(
        self, store: Store, files: Path, how: str
    ) -> None:
        path = files / "x.safetensors"
        if how == "adopted":
            store.adopt(write(path))
        else:
            store.put_stream([WEIGHTS])
            store.place(DIGEST, path, kind="hardlink")
        store.pin(DIGEST)
        path.unlink()
        self.refused(store, files)

    def test_a_moved_file_whose_place_is_taken(self, store: Store, files: Path) -> None:
        store.put_file(files / "a.safetensors", how="move")
        write(files / "a.safetensors", b"theirs")
        self.refused(store, files)

    def test_a_moved_file_whose_place_is_taken_at_the_last_moment(
        self, store: Store, files: Path
    ) -> None:
        store.put_file(files / "a.safetensors", how="move")
        plan = store.plan_eject()
        write(files / "a.safetensors", b"theirs")
        with pytest.raises(BlobInUseError):
            plan.execute()
        assert (files / "a.safetensors").read_bytes() == b"theirs"
        with Store(store.root) as again, again.open(DIGEST) as file:
            assert file.read() == WEIGHTS

    def test_a_moved_file_whose_folder_is_gone(self, store: Store, files: Path) -> None:
        moved = store.put_file(files / "sub" / "c.json", how="move").digest
        (files / "sub").rmdir()
        (result,) = store.plan_eject().execute()
        assert result.outcome == "failed"
        assert str(files / "sub") in result.note
        with Store(store.root) as again, again.open(moved) as file:
            assert file.read() == b'{"a": 1}'
        (files / "sub").mkdir()
        with Store(store.root) as again:
            assert [each.outcome for each in again.plan_eject().execute()] == ["undone"]
        assert (files / "sub" / "c.json").read_bytes() == b'{"a": 1}'
        assert is_gone(store)

    def test_dropping_pins_can_be_allowed(self, store: Store) -> None:
        store.put_stream([WEIGHTS])
        store.pin(DIGEST)
        plan = store.plan_eject(drop_pinned=True)
        assert plan.pinned_only == ()
        plan.execute()
        assert is_gone(store)

    def test_a_pinned_blob_with_a_link_outside_is_no_reason(
        self, store: Store, files: Path
    ) -> None:
        store.adopt(files / "a.safetensors")
        store.pin(DIGEST)
        store.plan_eject().execute()
        assert is_gone(store)
        assert (files / "a.safetensors").read_bytes() == WEIGHTS
        assert mode_of(files / "a.safetensors") == 0o664

    def test_a_pinned_blob_with_a_symlink_outside_is_no_reason(
        self, store: Store, files: Path
    ) -> None:
        store.put_stream([WEIGHTS])
        store.pin(DIGEST)
        store.place(DIGEST, files / "new.bin", kind="symlink")
        store.plan_eject().execute()
        assert is_gone(store)
        assert (files / "new.bin").read_bytes() == WEIGHTS

    def test_a_blob_pinned_between_plan_and_execution_does_not_go(self, store: Store) -> None:
        store.put_stream([WEIGHTS])
        plan = store.plan_eject()
        store.pin(DIGEST)
        with pytest.raises(BlobInUseError):
            plan.execute()
        with store.open(DIGEST) as file:
            assert file.read() == WEIGHTS


def test_a_folder_that_was_swapped_since_the_plan_leads_eject_to_no_other_file(
    store: Store, folder: Path
) -> None:
    store.put_stream([WEIGHTS])
    shared = folder / "shared"
    shared.mkdir()
    names = [f"{kind}.bin" for kind in ("hardlink", "symlink")]
    for kind in ("hardlink", "symlink"):
        store.place(DIGEST, shared / f"{kind}.bin", kind=kind)
    private = folder / "private"
    for name in names:
        write(private / name, OTHER, mode=0o400)
    before = snapshot(private)
    plan = store.plan_eject()
    shared.rename(folder / "away")
    shared.symlink_to(private)
    plan.execute()
    assert snapshot(private) == before
