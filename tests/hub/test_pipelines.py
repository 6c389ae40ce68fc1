"""A second pipeline that shares encoders with the first: none is fetched again, each is one file.

The pipelines are real ones of diffusers, the cache is huggingface_hub's own, and its program `hf`
goes on working with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from smartcache.cache import SmartCache
from smartcache.hub.api import Call
from smartcache.store.store import Store
from smartcache.system.filesystems import mount_of
from tests.hub_server import Hub
from tests.hub_server.pipelines import OWN_WEIGHTS, SHARED_WEIGHTS, Models
from tests.store.files import inode_of, mode_of

HF = Path(sys.executable).with_name("hf")
PATIENCE = 100.0
FOLDERS = {"org/first": "models--org--first", "org/second": "models--org--second"}
pytestmark = pytest.mark.torch


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    if mount_of(tmp_path).fstype in ("btrfs", "xfs"):
        pytest.skip("reflinks have inodes of their own")
    return tmp_path / "hub"


@pytest.fixture
def smart() -> Iterator[SmartCache]:
    with SmartCache() as smart:
        yield smart


@pytest.fixture
def both(hub: Hub, models: Models, smart: SmartCache, cache_dir: Path) -> None:
    """Both pipelines are downloaded; the log has the second one only."""
    hub.add_folder("org/first", models.first)
    hub.add_folder("org/second", models.second)
    download(smart, hub, cache_dir, "org/first")
    hub.clear()
    download(smart, hub, cache_dir, "org/second")


def download(smart: SmartCache, hub: Hub, cache_dir: Path, name: str, **options: object) -> Path:
    words = {"endpoint": hub.url, "cache_dir": cache_dir, "token": False, **options}
    return Path(smart.download(Call(repo_id=name, arguments=words)))


def run(hub: Hub, cache_dir: Path, command: list[str], *, code: int = 0) -> str:
    done = subprocess.run(
        command,
        env={**os.environ, **hub.environment, "HF_HUB_CACHE": str(cache_dir)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def hf(hub: Hub, cache_dir: Path, *words: str, code: int = 0) -> str:
    return run(hub, cache_dir, [str(HF), "cache", *words, "--cache-dir", str(cache_dir)], code=code)


def etags(hub: Hub, name: str) -> dict[str, str]:
    """The names of the weight files' blobs."""
    commit = hub.repositories["model", name].find("main")
    assert commit is not None
    return {path: commit.etag(path) for path in (*SHARED_WEIGHTS, OWN_WEIGHTS)}


def blob_in(cache_dir: Path, name: str, etag: str) -> Path:
    return cache_dir / FOLDERS[name] / "blobs" / etag


def digest(store: Store, etag: str) -> str:
    blob = store.find("sha256", etag)
    assert blob is not None
    return blob.digest


def assert_store_is_whole(store: Store) -> None:
    report = store.verify(full=True)
    assert not any((report.damaged, report.stray, report.writable))
    assert report.blobs > 0


def prunable(store: Store) -> set[str]:
    """The digests of what prune would take."""
    return {victim.digest for victim in store.plan_prune().victims}


def test_the_first_pipeline_is_fetched_once_and_wholly(
    hub: Hub, models: Models, smart: SmartCache, cache_dir: Path
) -> None:
    """What the tests below compare with."""
    hub.add_folder("org/first", models.first)
    folder = download(smart, hub, cache_dir, "org/first")
    for path in (*SHARED_WEIGHTS, OWN_WEIGHTS):
        assert hub.fetched_bytes(path) == models.size(path)
        assert (folder / path).read_bytes() == (models.first / path).read_bytes()


@pytest.mark.usefixtures("both")
class TestSharing:
    def test_no_byte_of_a_shared_file_is_fetched(self, hub: Hub, models: Models) -> None:
        for path in SHARED_WEIGHTS:
            assert hub.gets(path) == []
        assert hub.fetched_bytes(OWN_WEIGHTS) == models.size(OWN_WEIGHTS)
        fetched = {each.file for each in hub.gets() if str(each.file).endswith(".safetensors")}
        assert fetched == {f"org/second/{OWN_WEIGHTS}"}

    def test_a_shared_file_is_one_inode(self, hub: Hub, smart: SmartCache, cache_dir: Path) -> None:
        for path in SHARED_WEIGHTS:
            etag = etags(hub, "org/second")[path]
            blob = smart.store.path_of(digest(smart.store, etag))
            names = [blob, *(blob_in(cache_dir, name, etag) for name in FOLDERS)]
            assert len({inode_of(name) for name in names}) == 1
            assert mode_of(blob) == 0o444

    def test_the_snapshot_is_what_was_published(
        self, hub: Hub, models: Models, smart: SmartCache, cache_dir: Path
    ) -> None:
        folder = download(smart, hub, cache_dir, "org/second")
        files = [path for path in models.second.rglob("*") if path.is_file()]
        assert len(files) == len([path for path in folder.rglob("*") if path.is_file()])
        for path in files:
            assert (folder / path.relative_to(models.second)).read_bytes() == path.read_bytes()

    def test_the_pipeline_runs_by_its_name_and_by_its_path(self, hub: Hub, cache_dir: Path) -> None:
        hub.clear()
        code = """
import smartcache
from diffusers import DiffusionPipeline
for name in (smartcache.snapshot_download("org/second"), "org/second"):
    pipeline = DiffusionPipeline.from_pretrained(name)
    image = pipeline("a cat", num_inference_steps=1, height=32, width=32, output_type="np").images
    print(image.shape)
"""
        printed = run(hub, cache_dir, [sys.executable, "-c", code])
        assert printed.splitlines()[-2:] == ["(1, 32, 32, 3)"] * 2
        assert hub.gets() == []

    def test_the_same_file_in_a_dataset_is_not_fetched_either(
        self, hub: Hub, models: Models, smart: SmartCache, cache_dir: Path
    ) -> None:
        path = models.first / SHARED_WEIGHTS[0]
        hub.add("org/data", {"README.md": b"data", "x/y.bin": path}, repo_type="dataset")
        hub.clear()
        folder = download(smart, hub, cache_dir, "org/data", repo_type="dataset")
        assert [each.file for each in hub.gets()] == ["org/data/README.md"]
        assert (folder / "x" / "y.bin").read_bytes() == path.read_bytes()


@pytest.mark.skipif(not HF.exists(), reason="no hf here")
@pytest.mark.usefixtures("both")
class TestTheProgramOfTheHub:
    STRICT = ("--fail-on-missing-files", "--fail-on-extra-files")

    def test_it_lists_and_verifies_the_result(
        self, hub: Hub, smart: SmartCache, cache_dir: Path
    ) -> None:
        listed = json.loads(hf(hub, cache_dir, "ls", "--json"))
        assert {entry["id"] for entry in listed} == {"model/org/first", "model/org/second"}
        for name in FOLDERS:
            hf(hub, cache_dir, "verify", name, *self.STRICT)
        assert_store_is_whole(smart.store)

    def test_after_rm_the_rest_is_whole(self, hub: Hub, smart: SmartCache, cache_dir: Path) -> None:
        store = smart.store
        assert prunable(store) == set()
        hf(hub, cache_dir, "rm", "model/org/first", "-y")
        assert not (cache_dir / FOLDERS["org/first"]).exists()
        assert_store_is_whole(store)
        mine = digest(store, etags(hub, "org/first")[OWN_WEIGHTS])
        assert prunable(store) == {mine}
        store.plan_prune().execute()
        assert store.find("sha256", etags(hub, "org/first")[OWN_WEIGHTS]) is None
        hf(hub, cache_dir, "verify", "org/second", *self.STRICT)
        assert_store_is_whole(store)

    def test_after_rm_of_both_everything_may_go_or_be_linked_again(
        self, hub: Hub, smart: SmartCache, cache_dir: Path
    ) -> None:
        for name in FOLDERS:
            hf(hub, cache_dir, "rm", f"model/{name}", "-y")
        assert_store_is_whole(smart.store)
        wanted = {*etags(hub, "org/first").values(), *etags(hub, "org/second").values()}
        assert prunable(smart.store) == {digest(smart.store, etag) for etag in wanted}
        hub.clear()
        download(smart, hub, cache_dir, "org/second")
        assert [each for each in hub.gets() if str(each.file).endswith(".safetensors")] == []
        hf(hub, cache_dir, "verify", "org/second", *self.STRICT)
        first = digest(smart.store, etags(hub, "org/first")[OWN_WEIGHTS])
        assert prunable(smart.store) == {first}

    def test_prune_of_an_old_revision_lets_its_own_blob_go(
        self, hub: Hub, models: Models, smart: SmartCache, cache_dir: Path
    ) -> None:
        old = etags(hub, "org/first")[OWN_WEIGHTS]
        files = {path.relative_to(models.second): path for path in models.second.rglob("*.*")}
        hub.add("org/first", {name.as_posix(): path for name, path in files.items()})
        hub.clear()
        download(smart, hub, cache_dir, "org/first")
        assert [each for each in hub.gets() if str(each.file).endswith(".safetensors")] == []
        hf(hub, cache_dir, "prune", "-y")
        assert not blob_in(cache_dir, "org/first", old).exists()
        assert_store_is_whole(smart.store)
        assert prunable(smart.store) == {digest(smart.store, old)}
        for name in FOLDERS:
            hf(hub, cache_dir, "verify", name, *self.STRICT)
