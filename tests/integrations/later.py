"""Modules that are imported when a test uses them: collecting the tests must load no torch."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Later:
    """Stands for a module until one of its names is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the module has
        if name.startswith(("_", "pytest")):  # pytest looks at whatever is in a module
            raise AttributeError(name)
        return getattr(import_module(self._name), name)
