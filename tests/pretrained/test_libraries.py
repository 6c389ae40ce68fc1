"""The fixture that turns the libraries of this process to the tests' Hub does what it says."""

from __future__ import annotations

import pytest

from tests.hub_server.pipelines import OWN_WEIGHTS, SHARED_WEIGHTS, Models
from tests.pretrained.libraries import LibraryHub


def test_a_pipeline_comes_from_the_hub_of_the_test(library_hub: LibraryHub, models: Models) -> None:
    from diffusers import DiffusionPipeline

    library_hub.hub.add_folder("org/first", models.first)
    DiffusionPipeline.from_pretrained("org/first")
    wanted = {f"org/first/{path}" for path in (*SHARED_WEIGHTS, OWN_WEIGHTS)}
    assert set(library_hub.weight_gets()) == wanted
    assert library_hub.weights_fetched() == sum(
        models.size(path) for path in (*SHARED_WEIGHTS, OWN_WEIGHTS)
    )
    for path in SHARED_WEIGHTS:
        assert (library_hub.snapshot("org/first") / path).resolve() == library_hub.blob(
            "org/first", path
        )


def test_a_model_comes_from_the_hub_of_the_test(library_hub: LibraryHub, models: Models) -> None:
    from transformers import AutoModel

    library_hub.hub.add_folder("org/language", models.language)
    AutoModel.from_pretrained("org/language")
    assert library_hub.weight_gets() == ["org/language/model.safetensors"]


def test_every_client_of_the_libraries_asks_the_hub_of_the_test(library_hub: LibraryHub) -> None:
    import huggingface_hub.hf_api
    import transformers.utils.hub

    for client in (huggingface_hub.hf_api.api, transformers.utils.hub.hf_api()):
        assert client.endpoint == library_hub.hub.url


def test_offline_means_that_nothing_is_asked(library_hub: LibraryHub, models: Models) -> None:
    from transformers import AutoModel

    library_hub.hub.add_folder("org/language", models.language)
    with library_hub.offline():
        with pytest.raises(OSError, match="couldn't connect"):
            AutoModel.from_pretrained("org/language")
        assert library_hub.hub.requests == []
    AutoModel.from_pretrained("org/language")
    library_hub.clear()
    with library_hub.offline():
        AutoModel.from_pretrained("org/language")
    assert library_hub.hub.requests == []
