"""Many processes and threads use one store at once, while others prune and verify it.

Nobody damages anything here. So every answer must be right, and what somebody holds must stay.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import cast

import pytest
from blake3 import blake3

if sys.platform == "win32":
    pytest.skip("fork", allow_module_level=True)

from smartcache.errors import BlobNotFoundError, FileSkippedError
from smartcache.store import Kind
from smartcache.store import blobs as proof
from smartcache.store.changes import place as links
from smartcache.store.changes import replace
from smartcache.store.records import Blob
from smartcache.store.store import Store
from smartcache.store.volume import Volume
from smartcache.system import faults
from tests.processes.children import Child

Rounds = Callable[[int], int]
IsOver = Callable[[], bool]

WORKERS = 8
SHARED = [random.Random(size).randbytes(size) for size in (1, 700, 70_000, 300_000, 2_000_000)]
DIGESTS = [blake3(data).hexdigest() for data in SHARED]
KINDS: tuple[Kind, ...] = ("auto", "hardlink", "copy")
MOST_LINKS = 20
MOST_EXTRA = 50
"""So many times the least number of jobs are done at most, until others have done theirs."""

_log = logging.getLogger(__name__)


@dataclass
class Worker:
    """One user of the store: does this and that, and checks every answer."""

    store: Store
    folder: Path
    number: int
    chance: random.Random = field(init=False)
    counts: Counter[str] = field(default_factory=Counter)
    kept: dict[str, bytes] = field(default_factory=dict)
    placed: dict[Path, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.number)
        self.folder.mkdir()

    def work(self, least: int, is_enough: IsOver = lambda: True) -> None:
        """Do `least` jobs, and more until the others have done theirs, within reason."""
        jobs = (self.put, self.place, self.place, self.read, self.keep, self.adopt, self.replace)
        for number in range(MOST_EXTRA * least):
            if number >= least and is_enough():
                break
            job = self.chance.choice(jobs)
            try:
                job()
                self.counts[job.__name__] += 1
            except BlobNotFoundError:
                # Nobody holds what all share: it may be pruned at any time.
                self.counts[f"{job.__name__}: gone"] += 1
            self.check()

    def put(self) -> None:
        which = self.chance.randrange(len(SHARED))
        assert self.store.put_stream([SHARED[which]]).digest == DIGESTS[which]

    def place(self) -> None:
        which = self.chance.randrange(len(SHARED))
        path = self.new_path()
        try:
            self.store.place(
                DIGESTS[which],
                path,
                kind=self.chance.choice(KINDS),
                whole=self.chance.random() < 0.5,
            )
        except BlobNotFoundError:
            assert not os.path.lexists(path), "a failed place leaves nothing behind"
            raise
        self.placed[path] = SHARED[which]

    def read(self) -> None:
        which = self.chance.randrange(len(SHARED))
        with self.store.open(DIGESTS[which]) as blob:
            assert blob.read() == SHARED[which]

    def keep(self) -> None:
        data = self.chance.randbytes(self.chance.randrange(1, 50_000))
        digest = self.store.put_stream([data]).digest
        self.store.pin(digest, f"worker {self.number}")
        self.kept[digest] = data

    def adopt(self) -> None:
        path = self.new_path()
        data = self.chance.randbytes(self.chance.randrange(1, 50_000))
        path.write_bytes(data)
        blob = self.store.adopt(path)
        assert path.stat().st_ino == os.stat(self.store.path_of(blob.digest)).st_ino
        self.placed[path] = data

    def replace(self) -> None:
        which = self.chance.randrange(len(SHARED))
        path = self.new_path()
        path.write_bytes(SHARED[which])
        self.placed[path] = SHARED[which]
        try:
            self.store.replace(path, DIGESTS[which])
        except FileSkippedError:
            self.counts["replace: skipped"] += 1

    def check(self) -> None:
        """Look at one thing of each kind, and remove a file when there are many."""
        if self.kept:
            digest = self.chance.choice(list(self.kept))
            with self.store.open(digest) as blob:
                assert blob.read() == self.kept[digest], "a pinned blob"
        if self.placed:
            path = self.chance.choice(list(self.placed))
            assert path.read_bytes() == self.placed[path], f"{path} was placed, adopted or replaced"
            if len(self.placed) > MOST_LINKS:
                path.unlink()
                del self.placed[path]

    def new_path(self) -> Path:
        return self.folder / f"{self.chance.getrandbits(64):x}.safetensors"


def prune(
    store: Store, is_over: IsOver, when_done: Callable[[], object] = lambda: None
) -> Counter[str]:
    counts: Counter[str] = Counter()
    while not is_over():
        counts["pruned"] += store.plan_prune().execute().removed
        counts["prunes"] += 1
        if counts["pruned"]:
            when_done()
        time.sleep(0.02)
    return counts


def verify(store: Store, is_over: IsOver) -> Counter[str]:
    counts: Counter[str] = Counter()
    while not is_over():
        report = store.verify(full=counts["verified"] % 4 == 3)
        assert (report.damaged, report.missing, report.stray) == ([], [], [])
        counts["verified"] += 1
    return counts


def work_in_process(root: Path, folder: Path, number: int, least: int, is_enough: IsOver) -> Worker:
    with Store(root) as store:
        worker = Worker(store, folder, number)
        worker.work(least, is_enough)
        del worker.store
    return worker


def check_everything(root: Path, workers: list[Worker]) -> None:
    with Store(root) as store:
        for worker in workers:
            for digest, data in worker.kept.items():
                with store.open(digest) as blob:
                    assert blob.read() == data, "a pinned blob"
            for path, data in worker.placed.items():
                assert path.read_bytes() == data
        report = store.verify(full=True)
    assert not report.has_damage
    assert (report.unindexed, report.stray, report.writable) == ([], [], [])
    assert os.listdir(root / "tmp") == []
    assert os.listdir(root / "bad") == []


def test_processes_put_and_place_while_others_prune_and_verify(
    tmp_path: Path, rounds: Rounds
) -> None:
    root = tmp_path / "store"
    Store(root).close()
    is_over, has_pruned = tmp_path / "over", tmp_path / "pruned"

    def in_own_store(job: Callable[[Store], Counter[str]]) -> Counter[str]:
        with Store(root) as store:
            return job(store)

    def start(number: int) -> Child[Worker]:
        place = tmp_path / str(number)
        return Child(lambda: work_in_process(root, place, number, rounds(40), has_pruned.exists))

    with ExitStack() as stack:
        pruner = stack.enter_context(
            Child(lambda: in_own_store(lambda s: prune(s, is_over.exists, has_pruned.touch)))
        )
        verifier = stack.enter_context(
            Child(lambda: in_own_store(lambda store: verify(store, is_over.exists)))
        )
        children = [stack.enter_context(start(number)) for number in range(WORKERS)]
        workers = [child.result() for child in children]
        is_over.touch()
        counts = pruner.result() + verifier.result()
    _log.info("%s", dict(sum((worker.counts for worker in workers), counts)))
    check_everything(root, workers)
    assert counts["pruned"] > 0
    assert any(worker.kept for worker in workers)


def test_threads_put_and_place_while_others_prune_and_verify(
    tmp_path: Path, rounds: Rounds
) -> None:
    root = tmp_path / "store"
    failures: list[Exception] = []

    def guarded(job: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            try:
                job()
            except Exception as error:  # noqa: BLE001 - raised in the main thread
                failures.append(error)

        return run

    with Store(root) as store:
        workers = [Worker(store, tmp_path / str(number), number) for number in range(WORKERS)]
        working = [
            threading.Thread(target=guarded(partial(worker.work, rounds(20)))) for worker in workers
        ]

        def is_over() -> bool:
            return not any(thread.is_alive() for thread in working)

        beside = [
            threading.Thread(target=guarded(lambda: prune(store, is_over))),
            threading.Thread(target=guarded(lambda: verify(store, is_over))),
        ]
        for thread in (*working, *beside):
            thread.start()
        for thread in (*working, *beside):
            thread.join()
    if failures:
        raise ExceptionGroup("in threads", failures) from failures[0]
    _log.info("%s", dict(sum((worker.counts for worker in workers), Counter())))
    check_everything(root, workers)


CHECKS = [(replace, "replace"), *((links, kind) for kind in KINDS)]


@pytest.mark.parametrize(
    ("module", "job"), CHECKS, ids=[f"{job} in {m.__name__.split('.')[-1]}" for m, job in CHECKS]
)
def test_a_blob_that_is_pruned_right_after_it_was_checked_is_not_found(
    module: ModuleType, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever comes next sees that it is gone, and says so by our own error."""
    path = tmp_path / "a.safetensors"

    def use_it(store: Store, digest: str) -> None:
        if job == "replace":
            store.replace(path, digest)
        else:
            store.place(digest, path, kind=cast("Kind", job))

    with Store(tmp_path / "store") as store:
        digest = store.put_stream([SHARED[2]]).digest
        if job == "replace":
            path.write_bytes(SHARED[2])

        def check_and_prune(
            volume: Volume, wanted: str, real: Callable[[Volume, str], Blob] = proof.checked
        ) -> Blob:
            blob = real(volume, wanted)
            store.plan_prune().execute()
            return blob

        monkeypatch.setattr(module, "checked", check_and_prune)
        with pytest.raises(BlobNotFoundError):
            use_it(store, digest)
    assert path.exists() == (job == "replace")


def use(store: Store, folder: Path, seed: int) -> list[str]:
    """Put, open and place in a process that was forked from one that uses the store."""
    folder.mkdir()
    data = random.Random(seed).randbytes(20_000)
    blob = store.put_stream([data])
    with store.open(blob.digest) as opened:
        assert opened.read() == data
    for kind in KINDS:
        store.place(blob.digest, folder / kind, kind=kind)
    store.pin(blob.digest, f"fork {seed}")
    return [blob.digest]


POINTS = (
    "put: tmp made", "put: written", "put: synced", "put: linked", "put: directory synced",
    "put: row written", "place: journaled", "place: linked",
)  # fmt: skip


@pytest.mark.parametrize("point", POINTS)
def test_a_fork_while_another_thread_is_inside_put_or_place(point: str, tmp_path: Path) -> None:
    """The child has the locks and connections of a thread that it does not have."""
    is_there, is_forked = threading.Event(), threading.Event()
    digests: list[str] = []

    def wait_there(reached: str) -> None:
        if reached == point and not is_there.is_set():
            is_there.set()
            is_forked.wait(0.3)  # whoever forks may have to wait for this thread first

    def put(store: Store) -> None:
        digests.append(store.put_stream([random.Random(0).randbytes(20_000)]).digest)
        store.place(digests[0], tmp_path / "placed", kind="hardlink")

    def in_child(store: Store) -> list[str]:
        faults.hook = None
        return use(store, tmp_path / "child", 1)

    def fork_meanwhile() -> list[str]:
        with Store(tmp_path / "store") as store:
            faults.hook = wait_there
            thread = threading.Thread(target=put, args=(store,))
            thread.start()
            assert is_there.wait(60)
            with Child(lambda: in_child(store)) as child:
                is_forked.set()
                found = child.result()
            thread.join()
            assert use(store, tmp_path / "parent", 2)
        return digests + found

    with Child(fork_meanwhile) as parent:
        found = parent.result()
    assert len(found) == 2
    check_everything(tmp_path / "store", [])
    with Store(tmp_path / "store") as store:
        for digest in found:
            with store.open(digest) as blob:
                assert blake3(blob.read()).hexdigest() == digest


def test_forks_at_any_time_while_threads_put(tmp_path: Path, rounds: Callable[[int], int]) -> None:
    def put_all_the_time(store: Store, is_over: threading.Event, puts: list[str]) -> None:
        chance = random.Random(threading.get_ident())
        while not is_over.is_set():
            puts.append(store.put_stream([chance.randbytes(5_000)]).digest)

    def fork_often() -> list[str]:
        digests: list[str] = []
        is_over = threading.Event()
        with Store(tmp_path / "store") as store:
            threads = [
                threading.Thread(target=put_all_the_time, args=(store, is_over, digests))
                for _ in range(2)
            ]
            for thread in threads:
                thread.start()
            found: list[str] = []
            for number in range(rounds(20)):
                with Child(lambda n=number: use(store, tmp_path / f"child {n}", n)) as child:  # type: ignore[misc]
                    found += child.result()
            is_over.set()
            for thread in threads:
                thread.join()
        return digests + found

    with Child(fork_often) as parent:
        digests = parent.result()
    with Store(tmp_path / "store") as store:
        assert {blob.digest for blob in store.blobs()} == set(digests)
        report = store.verify(full=True)
    assert not report.has_damage
    assert report.unindexed == []


def test_a_child_goes_on_after_its_parent_closed_the_store(tmp_path: Path) -> None:
    """The last connection to close removes SQLite's log: a child's rows must not go with it."""
    go, going = os.pipe()
    ready, done = os.pipe()

    def child_work(store: Store) -> list[str]:
        first = use(store, tmp_path / "first", 1)
        os.write(done, b"d")
        os.read(go, 1)
        return first + use(store, tmp_path / "second", 2)

    with Store(tmp_path / "store") as store:
        parents = store.put_stream([b"of the parent"]).digest
        child = Child(lambda: child_work(store))
        os.read(ready, 1)
    os.write(going, b"g")
    with child:
        digests = child.result()
    for pipe in (go, going, ready, done):
        os.close(pipe)
    with Store(tmp_path / "store") as store:
        assert {blob.digest for blob in store.blobs()} == {parents, *digests}
        assert store.verify(full=True).unindexed == []


def test_replace_and_adopt_do_not_disturb_each_other(tmp_path: Path, rounds: Rounds) -> None:
    """One process makes a file the blob while another makes it a link of that blob."""
    paths = [tmp_path / f"{number}.safetensors" for number in range(6)]

    def adopt(data: bytes) -> None:
        with Store(tmp_path / "store") as store:
            for adoption in store.adopt_many(paths):
                assert adoption.error is None or isinstance(adoption.error, FileSkippedError)

    def replace(data: bytes) -> None:
        digest = blake3(data).hexdigest()
        with Store(tmp_path / "store") as store, suppress(BlobNotFoundError):
            for result in store.replace_many((path, digest) for path in paths):
                assert isinstance(
                    result.error, (type(None), FileSkippedError, BlobNotFoundError)
                ), result.error

    for number in range(rounds(4)):
        data = random.Random(number).randbytes(10_000)
        for path in paths:
            path.unlink(missing_ok=True)
            path.write_bytes(data)
            os.utime(path, ns=(10**18, 10**18))
        with (
            Child(lambda: adopt(data)) as one,  # noqa: B023 - used at once
            Child(lambda: replace(data)) as two,  # noqa: B023
            Child(lambda: replace(data)) as three,  # noqa: B023
        ):
            for child in (one, two, three):
                child.result()
        assert [path for path in paths if path.read_bytes() != data] == []
        with Store(tmp_path / "store") as store:
            digest = store.digest_of(paths[0]).digest
            with store.open(digest) as blob:
                assert blob.read() == data
            assert not store.verify().has_damage


def test_processes_that_make_a_store_at_the_same_moment_find_it_whole(
    tmp_path: Path, rounds: Callable[[int], int]
) -> None:
    """None takes it for a lost index or a foreign folder, and prune is not refused."""
    for number in range(rounds(4)):
        root = tmp_path / str(number)

        def work(root: Path = root) -> bool:
            with Store(root) as store:
                store.put_stream([SHARED[2]])
                store.plan_prune().execute()
                return store.has_lost_links

        with ExitStack() as stack:
            children = [stack.enter_context(Child(work)) for _ in range(4)]
            assert [child.result() for child in children] == [False] * 4
        with Store(root) as store:
            assert not store.verify(full=True).has_damage
