"""The names that people know, from snapshots and manifests, whole and damaged."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smartcache.folders.programs import ModelFolder
from smartcache.report import names
from smartcache.report.names import Namer
from tests.folders.trees import (
    COMMIT,
    Machine,
    content,
    hf_repo,
    make_machine,
    ollama_model,
    sha256,
    write,
)

if sys.platform == "win32":
    pytest.skip("caches with symlinks", allow_module_level=True)

A, B = content(1, 100), content(2, 100)
LIBRARY = "registry.ollama.ai/library"


@pytest.fixture
def hub(tmp_path: Path) -> ModelFolder:
    (tmp_path / "hub").mkdir()
    return ModelFolder(path=tmp_path / "hub", program="Hugging Face")


@pytest.fixture
def ollama(tmp_path: Path) -> ModelFolder:
    (tmp_path / "models").mkdir()
    return ModelFolder(path=tmp_path / "models", program="Ollama")


def both(path: Path, folder: ModelFolder) -> tuple[str, str]:
    namer = Namer()
    return namer.name(path, folder), namer.repo_of(path, folder)


# Hugging Face


def test_a_blob_has_the_name_of_its_repository_and_file(hub: ModelFolder) -> None:
    made = hf_repo(hub.path, "org/model", {"config.json": b"{}", "unet/x.safetensors": A})
    assert both(made["unet/x.safetensors"], hub) == ("org/model · unet/x.safetensors", "org/model")
    assert both(made["config.json"], hub) == ("org/model · config.json", "org/model")


def test_all_kinds_of_repositories_with_symlinks_or_without(hub: ModelFolder) -> None:
    for kind, repo_id, shown in (
        ("model", "gpt2", "gpt2"),
        ("dataset", "nlp/rows", "datasets/nlp/rows"),
        ("space", "me/demo", "spaces/me/demo"),
    ):
        made = hf_repo(hub.path, repo_id, {"a/b.bin": A}, kind=kind)
        assert both(made["a/b.bin"], hub) == (f"{shown} · a/b.bin", shown)
    made = hf_repo(hub.path, "org/model", {"unet/x.safetensors": A}, has_symlinks=False)
    assert both(made["unet/x.safetensors"], hub) == ("org/model · unet/x.safetensors", "org/model")


def test_a_path_through_the_snapshot_has_the_same_name(hub: ModelFolder) -> None:
    hf_repo(hub.path, "org/model", {"unet/x.safetensors": A})
    link = hub.path / "models--org--model/snapshots" / COMMIT / "unet/x.safetensors"
    assert Namer().name(link, hub) == "org/model · unet/x.safetensors"


def test_a_blob_that_no_snapshot_uses_has_its_repository_alone(hub: ModelFolder) -> None:
    hf_repo(hub.path, "org/model", {"a.bin": A})
    blob = write(hub.path / "models--org--model/blobs" / sha256(B), B)
    assert both(blob, hub) == ("org/model", "org/model")


def test_a_blob_with_two_names_has_the_first(hub: ModelFolder) -> None:
    made = hf_repo(hub.path, "org/model", {"z.bin": A, "b/c.bin": A, "a.bin": A})
    assert Namer().name(made["z.bin"], hub) == "org/model · a.bin"


def test_each_repository_names_its_own_blobs_whatever_folder_it_is_seen_from(
    hub: ModelFolder, tmp_path: Path
) -> None:
    namer = Namer()
    one = hf_repo(hub.path, "org/one", {"a.bin": A})
    two = hf_repo(hub.path, "org/two", {"b.bin": A})
    for folder in (hub, ModelFolder(path=tmp_path)):
        assert namer.name(one["a.bin"], folder) == "org/one · a.bin"
        assert namer.name(two["b.bin"], folder) == "org/two · b.bin"
    repo = ModelFolder(path=hub.path / "models--org--one")
    assert Namer().name(one["a.bin"], repo) == "org/one · a.bin"


def test_payloads_that_repositories_share_are_named_by_one_of_them(hub: ModelFolder) -> None:
    """Newer caches keep them in blobs/<xx>/<hash>; the blobs of repositories are symlinks there."""
    made = hf_repo(hub.path, "org/model", {"unet/x.safetensors": A})
    blob = made["unet/x.safetensors"]
    payload = write(hub.path / "blobs" / "ab" / ("ab" + 62 * "0"), A)
    blob.unlink()
    blob.symlink_to(os.path.relpath(payload, blob.parent))
    assert both(payload, hub) == ("org/model · unet/x.safetensors", "org/model")
    lost = write(hub.path / "blobs" / "cd" / ("cd" + 62 * "0"), B)
    assert both(lost, hub) == ("", "")


def test_symlinks_that_lead_elsewhere_name_nothing(hub: ModelFolder) -> None:
    hf_repo(hub.path, "org/model", {"a.bin": A})
    snapshot = hub.path / "models--org--model/snapshots" / COMMIT
    targets = ("/etc/hostname", "../../../../elsewhere", "../refs/main", f"../../other/{sha256(A)}")
    for number, target in enumerate((*targets, f"../../blobs/{sha256(B)}")):
        (snapshot / f"{number}.bin").symlink_to(target)
    blob = hub.path / "models--org--model/blobs" / sha256(A)
    assert Namer().name(blob, hub) == "org/model · a.bin"


def test_symlinked_directories_are_not_entered(hub: ModelFolder, tmp_path: Path) -> None:
    hf_repo(hub.path, "org/model", {"z.bin": A})
    snapshot = hub.path / "models--org--model/snapshots" / COMMIT
    (snapshot / "loop").symlink_to(".")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "stolen.bin").symlink_to(hub.path / "models--org--model/blobs" / sha256(A))
    (snapshot / "away").symlink_to(elsewhere)
    blob = hub.path / "models--org--model/blobs" / sha256(A)
    assert Namer().name(blob, hub) == "org/model · z.bin"


def test_a_namer_reads_a_repository_once_and_a_cache_that_vanished_names_itself(
    hub: ModelFolder,
) -> None:
    made = hf_repo(hub.path, "org/model", {"a.bin": A, "b.bin": B})
    namer = Namer()
    assert namer.name(made["a.bin"], hub) == "org/model · a.bin"
    shutil.rmtree(hub.path)
    assert namer.name(made["b.bin"], hub) == "org/model · b.bin"
    assert both(made["a.bin"], hub) == ("org/model", "org/model")


def test_names_are_one_printable_line(hub: ModelFolder) -> None:
    made = hf_repo(hub.path, "org/model", {"a\nb\x1b[31m\udcff.bin": A})
    assert both(made["a\nb\x1b[31m\udcff.bin"], hub)[0] == "org/model · a b [31m .bin"


def test_a_repository_with_endless_files_is_given_up(
    hub: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "_MOST_ENTRIES", 3)
    files = {f"{n}/x.bin": content(n, 50) for n in range(9)}
    made = hf_repo(hub.path, "org/model", files)
    namer = Namer()
    assert namer.name(made["8/x.bin"], hub) == "org/model"


# Ollama


def test_models_are_shown_as_ollama_shows_them(ollama: ModelFolder) -> None:
    for number, (name, shown) in enumerate((
        (f"{LIBRARY}/llama3", "llama3:8b"),
        ("registry.ollama.ai/alice/helper", "alice/helper:8b"),
        ("hf.co/bartowski/Qwen-GGUF", "hf.co/bartowski/Qwen-GGUF:8b"),
        ("localhost:5000/library/own", "localhost:5000/library/own:8b"),
    )):  # fmt: skip
        blob = ollama_model(ollama.path, name, content(number, 100), tag="8b")
        assert both(blob, ollama) == (shown, shown)


def test_a_blob_of_several_models_has_the_first_and_how_many_more(ollama: ModelFolder) -> None:
    for tag in ("latest", "8b", "8b-q4"):
        blob = ollama_model(ollama.path, f"{LIBRARY}/llama3", A, tag=tag)
    assert both(blob, ollama) == ("llama3:8b +2", "llama3:8b")


def test_models_of_the_library_come_before_those_of_others(ollama: ModelFolder) -> None:
    for name in ("hf.co/a/a", "registry.ollama.ai/alice/a", f"{LIBRARY}/zephyr"):
        blob = ollama_model(ollama.path, name, A)
    assert Namer().name(blob, ollama) == "zephyr:latest +2"


def test_a_namer_reads_manifests_once(ollama: ModelFolder) -> None:
    namer = Namer()
    first = ollama_model(ollama.path, f"{LIBRARY}/a", A)
    second = ollama_model(ollama.path, f"{LIBRARY}/b", B)
    assert namer.name(first, ollama) == "a:latest"
    shutil.rmtree(ollama.path / "manifests")
    assert namer.name(second, ollama) == "b:latest"


def test_templates_and_configs_are_parts_of_the_model_too(ollama: ModelFolder) -> None:
    ollama_model(ollama.path, f"{LIBRARY}/llama3", A)
    blobs = list((ollama.path / "blobs").iterdir())
    assert len(blobs) == 4
    assert {Namer().name(blob, ollama) for blob in blobs} == {"llama3:latest"}


def test_the_folder_may_be_above_that_of_ollama(ollama: ModelFolder, tmp_path: Path) -> None:
    blob = ollama_model(ollama.path, f"{LIBRARY}/llama3", A)
    assert Namer().name(blob, ModelFolder(path=tmp_path)) == "llama3:latest"


def test_manifests_outside_the_folder_are_not_read(ollama: ModelFolder) -> None:
    blob = ollama_model(ollama.path, f"{LIBRARY}/llama3", A)
    assert both(blob, ModelFolder(path=ollama.path / "blobs")) == ("", "")


def test_old_names_of_blobs_are_understood(ollama: ModelFolder) -> None:
    blob = ollama_model(ollama.path, f"{LIBRARY}/llama3", A)
    assert Namer().name(blob.with_name(f"sha256:{sha256(A)}"), ollama) == "llama3:latest"


def test_a_blob_that_no_model_uses_has_no_name(ollama: ModelFolder) -> None:
    ollama_model(ollama.path, f"{LIBRARY}/llama3", A)
    blob = write(ollama.path / "blobs" / f"sha256-{sha256(B)}", B)
    assert both(blob, ollama) == ("", "")
    assert both(blob.with_name(f"sha256-{sha256(A)}-partial"), ollama) == ("", "")


_DIGEST = f"sha256:{sha256(A)}"


def test_a_damaged_manifest_names_nothing_and_hides_no_other(ollama: ModelFolder) -> None:
    blob = ollama_model(ollama.path, f"{LIBRARY}/whole", A)
    for data in (
        b"",
        b"{",
        b"\xff",
        b"[]",
        b"7",
        b"[" * 100_000,
        b'{"layers": 7}',
        b'{"layers": [7, null, [], {"digest": 7}, {"digest": "sha256:short"}]}',
        b'{"layers": {"digest": "%s"}}' % _DIGEST.encode(),
        json.dumps({"layers": [{"digest": _DIGEST}]}).encode().ljust(2 << 20),
    ):
        write(ollama.path / "manifests" / LIBRARY / "damaged" / "latest", data)
        assert Namer().name(blob, ollama) == "whole:latest", data[:80]


def test_only_manifests_at_the_right_depth_count(ollama: ModelFolder) -> None:
    blob = ollama_model(ollama.path, f"{LIBRARY}/whole", A)
    manifest = (ollama.path / "manifests" / LIBRARY / "whole" / "latest").read_bytes()
    write(ollama.path / "manifests" / "stray", manifest)
    write(ollama.path / "manifests" / LIBRARY / "a" / "b" / "c", manifest)
    assert Namer().name(blob, ollama) == "whole:latest"


@pytest.mark.timeout(20)
def test_manifests_that_are_no_files_are_ignored(ollama: ModelFolder, tmp_path: Path) -> None:
    blob = ollama_model(ollama.path, f"{LIBRARY}/whole", A)
    whole = ollama.path / "manifests" / LIBRARY / "whole"
    outside = write(tmp_path / "outside", (whole / "latest").read_bytes())
    (whole / "linked").symlink_to(outside)
    os.mkfifo(whole / "fifo")
    assert Namer().name(blob, ollama) == "whole:latest"


@given(st.recursive(
    st.one_of(st.none(), st.integers(), st.just(_DIGEST), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(["layers", "config", "digest", "x"]), inner, max_size=4),
    ),
))  # fmt: skip
def test_no_manifest_raises(tmp_path_factory: pytest.TempPathFactory, value: object) -> None:
    models = tmp_path_factory.getbasetemp() / "any manifest"
    write(models / "manifests" / LIBRARY / "any" / "latest", json.dumps(value))
    folder = ModelFolder(path=models, program="Ollama")
    name = Namer().name(models / "blobs" / f"sha256-{sha256(A)}", folder)
    assert name in ("", "any:latest")


# the others


def test_a_file_of_lm_studio_has_publisher_model_and_file(tmp_path: Path) -> None:
    folder = ModelFolder(path=tmp_path, program="LM Studio")
    path = tmp_path / "meta" / "Llama-3-GGUF" / "llama.Q4.gguf"
    assert both(path, folder) == ("meta/Llama-3-GGUF llama.Q4.gguf", "")
    assert both(tmp_path / "meta" / "stray.gguf", folder) == ("", "")


def test_where_nothing_better_is_known_the_path_must_do(tmp_path: Path) -> None:
    for program in ("ComfyUI", "A1111", "InvokeAI", ""):
        folder = ModelFolder(path=tmp_path, program=program)
        assert both(tmp_path / "a" / "b" / "c.safetensors", folder) == ("", ""), program


def test_a_file_outside_the_folder_has_no_name(hub: ModelFolder, tmp_path: Path) -> None:
    made = hf_repo(tmp_path / "other", "org/model", {"a.bin": A})
    assert both(made["a.bin"], hub) == ("", "")
    assert both(hub.path, hub) == ("", "")


def test_the_shared_models_of_a_machine_have_names(tmp_path: Path) -> None:
    machine: Machine = make_machine(tmp_path)
    folders = [ModelFolder(path=path, program=name) for name, path in machine.folder.items()]
    namer = Namer()
    found = {
        namer.name(path, folder)
        for shared in machine.shared.values()
        for path in shared.paths
        for folder in folders
        if path.is_relative_to(folder.path)
    }
    assert found == {
        "",
        "stabilityai/stable-diffusion-xl-base-1.0 · sd_xl_base_1.0.safetensors",
        "stabilityai/stable-diffusion-xl-base-1.0 · vae/diffusion_pytorch_model.safetensors",
        "stabilityai/stable-diffusion-xl-base-1.0 · text_encoder/model.safetensors",
        "openai/clip-vit-large-patch14 · model.safetensors",
        "llama3:8b +1",
        "meta/Llama-3-8B-GGUF llama-3-8b.Q4_K_M.gguf",
    }
