"""What nobody has a name of is removed, what anybody has stays, and the figures are true."""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from smartcache import errors
from smartcache.store import DEFAULT_PIN
from smartcache.store.prune import PrunePlan, PruneResult
from smartcache.store.store import Store
from tests.store.files import (
    OTHER,
    WEIGHTS,
    AtPoint,
    Watch,
    adopt,
    allocated,
    blob_path,
    dedup,
    digest_of,
    edit,
    hold_by,
    inode_of,
    killed,
    link_count,
    read,
    row,
    snapshot,
    write,
)
from tests.store.small_disks import PAGE, Disk, in_own_namespace

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX files")
PassTime = Callable[[float], None]
HOUR = 3600.0


def digests(plan: PrunePlan) -> list[str]:
    return [victim.digest for victim in plan.victims]


def put(store: Store, number: int, size: int = 8192) -> str:
    return store.put_stream([random.Random(number).randbytes(size)]).digest


class TestAlone:
    def test_what_only_the_store_has_goes(self, store: Store, digest: str) -> None:
        before = snapshot(store.root)
        plan = store.plan_prune()
        assert snapshot(store.root) == before, "planning changes nothing"
        (victim,) = plan.victims
        assert (victim.digest, victim.size, victim.reason) == (digest, len(WEIGHTS), "alone")
        assert plan.freed_size == victim.allocated == allocated(blob_path(store))
        result = plan.execute()
        assert (result.removed, result.kept, result.freed_size) == (1, 0, plan.freed_size)
        assert (list(store.blobs()), store.hashes_of(digest)) == ([], {})
        assert not store.has_journal
        assert plan.execute().freed_size == 0
        nothing = store.plan_prune()
        assert (nothing.victims, nothing.freed_size, nothing.warnings) == ((), 0, ())
        assert nothing.execute() == PruneResult(removed=0, freed_size=0, kept=0)

    @pytest.mark.parametrize("holder", ["pin", "hardlink", "stranger"])
    def test_what_somebody_has_stays_until_it_is_let_go(
        self, store: Store, folder: Path, digest: str, holder: str
    ) -> None:
        """Even if they come after the plan; size and age do not matter."""
        other = store.put_stream([OTHER]).digest
        early = store.plan_prune()
        hold_by(holder, store, folder, digest)
        late, release = store.plan_prune(), store.plan_release([digest, other])
        assert digests(late) == digests(release) == [other]
        result = early.execute()
        assert (result.removed, result.kept, store.has(other)) == (1, 1, False)
        assert read(store) == WEIGHTS
        assert store.plan_prune(max_size=0, unused_for=timedelta(seconds=-2)).victims == ()
        store.unpin(digest)
        (folder / "mine").unlink(missing_ok=True)
        assert digests(store.plan_prune()) == [digest]

    def test_of_a_deleted_cache_goes_what_no_one_has(self, store: Store, folder: Path) -> None:
        """`rm -rf`, with blobs that were adopted, deduplicated and placed. Copies keep nothing."""
        cache, placed = folder / "hub" / "models--a--b", b"placed" * 50_000
        pointers = []
        (cache / "snapshots" / "1").mkdir(parents=True)
        for name, data in (("model-1", WEIGHTS), ("model-2", OTHER)):
            write(cache / "blobs" / name, data)
            pointers.append(cache / "snapshots" / "1" / f"{name}.safetensors")
            pointers[-1].symlink_to(f"../../blobs/{name}")
        kept, again = write(folder / "b.safetensors", OTHER), write(cache / "blobs" / "again")
        adopt(store, pointers[0])
        dedup(store, kept, *pointers, again)
        digest = store.put_stream([placed]).digest
        store.place(digest, cache / "blobs" / "p.bin", kind="hardlink")
        copy = store.place(digest, folder / "copy.json", kind="copy").path
        size = sum(allocated(blob_path(store, digest_of(data))) for data in (WEIGHTS, placed))
        shutil.rmtree(folder / "hub")
        plan = store.plan_prune()
        assert set(digests(plan)) == {digest_of(WEIGHTS), digest}
        assert plan.execute().freed_size == plan.freed_size == size
        assert kept.read_bytes() == read(store, digest_of(OTHER)) == OTHER
        assert (copy.read_bytes(), store.usage().reclaimable) == (placed, 0)
        undone = {each.path: each.outcome for each in store.plan_undo().execute()}
        assert undone == {kept: "undone", copy: "left", cache / "blobs" / "model-2": "gone"}
        assert (kept.read_bytes(), link_count(kept)) == (OTHER, 1)

    def test_what_was_done_with_the_same_bytes_in_another_pool_can_be_undone(
        self, store: Store, elsewhere: Path
    ) -> None:
        store.put_stream([WEIGHTS])
        store.add_pool(elsewhere / "pool")
        dedup(store, *(write(elsewhere / name) for name in ("a.bin", "b.bin")))
        before = snapshot(elsewhere)
        assert store.plan_prune().execute().removed == 1
        assert snapshot(elsewhere) == before
        assert {each.outcome for each in store.plan_undo().execute()} == {"undone"}

    def test_more_than_a_chunk_goes_with_progress(self, store: Store) -> None:
        for number in range(300):
            store.put_stream([number.to_bytes(2)], durable=False)
        watch = Watch()
        assert store.plan_prune().execute(watch).removed == watch.done == watch.total == 300
        assert list(store.blobs()) == []

    def test_damaged_files_go_if_asked_for(self, store: Store, digest: str) -> None:
        edit(blob_path(store))
        assert store.plan_prune().execute().removed == 1, "that nobody knows of yet"
        store.put_stream([WEIGHTS])
        edit(blob_path(store))
        store.verify()
        assert store.plan_prune().victims == ()
        plan = store.plan_prune(with_bad=True)
        assert [(victim.digest, victim.reason) for victim in plan.victims] == [(digest, "bad")]
        assert plan.execute().freed_size == plan.freed_size > 0
        assert os.listdir(store.layout.bad) == []

    @pytest.mark.parametrize("how", ["adopted", "max_size", "no index"])
    def test_a_full_disk_is_freed(self, tmp_path: Path, how: str) -> None:
        """Also of what the journal knows, where there is none yet, and with no room for notes."""

        def prune() -> tuple[int, int, int, bool]:
            disk = Disk(tmp_path / "disk", 1000 * PAGE)
            with Store(disk.point / "store") as store:
                if how == "adopted":
                    path = write(disk.point / "a.bin", bytes(range(256)) * 1000)
                    adopt(store, path)
                    path.unlink()
                else:
                    put(store, 1, 256_000)
                if how == "no index":
                    store.forget_catalog()
            disk.fill()
            with Store(disk.point / "store") as store:
                result = store.plan_prune(max_size=0 if how == "max_size" else None).execute()
                left = len(list(store.blobs()))
            disk.clear()
            with Store(disk.point / "store") as store:
                store.put_stream([WEIGHTS])
                is_sound = not store.verify(full=True).has_damage and store.history() == []
            return result.removed, result.freed_size, left, is_sound

        assert in_own_namespace(prune) == (1, 63 * PAGE, 0, True)


class TestBySizeAndAge:
    def put_later(self, store: Store, pass_time: PassTime, count: int) -> list[str]:
        names = []
        for number in range(count):
            pass_time(2 * HOUR)
            names.append(put(store, number))
        return names

    def test_what_was_used_longest_ago_goes_first_and_no_more_than_needed(
        self, store: Store, folder: Path, pass_time: PassTime
    ) -> None:
        """What was opened or placed counts as used. Without an index the times of files count."""
        names = self.put_later(store, pass_time, 5)
        size = sum(allocated(blob_path(store, name)) for name in names)
        assert store.plan_prune(max_size=size).victims == ()
        assert digests(store.plan_prune(max_size=size - 1)) == names[:1]
        assert digests(store.plan_prune(max_size=0)) == names
        pass_time(2 * HOUR)
        store.open(names[0]).close()
        store.place(names[1], folder / "a.json", kind="copy")
        store.place(names[2], folder / "a.bin", kind="hardlink").path.unlink()
        plan = store.plan_prune(max_size=size * 3 // 5)
        oldest = [blob.digest for blob in store.blobs(order="oldest")][:2]
        assert digests(plan) == oldest == names[3:]
        assert {victim.reason for victim in plan.victims} == {"over size"}
        plan.execute()
        assert {blob.digest for blob in store.blobs()} == set(names[:3])
        store.rebuild()
        assert set(digests(store.plan_prune(max_size=0))) == set(names[:3])
        assert store.plan_prune(unused_for=timedelta(days=1)).victims == ()

    def test_what_is_pinned_counts_but_stays_and_what_others_share_does_not(
        self, store: Store, folder: Path, pass_time: PassTime
    ) -> None:
        held, free, shared = self.put_later(store, pass_time, 3)
        for name in ("one", "two"):
            store.pin(held, name)
        store.place(shared, folder / "a.bin", kind="hardlink")
        size = allocated(blob_path(store, held))
        for limit, warnings in ((size, 0), (size - 1, 1)):
            plan = store.plan_prune(max_size=limit)
            assert (digests(plan), len(plan.warnings)) == ([free], warnings)
        assert "1 B over the limit" in plan.warnings[0]

    def test_what_was_long_unused_goes_and_with_a_size_both(
        self, store: Store, pass_time: PassTime
    ) -> None:
        pass_time(-48 * HOUR)
        first = put(store, 1)
        pass_time(44 * HOUR)
        second = put(store, 2)
        pass_time(4 * HOUR)
        third = put(store, 3)
        size = allocated(blob_path(store, third))
        plan = store.plan_prune(unused_for=timedelta(days=1), max_size=size)
        found = [(victim.digest, victim.reason) for victim in plan.victims]
        assert found == [(first, "unused"), (second, "over size")]
        assert digests(store.plan_prune(unused_for=timedelta(days=1))) == [first]
        store.open(first).close()
        assert store.plan_prune(unused_for=timedelta(days=1)).victims == ()
        young_too = store.plan_prune(unused_for=timedelta(seconds=-2))
        assert set(digests(young_too)) == {first, second, third}


class TestLastMoment:
    def test_a_link_that_comes_while_others_are_removed_keeps_its_blob(
        self, store: Store, folder: Path, at_point: AtPoint
    ) -> None:
        last = blob_path(store, max(put(store, number) for number in range(3)))
        at_point("prune: blob removed", lambda: os.link(last, folder / "theirs"))
        result = store.plan_prune().execute()
        assert (result.removed, result.kept) == (2, 1)
        assert inode_of(folder / "theirs") == inode_of(last)
        assert not store.verify(full=True).has_damage

    def test_who_holds_a_blob_keeps_it_from_others(
        self, store: Store, digest: str, elsewhere: Path
    ) -> None:
        pools = store.layout, store.add_pool(elsewhere / "pool")
        far = store.put_stream([OTHER], pool=pools[1]).digest
        with store.holding() as holding, Store(store.root) as other:
            early = other.plan_prune()
            for each, pool in ((digest, pools[0]), (far, pools[1])):
                for _ in range(2):
                    holding.hold(each, pool)
            assert other.plan_release([digest, far]).victims == other.plan_prune().victims == ()
            assert early.execute().kept == 2
            assert (read(other), read(other, far)) == (WEIGHTS, OTHER)
            with pytest.raises(errors.BlobNotFoundError):
                holding.hold("0" * 64, pools[0])
        assert [os.listdir(pool.tmp) for pool in pools] == [[], []]
        assert digests(store.plan_prune()) == [digest, far]

    def test_a_blob_that_prune_removes_while_it_gets_held_has_its_name_again(
        self, store: Store, digest: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Prune has looked at the link count right before our link."""
        real, inode = os.link, inode_of(blob_path(store))

        def link_too_late(source: str, target: str, **more: bool) -> None:
            real(source, target, **more)
            monkeypatch.undo()
            blob_path(store).unlink()

        with store.holding() as holding:
            monkeypatch.setattr(os, "link", link_too_late)
            holding.hold(digest, store.layout)
            assert (read(store), inode_of(blob_path(store))) == (WEIGHTS, inode)

    def test_the_dead_hold_nothing(self, store: Store, digest: str) -> None:
        def die_while_holding() -> None:
            with Store(store.root) as mine, mine.holding() as holding:
                holding.hold(digest, mine.layout)
                mine.put_stream([OTHER])

        killed(die_while_holding, "put: made")
        assert link_count(blob_path(store)) == 2
        assert store.plan_prune().execute().removed == 1
        assert (list(store.blobs()), os.listdir(store.layout.tmp)) == ([], [])


class TestPinsAndRemoval:
    def test_a_pin_has_a_name_and_unpin_ends_one_or_all(self, store: Store, digest: str) -> None:
        other, folder = store.put_stream([OTHER]).digest, store.layout.pins
        store.pin(digest.upper())
        for name in ("a", "b", "a"):
            store.pin(digest, name)
        store.pin(other, "a")
        blob, counts = store.get(digest), {name: len(d) for name, d in store.pins().items()}
        assert (blob.pins, blob.names, blob.is_only_in_store) == (("a", "b", DEFAULT_PIN), 0, True)
        assert counts == {"a": 2, "b": 1, DEFAULT_PIN: 1}
        store.rebuild()
        assert store.get(digest).pins == ("a", "b", DEFAULT_PIN)
        assert store.unpin(digest, f"../blobs/{digest[:2]}") == []
        assert (store.unpin(digest, "b"), store.unpin(digest, "b")) == (["b"], [])
        assert store.unpin(digest) == ["a", DEFAULT_PIN]
        assert (store.pins(), os.listdir(folder)) == ({"a": [other]}, ["a"])
        store.unpin(other)
        for name in ("", ".", "..", "a/b", "../a", "\0"):
            with row(name), pytest.raises(errors.StoreError):
                store.pin(digest, name)
        assert os.listdir(folder) == []

    def test_a_blob_is_gone_for_good_but_what_others_share_stays_theirs(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        store.pin(digest, "mine")
        with pytest.raises(errors.BlobInUseError, match="mine") as caught:
            store.remove(digest)
        assert vars(caught.value)["holders"] == ["pin mine"]
        store.unpin(digest)
        blocks = allocated(blob_path(store))
        assert store.remove(digest.upper()) == blocks
        for ask in (store.get, store.remove):
            with row(ask), pytest.raises(errors.BlobNotFoundError):
                ask(digest)
        assert (list(store.blobs()), store.history()) == ([], [])
        store.put_stream([WEIGHTS])
        store.place(digest, folder / "a.safetensors", kind="hardlink")
        assert store.remove(digest) == 0
        assert (folder / "a.safetensors").read_bytes() == WEIGHTS
        assert not store.verify(full=True).has_damage
