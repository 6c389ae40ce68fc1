"""Who holds a blob, whether they still exist, and what can be forgotten."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from smartcache.errors import BadDigestError, BlobInUseError, BlobNotFoundError
from smartcache.store import DEFAULT_PIN
from smartcache.store.owners import link_liveness
from smartcache.store.records import Owner
from smartcache.store.store import Store
from tests.store.files import (
    OTHER,
    WEIGHTS,
    allocated,
    blob_path,
    digest_of,
    edit,
    hold_by,
    read,
    row,
    write,
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX files")
DIGEST = digest_of(WEIGHTS)


def states(store: Store) -> dict[str, str]:
    return {owner.name: state for owner, state in store.owners()}


def holders(store: Store, digest: str = DIGEST) -> list[str]:
    return [owner.name for owner, _ in store.holders_of(store.get(digest))]


class TestLiveness:
    def test_an_owner_lives_while_its_path_exists_and_is_away_with_its_root(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        """An unmounted drive is no garbage; an owner without a root is its own; a pin stays."""
        root = folder / "root"
        (root / "revision").mkdir(parents=True)
        (folder / "own").mkdir()
        store.pin(digest, "pin")
        store.own(Owner(kind="repo", name="repo", path=root / "revision", root=root), [])
        store.own(Owner(kind="set", name="set", path=write(root / "file"), root=root), [])
        store.own(Owner(kind="folder", name="own root", path=folder / "own"), [])
        assert set(states(store).values()) == {"live"}
        (root / "revision").rmdir()
        (root / "file").unlink()
        (folder / "own").rmdir()
        expected = {"pin": "live", "repo": "dead", "set": "dead", "own root": "away"}
        assert states(store) == expected
        root.rename(folder / "unplugged")
        assert states(store) == {**expected, "repo": "away", "set": "away"}

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


class TestLinks:
    def live(self, store: Store, path: Path) -> str:
        link = store.volume.index.link(path)
        assert link is not None
        return link_liveness(link)

    def test_a_link_lives_until_it_is_removed_or_replaced(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        for kind in ("hardlink", "copy"):
            with row(kind):
                path = folder / kind
                store.place(digest, path, kind=kind)
                assert self.live(store, path) == "live"
                path.unlink()
                assert self.live(store, path) == "dead"
                if kind != "copy":
                    write(path)
                    assert self.live(store, path) == "dead"

    def test_a_link_on_a_drive_that_is_away_may_live(
        self, store: Store, elsewhere: Path, digest: str
    ) -> None:
        path = elsewhere / "a.safetensors"
        link = store.place(digest, path, kind="copy")
        owner = store.record_owner(Owner(kind="folder", name="mine", path=elsewhere))
        store.volume.index.hold(owner, store.get(digest).id)
        store.volume.index.add_link(
            str(path),
            store.get(digest).id,
            kind="copy",
            filesystem="uuid:of-the-drive",
            inode=link.inode,
            owner=owner,
        )
        path.unlink()
        assert self.live(store, path) == "away"
        assert store.plan_prune().victims == ()


class TestHolding:
    def test_an_owner_keeps_what_it_was_given_until_it_is_disowned(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        """Names need not be UTF-8; owning again renews the owner and keeps what it held."""
        other = store.put_stream([OTHER]).digest
        path = folder / os.fsdecode(b"\xff\xfe")
        path.mkdir()
        store.own(Owner(kind="folder", name=str(path), path=folder / "old", root=folder), [digest])
        owner = Owner(kind="folder", name=str(path), path=path, root=folder)
        store.own(owner, [other])
        for each in (digest, other):
            ((found, state),) = store.holders_of(store.get(each))
            assert (found.name, found.path, state) == (str(path), path, "live")
        store.disown(owner)
        store.disown(owner)
        assert (holders(store), store.owners()) == ([], [])

    def test_kinds_of_owners_may_have_the_same_name(self, store: Store, folder: Path) -> None:
        for kind in ("folder", "repo", "set"):
            store.own(Owner(kind=kind, name="x", path=folder), [])
        assert len(store.owners()) == 3

    def test_what_is_not_there_can_neither_be_owned_nor_pinned_and_makes_no_owner(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        owner = Owner(kind="folder", name="models", path=folder)
        lost = store.put_stream([OTHER]).digest
        removed = store.put_stream([b"removed"]).digest
        store.path_of(lost).unlink()
        store.verify()
        store.remove(removed)
        for name in ("0" * 64, lost, removed):
            with row(name), pytest.raises(BlobNotFoundError):
                store.pin(name)
            with row(name), pytest.raises(BlobNotFoundError):
                store.own(owner, [digest, name])
        with pytest.raises(BlobNotFoundError):
            store.unpin("0" * 64)
        with pytest.raises(BadDigestError):
            store.own(owner, ["zz"])
        assert store.owners() == []

    def test_an_owner_that_held_through_links_lets_go_with_the_last(
        self, store: Store, folder: Path
    ) -> None:
        owner = Owner(kind="folder", name="models", path=folder)
        store.adopt(write(folder / "a.safetensors"), owner=owner)
        store.place(DIGEST, folder / "b.safetensors", kind="copy", owner=owner)
        (folder / "a.safetensors").unlink()
        assert holders(store) == ["models"]
        (folder / "b.safetensors").unlink()
        assert holders(store) == []
        assert [victim.digest for victim in store.plan_prune().victims] == [DIGEST]


class TestPins:
    def test_a_pin_has_a_name_and_unpin_ends_one_or_all_and_no_other_owner(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        store.own(Owner(kind="folder", name="m", path=folder), [digest])
        store.pin(digest)
        for name in ("a", "b"):
            store.pin(digest, name)
        assert sorted(holders(store)) == sorted([DEFAULT_PIN, "a", "b", "m"])
        assert store.unpin(digest, "b") == ["b"]
        assert store.unpin(digest, "b") == []
        assert store.unpin(digest) == ["a", DEFAULT_PIN]
        assert holders(store) == ["m"]

    def test_pins_survive_the_loss_of_the_index(self, store: Store, digest: str) -> None:
        other = store.put_stream([OTHER]).digest
        store.pin(digest.upper(), "a")
        store.pin(digest, "b")
        store.pin(other, "a")
        store.unpin(digest, "b")
        store.unpin(other)
        store.rebuild()
        assert (holders(store), holders(store, other)) == (["a"], [])


class TestRemoved:
    def test_a_blob_is_gone_for_good_but_what_others_share_stays_theirs(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        blocks = allocated(blob_path(store))
        assert store.remove(digest.upper()) == blocks
        for ask in (store.get, store.remove):
            with row(ask), pytest.raises(BlobNotFoundError):
                ask(digest)
        assert (list(store.blobs()), store.history()) == ([], [])
        assert not store.verify(full=True).has_damage
        store.put_stream([WEIGHTS])
        store.place(digest, folder / "a.safetensors", kind="hardlink")
        assert store.remove(digest) == 0
        assert (folder / "a.safetensors").read_bytes() == WEIGHTS

    @pytest.mark.parametrize("holder", ["pin", "owner", "away"])
    def test_what_is_held_is_refused_by_name(
        self, store: Store, folder: Path, digest: str, holder: str
    ) -> None:
        hold_by("owner" if holder == "away" else holder, store, folder)
        if holder == "away":
            folder.rename(folder.with_name("unplugged"))
        with pytest.raises(BlobInUseError, match="mine") as caught:
            store.remove(digest)
        (name,) = vars(caught.value)["holders"]
        assert "mine" in name
        assert read(store) == WEIGHTS

    def test_dead_owners_are_no_reason_to_refuse(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        store.own(Owner(kind="folder", name="m", path=folder / "sub", root=folder), [digest])
        assert store.remove(digest) > 0

    def test_a_lost_blob_can_be_removed(self, store: Store, digest: str) -> None:
        edit(store.path_of(digest))
        assert store.verify().damaged == [digest]
        assert store.remove(digest) == 0
        assert store.verify().missing == []
