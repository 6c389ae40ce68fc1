"""Pipelines out of folders: equal components are one object, and only while nobody can tell."""

from __future__ import annotations

import copy
import functools
import gc
import json
import os
import pickle
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from smartcache.errors import SharedComponentError
from smartcache.pretrained import components, unshare
from smartcache.pretrained.api import load
from smartcache.pretrained.call import Asked, Placement
from smartcache.pretrained.share import registry
from tests.hub_server.pipelines import Models
from tests.pretrained.likeness import are_alike, have_equal_values
from tests.pretrained.scenarios import published
from tests.pretrained.sharing_loads import PARTS, model_of, pipeline_of, same_parts

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline


SHARED = {"text_encoder", "vae"}
ALL = set(PARTS)
FLOAT: dict[str, Any] = {"dtype": "float32"}
MIXED: dict[str, Any] = {"dtype": {"vae": "float16"}}


@pytest.fixture(autouse=True)
def _nothing_is_shared_yet() -> Iterator[None]:
    registry.clear()
    yield
    registry.clear()


@pytest.fixture
def first(models: Models) -> StableDiffusionPipeline:
    return pipeline_of(models.first)


@pytest.fixture
def folder(models: Models, tmp_path: Path) -> Path:
    """The second pipeline, to be changed."""
    return shutil.copytree(models.second, tmp_path / "changed")


def plainly(folder: Path, **arguments: object) -> StableDiffusionPipeline:
    import diffusers

    return diffusers.DiffusionPipeline.from_pretrained(folder, **arguments)


def assert_as_plain(pipeline: object, plain: object, names: set[str] = ALL) -> None:
    """Its components are, bit by bit, what the library alone loads."""
    for name in names:
        mine, others = getattr(pipeline, name), getattr(plain, name)
        assert are_alike(mine, others), name


def picture(pipeline: StableDiffusionPipeline) -> np.ndarray:
    import torch

    pipeline.set_progress_bar_config(disable=True)
    words = {"num_inference_steps": 1, "height": 32, "width": 32, "output_type": "np"}
    generator = torch.Generator().manual_seed(0)
    image = pipeline("a cat", generator=generator, **words).images[0]
    assert isinstance(image, np.ndarray)
    return image


class TestEqual:
    def test_components_of_two_pipelines_are_one_object(
        self, models: Models, first: StableDiffusionPipeline
    ) -> None:
        """Of one that is loaded twice, all of them; but only those that were named."""
        assert same_parts(first, pipeline_of(models.second)) == SHARED
        again = pipeline_of(models.first)
        assert same_parts(first, again) == ALL
        assert first.scheduler is not again.scheduler
        assert first.tokenizer is not again.tokenizer
        some = pipeline_of(models.second, share=("vae",))
        assert same_parts(first, some) == {"vae"}
        assert same_parts(pipeline_of(models.second), some) == {"vae"}
        alone = pipeline_of(models.second, share=False)
        assert same_parts(first, alone) == set()
        assert same_parts(alone, pipeline_of(models.second)) == set()
        with pytest.raises(ValueError, match=r"no component encoder .*: .*text_encoder.*vae"):
            pipeline_of(models.second, share=("vae", "encoder"))

    def test_what_they_make_is_what_the_library_alone_makes(
        self, models: Models, first: StableDiffusionPipeline
    ) -> None:
        second, plain = pipeline_of(models.second), published(models.second)
        assert np.array_equal(picture(second), picture(plain))
        assert np.array_equal(picture(first), picture(published(models.first)))
        assert same_parts(second, pipeline_of(models.second)) == ALL
        assert_as_plain(second, plain)
        assert {**second.config, "_name_or_path": ""} == {**plain.config, "_name_or_path": ""}

    @pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
    def test_however_they_were_asked_for(
        self, models: Models, first: StableDiffusionPipeline
    ) -> None:
        import diffusers

        calls: list[tuple[str, dict[str, Any], set[str]]] = [
            ("DiffusionPipeline", {"low_cpu_mem_usage": True, "use_safetensors": True}, SHARED),
            ("DiffusionPipeline", {"safety_checker": None}, SHARED),
            ("DiffusionPipeline", {"tokenizer": first.tokenizer, "unet": first.unet}, ALL),
            ("StableDiffusionPipeline", {"requires_safety_checker": False}, SHARED),
            ("StableDiffusionImg2ImgPipeline", {}, SHARED),
            ("AutoPipelineForText2Image", {}, SHARED),
            ("AutoPipelineForImage2Image", {}, SHARED),
            ("DiffusionPipeline", {"vae": None}, {"text_encoder"}),
        ]
        for cls, arguments, expected in calls:
            for _ in range(2):
                second = pipeline_of(models.second, getattr(diffusers, cls), **typed(arguments))
                assert same_parts(first, second) == expected, (cls, arguments)
                assert "tokenizer" not in arguments or second.tokenizer is first.tokenizer

    def test_straight_onto_a_device(self, models: Models) -> None:
        one, other = (
            pipeline_of(folder, device_map="cpu") for folder in (models.first, models.second)
        )
        assert same_parts(one, other) == SHARED

    def test_under_another_name_of_the_file(
        self, first: StableDiffusionPipeline, folder: Path
    ) -> None:
        stem = folder / "vae" / "diffusion_pytorch_model"
        stem.with_suffix(".safetensors").rename(f"{stem}.fp16.safetensors")
        second = pipeline_of(folder, variant="fp16")
        assert same_parts(first, second) == SHARED

    def test_beside_a_link_that_leads_nowhere(
        self, first: StableDiffusionPipeline, folder: Path
    ) -> None:
        import diffusers

        (folder / "vae" / "old.txt").symlink_to(folder / "gone")
        assert same_parts(first, pipeline_of(folder)) == SHARED
        assert model_of(diffusers.AutoencoderKL, folder / "vae") is first.vae

    def test_of_one_pipeline_stay_two(self, folder: Path) -> None:
        """As the library has it: what is done to one must not happen to the other."""
        shutil.copytree(folder / "text_encoder", folder / "text_encoder_2")
        edit(folder / "model_index.json", text_encoder_2=["transformers", "CLIPTextModel"])
        one, other = (pipeline_of(folder, two_encoders()) for _ in range(2))
        assert one.text_encoder is not one.text_encoder_2
        assert one.text_encoder is other.text_encoder
        assert one.text_encoder_2 is other.text_encoder_2

    def test_without_a_store_too(
        self, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("SMARTCACHE_HOME", str(tmp_path / "file"))
        first, second = pipeline_of(models.first), pipeline_of(models.second)
        assert same_parts(first, second) == SHARED


@functools.cache
def two_encoders() -> type:
    import diffusers

    class TwoEncoders(diffusers.DiffusionPipeline):  # type: ignore[misc]
        def __init__(self, text_encoder: object, text_encoder_2: object) -> None:
            super().__init__()
            self.register_modules(text_encoder=text_encoder, text_encoder_2=text_encoder_2)

    return TwoEncoders


def typed(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with dtypes of torch in the place of their names."""
    import torch

    def of(name: Any) -> Any:  # noqa: ANN401
        if isinstance(name, dict):
            return {key: of(each) for key, each in name.items()}
        return getattr(torch, name)

    return {key: of(value) if key == "dtype" else value for key, value in arguments.items()}


def edit(path: Path, **fields: object) -> None:
    said = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**said, **fields}, indent=1), "utf-8")


class TestNotEqual:
    def test_asked_for_in_other_words(self, models: Models) -> None:
        """A dtype that is named, and the same one that is not, are two requests."""
        import torch

        pipelines = [pipeline_of(models.first, **typed(words)) for words in ({}, FLOAT, MIXED)]
        assert same_parts(pipelines[0], pipelines[1]) == set()
        assert same_parts(pipelines[0], pipelines[2]) == set()
        assert same_parts(pipelines[1], pipelines[2]) == {"text_encoder", "unet"}
        assert pipelines[2].vae.dtype == torch.float16
        for words in (FLOAT, MIXED):
            assert_as_plain(
                pipeline_of(models.first, **typed(words)), plainly(models.first, **typed(words))
            )

    def test_loaded_in_another_way(self, models: Models, first: StableDiffusionPipeline) -> None:
        ways: list[dict[str, Any]] = [
            {"dtype": "float16"}, {"dtype": "bfloat16"}, {"dtype": {"default": "float16"}},
            {"low_cpu_mem_usage": False},
        ]  # fmt: skip
        for arguments in ways:
            second = pipeline_of(models.second, **typed(arguments))
            assert same_parts(first, second) == set(), arguments
            if arguments != {"low_cpu_mem_usage": False}:
                assert_as_plain(second, plainly(models.second, **typed(arguments)))

    def test_loaded_under_other_defaults_of_torch(
        self, models: Models, first: StableDiffusionPipeline
    ) -> None:
        import torch

        torch.set_default_dtype(torch.float64)
        try:
            second, plain = pipeline_of(models.second), plainly(models.second)
        finally:
            torch.set_default_dtype(torch.float32)
        assert_as_plain(second, plain)
        with torch.inference_mode():
            third, plain = pipeline_of(models.second), plainly(models.second)
            assert next(third.vae.parameters()).is_inference()
        assert same_parts(first, third) == set()
        assert same_parts(first, pipeline_of(models.second)) == SHARED

    def test_another_config(self, first: StableDiffusionPipeline, folder: Path) -> None:
        text = "text_encoder/config.json"
        edits: list[tuple[str, dict[str, object], set[str]]] = [
            (text, {"_name_or_path": "x", "transformers_version": "1"}, SHARED),
            (text, {"attention_dropout": 0.5}, {"vae"}),
            ("vae/config.json", {"scaling_factor": 0.5}, set()),
        ]
        for path, fields, left in edits:  # one after the other
            edit(folder / path, **fields)
            second = pipeline_of(folder)
            assert same_parts(first, second) == left, fields
            assert_as_plain(second, plainly(folder), ALL - left)

    def test_a_unet_that_pipelines_change_because_of_its_age(
        self, models: Models, folder: Path
    ) -> None:
        second = pipeline_of(models.second)
        edit(folder / "unet" / "config.json", _diffusers_version="0.6.0")
        with pytest.warns(FutureWarning, match="sample_size"):
            old = pipeline_of(folder)
        assert same_parts(second, old) == SHARED
        assert (second.unet.config.sample_size, old.unet.config.sample_size) == (16, 64)

    def test_weights_that_changed_in_their_folder(self, models: Models, folder: Path) -> None:
        before = pipeline_of(folder)
        shutil.copyfile(
            models.first / "unet" / "diffusion_pytorch_model.safetensors",
            folder / "unet" / "diffusion_pytorch_model.safetensors",
        )
        after = pipeline_of(folder)
        assert same_parts(before, after) == SHARED
        assert_as_plain(after, published(models.first))

    def test_code_beside_the_weights(self, models: Models, folder: Path) -> None:
        before = pipeline_of(models.second)
        (folder / "vae" / "modeling.py").touch()
        assert same_parts(before, pipeline_of(folder)) == {"text_encoder", "unet"}

    def test_weights_that_no_file_has(self, folder: Path) -> None:
        """They are random: each load gives others, and with one seed those of the library alone."""
        import torch
        from safetensors.torch import load_file, save_file

        path = folder / "text_encoder" / "model.safetensors"
        weights = load_file(path)
        save_file({name: weights[name] for name in sorted(weights)[1:]}, path, {"format": "pt"})
        first, second = pipeline_of(folder), pipeline_of(folder)
        assert same_parts(first, second) == set()
        torch.manual_seed(0)
        third = pipeline_of(folder)
        torch.manual_seed(0)
        assert_as_plain(third, plainly(folder))

    def test_components_that_the_user_gives_stay_his(
        self, models: Models, first: StableDiffusionPipeline
    ) -> None:
        import diffusers

        own = diffusers.AutoencoderKL.from_pretrained(models.first / "vae")
        second = pipeline_of(models.second, vae=own)
        assert second.vae is own
        assert second.text_encoder is first.text_encoder
        assert pipeline_of(models.second).vae is first.vae


CHANGES: dict[str, Callable[[StableDiffusionPipeline], object]] = {
    "to": lambda pipeline: pipeline.vae.double(),
    "train": lambda pipeline: pipeline.vae.train(),
    "freeze": lambda pipeline: pipeline.vae.requires_grad_(False),
    "tiling": lambda pipeline: pipeline.vae.enable_tiling(),
    "config": lambda pipeline: pipeline.vae.register_to_config(scaling_factor=1.0),
    "merge": lambda pipeline: [each.data.mul_(1.001) for each in pipeline.vae.parameters()],
    "hook": lambda pipeline: pipeline.vae.register_forward_hook(lambda *_: None),
}


VAE = "vae/diffusion_pytorch_model.safetensors"
NO_OTHERS: dict[str, Any] = {"unet": None, "text_encoder": None}


def vae_alone(folder: Path) -> StableDiffusionPipeline:
    return pipeline_of(folder, **NO_OTHERS)


def replace_by_link(source: Path, path: Path) -> None:
    beside = path.with_name("beside")
    try:
        os.link(source, beside)
    except OSError:  # on another filesystem
        shutil.copyfile(source, beside)
    beside.replace(path)


class TestChanged:
    @pytest.mark.parametrize("name", CHANGES)
    def test_what_was_changed_is_loaded_afresh(self, models: Models, name: str) -> None:
        first, holder = (vae_alone(folder) for folder in (models.first, models.second))
        CHANGES[name](first)
        third = vae_alone(models.second)
        assert third.vae is not first.vae
        assert holder.vae is first.vae
        assert vae_alone(models.first).vae is third.vae
        assert_as_plain(third, published(models.second), {"vae"})

    def test_so_is_one_into_whose_file_other_weights_were_written(
        self, models: Models, folder: Path
    ) -> None:
        """Weights in memory may be a mapping of it, and what was written is in them then."""
        first = vae_alone(folder)
        before = copy.deepcopy(first.vae)
        size = (folder / VAE).stat().st_size
        with (folder / VAE).open("r+b") as file:
            file.seek(size // 4)
            file.write(bytes(size - size // 4))
        is_mapped = not have_equal_values(before, first.vae)
        second = vae_alone(models.first)
        assert (second.vae is not first.vae) == is_mapped
        assert_as_plain(second, published(models.first), {"vae"})

    def test_not_one_whose_file_was_made_one_with_an_equal_file(
        self, models: Models, folder: Path, tmp_path: Path
    ) -> None:
        """As `dedup` does it; what is in memory is the old file, and nobody has written to that."""
        equal = shutil.copytree(models.first, tmp_path / "equal")
        first = vae_alone(folder)
        replace_by_link(equal / VAE, folder / VAE)
        assert vae_alone(equal).vae is first.vae
        assert vae_alone(folder).vae is first.vae

    def test_it_is_still_shown_to_be_shared_by_its_holders(self, models: Models) -> None:
        first, second = pipeline_of(models.first), pipeline_of(models.second)
        first.vae.enable_tiling()
        shown = {each.cls: each for each in components()}
        assert shown["AutoencoderKL"].is_changed
        assert not shown["CLIPTextModel"].is_changed
        assert len(shown["AutoencoderKL"].holders) == 2
        assert second.vae is first.vae


@functools.cache
def meddling() -> type:
    import diffusers
    import torch

    class Meddling(diffusers.StableDiffusionPipeline):  # type: ignore[misc]
        """As some pipelines of diffusers are: they write into what they get."""

        def __init__(  # noqa: PLR0917 - as the class has it
            self,
            vae: object,
            text_encoder: object,
            tokenizer: object,
            unet: object,
            scheduler: object,
            safety_checker: object,
            feature_extractor: object,
            image_encoder: object = None,
            requires_safety_checker: object = None,
        ) -> None:
            vae.register_to_config(scaling_factor=0.5)  # type: ignore[attr-defined]
            vae.to(torch.float64)  # type: ignore[attr-defined]
            vae.meddled = True  # type: ignore[attr-defined]
            super().__init__(
                vae, text_encoder, tokenizer, unet, scheduler, safety_checker, feature_extractor,
                image_encoder, requires_safety_checker,
            )  # fmt: skip

    return Meddling


class TestConstructors:
    def test_one_that_changes_a_component_gets_its_own(
        self, models: Models, first: StableDiffusionPipeline
    ) -> None:
        import torch

        expected = picture(first)
        for _ in range(2):
            second = pipeline_of(models.second, meddling())
            assert same_parts(first, second) == {"text_encoder"}
            assert second.vae.dtype == torch.float64
            assert second.vae.config.scaling_factor == 0.5
        assert np.array_equal(picture(first), expected)
        assert_as_plain(first, published(models.first))
        assert same_parts(first, pipeline_of(models.second)) == SHARED

    def test_what_it_has_changed_is_not_given_to_others(self, models: Models) -> None:
        first = pipeline_of(models.first, meddling())
        second = pipeline_of(models.second)
        assert same_parts(first, second) == {"text_encoder"}
        assert_as_plain(second, published(models.second))


@pytest.fixture(scope="module")
def lora(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of the text encoder, in a folder."""
    import torch

    peft = pytest.importorskip("peft")
    pipeline = plainly(models.first)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="gaussian")
    pipeline.text_encoder.add_adapter(config)
    with torch.no_grad():
        for name, each in pipeline.text_encoder.named_parameters():
            if "lora_B" in name:
                each.fill_(0.01)
    weights = peft.get_peft_model_state_dict(pipeline.text_encoder)
    folder = tmp_path_factory.mktemp("lora")
    type(pipeline).save_lora_weights(folder, text_encoder_lora_layers=weights)
    return folder


class TestLora:
    """With the real thing, where it is installed."""

    CHANGES = (
        ("load",),
        ("load", "fuse"),
        ("load", "fuse", "unload"),
        ("load", "fuse", "unfuse", "unload"),
    )

    @pytest.mark.parametrize("steps", CHANGES, ids=["-".join(each) for each in CHANGES])
    def test_others_see_it_and_the_next_load_does_not(
        self, models: Models, lora: Path, steps: tuple[str, ...]
    ) -> None:
        first, second = pipeline_of(models.first), pipeline_of(models.second)
        for step in steps:
            if step == "load":
                first.load_lora_weights(lora)
            else:
                words = {} if step == "unload" else {"components": ["text_encoder"]}
                getattr(first, f"{step}_lora{'_weights' if step == 'unload' else ''}")(**words)
        third = pipeline_of(models.second)
        assert second.text_encoder is first.text_encoder
        assert third.text_encoder is not first.text_encoder
        assert_as_plain(third, published(models.second))


class TestPlacement:
    @pytest.mark.parametrize("name", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
    def test_components_are_shared_where_they_are(self, models: Models, name: str) -> None:
        import torch

        where = Placement(device=torch.device(name))
        first, second = (
            pipeline_of(folder, placement=where) for folder in (models.first, models.second)
        )
        assert same_parts(first, second) == SHARED
        assert {each.device.split(":")[0] for each in components()} == {name}

    @pytest.mark.cuda
    def test_those_of_another_device_are_not(self, models: Models) -> None:
        import torch

        where = Placement(device=torch.device("cuda"))
        first, second = pipeline_of(models.first), pipeline_of(models.second, placement=where)
        assert same_parts(first, second) == set()
        assert first.vae.device.type == "cpu"
        assert_as_plain(second, plainly(models.second, device_map="cuda"))


class TestMemory:
    def test_nothing_is_kept_when_the_last_holder_is_gone(self, models: Models) -> None:
        first, second = pipeline_of(models.first), pipeline_of(models.second)
        assert len(components()) == 4
        del first
        gc.collect()
        assert {each.cls for each in components()} == {
            "UNet2DConditionModel", "AutoencoderKL", "CLIPTextModel",
        }  # fmt: skip
        assert all(len(each.holders) == 1 for each in components())
        del second
        gc.collect()
        assert components() == []

    def test_a_component_that_was_replaced_is_not_held(self, models: Models) -> None:
        first, second = pipeline_of(models.first), pipeline_of(models.second)
        first.vae = None
        shown = {each.cls: each for each in components()}
        assert [each.source for each in shown["AutoencoderKL"].holders] == [str(models.second)]
        assert shown["AutoencoderKL"].saved_size == 0
        assert second.vae is not None


class TestThreads:
    THREADS = 8

    def run(self, work: Callable[[int], object]) -> list[object]:
        results: list[object] = [None] * self.THREADS
        together = threading.Barrier(self.THREADS)

        def one(number: int) -> None:
            together.wait()
            try:
                results[number] = work(number)
            except Exception as error:  # noqa: BLE001 - what came out is what is looked at
                results[number] = error

        threads = [threading.Thread(target=one, args=(each,)) for each in range(self.THREADS)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(60)
            assert not each.is_alive()
        return results

    def test_all_get_the_same_objects(self, models: Models) -> None:
        made = self.run(lambda number: pipeline_of((models.first, models.second)[number % 2]))
        assert {same_parts_text(made[0], each) for each in made[::2]} == {"text_encoder unet vae"}
        assert {same_parts_text(made[0], each) for each in made[1::2]} == {"text_encoder vae"}
        assert_as_plain(made[1], published(models.second))

    @pytest.mark.parametrize("arguments", [{}, {"low_cpu_mem_usage": False}], ids=str)
    @pytest.mark.parametrize("is_pipeline", [True, False], ids=["pipeline", "model"])
    def test_one_at_a_time_loads_whatever_can_be_shared(
        self, models: Models, arguments: dict[str, Any], is_pipeline: bool
    ) -> None:
        import diffusers

        cls = diffusers.StableDiffusionPipeline if is_pipeline else diffusers.AutoencoderKL
        folder = models.first if is_pipeline else models.first / "vae"
        at_once, most = 0, 0

        def watched(*args: object, **kwargs: object) -> object:
            nonlocal at_once, most
            at_once += 1
            most = max(most, at_once)
            time.sleep(0.02)
            try:
                return cls.from_pretrained(*args, **kwargs)
            finally:
                at_once -= 1

        asked = Asked(cls=cls, original=watched, args=(folder,), kwargs=arguments, share=True)
        made = self.run(lambda _: load(asked))
        assert {type(each) for each in made} == {cls}
        assert most == 1

    def test_one_that_fails_does_not_stop_the_others(self, models: Models, folder: Path) -> None:
        (folder / "vae" / "diffusion_pytorch_model.safetensors").unlink()
        made = self.run(lambda number: pipeline_of((models.first, folder)[number % 2]))
        assert all(isinstance(each, OSError) for each in made[1::2])
        assert {same_parts_text(made[0], each) for each in made[::2]} == {"text_encoder unet vae"}


def same_parts_text(one: object, other: object) -> str:
    return " ".join(sorted(same_parts(one, other)))


def test_errors_are_those_of_the_library_alone(models: Models, tmp_path: Path) -> None:
    import torch

    damages: list[Callable[[Path], object]] = [
        lambda folder: (folder / "vae" / "diffusion_pytorch_model.safetensors").unlink(),
        lambda folder: shutil.rmtree(folder / "unet"),
        lambda folder: (folder / "vae" / "config.json").write_text("{}", "utf-8"),
        lambda folder: edit(folder / "model_index.json", vae=["diffusers", "NoSuchClass"]),
        lambda folder: (folder / "model_index.json").unlink(),
    ]
    for number, damage in enumerate(damages):
        folder = shutil.copytree(models.second, tmp_path / str(number))
        damage(folder)
        with pytest.raises(Exception, match=r".") as expected:
            plainly(folder)
        with pytest.raises(type(expected.value)):
            pipeline_of(folder)
        assert torch.get_default_dtype() == torch.float32


class TestGuards:
    METHODS = ("enable_model_cpu_offload", "enable_sequential_cpu_offload", "enable_group_offload")

    def test_what_would_move_a_shared_component_is_refused(
        self, models: Models, first: StableDiffusionPipeline
    ) -> None:
        import torch

        plain = pipeline_of(models.first, share=False)
        assert not set(self.METHODS) & set(vars(plain))
        second = pipeline_of(models.second, share=("vae",))
        for name in self.METHODS:
            with pytest.raises(SharedComponentError, match=rf"{name}\(\) would move vae"):
                getattr(second, name)()
        with pytest.raises(SharedComponentError) as caught:
            second.vae.enable_group_offload(torch.device("cpu"))
        assert "unshare" in str(caught.value.hint)
        assert not any(hasattr(each, "_diffusers_hook") for each in first.vae.modules())

    def test_it_works_when_nothing_is_shared_any_more(self, models: Models) -> None:
        first, second = pipeline_of(models.first), pipeline_of(models.second)
        unshare(second)
        offloaded(second)
        assert not hasattr(first.vae, "_diffusers_hook")
        assert same_parts(first, pipeline_of(models.second)) == SHARED

    def test_a_copy_has_the_methods_of_its_class(
        self, models: Models, first: StableDiffusionPipeline
    ) -> None:
        import torch

        for made in (copy.deepcopy(first), pickle.loads(pickle.dumps(first))):  # noqa: S301
            assert same_parts(first, made) == set()
            assert made.enable_group_offload.__self__ is made
            assert made.vae.enable_group_offload.__self__ is made.vae
            assert np.array_equal(picture(made), picture(first))
            offloaded(made)
        again = pipeline_of(models.first)
        assert same_parts(first, again) == ALL
        with pytest.raises(SharedComponentError):
            first.enable_group_offload(torch.device("cpu"))

    def test_a_pickle_needs_nothing_of_smartcache(self, first: StableDiffusionPipeline) -> None:
        assert b"smartcache" not in pickle.dumps(first)

    def test_to_is_allowed_and_moves_it_for_all(self, models: Models) -> None:
        import torch

        first, second = pipeline_of(models.first), pipeline_of(models.second)
        second.to(torch.float64)
        assert first.vae.dtype == torch.float64


def offloaded(pipeline: StableDiffusionPipeline) -> None:
    import torch

    pipeline.enable_group_offload(torch.device("cpu"), offload_type="leaf_level")
    assert hasattr(next(iter(pipeline.vae.children())), "_diffusers_hook") or any(
        hasattr(each, "_diffusers_hook") for each in pipeline.vae.modules()
    )


class TestUnshare:
    def test_gives_an_equal_component_of_its_own(self, models: Models) -> None:
        first, second = pipeline_of(models.first), pipeline_of(models.second)
        unshare(second, "vae")
        assert same_parts(first, second) == {"text_encoder"}
        second.vae.enable_tiling()
        next(second.vae.parameters()).data.zero_()
        assert_as_plain(first, published(models.first))
        assert first.vae is pipeline_of(models.second).vae
        assert [each.cls for each in components() if len(each.holders) > 1] == ["CLIPTextModel"]

    def test_takes_all_without_names_but_copies_nothing_that_nobody_else_has(
        self, models: Models, first: StableDiffusionPipeline
    ) -> None:
        second = pipeline_of(models.second)
        with pytest.raises(ValueError, match=r"no component x; there are: .*vae"):
            unshare(second, "vae", "x")
        with pytest.raises(TypeError, match="deepcopy"):
            unshare(second.vae)
        assert same_parts(first, second) == SHARED
        unshare(second)
        assert same_parts(first, second) == set()
        assert_as_plain(second, published(models.second))
        before = first.vae
        unshare(first)
        assert first.vae is before
        assert components() == []
        unshare(first)


class TestModels:
    def test_one_loaded_alone_is_that_of_a_pipeline(
        self, models: Models, first: StableDiffusionPipeline
    ) -> None:
        import diffusers
        import transformers

        for _ in range(2):
            vae = model_of(diffusers.AutoencoderKL, models.second, subfolder="vae")
            assert vae is first.vae
        text = model_of(transformers.CLIPTextModel, models.second / "text_encoder")
        assert text is first.text_encoder
        assert pipeline_of(models.second).text_encoder is text

    @pytest.mark.parametrize("words", [{}, FLOAT, {"dtype": "float16"}, {"device_map": "cpu"}])
    def test_one_loaded_alone_is_what_the_library_loads_for_a_pipeline(
        self, models: Models, words: dict[str, Any]
    ) -> None:
        """Their requests are equal, so what they give must be."""
        import diffusers
        import transformers

        pipeline = plainly(models.first, **typed(words))
        classes = {
            "text_encoder": transformers.CLIPTextModel,
            "unet": diffusers.UNet2DConditionModel,
            "vae": diffusers.AutoencoderKL,
        }
        for name, cls in classes.items():
            alone = cls.from_pretrained(models.first / name, **typed(words))
            assert are_alike(alone, getattr(pipeline, name)), name

    @pytest.mark.parametrize("name", ["AutoModel", "BertModel"])
    def test_is_one_object_until_it_is_changed(self, models: Models, name: str) -> None:
        import transformers

        cls = getattr(transformers, name)
        first, second = (model_of(cls, models.language) for _ in range(2))
        assert first is second
        assert len(components()) == 1
        first.train()
        third = model_of(cls, models.language)
        assert third is not first
        assert have_equal_values(third, cls.from_pretrained(models.language))

    def test_another_way_to_load_gives_another(self, models: Models) -> None:
        import torch
        import transformers

        first = model_of(transformers.BertModel, models.language)
        others = (
            {"attn_implementation": "eager"},
            {"dtype": torch.float16},
            {"add_pooling_layer": False},
            {"hidden_dropout_prob": 0.5},
        )
        for each in others:
            assert model_of(transformers.BertModel, models.language, **each) is not first

    def test_nothing_is_kept_alive(self, models: Models) -> None:
        import transformers

        model = model_of(transformers.BertModel, models.language)
        assert components()[0].holders[0].source == str(models.language)
        del model
        gc.collect()
        assert components() == []
