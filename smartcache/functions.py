"""The functions of the package, for programs that want no object: they share one `SmartCache`.

`snapshot_download` and `hf_hub_download` have huggingface_hub's arguments, results and errors, so
that the import is all that changes in a program. What they do not know goes through to it.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Unpack, cast, overload

from smartcache.cache import SmartCache
from smartcache.config import Settings, load_settings
from smartcache.errors import NoSpaceError, SmartcacheError, StoreUnwritableError
from smartcache.hub import Call, FileOptions, SnapshotOptions
from smartcache.store.layout import Layout
from smartcache.store.store import Store

if TYPE_CHECKING:
    from huggingface_hub import DryRunFileInfo

    from smartcache.hub import CacheMapping, DownloadPlan

_log = logging.getLogger(__name__)
_gate = threading.Lock()
_open: dict[tuple[int, Settings], tuple[SmartCache, tuple[int, int] | None]] = {}


def shared() -> SmartCache:
    """Return the open SmartCache of this process for the settings in force; it is never closed."""
    key = (os.getpid(), load_settings())
    with _gate:
        cache, file = _open.get(key, (None, None))
        if cache is None or file is None or file != _index_file(cache):
            cache = SmartCache(settings=key[1])
            _ = cache.store.catalog  # opened now: where it cannot be, the caller hears of it here
            _open[key] = cache, _index_file(cache)
        return cache


def _index_file(cache: SmartCache) -> tuple[int, int] | None:
    """Return which file the index is now; None: the store was moved away or removed."""
    try:
        st = os.stat(cache.store.layout.index)
    except OSError:
        return None
    return st.st_dev, st.st_ino


def answering() -> AbstractContextManager[object]:
    """Let every download of huggingface_hub in this process be answered from the store.

    In the `with` block, in all threads. Where no store can be used, nothing is answered.
    """
    from smartcache.hub import serving

    return serving(_to_serve)


def _to_serve() -> tuple[Store, Callable[[], None]] | None:
    try:
        cache = shared()
    except (SmartcacheError, OSError) as error:
        _warn_once(f"smartcache is not used: {error}")
        return None
    return cache.store, cache.look_again


@functools.lru_cache(maxsize=100)
def _warn_once(text: str) -> None:
    _log.warning("%s", text)


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
    call = Call(repo_id=repo_id, arguments=dict(options))
    return cast("str | list[DryRunFileInfo]", _answer(call, dry_run=dry_run))


@overload
def hf_hub_download(
    repo_id: str, filename: str, *, dry_run: Literal[False] = False, **options: Unpack[FileOptions]
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
    if not isinstance(filename, str):
        raise TypeError(f"filename must be a str, not {type(filename).__name__}")
    call = Call(repo_id=repo_id, filename=filename, arguments=dict(options))
    return cast("str | DryRunFileInfo", _answer(call, dry_run=dry_run))


def _answer(call: Call, *, dry_run: bool) -> object:
    """Answer a call; where no store can be used, huggingface_hub does, as without smartcache.

    It does, too, where we do not know an argument. A dry run makes no store.
    """
    call = call.heard()
    is_known = call.is_known
    if dry_run:
        call = replace(call, arguments={**call.arguments, "dry_run": True})
    if not is_known:
        return call.delegate()
    if dry_run and not _has_store():
        return call.dry_run(None)
    try:
        cache = shared()
    except (StoreUnwritableError, NoSpaceError) as error:
        _log.warning("smartcache is not used: %s", error)
        return call.delegate()
    return call.dry_run(cache.store, look=cache.look_again) if dry_run else cache.download(call)


def _has_store() -> bool:
    try:
        return Layout(load_settings().home).exists()
    except OSError:
        return True  # whoever opens it says what is wrong with it


def plan_download(
    repo_id: str, *, also: Iterable[str | Path] = (), **options: Unpack[SnapshotOptions]
) -> DownloadPlan:
    """Plan a `snapshot_download`: for each file where its bytes come from; `execute` does it.

    Files are sought in known folders, and in those of `also`, for this download only.
    """
    call = Call(repo_id=repo_id, arguments=dict(options))
    if not call.is_known:
        unknown = ", ".join(sorted(options.keys() - SnapshotOptions.__optional_keys__))
        raise TypeError(f"plan_download() got an unexpected keyword argument: {unknown}")
    return shared().plan_download(call, also=also)


def cache_mapping() -> CacheMapping:
    """Return {sha256: path} of everything known on this machine, as a read-only mapping."""
    return shared().cache_mapping()


def _renew() -> None:
    """Begin with an open gate in a forked child: the thread that held it is not there."""
    global _gate  # noqa: PLW0603 - a lock cannot be opened by anybody but its owner
    _gate = threading.Lock()


os.register_at_fork(after_in_child=_renew)
