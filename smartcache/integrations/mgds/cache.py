"""The caching modules of an mgds pipeline, on artifacts.

An item is known by its content: the bytes of its source and of the files watched beside it, or a
text. The key of an artifact is `<content>-<resolution>-<variation>`; what the encoders and their
settings are is the fingerprint of the set. So what was made of other bytes, by another encoder or
at another resolution is never found, and equal bytes are encoded once, wherever they lie.

    <cache_dir>/sources.sqlite    what is known of the sources: see `index`
    <cache_dir>/mgds/<id>/        the artifacts; see smartcache.artifacts

`start` finds out what this epoch needs and is missing, and encodes it; `get_item` reads. Items are
numbered; what is kept of each in memory are columns: where it is upstream, its content, and, by
variation, its resolution and its small values.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import random
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import numpy as np
from blake3 import blake3

from smartcache.artifacts import ArtifactSet, ArtifactSets, compute_key
from smartcache.config import load_settings, variable
from smartcache.errors import (
    ArtifactError,
    ConfigError,
    EncoderError,
    SmartcacheError,
    SourcesVanishedError,
)
from smartcache.integrations.mgds import orphans
from smartcache.integrations.mgds.index import (
    NOWHERE,
    SET,
    Index,
    Kept,
    Once,
    content_of,
    dumps,
    loads,
)
from smartcache.integrations.mgds.takeover import OldCache
from smartcache.progress import Progress, bars

if TYPE_CHECKING:
    from numpy.typing import NDArray

_log = logging.getLogger(__name__)
_Grouped = tuple[str, int, float | None, str]
"""The key of a group, its variations, balancing and strategy."""
OnError = Literal["substitute", "skip", "raise"]
ANY = "_"
"""The resolution of what has none."""
_GLANCE = 0.2
"""Seconds between two looks whether to stop, while others encode."""
_COLLECT_EVERY = 250
_AT_ONCE = 2000
"""Items that are looked up together: the more, the more memory."""
_NOTED_AT_ONCE = 64
_SHOWN = 10
_LATENT = "latent"
_NO_SETTINGS = ("path", "seed", "include_subdirectories", "name")
"""What a concept says of where its files are and in which order, not of how they are encoded."""
_OF_IMAGES = ("latent", "image", "mask", "depth", "conditioning", "original_resolution", "crop_")
_OF_TEXTS = ("tokens", "text_encoder", "prompt", "pooled")


class CachingStoppedException(SmartcacheError):  # noqa: N818 - the name its users know
    """`stop_check_fun` said so; what was encoded until then is kept."""

    default_hint = "Start again to encode the rest."


class _Pipeline(Protocol):
    device: Any


class _State(Protocol):
    executor: Executor


@dataclass(slots=True)
class _Faults:
    """Upstream indices that cannot be encoded: one list for all caches of a pipeline.

    Latents and captions come from different caches. What one of them leaves out or replaces, the
    others must, too: else an image would be trained with the caption of another.
    """

    version: int = 0
    skipped: set[int] = field(default_factory=set)
    replaced: dict[int, int] = field(default_factory=dict)


_faults: WeakKeyDictionary[object, _Faults] = WeakKeyDictionary()


@dataclass(slots=True)
class _Group:
    """Items that are balanced together."""

    numbers: NDArray[np.int64]
    variations: int
    balancing: float | None
    strategy: str

    def count(self, available: int) -> int:
        """Return how many items an epoch has of it."""
        if self.balancing is None:
            return available
        if self.strategy == "SAMPLES":
            return int(self.balancing)
        return math.floor(available * self.balancing)


@dataclass(slots=True)
class _Column:
    """What is known of the items in one variation."""

    contents: bytearray
    resolutions: NDArray[np.uint16]
    ready: NDArray[np.bool_]
    aggregates: list[str | None]


@dataclass(slots=True)
class _Task:
    """A content that has no artifact, or one without some names."""

    content: bytes
    numbers: list[int]
    wanted: str | None
    """The resolution; None: it is known when it is encoded."""


class _Made(NamedTuple):
    """What has become of a task."""

    row: Kept
    size: tuple[int, int] | None
    """Height and width of the original."""


class _EncodeError(Exception):
    """What upstream raised."""


class CacheModule:
    """All of a caching module but the base classes of mgds."""

    pipeline: _Pipeline
    _state: _State
    current_variation: int
    _get_previous_item: Callable[[int, str, int], Any]
    _get_previous_length: Callable[[str], int | None]

    def __init__(  # noqa: PLR0913, PLR0915, PLR0917 - its users know so many
        self,
        cache_dir: str | Path,
        split_names: list[str] | None = None,
        aggregate_names: list[str] | None = None,
        variations_in_name: str | None = None,
        balancing_in_name: str | None = None,
        balancing_strategy_in_name: str | None = None,
        variations_group_in_name: str | list[str] | None = None,
        group_enabled_in_name: str | None = None,
        before_cache_fun: Callable[[], None] | None = None,
        stop_check_fun: Callable[[], bool] | None = None,
        modeltype: str = "",
        source_path_in_name: str | None = None,
        sourceless: bool = False,  # noqa: FBT001, FBT002
        tolerate_missing_source: bool = False,  # noqa: FBT001, FBT002
        resolution_from_upstream: bool | None = None,  # noqa: FBT001
        bucket_method_provider: Callable[[], str] | None = None,
        rebucket_provider: Callable[[float], list[str]] | None = None,
        aspect_bucketing: object = None,
        extra_watched_paths_in_names: list[str] | None = None,
        trust_cache: bool = False,  # noqa: FBT001, FBT002
        content_key_in_name: str | None = None,
        build_max_workers: int | None = None,
        *,
        encoder_fingerprint: object = None,
        separate_modeltypes: bool = False,
        on_error: OnError = "substitute",
        shuffle_samples: bool = True,
        progress: Progress = bars,
    ) -> None:
        """Take the settings; nothing is opened before the first `start`.

        `encoder_fingerprint`: what the values depend on besides their sources: plain values, or a
        torch module. `on_error`: what becomes of an item that cannot be encoded. With
        `resolution_from_upstream` None, upstream is asked if nobody else tells.
        """
        super().__init__()
        if on_error not in ("substitute", "skip", "raise"):
            hint = "Choose one of substitute, skip, raise."
            raise ConfigError(f"on_error cannot be {on_error!r}", hint=hint)
        self.cache_dir = cache_dir
        self.split_names = list(split_names or [])
        self.aggregate_names = list(aggregate_names or [])
        self.variations_in_name = variations_in_name
        self.balancing_in_name = balancing_in_name
        self.balancing_strategy_in_name = balancing_strategy_in_name
        self.variations_group_in_names = (
            [variations_group_in_name]
            if isinstance(variations_group_in_name, str)
            else list(variations_group_in_name or [])
        )
        self.group_enabled_in_name = group_enabled_in_name
        self.stop_check_fun = stop_check_fun
        self.modeltype = modeltype
        self.source_path_in_name = source_path_in_name
        self.sourceless = sourceless
        self.tolerate_missing_source = tolerate_missing_source
        self.resolution_from_upstream = resolution_from_upstream
        self.bucket_method_provider = bucket_method_provider
        self.rebucket_provider = rebucket_provider
        self.aspect_bucketing = aspect_bucketing
        self.extra_watched_paths_in_names = list(extra_watched_paths_in_names or [])
        said = (variable("OT_SKIP_CACHE_VALIDATION") or "0").strip().casefold()
        self.trust_cache = (
            trust_cache or said in ("1", "true", "yes", "on") or load_settings().skip_validation
        )
        self.content_key_in_name = content_key_in_name
        self.build_max_workers = build_max_workers
        self._encoder_fingerprint = encoder_fingerprint
        self._separate_modeltypes = separate_modeltypes
        self._on_error = on_error
        self._shuffles = shuffle_samples
        self._progress = progress
        self._method: str | None = None
        """What the buckets are now, if somebody tells."""
        self._providers: dict[str, Any] = {}
        """Who gives a name upstream of all caches, where another cache gives it too."""
        self._common: object = None
        """What all images are made by, if it is known."""
        self._uses_files = content_key_in_name is None
        """Whether the contents of files are part of the keys."""
        self._before = Once(before_cache_fun)
        self._index: Index | None = None
        self._set: ArtifactSet | None = None
        self._old: OldCache | None = None
        self._where = np.zeros(0, np.int64)
        """The upstream index of each item, ascending."""
        self._groups: list[_Group] = []
        self._sources: list[tuple[int, bytes]] = []
        """Context and source of each item: without sources, and until all contents are known."""
        self._contexts: dict[int, Any] = {}
        self._contents = bytearray()
        self._columns: dict[int, _Column] = {}
        self._resolutions: list[str] = [ANY]
        self._texts: dict[str, str] = {}
        """Small values, each text once: most items have them in common with others."""
        self._arranged: tuple[int, int] | None = None
        self._order: list[NDArray[np.int64]] = []
        self._counts: list[int] = []
        self._ends: list[int] = []

    # what the pipeline asks for

    def get_inputs(self) -> list[str]:
        """Return the names that are read upstream."""
        others = (
            self.source_path_in_name, self.content_key_in_name, self.variations_in_name,
            self.balancing_in_name, self.balancing_strategy_in_name, self.group_enabled_in_name,
        )  # fmt: skip
        names = [*self.split_names, *self.aggregate_names, *filter(None, others)]
        return [*names, *self.variations_group_in_names, *self.extra_watched_paths_in_names]

    def get_outputs(self) -> list[str]:
        """Return the names that `get_item` gives."""
        more = ["concept"] if self.sourceless and self._has_names else []
        return [*self.split_names, *self.aggregate_names, *more]

    def get_meta(self, name: str) -> Any:  # noqa: ANN401, ARG002 - as mgds has it
        """Return nothing: there is nothing to be told."""
        return None

    @property
    def _has_names(self) -> bool:
        """Whether anything is cached: a trainer of all text encoders has nothing for it."""
        return bool(self.split_names or self.aggregate_names)

    def length(self) -> int:
        """Return how many items an epoch has; before the first `start`, how many there are."""
        if not self._has_names:
            names = self.get_inputs()
            return (self._get_previous_length(names[0]) or 0) if names else 0
        if not self._groups:
            if self.sourceless:
                self._open()
                return len(self._table.items(self._role, 0))
            return self._get_previous_length((*self.split_names, *self.aggregate_names)[0]) or 0
        self._arrange(self.current_variation)
        return sum(self._counts)

    def start(self, variation: int) -> None:
        """Find out what this epoch needs, and encode what is missing of it."""
        if not self._has_names:
            return
        self._before.again()
        if not self._groups:
            self._open()
            with _collecting_nothing():
                (self._survey_recorded if self.sourceless else self._survey)()
        self._arrange(variation)
        needed: dict[int, list[NDArray[np.int64]]] = {}
        for group, order, count in zip(self._groups, self._order, self._counts, strict=True):
            if not count:
                continue
            first = count * variation // len(order)
            last = (count * (variation + 1) - 1) // len(order)
            for each in {turn % group.variations for turn in range(first, last + 1)}:
                needed.setdefault(each, []).append(order)
        for each, numbers in sorted(needed.items()):
            self._ensure(each, np.concatenate(numbers))
        self._table.shrink()
        self._before.again()  # once more, should an item turn out to be damaged in training

    def get_item(self, index: int, requested_name: str | None = None) -> dict[str, Any]:
        """Return an item: all aggregate names, or all split names, or everything."""
        if not self._has_names:
            return {}
        self._arrange(self.current_variation)
        turn = bisect_right(self._ends, index)
        if index < 0 or turn == len(self._ends):
            raise IndexError(f"item {index} of {sum(self._counts)}")
        order, count = self._order[turn], self._counts[turn]
        place = index - (self._ends[turn] - count) + self.current_variation * count
        variation = place // len(order) % self._groups[turn].variations
        number = int(order[place % len(order)])
        instead = self._shared.replaced.get(int(self._where[number]))
        if instead is not None:
            number = self._number(instead)
        return self._item(number, variation, requested_name)

    def close(self) -> None:
        """Let go of the files."""
        if self._set is not None:
            self._set.close()
        if self._index is not None:
            self._index.close()

    # opening

    @property
    def _table(self) -> Index:
        if self._index is None:
            raise ArtifactError(f"{self.cache_dir} is not open", hint="Call start first.")
        return self._index

    @property
    def _artifacts(self) -> ArtifactSet:
        if self._set is None:
            raise ArtifactError(f"{self.cache_dir} is not open", hint="Call start first.")
        return self._set

    @cached_property
    def _shared(self) -> _Faults:
        return _faults.setdefault(self.pipeline, _Faults())

    @property
    def _role(self) -> str:
        """What tells this cache from others in the same folder: what its contents are made of."""
        files = [self.source_path_in_name, *self.extra_watched_paths_in_names]
        return json.dumps([files if self._uses_files else [], self.content_key_in_name])

    def _open(self) -> None:
        if self._set is not None:
            return
        folder = Path(self.cache_dir)
        folder.mkdir(parents=True, exist_ok=True)
        table = Index.in_folder(folder)
        if not self._separate_modeltypes:
            known = table.meta("modeltype")
            if known is None:
                with table.write():
                    table.set_meta("modeltype", self.modeltype)
            elif known != self.modeltype:
                table.close()
                message = (
                    f"{folder}: cache modeltype mismatch: it is of {known!r}, and the model is"
                    f" {self.modeltype!r}"
                )
                hint = "Use another cache_dir for each type, or pass separate_modeltypes=True."
                raise ConfigError(message, hint=hint)
        encoder = self._encoder_fingerprint
        if encoder is None:
            _log.warning(
                "%s: no encoder_fingerprint was given: another encoder, or other settings of it,"
                " cannot be noticed", folder,
            )  # fmt: skip
        fingerprint = {"modeltype": self.modeltype, "encoder": encoder}
        try:
            json.dumps(encoder)
        except (TypeError, ValueError):
            fingerprint["encoder"] = compute_key(encoder)
        self._find_providers()
        self._index = table
        self._set = ArtifactSets(folder).open(SET, fingerprint)
        self._old = OldCache(folder, self.modeltype) if self._uses_files else None

    # what there is

    def _survey(self) -> None:
        """Ask upstream for all items, and look at their files."""
        named = [
            self.variations_in_name, self.balancing_in_name, self.balancing_strategy_in_name,
            self.group_enabled_in_name, *self.variations_group_in_names,
        ]  # fmt: skip
        heads = list(dict.fromkeys(name.partition(".")[0] for name in named if name is not None))
        first = self.variations_in_name or (*self.split_names, *self.aggregate_names)[0]
        count = self._get_previous_length(first) or 0
        if "concept" not in heads and self._get_previous_length("concept") == count:
            heads.append("concept")  # for training without sources
        source = self.source_path_in_name
        ask = self._ask if self._providers else self._get_previous_item
        seen: dict[tuple[int, ...], tuple[list[Any], _Grouped | None, int]] = {}
        known = self._table.contexts()
        groups: dict[str, tuple[_Group, list[int]]] = {}
        where: list[int] = []
        for index in range(count):
            values = [ask(0, head, index) for head in heads]
            # Items of a concept have one dict in common, which is looked at once.
            mark = tuple(map(id, values))
            context = seen.get(mark) if all(isinstance(v, dict) for v in values) else None
            if context is None:
                told = dict(zip(heads, values, strict=True))
                grouped = self._grouped(told)
                text = json.dumps(told, sort_keys=True, default=str)
                if text not in known:
                    known[text] = self._table.add_context(text)
                context = seen[mark] = values, grouped, known[text]
            if context[1] is None:
                continue
            key = context[1][0]
            found = groups.get(key)
            if found is None:
                found = groups[key] = _Group(np.zeros(0, np.int64), *context[1][1:]), []
            found[1].append(len(where))
            path = ask(0, source, index) if source is not None else None
            name = NOWHERE + f"{key} {len(found[1])}".encode() if path is None else _absolute(path)
            where.append(index)
            self._sources.append((context[2], name))
        self._where = np.array(where, np.int64)
        self._take_groups(groups.values())
        if self._uses_files:
            self._contents = self._file_contents()
        if self.content_key_in_name is None:
            self._note_items(0, self._contents)
            self._sources = []

    def _survey_recorded(self) -> None:
        """Take the items from what was recorded when their sources were there."""
        recorded = self._table.items(self._role, 0)
        if not recorded:
            hint = "Start once with the sources: that fills the cache."
            raise ArtifactError(f"{self.cache_dir} has nothing to train from", hint=hint)
        self._contexts = {
            number: json.loads(text) for text, number in self._table.contexts().items()
        }
        groups: dict[str, tuple[_Group, list[int]]] = {}
        for context, source in recorded:
            grouped = self._grouped(self._contexts[context])
            if grouped is None:
                continue
            key = grouped[0]
            if key not in groups:
                groups[key] = _Group(np.zeros(0, np.int64), *grouped[1:]), []
            groups[key][1].append(len(self._sources))
            self._sources.append((context, source))
        self._where = np.arange(len(self._sources))
        self._take_groups(groups.values())
        if self.content_key_in_name is None:
            self._contents = bytearray(b"".join(recorded[each] for each in self._sources))

    def _take_groups(self, found: Iterable[tuple[_Group, list[int]]]) -> None:
        for group, numbers in found:
            group.numbers = np.array(numbers, np.int64)
            self._groups.append(group)
        if not self._groups:
            self._groups = [_Group(np.zeros(0, np.int64), 1, None, "")]

    def _grouped(self, told: Mapping[str, Any]) -> _Grouped | None:
        """Return the group of an item, and its settings; None: it is not enabled."""
        if self.variations_in_name is None:
            return "", 1, None, ""
        if self.group_enabled_in_name and not _value(told, self.group_enabled_in_name):
            return None
        key = json.dumps(
            [_value(told, name) for name in self.variations_group_in_names], default=str
        )
        balancing = _value(told, self.balancing_in_name)
        strategy = str(_value(told, self.balancing_strategy_in_name) or "REPEATS")
        strategy = strategy.rpartition(".")[2]  # of an enum
        if strategy not in ("REPEATS", "SAMPLES"):
            raise ConfigError(f"The balancing strategy cannot be {strategy!r}")
        variations = max(1, int(_value(told, self.variations_in_name) or 1))
        return key, variations, 1.0 if balancing is None else float(balancing), strategy

    def _ask(self, variation: int, name: str, index: int) -> Any:  # noqa: ANN401
        """Return a value that an item has upstream of all caches.

        Another cache before this one may give the name too, but in the order of the epoch.
        """
        head, _, rest = name.partition(".")
        module = self._providers.get(head)
        if module is None:
            return self._get_previous_item(variation, name, index)
        value = module.get_item(variation, index, head)[head]
        return _value(value, rest) if rest else value

    def _find_providers(self) -> None:
        """Look who gives the names that are asked for by their upstream index."""
        modules = list(getattr(self.pipeline, "modules", ()))
        before = modules[: modules.index(self)] if self in modules else []
        for name in self.get_inputs():
            head = name.partition(".")[0]
            givers = [each for each in reversed(before) if head in each.get_outputs()]
            if givers and isinstance(givers[0], CacheModule):
                others = [each for each in givers if not isinstance(each, CacheModule)]
                if others:
                    self._providers[head] = others[0]

    def _file_contents(self) -> bytearray:
        """Return the contents of all items by their files; those that are away raise."""
        lists = [
            (source, *self._watched(index))
            for index, (_, source) in zip(self._where.tolist(), self._sources, strict=True)
        ]
        paths = list(dict.fromkeys(path for each in lists for path in each))
        known = self._table.digests(paths, trust=self.trust_cache, progress=self._progress)
        missing = [each[0] for each in lists if each[0] not in known and each[0][:1] != NOWHERE]
        if missing and self.tolerate_missing_source:
            memos = self._table.known(missing)
            for path in missing:
                memo = memos.get(path)
                known[path] = memo[24:56] if memo else content_of([], os.fsdecode(path))
        elif missing:
            items = tuple(map(os.fsdecode, missing))
            shown = ", ".join(items[:_SHOWN])
            hint = (
                "Is a drive not mounted? With tolerate_missing_source=True, what is cached of them"
                " is used."
            )
            message = f"{len(missing)} of {len(lists)} sources are not there: {shown}"
            raise SourcesVanishedError(message, hint=hint, items=items)
        settings = {
            context: self._settings(json.loads(text))
            for text, context in self._table.contexts().items()
        }
        return bytearray(b"".join(
            _content_of_files(each, known, settings[context])
            for each, (context, _) in zip(lists, self._sources, strict=True)
        ))  # fmt: skip

    def _settings(self, told: Mapping[str, Any]) -> str:
        """Return what a concept says of how its images are made: part of what they are known by.

        That is what groups are told apart by, but for where the files lie.
        """
        names = [
            name
            for name in self.variations_group_in_names
            if name.rpartition(".")[2] not in _NO_SETTINGS
        ]
        said = {name: _value(told, name) for name in names}
        said = {name: value for name, value in said.items() if value is not None}
        more = [self._common] if self._common is not None else []
        return json.dumps([said, *more], sort_keys=True, default=str) if said or more else ""

    def _watched(self, index: int) -> list[bytes]:
        found = (self._ask(0, name, index) for name in self.extra_watched_paths_in_names)
        return [_absolute(path) if path else NOWHERE for path in found]

    def _text_contents(self, variation: int) -> bytearray:
        """Return the contents of all items by their texts, in one variation."""
        recorded = self._table.items(self._role, variation)
        if self.sourceless:
            missing = [each for each in self._sources if each not in recorded]
            if missing:
                message = f"Variation {variation} of {len(missing)} items was never encoded"
                raise ArtifactError(message, hint="Start once with the sources.")
            return bytearray(b"".join(recorded[each] for each in self._sources))
        name = self.content_key_in_name or ""
        contents = []
        for number, each in enumerate(self._sources):
            content = recorded.get(each) if self.trust_cache else None
            if content is None:
                index = int(self._where[number])
                text = str(self._ask(variation, name, index))
                file = [bytes(self._contents[32 * number : 32 * number + 32])]
                content = content_of(file if self._uses_files else [], text)
            contents.append(content)
        made = bytearray(b"".join(contents))
        self._note_items(variation, made)
        return made

    def _note_items(self, variation: int, contents: bytearray) -> None:
        told = blake3(contents)
        for context, source in self._sources:
            told.update(b"%d %d " % (context, len(source)) + source)
        note, digest = f"items {self._role} {variation}", told.hexdigest()
        if self._table.meta(note) == digest:
            return
        recorded = self._table.items(self._role, variation)
        now = {
            each: bytes(contents[32 * number : 32 * number + 32])
            for number, each in enumerate(self._sources)
        }
        changed = {each: content for each, content in now.items() if recorded.get(each) != content}
        with self._table.write():
            self._table.add_items(self._role, variation, changed)
            self._table.set_meta(note, digest)

    # the order of an epoch

    def _arrange(self, variation: int) -> None:
        """Put the items of an epoch in order: the same for all caches of a pipeline."""
        shared = self._shared
        if self._arranged == (variation, shared.version):
            return
        self._order, self._counts = [], []
        for turn, group in enumerate(self._groups):
            numbers = group.numbers
            if shared.skipped:
                numbers = numbers[~np.isin(self._where[numbers], list(shared.skipped))]
            count = group.count(len(numbers)) if len(numbers) else 0
            if group.strategy == "SAMPLES" and self._shuffles:
                # Not the seed of this module: its latents belong to the captions of another one.
                shuffled = list(range(len(numbers)))
                random.Random(f"{variation} {turn}").shuffle(shuffled)  # noqa: S311
                numbers = numbers[shuffled[:count]]
            self._order.append(numbers)
            self._counts.append(count)
        self._ends = list(np.cumsum(self._counts).tolist())
        self._arranged = variation, shared.version

    def _number(self, index: int) -> int:
        """Return the number of the item at an upstream index."""
        return int(np.searchsorted(self._where, index))

    # encoding

    def _column(self, variation: int) -> _Column:
        found = self._columns.get(variation)
        if found is None:
            count = len(self._where)
            contents = (
                self._contents
                if self.content_key_in_name is None
                else self._text_contents(variation)
            )
            found = self._columns[variation] = _Column(
                contents, np.zeros(count, np.uint16), np.zeros(count, np.bool_), [None] * count
            )
        return found

    def _ensure(  # noqa: C901, PLR0912 - one look at each item
        self, variation: int, numbers: NDArray[np.int64], *, here: bool = False
    ) -> None:
        """See to it that items have artifacts in a variation; `here`: made by this thread."""
        column = self._column(variation)
        if self._shared.replaced:
            numbers = numbers[~np.isin(self._where[numbers], list(self._shared.replaced))]
        todo = numbers[~column.ready[numbers]].tolist()
        if not todo:
            return
        contents = column.contents
        some = None
        if 50 * len(todo) < len(self._where):
            some = {bytes(contents[32 * each : 32 * each + 32]) for each in todo}
        rows: dict[bytes, list[Kept]] = {}
        with _collecting_nothing():
            for row in self._table.kept(self._artifacts.id, variation, some):
                rows.setdefault(row.content, []).append(row)
        chosen = self._resolver(variation)
        needed = frozenset(self._stored_names)
        complete: dict[str, bool] = {}
        tasks: dict[tuple[bytes, str | None], _Task] = {}
        again: list[Kept] = []

        def encode(number: int, content: bytes, wanted: str | None) -> None:
            task = tasks.setdefault((content, wanted), _Task(content, [], wanted))
            task.numbers.append(number)

        with self._progress("loading aggregate cache", len(todo)) as job:
            for start in range(0, len(todo), _AT_ONCE):
                keys, known = [], []
                for number in todo[start : start + _AT_ONCE]:
                    content = bytes(contents[32 * number : 32 * number + 32])
                    wanted, found = chosen(number, content, rows.get(content, ()))
                    if found is not None and found.names not in complete:
                        complete[found.names] = needed <= set(json.loads(found.names))
                    if found is None or not complete[found.names]:
                        encode(number, content, wanted)
                        continue
                    if found.method != self._method:
                        again.append(found._replace(method=self._method))
                    keys.append(f"{content.hex()}-{found.resolution}-{variation}")
                    known.append((number, found))
                missing = set(self._artifacts.select(keys).missing.tolist()) if keys else set()
                for position, (number, row) in enumerate(known):
                    if position in missing:
                        encode(number, row.content, row.resolution)
                    else:
                        self._take(column, number, row)
                job.advance(len(known) - len(missing))
        del rows
        if again and not self.sourceless:
            self._table.keep(self._artifacts.id, variation, again)
        if tasks:
            self._encode_all(variation, list(tasks.values()), here=here)

    @cached_property
    def _stored_names(self) -> list[str]:
        """The names that artifacts have; paths are not among them: equal files lie at several."""
        live = {self.source_path_in_name, *self.extra_watched_paths_in_names}
        return [name for name in (*self.split_names, *self.aggregate_names) if name not in live]

    def _take(self, column: _Column, number: int, row: Kept) -> None:
        if row.resolution not in self._resolutions:
            self._resolutions.append(row.resolution)
        column.resolutions[number] = self._resolutions.index(row.resolution)
        text = row.aggregates
        column.aggregates[number] = None if text is None else self._texts.setdefault(text, text)
        column.ready[number] = True

    @cached_property
    def _has_resolutions(self) -> bool:
        names = (*self.split_names, *self.aggregate_names)
        return self.resolution_from_upstream is True or (
            self.resolution_from_upstream is None and "crop_resolution" in names
        )

    def _resolver(  # noqa: C901
        self, variation: int
    ) -> Callable[[int, bytes, Sequence[Kept]], tuple[str | None, Kept | None]]:
        """Return what finds the wanted resolution of an item, and what there is of it."""
        self._method = None
        if self.sourceless:
            return lambda _, __, rows: (
                None,
                max(rows, key=lambda row: row.method or "", default=None),
            )
        if not self._has_resolutions:
            return lambda _, __, rows: (ANY, next((r for r in rows if r.resolution == ANY), None))
        if self.bucket_method_provider is not None:
            self._method = self.bucket_method_provider()
        from_aspect = getattr(self.aspect_bucketing, "variant_key_from_aspect", None)
        rebucket = self.rebucket_provider
        asks = self.resolution_from_upstream is True
        aspects = self._table.sizes() if (rebucket or from_aspect) and not asks else {}
        derived: dict[float, list[str]] = {}

        def choose(  # noqa: C901 - who knows it, the surest first
            number: int, content: bytes, rows: Sequence[Kept]
        ) -> tuple[str | None, Kept | None]:
            aspect = aspects.get(content)
            wanted: list[str] | None = None
            if not asks and from_aspect is not None and aspect is not None:
                found = from_aspect(variation, int(self._where[number]), aspect)
                wanted = None if found is None else [found]
            elif not asks:
                if self._method is not None:
                    for row in rows:
                        if row.method == self._method:
                            return row.resolution, row
                if rebucket is not None and aspect is not None:
                    if aspect not in derived:
                        derived[aspect] = list(rebucket(aspect))
                    wanted = derived[aspect]
            if not wanted and (rows or asks) and not (rows and self.trust_cache):
                with suppress(Exception):  # it is encoded, and fails there, where somebody hears it
                    index = int(self._where[number])
                    found = self._get_previous_item(variation, "crop_resolution", index)
                    wanted = [_text_of(found)]
            if not wanted:
                return None, rows[0] if rows and self.trust_cache else None
            for row in rows:
                if row.resolution in wanted:
                    return row.resolution, row
            return wanted[0], None

        return choose

    def _encode_all(  # noqa: C901, PLR0912, PLR0915
        self, variation: int, tasks: list[_Task], *, here: bool = False
    ) -> None:
        """Encode what is missing, by the threads of the pipeline; await what others encode."""
        if self.sourceless:
            message = f"{len(tasks)} items of {self.cache_dir} are missing or damaged"
            hint = "Without the sources they cannot be encoded: start once with them."
            raise ArtifactError(message, hint=hint)
        executor = _Here() if here else self._state.executor
        most: int = self.build_max_workers or getattr(executor, "_max_workers", None) or 4
        device = _current_device()
        failed: dict[int, BaseException] = {}
        column = self._columns[variation]
        waiting, done = iter(tasks), 0
        running: dict[Future[_Made | None], _Task] = {}
        busy: list[_Task] = []
        new: list[_Made] = []
        with self._progress("caching", len(tasks)) as job:
            try:
                while True:
                    for task in islice(waiting, most - len(running)):
                        future = executor.submit(self._make, variation, task, device)
                        running[future] = task
                    if not running:
                        if not busy:
                            break
                        self._stop_if_asked()
                        self._artifacts.wait_for(_lock_key(busy[0].content, variation), _GLANCE)
                        waiting, busy = iter(busy), []
                        continue
                    ended, _ = wait(running, return_when=FIRST_COMPLETED)
                    for future in ended:
                        task = running.pop(future)
                        try:
                            made = future.result()
                        except _EncodeError as error:
                            failed.update(dict.fromkeys(task.numbers, error.__cause__ or error))
                        else:
                            if made is None:
                                busy.append(task)
                                continue
                            for number in task.numbers:
                                self._take(column, number, made.row)
                            new.append(made)
                        job.advance()
                        done += 1
                        if done % _COLLECT_EVERY == 0:
                            getattr(self, "_torch_gc", int)()
                    if len(new) >= _NOTED_AT_ONCE:
                        self._note_made(variation, new)
                    self._stop_if_asked()
            finally:
                for future in running:
                    future.cancel()
                if running:
                    wait(running)  # what is being encoded is put
                self._note_made(variation, new)
        if failed:
            self._give_up(variation, failed)

    def _note_made(self, variation: int, new: list[_Made]) -> None:
        """Note what was made; a commit for each takes longer than to encode something small.

        What a killed process has not noted is found by its key: see `_make`.
        """
        if new:
            sizes = {made.row.content: made.size for made in new if made.size is not None}
            rows = [made.row for made in new]
            self._table.keep(self._artifacts.id, variation, rows, sizes)
            new.clear()

    def _stop_if_asked(self) -> None:
        if self.stop_check_fun is not None and self.stop_check_fun():
            raise CachingStoppedException(f"{self.cache_dir}: caching was stopped")

    def _make(self, variation: int, task: _Task, device: int | None) -> _Made | None:
        """Encode a content, or what is missing of it; None: another thread or process does so."""
        _use_device(device)
        artifacts, needed = self._artifacts, self._stored_names
        number = task.numbers[0]
        index = int(self._where[number])
        with artifacts.claim([_lock_key(task.content, variation)]) as claim:
            if not claim.keys:
                return None
            resolution = task.wanted
            values: dict[str, Any] = {}
            if resolution is None and self._method is not None:
                rows = self._table.kept(artifacts.id, variation, [task.content])
                known = (row for row in rows if row.method == self._method)
                resolution = next((row.resolution for row in known), None)
            if resolution is not None:
                values = artifacts.get(f"{task.content.hex()}-{resolution}-{variation}") or {}
            if not values:
                resolution, values = self._taken_over(variation, task, index) or (resolution, {})
            is_whole = all(name in values for name in needed)
            if not is_whole:
                if self._has_resolutions:
                    now = _text_of(self._upstream(variation, "crop_resolution", index))
                    if now != resolution:
                        key = f"{task.content.hex()}-{now}-{variation}"
                        resolution, values = now, artifacts.get(key) or {}
                is_whole = all(name in values for name in needed)
                if not is_whole:
                    values = self._encode(variation, number, values)
            resolution = (resolution if self._has_resolutions else ANY) or ANY
            small = {name: values[name] for name in self.aggregate_names if name in values}
            names = json.dumps(sorted(values))
            row = Kept(task.content, resolution, self._method, names, dumps(small))
            key = f"{task.content.hex()}-{resolution}-{variation}"
            size = self._size(variation, index, values) if self._has_resolutions else None
            if not is_whole or key not in artifacts:
                artifacts.put(key, values)
            return _Made(row, size)

    def _upstream(self, variation: int, name: str, index: int) -> Any:  # noqa: ANN401
        try:
            return self._get_previous_item(variation, name, index)
        except CachingStoppedException:
            raise
        except Exception as error:  # whatever a decoder or an encoder raises
            raise _EncodeError(str(error)) from error

    def _taken_over(
        self, variation: int, task: _Task, index: int
    ) -> tuple[str, dict[str, Any]] | None:
        """Return what a cache that was here before has of an item."""
        if not self._old:
            return None
        source, *watched = self._paths_of(index)
        found = self._old.find(source, watched, variation, task.wanted, self._stored_names)
        if found is None or found[0] != ANY or not self._has_resolutions:
            return found
        crop = found[1].get("crop_resolution")
        return None if crop is None else (_text_of(crop), found[1])

    def _size(
        self, variation: int, index: int, values: Mapping[str, Any]
    ) -> tuple[int, int] | None:
        """Return the resolution of an image, to find its bucket when the buckets are others."""
        size = values.get("original_resolution")
        if size is None and self._get_previous_length("original_resolution") is not None:
            size = self._upstream(variation, "original_resolution", index)
        size = values.get("crop_resolution") if size is None else size
        if size is None or len(size) < 2 or int(size[-1]) <= 0:  # noqa: PLR2004
            return None
        return int(size[-2]), int(size[-1])

    def _encode(self, variation: int, number: int, values: dict[str, Any]) -> dict[str, Any]:
        """Ask upstream for the names that are missing; for all, if what there is does not fit."""
        import torch

        index = int(self._where[number])
        self._before()
        with torch.no_grad():
            made = dict(values)
            for name in self._stored_names:
                if name not in made:
                    made[name] = _detached(self._upstream(variation, name, index))
            if values and not _fit(made):
                made = {
                    name: _detached(self._upstream(variation, name, index))
                    for name in self._stored_names
                }
        if self._uses_files and not self.tolerate_missing_source and not self.trust_cache:
            paths = self._paths_of(index)
            known = self._table.digests(paths) if paths[0] != NOWHERE else {}
            was = self._contents[32 * number : 32 * number + 32]
            heads = {name.partition(".")[0] for name in self.variations_group_in_names}
            text = self._settings({head: self._ask(0, head, index) for head in heads})
            if paths[0] != NOWHERE and _content_of_files(paths, known, text) != was:
                raise _EncodeError("it changed while it was encoded")
        return made

    def _paths_of(self, index: int) -> list[bytes]:
        name = self.source_path_in_name
        path = None if name is None else self._ask(0, name, index)
        source = NOWHERE if path is None else _absolute(path)
        return [source, *self._watched(index)]

    # what cannot be encoded

    def _give_up(self, variation: int, failed: Mapping[int, BaseException]) -> None:
        """Do with items that failed what `on_error` says, and say so."""
        told = {number: f"{self._name_of(number)}: {error}" for number, error in failed.items()}
        first = next(iter(failed.values()))
        shown = "\n  ".join(islice(told.values(), _SHOWN))
        if self._on_error == "raise":
            message = f"{len(failed)} items cannot be encoded:\n  {shown}"
            hint = "Repair or remove them. With on_error='skip' they are left out."
            raise EncoderError(message, hint=hint, items=tuple(told.values())) from first
        shared = self._shared
        shared.version += 1
        if self._on_error == "skip":
            shared.skipped.update(int(self._where[number]) for number in failed)
            _log.warning("%d items cannot be encoded and are left out:\n  %s", len(failed), shown)
            return
        column = self._columns[variation]
        for number, text in told.items():
            group = next(each for each in self._groups if number in each.numbers)
            behind = np.roll(group.numbers, -1 - int(np.searchsorted(group.numbers, number)))
            taken = [int(self._where[each]) for each in failed]
            bad = np.isin(self._where[behind], [*shared.replaced, *taken])
            good = behind[column.ready[behind] & ~bad]
            if not len(good):
                hint = "Repair or remove it: its group has no other item to take in its place."
                raise EncoderError(f"{text}", hint=hint) from failed[number]
            instead = int(good[0])
            shared.replaced[int(self._where[number])] = int(self._where[instead])
            _log.warning("%s\n  is replaced by %s", text, self._name_of(instead))

    def _name_of(self, number: int) -> str:
        index = int(self._where[number])
        if self.sourceless:
            return os.fsdecode(self._sources[number][1])
        name = self.source_path_in_name
        return f"item {index}" if name is None else str(self._ask(0, name, index))

    # reading

    def _item(self, number: int, variation: int, requested: str | None) -> dict[str, Any]:
        if self.sourceless and requested == "concept":
            return {"concept": self._contexts[self._sources[number][0]].get("concept")}
        if requested is None:
            names = self.get_outputs()
        else:
            is_small = requested in self.aggregate_names
            names = self.aggregate_names if is_small else self.split_names
        column = self._column(variation)
        text = column.aggregates[number] if column.ready[number] else None
        small = {} if text is None or names is self.split_names else loads(text)
        stored = self._stored_names
        if any(name in stored and name not in small for name in names):
            value = self._read(column, number, variation)
            if value is None:  # it failed just now
                instead = self._shared.replaced.get(int(self._where[number]))
                if instead is None:
                    hint = "It is left out from the next epoch on."
                    raise EncoderError(f"{self._name_of(number)} cannot be encoded", hint=hint)
                return self._item(self._number(instead), variation, requested)
            small = {**value, **small}
        item = {name: small[name] for name in names if name in small}
        for name in names:
            if name in (self.source_path_in_name, *self.extra_watched_paths_in_names):
                item[name] = self._live(number, name)
            elif name == "concept" and self.sourceless:
                item.update(self._item(number, variation, name))
        return item

    def _live(self, number: int, name: str) -> Any:  # noqa: ANN401
        """Return a path: equal files have one artifact, and it does not say where they lie."""
        if not self.sourceless:
            return self._ask(0, name, int(self._where[number]))
        is_source = name == self.source_path_in_name
        return os.fsdecode(self._sources[number][1]) if is_source else None

    def _read(self, column: _Column, number: int, variation: int) -> dict[str, Any] | None:
        """Return what is stored of an item, encoded now if need be; None: that failed."""
        content = bytes(column.contents[32 * number : 32 * number + 32])
        stored, device = self._stored_names, self.pipeline.device
        for _ in range(2):
            if column.ready[number]:
                resolution = self._resolutions[column.resolutions[number]]
                value = self._artifacts.get(f"{content.hex()}-{resolution}-{variation}")
                if value is not None and all(name in value for name in stored):
                    return {name: _moved(each, device) for name, each in value.items()}
                _log.warning("%s is damaged in the cache, and encoded again", self._name_of(number))
                column.ready[number] = False
                self._encode_all(variation, [_Task(content, [number], resolution)], here=True)
            else:
                self._ensure(variation, np.array([number]), here=True)
            if not column.ready[number]:
                return None
        message = f"{self._name_of(number)} cannot be read, though it was just encoded"
        raise ArtifactError(message, hint="Is the disk damaged?")

    # what nobody wants any more

    @staticmethod
    def gc_preview(cache_dir: str | Path, *, vanished: bool = False) -> dict[str, int]:
        """Return how many artifacts no source refers to any more, and their bytes.

        Sources of a folder that is gone or has none of them any more count as being there: perhaps
        a drive is not mounted. With `vanished` they do not.
        """
        return orphans.preview(Path(cache_dir), vanished=vanished)

    @staticmethod
    def gc_clean(cache_dir: str | Path, *, vanished: bool = False) -> dict[str, int]:
        """Delete what `gc_preview` counts; return how much that was."""
        return orphans.clean(Path(cache_dir), vanished=vanished)


class PositionalModule(CacheModule):
    """All of mgds's older DiskCache but the base classes of mgds.

    It was told nothing of what its values are made from, and finds out: by `image_path`, the masks
    beside it and `prompt`, if upstream has them. Without them, items are known by their position.
    """

    def __init__(  # noqa: PLR0913, PLR0917
        self,
        cache_dir: str | Path,
        split_names: list[str] | None = None,
        aggregate_names: list[str] | None = None,
        variations_in_name: str | None = None,
        balancing_in_name: str | None = None,
        balancing_strategy_in_name: str | None = None,
        variations_group_in_name: str | list[str] | None = None,
        group_enabled_in_name: str | None = None,
        before_cache_fun: Callable[[], None] | None = None,
        **options: Any,  # noqa: ANN401 - those of CacheModule
    ) -> None:
        """Take the settings, and any of `SmartDiskCache` as keyword arguments."""
        options = {"resolution_from_upstream": False, "shuffle_samples": False, **options}
        self._told = "source_path_in_name" in options or "content_key_in_name" in options
        super().__init__(
            cache_dir, split_names, aggregate_names, variations_in_name, balancing_in_name,
            balancing_strategy_in_name, variations_group_in_name, group_enabled_in_name,
            before_cache_fun, **options,
        )  # fmt: skip

    def _open(self) -> None:
        if self._set is None and not self._told:
            names = [*self.split_names, *self.aggregate_names]
            has = {
                name
                for name in ("image_path", "mask_path", "cond_path", "prompt")
                if self._get_previous_length(name) is not None
            }
            is_text = "prompt" in has and all(name.startswith(_OF_TEXTS) for name in names)
            is_image = all(name.startswith(_OF_IMAGES) for name in names)
            if "image_path" in has:
                self.source_path_in_name = "image_path"
            if "prompt" in has and not is_image:
                self.content_key_in_name = "prompt"
            self._uses_files = not is_text
            if not is_text and self._get_previous_length("settings") is not None:
                self._common = self._get_previous_item(0, "settings", 0)  # OneTrainer: resolution
            if "image_path" in has and not is_text:
                self.extra_watched_paths_in_names = sorted(has & {"mask_path", "cond_path"})
        super()._open()


def _content_of_files(paths: Sequence[bytes], known: Mapping[bytes, bytes], text: str) -> bytes:
    """Return what stands for a source, the files watched beside it, and how they are encoded."""
    source, *watched = paths
    digest = known.get(source) or content_of([], os.fsdecode(source))
    return content_of([digest, *map(known.get, watched)], *([text] if text else []))


def _value(told: object, name: str | None) -> Any:  # noqa: ANN401
    """Return what a dotted name stands for; None: nothing."""
    for part in (name or "").split("."):
        told = told.get(part) if isinstance(told, Mapping) else None
    return told


@contextmanager
def _collecting_nothing() -> Iterator[None]:
    """Make many small objects that all stay: looking for garbage meanwhile takes half as long."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class _Here:
    """An executor that is the calling thread."""

    def submit(self, call: Callable[..., Any], *given: Any) -> Future[Any]:  # noqa: ANN401
        """Call it, and return what came of it."""
        done: Future[Any] = Future()
        try:
            done.set_result(call(*given))
        except Exception as error:  # noqa: BLE001 - raised again by whoever asks
            done.set_exception(error)
        return done


def _absolute(path: str) -> bytes:
    """Return a path in full; `os.path.abspath` alone would take a tenth of a start."""
    is_plain = path[:1] == "/" and "//" not in path and "/." not in path
    return os.fsencode(path if is_plain else os.path.abspath(path))


def _lock_key(content: bytes, variation: int) -> str:
    return f"{content.hex()} {variation}"


def _text_of(resolution: Any) -> str:  # noqa: ANN401 - a tuple, a list or a tensor
    return "x".join(str(int(each)) for each in resolution)


def _fit(values: Mapping[str, Any]) -> bool:
    """Say whether the latents of an item have one height and width."""
    shapes = {
        tuple(value.shape[-2:])
        for name, value in values.items()
        if name.startswith(_LATENT) and len(getattr(value, "shape", ())) > 1
    }
    return len(shapes) < 2  # noqa: PLR2004


def _detached(value: Any) -> Any:  # noqa: ANN401
    return value.detach() if hasattr(value, "detach") else value


def _moved(value: Any, device: Any) -> Any:  # noqa: ANN401
    """Return a value with its tensors on a device."""
    if hasattr(value, "to") and hasattr(value, "device"):
        return value.to(device)
    if type(value) is dict:
        return {key: _moved(each, device) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_moved(each, device) for each in value)
    return value


def _current_device() -> int | None:
    import torch

    return torch.cuda.current_device() if torch.cuda.is_available() else None


def _use_device(device: int | None) -> None:
    """Let this thread use the device of the one that started it: torch has one per thread."""
    if device is not None:
        import torch

        torch.cuda.set_device(device)
