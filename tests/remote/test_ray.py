"""A real Ray cluster of two nodes on this machine, started by the tests, one of them killed.

What is encoded is in a log that all processes append to: see `tests.training.workers`.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from smartcache.cache import SmartCache
from smartcache.errors import ConfigError, EncoderError
from smartcache.progress import silent
from smartcache.remote import RayEngine, Tier
from smartcache.training import Dataset, Encoder, Sources
from tests.training.workers import Encode, encodes, names_in, processes, scratch_of

pytestmark = [
    pytest.mark.timeout(120),
    # What Ray leaves open, and what it warns of itself, is not ours.
    pytest.mark.filterwarnings("ignore"),
]
COUNT = 2000


class Ray:
    """A cluster whose head has room for one actor, as each node has that is added."""

    def __init__(self) -> None:
        import ray
        from ray.cluster_utils import Cluster

        node = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 << 20}
        self.cluster = Cluster(initialize_head=True, head_node_args=node)
        ray.init(self.cluster.address, log_to_driver=False, logging_level=logging.ERROR)

    @contextmanager
    def node(self) -> Iterator[Any]:
        """Have one node more."""
        added = self.cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
        try:
            yield added
        finally:
            if added in self.cluster.worker_nodes:
                self.cluster.remove_node(added, allow_graceful=False)

    def close(self) -> None:
        import ray

        ray.shutdown()
        self.cluster.shutdown()  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def ray() -> Iterator[Ray]:
    pytest.importorskip("ray", reason="Ray is not installed")
    with pytest.MonkeyPatch.context() as patched:
        folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: sockets are in it
        patched.setenv("RAY_TMPDIR", folder)
        patched.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patched.setenv("RAY_USAGE_STATS_ENABLED", "0")
        made = Ray()
        yield made
        made.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[SmartCache]:
    with SmartCache(tmp_path / "store") as opened:
        yield opened


def opened(cache: SmartCache, folder: Path, count: int, **how: Any) -> Dataset:  # noqa: ANN401
    photos = folder / "photos"
    if not photos.exists():
        photos.mkdir()
        for number in range(count):
            (photos / f"{number:04}.png").write_bytes(f"image {number}".encode())
    encoder = Encoder(Encode(folder, **how), reads="file", depends_on="vae", batch=4)
    return cache.dataset("photos", Sources(photos), latent=encoder)


def values(dataset: Dataset) -> dict[str, bytes]:
    found = dataset.outputs["latent"].set
    return {key: found.get(key)["value"].tobytes() for key in found}


class TestRefused:
    def test_without_ray_it_says_what_to_install(
        self, tmp_path: Path, cache: SmartCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "ray", None)
        with opened(cache, tmp_path, 3) as dataset:
            with pytest.raises(EncoderError, match="needs Ray") as raised:
                dataset.build(engine=RayEngine(), progress=silent)
            assert "smartcache-hub[ray]" in str(raised.value.hint)

    @pytest.mark.parametrize("options", [{"workers": 0}, {"num_cpus": -1}, {"num_gpus": "all"}])
    def test_numbers_that_make_no_sense(self, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match="is a number from"):
            RayEngine(**options)

    @pytest.mark.usefixtures("ray")
    def test_a_cluster_without_room(self, tmp_path: Path, cache: SmartCache) -> None:
        with (
            opened(cache, tmp_path, 3) as dataset,
            pytest.raises(EncoderError, match="no room for an actor of 1 CPUs and 2 GPUs"),
        ):
            dataset.build(engine=RayEngine(num_gpus=2), progress=silent)


class TestBuild:
    @pytest.mark.usefixtures("ray")
    def test_it_is_what_one_process_makes_and_the_errors_are_the_encoders(
        self, tmp_path: Path, cache: SmartCache
    ) -> None:
        with opened(cache, tmp_path, 30, bad="0007.png") as dataset:
            report = dataset.build(engine=RayEngine(), progress=silent)
            assert report.encoded == {"latent": 29}
            assert [each.item for each in report.failed] == ["0007.png"]
            found = values(dataset)
        assert os.getpid() not in processes(tmp_path)
        with (
            SmartCache(tmp_path / "other") as other,
            opened(other, tmp_path, 30, bad="0007.png") as dataset,
        ):
            dataset.build(progress=silent)
            assert values(dataset) == found
        with (
            SmartCache(tmp_path / "third") as third,
            opened(third, tmp_path, 30, error=ZeroDivisionError) as dataset,
            pytest.raises(ZeroDivisionError, match="no good"),
        ):
            dataset.build(engine=RayEngine(), progress=silent)

    @pytest.mark.usefixtures("ray")
    def test_functions_that_cannot_be_imported_are_sent_as_they_are(
        self, tmp_path: Path, cache: SmartCache
    ) -> None:
        (tmp_path / "one.png").write_bytes(b"image")
        encoder = Encoder(
            lambda items: [len(item.bytes()) for item in items], reads="file", depends_on="v"
        )
        with cache.dataset("one", Sources(tmp_path / "*.png"), latent=encoder) as dataset:
            dataset.build(engine=RayEngine(), progress=silent)
            assert dataset[0]["latent"] == 5

    @pytest.mark.usefixtures("ray")
    def test_what_is_sent_straight_to_a_tier_is_read_from_there(
        self, tmp_path: Path, cache: SmartCache, nas: Tier
    ) -> None:
        cache.remotes.add("nas", nas.url)
        with opened(cache, tmp_path, 30) as dataset:
            report = dataset.build(engine=RayEngine(tier="nas"), progress=silent)
            assert report.encoded == {"latent": 30}
            assert len(dataset.outputs["latent"].set.far_packs()) > 0
            assert len(values(dataset)) == 30
            assert dataset.plan(silent).is_empty

    def test_a_node_is_killed_and_nothing_that_was_sealed_is_encoded_again(
        self, tmp_path: Path, cache: SmartCache, ray: Ray
    ) -> None:
        sealed: set[str] = set()
        with ray.node() as node, opened(cache, tmp_path, COUNT, pause=0.002) as dataset:

            def kill() -> bool:
                if not sealed and len(processes(tmp_path)) == 2 and len(names_in(dataset)) > 200:
                    ray.cluster.remove_node(node, allow_graceful=False)
                    sealed.update(names_in(dataset))
                return False

            report = dataset.build(engine=RayEngine(), stop=kill, progress=silent)
            assert 200 < len(sealed) < COUNT
            assert (report.encoded, report.failed) == ({"latent": COUNT}, [])
            counts = encodes(tmp_path)
            assert {counts[f"{name} 0"] for name in sealed} == {1}
            assert len(processes(tmp_path)) >= 2
            assert dataset.plan(silent).is_empty
            assert len(values(dataset)) == COUNT
            assert not scratch_of(dataset)
