"""Calls with `share=` for folders on this disk, as the public functions make them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from smartcache.pretrained.api import load
from smartcache.pretrained.call import Asked, Placement

if TYPE_CHECKING:
    import torch
    from diffusers import StableDiffusionPipeline

PARTS = ("text_encoder", "unet", "vae")


def pipeline_of(
    folder: Path,
    cls: type | None = None,
    *,
    share: bool | tuple[str, ...] = True,
    placement: Placement | None = None,
    **arguments: object,
) -> StableDiffusionPipeline:
    """Load a pipeline; its class is that of model_index.json."""
    from diffusers import DiffusionPipeline

    asked = asked_for(cls or DiffusionPipeline, folder, share=share, **arguments)
    return cast("StableDiffusionPipeline", load(replace(asked, placement=placement)))


def model_of(cls: type, folder: Path, **arguments: object) -> torch.nn.Module:
    """Load one model to be shared."""
    return cast("torch.nn.Module", load(asked_for(cls, folder, share=True, **arguments)))


def asked_for(
    cls: type, folder: Path, *, share: bool | tuple[str, ...], **arguments: object
) -> Asked:
    original = getattr(cls, "from_pretrained")  # noqa: B009 - of any class
    return Asked(cls=cls, original=original, args=(str(folder),), kwargs=arguments, share=share)


def same_parts(first: object, second: object) -> set[str]:
    """Return the names of the components that are one object."""
    return {name for name in PARTS if getattr(first, name) is getattr(second, name)}
