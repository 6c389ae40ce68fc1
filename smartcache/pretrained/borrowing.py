"""The loan around a library's call: known blobs are at hand before it, what came is proven after.

Libraries load parts of a model through the same functions: what they call themselves, inside of a
call that has a loan already, goes straight through.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path

from smartcache.cache import SmartCache
from smartcache.config import remotes_file
from smartcache.errors import NoSpaceError, SmartcacheError, StoreUnwritableError
from smartcache.functions import shared
from smartcache.hub.dropin import Call
from smartcache.hub.lending import Purpose
from smartcache.pretrained.arguments import Asked

_log = logging.getLogger(__name__)
_said: set[str] = set()
_inside: ContextVar[bool] = ContextVar("smartcache_inside", default=False)


def is_inside() -> bool:
    """Say whether this thread is in a library's call that smartcache attends to."""
    return _inside.get()


@contextmanager
def inside() -> Iterator[None]:
    """Let the library's own calls in this block go straight through."""
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)


def pinned(asked: Asked) -> Asked:
    """Return the same call with the commit of its revision known."""
    is_known = asked.is_pipeline or asked.is_model
    return replace(asked, kwargs=pin(asked.source, asked.kwargs)) if is_known else asked


def pin(source: str, arguments: Mapping[str, object]) -> dict[str, object]:
    """Return a library's arguments with the commit of the revision in them, asked for once.

    huggingface_hub and both libraries pass such a revision around, so that all of them see one
    commit and none asks again. What fails is left to the library, which knows what to say; but a
    tier may have the repo, where the Hub cannot be asked: then it is in the HF cache afterwards.
    """
    import huggingface_hub

    resolve = getattr(huggingface_hub, "resolve_revision", None)  # from 2.x on
    if resolve is None or not source or os.path.exists(source) or not _is_repo(source):
        return dict(arguments)
    known = ("revision", "cache_dir", "token")
    options = {name: arguments[name] for name in known if name in arguments}
    is_local = bool(arguments.get("local_files_only"))
    try:
        revision = resolve(source, local_files_only=is_local, **options)
    except Exception as error:  # noqa: BLE001 - whatever it is, the library will meet it too
        _log.debug("the revision of %s is left to the library: %s", source, error)
        if not is_local:
            _pull_instead(source, arguments)
        return dict(arguments)
    return {**arguments, "revision": revision}


def _pull_instead(source: str, arguments: Mapping[str, object]) -> None:
    """Let a repo that the HF cache does not know come from a tier, if there is one that has it."""
    cache = open_cache() if remotes_file().exists() else None
    if cache is None:
        return
    known = ("revision", "cache_dir")
    options = {name: arguments[name] for name in known if arguments.get(name) is not None}
    subfolder = arguments.get("subfolder")
    if subfolder:
        options["allow_patterns"] = [f"{subfolder}/*"]
    try:
        cache.pull_instead(Call(repo_id=source, arguments=options))
    except (SmartcacheError, OSError) as error:
        _log.warning("%s does not come from a tier: %s", source, error)


@contextmanager
def borrowed(asked: Asked) -> Iterator[str]:
    """Lend known blobs to the library's call in this block; prove and share what it fetched.

    Gives the commit that is loaded; "" for a folder, or if the Hub does not say. Where the store
    cannot be used a warning says so, and the library does everything by itself.
    """
    with inside():
        # Of small files nothing can be lent, unless a tier has them.
        is_lent = asked.has_weights or remotes_file().exists()
        cache = open_cache() if is_lent and asked.source else None
        if cache is None or (not asked.is_local and not _is_repo(asked.source)):
            yield ""
        elif asked.is_local:
            look_for_damage(cache, Path(asked.source) / asked.subfolder)
            yield ""
        else:
            with cache.lending(asked.call(), _purpose(asked)) as commit:
                yield commit


def look_for_damage(cache: SmartCache, path: Path) -> None:
    """Warn of files that are links to blobs and were written to; their blobs are set aside."""
    try:
        cache.look_for_damage(path)
    except (SmartcacheError, OSError) as error:
        _log.warning("links in %s could not be looked at: %s", path, error)


def _purpose(asked: Asked) -> Purpose:
    variant = asked.kwargs.get("variant")
    return Purpose(
        text=asked.purpose,
        inside="" if asked.is_pipeline else asked.subfolder,
        variant=variant if isinstance(variant, str) else "",
        has_weights=asked.is_pipeline or asked.is_model,
    )


def open_cache() -> SmartCache | None:
    """Return the cache of this process; None, with a warning, if its store cannot be used."""
    try:
        return shared()
    except (StoreUnwritableError, NoSpaceError) as error:
        _warn_once(f"smartcache is not used: {error}")
        return None


def _warn_once(text: str) -> None:
    """Warn; one load asks for the cache several times."""
    if text not in _said:
        _said.add(text)
        _log.warning("%s", text)


def _is_repo(text: str) -> bool:
    """Say whether a text can name a repo; of any other the library knows what to say."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return True
