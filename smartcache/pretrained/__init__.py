"""Models and pipelines out of the store: loaded by their own libraries, equal parts only once.

This is the face: nobody imports anything deeper. `api` is the way in, `call` is one call of a
library, `kinds` says which class loads what, `content` what a model is by its bytes, `alive` what
one in memory is like, `share` gives equal components to several pipelines, `encoders` loads them
alone, `failures` says what is wrong, `flag` brings all this into the libraries' own functions.

No selection rule of the libraries is copied: known blobs are at hand, the library runs and chooses,
and what it fetched is proven and shared afterwards. Nothing is loaded before a name is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smartcache.pretrained.api import from_pretrained as from_pretrained
    from smartcache.pretrained.api import from_single_file as from_single_file
    from smartcache.pretrained.encoders import Encoders as Encoders
    from smartcache.pretrained.encoders import load_encoders as load_encoders
    from smartcache.pretrained.flag import Enabled as Enabled
    from smartcache.pretrained.flag import disable as disable
    from smartcache.pretrained.flag import enable as enable
    from smartcache.pretrained.share import SharedComponent as SharedComponent
    from smartcache.pretrained.share import components as components
    from smartcache.pretrained.share import unshare as unshare

_HOMES = {
    "api": "from_pretrained from_single_file",
    "encoders": "Encoders load_encoders",
    "flag": "Enabled disable enable",
    "share": "SharedComponent components unshare",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
__all__ = sorted(_HOME_OF)  # noqa: PLE0605 - the table above is the list


if not TYPE_CHECKING:  # A type checker that saw it would believe in any name.

    def __getattr__(name: str) -> object:
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
        globals()[name] = found
        return found
