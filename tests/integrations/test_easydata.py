"""The caches that EasyDeL's users know: every example of its guide, and none of its faults."""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import logging
import os
import pickle
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smartcache.errors import BadKeyError, ConfigError, UnsupportedValueError
from smartcache.integrations.easydata import (
    CacheMetadata,
    CacheStageConfig,
    DatasetCache,
    DatasetConfig,
    DiskCache,
    MemoryCache,
    PipelineConfig,
    TreeCacheManager,
)
from tests.artifacts.peer import Clock
from tests.processes.children import Child
from tests.processes.killing import Moment, die_at, in_child, was_killed

ROOT = Path(__file__).resolve().parents[2]
COMPRESSIONS = ("none", "gzip", "lz4", "zstd", "blosc2", "auto")
Layered = MemoryCache | DiskCache
Make = Callable[..., Layered]

HOUR = 3600.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cache(tmp_path: Path, clock: Clock) -> Iterator[TreeCacheManager]:
    with TreeCacheManager(tmp_path / "cache", clock=clock) as cache:
        yield cache


@pytest.fixture(params=["memory", "disk", "tree"])
def make(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[Make]:
    """Make a cache of each kind, given how long its values last."""
    with ExitStack() as stack:

        def made(expiry: float | None = None) -> Layered:
            if request.param == "memory":
                return MemoryCache(expiry_seconds=expiry, clock=clock)
            if request.param == "disk":
                return stack.enter_context(
                    DiskCache(tmp_path / "any", expiry_seconds=expiry, clock=clock)
                )
            return stack.enter_context(
                TreeCacheManager(tmp_path / "any", disk_expiry=expiry, clock=clock)
            )

        yield made


def run_python(code: str, *words: object) -> str:
    command = [sys.executable, "-W", "error", "-c", code, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


class Counted:
    """A computation that knows how often it was done."""

    def __init__(self, value: object) -> None:
        self.value = value
        self.calls = 0

    def __call__(self) -> object:
        self.calls += 1
        return self.value


def packs_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.pack"))


def flipped(path: Path, chance: random.Random) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


class TestTheGuide:
    """What its users have written by it."""

    def test_store_retrieve_check_and_invalidate(self, tmp_path: Path) -> None:
        cache = TreeCacheManager(
            cache_dir=str(tmp_path), memory_size=100, disk_expiry=86400, compression="zstd"
        )
        cache.put("my_key", {"input_ids": [1, 2, 3]})
        result = cache.get("my_key")
        assert result
        data, metadata = result
        assert data == {"input_ids": [1, 2, 3]}
        assert metadata is None
        assert cache.contains("my_key")
        cache.put("other", 1)
        cache.invalidate("my_key")
        assert not cache.contains("my_key")
        assert cache.contains("other")
        cache.invalidate()
        assert cache.get("other") is None

    def test_cache_on_compute(self, cache: TreeCacheManager) -> None:
        compute = Counted([5, 6])
        metadata = CacheMetadata(source_hash="abc123", tokenizer_hash="llama2")
        for _ in range(3):
            result = cache.get_or_compute(key="text_123", compute_fn=compute, metadata=metadata)
            assert result == [5, 6]
        assert compute.calls == 1
        assert cache.get("text_123") == ([5, 6], metadata)
        assert cache.get_metadata("text_123") == metadata

    def test_cache_keys(self) -> None:
        config = {"tokenizer": "meta-llama/Llama-2-7b", "max_length": 2048}
        key = TreeCacheManager.compute_key(config=config, prefix="tokenized")
        prefix, _, digits = key.partition("_")
        assert prefix == "tokenized"
        assert len(bytes.fromhex(digits)) == 8
        assert TreeCacheManager.compute_key(dict(reversed(config.items()))) == digits
        key = TreeCacheManager.compute_key(
            {"tokenizer": "llama"}, "example", include_content_hash=True, content="Hello world"
        )
        name, first, second = key.split("_")
        assert (name, len(first), len(second)) == ("example", 16, 8)

    def test_metadata(self) -> None:
        metadata = CacheMetadata(
            version="1.0", source_hash="abc123", tokenizer_hash="llama2_7b", transform_hash="v2",
            num_examples=100000, config_hash="xyz789", extra={"custom": "data"},
        )  # fmt: skip
        assert metadata.is_valid_for(config_hash="xyz789", source_hash="abc123")
        assert metadata.is_valid_for("xyz789")
        assert not metadata.is_valid_for("xyz")
        assert not metadata.is_valid_for("xyz789", "abc")
        assert CacheMetadata.from_dict(metadata.to_dict()) == metadata
        assert CacheMetadata.from_dict({"num_examples": 3, "from the future": 1}).num_examples == 3

    def test_memory_cache_with_statistics(self) -> None:
        cache = MemoryCache(max_size=2)
        for name in ("a", "b"):
            cache.put(name, {"data": name})
        assert cache.get("a") == ({"data": "a"}, None)
        cache.put("c", 3)  # b was used least recently
        assert [cache.contains(name) for name in "abc"] == [True, False, True]
        assert cache.get("b") is None
        stats = cache.stats
        assert (stats["hits"], stats["misses"], stats["hit_rate"]) == (1, 1, 0.5)
        assert (stats["size"], stats["max_size"]) == (2, 2)

    @pytest.mark.parametrize("compression", COMPRESSIONS)
    def test_disk_cache_with_compression(self, tmp_path: Path, compression: str) -> None:
        large = {"ids": list(range(5000)), "mask": np.ones(50_000, np.int64), "text": "abc " * 999}
        with DiskCache(tmp_path, compression=compression, expiry_seconds=86400) as cache:
            cache.put("key", large)
            assert cache.contains("key")
            found = cache.get("key")
            assert found is not None
            assert found[0].pop("mask").sum() == 50_000
            assert found[0] == {name: large[name] for name in ("ids", "text")}
            size = cache.stats["bytes"]
        assert size > 400_000 if compression == "none" else size < 100_000

    def test_dataset_cache(self, tmp_path: Path) -> None:
        datasets = pytest.importorskip("datasets")
        cache = DatasetCache(tmp_path)
        cache.put("my_dataset", datasets.Dataset.from_dict({"text": ["hello", "world"]}))
        assert cache.get("my_dataset")["text"][:] == ["hello", "world"]
        assert cache.contains("my_dataset")
        cache.invalidate("my_dataset")
        assert not cache.contains("my_dataset")
        assert cache.get("my_dataset") is None

    def test_pipeline_with_a_cache(self, tmp_path: Path) -> None:
        config = PipelineConfig(
            datasets=[DatasetConfig(data_files="data/*.parquet", split="train")],
            cache=CacheStageConfig(
                enabled=True, cache_type="hierarchical", cache_dir=str(tmp_path),
                memory_cache_size=100, disk_cache_expiry=86400, compression="lz4",
                hash_fn="combined",
            ),
            streaming=True,
        )  # fmt: skip
        with config.open_cache("dataset_0") as cache:
            assert isinstance(cache, TreeCacheManager)
            cache.put("a", 1)
        assert packs_in(tmp_path)

    def test_per_dataset_cache(self, tmp_path: Path) -> None:
        own = tmp_path / "cache" / "my_dataset"
        mine = DatasetConfig(data_files="a", cache_path=str(own), cache_enabled=True)
        stage = CacheStageConfig(cache_dir=tmp_path / "stage")
        with PipelineConfig(datasets=[mine], cache=stage).open_cache("dataset_0") as cache:
            cache.put("a", 1)
        assert packs_in(own)
        assert not (tmp_path / "stage").exists()

    def test_tokenization_pattern(self, cache: TreeCacheManager) -> None:
        calls = []

        def tokenize_with_cache(text: str, text_id: str) -> Any:  # noqa: ANN401
            key = f"tokenized_{text_id}"
            result = cache.get(key)
            if result:
                return result[0]
            calls.append(text)
            tokenized = {"input_ids": [ord(c) for c in text], "attention_mask": [1] * len(text)}
            about = CacheMetadata(tokenizer_hash="llama2_7b", num_examples=1)
            cache.put(key, dict(tokenized), metadata=about)
            return tokenized

        first = tokenize_with_cache("hi", "1")
        assert tokenize_with_cache("hi", "1") == first
        assert calls == ["hi"]

    def test_processed_dataset_pattern(self, tmp_path: Path) -> None:
        datasets = pytest.importorskip("datasets")
        cache = DatasetCache(tmp_path)
        calls = []

        def get_processed_dataset(name: str) -> Any:  # noqa: ANN401
            cached = cache.get(name)
            if cached:
                return cached
            calls.append(name)
            dataset = datasets.Dataset.from_dict({"n": [1, 2]})
            cache.put(name, dataset)
            return dataset

        assert [get_processed_dataset("x")["n"][:] for _ in range(2)] == [[1, 2], [1, 2]]
        assert calls == ["x"]

    def test_checkpoint_aware_pattern(self, tmp_path: Path) -> None:
        """A run that is resumed finds the batches of the one before."""
        for is_resumed in (False, True):
            with TreeCacheManager(tmp_path) as cache:
                for row in range(3):
                    result = cache.get(f"batch_shard0_{row}")
                    assert (result is not None) == is_resumed
                    if not result:
                        cache.put(f"batch_shard0_{row}", {"ids": np.arange(row)})

    def test_automatic_invalidation(self, cache: TreeCacheManager) -> None:
        computes = {"a": Counted("a"), "b": Counted("b")}

        def get_with_validation(key: str, expected: str) -> Any:  # noqa: ANN401
            return cache.get_or_compute(
                key=key,
                compute_fn=computes[expected],
                metadata=CacheMetadata(config_hash=expected),
                validate_fn=lambda meta: meta.config_hash == expected,
            )

        assert [get_with_validation("k", each) for each in "aabba"] == [*"aabba"]
        assert (computes["a"].calls, computes["b"].calls) == (2, 1)

    def test_manual_invalidation(self, cache: TreeCacheManager) -> None:
        for key in ("outdated_key", "key1", "key2", "kept"):
            cache.put(key, key)
        cache.invalidate("outdated_key")
        cache.invalidate("never there")
        for key in ["key1", "key2", "key3"]:
            if cache.contains(key):
                cache.invalidate(key)
        assert cache.stats["disk"]["entries"] == 1
        cache.invalidate()
        assert cache.stats["disk"]["entries"] == 0
        assert packs_in(cache.cache_dir) == []

    def test_expiry(self, tmp_path: Path, clock: Clock) -> None:
        with DiskCache(cache_dir=tmp_path, expiry_seconds=3600, clock=clock) as cache:
            cache.put("a", 1)
            clock.now += 3599
            assert cache.get("a") == (1, None)
            clock.now += 1
            assert cache.get("a") is None
            assert not cache.contains("a")

    def test_monitoring(self, cache: TreeCacheManager) -> None:
        cache.put("a", np.zeros(1000))
        for _ in range(4):
            cache.get("a")
        stats = cache.stats
        assert stats["memory"]["hit_rate"] == 0.75  # the first one reads it
        assert stats["memory"]["size"] == 1
        assert 8000 < stats["memory"]["bytes"] < 9000
        assert stats["disk"]["cache_dir"] == str(cache.cache_dir)
        assert stats["disk"]["compression"] == "none"
        assert stats["disk"]["entries"] == 1
        assert stats["disk"]["bytes"] > 8000

    def test_clean_up(self, make: Make, clock: Clock) -> None:
        """`sweep` in place of removing folders by their age."""
        cache = make(HOUR)
        cache.put("old", 1)
        clock.now += HOUR - 1
        cache.put("new", 2)
        clock.now += 2
        assert cache.sweep() == 1
        assert cache.sweep() == 0
        assert cache.get("new") == (2, None)

    def test_looking_for_the_reason_of_a_miss(self, cache: TreeCacheManager) -> None:
        key = TreeCacheManager.compute_key({"tokenizer": "llama", "version": "v2"})
        cache.put(key, 1, CacheMetadata(config_hash="c"))
        assert cache.contains(key)
        found = cache.get(key)
        assert found is not None
        assert found[1] is not None
        assert found[1].config_hash == "c"


class TestNothingIsUnpickled:
    def test_files_of_the_old_cache_and_crafted_packs_do_not_run(self, tmp_path: Path) -> None:
        trace = tmp_path / "trace"
        bomb = pickle.dumps(Bomb(str(trace)))
        folder = tmp_path / "cache"
        folder.mkdir()
        old = folder / f"{hashlib.sha256(b'key').hexdigest()[:32]}.data"
        old.write_bytes(bomb)
        with DiskCache(folder) as cache:
            assert cache.get("key") is None
            cache.put("key", 1)
        (pack,) = packs_in(folder)
        data = pack.read_bytes()
        for start in range(0, len(data), 64):
            pack.write_bytes(data[:start] + bomb + data[start + len(bomb) :])
            with DiskCache(folder) as cache:
                assert cache.get("key") in ((1, None), None)
        assert not trace.exists()
        assert old.read_bytes() == bomb


class Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return open, (self.path, "w")


class TestDamage:
    def test_a_bit_flip_anywhere_is_a_miss_and_never_data(self, tmp_path: Path) -> None:
        value = {"ids": np.arange(300), "text": "some text", "n": [1, 2.5, None]}
        about = CacheMetadata(config_hash="c", created_at=1.0, extra={"a": [1]})
        good = tmp_path / "good"
        with DiskCache(good) as cache:
            cache.put("key", value, about)
        chance = random.Random(7)
        misses = 0
        for number in range(30):
            folder = tmp_path / str(number)
            shutil.copytree(good, folder)
            flipped(packs_in(folder)[0], chance)
            with DiskCache(folder) as cache:
                found = cache.get("key")
                misses += found is None
                if found is not None:
                    assert found[0]["ids"].tolist() == value["ids"].tolist()  # type: ignore[attr-defined]
                    assert (found[0]["text"], found[0]["n"]) == (value["text"], value["n"])
                    assert found[1] == about
                assert cache.get_metadata("key") in (about, None)
        assert misses > 15

    def test_damage_is_computed_again(self, tmp_path: Path) -> None:
        with TreeCacheManager(tmp_path) as cache:
            cache.put("key", np.arange(1000))
        (pack,) = packs_in(tmp_path)
        data = bytearray(pack.read_bytes())
        data[len(data) // 2] ^= 1
        pack.write_bytes(data)
        with TreeCacheManager(tmp_path) as cache:
            assert cache.get_or_compute("key", lambda: "again") == "again"
            assert cache.get("key") == ("again", None)


class TestCompression:
    def test_every_setting_reads_what_any_other_has_written(self, tmp_path: Path) -> None:
        value = "a text that can be compressed " * 100
        for written in COMPRESSIONS:
            with DiskCache(tmp_path, written) as cache:
                cache.put(written, value)
        for read in COMPRESSIONS:
            with DiskCache(tmp_path, read) as cache:
                assert [cache.get(each) for each in COMPRESSIONS] == [(value, None)] * 6

    def test_a_missing_package_is_named_and_nothing_is_lost(self, tmp_path: Path) -> None:
        with DiskCache(tmp_path, "zstd") as cache:
            cache.put("key", "text " * 1000)
        run_python(WITHOUT_PACKAGES, tmp_path)
        with DiskCache(tmp_path) as cache:
            assert cache.get("key") == ("text " * 1000, None)

    def test_an_unknown_word_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="'zip'") as caught:
            DiskCache(tmp_path, "zip")
        assert "zstd" in caught.value.hint


WITHOUT_PACKAGES = """
import sys

for name in ("zstandard", "lz4", "lz4.block", "datasets"):
    sys.modules[name] = None
from smartcache.errors import ConfigError, MissingCompressionError
from smartcache.integrations.easydata import DatasetCache, DiskCache

folder = sys.argv[1]
for word, package in {"zstd": "zstandard", "lz4": "lz4"}.items():
    try:
        DiskCache(folder, word)
    except MissingCompressionError as error:
        assert error.name == package and package in str(error), error
        assert "smartcache-hub[compression]" in error.hint
    else:
        raise AssertionError(word)
with DiskCache(folder) as cache:
    try:
        cache.get("key")
    except MissingCompressionError as error:
        assert error.name == "zstandard"
    else:
        raise AssertionError
    assert cache.contains("key")
try:
    DatasetCache(folder).get("key")
except ConfigError as error:
    assert "pip install 'smartcache-hub[datasets]'" in error.hint
else:
    raise AssertionError
"""


class TestForeignFiles:
    def test_stay_whatever_is_invalidated(self, tmp_path: Path) -> None:
        pytest.importorskip("datasets")
        names = ["notes.txt", "datasets/theirs.json", "datasets/folder/a", "model/weights.bin"]
        for name in names:
            path = tmp_path / name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.write_text(name)
        with TreeCacheManager(tmp_path) as cache:
            cache.put("a", 1)
            cache.invalidate()
        datasets = DatasetCache(tmp_path)
        datasets.put("a", dataset_of(1))
        datasets.invalidate()
        datasets.sweep()
        assert [(tmp_path / name).read_text() for name in names] == names


class TestComputingOnce:
    @pytest.mark.parametrize("kind", ["memory", "disk", "hierarchical"])
    def test_sixteen_threads(self, tmp_path: Path, kind: Any) -> None:  # noqa: ANN401
        calls: list[int] = []
        barrier = threading.Barrier(16)

        def compute() -> list[int]:
            calls.append(1)
            time.sleep(0.05)
            return [1, 2]

        def ask(_: int) -> list[int]:
            barrier.wait()
            found: list[int] = opened.get_or_compute("key", compute)
            found.append(3)  # a private copy
            return found

        opened = CacheStageConfig(cache_type=kind, cache_dir=tmp_path).open()
        with opened, ThreadPoolExecutor(16) as pool:
            assert list(pool.map(ask, range(16))) == [[1, 2, 3]] * 16
        assert calls == [1]

    def test_four_processes(self, tmp_path: Path) -> None:
        """The one who computes does not end before all have come."""
        log = tmp_path / "log"

        def ask(number: int) -> object:
            (tmp_path / f"came {number}").touch()

            def compute() -> int:
                with log.open("a") as file:
                    file.write(f"{number}\n")
                while len(list(tmp_path.glob("came *"))) < 4:
                    time.sleep(0.005)
                time.sleep(0.1)
                return number

            with TreeCacheManager(tmp_path / "cache") as cache:
                return cache.get_or_compute("key", compute)

        with ExitStack() as stack:
            children = [
                stack.enter_context(Child(functools.partial(ask, each))) for each in range(4)
            ]
            results = [child.result() for child in children]
        (who,) = log.read_text().split()
        assert results == [int(who)] * 4

    def test_a_failure_reaches_the_caller_and_nothing_is_kept(self, make: Make) -> None:
        cache = make()
        with pytest.raises(ZeroDivisionError):
            cache.get_or_compute("key", lambda: 1 // 0)
        assert cache.get_or_compute("key", lambda: None) is None
        assert cache.get("key") == (None, None)

    def test_the_time_of_a_value_begins_after_its_computation(
        self, cache: TreeCacheManager, clock: Clock
    ) -> None:
        def compute() -> int:
            clock.now += 3 * 86400
            return 1

        cache.get_or_compute("key", compute)
        assert cache.get("key") == (1, None)


class TestSeveralProcesses:
    def test_no_read_is_torn_while_another_process_replaces_the_value(self, tmp_path: Path) -> None:
        is_over = tmp_path.with_name("over")

        def write() -> int:
            number = 0
            with DiskCache(tmp_path) as cache:
                while number <= 20 or not is_over.exists():
                    number += 1
                    about = CacheMetadata(num_examples=number)
                    cache.put("key", {"n": number, "x": np.full(100_000, number)}, about)
            return number

        def read(folder: Path) -> set[int]:
            seen: set[int] = set()
            with TreeCacheManager(folder) as cache:
                while len(seen) <= 5:
                    found = cache.get("key")
                    if found is not None:
                        number = found[0]["n"]
                        assert (found[0]["x"] == number).all()
                        assert found[1] is not None
                        assert found[1].num_examples == number
                        seen.add(number)
            is_over.touch()
            return seen

        with Child(write) as writer, Child(lambda: read(tmp_path)) as reader:
            assert len(reader.result()) > 5
            assert writer.result() > 20

    def test_what_another_process_replaces_or_deletes_leaves_the_memory_at_once(
        self, cache: TreeCacheManager, clock: Clock
    ) -> None:
        cache.put("a", 1)
        cache.put("b", 1)
        assert cache.get("a") == cache.get("b") == (1, None)

        def change() -> None:
            with DiskCache(cache.cache_dir, clock=clock) as other:
                other.put("a", 2)
                other.invalidate("b")

        with Child(change) as child:
            child.result()
        assert cache.get("a") == (2, None)
        assert cache.get("b") is None

    def test_goes_to_another_process_by_pickle(self, tmp_path: Path) -> None:
        with TreeCacheManager(tmp_path, 5, None, "zstd") as cache:
            cache.put("a", [1])
            with pickle.loads(pickle.dumps(cache)) as arrived:  # noqa: S301
                assert arrived.get("a") == ([1], None)
                assert arrived.stats["memory"]["max_size"] == 5


class TestMetadata:
    def test_a_put_without_metadata_removes_the_old(self, make: Make) -> None:
        cache = make()
        cache.put("key", 1, CacheMetadata(config_hash="old"))
        assert cache.get_metadata("key") is not None
        cache.put("key", 2)
        assert cache.get("key") == (2, None)
        assert cache.get_metadata("key") is None
        assert cache.get_metadata("no such key") is None

    def test_comes_back_as_it_was(self, make: Make) -> None:
        cache = make()
        about = CacheMetadata("2", 1.5, "s", "t", None, 3, "c", {"a": (1, None), "b": [2.5]})
        cache.put("key", 1, about)
        assert cache.get("key") == (1, about)

    @pytest.mark.parametrize("kind", ["memory", "disk", "hierarchical"])
    def test_validate_fn_is_never_ignored(
        self, tmp_path: Path, kind: Any, caplog: pytest.LogCaptureFixture  # noqa: ANN401
    ) -> None:  # fmt: skip
        cache = CacheStageConfig(cache_type=kind, cache_dir=tmp_path).open()
        asked: list[CacheMetadata] = []

        def is_valid(metadata: CacheMetadata) -> bool:
            asked.append(metadata)
            return True

        cache.put("key", "stale")  # nobody knows of what
        about = CacheMetadata(config_hash="c")
        assert cache.get_or_compute("key", lambda: "new", about, is_valid) == "new"
        for count in (1, 2):
            asked.clear()
            assert cache.get_or_compute("key", lambda: 1 // 0, about, is_valid) == "new"
            assert asked == [about], count
        assert not caplog.records
        cache.close()

    @pytest.mark.parametrize("about", [None, CacheMetadata(config_hash="mine")])
    def test_what_will_never_be_valid_is_returned_with_a_warning(
        self, make: Make, about: CacheMetadata | None, caplog: pytest.LogCaptureFixture
    ) -> None:
        cache = make()
        for number in range(2):
            made = cache.get_or_compute(
                "key", Counted(number), about, lambda meta: meta.config_hash == "other"
            )
            assert made == number
        assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
        assert "'key' will be computed each time" in caplog.text


class TestExpiry:
    def test_is_a_miss_in_memory_and_on_disk_at_once_to_the_fraction(
        self, make: Make, clock: Clock
    ) -> None:
        clock.now += 0.25
        cache = make(10.5)
        cache.put("key", 1)
        assert cache.get("key") == (1, None)  # and is in memory now
        clock.now += 10.25
        assert cache.contains("key")
        assert cache.get("key") == (1, None)
        clock.now += 0.25
        assert cache.get("key") is None
        assert not cache.contains("key")
        assert cache.get_metadata("key") is None
        assert cache.get_or_compute("key", lambda: 2) == 2

    def test_the_shorter_one_of_writer_and_reader_counts(
        self, tmp_path: Path, clock: Clock
    ) -> None:
        with DiskCache(tmp_path, clock=clock) as writer:
            writer.put("for ever", 1)
        with DiskCache(tmp_path, expiry_seconds=60, clock=clock) as writer:
            writer.put("minute", 1)
        clock.now += 30
        with DiskCache(tmp_path, expiry_seconds=20, clock=clock) as reader:
            assert reader.get("for ever") is None
            assert not reader.contains("minute")
        with DiskCache(tmp_path, clock=clock) as reader:
            assert reader.contains("for ever")  # reading has deleted nothing
            assert reader.get("minute") == (1, None)
            clock.now += 31
            assert reader.get("minute") is None
            assert reader.sweep() == 1
        with DiskCache(tmp_path, expiry_seconds=20, clock=clock) as reader:
            assert reader.sweep() == 1

    @pytest.mark.parametrize("seconds", [0, -1, float("nan")])
    def test_must_be_above_nothing(self, tmp_path: Path, seconds: float) -> None:
        for make in (DiskCache, DatasetCache):
            with pytest.raises(ConfigError, match="above 0"):
                make(tmp_path, expiry_seconds=seconds)
        with pytest.raises(ConfigError, match="above 0"):
            MemoryCache(expiry_seconds=seconds)


class TestBounds:
    def test_memory_is_bounded_by_bytes(self, tmp_path: Path) -> None:
        arrays = [np.full(100_000, number, np.uint8) for number in range(10)]
        alone = MemoryCache(max_bytes="350KB")
        with TreeCacheManager(tmp_path, memory_bytes=350_000) as tree:
            for number, each in enumerate(arrays):
                for cache in (alone, tree):
                    cache.put(str(number), each)
                    assert cache.get(str(number)) is not None
            for stats in (alone.stats, tree.stats["memory"]):
                assert (stats["size"], stats["max_bytes"]) == (3, 350_000)
                assert 300_000 < stats["bytes"] <= 350_000
            assert tree.stats["disk"]["entries"] == 10

    def test_memory_of_no_size_keeps_nothing(self, tmp_path: Path) -> None:
        with TreeCacheManager(tmp_path, memory_size=0) as cache:
            cache.put("a", 1)
            assert cache.get("a") == (1, None)
            assert cache.stats["memory"]["size"] == 0
        with pytest.raises(ConfigError, match="-1"):
            MemoryCache(-1)

    def test_the_disk_can_be_bounded(self, tmp_path: Path) -> None:
        chance = random.Random(1)
        with DiskCache(tmp_path, max_size="2MB") as cache:
            for number in range(60):
                cache.put(str(number), chance.randbytes(100_000))
            assert 10 <= cache.stats["entries"] <= 20
            assert cache.contains("59")
            assert sum(each.stat().st_size for each in packs_in(tmp_path)) < 4_000_000
        with DiskCache(tmp_path) as cache:
            for number in range(60):
                cache.put(str(number), chance.randbytes(100_000))
            assert cache.stats["entries"] == 60

    def test_equal_arrays_are_stored_once(self, tmp_path: Path) -> None:
        array = np.random.default_rng(0).random(50_000)
        with DiskCache(tmp_path) as cache:
            for number in range(32):
                cache.put(str(number), {"x": array.copy(), "number": number})
            assert cache.stats["entries"] == 32
            assert cache.stats["bytes"] < 1.2 * array.nbytes


class TestPrivateCopies:
    def test_a_change_after_put_or_get_reaches_nobody(self, make: Make) -> None:
        cache = make()
        value = {"list": [1, [2]], "array": np.zeros(3)}
        about = CacheMetadata(extra={"a": [1]})
        cache.put("key", value, about)
        value["list"].append(3)  # type: ignore[attr-defined]
        about.extra["a"].append(2)
        for _ in range(3):
            found = cache.get("key")
            assert found is not None
            data, metadata = found
            assert data["list"] == [1, [2]]
            assert data["array"].tolist() == [0, 0, 0]
            assert metadata is not None
            assert metadata.extra == {"a": [1]}
            data["list"][1].append(9)
            data["array"] += 1
            metadata.extra.clear()

    def test_memory_takes_any_object_that_can_be_copied(self, clock: Clock) -> None:
        cache = MemoryCache()
        cache.put("object", clock)
        clock.now += 1
        found = cache.get("object")
        assert found is not None
        assert found[0].now == clock.now - 1
        with pytest.raises(UnsupportedValueError, match="'lock' cannot be copied"):
            cache.put("lock", [threading.Lock()])
        itself: list[object] = []
        itself.append(itself)
        with pytest.raises(UnsupportedValueError, match="'itself'"):
            cache.put("itself", itself)

    def test_the_disk_names_what_it_cannot_keep(self, cache: TreeCacheManager) -> None:
        with pytest.raises(UnsupportedValueError) as caught:
            cache.put("key", {"a": [Bomb("x")]})
        assert caught.value.path == "a[0]"


class TestKeys:
    def test_unequal_configs_have_unequal_keys(self) -> None:
        big = np.zeros(100_000)
        other = big.copy()
        other[50_000] = 1
        configs: list[object] = [
            {"n": 1}, {"n": "1"}, {"n": 1.0}, {"n": True}, {1: 1}, {"1": 1},
            {"n": (1, 2)}, {"n": [1, 2]}, {"n": big}, {"n": other}, None, {},
        ]  # fmt: skip
        keys = [TreeCacheManager.compute_key(each) for each in configs]
        assert len(set(keys)) == len(configs)
        assert {len(key) for key in keys} == {16}

    def test_all_digits_depend_on_config_and_content(self) -> None:
        def digits(config: object, content: object) -> list[str]:
            return TreeCacheManager.compute_key(
                config, include_content_hash=True, content=content
            ).split("_")

        first = digits({"a": 1}, "text")
        assert [len(each) for each in first] == [16, 8]
        for config, content in (({"a": 2}, "text"), ({"a": 1}, "texts"), ({"a": 1}, "")):
            assert all(
                one != other for one, other in zip(first, digits(config, content), strict=True)
            )

    def test_content_may_be_text_bytes_an_array_or_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes("é".encode())
        contents: list[object] = ["é", "é".encode(), tmp_path / "file", np.arange(3), ""]
        keys = [
            TreeCacheManager.compute_key(1, "p", include_content_hash=True, content=each)
            for each in contents
        ]
        assert keys[0] == keys[1] == keys[2]
        assert len(set(keys)) == 3
        without = TreeCacheManager.compute_key(1, "p", include_content_hash=True)
        assert without == TreeCacheManager.compute_key(1, "p", content="left out")
        assert len(without) == 18

    def test_what_has_no_key_is_named(self) -> None:
        with pytest.raises(BadKeyError) as caught:
            TreeCacheManager.compute_key({"a": [object()]})
        assert caught.value.path == "a[0]"

    def test_any_text_is_a_key(self, make: Make) -> None:
        cache = make()
        long = "x" * 5000
        hashed = "blake3:" + hashlib.sha256(b"").hexdigest()
        keys = ["", long, long + "y", "a/../b", "\0", "\ud800", "ü" * 600, hashed, "." * 1000]
        for number, key in enumerate(keys):
            cache.put(key, number)
        assert [cache.get(key) for key in keys] == [(n, None) for n in range(len(keys))]
        for key in keys:
            cache.invalidate(key)
        assert not any(map(cache.contains, keys))

    def test_the_stand_in_of_a_long_key_is_no_key_of_its_own(self, tmp_path: Path) -> None:
        with DiskCache(tmp_path) as cache:
            cache.put("x" * 5000, "long")
            (stored,) = cache._set  # noqa: SLF001 - nobody else sees it
            assert cache.get(stored) is None

    def test_anything_else_is_refused(self, tmp_path: Path) -> None:
        with DiskCache(tmp_path) as cache, pytest.raises(BadKeyError, match="not 1"):
            cache.put(1, 1)  # type: ignore[arg-type]


def dataset_of(number: int, rows: int = 50) -> Any:  # noqa: ANN401
    """A dataset all of whose rows say which one it is."""
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"n": [number] * rows, "text": [f"text {number}"] * rows})


def number_in(dataset: Any) -> int | None:  # noqa: ANN401
    """Which one it is; that it is whole is asserted."""
    if dataset is None:
        return None
    (number,) = set(dataset["n"][:])
    assert set(dataset["text"][:]) == {f"text {number}"}
    assert isinstance(number, int)
    return number


def files_in(folder: Path) -> list[Path]:
    """All but the file of locks."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "keys")


class TestDatasets:
    @pytest.fixture
    def datasets(self, tmp_path: Path, clock: Clock) -> DatasetCache:
        pytest.importorskip("datasets")
        return DatasetCache(tmp_path, clock=clock)

    def test_are_mapped_and_replaced_with_their_metadata(
        self, datasets: DatasetCache, tmp_path: Path
    ) -> None:
        about = CacheMetadata(config_hash="c", extra={"a": [1, None]})
        datasets.put("key", dataset_of(1), about)
        first = datasets.get("key")
        assert first.cache_files
        assert datasets.get_metadata("key") == about
        datasets.put("key", dataset_of(2))
        assert number_in(first) == 1  # who has it keeps it
        assert number_in(datasets.get("key")) == 2
        assert datasets.get_metadata("key") is None
        pointer, folder = sorted(
            (path for path in (tmp_path / "datasets").iterdir() if path.name != "leases"),
            key=lambda path: path.is_dir(),
        )
        assert json.loads(pointer.read_text())["entry"]["key"] == "key"
        assert folder.stat().st_mode & 0o777 == 0o700
        assert (tmp_path / "datasets").stat().st_mode & 0o777 == 0o700
        assert os.listdir(tmp_path / "datasets/leases") == ["keys"]

    def test_a_dict_of_them(self, datasets: DatasetCache) -> None:
        package: Any = importlib.import_module("datasets")

        datasets.put(
            "key", package.DatasetDict({"train": dataset_of(1), "test": dataset_of(2, rows=0)})
        )
        found = datasets.get("key")
        assert isinstance(found, package.DatasetDict)
        assert number_in(found["train"]) == 1
        assert found["test"].num_rows == 0

    def test_streams_and_others_are_refused(self, datasets: DatasetCache) -> None:
        package: Any = importlib.import_module("datasets")

        stream = dataset_of(1).to_iterable_dataset()
        for value in (
            stream,
            package.IterableDatasetDict(a=stream),
            package.DatasetDict(a=stream),
            [1],
            None,
        ):
            with pytest.raises(UnsupportedValueError, match="'key' is a") as caught:
                datasets.put("key", value)
            assert "streaming" in caught.value.hint
        assert not datasets.contains("key")

    @pytest.mark.parametrize("extra", [{"a": (1,)}, {"a": {1: 2}}, {"a": float("nan")}, {"a": b""}])
    def test_metadata_that_would_come_back_changed_is_refused(
        self, datasets: DatasetCache, extra: dict[str, Any]
    ) -> None:
        with pytest.raises(UnsupportedValueError, match="not JSON"):
            datasets.put("key", dataset_of(1), CacheMetadata(extra=extra))

    def test_every_key_has_one_of_its_own(self, datasets: DatasetCache) -> None:
        keys = ["", "a", "a/../b", "x" * 5000, "\ud800"]
        for number, key in enumerate(keys):
            datasets.put(key, dataset_of(number))
        assert [number_in(datasets.get(key)) for key in keys] == [0, 1, 2, 3, 4]
        datasets.invalidate("a")
        assert [datasets.contains(key) for key in keys] == [True, False, True, True, True]
        datasets.invalidate()
        assert not any(map(datasets.contains, keys))

    def test_expire_and_are_swept(
        self, datasets: DatasetCache, tmp_path: Path, clock: Clock
    ) -> None:
        datasets.put("for ever", dataset_of(1))
        hourly = DatasetCache(tmp_path, expiry_seconds=HOUR, clock=clock)
        hourly.put("hour", dataset_of(2))
        clock.now += HOUR - 0.5
        assert number_in(hourly.get("for ever")) == 1
        clock.now += 0.5
        assert hourly.get("for ever") is None
        assert not datasets.contains("hour")
        assert datasets.get("hour") is None
        assert datasets.get_metadata("hour") is None
        assert (datasets.sweep(), hourly.sweep(), hourly.sweep()) == (1, 1, 0)
        assert files_in(tmp_path) == []

    def test_damage_anywhere_is_a_miss_that_is_told_and_cleared(
        self, datasets: DatasetCache, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        about = CacheMetadata(config_hash="config", created_at=1.0)
        chance = random.Random(3)
        for number in range(4):  # three files and the pointer
            datasets.put("key", dataset_of(number), about)
            path = files_in(tmp_path)[number]
            flipped(path, chance)
            caplog.clear()
            assert datasets.get("key") is None, path
            assert datasets.get_metadata("key") is None
            assert "damaged" in caplog.text
            datasets.sweep()
            assert files_in(tmp_path) == []

    @pytest.mark.parametrize("verify", [True, False])
    def test_what_is_cut_off_or_missing_is_a_miss(self, tmp_path: Path, verify: bool) -> None:
        datasets = DatasetCache(tmp_path, verify=verify)
        for damage in (lambda path: os.truncate(path, 100), Path.unlink):
            datasets.put("key", dataset_of(1))
            assert number_in(datasets.get("key")) == 1
            damage(next(tmp_path.rglob("*.arrow")))
            assert datasets.get("key") is None
            assert files_in(tmp_path) == []

    def test_what_the_package_cannot_load_is_an_error_and_stays(
        self, datasets: DatasetCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A newer `datasets` may have written it; the bytes are those that were put."""
        import datasets as package

        def refuse(_: str) -> None:
            raise TypeError("unknown feature")

        datasets.put("key", dataset_of(1))
        with monkeypatch.context() as patch:
            patch.setattr(package, "load_from_disk", refuse)
            with pytest.raises(TypeError, match="unknown feature"):
                datasets.get("key")
        assert number_in(datasets.get("key")) == 1

    def test_files_that_map_has_written_beside_it_do_no_harm(self, datasets: DatasetCache) -> None:
        datasets.put("key", dataset_of(1))
        mapped = datasets.get("key").map(lambda row: {"n": row["n"] + 1})
        assert set(mapped["n"][:]) == {2}
        assert number_in(datasets.get("key")) == 1

    def test_readers_see_whole_datasets_while_they_are_replaced(self, tmp_path: Path) -> None:
        DatasetCache(tmp_path).put("key", dataset_of(0))

        def write() -> None:
            for number in range(1, 31):
                DatasetCache(tmp_path).put("key", dataset_of(number))

        with Child(write) as writer, Child(write) as another:
            seen: list[int | None] = []
            while len(seen) < 30 or seen[-1] != 30:
                seen.append(number_in(DatasetCache(tmp_path).get("key")))
                assert seen[-1] is not None
            assert len(set(seen)) > 2
            writer.result()
            another.result()
        assert len(list((tmp_path / "datasets").glob("*-*"))) == 1

    @pytest.mark.parametrize(
        ("point", "left"),
        [("dataset: saved", 1), ("dataset: pointer written", 1), ("dataset: replaced", 2)],
    )
    def test_a_put_that_is_killed_leaves_the_old_or_the_new_and_is_cleared_up(
        self, tmp_path: Path, point: str, left: int
    ) -> None:
        datasets = DatasetCache(tmp_path)
        datasets.put("key", dataset_of(1))

        def put() -> None:
            die_at(Moment(point, 1))
            datasets.put("key", dataset_of(2))

        assert was_killed(in_child(put))
        folders = tmp_path / "datasets"
        assert len(list(folders.glob("*-*"))) == 2
        assert number_in(DatasetCache(tmp_path).get("key")) == left
        datasets.put("key", dataset_of(3))
        assert len(list(folders.glob("*-*"))) == 1
        assert number_in(datasets.get("key")) == 3

    def test_a_put_that_fails_leaves_the_old(
        self, datasets: DatasetCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        datasets.put("key", dataset_of(1))
        before = files_in(tmp_path)
        new = dataset_of(2)
        monkeypatch.setattr(os, "fsync", full_disk)
        with pytest.raises(OSError, match="No space"):
            datasets.put("key", new)
        assert files_in(tmp_path) == before
        assert number_in(datasets.get("key")) == 1


def full_disk(_: int) -> None:
    raise OSError(28, "No space left on device")


class TestConfigs:
    def test_the_kind_of_cache(self, tmp_path: Path) -> None:
        kinds = {"memory": MemoryCache, "disk": DiskCache, "hierarchical": TreeCacheManager}
        for word, kind in kinds.items():
            with CacheStageConfig(cache_type=word, cache_dir=tmp_path).open() as cache:  # type: ignore[arg-type]
                assert type(cache) is kind
        assert CacheStageConfig() == CacheStageConfig(
            True, "hierarchical", ".cache/easydel_pipeline", 100, 86400, "none", "combined"
        )

    def test_all_kinds_have_the_same_methods(self) -> None:
        def methods(kind: type) -> set[str]:
            return {name for name in dir(kind) if not name.startswith("_")}

        assert methods(MemoryCache) == methods(DiskCache)
        assert methods(TreeCacheManager) == methods(DiskCache) | {"compute_key"}

    def test_a_disabled_cache_keeps_nothing(self, tmp_path: Path) -> None:
        compute = Counted(2)
        with CacheStageConfig(enabled=False, cache_dir=tmp_path / "none").open() as cache:
            cache.put("key", threading.Lock())
            for _ in range(2):
                assert cache.get_or_compute("key", compute) == 2
            assert cache.get("key") is None
            assert not cache.contains("key")
            cache.invalidate()
            assert cache.stats["size"] == cache.sweep() == 0
        assert compute.calls == 2
        assert not (tmp_path / "none").exists()

    @pytest.mark.parametrize(
        "wrong",
        [
            {"cache_type": "tree"},
            {"compression": "zip"},
            {"hash_fn": "md5"},
            {"memory_cache_size": -1},
            {"disk_cache_expiry": 0},
        ],
    )
    def test_bad_words_are_refused_at_once(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ConfigError) as caught:
            CacheStageConfig(**wrong)
        assert caught.value.hint

    def test_hash_fn_says_what_of_a_source_counts(self, tmp_path: Path) -> None:
        first, second = tmp_path / "first", tmp_path / "second"
        first.write_text("same")
        second.write_text("same")

        def keys(hash_fn: Any) -> list[str]:  # noqa: ANN401
            stage = CacheStageConfig(hash_fn=hash_fn)
            return [
                stage.key_for(first),
                stage.key_for(str(second)),
                stage.key_for(first, {"a": 1}),
            ]

        before = {word: keys(word) for word in ("content", "path", "combined")}
        assert before["content"][0] == before["content"][1]
        for word in ("path", "combined"):
            assert len(set(before[word])) == 3
        assert len({each for some in before.values() for each in some}) == 8
        first.write_text("edited")
        changed = {word: keys(word)[0] != before[word][0] for word in before}
        assert changed == {"content": True, "path": False, "combined": True}

    def test_each_dataset_has_a_cache_of_its_own(self, tmp_path: Path) -> None:
        names = ["org/data", "org-data", "..", "easydata", "ü" * 200]
        stage = CacheStageConfig(cache_dir=tmp_path / "stage", cache_type="disk")
        config = PipelineConfig([DatasetConfig("a", name) for name in names], cache=stage)
        with ExitStack() as stack:
            caches = [config.open_cache(name) for name in names]
            for cache in caches:
                stack.callback(cache.close)
            for name, cache in zip(names, caches, strict=True):
                cache.put("key", name)
            assert [cache.get("key") for cache in caches] == [(name, None) for name in names]
        assert os.listdir(tmp_path) == ["stage"]
        assert len(os.listdir(tmp_path / "stage")) == 5

    def test_either_switch_turns_caching_off(self, tmp_path: Path) -> None:
        on, off = DatasetConfig("a"), DatasetConfig("b", cache_enabled=False)
        stage = CacheStageConfig(cache_dir=tmp_path / "stage")
        for config, name in (
            (PipelineConfig([on, off], cache=stage), "dataset_1"),
            (PipelineConfig([on], cache=CacheStageConfig(enabled=False)), "dataset_0"),
        ):
            with config.open_cache(name) as cache:
                cache.put("key", 1)
                assert not cache.contains("key")
        assert not (tmp_path / "stage").exists()

    def test_names_and_other_settings_are_kept(self) -> None:
        first, second = DatasetConfig("a", tokenizer="llama"), DatasetConfig(["b"], name="mine")
        config = PipelineConfig([first, second], seed=3)
        assert [each.name for each in config.datasets] == ["dataset_0", "mine"]
        assert config.get_dataset_by_name("mine") is second
        assert config.get_dataset_by_name("other") is None
        assert vars(first)["tokenizer"] == "llama"
        assert vars(config)["seed"] == 3
        assert config.cache == CacheStageConfig()
        assert "tokenizer='llama'" in repr(first)

    def test_what_cannot_be_is_refused(self) -> None:
        with pytest.raises(ValueError, match="At least one dataset"):
            PipelineConfig([])
        with pytest.raises(ValueError, match="data_files"):
            DatasetConfig("")
        with pytest.raises(ConfigError, match="one name"):
            PipelineConfig([DatasetConfig("a", "x"), DatasetConfig("b", "x")])
        with pytest.raises(ConfigError, match="no dataset 'y'") as caught:
            PipelineConfig([DatasetConfig("a", "x")]).open_cache("y")
        assert caught.value.hint == "There are: x."


def test_is_loaded_by_who_asks_for_it_and_loads_no_more_than_it_needs() -> None:
    code = """
import sys, smartcache, smartcache.integrations
assert not {"numpy", "torch", "datasets", "smartcache.integrations.easydata"} & {*sys.modules}
import smartcache.integrations.easydata
assert not {"torch", "datasets", "pyarrow"} & {*sys.modules}
"""
    run_python(code)


class TestMeanwhile:
    def test_sweep_leaves_what_was_put_after_it_has_looked(
        self, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with (
            DiskCache(tmp_path, clock=clock) as lasting,
            DiskCache(tmp_path, expiry_seconds=10, clock=clock) as brief,
        ):
            lasting.put("key", 1)
            clock.now += 20
            is_old = brief._is_old  # noqa: SLF001

            def is_old_and_replaced(about: object) -> bool:
                found = is_old(about)
                lasting.put("key", 2)
                return found

            monkeypatch.setattr(brief, "_is_old", is_old_and_replaced)
            assert brief.sweep() == 0
            monkeypatch.undo()
            assert brief.get("key") == (2, None)

    def test_a_fork_waits_for_no_thread_that_is_beginning_to_compute(self) -> None:
        cache = MemoryCache()
        with cache._gate:  # noqa: SLF001 - as another thread may hold it at a fork
            assert Child(lambda: cache.get_or_compute("key", lambda: 7)).result() == 7


def test_what_lies_in_sets_or_is_a_key_or_a_record_is_copied_too() -> None:
    class Mutable:
        value = 0

    cache = MemoryCache()
    one = Mutable()
    cache.put("values", [{one}, {(one, 1): 2}, np.zeros(1, [("a", "i4")])[0]])
    first, _ = cache.get("values") or ([], None)
    (inside,), ((key, _),), record = first
    inside.value = key.value = record["a"] = one.value = 7
    second, _ = cache.get("values") or ([], None)
    (inside,), ((key, _),), record = second
    assert (inside.value, key.value, record["a"]) == (0, 0, 0)
