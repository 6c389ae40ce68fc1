"""Answer a call of a library's `from_pretrained` with the flag: the one way in for everybody."""

from __future__ import annotations

from smartcache.pretrained.arguments import Asked
from smartcache.pretrained.borrowing import is_inside, pinned
from smartcache.pretrained.failures import explained
from smartcache.pretrained.sharing import load_model, load_pipeline, load_unshared


def load(asked: Asked) -> object:
    """Load what is asked for, its files out of the store; what the library returns is returned.

    With `share` equal components that are in memory already are taken. A call that a library makes
    itself, in the middle of another, is left to it.
    """
    if is_inside():
        return asked.run()
    asked = pinned(asked)
    with explained(asked):
        if not asked.share:
            return load_unshared(asked)
        if asked.is_pipeline:
            return load_pipeline(asked)
        if asked.is_model:
            return load_model(asked)
        raise TypeError(f"{asked.cls.__name__} has no weights that could be shared")
