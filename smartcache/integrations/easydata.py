"""The layered caches of EasyDeL's data pipeline, on artifacts: the same names, one other import.

    from smartcache.integrations.easydata import CacheMetadata, TreeCacheManager

    cache = TreeCacheManager("cache", memory_size=100, disk_expiry=86400, compression="zstd")
    ids = cache.get_or_compute("text_1", tokenize, metadata=CacheMetadata(tokenizer_hash="a"))

`DiskCache` and `TreeCacheManager` are one set of artifacts below their folder, without and with a
memory. So nothing is unpickled, damage is a miss, one of all threads and processes computes, and
what is given out belongs to the caller. `DatasetCache` keeps datasets as Arrow files:

    <cache_dir>/easydata/<id>/                 the set; see smartcache.artifacts
    <cache_dir>/datasets/
      <64 hex of the key>.json                 which folder holds the dataset, and its checksums
      <64 hex of the key>-<16 random hex>/     as `save_to_disk` has written it; never changed
      leases/                                  flock files: one writer per key

A folder is complete and on the disk before the JSON file that names it is renamed into place. What
no such file names is what a killed process has left, and whoever next holds the key removes it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Self, get_args
from weakref import WeakSet, WeakValueDictionary

from blake3 import blake3

from smartcache.artifacts import ArtifactSets, Kept, Memory, Sample, compute_key
from smartcache.errors import (
    ArtifactNotFoundError,
    BadKeyError,
    ConfigError,
    DamagedArtifactError,
    FileChangedError,
    LockTimeoutError,
    UnsupportedValueError,
    install_hint,
)
from smartcache.sizes import parse_size
from smartcache.system.faults import reached
from smartcache.system.hashing import hash_file
from smartcache.system.kernel import sync_directory
from smartcache.system.locks import KeyLocks
from smartcache.system.ownfiles import make_own, read_own

__all__ = [
    "CacheMetadata", "CacheStageConfig", "DatasetCache", "DatasetConfig", "DiskCache",
    "MemoryCache", "PipelineConfig", "TreeCacheManager",
]  # fmt: skip

_log = logging.getLogger(__name__)
Compression = Literal["none", "gzip", "lz4", "zstd", "blosc2", "auto"]
CacheType = Literal["memory", "disk", "hierarchical"]
HashFn = Literal["content", "path", "combined"]
_LONGEST_KEY = 1000
_HASHED = "blake3:"
"""Begins the keys in a set that stand for others, and no key that stands for itself."""
_DATASET = re.compile(r"([0-9a-f]{64})(?:\.json|-[0-9a-f]{16})")
_LARGEST = 1 << 30
_TRIES = 20
_verified: set[Path] = set()
"""Folders of datasets whose checksums this process has compared."""


_memory_caches: WeakSet[MemoryCache] = WeakSet()


@dataclass
class CacheMetadata:
    """What is said about a cached value, by which it is seen whether it is still valid."""

    version: str = "1.0"
    created_at: float = field(default_factory=time.time)
    source_hash: str = ""
    tokenizer_hash: str | None = None
    transform_hash: str | None = None
    num_examples: int = 0
    config_hash: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of it as plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return what `to_dict` gave; what is missing has its default, others are left out."""
        return cls(**{each.name: data[each.name] for each in fields(cls) if each.name in data})

    def is_valid_for(self, config_hash: str, source_hash: str | None = None) -> bool:
        """Say whether it is of this config, and of this source if one is given."""
        return self.config_hash == config_hash and source_hash in (None, self.source_hash)


Found = tuple[Any, CacheMetadata | None] | None
Validate = Callable[[CacheMetadata], object] | None


class MemoryCache:
    """The values used last, up to a number and, if given, a size; for any number of threads.

    What is put and what is given out are copies: nobody can change what is kept. Whatever can be
    copied can be put.
    """

    def __init__(
        self,
        max_size: int = 1000,
        *,
        max_bytes: float | str | None = None,
        expiry_seconds: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        _check_numbers(max_size, expiry_seconds)
        self.max_size = max_size
        self.expiry_seconds = expiry_seconds
        self._clock = clock
        self._memory = Memory(math.inf if max_bytes is None else max_bytes, max_count=max_size or 1)
        self._begin_again()
        _memory_caches.add(self)

    def _begin_again(self) -> None:
        """Let nobody compute: at first, and in the child of a fork, which has no other threads."""
        self._gate = threading.Lock()
        self._turns: WeakValueDictionary[str, threading.RLock] = WeakValueDictionary()
        """By key: held by the thread that computes it."""

    def get(self, key: str) -> Found:
        """Return the value and its metadata; None: there is none, or it is past its time."""
        kept = self._memory.find(key)
        if kept is not None and self._is_old(kept):
            self._memory.drop(key, stale=True)
            kept = None
        return None if kept is None else (kept.get(), kept.get_metadata())

    def put(self, key: str, value: object, metadata: CacheMetadata | None = None) -> None:
        """Keep a value in place of what the key had; UnsupportedValueError: it has no copies."""
        if not self.max_size:
            return
        lasts = math.inf if self.expiry_seconds is None else self.expiry_seconds
        try:
            kept = Kept(value, metadata, until=self._clock() + lasts)
        except Exception as error:  # whatever the copying of an object may raise
            hint = "Put what it is made from: plain values, arrays, tensors."
            raise UnsupportedValueError(f"{key!r} cannot be copied: {error}", hint=hint) from error
        self._memory.keep(key, kept)

    def contains(self, key: str) -> bool:
        """Say whether there is a value; that counts neither as a hit nor as a use."""
        kept = self._memory.peek(key)
        return kept is not None and not self._is_old(kept)

    def get_metadata(self, key: str) -> CacheMetadata | None:
        """Return what was put beside a value; that counts neither as a hit nor as a use."""
        kept = self._memory.peek(key)
        found = None if kept is None or self._is_old(kept) else kept.get_metadata()
        return found if isinstance(found, CacheMetadata) else None

    def invalidate(self, key: str | None = None) -> None:
        """Forget a value, or all."""
        if key is None:
            self._memory.drop_all()
        else:
            self._memory.drop(key)

    def sweep(self) -> int:
        """Give back the memory of what is past its time; return how many values that were."""
        return self._memory.drop_all(self._is_old)

    def get_or_compute(
        self,
        key: str,
        compute_fn: Callable[[], object],
        metadata: CacheMetadata | None = None,
        validate_fn: Validate = None,
    ) -> Any:  # noqa: ANN401 - whatever is computed
        """Return the value, computed by one thread if there is none: see `TreeCacheManager`."""
        if not self.max_size:
            return compute_fn()
        with self._gate:
            turn = self._turns.setdefault(key, threading.RLock())
        with turn:
            found = self.get(key)
            if found is not None and _is_valid(found[1], validate_fn):
                return found[0]
            value = compute_fn()
            self.put(key, value, metadata)
        _warn_if_refused(key, metadata, validate_fn)
        return value

    @property
    def stats(self) -> dict[str, Any]:
        """Hits, misses and their rate; how many values and bytes there are, and may be."""
        return _figures(self._memory, self.max_size)

    def close(self) -> None:
        """Forget everything."""
        self.invalidate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _is_old(self, kept: Kept) -> bool:
        return self._clock() >= kept.until


def _begin_in_child() -> None:
    for cache in list(_memory_caches):
        cache._begin_again()  # noqa: SLF001 - of this module


os.register_at_fork(after_in_child=_begin_in_child)


class DiskCache:
    """Values in a folder, for any number of threads and processes of one user.

    A value is what an artifact can be: plain values, containers, arrays and tensors. Another
    `compression` changes how values are written, not what can be read; of several caches that are
    open on one folder, the one that was opened last decides it, and `max_size` (bytes or "10GB").
    """

    def __init__(
        self,
        cache_dir: str | Path,
        compression: str = "none",
        expiry_seconds: float | None = None,
        *,
        max_size: float | str | None = None,
        memory: Memory | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open the folder, made if it is not there; MissingCompressionError names a package."""
        _check_numbers(0, expiry_seconds)
        self.cache_dir = Path(cache_dir)
        self.compression = compression
        self.expiry_seconds = expiry_seconds
        self.max_size = parse_size(max_size) if isinstance(max_size, str) else max_size
        self._clock = clock
        self._set = ArtifactSets(os.path.abspath(cache_dir), clock=clock).open(
            "easydata", {}, compression=compression, memory=memory,
            max_size=math.inf if self.max_size is None else self.max_size,
        )  # fmt: skip

    def get(self, key: str) -> Found:
        """Return the value and its metadata; None: there is none, or it is old or damaged."""
        found = self._set.get_with_metadata(_stored(key))
        if found is None or self._is_old(found[1]):
            return None
        return found[0], _metadata_in(found[1])

    def put(self, key: str, value: object, metadata: CacheMetadata | None = None) -> None:
        """Keep a value and its metadata in place of what the key had.

        UnsupportedValueError names the part of it that cannot be kept.
        """
        about = self._about(metadata)
        self._set.put(_stored(key), value, metadata=about, ttl=self.expiry_seconds)

    def contains(self, key: str) -> bool:
        """Say whether there is a value that is not past its time; it is not read."""
        return self._find(key) is not None

    def get_metadata(self, key: str) -> CacheMetadata | None:
        """Return what was put beside a value, which is not read."""
        about = self._find(key)
        return None if about is None else _metadata_in(about)

    def invalidate(self, key: str | None = None) -> None:
        """Delete a value, or all and the room they take. Other files in the folder stay."""
        if key is not None:
            self._set.delete(_stored(key))
            return
        self._set.sweep()
        self._set.delete_many(list(self._set))
        self._set.compact(force=True)

    def sweep(self) -> int:
        """Delete what is past its time: that of the put, or that of this cache; return how many."""
        gone = self._set.sweep().artifacts
        if self.expiry_seconds is None:
            return gone
        for key in self._set:
            with suppress(ArtifactNotFoundError, DamagedArtifactError):
                sample = self._set[key]
                if self._is_old(sample.metadata):
                    gone += self._set.discard(sample)
        return gone

    def get_or_compute(
        self,
        key: str,
        compute_fn: Callable[[], object],
        metadata: CacheMetadata | None = None,
        validate_fn: Validate = None,
    ) -> Any:  # noqa: ANN401 - whatever is computed
        """Return the value; if there is none, compute it, once for all threads and processes.

        `validate_fn` gets the metadata that was stored, every time; if it says no, or none was
        stored, the value is computed again. What was computed just now is returned in any case.
        """
        found = self.get(key)
        if found is not None and _is_valid(found[1], validate_fn):
            return found[0]
        about = self._about(metadata)
        is_computed = False

        def compute() -> object:
            nonlocal is_computed
            value = compute_fn()
            is_computed = True
            about["put_at"] = self._clock()  # however long it took
            return value

        def is_good(sample: Sample) -> bool:
            if is_computed:
                return True
            stored: Any = sample.metadata
            return not self._is_old(stored) and _is_valid(_metadata_in(stored), validate_fn)

        value = self._set.get_or_compute(
            _stored(key), compute, metadata=about, validate=is_good, ttl=self.expiry_seconds
        )
        if is_computed:
            _warn_if_refused(key, metadata, validate_fn)
        return value

    @property
    def stats(self) -> dict[str, Any]:
        """Where it is, how it is written, and how many values and bytes are there."""
        return {
            "cache_dir": str(self.cache_dir),
            "compression": self.compression,
            "entries": len(self._set),
            "bytes": self._set.describe().on_disk,
            "max_size": self.max_size,
        }

    def close(self) -> None:
        """Let go of the folder. Twice: no effect."""
        self._set.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _about(self, metadata: CacheMetadata | None) -> dict[str, Any]:
        """Return what is stored beside a value that is put now."""
        given = None if metadata is None else metadata.to_dict()
        return {"put_at": self._clock(), "metadata": given}

    def _find(self, key: str) -> Any:  # noqa: ANN401 - as it was stored
        """Return what is stored beside a value that is not past its time; None: there is none."""
        try:
            about = self._set.metadata(_stored(key))
        except (ArtifactNotFoundError, DamagedArtifactError):
            return None
        return None if self._is_old(about) else about

    def _is_old(self, about: Any) -> bool:  # noqa: ANN401 - as it was stored
        """Say whether a value is older than this cache allows; the set knows what its put said."""
        expiry = self.expiry_seconds
        return expiry is not None and bool(self._clock() >= about["put_at"] + expiry)


class TreeCacheManager(DiskCache):
    """A `DiskCache` with a memory above it; a value comes into it when it is first read.

    The memory is bounded by number (0: there is none) and bytes, and gives what the folder would
    give: what anybody replaces or deletes there, or what is past its time, is a miss at once.
    """

    def __init__(
        self,
        cache_dir: str | Path,
        memory_size: int = 100,
        disk_expiry: float | None = 86400,
        compression: str = "none",
        *,
        memory_bytes: float | str = "1GB",
        max_size: float | str | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        _check_numbers(memory_size, disk_expiry)
        self.memory_size = memory_size
        self._memory = Memory(memory_bytes, max_count=memory_size or 1)
        super().__init__(
            cache_dir, compression, disk_expiry, max_size=max_size, clock=clock,
            memory=self._memory if memory_size else None,
        )  # fmt: skip

    @staticmethod
    def compute_key(
        config: object,
        prefix: str = "",
        include_content_hash: bool = False,  # noqa: FBT001, FBT002 - as it is known
        content: object = None,
    ) -> str:
        """Return a key of the form `prefix_16hex`, or with content `prefix_16hex_8hex`.

        Every digit is made of both, config and content, by `smartcache.compute_key`: types count,
        arrays count by their bytes. `content`: a text, bytes, an array, or a path for its bytes.
        """
        if not include_content_hash:
            content = None
        elif isinstance(content, str):
            content = content.encode("utf-8", "surrogatepass")
        digest = compute_key(config, content=content)
        parts = (prefix, digest[:16], "" if content is None else digest[16:24])
        return "_".join(filter(None, parts))

    @property
    def stats(self) -> dict[str, Any]:
        """The figures of both layers: stats["memory"] and stats["disk"]."""
        return {"memory": _figures(self._memory, self.memory_size), "disk": super().stats}


class DatasetCache:
    """Datasets of the package `datasets`, as Arrow files that are mapped into memory when read.

    A put replaces a dataset in one step: whoever reads meanwhile, or is killed in the middle, has
    the old one or the new one. Sizes are checked with every get and checksums with the first one of
    a process, which `verify=False` leaves out. A damaged dataset is a miss, and is removed.
    """

    def __init__(
        self,
        cache_dir: str | Path,
        *,
        expiry_seconds: float | None = None,
        verify: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        _check_numbers(0, expiry_seconds)
        self.cache_dir = Path(cache_dir)
        self.expiry_seconds = expiry_seconds
        self.verify = verify
        self._clock = clock
        self._root = Path(os.path.abspath(cache_dir)) / "datasets"
        self._root.parent.mkdir(parents=True, exist_ok=True)
        make_own(self._root)
        self._key_locks = KeyLocks(self._root / "leases")

    def get(self, key: str) -> Any:  # noqa: ANN401 - a Dataset or DatasetDict
        """Return a dataset, mapped into memory; None: there is none, or it is old or damaged."""
        datasets = _datasets()
        name = _name_of(key)
        for _ in range(_TRIES):
            if (entry := self._current(name)) is None:
                return None
            # A put that has taken its place removes its files, which the hashing may see.
            with suppress(FileNotFoundError, FileChangedError, DamagedArtifactError):
                return self._load(datasets, entry)
            if self._current(name) == entry:
                break
        with suppress(LockTimeoutError), self._key_locks.hold(name, what="reading a dataset"):
            if (entry := self._current(name)) is None:  # nobody replaces it now
                return None
            try:
                return self._load(datasets, entry)
            except (FileNotFoundError, FileChangedError, DamagedArtifactError) as error:
                _log.warning("The dataset %r is damaged and counts as missing: %s", key, error)
                self._remove(name)
        return None

    def _load(self, datasets: Any, entry: Mapping[str, Any]) -> Any:  # noqa: ANN401
        folder = self._root / entry["folder"]
        _check_files(folder, entry, deep=self.verify and folder not in _verified)
        try:
            found = datasets.load_from_disk(os.fspath(folder))
        except Exception:
            _check_files(folder, entry, deep=True)
            raise
        if self.verify:
            _verified.add(folder)
        return found

    def put(self, key: str, dataset: Any, metadata: CacheMetadata | None = None) -> None:  # noqa: ANN401
        """Keep a dataset and its metadata in place of what the key had; it survives power loss.

        UnsupportedValueError for what is no `Dataset` or `DatasetDict`: a stream has no end.
        """
        datasets = _datasets()
        is_dict = isinstance(dataset, datasets.DatasetDict)
        parts = dict(dataset) if is_dict else {"": dataset}
        if not all(isinstance(part, datasets.Dataset) for part in parts.values()):
            hint = "Load it without streaming, or make one: Dataset.from_list(list(rows))."
            message = f"{key!r} is a {type(dataset).__qualname__}, not a Dataset or DatasetDict"
            raise UnsupportedValueError(message, hint=hint)
        about = None if metadata is None else metadata.to_dict()
        if about != json.loads(json.dumps(about, default=repr)):
            hint = "Put texts, numbers, lists and dicts with texts as keys into `extra`."
            raise UnsupportedValueError(f"The metadata of {key!r} is not JSON", hint=hint)
        name = _name_of(key)
        with self._key_locks.hold(name, what="putting a dataset"):
            self._clear(name)
            folder = self._root / f"{name}-{secrets.token_hex(8)}"
            try:
                make_own(folder)
                # An empty one would be saved as no file at all, which cannot be loaded.
                shards = {each: None if len(part) else 1 for each, part in parts.items()}
                dataset.save_to_disk(
                    os.fspath(folder), num_shards=shards if is_dict else shards[""]
                )
                reached("dataset: saved")
                files = _synced(folder)
                now, expiry = self._clock(), self.expiry_seconds
                entry = {
                    "format": 1, "key": key, "folder": folder.name, "put_at": now,
                    "expires_at": None if expiry is None else now + expiry,
                    "metadata": about, "files": files,
                }  # fmt: skip
                document = {"entry": entry, "blake3": _checksum(entry)}
                pointer = folder / "pointer.json"
                with open(pointer, "x", encoding="ascii") as file:
                    json.dump(document, file, indent=1)
                    file.flush()
                    os.fsync(file.fileno())
                reached("dataset: pointer written")
                pointer.replace(self._pointer(name))
                sync_directory(self._root)
                reached("dataset: replaced")
            finally:
                self._clear(name)

    def contains(self, key: str) -> bool:
        """Say whether there is a dataset that is not past its time; it is not read."""
        return self._current(_name_of(key)) is not None

    def get_metadata(self, key: str) -> CacheMetadata | None:
        """Return what was put beside a dataset, which is not read."""
        entry = self._current(_name_of(key))
        return None if entry is None else _metadata_in(entry)

    def invalidate(self, key: str | None = None) -> None:
        """Delete a dataset, or all. Who has one loaded keeps it; other files stay."""
        for name in self._names() if key is None else [_name_of(key)]:
            with self._key_locks.hold(name, what="removing a dataset"):
                self._remove(name)

    def sweep(self) -> int:
        """Delete what is past its time and what killed puts have left; return how many datasets.

        What somebody is putting at this moment is left alone.
        """
        count = 0
        for name in self._names():
            with suppress(LockTimeoutError), self._key_locks.hold(name, timeout=0):
                entry = self._read(name)
                if entry is not None and self._is_old(entry):
                    self._remove(name)
                    count += 1
                else:
                    self._clear(name)
        return count

    def _names(self) -> list[str]:
        found = map(_DATASET.fullmatch, os.listdir(self._root))
        return sorted({each[1] for each in found if each is not None})

    def _pointer(self, name: str) -> Path:
        return self._root / f"{name}.json"

    def _read(self, name: str) -> dict[str, Any] | None:
        """Return what is known of a dataset, past its time or not; None: nothing, or damaged."""
        path = self._pointer(name)
        try:
            document = json.loads(read_own(path, _LARGEST))
            entry: dict[str, Any] = document["entry"]
            if document["blake3"] == _checksum(entry):
                return entry
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, RecursionError):
            pass
        _log.warning("%s is damaged: its dataset counts as missing", path)
        return None

    def _current(self, name: str) -> dict[str, Any] | None:
        entry = self._read(name)
        return None if entry is None or self._is_old(entry) else entry

    def _is_old(self, entry: dict[str, Any]) -> bool:
        mine = math.inf if self.expiry_seconds is None else entry["put_at"] + self.expiry_seconds
        return bool(self._clock() >= min(entry["expires_at"] or math.inf, mine))

    def _remove(self, name: str) -> None:
        """Remove a dataset; with its key held."""
        self._pointer(name).unlink(missing_ok=True)
        self._clear(name)

    def _clear(self, name: str) -> None:
        """Remove what the pointer of a dataset does not name; with its key held."""
        entry = self._read(name)
        if entry is None:
            self._pointer(name).unlink(missing_ok=True)
        wanted = None if entry is None else entry["folder"]
        for each in os.listdir(self._root):
            found = _DATASET.fullmatch(each)
            if found is not None and found[1] == name and each not in (wanted, f"{name}.json"):
                shutil.rmtree(self._root / each, ignore_errors=True)


@dataclass
class CacheStageConfig:
    """Which cache a pipeline has."""

    enabled: bool = True
    cache_type: CacheType = "hierarchical"
    cache_dir: str | Path = ".cache/easydel_pipeline"
    memory_cache_size: int = 100
    disk_cache_expiry: float | None = 86400
    compression: Compression = "none"
    hash_fn: HashFn = "combined"
    memory_bytes: float | str = "1GB"
    max_size: float | str | None = None
    """Of the disk: bytes, or "10GB"; None: no limit."""

    def __post_init__(self) -> None:
        words = {"cache_type": CacheType, "compression": Compression, "hash_fn": HashFn}
        for name, known in words.items():
            if getattr(self, name) not in get_args(known):
                hint = f"Choose one of {', '.join(get_args(known))}."
                raise ConfigError(f"{name} cannot be {getattr(self, name)!r}", hint=hint)
        _check_numbers(self.memory_cache_size, self.disk_cache_expiry)

    def open(self) -> MemoryCache | DiskCache:
        """Open the cache: all kinds have the same methods. One that is disabled keeps nothing."""
        size, expiry = self.memory_cache_size, self.disk_cache_expiry
        if not self.enabled:
            return MemoryCache(0)
        if self.cache_type == "memory":
            return MemoryCache(size, max_bytes=self.memory_bytes, expiry_seconds=expiry)
        if self.cache_type == "disk":
            return DiskCache(self.cache_dir, self.compression, expiry, max_size=self.max_size)
        return TreeCacheManager(
            self.cache_dir, size, expiry, self.compression,
            memory_bytes=self.memory_bytes, max_size=self.max_size,
        )  # fmt: skip

    def key_for(self, source: str | Path, config: object = None) -> str:
        """Return the key of a config and a file, by what `hash_fn` says.

        content: by its bytes, wherever it lies; path: by where it lies, whatever is in it;
        combined: by both.
        """
        path = Path(os.path.abspath(source))
        where = None if self.hash_fn == "content" else path
        content = None if self.hash_fn == "path" else path
        return compute_key([config, where], content=content)


class DatasetConfig:
    """One dataset of a pipeline, as far as caching goes; other settings are kept as attributes."""

    def __init__(
        self,
        data_files: str | os.PathLike[str] | list[str | os.PathLike[str]],
        name: str | None = None,
        *,
        cache_path: str | Path | None = None,
        cache_enabled: bool = True,
        **others: object,
    ) -> None:
        if not data_files:
            raise ConfigError("data_files is required", hint='DatasetConfig("data/*.parquet")')
        self.data_files = data_files
        self.name = name
        self.cache_path = cache_path
        self.cache_enabled = cache_enabled
        vars(self).update(others)

    def __repr__(self) -> str:
        return f"DatasetConfig({', '.join(f'{k}={v!r}' for k, v in vars(self).items())})"


class PipelineConfig:
    """Datasets and the cache they share; other settings are kept as attributes.

    A dataset without a name is called by its position: dataset_0, dataset_1 ...
    """

    def __init__(
        self,
        datasets: list[DatasetConfig],
        *,
        cache: CacheStageConfig | None = None,
        **others: object,
    ) -> None:
        if not datasets:
            hint = "PipelineConfig(datasets=[DatasetConfig(...)])"
            raise ConfigError("At least one dataset is required", hint=hint)
        self.datasets = datasets
        self.cache = CacheStageConfig() if cache is None else cache
        vars(self).update(others)
        for number, each in enumerate(datasets):
            each.name = f"dataset_{number}" if each.name is None else each.name
        names = [str(each.name) for each in datasets]
        if len(set(names)) < len(names):
            hint = "Give each a name of its own: two would share a cache."
            raise ConfigError(f"Two datasets have one name: {', '.join(names)}", hint=hint)

    def get_dataset_by_name(self, name: str) -> DatasetConfig | None:
        """Return a dataset; None: there is no such name."""
        return next((each for each in self.datasets if each.name == name), None)

    def open_cache(self, name: str) -> MemoryCache | DiskCache:
        """Open the cache of one dataset.

        It lies at its `cache_path`, else in a folder of its own below that of the pipeline. It
        keeps nothing if the dataset or the pipeline has caching switched off.
        """
        chosen = self.get_dataset_by_name(name)
        if chosen is None:
            known = ", ".join(str(each.name) for each in self.datasets)
            raise ConfigError(f"There is no dataset {name!r}", hint=f"There are: {known}.")
        readable = re.sub(r"[^A-Za-z0-9_-]+", "-", name)[:40]
        own = Path(self.cache.cache_dir) / f"{readable}-{_name_of(name)[:16]}"
        enabled = self.cache.enabled and chosen.cache_enabled
        return replace(self.cache, cache_dir=chosen.cache_path or own, enabled=enabled).open()


def _check_numbers(count: int, expiry: float | None) -> None:
    if count < 0:
        hint = "It is how many values are kept at most; 0: none."
        raise ConfigError(f"The size of a memory cannot be {count}", hint=hint)
    if expiry is not None and not expiry > 0:
        hint = "It is in seconds; None: nothing expires."
        raise ConfigError(f"An expiry is a number above 0, not {expiry!r}", hint=hint)


def _key_bytes(key: object) -> bytes:
    if not isinstance(key, str):
        hint = "TreeCacheManager.compute_key(...) makes a key of anything."
        raise BadKeyError(f"a key is a text, not {key!r}", hint=hint)
    return key.encode("utf-8", "surrogatepass")


def _stored(key: str) -> str:
    """Return the key in a set: those that are too long for it, or empty, by their hash."""
    data = _key_bytes(key)
    if 0 < len(data) <= _LONGEST_KEY and not key.startswith(_HASHED):
        return key
    return _HASHED + blake3(data).hexdigest()


def _name_of(key: str) -> str:
    return blake3(_key_bytes(key)).hexdigest()


def _metadata_in(about: Mapping[str, Any]) -> CacheMetadata | None:
    found = about["metadata"]
    return None if found is None else CacheMetadata.from_dict(found)


def _is_valid(metadata: CacheMetadata | None, validate_fn: Validate) -> bool:
    """Say whether a stored value may be used: without metadata nobody can know."""
    return validate_fn is None or (metadata is not None and bool(validate_fn(metadata)))


def _warn_if_refused(key: str, metadata: CacheMetadata | None, validate_fn: Validate) -> None:
    """Tell who has just computed a value that it will be computed again and again."""
    if not _is_valid(metadata, validate_fn):
        why = "no metadata was given" if metadata is None else "it refuses the metadata given"
        _log.warning("%r will be computed each time: there is a validate_fn, and %s", key, why)


def _figures(memory: Memory, max_size: int) -> dict[str, Any]:
    hits, misses = memory.hits, memory.misses
    return {
        "hits": hits,
        "misses": misses,
        "hit_rate": hits / (hits + misses) if hits + misses else 0.0,
        "size": len(memory),
        "max_size": max_size,
        "bytes": memory.size,
        "max_bytes": None if memory.max_size == math.inf else int(memory.max_size),
    }


def _datasets() -> Any:  # noqa: ANN401 - a module without types
    """Return the package `datasets`, which takes a second to be loaded."""
    try:
        return import_module("datasets")
    except ImportError as error:
        hint = install_hint("datasets")
        raise ConfigError("DatasetCache needs the package datasets", hint=hint) from error


def _checksum(entry: object) -> str:
    return blake3(json.dumps(entry, sort_keys=True).encode("ascii")).hexdigest()


def _synced(folder: Path) -> dict[str, tuple[int, str]]:
    """Bring all files of a folder to the disk; return their sizes and checksums."""
    files = {}
    for here, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(here, name)
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
                hashes, _key = hash_file(descriptor, threads=2)
            finally:
                os.close(descriptor)
            files[os.path.relpath(path, folder)] = hashes.size, hashes.digest
        sync_directory(Path(here))
    return files


def _check_files(folder: Path, entry: Mapping[str, Any], *, deep: bool) -> None:
    """Raise unless the files of a dataset are those that were put; `deep`: byte by byte."""
    for name, (size, digest) in entry["files"].items():
        path = folder / name
        is_right = os.stat(path).st_size == size
        if not is_right or (deep and hash_file(path, threads=2)[0].digest != digest):
            raise DamagedArtifactError(f"{path} does not have the bytes that were put", path=path)
