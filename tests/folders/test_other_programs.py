"""Programs go on working with what `dedup` has made of their folders, by their own measure."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("the layouts are those of Linux", allow_module_level=True)

from smartcache.store.store import Store
from smartcache.system.filesystems import mount_of
from tests.folders.deduping import deduplicated, inodes_of, open_store, planned, undo_everything
from tests.folders.trees import (
    SIZE,
    Machine,
    content,
    safetensors,
    sha256,
    webui,
    write,
)
from tests.hub.caches import hf
from tests.hub_server import Hub
from tests.store.files import inode_of, link_count, snapshot


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    if mount_of(tmp_path).fstype in ("btrfs", "xfs"):
        pytest.skip("reflinks change nothing that a program could see")
    with open_store(tmp_path / "store") as opened:
        yield opened


class TestHuggingFace:
    WEIGHTS = safetensors(1)
    FILES = {  # noqa: RUF012 - never changed
        "config.json": b'{"model_type": "test"}',
        "model.safetensors": WEIGHTS,
        "vae/model.safetensors": safetensors(2),
    }

    @pytest.fixture
    def cache(self, hub: Hub, tmp_path: Path) -> Path:
        """Two repositories with a file in common, as `hf download` made them; and a ComfyUI."""
        cache = tmp_path / "hub"
        hub.add("org/one", self.FILES)
        hub.add("org/two", {"README.md": b"two", "same.safetensors": self.WEIGHTS})
        for name in ("org/one", "org/two"):
            hf(hub, cache, "download", name)
        write(tmp_path / "ComfyUI" / "models" / "checkpoints" / "x.safetensors", self.WEIGHTS)
        return cache

    def test_a_deduplicated_cache_is_valid_by_its_own_tools(
        self, cache: Path, hub: Hub, store: Store, tmp_path: Path
    ) -> None:
        """And a repository that is removed leaves the others whole."""
        before = snapshot(cache)
        result = deduplicated(store, cache, tmp_path / "ComfyUI")
        assert result.replaced == 2
        blob = sha256(self.WEIGHTS)
        names = [cache / f"models--org--{name}" / "blobs" / blob for name in ("one", "two")]
        assert len(inodes_of(names)) == 1
        strict = ("--fail-on-missing-files", "--fail-on-extra-files")
        for name in ("org/one", "org/two"):
            hf(hub, cache, "cache", "verify", name, *strict)
        listed = json.loads(hf(hub, cache, "cache", "ls", "--json"))
        assert {entry["id"] for entry in listed} == {"model/org/one", "model/org/two"}
        after = snapshot(cache)
        links = {name: facts for name, facts in before.items() if facts[0] == "symlink"}
        assert links.items() <= after.items()
        hub.clear()
        hf(hub, cache, "download", "org/one")
        hf(hub, cache, "download", "org/two")
        assert hub.gets() == []
        assert len(inodes_of(names)) == 1
        hf(hub, cache, "cache", "rm", "model/org/one", "-y")
        assert not names[0].parent.parent.exists()
        comfy = tmp_path / "ComfyUI" / "models" / "checkpoints" / "x.safetensors"
        for _ in range(2):
            hf(hub, cache, "cache", "verify", "org/two")
            assert comfy.read_bytes() == self.WEIGHTS
            undo_everything(store)


def test_ollama_finds_every_layer_with_the_bytes_of_its_name(
    machine: Machine, store: Store
) -> None:
    deduplicated(store, machine.home)
    assert link_count(machine.shared["llama"].paths[0]) > 1
    checked = 0
    for manifest in (machine.folder["Ollama"] / "manifests").rglob("*"):
        if manifest.is_dir():
            continue
        document = json.loads(manifest.read_text())
        for layer in (document["config"], *document["layers"]):
            blob = machine.folder["Ollama"] / "blobs" / layer["digest"].replace(":", "-")
            assert stat.S_ISREG(os.lstat(blob).st_mode)
            assert os.lstat(blob).st_size == layer["size"]
            assert f"sha256:{hashlib.sha256(blob.read_bytes()).hexdigest()}" == layer["digest"]
            checked += 1
    assert checked >= 12


def test_a1111_need_not_hash_a_checkpoint_again(machine: Machine, store: Store) -> None:
    """It knows the hash of a checkpoint for as long as the file's time is the same."""
    models = machine.a1111
    hashes = json.loads((models.parent / "cache.json").read_text())["hashes"]
    deduplicated(store, machine.home)
    assert link_count(models / "Stable-diffusion" / "sdxl.safetensors") > 1
    for title, known in hashes.items():
        path = models / "Stable-diffusion" / title.removeprefix("checkpoint/")
        assert path.stat().st_mtime == known["mtime"]
        assert sha256(path.read_bytes()) == known["sha256"]


def test_that_a1111_must_hash_again_is_said_before(store: Store, tmp_path: Path) -> None:
    """Bytes that are in the store already keep the time they came with."""
    older = write(tmp_path / "ComfyUI" / "x.safetensors", content(1), mtime=1_600_000_000)
    write(tmp_path / "ComfyUI" / "y.safetensors", content(1), mtime=1_600_000_001)
    assert planned(store, tmp_path / "ComfyUI").warnings == ()
    deduplicated(store, tmp_path / "ComfyUI")
    models = webui(tmp_path / "webui")
    checkpoint = write(models / "Stable-diffusion" / "z.safetensors", content(1))
    plan = planned(store, tmp_path / "ComfyUI", tmp_path / "webui")
    (warning,) = plan.warnings
    assert "1 file" in warning
    assert "A1111" in warning
    plan.execute()
    assert checkpoint.stat().st_mtime == older.stat().st_mtime
    assert older.read_bytes() == checkpoint.read_bytes()


def test_lm_studio_has_ordinary_files(machine: Machine, store: Store) -> None:
    """It does not follow links to folders, and looks at the size of files."""
    deduplicated(store, machine.home)
    found = [path for path in machine.folder["LM Studio"].rglob("*") if not path.is_dir()]
    assert {stat.S_IFMT(os.lstat(path).st_mode) for path in found} == {stat.S_IFREG}
    assert all(os.lstat(path).st_size == SIZE for path in found)
    shared = machine.shared["llama"].paths
    (mine,) = [path for path in shared if path.is_relative_to(machine.folder["LM Studio"])]
    assert link_count(mine) == len(shared) + 1
    assert {inode_of(path) for path in shared} == {inode_of(mine)}


@pytest.mark.torch
def test_libraries_load_what_is_shared_and_what_they_save_anew_changes_no_other(
    tmp_path: Path, store: Store
) -> None:
    """Without warnings, mapped too; saved as safetensors does, or a new download."""
    import torch
    from safetensors.torch import load_file, save_file

    old = {"weight": torch.arange(30_000, dtype=torch.float32)}
    new = {"weight": torch.ones(30_000)}
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
        save_file(old, folder / "x.safetensors")
        torch.save(old, folder / "x.pt")
    assert deduplicated(store, *folders).replaced == 2
    for folder in folders:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = [load_file(folder / "x.safetensors")]
            found += [
                torch.load(folder / "x.pt", weights_only=True, mmap=way) for way in (False, True)
            ]
        assert all(torch.equal(each["weight"], old["weight"]) for each in found)
    save_file(new, folders[1] / "x.safetensors")
    for _ in range(2):
        first, second = (load_file(folder / "x.safetensors")["weight"] for folder in folders)
        assert torch.equal(first, old["weight"])
        assert torch.equal(second, new["weight"])
        undo_everything(store)
