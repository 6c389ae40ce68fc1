"""Loaders of other people while smartcache is enabled: none fetches a weight that is known here.

There are three repos with equal weights: those of `KNOWN` came before, the loader loads `WANTED`
while smartcache is enabled, and `AGAIN` when it is not.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FunctionType

import pytest
from huggingface_hub import HfApi, file_download

import smartcache
from smartcache.system.filesystems import mount_of
from tests.hub_server.pipelines import LEAST_WEIGHTS, Models, files_of, seed
from tests.pretrained.libraries import LibraryHub
from tests.pretrained.loaders import FILE, ROWS, Here, Row
from tests.pretrained.scenarios import assert_sound, files_of_store, store, tensors
from tests.store.files import inode_of

KNOWN, WANTED, AGAIN = "org/known", "org/wanted", "org/again"
OWN_NAMES = ("README.md", ".cache")
"""What the repos differ in, and where huggingface_hub keeps what it knows of a folder."""

# Of the libraries among each other.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(autouse=True)
def _off_again() -> Iterator[None]:
    yield
    smartcache.disable()


@pytest.fixture
def here(models: Models, tmp_path: Path) -> Here:
    return Here(models, tmp_path)


def publish(
    library_hub: LibraryHub, row: Row, here: Here, xet: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Publish the three repos of a row; return {path: sha256} of their weights."""
    folder = here.path / "made"
    folder.mkdir()
    seed(7)
    row.make(here.models, folder)
    for name in (KNOWN, WANTED, AGAIN):
        files = {**files_of(folder), "README.md": name.encode()}
        commit = library_hub.hub.add(name, files, repo_type=row.repo_type, xet=xet)
    found = {path: file for path, file in sorted(commit.files.items()) if file.is_lfs}
    assert min(file.size for file in found.values()) >= LEAST_WEIGHTS
    return {path: file.sha256 for path, file in found.items()}


def fetched(library_hub: LibraryHub, weights: dict[str, str]) -> list[str]:
    """Return which weights were fetched since the last `clear`, `org/name/path` each."""
    files = {f"{name}/{path}" for name in (KNOWN, WANTED, AGAIN) for path in weights}
    return sorted(each.file for each in library_hub.hub.gets() if each.file in files)


def content(loaded: object) -> dict[str, object]:
    """Return what was loaded as values that can be compared: of files, columns or tensors."""
    if isinstance(loaded, dict):
        return loaded
    if isinstance(loaded, str):
        path = Path(loaded)
        files = path.glob("*.*") if path.is_dir() else [path]
        return {each.name: each.read_bytes() for each in files if each.name not in OWN_NAMES}
    found = tensors(loaded).items()
    return {name: (each.dtype, each.numpy().tobytes()) for name, each in found}


def functions() -> dict[tuple[str, str], FunctionType]:
    """Return every function that a loaded module of huggingface_hub names."""
    modules = [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]
    return {
        (module, name): value
        for module in modules
        for name, value in list(vars(sys.modules[module]).items())
        if isinstance(value, FunctionType)
    }


def assert_linked(here: Here, weights: dict[str, str]) -> None:
    """The one file that a loader got for each weight is the blob of the store."""
    for path, sha256 in weights.items():
        in_cache = [*here.path.rglob(f"*--{WANTED.replace('/', '--')}/blobs/{sha256}")]
        in_folder = here.local_dir(WANTED) / path
        (placed,) = in_cache or [in_folder]
        blob = store().find("sha256", sha256)
        assert blob is not None
        # huggingface_hub writes into stale files of a folder: root, whom no mode stops, has a copy.
        is_linked = bool(in_cache) or os.geteuid() != 0
        if mount_of(here.path).fstype not in ("btrfs", "xfs"):  # reflinks have their own inodes
            assert (inode_of(placed) == inode_of(store().path_of(blob.digest))) == is_linked


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_no_known_weight_is_fetched(row: Row, library_hub: LibraryHub, here: Here) -> None:
    weights = publish(library_hub, row, here)
    smartcache.snapshot_download(KNOWN, repo_type=row.repo_type)
    library_hub.clear()
    smartcache.enable()
    served = content(row.load(WANTED, here))
    assert fetched(library_hub, weights) == []
    assert_linked(here, weights)
    smartcache.disable()
    assert content(row.load(AGAIN, here)) == served
    assert fetched(library_hub, weights) == [f"{AGAIN}/{path}" for path in weights]
    assert_sound(library_hub)


@pytest.mark.parametrize(
    "name", ["load_lora_weights", "AutoModel.from_pretrained", "HfApi.snapshot_download"]
)
def test_what_a_loader_has_fetched_is_known_from_then_on(
    name: str, library_hub: LibraryHub, here: Here
) -> None:
    row = ROWS[name]
    weights = publish(library_hub, row, here)
    smartcache.enable()
    first = content(row.load(KNOWN, here))
    assert content(row.load(WANTED, here)) == first
    assert fetched(library_hub, weights) == [f"{KNOWN}/{path}" for path in weights]
    assert_linked(here, weights)
    assert_sound(library_hub)


def test_a_program_with_the_variable_fetches_nothing_known(
    library_hub: LibraryHub, here: Here
) -> None:
    weights = publish(library_hub, ROWS["HfApi.hf_hub_download"], here)
    smartcache.snapshot_download(KNOWN)
    library_hub.clear()
    code = f"""
from huggingface_hub import hf_hub_download
import smartcache.auto
print(hf_hub_download({WANTED!r}, {FILE!r}))
"""
    command = [sys.executable, "-c", code]
    environment = {**os.environ, **library_hub.environment, "SMARTCACHE": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == (f"{library_hub.snapshot(WANTED) / FILE}\n", "")
    assert fetched(library_hub, weights) == []
    assert_linked(here, weights)


def test_what_is_forced_is_fetched_and_the_blob_stays(library_hub: LibraryHub, here: Here) -> None:
    row = ROWS["HfApi.hf_hub_download"]
    weights = publish(library_hub, row, here)
    smartcache.snapshot_download(KNOWN)
    smartcache.enable()
    served = content(row.load(WANTED, here))
    before = files_of_store()
    library_hub.clear()
    forced = HfApi().hf_hub_download(WANTED, FILE, force_download=True)
    assert fetched(library_hub, weights) == [f"{WANTED}/{FILE}"]
    assert content(forced) == served
    assert files_of_store() == before
    assert_sound(library_hub)


@pytest.mark.parametrize("is_off", ["0", "1"])
@pytest.mark.parametrize("name", ["hf_hub_download, bound before", "snapshot_download to a folder"])
def test_a_known_weight_of_xet_needs_no_xet(
    name: str, is_off: str, library_hub: LibraryHub, here: Here
) -> None:
    """What came by Xet is moved to huggingface_hub's own shared store, with the mode of its cache.

    A blob must not get that mode. There is no Xet server: whoever asks for it fails.
    """
    pytest.importorskip("hf_xet")
    row = ROWS[name]
    weights = publish(library_hub, row, here, xet={FILE: "ab" * 32})
    smartcache.snapshot_download(KNOWN)
    library_hub.clear()
    library_hub.cache_dir.chmod(0o700)
    library_hub.hub.xet_headers = True
    with library_hub.set(HF_HUB_DISABLE_XET="0", HF_HUB_DISABLE_SHARED_BLOBS=is_off):
        smartcache.enable()
        found = content(row.load(WANTED, here))
    assert found[FILE] == (here.path / "made" / FILE).read_bytes()
    assert not [each for each in library_hub.hub.requests if "xet" in each.path]
    assert fetched(library_hub, weights) == []
    assert {mode for mode, _, _ in files_of_store().values()} == {0o100444}
    assert_sound(library_hub)


@pytest.mark.parametrize("has_loaded", [False, True])
def test_huggingface_hub_has_its_very_functions_when_it_is_off_again(
    has_loaded: bool, library_hub: LibraryHub, here: Here
) -> None:
    row = ROWS["snapshot_download, bound before"]
    publish(library_hub, row, here)
    row.load(KNOWN, here)  # so that what is imported on first use is there
    before, original = functions(), file_download._download_to_tmp_and_move  # noqa: SLF001
    with smartcache.enable():
        smartcache.enable()
        if has_loaded:
            row.load(WANTED, here)
    smartcache.disable()
    assert file_download._download_to_tmp_and_move is original  # noqa: SLF001
    assert functions() == before
