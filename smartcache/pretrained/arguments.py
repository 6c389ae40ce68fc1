"""One call of a library's `from_pretrained`, as smartcache sees it.

Only what says where the files come from is looked at. Every other argument belongs to the library
and is handed on as it is.
"""

from __future__ import annotations

import json
import os
import posixpath
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smartcache.hub.dropin import Call

if TYPE_CHECKING:
    from smartcache.pretrained.devices import Placement

LIBRARIES = ("diffusers", "transformers")
SOURCE_NAMES = (
    "pretrained_model_name_or_path",
    "pretrained_model_or_path",
    "pretrained_model_name",
    "pretrained_model_path",
    "pretrained_model_link_or_path",
    "pretrained_model_link_or_path_or_dict",
    "pretrained_processor_name_or_path",
    "retriever_name_or_path",
)
"""What the libraries call their first argument."""
HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "revision", "token")
_NOT_ABOUT_FILES = (
    "attn_implementation",
    "device_map",
    "disable_mmap",
    "dtype",
    "low_cpu_mem_usage",
    "max_memory",
    "offload_folder",
    "offload_state_dict",
    "quantization_config",
    "torch_dtype",
)
"""Arguments that change how weights are loaded, not which."""
_SMALL = frozenset(
    ("SchedulerMixin", "PreTrainedConfig", "PretrainedConfig", "GenerationConfig", "AutoConfig")
)
_MODELS = frozenset(
    ("ModelMixin", "PreTrainedModel", "_BaseAutoModelClass", "_BaseAutoBackboneClass")
)


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
    def is_pipeline(self) -> bool:
        """Whether a whole pipeline of diffusers is loaded."""
        return "DiffusionPipeline" in self._bases or self.cls.__name__.startswith("AutoPipelineFor")

    @property
    def is_model(self) -> bool:
        """Whether one model with weights is loaded."""
        is_auto = self.cls.__name__ == "AutoModel"
        return not self.is_pipeline and (is_auto or bool(self._bases & _MODELS))

    @property
    def has_weights(self) -> bool:
        """Whether large files can be among what is loaded: not for configs and schedulers."""
        return not self._bases & _SMALL

    @property
    def subfolder(self) -> str:
        """The folder of the repo that is loaded; "" for all of it."""
        value = self.kwargs.get("subfolder")
        if not isinstance(value, str) or not value.strip("/"):
            return ""
        path = posixpath.normpath(value.strip("/"))
        return "" if path.startswith(".") else path

    @property
    def purpose(self) -> str:
        """What decides which files the library takes: equal texts, equal choice."""
        words = {name: _word(value) for name, value in sorted(self.kwargs.items())}
        for name in (*HUB_ARGUMENTS, *_NOT_ABOUT_FILES):
            words.pop(name, None)
        versions = [getattr(sys.modules.get(name), "__version__", "") for name in LIBRARIES]
        name = f"{self.cls.__module__}.{self.cls.__qualname__}"
        return json.dumps([name, words, versions], separators=(",", ":"))

    def call(self) -> Call:
        """Return the same question to huggingface_hub."""
        known = {name: self.kwargs[name] for name in HUB_ARGUMENTS if name in self.kwargs}
        return Call(repo_id=self.source, arguments=known)

    def run(self, **more: object) -> object:
        """Ask the library, with its arguments and `more`."""
        return self.original(*self.args, **{**self.kwargs, **more})

    @property
    def _bases(self) -> set[str]:
        of_libraries = (each for each in self.cls.__mro__ if _library(each) in LIBRARIES)
        return {each.__name__ for each in of_libraries}


def _library(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def _word(value: object) -> str:
    """Return a value that decides about files in words; of an object only what it is."""
    is_plain = value is None or isinstance(value, str | int | float | os.PathLike)
    return repr(value) if is_plain else type(value).__name__
