"""`load_encoders`: what makes latents and embeddings, nothing else, and free again afterwards."""

from __future__ import annotations

import json
import shutil
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

from smartcache.artifacts import compute_key, remember_module
from smartcache.errors import BadKeyError, MissingWeightsError, PretrainedError, UnknownClassError
from smartcache.pretrained import load_encoders
from tests.hub_server.pipelines import OWN_WEIGHTS, SHARED_WEIGHTS, Models
from tests.pretrained.libraries import LibraryHub

if TYPE_CHECKING:
    import torch


pytestmark = [
    pytest.mark.usefixtures("library_hub"),
    # diffusers passes it to huggingface_hub with the config of every model and scheduler.
    pytest.mark.filterwarnings("ignore:The `local_dir_use_symlinks` argument:UserWarning"),
]
ALL = ["text_encoder", "tokenizer", "vae"]


def load(source: str | Path, **arguments: object) -> Any:  # noqa: ANN401 - components are of many classes
    return cast("Any", load_encoders)(source, **arguments)


def embed(pipeline: Any) -> torch.Tensor:  # noqa: ANN401
    import torch

    found = pipeline.encode_prompt("a cat", "cpu", 1, False)[0]
    assert isinstance(found, torch.Tensor)
    return found


@pytest.fixture
def first(library_hub: LibraryHub, models: Models) -> str:
    library_hub.hub.add_folder("org/first", models.first)
    return "org/first"


@pytest.fixture(scope="module")
def seeing(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first pipeline with an image encoder."""
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModelWithProjection

    folder = tmp_path_factory.mktemp("seeing") / "pipeline"
    shutil.copytree(models.first, folder)
    config = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, projection_dim=32, num_hidden_layers=1,
        num_attention_heads=4, image_size=32, patch_size=8,
    )  # fmt: skip
    CLIPVisionModelWithProjection(config).save_pretrained(folder / "image_encoder")
    CLIPImageProcessor(size=32, crop_size=32).save_pretrained(folder / "feature_extractor")
    change_index(
        folder,
        image_encoder=["transformers", "CLIPVisionModelWithProjection"],
        feature_extractor=["transformers", "CLIPImageProcessor"],
    )
    return folder


def change_index(folder: Path, **entries: object) -> None:
    path = folder / "model_index.json"
    index = {**json.loads(path.read_text("utf-8")), **entries}
    path.write_text(json.dumps({name: each for name, each in index.items() if each}), "utf-8")


class TestLoading:
    def test_no_byte_of_anything_else_is_fetched(self, library_hub: LibraryHub, first: str) -> None:
        with load(first) as encoders:
            assert list(encoders) == ALL
        assert library_hub.weight_gets() == [f"{first}/{path}" for path in SHARED_WEIGHTS]
        folders = {str(each.file).split("/")[2] for each in library_hub.hub.gets()}
        assert "unet" not in folders
        assert library_hub.hub.gets(OWN_WEIGHTS) == []

    def test_they_are_those_of_the_pipeline(self, first: str, models: Models) -> None:
        import torch
        from diffusers import DiffusionPipeline

        whole = cast("Any", DiffusionPipeline.from_pretrained(models.first))
        picture = torch.zeros(1, 3, 32, 32)
        with load(first) as encoders, torch.no_grad():
            assert torch.equal(embed(encoders.pipeline), embed(whole))
            latents = encoders.vae.encode(picture).latent_dist.mean
            assert torch.equal(latents, whole.vae.encode(picture).latent_dist.mean)
            assert encoders.pipeline.unet is None
            assert encoders.pipeline.scheduler is not None

    def test_they_are_known_by_name(self, models: Models) -> None:
        with load(models.first) as encoders:
            assert encoders["vae"] is encoders.vae is encoders.pipeline.vae
            assert "vae" in encoders
            assert "unet" not in encoders
            assert len(encoders) == 3
            assert "text_encoder" in dir(encoders)
            with pytest.raises(KeyError):
                encoders["unet"]
            with pytest.raises(AttributeError, match="has no encoder 'unet'"):
                _ = encoders.unet

    @pytest.mark.parametrize(
        ("parts", "names"),
        [
            ("vae", ["vae"]),
            (["text"], ["text_encoder", "tokenizer"]),
            ({"image"}, ["feature_extractor", "image_encoder"]),
            (("image", "text", "vae"), ["feature_extractor", "image_encoder", *ALL]),
        ],
    )
    def test_parts_are_chosen(self, seeing: Path, parts: object, names: list[str]) -> None:
        with load(seeing, parts=parts) as encoders:
            assert list(encoders) == names

    def test_dtype_and_device_are_those_asked_for(self, models: Models) -> None:
        import torch

        with load(models.first, dtype="bf16", device="meta") as encoders:
            assert (encoders.device, encoders.dtype) == (torch.device("meta"), torch.bfloat16)
            assert encoders.text_encoder.device.type == "meta"
            assert encoders.vae.dtype == torch.bfloat16

    def test_one_that_is_not_wanted_is_none(self, models: Models) -> None:
        with load(models.first, text_encoder=None) as encoders:
            assert list(encoders) == list(encoders.fingerprint) == ["tokenizer", "vae"]

    def test_a_variant(self, library_hub: LibraryHub, models: Models) -> None:
        import torch

        library_hub.hub.add_folder("org/halves", models.halves)
        with load("org/halves", variant="fp16", torch_dtype=torch.float16):
            pass
        names = [path.replace(".safetensors", ".fp16.safetensors") for path in SHARED_WEIGHTS]
        assert library_hub.weight_gets() == [f"org/halves/{name}" for name in names]

    def test_all_of_it_is_of_one_commit(self, library_hub: LibraryHub, models: Models) -> None:
        old = library_hub.hub.add_folder("org/name", models.first)
        library_hub.hub.add_folder("org/name", models.second)
        with load("org/name", revision=old.sha):
            pass
        (snapshot,) = (library_hub.repo_folder("org/name") / "snapshots").iterdir()
        assert snapshot.name == old.sha

    def test_offline(self, library_hub: LibraryHub, first: str) -> None:
        with load(first) as encoders:
            known = encoders.fingerprint
        with library_hub.offline(), load(first) as encoders:
            assert encoders.fingerprint == known

    def test_a_pipeline_that_cannot_live_without_the_rest(
        self, models: Models, tmp_path: Path
    ) -> None:
        """Its constructor looks into the VAE: there is no pipeline then, but the encoders are."""
        import torch

        folder = tmp_path / "ldm"
        shutil.copytree(models.halves, folder)
        (folder / "text_encoder").rename(folder / "bert")
        (folder / "vae").rename(folder / "vqvae")
        (folder / "bert" / "model.fp16.safetensors").unlink()
        change_index(
            folder, _class_name="LDMTextToImagePipeline", bert=["transformers", "CLIPTextModel"],
            vqvae=["diffusers", "AutoencoderKL"], text_encoder=None, vae=None,
        )  # fmt: skip
        with load(folder, parts="text", variant="fp16", dtype={"bert": "bf16"}) as encoders:
            assert sorted(encoders) == ["bert", "tokenizer"]
            assert encoders.pipeline is None
            assert encoders.bert.dtype == torch.bfloat16
            assert set(encoders.digests) == {"bert", "tokenizer"}
        with load(folder) as encoders:
            assert type(encoders.pipeline).__name__ == "LDMTextToImagePipeline"


class TestFingerprint:
    def test_equal_encoders_of_other_repos_have_equal_ones(
        self, first: str, models: Models
    ) -> None:
        with load(first) as here, load(models.second) as there:
            assert here.digests == there.digests
            assert here.fingerprint == there.fingerprint
        assert set(here.digests) == set(ALL)

    def test_it_is_plain_and_the_same_on_every_device(self, models: Models) -> None:
        with load(models.first) as here, load(models.first, device="meta") as there:
            assert json.loads(json.dumps(here.fingerprint)) == there.fingerprint
        assert here.fingerprint["vae"] == {"digest": here.digests["vae"], "dtype": "float32"}

    def test_the_dtype_counts(self, models: Models) -> None:
        with load(models.first) as here, load(models.first, dtype="bf16") as there:
            assert here.digests == there.digests
            assert here.fingerprint != there.fingerprint

    @pytest.mark.parametrize(
        ("name", "file"),
        [
            ("tokenizer", "tokenizer/tokenizer_config.json"),
            ("text_encoder", "text_encoder/config.json"),
            ("vae", "vae/diffusion_pytorch_model.safetensors"),
        ],
    )
    def test_what_it_is_made_of_counts(
        self, models: Models, tmp_path: Path, name: str, file: str
    ) -> None:
        from safetensors.torch import load_file, save_file

        folder = tmp_path / "changed"
        shutil.copytree(models.first, folder)
        (folder / "tokenizer" / "README.md").write_text("Another text changes nothing.")
        if file.endswith(".json"):
            config = json.loads((folder / file).read_text("utf-8"))
            (folder / file).write_text(json.dumps({**config, "something": "else"}), "utf-8")
        else:
            tensors = {key: value + 1 for key, value in load_file(folder / file).items()}
            save_file(tensors, folder / file, metadata={"format": "pt"})
        with load(models.first) as here, load(folder) as there:
            pass
        assert {key for key in ALL if here.digests[key] != there.digests[key]} == {name}

    def test_a_component_of_the_callers_is_not_known(self, models: Models) -> None:
        from diffusers import AutoencoderKL

        vae = AutoencoderKL.from_pretrained(models.first, subfolder="vae")
        with load(models.first, vae=vae) as encoders:
            assert encoders.vae is vae
            assert "vae" not in encoders.digests
            with pytest.raises(PretrainedError, match=r"vae of .* was passed in"):
                _ = encoders.fingerprint
        assert vae.device.type == "cpu"


class TestKeys:
    def test_the_key_of_an_encoder_is_that_of_its_fingerprint_until_it_changes(
        self, first: str, models: Models
    ) -> None:
        import torch

        with load(first) as encoders, load(models.second) as others:
            for name in ("text_encoder", "vae"):
                stand_in = torch.nn.ReLU()
                remember_module(stand_in, encoders.fingerprint[name])
                key = compute_key({"encoder": encoders[name]})
                assert key == compute_key({"encoder": others[name]})
                assert key == compute_key({"encoder": stand_in})
                encoders[name]._apply(lambda each: each.clone())  # noqa: SLF001 - as `to` does it
                assert compute_key({"encoder": encoders[name]}) == key
                next(encoders[name].parameters()).data.mul_(1.01)
                assert compute_key({"encoder": encoders[name]}) != key
                others[name].to(torch.bfloat16)
                assert compute_key({"encoder": others[name]}) != key

    def test_it_has_none_when_the_memory_is_free(self, models: Models) -> None:
        with load(models.first, parts="vae") as encoders:
            vae = encoders.vae
        with pytest.raises(BadKeyError, match="weights are not in memory"):
            compute_key(vae)

    def test_a_component_of_the_callers_counts_by_its_weights(self, models: Models) -> None:
        from diffusers import AutoencoderKL

        vae = AutoencoderKL.from_pretrained(models.first, subfolder="vae")
        key = compute_key(AutoencoderKL.from_pretrained(models.second, subfolder="vae"))
        with load(models.first, vae=vae), load(models.first) as encoders:
            assert compute_key(vae) == key != compute_key(encoders.vae)

    def test_a_saved_model_of_diffusers_has_the_key_of_the_one_that_was_made(
        self, tmp_path: Path
    ) -> None:
        import torch
        from diffusers import AutoencoderKL

        made = AutoencoderKL(
            block_out_channels=(8,), down_block_types=("DownEncoderBlock2D",),
            up_block_types=("UpDecoderBlock2D",), norm_num_groups=8,
        )  # fmt: skip
        made.save_pretrained(tmp_path)
        loaded = AutoencoderKL.from_pretrained(tmp_path)
        assert compute_key(loaded) == compute_key(made)
        half = AutoencoderKL.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
        assert compute_key(half) == compute_key(made.to(torch.bfloat16)) != compute_key(loaded)
        key = compute_key(loaded)
        loaded.register_to_config(scaling_factor=2.0)
        assert compute_key(loaded) != key

    def test_a_saved_model_of_transformers_has_the_key_of_the_one_that_was_made(
        self, tmp_path: Path
    ) -> None:
        import torch
        from transformers import CLIPTextConfig, CLIPTextModel

        config = CLIPTextConfig(
            vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2, bos_token_id=0, eos_token_id=1,
        )  # fmt: skip
        made = CLIPTextModel(config)
        key = compute_key(made)
        made.save_pretrained(tmp_path)
        loaded = CLIPTextModel.from_pretrained(tmp_path, attn_implementation="eager")
        assert compute_key(loaded) == compute_key(made) == key
        half = CLIPTextModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
        assert compute_key(half) == compute_key(made.to(torch.bfloat16)) != key
        loaded.config.hidden_act = "gelu"
        assert compute_key(loaded) != key


class TestRelease:
    def test_the_memory_is_free_though_somebody_holds_an_encoder(self, models: Models) -> None:
        import torch

        with load(models.first) as encoders:
            vae, text_encoder = encoders.vae, encoders.text_encoder
            weights = weakref.ref(next(vae.parameters()))
        assert weights() is None
        assert {each.device.type for each in vae.parameters()} == {"meta"}
        with pytest.raises(PretrainedError, match=r"vae of .* can no longer be used"):
            vae.encode(torch.zeros(1, 3, 32, 32))
        with pytest.raises(PretrainedError, match=r"text_encoder of .* can no longer be used"):
            text_encoder(torch.zeros(1, 4, dtype=torch.int64))

    def test_nothing_is_given_out_afterwards_but_the_digests(self, models: Models) -> None:
        with load(models.first) as encoders:
            pass
        for name in ("vae", "pipeline"):
            with pytest.raises(PretrainedError, match="can no longer be used") as caught:
                getattr(encoders, name)
            assert "with" in caught.value.hint
        with pytest.raises(PretrainedError, match="can no longer be used"):
            _ = encoders["vae"]
        assert set(encoders.fingerprint) == set(ALL)

    def test_it_happens_when_the_block_fails_too(self, models: Models) -> None:
        encoders = load(models.first)
        vae = encoders.vae
        with pytest.raises(ZeroDivisionError), encoders:
            raise ZeroDivisionError
        assert vae.device.type == "meta"

    def test_closing_needs_no_block_and_may_be_repeated(self, models: Models) -> None:
        encoders = load(models.first)
        vae = encoders.vae
        encoders.close()
        encoders.close()
        assert vae.device.type == "meta"

    @pytest.mark.cuda
    def test_the_device_is_as_empty_as_before(self, models: Models) -> None:
        import torch

        with load(models.first) as encoders:
            assert encoders.device.type == "cuda"
            kept = encoders.vae
            assert torch.cuda.memory_allocated() > 0
        assert torch.cuda.memory_allocated() == 0
        assert kept.device.type == "meta"


class TestErrors:
    @pytest.mark.parametrize("parts", ["unet", [], ["text", "audio"]])
    def test_parts_are_checked(self, models: Models, parts: object) -> None:
        with pytest.raises(ValueError, match="parts are among 'text', 'image', 'vae'"):
            load(models.first, parts=parts)

    def test_a_pipeline_without_any_of_the_parts(self, models: Models) -> None:
        with pytest.raises(MissingWeightsError, match=r"none of the parts image: .* unet"):
            load(models.first, parts="image")

    def test_a_model_is_no_pipeline(self, models: Models) -> None:
        with pytest.raises(UnknownClassError, match=r"no model_index\.json") as caught:
            load(models.language)
        assert "from_pretrained" in caught.value.hint

    @pytest.mark.parametrize("argument", [{"share": True}, {"device_map": "auto"}])
    def test_what_is_freed_cannot_be_shared(
        self, models: Models, argument: dict[str, object]
    ) -> None:
        with pytest.raises(TypeError, match="it frees what it has loaded"):
            load(models.first, **argument)

    def test_the_errors_of_the_hub_pass_unchanged(
        self, library_hub: LibraryHub, first: str
    ) -> None:
        with pytest.raises(RepositoryNotFoundError):
            load("org/none")
        with library_hub.offline(), pytest.raises(LocalEntryNotFoundError):
            load(first)
