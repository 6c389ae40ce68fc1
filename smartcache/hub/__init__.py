"""Hugging Face repos on this machine: downloads that fetch nothing the machine already has.

The result of everything here is the standard HF cache, made by huggingface_hub itself; blobs of the
store are linked into it, and what arrives is verified and becomes blobs.
"""

from __future__ import annotations

from typing import Literal

RepoType = Literal["model", "dataset", "space", "kernel"]
REPO_TYPES: tuple[RepoType, ...] = ("model", "dataset", "space", "kernel")
