"""SmartDiskCache, DiskCache and PrefetchIterator of mgds, through a pipeline of the stand-in."""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from smartcache import errors
from smartcache.integrations.mgds import CachingStoppedException, PrefetchIterator
from smartcache.progress import Job
from tests.integrations.mgds_pipeline import (
    CONCEPT,
    GROUPING,
    DiskCache,
    Encoder,
    Pipeline,
    Run,
    SmartDiskCache,
    Sources,
)

TEXT: dict[str, Any] = {
    "split_names": ["text_encoder_hidden_state"], "aggregate_names": [],
    "content_key_in_name": "prompt",
}  # fmt: skip
MASKED: dict[str, Any] = {
    "split_names": ["latent_image", "latent_mask"], "extra_watched_paths_in_names": ["mask_path"],
}  # fmt: skip


@pytest.fixture
def room(tmp_path: Path) -> Path:
    """A folder of ten sources that begin with A, B, C ...; they are not young."""
    folder = tmp_path / "cats"
    folder.mkdir()
    for number in range(10):
        write(folder / f"{number}.png", f"{chr(65 + number)} pixels")
    return folder


def write(path: Path, text: str) -> None:
    """Write a file whose modification time is long ago; its change time is now, of course."""
    path.write_text(text, "utf-8")
    os.utime(path, (1e9, 1e9))


def letters(values: list[float]) -> str:
    """Return what the values were made from."""
    return "".join(chr(int(value) % 1000) for value in values)


class TestWhatIsEncoded:
    def test_all_at_first_and_nothing_when_nothing_has_changed(
        self, tmp_path: Path, room: Path
    ) -> None:
        first = Run(tmp_path / "cache", room).epoch()
        assert (first.encodes, first.prepared, letters(first.values())) == (10, 1, "ABCDEFGHIJ")
        again = Run(tmp_path / "cache", room).epoch()
        assert (again.encodes, again.prepared, letters(again.values())) == (0, 0, "ABCDEFGHIJ")
        assert again.values("crop_resolution") == [(64, 32)] * 10
        assert again.encoder.decoded == 10  # asked for the resolution, as nobody else tells it

    def test_one_when_one_is_added(self, tmp_path: Path, room: Path) -> None:
        Run(tmp_path / "cache", room).epoch()
        write(room / "5b.png", "Z")
        run = Run(tmp_path / "cache", room).epoch()
        assert (run.encodes, letters(run.values())) == (1, "ABCDEFZGHIJ")

    def test_one_when_one_caption_is_edited(self, tmp_path: Path, room: Path) -> None:
        for number in range(10):
            write(room / f"{number}.txt", "x" * (number + 1))
        Run(tmp_path / "cache", room, **TEXT).epoch()
        write(room / "3.txt", "x" * 50)
        run = Run(tmp_path / "cache", room, **TEXT).epoch()
        lengths = run.values("text_encoder_hidden_state")
        assert (run.encodes, lengths) == (1, [1, 2, 3, 50, 5, 6, 7, 8, 9, 10])

    def test_none_when_the_folder_was_moved(self, tmp_path: Path, room: Path) -> None:
        Run(tmp_path / "cache", room).epoch()
        moved = tmp_path / "elsewhere"
        room.rename(moved)
        run = Run(tmp_path / "cache", moved).epoch()
        assert (run.encodes, letters(run.values())) == (0, "ABCDEFGHIJ")
        assert run.values("image_path")[0] == str(moved / "0.png")

    def test_one_of_forty_equal_files_and_each_has_its_own_path(self, tmp_path: Path) -> None:
        for number in range(40):
            write(tmp_path / f"{number:02}.png", "A")
        run = Run(tmp_path / "cache", tmp_path).epoch()
        assert (run.encodes, letters(run.values())) == (1, 40 * "A")
        assert len(set(run.values("image_path"))) == 40

    def test_equal_prompts_share_one_encode_and_one_copy(self, tmp_path: Path, room: Path) -> None:
        for number in range(10):
            write(room / f"{number}.txt", "the same\nanother")
        run = Run(tmp_path / "cache", room, concept={"image_variations": 2}, **TEXT)
        assert run.epoch().encodes == 1
        assert run.epoch().encodes == 2
        assert set(run.values("text_encoder_hidden_state")) == {7.0}
        assert len(run.cache._artifacts) == 2

    def test_only_the_new_name_for_old_items(self, tmp_path: Path, room: Path) -> None:
        write(room / "2-mask", "M")
        watched: dict[str, Any] = {"extra_watched_paths_in_names": ["mask_path"]}
        Run(tmp_path / "cache", room, **watched).epoch()
        run = Run(tmp_path / "cache", room, **MASKED).epoch()
        assert {name for name, _, _ in run.encoder.encoded} == {"latent_mask"}
        assert (run.encodes, letters(run.values())) == (10, "ABCDEFGHIJ")
        assert run.values("latent_mask")[2] == ord("M")
        assert Run(tmp_path / "cache", room, **MASKED).epoch().encodes == 0

    def test_all_names_if_the_new_one_has_another_shape(self, tmp_path: Path, room: Path) -> None:
        """The resolution is no part of these keys, so that nobody but the shape tells."""
        one: dict[str, Any] = {"split_names": ["latent_image"], "aggregate_names": []}
        two: dict[str, Any] = {
            "split_names": ["latent_image", "latent_mask"],
            "aggregate_names": [],
        }
        Run(tmp_path / "cache", room, **one).epoch()
        run = Run(tmp_path / "cache", room, size=lambda _v, _i: (32, 32), **two).epoch()
        item = run.cache.get_item(0)
        assert item["latent_image"].shape == item["latent_mask"].shape == (4, 4, 4)

    def test_an_edit_that_keeps_the_modification_time(self, tmp_path: Path, room: Path) -> None:
        Run(tmp_path / "cache", room).epoch()
        write(room / "4.png", "Q pixels")  # of the same length, too
        run = Run(tmp_path / "cache", room).epoch()
        assert (run.encodes, letters(run.values())) == (1, "ABCDQFGHIJ")

    def test_an_edited_added_or_removed_sidecar(self, tmp_path: Path, room: Path) -> None:
        write(room / "2-mask", "M")
        Run(tmp_path / "cache", room, **MASKED).epoch()
        write(room / "2-mask", "N")
        write(room / "3-mask", "O")
        run = Run(tmp_path / "cache", room, **MASKED).epoch()
        assert run.encodes == 4
        assert run.values("latent_mask")[2:4] == [ord("N"), ord("O")]
        (room / "3-mask").unlink()
        run = Run(tmp_path / "cache", room, **MASKED).epoch()
        assert (run.encodes, run.values("latent_mask")[3]) == (0, 0.0)  # made at first

    def test_another_encoder_finds_nothing_of_the_first(self, tmp_path: Path, room: Path) -> None:
        import torch

        Run(tmp_path / "cache", room).epoch()
        other = Run(tmp_path / "cache", room, encoder_fingerprint=torch.nn.Linear(2, 2)).epoch()
        assert other.encodes == 10
        assert Run(tmp_path / "cache", room).epoch().encodes == 0

    def test_other_settings_of_a_concept_but_not_its_place(
        self, tmp_path: Path, room: Path
    ) -> None:
        """Augmentations change what is encoded; a seed or the name of a folder do not."""
        names = ["concept.path", "concept.seed", "concept.image"]
        options: dict[str, Any] = {"variations_group_in_name": names}
        flipped = {"image": {"enable_random_flip": True}}
        Run(tmp_path / "cache", room, concept={"image": {}}, **options).epoch()
        run = Run(tmp_path / "cache", room, concept=flipped, **options).epoch()
        assert run.encodes == 10
        again = Run(tmp_path / "cache", room, concept={**flipped, "seed": 8}, **options)
        assert again.epoch().encodes == 0

    def test_what_changes_while_it_is_encoded_is_not_kept(self, tmp_path: Path, room: Path) -> None:
        run = Run(tmp_path / "cache", room, on_error="raise", threads=1)
        run.cache._before._call = lambda: write(room / "0.png", "Y pixels")
        with pytest.raises(errors.EncoderError, match="changed while it was encoded"):
            run.epoch()
        again = Run(tmp_path / "cache", room).epoch()
        assert (again.encodes, letters(again.values())) == (1, "YBCDEFGHIJ")

    def test_without_a_fingerprint_there_is_one_warning(
        self, tmp_path: Path, room: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        run = Run(tmp_path / "cache", room, encoder_fingerprint=None).epoch().epoch()
        assert run.encodes == 10
        # Caches that earlier tests have left may be heard at any moment.
        ours = [each for each in caplog.records if each.name.startswith("smartcache.integrations")]
        assert [each.message.count("cannot be noticed") for each in ours] == [1]

    def test_little_is_written_for_one_edit(self, tmp_path: Path, room: Path) -> None:
        """A row each for the file, the item, its size and artifact, and that all are noted."""
        Run(tmp_path / "cache", room).epoch()
        unchanged = Run(tmp_path / "cache", room).epoch()
        assert unchanged.cache._table._connected().total_changes == 0
        write(room / "7.png", "Z")
        edited = Run(tmp_path / "cache", room).epoch()
        assert (edited.encodes, edited.cache._table._connected().total_changes) == (1, 5)


class TestEpochs:
    def test_the_next_one_asks_for_nothing(self, tmp_path: Path, room: Path) -> None:
        run = Run(tmp_path / "cache", room).epoch()
        asked = run.encoder.decoded
        run.epoch()
        assert (run.encodes, run.encoder.decoded, run.prepared) == (10, asked, 1)

    def test_variations_come_one_after_the_other(self, tmp_path: Path, room: Path) -> None:
        run = Run(tmp_path / "cache", room, concept={"image_variations": 3})
        found = [run.epoch().values()[0] // 1000 for _ in range(5)]
        assert (found, run.encodes, run.prepared) == ([0, 1, 2, 0, 1], 30, 3)

    def test_repeats_follow_the_formula(self, tmp_path: Path, room: Path) -> None:
        """in_variation = (out_index + epoch * n) // len % V."""
        concept: dict[str, Any] = {"image_variations": 2, "balancing": 1.25}
        run = Run(tmp_path / "cache", room, concept=concept)
        for epoch in range(4):
            assert run.epoch().cache.length() == 12
            expected = [
                (place // 10 % 2 * 1000.0) + ord("A") + place % 10
                for place in range(epoch * 12, epoch * 12 + 12)
            ]
            assert run.values() == expected

    def test_samples_are_drawn_anew_from_all(self, tmp_path: Path, room: Path) -> None:
        concept: dict[str, Any] = {"balancing": 4, "balancing_strategy": "SAMPLES"}
        run = Run(tmp_path / "cache", room, concept=concept)
        epochs = [letters(run.epoch().values()) for _ in range(12)]
        assert {len(set(each)) for each in epochs} == {4}
        assert len(set(epochs)) > 6
        assert set("".join(epochs)) == set("ABCDEFGHIJ")
        again = Run(tmp_path / "cache", room, concept=concept)
        assert [letters(again.epoch().values()) for _ in range(12)] == epochs

    def test_samples_of_latents_and_captions_belong_together(
        self, tmp_path: Path, room: Path
    ) -> None:
        for number in range(10):
            write(room / f"{number}.txt", "x" * (number + 1))
        concept: dict[str, Any] = {
            **CONCEPT,
            "path": str(room),
            "balancing": 4,
            "balancing_strategy": "SAMPLES",
        }
        images = Run(tmp_path / "image", room, concept=concept).cache
        texts = Run(tmp_path / "text", room, concept=concept, **TEXT).cache
        pipeline = Pipeline([Sources([concept]), Encoder(), images, texts])
        for _ in range(3):
            pipeline.start_next_epoch()
            for index in range(4):
                latent = images.get_item(index, "latent_image")["latent_image"][0, 0, 0]
                state = texts.get_item(index)["text_encoder_hidden_state"][0, 0]
                assert latent - ord("A") == state - 1

    def test_groups_are_balanced_by_themselves_and_can_be_disabled(
        self, tmp_path: Path, room: Path
    ) -> None:
        other = tmp_path / "dogs"
        other.mkdir()
        write(other / "0.png", "X")
        run = Run(tmp_path / "cache", room, other, concept={"balancing": 0.5})
        run.pipeline.modules[0].items[-1][1]["balancing"] = 3
        assert letters(run.epoch().values()) == "ABCDEXXX"
        off = Run(tmp_path / "cache", room, other)
        off.pipeline.modules[0].items[0][1]["enabled"] = False
        assert (letters(off.epoch().values()), off.cache.length()) == ("X", 1)

    def test_length_is_that_of_upstream_before_the_first(self, tmp_path: Path, room: Path) -> None:
        run = Run(tmp_path / "cache", room, concept={"balancing": 2})
        assert run.cache.length() == 10
        assert run.epoch().cache.length() == 20

    def test_names(self, tmp_path: Path, room: Path) -> None:
        cache = Run(tmp_path / "cache", room, sourceless=True).cache
        assert cache.get_outputs() == ["latent_image", "crop_resolution", "image_path", "concept"]
        assert {"image_path", "concept.balancing", "concept.seed"} < set(cache.get_inputs())

    @pytest.mark.parametrize("kind", [SmartDiskCache, DiskCache])
    @pytest.mark.parametrize("sourceless", [False, True])
    def test_a_cache_of_texts_without_names_stands_in_nobodys_way(
        self, tmp_path: Path, room: Path, kind: Any, sourceless: bool
    ) -> None:
        Run(tmp_path / "cache", room).epoch().cache.close()
        run = Run(tmp_path / "cache", room, sourceless=sourceless)
        more = {"source_path_in_name": "image_path"} if kind is SmartDiskCache else {}
        options: dict[str, Any] = {**GROUPING, **more, "sourceless": sourceless}
        options |= {"content_key_in_name": "prompt", "before_cache_fun": run.prepare}
        text = kind(str(tmp_path / "texts"), split_names=[], aggregate_names=[], **options)
        alone = kind(str(tmp_path / "alone"))
        sources, encoder, images = run.pipeline.modules
        run.pipeline = Pipeline([sources, encoder, images, text, alone])
        for _ in range(2):
            run.epoch()
            assert (run.encodes, run.prepared, letters(run.values())) == (0, 0, "ABCDEFGHIJ")
            assert (text.get_outputs(), text.get_item(3)) == ([], {})
        assert text.length() == 10
        assert alone.length() == 0
        assert images.get_item(0, "concept" if sourceless else None)
        assert not (tmp_path / "texts").exists()
        text.close()

    @pytest.mark.parametrize("names", [["crop_resolution"], ["image_path"]])
    def test_aggregate_names_alone(self, tmp_path: Path, room: Path, names: list[str]) -> None:
        options: dict[str, Any] = {"split_names": [], "aggregate_names": names}
        values = Run(tmp_path / "cache", room, **options).epoch().values(names[0])
        assert len(values) == 10
        again = Run(tmp_path / "cache", room, **options).epoch()
        assert (again.encodes, again.values(names[0])) == (0, values)

    def test_progress_is_shown_for_each_phase(self, tmp_path: Path, room: Path) -> None:
        told: dict[str, int] = {}

        class Told(Job):
            def __init__(self, label: str) -> None:
                self.label = label

            def advance(self, amount: int = 1) -> None:
                told[self.label] = told.get(self.label, 0) + amount

        show = lambda label, *_: Told(label)  # noqa: E731
        Run(tmp_path / "cache", room, progress=show).epoch()
        assert told == {"validating cache": 10, "caching": 10, "loading aggregate cache": 0}
        told.clear()
        Run(tmp_path / "cache", room, progress=show).epoch()
        assert told == {"validating cache": 10, "loading aggregate cache": 10}


class Buckets:
    """A configuration of buckets, and the size that the encoder then has."""

    def __init__(self, size: tuple[int, int]) -> None:
        self.size = size
        self.asked: list[float] = []

    def options(self) -> dict[str, Any]:
        return {
            "size": lambda _variation, _index: self.size,
            "bucket_method_provider": lambda: f"buckets {self.size}",
            "rebucket_provider": self.rebucket,
        }

    def rebucket(self, aspect: float) -> list[str]:
        self.asked.append(aspect)
        return ["{}x{}".format(*self.size)]


class TestResolutions:
    def test_those_of_one_item_coexist_and_only_the_missing_one_is_built(
        self, tmp_path: Path, room: Path
    ) -> None:
        small, large = Buckets((64, 32)), Buckets((128, 64))
        assert Run(tmp_path / "cache", room, **small.options()).epoch().encodes == 10
        run = Run(tmp_path / "cache", room, **large.options()).epoch()
        assert (run.encodes, set(run.values("crop_resolution"))) == (10, {(128, 64)})
        assert run.cache.get_item(0)["latent_image"].shape == (4, 16, 8)
        back = Run(tmp_path / "cache", room, **small.options()).epoch()
        assert (back.encodes, set(back.values("crop_resolution"))) == (0, {(64, 32)})
        assert back.cache.get_item(0)["latent_image"].shape == (4, 8, 4)

    def test_other_buckets_need_no_image_decoded(self, tmp_path: Path, room: Path) -> None:
        """The aspect of the original is recorded; its bucket is the provider's to say."""
        small, large = Buckets((64, 32)), Buckets((128, 64))
        Run(tmp_path / "cache", room, **small.options()).epoch()
        Run(tmp_path / "cache", room, **large.options()).epoch()
        small.asked.clear()
        back = Run(tmp_path / "cache", room, **small.options()).epoch()
        assert (back.encoder.decoded, small.asked) == (0, [])
        other = Buckets((64, 32))
        named: dict[str, Any] = {
            **other.options(),
            "bucket_method_provider": lambda: "named otherwise",
        }
        run = Run(tmp_path / "cache", room, **named).epoch()
        assert (run.encoder.decoded, run.encodes, other.asked) == (0, 0, [2.0])

    def test_without_providers_upstream_is_asked(self, tmp_path: Path, room: Path) -> None:
        Run(tmp_path / "cache", room).epoch()
        run = Run(tmp_path / "cache", room, size=lambda _v, _i: (128, 64)).epoch()
        assert (run.encodes, set(run.values("crop_resolution"))) == (10, {(128, 64)})

    def test_a_provider_that_upstream_does_not_agree_with_costs_no_encode(
        self, tmp_path: Path, room: Path
    ) -> None:
        wrong: dict[str, Any] = {"rebucket_provider": lambda _aspect: ["72x40"]}
        assert Run(tmp_path / "cache", room, **wrong).epoch().encodes == 10
        run = Run(tmp_path / "cache", room, **wrong).epoch()
        assert (run.encodes, set(run.values("crop_resolution"))) == (0, {(64, 32)})

    def test_the_bucketing_module_says_which_of_several_an_item_has(
        self, tmp_path: Path, room: Path
    ) -> None:
        sizes = ((64, 32), (128, 64))

        class Bucketing:
            def variant_key_from_aspect(self, variation: int, index: int, aspect: float) -> str:
                assert aspect == 2.0
                return "{}x{}".format(*sizes[(variation + index) % 2])

        options: dict[str, Any] = {
            "aspect_bucketing": Bucketing(), "size": lambda v, i: sizes[(v + i) % 2],
        }  # fmt: skip
        Run(tmp_path / "cache", room, **options).epoch()
        run = Run(tmp_path / "cache", room, **options).epoch()
        assert (run.encodes, run.encoder.decoded) == (0, 0)
        assert run.values("crop_resolution")[:3] == [(64, 32), (128, 64), (64, 32)]


class TestTrust:
    @pytest.mark.parametrize("how", ["argument", "variable"])
    def test_what_is_known_is_not_looked_at_and_what_is_missing_is_built(
        self, tmp_path: Path, room: Path, monkeypatch: pytest.MonkeyPatch, how: str
    ) -> None:
        Run(tmp_path / "cache", room).epoch()
        write(room / "0.png", "Q")
        write(room / "9b.png", "Z")
        if how == "variable":
            monkeypatch.setenv("OT_SKIP_CACHE_VALIDATION", "1")
        run = Run(tmp_path / "cache", room, trust_cache=how == "argument").epoch()
        assert (run.encodes, letters(run.values())) == (1, "ABCDEFGHIJZ")
        monkeypatch.delenv("OT_SKIP_CACHE_VALIDATION", raising=False)
        looked = Run(tmp_path / "cache", room).epoch()
        assert (looked.encodes, letters(looked.values())) == (1, "QBCDEFGHIJZ")

    def test_sources_that_are_away_raise_unless_tolerated(self, tmp_path: Path, room: Path) -> None:
        Run(tmp_path / "cache", room).epoch()
        run = Run(tmp_path / "cache", room)
        (room / "3.png").unlink()
        with pytest.raises(errors.SourcesVanishedError, match=r"1 of 10 .*3\.png"):
            run.epoch()
        method: dict[str, Any] = {"bucket_method_provider": lambda: "one"}
        write(room / "3.png", "D pixels")
        Run(tmp_path / "cache", room, **method).epoch()
        told = Run(tmp_path / "cache", room, tolerate_missing_source=True, **method)
        (room / "3.png").unlink()
        assert (told.epoch().encodes, letters(told.values())) == (0, "ABCDEFGHIJ")


class TestSourceless:
    def test_it_trains_from_the_cache_alone_with_what_the_concepts_said(
        self, tmp_path: Path, room: Path
    ) -> None:
        concept: dict[str, Any] = {"image_variations": 2, "balancing": 2}
        whole = Run(tmp_path / "cache", room, concept=concept).epoch()
        expected = whole.values()
        shutil.rmtree(room)
        run = Run(tmp_path / "cache", sourceless=True)
        assert run.cache.length() == 10
        run.epoch()
        assert (run.values(), run.encodes, run.prepared) == (expected, 0, 0)
        item = run.cache.get_item(0)
        assert item["image_path"] == str(room / "0.png")
        assert item["concept"] == {**CONCEPT, **concept, "path": str(room)}
        assert run.cache.get_item(3, "concept")["concept"]["loss_weight"] == 0.5

    def test_texts_too(self, tmp_path: Path, room: Path) -> None:
        write(room / "4.txt", "four")
        expected = Run(tmp_path / "c", room, **TEXT).epoch().values("text_encoder_hidden_state")
        shutil.rmtree(room)
        run = Run(tmp_path / "c", sourceless=True, **TEXT).epoch()
        assert run.values("text_encoder_hidden_state") == expected

    def test_an_empty_cache_says_so(self, tmp_path: Path) -> None:
        with pytest.raises(errors.ArtifactError, match="nothing to train from"):
            Run(tmp_path / "cache", sourceless=True).epoch()

    def test_what_is_damaged_cannot_be_encoded(self, tmp_path: Path, room: Path) -> None:
        run = Run(tmp_path / "cache", room).epoch()
        key = next(iter(run.cache._artifacts))
        run.cache._artifacts.delete(key)
        with pytest.raises(errors.ArtifactError, match=r"1 items of .* missing or damaged"):
            Run(tmp_path / "cache", sourceless=True).epoch()


class TestModelTypes:
    def test_another_one_in_the_same_folder_is_refused(self, tmp_path: Path, room: Path) -> None:
        Run(tmp_path / "cache", room).epoch()
        with pytest.raises(errors.ConfigError, match="cache modeltype mismatch"):
            Run(tmp_path / "cache", room, modeltype="SDXL").epoch()

    def test_but_can_be_kept_apart(self, tmp_path: Path, room: Path) -> None:
        options: dict[str, Any] = {"separate_modeltypes": True}
        Run(tmp_path / "cache", room, **options).epoch()
        other = Run(tmp_path / "cache", room, modeltype="SDXL", **options)
        other.encoder.factor = 2
        assert other.epoch().encodes == 10
        assert other.values()[0] == 2 * ord("A")
        back = Run(tmp_path / "cache", room, **options).epoch()
        assert (back.encodes, letters(back.values())) == (0, "ABCDEFGHIJ")


class TestCollection:
    def test_what_no_source_refers_to_is_counted_and_deleted(
        self, tmp_path: Path, room: Path
    ) -> None:
        cache = tmp_path / "cache"
        Run(cache, room).epoch()
        assert SmartDiskCache.gc_preview(str(cache)) == {"orphan_count": 0, "orphan_bytes": 0}
        (room / "0.png").unlink()
        write(room / "1.png", "Z")
        shutil.copy(room / "2.png", room / "2b.png")
        Run(cache, room).epoch()
        (room / "2.png").unlink()  # its copy still refers to it
        counted = SmartDiskCache.gc_preview(str(cache))
        assert counted["orphan_count"] == 2
        assert counted["orphan_bytes"] > 2 * 4 * 8 * 4 * 4
        SmartDiskCache.gc_clean(str(cache))
        assert SmartDiskCache.gc_preview(str(cache)) == {"orphan_count": 0, "orphan_bytes": 0}
        run = Run(cache, room).epoch()
        assert (run.encodes, letters(run.values())) == (0, "ZCDEFGHIJ")
        assert len(run.cache._artifacts) == 9

    @pytest.mark.parametrize("left", [True, False], ids=["empty mount point", "no folder"])
    def test_a_drive_that_is_not_mounted_loses_nothing(
        self, tmp_path: Path, room: Path, left: bool
    ) -> None:
        other = tmp_path / "drive"
        shutil.copytree(room, other)
        for number in range(10):
            write(other / f"{number}.png", f"{number}")
        cache = tmp_path / "cache"
        Run(cache, room, other).epoch()
        other.rename(tmp_path / "unmounted")
        if left:
            other.mkdir()
        assert SmartDiskCache.gc_preview(str(cache))["orphan_count"] == 0
        SmartDiskCache.gc_clean(str(cache))
        if left:
            other.rmdir()
        (tmp_path / "unmounted").rename(other)
        assert Run(cache, room, other).epoch().encodes == 0
        shutil.rmtree(other)
        gone = SmartDiskCache.gc_clean(str(cache), vanished=True)
        assert gone["orphan_count"] == 10

    def test_a_folder_without_a_cache_has_no_orphans(self, tmp_path: Path) -> None:
        assert SmartDiskCache.gc_preview(str(tmp_path)) == {"orphan_count": 0, "orphan_bytes": 0}
        SmartDiskCache.gc_clean(str(tmp_path))
        assert list(tmp_path.iterdir()) == []


class TestFailures:
    def test_a_stop_keeps_what_is_done(self, tmp_path: Path, room: Path) -> None:
        run = Run(tmp_path / "cache", room, threads=1)
        run.cache.stop_check_fun = lambda: run.encodes >= 4
        with pytest.raises(CachingStoppedException):
            run.epoch()
        done = run.encodes
        assert 4 <= done < 10
        again = Run(tmp_path / "cache", room).epoch()
        assert (again.encodes, letters(again.values())) == (10 - done, "ABCDEFGHIJ")

    def test_an_item_that_cannot_be_decoded_is_replaced_loudly(
        self, tmp_path: Path, room: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        write(room / "3.png", "! broken")
        run = Run(tmp_path / "cache", room).epoch().epoch()
        assert letters(run.values()) == "ABCEEFGHIJ"
        (told,) = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
        assert "3.png: no pixels" in told
        assert f"is replaced by {room / '4.png'}" in told
        again = Run(tmp_path / "cache", room).epoch()
        assert (again.encodes, letters(again.values())) == (0, "ABCEEFGHIJ")
        write(room / "3.png", "D repaired")
        assert letters(Run(tmp_path / "cache", room).epoch().values()) == "ABCDEFGHIJ"

    def test_its_caption_is_replaced_with_it(self, tmp_path: Path, room: Path) -> None:
        write(room / "3.png", "! broken")
        for number in range(10):
            write(room / f"{number}.txt", "x" * (number + 1))
        images = Run(tmp_path / "image", room).cache
        texts = Run(tmp_path / "text", room, **TEXT).cache
        concept: dict[str, Any] = {**CONCEPT, "path": str(room)}
        Pipeline([Sources([concept]), Encoder(), images, texts]).start_next_epoch()
        state = texts.get_item(3)["text_encoder_hidden_state"][0, 0]
        latent = images.get_item(3)["latent_image"][0, 0, 0]
        assert (latent, state) == (ord("E"), 5)

    @pytest.mark.parametrize("on_error", ["skip", "raise"])
    def test_or_is_left_out_or_raises(self, tmp_path: Path, room: Path, on_error: str) -> None:
        write(room / "3.png", "! broken")
        run = Run(tmp_path / "cache", room, on_error=on_error)
        if on_error == "raise":
            with pytest.raises(errors.EncoderError, match=r"1 items .*\n.*3\.png: no pixels"):
                run.epoch()
        else:
            assert letters(run.epoch().values()) == "ABCEFGHIJ"
        (room / "3.png").unlink()
        assert Run(tmp_path / "cache", room).epoch().encodes == 0

    def test_if_all_of_a_group_fail_nothing_stands_in_for_them(
        self, tmp_path: Path, room: Path
    ) -> None:
        for number in range(10):
            write(room / f"{number}.png", f"! {number}")
        with pytest.raises(errors.EncoderError, match="no pixels"):
            Run(tmp_path / "cache", room).epoch()

    def test_a_flipped_bit_is_never_served(
        self, tmp_path: Path, room: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        Run(tmp_path / "cache", room).epoch().cache.close()
        flip(tmp_path / "cache", b"\x00\x00\x86\x42" * 8)  # 67.0: C
        run = Run(tmp_path / "cache", room).epoch()
        assert run.encodes == 0
        assert letters(run.values()) == "ABCDEFGHIJ"
        assert (run.encodes, run.prepared) == (1, 1)
        assert "2.png is damaged in the cache" in caplog.text

    def test_a_truncated_pack_is_encoded_again(self, tmp_path: Path, room: Path) -> None:
        Run(tmp_path / "cache", room).epoch().cache.close()
        (pack,) = packs(tmp_path / "cache")
        os.chmod(pack, 0o600)
        os.truncate(pack, pack.stat().st_size // 2)
        run = Run(tmp_path / "cache", room).epoch()
        assert letters(run.values()) == "ABCDEFGHIJ"
        assert 1 <= run.encodes <= 10

    @pytest.mark.parametrize("options", [{}, TEXT, {**MASKED, "trust_cache": True}])
    def test_a_damaged_index_is_made_again_and_nothing_is_encoded_again(
        self, tmp_path: Path, room: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
    ) -> None:
        first = Run(tmp_path / "cache", room, **options).epoch()
        name = first.cache.split_names[0]
        values = first.values(name)
        first.cache.close()
        path = tmp_path / "cache" / "sources.sqlite"
        whole = path.read_bytes()
        page = int.from_bytes(whole[16:18], "big")
        starts = range(0, len(whole), page)
        damaged = [
            b"", whole[:100], *(whole[:start] for start in starts[1:]), os.urandom(len(whole)),
            *(whole[:start] + bytes(page) + whole[start + page :] for start in starts),
            *(whole[:start] + b"\xa5" * page + whole[start + page :] for start in starts),
        ]  # fmt: skip
        for data in damaged:
            path.write_bytes(data)
            caplog.clear()
            run = Run(tmp_path / "cache", room, **options).epoch()
            assert (run.encodes, run.values(name)) == (0, values)
            run.cache.close()
            assert "set aside as sources.sqlite.damaged" in caplog.text
            (room / "5.png").rename(tmp_path / "away")
            assert SmartDiskCache.gc_clean(str(tmp_path / "cache"))["orphan_count"] == 0
            assert "Start each training" in caplog.text
            (tmp_path / "away").rename(room / "5.png")
            path.with_name("sources.sqlite.damaged").unlink()
            run = Run(tmp_path / "cache", room, **options).epoch()
            assert run.encodes == 0
            run.cache.close()

    def test_several_processes_make_a_damaged_index_once(self, tmp_path: Path, room: Path) -> None:
        cache = tmp_path / "cache"
        Run(cache, room).epoch().cache.close()
        path = cache / "sources.sqlite"
        path.write_bytes(b"x" * 10_000)
        ranks = [started(cache, room, 0) for _ in range(3)]
        go(*ranks)
        told = [json.loads(each.communicate(timeout=60)[0]) for each in ranks]
        assert [encodes for _, encodes, _ in told] == [0, 0, 0]
        assert {letters(values) for *_, values in told} == {"ABCDEFGHIJ"}
        assert path.with_name("sources.sqlite.damaged").read_bytes() == b"x" * 10_000

    def test_what_cannot_be_stored_is_an_error_not_a_bad_item(
        self, tmp_path: Path, room: Path
    ) -> None:
        run = Run(tmp_path / "cache", room)
        plain = run.encoder.get_item

        def get_item(variation: int, index: int, name: str | None = None) -> dict[str, Any]:
            unknown = {"latent_image": object()}
            return unknown if name in unknown else plain(variation, index, name)

        run.encoder.get_item = get_item  # type: ignore[assignment, method-assign]
        with pytest.raises(errors.UnsupportedValueError):
            run.epoch()

    def test_bad_arguments_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(errors.ConfigError, match="on_error cannot be"):
            SmartDiskCache(str(tmp_path), ["x"], on_error="zeros")  # type: ignore[arg-type]


def packs(cache: Path) -> list[Path]:
    """Return the files with the artifacts."""
    return [each for each in cache.glob("mgds/*/**/*") if each.suffix == ".pack"]


def flip(cache: Path, values: bytes) -> None:
    """Flip a bit of some values, wherever they are."""
    for pack in packs(cache):
        data = bytearray(pack.read_bytes())
        place = data.find(values)
        if place >= 0:
            os.chmod(pack, 0o600)
            data[place + 16] ^= 1
            pack.write_bytes(data)
            return
    raise AssertionError("no pack has these values")


def started(cache: Path, folder: Path, pause: float) -> subprocess.Popen[str]:
    """Start a process that waits to be told to run an epoch."""
    command = [sys.executable, "-m", "tests.integrations.mgds_pipeline", str(cache), str(folder)]
    process = subprocess.Popen(
        [*command, str(pause)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def go(*processes: subprocess.Popen[str]) -> None:
    for each in processes:
        assert each.stdin is not None
        each.stdin.write("\n")
        each.stdin.flush()


class TestProcesses:
    def test_two_ranks_encode_each_item_once(self, tmp_path: Path) -> None:
        room = tmp_path / "room"
        room.mkdir()
        for number in range(60):
            write(room / f"{number:02}.png", f"{chr(65 + number % 26)}{number}")
        ranks = [started(tmp_path / "cache", room, 0.04) for _ in range(2)]
        go(*ranks)
        told = [json.loads(each.communicate(timeout=60)[0]) for each in ranks]
        assert [each.returncode for each in ranks] == [0, 0]
        assert sum(encodes for _, encodes, _ in told) == 60
        assert all(encodes > 0 for _, encodes, _ in told)
        assert told[0][2] == told[1][2]

    def test_after_a_kill_exactly_the_rest_is_encoded(self, tmp_path: Path) -> None:
        room = tmp_path / "room"
        room.mkdir()
        for number in range(3000):
            (room / f"{number:04}.png").write_bytes(b"A%d" % number)
        process = started(tmp_path / "cache", room, 0)
        go(process)
        sets = tmp_path / "cache" / "mgds"
        size, deadline = 0, time.monotonic() + 60
        while size < 1000 * 600 and time.monotonic() < deadline:
            size = sum(each.stat().st_size for each in sets.glob("[!.]*/**/*.pack"))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        run = Run(tmp_path / "cache", room)
        run.cache._open()
        done = len(run.cache._artifacts)
        assert 500 < done < 2900
        assert run.epoch().encodes == 3000 - done
        assert len(run.cache._artifacts) == 3000


def leave(cache: Path, room: Path, version: int, **changes: Any) -> None:
    """Write a cache as SmartDiskCache has left it, with other values than our encoder makes."""
    import torch

    cache.mkdir()
    entries: dict[str, Any] = {}
    index: dict[str, list[str]] = {}
    for path in sorted(room.glob("*.png")):
        digest = xxhash.xxh64(path.read_bytes()).hexdigest()
        name = f"{digest[:12]}_64x32"
        entry = {
            "filename": path.name, "hash": digest, "mtime": path.stat().st_mtime,
            "modeltype": "SD", "cache_version": version,
        }  # fmt: skip
        if version == 2:
            entry |= {"cache_file": name, "resolution": "64x32"}
        else:
            entry |= {"variants": {"64x32": {"cache_file": name}}, "sidecar_hashes": {}}
        entries[str(path)] = {**entry, **changes}
        index[digest] = [str(path)]
        value = {
            "latent_image": torch.full((4, 8, 4), 500.0 + path.read_bytes()[0]),
            "crop_resolution": (64, 32), "image_path": str(path), "__cache_version": version,
            "__modeltype": "SD", "__concept_name": "cats",
        }  # fmt: skip
        torch.save(value, cache / f"{name}_1.pt")
    document = {"version": version, "entries": entries, "hash_index": index}
    (cache / "cache.json").write_text(json.dumps(document), "utf-8")


class TestTakeover:
    @pytest.mark.parametrize("version", [2, 3])
    def test_nothing_is_encoded_again(self, tmp_path: Path, room: Path, version: int) -> None:
        leave(tmp_path / "cache", room, version)
        run = Run(tmp_path / "cache", room).epoch()
        assert (run.encodes, run.prepared) == (0, 0)
        assert run.values() == [500.0 + ord(each) for each in "ABCDEFGHIJ"]
        assert run.values("image_path")[9] == str(room / "9.png")
        for each in (tmp_path / "cache").glob("*.pt"):
            each.unlink()
        assert Run(tmp_path / "cache", room).epoch().values()[0] == 500.0 + ord("A")

    def test_of_a_moved_folder_too(self, tmp_path: Path, room: Path) -> None:
        leave(tmp_path / "cache", room, 3)
        room.rename(tmp_path / "moved")
        assert Run(tmp_path / "cache", tmp_path / "moved").epoch().encodes == 0

    def test_an_edited_source_is_encoded(self, tmp_path: Path, room: Path) -> None:
        leave(tmp_path / "cache", room, 3)
        write(room / "1.png", "Z pixels")
        run = Run(tmp_path / "cache", room).epoch()
        assert (run.encodes, run.values()[1]) == (1, ord("Z"))

    def test_another_model_type_or_resolution_is_not_taken(
        self, tmp_path: Path, room: Path
    ) -> None:
        leave(tmp_path / "cache", room, 3, modeltype="FLUX")
        assert Run(tmp_path / "cache", room).epoch().encodes == 10
        leave(tmp_path / "other", room, 3)
        run = Run(tmp_path / "other", room, size=lambda _v, _i: (128, 64))
        run.cache.resolution_from_upstream = True
        assert run.epoch().encodes == 10

    def test_a_missing_name_alone_is_encoded(self, tmp_path: Path, room: Path) -> None:
        leave(tmp_path / "cache", room, 3)
        run = Run(tmp_path / "cache", room, split_names=["latent_image", "latent_mask"]).epoch()
        assert {name for name, _, _ in run.encoder.encoded} == {"latent_mask"}
        assert run.values()[0] == 500.0 + ord("A")

    def test_crafted_and_damaged_files_run_nothing_and_are_encoded(
        self, tmp_path: Path, room: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        import torch

        leave(tmp_path / "cache", room, 3)
        victim = tmp_path / "victim"

        class Crafted:
            def __reduce__(self) -> tuple[Callable[..., object], tuple[str, ...]]:
                return os.system, (f"touch {victim}",)

        files = sorted((tmp_path / "cache").glob("*.pt"))
        torch.save({"latent_image": Crafted()}, files[0])
        files[1].write_bytes(pickle.dumps(Crafted()))
        files[2].write_bytes(files[2].read_bytes()[:100])
        run = Run(tmp_path / "cache", room).epoch()
        assert run.encodes == 3
        assert not victim.exists()
        assert caplog.text.count("is not taken over") == 3


class TestDiskCache:
    def test_latents_are_known_by_their_files(self, tmp_path: Path, room: Path) -> None:
        assert Run(tmp_path / "cache", room, kind=DiskCache).epoch().encodes == 10
        write(room / "+.png", "Z")  # all others have another position now
        write(room / "4.png", "Y")
        run = Run(tmp_path / "cache", room, kind=DiskCache).epoch()
        assert (run.encodes, letters(run.values())) == (2, "ZABCDYFGHIJ")
        assert run.values("image_path")[0] == str(room / "+.png")

    def test_texts_are_known_by_their_prompts(self, tmp_path: Path, room: Path) -> None:
        write(room / "4.txt", "four")
        options: dict[str, Any] = {
            "split_names": ["text_encoder_hidden_state"],
            "aggregate_names": [],
        }
        Run(tmp_path / "cache", room, kind=DiskCache, **options).epoch()
        write(room / "4.txt", "fourteen")
        run = Run(tmp_path / "cache", room, kind=DiskCache, **options).epoch()
        assert (run.encodes, run.values("text_encoder_hidden_state")[4]) == (1, 8.0)

    def test_without_a_path_items_are_known_by_their_position(
        self, tmp_path: Path, room: Path
    ) -> None:
        import torch

        options: dict[str, Any] = {
            "split_names": ["latent_image"],
            "aggregate_names": ["crop_resolution"],
        }

        def run() -> Run:
            made = Run(tmp_path / "cache", room, kind=DiskCache, **options)
            names = ["concept"]
            made.pipeline.modules[0].get_outputs = lambda: names
            paths = [path for path, _ in made.pipeline.modules[0].items]

            def get_item(_: int, index: int, name: str | None = None) -> dict[str, Any]:
                small = {"crop_resolution": (8, 8)}
                latent = {"latent_image": torch.full((1, 1, 1), float(index))}
                return small if name in small else latent

            made.encoder.get_item = get_item  # type: ignore[assignment, method-assign]
            made.encoder.length = lambda: len(paths)  # type: ignore[method-assign]
            return made.epoch()

        assert run().values() == [float(each) for each in range(10)]
        again = run()
        assert (again.prepared, again.values()[9]) == (0, 9.0)

    def test_samples_follow_each_other_as_they_did(self, tmp_path: Path, room: Path) -> None:
        concept: dict[str, Any] = {"balancing": 4, "balancing_strategy": "SAMPLES"}
        run = Run(tmp_path / "cache", room, kind=DiskCache, concept=concept)
        assert [letters(run.epoch().values()) for _ in range(3)] == ["ABCD", "EFGH", "IJAB"]

    def test_a_cache_behind_another_asks_past_it(self, tmp_path: Path, room: Path) -> None:
        """The first one gives image_path too, but in the order of its epoch."""
        for number in range(10):
            write(room / f"{number}.txt", "x" * (number + 1))
        concept: dict[str, Any] = {
            **CONCEPT,
            "path": str(room),
            "balancing": 0.5,
            "image_variations": 2,
        }
        names: dict[str, Any] = {
            "split_names": ["text_encoder_hidden_state", "other"],
            "aggregate_names": [],
        }
        images = Run(tmp_path / "image", room, kind=DiskCache).cache
        texts = Run(tmp_path / "text", room, kind=DiskCache, **names).cache
        pipeline = Pipeline([Sources([concept]), Encoder(), images, texts])
        for expected in ("ABCDE", "FGHIJ", "ABCDE"):
            pipeline.start_next_epoch()
            found = [images.get_item(each)["latent_image"][0, 0, 0].item() for each in range(5)]
            states = [texts.get_item(each)["text_encoder_hidden_state"][0, 0] for each in range(5)]
            assert letters(found) == expected
            assert letters([state + 64 for state in states]) == expected


class TestPrefetchIterator:
    def test_each_loop_iterates_anew(self) -> None:
        began: list[None] = []

        class Epochs:
            def __iter__(self) -> Any:
                began.append(None)
                return iter(range(5))

        loader = PrefetchIterator(Epochs(), queue_size=2)
        assert list(loader) == [0, 1, 2, 3, 4]
        assert len(began) == 1  # the next epoch must be started by somebody else
        assert list(loader) == [0, 1, 2, 3, 4]

    def test_an_exception_is_raised_in_its_place(self) -> None:
        def failing() -> Any:
            yield 1
            raise OSError("no more")

        read = iter(PrefetchIterator(failing(), 1, stop_poll_interval=0.1))
        assert next(read) == 1
        with pytest.raises(OSError, match="no more"):
            next(read)

    def test_close_does_not_wait_for_one_that_hangs(self) -> None:
        release = threading.Event()

        def hanging() -> Any:
            yield 1
            release.wait(20)
            yield 2

        with PrefetchIterator(hanging()) as loader:
            reading = iter(loader)
            assert next(reading) == 1
            began = time.monotonic()
            loader.close(timeout=0.1)
            assert time.monotonic() - began < 5
        release.set()


def test_without_mgds_the_error_says_what_to_install() -> None:
    code = """
import sys, smartcache, smartcache.integrations
assert not {"numpy", "torch", "smartcache.integrations.mgds"} & {*sys.modules}
import smartcache.integrations.mgds
assert "torch" not in sys.modules
from smartcache.errors import ConfigError
try:
    from smartcache.integrations.mgds import SmartDiskCache
except ConfigError as error:
    assert "needs the package mgds" in str(error) and "pip install" in error.hint
else:
    raise AssertionError
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd="/"
    )
    assert done.returncode == 0, done.stderr
