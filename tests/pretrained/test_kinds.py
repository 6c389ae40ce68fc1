"""Which class loads what is there, told by a few small files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from smartcache.errors import MissingWeightsError, UnknownClassError, UnreadableConfigError
from smartcache.pretrained.kinds import class_of
from tests.hub_server.pipelines import Models
from tests.pretrained.libraries import LibraryHub

MODEL = {"architectures": ["BertForMaskedLM"], "model_type": "bert"}
PIPELINE = {"_class_name": "FluxPipeline", "_diffusers_version": "0.40.0"}


@pytest.fixture(autouse=True)
def _libraries() -> None:
    pytest.importorskip("diffusers")


def write(folder: Path, **files: object) -> Path:
    """Write JSON files by their names without the suffix."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value), "utf-8")
    return folder


def kind(
    source: str | Path, cls: type | str | None = None, subfolder: str = "", **arguments: object
) -> str:
    found = class_of(str(source), cls, subfolder=subfolder, arguments=arguments)
    return f"{found.__module__.partition('.')[0]}.{found.__name__}"


class TestFolder:
    @pytest.mark.parametrize(
        ("expected", "files"),
        [
            ("diffusers.FluxPipeline", {"model_index": PIPELINE, "config": MODEL}),
            ("diffusers.DiffusionPipeline", {"model_index": {"_class_name": ["mine", "Mine"]}}),
            ("diffusers.ModularPipeline", {"modular_model_index": {}}),
            ("diffusers.AutoencoderKL", {"config": {"_class_name": "AutoencoderKL"}}),
            ("diffusers.AutoModel", {"config": {"_class_name": "Mine", "auto_map": {}}}),
            ("transformers.BertForMaskedLM", {"config": MODEL, "tokenizer_config": {}}),
            ("transformers.AutoModel", {"config": {"model_type": "bert"}}),
            ("transformers.AutoModel", {"config": {**MODEL, "architectures": ["Gone"]}}),
            ("diffusers.DDIMScheduler", {"scheduler_config": {"_class_name": "DDIMScheduler"}}),
            ("transformers.AutoTokenizer", {"tokenizer_config": {}}),
            ("transformers.AutoProcessor", {"processor_config": {}, "tokenizer_config": {}}),
            (
                "transformers.AutoProcessor",
                {"preprocessor_config": {"processor_class": "X"}, "tokenizer_config": {}},
            ),
            (
                "transformers.AutoImageProcessor",
                {"preprocessor_config": {"image_processor_type": "CLIPImageProcessor"}},
            ),
            (
                "transformers.AutoImageProcessor",
                {"preprocessor_config": {"feature_extractor_type": "CLIPFeatureExtractor"}},
            ),
            (
                "transformers.AutoFeatureExtractor",
                {"preprocessor_config": {"feature_extractor_type": "Wav2Vec2FeatureExtractor"}},
            ),
        ],
    )
    def test_the_files_tell_the_class(
        self, tmp_path: Path, expected: str, files: dict[str, object]
    ) -> None:
        assert kind(write(tmp_path / "model", **files)) == expected

    def test_code_of_the_repo_is_loaded_by_the_auto_class_it_names(self, tmp_path: Path) -> None:
        remote = {"AutoConfig": "c.Mine", "AutoModelForCausalLM": "m.MineForCausalLM"}
        config = {"architectures": ["MineForCausalLM"], "model_type": "mine", "auto_map": remote}
        expected = "transformers.AutoModelForCausalLM"
        assert kind(write(tmp_path / "model", config=config)) == expected

    def test_a_custom_pipeline_decides_itself(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "model", model_index=PIPELINE)
        assert kind(folder, custom_pipeline="mine") == "diffusers.DiffusionPipeline"

    def test_a_subfolder_is_a_model_of_its_own(self, models: Models) -> None:
        assert kind(models.first, subfolder="vae") == "diffusers.AutoencoderKL"
        assert kind(models.first, subfolder="text_encoder/") == "transformers.CLIPTextModel"
        assert kind(models.first, subfolder="tokenizer") == "transformers.AutoTokenizer"
        assert kind(models.first, subfolder="scheduler") == "diffusers.DDIMScheduler"


class TestNamed:
    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("AutoTokenizer", "transformers.AutoTokenizer"),
            ("UNet2DConditionModel", "diffusers.UNet2DConditionModel"),
            ("transformers.AutoModel", "transformers.AutoModel"),
            ("diffusers.AutoModel", "diffusers.AutoModel"),
        ],
    )
    def test_a_class_may_be_named(self, models: Models, name: str, expected: str) -> None:
        assert kind(models.language, name) == expected

    def test_of_two_classes_of_that_name_it_is_the_one_of_the_files(self, models: Models) -> None:
        assert kind(models.language, "AutoModel") == "transformers.AutoModel"
        assert kind(models.first, "AutoModel", subfolder="unet") == "diffusers.AutoModel"

    @pytest.mark.parametrize("name", ["Nonsense", "os.path", "diffusers.AutoTokenizer"])
    def test_a_name_that_nobody_has_is_an_error(self, models: Models, name: str) -> None:
        with pytest.raises(UnknownClassError, match=f"has a class '{name}'"):
            kind(models.language, name)

    def test_a_class_that_loads_nothing_is_a_type_error(self, models: Models) -> None:
        with pytest.raises(TypeError, match="int has no from_pretrained"):
            kind(models.language, int)


FUTURE = {"architectures": ["Future"], "model_type": "future"}


class TestUnknown:
    @pytest.mark.parametrize(
        ("told", "name", "config"),
        [
            ("model_index.json of .* 'NewPipeline'", "model_index", {"_class_name": "NewPipeline"}),
            ("is of the class 'NewModel'", "config", {"_class_name": "NewModel"}),
            (r"\['Future'\] of type 'future'", "config", FUTURE),
            ("names no class", "config", {"hidden_size": 3}),
        ],
    )
    def test_the_error_names_what_was_found_and_the_cure(
        self, tmp_path: Path, told: str, name: str, config: object
    ) -> None:
        with pytest.raises(UnknownClassError, match=told) as caught:
            kind(write(tmp_path / "model", **{name: config}))
        assert "cls=" in caught.value.hint

    @pytest.mark.parametrize(("text", "told"), [("{", "cannot be read"), ("[]", "is not a JSON")])
    def test_a_damaged_file_is_named(self, tmp_path: Path, text: str, told: str) -> None:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UnreadableConfigError, match=rf"config\.json of .* {told}") as caught:
            kind(tmp_path)
        assert "cls=" in caught.value.hint

    def test_an_empty_folder_has_nothing_to_load(self, tmp_path: Path) -> None:
        with pytest.raises(MissingWeightsError, match="none of the files that say what it is"):
            kind(tmp_path)

    @pytest.mark.parametrize("name", ["./nothing", "/nothing/at/all", "~/models/x", "a/b/c"])
    def test_a_folder_that_is_not_there_is_not_looked_for_on_the_hub(self, name: str) -> None:
        with pytest.raises(MissingWeightsError, match="There is no folder"):
            kind(name)

    def test_a_file_is_for_from_single_file(self, models: Models) -> None:
        with pytest.raises(MissingWeightsError, match="is a file") as caught:
            kind(models.language / "model.safetensors")
        assert "from_single_file" in caught.value.hint


class TestHub:
    def test_only_the_file_that_tells_it_is_fetched(
        self, library_hub: LibraryHub, models: Models
    ) -> None:
        library_hub.hub.add_folder("org/first", models.first)
        assert kind("org/first") == "diffusers.StableDiffusionPipeline"
        assert [each.file for each in library_hub.hub.gets()] == ["org/first/model_index.json"]

    def test_a_subfolder_costs_one_file(self, library_hub: LibraryHub, models: Models) -> None:
        library_hub.hub.add_folder("org/first", models.first)
        assert kind("org/first", subfolder="tokenizer") == "transformers.AutoTokenizer"
        fetched = [each.file for each in library_hub.hub.gets()]
        assert fetched == ["org/first/tokenizer/tokenizer_config.json"]

    def test_the_revision_counts(self, library_hub: LibraryHub, models: Models) -> None:
        old = library_hub.hub.add("org/name", {"config.json": json.dumps(MODEL).encode()})
        library_hub.hub.add_folder("org/name", models.first)
        assert kind("org/name", revision=old.sha) == "transformers.BertForMaskedLM"
        assert kind("org/name") == "diffusers.StableDiffusionPipeline"

    def test_what_was_told_once_is_known_offline(
        self, library_hub: LibraryHub, models: Models
    ) -> None:
        library_hub.hub.add_folder("org/language", models.language)
        assert kind("org/language") == "transformers.BertModel"
        with library_hub.offline():
            assert kind("org/language") == "transformers.BertModel"
        assert kind("org/language", local_files_only=True) == "transformers.BertModel"

    def test_the_errors_of_the_hub_pass(self, library_hub: LibraryHub, models: Models) -> None:
        library_hub.hub.add_folder("org/language", models.language)
        with pytest.raises(RepositoryNotFoundError):
            kind("org/none")
        with pytest.raises(RevisionNotFoundError):
            kind("org/language", revision="none")
        with pytest.raises(LocalEntryNotFoundError, match=r"^org/language: "):
            kind("org/language", local_files_only=True)
        with (
            library_hub.offline(),
            pytest.raises(LocalEntryNotFoundError, match=r"^org/language: "),
        ):
            kind("org/language")
        with pytest.raises(HFValidationError):
            kind("no..repo")
        library_hub.hub.add_folder("org/gated", models.language, gated=True)
        with pytest.raises(GatedRepoError):
            kind("org/gated")
