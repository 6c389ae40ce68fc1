"""Nodes for ComfyUI: training datasets that are read as they are needed, checkpoints by their hash.

A file in ComfyUI's `custom_nodes` that imports this package adds them:

    from smartcache.integrations.comfyui import *

`save`, `load`, `describe` and
`import_shards` do the same for scripts, given ComfyUI's output folder. Names are loaded when they
are first used, and PyTorch with them.

lazy.py         tensors that read their values when somebody needs them
dataset.py      a dataset on the disk: saving, loading, importing old shards
checkpoints.py  files by hash or name, through the store
nodes.py        what ComfyUI shows
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smartcache.integrations.comfyui.checkpoints import find_checkpoint
    from smartcache.integrations.comfyui.dataset import Info, describe, import_shards, load, save
    from smartcache.integrations.comfyui.lazy import LazyTensor
    from smartcache.integrations.comfyui.nodes import (
        NODE_CLASS_MAPPINGS,
        NODE_DISPLAY_NAME_MAPPINGS,
    )

__all__ = [
    "NODE_CLASS_MAPPINGS",
    "NODE_DISPLAY_NAME_MAPPINGS",
    "Info",
    "LazyTensor",
    "describe",
    "find_checkpoint",
    "import_shards",
    "load",
    "save",
]
_HOMES = {
    "find_checkpoint": "checkpoints",
    "LazyTensor": "lazy",
    "NODE_CLASS_MAPPINGS": "nodes",
    "NODE_DISPLAY_NAME_MAPPINGS": "nodes",
}
"""Where a name is that is not in dataset.py."""


if not TYPE_CHECKING:  # A type checker that saw it would believe in any name.

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'dataset')}"), name)
