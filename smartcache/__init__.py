"""Keep one copy of every model file and every computed tensor, no matter how many programs use it.

The public names are imported on first use: `import smartcache` itself loads nothing but this file.
"""

from importlib import import_module

TYPE_CHECKING = False  # what type checkers take for True; `typing` would take 7 ms
if TYPE_CHECKING:
    from smartcache.artifacts import compute_key as compute_key
    from smartcache.artifacts import register_codec as register_codec
    from smartcache.cache import SmartCache as SmartCache
    from smartcache.config import Settings as Settings
    from smartcache.config import load_settings as load_settings
    from smartcache.errors import *  # noqa: F403 - each is public
    from smartcache.functions import cache_mapping as cache_mapping
    from smartcache.functions import hf_hub_download as hf_hub_download
    from smartcache.functions import plan_download as plan_download
    from smartcache.functions import snapshot_download as snapshot_download
    from smartcache.pretrained import components as components
    from smartcache.pretrained import disable as disable
    from smartcache.pretrained import enable as enable
    from smartcache.pretrained import from_pretrained as from_pretrained
    from smartcache.pretrained import from_single_file as from_single_file
    from smartcache.pretrained import load_encoders as load_encoders
    from smartcache.pretrained import unshare as unshare
    from smartcache.store.store import Store as Store

__version__ = "0.1.0"
_LOADERS = "from_pretrained from_single_file load_encoders components unshare enable disable"
_HOMES = {
    "artifacts": "compute_key register_codec",
    "cache": "SmartCache",
    "config": "Settings load_settings",
    "functions": "cache_mapping hf_hub_download plan_download snapshot_download",
    "pretrained": _LOADERS,
    "store.store": "Store",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

if not TYPE_CHECKING:  # a type checker that saw it would believe in any name
    __all__ = [*_HOME_OF, "__version__"]  # noqa: PLE0604 - these are strings

    def __getattr__(name: str) -> object:
        home = "errors" if name.endswith("Error") else _HOME_OF.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
        return value


def __dir__() -> list[str]:
    errors = (name for name in dir(import_module(f"{__name__}.errors")) if name.endswith("Error"))
    return sorted({*globals(), *_HOME_OF, *errors})
