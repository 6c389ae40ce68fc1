"""Sets of artifacts where room is counted, freed and checked, and where the store moves or goes.

What is evicted, compacted and found damaged is shown by tests/artifacts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from smartcache.cache import SmartCache
from smartcache.errors import BlobInUseError
from smartcache.store.store import Store
from tests.cli.computed import days_ago, fill, flip, keys, latent, put
from tests.cli.running import Here
from tests.store.files import OTHER, digest_of


@pytest.fixture
def worn(sc: Here, home: Path) -> str:
    """A set of 20 artifacts: five are past their time, five were deleted."""
    with SmartCache(home) as cache, cache.artifacts("latents", fingerprint={"size": 1}) as latents:
        put(latents, range(10))
        with days_ago(1):
            put(latents, range(10, 15), ttl=1)
        put(latents, range(15, 20))
        latents.delete_many([f"key-{number}" for number in range(15, 20)])
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


def spoil(home: Path, name: str, id_: str) -> None:
    (home / "sets" / name / id_ / "set.json").write_text("{}")


class TestDf:
    def test_has_a_line_for_sets_and_promises_what_prune_frees(
        self, sc: Here, worn: str, home: Path
    ) -> None:
        text = sc("df").stdout
        assert re.search(r"^  artifact sets +\S+ KB +1 set, 15 artifacts$", text, re.MULTILINE)
        assert re.search(r"^    to be freed +4[0-9.]+ KB ", text, re.MULTILINE)
        usage = sc("df", "--json").json
        (part,) = usage["artifact_sets"]
        assert (part["name"], part["artifacts"]) == (f"latents/{worn}", 15)
        before = on_disk(home)
        assert part["on_disk"] == before
        assert usage["reclaimable"] == part["reclaimable"] > 10 * 4096
        sc("prune", "-y")
        assert before - on_disk(home) == pytest.approx(usage["reclaimable"], rel=0.1)
        assert sc("df", "--json").json["reclaimable"] == 0

    def test_verbose_shows_every_set_and_one_that_cannot_be_read_is_named(
        self, sc: Here, worn: str, home: Path
    ) -> None:
        other = fill(home, "captions")
        text = sc("df", "-v").stdout
        assert re.search(r"^SET +ARTIFACTS +LIVE +ON DISK +CAN BE FREED +USED$", text, re.MULTILINE)
        for name, id_ in (("latents", worn), ("captions", other)):
            assert re.search(rf"^{name}/{id_[:12]} +1\d ", text, re.MULTILINE)
        spoil(home, "latents", worn)
        done = sc("df")
        assert f"Warning: latents/{worn[:12]}: " in done.stderr
        assert "artifact sets" in done.stdout

    @pytest.mark.usefixtures("own_places")
    def test_without_sets_nothing_is_said_of_them(self, sc: Here, models: Path) -> None:
        sc("add", models / "a.safetensors")
        assert "artifact" not in sc("df", "-v").stdout
        assert sc("df", "--json").json["artifact_sets"] == []
        assert sc("verify").stdout == "Checked 1 blob.\nNo damage was found.\n"
        assert sc("verify", "--json").json["artifact_sets"] == []
        assert "tensors" not in sc("report").stdout
        assert sc("artifacts", "verify").stdout == "There are no artifacts.\n"


class TestPrune:
    def test_frees_what_is_past_its_time_and_dead_but_no_live_artifact(
        self, sc: Here, worn: str, home: Path
    ) -> None:
        planned = sc("prune", "-n", "--json").json
        held = planned["artifact_sets"]
        assert {each["reason"] for each in held["victims"]} == {"expired", "dead"}
        assert planned["planned_size"] == held["planned_size"] > 10 * 4096
        done = sc("prune", "-y", "--max-size", "0", "--unused-for", "0s", "--json").json
        assert done["artifact_sets"]["removed"] == 5
        assert done["freed_size"] == done["artifact_sets"]["freed_size"] > 9 * 4096
        assert keys(home, worn) == LIVE
        assert sc("prune", "-y").stdout == "Nothing to prune.\n"

    def test_shows_blobs_and_sets_in_one_plan_and_goes_on_past_one_it_cannot_read(
        self, sc: Here, worn: str, models: Path, home: Path
    ) -> None:
        sc("add", "--no-pin", models / "sub/c.gguf")
        done = sc("prune", "-n")
        assert digest_of(OTHER)[:12] in done.stdout
        assert re.search(rf"^latents/{worn[:12]} +5 .* past their time$", done.stdout, re.MULTILINE)
        assert "Would remove 1 blob and 5 artifacts and free" in done.stdout
        assert sc("prune", "-n", "-q").ids == [digest_of(OTHER)]
        broken = fill(home, "captions")
        spoil(home, "captions", broken)
        done = sc("prune", "-y")
        assert f"Warning: captions/{broken} cannot be pruned: " in done.stderr
        assert done.stdout.startswith("Removed 1 blob and 5 artifacts, freed ")

    def test_dead_room_alone_is_freed_and_a_fresh_set_gives_it_nothing_to_do(
        self, sc: Here, home: Path
    ) -> None:
        """Layouts are in no artifact's figures; to copy a pack for them would never end."""
        id_ = fill(home)
        before = sorted((home / "sets").rglob("*.pack"))
        assert sc("prune", "-y").stdout == "Nothing to prune.\n"
        assert sorted((home / "sets").rglob("*.pack")) == before
        with SmartCache(home) as cache, cache.artifacts("latents", fingerprint={}) as latents:
            latents.delete_many(["key-0", "key-1"])
        assert re.search(r"^Would free \S+ KB\.$", sc("prune", "-n").stdout, re.MULTILINE)
        assert re.fullmatch(r"Freed \S+ KB\.\n", sc("prune", "-y").stdout)
        assert len(keys(home, id_)) == 8


class TestArtifactsPrune:
    def test_evicts_by_age_and_the_least_recently_used_until_it_fits(
        self, sc: Here, home: Path
    ) -> None:
        with days_ago(20):
            id_ = fill(home)
        use(home, range(8), lambda number: number + 1)
        assert "Nothing to prune" in sc("artifacts", "prune", "-y", "--unused-for", "30d").stdout
        done = sc("artifacts", "prune", "-y", "--unused-for", "15d")
        assert "Removed 2 artifacts" in done.stdout
        assert "not used for long" in sc("artifacts", "prune", "-n", "--unused-for", "1d").stdout
        document = sc("artifacts", "prune", "-y", "--max-size", "24KB", "--json").json
        (victim, *_) = document["victims"]
        assert victim["reason"] == "over size"
        assert keys(home, id_) == {f"key-{number}" for number in range(8 - victim["artifacts"])}
        assert 2 <= len(keys(home, id_)) <= 5
        assert on_disk(home) < 30_000

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
        for words in (["--max-size", "big"], ["--unused-for", "5 parsecs"]):
            assert sc("artifacts", "prune", *words, code=2).hint.startswith("Write ")


def test_compacting_gives_room_back_and_keeps_every_artifact(sc: Here, home: Path) -> None:
    id_ = fill(home)
    with SmartCache(home) as cache, cache.artifacts("latents", fingerprint={}) as latents:
        latents.delete("key-0")
    before = on_disk(home)
    assert "--force" in sc("artifacts", "compact").stdout
    assert on_disk(home) == before
    done = sc("artifacts", "compact", "--force", "--json").json
    assert done["freed_size"] == pytest.approx(before - on_disk(home), abs=4096)
    assert before - on_disk(home) > 4096
    with SmartCache(home) as cache, cache.artifacts("latents", fingerprint={}) as latents:
        assert (latents.get("key-5")["latent"] == latent(5)).all()
        assert len(latents) == 9
    spoil(home, "latents", id_)
    assert "cannot be compacted" in sc("artifacts", "compact", code=1).stderr


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
        sc("verify")  # which reads nothing
        done = sc(*words, code=3)
        assert f"latents/{id_[:12]}: 1 artifact is damaged" in done.stdout
        assert "computed again" in done.stderr
        assert len(keys(home, id_)) == 9
        sc(*words)
        flip(home, id_, 0.2)
        document = sc(*words, "--json", code=3).json
        (part,) = document.get("sets", document.get("artifact_sets"))
        assert document["has_damage"]
        assert [key[:4] for key in part["damaged"]] == ["key-"]

    @pytest.mark.parametrize("damage", ["replaced", "flipped", "cut off"])
    def test_the_quick_look_sees_packs_and_rebuild_makes_footers_again(
        self, damage: str, sc: Here, home: Path
    ) -> None:
        id_ = fill(home)
        (pack,) = (home / "sets/latents" / id_).glob("*.pack")
        data = bytearray(pack.read_bytes())
        data[-100] ^= 1
        pack.write_bytes(bytes(len(data)) if damage == "replaced" else data)
        if damage == "cut off":
            os.truncate(pack, len(data) - 100)
        if damage != "cut off":
            done = sc("verify", code=3)
            is_replaced = damage == "replaced"
            assert ("is not a pack of this set" in done.stdout) == is_replaced
            assert ("the footer of " in done.stdout) == (not is_replaced)
            assert ("remove it" if is_replaced else "--rebuild") in done.stderr
            assert sc("verify", "-q", code=3).ids == [f"latents/{id_}"]
        if damage != "replaced":
            words = ("artifacts", "verify", "latents", "--rebuild", "-y")
            done = sc(*words)
            assert "made 1 footer again, 1 pack read." in done.stdout
            assert "No damage was found." in done.stdout
            assert len(keys(home, id_)) == 10
            assert "every pack has its footer, 1 pack read." in sc(*words).stdout

    def test_rebuild_brings_nothing_back_and_only_it_can_be_tried(
        self, sc: Here, worn: str, home: Path
    ) -> None:
        before = keys(home, worn)
        tried = sc("artifacts", "verify", "--rebuild", "-n").stdout
        assert re.fullmatch(r"Would read \S+ KB of 1 set, and make footers again\.\n", tried)
        sc("artifacts", "verify", "-n", code=2)
        document = sc("artifacts", "verify", "--rebuild", "-y", "--json").json
        assert document["rebuilt"][f"latents/{worn}"]["artifacts"] == 15
        assert keys(home, worn) == before == LIVE


@pytest.mark.usefixtures("own_places")
def test_the_report_has_a_section_on_sets(sc: Here, worn: str) -> None:
    text = sc("report").stdout
    assert "Computed tensors\n" in text
    assert re.search(rf"^ +15 .* latents/{worn[:12]}$", text, re.MULTILINE)
    assert "'smartcache prune' would free" in text
    (part,) = sc("report", "--json").json["artifact_sets"]
    assert part["name"] == f"latents/{worn}"


def test_eject_loses_what_was_computed_only_if_allowed_and_undo_never(
    sc: Here, home: Path, models: Path
) -> None:
    id_ = fill(home)
    sc("add", "--adopt", models / "a.safetensors")
    sc("undo", "--all", "-y")
    done = sc("eject", "-y", code=1)
    assert "Computed artifacts would be lost" in done.error
    assert "latents" in done.error
    assert "--drop-artifacts" in done.hint
    with Store(home) as store, pytest.raises(BlobInUseError, match="would be lost"):
        store.plan_eject().execute()
    assert len(keys(home, id_)) == 10
    text = sc("eject", "-n").stdout
    assert re.search(r"^  1 artifact set \(\S+ KB\) would be lost", text, re.MULTILINE)
    document = sc("eject", "-n", "--json").json
    assert document["artifact_sets"] == [str(home / "sets/latents" / id_)]
    assert document["freed_size"] >= document["artifact_sets_size"] > 10 * 4096
    assert "are lost" in sc("eject", "-n", "--drop-artifacts").stdout
    sc("eject", "-y", "--drop-artifacts")
    assert not home.exists()
