"""Two pipelines with the same text encoder and VAE, from two repos of a Hub."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import smartcache
from smartcache.errors import DigestMismatchError
from smartcache.system.filesystems import mount_of
from tests.cli.running import Here
from tests.hub_server.pipelines import OWN_WEIGHTS, SHARED_WEIGHTS, Models, files_of
from tests.pretrained.libraries import LibraryHub
from tests.pretrained.scenarios import (
    WAYS,
    Way,
    assert_equal,
    assert_sound,
    load,
    picture,
    plainly,
    published,
    store,
)
from tests.store.files import inode_of, mode_of, write

ALL_WEIGHTS = (*SHARED_WEIGHTS, OWN_WEIGHTS)
SHARED_PARTS = ("text_encoder", "vae")


@pytest.fixture
def repos(library_hub: LibraryHub, models: Models) -> LibraryHub:
    library_hub.hub.add_folder("org/first", models.first)
    library_hub.hub.add_folder("org/second", models.second)
    return library_hub


@pytest.mark.usefixtures("repos")
@pytest.mark.parametrize("way", WAYS)
class TestTheSecondPipeline:
    def test_brings_only_its_own_weights(self, repos: LibraryHub, models: Models, way: Way) -> None:
        load("org/first", way=way)
        assert repos.weights_fetched() == sum(map(models.size, ALL_WEIGHTS))
        repos.clear()
        load("org/second", way=way)
        assert repos.weight_gets() == [f"org/second/{OWN_WEIGHTS}"]
        assert repos.weights_fetched() == models.size(OWN_WEIGHTS)
        assert_sound(repos)

    def test_has_its_equal_weights_in_the_same_file(self, repos: LibraryHub, way: Way) -> None:
        if mount_of(repos.home.parent).fstype in ("btrfs", "xfs"):
            pytest.skip("reflinks have inodes of their own")
        load("org/first", way=way)
        load("org/second", way=way)
        for path in SHARED_WEIGHTS:
            blob = store().find("sha256", repos.commit("org/first").etag(path))
            assert blob is not None
            names = [repos.blob(name, path) for name in ("org/first", "org/second")]
            names.append(store().path_of(blob.digest))
            assert len({inode_of(name) for name in names}) == 1
            assert mode_of(names[0]) == 0o444

    def test_is_what_it_is_without_smartcache_with_objects_of_its_own(
        self, models: Models, way: Way
    ) -> None:
        first = load("org/first", way=way)
        second, plain = load("org/second", way=way), published(models.second)
        assert_equal(second, plain)
        assert np.array_equal(picture(second), picture(plain))
        for name in SHARED_PARTS:
            assert getattr(first, name) is not getattr(second, name)
        assert smartcache.components() == []

    def test_has_the_same_objects_when_they_are_shared(self, models: Models, way: Way) -> None:
        first = load("org/first", way=way, share=True)
        second = load("org/second", way=way, share=True)
        for name in SHARED_PARTS:
            assert getattr(first, name) is getattr(second, name)
        assert first.unet is not second.unet
        for pipeline, folder in ((first, models.first), (second, models.second)):
            plain = published(folder)
            assert_equal(pipeline, plain)
            assert np.array_equal(picture(pipeline), picture(plain))


def test_a_shared_component_is_not_fetched_nor_is_anything_else_twice(repos: LibraryHub) -> None:
    first = load("org/first", share=True)
    repos.clear()
    second = load("org/second", share=["vae"])
    assert repos.weight_gets() == [f"org/second/{OWN_WEIGHTS}"]
    assert first.vae is second.vae
    assert first.text_encoder is not second.text_encoder
    assert_sound(repos)


def test_a_component_alone_comes_out_of_the_store_too(repos: LibraryHub, models: Models) -> None:
    from transformers import CLIPTextModel

    load("org/first")
    repos.clear()
    model = load("org/second", cls=CLIPTextModel, subfolder="text_encoder")
    assert repos.weight_gets() == []
    assert_equal(model, plainly(models.second / "text_encoder", CLIPTextModel))
    assert_sound(repos)


class TestWhatIsNotWanted:
    def test_known_weights_that_the_variant_leaves_out_are_not_left_behind(
        self, repos: LibraryHub, models: Models
    ) -> None:
        repos.hub.add_folder("org/halves", models.halves)
        load("org/first")
        load("org/halves", variant="fp16")
        wholes = {repos.commit("org/halves").etag(path) for path in ALL_WEIGHTS}
        assert not wholes & repos.blobs("org/halves").keys()
        assert_sound(repos)

    def test_they_come_when_they_are_asked_for(self, repos: LibraryHub, models: Models) -> None:
        repos.hub.add_folder("org/halves", models.halves)
        load("org/first")
        load("org/halves", variant="fp16")
        repos.clear()
        assert_equal(load("org/halves"), published(models.first))
        assert repos.weight_gets() == []

    def test_pickles_beside_safetensors_are_not_left_behind(
        self, repos: LibraryHub, models: Models
    ) -> None:
        repos.hub.add_folder("org/pickled", models.pickled)
        repos.hub.add("org/mixed", {**files_of(models.pickled), **files_of(models.first)})
        load("org/pickled")
        load("org/first")
        repos.clear()
        load("org/mixed")
        assert repos.weight_gets() == []
        assert_sound(repos)


def test_files_of_a_given_folder_are_used_instead_of_a_download(
    repos: LibraryHub, models: Models, tmp_path: Path
) -> None:
    unets = tmp_path / "ComfyUI" / "models" / "diffusion_models"
    mine = write(unets / "mine.safetensors", (models.second / OWN_WEIGHTS).read_bytes())
    load("org/first")
    Here()("folders", "add", tmp_path / "ComfyUI")
    repos.clear()
    pipeline = load("org/second")
    assert repos.weight_gets() == []
    assert_equal(pipeline, published(models.second))
    assert mine.read_bytes() == (models.second / OWN_WEIGHTS).read_bytes()
    assert_sound(repos)


@pytest.mark.parametrize("way", WAYS)
def test_a_mapping_names_further_files_and_gets_what_was_loaded(
    repos: LibraryHub, models: Models, tmp_path: Path, way: Way
) -> None:
    mine = write(tmp_path / "anything.bin", (models.first / OWN_WEIGHTS).read_bytes())
    commit = repos.commit("org/first")
    mapping = {commit.etag(OWN_WEIGHTS): str(mine), commit.etag(SHARED_WEIGHTS[0]): str(mine)}
    pipeline = load("org/first", way=way, share=True, cache_mapping=mapping)
    assert_equal(pipeline, published(models.first))
    assert repos.weight_gets() == sorted(f"org/first/{path}" for path in SHARED_WEIGHTS)
    snapshot = repos.snapshot("org/first")
    assert mapping == {commit.etag(each): os.path.realpath(snapshot / each) for each in ALL_WEIGHTS}
    assert_sound(repos)


@pytest.mark.parametrize("share", [False, True])
def test_wrong_bytes_are_an_error_and_leave_nothing(
    repos: LibraryHub, models: Models, share: bool
) -> None:
    repos.hub.faults.wrong_bytes("unet/diffusion", times=1)
    with pytest.raises(DigestMismatchError, match="unet/diffusion_pytorch_model"):
        load("org/first", share=share)
    etag = repos.commit("org/first").etag(OWN_WEIGHTS)
    assert etag not in repos.blobs("org/first")
    assert not os.path.lexists(repos.snapshot("org/first") / OWN_WEIGHTS)
    assert store().find("sha256", etag) is None
    assert smartcache.components() == []
    repos.clear()
    assert_equal(load("org/first", share=share), published(models.first))
    assert repos.weight_gets() == [f"org/first/{OWN_WEIGHTS}"]
    assert_sound(repos)


@pytest.mark.usefixtures("repos")
class TestWithoutTheFlag:
    def test_everything_is_as_it_was(self, repos: LibraryHub) -> None:
        plainly("org/first")  # so that huggingface_hub remembers the listing from here on
        shutil.rmtree(repos.cache_dir)
        repos.clear()
        plain = plainly("org/first")
        asked = sorted(str(each) for each in repos.hub.requests)
        shutil.rmtree(repos.cache_dir)
        repos.clear()
        with smartcache.enable():
            pipeline = plainly("org/first")
        assert sorted(str(each) for each in repos.hub.requests) == asked
        assert_equal(pipeline, plain)
        assert dict(pipeline.config) == dict(plain.config)

    def test_the_store_is_not_even_made_where_it_is_not_wanted(self) -> None:
        with smartcache.enable():
            plainly("org/first", smart_cache=False)
            smartcache.from_pretrained("org/first", smart_cache=False)
        assert not Path(os.environ["SMARTCACHE_HOME"]).exists()
