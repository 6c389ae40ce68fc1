"""Checkpoints of one file: by path, by name and by address, through the store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError

import smartcache
from smartcache.errors import MissingWeightsError
from smartcache.pretrained.api import repo_file
from tests.hub_server.pipelines import Models
from tests.pretrained.libraries import LibraryHub
from tests.store.files import inode_of

if TYPE_CHECKING:
    import torch


# diffusers passes it to huggingface_hub with the config of every model.
pytestmark = pytest.mark.filterwarnings("ignore:The `local_dir_use_symlinks` argument:UserWarning")
VAE = "vae/diffusion_pytorch_model.safetensors"
FILE = "all/vae.safetensors"


def load(source: str | Path, **arguments: object) -> Any:  # noqa: ANN401 - of many classes
    return cast("Any", smartcache.from_single_file)(source, **arguments)


def is_whole(vae: torch.nn.Module, models: Models) -> bool:
    """Whether it has the weights of the first pipeline's VAE."""
    import torch
    from safetensors.torch import load_file

    expected = load_file(models.first / VAE)
    found = vae.state_dict()
    return all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.fixture
def as_vae(models: Models) -> dict[str, object]:
    """What diffusers needs to know of the file."""
    return {"config": models.first, "subfolder": "vae"}


@pytest.fixture
def given(models: Models) -> dict[str, object]:
    """What a pipeline needs besides the VAE that is in the file."""
    from diffusers import UNet2DConditionModel
    from transformers import CLIPTextModel

    return {
        "unet": UNet2DConditionModel.from_pretrained(models.first, subfolder="unet"),
        "text_encoder": CLIPTextModel.from_pretrained(models.first / "text_encoder"),
        "safety_checker": None,
    }


@pytest.fixture
def file(library_hub: LibraryHub, models: Models) -> str:
    """A file of a repo, by name."""
    library_hub.hub.add("org/name", {FILE: models.first / VAE, "README.md": b"#"})
    return f"org/name/{FILE}"


SITE = "https://huggingface.co"


class TestNames:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("org/name/model.safetensors", ("model.safetensors", None)),
            ("org/name/a/b/model.ckpt", ("a/b/model.ckpt", None)),
            ("org/name/blob/model.ckpt", ("blob/model.ckpt", None)),
            (f"{SITE}/org/name/blob/main/a/m.gguf", ("a/m.gguf", "main")),
            ("https://hf.co/org/name/resolve/v1/m.bin?download=true", ("m.bin", "v1")),
            ("huggingface.co/org/name/blob/main/m.pt", ("m.pt", "main")),
            (f"{SITE}/org/name/m.pt", ("m.pt", None)),
            (f"{SITE}/org/name/resolve/refs%2Fpr%2F3/a%20b/m.pt", ("a b/m.pt", "refs/pr/3")),
            (f"{SITE}/org/name/blob/refs/pr/3/m.pt", ("m.pt", "refs/pr/3")),
        ],
    )
    def test_a_file_of_the_hub_has_names(self, text: str, expected: tuple[str, str | None]) -> None:
        assert repo_file(text) == ("org/name", *expected)

    @pytest.mark.parametrize(
        "text",
        [
            "org/name",
            "model.safetensors",
            "org/name/README.md",
            "./models/a/model.ckpt",
            "/models/a/model.ckpt",
            "C:\\models\\a.ckpt",
            "https://example.org/org/name/blob/main/model.ckpt",
            "ftp://huggingface.co/org/name/blob/main/model.ckpt",
        ],
    )
    def test_other_texts_are_none(self, text: str) -> None:
        assert repo_file(text) is None

    def test_the_endpoint_of_this_process_is_the_hub(self, library_hub: LibraryHub) -> None:
        address = f"{library_hub.hub.url}/org/name/resolve/main/m.pt"
        assert repo_file(address) == ("org/name", "m.pt", "main")


@pytest.mark.usefixtures("library_hub")
class TestLoading:
    def test_a_file_of_a_repo_comes_through_the_store(
        self, library_hub: LibraryHub, models: Models, file: str, as_vae: dict[str, object]
    ) -> None:
        vae = load(file, **as_vae)
        assert type(vae).__name__ == "AutoencoderKL"
        assert is_whole(vae, models)
        library_hub.hub.add("org/other", {"vae.safetensors": models.first / VAE})
        library_hub.clear()
        load("org/other/vae.safetensors", **as_vae)
        assert library_hub.weight_gets() == []
        there = library_hub.snapshot("org/other") / "vae.safetensors"
        here = library_hub.snapshot("org/name") / FILE
        assert inode_of(there.resolve()) == inode_of(here.resolve())

    def test_the_revision_is_that_of_the_address_or_the_argument(
        self, library_hub: LibraryHub, models: Models, file: str, as_vae: dict[str, object]
    ) -> None:
        old = library_hub.commit("org/name")
        library_hub.hub.add("org/name", {"README.md": b"It is gone."})
        with pytest.raises(EntryNotFoundError):
            load(file, **as_vae)
        address = f"{library_hub.hub.url}/org/name/resolve/{old.sha}/{FILE}"
        assert is_whole(load(address, **as_vae), models)
        assert is_whole(load(file, revision=old.sha, **as_vae), models)

    def test_a_file_on_this_disk_is_loaded_where_it_is(
        self, library_hub: LibraryHub, models: Models, as_vae: dict[str, object]
    ) -> None:
        assert is_whole(load(models.first / VAE, **as_vae), models)
        assert library_hub.hub.requests == []

    def test_a_class_may_be_named(self, models: Models, as_vae: dict[str, object]) -> None:
        from diffusers import AutoencoderKL

        for cls in (AutoencoderKL, "AutoencoderKL"):
            assert is_whole(load(models.first / VAE, cls=cls, **as_vae), models)

    def test_dtype_and_device(self, models: Models, as_vae: dict[str, object]) -> None:
        import torch

        vae = load(models.first / VAE, dtype="bf16", device="meta", **as_vae)
        assert (vae.dtype, vae.device.type) == (torch.bfloat16, "meta")

    def test_a_pipeline(self, models: Models, file: str, given: dict[str, object]) -> None:
        pipeline = load(file, config=models.first, encoders_device="meta", **given)
        assert type(pipeline).__name__ == "StableDiffusionPipeline"
        assert (pipeline.vae.device.type, pipeline.unet.device.type) == ("meta", "cpu")
        assert pipeline.unet is given["unet"]

    def test_without_a_word_it_is_what_the_library_takes_it_for(
        self, library_hub: LibraryHub, models: Models, file: str, given: dict[str, object]
    ) -> None:
        """For diffusers every checkpoint that it does not recognise is a Stable Diffusion 1.5."""
        name = "stable-diffusion-v1-5/stable-diffusion-v1-5"
        library_hub.hub.add_folder(name, models.first)
        pipeline = load(file, **given)
        assert type(pipeline).__name__ == "StableDiffusionPipeline"
        assert is_whole(pipeline.vae, models)
        assert library_hub.weight_gets() == [file]

    def test_without_the_cache_the_store_is_not_touched(
        self, models: Models, file: str, as_vae: dict[str, object]
    ) -> None:
        assert is_whole(load(file, smart_cache=False, **as_vae), models)
        assert is_whole(load(models.first / VAE, smart_cache=False, **as_vae), models)
        assert not os.path.exists(os.environ["SMARTCACHE_HOME"])

    def test_the_method_of_a_library_takes_the_flag(
        self, library_hub: LibraryHub, models: Models, file: str
    ) -> None:
        """With weights too: a state dict instead of a path is left to the library."""
        from diffusers import AutoencoderKL
        from safetensors.torch import load_file

        config = {"config": str(models.first), "subfolder": "vae"}
        with smartcache.enable():
            load_it = cast("Any", AutoencoderKL.from_single_file)
            assert is_whole(load_it(file, smart_cache=True, **config), models)
            named = {"pretrained_model_link_or_path_or_dict": file}
            assert is_whole(load_it(smart_cache=True, **named, **config), models)
            weights = load_file(models.first / VAE)
            assert is_whole(load_it(weights, smart_cache=True, **config), models)
        assert library_hub.weight_gets() == [file]


@pytest.mark.usefixtures("library_hub")
class TestErrors:
    def test_the_errors_of_the_hub_pass_unchanged(
        self, file: str, as_vae: dict[str, object]
    ) -> None:
        with pytest.raises(RepositoryNotFoundError):
            load("org/none/model.safetensors", **as_vae)
        with pytest.raises(EntryNotFoundError):
            load(file.replace("vae", "none"), **as_vae)

    def test_what_is_no_file_is_said_before_the_library_guesses(self) -> None:
        with pytest.raises(MissingWeightsError, match="neither a file nor the name of one"):
            load("./nothing.safetensors")

    def test_a_class_that_cannot(self, models: Models) -> None:
        with pytest.raises(TypeError, match="BertModel has no from_single_file"):
            load(models.first / VAE, cls="BertModel")

    def test_the_library_answers_for_names_that_are_none(self, as_vae: dict[str, object]) -> None:
        with pytest.raises(ValueError, match="valid URL"):
            load("nothing.safetensors", cls="AutoencoderKL", **as_vae)
