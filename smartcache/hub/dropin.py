"""`snapshot_download` and `hf_hub_download` with huggingface_hub's arguments, results and errors.

What can be planned is planned. Where the Hub cannot be asked (offline, no permission, no such repo,
a server that fails), huggingface_hub's own function is called with the caller's arguments: it
returns what the cache has or raises what its users expect. So it is where somebody asks for
something that only huggingface_hub knows: an argument of another version, a type of repo. What the
cache does not have then may come from a tier.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

from smartcache.errors import DigestMismatchError, SmartcacheError, UnsafeNameError
from smartcache.hub import REPO_TYPES, RepoType, asides, patches, tree
from smartcache.hub.leftovers import Look as FileLook
from smartcache.hub.leftovers import looks_at, prove_new, prove_noted
from smartcache.hub.outcome import Watch, log_changes
from smartcache.hub.plan import (
    DownloadPlan,
    Listing,
    Look,
    Request,
    fetch_listing,
    plan_listed,
    target_of,
)
from smartcache.hub.records import PlannedFile, Repo
from smartcache.hub.remote import Access
from smartcache.hub.tiered import pull_without_hub
from smartcache.hub.unfinished import Unfinished
from smartcache.progress import Progress
from smartcache.store import Store

if TYPE_CHECKING:
    from huggingface_hub import DryRunFileInfo

_FROM_CACHE = {"local_files_only": True}
_log = logging.getLogger(__name__)


class Options(TypedDict, total=False):
    """What both functions take, under huggingface_hub's names and with its meaning."""

    repo_type: str | None
    revision: str | None
    cache_dir: str | Path | None
    local_dir: str | Path | None
    library_name: str | None
    library_version: str | None
    user_agent: dict[str, str] | str | None
    etag_timeout: float
    force_download: bool
    token: bool | str | None
    local_files_only: bool
    headers: dict[str, str] | None
    endpoint: str | None
    tqdm_class: type | None


class SnapshotOptions(Options, total=False):
    """What `snapshot_download` takes."""

    allow_patterns: list[str] | str | None
    ignore_patterns: list[str] | str | None
    max_workers: int


class FileOptions(Options, total=False):
    """What `hf_hub_download` takes."""

    subfolder: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of one of huggingface_hub's functions: its arguments, by name.

    UnsafeNameError for a file that cannot be one of a repo, because its name leads elsewhere.
    """

    repo_id: str
    filename: str | None = None
    arguments: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        path = self._path
        if path is None or not _leads_out(path):
            return
        message = f"{path!r} is not the name of a file in a repo"
        hint = "Name the file as the Hub shows it, such as vae/config.json."
        raise UnsafeNameError(message, hint=hint, path=path)

    @property
    def is_plain(self) -> bool:
        """Whether the Hub is to be asked, for a type of repo and a name as we know them."""
        is_known = self.arguments.get("repo_type") in (None, *REPO_TYPES)
        # Some are harmless, but not as the Hub writes them: "./a", "a//b", "".
        is_odd = self._path is not None and tree.safe_parts(self._path) is None
        return is_known and not is_odd and not self.arguments.get("local_files_only")

    @property
    def is_known(self) -> bool:
        """Whether we know the meaning of all arguments."""
        options = SnapshotOptions if self.filename is None else FileOptions
        return self.arguments.keys() <= options.__optional_keys__

    @property
    def _path(self) -> str | None:
        """The path of the one file in the repo."""
        subfolder = self.arguments.get("subfolder")
        is_below = self.filename is not None and subfolder
        return f"{subfolder}/{self.filename}" if is_below else self.filename

    def heard(self) -> Call:
        """Return the call as huggingface_hub's function hears it.

        Arguments of old are left out, of which it has warned now; what it says of a repo_id is
        said.
        """
        from huggingface_hub.utils import validate_hf_hub_args  # type: ignore[attr-defined]

        @validate_hf_hub_args
        @wraps(self._function)
        def heard(*_: str, **arguments: object) -> dict[str, object]:
            return arguments

        return replace(self, arguments=heard(self.repo_id, **self.arguments))

    def request(self) -> Request:
        """Return what is wanted."""
        a = self.arguments
        access = Access(**{name: a[name] for name in Access.__slots__ if a.get(name) is not None})  # type: ignore[arg-type]
        local_dir, cache_dir = a.get("local_dir"), a.get("cache_dir")
        return Request(
            repo=Repo(cast("RepoType", a.get("repo_type") or "model"), self.repo_id),
            revision=cast("str", "main" if a.get("revision") is None else a["revision"]),
            cache_dir=tree.default_cache_dir() if cache_dir is None else _absolute(cache_dir),
            local_dir=None if local_dir is None else _absolute(local_dir),
            filename=self._path,
            allow=cast("list[str] | None", a.get("allow_patterns")),
            ignore=cast("list[str] | None", a.get("ignore_patterns")),
            force=bool(a.get("force_download")),
            max_workers=8 if a.get("max_workers") is None else cast("int", a["max_workers"]),
            access=access,
            tqdm_class=cast("type | None", a.get("tqdm_class")),
        )

    def delegate(self) -> object:
        """Let huggingface_hub's own function answer."""
        words = (self.repo_id,) if self.filename is None else (self.repo_id, self.filename)
        with patches.answered_within(cast("float | None", self.arguments.get("etag_timeout"))):
            return self._function(*words, **self.arguments)

    @property
    def _function(self) -> Callable[..., object]:
        import huggingface_hub

        if self.filename is None:
            return huggingface_hub.snapshot_download
        return huggingface_hub.hf_hub_download


def _leads_out(path: str) -> bool:
    """Say whether a name leads out of the folder of a repo, on any system."""
    parts = re.split(r"[/\\]", path)
    is_absolute = path[:1] in ("/", "\\") or re.match(r"[A-Za-z]:", path) is not None
    return is_absolute or ".." in parts or "\0" in path


def _absolute(path: object) -> Path:
    return Path(cast("str", path)).expanduser().resolve()


def download(
    store: Store, call: Call, *, look: Look | None = None, progress: Progress | None = None
) -> str:
    """Answer a call that is no dry run."""
    listing = listing_of(call)
    if listing is None:
        return from_cache(store, call)
    result = plan_listed(store, call.request(), listing, look=look).execute(progress=progress)
    log_changes(call.repo_id, result, store)
    return result.path


def from_cache(store: Store, call: Call) -> str:
    """Let huggingface_hub answer where the Hub cannot be asked: with what is there, or an error."""
    if not (call.is_plain or call.arguments.get("local_files_only")):
        return str(call.delegate())
    request = call.request()
    before: dict[str, FileLook] | None = None
    if call.is_plain and not _is_offline():
        # A Hub that did not answer us may answer huggingface_hub a moment later.
        before = looks_at(target_of(request, ""))
    try:
        try:
            path = str(call.delegate())
        except Exception:
            if not call.is_plain or not pull_without_hub(store, request):
                raise
            path = str(replace(call, arguments={**call.arguments, **_FROM_CACHE}).delegate())
    except Exception:
        _prove_what_came(store, request, None, before)
        raise
    _prove_what_came(store, request, Path(path), before)
    return path


def dry_run(store: Store | None, call: Call, *, look: Look | None = None) -> object:
    """Answer a dry run: what would be downloaded, after what this machine has elsewhere.

    Without a store, that is nothing; and none is made.
    """
    listing = listing_of(call)
    if listing is None:
        return call.delegate()
    plan = plan_listed(store, call.request(), listing, look=look)
    infos = [_info(plan, each) for each in plan.files]
    return infos if call.filename is None else infos[0]


def listing_of(call: Call) -> Listing | None:
    """Ask the Hub for commit and files; None: it cannot be asked, or does not answer."""
    if not call.is_plain:
        return None
    try:
        return fetch_listing(call.request())
    except SmartcacheError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, huggingface_hub will meet it too
        _log.debug("%s is left to huggingface_hub: %s", call.repo_id, error)
        return None


def _info(plan: DownloadPlan, planned: PlannedFile) -> DryRunFileInfo:
    from huggingface_hub import DryRunFileInfo

    return DryRunFileInfo(
        commit_hash=plan.commit,
        file_size=planned.file.size,
        filename=planned.file.path,
        local_path=str(plan.target.visible(planned.file)),
        is_cached=planned.source == "present" or os.path.isfile(plan.target.visible(planned.file)),
        will_download=planned.source == "fetch",
    )


def _is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _prove_what_came(
    store: Store, request: Request, path: Path | None, before: dict[str, FileLook] | None
) -> None:
    """Prove what killed downloads have left unproven, and what huggingface_hub has just brought.

    `path` is what huggingface_hub returned; None if it raised. `before` are the files there were;
    None: nothing can have come. Only wrong bytes are an error here.
    """
    commit = commit_behind(request, path)
    if commit is None:
        return
    target = target_of(request, commit)
    unfinished = Unfinished(store, target.root)
    notes = unfinished.notes()
    watch = Watch(is_new=lambda _: True)  # nobody but a download has had these files
    try:
        asides.give_back(store)
        with watch.batches(store, "download"):
            if before is not None:
                prove_new(store, target, before, only=request.filename)
            prove_noted(store, target, notes)
    except DigestMismatchError:
        raise
    except (SmartcacheError, OSError) as error:
        _log.warning("not every file of %s could be compared: %s", request.repo, error)
        return
    unfinished.forget(notes)
    log_changes(request.repo, watch.changes(), store)


def has_snapshot(request: Request) -> bool:
    """Say whether the HF cache has the revision, all of it or some."""
    commit = commit_behind(request, None)
    folder = request.cache_dir / request.repo.folder_name / "snapshots"
    return bool(commit) and (folder / str(commit)).is_dir()


def commit_behind(request: Request, path: Path | None) -> str | None:
    """Return the commit of a snapshot; None if there is none, "" for a `local_dir`."""
    if request.local_dir is not None:
        return ""
    folder = request.cache_dir / request.repo.folder_name
    if path is None:
        revision = str(getattr(request.revision, "resolved", request.revision))
        ref = folder / "refs" / revision
        return revision if tree.is_commit(revision) else tree.read_ref(ref)
    snapshots = folder / "snapshots"
    return path.relative_to(snapshots).parts[0] if snapshots in path.parents else None
