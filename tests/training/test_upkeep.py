"""Exports that train without their sources, and cleaning that removes only what nobody wants."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smartcache.artifacts import ArtifactSet, ArtifactSets
from smartcache.cache import SmartCache
from smartcache.errors import (
    DatasetError,
    DestinationExistsError,
    OutputMissingError,
    SourcesVanishedError,
)
from smartcache.training import Dataset, Encoder, Item, Sources, copy_dataset
from tests.processes.killing import in_child, was_killed
from tests.training.builder import Builder, World, image, value_of
from tests.training.conftest import Counting, Photos

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(folder=str(tmp_path))


@pytest.fixture
def cache(world: World) -> Iterator[SmartCache]:
    with SmartCache(world.store) as opened:
        yield opened


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def state_of(root: Path) -> dict[str, tuple[int, int, int]]:
    """Return what is in a folder: names, modes, sizes and times."""
    found = {}
    for folder, folders, files in os.walk(root):
        for name in folders + files:
            st = os.lstat(os.path.join(folder, name))
            size = st.st_size if stat.S_ISREG(st.st_mode) else 0
            found[os.path.join(folder, name)] = (st.st_mode, size, st.st_mtime_ns)
    return found


def same(one: Dataset, other: Dataset) -> None:
    """Compare two datasets: items, outputs, records."""
    assert len(one) == len(other)
    assert one.signature == other.signature
    for index in range(len(one)):
        assert one.record(index) == other.record(index)
        for name, value in one[index].items():
            np.testing.assert_equal(other[index][name], value, name)


class TestExport:
    def test_is_read_without_the_sources_and_nothing_in_it_changes(
        self, world: World, cache: SmartCache, out: Path, tmp_path: Path
    ) -> None:
        world = world.but(texts=True, variations=2, buckets="64x64 32x64")
        world.fill(5)
        world.write("wide/x.png", "wide", size=(200, 400))
        (world.photos / "wide/x.txt").write_text("a wide one", "utf-8")
        with world.open(cache) as dataset:
            dataset.build()
            assert dataset.export(out) == 12 + 6
            wanted = [
                {**dataset.batch([index], variations=1), **dataset.record(index)}
                for index in range(6)
            ]
            signature = dataset.signature
        shutil.rmtree(world.photos)
        shutil.rmtree(world.store)
        for folder, _, files in os.walk(out):
            for name in (".", *files):
                path = Path(folder) / name
                path.chmod(path.stat().st_mode & ~0o222)
        before = state_of(out)
        with SmartCache(tmp_path / "another") as other, other.open_dataset(out) as exported:
            assert exported.signature == signature
            assert exported.plan().is_empty
            assert exported.build().encoded == {"latent": 0, "text": 0}
            assert exported.failed == []
            for index, each in enumerate(wanted):
                found = {**exported.batch([index], variations=1), **exported.record(index)}
                assert found.keys() == each.keys()
                assert all(np.array_equal(found[name], each[name]) for name in each)
            assert exported.record(5)["caption"] == "a wide one"
            assert exported.record(5)["bucket"] == {"latent": (32, 64)}
        assert state_of(out) == before
        assert set(world.encodes().values()) == {1}

    def test_what_is_missing_is_listed_and_nothing_is_written(
        self, world: World, cache: SmartCache, out: Path
    ) -> None:
        world.fill(6)
        with world.open(cache) as dataset:
            dataset.build()
            world.fill(2, first=6)
            dataset.plan()
            with pytest.raises(OutputMissingError, match="2 items are not encoded") as caught:
                dataset.export(out)
            assert caught.value.items == ("00006.png", "00007.png")
            assert not out.exists()
            (world.photos / "00007.png").unlink()
            dataset.plan()
            with pytest.raises(OutputMissingError, match="1 item is not encoded"):
                dataset.export(out)

    def test_what_another_process_has_encoded_meanwhile_is_not_missing(
        self, world: World, cache: SmartCache, out: Path
    ) -> None:
        world.fill(3)
        with world.open(cache) as dataset:
            dataset.plan()
            with Builder(world) as builder:
                builder.report()
            assert dataset.export(out) == 3

    def test_goes_on_where_it_was_killed(self, world: World, cache: SmartCache, out: Path) -> None:
        world.fill(30)
        with world.open(cache) as dataset:
            dataset.build()

            def die() -> None:
                from smartcache.progress import Job

                class Dying(Job):
                    count = 0

                    def advance(self, amount: int = 1) -> None:
                        self.count += amount
                        if self.count == 11:
                            os.kill(os.getpid(), 9)

                dataset.export(out, lambda *_: Dying())

            assert was_killed(in_child(die))
            with pytest.raises(DatasetError, match="holds no dataset"):
                cache.open_dataset(out)
            # A table that was half copied is no help, and does no harm.
            (out / "photos/dataset").mkdir(parents=True)
            for name in (".index.sqlite3.new", ".index.sqlite3.new-journal", "index.sqlite3"):
                (out / "photos/dataset" / name).write_bytes(b"half of it")
            for folder in (out / "photos", out / "photos/dataset"):
                folder.chmod(0o700)
            assert dataset.export(out) == 30 - 11
            with cache.open_dataset(out) as exported:
                same(dataset, exported)
            left = {path.name for path in (out / "photos/dataset").iterdir()}
            assert left == {"dataset.json", "index.sqlite3"}

    def test_refuses_what_is_there_already(
        self, world: World, cache: SmartCache, out: Path
    ) -> None:
        world.fill(2)
        other = world.but(name="others")
        other.fill(2)
        with world.open(cache) as dataset, other.open(cache) as another:
            dataset.build()
            another.build()
            dataset.export(out)
            before = state_of(out)
            with pytest.raises(DestinationExistsError, match="is there already"):
                dataset.export(out)
            with pytest.raises(DestinationExistsError, match="holds the dataset photos already"):
                another.export(out)
            assert state_of(out) == before
            with cache.open_dataset(out) as exported:
                same(dataset, exported)

    def test_refuses_a_path_that_is_a_file_or_below_one(
        self, world: World, cache: SmartCache, out: Path
    ) -> None:
        world.fill(1)
        out.write_text("mine", "utf-8")
        with world.open(cache) as dataset:
            dataset.build()
            for path in (out, out / "below"):
                with pytest.raises(DatasetError, match="is not a folder"):
                    dataset.export(path)
        assert out.read_text("utf-8") == "mine"

    def test_leaves_out_what_cannot_be_read_or_encoded_and_says_so(
        self, world: World, cache: SmartCache, out: Path
    ) -> None:
        world = world.but(texts=True)
        world.fill(5)
        (world.photos / "00001.png").write_bytes(b"")
        (world.photos / "00002.txt").write_bytes(b"\xff\xfe\xfa")
        with world.open(cache, bad=["00003.png"]) as dataset:
            dataset.build()
            assert len(dataset) == 2
            left_out = {(each.item, each.reason) for each in dataset.failed}
            assert {item for item, _ in left_out} == {"00001.png", "00002.png", "00003.png"}
            reasons = str(dataset.plan())
            dataset.export(out)
            with cache.open_dataset(out) as exported:
                same(dataset, exported)
                assert {(each.item, each.reason) for each in exported.failed} == left_out
                assert str(exported.plan()) == reasons
                assert exported.plan().is_empty

    def test_keeps_trimmed_outputs_rows_and_metadata(self, cache: SmartCache, out: Path) -> None:
        def encode(items: list[Item]) -> dict[str, Any]:
            lengths = [len(item["prompt"]) for item in items]
            mask = np.array([[at < length for at in range(20)] for length in lengths])
            return {"tokens": np.where(mask, np.arange(20), 0), "mask": mask}

        rows = [{"prompt": "x" * n, "weight": n / 2, "name": f"row {n}"} for n in (3, 7, 20, 1)]
        encoder = Encoder(encode, reads="prompt", depends_on="t5", trim="mask", batch=4)
        sources = Sources.table(rows, metadata={"from": "rows"}, repeats=2.5)
        with cache.dataset("rows", sources, text=encoder) as dataset:
            dataset.build()
            dataset.export(out)
            with cache.open_dataset(out) as exported:
                same(dataset, exported)
                assert exported.batch([0, 1])["text"]["tokens"].shape == (2, 7)
                assert exported.batch([0, 1])["weight"] == [1.5, 3.5]
                assert exported.record(2) == {
                    "prompt": "x" * 20, "weight": 10.0, "name": "row 20", "from": "rows",
                    "path": None, "size": None, "repeats": 2.5,
                }  # fmt: skip
                assert exported.listing.repeats.tolist() == [2.5] * 4

    def test_what_is_damaged_is_named_and_the_export_is_none(
        self, world: World, cache: SmartCache, out: Path
    ) -> None:
        world.fill(3)
        with world.open(cache) as dataset:
            dataset.build()
        with world.open(cache) as dataset:
            (pack,) = dataset.outputs["latent"].set.path.glob("*.pack")
            data = bytearray(pack.read_bytes())
            at = data.index(value_of(image("image 1")).tobytes())
            data[at] ^= 1
            pack.write_bytes(data)
            with pytest.raises(OutputMissingError, match="damaged or gone") as caught:
                dataset.export(out)
            assert caught.value.items == ("00001.png",)
            with pytest.raises(DatasetError, match="holds no dataset"):
                cache.open_dataset(out)
            assert dataset.build().encoded == {"latent": 1}
            dataset.export(out)

    @pytest.mark.parametrize("how", ["missing", "file", "empty", "store", "dataset"])
    def test_wrong_folders_are_named(
        self, world: World, cache: SmartCache, out: Path, how: str
    ) -> None:
        world.fill(1)
        with world.open(cache) as dataset:
            dataset.build()
        path = {"store": world.store, "dataset": dataset.path}.get(how, out)
        if how == "file":
            out.write_text("mine", "utf-8")
        elif how == "empty":
            out.mkdir()
        with pytest.raises(DatasetError, match="holds no dataset") as caught:
            cache.open_dataset(path)
        assert str(path) in str(caught.value)
        assert "dataset.export" in caught.value.hint

    def test_of_a_damaged_document_the_error_says_what_to_do(
        self, world: World, cache: SmartCache, out: Path
    ) -> None:
        world.fill(1)
        with world.open(cache) as dataset:
            dataset.build()
            dataset.export(out)
        path = out / "photos/dataset/dataset.json"
        whole = json.loads(path.read_text("utf-8"))
        changes: list[dict[str, object]] = [
            {"format": 99}, {"outputs": []}, {"outputs": {"latent": {}}}, {"sources": [{}]},
            {"name": 5}, {"sources": None}, {"name": "../x"},
        ]  # fmt: skip
        for change in changes:
            path.write_text(json.dumps(whole | change), "utf-8")
            with pytest.raises(DatasetError, match=r"dataset\.json"):
                cache.open_dataset(out)
        for text in ("", "[]", "{", "null"):
            path.write_text(text, "utf-8")
            with pytest.raises(DatasetError, match="is damaged"):
                cache.open_dataset(out)

    def test_workers_of_a_data_loader_read_it(
        self, world: World, cache: SmartCache, out: Path
    ) -> None:
        from torch.utils.data import DataLoader

        world.fill(8)
        with world.open(cache) as dataset:
            dataset.build()
            dataset.export(out)
        before = state_of(out)
        with cache.open_dataset(out) as exported:
            given: Any = exported
            loader: DataLoader[Any] = DataLoader(
                given, batch_size=2, num_workers=2, multiprocessing_context="fork",
                collate_fn=list,
            )  # fmt: skip
            found = {item["name"]: item["latent"] for batch in loader for item in batch}
            assert len(found) == 8
            for name, latent in found.items():
                wanted = value_of(image(f"image {int(Path(name).stem)}"))
                assert np.array_equal(latent, wanted)
        assert state_of(out) == before

    def test_is_brought_into_another_store_and_opened_there_by_its_name(
        self, world: World, cache: SmartCache, out: Path, tmp_path: Path
    ) -> None:
        world.fill(4)
        with world.open(cache, bad=["00002.png"]) as dataset:
            dataset.build()
            dataset.export(out)
        moved = world.but(folder=str(tmp_path / "elsewhere"))
        (tmp_path / "elsewhere").mkdir()
        with SmartCache(moved.store) as other:
            with cache.open_dataset(out) as exported:
                assert copy_dataset(exported, other.sets.root) == 3
                with other.open_dataset("photos") as there:
                    same(exported, there)
                    assert [each.item for each in there.failed] == ["00002.png"]
                with pytest.raises(DestinationExistsError):
                    copy_dataset(exported, other.sets.root)
            # With its sources it is a dataset like any other, and nothing is encoded again.
            shutil.copytree(world.photos, moved.photos)
            with moved.open(other, bad=["00002.png"]) as dataset:
                assert dataset.build().encoded == {"latent": 0}
                assert len(dataset) == 3
                assert dataset.clean().is_empty
        assert set(world.encodes().values()) == {1}

    def test_refuses_to_be_changed(self, world: World, cache: SmartCache, out: Path) -> None:
        world.fill(2)
        with world.open(cache) as dataset:
            dataset.build()
            dataset.export(out)
        before = state_of(out)
        with cache.open_dataset(out) as exported:
            with pytest.raises(DatasetError, match="reading only"):
                exported.clean()
            assert state_of(out) == before

    def test_has_the_output_of_the_empty_text(
        self, world: World, cache: SmartCache, out: Path
    ) -> None:
        world = world.but(texts=True)
        world.fill(2)
        with world.open(cache) as dataset:
            dataset.build()
            output = dataset.outputs["text"]
            output.set.put(output.key(output.empty), {"": value_of("")})
            dataset.look()
            dropped = {"text": np.array([False, True])}
            wanted = dataset.batch([0, 1], drop=dropped)["text"]
            assert np.array_equal(wanted[1], value_of(""))
            dataset.export(out)
        with cache.open_dataset(out) as exported:
            assert np.array_equal(exported.batch([0, 1], drop=dropped)["text"], wanted)


def dump(dataset: Dataset) -> list[str]:
    """Return all that the table of sources says."""
    with closing(sqlite3.connect(dataset.table.path)) as database:
        return list(database.iterdump())


def plan_of(dataset: Dataset) -> dict[str, int]:
    """Return what would be cleaned: how many, by reason."""
    plan = dataset.clean()
    found = {each.reason: each.artifacts for each in plan.victims}
    assert len(found) == len(plan.victims)
    assert plan.artifacts == sum(found.values())
    assert plan.is_empty == (not found)
    return found


class TestClean:
    def test_nothing_to_do(self, world: World, cache: SmartCache) -> None:
        world = world.but(texts=True)
        world.fill(3)
        with world.open(cache) as dataset:
            dataset.build()
            plan = dataset.clean()
            assert plan.is_empty
            assert str(plan) == "nothing to remove"
            assert plan.execute().artifacts == 0
            assert dataset.plan().is_empty

    def test_says_why_each_can_go_and_removes_just_that(
        self, world: World, cache: SmartCache
    ) -> None:
        world = world.but(variations=3, buckets="64x64 32x64")
        world.fill(6)
        with world.open(cache) as dataset:
            dataset.build()
        world.write("00001.png", "edited")
        (world.photos / "00002.png").unlink()
        (world.photos / "00003.png").rename(world.photos / "moved.png")
        world = world.but(variations=2, buckets="32x32 64x128")
        with world.open(cache) as dataset:
            dataset.build()
            assert plan_of(dataset) == {
                "source gone or edited": 6, "variation": 4, "other bucket": 8,
            }  # fmt: skip
            result = dataset.clean().execute()
            assert (result.artifacts, result.sets, result.problems) == (18, 0, ())
            assert dataset.clean().is_empty
            assert dataset.plan().is_empty
            assert len(dataset.outputs["latent"].set) == 10
            found = dataset.batch(range(5), variations=1)
            for name, row in zip(found["name"], found["latent"], strict=True):
                content = (world.photos / name).read_bytes()
                assert np.array_equal(row, value_of(content, bucket=(32, 32), variation=1))

    def test_the_set_of_an_old_encoder_goes_as_a_whole(
        self, world: World, cache: SmartCache
    ) -> None:
        world.fill(4)
        for version in (1, 2, 3):
            with world.but(version=version).open(cache) as dataset:
                if version != 2:
                    dataset.build()
        with world.but(version=3).open(cache) as dataset:
            plan = dataset.clean()
            assert sorted((each.reason, each.artifacts) for each in plan.victims) == [
                ("old encoder", 0), ("old encoder", 4),
            ]  # fmt: skip
            result = plan.execute()
            assert (result.sets, result.artifacts) == (2, 4)
            assert [info.artifacts for info in cache.artifact_sets()] == [4]
            assert dataset.document["sets"] == [info.full_name for info in cache.artifact_sets()]
            assert dataset.clean().is_empty
        with world.but(version=1).open(cache) as dataset:
            assert dataset.build().encoded == {"latent": 4}

    def test_what_it_reports_is_what_comes_back(self, world: World, cache: SmartCache) -> None:
        def encode(items: list[Item]) -> list[Any]:
            return [np.frombuffer(os.urandom(1 << 18), np.uint8) for _ in items]

        world.fill(12)
        encoder = Encoder(encode, reads="file", depends_on="vae")
        with cache.dataset("photos", world.photos, latent=encoder) as dataset:
            dataset.build()
            root = dataset.outputs["latent"].set.path
            before = _on_disk(root)
            for number in (3, 4):
                (world.photos / f"{number:05}.png").unlink()
            plan = dataset.clean()
            assert plan.freed_size == pytest.approx(2 << 18, rel=0.02)
            assert sum(each.size for each in plan.victims) == plan.freed_size
            result = plan.execute()
            assert result.freed_size == pytest.approx(plan.freed_size, rel=0.1)
            assert before - _on_disk(root) == pytest.approx(plan.freed_size, rel=0.1)
            assert len(dataset.batch(range(10))["name"]) == 10

    def test_what_another_dataset_wants_stays(self, world: World, cache: SmartCache) -> None:
        world = world.but(shared="latents")
        other = world.but(name="others")
        world.fill(5)
        other.fill(3)
        with world.open(cache) as dataset, other.open(cache) as another:
            assert dataset.build().encoded == {"latent": 5}
            assert another.build().reused == {"latent": 3}
            for number in (0, 1, 4):
                (world.photos / f"{number:05}.png").unlink()
            assert plan_of(dataset) == {"source gone or edited": 1}
            dataset.clean().execute()
            assert another.plan().is_empty
            assert len(another.batch(range(3))["name"]) == 3
            assert dataset.clean().is_empty
            # The other one keeps its sources on a drive that is not mounted now.
            other.photos.rename(other.photos.with_name("unmounted"))
            (world.photos / "00002.png").unlink()
            assert plan_of(dataset) == {}

    def test_a_set_that_it_used_once_and_another_still_uses_stays(
        self, world: World, cache: SmartCache
    ) -> None:
        world = world.but(shared="latents")
        other = world.but(name="others")
        world.fill(5)
        other.fill(3)
        for each in (world, other, world.but(version=2)):
            with each.open(cache) as dataset:
                dataset.build()
        with world.but(version=2).open(cache) as dataset:
            assert plan_of(dataset) == {"not used any more": 2}
            dataset.clean().execute()
        with other.open(cache) as another:
            assert another.plan().is_empty
            another.batch(range(3))

    @pytest.mark.parametrize("how", ["document", "no table", "damaged table"])
    def test_of_another_dataset_that_cannot_be_read_nothing_is_guessed(
        self, world: World, cache: SmartCache, how: str
    ) -> None:
        world = world.but(shared="latents")
        other = world.but(name="others")
        world.fill(5)
        other.fill(3)
        with world.open(cache) as dataset:
            with other.open(cache) as another:
                dataset.build()
                another.build()
            if how == "document":
                (another.path / "dataset.json").write_text("{", "utf-8")
            else:
                for path in another.path.glob("index.sqlite3*"):
                    path.unlink()
                if how == "damaged table":
                    (another.path / "index.sqlite3").write_bytes(b"nonsense" * 1000)
            shutil.rmtree(world.photos)
            world.write("a.png", "a")
            with pytest.raises(DatasetError, match="What the dataset others uses is not") as caught:
                dataset.clean(force=True)
            assert "Mend or remove" in caught.value.hint
            assert len(dataset.outputs["latent"].set) == 5

    @pytest.mark.parametrize("how", ["root", "empty root", "subfolder", "jsonl"])
    def test_refuses_while_a_drive_may_not_be_mounted(
        self, world: World, cache: SmartCache, how: str, tmp_path: Path
    ) -> None:
        world.fill(3)
        world.write("more/a.png", "a")
        world.write("more/b.png", "b")
        sources = Sources(world.photos)
        lost = world.photos / "more" if how == "subfolder" else world.photos
        if how == "jsonl":
            lost = tmp_path / "list.jsonl"
            rows = [{"file": str(path)} for path in sorted(world.photos.rglob("*.png"))]
            lost.write_text("\n".join(map(json.dumps, rows)), "utf-8")
            sources = Sources.jsonl(lost)
        encoder = Encoder(lambda items: np.ones((len(items), 2)), reads="file", depends_on=1)

        def opened() -> Dataset:
            return cache.dataset("photos", sources, latent=encoder)

        away = tmp_path / "away"
        with opened() as dataset:
            dataset.build()
            lost.rename(away)
            if how == "empty root":
                lost.mkdir()
        for _ in range(2):
            with opened() as dataset, pytest.raises(SourcesVanishedError) as caught:
                dataset.clean()
            assert str(lost) in str(caught.value)
        with opened() as dataset:
            assert len(dataset.outputs["latent"].set) == 5
            # It is mounted again: all is as it was.
            if how == "empty root":
                lost.rmdir()
            away.rename(lost)
            assert dataset.build().reused == {"latent": 5}
            assert dataset.clean().is_empty
            lost.rename(away)
            if how == "empty root":
                lost.mkdir()
        with opened() as dataset:
            wanted = 2 if how == "subfolder" else 5
            table = dump(dataset)
            plan = dataset.clean(force=True)
            assert plan.artifacts == wanted
            assert dump(dataset) == table, "a plan forgets nothing"
            assert plan.execute().artifacts == wanted
            assert len(dataset.outputs["latent"].set) == 5 - wanted
        if how == "subfolder":
            with opened() as dataset:
                assert dataset.clean().is_empty

    def test_sets_that_it_never_used_are_not_touched(self, world: World, cache: SmartCache) -> None:
        world.fill(2)
        names = ("photos", "photos.latent", "photos.latent2", "photos.text", "latent")
        with world.open(cache) as dataset:
            dataset.build()
            for name in names:
                with cache.artifacts(name, fingerprint={"mine": True}) as mine:
                    mine.put("key", 1)
            (world.photos / "00000.png").unlink()
            dataset.clean().execute()
            world.but(version=5).open(cache).close()
        with world.but(version=5).open(cache) as dataset:
            dataset.build()
            dataset.clean().execute()
        for name in names:
            with cache.artifacts(name, fingerprint={"mine": True}) as mine:
                assert mine["key"].value() == 1

    def test_an_image_that_cannot_be_read_just_now_keeps_its_output(
        self, world: World, cache: SmartCache
    ) -> None:
        world.fill(3)
        path = world.photos / "00001.png"
        with world.open(cache) as dataset:
            dataset.build()
            path.rename(path.with_suffix(".away"))
            path.symlink_to("nowhere")
            assert plan_of(dataset) == {}
            assert [each.item for each in dataset.failed] == ["00001.png"]
            path.unlink()
            path.with_suffix(".away").rename(path)
            assert dataset.build().encoded == {"latent": 0}

    def test_what_comes_back_between_plan_and_execution_stays(
        self, world: World, cache: SmartCache
    ) -> None:
        world.fill(4)
        with world.open(cache) as dataset:
            dataset.build()
            for number in (1, 2):
                (world.photos / f"{number:05}.png").unlink()
            plan = dataset.clean()
            assert plan.artifacts == 2
            world.write("again.png", "image 2")
            assert plan.execute().artifacts == 1
            assert dataset.build().encoded == {"latent": 0}
            assert len(dataset) == 3

    def test_an_encoder_that_comes_back_between_plan_and_execution_keeps_its_set(
        self, world: World, cache: SmartCache
    ) -> None:
        world.fill(2)
        with world.open(cache) as dataset:
            dataset.build()
        with world.but(version=1).open(cache) as dataset:
            plan = dataset.clean()
            assert plan.artifacts == 2
            with Builder(world) as builder:  # somebody trains with the old one
                assert builder.report()["reused"] == {"latent": 2}
            result = plan.execute()
            assert (result.sets, result.artifacts) == (0, 0)
        with world.open(cache) as dataset:
            assert dataset.plan().is_empty

    def test_what_another_process_encodes_meanwhile_stays(
        self, world: World, cache: SmartCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A file is added and encoded by another process, at every step of a cleaning."""
        world.fill(2)
        steps = iter(range(2, 100))
        added: list[int] = []

        def add() -> None:
            number = next(steps)
            world.fill(1, first=number)
            added.append(number)
            with Builder(world, spawned=True) as builder:
                assert builder.report()["encoded"] == {"latent": 1}

        with world.open(cache) as dataset:
            dataset.build()
            (world.photos / "00000.png").unlink()
            _before(monkeypatch, ArtifactSets, "infos", add)
            _before(monkeypatch, Dataset, "refresh", add)
            plan = dataset.clean()
            assert plan.artifacts == 1
            assert plan.execute().artifacts == 1
            assert len(added) == 3
            monkeypatch.undo()
            assert dataset.build().encoded == {"latent": 0}
            assert len(dataset) == 4
            for row, name in zip(
                *map(dataset.batch(range(4)).get, ("latent", "name")), strict=True
            ):
                assert np.array_equal(row, value_of(image(f"image {int(Path(name).stem)}")))

    def test_what_comes_back_while_it_is_removed_is_encoded_again(
        self, world: World, cache: SmartCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whoever takes note of it waits until it is gone: nobody believes in what is not there."""
        world.fill(3)
        with world.open(cache) as dataset, ExitStack() as stack:
            dataset.build()
            (world.photos / "00001.png").unlink()
            plan = dataset.clean()
            builders: list[Builder] = []

            def come_back() -> None:
                world.write("again.png", "image 1")
                builders.append(stack.enter_context(Builder(world, says_waiting=True)))
                assert builders[0].hear() == "waits"

            _before(monkeypatch, ArtifactSet, "delete_many", come_back)
            assert plan.execute().artifacts == 1
            (builder,) = builders
            assert builder.report()["encoded"] == {"latent": 1}
            assert dataset.build().encoded == {"latent": 0}

    def test_trusting_datasets_keep_what_their_table_knows(
        self, world: World, cache: SmartCache
    ) -> None:
        world.fill(3)
        with world.open(cache) as dataset:
            dataset.build()
        (world.photos / "00000.png").unlink()
        with cache.open_dataset("photos") as dataset:
            assert dataset.clean().is_empty
            assert dataset.clean(force=True).is_empty


def _before(monkeypatch: pytest.MonkeyPatch, of: type, name: str, act: Callable[[], None]) -> None:
    real = getattr(of, name)

    def both(*given: object, **named: object) -> object:
        act()
        return real(*given, **named)

    monkeypatch.setattr(of, name, both)


def _on_disk(root: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in root.glob("*.pack"))


def test_a_forced_plan_forgets_nothing_until_it_is_executed(
    cache: SmartCache, photos: Photos
) -> None:
    """A dry run with the drive away: when it is back, nothing has to be read or encoded again."""
    photos.fill(4)
    encoder = Counting()
    dataset = cache.dataset(
        "photos", Sources(photos.path), latent=Encoder(encoder, reads="file", depends_on=None)
    )
    dataset.build()
    away = photos.path.with_name("away")
    photos.path.rename(away)
    assert dataset.clean(force=True).artifacts == 4
    assert dataset.clean(force=True).artifacts == 4
    away.rename(photos.path)
    assert dataset.build().encoded == {"latent": 0}
    assert not dataset.plan().changes
    photos.path.rename(away)
    assert dataset.clean(force=True).execute().artifacts == 4
    away.rename(photos.path)
    assert dataset.build().encoded == {"latent": 4}


def test_an_export_has_no_captions_that_were_edited_away(
    cache: SmartCache, photos: Photos, tmp_path: Path
) -> None:
    path = photos.add("a.png", "a secret word")
    encoder = Encoder(Counting("caption"), reads="caption", depends_on=None)
    sources = Sources(photos.path, sidecars={"caption": ".txt"})
    dataset = cache.dataset("photos", sources, text=encoder)
    dataset.build()
    path.with_suffix(".txt").write_text("another")
    dataset.build()
    dataset.export(tmp_path / "out")
    for file in (tmp_path / "out").rglob("*"):
        assert not file.is_file() or b"a secret word" not in file.read_bytes()
    with cache.open_dataset(tmp_path / "out") as opened:
        assert opened.record(0)["caption"] == "another"


def test_a_folder_that_has_only_folders_left_has_not_vanished(
    cache: SmartCache, photos: Photos
) -> None:
    first = photos.add("a.png")
    photos.add("more/b.png")
    dataset = cache.dataset(
        "photos", Sources(photos.path), latent=Encoder(Counting(), reads="file", depends_on=None)
    )
    dataset.build()
    first.unlink()
    assert dataset.clean().artifacts == 1
