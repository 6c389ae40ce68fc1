"""Two tiny pipelines of diffusers, out of the store, and a dataset that their encoders encode.

The second pipeline brings only its UNet. Run by scripts/_demo.py, in an environment that leads
nowhere but into the demo's folder. The Hub of the tests serves them, and its log says what was
fetched. Needs diffusers, or says so and ends.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from diffusers import StableDiffusionPipeline
    from PIL.Image import Image

    from smartcache.training import BuildReport, Dataset
    from tests.hub_server import Hub

ROOT = Path(__file__).resolve().parent.parent
FIRST, SECOND = "aurora/tiny", "aurora/tiny-turbo"
SHARED = ("text_encoder", "vae")
CAPTIONS = (
    "a cat",
    "a dog",
    "a cat on a dog",
    "a house",
    "a red house",
    "a boat",
    "a tree",
    "a cat",
)
DATASET = """\
import smartcache
from smartcache.training import Encoder, Sources

encoders = smartcache.load_encoders("aurora/tiny", parts=("text", "vae"))

def encode_images(items):
    pixels = torch.stack([to_tensor(item.image()) for item in items])
    return encoders.vae.encode(pixels.to(encoders.device)).latent_dist.mode()

def encode_captions(items):
    captions = [item["caption"] for item in items]
    return encoders.pipeline.encode_prompt(captions, encoders.device, 1, False)[0]

photos = smartcache.SmartCache().dataset(
    "photos",
    Sources("photos", sidecars={"caption": ".txt"}),
    latent=Encoder(encode_images, reads="file", depends_on=encoders.vae, batch=4),
    text=Encoder(encode_captions, reads="caption", depends_on=encoders.text_encoder, batch=4),
)
"""


def main() -> None:
    """Serve the pipelines, load both, and prove what is promised."""
    if importlib.util.find_spec("diffusers") is None:
        print("diffusers is not installed here, so its pipelines are not shown.\n", flush=True)
        return
    sys.path.insert(0, str(ROOT))
    from tests.hub_server import Hub

    with tempfile.TemporaryDirectory() as folder, Hub() as hub:
        # huggingface_hub reads these once, when the libraries are imported.
        os.environ.update(hub.environment)
        be_quiet()
        from tests.hub_server.pipelines import make_pipelines

        for name, made in zip((FIRST, SECOND), make_pipelines(Path(folder)), strict=True):
            hub.add_folder(name, made)
        show(hub, Path(folder))
        show_dataset(Path("photos"))


def be_quiet() -> None:
    """Let the libraries show no bars and no advice."""
    os.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    import diffusers
    import transformers

    diffusers.utils.logging.set_verbosity_error()
    for library in (diffusers.utils.logging, transformers.utils.logging):
        library.disable_progress_bar()


def show(hub: Hub, folder: Path) -> None:
    """Load both pipelines from the Hub, sharing what is equal."""
    import smartcache

    pipeline = load(hub, "pipeline", FIRST)
    turbo = load(hub, "turbo", SECOND)
    names = (*SHARED, "unet")
    print(f">>> {', '.join(f'turbo.{name} is pipeline.{name}' for name in names)}")
    found = tuple(getattr(turbo, name) is getattr(pipeline, name) for name in names)
    print(found)
    print('>>> print(*smartcache.components(), sep="\\n")')
    print(*smartcache.components(), sep="\n")
    print(">>> # Is its picture that of diffusers alone, bit for bit?")
    same = picture(turbo) == picture(plain(folder / "second"))
    print(f"{same}\n", flush=True)
    if found != (True, True, False) or not same or hub.gets(f"{SECOND}/vae/diffusion"):
        sys.exit("That is not what was promised: please report this.")


def show_dataset(folder: Path) -> None:
    """Encode images and captions, edit one caption, and prove that this is all that is encoded."""
    import torch

    folder.mkdir()
    for number, caption in enumerate(CAPTIONS):
        paint(folder / f"{number}.png", number)
        (folder / f"{number}.txt").write_text(f"{caption}\n")
    print("Eight images with captions, encoded by the VAE and the text encoder of the pipeline:")
    print("".join(f"  {line}".rstrip() + "\n" for line in DATASET.splitlines()), flush=True)
    names: dict[str, Any] = {"torch": torch, "to_tensor": to_tensor}
    exec(DATASET, names)  # noqa: S102 - what was shown
    photos: Dataset = names["photos"]
    with photos, torch.inference_mode():
        build(photos)
        print('>>> Path("photos/3.txt").write_text("a blue house")', flush=True)
        (folder / "3.txt").write_text("a blue house")
        report = build(photos)
    if report.encoded != {"latent": 0, "text": 1}:
        sys.exit("More was encoded than the text that was edited: please report this.")


def build(dataset: Dataset) -> BuildReport:
    """Say what is to be encoded, and encode it."""
    print(f">>> print(photos.plan())\n{dataset.plan()}", flush=True)
    report = dataset.build()
    print(f">>> print(photos.build())\n{report}", flush=True)
    return report


def paint(path: Path, number: int) -> None:
    """Write an image that no other number has."""
    from PIL import Image

    noise = random.Random(number).randbytes(32 * 32 * 3)
    Image.frombytes("RGB", (32, 32), noise).save(path)


def to_tensor(image: Image) -> torch.Tensor:
    """Return the pixels of an image between -1 and 1, as a VAE reads them."""
    import numpy as np
    import torch

    return torch.from_numpy(np.asarray(image) / np.float32(127.5) - 1).permute(2, 0, 1)


def load(hub: Hub, variable: str, name: str) -> StableDiffusionPipeline:
    """Load a pipeline, and say what the Hub has sent for it."""
    from diffusers import StableDiffusionPipeline

    import smartcache

    print(f'>>> {variable} = smartcache.from_pretrained("{name}", share=True)', flush=True)
    hub.clear()
    loaded = smartcache.from_pretrained(name, share=True)
    weights = {each.file or "": each.sent for each in hub.gets(".safetensors")}
    parts = ", ".join(sorted(path.split("/")[2] for path in weights))
    size, requests = sum(weights.values()), len(hub.requests)
    print(f"    # {requests} requests; the Hub sent {size:,} bytes of weights: {parts}")
    gc.collect()
    if not isinstance(loaded, StableDiffusionPipeline):
        sys.exit(f"{name} is not a pipeline: please report this.")
    return loaded


def plain(folder: Path) -> StableDiffusionPipeline:
    """Load a pipeline with diffusers alone."""
    from diffusers import StableDiffusionPipeline

    return StableDiffusionPipeline.from_pretrained(folder)


def picture(pipeline: StableDiffusionPipeline) -> bytes:
    """Return what a pipeline paints, as bytes."""
    import torch

    pipeline.set_progress_bar_config(disable=True)
    noise = torch.Generator().manual_seed(0)
    size = {"num_inference_steps": 2, "height": 32, "width": 32, "output_type": "np"}
    return bytes(pipeline("a cat", generator=noise, **size).images.tobytes())


if __name__ == "__main__":
    main()
