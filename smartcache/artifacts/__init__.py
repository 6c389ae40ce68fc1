"""Computed tensors, kept once. This is all of it that the rest of smartcache uses.

Names are loaded when they are first used: `import smartcache.artifacts` loads no numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smartcache.artifacts.artifactset import ArtifactSet as ArtifactSet
    from smartcache.artifacts.artifactset import Claim as Claim
    from smartcache.artifacts.artifactset import Computed as Computed
    from smartcache.artifacts.artifactset import Failure as Failure
    from smartcache.artifacts.artifactset import Selection as Selection
    from smartcache.artifacts.artifactset import SetInfo as SetInfo
    from smartcache.artifacts.artifactset import SetStats as SetStats
    from smartcache.artifacts.carry import Carried as Carried
    from smartcache.artifacts.carry import CarryPlan as CarryPlan
    from smartcache.artifacts.carry import plan_export as plan_export
    from smartcache.artifacts.carry import plan_import as plan_import
    from smartcache.artifacts.engine.far import Far as Far
    from smartcache.artifacts.engine.far import Skeleton as Skeleton
    from smartcache.artifacts.engine.recover import Rebuilt as Rebuilt
    from smartcache.artifacts.engine.recover import SetVerifyReport as SetVerifyReport
    from smartcache.artifacts.inspect import ArtifactInfo as ArtifactInfo
    from smartcache.artifacts.inspect import Shown as Shown
    from smartcache.artifacts.keys import Digests as Digests
    from smartcache.artifacts.keys import compute_key as compute_key
    from smartcache.artifacts.keys import register_key_rule as register_key_rule
    from smartcache.artifacts.memoize import Memoized as Memoized
    from smartcache.artifacts.memoize import memoized as memoized
    from smartcache.artifacts.memory import Kept as Kept
    from smartcache.artifacts.memory import Memory as Memory
    from smartcache.artifacts.modules import remember_module as remember_module
    from smartcache.artifacts.sample import Handle as Handle
    from smartcache.artifacts.sample import Sample as Sample
    from smartcache.artifacts.setfolder import Difference as Difference
    from smartcache.artifacts.setfolder import Fingerprint as Fingerprint
    from smartcache.artifacts.setfolder import check_name as check_name
    from smartcache.artifacts.sets import ArtifactSets as ArtifactSets
    from smartcache.artifacts.sets import SetPlan as SetPlan
    from smartcache.artifacts.sets import SetResult as SetResult
    from smartcache.artifacts.sets import SetVictim as SetVictim
    from smartcache.artifacts.values.compression import Rule as Rule
    from smartcache.artifacts.values.encode import register_codec as register_codec
    from smartcache.artifacts.values.refusals import path_text as path_text
    from smartcache.artifacts.values.refusals import shown as shown
    from smartcache.artifacts.values.tensors import TensorSpec as TensorSpec

_HOMES = {
    "artifactset": (
        "ArtifactSet",
        "Claim",
        "Computed",
        "Failure",
        "Selection",
        "SetInfo",
        "SetStats",
    ),
    "carry": ("CarryPlan", "Carried", "plan_export", "plan_import"),
    "engine.far": ("Far", "Skeleton"),
    "engine.recover": ("Rebuilt", "SetVerifyReport"),
    "inspect": ("ArtifactInfo", "Shown"),
    "keys": ("Digests", "compute_key", "register_key_rule"),
    "memoize": ("Memoized", "memoized"),
    "memory": ("Kept", "Memory"),
    "modules": ("remember_module",),
    "sample": ("Handle", "Sample"),
    "setfolder": ("Difference", "Fingerprint", "check_name"),
    "sets": ("ArtifactSets", "SetPlan", "SetResult", "SetVictim"),
    "values.compression": ("Rule",),
    "values.encode": ("register_codec",),
    "values.refusals": ("path_text", "shown"),
    "values.tensors": ("TensorSpec",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME_OF)  # noqa: PLE0605 - the table above is the list


if not TYPE_CHECKING:  # A type checker that saw it would believe in any name.

    def __getattr__(name: str) -> object:
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
        globals()[name] = found
        return found
