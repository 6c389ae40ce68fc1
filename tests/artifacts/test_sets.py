"""Sets: by name and fingerprint, with options of their own; listed, removed, verified."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.api import (
    ArtifactError,
    ArtifactSets,
    BadSetNameError,
    ConfigError,
    Options,
    SetFormatError,
    SetIndexDamagedError,
    SmartCache,
)
from tests.artifacts.meanwhile import Meanwhile
from tests.artifacts.opening import FINGERPRINT, array, engine_of, open_set
from tests.processes.artifact_writers import in_fork
from tests.processes.children import Child


class TestOpen:
    def test_another_fingerprint_is_another_set(self, sets: ArtifactSets) -> None:
        with sets.open("one", {"size": 512}) as first, sets.open("one", {"size": 512.0}) as second:
            first.put("key", 1)
            assert "key" not in second
            assert first.path.parent == second.path.parent
            assert first.id != second.id
        (one, other) = sets.infos("one")
        assert one.fingerprint is not None
        assert other.fingerprint is not None
        assert [each.path for each in one.fingerprint.differences(other.fingerprint)]

    def test_another_name_is_another_set(self, sets: ArtifactSets) -> None:
        with open_set(sets, "one") as first, open_set(sets, "two") as second:
            first.put("key", 1)
            assert "key" not in second

    @pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "a" * 101, "ä", "a\n", None])
    def test_a_bad_name_is_refused(self, sets: ArtifactSets, name: str) -> None:
        with pytest.raises(BadSetNameError) as caught:
            sets.open(name, FINGERPRINT)
        assert "letters" in caught.value.hint

    def test_the_folder_may_move(self, sets: ArtifactSets, tmp_path: Path) -> None:
        with open_set(sets) as opened:
            opened.put("key", {"x": array(1)})
        sets.root.rename(tmp_path / "elsewhere")
        with open_set(ArtifactSets(tmp_path / "elsewhere")) as opened:
            assert "key" in opened

    def test_a_cache_has_sets(self, tmp_path: Path) -> None:
        with SmartCache(tmp_path / "store") as cache:
            with cache.artifacts("one", fingerprint=FINGERPRINT, ttl=timedelta(days=1)) as opened:
                opened.put("key", 1)
            (info,) = cache.artifact_sets()
            assert (info.name, info.artifacts, info.options.ttl) == ("one", 1, 86400)
            assert cache.artifact_sets("two") == []
            assert info.path.is_relative_to(cache.store.root / "sets")

    def test_a_set_of_a_newer_format_is_refused(self, sets: ArtifactSets) -> None:
        with open_set(sets) as opened:
            path = opened.path / "set.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))
        with pytest.raises(SetFormatError, match="format 2"):
            open_set(sets)


class TestOptions:
    def test_they_are_kept_with_the_set(self, sets: ArtifactSets) -> None:
        with open_set(sets, max_size=10**6, ttl=timedelta(hours=1), evictable=False, durable=True):
            pass
        with open_set(sets) as opened:
            expected = Options(max_size=10**6, ttl=3600, evictable=False, durable=True)
            assert opened.describe().options == expected

    def test_those_that_are_given_replace_those_that_were(self, sets: ArtifactSets) -> None:
        with open_set(sets, max_size=10**6, ttl=60):
            pass
        with open_set(sets, ttl=120, evictable=False) as opened:
            expected = Options(max_size=10**6, ttl=120, evictable=False)
            assert opened.describe().options == expected

    def test_a_bound_can_be_taken_back(self, sets: ArtifactSets) -> None:
        with open_set(sets, max_size=10**6, ttl=60):
            pass
        with open_set(sets, max_size=math.inf) as opened:
            assert opened.describe().options == Options(ttl=60)
        with open_set(sets, ttl=math.inf) as opened:
            assert opened.describe().options == Options()
            opened.put("key", 1)
            assert engine_of(opened).index.expired(2**62) == []

    def test_they_hold_at_once_for_a_set_that_is_open(self, sets: ArtifactSets) -> None:
        with open_set(sets) as first, open_set(sets, max_size=1000, evictable=False) as second:
            assert first.describe().options == second.describe().options
            assert second.describe().options.max_size == 1000

    @pytest.mark.parametrize(
        "options", [{"max_size": 0}, {"max_size": -5}, {"ttl": 0}, {"ttl": timedelta(0)}]
    )
    def test_what_makes_no_sense_is_refused(
        self, sets: ArtifactSets, options: dict[str, Any]
    ) -> None:
        with pytest.raises(ConfigError):
            open_set(sets, **options)


class TestListing:
    def test_sets_are_listed_in_order(self, sets: ArtifactSets) -> None:
        for name in ("two", "one"):
            with open_set(sets, name) as opened:
                opened.put("key", {"x": array(1)})
        infos = sets.infos()
        assert [info.name for info in infos] == ["one", "two"]
        assert all(info.artifacts == 1 and info.live > 4096 for info in infos)

    def test_what_was_just_put_is_counted(self, sets: ArtifactSets) -> None:
        with open_set(sets) as opened:
            opened.put("key", 1)
            (info,) = sets.infos()
            assert info.artifacts == 1

    def test_there_may_be_none(self, sets: ArtifactSets) -> None:
        assert sets.infos() == []

    @pytest.mark.parametrize("what", ["index", "description", "no description"])
    def test_a_set_that_cannot_be_read_is_listed_with_its_problem(
        self, sets: ArtifactSets, what: str
    ) -> None:
        with open_set(sets, "bad") as bad, open_set(sets, "good"):
            path = bad.path
        if what == "index":
            (path / "index.sqlite3").write_bytes(b"no database" * 500)
        elif what == "description":
            (path / "set.json").write_bytes(b"{")
        else:
            (path / "set.json").unlink()
        problem, fine = sets.infos()
        assert (problem.name, fine.name) == ("bad", "good")
        assert problem.problem
        assert problem.on_disk > 0
        assert not fine.problem
        assert [plan.info.name for plan in sets.plan_prune().victims] == []

    def test_a_set_is_found_by_its_name_or_the_beginning_of_its_id(
        self, sets: ArtifactSets
    ) -> None:
        with sets.open("one", {"n": 1}) as first, sets.open("one", {"n": 2}) as second:
            assert {info.id for info in sets.find("one")} == {first.id, second.id}
            assert [info.id for info in sets.find(first.id[:8])] == [first.id]
            assert [info.id for info in sets.find(f"one/{second.id[:6]}")] == [second.id]
            with pytest.raises(BadSetNameError, match="no set 'two'"):
                sets.find("two")


class TestRemove:
    def test_a_removed_set_is_gone(self, sets: ArtifactSets) -> None:
        with open_set(sets, "one") as one, open_set(sets, "two"):
            one.put("key", {"x": array(1, 50_000)})
        plan = sets.plan_remove(sets.infos("one"))
        assert plan.freed_size > 50_000
        assert plan.artifacts == 1
        assert len(sets.infos()) == 2
        result = plan.execute()
        assert (result.sets, result.artifacts) == (1, 1)
        assert result.freed_size >= plan.freed_size
        assert [info.name for info in sets.infos()] == ["two"]
        assert [path.name for path in sets.root.iterdir()] == ["two"]

    def test_who_has_it_open_is_told(self, sets: ArtifactSets) -> None:
        with open_set(sets) as opened:
            opened.put("key", 1)
            assert not sets.plan_remove(sets.infos()).execute().problems
            with pytest.raises(ArtifactError, match="closed"):
                opened.put("key", 2)

    def test_it_can_be_made_again_at_once(self, sets: ArtifactSets) -> None:
        with open_set(sets) as old:
            old.put("key", 1)
            sets.plan_remove(sets.infos()).execute()
            with open_set(sets) as new:
                assert "key" not in new
                new.put("key", 2)
                new.flush()
                with Child(lambda: ArtifactSets(sets.root).infos()[0].artifacts) as child:
                    assert child.result() == 1

    def test_a_process_that_has_it_open_writes_nothing_to_files_that_are_gone(
        self, sets: ArtifactSets
    ) -> None:
        with open_set(sets) as opened:
            opened.put("key", 1)
            opened.flush()
            with Child(lambda: _remove_and_make(sets)) as child:
                child.result()
            with pytest.raises(ArtifactError, match="removed"):
                opened.put("key", 2)

    def test_what_a_killed_removal_has_left_is_cleared(self, sets: ArtifactSets) -> None:
        with open_set(sets) as opened:
            opened.put("key", {"x": array(1)})
            name = opened.path.parent

        def die(_: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        def remove() -> None:
            shutil.rmtree = die  # type: ignore[assignment] # the set is out of its place then
            sets.plan_remove(sets.infos()).execute()

        pid = in_fork(remove)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
        (left,) = os.listdir(name)
        assert left.startswith(".removed-")
        (name / ".removed-by-hand").mkdir()
        assert sets.infos() == []
        assert os.listdir(name) == [".removed-by-hand"]
        (name / ".removed-by-hand").rmdir()

    def test_it_waits_for_no_writer_for_ever(self, sets: ArtifactSets) -> None:
        """A problem is told; the other sets of the plan are removed all the same."""
        with open_set(sets, "one") as one, open_set(sets, "two"):
            one.put("key", 1)
            one.flush()
            path = one.path
        (path / "lock").unlink()
        (path / "lock").mkdir()  # nobody can have this one
        result = sets.plan_remove(sets.infos()).execute()
        assert result.sets == 1
        assert len(result.problems) == 1


class TestVerify:
    def test_a_whole_set_is_whole(self, sets: ArtifactSets) -> None:
        with open_set(sets, pack_bytes=10_000) as opened:
            opened.put_many((f"k{n}", {"x": array(n % 4)}) for n in range(9))
            opened.delete("k3")
            report = opened.verify()
        assert not report.has_damage
        assert report.damaged_records == 0
        assert (report.artifacts, report.damaged) == (8, [])
        assert report.read_size > 4 * 4096

    def test_what_is_damaged_is_named_and_counts_as_missing(self, sets: ArtifactSets) -> None:
        with open_set(sets) as opened:
            opened.put_many((f"k{n}", {"x": array(n)}) for n in range(3))
            opened.flush()
            pack = next(opened.path.glob("*.pack"))
            data = bytearray(pack.read_bytes())
            data[data.index(array(1).tobytes()) + 77] ^= 1
            pack.write_bytes(data)
            (report,) = sets.verify()
            assert report.damaged == ["k1"]
            assert report.has_damage
            assert set(opened) == {"k0", "k2"}
            assert not opened.verify().damaged

    def test_what_is_put_meanwhile_is_not_taken_for_damaged(self, sets: ArtifactSets) -> None:
        """In the middle of reading, an artifact is put and all packs are compacted."""
        with open_set(sets) as opened:
            opened.put_many((f"k{n}", {"x": array(n)}) for n in range(6))

            def meanwhile() -> None:
                opened.put("new", {"x": array(50)})
                opened.put("k1", {"x": array(51)})
                opened.delete("k2")
                opened.compact(force=True)

            report = opened.verify(progress=Meanwhile(meanwhile))
            assert report.damaged == []
            assert set(opened) == {"k0", "k1", "k3", "k4", "k5", "new"}

    def test_an_index_that_is_no_database_is_told_and_made_again(self, sets: ArtifactSets) -> None:
        with open_set(sets) as opened:
            opened.put("key", {"x": array(1)})
            path = opened.path
        (path / "index.sqlite3").write_bytes(b"no database" * 500)
        (report,) = sets.verify()
        assert not report.is_index_sound
        with pytest.raises(SetIndexDamagedError) as caught:
            open_set(sets)
        assert "--rebuild" in caught.value.hint
        assert sets.rebuild(sets.infos()[0]).artifacts == 1
        with open_set(sets) as opened:
            assert "key" in opened
            assert engine_of(opened).index.is_sound()


def _remove_and_make(sets: ArtifactSets) -> None:
    sets.plan_remove(sets.infos()).execute()
    open_set(sets).close()
