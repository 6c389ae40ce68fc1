"""Many processes and threads use one store at once, while others prune and verify it.

Nobody damages anything here. So every answer must be right, what somebody holds must stay, and
nobody waits for who reads a large file.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("fork", allow_module_level=True)

from smartcache.config import Settings
from smartcache.errors import BlobNotFoundError, FileSkippedError, StoreError
from smartcache.store import Kind
from smartcache.store.store import Store
from smartcache.system import faults
from tests.folders.deduping import scanned
from tests.processes.children import FORKS, Child, at_once
from tests.store.files import WEIGHTS, Watch, adopt, dedup, digest_of, hidden, read, write

Rounds = Callable[[int], int]
IsOver = Callable[[], bool]

WORKERS = 6
SHARED = [random.Random(size).randbytes(size) for size in (1, 700, 70_000, 2_000_000)]
KINDS: tuple[Kind, ...] = ("auto", "hardlink", "copy")
MOST_FILES = 20
MOST_EXTRA = 50
"""So many times the least number of jobs are done at most, until others have done theirs."""


@dataclass
class Worker:
    """One user of the store: does this and that, and checks every answer."""

    store: Store
    folder: Path
    number: int
    chance: random.Random = field(init=False)
    kept: dict[str, bytes] = field(default_factory=dict)
    files: dict[Path, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.number)
        self.folder.mkdir()

    def work(self, least: int, is_enough: IsOver) -> None:
        """Do `least` jobs, and more until the others have done theirs, within reason."""
        jobs = (self.put, self.place, self.place, self.read, self.keep, self.adopt, self.dedup)
        for number in range(MOST_EXTRA * least):
            if number >= least and is_enough():
                break
            with suppress(BlobNotFoundError):  # nobody holds what all share: it may be pruned
                self.chance.choice(jobs)()
            self.check()

    def put(self) -> None:
        data = self.chance.choice(SHARED)
        assert self.store.put_stream([data]).digest == digest_of(data)

    def place(self) -> None:
        data, path = self.chance.choice(SHARED), self.new_path()
        try:
            self.store.place(digest_of(data), path, kind=self.chance.choice(KINDS))
        except BlobNotFoundError:
            assert not os.path.lexists(path), "a failed place leaves nothing behind"
            raise
        self.files[path] = data

    def read(self) -> None:
        data = self.chance.choice(SHARED)
        assert read(self.store, digest_of(data)) == data

    def keep(self) -> None:
        data = self.chance.randbytes(self.chance.randrange(1, 50_000))
        digest = self.store.put_stream([data]).digest
        with suppress(BlobNotFoundError):  # pruned before it was pinned
            self.store.pin(digest, f"worker {self.number}")
            self.kept[digest] = data

    def adopt(self) -> None:
        path, data = self.new_path(), self.chance.randbytes(self.chance.randrange(1, 50_000))
        blob = self.store.adopt(write(path, data))
        assert path.stat().st_ino == blob.inode
        self.files[path] = data

    def dedup(self) -> None:
        path, data = self.new_path(), self.chance.choice(SHARED)
        self.files[path] = data
        (result,) = dedup(self.store, write(path, data))
        assert result.error is None or isinstance(result.error, FileSkippedError)

    def check(self) -> None:
        """Look at one thing of each kind, and remove a file when there are many."""
        if self.kept:
            digest = self.chance.choice(list(self.kept))
            assert read(self.store, digest) == self.kept[digest], "a pinned blob"
        if self.files:
            path = self.chance.choice(list(self.files))
            assert path.read_bytes() == self.files[path]
            if len(self.files) > MOST_FILES:
                path.unlink()
                del self.files[path]

    def new_path(self) -> Path:
        return self.folder / f"{self.chance.getrandbits(64):x}.safetensors"


def prune(store: Store, is_over: IsOver, when_done: Callable[[], object]) -> int:
    pruned = 0
    while not is_over() or not pruned:
        pruned += store.plan_prune().execute().removed
        if pruned:
            when_done()
    return pruned


def verify(store: Store, is_over: IsOver) -> int:
    verified = 0
    while not is_over():
        report = store.verify(full=verified % 4 == 3)
        assert (report.damaged, report.stray) == ([], [])
        verified += 1
    return verified


def assert_sound(root: Path, workers: list[Worker]) -> None:
    with Store(root) as store:
        for worker in workers:
            assert {d: read(store, d) for d in worker.kept} == worker.kept
            assert {path: path.read_bytes() for path in worker.files} == worker.files
            assert hidden(worker.folder) == []
        report = store.verify(full=True)
        assert (report.damaged, report.stray, report.writable) == ([], [], [])
        assert store.unfinished() == []
        store.end_batch()
    assert os.listdir(root / "tmp") == os.listdir(root / "bad") == []


def test_processes_work_while_others_prune_and_verify(tmp_path: Path, rounds: Rounds) -> None:
    root, is_over, has_pruned = tmp_path / "store", tmp_path / "over", tmp_path / "pruned"

    def work(number: int) -> Worker:
        with Store(root) as store:
            worker = Worker(store, tmp_path / str(number), number)
            worker.work(rounds(25), has_pruned.exists)
            del worker.store
        return worker

    with Store(root) as store:
        store.put_stream([b"one that nobody holds"])
        with (
            Child(lambda: prune(Store(root), is_over.exists, has_pruned.touch)) as pruning,
            Child(lambda: verify(Store(root), is_over.exists)) as verifying,
        ):
            workers = at_once(*(partial(work, number) for number in range(WORKERS)))
            is_over.touch()
            assert pruning.result()
            assert verifying.result()
    assert_sound(root, workers)


def test_threads_work_while_others_prune_and_verify(store: Store, tmp_path: Path) -> None:
    workers = [Worker(store, tmp_path / str(number), number) for number in range(WORKERS)]
    is_over, has_pruned = threading.Event(), threading.Event()
    store.put_stream([b"one that nobody holds"])
    with ThreadPoolExecutor(WORKERS + 2) as pool:
        beside = [
            pool.submit(prune, store, is_over.is_set, has_pruned.set),
            pool.submit(verify, store, is_over.is_set),
        ]
        try:
            list(pool.map(lambda worker: worker.work(15, has_pruned.is_set), workers))
        finally:
            is_over.set()
        assert all(each.result() for each in beside)
    assert_sound(store.root, workers)


@pytest.mark.parametrize("how", ["dedup", *KINDS])
def test_a_blob_that_is_pruned_right_before_it_is_used_is_not_found(
    how: str, store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever comes next sees that it is gone: our own error, or the file becomes the blob."""
    digest = store.put_stream([WEIGHTS]).digest
    path = folder / "a.safetensors"
    real = store.changing

    def changing(label: str) -> object:
        with monkeypatch.context() as patch:
            patch.setattr(store, "changing", real)
            with Store(store.root) as other:
                other.plan_prune().execute()
        return real(label)

    if how == "dedup":
        monkeypatch.setattr(store, "changing", changing)
        (result,) = dedup(store, write(path))
        assert result.error is None
    else:
        store.plan_prune().execute()
        with pytest.raises(BlobNotFoundError):
            store.place(digest, path, kind=how)  # type: ignore[arg-type]
    assert path.exists() == (how == "dedup")
    assert hidden(folder) == []


def test_adopting_and_linking_do_not_disturb_each_other(tmp_path: Path, rounds: Rounds) -> None:
    """One process makes a file the blob while others make it a link of that blob."""
    paths = [tmp_path / f"{number}.safetensors" for number in range(6)]

    def link(*, replace: bool) -> None:
        with Store(tmp_path / "store") as store:
            for result in store.link_many(paths, label="link", replace=replace):
                assert result.error is None or isinstance(result.error, FileSkippedError)

    for number in range(rounds(5)):
        data = random.Random(number).randbytes(10_000)
        for path in paths:
            path.unlink(missing_ok=True)
            write(path, data)
        at_once(*(partial(link, replace=way) for way in (False, True, True)))
        assert [path for path in paths if path.read_bytes() != data] == []
        assert hidden(tmp_path) == []
        with Store(tmp_path / "store") as store:
            dedup(store, *paths)
            assert len({path.stat().st_ino for path in paths}) == 1
            assert read(store, digest_of(data)) == data


def test_processes_that_make_a_store_at_the_same_moment_find_it_whole(
    tmp_path: Path, rounds: Rounds
) -> None:
    for number in range(rounds(4)):
        root = tmp_path / str(number)

        def work(root: Path = root) -> None:
            with Store(root) as store:
                with suppress(BlobNotFoundError):  # another has pruned it
                    store.put_stream([WEIGHTS])
                store.plan_prune().execute()

        at_once(*[work] * 4)
        assert_sound(root, [])


# who waits for whom


@pytest.fixture
def slow_dedup(tmp_path: Path) -> Iterator[Path]:
    """Another process hashes a file for dedup, and is not done as long as the test runs."""
    write(tmp_path / "large.safetensors", random.Random(5).randbytes(3_000_000))
    with Store(tmp_path / "store") as store:
        store.put_stream([b"small"])
    is_hashing = FORKS.Event()

    def work() -> None:
        def stop_here() -> None:
            is_hashing.set()
            time.sleep(3600)

        with Store(tmp_path / "store") as store:
            dedup(store, tmp_path / "large.safetensors", progress=Watch(stop_here))

    with Child(work):
        is_hashing.wait()
        yield tmp_path


def test_nobody_waits_for_who_hashes_a_large_file(slow_dedup: Path) -> None:
    impatient = Settings(home=slow_dedup / "store", lock_timeout=0.0)
    with Store(settings=impatient) as store:
        store.place(digest_of(b"small"), slow_dedup / "placed", kind="hardlink")
        store.put_stream([WEIGHTS])
        assert adopt(store, write(slow_dedup / "b.safetensors", b"b" * 100))[0].outcome == "became"
        assert store.plan_prune().execute().removed == 1
        store.plan_undo().execute()


def test_who_reads_verifies_or_scans_takes_no_lock(store: Store, folder: Path) -> None:
    """Who only looks or plans neither: see `tests.store.test_layout`."""
    adopt(store, write(folder / "a.safetensors"))
    write(folder / "b.safetensors")
    digest = store.put_stream([b"pruned"]).digest
    with Store(store.root) as other, store.locked("test"):
        with pytest.raises(StoreError, match="would wait for itself"):
            other.pin(digest)
        assert read(other, digest) == b"pruned"
        assert other.verify().damaged == []
        assert scanned(other, folder).groups == 1


# forks


def use(store: Store, folder: Path, seed: int) -> str:
    """Put, open, place and pin in a process that was forked from one that uses the store."""
    folder.mkdir()
    data = random.Random(seed).randbytes(20_000)
    digest = store.put_stream([data]).digest
    assert read(store, digest) == data
    for kind in KINDS:
        store.place(digest, folder / kind, kind=kind)
    store.pin(digest, f"fork {seed}")
    return digest


POINTS = (
    "put: made", "put: written", "put: synced", "put: linked", "put: directory synced",
    "put: remembered", "journal: begun", "place: linked",
)  # fmt: skip


@pytest.mark.parametrize("point", POINTS)
def test_a_fork_while_another_thread_is_inside_put_or_place(point: str, tmp_path: Path) -> None:
    """The child has the locks and connections of a thread that it does not have."""
    is_there, is_forked = threading.Event(), threading.Event()

    def wait_there(reached: str) -> None:
        if reached == point and not is_there.is_set():
            is_there.set()
            is_forked.wait(0.3)  # whoever forks may have to wait for this thread first

    def in_child(store: Store) -> str:
        faults.hook = None
        return use(store, tmp_path / "child", 1)

    def fork_meanwhile() -> set[str]:
        with Store(tmp_path / "store") as store, ThreadPoolExecutor(1) as pool:
            faults.hook = wait_there
            using = pool.submit(use, store, tmp_path / "thread", 0)
            assert is_there.wait(60)
            with Child(lambda: in_child(store)) as child:
                is_forked.set()
                return {child.result(), using.result(), use(store, tmp_path / "parent", 2)}

    with Child(fork_meanwhile) as parent:
        found = parent.result()
    assert_sound(tmp_path / "store", [])
    with Store(tmp_path / "store") as store:
        assert {blob.digest for blob in store.blobs()} == found


def test_forks_at_any_time_while_threads_put(tmp_path: Path, rounds: Rounds) -> None:
    def put_all_the_time(store: Store, is_over: threading.Event) -> set[str]:
        chance, puts = random.Random(threading.get_ident()), set()
        while not is_over.is_set():
            puts.add(store.put_stream([chance.randbytes(5_000)]).digest)
        return puts

    def fork_often() -> set[str]:
        is_over, found = threading.Event(), set()
        with Store(tmp_path / "store") as store, ThreadPoolExecutor(2) as pool:
            putting = [pool.submit(put_all_the_time, store, is_over) for _ in range(2)]
            try:
                for number in range(rounds(15)):
                    with Child(partial(use, store, tmp_path / f"child {number}", number)) as child:
                        found.add(child.result())
            finally:
                is_over.set()
            return found.union(*(each.result() for each in putting))

    with Child(fork_often) as parent:
        found = parent.result()
    assert_sound(tmp_path / "store", [])
    with Store(tmp_path / "store") as store:
        assert {blob.digest for blob in store.blobs()} == found


def test_a_child_goes_on_after_its_parent_closed_the_store(tmp_path: Path) -> None:
    """The last connection to close removes SQLite's log: a child's rows must not go with it."""
    is_used, is_closed = FORKS.Event(), FORKS.Event()

    def work(store: Store) -> set[str]:
        first = use(store, tmp_path / "first", 1)
        is_used.set()
        is_closed.wait()
        return {first, use(store, tmp_path / "second", 2)}

    with Store(tmp_path / "store") as store:
        parents = store.put_stream([b"of the parent"]).digest
        child = Child(lambda: work(store))
        is_used.wait()
    is_closed.set()
    with child:
        digests = child.result()
    with Store(tmp_path / "store") as store:
        assert {blob.digest for blob in store.blobs()} == {parents, *digests}
        assert [batch.changes for batch in store.history()] == [1] * 2 * len(KINDS)
