"""The order of training is a plan: the same for everybody, and gone on with anywhere."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from smartcache.cache import SmartCache
from smartcache.errors import ConfigError, DatasetChangedError, DatasetError, OutputMissingError
from smartcache.training import Batches, Dataset, Encoder, Item, Prefetcher, Sources

SIZES = ((64, 64), (96, 48), (48, 96))
TEXTS = 11


def encode_sizes(items: list[Item]) -> list[np.ndarray[Any, Any]]:
    return [np.array([*(item.size or ()), item.variation]) for item in items]


def encode_texts(items: list[Item]) -> dict[str, Any]:
    texts = [item["caption"] for item in items]
    return {
        "length": np.array([len(text) for text in texts]),
        "variation": np.array([item.variation for item in items]),
    }


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batches")


@pytest.fixture(scope="module")
def cache(room: Path) -> Iterator[SmartCache]:
    with SmartCache(room / "store") as opened:
        yield opened


@pytest.fixture(scope="module")
def photos(cache: SmartCache, room: Path) -> Dataset:
    """37 images in 3 buckets, of 20, 10 and 7."""
    for number in range(37):
        size = SIZES[0 if number < 20 else 1 if number < 30 else 2]
        path = room / "photos" / f"{number:03}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", size, (number, 0, 0)).save(path)
        path.with_suffix(".txt").write_text("x" * (1 + number % 5))
    sources = Sources(room / "photos", sidecars={"caption": ".txt"})
    dataset = cache.dataset(
        "photos", sources,
        latent=Encoder(encode_sizes, reads="file", depends_on=None, buckets="64x64 96x48 48x96"),
        text=Encoder(encode_texts, reads="caption", depends_on=None, variations=2),
    )  # fmt: skip
    dataset.build()
    return dataset


@pytest.fixture(scope="module")
def texts(cache: SmartCache) -> Dataset:
    """Eleven rows that come two and a half times, with three variations."""
    rows = [{"caption": "y" * (10 + number)} for number in range(TEXTS)]
    dataset = cache.dataset(
        "texts", Sources.table(rows, repeats=2.5, metadata={"weight": 0.5}),
        text=Encoder(encode_texts, reads="caption", depends_on=None, variations=3),
    )  # fmt: skip
    dataset.build()
    return dataset


def entries_of(batches: Batches) -> list[tuple[int, ...]]:
    return [tuple(step.entries.tolist()) for step in batches.steps()]


def all_ranks(
    world: int,
    state: dict[str, Any] | None,
    datasets: Any,  # noqa: ANN401
    options: dict[str, Any],
) -> list[Any]:
    """What all ranks get together, in the order of the plan."""
    ranks = []
    for rank in range(world):
        batches = Batches(datasets, rank=rank, world=world, **options)
        if state is not None:
            batches.load_state_dict(state)
        ranks.append(entries_of(batches))
    return [each for step in zip(*ranks, strict=True) for each in step]


class TestPlans:
    @settings(max_examples=40)
    @given(
        world=st.integers(1, 5), size=st.integers(1, 9), seed=st.integers(0, 99),
        mix=st.sampled_from(["one", "two", "weighted"]), cut=st.integers(0, 60),
        other=st.integers(1, 5), shuffle=st.booleans(), drop_last=st.booleans(),
        take=st.sampled_from([None, 5, 200]),
    )  # fmt: skip
    def test_the_ranks_share_an_epoch_and_any_other_world_goes_on_with_the_rest(  # noqa: PLR0917
        self, photos: Dataset, texts: Dataset, world: int, size: int, seed: int, mix: str,
        cut: int, other: int, shuffle: bool, drop_last: bool, take: int | None,
    ) -> None:  # fmt: skip
        weighted = {photos: 3, texts: 1}
        given_: Any = {"one": photos, "two": [photos, texts], "weighted": weighted}[mix]
        options: dict[str, Any] = {
            "size": size, "seed": seed, "shuffle": shuffle, "drop_last": drop_last, "take": take,
        }  # fmt: skip
        alone = Batches(given_, rank=0, world=1, **options)
        if not len(alone.plan()):
            return
        whole = entries_of(alone)
        assert len(whole) == len(alone.plan())
        shared = all_ranks(world, None, given_, options)
        left = len(whole) % world
        if drop_last:
            assert shared == whole[: len(whole) - left]
        else:
            assert shared == whole + (whole * world)[: (world - left) % world]
        steps = min(cut, max(0, len(shared) // world - 1))
        before = Batches(given_, rank=0, world=world, **options)
        for _, step in zip(range(steps), before.steps(), strict=False):
            before.advance(step)
        state = before.state_dict()
        assert set(state) == {"version", "seed", "epoch", "position", "size", "plan_digest"}
        assert (state["epoch"], state["position"]) == (0, steps * world)
        rest = all_ranks(other, state, given_, options)
        wanted = whole[steps * world :]
        more = len(wanted) % other
        if drop_last:
            assert rest == wanted[: len(wanted) - more]
        elif len(wanted) >= other:
            assert rest[: len(wanted)] == wanted
            assert rest[len(wanted) :] == whole[: (other - more) % other]

    def test_an_epoch_has_every_item_once(self, photos: Dataset) -> None:
        plan = Batches(photos, size=4).plan()
        assert sorted((plan.entries & (2**36 - 1)).tolist()) == list(range(37))
        assert plan.dropped == 0

    def test_a_micro_batch_is_of_one_bucket_and_only_the_last_one_is_short(
        self, photos: Dataset
    ) -> None:
        seen: dict[tuple[int, ...], list[int]] = {}
        for batch in Batches(photos, size=4):
            buckets = {tuple(row[:2].tolist()) for row in batch["latent"]}
            assert len(buckets) == 1
            seen.setdefault(buckets.pop(), []).append(len(batch["name"]))
        assert {bucket: Counter(sizes) for bucket, sizes in seen.items()} == {
            (64, 64): {4: 5}, (96, 48): {4: 2, 2: 1}, (48, 96): {4: 1, 3: 1},
        }  # fmt: skip

    def test_ragged_ends_are_left_out_and_said(self, photos: Dataset) -> None:
        plan = Batches(photos, size=4, drop_last=True).plan()
        assert plan.dropped == 2 + 3
        assert str(plan) == (
            "epoch 0: 8 micro-batches, 32 items, 3 buckets; 5 left out at ragged ends"
        )

    def test_one_seed_is_one_order_and_another_seed_or_epoch_another(self, photos: Dataset) -> None:
        first, again = Batches(photos, size=4, seed=1), Batches(photos, size=4, seed=1)
        assert entries_of(first) == entries_of(again)
        assert entries_of(first) != entries_of(Batches(photos, size=4, seed=2))
        assert entries_of(first) != [
            tuple(step.entries.tolist()) for step in Batches(photos, size=4, seed=1).next_epoch()
        ]

    def test_the_order_of_a_seed_never_changes(self, photos: Dataset) -> None:
        """Else nobody could go on with a checkpoint of an older release."""
        plan = Batches(photos, size=4, seed=7).plan()
        assert (plan.entries[:8] & (2**36 - 1)).tolist() == [36, 31, 30, 34, 33, 35, 32, 7]

    def test_without_shuffling_the_order_is_that_of_the_sources(self, photos: Dataset) -> None:
        names = [name for batch in Batches(photos, size=4, shuffle=False) for name in batch["name"]]
        assert names == [f"{number:03}.png" for number in range(37)]

    def test_fractions_of_repeats_come_that_often(self, texts: Dataset) -> None:
        batches = Batches(texts, size=4)
        often: Counter[int] = Counter()
        for epoch in range(40):
            counts = Counter((batches.plan(epoch).entries & (2**36 - 1)).tolist())
            assert set(counts.values()) <= {2, 3}
            assert sum(counts.values()) in (27, 28)
            often.update(counts)
        assert sum(often.values()) / 40 / TEXTS == pytest.approx(2.5, abs=0.05)
        assert min(often.values()) > 80

    def test_weights_are_shares_of_the_items(self, photos: Dataset, texts: Dataset) -> None:
        listed = Batches([photos, texts], size=4, weights=(3, 1))
        for batches in (Batches({photos: 3, texts: 1}, size=4), listed):
            plan = batches.plan()
            owners = Counter((plan.entries >> 55).tolist())
            assert owners[0] / owners[1] == pytest.approx(3, rel=0.05)
            assert len(set((plan.entries[plan.entries >> 55 == 0] & (2**36 - 1)).tolist())) == 37

    def test_take_takes_so_many_of_all_anew_in_every_epoch(self, photos: Dataset) -> None:
        batches = Batches(photos, size=4, take=10)
        taken = [
            frozenset((batches.plan(epoch).entries & (2**36 - 1)).tolist()) for epoch in range(20)
        ]
        assert {len(each) for each in taken} == {10}
        assert len(set(taken)) > 15
        more = Counter((Batches(photos, size=4, take=80).plan().entries & (2**36 - 1)).tolist())
        assert set(more.values()) == {2, 3}
        assert sum(more.values()) == 80

    def test_variations_take_turns(self, texts: Dataset) -> None:
        batches = Batches(texts, size=4)
        seen: dict[int, Counter[int]] = {}
        for epoch in range(12):
            entries = batches.plan(epoch).entries
            for entry in entries.tolist():
                seen.setdefault(entry & (2**36 - 1), Counter())[entry >> 36 & 4095] += 1
        for counts in seen.values():
            assert set(counts) == {0, 1, 2}
            assert max(counts.values()) - min(counts.values()) <= 8
        batch = next(iter(Batches(texts, size=8)))
        assert set(batch["text"]["variation"].tolist()) <= {0, 1, 2}

    def test_nothing_to_hand_out_is_an_error(self, photos: Dataset) -> None:
        with pytest.raises(DatasetError, match="no micro-batch of 50 of 37 items"):
            next(iter(Batches(photos, size=50, drop_last=True)))

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"size": 0}, "size is a number from 1"),
            ({"size": 4, "take": 0}, "take is a number from 1"),
            ({"size": 4, "rank": 1}, "both rank and world"),
            ({"size": 4, "rank": 2, "world": 2}, "no rank 2"),
            ({"size": 4, "drop": {"words": 0.1}}, "no dataset has an output 'words'"),
            ({"size": 4, "drop": {"text": 2}}, "from 0 to 1"),
            ({"size": 4, "drop": {"latent": 0.1}}, "made of files"),
            ({"size": 4, "weights": (0,)}, "above 0"),
            ({"size": 4, "seed": 0.5}, "seed is a whole number"),
        ],
    )
    def test_bad_arguments_are_named(
        self, photos: Dataset, options: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(ConfigError, match=f"(?i){words}"):
            Batches(photos, **options)


class TestReading:
    def test_a_batch_has_the_outputs_of_its_items(self, photos: Dataset) -> None:
        for batch in Batches(photos, size=4):
            for number, name in enumerate(batch["name"]):
                item = int(name[:3])
                size = SIZES[0 if item < 20 else 1 if item < 30 else 2]
                assert batch["latent"][number].tolist() == [*size, 0]
                assert batch["text"]["length"][number] == 1 + item % 5

    def test_metadata_comes_along(self, texts: Dataset) -> None:
        batch = next(iter(Batches(texts, size=3)))
        assert batch["weight"] == [0.5] * 3
        assert [len(text) for text in batch["caption"]] == batch["text"]["length"].tolist()

    def test_dropped_texts_are_those_of_the_empty_text(self, photos: Dataset) -> None:
        batches = Batches(photos, size=4, drop={"text": 0.3})
        dropped = total = 0
        for _ in range(20):
            for batch in batches:
                total += len(batch["name"])
                dropped += int((batch["text"]["length"] == 0).sum())
                assert (batch["latent"][:, 0] > 0).all()
        assert total == 20 * 37
        assert dropped / total == pytest.approx(0.3, abs=0.06)

    def test_who_cannot_encode_the_empty_text_says_so(
        self, cache: SmartCache, texts: Dataset
    ) -> None:
        assert texts.name == "texts"
        with (
            cache.open_dataset("texts") as opened,
            pytest.raises(OutputMissingError, match="no text of the empty text"),
        ):
            Batches(opened, size=2, drop={"text": 0.5})


class TestState:
    def test_it_goes_on_after_the_batch_that_was_handed_out_last(self, photos: Dataset) -> None:
        batches = Batches(photos, size=4)
        first = [batch["name"] for batch, _ in zip(batches, range(5), strict=False)]
        # `zip` has asked for a sixth batch: that was handed out too.
        state = pickle.loads(pickle.dumps(batches.state_dict()))  # noqa: S301
        again = Batches(photos, size=4)
        again.load_state_dict(state)
        rest = [batch["name"] for batch in again]
        whole = [batch["name"] for batch in Batches(photos, size=4)]
        assert first == whole[:5]
        assert rest == whole[6:]
        assert (again.epoch, again.position) == (1, 0)

    def test_a_changed_dataset_is_named_or_planned_anew(
        self, cache: SmartCache, texts: Dataset
    ) -> None:
        rows = [{"caption": "z" * (10 + number)} for number in range(9)]
        encoder = Encoder(encode_texts, reads="caption", depends_on=None)
        small = cache.dataset("changing", Sources.table(rows), text=encoder)
        small.build()
        batches = Batches([texts, small], size=2)
        for _ in zip(range(6), batches, strict=False):
            pass
        state = batches.state_dict()
        more = cache.dataset("changing", Sources.table([*rows, {"caption": "new"}]), text=encoder)
        more.build()
        changed = Batches([texts, more], size=2)
        with pytest.raises(DatasetChangedError, match="the items of changing") as caught:
            changed.load_state_dict(state)
        assert "texts" not in str(caught.value)
        changed.load_state_dict(state, on_change="replan")
        share = changed.position / len(changed.plan())
        assert share == pytest.approx(state["position"] / len(batches.plan(0)), abs=0.1)
        for other, words in (
            (Batches([texts, small], size=3), r"the size \(2 to 3\)"),
            (Batches([texts, small], size=2, take=3), "the options"),
        ):
            with pytest.raises(DatasetChangedError, match=words):
                other.load_state_dict(state)
        with pytest.raises(DatasetError, match="version 9"):
            changed.load_state_dict({**state, "version": 9})

    def test_those_who_count_themselves_get_the_same_state(self, photos: Dataset) -> None:
        counted = Batches(photos, size=4, rank=0, world=2)
        for step in counted.steps():
            counted.advance(step)
            if counted.position == 6:
                break
        other = Batches(photos, size=4, rank=0, world=2)
        list(other.sampler)
        assert other.state_dict(consumed=3) == counted.state_dict()
        assert other.state_dict(consumed=len(other))["epoch"] == 1

    def test_ranks_come_from_torchrun(
        self, photos: Dataset, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "3")
        batches = Batches(photos, size=4)
        assert (batches.rank, batches.world) == (1, 3)


class TestDataLoader:
    @pytest.mark.parametrize("start", ["fork", "spawn"])
    def test_workers_read_the_batches_of_the_plan(self, photos: Dataset, start: str) -> None:
        from torch.utils.data import DataLoader

        batches = Batches(photos, size=4, drop={"text": 0.2})
        loader: DataLoader[Any] = DataLoader(
            batches.dataset,  # type: ignore[arg-type]  # any object with __getitems__ will do
            batch_sampler=batches.sampler,
            collate_fn=batches.collate,  # type: ignore[arg-type]
            num_workers=2,
            multiprocessing_context=start,
        )
        whole = list(Batches(photos, size=4, drop={"text": 0.2}))
        assert len(loader) == len(whole)
        got = list(loader)
        assert [batch["name"] for batch in got] == [batch["name"] for batch in whole]
        for one, other in zip(got, whole, strict=True):
            assert (one["text"]["length"] == other["text"]["length"]).all()
        if start == "fork":
            following = Batches(photos, size=4, drop={"text": 0.2})
            following.load_state_dict(batches.state_dict(consumed=len(whole)))
            assert [b["name"] for b in loader] == [b["name"] for b in following]

    def test_it_travels_as_a_handle(self, photos: Dataset) -> None:
        batches = Batches(photos, size=4)
        list(batches)
        assert len(pickle.dumps(batches)) < 8000
        other = pickle.loads(pickle.dumps(batches))  # noqa: S301
        assert [b["name"] for b in other] == [b["name"] for b in batches]


class TestPrefetching:
    def test_the_prefetcher_hands_out_the_plan_and_its_state(self, photos: Dataset) -> None:
        whole = Batches(photos, size=4)
        wanted = [[batch["name"] for batch in whole] for _ in range(3)]
        batches = Batches(photos, size=4)
        loader: Prefetcher[dict[str, Any]]
        with Prefetcher(batches, depth=3, threads=3) as loader:
            got = [[batch["name"] for batch in loader] for _ in range(2)]
            third = []
            for batch in loader:
                third.append(batch["name"])
                if len(third) == 4:
                    state = loader.state_dict()
                    break
        assert [*got, third] == [*wanted[:2], wanted[2][:4]]
        assert (state["epoch"], state["position"]) == (2, 4)
        other = Batches(photos, size=4, rank=0, world=1)
        other.load_state_dict(state)
        assert [batch["name"] for batch in other] == wanted[2][4:]


RANKED = """
import sys
import torch.distributed as dist
from smartcache import SmartCache
from smartcache.training import Batches, Prefetcher
dist.init_process_group("gloo")
with SmartCache(sys.argv[1]) as cache, cache.open_dataset("photos") as photos:
    batches = Batches(photos, size=4)
    with Prefetcher(batches) as loader:
        names = [name for batch in loader for name in batch["name"]]
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (batches.rank, names))
    if dist.get_rank() == 0:
        print(gathered)
dist.destroy_process_group()
"""


def test_two_ranks_of_torchrun_share_an_epoch(photos: Dataset, room: Path, tmp_path: Path) -> None:
    script = tmp_path / "ranked.py"
    script.write_text(RANKED)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         str(script), str(room / "store")],
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (_, first), (_, second) = eval(done.stdout.strip().splitlines()[-1])  # noqa: S307
    assert len(Batches(photos, size=4).plan()) % 2 == 0
    assert sorted(first + second) == [f"{number:03}.png" for number in range(37)]
