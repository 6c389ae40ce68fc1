"""Packs: taken over by the next writer, taken in from another folder, with room reserved."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from smartcache.artifacts import ArtifactSet, ArtifactSets
from smartcache.artifacts.engine import packs as artifacts_packs
from smartcache.errors import SetFormatError
from smartcache.system.filesystems import mount_of
from tests.artifacts.opening import array, check_whole, open_set, packs_of, seal, size_of
from tests.processes.artifact_writers import in_fork
from tests.processes.children import Child

MEGABYTE = 1 << 20


class TestShortLivedWriters:
    def test_hundreds_one_after_the_other_leave_one_pack(
        self, sets: ArtifactSets, rounds: Callable[[int], int]
    ) -> None:
        count = rounds(200)
        for n in range(count):
            with open_set(sets) as opened:
                opened.put(f"k{n}", n)
        with open_set(sets) as opened:
            assert len(packs_of(opened)) == 1
            assert {key: opened.get(key) for key in opened} == {f"k{n}": n for n in range(count)}
            assert size_of(opened) < count * 4096
            check_whole(opened)

    def test_thirty_processes_some_at_a_time_leave_a_handful(self, sets: ArtifactSets) -> None:
        def write(writer: int) -> None:
            with open_set(sets) as opened:
                for n in range(5):
                    opened.put(f"{writer} {n}", {"x": array(writer), "n": n})

        for start in range(0, 30, 6):
            with ExitStack() as stack:
                children = [
                    stack.enter_context(Child(partial(write, writer)))
                    for writer in range(start, start + 6)
                ]
                for child in children:
                    child.result()
        with open_set(sets) as opened:
            assert len(packs_of(opened)) <= 6
            assert set(opened) == {f"{writer} {n}" for writer in range(30) for n in range(5)}
            for writer in range(30):
                assert np.array_equal(opened.get(f"{writer} 4")["x"], array(writer))
            check_whole(opened)

    def test_killed_ones_leave_packs_that_are_gone_on_with(self, sets: ArtifactSets) -> None:
        def write(turn: int) -> None:
            opened = open_set(sets)
            opened.put(f"k{turn}", {"x": array(turn)})
            os.kill(os.getpid(), signal.SIGKILL)

        for turn in range(6):
            assert os.waitpid(in_fork(partial(write, turn)), 0)[1] == signal.SIGKILL
        with open_set(sets) as opened:
            assert set(opened) == {f"k{turn}" for turn in range(6)}
            assert len(packs_of(opened)) == 1
            check_whole(opened)


class TestTakeIn:
    """A pack of the same set that was written in another folder, on another host for instance."""

    @pytest.fixture
    def here(self, sets: ArtifactSets) -> ArtifactSet:
        opened = open_set(sets)
        opened.put_many({"key": "here", "gone": "here", "ours": 5, "only there": 7})
        opened.pin("only there")
        opened.unpin("only there")
        return opened

    @pytest.fixture
    def pack(self, here: ArtifactSet, tmp_path: Path) -> Path:
        """Written later than all that is here, by two writers, with a footer of each."""
        with open_set(ArtifactSets(tmp_path / "there")) as opened:
            assert opened.id == here.id
            for n in range(80):
                opened.put(f"many{n}", n)
            opened.put("key", "old of there")
        with open_set(ArtifactSets(tmp_path / "there")) as opened:
            opened.put("key", "there")
            opened.put("gone", 1)
            opened.delete("gone")
            opened.put("only there", {"x": array(1)})
            opened.pin("only there")
            (path,) = packs_of(opened)
        return path

    def test_what_is_not_a_pack_is_refused(self, here: ArtifactSet, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("not a pack")
        with pytest.raises(SetFormatError, match="is not a pack"):
            here.take_in(tmp_path / "notes.txt")

    def test_merely_copied_it_counts_as_used_when_it_came(
        self, here: ArtifactSet, pack: Path, sets: ArtifactSets
    ) -> None:
        """Its sequence numbers are no times here: all of it would be unused since 1970."""
        shutil.copy(pack, here.path)
        assert here.get("many7") == 7
        here.flush()
        plan = sets.plan_prune(unused_for=timedelta(days=1))
        assert not plan.artifacts

    @staticmethod
    def everywhere(here: ArtifactSet, sets: ArtifactSets, **expected: object) -> None:
        """Compare some values with what this, another and a new process finds."""

        def found() -> dict[str, object]:
            with open_set(sets) as opened:
                return {key: opened.get(key) for key in expected}

        assert {key: here.get(key) for key in expected} == expected
        chosen = here.select(list(expected))
        there = [n for n, value in enumerate(expected.values()) if value is not None]
        assert sorted({*range(len(expected))} - {*chosen.missing.tolist()}) == there
        with Child(found) as child:
            assert child.result() == expected
        here.close()
        assert found() == expected

    def test_its_artifacts_are_newer_than_what_is_there(
        self, here: ArtifactSet, sets: ArtifactSets, pack: Path
    ) -> None:
        assert here.take_in(pack) >= 83
        assert np.array_equal(here.get("only there")["x"], array(1))
        assert pack.exists()
        self.everywhere(here, sets, key="there", gone=None, ours=5, many79=79)

    def test_one_that_was_moved_into_the_folder_is_taken_in_where_it_lies(
        self, here: ArtifactSet, sets: ArtifactSets, pack: Path
    ) -> None:
        """So does who delivers it; until then it is older than everything that is there."""
        moved = pack.rename(here.path / pack.name)
        before = moved.stat().st_ino
        assert (here.get("key"), here.get("many79")) == ("here", 79)
        here.take_in(moved)
        assert moved.stat().st_ino == before
        self.everywhere(here, sets, key="there", gone=None, ours=5, many79=79)

    def test_that_it_is_gone_is_noticed(self, here: ArtifactSet, pack: Path) -> None:
        count = here.take_in(pack)
        (here.path / pack.name).unlink()
        assert here.verify().lost_packs == {pack.stem: count}

    def test_what_is_put_or_deleted_later_is_newer(
        self, here: ArtifactSet, sets: ArtifactSets, pack: Path
    ) -> None:
        here.take_in(pack)
        here.put("key", "later")
        here.delete("many7")
        assert here.compact(force=True).packs
        self.everywhere(here, sets, key="later", many7=None, many8=8, ours=5)

    def test_a_second_time_it_counts_as_put_now(
        self, here: ArtifactSet, sets: ArtifactSets, pack: Path
    ) -> None:
        here.take_in(pack)
        seal(here)
        here.put("key", "between")
        here.delete("many7")
        here.take_in(pack)
        self.everywhere(here, sets, key="there", many7=7, ours=5)

    def test_compaction_keeps_all_of_it(
        self, here: ArtifactSet, sets: ArtifactSets, pack: Path
    ) -> None:
        here.take_in(pack)
        for n in range(80):
            here.put(f"many{n}", -n)
        here.compact(force=True)
        here.put("more", 1)
        here.delete("more")
        here.compact(force=True)
        assert pack.name not in [path.name for path in packs_of(here)]
        check_whole(here)
        self.everywhere(here, sets, key="there", gone=None, ours=5, many9=-9)

    @pytest.mark.parametrize("is_whole", [True, False])
    def test_merely_copied_it_ranks_below_all(
        self, here: ArtifactSet, sets: ArtifactSets, pack: Path, is_whole: bool
    ) -> None:
        """Also if its footer is gone, and records have to be scanned."""
        shutil.copy(pack, here.path)
        if not is_whole:
            os.truncate(here.path / pack.name, pack.stat().st_size - 64)
        assert not here.is_pinned("only there")
        here.put("later", 1)
        values = {"key": "here", "gone": "here", "only there": 7, "many79": 79, "later": 1}
        self.everywhere(here, sets, **values)

    def test_it_has_to_be_one_of_this_set_and_finished(
        self, here: ArtifactSet, sets: ArtifactSets, pack: Path, tmp_path: Path
    ) -> None:
        with open_set(sets, "another") as another:
            another.put("key", 1)
            (other,) = packs_of(another)
            with pytest.raises(SetFormatError, match="pack of another set"):
                here.take_in(other)
        torn = tmp_path / pack.name
        torn.write_bytes(pack.read_bytes()[:-64])
        with pytest.raises(SetFormatError, match="not finished"):
            here.take_in(torn)
        self.everywhere(here, sets, key="here", gone="here")


class TestReserved:
    """Room behind the end of a pack comes back, also after a kill."""

    @pytest.fixture(autouse=True)
    def _on_ext4(self, tmp_path: Path) -> None:
        if mount_of(tmp_path).fstype != "ext4":
            pytest.skip("only ext4 is asked for room")

    def test_a_large_pack_has_room_while_it_is_written(self, sets: ArtifactSets) -> None:
        with open_set(sets) as opened:
            path = put_some(opened, 10)
            assert MEGABYTE < spare(path) <= path.stat().st_size
        assert spare(path) < MEGABYTE // 4
        with open_set(sets) as opened:
            assert len(opened) == 10
            assert opened.verify().damaged == []

    def test_a_small_pack_has_none(self, latents: ArtifactSet) -> None:
        assert spare(put_some(latents, 2)) < MEGABYTE // 4

    def test_what_a_killed_writer_has_left_is_given_back(self, sets: ArtifactSets) -> None:
        def write() -> None:
            put_some(open_set(sets), 10)
            os.kill(os.getpid(), signal.SIGKILL)

        assert os.waitpid(in_fork(write), 0)[1] == signal.SIGKILL
        with open_set(sets) as opened:
            opened.put("more", 1)
            (path,) = packs_of(opened)
            assert len(opened) == 11
        assert spare(path) < MEGABYTE // 4

    def test_a_disk_that_is_nearly_full_is_left_alone(
        self, sets: ArtifactSets, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(artifacts_packs, "_SPARE", 1 << 40)
        with open_set(sets) as opened:
            assert spare(put_some(opened, 10)) < MEGABYTE // 4


def put_some(opened: ArtifactSet, megabytes: int) -> Path:
    for number in range(megabytes):
        opened.put(f"k{number}", array(number, MEGABYTE))
    (path,) = packs_of(opened)
    return path


def spare(path: Path) -> int:
    """Return the bytes that the file takes and does not have."""
    found = path.stat()
    return found.st_blocks * 512 - found.st_size
