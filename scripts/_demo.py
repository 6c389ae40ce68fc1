"""What smartcache does with the folders of programs, downloads and computed tensors.

Run by scripts/demo; `--full` shows pipelines of diffusers and a dataset too. Everything lies in one
temporary folder. Folders in it play the home directory, so that smartcache finds what is there and
nothing else; the Hub of the tests plays the Hub.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.hub_server import Hub

ROOT = Path(__file__).resolve().parent.parent
MEGABYTE = 1_000_000
DAY = 86_400
NOW = 1_700_000_000
COMMIT = "5d1f2c0b9a8e7766554433221100ffeeddccbbaa"
HUB = ".cache/huggingface/hub/models--aurora--dream-xl"
OLLAMA = ".ollama/models"
ELSEWHERE = ("HF_", "HUGGINGFACE_", "XDG_", "OLLAMA_", "MODELSCOPE_", "INVOKEAI_", "SMARTCACHE_")
"""Variables that begin so could lead out of the demo's folder; they are not passed on."""


@dataclass(frozen=True, slots=True)
class Model:
    """A made-up model file: equal ones are equal byte by byte."""

    title: str
    megabytes: int
    seed: int
    is_gguf: bool = False

    def data(self) -> bytes:
        """Return the bytes: a true header, and noise for weights."""
        noise = random.Random(self.seed).randbytes(self.megabytes * MEGABYTE)
        if self.is_gguf:
            key, value = b"general.name", self.title.encode()
            name = struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, len(value)) + value
            return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + name + noise
        header = {
            "__metadata__": {"modelspec.title": self.title, "format": "pt"},
            "weight": {"dtype": "U8", "shape": [len(noise)], "data_offsets": [0, len(noise)]},
        }
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + noise


CHECKPOINT = Model("Dream XL", 48, 1)
VAE = Model("Dream XL VAE", 12, 2)
ENCODER = Model("CLIP L", 18, 3)
LORA = Model("Watercolour", 6, 4)
OTHER_LORA = Model("Linocutting", 6, 5)
CHAT = Model("Lumen 3B", 40, 6, is_gguf=True)
FILES = {
    "ComfyUI/models/checkpoints/dream-xl.safetensors": CHECKPOINT,
    "ComfyUI/models/vae/dream-xl-vae.safetensors": VAE,
    "ComfyUI/models/text_encoders/clip-l.safetensors": ENCODER,
    "ComfyUI/models/loras/watercolour.safetensors": LORA,
    "stable-diffusion-webui/models/Stable-diffusion/dreamXL_v10.safetensors": CHECKPOINT,
    "stable-diffusion-webui/models/VAE/dreamXL.vae.safetensors": VAE,
    "stable-diffusion-webui/models/Lora/watercolour.safetensors": LORA,
    # As long as the other one, and not the same:
    "stable-diffusion-webui/models/Lora/linocutting.safetensors": OTHER_LORA,
    ".lmstudio/models/aurora/lumen-3b-GGUF/lumen-3b-Q4.gguf": CHAT,
}
PIPELINES = {
    "aurora/dream-xl": Model("Dream XL UNet", 24, 7),
    "aurora/dream-xl-turbo": Model("Dream XL Turbo UNet", 24, 8),
}
"""Two repos of the Hub, each with its own UNet. Text encoder and VAE are the same files."""
SHARED = {
    "text_encoder/model.safetensors": ENCODER,
    "vae/diffusion_pytorch_model.safetensors": VAE,
}
SMARTCACHE = (sys.executable, "-m", "smartcache")
State = dict[str, tuple[object, ...]]


def main() -> None:
    """Show folders of programs, downloads, computed tensors, pipelines, a dataset; clean up."""
    room = Path(tempfile.mkdtemp(prefix="smartcache-demo-"))
    try:
        show_folders(room / "folders")
        show_downloads(room / "downloads")
        show_artifacts(room / "artifacts")
        if "--full" in sys.argv[1:]:
            show_pipelines(room / "pipelines")
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        shutil.rmtree(room)
        say(f"Removed {room}: nothing of this demo is left.")


def show_downloads(room: Path) -> None:
    """Download two pipelines that have files in common; the Hub's log is the proof."""
    sys.path.insert(0, str(ROOT))
    from tests.hub_server import Hub

    home = room / "home"
    home.mkdir(parents=True)
    with Hub() as hub:
        for name, unet in PIPELINES.items():
            files = {path: model.data() for path, model in SHARED.items()}
            files["unet/diffusion_pytorch_model.safetensors"] = unet.data()
            files["model_index.json"] = json.dumps({"_name_or_path": name}).encode()
            hub.add(name, files)
        environment = environment_of(home, room / "store") | hub.environment
        first, second = PIPELINES
        say("A Hub on this machine has two models that share a text encoder and a VAE.")
        run(environment, "download", first)
        hub.clear()
        say("Of the second one, only what the first has not brought is fetched:")
        run(environment, "download", second)
        show_log(hub, second)
    run(environment, "hub", "ls")


def show_log(hub: Hub, name: str) -> None:
    """Show what the Hub has sent of the weights of a repo, which must be the UNet alone."""
    say("The Hub's log of that download, in bytes of weights sent:")
    for path in (*SHARED, "unet/diffusion_pytorch_model.safetensors"):
        print(f"  {hub.fetched_bytes(f'{name}/{path}'):>10,}  {path}")
    print(flush=True)
    if any(hub.gets(f"{name}/{path}") for path in SHARED):
        sys.exit("A file that was here already was fetched: please report this.")


def show_pipelines(room: Path) -> None:
    """Load pipelines and encode a dataset; in a process of its own: the libraries are large."""
    home = room / "home"
    home.mkdir(parents=True)
    environment = environment_of(home, room / "store") | {"TMPDIR": str(room)}
    say("Two tiny pipelines of diffusers share a text encoder and a VAE. In Python:")
    script = ROOT / "scripts" / "_demo_pipelines.py"
    subprocess.run([sys.executable, str(script)], check=True, env=environment, cwd=home)
    if (home / "photos").exists():
        print(flush=True)
        say("What is known of the dataset, without a look at its files:")
        run(environment, "datasets", "ls")


LATENTS = """\
import numpy as np
from smartcache import SmartCache, compute_key

def encode(image, size):  # stands for a VAE and a text encoder
    encode.calls += 1
    latent = np.random.default_rng(image).standard_normal((4, size // 8, size // 8))
    return {"latent": latent.astype(np.float16), "caption": np.ones((77, 768), np.float16)}

encode.calls = 0
with SmartCache() as cache:
    for size in (256, 512, 512):  # the third time everything is there
        with cache.artifacts("latents", fingerprint={"vae": "demo", "size": size}) as latents:
            keys = [compute_key({"image": image}) for image in range(100)]
            for image, key in enumerate(keys):
                latents.get_or_compute(key, lambda: encode(image, size))
            batch = latents.get_batch(keys[40:72])
            print(size, batch["latent"].shape, f"{encode.calls} computed so far")
"""


def show_artifacts(room: Path) -> None:
    """Compute latents of two sizes, each once, and show what is kept of them."""
    home = room / "home"
    home.mkdir(parents=True)
    environment = environment_of(home, room / "store")
    say("Latents are computed once and read back in batches. In Python:")
    print("".join(f"  {line}\n" for line in LATENTS.splitlines()), flush=True)
    path = os.pathsep.join(filter(None, (str(ROOT), environment.get("PYTHONPATH"))))
    command = [sys.executable, "-c", LATENTS]
    subprocess.run(command, check=True, env=environment | {"PYTHONPATH": path}, cwd=home)
    print(flush=True)
    say("Two sets, and how they differ. The caption, which all have in common, is kept once:")
    run(environment, "artifacts", "ls")


def show_folders(room: Path) -> None:
    """Scan, remove duplicates, report, undo, and prove that every file is what it was."""
    home = room / "home"
    make(home)
    before = state(home)
    environment = environment_of(home, room / "store")
    folders = folders_of(home, environment)
    say("Five programs keep their models in one home. What is there more than once?")
    run(environment, "scan", *folders)
    say("Make the duplicates one copy (without --yes it shows a plan and asks):")
    run(environment, "dedup", "--yes", *folders)
    if contents(state(home)) != contents(before):
        sys.exit("A file has other bytes than before: please report this.")
    say("Every path is still there, with the same bytes. What that saves:")
    run(environment, "report", *folders)
    say("Take it all back: each file gets its own bytes, mode and time again.")
    run(environment, "undo", "--all", "--yes")
    if state(home) != before:
        sys.exit("The files are not what they were: please report this.")
    count = sum(kind == "file" for kind, *_ in before.values())
    print(f"Compared {count} files with what they were before: every byte, mode, owner and time is")
    print("the same, and so are the links among them.\n")


def run(environment: dict[str, str], *words: str) -> None:
    """Show a command and what it prints."""
    print(f"$ smartcache {' '.join(words)}", flush=True)
    subprocess.run([*SMARTCACHE, *words], check=True, env=environment, cwd=environment["HOME"])
    print(flush=True)


def folders_of(home: Path, environment: dict[str, str]) -> list[str]:
    """Return the folders to name: none, unless programs of the whole machine are found too.

    An Ollama service or a ComfyUI in /opt is none of this demo's business.
    """
    command = [*SMARTCACHE, "folders", "ls", "-q"]
    output = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE).stdout
    found = [Path(os.fsdecode(line)) for line in output.splitlines()]
    own = [path for path in found if path.is_relative_to(os.path.realpath(home))]
    return [] if own == found else [str(path) for path in own]


def make(home: Path) -> None:
    """Write the folders of five programs."""
    for number, (name, model) in enumerate(FILES.items()):
        write(home / name, model.data(), age=400 - 20 * number)
    # Two names of one file, as ComfyUI's users have them: not a duplicate.
    link = home / "ComfyUI/models/clip/clip-l.safetensors"
    link.parent.mkdir(parents=True)
    os.link(home / "ComfyUI/models/text_encoders/clip-l.safetensors", link)
    make_repo(home / HUB)
    make_ollama(home / OLLAMA)
    time.sleep(2.1)  # a file younger than two seconds could change unseen, and is read once more


def make_repo(folder: Path) -> None:
    """Write a repo as huggingface_hub keeps it: blobs, and symlinks that name them."""
    write(folder / "refs/main", COMMIT.encode(), age=200)
    for name, model in SHARED.items():
        data = model.data()
        blob = folder / "blobs" / hashlib.sha256(data).hexdigest()
        write(blob, data, age=200)
        pointer = folder / "snapshots" / COMMIT / name
        pointer.parent.mkdir(parents=True)
        pointer.symlink_to(os.path.relpath(blob, pointer.parent))


def make_ollama(folder: Path) -> None:
    """Write a model as Ollama keeps it: a blob, and a manifest that names it."""
    data = CHAT.data()
    digest = hashlib.sha256(data).hexdigest()
    write(folder / "blobs" / f"sha256-{digest}", data, age=30)
    layer = {
        "mediaType": "application/vnd.ollama.image.model",
        "digest": f"sha256:{digest}",
        "size": len(data),
    }
    manifest = json.dumps({"schemaVersion": 2, "layers": [layer]}).encode()
    write(folder / "manifests/registry.ollama.ai/library/lumen/3b", manifest, age=30)


def write(path: Path, data: bytes, *, age: int) -> None:
    """Write a file that is some days old."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    os.utime(path, (NOW - age * DAY, NOW - age * DAY))


def environment_of(home: Path, store: Path) -> dict[str, str]:
    """Return an environment in which programs and smartcache look nowhere but in the demo."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ELSEWHERE)}
    return kept | {
        "HOME": str(home),
        "USERPROFILE": str(home),
        "OLLAMA_MODELS": str(home / OLLAMA),
        "SMARTCACHE_HOME": str(store),
    }


def state(home: Path) -> State:
    """Return what every file and symlink is like: bytes, mode, owner, time and number of names."""
    found: State = {}
    for folder, _, names in os.walk(home):
        for name in names:
            path = Path(folder, name)
            st = path.lstat()
            kind = "symlink" if path.is_symlink() else "file"
            content = os.readlink(path) if path.is_symlink() else digest_of(path)
            rest = (st.st_mode, st.st_uid, st.st_gid, st.st_mtime_ns, st.st_nlink)
            found[str(path.relative_to(home))] = (kind, content, *rest)
    return found


def contents(found: State) -> dict[str, object]:
    """Return the bytes alone."""
    return {name: entry[1] for name, entry in found.items()}


def digest_of(path: Path) -> str:
    """Return a hash of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def say(text: str) -> None:
    """Show a line of explanation."""
    print(f"\033[1m{text}\033[0m" if sys.stdout.isatty() else text, flush=True)


if __name__ == "__main__":
    main()
