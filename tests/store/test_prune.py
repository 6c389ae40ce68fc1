from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from tests.api import BlobNotFoundError, Owner, PrunePlan, PruneRefusedError, Store
from tests.store.files import OTHER, WEIGHTS, Watch, allocated, digest_of, edit, snapshot, write

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX files")
PassTime = Callable[[float], None]
HOUR = 3600.0


@pytest.fixture
def digest(store: Store) -> str:
    return store.put_stream([WEIGHTS]).digest


def digests(plan: PrunePlan) -> list[str]:
    return [victim.digest for victim in plan.victims]


def put(store: Store, number: int, size: int = 8192) -> str:
    return store.put_stream([random.Random(number).randbytes(size)]).digest


def blob_path(store: Store, digest: str) -> Path:
    return Path(store.volume.layout.blob(digest))


def freed_truly(store: Store, plan: PrunePlan) -> int:
    """Execute a plan; what it reports must be the blocks of inodes whose last link went."""
    files = [path for path in store.root.rglob("*") if path.is_file() and "index" not in path.name]
    opened = {os.stat(path).st_ino: os.open(path, os.O_RDONLY) for path in files}
    try:
        result = plan.execute()
        stats = [os.fstat(descriptor) for descriptor in opened.values()]
        assert result.freed_size == sum(s.st_blocks * 512 for s in stats if s.st_nlink == 0)
    finally:
        for descriptor in opened.values():
            os.close(descriptor)
    return result.freed_size


class TestUnowned:
    def test_what_nobody_holds_goes(self, store: Store, digest: str) -> None:
        plan = store.plan_prune()
        (victim,) = plan.victims
        assert (victim.digest, victim.size, victim.reason) == (digest, len(WEIGHTS), "unowned")
        assert plan.freed_size == victim.allocated == allocated(blob_path(store, digest))
        result = plan.execute()
        assert (result.removed, result.kept) == (1, 0)
        assert result.freed_size == plan.freed_size
        assert not blob_path(store, digest).exists()
        assert list(store.blobs()) == []
        with pytest.raises(BlobNotFoundError):
            store.open(digest)

    @pytest.mark.usefixtures("digest")
    def test_planning_changes_nothing(self, store: Store) -> None:
        before = snapshot(store.root)
        store.plan_prune()
        assert snapshot(store.root) == before

    def test_an_empty_store_has_nothing_to_prune(self, store: Store) -> None:
        plan = store.plan_prune()
        assert (plan.victims, plan.freed_size, plan.warnings) == ((), 0, ())
        assert plan.execute().removed == 0

    @pytest.mark.parametrize("holder", ["pin", "owner", "symlink", "hardlink", "stranger"])
    def test_what_somebody_holds_stays(
        self, store: Store, folder: Path, digest: str, holder: str
    ) -> None:
        if holder == "pin":
            store.pin(digest)
        elif holder == "owner":
            store.own(Owner(kind="folder", name="m", path=folder), [digest])
        elif holder == "stranger":
            os.link(blob_path(store, digest), folder / "theirs")
        else:
            store.place(digest, folder / "a.safetensors", kind=holder)  # type: ignore[arg-type]
        plan = store.plan_prune()
        assert plan.victims == ()
        held = allocated(blob_path(store, digest))
        assert plan.held_size == (0 if holder in ("hardlink", "stranger") else held)

    def test_copies_hold_nothing(self, store: Store, folder: Path, digest: str) -> None:
        store.place(digest, folder / "a.json", kind="copy")
        store.plan_prune().execute()
        assert (folder / "a.json").read_bytes() == WEIGHTS
        assert list(store.blobs()) == []

    @pytest.mark.parametrize("how", ["adopted", "placed", "stranger", "moved", "undone"])
    def test_a_link_that_went_leaves_a_blob_that_can_go(
        self, store: Store, folder: Path, how: str
    ) -> None:
        path = folder / "a.safetensors"
        if how in ("adopted", "moved"):
            write(path)
        else:
            store.put_stream([WEIGHTS])
        if how == "adopted":
            store.adopt(path)
        elif how == "moved":
            store.unpin(store.put_file(path, how="move").digest)
        elif how == "stranger":
            os.link(blob_path(store, digest_of(WEIGHTS)), path)
            store.open(digest_of(WEIGHTS)).close()
        else:
            store.place(digest_of(WEIGHTS), path, kind="hardlink")
        if how == "undone":
            store.plan_undo().execute()
        else:
            path.unlink(missing_ok=True)
        plan = store.plan_prune()
        assert digests(plan) == [digest_of(WEIGHTS)]
        assert freed_truly(store, plan) > 0
        assert list(store.blobs()) == []

    def test_more_than_a_chunk_goes_with_progress(self, store: Store) -> None:
        for number in range(150):
            store.put_stream([number.to_bytes(2)])
        watch = Watch()
        assert store.plan_prune().execute(watch).removed == 150
        assert (watch.done, watch.total) == (150, 150)
        assert not any(p.is_file() for p in store.volume.layout.blobs.rglob("??/*"))

    def test_a_damaged_blob_can_go_too(self, store: Store, digest: str) -> None:
        edit(blob_path(store, digest))
        assert store.plan_prune().execute().removed == 1

    def test_what_is_gone_already_is_not_counted(self, store: Store, digest: str) -> None:
        blob_path(store, digest).unlink()
        assert store.plan_prune().execute().freed_size == 0


class TestBySizeAndAge:
    def test_the_least_recently_used_go_first_down_to_the_size(
        self, store: Store, pass_time: PassTime
    ) -> None:
        first, second, third = (self.put_later(store, n, pass_time) for n in range(3))
        pass_time(2 * HOUR)
        store.open(first).close()
        size = allocated(blob_path(store, first))
        plan = store.plan_prune(max_size=size)
        assert digests(plan) == [second, third]
        assert {victim.reason for victim in plan.victims} == {"over size"}
        plan.execute()
        assert [blob.digest for blob in store.blobs()] == [first]

    def test_no_more_goes_than_needed(self, store: Store, pass_time: PassTime) -> None:
        names = [self.put_later(store, n, pass_time) for n in range(4)]
        size = sum(allocated(blob_path(store, name)) for name in names)
        assert store.plan_prune(max_size=size).victims == ()
        assert digests(store.plan_prune(max_size=size - 1)) == names[:1]
        assert digests(store.plan_prune(max_size=0)) == names

    def test_what_is_placed_counts_as_used(
        self, store: Store, folder: Path, pass_time: PassTime
    ) -> None:
        first, second = (self.put_later(store, n, pass_time) for n in range(2))
        pass_time(1)
        store.place(first, folder / "a.json", kind="copy")
        assert digests(store.plan_prune(max_size=8192)) == [second]

    def test_what_is_held_counts_for_the_size_but_stays(
        self, store: Store, pass_time: PassTime
    ) -> None:
        held = self.put_later(store, 1, pass_time)
        free = self.put_later(store, 2, pass_time)
        store.pin(held)
        size = allocated(blob_path(store, held))
        plan = store.plan_prune(max_size=size)
        assert digests(plan) == [free]
        plan = store.plan_prune(max_size=size - 1)
        assert digests(plan) == [free]
        assert len(plan.warnings) == 1
        assert "1 B over the limit" in plan.warnings[0]

    def test_what_others_share_does_not_count_for_the_size(
        self, store: Store, folder: Path
    ) -> None:
        name = put(store, 1)
        store.place(name, folder / "a.bin", kind="hardlink")
        plan = store.plan_prune(max_size=0)
        assert (plan.victims, plan.warnings) == ((), ())

    def test_what_was_not_used_for_an_age_goes(self, store: Store, pass_time: PassTime) -> None:
        pass_time(-48 * HOUR)
        old = put(store, 1)
        pass_time(48 * HOUR)
        young = put(store, 2)
        plan = store.plan_prune(unused_for=timedelta(days=1))
        assert digests(plan) == [old]
        assert plan.victims[0].reason == "unused"
        store.open(old).close()
        assert store.plan_prune(unused_for=timedelta(days=1)).victims == ()
        young_too = store.plan_prune(unused_for=timedelta(seconds=-2))
        assert sorted(digests(young_too)) == sorted([old, young])

    def test_age_and_size_together_take_both(self, store: Store, pass_time: PassTime) -> None:
        pass_time(-48 * HOUR)
        first = put(store, 1)
        pass_time(44 * HOUR)
        second = put(store, 2)
        pass_time(4 * HOUR)
        third = put(store, 3)
        size = allocated(blob_path(store, third))
        plan = store.plan_prune(unused_for=timedelta(days=1), max_size=size)
        assert [(v.digest, v.reason) for v in plan.victims] == [
            (first, "unused"),
            (second, "over size"),
        ]

    @pytest.mark.parametrize("options", [{"max_size": 0}, {"unused_for": timedelta(0)}])
    def test_pins_stay_whatever_is_asked(
        self, store: Store, pass_time: PassTime, options: dict[str, object]
    ) -> None:
        pass_time(-HOUR)
        store.pin(put(store, 1))
        pass_time(HOUR)
        assert store.plan_prune(**options).victims == ()  # type: ignore[arg-type]

    def put_later(self, store: Store, number: int, pass_time: PassTime) -> str:
        pass_time(2 * HOUR)
        return put(store, number)


class TestOwners:
    def test_a_file_removed_inside_an_existing_folder_is_no_holder_any_more(
        self, store: Store, folder: Path
    ) -> None:
        owner = Owner(kind="folder", name="models", path=folder)
        blob = store.adopt(write(folder / "a.safetensors"), owner=owner)
        (folder / "a.safetensors").unlink()
        plan = store.plan_prune()
        assert digests(plan) == [blob.digest]
        assert plan.warnings == ()

    def test_a_deleted_owner_holds_nothing(self, store: Store, folder: Path, digest: str) -> None:
        revision = folder / "revision"
        revision.mkdir()
        store.own(Owner(kind="repo", name="a/b", path=revision, root=folder), [digest])
        assert store.plan_prune().victims == ()
        revision.rmdir()
        assert digests(store.plan_prune()) == [digest]

    def test_a_root_that_vanished_as_a_whole_keeps_what_it_owns_with_a_warning(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        store.own(Owner(kind="folder", name="models", path=folder), [digest])
        folder.rename(folder.with_name("unplugged"))
        plan = store.plan_prune()
        assert plan.victims == ()
        (warning,) = plan.warnings
        assert "models" in warning
        assert "kept" in warning

    def test_what_a_vanished_root_owns_can_be_given_up(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        store.own(Owner(kind="folder", name="models", path=folder), [digest])
        folder.rename(folder.with_name("unplugged"))
        plan = store.plan_prune(drop_away=True)
        assert digests(plan) == [digest]
        assert "models" in plan.warnings[0]
        assert plan.execute().removed == 1

    def test_a_live_holder_beside_one_that_is_away_keeps_the_blob(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        store.own(Owner(kind="folder", name="models", path=folder), [digest])
        store.pin(digest)
        folder.rename(folder.with_name("unplugged"))
        assert store.plan_prune(drop_away=True).victims == ()


class TestRecheck:
    """Whoever wants a victim between plan and removal keeps it."""

    @pytest.mark.parametrize("holder", ["pin", "owner", "symlink", "hardlink", "stranger"])
    def test_a_victim_that_is_wanted_again_stays(
        self, store: Store, folder: Path, digest: str, holder: str
    ) -> None:
        other = store.put_stream([OTHER]).digest
        plan = store.plan_prune()
        if holder == "pin":
            store.pin(digest)
        elif holder == "owner":
            store.own(Owner(kind="folder", name="m", path=folder), [digest])
        elif holder == "stranger":
            os.link(blob_path(store, digest), folder / "theirs")
        else:
            store.place(digest, folder / "a.safetensors", kind=holder)  # type: ignore[arg-type]
        result = plan.execute()
        assert (result.removed, result.kept) == (1, 1)
        with store.open(digest) as file:
            assert file.read() == WEIGHTS
        with pytest.raises(BlobNotFoundError):
            store.open(other)

    def test_a_victim_that_went_meanwhile_is_kept_out_of_the_count(
        self, store: Store, digest: str
    ) -> None:
        plan = store.plan_prune()
        store.forget(digest, to_trash=False)
        result = plan.execute()
        assert (result.removed, result.freed_size) == (0, 0)

    def test_a_link_made_at_the_very_last_moment_frees_nothing(
        self,
        store: Store,
        folder: Path,
        digest: str,
        at_point: Callable[[str, Callable[[], object]], None],
    ) -> None:
        """The row is gone by then: only the name goes, and the bytes are the other link's."""
        plan = store.plan_prune()
        path = blob_path(store, digest)
        at_point("prune: rows removed", lambda: os.link(path, folder / "theirs"))
        assert plan.execute().freed_size == 0
        assert (folder / "theirs").read_bytes() == WEIGHTS

    @pytest.mark.usefixtures("digest")
    def test_a_plan_executed_twice_removes_once(self, store: Store) -> None:
        plan = store.plan_prune()
        assert plan.execute().removed == 1
        assert plan.execute().removed == 0

    def test_bytes_that_came_again_are_a_victim_like_before(
        self, store: Store, digest: str
    ) -> None:
        plan = store.plan_prune()
        store.plan_prune().execute()
        store.put_stream([WEIGHTS])
        store.pin(digest)
        assert plan.execute().removed == 0


class TestAfterRebuild:
    def test_a_rebuilt_index_makes_prune_refuse(self, store: Store, digest: str) -> None:
        store.rebuild()
        with pytest.raises(PruneRefusedError) as caught:
            store.plan_prune()
        assert "--after-rebuild" in caught.value.hint
        assert blob_path(store, digest).exists()

    def test_it_can_be_allowed(self, store: Store, digest: str) -> None:
        store.rebuild()
        assert digests(store.plan_prune(after_rebuild=True)) == [digest]

    def test_a_scan_ends_it(self, store: Store, digest: str) -> None:
        store.rebuild()
        store.confirm_links()
        assert digests(store.plan_prune()) == [digest]

    @pytest.mark.usefixtures("digest")
    def test_a_lost_index_makes_prune_refuse_too(self, store: Store) -> None:
        store.close()
        for path in store.root.glob("index.sqlite3*"):
            path.unlink()
        with Store(store.root) as again, pytest.raises(PruneRefusedError):
            again.plan_prune()

    def test_a_plan_from_before_a_rebuild_removes_nothing(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        """Owners that were known when the plan was made may be missing from the index by now."""
        plan = store.plan_prune()
        store.own(Owner(kind="folder", name="m", path=folder), [digest])
        store.rebuild()
        with pytest.raises(PruneRefusedError):
            plan.execute()
        assert blob_path(store, digest).exists()


class TestTrashAndBad:
    def test_the_trash_is_emptied(self, store: Store, digest: str) -> None:
        blocks = allocated(blob_path(store, digest))
        store.forget(digest)
        plan = store.plan_prune()
        (victim,) = plan.victims
        assert (victim.digest, victim.reason) == (digest, "trash")
        assert plan.freed_size == plan.execute().freed_size == blocks
        assert list(store.volume.layout.trash.iterdir()) == []

    def test_after_that_nothing_of_it_is_known(self, store: Store, digest: str) -> None:
        store.forget(digest)
        store.plan_prune().execute()
        assert store.history() == []
        report = store.verify(full=True)
        assert (report.missing, report.blobs) == ([], 0)
        assert list(store.blobs()) == []

    def test_trash_that_others_share_frees_nothing(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        store.place(digest, folder / "a.bin", kind="hardlink")
        store.forget(digest)
        plan = store.plan_prune()
        assert plan.freed_size == plan.execute().freed_size == 0
        assert (folder / "a.bin").read_bytes() == WEIGHTS

    def test_a_blob_that_came_out_of_the_trash_meanwhile_stays(
        self, store: Store, digest: str
    ) -> None:
        store.forget(digest)
        plan = store.plan_prune()
        store.plan_undo().execute()
        store.pin(digest)
        assert plan.execute().freed_size == 0
        with store.open(digest) as file:
            assert file.read() == WEIGHTS

    def test_damaged_files_stay_unless_asked_for(self, store: Store, digest: str) -> None:
        edit(blob_path(store, digest))
        store.verify()
        assert store.plan_prune().victims == ()
        plan = store.plan_prune(with_bad=True)
        (victim,) = plan.victims
        assert (victim.digest, victim.reason) == (digest, "bad")
        assert freed_truly(store, plan) > 0
        assert list(store.volume.layout.bad.iterdir()) == []


class TestFreed:
    def test_what_is_reported_is_what_the_filesystem_gives_back(
        self, store: Store, folder: Path
    ) -> None:
        names = [put(store, n, size) for n, size in enumerate((1, 4096, 4097, 100_000, 65_536))]
        store.place(names[3], folder / "a.bin", kind="hardlink")
        store.forget(names[1])
        plan = store.plan_prune()
        assert freed_truly(store, plan) == plan.freed_size > 0

    def test_sparse_blobs_count_by_their_blocks(self, store: Store, folder: Path) -> None:
        path = folder / "sparse.bin"
        path.write_bytes(b"x")
        os.truncate(path, 50_000_000)
        store.unpin(store.put_file(path, how="move").digest)
        plan = store.plan_prune()
        assert plan.freed_size == plan.execute().freed_size < 1_000_000
