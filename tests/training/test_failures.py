"""What goes wrong with the caches of trainers, each shown not to happen here.

Encoders are asked for what is missing and for nothing else, old outputs are never served for new
content, and what is damaged or cannot be read is named and left out: it is never zeros.
"""

from __future__ import annotations

import inspect
import math
import os
import pickle
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from smartcache.cache import SmartCache
from smartcache.errors import (
    ConfigError,
    DatasetChangedError,
    DatasetError,
    EncoderError,
    OutputMissingError,
    SourcesVanishedError,
)
from smartcache.training import Dataset, Encoder, Item, Sources
from smartcache.training import encoder as training_encoder
from tests.training.conftest import Counting, Photos, encoded, opening

if TYPE_CHECKING:
    import torch.utils.data

SIDECARS = {"caption": (".txt", ".json:prompt"), "mask": "-mask.png"}
PassTime = Callable[[float], None]


class World:
    """A dataset of images and captions that is opened anew for every step, as by a new process."""

    def __init__(self, cache: SmartCache, photos: Photos) -> None:
        self.cache = cache
        self.photos = photos
        self.sources: Sources | Path = Sources(photos.path, sidecars=SIDECARS)
        self.latent = Counting("file")
        self.text = Counting("caption")
        self.options: dict[str, Any] = {}
        self.encoders = {
            "latent": self.encoder(self.latent, "file"),
            "text": self.encoder(self.text, "caption"),
        }

    def encoder(
        self,
        function: Callable[[list[Item]], object],
        *reads: str,
        **more: Any,  # noqa: ANN401
    ) -> Encoder:
        return Encoder(function, **{"reads": reads, "depends_on": "weights", **more})

    def open(self, **encoders: Encoder) -> Dataset:
        options: dict[str, Any] = {**self.options, **(encoders or self.encoders)}
        return self.cache.dataset("photos", self.sources, **options)

    def build(self, **encoders: Encoder) -> dict[str, int]:
        """Build it; return what was encoded."""
        with self.open(**encoders) as dataset:
            report = dataset.build()
            self.failed = {each.item: each.reason for each in report.failed}
            self.report = report
            return {name: count for name, count in report.encoded.items() if count}

    def plan(self) -> dict[str, dict[str, int]]:
        with self.open() as dataset:
            return {name: dict(found) for name, found in dataset.plan().encode.items() if found}

    def calls(self) -> list[str]:
        """The items that were encoded since the last time this was asked."""
        names = sorted(self.latent.names + self.text.names)
        self.latent.calls, self.text.calls = [], []
        return names

    def check(self) -> None:
        """Compare all outputs with what is to be made of the sources as they are now."""
        with self.open() as dataset:
            for number in range(len(dataset)):
                found = dataset[number]
                path = self.photos.path / found["name"]
                caption = path.with_suffix(".txt").read_text().strip()
                assert found["latent"].tolist() == encoded(path.read_bytes()).tolist()
                assert found["text"].tolist() == encoded(caption).tolist()


@pytest.fixture
def world(cache: SmartCache, photos: Photos) -> World:
    photos.fill(5)
    return World(cache, photos)


@pytest.fixture
def built(world: World) -> World:
    assert world.build() == {"latent": 5, "text": 5}
    world.calls()
    return world


class TestOnlyWhatIsMissing:
    def test_nothing_has_changed_nothing_is_encoded(self, built: World) -> None:
        assert built.build() == {}
        assert built.report.reused == {"latent": 5, "text": 5}
        assert built.calls() == []
        built.check()

    def test_an_edited_caption_is_one_text_and_no_latent(self, built: World) -> None:
        """OneTrainer serves the old tensor, and diffusion-pipe encodes the whole bucket."""
        (built.photos.path / "002.txt").write_text("other words")
        assert built.plan() == {"text": {"edited": 1}}
        assert built.build() == {"text": 1}
        assert built.calls() == ["002.png"]
        built.check()

    def test_an_edited_image_is_one_latent_and_no_text(self, built: World) -> None:
        """sd-scripts, ai-toolkit and SimpleTuner serve the latent of the image that was there."""
        built.photos.add("002.png", like="other")
        assert built.plan() == {"latent": {"edited": 1}}
        assert built.build() == {"latent": 1}
        assert built.calls() == ["002.png"]
        built.check()

    def test_an_edit_that_keeps_size_and_modification_time_is_noticed(
        self, built: World, pass_time: PassTime
    ) -> None:
        """OneTrainer misses it."""
        pass_time(60)
        built.build()
        path = built.photos.path / "002.png"
        st, data = path.stat(), bytearray(path.read_bytes())
        data[-20] ^= 1
        path.write_bytes(data)
        os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))
        assert built.build() == {"latent": 1}
        built.check()

    def test_an_edit_that_is_taken_back_encodes_nothing(self, built: World) -> None:
        path = built.photos.path / "002.txt"
        path.write_text("other words")
        built.build()
        path.write_text("caption 2\n")
        built.calls()
        assert built.build() == {}
        built.check()

    def test_a_new_image_is_one_of_each(self, built: World) -> None:
        built.photos.add("new.png", "new words")
        assert built.plan() == {"latent": {"new file": 1}, "text": {"new file": 1}}
        assert built.build() == {"latent": 1, "text": 1}
        built.check()

    def test_why_something_is_encoded_is_known_until_it_is(self, built: World) -> None:
        built.photos.add("new.png", "new words")
        (built.photos.path / "002.txt").write_text("other words")
        expected = {"latent": {"new file": 1}, "text": {"new file": 1, "edited": 1}}
        for _ in range(2):
            assert built.plan() == expected
        for name in ("002.png", "002.txt"):
            shutil.copy(built.photos.path / name, built.photos.path / f"renamed {name}")
            (built.photos.path / name).unlink()
        assert built.plan() == expected

    def test_a_moved_dataset_encodes_nothing(self, built: World) -> None:
        built.photos.path.rename(built.photos.path.with_name("moved"))
        built.photos.path = built.photos.path.with_name("moved")
        built.sources = Sources(built.photos.path, sidecars=SIDECARS)
        assert built.build() == {}
        built.check()

    def test_a_copied_dataset_encodes_nothing(self, built: World) -> None:
        """On another disk it has other inodes and times."""
        copy = built.photos.path.with_name("copy")
        shutil.copytree(built.photos.path, copy, copy_function=shutil.copyfile)
        shutil.rmtree(built.photos.path)
        built.photos.path = copy
        built.sources = Sources(copy, sidecars=SIDECARS)
        assert built.build() == {}
        built.check()

    def test_renamed_and_removed_images_encode_nothing(self, built: World) -> None:
        for suffix in (".png", ".txt"):
            (built.photos.path / f"002{suffix}").rename(built.photos.path / f"new name{suffix}")
        (built.photos.path / "003.png").unlink()
        assert built.build() == {}
        built.check()

    def test_forty_equal_files_are_one_encode(self, world: World) -> None:
        for number in range(40):
            world.photos.add(f"equal/{number}.png", "the same words", like="equal")
        assert world.build() == {"latent": 6, "text": 6}
        assert world.report.shared == {"latent": 39, "text": 39}
        world.check()
        with world.open() as dataset:
            assert len(dataset) == 45

    def test_the_order_of_files_does_not_matter(self, built: World) -> None:
        """OneTrainer's older cache goes by position."""
        built.photos.add("000-before.png", "first of all")
        (built.photos.path / "001.png").unlink()
        assert built.build() == {"latent": 1, "text": 1}
        built.check()

    def test_two_images_that_change_places_encode_nothing(self, built: World) -> None:
        one, two = (built.photos.path / name for name in ("001.png", "002.png"))
        one.rename(built.photos.path / "x")
        two.rename(one)
        (built.photos.path / "x").rename(two)
        assert built.build() == {}
        built.check()

    def test_the_second_epoch_does_no_work(self, built: World) -> None:
        """Not even the sources are looked at."""
        with built.open() as dataset:
            dataset.build()
            first = [dataset[number] for number in range(len(dataset))]
            shutil.rmtree(built.photos.path)
            second = [dataset[number] for number in range(len(dataset))]
        assert [each["name"] for each in first] == [each["name"] for each in second]
        for one, two in zip(first, second, strict=True):
            assert one["latent"].tolist() == two["latent"].tolist()

    def test_the_next_start_reads_no_source(self, built: World, pass_time: PassTime) -> None:
        pass_time(60)
        built.build()
        with opening(built.photos.path) as opened:
            assert built.build() == {}
            built.plan()
        assert opened == []

    def test_trust_builds_what_is_missing_and_looks_at_nothing(self, world: World) -> None:
        with world.open() as dataset:
            dataset.plan()
        world.photos.add("unseen.png", "unseen words")
        (world.photos.path / "002.txt").write_text("other words")
        world.options = {"validate": "trust"}
        assert world.build() == {"latent": 5, "text": 5}
        world.options = {}
        assert world.build() == {"latent": 1, "text": 2}
        world.check()


class TestOtherEncoders:
    @pytest.mark.parametrize("change", [{"depends_on": "other weights"}, {"version": 1}])
    def test_another_encoder_never_serves_old_outputs_and_keeps_them(
        self, built: World, change: dict[str, object]
    ) -> None:
        """No trainer has the encoder in its key: another VAE trains on the latents of the old."""
        other = Counting("file", salt="other")
        encoders = built.encoders | {"latent": built.encoder(other, "file", **change)}
        with built.open(**encoders) as dataset:
            with pytest.raises(OutputMissingError):
                dataset[0]
            assert dataset.plan().encode["latent"] == {"new encoder": 5}
            assert dataset.build().encoded == {"latent": 5, "text": 0}
            content = (built.photos.path / "000.png").read_bytes()
            assert dataset[0]["latent"].tolist() == encoded(content, salt="other").tolist()
        assert built.build() == {}
        assert built.calls() == []
        built.check()
        assert built.build(**encoders) == {}

    def test_weights_that_change_while_the_dataset_is_open_are_refused(self, world: World) -> None:
        import torch

        vae = torch.nn.Linear(2, 2)
        made = world.encoder(world.latent, "file", depends_on=vae)
        with world.open(latent=made) as dataset:
            with torch.no_grad():
                vae.weight += 1
            with pytest.raises(DatasetChangedError, match="What latent depends on has changed"):
                dataset.build()
        assert world.build(latent=made) == {"latent": 5}

    def test_a_new_output_leaves_the_others_alone(self, built: World) -> None:
        tokens = Counting("caption", salt="tokens")
        more = built.encoders | {"tokens": built.encoder(tokens, "caption")}
        with built.open(**more) as dataset:
            assert dataset.plan().encode["tokens"] == {"new output": 5}
        assert built.build(**more) == {"tokens": 5}
        assert built.calls() == []
        built.check()

    def test_more_variations_encode_the_new_ones(self, built: World) -> None:
        encoders = {"text": built.encoder(built.text, "caption", variations=3)}
        assert built.build(**encoders) == {"text": 10}
        with built.open(**encoders) as dataset:
            found = dataset.batch([1, 1, 1], variations=[0, 1, 2])["text"]
        expected = [encoded("caption 1", variation=number).tolist() for number in range(3)]
        assert found.tolist() == expected
        assert built.build(text=built.encoder(built.text, "caption", variations=2)) == {}

    def test_other_buckets_build_what_is_missing_and_going_back_builds_nothing(
        self, world: World, pass_time: PassTime
    ) -> None:
        """Wanted buckets come from recorded sizes: no image is opened to find out."""
        world.photos.add("wide.png", "wide", size=(64, 32))
        world.photos.add("high.png", "high", size=(32, 64))
        pass_time(60)
        square, shapes = "64x64", "64x64 96x48"
        one, two = (world.encoder(world.latent, "file", buckets=each) for each in (square, shapes))
        assert world.build(latent=one) == {"latent": 7}
        world.calls()
        with world.open(latent=two) as dataset:
            with opening(world.photos.path) as opened:
                assert dataset.plan().encode["latent"] == {"other buckets": 1}
            assert opened == []
            assert dataset.build().encoded == {"latent": 1}
            assert world.calls() == ["wide.png"]
        assert world.build(latent=one) == {}
        assert world.build(latent=two) == {}
        for made, bucket in ((one, (64, 64)), (two, (96, 48))):
            with world.open(latent=made) as dataset:
                number = len(dataset) - 1
                assert dataset[number]["name"] == "wide.png"
                content = (world.photos.path / "wide.png").read_bytes()
                expected = encoded(content, bucket=bucket)
                assert dataset[number]["latent"].tolist() == expected.tolist()

    def test_items_of_a_call_share_their_bucket(self, world: World) -> None:
        for number, size in enumerate([(64, 32), (32, 64), (32, 32)] * 4):
            world.photos.add(f"{number}-{size}.png", "words", size=size)
        seen: list[set[object]] = []

        def encode(items: list[Item]) -> object:
            seen.append({item.bucket for item in items})
            assert all(item.bucket is not None for item in items)
            return world.latent(items)

        made = world.encoder(encode, "file", buckets="area:64 step:16", batch=4)
        assert world.build(latent=made) == {"latent": 17}
        assert all(len(each) == 1 for each in seen)
        assert len(seen) < 10

    def test_an_encoder_cannot_read_what_is_not_in_its_key(self, world: World) -> None:
        """Else an edited image would leave the old output of an encoder of captions."""
        text = world.encoder(lambda items: [item.image().size for item in items], "caption")
        with (
            world.open(latent=world.encoders["latent"], text=text) as dataset,
            pytest.raises(ConfigError, match="'file', which it does not read"),
        ):
            dataset.build()
        assert world.build() == {"text": 5}


def pack_of(dataset: Dataset, output: str) -> Path:
    (pack,) = dataset.outputs[output].set.path.glob("*.pack")
    return pack


class TestDamage:
    def test_a_flipped_bit_is_never_served(self, built: World) -> None:
        """OneTrainer serves it as data."""
        wanted = encoded("caption 3").numpy().tobytes()
        with built.open() as dataset:
            pack = pack_of(dataset, "text")
        data = bytearray(pack.read_bytes())
        data[data.index(wanted) + 7] ^= 4
        pack.write_bytes(data)
        with built.open() as dataset:
            assert [dataset[number]["name"] for number in (0, 1, 2, 4)]
            with pytest.raises(OutputMissingError, match=r"003\.png") as caught:
                dataset[3]
            assert caught.value.items == ("003.png",)
            assert "build" in caught.value.hint
        assert built.build() == {"text": 1}
        assert built.calls() == ["003.png"]
        built.check()

    def test_truncated_data_is_missing_and_encoded_again(self, built: World) -> None:
        """OneTrainer's validation passes it, and training crashes."""
        with built.open() as dataset:
            pack = pack_of(dataset, "latent")
        os.truncate(pack, pack.stat().st_size // 2)
        with built.open() as dataset:
            lost: list[str] = []
            for number in range(5):
                try:
                    found = dataset[number]
                except OutputMissingError as error:
                    lost += error.items
                else:
                    content = (built.photos.path / found["name"]).read_bytes()
                    assert found["latent"].tolist() == encoded(content).tolist()
        assert 0 < len(lost) < 5
        assert built.build() == {"latent": len(lost)}
        assert built.calls() == lost
        built.check()

    def test_a_lost_pack_is_encoded_again(self, built: World) -> None:
        with built.open() as dataset:
            pack_of(dataset, "text").unlink()
        assert built.build() == {"text": 5}
        built.check()

    def test_a_lost_table_of_sources_loses_no_output(self, built: World) -> None:
        with built.open() as dataset:
            folder = dataset.path
        for path in folder.glob("index.sqlite3*"):
            path.unlink()
        assert built.build() == {}
        built.check()

    def test_a_miss_is_encoded_where_that_is_wanted(self, built: World) -> None:
        built.photos.add("new.png", "new words")
        began: list[int] = []
        built.options = {"miss": "encode"}
        with built.open() as dataset:
            dataset.before = lambda: began.append(1)
            dataset.refresh()
            batch = dataset.batch([5, 0, 5])
        assert batch["name"] == ["new.png", "000.png", "new.png"]
        assert batch["text"][0].tolist() == encoded("new words").tolist()
        assert sorted(built.calls()) == ["new.png", "new.png"]
        assert began
        assert built.build() == {}

    def test_a_miss_is_an_error_with_the_names_of_the_items(self, built: World) -> None:
        for number in range(5):
            built.photos.add(f"new {number}.png", "words")
        with built.open() as dataset:
            with pytest.raises(OutputMissingError, match="photos has no latent of some items") as e:
                dataset.batch(range(len(dataset)))
            assert e.value.items == tuple(f"new {number}.png" for number in range(5))


def bad_on(name: str, act: Callable[[Item], object]) -> Callable[[list[Item]], object]:
    """An encoder that does something else for one item."""

    def encode(items: list[Item]) -> object:
        import torch

        found = []
        for item in items:
            returned = act(item) if item.name == name else None
            found.append(torch.ones(2) if returned is None else returned)
        return found

    return encode


class TestFailedItems:
    @pytest.mark.parametrize("batch", [1, 3])
    def test_an_undecodable_image_is_left_out_named_and_not_tried_again(
        self, world: World, batch: int, pass_time: PassTime
    ) -> None:
        """In OneTrainer one of them disables the fast path for ever, and trains on zeros."""
        path = world.photos.add("bad.png", "words", size=(64, 64))
        path.write_bytes(path.read_bytes()[:-30])
        pass_time(60)
        calls: list[str] = []

        def encode(items: list[Item]) -> object:
            import torch

            calls.extend(item.name for item in items)
            return torch.stack([torch.tensor(item.image().size) for item in items])

        encoders = {
            "latent": world.encoder(encode, "file", batch=batch),
            "text": world.encoders["text"],
        }
        assert world.build(**encoders) == {"latent": 5, "text": 6}
        assert world.failed == {"bad.png": world.failed["bad.png"]}
        assert world.failed["bad.png"].startswith("unreadable: ")
        calls.clear()
        with world.open(**encoders) as dataset, opening(world.photos.path) as opened:
            plan = dataset.plan()
            assert plan.is_empty
            assert [each.item for each in plan.failed] == ["bad.png"]
            assert "1 unreadable: " in str(plan)
            assert dataset.build().encoded == {"latent": 0, "text": 0}
            assert [dataset[number]["name"] for number in range(len(dataset))] == [
                f"00{number}.png" for number in range(5)
            ]
        assert (opened, calls) == ([], [])
        with world.open(**encoders) as dataset:
            assert dataset.build(retry=True).encoded == {"latent": 0, "text": 0}
        assert calls.count("bad.png") >= 1
        world.photos.add("bad.png", size=(64, 64))
        assert world.build(**encoders) == {"latent": 1}
        assert world.failed == {}

    def test_an_image_without_a_size_is_left_out_where_buckets_are_asked_for(
        self, world: World, pass_time: PassTime
    ) -> None:
        (world.photos.path / "bad.png").write_bytes(b"no image")
        pass_time(60)
        made = world.encoder(world.latent, "file", buckets="64x64")
        assert world.build(latent=made) == {"latent": 5}
        assert world.failed == {"bad.png": "unreadable: no image size in its header"}
        with opening(world.photos.path) as opened:
            assert world.build(latent=made) == {}
        assert opened == []

    def test_an_unreadable_file_is_left_out_and_tried_when_it_changes(self, world: World) -> None:
        link = world.photos.path / "link.png"
        link.symlink_to(world.photos.path / "later")
        assert world.build() == {"latent": 5, "text": 5}
        assert world.failed == {"link.png": "unreadable: No such file or directory"}
        world.photos.add("x.png", "words").rename(world.photos.path / "later")
        (world.photos.path / "x.txt").rename(world.photos.path / "link.txt")
        assert world.build() == {"latent": 1, "text": 1}
        assert world.failed == {}

    def test_a_broken_sidecar_leaves_its_item_out(self, built: World) -> None:
        (built.photos.path / "002.txt").write_bytes(b"\xff")
        assert built.build() == {}
        assert built.failed == {"002.png": "unreadable: 002.txt: it is not a text in UTF-8"}
        with built.open() as dataset:
            assert len(dataset) == 4

    def test_what_a_source_does_not_have_is_its_failure_if_the_encoder_needs_it(
        self, world: World
    ) -> None:
        (world.photos.path / "002.txt").unlink()
        text = world.encoder(lambda items: [len(item["caption"]) for item in items], "caption")
        assert world.build(text=text) == {"text": 4}
        assert world.failed == {"002.png": "it has no caption"}

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
    def test_nan_is_recorded(self, world: World, dtype: str) -> None:
        """It kills a training hours later, where it is trained on."""
        import torch

        nan = torch.tensor([1.0, math.nan]).to(getattr(torch, dtype))
        made = world.encoder(bad_on("003.png", lambda item: nan), "file", batch=2)
        assert world.build(latent=made) == {"latent": 4}
        assert world.failed == {"003.png": "NaN in latent"}
        assert world.build(latent=made) == {}
        assert world.failed == {"003.png": "NaN in latent"}

    def test_nan_is_raised_or_kept_if_that_is_wanted(self, world: World) -> None:
        import torch

        def nan(_item: Item) -> object:
            return {"mean": torch.ones(2), "std": torch.tensor([math.nan])}

        def encode(items: list[Item]) -> object:
            good = {"mean": torch.ones(2), "std": torch.ones(1)}
            return [nan(item) if item.name == "003.png" else good for item in items]

        made = world.encoder(encode, "file")
        with world.open(latent=made) as dataset:
            with pytest.raises(EncoderError, match=r"latent of 003\.png .*NaN in latent\['std'\]"):
                dataset.build(nan="raise")
            assert dataset.failed == []
            assert dataset.build(nan="keep").failed == []
            assert math.isnan(dataset[3]["latent"]["std"][0])

    def test_a_bug_that_hits_one_item_is_its_failure(self, world: World) -> None:
        for batch in (1, 2, 5):
            version = f"batch {batch}"

            def fail(item: Item) -> object:
                raise ZeroDivisionError(f"no luck with {item.name}")

            made = world.encoder(bad_on("003.png", fail), "file", batch=batch, version=version)
            assert world.build(latent=made) == {"latent": 4}
            expected = "failed: ZeroDivisionError: no luck with 003.png"
            assert world.failed == {"003.png": expected}

    def test_an_exception_in_a_list_is_a_failure_of_its_item(self, world: World) -> None:
        made = world.encoder(
            bad_on("003.png", lambda item: ValueError("too dark")), "file", batch=5
        )
        assert world.build(latent=made) == {"latent": 4}
        assert world.failed == {"003.png": "failed: ValueError: too dark"}

    @pytest.mark.parametrize("batch", [1, 2, 5])
    def test_a_bug_in_the_encoder_is_raised_and_nothing_is_remembered(
        self, world: World, batch: int
    ) -> None:
        def encode(items: list[Item]) -> object:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

        made = world.encoder(encode, "file", batch=batch)
        with world.open(latent=made) as dataset:
            with pytest.raises(RuntimeError, match="mat1 and mat2"):
                dataset.build()
            assert dataset.failed == []
        assert world.build() == {"latent": 5, "text": 5}

    def test_what_cannot_be_an_output_is_an_error_of_the_encoder(self, world: World) -> None:
        made = world.encoder(lambda items: None, "file")
        with world.open(latent=made) as dataset, pytest.raises(EncoderError, match="NoneType"):
            dataset.build()
        assert world.build() == {"latent": 5, "text": 5}

    def test_failures_are_raised_if_that_is_wanted(self, world: World) -> None:
        made = world.encoder(bad_on("003.png", lambda item: ValueError("too dark")), "file")
        with world.open(latent=made) as dataset:
            with pytest.raises(EncoderError, match=r"latent of 003\.png .*too dark") as caught:
                dataset.build(on_error="raise")
            assert caught.value.items == ("003.png",)
            assert dataset.failed == []


class TestInterrupted:
    def test_stop_keeps_what_was_done(self, world: World) -> None:
        with world.open() as dataset:
            report = dataset.build(stop=lambda: len(world.latent.names) >= 3)
            assert report.is_stopped
            done = report.encoded["latent"]
            assert 3 <= done < 5
            assert report.encoded["text"] == 0
        assert world.build() == {"latent": 5 - done, "text": 5}
        world.check()

    @pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
    def test_an_interrupt_keeps_what_was_written(
        self, world: World, error: type[BaseException]
    ) -> None:
        def encode(items: list[Item]) -> object:
            if len(world.latent.names) == 3:
                raise error
            return world.latent(items)

        ended: list[int] = []
        with world.open(latent=world.encoder(encode, "file")) as dataset:
            with pytest.raises(error):
                dataset.build(after=lambda: ended.append(1))
            assert dataset.failed == []
        assert ended == [1]
        assert world.build() == {"latent": 2, "text": 5}
        world.check()

    def test_before_is_called_once_and_only_if_something_is_encoded(self, world: World) -> None:
        """It moves the model to the GPU."""
        told: list[str] = []
        options: dict[str, Any] = {
            "before": lambda: told.append("before"), "after": lambda: told.append("after"),
        }  # fmt: skip
        with world.open() as dataset:
            dataset.build(**options)
            assert told == ["before", "after"]
            dataset.build(**options)
            assert told == ["before", "after"]
        (world.photos.path / "003.txt").write_text("other words")
        with world.open() as dataset:
            dataset.plan().execute(**options)
        assert told == ["before", "after"] * 2

    def test_before_is_not_called_if_all_that_is_missing_has_failed_before(
        self, world: World
    ) -> None:
        made = world.encoder(bad_on("003.png", lambda item: ValueError("too dark")), "file")
        world.build(latent=made)
        with world.open(latent=made) as dataset:
            dataset.build(before=lambda: pytest.fail("nothing is to be encoded"))

    def test_after_is_called_if_the_encoder_raises(self, world: World) -> None:
        told: list[str] = []

        def encode(items: list[Item]) -> object:
            raise EncoderError("no")

        with (
            world.open(latent=world.encoder(encode, "file")) as dataset,
            pytest.raises(EncoderError),
        ):
            dataset.build(after=lambda: told.append("after"))
        assert told == ["after"]

    def test_a_file_that_is_edited_while_it_is_encoded_is_not_kept_under_its_old_key(
        self, world: World
    ) -> None:
        path = world.photos.path / "003.png"
        before = path.read_bytes()

        def encode(items: list[Item]) -> object:
            made = world.latent(items)
            if items[0].name == "003.png":
                world.photos.add("003.png", like="edited meanwhile")
            return made

        assert world.build(latent=world.encoder(encode, "file")) == {"latent": 4}
        assert "changed" in world.failed["003.png"]
        assert world.build() == {"latent": 1, "text": 5}
        assert world.failed == {}
        world.check()
        path.write_bytes(before)
        assert world.build() == {"latent": 1}
        world.check()

    def test_an_encoder_that_opens_the_file_itself_is_no_way_around_that(
        self, world: World
    ) -> None:
        def encode(items: list[Item]) -> object:
            if items[0].name == "003.png":
                world.photos.add("003.png", like="edited meanwhile")
            return [encoded(item.path.read_bytes()) for item in items]

        assert world.build(latent=world.encoder(encode, "file")) == {"latent": 4}
        assert world.build() == {"latent": 1, "text": 5}
        world.check()

    def test_a_drive_that_is_unmounted_while_it_is_encoded_is_no_fault_of_the_files(
        self, world: World
    ) -> None:
        """When it is there again, nothing is left out."""
        away = world.photos.path.with_name("away")

        def encode(items: list[Item]) -> object:
            if world.photos.path.exists():
                world.photos.path.rename(away)
            return world.latent(items)

        assert world.build(latent=world.encoder(encode, "file")) == {}
        assert len(world.failed) == 5
        with world.open() as dataset, pytest.raises(SourcesVanishedError):
            dataset.build()
        away.rename(world.photos.path)
        assert world.build() == {"latent": 5, "text": 5}
        assert world.failed == {}
        world.check()

    def test_an_unmounted_drive_costs_no_output(self, built: World) -> None:
        """OneTrainer's garbage collection deletes the whole cache."""
        away = built.photos.path.rename(built.photos.path.with_name("away"))
        with built.open() as dataset:
            for act in (dataset.plan, dataset.build, dataset.clean):
                with pytest.raises(SourcesVanishedError):
                    act()
        away.rename(built.photos.path)
        assert built.build() == {}
        built.check()


class TestElsewhere:
    def test_an_export_needs_neither_sources_nor_store(self, world: World, tmp_path: Path) -> None:
        photos = world.photos
        photos.add("wide.png", "wide words", size=(64, 32))
        world.sources = Sources(
            photos.path, sidecars=SIDECARS, repeats=2.5, metadata={"weight": 0.5}
        )
        latent = world.encoder(world.latent, "file", buckets="64x64 96x48")
        encoders = {"latent": latent, "text": world.encoders["text"]}
        world.build(**encoders)
        content = (photos.path / "wide.png").read_bytes()
        with world.open(**encoders) as dataset:
            records = [dataset.record(number) for number in range(len(dataset))]
            assert dataset.export(tmp_path / "export") == 12
        world.cache.close()
        shutil.rmtree(tmp_path / "store")
        shutil.rmtree(photos.path)
        moved = (tmp_path / "export").rename(tmp_path / "elsewhere")
        with SmartCache(tmp_path / "other store") as other, other.open_dataset(moved) as dataset:
            assert len(dataset) == 6
            found = dataset[5]
            assert found["name"] == "wide.png"
            assert found["weight"] == 0.5
            assert found["latent"].tolist() == encoded(content, bucket=(96, 48)).tolist()
            assert found["text"].tolist() == encoded("wide words").tolist()
            assert [dataset.record(number) for number in range(6)] == records
            assert records[5]["caption"] == "wide words"
            assert records[5]["size"] == (64, 32)
            assert records[5]["bucket"] == {"latent": (96, 48)}
            assert records[5]["repeats"] == 2.5

    def test_an_export_of_what_is_not_encoded_names_it(self, built: World, tmp_path: Path) -> None:
        built.photos.add("new.png", "words")
        with built.open() as dataset:
            dataset.refresh()
            with pytest.raises(OutputMissingError) as caught:
                dataset.export(tmp_path / "export")
        assert caught.value.items == ("new.png",)

    def test_texts_are_kept_without_their_padding(self, world: World) -> None:
        """8.4 MB for every image with Flux, of which 0.7 MB are words."""
        import torch

        def encode(items: list[Item]) -> object:
            mask = torch.zeros(len(items), 512, dtype=torch.int64)
            hidden = torch.zeros(len(items), 512, 64, dtype=torch.bfloat16)
            for at, item in enumerate(items):
                count = len(item["caption"])
                mask[at, :count] = 1
                hidden[at, :count] = count
            return {"hidden": hidden, "mask": mask}

        (world.photos.path / "001.txt").write_text("longer words")
        made = world.encoder(encode, "caption", trim="mask", batch=3)
        assert world.build(text=made) == {"text": 5}
        with world.open(text=made) as dataset:
            batch = dataset.batch([0, 1])["text"]
            assert batch["hidden"].shape == (2, 12, 64)
            assert batch["hidden"].dtype == torch.bfloat16
            assert batch["mask"].sum(1).tolist() == [9, 12]
            assert batch["hidden"][0, :, 0].tolist() == [9.0] * 9 + [0.0] * 3
            assert dataset[0]["text"]["hidden"].shape == (9, 64)
            assert pack_of(dataset, "text").stat().st_size < 5 * 512 * 64 * 2 / 4

    def test_a_record_says_what_a_latent_is(self, world: World) -> None:
        def encode(items: list[Item]) -> object:
            for item in items:
                item.crop = (1, 2, 3, 4)
            return world.latent(items)

        made = world.encoder(
            encode, "file", buckets="64x64", statistic="mean", scale=0.18215, shift=[0.1, 0.2]
        )
        world.build(latent=made)
        with world.open(latent=made) as dataset:
            assert len(dataset) == 5
            output = dataset.outputs["latent"]
            about = output.set.metadata(output.key(0))
        assert about["crop"] == [1, 2, 3, 4]
        assert about["original_size"] == [8, 8]
        assert about["bucket"] == [64, 64]
        assert about["name"] == "000.png"
        told = output.spec["fingerprint"]
        assert told["depends_on"]
        assert (told["statistic"], told["scale"], told["shift"]) == ("mean", 0.18215, [0.1, 0.2])


def first_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return rows[0]


def read_all(loader: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Read to the end, whatever is missing: a loader that was not takes seconds to be closed."""
    found, missing = [], ""
    rows = iter(loader)
    while True:
        try:
            found.append(next(rows))
        except OutputMissingError as error:
            missing = str(error)
        except StopIteration:
            return found, missing


class TestWorkers:
    @pytest.mark.parametrize("method", ["fork", "spawn"])
    def test_a_worker_of_a_data_loader_reads_and_its_errors_come_back(
        self, built: World, method: str
    ) -> None:
        """A training hung because an exception could not be pickled out of a worker."""
        from torch.utils.data import DataLoader

        with built.open() as dataset:
            dataset.refresh()
            output = dataset.outputs["text"]
            output.set.delete(output.key(4))

            loader: DataLoader[dict[str, Any]] = DataLoader(
                cast("torch.utils.data.Dataset[dict[str, Any]]", dataset), batch_size=1,
                sampler=[3, 4, 1], num_workers=1, multiprocessing_context=method,
                collate_fn=first_of,
            )  # fmt: skip
            rows, missing = read_all(loader)
        assert [row["name"] for row in rows] == ["003.png", "001.png"]
        for number, row in zip((3, 1), rows, strict=True):
            assert row["text"].tolist() == encoded(f"caption {number}").tolist()
        assert "004.png" in missing

    def test_a_handle_opens_what_was_meant_or_says_so(self, built: World) -> None:
        with built.open() as dataset:
            dataset.refresh()
            sent = pickle.dumps(dataset)
        with pickle.loads(sent) as again:  # noqa: S301 - our own
            assert again[2]["name"] == "002.png"
        built.photos.add("000-new.png", "words")
        built.build()
        with pickle.loads(sent) as again, pytest.raises(DatasetChangedError):  # noqa: S301
            again[2]

    def test_every_error_of_this_package_survives_pickling(self) -> None:
        classes: list[type[DatasetError]] = [
            each
            for _, each in inspect.getmembers(training_encoder, inspect.isclass)
            if issubclass(each, DatasetError)
        ]
        classes += [DatasetError, *DatasetError.__subclasses__()]
        assert len(set(classes)) > 7
        for cls in classes:
            error = cls("what", hint="do", items=("a.png",), number=3, path="/x")
            copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
            assert type(copy) is cls
            assert (str(copy), copy.hint, copy.items) == ("what", "do", ("a.png",))
            assert vars(copy)["number"] == 3
