"""Sets of artifacts where room is counted, freed and checked, and where the store moves or goes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.api import BlobInUseError, SmartCache, Store
from tests.cli.computed import days_ago, fill, flip, keys, latent, put
from tests.cli.running import ROOT, Here, Smartcache
from tests.store.files import OTHER, digest_of


@pytest.fixture
def worn(sc: Here, home: Path) -> str:
    """A set of 20 artifacts: five are past their time, five were deleted."""
    with SmartCache(home) as cache, cache.artifacts("latents", fingerprint={"size": 1}) as latents:
        put(latents, range(10))
        put(latents, range(10, 15), ttl=0.01)
        put(latents, range(15, 20))
        latents.delete_many([f"key-{number}" for number in range(15, 20)])
    time.sleep(1.1)  # times to live are in seconds
    return latents.id


LIVE = {f"key-{number}" for number in range(10)}


def use(home: Path, numbers: range, age: Callable[[int], float]) -> None:
    """Use artifacts, each so many days ago."""
    with SmartCache(home) as cache, cache.artifacts("latents", fingerprint={}) as latents:
        for number in numbers:
            with days_ago(age(number)):
                latents.touch(f"key-{number}")


def on_disk(home: Path) -> int:
    return sum(path.stat().st_size for path in (home / "sets").rglob("*.pack"))


class TestDf:
    def test_has_a_line_for_sets(self, sc: Here, worn: str, home: Path) -> None:
        text = sc("df").stdout
        assert re.search(r"^  artifact sets +\S+ KB +1 set, 15 artifacts$", text, re.MULTILINE)
        assert re.search(r"^    to be freed +4[0-9.]+ KB ", text, re.MULTILINE)
        (usage,) = sc("df", "--json").json["stores"]
        (part,) = usage["artifact_sets"]
        assert part["name"] == f"latents/{worn}"
        assert part["artifacts"] == 15
        assert part["on_disk"] == on_disk(home)
        assert usage["reclaimable"] == part["reclaimable"] > 10 * 4096

    def test_verbose_shows_every_set(self, sc: Here, worn: str, home: Path) -> None:
        other = fill(home, "captions")
        text = sc("df", "-v").stdout
        assert re.search(r"^SET +ARTIFACTS +LIVE +ON DISK +CAN BE FREED +USED$", text, re.MULTILINE)
        for name, id_ in (("latents", worn), ("captions", other)):
            assert re.search(rf"^{name}/{id_[:12]} +1\d ", text, re.MULTILINE)

    @pytest.mark.usefixtures("worn")
    def test_what_it_says_can_be_freed_is_what_prune_frees(self, sc: Here, home: Path) -> None:
        promised = sc("df", "--json").json["stores"][0]["reclaimable"]
        before = on_disk(home)
        sc("prune", "-y")
        assert before - on_disk(home) == pytest.approx(promised, rel=0.1)
        assert sc("df", "--json").json["stores"][0]["reclaimable"] == 0

    def test_without_sets_there_is_no_line(self, sc: Here, models: Path) -> None:
        sc("add", models / "a.safetensors")
        assert "artifact" not in sc("df", "-v").stdout
        assert sc("df", "--json").json["stores"][0]["artifact_sets"] == []

    def test_a_set_that_cannot_be_read_is_named(self, sc: Here, worn: str, home: Path) -> None:
        (home / "sets/latents" / worn / "set.json").write_text("{}")
        done = sc("df")
        assert f"Warning: latents/{worn[:12]}: " in done.stderr
        assert "artifact sets" in done.stdout


class TestPrune:
    def test_frees_what_is_past_its_time_and_dead_but_no_live_artifact(
        self, sc: Here, worn: str, home: Path
    ) -> None:
        before = on_disk(home)
        planned = sc("prune", "-n", "--json").json
        assert on_disk(home) == before
        held = planned["artifact_sets"]
        assert {each["reason"] for each in held["victims"]} == {"expired", "dead"}
        assert planned["planned_size"] == held["planned_size"] > 10 * 4096
        done = sc("prune", "-y", "--max-size", "0", "--unused-for", "0s", "--json").json
        assert done["artifact_sets"]["removed"] == 5
        assert done["freed_size"] == done["artifact_sets"]["freed_size"] > 9 * 4096
        assert keys(home, worn) == LIVE
        assert sc("prune", "-y").stdout == "Nothing to prune.\n"

    def test_shows_blobs_and_sets_in_one_plan(self, sc: Here, worn: str, models: Path) -> None:
        sc("add", "--no-pin", models / "sub/c.gguf")
        done = sc("prune", "-n")
        assert digest_of(OTHER)[:12] in done.stdout
        assert re.search(rf"^latents/{worn[:12]} +5 .* past their time$", done.stdout, re.MULTILINE)
        assert "Would remove 1 blob and 5 artifacts and free" in done.stdout
        assert sc("prune", "-n", "-q").ids == [digest_of(OTHER)]
        assert sc("prune", "-y").stdout.startswith("Removed 1 blob and 5 artifacts, freed ")

    def test_dead_room_alone_is_freed_without_removing_anything(self, sc: Here, home: Path) -> None:
        id_ = fill(home)
        with SmartCache(home) as cache, cache.artifacts("latents", fingerprint={}) as latents:
            latents.delete("key-0")
            latents.delete("key-1")
        assert re.search(r"^Would free \S+ KB\.$", sc("prune", "-n").stdout, re.MULTILINE)
        assert re.fullmatch(r"Freed \S+ KB\.\n", sc("prune", "-y").stdout)
        assert len(keys(home, id_)) == 8

    @pytest.mark.usefixtures("worn")
    def test_asks_with_the_plan(self, program: Smartcache) -> None:
        done = program.at_terminal("prune", answer="n\n")
        assert "past their time" in done.stdout
        assert "Remove 5 artifacts for good and free" in done.stdout
        assert done.code == 1

    @pytest.mark.usefixtures("worn")
    def test_a_set_that_cannot_be_read_stops_nothing(self, sc: Here, home: Path) -> None:
        broken = fill(home, "captions")
        (home / "sets/captions" / broken / "set.json").write_text("{}")
        done = sc("prune", "-y")
        assert f"Warning: captions/{broken} cannot be pruned: " in done.stderr
        assert "Removed 5 artifacts" in done.stdout

    def test_a_fresh_set_gives_it_nothing_to_do(self, sc: Here, home: Path) -> None:
        """Layouts are in no artifact's figures; to copy a pack for them would never end."""
        fill(home)
        before = sorted((home / "sets").rglob("*.pack"))
        assert sc("prune", "-y").stdout == "Nothing to prune.\n"
        assert sorted((home / "sets").rglob("*.pack")) == before


class TestArtifactsPrune:
    def test_evicts_the_least_recently_used_until_it_fits(self, sc: Here, home: Path) -> None:
        with days_ago(20):
            id_ = fill(home)
        use(home, range(10), lambda number: number + 1)
        done = sc("artifacts", "prune", "-y", "--max-size", "24KB", "--json").json
        (victim, *_) = done["victims"]
        assert victim["reason"] == "over size"
        assert keys(home, id_) == {f"key-{number}" for number in range(10 - victim["artifacts"])}
        assert 2 <= len(keys(home, id_)) <= 5
        assert on_disk(home) < 30_000

    def test_unused_for_evicts_by_age(self, sc: Here, home: Path) -> None:
        with days_ago(2):
            fill(home)
        assert "Nothing to prune" in sc("artifacts", "prune", "-y", "--unused-for", "3d").stdout
        use(home, range(5), lambda _: 0.5)
        done = sc("artifacts", "prune", "-n", "--unused-for", "1d")
        assert "not used for long" in done.stdout
        assert "Would remove 5 artifacts" in done.stdout
        assert "Removed 5 artifacts" in sc("artifacts", "prune", "-y", "--unused-for", "1d").stdout

    def test_what_may_not_be_evicted_stays_and_is_told(self, sc: Here, home: Path) -> None:
        with (
            SmartCache(home) as cache,
            cache.artifacts("kept", fingerprint={}, evictable=False) as kept,
        ):
            put(kept, range(5))
        done = sc("artifacts", "prune", "-y", "--max-size", "1KB")
        assert "Warning: What must not be evicted is larger than that" in done.stderr
        assert len(keys(home, kept.id)) == 5

    def test_only_the_sets_that_are_named(self, sc: Here, worn: str, home: Path) -> None:
        fill(home, "captions")
        assert sc("artifacts", "prune", "captions", "-y").stdout == "Nothing to prune.\n"
        assert sc("artifacts", "prune", worn[:6], "-n", "-q").ids == [f"latents/{worn}"]

    @pytest.mark.usefixtures("worn")
    def test_refuses_where_it_cannot_ask(self, sc: Here) -> None:
        assert "not a terminal" in sc("artifacts", "prune", code=1).error

    @pytest.mark.parametrize("words", [["--max-size", "big"], ["--unused-for", "5 parsecs"]])
    def test_a_bad_size_or_age_is_explained(self, words: list[str], sc: Here) -> None:
        assert sc("artifacts", "prune", *words, code=2).hint.startswith("Write ")

    def test_without_a_store_there_is_nothing(self, sc: Here, home: Path) -> None:
        assert sc("artifacts", "prune", "-y").stdout == "Nothing to prune.\n"
        assert not home.exists()


class TestCompact:
    def test_gives_room_back_and_keeps_every_artifact(self, sc: Here, home: Path) -> None:
        id_ = fill(home)
        with SmartCache(home) as cache, cache.artifacts("latents", fingerprint={}) as latents:
            latents.delete("key-0")
        before = on_disk(home)
        assert "--force" in sc("artifacts", "compact").stdout
        assert sc("artifacts", "compact", "--force", "-n", "-q").ids == [f"latents/{id_}"]
        assert on_disk(home) == before
        done = sc("artifacts", "compact", "--force", "--json").json
        assert done["freed_size"] == pytest.approx(before - on_disk(home), abs=4096)
        assert before - on_disk(home) > 4096
        with SmartCache(home) as cache, cache.artifacts("latents", fingerprint={}) as latents:
            assert (latents.get("key-5")["latent"] == latent(5)).all()
            assert len(latents) == 9

    def test_a_broken_set_is_told(self, sc: Here, home: Path) -> None:
        id_ = fill(home)
        (home / "sets/latents" / id_ / "set.json").write_text("{}")
        done = sc("artifacts", "compact", code=1)
        assert "cannot be compacted" in done.stderr


class TestVerify:
    def test_sound_sets(self, sc: Here, home: Path) -> None:
        fill(home)
        done = sc("artifacts", "verify")
        assert re.match(r"Checked 10 artifacts of 1 set, \S+ KB read\.\nNo damage", done.stdout)
        text = sc("verify").stdout
        assert "Checked 10 artifacts of 1 set.\nNo damage was found.\n" in text
        document = sc("verify", "--full", "--json").json
        assert document["artifact_sets"][0]["read_size"] > 10 * 4096
        assert not document["has_damage"]

    @pytest.mark.parametrize("words", [["verify", "--full"], ["artifacts", "verify"]])
    def test_a_flipped_bit_is_found_by_reading(
        self, words: list[str], sc: Here, home: Path
    ) -> None:
        id_ = fill(home)
        flip(home, id_)
        assert sc("verify").code == 0  # which reads nothing
        done = sc(*words, code=3)
        assert f"latents/{id_[:12]}: 1 artifact is damaged" in done.stdout
        assert "computed again" in done.stderr
        assert len(keys(home, id_)) == 9
        sc(*words)

    def test_the_damaged_are_named_for_programs(self, sc: Here, home: Path) -> None:
        id_ = fill(home)
        flip(home, id_)
        document = sc("artifacts", "verify", "--json", code=3).json
        assert document["has_damage"]
        (part,) = document["sets"]
        assert len(part["damaged"]) == 1
        assert part["damaged"][0].startswith("key-")

    @pytest.mark.parametrize(
        ("is_replaced", "words", "cure"),
        [
            (True, "is not a pack of this set", "remove it"),
            (False, "the footer of ", "--rebuild"),
        ],
    )
    def test_the_quick_look_sees_packs(
        self, is_replaced: bool, words: str, cure: str, sc: Here, home: Path
    ) -> None:
        id_ = fill(home)
        (pack,) = (home / "sets/latents" / id_).glob("*.pack")
        data = bytearray(pack.read_bytes())
        data[-100] ^= 1
        pack.write_bytes(bytes(len(data)) if is_replaced else data)
        done = sc("verify", code=3)
        assert words in done.stdout
        assert cure in done.stderr
        assert sc("verify", "-q", code=3).ids == [f"latents/{id_}"]

    @pytest.mark.parametrize("damage", ["flipped", "cut off"])
    def test_rebuild_makes_footers_again(self, damage: str, sc: Here, home: Path) -> None:
        id_ = fill(home)
        (pack,) = (home / "sets/latents" / id_).glob("*.pack")
        data = bytearray(pack.read_bytes())
        data[-100] ^= 1
        pack.write_bytes(data if damage == "flipped" else data[:-100])
        done = sc("artifacts", "verify", "latents", "--rebuild", "-y")
        assert "made 1 footer again, 1 pack read." in done.stdout
        assert "No damage was found." in done.stdout
        assert len(keys(home, id_)) == 10
        done = sc("artifacts", "verify", "latents", "--rebuild", "-y")
        assert "every pack has its footer, 1 pack read." in done.stdout

    def test_rebuild_brings_nothing_back(self, sc: Here, worn: str, home: Path) -> None:
        before = keys(home, worn)
        document = sc("artifacts", "verify", "--rebuild", "-y", "--json").json
        assert document["rebuilt"][f"latents/{worn}"]["artifacts"] == 15
        assert keys(home, worn) == before == LIVE

    def test_rebuild_asks_and_can_be_tried(self, sc: Here, home: Path) -> None:
        fill(home)
        assert "not a terminal" in sc("artifacts", "verify", "--rebuild", code=1).error
        tried = sc("artifacts", "verify", "--rebuild", "-n").stdout
        assert re.fullmatch(r"Would read \S+ KB of 1 set, and make footers again\.\n", tried)
        sc("artifacts", "verify", "-n", code=2)

    def test_without_sets(self, sc: Here, models: Path) -> None:
        assert sc("artifacts", "verify").stdout == "There are no artifacts.\n"
        sc("add", models / "a.safetensors")
        assert sc("verify").stdout == "Checked 1 blob.\nNo damage was found.\n"
        assert sc("verify", "--json").json["artifact_sets"] == []


@pytest.mark.usefixtures("own_places")
class TestReport:
    def test_has_a_section_on_sets(self, sc: Here, worn: str) -> None:
        text = sc("report").stdout
        assert "Computed tensors\n" in text
        assert re.search(rf"^ +15 .* latents/{worn[:12]}$", text, re.MULTILINE)
        assert "'smartcache prune' would free" in text
        assert "## Computed tensors" in sc("report", "--markdown").stdout
        (part,) = sc("report", "--json").json["artifact_sets"]
        assert part["name"] == f"latents/{worn}"

    def test_which_is_left_out_without_any(self, sc: Here, models: Path) -> None:
        sc("add", models / "a.safetensors")
        assert "tensors" not in sc("report").stdout


class TestEject:
    def test_does_not_lose_what_was_computed(self, sc: Here, home: Path) -> None:
        id_ = fill(home)
        done = sc("eject", "-y", code=1)
        assert "Computed artifacts would be lost" in done.error
        assert "latents" in done.error
        assert "--drop-artifacts" in done.hint
        assert len(keys(home, id_)) == 10
        with Store(home) as store, pytest.raises(BlobInUseError, match="would be lost"):
            store.plan_eject().execute()

    def test_the_plan_says_so(self, sc: Here, home: Path) -> None:
        id_ = fill(home)
        done = sc("eject", "-n")
        assert re.search(r"^  1 artifact set \(\S+ KB\) would be lost", done.stdout, re.MULTILINE)
        document = sc("eject", "-n", "--json").json["stores"][0]
        assert document["artifact_sets"] == [str(home / "sets/latents" / id_)]
        assert document["freed_size"] >= document["artifact_sets_size"] > 10 * 4096

    def test_losing_them_can_be_allowed(self, sc: Here, home: Path) -> None:
        fill(home)
        assert "are lost" in sc("eject", "-n", "--drop-artifacts").stdout
        sc("eject", "-y", "--drop-artifacts")
        assert not home.exists()

    def test_undo_leaves_them_alone(self, sc: Here, home: Path, models: Path) -> None:
        id_ = fill(home)
        sc("add", "--adopt", models / "a.safetensors")
        sc("undo", "--all", "-y")
        assert len(keys(home, id_)) == 10


class TestMove:
    @pytest.fixture(params=["same filesystem", "other filesystem"])
    def target(self, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
        """Where the store goes."""
        if request.param == "same filesystem":
            return tmp_path / "new"
        elsewhere: Path = request.getfixturevalue("elsewhere")
        return elsewhere / "new"

    def test_sets_come_along(self, sc: Here, worn: str, home: Path, target: Path) -> None:
        document = sc("mv", target, "-y", "--json").json
        if not document["is_rename"]:
            assert document["copied_size"] >= 20 * 4096
        assert keys(target, worn) == LIVE
        assert keys(home, worn) == LIVE  # which leads there
        assert "No damage" in sc("--home", target, "artifacts", "verify").stdout
        (info,) = sc("artifacts", "ls", "--json").json["sets"]
        assert info["path"] == str(target / "sets/latents" / worn)

    def test_they_can_move_on_and_back(self, sc: Here, home: Path, target: Path) -> None:
        id_ = fill(home)
        sc("mv", target, "-y")
        sc("mv", home, "-y")
        assert len(keys(home, id_)) == 10
        assert not (home / "sets").is_symlink()
        assert (target / "sets" / "latents" / id_ / "set.json").exists()

    def test_a_handle_of_the_old_place_is_still_good(
        self, sc: Here, home: Path, target: Path
    ) -> None:
        import pickle

        fill(home)
        with SmartCache(home) as cache, cache.artifacts("latents", fingerprint={}) as latents:
            pickled = pickle.dumps(latents["key-3"].handle("latent"))
        sc("mv", target, "-y")
        handle = pickle.loads(pickled)  # noqa: S301 - our own
        assert (handle.tensor() == latent(3)).all()

    def test_renamed_under_an_open_set_nothing_is_lost(
        self, sc: Here, home: Path, tmp_path: Path
    ) -> None:
        with SmartCache(home) as cache, cache.artifacts("latents", fingerprint={}) as latents:
            put(latents, range(5))
            sc("mv", tmp_path / "new", "-y")
            put(latents, range(5, 10))
            assert len(latents) == 10
        assert len(keys(tmp_path / "new", latents.id)) == 10

    def test_an_open_set_is_not_copied_away_from_its_writer(
        self, sc: Here, home: Path, elsewhere: Path
    ) -> None:
        with SmartCache(home) as cache, cache.artifacts("latents", fingerprint={}) as latents:
            put(latents, range(5))
            latents.flush()
            done = sc("mv", elsewhere / "new", "-y", code=1)
            assert "has the set latents open for writing" in done.error
            put(latents, range(5, 10))
        assert len(keys(home, latents.id)) == 10
        sc("mv", elsewhere / "new", "-y")
        assert len(keys(elsewhere / "new", latents.id)) == 10

    def test_what_a_killed_writer_has_put_comes_along(
        self, sc: Here, home: Path, target: Path
    ) -> None:
        """Its pack has no footer, and the next writer goes on with it at the new place."""
        code = f"""
import os, signal
from pathlib import Path
from tests.cli.computed import SmartCache, put
latents = SmartCache({str(home)!r}).artifacts("latents", fingerprint={{}})
put(latents, range(5))
os.kill(os.getpid(), signal.SIGKILL)
"""
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
        assert done.returncode == -signal.SIGKILL
        sc("mv", target, "-y")
        with SmartCache(home) as cache, cache.artifacts("latents", fingerprint={}) as latents:
            assert (latents.get("key-3")["latent"] == latent(3)).all()
            put(latents, range(5, 10))
            assert latents.get_or_compute("key-10", lambda: 10) == 10
        assert len(keys(target, latents.id)) == 11
        assert len(list(latents.path.resolve().glob("*.pack"))) == 1
        assert "No damage" in sc("artifacts", "verify").stdout

    @pytest.mark.timeout(30)
    @pytest.mark.parametrize("name", ["lock", "0123456789abcdef.pack", "notes"])
    def test_a_fifo_in_a_set_is_named_and_not_waited_for(
        self, name: str, sc: Here, home: Path, elsewhere: Path
    ) -> None:
        fifo = home / "sets/latents" / fill(home) / name
        fifo.unlink(missing_ok=True)
        os.mkfifo(fifo)
        assert sc("mv", elsewhere / "new", "-y", code=1).error == f"{fifo} is not a regular file"

    def test_what_a_broken_off_copy_left_does_no_harm(
        self, sc: Here, home: Path, elsewhere: Path
    ) -> None:
        id_ = fill(home)
        left = elsewhere / "new/sets/latents" / id_ / "0123456789abcdef.pack"
        left.parent.mkdir(parents=True)
        left.write_bytes(b"half a pack")
        (elsewhere / "new/.moving").write_bytes(b"")
        sc("mv", elsewhere / "new", "-y")
        assert not left.exists()
        assert len(keys(elsewhere / "new", id_)) == 10

    def test_ejecting_afterwards_leaves_nothing_at_the_old_place(
        self, sc: Here, home: Path, target: Path
    ) -> None:
        fill(home)
        sc("mv", target, "-y")
        sc("eject", "-y", "--drop-artifacts")
        assert not target.exists()
        assert not home.exists()

    @pytest.mark.parametrize(
        "point",
        ["move: prepared", "move: blobs copied", "move: copied", "move: switched"],
    )
    def test_a_kill_in_the_middle_loses_nothing(
        self, point: str, program: Smartcache, home: Path, elsewhere: Path
    ) -> None:
        id_ = fill(home)
        code = f"""
import os, signal, sys
from smartcache.store import faults
from smartcache.store.store import Store

def reached(name):
    if name == {point!r}:
        os.kill(os.getpid(), signal.SIGKILL)

faults.hook = reached
with Store({str(home)!r}) as store:
    store.plan_move({str(elsewhere / "new")!r}).execute()
"""
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
        assert done.returncode == -signal.SIGKILL
        assert len(keys(home, id_)) == 10
        program("artifacts", "verify")
        if point != "move: switched":
            program("mv", elsewhere / "new", "-y")
        assert len(keys(elsewhere / "new", id_)) == 10
        assert len(keys(home, id_)) == 10
