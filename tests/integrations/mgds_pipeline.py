"""A pipeline of the stand-in for mgds: sources, an encoder that counts, and a cache.

As a program it runs one epoch and prints what it has encoded: for tests with several processes.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent / "standins"))

from mgds.PipelineModule import Pipeline, PipelineModule
from mgds.pipelineModuleTypes.RandomAccessPipelineModule import RandomAccessPipelineModule

from smartcache.integrations.mgds import DiskCache, SmartDiskCache

__all__ = ["CONCEPT", "DiskCache", "Encoder", "Pipeline", "Run", "SmartDiskCache", "Sources"]

CONCEPT = {
    "name": "cats", "path": "", "seed": 7, "enabled": True, "loss_weight": 0.5,
    "image_variations": 1, "balancing": 1.0, "balancing_strategy": "REPEATS",
}  # fmt: skip
GROUPING = {
    "variations_in_name": "concept.image_variations",
    "balancing_in_name": "concept.balancing",
    "balancing_strategy_in_name": "concept.balancing_strategy",
    "variations_group_in_name": ["concept.path", "concept.seed"],
    "group_enabled_in_name": "concept.enabled",
}


class Sources(PipelineModule, RandomAccessPipelineModule):  # type: ignore[misc]
    """Files of folders, each with its concept; the caption and the mask lie beside them."""

    def __init__(self, concepts: list[dict[str, Any]]) -> None:
        super().__init__()
        self.items = [
            (str(path), concept)
            for concept in concepts
            for path in sorted(Path(concept["path"]).glob("*.png"))
        ]

    def length(self) -> int:
        return len(self.items)

    def get_inputs(self) -> list[str]:
        return []

    def get_outputs(self) -> list[str]:
        return ["image_path", "concept", "prompt", "mask_path"]

    def get_item(
        self, variation: int, index: int, requested_name: str | None = None
    ) -> dict[str, Any]:
        path, concept = self.items[index]
        item: dict[str, Any] = {
            "image_path": path,
            "concept": concept,
            "mask_path": path[:-4] + "-mask",
        }
        if requested_name == "prompt":
            caption = Path(path[:-4] + ".txt")
            lines = caption.read_text("utf-8").splitlines() if caption.exists() else [path]
            item["prompt"] = lines[variation % len(lines)]
        return item


class Encoder(PipelineModule, RandomAccessPipelineModule):  # type: ignore[misc]
    """Makes latents of the first byte of a file, and hidden states of the length of a prompt.

    `size(variation, index)` says the resolution. A file that begins with ! cannot be decoded.
    """

    def __init__(self, size: Callable[[int, int], tuple[int, int]] | None = None) -> None:
        super().__init__()
        self.size = size or (lambda _variation, _index: (64, 32))
        self.encoded: list[tuple[str, int, int]] = []
        self.decoded = 0
        self.factor = 1
        self.pause = 0.0
        self.lock = threading.Lock()

    def length(self) -> int:
        return self._get_previous_length("image_path") or 0

    def get_inputs(self) -> list[str]:
        return ["image_path"]

    def get_outputs(self) -> list[str]:
        return [
            "latent_image", "latent_mask", "crop_resolution", "original_resolution",
            "text_encoder_hidden_state",
        ]  # fmt: skip

    def get_item(
        self, variation: int, index: int, requested_name: str | None = None
    ) -> dict[str, Any]:
        import torch

        if requested_name == "text_encoder_hidden_state":
            prompt = self._get_previous_item(variation, "prompt", index)
            self.note("text", variation, index)
            return {requested_name: torch.full((4, 8), float(len(prompt)))}
        data = Path(self._get_previous_item(variation, "image_path", index)).read_bytes()
        with self.lock:
            self.decoded += 1
        if data.startswith(b"!"):
            raise OSError("no pixels")
        height, width = self.size(variation, index)
        if requested_name == "crop_resolution":
            return {"crop_resolution": (height, width)}
        if requested_name == "original_resolution":
            return {"original_resolution": (128, 64)}
        value = float(data[0] * self.factor + 1000 * variation)
        if requested_name == "latent_mask":
            mask = Path(self._get_previous_item(variation, "mask_path", index))
            value = float(mask.read_bytes()[0]) if mask.exists() else 0.0
        name = requested_name or "latent_image"
        self.note(name, variation, index)
        time.sleep(self.pause)
        return {name: torch.full((4, height // 8, width // 8), value)}

    def note(self, name: str, variation: int, index: int) -> None:
        with self.lock:
            self.encoded.append((name, variation, index))


class Run:
    """One process of training, as it were: it starts and reads epochs."""

    def __init__(
        self,
        cache_dir: Path,
        *folders: Path,
        kind: Any = SmartDiskCache,
        size: Callable[[int, int], tuple[int, int]] | None = None,
        concept: dict[str, Any] | None = None,
        threads: int = 4,
        **options: Any,
    ) -> None:
        concepts = [{**CONCEPT, **(concept or {}), "path": str(each)} for each in folders]
        self.encoder = Encoder(size)
        self.prepared = 0
        self.bars: list[str] = []
        given: dict[str, Any] = {
            "split_names": ["latent_image"], "aggregate_names": ["crop_resolution", "image_path"],
            "before_cache_fun": self.prepare, "encoder_fingerprint": {"vae": 1}, **GROUPING,
        }  # fmt: skip
        if kind is SmartDiskCache:
            given |= {"source_path_in_name": "image_path", "modeltype": "SD"}
        self.cache = kind(cache_dir=str(cache_dir), **{**given, **options})
        self.pipeline = Pipeline([Sources(concepts), self.encoder, self.cache], threads=threads)

    def prepare(self) -> None:
        self.prepared += 1

    def epoch(self) -> Run:
        """Start the next epoch."""
        self.pipeline.start_next_epoch()
        return self

    def values(self, name: str = "latent_image") -> list[Any]:
        """Read a name of all items; of a tensor one number."""
        found = [self.cache.get_item(each, name)[name] for each in range(self.cache.length())]
        return [each.flatten()[0].item() if hasattr(each, "flatten") else each for each in found]

    @property
    def encodes(self) -> int:
        """How many values were encoded."""
        return len(self.encoder.encoded)


def main() -> None:
    """Run an epoch: `cache_dir folder pause`; prints the number of encodes and the values."""
    import torch  # noqa: F401 - loaded before the clock of the test runs

    cache_dir, folder, pause = sys.argv[1:4]
    run = Run(Path(cache_dir), Path(folder))
    run.encoder.pause = float(pause)
    print("ready", flush=True)
    sys.stdin.readline()
    run.epoch()
    print(json.dumps([os.getpid(), run.encodes, run.values()]), flush=True)


if __name__ == "__main__":
    main()
