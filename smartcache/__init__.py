"""Keep one copy of every model file and every computed tensor, no matter how many programs use it.

The public names are imported on first use: `import smartcache` itself loads nothing but this file.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smartcache.artifacts import compute_key, register_codec
    from smartcache.cache import SmartCache
    from smartcache.config import Settings, load_settings
    from smartcache.errors import (
        ArtifactError,
        ArtifactNotFoundError,
        BlobNotFoundError,
        ConfigError,
        DamagedArtifactError,
        DamagedBlobError,
        DigestMismatchError,
        FileSkippedError,
        HubError,
        LockTimeoutError,
        MissingWeightsError,
        NoSpaceError,
        PretrainedError,
        SharedComponentError,
        SmartcacheError,
        StoreError,
        UnknownClassError,
        UnreadableConfigError,
        UnsupportedValueError,
        WrongVariantError,
    )
    from smartcache.functions import (
        cache_mapping,
        hf_hub_download,
        plan_download,
        snapshot_download,
    )
    from smartcache.pretrained import (
        components,
        disable,
        enable,
        from_pretrained,
        from_single_file,
        load_encoders,
        unshare,
    )
    from smartcache.store.store import Store

__version__ = "0.1.0"

__all__ = [
    "ArtifactError",
    "ArtifactNotFoundError",
    "BlobNotFoundError",
    "ConfigError",
    "DamagedArtifactError",
    "DamagedBlobError",
    "DigestMismatchError",
    "FileSkippedError",
    "HubError",
    "LockTimeoutError",
    "MissingWeightsError",
    "NoSpaceError",
    "PretrainedError",
    "Settings",
    "SharedComponentError",
    "SmartCache",
    "SmartcacheError",
    "Store",
    "StoreError",
    "UnknownClassError",
    "UnreadableConfigError",
    "UnsupportedValueError",
    "WrongVariantError",
    "__version__",
    "cache_mapping",
    "components",
    "compute_key",
    "disable",
    "enable",
    "from_pretrained",
    "from_single_file",
    "hf_hub_download",
    "load_encoders",
    "load_settings",
    "plan_download",
    "register_codec",
    "snapshot_download",
    "unshare",
]

_HOMES = {
    "Settings": "config",
    "SmartCache": "cache",
    "Store": "store.store",
    "cache_mapping": "functions",
    "components": "pretrained",
    "compute_key": "artifacts",
    "disable": "pretrained",
    "enable": "pretrained",
    "from_pretrained": "pretrained",
    "from_single_file": "pretrained",
    "hf_hub_download": "functions",
    "load_encoders": "pretrained",
    "load_settings": "config",
    "plan_download": "functions",
    "register_codec": "artifacts",
    "snapshot_download": "functions",
    "unshare": "pretrained",
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
