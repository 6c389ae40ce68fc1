"""Errors that name the repo, the component and the cure; all others are the library's own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

import smartcache
from tests.api import (
    Asked,
    DeviceMemoryError,
    MissingWeightsError,
    Placement,
    PretrainedError,
    UnknownClassError,
    WrongVariantError,
    class_of,
    is_weights,
    variant_of,
)
from tests.api import failures_explained as explained
from tests.hub_server.pipelines import OWN_WEIGHTS, SHARED_WEIGHTS, Models
from tests.pretrained.libraries import LibraryHub

# diffusers passes it to huggingface_hub with the config of every model.
pytestmark = pytest.mark.filterwarnings("ignore:The `local_dir_use_symlinks` argument:UserWarning")


def load(source: str | Path, **arguments: object) -> object:
    return cast("Any", smartcache.from_pretrained)(source, **arguments)


def failing(source: str | Path, **arguments: object) -> PretrainedError:
    """The error of such a call, which has the library's own as its cause."""
    with pytest.raises(PretrainedError) as caught:
        load(source, **arguments)
    assert caught.value.hint
    assert caught.value.__cause__ is not None
    return caught.value


@pytest.fixture
def pipeline(models: Models, tmp_path: Path) -> Path:
    """The first pipeline, to be damaged."""
    folder = tmp_path / "pipeline"
    shutil.copytree(models.first, folder)
    return folder


@pytest.fixture(params=["folder", "repo"])
def publish(request: pytest.FixtureRequest, library_hub: LibraryHub) -> Any:  # noqa: ANN401
    """Return how a folder is named: as it is, or as a repo of the Hub."""

    def name(folder: Path) -> str:
        if request.param == "folder":
            return str(folder)
        library_hub.hub.add_folder("org/name", folder)
        return "org/name"

    return name


class TestWeights:
    @pytest.mark.parametrize(
        ("name", "variant"),
        [
            ("model.safetensors", ""),
            ("model.fp16.safetensors", "fp16"),
            ("diffusion_pytorch_model.non_ema.bin", "non_ema"),
            ("model-00001-of-00002.safetensors", ""),
            ("model.fp16-00001-of-00002.safetensors", "fp16"),
            ("diffusion_pytorch_model-00001-of-00002.fp16.safetensors", "fp16"),
            ("model.safetensors.index.json", ""),
            ("model.safetensors.index.fp16.json", "fp16"),
            ("pytorch_model.fp16.bin.index.json", "fp16"),
        ],
    )
    def test_the_variant_is_in_the_name(self, name: str, variant: str) -> None:
        assert is_weights(name)
        assert variant_of(name) == variant

    @pytest.mark.parametrize(
        "name", ["config.json", "flax_model.msgpack", "training_args.bin", "tokenizer.model"]
    )
    def test_other_files_are_no_weights(self, name: str) -> None:
        assert not is_weights(name)


@pytest.mark.usefixtures("library_hub")
class TestMissing:
    @pytest.mark.parametrize("path", [SHARED_WEIGHTS[0], OWN_WEIGHTS])
    def test_a_component_without_weights_is_named(
        self, pipeline: Path, publish: Any, path: str  # noqa: ANN401
    ) -> None:  # fmt: skip
        (pipeline / path).unlink()
        source, component = publish(pipeline), path.partition("/")[0]
        error = failing(source)
        assert isinstance(error, MissingWeightsError)
        assert str(error) == f"{component} of {source} has no weights"

    def test_a_model_without_weights(self, models: Models, tmp_path: Path, publish: Any) -> None:  # noqa: ANN401
        shutil.copy(models.language / "config.json", tmp_path)
        source = publish(tmp_path)
        assert str(failing(source)) == f"{source} has no weights"

    def test_a_folder_that_is_not_there(self, models: Models, publish: Any) -> None:  # noqa: ANN401
        source = publish(models.first)
        error = failing(source, cls="AutoencoderKL", subfolder="vae_2")
        assert isinstance(error, MissingWeightsError)
        assert str(error).startswith(f"{source} has no folder vae_2; it has scheduler, text")

    def test_pickles_where_safetensors_were_asked_for(self, models: Models) -> None:
        error = failing(models.pickled, use_safetensors=True)
        assert "has no weights in safetensors" in str(error)
        assert "use_safetensors" in error.hint

    def test_a_shard_that_is_not_there(self, models: Models, tmp_path: Path) -> None:
        folder = tmp_path / "sharded"
        shutil.copytree(models.language_sharded, folder)
        shard = max(folder.glob("model-*"))
        shard.unlink()
        assert str(failing(folder)) == f"{folder} lacks {shard.name}"

    def test_what_the_caller_passes_is_not_missed(self, pipeline: Path) -> None:
        shutil.rmtree(pipeline / "unet")
        assert load(pipeline, unet=None) is not None


@pytest.mark.usefixtures("library_hub")
class TestVariant:
    def test_the_variants_there_are_are_named(self, models: Models, publish: Any) -> None:  # noqa: ANN401
        source = publish(models.halves)
        error = failing(source, variant="bf16")
        assert isinstance(error, WrongVariantError)
        message = f"{source} has no weights of the variant 'bf16'; it has the variants fp16"
        assert str(error) == message
        assert error.variants == ["fp16"]  # type: ignore[attr-defined]

    def test_a_model_without_any(self, models: Models, publish: Any) -> None:  # noqa: ANN401
        error = failing(publish(models.language), variant="fp16")
        assert isinstance(error, WrongVariantError)
        assert "only weights without a variant" in str(error)

    def test_a_component_alone(self, models: Models, publish: Any) -> None:  # noqa: ANN401
        source = publish(models.first)
        error = failing(source, subfolder="vae", variant="fp16")
        assert str(error).startswith(f"vae of {source} has no weights of the variant 'fp16'")


@pytest.mark.usefixtures("library_hub")
class TestClass:
    def test_a_component_of_an_unknown_class_is_named(
        self, pipeline: Path, publish: Any  # noqa: ANN401
    ) -> None:  # fmt: skip
        index = json.loads((pipeline / "model_index.json").read_text("utf-8"))
        index["text_encoder"] = ["transformers", "FutureTextModel"]
        (pipeline / "model_index.json").write_text(json.dumps(index), "utf-8")
        error = failing(publish(pipeline))
        assert isinstance(error, UnknownClassError)
        assert "text_encoder of " in str(error)
        assert "'FutureTextModel', which transformers does not have" in str(error)
        assert "text_encoder=" in error.hint


class TestMemory:
    """A library that loads straight onto a device meets the device's end by itself."""

    def asked(self, models: Models, **kwargs: object) -> Asked:
        import torch
        from diffusers import StableDiffusionPipeline as Pipeline

        where = Placement(device=torch.device("cpu"))
        return Asked(
            cls=Pipeline, original=Pipeline.from_pretrained, args=(models.first,), kwargs=kwargs,
            placement=where,
        )  # fmt: skip

    @pytest.mark.parametrize(("dtype", "factor"), [(None, 1.0), ("float16", 0.5)])
    def test_what_all_of_it_needs_is_said(
        self, models: Models, dtype: str | None, factor: float
    ) -> None:
        import torch

        full = torch.OutOfMemoryError("CUDA out of memory")
        asked = self.asked(models, **({} if dtype is None else {"dtype": getattr(torch, dtype)}))
        with (
            pytest.raises(DeviceMemoryError, match="does not fit on cpu") as caught,
            explained(asked),
        ):
            raise full
        assert caught.value.__cause__ is full
        paths = (*SHARED_WEIGHTS, OWN_WEIGHTS)
        expected = sum(models.size(path) for path in paths) * factor
        needed = caught.value.needed  # type: ignore[attr-defined]
        assert expected * 0.8 < needed < expected  # Headers are in the files, and not in memory.

    @pytest.mark.parametrize("mapped", ["cpu", {"": "cpu"}])
    def test_a_map_of_the_callers_names_the_device(self, models: Models, mapped: object) -> None:
        import torch

        asked = replace(self.asked(models, device_map=mapped), placement=None)
        with pytest.raises(DeviceMemoryError, match="does not fit on cpu"), explained(asked):
            raise torch.OutOfMemoryError("CUDA out of memory")

    def test_without_a_device_it_passes_unchanged(self, models: Models) -> None:
        import torch

        full = torch.OutOfMemoryError("CUDA out of memory")
        asked = replace(self.asked(models), placement=None)
        with pytest.raises(torch.OutOfMemoryError) as caught, explained(asked):
            raise full
        assert caught.value is full


@pytest.mark.usefixtures("library_hub")
class TestKinds:
    """Ours is the kind of error that the library raises in the same case, with the flag too."""

    @pytest.fixture
    def folders(self, models: Models, tmp_path: Path) -> dict[str, Path]:
        (tmp_path / "empty").mkdir()
        (tmp_path / "file.txt").write_text("text")
        for name in ("model_index.json", "vae/config.json"):
            damaged = shutil.copytree(models.first, tmp_path / f"damaged {name[:3]}")
            (damaged / name).write_text("{")
        bare = shutil.copytree(models.first, tmp_path / "bare")
        for path in (*bare.rglob("*.safetensors"), *bare.rglob("*.bin")):
            path.unlink()
        cut = shutil.copytree(models.sharded, tmp_path / "cut")
        for path in cut.rglob("*-00001-of-*.safetensors"):
            path.unlink()
        return {
            "empty": tmp_path / "empty", "file": tmp_path / "file.txt", "bare": bare, "cut": cut,
            "absent": tmp_path / "absent", "damaged mod": tmp_path / "damaged mod",
            "damaged vae": tmp_path / "damaged vae", "first": models.first,
            "pickled": models.pickled, "language": models.language,
        }  # fmt: skip

    @pytest.mark.parametrize(
        ("cls", "name", "arguments"),
        [
            ("DiffusionPipeline", "empty", {}),
            ("DiffusionPipeline", "absent", {}),
            ("DiffusionPipeline", "bare", {}),
            ("DiffusionPipeline", "cut", {}),
            ("DiffusionPipeline", "damaged mod", {}),
            ("DiffusionPipeline", "damaged vae", {}),
            ("DiffusionPipeline", "first", {"variant": "fp16"}),
            ("AutoencoderKL", "empty", {}),
            ("AutoencoderKL", "file", {}),
            ("AutoencoderKL", "absent", {}),
            ("AutoencoderKL", "first", {"subfolder": "none"}),
            ("AutoencoderKL", "damaged vae", {"subfolder": "vae"}),
            ("AutoencoderKL", "pickled", {"subfolder": "vae", "use_safetensors": True}),
            ("UNet2DConditionModel", "cut", {"subfolder": "unet"}),
            ("CLIPTextModel", "bare", {"subfolder": "text_encoder"}),
            ("CLIPTextModel", "cut", {"subfolder": "text_encoder"}),
            ("transformers.AutoModel", "empty", {}),
            ("transformers.AutoModel", "file", {}),
            ("transformers.AutoModel", "absent", {}),
            ("transformers.AutoModel", "language", {"subfolder": "none"}),
            ("transformers.AutoModel", "language", {"variant": "fp16"}),
        ],
    )
    @pytest.mark.usefixtures("library_hub")
    def test_of_a_folder(
        self, folders: dict[str, Path], cls: str, name: str, arguments: dict[str, Any]
    ) -> None:
        self.check(cls, str(folders[name]), arguments)

    @pytest.mark.parametrize(
        ("cls", "name", "arguments"),
        [
            ("DiffusionPipeline", "org/none", {}),
            ("DiffusionPipeline", "org/text", {}),
            ("DiffusionPipeline", "a/b/c", {}),
            ("AutoencoderKL", "org/text", {}),
            ("AutoencoderKL", "./nowhere", {}),
            ("transformers.AutoModel", "org/none", {}),
            ("transformers.AutoModel", "org/text", {}),
            ("transformers.AutoModel", "not a repo!", {}),
            ("BertModel", "org/text", {"subfolder": "none"}),
            ("BertModel", "org/text", {"revision": "none"}),
            ("BertModel", "org/text", {"local_files_only": True}),
        ],
    )
    def test_of_a_repo(
        self, library_hub: LibraryHub, cls: str, name: str, arguments: dict[str, Any]
    ) -> None:
        library_hub.hub.add("org/text", {"README.md": b"nothing else"})
        self.check(cls, name, arguments)
        with library_hub.offline():
            self.check(cls, name, arguments)

    def check(self, cls: str, source: str, arguments: dict[str, Any]) -> None:
        found = class_of(source, cls, arguments={})
        plain = raised(lambda: cast("Any", found).from_pretrained(source, **arguments))
        builtin = [base for base in type(plain).__mro__ if base.__module__ == "builtins"]
        wanted = [each for each in builtin if each not in (Exception, BaseException, object)]
        for ours in (
            raised(lambda: load(source, cls=cls, encoders_device=None, **arguments)),
            raised(lambda: load(source, cls=cls, smart_cache=False, **arguments)),
        ):
            assert all(isinstance(ours, each) for each in wanted), (plain, ours)
        guessed = raised(lambda: load(source, **arguments))
        assert isinstance(guessed, ValueError | OSError)


def raised(work: Callable[[], object]) -> Exception:
    try:
        work()
    except Exception as error:  # noqa: BLE001 - what it is, is looked at
        return error
    pytest.fail("nothing was raised")


class TestOthers:
    @pytest.mark.parametrize("error", [OSError("disk"), ValueError("shape"), KeyError("x")])
    def test_an_error_that_files_do_not_explain_passes_unchanged(
        self, models: Models, error: Exception
    ) -> None:
        from transformers import BertModel

        asked = Asked(
            cls=BertModel, original=BertModel.from_pretrained, args=(models.language,), kwargs={}
        )
        with pytest.raises(type(error)) as caught, explained(asked):
            raise error
        assert caught.value is error

    def test_the_errors_of_the_hub_pass_unchanged(
        self, library_hub: LibraryHub, models: Models
    ) -> None:
        from diffusers import DiffusionPipeline

        library_hub.hub.add_folder("org/gated", models.first, gated=True)
        for name, expected in (("gated", GatedRepoError), ("none", RepositoryNotFoundError)):
            with pytest.raises(OSError, match=name) as plain:
                DiffusionPipeline.from_pretrained(f"org/{name}")
            with pytest.raises(OSError, match=name) as ours:
                load(f"org/{name}", cls="DiffusionPipeline")
            assert type(ours.value) is type(plain.value)
            with pytest.raises(expected):
                load(f"org/{name}")

    def test_offline_what_is_not_here_may_be_there(
        self, library_hub: LibraryHub, models: Models
    ) -> None:
        library_hub.hub.add_folder("org/language", models.language)
        load("org/language", cls="AutoConfig")
        with library_hub.offline(), pytest.raises(OSError) as caught:  # noqa: PT011 - the library's
            load("org/language")
        assert not isinstance(caught.value, PretrainedError)
