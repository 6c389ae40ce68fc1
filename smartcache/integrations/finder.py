"""Hear of every module of the libraries that is loaded from now on, once its code has run.

The libraries load their modules when a name is first used. The finder stands first in
`sys.meta_path`, lets the others find, and leaves nothing of itself in what they found: when the
module's code runs, its spec has the real loader again.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import cast

from smartcache.integrations.wrapping import is_library


class Finder(MetaPathFinder):
    """Calls `loaded` with every module of the libraries, in the thread that imports it."""

    def __init__(self, loaded: Callable[[ModuleType], None]) -> None:
        self._loaded = loaded
        self._searching = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what the other finders find, None for everything that is not of the libraries."""
        # Another finder of this kind asks all the others as well, this one among them.
        if not is_library(fullname) or getattr(self._searching, "name", None) == fullname:
            return None
        before = getattr(self._searching, "name", None)
        self._searching.name = fullname
        try:
            spec = self._find(fullname, path, target)
        finally:
            self._searching.name = before
        loader = None if spec is None else spec.loader
        if spec is not None and loader is not None and hasattr(loader, "exec_module"):
            spec.loader = cast("Loader", _Telling(loader, self._loaded))
        return spec

    def _find(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                return spec
        return None


class _Telling:
    """A loader that tells when a module's code has run; in all else the real one."""

    def __init__(self, real: Loader, loaded: Callable[[ModuleType], None]) -> None:
        self._real = real
        self._loaded = loaded

    def __getattr__(self, name: str) -> object:
        if name == "_real":  # a copy that `copy` is still making
            raise AttributeError(name)
        return getattr(self._real, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return the module as the real loader makes it."""
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code as the real loader does, then tell."""
        module.__loader__ = self._real
        if module.__spec__ is not None:
            module.__spec__.loader = self._real
        self._real.exec_module(module)
        self._loaded(module)
