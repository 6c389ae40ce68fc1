from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.api import (
    DEFAULT_PIN,
    BadDigestError,
    BlobInUseError,
    BlobNotFoundError,
    Owner,
    Store,
    link_liveness,
    liveness,
)
from tests.store.files import OTHER, WEIGHTS, allocated, digest_of, edit, write

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX files")
DIGEST = digest_of(WEIGHTS)


@pytest.fixture
def digest(store: Store) -> str:
    return store.put_stream([WEIGHTS]).digest


def states(store: Store) -> dict[str, str]:
    return {owner.name: state for owner, state in store.owners()}


class TestLiveness:
    def test_a_pin_is_always_live(self, store: Store, digest: str) -> None:
        store.pin(digest, "mine")
        assert states(store) == {"mine": "live"}

    def test_a_folder_is_live_while_it_exists(self, store: Store, folder: Path) -> None:
        store.own(Owner(kind="folder", name="models", path=folder), [])
        assert states(store) == {"models": "live"}

    def test_a_path_removed_inside_an_existing_root_is_dead(
        self, store: Store, folder: Path
    ) -> None:
        revision = folder / "models--a--b" / "snapshots" / "abc"
        revision.mkdir(parents=True)
        store.own(Owner(kind="repo", name="a/b", path=revision, root=folder), [])
        revision.rmdir()
        assert states(store) == {"a/b": "dead"}

    def test_a_root_that_vanished_as_a_whole_is_away(self, store: Store, folder: Path) -> None:
        """An unmounted drive is no garbage."""
        revision = folder / "revision"
        revision.mkdir()
        store.own(Owner(kind="repo", name="a/b", path=revision, root=folder), [])
        folder.rename(folder.with_name("unplugged"))
        assert states(store) == {"a/b": "away"}

    def test_an_owner_without_a_root_is_its_own_root(self, store: Store, folder: Path) -> None:
        store.own(Owner(kind="folder", name="models", path=folder), [])
        folder.rmdir()
        assert states(store) == {"models": "away"}

    def test_another_filesystem_in_the_place_of_the_root_is_away(
        self, store: Store, folder: Path, elsewhere: Path
    ) -> None:
        """An empty mount point looks like a root from which everything was deleted."""
        drive = elsewhere / "drive"
        (drive / "models").mkdir(parents=True)
        mount_point = folder / "mnt"
        mount_point.symlink_to(drive)
        store.own(Owner(kind="folder", name="m", path=mount_point / "models", root=mount_point), [])
        assert states(store) == {"m": "live"}
        mount_point.unlink()
        mount_point.mkdir()
        assert states(store) == {"m": "away"}

    def test_an_owner_whose_path_is_a_file_is_live_while_it_exists(
        self, store: Store, folder: Path
    ) -> None:
        path = write(folder / "a.safetensors")
        store.own(Owner(kind="set", name="s", path=path, root=folder), [])
        assert states(store) == {"s": "live"}
        path.unlink()
        assert states(store) == {"s": "dead"}

    def test_liveness_is_asked_of_the_disk_each_time(self, folder: Path) -> None:
        owner = Owner(kind="folder", name="m", path=folder, root=folder.parent)
        assert liveness(owner) == "live"


class TestLinks:
    def live(self, store: Store, path: Path) -> str:
        link = store.volume.index.link(path)
        assert link is not None
        return link_liveness(store.volume, link)

    @pytest.mark.parametrize("kind", ["hardlink", "symlink", "copy"])
    def test_a_link_lives_until_it_is_removed(
        self, store: Store, folder: Path, digest: str, kind: str
    ) -> None:
        path = folder / "a.safetensors"
        store.place(digest, path, kind=kind)  # type: ignore[arg-type]
        assert self.live(store, path) == "live"
        path.unlink()
        assert self.live(store, path) == "dead"

    @pytest.mark.parametrize("kind", ["hardlink", "symlink"])
    def test_a_link_that_was_replaced_is_dead(
        self, store: Store, folder: Path, digest: str, kind: str
    ) -> None:
        path = folder / "a.safetensors"
        store.place(digest, path, kind=kind)  # type: ignore[arg-type]
        os.replace(write(folder / "new"), path)
        assert self.live(store, path) == "dead"

    def test_a_symlink_to_somewhere_else_is_dead(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        path = folder / "a.safetensors"
        store.place(digest, path, kind="symlink")
        path.unlink()
        path.symlink_to("elsewhere")
        assert self.live(store, path) == "dead"

    def test_a_link_on_a_drive_that_is_away_may_live(
        self, store: Store, elsewhere: Path, digest: str
    ) -> None:
        (elsewhere / "drive").mkdir()
        path = elsewhere / "drive" / "a.safetensors"
        store.place(digest, path, kind="symlink")
        link = store.volume.index.link(path)
        assert link is not None
        store.volume.index.add_link(
            str(path),
            store.get(digest).id,
            kind="symlink",
            filesystem="uuid:of-the-drive",
            inode=link.inode,
            owner=None,
        )
        path.unlink()
        assert self.live(store, path) == "away"
        assert store.plan_prune().victims == ()


class TestHolding:
    def test_an_owner_keeps_what_it_was_given(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        owner = Owner(kind="folder", name="models", path=folder)
        store.own(owner, [digest])
        assert [(o.name, s) for o, s in store.holders_of(store.get(digest))] == [("models", "live")]
        store.disown(owner)
        assert store.holders_of(store.get(digest)) == []
        assert store.owners() == []

    def test_disowning_what_is_no_owner_does_nothing(self, store: Store) -> None:
        store.disown(Owner(kind="folder", name="nobody"))

    def test_owning_again_renews_the_owner_and_keeps_what_it_held(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        other = store.put_stream([OTHER]).digest
        store.own(Owner(kind="folder", name="m", path=folder / "old", root=folder), [digest])
        store.own(Owner(kind="folder", name="m", path=folder, root=folder), [other])
        assert states(store) == {"m": "live"}
        assert all(store.holders_of(store.get(d)) for d in (digest, other))

    def test_kinds_of_owners_may_have_the_same_name(self, store: Store, folder: Path) -> None:
        for kind in ("folder", "repo", "set"):
            store.own(Owner(kind=kind, name="x", path=folder), [])
        assert len(store.owners()) == 3

    def test_names_need_not_be_utf_8(self, store: Store, folder: Path, digest: str) -> None:
        path = folder / os.fsdecode(b"\xff\xfe")
        path.mkdir()
        store.own(Owner(kind="folder", name=str(path), path=path), [digest])
        ((owner, state),) = store.holders_of(store.get(digest))
        assert (owner.name, owner.path, state) == (str(path), path, "live")

    def test_owning_a_blob_that_is_not_there_is_an_error_and_makes_no_owner(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        owner = Owner(kind="folder", name="models", path=folder)
        with pytest.raises(BlobNotFoundError):
            store.own(owner, [digest, "0" * 64])
        assert store.owners() == []
        with pytest.raises(BadDigestError):
            store.own(owner, ["zz"])

    @pytest.mark.parametrize("how", ["in the trash", "lost"])
    def test_owning_a_blob_that_is_not_there_any_more_is_an_error(
        self, store: Store, folder: Path, digest: str, how: str
    ) -> None:
        if how == "lost":
            store.path_of(digest).unlink()
            store.verify()
        else:
            store.forget(digest)
        with pytest.raises(BlobNotFoundError):
            store.own(Owner(kind="folder", name="models", path=folder), [digest])
        with pytest.raises(BlobNotFoundError):
            store.pin(digest)

    def test_an_owner_that_held_through_a_link_lets_go_when_the_link_goes(
        self, store: Store, folder: Path
    ) -> None:
        owner = Owner(kind="folder", name="models", path=folder)
        blob = store.adopt(write(folder / "a.safetensors"), owner=owner)
        (folder / "a.safetensors").unlink()
        assert store.holders_of(blob) == []
        assert [v.digest for v in store.plan_prune().victims] == [blob.digest]

    def test_one_of_several_links_is_enough(self, store: Store, folder: Path) -> None:
        owner = Owner(kind="folder", name="models", path=folder)
        blob = store.adopt(write(folder / "a.safetensors"), owner=owner)
        store.place(blob.digest, folder / "b.safetensors", kind="copy", owner=owner)
        (folder / "a.safetensors").unlink()
        assert [o.name for o, _ in store.holders_of(blob)] == ["models"]


class TestPins:
    def test_a_pin_has_a_name(self, store: Store, digest: str) -> None:
        store.pin(digest)
        store.pin(digest, "favourites")
        names = [owner.name for owner, _ in store.holders_of(store.get(digest))]
        assert names == sorted([DEFAULT_PIN, "favourites"])

    def test_unpin_ends_one_pin_or_all(self, store: Store, digest: str) -> None:
        for name in ("a", "b", "c"):
            store.pin(digest, name)
        assert store.unpin(digest, "b") == ["b"]
        assert store.unpin(digest, "b") == []
        assert store.unpin(digest) == ["a", "c"]
        assert store.holders_of(store.get(digest)) == []

    def test_unpin_leaves_other_owners_alone(self, store: Store, folder: Path, digest: str) -> None:
        store.own(Owner(kind="folder", name="m", path=folder), [digest])
        store.pin(digest)
        assert store.unpin(digest) == [DEFAULT_PIN]
        assert [o.name for o, _ in store.holders_of(store.get(digest))] == ["m"]

    def test_a_pin_of_a_blob_that_is_not_there_is_an_error(self, store: Store) -> None:
        for act in (store.pin, store.unpin):
            with pytest.raises(BlobNotFoundError):
                act("0" * 64)
        assert store.owners() == []

    def test_pins_survive_the_loss_of_the_index(self, store: Store, digest: str) -> None:
        other = store.put_stream([OTHER]).digest
        store.pin(digest.upper(), "a")
        store.pin(digest, "b")
        store.pin(other, "a")
        store.unpin(digest, "b")
        store.unpin(other)
        store.rebuild()
        assert [o.name for o, _ in store.holders_of(store.get(digest))] == ["a"]
        assert store.holders_of(store.get(other)) == []


class TestForget:
    def test_a_blob_goes_to_the_trash(self, store: Store, digest: str) -> None:
        forgotten = store.forget(digest)
        assert (forgotten.size, forgotten.freed_size) == (len(WEIGHTS), 0)
        assert forgotten.is_in_trash
        assert (store.volume.layout.trash / digest).read_bytes() == WEIGHTS
        with pytest.raises(BlobNotFoundError):
            store.get(digest)
        assert not store.verify(full=True).has_damage

    def test_a_blob_can_go_for_good(self, store: Store, digest: str) -> None:
        blocks = allocated(store.path_of(digest))
        forgotten = store.forget(digest, to_trash=False)
        assert not forgotten.is_in_trash
        assert forgotten.freed_size == blocks
        assert list(store.volume.layout.trash.iterdir()) == []
        assert store.history() == []

    def test_a_blob_that_others_share_frees_nothing_and_stays_theirs(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        store.place(digest, folder / "a.safetensors", kind="hardlink")
        assert store.forget(digest, to_trash=False).freed_size == 0
        assert (folder / "a.safetensors").read_bytes() == WEIGHTS

    @pytest.mark.parametrize("upper", [False, True])
    def test_a_digest_in_either_case_is_meant(self, store: Store, digest: str, upper: bool) -> None:
        path = store.path_of(digest)
        store.forget(digest.upper() if upper else digest)
        assert not path.exists()

    def test_a_forgotten_blob_cannot_be_forgotten_again(self, store: Store, digest: str) -> None:
        store.forget(digest)
        with pytest.raises(BlobNotFoundError):
            store.forget(digest)

    @pytest.mark.parametrize("holder", ["pin", "owner", "symlink", "away"])
    def test_what_is_held_is_refused_by_name(
        self, store: Store, folder: Path, digest: str, holder: str
    ) -> None:
        (folder / "sub").mkdir()
        if holder == "pin":
            store.pin(digest, "mine")
        elif holder == "owner":
            store.own(Owner(kind="folder", name="mine", path=folder), [digest])
        elif holder == "away":
            store.own(Owner(kind="folder", name="mine", path=folder / "sub"), [digest])
            (folder / "sub").rmdir()
        else:
            store.place(digest, folder / "mine", kind="symlink")
        with pytest.raises(BlobInUseError, match="mine") as caught:
            store.forget(digest)
        (name,) = vars(caught.value)["holders"]
        assert "mine" in name
        with store.open(digest) as file:
            assert file.read() == WEIGHTS

    def test_dead_owners_and_links_are_no_reason_to_refuse(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        store.own(Owner(kind="folder", name="m", path=folder / "sub", root=folder), [digest])
        store.place(digest, folder / "a", kind="symlink")
        (folder / "a").unlink()
        assert store.forget(digest).is_in_trash

    def test_a_lost_blob_can_be_forgotten(self, store: Store, digest: str) -> None:
        edit(store.path_of(digest))
        assert store.verify().damaged == [digest]
        assert not store.forget(digest).is_in_trash
        assert store.verify().missing == []

    def test_bytes_that_come_again_after_forgetting_are_an_ordinary_blob(
        self, store: Store, digest: str
    ) -> None:
        store.forget(digest)
        blob = store.put_stream([WEIGHTS])
        assert blob.is_held_only_by_smartcache
        with store.open(digest) as file:
            assert file.read() == WEIGHTS
        assert not store.verify(full=True).has_damage

    def test_after_a_rebuild_what_is_in_the_trash_is_still_forgotten(
        self, store: Store, digest: str
    ) -> None:
        store.forget(digest)
        store.rebuild()
        assert list(store.blobs()) == []
        assert [done.note for done in store.plan_undo().execute()] == [""]
        assert store.get(digest).size == len(WEIGHTS)
