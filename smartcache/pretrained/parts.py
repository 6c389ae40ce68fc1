"""Which part of a pipeline a component is: text, image, vae, or none of what encodes.

The name in model_index.json decides first, because any class may serve: text encoders are CLIP, T5,
Llama or Qwen. A model that is loaded alone, or has a name of its own, is known by its class.
"""

from __future__ import annotations

import re
from typing import Literal

Part = Literal["text", "image", "vae"]
PARTS: tuple[Part, ...] = ("text", "image", "vae")

# Audio is no text: what pipelines call an audio tokenizer is an autoencoder.
_TEXT = (
    r"(?!audio_|sound_)(?:[a-z]+_)?(?:text_encoder|tokenizer|text_processor)(?:_\d+)?"
    r"|processor|bert|connectors|language_model|projection_model|vision_language_encoder"
)
_IMAGE = (
    r"(?:[a-z]+_)?(?:image_encoder|image_processor|feature_extractor|vision_encoder)(?:_\d+)?"
    r"|siglip|siglip_processor|image_embedder"
)
_VAE = r"(?:[a-z]+_)?(?:vae|vqvae|vqgan|movq|autoencoder)(?:_\d+)?"
_NAMES: tuple[tuple[Part, re.Pattern[str]], ...] = (
    ("text", re.compile(_TEXT)),
    ("image", re.compile(_IMAGE)),
    ("vae", re.compile(_VAE)),
)
_CLASSES: tuple[tuple[Part, re.Pattern[str]], ...] = (
    ("text", re.compile(r".*(?:TextModel(?:WithProjection)?|T5EncoderModel)")),
    ("image", re.compile(r".*VisionModel(?:WithProjection)?")),
    ("vae", re.compile(r"(?:Asymmetric)?Autoencoder.*|VQModel|ConsistencyDecoderVAE")),
)


def part_of(component: str, class_name: str = "") -> Part | None:
    """Return which part a component is, by its name or else by its class; None: no encoder."""
    for patterns, text in ((_NAMES, component), (_CLASSES, class_name)):
        for part, pattern in patterns:
            if pattern.fullmatch(text):
                return part
    return None
