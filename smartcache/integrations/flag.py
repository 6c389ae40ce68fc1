"""A library's `from_pretrained` that knows the flag: what is ours is taken out, the rest handed on.

The library never sees `smart_cache` or `smart_cache_share`. A call without them does what the
library's function does and nothing else. A copy of such a function that outlives `disable` (some
code keeps the function, or copies it to a class of its own) is from then on the library's function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto

FLAG = "smart_cache"
SHARE = "smart_cache_share"
SINGLE_FILE = "from_single_file"
NAMES = ("from_pretrained", SINGLE_FILE)
"""The functions of the libraries that get the flag."""

Shared = bool | tuple[str, ...]


class Reach(Enum):
    """Which calls are answered out of the store."""

    NOWHERE = auto()
    ASKED = auto()
    """Those with the flag."""
    EVERYWHERE = auto()
    """All but those with `smart_cache=False`."""


@dataclass(frozen=True, slots=True)
class _Wish:
    """What a call asks of us."""

    is_wanted: bool
    share: Shared = False
    is_implicit: bool = False
    """Not asked for at this call: it is on everywhere."""


def with_flag(
    name: str, original: classmethod[object, ..., object], reach: Callable[[], Reach]
) -> classmethod[object, ..., object]:
    """Return a class method that knows the flag, with the signature and text of the original."""

    @functools.wraps(original.__func__)
    def flagged(cls: type, /, *args: object, **kwargs: object) -> object:
        bound = original.__get__(None, cls)
        wish = _take(kwargs, reach())
        if not wish.is_wanted:
            return bound(*args, **kwargs)
        return _answer(name, wish, cls, bound, args, kwargs)

    return classmethod(flagged)


def _take(kwargs: dict[str, object], reach: Reach) -> _Wish:
    """Take what is ours out of the arguments."""
    flag = kwargs.pop(FLAG, None)
    share = _names(kwargs.pop(SHARE, None))
    if flag is not None and not isinstance(flag, bool):
        raise TypeError(f"{FLAG} is True or False, not {flag!r}")
    if share and flag is False:
        raise ValueError(f"{SHARE} needs {FLAG}=True: equal components are found by digest")
    is_asked = bool(flag or share)
    if reach is Reach.NOWHERE and is_asked:
        given = FLAG if flag else SHARE
        raise TypeError(f"{given}: smartcache is not enabled; call smartcache.enable()")
    is_implicit = flag is None and not share and reach is Reach.EVERYWHERE
    return _Wish(is_asked or is_implicit, share, is_implicit)


def _names(share: object) -> Shared:
    if share is None or isinstance(share, bool):
        return bool(share)
    names = (share,) if isinstance(share, str) else share
    if isinstance(names, Iterable):
        names = tuple(names)
        if all(isinstance(each, str) for each in names):
            return names
    raise TypeError(f"{SHARE} is True, False or names of components, not {share!r}")


def _answer(
    name: str,
    wish: _Wish,
    cls: type,
    bound: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> object:
    from smartcache.pretrained.arguments import Asked
    from smartcache.pretrained.borrowing import is_inside

    if is_inside():
        return bound(*args, **kwargs)
    asked = Asked(
        cls=cls,
        original=bound,
        args=args,
        kwargs=kwargs,
        share=wish.share,
        is_implicit=wish.is_implicit,
    )
    if wish.share and (name == SINGLE_FILE or not (asked.is_pipeline or asked.is_model)):
        raise TypeError(
            f"{cls.__name__}.{name} has no components to share: {SHARE} is for from_pretrained of"
            " pipelines and models"
        )
    if name == SINGLE_FILE:
        from smartcache.pretrained.singlefile import load_single

        return load_single(asked)
    from smartcache.pretrained.loading import load

    return load(asked)
