"""The classes of the libraries that load something: found, given the flag, and given back.

A class gets the flag if it has such a function of its own. The bases of transformers' automatic
classes (`_BaseAutoModelClass`) are left alone, because their functions are copied to other classes,
where nothing could take the flag back; those that only inherit from them get it instead.
Nothing is imported: a module that is not loaded yet is looked at when it is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

from smartcache.integrations.flag import NAMES, Reach, with_flag

LIBRARIES = ("diffusers", "transformers")
_COPIED = "_Base"
_DUMMY = "DummyObject"
"""The metaclass of what stands in for a class that lacks its backend: it says so by itself."""


@dataclass(frozen=True, slots=True)
class _Change:
    cls: type
    name: str
    before: object
    """What the class had; None if it only inherited."""
    after: object


class Wrapping:
    """What has the flag now. The caller's lock keeps threads apart."""

    def __init__(self, reach: Callable[[], Reach]) -> None:
        self._reach = reach
        self._changes: dict[tuple[int, str], _Change] = {}

    def wrap(self, module: ModuleType) -> None:
        """Give the flag to all classes of libraries that a loaded module names."""
        for cls in _classes(module):
            for name in NAMES:
                self._wrap(cls, name)

    def _wrap(self, cls: type, name: str) -> None:
        before = vars(cls).get(name)
        original = before or _copied_from(cls, name)
        if (id(cls), name) in self._changes or not isinstance(original, classmethod):
            return
        after = with_flag(name, original, self._reach)
        setattr(cls, name, after)
        self._changes[id(cls), name] = _Change(cls, name, before, after)

    def restore(self) -> None:
        """Put back what every class had, the very objects; what others put over ours stays."""
        while self._changes:
            _, change = self._changes.popitem()
            if vars(change.cls).get(change.name) is not change.after:
                continue
            if change.before is None:
                delattr(change.cls, change.name)
            else:
                setattr(change.cls, change.name, change.before)


def is_library(module_name: str) -> bool:
    """Say whether a module belongs to one of the libraries."""
    return module_name.partition(".")[0] in LIBRARIES


def loaded_modules() -> Iterator[tuple[str, ModuleType]]:
    """Return the libraries' modules that are loaded, or being loaded."""
    for name, module in list(sys.modules.items()):
        if is_library(name) and isinstance(module, ModuleType):
            yield name, module


def _classes(module: ModuleType) -> Iterator[type]:
    # A copy: other threads may be importing.
    for value in list(vars(module).values()):
        kind = type(value)
        # Not isinstance at once: what pretends to be a class may load its module to do so.
        if not issubclass(kind, type) or kind.__name__ == _DUMMY or not isinstance(value, type):
            continue
        if is_library(str(value.__module__)) and not value.__name__.startswith(_COPIED):
            yield value


def _copied_from(cls: type, name: str) -> object:
    """Return the function of a base whose functions are copied, if that is what a class has."""
    owner = next((each for each in cls.__mro__ if name in vars(each)), None)
    if owner is None or not owner.__name__.startswith(_COPIED):
        return None
    return vars(owner)[name]
