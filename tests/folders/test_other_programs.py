"""Programs go on working with what `dedup` has made of their folders, by their own measure."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
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
    make_machine,
    safetensors,
    sha256,
    webui,
    write,
)
from tests.hub_server import Hub
from tests.store.files import inode_of, link_count, snapshot

HF = Path(sys.executable).with_name("hf")
PATIENCE = 100.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    if mount_of(tmp_path).fstype in ("btrfs", "xfs"):
        pytest.skip("reflinks change nothing that a program could see")
    with open_store(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return make_machine(tmp_path / "home")


def hf(hub: Hub, *words: str | Path, code: int = 0) -> str:
    """Run the real `hf` against the Hub of the test."""
    done = subprocess.run(
        [str(HF), *map(str, words)],
        env={**os.environ, **hub.environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(not HF.exists(), reason="no hf here")
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
            hf(hub, "download", name, "--cache-dir", cache)
        write(tmp_path / "ComfyUI" / "models" / "checkpoints" / "x.safetensors", self.WEIGHTS)
        return cache

    def test_a_deduplicated_cache_is_valid_by_its_own_tools(
        self, cache: Path, hub: Hub, store: Store, tmp_path: Path
    ) -> None:
        before = snapshot(cache)
        result = deduplicated(store, cache, tmp_path / "ComfyUI")
        assert result.replaced == 2
        blob = sha256(self.WEIGHTS)
        names = [cache / f"models--org--{name}" / "blobs" / blob for name in ("one", "two")]
        assert len(inodes_of(names)) == 1
        strict = ("--fail-on-missing-files", "--fail-on-extra-files")
        for name in ("org/one", "org/two"):
            hf(hub, "cache", "verify", name, "--cache-dir", cache, *strict)
        listed = json.loads(hf(hub, "cache", "ls", "--cache-dir", cache, "--json"))
        assert {entry["id"] for entry in listed} == {"model/org/one", "model/org/two"}
        after = snapshot(cache)
        links = {name: facts for name, facts in before.items() if facts[0] == "symlink"}
        assert links.items() <= after.items()
        for name in links:
            assert (cache / name).read_bytes() == self.FILES.get(
                name.partition("/snapshots/")[2].partition("/")[2], (cache / name).read_bytes()
            )
        hub.clear()
        hf(hub, "download", "org/one", "--cache-dir", cache)
        hf(hub, "download", "org/two", "--cache-dir", cache)
        assert hub.gets() == []
        assert len(inodes_of(names)) == 1

    def test_verify_would_have_found_a_wrong_byte(
        self, cache: Path, hub: Hub, store: Store
    ) -> None:
        """The check above can fail."""
        deduplicated(store, cache)
        blob = cache / "models--org--one" / "blobs" / sha256(self.WEIGHTS)
        write(cache / "new", content(9)).replace(blob)
        hf(hub, "cache", "verify", "org/one", "--cache-dir", cache, code=1)

    def test_a_repository_that_is_removed_leaves_the_other_whole(
        self, cache: Path, hub: Hub, store: Store, tmp_path: Path
    ) -> None:
        deduplicated(store, cache, tmp_path / "ComfyUI")
        hf(hub, "cache", "rm", "model/org/one", "--cache-dir", cache, "-y")
        assert not (cache / "models--org--one").exists()
        hf(hub, "cache", "verify", "org/two", "--cache-dir", cache)
        comfy = tmp_path / "ComfyUI" / "models" / "checkpoints" / "x.safetensors"
        assert comfy.read_bytes() == self.WEIGHTS
        undo_everything(store)
        hf(hub, "cache", "verify", "org/two", "--cache-dir", cache)
        assert comfy.read_bytes() == self.WEIGHTS

    def test_the_library_sees_a_cache_without_warnings(
        self, machine: Machine, store: Store
    ) -> None:
        from huggingface_hub import scan_cache_dir

        before = scan_cache_dir(machine.hugging_face)
        deduplicated(store, machine.home)
        after = scan_cache_dir(machine.hugging_face)
        assert after.warnings == []
        assert {repo.repo_id for repo in after.repos} == {repo.repo_id for repo in before.repos}
        assert after.size_on_disk == before.size_on_disk
        for repo in after.repos:
            for revision in repo.revisions:
                for file in revision.files:
                    assert file.file_path.is_symlink()
                    assert file.blob_path.is_file()


def test_ollama_finds_every_layer_with_the_bytes_of_its_name(
    machine: Machine, store: Store
) -> None:
    deduplicated(store, machine.home)
    assert link_count(machine.shared["llama"].paths[0]) > 1
    checked = 0
    for manifest in (machine.ollama / "manifests").rglob("*"):
        if manifest.is_dir():
            continue
        document = json.loads(manifest.read_text())
        for layer in (document["config"], *document["layers"]):
            blob = machine.ollama / "blobs" / layer["digest"].replace(":", "-")
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
    found = [path for path in machine.lm_studio.rglob("*") if not path.is_dir()]
    assert {stat.S_IFMT(os.lstat(path).st_mode) for path in found} == {stat.S_IFREG}
    assert all(os.lstat(path).st_size == SIZE for path in found)
    shared = machine.shared["llama"].paths
    (mine,) = [path for path in shared if path.is_relative_to(machine.lm_studio)]
    assert link_count(mine) == len(shared) + 1
    assert {inode_of(path) for path in shared} == {inode_of(mine)}


@pytest.mark.torch
def test_safetensors_and_torch_load_the_files(tmp_path: Path, store: Store) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tensors = {"weight": torch.arange(30_000, dtype=torch.float32)}
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "x.safetensors")
        torch.save(tensors, tmp_path / name / "x.pt")
    result = deduplicated(store, tmp_path / "a", tmp_path / "b")
    assert result.replaced == 2
    for name in ("a", "b"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loaded = load_file(tmp_path / name / "x.safetensors")
            again = torch.load(tmp_path / name / "x.pt", weights_only=True)
            mapped = torch.load(tmp_path / name / "x.pt", weights_only=True, mmap=True)
        for found in (loaded, again, mapped):
            assert torch.equal(found["weight"], tensors["weight"])


@pytest.mark.torch
def test_a_program_that_replaces_its_file_gets_its_own_and_changes_no_other(
    tmp_path: Path, store: Store
) -> None:
    """A new download, or safetensors' own way of saving."""
    import torch
    from safetensors.torch import load_file, save_file

    old, new = {"w": torch.zeros(20_000)}, {"w": torch.ones(20_000)}
    paths = [tmp_path / "models" / name for name in ("a.safetensors", "b.safetensors")]
    paths[0].parent.mkdir()
    for path in paths:
        save_file(old, path)
    deduplicated(store, tmp_path / "models")
    assert len(inodes_of(paths)) == 1
    save_file(new, paths[1])
    assert torch.equal(load_file(paths[0])["w"], old["w"])
    assert torch.equal(load_file(paths[1])["w"], new["w"])
    undo_everything(store)
    assert torch.equal(load_file(paths[0])["w"], old["w"])
    assert torch.equal(load_file(paths[1])["w"], new["w"])
