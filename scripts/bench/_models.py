"""Two Stable Diffusion pipelines of a few hundred megabytes, with noise for weights.

Usage: python scripts/bench/_models.py FOLDER

Writes FOLDER/first and FOLDER/second: the same text encoder (203 MB) and VAE (55 MB), and a UNet
(158 MB) each, all in float32, as `save_pretrained` writes them. Takes seconds.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTextModel, CLIPTokenizer

ROOT = Path(__file__).resolve().parent.parent.parent
WIDTH = 1024


def make(folder: Path) -> None:
    """Make both pipelines."""
    from diffusers import DDIMScheduler, StableDiffusionPipeline

    sys.path.insert(0, str(ROOT))
    from tests.hub_server.pipelines import make_tokenizer, seed

    seed(1)
    tokenizer = make_tokenizer(folder / "tokenizer")
    pipeline = StableDiffusionPipeline(
        vae=make_vae(),
        text_encoder=make_text_encoder(tokenizer),
        tokenizer=tokenizer,
        unet=make_unet(),
        scheduler=DDIMScheduler(steps_offset=1, clip_sample=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.save_pretrained(folder / "first")
    shutil.copytree(folder / "first", folder / "second", ignore=shutil.ignore_patterns("unet"))
    make_unet().save_pretrained(folder / "second" / "unet")


def make_vae() -> AutoencoderKL:
    """Return a VAE of 55 MB."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(64, 128, 256),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=2,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=64,
    )


def make_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    """Return a text encoder of 203 MB."""
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=4,
        num_attention_heads=16,
        max_position_embeddings=77,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return CLIPTextModel(config)


def make_unet() -> UNet2DConditionModel:
    """Return a UNet of 158 MB, another one each time."""
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        block_out_channels=(80, 160, 304),
        layers_per_block=2,
        sample_size=16,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=WIDTH,
        attention_head_dim=8,
        norm_num_groups=8,
    )


if __name__ == "__main__":
    make(Path(sys.argv[1]))
