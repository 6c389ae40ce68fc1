"""Datasets from the command line: what is known, planned, cleaned and carried elsewhere.

The encoders are of numpy, and note what they were called with: no command may call them.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from smartcache.artifacts import ArtifactSets, SetInfo
from smartcache.cache import SmartCache
from smartcache.training import Encoder, Item, Sources
from tests.cli.computed import BUCKETS, Made, encode_image, image
from tests.cli.running import PATIENCE, Here, Smartcache


@pytest.fixture
def photos(home: Path, tmp_path: Path) -> Made:
    made = Made(home, tmp_path / "photos")
    made.build()
    return made


def sets(home: Path) -> list[SetInfo]:
    with SmartCache(home) as cache:
        return cache.artifact_sets()


def encode_none(items: list[Item]) -> list[np.ndarray]:
    raise AssertionError(f"a command has encoded {items}")


class TestLs:
    def test_what_is_ready_and_what_it_takes(self, sc: Here, photos: Made) -> None:
        lines = sc("datasets", "ls").stdout.splitlines()
        assert lines[0].split() == ["NAME", "ITEMS", "READY", "OUTPUTS", "ON", "DISK", "SOURCES"]
        words = lines[1].split()
        assert words[:5] == ["photos", "7", "6", "latent,", "text"]
        assert words[-1].endswith("photos")
        (row,) = sc("datasets", "ls", "--json").json["datasets"]
        assert (row["items"], row["ready"], row["outputs"]) == (7, 6, ["latent", "text"])
        sizes = {each.full_name: each.on_disk for each in sets(photos.home)}
        assert set(row["sets"]) == set(sizes)
        assert row["on_disk"] == sum(sizes.values()) > 6 * 4 * 64 * 48 * 4
        shutil.rmtree(photos.folder)  # no source is looked at
        assert sc("datasets", "ls").stdout.splitlines() == lines

    def test_a_set_that_two_share_counts_once(self, sc: Here, home: Path, photos: Made) -> None:
        for name in ("one", "two"):
            photos.build(name, shared="latents")
        document = sc("datasets", "ls", "--json").json
        assert sc("datasets", "ls", "-q").ids == ["one", "photos", "two"]
        alone = sum(row["on_disk"] for row in document["datasets"])
        (shared,) = (each for each in sets(home) if each.name == "latents")
        assert document["on_disk"] == alone - shared.on_disk

    def test_a_damaged_one_stands_in_no_ones_way(self, sc: Here, home: Path, photos: Made) -> None:
        photos.build("other")
        path = home / "sets/other/dataset/dataset.json"
        whole = {"format": 1, "name": "other", "sources": [], "outputs": {}}
        for text in (
            "nonsense",
            "[]",
            '{"format": 7}',
            '{"format": 1}',
            json.dumps(whole | {"outputs": []}),
            json.dumps(whole | {"outputs": {"latent": {}}}),
            json.dumps(whole | {"sources": [{}]}),
        ):
            path.write_text(text)
            done = sc("datasets", "ls")
            assert done.stderr.startswith(f"Warning: other: {path} ")
            assert [line.split()[:2] for line in done.stdout.splitlines()[1:]] == [
                ["other", "?"],
                ["photos", "7"],
            ]
            assert str(path) in sc("datasets", "show", "other", code=1).error
        assert sc("datasets", "ls", "--json").json["datasets"][0]["problem"]


class TestShow:
    @pytest.mark.usefixtures("photos")
    def test_sources_outputs_and_what_is_left_out(self, sc: Here) -> None:
        text = sc("datasets", "show", "photos").stdout
        assert "items   7, 6 of them ready" in text
        assert text.split("SIDECARS\n")[1].split("\n")[0].split()[1:] == [
            "7", "2.5", "caption:", ".txt,", ".json:prompt",
        ]  # fmt: skip
        latent = text.partition("\nlatent\n")[2].partition("\n\n")[0]
        assert "buckets     64x48 48x64; 64x48 (3), 48x64 (3)" in latent
        assert "values      mode, scale 0.18215" in latent
        assert "holds       numpy float32 [4, 64, 48], [4, 48, 64]" in latent
        assert "ready       6 of 6" in latent
        assert "variations  2" in text.partition("\ntext\n")[2]
        assert "Left out: 1 item\n  dogs/none.png: unreadable: " in text

    @pytest.mark.usefixtures("photos")
    def test_for_programs_everything(self, sc: Here) -> None:
        document = sc("datasets", "show", "photos", "--json").json
        assert (document["items"], document["usable"], document["ready"]) == (7, 6, 6)
        (source,) = document["sources"]
        assert source["sidecars"] == {"caption": [".txt", ".json:prompt"]}
        assert (source["items"], source["repeats"]) == (7, 2.5)
        latent, text = document["outputs"]
        assert latent["set"].startswith("photos.latent/")
        assert latent["fingerprint"]["statistic"] == "mode"
        assert latent["items_by_bucket"] == {"64x48": 3, "48x64": 3}
        assert (text["ready"], text["missing"], text["variations"]) == (12, 0, 2)
        (left,) = document["left_out"]
        assert left["item"] == "dogs/none.png"
        names = sc("datasets", "show", "photos", "-q").ids
        assert names == [f"{kind}/{n}.png" for kind, n in
                         [("cats", 1), ("cats", 3), ("cats", 5), ("dogs", 0), ("dogs", 2),
                          ("dogs", 4), ("dogs", "none")]]  # fmt: skip

    def test_old_sets_are_named_with_what_they_take(self, sc: Here, photos: Made) -> None:
        photos.build(version=1)
        done = sc("datasets", "show", "photos")
        assert "version 1" in done.stdout
        assert "is of an old encoder" in done.stderr
        assert "'smartcache datasets clean photos -n'" in done.stderr
        (old,) = sc("datasets", "show", "photos", "--json").json["old_sets"]
        assert old["set"].startswith("photos.latent/")
        assert old["on_disk"] > 6 * 4 * 64 * 48 * 4

    @pytest.mark.usefixtures("photos")
    def test_what_is_missing_is_counted(self, sc: Here) -> None:
        sc("artifacts", "rm", "photos.text", "-y")
        assert "ready       0 of 12" in sc("datasets", "show", "photos").stdout
        assert "ready       6 of 6" in sc("datasets", "show", "photos").stdout

    @pytest.mark.usefixtures("photos")
    def test_another_name_is_an_error_with_a_hint(self, sc: Here) -> None:
        for command in ("show", "plan", "clean"):
            assert "Missing argument 'NAME'" in sc("datasets", command, code=2).error
            for name in ("photo", "../photos/dataset", ""):
                done = sc("datasets", command, name, code=1)
                assert done.error == f"There is no dataset {name!r}"
                assert ("Did you mean 'photos'?" in done.hint) == (name == "photo")
                assert "'smartcache datasets ls'" in done.hint


class TestPlan:
    def test_is_what_a_program_is_told(self, sc: Here, photos: Made) -> None:
        image(photos.folder / "cats" / "new.png", "a new photo")
        (photos.folder / "cats" / "1.txt").write_text("another caption")
        text = sc("datasets", "plan", "photos").stdout
        assert text.splitlines()[0] + " " + text.splitlines()[1] == photos.planned()
        rows = text.partition("WHY\n")[2].partition("\n\n")[0].splitlines()
        assert [row.split() for row in rows] == [
            ["latent", "6", "1", "new", "file"],
            ["text", "10", "4", "2", "edited,", "2", "new", "file"],
        ]
        assert "Since the last look: 2 added, 1 edited." in text
        assert "Left out: 1 item\n  dogs/none.png: unreadable: " in text

    def test_encodes_nothing_and_says_so(self, sc: Here, photos: Made) -> None:
        done = sc("datasets", "plan", "photos")
        assert done.stdout.startswith("7 items: 6 ready; 1 unreadable: ")
        assert "Nothing was encoded" not in done.stderr
        assert sc("datasets", "plan", "photos", "-q").stdout == ""
        image(photos.folder / "cats" / "new.png", "a new photo")
        done = sc("datasets", "plan", "photos")
        assert "Nothing was encoded: encoders are functions of your program" in done.stderr
        first = sc("datasets", "plan", "photos", "--json").json
        assert first["encode"] == {"latent": {"new file": 1}, "text": {"new file": 2}}
        assert first["ready_by_output"] == {"latent": 6, "text": 12}
        assert first["changes"] == {}
        assert sc("datasets", "plan", "photos", "-q").ids == ["latent", "text"]

    def test_a_drive_that_is_not_mounted_is_an_error_unless_trusted(
        self, sc: Here, photos: Made, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        os.rename(photos.folder, photos.folder.with_name("away"))
        done = sc("datasets", "plan", "photos", code=1)
        assert str(photos.folder) in done.error
        assert "Is a drive not mounted? --trust" in done.hint
        assert sc("datasets", "plan", "photos", "--trust").stdout.startswith("7 items: 6 ready")
        with monkeypatch.context() as patch:
            patch.setenv("SMARTCACHE_SKIP_VALIDATION", "1")
            assert sc("datasets", "plan", "photos").stdout.startswith("7 items: 6 ready")
        os.rename(photos.folder.with_name("away"), photos.folder)
        assert sc("datasets", "plan", "photos").stdout.startswith("7 items: 6 ready")

    def test_warnings_are_said_in_every_mode(self, sc: Here, home: Path, tmp_path: Path) -> None:
        image(tmp_path / "some" / "a.png", "a")
        image(tmp_path / "some" / "b-mask.png", "b")
        sources = Sources(tmp_path / "some", sidecars={"mask": "-mask.png"})
        encoder = Encoder(encode_none, reads="mask", depends_on=0)
        with SmartCache(home) as cache, cache.dataset("some", sources, mask=encoder):
            pass
        done = sc("datasets", "plan", "some", "--json")
        assert "b-mask.png" in done.json["warnings"][0]
        assert done.stderr.startswith("Warning: ")


class TestClean:
    def test_shows_by_set_and_reason_and_frees_it(self, sc: Here, home: Path, photos: Made) -> None:
        photos.build(version=1)
        (photos.folder / "dogs" / "0.png").unlink()
        (photos.folder / "cats" / "1.txt").write_text("another caption")
        planned = sc("datasets", "clean", "photos", "-n", "--json").json
        assert planned["dry_run"]
        found = {(each["output"], each["reason"]): each for each in planned["victims"]}
        assert {key: each["artifacts"] for key, each in found.items()} == {
            ("photos.latent", "old encoder"): 6,
            ("photos.latent", "source gone or edited"): 1,
            ("photos.text", "source gone or edited"): 4,
        }
        assert found["photos.latent", "source gone or edited"]["size"] > 4 * 64 * 48 * 4
        text = sc("datasets", "clean", "photos", "-n").stdout
        assert "Would remove 11 artifacts and free " in text
        before = sum(each.on_disk for each in sets(home))
        done = sc("datasets", "clean", "photos", "-y", "--json").json
        assert done["artifacts"] == 11
        assert done["victims"] == planned["victims"]
        after = sum(each.on_disk for each in sets(home))
        assert done["freed_size"] > 6 * 4 * 64 * 48 * 4
        assert after < before - 6 * 4 * 64 * 48 * 4
        assert sc("datasets", "clean", "photos").stdout.startswith("Nothing to clean")

    def test_refuses_while_a_drive_seems_not_mounted_unless_forced(
        self, sc: Here, home: Path, photos: Made
    ) -> None:
        before = {each.full_name: each.artifacts for each in sets(home)}
        for lost in (photos.folder, photos.folder / "cats"):
            os.rename(lost, home.with_name("away"))
            done = sc("datasets", "clean", "photos", "-y", code=1)
            assert str(lost) in done.error
            assert "--force" in done.hint
            os.rename(home.with_name("away"), lost)
        assert {each.full_name: each.artifacts for each in sets(home)} == before
        for lost, items in ((photos.folder / "cats", "4 items: 3 ready"), (photos.folder, "")):
            shutil.rmtree(lost)  # on purpose
            done = sc("datasets", "clean", "photos", "-y", "--force", "--json").json
            assert done["artifacts"] == 3 + 6
            if items:
                assert sc("datasets", "plan", "photos").stdout.startswith(items)

    def test_what_another_dataset_uses_stays(self, sc: Here, photos: Made) -> None:
        for name in ("one", "two"):
            photos.build(name, shared="latents")
        with SmartCache(photos.home) as cache:
            few = Sources(photos.folder / "cats", sidecars={"caption": ".txt"})
            encoder = Encoder(
                encode_image, reads="file", depends_on="a vae", buckets=BUCKETS,
                statistic="mode", scale=0.18215, shared="latents",
            )  # fmt: skip
            with cache.dataset("two", few, latent=encoder) as dataset:
                dataset.build()
        done = sc("datasets", "clean", "two", "-n", "--json").json
        assert [each["set"].partition("/")[0] for each in done["victims"]] == ["two.text"]


class TestCarrying:
    def test_an_export_becomes_a_dataset_of_another_store(
        self, sc: Here, photos: Made, tmp_path: Path
    ) -> None:
        planned = sc("datasets", "export", "photos", "out", "-n", "--json").json
        assert (planned["items"], planned["artifacts"]) == (6, 18)
        assert planned["size"] > 6 * 4 * 64 * 48 * 4
        assert not (tmp_path / "out").exists()
        text = sc("datasets", "export", "photos", "out").stdout
        assert text.startswith("Exported photos to out: 6 items, 18 artifacts copied (")
        shutil.rmtree(photos.folder)
        other = ("--home", tmp_path / "other")
        assert sc(*other, "datasets", "import", "out", "-n", "-q").ids == ["photos"]
        assert not (tmp_path / "other").exists()
        done = sc(*other, "datasets", "import", "out")
        assert done.stdout.startswith("Imported photos: 6 items, 18 artifacts copied (")
        assert "cache.open_dataset('photos')" in done.stderr
        shutil.rmtree(tmp_path / "out")
        with (
            SmartCache(tmp_path / "other") as cache,
            cache.open_dataset("photos") as moved,
            SmartCache(photos.home) as here,
            here.open_dataset("photos") as dataset,
        ):
            assert len(moved) == 6
            for number in range(6):
                mine, theirs = moved[number], dataset[number]
                assert mine["name"] == theirs["name"]
                for name in ("latent", "text"):
                    np.testing.assert_array_equal(mine[name], theirs[name])
            assert moved.record(0)["caption"] == "photo 1"
        assert sc(*other, "datasets", "plan", "photos", "--trust", "-q").stdout == ""

    def test_only_what_is_all_encoded(self, sc: Here, photos: Made, tmp_path: Path) -> None:
        image(photos.folder / "cats" / "new.png", "a new photo")
        sc("datasets", "plan", "photos")
        done = sc("datasets", "export", "photos", "out", code=1)
        assert done.error.startswith("photos is not all encoded: 8 items: 6 ready; 1 latent to")
        assert "datasets plan photos" in done.hint
        assert not (tmp_path / "out").exists()

    def test_nothing_is_overwritten(self, sc: Here, photos: Made, tmp_path: Path) -> None:
        photos.build("other")
        sc("datasets", "export", "photos", "out")
        for name in ("photos", "other"):
            error = sc("datasets", "export", name, "out", code=1).error
            assert error == f"{tmp_path / 'out'} holds a dataset already"
        for option in ("-n", "-q"):
            done = sc("datasets", "import", "out", option, code=1)
            assert done.error == "There is a dataset 'photos' in the store already"
        shutil.rmtree(photos.home / "sets/photos/dataset")
        assert sc("datasets", "import", "out", "--json").json["artifacts"] == 0  # all there
        assert sc("datasets", "ls", "-q").ids == ["other", "photos"]
        (tmp_path / "file").write_text("mine")
        assert "file" in sc("datasets", "export", "photos", "file", code=1).error
        assert (tmp_path / "file").read_text() == "mine"

    @pytest.mark.usefixtures("photos")
    def test_what_is_no_whole_export_is_an_error(self, sc: Here, tmp_path: Path) -> None:
        other = ("--home", tmp_path / "other", "datasets")
        (tmp_path / "file").write_text("mine")
        for name in ("nowhere", "photos", "file"):
            done = sc(*other, "import", name, code=1)
            assert done.error == f"{name} holds no dataset"
            assert "smartcache datasets export" in done.hint
        assert not (tmp_path / "other").exists()
        sc("datasets", "export", "photos", "out")
        for pack in (tmp_path / "out").glob("photos.text/*/*.pack"):
            pack.unlink()
        done = sc(*other, "import", "out", code=1)
        assert done.error.startswith("photos is not all encoded: 7 items: 0 ready")
        assert done.hint.startswith("Export it again")
        assert sc(*other, "ls", "-q").ids == []

    def test_what_ctrl_c_has_interrupted_is_gone_on_with(
        self, program: Smartcache, sc: Here, photos: Made, tmp_path: Path
    ) -> None:
        """It waits for a lock, that of the last set, and is interrupted there."""
        with SmartCache(photos.home) as cache, cache.open_dataset("photos") as dataset:
            spec = dataset.outputs["text"].spec
        with ArtifactSets(tmp_path / "out").open(spec["set"], spec["fingerprint"]) as there:
            held = there.path / "lock"
        with open(held, "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            process = program.start("datasets", "export", "photos", "out")
            latents = tmp_path / "out"
            while not list(latents.glob("photos.latent/*/*.pack")):
                assert process.poll() is None
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=PATIENCE)
        assert process.returncode == 130
        assert "run the same command again to continue" in stderr
        assert "Traceback" not in stderr
        assert "holds no dataset" in sc("datasets", "import", "out", code=1).error
        sc("datasets", "export", "photos", "out")
        with SmartCache(tmp_path / "other") as cache, cache.open_dataset("out") as dataset:
            assert len([dataset[number] for number in range(6)]) == 6


class TestStore:
    """A dataset lies among the sets, and goes where they go."""

    @pytest.mark.usefixtures("photos")
    def test_the_other_commands_count_sets_and_not_datasets(self, sc: Here) -> None:
        names = [name.partition("/")[0] for name in sc("artifacts", "ls", "-q").ids]
        assert names == ["photos.latent", "photos.text"]
        assert "2 sets, 18 artifacts" in sc("df").stdout
        for words in (["verify"], ["artifacts", "verify"]):
            assert "Checked 18 artifacts of 2 sets" in sc(*words).stdout
        sc("prune", "-y")
        sc("artifacts", "prune", "-y")
        assert sc("datasets", "plan", "photos", "-q").stdout == ""

    @pytest.mark.usefixtures("photos")
    def test_eject_names_what_would_be_lost(self, sc: Here, home: Path) -> None:
        assert "2 artifact sets and 1 dataset (" in sc("eject", "-n").stdout
        store = sc("eject", "-n", "--json").json
        assert len(store["artifact_sets"]) == 2
        assert store["datasets"] == [str(home / "sets/photos/dataset")]
        assert "would be lost" in sc("eject", "-y", code=1).error
        sc("eject", "--drop-artifacts", "-y")
        assert not home.exists()


@pytest.mark.usefixtures("photos")
def test_on_a_narrow_terminal_no_line_is_too_long(program: Smartcache) -> None:
    for line in ("ls", "show photos", "plan photos"):
        done = program.at_terminal("datasets", *line.split(), columns=60)
        assert done.code == 0
        assert [text for text in done.stdout.splitlines() if len(text) > 60] == [], line
