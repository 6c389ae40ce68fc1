"""The data backend for SimpleTuner: what its caches do with a local one."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from smartcache.errors import ConfigError, UnsupportedValueError
from smartcache.integrations.simpletuner import DataBackend
from tests.processes.killing import in_child, was_killed

if TYPE_CHECKING:
    import torch  # noqa: TC004 - loaded by the fixture below

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True, scope="module")
def _torch() -> None:
    """Load torch when the first test runs, and not when they are collected."""
    global torch  # noqa: PLW0603
    import torch


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def backend(root: Path) -> DataBackend:
    return DataBackend(None, "photos", root=root)


def pt_files(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.rglob("*.pt"))


def test_it_is_a_backend_of_simpletuner(root: Path) -> None:
    base = pytest.importorskip("simpletuner.helpers.data_backend.base").BaseDataBackend
    made = DataBackend(None, "photos", root=root)
    assert isinstance(made, base)
    assert all(callable(getattr(made, name)) for name in base.__abstractmethods__)
    assert len(base.__abstractmethods__) == 15


def test_tensors_come_back_exactly_and_are_no_files(backend: DataBackend, root: Path) -> None:
    latent = torch.randn(4, 8, 8).to(torch.bfloat16)
    embeds: dict[str, Any] = {
        "prompt_embeds": torch.randn(1, 7, 3),
        "masks": None,
        "sizes": [1, (2, 3)],
    }
    backend.create_directory(root / "vae" / "sub")
    backend.write_batch([str(root / "vae/sub/a.pt")], [latent])
    backend.torch_save(embeds, str(root / "text" / "b.pt"))
    assert pt_files(root) == []
    found = backend.torch_load(str(root / "vae/sub/a.pt"))
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, latent)
    again = backend.torch_load(str(root / "text" / "b.pt"))
    assert again.keys() == embeds.keys()
    assert torch.equal(again["prompt_embeds"], embeds["prompt_embeds"])
    assert (again["masks"], again["sizes"]) == (None, [1, (2, 3)])
    read = torch.load(io.BytesIO(backend.read(root / "vae/sub/a.pt")), weights_only=True)
    assert torch.equal(read, latent)


def test_they_are_listed_by_folder_as_a_local_backend_lists_files(
    backend: DataBackend, root: Path
) -> None:
    for name in ("vae/1.pt", "vae/sub/2.pt", "text/3.pt"):
        backend.torch_save(torch.zeros(1), str(root / name))
    vae = root / "vae"
    wanted: list[tuple[str, list[str], list[str]]]
    wanted = [(str(vae), [], [str(vae / "1.pt")]), (str(vae / "sub"), [], [str(vae / "sub/2.pt")])]
    assert sorted(backend.list_files(["pt"], str(vae))) == wanted
    assert sum(len(files) for _, _, files in backend.list_files(["pt"], str(root))) == 3
    with pytest.raises(FileNotFoundError):
        backend.list_files(["pt"], str(root / "nowhere"))
    with pytest.raises(ConfigError):
        backend.list_files(["pt"], "")


def test_deleted_is_gone(backend: DataBackend, root: Path) -> None:
    path = str(root / "vae/1.pt")
    assert not backend.exists(path)
    assert not backend.exists(None)
    backend.torch_save(torch.zeros(1), path)
    assert backend.exists(path)
    backend.delete(path)
    assert not backend.exists(path)
    for act in (backend.delete, backend.torch_load, backend.read):
        with pytest.raises(FileNotFoundError):
            act(path)


def test_other_files_are_plain_files(backend: DataBackend, root: Path, tmp_path: Path) -> None:
    listed, outside = root / "meta" / "aspect.json", tmp_path / "elsewhere" / "x.pt"
    backend.write(str(listed), '{"ä": 1}')
    assert listed.read_text("utf-8") == '{"ä": 1}'
    assert backend.read(str(listed)) == listed.read_bytes()
    with backend.open_file(str(listed), "r") as file:
        assert file.read() == '{"ä": 1}'
    assert backend.list_files(["json"], str(root)) == [(str(root / "meta"), [], [str(listed)])]
    backend.torch_save(torch.ones(2), str(outside))
    assert torch.equal(torch.load(outside, weights_only=True), torch.ones(2))
    assert torch.equal(backend.torch_load(str(outside)), torch.ones(2))
    backend.delete(str(listed))
    assert not listed.exists()
    assert sorted(os.listdir(root / "meta")) == []


@pytest.mark.parametrize("is_compressed", [False, True])
def test_files_of_a_local_backend_are_read_where_they_lie(
    backend: DataBackend, root: Path, *, is_compressed: bool
) -> None:
    path = root / "vae" / "old.pt"
    path.parent.mkdir(parents=True)
    data = io.BytesIO()
    torch.save({"latents": torch.arange(5)}, data)
    path.write_bytes(gzip.compress(data.getvalue()) if is_compressed else data.getvalue())
    assert backend.exists(path)
    assert torch.equal(backend.torch_load(str(path))["latents"], torch.arange(5))
    assert backend.list_files(["pt"], str(root)) == [(str(path.parent), [], [str(path)])]
    backend.torch_save(torch.ones(1), str(path))
    assert not path.exists()
    assert torch.equal(backend.torch_load(str(path)), torch.ones(1))
    assert backend.list_files(["pt"], str(root)) == [(str(path.parent), [], [str(path)])]


def test_no_code_in_a_file_is_run(backend: DataBackend, root: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "ran"),)

    path = root / "vae" / "evil.pt"
    path.parent.mkdir(parents=True)
    torch.save(Evil(), path)
    with pytest.raises(UnsupportedValueError):
        backend.torch_load(str(path))
    with pytest.raises(UnsupportedValueError):
        backend.write(str(root / "vae" / "other.pt"), path.read_bytes())
    assert not (tmp_path / "ran").exists()
    assert not backend.exists(str(root / "vae" / "other.pt"))


def test_an_open_file_counts_when_it_is_closed(backend: DataBackend, root: Path) -> None:
    path = str(root / "vae/1.pt")
    with backend.open_file(path, "wb") as file:
        backend.torch_save(torch.ones(3), file)
        assert not backend.exists(path)
    with backend.open_file(path, "rb") as file:
        assert torch.equal(torch.load(file, weights_only=True), torch.ones(3))
    with pytest.raises(ZeroDivisionError), backend.open_file(path, "wb") as file:
        file.write(bytes([1 // 0]))
    assert torch.equal(backend.torch_load(path), torch.ones(3))
    with pytest.raises(ConfigError, match="mode"):
        backend.open_file(path, "r+b")


def test_another_fingerprint_has_tensors_of_its_own(root: Path) -> None:
    one = DataBackend(None, "a", root=root, fingerprint={"vae": "1"})
    two = DataBackend(None, "a", root=root, fingerprint={"vae": "2"})
    path = str(root / "vae/1.pt")
    one.torch_save(torch.ones(1), path)
    assert not two.exists(path)
    assert one.exists(path)


def test_another_process_finds_it_also_after_a_kill(root: Path) -> None:
    def save_and_die() -> None:
        mine = DataBackend(None, "photos", root=root)
        for number in range(5):
            mine.torch_save(torch.full((3,), number), str(root / f"{number}.pt"))
        os.kill(os.getpid(), signal.SIGKILL)

    assert was_killed(in_child(save_and_die))
    first = DataBackend(None, "photos", root=root)
    for made in (
        DataBackend.from_instance_representation(first.get_instance_representation()),
        pickle.loads(pickle.dumps(first)),  # noqa: S301 - as SimpleTuner's workers do
    ):
        assert [int(made.torch_load(root / f"{n}.pt")[0]) for n in range(5)] == list(range(5))
        assert made.id == "photos"
    with pytest.raises(ConfigError):
        DataBackend.from_instance_representation({"backend_type": "local", "id": "x"})


def test_many_threads_write_at_once(backend: DataBackend, root: Path) -> None:
    def save(number: int) -> None:
        backend.write(str(root / f"{number % 20}.pt"), torch.full((50,), number % 20))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(save, range(100)))
    assert [int(backend.torch_load(root / f"{n}.pt")[7]) for n in range(20)] == list(range(20))


def test_images_are_read_by_simpletuner_itself(backend: DataBackend, root: Path) -> None:
    pytest.importorskip("simpletuner.helpers.data_backend.local")
    from PIL import Image

    path = root / "a.png"
    Image.new("RGB", (8, 6), "red").save(path)
    paths, images = backend.read_image_batch([str(path), str(root / "missing.png")])
    assert paths == [str(path)]
    assert images[0].size == (8, 6)
    assert backend.list_files(None, str(root)) == [(str(root), [], [str(path)])]
