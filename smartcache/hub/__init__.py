"""Hugging Face repos on this machine: downloads that fetch nothing the machine already has.

The result of everything here is the standard HF cache, made by huggingface_hub itself; blobs of the
store are linked into it, and what arrives is verified and becomes blobs. This is all of it that the
rest of smartcache uses. The words for help texts stand here; the other names are loaded when they
are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from smartcache.hub.answering import attending as attending
    from smartcache.hub.answering import serving as serving
    from smartcache.hub.api import Call as Call
    from smartcache.hub.api import FileOptions as FileOptions
    from smartcache.hub.api import SnapshotOptions as SnapshotOptions
    from smartcache.hub.bring import near_pool as near_pool
    from smartcache.hub.care.carry import ExportPlan as ExportPlan
    from smartcache.hub.care.carry import ImportPlan as ImportPlan
    from smartcache.hub.care.carry import Wanted as Wanted
    from smartcache.hub.care.carry import plan_export as plan_export
    from smartcache.hub.care.carry import plan_import as plan_import
    from smartcache.hub.care.census import Census as Census
    from smartcache.hub.care.census import Share as Share
    from smartcache.hub.care.census import used as used
    from smartcache.hub.care.mapping import CacheMapping as CacheMapping
    from smartcache.hub.care.remove import Removal as Removal
    from smartcache.hub.care.remove import RemovalPlan as RemovalPlan
    from smartcache.hub.care.remove import RemovalResult as RemovalResult
    from smartcache.hub.care.remove import plan_cache_prune as plan_cache_prune
    from smartcache.hub.care.remove import plan_removal as plan_removal
    from smartcache.hub.care.tiered import REPO_DOCUMENTS as REPO_DOCUMENTS
    from smartcache.hub.care.tiered import TieredRepo as TieredRepo
    from smartcache.hub.care.tiered import merge_pushed as merge_pushed
    from smartcache.hub.care.tiered import only_revisions as only_revisions
    from smartcache.hub.care.tiered import plan_repo_pull as plan_repo_pull
    from smartcache.hub.care.tiered import pull_without_hub as pull_without_hub
    from smartcache.hub.care.tiered import read_pushed as read_pushed
    from smartcache.hub.care.verify import MEANINGS as MEANINGS
    from smartcache.hub.care.verify import Finding as Finding
    from smartcache.hub.care.verify import RepairPlan as RepairPlan
    from smartcache.hub.care.verify import RepairResult as RepairResult
    from smartcache.hub.care.verify import RepoVerifyReport as RepoVerifyReport
    from smartcache.hub.care.verify import plan_repair as plan_repair
    from smartcache.hub.care.verify import verify_repos as verify_repos
    from smartcache.hub.layout import CachedRepo as CachedRepo
    from smartcache.hub.layout import Key as Key
    from smartcache.hub.layout import Revision as Revision
    from smartcache.hub.layout import default_cache_dir as default_cache_dir
    from smartcache.hub.layout import find_repo as find_repo
    from smartcache.hub.layout import is_commit as is_commit
    from smartcache.hub.layout import repos_in as repos_in
    from smartcache.hub.layout import safe_parts as safe_parts
    from smartcache.hub.layout import scan_caches as scan_caches
    from smartcache.hub.outcome import DownloadResult as DownloadResult
    from smartcache.hub.outcome import FileChanges as FileChanges
    from smartcache.hub.patches import pausing as pausing
    from smartcache.hub.patches import uninstall as uninstall
    from smartcache.hub.places import CachePlace as CachePlace
    from smartcache.hub.places import LocalPlace as LocalPlace
    from smartcache.hub.plan import DownloadPlan as DownloadPlan
    from smartcache.hub.plan import Request as Request
    from smartcache.hub.plan import has_snapshot as has_snapshot
    from smartcache.hub.plan import known_caches as known_caches
    from smartcache.hub.plan import plan_download as plan_download
    from smartcache.hub.plan import with_folders as with_folders
    from smartcache.hub.records import PlannedFile as PlannedFile
    from smartcache.hub.records import Repo as Repo
    from smartcache.hub.records import Source as Source

RepoType = Literal["model", "dataset", "space", "kernel"]
REPO_TYPES: tuple[RepoType, ...] = ("model", "dataset", "space", "kernel")
_HOMES = {
    "answering": "attending serving",
    "api": "Call FileOptions SnapshotOptions",
    "bring": "near_pool",
    "care.carry": "ExportPlan ImportPlan Wanted plan_export plan_import",
    "care.census": "Census Share used",
    "care.mapping": "CacheMapping",
    "care.remove": "Removal RemovalPlan RemovalResult plan_cache_prune plan_removal",
    "care.tiered": (
        "REPO_DOCUMENTS TieredRepo merge_pushed only_revisions plan_repo_pull pull_without_hub "
        "read_pushed"
    ),
    "care.verify": (
        "Finding MEANINGS RepairPlan RepairResult RepoVerifyReport plan_repair verify_repos"
    ),
    "layout": (
        "CachedRepo Key Revision default_cache_dir find_repo is_commit repos_in safe_parts"
        " scan_caches"
    ),
    "outcome": "DownloadResult FileChanges",
    "patches": "pausing uninstall",
    "places": "CachePlace LocalPlace",
    "plan": "DownloadPlan Request has_snapshot known_caches plan_download with_folders",
    "records": "PlannedFile Repo Source",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
__all__ = sorted([*_HOME_OF, "REPO_TYPES", "RepoType"])  # noqa: PLE0605 - as the table


if not TYPE_CHECKING:  # A type checker that saw it would believe in any name.

    def __getattr__(name: str) -> object:
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
        globals()[name] = found
        return found
