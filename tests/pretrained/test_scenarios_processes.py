"""Many threads and processes that load at once, processes that die, and pipelines that travel."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from smartcache.store.store import Store
from tests.hub_server import Hub
from tests.hub_server.pipelines import OWN_WEIGHTS, SHARED_WEIGHTS, Models
from tests.pretrained.libraries import WEIGHTS, LibraryHub
from tests.pretrained.scenarios import (
    Pipeline,
    assert_equal,
    assert_sound,
    load,
    picture,
    published,
)
from tests.pretrained.worker import Job, Worker

ALL_WEIGHTS = (*SHARED_WEIGHTS, OWN_WEIGHTS)


class TestThreads:
    """Without smartcache, threads that load at once change torch for the whole process."""

    @pytest.fixture(autouse=True)
    def _torch_as_it_was(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let no test that fails here make the others fail."""
        import torch

        for name in ("register_buffer", "register_parameter"):
            monkeypatch.setattr(torch.nn.Module, name, getattr(torch.nn.Module, name))

    def load_at_once(self, names: list[str], *, share: bool) -> list[Pipeline]:
        gate = threading.Barrier(len(names))

        def begin(name: str) -> Pipeline:
            gate.wait()
            return load(name, way="function", share=share)

        with ThreadPoolExecutor(len(names)) as pool:
            return list(pool.map(begin, names))

    @pytest.mark.parametrize("share", [False, True])
    def test_of_one_repo_fetch_each_file_once(
        self, library_hub: LibraryHub, models: Models, share: bool
    ) -> None:
        library_hub.hub.add_folder("org/first", models.first)
        pipelines = self.load_at_once(["org/first"] * 4, share=share)
        plain = published(models.first)
        for pipeline in pipelines:
            assert_equal(pipeline, plain)
        assert len(library_hub.weight_gets()) == len(ALL_WEIGHTS)
        for name in ("text_encoder", "vae", "unet"):
            objects = {id(getattr(pipeline, name)) for pipeline in pipelines}
            assert len(objects) == (1 if share else 4)
        assert_sound(library_hub)

    def test_of_two_repos_end_with_one_object(
        self, library_hub: LibraryHub, models: Models
    ) -> None:
        library_hub.hub.add_folder("org/first", models.first)
        library_hub.hub.add_folder("org/second", models.second)
        pipelines = self.load_at_once(["org/first", "org/second"] * 2, share=True)
        for name, objects in (("text_encoder", 1), ("vae", 1), ("unet", 2)):
            assert len({id(getattr(each, name)) for each in pipelines}) == objects
        for pipeline, folder in zip(pipelines, (models.first, models.second) * 2, strict=True):
            assert_equal(pipeline, published(folder))
        assert_sound(library_hub)


@pytest.fixture(scope="module")
def served(models: Models) -> Iterator[Hub]:
    with Hub() as hub:
        hub.add_folder("org/first", models.first)
        hub.add_folder("org/second", models.second)
        yield hub


@pytest.fixture(scope="module")
def worker(
    served: Hub, models: Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Worker]:
    with Worker(served, tmp_path_factory.mktemp("worker"), models.first) as worker:
        yield worker


@pytest.fixture(scope="module")
def drawn(models: Models) -> dict[str, object]:
    """What the pipelines draw without smartcache."""
    folders = {"org/first": models.first, "org/second": models.second}
    return {name: picture(published(folder)).tolist() for name, folder in folders.items()}


@pytest.fixture
def job(tmp_path: Path, served: Hub) -> Iterator[Job]:
    yield Job(names=["org/first"], cache_dir=tmp_path / "hf", store=tmp_path / "store")
    served.faults.clear()
    served.clear()


def weight_gets(hub: Hub) -> list[str]:
    return sorted(str(each.file) for each in hub.gets() if str(each.file).endswith(WEIGHTS))


def problems(job: Job) -> list[str]:
    """Return what is damaged in the store, and what nobody uses in the HF cache."""
    with Store(job.store) as store:
        report = store.verify(full=True)
        left = os.listdir(store.root / "tmp")
    found = [*report.damaged, *report.stray, *left]
    for folder in job.cache_dir.glob("models--*"):
        used = {path.resolve().name for path in (folder / "snapshots").rglob("*")}
        names = {name for name in os.listdir(folder / "blobs") if not name.startswith("tmp_")}
        found += sorted(names - used)  # tmp_: huggingface_hub's, empty
    return [str(each) for each in found]


def test_processes_that_load_at_once_fetch_each_content_once(
    worker: Worker, served: Hub, job: Job, drawn: dict[str, object]
) -> None:
    """They find the Hub by `HF_ENDPOINT`, which they read when they import the libraries."""
    other = replace(job, names=["org/second"])
    for ended, name in zip(worker.run(job, other, job), [*drawn, *drawn], strict=False):
        assert ended.pictures == [drawn[name]], ended.error
    paths = [get.removeprefix("org/").partition("/")[2] for get in weight_gets(served)]
    assert sorted(paths) == sorted([*SHARED_WEIGHTS, OWN_WEIGHTS, OWN_WEIGHTS])
    assert problems(job) == []


class TestAfterAKill:
    """The next process has what it wants, and nothing is left of the dead one."""

    @pytest.mark.parametrize(
        "place", ["download: leased", "place: linked", "download: fetched", "download: named"]
    )
    def test_the_next_load_fetches_only_what_was_not_there(
        self, worker: Worker, served: Hub, job: Job, drawn: dict[str, object], place: str
    ) -> None:
        second = replace(job, names=["org/second"])
        assert worker.run(job)[0].signal == 0
        assert worker.run(replace(second, die_at=(place, 1)))[0].signal == signal.SIGKILL
        (ended,) = worker.run(second)
        assert ended.pictures == [drawn["org/second"]], ended.error
        gets = [get for get in weight_gets(served) if get.startswith("org/second/")]
        assert set(gets) == {f"org/second/{OWN_WEIGHTS}"}
        assert problems(job) == []

    def test_a_download_is_ended_by_the_next(
        self, worker: Worker, served: Hub, job: Job, tmp_path: Path, drawn: dict[str, object]
    ) -> None:
        hold = served.faults.hold(OWN_WEIGHTS, after=200_000)

        def kill() -> None:
            hold.reached.wait()
            (tmp_path / "now").touch()

        killer = threading.Thread(target=kill)
        killer.start()
        (ended,) = worker.run(replace(job, die_when=tmp_path / "now"))
        killer.join()
        hold.release()
        assert ended.signal == signal.SIGKILL
        (ended,) = worker.run(job)
        assert ended.pictures == [drawn["org/first"]], ended.error
        assert problems(job) == []


@pytest.mark.parametrize("share", [False, True])
def test_a_pipeline_travels_to_a_worker_process(
    worker: Worker, library_hub: LibraryHub, models: Models, drawn: dict[str, object], share: bool
) -> None:
    library_hub.hub.add_folder("org/second", models.second)
    pipeline = load("org/second", share=share)
    assert worker.draw(pipeline) == drawn["org/second"]
    assert picture(pipeline).tolist() == drawn["org/second"]
