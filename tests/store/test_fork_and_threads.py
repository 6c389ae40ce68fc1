"""One store object used by several threads, and by children of a fork.

What happens when all of them are busy at once is in `tests.processes.test_many_processes`.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from smartcache.errors import BlobNotFoundError, StoreError
from smartcache.store.store import Store
from tests.store.files import OTHER, WEIGHTS, digest_of, write

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
T = TypeVar("T")


def in_child(act: Callable[[], T]) -> T:
    """Return what a forked child gets from calling `act`; what it raises is raised here."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            try:
                answer = pickle.dumps((True, act()))
            except BaseException as error:  # noqa: BLE001 - the parent raises it
                traceback.print_exc()
                answer = pickle.dumps((False, error))
            with os.fdopen(writer, "wb") as file:
                file.write(answer)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        answer = file.read()
    os.waitpid(child, 0)
    is_result, value = pickle.loads(answer)  # noqa: S301 - our own child's bytes
    if not is_result:
        raise value
    result: T = value
    return result


def read(store: Store, digest: str) -> bytes:
    with store.open(digest) as file:
        return file.read()


class TestFork:
    def test_a_child_uses_the_store_it_inherited(self, store: Store) -> None:
        digest = store.put_stream([WEIGHTS]).digest
        assert in_child(lambda: read(store, digest)) == WEIGHTS
        other = in_child(lambda: store.put_stream([OTHER]).digest)
        assert read(store, other) == OTHER
        assert store.put_stream([b"third"]).size == 5
        assert not store.verify(full=True).has_damage

    def test_a_child_made_within_a_transaction_cannot_use_it_and_harms_nothing(
        self, store: Store
    ) -> None:
        with store.volume.index.write():
            store.volume.index.set_note("x", "parent")
            with pytest.raises(StoreError, match="forked"):
                in_child(lambda: store.volume.index.set_note("x", "child"))
        assert store.volume.index.note("x") == "parent"

    def test_a_child_may_close_what_it_inherited(self, store: Store) -> None:
        digest = store.put_stream([WEIGHTS]).digest
        in_child(store.close)
        assert read(store, digest) == WEIGHTS
        store.put_stream([OTHER])

    def test_a_child_of_a_closed_store_cannot_use_it(self, store: Store) -> None:
        store.close()
        with pytest.raises(StoreError, match="closed"):
            in_child(lambda: store.put_stream([WEIGHTS]))

    def test_errors_cross_from_child_to_parent(self, store: Store) -> None:
        with pytest.raises(BlobNotFoundError) as caught:
            in_child(lambda: store.open("0" * 64))
        assert vars(caught.value)["digest"] == "0" * 64

    def test_a_batch_of_the_parent_is_not_ended_by_a_child(
        self, store: Store, folder: Path
    ) -> None:
        digest = store.put_stream([WEIGHTS]).digest
        with store.batch("parent"):
            store.place(digest, folder / "a", kind="copy")
            in_child(lambda: Store(store.root).close())
            store.place(digest, folder / "b", kind="copy")
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
        assert list(store.volume.layout.tmp.iterdir()) == []

    def test_a_store_used_by_threads_can_be_closed_by_any(self, tmp_path: Path) -> None:
        store = Store(tmp_path / "store")
        threads = [
            threading.Thread(target=store.put_stream, args=([bytes([n])],)) for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
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

    def test_a_batch_belongs_to_its_thread(self, store: Store, folder: Path) -> None:
        digest = store.put_stream([WEIGHTS]).digest
        both = threading.Barrier(2)

        def work(name: str) -> None:
            with store.batch(name):
                both.wait(30)
                for number in range(3):
                    store.place(digest, folder / f"{name}{number}", kind="copy")
                both.wait(30)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(work, ("one", "two")))
        found = {batch.label: batch.changes for batch in store.history()}
        assert found == {"one": 3, "two": 3}

    def test_equal_files_adopted_by_several_threads_are_one_blob(
        self, store: Store, folder: Path
    ) -> None:
        paths = [write(folder / f"{n}.safetensors") for n in range(8)]
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda path: next(iter(store.adopt_many([path]))), paths))
        outcomes = sorted(adoption.outcome for adoption in found)
        assert outcomes == ["adopted"] + ["duplicate"] * 7
        assert len(list(store.blobs())) == 1
        assert not store.verify(full=True).has_damage

    def test_two_objects_of_one_store_see_each_other(self, store: Store, folder: Path) -> None:
        with Store(store.root) as other:
            digest = other.put_stream([WEIGHTS]).digest
            store.place(digest, folder / "a.bin", kind="hardlink")
            assert other.get(digest).links == 2
            other.plan_undo().execute()
            assert store.get(digest).links == 1
