"""Sets: by name and fingerprint, with options of their own; listed, removed, verified."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from smartcache.artifacts import ArtifactSet, ArtifactSets, Fingerprint
from smartcache.artifacts.setfolder import Options, SetFolder
from smartcache.cache import SmartCache
from smartcache.errors import ArtifactError, BadSetNameError, ConfigError, SetFormatError
from tests.artifacts.meanwhile import Meanwhile
from tests.artifacts.opening import FINGERPRINT, array, check_whole, open_set, packs_of, seal
from tests.processes.artifact_writers import in_fork
from tests.processes.children import Child
from tests.store.files import row


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

    def test_another_name_is_another_set_and_a_closed_one_says_so(self, sets: ArtifactSets) -> None:
        with open_set(sets, "one") as first, open_set(sets, "two") as second:
            first.put("key", 1)
            assert "key" not in second
            assert repr(second).endswith(": 0 artifacts>")
        assert repr(second).endswith(": closed>")

    def test_a_bad_name_is_refused(self, sets: ArtifactSets) -> None:
        names: list[Any] = ["", "..", "a/b", ".hidden", "a" * 101, "ä", "a\n", None]
        for name in names:
            with row(name), pytest.raises(BadSetNameError) as caught:
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
        path.write_text(json.dumps({**json.loads(path.read_text()), "format": 3}))
        with pytest.raises(SetFormatError, match="format 3"):
            open_set(sets)

    def test_a_set_of_the_first_format_is_refused_and_can_be_removed(
        self, sets: ArtifactSets
    ) -> None:
        with open_set(sets, "latents") as opened:
            path = opened.path / "set.json"
        path.write_text(json.dumps({"format": 1, "name": "latents", "id": opened.id}))
        with pytest.raises(
            SetFormatError, match=r"made by an older smartcache \(format 1\)"
        ) as old:
            open_set(sets, "latents")
        assert f"'smartcache artifacts rm latents/{opened.id}'" in old.value.hint
        (info,) = sets.find(f"latents/{opened.id}")
        assert info.cure == old.value.hint
        assert sets.plan_remove([info]).execute().sets == 1
        assert sets.infos() == []

    def test_its_file_shows_the_fingerprint_as_it_is(self, sets: ArtifactSets) -> None:
        fingerprint = {"vae": "naïve", "size": 512, "scale": 1.0, "crop": [0, {"w": None}]}
        with sets.open("one", fingerprint) as opened:
            text = (opened.path / "set.json").read_text("utf-8")
        assert json.loads(text)["fingerprint"] == fingerprint
        assert '"vae": "naïve"' in text

    def test_whoever_makes_a_set_first_names_its_instance(self, sets: ArtifactSets) -> None:
        """With a second name, packs that were written under the first would be foreign."""
        fingerprints = [Fingerprint.of({"n": number}) for number in range(40)]
        start = threading.Barrier(4)

        def make() -> list[str]:
            found = []
            for each in fingerprints:
                start.wait()
                found.append(SetFolder.make(sets.root, "one", each, Options()).instance)
            return found

        with ThreadPoolExecutor(4) as pool:
            one, *others = [future.result() for future in [pool.submit(make) for _ in range(4)]]
        assert len(set(one)) == len(fingerprints)
        assert all(len(each) == 16 for each in one)
        assert others == [one] * 3
        changed = SetFolder.make(sets.root, "one", fingerprints[0], Options(ttl=5))
        assert changed.with_options(Options(ttl=9)).instance == one[0]
        assert SetFolder.read(changed.path).instance == one[0]


class TestOptions:
    def test_they_are_kept_with_the_set_until_others_are_given(self, sets: ArtifactSets) -> None:
        """Those hold at once, also for a set that is open."""
        hour = timedelta(hours=1)
        open_set(sets, max_size=10**6, ttl=hour, evictable=False, durable=True).close()
        expected = Options(max_size=10**6, ttl=3600, evictable=False, durable=True)
        with open_set(sets) as first:
            assert first.describe().options == expected
            with open_set(sets, ttl=120, max_size=1000) as second:
                changed = replace(expected, ttl=120, max_size=1000)
                assert first.describe().options == second.describe().options == changed

    def test_a_bound_can_be_taken_back(
        self, sets: ArtifactSets, pass_time: Callable[[float], None]
    ) -> None:
        with open_set(sets, max_size=10**6, ttl=60):
            pass
        with open_set(sets, max_size=math.inf) as opened:
            assert opened.describe().options == Options(ttl=60)
        with open_set(sets, ttl=math.inf) as opened:
            assert opened.describe().options == Options()
            opened.put_many((f"k{n}", {"x": array(n, 100_000)}) for n in range(12))
            pass_time(61)
            assert opened.evict().artifacts == 0
            assert len(opened) == 12

    def test_what_makes_no_sense_is_refused(self, sets: ArtifactSets) -> None:
        """By puts too."""
        for size in (0, -5, "3GB"):
            with row(size), pytest.raises(ConfigError):
                open_set(sets, max_size=size)
        ttls: list[Any] = [0, -1, "30d", timedelta(0)]
        for ttl in ttls:
            with row(ttl), pytest.raises(ConfigError):
                open_set(sets, ttl=ttl)
            with open_set(sets) as opened:
                with row(ttl), pytest.raises(ConfigError, match="ttl must be a number above 0"):
                    opened.put("key", 1, ttl=ttl)
                assert "key" not in opened


class TestListing:
    def test_sets_are_listed_in_order(self, sets: ArtifactSets) -> None:
        assert sets.infos() == []
        for name in ("two", "one"):
            with open_set(sets, name) as opened:
                opened.put("key", {"x": array(1)})
        infos = sets.infos()
        assert [info.name for info in infos] == ["one", "two"]
        assert all(info.artifacts == 1 and info.live > 4096 for info in infos)

    def test_a_set_that_cannot_be_read_is_listed_with_its_problem(self, sets: ArtifactSets) -> None:
        with open_set(sets, "bad") as bad, open_set(sets, "good"):
            bad.put("key", {"x": array(1)})
            description = bad.path / "set.json"
        damages: tuple[Callable[[], object], ...] = (
            lambda: description.write_bytes(b"{"),
            description.unlink,
        )
        for damage in damages:
            damage()
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
                with Child(lambda: ArtifactSets(sets.root).infos()[0].artifacts) as child:
                    assert child.result() == 1

    def test_a_process_that_has_it_open_writes_nothing_to_files_that_are_gone(
        self, sets: ArtifactSets
    ) -> None:
        with open_set(sets) as opened:
            opened.put("key", 1)
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
        assert report.damage == []
        assert (report.artifacts, report.damaged) == (8, [])
        assert report.read_size > 4 * 4096

    def test_what_is_damaged_is_named_and_counts_as_missing(self, sets: ArtifactSets) -> None:
        with open_set(sets) as opened:
            opened.put_many((f"k{n}", {"x": array(n)}) for n in range(3))
            (pack,) = packs_of(opened)
            data = bytearray(pack.read_bytes())
            data[data.index(array(1).tobytes()) + 77] ^= 1
            pack.write_bytes(data)
            (report,) = sets.verify()
            assert report.damaged == ["k1"]
            assert report.damage == ["1 artifact is damaged"]
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

    @pytest.mark.parametrize("data", [None, b"no database" * 500])
    def test_an_index_that_is_lost_or_no_database_loses_no_artifact(
        self, sets: ArtifactSets, caplog: pytest.LogCaptureFixture, data: bytes | None
    ) -> None:
        with open_set(sets, pack_bytes=10_000) as opened:
            opened.put_many((f"k{n}", {"x": array(n)}) for n in range(9))
            opened.delete("k3")
            opened.pin("k1")
            opened.get("k2")
            path = opened.path
        for file in path.glob("index.sqlite3*"):
            file.unlink()
        if data is not None:
            (path / "index.sqlite3").write_bytes(data)
        with open_set(sets) as opened:
            assert set(opened) == {f"k{n}" for n in range(9) if n != 3}
            assert opened.is_pinned("k1")
            opened.touch("k2")
            check_whole(opened)
            (info,) = sets.infos()
            assert not info.problem
        assert ("begins anew" in caplog.text) == (data is not None)
        assert len(list(path.glob("index.sqlite3.damaged-*"))) == (data is not None)

    def test_a_rebuild_makes_footers_again_and_brings_nothing_back(
        self, sets: ArtifactSets
    ) -> None:
        with open_set(sets, pack_bytes=15_000) as opened:
            opened.put_many((f"k{n}", {"x": array(n), "n": n}) for n in range(9))
            opened.put("k1", {"x": array(50), "n": 50})
            opened.delete_many(["k0", "k4"])
            for n in (2, 5, 6):
                opened.pin(f"k{n}")
            opened.unpin("k5")
            path = opened.path
        for pack in path.glob("*.pack"):
            with open(pack, "r+b") as file:
                file.truncate(pack.stat().st_size - 64)  # its `end` is gone
        with open_set(sets) as opened:
            for _ in range(2):
                assert set(opened) == {f"k{n}" for n in (1, 2, 3, 5, 6, 7, 8)}
                assert opened.get("k1")["n"] == 50
                assert [opened.is_pinned(f"k{n}") for n in (2, 5, 6)] == [True, False, True]
                done = sets.rebuild(sets.infos()[0])
                assert done.artifacts == 7
            assert done.footers == 0
            check_whole(opened)


def _remove_and_make(sets: ArtifactSets) -> None:
    sets.plan_remove(sets.infos()).execute()
    open_set(sets).close()


class TestLostPacks:
    @pytest.fixture
    def filled(self, sets: ArtifactSets) -> ArtifactSet:
        with open_set(sets) as opened:
            opened.put_many({f"k{n}": array(n) for n in range(5)})
        return opened

    @pytest.mark.parametrize("is_gone", [True, False])
    def test_verify_names_a_pack_that_is_gone_or_was_cut_off(
        self, sets: ArtifactSets, filled: ArtifactSet, is_gone: bool
    ) -> None:
        (pack,) = packs_of(filled)
        if is_gone:
            pack.unlink()
        else:
            os.truncate(pack, pack.stat().st_size // 2)
        what = "is gone; it had 5 records" if is_gone else "was cut off"
        (quick,) = sets.verify(full=False)
        assert quick.damage == [f"{pack.name} {what}"]
        if is_gone:
            (report,) = sets.verify(full=True)
            assert report.damage == quick.damage
            assert "--rebuild" in report.cure
        sets.rebuild(sets.infos()[0])
        assert not sets.verify()[0].damage

    def test_what_compaction_has_moved_is_no_loss(
        self, sets: ArtifactSets, filled: ArtifactSet
    ) -> None:
        (pack,) = packs_of(filled)
        with open_set(sets) as opened:
            opened.delete("k0")
            opened.compact(force=True)
        assert not pack.exists()
        assert not sets.verify()[0].damage


class TestAnotherInItsPlace:
    def test_a_set_that_another_process_removed_can_be_opened_again(
        self, sets: ArtifactSets
    ) -> None:
        def replace() -> None:
            sets.plan_remove(sets.infos()).execute()
            with open_set(sets) as new:
                new.put("key", 2)

        with open_set(sets, memory="1MB") as old:
            old.put("key", 1)
            old.get("key")
            seal(old)
            Child(replace).result()
            with pytest.raises(ArtifactError, match="was removed"):
                old.get("key")
            with open_set(sets, memory=old.memory) as new:
                assert new.get("key") == 2

    def test_a_set_that_was_moved_away_is_not_the_one_that_is_there_now(
        self, sets: ArtifactSets
    ) -> None:
        with open_set(sets, memory="1MB") as old:
            old.put("key", 1)
            old.get("key")
            old.path.rename(old.path.with_name("elsewhere"))
            with open_set(sets, memory=old.memory) as new:
                assert new.get("key") is None
                new.put("key", 2)
            with open_set(sets) as new:
                assert new.get("key") == 2
