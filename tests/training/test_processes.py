"""Several processes build one dataset: each output is made once, and nobody waits for the dead.

The processes are real ones, forked or with an interpreter of their own: see `builder`. What they
encode is in a log that all of them append to.
"""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import pickle
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smartcache.cache import SmartCache
from smartcache.errors import (
    DatasetChangedError,
    DatasetError,
    EncoderError,
    OutputMissingError,
    SourcesVanishedError,
    StoreError,
)
from smartcache.system.locks import KeyLocks
from smartcache.training import Dataset
from tests.processes.children import Child
from tests.training.builder import Builder, World, image, value_of

pytestmark = pytest.mark.timeout(60)
IN_FLIGHT = 6
"""Batches that a process has claimed and not written, at most."""


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(folder=str(tmp_path))


@pytest.fixture
def cache(world: World) -> Iterator[SmartCache]:
    with SmartCache(world.store) as opened:
        yield opened


def check(dataset: Dataset, world: World) -> None:
    """Compare every item with what its encoder would make of its file now."""
    for index in range(len(dataset)):
        record = dataset.record(index)
        content = Path(record["path"]).read_bytes()
        for variation in range(world.variations):
            found = dataset.batch([index], variations=variation)
            wanted = value_of(
                content, bucket=record.get("bucket", {}).get("latent"), variation=variation,
                version=world.version,
            )  # fmt: skip
            assert np.array_equal(found["latent"][0], wanted), record["name"]
        if world.texts:
            caption = Path(record["path"]).with_suffix(".txt").read_text("utf-8").strip()
            assert np.array_equal(found["text"][0], value_of(caption)), record["name"]


def wait_until(is_so: Callable[[], object]) -> None:
    while not is_so():
        time.sleep(0.005)


class TestTogether:
    @pytest.mark.parametrize("count", [2, 4])
    def test_each_item_is_encoded_once_and_all_return_with_everything_ready(
        self, world: World, cache: SmartCache, count: int
    ) -> None:
        world = world.but(batch=4, variations=2)
        world.fill(60)
        with ExitStack() as stack:
            builders = [
                stack.enter_context(Builder(world, spawned=True, is_held=True, pause=0.02))
                for _ in range(count)
            ]
            for builder in builders:
                assert builder.hear() == "planned"
            for builder in builders:
                builder.tell()
            reports = [builder.report() for builder in builders]
        assert set(world.encodes().values()) == {1}
        assert len(world.encodes()) == 120
        by_process = world.encodes_by_process()
        assert len(by_process) == count, "one has done it all"
        for builder, report in zip(builders, reports, strict=True):
            assert report["encoded"] == {"latent": by_process[builder.pid]}
            assert report["elsewhere"] == {"latent": 120 - by_process[builder.pid]}
            assert (report["reused"], report["shared"]) == ({"latent": 0}, {"latent": 0})
            assert (report["items"], report["failed"]) == (60, [])
        with world.open(cache) as dataset:
            assert dataset.plan().is_empty
            check(dataset, world)

    def test_who_comes_late_counts_what_was_there_as_reused(
        self, world: World, cache: SmartCache
    ) -> None:
        world.fill(30)
        with Builder(world, hang_at=11) as first:
            assert first.hear() == "hangs"
            with world.open(cache) as dataset:
                there = len(dataset.outputs["latent"].set)
                with Builder(world) as second:
                    wait_until(lambda: len(world.encodes()) >= 30 - IN_FLIGHT)
                    first.kill()
                    report = second.report()
                assert 0 < there <= 10
                assert report["reused"]["latent"] + report["encoded"]["latent"] == 30
                assert report["elsewhere"] == {"latent": 0}
                dataset.look()
                check(dataset, world)

    def test_ranks_begin_at_different_places(self, world: World) -> None:
        world = world.but(batch=2)
        world.fill(12)
        firsts = []
        for rank in (0, 2):
            env = {"RANK": str(rank), "WORLD_SIZE": "3"}
            with Builder(world, env=env, die_at=2) as builder:
                assert builder.was_killed()
            firsts.append(list(world.encodes())[-2:])
        assert firsts == [
            [f"latent {number:05}.png 0" for number in pair] for pair in ((0, 1), (8, 9))
        ]

    def test_a_failure_that_one_has_found_is_not_tried_by_the_other(self, world: World) -> None:
        world.fill(40)
        bad = [f"{number:05}.png" for number in (7, 8, 20, 39)]
        with ExitStack() as stack:
            builders = [
                stack.enter_context(Builder(world, is_held=True, pause=0.01, bad=bad))
                for _ in range(2)
            ]
            for builder in builders:
                assert builder.hear() == "planned"
            for builder in builders:
                builder.tell()
            reports = [builder.report() for builder in builders]
        assert set(world.encodes().values()) == {1}
        assert len(world.encodes_by_process()) == 2
        for report in reports:
            assert sorted(report["failed"]) == [
                [name, "latent", "failed: ValueError: no good"] for name in bad
            ]
            assert report["items"] == 36
        assert sum(report["encoded"]["latent"] for report in reports) == 36
        for one, other in (reports, reports[::-1]):
            assert one["elsewhere"] == other["encoded"]

    def test_a_batch_of_hundreds_needs_few_descriptors(self, world: World) -> None:
        """One for each key that is claimed would be more than many systems allow."""
        world = world.but(batch=100)
        world.fill(400)
        with Builder(world, spawned=True, descriptors=64) as builder:
            assert builder.report()["encoded"] == {"latent": 400}


class TestKilled:
    def test_what_one_was_encoding_is_taken_over(self, world: World, cache: SmartCache) -> None:
        world = world.but(batch=3)
        world.fill(60)
        with ExitStack() as stack:
            victim = stack.enter_context(Builder(world, spawned=True, hang_at=20))
            others = [
                stack.enter_context(Builder(world, is_held=True, pause=0.01)) for _ in range(2)
            ]
            assert victim.hear() == "hangs"
            for builder in others:
                assert builder.hear() == "planned"
                builder.tell()
            wait_until(lambda: len(world.encodes()) >= 60 - IN_FLIGHT * world.batch)
            victim.kill()
            reports = [builder.report() for builder in others]
        again = {name: count for name, count in world.encodes().items() if count > 1}
        assert set(again.values()) <= {2}
        assert 0 < len(again) <= IN_FLIGHT * world.batch
        assert len(world.encodes()) == 60
        for report in reports:
            assert (report["items"], report["failed"]) == (60, [])
        with world.open(cache) as dataset:
            assert dataset.plan().is_empty
            check(dataset, world)

    def test_at_1000_of_3000_the_next_run_encodes_the_rest(
        self, world: World, cache: SmartCache
    ) -> None:
        world = world.but(batch=8)
        world.fill(3000)
        with Builder(world, spawned=True, die_at=1000) as builder:
            assert builder.was_killed()
        before = world.encodes()
        assert len(before) == 1000
        with world.open(cache) as dataset:
            plan = dataset.plan()
            there = {dataset.listing.name(number) for number in _there(dataset)}
            assert 1000 - IN_FLIGHT * world.batch <= len(there) < 1000
            assert plan.encode == {"latent": {"new file": 3000 - len(there)}}
            assert plan.execute().encoded == {"latent": 3000 - len(there)}
            again = world.encodes() - before
            assert sorted(again) == [
                f"latent {n:05}.png 0" for n in range(3000) if f"{n:05}.png" not in there
            ]
            assert len(dataset) == 3000
            numbers = [0, 1, 500, 990, 999, 1000, 2999]
            for row, number in zip(dataset.batch(numbers)["latent"], numbers, strict=True):
                assert np.array_equal(row, value_of(image(f"image {number}")))

    def test_while_sources_are_read_the_next_one_reads_them(
        self, world: World, cache: SmartCache
    ) -> None:
        world = world.but(texts=True)
        world.fill(50)
        with Builder(world, on_reading="die") as builder:
            assert builder.hear() == "reading"
            assert builder.was_killed()
        with world.open(cache) as dataset:
            assert dataset.build().encoded == {"latent": 50, "text": 50}
            check(dataset, world)

    @pytest.mark.parametrize("is_killed", [False, True])
    def test_who_plans_meanwhile_waits_for_whoever_reads(
        self, world: World, is_killed: bool
    ) -> None:
        world.fill(50)
        with Builder(world, what="plan", on_reading="wait", is_later=True) as first:
            assert first.hear() == "reading"
            with Builder(world, what="plan", says_waiting=True, is_later=True) as second:
                assert second.hear() == "waits"
                if is_killed:
                    first.kill()
                else:
                    first.tell()
                    assert first.report()["has_read"]
                report = second.report()
        assert report["encode"] == {"latent": {"new file": 50}}
        assert report["has_read"] == is_killed

    def test_a_claim_of_the_dead_is_free_for_those_who_compute_one_by_one(
        self, world: World, cache: SmartCache
    ) -> None:
        world.fill(3)
        with Builder(world, hang_at=1) as builder, world.open(cache) as dataset:
            assert builder.hear() == "hangs"
            dataset.plan()
            opened, key = dataset.outputs["latent"].set, dataset.outputs["latent"].key(0)
            assert not opened.wait_for(key, 0.01)
            assert opened.claim([key]).busy == [key]
            builder.kill()
            assert opened.wait_for(key, 10)
            assert opened.get_or_compute(key, lambda: {"": 1}) == {"": 1}

    def test_ctrl_c_keeps_what_is_encoded_and_claims_nothing_any_more(
        self, world: World, cache: SmartCache
    ) -> None:
        world = world.but(batch=2)
        world.fill(20)
        with Builder(world, hang_at=9) as builder:
            assert builder.hear() == "hangs"
            builder.interrupt()
        with world.open(cache) as dataset:
            assert dataset.build().encoded == {"latent": 12}
            check(dataset, world)


def _there(dataset: Dataset) -> list[int]:
    missing = set(dataset.outputs["latent"].missing.tolist())
    return [number for number in range(len(dataset.listing)) if number not in missing]


def _is_alone(key_locks: KeyLocks, marks: Path, seed: int) -> int:
    """Hold and claim keys at random; fail if anybody else holds one of them at the same time."""
    chance = random.Random(seed)
    keys = [f"key {number}" for number in range(4)]
    count = 0
    for _ in range(60):
        some = chance.sample(keys, chance.randint(1, 4))
        with ExitStack() as stack:
            if chance.random() < 0.5:
                some = key_locks.try_hold(some, stack)
            else:
                stack.enter_context(key_locks.hold(some))
            for key in some:
                os.close(os.open(marks / key, os.O_CREAT | os.O_EXCL))
            time.sleep(chance.random() * 0.001)
            for key in some:
                os.unlink(marks / key)
            count += len(some)
    return count


class TestClaims:
    @pytest.mark.parametrize("how", ["bytes", "files"])
    def test_nobody_else_holds_what_is_claimed_nor_claims_what_is_held(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
    ) -> None:
        if how == "files":  # a sandbox that knows no locks of bytes
            real = fcntl.fcntl

            def refuse(fd: int, command: int, *given: bytes) -> object:
                if command in (fcntl.F_OFD_SETLK, fcntl.F_OFD_GETLK):
                    raise OSError(errno.EINVAL, "Invalid argument")
                return real(fd, command, *given)

            monkeypatch.setattr(fcntl, "fcntl", refuse)
        key_locks = KeyLocks(tmp_path / "leases")
        with ExitStack() as stack:
            children = [
                stack.enter_context(Child(partial(_is_alone, key_locks, tmp_path, seed)))
                for seed in range(3)
            ]
            assert all(child.result() for child in children)
        assert set(os.listdir(key_locks.directory)) <= {"keys"}

    def test_who_asks_for_what_it_has_claimed_is_told(self, tmp_path: Path) -> None:
        key_locks = KeyLocks(tmp_path / "leases")
        with ExitStack() as stack:
            assert key_locks.try_hold(["a", "b", "a"], stack) == ["a", "b"]
            with pytest.raises(StoreError, match="would wait for itself"), key_locks.hold("a"):
                pass
            assert key_locks.try_hold(["a", "c"], stack) == ["c"]
        assert key_locks.busy("a") is None
        with key_locks.hold("a", timeout=0):
            assert key_locks.try_hold(["a"], stack) == []
        stack.close()


class TestEdits:
    def test_captions_that_are_edited_while_another_builds_are_encoded_by_the_next(
        self, world: World, cache: SmartCache
    ) -> None:
        world = world.but(texts=True)
        world.fill(20)
        with Builder(world, is_held=True, pause=0.01) as builder:
            assert builder.hear() == "planned"
            builder.tell()
            wait_until(world.encodes)
            for number in (0, 7, 19):
                (world.photos / f"{number:05}.txt").write_text(f"edited {number}", "utf-8")
            report = builder.report()
        assert report["encoded"] == {"latent": 20, "text": 20}
        assert report["failed"] == []
        with world.open(cache) as dataset:
            assert dataset.plan().encode == {"latent": {}, "text": {"edited": 3}}
            assert dataset.build().encoded == {"latent": 0, "text": 3}
            check(dataset, world)

    def test_an_image_that_is_edited_meanwhile_is_left_out_and_encoded_by_the_next(
        self, world: World, cache: SmartCache
    ) -> None:
        world.fill(20)
        with Builder(world, is_held=True) as builder:
            assert builder.hear() == "planned"
            world.write("00005.png", "edited")
            (world.photos / "00006.png").unlink()
            builder.tell()
            report = builder.report()
        assert report["encoded"] == {"latent": 18}
        assert sorted(item for item, _, _ in report["failed"]) == ["00005.png", "00006.png"]
        with world.open(cache) as dataset:
            assert dataset.build().encoded == {"latent": 1}
            assert len(dataset) == 19
            assert dataset.failed == []
            check(dataset, world)

    def test_what_another_process_encodes_is_found_by_those_who_read(
        self, world: World, cache: SmartCache
    ) -> None:
        world.fill(3)
        with world.open(cache) as dataset:
            dataset.plan()
            with pytest.raises(OutputMissingError):
                dataset.batch([0])
            assert dataset.outputs["latent"].missing.tolist() == [0, 1, 2]
            with Builder(world) as builder:
                builder.report()
            check(dataset, world)

    def test_what_others_have_opened_meanwhile_is_not_forgotten(
        self, world: World, cache: SmartCache
    ) -> None:
        """The document says which sets there are: `clean` knows the old ones by that."""
        world.fill(2)
        with world.open(cache) as dataset:
            for version in (1, 2):
                world.but(version=version).open(cache).close()
            dataset.build()
            with world.open(cache) as again:
                assert len(again.document["sets"]) == 3


class TestHandles:
    def test_a_forked_child_uses_the_dataset_of_its_parent(
        self, world: World, cache: SmartCache
    ) -> None:
        world.fill(6)
        with world.open(cache) as dataset:
            dataset.build()
            world.fill(4, first=6)

            def work() -> tuple[int, int]:
                before = len(dataset)
                assert dataset.build().encoded == {"latent": 4}
                check(dataset, world)
                return before, len(dataset)

            with Child(work) as child:
                assert child.result() == (6, 10)
            assert len(dataset) == 6
            check(dataset, world)
            assert dataset.build().reused == {"latent": 10}
            check(dataset, world)
        assert set(world.encodes().values()) == {1}

    def test_a_child_that_is_forked_while_a_batch_is_encoded_claims_nothing(
        self, world: World, cache: SmartCache
    ) -> None:
        """It inherits open files whose bytes are locked: it must neither hold nor free them."""
        world.fill(2)
        with world.open(cache) as dataset:
            opened = dataset.outputs["latent"].set
            claim = opened.claim(["a" * 64, "b" * 64])

            def work() -> list[str]:
                claim.close()
                return opened.claim(["a" * 64, "c" * 64]).keys

            with Child(work) as child:
                assert child.result() == ["c" * 64]
            assert not opened.wait_for("a" * 64, 0)
            claim.close()
            assert opened.wait_for("a" * 64, 0)

    def test_a_dataset_travels_to_spawned_workers_and_their_errors_come_back(
        self, world: World, cache: SmartCache
    ) -> None:
        world.fill(4)
        with world.open(cache) as dataset:
            dataset.build()
            dataset.outputs["latent"].set.delete(dataset.outputs["latent"].key(2))
            dataset.look()
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(1, mp_context=context) as pool:
                read = pool.submit(_read, dataset, [1, 3]).result()
                for row, number in zip(read, (1, 3), strict=True):
                    assert np.array_equal(row, value_of(image(f"image {number}")))
                missing = pool.submit(_read, dataset, [1, 2]).exception()
                assert isinstance(missing, OutputMissingError)
                assert missing.items == ("00002.png",)
                assert "Build it" in missing.hint
                assert isinstance(pool.submit(_read, dataset, [4]).exception(), IndexError)
                refused = pool.submit(_build, dataset).exception()
                assert isinstance(refused, EncoderError)
                assert "without the encoder of latent" in str(refused)
                sent = pickle.dumps(dataset)
                world.fill(1, first=4)
                dataset.build()
                changed = pool.submit(_length, sent).exception()
                assert isinstance(changed, DatasetChangedError)
                # A worker that has nothing to build leaves the dataset as it is.
                assert pool.submit(_build, dataset).result() == {"latent": 5}
        with world.open(cache) as again:
            assert again.document["built"]
            assert again.build().reused == {"latent": 5}

    def test_a_handle_does_not_grow_with_the_dataset(self, world: World, cache: SmartCache) -> None:
        sizes = []
        for first in (0, 300):
            world.fill(300, first=first)
            with world.open(cache) as dataset:
                dataset.build()
                sizes.append(len(pickle.dumps(dataset)))
        assert sizes[0] == sizes[1] < 5000

    @pytest.mark.parametrize(
        "error",
        [
            DatasetError("a", items=("x",)),
            SourcesVanishedError("a", path="/x"),
            OutputMissingError("a", items=("x", "y")),
            DatasetChangedError("a"),
            EncoderError("a", items=("x",)),
        ],
    )
    def test_errors_survive_pickling(self, error: DatasetError) -> None:
        again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
        assert type(again) is type(error)
        assert (str(again), again.hint, again.items) == (str(error), error.hint, error.items)
        assert vars(again).get("path") == vars(error).get("path")


def _read(dataset: Dataset, indices: list[int]) -> Any:  # noqa: ANN401 - an array
    return dataset.batch(indices)["latent"]


def _build(dataset: Dataset) -> dict[str, int]:
    return dataset.build().reused


def _length(sent: bytes) -> int:
    dataset: Dataset = pickle.loads(sent)  # noqa: S301 - our own
    return len(dataset)


class TestSameProcess:
    def test_equal_items_that_are_read_while_they_are_missing_are_encoded_once(
        self, world: World, cache: SmartCache
    ) -> None:
        world.fill(3)
        for name in ("a.png", "b.png"):
            world.write(name, "image 1")
        with world.open(cache) as dataset:
            dataset.miss = "encode"
            batch = dataset.batch(range(5))
            assert np.array_equal(batch["latent"][1], batch["latent"][4])
            check(dataset, world)
        assert sorted(Counter(world.encodes()).values()) == [1, 1, 1]

    def test_threads_share_the_work(self, world: World, cache: SmartCache) -> None:
        world.fill(40)
        with world.open(cache, pause=0.005) as one, world.open(cache, pause=0.005) as other:
            one.plan()
            plan = other.plan()
            with ThreadPoolExecutor(2) as pool:
                jobs: list[Callable[..., Any]] = [one.build, plan.execute]
                reports = [job.result() for job in [pool.submit(each) for each in jobs]]
            assert sum(report.encoded["latent"] for report in reports) == 40
            assert all(
                report.encoded["latent"] + report.elsewhere["latent"] + report.reused["latent"]
                == 40
                for report in reports
            )
        assert set(world.encodes().values()) == {1}
        assert os.path.exists(world.log)
