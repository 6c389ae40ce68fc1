"""Models that another machine has pushed to a tier are loaded without a byte from the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import huggingface_hub
import pytest

import smartcache
from smartcache.cache import SmartCache
from smartcache.hub.api import Call
from tests.hub_server.pipelines import Models
from tests.pretrained.libraries import LibraryHub

pytestmark = [
    # diffusers passes it to huggingface_hub with the config of every model and scheduler.
    pytest.mark.filterwarnings("ignore:The `local_dir_use_symlinks` argument:UserWarning"),
]


@pytest.fixture(autouse=True)
def _pushed(library_hub: LibraryHub, models: Models, tmp_path: Path) -> None:
    """Machine A has downloaded a pipeline and a model, and pushed them."""
    library_hub.hub.add_folder("org/first", models.first)
    library_hub.hub.add_folder("org/language", models.language)
    with SmartCache(tmp_path / "a" / "store") as cache:
        cache.remotes.add("nas", str(tmp_path / "nas"))
        for name in ("org/first", "org/language"):
            arguments = {"cache_dir": tmp_path / "a" / "hf", "endpoint": library_hub.hub.url}
            cache.download(Call(repo_id=name, arguments=arguments))
            cache.push("nas", name)
    library_hub.hub.requests.clear()


def load(source: str, **arguments: object) -> Any:  # noqa: ANN401 - of many classes
    return cast("Any", smartcache.from_pretrained)(source, **arguments)


def test_no_byte_of_a_file_comes_from_the_hub(library_hub: LibraryHub) -> None:
    pipeline = load("org/first")
    picture = pipeline("a cat", num_inference_steps=1, height=32, width=32, output_type="np")
    assert picture.images.shape == (1, 32, 32, 3)
    load("org/language")
    assert library_hub.hub.requests.gets() == []


@pytest.mark.parametrize("subfolder", ["unet", "tokenizer", "scheduler"])
def test_nor_of_a_part_of_a_pipeline(library_hub: LibraryHub, subfolder: str) -> None:
    load("org/first", subfolder=subfolder)
    assert library_hub.hub.requests.gets() == []


def test_with_the_hub_switched_off_a_pipeline_is_loaded(
    library_hub: LibraryHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    library_hub.hub.close()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert load("org/first").unet is not None
