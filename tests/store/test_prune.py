"""What nobody wants any more is removed, what anybody wants stays, and the figures are true."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from smartcache.errors import BlobNotFoundError, PruneRefusedError
from smartcache.store.records import Owner
from smartcache.store.store import Store
from smartcache.store.upkeep.prune import PrunePlan
from tests.store.files import (
    OTHER,
    WEIGHTS,
    AtPoint,
    Watch,
    allocated,
    blob_path,
    digest_of,
    edit,
    hold_by,
    in_turn,
    read,
    row,
    snapshot,
    write,
)

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX files")
PassTime = Callable[[float], None]
DIGEST = digest_of(WEIGHTS)
HOUR = 3600.0
HOLDERS = pytest.mark.parametrize("holder", ["pin", "owner", "hardlink", "stranger"])


def digests(plan: PrunePlan) -> list[str]:
    return [victim.digest for victim in plan.victims]


def put(store: Store, number: int, size: int = 8192) -> str:
    return store.put_stream([random.Random(number).randbytes(size)]).digest


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
        before = snapshot(store.root)
        plan = store.plan_prune()
        assert snapshot(store.root) == before, "planning changes nothing"
        (victim,) = plan.victims
        assert (victim.digest, victim.size, victim.reason) == (digest, len(WEIGHTS), "unowned")
        assert plan.freed_size == victim.allocated == allocated(blob_path(store))
        result = plan.execute()
        assert (result.removed, result.kept, result.freed_size) == (1, 0, plan.freed_size)
        assert not blob_path(store).exists()
        assert list(store.blobs()) == []
        with pytest.raises(BlobNotFoundError):
            store.open(digest)
        assert plan.execute().removed == 0
        nothing = store.plan_prune()
        assert (nothing.victims, nothing.freed_size, nothing.warnings) == ((), 0, ())
        assert nothing.execute().removed == 0

    @HOLDERS
    def test_what_somebody_holds_stays_even_if_they_come_after_the_plan(
        self, store: Store, folder: Path, digest: str, holder: str
    ) -> None:
        other = store.put_stream([OTHER]).digest
        early = store.plan_prune()
        hold_by(holder, store, folder, digest)
        late = store.plan_prune()
        held = allocated(blob_path(store))
        assert digests(late) == [other]
        assert late.held_size == (0 if holder in ("hardlink", "stranger") else held)
        result = early.execute()
        assert (result.removed, result.kept) == (1, 1)
        assert read(store) == WEIGHTS
        with pytest.raises(BlobNotFoundError):
            store.open(other)
        assert store.plan_prune(max_size=0, unused_for=timedelta(seconds=-2)).victims == ()

    def test_copies_hold_nothing(self, store: Store, folder: Path, digest: str) -> None:
        store.place(digest, folder / "a.json", kind="copy")
        store.plan_prune().execute()
        assert (folder / "a.json").read_bytes() == WEIGHTS
        assert list(store.blobs()) == []

    def test_a_link_that_went_leaves_a_blob_that_can_go(self, store: Store, folder: Path) -> None:
        path = folder / "mine"
        owner = Owner(kind="folder", name="models", path=folder)

        def link() -> None:
            hold_by("hardlink", store, folder)

        ways: dict[str, Callable[[], object]] = {
            "adopted": lambda: store.adopt(write(path), owner=owner),
            "placed": link,
            "undone": in_turn(link, lambda: store.plan_undo().execute()),
            "stranger": in_turn(lambda: hold_by("stranger", store, folder), lambda: read(store)),
        }
        for name, come in ways.items():
            with row(name):
                if name != "adopted":
                    store.put_stream([WEIGHTS])
                come()
                path.unlink(missing_ok=True)
                plan = store.plan_prune()
                assert (digests(plan), plan.warnings) == ([DIGEST], ())
                assert freed_truly(store, plan) > 0
                assert list(store.blobs()) == []

    def test_more_than_a_chunk_goes_with_progress(self, store: Store) -> None:
        for number in range(150):
            store.put_stream([number.to_bytes(2)])
        watch = Watch()
        assert store.plan_prune().execute(watch).removed == 150
        assert (watch.done, watch.total) == (150, 150)
        assert not any(p.is_file() for p in store.volume.layout.blobs.rglob("??/*"))

    def test_a_damaged_blob_can_go_too_and_what_is_gone_already_is_not_counted(
        self, store: Store, digest: str
    ) -> None:
        edit(blob_path(store, digest))
        assert store.plan_prune().execute().removed == 1
        store.put_stream([WEIGHTS])
        blob_path(store).unlink()
        assert store.plan_prune().execute().freed_size == 0


class TestBySizeAndAge:
    def put_later(self, store: Store, pass_time: PassTime, count: int) -> list[str]:
        names = []
        for number in range(count):
            pass_time(2 * HOUR)
            names.append(put(store, number))
        return names

    def test_the_least_recently_used_go_first_and_no_more_than_needed(
        self, store: Store, folder: Path, pass_time: PassTime
    ) -> None:
        """What was opened or placed counts as used."""
        names = self.put_later(store, pass_time, 4)
        size = sum(allocated(blob_path(store, name)) for name in names)
        assert store.plan_prune(max_size=size).victims == ()
        assert digests(store.plan_prune(max_size=size - 1)) == names[:1]
        assert digests(store.plan_prune(max_size=0)) == names
        pass_time(2 * HOUR)
        store.open(names[0]).close()
        store.place(names[1], folder / "a.json", kind="copy")
        plan = store.plan_prune(max_size=size // 2)
        assert digests(plan) == names[2:]
        assert {victim.reason for victim in plan.victims} == {"over size"}
        plan.execute()
        assert {blob.digest for blob in store.blobs()} == set(names[:2])

    def test_what_is_held_counts_for_the_size_but_stays_and_what_others_share_does_not(
        self, store: Store, folder: Path, pass_time: PassTime
    ) -> None:
        held, free, shared = self.put_later(store, pass_time, 3)
        store.pin(held)
        store.place(shared, folder / "a.bin", kind="hardlink")
        size = allocated(blob_path(store, held))
        for limit, warnings in ((size, 0), (size - 1, 1)):
            plan = store.plan_prune(max_size=limit)
            assert (digests(plan), len(plan.warnings)) == ([free], warnings)
        assert "1 B over the limit" in plan.warnings[0]

    def test_what_was_not_used_for_an_age_goes(self, store: Store, pass_time: PassTime) -> None:
        pass_time(-48 * HOUR)
        old = put(store, 1)
        pass_time(48 * HOUR)
        young = put(store, 2)
        plan = store.plan_prune(unused_for=timedelta(days=1))
        assert [(v.digest, v.reason) for v in plan.victims] == [(old, "unused")]
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
        size = allocated(blob_path(store, put(store, 3)))
        plan = store.plan_prune(unused_for=timedelta(days=1), max_size=size)
        found = [(victim.digest, victim.reason) for victim in plan.victims]
        assert found == [(first, "unused"), (second, "over size")]


class TestOwners:
    def test_a_deleted_owner_holds_nothing(self, store: Store, folder: Path, digest: str) -> None:
        revision = folder / "revision"
        revision.mkdir()
        store.own(Owner(kind="repo", name="a/b", path=revision, root=folder), [digest])
        assert store.plan_prune().victims == ()
        revision.rmdir()
        assert digests(store.plan_prune()) == [digest]

    def test_a_root_that_vanished_as_a_whole_keeps_what_it_owns_until_it_is_given_up(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        store.own(Owner(kind="folder", name="models", path=folder), [digest])
        folder.rename(folder.with_name("unplugged"))
        plan = store.plan_prune()
        assert plan.victims == ()
        (warning,) = plan.warnings
        assert "models" in warning
        assert "kept" in warning
        store.pin(digest)
        assert store.plan_prune(drop_away=True).victims == (), "somebody else lives"
        store.unpin(digest)
        plan = store.plan_prune(drop_away=True)
        assert digests(plan) == [digest]
        assert "models" in plan.warnings[0]
        assert plan.execute().removed == 1


class TestRecheck:
    def test_a_victim_that_went_or_came_again_meanwhile_is_kept_out_of_the_count(
        self, store: Store, digest: str
    ) -> None:
        plan = store.plan_prune()
        store.remove(digest)
        result = plan.execute()
        assert (result.removed, result.freed_size) == (0, 0)
        store.put_stream([WEIGHTS])
        store.pin(digest)
        assert plan.execute().removed == 0

    def test_a_link_made_at_the_very_last_moment_frees_nothing(
        self, store: Store, folder: Path, digest: str, at_point: AtPoint
    ) -> None:
        """The row is gone by then: only the name goes, and the bytes are the other link's."""
        path = blob_path(store, digest)
        at_point("prune: rows removed", lambda: os.link(path, folder / "theirs"))
        assert store.plan_prune().execute().freed_size == 0
        assert (folder / "theirs").read_bytes() == WEIGHTS

    def test_after_a_rebuild_nothing_is_removed_until_it_is_allowed_or_a_scan_was_made(
        self, store: Store, folder: Path, digest: str
    ) -> None:
        """Owners that were known when a plan was made may be missing from the index by now."""
        plan = store.plan_prune()
        store.own(Owner(kind="folder", name="m", path=folder), [digest])
        store.rebuild()
        with pytest.raises(PruneRefusedError):
            plan.execute()
        with pytest.raises(PruneRefusedError) as caught:
            store.plan_prune()
        assert "--after-rebuild" in caught.value.hint
        assert blob_path(store).exists()
        assert digests(store.plan_prune(after_rebuild=True)) == [digest]
        store.confirm_links()
        assert digests(store.plan_prune()) == [digest]


class TestBad:
    def test_damaged_files_stay_unless_asked_for(self, store: Store, digest: str) -> None:
        edit(blob_path(store))
        store.verify()
        assert store.plan_prune().victims == ()
        plan = store.plan_prune(with_bad=True)
        assert [(victim.digest, victim.reason) for victim in plan.victims] == [(digest, "bad")]
        assert freed_truly(store, plan) > 0
        assert list(store.volume.layout.bad.iterdir()) == []

    def test_what_is_reported_is_what_the_filesystem_gives_back(
        self, store: Store, folder: Path
    ) -> None:
        """Shared and sparse: those count by their blocks."""
        names = [put(store, n, size) for n, size in enumerate((1, 4096, 4097, 100_000, 65_536))]
        store.place(names[3], folder / "a.bin", kind="hardlink")
        path = write(folder / "sparse.bin", b"x")
        os.truncate(path, 50_000_000)
        store.adopt(path)
        path.unlink()
        plan = store.plan_prune()
        assert 0 < freed_truly(store, plan) == plan.freed_size < 1_000_000
