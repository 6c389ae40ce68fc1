"""Where the parts of a model go. "meta" stands for a device that this machine need not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from smartcache.pretrained.call import (
    Asked,
    Placement,
    accelerator,
    is_on,
    modules_of,
    part_of,
    placement,
    resolve_device,
)
from tests.hub_server.pipelines import Models

if TYPE_CHECKING:
    import torch


@pytest.fixture
def _without_gpu() -> None:
    if accelerator() is not None:
        pytest.skip("there is an accelerator")


def cpu() -> torch.device:
    import torch

    return torch.device("cpu")


def meta() -> torch.device:
    import torch

    return torch.device("meta")


def full_layer(error: Exception) -> Any:  # noqa: ANN401
    """A layer that does not fit on any device but the CPU."""
    import torch

    class Full(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(1000, 1000, bias=False)
            self.came_back = False

        def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], *_: object) -> Full:
            if fn(torch.zeros(0)).device.type != "cpu":
                raise error
            self.came_back = True
            return self

    return Full()


class Pair:
    """As pipelines are: with components by name."""

    def __init__(self, **components: object) -> None:
        self.components = components


def devices(pair: Pair) -> dict[str, str]:
    found = {name: each for name, each in pair.components.items() if hasattr(each, "weight")}
    return {name: each.weight.device.type for name, each in found.items()}


class TestParts:
    @pytest.mark.parametrize(
        ("part", "names"),
        [
            ("text", ["text_encoder", "text_encoder_2", "tokenizer", "tokenizer_3", "processor"]),
            ("text", ["prior_text_encoder", "clip_tokenizer", "bert", "projection_model"]),
            ("image", ["image_encoder", "feature_extractor", "image_processor", "siglip"]),
            ("vae", ["vae", "vqvae", "movq", "vqgan", "audio_vae"]),
            (None, ["unet", "transformer", "transformer_2", "controlnet", "safety_checker"]),
            (None, ["scheduler", "audio_tokenizer", "vocoder", "text_encoder_select_layers", ""]),
        ],
    )
    def test_a_component_is_known_by_its_name(self, part: str | None, names: list[str]) -> None:
        assert {part_of(name) for name in names} == {part}

    @pytest.mark.parametrize(
        ("part", "class_name"),
        [
            ("text", "CLIPTextModelWithProjection"),
            ("text", "UMT5EncoderModel"),
            ("image", "SiglipVisionModel"),
            ("vae", "AutoencoderKLWan"),
            (None, "UNet2DConditionModel"),
            (None, "BertModel"),
        ],
    )
    def test_a_model_alone_is_known_by_its_class(self, part: str | None, class_name: str) -> None:
        assert part_of("", class_name) == part
        assert part_of("a-name-of-its-own", class_name) == part


class TestChoice:
    @pytest.mark.usefixtures("_without_gpu")
    def test_auto_moves_nothing_where_there_is_no_accelerator(self) -> None:
        assert placement(None, "auto") is None
        assert resolve_device("auto") is None

    def test_nothing_asked_moves_nothing(self) -> None:
        assert placement(None, None) is None

    def test_a_device_is_for_everything(self) -> None:
        where = placement("meta", "auto")
        assert where is not None
        assert where.device_for("text_encoder") == where.device_for("unet") == meta()

    def test_encoders_can_go_elsewhere(self) -> None:
        where = placement("cpu", "meta")
        assert where is not None
        assert where.device_for("vae") == meta()
        assert where.device_for("unet") == cpu()

    def test_encoders_can_go_alone(self) -> None:
        where = placement(None, meta())
        assert where is not None
        assert where.device_for("text_encoder_2") == meta()
        assert where.device_for("unet") is None

    def test_a_device_may_be_a_number(self) -> None:
        import torch

        assert resolve_device(1) == torch.device("cuda:1")

    def test_a_wrong_name_is_torchs_own_error(self) -> None:
        with pytest.raises(RuntimeError, match="nonsense"):
            placement("nonsense", "auto")


class TestMoving:
    def test_components_move_and_others_stay(self) -> None:
        import torch

        pair = Pair(vae=torch.nn.Linear(2, 2), unet=torch.nn.Linear(2, 2), scheduler=object())
        Placement(encoders=meta()).apply(pair)
        assert devices(pair) == {"vae": "meta", "unet": "cpu"}
        Placement(device=meta()).apply(pair)
        assert devices(pair) == {"vae": "meta", "unet": "meta"}

    def test_a_model_alone_goes_by_its_subfolder_or_class(self) -> None:
        import torch

        model = torch.nn.Linear(2, 2)
        Placement(encoders=meta()).apply(model)
        assert model.weight.device == cpu()
        Placement(encoders=meta(), component="text_encoder").apply(model)
        assert model.weight.device == meta()

    def test_the_model_beside_a_loading_report_moves(self) -> None:
        import torch

        model = torch.nn.Linear(2, 2)
        Placement(device=meta()).apply((model, {"missing_keys": []}))
        assert model.weight.device == meta()

    def test_what_has_no_weights_is_left_alone(self) -> None:
        Placement(device=meta()).apply("a tokenizer")

    def test_the_current_device_is_the_one_without_a_number(self) -> None:
        import torch

        assert is_on(torch.device("xpu:0"), torch.device("xpu"))
        assert not is_on(torch.device("xpu:1"), torch.device("xpu:0"))
        assert not is_on(cpu(), meta())


class TestFullDevice:
    def test_what_was_moved_half_is_moved_back_and_the_error_passes(self) -> None:
        import torch

        for error in (torch.OutOfMemoryError("full"), RuntimeError("an illegal instruction")):
            full = full_layer(error)
            with pytest.raises(RuntimeError) as caught:
                Placement(device=meta()).apply(full)
            assert full.came_back
            assert caught.value is error


class TestLibrary:
    """What the library is told, so that weights go straight to the device."""

    def asked(self, name: str, **kwargs: object) -> Asked:
        import diffusers

        cls = getattr(diffusers, name)
        return Asked(cls=cls, original=cls.from_pretrained, args=("org/name",), kwargs=kwargs)

    def told(self, name: str, device: str, **kwargs: object) -> dict[str, object]:
        import torch

        where = Placement(device=torch.device(device))
        return where.library_arguments(self.asked(name, **kwargs))

    def test_a_model_is_loaded_straight_onto_a_device(self) -> None:
        import torch

        assert self.told("AutoencoderKL", "cuda:1") == {"device_map": {"": torch.device("cuda:1")}}

    @pytest.mark.parametrize("device", ["cpu", "meta"])
    def test_the_host_needs_no_telling(self, device: str) -> None:
        assert self.told("AutoencoderKL", device) == {}

    @pytest.mark.parametrize("own", [{"device_map": "auto"}, {"low_cpu_mem_usage": False}])
    def test_the_callers_own_arguments_rule(self, own: dict[str, object]) -> None:
        assert self.told("AutoencoderKL", "cuda", **own) == {}

    def test_schedulers_take_no_map(self) -> None:
        assert self.told("DDIMScheduler", "cuda") == {}

    def test_a_pipeline_whose_encoders_go_elsewhere_is_moved_in_parts(self) -> None:
        import torch

        where = Placement(device=torch.device("cuda"), encoders=cpu())
        assert where.library_arguments(self.asked("StableDiffusionPipeline")) == {}

    @pytest.mark.usefixtures("_without_gpu")
    def test_a_pipeline_is_mapped_to_the_accelerator_only(self) -> None:
        """Another name is an error of diffusers."""
        assert self.told("StableDiffusionPipeline", "cuda") == {}

    def test_a_map_of_one_device_leaves_the_model_free_to_move(self, models: Models) -> None:
        """On CUDA models are loaded so: no hooks may stay, or `.to` would not work later."""
        import torch
        from diffusers import AutoencoderKL

        device_map = {"": torch.device("cpu")}
        vae = AutoencoderKL.from_pretrained(models.first, subfolder="vae", device_map=device_map)
        assert not any(hasattr(each, "_hf_hook") for each in vae.modules())
        assert vae.to("meta").device == meta()

    def test_so_does_a_map_of_a_pipeline_to_one_device(self, models: Models) -> None:
        from diffusers import DiffusionPipeline

        pipeline = DiffusionPipeline.from_pretrained(models.first, device_map="cpu")
        modules = [each for _, part in modules_of(pipeline) for each in part.modules()]
        assert not any(hasattr(each, "_hf_hook") for each in modules)
        Placement(device=meta()).apply(pipeline)
        assert pipeline.device == meta()
        assert pipeline.to("meta") is pipeline


@pytest.mark.cuda
class TestCuda:
    def test_everything_is_on_the_device(self, models: Models) -> None:

        import smartcache

        pipeline = smartcache.from_pretrained(models.first, device="cuda")
        for name in ("text_encoder", "vae", "unet"):
            assert getattr(pipeline, name).device.type == "cuda"
        pipeline.to("cpu")  # type: ignore[attr-defined]

    def test_encoders_go_there_by_themselves(self, models: Models) -> None:
        import smartcache

        pipeline = smartcache.from_pretrained(models.first)
        assert pipeline.text_encoder.device.type == "cuda"  # type: ignore[attr-defined]
        assert pipeline.vae.device.type == "cuda"  # type: ignore[attr-defined]
        assert pipeline.unet.device.type == "cpu"  # type: ignore[attr-defined]
