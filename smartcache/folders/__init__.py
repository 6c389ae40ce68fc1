"""Model folders on this machine: found, walked, compared, and their duplicates replaced by links.

This is the face: `cache`, `report` and `cli` import nothing deeper. `programs` is what is known of
programs, `discover` finds their folders, `walk` sees the files, `scan` compares them, `groups` and
`checks` say which are equal and what may be done with each, `dedup` does it. Nothing is loaded
before a name is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smartcache.folders.checks import Allow as Allow
    from smartcache.folders.checks import Copy as Copy
    from smartcache.folders.checks import Option as Option
    from smartcache.folders.checks import Skip as Skip
    from smartcache.folders.dedup import OTHER_BYTES as OTHER_BYTES
    from smartcache.folders.dedup import DedupPlan as DedupPlan
    from smartcache.folders.dedup import DedupResult as DedupResult
    from smartcache.folders.dedup import GroupPlan as GroupPlan
    from smartcache.folders.dedup import plan_dedup as plan_dedup
    from smartcache.folders.discover import discover_folders as discover_folders
    from smartcache.folders.discover import open_regular as open_regular
    from smartcache.folders.discover import places as places
    from smartcache.folders.discover import read_small as read_small
    from smartcache.folders.discover import read_up_to as read_up_to
    from smartcache.folders.groups import Group as Group
    from smartcache.folders.groups import Left as Left
    from smartcache.folders.programs import PROGRAMS as PROGRAMS
    from smartcache.folders.programs import Ignored as Ignored
    from smartcache.folders.programs import ModelFolder as ModelFolder
    from smartcache.folders.programs import identify as identify
    from smartcache.folders.programs import ignore as ignore
    from smartcache.folders.programs import ignored as ignored
    from smartcache.folders.scan import MIN_SIZE as MIN_SIZE
    from smartcache.folders.scan import Figures as Figures
    from smartcache.folders.scan import Scan as Scan
    from smartcache.folders.scan import downloads_folder as downloads_folder
    from smartcache.folders.scan import folders_to_scan as folders_to_scan
    from smartcache.folders.scan import known_folders as known_folders
    from smartcache.folders.scan import look as look
    from smartcache.folders.scan import scan_folders as scan_folders
    from smartcache.folders.scan import survey as survey
    from smartcache.folders.walk import Problem as Problem

_HOMES = {
    "checks": "Allow Copy Option Skip",
    "dedup": "OTHER_BYTES DedupPlan DedupResult GroupPlan plan_dedup",
    "discover": "discover_folders open_regular places read_small read_up_to",
    "groups": "Group Left",
    "programs": "PROGRAMS Ignored ModelFolder identify ignore ignored",
    "scan": (
        "MIN_SIZE Figures Scan downloads_folder folders_to_scan known_folders look scan_folders"
        " survey"
    ),
    "walk": "Problem",
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
