"""Whose folder a directory is, by the names in it.

Every program is known by its own folder (`<webui>`) and by the folder of models in that
(`<webui>/models`). The rules name directories, for files may be left out of a listing; the first
rule that fits decides.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final


@dataclass(frozen=True, slots=True)
class _Layout:
    program: str
    all: frozenset[str]
    """Entries that must be there."""
    any: frozenset[str] = frozenset()
    """Entries of which one must be there."""
    basename: str = ""
    """What the directory itself must be called."""

    def fits(self, names: frozenset[str], basename: str) -> bool:
        return (
            self.all <= names
            and (not self.any or not self.any.isdisjoint(names))
            and self.basename in ("", basename)
        )


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_OWN_FOLDERS: Final = (
    _Layout("Forge", _names("modules_forge")),
    _Layout("A1111", _names("models modules extensions")),
    _Layout("ComfyUI", _names("comfy custom_nodes")),
    _Layout("ComfyUI", _names("models custom_nodes")),  # the base folder of the desktop app
    _Layout("InvokeAI", _names("models databases")),
    _Layout("InvokeAI", _names("invokeai.yaml")),
    _Layout("Stability Matrix", _names("Models Packages")),
    _Layout("LM Studio", _names("models"), basename=".lmstudio"),
    _Layout("LM Studio", _names("models"), basename="lm-studio"),
    _Layout("Ollama", _names("models"), basename=".ollama"),
    _Layout("Hugging Face", _names("hub"), basename="huggingface"),
    _Layout("ModelScope", frozenset(), _names("hub models datasets"), basename="modelscope"),
    _Layout("Pinokio", _names("api"), _names("drive cache"), basename="pinokio"),
)
_MODEL_FOLDERS: Final = (
    _Layout("Ollama", _names("blobs manifests")),
    # Forge alone has a folder for text encoders.
    _Layout("Forge", _names("Stable-diffusion text_encoder")),
    _Layout("A1111", _names("Stable-diffusion")),
    _Layout(
        "Stability Matrix",
        _names("StableDiffusion"),
        _names("Lora VAE ControlNet Embeddings ESRGAN TextEncoders DiffusionModels"),
    ),
    _Layout(
        "ComfyUI",
        _names("checkpoints"),
        _names("loras vae clip text_encoders diffusion_models unet controlnet clip_vision"),
    ),
    _Layout("ComfyUI", _names("diffusion_models"), _names("text_encoders vae loras")),
    _Layout("ModelScope", _names(".msc")),
    _Layout("GPT4All", frozenset(), basename="GPT4All"),
)
_LAYOUTS: Final = _OWN_FOLDERS + _MODEL_FOLDERS
_HUB: Final = ("models--", "datasets--", "spaces--")
_MODELS: Final = frozenset({"models", "embeddings"})
_PINOKIO_DRIVES: Final = os.path.join("drive", "drives", "peers")
"""Pinokio's drives have the folders of the programs that share them."""


def identify(folder: Path) -> str:
    """Return the program whose folder this is; "" if none, or if it cannot be listed.

    A folder called models is known by what lies beside it first, for it may be empty.
    """
    real = os.path.realpath(folder)
    names = _listing(real)
    if names is None:
        return ""
    parent, basename = os.path.split(real)
    if parent.endswith(_PINOKIO_DRIVES):
        return "Pinokio"
    if basename.lower() in _MODELS and (beside := _listing(parent)) is not None:
        for layout in _OWN_FOLDERS:
            if layout.fits(beside, os.path.basename(parent)):
                return layout.program
    return identify_names(names, basename)


def identify_names(names: frozenset[str], basename: str) -> str:
    """Return the program whose folder has this name and these entries; "" if none."""
    for layout in _LAYOUTS:
        if layout.fits(names, basename):
            return layout.program
    if basename.startswith(_HUB) and "snapshots" in names:
        return "Hugging Face"
    return "Hugging Face" if any(name.startswith(_HUB) for name in names) else ""


def _listing(directory: str) -> frozenset[str] | None:
    try:
        return frozenset(os.listdir(directory))
    except (OSError, ValueError):
        return None
