"""Whatever is done to a model after it was loaded is noticed; using it is not a change."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import pytest

from smartcache.pretrained.alive import keep, look_at, size_of
from tests.hub_server.pipelines import Models
from tests.pretrained.likeness import have_equal_values

if TYPE_CHECKING:
    import torch


Model: TypeAlias = "torch.nn.Module"
Change = Callable[[Any], object]


def lora_linear(base: torch.nn.Linear, rank: int = 2) -> Model:
    """What peft puts in the place of a Linear."""
    import torch

    class LoraLinear(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_layer = base
            self.down = torch.nn.Parameter(torch.full((rank, base.in_features), 0.01))
            self.up = torch.nn.Parameter(torch.full((base.out_features, rank), 0.01))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            below: torch.Tensor = self.base_layer(x)
            return below + x @ self.down.T @ self.up.T

    return LoraLinear()


def layer(model: Model) -> torch.nn.Linear:
    """The first Linear of an attention."""
    import torch

    found = (each for each in model.modules() if isinstance(each, torch.nn.Linear))
    return next(found)


def add_lora(model: Model) -> None:
    import torch

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, torch.nn.Linear):
                setattr(parent, name, lora_linear(child))


def fuse_lora_and_unload(model: Model) -> None:
    """The weights stay merged, and nothing else tells of it: `.data` raises no version."""
    import torch

    for each in model.modules():
        if isinstance(each, torch.nn.Linear):
            each.weight.data += torch.full_like(each.weight, 1e-4)


def fuse_lora_and_unfuse(model: Model) -> None:
    import torch

    for each in model.modules():
        if isinstance(each, torch.nn.Linear):
            delta = torch.full_like(each.weight, 0.1)
            each.weight.data += delta
            each.weight.data -= delta


def train_one_step(model: Model) -> None:
    import torch

    weight = layer(model).weight
    (weight * weight).sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    with torch.no_grad():
        weight -= 0.1 * weight.grad
    weight.grad = None


def round_trip(model: Model) -> None:
    model.half()
    model.float()


def replace_forward(model: Model) -> None:
    forward = layer(model).forward
    setattr(layer(model), "forward", lambda x: forward(x) * 2)  # noqa: B010 - of the instance


def offload(model: Model) -> None:
    import torch
    from accelerate import cpu_offload  # type: ignore[import-untyped]

    cpu_offload(model, torch.device("cpu"))


def offload_in_groups(model: Model) -> None:
    import torch
    from diffusers.hooks import apply_group_offloading

    apply_group_offloading(model, torch.device("cpu"), offload_type="leaf_level")


def tie(model: Model) -> None:
    import torch

    first, second = [each for each in model.modules() if isinstance(each, torch.nn.Linear)][:2]
    second.weight = first.weight


def replace_weight(model: Model, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    import torch

    layer(model).weight = torch.nn.Parameter(change(layer(model).weight))


def change_in_place(model: Model) -> None:
    import torch

    torch.nn.init.zeros_(layer(model).bias)


def add_module(model: Model) -> None:
    import torch

    model.add_module("more", torch.nn.Identity())


def set_processor(model: Any) -> None:  # noqa: ANN401
    import diffusers

    model.set_attn_processor(diffusers.models.attention_processor.AttnProcessor())


def cast_by_layer(model: Any) -> None:  # noqa: ANN401
    import torch

    model.enable_layerwise_casting(storage_dtype=torch.float16, compute_dtype=torch.float32)


def save_memory(model: Any) -> None:  # noqa: ANN401
    """By the name that transformers has for it from 5.15 on, or by its old one."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable()
    else:
        model.gradient_checkpointing_enable()


COMMON: dict[str, Change] = {
    "lora": add_lora,
    "fuse and unload": fuse_lora_and_unload,
    "fuse and unfuse": fuse_lora_and_unfuse,
    "one training step": train_one_step,
    "half": lambda model: model.half(),
    "half and back": round_trip,
    "to meta": lambda model: model.to("meta"),
    "channels last": lambda model: replace_weight(model, lambda each: each.T.contiguous().T),
    "train": lambda model: model.train(),
    "a layer in train": lambda model: layer(model).train(),
    "requires_grad": lambda model: model.requires_grad_(False),
    "gradients": lambda model: setattr(
        layer(model).weight, "grad", layer(model).weight.detach().clone()
    ),
    "forward hook": lambda model: layer(model).register_forward_hook(lambda *_: None),
    "forward pre-hook": lambda model: model.register_forward_pre_hook(lambda *_: None),
    "backward hook": lambda model: model.register_full_backward_hook(lambda *_: None),
    "state-dict hook": lambda model: model.register_state_dict_pre_hook(lambda *_: None),
    "forward of its own": replace_forward,
    "offload": offload,
    "group offload": offload_in_groups,
    "compiled": lambda model: model.compile(backend="eager"),
    "weights replaced": lambda model: replace_weight(model, lambda each: each.clone()),
    "in place": change_in_place,
    "a buffer more": lambda model: model.register_buffer("more", layer(model).bias.clone()),
    "a module more": add_module,
    "a module less": lambda model: delattr(model, next(iter(dict(model.named_children())))),
    "an attribute": lambda model: setattr(layer(model), "scale", 2.0),
    "tied": tie,
}
VAE: dict[str, Change] = {
    "slicing": lambda model: model.enable_slicing(),
    "tiling": lambda model: model.enable_tiling(),
    "config": lambda model: model.register_to_config(scaling_factor=0.5),
    "config in place": lambda model: setattr(model.config, "scaling_factor", 0.5),
    "processors": set_processor,
    "checkpointing": lambda model: model.enable_gradient_checkpointing(),
    "layerwise casting": cast_by_layer,
}
TEXT: dict[str, Change] = {
    "tokens": lambda model: model.resize_token_embeddings(300, mean_resizing=False),
    "attention": lambda model: model.set_attn_implementation("eager"),
    "config": lambda model: setattr(model.config, "layer_norm_eps", 1.0),
    "checkpointing": save_memory,
    "peft": lambda model: setattr(model, "peft_config", {"default": object()}),
    "peft is loaded": lambda model: setattr(model, "_hf_peft_config_loaded", True),
}
UNET: dict[str, Change] = {
    "slices": lambda model: model.set_attention_slice("max"),
    "freeu": lambda model: model.enable_freeu(0.9, 0.2, 1.1, 1.2),
    "fused qkv": lambda model: model.fuse_qkv_projections(),
}


def text_encoder(models: Models) -> Model:
    import transformers

    return cast("Model", transformers.CLIPTextModel.from_pretrained(models.first / "text_encoder"))


def vae(models: Models) -> Model:
    import diffusers

    return cast("Model", diffusers.AutoencoderKL.from_pretrained(models.first / "vae"))


def unet(models: Models) -> Model:
    import diffusers

    return cast("Model", diffusers.UNet2DConditionModel.from_pretrained(models.first / "unet"))


def ids(cases: Sequence[tuple[Callable[[Models], Model], str, Change]]) -> list[str]:
    return [f"{make.__name__}-{name}" for make, name, _ in cases]


CASES = [
    *((text_encoder, name, change) for name, change in {**COMMON, **TEXT}.items()),
    *((vae, name, change) for name, change in VAE.items()),
    *((unet, name, change) for name, change in UNET.items()),
]


@pytest.mark.parametrize(("make", "name", "change"), CASES, ids=ids(CASES))
def test_a_change_is_noticed(
    models: Models,
    make: Callable[[Models], Model],
    name: str,
    change: Change,
) -> None:
    model = make(models)
    before = look_at(model)
    assert before.difference(look_at(model)) == ""
    change(model)
    assert before.difference(look_at(model)) != ""


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_a_weak_lora_that_was_merged_is_noticed(models: Models, name: str) -> None:
    """Most of what it adds is lost by rounding: some elements of some layers are all there is."""
    import torch

    dtype = getattr(torch, name)
    model = text_encoder(models).to(dtype)
    before = look_at(model)
    generator = torch.Generator().manual_seed(0)
    for each in model.modules():
        if isinstance(each, torch.nn.Linear):
            up, down = (torch.randn(32, 1, generator=generator) * 0.01 for _ in range(2))
            delta = (up @ down.T).to(dtype) * 0.1
            rows, columns = each.weight.shape
            whole = delta.repeat(rows // 32 or 1, columns // 32 or 1)[:rows, :columns]
            each.weight.data += whole
    assert before.difference(look_at(model)) == "values of weights"


class TestUse:
    def test_to_run_a_pipeline_is_no_change(self, models: Models) -> None:
        import diffusers

        pipeline = diffusers.StableDiffusionPipeline.from_pretrained(models.first)
        pipeline.set_progress_bar_config(disable=True)
        parts = (pipeline.text_encoder, pipeline.vae, pipeline.unet)
        before = [look_at(part) for part in parts]
        pipeline("a cat", num_inference_steps=1, height=32, width=32)
        assert [
            then.difference(look_at(part)) for then, part in zip(before, parts, strict=True)
        ] == [""] * 3

    def test_to_ask_for_the_device_where_it_is_is_no_change(self, models: Models) -> None:
        model = vae(models)
        before = look_at(model)
        model.to("cpu").eval()
        model.state_dict()
        assert before.difference(look_at(model)) == ""

    def test_to_copy_it_is_no_change(self, models: Models) -> None:
        model = text_encoder(models)
        before = look_at(model)
        other = look_at(copy.deepcopy(model))
        assert before.difference(look_at(model)) == ""
        assert before.difference(other) != ""


class TestWhole:
    def test_a_loaded_model_is(self, models: Models) -> None:
        assert look_at(vae(models)).is_whole

    @pytest.mark.parametrize("change", [offload, lambda model: model.to("meta")])
    def test_one_whose_weights_are_elsewhere_is_not(self, models: Models, change: Change) -> None:
        model = vae(models)
        change(model)
        assert not look_at(model).is_whole

    def test_one_that_was_loaded_for_inference_only_is_not(self, models: Models) -> None:
        import torch

        with torch.inference_mode():
            assert not look_at(vae(models)).is_whole


@pytest.mark.parametrize("name", ["bool", "int8", "complex64", "float8_e4m3fn", "bfloat16"])
def test_tensors_of_every_dtype_and_shape_can_be_looked_at(name: str) -> None:
    import torch

    dtype = getattr(torch, name)
    model = torch.nn.Module()
    model.register_buffer("empty", torch.zeros(0).to(dtype))
    model.register_buffer("scalar", torch.zeros(()).to(dtype))
    model.register_buffer("large", torch.zeros(40, 50).to(dtype))
    model.register_buffer("turned", torch.zeros(40, 50).to(dtype).T)
    model.register_buffer("spread", torch.zeros(1, 50).to(dtype).expand(40, 50))
    before = look_at(model)
    assert before.difference(look_at(model)) == ""
    model.get_buffer("turned").data.fill_(1)
    assert before.difference(look_at(model)) == "values of weights"


def test_a_module_inside_of_itself_ends() -> None:
    import torch

    model = torch.nn.Linear(2, 2)
    object.__getattribute__(model, "_modules")["me"] = model
    assert look_at(model).rows


def test_a_state_keeps_nothing_alive(models: Models) -> None:
    model = vae(models)
    state = look_at(model)
    alive = weakref.ref(model)
    weight = weakref.ref(next(model.parameters()))
    del model
    gc.collect()
    assert alive() is None
    assert weight() is None
    assert state.rows


def test_weights_that_are_tied_are_counted_once() -> None:
    import torch

    model = torch.nn.Sequential(
        torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)
    )
    model[1].weight = model[0].weight
    assert size_of(model) == 64


class TestKept:
    @pytest.mark.parametrize(
        "change",
        [
            VAE["config"],
            VAE["config in place"],
            VAE["tiling"],
            VAE["processors"],
            COMMON["half"],
            COMMON["train"],
            COMMON["requires_grad"],
            COMMON["a module more"],
            COMMON["an attribute"],
            COMMON["forward hook"],
        ],
    )
    def test_what_was_done_is_taken_back(self, models: Models, change: Change) -> None:
        model = vae(models)
        before, kept = look_at(model), keep(model)
        change(model)
        assert before.difference(look_at(model)) != ""
        kept.restore()
        assert before.difference(look_at(model)) == ""
        assert have_equal_values(model, vae(models))

    def test_the_model_works_as_before(self, models: Models) -> None:
        import torch

        model = vae(models)
        image = torch.zeros(1, 3, 32, 32)
        with torch.no_grad():
            expected = model(image).sample
            kept = keep(model)
            model.double()
            kept.restore()
            assert torch.equal(model(image).sample, expected)
