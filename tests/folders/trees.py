"""Model folders as the programs make them: small files, real layouts, known duplicates.

`make_machine(home)` fills a home with the folders of every program. All weights have exactly `size`
bytes, so that equal sizes prove nothing and every sum is a multiple of `size`. What several
programs keep is in `Machine.shared`: one content and the paths of its independent copies.

    machine = make_machine(Path.home(), size=1 << 16)
    machine.comfyui                     # <home>/ComfyUI/models
    machine.folder["Ollama"]            # <home>/.ollama/models
    machine.shared["sdxl"].paths        # one inode each, all with the bytes `.data`
    machine.duplicate_bytes             # what a link for every further copy would give back
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import random
import struct
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SIZE = 1 << 16
COMMIT = "4621659a80f5b1a4d2cb1e8b1d0bd2a2c9f1c0de"

VARIABLES = (
    "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME", "XDG_CONFIG_HOME",
    "XDG_DATA_HOME", "OLLAMA_MODELS", "COMFYUI_PATH", "COMFYUI_MODEL_PATH",
    "INVOKEAI_ROOT", "MODELSCOPE_CACHE", "TRANSFORMERS_CACHE",
)  # fmt: skip
"""Variables that say where models are; a test of discovery unsets them all."""


# contents


@functools.lru_cache(maxsize=256)
def content(seed: int, size: int = SIZE) -> bytes:
    """`size` pseudo-random bytes; the same for the same arguments."""
    return random.Random(seed).randbytes(size)


def safetensors(seed: int, size: int = SIZE, metadata: Mapping[str, str] | None = None) -> bytes:
    """A valid safetensors file of exactly `size` bytes with one tensor."""
    room = 1024 if size >= 4096 else 256
    values = size - 8 - room
    header: dict[str, object] = {
        "weight": {"dtype": "U8", "shape": [values], "data_offsets": [0, values]}
    }
    if metadata is not None:
        header = {"__metadata__": dict(metadata), **header}
    text = json.dumps(header).encode().ljust(room)
    assert len(text) == room
    return struct.pack("<Q", room) + text + content(seed, values)


def gguf(
    seed: int,
    size: int = SIZE,
    name: str | None = "A Model",
    *,
    version: int = 3,
    before: Mapping[str, bytes] | None = None,
) -> bytes:
    """A GGUF file of exactly `size` bytes with one tensor. `before`: encoded values put first."""
    pairs = {"general.architecture": gguf_string("llama"), **(before or {})}
    if name is not None:
        pairs["general.name"] = gguf_string(name)
    pairs["tokenizer.ggml.tokens"] = gguf_array(8, [_text(word) for word in ("<s>", "</s>", "a")])
    head = b"GGUF" + struct.pack("<IQQ", version, 1, len(pairs))
    head += b"".join(_text(key) + value for key, value in pairs.items())
    # one tensor of I8 (24): name, one dimension, type, offset in the data, which is aligned to 32
    values = size - -(-(len(head) + 64) // 32) * 32
    head += _text("token_embd.weight") + struct.pack("<IQIQ", 1, values, 24, 0)
    return head.ljust(size - values, b"\0") + content(seed, values)


def gguf_string(text: str) -> bytes:
    """A GGUF value of type string."""
    return struct.pack("<I", 8) + _text(text)


def gguf_array(kind: int, items: Sequence[bytes]) -> bytes:
    """A GGUF value of type array of `kind`, of items already encoded."""
    return struct.pack("<IIQ", 9, kind, len(items)) + b"".join(items)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def checkpoint(seed: int, size: int = SIZE) -> bytes:
    """A zip as `torch.save` makes it, of exactly `size` bytes."""
    names = ("archive/data.pkl", "archive/version")
    overhead = sum(30 + 46 + 2 * len(name) for name in (*names, "archive/data/0")) + 22 + 6
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as archive:
        for name, data in (
            (names[0], b"\x80\x02}."),
            ("archive/data/0", content(seed, size - overhead)),
            (names[1], b"3\n"),
        ):
            archive.writestr(zipfile.ZipInfo(name), data)
    assert len(made.getvalue()) == size
    return made.getvalue()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write(path: Path, data: bytes | str, *, mtime: int = 1_700_000_000) -> Path:
    """Write a file that was last modified at `mtime`; its folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    os.utime(path, (mtime, mtime))
    return path


# folders of one program


def hf_repo(
    cache: Path,
    repo_id: str,
    files: Mapping[str, bytes],
    *,
    kind: str = "model",
    has_symlinks: bool = True,
) -> dict[str, Path]:
    """Add a repository to an HF cache; return the file with the bytes of each name.

    The blobs are named as the Hub names them: weights by sha256, small files by git's sha1. Without
    symlinks (Windows) the files lie in the snapshot itself.
    """
    repo = cache / f"{kind}s--{repo_id.replace('/', '--')}"
    write(repo / "refs" / "main", COMMIT)
    made = {}
    for name, data in files.items():
        link = repo / "snapshots" / COMMIT / name
        if not has_symlinks:
            made[name] = write(link, data)
            continue
        is_small = name.endswith((".json", ".txt", ".md"))
        git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()  # noqa: S324 - git's name
        blob = repo / "blobs" / (git if is_small else sha256(data))
        if not blob.exists():
            write(blob, data)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
        made[name] = blob
    lock = cache / ".locks" / repo.name / f"{COMMIT}.lock"
    write(lock, b"")
    return made


def ollama_model(
    models: Path, name: str, weights: bytes, *, tag: str = "latest", template: str = "{{ .Prompt }}"
) -> Path:
    """Add `host/namespace/model` to an Ollama folder; return the blob of the weights."""
    layers = [
        ("application/vnd.ollama.image.model", weights),
        ("application/vnd.ollama.image.template", template.encode()),
        ("application/vnd.ollama.image.params", b'{"stop":["<|eot_id|>"]}'),
    ]
    config = b'{"model_format":"gguf","model_family":"llama","model_type":"8.0B"}'

    def described(media_type: str, data: bytes) -> dict[str, object]:
        blob = models / "blobs" / f"sha256-{sha256(data)}"
        if not blob.exists():
            write(blob, data)
        return {"mediaType": media_type, "digest": f"sha256:{sha256(data)}", "size": len(data)}

    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
        "config": described("application/vnd.docker.container.image.v1+json", config),
        "layers": [described(*layer) for layer in layers],
    }
    write(models / "manifests" / name / tag, json.dumps(manifest))
    return models / "blobs" / f"sha256-{sha256(weights)}"


def comfyui(base: Path, extra: str = "") -> Path:
    """Make an empty ComfyUI, with that text as extra_model_paths.yaml; return its models folder."""
    names = (
        "checkpoints", "clip", "clip_vision", "configs", "controlnet", "diffusion_models",
        "embeddings", "loras", "text_encoders", "unet", "upscale_models", "vae",
    )  # fmt: skip
    for name in names:
        write(base / "models" / name / f"put_{name}_here", b"")
    for name in ("comfy", "custom_nodes", "input", "output", "user"):
        (base / name).mkdir(parents=True, exist_ok=True)
    write(base / "main.py", "")
    write(base / "folder_paths.py", "")
    if extra:
        write(base / "extra_model_paths.yaml", extra)
    return base / "models"


def webui(base: Path, *, is_forge: bool = False) -> Path:
    """Make an empty A1111 (or Forge); return its models folder."""
    models = "Stable-diffusion Lora VAE VAE-approx ESRGAN hypernetworks Codeformer "
    models += "text_encoder ControlNet diffusers" if is_forge else "GFPGAN deepbooru"
    programs = "modules extensions embeddings outputs scripts"
    programs += " modules_forge backend" if is_forge else ""
    for name in (*(f"models/{each}" for each in models.split()), *programs.split()):
        (base / name).mkdir(parents=True, exist_ok=True)
    write(base / "webui.py", "")
    write(base / "config.json", "{}")
    return base / "models"


# all of them


@dataclass(slots=True)
class Shared:
    """One content that several programs have: its bytes, and a path of each inode with them."""

    data: bytes
    paths: list[Path] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Machine:
    """A home with the folders of every program."""

    home: Path
    size: int
    folder: dict[str, Path] = field(default_factory=dict)
    """The main folder of each program, by its name."""
    shared: dict[str, Shared] = field(default_factory=dict)
    """sdxl, vae, text_encoder, lora, llama."""
    unique: dict[str, Path] = field(default_factory=dict)
    """Weights that only one program has, by its name."""

    comfyui: Path = Path()
    comfyui_extra: Path = Path()
    """Another disk, which only ComfyUI's extra_model_paths.yaml knows."""
    a1111: Path = Path()

    @property
    def duplicate_bytes(self) -> int:
        """Bytes of all copies of shared contents but one of each."""
        return sum(self.size * (len(each.paths) - 1) for each in self.shared.values())

    def put(self, name: str, path: Path) -> Path:
        """Write another copy of a shared content."""
        self.shared[name].paths.append(write(path, self.shared[name].data))
        return path

    def put_own(self, program: str, path: Path, data: bytes | None = None) -> Path:
        """Write weights that no other program has."""
        seed = 1000 + len(self.unique)
        self.unique[program] = write(path, safetensors(seed, self.size) if data is None else data)
        return path


def make_machine(home: Path, *, size: int = SIZE) -> Machine:
    """Fill `home` with the folders of every program; every file of weights has `size` bytes.

    `size` is at least 4096. Small files (configs, manifests) come on top, all below 4096 bytes.
    """
    home.mkdir(parents=True, exist_ok=True)
    machine = Machine(home=home.resolve(), size=size)
    machine.shared = {
        "sdxl": Shared(safetensors(1, size, {"modelspec.title": "Stable Diffusion XL"})),
        "vae": Shared(safetensors(2, size, {"format": "pt"})),
        "text_encoder": Shared(safetensors(3, size, {"format": "pt"})),
        "lora": Shared(safetensors(4, size, {"ss_output_name": "ink_style"})),
        "llama": Shared(gguf(5, size, "Llama 3 8B Instruct")),
    }
    for make in (
        _hugging_face, _comfyui, _webuis, _ollama, _lm_studio, _invokeai, _stability_matrix,
        _modelscope, _gpt4all, _pinokio,
    ):  # fmt: skip
        make(machine)
    return machine


def _hugging_face(machine: Machine) -> None:
    cache = machine.folder["Hugging Face"] = machine.home / ".cache" / "huggingface" / "hub"
    shared = machine.shared
    write(cache / "CACHEDIR.TAG", "Signature: 8a477f597d28d172789f06886806bc55\n")
    pipeline = hf_repo(
        cache,
        "stabilityai/stable-diffusion-xl-base-1.0",
        {
            "model_index.json": b'{"_class_name": "StableDiffusionXLPipeline"}',
            "sd_xl_base_1.0.safetensors": shared["sdxl"].data,
            "vae/diffusion_pytorch_model.safetensors": shared["vae"].data,
            "text_encoder/model.safetensors": shared["text_encoder"].data,
        },
    )
    files = {"config.json": b"{}", "model.safetensors": shared["text_encoder"].data}
    encoder = hf_repo(cache, "openai/clip-vit-large-patch14", files)
    files = {"data/train.parquet": content(20, machine.size)}
    rows = hf_repo(cache, "nlp/rows", files, kind="dataset")
    shared["sdxl"].paths.append(pipeline["sd_xl_base_1.0.safetensors"])
    shared["vae"].paths.append(pipeline["vae/diffusion_pytorch_model.safetensors"])
    shared["text_encoder"].paths.append(pipeline["text_encoder/model.safetensors"])
    shared["text_encoder"].paths.append(encoder["model.safetensors"])
    machine.unique["Hugging Face"] = rows["data/train.parquet"]


def _comfyui(machine: Machine) -> None:
    base = machine.home / "ComfyUI"
    disk = machine.comfyui_extra = machine.home / "big disk" / "models"
    extra = f"other_disk:\n    base_path: {disk}\n    is_default: true\n"
    extra += "    checkpoints: checkpoints\n    loras: |\n        loras\n        not there\n"
    models = machine.comfyui = comfyui(base, extra)
    machine.folder["ComfyUI"] = models
    machine.put("sdxl", models / "checkpoints" / "sd_xl_base_1.0.safetensors")
    machine.put("vae", models / "vae" / "sdxl_vae.safetensors")
    machine.put("text_encoder", models / "text_encoders" / "clip_l.safetensors")
    machine.put("lora", models / "loras" / "ink" / "ink_style.safetensors")
    machine.put("sdxl", disk / "checkpoints" / "SDXL again.safetensors")
    machine.put_own("ComfyUI", models / "diffusion_models" / "flux1-dev.safetensors")
    (disk / "loras").mkdir()


def _webuis(machine: Machine) -> None:
    base = machine.home / "stable-diffusion-webui"
    models = machine.a1111 = machine.folder["A1111"] = webui(base)
    found = machine.put("sdxl", models / "Stable-diffusion" / "sdxl.safetensors")
    os.utime(found, (1_650_000_000, 1_650_000_000))
    machine.put("vae", models / "VAE" / "sdxl_vae.safetensors")
    machine.put("lora", models / "Lora" / "ink_style.safetensors")
    own = models / "Stable-diffusion" / "v1-5-pruned.ckpt"
    machine.put_own("A1111", own, checkpoint(30, machine.size))
    write(base / "embeddings" / "bad-hands.pt", content(31, 2000))
    # The hashes are valid while the times are the same.
    hashes = {
        f"checkpoint/{path.name}": {
            "mtime": path.stat().st_mtime, "sha256": sha256(path.read_bytes()),
        }
        for path in (found, own)
    }  # fmt: skip
    write(base / "cache.json", json.dumps({"hashes": hashes}, indent=4))
    forge = machine.folder["Forge"] = webui(
        machine.home / "stable-diffusion-webui-forge", is_forge=True
    )
    machine.put("sdxl", forge / "Stable-diffusion" / "sdxl.safetensors")
    machine.put_own("Forge", forge / "text_encoder" / "t5xxl_fp16.safetensors")


def _ollama(machine: Machine) -> None:
    models = machine.folder["Ollama"] = machine.home / ".ollama" / "models"
    llama = machine.shared["llama"]
    library = "registry.ollama.ai/library"
    blob = ollama_model(models, f"{library}/llama3", llama.data, tag="8b")
    ollama_model(models, f"{library}/llama3", llama.data)
    llama.paths.append(blob)
    own = gguf(40, machine.size, "Qwen 2.5")
    machine.unique["Ollama"] = ollama_model(models, "hf.co/bartowski/Qwen-GGUF", own, tag="Q4_K_M")
    ollama_model(models, "registry.ollama.ai/alice/helper", own)


def _lm_studio(machine: Machine) -> None:
    models = machine.folder["LM Studio"] = machine.home / ".lmstudio" / "models"
    machine.put("llama", models / "meta" / "Llama-3-8B-GGUF" / "llama-3-8b.Q4_K_M.gguf")
    own = models / "TheBloke" / "Mistral-7B-GGUF" / "mistral-7b.Q5_K_M.gguf"
    machine.put_own("LM Studio", own, gguf(41, machine.size, "Mistral 7B"))


def _invokeai(machine: Machine) -> None:
    root = machine.home / "invokeai"
    models = machine.folder["InvokeAI"] = root / "models"
    write(root / "databases" / "invokeai.db", b"")
    write(root / "invokeai.yaml", "schema_version: 4.0.2\n")
    machine.put("sdxl", models / "00000000-7c4b-4f0e-9d57" / "sd_xl_base_1.0.safetensors")
    machine.put_own("InvokeAI", models / "00000001-7c4b-4f0e-9d57" / "dream.safetensors")


def _stability_matrix(machine: Machine) -> None:
    library = machine.home / "StabilityMatrix"
    models = machine.folder["Stability Matrix"] = library / "Models"
    machine.put("sdxl", models / "StableDiffusion" / "sd_xl_base_1.0.safetensors")
    machine.put("lora", models / "Lora" / "ink_style.safetensors")
    machine.put_own("Stability Matrix", models / "VAE" / "ae.safetensors")
    (models / "ControlNet").mkdir()
    write(library / "settings.json", "{}")
    package = comfyui(library / "Packages" / "ComfyUI")
    (package / "checkpoints" / "put_checkpoints_here").unlink()
    (package / "checkpoints").rmdir()
    (package / "checkpoints").symlink_to(models / "StableDiffusion", target_is_directory=True)


def _modelscope(machine: Machine) -> None:
    cache = machine.folder["ModelScope"] = machine.home / ".cache" / "modelscope"
    repo = cache / "hub" / "models" / "AI-ModelScope" / "clip-vit-large-patch14"
    write(repo / ".msc", b"\x80\x04].")  # a pickle: to be left alone
    write(repo / ".mv", "Revision:master,CreatedAt:1700000000,AI-ModelScope/clip")
    write(repo / "configuration.json", '{"framework":"pytorch"}')
    machine.put("text_encoder", repo / "model.safetensors")
    own = checkpoint(60, machine.size)
    machine.put_own("ModelScope", repo / "pytorch_model.bin", own)


def _gpt4all(machine: Machine) -> None:
    folder = machine.home / ".local" / "share" / "nomic.ai" / "GPT4All"
    machine.folder["GPT4All"] = folder
    machine.put("llama", folder / "Meta-Llama-3-8B-Instruct.Q4_0.gguf")
    machine.put_own("GPT4All", folder / "nomic-embed.gguf", gguf(70, machine.size, "Nomic"))


def _pinokio(machine: Machine) -> None:
    drive = machine.home / "pinokio" / "drive" / "drives" / "peers" / "d1700000000000"
    machine.folder["Pinokio"] = drive
    machine.put("vae", drive / "vae" / "sdxl_vae.safetensors")
    machine.put_own("Pinokio", drive / "checkpoints" / "wan.safetensors")
    app = machine.home / "pinokio" / "api" / "comfy.git" / "app" / "models"
    app.mkdir(parents=True)
    (app / "vae").symlink_to(drive / "vae", target_is_directory=True)
