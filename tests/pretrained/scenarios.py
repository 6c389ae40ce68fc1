"""What people do with models: load them in every way there is, run them, compare them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import smartcache
from smartcache.functions import shared
from smartcache.store.store import Store
from tests.hub.clients import wrong_blobs
from tests.pretrained.libraries import LibraryHub

if TYPE_CHECKING:
    import numpy as np
    import torch
    from diffusers import DiffusionPipeline, StableDiffusionPipeline

Way: TypeAlias = Literal["function", "flag"]
"""`smartcache.from_pretrained`, or the library's own with `smart_cache=True`."""
WAYS: tuple[Way, ...] = ("function", "flag")
Pipeline: TypeAlias = "StableDiffusionPipeline"


def load(
    name: str | Path,
    *,
    way: Way = "function",
    cls: type | None = None,
    share: bool | list[str] = False,
    **more: object,
) -> Pipeline:
    """Load through smartcache: a pipeline, unless there is another class."""
    from diffusers import DiffusionPipeline

    if way == "function":
        # What is loaded is compared with what the library loads to the CPU.
        words: dict[str, Any] = {"cls": cls, "share": share, "encoders_device": None, **more}
        return cast("Pipeline", smartcache.from_pretrained(name, **words))
    if share:
        more["smart_cache_share"] = share
    with smartcache.enable():
        return plainly(name, cls or DiffusionPipeline, smart_cache=True, **more)


def plainly(name: str | Path, cls: type | None = None, /, **more: object) -> Pipeline:
    """Load as the library does."""
    from diffusers import DiffusionPipeline

    found = DiffusionPipeline if cls is None else cls
    call = cast("Callable[..., Pipeline]", getattr(found, "from_pretrained"))  # noqa: B009
    return call(name, **more)


@functools.cache
def published(folder: Path) -> Pipeline:
    """Return what the library makes of a folder of `Models`; loaded once, not to be changed."""
    return plainly(folder)


def picture(pipeline: DiffusionPipeline) -> np.ndarray:
    """Return what a pipeline makes of the same words and noise every time."""
    import torch

    pipeline.set_progress_bar_config(disable=True)
    torch.set_num_threads(1)  # threads that wait for each other take seconds on a busy machine
    noise = torch.Generator().manual_seed(5)
    made = pipeline(
        "a cat", num_inference_steps=2, height=32, width=32, generator=noise, output_type="np"
    )
    return cast("np.ndarray", made.images)


def tensors(loaded: object) -> dict[str, torch.Tensor]:
    """Return all weights of a model, or of the components of a pipeline."""
    import torch

    if isinstance(loaded, torch.nn.Module):
        return loaded.state_dict()
    components = cast("Pipeline", loaded).components
    modules = {name: each for name, each in components.items() if hasattr(each, "state_dict")}
    return {
        f"{name}.{key}": value
        for name, module in modules.items()
        for key, value in module.state_dict().items()
    }


def assert_equal(one: object, other: object) -> None:
    """Both have the same weights, bit by bit, in the same types and places."""
    mine, theirs = tensors(one), tensors(other)
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert (tensor.dtype, tensor.device) == (theirs[name].dtype, theirs[name].device), name
        assert tensor.equal(theirs[name]), name


def store() -> Store:
    """Return the store that smartcache's functions use now."""
    return shared().store


def files_of_store() -> dict[str, tuple[int, int, bytes]]:
    """Return mode, inode and bytes of every blob of the store."""
    paths = {blob.digest: store().path_of(blob.digest) for blob in store().blobs()}
    return {
        digest: (path.stat().st_mode, path.stat().st_ino, path.read_bytes())
        for digest, path in paths.items()
    }


def assert_sound(library_hub: LibraryHub) -> None:
    """Nothing in the store is damaged, and no blob of the HF cache is wrong or unused."""
    report = store().verify(full=True)
    found = (report.damaged, report.stray, report.writable)
    assert found == ([], [], [])
    assert wrong_blobs(store(), library_hub.cache_dir) == []
    for folder in library_hub.cache_dir.glob("models--*"):
        pointers = [path for path in (folder / "snapshots").rglob("*") if path.is_symlink()]
        used = {path.readlink().name for path in pointers}
        assert {path.name for path in (folder / "blobs").glob("*")} <= used
