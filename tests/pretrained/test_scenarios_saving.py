"""Whoever saves a model never writes into the store; who does so by force is found out.

The tests may run as root, for whom a mode of 0444 is no obstacle.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from smartcache.errors import DigestMismatchError
from tests.hub_server.pipelines import OWN_WEIGHTS, Models
from tests.pretrained.libraries import LibraryHub
from tests.pretrained.scenarios import (
    Pipeline,
    assert_equal,
    files_of_store,
    load,
    plainly,
    published,
    store,
)
from tests.store.files import edit, mode_of

PICKLE = "unet/diffusion_pytorch_model.bin"


@pytest.fixture
def repos(library_hub: LibraryHub, models: Models) -> LibraryHub:
    library_hub.hub.add_folder("org/first", models.first)
    library_hub.hub.add_folder("org/pickled", models.pickled)
    return library_hub


def change(pipeline: Pipeline) -> None:
    """Do what training does to the weights."""
    import torch

    with torch.no_grad():
        for each in (pipeline.unet, pipeline.text_encoder, pipeline.vae):
            for parameter in each.parameters():
                parameter.add_(1)


@pytest.mark.parametrize(("name", "share"), [("first", True), ("pickled", False)])
def test_training_and_saving_elsewhere_does_not_touch_the_store(
    repos: LibraryHub, models: Models, tmp_path: Path, name: str, share: bool
) -> None:
    pipeline = load(f"org/{name}", share=share)
    before = files_of_store()
    change(pipeline)
    pipeline.save_pretrained(tmp_path / "mine")
    pipeline.save_pretrained(tmp_path / "mine")
    assert files_of_store() == before
    assert_equal(plainly(tmp_path / "mine"), pipeline)
    assert_equal(load(f"org/{name}", share=share), published(getattr(models, name)))


def test_saving_over_a_copy_made_of_links_does_not_touch_the_store(
    repos: LibraryHub, tmp_path: Path
) -> None:
    """A folder whose files are hard links to blobs, as `cp -al` makes it."""
    pipeline = load("org/first")
    before = files_of_store()
    for path in repos.snapshot("org/first").rglob("*.safetensors"):
        mine = tmp_path / "mine" / path.relative_to(repos.snapshot("org/first"))
        mine.parent.mkdir(parents=True)
        os.link(path.resolve(), mine)
    change(pipeline)
    pipeline.save_pretrained(tmp_path / "mine")
    assert files_of_store() == before
    assert_equal(plainly(tmp_path / "mine"), pipeline)


@pytest.mark.parametrize(("offline", "share"), [(False, True), (True, False)])
class TestSavingIntoTheCache:
    def test_a_model_saved_into_the_snapshot_is_not_taken_for_the_one_of_the_repo(
        self, repos: LibraryHub, models: Models, share: bool, offline: bool
    ) -> None:
        pipeline = load("org/first")
        before = files_of_store()
        change(pipeline)
        pipeline.unet.save_pretrained(repos.snapshot("org/first") / "unet")
        assert files_of_store() == before
        if offline:
            with pytest.raises(DigestMismatchError):
                load("org/first", share=share, local_files_only=True)
        assert_equal(load("org/first", share=share), published(models.first))

    def test_a_pickle_written_through_the_pointer_is_found(
        self, repos: LibraryHub, models: Models, share: bool, offline: bool
    ) -> None:
        import torch

        load("org/pickled")
        path = repos.snapshot("org/pickled") / PICKLE
        assert mode_of(path.resolve()) == 0o444
        path.resolve().chmod(0o644)
        torch.save(published(models.second).unet.state_dict(), path)
        path.resolve().chmod(0o444)
        if offline:
            with pytest.raises(DigestMismatchError, match=PICKLE):
                load("org/pickled", share=share, local_files_only=True)
        assert_equal(load("org/pickled", share=share), published(models.pickled))
        assert not store().verify(full=True).damaged

    def test_a_byte_written_to_a_blob_is_found(
        self, repos: LibraryHub, models: Models, share: bool, offline: bool
    ) -> None:
        load("org/first")
        edit(repos.blob("org/first", OWN_WEIGHTS), b"\1\2\3\4", offset=500_000)
        if offline:
            with pytest.raises(DigestMismatchError, match=OWN_WEIGHTS):
                load("org/first", share=share, local_files_only=True)
        assert_equal(load("org/first", share=share), published(models.first))
        assert not store().verify(full=True).damaged


def test_damage_is_not_lent_to_another_repo(repos: LibraryHub, models: Models) -> None:
    load("org/first")
    edit(repos.blob("org/first", OWN_WEIGHTS), b"\1\2\3\4", offset=500_000)
    repos.hub.add_folder("org/copy", models.first)
    repos.clear()
    assert_equal(load("org/copy"), published(models.first))
    assert repos.weight_gets() == [f"org/copy/{OWN_WEIGHTS}"]


def test_an_object_is_not_shared_any_more_when_its_file_was_written_to(
    repos: LibraryHub, models: Models
) -> None:
    """Its weights lie in a mapping of the file: what is written there is in the object too."""
    held = load("org/first", share=True)
    blob = repos.blob("org/first", OWN_WEIGHTS)
    edit(blob, b"\1\2\3\4" * (blob.stat().st_size // 8), offset=blob.stat().st_size // 2)
    pipeline = load("org/first", share=True)
    assert pipeline.unet is not held.unet
    assert_equal(pipeline, published(models.first))
    assert not store().verify(full=True).damaged
