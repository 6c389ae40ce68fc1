"""The functions of the package, for programs that want no object: they share one `SmartCache`.

`snapshot_download` and `hf_hub_download` have huggingface_hub's arguments, results and errors, so
that the import is all that changes in a program.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack, overload

from smartcache.cache import SmartCache
from smartcache.config import Settings, load_settings
from smartcache.errors import NoSpaceError, StoreUnwritableError
from smartcache.hub.dropin import Call

if TYPE_CHECKING:
    from huggingface_hub import DryRunFileInfo

    from smartcache.hub.mapping import CacheMapping
    from smartcache.hub.plan import DownloadPlan

_log = logging.getLogger(__name__)
_gate = threading.Lock()
_open: dict[tuple[int, Settings], tuple[SmartCache, tuple[int, int] | None]] = {}


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


def shared() -> SmartCache:
    """Return the open SmartCache of this process for the settings in force; it is never closed."""
    key = (os.getpid(), load_settings())
    with _gate:
        cache, file = _open.get(key, (None, None))
        if cache is None or file is None or file != _index_file(cache):
            cache = SmartCache(settings=key[1])
            _open[key] = cache, _index_file(cache)
        return cache


def _index_file(cache: SmartCache) -> tuple[int, int] | None:
    """Return which file the index is now; None: the store was moved away or removed."""
    try:
        st = os.stat(cache.store.volume.layout.index)
    except OSError:
        return None
    return st.st_dev, st.st_ino


@overload
def snapshot_download(
    repo_id: str, *, dry_run: Literal[False] = False, **options: Unpack[SnapshotOptions]
) -> str: ...


@overload
def snapshot_download(
    repo_id: str, *, dry_run: Literal[True], **options: Unpack[SnapshotOptions]
) -> list[DryRunFileInfo]: ...


def snapshot_download(
    repo_id: str, *, dry_run: bool = False, **options: Unpack[SnapshotOptions]
) -> str | list[DryRunFileInfo]:
    """Download the files of a repo, but none that this machine has; return the snapshot's path.

    As `huggingface_hub.snapshot_download`; the result is its cache, or `local_dir`.
    """
    arguments = _known("snapshot_download", SnapshotOptions, dict(options))
    if dry_run:
        call = Call(repo_id=repo_id, arguments={**arguments, "dry_run": True})
        return shared().dry_run(call)
    return _download(Call(repo_id=repo_id, arguments=arguments))


@overload
def hf_hub_download(
    repo_id: str,
    filename: str,
    *,
    dry_run: Literal[False] = False,
    **options: Unpack[FileOptions],
) -> str: ...


@overload
def hf_hub_download(
    repo_id: str, filename: str, *, dry_run: Literal[True], **options: Unpack[FileOptions]
) -> DryRunFileInfo: ...


def hf_hub_download(
    repo_id: str, filename: str, *, dry_run: bool = False, **options: Unpack[FileOptions]
) -> str | DryRunFileInfo:
    """Download one file of a repo, unless this machine has it; return its path.

    As `huggingface_hub.hf_hub_download`.
    """
    arguments = _known("hf_hub_download", FileOptions, dict(options))
    if dry_run:
        dry = {**arguments, "dry_run": True}
        return shared().dry_run(Call(repo_id=repo_id, filename=filename, arguments=dry))[0]
    return _download(Call(repo_id=repo_id, filename=filename, arguments=arguments))


def _download(call: Call) -> str:
    """Answer a call; where no store can be used, huggingface_hub does, as without smartcache."""
    try:
        cache = shared()
    except (StoreUnwritableError, NoSpaceError) as error:
        _log.warning("smartcache is not used: %s", error)
        return str(call.delegate())
    return cache.download(call)


def plan_download(repo_id: str, **options: Unpack[SnapshotOptions]) -> DownloadPlan:
    """Plan a `snapshot_download`: for each file where its bytes come from; `execute` does it."""
    arguments = _known("plan_download", SnapshotOptions, dict(options))
    return shared().plan_download(Call(repo_id=repo_id, arguments=arguments))


def cache_mapping() -> CacheMapping:
    """Return {sha256: path} of everything known on this machine, as a read-only mapping."""
    return shared().cache_mapping()


def _known(function: str, names: type, options: dict[str, object]) -> Mapping[str, object]:
    for name in options:
        if name not in names.__annotations__ and name not in Options.__annotations__:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    return options
