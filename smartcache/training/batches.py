"""The order of training: an epoch is a plan, made of a seed and a number, and nothing else.

    batches = Batches({photos: 3, clips: 1}, size=8, seed=0, drop={"text": 0.1})
    for batch in batches: ...

A plan is the list of all *micro-batches* of an epoch: some items of one dataset and one bucket, as
many as one rank gets at one step. It is the same for every rank, on every machine, whatever the
number of ranks and workers. The position in it counts the micro-batches that were handed out to all
ranks together: rank r of a world takes position + r. So training goes on in the middle of an epoch
exactly where it stopped, with another number of ranks, workers or threads that read ahead.

An entry of a plan is a number of 64 bits: dataset, what is dropped, variation, item. Nothing is
drawn while batches are read. All that is random comes from the raw stream of a counter-based
generator (Philox), whose values no release of numpy changes.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from blake3 import blake3

from smartcache.errors import (
    ConfigError,
    DatasetChangedError,
    DatasetError,
    EncoderError,
    OutputMissingError,
)
from smartcache.training.build import rank_of
from smartcache.training.dataset import Dataset, Output
from smartcache.training.encoder import Item, Keys, as_kept, split
from smartcache.training.look import Listing

Column = np.ndarray[Any, np.dtype[Any]]
State = dict[str, Any]
VERSION: Final = 1
_ITEM_BITS: Final = 36
_VARIATION_BITS: Final = 12
_DROP_AT: Final = _ITEM_BITS + _VARIATION_BITS
_DROP_BITS: Final = 7
_DATASET_AT: Final = _DROP_AT + _DROP_BITS
_ITEM: Final = (1 << _ITEM_BITS) - 1
_VARIATION: Final = (1 << _VARIATION_BITS) - 1
_MOST_DATASETS: Final = 256
_KEPT: Final = 2
"""Plans that are kept: of this epoch, and of the next, which may be read ahead."""

_AHEAD: Final = 16
"""Steps for which outputs are fetched from a tier before they are read."""


class Step(NamedTuple):
    """A micro-batch that one rank gets."""

    epoch: int
    position: int
    """In the plan, once it was handed out to all ranks."""
    is_last: bool
    """No batch of this rank comes after it in this epoch."""
    entries: Column


@dataclass(frozen=True, slots=True)
class Plan:
    """All micro-batches of an epoch, in order."""

    epoch: int
    entries: Column
    starts: Column
    """Where each micro-batch begins among the entries."""
    ends: Column
    buckets: int
    dropped: int
    """Items that are left out, because their bucket has not enough of them for a whole one."""

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def nbytes(self) -> int:
        """The memory that it takes."""
        return int(self.entries.nbytes + self.starts.nbytes + self.ends.nbytes)

    def __str__(self) -> str:
        """Return it in words."""
        count = int((self.ends - self.starts).sum())
        text = f"epoch {self.epoch}: {len(self):,} micro-batches, {count:,} items"
        text += f", {self.buckets:,} bucket{'' if self.buckets == 1 else 's'}"
        return text + (f"; {self.dropped:,} left out at ragged ends" if self.dropped else "")


class Batches:
    """The batches of one or several datasets, epoch after epoch.

    `datasets` is one dataset, a list, or a dict with weights: with {photos: 3, clips: 1}, three of
    four items are photos; the dataset that has the most items for its weight comes once in an
    epoch, the others more often. (Of a list, `weights` says the same.) A micro-batch has `size`
    items of one dataset and bucket; the last of a bucket may have fewer, or is left out with
    `drop_last`. `take` takes so many items at random from all, anew in every epoch. `drop` serves
    the output of the empty text instead of that of the item, at random: {"text": 0.1} for every
    tenth.

    `rank` and `world` come from torch.distributed or torchrun, if they are not given. At the end of
    an epoch every rank gets the same number of batches: where there are not enough, the first ones
    come again, or with `drop_last` the last ones are left out.
    """

    def __init__(  # noqa: PLR0913 - all of it is about the order
        self,
        datasets: Dataset | Sequence[Dataset] | Mapping[Dataset, float],
        *,
        size: int,
        seed: int = 0,
        shuffle: bool = True,
        weights: Sequence[float] | None = None,
        drop: Mapping[str, float] | None = None,
        take: int | None = None,
        rank: int | None = None,
        world: int | None = None,
        drop_last: bool = False,
    ) -> None:
        given, shares = _checked_datasets(datasets, weights)
        for name, value in (("size", size), ("take", take)):
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name} is a number from 1 on, not {value!r}")
        if type(seed) is not int:
            raise ConfigError(f"seed is a whole number, not {seed!r}")
        self.datasets = given
        self.size = size
        self.seed = seed
        self.shuffle = shuffle
        self.weights = shares
        self.drop = _checked_drop(drop or {}, given)
        self.take = take
        self.drop_last = drop_last
        self.rank, self.world = _checked_rank(rank, world)
        self.epoch = 0
        self.position = 0
        """Micro-batches of this epoch that were handed out, to all ranks."""
        self._began = 0
        """The position at which this process began."""
        self._ahead = 0
        """The epoch whose steps were given last."""
        self._gate = threading.RLock()
        self._plans: dict[int, Plan] = {}
        self._pools: list[_Pool] | None = None
        for dataset in given:
            for name in self.drop:
                if name in dataset.outputs:
                    encode_empty(dataset, name)

    def __repr__(self) -> str:
        names = " + ".join(dataset.name for dataset in self.datasets)
        where = f"epoch {self.epoch}, {self.position:,} handed out"
        return f"<Batches of {self.size} of {names}: {where}>"

    def __getstate__(self) -> dict[str, Any]:
        """Go to another process without the plans: they are made again there."""
        return {**self.__dict__, "_plans": {}, "_pools": None, "_gate": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._gate = threading.RLock()

    # the plan

    def plan(self, epoch: int | None = None) -> Plan:
        """Return the plan of an epoch; of this one unless said."""
        number = self.epoch if epoch is None else epoch
        with self._gate:
            found = self._plans.get(number)
            if found is None:
                if self._pools is None:
                    self._pools = [_Pool(dataset) for dataset in self.datasets]
                found = self._plans[number] = _planned(self, self._pools, number)
                for old in sorted(self._plans)[:-_KEPT]:
                    del self._plans[old]
            return found

    @property
    def digest(self) -> str:
        """What all plans are made of: options, each dataset, and how long this epoch is."""
        options = [
            VERSION, self.shuffle, list(self.weights), sorted(self.drop.items()), self.take,
            self.drop_last,
        ]  # fmt: skip
        parts = [blake3(json.dumps(options).encode()).hexdigest()[:12]]
        total = len(self.plan())
        parts += [pool.signature for pool in self._pools or ()]
        return f"{'.'.join(parts)}/{total}"

    # where it is

    def state_dict(self, consumed: int | None = None) -> State:
        """Return where training is: after the batch that was handed out last.

        `consumed`: after so many batches of this rank since it began, for those who count
        themselves, because something between reads ahead.
        """
        epoch, position = self.epoch, self.position
        if consumed is not None:
            epoch, position = self._after(consumed)
        return {
            "version": VERSION, "seed": self.seed, "epoch": epoch, "position": position,
            "size": self.size, "plan_digest": self.digest,
        }  # fmt: skip

    def _after(self, consumed: int) -> tuple[int, int]:
        epoch, position = self._ahead, self._began
        total = len(self.plan(epoch))
        steps = self._steps_left(position, total)
        while consumed >= steps:
            consumed, epoch, position = consumed - steps, epoch + 1, 0
            total = len(self.plan(epoch))
            steps = self._steps_left(0, total)
        return epoch, position + consumed * self.world

    def load_state_dict(
        self, state: Mapping[str, Any], *, on_change: Literal["raise", "replan"] = "raise"
    ) -> None:
        """Go on where `state_dict` was taken, whatever the number of ranks was there.

        If the datasets or options are not the same, DatasetChangedError says which; with
        on_change="replan" the same share of the epoch is left out of a new plan.
        """
        if on_change not in ("raise", "replan"):
            raise ConfigError(f'on_change is "raise" or "replan", not {on_change!r}')
        if state.get("version") != VERSION:
            raise DatasetError(f"A state of version {state.get('version')!r} cannot be read")
        epoch, position = int(state["epoch"]), int(state["position"])
        changed = self._changed(state, epoch)
        if changed and on_change == "raise":
            hint = "To go on with a new plan for the rest of the epoch: on_change='replan'."
            raise DatasetChangedError(f"Changed since then: {', '.join(changed)}", hint=hint)
        self.seed = int(state["seed"])
        self._plans = {}
        if changed:
            before = int(str(state["plan_digest"]).rpartition("/")[2] or 1)
            position = min(round(position / max(1, before) * len(self.plan(epoch))), position)
        self._go_to(epoch, position)

    def _changed(self, state: Mapping[str, Any], epoch: int) -> list[str]:
        """Name what is not as it was when a state was taken."""
        found = []
        if state["size"] != self.size:
            found.append(f"the size ({state['size']} to {self.size})")
        kept, self.epoch = self.epoch, epoch
        seed, self.seed = self.seed, int(state["seed"])
        try:
            self._plans = {}
            mine = self.digest.rpartition("/")[0].split(".")
        finally:
            self.epoch, self.seed, self._plans = kept, seed, {}
        theirs = str(state["plan_digest"]).rpartition("/")[0].split(".")
        if mine[0] != theirs[0]:
            found.append("the options")
        if len(mine) != len(theirs):
            found.append("the number of datasets")
        else:
            pairs = zip(self.datasets, mine[1:], theirs[1:], strict=True)
            found += [f"the items of {each.name}" for each, one, other in pairs if one != other]
        return found

    def _go_to(self, epoch: int, position: int) -> None:
        if position >= len(self.plan(epoch)):
            epoch, position = epoch + 1, 0
        self.epoch, self.position = epoch, position
        self._ahead, self._began = epoch, position

    # handing out

    def __len__(self) -> int:
        """Count the batches of this rank in an epoch."""
        return self._steps_left(0, len(self.plan()))

    def _steps_left(self, position: int, total: int) -> int:
        left = total - position
        return left // self.world if self.drop_last else -(-left // self.world)

    def steps(self) -> Iterator[Step]:
        """Go through what is left of this epoch for this rank, without reading it."""
        self._ahead, self._began = self.epoch, self.position
        return self._steps(self.epoch, self.position)

    def next_epoch(self) -> Iterator[Step]:
        """Go through the epoch after the one whose steps were given last."""
        self._ahead += 1
        return self._steps(self._ahead, 0)

    def _steps(self, epoch: int, position: int) -> Iterator[Step]:
        plan = self.plan(epoch)
        if not len(plan):
            count = sum(len(dataset) for dataset in self.datasets)
            hint = "Build the dataset, or use a smaller size, or drop_last=False."
            message = f"There is no micro-batch of {self.size} of {count:,} items"
            raise DatasetError(message, hint=hint)
        # What lies in a tier is fetched while the steps before it are taken.
        is_far = any(
            output.set.is_far for each in self.datasets for output in each.outputs.values()
        )
        announced = position
        for left in range(self._steps_left(position, len(plan)), 0, -1):
            while is_far and announced < position + min(left, _AHEAD) * self.world:
                self._announce(self._step(plan, announced))
                announced += self.world
            yield self._step(plan, position)
            position += self.world

    def _announce(self, step: Step) -> None:
        """Say that a step will be read soon."""
        for number, outputs in self.numbers_of(step).items():
            for name, numbers in outputs.items():
                output = self.datasets[number].outputs[name]
                if output.set.is_far:
                    output.selection.announce(numbers)

    def _step(self, plan: Plan, position: int) -> Step:
        # Behind the end the first ones come again, so that no rank has to wait for the others.
        number = (position + self.rank) % len(plan)
        some = slice(int(plan.starts[number]), int(plan.ends[number]))
        after = position + self.world
        is_last = self._steps_left(after, len(plan)) <= 0
        return Step(plan.epoch, after, is_last, plan.entries[some])

    def advance(self, step: Step) -> None:
        """Take it that a step was handed out."""
        self.epoch, self.position = step.epoch, step.position
        if step.is_last:
            self.epoch, self.position = step.epoch + 1, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Go through what is left of this epoch; when it is over, the next one is on."""
        for step in self.steps():
            batch = self.read(step)
            self.advance(step)
            yield batch

    def read(self, step: Step) -> dict[str, Any]:
        """Read a micro-batch: outputs by name, stacked; names; metadata. From any thread."""
        return self.dataset.read(step.entries)

    def numbers_of(self, step: Step) -> dict[int, dict[str, list[int]]]:
        """Return what a step needs: by dataset and output, the numbers of items and variations."""
        found: dict[int, dict[str, list[int]]] = {}
        for number in np.unique(step.entries >> _DATASET_AT).tolist():
            dataset = self.datasets[number]
            some = step.entries[step.entries >> _DATASET_AT == number]
            items = dataset.numbers[some & _ITEM]
            variations = (some >> _ITEM_BITS) & _VARIATION
            found[number] = {
                output.name: (items * output.variations + variations % output.variations).tolist()
                for output in dataset.outputs.values()
            }
        return found

    # for PyTorch's DataLoader

    @property
    def sampler(self) -> Sampler:
        """What is left of this epoch, as lists of numbers: the `batch_sampler` of a DataLoader."""
        return Sampler(self)

    @property
    def dataset(self) -> Entries:
        """What reads such lists: the `dataset` of a DataLoader; it goes to workers as a handle."""
        return Entries(self.datasets, tuple(self.drop))

    @staticmethod
    def collate(batch: dict[str, Any]) -> dict[str, Any]:
        """Return a batch as it is: the `collate_fn` of a DataLoader."""
        return batch


class Sampler:
    """Lists of numbers, one for each batch; every time it is gone through, the next epoch."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._has_begun = False

    def __len__(self) -> int:
        batches = self._batches
        return batches._steps_left(batches.position, len(batches.plan()))  # noqa: SLF001

    def __iter__(self) -> Iterator[list[int]]:
        """Give the lists; the position is that of `state_dict(consumed=n)`."""
        batches = self._batches
        if self._has_begun:
            batches._go_to(batches._ahead + 1, 0)  # noqa: SLF001
        self._has_begun = True
        for step in batches.steps():
            yield step.entries.tolist()


class Entries:
    """Datasets as a map from lists of numbers, those of a sampler, to batches."""

    def __init__(self, datasets: Sequence[Dataset], drop: tuple[str, ...]) -> None:
        self._datasets = tuple(datasets)
        self._drop = drop

    def __len__(self) -> int:
        return sum(len(dataset) for dataset in self._datasets)

    def __getitem__(self, entry: int) -> dict[str, Any]:
        """Return a batch of one."""
        return self.read([entry])

    def read(self, numbers: Sequence[int] | Column) -> dict[str, Any]:
        """Return the batch of some numbers, which must be of one dataset and bucket."""
        entries = np.asarray(numbers, np.int64)
        chosen = np.unique(entries >> _DATASET_AT)
        if len(chosen) != 1:
            raise DatasetError("Entries of several datasets cannot be one batch")
        dataset = self._datasets[int(chosen[0])]
        flags = (entries >> _DROP_AT) & ((1 << _DROP_BITS) - 1)
        dropped = {
            name: (flags >> at & 1).astype(bool)
            for at, name in enumerate(self._drop)
            if name in dataset.outputs and (flags >> at & 1).any()
        }
        variations = (entries >> _ITEM_BITS) & _VARIATION
        return dataset.batch(entries & _ITEM, variations=variations, drop=dropped or None)

    __getitems__ = read


# making a plan


class _Pool:
    """What plans have to know of a dataset: of each item its bucket, and how often it comes."""

    def __init__(self, dataset: Dataset) -> None:
        self.count = len(dataset)
        self.signature = dataset.signature[:12]
        numbers = dataset.numbers
        self.repeats: Column = dataset.listing.repeats[numbers]
        self.variations = max(output.variations for output in dataset.outputs.values())
        self.bucket: Column = np.zeros(self.count, np.int64)
        self.buckets = min(1, self.count)
        for output in dataset.outputs.values():
            if output.spec["buckets"]:
                size = output.keys.bucket[numbers].astype(np.int64)
                mixed = (self.bucket << 40) | (size[:, 0] << 20) | size[:, 1]
                found, self.bucket = np.unique(mixed, return_inverse=True)
                self.buckets = len(found)


def _noise(seed: int, epoch: int, purpose: str, count: int) -> Column:
    """Return random numbers of 64 bits: the same on every machine, and in every release."""
    text = f"smartcache order {VERSION} {seed} {epoch} {purpose}".encode()
    key = int.from_bytes(blake3(text).digest(16), "little")
    raw: Column = np.random.Philox(key=key).random_raw(count)
    return raw


def _chances(noise: Column) -> Column:
    """Return random numbers from 0 to 1."""
    found: Column = (noise >> np.uint64(11)) * 2.0**-53
    return found


def _planned(batches: Batches, pools: Sequence[_Pool], epoch: int) -> Plan:
    """Make the plan of an epoch."""

    def noise(purpose: str, count: int) -> Column:
        return _noise(batches.seed, epoch, purpose, count)

    pieces, buckets, first = [], [], 0
    for number, (pool, factor) in enumerate(zip(pools, _factors(pools, batches), strict=True)):
        items, copies = _repeated(pool.repeats * factor, lambda count: noise("repeats", count))
        entries = items | (number << _DATASET_AT)
        if pool.variations > 1:
            # Each item begins with another one, and goes through all of them, epoch by epoch.
            begin = _noise(batches.seed, 0, f"variations {number}", pool.count)[items]
            turn = int(np.ceil((pool.repeats * factor).max(initial=1)))
            begin = begin % np.uint64(pool.variations)
            chosen = (begin.astype(np.int64) + copies + epoch * turn) % pool.variations
            entries |= chosen << _ITEM_BITS
        pieces.append(entries)
        buckets.append(pool.bucket[items] + first)
        first += pool.buckets
    entries, bucket = np.concatenate(pieces), np.concatenate(buckets)
    if batches.take is not None and len(entries):
        order = np.argsort(noise("take", len(entries)))
        whole, rest = divmod(batches.take, len(entries))
        order = np.concatenate([np.arange(len(entries))] * whole + [order[:rest]])
        entries, bucket = entries[order], bucket[order]
    for at, rate in enumerate(batches.drop.values()):
        is_dropped = _chances(noise(f"drop {at}", len(entries))) < rate
        entries |= is_dropped.astype(np.int64) << (_DROP_AT + at)
    if batches.shuffle:
        order = np.argsort(noise("order", len(entries)))
        entries, bucket = entries[order], bucket[order]
    return _cut(batches, epoch, entries, bucket, noise)


def _factors(pools: Sequence[_Pool], batches: Batches) -> list[float]:
    """Return how often each dataset comes, so that their shares are those that were asked for."""
    counts = [float(pool.repeats.sum()) for pool in pools]
    if not batches.weights:
        return [1.0] * len(pools)
    wanted = [
        weight / count if count else 0.0
        for weight, count in zip(batches.weights, counts, strict=True)
    ]
    least = min((each for each in wanted if each > 0), default=1.0)
    return [each / least for each in wanted]


def _repeated(repeats: Column, noise: Callable[[int], Column]) -> tuple[Column, Column]:
    """Return the items of an epoch, and of each whether it is the first, second ... time.

    Of a fraction, that share of the items comes once more: which ones, chance decides.
    """
    count = len(repeats)
    times = np.floor(repeats).astype(np.int64)
    rest = repeats - times
    for share in np.unique(rest[rest > 0]).tolist():
        group = np.flatnonzero(rest == share)
        drawn = noise(count)[group]
        more = int(share * len(group) + float(_chances(noise(1))[0]))
        times[group[np.argsort(drawn)[:more]]] += 1
    if (times == 1).all():
        return np.arange(count, dtype=np.int64), np.zeros(count, np.int64)
    items = np.repeat(np.arange(count, dtype=np.int64), times)
    starts = np.repeat(np.cumsum(times) - times, times)
    return items, np.arange(len(items)) - starts


def _cut(
    batches: Batches,
    epoch: int,
    entries: Column,
    bucket: Column,
    noise: Callable[[str, int], Column],
) -> Plan:
    """Cut the items of each bucket into micro-batches, and put these in an order."""
    size = batches.size
    entries = entries[np.argsort(_narrow(bucket), kind="stable")]
    counts = np.bincount(bucket)
    counts = counts[counts > 0]
    ends = np.cumsum(counts)
    pieces = counts // size if batches.drop_last else -(-counts // size)
    which = np.repeat(np.arange(len(counts)), pieces)
    within = np.arange(len(which)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = (ends - counts)[which] + within * size
    stops = np.minimum(starts + size, ends[which])
    if batches.shuffle:
        order = np.argsort(noise("micro-batches", len(starts)))
        starts, stops = starts[order], stops[order]
    elif len(starts):
        first = entries[starts]
        order = np.lexsort((first & _ITEM, first >> _DATASET_AT))
        starts, stops = starts[order], stops[order]
    dropped = int(counts.sum() - (stops - starts).sum())
    return Plan(epoch, entries, starts, stops, len(counts), dropped)


def _narrow(bucket: Column) -> Column:
    """Return small numbers in two bytes, if they fit: numpy sorts these much faster."""
    return bucket.astype(np.uint16) if bucket.max(initial=0) < 1 << 16 else bucket


# checking arguments


def _checked_datasets(
    datasets: Dataset | Sequence[Dataset] | Mapping[Dataset, float], weights: Sequence[float] | None
) -> tuple[tuple[Dataset, ...], tuple[float, ...]]:
    if isinstance(datasets, Dataset):
        given: tuple[Dataset, ...] = (datasets,)
    else:
        given = tuple(datasets)
    if isinstance(datasets, Mapping):
        if weights is not None:
            raise ConfigError("Weights are given twice: in the dict, and as `weights`")
        weights = tuple(datasets.values())
    if not given or not all(isinstance(each, Dataset) for each in given):
        hint = "Give a dataset, a list of datasets, or {dataset: weight}."
        raise ConfigError("Batches are made of datasets", hint=hint)
    if len(given) > _MOST_DATASETS:
        raise ConfigError(f"At most {_MOST_DATASETS} datasets can be mixed")
    shares = tuple(float(each) for each in weights or ())
    if shares and (len(shares) != len(given) or min(shares) <= 0 or not np.isfinite(shares).all()):
        raise ConfigError(f"Weights are numbers above 0, one for each dataset, not {weights!r}")
    for dataset in given:
        if max(output.variations for output in dataset.outputs.values()) > _VARIATION:
            raise ConfigError(f"At most {_VARIATION:,} variations can be told apart")
    return given, shares


def _checked_drop(drop: Mapping[str, float], datasets: Iterable[Dataset]) -> dict[str, float]:
    known = {name for dataset in datasets for name in dataset.outputs}
    for name, rate in drop.items():
        if name not in known:
            hint = f"There are: {', '.join(sorted(known))}."
            raise ConfigError(f"No dataset has an output {name!r} to drop", hint=hint)
        if not 0 <= rate <= 1:
            raise ConfigError(f"The share of {name} to drop is from 0 to 1, not {rate!r}")
    if len(drop) > _DROP_BITS:
        raise ConfigError(f"At most {_DROP_BITS} outputs can be dropped")
    return dict(drop)


def _checked_rank(rank: int | None, world: int | None) -> tuple[int, int]:
    if (rank is None) != (world is None):
        raise ConfigError("Give both rank and world, or neither")
    if rank is None or world is None:
        torch = sys.modules.get("torch")
        distributed = getattr(torch, "distributed", None)
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            rank, world = distributed.get_rank(), distributed.get_world_size()
        else:
            rank, world = rank_of("RANK", 0), rank_of("WORLD_SIZE", 1)
    if not 0 <= rank < world:
        raise ConfigError(f"There is no rank {rank} in a world of {world}")
    return rank, world


# the empty text


class _EmptyItem(Item):
    """An item whose texts are all empty."""

    __slots__ = ("_reads",)

    def __init__(self, listing: Listing, output: Output) -> None:
        key = Keys.of_empty(output.spec)
        super().__init__(listing, -1, bucket=None, variation=0, key=key, used=set())
        self._reads = frozenset(output.spec["reads"])

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return "the empty text"

    @property
    def size(self) -> None:
        """It is no image."""

    @property
    def metadata(self) -> dict[str, Any]:
        """Nothing is known of it."""
        return {}

    def __contains__(self, name: object) -> bool:
        return name in self._reads

    def __getitem__(self, name: str) -> str:
        if name not in self:
            raise KeyError(name)
        return ""


def encode_empty(dataset: Dataset, name: str) -> None:
    """See to it that there is an output of the empty text, for those who drop texts."""
    output, listing = dataset.outputs[name], dataset.listing
    key = Keys.of_empty(output.spec).hex()
    if key in output.set:
        return
    for read in output.spec["reads"]:
        if any(listing.is_file(number, read) for number in range(len(listing))):
            hint = "Only outputs of texts can be dropped."
            raise ConfigError(f"{name} of {dataset.name} is made of files ({read})", hint=hint)
    if output.encoder is None:
        hint = "Open it with cache.dataset(...) and its encoders, once, to encode it."
        message = f"{dataset.name} has no {name} of the empty text"
        raise OutputMissingError(message, hint=hint)
    if dataset.before is not None:
        dataset.before()
    value = split(output.encoder.function([_EmptyItem(listing, output)]), 1, name)[0]
    if isinstance(value, BaseException):
        raise EncoderError(f"{name} of the empty text cannot be encoded: {value}") from value
    output.set.put(key, as_kept(value, output.encoder.trim, name), metadata={"name": ""})
    output.look()


__all__ = ["Batches", "Plan", "Step"]
