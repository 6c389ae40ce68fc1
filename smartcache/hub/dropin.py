"""`snapshot_download` and `hf_hub_download` with huggingface_hub's arguments, results and errors.

What can be planned is planned. Where the Hub cannot be asked (offline, no permission, no such repo,
a server that fails), huggingface_hub's own function is called with the caller's arguments: it
returns what the cache has or raises what its users expect.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

from smartcache.errors import SmartcacheError
from smartcache.hub import tree
from smartcache.hub.leftovers import prove_noted, prove_since
from smartcache.hub.plan import (
    DownloadPlan,
    Listing,
    Look,
    Request,
    fetch_listing,
    plan_listed,
    target_of,
)
from smartcache.hub.records import REPO_TYPES, PlannedFile, Repo, RepoType
from smartcache.hub.remote import Access
from smartcache.hub.unfinished import Unfinished
from smartcache.progress import Progress
from smartcache.store.store import Store

if TYPE_CHECKING:
    from huggingface_hub import DryRunFileInfo

_CLOCKS = 1.0
"""Seconds by which the times of files may be behind the clock."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of one of huggingface_hub's functions: its arguments, by name."""

    repo_id: str
    filename: str | None = None
    arguments: Mapping[str, object] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        """Whether the Hub is to be asked, for a type of repo that we know."""
        is_known = self.arguments.get("repo_type") in (None, *REPO_TYPES)
        return is_known and not self.arguments.get("local_files_only")

    def request(self) -> Request:
        """Return what is wanted."""
        a = self.arguments
        access = Access(**{name: a[name] for name in Access.__slots__ if a.get(name) is not None})  # type: ignore[arg-type]
        local_dir, cache_dir = a.get("local_dir"), a.get("cache_dir")
        subfolder = a.get("subfolder") or None
        filename = self.filename
        if filename is not None and subfolder is not None:
            filename = f"{subfolder}/{filename}"
        return Request(
            repo=Repo(cast("RepoType", a.get("repo_type") or "model"), self.repo_id),
            revision=cast("str", "main" if a.get("revision") is None else a["revision"]),
            cache_dir=tree.default_cache_dir() if cache_dir is None else _absolute(cache_dir),
            local_dir=None if local_dir is None else _absolute(local_dir),
            filename=filename,
            allow=cast("list[str] | None", a.get("allow_patterns")),
            ignore=cast("list[str] | None", a.get("ignore_patterns")),
            force=bool(a.get("force_download")),
            max_workers=cast("int", a.get("max_workers") or 8),
            access=access,
            tqdm_class=cast("type | None", a.get("tqdm_class")),
        )

    def delegate(self) -> object:
        """Let huggingface_hub's own function answer."""
        import huggingface_hub

        if self.filename is None:
            return huggingface_hub.snapshot_download(self.repo_id, **self.arguments)  # type: ignore[call-overload]
        return huggingface_hub.hf_hub_download(self.repo_id, self.filename, **self.arguments)  # type: ignore[call-overload]


def _absolute(path: object) -> Path:
    return Path(cast("str", path)).expanduser().resolve()


def download(
    store: Store, call: Call, *, look: Look | None = None, progress: Progress | None = None
) -> str:
    """Answer a call that is no dry run."""
    listing = _listing(call)
    if listing is None:
        return from_cache(store, call)
    return plan_listed(store, call.request(), listing, look=look).execute(progress=progress)


def from_cache(store: Store, call: Call) -> str:
    """Let huggingface_hub answer where the Hub cannot be asked: with what is there, or an error."""
    is_known = call.is_plain or bool(call.arguments.get("local_files_only"))
    began = time.time() - _CLOCKS
    try:
        path = str(call.delegate())
    except Exception:
        if is_known:
            _prove_left_behind(store, call, None, began)
        raise
    if is_known:
        _prove_left_behind(store, call, Path(path), began)
    return path


def dry_run(store: Store, call: Call, *, look: Look | None = None) -> list[DryRunFileInfo]:
    """Answer a dry run: what would be downloaded, after what this machine has elsewhere."""
    listing = _listing(call)
    if listing is None:
        answer = call.delegate()
        return answer if isinstance(answer, list) else [cast("DryRunFileInfo", answer)]
    plan = plan_listed(store, call.request(), listing, look=look)
    return [_info(plan, each) for each in plan.files]


def _listing(call: Call) -> Listing | None:
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
        is_cached=planned.source == "present",
        will_download=planned.source == "fetch",
    )


def _is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _prove_left_behind(store: Store, call: Call, path: Path | None, began: float) -> None:
    """Prove the files of a snapshot or folder that a killed download has left unproven.

    And those that came since this call `began`: a Hub that did not answer us may have answered
    huggingface_hub a moment later. `path` is what huggingface_hub returned; None if it raised.
    """
    request = call.request()
    commit: str | None = ""
    if request.local_dir is None:
        folder = request.cache_dir / request.repo.folder_name
        if path is None:
            is_commit = tree.is_commit(request.revision)
            ref = folder / "refs" / request.revision
            commit = str(request.revision) if is_commit else tree.read_ref(ref)
        elif folder / "snapshots" in path.parents:
            commit = path.relative_to(folder / "snapshots").parts[0]
        else:
            commit = None
    if commit is None:
        return
    target = target_of(request, commit)
    unfinished = Unfinished(store, target.root)
    notes = unfinished.left_behind()
    if call.is_plain and not _is_offline():
        prove_since(store, target, began, only=request.filename)
    prove_noted(store, target, notes)
    unfinished.forget(notes)
