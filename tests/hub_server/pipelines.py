"""Tiny models with random weights, in the layout of their libraries, for the Hub to serve.

    made = make_models(folder)                       # seconds: the fixture `models` has them made
    hub.add_folder("org/first", made.first)
    hub.add_folder("org/second", made.second)        # same text encoder and VAE, another UNet
    StableDiffusionPipeline.from_pretrained(made.first)("a cat", num_inference_steps=1)
    hub.add("org/mixed", {**files_of(made.pickled), **files_of(made.first)})    # .bin beside them

Equal seeds give equal bytes. Every weight file has at least 64 KiB, so that it counts as weights.
Needs torch, diffusers and transformers, which are imported when they are used.
"""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffusers import UNet2DConditionModel
    from transformers import CLIPTextModel, CLIPTokenizer

SHARED_WEIGHTS = (
    "text_encoder/model.safetensors",
    "vae/diffusion_pytorch_model.safetensors",
)
OWN_WEIGHTS = "unet/diffusion_pytorch_model.safetensors"
LEAST_WEIGHTS = 64 * 1024

_WIDTH = 32
_LENGTH = 77


@dataclass(frozen=True, slots=True)
class Models:
    """Folders as `save_pretrained` writes them."""

    first: Path
    """A Stable Diffusion pipeline."""
    second: Path
    """Another, with the same `SHARED_WEIGHTS`."""
    language: Path
    """A BERT."""

    @property
    def halves(self) -> Path:
        """The first pipeline, with weights of the variant "fp16" beside the others."""
        return self.first.with_name("halves")

    @property
    def sharded(self) -> Path:
        """The second, text encoder and UNet in shards with an index; those of "fp16" beside."""
        return self.first.with_name("sharded")

    @property
    def pickled(self) -> Path:
        """The first, its weights in `.bin` files alone."""
        return self.first.with_name("pickled")

    @property
    def language_sharded(self) -> Path:
        return self.first.with_name("language-sharded")

    @property
    def language_pickled(self) -> Path:
        return self.first.with_name("language-pickled")

    def size(self, path: str) -> int:
        """Return the size of a weight file of the first pipeline, and of the second one's too."""
        return (self.first / path).stat().st_size


def make_models(folder: Path) -> Models:
    """Make them all, if they are not there yet."""
    made = Models(folder / "first", folder / "second", folder / "language")
    if not (folder / "done").exists():
        import torch

        with torch.random.fork_rng(), warnings.catch_warnings(action="ignore"):
            _make_all(folder)
        (folder / "done").touch()
    return made


def files_of(folder: Path) -> dict[str, bytes | Path]:
    """Return {path in the repo: file} of a folder, as `Hub.add` takes it."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path for path in files}


def make_pipelines(folder: Path) -> tuple[Path, Path]:
    """Make two Stable Diffusion pipelines with the same text encoder and VAE."""
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline

    first, second = folder / "first", folder / "second"
    seed(1)
    pipeline = StableDiffusionPipeline(
        vae=AutoencoderKL(
            block_out_channels=(16, 32),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=4,
            norm_num_groups=8,
            sample_size=32,
        ),
        text_encoder=make_text_encoder(),
        tokenizer=make_tokenizer(folder / "tokenizer"),
        unet=_make_unet(2),
        scheduler=DDIMScheduler(steps_offset=1, clip_sample=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.save_pretrained(first)
    shutil.copytree(first, second)
    shutil.rmtree(second / "unet")
    _make_unet(3).save_pretrained(second / "unet")
    return first, second


def _make_unet(number: int) -> UNet2DConditionModel:
    from diffusers import UNet2DConditionModel

    seed(number)
    # To load one takes as long as it has layers, whatever their size: one of each kind will do.
    return UNet2DConditionModel(
        block_out_channels=(48,),
        layers_per_block=1,
        sample_size=16,
        in_channels=4,
        out_channels=4,
        down_block_types=("CrossAttnDownBlock2D",),
        mid_block_type=None,
        up_block_types=("UpBlock2D",),
        cross_attention_dim=_WIDTH,
        attention_head_dim=8,
        norm_num_groups=8,
    )


def make_text_encoder() -> CLIPTextModel:
    """Return a text encoder of two layers."""
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(
        vocab_size=len(_vocabulary()),
        hidden_size=_WIDTH,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=_LENGTH,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return CLIPTextModel(config)


def make_tokenizer(folder: Path) -> CLIPTokenizer:
    """Return a tokenizer that knows the letters and a few words."""
    from transformers import CLIPTokenizer

    folder.mkdir(parents=True)
    vocabulary = {token: number for number, token in enumerate(_vocabulary())}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), "utf-8")
    merges = ("#version: 0.2", "c a", "ca t</w>", "d o", "do g</w>", "o f</w>")
    (folder / "merges.txt").write_text("\n".join(merges) + "\n", "utf-8")
    tokenizer = CLIPTokenizer.from_pretrained(folder, model_max_length=_LENGTH)
    assert isinstance(tokenizer, CLIPTokenizer)
    return tokenizer


def _vocabulary() -> list[str]:
    letters = [chr(code) for code in range(ord("!"), ord("~") + 1)]
    pairs = ["ca", "cat</w>", "do", "dog</w>", "of</w>"]
    ends = [f"{letter}</w>" for letter in letters]
    return ["<|startoftext|>", "<|endoftext|>", *letters, *ends, *pairs]


def make_language_model(folder: Path) -> Path:
    """Make a BERT of two layers, with config, as `save_pretrained` writes it."""
    from transformers import BertConfig, BertModel

    seed(4)
    config = BertConfig(
        vocab_size=128,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=64,
    )
    BertModel(config).save_pretrained(folder)
    return folder


def make_halves(pipeline: Path, folder: Path) -> None:
    """Make a copy of a pipeline that has its weights in half precision too, as "fp16"."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(pipeline, folder)
    for path in sorted(folder.glob("*/*.safetensors")):
        half = {name: tensor.half() for name, tensor in load_file(path).items()}
        save_file(half, path.with_suffix(".fp16.safetensors"), metadata={"format": "pt"})


def make_shards(pipeline: Path, folder: Path) -> None:
    """Make a copy of a pipeline whose text encoder and UNet are in shards, in "fp16" too."""
    from diffusers import UNet2DConditionModel
    from transformers import CLIPTextModel

    shutil.copytree(pipeline, folder, ignore=shutil.ignore_patterns("text_encoder", "unet"))
    for name, cls in (("text_encoder", CLIPTextModel), ("unet", UNet2DConditionModel)):
        model = cls.from_pretrained(pipeline / name)
        size = model.get_memory_footprint() * 3 // 5
        model.save_pretrained(folder / name, max_shard_size=size)
        # Elsewhere first: `save_pretrained` removes what looks like shards of an older model.
        halves = folder / "halves"
        model.half().save_pretrained(halves, max_shard_size=size // 2, variant="fp16")
        for path in halves.glob("*fp16*"):
            path.rename(folder / name / path.name)
        shutil.rmtree(halves)


def make_pickles(model: Path, folder: Path) -> None:
    """Make a copy of a pipeline or model that has its weights in `.bin` files only."""
    import torch
    from safetensors.torch import load_file

    shutil.copytree(model, folder)
    for path in sorted(folder.rglob("*.safetensors")):
        # transformers says "model" and "pytorch_model", diffusers has one name for both.
        stem = "pytorch_model" if path.stem == "model" else path.stem
        torch.save(load_file(path), path.with_name(f"{stem}.bin"))
        path.unlink()


def seed(number: int) -> None:
    """Make the next random weights the same every time."""
    import torch

    torch.manual_seed(number)


def _make_all(folder: Path) -> None:
    from transformers import BertModel

    first, second = make_pipelines(folder)
    made = Models(first, second, make_language_model(folder / "language"))
    make_halves(first, made.halves)
    make_shards(second, made.sharded)
    make_pickles(first, made.pickled)
    make_pickles(made.language, made.language_pickled)
    language = BertModel.from_pretrained(made.language)
    language.save_pretrained(made.language_sharded, max_shard_size="120KB")
    for path in (*folder.rglob("*.safetensors"), *folder.rglob("*.bin")):
        assert path.stat().st_size >= LEAST_WEIGHTS, path


if __name__ == "__main__":
    make_models(Path(sys.argv[1]))
