"""What a call with the flag does, and that one without it does what it always did."""

from __future__ import annotations

import json
import logging
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import smartcache
from tests.hub_server.pipelines import OWN_WEIGHTS, SHARED_WEIGHTS, Models
from tests.pretrained.libraries import LibraryHub

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

FIRST, SECOND = "org/first", "org/second"
OWN = [f"{SECOND}/{OWN_WEIGHTS}"]
ALL = sorted(f"{SECOND}/{path}" for path in (*SHARED_WEIGHTS, OWN_WEIGHTS))
PATIENCE = 30.0

pytestmark = [
    # diffusers still gives huggingface_hub an argument that it ignores.
    pytest.mark.filterwarnings("ignore:The `local_dir_use_symlinks` argument:UserWarning"),
    # Some modules of transformers, when they are loaded.
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]


@pytest.fixture
def served(library_hub: LibraryHub, models: Models) -> LibraryHub:
    """A Hub with two pipelines that have the same encoders."""
    library_hub.hub.add_folder(FIRST, models.first)
    library_hub.hub.add_folder(SECOND, models.second)
    return library_hub


@pytest.fixture
def known(served: LibraryHub) -> LibraryHub:
    """The same, the first pipeline is in the store."""
    smartcache.snapshot_download(FIRST)
    served.clear()
    return served


def load(source: str | Path, **arguments: object) -> DiffusionPipeline:
    from diffusers import DiffusionPipeline

    return DiffusionPipeline.from_pretrained(source, **arguments)


def store_exists() -> bool:
    return Path(os.environ["SMARTCACHE_HOME"]).exists()


class TestAsked:
    def test_what_is_known_is_not_fetched(self, known: LibraryHub) -> None:
        smartcache.enable()
        load(SECOND, smart_cache=True)
        assert known.weight_gets() == OWN

    def test_without_the_flag_it_is_not_fetched_either(self, known: LibraryHub) -> None:
        smartcache.enable()
        load(SECOND)
        assert known.weight_gets() == OWN

    def test_unless_the_call_does_without(self, known: LibraryHub) -> None:
        smartcache.enable()
        load(SECOND, smart_cache=False)
        assert known.weight_gets() == ALL

    @pytest.mark.parametrize("flag", [{}, {"smart_cache": None}, {"smart_cache": False}], ids=str)
    def test_without_the_flag_there_is_not_even_a_store(
        self, flag: dict[str, object], models: Models
    ) -> None:
        smartcache.enable()
        load(models.first, **flag)
        assert not store_exists()

    def test_the_source_may_be_given_by_name(self, known: LibraryHub) -> None:
        from diffusers import DiffusionPipeline

        smartcache.enable()
        DiffusionPipeline.from_pretrained(pretrained_model_name_or_path=SECOND, smart_cache=True)
        assert known.weight_gets() == OWN


class TestAlways:
    def test_it_needs_no_flag(self, known: LibraryHub) -> None:
        smartcache.enable(always=True)
        load(SECOND)
        assert known.weight_gets() == OWN

    def test_a_call_can_do_without(self, known: LibraryHub) -> None:
        smartcache.enable(always=True)
        load(SECOND, smart_cache=False)
        assert known.weight_gets() == ALL

    def test_it_ends_with_its_block(self, known: LibraryHub) -> None:
        with smartcache.enable(always=True):
            pass
        load(SECOND)
        assert known.weight_gets() == ALL

    def test_our_own_function_can_do_without(self, known: LibraryHub) -> None:
        smartcache.enable(always=True)
        smartcache.from_pretrained(SECOND, smart_cache=False)
        assert known.weight_gets() == ALL

    def test_shards_loaded_by_several_threads(
        self, library_hub: LibraryHub, models: Models, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What `HF_ENABLE_PARALLEL_LOADING` sets when diffusers is imported."""
        import diffusers.models.modeling_utils

        monkeypatch.setattr(diffusers.models.modeling_utils, "HF_ENABLE_PARALLEL_LOADING", True)
        library_hub.hub.add_folder("org/sharded", models.sharded)
        smartcache.enable(always=True)
        in_thread(lambda: load("org/sharded"))
        assert any("-of-" in each for each in library_hub.weight_gets())

    def test_a_part_that_is_loaded_by_a_thread_of_its_own(self, models: Models) -> None:
        """Such a thread does not know in the middle of which call it is."""
        from diffusers import AutoencoderKL, StableDiffusionPipeline

        class Own(StableDiffusionPipeline):  # type: ignore[misc]
            def register_modules(self, **parts: object) -> None:
                super().register_modules(**parts)
                in_thread(lambda: AutoencoderKL.from_pretrained(models.first / "vae"))

        smartcache.enable(always=True)
        in_thread(lambda: Own.from_pretrained(models.first))


def in_thread(task: Callable[[], object]) -> None:
    """Run it in a thread; fail if it raises, or does not come to an end."""
    done: list[object] = []
    thread = threading.Thread(target=lambda: done.append(task()), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert done


class TestShare:
    @pytest.mark.parametrize(
        ("share", "names"),
        [
            (True, {"text_encoder", "vae"}),
            (["text_encoder", "vae"], {"text_encoder", "vae"}),
            ("vae", {"vae"}),
            ([], set()),
        ],
        ids=["all", "some", "one", "none"],
    )
    def test_it_says_what_is_one_object(
        self, share: object, names: set[str], models: Models
    ) -> None:
        smartcache.enable()
        first = load(models.first, smart_cache=True, smart_cache_share=share)
        second = load(models.second, smart_cache=True, smart_cache_share=share)
        assert names == {
            name
            for name in ("text_encoder", "unet", "vae")
            if getattr(first, name) is getattr(second, name)
        }

    def test_it_means_the_flag_too(self, models: Models) -> None:
        smartcache.enable()
        first = load(models.first, smart_cache_share=True)
        assert load(models.second, smart_cache_share=True).vae is first.vae

    def test_a_model_alone_can_be_shared(self, models: Models) -> None:
        from transformers import AutoModel

        smartcache.enable()
        first = AutoModel.from_pretrained(models.language, smart_cache_share=True)
        assert AutoModel.from_pretrained(models.language, smart_cache_share=True) is first

    def test_what_has_no_weights_cannot_be_shared(self, models: Models) -> None:
        from diffusers import DDIMScheduler
        from transformers import AutoTokenizer

        smartcache.enable()
        for cls, name in ((DDIMScheduler, "scheduler"), (AutoTokenizer, "tokenizer")):
            with pytest.raises(
                TypeError, match=f"{cls.__name__}.from_pretrained has no components"
            ):
                cls.from_pretrained(models.first / name, smart_cache_share=True)

    def test_a_single_file_cannot_be_shared(self) -> None:
        from diffusers import StableDiffusionPipeline

        smartcache.enable()
        with pytest.raises(TypeError, match="from_single_file has no components"):
            StableDiffusionPipeline.from_single_file("model.safetensors", smart_cache_share=True)


class TestMapping:
    def test_it_means_the_flag_too(self, known: LibraryHub) -> None:
        smartcache.enable()
        load(SECOND, cache_mapping={})
        assert known.weight_gets() == OWN

    def test_without_smartcache_it_is_refused(self, models: Models) -> None:
        from diffusers import DiffusionPipeline

        with smartcache.enable():
            kept = DiffusionPipeline.from_pretrained
        with pytest.raises(TypeError, match="cache_mapping: smartcache is not enabled"):
            kept(models.first, cache_mapping={})

    def test_a_single_file_takes_none(self, models: Models) -> None:
        from diffusers import AutoencoderKL

        smartcache.enable()
        with pytest.raises(TypeError, match="takes no cache_mapping"):
            AutoencoderKL.from_single_file(str(models.first), cache_mapping={})


class TestSingleFile:
    def test_the_file_comes_out_of_the_store(self, known: LibraryHub, models: Models) -> None:
        from diffusers import AutoencoderKL

        smartcache.enable()
        path = "vae/diffusion_pytorch_model.safetensors"
        config = {"config": str(models.second), "subfolder": "vae"}
        loaded = AutoencoderKL.from_single_file(f"{SECOND}/{path}", smart_cache=True, **config)
        assert isinstance(loaded, AutoencoderKL)
        assert known.weight_gets() == []


class TestWrong:
    @pytest.mark.parametrize(
        ("flags", "error", "words"),
        [
            ({"smart_cache": "yes"}, TypeError, "smart_cache is True or False, not 'yes'"),
            ({"smart_cache": 1}, TypeError, "smart_cache is True or False, not 1"),
            ({"smart_cache_share": 3}, TypeError, "smart_cache_share is True, False or names"),
            ({"smart_cache_share": [3]}, TypeError, "smart_cache_share is True, False or names"),
            (
                {"smart_cache": False, "smart_cache_share": True},
                ValueError,
                "smart_cache_share needs smart_cache=True",
            ),
            ({"cache_mapping": "a"}, TypeError, "cache_mapping is a mutable mapping .*: str"),
            ({"cache_mapping": ()}, TypeError, "cache_mapping is a mutable mapping .*: tuple"),
            (
                {"smart_cache": False, "cache_mapping": {}},
                ValueError,
                "cache_mapping needs smart_cache=True",
            ),
        ],
        ids=str,
    )
    def test_flags(
        self, flags: dict[str, object], error: type[Exception], words: str, models: Models
    ) -> None:
        smartcache.enable()
        with pytest.raises(error, match=words):
            load(models.first, **flags)

    def test_calls_fail_as_ever_without_the_flag(self, models: Models, tmp_path: Path) -> None:
        usual = complaints(models.first, tmp_path)
        assert len(set(usual)) == len(usual)
        with smartcache.enable():
            assert complaints(models.first, tmp_path) == usual
        with smartcache.enable(always=True):
            assert complaints(models.first, tmp_path, smart_cache=False) == usual


def complaints(folder: Path, empty: Path, **flag: bool) -> list[str]:
    """What the libraries say to calls that are wrong in several ways."""
    from diffusers import AutoPipelineForText2Image, DDIMScheduler, UNet2DConditionModel
    from diffusers import DiffusionPipeline as Pipeline
    from transformers import AutoModel, AutoTokenizer, BertModel

    calls: list[Callable[[], object]] = [
        lambda: Pipeline.from_pretrained(**flag),
        lambda: Pipeline.from_pretrained(empty, **flag),
        lambda: Pipeline.from_pretrained(folder, 1, **flag),
        lambda: AutoPipelineForText2Image.from_pretrained(**flag),
        lambda: UNet2DConditionModel.from_pretrained(empty, **flag),
        lambda: DDIMScheduler.from_pretrained(empty, **flag),
        lambda: AutoModel.from_pretrained(**flag),
        lambda: AutoModel.from_pretrained(empty, **flag),
        lambda: AutoTokenizer.from_pretrained(folder, **flag),
        lambda: BertModel.from_pretrained(empty, **flag),
    ]
    return [complaint(call) for call in calls]


def complaint(call: Callable[[], object]) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whichever it is, it is compared
        call()
    return repr(caught.value)


class Heard(logging.Handler):
    """What the libraries log as a warning, or worse, but that something is not installed.

    That they say when a module is imported, in whichever test that may be.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if "(not installed)" not in message:
            self.messages.append(message)


@pytest.fixture
def heard() -> Iterator[Heard]:
    pytest.importorskip("diffusers")
    handler = Heard()
    loggers = [logging.getLogger(name) for name in ("diffusers", "transformers")]
    for logger in loggers:
        logger.addHandler(handler)
    yield handler
    for logger in loggers:
        logger.removeHandler(handler)


IN_PIPELINE = [
    ("diffusers", "DiffusionPipeline", ""),
    ("diffusers", "StableDiffusionPipeline", ""),
    ("diffusers", "AutoPipelineForText2Image", ""),
    ("diffusers", "AutoModel", "vae"),
    ("diffusers", "UNet2DConditionModel", "unet"),
    ("diffusers", "DDIMScheduler", "scheduler"),
    ("transformers", "AutoConfig", "text_encoder"),
    ("transformers", "AutoModel", "text_encoder"),
    ("transformers", "AutoModelForTextEncoding", "text_encoder"),
    ("transformers", "AutoTokenizer", "tokenizer"),
    ("transformers", "CLIPTextConfig", "text_encoder"),
    ("transformers", "CLIPTextModel", "text_encoder"),
    ("transformers", "CLIPTokenizer", "tokenizer"),
]
SMALL = [
    ("transformers", "AutoFeatureExtractor", "preprocessor_config.json"),
    ("transformers", "AutoImageProcessor", "preprocessor_config.json"),
    ("transformers", "CLIPImageProcessorPil", "preprocessor_config.json"),
    ("transformers", "GenerationConfig", "generation_config.json"),
    ("transformers", "Wav2Vec2FeatureExtractor", "preprocessor_config.json"),
]


class TestTraces:
    """The flag is found nowhere in what was loaded: no config, no argument kept for later."""

    @pytest.mark.parametrize("case", IN_PIPELINE, ids=lambda case: f"{case[0]}-{case[1]}")
    def test_of_a_pipeline_and_its_parts(
        self, case: tuple[str, str, str], models: Models, heard: Heard
    ) -> None:
        library, name, part = case
        cls = getattr(pytest.importorskip(library), name)
        smartcache.enable()
        loaded = cls.from_pretrained(str(models.first / part), smart_cache=True)
        assert store_exists() or name.endswith(("Config", "Scheduler"))
        assert_no_trace(loaded)
        assert heard.messages == []

    @pytest.mark.parametrize("case", SMALL, ids=lambda case: str(case[1]))
    def test_of_processors_and_settings(
        self, case: tuple[str, str, str], tmp_path: Path, heard: Heard
    ) -> None:
        library, name, file = case
        kinds = {"image_processor_type": "CLIPImageProcessorPil"}
        if "FeatureExtractor" in name:
            kinds = {"feature_extractor_type": "Wav2Vec2FeatureExtractor"}
        (tmp_path / file).write_text(json.dumps(kinds))
        smartcache.enable()
        loaded = getattr(pytest.importorskip(library), name).from_pretrained(
            tmp_path, smart_cache=True
        )
        assert_no_trace(loaded)
        assert heard.messages == []

    def test_of_what_is_shared(self, models: Models, heard: Heard) -> None:
        smartcache.enable()
        assert_no_trace(load(models.first, smart_cache=True, smart_cache_share=True))
        assert heard.messages == []


def assert_no_trace(loaded: object) -> None:
    assert b"smart_cache" not in pickle.dumps(loaded)
    assert "smart_cache" not in str(vars(loaded))
    for name in ("config", "init_kwargs"):
        assert "smart_cache" not in str(getattr(loaded, name, ""))


class TestClassesOfPrograms:
    def test_one_that_calls_the_librarys_function(self, known: LibraryHub) -> None:
        from diffusers import StableDiffusionPipeline

        class Own(StableDiffusionPipeline):  # type: ignore[misc]
            @classmethod
            def from_pretrained(cls, source: str, **kwargs: object) -> object:
                return super().from_pretrained(source, smart_cache=True, **kwargs)

        smartcache.enable()
        assert isinstance(Own.from_pretrained(SECOND), Own)
        assert known.weight_gets() == OWN

    def test_one_that_hands_everything_on(self, models: Models) -> None:
        from transformers import BertModel

        class Own(BertModel):  # type: ignore[misc]
            @classmethod
            def from_pretrained(cls, *args: object, **kwargs: object) -> object:
                return super().from_pretrained(*args, **kwargs)

        smartcache.enable()
        loaded = Own.from_pretrained(models.language, smart_cache=True)
        assert type(loaded) is Own
        assert_no_trace(loaded.config)

    def test_one_that_loads_another_inside(self, known: LibraryHub) -> None:
        """Each of its two calls is one of its own."""
        from diffusers import AutoencoderKL, StableDiffusionPipeline

        class Own(StableDiffusionPipeline):  # type: ignore[misc]
            @classmethod
            def from_pretrained(cls, source: str, **kwargs: object) -> object:
                vae = AutoencoderKL.from_pretrained(source, subfolder="vae", smart_cache=True)
                return super().from_pretrained(source, vae=vae, smart_cache=True, **kwargs)

        smartcache.enable()
        Own.from_pretrained(SECOND)
        assert known.weight_gets() == OWN
