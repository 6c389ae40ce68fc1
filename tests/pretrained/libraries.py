"""The real huggingface_hub, diffusers and transformers of this process, turned to the tests' Hub.

    def test_a_model(library_hub: LibraryHub, models: Models) -> None:
        library_hub.hub.add_folder("org/name", models.language)
        AutoModel.from_pretrained("org/name")
        assert library_hub.weight_gets() == ["org/name/model.safetensors"]

The libraries read their variables when they are imported. `turn_to` reads them again as a new
process would, and sets what has become of them wherever it was copied to: only configuration is
changed, no function. Whatever would go to another server meets a proxy that nobody runs.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.hub_server import Hub
from tests.hub_server.repos import Commit

LIBRARIES = ("accelerate", "diffusers", "huggingface_hub", "transformers")
WEIGHTS = (".bin", ".ckpt", ".safetensors")
_NOWHERE = "http://127.0.0.1:9"


@dataclass(frozen=True, slots=True)
class LibraryHub:
    """A Hub that the libraries of this process ask, and the HF cache that they use."""

    hub: Hub
    home: Path
    """`HF_HOME`."""

    @property
    def cache_dir(self) -> Path:
        """`HF_HUB_CACHE`."""
        return self.home / "hub"

    def clear(self) -> None:
        """Forget what was asked so far."""
        self.hub.clear()

    def weight_gets(self) -> list[str]:
        """Return which weight files were fetched since the last `clear`, `org/name/path` each."""
        files = (each.file for each in self.hub.gets())
        return sorted(file for file in files if file and file.endswith(WEIGHTS))

    def weights_fetched(self) -> int:
        """Return how many bytes of weights were fetched since the last `clear`."""
        gets = (each for each in self.hub.gets() if str(each.file).endswith(WEIGHTS))
        return sum(each.sent for each in gets)

    def repo_folder(self, name: str) -> Path:
        return self.cache_dir / f"models--{name.replace('/', '--')}"

    def blobs(self, name: str) -> dict[str, Path]:
        """Return {etag: path} of what is in the repo's `blobs/`, links that nobody uses too."""
        folder = self.repo_folder(name) / "blobs"
        return {path.name: path for path in folder.iterdir()} if folder.exists() else {}

    def commit(self, name: str, revision: str = "main") -> Commit:
        """Return what the Hub has under a revision."""
        commit = self.hub.repositories["model", name].find(revision)
        assert commit is not None
        return commit

    def snapshot(self, name: str, revision: str = "main") -> Path:
        return self.repo_folder(name) / "snapshots" / self.commit(name, revision).sha

    def blob(self, name: str, path: str, revision: str = "main") -> Path:
        """Return where the HF cache keeps the bytes of a file, there or not."""
        return self.repo_folder(name) / "blobs" / self.commit(name, revision).etag(path)

    @property
    def environment(self) -> dict[str, str]:
        """Variables that turn a child process to the same Hub and cache."""
        own = {"HF_HOME": str(self.home), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        return {**self.hub.environment, **own, "HTTPS_PROXY": _NOWHERE, "https_proxy": _NOWHERE}

    @contextmanager
    def offline(self) -> Iterator[None]:
        """`HF_HUB_OFFLINE=1` for what happens in this block, child processes included."""
        with self.set(HF_HUB_OFFLINE="1"):
            yield

    @contextmanager
    def set(self, **variables: str) -> Iterator[None]:
        """Let the libraries of this process, and its children, see other variables."""
        with pytest.MonkeyPatch.context() as patch:
            turn_to(variables, patch)
            yield
        _aim_clients()


@contextmanager
def library_hub_at(home: Path, hub: Hub) -> Iterator[LibraryHub]:
    """Turn the libraries to a Hub and to a new `HF_HOME`; as they were before afterwards."""
    from huggingface_hub import close_session

    # A connection remembers the proxy of its day.
    close_session()
    with _silence(), pytest.MonkeyPatch.context() as patch:
        library_hub = LibraryHub(hub, home)
        turn_to(library_hub.environment, patch)
        yield library_hub
    _aim_clients()
    close_session()


@contextmanager
def _silence() -> Iterator[None]:
    """No progress bars of the libraries in this block."""
    import diffusers.utils.logging
    import transformers.utils.logging

    logs = (diffusers.utils.logging, transformers.utils.logging)
    shown = [log for log in logs if log.is_progress_bar_enabled()]
    for log in shown:
        log.disable_progress_bar()
    try:
        yield
    finally:
        for log in shown:
            log.enable_progress_bar()


def turn_to(variables: Mapping[str, str], patch: pytest.MonkeyPatch) -> None:
    """Set variables, and in the libraries what comes of them."""
    import diffusers  # noqa: F401 - loaded before the values are looked for
    import transformers  # noqa: F401
    from huggingface_hub import constants

    for name, value in variables.items():
        patch.setenv(name, value)
    wanted = _read_again(constants)
    wanted["HF_MODULES_CACHE"] = os.path.join(str(wanted["HF_HOME"]), "modules")
    wanted["HUGGINGFACE_CO_RESOLVE_ENDPOINT"] = wanted["ENDPOINT"]
    for module in _modules_of_libraries():
        for name in wanted.keys() & vars(module).keys():
            if vars(module)[name] != wanted[name]:
                patch.setattr(module, name, wanted[name])
    _aim_clients()


def _aim_clients() -> None:
    """Let the clients that the libraries keep ask the Hub that the constants name now."""
    from huggingface_hub import HfApi, constants

    for module in _modules_of_libraries():
        for value in list(vars(module).values()):
            if isinstance(value, HfApi):
                value.endpoint = constants.ENDPOINT


def _read_again(constants: types.ModuleType) -> dict[str, object]:
    """Return huggingface_hub's constants as a process that starts now would have them."""
    spec = importlib.util.spec_from_file_location("constants_now", str(constants.__file__))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kinds = (str, bool, int, frozenset, type(None))
    return {
        name: value
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, kinds)
    }


def _modules_of_libraries() -> list[types.ModuleType]:
    return [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in LIBRARIES and isinstance(module, types.ModuleType)
    ]
