"""Nodes for ComfyUI: training datasets that are read as they are needed, checkpoints by their hash.

    smartcache comfyui install ~/ComfyUI

puts a folder into `custom_nodes` that imports this package. `save`, `load`, `describe` and
`import_shards` do the same for scripts, given ComfyUI's output folder.

lazy.py         tensors that read their values when somebody needs them
dataset.py      a dataset on the disk: saving, loading, importing old shards
checkpoints.py  files by hash or name, through the store
nodes.py        what ComfyUI shows
"""

from smartcache.integrations.comfyui.checkpoints import find_checkpoint
from smartcache.integrations.comfyui.dataset import Info, describe, import_shards, load, save
from smartcache.integrations.comfyui.lazy import LazyTensor
from smartcache.integrations.comfyui.nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

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
