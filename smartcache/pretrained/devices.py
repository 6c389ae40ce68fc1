"""Where the parts of a model go: everything to one device, or the encoders alone.

Where the library can load straight onto a device it is told to. All else is moved component by
component, so that never more than one of them is in host memory and on the device at once.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from smartcache.errors import DeviceMemoryError
from smartcache.pretrained.arguments import Asked
from smartcache.pretrained.parts import part_of
from smartcache.sizes import format_size

if TYPE_CHECKING:
    import torch

    Device = str | int | torch.device


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where components go; `source` and `component` say in errors what was loaded."""

    device: torch.device | None = None
    """Where everything goes."""
    encoders: torch.device | None = None
    """Where text encoders, image encoders and VAE go instead."""
    source: str = ""
    component: str = ""
    """The name of a model that is loaded alone: its subfolder."""

    def device_for(self, component: str, module: object | None = None) -> torch.device | None:
        """Return where a component goes; None: it stays where the library has put it."""
        class_name = "" if module is None else type(module).__name__
        is_encoder = part_of(component, class_name) is not None
        return self.encoders if is_encoder and self.encoders is not None else self.device

    def apply(self, loaded: object) -> None:
        """Move a model, or a pipeline's components one by one; those already there stay.

        Raises DeviceMemoryError when one does not fit.
        """
        for name, module in modules_of(loaded, alone=self.component):
            device = self.device_for(name, module)
            if device is not None:
                move(module, device, name=name, source=self.source)

    def library_arguments(self, asked: Asked) -> dict[str, object]:
        """Return what makes the library load straight onto the device; {} if it cannot."""
        device = self.device
        if device is None or device.type in ("cpu", "meta") or self.encoders is not None:
            return {}
        is_taken = "device_map" in asked.kwargs or asked.kwargs.get("low_cpu_mem_usage") is False
        if is_taken or importlib.util.find_spec("accelerate") is None:
            return {}
        if asked.is_model:
            return {"device_map": {"": device}}
        # Pipelines know the accelerator by its bare name only, and no map for connected ones.
        is_connected = getattr(asked.cls, "_load_connected_pipes", False)
        is_single = getattr(asked.original, "__name__", "") == "from_single_file"
        can_map = asked.is_pipeline and not is_connected and not is_single
        if can_map and str(device) == accelerator():
            return {"device_map": str(device)}
        return {}


def placement(
    device: Device | None, encoders_device: Device | None, *, source: str = "", component: str = ""
) -> Placement | None:
    """Return where things go; None: nothing is moved.

    "auto" is CUDA, then MPS. For the encoders it counts only while no `device` is given.
    """
    everything = resolve_device(device)
    is_auto = isinstance(encoders_device, str) and encoders_device == "auto"
    encoders = None if is_auto and device is not None else resolve_device(encoders_device)
    if everything is None and encoders is None:
        return None
    return Placement(device=everything, encoders=encoders, source=source, component=component)


def resolve_device(device: Device | None) -> torch.device | None:
    """Return a device by its name or number; "auto" without an accelerator is None."""
    import torch

    if device is None:
        return None
    name = accelerator() if device == "auto" else device
    if name is None:
        return None
    # torch itself takes a number only where there is an accelerator of that kind.
    return torch.device("cuda", name) if isinstance(name, int) else torch.device(name)


def accelerator() -> str | None:
    """Return "cuda" or "mps" if this machine has one."""
    import torch

    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else None


def modules_of(loaded: object, *, alone: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules of a pipeline with their names; or a model itself, named `alone`."""
    import torch

    if isinstance(loaded, tuple) and loaded:  # With `output_loading_info` there is a report too.
        loaded = loaded[0]
    if isinstance(loaded, torch.nn.Module):
        yield alone, loaded
        return
    components = getattr(loaded, "components", None)
    for name, module in components.items() if isinstance(components, dict) else ():
        if isinstance(module, torch.nn.Module):
            yield name, module


def move(
    module: torch.nn.Module, device: torch.device, *, name: str = "", source: str = ""
) -> None:
    """Move a module to a device; DeviceMemoryError, and the module is back, if it does not fit."""
    away = bytes_away(module, device)
    if away == 0:
        return
    before = next(itertools.chain(module.parameters(), module.buffers())).device
    with device_memory(device, needed=away, name=name, source=source):
        try:
            module.to(device)
        except Exception:
            # Weights move one by one: without this the first half would stay on the device.
            with suppress(RuntimeError):
                module.to(before)
            raise


def bytes_away(module: torch.nn.Module, device: torch.device) -> int:
    """Return the bytes of a module's weights that are not on the device."""
    tensors = {id(each): each for each in (*module.parameters(), *module.buffers())}
    return sum(each.nbytes for each in tensors.values() if not is_on(each.device, device))


def is_on(place: torch.device, device: torch.device) -> bool:
    """Say whether one device is the other; "cuda" without a number is the current one."""
    import torch

    if place.type != device.type:
        return False
    wanted = cast("int | None", device.index)  # torch says int, and means None too
    if wanted is None and device.type == "cuda":
        wanted = torch.cuda.current_device()
    return wanted is None or place.index in (None, wanted)


@contextmanager
def device_memory(
    device: torch.device, *, needed: int, name: str = "", source: str = ""
) -> Iterator[None]:
    """Turn a device that is full into DeviceMemoryError with what is needed and what is free."""
    free = free_bytes(device)
    try:
        yield
    except RuntimeError as error:
        if not is_memory_error(error):
            raise
        raise too_large(device, needed=needed, free=free, name=name, source=source) from error


def is_memory_error(error: BaseException) -> bool:
    """Say whether a device is full; MPS says it in words only."""
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "out of memory" in str(error)


def too_large(
    device: torch.device, *, needed: int, free: int | None, name: str, source: str
) -> DeviceMemoryError:
    """Return the error with its figures; 0 needed or None free: not known."""
    what = " of ".join(part for part in (name, source) if part) or "The model"
    figures = [f"{format_size(needed)} is needed"] if needed else []
    figures += [] if free is None else [f"{format_size(free)} is free"]
    told = f": {', '.join(figures)}" if figures else ""
    return DeviceMemoryError(
        f"{what} does not fit on {device}{told}", device=str(device), needed=needed, free=free,
        component=name, source=source,
    )  # fmt: skip


def free_bytes(device: torch.device) -> int | None:
    """Return what can be allocated on a device: free there, or kept by torch for reuse."""
    import torch

    if device.type == "cuda" and torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + kept
    if device.type == "mps" and torch.backends.mps.is_available():
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    return None


def free_cached(device: torch.device) -> None:
    """Give back to the device what torch keeps for reuse."""
    import torch

    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
