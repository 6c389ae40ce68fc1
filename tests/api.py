"""What tests use of the inner modules of smartcache: code that moves breaks this file only.

A module has its package before its name (`store_kernel`), a name that several modules have has
its module before it.
"""

from __future__ import annotations

from smartcache import artifacts, config, errors, functions, store
from smartcache import doctor as store_doctor
from smartcache import folders as folders_face
from smartcache.artifacts import (
    ArtifactSet,
    ArtifactSets,
    Carried,
    CarryPlan,
    Computed,
    Difference,
    Fingerprint,
    Handle,
    Kept,
    Memory,
    Sample,
    Selection,
    SetInfo,
    TensorSpec,
    compute_key,
    memoized,
    register_codec,
    register_key_rule,
    remember_module,
)
from smartcache.artifacts import plan_export as carry_plan_export
from smartcache.artifacts import plan_import as carry_plan_import
from smartcache.artifacts import shards as artifacts_shards
from smartcache.artifacts.engine import compact as artifacts_compact
from smartcache.artifacts.engine import engine as artifacts_engine
from smartcache.artifacts.engine import packs as artifacts_packs
from smartcache.artifacts.engine import read as artifacts_read
from smartcache.artifacts.engine import records as engine_records
from smartcache.artifacts.engine import write as artifacts_write
from smartcache.artifacts.engine.engine import Engine
from smartcache.artifacts.engine.far import FarPack, Skeleton
from smartcache.artifacts.engine.index import SetIndex
from smartcache.artifacts.engine.write import delete_exactly
from smartcache.artifacts.keys import check_key, key_text
from smartcache.artifacts.setfolder import ABSENT, Options, SetFolder
from smartcache.artifacts.values import compression as values_compression
from smartcache.artifacts.values import encode as values_encode
from smartcache.artifacts.values.encode import encode
from smartcache.artifacts.values.layout import INLINE_BYTES, decoders, known_layout
from smartcache.artifacts.values.layout import Layout as values_Layout
from smartcache.artifacts.values.tensors import (
    TORCH,
    TORCH_ONLY,
    array_bytes,
    numpy_dtype,
    numpy_item_size,
    numpy_name,
    torch_dtype,
    torch_item_size,
    torch_name,
)
from smartcache.artifacts.values.tensors import Kind as tensors_Kind
from smartcache.cache import SmartCache, prunable_size, usage_of_sets
from smartcache.cli import _failures as cli_failures
from smartcache.cli import _output as cli_output
from smartcache.cli import _progress as cli_progress
from smartcache.cli import main
from smartcache.cli._command import Command
from smartcache.cli._command import Group as command_Group
from smartcache.cli._downloads import MOST_SHOWN
from smartcache.cli._failures import conclude, explain
from smartcache.cli._json import encoded, plain
from smartcache.cli._output import out, printable
from smartcache.cli._progress import Bars, Share
from smartcache.cli._session import Session
from smartcache.cli._tables import Column, cut, render, shortened, text_width
from smartcache.cli.dedup import numbers_in
from smartcache.config import (
    SETTINGS,
    Settings,
    config_file,
    load_settings,
    variable,
)
from smartcache.config import remotes_file as config_remotes_file
from smartcache.doctor import Diagnosis, Place, examine
from smartcache.doctor import Finding as doctor_Finding
from smartcache.errors import (
    ArtifactError,
    ArtifactGoneError,
    ArtifactNotFoundError,
    BadDigestError,
    BadKeyError,
    BadSetNameError,
    BatchShapeError,
    BlobInUseError,
    BlobNotFoundError,
    BundleError,
    CannotLinkError,
    ConfigError,
    DamagedArtifactError,
    DamagedBlobError,
    DamagedObjectError,
    DatasetChangedError,
    DatasetError,
    DestinationExistsError,
    DigestMismatchError,
    EncoderError,
    FileBusyError,
    FileChangedError,
    FileSkippedError,
    HubError,
    IndexDamagedError,
    LayoutError,
    LockTimeoutError,
    MissingCompressionError,
    MissingObjectError,
    MissingWeightsError,
    NoSpaceError,
    NothingToUndoError,
    OutputMissingError,
    PretrainedError,
    PruneRefusedError,
    RememberedFailureError,
    RepoNotCachedError,
    SetFormatError,
    SharedComponentError,
    SizeMismatchError,
    SmartcacheError,
    SourcesVanishedError,
    StoreError,
    StoreFormatError,
    StoreUnwritableError,
    TierError,
    UnknownClassError,
    UnreadableConfigError,
    UnsafeFileError,
    UnsafeNameError,
    UnsafeStoreError,
    UnsupportedValueError,
    WrongVariantError,
)
from smartcache.folders import discover as folders_apps
from smartcache.folders import scan as folders_scan
from smartcache.folders import walk as folders_walk
from smartcache.folders.checks import Checks, Copy, Name, Option, Skip, Verdict
from smartcache.folders.dedup import DedupPlan, DedupResult, plan_dedup
from smartcache.folders.discover import discover_folders as discover
from smartcache.folders.discover import places, read_extra_paths
from smartcache.folders.groups import KEPT, Grouping, Left, Tally, is_write_once
from smartcache.folders.groups import Group as records_Group
from smartcache.folders.programs import PROGRAMS, TABLE, ModelFolder, identify, identify_names
from smartcache.folders.scan import (
    SAMPLE_MIN_SIZE,
    Figures,
    Scan,
    compare,
    folders_to_scan,
    look,
    survey,
)
from smartcache.folders.scan import scan_folders as scan
from smartcache.folders.walk import MOST_NAMED, Walked, walk
from smartcache.functions import answering, shared
from smartcache.hub import RepoType, serving
from smartcache.hub import layout as hub_layout
from smartcache.hub import patches as hub_patches
from smartcache.hub import remote as hub_remote
from smartcache.hub.api import Call, FileOptions, SnapshotOptions
from smartcache.hub.bring import Bringing
from smartcache.hub.care import bundle as hub_bundle
from smartcache.hub.care.bundle import (
    COMPLETE,
    MANIFEST,
    MOST_MANIFEST,
    Manifest,
    TarSink,
    decode,
    opened,
)
from smartcache.hub.care.bundle import Content as bundle_Content
from smartcache.hub.care.bundle import checksum as bundle_checksum
from smartcache.hub.care.bundle import encode as bundle_encode
from smartcache.hub.care.carry import ExportPlan, ImportPlan, Wanted, plan_export, plan_import
from smartcache.hub.care.census import Census
from smartcache.hub.care.mapping import CacheMapping
from smartcache.hub.care.remove import RemovalPlan, RemovalResult, plan_cache_prune, plan_removal
from smartcache.hub.care.verify import Finding as verifying_Finding
from smartcache.hub.care.verify import RepoVerifyReport, plan_repair, verify_repos
from smartcache.hub.layout import CachedRepo, find_repo, scan_caches
from smartcache.hub.outcome import DownloadResult
from smartcache.hub.outcome import Watch as outcome_Watch
from smartcache.hub.places import CachePlace
from smartcache.hub.plan import MOST_UNKNOWN, DownloadPlan
from smartcache.hub.records import PlannedFile, RemoteFile, Repo, announced_by
from smartcache.hub.remote import Access
from smartcache.hub.transfer import Followed, StoppedError, bar_class
from smartcache.pretrained import components, load_encoders, unshare
from smartcache.pretrained import share as pretrained_share
from smartcache.pretrained.alive import keep, look_at, size_of
from smartcache.pretrained.api import load, repo_file
from smartcache.pretrained.call import (
    Asked,
    Placement,
    accelerator,
    dtype_arguments,
    is_on,
    modules_of,
    one_at_a_time,
    part_of,
    placement,
    resolve_device,
)
from smartcache.pretrained.content import Content, NotComparableError, canonical, content_of
from smartcache.pretrained.kinds import class_of
from smartcache.pretrained.share import Guard, Registry, Request, guard, lift, registry
from smartcache.pretrained.share import Holder as share_Holder
from smartcache.progress import Job, Progress, Unit, bars, silent
from smartcache.remote import Remotes, Tier, plan_gc, plan_pull, plan_push, verify_tier
from smartcache.report import html as report_html
from smartcache.report import names as folders_names
from smartcache.report.figures import Across, Disk, Report, SharedFile, Sums, make_report
from smartcache.report.names import Namer
from smartcache.report.naming import Known, Naming, from_home
from smartcache.report.roles import roles
from smartcache.report.text import Section, sections
from smartcache.report.titles import (
    LONGEST,
    MOST_READ,
    kind_of,
    one_line,
    read_title,
    title_of,
)
from smartcache.sizes import format_age, format_size, parse_age, parse_size
from smartcache.store import DEFAULT_PIN, KINDS
from smartcache.store import Kind as links_Kind
from smartcache.store import blobs as store_proof
from smartcache.store import hashes as store_contents
from smartcache.store import index as store_index
from smartcache.store import tiers as store_tiers
from smartcache.store import volume as store_layout
from smartcache.store import volume as store_volume
from smartcache.store.blobs import explained as blobs_explained
from smartcache.store.catalog import Candidate, Catalog, FolderSums, Member, MemberRow, Scope
from smartcache.store.changes import place as store_links
from smartcache.store.changes import replace as store_replace
from smartcache.store.changes import separate as store_separate
from smartcache.store.changes import share as store_share
from smartcache.store.changes import spot as store_swap
from smartcache.store.changes import userfile as store_hold
from smartcache.store.changes.adopt import Adoption
from smartcache.store.changes.journal import Batch, Change, Journal, Op, State
from smartcache.store.changes.replace import Replacement, give_back
from smartcache.store.changes.separate import plan_separate
from smartcache.store.changes.spot import Spot, beside
from smartcache.store.changes.undo import UndoPlan
from smartcache.store.changes.userfile import Allowance, is_incomplete
from smartcache.store.hashes import HEAD_SIZE, TAIL_SIZE, Learned, What, learn
from smartcache.store.index import SCHEMA, VERSION, Index
from smartcache.store.owners import link_liveness, liveness, pin
from smartcache.store.records import Blob, Memo, Owner, Seen, Sighting, Trust, judge
from smartcache.store.store import Store
from smartcache.store.upkeep.prune import REBUILT, PrunePlan
from smartcache.store.upkeep.verify import VerifyReport, rebuild, replace_damaged_index
from smartcache.store.volume import FORMAT, Volume, volume_root
from smartcache.store.volume import Layout as layout_Layout
from smartcache.system import faults as store_faults
from smartcache.system import filesystems as store_filesystems
from smartcache.system import filesystems as store_mounts
from smartcache.system import filesystems as store_room
from smartcache.system import kernel as store_kernel
from smartcache.system.filesystems import (
    Family,
    Mount,
    family_of,
    filesystem_id,
    find_mount,
    is_network,
    mount_of,
    nearest_existing,
    parse_mountinfo,
    probe,
)
from smartcache.system.filesystems import free_bytes as filesystems_free_bytes
from smartcache.system.hashing import (
    AHEAD_MIN_SIZE,
    BUFFER_SIZE,
    Algorithm,
    FilePath,
    Hashed,
    Hasher,
    Hashes,
    check_hex,
    hash_file,
    hash_many,
    is_digest,
)
from smartcache.system.kernel import RACY_NS, Extent, StatKey, boot_id, extents, shares_blocks
from smartcache.system.locks import KeyLocks, claim, is_free, lock
from smartcache.system.ownfiles import open_own, read_own
from smartcache.system.sqlite import connect, signed
from smartcache.training.dataset import file_digest
from smartcache.training.encoder import (
    SIDE,
    SINGLE,
    ChangedError,
    ItemError,
    Keys,
    as_kept,
    nan_in,
    pad,
    split,
)
from smartcache.training.look import Listing, stat_key, value_digest
from smartcache.training.look import look as training_look
from smartcache.training.prefetch import StepSource
from smartcache.training.table import SourceTable

__all__ = [
    "ABSENT",
    "AHEAD_MIN_SIZE",
    "BUFFER_SIZE",
    "COMPLETE",
    "DEFAULT_PIN",
    "FORMAT",
    "HEAD_SIZE",
    "INLINE_BYTES",
    "KEPT",
    "KINDS",
    "LONGEST",
    "MANIFEST",
    "MOST_MANIFEST",
    "MOST_NAMED",
    "MOST_READ",
    "MOST_SHOWN",
    "MOST_UNKNOWN",
    "PROGRAMS",
    "RACY_NS",
    "REBUILT",
    "SAMPLE_MIN_SIZE",
    "SCHEMA",
    "SETTINGS",
    "SIDE",
    "SINGLE",
    "TABLE",
    "TAIL_SIZE",
    "TORCH",
    "TORCH_ONLY",
    "VERSION",
    "Access",
    "Across",
    "Adoption",
    "Algorithm",
    "Allowance",
    "ArtifactError",
    "ArtifactGoneError",
    "ArtifactNotFoundError",
    "ArtifactSet",
    "ArtifactSets",
    "Asked",
    "BadDigestError",
    "BadKeyError",
    "BadSetNameError",
    "Bars",
    "Batch",
    "BatchShapeError",
    "Blob",
    "BlobInUseError",
    "BlobNotFoundError",
    "Bringing",
    "BundleError",
    "CacheMapping",
    "CachePlace",
    "CachedRepo",
    "Call",
    "Candidate",
    "CannotLinkError",
    "Carried",
    "CarryPlan",
    "Catalog",
    "Census",
    "Change",
    "ChangedError",
    "Checks",
    "Column",
    "Command",
    "Computed",
    "ConfigError",
    "Content",
    "Copy",
    "DamagedArtifactError",
    "DamagedBlobError",
    "DamagedObjectError",
    "DatasetChangedError",
    "DatasetError",
    "DedupPlan",
    "DedupResult",
    "DestinationExistsError",
    "Diagnosis",
    "Difference",
    "DigestMismatchError",
    "Disk",
    "DownloadPlan",
    "DownloadResult",
    "EncoderError",
    "Engine",
    "ExportPlan",
    "Extent",
    "Family",
    "FarPack",
    "Figures",
    "FileBusyError",
    "FileChangedError",
    "FileOptions",
    "FilePath",
    "FileSkippedError",
    "Fingerprint",
    "FolderSums",
    "Followed",
    "Grouping",
    "Guard",
    "Handle",
    "Hashed",
    "Hasher",
    "Hashes",
    "HubError",
    "ImportPlan",
    "Index",
    "IndexDamagedError",
    "ItemError",
    "Job",
    "Journal",
    "Kept",
    "KeyLocks",
    "Keys",
    "Known",
    "LayoutError",
    "Learned",
    "Left",
    "Listing",
    "LockTimeoutError",
    "Manifest",
    "Member",
    "MemberRow",
    "Memo",
    "Memory",
    "MissingCompressionError",
    "MissingObjectError",
    "MissingWeightsError",
    "ModelFolder",
    "Mount",
    "Name",
    "Namer",
    "Naming",
    "NoSpaceError",
    "NotComparableError",
    "NothingToUndoError",
    "Op",
    "Option",
    "Options",
    "OutputMissingError",
    "Owner",
    "Place",
    "Placement",
    "PlannedFile",
    "PretrainedError",
    "Progress",
    "PrunePlan",
    "PruneRefusedError",
    "Registry",
    "RememberedFailureError",
    "RemoteFile",
    "Remotes",
    "RemovalPlan",
    "RemovalResult",
    "Replacement",
    "Repo",
    "RepoNotCachedError",
    "RepoType",
    "RepoVerifyReport",
    "Report",
    "Request",
    "Sample",
    "Scan",
    "Scope",
    "Section",
    "Seen",
    "Selection",
    "Session",
    "SetFolder",
    "SetFormatError",
    "SetIndex",
    "SetInfo",
    "Settings",
    "Share",
    "SharedComponentError",
    "SharedFile",
    "Sighting",
    "SizeMismatchError",
    "Skeleton",
    "Skip",
    "SmartCache",
    "SmartcacheError",
    "SnapshotOptions",
    "SourceTable",
    "SourcesVanishedError",
    "Spot",
    "StatKey",
    "State",
    "StepSource",
    "StoppedError",
    "Store",
    "StoreError",
    "StoreFormatError",
    "StoreUnwritableError",
    "Sums",
    "Tally",
    "TarSink",
    "TensorSpec",
    "Tier",
    "TierError",
    "Trust",
    "UndoPlan",
    "Unit",
    "UnknownClassError",
    "UnreadableConfigError",
    "UnsafeFileError",
    "UnsafeNameError",
    "UnsafeStoreError",
    "UnsupportedValueError",
    "Verdict",
    "VerifyReport",
    "Volume",
    "Walked",
    "Wanted",
    "What",
    "WrongVariantError",
    "accelerator",
    "announced_by",
    "answering",
    "array_bytes",
    "artifacts",
    "artifacts_compact",
    "artifacts_engine",
    "artifacts_packs",
    "artifacts_read",
    "artifacts_shards",
    "artifacts_write",
    "as_kept",
    "bar_class",
    "bars",
    "beside",
    "blobs_explained",
    "boot_id",
    "bundle_Content",
    "bundle_checksum",
    "bundle_encode",
    "canonical",
    "carry_plan_export",
    "carry_plan_import",
    "check_hex",
    "check_key",
    "claim",
    "class_of",
    "cli_failures",
    "cli_output",
    "cli_progress",
    "command_Group",
    "compare",
    "components",
    "compute_key",
    "conclude",
    "config",
    "config_file",
    "config_remotes_file",
    "connect",
    "content_of",
    "cut",
    "decode",
    "decoders",
    "delete_exactly",
    "discover",
    "doctor_Finding",
    "dtype_arguments",
    "encode",
    "encoded",
    "engine_records",
    "errors",
    "examine",
    "explain",
    "extents",
    "family_of",
    "file_digest",
    "filesystem_id",
    "filesystems_free_bytes",
    "find_mount",
    "find_repo",
    "folders_apps",
    "folders_face",
    "folders_names",
    "folders_scan",
    "folders_to_scan",
    "folders_walk",
    "format_age",
    "format_size",
    "from_home",
    "functions",
    "give_back",
    "guard",
    "hash_file",
    "hash_many",
    "hub_bundle",
    "hub_layout",
    "hub_patches",
    "hub_remote",
    "identify",
    "identify_names",
    "is_digest",
    "is_free",
    "is_incomplete",
    "is_network",
    "is_on",
    "is_write_once",
    "judge",
    "keep",
    "key_text",
    "kind_of",
    "known_layout",
    "layout_Layout",
    "learn",
    "lift",
    "link_liveness",
    "links_Kind",
    "liveness",
    "load",
    "load_encoders",
    "load_settings",
    "lock",
    "look",
    "look_at",
    "main",
    "make_report",
    "memoized",
    "modules_of",
    "mount_of",
    "nan_in",
    "nearest_existing",
    "numbers_in",
    "numpy_dtype",
    "numpy_item_size",
    "numpy_name",
    "one_at_a_time",
    "one_line",
    "open_own",
    "opened",
    "out",
    "outcome_Watch",
    "pad",
    "parse_age",
    "parse_mountinfo",
    "parse_size",
    "part_of",
    "pin",
    "placement",
    "places",
    "plain",
    "plan_cache_prune",
    "plan_dedup",
    "plan_export",
    "plan_gc",
    "plan_import",
    "plan_pull",
    "plan_push",
    "plan_removal",
    "plan_repair",
    "plan_separate",
    "pretrained_share",
    "printable",
    "probe",
    "prunable_size",
    "read_extra_paths",
    "read_own",
    "read_title",
    "rebuild",
    "records_Group",
    "register_codec",
    "register_key_rule",
    "registry",
    "remember_module",
    "render",
    "replace_damaged_index",
    "repo_file",
    "report_html",
    "resolve_device",
    "roles",
    "scan",
    "scan_caches",
    "sections",
    "serving",
    "share_Holder",
    "shared",
    "shares_blocks",
    "shortened",
    "signed",
    "silent",
    "size_of",
    "split",
    "stat_key",
    "store",
    "store_contents",
    "store_doctor",
    "store_faults",
    "store_filesystems",
    "store_hold",
    "store_index",
    "store_kernel",
    "store_layout",
    "store_links",
    "store_mounts",
    "store_proof",
    "store_replace",
    "store_room",
    "store_separate",
    "store_share",
    "store_swap",
    "store_tiers",
    "store_volume",
    "survey",
    "tensors_Kind",
    "text_width",
    "title_of",
    "torch_dtype",
    "torch_item_size",
    "torch_name",
    "training_look",
    "unshare",
    "usage_of_sets",
    "value_digest",
    "values_Layout",
    "values_compression",
    "values_encode",
    "variable",
    "verify_repos",
    "verify_tier",
    "verifying_Finding",
    "volume_root",
    "walk",
]
