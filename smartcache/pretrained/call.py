"""One call of a library's `from_pretrained`: its arguments, the dtype, the device, and the block.

Only what says where the files come from is looked at. Every other argument belongs to the library
and is handed on as it is. The lists of argument names that more than one module needs are here.

A part of a pipeline is known by its name in model_index.json, because any class may serve: text
encoders are CLIP, T5, Llama or Qwen. A model that is loaded alone, or has a name of its own, is
known by its class. Where the library can load straight onto a device it is told to. All else is
moved component by component, so that never more than one of them is in host memory and on the
device at once.

One thread at a time loads. The libraries change torch for the whole process while they load: its
default dtype, the functions that initialise weights, how modules register them. Eight threads that
load pipelines at once get weights of wrong dtypes and weights without memory, and every model made
afterwards has them too. Libraries also load parts of a model through the same functions: what they
call themselves, inside of a call that is attended to already, goes straight through.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import os
import posixpath
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from smartcache.cache import SmartCache
from smartcache.config import remotes_file
from smartcache.errors import NoSpaceError, SmartcacheError, StoreUnwritableError, WrongVariantError
from smartcache.functions import shared
from smartcache.hub import Call
from smartcache.pretrained.flag import LIBRARIES
from smartcache.store.store import Store

if TYPE_CHECKING:
    import torch

    Device = str | int | torch.device
    Dtype = str | torch.dtype | Mapping[str, str | torch.dtype]

Part = Literal["text", "image", "vae"]

INDEX = "model_index.json"
CONFIG = "config.json"
SOURCE_NAMES = (
    "pretrained_model_name_or_path", "pretrained_model_or_path", "pretrained_model_name",
    "pretrained_model_path", "pretrained_model_link_or_path",
    "pretrained_model_link_or_path_or_dict", "pretrained_processor_name_or_path",
    "retriever_name_or_path",
)  # fmt: skip
"""What the libraries call their first argument."""
HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "revision", "token")
HOW_LOADED = (
    "attn_implementation", "device_map", "disable_mmap", "dtype", "low_cpu_mem_usage", "max_memory",
    "offload_folder", "offload_state_dict", "quantization_config", "torch_dtype",
)  # fmt: skip
"""Arguments that change how weights are loaded, not which."""
STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
"""Values of `device_map` that name no device."""
PARTS: tuple[Part, ...] = ("text", "image", "vae")

_MODELS = frozenset(
    ("ModelMixin", "PreTrainedModel", "_BaseAutoModelClass", "_BaseAutoBackboneClass")
)
# Audio is no text: what pipelines call an audio tokenizer is an autoencoder.
_TEXT = (
    r"(?!audio_|sound_)(?:[a-z]+_)?(?:text_encoder|tokenizer|text_processor)(?:_\d+)?"
    r"|processor|bert|connectors|language_model|projection_model|vision_language_encoder"
)
_IMAGE = (
    r"(?:[a-z]+_)?(?:image_encoder|image_processor|feature_extractor|vision_encoder)(?:_\d+)?"
    r"|siglip|siglip_processor|image_embedder"
)
_VAE = r"(?:[a-z]+_)?(?:vae|vqvae|vqgan|movq|autoencoder)(?:_\d+)?"
_PART_NAMES = tuple(zip(PARTS, map(re.compile, (_TEXT, _IMAGE, _VAE)), strict=True))
_PART_CLASSES: tuple[tuple[Part, re.Pattern[str]], ...] = (
    ("text", re.compile(r".*(?:TextModel(?:WithProjection)?|T5EncoderModel)")),
    ("image", re.compile(r".*VisionModel(?:WithProjection)?")),
    ("vae", re.compile(r"(?:Asymmetric)?Autoencoder.*|VQModel|ConsistencyDecoderVAE")),
)
_SHORT_DTYPES = {
    "fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32",
    "float": "float32", "full": "float32", "fp64": "float64",
}  # fmt: skip
_WEIGHTS = re.compile(r".+?(?:-\d+-of-\d+)?(?:\.([^.]+?))?(?:-\d+-of-\d+)?\.(?:safetensors|bin)")
"""A weight file; the group is its variant."""
_DTYPE_RENAMED = (0, 42)
"""The first release of diffusers that is known to take `dtype` everywhere."""

_log = logging.getLogger(__name__)
_said: set[str] = set()
_inside: ContextVar[bool] = ContextVar("smartcache_inside", default=False)
_gate = threading.RLock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a program asks a library for; `run` asks the library itself."""

    cls: type
    original: Callable[..., object]
    """The library's function, bound to the class."""
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object]
    """The library's arguments alone: ours are not among them."""
    share: bool | tuple[str, ...] = False
    """Whether components may be those of other pipelines: all, or those of these names."""
    is_implicit: bool = False
    """The caller has not asked for the store at this call: the flag is on for all of them."""
    placement: Placement | None = None
    """Where the parts go; None: where the library puts them."""
    mapping: MutableMapping[str, str] | None = None
    """The caller's {sha256: path}: further known files, and what is loaded is added to it."""

    @property
    def source(self) -> str:
        """The repo or path that was named; "" if there is none."""
        values = [self.kwargs.get(name) for name in SOURCE_NAMES]
        for value in (*self.args[:1], *values):
            if isinstance(value, str | os.PathLike):
                return os.fsdecode(value)
        return ""

    @property
    def is_local(self) -> bool:
        """Whether a folder or file of that name is there: the libraries do not ask the Hub then."""
        return os.path.exists(self.source)

    @property
    def is_auto_pipeline(self) -> bool:
        """Whether the class only finds out which pipeline is meant."""
        return self.cls.__name__.startswith("AutoPipelineFor")

    @property
    def is_pipeline(self) -> bool:
        """Whether a whole pipeline of diffusers is loaded."""
        return "DiffusionPipeline" in self.bases or self.is_auto_pipeline

    @property
    def is_model(self) -> bool:
        """Whether one model with weights is loaded."""
        is_auto = self.cls.__name__ == "AutoModel"
        return not self.is_pipeline and (is_auto or bool(self.bases & _MODELS))

    @property
    def bases(self) -> set[str]:
        """The names of the libraries' classes that the class is made of."""
        return {
            each.__name__
            for each in self.cls.__mro__
            if each.__module__.partition(".")[0] in LIBRARIES
        }

    @property
    def subfolder(self) -> str:
        """The folder of the repo that is loaded; "" for all of it."""
        value = self.kwargs.get("subfolder")
        if not isinstance(value, str) or not value.strip("/"):
            return ""
        path = posixpath.normpath(value.strip("/"))
        return "" if path.startswith(".") else path

    def folder(self, revision: str | None = None) -> Path | None:
        """Return where the files lie now: a folder, or one of the HF cache; None: not here."""
        within = "" if self.is_pipeline else self.subfolder
        if self.is_local:
            path = Path(self.source, within)
            return path if path.is_dir() else None
        from huggingface_hub import try_to_load_from_cache

        name = INDEX if self.is_pipeline else posixpath.join(within, CONFIG)
        place = cast("str | None", self.kwargs.get("cache_dir"))
        found = try_to_load_from_cache(self.source, name, cache_dir=place, revision=revision)
        return Path(found).parent if isinstance(found, str) else None

    def run(self, **more: object) -> object:
        """Ask the library, with its arguments and `more`."""
        return self.original(*self.args, **{**self.kwargs, **more})

    def load(self) -> object:
        """Let the library load, straight onto the device if it can, in one thread at a time."""
        # Threads that a library starts itself come by here with no flag of their own: they must not
        # wait for the call that waits for them.
        with nullcontext() if self.is_implicit else one_at_a_time():
            return self.run(**self.placed())

    def placed(self) -> dict[str, object]:
        """Return what makes the library load straight onto the device; {} if it cannot."""
        return {} if self.placement is None else self.placement.library_arguments(self)

    def place(self, loaded: object) -> object:
        """Return what was loaded, everything where it goes."""
        if self.placement is not None:
            self.placement.apply(loaded)
        return loaded


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Wait until no other thread is in such a block."""
    with _gate:
        yield


def _reopen() -> None:
    """Begin with an open gate in a forked child: the thread that held it is not there."""
    global _gate  # noqa: PLW0603 - a lock cannot be opened by anybody but its owner
    _gate = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reopen)


# The block around a library's call


def is_inside() -> bool:
    """Say whether this thread is in a library's call that smartcache attends to."""
    return _inside.get()


@contextmanager
def inside() -> Iterator[None]:
    """Let the library's own calls in this block go straight through."""
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)


@contextmanager
def attended(asked: Asked) -> Iterator[str]:
    """Let what the library downloads in this block be answered out of the store, and proven.

    Gives the commit that is loaded; "" for a folder, or if the Hub does not say. Where the store
    cannot be used a warning says so, and the library does everything by itself.
    """
    with inside():
        cache = open_cache() if asked.source else None
        if cache is None or (not asked.is_local and not _is_repo(asked.source)):
            yield ""
        elif asked.is_local:
            path = Path(asked.source) / asked.subfolder
            try:
                cache.look_for_damage(path)
            except (SmartcacheError, OSError) as error:
                _log.warning("links in %s could not be looked at: %s", path, error)
            yield ""
        else:
            known = {name: asked.kwargs[name] for name in HUB_ARGUMENTS if name in asked.kwargs}
            with cache.attending(
                Call(repo_id=asked.source, arguments=known),
                inside="" if asked.is_pipeline else asked.subfolder,
                has_weights=asked.is_pipeline or asked.is_model,
                mapping=asked.mapping,
            ) as commit:
                yield commit


def pin(source: str, arguments: Mapping[str, object]) -> dict[str, object]:
    """Return a library's arguments with the commit of the revision in them, asked for once.

    huggingface_hub and both libraries pass such a revision around, so that all of them see one
    commit and none asks again. What fails is left to the library, which knows what to say; but a
    tier may have the repo, where the Hub cannot be asked: then it is in the HF cache afterwards.
    """
    import huggingface_hub

    resolve = getattr(huggingface_hub, "resolve_revision", None)  # from 2.x on
    if resolve is None or not source or os.path.exists(source) or not _is_repo(source):
        return dict(arguments)
    known = ("revision", "cache_dir", "token")
    options = {name: arguments[name] for name in known if name in arguments}
    is_local = bool(arguments.get("local_files_only"))
    try:
        revision = resolve(source, local_files_only=is_local, **options)
    except Exception as error:  # noqa: BLE001 - whatever it is, the library will meet it too
        _log.debug("the revision of %s is left to the library: %s", source, error)
        if not is_local:
            _pull_instead(source, arguments)
        return dict(arguments)
    return {**arguments, "revision": revision}


def _pull_instead(source: str, arguments: Mapping[str, object]) -> None:
    """Let a repo that the HF cache does not know come from a tier, if there is one that has it."""
    cache = open_cache() if os.path.exists(remotes_file()) else None
    if cache is None:
        return
    options = without_none({name: arguments.get(name) for name in ("revision", "cache_dir")})
    subfolder = arguments.get("subfolder")
    if subfolder:
        options["allow_patterns"] = [f"{subfolder}/*"]
    try:
        cache.pull_instead(Call(repo_id=source, arguments=options))
    except (SmartcacheError, OSError) as error:
        _log.warning("%s does not come from a tier: %s", source, error)


def open_cache() -> SmartCache | None:
    """Return the cache of this process; None, with a warning, if its store cannot be used."""
    try:
        return shared()
    except (StoreUnwritableError, NoSpaceError) as error:
        text = f"smartcache is not used: {error}"
        if text not in _said:  # one load asks several times
            _said.add(text)
            _log.warning("%s", text)
        return None


def open_store() -> Store | None:
    """Return the store of this process; None, with a warning, if it cannot be used."""
    cache = open_cache()
    return None if cache is None else cache.store


def _is_repo(text: str) -> bool:
    """Say whether a text can name a repo; of any other the library knows what to say."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return True


def checked_mapping(mapping: object) -> MutableMapping[str, str] | None:
    """Return a caller's {sha256: path}; TypeError for what nothing can be added to."""
    if mapping is None or isinstance(mapping, MutableMapping):
        return mapping
    kind = type(mapping).__name__
    raise TypeError(f"cache_mapping is a mutable mapping of sha256 to path, such as {{}}: {kind}")


def share_names(share: object, *, argument: str = "share") -> bool | tuple[str, ...]:
    """Return what to share as `Asked` has it; TypeError for what is neither yes, no nor names."""
    if share is None or isinstance(share, bool):
        return bool(share)
    names = (share,) if isinstance(share, str) else share
    if isinstance(names, Iterable):
        names = tuple(names)
        if all(isinstance(each, str) for each in names):
            return names
    raise TypeError(f"{argument} is True, False or names of components, not {share!r}")


def without_none(arguments: Mapping[str, object]) -> dict[str, object]:
    """Return what was given: None says nothing."""
    return {name: value for name, value in arguments.items() if value is not None}


# Variants


@contextmanager
def naming_variants(asked: Asked) -> Iterator[None]:
    """Raise WrongVariantError, with the variants there are, where there is none of the asked for.

    All other errors of the library in this block pass as they are.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        variant = asked.kwargs.get("variant")
        if isinstance(error, SmartcacheError) or not isinstance(variant, str):
            raise
        found = _variants(asked)
        if not found or variant in found:
            raise
        known = sorted(found - {""})
        has = f"the variants {', '.join(known)}" if known else "only weights without a variant"
        raise WrongVariantError(
            f"{asked.source} has no weights of the variant {variant!r}; it has {has}",
            variant=variant, variants=known, source=asked.source,
        ) from error  # fmt: skip


def _variants(asked: Asked) -> set[str]:
    """Return the variants of a model's or pipeline's weights, "" among them; empty: not known."""
    if os.path.isdir(asked.source):
        paths = [path.relative_to(asked.source) for path in Path(asked.source).rglob("*")]
        names = [path.as_posix() for path in paths]
    elif asked.kwargs.get("local_files_only"):
        return set()
    else:
        from huggingface_hub import list_repo_files

        options = {name: asked.kwargs.get(name) for name in ("revision", "token")}
        try:
            names = list_repo_files(asked.source, **options)  # type: ignore[arg-type]
        except Exception:  # noqa: BLE001 - then the library's own error says what is wrong
            return set()
    found = set()
    for name in names:
        folder, _, file = name.rpartition("/")
        weights = _WEIGHTS.fullmatch(file)
        if weights and (bool(folder) if asked.is_pipeline else folder == asked.subfolder):
            found.add(weights[1] or "")
    return found


# The dtype: by its usual names, under the argument that each library has for it


def dtype_arguments(cls: type, dtype: Dtype | None, old: object = None) -> dict[str, object]:
    """Return the argument for the dtype, under the name that the class knows; {} for None.

    `old` is what was given as `torch_dtype`, the old name; giving both is a TypeError.
    """
    if old is not None and dtype is not None:
        raise TypeError("Pass dtype alone: torch_dtype is its old name, and both were given")
    value = old if dtype is None else dtype
    if value is None:
        return {}
    name = "dtype"
    if "diffusers" in {each.__module__.partition(".")[0] for each in cls.__mro__}:
        text = str(importlib.import_module("diffusers").__version__)
        version = tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
        name = "dtype" if version >= _DTYPE_RENAMED else "torch_dtype"
    return {name: _resolve_dtype(value)}


def _resolve_dtype(dtype: object) -> object:
    """Return torch's dtype for a name; other values, "auto" among them, as they are."""
    if isinstance(dtype, Mapping):
        return {name: _resolve_dtype(each) for name, each in dtype.items()}
    if not isinstance(dtype, str) or dtype == "auto":
        return dtype
    import torch

    name = dtype.removeprefix("torch.")
    found = getattr(torch, _SHORT_DTYPES.get(name, name), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(  # noqa: TRY004 - a text that names none
            f"There is no dtype {dtype!r}; for example: float32, float16, bfloat16"
        )
    return found


def dtype_for(component: str, arguments: Mapping[str, object]) -> object:
    """Return the dtype that a pipeline's arguments say for a component; None: the library's."""
    import torch

    dtype = arguments.get("dtype")
    dtype = arguments.get("torch_dtype") if dtype is None else dtype
    if isinstance(dtype, Mapping):
        return dtype.get(component, dtype.get("default", torch.float32))  # as diffusers does it
    return dtype


# The device: everything to one, or the encoders alone


def part_of(component: str, class_name: str = "") -> Part | None:
    """Return which part a component is, by its name or else by its class; None: no encoder."""
    for patterns, text in ((_PART_NAMES, component), (_PART_CLASSES, class_name)):
        for part, pattern in patterns:
            if pattern.fullmatch(text):
                return part
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where components go."""

    device: torch.device | None = None
    """Where everything goes."""
    encoders: torch.device | None = None
    """Where text encoders, image encoders and VAE go instead."""
    component: str = ""
    """The name of a model that is loaded alone: its subfolder."""

    def device_for(self, component: str, class_name: str = "") -> torch.device | None:
        """Return where a component goes; None: it stays where the library has put it."""
        is_encoder = self.encoders is not None and part_of(component, class_name) is not None
        return self.encoders if is_encoder else self.device

    def apply(self, loaded: object) -> None:
        """Move a model, or a pipeline's components one by one; those already there stay."""
        for name, module in modules_of(loaded, alone=self.component):
            device = self.device_for(name, type(module).__name__)
            if device is not None:
                _move(module, device)

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
    device: Device | None, encoders_device: Device | None, *, component: str = ""
) -> Placement | None:
    """Return where things go; None: nothing is moved.

    "auto" is CUDA, then MPS. For the encoders it counts only while no `device` is given.
    """
    everything = resolve_device(device)
    is_auto = isinstance(encoders_device, str) and encoders_device == "auto"
    encoders = None if is_auto and device is not None else resolve_device(encoders_device)
    if everything is None and encoders is None:
        return None
    return Placement(device=everything, encoders=encoders, component=component)


def resolve_device(device: Device | None) -> torch.device | None:
    """Return a device by its name or number; "auto" without an accelerator is None."""
    import torch

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


def _move(module: torch.nn.Module, device: torch.device) -> None:
    """Move a module to a device; it is back where it was if it does not fit."""
    places = [each.device for each in itertools.chain(module.parameters(), module.buffers())]
    if all(is_on(place, device) for place in places):
        return
    try:
        module.to(device)
    except Exception:
        # Weights move one by one: without this the first half would stay on the device.
        with suppress(RuntimeError):
            module.to(places[0])
        raise


def is_on(place: torch.device, device: torch.device) -> bool:
    """Say whether one device is the other; "cuda" without a number is the current one."""
    import torch

    if place.type != device.type:
        return False
    wanted = cast("int | None", device.index)  # torch says int, and means None too
    if wanted is None and device.type == "cuda":
        wanted = torch.cuda.current_device()
    return wanted is None or place.index in (None, wanted)


def free_cached(device: torch.device) -> None:
    """Give back to the device what torch keeps for reuse."""
    import torch

    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
