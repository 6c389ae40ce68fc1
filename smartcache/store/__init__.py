"""Bytes on this disk: a content-addressed store of read-only, hard-linked blobs.

This is all of it that the rest of smartcache uses. The words for help texts stand here; the other
names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from smartcache.store.blobs import CHUNK as CHUNK
    from smartcache.store.blobs import check_expected as check_expected
    from smartcache.store.blobs import checked as checked
    from smartcache.store.blobs import copy_hashed as copy_hashed
    from smartcache.store.blobs import explained as explained
    from smartcache.store.blobs import prove as prove
    from smartcache.store.catalog import By as By
    from smartcache.store.catalog import Candidate as Candidate
    from smartcache.store.catalog import FolderSums as FolderSums
    from smartcache.store.catalog import Member as Member
    from smartcache.store.catalog import MemberRow as MemberRow
    from smartcache.store.catalog import MemoRow as MemoRow
    from smartcache.store.catalog import Scope as Scope
    from smartcache.store.catalog import SeenRow as SeenRow
    from smartcache.store.changes.journal import Batch as Batch
    from smartcache.store.changes.journal import BatchSummary as BatchSummary
    from smartcache.store.changes.journal import Change as Change
    from smartcache.store.changes.journal import Journal as Journal
    from smartcache.store.changes.replace import Replacement as Replacement
    from smartcache.store.changes.separate import Separated as Separated
    from smartcache.store.changes.separate import SeparatePlan as SeparatePlan
    from smartcache.store.changes.separate import plan_separate as plan_separate
    from smartcache.store.changes.spot import beside as beside
    from smartcache.store.changes.spot import read_attributes as read_attributes
    from smartcache.store.changes.undo import Undone as Undone
    from smartcache.store.changes.undo import UndoPlan as UndoPlan
    from smartcache.store.changes.userfile import OPEN_FLAGS as OPEN_FLAGS
    from smartcache.store.changes.userfile import Allowance as Allowance
    from smartcache.store.changes.userfile import is_incomplete as is_incomplete
    from smartcache.store.changes.userfile import refuse_unshareable as refuse_unshareable
    from smartcache.store.changes.userfile import refuse_unsuitable as refuse_unsuitable
    from smartcache.store.changes.userfile import refuse_visible_change as refuse_visible_change
    from smartcache.store.hashes import Learned as Learned
    from smartcache.store.hashes import Read as Read
    from smartcache.store.hashes import hash_all as hash_all
    from smartcache.store.hashes import hashes_of as hashes_of
    from smartcache.store.hashes import learn as learn
    from smartcache.store.owners import link_liveness as link_liveness
    from smartcache.store.owners import liveness as liveness
    from smartcache.store.records import LINKED_SUFFIXES as LINKED_SUFFIXES
    from smartcache.store.records import Blob as Blob
    from smartcache.store.records import KnownFolder as KnownFolder
    from smartcache.store.records import Link as Link
    from smartcache.store.records import Owner as Owner
    from smartcache.store.records import RememberedFile as RememberedFile
    from smartcache.store.records import Seen as Seen
    from smartcache.store.records import Sighting as Sighting
    from smartcache.store.records import Trust as Trust
    from smartcache.store.records import sighting_of as sighting_of
    from smartcache.store.store import Store as Store
    from smartcache.store.tiers import BlobSource as BlobSource
    from smartcache.store.tiers import Document as Document
    from smartcache.store.tiers import Found as Found
    from smartcache.store.tiers import Offer as Offer
    from smartcache.store.tiers import Wanted as Wanted
    from smartcache.store.upkeep.eject import EjectPlan as EjectPlan
    from smartcache.store.upkeep.eject import clear_leftovers as clear_leftovers
    from smartcache.store.upkeep.prune import PrunePlan as PrunePlan
    from smartcache.store.upkeep.prune import PruneResult as PruneResult
    from smartcache.store.upkeep.prune import Victim as Victim
    from smartcache.store.upkeep.usage import StoreUsage as StoreUsage
    from smartcache.store.upkeep.verify import VerifyReport as VerifyReport
    from smartcache.store.upkeep.verify import rebuild as rebuild
    from smartcache.store.upkeep.verify import replace_damaged_index as replace_damaged_index
    from smartcache.store.volume import DATASET as DATASET
    from smartcache.store.volume import Layout as Layout
    from smartcache.store.volume import volume_root as volume_root

Kind = Literal["auto", "hardlink", "reflink", "copy"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""How a blob can be put at a path."""
DEFAULT_PIN = "kept"

_HOMES = {
    "blobs": "CHUNK check_expected checked copy_hashed explained prove",
    "catalog": "By Candidate FolderSums Member MemberRow MemoRow Scope SeenRow",
    "changes.journal": "Batch BatchSummary Change Journal",
    "changes.replace": "Replacement",
    "changes.separate": "SeparatePlan Separated plan_separate",
    "changes.spot": "beside read_attributes",
    "changes.undo": "UndoPlan Undone",
    "changes.userfile": (
        "Allowance OPEN_FLAGS is_incomplete refuse_unshareable refuse_unsuitable "
        "refuse_visible_change"
    ),
    "hashes": "Learned Read hash_all hashes_of learn",
    "owners": "link_liveness liveness",
    "records": (
        "Blob KnownFolder LINKED_SUFFIXES Link Owner RememberedFile Seen Sighting Trust sighting_of"
    ),
    "store": "Store",
    "tiers": "BlobSource Document Found Offer Wanted",
    "upkeep.eject": "EjectPlan clear_leftovers",
    "upkeep.prune": "PrunePlan PruneResult Victim",
    "upkeep.usage": "StoreUsage",
    "upkeep.verify": "VerifyReport rebuild replace_damaged_index",
    "volume": "DATASET Layout volume_root",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
__all__ = sorted([*_HOME_OF, "DEFAULT_PIN", "KINDS", "Kind"])  # noqa: PLE0605 - as the table


if not TYPE_CHECKING:  # A type checker that saw it would believe in any name.

    def __getattr__(name: str) -> object:
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
        globals()[name] = value
        return value
