"""What survives power loss and full disks."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smartcache.artifacts import ArtifactSet, ArtifactSets
from smartcache.artifacts.setfolder import SetFolder
from smartcache.errors import ArtifactError, NoSpaceError, SmartcacheError
from smartcache.system import faults as store_faults
from tests.artifacts.opening import array, check_whole, open_set, packs_of
from tests.processes.children import Child
from tests.store.files import raising, row
from tests.store.small_disks import Disk, in_own_namespace


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How much of each pack was in it when it was last synced."""
    found: dict[str, int] = {}
    real = os.fdatasync

    def fdatasync(fd: int) -> None:
        real(fd)
        name = os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))
        if name.endswith(".pack"):
            found[name] = os.fstat(fd).st_size

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    return found


def survivors(opened: ArtifactSet, synced: dict[str, int]) -> dict[str, Any]:
    """Return what there is after a power loss, if nothing stays but what was synced."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / opened.name / opened.id
        shutil.copytree(opened.path, path)
        for pack in path.glob("*.pack"):
            if pack.name in synced:
                os.truncate(pack, min(synced[pack.name], pack.stat().st_size))
            else:
                pack.unlink()
        with ArtifactSet(SetFolder.read(path), read_only=True) as left:
            return {key: left.get(key) for key in left}


class TestSync:
    def test_a_disk_that_refuses_is_named_and_puts_go_on_when_it_does_not(
        self, latents: ArtifactSet, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        message = r"Cannot bring .* to the disk: Input/output error"
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", raising(errno.EIO))
            with pytest.raises(ArtifactError, match=message):
                latents.put("lost", array(2), durable=True)
        latents.put("after", array(3), durable=True)
        assert np.array_equal(latents.get("after"), array(3))

    def test_a_plain_put_does_not_wait_for_the_disk(
        self, latents: ArtifactSet, synced: dict[str, int]
    ) -> None:
        latents.put("key", {"x": array(1)})
        latents.flush()
        assert synced == {}

    def test_a_durable_put_survives_with_all_its_tensors(
        self, sets: ArtifactSets, synced: dict[str, int]
    ) -> None:
        """Tensors that are equal to it are in packs that are lost."""
        with open_set(sets) as opened:
            opened.put("ours", {"x": array(1)})
            with Child(lambda: open_set(sets).put("theirs", {"x": array(1)})) as child:
                child.result()
            opened.put("key", {"x": array(1), "y": array(2)}, durable=True)
            opened.put("later", 1)
            found = survivors(opened, synced)
            assert np.array_equal(found["key"]["x"], array(1))
            assert np.array_equal(found["key"]["y"], array(2))
            assert found.keys() == {"ours", "key"}  # what came before it in its pack, and no more

    def test_all_puts_and_deletions_of_a_durable_set_survive(
        self, sets: ArtifactSets, synced: dict[str, int]
    ) -> None:
        acts: list[Callable[[ArtifactSet], object]] = [
            lambda opened: opened.put("key", 1),
            lambda opened: opened.put_many({"a": 1, "b": 2, "c": 3}),
            lambda opened: opened.delete("key"),
            lambda opened: opened.delete_many(["a", "b"]),
            lambda opened: opened.get_or_compute("new", lambda: 5),
            lambda opened: opened.compute_many(["one", "two"], lambda keys: keys),
        ]
        with open_set(sets, durable=True) as opened:
            for act in acts:
                act(opened)
                assert survivors(opened, synced) == {key: opened.get(key) for key in opened}
            synced.clear()
            opened.put("not this one", 1, durable=False)
            assert synced == {}

    def test_many_puts_share_one_sync_and_no_pack_is_left_out(
        self, sets: ArtifactSets, synced: dict[str, int]
    ) -> None:
        for how in ("put_many", "sync"):
            with row(how), open_set(sets, how, pack_bytes=20_000) as opened:
                values = ((f"k{n}", {"x": array(n)}) for n in range(20))
                opened.put_many(values, durable=how == "put_many")
                if how == "sync":
                    opened.sync()
                assert len(packs_of(opened)) > 4
                assert survivors(opened, synced).keys() == {f"k{n}" for n in range(20)}

    def test_copies_are_synced_before_the_originals_go(
        self, sets: ArtifactSets, synced: dict[str, int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen = []
        with open_set(sets, pack_bytes=20_000) as opened:
            opened.put_many(((f"k{n}", {"x": array(n)}) for n in range(15)), durable=True)
            opened.delete_many(["k0", "k6", "k11"])

            def look(point: str) -> None:
                if point == "compact: unlinked":
                    seen.append(survivors(opened, synced).keys() >= set(opened))

            monkeypatch.setattr(store_faults, "hook", look)
            opened.compact(force=True)
        assert len(seen) > 2
        assert all(seen)


SIZE = 40_000


class TestFullDisk:
    def test_a_put_says_so_and_loses_nothing(self, tmp_path: Path) -> None:
        def work() -> None:
            disk = Disk(tmp_path / "disk", 4 << 20)
            sets = ArtifactSets(disk.point / "sets")
            with open_set(sets) as opened:
                opened.put("k0", {"x": array(0, SIZE)})
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

        in_own_namespace(work)

    def test_what_was_acknowledged_is_there_after_the_process_gave_up(self, tmp_path: Path) -> None:
        """Not even a footer can be written; the records have all that it would say."""

        def work() -> None:
            disk = Disk(tmp_path / "disk", 4 << 20)
            sets = ArtifactSets(disk.point / "sets")
            opened = open_set(sets)
            opened.put("k0", {"x": array(0, SIZE)})
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
                disk.fill(but=40)
                with pytest.raises(NoSpaceError):
                    opened.compact(force=True)
                _check(opened, set(range(1, 50)))
                disk.clear()
                assert opened.compact(force=True).packs
                _check(opened, set(range(1, 50)))
                check_whole(opened)

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
