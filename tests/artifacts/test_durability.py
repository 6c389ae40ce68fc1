"""What survives power loss and full disks."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from tests.api import ArtifactSet, ArtifactSets, NoSpaceError, SmartcacheError
from tests.artifacts.opening import array, open_set
from tests.artifacts.rows import check_rows
from tests.store.small_disks import Disk, in_own_namespace


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """How much of each pack, by number, was in it when it was last synced."""
    found: dict[int, int] = {}
    real = os.fdatasync

    def fdatasync(fd: int) -> None:
        real(fd)
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        if name.endswith(".pack"):
            found[int(name.removesuffix(".pack"))] = os.fstat(fd).st_size

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    return found


def sizes(opened: ArtifactSet) -> dict[int, int]:
    return {int(path.stem): path.stat().st_size for path in opened.path.glob("*.pack")}


class TestSync:
    def test_a_plain_put_does_not_wait_for_the_disk(
        self, latents: ArtifactSet, synced: dict[int, int]
    ) -> None:
        latents.put("key", {"x": array(1)})
        latents.flush()
        assert synced == {}

    def test_a_durable_put_does(self, latents: ArtifactSet, synced: dict[int, int]) -> None:
        latents.put("key", {"x": array(1)}, durable=True)
        assert synced == sizes(latents)

    def test_all_puts_and_deletions_of_a_durable_set_do(
        self, sets: ArtifactSets, synced: dict[int, int]
    ) -> None:
        acts: list[Callable[[ArtifactSet], object]] = [
            lambda opened: opened.put("key", {"x": array(1)}),
            lambda opened: opened.put_many({"a": 1, "b": 2, "c": 3}),
            lambda opened: opened.delete("key"),
            lambda opened: opened.delete_many(["a", "b"]),
            lambda opened: opened.get_or_compute("new", lambda: 5),
        ]
        with open_set(sets, durable=True) as opened:
            for act in acts:
                act(opened)
                assert synced == sizes(opened)

    def test_a_put_may_go_without(self, sets: ArtifactSets, synced: dict[int, int]) -> None:
        with open_set(sets, durable=True) as opened:
            opened.put("key", {"x": array(1)}, durable=False)
            assert synced == {}

    def test_many_puts_share_one_sync_and_no_pack_is_left_out(
        self, sets: ArtifactSets, synced: dict[int, int]
    ) -> None:
        with open_set(sets, pack_bytes=20_000) as opened:
            opened.put_many(((f"k{n}", {"x": array(n)}) for n in range(30)), durable=True)
            assert len(sizes(opened)) > 4
            assert synced == sizes(opened)

    def test_sync_brings_all_that_was_put_to_the_disk(
        self, sets: ArtifactSets, synced: dict[int, int]
    ) -> None:
        with open_set(sets, pack_bytes=20_000) as opened:
            opened.put_many((f"k{n}", {"x": array(n)}) for n in range(30))
            assert synced == {}
            opened.sync()
            assert synced == sizes(opened)

    def test_compaction_syncs_the_copies_before_the_originals_go(
        self, latents: ArtifactSet, synced: dict[int, int]
    ) -> None:
        latents.put_many((f"k{n}", {"x": array(n)}) for n in range(5))
        latents.delete("k0")
        latents.compact(force=True)
        assert synced == sizes(latents)


SIZE = 40_000


class TestFullDisk:
    def test_a_put_says_so_and_loses_nothing(self, tmp_path: Path) -> None:
        def work() -> None:
            disk = Disk(tmp_path / "disk", 4 << 20)
            sets = ArtifactSets(disk.point / "sets")
            with open_set(sets) as opened:
                opened.put("k0", {"x": array(0, SIZE)})
                opened.flush()
                disk.fill(but=200)
                kept = _put_until_full(opened)
                assert len(kept) > 10
                with pytest.raises(NoSpaceError) as caught:
                    opened.put("one more", {"x": array(999, SIZE)})
                assert "No space left" in str(caught.value)
                for n in kept:
                    assert np.array_equal(opened.get(f"k{n}")["x"], array(n, SIZE))
                disk.clear()
                _check(opened, kept)
                opened.put("k999", {"x": array(999, SIZE)})
                _check(opened, {*kept, 999})
            with open_set(sets) as opened:
                _check(opened, {*kept, 999})
                check_rows(opened.path)

        in_own_namespace(work)

    def test_what_was_acknowledged_is_there_after_the_process_gave_up(self, tmp_path: Path) -> None:
        """Not even the rows of the last puts can be written; the pack has what they say."""

        def work() -> None:
            disk = Disk(tmp_path / "disk", 4 << 20)
            sets = ArtifactSets(disk.point / "sets")
            opened = open_set(sets)
            opened.put("k0", {"x": array(0, SIZE)})
            opened.flush()
            opened.put("k1", {"x": array(1, SIZE)})
            disk.fill()
            with pytest.raises(SmartcacheError):
                opened.put("k2", {"x": array(2, SIZE)})
            with suppress(SmartcacheError):
                opened.close()
            disk.clear()
            with open_set(sets) as opened:
                _check(opened, {0, 1})

        in_own_namespace(work)

    def test_a_compaction_that_finds_no_room_leaves_all_as_it_was(self, tmp_path: Path) -> None:
        def work() -> None:
            disk = Disk(tmp_path / "disk", 6 << 20)
            sets = ArtifactSets(disk.point / "sets")
            with open_set(sets) as opened:
                opened.put_many((f"k{n}", {"x": array(n, SIZE)}) for n in range(50))
                opened.delete("k0")
                opened.flush()
                disk.fill(but=40)
                with pytest.raises(NoSpaceError):
                    opened.compact(force=True)
                _check(opened, set(range(1, 50)))
                disk.clear()
                assert len(list(opened.path.glob("*.pack"))) == 1
                opened.compact(force=True)
                _check(opened, set(range(1, 50)))
                check_rows(opened.path)

        in_own_namespace(work)


def _put_until_full(opened: ArtifactSet) -> set[int]:
    kept: set[int] = set()
    for n in range(200):
        try:
            opened.put(f"k{n}", {"x": array(n, SIZE)})
        except NoSpaceError:
            return kept
        kept.add(n)
    pytest.fail("the disk was never full")


def _check(opened: ArtifactSet, numbers: set[int]) -> None:
    for n in numbers:
        assert np.array_equal(opened.get(f"k{n}")["x"], array(n, SIZE))
    assert set(opened) == {f"k{n}" for n in numbers}
