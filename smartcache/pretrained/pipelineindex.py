"""A pipeline as its model_index.json describes it, before anything of it is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from smartcache.errors import MissingWeightsError, UnknownClassError
from smartcache.pretrained.kinds import Folder, pipeline_class, refuse_what_is_no_folder
from smartcache.pretrained.parts import part_of

INDEX_FILE = "model_index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineIndex:
    """A pipeline as its model_index.json describes it."""

    source: str
    cls: type
    folder: Path
    """Where the file is, and below it the components."""
    components: Mapping[str, tuple[str, str]]
    """The library and the class of each."""
    settings: frozenset[str]
    """The names of everything else that it says."""

    @classmethod
    def of(cls, source: str, arguments: Mapping[str, object]) -> Self:
        """Read it, here or from the Hub."""
        refuse_what_is_no_folder(source)
        found = Folder(source, "", arguments)
        config, path = found.read(INDEX_FILE), found.find(INDEX_FILE)
        if config is None or path is None:
            raise found.absence or UnknownClassError(
                f"{source} is not a diffusers pipeline: it has no {INDEX_FILE}",
                hint="Load a single model with smartcache.from_pretrained.",
            )
        components = {
            name: (str(value[0]), str(value[1]))
            for name, value in config.items()
            if not name.startswith("_") and isinstance(value, list) and _is_component(value)
        }
        return cls(
            source=source,
            cls=pipeline_class(config, found),
            folder=path.parent,
            components=components,
            settings=frozenset(config).difference(components),
        )

    @property
    def pinned(self) -> dict[str, object]:
        """The revision that was read, so that all that follows is of the same commit."""
        is_snapshot = self.folder.parent.name == "snapshots" and not os.path.isdir(self.source)
        return {"revision": self.folder.name} if is_snapshot else {}

    def chosen(self, parts: set[str]) -> list[str]:
        """Return the names of the components that are such parts; an error if there are none."""
        names = [
            name for name, (_, each) in self.components.items() if part_of(name, each) in parts
        ]
        if not names:
            raise MissingWeightsError(
                f"{self.source} has none of the parts {', '.join(sorted(parts))}: "
                f"its components are {', '.join(self.components)}",
                hint="Choose other parts.",
            )
        return names

    def left_out(self, chosen: Iterable[str]) -> dict[str, object]:
        """Return the arguments that keep all other components away but the schedulers."""
        names = set(self.components).difference(chosen)
        left: dict[str, object] = {
            name: None for name in names if not self.components[name][1].endswith("Scheduler")
        }
        if "requires_safety_checker" in self.settings:
            left["requires_safety_checker"] = False
        return left


def _is_component(value: list[object]) -> bool:
    return len(value) == 2 and all(isinstance(each, str) for each in value)  # noqa: PLR2004 - a pair
