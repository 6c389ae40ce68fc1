"""Answer a call of a library's `from_pretrained` with the flag: the one way in for everybody."""

from __future__ import annotations

from contextlib import nullcontext

from smartcache.pretrained.arguments import Asked
from smartcache.pretrained.borrowing import borrowed, is_inside, pinned
from smartcache.pretrained.failures import explained
from smartcache.pretrained.gate import one_at_a_time
from smartcache.pretrained.sharing import load_model, load_pipeline


def load(asked: Asked) -> object:
    """Load what is asked for, its files out of the store; what the library returns is returned.

    With `share` equal components that are in memory already are taken. A call that a library makes
    itself, in the middle of another, is left to it.
    """
    if is_inside():
        return asked.run()
    asked = pinned(asked)
    with explained(asked):
        if asked.share:
            return _load_shared(asked)
        more = {} if asked.placement is None else asked.placement.library_arguments(asked)
        # Threads that a library starts itself come by here with no flag of their own: they must
        # not wait for the call that waits for them.
        gate = nullcontext() if asked.is_implicit else one_at_a_time()
        with borrowed(asked), gate:
            loaded = asked.run(**more)
        if asked.placement is not None:
            asked.placement.apply(loaded)
        return loaded


def _load_shared(asked: Asked) -> object:
    if asked.is_pipeline:
        return load_pipeline(asked)
    if asked.is_model:
        return load_model(asked)
    raise TypeError(f"{asked.cls.__name__} has no weights that could be shared")
