"""Errors of the libraries pass as they are; of a missing variant those that exist are named."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

import smartcache
from smartcache.errors import PretrainedError, WrongVariantError
from smartcache.pretrained.kinds import class_of
from tests.hub_server.pipelines import Models
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


@pytest.fixture(params=["folder", "repo"])
def publish(request: pytest.FixtureRequest, library_hub: LibraryHub) -> Any:  # noqa: ANN401
    """Return how a folder is named: as it is, or as a repo of the Hub."""

    def name(folder: Path) -> str:
        if request.param == "folder":
            return str(folder)
        library_hub.hub.add_folder("org/name", folder)
        return "org/name"

    return name


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
        source = publish(models.halves)
        error = failing(source, subfolder="vae", variant="bf16")
        assert str(error).endswith("; it has the variants fp16")

    def test_any_other_error_passes_unchanged(self, models: Models, publish: Any) -> None:  # noqa: ANN401
        source = publish(models.halves)
        with pytest.raises((OSError, ValueError)) as caught:
            load(source, cls="AutoencoderKL", subfolder="none", variant="fp16")
        assert not isinstance(caught.value, PretrainedError)


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
