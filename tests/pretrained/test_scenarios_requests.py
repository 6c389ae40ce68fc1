"""What the Hub is asked for, and with whose rights."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from huggingface_hub.errors import RepositoryNotFoundError

from tests.hub_server.pipelines import OWN_WEIGHTS, SHARED_WEIGHTS, Models, files_of
from tests.pretrained.libraries import LibraryHub
from tests.pretrained.scenarios import (
    Way,
    assert_equal,
    assert_sound,
    load,
    plainly,
    published,
    store,
    tensors,
)

# diffusers passes it on whenever it fetches a config of its own.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The `local_dir_use_symlinks` argument:UserWarning",
)
CODE = """
import torch
from transformers import PreTrainedConfig, PreTrainedModel


class OwnConfig(PreTrainedConfig):
    model_type = "own"


class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.layer = torch.nn.Linear(200, 200)
        self.post_init()

    def forward(self, x):
        return self.layer(x)
"""


@pytest.fixture
def repos(library_hub: LibraryHub, models: Models) -> LibraryHub:
    library_hub.hub.add_folder("org/first", models.first)
    library_hub.hub.add_folder("org/language", models.language)
    return library_hub


def asked_by(library_hub: LibraryHub) -> Counter[str]:
    """Return what was asked since the last `clear`, whatever the order."""
    return Counter(f"{each.method} {each.path}" for each in library_hub.hub.requests)


class TestARepeatedLoad:
    """Of what is in the cache; the library alone is the measure."""

    @pytest.mark.parametrize(("way", "share"), [("function", False), ("flag", True)])
    def test_of_a_pipeline_asks_no_more_than_the_library(
        self, repos: LibraryHub, way: Way, share: bool
    ) -> None:
        load("org/first", way=way, share=share)
        repos.clear()
        plainly("org/first")
        plain = asked_by(repos)
        repos.clear()
        load("org/first", way=way, share=share)
        assert asked_by(repos).total() <= plain.total()
        assert repos.hub.gets() == []

    @pytest.mark.parametrize(("way", "share"), [("function", True), ("flag", False)])
    def test_of_a_model_asks_no_more_than_the_library(
        self, repos: LibraryHub, way: Way, share: bool
    ) -> None:
        from transformers import BertModel

        load("org/language", way=way, cls=BertModel, share=share)
        repos.clear()
        plainly("org/language", BertModel)
        plain = asked_by(repos)
        repos.clear()
        load("org/language", way=way, cls=BertModel, share=share)
        assert asked_by(repos).total() <= plain.total()
        assert repos.hub.gets() == []


class TestRights:
    def test_the_token_opens_a_gated_repo(self, library_hub: LibraryHub, models: Models) -> None:
        hub = library_hub.hub
        hub.add("org/gated", files_of(models.first), gated=True)
        hub.tokens = {"hf_good": {"org/gated"}}
        hub.cdn = True
        pipeline = load("org/gated", token="hf_good", share=True)  # noqa: S106
        assert_equal(pipeline, published(models.first))
        assert not any(each.authorized for each in hub.requests if each.origin == "cdn")
        assert_sound(library_hub)

    @pytest.mark.parametrize("share", [False, True])
    def test_without_it_known_bytes_are_no_way_in(
        self, library_hub: LibraryHub, models: Models, share: bool
    ) -> None:
        library_hub.hub.add("org/gated", files_of(models.first), gated=True)
        library_hub.hub.add_folder("org/first", models.first)
        load("org/first")
        with pytest.raises(OSError, match="restricted") as ours:
            load("org/gated", share=share)
        with pytest.raises(OSError, match="restricted") as plain:
            plainly("org/gated")
        assert ours.type is plain.type
        assert library_hub.blobs("org/gated") == {}

    @pytest.mark.parametrize("share", [False, True])
    def test_a_repo_that_does_not_exist_is_the_librarys_error(
        self, library_hub: LibraryHub, share: bool
    ) -> None:
        with pytest.raises(OSError, match="org/nothing") as ours:
            load("org/nothing", way="flag", share=share)
        with pytest.raises(OSError, match="org/nothing") as plain:
            plainly("org/nothing")
        assert ours.type is plain.type
        with pytest.raises(RepositoryNotFoundError, match="org/nothing"):
            load("org/nothing", share=share)
        assert not library_hub.repo_folder("org/nothing").exists()


def test_code_of_the_repo_is_run_by_the_library_alone(
    library_hub: LibraryHub, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModel

    weights = {"layer.weight": torch.rand(200, 200), "layer.bias": torch.rand(200)}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = {
        "model_type": "own",
        "architectures": ["OwnModel"],
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"},
    }
    files = {"config.json": json.dumps(config).encode(), "own.py": CODE.encode()}
    library_hub.hub.add("org/own", {**files, "model.safetensors": tmp_path / "model.safetensors"})
    first = load("org/own", cls=AutoModel, trust_remote_code=True, share=True)
    assert tensors(first)["layer.weight"].equal(weights["layer.weight"])
    shutil.rmtree(library_hub.cache_dir)
    library_hub.clear()
    second = load("org/own", cls=AutoModel, trust_remote_code=True, share=True)
    assert second is not first
    assert_equal(second, first)
    assert library_hub.weight_gets() == []


# Said by torch when transformers' module of VITS is imported.
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_a_task_finds_its_pipeline(library_hub: LibraryHub, models: Models) -> None:
    from diffusers import AutoPipelineForImage2Image, AutoPipelineForText2Image

    library_hub.hub.add_folder("org/first", models.first)
    library_hub.hub.add_folder("org/second", models.second)
    first = load("org/first", cls=AutoPipelineForText2Image, share=True)
    library_hub.clear()
    second = load("org/second", cls=AutoPipelineForImage2Image, share=True)
    assert type(first).__name__ == "StableDiffusionPipeline"
    assert type(second).__name__ == "StableDiffusionImg2ImgPipeline"
    assert library_hub.weight_gets() == [f"org/second/{OWN_WEIGHTS}"]
    assert first.vae is second.vae
    assert_equal(second, published(models.second))


def test_what_was_loaded_is_kept_from_prune_until_the_cache_forgets_it(
    library_hub: LibraryHub, models: Models
) -> None:
    library_hub.hub.add_folder("org/first", models.first)
    load("org/first")
    assert store().plan_prune().victims == ()
    shutil.rmtree(library_hub.repo_folder("org/first"))
    assert len(store().plan_prune().victims) == len((*SHARED_WEIGHTS, OWN_WEIGHTS))
