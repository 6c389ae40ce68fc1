"""{sha256: path} names what has these bytes now, and nothing else; a file of it is not believed."""

from __future__ import annotations

import hashlib
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smartcache import SmartCache
from smartcache.folders.programs import ModelFolder
from smartcache.folders.scan import look
from smartcache.hub.care.mapping import CacheMapping
from smartcache.store.layout import Pool
from smartcache.store.store import Store
from tests.store.files import OTHER, WEIGHTS, edit, write

HOSTILE = "../../etc/passwd"
Named = Callable[[object], Path]
PassTime = Callable[[float], None]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def put(store: Store, data: bytes, pool: Pool | None = None) -> Path:
    return store.put_stream([data], algorithms=["sha256"], pool=pool).path


def see(store: Store, folder: Path) -> None:
    """Let a folder be known, by a stat walk as downloads make it."""
    look(store, [ModelFolder(path=folder)], min_size=1)


@pytest.fixture
def known(store: Store, folder: Path, pass_time: PassTime) -> Path:
    """A file of a known folder that was hashed when it was old enough."""
    path = write(folder / "a.safetensors")
    pass_time(60)
    see(store, folder)
    store.digest_of(path, ["sha256"])
    return path


class TestBlobs:
    def test_are_there_by_their_sha256_in_either_case(self, store: Store) -> None:
        path = put(store, WEIGHTS)
        store.put_stream([OTHER])  # whose sha256 is not known
        mapping = CacheMapping(store)
        assert mapping[sha256(WEIGHTS)] == mapping[sha256(WEIGHTS).upper()] == path
        assert sha256(WEIGHTS).upper() in mapping
        assert dict(mapping) == {sha256(WEIGHTS): path}
        assert len(mapping) == 1
        for key in ("", "abc", "0" * 64, HOSTILE, "g" * 64, "0" * 65):
            with pytest.raises(KeyError) as caught:
                mapping[key]
            assert caught.value.args == (key,)
            assert mapping.get(key) is None

    def test_are_seen_as_they_come_and_go(self, store: Store) -> None:
        mapping = CacheMapping(store)
        assert list(mapping) == []
        digest = store.put_stream([WEIGHTS], algorithms=["sha256"]).digest
        assert list(mapping) == [sha256(WEIGHTS)]
        store.remove(digest)
        assert list(mapping) == []
        assert sha256(WEIGHTS) not in mapping

    def test_a_damaged_or_lost_one_is_not_there(self, store: Store) -> None:
        edit(put(store, WEIGHTS))
        assert len(CacheMapping(store)) == 0  # before it is asked for
        path = put(store, OTHER)
        mapping = CacheMapping(store)
        assert sha256(WEIGHTS) not in mapping
        assert list(mapping) == [sha256(OTHER)]
        path.unlink()
        assert dict(CacheMapping(store)) == {}

    def test_of_other_filesystems_too(self, store: Store, elsewhere: Path) -> None:
        here = put(store, WEIGHTS)
        there = put(store, OTHER, store.add_pool(elsewhere / "pool"))
        assert dict(CacheMapping(store)) == {sha256(WEIGHTS): here, sha256(OTHER): there}

    def test_a_sound_one_elsewhere_stands_in_for_a_damaged_one(
        self, store: Store, elsewhere: Path
    ) -> None:
        there = put(store, WEIGHTS, store.add_pool(elsewhere / "pool"))
        edit(put(store, WEIGHTS))
        assert dict(CacheMapping(store)) == {sha256(WEIGHTS): there}


class TestFiles:
    def test_are_there_once_hashed_and_a_blob_comes_first(self, store: Store, known: Path) -> None:
        mapping = CacheMapping(store)
        assert mapping[sha256(WEIGHTS)] == known
        assert dict(mapping) == {sha256(WEIGHTS): known}
        blob = put(store, WEIGHTS)
        assert dict(mapping) == {sha256(WEIGHTS): blob}
        edit(blob)  # for a damaged one the file stands in
        assert dict(mapping) == {sha256(WEIGHTS): known}
        assert mapping[sha256(WEIGHTS)] == known

    def test_not_while_their_hash_or_their_folder_is_not_known(
        self, store: Store, folder: Path, pass_time: PassTime
    ) -> None:
        """Nor if they were hashed while young."""
        path = write(folder / "a.safetensors")
        see(store, folder)
        store.digest_of(path, ["sha256"])
        assert dict(CacheMapping(store)) == {}
        pass_time(60)
        path = write(folder / "b.safetensors", OTHER)
        pass_time(60)
        see(store, folder)
        store.digest_of(path)  # another hash
        unknown = write(folder.with_name("unknown") / "c", b"c")
        pass_time(60)
        store.digest_of(unknown, ["sha256"])
        assert dict(CacheMapping(store)) == {}

    @pytest.mark.parametrize("how", ["edited", "touched", "removed", "replaced", "symlinked"])
    def test_not_when_they_have_changed_since(
        self, how: str, store: Store, known: Path, tmp_path: Path
    ) -> None:
        assert sha256(WEIGHTS) in CacheMapping(store)
        if how == "edited":
            edit(known, b"more", offset=len(WEIGHTS))
        elif how == "touched":
            os.utime(known)
        elif how == "removed":
            known.unlink()
        elif how == "replaced":
            os.replace(write(tmp_path / "new"), known)
        else:
            known.rename(tmp_path / "moved")
            known.symlink_to(tmp_path / "moved")
        mapping = CacheMapping(store)
        assert sha256(WEIGHTS) not in mapping
        assert list(mapping) == []
        assert len(mapping) == 0


def test_asking_for_one_key_reads_no_other_row(store: Store, known: Path) -> None:
    """What makes it fit for a million rows: both questions are answered by an index."""
    assert known.exists()
    index = store.catalog
    seen: list[str] = []
    index._connected().set_trace_callback(seen.append)  # noqa: SLF001
    assert "0" * 64 not in CacheMapping(store)
    index._connected().set_trace_callback(None)  # noqa: SLF001
    questions = [text for text in seen if text.startswith("SELECT")]
    assert questions
    for text in questions:
        plan = " ".join(row[3] for row in index.select(f"EXPLAIN QUERY PLAN {text}"))
        assert "SCAN" not in plan, plan


def test_going_through_it_sorts_nothing_but_ties(store: Store) -> None:
    """Rows come in the order of an index: a million need no more memory than a thousand."""
    seen: list[str] = []
    index = store.catalog

    def record(sql: str, *values: object) -> Iterator[tuple[object, ...]]:
        seen.append(sql)
        return iter(index.select(sql, *values))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "stream", record)
        assert len(CacheMapping(store)) == 0
    (sql,) = seen
    plan = [row[3] for row in index.select(f"EXPLAIN QUERY PLAN {sql}")]
    assert "INDEX hashes_sha256" in plan[0]
    assert "USE TEMP B-TREE FOR ORDER BY" not in plan


def test_the_facade_gives_it(tmp_path: Path) -> None:
    with SmartCache(tmp_path / "store") as cache:
        path = put(cache.store, WEIGHTS)
        assert dict(cache.cache_mapping()) == {sha256(WEIGHTS): path}
        assert isinstance(cache.cache_mapping(), Mapping)
        assert repr(cache.store) in repr(cache.cache_mapping())


@contextmanager
def world() -> Iterator[Path]:
    """A directory in which every file is a minute old: what is hashed there is remembered."""
    real = time.time_ns
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: real() + 60_000_000_000)
        yield Path(os.path.realpath(name))


CONTENTS = [random.Random(n).randbytes(100 + n) for n in range(4)]
Step = tuple[Literal["put", "put without", "write", "hash", "append", "remove", "forget"], int, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put without", "write", "hash", "append", "remove", "forget"]),
        st.integers(0, 3),
        st.integers(0, 3),
    ),
    max_size=12,
)


class Model:
    """A store, a folder, and what a mapping of them has to be, in plain dictionaries."""

    def __init__(self, store: Store, folder: Path) -> None:
        self.store = store
        self.folder = folder
        self.blobs: set[bytes] = set()
        self.known: set[bytes] = set()
        """Contents whose sha256 was computed: that is true for ever."""
        self.files: dict[Path, tuple[bytes, bool]] = {}
        folder.mkdir()

    def take(self, verb: str, n: int, m: int) -> None:
        data, path = CONTENTS[n], self.folder / f"{m}.gguf"
        digest = self.store.put_stream([data]).digest if verb.startswith("put") else ""
        if verb == "put":
            self.store.put_stream([data], algorithms=["sha256"])
            self.known.add(data)
        if digest:
            self.blobs.add(data)
        if verb == "forget" and data in self.blobs:
            found = self.store.put_stream([data]).digest
            self.store.remove(found)
            self.blobs.remove(data)
        if verb == "write" and path not in self.files:
            path.write_bytes(data)
            self.files[path] = data, False
            see(self.store, self.folder)
        if path not in self.files:
            return
        if verb == "hash":
            self.store.digest_of(path, ["sha256"])
            self.files[path] = self.files[path][0], True
            self.known.add(self.files[path][0])
        elif verb == "append":
            path.write_bytes(self.files[path][0] + b"!")
            self.files[path] = self.files[path][0] + b"!", False
            see(self.store, self.folder)
        elif verb == "remove":
            path.unlink()
            del self.files[path]

    def expected(self) -> dict[str, Path]:
        found = {
            sha256(data): path
            for path, (data, is_hashed) in sorted(self.files.items())[::-1]
            if is_hashed
        }
        for data in self.blobs & self.known:
            blob = self.store.find("sha256", sha256(data))
            assert blob is not None
            found[sha256(data)] = self.store.path_of(blob.digest)
        return found


@given(steps=STEPS)
def test_it_equals_a_plain_dictionary(steps: list[Step]) -> None:
    with world() as root, Store(root / "store") as store:
        model = Model(store, root / "models")
        mapping = CacheMapping(store)
        for step in steps:
            model.take(*step)
        expected = model.expected()
        assert dict(mapping) == expected
        assert list(mapping) == sorted(expected)
        assert len(mapping) == len(expected)
        for data in CONTENTS:
            key = sha256(data)
            assert mapping.get(key.upper()) == expected.get(key)
        for key, path in mapping.items():
            assert sha256(path.read_bytes()) == key
