"""One copy of every model file and every computed tensor on this machine, whoever asks for it.

The public names are imported on first use: `import smartcache` itself loads nothing but this file.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smartcache.cache import SmartCache
    from smartcache.config import Settings, load_settings
    from smartcache.errors import (
        BlobNotFoundError,
        ConfigError,
        DamagedBlobError,
        DigestMismatchError,
        FileSkippedError,
        HubError,
        LeaseTimeoutError,
        NoSpaceError,
        SmartcacheError,
        StoreError,
    )
    from smartcache.functions import (
        cache_mapping,
        hf_hub_download,
        plan_download,
        snapshot_download,
    )
    from smartcache.store.store import Store

__version__ = "0.1.0"

__all__ = [
    "BlobNotFoundError",
    "ConfigError",
    "DamagedBlobError",
    "DigestMismatchError",
    "FileSkippedError",
    "HubError",
    "LeaseTimeoutError",
    "NoSpaceError",
    "Settings",
    "SmartCache",
    "SmartcacheError",
    "Store",
    "StoreError",
    "__version__",
    "cache_mapping",
    "hf_hub_download",
    "load_settings",
    "plan_download",
    "snapshot_download",
]

_HOMES = {
    "Settings": "config",
    "SmartCache": "cache",
    "Store": "store.store",
    "cache_mapping": "functions",
    "hf_hub_download": "functions",
    "load_settings": "config",
    "plan_download": "functions",
    "snapshot_download": "functions",
}
"""The module of each public name that is not an error."""


if not TYPE_CHECKING:  # A type checker that saw it would believe in any name.

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
