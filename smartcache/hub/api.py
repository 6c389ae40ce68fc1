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

from smartcache.errors import SmartcacheError, UnsafeNameError
from smartcache.hub import REPO_TYPES, RepoType, layout, patches, remote
from smartcache.hub.answering import Serving, prove_there
from smartcache.hub.outcome import Watch, log_changes
from smartcache.hub.places import CachePlace
from smartcache.hub.plan import (
    DownloadPlan,
    Listing,
    Look,
    Request,
    commit_behind,
    fetch_listing,
    plan_listed,
)
from smartcache.hub.records import PlannedFile, RemoteFile, Repo
from smartcache.hub.remote import Access
from smartcache.progress import Progress
from smartcache.store.store import Store

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
        is_odd = self._path is not None and layout.safe_parts(self._path) is None
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
        revision = "main" if a.get("revision") is None else a["revision"]
        return Request(
            repo=Repo(cast("RepoType", a.get("repo_type") or "model"), self.repo_id),
            # A ResolvedRevision is a commit, and moves no branch.
            revision=cast("str", getattr(revision, "resolved", revision)),
            cache_dir=layout.default_cache_dir() if cache_dir is None else _absolute(cache_dir),
            local_dir=None if local_dir is None else _absolute(local_dir),
            filename=self._path,
            allow=cast("list[str] | None", a.get("allow_patterns")),
            ignore=cast("list[str] | None", a.get("ignore_patterns")),
            force=bool(a.get("force_download")),
            is_local=bool(a.get("local_files_only")),
            max_workers=8 if a.get("max_workers") is None else cast("int", a["max_workers"]),
            access=access,
            tqdm_class=cast("type | None", a.get("tqdm_class")),
        )

    def delegate(self) -> object:
        """Let huggingface_hub's own function answer."""
        words = (self.repo_id,) if self.filename is None else (self.repo_id, self.filename)
        patches.apply()
        return self._function(*words, **self.arguments)

    @property
    def _function(self) -> Callable[..., object]:
        import huggingface_hub

        if self.filename is None:
            return huggingface_hub.snapshot_download
        return huggingface_hub.hf_hub_download

    def download(
        self, store: Store, *, look: Look | None = None, progress: Progress | None = None
    ) -> str:
        """Answer a call that is no dry run; return the path."""
        listing = self.listing()
        if listing is None:
            return self.from_cache(store)
        result = plan_listed(store, self.request(), listing, look=look).execute(progress=progress)
        log_changes(self.repo_id, result, store)
        return result.path

    def from_cache(self, store: Store) -> str:
        """Let huggingface_hub answer where the Hub cannot be asked: with what is there, or raise.

        A Hub that did not answer us may answer huggingface_hub a moment later: what it brings is
        proven, and so are weights that were there and that nobody has proven yet.
        """
        if not (self.is_plain or self.arguments.get("local_files_only")):
            return str(self.delegate())
        request = self.request()
        watch = Watch(is_new=lambda _: True)
        serving = Serving(lambda: (store, None), watch=watch)
        with watch.batch_of(store, "download"), patches.answering(serving.answer):
            try:
                path = str(self.delegate())
            except Exception:
                from smartcache.hub.care.tiered import pull_without_hub

                if not self.is_plain or not pull_without_hub(store, request):
                    raise
                path = str(replace(self, arguments={**self.arguments, **_FROM_CACHE}).delegate())
            commit = commit_behind(request, Path(path))
            if commit and request.local_dir is None:
                place = CachePlace(cache_dir=request.cache_dir, repo=request.repo, commit=commit)
                prove_there(store, place, "", watch, is_final=True, only=request.filename)
        log_changes(request.repo, watch.changes(), store)
        return path

    def dry_run(self, store: Store | None, *, look: Look | None = None) -> object:
        """Answer a dry run: what would be downloaded, after what this machine has elsewhere.

        Without a store, that is nothing; and none is made.
        """
        listing = self.listing()
        if listing is None:
            return self.delegate()
        plan = plan_listed(store, self.request(), listing, look=look)
        infos = [_info(plan, each) for each in plan.files]
        return infos if self.filename is None else infos[0]

    def listing(self) -> Listing | None:
        """Ask the Hub for commit and files; None: it cannot be asked, or names no hash."""
        if not self.is_plain:
            return None
        try:
            listing = fetch_listing(self.request())
        except SmartcacheError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, huggingface_hub will meet it too
            _log.debug("%s is left to huggingface_hub: %s", self.repo_id, error)
            return None
        has_hash = self.filename is None or listing.files[0].announced
        return listing if has_hash else None

    def all_files(self) -> list[RemoteFile]:
        """Return all files of the revision, whatever is selected; the Hub's errors pass."""
        request = self.request()
        commit = remote.commit_of(request.access, request.repo, request.revision)
        return remote.files_of(request.access, request.repo, commit)


def _leads_out(path: str) -> bool:
    """Say whether a name leads out of the folder of a repo, on any system."""
    parts = re.split(r"[/\\]", path)
    is_absolute = path[:1] in ("/", "\\") or re.match(r"[A-Za-z]:", path) is not None
    return is_absolute or ".." in parts or "\0" in path


def _absolute(path: object) -> Path:
    return Path(cast("str", path)).expanduser().resolve()


def _info(plan: DownloadPlan, planned: PlannedFile) -> DryRunFileInfo:
    from huggingface_hub import DryRunFileInfo

    return DryRunFileInfo(
        commit_hash=plan.commit,
        file_size=planned.file.size,
        filename=planned.file.path,
        local_path=str(plan.place.visible(planned.file)),
        is_cached=planned.source == "present" or os.path.isfile(plan.place.visible(planned.file)),
        will_download=planned.source == "fetch",
    )
