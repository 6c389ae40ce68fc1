"""From files to batches: sources, their encoders, and datasets that are encoded once.

Names are loaded when they are first used: `import smartcache.training` loads no numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smartcache.training.batches import Batches as Batches
    from smartcache.training.batches import Plan as Plan
    from smartcache.training.build import BuildPlan as BuildPlan
    from smartcache.training.build import BuildReport as BuildReport
    from smartcache.training.build import Failed as Failed
    from smartcache.training.dataset import Dataset as Dataset
    from smartcache.training.dataset import Miss as Miss
    from smartcache.training.dataset import Output as Output
    from smartcache.training.dataset import Validate as Validate
    from smartcache.training.dataset import dataset_folder as dataset_folder
    from smartcache.training.dataset import dataset_folders as dataset_folders
    from smartcache.training.dataset import exported_dataset as exported_dataset
    from smartcache.training.dataset import open_dataset as open_dataset
    from smartcache.training.dataset import stored_dataset as stored_dataset
    from smartcache.training.document import read_document as read_document
    from smartcache.training.encoder import Buckets as Buckets
    from smartcache.training.encoder import Encoder as Encoder
    from smartcache.training.encoder import Item as Item
    from smartcache.training.engines import Doing as Doing
    from smartcache.training.engines import Engine as Engine
    from smartcache.training.engines import Fault as Fault
    from smartcache.training.engines import Lost as Lost
    from smartcache.training.engines import ProcessEngine as ProcessEngine
    from smartcache.training.engines import packed as packed
    from smartcache.training.engines import unpacked as unpacked
    from smartcache.training.prefetch import Prefetcher as Prefetcher
    from smartcache.training.prefetch import PrefetchStats as PrefetchStats
    from smartcache.training.sources import Sources as Sources
    from smartcache.training.upkeep import CleanPlan as CleanPlan
    from smartcache.training.upkeep import copy_dataset as copy_dataset
    from smartcache.training.upkeep import pack_up as pack_up
    from smartcache.training.upkeep import unpack as unpack

_HOMES = {
    "batches": ("Batches", "Plan"),
    "build": ("BuildPlan", "BuildReport", "Failed"),
    "dataset": (
        "Dataset",
        "Miss",
        "Output",
        "Validate",
        "dataset_folder",
        "dataset_folders",
        "exported_dataset",
        "open_dataset",
        "stored_dataset",
    ),
    "document": ("read_document",),
    "encoder": ("Buckets", "Encoder", "Item"),
    "engines": ("Doing", "Engine", "Fault", "Lost", "ProcessEngine", "packed", "unpacked"),
    "prefetch": ("PrefetchStats", "Prefetcher"),
    "sources": ("Sources",),
    "upkeep": ("CleanPlan", "copy_dataset", "pack_up", "unpack"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME_OF)  # noqa: PLE0605 - the table above is the list


if not TYPE_CHECKING:  # A type checker that saw it would believe in any name.

    def __getattr__(name: str) -> object:
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
        globals()[name] = found
        return found
