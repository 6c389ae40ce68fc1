"""The nodes, declared in the classic way, which every ComfyUI understands.

ComfyUI's own modules are imported when a node runs: there is no ComfyUI outside of it.
"""

from __future__ import annotations

from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

from smartcache.errors import DatasetError, SmartcacheError
from smartcache.integrations.comfyui import dataset
from smartcache.integrations.comfyui.checkpoints import find_checkpoint

_CATEGORY = "smartcache"
_Inputs = dict[str, dict[str, tuple[Any, ...]]]
_NAME = (
    "STRING",
    {
        "default": "training_dataset",
        "tooltip": "The name of the dataset: letters, digits, '.', '_' and '-'.",
    },
)


def _output() -> str:
    found: str = import_module("folder_paths").get_output_directory()
    return found


class _Node:
    """Lets errors say what to do: of what a node raises, ComfyUI shows str() and nothing else."""

    FUNCTION: str

    def __init_subclass__(cls) -> None:
        act = getattr(cls, cls.FUNCTION)

        @wraps(act)
        def run(*args: Any, **inputs: Any) -> Any:  # noqa: ANN401
            try:
                return act(*args, **inputs)
            except SmartcacheError as error:
                if error.hint:
                    error.message = f"{error.message}\nHint: {error.hint}"
                    error.hint, error.__notes__ = "", []
                raise

        setattr(cls, cls.FUNCTION, run)


class SaveDataset(_Node):
    """Keeps latents and conditioning on the disk, equal tensors once."""

    CATEGORY = _CATEGORY
    DESCRIPTION = (
        "Save latents and conditioning as a training dataset, in place of the one that has the"
        " name. Equal tensors are kept once. If saving fails, the old dataset stays."
    )
    RETURN_TYPES = ()
    FUNCTION = "save"
    OUTPUT_NODE = True
    INPUT_IS_LIST = True

    @classmethod
    def INPUT_TYPES(cls) -> _Inputs:  # noqa: N802 - ComfyUI's name
        """Say what it takes."""
        return {
            "required": {
                "latents": ("LATENT", {"tooltip": "A list of latents, or one."}),
                "conditioning": ("CONDITIONING", {"tooltip": "As many as there are latents."}),
                "dataset_name": _NAME,
            }
        }

    def save(
        self, latents: list[Any], conditioning: list[Any], dataset_name: list[str]
    ) -> dict[str, Any]:
        """Save what is connected; every input is a list."""
        if len(latents) != len(conditioning):
            message = f"There are {len(latents)} latents and {len(conditioning)} conditionings"
            raise DatasetError(message, hint="Connect one conditioning for each latent.")
        (name,) = dataset_name
        samples = zip(latents, conditioning, strict=True)
        count = dataset.save(_output(), name, samples)
        return {"ui": {"text": [f"{dataset.counted(count)} saved as {name}"]}}


class LoadDataset(_Node):
    """Gives latents and conditioning whose tensors are read when they are needed."""

    CATEGORY = _CATEGORY
    DESCRIPTION = (
        "Load a training dataset. Nothing is read until a tensor is needed. With buckets, samples"
        " of one size are grouped, as the train node needs them in bucket mode: it then reads a"
        " batch at a time."
    )
    RETURN_TYPES = ("LATENT", "CONDITIONING")
    RETURN_NAMES = ("latents", "conditioning")
    OUTPUT_IS_LIST = (True, True)
    FUNCTION = "load"

    @classmethod
    def INPUT_TYPES(cls) -> _Inputs:  # noqa: N802
        """Say what it takes."""
        about = "Group samples by size. Switch bucket_mode of the train node on, too."
        return {
            "required": {
                "dataset_name": _NAME,
                "buckets": ("BOOLEAN", {"default": True, "tooltip": about}),
            }
        }

    @classmethod
    def IS_CHANGED(cls, dataset_name: str, **_: object) -> str:  # noqa: N802
        """Let ComfyUI forget what it has of a dataset that was saved again."""
        return dataset.token(_output(), dataset_name)

    def load(self, dataset_name: str, buckets: bool) -> tuple[list[Any], list[Any]]:  # noqa: FBT001
        """Return all latents and all conditioning."""
        return dataset.load(_output(), dataset_name, buckets=buckets)


class DatasetInfo(_Node):
    """Says what a dataset is."""

    CATEGORY = _CATEGORY
    DESCRIPTION = "Show how many samples a training dataset has, their sizes, and its disk space."
    RETURN_TYPES = ("STRING", "INT")
    RETURN_NAMES = ("text", "samples")
    FUNCTION = "describe"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> _Inputs:  # noqa: N802
        """Say what it takes."""
        return {"required": {"dataset_name": _NAME}}

    @classmethod
    def IS_CHANGED(cls, dataset_name: str) -> str:  # noqa: N802
        """Let ComfyUI look again when the dataset was saved again."""
        return dataset.token(_output(), dataset_name)

    def describe(self, dataset_name: str) -> dict[str, Any]:
        """Return the text and the number of samples."""
        info = dataset.describe(_output(), dataset_name)
        return {"ui": {"text": [str(info)]}, "result": (str(info), info.samples)}


class ImportShards(_Node):
    """Brings in what ComfyUI's own node has saved."""

    CATEGORY = _CATEGORY
    DESCRIPTION = (
        "Save the shards that ComfyUI's own node has written as a dataset. The shards stay; code"
        " that somebody has hidden in one is refused, never run."
    )
    RETURN_TYPES = ("INT",)
    RETURN_NAMES = ("samples",)
    FUNCTION = "bring"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> _Inputs:  # noqa: N802
        """Say what it takes."""
        about = "The folder in the output folder that has shard_0000.pkl in it."
        folder = ("STRING", {"default": "training_dataset", "tooltip": about})
        return {"required": {"folder_name": folder, "dataset_name": _NAME}}

    def bring(self, folder_name: str, dataset_name: str) -> dict[str, Any]:
        """Import the shards."""
        count = dataset.import_shards(_output(), folder_name, dataset_name)
        text = f"{dataset.counted(count)} of {folder_name} saved as {dataset_name}"
        return {"ui": {"text": [text]}, "result": (count,)}


class LoadCheckpoint(_Node):
    """Loads a checkpoint by what it is, wherever it lies on this machine."""

    CATEGORY = _CATEGORY
    DESCRIPTION = (
        "Load a checkpoint that the store of smartcache knows, by its SHA-256, its BLAKE3 digest,"
        " the beginning of one (8 characters or more), or its file name."
    )
    RETURN_TYPES = ("MODEL", "CLIP", "VAE")
    FUNCTION = "load"

    @classmethod
    def INPUT_TYPES(cls) -> _Inputs:  # noqa: N802
        """Say what it takes."""
        about = "A SHA-256 or BLAKE3 digest, the beginning of one, or a file name."
        return {"required": {"hash_or_name": ("STRING", {"default": "", "tooltip": about})}}

    def load(self, hash_or_name: str) -> tuple[Any, ...]:
        """Find the file, and load it as ComfyUI's own node does."""
        folders = import_module("folder_paths")
        path = find_checkpoint(hash_or_name, Path(folders.get_temp_directory()) / "smartcache")
        loaded: tuple[Any, ...] = import_module("comfy.sd").load_checkpoint_guess_config(
            str(path), output_vae=True, output_clip=True,
            embedding_directory=folders.get_folder_paths("embeddings"),
        )  # fmt: skip
        return loaded[:3]


NODE_CLASS_MAPPINGS: dict[str, type] = {
    "SmartcacheSaveTrainingDataset": SaveDataset,
    "SmartcacheLoadTrainingDataset": LoadDataset,
    "SmartcacheDatasetInfo": DatasetInfo,
    "SmartcacheImportShards": ImportShards,
    "SmartcacheLoadCheckpoint": LoadCheckpoint,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "SmartcacheSaveTrainingDataset": "Save training dataset (smartcache)",
    "SmartcacheLoadTrainingDataset": "Load training dataset (smartcache)",
    "SmartcacheDatasetInfo": "Dataset info (smartcache)",
    "SmartcacheImportShards": "Import old shards (smartcache)",
    "SmartcacheLoadCheckpoint": "Load checkpoint by hash (smartcache)",
}
