"""One store object used by several threads, and by children of a fork.

What happens when all of them are busy at once is in `tests.processes.test_many_processes`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from smartcache.errors import StoreError
from smartcache.store.store import Store
from tests.processes.children import Child
from tests.store.files import OTHER, WEIGHTS, adopt, digest_of, inode_of, read, write

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
T = TypeVar("T")


def in_child(act: Callable[[], T]) -> T:
    """Return what a forked child gets from calling `act`."""
    with Child(act) as child:
        return child.result()


class TestFork:
    def test_a_child_uses_the_store_it_inherited(self, store: Store) -> None:
        digest = store.put_stream([WEIGHTS]).digest
        assert in_child(lambda: read(store, digest)) == WEIGHTS
        other = in_child(lambda: store.put_stream([OTHER]).digest)
        assert read(store, other) == OTHER
        assert store.put_stream([b"third"]).size == 5
        assert not store.verify(full=True).has_damage

    def test_a_child_of_a_closed_store_cannot_use_it(self, store: Store) -> None:
        def refused() -> bool:
            with pytest.raises(StoreError, match="closed"):
                store.put_stream([WEIGHTS])
            return True

        store.put_stream([WEIGHTS])
        store.close()
        assert in_child(refused)

    def test_a_child_does_not_end_a_batch_of_its_parent(self, store: Store, folder: Path) -> None:
        digest = store.put_stream([WEIGHTS]).digest

        def use() -> None:
            with Store(store.root) as other:
                other.recover()

        with store.batch("parent") as batch:
            store.place(digest, folder / "a", kind="copy", batch=batch)
            in_child(use)
            store.place(digest, folder / "b", kind="copy", batch=batch)
        (found,) = store.history()
        assert (found.label, found.changes) == ("parent", 2)


class TestThreads:
    def test_the_same_and_different_bytes_at_once(self, store: Store, folder: Path) -> None:
        contents = [bytes([n]) * 70_000 for n in range(5)]

        def work(number: int) -> None:
            for data in contents[number % 5 :] + contents[: number % 5]:
                digest = store.put_stream([data]).digest
                assert read(store, digest) == data
                path = folder / f"{number}-{digest[:8]}.bin"
                store.place(digest, path, kind="hardlink")
                assert path.read_bytes() == data

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        assert {blob.digest for blob in store.blobs()} == {digest_of(data) for data in contents}
        assert {blob.links for blob in store.blobs()} == {9}
        assert not store.verify(full=True).has_damage
        store.end_batch()
        assert os.listdir(store.root / "tmp") == []

    def test_a_store_used_by_threads_can_be_closed_by_any(self, tmp_path: Path) -> None:
        store = Store(tmp_path / "store")
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda n: store.put_stream([bytes([n])]), range(4)))
        store.close()
        with pytest.raises(StoreError, match="closed"):
            store.put_stream([b"x"])

    def test_threads_that_end_leave_no_descriptor(self, store: Store) -> None:
        if sys.platform != "linux":
            pytest.skip("needs /proc")
        digest = store.put_stream([WEIGHTS]).digest

        def look() -> int:
            for _ in range(10):
                thread = threading.Thread(target=read, args=(store, digest))
                thread.start()
                thread.join()
            return len(os.listdir("/proc/self/fd"))

        assert look() == look()

    def test_a_batch_may_be_filled_by_several_threads(self, store: Store, folder: Path) -> None:
        digest = store.put_stream([WEIGHTS]).digest
        with store.batch("both") as batch, ThreadPoolExecutor(4) as pool:
            work = partial(store.place, digest, kind="copy", batch=batch)
            list(pool.map(work, [folder / str(number) for number in range(8)]))
        (found,) = store.history()
        assert (found.label, found.changes) == ("both", 8)

    @pytest.mark.parametrize("replace", [False, True])
    def test_equal_files_become_one_blob(self, store: Store, folder: Path, replace: bool) -> None:
        paths = [write(folder / f"{n}.safetensors") for n in range(8)]
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda path: adopt(store, path, replace=replace)[0], paths))
        wanted = ["became", *["linked" if replace else "duplicate"] * 7]
        assert sorted(each.outcome for each in found) == wanted
        assert len({inode_of(path) for path in paths}) == (1 if replace else 8)
        assert len(list(store.blobs())) == 1
        assert not store.verify(full=True).has_damage
