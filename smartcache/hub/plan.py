"""Plan a download: for each file where its bytes come from, before anything is fetched or changed.

Sources in this order: what is at the place already, the store, files of known folders that may
have the bytes, tiers, the Hub. A plan costs the requests
that huggingface_hub would make (the commit, the listing: neither is asked for again) and stats; of
a tier, what it says of the repo, and a small request for each large file besides. No byte of a file
is read for it.

HF caches are asked by name, which costs no reading and is always up to date: a blob there is named
by its announced hash, one of huggingface_hub's shared store by its xet hash. Everything else is
asked by size, among the files that scans and walks have seen in known folders, and in folders that
are named for this one download. A file whose remembered hash is another is no candidate any more,
so a wrong guess costs one hash, once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from smartcache.config import load_settings
from smartcache.errors import ConfigError, StoreFormatError
from smartcache.hub import layout, remote
from smartcache.hub.bring import near_pool
from smartcache.hub.outcome import HUGGING_FACE, DownloadResult
from smartcache.hub.places import CachePlace, LocalPlace, Place
from smartcache.hub.records import Candidate, PlannedFile, RemoteFile, Repo, Source, announced_by
from smartcache.hub.remote import Access, Patterns
from smartcache.progress import Progress, silent
from smartcache.store.layout import Pool
from smartcache.store.sources import Wanted
from smartcache.store.store import Store
from smartcache.store.userfile import is_incomplete
from smartcache.system.filesystems import can_reflink, free_bytes, nearest_existing, need_room
from smartcache.system.hashing import Algorithm

_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
MOST_UNKNOWN = 16
"""So many files of one size are hashed for one wanted file. People have hundreds of fine-tuned
weights of one size; to hash them all would take longer than a download."""


Look = Callable[[], None]
"""Brings what was seen in model folders up to date, if that is long ago."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What somebody wants: huggingface_hub's arguments. `filename`: this one file only."""

    repo: Repo
    revision: str
    cache_dir: Path
    local_dir: Path | None = None
    filename: str | None = None
    allow: Patterns = None
    ignore: Patterns = None
    also: tuple[Path, ...] = ()
    """Folders to look for files in besides those that smartcache knows."""
    force: bool = False
    is_local: bool = False
    """The Hub is not to be asked."""
    max_workers: int = 8
    access: Access = field(default_factory=Access)
    tqdm_class: type | None = None

    def options(self) -> dict[str, object]:
        """Return what both download functions of huggingface_hub are given."""
        return {
            **self.access.options(), "repo_type": self.repo.type, "cache_dir": self.cache_dir,
            "local_dir": self.local_dir,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The files of a request as the Hub announces them."""

    commit: str
    files: list[RemoteFile]
    new: list[RemoteFile] = field(default_factory=list)
    """All files of the commit, if huggingface_hub does not have its listing on disk yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadPlan:
    """What a download would do; `execute` does it. Sizes are what the Hub announced."""

    repo: Repo
    revision: str
    commit: str
    files: tuple[PlannedFile, ...]
    place: Place
    warnings: tuple[str, ...] = ()
    new_listing: list[RemoteFile] = field(default_factory=list, repr=False)
    """All files of the commit, if huggingface_hub does not have its listing on disk yet."""
    request: Request = field(repr=False)
    opened: Store | None = field(repr=False, compare=False)
    """None: there is no store yet, and the plan is only to be looked at."""

    @property
    def store(self) -> Store:
        """The store with which it is carried out."""
        if self.opened is None:
            raise StoreFormatError("A plan made without a store cannot be executed")
        return self.opened

    def size_of(self, *sources: Source) -> int:
        """Return the bytes of the files that come from these sources."""
        return sum(each.size for each in self.files if each.source in sources)

    @property
    def fetch_size(self) -> int:
        """Bytes that come from the Hub; less if a candidate turns out right, never more."""
        return self.size_of("fetch")

    @property
    def saved_size(self) -> int:
        """Bytes that need not be fetched because a known folder has them, or the store."""
        return self.size_of("link", "reuse", "copy")

    @property
    def tier_size(self) -> int:
        """Bytes that come from tiers, and not from the Hub unless a tier fails."""
        return self.size_of("tier")

    @property
    def present_size(self) -> int:
        """Bytes that are at the target already."""
        return self.size_of("present")

    @property
    def unproven_size(self) -> int:
        """Bytes that have to be read and hashed: present ones not yet proven, and reused ones."""
        waiting = (
            each.size
            for each in self.files
            if (each.source == "present" and not each.is_proven)
            or (each.source in ("reuse", "copy") and not each.digest)
        )
        return sum(waiting)

    @property
    def needed_size(self) -> int:
        """Bytes that are written, at most, all on the filesystem that the files are wanted on.

        What is stored on the way is stored there too, if there is a pool; else nothing is.
        """
        return self._needed()

    def require_room(self) -> None:
        """Raise NoSpaceError unless what is going to be written fits there."""
        if self.needed_size <= free_bytes(self.folder):
            return
        least = self._needed(clones=self._can_clone()) - sum(map(self._begun, self.files))
        hint = (
            "Free some space, or download to another disk: --cache-dir or --local-dir, "
            "in Python cache_dir or local_dir."
        )
        need_room(self.folder, least, f"The download of {self.repo}", hint=hint)

    @property
    def folder(self) -> Path:
        """The folder that the download goes to, as the user knows it."""
        return self.request.cache_dir if self.request.local_dir is None else self.place.root

    def _needed(self, *, clones: bool = False) -> int:
        """Return what is written. `clones`: copies within this disk share their blocks."""
        near = None if self.opened is None else near_pool(self.opened, self.place.root)
        is_writable = near is not None and self.store.settings.keep_writable
        is_link = self.place.kinds(is_weight=True)[0] == "auto" and not is_writable

        def written(each: PlannedFile) -> int:
            first = each.candidates[0] if each.candidates else None
            is_here = each.source == "link" or (first is not None and not first.is_far)
            if near is None or not each.is_weight:  # a copy straight to where it is wanted
                return 0 if clones and is_here else each.size
            placed = 0 if is_link or clones else each.size
            if each.source == "link":
                return placed
            if each.digest:  # a copy of a blob, here or on another filesystem
                return each.size if is_link else placed
            is_blob_soon = is_here and first is not None and (first.may_link or clones)
            return placed + (0 if is_blob_soon else each.size)

        # In an HF cache, files with the same bytes are written once.
        spots = {self.place.spot(each.file): each for each in self.files}
        return sum(
            each.size if each.source == "fetch" else written(each)
            for each in spots.values()
            if each.source != "present"
        )

    def _can_clone(self) -> bool:
        near = None if self.opened is None else near_pool(self.opened, self.place.root)
        return near is not None and can_reflink(nearest_existing(near.tmp))

    def _begun(self, each: PlannedFile) -> int:
        """Return what an interrupted download has left of a file that is fetched."""
        if each.source != "fetch" or not each.file.etag:
            return 0
        parts = self.place.unfinished(each.file).glob(f"*{each.file.etag}*.incomplete")
        return max((os.stat(part).st_blocks * 512 for part in parts), default=0)

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do: every file is there, proven and visible."""
        return all(
            each.source == "present" and each.is_proven and each.is_visible for each in self.files
        )

    def execute(self, *, progress: Progress | None = None) -> DownloadResult:
        """Do it; the result says where the files are, and what was done to others on the way.

        NoSpaceError, before anything is written, if `needed_size` is more than is free there.
        Without `progress` huggingface_hub's own bars are shown.
        """
        from smartcache.hub.download import execute

        return execute(self, progress)


def with_folders(request: Request, also: Iterable[str | Path]) -> Request:
    """Return a request that looks for files in some folders too; they must be there."""
    names = [os.fspath(each) for each in also]
    if "" in names:
        raise ConfigError("The name of a folder is empty", hint="The current folder is '.'.")
    folders = [Path(name).expanduser() for name in names]
    for folder in folders:
        if not folder.is_dir():
            reason = "is not a folder" if folder.exists() else "does not exist"
            hint = "Check the spelling, and that its drive is mounted."
            raise ConfigError(f"{folder} {reason}", hint=hint, path=folder)
    return replace(request, also=tuple(Path(os.path.realpath(each)) for each in folders))


def plan_download(
    store: Store | None, request: Request, *, look: Look | None = None, progress: Progress = silent
) -> DownloadPlan:
    """Plan a download; the Hub's errors pass through. `look` is called before files are sought.

    Without a store nothing is known of this machine but what is at the target.
    """
    return plan_listed(store, request, fetch_listing(request), look=look, progress=progress)


def plan_listed(
    store: Store | None,
    request: Request,
    listing: Listing,
    *,
    look: Look | None = None,
    progress: Progress = silent,
) -> DownloadPlan:
    """Plan a download of files that the Hub has listed."""
    place = place_of(request, listing.commit)
    planning = Planning(
        store, place, cache_dir=request.cache_dir, repo=request.repo, also=request.also, look=look
    )
    with progress("Looking for files"):
        files = planning.plan(listing.files, is_forced=request.force)
    return DownloadPlan(
        repo=request.repo, revision=request.revision, commit=listing.commit, files=files,
        place=place, warnings=tuple(planning.warnings), new_listing=listing.new,
        request=request, opened=store,
    )  # fmt: skip


def place_of(request: Request, commit: str) -> Place:
    """Return where the files of a request go."""
    if request.local_dir is None:
        return CachePlace(cache_dir=request.cache_dir, repo=request.repo, commit=commit)
    return LocalPlace(local_dir=request.local_dir, commit=commit)


def has_snapshot(request: Request) -> bool:
    """Say whether the HF cache has the revision, all of it or some."""
    commit = commit_behind(request, None)
    folder = request.cache_dir / request.repo.folder_name / "snapshots"
    return bool(commit) and (folder / str(commit)).is_dir()


def commit_behind(request: Request, path: Path | None) -> str | None:
    """Return the commit of a snapshot; None if there is none, "" for a `local_dir`.

    `path` is what huggingface_hub returned, if it was asked.
    """
    if request.local_dir is not None:
        return ""
    folder = request.cache_dir / request.repo.folder_name
    if path is None:
        ref = folder / "refs" / request.revision
        return request.revision if layout.is_commit(request.revision) else layout.read_ref(ref)
    snapshots = folder / "snapshots"
    return path.relative_to(snapshots).parts[0] if snapshots in path.parents else None


def fetch_listing(request: Request) -> Listing:
    """Ask the Hub for commit and files; what huggingface_hub has on disk is not asked for again."""
    access, repo = request.access, request.repo
    if request.filename is not None:
        return _one_file(request, request.filename)
    commit = remote.commit_of(access, repo, request.revision)
    memory = place_of(request, commit).memory
    known = layout.read_listing(memory, commit)
    files = remote.files_of(access, repo, commit) if known is None else known
    return Listing(
        commit=commit, files=remote.select(files, request.allow, request.ignore),
        new=files if known is None else [],
    )  # fmt: skip


def _one_file(request: Request, path: str) -> Listing:
    revision = request.revision
    if request.local_dir is None and not request.force and layout.is_commit(revision):
        file = _cached_file(request, revision, path)
        if file is not None:
            return Listing(commit=revision, files=[file])
    found = remote.announced_file(request.access, request.repo, revision, path)
    if found is None:  # huggingface_hub will say what is missing
        commit = remote.commit_of(request.access, request.repo, revision)
        file = RemoteFile(path=path, size=None, etag="")
    else:
        commit, file = found
    return Listing(commit=commit, files=[file])


def _cached_file(request: Request, commit: str, path: str) -> RemoteFile | None:
    """Return a file of a commit that the HF cache has already: no request is needed."""
    remote.refuse_unsafe(request.repo, path)
    folder = request.cache_dir / request.repo.folder_name
    pointer = layout.pointer(folder, commit, path)
    blob = layout.blob_behind(pointer)
    if blob is None or not announced_by(blob.name) or not os.path.isfile(pointer):
        return None
    return RemoteFile(path=path, size=os.stat(pointer).st_size, etag=blob.name)


def known_caches(store: Store | None) -> list[Path]:
    """Return the HF caches that are there: the default one, and those that scans have found."""
    folders = [] if store is None else store.folders()
    known = [each.path for each in folders if each.program == HUGGING_FACE]
    return [each for each in (layout.default_cache_dir(), *known) if each.is_dir()]


class Sources:
    """The places to look in, for one download into directories of one filesystem."""

    def __init__(
        self,
        store: Store | None,
        cache_dir: Path,
        destination: Path,
        *,
        also: Iterable[Path] = (),
        known: Mapping[str, str | Path] | None = None,
    ) -> None:
        self._store = store
        self._also = tuple(also)
        self._known = {} if known is None else known
        self._device = _device(destination)
        folders = [] if store is None else store.folders()
        caches = [each.path for each in folders if each.program == HUGGING_FACE]
        self._caches = list(dict.fromkeys(map(_real, (cache_dir, *caches))))
        self._given = {_real(each.path) for each in folders if each.is_given}
        pools = [] if store is None else store.pools()
        self._inside = tuple(os.path.join(os.path.realpath(each.root), "") for each in pools)

    def candidates(self, file: RemoteFile) -> tuple[tuple[Candidate, ...], int]:
        """Return the files that may have the bytes, likeliest first; and how many were left out.

        Those left out are more files of that size than are worth hashing.
        """
        paths = list(dict.fromkeys(self._likely(file)))
        known = {} if self._store is None else self._store.known_hashes(paths)
        found: list[Candidate] = []
        unknown: list[Candidate] = []
        seen: set[tuple[int, int]] = set()
        for path in paths:
            st = self._usable(path, file)
            if st is None or (st.st_dev, st.st_ino) in seen:
                continue
            seen.add((st.st_dev, st.st_ino))
            value = known.get(path, {}).get(file.algorithm)
            if value not in (None, file.etag) or (
                value is None and _is_named_otherwise(path, file)
            ):
                continue
            each = Candidate(
                path=path, is_known=value == file.etag, may_link=self._is_ours(path),
                is_far=st.st_dev != self._device,
            )  # fmt: skip
            (found if each.is_known else unknown).append(each)
        found.sort(key=lambda each: (each.is_far, not each.may_link))
        unknown.sort(key=lambda each: each.is_far)
        return (*found, *unknown[:MOST_UNKNOWN]), max(0, len(unknown) - MOST_UNKNOWN)

    def _likely(self, file: RemoteFile) -> Iterator[Path]:
        """Go through the files to look at: by name, then by size, those of the same name first."""
        if file.etag in self._known:
            yield _real(Path(self._known[file.etag]))
        yield from (_real(Path(each, file.etag)) for each in self._named.get(file.etag, ()))
        if file.xet is not None and file.size is not None:
            shared = layout.find_shared_entry(self._caches, file.xet, file.size)
            if shared is not None:
                yield _real(shared)
        if file.size:
            name = os.path.basename(file.path)
            sightings = [] if self._store is None else self._store.sightings(file.size)
            for seen in (self._named_folders.get(file.size, ()), (each.path for each in sightings)):
                yield from sorted(map(_real, seen), key=lambda path: path.name != name)

    def _usable(self, path: Path, file: RemoteFile) -> os.stat_result | None:
        try:
            st = os.stat(path)
        except OSError:
            return None
        is_whole = not is_incomplete(os.fsencode(path.name)) and os.path.isfile(path)
        is_outside = not str(path).startswith(self._inside)
        return st if is_whole and is_outside and st.st_size == file.size else None

    def _is_ours(self, path: Path) -> bool:
        """Say whether a file was given to smartcache, or is huggingface_hub's own in an HF cache.

        What else lies below the folder of an HF cache may be anybody's.
        """
        if any(parent in self._given for parent in path.parents):
            return True
        return any(_is_of_cache(path, cache) for cache in self._caches if cache in path.parents)

    @cached_property
    def _named_folders(self) -> dict[int, list[Path]]:
        """The files of the folders that were named for this download, by size."""
        found: dict[int, list[Path]] = {}
        for folder in self._also:
            for directory, _, names in os.walk(folder):
                for name in names:
                    path = os.path.join(directory, name)
                    with suppress(OSError):
                        found.setdefault(os.stat(path).st_size, []).append(Path(path))
        return found

    @cached_property
    def _named(self) -> dict[str, list[str]]:
        """The blobs of all HF caches: in which directories there is one of a name."""
        found: dict[str, list[str]] = {}
        for cache in self._caches:
            for _, folder in layout.repos_in(cache):
                directory = os.path.join(folder, "blobs")
                for name in _names(directory):
                    found.setdefault(name, []).append(directory)
        return found


def _is_of_cache(path: Path, cache: Path) -> bool:
    first, *rest = path.relative_to(cache).parts
    if not rest:  # as transformers kept them before there were repo folders
        return os.path.isfile(f"{path}.json")
    is_shared = first == "blobs" and layout.has_shared_store(cache)
    return is_shared or Repo.of_folder(first) is not None


def _is_named_otherwise(path: Path, file: RemoteFile) -> bool:
    """Say whether a blob's name tells of other bytes: of an HF cache, or Ollama's.

    A name proves nothing, but where it speaks against a file, hashing that would be a waste.
    """
    name = path.name.removeprefix("sha256-")
    is_hash = _HASH.fullmatch(name) is not None and path.parent.name == "blobs"
    if _HASH.fullmatch(name) is not None and path.parent.parent.name == "blobs":
        return file.xet is not None and name != file.xet  # huggingface_hub's shared store
    return is_hash and name != file.etag


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _device(path: Path) -> int:
    while True:
        try:
            return os.stat(path).st_dev
        except FileNotFoundError:
            path = path.parent


class Planning:
    """Decides where files that are wanted at one place come from.

    Of `repo` tiers may have a document. `known` are further files that may have the bytes, by
    their sha256. `look` is called before files are sought on this machine.
    """

    def __init__(
        self,
        store: Store | None,
        place: Place,
        *,
        cache_dir: Path,
        repo: Repo | None,
        also: Iterable[Path] = (),
        known: Mapping[str, str | Path] | None = None,
        look: Look | None = None,
    ) -> None:
        self._store = store
        self._place = place
        self._cache_dir = cache_dir
        self._repo = repo
        self._also = tuple(also)
        self._known = known
        self._look = look
        self._near = None if store is None else near_pool(store, place.root)
        settings = load_settings() if store is None else store.settings
        self._min_size = settings.link_min_size
        self.warnings: list[str] = []

    def plan(self, files: list[RemoteFile], *, is_forced: bool = False) -> tuple[PlannedFile, ...]:
        """Return the plan of each file, in the Hub's order."""
        seen = {} if is_forced else self._place.look_all(files, self._min_size)
        plans = [self._from_place(file, *seen.get(file.path, (None, False))) for file in files]
        weights = [each.found for each in plans if each.found is not None and each.is_weight]
        known = {} if self._store is None else self._store.known_hashes(weights)
        plans = [_compared(each, known) for each in plans]
        if isinstance(self._place, CachePlace):
            # Bytes that are a text under another name have one spot: they are not shared.
            edited = {each.file.etag for each in plans if each.is_large and not each.is_weight}
            plans = [replace(each, is_weight=each.is_weight and each.file.etag not in edited)
                     for each in plans]  # fmt: skip
        return tuple(plans if is_forced else self._from_tiers(self._from_here(plans)))

    def arriving(self, file: RemoteFile) -> PlannedFile:
        """Return the plan of a file that is not there."""
        (planned,) = self._from_tiers(self._from_here([self._from_place(file, None, False)]))  # noqa: FBT003
        return planned

    def _from_place(self, file: RemoteFile, found: Path | None, is_visible: bool) -> PlannedFile:  # noqa: FBT001
        is_large = file.is_large(self._min_size)
        is_local = isinstance(self._place, LocalPlace)
        return PlannedFile(
            file=file, source="fetch" if found is None else "present", found=found,
            is_proven=found is not None and (is_visible or not is_local),
            is_visible=is_visible, is_large=is_large,
            is_weight=is_large and file.is_weight(self._min_size),
        )  # fmt: skip

    def _from_here(self, plans: list[PlannedFile]) -> list[PlannedFile]:
        """Plan to take large files that are missing from where this machine has them."""
        store, near = self._store, self._near
        if (store is None and not self._also) or not any(map(_is_missing, plans)):
            return plans
        if store is not None and near is not None:
            plans = [
                _from_store(each, store, "link" if self._by_link(each) else "copy", near)
                for each in plans
            ]
        if self._look is not None and any(map(_is_missing, plans)):
            self._look()
        sources = Sources(
            store, self._cache_dir, self._place.root, also=self._also, known=self._known
        )
        return [self._from_machine(each, sources) if _is_missing(each) else each for each in plans]

    def _by_link(self, planned: PlannedFile) -> bool:
        """Say whether placing a near blob means a link; where that is not safe, it is a copy."""
        return self._place.kinds(is_weight=planned.is_weight)[0] == "auto"

    def _from_machine(self, planned: PlannedFile, sources: Sources) -> PlannedFile:
        """Plan to take a near file, a blob of another filesystem, or a far file."""
        file, store = planned.file, self._store
        candidates, left_out = sources.candidates(file)
        candidates = tuple(each for each in candidates if each.path != planned.found)
        if left_out:
            self.warnings.append(
                f"{file.path}: {left_out} more files have its size and were not looked at"
            )
        if candidates and not candidates[0].is_far:
            return replace(planned, source="reuse", candidates=candidates)
        known = planned if store is None else _from_store(planned, store, "copy")
        if known.digest:
            return known
        if candidates:
            return replace(planned, source="copy", candidates=candidates)
        return planned

    def _from_tiers(self, plans: list[PlannedFile]) -> list[PlannedFile]:
        """Plan to take what would be fetched from a tier that has it: large files and small ones.

        Small ones too, because a tier may be near and the Hub far, or not to be reached.
        """
        store, missing = self._store, [each for each in plans if self._may_come(each)]
        if store is None or not missing or not store.sources:
            return plans
        from smartcache.hub.care.tiered import pushed_objects

        offers = {} if self._repo is None else pushed_objects(store, self._repo)
        # Another repo may have brought the same weights there.
        wanted = {
            each.file.etag: Wanted(
                algorithm=each.file.algorithm, value=each.file.etag, size=each.file.size
            )
            for each in missing
            if each.is_large and each.file.etag not in offers
        }
        found = store.asking.offers(store.sources, set(wanted.values()))
        offers |= {etag: found[each] for etag, each in wanted.items() if each in found}
        taken = {
            each.file.path: offers[each.file.etag]
            for each in missing
            if each.file.etag in offers and offers[each.file.etag].size == each.file.size
        }
        return [
            replace(each, source="tier", offer=taken[each.file.path])
            if each.file.path in taken
            else each
            for each in plans
        ]

    def _may_come(self, planned: PlannedFile) -> bool:
        """Say whether a file may come from a tier: what the user has in its place is left alone."""
        if planned.source != "fetch" or not planned.file.announced:
            return False
        is_free = planned.is_large or isinstance(self._place, CachePlace)
        return is_free or not os.path.lexists(self._place.visible(planned.file))


def _is_missing(planned: PlannedFile) -> bool:
    return planned.is_large and planned.source == "fetch"


def _from_store(
    planned: PlannedFile, store: Store, source: Source, pool: Pool | None = None
) -> PlannedFile:
    if not _is_missing(planned):
        return planned
    blob = store.find(planned.file.algorithm, planned.file.etag, pool=pool)
    return planned if blob is None else replace(planned, source=source, digest=blob.digest)


def _compared(planned: PlannedFile, known: dict[Path, dict[Algorithm, str]]) -> PlannedFile:
    """Return the plan of a file that is there after what is known of it; of texts, nothing is."""
    if planned.found is None or not planned.is_weight:
        return planned
    value = known.get(planned.found, {}).get(planned.file.algorithm)
    is_wrong = value not in (None, planned.file.etag)
    source: Source = "fetch" if is_wrong else "present"
    return replace(planned, source=source, is_proven=value == planned.file.etag)
