"""Beyond this machine: a tier behind the store, and datasets encoded by many machines.

Names are loaded when they are first used: `import smartcache.remote` loads no obstore and no Ray.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smartcache.remote.ray import RayEngine as RayEngine
    from smartcache.remote.remotes import Remote as Remote
    from smartcache.remote.remotes import Remotes as Remotes
    from smartcache.remote.sets import Delivery as Delivery
    from smartcache.remote.sets import attach_outputs as attach_outputs
    from smartcache.remote.sets import attach_set as attach_set
    from smartcache.remote.sets import attached_dataset as attached_dataset
    from smartcache.remote.sets import pull_dataset as pull_dataset
    from smartcache.remote.sets import pull_set as pull_set
    from smartcache.remote.sets import push_dataset as push_dataset
    from smartcache.remote.sets import push_set as push_set
    from smartcache.remote.tier import Abilities as Abilities
    from smartcache.remote.tier import Sent as Sent
    from smartcache.remote.tier import Tier as Tier
    from smartcache.remote.tier import check_options as check_options
    from smartcache.remote.tier import check_url as check_url
    from smartcache.remote.tier import connected as connected
    from smartcache.remote.tier import in_parallel as in_parallel
    from smartcache.remote.transfer import Step as Step
    from smartcache.remote.transfer import plan_pull as plan_pull
    from smartcache.remote.transfer import plan_push as plan_push
    from smartcache.remote.transfer import pull as pull
    from smartcache.remote.transfer import pullable as pullable
    from smartcache.remote.transfer import push as push
    from smartcache.remote.transfer import pushable as pushable
    from smartcache.remote.upkeep import GcPlan as GcPlan
    from smartcache.remote.upkeep import GcResult as GcResult
    from smartcache.remote.upkeep import TierReport as TierReport
    from smartcache.remote.upkeep import plan_gc as plan_gc
    from smartcache.remote.upkeep import remove_damaged as remove_damaged
    from smartcache.remote.upkeep import verify_tier as verify_tier
    from smartcache.store.sources import Found as Found

_HOMES = {
    "ray": ("RayEngine",),
    "remotes": ("Remote", "Remotes"),
    "sets": (
        "Delivery",
        "attach_outputs",
        "attach_set",
        "attached_dataset",
        "pull_dataset",
        "pull_set",
        "push_dataset",
        "push_set",
    ),
    "tier": (
        "Abilities",
        "Found",
        "Sent",
        "Tier",
        "check_options",
        "check_url",
        "connected",
        "in_parallel",
    ),
    "transfer": ("Step", "plan_pull", "plan_push", "pull", "pullable", "push", "pushable"),
    "upkeep": ("GcPlan", "GcResult", "TierReport", "plan_gc", "remove_damaged", "verify_tier"),
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
