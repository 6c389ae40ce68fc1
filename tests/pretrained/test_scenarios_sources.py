"""Every kind of repo, and every place that weights come from.

The same call without smartcache, for the folder that was published, says what is right.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from smartcache.errors import DigestMismatchError
from tests.hub_server.pipelines import OWN_WEIGHTS, SHARED_WEIGHTS, Models, files_of
from tests.pretrained.libraries import LibraryHub
from tests.pretrained.scenarios import (
    assert_equal,
    assert_sound,
    load,
    plainly,
    published,
    store,
    tensors,
)
from tests.store.files import inode_of

ALL_WEIGHTS = (*SHARED_WEIGHTS, OWN_WEIGHTS)
# diffusers passes it on whenever it loads a single model from the Hub.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The `local_dir_use_symlinks` argument:UserWarning",
)


def folder_of(models: Models, name: str, tmp_path: Path) -> Path:
    """Return a folder of models by its name; "mixed" has both formats."""
    if name != "mixed":
        found = getattr(models, name)
        assert isinstance(found, Path)
        return found
    mixed = tmp_path / "mixed"
    for path, source in {**files_of(models.pickled), **files_of(models.first)}.items():
        (mixed / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(str(source), mixed / path)
    return mixed


PIPELINES: list[tuple[str, dict[str, Any]]] = [
    ("halves", {"variant": "fp16", "dtype": "float16"}),
    ("sharded", {}),
    ("sharded", {"variant": "fp16"}),
    ("pickled", {}),
    ("mixed", {"use_safetensors": False}),
    ("mixed", {"use_safetensors": True, "low_cpu_mem_usage": True}),
    ("first", {"low_cpu_mem_usage": False}),
    ("first", {"device_map": "cpu"}),
    ("first", {"safety_checker": None, "vae": None}),
]


@pytest.mark.parametrize(("name", "how"), PIPELINES, ids=str)
def test_a_pipeline_is_what_the_library_makes_of_the_folder(
    library_hub: LibraryHub, models: Models, tmp_path: Path, name: str, how: dict[str, Any]
) -> None:
    import torch

    if "dtype" in how:
        how = {**how, "dtype": torch.float16}
    folder = folder_of(models, name, tmp_path)
    library_hub.hub.add_folder("org/name", folder)
    plain = plainly(folder, **how)
    assert_equal(load("org/name", **how), plain)
    fetched = library_hub.weight_gets()
    assert len(fetched) == len(set(fetched))
    assert fetched != []
    assert_sound(library_hub)
    shutil.rmtree(library_hub.cache_dir)
    library_hub.clear()
    again = load("org/name", share="vae" not in how, **how)
    assert library_hub.weight_gets() == []
    assert_equal(again, plain)
    assert_sound(library_hub)


MODELS: list[tuple[str, dict[str, Any]]] = [
    ("language", {"device_map": "cpu"}),
    ("language", {"device_map": {"": "cpu"}, "dtype": "float16"}),
    ("language", {"low_cpu_mem_usage": False}),
    ("language_sharded", {}),
    ("language_sharded", {"device_map": "auto"}),
    ("language_pickled", {}),
]


@pytest.mark.parametrize(("name", "how"), MODELS, ids=str)
def test_a_model_is_what_the_library_makes_of_the_folder(
    library_hub: LibraryHub, models: Models, tmp_path: Path, name: str, how: dict[str, Any]
) -> None:
    from transformers import AutoModel

    folder = folder_of(models, name, tmp_path)
    library_hub.hub.add_folder("org/name", folder)
    plain = plainly(folder, AutoModel, **how)
    assert_equal(load("org/name", cls=AutoModel, **how), plain)
    assert library_hub.weights_fetched() > 0
    shutil.rmtree(library_hub.cache_dir)
    library_hub.clear()
    assert_equal(load("org/name", cls=AutoModel, share=True, **how), plain)
    assert library_hub.weight_gets() == []
    assert_sound(library_hub)


class TestWithoutTheHub:
    @pytest.mark.parametrize("share", [False, True])
    def test_what_was_loaded_before_is_loaded_again(
        self, library_hub: LibraryHub, models: Models, share: bool
    ) -> None:
        library_hub.hub.add_folder("org/first", models.first)
        load("org/first")
        library_hub.clear()
        with library_hub.offline():
            pipeline = load("org/first", share=share)
        assert_equal(pipeline, published(models.first))
        assert_equal(load("org/first", local_files_only=True, share=share), pipeline)
        assert library_hub.hub.requests == []

    def test_the_library_says_what_is_missing(
        self, library_hub: LibraryHub, models: Models
    ) -> None:
        """Also where the store has the bytes: nobody knows offline what a repo consists of."""
        library_hub.hub.add_folder("org/first", models.first)
        library_hub.hub.add_folder("org/second", models.second)
        load("org/first")
        library_hub.clear()
        with library_hub.offline():
            with pytest.raises(OSError, match="org/second") as ours:
                load("org/second", way="flag")
            with pytest.raises(OSError, match="org/second") as plain:
                plainly("org/second")
            with pytest.raises(OSError, match="org/second"):
                load("org/second")
        assert (ours.type, str(ours.value)) == (plain.type, str(plain.value))
        assert library_hub.hub.requests == []

    def test_a_cache_that_was_made_without_smartcache_is_used(
        self, library_hub: LibraryHub, models: Models
    ) -> None:
        library_hub.hub.add_folder("org/first", models.first)
        plainly("org/first")
        library_hub.clear()
        with library_hub.offline():
            assert_equal(load("org/first"), published(models.first))
        assert library_hub.hub.requests == []

    def test_a_hub_that_does_not_answer_is_not_needed(
        self, library_hub: LibraryHub, models: Models
    ) -> None:
        library_hub.hub.add_folder("org/first", models.first)
        load("org/first")
        library_hub.hub.close()
        assert_equal(load("org/first"), published(models.first))


class TestFolders:
    @pytest.mark.parametrize("share", [False, True])
    def test_a_folder_is_loaded_as_it_is(
        self, library_hub: LibraryHub, models: Models, share: bool
    ) -> None:
        before = {path: path.stat() for path in models.first.rglob("*")}
        assert_equal(load(models.first, share=share), published(models.first))
        assert library_hub.hub.requests == []
        assert {path: path.stat() for path in models.first.rglob("*")} == before

    def test_equal_components_of_a_folder_and_a_repo_are_shared(
        self, library_hub: LibraryHub, models: Models
    ) -> None:
        library_hub.hub.add_folder("org/second", models.second)
        local, remote = load(models.first, share=True), load("org/second", share=True)
        assert local.text_encoder is remote.text_encoder
        assert local.vae is remote.vae
        assert local.unet is not remote.unet

    def test_a_path_of_the_cache_is_a_folder_too(
        self, library_hub: LibraryHub, models: Models
    ) -> None:
        library_hub.hub.add_folder("org/first", models.first)
        load("org/first")
        library_hub.clear()
        assert_equal(load(library_hub.snapshot("org/first")), published(models.first))
        assert library_hub.hub.requests == []


@pytest.mark.parametrize("share", [False, True])
def test_a_revision_is_a_branch_a_tag_or_a_commit(
    library_hub: LibraryHub, models: Models, share: bool
) -> None:
    hub = library_hub.hub
    old = hub.add("org/name", files_of(models.first), tags=["v1"]).sha
    hub.add("org/name", files_of(models.second), revision="next")
    first, second = published(models.first), published(models.second)
    loaded = [load("org/name", revision=each, share=share) for each in ("v1", old, "main", "next")]
    for pipeline, wanted in zip(loaded, (first, first, first, second), strict=True):
        assert_equal(pipeline, wanted)
    etags = [each.etag for each in (library_hub.commit("org/name", r) for r in ("main", "next"))]
    assert len(library_hub.weight_gets()) == len(ALL_WEIGHTS) + 1
    assert (loaded[0].unet is loaded[1].unet) == share
    assert loaded[0].unet is not loaded[3].unet
    assert etags[0](OWN_WEIGHTS) != etags[1](OWN_WEIGHTS)
    assert_sound(library_hub)


def test_a_branch_that_moves_on_is_followed(library_hub: LibraryHub, models: Models) -> None:
    library_hub.hub.add_folder("org/name", models.first)
    load("org/name", share=True)
    library_hub.hub.add_folder("org/name", models.second)
    library_hub.clear()
    pipeline = load("org/name", share=True)
    assert_equal(pipeline, published(models.second))
    assert library_hub.weight_gets() == [f"org/name/{OWN_WEIGHTS}"]
    assert_sound(library_hub)


def test_force_download_fetches_again_and_shares_again(
    library_hub: LibraryHub, models: Models
) -> None:
    """A model: a pipeline of diffusers fetches its weights again for no argument."""
    from transformers import AutoModel

    library_hub.hub.add_folder("org/language", models.language)
    load("org/language", cls=AutoModel)
    library_hub.clear()
    again = load("org/language", cls=AutoModel, force_download=True)
    assert_equal(again, plainly(models.language, AutoModel))
    assert library_hub.weight_gets() == ["org/language/model.safetensors"]
    spot = library_hub.blob("org/language", "model.safetensors")
    blob = store().find("sha256", spot.name)
    assert blob is not None
    assert inode_of(store().path_of(blob.digest)) == inode_of(spot)
    assert_sound(library_hub)


def test_what_force_download_brings_is_proven_each_time(
    library_hub: LibraryHub, models: Models
) -> None:
    """A new file may get the inode number of one that was replaced a moment ago."""
    from transformers import AutoModel

    library_hub.hub.add_folder("org/language", models.language)
    load("org/language", cls=AutoModel)
    for _ in range(3):
        library_hub.hub.faults.wrong_bytes("model.safetensors", times=1)
        with pytest.raises(DigestMismatchError):
            load("org/language", cls=AutoModel, force_download=True)
        again = load("org/language", cls=AutoModel)
    assert_equal(again, plainly(models.language, AutoModel))


def test_a_cache_on_another_filesystem_gets_copies_of_what_is_known(
    library_hub: LibraryHub, models: Models, elsewhere: Path
) -> None:
    library_hub.hub.add_folder("org/first", models.first)
    library_hub.hub.add_folder("org/second", models.second)
    load("org/first")
    library_hub.clear()
    pipeline = load("org/second", cache_dir=elsewhere / "hf")
    assert_equal(pipeline, published(models.second))
    assert library_hub.weight_gets() == [f"org/second/{OWN_WEIGHTS}"]
    (folder,) = (elsewhere / "hf").glob("models--*")
    used = {path.resolve().name for path in (folder / "snapshots").rglob("*")}
    assert set(os.listdir(folder / "blobs")) <= used


def test_a_cache_without_symlinks_is_used_as_it_is(library_hub: LibraryHub, models: Models) -> None:
    """As on Windows: huggingface_hub puts the files themselves into the snapshot."""
    library_hub.hub.add_folder("org/first", models.first)
    library_hub.hub.add_folder("org/second", models.second)
    with library_hub.set(HF_HUB_DISABLE_SYMLINKS="1"):
        load("org/first")
        library_hub.clear()
        assert_equal(load("org/second"), published(models.second))
        assert library_hub.weights_fetched() <= sum(map(models.size, ALL_WEIGHTS))
        library_hub.clear()
        assert_equal(load("org/second", share=True), published(models.second))
        assert library_hub.weight_gets() == []
    report = store().verify(full=True)
    assert (report.damaged, report.stray) == ([], [])


class TestWhereTheCacheIs:
    @pytest.fixture
    def known(self, library_hub: LibraryHub, models: Models) -> LibraryHub:
        library_hub.hub.add_folder("org/first", models.first)
        library_hub.hub.add_folder("org/second", models.second)
        load("org/first")
        library_hub.clear()
        return library_hub

    def assert_only_the_new_is_fetched(self, library_hub: LibraryHub, place: Path) -> None:
        assert library_hub.weight_gets() == [f"org/second/{OWN_WEIGHTS}"]
        (folder,) = place.glob("models--org--second")
        used = {path.resolve().name for path in (folder / "snapshots").rglob("*")}
        assert set(os.listdir(folder / "blobs")) <= used

    def test_the_variable_says(self, known: LibraryHub, tmp_path: Path) -> None:
        with known.set(HF_HUB_CACHE=str(tmp_path / "mine")):
            load("org/second")
        self.assert_only_the_new_is_fetched(known, tmp_path / "mine")

    def test_the_argument_is_relative(
        self, known: LibraryHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        load("org/second", cache_dir="mine")
        self.assert_only_the_new_is_fetched(known, tmp_path / "mine")

    def test_it_is_behind_a_symlink(self, known: LibraryHub, tmp_path: Path) -> None:
        (tmp_path / "disk").mkdir()
        (tmp_path / "mine").symlink_to(tmp_path / "disk")
        load("org/second", cache_dir=tmp_path / "mine")
        self.assert_only_the_new_is_fetched(known, tmp_path / "disk")

    def test_it_was_filled_without_smartcache(
        self, known: LibraryHub, models: Models, tmp_path: Path
    ) -> None:
        plainly("org/second", cache_dir=tmp_path / "mine")
        known.clear()
        pipeline = load("org/second", cache_dir=tmp_path / "mine")
        assert_equal(pipeline, published(models.second))
        assert known.weight_gets() == []

    def test_it_has_a_part_of_it(self, known: LibraryHub, models: Models, tmp_path: Path) -> None:
        from diffusers import UNet2DConditionModel

        plainly("org/second", UNet2DConditionModel, subfolder="unet", cache_dir=tmp_path / "mine")
        known.clear()
        pipeline = load("org/second", cache_dir=tmp_path / "mine")
        assert_equal(pipeline, published(models.second))
        assert known.weight_gets() == []


class TestNames:
    def test_a_repo_without_an_owner(self, library_hub: LibraryHub, models: Models) -> None:
        from transformers import AutoModel

        library_hub.hub.add_folder("bert", models.language)
        model = load("bert", cls=AutoModel)
        assert_equal(model, plainly(models.language, AutoModel))

    def test_a_folder_of_that_name_comes_first(
        self,
        library_hub: LibraryHub,
        models: Models,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        shutil.copytree(models.first, tmp_path / "org" / "name")
        library_hub.hub.add_folder("org/name", models.second)
        assert_equal(load("org/name"), published(models.first))
        assert library_hub.hub.requests == []

    def test_a_branch_with_a_slash(self, library_hub: LibraryHub, models: Models) -> None:
        library_hub.hub.add("org/name", files_of(models.first))
        library_hub.hub.add("org/name", files_of(models.second), revision="refs/pr/1")
        pipeline = load("org/name", revision="refs/pr/1")
        assert_equal(pipeline, published(models.second))
        library_hub.clear()
        assert_equal(load("org/name"), published(models.first))
        assert library_hub.weight_gets() == [f"org/name/{OWN_WEIGHTS}"]
        assert_sound(library_hub)


def test_a_store_that_cannot_be_used_is_said_and_the_library_loads_by_itself(
    library_hub: LibraryHub,
    models: Models,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SMARTCACHE_HOME", str(tmp_path / "file" / "store"))
    library_hub.hub.add_folder("org/first", models.first)
    with caplog.at_level(logging.WARNING, "smartcache"):
        pipeline = load("org/first")
    assert_equal(pipeline, published(models.first))
    (record,) = [each for each in caplog.records if each.name.startswith("smartcache")]
    assert "smartcache is not used" in record.getMessage()
    assert tensors(pipeline)
