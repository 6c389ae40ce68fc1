"""Errors of the libraries in words that name the repo, the component and the cure.

What is wrong is looked up in the files there are, never read out of the library's message. Only
what is known better is said differently: every other error passes as it is.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from smartcache.errors import (
    MissingWeightsError,
    PretrainedError,
    SmartcacheError,
    UnknownClassError,
    WrongVariantError,
)
from smartcache.pretrained.arguments import LIBRARIES, Asked
from smartcache.pretrained.devices import free_bytes, is_memory_error, resolve_device, too_large
from smartcache.pretrained.kinds import Folder, library_class
from smartcache.pretrained.weights import (
    is_weights,
    listed,
    loaded_bytes,
    missing_shards,
    variant_of,
)

_log = logging.getLogger(__name__)
_WITHOUT_WEIGHTS = (
    "Extractor", "Guidance", "Processor", "Scheduler", "Tokenizer", "TokenizerFast",
)  # fmt: skip
"""How the classes of components end that have no weights."""


@contextmanager
def explained(asked: Asked) -> Iterator[None]:
    """Raise errors of the library in this block as ours where we know better what is wrong."""
    try:
        yield
    except SmartcacheError:
        raise
    except Exception as error:
        better = _diagnosed(asked, error)
        if better is None:
            raise
        raise better from error


def _diagnosed(asked: Asked, error: Exception) -> PretrainedError | None:
    try:
        if is_memory_error(error):
            return _memory(asked)
        if not asked.source or not isinstance(error, OSError | ValueError | AttributeError):
            return None
        case = _Case.of(asked)
        if case is None:
            return None
        if isinstance(error, AttributeError | ValueError):
            unknown = case.unknown_class()
            if unknown is not None:
                return unknown
        return None if isinstance(error, AttributeError) else case.missing()
    except (OSError, TypeError, ValueError) as failure:
        _log.debug("%s: it cannot be said what is wrong: %s", asked.source, failure)
        return None


def _memory(asked: Asked) -> PretrainedError | None:
    """Return how much the library's own loading onto a device would have needed."""
    device = asked.placement.device if asked.placement is not None else None
    mapped = asked.kwargs.get("device_map")
    if isinstance(mapped, Mapping):
        mapped = next(iter(mapped.values()), None)
    if device is None and isinstance(mapped, str | int):
        device = resolve_device("auto" if mapped in _STRATEGIES else mapped)
    if device is None:
        return None
    needed = loaded_bytes(asked)
    name = asked.subfolder
    return too_large(device, needed=needed, free=free_bytes(device), name=name, source=asked.source)


_STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")


class _Case:
    """A call that failed, and the files that are there for it."""

    def __init__(self, asked: Asked, files: frozenset[str]) -> None:
        self.asked = asked
        self.files = files

    @classmethod
    def of(cls, asked: Asked) -> _Case | None:
        """Look at the files; None if they cannot be listed now, or are one file."""
        if os.path.isfile(asked.source):
            return None
        files = listed(asked)
        return None if files is None else cls(asked, files)

    def unknown_class(self) -> UnknownClassError | None:
        """Return what a class is called that neither library has, and whose it is."""
        for name, (library, class_name) in self._components().items():
            is_known = library not in LIBRARIES or library_class(library, class_name) is not None
            if not is_known and name not in self.asked.kwargs:
                return UnknownClassError(
                    f"{name} of {self.asked.source} is of the class {class_name!r}, which "
                    f"{library} does not have",
                    hint=f"Update {library}, or load {name} yourself and pass it as {name}=...",
                    component=name,
                    source=self.asked.source,
                )
        return None

    def missing(self) -> PretrainedError | None:
        """Return which weights are not there: of which folder, variant, component or shard."""
        asked = self.asked
        if asked.subfolder and not any(self._inside(asked.subfolder)):
            return self._no_folder(asked.subfolder)
        if not (asked.is_pipeline or asked.is_model):
            return None
        names = self._with_weights() if asked.is_pipeline else [asked.subfolder]
        found = {name: [each for each in self._inside(name) if is_weights(each)] for name in names}
        return self._wrong_variant(found) or self._no_weights(found) or self._no_shards(names)

    def _no_folder(self, folder: str) -> MissingWeightsError:
        there = sorted({name.partition("/")[0] for name in self.files if "/" in name})
        return MissingWeightsError(
            f"{self.asked.source} has no folder {folder}"
            + (f"; it has {', '.join(there)}" if there else ""),
            hint="Check the subfolder and the revision.",
            component=folder,
            source=self.asked.source,
        )

    def _wrong_variant(self, found: Mapping[str, list[str]]) -> WrongVariantError | None:
        variant = self.asked.kwargs.get("variant")
        files = [name for names in found.values() for name in names]
        there = sorted({variant_of(name) for name in files}.difference({""}))
        if not isinstance(variant, str) or not files or variant in there:
            return None
        known = f"the variants {', '.join(there)}" if there else "only weights without a variant"
        what = self._named(self.asked.subfolder)
        return WrongVariantError(
            f"{what} has no weights of the variant {variant!r}; it has {known}",
            variant=variant,
            variants=there,
            source=self.asked.source,
        )

    def _no_weights(self, found: Mapping[str, list[str]]) -> MissingWeightsError | None:
        safe = self.asked.kwargs.get("use_safetensors")
        for name, files in found.items():
            if not files:
                return self._lacking(name, "has no weights", hint=None)
            is_safe = any(
                each.endswith((".safetensors", ".safetensors.index.json")) for each in files
            )
            if safe is True and not is_safe:
                hint = "Leave out use_safetensors: its weights are pickles, which can run code."
                return self._lacking(name, "has no weights in safetensors", hint=hint)
        return None

    def _no_shards(self, names: list[str]) -> MissingWeightsError | None:
        for name in names:
            folder = os.path.join(self.asked.source, name)
            gone = missing_shards(folder) if os.path.isdir(folder) else []
            if gone:
                return self._lacking(name, f"lacks {', '.join(gone)}", hint="Download it again.")
        return None

    def _lacking(self, name: str, what: str, *, hint: str | None) -> MissingWeightsError:
        return MissingWeightsError(
            f"{self._named(name)} {what}", hint=hint, component=name, source=self.asked.source
        )

    def _named(self, component: str) -> str:
        return f"{component} of {self.asked.source}" if component else self.asked.source

    def _with_weights(self) -> list[str]:
        """Return the components of a pipeline that have weights and were not passed in."""
        return [
            name
            for name, (_, class_name) in self._components().items()
            if name not in self.asked.kwargs and not class_name.endswith(_WITHOUT_WEIGHTS)
        ]

    def _components(self) -> dict[str, tuple[str, str]]:
        if not self.asked.is_pipeline:
            return {}
        config = Folder(self.asked.source, "", self.asked.kwargs).read("model_index.json") or {}
        return {
            name: (value[0], value[1])
            for name, value in config.items()
            if isinstance(value, list) and [type(each) for each in value] == [str, str]
        }

    def _inside(self, folder: str) -> Iterator[str]:
        """Yield the names of the files right in a folder."""
        start = f"{folder}/" if folder else ""
        for name in self.files:
            if name.startswith(start) and "/" not in name[len(start) :]:
                yield name[len(start) :]
