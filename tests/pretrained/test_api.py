"""`smartcache.from_pretrained`: what the libraries load, by one name, and placed where it goes."""

from __future__ import annotations

import os
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import pytest

import smartcache
from smartcache.pretrained.call import dtype_arguments
from tests.hub_server.pipelines import OWN_WEIGHTS, SHARED_WEIGHTS, Models
from tests.pretrained.libraries import LibraryHub

pytestmark = [
    pytest.mark.usefixtures("library_hub"),
    # diffusers passes it to huggingface_hub with the config of every model and scheduler.
    pytest.mark.filterwarnings("ignore:The `local_dir_use_symlinks` argument:UserWarning"),
]


def load(source: str | Path, **arguments: object) -> Any:  # noqa: ANN401 - of many classes
    """Call it as users do, who know what they load."""
    return cast("Any", smartcache.from_pretrained)(source, **arguments)


def name_of(value: object) -> str:
    return type(value).__name__


def devices(pipeline: Any) -> dict[str, str]:  # noqa: ANN401
    names = ("text_encoder", "unet", "vae")
    return {name: getattr(pipeline, name).device.type for name in names}


class Recorder:
    """A class of the user's own that shows what reaches it."""

    @classmethod
    def from_pretrained(cls, *args: object, **kwargs: object) -> dict[str, object]:
        return {"source": args, **kwargs}


class TestKinds:
    def test_a_pipeline(self, library_hub: LibraryHub, models: Models) -> None:
        library_hub.hub.add_folder("org/first", models.first)
        pipeline = load("org/first")
        assert name_of(pipeline) == "StableDiffusionPipeline"
        picture = pipeline("a cat", num_inference_steps=1, height=32, width=32, output_type="np")
        assert picture.images.shape == (1, 32, 32, 3)

    @pytest.mark.parametrize(
        ("subfolder", "expected"),
        [
            ("unet", "UNet2DConditionModel"),
            ("text_encoder", "CLIPTextModel"),
            ("tokenizer", "CLIPTokenizer"),
            ("scheduler", "DDIMScheduler"),
        ],
    )
    def test_a_part_of_a_pipeline(
        self, library_hub: LibraryHub, models: Models, subfolder: str, expected: str
    ) -> None:
        library_hub.hub.add_folder("org/first", models.first)
        assert name_of(load("org/first", subfolder=subfolder)) == expected
        paths = (*SHARED_WEIGHTS, OWN_WEIGHTS)
        wanted = [f"org/first/{path}" for path in paths if path.startswith(f"{subfolder}/")]
        assert library_hub.weight_gets() == wanted

    def test_a_model(self, library_hub: LibraryHub, models: Models) -> None:
        library_hub.hub.add_folder("org/language", models.language)
        assert name_of(load("org/language")) == "BertModel"
        assert name_of(load("org/language", cls="BertForMaskedLM")) == "BertForMaskedLM"

    def test_a_folder(self, models: Models) -> None:
        assert name_of(load(models.language)) == "BertModel"
        assert name_of(load(str(models.first))) == "StableDiffusionPipeline"

    def test_the_files_are_in_the_store(self, library_hub: LibraryHub, models: Models) -> None:
        library_hub.hub.add_folder("org/first", models.first)
        library_hub.hub.add_folder("org/second", models.second)
        load("org/first")
        library_hub.clear()
        load("org/second")
        assert library_hub.weight_gets() == [f"org/second/{OWN_WEIGHTS}"]


class TestArguments:
    def test_only_what_was_given_reaches_the_class(self, models: Models) -> None:
        assert load(models.first, cls=Recorder) == {"source": (models.first,)}

    def test_all_other_arguments_reach_it_unchanged(self, models: Models) -> None:
        own = {"max_memory": {0: "1GB"}, "unet": None, "anything": object()}
        named = {"variant": "fp16", "revision": "v1", "subfolder": "vae"}
        got = load(models.first, cls=Recorder, **own, **named)
        assert got == {"source": (models.first,), **own, **named}

    def test_they_mean_what_they_mean_to_the_library(self, models: Models) -> None:
        pipeline = load(models.first, unet=None, requires_safety_checker=True)
        assert pipeline.unet is None
        assert pipeline.config.requires_safety_checker
        model, report = load(models.language, output_loading_info=True)
        assert name_of(model) == "BertModel"
        assert not report["mismatched_keys"]

    def test_a_revision(self, library_hub: LibraryHub, models: Models) -> None:
        old = library_hub.hub.add_folder("org/name", models.first)
        library_hub.hub.add_folder("org/name", models.language)
        assert name_of(load("org/name", revision=old.sha)) == "StableDiffusionPipeline"
        assert name_of(load("org/name")) == "BertModel"

    def test_a_variant(self, library_hub: LibraryHub, models: Models) -> None:
        library_hub.hub.add_folder("org/halves", models.halves)
        load("org/halves", variant="fp16", dtype="fp16")
        assert len(library_hub.weight_gets()) == 3
        assert all(".fp16." in name for name in library_hub.weight_gets())


class TestDtype:
    @pytest.mark.parametrize("value", ["fp16", "half", "float16", "torch.float16"])
    def test_it_has_many_names(self, models: Models, value: str) -> None:
        import torch

        assert load(models.language, dtype=value).dtype == torch.float16

    def test_it_may_be_torchs_own(self, models: Models) -> None:
        import torch

        assert load(models.language, dtype=torch.float16).dtype == torch.float16

    @pytest.mark.filterwarnings("error:.*torch_dtype.*")
    def test_its_old_name_is_taken_too(self, models: Models) -> None:
        import torch

        assert load(models.first, subfolder="vae", torch_dtype="bf16").dtype == torch.bfloat16
        assert load(models.language, torch_dtype=torch.float16).dtype == torch.float16

    @pytest.mark.parametrize(("version", "name"), [("0.36.0", "torch_dtype"), ("1.0", "dtype")])
    def test_each_diffusers_is_given_the_name_that_it_knows(
        self, monkeypatch: pytest.MonkeyPatch, version: str, name: str
    ) -> None:
        import torch
        from diffusers import AutoencoderKL
        from transformers import BertModel

        monkeypatch.setattr("diffusers.__version__", version)
        assert dtype_arguments(AutoencoderKL, "fp16") == {name: torch.float16}
        assert dtype_arguments(BertModel, "fp16") == {"dtype": torch.float16}

    def test_each_component_may_have_its_own(self, models: Models) -> None:
        import torch

        pipeline = load(models.first, dtype={"vae": "bf16", "default": "float16"})
        assert pipeline.vae.dtype == torch.bfloat16
        assert pipeline.unet.dtype == torch.float16

    def test_auto_is_the_librarys_own_word(self, models: Models) -> None:
        assert load(models.language, cls=Recorder, dtype="auto")["dtype"] == "auto"

    def test_both_names_are_one_too_many(self, models: Models) -> None:
        with pytest.raises(TypeError, match="torch_dtype"):
            load(models.language, dtype="fp16", torch_dtype="fp16")

    @pytest.mark.parametrize("value", ["fp17", "nn", "float16.x"])
    def test_a_wrong_name_is_an_error(self, models: Models, value: str) -> None:
        with pytest.raises(ValueError, match="There is no dtype"):
            load(models.language, dtype=value)


class TestDevice:
    def test_everything_goes_to_the_device(self, models: Models) -> None:
        import torch

        assert set(devices(load(models.first, device="meta")).values()) == {"meta"}
        assert load(models.language, device="meta").device.type == "meta"
        assert load(models.language, device=torch.device("cpu")).device.type == "cpu"

    def test_encoders_go_to_theirs(self, models: Models) -> None:
        there = {"text_encoder": "meta", "unet": "cpu", "vae": "meta"}
        assert devices(load(models.first, encoders_device="meta")) == there
        assert devices(load(models.first, device="cpu", encoders_device="meta")) == there

    def test_a_component_alone_is_an_encoder_too(self, models: Models) -> None:
        def place(name: str) -> str:
            return str(load(models.first, subfolder=name, encoders_device="meta").device)

        assert (place("vae"), place("text_encoder"), place("unet")) == ("meta", "meta", "cpu")

    def test_a_tokenizer_has_no_place(self, models: Models) -> None:
        tokenizer = load(models.first, subfolder="tokenizer", device="meta")
        assert name_of(tokenizer) == "CLIPTokenizer"

    def test_a_map_of_the_callers_places_everything(self, models: Models) -> None:
        placed = load(models.first, device_map="cpu", encoders_device="meta")
        assert set(devices(placed).values()) == {"cpu"}

    def test_a_device_and_a_map_contradict_each_other(self, models: Models) -> None:
        with pytest.raises(TypeError, match="device_map"):
            load(models.first, device="cpu", device_map="cpu")


class TestWithoutTheCache:
    def test_the_library_alone_is_at_work(self, library_hub: LibraryHub, models: Models) -> None:
        import torch

        library_hub.hub.add_folder("org/first", models.first)
        pipeline = load("org/first", smart_cache=False, device="meta", dtype="fp16")
        assert set(devices(pipeline).values()) == {"meta"}
        assert pipeline.unet.dtype == torch.float16
        assert not os.path.exists(os.environ["SMARTCACHE_HOME"])

    def test_nothing_can_be_shared_then(self, models: Models) -> None:
        with pytest.raises(ValueError, match="smart_cache"):
            load(models.first, smart_cache=False, share=True)

    def test_nor_is_there_a_use_for_a_mapping(self, models: Models) -> None:
        with pytest.raises(ValueError, match=r"cache_mapping=.* needs smart_cache=True"):
            load(models.first, smart_cache=False, cache_mapping={})

    def test_a_flag_that_is_on_for_all_calls_is_off_for_this_one(
        self, library_hub: LibraryHub, models: Models
    ) -> None:
        library_hub.hub.add_folder("org/language", models.language)
        with smartcache.enable(always=True):
            load("org/language", smart_cache=False)
        assert not os.path.exists(os.environ["SMARTCACHE_HOME"])


class TestMapping:
    def test_it_does_not_reach_the_library(self, models: Models) -> None:
        assert type(load(models.first, cache_mapping={})).__name__ == "StableDiffusionPipeline"

    @pytest.mark.parametrize("mapping", ["text", ["a"], MappingProxyType({})], ids=type)
    def test_it_can_be_added_to(self, models: Models, mapping: object) -> None:
        with pytest.raises(TypeError, match="cache_mapping is a mutable mapping"):
            load(models.first, cache_mapping=mapping)


class TestSharing:
    @pytest.mark.parametrize("share", [True, "text_encoder", ["text_encoder"]])
    def test_equal_components_are_one_object(self, models: Models, share: object) -> None:
        first, second = load(models.first, share=share), load(models.second, share=share)
        assert first.text_encoder is second.text_encoder
        assert first.unet is not second.unet
        assert (first.vae is second.vae) == (share is True)

    def test_without_it_they_are_not(self, models: Models) -> None:
        first, second = load(models.first), load(models.second)
        assert first.text_encoder is not second.text_encoder

    def test_a_tokenizer_has_nothing_to_share(self, models: Models) -> None:
        with pytest.raises(TypeError, match="shared"):
            load(models.first, subfolder="tokenizer", share=True)
