"""Leaving: the store goes, and files are as if smartcache had never been there."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from smartcache.errors import BlobInUseError, NoSpaceError
from smartcache.store.store import Store
from smartcache.system import filesystems
from tests.store.files import (
    OTHER,
    WEIGHTS,
    Watch,
    adopt,
    dedup,
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

if sys.platform != "linux":
    pytest.skip("hard links and leases", allow_module_level=True)

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
    adopt(store, files / "a.safetensors")
    dedup(store, files / "b.safetensors")
    store.put_stream([OTHER])
    dedup(store, *(files / f"two names, {name}" for name in ("one", "two")))


def place(store: Store, files: Path) -> None:
    for kind in ("hardlink", "copy"):
        store.place(DIGEST, files / f"new-{kind}.bin", kind=kind)


def is_gone(store: Store) -> bool:
    """Nothing of the store is left, nor anything beside it."""
    names = os.listdir(store.root.parent)
    return not [name for name in names if name.startswith(store.root.name)]


def nothing(_: Store) -> None:
    pass


def lose_index(store: Store) -> None:
    store.rebuild()


def lose_blob(store: Store) -> None:
    store.remove(digest_of(OTHER))


class TestRestored:
    @pytest.mark.parametrize("harm", [nothing, lose_index, lose_blob])
    def test_files_are_as_before_and_placed_links_become_ordinary_files(
        self, store: Store, files: Path, harm: Callable[[Store], None]
    ) -> None:
        before = snapshot(files)
        use(store, files)
        place(store, files)
        harm(store)
        results = store.plan_eject().execute()
        assert [done.note for done in results if not done.is_undone] == []
        for kind in ("hardlink", "copy"):
            path = files / f"new-{kind}.bin"
            assert path.read_bytes() == WEIGHTS
            assert (mode_of(path) & 0o600, link_count(path)) == (0o600, 1)
            path.unlink()
        if harm is lose_blob:  # each has a copy of its own now
            (files / "two names, two").unlink()
            os.link(files / "two names, one", files / "two names, two")
        assert snapshot(files) == before
        assert is_gone(store)
        with Store(store.root) as again:
            assert list(again.blobs()) == []

    @pytest.mark.parametrize("is_journal_lost", [False, True])
    def test_of_placed_links_one_keeps_the_inode_and_each_is_a_file(
        self, store: Store, files: Path, is_journal_lost: bool
    ) -> None:
        """Of names without an entry the index tells."""
        digest = store.put_stream([b"placed"]).digest
        paths = [files / name for name in ("one.bin", "two.bin")]
        for path in paths:
            store.place(digest, path, kind="hardlink")
        inode = inode_of(paths[0])
        if is_journal_lost:
            store.close()
            for lost in store.root.glob("journal.*"):
                lost.unlink()
        with Store(store.root) as again:
            plan = again.plan_eject()
            assert len(plan.links if is_journal_lost else plan.changes) == 2
            plan.execute()
        assert is_gone(store)
        assert {mode_of(path) for path in paths} == {0o644}
        assert [inode_of(path) for path in paths].count(inode) == 1
        edit(paths[0])
        assert paths[1].read_bytes() == b"placed"

    def test_what_others_did_since_stays_and_does_not_stop_it(
        self, store: Store, files: Path
    ) -> None:
        use(store, files)
        store.plan_undo().execute()
        (files / "a.safetensors").chmod(0o600)  # undone before, and changed since
        kept = snapshot(files)
        names = ("edited", "renamed over", "link now", "linked, renamed over", "gone")
        paths = [write(files / name, f"{name}".encode(), mode=0o664) for name in names]
        adopt(store, *paths[:3])
        for path in paths[1], paths[3]:
            store.put_stream([path.read_bytes()])
            dedup(store, path)
            os.replace(write(files / "x", b"theirs", mode=0o400), path)
        edit(paths[0])
        paths[2].unlink()
        paths[4].unlink()
        other = store.put_stream([OTHER]).digest
        placed = [paths[2], files / "one.bin", files / "two.bin", files / "copy.bin"]
        for path in placed:
            store.place(other, path, kind="copy" if path.name == "copy.bin" else "hardlink")
        for path in placed[2:]:
            edit(path)
        store.plan_eject().execute()
        assert is_gone(store)
        assert (paths[0].read_bytes(), mode_of(paths[0])) == (b"EDITED", 0o664)
        for path in paths[1], paths[3]:
            assert (path.read_bytes(), mode_of(path)) == (b"theirs", 0o400)
        assert not paths[4].exists()
        for path in placed:
            assert path.read_bytes() == b"EDITED" + OTHER[6:]
            assert mode_of(path) & 0o200
        assert len({inode_of(path) for path in placed}) == 4
        now = snapshot(files)
        assert {name: now[name] for name in kept} == kept

    def test_while_a_file_is_elsewhere_the_store_stays(self, store: Store, files: Path) -> None:
        before = snapshot(files)
        use(store, files)
        files.rename(files.with_name("elsewhere"))
        outcomes = {done.outcome for done in store.plan_eject().execute()}
        assert outcomes == {"renamed"}
        assert read(store) == WEIGHTS
        files.with_name("elsewhere").rename(files)
        store.plan_eject().execute()
        assert snapshot(files) == before
        assert is_gone(store)

    def test_a_pool_on_another_filesystem_goes_too(
        self, store: Store, files: Path, elsewhere: Path
    ) -> None:
        far = [write(elsewhere / name, age=500) for name in ("a.bin", "b.bin")]
        before = snapshot(files), snapshot(elsewhere)
        store.add_pool(elsewhere / "pool")
        use(store, files)
        assert [each.outcome for each in dedup(store, *far)] == ["became", "linked"]
        plan = store.plan_eject()
        assert plan.pools == (elsewhere / "pool",)
        plan.execute()
        assert (snapshot(files), snapshot(elsewhere)) == before
        assert is_gone(store)

    def test_an_empty_store_just_goes_with_what_a_killed_eject_left(self, store: Store) -> None:
        store.put_stream([])
        store.plan_prune().execute()
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
        assert {path.read_bytes() for path in (folder / "away").iterdir()} == {WEIGHTS}


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
        assert (plan.root, len(plan.changes), len(plan.links)) == (store.root, 6, 0)
        assert plan.freed_size == alone.allocated

    def test_without_space_nothing_is_begun_and_progress_is_told_every_byte(
        self, store: Store, files: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        use(store, files)
        before, plan, watch = snapshot(files), store.plan_eject(), Watch()
        with monkeypatch.context() as patch:
            patch.setattr(filesystems, "free_bytes", lambda _: len(WEIGHTS) - 1)
            with pytest.raises(NoSpaceError):
                plan.execute()
        assert snapshot(files) == before
        plan.execute(watch)
        assert watch.done == watch.total == plan.needed_size > len(WEIGHTS)
        assert "b.safetensors" in watch.names


class TestKept:
    """The last copy of what somebody wants to keep does not go, unless that is allowed."""

    def test_a_pinned_blob_that_only_the_store_has(self, store: Store, files: Path) -> None:
        """Whether it never had a link or lost it, before the plan or after."""
        path = files / "x.safetensors"
        ways: dict[str, Callable[[], object]] = {
            "put": lambda: store.put_stream([WEIGHTS]),
            "adopted": lambda: adopt(store, write(path)),
            "placed": lambda: store.place(DIGEST, path, kind="hardlink"),
        }
        for name in ("a.safetensors", "b.safetensors"):
            (files / name).unlink()
        before = snapshot(files)
        for name, keep in ways.items():
            with row(name):
                keep()
                path.unlink(missing_ok=True)
                early = store.plan_eject()
                store.pin(DIGEST)
                for plan in (early, store.plan_eject()):
                    with pytest.raises(BlobInUseError) as caught:
                        plan.execute()
                    assert vars(caught.value)["digests"] == (DIGEST,)
                assert plan.pinned_only == (DIGEST,)
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
        inode = inode_of(files / "a.safetensors")
        adopt(store, files / "a.safetensors")
        store.put_stream([OTHER])
        store.place(digest_of(OTHER), files / "new.bin", kind="hardlink")
        for digest in (DIGEST, digest_of(OTHER)):
            store.pin(digest)
        plan = store.plan_eject()
        assert plan.needed_size == 0
        plan.execute()
        assert is_gone(store)
        assert (files / "a.safetensors").read_bytes() == WEIGHTS
        assert (inode_of(files / "a.safetensors"), mode_of(files / "a.safetensors")) == (
            inode, 0o664
        )  # fmt: skip
        assert (files / "new.bin").read_bytes() == OTHER

    def test_artifact_sets(self, store: Store, files: Path) -> None:
        use(store, files)
        before = snapshot(files)
        kept = write(store.root / "sets" / "latents" / "0123" / "x.pack", b"computed").parent
        plan = store.plan_eject()
        assert (plan.sets, plan.sets_size > 0) == ((kept,), True)
        with pytest.raises(BlobInUseError):
            plan.execute()
        assert snapshot(files) == before
        assert (kept / "x.pack").read_bytes() == b"computed"
        store.plan_eject(drop_sets=True).execute()
        assert is_gone(store)
