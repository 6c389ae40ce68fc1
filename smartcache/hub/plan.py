"""Plan a download: for each file where its bytes come from, before anything is fetched or changed.

Sources in this order: what is at the target already, the store, files of known folders that may
have the bytes, stores that other users have published, tiers, the Hub. A plan costs the requests
that huggingface_hub makes anyway (the commit, the listing) and stats; of a tier, what it says of
the repo, and a small request for each large file besides. No byte of a file is read for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from smartcache.config import load_settings
from smartcache.errors import ConfigError, FileSkippedError, StoreError, StoreFormatError
from smartcache.hub import remote, tree
from smartcache.hub.outcome import DownloadResult
from smartcache.hub.records import PlannedFile, RemoteFile, Repo, Source
from smartcache.hub.remote import Access, Patterns
from smartcache.hub.sources import Sources
from smartcache.hub.targets import CacheTarget, LocalTarget, Target
from smartcache.progress import Progress, silent
from smartcache.store import Store, Wanted
from smartcache.system import Algorithm, free_bytes, need_room, probe

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
    is_on_disk: bool
    """huggingface_hub needs no further listing: it has this one on disk, or it is of one file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadPlan:
    """What a download would do; `execute` does it. Sizes are what the Hub announced."""

    repo: Repo
    revision: str
    commit: str
    files: tuple[PlannedFile, ...]
    target: Target
    warnings: tuple[str, ...] = ()
    is_listed: bool = False
    """huggingface_hub has the listing of this commit on disk already."""
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

        What is stored on the way is stored there too, if there is a volume; else nothing is.
        """
        return self._needed()

    def require_room(self) -> None:
        """Raise NoSpaceError unless what is going to be written fits there."""
        if self.needed_size <= free_bytes(self.place):
            return
        least = self._needed(clones=self._can_clone()) - sum(map(self._begun, self.files))
        hint = (
            "Free some space, or download to another disk: --cache-dir or --local-dir, "
            "in Python cache_dir or local_dir."
        )
        need_room(self.place, least, f"The download of {self.repo}", hint=hint)

    @property
    def place(self) -> Path:
        """The folder that the download goes to, as the user knows it."""
        is_local = isinstance(self.target, LocalTarget)
        return self.target.root if is_local else self.target.cache_dir

    def _needed(self, *, clones: bool = False) -> int:
        """Return what is written. `clones`: copies within this disk share their blocks."""
        near = None if self.opened is None else near_store(self.opened, self.target.root)
        is_writable = near is not None and near.settings.keep_writable
        is_link = self.target.kinds(is_weight=True)[0] == "auto" and not is_writable

        def written(each: PlannedFile) -> int:
            first = each.candidates[0] if each.candidates else None
            is_here = each.source == "link" or (first is not None and not first.is_far)
            if near is None or not each.is_weight:  # a copy straight to where it is wanted
                return 0 if clones and is_here else each.size
            placed = 0 if is_link or clones else each.size
            if each.source == "link":
                return placed
            if each.digest:  # a copy of a blob, here or on another volume
                return each.size if is_link else placed
            is_blob_soon = is_here and first is not None and (first.may_link or clones)
            return placed + (0 if is_blob_soon else each.size)

        # In an HF cache, files with the same bytes are written once.
        spots = {self.target.spot(each.file): each for each in self.files}
        return sum(
            each.size if each.source == "fetch" else written(each)
            for each in spots.values()
            if each.source != "present"
        )

    def _can_clone(self) -> bool:
        near = None if self.opened is None else near_store(self.opened, self.target.root)
        try:
            return near is not None and probe(near.volume.layout.tmp).reflink
        except StoreError:  # not even that much room
            return False

    def _begun(self, each: PlannedFile) -> int:
        """Return what an interrupted download has left of a file that is fetched."""
        if each.source != "fetch" or not each.file.etag:
            return 0
        parts = self.target.unfinished(each.file).glob(f"*{each.file.etag}*.incomplete")
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
    target = target_of(request, listing.commit)
    planning = _Planning(store, request, target)
    with progress("Looking for files"):
        files = planning.plan(listing.files, look)
    return DownloadPlan(
        repo=request.repo, revision=request.revision, commit=listing.commit, files=files,
        target=target, warnings=tuple(planning.warnings), is_listed=listing.is_on_disk,
        request=request, opened=store,
    )  # fmt: skip


def target_of(request: Request, commit: str) -> Target:
    """Return where the files of a request go."""
    if request.local_dir is None:
        return CacheTarget(cache_dir=request.cache_dir, repo=request.repo, commit=commit)
    return LocalTarget(
        local_dir=request.local_dir, cache_dir=request.cache_dir, repo=request.repo, commit=commit
    )


def near_store(store: Store, place: Path) -> Store | None:
    """Return the store on the filesystem of a place, where it can make hard links; None: none."""
    try:
        return store.volume_of(place)
    except FileSkippedError:
        return None


def fetch_listing(request: Request) -> Listing:
    """Ask the Hub for commit and files; what huggingface_hub has on disk is not asked for again."""
    access, repo = request.access, request.repo
    if request.filename is not None:
        return _one_file(request, request.filename)
    commit = remote.commit_of(access, repo, request.revision)
    if request.local_dir is None:
        memory = request.cache_dir / repo.folder_name
    else:
        memory = request.local_dir / ".cache" / "huggingface"
    listed = tree.read_listing(memory, commit)
    files = remote.files_of(access, repo, commit) if listed is None else listed
    selected = remote.select(files, request.allow, request.ignore)
    return Listing(commit=commit, files=selected, is_on_disk=listed is not None)


def _one_file(request: Request, path: str) -> Listing:
    if request.local_dir is None and not request.force and tree.is_commit(request.revision):
        file = _cached_file(request, path)
        if file is not None:
            return Listing(commit=request.revision, files=[file], is_on_disk=True)
    found = remote.announced_file(request.access, request.repo, request.revision, path)
    if found is None:  # huggingface_hub will say what is missing
        commit = remote.commit_of(request.access, request.repo, request.revision)
        file = RemoteFile(path=path, size=None, etag="")
    else:
        commit, file = found
    return Listing(commit=commit, files=[file], is_on_disk=True)


def _cached_file(request: Request, path: str) -> RemoteFile | None:
    """Return a file of a commit that the HF cache has already: no request is needed."""
    remote.refuse_unsafe(request.repo, path)
    folder = request.cache_dir / request.repo.folder_name
    pointer = tree.pointer(folder, request.revision, path)
    blob = tree.blob_behind(pointer)
    if blob is None or not os.path.isfile(pointer):
        return None
    return RemoteFile(path=path, size=os.stat(pointer).st_size, etag=blob.name)


class _Planning:
    """Decides for the files of one request."""

    def __init__(self, store: Store | None, request: Request, target: Target) -> None:
        self._store = store
        self._request = request
        self._target = target
        self._near = None if store is None else near_store(store, target.root)
        settings = load_settings() if store is None else store.settings
        self._min_size = settings.link_min_size
        self._is_local = isinstance(target, LocalTarget)
        self.warnings: list[str] = []

    def plan(self, files: list[RemoteFile], look: Look | None) -> tuple[PlannedFile, ...]:
        """Return the plan of each file, in the Hub's order."""
        return tuple(self._from_tiers(self._from_here(files, look)))

    def _from_here(self, files: list[RemoteFile], look: Look | None) -> list[PlannedFile]:
        """Plan to take what is at the target, and large files from where this machine has them."""
        seen = {} if self._request.force else self._target.look_all(files, self._min_size)
        nothing = (None, False)
        plans = [self._from_target(file, *seen.get(file.path, nothing)) for file in files]
        weights = [each.found for each in plans if each.found is not None and each.is_weight]
        known = self._known_hashes(weights)
        plans = [_compared(each, known) for each in plans]
        if seen and isinstance(self._target, CacheTarget):
            plans = self._from_elsewhere(plans, self._target)
        is_missing = [each.is_large and each.source == "fetch" for each in plans]
        store, request = self._store, self._request
        if (store is None and not request.also) or request.force or not any(is_missing):
            return plans
        if self._near is not None:
            plans = [self._from_store(each, self._near, self._by_link(each)) for each in plans]
        if look is not None and any(each.is_large and each.source == "fetch" for each in plans):
            look()
        sources = Sources(store, request.cache_dir, self._target.root, also=request.also)
        return [self._from_machine(each, sources, store) for each in plans]

    def _from_tiers(self, plans: list[PlannedFile]) -> list[PlannedFile]:
        """Plan to take what would be fetched from a tier that has it: large files and small ones.

        Small ones too, because a tier may be near and the Hub far, or not to be reached.
        """
        store, missing = self._store, [each for each in plans if self._may_come(each)]
        if store is None or self._request.force or not missing or not store.tiers:
            return plans
        from smartcache.hub.tiered import pushed_objects

        offers = pushed_objects(store, self._request.repo)
        # Another repo may have brought the same weights there.
        wanted = {
            each.file.etag: Wanted(algorithm=algorithm, value=value, size=each.file.size)
            for each in missing
            if each.is_large and each.file.etag not in offers
            for algorithm, value in each.file.announced.items()
        }
        found = store.find_in_tiers(set(wanted.values()))
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
        is_free = planned.is_large or not self._is_local
        return is_free or not os.path.lexists(self._target.visible(planned.file))

    def _known_hashes(self, paths: Iterable[Path]) -> dict[Path, dict[Algorithm, str]]:
        store = self._near or self._store
        return {} if store is None else store.known_hashes(paths)

    def _from_target(self, file: RemoteFile, found: Path | None, is_visible: bool) -> PlannedFile:  # noqa: FBT001
        is_large = file.is_large(self._min_size)
        return PlannedFile(
            file=file, source="fetch" if found is None else "present", found=found,
            is_proven=found is not None and (is_visible or not self._is_local),
            is_visible=is_visible, is_large=is_large,
            is_weight=is_large and file.is_weight(self._min_size),
        )  # fmt: skip

    def _by_link(self, planned: PlannedFile) -> Source:
        """Return what placing a near blob means: a link, or where that is not safe, a copy."""
        kinds = self._target.kinds(is_weight=planned.is_weight)
        return "link" if kinds[0] == "auto" else "copy"

    def _from_elsewhere(self, plans: list[PlannedFile], target: CacheTarget) -> list[PlannedFile]:
        """Believe pointers to blobs of another name whose bytes are known to be right.

        Behind some mirrors a blob is not named by the hash that the listing has.
        """
        others = {
            each.file.path: path
            for each in plans
            if each.found is None and (path := target.elsewhere(each.file)) is not None
        }
        known = self._known_hashes(others.values()) if others else {}

        def judged(each: PlannedFile) -> PlannedFile:
            path = others.get(each.file.path)
            values = {} if path is None else known.get(path, {})
            if not values or not values.items() >= each.file.announced.items():
                return each
            return replace(each, source="present", found=path, is_proven=True, is_visible=True)

        return [judged(each) for each in plans]

    def _from_store(self, planned: PlannedFile, store: Store, source: Source) -> PlannedFile:
        if not planned.is_large or planned.source != "fetch":
            return planned
        ((algorithm, value),) = planned.file.announced.items()
        blob = store.find_here(algorithm, value)
        return planned if blob is None else replace(planned, source=source, digest=blob.digest)

    def _from_machine(
        self, planned: PlannedFile, sources: Sources, store: Store | None
    ) -> PlannedFile:
        """Plan to take a near file, a blob of another volume, a far file, or a shared blob."""
        if not planned.is_large or planned.source != "fetch":
            return planned
        candidates, left_out = sources.candidates(planned.file)
        candidates = tuple(each for each in candidates if each.path != planned.found)
        if left_out:
            self.warnings.append(
                f"{planned.file.path}: {left_out} more files have its size and were not looked at"
            )
        if candidates and not candidates[0].is_far:
            return replace(planned, source="reuse", candidates=candidates)
        for each in () if store is None else store.stores():
            known = self._from_store(planned, each, "copy")
            if known.digest:
                return known
        if candidates:
            return replace(planned, source="copy", candidates=candidates)
        return planned if store is None else _from_others(planned, store)


def _from_others(planned: PlannedFile, store: Store) -> PlannedFile:
    """Plan to take a blob that another user has published, if there is one."""
    ((algorithm, value),) = planned.file.announced.items()
    for found in store.find_shared(algorithm, value, size=planned.file.size):
        return replace(planned, source="copy", shared=found.store.root)
    return planned


def _compared(planned: PlannedFile, known: dict[Path, dict[Algorithm, str]]) -> PlannedFile:
    """Return the plan of a file that is there after what is known of it; of texts, nothing is."""
    if planned.found is None or not planned.is_weight:
        return planned
    ((algorithm, wanted),) = planned.file.announced.items()
    value = known.get(planned.found, {}).get(algorithm)
    is_wrong = value not in (None, wanted)
    source: Source = "fetch" if is_wrong else "present"
    return replace(planned, source=source, is_proven=value == wanted)
