"""The figures of the store, against what the filesystem says."""

from __future__ import annotations

import os
import random
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from smartcache.errors import StoreError
from smartcache.store import index as store_index
from smartcache.store.records import Owner
from smartcache.store.store import Store
from smartcache.store.upkeep.prune import REBUILT
from tests.store.files import (
    OTHER,
    WEIGHTS,
    Watch,
    allocated,
    blob_path,
    row,
    snapshot,
    write,
)

if sys.platform == "win32":
    pytest.skip("link counts and blocks as POSIX has them", allow_module_level=True)


def owner_of(path: Path, root: Path | None = None) -> Owner:
    path.mkdir(parents=True, exist_ok=True)
    return Owner(kind="folder", name=path.name, path=path, root=root or path.parent)


class TestStore:
    def test_an_empty_store_has_no_blobs_and_nothing_to_free(self, store: Store) -> None:
        usage = store.usage()
        assert (usage.blobs, usage.logical, usage.physical, usage.shared) == (0, 0, 0, 0)
        assert (usage.only_smartcache, usage.reclaimable, usage.saved) == (0, 0, 0)
        assert (usage.owners, usage.root) == ((), store.root)

    def test_a_blob_counts_once_and_each_name_outside_as_a_copy_that_was_saved(
        self, store: Store, folder: Path
    ) -> None:
        """Names that come and go are seen at once."""
        digest = store.put_stream([WEIGHTS]).digest
        blocks = allocated(blob_path(store))
        paths = [folder / f"{name}.safetensors" for name in "abc"]
        for names in range(4):
            with row(names):
                usage = store.usage()
                assert (usage.blobs, usage.physical) == (1, blocks)
                assert usage.logical == max(1, names) * len(WEIGHTS)
                assert usage.saved == max(0, names - 1) * blocks
                alone = 0 if names else blocks
                assert (usage.shared, usage.only_smartcache) == (blocks - alone, alone)
                assert usage.reclaimable == alone
                if names < 3:
                    store.place(digest, paths[names], kind="hardlink")
        for path in paths:
            path.unlink()
        usage = store.usage()
        assert (usage.shared, usage.reclaimable, usage.only_smartcache) == (0, blocks, blocks)

    def test_looking_changes_nothing_and_says_how_far_it_is(
        self, store: Store, folder: Path
    ) -> None:
        for n in range(5):
            store.put_stream([bytes([n]) * 100])
        store.adopt(write(folder / "a.safetensors"))
        (folder / "a.safetensors").unlink()
        before, watch = snapshot(store.root), Watch()
        store.usage(progress=watch)
        assert snapshot(store.root) == before
        assert (watch.labels, watch.total, watch.done) == (["Looking at blobs"], 6, 6)

    def test_owners_say_what_they_hold_and_what_nobody_else_does(
        self, store: Store, folder: Path
    ) -> None:
        digests = [store.put_stream([bytes([n]) * 5000]).digest for n in range(10)]
        blocks = allocated(blob_path(store, digests[0]))
        every, some = owner_of(folder / "all"), owner_of(folder / "some")
        store.own(every, digests)
        store.own(owner_of(folder / "none"), [])
        for shared in (0, 1, 9, 10):
            with row(shared, "of 10 shared"):
                store.own(some, digests[:shared])
                usage = {owner.name: owner for owner in store.usage().owners}
                found = usage["all"]
                assert (found.blobs, found.size, found.allocated) == (10, 50_000, 10 * blocks)
                assert found.alone == (10 - shared) * blocks
                assert (usage["some"].alone, usage["some"].allocated) == (0, shared * blocks)
                assert (usage["none"].blobs, usage["none"].liveness) == (0, "live")

    def test_what_nobody_holds_any_more_is_reclaimable(self, store: Store, folder: Path) -> None:
        """Not what is pinned, held on an absent drive or by an owner, or linked."""
        digests = {
            name: store.put_stream([name.encode() * 2000]).digest
            for name in ("free", "pinned", "dead", "both", "away")
        }
        store.pin(digests["pinned"])
        store.own(owner_of(folder / "dead"), [digests["dead"], digests["both"]])
        store.own(owner_of(folder / "live"), [digests["both"]])
        store.own(owner_of(folder / "drive" / "away"), [digests["away"]])
        store.adopt(write(folder / "live" / "adopted", OTHER), owner=owner_of(folder / "live"))
        (folder / "live" / "adopted").unlink()
        (folder / "dead").rmdir()
        shutil.rmtree(folder / "drive")
        usage = store.usage()
        states = {owner.name: owner.liveness for owner in usage.owners}
        assert states == {"dead": "dead", "live": "live", "away": "away", "kept": "live"}
        free = {blob.digest for blob in store.blobs()} - set(digests.values())
        free |= {digests[name] for name in ("free", "dead")}
        assert usage.reclaimable == sum(allocated(blob_path(store, digest)) for digest in free)

    @pytest.mark.parametrize("seed", range(4))
    def test_reclaimable_is_what_prune_frees(
        self, store: Store, folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Names, owners and pins made and removed at random."""
        monkeypatch.setattr(store_index, "_LONG_PAGE", 2 * seed + 1)
        rnd = random.Random(seed)
        digests = [
            store.put_stream([rnd.randbytes(rnd.randrange(1, 30_000))]).digest for _ in range(40)
        ]
        owners = [owner_of(folder / f"owner-{n}" / "in", folder / f"owner-{n}") for n in range(5)]
        kinds = ("hardlink", "copy")
        for n, digest in enumerate(digests):
            if rnd.random() < 0.5:
                store.own(rnd.choice(owners), [digest])
            if rnd.random() < 0.2:
                store.pin(digest)
            for _ in range(rnd.randrange(3)):
                owner = rnd.choice([None, *owners])
                place = folder if owner is None or owner.path is None else owner.path
                name = place / f"{n}-{rnd.random()}.safetensors"
                store.place(digest, name, kind=rnd.choice(kinds), owner=owner)  # type: ignore[arg-type]
        for path in sorted(folder.rglob("*.safetensors")):
            if rnd.random() < 0.5:
                path.unlink()
        shutil.rmtree(owners[0].path or "")
        shutil.rmtree(owners[1].root or "")
        for blob in list(store.volume.index.blobs(order="digest"))[:10]:
            with suppress(StoreError):
                store.remove(blob.digest)
        usage = store.usage()
        plan = store.plan_prune()
        assert usage.reclaimable == plan.freed_size > 0
        assert plan.execute().freed_size == usage.reclaimable
        after = store.usage()
        assert after.reclaimable == 0
        assert after.physical == usage.physical - usage.reclaimable

    def test_what_lies_beside_the_blobs_is_counted_by_place(self, store: Store) -> None:
        layout = store.volume.layout
        for directory in (layout.bad, layout.tmp, layout.sets / "latents" / "1"):
            os.link(write(directory / "file", WEIGHTS), directory / "again")
            (directory / "symlink").symlink_to(store.root / "format")
        usage = store.usage()
        assert (usage.blobs, usage.physical, usage.reclaimable) == (0, 0, 0)
        assert usage.bad == allocated(layout.bad / "file")
        assert usage.tmp == allocated(layout.tmp / "file")
        assert usage.sets == allocated(layout.sets / "latents" / "1" / "file")
        assert usage.index >= allocated(layout.index) > 0
        assert usage.total == usage.bad + usage.tmp + usage.sets + usage.index

    def test_after_a_rebuild_the_figures_say_so(self, store: Store) -> None:
        assert not store.usage().is_rebuilt
        store.volume.index.set_note(REBUILT, "now")
        assert store.usage().is_rebuilt

    def test_a_blob_that_is_gone_counts_no_more_and_counts_again_when_it_is_back(
        self, store: Store, folder: Path
    ) -> None:
        digest = store.put_stream([WEIGHTS]).digest
        os.rename(blob_path(store), folder / "taken away")
        gone = store.usage()
        assert (gone.blobs, gone.physical) == (0, 0)
        assert store.verify().missing == [digest]
        os.rename(folder / "taken away", blob_path(store))
        back = store.usage()
        assert (back.blobs, back.physical) == (1, allocated(blob_path(store)))
