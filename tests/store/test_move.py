"""The whole store goes to another place, on this filesystem or another one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.api import (
    DamagedBlobError,
    DestinationExistsError,
    NoSpaceError,
    Store,
    StoreError,
    StoreMovedError,
    store_move,
)
from tests.store.files import (
    OTHER,
    WEIGHTS,
    Watch,
    blob_path,
    digest_of,
    edit,
    inode_of,
    link_count,
    mode_of,
    read,
    row,
    snapshot,
    undo,
    write,
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX files")
DIGEST = digest_of(WEIGHTS)
FORGOTTEN = digest_of(b"forgotten")


@pytest.fixture(params=["same filesystem", "other filesystem"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Where the store goes."""
    if request.param == "same filesystem":
        return tmp_path / "moved" / "here"
    elsewhere: Path = request.getfixturevalue("elsewhere")
    return elsewhere / "moved" / "here"


def fill(store: Store, folder: Path) -> None:
    """Use everything that has to come along."""
    store.adopt(write(folder / "adopted.safetensors", mode=0o664), algorithms=["sha256"])
    write(folder / "replaced.safetensors")
    store.replace(folder / "replaced.safetensors", DIGEST)
    for kind in ("hardlink", "symlink", "copy"):
        store.place(DIGEST, folder / f"{kind}.bin", kind=kind)
    store.put_stream([OTHER])
    store.pin(digest_of(OTHER), "mine")
    store.put_stream([b"forgotten"])
    store.forget(FORGOTTEN)
    damaged = store.put_stream([b"damaged"]).digest
    edit(blob_path(store, damaged))
    store.verify()
    store.forget(damaged)


class TestMoved:
    def test_everything_is_at_the_new_root_and_the_old_one_leads_there(
        self, store: Store, folder: Path, target: Path
    ) -> None:
        fill(store, folder)
        files = {path: path.read_bytes() for path in folder.iterdir()}
        blobs = [blob.digest for blob in store.blobs()]
        inode = inode_of(folder / "hardlink.bin")
        plan = store.plan_move(target)
        assert (plan.root, plan.new_root, plan.symlinks) == (store.root, target, 1)
        assert plan.execute() == target
        assert sorted(os.listdir(store.root)) == ["blobs", "moved-to"]
        assert blob_path(store).read_bytes() == WEIGHTS
        with Store(store.root) as moved:
            assert moved.root == target
            assert [blob.digest for blob in moved.blobs()] == blobs
            assert read(moved) == WEIGHTS
            assert moved.aliases_of(moved.get(DIGEST))
            assert [o.name for o, _ in moved.owners()] == ["mine"]
            report = moved.verify(full=True)
            assert (report.damaged, report.missing, report.unindexed) == ([], [], [])
            assert (report.stray, report.dead_links) == ([], [])
            assert len(list((target / "bad").iterdir())) == 1
            assert len(list((target / "trash").iterdir())) == 1
            assert os.readlink(folder / "symlink.bin") == str(blob_path(moved))
            assert inode_of(folder / "hardlink.bin") == inode
            assert (inode_of(blob_path(moved)) == inode) == plan.is_rename
        assert {path: path.read_bytes() for path in folder.iterdir()} == files

    @pytest.mark.usefixtures("no_exchange")
    def test_everything_can_still_be_undone(self, store: Store, folder: Path, target: Path) -> None:
        """A filesystem without exchange gets the same result."""
        fill(store, folder)
        store.plan_move(target).execute()
        assert sorted(os.listdir(store.root)) == ["blobs", "moved-to"]
        assert os.listdir(target.parent) == [target.name]
        with Store(target) as moved:
            assert undo(moved) == []
            assert read(moved, FORGOTTEN) == b"forgotten"
        assert sorted(os.listdir(folder)) == ["adopted.safetensors", "replaced.safetensors"]
        assert mode_of(folder / "adopted.safetensors") == 0o664
        assert mode_of(folder / "replaced.safetensors") == 0o644
        for path in folder.iterdir():
            assert (path.read_bytes(), link_count(path)) == (WEIGHTS, 1)

    def test_somebody_who_had_it_open_is_told(self, store: Store, target: Path) -> None:
        store.put_stream([WEIGHTS])
        with Store(store.root) as other:
            other.put_stream([OTHER])
            store.plan_move(target).execute()
            with pytest.raises(StoreMovedError, match="was moved to"):
                other.put_stream([b"new"])
        with Store(target) as moved:
            assert len(list(moved.blobs())) == 2

    def test_it_can_move_on_and_back(self, store: Store, folder: Path, target: Path) -> None:
        fill(store, folder)
        third = folder.parent / "third"
        for root in (target, third, store.root, target):
            with Store(store.root) as current:
                assert current.plan_move(root).execute() == root
            for known in (store.root, target, third):
                if known.exists():
                    with Store(known) as found:
                        assert found.root == root
                        assert read(found) == WEIGHTS
                        assert not found.verify().has_damage
            assert (folder / "symlink.bin").read_bytes() == WEIGHTS
        link = os.readlink(folder / "symlink.bin")
        assert link.startswith(str(target))

    def test_an_empty_directory_is_a_fine_place(self, store: Store, target: Path) -> None:
        store.put_stream([WEIGHTS])
        target.mkdir(parents=True)
        store.plan_move(target).execute()
        with Store(target) as moved:
            assert read(moved) == WEIGHTS

    def test_names_need_not_be_utf_8(self, tmp_path: Path, target: Path) -> None:
        old = tmp_path / os.fsdecode(b"old \xff")
        new = target.with_name(os.fsdecode(b"new \xfe"))
        with Store(old) as store:
            store.put_stream([WEIGHTS])
            store.place(DIGEST, tmp_path / os.fsdecode(b"\xff.bin"), kind="symlink")
            store.plan_move(new).execute()
        assert (tmp_path / os.fsdecode(b"\xff.bin")).read_bytes() == WEIGHTS
        with Store(old) as followed:
            assert followed.root == new

    def test_a_symlink_somebody_else_made_anew_is_left_alone(
        self, store: Store, folder: Path, target: Path
    ) -> None:
        store.put_stream([WEIGHTS])
        for name in ("kept", "theirs", "gone"):
            store.place(DIGEST, folder / name, kind="symlink")
        (folder / "theirs").unlink()
        (folder / "theirs").symlink_to("somewhere")
        (folder / "gone").unlink()
        store.plan_move(target).execute()
        assert os.readlink(folder / "theirs") == "somewhere"
        assert not (folder / "gone").is_symlink()
        assert (folder / "kept").read_bytes() == WEIGHTS


def test_on_the_same_filesystem_nothing_is_copied(store: Store, tmp_path: Path) -> None:
    store.put_stream([WEIGHTS])
    inode = inode_of(blob_path(store))
    plan = store.plan_move(tmp_path / "new")
    assert (plan.is_rename, plan.copied_size, plan.freed_size) == (True, 0, 0)
    assert plan.warnings == ()
    plan.execute()
    with Store(tmp_path / "new") as moved:
        assert inode_of(blob_path(moved)) == inode


class TestOtherFilesystem:
    def test_what_is_copied_and_what_ends_is_said_and_files_keep_their_bytes(
        self, store: Store, folder: Path, elsewhere: Path
    ) -> None:
        path = write(folder / "a.safetensors")
        blob = store.adopt(path)
        plan = store.plan_move(elsewhere / "new")
        assert (plan.is_rename, plan.copied_size) == (False, blob.allocated)
        assert len(plan.warnings) == 1
        plan.execute()
        assert (path.read_bytes(), link_count(path)) == (WEIGHTS, 1)
        with Store(elsewhere / "new") as moved:
            assert mode_of(blob_path(moved)) == 0o444
            assert moved.get(DIGEST).key.mtime_ns == blob.key.mtime_ns

    def test_progress_is_told_every_byte(self, store: Store, elsewhere: Path) -> None:
        store.put_stream([WEIGHTS])
        store.put_stream([OTHER])
        watch = Watch()
        store.plan_move(elsewhere / "new").execute(watch)
        assert watch.done == watch.total == len(WEIGHTS) + len(OTHER)

    def test_what_comes_in_meanwhile_comes_along(self, store: Store, elsewhere: Path) -> None:
        store.put_stream([WEIGHTS])
        with Store(store.root) as other:
            watch = Watch(lambda: other.put_stream([OTHER]))
            store.plan_move(elsewhere / "new").execute(watch)
        with Store(elsewhere / "new") as moved:
            assert read(moved, digest_of(OTHER)) == OTHER

    def test_what_is_removed_meanwhile_stays_removed(self, store: Store, elsewhere: Path) -> None:
        for number in range(5):
            store.put_stream([bytes([number])])
        with Store(store.root) as other:
            watch = Watch(lambda: other.plan_prune().execute())
            store.plan_move(elsewhere / "new").execute(watch)
        with Store(elsewhere / "new") as moved:
            assert list(moved.blobs()) == []
            report = moved.verify(full=True)
            assert (report.missing, report.unindexed) == ([], [])

    def test_without_space_nothing_is_begun(
        self, store: Store, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.put_stream([WEIGHTS])
        monkeypatch.setattr(store_move, "free_bytes", lambda _: len(WEIGHTS) - 1)
        with pytest.raises(NoSpaceError):
            store.plan_move(elsewhere / "new").execute()
        assert list(elsewhere.iterdir()) == []
        assert read(store) == WEIGHTS

    def test_a_damaged_blob_stops_it_and_the_store_stays_where_it_was(
        self, store: Store, elsewhere: Path
    ) -> None:
        store.put_stream([WEIGHTS])
        damaged = store.put_stream([OTHER]).digest
        edit(blob_path(store, damaged))
        with pytest.raises(DamagedBlobError):
            store.plan_move(elsewhere / "new").execute()
        assert read(store) == WEIGHTS
        store.plan_move(elsewhere / "new").execute()
        with Store(elsewhere / "new") as moved:
            assert read(moved) == WEIGHTS

    def test_a_move_that_broke_off_can_be_made_again(self, store: Store, elsewhere: Path) -> None:
        class BrokeOffError(Exception):
            pass

        def break_off() -> None:
            raise BrokeOffError

        store.put_stream([WEIGHTS])
        store.put_stream([OTHER])
        with pytest.raises(BrokeOffError):
            store.plan_move(elsewhere / "new").execute(Watch(break_off))
        assert read(store) == WEIGHTS
        store.plan_move(elsewhere / "new").execute()
        with Store(elsewhere / "new") as moved:
            assert len(list(moved.blobs())) == 2
            assert not moved.verify(full=True).has_damage
            assert not (elsewhere / "new" / ".moving").exists()


def test_a_place_that_is_taken_or_within_the_store_is_refused(store: Store, folder: Path) -> None:
    store.put_stream([WEIGHTS])
    write(folder / "file")
    write(folder / "directory" / "a")
    (folder / "real").mkdir()
    (folder / "link").symlink_to("real")
    (folder / "into").symlink_to(store.root)
    for name in ("other", "former"):
        with Store(folder / name) as other:
            other.put_stream([OTHER])
            if name == "former":
                other.plan_move(folder / "moved").execute()
    within = (store.root / "new", store.root, store.root.parent, folder / "into" / "new")
    taken = [folder / name for name in ("file", "directory", "link", "other", "former")]
    before = snapshot(folder.parent)
    for new in (*within, *taken):
        with row(new), pytest.raises(DestinationExistsError if new in taken else StoreError):
            store.plan_move(new)
    store.plan_move(folder / "fine" / "here")
    assert snapshot(folder.parent) == before
    assert read(store) == WEIGHTS


@pytest.mark.timeout(30)
def test_a_fifo_among_the_sets_is_named_not_waited_for(store: Store, elsewhere: Path) -> None:
    (store.root / "sets" / "latents").mkdir()
    os.mkfifo(store.root / "sets" / "latents" / "pipe")
    with pytest.raises(StoreError, match="pipe is not a regular file"):
        store.plan_move(elsewhere / "new").execute()
    assert not (store.root / "moved-to").exists()
