"""Methods that would move a shared component for all its holders raise instead.

A guard is an attribute of one object, before the method of its class. A copy of the object, by
`copy.deepcopy` or pickle, shares nothing and has the method itself, without this package.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable

from smartcache.errors import SharedComponentError

OF_PIPELINES = (
    "enable_model_cpu_offload",
    "enable_sequential_cpu_offload",
    "enable_group_offload",
)
OF_MODELS = ("enable_group_offload",)


class Guard:
    """Stands before one method of one object. Does not keep the object alive."""

    __slots__ = ("__weakref__", "_is_shared", "_name", "_owner")

    def __init__(self, owner: object, name: str, is_shared: Callable[[object], list[str]]) -> None:
        self._owner = weakref.ref(owner)
        self._name = name
        self._is_shared = is_shared

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Call the method, if nothing of the object is shared any more."""
        owner = self._owner()
        shared = [] if owner is None else self._is_shared(owner)
        if owner is None or shared:
            what = ", ".join(shared) or "a component"
            raise SharedComponentError(
                f"{self._name}() would move {what} for every pipeline that shares it"
            )
        lift(owner)
        return getattr(owner, self._name)(*args, **kwargs)

    def __reduce__(self) -> tuple[object, ...]:
        # While a copy is made its own attributes are not there yet: this is the class's method.
        owner = self._owner()
        if owner is None:
            raise TypeError(f"the object of this guard of {self._name}() is gone")
        return (getattr, (owner, self._name))


def guard(owner: object, names: tuple[str, ...], is_shared: Callable[[object], list[str]]) -> None:
    """Guard those methods that an object has; `is_shared` gives the names of what it shares."""
    for name in names:
        method = getattr(type(owner), name, None)
        if callable(method) and not isinstance(vars(owner).get(name), Guard):
            vars(owner)[name] = Guard(owner, name, is_shared)


def lift(owner: object) -> None:
    """Take the guards of an object away, and what a copy has in their place."""
    for name in {*OF_PIPELINES, *OF_MODELS}:
        found = vars(owner).get(name)
        is_copied = isinstance(found, types.MethodType) and found.__self__ is owner
        if isinstance(found, Guard) or is_copied:
            del vars(owner)[name]
